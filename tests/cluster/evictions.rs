//! Evictions, compared with those of the Go kubelet in the same scenario: the victims, their statuses
//! and events, and the condition and taint of the node must be the recorded ones.
//!
//! `EVICTIONS_RECORD=1 E2E_CONTAINERD=2 tests/run e2e -- evictions_have` also runs the Go kubelet on a
//! node of its own, and writes its outcome to `data/evictions.json`. The times of the agents are
//! printed, and `tests/run` shows them again at its end.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, directory, patience, pod, shared, text};
use crate::support::launch::{go_kubelet_config, merged, skip_on_go_kubelet};
use crate::support::node::{busybox, http_get_within};
use crate::support::wait::{pause, wait_for, wait_until};

const MIB: u64 = 1 << 20;
/// The memory of all pods, and how much of it must be available.
const PODS: u64 = 700 * MIB;
const AVAILABLE: u64 = 300 * MIB;
/// Longer than the Go kubelet takes between two reports of the node's status, and than the control plane
/// takes for the taint on a busy machine.
const TRANSITION: &str = "60s";
const TAINT: &str = "node.kubernetes.io/memory-pressure";
/// Pods that go, each for its own reason, and pods that stay.
const VICTIMS: [&str; 3] = ["eater", "dir", "layer"];
const OTHERS: [&str; 2] = ["guaranteed", "effort"];
/// The file after which the memory runs short.
const MORE: &str = "more";
const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/data/evictions.json");
/// How often the Go kubelet may have an outcome that it has only now and then.
const ATTEMPTS: u32 = 4;

struct ComparedNode {
    joined: JoinedNode<'static>,
    agent: &'static str,
}

/// What the API server shows at the end of the scenario.
#[derive(Default)]
struct Outcome {
    phases: BTreeMap<&'static str, Value>,
    /// The whole status of each pod that was evicted.
    statuses: BTreeMap<&'static str, Value>,
    /// Events about evictions, by the object.
    events: BTreeMap<&'static str, Vec<Value>>,
    pressure: Value,
    taints: Value,
    relieved: Value,
    /// How often the container of each other pod was started again.
    restarts: BTreeMap<&'static str, Value>,
    /// What the scenario expects of each agent and this one did not do.
    failures: Vec<String>,
    /// What the agent logged about evictions, for a failure.
    log: String,
}

/// What is printed.
#[derive(Default)]
struct Times {
    /// From the moment at which too little was available to the end of the victim's process.
    end: Duration,
    /// The same to the condition of the node at the API server.
    condition: Duration,
    /// The longest response of `/healthz` until then.
    health: Duration,
    /// From the moment at which a limit of local storage was exceeded to the end of the process.
    dir: Duration,
    layer: Duration,
}

impl Outcome {
    /// Why this is an outcome that the Go kubelet has only now and then.
    fn is_not_comparable(&self) -> Option<String> {
        if let Some(other) = OTHERS.into_iter().find(|other| self.phases[other] != "Running") {
            return Some(format!("it evicted the pod {other}, by numbers that were too old"));
        }
        if let Some(failure) = self.failures.first() {
            return Some(failure.clone());
        }
        let lost = |status: &Value| status.to_string().contains("ContainerStatusUnknown");
        if let Some((name, _)) = self.statuses.iter().find(|(_, status)| lost(status)) {
            return Some(format!("it removed the container of {name} before it had read its end"));
        }
        // It removes what is left of an evicted pod at once, and with the sandbox its record of the address
        // (docs/differences.md).
        let name = self.without_address()?;
        Some(format!("it removed the sandbox of {name} before its last report of the pod"))
    }

    /// What must be the same for both agents.
    fn comparable(&self) -> Value {
        json!({
            "phases": self.phases,
            "statuses": self.statuses,
            "events": self.events,
            "condition": self.pressure,
            "taints": self.taints,
            "condition after it": self.relieved,
        })
    }

    /// The first evicted pod that has lost its address.
    fn without_address(&self) -> Option<&str> {
        let (name, _) = self.statuses.iter().find(|(_, status)| status["podIP"].is_null())?;
        Some(name)
    }
}

/// Not by the macro, whose output the test harness hides when a test passes.
fn print(line: &str) {
    let _ = std::io::stderr().write_all(line.as_bytes());
}

impl ComparedNode {
    fn start(name: &'static str, go_kubelet: bool) -> ComparedNode {
        let reserved = total_memory() - PODS;
        let mut config = merged(
            go_kubelet_config(&directory(name)),
            json!({
                "systemReserved": {"memory": reserved.to_string()},
                "evictionPressureTransitionPeriod": TRANSITION,
                "volumeStatsAggPeriod": "5s",
            }),
        );
        config["evictionHard"]["memory.available"] = json!(format!("{}Mi", AVAILABLE / MIB));
        let kubeconfig = shared().node_kubeconfig(name).display().to_string();
        let socket = directory(name).join("cd/containerd.sock").display().to_string();
        let mut flags = vec!["--kubeconfig", &kubeconfig];
        if go_kubelet {
            // Its statistics use their own connection to containerd.
            flags.extend(["--containerd", &socket]);
        }
        let mut joined = JoinedNode::prepare_with(shared(), name, config, &flags);
        joined.node.use_go_kubelet(go_kubelet);
        let agent = if go_kubelet { "Go kubelet" } else { "coracle" };
        ComparedNode { joined: joined.start_and_wait(), agent }
    }

    fn name(&self, pod: &str) -> String {
        format!("{}-{pod}", self.joined.name)
    }

    /// A pod whose container waits for a file of the test before it runs `script`.
    fn bind(&self, name: &str, resources: Value, script: &str) {
        let go = self.name(name);
        // It ignores SIGTERM: of a pod whose containers exit with 0, the phase and the reason do not show the
        // eviction.
        let mut main = busybox("main", &format!("{}; {script}; sleep 100000", wait_script(&go)));
        main["resources"] = resources;
        let mut manifest = pod(&go, json!([main]));
        if name == "dir" {
            manifest["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "dir", "mountPath": "/dir"}]);
            manifest["spec"]["volumes"] = json!([{"name": "dir", "emptyDir": {"sizeLimit": "8Mi"}}]);
        }
        self.joined.bind(&self.joined.node.with_out(manifest));
    }

    fn bind_all(&self) {
        let both = json!({"cpu": "10m", "memory": "32Mi"});
        self.bind("guaranteed", json!({"requests": both, "limits": both}), "true");
        self.bind("effort", json!({}), "true");
        // The buffer of "dd" is in memory until "cat" reads it. The Go kubelet's numbers of pods are
        // some seconds old (docs/differences.md): it has to know before the shortage that this pod
        // uses more than it requests.
        let eat =
            |mebibytes| format!("dd if=/dev/zero bs={mebibytes}M count=1 | (sleep 100000; cat) >/dev/null");
        let more = self.name(MORE);
        let script = format!("{} & {}; {}", eat(250), wait_script(&more), eat(200));
        self.bind("eater", json!({"requests": {"memory": "64Mi"}}), &script);
        let write = |path: &str| format!("dd if=/dev/zero of={path} bs=1M count=20");
        self.bind("dir", json!({}), &write("/dir/file"));
        self.bind("layer", json!({"limits": {"ephemeral-storage": "8Mi"}}), &write("/file"));
        for name in VICTIMS.into_iter().chain(OTHERS) {
            self.joined.wait_ready(&self.name(name));
        }
    }

    /// The process of a pod's container.
    fn process(&self, name: &str) -> u32 {
        let shown = self.joined.wait_ready(&self.name(name));
        let id = text(&shown, "/status/containerStatuses/0/containerID");
        self.joined.node.process(id.rsplit('/').next().unwrap_or_default())
    }

    /// Lets a pod begin, and returns the time until its process has ended.
    fn run(&self, name: &str) -> Duration {
        let process = self.process(name);
        let begun = Instant::now();
        self.joined.node.touch(&self.name(name));
        wait_until(&format!("the end of {name}"), patience(), || !runs(process));
        begun.elapsed()
    }

    /// The memory that pods can still use.
    fn available(&self) -> u64 {
        let cgroups = self.joined.node.cgroups();
        let read = |file: &str| cgroups.read("kubepods", file);
        let used =
            read("memory.usage_in_bytes").or_else(|| read("memory.current")).expect("the use of memory");
        let stat = read("memory.stat").unwrap_or_default();
        let field = |name: &str| -> Option<u64> {
            stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
        };
        let inactive = field("total_inactive_file ").or_else(|| field("inactive_file ")).unwrap_or(0);
        PODS.saturating_sub(used.parse::<u64>().expect("a number").saturating_sub(inactive))
    }

    /// Lets the memory run short. Returns what was wrong with `/healthz` meanwhile.
    fn exhaust_memory(&self, times: &mut Times) -> Option<String> {
        let process = self.process("eater");
        self.joined.node.touch(&self.name("eater"));
        wait_until("the memory of the pod in the statistics", patience(), || {
            self.used_memory("eater").is_some_and(|used| used > 200 * MIB)
        });
        assert!(self.available() > AVAILABLE);
        let ended = AtomicBool::new(false);
        // A failure below does not set `ended`, and the scope waits for its threads.
        let last = Instant::now() + LIMIT + patience();
        let port = self.joined.node.healthz_port();
        std::thread::scope(|scope| {
            let health = scope.spawn(|| {
                let mut slowest = Duration::ZERO;
                let mut wrong = None;
                while !ended.load(Ordering::Relaxed) && Instant::now() < last {
                    let begun = Instant::now();
                    let response = http_get_within(port, "/healthz", LIMIT);
                    if !matches!(response, Ok((200, _))) {
                        wrong = Some(format!("/healthz: {response:?}"));
                    }
                    slowest = slowest.max(begun.elapsed());
                    pause(Duration::from_millis(10));
                }
                (slowest, wrong)
            });
            let condition = scope.spawn(|| {
                wait_until("pressure", patience(), || {
                    text(&self.condition("MemoryPressure"), "/status") == "True"
                });
                Instant::now()
            });
            self.joined.node.touch(&self.name(MORE));
            // A quick agent ends the process, and with it the shortage, before it is seen here.
            wait_until("a shortage of memory", LIMIT, || self.available() < AVAILABLE || !runs(process));
            let met = Instant::now();
            let begun = Instant::now();
            while runs(process) && begun.elapsed() < patience() {
                pause(Duration::from_millis(5));
            }
            times.end = met.elapsed();
            ended.store(true, Ordering::Relaxed);
            assert!(!runs(process), "the pod that uses the memory still runs:\n{}", self.joined.node.log());
            let (slowest, wrong) = health.join().expect("the thread ends");
            times.health = slowest;
            let shown = condition.join().expect("the node has the condition");
            times.condition = shown.saturating_duration_since(met);
            wrong
        })
    }

    /// The memory of a pod in the agent's own statistics.
    fn used_memory(&self, pod: &str) -> Option<u64> {
        let (_, text) = self.joined.node.read_only("/stats/summary");
        let summary: Value = serde_json::from_str(&text).ok()?;
        let pods = summary["pods"].as_array()?;
        let found = pods.iter().find(|stats| stats["podRef"]["name"] == self.name(pod).as_str())?;
        found["containers"][0]["memory"]["workingSetBytes"].as_u64()
    }

    fn condition(&self, kind: &str) -> Value {
        let node = self.joined.object().unwrap_or_default();
        let all = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default()
    }

    fn taints(&self) -> Value {
        let node = self.joined.object().unwrap_or_default();
        let all = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        all.into_iter().filter(|taint| taint["key"] == TAINT).collect()
    }

    /// Without what is of this node and moment only.
    fn common(&self, value: &Value) -> Value {
        common(value, &self.joined.name)
    }

    fn shown(&self, pod: &str) -> Value {
        self.joined.plane.get(&["pod", &self.name(pod)]).unwrap_or_default()
    }

    /// Whether the status of a pod says that it was evicted, and how its container ended.
    fn is_reported_evicted(&self, name: &str) -> bool {
        let status = &self.shown(name)["status"];
        let ended = status["containerStatuses"][0]["state"]["terminated"].is_object();
        status["reason"] == "Evicted" && ended
    }

    /// Events about evictions and shortages.
    fn events(&self, object: &str) -> Vec<Value> {
        let selector = format!("involvedObject.name={object}");
        let list =
            self.joined.plane.get(&["events", "-A", "--field-selector", &selector]).unwrap_or_default();
        let mut events: Vec<Value> = Vec::new();
        for event in list["items"].as_array().into_iter().flatten() {
            let reason = text(event, "/reason");
            if ["Evicted", "EvictionThresholdMet", "NodeHasInsufficientMemory", "Killing"].contains(&reason) {
                let annotations = &event["metadata"]["annotations"];
                let fields = json!([event["type"], reason, event["message"], annotations, event["source"]]);
                events.push(self.common(&fields));
            }
        }
        events.sort_by_key(Value::to_string);
        events.dedup();
        events
    }

    fn outcome(&self, times: &mut Times) -> Outcome {
        let mut outcome = Outcome::default();
        times.dir = self.run("dir");
        times.layer = self.run("layer");
        outcome.failures.extend(self.exhaust_memory(times));
        outcome.pressure = self.common(&self.condition("MemoryPressure"));
        let taints =
            wait_for("the taint", LIMIT, || Some(self.taints()).filter(|taints| *taints != json!([])));
        outcome.taints = self.common(&taints);
        for name in VICTIMS {
            let begun = Instant::now();
            while !self.is_reported_evicted(name) {
                if begun.elapsed() > patience() {
                    let status = &self.shown(name)["status"];
                    outcome.failures.push(format!("it did not report the end of {name}: {status}"));
                    break;
                }
                pause(Duration::from_millis(200));
            }
        }
        // Less than the five minutes that are the default of the transition period.
        outcome.relieved = wait_for("the end of the pressure", patience(), || {
            let condition = self.condition("MemoryPressure");
            (text(&condition, "/status") == "False").then(|| self.common(&condition))
        });
        wait_until("the end of the taint", patience(), || self.taints() == json!([]));
        for name in VICTIMS {
            let shown = self.shown(name);
            outcome.phases.insert(name, shown["status"]["phase"].clone());
            let mut status = self.common(&shown["status"]);
            // The Go kubelet reads them from a cgroup that is being removed (docs/differences.md).
            status["resources"].take();
            outcome.statuses.insert(name, status);
            outcome.events.insert(name, self.events(&self.name(name)));
        }
        for name in OTHERS {
            let shown = self.shown(name);
            outcome.phases.insert(name, shown["status"]["phase"].clone());
            let restarts = &shown["status"]["containerStatuses"][0]["restartCount"];
            outcome.restarts.insert(name, restarts.clone());
        }
        outcome.events.insert("node", self.events(&self.joined.name));
        let log = self.joined.node.log();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains("vict")).collect();
        outcome.log = lines.join("\n");
        outcome
    }

    fn finish(mut self) {
        // What the end of a test asserts of an agent is not meant for the Go kubelet.
        if self.agent != "coracle" {
            self.joined.node.stop_agent();
            self.joined.node.use_go_kubelet(false);
            let kubeconfig = shared().node_kubeconfig(&self.joined.name).display().to_string();
            self.joined.node.set_flags(&["--kubeconfig".to_owned(), kubeconfig]);
            self.joined.node.start_agent();
        }
        let names: Vec<String> = VICTIMS.iter().chain(&OTHERS).map(|name| self.name(name)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.joined.finish(&names);
    }
}

/// A script that waits for a file of the test.
fn wait_script(file: &str) -> String {
    format!("until [ -e /out/{file} ]; do sleep 0.1; done")
}

/// Whether a process runs; one that its parent has not waited for has ended.
fn runs(process: u32) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(process.to_string()).join("stat"));
    stat.is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with(['Z', 'X']))
}

/// The memory of the machine in bytes.
fn total_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").expect("/proc/meminfo");
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("the field");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") * 1024
}

/// A value in which names of the node, times, ids, addresses and measured quantities are replaced.
fn common(value: &Value, node: &str) -> Value {
    match value {
        Value::Object(fields) => {
            let common_field = |(key, value): (&String, &Value)| {
                let value = match (key.as_str(), value) {
                    (_, Value::Null) => Value::Null,
                    // Older runtimes do not report it.
                    ("user", _) => Value::Null,
                    // Images of the tests have programs of the distribution.
                    ("containerID" | "imageID", _) => json!("<id>"),
                    ("podIP" | "hostIP" | "ip", _) => json!("<address>"),
                    (key, Value::String(_)) if key.ends_with("Time") || key.ends_with("At") => {
                        json!("<time>")
                    }
                    ("timeAdded", _) => json!("<time>"),
                    // Its name has a random part.
                    ("name", Value::String(name)) if name.starts_with("kube-api-access-") => json!("<token>"),
                    ("offending_containers_usage", _) => json!("<n>"),
                    (_, value) => common(value, node),
                };
                (key.clone(), value)
            };
            Value::Object(fields.iter().map(common_field).collect())
        }
        Value::Array(all) => all.iter().map(|item| common(item, node)).collect(),
        Value::String(text) => {
            let mut text = text.replace(node, "<node>");
            for before in ["available: ", "was using "] {
                text = without_quantity(&text, before);
            }
            Value::String(text)
        }
        other => other.clone(),
    }
}

/// The text without the quantity after these words.
fn without_quantity(text: &str, before: &str) -> String {
    let Some((start, rest)) = text.split_once(before) else { return text.to_owned() };
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric());
    format!("{start}{before}<n>{rest}")
}

/// Lists where two values differ.
fn differences(path: &str, own: &Value, other: &Value, found: &mut Vec<String>) {
    match (own, other) {
        (Value::Object(own), Value::Object(other)) => {
            let keys: BTreeSet<&String> = own.keys().chain(other.keys()).collect();
            for key in keys {
                let field =
                    |fields: &serde_json::Map<String, Value>| fields.get(key).cloned().unwrap_or_default();
                differences(&format!("{path}.{key}"), &field(own), &field(other), found);
            }
        }
        (Value::Array(own), Value::Array(other)) if own.len() == other.len() => {
            for (index, (own, other)) in own.iter().zip(other).enumerate() {
                differences(&format!("{path}[{index}]"), own, other, found);
            }
        }
        _ if own != other => found.push(format!("{path}: coracle {own}, Go kubelet {other}")),
        _ => {}
    }
}

/// The outcome of one agent on a new node. Prints its times.
fn run(name: &'static str, go_kubelet: bool) -> Outcome {
    let node = ComparedNode::start(name, go_kubelet);
    node.bind_all();
    let mut times = Times::default();
    let outcome = node.outcome(&mut times);
    let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
    let line = format!(
        "evictions: {}: shortage of memory to the end of the victim {}, to the node's condition {}; \
         slowest /healthz meanwhile {} ms; emptyDir above its limit to the end {}, writable layer {}\n",
        node.agent,
        seconds(times.end),
        seconds(times.condition),
        times.health.as_millis(),
        seconds(times.dir),
        seconds(times.layer)
    );
    print(&line);
    node.finish();
    outcome
}

/// Writes down what the Go kubelet does.
fn record() {
    for attempt in 1..=ATTEMPTS {
        let name: &'static str = format!("evtheirs{attempt}").leak();
        let outcome = run(name, true);
        let Some(reason) = outcome.is_not_comparable() else {
            let text = serde_json::to_string_pretty(&outcome.comparable()).expect("an object");
            fs::write(RECORDED, text + "\n").expect("the recording can be written");
            return;
        };
        print(&format!("evictions: Go kubelet: the scenario is repeated: {reason}\n{}\n", outcome.log));
    }
    panic!("no outcome of the Go kubelet in {ATTEMPTS} attempts can be compared");
}

// Runtimes: containerd 2.
#[test]
fn evictions_have_the_recorded_outcome_of_the_go_kubelet() {
    if skip_on_go_kubelet("evictions", "the test starts it itself, with EVICTIONS_RECORD=1") {
        return;
    }
    let ours = run("evours", false);
    assert!(ours.failures.is_empty(), "{:?}\n{}", ours.failures, ours.log);
    for name in VICTIMS {
        assert_eq!(ours.phases[name], "Failed", "{name}");
    }
    assert_eq!(ours.without_address(), None, "{}", ours.log);
    for name in OTHERS {
        assert_eq!(ours.phases[name], "Running", "{name}");
        assert_eq!(ours.restarts[name], json!(0), "{name}");
    }
    let message = text(&ours.statuses["eater"], "/message");
    assert!(message.starts_with("The node was low on resource: memory. "), "{message}");
    assert_eq!(ours.taints[0]["effect"], "NoSchedule", "{}", ours.taints);

    if std::env::var_os("EVICTIONS_RECORD").is_some() {
        record();
    }
    let recorded = fs::read(RECORDED);
    let recorded =
        recorded.unwrap_or_else(|error| panic!("{RECORDED}: {error}: EVICTIONS_RECORD=1 makes it"));
    let recorded: Value = serde_json::from_slice(&recorded).expect("JSON");
    let mut different = Vec::new();
    differences("", &ours.comparable(), &recorded, &mut different);
    let (count, list) = (different.len(), different.join("\n"));
    assert!(different.is_empty(), "{count} differences:\n{list}\n--- coracle ---\n{}", ours.log);
}
