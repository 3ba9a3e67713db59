//! The thread of a probe, and the registry that starts and stops such threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded, never, select_biased};

use super::Deps;
use super::check::{self, CheckResult, ProbeRun};
use super::counters::{ProbeCounters, Tally};
use super::permits::{Permit, PermitRequest, Permits};
use super::probe::{Effect, Probe, Update};
use super::registry::{ClockReading, FailedStart, Limits, Registry, ThreadStart};
use super::state::{Kind, Outcome};
use crate::cri::RuntimeClient;
use crate::model::event::{EventSink, EventType};
use crate::model::ids::{ContainerId, PodUid};
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::runtime::PodRuntime;
use crate::model::verdict::ProbeVerdict;
use crate::util::lock::LockExt;
use crate::util::mailbox::{Inbox, Post};
use crate::util::memory;
use crate::util::stop::StopToken;
use crate::util::threads::{self, Died, OnDeath, Running, Stack};
use crate::util::timers;

/// Probes with a thread at one time. A pod can name thousands of containers: it must leave threads
/// to other pods, and the systemd unit of the agent limits its tasks.
const LIMITS: Limits = Limits { all_pods: 4096, one_pod: 512, reserve: 8, most: 6144 };

/// What the clients of the room share.
pub(super) struct Shared {
    locked: Mutex<Locked>,
    check_deps: Arc<CheckDeps>,
    on_death: Sender<Died>,
}

struct Locked {
    registry: Registry<Running>,
    /// Stopped, but their checks may still be returning.
    ending: Vec<Running>,
    stopped: bool,
}

/// What the thread of a probe acts on.
struct CheckDeps {
    cri: RuntimeClient,
    events: EventSink,
    post: Post<PodUid, ()>,
    permits: Permits,
}

impl Shared {
    pub(super) fn new(deps: Deps) -> Shared {
        Shared {
            locked: Mutex::new(Locked {
                registry: Registry::new(ClockReading::read(), LIMITS),
                ending: Vec::new(),
                stopped: false,
            }),
            check_deps: Arc::new(CheckDeps {
                cri: deps.cri,
                events: deps.events,
                post: deps.post,
                permits: Permits::new(),
            }),
            on_death: deps.on_death,
        }
    }

    fn locked(&self) -> MutexGuard<'_, Locked> {
        self.locked.locked()
    }

    /// See [`super::Probes::sync`]. Threads are started without the lock, which the workers of
    /// other pods need.
    pub(super) fn sync(&self, pod: &Pod, runtime: &PodRuntime, terminating: bool) {
        let mut ended = Vec::new();
        let starts = {
            let mut locked = self.locked();
            locked.ending.retain(|thread| !thread.is_finished());
            if locked.stopped {
                return;
            }
            locked.registry.sync(pod, runtime, terminating, ClockReading::read(), &mut ended)
        };
        for start in starts {
            let key = start.key();
            let started = self.start(start);
            ended.extend(self.locked().registry.attach(&key, started));
        }
        // Dropping a handle stops its thread and waits for it. These threads have ended, or their
        // pod was forgotten before their first check.
        drop(ended);
    }

    fn start(&self, start: ThreadStart) -> Result<Running, FailedStart> {
        let name = format!("probe/{}", start.probe.pod.uid().short());
        let supervisor = self.on_death.clone();
        // The thread may end without a stop, after it has parked its probe. Only a panic is an error.
        let on_death = OnDeath::Unit(Box::new(move |died| {
            if died.panic.is_some() {
                let _ = supervisor.try_send(died);
            }
        }));
        let check_deps = Arc::clone(&self.check_deps);
        // The thread receives the probe when it runs, so that a failed start does not lose it.
        let (sender, receiver) = bounded(1);
        let body = move |stop: StopToken| {
            if let Ok(start) = receiver.recv() {
                run(start, &check_deps, &stop);
            }
        };
        match threads::spawn(&name, Stack::Small, on_death, body) {
            Ok(running) => {
                // The channel has a slot for it.
                let _ = sender.send(start);
                Ok(running)
            }
            Err(error) => Err(FailedStart { probe: start.probe, error }),
        }
    }

    pub(super) fn verdict(&self, kind: Kind, id: &ContainerId) -> ProbeVerdict {
        self.locked().registry.verdict(kind, id)
    }

    pub(super) fn forget(&self, uid: &PodUid) {
        let mut locked = self.locked();
        let mut threads = locked.registry.forget(uid);
        threads.iter_mut().for_each(Running::request_stop);
        locked.ending.retain(|thread| !thread.is_finished());
        locked.ending.append(&mut threads);
    }

    pub(super) fn counters(&self) -> Vec<ProbeCounters> {
        self.locked().registry.counters()
    }

    pub(super) fn stop(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut threads = {
            let mut locked = self.locked();
            locked.stopped = true;
            let mut threads = locked.registry.clear();
            threads.append(&mut locked.ending);
            threads
        };
        threads.iter_mut().for_each(Running::request_stop);
        for thread in threads {
            thread.stop(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// The body of `probe/<uid8>`.
fn run(start: ThreadStart, check_deps: &CheckDeps, stop: &StopToken) {
    let ThreadStart { mut probe, inbox, siblings, tally, parking, alive: _alive } = start;
    let (mut request, mut permit) = (None, None);
    while !stop.is_stopped() {
        receive(&mut probe, &inbox);
        if probe.is_due(Instant::now()) {
            if permit.is_none() {
                let request = request
                    .get_or_insert_with(|| check_deps.permits.request(probe.pod.uid(), probe.weight()));
                permit = request.granted.try_recv().ok();
            }
            if permit.is_some() && check(&mut probe, &inbox, &tally, check_deps) {
                for sibling in &siblings {
                    sibling.put((), Update::default());
                }
            }
        }
        // A check has ended, or its instance has.
        if permit.take().is_some() || !probe.is_due(Instant::now()) {
            request = None;
        }
        if probe.is_finished() {
            match parking.park(probe, &inbox) {
                None => return,
                Some(returned) => probe = returned,
            }
        }
        permit = wait(&probe, &inbox, request.as_ref(), stop);
    }
}

/// Makes the check that is due. Returns whether the verdict changed.
fn check(probe: &mut Probe, inbox: &Inbox<(), Update>, tally: &Tally, check_deps: &CheckDeps) -> bool {
    let Some(check) = probe.begin(Instant::now()) else { return false };
    let (result, took) = run_check(&check, check_deps);
    receive(probe, inbox);
    conclude(probe, &check, &result, took, tally, check_deps)
}

#[inline(never)]
fn receive(probe: &mut Probe, inbox: &Inbox<(), Update>) {
    for (_, update) in inbox.drain() {
        probe.update(update, Instant::now());
    }
}

/// Waits for the next check, an update or the stop; with a `request` for the permit, which it
/// returns.
#[inline(never)]
fn wait(
    probe: &Probe,
    inbox: &Inbox<(), Update>,
    request: Option<&PermitRequest>,
    stop: &StopToken,
) -> Option<Permit> {
    memory::release_stack();
    let none = never();
    let (granted, due) = match request {
        Some(request) => (&request.granted, None),
        None => (&none, probe.due()),
    };
    let _waiting = threads::waiting(if request.is_some() { "other checks" } else { "its next check" });
    select_biased! {
        recv(stop.signal()) -> _ => None,
        recv(inbox.bell()) -> _ => None,
        recv(granted) -> permit => permit.ok(),
        recv(timers::deadline_channel(due)) -> _ => None,
    }
}

/// A check that panics has no result, and its probe continues.
#[inline(never)]
fn run_check(check: &ProbeRun, check_deps: &CheckDeps) -> (CheckResult, Duration) {
    let begun = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| check::run(check, &check_deps.cri)));
    (result.unwrap_or(CheckResult::Aborted), begun.elapsed())
}

/// Counts a result, reports failures as events, and informs the pod's worker of a new verdict.
/// Returns whether there is one.
#[inline(never)]
fn conclude(
    probe: &mut Probe,
    check: &ProbeRun,
    result: &CheckResult,
    took: Duration,
    tally: &Tally,
    check_deps: &CheckDeps,
) -> bool {
    // The instance or its pod was removed; the thread has not received that update yet.
    if check.stop.is_stopped() {
        return false;
    }
    let outcome = match result {
        CheckResult::Success | CheckResult::Warning(_) => Some(Outcome::Success),
        CheckResult::Failure(_) => Some(Outcome::Failure),
        CheckResult::Error(..) | CheckResult::Aborted => None,
    };
    let effect = probe.finish(&check.id, outcome, Instant::now());
    if effect == Effect::Stale {
        return false;
    }
    if let Some(outcome) = outcome {
        tally.count(outcome, took);
    }
    raise(check, result, &check_deps.events);
    let Effect::Changed(verdict) = effect else { return false };
    log::info!(
        "{} probe result is {verdict:?} pod={} uid={} container={}",
        check.kind.as_str(),
        check.pod.full_name(),
        check.pod.uid(),
        check.container.resolve(&check.pod).map_or("", |container| container.name.as_str()),
    );
    check_deps.post.put(check.pod.uid().clone(), ());
    true
}

fn raise(check: &ProbeRun, result: &CheckResult, events: &EventSink) {
    let kind = check.kind.as_str();
    let (reason, message) = match result {
        CheckResult::Success | CheckResult::Aborted => return,
        CheckResult::Warning(what) => (reasons::PROBE_WARNING, format!("{kind} probe warning: {what}")),
        CheckResult::Failure(message) => (reasons::UNHEALTHY, format!("{kind} probe failed: {message}")),
        CheckResult::Error(state, message) => {
            (reasons::UNHEALTHY, format!("{kind} probe errored and resulted in {state} state: {message}"))
        }
    };
    let path = check.container.field_path(&check.pod);
    events.raise(check.pod.regarding(&path), EventType::Warning, reason, message);
}
