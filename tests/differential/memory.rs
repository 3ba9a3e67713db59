//! The memory manager, with the topology manager over it, against the kubelet's: sequences of
//! admissions, starts, ends and restarts on one machine.

use std::collections::BTreeMap;

use coracle::model::pod::Pod;
use coracle::model::quantity::Amount;
use coracle::model::requests::Amounts;
use coracle::placement::memory::{Memory, Reserved};
use coracle::placement::numa_nodes::NumaNode;
use coracle::placement::topology::{EMPTY_POOL, Policy, Provider, Scope, TopologyManager};
use serde_json::{Value, json};

use crate::peer::Peer;
use crate::random::Random;
use crate::topology::{nodes, plain};
use crate::{Cases, pick, rarely};

const MIB: u64 = 1 << 20;
/// Huge pages by size, and their resource.
const PAGES: [(u64, &str); 3] =
    [(64 << 10, "hugepages-64Ki"), (2 << 20, "hugepages-2Mi"), (1 << 30, "hugepages-1Gi")];

struct Machine {
    nodes: Vec<NumaNode>,
    reserved: Vec<BTreeMap<String, u64>>,
    /// The sizes that each node has: Go panics on others.
    sizes: Vec<(u64, &'static str)>,
}

fn machine(random: &mut Random) -> Machine {
    let mut nodes = nodes(random, true);
    // Go tries all combinations of the hints: on 8 nodes 255 to the power of the resources.
    let most = if nodes.len() == 8 { 1 } else { 3 };
    let sizes: Vec<_> = PAGES.into_iter().filter(|_| rarely(random, 2)).take(most).collect();
    let mut reserved = vec![BTreeMap::new(); nodes.len()];
    let alike = rarely(random, 2);
    let common = 1 + random.below(4096);
    let something = !rarely(random, 100);
    let first = nodes.first().map(|node| node.number);
    for (node, reserved) in nodes.iter_mut().zip(&mut reserved) {
        node.memory_bytes = (if alike { common } else { random.below(4096) }) * MIB;
        let mut left = node.memory_bytes;
        if something && (Some(node.number) == first || rarely(random, 2)) {
            let bytes = random.below(left / 2 + 1);
            reserved.insert("memory".to_owned(), bytes);
            left -= bytes;
        }
        for (size, name) in &sizes {
            let count = random.below(left / size / 2 + 1);
            left -= count * size;
            node.huge_pages.insert(*size, count);
            if rarely(random, 4) {
                reserved.insert((*name).to_owned(), random.below(count + 1) * size);
            }
        }
    }
    Machine { nodes, reserved, sizes }
}

/// An amount of some bytes, in one of its forms.
fn text(random: &mut Random, bytes: u64) -> String {
    match random.below(4) {
        0 => bytes.to_string(),
        1 => format!("{}Ki", bytes / 1024),
        2 => format!("{}k", bytes / 1000),
        _ => format!("{}Mi", bytes / MIB + 1),
    }
}

fn container(random: &mut Random, machine: &Machine, name: &str, kind: u64) -> Value {
    let largest = machine.nodes.iter().map(|node| node.memory_bytes).max().unwrap_or(0);
    let most = largest / [1, 2, 4, 16][random.below(4) as usize] * [1, 1, 1, 3][random.below(4) as usize];
    let bytes = random.below(most.max(1)) + 1;
    let mut memory = text(random, bytes);
    if memory.starts_with('0') {
        memory = "1Ki".into();
    }
    if rarely(random, 200) {
        memory += "500m";
        memory = memory.replace(['K', 'M', 'i', 'k'], "");
    }
    let mut amounts = json!({"cpu": "1", "memory": memory});
    for (size, name) in &machine.sizes {
        if rarely(random, 4) {
            let most = machine.nodes.iter().filter_map(|node| node.huge_pages.get(size)).max().unwrap_or(&0);
            amounts[*name] = (random.below(most * 2 + 1) * size).to_string().into();
        }
    }
    let limits = if kind == 1 { json!({}) } else { amounts.clone() };
    json!({"name": name, "resources": {"requests": amounts, "limits": limits}})
}

/// What the containers request together, and some more: no validation refuses it.
fn whole(random: &mut Random, containers: &[&Value]) -> Value {
    let mut total = Amounts::new();
    for container in containers {
        let requests = container["resources"]["requests"].as_object().into_iter().flatten();
        for (name, amount) in requests {
            let sum = total.entry(name.clone()).or_default();
            *sum = *sum + Amount::parse(amount.as_str().unwrap()).unwrap();
        }
    }
    let more = if rarely(random, 3) { 0 } else { random.below(512) * MIB };
    let amounts: BTreeMap<String, String> = total
        .into_iter()
        .map(|(name, amount)| {
            let more = if name == "memory" { more } else { 0 };
            (name, (amount.units() + more as i64).to_string())
        })
        .collect();
    json!({"requests": amounts, "limits": amounts})
}

fn pod(random: &mut Random, machine: &Machine, uid: &str, gate: bool) -> Value {
    // 1: not Guaranteed, 2: with resources of the pod.
    let kind = if gate && rarely(random, 3) { 2 } else { pick(random, &[0, 0, 0, 0, 0, 0, 0, 0, 1, 2]) };
    let mut init = Vec::new();
    for number in 0..random.below(8).saturating_sub(4) {
        let mut init_container = container(random, machine, &format!("i{number}"), kind);
        if rarely(random, 3) {
            init_container["restartPolicy"] = "Always".into();
        }
        init.push(init_container);
    }
    let count = 1 + random.below(6).saturating_sub(3);
    let mut apps: Vec<Value> =
        (0..count).map(|number| container(random, machine, &format!("c{number}"), kind)).collect();
    let own = whole(random, &init.iter().chain(&apps).collect::<Vec<_>>());
    if gate && kind == 2 {
        // They share what the others leave of the pod's memory.
        for container in init.iter_mut().chain(&mut apps).filter(|_| rarely(random, 3)) {
            container["resources"] = json!({});
        }
    }
    let mut spec = json!({"containers": apps, "initContainers": init});
    if kind == 2 {
        spec["resources"] = own;
    }
    json!({"metadata": {"uid": uid, "name": uid, "namespace": "n"}, "spec": spec})
}

/// The machine's managers, its pods, and what was done.
struct ManagedNode {
    memory: Memory,
    topology: TopologyManager,
    active: Vec<Pod>,
    /// Containers of active pods that have not started, in order.
    waiting: Vec<(Pod, Vec<String>)>,
    started: Vec<(Pod, String)>,
}

impl ManagedNode {
    fn remove(&mut self, uid: &str) {
        self.active.retain(|pod| pod.uid().as_str() != uid);
        self.waiting.retain(|(pod, _)| pod.uid().as_str() != uid);
        self.started.retain(|(pod, _)| pod.uid().as_str() != uid);
    }

    fn admit(&mut self, value: &Value) -> Value {
        let pod = to_pod(value);
        self.active.push(pod.clone());
        self.memory.release_inactive(&self.active, &|_| false);
        let outcome = self.topology.admit(&pod, &mut [&mut self.memory]);
        let mut mems = serde_json::Map::new();
        for container in pod.all_containers() {
            if let Some(nodes) = self.memory.cpuset_mems(pod.uid(), &container.name) {
                mems.insert(container.name.clone(), nodes.iter().collect());
            }
        }
        let names: Vec<String> = pod.all_containers().map(|container| container.name.clone()).collect();
        let Some(denial) = outcome.denial else {
            self.waiting.push((pod, names));
            return json!([true, "", "", mems]);
        };
        self.remove(pod.uid().as_str());
        json!([false, denial.reason, denial.message, mems])
    }

    fn hints(&mut self, value: &Value, scope: &str) -> Value {
        let pod = to_pod(value);
        let active = self.active.iter().chain([&pod]);
        self.memory.release_inactive(active, &|_| false);
        let candidate = self.topology.candidate(&pod);
        let hints = match scope {
            "pod" => self.memory.pod_hints(candidate),
            _ => self.memory.hints(candidate, &pod.containers()[0]),
        };
        hints
            .into_iter()
            .map(|(name, list)| (name, list.into_iter().map(plain).collect::<Value>()))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }
}

fn to_pod(value: &Value) -> Pod {
    Pod::from(serde_json::from_value::<coracle::model::api::Pod>(value.clone()).unwrap())
}

/// A state file without its checksums; blocks have no order.
fn state(text: &str) -> Value {
    let mut state: Value = serde_json::from_str(text).unwrap();
    let mut data: Value = serde_json::from_str(state["data"].as_str().unwrap()).unwrap();
    sort_blocks(&mut state);
    sort_blocks(&mut data);
    (state["checksum"], state["dataChecksum"]) = (Value::Null, Value::Null);
    state["data"] = data;
    state
}

fn sort_blocks(state: &mut Value) {
    let sort = |blocks: &mut Value| {
        blocks.as_array_mut().unwrap().sort_by_key(|block| block["type"].to_string());
    };
    for (_, containers) in state.get_mut("entries").and_then(Value::as_object_mut).into_iter().flatten() {
        containers.as_object_mut().unwrap().values_mut().for_each(sort);
    }
    for (_, pod) in state.get_mut("podEntries").and_then(Value::as_object_mut).into_iter().flatten() {
        pod.get_mut("memoryBlocks").into_iter().for_each(sort);
    }
}

/// What differs by Go's order of a map: a node that is in a group, and has a block of its own.
fn is_mixed(state: &Value) -> bool {
    let machine = state["machineState"].as_object().unwrap();
    let cells = |number: &str| machine[number]["cells"].as_array().unwrap();
    machine.keys().any(|number| cells(number).iter().any(|other| cells(&other.to_string()) != cells(number)))
}

#[test]
fn state_equals_that_of_the_memory_manager() {
    let (mut cases, mut random) = Cases::new("memory manager", 3_000);
    let mut peer = Peer::managers();
    while cases.next() {
        let random = &mut random;
        let machine = machine(random);
        let policy = pick(random, &["none", "best-effort", "restricted", "single-numa-node"]);
        let scope = pick(random, &["container", "pod"]);
        let gate = rarely(random, 2);
        let mut expected = Amounts::new();
        let mut configured = Vec::new();
        for (node, reserved) in machine.nodes.iter().zip(&machine.reserved) {
            let amount = |bytes: &u64| Amount::from_units(*bytes as i64);
            let limits: Amounts =
                reserved.iter().map(|(name, bytes)| (name.clone(), amount(bytes))).collect();
            for (name, amount) in &limits {
                let sum = expected.entry(name.clone()).or_default();
                *sum = *sum + *amount;
            }
            configured.push((i64::from(node.number), limits));
        }
        let list: Vec<Value> = machine
            .nodes
            .iter()
            .zip(&machine.reserved)
            .map(|(node, reserved)| {
                let pages: Vec<Value> =
                    node.huge_pages.iter().map(|(size, count)| json!([size / 1024, count])).collect();
                json!({
                    "id": node.number, "distances": node.distances, "memory": node.memory_bytes,
                    "hugePages": pages, "reserved": reserved,
                })
            })
            .collect();
        let mut question = json!({"ask": "memory", "policy": policy, "scope": scope, "nodes": list, "podLevel": gate, "steps": []});
        let reserved = match Reserved::new(&machine.nodes, &configured, &expected) {
            Ok(reserved) => reserved,
            Err(error) => {
                let response = peer.ask(&question);
                match response["error"] == error.to_string() {
                    true => cases.count("start refused by both"),
                    false => cases.differs(&format!("{question}: {error}, in Go {response}")),
                }
                continue;
            }
        };
        let topology = TopologyManager::new(
            Policy::parse(policy).unwrap(),
            Scope::parse(scope).unwrap(),
            &BTreeMap::new(),
            &machine.nodes,
        );
        let mut host = ManagedNode {
            memory: Memory::new(&machine.nodes, &reserved),
            topology: topology.unwrap().with_pod_level(gate),
            active: Vec::new(),
            waiting: Vec::new(),
            started: Vec::new(),
        };
        // What was found after each step, and the state file then.
        let mut found: Vec<(Value, String)> = Vec::new();
        let mut steps: Vec<Value> = Vec::new();
        for number in 0..3 + random.below(12) {
            let uid = format!("{:08x}-{number}", random.below(1 << 32));
            let (step, result) = match random.below(10) {
                0..=3 => {
                    let value = pod(random, &machine, &uid, gate);
                    let result = host.admit(&value);
                    (json!({"do": "admit", "pod": value}), result)
                }
                4 => {
                    let value = pod(random, &machine, &uid, gate);
                    let result = host.hints(&value, scope);
                    (json!({"do": "hints", "pod": value}), result)
                }
                5 | 6 if !host.waiting.is_empty() => {
                    let index = random.below(host.waiting.len() as u64) as usize;
                    let (pod, names) = &mut host.waiting[index];
                    let (pod, name) = (pod.clone(), names.remove(0));
                    host.waiting.retain(|(_, names)| !names.is_empty());
                    host.memory.release_ended_init_containers(&pod, &name);
                    host.started.push((pod.clone(), name.clone()));
                    (json!({"do": "start", "uid": pod.uid(), "container": name}), Value::Null)
                }
                7 if !host.started.is_empty() => {
                    let index = random.below(host.started.len() as u64) as usize;
                    let (pod, name) = host.started.remove(index);
                    host.memory.release(pod.uid(), &name);
                    (json!({"do": "stop", "uid": pod.uid(), "container": name}), Value::Null)
                }
                8 if !host.active.is_empty() => {
                    let index = random.below(host.active.len() as u64) as usize;
                    let uid = host.active[index].uid().clone();
                    host.remove(uid.as_str());
                    (json!({"do": "end", "uid": uid}), Value::Null)
                }
                9 => {
                    let text = host.memory.state_file();
                    let restored = Memory::restore(&machine.nodes, &reserved, &text);
                    if is_mixed(&state(&text)) {
                        // Go may refuse it: end here.
                        continue;
                    }
                    host.memory = restored.unwrap_or_else(|error| panic!("{error}: {text}"));
                    (json!({"do": "restart"}), Value::Null)
                }
                _ => continue,
            };
            found.push((result, host.memory.state_file()));
            steps.push(step);
        }
        let last = host.memory.state_file();
        let mixed = is_mixed(&state(&last));
        question["steps"] = steps.into();
        if !mixed {
            question["takeOver"] = last.into();
        }
        let response = peer.ask(&question);
        if response["error"] != "" {
            cases.differs(&format!("{question}: in Go {}", response["error"]));
            continue;
        }
        let results = response["results"].as_array().cloned().unwrap_or_default();
        let mut admitted = 0;
        let mut same = found.len() == results.len() && response["takeOver"] == "";
        let mut difference = format!("take-over: {}", response["takeOver"]);
        for ((number, (result, text)), theirs) in found.iter().enumerate().zip(&results) {
            let step = &question["steps"][number];
            let expected = match step["do"].as_str().unwrap() {
                "admit" => {
                    let (reason, mut message) = (theirs["reason"].clone(), theirs["message"].clone());
                    // It names a resource, the first in Go's order of a map.
                    if reason == EMPTY_POOL && result[1] == EMPTY_POOL {
                        message = result[2].clone();
                    }
                    json!([theirs["admit"], reason, message, theirs["mems"]])
                }
                "hints" => theirs["hints"].clone(),
                _ => Value::Null,
            };
            admitted += u64::from(result[0] == true);
            let their_text = theirs["state"].as_str().unwrap();
            let their_state = state(their_text);
            if same && (*result != expected || state(text) != their_state) {
                same = false;
                difference = format!(
                    "step {number} {step}: {result}, in Go {expected}\n{}\nin Go\n{their_state}",
                    state(text)
                );
            }
            // Blocks of an unordered map of Go: the checksum is theirs.
            let restored = Memory::restore(&machine.nodes, &reserved, their_text);
            if same && restored.is_err() && !is_mixed(&their_state) {
                same = false;
                difference = format!("step {number}: cannot restore {their_text}: {restored:?}");
            }
        }
        for (name, texts) in [
            ("in a group", "\"cells\":[0,"),
            ("with memory reused", "\"size\":0"),
            ("with a pod as a whole", "podEntries"),
        ] {
            if found.iter().any(|(_, text)| text.contains(texts)) {
                cases.count(name);
            }
        }
        if found.iter().any(|(result, _)| result[0] == false) {
            cases.count("with a denial");
        }
        match (same, mixed, admitted) {
            (false, ..) => cases.differs(&format!("{question}: {difference}")),
            (true, true, _) => cases.count("alike, with a node in a group and alone"),
            (true, false, 0) => cases.count("alike, nothing admitted"),
            (true, false, _) => cases.count("alike"),
        }
    }
    cases.end("alike", 2);
}
