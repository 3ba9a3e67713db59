//! Changes in the runtime: reported by its event stream where it has one, found by lists where it
//! has not; and the cost of watching an idle runtime.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, SystemTime};

use serde_json::json;

use crate::support::containerd::kill;
use crate::support::node::{LONG, Node, is_ready, restarts, simple};
use crate::support::wait::{pause, wait_for, wait_until};

/// The time at the start of a log line.
fn time_of(line: &str) -> SystemTime {
    let text = line.split_whitespace().next().unwrap_or_default();
    text.parse::<jiff::Timestamp>().expect("a line begins with its time").into()
}

/// When the agent noticed the end of the container `id`, and when it started the next one.
fn noticed_and_started(node: &str, id: &str) -> (Option<SystemTime>, SystemTime) {
    let log = fs::read_to_string(Node::base(node).join("agent-1.log")).expect("the agent's log");
    let noticed = log.lines().rfind(|line| line.contains(&format!("event of {id} ")));
    let started = log.lines().rfind(|line| line.contains("start: container ")).expect("a start is logged");
    (noticed.map(time_of), time_of(started))
}

/// How often each thread of a process has waited so far, by name.
fn waits(pid: u32) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim();
        let count = field("voluntary_ctxt_switches:").parse().unwrap_or(0);
        *all.entry(field("Name:").to_owned()).or_insert(0) += count;
    }
    all
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn killed_container_restarts_at_once() {
    let mut node = Node::start_with("events", json!({"logging": {"verbosity": 4}}));
    let mut took = Vec::new();
    for number in 0..5 {
        let name = format!("web{number}");
        node.apply(&format!("{name}.json"), &simple(&name));
        node.wait_ready(&name);
        let id = node.running(&name)["main"][0].clone();
        let pid = node.process(&id);
        let before = SystemTime::now();
        kill(pid, "KILL");
        node.wait_pod(&name, "restarted", LONG, |pod| restarts(pod, "main") == 1 && is_ready(pod));
        let (noticed, started) = noticed_and_started("events", &id);
        let since = |time: SystemTime| time.duration_since(before).unwrap_or_default();
        took.push((noticed.map(since), since(started)));
    }
    // A stream that was delayed for seconds is not trusted until the next event arrives.
    let changes = wait_for("an event stream, or the report that there is none", LONG, || {
        let status = node.cli(&["status"]);
        let line = status.lines().find(|line| line.starts_with("Changes"))?.to_owned();
        if line.contains("full list") && !line.contains("the runtime has no event stream") {
            node.apply("more.json", &simple("more"));
            node.wait_ready("more");
            node.remove("more.json");
            node.wait_gone("more");
            return None;
        }
        Some(line)
    });
    println!("killed; noticed and started again after {took:?}; {changes}");
    let streams = changes.contains("event stream") && !changes.contains("full list");
    assert!(streams || changes.contains("the runtime has no event stream"), "{changes}");

    // No changes now: the rest is the cost of watching.
    if streams {
        wait_until("lists to become rare", LONG, || {
            let lists = "kubelet_pleg_relist_duration_seconds_count";
            let before = node.metric(lists);
            pause(Duration::from_secs(5));
            node.metric(lists) - before < 1.5
        });
    }
    let series = [
        "coracle_voluntary_context_switches_total",
        "process_cpu_seconds_total",
        "kubelet_runtime_operations_total{operation_type=\"list_podsandbox\"}",
        "kubelet_runtime_operations_total{operation_type=\"status\"}",
    ];
    let before = series.map(|name| node.metric(name));
    let waited = waits(node.pid());
    pause(Duration::from_secs(20));
    for (name, count) in waits(node.pid()) {
        let more = count.saturating_sub(waited.get(&name).copied().unwrap_or(0));
        if more > 2 {
            println!("{name}: {:.2} waits per second", more as f64 / 20.0);
        }
    }
    for (name, before) in series.into_iter().zip(before) {
        println!("{name}: {:.2} per second", (node.metric(name) - before) / 20.0);
    }

    // The daemon restarts: the stream is opened again and still delivers events.
    node.containerd.stop();
    wait_until("the agent to notice", LONG, || node.cli(&["status"]).contains("full list every second"));
    node.containerd.resume();
    wait_until("the removal of the pods", LONG, || node.cli(&["status"]).lines().any(|line| line == changes));
    let id = node.running("web0")["main"][0].clone();
    node.containerd.kill_task(&id);
    node.wait_pod("web0", "restarted again", LONG, |pod| restarts(pod, "main") == 2 && is_ready(pod));
    node.stop_agent();
    node.start_agent();
    node.finish();
}
