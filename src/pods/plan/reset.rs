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
    use super::super::tests::{pod, ready, short};
    use super::super::{Inputs, compute};
    use crate::model::ids::ContainerId;
    use crate::model::runtime::{PodRuntime, SandboxState};
    use crate::model::verdict::Verdict;
    use serde_json::{Value, json};

    fn spec() -> Value {
        let rules = json!([
            {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
        json!({"restartPolicy": "Never",
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "a"}, {"name": "b", "restartPolicy": "Never", "restartPolicyRules": rules},
                {"name": "c"}]})
    }

    fn check(instances: &str, expected: &str) {
        let runtime = ready(instances);
        assert_eq!(short(&compute(&Inputs::without_probes(&pod(spec()), &runtime))), expected, "{instances}");
    }

    #[test]
    fn restart_of_all_containers_removes_the_trigger_last() {
        check("i=Exited s=Running a=Running b=Exited:42 c=Exited:1", "reset=[-a c i -s b!]");
        // After an interruption the remaining instances are removed.
        check("s=Running b=Exited:42", "reset=[-s b!]");
        check("b=Exited:42", "reset=[b!]");
        // When all are removed, the first init container starts.
        check("", "init=[0]");
        // Another exit code does not match; only the newest instance counts.
        check("i=Exited s=Running a=Running b=Exited:1 c=Running", "");
        check("i=Exited s=Running a=Running b=Running b=Exited:42 c=Running", "");
        // Dead instances of earlier runs are removed, too: none may count for the new run.
        check("b=Exited:42 b=Exited:42 i=Exited i=Exited:1", "reset=[i i b! b!]");
    }

    #[test]
    fn all_containers_are_reset_although_the_sandbox_is_dead() {
        let mut runtime = ready("a=Exited b=Exited:42");
        runtime.sandboxes[0].state = SandboxState::NotReady;
        let plan = compute(&Inputs::without_probes(&pod(spec()), &runtime));
        assert_eq!(short(&plan), "reset=[a b!]");
    }

    #[test]
    fn other_containers_are_synced_while_the_reset_waits() {
        let held = |spec: Value, runtime: &PodRuntime| {
            let pod = pod(spec);
            let failed = |id: &ContainerId| {
                if *id == "a".into() { Verdict::Failure } else { Verdict::Success }
            };
            short(&compute(&Inputs {
                reset_held: true,
                liveness: &failed,
                ..Inputs::without_probes(&pod, runtime)
            }))
        };
        let mut always = spec();
        always["restartPolicy"] = json!("Always");
        for (instances, expected) in [
            ("i=Exited s=Running a=Exited b=Exited:42 c=Running", "start=[0]"),
            ("i=Exited s=Running a=Running b=Exited:42 c=Running", "kill=[a:LivenessProbe] start=[0]"),
            ("i=Exited s=Exited a=Created b=Exited:42 c=Running", "init=[1] start=[0]"),
            ("i=Exited s=Running c=Running b=Exited:42", "start=[0]"),
            ("i=Exited s=Running a=Exited b=Exited:1 c=Running", "start=[0]"),
        ] {
            assert_eq!(held(always.clone(), &ready(instances)), expected, "{instances}");
        }
        // The pod has not ended, even if all other containers have.
        assert_eq!(held(spec(), &ready("i=Exited s=Running a=Exited b=Exited:42 c=Exited")), "");
        // With a dead sandbox the reset does not wait.
        let mut runtime = ready("a=Exited b=Exited:42");
        runtime.sandboxes[0].state = SandboxState::NotReady;
        assert_eq!(held(spec(), &runtime), "reset=[a b!]");
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
            assert_eq!(short(&compute(&inputs)), "", "{instances}");
        }
    }
}
