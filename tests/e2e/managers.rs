//! Exclusive CPUs on the machine: the sets of containers, over restarts and without the state file.

use std::fs;

use serde_json::{Value, json};

use crate::support::node::{FOREVER, LONG, Node, busybox, container_id, pod, simple};
use crate::support::wait::wait_until;

/// A Guaranteed pod with one CPU.
fn guaranteed(name: &str) -> Value {
    let mut container = busybox("main", FOREVER);
    container["resources"] = json!({"limits": {"cpu": "1", "memory": "64Mi"}});
    pod(name, json!([container]))
}

/// The CPUs in the cgroup of a container.
fn cpus(node: &Node, id: &str) -> String {
    let id = id.rsplit('/').next().expect("an id");
    let tree = node.cgroups().tree();
    let path = tree.keys().find(|path| path.contains(id)).expect("the container has a cgroup");
    node.cgroups().read(path, "cpuset.cpus").expect("the container has a set of CPUs")
}

// Runtimes: containerd 2.
#[test]
fn exclusive_cpu_survives_restarts_and_a_lost_state_file() {
    let config = json!({
        "cpuManagerPolicy": "static",
        "kubeReserved": {"cpu": "500m"},
        "topologyManagerPolicy": "best-effort",
    });
    let mut node = Node::start_with("exclusive", config);
    let all = fs::read_to_string("/sys/devices/system/cpu/online").expect("the machine's CPUs");
    node.apply("be.json", &simple("be"));
    let be = container_id(&node.wait_ready("be"), "main");
    assert_eq!(cpus(&node, &be), all.trim());
    node.apply("gu.json", &guaranteed("gu"));
    let gu = container_id(&node.wait_ready("gu"), "main");
    let own = cpus(&node, &gu);
    own.parse::<u32>().expect("one CPU");
    wait_until("the shared container to lose the CPU", LONG, || {
        let rest = cpus(&node, &be);
        rest != all.trim() && rest != own
    });
    let rest = cpus(&node, &be);
    // The pod has no quota, because its container has the whole CPU.
    let quota = |path: &str| {
        let read = |file| node.cgroups().read(path, file);
        read("cpu.cfs_quota_us").or_else(|| read("cpu.max")).expect("a quota")
    };
    let tree = node.cgroups().tree();
    let path = tree.keys().find(|path| path.contains(gu.rsplit('/').next().expect("an id")));
    for path in [path.expect("a cgroup"), path.and_then(|path| path.rsplit_once('/')).expect("a pod").0] {
        assert!(["-1", "max 100000"].contains(&quota(path).as_str()), "{path}");
    }
    let file = node.root().join("cpu_manager_state");
    let before = fs::read_to_string(&file).expect("the state file");
    for way in ["stop", "kill", "damage"] {
        if way == "stop" {
            node.stop_agent();
        } else {
            node.kill_agent();
        }
        if way == "damage" {
            fs::write(&file, "damaged").expect("the state file can be written");
        }
        node.start_agent();
        for (name, id) in [("gu", &gu), ("be", &be)] {
            assert_eq!(&container_id(&node.wait_ready(name), "main"), id, "{way}: not restarted");
        }
        wait_until("the state file", LONG, || fs::read_to_string(&file).is_ok_and(|text| text == before));
        if way == "damage" {
            // A container gets its set after the file has it.
            wait_until("the CPUs that are left", LONG, || cpus(&node, &be) == rest);
        }
        assert_eq!((cpus(&node, &gu), cpus(&node, &be)), (own.clone(), rest.clone()), "{way}");
    }
    assert!(node.cli(&["events"]).contains("UnusableStateFile"));
    node.remove("gu.json");
    node.wait_gone("gu");
    wait_until("the CPU to be shared again", LONG, || cpus(&node, &be) == all.trim());
    node.finish();
}
