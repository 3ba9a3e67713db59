//! The documents of what pods hold on the node: volumes, devices, resource claims; and the plugins.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::util::clip;

/// Rows of one list in a document. Plugins can list very many devices.
pub(crate) const MOST_ROWS: usize = 10_000;
/// The longest text from a plugin, in bytes.
const MOST_BYTES: usize = 1024;

/// The beginning of a text from a plugin. Commands escape its control characters when they print it.
#[must_use]
pub(crate) fn clip(text: &str) -> String {
    clip::beginning(text, MOST_BYTES).to_owned()
}

/// Response of `/v1/volumes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct VolumesReply {
    /// Sorted by namespace, pod and volume.
    pub volumes: Vec<VolumeRow>,
    /// Rows that are left out.
    #[serde(skip_serializing_if = "is_zero")]
    pub omitted: usize,
}

/// A volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct VolumeRow {
    /// Empty if only the UID of the pod is known.
    pub namespace: String,
    /// The pod's name, or its UID.
    pub pod: String,
    /// The name in the pod; of a volume that is not in the pod: its path below the pod's `volumes`.
    pub volume: String,
    /// The kind with the object, driver or path that matters, such as `csi hostpath.csi.k8s.io`.
    pub kind: String,
    /// `waiting`, `being set up`, `mounted`, `failed`, `being unmounted`, `cannot be unmounted` or
    /// `unmounted`.
    pub state: String,
    /// The last error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The beginning of the state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

/// Response of `/v1/devices`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DevicesReply {
    /// Devices of device plugins, sorted by resource and name.
    pub devices: Vec<DeviceRow>,
    /// Devices of resource claims, sorted by claim.
    pub claims: Vec<ClaimRow>,
    /// Registered plugins, and sockets whose plugin could not be registered.
    pub plugins: Vec<PluginRow>,
    /// Rows that are left out.
    #[serde(skip_serializing_if = "is_zero")]
    pub omitted: usize,
}

/// A device of a device plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DeviceRow {
    /// Such as `example.com/camera`.
    pub resource: String,
    /// The plugin's name of the device.
    pub device: String,
    /// `Healthy`, `Unhealthy`, or `Unknown` while the plugin does not list it.
    pub health: String,
    /// The NUMA nodes that it is near to; none: not known.
    pub numa: Vec<u32>,
    /// The containers that have it, as `namespace/pod/container`. Init containers leave theirs to
    /// later containers.
    pub users: Vec<String>,
}

/// A device of a resource claim, or a claim without devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ClaimRow {
    pub namespace: String,
    pub claim: String,
    pub driver: String,
    pub pool: String,
    pub device: String,
    /// Whether all drivers have prepared it since the agent started.
    pub prepared: bool,
    /// The names of the pods that use it, or their UIDs.
    pub pods: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PluginRow {
    /// Empty: it could not be asked.
    pub name: String,
    /// `CSIPlugin`, `DevicePlugin` or `DRAPlugin`; empty: it could not be asked.
    pub kind: String,
    pub socket: String,
    pub registered: bool,
    /// When it was registered; if it is not: when it was last, or when the failures began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Why the last attempt to register it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_limited_at_a_character() {
        assert_eq!(clip("abc"), "abc");
        let long = clip(&"ä\n".repeat(1000));
        assert!((MOST_BYTES - 3..=MOST_BYTES).contains(&long.len()), "{}", long.len());
    }
}
