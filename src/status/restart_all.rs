//! How a status shows a restart of all containers in place: a condition of the pod, and the states
//! of removed containers.

use crate::model::api::{
    Container, ContainerState, ContainerStateTerminated, ContainerStatus, PodCondition, PodStatus,
};
use crate::model::meta::Time;
use crate::model::{reasons, restart};

use super::conditions::holds_before;
use super::containers::{UNKNOWN_EXIT, waiting};
use super::inputs::Inputs;

/// The type of the condition. Only pods with a container that may restart all of them have it.
const CONDITION: &str = "AllContainersRestarting";

const REMOVED: &str = "The container is removed because RestartAllContainers in place";

/// The condition: true from the end of the container that requests the restart until every
/// container is removed.
pub(super) fn condition(inputs: &Inputs, status: &PodStatus) -> Option<PodCondition> {
    if !restart::may_restart_all(inputs.pod) {
        return None;
    }
    let end_reason = match status.phase.as_deref() {
        Some("Succeeded") => Some(reasons::POD_COMPLETED),
        Some("Failed") => Some(reasons::POD_FAILED),
        _ => None,
    };
    let mut instances = inputs.pod.all_containers().map(|container| inputs.runtime.newest(&container.name));
    let is_restarting =
        end_reason.is_none() && is_in_progress(inputs) && instances.any(|newest| newest.is_some());
    Some(PodCondition {
        type_: CONDITION.to_owned(),
        status: if is_restarting { "True" } else { "False" }.to_owned(),
        reason: is_restarting
            .then_some(reasons::RESTART_ALL_CONTAINERS_STARTED)
            .or(end_reason)
            .map(str::to_owned),
        message: is_restarting.then(|| "container exited with restart policy rule".to_owned()),
        last_transition_time: Some(Time(inputs.now)),
        ..PodCondition::default()
    })
}

/// Whether all containers are being removed: one of them requests it and does not wait (a wait is
/// shown as a failure), or the removal has begun already.
///
/// DIFFERS: false for a pod that is being deleted, because no container starts again.
pub(super) fn is_in_progress(inputs: &Inputs) -> bool {
    let requests_restart = |container: &Container| {
        restart::requests_restart_of_all(container, inputs.runtime.newest(&container.name))
            && (inputs.failures)(&container.name).is_none()
    };
    restart::may_restart_all(inputs.pod)
        && !inputs.is_deleting()
        && (holds_before(inputs, CONDITION) || inputs.pod.all_containers().any(requests_restart))
}

/// Shows the removal of a container in its status.
pub(super) fn show_removed(status: &mut ContainerStatus, old: &ContainerStatus) {
    let terminated = ContainerStateTerminated {
        exit_code: UNKNOWN_EXIT,
        reason: Some(reasons::RESTARTING_ALL_CONTAINERS.to_owned()),
        message: Some(REMOVED.to_owned()),
        ..ContainerStateTerminated::default()
    };
    status.state = Some(waiting(Some(reasons::RESTARTING_ALL_CONTAINERS), Some(REMOVED.to_owned())));
    status.last_state = Some(ContainerState { terminated: Some(terminated), ..ContainerState::default() });
    status.restart_count = old.restart_count.saturating_add(1);
}

/// The state that a removed container keeps until it is made again.
///
/// DIFFERS: upstream shows this state once, and then that the container is being created.
pub(super) fn removed_state(old: &ContainerStatus) -> Option<&ContainerState> {
    let state = old.state.as_ref()?;
    let reason = state.waiting.as_ref()?.reason.as_deref();
    (reason == Some(reasons::RESTARTING_ALL_CONTAINERS)).then_some(state)
}

/// The last state of a container that was made again after its removal, until it ends again: the
/// runtime has no record of the earlier instance.
pub(super) fn state_before_removal(
    old: Option<&ContainerStatus>,
    status: &ContainerStatus,
) -> Option<ContainerState> {
    let same = |old: &&ContainerStatus| old.container_id.is_none() || old.container_id == status.container_id;
    let last = old.filter(same)?.last_state.as_ref()?;
    let reason = last.terminated.as_ref()?.reason.as_deref();
    (reason == Some(reasons::RESTARTING_ALL_CONTAINERS)).then(|| last.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::api;
    use crate::model::pod::Pod;
    use crate::model::runtime::{ContainerState as RuntimeState, ContainerStatus as Instance, PodRuntime};
    use crate::status::tests::{instance, timestamp};
    use crate::status::{NodeAddresses, StartReason, StatusCache, compose};
    use serde_json::{Value, json};

    /// In this pod `trigger` restarts all with exit code 42; other containers do not restart.
    fn pod(action: &str) -> Pod {
        let rules = json!([{"action": action, "exitCodes": {"operator": "In", "values": [42]}}]);
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "generation": 3},
            "spec": {"restartPolicy": "Never", "initContainers": [{"name": "init"}],
                "containers": [{"name": "main"},
                    {"name": "trigger", "restartPolicy": "Never", "restartPolicyRules": rules}]}});
        Pod::from(serde_json::from_value::<api::Pod>(object).unwrap())
    }

    /// The statuses of a pod in the order in which its worker stores them.
    struct Fixture {
        pod: Pod,
        cache: StatusCache,
        round: u32,
    }

    impl Fixture {
        fn new(pod: Pod) -> Self {
            Fixture { pod, cache: StatusCache::default(), round: 0 }
        }

        fn sees(&mut self, instances: Vec<Instance>, failure: Option<&'static str>, deleting: bool) -> Value {
            let runtime = PodRuntime { containers: instances, ..PodRuntime::default() };
            let failures = |name: &str| {
                let reason = failure.filter(|_| name == "trigger")?;
                Some(StartReason { reason, message: "later".to_owned() })
            };
            let (old, node) = (self.cache.get(self.pod.uid()), NodeAddresses::default());
            self.round += 1;
            let now = timestamp(200 + i64::from(self.round));
            let composed = compose(&Inputs {
                old: old.as_deref(),
                failures: &failures,
                deleting,
                ..Inputs::new(&self.pod, &runtime, &node, now)
            });
            self.cache.set(&self.pod, composed, now);
            serde_json::to_value(&*self.cache.get(self.pod.uid()).unwrap()).unwrap()
        }
    }

    /// `init=Exited trigger=Exited:42`, with ids that contain the number of the run.
    fn run(number: u32, text: &str) -> Vec<Instance> {
        let parse = |word: &str| {
            let (word, code) = word.split_once(':').unwrap_or((word, "0"));
            let (name, state) = word.split_once('=').unwrap();
            let state = if state == "Running" { RuntimeState::Running } else { RuntimeState::Exited };
            Instance {
                id: format!("{name}/{number}").as_str().into(),
                exit_code: code.parse().unwrap(),
                restart_count: number,
                ..instance(name, state)
            }
        };
        text.split_whitespace().map(parse).collect()
    }

    fn condition_of<'a>(status: &'a Value, kind: &str) -> &'a Value {
        let conditions = status["conditions"].as_array().unwrap();
        conditions.iter().find(|condition| condition["type"] == kind).unwrap_or(&Value::Null)
    }

    fn container<'a>(status: &'a Value, name: &str) -> &'a Value {
        let lists = ["initContainerStatuses", "containerStatuses"];
        let all = lists.into_iter().flat_map(|list| status[list].as_array().unwrap());
        all.into_iter().find(|shown| shown["name"] == name).unwrap()
    }

    #[test]
    fn restart_is_shown_from_the_first_end_to_the_new_start() {
        let mut fixture = Fixture::new(pod("RestartAllContainers"));
        let begun = fixture.sees(run(0, "init=Exited main=Running trigger=Running"), None, false);
        assert_eq!(begun["phase"], "Running");
        assert_eq!(condition_of(&begun, CONDITION)["status"], "False");
        assert_eq!(condition_of(&begun, CONDITION)["reason"], Value::Null);

        let requested = fixture.sees(run(0, "init=Exited main=Running trigger=Exited:42"), None, false);
        let mut condition = condition_of(&requested, CONDITION).clone();
        condition["lastTransitionTime"].take();
        assert_eq!(
            condition,
            json!({"type": CONDITION, "status": "True", "reason": "RestartAllContainersStarted",
                "message": "container exited with restart policy rule", "lastTransitionTime": null})
        );
        assert_eq!(
            container(&requested, "main")["state"]["running"],
            json!({"startedAt": "1970-01-01T00:01:41Z"})
        );
        assert_eq!(requested["phase"], "Running");

        // Half of the containers are removed.
        let half = fixture.sees(run(0, "trigger=Exited:42"), None, false);
        assert_eq!(condition_of(&half, CONDITION)["status"], "True");
        let waiting = json!({"waiting": {"reason": "RestartingAllContainers", "message": REMOVED}});
        let ended = json!({"terminated": {"exitCode": 137, "reason": "RestartingAllContainers",
            "message": REMOVED}});
        for name in ["init", "main"] {
            let shown = container(&half, name);
            assert_eq!((&shown["state"], &shown["lastState"]), (&waiting, &ended), "{name}");
            assert_eq!(shown["restartCount"], 1, "{name}");
        }

        // All are removed; the next inspections change only the condition.
        for round in 0..3 {
            let cleaned = fixture.sees(Vec::new(), None, false);
            assert_eq!(condition_of(&cleaned, CONDITION)["status"], "False");
            assert_eq!(condition_of(&cleaned, "Initialized")["status"], "True");
            assert_eq!(condition_of(&cleaned, "Ready")["status"], "False");
            assert_eq!(cleaned["phase"], "Running", "{round}");
            for name in ["init", "main", "trigger"] {
                let shown = container(&cleaned, name);
                assert_eq!((&shown["state"], &shown["lastState"]), (&waiting, &ended), "{name} {round}");
                assert_eq!(shown["restartCount"], 1, "{name} {round}");
            }
        }

        let again = fixture.sees(run(1, "init=Exited main=Running trigger=Running"), None, false);
        assert_eq!(again["phase"], "Running");
        for name in ["init", "main", "trigger"] {
            assert_eq!(container(&again, name)["lastState"], ended, "{name}");
            assert_eq!(container(&again, name)["restartCount"], 1, "{name}");
        }
        // A container that ends in the new run shows its new end.
        let over = fixture.sees(run(1, "init=Exited main=Exited trigger=Running"), None, false);
        assert_eq!(container(&over, "main")["state"]["terminated"]["exitCode"], 0);
    }

    #[test]
    fn condition_is_false_during_a_wait_a_deletion_and_without_the_rule() {
        let asks = || run(0, "init=Exited main=Running trigger=Exited:42");
        let mut fixture = Fixture::new(pod("RestartAllContainers"));
        let held = fixture.sees(asks(), Some("CrashLoopBackOff"), false);
        assert_eq!(condition_of(&held, CONDITION)["status"], "False");
        assert_eq!(container(&held, "trigger")["state"]["waiting"]["reason"], "CrashLoopBackOff");
        assert_eq!(container(&held, "trigger")["lastState"]["terminated"]["exitCode"], 42);
        let leaving = fixture.sees(asks(), None, true);
        assert_eq!(condition_of(&leaving, CONDITION)["status"], "False");
        let over = fixture.sees(run(0, "init=Exited main=Exited:1 trigger=Exited:1"), None, false);
        assert_eq!(
            (&over["phase"], &condition_of(&over, CONDITION)["reason"]),
            (&json!("Failed"), &json!("PodFailed"))
        );

        let mut other = Fixture::new(pod("Restart"));
        assert_eq!(*condition_of(&other.sees(asks(), None, false), CONDITION), Value::Null);
    }
}
