//! Whether the pod's sandbox can still be used.

use crate::model::ids::SandboxId;
use crate::model::pod::Pod;
use crate::model::runtime::{PodRuntime, SandboxState};

/// The result of [`check`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxCheck {
    /// A new sandbox is needed.
    pub needed: bool,
    /// Attempt number of the new sandbox, or of the present one.
    pub attempt: u32,
    /// The sandbox in use that a new one would replace. `None` if none existed, or if only the
    /// network mode differs: then the specification changed, and the sandbox did not fail.
    pub replaces: Option<SandboxId>,
}

/// Checks the newest sandbox. Sandboxes are ordered newest first by the runtime room.
#[must_use]
pub fn check(pod: &Pod, runtime: &PodRuntime) -> SandboxCheck {
    let Some(newest) = runtime.newest_sandbox() else {
        return SandboxCheck { needed: true, attempt: 0, replaces: None };
    };
    let next = newest.attempt.saturating_add(1);
    let new_sandbox = |replaces| SandboxCheck { needed: true, attempt: next, replaces };
    let ready = runtime.sandboxes.iter().filter(|sandbox| sandbox.state == SandboxState::Ready).count();
    if ready > 1 || newest.state != SandboxState::Ready {
        return new_sandbox(Some(newest.id.clone()));
    }
    if newest.host_network != pod.host_network() {
        return new_sandbox(None);
    }
    if !pod.host_network() && newest.network_reported && newest.ips.is_empty() {
        return new_sandbox(Some(newest.id.clone()));
    }
    SandboxCheck { needed: false, attempt: newest.attempt, replaces: Some(newest.id.clone()) }
}
