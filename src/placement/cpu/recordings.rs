//! The recordings of the Go kubelet with static managers (`tests/golden/resources`, scenarios
//! `g-…`), step by step: state files, refused pods, and the sets that the runtime gets.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json};

use super::options::{Gates, Options};
use super::policy::{Reservation, StaticPolicy};
use super::request::{Kind, PodCpus};
use super::state::State;
use super::state_file::{self, StateError};
use super::updates::{Applied, RunningContainer};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::placement::cpus::CpuSet;
use crate::placement::machine::{Cpu, Machine};

/// Those of the other managers have no CPU manager that starts, or nothing to compare.
const SCENARIOS: [&str; 5] = ["g-more", "g-noreserve", "g-options", "g-restart", "g-static"];

/// The memory manager refuses it.
const OF_MEMORY: [&str; 1] = ["st-gu-mem"];

/// It was added together with a pod with exclusive CPUs: which came first is chance.
const BY_CHANCE: [(&str, &str); 2] = [("g-options", "be-one"), ("g-restart", "be-one")];

/// The pods' UIDs: MD5 of the names.
pub(in super::super) const UIDS: &[(&str, &str)] = &[
    ("be-one", "108dd550-ab81-4efc-3f51-09e22600514e"),
    ("bu-req", "dc71da5a-9410-c944-a34c-f7542424a76f"),
    ("gu-frac", "94cfc863-7641-686b-68b3-4feac7e93c06"),
    ("gu-one", "cf49803e-63f8-4e63-bc80-98c54bd89d72"),
    ("gu-one-b", "af807db9-4788-7055-b3d2-0d44b16647b9"),
    ("gu-one-more", "10cdad0f-34a2-7f6f-c0e2-7672a6389d00"),
    ("gu-small", "7e76bcc1-f147-7c1a-505a-add1786e7abf"),
    ("pl-gu-int", "a59bf55a-4231-7375-57c5-4084a52e8412"),
    ("st-gu-2", "d7151679-bf57-d62e-d3d0-915a16f75fe5"),
    ("st-gu-init", "9e0a0201-ea63-a0a3-0947-875c159420f7"),
    ("st-gu-init-frac", "75d9ce2c-97a5-7e3a-f344-00c12a4497cf"),
    ("st-gu-job", "ff7f52e9-3d74-88fb-42ff-105a3c69b6d6"),
    ("st-gu-mem", "3931d76e-31a9-f568-f5c9-06435e1ba93f"),
    ("st-gu-sidecar", "676c8261-2155-4bd9-d793-ce8ef4cf3bb3"),
];

pub(in super::super) fn read(path: &str) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/resources");
    serde_json::from_str(&std::fs::read_to_string(root.join(path)).unwrap()).unwrap()
}

/// The machine of the recordings.
fn machine() -> Machine {
    let cpu = |core| (core, Cpu { core, socket: 0, node: 0, cache: 0 });
    Machine::new(BTreeMap::from([cpu(0), cpu(1)]))
}

#[derive(Default)]
struct Replay {
    scenario: &'static str,
    file: Option<String>,
    saved: Option<String>,
    policy: Option<StaticPolicy>,
    state: State,
    applied: Applied,
    active: Vec<(String, PodCpus)>,
    refused: BTreeSet<String>,
    /// The sets of each container, by pod and name.
    sets: BTreeMap<(String, String), BTreeSet<String>>,
    uids: BTreeMap<String, PodUid>,
    checked: usize,
}

impl Replay {
    fn start(&mut self, config: &Value, step: &Value) {
        let mut config = config.clone();
        for (name, value) in step["start"].as_object().unwrap() {
            config[name] = value.clone();
        }
        let log = step["result"]["log"].to_string();
        let exited = step["result"]["exited"] == true && !log.contains("memory manager");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.policy = None;
        let started = (|| -> Result<(), String> {
            if config["cpuManagerPolicy"] == "none" {
                let read =
                    self.file.as_ref().map(|text| state_file::decode(text, state_file::NONE)).transpose();
                self.state = read.map_err(|error| error.to_string())?.unwrap_or_default();
                self.file = Some(state_file::encode(state_file::NONE, &self.state));
                return Ok(());
            }
            let given = config["cpuManagerPolicyOptions"].as_object().into_iter().flatten();
            let given = given.map(|(name, value)| (name.clone(), text(value))).collect();
            let options = Options::parse(&given, Gates::default()).map_err(|error| error.to_string())?;
            let reservation = match config["reservedSystemCPUs"].as_str() {
                Some(list) => Reservation::List(CpuSet::parse(list).unwrap()),
                None => {
                    let cpu = config["kubeReserved"]["cpu"].as_str().unwrap_or("0");
                    Reservation::Amount(Amount::parse(cpu).unwrap())
                }
            };
            let policy = StaticPolicy::new(machine(), &reservation, options, false)
                .map_err(|error| error.to_string())?;
            self.state = match &self.file {
                Some(text) => state_file::decode(text, state_file::STATIC)
                    .and_then(|state| state_file::check(&policy, state))
                    .map_err(|error: StateError| error.to_string())?,
                None => policy.empty_state(),
            };
            self.policy = Some(policy);
            self.write();
            Ok(())
        })();
        assert_eq!(started.is_err(), exited, "{}: {started:?} {log}", self.scenario);
        self.checked += usize::from(exited);
    }

    fn write(&mut self) {
        if self.policy.is_some() {
            self.file = Some(state_file::encode(state_file::STATIC, &self.state));
        }
    }

    fn add(&mut self, name: &str) {
        let mut manifest = read(&format!("manifests/{name}.json"));
        manifest["metadata"]["uid"] = self.uids.get(name).map_or(name, PodUid::as_str).into();
        let object: crate::model::api::Pod = serde_json::from_value(manifest).unwrap();
        let pod = PodCpus::new(&Pod::from(object));
        let Some(policy) = self.policy.clone() else { return };
        self.release();
        let no_room = |hints: Option<Vec<_>>| hints.is_some_and(|list| list.is_empty());
        for container in &pod.containers {
            if no_room(policy.hints(&self.state, &pod, container)) {
                self.refused.insert(name.to_owned());
                return;
            }
            policy.allocate(&mut self.state, &pod, container, None).unwrap();
        }
        if OF_MEMORY.contains(&name) {
            return;
        }
        for container in &pod.containers {
            self.run(name, &pod, &container.name, true);
        }
        self.active.push((name.to_owned(), pod));
        self.reconcile();
    }

    /// A container is created with its set, or updated to it.
    fn run(&mut self, name: &str, pod: &PodCpus, container: &str, created: bool) {
        let Some(cpus) = self.state.cpus_of(&pod.uid, container).cloned() else { return };
        let key = (name.to_owned(), container.to_owned());
        self.sets.entry(key).or_default().insert(cpus.to_string());
        if created {
            self.applied.note(format!("{name}/{container}").into(), cpus);
        }
    }

    fn release(&mut self) {
        let names = |pod: &PodCpus| pod.containers.iter().map(|container| container.name.clone()).collect();
        let active = self.active.iter().map(|(_, pod)| (pod.uid.clone(), names(pod))).collect();
        self.state.release_inactive(&active);
    }

    /// What a reconciliation does, whenever it comes.
    fn reconcile(&mut self) {
        self.release();
        let mut running = Vec::new();
        for (name, pod) in &self.active {
            for container in pod.containers.iter().filter(|container| container.kind != Kind::Init) {
                let id = format!("{name}/{}", container.name).into();
                running.push(RunningContainer { pod: pod.uid.clone(), name: container.name.clone(), id });
            }
        }
        for update in self.applied.updates(&self.state, &running) {
            let id = update.id.as_str().to_owned();
            let (name, container) = id.split_once('/').unwrap();
            let key = (name.to_owned(), container.to_owned());
            self.sets.entry(key).or_default().insert(update.cpus.to_string());
            self.applied.note(update.id, update.cpus);
        }
        self.write();
    }
}

fn replay(scenario: &'static str) -> usize {
    let recorded = read(&format!("expected/{scenario}.json"));
    let mut replay = Replay { scenario, ..Replay::default() };
    for (name, uid) in UIDS {
        replay.uids.insert((*name).to_owned(), (*uid).into());
    }
    for step in recorded["steps"].as_array().unwrap() {
        let names = |list: &Value| -> Vec<String> {
            list.as_array().into_iter().flatten().map(|name| name.as_str().unwrap().to_owned()).collect()
        };
        if step["start"].is_object() {
            replay.start(&recorded["config"], step);
        }
        match step["sh"].as_str() {
            Some(command) if command.contains("sed -i") => {
                replay.saved = replay.file.replace(step["result"]["out"].as_str().unwrap().to_owned());
            }
            Some(_) => replay.file = replay.saved.take(),
            None => {}
        }
        names(&step["add"]).iter().for_each(|name| replay.add(name));
        let mut over = names(&step["remove"]);
        over.extend(step["until"]["pod"].as_str().map(str::to_owned));
        replay.active.retain(|(name, _)| !over.contains(name));
        let mut files = step["file"].as_object().into_iter().flatten();
        if files.any(|(path, _)| path.ends_with("/cpu_manager_state")) {
            replay.file = None;
        }
        if let Some(expected) = step["state_files"].get("cpu_manager_state") {
            replay.reconcile();
            let mut found: Value = serde_json::from_str(replay.file.as_deref().unwrap()).unwrap();
            // The recordings are of 1.36.
            let newer = found.as_object_mut().unwrap();
            newer.retain(|name, _| name != "data" && name != "dataChecksum");
            assert_eq!(found, *expected, "{scenario}: {}", step["dump"]);
            replay.checked += 1;
        }
    }
    let refused: BTreeSet<String> = recorded["events"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|event| event[3] == json!("TopologyAffinityError"))
        .map(|event| event[1].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(replay.refused, refused, "{scenario}");
    let mut sets: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for (pod, calls) in recorded["cri"].as_object().unwrap() {
        for call in calls.as_array().unwrap() {
            let name =
                call["of"].as_str().map(|name| name.trim_start_matches("<container ").trim_end_matches('>'));
            let Some(container) = call["container"].as_str().or(name) else { continue };
            let cpus = call["resources"]["cpuset_cpus"].as_str().or(call["linux"]["cpuset_cpus"].as_str());
            if let Some(cpus) = cpus {
                let key = (pod.clone(), container.to_owned());
                sets.entry(key).or_default().insert(cpus.to_owned());
            }
        }
    }
    for (key, expected) in sets {
        if BY_CHANCE.contains(&(scenario, key.0.as_str())) {
            continue;
        }
        assert_eq!(replay.sets.get(&key), Some(&expected), "{scenario}: {key:?}");
        replay.checked += 1;
    }
    replay.checked
}

#[test]
fn recordings_of_the_static_policy_are_followed() {
    let checked: Vec<usize> = SCENARIOS.into_iter().map(replay).collect();
    // States, starts that fail, and containers of each scenario.
    assert!(checked.iter().all(|count| *count >= 1) && checked.iter().sum::<usize>() >= 30, "{checked:?}");
}
