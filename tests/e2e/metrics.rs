//! The metrics of the read-only port, compared with the state of the runtime.

use std::collections::BTreeMap;

use serde_json::json;

use crate::support::node::{FOREVER, LONG, Node, busybox, pod, restarts, simple};
use crate::support::wait::{wait_for, wait_until};

/// Every sample by its name with labels.
fn samples(node: &Node, path: &str) -> BTreeMap<String, f64> {
    let (code, text) = node.read_only(path);
    assert_eq!(code, 200, "{path}: {text}");
    text.lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line}"));
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("no number: {line}")))
        })
        .collect()
}

fn value(node: &Node, name: &str) -> f64 {
    samples(node, "/metrics").get(name).copied().unwrap_or(0.0)
}

/// The sandboxes that were requested and created, by the agent's counters and by those of its calls.
/// A sandbox that the runtime could not create is requested again.
fn sandbox_counts(node: &Node) -> (f64, f64) {
    let page = samples(node, "/metrics");
    let value = |name: &str| page.get(name).copied().unwrap_or(0.0);
    let calls = |counter: &str| {
        value(&format!("kubelet_runtime_operations_{counter}{{operation_type=\"run_podsandbox\"}}"))
    };
    (
        value("kubelet_started_pods_total") - value("kubelet_started_pods_errors_total"),
        calls("total") - calls("errors_total"),
    )
}

/// The sum over all labels.
fn sum(node: &Node, name: &str) -> f64 {
    let labelled = format!("{name}{{");
    samples(node, "/metrics")
        .into_iter()
        .filter(|(key, _)| key == name || key.starts_with(&labelled))
        .map(|(_, value)| value)
        .sum()
}

// Runtimes: containerd 2.
#[test]
fn metrics_count_pods_and_runtime_calls() {
    let node = Node::start("metrics");
    node.apply("one.json", &simple("one"));
    node.wait_ready("one");
    wait_until("one running pod", LONG, || value(&node, "kubelet_running_pods") == 1.0);
    assert_eq!(sandbox_counts(&node), (1.0, 1.0));

    node.apply("two.json", &pod("two", json!([busybox("a", FOREVER), busybox("b", FOREVER)])));
    node.wait_ready("two");
    wait_until("two running pods", LONG, || value(&node, "kubelet_running_pods") == 2.0);
    let sandboxes = node.running_sandboxes("one").len() + node.running_sandboxes("two").len();
    assert_eq!(sandboxes, 2);
    assert_eq!(sandbox_counts(&node), (2.0, 2.0));
    assert_eq!(sum(&node, "kubelet_started_containers_total"), 3.0);
    wait_until("three running containers", LONG, || {
        value(&node, "kubelet_running_containers{container_state=\"running\"}") == 3.0
    });
    assert_eq!(value(&node, "kubelet_node_name{node=\"e2e\"}"), 1.0);
    assert_eq!(value(&node, "kubelet_desired_pods{static=\"true\"}"), 2.0);
    wait_until("two starts", LONG, || value(&node, "kubelet_pod_start_duration_seconds_count") >= 2.0);
    assert!(value(&node, "process_resident_memory_bytes") > 1_000_000.0);

    // A termination is counted once, by its kind.
    const ENDS: &str =
        "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"7\",reason=\"Error\"}";
    let mut ends = pod("ends", json!([busybox("main", "exit 7")]));
    ends["spec"]["restartPolicy"] = json!("Never");
    node.apply("ends.json", &ends);
    wait_until("the end to be counted", LONG, || value(&node, ENDS) == 1.0);

    // The relist is recent and counted.
    let now = unix_now();
    let seen = value(&node, "kubelet_pleg_last_seen_seconds");
    assert!((now - seen).abs() < 400.0, "seen at {seen}, now {now}");
    assert!(value(&node, "kubelet_pleg_relist_duration_seconds_count") >= 1.0);
    assert!(value(&node, "kubelet_pleg_pod_relist_duration_seconds_count") >= 2.0);

    // A runtime that is down: calls fail, and the failures are counted.
    let errors = sum(&node, "kubelet_runtime_operations_errors_total");
    node.containerd.stop();
    wait_until("failed calls to be counted", LONG, || {
        sum(&node, "kubelet_runtime_operations_errors_total") > errors
    });
    node.containerd.resume();
    wait_until("health", LONG, || node.health("/healthz").0 == 200);
    let pod = node.wait_ready("two");
    assert_eq!(restarts(&pod, "a") + restarts(&pod, "b"), 0);
    assert_eq!(sum(&node, "kubelet_terminated_containers_total"), 1.0);
    assert!(sum(&node, "kubelet_imagemanager_image_mustpull_checks_total") >= 3.0);
    assert_eq!(value(&node, "kubelet_imagemanager_ondisk_pullintents"), 0.0);

    // One series per health check.
    let slis = samples(&node, "/metrics/slis");
    let checks = wait_for("the list of checks", LONG, || {
        let (code, checks) = node.health("/healthz?verbose");
        (code == 200).then_some(checks)
    });
    let named: Vec<String> = checks
        .lines()
        .filter_map(|line| line.strip_prefix("[+]")?.split(' ').next().map(str::to_owned))
        .collect();
    assert!(!named.is_empty(), "{checks}");
    for name in named {
        let series = format!("kubernetes_healthcheck{{name=\"{name}\",type=\"healthz\"}}");
        assert_eq!(slis.get(&series), Some(&1.0), "{series} in {slis:#?}");
        let total =
            format!("kubernetes_healthchecks_total{{name=\"{name}\",type=\"healthz\",status=\"success\"}}");
        assert!(slis.get(&total) >= Some(&2.0), "{total} in {slis:#?}");
    }
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn start_latency_is_reported_once_per_pod() {
    let mut node = Node::start("sli");
    const COUNT: &str = "kubelet_pod_start_sli_duration_seconds_count";
    for (number, name) in ["one", "two"].iter().enumerate() {
        node.apply(&format!("{name}.json"), &simple(name));
        node.wait_ready(name);
        wait_until("the start to be counted", LONG, || value(&node, COUNT) == (number + 1) as f64);
    }
    node.stop_agent();
    node.start_agent();
    node.wait_ready("one");
    node.wait_ready("two");
    assert_eq!(value(&node, COUNT), 0.0, "what ran already is not counted again");
    node.finish();
}

fn unix_now() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}
