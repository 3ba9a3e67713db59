//! The node, as used by rooms that decide about pods.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::api::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Taint};

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

/// The hard thresholds of eviction of `memory.available` and `nodefs.available`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub struct HardThresholds {
    pub memory_bytes: i64,
    pub disk_bytes: i64,
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
    /// Pods with resources of the pod as a whole are refused: the gate `PodLevelResources` is off.
    pub refuses_pod_resources: bool,
}

/// Whether a node of this name and with these labels is one of the selected nodes.
#[must_use]
pub fn selects(selector: &NodeSelector, name: &str, labels: &BTreeMap<String, String>) -> bool {
    selector.node_selector_terms.iter().any(|term| matches(term, name, labels))
}

/// All requirements of a term must match; an empty term matches no node.
fn matches(term: &NodeSelectorTerm, name: &str, labels: &BTreeMap<String, String>) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let label = |wanted: &NodeSelectorRequirement| holds(wanted, labels.get(&wanted.key).map(String::as_str));
    // The name is the only field that can be selected, and by one value only.
    let field = |wanted: &NodeSelectorRequirement| {
        wanted.key == "metadata.name"
            && matches!(wanted.operator.as_str(), "In" | "NotIn")
            && wanted.values.as_ref().is_some_and(|values| values.len() == 1)
            && holds(wanted, Some(name))
    };
    expressions.iter().all(label) && fields.iter().all(field)
}

/// A requirement that is not well formed matches no node, and neither does its negation.
fn holds(wanted: &NodeSelectorRequirement, found: Option<&str>) -> bool {
    let values = wanted.values.as_deref().unwrap_or_default();
    let has = |found: &str| values.iter().any(|value| value == found);
    let numbers = || match values {
        [only] => compare(found?, only),
        _ => None,
    };
    match wanted.operator.as_str() {
        "In" => found.is_some_and(has),
        "NotIn" => !values.is_empty() && found.is_none_or(|found| !has(found)),
        "Exists" => values.is_empty() && found.is_some(),
        "DoesNotExist" => values.is_empty() && found.is_none(),
        "Gt" => numbers().is_some_and(Ordering::is_gt),
        "Lt" => numbers().is_some_and(Ordering::is_lt),
        _ => false,
    }
}

/// How two whole numbers compare; `None` if a text is none.
#[must_use]
pub fn compare(a: &str, b: &str) -> Option<Ordering> {
    Some(a.parse::<i64>().ok()?.cmp(&b.parse().ok()?))
}
