//! The thread that waits for due times, and those that run checks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, select_biased};

use super::check::{self, Found, Tools};
use super::counters::ProbeCounters;
use super::state::{Kind, Outcome};
use super::table::{Clock, Job, Place, Table, Taken};
use super::{Deps, Settings};
use crate::model::event::{EventSink, EventType};
use crate::model::ids::{ContainerId, PodUid};
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::runtime::PodRuntime;
use crate::model::verdict::Verdict;
use crate::util::mailbox::Post;
use crate::util::stop::StopToken;
use crate::util::threads::{self, Died, OnDeath, Running, Stack};
use crate::util::timers;

/// Checks at one time. Most last milliseconds; only where hundreds of containers hang does
/// it come to this, and then later runs wait.
const MAX_RUNNING: usize = 512;
/// How long a run waits for its turn then.
const TURN_WAIT: Duration = Duration::from_secs(1);
/// How long a thread waits for another check before it ends.
const IDLE_LIMIT: Duration = Duration::from_secs(5);

/// What the room's clients and threads share.
pub(super) struct Shared {
    table: Mutex<Table>,
    /// Rung when an earlier run became due.
    bell: Sender<()>,
    rung: Receiver<()>,
    /// Hands a check to a thread that waits for one; there is no queue.
    hand: Sender<Job>,
    taken: Receiver<Job>,
    threads: Mutex<Threads>,
    tools: Tools,
    events: EventSink,
    post: Post<PodUid, ()>,
    on_death: Sender<Died>,
    /// Times that a run had to wait for its turn.
    late: AtomicU64,
}

#[derive(Default)]
struct Threads {
    waiter: Option<Running>,
    checkers: Vec<Running>,
    named: u64,
    stopped: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(settings: Settings, deps: Deps) -> Arc<Shared> {
        let (bell, rung) = bounded(1);
        let (hand, taken) = bounded(0);
        Arc::new(Shared {
            table: Mutex::new(Table::new(Clock::read(), settings.node_ips)),
            bell,
            rung,
            hand,
            taken,
            threads: Mutex::default(),
            tools: Tools { cri: deps.cri },
            events: deps.events,
            post: deps.post,
            on_death: deps.on_death,
            late: AtomicU64::new(0),
        })
    }

    pub(super) fn verdict(&self, kind: Kind, id: &ContainerId) -> Verdict {
        lock(&self.table).verdict(kind, id)
    }

    pub(super) fn forget(&self, uid: &PodUid) {
        lock(&self.table).forget(uid);
    }

    pub(super) fn counters(&self) -> Vec<ProbeCounters> {
        lock(&self.table).counters()
    }

    pub(super) fn count(&self) -> usize {
        lock(&self.table).len()
    }

    pub(super) fn stop(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let (waiter, mut checkers) = {
            let mut threads = lock(&self.threads);
            threads.stopped = true;
            (threads.waiter.take(), std::mem::take(&mut threads.checkers))
        };
        // Breaks off the checks that run.
        lock(&self.table).clear();
        checkers.iter_mut().for_each(Running::ask_to_stop);
        for thread in waiter.into_iter().chain(checkers) {
            thread.stop(deadline.saturating_duration_since(Instant::now()));
        }
    }

    /// Changes the table, and wakes the thread that waits if a run is due earlier than it
    /// knows. Returns whether that is so.
    fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> (T, bool) {
        let (done, earlier) = {
            let mut table = lock(&self.table);
            let before = table.next();
            let done = change(&mut table);
            let next = table.next();
            (done, next.is_some() && (before.is_none() || next < before))
        };
        if earlier {
            // A full bell already rings.
            let _ = self.bell.try_send(());
        }
        (done, earlier)
    }

    /// Takes in how a check ended, tells users, and has the pod looked at if it matters.
    fn conclude(&self, job: &Job, found: &Found, took: Duration) {
        let outcome = match found {
            Found::Success | Found::Warning(_) => Some(Outcome::Success),
            Found::Failure(_) => Some(Outcome::Failure),
            Found::Error(..) | Found::Stopped => None,
        };
        let (taken, _) = self.change(|table| table.finish(job, outcome, took, Instant::now()));
        if taken == Taken::Stale {
            return;
        }
        self.tell(job, found);
        if taken == Taken::Changed {
            log::info!(
                "{} probe says {:?} pod={} uid={} container={}",
                job.key.kind.as_str(),
                self.verdict(job.key.kind, &job.id),
                job.pod.full_name(),
                job.key.uid,
                job.key.place.of(&job.pod).map_or("", |container| container.name.as_str()),
            );
            self.post.put(job.key.uid.clone(), ());
        }
    }

    fn tell(&self, job: &Job, found: &Found) {
        let kind = job.key.kind.as_str();
        let (reason, message) = match found {
            Found::Success | Found::Stopped => return,
            Found::Warning(what) => (reasons::PROBE_WARNING, format!("{kind} probe warning: {what}")),
            Found::Failure(why) => (reasons::UNHEALTHY, format!("{kind} probe failed: {why}")),
            Found::Error(state, why) => {
                (reasons::UNHEALTHY, format!("{kind} probe errored and resulted in {state} state: {why}"))
            }
        };
        let name = job.key.place.of(&job.pod).map_or("", |container| container.name.as_str());
        let path = match job.key.place {
            Place::Init(_) => format!("spec.initContainers{{{name}}}"),
            Place::Regular(_) => format!("spec.containers{{{name}}}"),
        };
        self.events.raise(job.pod.regarding(&path), EventType::Warning, reason, message);
    }
}

/// See [`super::Probes::sync`].
pub(super) fn sync(shared: &Arc<Shared>, pod: &Pod, runtime: &PodRuntime, terminating: bool) {
    let (due, _) = shared.change(|table| {
        table.sync(pod, runtime, terminating, Clock::read());
        table.next().is_some()
    });
    // Also when it could not be started the last time.
    if due {
        start_waiter(shared);
    }
}

fn start_waiter(shared: &Arc<Shared>) {
    let mut threads = lock(&shared.threads);
    if threads.stopped || threads.waiter.is_some() {
        return;
    }
    let own = Arc::clone(shared);
    let on_death = OnDeath::Supervisor(shared.on_death.clone());
    match threads::spawn("probes", Stack::Small, on_death, move |stop| wait(&own, &stop)) {
        Ok(running) => threads.waiter = Some(running),
        // The next sync of a pod tries again.
        Err(error) => log::error!("cannot start the thread for probes: {error}"),
    }
}

/// The body of `probes`.
fn wait(shared: &Arc<Shared>, stop: &StopToken) {
    loop {
        let jobs = lock(&shared.table).take_due(Instant::now());
        for job in jobs {
            hand_over(shared, job);
        }
        let next = lock(&shared.table).next();
        let _waiting = threads::waiting("due probes");
        select_biased! {
            recv(stop.signal()) -> _ => return,
            recv(shared.rung) -> _ => {}
            recv(timers::at(next)) -> _ => {}
        }
    }
}

/// Gives a check to a thread that waits for one, or to a new one.
fn hand_over(shared: &Arc<Shared>, job: Job) {
    let job = match shared.hand.try_send(job) {
        Ok(()) => return,
        Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => job,
    };
    let mut threads = lock(&shared.threads);
    threads.checkers.retain(|checker| !checker.is_finished());
    if threads.stopped {
        return;
    }
    let refused = if threads.checkers.len() >= MAX_RUNNING {
        format!("{MAX_RUNNING} checks are under way")
    } else {
        threads.named = threads.named.wrapping_add(1);
        let name = format!("probe/{}", threads.named % 100_000);
        let (own, first) = (Arc::clone(shared), job.clone());
        match threads::spawn(&name, Stack::Small, OnDeath::Nobody, move |stop| run(&own, first, &stop)) {
            Ok(running) => {
                threads.checkers.push(running);
                return;
            }
            Err(error) => error.to_string(),
        }
    };
    drop(threads);
    lock(&shared.table).postpone(&job, Instant::now() + TURN_WAIT);
    let times = shared.late.fetch_add(1, Ordering::Relaxed) + 1;
    if times.is_power_of_two() {
        log::warn!("a probe has to wait for its turn ({times} times): {refused}");
    }
}

/// The body of `probe/<n>`.
fn run(shared: &Arc<Shared>, first: Job, stop: &StopToken) {
    let mut next = Some(first);
    while let Some(job) = next.take() {
        run_one(shared, job);
        let _waiting = threads::waiting("another check");
        next = select_biased! {
            recv(stop.signal()) -> _ => None,
            recv(shared.taken) -> job => job.ok(),
            default(IDLE_LIMIT) => None,
        };
    }
}

fn run_one(shared: &Shared, job: Job) {
    let mut under_way = UnderWay { shared, job, found: None, began: Instant::now() };
    under_way.found = Some(check::run(&under_way.job, &shared.tools));
}

/// Concludes a check, also one that panics: then it found nothing, and its probe goes on.
struct UnderWay<'a> {
    shared: &'a Shared,
    job: Job,
    found: Option<Found>,
    began: Instant,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let found = self.found.take().unwrap_or(Found::Stopped);
        self.shared.conclude(&self.job, &found, self.began.elapsed());
    }
}
