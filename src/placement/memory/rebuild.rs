//! The state without a usable state file: from the containers that run.

use super::requests::container_bytes;
use super::reserved::Reserved;
use super::state::Memory;
use super::tables::{Assignments, Block, Nodes, empty, take, violates_groups};
use crate::model::api::Container;
use crate::model::ids::PodUid;
use crate::placement::numa::NumaMask;
use crate::placement::numa_nodes::{NumaNode, all};
use crate::placement::topology::Candidate;

/// A container that runs.
#[derive(Debug, Clone, Copy)]
pub struct RunningContainer<'a> {
    /// Its pod, with the resources that were allocated to it.
    pub pod: Candidate<'a>,
    /// As in the pod.
    pub container: &'a Container,
    /// Its `cpuset_mems` as the runtime reports them; `None` if it has none.
    pub mems: Option<NumaMask>,
}

/// A container whose memory is not in the rebuilt state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the memory of container {container} of pod {pod} is not known: {reason}")]
pub struct Problem {
    /// Its pod.
    pub pod: PodUid,
    /// Its name.
    pub container: String,
    /// For people.
    pub reason: &'static str,
}

impl Memory {
    /// Rebuilds the state: each running container of a Guaranteed pod has what it requests on the
    /// nodes that it is bound to. The first containers win if two contradict each other. The state
    /// has to be written.
    ///
    /// DIFFERS: upstream does not start, and its operator has to drain the node.
    pub fn rebuild<'a>(
        machine: &[NumaNode],
        reserved: &Reserved,
        running: impl IntoIterator<Item = RunningContainer<'a>>,
    ) -> (Memory, Vec<Problem>) {
        let mut nodes = empty(machine, reserved);
        let mut assignments = Assignments::new();
        let mut problems = Vec::new();
        for instance in running {
            let (uid, name) = (instance.pod.pod.uid(), &instance.container.name);
            if !instance.pod.entitles(instance.container) {
                continue;
            }
            if assignments.get(uid).is_some_and(|containers| containers.contains_key(name)) {
                continue;
            }
            match blocks(&nodes, all(machine), instance) {
                Ok(blocks) => {
                    for block in &blocks {
                        take(&mut nodes, block.nodes, &block.resource, block.bytes);
                    }
                    assignments.entry(uid.clone()).or_default().insert(name.clone(), blocks);
                }
                Err(reason) => problems.push(Problem { pod: uid.clone(), container: name.clone(), reason }),
            }
        }
        let mut memory = Memory::new(machine, reserved);
        (memory.nodes, memory.assignments) = (nodes, assignments);
        (memory, problems)
    }
}

impl Memory {
    /// A container runs that is not in the state: it has what it requests on the nodes that it is bound
    /// to. Containers that are not entitled to memory of their own, or are in the state, are left alone. So
    /// are those of a pod that has memory as a whole: what they have is a part of it, also of an init
    /// container whose part was released.
    ///
    /// # Errors
    /// When that contradicts the state, which then does not change.
    pub fn add_running(&mut self, instance: RunningContainer<'_>) -> Result<(), Problem> {
        let (uid, name) = (instance.pod.pod.uid(), &instance.container.name);
        let is_known = self.pods.contains_key(uid) || !self.blocks(uid, name).is_empty();
        if is_known || !instance.pod.entitles(instance.container) {
            return Ok(());
        }
        let machine = NumaMask::from_numbers(self.nodes.keys().copied());
        let problem = |reason| Problem { pod: uid.clone(), container: name.clone(), reason };
        let blocks = blocks(&self.nodes, machine, instance).map_err(problem)?;
        for block in &blocks {
            take(&mut self.nodes, block.nodes, &block.resource, block.bytes);
        }
        self.assignments.entry(uid.clone()).or_default().insert(name.clone(), blocks);
        self.changed = true;
        Ok(())
    }
}

fn blocks(nodes: &Nodes, all: NumaMask, instance: RunningContainer<'_>) -> Result<Vec<Block>, &'static str> {
    let mems = instance.mems.filter(|mems| !mems.is_empty()).ok_or("it is not bound to NUMA nodes")?;
    if mems.and(all) != mems {
        return Err("it is bound to NUMA nodes that do not exist");
    }
    let grouped = |number| nodes.get(&number).is_some_and(|node| node.cells.len() > 1);
    if violates_groups(nodes, mems) || (mems.len() == 1 && mems.iter().any(grouped)) {
        return Err("its NUMA nodes are in another group");
    }
    let requested =
        container_bytes(instance.pod, instance.container).map_err(|_| "it requests a fraction of a byte")?;
    let lacks = |number, name: &String| nodes.get(&number).is_none_or(|node| !node.tables.contains_key(name));
    if mems.iter().any(|number| requested.keys().any(|name| lacks(number, name))) {
        return Err("it requests huge pages of a size that its NUMA nodes do not have");
    }
    Ok(requested.into_iter().map(|(resource, bytes)| Block { nodes: mems, resource, bytes }).collect())
}
