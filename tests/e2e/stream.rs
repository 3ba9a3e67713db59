//! Changes in the runtime: told by its event stream where it has one, found by lists where
//! it has not; and what watching costs while nothing happens.

use std::fs;
use std::time::{Duration, SystemTime};

use crate::support::containerd::kill;
use crate::support::node::{LONG, Node, is_ready, restarts, simple};
use crate::support::wait::{pause, wait_until};

/// A sample of the metrics page; zero while there is none.
fn metric(node: &Node, series: &str) -> f64 {
    node.read_only("/metrics")
        .lines()
        .find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
        .unwrap_or(0.0)
}

/// The time at the head of the last log line that says that a container runs.
fn last_start(node: &str) -> SystemTime {
    let log = fs::read_to_string(Node::base(node).join("agent-1.log")).expect("the agent's log");
    let line = log.lines().rfind(|line| line.contains("start: container ")).expect("a container was started");
    let text = line.split_whitespace().next().unwrap_or_default();
    text.parse::<jiff::Timestamp>().expect("a line begins with its time").into()
}

#[test]
fn a_killed_container_is_back_at_once() {
    let mut node = Node::start("events");
    let mut took = Vec::new();
    for number in 0..5 {
        let name = format!("web{number}");
        node.apply(&format!("{name}.json"), &simple(&name));
        node.wait_ready(&name);
        let id = node.running(&name)["main"][0].clone();
        let pid = node.containerd.tasks().into_iter().find(|task| task.id == id).expect("it runs").pid;
        let before = SystemTime::now();
        kill(pid, "KILL");
        node.wait_pod(&name, "restarted", LONG, |pod| restarts(pod, "main") == 1 && is_ready(pod));
        took.push(last_start("events").duration_since(before).unwrap_or_default());
    }
    let status = node.says(&["status"]);
    let changes = status.lines().find(|line| line.starts_with("Changes")).unwrap_or_default().to_owned();
    println!("killed and started again after {took:?}; {changes}");
    let streams = changes.contains("event stream") && !changes.contains("full list");
    assert!(streams || changes.contains("the runtime has no event stream"), "{changes}");

    // Nothing happens now; what is left is what watching costs.
    if streams {
        wait_until("lists to become rare", LONG, || {
            let lists = "kubelet_pleg_relist_duration_seconds_count";
            let before = metric(&node, lists);
            pause(Duration::from_secs(5));
            metric(&node, lists) - before < 1.5
        });
    }
    let series = [
        "coracle_voluntary_context_switches_total",
        "process_cpu_seconds_total",
        "kubelet_runtime_operations_total{operation_type=\"list_podsandbox\"}",
        "kubelet_runtime_operations_total{operation_type=\"status\"}",
    ];
    let before = series.map(|name| metric(&node, name));
    pause(Duration::from_secs(20));
    for (name, before) in series.into_iter().zip(before) {
        println!("{name}: {:.2} per second", (metric(&node, name) - before) / 20.0);
    }

    // The daemon goes and comes back: the stream is opened again and still tells.
    node.containerd.stop();
    wait_until("the agent to notice", LONG, || node.says(&["status"]).contains("full list every second"));
    node.containerd.resume();
    wait_until("the way back", LONG, || node.says(&["status"]).lines().any(|line| line == changes));
    let id = node.running("web0")["main"][0].clone();
    node.containerd.kill_task(&id);
    node.wait_pod("web0", "restarted again", LONG, |pod| restarts(pod, "main") == 2 && is_ready(pod));
    node.stop_agent();
    node.start_agent();
    node.finish();
}
