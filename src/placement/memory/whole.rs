//! Pods with resources of the whole pod (gate `PodLevelResourceManagers`): such a pod gets its memory at
//! once. Its containers have some of it for themselves, and share what is left (Go:
//! pkg/kubelet/cm/memorymanager/policy_static.go `AllocatePod`).

use std::collections::BTreeMap;

use super::requests::{Bytes, container_bytes, pod_bytes};
use super::state::Memory;
use super::tables::{Block, take};
use crate::model::api::Container;
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::is_sidecar;
use crate::placement::numa::{Hint, NumaMask};
use crate::placement::topology::{AllocateError, Candidate, EMPTY_POOL, Hints};

/// What the containers of a pod have of its memory.
#[derive(Default)]
struct Shares {
    /// By container; the others have `left`.
    own: BTreeMap<String, Bytes>,
    /// Containers that have requests of their own.
    exclusive: Vec<String>,
    left: Bytes,
}

impl Memory {
    /// The hints for a pod that gets memory as a whole. If it would have none to share, no nodes do. What
    /// it has already does not follow a resize.
    pub(super) fn whole_hints(&self, pod: Candidate<'_>, requested: &Bytes) -> Hints {
        let uid = pod.pod.uid();
        if let Some(blocks) = self.pods.get(uid) {
            let mut hints = Hints::new();
            for block in blocks {
                let hint = Hint { nodes: Some(block.nodes), preferred: true };
                hints.entry(block.resource.clone()).or_default().push(hint);
            }
            return hints;
        }
        if check_shared(pod, requested).is_err() {
            return requested.keys().map(|resource| (resource.clone(), Vec::new())).collect();
        }
        if requested.is_empty() {
            return Hints::new();
        }
        if !self.assignments.contains_key(uid) {
            return self.hints_of(pod.pod, requested);
        }
        let mut without = self.clone();
        without.release_all(uid);
        without.hints_of(pod.pod, requested)
    }

    /// Takes back what the containers of a pod have.
    fn release_all(&mut self, uid: &PodUid) {
        let of_pod = self.assignments.get(uid).into_iter().flat_map(BTreeMap::keys);
        let names: Vec<String> = of_pod.cloned().collect();
        for name in names {
            self.release(uid, &name);
        }
    }

    /// Gives a pod the memory that it requests as a whole, and divides it. A pod of the state keeps its
    /// memory. What its containers had one by one is taken back first.
    ///
    /// DIFFERS: upstream allocates the memory of a pod that it knows already (after a restart of the agent)
    /// once more.
    pub(super) fn allocate_whole(&mut self, pod: Candidate<'_>, hint: Hint) -> Result<(), AllocateError> {
        let uid = pod.pod.uid();
        // Upstream: a pod whose requests are no numbers of bytes shares the memory of the node.
        let Ok(requested) = pod_bytes(pod) else { return Ok(()) };
        if !pod.exclusive || self.pods.contains_key(uid) {
            return Ok(());
        }
        metrics::MEMORY_PINNINGS.inc();
        let counted = |error| {
            metrics::MEMORY_PINNING_ERRORS.inc();
            metrics::RESOURCE_ALLOCATION_ERRORS.inc(["memory", "pod"]);
            error
        };
        check_shared(pod, &requested).map_err(counted)?;
        self.release_all(uid);
        let chosen = self.choose(pod.pod, &requested, hint);
        let unexpected = |reason: &str| AllocateError::Unexpected(format!("[memorymanager] {reason}"));
        let nodes = chosen.map_err(|reason| counted(unexpected(reason)))?;
        let shares = divide(pod, &requested).map_err(counted)?;
        for (resource, bytes) in &requested {
            take(&mut self.nodes, nodes, resource, *bytes);
        }
        let mut containers = BTreeMap::new();
        for container in pod.pod.all_containers() {
            let bytes = shares.own.get(&container.name).unwrap_or(&shares.left);
            containers.insert(container.name.clone(), blocks(nodes, bytes));
            metrics::RESOURCE_ALLOCATIONS.inc(["memory", "pod"]);
            let is_exclusive = shares.exclusive.contains(&container.name);
            if is_exclusive {
                metrics::MEMORY_PINNINGS.inc();
            }
            let kind = if is_exclusive { "pod_exclusive" } else { "pod_shared" };
            metrics::RESOURCE_ASSIGNMENTS.inc(["memory", kind]);
        }
        self.pods.insert(uid.clone(), blocks(nodes, &requested));
        self.assignments.insert(uid.clone(), containers);
        self.changed = true;
        Ok(())
    }
}

fn blocks(nodes: NumaMask, bytes: &Bytes) -> Vec<Block> {
    let block =
        |(resource, bytes): (&String, &u64)| Block { nodes, resource: resource.clone(), bytes: *bytes };
    bytes.iter().filter(|(_, bytes)| **bytes > 0).map(block).collect()
}

fn own_bytes(pod: Candidate<'_>, container: &Container) -> Result<Bytes, AllocateError> {
    container_bytes(pod, container).map_err(|error| AllocateError::Unexpected(error.to_string()))
}

fn minus(total: &Bytes, taken: &Bytes) -> Bytes {
    let left = |(name, bytes): (&String, &u64)| {
        (name.clone(), bytes.saturating_sub(taken.get(name).copied().unwrap_or(0)))
    };
    total.iter().map(left).collect()
}

fn add(sum: &mut Bytes, more: &Bytes) {
    for (name, bytes) in more {
        let entry = sum.entry(name.clone()).or_default();
        *entry = entry.saturating_add(*bytes);
    }
}

/// The memory of each container of a pod. An init container without memory of its own has all that
/// sidecars before it have left.
fn divide(pod: Candidate<'_>, total: &Bytes) -> Result<Shares, AllocateError> {
    let mut shares = Shares::default();
    let mut sidecars = Bytes::new();
    for container in pod.pod.init_containers() {
        let requested = own_bytes(pod, container)?;
        if !requested.is_empty() {
            if is_sidecar(container) {
                add(&mut sidecars, &requested);
            }
            shares.exclusive.push(container.name.clone());
            shares.own.insert(container.name.clone(), requested);
        } else if !is_sidecar(container) {
            shares.own.insert(container.name.clone(), minus(total, &sidecars));
        }
    }
    let mut taken = sidecars;
    for container in pod.pod.containers() {
        let requested = own_bytes(pod, container)?;
        if !requested.is_empty() {
            add(&mut taken, &requested);
            shares.exclusive.push(container.name.clone());
            shares.own.insert(container.name.clone(), requested);
        }
    }
    shares.left = minus(total, &taken);
    Ok(shares)
}

/// Whether what containers have for themselves leaves some of the pod's memory to those that share it
/// (Go: `validatePodScopeResources`).
fn check_shared(pod: Candidate<'_>, total: &Bytes) -> Result<(), AllocateError> {
    let used_up =
        |taken: &Bytes| total.iter().find(|(name, bytes)| taken.get(*name).copied().unwrap_or(0) >= **bytes);
    let denied = |message: String| AllocateError::Denied { reason: EMPTY_POOL, message };
    // Upstream gives this reason for each error of the check.
    let own_bytes =
        |container: &Container| container_bytes(pod, container).map_err(|error| denied(error.to_string()));
    let (mut taken, mut shares) = (Bytes::new(), false);
    for container in pod.pod.init_containers() {
        let requested = own_bytes(container)?;
        if is_sidecar(container) {
            shares |= requested.is_empty();
            add(&mut taken, &requested);
        } else if let Some((name, _)) = used_up(&taken).filter(|_| requested.is_empty()) {
            return Err(denied(format!(
                "pod rejected, pod has shared init containers but no {name} available for them"
            )));
        }
    }
    for container in pod.pod.containers() {
        let requested = own_bytes(container)?;
        shares |= requested.is_empty();
        add(&mut taken, &requested);
    }
    if let Some((name, _)) = used_up(&taken).filter(|_| shares) {
        return Err(denied(format!(
            "pod rejected, sum of exclusive container {name} requests equals pod budget, leaving no memory for \
             shared containers"
        )));
    }
    Ok(())
}
