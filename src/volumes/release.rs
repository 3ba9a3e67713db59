//! Pods that cannot be stopped because their file server does not respond.
//!
//! A process that has written to such a server cannot be killed: its end waits in the kernel until
//! the server has what was written. A forced unmount aborts these requests, so that the process
//! ends. DIFFERS: the Go kubelet unmounts only after all containers have ended, so that the pod
//! stays until the server is back.
//!
//! Requests are aborted only if the server does not respond, the grace period is over for some time,
//! and no other pod of this node has the same file system: its requests would be aborted too.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::error::VolumeError;
use super::manager::Volumes;
use super::mounts::{self, Mount};
use super::{csi, paths, unmount};
use crate::model::ids::PodUid;
use crate::util::error_chain::chain;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, OnDeath, Running, Stack};

/// The directories below a pod's `volumes` in which no file server is mounted that is released here:
/// those of CSI drivers are theirs.
const WITHOUT_SERVERS: [&str; 6] = [
    paths::EMPTY_DIR,
    paths::DOWNWARD_API,
    paths::CONFIG_MAP,
    paths::SECRET,
    paths::PROJECTED,
    csi::DIRECTORY,
];
/// The wait for the thread when the pod has stopped.
const GRACE: Duration = Duration::from_millis(20);

/// Watches the stop of a pod until it is dropped.
#[derive(Debug)]
#[must_use]
pub struct StopWatcher(Option<WatchThread>);

/// The thread; it holds nothing that others wait for.
struct WatchThread(Running);

impl std::fmt::Debug for WatchThread {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Thread")
    }
}

impl Drop for StopWatcher {
    fn drop(&mut self) {
        match self.0.take() {
            // A thread that waits ends at once. One that waits for a server ends by its own limits.
            Some(WatchThread(running)) if running.is_finished() => drop(running.stop(GRACE)),
            Some(WatchThread(running)) => running.leave(),
            None => {}
        }
    }
}

impl Volumes {
    /// Watches the stop of a pod: when `overdue`, a wait that its token can end early, has timed out,
    /// the pod's file servers that do not respond are unmounted by force. Of a pod without such volumes
    /// only a directory is read.
    pub fn watch_stop(
        self: &Arc<Self>,
        uid: &PodUid,
        overdue: impl FnOnce(&StopToken) -> Waited + Send + 'static,
    ) -> StopWatcher {
        let watch = || {
            let pod = paths::pod(&self.settings.root_dir, uid).ok()?;
            // The mount table has lines for all pods: when many end at once, reading it for each of them
            // was a twelfth of the processor time.
            if !may_have_servers(&pod) || servers(&mounts::table().ok()?, &pod).is_empty() {
                return None;
            }
            let (volumes, uid) = (Arc::clone(self), uid.clone());
            let running = threads::spawn("vol/release", Stack::Small, OnDeath::Unsupervised, move |stop| {
                let waiting = threads::waiting("the end of a pod with a file server");
                if overdue(&stop) == Waited::TimedOut {
                    drop(waiting);
                    volumes.release(&uid, &pod, &stop);
                }
            });
            running.inspect_err(|error| log::warn!("no thread to watch the end of a pod: {error}")).ok()
        };
        StopWatcher(watch().map(WatchThread))
    }

    /// Unmounts the file servers of the pod that do not respond.
    fn release(&self, uid: &PodUid, pod: &Path, stop: &StopToken) {
        let Ok(table) = mounts::table() else { return };
        let pods = paths::pods(&self.settings.root_dir);
        for server in servers(&table, pod) {
            if stop.is_stopped() {
                return;
            }
            let Some(server) = silent(&server, pod, &unmount::server_responds, &mounts::table) else {
                continue;
            };
            let error = VolumeError::NoResponse {
                source_name: server.source,
                volume: server.point.strip_prefix(pod.join("volumes")).unwrap_or(pod).display().to_string(),
                is_shared: server.is_shared,
            };
            log::warn!("pod {uid} does not stop: {error}");
            self.record_removal(uid, &Err(error));
            if !server.is_shared
                && let Err(error) = unmount::unmount_by_force(&pods, &server.point)
            {
                log::warn!("pod {uid} does not stop: {}", chain(&error));
            }
        }
    }
}

/// Whether the pod in `pod` has volumes of kinds that can be on file servers; if that cannot be read, it
/// may have.
fn may_have_servers(pod: &Path) -> bool {
    match std::fs::read_dir(pod.join("volumes")) {
        Ok(mut kinds) => kinds.any(|kind| {
            kind.map_or(true, |kind| !WITHOUT_SERVERS.iter().any(|known| kind.file_name() == **known))
        }),
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}

/// A file server that a pod uses.
#[derive(Debug, PartialEq, Eq)]
struct Server {
    /// Where the volume is mounted.
    point: PathBuf,
    /// What is mounted.
    source: String,
    /// The number of the file system.
    device: String,
    /// Whether the same file system is also mounted elsewhere on the node.
    is_shared: bool,
}

/// The server as it is now, if it does not respond. That question takes long: meanwhile another pod may
/// have mounted the same file system, or this mount may be gone.
fn silent(
    server: &Server,
    pod: &Path,
    responds: &dyn Fn(&Path) -> bool,
    table: &dyn Fn() -> Result<Vec<Mount>, VolumeError>,
) -> Option<Server> {
    if responds(&server.point) {
        return None;
    }
    let is_it = |now: &Server| now.point == server.point && now.device == server.device;
    servers(&table().ok()?, pod).into_iter().find(is_it)
}

/// The volumes of the pod in `pod` that are on file servers. Those of CSI drivers are not among them:
/// only the driver unmounts these.
fn servers(table: &[Mount], pod: &Path) -> Vec<Server> {
    let volumes = pod.join("volumes");
    let of_csi = volumes.join(csi::DIRECTORY);
    let is_own = |mount: &&Mount| {
        mount.is_remote() && mount.point.starts_with(&volumes) && !mount.point.starts_with(&of_csi)
    };
    let server = |mount: &Mount| {
        let mut same = table.iter().filter(|other| other.device == mount.device);
        Server {
            point: mount.point.clone(),
            source: mount.source.clone(),
            device: mount.device.clone(),
            is_shared: same.any(|other| !other.point.starts_with(pod)),
        }
    };
    table.iter().filter(is_own).map(server).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;

    fn mount(point: &str, device: &str, kind: &str) -> Mount {
        Mount {
            point: PathBuf::from(point),
            root: PathBuf::from("/"),
            device: device.to_owned(),
            kind: kind.to_owned(),
            source: format!("srv:/{device}"),
        }
    }

    #[test]
    fn file_servers_of_a_pod_are_found_with_their_other_users() {
        let table = [
            mount("/r/pods/u/volumes/kubernetes.io~nfs/alone", "0:1", "nfs4"),
            mount("/r/pods/u/volume-subpaths/alone/c/0", "0:1", "nfs4"),
            mount("/r/pods/u/volumes/kubernetes.io~nfs/shared", "0:2", "nfs"),
            mount("/r/pods/u2/volumes/kubernetes.io~nfs/shared", "0:2", "nfs"),
            mount("/r/pods/u/volumes/kubernetes.io~csi/pvc/mount", "0:3", "nfs4"),
            mount("/r/pods/u/volumes/kubernetes.io~empty-dir/m", "0:4", "tmpfs"),
            mount("/mnt", "0:5", "nfs"),
        ];
        let found = servers(&table, Path::new("/r/pods/u"));
        let shown: Vec<(&str, &str, bool)> = found
            .iter()
            .map(|server| {
                (
                    server.point.file_name().unwrap().to_str().unwrap(),
                    server.source.as_str(),
                    server.is_shared,
                )
            })
            .collect();
        assert_eq!(shown, [("alone", "srv:/0:1", false), ("shared", "srv:/0:2", true)]);
        assert_eq!(servers(&table, Path::new("/r/pods/other")), []);
        let error = VolumeError::NoResponse {
            source_name: "srv:/x".to_owned(),
            volume: "kubernetes.io~nfs/v".to_owned(),
            is_shared: true,
        };
        assert_eq!(
            error.to_string(),
            "srv:/x, the server of volume kubernetes.io~nfs/v, does not respond, and a container waits \
             for it; another pod uses it too"
        );
    }

    /// The requests of a pod that had mounted it meanwhile were aborted.
    #[test]
    fn users_of_a_server_are_those_after_the_wait_for_its_response() {
        let pod = Path::new("/r/pods/u");
        let own = mount("/r/pods/u/volumes/kubernetes.io~nfs/v", "0:1", "nfs4");
        let other = mount("/r/pods/u2/volumes/kubernetes.io~nfs/v", "0:1", "nfs4");
        let later = Mount { device: "0:2".to_owned(), ..own.clone() };
        let before = servers(std::slice::from_ref(&own), pod).remove(0);
        let now = |does_respond: bool, table: &[Mount]| {
            let found = silent(&before, pod, &|_| does_respond, &|| Ok(table.to_vec()));
            found.map(|server| server.is_shared)
        };
        assert_eq!(now(true, std::slice::from_ref(&own)), None);
        assert_eq!(now(false, std::slice::from_ref(&own)), Some(false));
        assert_eq!(now(false, &[own, other]), Some(true));
        // It is gone, or another one is mounted there.
        assert_eq!((now(false, &[]), now(false, &[later])), (None, None));
        assert_eq!(silent(&before, pod, &|_| false, &|| Err(VolumeError::Pending)), None);
    }

    #[test]
    fn only_pods_with_volumes_that_can_be_on_servers_are_searched_in_the_mount_table() {
        let pod = tempfile::tempdir().unwrap();
        let has_volume = |kind: &str| {
            std::fs::create_dir_all(pod.path().join("volumes").join(kind).join("v")).unwrap();
            may_have_servers(pod.path())
        };
        assert!(!may_have_servers(pod.path()));
        assert!(!has_volume(paths::EMPTY_DIR));
        assert!(!has_volume(paths::PROJECTED));
        assert!(!has_volume(csi::DIRECTORY));
        assert!(has_volume("kubernetes.io~nfs"));
        std::fs::remove_dir_all(pod.path().join("volumes")).unwrap();
        // It cannot be read.
        std::fs::write(pod.path().join("volumes"), "").unwrap();
        assert!(may_have_servers(pod.path()));
    }

    #[test]
    fn stop_of_a_pod_without_file_servers_starts_no_thread() {
        let root = tempfile::tempdir().unwrap();
        let volumes = Arc::new(testing::volumes(root.path(), None).0);
        let watch = volumes.watch_stop(&PodUid::from("u"), |_| Waited::TimedOut);
        assert!(watch.0.is_none());
    }
}
