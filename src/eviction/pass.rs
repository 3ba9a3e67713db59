//! One pass: the state, the limits of pods, what to reclaim, and whom to evict, in upstream's order
//! (pure; Go: eviction `synchronize`).

use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::layout::{Layout, Reclaim};
use super::local::above_limits;
use super::observations::{Observations, Swap, observations};
use super::rank::rank;
use super::signal::{Pressures, Signal};
use super::state::{State, step};
use super::texts;
use super::thresholds::{Problem, Threshold, thresholds};
use super::usage::PodUses;
use super::victim::{IMMEDIATE_GRACE_SECONDS, Victim};
use crate::config::KubeletConfiguration;
use crate::model::pod::Pod;
use crate::resources::stats::sample::Snapshot;

/// The API's default of `terminationGracePeriodSeconds`.
const DEFAULT_GRACE: i64 = 30;

/// What the configuration says of eviction.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Without those of the file system with writable layers.
    pub thresholds: Vec<Threshold>,
    /// `evictionPressureTransitionPeriod`.
    pub transition: Duration,
    /// `evictionMaxPodGracePeriod`, in seconds. Negative: the pod's own grace period.
    pub max_grace_seconds: i64,
    /// `localStorageCapacityIsolation`.
    pub local_limits: bool,
    /// From `memorySwap.swapBehavior`.
    pub swap: Swap,
}

impl Settings {
    /// From the configuration and `--experimental-allocatable-ignore-eviction`.
    ///
    /// # Errors
    /// All problems, each with its field.
    pub fn new(config: &KubeletConfiguration, ignore_allocatable: bool) -> Result<Settings, Vec<Problem>> {
        Ok(Settings {
            thresholds: thresholds(config, ignore_allocatable)?,
            transition: config.eviction_pressure_transition_period.to_std(),
            max_grace_seconds: i64::from(config.eviction_max_pod_grace_period),
            local_limits: config.local_storage_capacity_isolation,
            swap: Swap::from_behavior(&config.memory_swap.swap_behavior),
        })
    }

    /// Whether there is anything to do: without thresholds and limits no pass is made.
    pub fn is_active(&self) -> bool {
        self.local_limits || !self.thresholds.is_empty()
    }
}

/// The eviction of one node. Made when the layout of its file systems is known.
#[derive(Debug, Clone)]
pub struct EvictionManager {
    settings: Settings,
    layout: Layout,
    state: State,
}

/// The result of a pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// The conditions that the node reports from now on. Also admission reads them.
    pub pressures: Pressures,
    /// What to do now.
    pub action: Action,
    /// Signals of thresholds without numbers, for the log.
    pub unobserved: Vec<Signal>,
    /// When the next pass is due at the latest because a grace or transition period ends.
    pub due: Option<Instant>,
}

/// What to do after a pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Nothing is short.
    None,
    /// Evict all of these pods: they exceed limits of their own.
    Limits(Vec<Victim>),
    /// A threshold is met.
    Shortage(Box<Shortage>),
}

/// How to end a shortage: raise the event, reclaim, and if that is not enough evict.
#[derive(Debug, Clone, PartialEq)]
pub struct Shortage {
    /// The threshold.
    pub threshold: Threshold,
    /// The message of the Warning event `EvictionThresholdMet` on the node.
    pub message: String,
    /// What to try first, in this order, also if one of them fails. If the list is not empty,
    /// measure again afterwards and ask [`EvictionManager::is_relieved`].
    pub reclaim: &'static [Reclaim],
    /// The pod to evict; `None`: there is none that may be evicted.
    pub victim: Option<Victim>,
    /// For `kubelet_eviction_stats_age_seconds`, when a pod has to be evicted.
    pub measured: Vec<(Signal, Timestamp)>,
}

impl EvictionManager {
    /// Before the first pass.
    #[must_use]
    pub fn new(settings: Settings, layout: Layout) -> EvictionManager {
        let state = State::new(&settings.thresholds, layout, settings.transition);
        EvictionManager { settings, layout, state }
    }

    /// All thresholds, for status pages.
    pub fn thresholds(&self) -> impl Iterator<Item = &Threshold> {
        self.state.thresholds()
    }

    /// The observations that a pass makes of this snapshot.
    #[must_use]
    pub fn observe(&self, snapshot: &Snapshot) -> Observations {
        observations(snapshot, self.settings.swap)
    }

    /// The signals of thresholds that a pass over these observations finds to be met.
    pub fn met_signals(&self, observations: &Observations) -> impl Iterator<Item = Signal> {
        self.state.met(observations).map(|threshold| threshold.signal)
    }

    /// Makes one pass. `pods` are those that have not ended, with the resources that they were
    /// granted.
    pub fn pass(&mut self, snapshot: &Snapshot, pods: &[Pod], now: Instant) -> Outcome {
        let observations = self.observe(snapshot);
        let decision = step(&mut self.state, &observations, now);
        let uses = PodUses::new(snapshot);
        let limits =
            if self.settings.local_limits { above_limits(pods, &uses, self.layout) } else { Vec::new() };
        let action = match decision.actionable.first() {
            _ if !limits.is_empty() => Action::Limits(limits),
            None => Action::None,
            Some(first) => {
                self.state.reclaim(first.signal);
                Action::Shortage(Box::new(self.shortage(
                    first,
                    &decision.actionable,
                    &observations,
                    pods,
                    &uses,
                )))
            }
        };
        Outcome { pressures: decision.pressures, action, unobserved: decision.unobserved, due: decision.due }
    }

    /// Whether the reclaim has ended all shortages, so that no pod has to be evicted. If nothing
    /// could be measured it has not.
    #[must_use]
    pub fn is_relieved(&self, snapshot: Option<&Snapshot>) -> bool {
        snapshot.is_some_and(|snapshot| self.state.is_relieved(&self.observe(snapshot)))
    }

    fn shortage(
        &self,
        first: &Threshold,
        actionable: &[Threshold],
        observations: &Observations,
        pods: &[Pod],
        uses: &PodUses<'_>,
    ) -> Shortage {
        let ranked = rank(pods, uses, first.signal, self.layout, self.settings.swap);
        let victim = ranked.into_iter().find(|pod| !pod.is_critical()).map(|pod| {
            let (message, annotations) =
                texts::evicted(pod, uses.get(pod), actionable, observations, self.settings.swap);
            Victim {
                pod: pod.clone(),
                grace_seconds: self.grace(first, pod),
                message,
                annotations,
                disruption_target: true,
                signal: first.signal.as_str(),
            }
        });
        let measured = actionable.iter().filter_map(|threshold| {
            let time = observations.get(&threshold.signal)?.time;
            (time != Timestamp::default()).then_some((threshold.signal, time))
        });
        Shortage {
            threshold: first.clone(),
            message: texts::threshold_met(first.signal.resource()),
            reclaim: self.layout.reclaim(first.signal),
            victim,
            measured: measured.collect(),
        }
    }

    /// At least a second, as of every pod that ends.
    fn grace(&self, threshold: &Threshold, pod: &Pod) -> i64 {
        if threshold.is_hard() {
            return IMMEDIATE_GRACE_SECONDS;
        }
        let own = pod.spec().termination_grace_period_seconds;
        let grace = match self.settings.max_grace_seconds {
            // DIFFERS: as documented; in the Go kubelet it is one second.
            ..0 => own.unwrap_or(DEFAULT_GRACE),
            most => own.map_or(most, |own| own.min(most)),
        };
        grace.max(IMMEDIATE_GRACE_SECONDS)
    }
}
