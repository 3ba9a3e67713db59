//! The order in which the pods of a node that shuts down are stopped (pure; Go:
//! pkg/kubelet/nodeshutdown). `sync::shutdown` carries it out.

use std::time::Duration;

use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::pods::lifecycle::PodKill;

/// From this priority on a pod is critical to its node or cluster.
const CRITICAL: i32 = 2_000_000_000;

/// The status of a pod that was stopped for a shutdown.
pub const REASON: &str = "Terminated";
/// See [`REASON`].
pub const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";

/// The pods of priority `from` and more, up to the next step, are stopped together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The lowest priority of the step's pods.
    pub from: i32,
    /// The time limit of the step.
    pub period: Duration,
}

/// Pods to stop at the same time, each with its grace period in seconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// How long to wait for the pods at most.
    pub period: Duration,
    /// The pods in the order of the input.
    pub pods: Vec<(PodUid, i64)>,
}

/// The steps for `shutdownGracePeriod` and `shutdownGracePeriodCriticalPods`: the
/// critical pods get the last part of the time. Empty if the pair is not usable.
#[must_use]
pub fn two_steps(all: Duration, critical: Duration) -> Vec<Step> {
    match all.checked_sub(critical) {
        Some(others) if !all.is_zero() => {
            vec![Step { from: 0, period: others }, Step { from: CRITICAL, period: critical }]
        }
        _ => Vec::new(),
    }
}

/// Whether a pod was, or is to be, stopped for a shutdown: by its status, or by an order that its
/// worker has received and not reported yet. The end of a pod that was evicted or preempted before is
/// not one: others may have its place.
pub fn is_end(reported: Option<&str>, order: Option<&PodKill>, is_evicted: bool) -> bool {
    let ordered = order.and_then(|kill| kill.failure.as_ref()).map(|failure| failure.reason);
    !is_evicted && reported.into_iter().chain(ordered).any(|reason| reason == REASON)
}

/// Sorts `pods` into the steps, lowest priority first. A pod below the lowest step belongs to that
/// step. Steps without pods are left out: they need no wait.
#[must_use]
pub fn groups<'a>(steps: &[Step], pods: impl IntoIterator<Item = &'a Pod>) -> Vec<Group> {
    let mut steps = steps.to_vec();
    steps.sort_by_key(|step| step.from);
    let mut groups: Vec<Group> =
        steps.iter().map(|step| Group { period: step.period, pods: Vec::new() }).collect();
    for pod in pods {
        let priority = pod.spec().priority.unwrap_or(0);
        let index = steps.iter().rposition(|step| step.from <= priority).unwrap_or(0);
        if let Some(group) = groups.get_mut(index) {
            let most = i64::try_from(group.period.as_secs()).unwrap_or(i64::MAX);
            let own = pod.spec().termination_grace_period_seconds.unwrap_or(most);
            group.pods.push((pod.uid().clone(), own.min(most)));
        }
    }
    groups.retain(|group| !group.pods.is_empty());
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, priority: Option<i32>, grace: i64) -> Pod {
        let object = json!({"metadata": {"uid": uid}, "spec": {"containers": [],
            "priority": priority, "terminationGracePeriodSeconds": grace}});
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    fn check(steps: &[(i32, u64)], pods: &[(&str, Option<i32>, i64)], expected: &[(u64, &str)]) {
        let steps: Vec<Step> = steps
            .iter()
            .map(|(from, seconds)| Step { from: *from, period: Duration::from_secs(*seconds) })
            .collect();
        let pods: Vec<Pod> = pods.iter().map(|(uid, priority, grace)| pod(uid, *priority, *grace)).collect();
        let found: Vec<(u64, String)> = groups(&steps, &pods)
            .into_iter()
            .map(|group| {
                let pods: Vec<_> = group.pods.iter().map(|(uid, grace)| format!("{uid}:{grace}")).collect();
                (group.period.as_secs(), pods.join(" "))
            })
            .collect();
        let expected: Vec<(u64, String)> =
            expected.iter().map(|(seconds, pods)| (*seconds, (*pods).to_owned())).collect();
        assert_eq!(found, expected, "{steps:?}");
    }

    #[test]
    fn pods_are_grouped_by_priority_and_grace_is_limited_by_group() {
        let steps = [(10, 5), (0, 20), (100, 7)];
        let pods = [
            ("none", None, 30),
            ("edge", Some(10), 3),
            ("between", Some(50), 5),
            ("top", Some(2_000_001_000), 30),
            ("below", Some(-5), 1),
        ];
        check(&steps, &pods, &[(20, "none:20 below:1"), (5, "edge:3 between:5"), (7, "top:7")]);
        // A step without pods takes no time.
        check(&steps, &[("top", Some(100), 30)], &[(7, "top:7")]);
        check(&[], &pods, &[]);
        check(&steps, &[], &[]);
    }

    #[test]
    fn end_by_shutdown_is_detected_from_the_order_or_the_status() {
        let order = |reason| {
            let failure = crate::pods::lifecycle::Failure { reason, message: String::new(), disrupts: true };
            PodKill { grace_override: Some(1), failure: Some(failure) }
        };
        let (shutdown, other, removal) = (order(REASON), order("Preempting"), PodKill::default());
        for (reported, order, expected) in [
            (None, None, false),
            (Some("Terminated"), None, true),
            // The worker has not reported its order yet.
            (None, Some(&shutdown), true),
            (Some("Evicted"), Some(&other), false),
            (None, Some(&removal), false),
        ] {
            assert_eq!(is_end(reported, order, false), expected, "{reported:?} {order:?}");
            assert!(!is_end(reported, order, true));
        }
    }

    #[test]
    fn valid_pair_of_grace_periods_becomes_two_steps() {
        let seconds = Duration::from_secs;
        assert_eq!(
            two_steps(seconds(30), seconds(10)),
            [Step { from: 0, period: seconds(20) }, Step { from: 2_000_000_000, period: seconds(10) }]
        );
        assert!(two_steps(seconds(0), seconds(0)).is_empty());
        assert!(two_steps(seconds(5), seconds(10)).is_empty());
    }
}
