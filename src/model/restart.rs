//! Whether a container may run again: policies, exit-code rules, sidecars.
//! The plan and the status must agree on it, or a pod shows a phase that it never gets.
//! (Go: kubecontainer.ShouldContainerBeRestarted and podutil.ContainerShouldRestart.)

use super::api::{Container, ContainerRestartRule};
use super::pod::{Pod, is_sidecar};
use super::runtime::{ContainerState, ContainerStatus, PodRuntime};

/// The policy of `container`: its own, else the pod's.
#[must_use]
pub fn policy<'a>(pod: &'a Pod, container: &'a Container) -> &'a str {
    container.restart_policy.as_deref().unwrap_or_else(|| pod.restart_policy())
}

/// Whether rules and policies allow `container` to run again after it ended with `exit_code`.
/// Ignores a deletion of the pod.
pub fn may_restart(pod: &Pod, container: &Container, exit_code: i32) -> bool {
    if rule_action(container, exit_code).is_some() {
        return true;
    }
    match policy(pod, container) {
        "Never" => false,
        "OnFailure" => exit_code != 0,
        _ => true,
    }
}

/// Whether `container` should run again, given its newest instance `status`. An instance that was
/// never started or whose state is unknown is started again.
#[must_use]
pub fn should_restart(pod: &Pod, container: &Container, status: &ContainerStatus) -> bool {
    if pod.is_deleting() {
        return false;
    }
    match status.state {
        ContainerState::Running => false,
        ContainerState::Created | ContainerState::Unknown => true,
        ContainerState::Exited => may_restart(pod, container, status.exit_code),
    }
}

/// Like [`should_restart`]; a container without any instance in the runtime is started, too.
#[must_use]
pub fn should_start(pod: &Pod, container: &Container, status: Option<&ContainerStatus>) -> bool {
    match status {
        Some(status) => should_restart(pod, container, status),
        None => !pod.is_deleting(),
    }
}

/// Whether the container with this name, which ended with `exit_code`, will run again for certain, and
/// alone. If not, the runtime's record of it is still needed: it shows that the container has run, or
/// that all containers have to be restarted.
#[must_use]
pub fn runs_again(pod: &Pod, name: &str, exit_code: i32) -> bool {
    let Some(found) = pod.all_containers().find(|container| container.name == name) else { return false };
    let runs_once = |container: &Container| container.name == name && !is_sidecar(container);
    let has_initialized = exit_code == 0 && pod.init_containers().iter().any(runs_once);
    let restarts_all = rule_action(found, exit_code) == Some(RuleAction::RestartAllContainers);
    let is_over = pod.is_over() || pod.is_deleting();
    !is_over && !has_initialized && !restarts_all && may_restart(pod, found, exit_code)
}

/// Whether a container that is stopped because a probe failed is restarted. Its exit code is not
/// known yet, so rules are ignored.
#[must_use]
pub fn restarts_after_probe(pod: &Pod, container: &Container) -> bool {
    policy(pod, container) != "Never"
}

/// The action that a rule of a container requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleAction {
    /// This container is restarted.
    Restart,
    /// All containers of the pod are restarted, in the same sandbox, init containers first.
    RestartAllContainers,
}

/// The action of the first rule that matches `exit_code`. Rules refine a policy of the container
/// itself; without one they have no effect.
#[must_use]
pub fn rule_action(container: &Container, exit_code: i32) -> Option<RuleAction> {
    container.restart_policy.as_ref()?;
    container.restart_policy_rules.iter().flatten().find_map(|rule| action(rule, exit_code))
}

fn action(rule: &ContainerRestartRule, exit_code: i32) -> Option<RuleAction> {
    let codes = rule.exit_codes.as_ref()?;
    let listed = codes.values.iter().flatten().any(|value| *value == exit_code);
    let fits = match codes.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        _ => false,
    };
    match rule.action.as_str() {
        _ if !fits => None,
        "Restart" => Some(RuleAction::Restart),
        "RestartAllContainers" => Some(RuleAction::RestartAllContainers),
        _ => None,
    }
}

/// Whether `container`, whose newest instance is `status`, requires a restart of the whole pod.
/// This stays true until its instance is removed, which is done last.
#[must_use]
pub fn requests_restart_of_all(container: &Container, status: Option<&ContainerStatus>) -> bool {
    status.is_some_and(|status| {
        status.state == ContainerState::Exited
            && rule_action(container, status.exit_code) == Some(RuleAction::RestartAllContainers)
    })
}

/// Whether all containers of `pod` must be restarted because of a rule of a container that ended.
/// Not for a pod that is being deleted.
#[must_use]
pub fn all_containers_restart(pod: &Pod, runtime: &PodRuntime) -> bool {
    !pod.is_deleting()
        && pod
            .all_containers()
            .any(|container| requests_restart_of_all(container, runtime.newest(&container.name)))
}

/// Whether any container of `pod` has a rule that restarts all of them.
pub fn may_restart_all(pod: &Pod) -> bool {
    pod.all_containers()
        .flat_map(|container| container.restart_policy_rules.iter().flatten())
        .any(|rule| rule.action == "RestartAllContainers")
}

/// The rules that are enabled on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleGates {
    /// Gate `ContainerRestartRules`: policies and rules of containers.
    pub rules: bool,
    /// Gate `RestartAllContainersOnContainerExits`: the action that restarts all of them.
    pub restart_all: bool,
}

impl Default for RuleGates {
    fn default() -> Self {
        RuleGates { rules: true, restart_all: true }
    }
}

impl RuleGates {
    /// `pod` without the parts that the gates disable. Sidecars keep their policy, which defines
    /// them; a rule for all containers then restarts only its own.
    #[must_use]
    pub fn without_disabled_rules(self, pod: Pod) -> Pod {
        let affected = |container: &Container| {
            container.restart_policy_rules.is_some() || (container.restart_policy.is_some() && !self.rules)
        };
        if (self.rules && self.restart_all) || !pod.all_containers().any(affected) {
            return pod;
        }
        let mut object = pod.object().clone();
        let Some(spec) = &mut object.spec else { return pod };
        for container in &mut spec.containers {
            self.apply(container, |_| false);
        }
        for container in spec.init_containers.iter_mut().flatten() {
            self.apply(container, |policy| policy == "Always");
        }
        Pod::from(object)
    }

    fn apply(self, container: &mut Container, keeps: impl Fn(&str) -> bool) {
        if !self.rules {
            container.restart_policy_rules = None;
            container.restart_policy = container.restart_policy.take().filter(|policy| keeps(policy));
        }
        for rule in container.restart_policy_rules.iter_mut().flatten() {
            if rule.action == "RestartAllContainers" {
                rule.action = "Restart".to_owned();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(pod_policy: Value, container: Value, exit_code: i32, expected: bool) {
        let pod = Pod::from(
            serde_json::from_value::<super::super::api::Pod>(
                json!({"spec": {"containers": [], "restartPolicy": pod_policy}}),
            )
            .unwrap(),
        );
        let parsed: Container = serde_json::from_value(container.clone()).unwrap();
        assert_eq!(
            may_restart(&pod, &parsed, exit_code),
            expected,
            "{} {container} {exit_code}",
            pod.restart_policy()
        );
    }

    #[test]
    fn container_that_has_ended_for_good_does_not_run_again() {
        let pod = |policy: &str, metadata: Value| {
            let spec = json!({"restartPolicy": policy, "containers": [{"name": "main"}], "initContainers": [
                {"name": "init"}, {"name": "side", "restartPolicy": "Always"}]});
            Pod::from(
                serde_json::from_value::<super::super::api::Pod>(json!({"metadata": metadata, "spec": spec}))
                    .unwrap(),
            )
        };
        let found = |policy| {
            let pod = pod(policy, json!({}));
            ["main", "init", "side"].map(|name| [0, 1].map(|code| runs_again(&pod, name, code)))
        };
        assert_eq!(found("Always"), [[true, true], [false, true], [true, true]]);
        assert_eq!(found("OnFailure"), [[false, true], [false, true], [true, true]]);
        assert_eq!(found("Never"), [[false, false], [false, false], [true, true]]);
        let deleting = pod("Always", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}));
        assert!(!runs_again(&deleting, "main", 1) && !runs_again(&deleting, "other", 1));
    }

    /// Its record in the runtime is needed until all containers have been removed.
    #[test]
    fn container_that_restarts_all_containers_does_not_run_again_alone() {
        let rule = |action: &str, code: i32| json!({"action": action, "exitCodes": {"operator": "In", "values": [code]}});
        let rules = json!([rule("RestartAllContainers", 42), rule("Restart", 43)]);
        let main = json!({"name": "main", "restartPolicy": "Never", "restartPolicyRules": rules});
        let pod = |status: Value| {
            let pod = json!({"metadata": {}, "spec": {"containers": [main]}, "status": status});
            Pod::from(serde_json::from_value::<super::super::api::Pod>(pod).unwrap())
        };
        let found = [42, 43, 44].map(|code| runs_again(&pod(json!({})), "main", code));
        assert_eq!(found, [false, true, false]);
        // An evicted pod, for example.
        let over = pod(json!({"phase": "Failed"}));
        assert!(over.is_over() && !runs_again(&over, "main", 43));
    }

    #[test]
    fn restart_policies_and_rules_determine_the_restart() {
        let plain = json!({"name": "c"});
        check(Value::Null, plain.clone(), 0, true);
        check(json!("Always"), plain.clone(), 1, true);
        check(json!("OnFailure"), plain.clone(), 0, false);
        check(json!("OnFailure"), plain.clone(), 1, true);
        check(json!("Never"), plain, 1, false);
        // The container's own policy takes precedence; a sidecar is always restarted.
        check(json!("Never"), json!({"name": "c", "restartPolicy": "Always"}), 0, true);
        check(json!("Always"), json!({"name": "c", "restartPolicy": "Never"}), 1, false);
        let rules = |operator: &str, action: &str| {
            json!({"name": "c", "restartPolicy": "Never", "restartPolicyRules": [
                {"action": action, "exitCodes": {"operator": operator, "values": [42, 43]}}]})
        };
        check(json!("Never"), rules("In", "Restart"), 42, true);
        check(json!("Never"), rules("In", "Restart"), 1, false);
        check(json!("Never"), rules("NotIn", "Restart"), 1, true);
        check(json!("Never"), rules("NotIn", "Restart"), 43, false);
        check(json!("Never"), rules("In", "RestartAllContainers"), 43, true);
        check(json!("Never"), rules("In", "Dance"), 43, false);
        check(json!("Never"), rules("Like", "Restart"), 43, false);
        let action = |codes: &[(&str, &str)]| {
            let rules: Vec<_> = codes
                .iter()
                .map(|(operator, action)| {
                    json!({"action": action, "exitCodes": {"operator": operator, "values": [42]}})
                })
                .collect();
            let container = json!({"name": "c", "restartPolicy": "Never", "restartPolicyRules": rules});
            rule_action(&serde_json::from_value(container).unwrap(), 42)
        };
        // The first matching rule decides.
        let all = RuleAction::RestartAllContainers;
        assert_eq!(action(&[("In", "RestartAllContainers"), ("In", "Restart")]), Some(all));
        assert_eq!(action(&[("NotIn", "Restart"), ("In", "RestartAllContainers")]), Some(all));
        assert_eq!(action(&[("In", "Restart"), ("In", "RestartAllContainers")]), Some(RuleAction::Restart));
        assert_eq!(action(&[("NotIn", "RestartAllContainers")]), None);
        // Rules have no effect without a policy of the container itself.
        let mut orphan = rules("In", "Restart");
        orphan["restartPolicy"] = Value::Null;
        check(json!("Never"), orphan, 42, false);
    }

    #[test]
    fn disabled_gates_switch_rules_off() {
        let rules =
            json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
        let spec = json!({"restartPolicy": "Never",
            "initContainers": [
                {"name": "s", "restartPolicy": "Always", "restartPolicyRules": rules},
                {"name": "i", "restartPolicy": "OnFailure"}],
            "containers": [
                {"name": "a", "restartPolicy": "Always"},
                {"name": "b", "restartPolicy": "Never", "restartPolicyRules": rules}]});
        let pod = Pod::from(
            serde_json::from_value::<super::super::api::Pod>(json!({"metadata": {"uid": "u"}, "spec": spec}))
                .unwrap(),
        );
        // Policies of s, i, a, b; the action after b exits with 42; whether all may restart.
        let under = |rules: bool, restart_all: bool| {
            let pod = RuleGates { rules, restart_all }.without_disabled_rules(pod.clone());
            let policies: Vec<String> =
                pod.all_containers().map(|container| policy(&pod, container).to_owned()).collect();
            (policies.join(" "), may_restart(&pod, &pod.containers()[1], 42), may_restart_all(&pod))
        };
        assert_eq!(under(true, true), ("Always OnFailure Always Never".to_owned(), true, true));
        assert_eq!(under(true, false), ("Always OnFailure Always Never".to_owned(), true, false));
        assert_eq!(under(false, false), ("Always Never Never Never".to_owned(), false, false));
        assert_eq!(RuleGates::default().without_disabled_rules(pod.clone()), pod);
    }
}
