//! Whether the resources that a pod requests are free.

use std::borrow::Cow;
use std::fmt;

use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::model::reasons;
use crate::model::requests::{Amounts, Overhead, pod_requests};

use crate::model::node::Allocatable;

/// One resource of which the node has too little; CPU in millicores, others in units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shortage {
    pub(super) resource: String,
    requested: i64,
    used: i64,
    capacity: i64,
}

impl Shortage {
    /// The amount that would have to be freed.
    pub(super) fn missing(&self) -> i64 {
        self.requested.saturating_sub(self.capacity.saturating_sub(self.used))
    }

    pub(super) fn reason(&self) -> Cow<'static, str> {
        match self.resource.as_str() {
            "pods" => Cow::Borrowed(reasons::OUT_OF_PODS),
            "cpu" => Cow::Borrowed(reasons::OUT_OF_CPU),
            "memory" => Cow::Borrowed(reasons::OUT_OF_MEMORY),
            "ephemeral-storage" => Cow::Borrowed(reasons::OUT_OF_EPHEMERAL_STORAGE),
            other => Cow::Owned(format!("OutOf{other}")),
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}",
            self.resource, self.requested, self.used, self.capacity
        )
    }
}

/// The amount of one resource that a pod requests, in the unit of [`Shortage`].
pub(super) fn taken(requests: &Amounts, resource: &str) -> i64 {
    match resource {
        "pods" => 1,
        "cpu" => requests.get("cpu").copied().unwrap_or(Amount::ZERO).milli(),
        other => requests.get(other).copied().unwrap_or(Amount::ZERO).units(),
    }
}

/// Whether a resource belongs to a vendor, not to Kubernetes itself.
fn is_extended(resource: &str) -> bool {
    resource.contains('/') && !resource.contains("kubernetes.io/") && !resource.starts_with("requests.")
}

/// What a pod requests of the node: not what it gets from resource claims.
fn requests(pod: &Pod) -> Amounts {
    let mut wanted = pod_requests(pod, Overhead::Included);
    let is_claimed = |name: &str| pod.all_containers().any(|container| pod.is_claimed(&container.name, name));
    wanted.retain(|name, _| is_basic_resource(name) || !is_claimed(name));
    wanted
}

/// All resources of which there is too little, in the order in which they are reported.
pub(super) fn shortages(pod: &Pod, others: &[&Pod], node: &Allocatable) -> Vec<Shortage> {
    let mut short = Vec::new();
    let count = i64::try_from(others.len()).unwrap_or(i64::MAX);
    if count.saturating_add(1) > node.pods {
        short.push(Shortage { resource: "pods".to_owned(), requested: 1, used: count, capacity: node.pods });
    }
    let wanted = requests(pod);
    if wanted.values().all(|amount| amount.is_zero()) {
        return short;
    }
    let mut rows = vec![
        ("cpu", node.cpu_milli),
        ("memory", node.memory_bytes),
        ("ephemeral-storage", node.ephemeral_bytes),
    ];
    for name in wanted.keys().filter(|name| !is_basic_resource(name)) {
        match node.extended.get(name) {
            Some(capacity) => rows.push((name, *capacity)),
            // No component of this node manages the resource, so it is not a reason to refuse.
            None if is_extended(name) => {}
            None => rows.push((name, 0)),
        }
    }
    let used: Vec<Amounts> = others.iter().map(|other| requests(other)).collect();
    for (resource, capacity) in rows {
        let requested = taken(&wanted, resource);
        let used = used.iter().fold(0_i64, |sum, other| sum.saturating_add(taken(other, resource)));
        if requested > 0 && requested > capacity.saturating_sub(used) {
            short.push(Shortage { resource: resource.to_owned(), requested, used, capacity });
        }
    }
    short
}

fn is_basic_resource(resource: &str) -> bool {
    matches!(resource, "cpu" | "memory" | "ephemeral-storage")
}
