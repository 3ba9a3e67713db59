//! What the passes remember, and one pass over the thresholds: which are met, for how long, which
//! conditions the node reports, and what to reclaim (pure; Go: eviction `synchronize`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::layout::Layout;
use super::observations::Observations;
use super::signal::{Pressure, Pressures, Signal};
use super::thresholds::{Threshold, with_container_fs};

#[derive(Debug, Clone)]
struct ThresholdHistory {
    threshold: Threshold,
    /// Since when it has been met in every pass.
    first: Option<Instant>,
    /// In the last pass it was met, and its grace period was over.
    acted: bool,
}

/// The memory of the passes. It is lost at a restart, as upstream's is.
#[derive(Debug, Clone)]
pub struct State {
    watched: Vec<ThresholdHistory>,
    transition: Duration,
    /// When each condition was caused last.
    caused: BTreeMap<Pressure, Instant>,
    /// The times of the statistics of the last pass.
    measured: BTreeMap<Signal, Timestamp>,
    /// The number of reclaims so far, and the last one of each signal.
    reclaims: u64,
    reclaimed: BTreeMap<Signal, u64>,
}

/// The result of one pass over the thresholds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decision {
    /// The conditions that the node reports now.
    pub pressures: Pressures,
    /// The thresholds that require action, the one to act on first.
    pub actionable: Vec<Threshold>,
    /// Signals of thresholds without numbers.
    pub unobserved: Vec<Signal>,
    /// When the next grace period or transition period ends: another pass is due then, even if
    /// nothing else happens.
    pub due: Option<Instant>,
}

impl ThresholdHistory {
    /// A threshold that pods were evicted for stays met until the minimum reclaim is reached.
    fn is_met(&self, observations: &Observations) -> bool {
        is_met(&self.threshold, observations, false)
            || (self.acted && is_met(&self.threshold, observations, true))
    }
}

impl State {
    /// Before the first pass. `transition`: `evictionPressureTransitionPeriod`.
    #[must_use]
    pub fn new(thresholds: &[Threshold], layout: Layout, transition: Duration) -> State {
        let watched = with_container_fs(thresholds, layout)
            .into_iter()
            .map(|threshold| ThresholdHistory { threshold, first: None, acted: false })
            .collect();
        State {
            watched,
            transition,
            caused: BTreeMap::new(),
            measured: BTreeMap::new(),
            reclaims: 0,
            reclaimed: BTreeMap::new(),
        }
    }

    /// All thresholds, with those of the file system with writable layers.
    pub fn thresholds(&self) -> impl Iterator<Item = &Threshold> {
        self.watched.iter().map(|watched| &watched.threshold)
    }

    /// The thresholds that a pass over these observations finds to be met, grace period or not.
    pub fn met(&self, observations: &Observations) -> impl Iterator<Item = &Threshold> {
        let met = self.watched.iter().filter(|watched| watched.is_met(observations));
        met.map(|watched| &watched.threshold)
    }

    /// Whether no threshold is met any more, including its minimum reclaim and without regard to
    /// grace periods: then no pod has to be evicted after node-level reclaim (Go: eviction
    /// `reclaimNodeLevelResources`).
    #[must_use]
    pub fn is_relieved(&self, observations: &Observations) -> bool {
        !self.thresholds().any(|threshold| is_met(threshold, observations, true))
    }

    /// Space is now reclaimed for this signal.
    pub(super) fn reclaim(&mut self, signal: Signal) {
        self.reclaims = self.reclaims.saturating_add(1);
        self.reclaimed.insert(signal, self.reclaims);
    }
}

/// Makes one pass. The pass acts only on statistics that are newer than those of the last one.
pub fn step(state: &mut State, observations: &Observations, now: Instant) -> Decision {
    let mut decision = Decision::default();
    for watched in &mut state.watched {
        let threshold = &watched.threshold;
        let observed = observations.get(&threshold.signal);
        if observed.is_none() && !decision.unobserved.contains(&threshold.signal) {
            decision.unobserved.push(threshold.signal);
        }
        let met = watched.is_met(observations);
        watched.acted = false;
        if !met {
            watched.first = None;
            continue;
        }
        state.caused.insert(threshold.signal.pressure(), now);
        let over = *watched.first.get_or_insert(now) + threshold.grace;
        if now < over {
            set_earlier(&mut decision.due, over);
            continue;
        }
        watched.acted = true;
        let time = observed.map(|observed| observed.time).unwrap_or_default();
        // DIFFERS: upstream compares which is later. The clock may be set back, and a measurement
        // is never replaced by an older one.
        if time == Timestamp::default() || state.measured.get(&threshold.signal) != Some(&time) {
            decision.actionable.push(threshold.clone());
        }
    }
    let held =
        state.caused.iter().filter(|(_, time)| now.saturating_duration_since(**time) < state.transition);
    decision.pressures = held.clone().map(|(pressure, _)| *pressure).collect();
    for (_, time) in held {
        set_earlier(&mut decision.due, *time + state.transition);
    }
    state.measured = observations.iter().map(|(signal, observed)| (*signal, observed.time)).collect();
    // Memory before all others. Of two thresholds of one signal the hard one.
    // DIFFERS: of the others upstream takes any. Here it is the one whose turn was the longest time
    // ago, so that a shortage that cannot be ended does not hide another.
    decision.actionable.sort_by_key(|threshold| {
        let turn = match threshold.signal.pressure() {
            Pressure::Memory => 0,
            Pressure::Disk | Pressure::Pid => {
                state.reclaimed.get(&threshold.signal).map_or(1, |turn| turn + 1)
            }
        };
        (turn, threshold.signal, !threshold.is_hard())
    });
    decision
}

/// Whether less than the threshold is available; without numbers it is not met.
fn is_met(threshold: &Threshold, observations: &Observations, with_reclaim: bool) -> bool {
    let Some(observed) = observations.get(&threshold.signal) else { return false };
    let mut least = threshold.value.amount(observed.capacity);
    if let Some(more) = threshold.min_reclaim.as_ref().filter(|_| with_reclaim) {
        least = least + more.amount(observed.capacity);
    }
    observed.available < least
}

fn set_earlier(due: &mut Option<Instant>, time: Instant) {
    *due = Some(due.map_or(time, |due| due.min(time)));
}
