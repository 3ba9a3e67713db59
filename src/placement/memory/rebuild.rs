//! The books without a usable state file: from the containers that run.

use std::collections::BTreeMap;

use super::books::Memory;
use super::requests::of_container;
use super::reserved::Reserved;
use super::tables::{Assignments, Block, Nodes, empty, take, violates_groups};
use crate::model::api::Container;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::placement::numa::NumaMask;
use crate::placement::numa_nodes::{NumaNode, all};
use crate::placement::topology::Candidate;

/// A container that runs.
#[derive(Debug, Clone, Copy)]
pub struct Running<'a> {
    /// Its pod, with the resources that were allocated to it.
    pub pod: &'a Pod,
    /// As in the pod.
    pub container: &'a Container,
    /// Its `cpuset_mems` as the runtime reports them; `None` if it has none.
    pub mems: Option<NumaMask>,
}

/// A container whose memory is not in the rebuilt books.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the memory of container {container} of pod {pod} is not known: {why}")]
pub struct Problem {
    /// Its pod.
    pub pod: PodUid,
    /// Its name.
    pub container: String,
    /// For people.
    pub why: &'static str,
}

impl Memory {
    /// Rebuilds the books: each running container of a Guaranteed pod has what it requests on the
    /// nodes that it is bound to. The first containers win if two contradict each other. The books
    /// have to be written.
    ///
    /// DIFFERS: upstream does not start, and its operator has to drain the node.
    pub fn rebuild<'a>(
        machine: &[NumaNode],
        reserved: &Reserved,
        running: impl IntoIterator<Item = Running<'a>>,
    ) -> (Memory, Vec<Problem>) {
        let mut nodes = empty(machine, reserved);
        let mut assignments = Assignments::new();
        let mut problems = Vec::new();
        let mut exclusive = BTreeMap::new();
        for one in running {
            let (uid, name) = (one.pod.uid(), &one.container.name);
            if !*exclusive.entry(uid).or_insert_with(|| Candidate::of(one.pod).exclusive) {
                continue;
            }
            if assignments.get(uid).is_some_and(|containers| containers.contains_key(name)) {
                continue;
            }
            match blocks(&nodes, all(machine), one) {
                Ok(blocks) => {
                    for block in &blocks {
                        take(&mut nodes, block.nodes, &block.resource, block.bytes);
                    }
                    assignments.entry(uid.clone()).or_default().insert(name.clone(), blocks);
                }
                Err(why) => problems.push(Problem { pod: uid.clone(), container: name.clone(), why }),
            }
        }
        let mut memory = Memory::new(machine, reserved);
        (memory.nodes, memory.assignments) = (nodes, assignments);
        (memory, problems)
    }
}

impl Memory {
    /// A container runs that is not in the books: it has what it requests on the nodes that it is bound
    /// to. Containers that are not entitled to memory of their own, or are in the books, are left alone.
    ///
    /// # Errors
    /// When that contradicts the books, which then do not change.
    pub fn adopt(&mut self, one: Running<'_>) -> Result<(), Problem> {
        let (uid, name) = (one.pod.uid(), &one.container.name);
        if !Candidate::of(one.pod).exclusive || !self.blocks(uid, name).is_empty() {
            return Ok(());
        }
        let machine = NumaMask::of(self.nodes.keys().copied());
        let problem = |why| Problem { pod: uid.clone(), container: name.clone(), why };
        let blocks = blocks(&self.nodes, machine, one).map_err(problem)?;
        for block in &blocks {
            take(&mut self.nodes, block.nodes, &block.resource, block.bytes);
        }
        self.assignments.entry(uid.clone()).or_default().insert(name.clone(), blocks);
        self.changed = true;
        Ok(())
    }
}

fn blocks(nodes: &Nodes, all: NumaMask, one: Running<'_>) -> Result<Vec<Block>, &'static str> {
    let mems = one.mems.filter(|mems| !mems.is_empty()).ok_or("it is not bound to NUMA nodes")?;
    if mems.and(all) != mems {
        return Err("it is bound to NUMA nodes that do not exist");
    }
    let grouped = |number| nodes.get(&number).is_some_and(|node| node.cells.len() > 1);
    if violates_groups(nodes, mems) || (mems.len() == 1 && mems.iter().any(grouped)) {
        return Err("its NUMA nodes are in another group");
    }
    let requested = of_container(one.container).map_err(|_| "it requests a fraction of a byte")?;
    let lacks = |number, name: &String| nodes.get(&number).is_none_or(|node| !node.tables.contains_key(name));
    if mems.iter().any(|number| requested.keys().any(|name| lacks(number, name))) {
        return Err("it requests huge pages of a size that its NUMA nodes do not have");
    }
    Ok(requested.into_iter().map(|(resource, bytes)| Block { nodes: mems, resource, bytes }).collect())
}
