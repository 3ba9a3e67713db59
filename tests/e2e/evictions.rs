//! Evictions on a real runtime. Static pods are never evicted, so the pods come from an API server,
//! of which a fake suffices.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::fake_api::FakeApi;
use crate::support::node::{
    FOREVER, LONG, NODE, Node, STAMP, busybox, http_get_within, is_ready, pod, simple,
};
use crate::support::node_inspection::moment;
use crate::support::wait::{pause, wait_until};

/// The agent answers within this time also while memory is short: far more than it needs, as the
/// machine is busy.
const RESPONSE: Duration = LONG;

/// A node of a cluster whose API server is a fake.
struct JoinedNode {
    api: FakeApi,
    node: Node,
}

impl JoinedNode {
    fn prepare(name: &str, config: Value) -> JoinedNode {
        let api = FakeApi::start();
        api.raise_versions();
        let mut node = Node::prepare(name, config);
        let file = node.shared().join("kubeconfig");
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": api.url()}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        fs::write(&file, kubeconfig.to_string()).expect("the kubeconfig is written");
        node.set_flags(&["--kubeconfig".to_owned(), file.display().to_string()]);
        JoinedNode { api, node }
    }

    fn start(name: &str, config: Value) -> JoinedNode {
        let mut joined = JoinedNode::prepare(name, config);
        joined.node.start_agent();
        joined.wait_condition("Ready", "True");
        joined
    }

    fn path(name: &str) -> String {
        format!("/api/v1/namespaces/default/pods/{name}")
    }

    /// Binds a pod to the node.
    fn bind(&self, manifest: &Value) {
        let mut pod = manifest.clone();
        let name = pod["metadata"]["name"].as_str().expect("the manifest has a name").to_owned();
        pod["spec"]["nodeName"] = json!(NODE);
        pod["status"] = json!({"phase": "Pending"});
        self.api.put(&JoinedNode::path(&name), pod);
    }

    fn shown(&self, name: &str) -> Value {
        self.api.object(&JoinedNode::path(name)).unwrap_or_default()
    }

    fn condition(&self, kind: &str) -> Value {
        let node = self.api.object(&format!("/api/v1/nodes/{NODE}")).unwrap_or_default();
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default()
    }

    fn wait_condition(&self, kind: &str, status: &str) -> Value {
        wait_until(&format!("{kind} to be {status}"), LONG, || self.condition(kind)["status"] == status);
        self.condition(kind)
    }

    fn wait_pod(&self, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let shown = self.shown(name);
            if holds(&shown) {
                return shown;
            }
            let waited = begun.elapsed();
            assert!(waited < LONG * 2, "{name} is not {what}: {}\n{}", shown["status"], self.node.log());
            let response = http_get_within(self.node.healthz_port(), "/healthz", RESPONSE);
            assert!(matches!(response, Ok((200, _))), "{response:?}");
            pause(Duration::from_millis(50));
        }
    }

    fn wait_ready(&self, name: &str) -> Value {
        self.wait_pod(name, "ready", |pod| {
            let pod = serde_json::from_value(pod.clone());
            pod.is_ok_and(|pod| is_ready(&pod))
        })
    }

    /// Waits for the final status of an evicted pod.
    fn wait_evicted(&self, name: &str) -> Value {
        self.wait_pod(name, "evicted", |pod| {
            // The end of its containers is known, too.
            let ended = pod["status"]["containerStatuses"][0]["state"]["terminated"].is_object();
            pod["status"]["phase"] == "Failed" && pod["status"]["reason"] == "Evicted" && ended
        })
    }

    /// The events about an object with this reason.
    fn events(&self, object: &str, reason: &str) -> Vec<Value> {
        let all = self.api.objects("/api/v1/namespaces/default/events");
        let about = |event: &Value| event["involvedObject"]["name"] == object && event["reason"] == reason;
        all.into_iter().filter(about).collect()
    }

    fn wait_event(&self, object: &str, reason: &str) -> Value {
        wait_until(&format!("event {reason} about {object}"), LONG, || {
            !self.events(object, reason).is_empty()
        });
        self.events(object, reason).remove(0)
    }

    fn assert_runs(&self, name: &str) {
        let shown = self.shown(name);
        let pod = serde_json::from_value(shown.clone()).expect("a pod");
        assert!(is_ready(&pod), "{}", shown["status"]);
    }

    /// Deletes the pods and ends the node.
    fn finish(mut self, pods: &[&str]) {
        for name in pods {
            self.api.delete_pod(&JoinedNode::path(name));
        }
        wait_until("the pods to be gone", LONG, || pods.iter().all(|name| self.shown(name).is_null()));
        self.node.stop_agent();
        drop(self.node);
    }
}

/// The text of a pod's condition `DisruptionTarget`; null without it.
fn disruption(pod: &Value) -> Value {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.into_iter().find(|condition| condition["type"] == "DisruptionTarget");
    found.map_or(Value::Null, |condition| {
        json!([condition["status"], condition["reason"], condition["message"]])
    })
}

fn message(pod: &Value) -> String {
    pod["status"]["message"].as_str().unwrap_or_default().to_owned()
}

/// A container that takes so much memory and keeps it, and that ends with another code than zero. It
/// begins when `wait` has ended.
fn eater(mebibytes: u32, wait: &str) -> Value {
    busybox(
        "main",
        &format!("{wait}; dd if=/dev/zero bs={mebibytes}M count=1 | (sleep 100000; cat) >/dev/null"),
    )
}

/// Whether the agent has statistics of a pod's first container.
fn is_measured(node: &Node, pod: &str) -> bool {
    let (_, text) = node.read_only("/stats/summary");
    let summary: Value = serde_json::from_str(&text).unwrap_or_default();
    let mut pods = summary["pods"].as_array().into_iter().flatten();
    let found = pods.find(|stats| stats["podRef"]["name"] == pod);
    found.is_some_and(|stats| stats["containers"][0]["memory"]["workingSetBytes"].is_u64())
}

/// A field of `/proc/meminfo` in bytes.
fn meminfo(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").expect("/proc/meminfo");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}:"))).expect("the field");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") * 1024
}

/// The memory of the machine that is available, as eviction counts it.
fn available() -> u64 {
    let read = |file: &str| {
        let v1 = fs::read_to_string(format!("/sys/fs/cgroup/memory/{file}"));
        v1.or_else(|_| fs::read_to_string(format!("/sys/fs/cgroup/{file}"))).unwrap_or_default()
    };
    let stat = read("memory.stat");
    let field = |name: &str| {
        let value = stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        value.unwrap_or(0)
    };
    let usage = read("memory.usage_in_bytes").trim().parse().unwrap_or(field("anon ") + field("file "));
    let inactive = field("total_inactive_file ").max(field("inactive_file "));
    meminfo("MemTotal").saturating_sub(usage - inactive)
}

/// The memory of the machine that pods may use is 700 MiB, and pods are evicted when less than
/// 300 MiB of it is available. Other programs on the machine do not count.
fn small_memory(thresholds: Value) -> Value {
    let reserved = meminfo("MemTotal") - (700 << 20);
    let mut config = json!({"systemReserved": {"memory": reserved.to_string()}});
    for (name, value) in thresholds.as_object().expect("fields") {
        config[name] = value.clone();
    }
    config
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn pod_that_eats_the_memory_is_evicted_and_others_live() {
    let config = small_memory(json!({"evictionHard": {"memory.available": "300Mi"}}));
    let mut joined = JoinedNode::start("evmem", config);
    joined.node.apply("static.json", &simple("static"));
    joined.bind(&simple("quiet"));
    joined.wait_ready("quiet");
    // The message names the use of containers with statistics, which a new one does not have yet.
    let wait = "until [ -e /out/go ]; do sleep 0.1; done";
    joined.bind(&joined.node.with_out(pod("eater", json!([eater(450, wait)]))));
    wait_until("the statistics of the pod", LONG, || is_measured(&joined.node, "eater"));
    joined.node.touch("go");
    let evicted = joined.wait_evicted("eater");
    let text = message(&evicted);
    let start = "The node was low on resource: memory. Threshold quantity: 300Mi, available: ";
    assert!(text.starts_with(start), "{text}");
    assert!(text.contains("Container main was using ") && text.ends_with("of memory. "), "{text}");
    assert_eq!(disruption(&evicted), json!(["True", "TerminationByKubelet", text]));
    let event = joined.wait_event("eater", "Evicted");
    assert_eq!((&event["type"], &event["message"]), (&json!("Warning"), &json!(text)));
    let annotations = &event["metadata"]["annotations"];
    assert_eq!(annotations["starved_resource"], "memory");
    assert_eq!(annotations["offending_containers"], "main");
    assert_eq!(joined.wait_event(NODE, "EvictionThresholdMet")["message"], "Attempting to reclaim memory");
    let pressure = joined.wait_condition("MemoryPressure", "True");
    assert_eq!(pressure["reason"], "KubeletHasInsufficientMemory");
    joined.wait_event(NODE, "NodeHasInsufficientMemory");
    joined.assert_runs("quiet");
    joined.node.wait_ready("static");
    assert_eq!(joined.node.metric("kubelet_evictions{eviction_signal=\"allocatableMemory.available\"}"), 1.0);
    // A pod without requests is refused under this pressure, others are not.
    joined.bind(&simple("late"));
    let refused = joined.wait_pod("late", "refused", |pod| pod["status"]["reason"] == "Evicted");
    assert_eq!(message(&refused), "Pod was rejected: The node had condition: [MemoryPressure]. ");
    // The restarted agent leaves it evicted.
    joined.node.stop_agent();
    joined.node.start_agent();
    joined.wait_ready("quiet");
    let mut main = busybox("main", FOREVER);
    main["resources"] = json!({"requests": {"memory": "1Mi"}});
    joined.bind(&pod("after", json!([main])));
    joined.wait_ready("after");
    let still = joined.shown("eater");
    assert_eq!(still["status"]["reason"], "Evicted");
    assert!(!joined.node.running_of_all().contains_key("eater"));
    joined.node.remove("static.json");
    joined.finish(&["quiet", "eater", "late", "after"]);
}

/// A soft threshold evicts only after its grace period, and the pod has its own time to end.
// Runtimes: containerd 2.
#[test]
fn soft_threshold_evicts_after_its_grace_period_with_time_to_end() {
    let mut config = json!({
        "evictionHard": {"memory.available": "10Mi"},
        // Soft thresholds are of the machine's memory.
        "enforceNodeAllocatable": [],
    });
    // The pod runs and has set its trap before there is a threshold.
    let mut joined = JoinedNode::start("evsoft", config.clone());
    let script = format!(
        "trap '{STAMP} >> /out/term; sleep 1; echo end; exit 3' TERM; echo x > /out/set; \
         while :; do sleep 0.1; done"
    );
    let mut main = busybox("main", &script);
    main["resources"] = json!({"requests": {"memory": "1Mi"}});
    let mut manifest = pod("soft", json!([main]));
    // Its container ends by itself, also on a busy machine.
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(300);
    joined.bind(&joined.node.with_out(manifest));
    joined.wait_ready("soft");
    wait_until("the trap to be set", LONG, || joined.node.out("set") == "x\n");
    joined.node.stop_agent();
    // Met from the beginning, whatever other tests take or free meanwhile.
    config["evictionSoft"] = json!({"memory.available": meminfo("MemTotal").to_string()});
    config["evictionSoftGracePeriod"] = json!({"memory.available": "10s"});
    config["evictionMaxPodGracePeriod"] = json!(240);
    joined.node.configure(config);
    let begun = moment();
    joined.node.start_agent();
    joined.wait_condition("MemoryPressure", "True");
    let evicted = joined.wait_pod("soft", "failed", |pod| pod["status"]["phase"] == "Failed");
    // Failed only after its container has ended.
    let state = &evicted["status"]["containerStatuses"][0]["state"];
    assert!(state["terminated"].is_object(), "{evicted}");
    assert!(message(&evicted).starts_with("The node was low on resource: memory. "), "{evicted}");
    let waited = joined.node.wait_stamp("term") - begun;
    assert!(waited >= 9.9, "evicted {waited} s after the start of the agent");
    // It was not killed: it had more than one second.
    assert_eq!(evicted["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"], 3);
    let log = joined.node.log();
    let line_of = |text: &str| log.lines().position(|line| line.contains(text));
    let reported = line_of("pressure conditions of the node: MemoryPressure");
    assert!(reported.is_some() && reported < line_of("evicting a pod: "), "{log}");
    joined.finish(&["soft"]);
}

/// Local storage: the limit of an emptyDir, of a container, and of a pod.
// Runtimes: containerd 1, containerd 2.
#[test]
fn pods_above_their_limits_of_local_storage_are_evicted() {
    let joined = JoinedNode::start("evlocal", json!({"volumeStatsAggPeriod": "1s"}));
    let write = |path: &str, mebibytes: u32| {
        format!("dd if=/dev/zero of={path}/file bs=1M count={mebibytes}; sleep 100000")
    };
    let dir = |name: &str, path: &str, mebibytes: u32, limit: Option<&str>| {
        let mut main = busybox("main", &write(path, mebibytes));
        main["volumeMounts"] = json!([{"name": "dir", "mountPath": "/dir"}]);
        let mut manifest = pod(name, json!([main]));
        manifest["spec"]["volumes"] = json!([{"name": "dir", "emptyDir": {"sizeLimit": limit}}]);
        manifest
    };
    // Without such pods, and with thresholds of which the kernel signals all, the thread of evictions
    // sleeps. Its first passes are 10 s apart.
    pause(Duration::from_secs(12));
    joined.bind(&dir("small", "/dir", 2, Some("8Mi")));
    joined.bind(&dir("large", "/dir", 20, Some("8Mi")));
    let mut layer = busybox("main", &write("/root", 20));
    layer["command"] = json!(["sh", "-c", format!("mkdir -p /root; {}", write("/root", 20))]);
    layer["resources"] = json!({"limits": {"ephemeral-storage": "8Mi"}});
    // The other container has no limit of its own size: the sum of the pod is large enough.
    let mut other = busybox("other", FOREVER);
    other["resources"] = json!({"limits": {"ephemeral-storage": "100Mi"}});
    joined.bind(&pod("layer", json!([layer, other])));
    let mut whole = dir("whole", "/dir", 20, None);
    whole["spec"]["containers"][0]["resources"] = json!({"limits": {"ephemeral-storage": "8Mi"}});
    joined.bind(&whole);
    for (name, text, signal) in [
        ("large", "Usage of EmptyDir volume \"dir\" exceeds the limit \"8Mi\". ", "emptydirfs.limit"),
        (
            "layer",
            "Container main exceeded its local ephemeral storage limit \"8Mi\". ",
            "ephemeralcontainerfs.limit",
        ),
        (
            "whole",
            "Pod ephemeral local storage usage exceeds the total limit of containers 8Mi. ",
            "ephemeralpodfs.limit",
        ),
    ] {
        let evicted = joined.wait_evicted(name);
        assert_eq!(message(&evicted), text);
        assert_eq!(disruption(&evicted), Value::Null, "only a shortage of the node disrupts");
        assert_eq!(joined.wait_event(name, "Evicted")["message"], text);
        assert_eq!(joined.node.metric(&format!("kubelet_evictions{{eviction_signal=\"{signal}\"}}")), 1.0);
    }
    joined.assert_runs("small");
    assert_eq!(joined.condition("DiskPressure")["status"], "False");
    joined.finish(&["small", "large", "layer", "whole"]);
}

/// A tmpfs as the root directory of a node, unmounted when it is dropped.
struct RootTmpfs(std::path::PathBuf);

impl RootTmpfs {
    fn mount(path: std::path::PathBuf, options: &str) -> RootTmpfs {
        fs::create_dir_all(&path).expect("a directory");
        let done = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&path).status();
        assert!(done.expect("mount is there").success());
        RootTmpfs(path)
    }
}

impl Drop for RootTmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// One pod fills the file system of the root directory with `script`; another one does not.
fn filled_disk(name: &str, options: &str, hard: &Value, script: &str) -> (JoinedNode, RootTmpfs, Value) {
    let mut joined = JoinedNode::prepare(name, json!({"evictionHard": hard}));
    let disk = RootTmpfs::mount(joined.node.root(), options);
    joined.node.start_agent();
    joined.wait_condition("Ready", "True");
    let dir = |name: &str, script: &str| {
        let mut main = busybox("main", script);
        main["volumeMounts"] = json!([{"name": "dir", "mountPath": "/dir"}]);
        let mut manifest = pod(name, json!([main]));
        manifest["spec"]["volumes"] = json!([{"name": "dir", "emptyDir": {}}]);
        manifest
    };
    joined.bind(&dir("modest", &format!("echo 1 > /dir/file; {FOREVER}")));
    joined.wait_ready("modest");
    joined.bind(&dir("filler", script));
    let evicted = joined.wait_evicted("filler");
    joined.wait_condition("DiskPressure", "True");
    joined.assert_runs("modest");
    assert!(disruption(&evicted)[0] == "True", "{evicted}");
    let pressure = joined.condition("DiskPressure");
    assert_eq!(pressure["reason"], "KubeletHasDiskPressure");
    joined.bind(&simple("late"));
    let refused = joined.wait_pod("late", "refused", |pod| pod["status"]["reason"] == "Evicted");
    assert_eq!(message(&refused), "Pod was rejected: The node had condition: [DiskPressure]. ");
    let status = joined.node.cli(&["status"]);
    assert!(status.contains("DiskPressure"), "{status}");
    (joined, disk, evicted)
}

// Runtimes: containerd 2.
#[test]
fn pod_that_fills_the_root_directory_is_evicted() {
    let (joined, disk, evicted) = filled_disk(
        "evdisk",
        "size=64m",
        &json!({"nodefs.available": "24Mi"}),
        "dd if=/dev/zero of=/dir/file bs=1M count=50; sleep 100000",
    );
    let text = message(&evicted);
    let start = "The node was low on resource: ephemeral-storage. Threshold quantity: 24Mi, available: ";
    assert!(text.starts_with(start), "{text}");
    joined.wait_event(NODE, "NodeHasDiskPressure");
    joined.finish(&["modest", "filler", "late"]);
    drop(disk);
}

// Runtimes: containerd 2.
#[test]
fn pod_that_takes_the_inodes_is_evicted() {
    let (joined, disk, evicted) = filled_disk(
        "evinod",
        "size=64m,nr_inodes=2000",
        &json!({"nodefs.inodesFree": "600"}),
        "i=0; while [ $i -lt 1600 ]; do : > /dir/$i; i=$((i+1)); done; sleep 100000",
    );
    let text = message(&evicted);
    let start = "The node was low on resource: inodes. Threshold quantity: 600, available: ";
    assert!(text.starts_with(start), "{text}");
    joined.finish(&["modest", "filler", "late"]);
    drop(disk);
}

// Runtimes: containerd 2.
#[test]
fn pod_with_many_processes_is_evicted_when_process_ids_are_short() {
    let read = |path: &str| fs::read_to_string(path).expect("a file of the kernel");
    let number = |path: &str| read(path).trim().parse::<u64>().expect("a number");
    let most = number("/proc/sys/kernel/pid_max").min(number("/proc/sys/kernel/threads-max"));
    let load = read("/proc/loadavg");
    let tasks: u64 =
        load.split(&[' ', '/'][..]).nth(4).and_then(|tasks| tasks.parse().ok()).expect("the number of tasks");
    // Other programs on the machine start and end: tests of hundreds of pods have 1,200 threads.
    let threshold = most - tasks - 1500;
    let joined =
        JoinedNode::start("evpids", json!({"evictionHard": {"pid.available": threshold.to_string()}}));
    joined.bind(&simple("modest"));
    joined.wait_ready("modest");
    let fork = "i=0; while [ $i -lt 3500 ]; do sleep 100000 & i=$((i+1)); done; wait";
    joined.bind(&pod("forks", json!([busybox("main", fork)])));
    let evicted = joined.wait_evicted("forks");
    let text = message(&evicted);
    assert!(text.starts_with("The node was low on resource: pids. Threshold quantity: "), "{text}");
    joined.wait_condition("PIDPressure", "True");
    joined.assert_runs("modest");
    joined.finish(&["modest", "forks"]);
}

/// The shortage of the whole machine's memory is signaled, too, and a static pod is never evicted.
// Runtimes: containerd 2.
#[test]
fn allocation_beyond_the_threshold_of_the_machine_is_noticed_without_polling() {
    // Other programs on the machine take and free memory.
    let threshold = available() - (1500 << 20);
    let hard = json!({"memory.available": threshold.to_string()});
    let mut config = json!({"evictionHard": hard, "cgroupsPerQOS": false, "enforceNodeAllocatable": []});
    config["cgroupRoot"] = Value::Null;
    let joined = JoinedNode::start("evmach", config);
    joined.node.apply("static.json", &simple("static"));
    joined.node.wait_ready("static");
    // Programs that have ended meanwhile have freed memory.
    let free = available().saturating_sub(threshold) >> 20;
    let mut main = eater(u32::try_from(free.min(2500)).expect("a small number") + 1500, "true");
    main["resources"] = json!({"requests": {"memory": "1Mi"}});
    joined.bind(&pod("eater", json!([main])));
    let evicted = joined.wait_evicted("eater");
    assert!(message(&evicted).starts_with("The node was low on resource: memory. "), "{evicted}");
    joined.node.wait_ready("static");
    joined.node.remove("static.json");
    joined.finish(&["eater"]);
}
