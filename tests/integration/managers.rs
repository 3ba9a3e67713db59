//! CPU, memory and topology managers, with the whole agent on the fake runtime.

use std::fs;
use std::time::Duration;

use coracle::model::api::Pod;
use coracle::placement::cpus::CpuSet;
use serde_json::{Value, json};

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, busybox, pod, simple};
use crate::support::wait::{holds_for, wait_until};

/// The configuration of the recordings, with one CPU reserved.
fn config() -> Value {
    json!({
        "cpuManagerPolicy": "static",
        "cpuManagerReconcilePeriod": "2s",
        "evictionHard": {"memory.available": "100Mi"},
        "kubeReserved": {"cpu": "500m", "memory": "300Mi"},
        "memoryManagerPolicy": "Static",
        "reservedMemory": [{"limits": {"memory": "400Mi"}, "numaNode": 0}],
        "topologyManagerPolicy": "single-numa-node",
    })
}

/// A Guaranteed pod with a container per number of CPUs.
fn guaranteed(name: &str, uid: &str, cpus: &[&str]) -> Value {
    let container = |(index, cpus): (usize, &&str)| {
        let mut container = busybox(&format!("c{index}"), FOREVER);
        container["resources"] = json!({"limits": {"cpu": cpus, "memory": "128Mi"}});
        container
    };
    let containers: Vec<Value> = cpus.iter().enumerate().map(container).collect();
    let mut manifest = pod(name, json!(containers));
    manifest["metadata"]["uid"] = json!(uid);
    manifest
}

const UID: &str = "cf49803e-63f8-4e63-bc80-98c54bd89d72";

fn state(node: &FakeNode, file: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(node.root().join(file)).unwrap()).unwrap()
}

/// The machine's CPUs.
fn online() -> CpuSet {
    let text = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    CpuSet::parse(text.trim()).unwrap()
}

/// The CPUs of a running container.
fn cpus(node: &FakeNode, pod: &str, container: &str) -> Option<CpuSet> {
    let all = node.containers(pod);
    let found = all.iter().find(|found| found.is_running() && found.config.metadata.name == container)?;
    Some(CpuSet::parse(&found.status.resources.linux.cpuset_cpus).unwrap())
}

/// The fields `cpuset_cpus` of all updates of a pod's containers, in order.
fn updates(node: &FakeNode, pod: &str) -> Vec<String> {
    let ids: Vec<String> = node.containers(pod).into_iter().map(|container| container.status.id).collect();
    let journal = node.fake.journal().into_iter().filter(|entry| entry.method == "UpdateContainerResources");
    journal
        .filter(|entry| ids.iter().any(|id| entry.request["container_id"] == id.as_str()))
        .map(|entry| entry.request["linux"]["cpuset_cpus"].as_str().unwrap().to_owned())
        .collect()
}

fn reason(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.reason.as_deref()
}

/// The recorded content of a state file.
fn recorded(scenario: &str, dump: &str, file: &str) -> Value {
    let path = format!("{}/tests/golden/resources/expected/{scenario}.json", env!("CARGO_MANIFEST_DIR"));
    let all: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let steps = all["steps"].as_array().unwrap();
    steps.iter().find(|step| step["dump"] == dump).unwrap()["state_files"][file].clone()
}

#[test]
fn shared_container_loses_a_cpu_that_becomes_exclusive_and_gets_it_back() {
    let node = FakeNode::start_with(config());
    let all = online();
    assert_eq!(state(&node, "cpu_manager_state")["defaultCpuSet"], all.to_string());
    node.apply(&simple("be"));
    node.wait_ready("be");
    assert_eq!(cpus(&node, "be", "main"), Some(all.clone()));
    node.apply(&guaranteed("gu", UID, &["1", "500m"]));
    node.wait_ready("gu");
    let own = cpus(&node, "gu", "c0").unwrap();
    let rest = all.difference(&own);
    assert_eq!(own.len(), 1);
    wait_until("the CPU to be gone", LONG, || cpus(&node, "be", "main").as_ref() == Some(&rest));
    assert_eq!(cpus(&node, "gu", "c1"), Some(rest.clone()));
    let file = state(&node, "cpu_manager_state");
    assert_eq!(file["entries"], json!({UID: {"c0": own.to_string()}}));
    assert_eq!(file["defaultCpuSet"], rest.to_string());
    // The requests to the runtime: only the container with its own CPU has no quota, and the pod.
    let containers = node.containers("gu");
    let sent = |name: &str| {
        let container = containers.iter().find(|container| container.config.metadata.name == name).unwrap();
        let linux = &container.config.linux.resources;
        (linux.cpu_quota, linux.cpuset_cpus.clone(), linux.cpuset_mems.clone())
    };
    assert_eq!(sent("c0"), (-1, own.to_string(), "0".to_owned()));
    assert_eq!(sent("c1"), (50_000, rest.to_string(), "0".to_owned()));
    assert_eq!(node.sandboxes("gu")[0].config.linux.resources.cpu_quota, -1);
    assert_eq!(node.metric("kubelet_cpu_manager_exclusive_cpu_allocation_count"), 1.0);
    let described = node.cli(&["describe", "gu"]);
    assert!(described.contains(&format!("c0: CPUs {own}, NUMA nodes 0")), "{described}");
    // Too much: refused with upstream's reason.
    node.apply(&guaranteed("more", "more-uid", &[&all.len().to_string()]));
    let refused = node.wait_pod("more", "refused", LONG, |pod| reason(pod).is_some());
    assert_eq!(reason(&refused), Some("TopologyAffinityError"));
    assert_eq!(
        refused.status.unwrap().message.unwrap(),
        "Pod was rejected: Resources cannot be allocated with Topology locality"
    );
    node.remove("gu");
    node.wait_gone("gu", LONG);
    wait_until("the CPU to be back", LONG, || cpus(&node, "be", "main").as_ref() == Some(&all));
    assert_eq!(updates(&node, "be"), [rest.to_string(), all.to_string()]);
    assert!(state(&node, "cpu_manager_state").get("entries").is_none());
    node.remove("more");
    node.finish();
}

#[test]
fn pod_with_resources_as_a_whole_has_cpus_for_itself_and_is_counted_only_with_the_gate() {
    let mut with_gate = config();
    with_gate["featureGates"] = json!({"PodLevelResourceManagers": true});
    with_gate["topologyManagerScope"] = json!("pod");
    for (config, gate) in [(with_gate, true), (config(), false)] {
        let node = FakeNode::start_with(config);
        let mut manifest = pod("whole", json!([busybox("c0", FOREVER), busybox("c1", FOREVER)]));
        manifest["metadata"]["uid"] = json!(UID);
        let amounts = json!({"cpu": "1", "memory": "256Mi"});
        manifest["spec"]["resources"] = json!({"requests": amounts, "limits": amounts});
        node.apply(&manifest);
        node.wait_ready("whole");
        let own = cpus(&node, "whole", "c0").unwrap();
        assert_eq!(cpus(&node, "whole", "c1").as_ref(), Some(&own), "they share them");
        let data = |file: &str| -> Value {
            serde_json::from_str(state(&node, file)["data"].as_str().unwrap()).unwrap()
        };
        let (found, memory) = (data("cpu_manager_state"), data("memory_manager_state"));
        let shared = "kubelet_resource_manager_container_assignments_total{assignment_type=\"pod_shared\",resource_name=\"cpu\"}";
        if gate {
            assert_eq!(own.len(), 1);
            assert_eq!(found["podEntries"], json!({UID: {"cpuSet": own.to_string()}}));
            assert_eq!(memory["podEntries"][UID]["memoryBlocks"][0]["size"], 256 << 20);
            assert_eq!(node.metric(shared), 2.0);
        } else {
            assert_eq!(own, online());
            assert!(found.get("podEntries").is_none() && memory.get("podEntries").is_none());
        }
        node.remove("whole");
        node.wait_gone("whole", LONG);
        wait_until("the CPUs to be free", LONG, || data("cpu_manager_state").get("entries").is_none());
        if !gate {
            node.apply(&guaranteed("gu", "gu-uid", &["1"]));
            node.wait_ready("gu");
            assert!(!node.metrics().contains("resource_manager_"));
            node.remove("gu");
            node.wait_gone("gu", LONG);
        }
        node.finish();
    }
}

#[test]
fn state_files_equal_the_recordings() {
    let node = FakeNode::start_with(config());
    let mut manifest = guaranteed("gu-one", UID, &["1"]);
    manifest["spec"]["containers"][0]["name"] = json!("main");
    let check = |dump: &str| {
        // The recordings are of a machine with two CPUs.
        if online().to_string() == "0-1" {
            let mut file = state(&node, "cpu_manager_state");
            // The recordings are of 1.36.
            file.as_object_mut().unwrap().retain(|name, _| name != "data" && name != "dataChecksum");
            assert_eq!(file, recorded("g-restart", dump, "cpu_manager_state"));
        }
        let file = state(&node, "memory_manager_state");
        let expected = recorded("g-restart", dump, "memory_manager_state");
        assert_eq!(file["entries"], expected["entries"]);
        assert_eq!(file["policyName"], expected["policyName"]);
        let (node, expected) = (&file["machineState"]["0"], &expected["machineState"]["0"]);
        for field in ["systemReserved", "reserved"] {
            assert_eq!(node["memoryMap"]["memory"][field], expected["memoryMap"]["memory"][field]);
        }
        assert_eq!(node["numberOfAssignments"], expected["numberOfAssignments"]);
    };
    node.apply(&manifest);
    node.wait_ready("gu-one");
    check("before");
    node.remove("gu-one");
    node.finish();
}

#[test]
fn policies_none_write_the_files_of_upstream_and_no_sets() {
    let node = FakeNode::start();
    let read = |file: &str| fs::read_to_string(node.root().join(file)).unwrap();
    assert_eq!(
        read("cpu_manager_state"),
        r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690,"data":"{\"policyName\":\"none\",\"defaultCpuSet\":\"\"}","dataChecksum":3028111495}"#
    );
    assert_eq!(
        read("memory_manager_state"),
        r#"{"policyName":"None","machineState":{},"checksum":4236770233,"data":"{\"policyName\":\"None\",\"machineState\":{}}","dataChecksum":3093843326}"#
    );
    node.apply(&guaranteed("gu", UID, &["1"]));
    node.wait_ready("gu");
    let linux = node.containers("gu")[0].config.linux.resources.clone();
    assert_eq!((linux.cpuset_cpus.as_str(), linux.cpuset_mems.as_str(), linux.cpu_quota), ("", "", 100_000));
    assert!(!node.cli(&["status", "-o", "json"]).contains("\"managers\""), "no thread");
    node.finish();
}

#[test]
fn restart_keeps_cpus_and_a_damaged_file_is_rebuilt_from_what_runs() {
    let mut node = FakeNode::start_with(config());
    node.apply(&guaranteed("gu", UID, &["1"]));
    node.wait_ready("gu");
    node.apply(&simple("be"));
    node.wait_ready("be");
    let (own, rest) = (cpus(&node, "gu", "c0"), cpus(&node, "be", "main"));
    let files = ["cpu_manager_state", "memory_manager_state"];
    let before = files.map(|file| state(&node, file));
    let ids = || [node.running("gu"), node.running("be")];
    let running = ids();
    for damage in [None, Some("{}"), Some("not json"), Some(r#"{"policyName":"none","defaultCpuSet":""}"#)] {
        node.kill_agent();
        if let Some(text) = damage {
            files.iter().for_each(|file| fs::write(node.root().join(file), text).unwrap());
        }
        node.fake.clear_journal();
        node.start_agent();
        node.wait_ready("gu");
        node.wait_ready("be");
        wait_until("the pods to be admitted again", LONG, || files.map(|file| state(&node, file)) == before);
        let calls = |node: &FakeNode| {
            let changing = ["UpdateContainerResources", "StopContainer", "CreateContainer"];
            node.fake.journal().iter().any(|entry| changing.contains(&entry.method))
        };
        holds_for("no container changes", Duration::from_millis(500), || !calls(&node));
        assert_eq!([node.running("gu"), node.running("be")], running);
        assert_eq!((cpus(&node, "gu", "c0"), cpus(&node, "be", "main")), (own.clone(), rest.clone()));
        let status = node.command(&["status"]);
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        assert_eq!(status.contains("cpu_manager_state cannot be used"), damage.is_some(), "{status}");
        if let Some(text) = damage {
            for file in files {
                let unusable = node.root().join(format!("{file}.unusable"));
                assert_eq!(fs::read_to_string(unusable).unwrap(), text);
            }
            wait_until("the event", LONG, || node.cli(&["events"]).contains("UnusableStateFile"));
        }
    }
    // The CPUs of a pod that was removed meanwhile are free.
    node.kill_agent();
    node.remove("gu");
    node.start_agent();
    wait_until("the CPU to be shared", LONG, || cpus(&node, "be", "main") == Some(online()));
    assert!(state(&node, "cpu_manager_state").get("entries").is_none());
    node.finish();
}

#[test]
fn cpus_of_a_pod_that_went_while_the_machine_was_off_are_free_after_the_start() {
    let mut node = FakeNode::start_with(config());
    node.apply(&guaranteed("gu", UID, &["1"]));
    node.apply(&simple("be"));
    node.wait_ready("gu");
    node.wait_ready("be");
    node.kill_agent();
    node.remove("gu");
    // After a reboot the runtime has none of its containers, so no worker ends.
    node.fake.with_state(|state| {
        state.containers.clear();
        state.sandboxes.clear();
    });
    node.start_agent();
    node.wait_ready("be");
    wait_until("the CPU to be free", LONG, || state(&node, "cpu_manager_state").get("entries").is_none());
    wait_until("the CPU to be shared", LONG, || cpus(&node, "be", "main") == Some(online()));
    node.finish();
}

#[test]
fn configuration_that_does_not_fit_ends_the_agent_with_the_text_of_upstream() {
    let mut wrong_memory = config();
    wrong_memory["reservedMemory"][0]["limits"]["memory"] = json!("123Mi");
    for (config, text) in [
        (
            json!({"cpuManagerPolicy": "static"}),
            "[cpumanager] unable to determine reserved CPU resources for static policy",
        ),
        (
            wrong_memory,
            "the total amount \"123Mi\" of type \"memory\" is not equal to the value \"400Mi\" determined by \
             Node Allocatable feature",
        ),
    ] {
        let mut node = FakeNode::prepare(config);
        node.launch_agent();
        assert!(!node.wait_end().success());
        assert!(node.log().contains(text), "{}", node.log());
    }
}

#[test]
fn damaged_state_files_of_all_managers_are_in_the_status_until_their_copies_are_removed() {
    let mut node = FakeNode::start();
    node.stop_agent();
    let files = [
        "allocated_pods_state",
        "actuated_pods_state",
        "cpu_manager_state",
        "memory_manager_state",
        "dra_manager_state",
        "dra_health_state",
        "device-plugins/kubelet_internal_checkpoint",
    ];
    for file in files {
        fs::write(node.root().join(file), "{").unwrap();
    }
    let unusable_file = |node: &FakeNode, file: &str| node.root().join(format!("{file}.unusable"));
    let status = |node: &FakeNode| {
        let output = node.command(&["status"]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    node.start_agent();
    for file in files {
        let place = node.root().join(file).display().to_string();
        // Events are collected by another thread.
        wait_until(&format!("the event about {file}"), LONG, || {
            let events = node.cli(&["events"]);
            events.contains("UnusableStateFile") && events.contains(&place)
        });
        let unusable = unusable_file(&node, file);
        assert_eq!(fs::read_to_string(&unusable).unwrap(), "{");
        assert!(status(&node).contains(unusable.to_str().unwrap()), "{file}: {}", status(&node));
        assert!(node.log().contains(&place), "{file}");
    }
    for _ in 0..2 {
        node.stop_agent();
        node.start_agent();
        for file in files {
            let shown = status(&node);
            assert!(shown.contains(unusable_file(&node, file).to_str().unwrap()), "{file}: {shown}");
        }
    }
    for file in files {
        fs::remove_file(unusable_file(&node, file)).unwrap();
    }
    assert!(!status(&node).contains("unusable"), "{}", status(&node));
    node.finish();
}
