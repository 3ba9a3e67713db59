//! What NUMA nodes have, and what of it is in use (Go: memorymanager/state `NUMANodeMap`).

use std::collections::BTreeMap;

use super::reserved::Reserved;
use crate::model::ids::PodUid;
use crate::model::quantity::{Amount, Form};
use crate::placement::numa::NumaMask;
use crate::placement::numa_nodes::NumaNode;

/// The resource that is not huge pages.
pub(super) const MEMORY: &str = "memory";

/// Bytes of one resource of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Table {
    /// All of it.
    pub total: u64,
    /// For the system, not for containers.
    pub system_reserved: u64,
    /// For containers: the rest; for memory without the huge pages.
    pub allocatable: u64,
    /// Allocated to containers.
    pub reserved: u64,
    /// Not yet allocated.
    pub free: u64,
}

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeState {
    /// How many blocks are on it.
    pub assignments: u64,
    /// By resource: `memory`, `hugepages-2Mi`.
    pub tables: BTreeMap<String, Table>,
    /// The group of nodes that its blocks use; only the node itself while it has none.
    pub cells: NumaMask,
}

/// The nodes, by number.
pub type Nodes = BTreeMap<u32, NodeState>;

/// Bytes of one resource that a container has on a set of nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Never empty.
    pub nodes: NumaMask,
    /// `memory`, `hugepages-2Mi`.
    pub resource: String,
    /// Can be 0 for an init container whose memory a later container uses.
    pub bytes: u64,
}

/// Blocks by pod and container.
pub type Assignments = BTreeMap<PodUid, BTreeMap<String, Vec<Block>>>;

/// Blocks of pods that were allocated as a whole, by pod.
pub(super) type PodAssignments = BTreeMap<PodUid, Vec<Block>>;

/// The nodes of the machine while nothing is allocated (Go: `getDefaultMachineState`).
///
/// DIFFERS: a reservation that is larger than the resource leaves 0; upstream gets a number near
/// 2⁶⁴.
pub(super) fn empty(machine: &[NumaNode], reserved: &Reserved) -> Nodes {
    let table = |total: u64, system_reserved: u64, huge: u64| {
        let allocatable = total.saturating_sub(system_reserved).saturating_sub(huge);
        Table { total, system_reserved, allocatable, reserved: 0, free: allocatable }
    };
    let state = |node: &NumaNode| {
        let mut tables = BTreeMap::new();
        let mut huge = 0_u64;
        for (size, count) in &node.huge_pages {
            let resource = huge_page_resource(*size);
            let total = size.saturating_mul(*count);
            huge = huge.saturating_add(total);
            let system = reserved.bytes(node.number, &resource);
            tables.insert(resource, table(total, system, 0));
        }
        let system = reserved.bytes(node.number, MEMORY);
        tables.insert(MEMORY.to_owned(), table(node.memory_bytes, system, huge));
        NodeState { assignments: 0, tables, cells: NumaMask::from_numbers([node.number]) }
    };
    machine.iter().map(|node| (node.number, state(node))).collect()
}

/// `hugepages-2Mi` for pages of 2 MiB.
fn huge_page_resource(size: u64) -> String {
    let size = Amount::from_units(i64::try_from(size).unwrap_or(i64::MAX));
    format!("hugepages-{}", size.format(Form::Binary))
}

/// Whether it is a resource of this manager.
pub(super) fn is_memory(resource: &str) -> bool {
    resource == MEMORY || resource.starts_with("hugepages-")
}

/// The sum of one number over the tables of a resource on `mask`. A node without the resource has
/// nothing of it.
///
/// DIFFERS: upstream panics if a pod requests a size of huge pages that a node does not have.
pub(super) fn sum(nodes: &Nodes, mask: NumaMask, resource: &str, number: fn(&Table) -> u64) -> u64 {
    let tables = mask.iter().filter_map(|node| nodes.get(&node)?.tables.get(resource));
    tables.map(number).fold(0, u64::saturating_add)
}

/// Adds a block: its bytes are taken from its nodes in order, as far as they have them
/// (Go: `updateMachineState`). `bytes` can be less than the block has, where memory is reused.
pub(super) fn take(nodes: &mut Nodes, mask: NumaMask, resource: &str, bytes: u64) {
    let mut left = bytes;
    for number in mask.iter() {
        let Some(node) = nodes.get_mut(&number) else { continue };
        node.assignments = node.assignments.saturating_add(1);
        node.cells = mask;
        let Some(table) = node.tables.get_mut(resource) else { continue };
        let taken = table.free.min(left);
        table.free -= taken;
        table.reserved = table.reserved.saturating_add(taken);
        left -= taken;
    }
}

/// Removes a block (Go: `releaseMemory`).
pub(super) fn give_back(nodes: &mut Nodes, block: &Block) {
    let mut left = block.bytes;
    for number in block.nodes.iter() {
        let Some(node) = nodes.get_mut(&number) else { continue };
        node.assignments = node.assignments.saturating_sub(1);
        if node.assignments == 0 {
            node.cells = NumaMask::from_numbers([number]);
        }
        let Some(table) = node.tables.get_mut(&block.resource) else { continue };
        let given = table.reserved.min(left);
        table.reserved -= given;
        table.free = table.free.saturating_add(given);
        left -= given;
    }
}

/// Whether a block on `mask` would use nodes that are in another group. Blocks on a single node
/// are compatible with everything here (Go: `isAffinityViolatingNUMAAllocations`).
pub(super) fn violates_groups(nodes: &Nodes, mask: NumaMask) -> bool {
    let used = |number| nodes.get(&number).filter(|node: &&NodeState| node.assignments > 0);
    mask.len() > 1 && mask.iter().filter_map(used).any(|node| node.cells != mask)
}
