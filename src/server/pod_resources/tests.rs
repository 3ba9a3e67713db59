use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::*;
use crate::placement::cpus::CpuSet;

/// What the Go kubelet's state files have, and its answers (golden scenarios dp-static and dp-basic).
const RECORDED: &str = include_str!("recorded.json");

/// What the state files say that a container has.
fn recorded(state: &Value, pod: &Pod, container: &Container) -> AssignedResources {
    let (uid, name) = (pod.uid().as_str(), container.name.as_str());
    let mut assigned = AssignedResources::default();
    for entry in state["devices"]["PodDeviceEntries"].as_array().unwrap() {
        if entry["PodUID"] != uid || entry["ContainerName"] != name {
            continue;
        }
        for (node, ids) in entry["DeviceIDs"].as_object().unwrap() {
            for id in ids.as_array().unwrap() {
                assigned.devices.push(AssignedDevice {
                    resource: entry["ResourceName"].as_str().unwrap().to_owned(),
                    id: id.as_str().unwrap().into(),
                    nodes: NumaMask::from_numbers([node.parse().unwrap()]),
                });
            }
        }
    }
    if let Some(cpus) = state["cpus"][uid][name].as_str() {
        assigned.cpus = CpuSet::parse(cpus).unwrap();
    }
    for block in state["memory"][uid][name].as_array().into_iter().flatten() {
        let nodes = block["numaAffinity"].as_array().unwrap().iter();
        assigned.memory.push(Block {
            nodes: NumaMask::from_numbers(nodes.map(|node| u32::try_from(node.as_u64().unwrap()).unwrap())),
            resource: block["type"].as_str().unwrap().to_owned(),
            bytes: block["size"].as_u64().unwrap(),
        });
    }
    assigned
}

fn fill(to: &mut Map<String, Value>, name: &str, list: Vec<Value>) {
    if !list.is_empty() {
        to.insert(name.to_owned(), Value::Array(list));
    }
}

/// Messages as the recording shows them: as protobuf's JSON, but zeros are left out.
fn topology_json(topology: &pb::TopologyInfo) -> Value {
    let node =
        |node: &pb::NumaNode| if node.id == 0 { json!({}) } else { json!({"id": node.id.to_string()}) };
    json!({"nodes": topology.nodes.iter().map(node).collect::<Vec<_>>()})
}

fn devices_json(devices: &[pb::ContainerDevices]) -> Vec<Value> {
    let device_json = |device: &pb::ContainerDevices| {
        let mut shown = json!({"device_ids": device.device_ids, "resource_name": device.resource_name});
        if let Some(topology) = device.topology.as_ref() {
            shown["topology"] = topology_json(topology);
        }
        shown
    };
    devices.iter().map(device_json).collect()
}

fn memory_json(memory: &[pb::ContainerMemory]) -> Vec<Value> {
    let block_json = |block: &pb::ContainerMemory| {
        let topology = topology_json(block.topology.as_ref().unwrap());
        json!({"memory_type": block.memory_type, "size": block.size.to_string(), "topology": topology})
    };
    memory.iter().map(block_json).collect()
}

fn cpus_json(cpus: &[i64]) -> Vec<Value> {
    cpus.iter().map(|cpu| json!(cpu.to_string())).collect()
}

fn pod_json(pod: &pb::PodResources) -> Value {
    let container = |resources: &pb::ContainerResources| {
        let mut shown = Map::from_iter([("name".to_owned(), json!(resources.name))]);
        fill(&mut shown, "devices", devices_json(&resources.devices));
        fill(&mut shown, "cpu_ids", cpus_json(&resources.cpu_ids));
        fill(&mut shown, "memory", memory_json(&resources.memory));
        Value::Object(shown)
    };
    let containers: Vec<Value> = pod.containers.iter().map(container).collect();
    json!({"name": pod.name, "namespace": pod.namespace, "containers": containers})
}

/// Pods or containers by name: the Go kubelet lists pods in the order of a map, and the recording
/// has sorted the containers.
fn by_name<'a>(items: impl IntoIterator<Item = &'a Value>) -> BTreeMap<String, Value> {
    let item = |item: &Value| {
        let mut item = item.clone();
        if let Some(containers) = item.get("containers") {
            item["containers"] = json!(by_name(containers.as_array().unwrap()));
        }
        (item["name"].as_str().unwrap().to_owned(), item)
    };
    items.into_iter().map(item).collect()
}

fn pod(object: Value) -> Pod {
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

#[test]
fn responses_equal_those_of_the_go_kubelet() {
    let scenarios: Vec<Value> = serde_json::from_str(RECORDED).unwrap();
    assert_eq!(scenarios.len(), 3);
    for state in scenarios {
        let listed =
            |entry: &Value| NodePod { pod: pod(entry["pod"].clone()), is_active: entry["phase"] != "Failed" };
        let pods: Vec<NodePod> = state["pods"].as_array().unwrap().iter().map(listed).collect();
        let assigned = |pod: &Pod, container: &Container| recorded(&state, pod, container);
        for (request, response) in state["answers"].as_object().unwrap() {
            let what = format!("{}: {request}", state["scenario"]);
            match request.split_once(' ') {
                None if request == "List" => {
                    let own = list(&pods, &assigned, &nothing);
                    let own: Vec<Value> = own.pod_resources.iter().map(pod_json).collect();
                    let theirs = response["pod_resources"].as_array().unwrap();
                    assert_eq!(by_name(&own), by_name(theirs), "{what}");
                }
                None => {
                    let registered = state["devices"]["RegisteredDevices"].as_object().unwrap();
                    let devices = registered.iter().flat_map(|(resource, ids)| {
                        ids.as_array().unwrap().iter().map(|id| AssignedDevice {
                            resource: resource.clone(),
                            id: id.as_str().unwrap().into(),
                            nodes: NumaMask::from_numbers([0]),
                        })
                    });
                    let own = allocatable(AssignedResources {
                        devices: devices.collect(),
                        ..AssignedResources::default()
                    });
                    assert_eq!(json!(devices_json(&own.devices)), response["devices"], "{what}");
                }
                Some((_, name)) => {
                    let name = name.trim_start_matches('=');
                    let own = get(&pods, ("golden", name), &assigned, &nothing).as_ref().map(pod_json);
                    assert_eq!(by_name(&own), by_name(response.get("pod_resources")), "{what}");
                }
            }
        }
    }
}

/// A pod without resources as a whole.
fn nothing(_: &Pod) -> AssignedResources {
    AssignedResources::default()
}

#[test]
fn a_pod_shows_the_cpus_and_memory_that_it_has_as_a_whole() {
    let whole = |_: &Pod| AssignedResources {
        cpus: CpuSet::parse("2-4").unwrap(),
        memory: vec![Block {
            nodes: NumaMask::from_numbers([0, 1]),
            resource: "memory".to_owned(),
            bytes: 4096,
        }],
        ..AssignedResources::default()
    };
    let none = |_: &Pod, _: &Container| AssignedResources::default();
    let found = list(&listed(true), &none, &whole).pod_resources.remove(0);
    assert_eq!(get(&listed(true), ("n", "p"), &none, &whole).as_ref(), Some(&found));
    assert_eq!(found.cpu_ids, [2, 3, 4]);
    let topology = json!({"nodes": [{}, {"id": "1"}]});
    let expected = [json!({"memory_type": "memory", "size": "4096", "topology": topology})];
    assert_eq!(memory_json(&found.memory), expected);
    assert!(found.containers.iter().all(|own| own.cpu_ids.is_empty() && own.memory.is_empty()));
}

fn device(id: &str, nodes: &[u32]) -> AssignedDevice {
    AssignedDevice {
        resource: "example.com/gpu".into(),
        id: id.into(),
        nodes: NumaMask::from_numbers(nodes.iter().copied()),
    }
}

fn listed(is_active: bool) -> [NodePod; 1] {
    let object = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "c"}],
        },
    });
    [NodePod { pod: pod(object), is_active }]
}

#[test]
fn a_device_has_an_entry_for_each_of_its_nodes() {
    let assigned = |_: &Pod, _: &Container| AssignedResources {
        devices: vec![device("a", &[]), device("b", &[1, 3])],
        ..AssignedResources::default()
    };
    let found = list(&listed(true), &assigned, &nothing);
    let containers = &found.pod_resources[0].containers;
    assert_eq!(containers.iter().map(|container| container.name.as_str()).collect::<Vec<_>>(), ["s", "c"]);
    let shown = json!(devices_json(&containers[0].devices));
    let device_json = |id: &str| json!({"device_ids": [id], "resource_name": "example.com/gpu"});
    let near = |node: &str| {
        let mut shown = device_json("b");
        shown["topology"] = json!({"nodes": [{"id": node}]});
        shown
    };
    assert_eq!(shown, json!([device_json("a"), near("1"), near("3")]));
    // The older version has neither nodes nor sidecars.
    let old = list_v1alpha1(&listed(true), &assigned);
    let containers = &old.pod_resources[0].containers;
    assert_eq!(containers.len(), 1);
    assert_eq!(
        json!(devices_json(&containers[0].devices)),
        json!([device_json("a"), device_json("b"), device_json("b")])
    );
}

#[test]
fn the_devices_of_a_pod_that_has_ended_are_not_shown() {
    let assigned = |_: &Pod, _: &Container| AssignedResources {
        devices: vec![device("a", &[0])],
        ..AssignedResources::default()
    };
    assert!(list(&listed(false), &assigned, &nothing).pod_resources.is_empty());
    assert_eq!(get(&listed(false), ("n", "p"), &assigned, &nothing), None);
    let old = list_v1alpha1(&listed(false), &assigned);
    assert!(old.pod_resources[0].containers[0].devices.is_empty());
    assert!(get(&listed(true), ("n", "p"), &assigned, &nothing).is_some());
    assert_eq!(get(&listed(true), ("m", "p"), &assigned, &nothing), None);
}

#[test]
fn a_claim_has_its_devices_by_driver_with_their_own_cdi_devices() {
    let claim_device = |name: &str, cdi: &[&str], share: Option<&str>| Device {
        pool: "pool".into(),
        name: name.into(),
        share_id: share.map(str::to_owned),
        cdi_ids: cdi.iter().map(|id| (*id).to_owned()).collect(),
        ..Device::default()
    };
    let key = crate::claims::info::ClaimKey { namespace: "n".into(), name: "c".into() };
    let mut info = ClaimInfo::new(crate::claims::info::ClaimId { key, uid: "u".into() });
    let first = claim_device("one", &["d/c=1"], None);
    info.drivers.insert("d".into(), vec![first, claim_device("two", &["d/c=2", "d/c=3"], Some("s"))]);
    let shown = claim(info);
    assert_eq!((shown.claim_namespace.as_str(), shown.claim_name.as_str()), ("n", "c"));
    let resource_json = |resource: &pb::ClaimResource| {
        let cdi: Vec<&str> = resource.cdi_devices.iter().map(|device| device.name.as_str()).collect();
        json!([resource.driver_name, resource.pool_name, resource.device_name, resource.share_id, cdi])
    };
    assert_eq!(
        json!(shown.claim_resources.iter().map(resource_json).collect::<Vec<_>>()),
        json!([["d", "pool", "one", null, ["d/c=1"]], ["d", "pool", "two", "s", ["d/c=2", "d/c=3"]]])
    );
}
