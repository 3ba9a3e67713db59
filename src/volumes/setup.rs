//! Setting up: the volumes that a pod's containers refer to, one after another.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::error::chain;
use super::retries::Hope;
use super::{VolumeError, Volumes, empty_dir, host_path, paths, tree};
use crate::model::api::Volume;
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::stop::StopToken;

impl Volumes {
    /// Makes the pod's directories and every volume that one of its containers refers to.
    /// Doing it again is cheap and harmless. A volume that failed lately is not tried
    /// before its wait is over. Events about failures are raised here.
    ///
    /// # Errors
    /// [`VolumeError::NotMounted`] with the time to come back when a volume is not ready;
    /// the other volumes are then ready all the same.
    pub fn setup(&self, pod: &Pod, stop: &StopToken) -> Result<Vec<MountedVolume>, VolumeError> {
        let (path, dir) = self.make_pod_dirs(pod).map_err(|source| {
            let error = VolumeError::PodDirectories { source: Box::new(source) };
            self.events.warning(pod, reasons::FAILED, error.to_string());
            error
        })?;
        let referenced = referenced(pod);
        let mut ready = Vec::new();
        let mut missing = Missing::default();
        for volume in pod.spec().volumes.iter().flatten() {
            if !referenced.contains(volume.name.as_str()) {
                continue;
            }
            if stop.is_stopped() {
                return Err(VolumeError::Stopping);
            }
            let now = Instant::now();
            let blocked = self.retries().blocked(pod.uid(), &volume.name, now);
            if let Some(until) = blocked {
                missing.add(&volume.name, until, "waiting to try again");
                continue;
            }
            match self.set_up_one(pod, volume, (&path, dir.as_fd())) {
                Ok(mounted) => {
                    self.retries().succeeded(pod.uid(), &volume.name);
                    ready.push(mounted);
                }
                Err(error) => {
                    let hope = match error {
                        VolumeError::Unsupported { .. } => Hope::None,
                        _ => Hope::Some,
                    };
                    let text =
                        format!("MountVolume.SetUp failed for volume {:?} : {}", volume.name, chain(&error));
                    self.events.warning(pod, reasons::FAILED_MOUNT, text.as_str());
                    let until = self.retries().failed(pod.uid(), &volume.name, hope, now);
                    missing.add(&volume.name, until, &text);
                }
            }
        }
        missing.into_result().map(|()| ready)
    }

    fn set_up_one(
        &self,
        pod: &Pod,
        volume: &Volume,
        pod_dir: (&Path, BorrowedFd<'_>),
    ) -> Result<MountedVolume, VolumeError> {
        let allocatable = self.settings.allocatable_memory_bytes;
        if let Some(source) = &volume.host_path {
            host_path::set_up(&volume.name, source)
        } else if let Some(source) = &volume.empty_dir {
            empty_dir::set_up(pod, &volume.name, source, pod_dir, allocatable)
        } else {
            match kind(volume) {
                Some(kind) => Err(VolumeError::Unsupported { kind }),
                // A volume without a source is an emptyDir by the API's defaults.
                None => empty_dir::set_up(pod, &volume.name, &Default::default(), pod_dir, allocatable),
            }
        }
    }

    fn make_pod_dirs(&self, pod: &Pod) -> Result<(PathBuf, OwnedFd), VolumeError> {
        let path = paths::pod(&self.settings.root_dir, pod.uid())?;
        let pods = paths::pods(&self.settings.root_dir);
        let make = |path: &Path| VolumeError::io("make directory", path);
        let dir = match tree::open(&pods) {
            Ok(dir) => dir,
            Err(_) => {
                let (root, _) = tree::open(&self.settings.root_dir)
                    .and_then(|root| tree::make_at(root.as_fd(), c"pods", 0o750))
                    .map_err(make(&pods))?;
                root
            }
        };
        let uid = pod.uid().as_str();
        let name = CString::new(uid).map_err(|_| VolumeError::Name { name: uid.to_owned() })?;
        let (dir, _) = tree::make_at(dir.as_fd(), &name, 0o750).map_err(make(&path))?;
        for name in [c"volumes", c"plugins"] {
            tree::make_at(dir.as_fd(), name, 0o750)
                .map_err(make(&path.join(name.to_str().unwrap_or_default())))?;
        }
        Ok((path, dir))
    }
}

/// What is not ready, while it is being gathered.
#[derive(Default)]
struct Missing {
    volumes: Vec<String>,
    cause: Option<String>,
    retry_at: Option<Instant>,
}

impl Missing {
    fn add(&mut self, volume: &str, until: Instant, cause: &str) {
        self.volumes.push(volume.to_owned());
        self.cause.get_or_insert_with(|| cause.to_owned());
        self.retry_at = Some(self.retry_at.map_or(until, |earlier| earlier.min(until)));
    }

    fn into_result(self) -> Result<(), VolumeError> {
        match (self.retry_at, self.cause) {
            (Some(retry_at), Some(cause)) => {
                Err(VolumeError::NotMounted { volumes: self.volumes, cause, retry_at })
            }
            _ => Ok(()),
        }
    }
}

/// The names of the volumes that containers of any kind mount or use as devices.
fn referenced(pod: &Pod) -> BTreeSet<&str> {
    let spec = pod.spec();
    let mut names = BTreeSet::new();
    for container in pod.all_containers() {
        names.extend(container.volume_mounts.iter().flatten().map(|mount| mount.name.as_str()));
        names.extend(container.volume_devices.iter().flatten().map(|device| device.name.as_str()));
    }
    for container in spec.ephemeral_containers.iter().flatten() {
        names.extend(container.volume_mounts.iter().flatten().map(|mount| mount.name.as_str()));
        names.extend(container.volume_devices.iter().flatten().map(|device| device.name.as_str()));
    }
    names
}

/// The API's name of the volume's type, for those that are not made here.
fn kind(volume: &Volume) -> Option<String> {
    let value = serde_json::to_value(volume).ok()?;
    value.as_object()?.keys().find(|key| *key != "name").cloned()
}

#[cfg(test)]
mod tests {
    use super::super::{Deps, Settings};
    use super::*;
    use crate::model::event::{Event, EventSink};
    use crossbeam_channel::Receiver;
    use serde_json::json;

    fn volumes(root: &Path) -> (Volumes, Receiver<Box<Event>>) {
        let (events, queue) = EventSink::new();
        let settings = Settings { root_dir: root.to_owned(), allocatable_memory_bytes: None };
        (Volumes::new(settings, Deps { events }), queue)
    }

    fn pod(volumes: serde_json::Value, mounts: &[&str]) -> Pod {
        let mounts: Vec<_> = mounts.iter().map(|name| json!({"name": name, "mountPath": "/m"})).collect();
        let value = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u1"},
            "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
        });
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
    }

    #[test]
    fn only_mounted_volumes_are_made() {
        let root = tempfile::tempdir().unwrap();
        let (volumes, queue) = volumes(root.path());
        let pod = pod(
            json!([
                {"name": "unused", "secret": {"secretName": "none"}},
                {"name": "h", "hostPath": {"path": "/etc"}},
                {"name": "e", "emptyDir": {}},
            ]),
            &["e", "h"],
        );
        let ready = volumes.setup(&pod, &StopToken::never()).unwrap();
        let names: Vec<&str> = ready.iter().map(|volume| volume.volume.as_str()).collect();
        assert_eq!(names, ["h", "e"]);
        let real = std::fs::canonicalize(root.path()).unwrap();
        assert_eq!(ready[1].host_path, real.join("pods/u1/volumes/kubernetes.io~empty-dir/e"));
        assert!(root.path().join("pods/u1/plugins").is_dir());
        assert!(queue.is_empty());
        volumes.setup(&pod, &StopToken::never()).unwrap();
    }

    #[test]
    fn a_failure_has_upstreams_event_and_a_wait() {
        let root = tempfile::tempdir().unwrap();
        let (volumes, queue) = volumes(root.path());
        let pod = pod(
            json!([
                {"name": "d", "hostPath": {"path": "/no/such/dir", "type": "Directory"}},
                {"name": "e", "emptyDir": {}},
            ]),
            &["d", "e"],
        );
        let error = volumes.setup(&pod, &StopToken::never()).unwrap_err();
        let event = queue.try_recv().unwrap();
        assert_eq!(event.reason, "FailedMount");
        assert_eq!(
            event.message,
            "MountVolume.SetUp failed for volume \"d\" : \
             hostPath type check failed: /no/such/dir is not a directory"
        );
        assert!(error.to_string().starts_with("unmounted volumes=[d], unattached volumes=[], failed to"));
        let retry_at = error.retry_at().unwrap();
        // Within the wait: no second try, no second event, the same time to come back.
        let again = volumes.setup(&pod, &StopToken::never()).unwrap_err();
        assert_eq!(again.retry_at(), Some(retry_at));
        assert!(queue.is_empty());
        assert!(root.path().join("pods/u1/volumes/kubernetes.io~empty-dir/e").is_dir());
    }

    #[test]
    fn other_types_are_named() {
        let root = tempfile::tempdir().unwrap();
        let (volumes, queue) = volumes(root.path());
        let pod = pod(json!([{"name": "s", "secret": {"secretName": "x"}}]), &["s"]);
        let error = volumes.setup(&pod, &StopToken::never()).unwrap_err();
        assert!(error.retry_at().unwrap() > Instant::now() + std::time::Duration::from_secs(100));
        assert_eq!(
            queue.try_recv().unwrap().message,
            "MountVolume.SetUp failed for volume \"s\" : \
             volumes of type secret are not supported by this version of coracle"
        );
    }

    #[test]
    fn a_root_directory_that_is_none_fails_with_an_event() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        let (volumes, queue) = volumes(&file);
        let error = volumes.setup(&pod(json!([]), &[]), &StopToken::never()).unwrap_err();
        assert!(matches!(error, VolumeError::PodDirectories { .. }));
        let event = queue.try_recv().unwrap();
        assert_eq!(event.reason, "Failed");
        assert!(event.message.starts_with("error making pod data directories: cannot make directory"));
    }
}
