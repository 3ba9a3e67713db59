//! What device plugins report, as plain data.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::model::numa::NumaMask;

/// The name of a device, unique in its resource.
pub type DeviceId = Arc<str>;

/// What is known about a device besides its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Device {
    /// Whether the plugin reports it as `Healthy`.
    pub is_healthy: bool,
    /// The NUMA nodes that it is near to; empty: no preference.
    pub nodes: NumaMask,
}

/// The devices of one resource.
pub type DeviceList = BTreeMap<DeviceId, Device>;

/// What a plugin wants to be called for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PluginOptions {
    /// `PreStartContainer` before each start of a container.
    pub pre_start: bool,
    /// `GetPreferredAllocation` before devices are chosen.
    pub preferred: bool,
}

/// What a container needs to use its devices (kubelet: `ContainerAllocateResponse`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Setup {
    /// Environment variables.
    pub envs: BTreeMap<String, String>,
    /// Mounts.
    pub mounts: Vec<DeviceMount>,
    /// Device nodes.
    pub nodes: Vec<DeviceNode>,
    /// Annotations for the runtime.
    pub annotations: BTreeMap<String, String>,
    /// Fully qualified names of CDI devices.
    pub cdi: Vec<String>,
}

/// A file or directory of the node that a container sees.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceMount {
    /// Where it is in the container.
    pub container_path: String,
    /// Where it is on the node.
    pub host_path: String,
    /// Whether the container cannot change it.
    pub read_only: bool,
}

/// A device node that a container sees.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceNode {
    /// Where it is in the container.
    pub container_path: String,
    /// Where it is on the node.
    pub host_path: String,
    /// Some of `r`, `w` and `m`.
    pub permissions: String,
}

/// The answer of a plugin to `Allocate` for one container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Granted {
    /// What it means for the container.
    pub setup: Setup,
    /// The message as it was received, for the state file.
    pub raw: Arc<[u8]>,
}
