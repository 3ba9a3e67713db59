//! Usage of pods as the node reports it, compared with the cgroup files.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::support::node::{FOREVER, LONG, Node, busybox, pod, simple};
use crate::support::wait::{wait_for, wait_until};

fn summary(node: &Node, query: &str) -> Value {
    let (code, text) = node.read_only(&format!("/stats/summary{query}"));
    assert_eq!(code, 200, "{text}");
    serde_json::from_str(&text).expect("the summary is JSON")
}

fn of_pod(node: &Node, summary: &Value, name: &str) -> Option<Value> {
    let pods = summary["pods"].as_array().expect("a list of pods");
    pods.iter().find(|pod| pod["podRef"]["name"] == node.full_name(name)).cloned()
}

fn names(pod: &Value) -> Vec<&str> {
    let containers = pod["containers"].as_array().expect("a list of containers");
    containers.iter().filter_map(|container| container["name"].as_str()).collect()
}

/// The directory of a container's cgroup, wherever the runtime made it.
fn cgroup(top: &Path, id: &str) -> Option<PathBuf> {
    for entry in std::fs::read_dir(top).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if entry.file_name().to_string_lossy().contains(id) {
                return Some(path);
            }
            if let Some(found) = cgroup(&path, id) {
                return Some(found);
            }
        }
    }
    None
}

fn field(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// Memory in use without the part that the kernel can reclaim at once.
fn working_set(id: &str) -> u64 {
    let root = Path::new("/sys/fs/cgroup");
    let second = root.join("cgroup.controllers").exists();
    let top = if second { root.to_owned() } else { root.join("memory") };
    let dir = cgroup(&top, id).unwrap_or_else(|| panic!("no cgroup of {id} below {}", top.display()));
    let read = |file: &str| std::fs::read_to_string(dir.join(file)).expect("a file of the cgroup");
    let (usage, inactive) = if second {
        (read("memory.current"), field(&read("memory.stat"), "inactive_file"))
    } else {
        (read("memory.usage_in_bytes"), field(&read("memory.stat"), "total_inactive_file"))
    };
    usage.trim().parse::<u64>().expect("a number").saturating_sub(inactive)
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

const EATER: &str = "dd if=/dev/zero of=/dev/shm/x bs=1M count=8 2>/dev/null; echo written; \
    trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done";

// Runtimes: containerd 1, containerd 2.
#[test]
fn summary_equals_the_cgroup_files() {
    let node = Node::start("stats");
    let manifest = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "eater"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {"name": "main", "image": "localhost/busybox:1", "command": ["sh", "-c", EATER],
                 "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]},
                {"name": "idle", "image": "localhost/busybox:1", "command": ["sh", "-c", FOREVER]},
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    });
    node.apply("eater.json", &manifest);
    node.wait_ready("eater");
    // It prints its line after the allocation: from then on its memory is constant.
    wait_until("the container to have allocated its memory", LONG, || {
        node.command(&["logs", "eater-e2e", "-c", "main"]).stdout.starts_with(b"written")
    });
    let whole = wait_for("eight MiB in use, and a line in the log", LONG, || {
        let whole = summary(&node, "");
        let pod = of_pod(&node, &whole, "eater")?;
        let has_logs = |container: &Value| {
            container["name"] == "main" && container["logs"]["usedBytes"].as_u64() > Some(0)
        };
        let eaten = pod["memory"]["workingSetBytes"].as_u64() > Some(8 << 20);
        let complete = names(&pod).len() == 2 && pod["volume"][0]["name"] == "scratch";
        let done = eaten && complete && pod["containers"].as_array().into_iter().flatten().any(has_logs);
        done.then_some(whole)
    });
    let found = of_pod(&node, &whole, "eater").expect("the pod has numbers");

    // Compared with the files.
    let ids = node.running("eater");
    for container in found["containers"].as_array().expect("containers") {
        let name = container["name"].as_str().expect("a name");
        let shown = container["memory"]["workingSetBytes"].as_u64().expect("a working set");
        let real = working_set(&ids[name][0]);
        assert!(shown.abs_diff(real) < 2 << 20, "{name}: {shown} shown, {real} in the file");
        assert!(container["cpu"]["usageCoreNanoSeconds"].as_u64() > Some(0), "{container}");
        assert!(
            container["cpu"]["usageNanoCores"].is_u64(),
            "a rate also in the first response: {container}"
        );
        assert!(container["rootfs"]["usedBytes"].is_u64(), "{container}");
    }
    let main =
        found["containers"].as_array().into_iter().flatten().find(|container| container["name"] == "main");
    assert!(main.expect("main")["logs"]["usedBytes"].as_u64() > Some(0), "{found}");
    let parts: u64 = ids.values().flatten().map(|id| working_set(id)).sum();
    let together = found["memory"]["workingSetBytes"].as_u64().expect("a working set");
    assert!(together + (2 << 20) > parts && together < parts + (8 << 20), "{together} of {parts}");

    // The rest of the pod.
    assert_eq!(found["network"]["name"], "eth0");
    assert!(found["network"]["interfaces"].as_array().is_some_and(|all| all.len() == 1), "{found}");
    assert!(found["process_stats"]["process_count"].as_u64() >= Some(3), "{found}");
    assert_eq!(found["volume"][0]["name"], "scratch");
    assert!(found["ephemeral-storage"]["usedBytes"].as_u64() > Some(0), "{found}");
    let uid = node.pod("eater").and_then(|pod| pod.metadata.uid).expect("a UID");
    assert_eq!(found["podRef"], json!({"name": node.full_name("eater"), "namespace": "default", "uid": uid}));

    // The node.
    let machine = &whole["node"];
    assert_eq!(machine["nodeName"], "e2e");
    let kernel = |file: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/kernel/{file}")).expect("a limit");
        text.trim().parse::<u64>().expect("a number")
    };
    assert_eq!(machine["rlimit"]["maxpid"], kernel("pid_max").min(kernel("threads-max")));
    assert!(machine["rlimit"]["curproc"].as_u64() > Some(10), "{machine}");
    assert!(machine["memory"]["usageBytes"].as_u64() >= machine["memory"]["rssBytes"].as_u64(), "{machine}");
    assert!(machine["fs"]["capacityBytes"].as_u64() > machine["fs"]["usedBytes"].as_u64(), "{machine}");
    // The runtime measures its images periodically: at first their size is zero.
    assert!(machine["runtime"]["imageFs"]["usedBytes"].is_u64(), "{machine}");
    assert!(machine["runtime"]["imageFs"]["capacityBytes"].as_u64() > Some(0), "{machine}");
    let system = machine["systemContainers"].as_array().expect("parts of the system");
    assert!(system.iter().any(|part| part["name"] == "pods"), "{machine}");

    // The short form.
    let brief = summary(&node, "?only_cpu_and_memory=true");
    let pod = of_pod(&node, &brief, "eater").expect("the pod");
    assert!(pod.get("network").is_none() && pod.get("volume").is_none(), "{pod}");
    assert!(pod["memory"]["workingSetBytes"].is_u64() && brief["node"].get("fs").is_none(), "{brief}");

    // The table for users.
    let text = node.cli(&["top", "--once"]);
    assert!(text.contains("CONTAINER") && text.contains("main") && text.contains("idle"), "{text}");
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn ended_containers_have_no_statistics() {
    let node = Node::start("statsgone");
    let ends = "until [ -e /out/seen ]; do sleep 0.1; done";
    let mut two = pod("two", json!([busybox("stays", FOREVER), busybox("ends", ends)]));
    two["spec"]["restartPolicy"] = json!("Never");
    node.apply("two.json", &node.with_out(two));
    wait_until("both containers", LONG, || {
        of_pod(&node, &summary(&node, ""), "two").is_some_and(|pod| names(&pod).len() == 2)
    });
    node.touch("seen");
    wait_until("the running one", LONG, || {
        of_pod(&node, &summary(&node, ""), "two").is_some_and(|pod| names(&pod) == ["stays"])
    });
    node.remove("two.json");
    wait_until("no pod", LONG, || of_pod(&node, &summary(&node, ""), "two").is_none());
    node.finish();
}

/// Samples by name with labels: the value and the time in milliseconds.
fn samples(node: &Node, path: &str) -> Vec<(String, f64, Option<i64>)> {
    let (code, text) = node.read_only(path);
    assert_eq!(code, 200, "{path}: {text}");
    text.lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| {
            let end = line.rfind('}').map_or_else(|| line.find(' ').expect("a value"), |index| index + 1);
            let (name, rest) = line.split_at(end);
            let mut words = rest.split_whitespace();
            let value = words.next().and_then(|word| word.parse().ok());
            let timestamp = words.next().map(|word| word.parse().expect("a time"));
            (name.to_owned(), value.unwrap_or_else(|| panic!("no number: {line}")), timestamp)
        })
        .collect()
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn metrics_have_timestamps_of_their_samples() {
    let node = Node::start("statspages");
    node.apply("one.json", &simple("one"));
    node.wait_ready("one");
    let series = "container_cpu_usage_seconds_total{container=\"main\"";
    let of_one = |path: &str| {
        let all = samples(&node, path);
        all.iter().find(|(name, ..)| name.starts_with(series)).cloned().map(|found| (found, all))
    };
    wait_until("numbers", LONG, || of_one("/metrics/resource").is_some());
    let ((_, value, first), all) = of_one("/metrics/resource").expect("the container");
    assert!(all.iter().any(|(name, value, _)| name == "resource_scrape_error" && *value == 0.0), "{all:#?}");
    assert!(value > 0.0 && all.iter().any(|(name, ..)| name == "node_cpu_usage_seconds_total"));
    assert!(all.iter().any(|(name, ..)| name.starts_with("container_start_time_seconds{")));
    let first = first.expect("a time");
    assert!((first as f64 / 1e3) < now());
    // Requested again at once, it is the same sample: its time is not that of the answer.
    wait_until("two answers with one sample", LONG, || {
        let timestamp_of =
            |found: Option<((String, f64, Option<i64>), _)>| found.and_then(|((.., timestamp), _)| timestamp);
        let pair = [timestamp_of(of_one("/metrics/resource")), timestamp_of(of_one("/metrics/resource"))];
        let [Some(earlier), Some(later)] = pair else { return false };
        // The first of them may have been a second old already.
        earlier == later
    });
    // A second later it is another sample.
    wait_until("another sample", LONG, || {
        of_one("/metrics/resource").is_some_and(|((.., timestamp), _)| timestamp > Some(first + 900))
    });

    let ((name, value, timestamp), all) = of_one("/metrics/cadvisor").expect("the container");
    assert!(value > 0.0 && timestamp.is_some());
    for label in
        ["cpu=\"total\"", "id=\"/", "name=\"", "image=\"localhost/busybox:1\"", "namespace=\"default\""]
    {
        assert!(name.contains(label), "{label} in {name}");
    }
    for start in [
        "container_memory_working_set_bytes{",
        "container_network_receive_bytes_total{",
        "container_fs_usage_bytes{",
        "container_processes{",
        "machine_cpu_cores{",
        "cadvisor_version_info{",
    ] {
        assert!(all.iter().any(|(name, ..)| name.starts_with(start)), "{start}");
    }
    let own = samples(&node, "/metrics");
    for start in [
        "kubelet_container_log_filesystem_used_bytes{",
        "kubelet_certificate_manager_client_ttl_seconds",
        "coracle_threads{",
    ] {
        assert!(own.iter().any(|(name, ..)| name.starts_with(start)), "{start}");
    }
    node.finish();
}
