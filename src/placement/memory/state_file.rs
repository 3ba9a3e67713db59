//! The state file `memory_manager_state` in the layout of the Go kubelet (memorymanager/state
//! `MemoryManagerCheckpoint`).
//!
//! DIFFERS: a file that cannot be used keeps the Go kubelet from starting. Here it is an error
//! with a type: the caller puts the file aside and rebuilds the state from what runs
//! ([`Memory::rebuild`]).

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::reserved::Reserved;
use super::state::Memory;
use super::tables::{Assignments, Block, NodeState, Nodes, Table, empty, take};
use crate::model::ids::PodUid;
use crate::placement::checksum::{Value, checksum};
use crate::placement::numa::NumaMask;
use crate::placement::numa_nodes::NumaNode;

/// The content of the file while the policy is `None`.
pub const NONE_STATE: &str = r#"{"policyName":"None","machineState":{},"checksum":4236770233}"#;

const STATIC: &str = "Static";

/// Why a state file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum StateError {
    #[error("it is not a state file of the memory manager: {message}")]
    Content { message: String },
    #[error("checkpoint is corrupted")]
    Checksum,
    #[error(
        "[memorymanager] configured policy {configured:?} differs from state checkpoint policy {found:?}"
    )]
    Policy { configured: &'static str, found: String },
    #[error("[memorymanager] machine state can not be empty when it has memory assignments")]
    NoMachine,
    #[error(
        "[memorymanager] (pod: {pod}, container: {container}) the memory assignment uses the NUMA that does \
         not exist"
    )]
    UnknownNode { pod: PodUid, container: String },
    #[error(
        "[memorymanager] (pod: {pod}, container: {container}) the memory assignment uses memory resource that \
         does not exist"
    )]
    UnknownResource { pod: PodUid, container: String },
    /// The machine or the reservations changed.
    #[error("[memorymanager] the expected machine state is different from the real one")]
    Machine,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct File {
    policy_name: String,
    // Go orders numbers that are keys as texts.
    #[serde(default, deserialize_with = "or_default")]
    machine_state: BTreeMap<String, NodeInFile>,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<PodUid, BTreeMap<String, Vec<BlockInFile>>>,
    #[serde(default)]
    checksum: u32,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeInFile {
    number_of_assignments: u64,
    memory_map: BTreeMap<String, TableInFile>,
    cells: Vec<u32>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct TableInFile {
    total: u64,
    system_reserved: u64,
    allocatable: u64,
    reserved: u64,
    free: u64,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct BlockInFile {
    numa_affinity: Vec<u32>,
    r#type: String,
    size: u64,
}

/// What is absent or null in Go's JSON.
fn or_default<'de, D, T>(value: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::deserialize(value).map(Option::unwrap_or_default)
}

/// Checks a state file while the policy is `None`: then it has nothing of use, but a file of
/// another policy means that containers may still be bound to nodes.
///
/// # Errors
/// When the file is damaged or of another policy.
pub fn check_none(text: &str) -> Result<(), StateError> {
    parse(text, "None").map(drop)
}

impl Memory {
    /// The state in a state file (Go: `restoreState`, `validateState`).
    ///
    /// # Errors
    /// When the file is damaged, of another policy, or of another machine.
    pub fn restore(machine: &[NumaNode], reserved: &Reserved, text: &str) -> Result<Memory, StateError> {
        let (nodes, assignments) = parse(text, STATIC)?;
        if nodes.is_empty() {
            return match assignments.is_empty() {
                true => Ok(Memory::new(machine, reserved)),
                false => Err(StateError::NoMachine),
            };
        }
        let mut expected = empty(machine, reserved);
        for (pod, containers) in &assignments {
            for (container, blocks) in containers {
                let (pod, container) = (|| pod.clone(), || container.clone());
                for block in blocks {
                    for number in block.nodes.iter() {
                        let Some(node) = expected.get(&number) else {
                            return Err(StateError::UnknownNode { pod: pod(), container: container() });
                        };
                        if !node.tables.contains_key(&block.resource) {
                            return Err(StateError::UnknownResource { pod: pod(), container: container() });
                        }
                    }
                    take(&mut expected, block.nodes, &block.resource, block.bytes);
                }
            }
        }
        if !same(&nodes, &expected) {
            return Err(StateError::Machine);
        }
        Ok(Memory::from_parts(nodes, assignments))
    }

    /// The content of the state file.
    #[must_use]
    pub fn state_file(&self) -> String {
        let numbers = |mask: NumaMask| mask.iter().collect();
        let table = |table: &Table| TableInFile {
            total: table.total,
            system_reserved: table.system_reserved,
            allocatable: table.allocatable,
            reserved: table.reserved,
            free: table.free,
        };
        let node = |node: &NodeState| NodeInFile {
            number_of_assignments: node.assignments,
            memory_map: node.tables.iter().map(|(name, entry)| (name.clone(), table(entry))).collect(),
            cells: numbers(node.cells),
        };
        let block = |block: &Block| BlockInFile {
            numa_affinity: numbers(block.nodes),
            r#type: block.resource.clone(),
            size: block.bytes,
        };
        let blocks =
            |(name, blocks): (&String, &Vec<Block>)| (name.clone(), blocks.iter().map(block).collect());
        let file = File {
            policy_name: STATIC.to_owned(),
            machine_state: self
                .nodes
                .iter()
                .map(|(number, state)| (number.to_string(), node(state)))
                .collect(),
            entries: self
                .assignments
                .iter()
                .map(|(pod, containers)| (pod.clone(), containers.iter().map(blocks).collect()))
                .collect(),
            checksum: sum(STATIC, &self.nodes, &self.assignments),
        };
        // Maps with texts as keys always serialize.
        serde_json::to_string(&file).unwrap_or_default()
    }
}

/// The nodes and assignments of a file whose checksum and policy are right.
fn parse(text: &str, policy: &'static str) -> Result<(Nodes, Assignments), StateError> {
    let content = |message: &dyn ToString| StateError::Content { message: message.to_string() };
    let file: File = serde_json::from_str(text).map_err(|error| content(&error))?;
    let mask = |numbers: &[u32]| {
        let mask = NumaMask::from_numbers(numbers.iter().copied());
        // The checksum is made of the numbers, so they must be those of the mask.
        let usable = !mask.is_empty() && mask.iter().eq(numbers.iter().copied());
        usable.then_some(mask).ok_or_else(|| content(&"a list of nodes is not usable"))
    };
    let mut nodes = Nodes::new();
    for (number, node) in file.machine_state {
        let number = number.parse().ok().filter(|number: &u32| *number < 64);
        let number = number.ok_or_else(|| content(&"a node's number is not usable"))?;
        let tables = node.memory_map.into_iter().map(|(name, table)| {
            let TableInFile { total, system_reserved, allocatable, reserved, free } = table;
            (name, Table { total, system_reserved, allocatable, reserved, free })
        });
        let (assignments, tables) = (node.number_of_assignments, tables.collect());
        nodes.insert(number, NodeState { assignments, tables, cells: mask(&node.cells)? });
    }
    let mut assignments = Assignments::new();
    for (pod, containers) in file.entries {
        let of_pod = assignments.entry(pod).or_default();
        for (container, blocks) in containers {
            let blocks = blocks.into_iter().map(|block| {
                let nodes = mask(&block.numa_affinity)?;
                Ok(Block { nodes, resource: block.r#type, bytes: block.size })
            });
            of_pod.insert(container, blocks.collect::<Result<_, _>>()?);
        }
    }
    // Upstream accepts a file without a checksum, which versions before it had wrote.
    if file.checksum != 0 && file.checksum != sum(&file.policy_name, &nodes, &assignments) {
        return Err(StateError::Checksum);
    }
    if file.policy_name != policy {
        return Err(StateError::Policy { configured: policy, found: file.policy_name });
    }
    Ok((nodes, assignments))
}

/// The checksum of a file with this content.
fn sum(policy: &str, nodes: &Nodes, assignments: &Assignments) -> u32 {
    let numbers = |mask: NumaMask| Value::List(mask.iter().map(Value::number).collect());
    let table = |table: &Table| {
        let field = |name, number: u64| (name, "uint64", Value::number(number));
        Value::Struct(vec![
            field("TotalMemSize", table.total),
            field("SystemReserved", table.system_reserved),
            field("Allocatable", table.allocatable),
            field("Reserved", table.reserved),
            field("Free", table.free),
        ])
    };
    let pointer = |value| Value::Pointer(Box::new(value));
    let node = |node: &NodeState| {
        let tables = node.tables.iter();
        let tables = tables.map(|(name, entry)| (Cow::Owned(name.clone()), pointer(table(entry))));
        Value::Struct(vec![
            ("NumberOfAssignments", "int", Value::number(node.assignments)),
            ("MemoryMap", "map[v1.ResourceName]*state.MemoryTable", Value::Map(tables.collect())),
            ("Cells", "[]int", numbers(node.cells)),
        ])
    };
    let block = |block: &Block| {
        Value::Struct(vec![
            ("NUMAAffinity", "[]int", numbers(block.nodes)),
            ("Type", "v1.ResourceName", Value::Plain(Cow::Owned(block.resource.clone()))),
            ("Size", "uint64", Value::number(block.bytes)),
        ])
    };
    let nodes = nodes.iter().map(|(number, state)| (Cow::Owned(number.to_string()), pointer(node(state))));
    let entries = assignments.iter().map(|(pod, containers)| {
        let containers = containers
            .iter()
            .map(|(name, blocks)| (name.as_str(), Value::List(blocks.iter().map(block).collect())));
        (pod.as_str(), Value::map(containers))
    });
    let fields = vec![
        ("PolicyName", "string", Value::text(policy)),
        ("MachineState", "state.NUMANodeMap", Value::Map(nodes.collect())),
        ("Entries", "state.ContainerMemoryAssignments", Value::map(entries)),
        ("Checksum", "checksum.Checksum", Value::number(0)),
    ];
    checksum("*state.MemoryManagerCheckpoint", &Value::Struct(fields))
}

/// Whether the nodes of a file are those of the machine with the file's assignments. Within a group
/// only the sums count (Go: `areMachineStatesEqual`).
fn same(found: &Nodes, expected: &Nodes) -> bool {
    let fixed = |table: &Table| (table.total, table.system_reserved, table.allocatable);
    let sums = |nodes: &Nodes, cells: NumaMask, resource: &str| {
        let number = |number| super::tables::sum(nodes, cells, resource, number);
        (number(|table| table.free), number(|table| table.reserved))
    };
    found.len() == expected.len()
        && found.iter().zip(expected).all(|((number, node), (other_number, other))| {
            number == other_number
                && node.assignments == other.assignments
                && node.cells == other.cells
                && node.tables.len() == other.tables.len()
                && node.tables.iter().zip(&other.tables).all(|((name, table), (other_name, other_table))| {
                    name == other_name
                        && fixed(table) == fixed(other_table)
                        && sums(found, node.cells, name) == sums(expected, node.cells, name)
                })
        })
}
