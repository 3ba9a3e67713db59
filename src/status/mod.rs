//! The status of each pod: composed from facts, kept, and compared with what came before.
//!
//! Owns: [`StatusCache`], the last status that this agent computed for every pod; what the
//! API server shows instead is known to [`publish`] alone.
//! Threads: `status`, which tells the API server; readers of the cache may wait for a newer
//! version. Inbox of `status`: the pods as the API server shows them, by UID.
//! Inputs: the worker of a pod calls [`compose`] with what the runtime and the probes say
//! and stores the result. Nothing but the thread talks to anyone or reads a clock.
//! Invariants: a stored phase never leaves Succeeded or Failed; a start time never changes;
//! versions only grow; a condition's transition time changes only with its status; times
//! have no fractions of seconds; the end of a pod is told when nothing of it runs.
//! Go counterpart: pkg/kubelet/kubelet_pods.go (generateAPIPodStatus) and
//! pkg/kubelet/status (manager, generators).

mod cache;
mod compose;
mod conditions;
mod containers;
mod ended;
mod merge;
mod phase;
pub mod publish;
mod resources;
mod restart_all;
mod strategic;
#[cfg(test)]
mod tests;
mod transitions;

pub use cache::{Entry, StatusCache, Stored};
pub use compose::{Deadline, Inputs, NodeAddresses, StartReason, active_deadline, compose, pod_ips};
pub use conditions::{disrupt, gates_differ};
pub use merge::Activity;
pub use strategic::patch as status_patch;
pub use transitions::IllegalTransition;

use crate::model::api::{ContainerStatus, PodStatus};

/// `status.phase` of a pod that will never run again.
#[must_use]
pub fn is_terminal(phase: Option<&str>) -> bool {
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// The condition types that the node agent writes; all others belong to someone else.
pub const OWNED_CONDITIONS: [&str; 8] = [
    "PodScheduled",
    "Ready",
    "Initialized",
    "ContainersReady",
    "PodResizeInProgress",
    "PodResizePending",
    "PodReadyToStartContainers",
    "AllContainersRestarting",
];

/// The condition that node agent and controllers share: why a pod had to go.
pub const DISRUPTION_TARGET: &str = "DisruptionTarget";

/// All container statuses of a pod: init, regular, ephemeral.
fn all_statuses(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let lists =
        [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    lists.into_iter().flatten().flatten()
}
