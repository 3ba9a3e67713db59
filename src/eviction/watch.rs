//! How the agent notices that memory becomes short: which notifications it requests from this
//! kernel, how often it reads the numbers itself if they do not cover everything, and when the next
//! pass is due (pure).
//!
//! # How a shortage of memory is noticed
//!
//! [`WatchPlan`] chooses notifications that together cover both quick ways in which memory becomes short;
//! the thread that waits for them also makes the passes.
//!
//! *Growth into free memory.* On cgroup version 1 an eventfd signals when the use of memory passes
//! a level ([`notify::Levels`](super::notify::Levels)), for the machine and for the cgroup of all
//! pods. The kernel compares on each 128 charged pages, so the signal comes within a millisecond,
//! and it never signals while the use stays between the levels. Version 2 has no levels. There
//! `memory.high` of the cgroup of all pods has a limit at the same use
//! ([`psi::high`](super::psi::high)): the first allocation above it counts in `memory.events`,
//! which the agent waits for. The agent removes the limit at the beginning of each pass, so that pods
//! are slowed down for a few milliseconds at most; it also removes it when it stops, and first
//! thing when it starts. A killed agent leaves it behind: until the next start pods are slowed down
//! where they would have been evicted.
//!
//! *Growth at the expense of cached files.* When memory is full of cached files the use does not
//! grow, and no level is passed, although the working set grows. The kernel has to reclaim then. A
//! trigger on `/proc/pressure/memory` ([`Trigger::RECLAIM`](super::psi::Trigger::RECLAIM), both
//! versions of cgroups) signals within 100 ms after 20 ms of reclaim; without it,
//! `memory.pressure_level` of version 1 does, after 2 MiB. On version 2 `max` in `memory.events`
//! shows the same for the limit of all pods.
//!
//! *Again.* After a signal the agent reads the memory's numbers (two files) and nothing else. If a
//! threshold is met it makes a pass. If not, it sets the levels again if they are outdated, and
//! leaves the file descriptors unread for [`SIGNAL_INTERVAL`], so that a node that reclaims all the
//! time (many files are read) wakes once per second. An idle node allocates nothing and reclaims
//! nothing: none of these sources wakes it.
//!
//! *What no kernel signals.* On version 2 `memory.high` covers pods only: a system service that grows
//! into free memory is not noticed before the kernel reclaims. Cached files that are read a second
//! time become part of the working set although no page is allocated. So the numbers are also read
//! every [`PERIOD`], or less often if the threshold is far away, as those of disks are.
//!
//! *80 % of memory at once.* A threshold is met between two pages. If the memory was free, the
//! level or `memory.high` was at this page. If it was cached files, clearing them takes the kernel more
//! than 20 ms. In both cases the pass begins within 100 ms, and a signal that comes during
//! [`SIGNAL_INTERVAL`] waits for a second at most.
//!
//! *Neither.* On a kernel that lacks one of the two, the memory's numbers are read before memory
//! can be full ([`poll_interval`]: 1 s near a threshold, up to 10 s far from it).

use std::time::Duration;

use super::observations::Observations;
use super::signal::{Pressure, Signal};
use super::thresholds::Threshold;
use crate::model::quantity::Amount;

/// The interval of passes that look for shortages that no kernel reports: disks and process ids
/// (Go: `evictionMonitoringPeriod`).
pub const PERIOD: Duration = Duration::from_secs(10);
/// The least time between two passes that the kernel causes. A kernel that reclaims memory all the
/// time signals all the time.
pub const SIGNAL_INTERVAL: Duration = Duration::from_secs(1);
/// The longest wait for an evicted pod to end, before the next pass (Go: `podCleanupTimeout`).
pub const VICTIM_LIMIT: Duration = Duration::from_secs(30);

/// The fastest growth of memory use, per second and processor: the kernel has to clear each page.
const GROWTH: u64 = 4 << 30;

/// What this kernel can report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KernelFeatures {
    /// Version 1 of the memory controller, with `cgroup.event_control`.
    pub usage_events: bool,
    /// Version 1, with `memory.pressure_level`.
    pub pressure_levels: bool,
    /// Version 2, with `memory.events` and `memory.high` in the cgroup of all pods.
    pub pods_events: bool,
    /// Triggers in `/proc/pressure/memory`.
    pub stall_triggers: bool,
}

/// A notification to request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Levels of the use of memory of the whole machine (`notify::Levels`).
    MachineUsage,
    /// The same of the cgroup of all pods.
    PodsUsage,
    /// Reclaim on the whole machine (`notify::pressure_line`).
    MachineReclaim,
    /// `psi::Trigger::RECLAIM`.
    Stalls,
    /// `memory.events` of the cgroup of all pods, with `psi::high` in its `memory.high`.
    PodsEvents,
}

/// The notifications for these thresholds, and how often to read the use of memory besides.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WatchPlan {
    /// What to request.
    pub sources: Vec<Source>,
    /// Whether memory has to be read regularly, as [`poll_interval`] says.
    pub poll: bool,
}

impl WatchPlan {
    /// The plan for this kernel. Without thresholds of memory it is empty.
    #[must_use]
    pub fn new<'a>(thresholds: impl IntoIterator<Item = &'a Threshold>, kernel: KernelFeatures) -> WatchPlan {
        let (mut machine, mut pods) = (false, false);
        for threshold in thresholds {
            machine |= threshold.signal == Signal::MemoryAvailable;
            pods |= threshold.signal == Signal::AllocatableMemoryAvailable;
        }
        if !machine && !pods {
            return WatchPlan::default();
        }
        let mut sources = Vec::new();
        // Growth into free memory.
        if kernel.usage_events {
            sources.extend(machine.then_some(Source::MachineUsage));
            sources.extend(pods.then_some(Source::PodsUsage));
        }
        if kernel.pods_events {
            sources.push(Source::PodsEvents);
        }
        // Growth for which the kernel has to drop pages of files.
        if kernel.stall_triggers {
            sources.push(Source::Stalls);
        } else if kernel.pressure_levels {
            sources.push(Source::MachineReclaim);
        }
        let growth = kernel.usage_events || kernel.pods_events;
        let reclaim = kernel.stall_triggers || kernel.pressure_levels;
        WatchPlan { sources, poll: !(growth && reclaim) }
    }
}

/// Bytes that may still be used before the next memory threshold is met; `None`: there is none, or
/// its numbers are not known.
#[must_use]
pub fn headroom<'a>(
    thresholds: impl IntoIterator<Item = &'a Threshold>,
    observations: &Observations,
) -> Option<u64> {
    let memory = thresholds.into_iter().filter(|threshold| threshold.signal.pressure() == Pressure::Memory);
    let left = memory.filter_map(|threshold| {
        let observed = observations.get(&threshold.signal)?;
        let (available, least) = (observed.available.units(), threshold.value.amount(observed.capacity));
        Some(available.saturating_sub(least.max(Amount::ZERO).units()))
    });
    left.min().map(|left| u64::try_from(left).unwrap_or(0))
}

/// When to read the use of memory again where the kernel reports nothing: so early that a threshold
/// is not met for more than a second, even if all processors do nothing but fill memory.
#[must_use]
pub fn poll_interval(headroom: Option<u64>, processors: u32) -> Duration {
    let Some(headroom) = headroom else { return PERIOD };
    let growth = GROWTH.saturating_mul(processors.clamp(1, 64).into());
    Duration::from_secs(1).saturating_add(Duration::from_secs(headroom / growth)).min(PERIOD)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::eviction::layout::Layout;
    use crate::eviction::observations::{Swap, observations};
    use crate::eviction::thresholds::{Value, value};
    use crate::eviction::{State, step};
    use crate::resources::stats::sample::{NodeUse, Numbers, Snapshot, SystemUse};

    fn threshold(signal: Signal, least: &str) -> Threshold {
        let Some(value) = value(least).unwrap() else { panic!("{least} is off") };
        Threshold { signal, value, grace: Duration::ZERO, min_reclaim: None }
    }

    #[test]
    fn the_plan_uses_what_the_kernel_has() {
        let all = [
            threshold(Signal::MemoryAvailable, "100Mi"),
            threshold(Signal::AllocatableMemoryAvailable, "100Mi"),
            threshold(Signal::NodeFsAvailable, "10%"),
        ];
        let plan = |kernel| {
            let plan = WatchPlan::new(&all, kernel);
            (plan.sources, plan.poll)
        };
        use Source::{MachineReclaim, MachineUsage, PodsEvents, PodsUsage, Stalls};
        let none = KernelFeatures::default();
        let first = KernelFeatures { usage_events: true, pressure_levels: true, ..none };
        assert_eq!(plan(first), (vec![MachineUsage, PodsUsage, MachineReclaim], false));
        assert_eq!(
            plan(KernelFeatures { stall_triggers: true, ..first }),
            (vec![MachineUsage, PodsUsage, Stalls], false)
        );
        let second = KernelFeatures { pods_events: true, stall_triggers: true, ..none };
        assert_eq!(plan(second), (vec![PodsEvents, Stalls], false));
        assert_eq!(plan(KernelFeatures { stall_triggers: false, ..second }), (vec![PodsEvents], true));
        assert_eq!(plan(none), (vec![], true));
        assert_eq!(WatchPlan::new(&all[2..], first), WatchPlan::default());
        assert_eq!(WatchPlan::new(&all[..1], first).sources, [MachineUsage, MachineReclaim]);
    }

    fn snapshot(available: u64, of_pods: u64) -> Snapshot {
        let numbers = |available: u64| Numbers {
            available: Some(available << 20),
            working_set: Some(1000 << 20),
            ..Numbers::default()
        };
        let system = vec![SystemUse { name: "pods", started: None, numbers: numbers(of_pods) }];
        Snapshot {
            node: NodeUse { numbers: numbers(available), system, ..NodeUse::default() },
            ..Snapshot::default()
        }
    }

    #[test]
    fn headroom_is_that_of_the_nearest_threshold() {
        let all = [
            threshold(Signal::MemoryAvailable, "100Mi"),
            threshold(Signal::AllocatableMemoryAvailable, "10%"),
            threshold(Signal::PidAvailable, "1000"),
        ];
        let left =
            |available, of_pods| headroom(&all, &observations(&snapshot(available, of_pods), Swap::Ignored));
        assert_eq!(left(500, 9000), Some(400 << 20));
        assert_eq!(left(5000, 200), Some((80 << 20) - 1), "a tenth of 1200, in 32 bits, is not left");
        assert_eq!(left(50, 9000), Some(0));
        assert_eq!(headroom(&all, &Observations::new()), None);
        assert_eq!(headroom(&all[2..], &observations(&snapshot(1, 1), Swap::Ignored)), None);
    }

    #[test]
    fn numbers_are_read_before_memory_can_be_full() {
        let seconds = |headroom, processors| poll_interval(headroom, processors).as_secs();
        assert_eq!(seconds(Some(0), 4), 1);
        assert_eq!(seconds(Some(8 << 30), 1), 3);
        assert_eq!(seconds(Some(8 << 30), 2), 2);
        assert_eq!(seconds(Some(u64::MAX), 0), 10);
        assert_eq!(seconds(None, 4), 10);
    }

    /// Whatever was allocated before the level was passed, the pass at the level meets the
    /// threshold exactly.
    #[test]
    fn the_upper_level_is_where_the_threshold_is_met() {
        let least = threshold(Signal::MemoryAvailable, "300Mi");
        let before = snapshot(500, 9000);
        let headroom = headroom([&least], &observations(&before, Swap::Ignored)).unwrap();
        let mut state = State::new(&[least], Layout::Single, Duration::from_secs(300));
        let after = |taken: u64| {
            let mut after = before.clone();
            let numbers = &mut after.node.numbers;
            numbers.available = numbers.available.map(|bytes| bytes - taken);
            numbers.working_set = numbers.working_set.map(|bytes| bytes + taken);
            observations(&after, Swap::Ignored)
        };
        let now = Instant::now();
        assert!(step(&mut state, &after(headroom), now).actionable.is_empty());
        assert_eq!(step(&mut state, &after(headroom + 1), now).actionable.len(), 1);
        assert!(matches!(state.thresholds().next().unwrap().value, Value::Quantity(..)));
    }
}
