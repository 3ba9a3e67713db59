//! Operations that may hang: those that touch file systems which are not the agent's own, such as a
//! network mount behind a hostPath. Each runs on its own thread without a deadline; callers wait
//! for it up to a limit.
//!
//! At most one operation runs per pod and volume. Each pod always has a place for one operation, so
//! that no other pod can delay it; further places are shared, with limits for a pod, a namespace
//! and a server. An operation that is over its time counts only against its own pod. So the number
//! of threads is at most [`MAX_PENDING_OF_POD`] for each pod, whatever hangs. A pod's unmount has a
//! place of its own, and so have updates of volumes that the pod has: an API server that does not
//! respond takes no place of a mount, and file systems that hang take none of the volumes of files. A
//! hanging operation remains, and is named in the log, until the kernel ends the call; until then there
//! is no other operation on the volume.
//!
//! The removal of a pod's volumes waits for the pod's operations, which may mount something. An
//! operation that only waits for a file system says so ([`Operations::leave_pod_dir`]), and does not keep a
//! pod that is removed ([`Operations::prepare_removal`]).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, select_biased};

use super::error::VolumeError;
use crate::model::ids::PodUid;
use crate::util::lock::LockExt;
use crate::util::stop::{self, StopSource, StopToken};
use crate::util::threads::{self, OnDeath, Running, Stack};

/// The longest wait of a caller: upstream's two minutes and three seconds.
pub(super) const LIMIT: Duration = Duration::from_secs(123);
/// The limit for one pod, over time or not. In addition the pod may have one unmount, and as many
/// operations of each purpose that updates, of which one is not over its time.
const MAX_PENDING_OF_POD: usize = 3;
/// Operations of all pods that run at the same time, apart from one of each pod.
const MAX_SHARED: usize = 64;
/// Those of one namespace.
const MAX_SHARED_OF_NAMESPACE: usize = 32;
/// Those on one server or of one driver.
const MAX_SHARED_OF_SERVER: usize = 16;
/// The key of the unmount of all volumes of a pod, in place of a volume's name.
pub(super) const UNMOUNT: &str = "";
/// The wait for walks that were ended: the call on the present file has to return.
pub(super) const WALK_END: Duration = Duration::from_secs(2);
/// The wait for a cancelled operation that is about to end.
const GRACE: Duration = Duration::from_millis(20);

type Key = (PodUid, String);

/// What the limits of an operation apply to, besides its pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct OperationScope {
    pub(super) purpose: Purpose,
    /// The pod's namespace; empty: not known.
    pub(super) namespace: String,
    /// The file server or driver; `None`: not known yet.
    pub(super) server: Option<String>,
}

/// What an operation is for. Each purpose has its own limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) enum Purpose {
    /// A volume that the pod does not have yet, or its unmount.
    #[default]
    Mount,
    /// Updates of volumes of files that the pod has. Nothing outside of the agent's own directories is
    /// needed for them, apart from the API server.
    Files,
    /// Updates of other volumes that the pod has.
    Update,
}

/// A running operation.
#[derive(Debug)]
struct Pending {
    begun: Instant,
    scope: OperationScope,
    walk: WalkStops,
    access: PodDirAccess,
    /// Stopped when the operation has ended.
    ended: StopToken,
}

/// What an operation may do to the directory of its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PodDirAccess {
    /// It may mount or make something there: the removal of the pod's volumes waits for it.
    Inside,
    /// It does nothing there before it says so. It waits for a file system perhaps.
    Outside,
    /// The removal went on without it. It may do nothing there any more.
    Left,
}

/// What ends a walk through the files of a volume. An operation may be over its time and walk on.
#[derive(Debug)]
struct WalkStops {
    /// Dropped when the pod's volumes are removed.
    removal: Option<StopSource>,
    /// The signals of this, and of the end of the pod and of the agent.
    stops: Vec<StopToken>,
    /// Whether the operation has begun to walk.
    has_begun: bool,
}

impl Pending {
    /// An operation that begins. `until`: the end of the pod and of the agent.
    fn new(begun: Instant, scope: OperationScope, until: Vec<StopToken>) -> (Pending, StopSource) {
        let (removal, removed) = stop::pair();
        let (end, ended) = stop::pair();
        let stops = until.into_iter().chain([removed]).collect();
        let walk = WalkStops { removal: Some(removal), stops, has_begun: false };
        (Pending { begun, scope, walk, access: PodDirAccess::Inside, ended }, end)
    }

    fn is_over_time(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.begun) >= LIMIT
    }

    fn is_of(&self, ended: &StopToken) -> bool {
        self.ended.signal().same_channel(ended.signal())
    }

    fn leave_pod_dir(&mut self) {
        if self.access == PodDirAccess::Inside {
            self.access = PodDirAccess::Outside;
        }
    }
}

type Table = HashMap<Key, Pending>;

/// The volumes of a pod between which an operation goes on.
#[derive(Clone, Copy)]
pub(super) struct VolumeMove<'a> {
    pub(super) from: &'a str,
    pub(super) to: &'a str,
}

/// The running operations. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Operations {
    pending: Arc<Mutex<Table>>,
}

/// Whether one more operation that updates volumes of the pod may run. Pure.
fn place_for_update(
    pending: &Table,
    uid: &PodUid,
    purpose: Purpose,
    now: Instant,
) -> Result<(), VolumeError> {
    let of_pod =
        pending.iter().filter(|((owner, _), operation)| owner == uid && operation.scope.purpose == purpose);
    let (over_time, live): (Vec<_>, Vec<_>) = of_pod.partition(|(_, operation)| operation.is_over_time(now));
    match over_time.len() {
        _ if !live.is_empty() => Err(VolumeError::Pending),
        MAX_PENDING_OF_POD.. => Err(VolumeError::TooManyPending),
        _ => Ok(()),
    }
}

/// Whether one more operation of the pod may run that is no update. Pure.
///
/// DIFFERS: upstream has no limit.
fn has_place(pending: &Table, uid: &PodUid, scope: &OperationScope, now: Instant) -> bool {
    let (mut of_pod, mut all) = (0_usize, 0_usize);
    // For each pod, its operations that are not over their time.
    let mut live: HashMap<&PodUid, usize> = HashMap::new();
    let (mut of_namespace, mut of_server) = (0_usize, 0_usize);
    let mut running: Vec<(&PodUid, &Pending)> = Vec::new();
    for ((owner, volume), operation) in pending {
        if volume == UNMOUNT || operation.scope.purpose != Purpose::Mount {
            continue;
        }
        of_pod += usize::from(owner == uid);
        if !operation.is_over_time(now) {
            running.push((owner, operation));
        }
    }
    // The first operation of each pod has a place of its own.
    running.sort_by_key(|(_, operation)| operation.begun);
    for (owner, operation) in running {
        let count = live.entry(owner).or_default();
        *count += 1;
        if *count > 1 {
            all += 1;
            of_namespace += usize::from(operation.scope.namespace == scope.namespace);
            of_server += usize::from(scope.server.is_some() && operation.scope.server == scope.server);
        }
    }
    let is_first = !live.contains_key(uid);
    let has_shared =
        all < MAX_SHARED && of_namespace < MAX_SHARED_OF_NAMESPACE && of_server < MAX_SHARED_OF_SERVER;
    of_pod < MAX_PENDING_OF_POD && (is_first || has_shared)
}

/// Takes the operation off the list when it ends, however it ends.
struct Entry {
    pending: Arc<Mutex<Table>>,
    ended: StopToken,
    _end: StopSource,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.pending.locked().retain(|_, operation| !operation.is_of(&self.ended));
    }
}

/// Reports the result of an operation once, when it is dropped, or that it panicked.
pub(super) struct Report<T, F: FnOnce(Result<T, VolumeError>)> {
    to: Option<F>,
    result: Option<Result<T, VolumeError>>,
}

impl<T, F: FnOnce(Result<T, VolumeError>)> Report<T, F> {
    pub(super) fn new(to: F) -> Self {
        Report { to: Some(to), result: None }
    }

    pub(super) fn set(&mut self, result: Result<T, VolumeError>) {
        self.result = Some(result);
    }
}

impl<T, F: FnOnce(Result<T, VolumeError>)> Drop for Report<T, F> {
    fn drop(&mut self) {
        if let Some(to) = self.to.take() {
            to(self.result.take().unwrap_or(Err(VolumeError::Panicked)));
        }
    }
}

/// A running operation. Dropping it stops the operation, or detaches it if it does not stop.
pub(super) struct Operation {
    running: Option<Running>,
    ended: StopToken,
}

impl std::fmt::Debug for Operation {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Operation")
    }
}

impl Operation {
    /// Joins the thread of an operation that has reported its result.
    pub(super) fn finish(mut self) {
        drop(self.running.take());
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.stop(GRACE);
        }
    }
}

impl Operations {
    /// Runs `work` and waits for its end up to `limit`. `work` gets a stop token that stops it when
    /// the wait is over.
    pub(super) fn run<T: Send + 'static>(
        &self,
        (uid, volume, scope): (&PodUid, &str, &OperationScope),
        limit: Duration,
        stop: &StopToken,
        work: impl FnOnce(&StopToken) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<T, VolumeError> {
        let (report, reported) = bounded(1);
        let to = move |result| {
            // The caller may have stopped waiting.
            let _ = report.send(result);
        };
        let operation = self.start((uid, volume, scope), to, work)?;
        let _waiting = threads::waiting("volume operation");
        let result = select_biased! {
            recv(stop.signal()) -> _ => Err(VolumeError::Stopping),
            recv(reported) -> result => {
                operation.finish();
                return result.unwrap_or(Err(VolumeError::Panicked));
            }
            default(limit) => Err(VolumeError::Overdue),
        };
        drop(operation);
        // The operation may have ended at the last moment.
        reported.try_recv().unwrap_or(result)
    }

    /// Starts `work` on its own thread, which ends with a call of `report`, also when the work
    /// panics. `work` gets a token that stops it when the [`Operation`] is dropped.
    pub(super) fn start<T: 'static>(
        &self,
        (uid, volume, scope): (&PodUid, &str, &OperationScope),
        report: impl FnOnce(Result<T, VolumeError>) + Send + 'static,
        work: impl FnOnce(&StopToken) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<Operation, VolumeError> {
        self.start_entered(uid, self.enter(uid, volume, scope, Vec::new())?, report, work)
    }

    /// As [`Operations::start`]. `until` ends walks through the files of the volume, which do not end
    /// when the [`Operation`] is dropped; see [`Operations::walk`].
    pub(super) fn start_until<T: 'static>(
        &self,
        (uid, volume, scope): (&PodUid, &str, &OperationScope),
        until: &StopToken,
        report: impl FnOnce(Result<T, VolumeError>) + Send + 'static,
        work: impl FnOnce(&StopToken) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<Operation, VolumeError> {
        self.start_entered(uid, self.enter(uid, volume, scope, vec![until.clone()])?, report, work)
    }

    fn start_entered<T: 'static>(
        &self,
        uid: &PodUid,
        entry: Entry,
        report: impl FnOnce(Result<T, VolumeError>) + Send + 'static,
        work: impl FnOnce(&StopToken) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<Operation, VolumeError> {
        let short: String = uid.as_str().chars().take(8).collect();
        let ended = entry.ended.clone();
        let running =
            threads::spawn(&format!("vol/{short}"), Stack::Small, OnDeath::Unsupervised, move |own_stop| {
                let mut report = Report::new(report);
                let _entry = entry;
                let _waiting = threads::waiting("volume operation");
                report.set(work(&own_stop));
            })
            .map_err(|source| VolumeError::Thread { source })?;
        Ok(Operation { running: Some(running), ended })
    }

    fn enter(
        &self,
        uid: &PodUid,
        volume: &str,
        scope: &OperationScope,
        until: Vec<StopToken>,
    ) -> Result<Entry, VolumeError> {
        let key = (uid.clone(), volume.to_owned());
        let now = Instant::now();
        let mut pending = self.pending.locked();
        if pending.contains_key(&key) {
            return Err(VolumeError::Pending);
        }
        match scope.purpose {
            Purpose::Mount if volume == UNMOUNT || has_place(&pending, uid, scope, now) => {}
            Purpose::Mount => return Err(VolumeError::TooManyPending),
            purpose => place_for_update(&pending, uid, purpose, now)?,
        }
        let (operation, end) = Pending::new(now, scope.clone(), until);
        let ended = operation.ended.clone();
        pending.insert(key, operation);
        Ok(Entry { pending: Arc::clone(&self.pending), ended, _end: end })
    }

    /// The running operation on the first volume goes on with the second one of the same pod, with a
    /// time limit of its own, and does nothing in the directory of the pod until
    /// [`Operations::enter_pod_dir`].
    ///
    /// # Errors
    /// [`VolumeError::Pending`]: the other volume has an operation. [`VolumeError::Stopping`]: the pod's
    /// volumes are removed, and the operation must end.
    pub(super) fn move_to(
        &self,
        uid: &PodUid,
        VolumeMove { from, to }: VolumeMove<'_>,
    ) -> Result<(), VolumeError> {
        let mut pending = self.pending.locked();
        let (from, to) = ((uid.clone(), from.to_owned()), (uid.clone(), to.to_owned()));
        if from != to && pending.contains_key(&to) {
            return Err(VolumeError::Pending);
        }
        let goes_on =
            |operation: &Pending| operation.access != PodDirAccess::Left && operation.walk.removal.is_some();
        if !pending.get(&from).is_some_and(goes_on) {
            return Err(VolumeError::Stopping);
        }
        if let Some(mut operation) = pending.remove(&from) {
            (operation.begun, operation.access, operation.walk.has_begun) =
                (Instant::now(), PodDirAccess::Outside, false);
            pending.insert(to, operation);
        }
        Ok(())
    }

    /// The running operation on the volume begins a walk through its files. Returns the signals that
    /// end the walk; the end of the wait for the operation is not among them.
    pub(super) fn walk(&self, uid: &PodUid, volume: &str) -> Vec<StopToken> {
        let mut pending = self.pending.locked();
        let Some(operation) = pending.get_mut(&(uid.clone(), volume.to_owned())) else { return Vec::new() };
        operation.walk.has_begun = true;
        // A walk changes only files of the volume, and is the last step.
        operation.leave_pod_dir();
        operation.walk.stops.clone()
    }

    /// From now on the running operation on the volume does nothing in the directory of its pod, until
    /// [`Operations::enter_pod_dir`]: a file system of another server may let it wait.
    pub(super) fn leave_pod_dir(&self, uid: &PodUid, volume: &str) {
        let mut pending = self.pending.locked();
        if let Some(operation) = pending.get_mut(&(uid.clone(), volume.to_owned())) {
            operation.leave_pod_dir();
        }
    }

    /// The running operation will change the directory of its pod.
    ///
    /// # Errors
    /// [`VolumeError::Stopping`] when the pod's volumes are removed: it must end.
    pub(super) fn enter_pod_dir(&self, uid: &PodUid, volume: &str) -> Result<(), VolumeError> {
        let mut pending = self.pending.locked();
        let Some(operation) = pending.get_mut(&(uid.clone(), volume.to_owned())) else { return Ok(()) };
        if operation.access == PodDirAccess::Left {
            return Err(VolumeError::Stopping);
        }
        operation.access = PodDirAccess::Inside;
        Ok(())
    }

    /// Prepares the removal of the pod's volumes: ends walks, and waits a short time for operations that
    /// are outside of the pod's directory. Those that still hang, because a server does not respond
    /// perhaps, are left alone, and change nothing of the pod any more.
    ///
    /// # Errors
    /// [`VolumeError::Pending`] when an operation may still mount something for the pod.
    pub(super) fn prepare_removal(&self, uid: &PodUid, stop: &StopToken) -> Result<(), VolumeError> {
        self.prepare_removal_until(uid, Instant::now() + WALK_END, stop)
    }

    /// As [`Operations::prepare_removal`], with a wait until this time at most.
    ///
    /// # Errors
    /// See [`Operations::prepare_removal`].
    pub(super) fn prepare_removal_until(
        &self,
        uid: &PodUid,
        until: Instant,
        stop: &StopToken,
    ) -> Result<(), VolumeError> {
        self.end_walks(uid, until, stop);
        let outside = {
            let pending = self.pending.locked();
            let of_pod = pending.iter().filter(|((owner, _), _)| owner == uid);
            let outside = of_pod.filter(|(_, operation)| {
                operation.access == PodDirAccess::Outside && !operation.walk.has_begun
            });
            outside.map(|(_, operation)| operation.ended.clone()).collect::<Vec<_>>()
        };
        let _waiting = threads::waiting("volume operation");
        for ended in outside {
            select_biased! {
                recv(stop.signal()) -> _ => return Err(VolumeError::Stopping),
                recv(ended.signal()) -> _ => {}
                default(until.saturating_duration_since(Instant::now())) => break,
            }
        }
        let mut pending = self.pending.locked();
        for (_, operation) in pending.iter_mut().filter(|((owner, _), _)| owner == uid) {
            if operation.access == PodDirAccess::Outside {
                operation.access = PodDirAccess::Left;
            }
        }
        drop(pending);
        // A running operation may mount a volume that would be removed.
        if self.is_busy(uid) { Err(VolumeError::Pending) } else { Ok(()) }
    }

    /// Whether an operation on a volume of the pod was left alone, and still has files open there.
    pub(super) fn has_left(&self, uid: &PodUid) -> bool {
        let pending = self.pending.locked();
        pending.iter().any(|((owner, _), operation)| owner == uid && operation.access == PodDirAccess::Left)
    }

    /// Ends all walks through files of the pod's volumes, also those that begin later in a running
    /// operation. Returns the ends of the operations that walk.
    pub(super) fn stop_walks(&self, uid: &PodUid) -> Vec<StopToken> {
        let mut walking = Vec::new();
        let mut pending = self.pending.locked();
        for (_, operation) in pending.iter_mut().filter(|((owner, _), _)| owner == uid) {
            operation.walk.removal = None;
            // One that was left alone hangs.
            let is_awaited = operation.walk.has_begun && operation.access != PodDirAccess::Left;
            walking.extend(is_awaited.then(|| operation.ended.clone()));
        }
        walking
    }

    /// As [`Operations::stop_walks`], and waits a short time until the operations have closed all files.
    fn end_walks(&self, uid: &PodUid, until: Instant, stop: &StopToken) {
        let walking = self.stop_walks(uid);
        let _waiting = threads::waiting("walk through the files of a volume");
        for ended in walking {
            select_biased! {
                recv(stop.signal()) -> _ => return,
                recv(ended.signal()) -> _ => {}
                default(until.saturating_duration_since(Instant::now())) => return,
            }
        }
    }

    /// The server or driver of a running operation has become known.
    pub(super) fn is_served_by(&self, uid: &PodUid, volume: &str, server: Option<String>) {
        let mut pending = self.pending.locked();
        if let Some(operation) = pending.get_mut(&(uid.clone(), volume.to_owned())) {
            operation.scope.server = server;
        }
    }

    /// The operations that have run for `limit`, with the volume ([`UNMOUNT`] for the unmount of all
    /// volumes of the pod) and the time so far.
    pub(super) fn slow(&self, limit: Duration) -> Vec<(PodUid, String, Duration)> {
        let pending = self.pending.locked();
        let mut found: Vec<_> = pending
            .iter()
            .map(|((uid, volume), operation)| (uid.clone(), volume.clone(), operation.begun.elapsed()))
            .filter(|(_, _, since)| *since >= limit)
            .collect();
        found.sort();
        found
    }

    /// The volume of an operation that is over its time.
    pub(super) fn over_time(&self, operation: &Operation, now: Instant) -> Option<String> {
        let pending = self.pending.locked();
        let is_late = |running: &Pending| running.is_of(&operation.ended) && running.is_over_time(now);
        pending.iter().find(|(_, running)| is_late(running)).map(|((_, volume), _)| volume.clone())
    }

    /// Whether an operation on the volume runs, or the unmount of all volumes of the pod ([`UNMOUNT`]).
    pub(super) fn is_running(&self, uid: &PodUid, volume: &str) -> bool {
        self.pending.locked().contains_key(&(uid.clone(), volume.to_owned()))
    }

    /// The running operation on a volume is over its time from now on.
    #[cfg(test)]
    pub(super) fn make_late(&self, uid: &PodUid, volume: &str) {
        let key = (uid.clone(), volume.to_owned());
        self.pending.locked().get_mut(&key).unwrap().begun = Instant::now().checked_sub(LIMIT).unwrap();
    }

    /// Whether an operation of the pod still runs, apart from those that were left alone.
    pub(super) fn is_busy(&self, uid: &PodUid) -> bool {
        let pending = self.pending.locked();
        pending.iter().any(|((busy, _), operation)| busy == uid && operation.access != PodDirAccess::Left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(10);

    fn uid() -> PodUid {
        PodUid::from("u")
    }

    #[test]
    fn result_of_operation_is_returned() {
        let operations = Operations::default();
        for _ in 0..2 {
            assert_eq!(
                operations
                    .run((&uid(), "v", &OperationScope::default()), LIMIT, &StopToken::never(), |_| Ok(7))
                    .unwrap(),
                7
            );
        }
        let failed =
            operations.run((&uid(), "v", &OperationScope::default()), LIMIT, &StopToken::never(), |_| {
                Err::<(), _>(VolumeError::Stopping)
            });
        assert!(matches!(failed, Err(VolumeError::Stopping)));
        assert!(!operations.is_busy(&uid()));
    }

    #[test]
    fn operation_that_hangs_blocks_only_its_volume() {
        let operations = Operations::default();
        let (release, hold) = bounded::<()>(0);
        let begun = Instant::now();
        let hung = operations.run(
            (&uid(), "v", &OperationScope::default()),
            SHORT,
            &StopToken::never(),
            move |_| {
                let _ = hold.recv();
                Ok(())
            },
        );
        assert!(matches!(hung, Err(VolumeError::Overdue)));
        assert!(begun.elapsed() < Duration::from_secs(60));
        assert!(operations.is_busy(&uid()));
        let slow = operations.slow(SHORT);
        assert_eq!(
            slow.iter().map(|(pod, volume, _)| (pod, volume.as_str())).collect::<Vec<_>>(),
            [(&uid(), "v")]
        );
        assert_eq!(operations.slow(LIMIT), []);
        let again =
            operations.run((&uid(), "v", &OperationScope::default()), SHORT, &StopToken::never(), |_| Ok(()));
        assert!(matches!(again, Err(VolumeError::Pending)));
        operations
            .run((&uid(), "w", &OperationScope::default()), LIMIT, &StopToken::never(), |_| Ok(()))
            .unwrap();
        drop(release);
        // After the end of the operation the volume can be used again.
        let freed = (0..3000).any(|_| {
            let _ = StopToken::never().wait(SHORT);
            !operations.is_busy(&uid())
        });
        assert!(freed);
    }

    #[test]
    fn walk_outlives_the_wait_of_its_set_up_and_ends_with_the_pod_or_its_volumes() {
        for is_pod_ended in [true, false] {
            let operations = Operations::default();
            let (pod, until) = stop::pair();
            let (report, begun) = bounded(1);
            let walking = operations.clone();
            let work = move |own: &StopToken| {
                let stops = walking.walk(&uid(), "v");
                let _ = own.wait(LIMIT);
                report.send(stops.iter().any(StopToken::is_stopped)).unwrap();
                while !stops.iter().any(StopToken::is_stopped) {
                    let _ = stops[0].wait(SHORT);
                }
                Err::<(), _>(VolumeError::Stopping)
            };
            let key = (&uid(), "v", &OperationScope::default());
            let operation = operations.start_until(key, &until, |_| {}, work).unwrap();
            drop(operation);
            assert!(!begun.recv().unwrap(), "the end of the wait stops no walk");
            assert!(operations.is_busy(&uid()));
            if is_pod_ended {
                drop(pod);
                while operations.is_busy(&uid()) {
                    let _ = StopToken::never().wait(SHORT);
                }
            } else {
                operations.end_walks(&uid(), Instant::now() + LIMIT, &StopToken::never());
                assert!(!operations.is_busy(&uid()));
            }
        }
    }

    #[test]
    fn walk_that_begins_after_the_removal_of_the_volumes_ends_at_once() {
        let operations = Operations::default();
        let _entry = operations.enter(&uid(), "v", &OperationScope::default(), Vec::new()).unwrap();
        // It does not walk, so it is not waited for.
        operations.end_walks(&uid(), Instant::now() + LIMIT, &StopToken::never());
        assert!(operations.walk(&uid(), "v").iter().any(StopToken::is_stopped));
        assert!(operations.walk(&uid(), "other").is_empty());
    }

    #[test]
    fn stop_and_panic_end_the_wait_with_an_error() {
        let operations = Operations::default();
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        let stopped = operations.run((&uid(), "v", &OperationScope::default()), LIMIT, &stop, |own| {
            let _ = own.wait(LIMIT);
            Err::<(), _>(VolumeError::Stopping)
        });
        assert!(matches!(stopped, Err(VolumeError::Stopping)));
        while operations.is_busy(&uid()) {
            std::thread::yield_now();
        }
        let panicked = operations.run(
            (&uid(), "v", &OperationScope::default()),
            LIMIT,
            &StopToken::never(),
            |_| -> Result<(), _> { panic!("a test's own") },
        );
        assert!(matches!(panicked, Err(VolumeError::Panicked)));
        assert!(!operations.is_busy(&uid()));
    }

    #[test]
    fn result_is_reported_after_volume_is_free() {
        let operations = Operations::default();
        let (report, reported) = bounded(2);
        for volume in ["fine", "panics"] {
            let (report, again) = (report.clone(), operations.clone());
            let to = move |result: Result<u8, _>| {
                report
                    .send((
                        result,
                        again.enter(&uid(), volume, &OperationScope::default(), Vec::new()).is_ok(),
                    ))
                    .unwrap()
            };
            let work = move |_: &StopToken| if volume == "fine" { Ok(7) } else { panic!("a test's own") };
            let operation = operations.start((&uid(), volume, &OperationScope::default()), to, work).unwrap();
            let (result, is_free) = reported.recv_timeout(LIMIT).unwrap();
            operation.finish();
            assert!(is_free);
            match volume {
                "fine" => assert_eq!(result.unwrap(), 7),
                _ => assert!(matches!(result, Err(VolumeError::Panicked))),
            }
        }
        assert!(reported.is_empty());
    }

    fn scope(namespace: &str, server: Option<&str>) -> OperationScope {
        OperationScope {
            namespace: namespace.to_owned(),
            server: server.map(str::to_owned),
            ..OperationScope::default()
        }
    }

    fn pod(n: usize) -> PodUid {
        PodUid::from(format!("u{n}").as_str())
    }

    #[test]
    fn one_pod_has_few_operations_at_the_same_time_and_its_unmount() {
        let operations = Operations::default();
        let own = scope("n", None);
        let entered: Vec<_> =
            (0..100).map(|n| operations.enter(&pod(0), &format!("v{n}"), &own, Vec::new())).collect();
        assert_eq!(entered.iter().flatten().count(), MAX_PENDING_OF_POD);
        assert!(entered.iter().skip(3).all(|entry| matches!(entry, Err(VolumeError::TooManyPending))));
        let unmount = operations.enter(&pod(0), UNMOUNT, &own, Vec::new()).unwrap();
        assert!(matches!(operations.enter(&pod(0), UNMOUNT, &own, Vec::new()), Err(VolumeError::Pending)));
        drop((entered, unmount));
        operations.enter(&pod(0), "v99", &own, Vec::new()).unwrap();
    }

    /// Six pods with three volumes each on a dead server used all threads of the node.
    #[test]
    fn hanging_pods_of_one_namespace_leave_places_for_others() {
        let operations = Operations::default();
        let dead = scope("attacker", Some("nfs/192.0.2.1"));
        let hang = |pods: std::ops::Range<usize>| -> Vec<Entry> {
            let each = |n| (0..3).map(move |volume| (n, format!("v{volume}")));
            pods.flat_map(each)
                .filter_map(|(n, v)| operations.enter(&pod(n), &v, &dead, Vec::new()).ok())
                .collect()
        };
        let six = hang(0..6);
        assert_eq!(six.len(), 18);
        let many = hang(100..300);
        // One for each pod, and the shared places of the server.
        assert_eq!(six.len() + many.len(), 206 + MAX_SHARED_OF_SERVER);
        let other = scope("other", Some("driver"));
        let _other =
            ["v", "w", "x"].map(|volume| operations.enter(&pod(7), volume, &other, Vec::new()).unwrap());
        // A pod of the same namespace, and one with the same server, have at least one.
        let _first = operations.enter(&pod(8), "v", &dead, Vec::new()).unwrap();
        assert!(operations.enter(&pod(8), "w", &dead, Vec::new()).is_err());
        let _second = operations.enter(&pod(8), "w", &scope("attacker", Some("driver")), Vec::new()).unwrap();
    }

    #[test]
    fn sixteen_hanging_unmounts_do_not_delay_the_end_of_another_pod() {
        let operations = Operations::default();
        let own = scope("n", None);
        let _hang: Vec<Entry> =
            (0..16).map(|n| operations.enter(&pod(n), UNMOUNT, &own, Vec::new()).unwrap()).collect();
        let other = (&pod(16), UNMOUNT, &own);
        operations.run(other, LIMIT, &StopToken::never(), |_| Ok(())).unwrap();
    }

    /// After a start of the agent all pods inspect their volumes at the same time.
    #[test]
    fn every_pod_of_a_restarted_agent_gets_a_place_at_once() {
        let operations = Operations::default();
        let own = scope("n", Some("driver"));
        let entered: Vec<_> = (0..1000).map(|n| operations.enter(&pod(n), "v", &own, Vec::new())).collect();
        assert!(entered.iter().all(Result::is_ok));
    }

    #[test]
    fn operation_over_its_time_counts_only_against_its_own_pod() {
        let begun = Instant::now();
        let late = begun + LIMIT;
        let own = scope("n", Some("s"));
        let mut table = Table::new();
        for n in 0..40 {
            for volume in ["a", "b"] {
                table.insert((pod(n), volume.to_owned()), Pending::new(begun, own.clone(), Vec::new()).0);
            }
        }
        table.insert((pod(99), "a".to_owned()), Pending::new(late, own.clone(), Vec::new()).0);
        assert!(!has_place(&table, &pod(99), &own, begun));
        assert!(has_place(&table, &pod(99), &own, late));
        // Its own pod gets one more.
        assert!(has_place(&table, &pod(0), &own, late));
        table.insert((pod(0), "c".to_owned()), Pending::new(begun, own.clone(), Vec::new()).0);
        assert!(!has_place(&table, &pod(0), &own, late));
    }

    /// The updates of three volumes that waited for the API server left a pod no place for a mount.
    #[test]
    fn updates_take_no_place_of_a_mount_and_one_of_each_purpose_runs() {
        let operations = Operations::default();
        let own = scope("n", Some("driver"));
        let update = |n: usize, volume: &str, purpose: Purpose| {
            operations.enter(&pod(n), volume, &OperationScope { purpose, ..own.clone() }, Vec::new())
        };
        let updates: Vec<Entry> = (0..200).map(|n| update(n, "u", Purpose::Update).unwrap()).collect();
        assert!(matches!(update(0, "w", Purpose::Update), Err(VolumeError::Pending)));
        let files = update(0, "f", Purpose::Files).unwrap();
        assert!(matches!(update(0, "w", Purpose::Files), Err(VolumeError::Pending)));
        // A volume has one operation: no mount beside an update.
        let mounted = operations.enter(&pod(0), "u", &own, Vec::new());
        assert!(matches!(mounted, Err(VolumeError::Pending)));
        let mounts: Vec<_> =
            (0..4).map(|n| operations.enter(&pod(0), &format!("v{n}"), &own, Vec::new())).collect();
        assert_eq!(mounts.iter().flatten().count(), MAX_PENDING_OF_POD);
        let other = operations.enter(&pod(1), "v", &own, Vec::new());
        assert!(other.is_ok());
        drop((updates, files, other));
        assert!(update(0, "w", Purpose::Update).is_ok(), "mounts take no place of an update");
    }

    #[test]
    fn updates_over_their_time_leave_places_for_few_more() {
        let begun = Instant::now();
        let (late, own) = (begun + LIMIT, OperationScope { purpose: Purpose::Update, ..scope("n", None) });
        let mut table = Table::new();
        let hang = |table: &mut Table, name: &str| {
            let operation = Pending::new(begun, own.clone(), Vec::new()).0;
            table.insert((pod(0), name.to_owned()), operation);
        };
        let place =
            |table: &Table, n: usize, now: Instant| place_for_update(table, &pod(n), Purpose::Update, now);
        hang(&mut table, "a");
        assert!(matches!(place(&table, 0, begun), Err(VolumeError::Pending)));
        assert!(place(&table, 0, late).is_ok() && place(&table, 1, begun).is_ok());
        hang(&mut table, "b");
        assert!(place(&table, 0, late).is_ok());
        hang(&mut table, "c");
        assert!(matches!(place(&table, 0, late), Err(VolumeError::TooManyPending)), "threads are limited");
        assert!(place_for_update(&table, &pod(0), Purpose::Files, late).is_ok());
        assert!(has_place(&table, &pod(0), &own, late));
    }

    #[test]
    fn operation_that_goes_on_with_another_volume_has_a_new_time_limit_and_ends_with_the_pod() {
        let operations = Operations::default();
        let (report, reported) = bounded(1);
        let (release, hold) = bounded::<()>(0);
        let going_on = operations.clone();
        let work = move |_: &StopToken| {
            let _ = hold.recv();
            going_on.move_to(&uid(), VolumeMove { from: "v", to: "w" })?;
            let _ = hold.recv();
            going_on.move_to(&uid(), VolumeMove { from: "w", to: "x" })
        };
        let to = move |result: Result<(), VolumeError>| report.send(result).unwrap();
        let operation = operations.start((&uid(), "v", &OperationScope::default()), to, work).unwrap();
        operations.make_late(&uid(), "v");
        assert_eq!(operations.over_time(&operation, Instant::now()), Some("v".to_owned()));
        release.send(()).unwrap();
        while !operations.is_running(&uid(), "w") {
            std::thread::yield_now();
        }
        assert!(!operations.is_running(&uid(), "v"));
        assert_eq!(operations.over_time(&operation, Instant::now()), None);
        // It waits outside of the pod's directory, and is left alone.
        operations.prepare_removal_until(&uid(), Instant::now(), &StopToken::never()).unwrap();
        release.send(()).unwrap();
        assert!(matches!(reported.recv_timeout(LIMIT).unwrap(), Err(VolumeError::Stopping)));
        operation.finish();
        assert!(!operations.is_running(&uid(), "w") && !operations.is_running(&uid(), "x"));
    }
}
