//! The restart of all containers in the same sandbox, because one of them ended and its restart
//! rules require it.

use crate::model::api::Container;
use crate::model::ids::ContainerId;
use crate::model::pod::Pod;
use crate::model::restart;
use crate::model::runtime::{ContainerState, PodRuntime};

/// One instance to remove from the runtime; its log files stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reset {
    /// The instance to remove.
    pub id: ContainerId,
    /// The container's name in the pod.
    pub name: String,
    /// Whether the instance has to be stopped first.
    pub stop: bool,
    /// Whether the container requested the restart of all.
    pub trigger: bool,
}

/// Every instance of every container: first those of the other containers, regular before init
/// containers, then those of the containers that requested the restart. The restart is complete
/// when these are removed. Empty if no container requests it.
pub(super) fn compute(pod: &Pod, runtime: &PodRuntime) -> Vec<Reset> {
    if !restart::all_containers_restart(pod, runtime) {
        return Vec::new();
    }
    let mut reset = Vec::new();
    for trigger in [false, true] {
        for list in [pod.containers(), pod.init_containers()] {
            let wanted = |container: &&Container| {
                restart::requests_restart_of_all(container, runtime.newest(&container.name)) == trigger
            };
            for container in list.iter().filter(wanted) {
                // The newest instance shows the request, so it is removed last.
                let instances =
                    runtime.containers.iter().rev().filter(|instance| instance.name == container.name);
                reset.extend(instances.map(|instance| Reset {
                    id: instance.id.clone(),
                    name: container.name.clone(),
                    stop: matches!(instance.state, ContainerState::Running | ContainerState::Unknown),
                    trigger,
                }));
            }
        }
    }
    reset
}

#[cfg(test)]
mod tests {
    use super::super::tests::{plans, pod, ready, render};
    use super::super::{Inputs, compute};
    use crate::model::ids::ContainerId;
    use crate::model::verdict::ProbeVerdict;
    use crate::util::testing::table;
    use expect_test::expect;
    use serde_json::{Value, json};

    fn spec() -> Value {
        let rules = json!([
            {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
        json!({"restartPolicy": "Never",
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}, {"name": "b", "restartPolicy": "Never", "restartPolicyRules": rules},
                {"name": "c"}]})
    }

    #[test]
    fn restart_of_all_containers_removes_the_trigger_last() {
        plans(&spec()).check(expect![[r#"
            i=Exited s=Running a=Running b=Exited:42 c=Exited:1          -> stop and remove a, remove c, remove i, stop and remove s, remove b (trigger)
            # After an interruption the remaining instances are removed.
            s=Running b=Exited:42                                        -> stop and remove s, remove b (trigger)
            b=Exited:42                                                  -> remove b (trigger)
            # When all are removed, the first init container starts.
            none                                                         -> start i
            # Another exit code does not match; only the newest instance counts.
            i=Exited s=Running a=Running b=Exited:1 c=Running            -> nothing
            i=Exited s=Running a=Running b=Running b=Exited:42 c=Running -> nothing
            # Dead instances of earlier runs are removed, too: none may count for the new run.
            b=Exited:42 b=Exited:42 i=Exited i=Exited:1                  -> remove i, remove i, remove b (trigger), remove b (trigger)
        "#]]);
    }

    #[test]
    fn all_containers_are_reset_although_the_sandbox_is_dead() {
        plans(&spec()).check(expect![[r#"
            sandbox=NotReady a=Exited b=Exited:42 -> remove a, remove b (trigger)
        "#]]);
    }

    #[test]
    fn other_containers_are_synced_while_the_reset_waits() {
        let waiting = |spec: Value, case: &str| {
            let (pod, runtime) = (pod(spec), ready(case));
            let failed = |id: &ContainerId| {
                if *id == "a".into() { ProbeVerdict::Failure } else { ProbeVerdict::Success }
            };
            let inputs =
                Inputs { reset_held: true, liveness: &failed, ..Inputs::without_probes(&pod, &runtime) };
            render(&pod, &compute(&inputs))
        };
        let mut always = spec();
        always["restartPolicy"] = json!("Always");
        table(|case| waiting(always.clone(), case)).check(expect![[r#"
            i=Exited s=Running a=Exited b=Exited:42 c=Running  -> start a
            i=Exited s=Running a=Running b=Exited:42 c=Running -> stop a (LivenessProbe), start a
            i=Exited s=Exited a=Created b=Exited:42 c=Running  -> start s, start a
            i=Exited s=Running c=Running b=Exited:42           -> start a
            i=Exited s=Running a=Exited b=Exited:1 c=Running   -> start a
        "#]]);
        table(|case| waiting(spec(), case)).check(expect![[r#"
            # The pod has not ended, even if all other containers have.
            i=Exited s=Running a=Exited b=Exited:42 c=Exited -> nothing
            # With a dead sandbox the reset does not wait.
            sandbox=NotReady a=Exited b=Exited:42            -> remove a, remove b (trigger)
        "#]]);
    }

    #[test]
    fn nothing_starts_while_a_reset_by_an_init_container_waits() {
        let rules = json!([
            {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
        let requests_reset = |name: &str, policy: &str| json!({"name": name, "restartPolicy": policy, "restartPolicyRules": rules});
        for (init, instances) in [
            (requests_reset("i", "Never"), "i=Exited:42"),
            (requests_reset("s", "Always"), "s=Exited:42"),
            (requests_reset("s", "Always"), "s=Exited:42 c=Running"),
        ] {
            let pod = pod(json!({"initContainers": [init], "containers": [{"name": "c"}]}));
            let runtime = ready(instances);
            let inputs = Inputs { reset_held: true, ..Inputs::without_probes(&pod, &runtime) };
            assert_eq!(render(&pod, &compute(&inputs)), "nothing", "{instances}");
        }
    }
}
