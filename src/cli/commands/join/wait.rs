//! What the command waits for after the start of the agent, and what is missing when it takes too long.

use super::plane::NodeState;
use super::refusal::{Reason, Refusal};
use super::service::UnitState;

/// What was seen last.
#[derive(Debug, Clone)]
pub(super) enum Observation {
    /// The agent has no certificate of the cluster yet.
    NoCertificate,
    /// The API server, or the file with the certificate, cannot be read.
    Unreadable(String),
    Node(NodeState),
}

/// What to wait for; the line and the advice are for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pending {
    pub text: String,
    pub missing: String,
}

/// What is still missing; `None`: the node is Ready.
pub(super) fn pending(observation: &Observation, node: &str) -> Option<Pending> {
    let (text, missing) = match observation {
        Observation::NoCertificate => (
            "the cluster to sign the node's certificate".to_owned(),
            "the log of the agent (journalctl -u coracle) shows its requests; on the control plane, kubectl \
             get csr shows those that nothing approves, and kubectl certificate approve NAME approves one"
                .to_owned(),
        ),
        Observation::Unreadable(reason) => (
            format!("the API server: {reason}"),
            "check the network between the node and the control plane; if the certificate of the node has \
             expired, run coracle leave, and join again with a new token"
                .to_owned(),
        ),
        Observation::Node(NodeState::Absent) => (
            format!("the agent to register the node {node}"),
            "the log of the agent (journalctl -u coracle) shows why the API server refuses it".to_owned(),
        ),
        Observation::Node(NodeState::NotReady { reason, message }) => {
            let what = if message.is_empty() { reason } else { message };
            let what = if what.is_empty() { "no status yet" } else { what.as_str() };
            (format!("the node {node} to be Ready: {what}"), missing_part(reason, message).to_owned())
        }
        Observation::Node(NodeState::Ready) => return None,
    };
    Some(Pending { text, missing })
}

/// The part of a cluster that a node is not ready without.
fn missing_part(reason: &str, message: &str) -> &'static str {
    let text = format!("{reason} {message}").to_lowercase();
    if text.contains("cni") || text.contains("network plugin") || text.contains("networkpluginnotready") {
        "the node has no CNI plugin: the DaemonSet of the cluster's network has to run on it (kubectl get \
         pods -A -o wide shows its pod), or a configuration in /etc/cni/net.d is missing"
    } else if text.contains("container runtime") {
        "the container runtime does not work: coracle check shows its state"
    } else {
        "coracle status shows the problems of the node"
    }
}

/// With so many automatic restarts since the start, the agent does not stay up. The unit restarts it without
/// a limit.
const MAX_RESTARTS: u64 = 5;

/// Follows the unit of the agent during the wait.
#[derive(Debug, Default)]
pub(super) struct UnitWatch {
    /// The number of restarts at the start.
    first: Option<u64>,
    has_failed: bool,
}

impl UnitWatch {
    /// What the unit does instead of running; `None`: it runs, or may run soon.
    pub(super) fn step(&mut self, unit: &UnitState) -> Option<String> {
        // The start sets the number to 0, perhaps after the first call.
        let first = self.first.map_or(unit.restarts, |first| first.min(unit.restarts));
        self.first = Some(first);
        let restarts = unit.restarts.saturating_sub(first);
        if restarts >= MAX_RESTARTS {
            return Some(format!("was restarted {restarts} times since its start ({})", unit.result));
        }
        // Twice, because a start may not be queued yet.
        let has_failed = unit.active == "failed" && !unit.has_job;
        let stays_failed = has_failed && self.has_failed;
        self.has_failed = has_failed;
        stays_failed.then(|| format!("has failed ({})", unit.result))
    }
}

/// The end of the wait for an agent that does not stay up. `reason`: from [`UnitWatch::step`].
pub(super) fn unit_failed(reason: &str, pending: &Pending) -> Refusal {
    let text = format!("coracle.service {reason}, while the command waited for {}", pending.text);
    let advice =
        "journalctl -u coracle shows why the agent ends; correct that, and run the same command again";
    Refusal::new(Reason::Service, text, advice)
}

/// The end of the wait without success.
pub(super) fn overdue(pending: &Pending, waited: std::time::Duration) -> Refusal {
    let text = format!("after {} s the command still waits for {}", waited.as_secs(), pending.text);
    let advice = format!("{}; the agent keeps running, and the same command waits again", pending.missing);
    Refusal::new(Reason::NotReady, text, advice)
}

/// What a node needs beside the agent once it is ready. `has_proxy`: a process kube-proxy runs.
pub(super) fn note(has_proxy: bool) -> Option<&'static str> {
    (!has_proxy).then_some(
        "kube-proxy does not run on this node: until it does, or the cluster's network replaces it, pods \
         reach no Services",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn not_ready(reason: &str, message: &str) -> Observation {
        Observation::Node(NodeState::NotReady { reason: reason.to_owned(), message: message.to_owned() })
    }

    #[test]
    fn each_state_names_the_next_event() {
        let text = |observation: &Observation| pending(observation, "n").map(|pending| pending.text);
        assert!(text(&Observation::NoCertificate).unwrap().contains("certificate"));
        assert!(text(&Observation::Unreadable("refused".into())).unwrap().ends_with(": refused"));
        assert!(text(&Observation::Node(NodeState::Absent)).unwrap().contains("register the node n"));
        assert_eq!(text(&not_ready("", "")).unwrap(), "the node n to be Ready: no status yet");
        assert_eq!(text(&not_ready("R", "")).unwrap(), "the node n to be Ready: R");
        assert_eq!(text(&Observation::Node(NodeState::Ready)), None);
    }

    #[test]
    fn missing_network_is_named_after_the_time() {
        let message = "container runtime network not ready: NetworkReady=false \
                       reason:NetworkPluginNotReady message:Network plugin returns error: cni plugin not initialized";
        let waits = pending(&not_ready("KubeletNotReady", message), "n").unwrap();
        let refusal = overdue(&waits, Duration::from_secs(60));
        assert!(refusal.text.starts_with("after 60 s") && refusal.text.contains("cni plugin"), "{refusal:?}");
        assert!(refusal.advice.contains("/etc/cni/net.d"), "{refusal:?}");
        let runtime = pending(&not_ready("KubeletNotReady", "container runtime is down"), "n").unwrap();
        assert!(runtime.missing.contains("coracle check"));
    }

    fn unit(active: &str, restarts: u64, has_job: bool) -> UnitState {
        UnitState { active: active.into(), restarts, result: "exit-code".into(), has_job }
    }

    #[test]
    fn agent_that_ends_again_and_again_is_not_waited_for() {
        let mut watch = UnitWatch::default();
        // Restarts of an earlier start do not count.
        for restarts in [40, 41, 0, 1, 4] {
            assert_eq!(watch.step(&unit("activating", restarts, true)), None, "{restarts}");
        }
        let reason = watch.step(&unit("activating", 5, true)).unwrap();
        assert_eq!(reason, "was restarted 5 times since its start (exit-code)");
        let waits = pending(&Observation::NoCertificate, "n").unwrap();
        let refusal = unit_failed(&reason, &waits);
        assert_eq!(refusal.code, Reason::Service.code());
        assert!(refusal.text.starts_with("coracle.service was restarted"), "{refusal:?}");
        assert!(refusal.advice.contains("journalctl -u coracle"), "{refusal:?}");
    }

    #[test]
    fn failed_unit_ends_the_wait_unless_its_start_is_queued() {
        let mut watch = UnitWatch::default();
        for (active, has_job) in
            [("failed", false), ("failed", true), ("failed", false), ("activating", true)]
        {
            assert_eq!(watch.step(&unit(active, 0, has_job)), None, "{active} {has_job}");
        }
        for active in ["active", "inactive", "inactive", "failed"] {
            assert_eq!(watch.step(&unit(active, 0, false)), None, "{active}");
        }
        assert_eq!(watch.step(&unit("failed", 0, false)).unwrap(), "has failed (exit-code)");
    }

    #[test]
    fn absent_proxy_is_a_note() {
        assert!(note(false).unwrap().contains("kube-proxy") && note(true).is_none());
    }
}
