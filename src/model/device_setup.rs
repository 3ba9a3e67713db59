//! What the devices of a container need in its configuration.

use std::collections::BTreeMap;

/// What a container needs to use its devices (Go: `ContainerAllocateResponse`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceSetup {
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
