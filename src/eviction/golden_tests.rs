//! The passes against recordings of the Go kubelet (`tests/golden/resources`, `ev-*`): a small
//! model of a node follows the steps of each scenario, and conditions, victims, their order,
//! statuses, messages, events and grace periods must be the recorded ones.
//!
//! The model takes from each manifest what its containers write, where, and when; times are whole
//! seconds. What other rooms decide (the start of a pod, the phase of a pod whose containers ended)
//! is modeled as recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::{Value, json};

use super::admit::admit;
use super::pass::{Action, EvictionManager, Settings};
use super::{Layout, Pressure, Pressures, Victim};
use crate::config::{GoDuration, KubeletConfiguration};
use crate::model::api;
use crate::model::ids::PodUid;
use crate::model::pod::{CONFIG_SOURCE, Pod};
use crate::resources::stats::sample::{
    ContainerUse, FileSystem, NodeUse, Numbers, PodUse, Snapshot, VolumeUse,
};

const MIB: u64 = 1 << 20;
/// The memory of the recording machine, and what is used without pods.
const CAPACITY: u64 = 24_684_084 << 10;
const SYSTEM: u64 = 2000 * MIB;
/// The recordings' root directory was a file system of its own, with about this much free.
const FREE: u64 = 900 * MIB;
/// What the idle shell of a container uses of memory.
const SHELL: u64 = 400 << 10;
/// From the end of a container's start to its first write, and of a pod's eviction to its end.
const START: u64 = 3;
const END: u64 = 2;
/// The age of what the statistics show of volumes and writable layers. It was 5 to 10 s.
const DISK_AGE: u64 = 9;

/// What the recordings have that this room does not decide, each with the reason.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("ev-admission", "admission and preemption decide (pods::admission); no threshold is met"),
    ("bu-req", "its containers exit with 0, from which upstream's status makes Succeeded"),
    ("ev-eph-log", "its containers exit with 0, from which upstream's status makes Succeeded"),
];

fn is_exception(name: &str) -> bool {
    EXCEPTIONS.iter().any(|(exception, _)| *exception == name)
}

fn read(part: &str, name: &str) -> Value {
    let root = std::env::var_os("CARGO_MANIFEST_DIR").unwrap();
    let path = Path::new(&root).join("tests/golden/resources").join(part).join(format!("{name}.json"));
    serde_json::from_slice(
        &std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())),
    )
    .unwrap()
}

/// What a container writes, by its command: MiB, to where, after how many seconds.
struct Writes {
    mib: u64,
    to: String,
    after: u64,
}

impl Writes {
    fn from_container(container: &api::Container) -> Option<Writes> {
        let text = container.command.as_ref()?.last()?;
        let after = |field: &str| {
            let rest = text.split_once(field)?.1;
            rest.split([' ', ';']).next()
        };
        Some(Writes {
            mib: after("count=")?.parse().ok()?,
            to: after("of=").unwrap_or("log").to_owned(),
            after: after("sleep ")
                .filter(|_| text.find("sleep ") < text.find("dd "))
                .map_or(0, |seconds| seconds.parse().unwrap()),
        })
    }

    /// Bytes at `place` of a pod that started at `started`.
    fn bytes_at(&self, place: &str, started: u64, now: u64) -> u64 {
        if self.to.starts_with(place) && now >= started + START + self.after { self.mib * MIB } else { 0 }
    }
}

struct Running {
    pod: Pod,
    started: u64,
    evicted: Option<u64>,
}

impl Running {
    fn name(&self) -> &str {
        self.pod.name()
    }

    fn has_ended(&self, now: u64) -> bool {
        self.evicted.is_some_and(|evicted| now >= evicted + END)
    }

    /// Where an emptyDir is mounted, and whether it is in memory.
    fn volumes(&self) -> impl Iterator<Item = (&str, bool, &str)> {
        let mounts =
            || self.pod.containers().iter().flat_map(|container| container.volume_mounts.iter().flatten());
        self.pod.spec().volumes.iter().flatten().filter_map(move |volume| {
            let in_memory = volume.empty_dir.as_ref()?.medium.as_deref() == Some("Memory");
            let mount = mounts().find(|mount| mount.name == volume.name)?;
            Some((volume.name.as_str(), in_memory, mount.mount_path.as_str()))
        })
    }

    fn written(&self, place: &str, now: u64) -> u64 {
        let writes = self.pod.containers().iter().filter_map(Writes::from_container);
        writes.map(|writes| writes.bytes_at(place, self.started, now)).sum()
    }

    /// Bytes on the disk of the root directory.
    fn on_disk(&self, now: u64) -> u64 {
        let disks = self.volumes().filter(|(_, in_memory, _)| !in_memory);
        disks.map(|(.., mount)| self.written(mount, now)).sum::<u64>() + self.written("log", now)
    }

    fn used(&self, now: u64) -> PodUse {
        let space = |used: u64| FileSystem { used: Some(used), ..FileSystem::default() };
        let in_memory: Vec<&str> =
            self.volumes().filter(|(_, in_memory, _)| *in_memory).map(|(.., mount)| mount).collect();
        let before = now.saturating_sub(DISK_AGE);
        let containers: Vec<ContainerUse> = self
            .pod
            .containers()
            .iter()
            .map(|container| {
                let written = |place: &str, now| {
                    Writes::from_container(container)
                        .map_or(0, |writes| writes.bytes_at(place, self.started, now))
                };
                let memory = SHELL + in_memory.iter().map(|mount| written(mount, now)).sum::<u64>();
                ContainerUse {
                    name: container.name.clone(),
                    numbers: Numbers { working_set: Some(memory), ..Numbers::default() },
                    rootfs: Some(space((8 << 10) + written("/tmp", before))),
                    logs: Some(space((4 << 10) + written("log", before))),
                    ..ContainerUse::default()
                }
            })
            .collect();
        let volumes: Vec<VolumeUse> = self
            .volumes()
            .map(|(name, in_memory, mount)| VolumeUse {
                name: name.to_owned(),
                ephemeral: !in_memory,
                space: space(self.written(mount, before)),
                ..VolumeUse::default()
            })
            .collect();
        let sum = |number: fn(&ContainerUse) -> u64| containers.iter().map(number).sum::<u64>();
        let storage = sum(|container| container.rootfs.as_ref().and_then(|space| space.used).unwrap_or(0))
            + sum(|container| container.logs.as_ref().and_then(|space| space.used).unwrap_or(0))
            + volumes
                .iter()
                .filter(|volume| volume.ephemeral)
                .filter_map(|volume| volume.space.used)
                .sum::<u64>();
        let memory = sum(|container| container.numbers.working_set.unwrap_or(0)) + SHELL;
        PodUse {
            uid: self.pod.uid().clone(),
            name: self.name().to_owned(),
            numbers: Numbers { working_set: Some(memory), ..Numbers::default() },
            containers,
            volumes,
            local_storage: Some(space(storage)),
            ..PodUse::default()
        }
    }
}

/// A status that this room decided about.
#[derive(Debug, Clone, PartialEq)]
struct Status {
    message: String,
    disruption_target: bool,
}

struct Node {
    eviction: EvictionManager,
    start: Instant,
    now: u64,
    next_pass: u64,
    pods: Vec<Running>,
    pressures: Pressures,
    /// Pods in the order in which they ended.
    phases: Vec<(String, String, Value)>,
    events: BTreeSet<(String, String, String, String, String)>,
    statuses: BTreeMap<String, Status>,
    graces: BTreeMap<String, i64>,
}

impl Node {
    fn new(config: &Value) -> Node {
        let map = |field: &str| -> BTreeMap<String, String> {
            let entries = config[field].as_object().into_iter().flatten();
            entries.map(|(name, value)| (name.clone(), amount(value.as_str().unwrap()))).collect()
        };
        let duration = |field: &str, default: &str| {
            GoDuration::parse(config[field].as_str().unwrap_or(default)).unwrap()
        };
        let config = KubeletConfiguration {
            eviction_hard: map("evictionHard"),
            eviction_soft: map("evictionSoft"),
            eviction_soft_grace_period: map("evictionSoftGracePeriod"),
            eviction_max_pod_grace_period: i32::try_from(
                config["evictionMaxPodGracePeriod"].as_i64().unwrap_or(0),
            )
            .unwrap(),
            eviction_pressure_transition_period: duration("evictionPressureTransitionPeriod", "5m"),
            local_storage_capacity_isolation: config["localStorageCapacityIsolation"].as_bool().unwrap(),
            ..KubeletConfiguration::default()
        };
        Node {
            eviction: EvictionManager::new(Settings::new(&config, false).unwrap(), Layout::Images),
            start: Instant::now(),
            now: 0,
            next_pass: 0,
            pods: Vec::new(),
            pressures: Pressures::default(),
            phases: Vec::new(),
            events: BTreeSet::new(),
            statuses: BTreeMap::new(),
            graces: BTreeMap::new(),
        }
    }

    fn event(&mut self, kind: &str, name: &str, event_type: &str, reason: &str, message: String) {
        let texts = [kind, name, event_type, reason].map(str::to_owned);
        let [kind, name, event_type, reason] = texts;
        self.events.insert((kind, name, event_type, reason, without_amounts(&message)));
    }

    fn add(&mut self, name: &str, source: &str) {
        let mut manifest = read("manifests", name);
        manifest["metadata"]["uid"] = json!(name);
        manifest["metadata"]["annotations"] = json!({CONFIG_SOURCE: source});
        let mut object: api::Pod = serde_json::from_value(manifest).unwrap();
        // The API server's default: limits are requests.
        for container in object.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
            let Some(resources) = &mut container.resources else { continue };
            let mut all = resources.limits.clone().unwrap_or_default();
            all.extend(resources.requests.take().unwrap_or_default());
            resources.requests = Some(all);
        }
        let pod = Pod::from(object);
        match admit(&pod, self.pressures) {
            Ok(()) => self.pods.push(Running { pod, started: self.now, evicted: None }),
            Err(message) => {
                self.event("Pod", name, "Warning", "Evicted", message.clone());
                self.phases.push((name.to_owned(), "Failed".to_owned(), json!("Evicted")));
                let status =
                    Status { message: format!("Pod was rejected: {message}"), disruption_target: false };
                self.statuses.insert(name.to_owned(), status);
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        let alive = || self.pods.iter().filter(|pod| !pod.has_ended(self.now));
        let pods: Vec<PodUse> = alive().map(|pod| pod.used(self.now)).collect();
        let time = Timestamp::from_second(1_000_000 + i64::try_from(self.now).unwrap()).unwrap();
        let memory: u64 = SYSTEM + pods.iter().filter_map(|pod| pod.numbers.working_set).sum::<u64>();
        let written: u64 = alive().map(|pod| pod.on_disk(self.now)).sum();
        let space = |available: u64| FileSystem {
            time,
            available: Some(available),
            capacity: Some(2 * FREE),
            inodes_free: Some(1000),
            inodes: Some(1000),
            ..FileSystem::default()
        };
        let numbers = Numbers {
            time,
            available: Some(CAPACITY - memory),
            working_set: Some(memory),
            ..Numbers::default()
        };
        let node = NodeUse {
            numbers,
            fs: Some(space(FREE - written)),
            image_fs: Some(space(FREE)),
            ..NodeUse::default()
        };
        Snapshot { node, pods, ..Snapshot::default() }
    }

    fn pass(&mut self) {
        let active: Vec<Pod> =
            self.pods.iter().filter(|pod| pod.evicted.is_none()).map(|pod| pod.pod.clone()).collect();
        let outcome =
            self.eviction.pass(&self.snapshot(), &active, self.start + Duration::from_secs(self.now));
        for pressure in Pressure::ALL {
            if outcome.pressures.has(pressure) != self.pressures.has(pressure) {
                let reason = match (pressure, outcome.pressures.has(pressure)) {
                    (Pressure::Memory, true) => "NodeHasInsufficientMemory",
                    (Pressure::Memory, false) => "NodeHasSufficientMemory",
                    (Pressure::Disk, true) => "NodeHasDiskPressure",
                    (Pressure::Disk, false) => "NodeHasNoDiskPressure",
                    (Pressure::Pid, _) => panic!("no scenario has it"),
                };
                let message = format!("Node golden-node status is now: {reason}");
                self.event("Node", "golden-node", "Normal", reason, message);
            }
        }
        self.pressures = outcome.pressures;
        self.next_pass = self.now + 10;
        match outcome.action {
            Action::None => {}
            Action::Limits(victims) => victims.into_iter().for_each(|victim| self.evict(victim)),
            Action::Shortage(shortage) => {
                self.event(
                    "Node",
                    "golden-node",
                    "Warning",
                    "EvictionThresholdMet",
                    shortage.message.clone(),
                );
                assert!(shortage.reclaim.is_empty(), "images are on another file system");
                shortage.victim.into_iter().for_each(|victim| self.evict(victim));
            }
        }
    }

    fn evict(&mut self, victim: Victim) {
        let now = self.now;
        let name = victim.pod.name().to_owned();
        self.event("Pod", &name, "Warning", "Evicted", victim.message.clone());
        self.graces.insert(name.clone(), victim.grace_seconds);
        let status =
            Status { message: without_amounts(&victim.message), disruption_target: victim.disruption_target };
        self.statuses.insert(name.clone(), status);
        self.phases.push((name.clone(), "Failed".to_owned(), json!("Evicted")));
        let pod = self.pods.iter_mut().find(|pod| pod.name() == name).unwrap();
        assert!(pod.evicted.is_none(), "{name} is evicted once");
        pod.evicted = Some(now);
        // The pass after an eviction comes when the pod has ended.
        self.next_pass = now + END;
    }

    fn tick(&mut self) {
        if self.now >= self.next_pass {
            self.pass();
        }
        self.now += 1;
    }
}

/// A placeholder of the scenarios: what there is, minus an amount.
fn amount(text: &str) -> String {
    let minus = |prefix: &str, all: u64| {
        let mib: u64 = text.strip_prefix(prefix)?.strip_suffix("Mi>")?.parse().ok()?;
        Some((all - mib * MIB).to_string())
    };
    minus("<capacity-", CAPACITY).or_else(|| minus("<free-", FREE)).unwrap_or_else(|| text.to_owned())
}

/// Measured amounts are `<n>` in the recordings.
fn without_amounts(message: &str) -> String {
    let mut text = message.to_owned();
    for before in ["Threshold quantity: ", "available: ", "was using "] {
        let mut from = 0;
        while let Some(offset) = text.get(from..).and_then(|rest| rest.find(before)) {
            let start = from + offset + before.len();
            let end = start + text[start..].find([',', '.', ' ']).unwrap();
            text.replace_range(start..end, "<n>");
            from = start;
        }
    }
    text
}

/// Follows a scenario. The result has the node at the end, and what the recording's dumps of the
/// API server did not agree with.
fn follow(name: &str) -> (Node, Vec<String>) {
    let (scenario, expected) = (read("scenarios", name), read("expected", name));
    let mut node: Option<Node> = None;
    let mut early: Vec<String> = Vec::new();
    let mut problems = Vec::new();
    let names = |step: &Value, what: &str| -> Vec<String> {
        step[what].as_array().into_iter().flatten().map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    for (step, recorded) in
        scenario["steps"].as_array().unwrap().iter().zip(expected["steps"].as_array().unwrap())
    {
        if let Some(config) = step.get("start") {
            let mut all = scenario["config"].clone();
            all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
            let mut new = Node::new(&all);
            // The node object is made before the first pass.
            early.iter().for_each(|name| new.add(name, "file"));
            node = Some(new);
            continue;
        }
        let Some(node) = &mut node else {
            early.extend(names(step, "add"));
            continue;
        };
        names(step, "add").iter().for_each(|name| node.add(name, "file"));
        names(step, "apply").iter().for_each(|name| node.add(name, "api"));
        for _ in 0..step["wait"].as_u64().unwrap_or(0) {
            node.tick();
        }
        if let Some(until) = step.get("until") {
            let wanted = until["pod"].as_str().unwrap();
            let mut left = until["within"].as_u64().unwrap();
            while !node.pods.iter().any(|pod| pod.name() == wanted && pod.has_ended(node.now)) {
                assert!(left > 0, "{name}: {wanted} is evicted in time");
                left -= 1;
                node.tick();
            }
        }
        if let Some(dump) = recorded.get("result").filter(|result| result.get("node").is_some()) {
            problems.extend(compare(node, dump).into_iter().map(|problem| format!("{name}: {problem}")));
        }
    }
    (node.unwrap(), problems)
}

/// The node and its pods as the API server had them.
fn compare(node: &Node, dump: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    for pressure in Pressure::ALL {
        let recorded = dump["node"]["conditions"][pressure.as_str()][0] == "True";
        if recorded != node.pressures.has(pressure) {
            problems.push(format!("{} at {} s was {recorded}", pressure.as_str(), node.now));
        }
    }
    for (name, recorded) in dump["pods"].as_object().unwrap() {
        let name = name.trim_end_matches("-golden-node");
        let conditions = recorded["conditions"].as_array().into_iter().flatten();
        let disruption: Vec<&Value> =
            conditions.filter(|condition| condition["type"] == "DisruptionTarget").collect();
        let Some(ours) = node.statuses.get(name) else {
            if recorded["phase"] != "Running" {
                problems.push(format!("{name} was evicted"));
            }
            continue;
        };
        if recorded["phase"] == "Running" {
            problems.push(format!("{name} was not evicted"));
            continue;
        }
        if ours.disruption_target == disruption.is_empty() {
            problems.push(format!("{name}: the condition DisruptionTarget differs"));
        }
        for condition in disruption {
            let found = [&condition["status"], &condition["reason"], &condition["message"]];
            if found != ["True", "TerminationByKubelet", ours.message.as_str()] {
                problems.push(format!("{name}: the condition was {condition}"));
            }
        }
        if !is_exception(name)
            && (recorded["reason"] != "Evicted" || recorded["message"] != ours.message.as_str())
        {
            problems.push(format!("{name}: {} is not {:?}", recorded["message"], ours.message));
        }
    }
    problems
}

#[test]
fn conditions_victims_order_messages_and_events_are_the_recorded_ones() {
    let root = std::env::var_os("CARGO_MANIFEST_DIR").unwrap();
    let folder = Path::new(&root).join("tests/golden/resources/expected");
    let files =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names = files.filter_map(|file| Some(file.strip_suffix(".json")?.to_owned()));
    let mut names: Vec<String> = names.filter(|name| name.starts_with("ev-")).collect();
    names.sort();
    assert_eq!(names, ["ev-admission", "ev-memory", "ev-nodefs", "ev-soft", "ev-static", "ev-storage"]);
    let mut problems = Vec::new();
    for name in names.iter().filter(|name| !is_exception(name)) {
        let expected = read("expected", name);
        let (node, differing) = follow(name);
        problems.extend(differing);

        let recorded = expected["phases"].as_array().unwrap();
        let order: Vec<&str> = recorded.iter().map(|phase| phase[0].as_str().unwrap()).collect();
        let ours: Vec<&str> = node.phases.iter().map(|(name, ..)| name.as_str()).collect();
        if order != ours {
            problems.push(format!("{name}: the order was {order:?}, not {ours:?}"));
        }
        for (phase, (pod, ours, reason)) in recorded.iter().zip(&node.phases) {
            if !is_exception(pod) && (phase[1] != ours.as_str() || phase[2] != *reason) {
                problems.push(format!("{name}: {pod} was {phase}"));
            }
        }

        // Without an API server the kubelet's own list has the same events.
        let events = expected.get("api_events").unwrap_or(&expected["events"]).as_array().unwrap();
        let text = |event: &Value, index: usize| event[index].as_str().unwrap().to_owned();
        let all: BTreeSet<_> = events
            .iter()
            .map(|event| (text(event, 0), text(event, 1), text(event, 2), text(event, 3), text(event, 4)))
            .collect();
        for event in &node.events {
            if !all.contains(event) {
                problems.push(format!("{name}: there was no event {event:?}"));
            }
        }
        for event in all.difference(&node.events) {
            let ours =
                ["Evicted", "EvictionThresholdMet", "NodeHasInsufficientMemory", "NodeHasDiskPressure"];
            if ours.contains(&event.3.as_str()) {
                problems.push(format!("{name}: there was an event {event:?}"));
            }
        }

        for (pod, calls) in expected["cri"].as_object().unwrap() {
            let mut calls = calls.as_array().unwrap().iter();
            let stop = calls.find(|call| call["call"] == "StopContainer");
            // The runtime's call never has less than two seconds.
            let ours = node.graces.get(pod).map(|grace| (*grace).max(2).to_string());
            let recorded = stop.map(|stop| stop["timeout"].as_str().unwrap().to_owned());
            if recorded != ours {
                problems.push(format!("{name}: {pod} had the grace period {recorded:?}, not {ours:?}"));
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

/// That the comparison finds something: a node that does not evict has other victims.
#[test]
fn a_node_that_does_not_evict_does_not_agree() {
    let (mut node, problems) = follow("ev-memory");
    assert_eq!(problems, Vec::<String>::new());
    node.statuses.remove("ev-be-mem");
    node.pressures = Pressures::default();
    let steps = read("expected", "ev-memory")["steps"].clone();
    let last = steps.as_array().unwrap().iter().rev().find_map(|step| step.get("result")).unwrap().clone();
    let problems = compare(&node, &last);
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(
        PodUid::from("ev-be-mem")
            == *node.pods.iter().find(|pod| pod.name() == "ev-be-mem").unwrap().pod.uid()
    );
}
