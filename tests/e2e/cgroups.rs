//! The cgroups of pods on the machine: values, limits, and that none is left behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::containerd::Containerd;
use crate::support::node::{
    FOREVER, LONG, Node, busybox, container_id, ended, ended_before, is_ready, pod, restarts, simple, uid,
};
use crate::support::wait::{pause, wait_until};

/// A container with requests and limits.
fn sized(name: &str, script: &str, requests: &Value, limits: &Value) -> Value {
    let mut container = busybox(name, script);
    container["resources"] = json!({"requests": requests, "limits": limits});
    container
}

/// The cgroup of a pod, by its class: ``, `burstable/` or `besteffort/`.
fn cgroup(node: &Node, tier: &str, name: &str) -> String {
    let pod = node.pod(name).expect("the pod is listed");
    format!("kubepods/{tier}pod{}", uid(&pod))
}

/// A value of a cgroup: of the file of version 1, or else of version 2.
fn value(node: &Node, cgroup: &str, v1: &str, v2: &str) -> String {
    let read = |file| node.cgroups().read(cgroup, file);
    read(v1).or_else(|| read(v2)).unwrap_or_else(|| panic!("{cgroup} has neither {v1} nor {v2}"))
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn pod_has_its_cgroup_and_a_restart_of_the_agent_changes_no_value() {
    let mut node = Node::start_with("cgvals", json!({"podPidsLimit": 500}));
    let both = json!({"cpu": "250m", "memory": "64Mi"});
    node.apply("gu.json", &pod("gu", json!([sized("main", FOREVER, &both, &both)])));
    let requests = json!({"cpu": "100m", "memory": "32Mi"});
    node.apply("bu.json", &pod("bu", json!([sized("main", FOREVER, &requests, &json!({}))])));
    node.apply("be.json", &simple("be"));
    let ids = ["gu", "bu", "be"].map(|name| container_id(&node.wait_ready(name), "main"));
    let [gu, bu, be] = [("", "gu"), ("burstable/", "bu"), ("besteffort/", "be")]
        .map(|(tier, name)| cgroup(&node, tier, name));
    let cgroup_value = |cgroup: &str, v1: &str, v2: &str| value(&node, cgroup, v1, v2);
    assert!(["256", "10"].contains(&cgroup_value(&gu, "cpu.shares", "cpu.weight").as_str()));
    assert!(["25000", "25000 100000"].contains(&cgroup_value(&gu, "cpu.cfs_quota_us", "cpu.max").as_str()));
    assert_eq!(cgroup_value(&gu, "memory.limit_in_bytes", "memory.max"), (64 << 20).to_string());
    for pod in [&gu, &bu, &be] {
        assert_eq!(cgroup_value(pod, "pids.max", "pids.max"), "500");
    }
    assert!(["102", "4"].contains(&cgroup_value(&bu, "cpu.shares", "cpu.weight").as_str()));
    assert!(["2", "1"].contains(&cgroup_value(&be, "cpu.shares", "cpu.weight").as_str()));
    // The tier follows the pods in it: its weight grew before the pod started.
    assert!(["102", "4"].contains(&cgroup_value("kubepods/burstable", "cpu.shares", "cpu.weight").as_str()));
    assert!(["2", "1"].contains(&cgroup_value("kubepods/besteffort", "cpu.shares", "cpu.weight").as_str()));
    // The containers are in the cgroups of their pods.
    let tree = node.cgroups().tree();
    for (pod, id) in [&gu, &bu, &be].into_iter().zip(&ids) {
        let id = id.rsplit('/').next().expect("an id");
        assert!(tree.keys().any(|path| path.starts_with(pod.as_str()) && path.contains(id)), "{pod} {id}");
    }
    assert!(node.cli(&["events"]).contains("Updated Node Allocatable limit across pods"));
    let described = node.cli(&["describe", "gu"]);
    assert!(described.contains(&format!("{}/{gu}", node.cgroups().path())), "{described}");
    assert!(described.contains("limit 250m") && described.contains("limit 64.0 MiB"), "{described}");
    let status = node.cli(&["status"]);
    assert!(status.contains("Allocatable:"), "{status}");
    let before = node.cgroups().values();
    for way in ["stop", "kill"] {
        if way == "stop" {
            node.stop_agent()
        } else {
            node.kill_agent()
        }
        node.start_agent();
        wait_until("all pods to be ready again", LONG, || {
            node.try_pods().unwrap_or_default().iter().filter(|pod| is_ready(pod)).count() == 3
        });
        assert_eq!(node.cgroups().values(), before, "after {way}");
    }
    for (name, id) in ["gu", "bu", "be"].iter().zip(&ids) {
        assert_eq!(&container_id(&node.wait_ready(name), "main"), id, "no container was restarted");
    }
    node.remove("bu.json");
    node.wait_gone("bu");
    wait_until("the tier to have the least weight", LONG * 2, || {
        let shares = value(&node, "kubepods/burstable", "cpu.shares", "cpu.weight");
        ["2", "1"].contains(&shares.as_str())
    });
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn limits_of_cpu_memory_and_processes_hold_for_one_pod_only() {
    let node = Node::start_with("cglimits", json!({"podPidsLimit": 60}));
    let cpu = json!({"cpu": "100m", "memory": "64Mi"});
    node.apply("spin.json", &pod("spin", json!([sized("main", "while :; do :; done", &cpu, &cpu)])));
    // `tail` keeps its input in memory until the first line feed.
    let eat = "sleep 1; tail /dev/zero";
    let little = json!({"cpu": "100m", "memory": "32Mi"});
    node.apply("eat.json", &pod("eat", json!([sized("main", eat, &little, &little)])));
    // A shell ends when it cannot fork, so the first process is none.
    let fork = "sh -c 'bomb() { bomb | bomb & sleep 1; }; bomb' 2>/dev/null & exec tail -f /dev/null";
    node.apply("fork.json", &pod("fork", json!([busybox("main", fork)])));
    node.apply("calm.json", &simple("calm"));
    let calm = container_id(&node.wait_ready("calm"), "main");
    node.wait_pod("eat", "ended by the OOM killer", LONG, |pod| {
        let reasons = [ended(pod, "main"), ended_before(pod, "main")];
        reasons.iter().flatten().any(|end| end.reason.as_deref() == Some("OOMKilled"))
    });
    let spin = cgroup(&node, "", "spin");
    wait_until("throttled periods", LONG, || {
        let stat = node.cgroups().read(&spin, "cpu.stat").unwrap_or_default();
        let throttled = stat.lines().find_map(|line| line.strip_prefix("nr_throttled "));
        throttled.is_some_and(|count| count.trim().parse::<u64>().is_ok_and(|count| count > 5))
    });
    let bomb = cgroup(&node, "besteffort/", "fork");
    wait_until("the limit of processes to be reached", LONG, || {
        let current = node.cgroups().read(&bomb, "pids.current").unwrap_or_default();
        assert!(current.parse::<u32>().unwrap_or(0) <= 60);
        // The kernel counts a refusal in the cgroup of the process, which is the container's.
        let tree = node.cgroups().tree();
        let counts = tree.keys().filter(|path| path.starts_with(&bomb));
        let mut refused = counts.filter_map(|path| node.cgroups().read(path, "pids.events"));
        refused.any(|events| {
            events.lines().any(|line| line.strip_prefix("max ").is_some_and(|count| count != "0"))
        })
    });
    // The others live on.
    let pod = node.wait_ready("calm");
    assert_eq!((container_id(&pod, "main"), restarts(&pod, "main")), (calm.clone(), 0));
    let id = calm.rsplit('/').next().expect("an id");
    assert!(node.exec(id, &["echo", "alive"]).contains("alive"));
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn thirty_removed_pods_leave_no_cgroup() {
    let node = Node::start("cgmany");
    for number in 0..30 {
        let requests = json!({"cpu": format!("{}m", 10 + number)});
        let container = sized("main", FOREVER, &requests, &json!({}));
        node.apply(&format!("pod{number}.json"), &pod(&format!("pod{number}"), json!([container])));
    }
    wait_until("all pods to be ready", LONG * 2, || {
        node.pods().iter().filter(|pod| is_ready(pod)).count() == 30
    });
    assert_eq!(node.cgroups().pods().len(), 30);
    for number in 0..30 {
        node.remove(&format!("pod{number}.json"));
    }
    wait_until("no pods", LONG * 2, || node.pods().is_empty());
    // A pod is listed until its cgroup is removed.
    assert!(node.cgroups().pods().is_empty(), "{:?}", node.cgroups().pods());
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn agent_killed_at_random_times_leaves_no_cgroup_and_changes_none() {
    let mut node = Node::start("cgcrash");
    let begun = Instant::now();
    let both = json!({"cpu": "50m", "memory": "32Mi"});
    for round in 0..4 {
        for number in 0..5 {
            let name = format!("pod{round}{number}");
            node.apply(&format!("{name}.json"), &pod(&name, json!([sized("main", FOREVER, &both, &both)])));
            if round > 0 {
                node.remove(&format!("pod{}{number}.json", round - 1));
            }
            pause(Duration::from_millis(u64::try_from(begun.elapsed().as_nanos() % 500).expect("small")));
            node.kill_agent();
            node.launch_agent();
        }
    }
    node.wait_healthy();
    let expected: Vec<String> = (0..5).map(|number| format!("pod3{number}")).collect();
    wait_until("the last pods to be ready", LONG * 2, || {
        let pods = node.try_pods().unwrap_or_default();
        pods.len() == 5 && pods.iter().all(is_ready)
    });
    wait_until("cgroups of the last pods only", LONG * 2, || node.cgroups().pods().len() == 5);
    for name in expected {
        let cgroup = cgroup(&node, "", &name);
        assert_eq!(value(&node, &cgroup, "memory.limit_in_bytes", "memory.max"), (32 << 20).to_string());
    }
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn orphaned_cgroup_is_removed_with_its_processes_and_a_foreign_one_is_not() {
    let mut node = Node::start("cgorphan");
    node.apply("web.json", &simple("web"));
    node.wait_ready("web");
    let orphan = "kubepods/burstable/pod11111111-2222-3333-4444-555555555555";
    node.stop_agent();
    let foreign = node.cgroups().make_child("kubepods/burstable/other");
    let made = node.cgroups().make_child(orphan);
    let mut straggler = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep starts");
    for dir in &made {
        fs::write(dir.join("cgroup.procs"), straggler.id().to_string()).expect("a process is moved");
    }
    node.start_agent();
    wait_until("the orphan to be removed", LONG, || node.cgroups().pods().len() == 1);
    let ended = straggler.wait().expect("the process has ended");
    assert!(!ended.success(), "it was killed: {ended}");
    assert!(foreign.iter().all(|dir| dir.is_dir()));
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn running_pod_without_a_cgroup_is_restarted_in_one() {
    let mut node = Node::prepare("cgflip", json!({"cgroupsPerQOS": false, "enforceNodeAllocatable": []}));
    node.start_agent();
    node.apply("web.json", &simple("web"));
    let first = container_id(&node.wait_ready("web"), "main");
    assert!(node.cgroups().tree().is_empty(), "without cgroupsPerQOS nothing is made");
    node.stop_agent();
    node.configure(json!({}));
    node.start_agent();
    let pod = node.wait_pod("web", "restarted in its cgroup", LONG, |pod| {
        is_ready(pod) && container_id(pod, "main") != first
    });
    assert_eq!(node.cgroups().pods(), [format!("kubepods/besteffort/pod{}", uid(&pod))]);
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn missing_cgroup_of_reserved_resources_ends_the_agent_with_its_name() {
    let mut node = Node::prepare(
        "cgfatal",
        json!({"enforceNodeAllocatable": ["pods", "system-reserved"], "systemReserved": {"cpu": "100m"},
            "systemReservedCgroup": "/coracle-absent"}),
    );
    node.launch_agent();
    let (status, log) = node.wait_ended();
    assert!(!status.success());
    assert!(log.contains("Failed to enforce System Reserved Cgroup Limits on \"/coracle-absent\""), "{log}");

    // One that exists gets the limits.
    let dirs = node.cgroups().make_child("daemons");
    let name = format!("{}/daemons", node.cgroups().path());
    node.configure(
        json!({"enforceNodeAllocatable": ["pods", "system-reserved"], "systemReserved": {"cpu": "100m"},
            "systemReservedCgroup": name}),
    );
    node.start_agent();
    wait_until("the weight of the daemons", LONG, || {
        let shares = value(&node, "daemons", "cpu.shares", "cpu.weight");
        ["102", "4"].contains(&shares.as_str())
    });
    assert!(!dirs.is_empty());
    node.finish();
}

/// With systemd as the first process, and no other pods on the machine: `tests/vm/run`.
// Runtimes: containerd 1, containerd 2.
#[test]
fn pods_are_in_slices_of_systemd() {
    if std::env::var_os("E2E_WHOLE_MACHINE").is_none() {
        println!("needs a machine of its own: tests/vm/run");
        return;
    }
    let runtime = Containerd::start_with(&Node::base("cgslices"), true);
    let root = json!({"cgroupDriver": "cgroupfs", "cgroupRoot": "/"});
    let mut node = Node::prepare_on("cgslices", "e2e", root, runtime);
    node.start_agent();
    let both = json!({"cpu": "255m", "memory": "64Mi"});
    node.apply("gu.json", &pod("gu", json!([sized("main", FOREVER, &both, &both)])));
    let requests = json!({"cpu": "100m", "memory": "32Mi"});
    node.apply("bu.json", &pod("bu", json!([sized("main", FOREVER, &requests, &json!({}))])));
    let ids = ["gu", "bu"].map(|name| container_id(&node.wait_ready(name), "main"));
    let slice = |tier: &str, name: &str| {
        let uid = uid(&node.pod(name).expect("the pod is listed")).replace('-', "_");
        let tiers = if tier.is_empty() { String::new() } else { format!("/kubepods-{tier}.slice") };
        let dash = if tier.is_empty() { String::new() } else { format!("{tier}-") };
        PathBuf::from(format!("/sys/fs/cgroup/kubepods.slice{tiers}/kubepods-{dash}pod{uid}.slice"))
    };
    let (gu, bu) = (slice("", "gu"), slice("burstable", "bu"));
    let read = |dir: &Path, file: &str| {
        fs::read_to_string(dir.join(file)).map(|text| text.trim_end().to_owned()).unwrap_or_default()
    };
    // systemd rounds the quota up to 10 ms per second.
    assert_eq!(read(&gu, "cpu.max"), "26000 100000");
    assert_eq!(read(&gu, "memory.max"), (64 << 20).to_string());
    assert_eq!(read(&bu, "cpu.weight"), "4");
    let show = |unit: &Path, property: &str| {
        let name = unit.file_name().expect("a unit");
        let output = Command::new("systemctl").args(["show", "-P", property]).arg(name).output();
        String::from_utf8_lossy(&output.expect("systemctl runs").stdout).trim().to_owned()
    };
    assert_eq!(show(&gu, "MemoryMax"), (64 << 20).to_string());
    assert_eq!(show(&gu, "ActiveState"), "active");
    for (pod, id) in [(&gu, &ids[0]), (&bu, &ids[1])] {
        let id = id.rsplit('/').next().expect("an id");
        assert!(pod.join(format!("cri-containerd-{id}.scope")).is_dir(), "{}", pod.display());
    }
    node.kill_agent();
    node.start_agent();
    let after = ["gu", "bu"].map(|name| container_id(&node.wait_ready(name), "main"));
    assert_eq!(after, ids, "no container was restarted");
    for name in ["gu", "bu"] {
        node.remove(&format!("{name}.json"));
        node.wait_gone(name);
    }
    for unit in [&gu, &bu] {
        assert!(!unit.exists(), "{}", unit.display());
        assert_eq!(show(unit, "ActiveState"), "inactive");
    }
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn reservation_beyond_the_machine_is_refused() {
    let mut node = Node::prepare("cgtoomuch", json!({"systemReserved": {"cpu": "100000"}}));
    node.launch_agent();
    let (status, log) = node.wait_ended();
    assert!(!status.success());
    let expected = "invalid Node Allocatable configuration. Resource \"cpu\" has a reservation of 100000000m";
    assert!(log.contains(expected), "{log}");
}
