//! The spans of a worker's steps (Go: SyncPod, SyncTerminatingPod, SyncTerminatedPod).

use crate::model::pod::Pod;
use crate::util::tracing::{self, Span, SpanKind};

/// Begins the span of a step. `update`: why the pod is synced.
pub(super) fn start(name: &'static str, pod: &Pod, update: Option<&'static str>) -> Span {
    let mut span = tracing::start(name, SpanKind::Internal);
    span.set("k8s.pod.uid", || pod.uid().as_str());
    span.set("k8s.pod", || format!("{}/{}", pod.namespace(), pod.name()));
    span.set("k8s.pod.name", || pod.name());
    if let Some(update) = update {
        span.set("k8s.pod.update_type", || update);
    }
    span.set("k8s.namespace.name", || pod.namespace());
    span
}

/// Ends the span of a step; `error`: why it has failed.
pub(super) fn end(mut span: Span, error: Option<&str>) {
    if let Some(error) = error {
        span.fail_with_event(error);
    }
}
