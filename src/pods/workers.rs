//! Starts the worker threads, sends them updates and joins them. A plain value, owned by the `sync`
//! thread.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lifecycle::{Failure, PodKill, Update, must_end};
use super::worker::{Deps, Settings, Shared, Worker, WorkerPhase, WorkerReport, stop_unknown};
use crate::model::ids::{FullName, PodUid};
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::runtime::ListedPod;
use crate::runtime::grace::{self, GraceOwner};
use crate::util::lock::LockExt;
use crate::util::mailbox::{self, Post};
use crate::util::stop::{self, StopSource};
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers::Deadlines;

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerEnd {
    /// The pod's life on this node is over.
    Finished,
    /// The worker panicked; only this pod is affected; its worker is started again later.
    Panicked,
}

/// Wait before a worker that panicked is started again; doubles up to 5 min.
const PANIC_RETRY: Duration = Duration::from_secs(10);

enum Body {
    Pod(Pod),
    /// A pod that only the runtime knows.
    Unknown(ListedPod),
}

struct Record {
    body: Body,
    full_name: FullName,
    /// Whether the pod is in the queue of static pods with its full name; the first one runs.
    in_queue: bool,
    pending: Update,
    thread: Option<Thread>,
    shared: Shared,
    /// Whether a thread was ever started: only then can containers run.
    started: bool,
    finished: bool,
    start_again: bool,
    killed: bool,
    /// Whether the source has removed the pod: if the source delivers it again, it is a new pod.
    removed: bool,
    /// How the pod is to be stopped: the order in the mailbox is lost if the worker panics.
    kill: Option<PodKill>,
    /// Whether the pod ends because it was evicted or preempted, and for no earlier reason.
    evicted: bool,
    panics: u32,
}

struct Thread {
    post: Post<(), Update>,
    /// Ends what the worker does for a pod that is to run.
    cancel: Option<StopSource>,
    /// Shortens the grace period of a pod that is being stopped; `None`: the agent stops.
    grace: Option<GraceOwner>,
    /// The last field: its drop waits for the thread, which the other drops have interrupted.
    running: Running,
}

/// The state of a pod after its worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AfterEnd {
    /// The pod is kept: it has finished and is still desired, or it is retried later.
    Retained,
    /// The pod became desired again while it ended: it has to start again.
    Restart,
    /// The pod has ended and is not desired.
    Removed,
}

/// All workers of the node.
pub struct Workers {
    settings: Settings,
    deps: Deps,
    worker_ends: Post<PodUid, WorkerEnd>,
    records: BTreeMap<PodUid, Record>,
    queues: HashMap<FullName, VecDeque<PodUid>>,
    retries: Deadlines<PodUid>,
}

impl Workers {
    /// Makes an empty set of workers.
    #[must_use]
    pub fn new(settings: Settings, deps: Deps, worker_ends: Post<PodUid, WorkerEnd>) -> Self {
        Workers {
            settings,
            deps,
            worker_ends,
            records: BTreeMap::new(),
            queues: HashMap::new(),
            retries: Deadlines::default(),
        }
    }

    /// Whether there is a worker, or the record of one that has finished.
    #[must_use]
    pub fn knows(&self, uid: &PodUid) -> bool {
        self.records.contains_key(uid)
    }

    /// The pods that have a worker, or the record of one.
    pub fn uids(&self) -> impl Iterator<Item = &PodUid> {
        self.records.keys()
    }

    /// Whether the pod has ended on this node.
    pub fn is_finished(&self, uid: &PodUid) -> bool {
        self.records.get(uid).is_some_and(|record| record.finished)
    }

    /// Whether the pod has a worker, or had one: only then can it report how the pod ends.
    #[must_use]
    pub fn has_started(&self, uid: &PodUid) -> bool {
        self.records.get(uid).is_some_and(|record| record.started)
    }

    /// Whether all containers of the pod have stopped and none will start again; `true` without a
    /// worker.
    #[must_use]
    pub fn has_stopped(&self, uid: &PodUid) -> bool {
        self.records.get(uid).is_none_or(|record| record.finished || record.shared.locked().has_stopped())
    }

    /// Whether the pod has a worker that has not stopped all its containers.
    #[must_use]
    pub fn may_run(&self, uid: &PodUid) -> bool {
        !self.has_stopped(uid)
    }

    /// Whether a pod of the API is being stopped because its source removed it. If the source delivers
    /// its UID again, this is the same pod, and ends with its former object: its terminal phase is
    /// that of the UID (Go: `isAdmittedPodTerminal`). Only static pods start again.
    #[must_use]
    pub fn ends_for_good(&self, uid: &PodUid) -> bool {
        self.records.get(uid).and_then(Record::leaving).is_some_and(|pod| !pod.is_static())
    }

    /// Whether the pod starts again when it has ended, if a source has it: the source removed a static
    /// pod before, or its end was cancelled. Its stored status is that of the life that ends.
    #[must_use]
    pub fn starts_again(&self, uid: &PodUid) -> bool {
        self.records.get(uid).is_some_and(Record::starts_again)
    }

    /// The newest version of the pod that its worker has; `None` also for a pod that only
    /// the runtime knows.
    #[must_use]
    pub fn pod(&self, uid: &PodUid) -> Option<&Pod> {
        match &self.records.get(uid)?.body {
            Body::Pod(pod) => Some(pod),
            Body::Unknown(_) => None,
        }
    }

    /// Whether the worker stops the pod, or has stopped it, without an order, because the API server was
    /// away for too long.
    #[must_use]
    pub fn is_stopped_offline(&self, uid: &PodUid) -> bool {
        self.records.get(uid).is_some_and(|record| record.shared.locked().is_stopped_offline)
    }

    /// Whether nothing else than the absence of the API server stops the pod, or has stopped it.
    #[must_use]
    pub fn may_resume(&self, uid: &PodUid) -> bool {
        self.records.get(uid).is_none_or(Record::may_resume)
    }

    /// How the pod is to be stopped, or was.
    #[must_use]
    pub fn kill_of(&self, uid: &PodUid) -> Option<&PodKill> {
        self.records.get(uid)?.kill.as_ref()
    }

    /// Whether the pod ends because it was evicted or preempted; `None` if nothing has ordered its end.
    #[must_use]
    pub fn is_evicted(&self, uid: &PodUid) -> Option<bool> {
        self.records.get(uid).filter(|record| record.kill.is_some()).map(|record| record.evicted)
    }

    /// The report of every worker.
    #[must_use]
    pub fn reports(&self) -> BTreeMap<PodUid, WorkerHandle> {
        self.records.iter().map(|(uid, record)| (uid.clone(), WorkerHandle(record.shared.clone()))).collect()
    }

    /// Creates the pod's worker or sends it the new version.
    pub fn update(&mut self, pod: &Pod) {
        let uid = pod.uid().clone();
        self.deps.cgroups.set_active(pod);
        if let Some(record) = self.records.get_mut(&uid) {
            if matches!(record.body, Body::Unknown(_)) || (record.is_leaving() && pod.is_static()) {
                // The pod is being stopped; it starts again when it has ended.
                record.start_again = true;
                return;
            }
            // A pod of the API that is being stopped fails under its UID, and does not start again.
            record.removed = false;
            record.body = Body::Pod(pod.clone());
            record.send_update(Update { pod: Some(pod.clone()), kill: None });
            if must_end(pod) {
                // Only a deletion sets this.
                record.interrupt(pod.object().metadata.deletion_grace_period_seconds);
                if record.started && record.thread.is_none() && !record.finished {
                    // The worker panicked. The next one starts now, without the wait.
                    self.start(&uid);
                }
            }
            return;
        }
        let in_queue = pod.is_static();
        self.records
            .insert(uid.clone(), Record { in_queue, ..Record::new(Body::Pod(pod.clone()), pod.full_name()) });
        if in_queue {
            let queue = self.queues.entry(pod.full_name()).or_default();
            queue.push_back(uid.clone());
            if queue.front() != Some(&uid) {
                self.set_phase(&uid, WorkerPhase::Waiting);
                return;
            }
        }
        self.start(&uid);
    }

    /// Forgets the pod's former incarnation, if that has ended: its source removed the pod, and has
    /// delivered it again. Returns whether there was one.
    pub fn forget_former(&mut self, uid: &PodUid) -> bool {
        let is_former = self.records.get(uid).is_some_and(Record::is_over);
        if is_former {
            self.purge(uid);
        }
        is_former
    }

    /// Makes the pod's worker run again. `false`: it has none, or the worker has finished.
    pub fn resync(&mut self, uid: &PodUid) -> bool {
        match self.records.get_mut(uid) {
            Some(record) if !record.finished => {
                record.send_update(Update::default());
                true
            }
            _ => false,
        }
    }

    /// Makes every worker run again.
    pub fn resync_all(&mut self) {
        for record in self.records.values_mut().filter(|record| !record.finished) {
            record.send_update(Update::default());
        }
    }

    /// Stops a pod. A pod that has not started yet will never start.
    pub fn kill(&mut self, uid: &PodUid, kill: PodKill) -> AfterEnd {
        let Some(record) = self.records.get_mut(uid) else { return AfterEnd::Removed };
        if record.finished || !record.started {
            self.purge(uid);
            return AfterEnd::Removed;
        }
        let grace = kill.grace_override;
        let all = record.note_kill(kill);
        record.send_update(all);
        record.interrupt(grace);
        if record.thread.is_none() {
            // The worker panicked. The next one starts now, without the wait, to stop the pod.
            self.start(uid);
        }
        AfterEnd::Retained
    }

    /// Cancels a pod's end: it starts again, immediately or when it has ended. Returns whether it
    /// has ended, so that its next worker may be made now.
    pub fn revive(&mut self, uid: &PodUid) -> bool {
        match self.records.get_mut(uid) {
            Some(record) if record.finished => {
                self.purge(uid);
                true
            }
            Some(record) => {
                record.cancel_end();
                false
            }
            None => true,
        }
    }

    /// Stops a pod that only the runtime knows.
    pub fn stop_unknown(&mut self, pod: &ListedPod) {
        if self.knows(&pod.uid) {
            return;
        }
        metrics::ORPHANED_RUNTIME_PODS.inc();
        log::info!("stopping a pod without a manifest pod={}_{} uid={}", pod.name, pod.namespace, pod.uid);
        self.records.insert(
            pod.uid.clone(),
            Record {
                killed: true,
                removed: true,
                ..Record::new(Body::Unknown(pod.clone()), FullName::new(&pod.name, &pod.namespace))
            },
        );
        self.start(&pod.uid);
    }

    /// Handles the end of a worker. `wanted`: whether a source still has the pod.
    pub fn ended(&mut self, uid: &PodUid, how: &WorkerEnd, wanted: bool) -> AfterEnd {
        let Some(record) = self.records.get_mut(uid) else { return AfterEnd::Removed };
        // The thread has sent its last message, so this join is short.
        record.thread = None;
        match how {
            WorkerEnd::Panicked => {
                let wait =
                    PANIC_RETRY.saturating_mul(1 << record.panics.min(5)).min(Duration::from_secs(300));
                record.panics = record.panics.saturating_add(1);
                // The next worker starts from the beginning, but must still stop a killed pod.
                record.pending.merge(Update { pod: None, kill: record.kill.clone() });
                record.shared.locked().last_error =
                    Some("internal error: the pod's worker panicked (see the log)".to_owned());
                self.retries.set(uid.clone(), Instant::now() + wait);
                AfterEnd::Retained
            }
            WorkerEnd::Finished => {
                record.finished = true;
                let unknown = matches!(record.body, Body::Unknown(_));
                let start_again = record.start_again;
                self.leave_queue(uid);
                if wanted && (start_again || unknown) {
                    self.purge(uid);
                    AfterEnd::Restart
                } else if wanted {
                    AfterEnd::Retained
                } else {
                    self.purge(uid);
                    AfterEnd::Removed
                }
            }
        }
    }

    /// When [`Workers::retry`] is due.
    pub fn next_retry(&self) -> Option<Instant> {
        self.retries.next()
    }

    /// Starts the workers again that panicked or could not start, when their waits are over.
    pub fn retry(&mut self, now: Instant) {
        for uid in self.retries.take_due(now) {
            if self.records.get(&uid).is_some_and(|record| record.thread.is_none() && !record.finished) {
                self.start(&uid);
            }
        }
    }

    /// Stops all workers at the same time. The pods continue to run.
    pub fn stop(mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        for thread in self.records.values_mut().filter_map(|record| record.thread.as_mut()) {
            // First: a worker whose stop of a container is interrupted must read that the agent ends.
            thread.running.request_stop();
            (thread.cancel, thread.grace) = (None, None);
        }
        for record in std::mem::take(&mut self.records).into_values() {
            if let Some(thread) = record.thread {
                thread.running.stop(deadline.saturating_duration_since(Instant::now()));
            }
        }
    }

    fn set_phase(&self, uid: &PodUid, phase: WorkerPhase) {
        if let Some(record) = self.records.get(uid) {
            record.shared.locked().phase = phase;
        }
    }

    fn purge(&mut self, uid: &PodUid) {
        self.leave_queue(uid);
        self.retries.clear(uid);
        self.records.remove(uid);
    }

    /// Removes the pod from the queue of its full name; the next pod may start.
    fn leave_queue(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get_mut(uid) else { return };
        if !std::mem::take(&mut record.in_queue) {
            return;
        }
        let name = record.full_name.clone();
        let Some(queue) = self.queues.get_mut(&name) else { return };
        let was_first = queue.front() == Some(uid);
        queue.retain(|other| other != uid);
        let next = queue.front().cloned();
        if queue.is_empty() {
            self.queues.remove(&name);
        }
        if was_first && let Some(next) = next {
            self.start(&next);
        }
    }

    fn start(&mut self, uid: &PodUid) {
        let Some(record) = self.records.get_mut(uid) else { return };
        let (post, inbox) = mailbox::mailbox(Update::merge);
        // Updates that arrived while there was no thread. They are sent before the thread's first
        // step, which could otherwise start a pod that is to end.
        if record.pending != Update::default() {
            post.put((), record.pending.clone());
        }
        let (cancel_source, cancel) = stop::pair();
        let (grace_owner, grace) = grace::pair();
        let worker_ends = self.worker_ends.clone();
        let (settings, deps, shared) = (self.settings.clone(), self.deps.clone(), record.shared.clone());
        let own_uid = uid.clone();
        let death_ends = self.worker_ends.clone();
        let death_uid = uid.clone();
        let on_death = OnDeath::Unit(Box::new(move |died| {
            // A body that returns has already reported how it ended.
            if let Some(panic) = died.panic {
                log::error!("the worker of a pod panicked: {panic} uid={death_uid}");
                death_ends.put(death_uid, WorkerEnd::Panicked);
            }
        }));
        let name = format!("pod/{}", uid.short());
        let finish = move |over: bool| {
            if over {
                worker_ends.put(own_uid, WorkerEnd::Finished);
            }
        };
        let spawned = match &record.body {
            Body::Pod(pod) => {
                let worker = Worker::new(settings, deps, pod.clone(), shared);
                threads::spawn(&name, Stack::Small, on_death, move |stop| {
                    finish(worker.run(&inbox, &grace, &cancel, &stop));
                })
            }
            Body::Unknown(pod) => {
                let pod = pod.clone();
                threads::spawn(&name, Stack::Small, on_death, move |stop| {
                    finish(stop_unknown(&deps, &pod, &shared, &stop));
                })
            }
        };
        match spawned {
            Ok(running) => {
                record.pending = Update::default();
                record.started = true;
                record.thread =
                    Some(Thread { post, cancel: Some(cancel_source), grace: Some(grace_owner), running });
            }
            Err(error) => {
                log::error!("cannot start a worker thread, will retry: {error} uid={uid}");
                self.retries.set(uid.clone(), Instant::now() + PANIC_RETRY);
            }
        }
    }
}

impl Record {
    fn new(body: Body, full_name: FullName) -> Record {
        Record {
            body,
            full_name,
            in_queue: false,
            pending: Update::default(),
            thread: None,
            shared: Shared::default(),
            started: false,
            finished: false,
            start_again: false,
            killed: false,
            removed: false,
            kill: None,
            evicted: false,
            panics: 0,
        }
    }

    /// Whether the pod is being stopped, or was, because its source removed it.
    fn is_leaving(&self) -> bool {
        self.killed && self.removed
    }

    /// The pod, if it is being stopped, or was, because its source removed it.
    fn leaving(&self) -> Option<&Pod> {
        match &self.body {
            Body::Pod(pod) => self.is_leaving().then_some(pod),
            Body::Unknown(_) => None,
        }
    }

    fn starts_again(&self) -> bool {
        self.start_again || self.leaving().is_some_and(Pod::is_static)
    }

    /// Whether the pod has ended because its source removed it.
    fn is_over(&self) -> bool {
        self.finished && self.is_leaving()
    }

    /// Records an order to stop the pod, and returns all of them.
    fn note_kill(&mut self, kill: PodKill) -> Update {
        let is_eviction =
            |failure: &Failure| [reasons::EVICTED, reasons::PREEMPTING].contains(&failure.reason);
        // One that would have run again was not to end.
        let would_start = std::mem::take(&mut self.start_again);
        if would_start && kill.failure.is_some() {
            // The record stands for the pod that its source has now, and which is not to run.
            self.removed = false;
        }
        let would_run = would_start || !self.is_ending();
        self.evicted |= would_run && kill.failure.as_ref().is_some_and(is_eviction);
        self.killed = true;
        self.removed |= kill.failure.is_none();
        let mut all = Update { pod: None, kill: self.kill.take() };
        all.merge(Update { pod: None, kill: Some(kill) });
        self.kill.clone_from(&all.kill);
        all
    }

    /// Whether the pod ends already (Go: `IsTerminationRequested`).
    fn is_ending(&self) -> bool {
        let is_over = match &self.body {
            Body::Pod(pod) => must_end(pod),
            Body::Unknown(_) => true,
        };
        let report = self.shared.locked();
        self.killed || is_over || report.is_ending()
    }

    /// See [`Workers::may_resume`]. Without an order the worker stops it by itself.
    fn may_resume(&self) -> bool {
        let is_offline = |kill: &PodKill| {
            kill.failure.as_ref().is_some_and(|failure| failure.reason == reasons::STOPPED_OFFLINE)
        };
        self.kill.as_ref().is_none_or(is_offline)
    }

    /// The pod starts again when it has ended, if it is being stopped.
    fn cancel_end(&mut self) {
        self.start_again |= self.killed || self.shared.locked().is_stopped_offline;
    }

    fn send_update(&mut self, update: Update) {
        match &self.thread {
            Some(thread) => thread.post.put((), update),
            None => self.pending.merge(update),
        }
    }

    /// The pod is to end: ends what its worker does for a pod that runs, and shortens the grace period
    /// of one that is being stopped to `seconds`. To be called after the update is posted, because the
    /// worker then reads the reason (Go: `cancelFn` in pod_workers.go).
    fn interrupt(&mut self, seconds: Option<i64>) {
        let Some(thread) = &mut self.thread else { return };
        thread.cancel = None;
        if let (Some(grace), Some(seconds)) = (&thread.grace, seconds) {
            // As everywhere, a grace period is at least one second.
            grace.shorten(seconds.max(1));
        }
    }
}

/// Access to the current report of one worker.
#[derive(Clone)]
pub struct WorkerHandle(Shared);

impl WorkerHandle {
    /// The worker's current state, as it reports it.
    #[must_use]
    pub fn report(&self) -> WorkerReport {
        self.0.locked().clone()
    }
}

#[cfg(test)]
impl WorkerHandle {
    /// The report of a worker in this phase.
    pub(crate) fn in_phase(phase: WorkerPhase) -> Self {
        let report = WorkerReport { phase, ..WorkerReport::default() };
        WorkerHandle(Arc::new(std::sync::Mutex::new(report)))
    }
}

impl std::fmt::Debug for WorkerHandle {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:?}", Arc::as_ptr(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let pod = Pod::from(crate::model::api::Pod::default());
        let full_name = pod.full_name();
        Record { started: true, ..Record::new(Body::Pod(pod), full_name) }
    }

    #[test]
    fn pod_that_ended_already_is_not_evicted() {
        let kill = |reason: Option<&'static str>| PodKill {
            grace_override: None,
            failure: reason.map(|reason| Failure { reason, message: String::new(), disrupts: true }),
        };
        let evicted = |mut record: Record, reasons: &[Option<&'static str>]| {
            reasons.iter().for_each(|reason| drop(record.note_kill(kill(*reason))));
            record.evicted
        };
        assert!(evicted(record(), &[Some("Evicted")]) && evicted(record(), &[Some("Preempting")]));
        assert!(evicted(record(), &[Some("Evicted"), None]), "it was removed later");
        assert!(!evicted(record(), &[Some("Terminated")]) && !evicted(record(), &[None]));
        assert!(!evicted(record(), &[None, Some("Evicted")]));
        let stopping = || Record { killed: true, removed: true, ..record() };
        assert!(!evicted(stopping(), &[Some("Preempting")]));
        assert!(evicted(
            Record { start_again: true, ..stopping() },
            &[Some("Preempting"), Some("Terminated")]
        ));
        // It has ended by itself, or was deleted.
        let ending = record();
        ending.shared.lock().unwrap().phase = WorkerPhase::Terminating;
        assert!(!evicted(ending, &[Some("Evicted")]));
        let object = serde_json::json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let deleted = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
        assert!(!evicted(Record { body: Body::Pod(deleted), ..record() }, &[Some("Evicted")]));
    }

    #[test]
    fn former_incarnation_is_over_when_it_was_removed_and_has_ended() {
        let all = || Record { finished: true, killed: true, removed: true, ..record() };
        assert!(all().is_over());
        for other in [
            record(),
            Record { finished: false, ..all() },
            // Evicted.
            Record { removed: false, ..all() },
            // Completed.
            Record { killed: false, removed: false, ..all() },
        ] {
            assert!(!other.is_over());
        }
    }

    #[test]
    fn evicted_pod_that_is_also_stopped_without_the_api_server_does_not_run_again() {
        let evicted = || {
            let failure = Failure { reason: reasons::EVICTED, message: String::new(), disrupts: false };
            PodKill { failure: Some(failure), ..PodKill::default() }
        };
        let resumes = |kills: Vec<PodKill>| {
            let mut record = record();
            kills.into_iter().for_each(|kill| drop(record.note_kill(kill)));
            record.may_resume()
        };
        assert!(resumes(Vec::new()) && resumes(vec![PodKill::until_server_is_back()]));
        assert!(!resumes(vec![evicted()]) && !resumes(vec![PodKill::default()]));
        assert!(!resumes(vec![PodKill::until_server_is_back(), evicted()]));
    }

    #[test]
    fn pod_that_its_worker_stops_without_an_order_starts_again_too() {
        let starts_again = |mut record: Record| {
            record.cancel_end();
            record.starts_again()
        };
        assert!(!starts_again(record()), "it runs");
        assert!(starts_again(Record { killed: true, ..record() }));
        let stopped = record();
        stopped.shared.locked().is_stopped_offline = true;
        assert!(starts_again(stopped));
    }

    #[test]
    fn static_pod_that_its_source_has_removed_starts_again() {
        let of_source = |source: &str| {
            let object =
                serde_json::json!({"metadata": {"annotations": {"kubernetes.io/config.source": source}}});
            let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
            let full_name = pod.full_name();
            Record { killed: true, removed: true, ..Record::new(Body::Pod(pod), full_name) }
        };
        assert!(of_source("file").starts_again() && !of_source("api").starts_again());
        assert!(Record { finished: true, ..of_source("file") }.starts_again(), "until it is forgotten");
        let evicted = || Record { removed: false, ..of_source("file") };
        assert!(!evicted().starts_again());
        assert!(Record { start_again: true, ..evicted() }.starts_again(), "its end was cancelled");
        // The source has it again, and it is evicted while its former life ends: it counts no longer.
        let mut returned = Record { start_again: true, ..of_source("file") };
        assert!(returned.starts_again());
        let failure = Failure { reason: reasons::EVICTED, message: String::new(), disrupts: false };
        returned.note_kill(PodKill { failure: Some(failure), ..PodKill::default() });
        assert!(!returned.starts_again() && !returned.is_over() && returned.evicted);
    }
}
