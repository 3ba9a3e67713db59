//! The return of many nodes: agents with fake runtimes, as nodes of one real API server that is away for a
//! minute. Its audit log has the requests of each of them, so that nothing stands between both.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::support::control_plane::{API_SERVER, ControlPlane, ControlPlaneOptions};
use crate::support::fake_cri::FakeCri;
use crate::support::fake_node::free_port;
use crate::support::launch;
use crate::support::wait::{pause, wait_until};

/// Agents that start at once share the processors.
const START: Duration = Duration::from_secs(600);
/// The length of each part: before, without, and with the API server again.
const MINUTE: Duration = Duration::from_secs(60);
/// What follows the first minute with the API server.
const AFTER: Duration = Duration::from_secs(60);
/// Requests that belong to the start of the agents.
const SETTLE: Duration = Duration::from_secs(60);
/// Seconds in a row of the output.
const ROW: u64 = 10;

/// An agent and its runtime.
struct StormNode {
    name: String,
    agent: Child,
    _runtime: FakeCri,
}

impl StormNode {
    fn start(number: usize, binary: &Path, plane: &ControlPlane, base: &Path) -> StormNode {
        let (name, runtime) = (format!("storm-{number}"), FakeCri::start());
        let dir = base.join(&name);
        fs::create_dir_all(dir.join("manifests")).expect("the manifest directory can be made");
        let extra = json!({"port": free_port(), "readOnlyPort": 0, "healthzPort": free_port()});
        launch::write_config(&dir, &runtime.endpoint(), extra);
        let mut command = launch::command(binary, &dir, &name);
        command.arg("--local-socket").arg(launch::local_socket(&dir));
        command.arg("--kubeconfig").arg(plane.node_kubeconfig(&name));
        let agent = launch::spawn(&mut command, &dir.join("agent-1.log"));
        StormNode { name, agent, _runtime: runtime }
    }
}

impl Drop for StormNode {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

/// A request of an agent: when the API server received it, and what it is.
struct NodeRequest {
    time: SystemTime,
    node: String,
    what: String,
}

/// The requests of nodes in the audit log. A watch has two entries with one identifier.
fn requests(plane: &ControlPlane) -> Vec<NodeRequest> {
    let mut seen = BTreeSet::new();
    let text = |event: &Value, pointer: &str| {
        event.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let mut all: Vec<NodeRequest> = plane
        .requests()
        .iter()
        .filter(|event| seen.insert(text(event, "/auditID")))
        .filter_map(|event| {
            let time: Timestamp = text(event, "/requestReceivedTimestamp").parse().ok()?;
            let node = text(event, "/user/username").strip_prefix("system:node:")?.to_owned();
            let what = format!("{} {}", text(event, "/verb"), text(event, "/objectRef/resource"));
            Some(NodeRequest { time: SystemTime::from(time), node, what })
        })
        .collect();
    all.sort_by_key(|request| request.time);
    all
}

/// The requests of a span, by second since its begin.
fn between(all: &[NodeRequest], from: SystemTime, span: Duration) -> Vec<(Duration, &NodeRequest)> {
    all.iter()
        .filter_map(|request| Some((request.time.duration_since(from).ok()?, request)))
        .filter(|(since, _)| *since < span)
        .collect()
}

/// Runs the storm and prints its numbers.
pub fn measure(agents: usize, binary: &Path, base: &Path) {
    let plane = ControlPlane::start_with(&base.join("plane"), &ControlPlaneOptions::bare());
    let nodes: Vec<StormNode> =
        (0..agents).map(|number| StormNode::start(number, binary, &plane, base)).collect();
    wait_until("all nodes to be ready", START, || {
        let list = plane.poll(&["nodes"]).unwrap_or_default();
        let items = list["items"].as_array().cloned().unwrap_or_default();
        let is_ready = |node: &&Value| {
            let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
            conditions.into_iter().any(|entry| entry["type"] == "Ready" && entry["status"] == "True")
        };
        items.iter().filter(is_ready).count() == nodes.len()
    });
    println!("storm: {agents} agents are ready; {}", load());
    pause(SETTLE);
    let steady = SystemTime::now();
    pause(MINUTE);
    plane.stop(API_SERVER);
    pause(MINUTE);
    // The agents reach it before it counts as ready.
    let back = SystemTime::now();
    plane.resume(API_SERVER);
    println!("storm: the API server is ready again after {:.1} s; {}", seconds(back.elapsed()), load());
    pause(MINUTE + AFTER);

    let all = requests(&plane);
    let before = between(&all, steady, MINUTE).len();
    let after = between(&all, back, MINUTE + AFTER);
    let Some((first, _)) = after.first() else { panic!("no agent has returned") };
    // From the first request that the server has taken.
    let start = back + *first;
    print_rows("steady", &between(&all, steady, MINUTE));
    print_rows("back", &between(&all, start, MINUTE + AFTER));
    print_seconds(&between(&all, start, MINUTE));
    let storm = between(&all, start, MINUTE);
    let mut by_second: BTreeMap<u64, usize> = BTreeMap::new();
    let mut by_kind: BTreeMap<&str, usize> = BTreeMap::new();
    let mut firsts: BTreeMap<&str, Duration> = BTreeMap::new();
    for (since, request) in &storm {
        *by_second.entry(since.as_secs()).or_default() += 1;
        *by_kind.entry(&request.what).or_default() += 1;
        firsts.entry(&request.node).or_insert(*since);
    }
    let busiest = by_second.values().copied().max().unwrap_or(0);
    let share = 100.0 * ratio(busiest, storm.len());
    let per_agent = |count: usize| ratio(count, agents);
    let rate = ratio(storm.len(), before);
    println!(
        "storm: {agents} agents: {:.1} requests per agent in the steady minute, {:.1} in the first minute \
         back ({rate:.1} times), at most {busiest} in a second ({:.2} per agent, {share:.0} % of the minute)",
        per_agent(before),
        per_agent(storm.len()),
        per_agent(busiest),
    );
    let mut spread: Vec<f64> = firsts.values().map(Duration::as_secs_f64).collect();
    spread.sort_by(f64::total_cmp);
    let quartile =
        |part: usize| spread.get(spread.len().saturating_sub(1) * part / 4).copied().unwrap_or(0.0);
    println!(
        "storm: the first request of each agent: {} of {agents} within the minute; quartiles {:.1} s, {:.1} s, \
         {:.1} s, the last after {:.1} s",
        spread.len(),
        quartile(1),
        quartile(2),
        quartile(3),
        quartile(4),
    );
    let kinds: Vec<String> = by_kind.iter().map(|(what, count)| format!("{what} {count}")).collect();
    println!("storm: requests of the first minute: {}", kinds.join(", "));
    let late: Vec<&str> =
        nodes.iter().map(|node| node.name.as_str()).filter(|name| !firsts.contains_key(name)).collect();
    if !late.is_empty() {
        println!("storm: not within the minute: {}", late.join(", "));
    }
}

fn ratio(count: usize, total: usize) -> f64 {
    let number = |count: usize| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    number(count) / number(total.max(1))
}

fn seconds(elapsed: Result<Duration, std::time::SystemTimeError>) -> f64 {
    elapsed.unwrap_or_default().as_secs_f64()
}

fn load() -> String {
    format!("load average {}", fs::read_to_string("/proc/loadavg").unwrap_or_default().trim())
}

/// The requests of each second after the return, with the kinds of those of the busiest second.
fn print_seconds(requests: &[(Duration, &NodeRequest)]) {
    let mut seconds: BTreeMap<u64, BTreeMap<&str, usize>> = BTreeMap::new();
    for (since, request) in requests {
        *seconds.entry(since.as_secs()).or_default().entry(&request.what).or_default() += 1;
    }
    let count = |second: u64| seconds.get(&second).map_or(0, |kinds| kinds.values().sum::<usize>());
    for row in 0..MINUTE.as_secs() / ROW {
        let counts: Vec<String> =
            (row * ROW..(row + 1) * ROW).map(|second| format!("{:>4}", count(second))).collect();
        println!("storm: back: requests of each second from {:>2} s on:{}", row * ROW, counts.concat());
    }
    let Some((second, kinds)) = seconds.iter().max_by_key(|(second, _)| count(**second)) else { return };
    let kinds: Vec<String> = kinds.iter().map(|(what, count)| format!("{what} {count}")).collect();
    println!("storm: back: the busiest second is from {second} s on: {}", kinds.join(", "));
}

/// Requests per second over time.
fn print_rows(what: &str, requests: &[(Duration, &NodeRequest)]) {
    let mut rows: BTreeMap<u64, usize> = BTreeMap::new();
    for (since, _) in requests {
        *rows.entry(since.as_secs() / ROW).or_default() += 1;
    }
    for (row, count) in &rows {
        let rate = ratio(*count, usize::try_from(ROW).unwrap_or(1));
        println!(
            "storm: {what}: {:>3} s to {:>3} s: {rate:.1} requests per second",
            row * ROW,
            (row + 1) * ROW
        );
    }
}
