//! The phases of a pod on this node and their transitions (pure).

use jiff::Timestamp;

use crate::model::api::PodStatus;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::pods::plan;
use crate::status;

/// Why and how a pod is to be stopped.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodKill {
    /// Replaces the pod's own grace period, in seconds.
    pub grace_override: Option<i64>,
    /// Set for evictions and the like: why the pod fails.
    pub failure: Option<Failure>,
}

/// The message of a pod that is stopped because the API server was away for too long.
pub const STOPPED_OFFLINE: &str =
    "The API server has been away for too long: the pod is stopped until the API server shows it again.";

impl PodKill {
    /// Stops a pod until the API server has shown it again (`--offline-stop-after`). It does not fail.
    #[must_use]
    pub fn until_server_is_back() -> PodKill {
        let failure = Failure {
            reason: reasons::STOPPED_OFFLINE,
            message: STOPPED_OFFLINE.to_owned(),
            disrupts: false,
        };
        PodKill { grace_override: None, failure: Some(failure) }
    }
}

/// The reason and message that a pod fails with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// CamelCase reason.
    pub reason: &'static str,
    /// A message for users.
    pub message: String,
    /// Whether the pod gets the condition `DisruptionTarget`.
    pub disrupts: bool,
}

impl Failure {
    /// Whether the pod has to make room, or ends with the machine.
    pub(super) fn is_for_node(&self) -> bool {
        [reasons::EVICTED, reasons::PREEMPTING, plan::shutdown::REASON].contains(&self.reason)
    }

    /// Whether the node refused the pod, which then stays so, whatever is ordered while it stops.
    fn is_refusal(&self) -> bool {
        !self.is_for_node() && self.reason != reasons::STOPPED_OFFLINE
    }

    /// Shows it in the status of the pod. One that has succeeded, before the order or because its containers
    /// then exited with 0, has not failed; the condition shows why it ended.
    pub(super) fn show(&self, pod: &Pod, status: &mut PodStatus, now: Timestamp) {
        if status.phase.as_deref() != Some("Succeeded") {
            status.phase = Some("Failed".to_owned());
            status.reason = Some(self.reason.to_owned());
            status.message = Some(self.message.clone());
        }
        if self.disrupts {
            let message = match self.reason {
                reasons::PREEMPTING => super::admission::PREEMPTED_CONDITION,
                _ => &self.message,
            };
            status::disrupt(pod, status, message, now);
        }
    }
}

/// What `sync` puts into a worker's mailbox.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Update {
    /// The newest version of the pod, if it changed.
    pub pod: Option<Pod>,
    /// The order to stop the pod, if there is one.
    pub kill: Option<PodKill>,
}

impl Update {
    /// Merge rule of the mailbox: the newest pod counts, a kill is never lost, grace only shrinks. A
    /// version that had to end is such a kill, because its worker was interrupted.
    pub fn merge(&mut self, newer: Update) {
        if let Some(pod) = newer.pod {
            let runs = !must_end(&pod);
            let old = self.pod.replace(pod);
            if let Some(old) = old.filter(|old| runs && must_end(old)) {
                let grace = old.object().metadata.deletion_grace_period_seconds;
                let kill = Update { pod: None, kill: Some(PodKill { grace_override: grace, failure: None }) };
                self.merge(kill);
            }
        }
        match (&mut self.kill, newer.kill) {
            (Some(old), Some(new)) => {
                old.grace_override = match (old.grace_override, new.grace_override) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
                if new.failure.is_some() {
                    old.failure = new.failure;
                }
            }
            (slot @ None, new) => *slot = new,
            (Some(_), None) => {}
        }
    }
}

/// The phase of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Phase {
    /// The pod's containers should be in the state that the manifest describes.
    #[default]
    Syncing,
    /// The pod's containers are being stopped.
    Terminating {
        /// Seconds between SIGTERM and SIGKILL; at least one.
        grace_seconds: i64,
        /// Why the pod fails, for example after an eviction.
        failure: Option<Failure>,
    },
    /// All containers have stopped; the pod's resources are being cleaned up.
    Terminated,
    /// The clean-up is complete. The worker ends.
    Finished,
}

/// A pod and its phase.
#[derive(Debug, Clone, PartialEq)]
pub struct Lifecycle {
    /// The newest version of the pod.
    pub pod: Pod,
    /// The phase of the pod.
    pub phase: Phase,
}

impl Lifecycle {
    /// A pod that is to run, unless it is being deleted or has ended.
    #[must_use]
    pub fn new(pod: Pod) -> Self {
        let mut life = Lifecycle { pod, phase: Phase::Syncing };
        life.notice_end();
        life
    }

    /// Applies an update.
    pub fn apply(&mut self, update: Update) {
        if let Some(pod) = update.pod {
            self.pod = pod;
        }
        match (&mut self.phase, update.kill) {
            (Phase::Syncing, Some(kill)) => {
                self.phase = Phase::Terminating {
                    grace_seconds: grace(None, &self.pod, kill.grace_override),
                    failure: kill.failure,
                };
            }
            (Phase::Terminating { grace_seconds, failure }, Some(kill)) => {
                *grace_seconds = grace(Some(*grace_seconds), &self.pod, kill.grace_override);
                if kill.failure.is_some() && !failure.as_ref().is_some_and(Failure::is_refusal) {
                    *failure = kill.failure;
                }
            }
            // A second deletion may shorten the grace period.
            (Phase::Terminating { grace_seconds, .. }, None) => {
                *grace_seconds = grace(Some(*grace_seconds), &self.pod, None);
            }
            _ => self.notice_end(),
        }
    }

    /// The containers have ended by themselves and are not restarted.
    pub fn completed(&mut self) {
        if self.phase == Phase::Syncing {
            self.phase = Phase::Terminating { grace_seconds: grace(None, &self.pod, None), failure: None };
        }
    }

    /// An API pod that is being deleted, or has ended, must not run.
    fn notice_end(&mut self) {
        if self.phase == Phase::Syncing && must_end(&self.pod) {
            self.phase = Phase::Terminating { grace_seconds: grace(None, &self.pod, None), failure: None };
        }
    }
}

/// Whether the API server says that a pod must not run: it is being deleted, or has a terminal phase.
#[must_use]
pub fn must_end(pod: &Pod) -> bool {
    pod.is_deleting() || pod.is_over()
}

/// The effective grace period in seconds: it only ever shrinks and is at least one.
fn grace(stored: Option<i64>, pod: &Pod, grace_override: Option<i64>) -> i64 {
    let deletion = pod.object().metadata.deletion_grace_period_seconds;
    let mut seconds = stored;
    for candidate in [deletion, grace_override].into_iter().flatten() {
        seconds = Some(seconds.map_or(candidate, |now| now.min(candidate)));
    }
    seconds.unwrap_or_else(|| pod.grace_seconds()).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(metadata: serde_json::Value, source: &str) -> Pod {
        let mut object: crate::model::api::Pod = serde_json::from_value(json!({
            "metadata": metadata, "spec": {"containers": [], "terminationGracePeriodSeconds": 30}
        }))
        .unwrap();
        object
            .metadata
            .annotations
            .get_or_insert_default()
            .insert(crate::model::pod::CONFIG_SOURCE.into(), source.into());
        Pod::from(object)
    }

    #[test]
    fn refusal_stays_and_any_other_failure_gives_way_to_a_later_one() {
        let failure = |reason| Failure { reason, message: String::new(), disrupts: false };
        let reason_after = |orders: &[&'static str]| {
            let mut life = Lifecycle::new(pod(json!({}), "api"));
            for reason in orders {
                let kill = PodKill { grace_override: None, failure: Some(failure(reason)) };
                life.apply(Update { pod: None, kill: Some(kill) });
            }
            let Phase::Terminating { failure: Some(failure), .. } = life.phase else { panic!("{life:?}") };
            (failure.reason, failure.is_for_node())
        };
        let (evicted, shutdown) = (reasons::EVICTED, plan::shutdown::REASON);
        assert_eq!(reason_after(&[evicted, shutdown]), (shutdown, true));
        assert_eq!(reason_after(&[reasons::STOPPED_OFFLINE, evicted]), (evicted, true));
        let refused = reasons::UNEXPECTED_ADMISSION_ERROR;
        assert_eq!(reason_after(&[evicted, refused]), (refused, false));
        assert_eq!(reason_after(&[refused, evicted, shutdown]), (refused, false));
    }

    #[test]
    fn pod_that_has_succeeded_shows_only_the_condition_of_its_failure() {
        let pod = pod(json!({"generation": 2}), "api");
        let shown = |phase: &str, reason: &'static str, disrupts: bool| {
            let failure = Failure { reason, message: "no memory".to_owned(), disrupts };
            let mut status = PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() };
            failure.show(&pod, &mut status, Timestamp::UNIX_EPOCH);
            let conditions = status.conditions.unwrap_or_default();
            let words = conditions.iter().map(|condition| {
                format!("{}: {}", condition.type_, condition.message.as_deref().unwrap_or_default())
            });
            let texts = [status.phase, status.reason, status.message].map(Option::unwrap_or_default);
            format!("{} | {}", texts.join(" "), words.collect::<String>())
        };
        let running = shown("Running", reasons::EVICTED, true);
        assert_eq!(running, "Failed Evicted no memory | DisruptionTarget: no memory");
        let succeeded = shown("Succeeded", reasons::EVICTED, true);
        assert_eq!(succeeded, "Succeeded   | DisruptionTarget: no memory");
        assert_eq!(shown("Succeeded", reasons::EVICTED, false), "Succeeded   | ");
        let preempted = "Failed Preempting no memory | DisruptionTarget: ".to_owned();
        assert_eq!(
            shown("Pending", reasons::PREEMPTING, true),
            preempted + crate::pods::admission::PREEMPTED_CONDITION
        );
    }

    fn kill(seconds: Option<i64>) -> Update {
        Update { pod: None, kill: Some(PodKill { grace_override: seconds, failure: None }) }
    }

    fn grace_of(life: &Lifecycle) -> i64 {
        match life.phase {
            Phase::Terminating { grace_seconds, .. } => grace_seconds,
            _ => panic!("not terminating: {:?}", life.phase),
        }
    }

    #[test]
    fn grace_period_never_grows_and_is_at_least_one_second() {
        let mut life = Lifecycle::new(pod(json!({}), "file"));
        life.apply(kill(None));
        assert_eq!(grace_of(&life), 30);
        life.apply(kill(Some(60)));
        assert_eq!(grace_of(&life), 30);
        life.apply(kill(Some(0)));
        assert_eq!(grace_of(&life), 1);
    }

    #[test]
    fn deleted_pod_terminates_with_its_deletion_grace_period() {
        let deleting =
            pod(json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 7}), "api");
        let mut life = Lifecycle::new(pod(json!({}), "api"));
        assert_eq!(life.phase, Phase::Syncing);
        life.apply(Update { pod: Some(deleting), kill: None });
        assert_eq!(grace_of(&life), 7);
    }

    #[test]
    fn second_deletion_only_shortens_the_grace_period_of_a_terminating_pod() {
        let deleted = |seconds: i64| {
            let metadata =
                json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": seconds});
            Update { pod: Some(pod(metadata, "api")), kill: None }
        };
        let mut life = Lifecycle::new(pod(json!({}), "api"));
        life.apply(kill(Some(20)));
        for (seconds, expected) in [(3600, 20), (5, 5), (10, 5), (0, 1)] {
            life.apply(deleted(seconds));
            assert_eq!(grace_of(&life), expected);
        }
    }

    #[test]
    fn terminated_pod_does_not_return_to_an_earlier_phase() {
        let mut life = Lifecycle::new(pod(json!({}), "file"));
        life.completed();
        life.phase = Phase::Terminated;
        life.apply(kill(Some(1)));
        life.completed();
        assert_eq!(life.phase, Phase::Terminated);
    }

    #[test]
    fn pod_that_had_to_end_does_not_run_again_in_a_newer_version() {
        let deleting =
            pod(json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 7}), "api");
        let mut waiting = Update { pod: Some(deleting), kill: None };
        waiting.merge(Update { pod: Some(pod(json!({"name": "new"}), "api")), kill: None });
        let mut life = Lifecycle::new(pod(json!({}), "api"));
        life.apply(waiting);
        assert_eq!((grace_of(&life), life.pod.name()), (7, "new"));
    }

    #[test]
    fn merged_updates_keep_the_kill_and_the_shortest_grace_period() {
        let mut waiting = kill(Some(10));
        waiting.merge(Update { pod: Some(pod(json!({"name": "new"}), "file")), kill: None });
        waiting.merge(kill(Some(3)));
        waiting.merge(kill(None));
        assert_eq!(waiting.kill.unwrap().grace_override, Some(3));
        assert_eq!(waiting.pod.unwrap().name(), "new");
    }
}
