//! The thread of a probe, and the registry that starts and stops such threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, select_biased};

use super::Deps;
use super::check::{self, Check, CheckResult};
use super::counters::{ProbeCounters, Tally};
use super::probe::{Effect, Probe, Update};
use super::registry::{Clock, Registry, Start};
use super::state::{Kind, Outcome};
use crate::cri::RuntimeClient;
use crate::model::event::{EventSink, EventType};
use crate::model::ids::{ContainerId, PodUid};
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::runtime::PodRuntime;
use crate::model::verdict::Verdict;
use crate::util::mailbox::{Inbox, Post};
use crate::util::memory;
use crate::util::stop::StopToken;
use crate::util::threads::{self, Died, OnDeath, Running, Stack};
use crate::util::timers;

/// Probes with a thread at one time. A pod can name thousands of containers; the unit of the
/// agent has 8,192 tasks for everything.
const MAX_THREADS: usize = 4096;

/// What the clients of the room share.
pub(super) struct Shared {
    books: Mutex<Books>,
    outlets: Arc<Outlets>,
    on_death: Sender<Died>,
}

struct Books {
    registry: Registry<Running>,
    /// Stopped, but their checks may still be returning.
    ending: Vec<Running>,
    stopped: bool,
}

/// What the thread of a probe acts on.
struct Outlets {
    cri: RuntimeClient,
    events: EventSink,
    post: Post<PodUid, ()>,
}

impl Shared {
    pub(super) fn new(deps: Deps) -> Shared {
        Shared {
            books: Mutex::new(Books {
                registry: Registry::new(Clock::read(), MAX_THREADS),
                ending: Vec::new(),
                stopped: false,
            }),
            outlets: Arc::new(Outlets { cri: deps.cri, events: deps.events, post: deps.post }),
            on_death: deps.on_death,
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`super::Probes::sync`].
    pub(super) fn sync(&self, pod: &Pod, runtime: &PodRuntime, terminating: bool) {
        let mut books = self.books();
        if !books.stopped {
            books.registry.sync(pod, runtime, terminating, Clock::read(), |start| self.start(start));
        }
    }

    fn start(&self, start: Start) -> std::io::Result<Running> {
        let name = format!("probe/{}", start.probe.pod.uid().short());
        let on_death = OnDeath::Supervisor(self.on_death.clone());
        let outlets = Arc::clone(&self.outlets);
        threads::spawn(&name, Stack::Small, on_death, move |stop| run(start, &outlets, &stop))
    }

    pub(super) fn verdict(&self, kind: Kind, id: &ContainerId) -> Verdict {
        self.books().registry.verdict(kind, id)
    }

    pub(super) fn forget(&self, uid: &PodUid) {
        let mut books = self.books();
        let mut threads = books.registry.forget(uid);
        threads.iter_mut().for_each(Running::ask_to_stop);
        books.ending.retain(|thread| !thread.is_finished());
        books.ending.append(&mut threads);
    }

    pub(super) fn counters(&self) -> Vec<ProbeCounters> {
        self.books().registry.counters()
    }

    pub(super) fn stop(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut threads = {
            let mut books = self.books();
            books.stopped = true;
            let mut threads = books.registry.clear();
            threads.append(&mut books.ending);
            threads
        };
        threads.iter_mut().for_each(Running::ask_to_stop);
        for thread in threads {
            thread.stop(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// The body of `probe/<uid8>`.
fn run(start: Start, outlets: &Outlets, stop: &StopToken) {
    let Start { mut probe, inbox, siblings, tally } = start;
    loop {
        receive(&mut probe, &inbox);
        if let Some(check) = probe.begin(Instant::now()) {
            let (result, took) = run_check(&check, outlets);
            receive(&mut probe, &inbox);
            if conclude(&mut probe, &check, &result, took, &tally, outlets) {
                for sibling in &siblings {
                    sibling.put((), Update::default());
                }
            }
        }
        wait(&probe, &inbox, stop);
        if stop.is_stopped() {
            return;
        }
    }
}

#[inline(never)]
fn receive(probe: &mut Probe, inbox: &Inbox<(), Update>) {
    for (_, update) in inbox.take() {
        probe.update(update, Instant::now());
    }
}

/// Waits for the next check, an update or the stop.
#[inline(never)]
fn wait(probe: &Probe, inbox: &Inbox<(), Update>, stop: &StopToken) {
    memory::give_back_stack();
    let _waiting = threads::waiting("its next check");
    select_biased! {
        recv(stop.signal()) -> _ => {}
        recv(inbox.bell()) -> _ => {}
        recv(timers::at(probe.due())) -> _ => {}
    }
}

/// A check that panics has no result, and its probe goes on.
#[inline(never)]
fn run_check(check: &Check, outlets: &Outlets) -> (CheckResult, Duration) {
    let begun = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| check::run(check, &outlets.cri)));
    (result.unwrap_or(CheckResult::Aborted), begun.elapsed())
}

/// Counts a result, reports failures as events, and informs the pod's worker of a new verdict.
/// Returns whether there is one.
#[inline(never)]
fn conclude(
    probe: &mut Probe,
    check: &Check,
    result: &CheckResult,
    took: Duration,
    tally: &Tally,
    outlets: &Outlets,
) -> bool {
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
    raise(check, result, &outlets.events);
    let Effect::Changed(verdict) = effect else { return false };
    log::info!(
        "{} probe says {verdict:?} pod={} uid={} container={}",
        check.kind.as_str(),
        check.pod.full_name(),
        check.pod.uid(),
        check.container.of(&check.pod).map_or("", |container| container.name.as_str()),
    );
    outlets.post.put(check.pod.uid().clone(), ());
    true
}

fn raise(check: &Check, result: &CheckResult, events: &EventSink) {
    let kind = check.kind.as_str();
    let (reason, message) = match result {
        CheckResult::Success | CheckResult::Aborted => return,
        CheckResult::Warning(what) => (reasons::PROBE_WARNING, format!("{kind} probe warning: {what}")),
        CheckResult::Failure(why) => (reasons::UNHEALTHY, format!("{kind} probe failed: {why}")),
        CheckResult::Error(state, why) => {
            (reasons::UNHEALTHY, format!("{kind} probe errored and resulted in {state} state: {why}"))
        }
    };
    let path = check.container.field_path(&check.pod);
    events.raise(check.pod.regarding(&path), EventType::Warning, reason, message);
}
