//! The steps of one shutdown (pure): notify `sync`, stop group after group, send statuses.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::pods::plan::shutdown::{Step, groups};

/// `sync` responds within a turn. If it does not, the pods that were known before are stopped.
const BEGIN_LIMIT: Duration = Duration::from_secs(2);
/// After a start of the agent, pods may run that their source has not delivered yet. This is how
/// long after the signal the source may still deliver them.
const SOURCES_LIMIT: Duration = Duration::from_secs(10);
/// How long statuses may take to reach the API server, out of the time that is left.
const WRITTEN_LIMIT: Duration = Duration::from_secs(2);
/// How often to check whether the API server has all statuses.
const WRITTEN_STEP: Duration = Duration::from_millis(50);

/// The state of the node.
pub(super) trait ShutdownState {
    /// Whether `sync` refuses new pods already.
    fn is_acknowledged(&self) -> bool;
    /// Whether every running pod is known. Otherwise a source may still deliver such a pod.
    fn is_complete(&self) -> bool;
    /// The pods that are to be stopped.
    fn pods(&self) -> Vec<Pod>;
    /// Whether nothing is left of a pod, its volumes included.
    fn has_ended(&self, uid: &PodUid) -> bool;
    /// Whether the API server knows every status.
    fn is_written(&self) -> bool;
}

/// An action for the thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// Announce that the node shuts down.
    Begin,
    /// Stop these pods, each with a grace in seconds.
    Kill(Vec<(PodUid, i64)>),
    /// Log that these pods have not ended in the time of their group.
    Overdue(Vec<PodUid>),
    /// Release the lock, so that the machine shuts down.
    Release,
    /// The shutdown was cancelled; the lock is needed again.
    Undo,
}

#[derive(Debug)]
enum Stage {
    /// No shutdown.
    Watching,
    /// `sync` was notified, but has not responded, or not every running pod is known.
    Notifying { until: Instant },
    /// A group is being stopped. An empty group is a wait for pods that are not known yet.
    Stopping { pods: Vec<PodUid>, until: Instant },
    /// The pods have ended, or their time is over; the statuses are being sent.
    Writing { next_check: Instant, until: Instant },
    /// The lock is released.
    Over,
}

/// The state of the shutdown.
pub(super) struct Core {
    steps: Vec<Step>,
    stage: Stage,
    begun: Instant,
    /// Pods that were ordered to end.
    ordered: BTreeSet<PodUid>,
}

impl Core {
    pub(super) fn new(steps: Vec<Step>, now: Instant) -> Self {
        Core { steps, stage: Stage::Watching, begun: now, ordered: BTreeSet::new() }
    }

    /// The sum of the times of all groups: the delay of the machine's shutdown.
    pub(super) fn inhibit_delay(&self) -> Duration {
        total(&self.steps)
    }

    /// The machine is about to shut down, or no longer is.
    pub(super) fn prepare_for_shutdown(&mut self, on: bool, now: Instant) -> Option<Action> {
        match (&self.stage, on) {
            (Stage::Watching, true) => {
                self.begun = now;
                self.ordered.clear();
                self.stage = Stage::Notifying { until: now + BEGIN_LIMIT };
                Some(Action::Begin)
            }
            (Stage::Watching, false) | (_, true) => None,
            // DIFFERS: the Go kubelet handles a cancellation only after it has stopped every pod.
            (_, false) => {
                self.stage = Stage::Watching;
                Some(Action::Undo)
            }
        }
    }

    /// Whether the lock was released.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// When [`Core::turn`] has something to do even if nothing happens.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Watching | Stage::Over => None,
            Stage::Notifying { until } | Stage::Stopping { until, .. } => Some(*until),
            Stage::Writing { next_check, until } => Some(*next_check.min(until)),
        }
    }

    /// Takes every step that is possible now.
    pub(super) fn turn(&mut self, world: &dyn ShutdownState, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        loop {
            match &mut self.stage {
                Stage::Watching | Stage::Over => return actions,
                Stage::Notifying { until } => {
                    if !(world.is_acknowledged() && world.is_complete()) && now < *until {
                        return actions;
                    }
                    self.stage = Stage::Stopping { pods: Vec::new(), until: now };
                }
                Stage::Stopping { pods: stopping, until } => {
                    stopping.retain(|uid| !world.has_ended(uid));
                    if !stopping.is_empty() {
                        if now < *until {
                            return actions;
                        }
                        actions.push(Action::Overdue(std::mem::take(stopping)));
                    }
                    let mut pods = world.pods();
                    pods.retain(|pod| !self.ordered.contains(pod.uid()));
                    if let Some(group) = groups(&self.steps, &pods).into_iter().next() {
                        *until = now + group.period;
                        *stopping = group.pods.iter().map(|(uid, _)| uid.clone()).collect();
                        self.ordered.extend(stopping.iter().cloned());
                        actions.push(Action::Kill(group.pods));
                        // The pods are not ordered to stop before the next turn.
                        return actions;
                    }
                    let total = total(&self.steps);
                    let late = self.begun + total.min(SOURCES_LIMIT);
                    if !world.is_complete() && now < late {
                        *until = late;
                        return actions;
                    }
                    // DIFFERS: the Go kubelet releases the lock immediately.
                    let end = self.begun + total;
                    self.stage = Stage::Writing { next_check: now, until: end.min(now + WRITTEN_LIMIT) };
                }
                Stage::Writing { next_check, until } => {
                    if now < *until && !world.is_written() {
                        *next_check = now + WRITTEN_STEP;
                        return actions;
                    }
                    self.stage = Stage::Over;
                    actions.push(Action::Release);
                }
            }
        }
    }
}

fn total(steps: &[Step]) -> Duration {
    steps.iter().fold(Duration::ZERO, |all, step| all.saturating_add(step.period))
}
