//! Whether the pod's sandbox can still be used.

use crate::model::ids::SandboxId;
use crate::model::pod::Pod;
use crate::model::runtime::{PodRuntime, SandboxState};

/// The result of [`check`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxCheck {
    /// Why a new sandbox is needed, as the pod's condition shows it; `None`: it is not needed.
    pub problem: Option<&'static str>,
    /// Attempt number of the new sandbox, or of the present one.
    pub attempt: u32,
    /// The sandbox in use that a new one would replace. `None` if none existed, or if only the
    /// network mode differs: then the specification changed, and the sandbox did not fail.
    pub replaces: Option<SandboxId>,
}

impl SandboxCheck {
    /// A new sandbox is needed.
    #[must_use]
    pub fn needed(&self) -> bool {
        self.problem.is_some()
    }
}

/// Checks the newest sandbox. Sandboxes are ordered newest first by the runtime room (Go:
/// pkg/kubelet/kuberuntime/util `PodSandboxChanged`).
#[must_use]
pub fn check(pod: &Pod, runtime: &PodRuntime) -> SandboxCheck {
    let Some(newest) = runtime.newest_sandbox() else {
        return SandboxCheck { problem: Some("no pod sandbox exists"), attempt: 0, replaces: None };
    };
    let next = newest.attempt.saturating_add(1);
    let new_sandbox = |problem, replaces| SandboxCheck { problem: Some(problem), attempt: next, replaces };
    let ready = runtime.sandboxes.iter().filter(|sandbox| sandbox.state == SandboxState::Ready).count();
    if ready > 1 {
        let problem = "multiple pod sandboxes are ready and need to be reconciled";
        return new_sandbox(problem, Some(newest.id.clone()));
    }
    if newest.state != SandboxState::Ready {
        return new_sandbox("pod sandbox is not ready", Some(newest.id.clone()));
    }
    if newest.host_network != pod.host_network() {
        return new_sandbox("network namespace mode changed and sandbox needs to be recreated", None);
    }
    if !pod.host_network() && newest.network_reported && newest.ips.is_empty() {
        return new_sandbox("pod sandbox has no IP address", Some(newest.id.clone()));
    }
    SandboxCheck { problem: None, attempt: newest.attempt, replaces: Some(newest.id.clone()) }
}
