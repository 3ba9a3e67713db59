//! A pod to evict, and how.

use super::texts::Annotations;
use crate::model::pod::Pod;

/// The grace period of evictions that cannot wait (Go: eviction
/// `immediateEvictionGracePeriodSeconds`).
pub(super) const IMMEDIATE_GRACE_SECONDS: i64 = 1;

/// A pod to evict. Its status becomes `Failed` with the reason `Evicted` and the message, which is
/// also that of a Warning event `Evicted` on the pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Victim {
    /// The pod.
    pub pod: Pod,
    /// The grace period, in seconds; a shorter one that is already in force stays.
    pub grace_seconds: i64,
    /// For the status, the event, and the condition. Ends in a space.
    pub message: String,
    /// Of the event.
    pub annotations: Annotations,
    /// Whether the pod gets the condition `DisruptionTarget`, with status True, the reason
    /// `TerminationByKubelet` and the message.
    pub disruption_target: bool,
    /// The label of `kubelet_evictions`.
    pub signal: &'static str,
}
