//! Tearing down: after the last container of a pod has ended, its mounts are unmounted and its own
//! data is removed.

use std::ffi::CStr;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, select_biased};
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::csi::Csi;
use super::error::VolumeError;
use super::kind::VolumeLocation;
use super::manager::Volumes;
use super::mounts::{Mount, MountKind};
use super::operations::OperationScope;
use super::persistent::Kinds;
use super::{csi, empty_dir, group_marker, kind, mounts, operations, paths, sub_path, unmount};
use crate::model::ids::PodUid;
use crate::util::error_chain::chain;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads;
use crate::util::tree::{self, RemovalError};

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
            *self.sweep_at.locked() = Some(Instant::now());
            self.sweep_devices(stop);
            let waiting = self.retries().end_waits(Instant::now());
            waiting.iter().for_each(|pod| (self.waker.0)(pod));
        }
        result
    }

    fn remove_all(&self, uid: &PodUid, stop: &StopToken) -> Result<(), VolumeError> {
        let path = paths::pod(&self.settings.root_dir, uid)?;
        self.retries().forget(uid);
        self.actual().forget(uid);
        self.end_refreshes(uid);
        self.operations.prepare_removal(uid, stop)?;
        // An update that ended meanwhile has counted its files.
        self.actual().forget(uid);
        let dir = match paths::open_pod(&self.settings.root_dir, uid) {
            Ok(dir) => dir,
            Err(VolumeError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut left = UnremovedVolumes::default();
        for (volume, error) in self.unmount(uid, &path, stop)? {
            if matches!(error, VolumeError::Stopping) {
                return Err(error);
            }
            left.add(volume, chain(&error));
        }
        left.check(paths::SUB_PATHS, sub_path::remove_targets(dir.as_fd()))?;
        left.check("volumeDevices", remove_device_links(dir.as_fd()))?;
        // Without a marker, a partly removed volume is set up again if its pod is created again.
        let markers = remove_markers(dir.as_fd(), left.cause.is_none(), stop);
        left.check("plugins", markers)?;
        match tree::open_at(dir.as_fd(), c"volumes") {
            Ok(volumes) => remove_volumes(volumes.as_fd(), &mut left, stop)?,
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(VolumeError::io("open", &path.join("volumes"))(errno)),
        }
        left.into_result()
    }

    /// Unmounts all mounts below the pod's directory, those of sub paths first: they are on top of
    /// the volumes. Servers may not respond, so another thread does this, unless all is local.
    fn unmount(
        &self,
        uid: &PodUid,
        path: &Path,
        stop: &StopToken,
    ) -> Result<Vec<(String, VolumeError)>, VolumeError> {
        match self.unmounts(uid, path)? {
            None => Ok(Vec::new()),
            Some(work) if work.is_local => Ok(work.run(stop)),
            Some(work) => {
                let key = (uid, operations::UNMOUNT, &OperationScope::default());
                self.operations.run(key, operations::LIMIT, stop, move |stop| Ok(work.run(stop)))
            }
        }
    }

    /// What is to be unmounted for a pod; `None`: nothing is mounted.
    pub(super) fn unmounts(&self, uid: &PodUid, path: &Path) -> Result<Option<Unmounts>, VolumeError> {
        let table = mounts::table()?;
        let locations = self.csi.locations_of(uid);
        if locations.is_empty()
            && !table.iter().any(|mount| mount.point.starts_with(path) && mount.point != path)
        {
            return Ok(None);
        }
        let pods = paths::pods(&self.settings.root_dir);
        let device = tree::open(&pods).and_then(mounts::device_of).unwrap_or_default();
        let volumes = path.join("volumes");
        // What a driver has mounted, only the driver unmounts.
        let of_csi = volumes.join(csi::DIRECTORY);
        let mut groups = mounts::groups(&table, &volumes);
        groups.retain(|group| !group.iter().any(|mount| mount.point.starts_with(&of_csi)));
        let sub_paths = mounts::groups(&table, &path.join(paths::SUB_PATHS));
        let is_local =
            locations.is_empty()
                && groups.iter().chain(&sub_paths).flatten().all(|mount| {
                    mount.is_local(&device) && Kinds::flex_driver(&volumes, &mount.point).is_none()
                });
        let (csi, kinds) = (Arc::clone(&self.csi), Arc::clone(&self.kinds));
        // Operations that hang keep the mounts of their server busy.
        let (path, is_held) = (path.to_owned(), self.operations.has_left(uid));
        Ok(Some(Unmounts { is_local, pods, path, sub_paths, groups, locations, is_held, csi, kinds }))
    }
}

/// The mounts of a pod that ends.
pub(super) struct Unmounts {
    /// No server, driver or other disk is needed.
    pub(super) is_local: bool,
    pods: PathBuf,
    /// The pod's directory.
    path: PathBuf,
    pub(super) sub_paths: Vec<Vec<Mount>>,
    groups: Vec<Vec<Mount>>,
    locations: Vec<VolumeLocation>,
    /// Operations that hang have files of the pod's volumes open.
    is_held: bool,
    csi: Arc<Csi>,
    kinds: Arc<Kinds>,
}

impl Unmounts {
    /// Unmounts all, those that do not contain each other at the same time. Returns what failed.
    pub(super) fn run(self, stop: &StopToken) -> Vec<(String, VolumeError)> {
        let Unmounts { is_local, pods, path, sub_paths, groups, locations, is_held, csi, kinds } = self;
        let (volumes, sub_dir) = (path.join("volumes"), path.join(paths::SUB_PATHS));
        let job = |dir: &Path, group: Vec<Mount>, form: MountKind| -> unmount::Job {
            let top = group.last().map(|mount| mount.point.clone()).unwrap_or_default();
            let name = top.strip_prefix(dir).unwrap_or(&top).display().to_string();
            let (pods, kinds, driver) = (pods.clone(), Arc::clone(&kinds), Kinds::flex_driver(dir, &top));
            let work = move |stop: &StopToken| {
                if let Some(driver) = driver.filter(|_| form == MountKind::Volume) {
                    kinds.unmount_flex(&driver, &top, stop);
                }
                mounts::unmount_group(&pods, &group, form, is_held)
            };
            (name, Box::new(work))
        };
        let of_csi = |location: VolumeLocation| -> unmount::Job {
            let (csi, name) = (Arc::clone(&csi), format!("{}/{}", csi::DIRECTORY, location.spec_name));
            (name, Box::new(move |stop: &StopToken| csi.tear_down(&location, stop)))
        };
        let first: Vec<_> =
            sub_paths.into_iter().map(|group| job(&sub_dir, group, MountKind::SubPath)).collect();
        let run = |jobs: Vec<unmount::Job>| -> Vec<(String, VolumeError)> {
            if is_local {
                jobs.into_iter().filter_map(|(name, work)| Some((name, work(stop).err()?))).collect()
            } else {
                unmount::run_together(jobs, stop)
            }
        };
        let mut failures = run(first);
        // A driver does not get a disk back of which a part is still mounted (Go: CleanSubPaths before
        // TearDown). If it is not known which volume that is, it may be each.
        let is_mounted = |location: &VolumeLocation| {
            let name = csi.name_in_pod(location);
            let may_be = |shown: &str| match shown.split('/').next() {
                Some("?") | None => true,
                volume => name.is_none() || volume == name.as_deref(),
            };
            location.form == kind::Form::Filesystem && failures.iter().any(|(shown, _)| may_be(shown))
        };
        let locations: Vec<VolumeLocation> =
            locations.into_iter().filter(|location| !is_mounted(location)).collect();
        let second = groups.into_iter().map(|group| job(&volumes, group, MountKind::Volume));
        failures.extend(run(locations.into_iter().map(of_csi).chain(second).collect()));
        failures
    }
}

impl Volumes {
    /// Whether devices are to be cleaned up now.
    pub(super) fn has_due_sweep(&self) -> bool {
        let next = self.sweep_at.locked();
        next.is_some_and(|next| next <= Instant::now())
    }

    /// Unmounts and detaches devices that no pod uses any more, if there are any. This does not hold
    /// up the end of a pod, and is repeated after a failure.
    pub(super) fn sweep_devices(&self, stop: &StopToken) {
        let mut next = self.sweep_at.locked();
        if next.is_none_or(|next| next > Instant::now()) {
            return;
        }
        *next = None;
        drop(next);
        if !self.kinds.has_devices() && !self.csi.has_volumes() {
            *self.unreleased.locked() = None;
            return;
        }
        let (kinds, csi) = (Arc::clone(&self.kinds), Arc::clone(&self.csi));
        let unreleased = Arc::clone(&self.unreleased);
        let work = move |stop: &StopToken| {
            let before = unreleased.locked().clone();
            let of_drivers = move |stop: &StopToken| {
                csi.release_unused(stop).inspect_err(|error| {
                    let reason = chain(error);
                    if before.is_none_or(|(reasons, _)| !reasons.contains(&reason)) {
                        log::warn!("CSI volume: {reason}");
                    }
                })
            };
            // A driver that does not answer delays no other disk.
            let jobs: Vec<unmount::Job> = vec![
                ("CSI".to_owned(), Box::new(of_drivers)),
                ("devices".to_owned(), Box::new(move |stop: &StopToken| kinds.sweep(stop))),
            ];
            let failed = unmount::run_together(jobs, stop);
            let reasons: Vec<String> = failed
                .iter()
                .filter(|(_, error)| !matches!(error, VolumeError::Stopping))
                .map(|(_, error)| chain(error))
                .collect();
            let mut last = unreleased.locked();
            if failed.is_empty() {
                *last = None;
            } else if !reasons.is_empty() {
                last.get_or_insert_with(|| (Vec::new(), Instant::now())).0 = reasons;
            }
            drop(last);
            failed.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
        };
        let devices = PodUid::from("devices");
        let key = (&devices, operations::UNMOUNT, &OperationScope::default());
        let (report, reported) = bounded(1);
        let to = move |result| {
            // The channel has room; the wait may be over.
            let _ = report.send(result);
        };
        let ended = self.operations.start(key, to, work).and_then(|operation| {
            let _waiting = threads::waiting("the clean-up of devices");
            select_biased! {
                recv(reported) -> result => {
                    operation.finish();
                    return result.unwrap_or(Err(VolumeError::Panicked));
                }
                recv(stop.signal()) -> _ => return Err(VolumeError::Stopping),
                default(SWEEP) => {}
            }
            // It continues: a device whose server does not respond must not keep the others. The one
            // before has ended, as there is one at a time.
            let mut sweeping = self.sweeping.locked();
            let before = sweeping.replace(operation);
            // Not under the lock: this joins its thread.
            drop(sweeping);
            drop(before);
            Err(VolumeError::Overdue)
        });
        if ended.is_err() {
            let again = Some(Instant::now() + SWEEP_AGAIN);
            *self.sweep_at.locked() = again;
        }
    }
}

/// Removes the links to block devices. What else is there is not changed.
fn remove_device_links(pod_dir: BorrowedFd<'_>) -> Result<(), RemovalError> {
    let failed = |errno| RemovalError::Entry { path: String::new(), errno };
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
                Err(errno) => return Err(RemovalError::Entry { path: csi::DIRECTORY.to_owned(), errno }),
            }
        }
        let Ok(dir) = tree::open_same_mount(devices.as_fd(), &plugin) else { continue };
        for name in tree::names(dir.as_fd()).map_err(failed)? {
            match rustix::fs::unlinkat(&dir, &*name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(RemovalError::Entry { path: empty_dir::name_text(&name), errno }),
            }
        }
        let _ = rustix::fs::unlinkat(&devices, &*plugin, AtFlags::REMOVEDIR);
    }
    let _ = rustix::fs::unlinkat(pod_dir, c"volumeDevices", AtFlags::REMOVEDIR);
    Ok(())
}

/// The volumes that could not be removed so far, and the first cause.
#[derive(Default)]
struct UnremovedVolumes {
    volumes: Vec<String>,
    cause: Option<String>,
}

impl UnremovedVolumes {
    fn add(&mut self, volume: String, cause: String) {
        if !self.volumes.contains(&volume) {
            self.volumes.push(volume);
        }
        self.cause.get_or_insert(cause);
    }

    fn check(&mut self, volume: &str, result: Result<(), RemovalError>) -> Result<(), VolumeError> {
        match result {
            Ok(()) => Ok(()),
            Err(RemovalError::Stopping) => Err(VolumeError::Stopping),
            Err(RemovalError::Entry { path, errno }) => {
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

/// `is_unmounted`: no volume is mounted any more. What is left of one that is has no group perhaps.
fn remove_markers(pod_dir: BorrowedFd<'_>, is_unmounted: bool, stop: &StopToken) -> Result<(), RemovalError> {
    let failed = |errno| RemovalError::Entry { path: String::new(), errno };
    let plugins = match tree::open_at(pod_dir, c"plugins") {
        Ok(plugins) => plugins,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(errno)),
    };
    for name in tree::names(plugins.as_fd()).map_err(failed)? {
        let is_group = name.to_bytes() == group_marker::DIRECTORY.as_bytes();
        if is_owned(&name) || (is_group && is_unmounted) {
            tree::remove_at(plugins.as_fd(), &name, stop)?;
        }
    }
    Ok(())
}

fn remove_volumes(
    volumes: BorrowedFd<'_>,
    left: &mut UnremovedVolumes,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let list = |dir: BorrowedFd<'_>, left: &mut UnremovedVolumes, shown: &str| {
        tree::names(dir).unwrap_or_else(|errno| {
            left.add(shown.to_owned(), format!("cannot list {shown}: {}", std::io::Error::from(errno)));
            Vec::new()
        })
    };
    for plugin in list(volumes, left, "volumes") {
        let shown = empty_dir::name_text(&plugin);
        let dir = match tree::open_same_mount(volumes, &plugin) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => continue,
            Err(errno) => {
                left.check(&shown, Err(RemovalError::Entry { path: String::new(), errno }))?;
                continue;
            }
        };
        for name in list(dir.as_fd(), left, &shown) {
            let shown = format!("{shown}/{}", empty_dir::name_text(&name));
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
fn remove_empty(parent: BorrowedFd<'_>, name: &CStr) -> Result<(), RemovalError> {
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(RemovalError::Entry { path: String::new(), errno }),
    }
}

fn is_owned(plugin: &CStr) -> bool {
    paths::OWNED_CONTENT.iter().any(|owned| owned.as_bytes() == plugin.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;

    fn volumes(root: &Path) -> Volumes {
        testing::volumes(root, None).0
    }

    /// It waited up to two minutes longer.
    #[test]
    fn pod_that_waits_for_a_volume_of_another_is_woken_when_that_has_ended() {
        use super::super::manager::{Deps, Settings};
        use super::super::retries::Retryable;
        use super::super::waker::Waker;
        use crate::model::event::EventSink;
        let root = tempfile::tempdir().unwrap();
        let settings = Settings { root_dir: root.path().to_owned(), ..Settings::default() };
        let (woken, wakes) = bounded(1);
        let waker = Waker(Arc::new(move |pod| woken.send(pod.clone()).unwrap()));
        let deps = Deps { waker, ..Deps::new(EventSink::new().0, None) };
        let volumes = Volumes::new(settings, deps);
        let (uid, now) = (PodUid::from("u2"), Instant::now());
        volumes.retries().failed(&uid, "v", (Retryable::AfterOthers(now), 0), now + Duration::from_secs(60));
        volumes.tear_down(&PodUid::from("u1"), &StopToken::never()).unwrap();
        assert_eq!(wakes.try_recv().as_ref(), Ok(&uid));
        assert_eq!(volumes.retries().blocked(&uid, "v", 0, Instant::now()), None);
    }

    /// A lasting failure of CSI volumes hid that of the other disks.
    #[test]
    fn failures_of_csi_volumes_and_of_other_disks_are_reported_together() {
        let root = tempfile::tempdir().unwrap();
        let plugins = root.path().join("plugins/kubernetes.io");
        std::fs::create_dir_all(&plugins).unwrap();
        // Each call on a link to itself fails.
        for name in ["csi", "fc"] {
            std::os::unix::fs::symlink(plugins.join(name), plugins.join(name)).unwrap();
        }
        let volumes = volumes(root.path());
        let reason = || volumes.unreleased().map(|(reason, _)| reason);
        volumes.sweep_devices(&StopToken::never());
        while reason().is_none() {
            let _ = StopToken::never().wait(Duration::from_millis(1));
        }
        let text = reason().unwrap();
        assert!(text.contains("kubernetes.io/csi") && text.contains("kubernetes.io/fc"), "{text}");
        std::fs::remove_file(plugins.join("csi")).unwrap();
        std::fs::remove_file(plugins.join("fc")).unwrap();
        *volumes.sweep_at.locked() = Some(Instant::now());
        volumes.sweep_devices(&StopToken::never());
        while reason().is_some() {
            let _ = StopToken::never().wait(Duration::from_millis(1));
        }
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

    /// The removal waited for the end of the walk, and a file server can make it endless.
    #[test]
    fn teardown_ends_a_walk_for_the_group_of_the_pod() {
        use super::super::ownership::{self, Access, Policy};
        let root = tempfile::tempdir().unwrap();
        let volumes = volumes(root.path());
        let uid = PodUid::from("u1");
        let volume = root.path().join("pods/u1/volumes/kubernetes.io~nfs/v");
        std::fs::create_dir_all(&volume).unwrap();
        let (walking, dir) = (volumes.operations.clone(), tree::open(&volume).unwrap());
        let (report, begun) = bounded(1);
        let pod = uid.clone();
        let endless = move |_: &StopToken| {
            let stops = walking.walk(&pod, "v");
            report.send(()).unwrap();
            let gid = rustix::process::getegid().as_raw();
            let policy = (Access::Write, Policy::Always);
            loop {
                if let Err(broken) = ownership::change_group(dir.as_fd(), gid, policy, &stops, &mut |_| {}) {
                    return Err::<(), _>(broken.into_error(&volume));
                }
            }
        };
        let key = (&uid, "v", &OperationScope::default());
        let never = StopToken::never();
        let operation = volumes.operations.start_until(key, &never, |_| {}, endless).unwrap();
        begun.recv().unwrap();
        // The set-up is over its time.
        drop(operation);
        assert!(volumes.operations.is_busy(&uid));
        volumes.tear_down(&uid, &never).unwrap();
        assert!(!volumes.operations.is_busy(&uid));
    }

    /// The pod was kept until the server was back.
    #[test]
    fn pod_goes_although_an_operation_waits_for_a_dead_server() {
        let root = tempfile::tempdir().unwrap();
        let volumes = volumes(root.path());
        let (uid, never) = (PodUid::from("u1"), StopToken::never());
        std::fs::create_dir_all(root.path().join("pods/u1/volumes/kubernetes.io~empty-dir/e")).unwrap();
        let (report, begun) = bounded(1);
        let (server, hold) = bounded::<()>(0);
        let (operations, pod) = (volumes.operations.clone(), uid.clone());
        let hang = move |_: &StopToken| {
            operations.leave_pod_dir(&pod, "v");
            report.send(()).unwrap();
            let _ = hold.recv();
            // The server is back. The pod is not.
            operations.enter_pod_dir(&pod, "v")
        };
        let (ended, result) = bounded(1);
        let to = move |result| ended.send(result).unwrap();
        let key = (&uid, "v", &OperationScope::default());
        let operation = volumes.operations.start_until(key, &never, to, hang).unwrap();
        begun.recv().unwrap();
        drop(operation);
        volumes.tear_down(&uid, &never).unwrap();
        assert!(!root.path().join("pods/u1/volumes/kubernetes.io~empty-dir").exists());
        assert!(!volumes.operations.is_busy(&uid) && volumes.operations.has_left(&uid));
        volumes.tear_down(&uid, &never).unwrap();
        drop(server);
        assert!(matches!(result.recv().unwrap(), Err(VolumeError::Stopping)));
    }

    #[test]
    fn removal_waits_for_an_operation_that_may_mount_something() {
        let root = tempfile::tempdir().unwrap();
        let volumes = volumes(root.path());
        let (uid, never) = (PodUid::from("u1"), StopToken::never());
        std::fs::create_dir_all(root.path().join("pods/u1/volumes")).unwrap();
        let (report, begun) = bounded(1);
        let (release, hold) = bounded::<()>(0);
        let (operations, pod) = (volumes.operations.clone(), uid.clone());
        let mounts = move |_: &StopToken| {
            operations.leave_pod_dir(&pod, "v");
            operations.enter_pod_dir(&pod, "v")?;
            report.send(()).unwrap();
            let _ = hold.recv();
            Ok(())
        };
        let key = (&uid, "v", &OperationScope::default());
        let operation = volumes.operations.start(key, |_| {}, mounts).unwrap();
        begun.recv().unwrap();
        for _ in 0..2 {
            assert!(matches!(volumes.tear_down(&uid, &never), Err(VolumeError::Pending)));
        }
        drop(release);
        operation.finish();
        volumes.tear_down(&uid, &never).unwrap();
    }

    #[test]
    fn teardown_of_unknown_pod_succeeds() {
        let root = tempfile::tempdir().unwrap();
        volumes(root.path()).tear_down(&PodUid::from("never"), &StopToken::never()).unwrap();
        let climbing = volumes(root.path()).tear_down(&PodUid::from(".."), &StopToken::never());
        assert!(matches!(climbing, Err(VolumeError::Name { .. })));
    }
}
