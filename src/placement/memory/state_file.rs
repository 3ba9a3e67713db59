//! The state file `memory_manager_state` in the layout of the Go kubelet (memorymanager/state
//! `MemoryManagerCheckpoint`).
//!
//! It is written in format 3 (since 1.37), which has all fields of format 1, so that older Go kubelets
//! read it, too. Formats 1, 2 and 3 are read. What a kubelet with the gate `PodLevelResourceManagers`
//! has written for whole pods is kept, whether it is on or not.
//!
//! DIFFERS: a file that cannot be used keeps the Go kubelet from starting. Here it is an error
//! with a type: the caller puts the file aside and rebuilds the state from what runs
//! ([`Memory::rebuild`]).

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::reserved::Reserved;
use super::state::Memory;
use super::tables::{Assignments, Block, NodeState, Nodes, PodAssignments, Table, empty, take};
use crate::model::ids::PodUid;
use crate::placement::checksum::{Value, checksum, in_go_json};
use crate::placement::numa::NumaMask;
use crate::placement::numa_nodes::NumaNode;

/// The content of the file while the policy is `None`.
pub const NONE_STATE: &str = r#"{"policyName":"None","machineState":{},"checksum":4236770233,"data":"{\"policyName\":\"None\",\"machineState\":{}}","dataChecksum":3093843326}"#;

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

// Go orders numbers that are keys as texts.
type NodesInFile = BTreeMap<String, NodeInFile>;
type EntriesInFile = BTreeMap<PodUid, BTreeMap<String, Vec<BlockInFile>>>;
type PodsInFile = BTreeMap<PodUid, PodInFile>;

/// Formats 1 to 3: the fields of format 1 (and `podEntries` in format 2), and in format 3 `data`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    policy_name: String,
    #[serde(default, deserialize_with = "or_default")]
    machine_state: NodesInFile,
    #[serde(default, deserialize_with = "or_default")]
    entries: EntriesInFile,
    #[serde(default, deserialize_with = "or_default")]
    pod_entries: PodsInFile,
    #[serde(default)]
    checksum: u64,
    #[serde(default, deserialize_with = "or_default")]
    data: String,
    #[serde(default)]
    data_checksum: u64,
}

/// What `data` of format 3 is as JSON.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Data {
    #[serde(default)]
    policy_name: String,
    #[serde(default, deserialize_with = "or_default")]
    machine_state: NodesInFile,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    entries: EntriesInFile,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pod_entries: PodsInFile,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Written<'a> {
    policy_name: &'a str,
    machine_state: &'a NodesInFile,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    entries: &'a EntriesInFile,
    checksum: u32,
    data: &'a str,
    data_checksum: u32,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodInFile {
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    memory_blocks: Vec<BlockInFile>,
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
        let Parsed { nodes, assignments, mut pods } = parse(text, STATIC)?;
        if nodes.is_empty() {
            return match assignments.is_empty() {
                true => Ok(Memory::new(machine, reserved)),
                false => Err(StateError::NoMachine),
            };
        }
        // A pod as a whole is released with its last container.
        pods.retain(|pod, _| assignments.contains_key(pod));
        let mut expected = empty(machine, reserved);
        for (pod, containers) in &assignments {
            match pods.get(pod) {
                Some(blocks) => add_blocks(&mut expected, (pod, ""), blocks)?,
                None => {
                    for (container, blocks) in containers {
                        add_blocks(&mut expected, (pod, container), blocks)?;
                    }
                }
            }
        }
        if !same(&nodes, &expected) {
            return Err(StateError::Machine);
        }
        Ok(Memory::from_parts(nodes, assignments, pods))
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
        let list = |blocks: &Vec<Block>| blocks.iter().map(block).collect();
        let containers = |(pod, of_pod): (&PodUid, &BTreeMap<String, Vec<Block>>)| {
            (pod.clone(), of_pod.iter().map(|(name, blocks)| (name.clone(), list(blocks))).collect())
        };
        let data = Data {
            policy_name: STATIC.to_owned(),
            machine_state: self
                .nodes
                .iter()
                .map(|(number, state)| (number.to_string(), node(state)))
                .collect(),
            entries: self.assignments.iter().map(containers).collect(),
            pod_entries: self
                .pods
                .iter()
                .map(|(pod, blocks)| (pod.clone(), PodInFile { memory_blocks: list(blocks) }))
                .collect(),
        };
        // Maps with texts as keys always serialize.
        let text = in_go_json(&serde_json::to_string(&data).unwrap_or_default());
        let written = Written {
            policy_name: STATIC,
            machine_state: &data.machine_state,
            entries: &data.entries,
            checksum: sum(STATIC, &self.nodes, &self.assignments, None),
            data_checksum: of_text(&text),
            data: &text,
        };
        in_go_json(&serde_json::to_string(&written).unwrap_or_default())
    }
}

/// Adds blocks to the nodes that a file is to have (Go: `updateExpectedMachineState`).
fn add_blocks(
    nodes: &mut Nodes,
    (pod, container): (&PodUid, &str),
    blocks: &[Block],
) -> Result<(), StateError> {
    let (pod, container) = (|| pod.clone(), || container.to_owned());
    for block in blocks {
        for number in block.nodes.iter() {
            let Some(node) = nodes.get(&number) else {
                return Err(StateError::UnknownNode { pod: pod(), container: container() });
            };
            if !node.tables.contains_key(&block.resource) {
                return Err(StateError::UnknownResource { pod: pod(), container: container() });
            }
        }
        take(nodes, block.nodes, &block.resource, block.bytes);
    }
    Ok(())
}

/// What a file has.
struct Parsed {
    nodes: Nodes,
    assignments: Assignments,
    pods: PodAssignments,
}

/// What a file has whose checksum and policy are right. A file with `data` is of format 3, and of no
/// older one if `data` is wrong.
fn parse(text: &str, policy: &'static str) -> Result<Parsed, StateError> {
    let content = |message: &dyn ToString| StateError::Content { message: message.to_string() };
    let file: File = serde_json::from_str(text).map_err(|error| content(&error))?;
    if file.data.is_empty() && file.data_checksum == 0 {
        let File { policy_name, machine_state, entries, pod_entries, checksum, .. } = file;
        let data = Data { policy_name, machine_state, entries, pod_entries };
        let (found, mut parsed) = read(data)?;
        let is_second = checksum == u64::from(parsed.sum(&found, true));
        // Upstream accepts a file without a checksum, which versions before it had wrote.
        if !is_second && checksum != 0 && checksum != u64::from(parsed.sum(&found, false)) {
            return Err(StateError::Checksum);
        }
        if !is_second {
            parsed.pods = PodAssignments::new();
        }
        return of_policy(policy, found, parsed);
    }
    if file.data_checksum != u64::from(of_text(&file.data)) {
        return Err(StateError::Checksum);
    }
    let data: Data = serde_json::from_str(&file.data).map_err(|error| content(&error))?;
    let (found, parsed) = read(data)?;
    of_policy(policy, found, parsed)
}

fn of_policy(policy: &'static str, found: String, parsed: Parsed) -> Result<Parsed, StateError> {
    if found == policy { Ok(parsed) } else { Err(StateError::Policy { configured: policy, found }) }
}

/// The checksum of `data`.
fn of_text(text: &str) -> u32 {
    checksum("string", &Value::text(text))
}

impl Parsed {
    /// The checksum of format 1, or of format 2, which has pods.
    fn sum(&self, policy: &str, with_pods: bool) -> u32 {
        sum(policy, &self.nodes, &self.assignments, with_pods.then_some(&self.pods))
    }
}

/// The policy and the values of a file.
fn read(file: Data) -> Result<(String, Parsed), StateError> {
    let content = |message: &dyn ToString| StateError::Content { message: message.to_string() };
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
    let list = |blocks: Vec<BlockInFile>| {
        let blocks = blocks.into_iter().map(|block| {
            let nodes = mask(&block.numa_affinity)?;
            Ok(Block { nodes, resource: block.r#type, bytes: block.size })
        });
        blocks.collect::<Result<Vec<Block>, StateError>>()
    };
    let mut assignments = Assignments::new();
    for (pod, containers) in file.entries {
        let of_pod = assignments.entry(pod).or_default();
        for (container, blocks) in containers {
            of_pod.insert(container, list(blocks)?);
        }
    }
    let mut pods = PodAssignments::new();
    for (pod, entry) in file.pod_entries {
        pods.insert(pod, list(entry.memory_blocks)?);
    }
    Ok((file.policy_name, Parsed { nodes, assignments, pods }))
}

/// The checksum of a file with this content.
fn sum(policy: &str, nodes: &Nodes, assignments: &Assignments, pods: Option<&PodAssignments>) -> u32 {
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
    let mut fields = vec![
        ("PolicyName", "string", Value::text(policy)),
        ("MachineState", "state.NUMANodeMap", Value::Map(nodes.collect())),
        ("Entries", "state.ContainerMemoryAssignments", Value::map(entries)),
    ];
    if let Some(pods) = pods {
        let pods = pods.iter().map(|(pod, blocks)| {
            let list = Value::List(blocks.iter().map(block).collect());
            (pod.as_str(), Value::Struct(vec![("MemoryBlocks", "[]state.Block", list)]))
        });
        fields.push(("PodEntries", "state.PodMemoryAssignments", Value::map(pods)));
    }
    fields.push(("Checksum", "checksum.Checksum", Value::number(0)));
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
