//! Recordings of the Go kubelet (`tests/golden/resources`): the same steps on directories in the place
//! of cgroups lead to the same cgroups and values.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::dir::Dir;
use super::node::{Capacity, Reservations, limited_daemons, pods_values};
use super::pod::{PodSettings, pod_values};
use super::resize::{self, Resource, Step};
use super::tiers::{TierSettings, tier_values};
use super::values::{HugePages, Quota, Values};
use super::{Cgroups, Driver, Layout, Name, fake};
use crate::model::Quantity;
use crate::model::api::ResourceRequirements;
use crate::model::node::HardThresholds;
use crate::model::pod::{Pod, QosClass};
use crate::model::quantity::Form;
use crate::model::requests::container_requests;
use crate::util::stop::StopToken;

/// The shares of the Burstable tier that differ in a dump, and why.
const OTHER_BURSTABLE: &[(&str, &str, &str)] = &[
    (
        "a-ends",
        "ended",
        "the Go kubelet updates the tier only when a pod starts or is removed, and each minute",
    ),
    ("a-qos-2", "running", "as a-ends"),
    ("a-edit", "second, 5 s later", "the pod is accepted and waits for the end of the former one"),
    ("a-edit-same-uid", "second", "as a-ends: a resize does not update the tier"),
    ("a-restart", "after a plain restart", "the Go kubelet updates the tier before it knows the pods"),
    ("b-change", "parts", "as a-restart"),
    ("b-missing-cgroup", "parts", "the Go kubelet ends before it has set the shares"),
];
/// Dumps in which all cgroups differ, and why.
const OTHER: &[(&str, &str, &str)] = &[
    ("a-qos-lost", "parts", "directories were removed by hand; tests.rs has this case"),
    ("e-noqos", "*", "the Go kubelet limits `cgroupRoot` without cgroupsPerQOS; this agent writes nothing"),
];
/// Parts of paths that are not this agent's.
const FOREIGN: &[&str] = &["<sandbox ", "<container ", "outside the root"];

fn data(path: &str) -> PathBuf {
    Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("tests/golden").join(path)
}

fn load(path: &Path) -> Value {
    serde_json::from_str(
        &std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())),
    )
    .unwrap()
}

fn never() -> StopToken {
    StopToken::never()
}

/// UIDs for which the recordings have no placeholder: no request to the runtime names them.
const UIDS: &[(&str, &str)] = &[("hostpath-missing", "dda494f39d9169d8858cf97e20c80c60")];

/// A static pod as the Go kubelet completes it: a limit of a container is also a request, and a pod
/// with limits of its own requests what its containers do, or else its limits.
fn pod(name: &str, manifest: &str) -> Pod {
    let own = data(&format!("resources/manifests/{manifest}.json"));
    let path = if own.exists() { own } else { data(&format!("data/manifests/{manifest}.json")) };
    let mut object = load(&path);
    // In the recordings it is `<uid:NAME>`.
    let fixed = UIDS.iter().find(|(pod, _)| *pod == name).map(|(_, uid)| (*uid).to_owned());
    object["metadata"]["uid"] = json!(fixed.unwrap_or_else(|| format!("uid:{name}")));
    let mut object: crate::model::api::Pod = serde_json::from_value(object).unwrap();
    let spec = object.spec.as_mut().unwrap();
    let containers = spec.init_containers.iter_mut().flatten().chain(&mut spec.containers);
    containers.for_each(|container| request_limits(&mut container.resources));
    let requested = container_requests(&Pod::from(object.clone()));
    let spec = object.spec.as_mut().unwrap();
    if let Some(resources) = spec.resources.as_mut().filter(|all| all.limits.is_some()) {
        let requests = resources.requests.get_or_insert_default();
        for (name, amount) in
            requested.into_iter().filter(|(name, _)| ["cpu", "memory"].contains(&name.as_str()))
        {
            requests.entry(name).or_insert_with(|| Quantity(amount.format(Form::Decimal)));
        }
    }
    request_limits(&mut spec.resources);
    let annotations = object.metadata.annotations.get_or_insert_default();
    annotations.insert("kubernetes.io/config.source".to_owned(), "file".to_owned());
    Pod::from(object)
}

fn request_limits(resources: &mut Option<ResourceRequirements>) {
    let Some(resources) = resources else { return };
    for (name, quantity) in resources.limits.iter().flatten() {
        resources.requests.get_or_insert_default().entry(name.clone()).or_insert(quantity.clone());
    }
}

/// The configuration: the base, that of the scenario, and that of the last start.
struct Config(Map<String, Value>);

impl Config {
    fn new(scenario: &Value) -> Config {
        let mut config = Config(json!({"enforceNodeAllocatable": ["pods"]}).as_object().unwrap().clone());
        config.add(scenario);
        config
    }

    fn add(&mut self, more: &Value) {
        self.0.extend(more.as_object().unwrap().clone());
    }

    fn map(&self, key: &str) -> BTreeMap<String, String> {
        self.0.get(key).map(|map| serde_json::from_value(map.clone()).unwrap()).unwrap_or_default()
    }

    fn text(&self, key: &str) -> String {
        // The root of the recording is the root here.
        self.0.get(key).and_then(Value::as_str).unwrap_or_default().replace("/<root>", "")
    }

    fn flag(&self, key: &str) -> bool {
        self.0.get(key).is_none_or(|value| value == &json!(true))
    }

    fn words(&self) -> Vec<String> {
        serde_json::from_value(self.0["enforceNodeAllocatable"].clone()).unwrap()
    }

    fn reservations(&self) -> Reservations {
        Reservations::new(&self.map("systemReserved"), &self.map("kubeReserved"), None)
    }

    fn pods(&self) -> PodSettings {
        let period = match self.text("cpuCFSQuotaPeriod").as_str() {
            "" => 100_000,
            text => text.strip_suffix("ms").unwrap().parse::<u64>().unwrap() * 1000,
        };
        PodSettings {
            cfs_quota: self.flag("cpuCFSQuota"),
            cfs_period: period,
            pids_limit: self.0.get("podPidsLimit").map_or(-1, |limit| limit.as_i64().unwrap()),
            memory_qos: None,
            throttling: None,
        }
    }

    fn tiers(&self, capacity: &Capacity) -> TierSettings {
        let percent =
            self.map("qosReserved").get("memory").map(|text| text.trim_end_matches('%').parse().unwrap());
        TierSettings { memory_qos: None, memory_reserved: percent, allocatable_memory: capacity.memory_bytes }
    }
}

/// A scenario in the middle of its steps.
struct Fixture {
    name: String,
    root: PathBuf,
    all: Cgroups,
    config: Config,
    capacity: Capacity,
    /// By name: all that were added and not removed.
    pods: BTreeMap<String, Pod>,
    running: bool,
    problems: Vec<String>,
    compared: usize,
}

impl Fixture {
    fn new(name: &str, recording: &Value, root: &Path) -> Fixture {
        let machine = &recording["machine"];
        let mut controllers: Vec<String> = serde_json::from_value(machine["controllers"].clone()).unwrap();
        controllers.retain(|name| name != "unified");
        let controllers: Vec<&str> = controllers.iter().map(String::as_str).collect();
        let capacity = Capacity {
            cpu_milli: machine["cpus"].as_i64().unwrap() * 1000,
            memory_bytes: machine["memory"].as_i64().unwrap(),
            pids: Some(32_768),
            ..Capacity::default()
        };
        let layout = Layout::new("", Driver::Cgroupfs).unwrap();
        Fixture {
            name: name.to_owned(),
            root: root.to_owned(),
            all: Cgroups::with_mounts(layout, fake::v1(root, &controllers), vec![2 << 20, 1 << 30], ""),
            config: Config::new(&recording["config"]),
            capacity,
            pods: BTreeMap::new(),
            running: false,
            problems: Vec::new(),
            compared: 0,
        }
    }

    fn per_qos(&self) -> bool {
        self.config.flag("cgroupsPerQOS")
    }

    /// What happens at a start.
    fn start(&mut self, step: &Value) {
        let mut start = step["start"].as_object().unwrap().clone();
        start.remove("expect");
        self.config.add(&Value::Object(start));
        self.running = step["result"]["running"] == json!(true);
        if !self.per_qos()
            || self.all.clone().check_root().is_err()
            || !self.config.text("cgroupRoot").is_empty()
        {
            return;
        }
        let words = self.config.words();
        let reserved = self.config.reservations();
        if super::node::check_reservations(&self.capacity, &reserved, HardThresholds::default()).is_err() {
            return;
        }
        // Refused by the validation of the configuration.
        let is_named = |word: &str| words.iter().any(|name| name.starts_with(word));
        if is_named("system-reserved") && self.config.text("systemReservedCgroup").is_empty() {
            return;
        }
        if self.name == "d-period-nogate" {
            return;
        }
        let enforced = words.iter().any(|word| word == "pods");
        let values = pods_values(&self.capacity, &reserved, enforced, Some("0-1"));
        let pods = self.all.layout().pods().clone();
        self.all.make(&pods, &values, &never()).unwrap().into_result().unwrap();
        self.tiers(true);
        let daemons = limited_daemons(
            &words,
            &reserved,
            &self.config.text("systemReservedCgroup"),
            &self.config.text("kubeReservedCgroup"),
            false,
            Some("0-1"),
        );
        let mut limited =
            daemons.iter().map(|daemon| self.all.limit_daemons(&daemon.cgroup, &daemon.values, &never()));
        assert_eq!(limited.all(|limited| limited.is_ok()), self.running, "{}", self.name);
    }

    /// What happens when a pod starts or ends, and each minute.
    fn tiers(&self, make: bool) {
        let is_there = |pod: &&Pod| self.all.exists(&self.name_of(pod));
        let tiers = tier_values(self.pods.values().filter(is_there), &self.config.tiers(&self.capacity));
        for (class, values) in
            [(QosClass::Burstable, &tiers.burstable), (QosClass::BestEffort, &tiers.best_effort)]
        {
            let tier = self.all.layout().tier(class);
            let outcome = match make {
                true => self.all.make(&tier, values, &never()),
                false => self.all.update(&tier, values, &never()),
            };
            outcome.unwrap().into_result().unwrap();
        }
    }

    fn name_of(&self, pod: &Pod) -> Name {
        self.all.layout().pod(pod.uid(), pod.qos()).unwrap()
    }

    /// A pod's path in the recordings.
    fn recorded_path(&self, pod: &Pod) -> String {
        let path = self.all.layout().path(&self.name_of(pod));
        match path.split_once("uid:") {
            Some((before, name)) => format!("{before}<uid:{name}>"),
            None => path,
        }
    }

    fn add(&mut self, step: &Value) {
        let mut added: Vec<(String, String)> = match step {
            Value::Array(names) => names
                .iter()
                .map(|name| (name.as_str().unwrap().to_owned(), name.as_str().unwrap().to_owned()))
                .collect(),
            Value::Object(map) => {
                map.iter().map(|(name, file)| (name.clone(), file.as_str().unwrap().to_owned())).collect()
            }
            // All of the other recordings' manifests.
            _ => Vec::new(),
        };
        if added.is_empty() {
            for file in std::fs::read_dir(data("data/manifests")).unwrap().flatten() {
                let manifest = file.path().file_stem().unwrap().to_string_lossy().into_owned();
                let name = load(&file.path())["metadata"]["name"].as_str().unwrap().to_owned();
                added.push((name, manifest));
            }
        }
        for (name, manifest) in added {
            let new = pod(&name, &manifest);
            let Some(old) = self.pods.insert(name, new.clone()) else { continue };
            if self.name_of(&old) == self.name_of(&new) && self.name == "a-edit-same-uid" {
                self.resize(&new);
            } else {
                self.all.remove_pod(&self.name_of(&old), &never()).unwrap();
            }
        }
    }

    /// A resize in place. The requests to the runtime are compared by another test.
    fn resize(&self, new: &Pod) {
        let cgroup = self.name_of(new);
        let wanted = pod_values(new, false, &self.config.pods());
        for step in resize::steps(&self.all.read(&cgroup), &wanted, &[Resource::Memory, Resource::Cpu]) {
            if let Step::Pod(step) = step {
                self.all.update(&cgroup, &step.write, &never()).unwrap().into_result().unwrap();
            }
        }
    }

    fn remove(&mut self, step: &Value) {
        let names: Vec<String> = match step {
            Value::Array(names) => serde_json::from_value(json!(names)).unwrap(),
            _ => self.pods.keys().cloned().collect(),
        };
        for name in names {
            if let Some(pod) = self.pods.remove(&name) {
                self.all.remove_pod(&self.name_of(&pod), &never()).unwrap();
            }
        }
    }

    /// A cgroup that was made by hand.
    fn make_by_hand(&self, step: &Value) {
        let path = step["path"].as_str().unwrap();
        let only: Option<Vec<String>> = serde_json::from_value(step["controllers"].clone()).ok();
        for hierarchy in self.all.clone_mounts().hierarchies {
            let named = |controller: &String| only.as_ref().is_none_or(|only| only.contains(controller));
            if !hierarchy.controllers.iter().any(named) {
                continue;
            }
            let mut dir = Dir::open(&hierarchy.mount).unwrap();
            for part in path.split('/') {
                dir = dir.make(part).unwrap().0;
            }
        }
    }

    fn set_by_hand(&self, step: &Value) {
        for (path, number) in step.as_object().unwrap() {
            let (path, file) = path
                .replace("<uid:", "uid:")
                .replace('>', "")
                .rsplit_once('/')
                .map(|(a, b)| (a.to_owned(), b.to_owned()))
                .unwrap();
            let controller = if file.starts_with("memory") { "memory" } else { "cpu" };
            std::fs::write(self.root.join(controller).join(path).join(file), format!("{number}\n")).unwrap();
        }
    }

    /// What the agent has done by the time of a dump: pods that run have their cgroup, others have
    /// none, and orphans are removed. Which pods run is not a matter of this room.
    fn settle(&self, recorded: &Map<String, Value>) {
        if !self.running || !self.per_qos() {
            return;
        }
        for pod in self.pods.values() {
            let cgroup = self.name_of(pod);
            if !recorded.contains_key(&self.recorded_path(pod)) {
                self.all.remove_pod(&cgroup, &never()).unwrap();
            } else if !self.all.exists(&cgroup) {
                let values = pod_values(pod, false, &self.config.pods());
                self.all.make(&cgroup, &values, &never()).unwrap().into_result().unwrap();
            }
        }
        let known: BTreeSet<&str> = self.pods.values().map(|pod| pod.uid().as_str()).collect();
        for orphan in
            self.all.list_pods().unwrap().iter().filter(|orphan| !known.contains(orphan.uid.as_str()))
        {
            self.all.remove_listed(orphan, &never()).unwrap();
        }
        self.tiers(false);
    }

    fn dump(&mut self, dump: &str, step: &Value) {
        let recorded = step["cgroups"].as_object().unwrap();
        let is_other = |list: &[(&str, &str, &str)]| {
            list.iter().any(|(name, recorded_dump, _)| {
                *name == self.name && (*recorded_dump == dump || *recorded_dump == "*")
            })
        };
        if is_other(OTHER) {
            return;
        }
        self.settle(recorded);
        let skip_burstable = is_other(OTHER_BURSTABLE);
        let mut found = BTreeMap::new();
        for hierarchy in self.all.clone_mounts().hierarchies {
            for path in fake::directories(&hierarchy.mount) {
                let path = format!("/{path}");
                let name = Name::parse(&path).unwrap();
                let of_pod = self.pods.values().find(|pod| self.name_of(pod) == name);
                let path = of_pod.map_or(path, |pod| self.recorded_path(pod));
                found.insert(path, self.all.read(&name));
            }
        }
        for (path, values) in recorded {
            // `/` is `cgroupRoot`, which is not changed.
            if path == "/" || FOREIGN.iter().any(|part| path.contains(part)) {
                continue;
            }
            let expected = self.recorded(values);
            match found.remove(path) {
                Some(_) if path == "/kubepods/burstable" && skip_burstable => {}
                Some(own) => {
                    self.compared += 1;
                    let own = Values { cpus: None, ..own };
                    if own != expected {
                        self.problems
                            .push(format!("{} {dump:?} {path}: {own:?}, recorded {expected:?}", self.name));
                    }
                }
                None => self.problems.push(format!("{} {dump:?} {path}: missing", self.name)),
            }
            self.check_controllers(path, values);
        }
        for path in found.keys() {
            self.problems.push(format!("{} {dump:?} {path}: not in the recording", self.name));
        }
    }

    /// Cgroups that only this agent has made are in the recorded hierarchies.
    fn check_controllers(&mut self, path: &str, values: &Value) {
        let Ok(expected) = serde_json::from_value::<BTreeSet<String>>(values["controllers"].clone()) else {
            return;
        };
        if !path.starts_with("/kubepods")
            || self.all.layout().pod_of(path.rsplit('/').next().unwrap()).is_some() && path != "/kubepods"
        {
            return;
        }
        let hierarchies = self.all.clone_mounts().hierarchies;
        let is_there = |mount: &Path| mount.join(&path[1..]).exists();
        let found: BTreeSet<String> = hierarchies
            .iter()
            .filter(|hierarchy| is_there(&hierarchy.mount))
            .flat_map(|hierarchy| hierarchy.controllers.iter().cloned())
            .collect();
        if found != expected {
            self.problems.push(format!("{} {path}: in {found:?}, recorded {expected:?}", self.name));
        }
    }

    /// The recorded values; those that are left out are the kernel's first ones.
    fn recorded(&self, values: &Value) -> Values {
        let number = |file: &str| values[file].as_i64();
        let memory = match &values["memory.limit_in_bytes"] {
            Value::String(text) => {
                let less = text.strip_prefix("capacity").unwrap().strip_prefix('-');
                self.capacity.memory_bytes - less.map_or(0, |less| less.parse::<i64>().unwrap())
            }
            other => other.as_i64().unwrap_or(-1),
        };
        Values {
            cpu_shares: Some(number("cpu.shares").unwrap().try_into().unwrap()),
            cpu_quota: Some(Quota {
                microseconds: number("cpu.cfs_quota_us"),
                period: number("cpu.cfs_period_us").unwrap_or(100_000).try_into().unwrap(),
            }),
            memory_bytes: Some(memory),
            pids: Some(number("pids.max").unwrap_or(-1)),
            huge_pages: HugePages::Unchanged,
            ..Values::default()
        }
    }
}

#[test]
fn cgroups_and_values_are_those_of_the_go_kubelet() {
    let (mut recordings, mut compared, mut problems) = (0, 0, Vec::new());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(data("resources/expected")).unwrap().flatten().map(|file| file.path()).collect();
    files.sort();
    for file in files {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        if !name.starts_with(|letter| ('a'..='f').contains(&letter))
            || name.starts_with("dp-")
            || name.starts_with("ev-")
        {
            continue;
        }
        let recording = load(&file);
        let dir = tempfile::tempdir().unwrap();
        let mut fixture = Fixture::new(&name, &recording, dir.path());
        for step in recording["steps"].as_array().unwrap() {
            for (what, value) in step.as_object().unwrap() {
                match what.as_str() {
                    "start" => fixture.start(step),
                    "stop" => fixture.running = false,
                    "add" => fixture.add(value),
                    "remove" => fixture.remove(value),
                    "mkcgroup" => fixture.make_by_hand(value),
                    "set" => fixture.set_by_hand(value),
                    "dump" => fixture.dump(value.as_str().unwrap(), step),
                    _ => {}
                }
            }
        }
        recordings += 1;
        compared += fixture.compared;
        problems.extend(fixture.problems);
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    assert!(recordings >= 33 && compared > 370, "{recordings} recordings, {compared} cgroups");
}

/// The path of the pod's cgroup is part of the request for its sandbox.
#[test]
fn the_runtime_receives_the_paths_of_the_go_kubelet() {
    let layout = Layout::new("/<root>", Driver::Cgroupfs).unwrap();
    let mut compared = 0;
    for file in std::fs::read_dir(data("resources/expected")).unwrap().flatten() {
        let recording = load(&file.path());
        for (name, calls) in recording["cri"].as_object().into_iter().flatten() {
            for call in calls.as_array().unwrap() {
                let Some(recorded) = call["cgroup_parent"].as_str() else { continue };
                // An edited pod may have another class.
                let known = ["", "@2", "@3"].map(|edit| format!("{name}{edit}"));
                let exists = |manifest: &&String| {
                    ["resources/manifests", "data/manifests"]
                        .iter()
                        .any(|below| data(&format!("{below}/{manifest}.json")).exists())
                };
                let mut paths = known.iter().filter(exists).map(|manifest| {
                    let pod = pod(name, manifest);
                    layout.path(&layout.pod(pod.uid(), pod.qos()).unwrap())
                });
                let recorded =
                    recorded.replace("<uid:", "uid:").replace(">", "").replace("/<root", "/<root>");
                if known.iter().any(|manifest| exists(&manifest)) {
                    assert!(paths.any(|path| path == recorded), "{name}: {recorded}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 100, "{compared}");
}

/// The recording `a-edit-same-uid`: the runtime receives the values of each step in this order.
#[test]
fn resizes_send_the_requests_of_the_go_kubelet() {
    let recording = load(&data("resources/expected/a-edit-same-uid.json"));
    let field = |call: &Value, name: &str| -> i64 {
        call["resources"][name].as_str().map_or(0, |text| text.parse().unwrap())
    };
    let numbers = |call: &Value| {
        (
            field(call, "cpu_shares"),
            field(call, "cpu_quota"),
            field(call, "cpu_period"),
            field(call, "memory_limit_in_bytes"),
        )
    };
    let calls = recording["cri"]["ed"].as_array().unwrap();
    let mut expected = Vec::new();
    for call in calls {
        match call["call"].as_str().unwrap() {
            "UpdatePodSandboxResources" => expected.push(Some(numbers(call))),
            "UpdateContainerResources" => expected.push(None),
            _ => {}
        }
    }
    let settings = Config::new(&json!({})).pods();
    let before = Values { memory_bytes: Some(-1), ..pod_values(&pod("ed", "ed"), false, &settings) };
    let before = Values { cpu_quota: Some(Quota { microseconds: None, period: 100_000 }), ..before };
    let wanted = pod_values(&pod("ed", "ed@2"), false, &settings);
    let found: Vec<_> = resize::steps(&before, &wanted, &[Resource::Memory, Resource::Cpu])
        .iter()
        .map(|step| match step {
            Step::Containers(_) => None,
            Step::Pod(step) => {
                let after = &step.after;
                let shares = i64::try_from(after.cpu_shares.unwrap()).unwrap();
                let quota = after.cpu_quota.unwrap();
                Some((
                    shares,
                    quota.number(),
                    i64::try_from(quota.period).unwrap(),
                    after.memory_bytes.unwrap(),
                ))
            }
        })
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn exceptions_name_recordings() {
    for (name, dump, reason) in OTHER_BURSTABLE.iter().chain(OTHER) {
        let recording = load(&data(&format!("resources/expected/{name}.json")));
        let dumps = recording["steps"].as_array().unwrap().iter().filter_map(|step| step["dump"].as_str());
        assert!(
            !reason.is_empty()
                && (*dump == "*" || dumps.into_iter().any(|recorded_dump| recorded_dump == *dump)),
            "{name} {dump}"
        );
    }
}
