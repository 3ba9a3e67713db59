//! The node as the rooms that decide about pods see it.

use std::collections::BTreeMap;

use super::api::Taint;

/// What the node has to give, after its own reservations; or all that it has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Allocatable {
    /// CPU in thousandths of a core.
    pub cpu_milli: i64,
    /// Memory.
    pub memory_bytes: i64,
    /// Space for logs, writable layers and emptyDir volumes; [`i64::MAX`] where it is not known.
    pub ephemeral_bytes: i64,
    /// Number of pods.
    pub pods: i64,
    /// Huge pages in bytes and devices by count, under their resource names.
    pub extended: BTreeMap<String, i64>,
}

/// The node as admission sees it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeView {
    /// The node's name.
    pub name: String,
    /// The labels of the node object, or the initial ones where there is none.
    pub labels: BTreeMap<String, String>,
    /// The taints of the node object, or the initial ones where there is none.
    pub taints: Vec<Taint>,
    /// What it has to give.
    pub allocatable: Allocatable,
    /// `linux`.
    pub os: String,
    /// The release, as of `uname -r`.
    pub kernel_version: String,
    /// Whether the kernel enforces AppArmor profiles.
    pub apparmor: bool,
    /// Names, or prefixes ending in `*`, beyond the safe ones.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Whether the runtime can keep the image's groups out.
    pub strict_supplemental_groups: bool,
    /// Pressure conditions in force, such as `MemoryPressure`.
    pub pressures: Vec<String>,
    /// The node is going down in good order.
    pub shutting_down: bool,
    /// The features that the node declares; `None`: it does not, and no pod is checked.
    pub declared_features: Option<Vec<String>>,
}
