//! The thread that waits for due times, and those that run checks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use super::Deps;
use super::check::{self, Found, Tools};
use super::counters::ProbeCounters;
use super::state::{Kind, Outcome};
use super::table::{Clock, Job, Place, Table, Taken};
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
const IDLE_LIMIT: Duration = Duration::from_secs(1);

/// What the room's clients and threads share.
pub(super) struct Shared {
    table: Mutex<Table>,
    /// Rung when an earlier run became due.
    bell: Sender<()>,
    rung: Receiver<()>,
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
    /// By the number in their names.
    checkers: HashMap<u64, Running>,
    /// Those that wait for another check, the last one to begin waiting at the end. It is
    /// the first to get one: so the others' time runs out, and as few stay as are needed.
    idle: Vec<Idle>,
    named: u64,
    stopped: bool,
}

/// A thread that waits for a check. INVARIANT: its channel is empty and has room for one;
/// whoever fills it has taken this out of the list under the same lock.
struct Idle {
    number: u64,
    hand: Sender<Job>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(deps: Deps) -> Arc<Shared> {
        let (bell, rung) = bounded(1);
        Arc::new(Shared {
            table: Mutex::new(Table::new(Clock::read())),
            bell,
            rung,
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
            threads.idle.clear();
            let checkers: Vec<Running> = threads.checkers.drain().map(|(_, running)| running).collect();
            (threads.waiter.take(), checkers)
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
    let mut threads = lock(&shared.threads);
    if threads.stopped {
        return;
    }
    if let Some(idle) = threads.idle.pop() {
        // Its channel is empty, and open for as long as it is in the list.
        let _ = idle.hand.try_send(job);
        return;
    }
    // Those that panicked.
    threads.checkers.retain(|_, checker| !checker.is_finished());
    let refused = if threads.checkers.len() >= MAX_RUNNING {
        format!("{MAX_RUNNING} checks are under way")
    } else {
        threads.named = threads.named.wrapping_add(1);
        let number = threads.named;
        let name = format!("probe/{}", number % 100_000);
        let (own, first) = (Arc::clone(shared), job.clone());
        let body = move |stop: StopToken| run(&own, number, first, &stop);
        match threads::spawn(&name, Stack::Small, OnDeath::Nobody, body) {
            Ok(running) => {
                threads.checkers.insert(number, running);
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
fn run(shared: &Arc<Shared>, number: u64, first: Job, stop: &StopToken) {
    let (hand, handed) = bounded(1);
    let mut next = Some(first);
    while let Some(job) = next.take() {
        run_one(shared, job);
        {
            let mut threads = lock(&shared.threads);
            if threads.stopped {
                return;
            }
            threads.idle.push(Idle { number, hand: hand.clone() });
        }
        let _waiting = threads::waiting("another check");
        next = select_biased! {
            recv(stop.signal()) -> _ => return,
            recv(handed) -> job => job.ok(),
            default(IDLE_LIMIT) => retire(shared, number, &handed),
        };
    }
}

/// Takes the calling thread, for which there is no more work, out of the books; or the check
/// that came at the last moment.
fn retire(shared: &Shared, number: u64, handed: &Receiver<Job>) -> Option<Job> {
    let mut threads = lock(&shared.threads);
    let Some(at) = threads.idle.iter().position(|idle| idle.number == number) else {
        return handed.try_recv().ok();
    };
    threads.idle.remove(at);
    let own = threads.checkers.remove(&number);
    drop(threads);
    // It ends now and nobody has to join it: its stack goes with it, not with the next check.
    drop(own);
    None
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
