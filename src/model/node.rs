//! The node, as used by rooms that decide about pods.

use std::collections::BTreeMap;

use super::api::Taint;

/// The node's resources for pods, after its reservations; or all of its resources.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Allocatable {
    /// CPU in thousandths of a core.
    pub cpu_milli: i64,
    /// Memory.
    pub memory_bytes: i64,
    /// Space for logs, writable layers and emptyDir volumes; [`i64::MAX`] if unknown.
    pub ephemeral_bytes: i64,
    /// Number of pods.
    pub pods: i64,
    /// Huge pages in bytes and devices by count, under their resource names.
    pub extended: BTreeMap<String, i64>,
}

/// The node, as used by admission.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeView {
    /// The node's name.
    pub name: String,
    /// The labels of the node object, or the initial ones where there is none.
    pub labels: BTreeMap<String, String>,
    /// The taints of the node object, or the initial ones where there is none.
    pub taints: Vec<Taint>,
    /// The allocatable resources of the node.
    pub allocatable: Allocatable,
    /// `linux`.
    pub os: String,
    /// The release, as of `uname -r`.
    pub kernel_version: String,
    /// Whether the kernel enforces AppArmor profiles.
    pub apparmor: bool,
    /// Allowed unsafe sysctls: names, or prefixes ending in `*`.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Whether the runtime supports the strict policy for supplemental groups.
    pub strict_supplemental_groups: bool,
    /// Current pressure conditions, such as `MemoryPressure`.
    pub pressures: Vec<String>,
    /// A graceful shutdown of the node is in progress.
    pub shutting_down: bool,
    /// The declared features of the node; `None`: they are not declared, and no pod is checked.
    pub declared_features: Option<Vec<String>>,
}
