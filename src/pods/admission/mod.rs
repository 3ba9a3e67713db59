//! Whether a pod may run on this node, decided once, before it is started.
//!
//! Owns nothing and does nothing but count a metric: [`admit`] maps a pod, the other active pods and a view of
//! the node onto an [`Admission`]; the caller carries it out, including the preemption.
//! Handlers run in a fixed order and the first refusal counts. A refusal is final for the UID.
//! Invariants: nothing here needs the API server; no pod is preempted for a pod that a later
//! handler refuses.
//! Absent on purpose: the resource managers, which the caller passes in; `InvalidNodeInfo`, because a
//! view of the node always exists.
//! Go counterpart: pkg/kubelet/lifecycle, preemption, sysctl, and pkg/security/apparmor.

mod apparmor;
mod decision;
mod features;
mod fit;
mod placement;
mod preempt;
mod resource_levels;
mod sysctl;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use crate::model::api::{PodStatus, Taint};
pub use crate::model::node::{Allocatable, NodeView};
use crate::model::pod::{Pod, QosClass};
use crate::model::pod_size::{self, Excess};
use crate::model::reasons;

pub use decision::Admission;
use decision::reject;
pub(crate) use resource_levels::count_admitted;

/// Message of a preempted pod.
pub const PREEMPTED_MESSAGE: &str = "Preempted in order to admit critical pod";
/// Message of the `DisruptionTarget` condition of a preempted pod.
pub const PREEMPTED_CONDITION: &str = "Pod was preempted by Kubelet to accommodate a critical pod.";

/// Whether a pod is new on this node, or runs and requests other resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Add,
    Resize,
}

/// Decides about `pod`, given the other active pods. `pod` itself among them is ignored.
#[must_use]
pub fn admit(pod: &Pod, others: &[Pod], node: &NodeView) -> Admission {
    admit_with(pod, others, node, &|| Admission::Admit)
}

/// As [`admit`]; `allocate` is the handler of the resource managers. What it allocates stays
/// allocated if a later handler refuses the pod, until the managers release what inactive pods have.
#[must_use]
pub fn admit_with(pod: &Pod, others: &[Pod], node: &NodeView, allocate: &dyn Fn() -> Admission) -> Admission {
    decide(pod, others, node, Operation::Add, allocate)
}

/// Whether the running pod `pod` may have the resources that it requests now.
///
/// DIFFERS: no pod is preempted for a resize, however critical the pod is.
///
/// # Errors
/// The first refusal.
pub fn admit_resize(pod: &Pod, others: &[Pod], node: &NodeView) -> Result<(), Refusal> {
    match decide(pod, others, node, Operation::Resize, &|| Admission::Admit) {
        Admission::Reject { reason, message } => Err((reason, message)),
        Admission::Admit | Admission::Preempt { .. } => Ok(()),
    }
}

/// The reason and the message of a refusal.
pub type Refusal = (Cow<'static, str>, String);

fn decide(
    pod: &Pod,
    others: &[Pod],
    node: &NodeView,
    operation: Operation,
    allocate: &dyn Fn() -> Admission,
) -> Admission {
    let others: Vec<&Pod> = others.iter().filter(|other| other.uid() != pod.uid()).collect();
    let mut outcome = Admission::Admit;
    // DIFFERS: all handlers run before any pod is preempted. Upstream preempts in between and may
    // then refuse the pod for which it preempted.
    let handlers: [&dyn Fn() -> Admission; 9] = [
        // The size is checked first, because the other handlers take time for each item.
        &|| size(pod),
        &|| pressure(pod, node),
        &|| sysctl::admit(pod, node),
        allocate,
        &|| predicates(pod, &others, node, operation),
        &|| apparmor::admit(pod, node),
        &|| features::admit_pod_resources(pod, node),
        &|| features::admit(pod, node),
        &|| shutdown(node),
    ];
    for handler in handlers {
        match handler() {
            Admission::Admit => {}
            refused @ Admission::Reject { .. } => return refused,
            preempt @ Admission::Preempt { .. } => outcome = preempt,
        }
    }
    outcome
}

/// Whether the pod's node selector or affinity excludes the node.
pub fn is_misplaced(pod: &Pod, node: &NodeView) -> bool {
    !placement::matches_affinity(pod, node)
}

/// Whether a refusal for this reason depends on the Node object: its labels, taints, and resources.
#[must_use]
pub fn depends_on_node(reason: &str) -> bool {
    let others = [
        reasons::NODE_AFFINITY,
        reasons::TAINT_TOLERATION,
        reasons::POD_OS_SELECTOR_NODE_LABEL_DOES_NOT_MATCH,
    ];
    // `OutOfcpu`, and also the extended resources (Go: pkg/kubelet/lifecycle, `generalFilter`).
    others.contains(&reason) || reason.starts_with("OutOf")
}

/// The status of a pod that waits for another decision about it.
#[must_use]
pub fn postponed_status(pod: &Pod, reason: &str, message: String, qos: QosClass) -> PodStatus {
    PodStatus { phase: Some("Pending".to_owned()), ..failed_status(pod, reason, message, qos) }
}

/// The complete status of a rejected pod.
#[must_use]
pub fn rejected_status(pod: &Pod, reason: &str, message: &str, qos: QosClass) -> PodStatus {
    failed_status(pod, reason, format!("Pod was rejected: {message}"), qos)
}

/// The status of a pod that failed before it started.
#[must_use]
pub fn failed_status(pod: &Pod, reason: &str, message: String, qos: QosClass) -> PodStatus {
    PodStatus {
        phase: Some("Failed".to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(message),
        qos_class: Some(qos.as_str().to_owned()),
        observed_generation: pod.object().metadata.generation.filter(|generation| *generation > 0),
        ..PodStatus::default()
    }
}

/// DIFFERS: upstream admits a pod of any size.
fn size(pod: &Pod) -> Admission {
    match pod_size::excess(pod.spec()) {
        None => Admission::Admit,
        Some(Excess { field, count, max }) => {
            reject(reasons::POD_TOO_LARGE, format!("spec.{field} has {count} items, the limit is {max}"))
        }
    }
}

/// A node under pressure accepts only pods that it must run.
fn pressure(pod: &Pod, node: &NodeView) -> Admission {
    if node.pressures.is_empty() || pod.is_critical() {
        return Admission::Admit;
    }
    if node.pressures == ["MemoryPressure"] {
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        };
        if pod.qos() != QosClass::BestEffort || placement::tolerates(pod, &taint) {
            return Admission::Admit;
        }
    }
    reject(reasons::EVICTED, format!("The node had condition: [{}]. ", node.pressures.join(" ")))
}

/// The scheduler's checks, for pods that it never saw.
fn predicates(pod: &Pod, others: &[&Pod], node: &NodeView, operation: Operation) -> Admission {
    let labels = pod.object().metadata.labels.as_ref();
    if labels.and_then(|labels| labels.get("kubernetes.io/os")).is_some_and(|os| *os != node.os) {
        return reject(
            reasons::POD_OS_SELECTOR_NODE_LABEL_DOES_NOT_MATCH,
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
        );
    }
    if pod.spec().os.as_ref().is_some_and(|os| os.name != node.os) {
        return reject(
            reasons::POD_OS_NOT_SUPPORTED,
            "Failed to admit pod as the OS field doesn't match node OS",
        );
    }
    let context = pod.spec().security_context.as_ref();
    let groups = context.and_then(|context| context.supplemental_groups_policy.as_deref());
    if groups == Some("Strict") && !node.strict_supplemental_groups {
        return reject(
            reasons::SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED,
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        );
    }
    let short = fit::shortages(pod, others, &node.allocatable);
    let misplaced = placement::failure(pod, others, node);
    match (short.first(), misplaced) {
        (None, None) => Admission::Admit,
        (None, Some(refused)) => refused,
        // Preemption can free resources for a critical pod; it cannot change the placement.
        (Some(_), Some(refused)) if pod.is_critical() => refused,
        (Some(first), None) if pod.is_critical() && operation == Operation::Add => {
            match preempt::victims(pod, others, &short) {
                Ok(victims) => Admission::Preempt { victims, resource: first.resource.clone() },
                Err(missing) => reject(
                    reasons::UNEXPECTED_ADMISSION_ERROR,
                    format!(
                        "Unexpected error while attempting to recover from admission failure: preemption: \
                     error finding a set of pods to preempt: {missing}"
                    ),
                ),
            }
        }
        (Some(first), _) => Admission::Reject { reason: first.reason(), message: first.to_string() },
    }
}

fn shutdown(node: &NodeView) -> Admission {
    if node.shutting_down {
        return reject(reasons::NODE_SHUTDOWN, "Pod was rejected as the node is shutting down.");
    }
    Admission::Admit
}
