//! The settings of the room.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use crate::model::api::Taint;

/// Values that do not change while the agent runs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Settings {
    /// The node's name.
    pub name: String,
    /// Whether to register; otherwise another client creates the object.
    pub register: bool,
    /// `--node-labels`.
    pub labels: BTreeMap<String, String>,
    /// `registerWithTaints`.
    pub taints: Vec<Taint>,
    /// The cloud's name for the machine; may be empty.
    pub provider_id: String,
    /// `--cloud-provider=external`.
    pub external_cloud: bool,
    /// `enableControllerAttachDetach`.
    pub controller_attach_detach: bool,
    /// `--node-ip`.
    pub node_ips: Vec<IpAddr>,
    /// Whether the agent had no records of devices at its start (Go:
    /// `ShouldResetExtendedResourceCapacity`).
    pub resets_devices: bool,
    /// The port of the node API.
    pub port: u16,
    /// The version of Kubernetes that the agent implements, such as `v1.37.2`.
    pub kubelet_version: String,
    /// Whether the agent runs in a user namespace; `None` without the gate `KubeletInUserNamespace`.
    pub in_user_namespace: Option<bool>,
    /// Features that schedulers may rely on, sorted.
    pub declared_features: Vec<String>,
    /// `nodeStatusUpdateFrequency`.
    pub update_every: Duration,
    /// `nodeStatusReportFrequency`.
    pub report_every: Duration,
    /// `nodeLeaseDurationSeconds`.
    pub lease_seconds: i32,
}

impl Settings {
    /// How long a heartbeat's request may take.
    pub(super) fn heartbeat_timeout(&self) -> Duration {
        let lease = Duration::from_secs(u64::try_from(self.lease_seconds).unwrap_or(0));
        self.update_every.min(lease).max(Duration::from_secs(1))
    }
}
