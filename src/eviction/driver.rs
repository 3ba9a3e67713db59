//! When to measure what, and what to do with the outcome of a pass. The machine and the other rooms
//! are behind [`World`], and time is a parameter (Go: pkg/kubelet/eviction `managerImpl.Start`,
//! `synchronize`).
//!
//! Most turns only read the few numbers of the machine ([`World::read_node`]). Pods are measured when
//! a threshold is met, or when a pod has limits of local storage.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::kernel::RemainingMemory;
use super::layout::{Layout, Reclaim};
use super::local::is_limited;
use super::notify::Reading;
use super::observations::{Observation, Observations};
use super::pass::{Action, EvictionManager, Settings, Shortage};
use super::report::{Report, ThresholdStatus};
use super::signal::{Pressure, Pressures, Signal};
use super::thresholds::Threshold;
use super::victim::Victim;
use super::watch::{self, PERIOD, SIGNAL_INTERVAL, VICTIM_LIMIT};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::resources::stats::sample::{NodeUse, PodUse, Snapshot};

/// The longest time between two reads of disks and memory that are far from their thresholds.
const FAR_INTERVAL: Duration = Duration::from_secs(60);
/// The longest time between two measurements of local storage, however long they take: they may have
/// waited for the runtime, and walks through large volumes have a longer pause of their own.
const LOCAL_INTERVAL_LIMIT: Duration = Duration::from_secs(60);
/// Measurements of local storage take at most this part of the time.
const SHARE: u32 = 50;
/// How long space may be freed before the next measurement.
const RECLAIM_LIMIT: Duration = Duration::from_secs(120);

/// Bytes per second by which the use of a disk grows at most, or the use of memory where the kernel
/// does not signal its growth.
const FILL_RATE: i128 = 1 << 30;
/// Inodes per second that are expected to be made at most.
const INODE_RATE: i128 = 100_000;

/// What a measurement of pods has to contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StatsScope {
    /// Memory and processes, from files only.
    Memory,
    /// Also logs, volumes and writable layers.
    Disks,
}

/// The machine and the other rooms.
pub trait World {
    /// The layout of the file systems, once the runtime has reported its directories.
    fn layout(&mut self) -> Option<Layout>;
    /// The numbers of the machine, which cost little.
    fn read_node(&mut self) -> Option<NodeUse>;
    /// The path of the cgroup of all pods, if there is one.
    fn pods_cgroup(&mut self) -> Option<String>;
    /// The numbers of pods. `None`: they could not be measured, which was logged.
    fn measure(&mut self, scope: StatsScope) -> Option<Snapshot>;
    /// The pods that have not ended.
    fn pods(&mut self) -> Vec<Pod>;
    /// A pod with the resources that it was granted.
    fn granted(&mut self, pod: &Pod) -> Pod;
    /// A threshold is met: raises the event.
    fn report_shortage(&mut self, shortage: &Shortage);
    /// A pod has to be evicted for statistics of these times: counts their age.
    fn count_age(&mut self, measured: &[(Signal, Timestamp)]);
    /// An evicted pod has not ended in time.
    fn exceeded(&mut self, pod: &Pod);
    /// Begins to free space.
    fn reclaim(&mut self, what: &'static [Reclaim]);
    /// Whether this has ended, also if it failed.
    fn is_reclaimed(&mut self) -> bool;
    /// Orders the end of a pod.
    fn evict(&mut self, victim: &Victim);
    /// Whether nothing of a pod runs any more.
    fn has_ended(&mut self, pod: &PodUid) -> bool;
    /// The conditions of the node, and what is near a threshold.
    fn publish(&mut self, report: Report);
}

/// What the thread waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// When the next turn is due.
    pub until: Option<Instant>,
    /// When the kernel shall signal; `None`: signals are not needed now.
    pub left: Option<RemainingMemory>,
}

impl Wait {
    /// Waits no longer than `limit`.
    pub fn within(&mut self, limit: Duration) {
        let latest = Instant::now() + limit;
        self.until = Some(self.until.map_or(latest, |until| until.min(latest)));
    }
}

enum Stage {
    Watching,
    /// Space is being freed. If that is not enough, the victim is evicted.
    Reclaiming {
        shortage: Box<Shortage>,
        /// The pods of the measurement: swap that they may use counts as available.
        uses: Vec<PodUse>,
        until: Instant,
    },
    /// These pods were evicted.
    Ending {
        pods: Vec<Pod>,
        until: Instant,
    },
}

/// The state of the thread.
pub struct EvictionLoop {
    settings: Settings,
    processors: u32,
    eviction: EvictionManager,
    layout: Option<Layout>,
    stage: Stage,
    /// Pods that were evicted and have not ended yet: they are not evicted again.
    evicted: BTreeSet<PodUid>,
    /// When local storage is measured next.
    local_due: Option<Instant>,
    /// How long the last measurement of local storage took.
    took: Option<Duration>,
    /// Signals without numbers that were logged.
    unobserved: Vec<Signal>,
    /// Whether it was logged that no pod may be evicted.
    logged_no_victim: bool,
    /// When space may be freed again although no pod may be evicted.
    next_reclaim: Option<Instant>,
}

/// The time until local storage is measured again. The quicker of the last two measurements counts:
/// a single slow one has waited for a runtime or a disk that was busy, and must not keep pods above
/// their limits for minutes.
fn pause(took: Duration, before: Option<Duration>) -> Duration {
    took.min(before.unwrap_or(Duration::ZERO)).saturating_mul(SHARE).clamp(PERIOD, LOCAL_INTERVAL_LIMIT)
}

impl EvictionLoop {
    /// Before the first turn.
    #[must_use]
    pub fn new(settings: Settings, processors: u32) -> EvictionLoop {
        // Memory is watched before the runtime responds.
        let eviction = EvictionManager::new(settings.clone(), Layout::Single);
        let (stage, evicted) = (Stage::Watching, BTreeSet::new());
        EvictionLoop {
            settings,
            processors,
            eviction,
            layout: None,
            stage,
            evicted,
            local_due: None,
            took: None,
            unobserved: Vec::new(),
            logged_no_victim: false,
            next_reclaim: None,
        }
    }

    /// The thresholds of memory decide which signals the kernel is asked for.
    pub fn thresholds(&self) -> &[Threshold] {
        &self.settings.thresholds
    }

    /// One turn: after a signal of the kernel, at the time of the last [`Wait`], when a pod has
    /// ended, or when one with a limit of local storage was added. `polls`: the kernel does not
    /// signal every shortage of memory.
    pub fn turn(&mut self, world: &mut dyn World, polls: bool, now: Instant) -> Wait {
        self.evicted.retain(|pod| !world.has_ended(pod));
        match std::mem::replace(&mut self.stage, Stage::Watching) {
            Stage::Watching => {}
            Stage::Reclaiming { shortage, uses, until } => {
                if !world.is_reclaimed() && now < until {
                    self.stage = Stage::Reclaiming { shortage, uses, until };
                    return Wait { until: Some(until), left: None };
                }
                self.reclaimed(world, &shortage, uses, now);
            }
            // DIFFERS: upstream evicts the same pod again after this time. Here the next one is
            // evicted: a pod whose processes the kernel cannot end frees nothing.
            Stage::Ending { mut pods, until } => {
                pods.retain(|pod| self.evicted.contains(pod.uid()));
                if !pods.is_empty() && now < until {
                    self.stage = Stage::Ending { pods, until };
                    return Wait { until: Some(until), left: None };
                }
                pods.iter().for_each(|pod| world.exceeded(pod));
            }
        }
        match self.stage {
            Stage::Watching => self.run_pass(world, polls, now),
            Stage::Reclaiming { until, .. } | Stage::Ending { until, .. } => {
                Wait { until: Some(until), left: None }
            }
        }
    }

    /// Space was freed: evicts the victim if a threshold is still met.
    fn reclaimed(&mut self, world: &mut dyn World, shortage: &Shortage, pods: Vec<PodUse>, now: Instant) {
        self.next_reclaim = Some(now + PERIOD);
        let snapshot = world.read_node().map(|node| Snapshot { node, pods, ..Snapshot::default() });
        if self.eviction.is_relieved(snapshot.as_ref()) {
            log::info!("freed enough space; no pod has to be evicted");
            return;
        }
        match &shortage.victim {
            // It may have ended by itself.
            Some(victim) if world.has_ended(victim.pod.uid()) => {}
            _ => self.evict_for(world, shortage, now),
        }
    }

    /// Evicts the victim of a threshold.
    fn evict_for(&mut self, world: &mut dyn World, shortage: &Shortage, now: Instant) {
        let Some(victim) = &shortage.victim else { return self.no_victim(shortage) };
        world.count_age(&shortage.measured);
        self.evict(world, std::slice::from_ref(victim), now);
    }

    fn evict(&mut self, world: &mut dyn World, victims: &[Victim], now: Instant) {
        for victim in victims {
            self.evicted.insert(victim.pod.uid().clone());
            world.evict(victim);
        }
        let longest = victims.iter().map(|victim| victim.grace_seconds).max().unwrap_or(0);
        let grace = Duration::from_secs(u64::try_from(longest).unwrap_or(0).min(3600));
        let pods = victims.iter().map(|victim| victim.pod.clone()).collect();
        self.stage = Stage::Ending { pods, until: now + grace + VICTIM_LIMIT };
    }

    fn no_victim(&mut self, shortage: &Shortage) {
        if !std::mem::replace(&mut self.logged_no_victim, true) {
            let resource = shortage.threshold.signal.resource().as_str();
            log::warn!("{resource} is short on the node, and there is no pod that may be evicted");
        }
    }

    /// Reads the machine's numbers and makes a pass.
    fn run_pass(&mut self, world: &mut dyn World, polls: bool, now: Instant) -> Wait {
        if self.layout.is_none()
            && let Some(layout) = world.layout()
        {
            self.layout = Some(layout);
            if layout != Layout::Single {
                self.eviction = EvictionManager::new(self.settings.clone(), layout);
            }
        }
        let Some(node) = world.read_node() else { return Wait { until: Some(now + PERIOD), left: None } };
        let pods = world.pods();
        let limited = self.settings.local_limits && pods.iter().any(is_limited);
        if !limited {
            self.local_due = None;
        }
        let node_snapshot = Snapshot { node, ..Snapshot::default() };
        let observations = self.eviction.observe(&node_snapshot);
        let scope = if self.local_due.is_none_or(|due| now >= due) && limited {
            Some(StatsScope::Disks)
        } else {
            self.scope(&observations)
        };
        let (mut snapshot, mut candidates) = (node_snapshot, Vec::new());
        if let Some(scope) = scope
            && let Some(measured) = self.measure(world, scope, limited, now)
        {
            // The machine's numbers of this moment count.
            let node = std::mem::take(&mut snapshot.node);
            snapshot = Snapshot { node, ..measured };
            let others = pods.iter().filter(|pod| !self.evicted.contains(pod.uid()));
            candidates = others.map(|pod| world.granted(pod)).collect();
        }
        let outcome = self.eviction.pass(&snapshot, &candidates, now);
        let observations = self.eviction.observe(&snapshot);
        self.log_unobserved(&outcome.unobserved);
        let met = !self.eviction.is_relieved(Some(&snapshot));
        self.logged_no_victim &= met;
        world.publish(self.report(outcome.pressures, &observations));
        let mut again = self.period(&observations, polls);
        match outcome.action {
            Action::None => {}
            Action::Limits(victims) => self.evict(world, &victims, now),
            Action::Shortage(shortage) => {
                world.report_shortage(&shortage);
                let rests = shortage.victim.is_none()
                    && self.next_reclaim.is_some_and(|next_reclaim| now < next_reclaim);
                if shortage.reclaim.is_empty() || rests {
                    self.evict_for(world, &shortage, now);
                } else {
                    world.reclaim(shortage.reclaim);
                    let until = now + RECLAIM_LIMIT;
                    self.stage = Stage::Reclaiming { shortage, uses: snapshot.pods, until };
                }
            }
        }
        match self.stage {
            Stage::Watching => {}
            Stage::Reclaiming { until, .. } | Stage::Ending { until, .. } => {
                return Wait { until: Some(until), left: None };
            }
        }
        // The cgroup of all pods is made after this thread has started.
        if met || outcome.pressures != Pressures::default() || !outcome.unobserved.is_empty() {
            again = Some(PERIOD);
        }
        let timers = [again.map(|again| now + again), outcome.due, self.local_due.filter(|_| limited)];
        let until = timers.into_iter().flatten().min().map(|until| until.max(now + SIGNAL_INTERVAL / 10));
        Wait { until, left: Some(self.left(&snapshot.node, world.pods_cgroup())) }
    }

    fn measure(
        &mut self,
        world: &mut dyn World,
        scope: StatsScope,
        limited: bool,
        now: Instant,
    ) -> Option<Snapshot> {
        let begun = Instant::now();
        let measured = world.measure(scope);
        if scope == StatsScope::Disks && limited {
            let took = begun.elapsed();
            self.local_due = Some(now + pause(took, self.took.replace(took)));
        }
        measured
    }

    /// What a pass needs to know of pods: nothing unless a threshold is met.
    fn scope(&self, observations: &Observations) -> Option<StatsScope> {
        let needs = self.eviction.met_signals(observations).map(|signal| match signal.pressure() {
            Pressure::Disk => StatsScope::Disks,
            Pressure::Memory | Pressure::Pid => StatsScope::Memory,
        });
        needs.max()
    }

    /// When to read the numbers again although nothing happens; `None`: there is no threshold.
    fn period(&self, observations: &Observations, polls: bool) -> Option<Duration> {
        if self.layout.is_none() {
            return Some(PERIOD);
        }
        let polled = polls.then(|| {
            let headroom = watch::headroom(self.eviction.thresholds(), observations);
            watch::poll_interval(headroom, self.processors)
        });
        let all = self.eviction.thresholds().map(|threshold| {
            let rate = match threshold.signal.resource() {
                // Processes are made so fast that no distance is large.
                super::signal::Resource::Pids => return PERIOD,
                super::signal::Resource::Inodes => INODE_RATE,
                super::signal::Resource::Memory | super::signal::Resource::EphemeralStorage => FILL_RATE,
            };
            let Some(observed) = observations.get(&threshold.signal) else { return FAR_INTERVAL };
            let left = observed.available.units() - threshold.value.amount(observed.capacity).units();
            let seconds = u64::try_from(i128::from(left) / rate).unwrap_or(0);
            Duration::from_secs(seconds).clamp(PERIOD, FAR_INTERVAL)
        });
        all.chain(polled).min()
    }

    /// What is left until the nearest threshold of memory that is not met.
    fn left(&self, node: &NodeUse, pods_path: Option<String>) -> RemainingMemory {
        let snapshot = Snapshot { node: node.clone(), ..Snapshot::default() };
        let observations = self.eviction.observe(&snapshot);
        let reading = |signal: Signal, usage: Option<u64>| {
            let observed = observations.get(&signal)?;
            let available = u64::try_from(observed.available.units()).ok()?;
            let thresholds = self.eviction.thresholds().filter(|threshold| threshold.signal == signal);
            let levels = thresholds.filter_map(|threshold| {
                u64::try_from(threshold.value.amount(observed.capacity).units()).ok()
            });
            let next = levels.filter(|level| *level <= available).max()?;
            Some(Reading::new(usage?, available, next))
        };
        let pods = node.system.iter().find(|part| part.name == "pods");
        RemainingMemory {
            machine: reading(Signal::MemoryAvailable, node.numbers.usage),
            pods: reading(Signal::AllocatableMemoryAvailable, pods.and_then(|pods| pods.numbers.usage)),
            pods_usage: pods.and_then(|pods| pods.numbers.usage),
            pods_path,
        }
    }

    fn report(&self, pressures: Pressures, observations: &Observations) -> Report {
        let mut rows: Vec<ThresholdStatus> = Vec::new();
        for threshold in self.eviction.thresholds() {
            let Some(observed) = observations.get(&threshold.signal) else { continue };
            rows.push(row(threshold, observed));
        }
        Report { pressures, rows }
    }

    fn log_unobserved(&mut self, unobserved: &[Signal]) {
        for signal in unobserved.iter().filter(|signal| !self.unobserved.contains(signal)) {
            // The runtime reports its file systems later; pods may have no cgroup.
            if self.layout.is_some() && *signal != Signal::AllocatableMemoryAvailable {
                log::warn!("{} is not known, so its threshold has no effect for now", signal.as_str());
            }
        }
        if self.layout.is_some() {
            self.unobserved = unobserved.to_vec();
        }
    }
}

fn row(threshold: &Threshold, observed: &Observation) -> ThresholdStatus {
    let least = threshold.value.amount(observed.capacity);
    ThresholdStatus {
        signal: threshold.signal.as_str(),
        available: observed.text(),
        threshold: threshold.value.text(observed.capacity),
        soft: !threshold.is_hard(),
        met: observed.available < least,
        near: observed.available < least + least,
    }
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
