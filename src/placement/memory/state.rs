//! The state of the policy `Static` (Go: memorymanager `staticPolicy` and `manager`).

use std::collections::{BTreeMap, BTreeSet};

use super::hints::{best, possible, requests_memory, satisfies};
use super::requests::{Bytes, container_bytes, pod_bytes};
use super::reserved::Reserved;
use super::tables::{Assignments, Block, Nodes, PodAssignments, empty, give_back, take, violates_groups};
use crate::model::api::Container;
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::{Pod, is_sidecar};
use crate::placement::numa::{Hint, NumaMask};
use crate::placement::numa_nodes::NumaNode;
use crate::placement::topology::{AllocateError, Candidate, Hints, Provider, is_guaranteed};

/// What each NUMA node has, and what each container has of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    pub(super) nodes: Nodes,
    pub(super) assignments: Assignments,
    /// What pods have as a whole: it is released with their last container. What their containers have
    /// is a part of it.
    pub(super) pods: PodAssignments,
    /// What the init containers of the pod that is being admitted leave to its later containers,
    /// by nodes and resource.
    reusable: Option<(PodUid, BTreeMap<NumaMask, Bytes>)>,
    pub(super) changed: bool,
}

impl Memory {
    /// Nothing is allocated yet. It has to be written.
    #[must_use]
    pub fn new(machine: &[NumaNode], reserved: &Reserved) -> Memory {
        let nodes = empty(machine, reserved);
        Memory { changed: true, ..Memory::from_parts(nodes, Assignments::new(), PodAssignments::new()) }
    }

    pub(super) fn from_parts(nodes: Nodes, assignments: Assignments, pods: PodAssignments) -> Memory {
        Memory { nodes, assignments, pods, reusable: None, changed: false }
    }

    /// Whether anything changed since the last call, so that the state file is outdated.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// The nodes for `cpuset_mems` of a container; `None`: it may use all (Go:
    /// `GetMemoryNUMANodes`). They are set when the container is created, and never changed.
    #[must_use]
    pub fn cpuset_mems(&self, uid: &PodUid, container: &str) -> Option<NumaMask> {
        let all = self.blocks(uid, container).iter().fold(0, |all, block| all | block.nodes.0);
        Some(NumaMask(all)).filter(|nodes| !nodes.is_empty())
    }

    /// What a container has (for the pod-resources API).
    pub fn blocks(&self, uid: &PodUid, container: &str) -> &[Block] {
        self.entry(uid, container).unwrap_or_default()
    }

    /// What a pod has as a whole (for the pod-resources API).
    #[must_use]
    pub fn pod_blocks(&self, uid: &PodUid) -> &[Block] {
        self.pods.get(uid).map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether a container that has memory has it for itself alone: in a pod with memory as a whole, only
    /// if it is entitled to it (Go: `GetResourceIsolationLevel`).
    #[must_use]
    pub fn is_isolated(&self, pod: Candidate<'_>, container: &Container) -> bool {
        let uid = pod.pod.uid();
        let shares = pod.as_whole || self.pods.contains_key(uid);
        !self.blocks(uid, &container.name).is_empty() && (!shares || is_guaranteed(container))
    }

    /// What containers have, by pod and container.
    pub fn assignments(&self) -> &Assignments {
        &self.assignments
    }

    /// The nodes.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// What containers can have of each node (for the pod-resources API).
    #[must_use]
    pub fn allocatable(&self) -> Vec<Block> {
        let tables = self.nodes.iter().flat_map(|(number, node)| {
            node.tables.iter().map(|(resource, table)| (*number, resource.clone(), table.allocatable))
        });
        let blocks = tables.filter(|(_, _, bytes)| *bytes > 0);
        blocks
            .map(|(number, resource, bytes)| Block {
                nodes: NumaMask::from_numbers([number]),
                resource,
                bytes,
            })
            .collect()
    }

    /// A container of the pod starts: the plain init containers before it have ended, and what they
    /// have is released (Go: `AddContainer`).
    pub fn release_ended_init_containers(&mut self, pod: &Pod, container: &str) {
        let before = pod.init_containers().iter().take_while(|init| init.name != container);
        for init in before.filter(|init| !is_sidecar(init)) {
            self.release(pod.uid(), &init.name);
        }
    }

    /// Releases what a container has; the caller removed it.
    pub fn release(&mut self, uid: &PodUid, container: &str) {
        let Some(containers) = self.assignments.get_mut(uid) else { return };
        let Some(mut blocks) = containers.remove(container) else { return };
        let is_last = containers.is_empty();
        if is_last {
            self.assignments.remove(uid);
        }
        if self.pods.contains_key(uid) {
            blocks = if is_last { self.pods.remove(uid).unwrap_or_default() } else { Vec::new() };
        }
        blocks.iter().for_each(|block| give_back(&mut self.nodes, block));
        self.changed = true;
    }

    /// Releases what containers have that are not in `active`: the pods that are neither over nor
    /// removed, with the one that is being admitted. Pods that are not in it keep what they have
    /// while they run. Upstream does this before each admission, if all sources of pods are ready
    /// (Go: `removeStaleState`).
    pub fn release_inactive<'a>(
        &mut self,
        active: impl IntoIterator<Item = &'a Pod>,
        still_runs: &dyn Fn(&PodUid) -> bool,
    ) {
        let mut known: BTreeMap<&PodUid, BTreeSet<&str>> = BTreeMap::new();
        for pod in active {
            if self.assignments.contains_key(pod.uid()) {
                known.insert(
                    pod.uid(),
                    pod.all_containers().map(|container| container.name.as_str()).collect(),
                );
            }
        }
        let mut stale = Vec::new();
        for (uid, containers) in &self.assignments {
            let known = known.get(uid);
            if known.is_none() && still_runs(uid) {
                continue;
            }
            let names = containers.keys().filter(|name| known.is_none_or(|all| !all.contains(name.as_str())));
            stale.extend(names.map(|name| (uid.clone(), name.clone())));
        }
        stale.iter().for_each(|(uid, container)| self.release(uid, container));
    }

    fn entry(&self, uid: &PodUid, container: &str) -> Option<&[Block]> {
        self.assignments.get(uid)?.get(container).map(Vec::as_slice)
    }

    pub(super) fn reusable(&self, uid: &PodUid, nodes: NumaMask, resource: &str) -> u64 {
        let of_pod = self.reusable.as_ref().filter(|(owner, _)| owner == uid).map(|(_, all)| all);
        of_pod.and_then(|all| all.get(&nodes)?.get(resource)).copied().unwrap_or(0)
    }

    fn possible(&self, pod: &Pod, requested: &Bytes) -> Vec<Hint> {
        possible(&self.nodes, requested, |nodes, resource| self.reusable(pod.uid(), nodes, resource))
    }

    pub(super) fn hints_of(&self, pod: &Pod, requested: &Bytes) -> Hints {
        let hints = self.possible(pod, requested);
        if hints.is_empty() {
            // As upstream: then there is no preference, and the allocation fails.
            return Hints::new();
        }
        requested.keys().map(|resource| (resource.clone(), hints.clone())).collect()
    }

    /// The nodes for a request: those of the hint, or more if it has not enough.
    pub(super) fn choose(&self, pod: &Pod, requested: &Bytes, hint: Hint) -> Result<NumaMask, &'static str> {
        let (mut nodes, preferred) = match hint.nodes {
            Some(nodes) => (nodes, hint.preferred),
            None => {
                let possible = best(self.possible(pod, requested));
                let Some((nodes, preferred)) = possible.filter(|_| requests_memory(requested)) else {
                    return Err("failed to get the default NUMA affinity, no NUMA nodes with enough memory \
                                is available");
                };
                if hint.preferred && !preferred {
                    return Err("failed to find the default preferred hint");
                }
                (nodes, preferred)
            }
        };
        if !satisfies(&self.nodes, nodes, requested) {
            let possible = self.possible(pod, requested).into_iter();
            let larger = possible.filter(|hint| hint.nodes.is_some_and(|more| more.and(nodes) == nodes));
            let Some(extended) = best(larger).filter(|_| requests_memory(requested)) else {
                return Err("failed to find NUMA nodes to extend the current topology hint");
            };
            if preferred && !extended.1 {
                return Err("failed to find the extended preferred hint");
            }
            nodes = extended.0;
        }
        if violates_groups(&self.nodes, nodes) {
            return Err("preferred hint violates NUMA node allocation");
        }
        Ok(nodes)
    }

    /// Notes what an init container leaves to later ones, or what a later one uses of it
    /// (Go: `updatePodReusableMemory`).
    fn note_reusable(&mut self, pod: &Pod, container: &Container, blocks: &[Block]) {
        let same = self.reusable.take().filter(|(owner, _)| owner == pod.uid());
        let (owner, mut all) = same.unwrap_or_else(|| (pod.uid().clone(), BTreeMap::new()));
        let init = pod.init_containers().iter().find(|init| init.name == container.name);
        let leaves = init.is_some_and(|init| !is_sidecar(init));
        for block in blocks {
            let left = all.entry(block.nodes).or_default().entry(block.resource.clone()).or_insert(0);
            *left = if leaves { (*left).max(block.bytes) } else { left.saturating_sub(block.bytes) };
        }
        self.reusable = Some((owner, all));
    }

    /// Takes what a container reuses off the blocks of the init containers before it, so that the
    /// blocks of a pod add up to what it has (Go: `updateInitContainersMemoryBlocks`).
    fn shrink_init_containers(&mut self, pod: &Pod, container: &Container, blocks: &[Block]) {
        let Some(containers) = self.assignments.get_mut(pod.uid()) else { return };
        for block in blocks {
            let mut left = block.bytes;
            let before = pod.init_containers().iter().take_while(|init| init.name != container.name);
            for init in before.filter(|init| !is_sidecar(init)) {
                let same =
                    |other: &&mut Block| other.resource == block.resource && other.nodes == block.nodes;
                for earlier in containers.get_mut(&init.name).into_iter().flatten().filter(same) {
                    let reused = earlier.bytes.min(left);
                    earlier.bytes -= reused;
                    left -= reused;
                }
            }
        }
    }
}

impl Provider for Memory {
    fn hints(&self, pod: Candidate<'_>, container: &Container) -> Hints {
        if !pod.exclusive {
            return Hints::new();
        }
        // Upstream: no preference; the allocation fails.
        let Ok(requested) = container_bytes(pod, container) else { return Hints::new() };
        if requested.is_empty() {
            return Hints::new();
        }
        match self.entry(pod.pod.uid(), &container.name) {
            Some(blocks) => existing(blocks, &requested),
            None => self.hints_of(pod.pod, &requested),
        }
    }

    fn pod_hints(&self, candidate: Candidate<'_>) -> Hints {
        let Candidate { pod, exclusive, .. } = candidate;
        if !exclusive {
            return Hints::new();
        }
        let Ok(requested) = pod_bytes(candidate) else { return Hints::new() };
        if candidate.as_whole {
            return self.whole_hints(candidate, &requested);
        }
        let mut blocks = pod.all_containers().filter_map(|container| self.entry(pod.uid(), &container.name));
        match blocks.next() {
            Some(blocks) => existing(blocks, &requested),
            None => self.hints_of(pod, &requested),
        }
    }

    fn allocate(
        &mut self,
        candidate: Candidate<'_>,
        container: &Container,
        hint: Hint,
    ) -> Result<(), AllocateError> {
        let Candidate { pod, exclusive, gate, .. } = candidate;
        if !exclusive {
            return Ok(());
        }
        let requested = container_bytes(candidate, container);
        if requested.as_ref().is_ok_and(Bytes::is_empty) {
            return Ok(());
        }
        metrics::MEMORY_PINNINGS.inc();
        if let Some(blocks) = self.entry(pod.uid(), &container.name).map(<[Block]>::to_vec) {
            self.note_reusable(pod, container, &blocks);
            return Ok(());
        }
        let unexpected = |message: String| {
            metrics::MEMORY_PINNING_ERRORS.inc();
            if gate {
                metrics::RESOURCE_ALLOCATION_ERRORS.inc(["memory", "node"]);
            }
            AllocateError::Unexpected(message)
        };
        let requested = requested.map_err(|error| unexpected(error.to_string()))?;
        let chosen = self.choose(pod, &requested, hint);
        let nodes = chosen.map_err(|reason| unexpected(format!("[memorymanager] {reason}")))?;
        let mut blocks = Vec::new();
        for (resource, bytes) in requested {
            let new = bytes.saturating_sub(self.reusable(pod.uid(), nodes, &resource));
            take(&mut self.nodes, nodes, &resource, new);
            if gate {
                metrics::RESOURCE_ALLOCATIONS.inc(["memory", "node"]);
            }
            blocks.push(Block { nodes, resource, bytes });
        }
        self.note_reusable(pod, container, &blocks);
        let of_pod = self.assignments.entry(pod.uid().clone()).or_default();
        of_pod.insert(container.name.clone(), blocks.clone());
        self.shrink_init_containers(pod, container, &blocks);
        self.changed = true;
        if gate {
            metrics::RESOURCE_ASSIGNMENTS.inc(["memory", "node_exclusive"]);
        }
        Ok(())
    }

    fn allocate_pod(&mut self, pod: Candidate<'_>, hint: Hint) -> Result<(), AllocateError> {
        self.allocate_whole(pod, hint)
    }
}

/// The hints of a container that has its blocks already; none if they are not what it requests
/// (Go: `regenerateHints`).
fn existing(blocks: &[Block], requested: &Bytes) -> Hints {
    let mut hints: Hints = requested.keys().map(|resource| (resource.clone(), Vec::new())).collect();
    if blocks.len() != requested.len() {
        return Hints::new();
    }
    for block in blocks {
        if requested.get(&block.resource) != Some(&block.bytes) {
            return Hints::new();
        }
        let hint = Hint { nodes: Some(block.nodes), preferred: true };
        hints.entry(block.resource.clone()).or_default().push(hint);
    }
    hints
}
