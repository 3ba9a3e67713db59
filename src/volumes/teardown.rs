//! Tearing down: after the last container of a pod has ended, its mounts are unmounted and its own
//! data is removed.

use std::ffi::CStr;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::error::VolumeError;
use super::kind::VolumeKeeper as _;
use super::manager::Volumes;
use super::{csi, empty_dir, mounts, operations, paths, sub_path};
use crate::model::ids::PodUid;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;
use crate::util::tree::{self, Leftover};

/// How long the end of a pod waits for the clean-up of devices, which then continues by itself.
const SWEEP: Duration = Duration::from_secs(2);
/// The time between tries after a failure.
const SWEEP_AGAIN: Duration = Duration::from_secs(30);

impl Volumes {
    /// Unmounts everything below the pod's volume directories, then removes the content of its
    /// emptyDirs and of the volumes whose content an agent made. The call is idempotent. Data of
    /// other volume types is never removed, only their empty mount points.
    ///
    /// # Errors
    /// [`VolumeError::LeftBehind`] names what could not be removed; the caller may retry later.
    pub fn tear_down(&self, uid: &PodUid, stop: &StopToken) -> Result<(), VolumeError> {
        let begun = Instant::now();
        self.progress().unmounting(uid, begun);
        let result = self.remove_all(uid, stop);
        self.removed(uid, &result, begun.elapsed());
        if result.is_ok() {
            self.kinds.forget(uid);
            *self.sweep_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            self.sweep_devices(stop);
        }
        result
    }

    fn remove_all(&self, uid: &PodUid, stop: &StopToken) -> Result<(), VolumeError> {
        let path = paths::pod(&self.settings.root_dir, uid)?;
        self.retries().forget(uid);
        self.actual().forget(uid);
        if self.operations.is_busy(uid) {
            // A running operation may mount a volume that would be removed here.
            return Err(VolumeError::Pending);
        }
        let dir = match paths::open_pod(&self.settings.root_dir, uid) {
            Ok(dir) => dir,
            Err(VolumeError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut left = Left::default();
        for (volume, error) in self.unmount(uid, &path, stop)? {
            left.add(volume, chain(&error));
        }
        left.check(paths::SUB_PATHS, sub_path::remove_targets(dir.as_fd()))?;
        left.check("volumeDevices", remove_device_links(dir.as_fd()))?;
        // Without a marker, a partly removed volume is set up again if its pod is created again.
        let markers = remove_markers(dir.as_fd(), stop);
        left.check("plugins", markers)?;
        match tree::open_at(dir.as_fd(), c"volumes") {
            Ok(volumes) => remove_volumes(volumes.as_fd(), &mut left, stop)?,
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(VolumeError::io("open", &path.join("volumes"))(errno)),
        }
        left.into_result()
    }

    /// Unmounts all mounts below the pod's directory, those of sub paths first: they are on top of
    /// the volumes. Their servers may not respond, so another thread does this.
    fn unmount(
        &self,
        uid: &PodUid,
        path: &Path,
        stop: &StopToken,
    ) -> Result<Vec<(String, VolumeError)>, VolumeError> {
        let table = mounts::read()?;
        let places = self.csi.places_of(uid);
        if mounts::below(&table, path).is_empty() && places.is_empty() {
            return Ok(Vec::new());
        }
        let csi = Arc::clone(&self.csi);
        let (pods, path) = (paths::pods(&self.settings.root_dir), path.to_owned());
        let (kinds, owner) = (Arc::clone(&self.kinds), uid.clone());
        let work = move |stop: &StopToken| {
            let mut failures = Vec::new();
            kinds.unmount_flex(&owner, stop)?;
            failures.extend(mounts::unmount_below(&pods, &path.join(paths::SUB_PATHS))?);
            for place in places {
                if let Err(error) = csi.tear_down(&place, stop) {
                    failures.push((format!("{}/{}", csi.directory(), place.spec_name), error));
                }
            }
            let volumes = path.join("volumes");
            // What a driver has mounted, only the driver unmounts.
            let own = volumes.join(csi.directory());
            failures.extend(mounts::unmount_below_except(&pods, &volumes, &own)?);
            Ok(failures)
        };
        self.operations.run(uid, operations::UNMOUNT, operations::LIMIT, stop, work)
    }
}

impl Volumes {
    /// Unmounts and detaches devices that no pod uses any more, if there are any. This does not hold
    /// up the end of a pod, and is repeated after a failure.
    pub(super) fn sweep_devices(&self, stop: &StopToken) {
        let mut next = self.sweep_at.lock().unwrap_or_else(PoisonError::into_inner);
        if next.is_none_or(|next| next > Instant::now()) {
            return;
        }
        *next = None;
        drop(next);
        if !self.kinds.has_devices() && !self.csi.has_volumes() {
            *self.unreleased.lock().unwrap_or_else(PoisonError::into_inner) = None;
            return;
        }
        let (kinds, csi) = (Arc::clone(&self.kinds), Arc::clone(&self.csi));
        let unreleased = Arc::clone(&self.unreleased);
        let work = move |stop: &StopToken| {
            let swept = kinds.sweep(stop);
            let released =
                csi.release_unused(stop).inspect_err(|error| log::warn!("CSI volume: {}", chain(error)));
            let result = released.and(swept);
            let mut last = unreleased.lock().unwrap_or_else(PoisonError::into_inner);
            match &result {
                Ok(()) => *last = None,
                Err(VolumeError::Stopping) => {}
                Err(error) => last.get_or_insert_with(|| (String::new(), Instant::now())).0 = chain(error),
            }
            drop(last);
            result
        };
        let result = self.operations.run(&PodUid::from("devices"), operations::UNMOUNT, SWEEP, stop, work);
        if result.is_err() {
            let again = Some(Instant::now() + SWEEP_AGAIN);
            *self.sweep_at.lock().unwrap_or_else(PoisonError::into_inner) = again;
        }
    }
}

/// Removes the links to block devices. What else is there is not changed.
fn remove_device_links(pod_dir: BorrowedFd<'_>) -> Result<(), Leftover> {
    let failed = |errno| Leftover::Entry { path: String::new(), errno };
    let devices = match tree::open_at(pod_dir, c"volumeDevices") {
        Ok(devices) => devices,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(errno)),
    };
    for plugin in tree::names(devices.as_fd()).map_err(failed)? {
        if plugin.to_bytes() == csi::DIRECTORY.as_bytes() {
            // A link that is left belongs to a device that its driver has not taken away.
            match rustix::fs::unlinkat(&devices, &*plugin, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => continue,
                Err(errno) => return Err(Leftover::Entry { path: csi::DIRECTORY.to_owned(), errno }),
            }
        }
        let Ok(dir) = tree::open_same_mount(devices.as_fd(), &plugin) else { continue };
        for name in tree::names(dir.as_fd()).map_err(failed)? {
            match rustix::fs::unlinkat(&dir, &*name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(Leftover::Entry { path: empty_dir::shown(&name), errno }),
            }
        }
        let _ = rustix::fs::unlinkat(&devices, &*plugin, AtFlags::REMOVEDIR);
    }
    let _ = rustix::fs::unlinkat(pod_dir, c"volumeDevices", AtFlags::REMOVEDIR);
    Ok(())
}

/// The volumes that could not be removed so far, and the first cause.
#[derive(Default)]
struct Left {
    volumes: Vec<String>,
    cause: Option<String>,
}

impl Left {
    fn add(&mut self, volume: String, cause: String) {
        if !self.volumes.contains(&volume) {
            self.volumes.push(volume);
        }
        self.cause.get_or_insert(cause);
    }

    fn check(&mut self, volume: &str, result: Result<(), Leftover>) -> Result<(), VolumeError> {
        match result {
            Ok(()) => Ok(()),
            Err(Leftover::Stopping) => Err(VolumeError::Stopping),
            Err(Leftover::Entry { path, errno }) => {
                let errno = std::io::Error::from(errno);
                self.add(volume.to_owned(), format!("cannot remove {volume}/{path}: {errno}"));
                Ok(())
            }
        }
    }

    fn into_result(self) -> Result<(), VolumeError> {
        match self.cause {
            None => Ok(()),
            Some(cause) => Err(VolumeError::LeftBehind { volumes: self.volumes, cause }),
        }
    }
}

fn remove_markers(pod_dir: BorrowedFd<'_>, stop: &StopToken) -> Result<(), Leftover> {
    let failed = |errno| Leftover::Entry { path: String::new(), errno };
    let plugins = match tree::open_at(pod_dir, c"plugins") {
        Ok(plugins) => plugins,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(errno)),
    };
    for name in tree::names(plugins.as_fd()).map_err(failed)? {
        if is_owned(&name) {
            tree::remove_at(plugins.as_fd(), &name, stop)?;
        }
    }
    Ok(())
}

fn remove_volumes(volumes: BorrowedFd<'_>, left: &mut Left, stop: &StopToken) -> Result<(), VolumeError> {
    let list = |dir: BorrowedFd<'_>, left: &mut Left, shown: &str| {
        tree::names(dir).unwrap_or_else(|errno| {
            left.add(shown.to_owned(), format!("cannot list {shown}: {}", std::io::Error::from(errno)));
            Vec::new()
        })
    };
    for plugin in list(volumes, left, "volumes") {
        let shown = empty_dir::shown(&plugin);
        let dir = match tree::open_same_mount(volumes, &plugin) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => continue,
            Err(errno) => {
                left.check(&shown, Err(Leftover::Entry { path: String::new(), errno }))?;
                continue;
            }
        };
        for name in list(dir.as_fd(), left, &shown) {
            let shown = format!("{shown}/{}", empty_dir::shown(&name));
            let result = if is_owned(&plugin) {
                tree::remove_at(dir.as_fd(), &name, stop)
            } else {
                remove_empty(dir.as_fd(), &name)
            };
            left.check(&shown, result)?;
        }
        // The directory is not empty if a volume could not be removed, which is reported above.
        let _ = rustix::fs::unlinkat(volumes, &*plugin, AtFlags::REMOVEDIR);
    }
    Ok(())
}

/// A mount point of a foreign volume type: removed if it is empty, else not changed.
fn remove_empty(parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Leftover> {
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(Leftover::Entry { path: String::new(), errno }),
    }
}

fn is_owned(plugin: &CStr) -> bool {
    paths::OWNED_CONTENT.iter().any(|owned| owned.as_bytes() == plugin.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::manager::{Deps, Settings};
    use super::*;
    use crate::model::event::EventSink;

    fn volumes(root: &Path) -> Volumes {
        let (events, _) = EventSink::new();
        let settings = Settings {
            root_dir: root.to_owned(),
            allocatable: Default::default(),
            plugin_dir: Default::default(),
            node: String::new(),
        };
        Volumes::new(settings, Deps { events, api: None, local: Default::default() })
    }

    #[test]
    fn teardown_removes_own_data_but_not_foreign_data() {
        let root = tempfile::tempdir().unwrap();
        let volumes = volumes(root.path());
        let uid = PodUid::from("u1");
        let pod = root.path().join("pods/u1");
        for dir in [
            "volumes/kubernetes.io~empty-dir/e/deep/er",
            "volumes/kubernetes.io~configmap/c/..data",
            "volumes/kubernetes.io~nfs/done",
            "plugins/kubernetes.io~empty-dir/e",
        ] {
            std::fs::create_dir_all(pod.join(dir)).unwrap();
        }
        std::fs::write(pod.join("plugins/kubernetes.io~empty-dir/e/ready"), "").unwrap();
        std::fs::write(pod.join("volumes/kubernetes.io~empty-dir/e/f"), "x").unwrap();
        volumes.tear_down(&uid, &StopToken::never()).unwrap();
        assert_eq!(std::fs::read_dir(pod.join("volumes")).unwrap().count(), 0);
        assert_eq!(std::fs::read_dir(pod.join("plugins")).unwrap().count(), 0);
        volumes.tear_down(&uid, &StopToken::never()).unwrap();

        let busy = pod.join("volumes/kubernetes.io~nfs/busy");
        std::fs::create_dir_all(&busy).unwrap();
        std::fs::write(busy.join("precious"), "x").unwrap();
        std::fs::create_dir_all(pod.join("volumes/kubernetes.io~empty-dir/e")).unwrap();
        let error = volumes.tear_down(&uid, &StopToken::never()).unwrap_err();
        assert!(
            error.to_string().starts_with("mounted volumes=[kubernetes.io~nfs/busy]: cannot remove"),
            "{error}"
        );
        assert!(busy.join("precious").exists());
        assert!(!pod.join("volumes/kubernetes.io~empty-dir").exists());
    }

    #[test]
    fn teardown_of_unknown_pod_succeeds() {
        let root = tempfile::tempdir().unwrap();
        volumes(root.path()).tear_down(&PodUid::from("never"), &StopToken::never()).unwrap();
        let climbing = volumes(root.path()).tear_down(&PodUid::from(".."), &StopToken::never());
        assert!(matches!(climbing, Err(VolumeError::Name { .. })));
    }
}
