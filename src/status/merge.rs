//! The status that the API server should show of a pod: ours, with the fields of other writers as
//! the server has them (pure; Go: mergePodStatus).

use jiff::Timestamp;

use crate::model::api::{PodCondition, PodStatus};
use crate::model::meta::Time;
use crate::model::reasons;

use super::condition_types::{DISRUPTION_TARGET, OWNED_CONDITIONS};
use super::conditions;
use super::phase::is_terminal;

/// Whether containers of the pod may still run on this node, or its resource claims are prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Containers of the pod may run, or its claims are prepared.
    MayRun,
    /// All containers have stopped, and none will start again. No claim is prepared for the pod.
    Stopped,
}

/// A status for the API server.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Merged {
    /// The status that it should show.
    pub status: PodStatus,
    /// The end of the pod is not reported yet, because its containers may still run.
    pub withheld: bool,
}

/// Merges our status `ours` with `shown`, which the API server has.
/// DIFFERS: a start time that the server has stays. The Go kubelet has it in its cache; here a
/// static pod may have another start time after a restart of the agent.
#[must_use]
pub(super) fn merge(shown: &PodStatus, ours: &PodStatus, activity: Activity, now: Timestamp) -> Merged {
    let ends = is_terminal(ours.phase.as_deref()) && !is_terminal(shown.phase.as_deref());
    let withheld = ends && activity == Activity::MayRun;
    let mut status = PodStatus {
        start_time: shown.start_time.clone().or_else(|| ours.start_time.clone()),
        resource_claim_statuses: shown.resource_claim_statuses.clone(),
        extended_resource_claim_status: shown.extended_resource_claim_status.clone(),
        node_allocatable_resource_claim_statuses: shown.node_allocatable_resource_claim_statuses.clone(),
        conditions: None,
        ..ours.clone()
    };
    if withheld {
        keep_phase(shown, &mut status);
    }
    let mut list = merge_conditions(shown, ours, ends && !withheld);
    if is_terminal(status.phase.as_deref()) {
        end_readiness(&mut list, shown, status.phase.as_deref(), now);
    }
    status.conditions = (!list.is_empty()).then_some(list);
    Merged { status, withheld }
}

/// Keeps the times of conditions whose status the server shows already: those of a static pod
/// begin at the start of the agent, because the node does not store them.
///
/// DIFFERS: the Go kubelet starts from the mirror's status when it composes one.
pub(super) fn keep_times(shown: &PodStatus, status: &mut PodStatus) {
    for condition in status.conditions.iter_mut().flatten() {
        let before = conditions::find(shown.conditions.as_deref(), &condition.type_);
        if let Some(before) = before.filter(|before| before.status == condition.status)
            && before.last_transition_time.is_some()
        {
            condition.last_transition_time.clone_from(&before.last_transition_time);
        }
    }
}

/// A terminal phase that the server shows stays, with its reason, message and conditions: controllers have counted
/// it. After a power cut the status stored on the disk may be older than the one that the server has.
///
/// DIFFERS: the Go kubelet writes its own phase again over another terminal one of a pod that has ended.
pub(super) fn keep_end(shown: &PodStatus, status: &mut PodStatus) {
    let has_ended = |status: &PodStatus| is_terminal(status.phase.as_deref());
    if has_ended(shown) && has_ended(status) && shown.phase != status.phase {
        keep_phase(shown, status);
        status.conditions.clone_from(&shown.conditions);
    }
}

fn keep_phase(shown: &PodStatus, status: &mut PodStatus) {
    status.phase.clone_from(&shown.phase);
    status.reason.clone_from(&shown.reason);
    status.message.clone_from(&shown.message);
}

/// Conditions of other writers as the server has them, then ours. The condition that both write
/// is sent once, with the end of the pod.
fn merge_conditions(shown: &PodStatus, ours: &PodStatus, ends: bool) -> Vec<PodCondition> {
    let owned = |condition: &&PodCondition| OWNED_CONDITIONS.contains(&condition.type_.as_str());
    let mut list: Vec<PodCondition> =
        shown.conditions.iter().flatten().filter(|condition| !owned(condition)).cloned().collect();
    let disrupted = conditions::find(ours.conditions.as_deref(), DISRUPTION_TARGET);
    if let Some(disrupted) = disrupted.filter(|_| ends) {
        match list.iter_mut().find(|condition| condition.type_ == DISRUPTION_TARGET) {
            Some(present) => present.clone_from(disrupted),
            None => list.push(disrupted.clone()),
        }
    }
    list.extend(ours.conditions.iter().flatten().filter(owned).cloned());
    list
}

/// A pod that has ended is not ready, whatever its status was when its end was decided.
fn end_readiness(list: &mut [PodCondition], shown: &PodStatus, phase: Option<&str>, now: Timestamp) {
    let reason = if phase == Some("Succeeded") { reasons::POD_COMPLETED } else { reasons::POD_FAILED };
    for kind in ["Ready", "ContainersReady"] {
        let Some(condition) =
            list.iter_mut().find(|condition| condition.type_ == kind && condition.status == "True")
        else {
            continue;
        };
        condition.status = "False".to_owned();
        condition.reason = Some(reason.to_owned());
        condition.message = None;
        // The server already shows it as not ready: that time stays.
        condition.last_transition_time = conditions::find(shown.conditions.as_deref(), kind)
            .filter(|before| before.status == "False")
            .and_then(|before| before.last_transition_time.clone())
            .or_else(|| Timestamp::from_second(now.as_second()).ok().map(Time));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn status(value: Value) -> PodStatus {
        serde_json::from_value(value).unwrap()
    }

    fn check(shown: Value, ours: Value, activity: Activity, expected: Value) {
        let now = Timestamp::from_second(9).unwrap();
        let merged = merge(&status(shown.clone()), &status(ours.clone()), activity, now);
        let status = serde_json::to_value(&merged.status).unwrap();
        assert_eq!(status, expected, "{shown} {ours}");
    }

    fn condition(kind: &str, status: &str) -> Value {
        json!({"type": kind, "status": status})
    }

    #[test]
    fn conditions_of_other_writers_stay_and_ours_replace_old_ones() {
        check(
            json!({"phase": "Running", "nominatedNodeName": "n", "startTime": "1970-01-01T00:00:01Z",
                "resourceClaimStatuses": [{"name": "c"}],
                "conditions": [condition("Ready", "False"), condition("x/y", "False"),
                    condition("PodResizePending", "True")]}),
            json!({"phase": "Running", "startTime": "1970-01-01T00:00:02Z",
                "conditions": [condition("x/y", "True"), condition("Ready", "True"),
                    condition("PodScheduled", "True")]}),
            Activity::MayRun,
            json!({"phase": "Running", "startTime": "1970-01-01T00:00:01Z",
                "resourceClaimStatuses": [{"name": "c"}],
                "conditions": [condition("x/y", "False"), condition("Ready", "True"),
                    condition("PodScheduled", "True")]}),
        );
        check(
            json!({}),
            json!({"startTime": "1970-01-01T00:00:02Z"}),
            Activity::MayRun,
            json!({"startTime": "1970-01-01T00:00:02Z"}),
        );
    }

    #[test]
    fn transition_time_at_the_server_stays_while_the_status_does() {
        let ready_at = |status: &str, second: u8| {
            let time = format!("1970-01-01T00:00:0{second}Z");
            json!({"conditions": [{"type": "Ready", "status": status, "lastTransitionTime": time}]})
        };
        for (shown, ours, expected) in [
            (ready_at("True", 1), ready_at("True", 2), ready_at("True", 1)),
            (ready_at("False", 1), ready_at("True", 2), ready_at("True", 2)),
            (json!({}), ready_at("True", 2), ready_at("True", 2)),
        ] {
            let mut ours = status(ours);
            keep_times(&status(shown), &mut ours);
            assert_eq!(ours, status(expected));
        }
    }

    #[test]
    fn end_that_the_server_shows_stays_with_its_reason() {
        let ready = |reason: &str| json!([{"type": "Ready", "status": "False", "reason": reason}]);
        let failed = json!({"phase": "Failed", "reason": "Evicted", "message": "m",
            "conditions": ready("PodFailed")});
        let succeeded = json!({"phase": "Succeeded", "conditions": ready("PodCompleted")});
        let running = json!({"phase": "Running"});
        let failed_again = json!({"phase": "Failed", "reason": "Error"});
        for (shown, ours, expected) in [
            (&failed, &succeeded, &failed),
            (&succeeded, &failed, &succeeded),
            (&failed, &failed_again, &failed_again),
            (&running, &succeeded, &succeeded),
            (&failed, &running, &running),
        ] {
            let mut ours = status(ours.clone());
            keep_end(&status(shown.clone()), &mut ours);
            assert_eq!(ours, status(expected.clone()), "{shown}");
        }
    }

    #[test]
    fn terminal_phase_is_reported_once_no_container_runs() {
        let shown = json!({"phase": "Running", "conditions": [condition("Ready", "True")]});
        let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "m", "conditions": [
            condition("DisruptionTarget", "True"), condition("Ready", "True"),
            condition("ContainersReady", "False")]});
        check(
            shown.clone(),
            evicted.clone(),
            Activity::MayRun,
            json!({"phase": "Running",
            "conditions": [condition("Ready", "True"), condition("ContainersReady", "False")]}),
        );
        let reported = json!({"phase": "Failed", "reason": "Evicted", "message": "m", "conditions": [
            condition("DisruptionTarget", "True"),
            {"type": "Ready", "status": "False", "reason": "PodFailed",
                "lastTransitionTime": "1970-01-01T00:00:09Z"},
            condition("ContainersReady", "False")]});
        check(shown, evicted.clone(), Activity::Stopped, reported.clone());
        // After the end is reported, nothing changes any more, not even a time.
        let mut again = reported;
        again["conditions"][1]["lastTransitionTime"] = json!("1970-01-01T00:00:05Z");
        check(again.clone(), evicted, Activity::MayRun, again);
        // The reason shows how it ended.
        check(
            json!({"phase": "Running"}),
            json!({"phase": "Succeeded", "conditions": [condition("ContainersReady", "True")]}),
            Activity::Stopped,
            json!({"phase": "Succeeded", "conditions": [{"type": "ContainersReady", "status": "False",
                "reason": "PodCompleted", "lastTransitionTime": "1970-01-01T00:00:09Z"}]}),
        );
    }
}
