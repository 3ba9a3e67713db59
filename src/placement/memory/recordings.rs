//! The recordings of the Go kubelet with static managers (`tests/golden/resources`, scenarios
//! `g-…`), step by step, through the topology manager. CPUs are those of the recording's machine:
//! one that is reserved, and one that can be exclusive.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::*;
use crate::model::api::Container;
use crate::model::pod::{Pod, QosClass, is_sidecar, request};
use crate::model::quantity::Amount;
use crate::model::requests::Amounts;
use crate::placement::cpu::recordings::{UIDS, read};
use crate::placement::numa::{Hint, NumaMask};
use crate::placement::numa_nodes::NumaNode;
use crate::placement::topology::{AllocateError, Candidate, Hints, Policy, Provider, Scope, TopologyManager};

const SCENARIOS: [&str; 5] = ["g-more", "g-noreserve", "g-options", "g-restart", "g-static"];

/// Any machine will do: the recorded amounts are relative to its memory.
const MEMORY: u64 = 12_308_393_984;

/// Starts that fail for another manager.
const OTHER_MANAGERS: [&str; 2] = ["Failed to initialize cpu manager", "start cpu manager error"];

/// Pods that a later check refuses, so that their memory stays in the state for a while.
const REFUSED_LATER: [&str; 1] = ["gu-frac"];

fn pod(name: &str) -> Pod {
    let mut manifest = read(&format!("manifests/{name}.json"));
    let uid = UIDS.iter().find(|(known, _)| *known == name).unwrap().1;
    manifest["metadata"]["uid"] = uid.into();
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(manifest).unwrap())
}

/// The CPU that can be exclusive: by pod, what its sidecars and app containers have of it.
#[derive(Default)]
struct Cpu(BTreeMap<String, i64>);

impl Cpu {
    fn wants(pod: &Pod, container: &Container) -> Option<i64> {
        let whole = request(container, "cpu").filter(|cpu| cpu.is_whole())?.units();
        let exclusive = pod.qos() == QosClass::Guaranteed && pod.spec().resources.is_none() && whole > 0;
        exclusive.then_some(whole)
    }

    fn hint(&self, whole: Option<i64>) -> Hints {
        let hint = Hint { nodes: Some(NumaMask(1)), preferred: true };
        let used: i64 = self.0.values().sum();
        let list = |whole: i64| if used + whole <= 1 { vec![hint] } else { Vec::new() };
        whole.map(|whole| ("cpu".to_owned(), list(whole))).into_iter().collect()
    }
}

impl Provider for Cpu {
    fn hints(&self, pod: Candidate<'_>, container: &Container) -> Hints {
        self.hint(Cpu::wants(pod.pod, container).filter(|_| !self.0.contains_key(pod.pod.name())))
    }

    fn pod_hints(&self, pod: Candidate<'_>) -> Hints {
        let pod = pod.pod;
        let wanted = pod.containers().iter().filter_map(|container| Cpu::wants(pod, container)).sum();
        self.hint(Some(wanted).filter(|wanted| *wanted > 0))
    }

    fn allocate(&mut self, pod: Candidate<'_>, container: &Container, _: Hint) -> Result<(), AllocateError> {
        let pod = pod.pod;
        let plain_init =
            pod.init_containers().iter().any(|init| init.name == container.name && !is_sidecar(init));
        if let Some(whole) = Cpu::wants(pod, container).filter(|_| !plain_init) {
            *self.0.entry(pod.name().to_owned()).or_default() += whole;
        }
        Ok(())
    }
}

#[derive(Default)]
struct Replay {
    scenario: &'static str,
    config: Value,
    file: Option<String>,
    memory: Option<Memory>,
    topology: Option<TopologyManager>,
    cpu: Cpu,
    active: Vec<Pod>,
    /// As recorded.
    denials: BTreeSet<String>,
    /// By pod and container.
    mems: BTreeMap<(String, String), Option<String>>,
    checked: usize,
}

impl Replay {
    /// A start with the changes of the settings in the step; they apply to later starts, too.
    fn start(&mut self, step: &Value) {
        for (name, value) in step["start"].as_object().unwrap() {
            self.config[name] = value.clone();
        }
        let config = self.config.clone();
        let log = step["result"]["log"].to_string();
        if OTHER_MANAGERS.iter().any(|other| log.contains(other)) {
            return;
        }
        let exited = step["result"]["exited"] == true;
        let huge_pages = BTreeMap::from([(2 << 20, 0), (1 << 30, 0)]);
        let node = NumaNode { memory_bytes: MEMORY, huge_pages, ..NumaNode::default() };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let result = (|| -> Result<(), String> {
            let policy = Policy::parse(&text(&config["topologyManagerPolicy"])).unwrap();
            let scope = Scope::parse(&text(&config["topologyManagerScope"])).unwrap_or_default();
            let topology = TopologyManager::new(policy, scope, &BTreeMap::new(), std::slice::from_ref(&node));
            self.topology = Some(topology.map_err(|error| error.to_string())?);
            self.memory = None;
            if config["memoryManagerPolicy"] != "Static" {
                match &self.file {
                    Some(text) => check_none(text).map_err(|error| error.to_string())?,
                    None => self.file = Some(NONE_STATE.to_owned()),
                }
                return Ok(());
            }
            let reserved = reserved(&node, &config).map_err(|error| error.to_string())?;
            let memory = match &self.file {
                Some(text) => Memory::restore(std::slice::from_ref(&node), &reserved, text),
                None => Ok(Memory::new(std::slice::from_ref(&node), &reserved)),
            };
            self.memory = Some(memory.map_err(|error| error.to_string())?);
            Ok(())
        })();
        match result {
            Ok(()) => assert!(!exited, "{}: {log}", self.scenario),
            // The log is JSON in JSON.
            Err(error) => {
                let quoted = error.replace('"', r#"\\\""#);
                assert!(exited && log.contains(&quoted), "{}: {quoted}: {log}", self.scenario);
                self.checked += 1;
            }
        }
        // The sources are not ready yet, so nothing is released.
        for pod in self.active.clone() {
            self.admit(&pod);
        }
        self.write();
    }

    fn admit(&mut self, pod: &Pod) -> bool {
        let Some(topology) = self.topology.as_ref() else { return false };
        let mut providers: Vec<&mut dyn Provider> = vec![&mut self.cpu];
        providers.extend(self.memory.as_mut().map(|memory| memory as &mut dyn Provider));
        match topology.admit(pod, &mut providers).denial {
            Some(denial) => {
                let event = json!(["Pod", pod.name(), "Warning", denial.reason, denial.message]);
                self.denials.insert(event.to_string());
                false
            }
            None => true,
        }
    }

    fn add(&mut self, name: &str) {
        let pod = pod(name);
        self.active.push(pod.clone());
        let active = &self.active;
        self.cpu.0.retain(|name, _| active.iter().any(|pod| pod.name() == name));
        if let Some(memory) = &mut self.memory {
            memory.release_inactive(&self.active, &|_| false);
        }
        let admitted = self.admit(&pod);
        if !admitted || REFUSED_LATER.contains(&name) {
            self.active.retain(|active| active.uid() != pod.uid());
        } else if let Some(memory) = &mut self.memory {
            for container in pod.all_containers() {
                memory.release_ended_init_containers(&pod, &container.name);
                let mems = memory.cpuset_mems(pod.uid(), &container.name);
                let text = mems.map(|mems| mems.iter().map(|number| number.to_string()).collect());
                self.mems.insert((name.to_owned(), container.name.clone()), text);
            }
        }
        self.write();
    }

    fn write(&mut self) {
        if let Some(memory) = &mut self.memory
            && memory.take_changed()
        {
            self.file = Some(memory.state_file());
        }
    }

    /// The state file with amounts relative to the machine's memory, as recorded.
    fn state(&self) -> Value {
        let mut state: Value = serde_json::from_str(self.file.as_deref().unwrap()).unwrap();
        // The recordings are of 1.36.
        state.as_object_mut().unwrap().retain(|name, _| name != "data" && name != "dataChecksum");
        if self.memory.is_some() {
            state["checksum"] = "<checksum>".into();
            let table = &mut state["machineState"]["0"]["memoryMap"]["memory"];
            for name in ["total", "allocatable", "free"] {
                let less = MEMORY - table[name].as_u64().unwrap();
                table[name] = if less == 0 { "total".into() } else { format!("total-{less}").into() };
            }
        }
        state
    }
}

fn reserved(node: &NumaNode, config: &Value) -> Result<Reserved, ReservedError> {
    let amount = |value: &Value| Amount::parse(value.as_str().unwrap()).unwrap();
    let amounts = |value: &Value| -> Amounts {
        value.as_object().unwrap().iter().map(|(name, value)| (name.clone(), amount(value))).collect()
    };
    let mut configured = Vec::new();
    for reservation in config["reservedMemory"].as_array().into_iter().flatten() {
        configured.push((reservation["numaNode"].as_i64().unwrap(), amounts(&reservation["limits"])));
    }
    let memory =
        amount(&config["kubeReserved"]["memory"]) + amount(&config["evictionHard"]["memory.available"]);
    let expected = Amounts::from([("memory".to_owned(), memory)]);
    Reserved::new(std::slice::from_ref(node), &configured, &expected)
}

fn replay(scenario: &'static str) -> usize {
    let recorded = read(&format!("expected/{scenario}.json"));
    let config = recorded["config"].clone();
    let mut replay = Replay { scenario, config, ..Replay::default() };
    for step in recorded["steps"].as_array().unwrap() {
        let names = |list: &Value| -> Vec<String> {
            list.as_array().into_iter().flatten().map(|name| name.as_str().unwrap().to_owned()).collect()
        };
        if step["start"].is_object() {
            replay.start(step);
        }
        names(&step["add"]).iter().for_each(|name| replay.add(name));
        let mut over = names(&step["remove"]);
        over.extend(step["until"]["pod"].as_str().map(str::to_owned));
        replay.active.retain(|pod| !over.iter().any(|name| name == pod.name()));
        let mut files = step["file"].as_object().into_iter().flatten();
        if files.any(|(path, _)| path.ends_with("/memory_manager_state")) {
            replay.file = None;
        }
        if let Some(expected) = step["state_files"].get("memory_manager_state") {
            assert_eq!(replay.state(), *expected, "{scenario}: {}", step["dump"]);
            replay.checked += 1;
        }
    }
    let of_managers = |event: &&Value| {
        let text = event[4].as_str().unwrap_or_default();
        event[3] == "TopologyAffinityError" || text.starts_with("Allocate failed")
    };
    let events = recorded["events"].as_array().into_iter().flatten().filter(of_managers);
    let denials: BTreeSet<String> = events.map(Value::to_string).collect();
    assert_eq!(replay.denials, denials, "{scenario}");
    for (pod, calls) in recorded["cri"].as_object().unwrap() {
        for call in calls.as_array().unwrap().iter().filter(|call| call["call"] == "CreateContainer") {
            let key = (pod.clone(), call["container"].as_str().unwrap().to_owned());
            let expected = call["resources"]["cpuset_mems"].as_str().map(str::to_owned);
            if let Some(found) = replay.mems.get(&key) {
                assert_eq!(*found, expected, "{scenario}: {key:?}");
                replay.checked += 1;
            }
        }
    }
    replay.checked
}

#[test]
fn recordings_of_static_managers_are_followed() {
    let checked: Vec<usize> = SCENARIOS.into_iter().map(replay).collect();
    // States, errors and containers of each scenario.
    assert!(checked.iter().all(|count| *count >= 1) && checked.iter().sum::<usize>() >= 30, "{checked:?}");
}
