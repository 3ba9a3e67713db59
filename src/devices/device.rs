//! What device plugins report, as plain data.

use std::collections::BTreeMap;
use std::sync::Arc;

pub use crate::model::device_setup::{DeviceMount, DeviceNode, DeviceSetup};
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

/// The answer of a plugin to `Allocate` for one container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GrantedDevices {
    /// What it means for the container.
    pub setup: DeviceSetup,
    /// The message as it was received, for the state file.
    pub raw: Arc<[u8]>,
}
