//! What containers and pods request of memory and huge pages.

use std::collections::BTreeMap;

use super::tables::is_memory;
use crate::model::api::{Container, ResourceRequirements};
use crate::model::pod::is_sidecar;
use crate::model::requests::requests_of;
use crate::placement::topology::Candidate;

/// Bytes by resource.
pub(super) type Bytes = BTreeMap<String, u64>;

/// A request is a fraction, or more than any machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("[memorymanager] failed to represent quantity as int64")]
pub(super) struct NotBytes;

/// What a container has for itself of what it requests (Go: `getContainerRequestedResources`).
///
/// DIFFERS: upstream refuses whole numbers that are written as fractions, such as 1.5Gi; an API
/// server writes them as 1536Mi.
pub(super) fn container_bytes(pod: Candidate<'_>, container: &Container) -> Result<Bytes, NotBytes> {
    if pod.as_whole && !pod.entitles(container) {
        return Ok(Bytes::new());
    }
    bytes(container.resources.as_ref())
}

fn bytes(resources: Option<&ResourceRequirements>) -> Result<Bytes, NotBytes> {
    let mut bytes = Bytes::new();
    for (name, amount) in requests_of(resources) {
        if is_memory(&name) {
            let units = amount.units();
            if !amount.is_whole() || units == i64::MAX {
                return Err(NotBytes);
            }
            bytes.insert(name, u64::try_from(units).unwrap_or(0));
        }
    }
    Ok(bytes)
}

/// What a pod requests as a whole, or its containers together, as far as app containers request it at all
/// (Go: `getPodRequestedResources`).
pub(super) fn pod_bytes(candidate: Candidate<'_>) -> Result<Bytes, NotBytes> {
    let pod = candidate.pod;
    if candidate.as_whole {
        let mut whole = bytes(pod.spec().resources.as_ref())?;
        whole.retain(|_, bytes| *bytes > 0);
        return Ok(whole);
    }
    let (mut sidecars, mut peaks, mut total) = (Bytes::new(), Bytes::new(), Bytes::new());
    for container in pod.init_containers() {
        for (name, bytes) in container_bytes(candidate, container)? {
            let sidecar_bytes = sidecars.entry(name.clone()).or_default();
            if is_sidecar(container) {
                *sidecar_bytes = sidecar_bytes.saturating_add(bytes);
            } else {
                let peak = peaks.entry(name).or_default();
                *peak = (*peak).max(sidecar_bytes.saturating_add(bytes));
            }
        }
    }
    for container in pod.containers() {
        for (name, bytes) in container_bytes(candidate, container)? {
            let sum = total.entry(name).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    for (name, sum) in &mut total {
        *sum = sum.saturating_add(sidecars.get(name).copied().unwrap_or(0));
        *sum = (*sum).max(peaks.get(name).copied().unwrap_or(0));
    }
    Ok(total)
}
