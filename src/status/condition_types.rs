//! The types of pod conditions that the node agent writes.

/// The condition types that only the node agent writes; all others belong to other writers.
pub(super) const OWNED_CONDITIONS: [&str; 8] = [
    "PodScheduled",
    "Ready",
    "Initialized",
    "ContainersReady",
    "PodResizeInProgress",
    "PodResizePending",
    "PodReadyToStartContainers",
    "AllContainersRestarting",
];

/// The condition that the node agent and controllers share: why a pod was disrupted.
pub(super) const DISRUPTION_TARGET: &str = "DisruptionTarget";
