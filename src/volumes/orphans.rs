//! Directories of pods that are in no source any more.
//!
//! A pod whose mounts need a server or a driver is unmounted by an operation of its own; the sweep
//! waits for all of these together, for some seconds, and a later sweep continues with what has
//! ended. So no orphan waits for the server of another. Likewise it waits once for the operations of all
//! orphans that were removed by force. No lock is held while it waits.
//!
//! A pod may come back while its directory is removed: the UID of a static pod is a hash of its
//! manifest. So the removal is noted first, and then it is checked whether the pod is known: a pod is
//! published before its worker starts, and its set-up waits for a removal that is noted. (DIFFERS: the
//! Go kubelet may remove the new directory with the old one.)

use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded, select_biased};
use rustix::io::Errno;

use super::error::VolumeError;
use super::manager::Volumes;
use super::operations::{self, Operation, OperationScope};
use super::{empty_dir, mounts, paths};
use crate::model::ids::PodUid;
use crate::util::error_chain::chain;
use crate::util::lock::LockExt;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads;
use crate::util::tree::{self, RemovalError};

/// How long a sweep waits for unmounts.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time between two checks whether a removal has ended.
const SLICE: Duration = Duration::from_millis(50);
/// Orphans that are unmounted at the same time.
const MAX_UNMOUNTS: usize = 64;

/// The result of one sweep.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OrphanReport {
    /// Pods whose directory was removed.
    pub removed: Vec<PodUid>,
    /// Pods whose directory could not be removed, with the reason.
    pub left: Vec<(PodUid, String)>,
}

/// What failed when a pod was unmounted.
type UnmountResult = Result<Vec<(String, VolumeError)>, VolumeError>;

/// An unmount that continues after its sweep.
struct RunningUnmount {
    operation: Operation,
    begun: Instant,
    ended: Receiver<UnmountResult>,
}

/// Removals that have not ended.
#[derive(Default)]
pub(super) struct Orphans {
    /// Pods whose directory is being removed.
    removing: Mutex<HashSet<PodUid>>,
    unmounts: Mutex<HashMap<PodUid, RunningUnmount>>,
}

impl std::fmt::Debug for Orphans {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Orphans")
    }
}

/// Notes the removal of one directory until it is dropped.
struct RemovalGuard<'a>(&'a Orphans, PodUid);

impl Drop for RemovalGuard<'_> {
    fn drop(&mut self) {
        self.0.removing().remove(&self.1);
    }
}

impl Orphans {
    fn removing(&self) -> MutexGuard<'_, HashSet<PodUid>> {
        self.removing.locked()
    }

    fn unmounts(&self) -> MutexGuard<'_, HashMap<PodUid, RunningUnmount>> {
        self.unmounts.locked()
    }

    /// Notes the removal, unless the pod is known.
    fn begin(&self, uid: &PodUid, is_known: &dyn Fn(&PodUid) -> bool) -> Option<RemovalGuard<'_>> {
        self.removing().insert(uid.clone());
        let removing = RemovalGuard(self, uid.clone());
        (!is_known(uid)).then_some(removing)
    }
}

impl Volumes {
    /// Waits until no sweep removes the pod's directory.
    pub(super) fn wait_for_removal(&self, uid: &PodUid, stop: &StopToken) -> Result<(), VolumeError> {
        let until = Instant::now() + operations::LIMIT;
        while self.orphans.removing().contains(uid) || self.operations.is_running(uid, operations::UNMOUNT) {
            if Instant::now() >= until {
                return Err(VolumeError::Pending);
            }
            if stop.wait(SLICE) == Waited::Stopped {
                return Err(VolumeError::Stopping);
            }
        }
        Ok(())
    }

    /// Whether there is the directory of a pod for which `known` is false, or a device to clean up. Also if
    /// the directory of all pods cannot be read: [`Volumes::orphans`] has the reason.
    pub fn has_orphans(&self, is_known: &dyn Fn(&PodUid) -> bool) -> bool {
        self.has_due_sweep() || self.unknown(is_known).map_or(true, |found| !found.is_empty())
    }

    /// Whether the pod has a directory, or may have one that cannot be opened (Go: `podVolumesExist`).
    #[must_use]
    pub fn has_directory(&self, uid: &PodUid) -> bool {
        match paths::open_pod(&self.settings.root_dir, uid) {
            Ok(_) => true,
            Err(VolumeError::Io { source, .. }) => may_be_directory(&source),
            Err(_) => false,
        }
    }

    fn unknown(&self, is_known: &dyn Fn(&PodUid) -> bool) -> Result<Vec<PodUid>, VolumeError> {
        let pods = paths::pods(&self.settings.root_dir);
        let dir = match tree::open(&pods) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => return Ok(Vec::new()),
            Err(errno) => return Err(VolumeError::io("open", &pods)(errno)),
        };
        let mut found = Vec::new();
        for name in tree::names(dir.as_fd()).map_err(VolumeError::io("list", &pods))? {
            let uid = PodUid::from(empty_dir::name_text(&name));
            let opened = || tree::open_at(dir.as_fd(), &name).map_err(std::io::Error::from);
            // The removal reports a directory that cannot be opened.
            if !is_known(&uid) && opened().map_or_else(|error| may_be_directory(&error), |_| true) {
                found.push(uid);
            }
        }
        Ok(found)
    }

    /// Removes the directory of every pod for which `known` is false. `known` must be true for pods
    /// with containers in the runtime, and for all pods until every source has reported. Mounts are
    /// unmounted first; if that fails the directory is not changed.
    ///
    /// # Errors
    /// When the directory of all pods cannot be read.
    pub fn orphans(
        &self,
        is_known: &dyn Fn(&PodUid) -> bool,
        stop: &StopToken,
    ) -> Result<OrphanReport, VolumeError> {
        let mut report = OrphanReport::default();
        let mut found = self.unknown(is_known)?;
        // The end of unmounts of pods that are known again is of no interest.
        let known_again: Vec<RunningUnmount> = {
            let mut unmounts = self.orphans.unmounts();
            unmounts.extract_if(|uid, _| !found.contains(uid)).map(|(_, under_way)| under_way).collect()
        };
        drop(known_again);
        // An operation of a pod that was removed by force may still mount something.
        found.retain(|uid| {
            let Some(_removing) = self.orphans.begin(uid, is_known) else { return false };
            self.end_refreshes(uid);
            self.operations.stop_walks(uid);
            true
        });
        let settled = Instant::now() + operations::WALK_END;
        let mut waiting = Vec::new();
        for uid in found {
            let Some(removing) = self.orphans.begin(&uid, is_known) else { continue };
            let result = match self.begin_unmount(&uid, settled, stop) {
                Ok(true) => {
                    waiting.push(removing);
                    continue;
                }
                Ok(false) => self.remove_pod(&uid, stop),
                Err(error) => Err(error),
            };
            if !report.add(uid, result) {
                return Ok(report);
            }
        }
        let until = Instant::now() + PATIENCE;
        for removing in waiting {
            let uid = removing.1.clone();
            let result = match self.unmounted(&uid, until, stop) {
                Ok(()) => self.remove_pod(&uid, stop),
                Err(error) => Err(error),
            };
            if !report.add(uid, result) {
                return Ok(report);
            }
        }
        self.sweep_devices(stop);
        Ok(report)
    }

    /// Starts the unmount of a pod that needs servers or drivers. Waits for its operations until
    /// `settled`. Returns whether an unmount is under way.
    fn begin_unmount(&self, uid: &PodUid, settled: Instant, stop: &StopToken) -> Result<bool, VolumeError> {
        if self.orphans.unmounts().contains_key(uid) {
            return Ok(true);
        }
        self.operations.prepare_removal_until(uid, settled, stop)?;
        let path = paths::pod(&self.settings.root_dir, uid)?;
        let Some(work) = self.unmounts(uid, &path)?.filter(|work| !work.is_local) else { return Ok(false) };
        // One sweep runs at a time: no other one starts an unmount meanwhile.
        if self.orphans.unmounts().len() >= MAX_UNMOUNTS {
            return Err(VolumeError::TooManyPending);
        }
        let (report, ended) = bounded(1);
        let to = move |result: UnmountResult| {
            // The channel has room; the sweep may be over.
            let _ = report.send(result);
        };
        let key = (uid, operations::UNMOUNT, &OperationScope::default());
        let operation = self.operations.start(key, to, move |stop| Ok(work.run(stop)))?;
        let under_way = RunningUnmount { operation, begun: Instant::now(), ended };
        self.orphans.unmounts().insert(uid.clone(), under_way);
        Ok(true)
    }

    /// Waits for the end of an unmount. One that is over its time is stopped.
    fn unmounted(&self, uid: &PodUid, until: Instant, stop: &StopToken) -> Result<(), VolumeError> {
        let under_way = self.orphans.unmounts().remove(uid);
        let Some(RunningUnmount { operation, begun, ended }) = under_way else { return Ok(()) };
        let _waiting = threads::waiting("the unmount of an orphan");
        let result = select_biased! {
            recv(ended) -> result => result.unwrap_or(Err(VolumeError::Panicked)),
            recv(stop.signal()) -> _ => Err(VolumeError::Stopping),
            default(until.saturating_duration_since(Instant::now())) => Err(VolumeError::Overdue),
        };
        match result {
            Err(VolumeError::Overdue) if begun.elapsed() < operations::LIMIT => {
                self.orphans.unmounts().insert(uid.clone(), RunningUnmount { operation, begun, ended });
                Err(VolumeError::Pending)
            }
            Err(error) => Err(error),
            Ok(failures) => {
                operation.finish();
                let volumes: Vec<String> = failures.iter().map(|(volume, _)| volume.clone()).collect();
                match failures.into_iter().next() {
                    None => Ok(()),
                    Some((_, error @ VolumeError::Stopping)) => Err(error),
                    Some((_, error)) => Err(VolumeError::LeftBehind { volumes, cause: chain(&error) }),
                }
            }
        }
    }

    fn remove_pod(&self, uid: &PodUid, stop: &StopToken) -> Result<(), VolumeError> {
        self.tear_down(uid, stop)?;
        let path = paths::pod(&self.settings.root_dir, uid)?;
        let still = mounts::below(&mounts::read()?, &path);
        if let Some(mount) = still.first() {
            return Err(VolumeError::LeftBehind {
                volumes: still.iter().map(|mount| mount.display().to_string()).collect(),
                cause: format!("{} is mounted", mount.display()),
            });
        }
        let name = std::ffi::CString::new(uid.as_str())
            .map_err(|_| VolumeError::Name { name: uid.as_str().to_owned() })?;
        let pods = paths::pods(&self.settings.root_dir);
        let dir = tree::open(&pods).map_err(VolumeError::io("open", &pods))?;
        match tree::remove_at(dir.as_fd(), &name, stop) {
            Ok(()) => Ok(()),
            Err(RemovalError::Stopping) => Err(VolumeError::Stopping),
            Err(RemovalError::Entry { path: entry, errno }) => {
                Err(VolumeError::io("remove", &path.join(entry))(errno))
            }
        }
    }
}

/// Whether there may be a directory, although it cannot be opened.
fn may_be_directory(error: &std::io::Error) -> bool {
    !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

impl OrphanReport {
    /// Adds the result for a pod. False when the agent stops.
    fn add(&mut self, uid: PodUid, result: Result<(), VolumeError>) -> bool {
        match result {
            Ok(()) => self.removed.push(uid),
            Err(VolumeError::Stopping) => return false,
            Err(error) => {
                let text = format!("orphaned pod {:?} found, but {}", uid.as_str(), chain(&error));
                self.left.push((uid, text));
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use crate::util::testing::without_access;
    use std::os::unix::fs::PermissionsExt;

    fn volumes_in(root: &std::path::Path) -> Volumes {
        testing::volumes(root, None).0
    }

    /// Without a directory, the cgroup of a pod is removed with its processes.
    #[test]
    fn pod_whose_directory_cannot_be_opened_has_one() {
        let root = tempfile::tempdir().unwrap();
        let volumes = volumes_in(root.path());
        let pods = root.path().join("pods");
        assert!(!volumes.has_directory(&PodUid::from("u1")) && !volumes.has_directory(&PodUid::from("..")));
        std::fs::create_dir_all(pods.join("u1")).unwrap();
        std::fs::write(pods.join("file"), "").unwrap();
        assert!(volumes.has_directory(&PodUid::from("u1")) && !volumes.has_directory(&PodUid::from("file")));
        std::fs::set_permissions(pods.join("u1"), std::fs::Permissions::from_mode(0o0)).unwrap();
        assert!(without_access(move || volumes.has_directory(&PodUid::from("u1"))));
    }

    /// Its cgroup stayed, and nothing was reported.
    #[test]
    fn orphan_whose_directory_cannot_be_opened_is_reported() {
        let root = tempfile::tempdir().unwrap();
        let volumes = std::sync::Arc::new(volumes_in(root.path()));
        let pods = root.path().join("pods");
        std::fs::create_dir_all(pods.join("u1")).unwrap();
        std::os::unix::fs::symlink("u1", pods.join("link")).unwrap();
        let set_mode = |path: &std::path::Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let sweep = || {
            let volumes = std::sync::Arc::clone(&volumes);
            without_access(move || {
                *volumes.sweep_at.locked() = None;
                (volumes.has_orphans(&|_| false), volumes.orphans(&|_| false, &StopToken::never()))
            })
        };
        set_mode(&pods.join("u1"), 0);
        let (has_orphans, report) = sweep();
        let left = report.unwrap().left;
        assert!(has_orphans && left.len() == 1 && left[0].0 == PodUid::from("u1"), "{left:?}");
        assert!(left[0].1.contains("cannot open") && left[0].1.contains("Permission denied"), "{left:?}");
        // An earlier report stays while it is not known what is there.
        set_mode(&pods, 0);
        let (has_orphans, report) = sweep();
        set_mode(&pods, 0o700);
        assert!(has_orphans && report.is_err());
    }

    #[test]
    fn directories_of_unknown_pods_are_removed_without_foreign_data() {
        let root = tempfile::tempdir().unwrap();
        let volumes = volumes_in(root.path());
        let none = volumes.orphans(&|_| false, &StopToken::never()).unwrap();
        assert_eq!(none, OrphanReport::default());
        let pods = root.path().join("pods");
        for dir in [
            "known/volumes/kubernetes.io~empty-dir/e/data",
            "gone/volumes/kubernetes.io~empty-dir/e/data",
            "gone/containers/c",
            "foreign/volumes/kubernetes.io~csi/v/mount/data",
            "foreign/containers/c",
        ] {
            std::fs::create_dir_all(pods.join(dir)).unwrap();
        }
        std::fs::write(pods.join("gone/etc-hosts"), "x").unwrap();
        std::fs::write(pods.join("no-directory"), "x").unwrap();
        let report = volumes.orphans(&|uid| uid.as_str() == "known", &StopToken::never()).unwrap();
        assert_eq!(report.removed, [PodUid::from("gone")]);
        assert_eq!(report.left.len(), 1);
        let (uid, text) = &report.left[0];
        assert_eq!(uid.as_str(), "foreign");
        assert!(
            text.starts_with("orphaned pod \"foreign\" found, but mounted volumes=[kubernetes.io~csi/v]"),
            "{text}"
        );
        assert!(pods.join("foreign/volumes/kubernetes.io~csi/v/mount/data").exists());
        assert!(pods.join("known/volumes/kubernetes.io~empty-dir/e/data").exists());
        assert!(pods.join("no-directory").exists());
    }

    /// An operation of a pod that was removed by force, which walks through a volume until `work` returns.
    fn walk(
        volumes: &std::sync::Arc<Volumes>,
        uid: &'static str,
        work: impl FnOnce(&Volumes, Vec<StopToken>) + Send + 'static,
    ) -> Operation {
        let dir = volumes.settings.root_dir.join("pods").join(uid);
        std::fs::create_dir_all(dir.join("volumes/kubernetes.io~empty-dir/e")).unwrap();
        let (shared, (begin, begun)) = (std::sync::Arc::clone(volumes), bounded(1));
        let walk = move |_: &StopToken| {
            let stops = shared.operations.walk(&PodUid::from(uid), "v");
            begin.send(()).unwrap();
            work(&shared, stops);
            Ok(())
        };
        let (uid, never) = (PodUid::from(uid), StopToken::never());
        let key = (&uid, "v", &OperationScope::default());
        let operation = volumes.operations.start_until(key, &never, |_| {}, walk).unwrap();
        begun.recv().unwrap();
        operation
    }

    fn wait_for_end(stops: &[StopToken]) {
        while !stops.iter().any(StopToken::is_stopped) {
            let _ = StopToken::never().wait(Duration::from_millis(1));
        }
    }

    #[test]
    fn no_lock_is_held_while_a_sweep_waits_for_an_operation() {
        let root = tempfile::tempdir().unwrap();
        let volumes = std::sync::Arc::new(volumes_in(root.path()));
        let (report, was_free) = bounded(1);
        let _operation = walk(&volumes, "gone", move |volumes, stops| {
            // The sweep waits for this operation from now on.
            wait_for_end(&stops);
            let is_free = (0..1000).any(|_| {
                let _ = StopToken::never().wait(Duration::from_millis(1));
                volumes.orphans.unmounts.try_lock().is_ok()
            });
            report.send(is_free).unwrap();
        });
        let swept = volumes.orphans(&|_| false, &StopToken::never()).unwrap();
        assert!(was_free.recv().unwrap());
        assert_eq!((swept.removed, swept.left), (vec![PodUid::from("gone")], Vec::new()));
    }

    /// Each orphan waited for the operations of those before it.
    #[test]
    fn sweep_waits_for_the_operations_of_all_orphans_together() {
        let root = tempfile::tempdir().unwrap();
        let volumes = std::sync::Arc::new(volumes_in(root.path()));
        // The operation of each orphan ends once those of all are stopped.
        let barrier = std::sync::Arc::new(std::sync::Barrier::new(3));
        let (report, ended) = bounded(3);
        let _operations = ["gone1", "gone2", "gone3"].map(|uid| {
            let (barrier, report) = (std::sync::Arc::clone(&barrier), report.clone());
            walk(&volumes, uid, move |volumes, stops| {
                wait_for_end(&stops);
                barrier.wait();
                report.send(volumes.operations.enter_pod_dir(&PodUid::from(uid), "v").is_ok()).unwrap();
            })
        });
        let swept = volumes.orphans(&|_| false, &StopToken::never()).unwrap();
        assert_eq!((swept.removed.len(), swept.left), (3, Vec::new()));
        let was_awaited: Vec<bool> = ended.iter().take(3).collect();
        assert_eq!(was_awaited, [true; 3], "none was left alone");
    }

    /// A static pod has the same UID when its manifest is put back.
    #[test]
    fn directory_of_a_pod_that_comes_back_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        let volumes = volumes_in(root.path());
        let volumes = std::sync::Arc::new(volumes);
        let object = serde_json::json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "static"},
            "spec": {"volumes": [{"name": "e", "emptyDir": {}}],
                "containers": [{"name": "c", "volumeMounts": [{"name": "e", "mountPath": "/e"}]}]},
        });
        let pod =
            crate::model::pod::Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
        let fresh = root.path().join("pods/static/volumes/kubernetes.io~empty-dir/e/fresh");
        // It was published before the check that follows the note of the removal.
        std::fs::create_dir_all(root.path().join("pods/static/volumes")).unwrap();
        let checks = std::cell::Cell::new(0);
        let is_known = |_: &PodUid| {
            checks.set(checks.get() + 1);
            if checks.get() > 1 {
                volumes.setup(&pod, &stopping()).unwrap_err();
            }
            checks.get() > 1
        };
        assert_eq!(volumes.orphans(&is_known, &StopToken::never()).unwrap(), OrphanReport::default());
        assert_eq!(checks.get(), 2);
        assert!(root.path().join("pods/static/volumes").exists());
        // It is published while its directory is removed: its set-up waits for the end.
        let removing = volumes.orphans.begin(pod.uid(), &|_| false).unwrap();
        let (done, result) = bounded(1);
        let (shared, again) = (std::sync::Arc::clone(&volumes), pod.clone());
        let work = move |_: StopToken| done.send(shared.setup(&again, &StopToken::never())).unwrap();
        let running = threads::spawn("t/set-up", threads::Stack::Small, threads::OnDeath::Unsupervised, work);
        volumes.remove_pod(pod.uid(), &StopToken::never()).unwrap();
        assert!(result.is_empty());
        drop(removing);
        let ready = result.recv_timeout(operations::LIMIT).unwrap().unwrap();
        std::fs::write(ready[0].host_path.join("fresh"), "").unwrap();
        drop(running);
        assert!(fresh.exists());
        assert!(volumes.orphans(&|_| true, &StopToken::never()).unwrap().removed.is_empty());
        assert!(fresh.exists() && volumes.orphans.removing().is_empty());
    }

    fn stopping() -> StopToken {
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        stop
    }
}
