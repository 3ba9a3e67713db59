//! The CPU manager against the kubelet's.

use std::collections::BTreeMap;

use coracle::model::pod::{Pod, request};
use coracle::model::quantity::Amount;
use coracle::placement::cpu::error::AllocateError;
use coracle::placement::cpu::options::{Gates, Options};
use coracle::placement::cpu::policy::{Reservation, StaticPolicy};
use coracle::placement::cpu::request::PodCpus;
use coracle::placement::cpu::state::State;
use coracle::placement::cpu::state_file::{self, STATIC};
use coracle::placement::cpus::CpuSet;
use coracle::placement::machine::{Cpu, Level, Machine};
use coracle::placement::numa::{Hint, NumaMask};
use coracle::placement::topology::Candidate;
use serde_json::{Value, json};

use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, pick, rarely};

/// A machine, and how the Go program reads it.
struct TestMachine {
    machine: Machine,
    described: Vec<Value>,
    /// Each socket, NUMA node and core is like the others.
    even: bool,
}

/// Sockets in nodes or nodes in sockets, caches in nodes, one to four threads per core; numbered in
/// one of the ways of real machines. Rarely some CPUs are offline.
fn host(random: &mut Random) -> TestMachine {
    let nodes = pick(random, &[1_u32, 1, 2, 2, 4, 4, 8]);
    let sockets_per_node = if rarely(random, 12) { 2 } else { 1 };
    let nodes_per_socket = if sockets_per_node == 1 { pick(random, &[1_u32, 2, 2, 4]).min(nodes) } else { 1 };
    let cores = pick(random, &[1_u32, 2, 2, 3, 4, 4, 6, 8]) * sockets_per_node;
    let threads = pick(random, &[1_u32, 2, 2, 2, 4]);
    let caches = pick(random, &[None, Some(1_u32), Some(1), Some(2), Some(2), Some(4)]);
    let gap = if rarely(random, 10) { 3 } else { 1 };
    let style = random.below(3);
    let all_cores = nodes * cores;
    let hybrid = rarely(random, 15);
    let offline = if rarely(random, 6) { 1 + random.below(4) } else { 0 };
    let mut found = Vec::new();
    for node in 0..nodes {
        for core in 0..cores {
            for thread in 0..threads {
                if hybrid && thread > 0 && core % 2 == 1 {
                    continue;
                }
                let place = node * cores + core;
                let cpu = match style {
                    // Siblings side by side; all first threads first; nodes by turns.
                    0 => place * threads + thread,
                    1 => thread * all_cores + place,
                    _ => thread * all_cores + core * nodes + node,
                };
                let socket =
                    if sockets_per_node == 2 { node * 2 + core * 2 / cores } else { node / nodes_per_socket };
                let cache = caches.map(|caches| node * 8 + core * caches / cores);
                found.push((cpu, place, socket, node * gap, cache));
            }
        }
    }
    for _ in 0..offline {
        if found.len() > 2 {
            let index = random.below(found.len() as u64) as usize;
            found.remove(index);
        }
    }
    found.sort_unstable();
    let mut lowest: BTreeMap<u32, u32> = BTreeMap::new();
    for (cpu, place, ..) in &found {
        lowest.entry(*place).or_insert(*cpu);
    }
    let described = found
        .iter()
        .map(|(cpu, core, socket, node, cache)| {
            json!({"cpu": cpu, "core": core, "socket": socket, "node": node, "cache": cache})
        })
        .collect();
    let cpus = found.iter().map(|(cpu, place, socket, node, cache)| {
        (*cpu, Cpu { core: lowest[place], socket: *socket, node: *node, cache: cache.unwrap_or(*socket) })
    });
    TestMachine { machine: Machine::new(cpus.collect()), described, even: !hybrid && offline == 0 }
}

fn options(random: &mut Random) -> BTreeMap<String, String> {
    let mut options = BTreeMap::new();
    for (name, one_in) in [
        ("full-pcpus-only", 3),
        ("strict-cpu-reservation", 3),
        ("prefer-align-cpus-by-uncorecache", 3),
        ("distribute-cpus-across-numa", 3),
        ("align-by-socket", 8),
        ("distribute-cpus-across-cores", 8),
    ] {
        if rarely(random, one_in) {
            options.insert(
                name.to_owned(),
                pick(random, &["true", "true", "true", "1", "false", "T"]).to_owned(),
            );
        }
    }
    if rarely(random, 4) {
        for name in ["distribute-cpus-across-numa", "align-by-socket"] {
            options.insert(name.to_owned(), "true".to_owned());
        }
        options.retain(|name, _| name != "prefer-align-cpus-by-uncorecache" && !name.ends_with("cores"));
    }
    if rarely(random, 100) {
        options.insert(pick(random, &["full-pcpus", "align-by-socket"]).to_owned(), "yes".to_owned());
    }
    options
}

fn container(random: &mut Random, name: &str, most: u64) -> Value {
    let cpu = match random.below(10) {
        0 => "500m".to_owned(),
        1 => "1500m".to_owned(),
        2 => format!("{}", 2 + 2 * random.below(most)),
        3 => format!("{}000m", 1 + random.below(most)),
        _ => format!("{}", 1 + random.below(most)),
    };
    let limits = json!({"cpu": cpu, "memory": "64Mi"});
    let requests = if rarely(random, 15) { json!({"cpu": cpu, "memory": "32Mi"}) } else { limits.clone() };
    json!({"name": name, "resources": {"limits": limits, "requests": requests}})
}

/// CPUs of the pod as a whole for all of its containers, and some more: no validation refuses it.
fn whole(random: &mut Random, spec: &Value) -> Value {
    let object = json!({"metadata": {"uid": "u"}, "spec": spec});
    let pod = Pod::from(serde_json::from_value::<coracle::model::api::Pod>(object).unwrap());
    let total = pod.all_containers().filter_map(|container| request(container, "cpu"));
    let total = total.fold(Amount::default(), |sum, amount| sum + amount).units();
    let cpu = match random.below(8) {
        0 => format!("{}m", total * 1000 + 500),
        1..=3 => total.to_string(),
        more => (total + more as i64 - 3).to_string(),
    };
    let own = json!({"cpu": cpu, "memory": "1Gi"});
    json!({"limits": own, "requests": own})
}

fn pod(random: &mut Random, number: usize, cpus: u64, gate: bool) -> Value {
    let most = pick(random, &[2, 4, 4, 8, cpus.max(1)]).min(cpus.max(1));
    let mut init = Vec::new();
    for index in 0..pick(random, &[0, 0, 0, 1, 2, 3]) {
        let mut init_container = container(random, &format!("i{index}"), most);
        if rarely(random, 3) {
            init_container["restartPolicy"] = "Always".into();
        }
        init.push(init_container);
    }
    let mut apps: Vec<Value> = (0..pick(random, &[1, 1, 1, 2, 3]))
        .map(|index| container(random, &format!("a{index}"), most))
        .collect();
    let is_whole = rarely(random, if gate { 3 } else { 25 });
    if is_whole && gate {
        // They share what the others leave of the pod's CPUs.
        for container in init.iter_mut().chain(&mut apps).filter(|_| rarely(random, 3)) {
            container["resources"] = json!({});
        }
    }
    let mut spec = json!({"containers": apps, "initContainers": init});
    if is_whole {
        spec["resources"] = whole(random, &spec);
    }
    json!({"metadata": {"name": format!("p{number}"), "namespace": "n", "uid": format!("uid-{number}")}, "spec": spec})
}

fn plain(hints: Option<Vec<Hint>>) -> Value {
    hints.map_or(Value::Null, |list| {
        let entry = |hint: &Hint| {
            let nodes: Vec<u32> = hint.nodes.unwrap_or_default().iter().collect();
            json!({"nodes": nodes, "preferred": hint.preferred})
        };
        list.iter().map(entry).collect()
    })
}

/// One step of ours, and what is needed to judge a difference.
struct CompletedStep {
    result: Value,
    before: State,
    wanted: u32,
}

fn note_error(result: &mut Value, allocated: Result<(), AllocateError>) {
    if let Err(error) = allocated {
        result["reason"] = error.reason().into();
        result["message"] = error.to_string().into();
    }
}

struct Simulation<'a> {
    random: &'a mut Random,
    policy: &'a StaticPolicy,
    state: State,
    pods: Vec<PodCpus>,
    steps: Vec<Value>,
    done: Vec<CompletedStep>,
}

impl Simulation<'_> {
    fn step(&mut self, what: &str, pod: usize, name: &str, nodes: Option<NumaMask>) -> Value {
        let pod_cpus = self.pods[pod].clone();
        let before = self.state.clone();
        let (mut result, mut wanted) = (json!({"reason": "", "message": "", "hints": null}), 0);
        let container = pod_cpus.container(name);
        match what {
            "hints" => result["hints"] = plain(self.policy.hints(&self.state, &pod_cpus, container.unwrap())),
            "podHints" => result["hints"] = plain(self.policy.pod_hints(&self.state, &pod_cpus)),
            "allocate" => {
                wanted = container.unwrap().exclusive;
                let allocated =
                    self.policy.allocate(&mut self.state, &pod_cpus, container.unwrap(), nodes).map(drop);
                note_error(&mut result, allocated);
            }
            "allocatePod" => {
                let allocated = self.policy.allocate_pod(&mut self.state, &pod_cpus, nodes).map(drop);
                note_error(&mut result, allocated);
            }
            _ => drop(self.state.release(&pod_cpus.uid, name)),
        }
        let cpus = self.state.exclusive_of(&pod_cpus.uid, name).map(ToString::to_string).unwrap_or_default();
        result["cpus"] = cpus.into();
        result["default"] = self.state.shared.to_string().into();
        let affinity = nodes.map(|nodes| nodes.iter().collect::<Vec<_>>());
        self.steps.push(json!({"do": what, "pod": pod, "container": name, "affinity": affinity}));
        self.done.push(CompletedStep { result: result.clone(), before, wanted });
        result
    }

    /// What a topology manager could choose of the hints.
    fn choose(&mut self, hints: &Value) -> Option<NumaMask> {
        let list: Vec<Value> = hints.as_array().cloned().unwrap_or_default();
        let preferred: Vec<Value> = list.iter().filter(|hint| hint["preferred"] == true).cloned().collect();
        let among = match self.random.below(8) {
            0 => return None,
            1 => list,
            _ => preferred,
        };
        let chosen = self.random.pick(&among)?;
        Some(NumaMask::from_numbers(
            chosen["nodes"].as_array()?.iter().filter_map(|node| Some(node.as_u64()? as u32)),
        ))
    }

    fn admit(&mut self, pod: usize) {
        let names: Vec<String> =
            self.pods[pod].containers.iter().map(|container| container.name.clone()).collect();
        let as_pod = rarely(self.random, 3);
        let is_whole = self.pods[pod].whole.is_some();
        if is_whole && self.state.exclusive.contains_key(&self.pods[pod].uid) {
            // Go gives it other CPUs.
            return;
        }
        let mut nodes = None;
        if as_pod {
            let hints = self.step("podHints", pod, &names[0], None);
            nodes = self.choose(&hints["hints"]);
        }
        if as_pod && is_whole {
            let last = names.last().unwrap_or(&names[0]).clone();
            self.step("allocatePod", pod, &last, nodes);
            return;
        }
        for name in &names {
            if !as_pod {
                let hints = self.step("hints", pod, name, None);
                nodes = self.choose(&hints["hints"]);
            }
            if self.step("allocate", pod, name, nodes)["reason"] != "" {
                break;
            }
        }
    }

    fn release(&mut self, pod: usize) {
        let mut names: Vec<String> =
            self.pods[pod].containers.iter().map(|container| container.name.clone()).collect();
        if rarely(self.random, 2) {
            names.reverse();
        }
        let some = if rarely(self.random, 5) { 1 } else { names.len() };
        for name in names.iter().take(some) {
            self.step("release", pod, name, None);
        }
    }
}

/// A difference that is on purpose; each is a row in docs/differences.md.
fn known(
    host: &TestMachine,
    options: &Options,
    ours: &CompletedStep,
    theirs: &Value,
) -> Option<&'static str> {
    let taken = CpuSet::parse(theirs["cpus"].as_str().unwrap_or_default()).unwrap();
    let reusable = ours.before.reusable.as_ref().map(|(_, cpus)| cpus.clone()).unwrap_or_default();
    if !reusable.is_empty() && theirs["reason"] == "SMTAlignmentError" {
        return Some("CPUs of its init containers, refused by Go");
    }
    let free = ours.before.shared.union(&reusable);
    if !host.even && theirs["reason"] == "" && !taken.is_subset(&free) {
        return Some("CPUs that are not free, in Go");
    }
    if theirs["reason"] == "" && taken.len() != ours.wanted && !host.even {
        return Some("fewer CPUs than requested, in Go");
    }
    if !host.even && theirs["reason"] == "" {
        return Some("cores or sockets that are not alike");
    }
    if options.across_nodes && host.machine.count(Level::Node) > 4 {
        return Some("Go overwrites its choice of nodes");
    }
    None
}

fn compare(
    cases: &mut Cases,
    host: &TestMachine,
    options: &Options,
    simulation: &Simulation<'_>,
    question: &Value,
    theirs: &Value,
) {
    let their_steps = theirs["steps"].as_array().cloned().unwrap_or_default();
    for (index, ours) in simulation.done.iter().enumerate() {
        let Some(their_step) = their_steps.get(index) else {
            if theirs["hangs"] == true {
                return cases.count("Go does not end");
            }
            return cases.differs(&format!("{question}: {theirs}"));
        };
        if ours.result == *their_step {
            continue;
        }
        return match known(host, options, ours, their_step) {
            Some(known) => cases.count(known),
            None => cases.differs(&format!(
                "step {index} {}: {}, in Go {their_step}, state {:?}, {question}",
                simulation.steps[index], ours.result, ours.before
            )),
        };
    }
    let written = state_file::encode(STATIC, &simulation.state);
    if theirs["file"] == written.as_str() {
        cases.count("all steps alike");
    } else {
        cases.differs(&format!("file {written}, in Go {}", theirs["file"]));
    }
}

/// A random policy that starts, with what the Go program needs for the same; `Err`: it does not.
fn policy(random: &mut Random, host: &TestMachine) -> (Value, Result<(StaticPolicy, Options), String>) {
    let given = options(random);
    let topology = pick(random, &["none", "best-effort", "restricted", "single-numa-node"]);
    let count = 1 + random.below(u64::from(host.machine.all().len()).div_ceil(2).min(5)) as u32;
    let mut listed = CpuSet::new();
    if rarely(random, 2) {
        let all: Vec<u32> = host.machine.all().iter().collect();
        (0..count).for_each(|_| listed.insert(pick(random, &all)));
        if rarely(random, 60) {
            listed.insert(1000);
        }
    }
    let count = if listed.is_empty() { count } else { listed.len() };
    let question = json!({
        "ask": "cpus", "machine": host.described, "reserved": listed.to_string(), "count": count,
        "options": given, "policy": topology,
    });
    let reservation = match listed.is_empty() {
        true => Reservation::Amount(Amount::from_milli(i64::from(count) * 1000 - 300)),
        false => Reservation::List(listed),
    };
    let made = Options::parse(&given, Gates { alpha: true, beta: true })
        .map_err(|error| error.to_string())
        .and_then(|options| {
            let made = StaticPolicy::new(
                host.machine.clone(),
                &reservation,
                options,
                topology == "single-numa-node",
            );
            made.map(|made| (made, options)).map_err(|error| error.to_string())
        });
    (question, made)
}

#[test]
fn cpus_are_assigned_as_the_kubelet_does() {
    let (mut cases, mut random) = Cases::new("CPU manager", 2_000);
    let mut peer = Peer::managers();
    while cases.next() {
        let host = host(&mut random);
        let (mut question, made) = policy(&mut random, &host);
        let (policy, options) = match made {
            Ok(made) => made,
            Err(error) => {
                let theirs = peer.ask(&question);
                match theirs["error"] != "" {
                    true => cases.count("refused to start by both"),
                    false => cases.differs(&format!("{error}, not in Go: {question}")),
                }
                continue;
            }
        };
        let cpus = u64::from(host.machine.all().len());
        let gate = rarely(&mut random, 2);
        let pods: Vec<Value> =
            (0..3 + random.below(6) as usize).map(|index| pod(&mut random, index, cpus / 2, gate)).collect();
        let read: Vec<PodCpus> = pods
            .iter()
            .map(|pod| {
                let pod = Pod::from(serde_json::from_value::<coracle::model::api::Pod>(pod.clone()).unwrap());
                PodCpus::from_candidate(Candidate::with_gate(&pod, gate))
            })
            .collect();
        let number = read.len();
        let mut state = policy.empty_state();
        if rarely(&mut random, 2) {
            // The nodes do not have the same numbers of free CPUs.
            let free: Vec<u32> = policy.free(&state).iter().collect();
            let taken: CpuSet = free.into_iter().filter(|_| rarely(&mut random, 3)).collect();
            if !taken.is_empty() && taken != state.shared {
                state.assign(&"earlier".into(), "a", taken);
                question["file"] = state_file::encode(STATIC, &state).into();
            }
        }
        let first_shared = state.shared.to_string();
        let (steps, done) = (Vec::new(), Vec::new());
        let mut simulation =
            Simulation { random: &mut random, policy: &policy, state, pods: read, steps, done };
        for index in 0..number {
            simulation.admit(index);
            if rarely(simulation.random, 3) {
                let earlier = simulation.random.below(index as u64 + 1) as usize;
                simulation.release(earlier);
            }
            if rarely(simulation.random, 8) {
                let earlier = simulation.random.below(index as u64 + 1) as usize;
                simulation.admit(earlier);
            }
        }
        question["pods"] = pods.into();
        question["podLevel"] = gate.into();
        question["steps"] = simulation.steps.clone().into();
        let theirs = peer.ask(&question);
        if theirs["error"] != "" || theirs["start"] != "" {
            // On a machine whose cores are not alike, Go can reserve the wrong number.
            match host.even {
                true => cases.differs(&format!("{theirs}: {question}")),
                false => cases.count("cores or sockets that are not alike"),
            }
            continue;
        }
        if theirs["default"] != first_shared.as_str() {
            match host.even && (!options.across_nodes || host.machine.count(Level::Node) <= 4) {
                true => cases.differs(&format!("reserved {:?}: {theirs} {question}", policy.reserved())),
                false => cases.count("cores or sockets that are not alike"),
            }
            continue;
        }
        compare(&mut cases, &host, &options, &simulation, &question, &theirs);
        if theirs["hangs"] == true {
            peer = Peer::managers();
        }
    }
    cases.end("all steps alike", 2);
}

/// Changes a state file as an operator, another version or a fault of the disk could.
fn changed(random: &mut Random, text: &str) -> String {
    let mut content: Value = serde_json::from_str(text).unwrap();
    match random.below(16) {
        0 => return text[..random.below(text.len() as u64) as usize].to_owned(),
        1 => content["dataChecksum"] = pick(random, &[0, 1]).into(),
        2 => content["data"] = pick(random, &["", "{}", "{\"policyName\":\"static\"}", "x"]).into(),
        3 => return text.replacen("0", "1", 1 + random.below(6) as usize),
        // The older fields do not count beside the newer ones.
        4 => content["checksum"] = 1.into(),
        5 => content["entries"] = json!({"uid-9": {"a": "x"}}),
        6..=9 => return text.to_owned(),
        _ => {
            // A file of an older kubelet.
            let older = content.as_object_mut().unwrap();
            older.retain(|name, _| name != "data" && name != "dataChecksum");
            match random.below(8) {
                0 => content["checksum"] = 1.into(),
                1 => content["checksum"] = 0.into(),
                2 => content["policyName"] = "none".into(),
                3 => {
                    content["defaultCpuSet"] = pick(random, &["", "0", "0-1", "a", "5-2", "0-500"]).into();
                    content["checksum"] = 0.into();
                }
                4 => {
                    content["entries"] = json!({"uid-9": {"a": pick(random, &["0", "1", "x", ""])}});
                    content["checksum"] = 0.into();
                }
                5 => {
                    content["entries"] =
                        json!({pick(random, &["id-1", "id-2"]): pick(random, &["0", "1", "2-3"])});
                    content["checksum"] = 0.into();
                }
                _ => {}
            }
        }
    }
    content.to_string()
}

#[test]
fn state_files_are_read_as_the_kubelet_does() {
    let (mut cases, mut random) = Cases::new("CPU manager's state files", 3_000);
    let mut peer = Peer::managers();
    while cases.next() {
        let host = host(&mut random);
        let (mut question, made) = policy(&mut random, &host);
        let Ok((policy, options)) = made else {
            cases.count("does not start");
            continue;
        };
        let mut state = policy.empty_state();
        for index in 0..random.below(4) {
            let free: Vec<u32> = policy.free(&state).iter().collect();
            let cpus: CpuSet = free.into_iter().filter(|_| rarely(&mut random, 3)).collect();
            if !cpus.is_empty() {
                let uid = format!("uid-{index}");
                state.assign(&uid.as_str().into(), pick(&mut random, &["a", "b"]), cpus);
            }
        }
        if rarely(&mut random, 12) {
            state.shared = policy.machine().all().clone();
        }
        let text = changed(&mut random, &state_file::encode(STATIC, &state));
        if text.is_empty() {
            continue;
        }
        let ours = state_file::decode(&text, STATIC).and_then(|state| state_file::check(&policy, state));
        question["pods"] = json!([]);
        question["file"] = text.as_str().into();
        let theirs = peer.ask(&question);
        let even = host.even && (!options.across_nodes || host.machine.count(Level::Node) <= 4);
        match (&ours, theirs["start"] == "" && theirs["error"] == "") {
            (Ok(state), true) if theirs["default"] == state.shared.to_string().as_str() => {
                cases.count("read alike");
            }
            (Err(_), false) => cases.count("refused by both"),
            _ if !even => cases.count("cores or sockets that are not alike"),
            (Ok(state), false) if options.strict_reservation && state.shared.is_empty() => {
                cases.count("nothing is shared, refused by Go");
            }
            _ => cases.differs(&format!("{text}: {ours:?}, in Go {theirs}")),
        }
    }
    cases.end("read alike", 4);
}
