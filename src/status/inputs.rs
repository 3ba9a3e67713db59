//! The inputs of a status.

use std::net::IpAddr;
use std::time::Duration;

use jiff::Timestamp;

use crate::model::api::{Container, PodCondition, PodStatus, ResourceStatus};
use crate::model::ids::ContainerId;
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::model::runtime::PodRuntime;
use crate::model::verdict::ProbeVerdict;

/// Why the last attempt to start a container failed; stored until an attempt succeeds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartReason {
    /// CamelCase, see `model::reasons`.
    pub reason: &'static str,
    /// A message for users.
    pub message: String,
}

/// The node's own addresses, primary first, at most two.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeAddresses {
    /// The addresses; empty while they are unknown.
    pub host_ips: Vec<IpAddr>,
    /// Whether the node has found them itself: it has exactly these. A cloud controller may know others.
    pub are_own: bool,
}

impl NodeAddresses {
    /// The addresses that statuses show: two at most.
    pub(super) fn shown_host_ips(&self) -> &[IpAddr] {
        self.host_ips.get(..2).unwrap_or(&self.host_ips)
    }
}

/// The inputs of a status.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// The pod; its own status is used if `old` is absent.
    pub pod: &'a Pod,
    /// The last inspection.
    pub runtime: &'a PodRuntime,
    /// The status that this agent stored last.
    pub old: Option<&'a PodStatus>,
    /// The last start failure of a container, by name.
    pub failures: &'a dyn Fn(&str) -> Option<StartReason>,
    /// The pod's containers have stopped and will not run again.
    pub terminal: bool,
    /// With `terminal`: this node failed the pod by an order while containers of it ran, and their exit codes
    /// decide whether it has succeeded.
    pub exit_codes_decide: bool,
    /// The pod is being deleted or stopped: no container restarts.
    pub deleting: bool,
    /// The present time.
    pub now: Timestamp,
    /// How long the pod has been active; `None`: since its start, by the time of day.
    pub active: Option<Duration>,
    /// The node's addresses.
    pub node: &'a NodeAddresses,
    /// The prefix of container ids, such as `containerd`.
    pub runtime_name: &'a str,
    /// Why the plan needs a new sandbox; `None`: the present one can be used.
    pub sandbox_problem: Option<&'a str>,
    /// Readiness of a container instance.
    pub readiness: &'a dyn Fn(&ContainerId) -> ProbeVerdict,
    /// Startup of a container instance.
    pub startup: &'a dyn Fn(&ContainerId) -> ProbeVerdict,
    /// The conditions that show a resize.
    pub resize_conditions: &'a [PodCondition],
    /// The pod with the resources that it and its containers still have while a resize is open;
    /// `None`: those that it was granted.
    pub actual_pod: Option<&'a Pod>,
    /// The memory request that a container, by name, runs with: runtimes do not report it.
    pub memory_request: &'a dyn Fn(&str) -> Option<Amount>,
    /// The health of a container's devices.
    pub devices: &'a dyn Fn(&Container) -> Vec<ResourceStatus>,
}

impl<'a> Inputs<'a> {
    /// Inputs with no history, no failures and no probes; set the other fields as needed.
    #[must_use]
    pub fn new(pod: &'a Pod, runtime: &'a PodRuntime, node: &'a NodeAddresses, now: Timestamp) -> Self {
        Inputs {
            pod,
            runtime,
            old: None,
            failures: &|_| None,
            terminal: false,
            exit_codes_decide: false,
            deleting: false,
            now,
            active: None,
            node,
            runtime_name: "containerd",
            sandbox_problem: None,
            readiness: &|_| ProbeVerdict::NoProbe,
            startup: &|_| ProbeVerdict::NoProbe,
            resize_conditions: &[],
            actual_pod: None,
            memory_request: &|_| None,
            devices: &|_| Vec::new(),
        }
    }

    /// The previous status: the stored one, else the one in the pod's object.
    pub(super) fn previous_status(&self) -> Option<&'a PodStatus> {
        self.old.or(self.pod.object().status.as_ref())
    }

    /// Whether the pod is being deleted, by its object or by an order to its worker.
    pub(super) fn is_deleting(&self) -> bool {
        self.deleting || self.pod.is_deleting()
    }
}

/// `metadata.generation`, which static pods do not have.
pub(super) fn generation(pod: &Pod) -> Option<i64> {
    pod.object().metadata.generation.filter(|generation| *generation > 0)
}
