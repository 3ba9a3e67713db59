use std::collections::BTreeMap;

use super::*;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::model::requests::Amounts;
use crate::placement::numa::{Hint, NumaMask};
use crate::placement::numa_nodes::NumaNode;
use crate::placement::topology::{AllocateError, Candidate, Hints, Provider};
use proptest::prelude::*;
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

/// Nodes of 4 GiB, the first with 1 GiB reserved and each with 1 GiB of huge pages.
fn machine(count: u32) -> (Vec<NumaNode>, Reserved) {
    let node = |number| NumaNode {
        number,
        memory_bytes: 4 * GIB,
        huge_pages: BTreeMap::from([(2 << 20, 512), (GIB, 0)]),
        distances: None,
    };
    let machine: Vec<NumaNode> = (0..count).map(node).collect();
    let amounts = amounts(&[("memory", "1Gi")]);
    let reserved = Reserved::new(&machine, &[(0, amounts.clone())], &amounts).unwrap();
    (machine, reserved)
}

fn amounts(list: &[(&str, &str)]) -> Amounts {
    list.iter().map(|(name, text)| ((*name).to_owned(), Amount::parse(text).unwrap())).collect()
}

fn memory(count: u32) -> Memory {
    let (machine, reserved) = machine(count);
    Memory::new(&machine, &reserved)
}

fn container(name: &str, memory: &str) -> Value {
    json!({"name": name, "resources": {"limits": {"cpu": "1", "memory": memory}}})
}

fn pod_of(uid: &str, spec: Value) -> Pod {
    let object = json!({"metadata": {"uid": uid}, "spec": spec});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

fn pod(uid: &str, containers: Vec<Value>) -> Pod {
    pod_of(uid, json!({"containers": containers}))
}

const ANY: Hint = Hint { nodes: None, preferred: false };

fn mask(nodes: &[u32]) -> NumaMask {
    NumaMask::from_numbers(nodes.iter().copied())
}

fn hint(nodes: &[u32], preferred: bool) -> Hint {
    Hint { nodes: Some(mask(nodes)), preferred }
}

fn allocate(memory: &mut Memory, pod: &Pod, hint: Hint) -> Result<(), String> {
    let candidate = Candidate::new(pod);
    for container in pod.all_containers() {
        memory.allocate(candidate, container, hint).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn free(memory: &Memory) -> Vec<u64> {
    memory.nodes().values().map(|node| node.tables["memory"].free).collect()
}

#[test]
fn tables_of_an_empty_machine() {
    let memory = memory(2);
    let first = memory.nodes()[&0].tables["memory"];
    let expected =
        Table { total: 4 * GIB, system_reserved: GIB, allocatable: 2 * GIB, reserved: 0, free: 2 * GIB };
    assert_eq!(first, expected);
    assert_eq!(free(&memory), [2 * GIB, 3 * GIB]);
    let allocatable: Vec<(u64, String, u64)> =
        memory.allocatable().into_iter().map(|block| (block.nodes.0, block.resource, block.bytes)).collect();
    let block = |nodes, resource: &str, gib| (nodes, resource.to_owned(), gib * GIB);
    assert_eq!(
        allocatable,
        [
            block(1, "hugepages-2Mi", 1),
            block(1, "memory", 2),
            block(2, "hugepages-2Mi", 1),
            block(2, "memory", 3)
        ]
    );
}

#[test]
fn a_reservation_must_be_that_of_the_node() {
    let (machine, _) = machine(2);
    let check = |configured: &[(i64, Amounts)], expected: Amounts, error: &str| {
        let found = Reserved::new(&machine, configured, &expected).unwrap_err();
        assert_eq!(found.to_string(), error);
    };
    let gibibyte = amounts(&[("memory", "1Gi")]);
    check(
        &[(2, gibibyte.clone())],
        gibibyte.clone(),
        "the reserved memory configuration references a NUMA node 2 that does not exist on this machine",
    );
    check(
        &[(0, amounts(&[("memory", "123Mi")]))],
        amounts(&[("memory", "400Mi"), ("cpu", "1")]),
        "the total amount \"123Mi\" of type \"memory\" is not equal to the value \"400Mi\" determined by Node \
         Allocatable feature",
    );
    check(
        &[(0, gibibyte.clone()), (1, amounts(&[("hugepages-2Mi", "2Mi")]))],
        gibibyte.clone(),
        "the total amount \"2Mi\" of type \"hugepages-2Mi\" is not equal to the value \"0\" determined by Node \
         Allocatable feature",
    );
    check(&[], Amounts::new(), "[memorymanager] you should specify the system reserved memory");
    let both = [(0, amounts(&[("memory", "1Gi")])), (1, amounts(&[("memory", "1Gi")]))];
    assert!(Reserved::new(&machine, &both, &amounts(&[("memory", "2Gi")])).is_ok());
    let fraction = amounts(&[("memory", "1500m")]);
    let error = Reserved::new(&machine, &[(0, fraction.clone())], &fraction).unwrap_err();
    assert!(matches!(error, ReservedError::NotBytes { node: 0, .. }));
}

#[test]
fn hints_prefer_the_fewest_nodes_that_an_empty_machine_needs() {
    let mut memory = memory(2);
    let small = pod("a", vec![container("c", "1Gi")]);
    let hints = |memory: &Memory, pod: &Pod| memory.hints(Candidate::new(pod), &pod.containers()[0]);
    let list = |hints: Vec<Hint>| Hints::from([("memory".to_owned(), hints)]);
    let expected = list(vec![hint(&[0], true), hint(&[1], true), hint(&[0, 1], false)]);
    assert_eq!(hints(&memory, &small), expected);
    let large = pod("b", vec![container("c", "5Gi")]);
    assert_eq!(hints(&memory, &large), list(vec![hint(&[0, 1], true)]));
    let too_large = pod("b", vec![container("c", "6Gi")]);
    assert_eq!(hints(&memory, &too_large), Hints::new());
    // A node with an allocation of its own is in no group.
    allocate(&mut memory, &small, ANY).unwrap();
    assert_eq!(hints(&memory, &large), Hints::new());
    assert_eq!(hints(&memory, &small), list(vec![hint(&[0], true)]));
    // Not Guaranteed, or with resources of the pod: no preference.
    let burstable = pod("c", vec![json!({"name": "c", "resources": {"requests": {"memory": "1Gi"}}})]);
    assert_eq!(hints(&memory, &burstable), Hints::new());
    let spec = json!({
        "containers": [container("c", "1Gi")],
        "resources": {"limits": {"cpu": "2", "memory": "2Gi"}},
    });
    let whole = pod_of("d", spec);
    assert_eq!(hints(&memory, &whole), Hints::new());
    assert_eq!(memory.pod_hints(Candidate::new(&whole)), Hints::new());
    allocate(&mut memory, &whole, ANY).unwrap();
    assert_eq!(memory.cpuset_mems(whole.uid(), "c"), None);
}

#[test]
fn a_group_of_nodes_is_used_as_a_whole_until_it_is_empty() {
    let mut memory = memory(4);
    let large = pod("a", vec![container("c", "4Gi")]);
    allocate(&mut memory, &large, ANY).unwrap();
    assert_eq!(memory.cpuset_mems(large.uid(), "c"), Some(mask(&[0, 1])));
    assert_eq!(free(&memory), [0, GIB, 3 * GIB, 3 * GIB]);
    assert!(memory.nodes()[&1].cells == mask(&[0, 1]) && memory.nodes()[&1].assignments == 1);
    // A small one goes to the next node, and a group may not overlap another.
    let small = pod("b", vec![container("c", "1Gi")]);
    allocate(&mut memory, &small, ANY).unwrap();
    assert_eq!(memory.cpuset_mems(small.uid(), "c"), Some(mask(&[2])));
    let other = pod("c", vec![container("c", "4Gi")]);
    let error = allocate(&mut memory, &other, hint(&[1, 3], true)).unwrap_err();
    assert_eq!(error, "[memorymanager] preferred hint violates NUMA node allocation");
    memory.release(large.uid(), "c");
    assert_eq!(free(&memory), [2 * GIB, 3 * GIB, 2 * GIB, 3 * GIB]);
    assert_eq!(memory.nodes()[&1].cells, mask(&[1]));
    allocate(&mut memory, &other, hint(&[1, 3], true)).unwrap();
    assert_eq!(free(&memory), [2 * GIB, 0, 2 * GIB, 2 * GIB]);
}

#[test]
fn a_hint_that_is_too_small_is_extended() {
    let mut memory = memory(4);
    let large = pod("a", vec![container("c", "5Gi")]);
    allocate(&mut memory, &large, hint(&[3], false)).unwrap();
    assert_eq!(memory.cpuset_mems(large.uid(), "c"), Some(mask(&[0, 3])));
    let larger = pod("b", vec![container("c", "6Gi")]);
    let error = allocate(&mut memory, &larger, hint(&[3], true)).unwrap_err();
    assert_eq!(error, "[memorymanager] failed to find NUMA nodes to extend the current topology hint");
    let error = allocate(&mut memory, &pod("c", vec![container("c", "60Gi")]), ANY).unwrap_err();
    assert_eq!(
        error,
        "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available"
    );
    let error = allocate(&mut memory, &pod("c", vec![container("c", "1.5")]), ANY).unwrap_err();
    assert_eq!(error, "[memorymanager] failed to represent quantity as int64");
}

#[test]
fn later_containers_use_the_memory_of_init_containers() {
    let mut memory = memory(1);
    let mut sidecar = container("s", "512Mi");
    sidecar["restartPolicy"] = "Always".into();
    let spec = json!({
        "initContainers": [container("i", "1Gi"), sidecar, container("j", "512Mi")],
        "containers": [container("a", "512Mi"), container("b", "512Mi")],
    });
    let pod = pod_of("p", spec);
    let peak = Hints::from([("memory".to_owned(), vec![hint(&[0], true)])]);
    assert_eq!(memory.pod_hints(Candidate::new(&pod)), peak);
    allocate(&mut memory, &pod, ANY).unwrap();
    // i's 1 GiB is used by s and j, then j's by a; b is new.
    let bytes = |memory: &Memory| -> Vec<u64> {
        let blocks = pod.all_containers().map(|container| memory.blocks(pod.uid(), &container.name));
        blocks.map(|blocks| blocks.iter().map(|block| block.bytes >> 20).sum()).collect()
    };
    let sum: u64 = bytes(&memory).iter().sum();
    assert_eq!(free(&memory), [2 * GIB - (sum << 20)]);
    assert_eq!(bytes(&memory).iter().skip(3).copied().collect::<Vec<_>>(), [512, 512]);
    // Allocating again changes nothing.
    let before = memory.nodes().clone();
    memory.take_changed();
    allocate(&mut memory, &pod, ANY).unwrap();
    assert!(*memory.nodes() == before && !memory.take_changed());
    memory.release_ended_init_containers(&pod, "s");
    assert!(memory.blocks(pod.uid(), "i").is_empty() && !memory.blocks(pod.uid(), "s").is_empty());
    memory.release_ended_init_containers(&pod, "b");
    assert!(memory.blocks(pod.uid(), "j").is_empty() && !memory.blocks(pod.uid(), "s").is_empty());
    memory.release_inactive([&pod], &|_| false);
    assert_eq!(memory.assignments().len(), 1);
    memory.release_inactive([], &|_| true);
    assert_eq!(memory.assignments().len(), 1, "its containers still end");
    memory.release_inactive([], &|_| false);
    assert!(memory.assignments().is_empty() && memory.take_changed());
    assert_eq!(free(&memory), [2 * GIB]);
}

#[test]
fn huge_pages_are_allocated_with_the_memory() {
    let mut memory = memory(2);
    let with = |uid: &str, pages: &str| {
        let limits = json!({"cpu": "1", "memory": "1Gi", "hugepages-2Mi": pages});
        pod(uid, vec![json!({"name": "c", "resources": {"limits": limits}})])
    };
    let first = with("a", "1Gi");
    allocate(&mut memory, &first, ANY).unwrap();
    let names: Vec<&str> =
        memory.blocks(first.uid(), "c").iter().map(|block| block.resource.as_str()).collect();
    assert_eq!(names, ["hugepages-2Mi", "memory"]);
    assert_eq!(memory.nodes()[&0].assignments, 2);
    let second = with("b", "2Mi");
    allocate(&mut memory, &second, ANY).unwrap();
    assert_eq!(memory.cpuset_mems(second.uid(), "c"), Some(mask(&[1])));
    assert!(allocate(&mut memory, &with("c", "2Gi"), ANY).is_err());
    // A size that the machine does not have.
    let limits = json!({"cpu": "1", "memory": "1Gi", "hugepages-64Ki": "64Ki"});
    let odd = pod("d", vec![json!({"name": "c", "resources": {"limits": limits}})]);
    assert_eq!(memory.hints(Candidate::new(&odd), &odd.containers()[0]), Hints::new());
    assert!(allocate(&mut memory, &odd, ANY).is_err());
    assert!(allocate(&mut memory, &odd, hint(&[0], true)).is_err());
}

#[test]
fn a_state_file_is_restored() {
    let (machine, reserved) = machine(2);
    let mut memory = Memory::new(&machine, &reserved);
    allocate(&mut memory, &pod("a", vec![container("c", "4Gi"), container("d", "1Mi")]), ANY).unwrap();
    allocate(&mut memory, &pod("b", vec![container("c", "1Mi")]), hint(&[0, 1], true)).unwrap();
    let text = memory.state_file();
    assert!(
        text.starts_with(r#"{"policyName":"Static","machineState":{"0":{"numberOfAssignments":3,"#),
        "{text}"
    );
    let restored = Memory::restore(&machine, &reserved, &text).unwrap();
    assert_eq!((restored.nodes(), restored.assignments()), (memory.nodes(), memory.assignments()));
    assert_eq!(restored.state_file(), text);
    // Upstream writes this at its very first start.
    let empty = r#"{"policyName":"Static","machineState":{},"checksum":0}"#;
    assert_eq!(Memory::restore(&machine, &reserved, empty), Ok(Memory::new(&machine, &reserved)));
    assert_eq!(check_none(NONE_STATE), Ok(()));
}

#[test]
fn recorded_state_files_are_restored_and_written_byte_by_byte() {
    const RECORDED: &str = include_str!("../../../tests/golden/resources/checksums.json");
    let recorded: Value = serde_json::from_str(RECORDED).unwrap();
    let files = recorded["vectors"].as_array().unwrap().iter();
    let files: Vec<&str> = files
        .filter(|vector| vector["file"] == "memory_manager_state")
        .map(|vector| vector["content"].as_str().unwrap())
        .collect();
    assert!(files.len() >= 3);
    let node = NumaNode {
        number: 0,
        memory_bytes: 12_308_393_984,
        huge_pages: BTreeMap::from([(2 << 20, 0), (GIB, 0)]),
        distances: None,
    };
    let amounts = amounts(&[("memory", "400Mi")]);
    let reserved = Reserved::new(std::slice::from_ref(&node), &[(0, amounts.clone())], &amounts).unwrap();
    for file in files {
        if file == without_data(NONE_STATE) {
            assert_eq!(check_none(file), Ok(()));
            continue;
        }
        let memory = Memory::restore(std::slice::from_ref(&node), &reserved, file).unwrap();
        let written = memory.state_file();
        assert_eq!(without_data(&written), file);
        assert_eq!(Memory::restore(std::slice::from_ref(&node), &reserved, &written), Ok(memory));
    }
}

/// The fields that Go kubelets before 1.37 read.
fn without_data(text: &str) -> String {
    let (older, _) = text.split_once(",\"data\":").unwrap();
    format!("{older}}}")
}

#[test]
fn wrong_data_is_an_error_although_the_older_fields_are_right() {
    let (machine, reserved) = machine(2);
    let mut memory = Memory::new(&machine, &reserved);
    allocate(&mut memory, &pod("a<b", vec![container("c", "1Gi")]), ANY).unwrap();
    let text = memory.state_file();
    assert!(text.contains("a\\u003cb") && !text.contains('<'), "{text}");
    memory.take_changed();
    let restore = |text: &str| Memory::restore(&machine, &reserved, text);
    let parts = |found: &Memory| (found.nodes().clone(), found.assignments().clone());
    assert_eq!(restore(&text).map(|found| parts(&found)), Ok(parts(&memory)));
    assert_eq!(restore(&without_data(&text)).map(|found| parts(&found)), Ok(parts(&memory)));
    let (older, _) = text.split_once(",\"data\":").unwrap();
    for rest in [r#","data":"{}","dataChecksum":1}"#, r#","data":"","dataChecksum":1}"#] {
        assert_eq!(restore(&format!("{older}{rest}")), Err(StateError::Checksum), "{rest}");
    }
    // Its checksum is right, and it is not JSON.
    let wrong = restore(&format!(r#"{older},"data":"abc","dataChecksum":2241406447}}"#));
    assert!(matches!(wrong, Err(StateError::Content { .. })), "{wrong:?}");
}

/// A pod with 2 GiB as a whole.
fn whole_pod(uid: &str, init: Vec<Value>, containers: Vec<Value>) -> Pod {
    let limits = json!({"cpu": "2", "memory": "2Gi"});
    let whole = json!({"limits": limits, "requests": limits});
    pod_of(uid, json!({"resources": whole, "initContainers": init, "containers": containers}))
}

#[test]
fn pod_as_a_whole_gets_memory_that_its_containers_divide() {
    let (machine, reserved) = machine(2);
    let mut memory = Memory::new(&machine, &reserved);
    let mut sidecar = container("s", "512Mi");
    sidecar["restartPolicy"] = "Always".into();
    let init = vec![json!({"name": "i"}), sidecar, json!({"name": "j"}), container("k", "1Gi")];
    let pod = whole_pod("p", init, vec![container("a", "1Gi"), json!({"name": "b"}), json!({"name": "c"})]);
    let candidate = Candidate::with_gate(&pod, true);
    let hints = memory.pod_hints(candidate);
    assert_eq!(hints["memory"][0], hint(&[0], true));
    memory.allocate_pod(candidate, hint(&[1], true)).unwrap();
    let mib = |memory: &Memory, name: &str| {
        memory
            .blocks(pod.uid(), name)
            .iter()
            .map(|block| (block.nodes, block.bytes >> 20))
            .collect::<Vec<_>>()
    };
    let found: Vec<u64> = ["i", "s", "j", "k", "a", "b", "c"]
        .iter()
        .map(|name| {
            let blocks = mib(&memory, name);
            assert!(blocks.len() == 1 && blocks[0].0 == mask(&[1]), "{name}: {blocks:?}");
            blocks[0].1
        })
        .collect();
    assert_eq!(found, [2048, 512, 1536, 1024, 1024, 512, 512]);
    assert_eq!((memory.pod_blocks(pod.uid())[0].bytes, free(&memory)), (2 * GIB, vec![2 * GIB, GIB]));
    let own = |name: &str| pod.all_containers().find(|found| found.name == name).unwrap();
    assert!(memory.is_isolated(candidate, own("a")) && !memory.is_isolated(candidate, own("b")));
    // The file has it, and it is allocated once.
    let text = memory.state_file();
    assert!(text.contains(r#"\"podEntries\":{\"p\":{\"memoryBlocks\":[{\"numaAffinity\":[1],"#), "{text}");
    let mut memory = Memory::restore(&machine, &reserved, &text).unwrap();
    assert_eq!(memory.state_file(), text);
    memory.allocate_pod(candidate, ANY).unwrap();
    assert_eq!(memory.state_file(), text);
    assert_eq!(memory.pod_hints(candidate)["memory"], [hint(&[1], true)]);
    // It is free with the last container.
    memory.release_ended_init_containers(&pod, "b");
    for name in ["s", "a", "b"] {
        memory.release(pod.uid(), name);
        assert_eq!(free(&memory), [2 * GIB, GIB], "{name}");
    }
    memory.release(pod.uid(), "c");
    assert_eq!(free(&memory), [2 * GIB, 3 * GIB]);
    assert!(memory.pod_blocks(pod.uid()).is_empty() && memory.nodes()[&1].assignments == 0);
}

#[test]
fn pod_as_a_whole_can_get_the_memory_that_its_containers_had_one_by_one() {
    let mut memory = memory(1);
    let pod = whole_pod("p", Vec::new(), vec![container("a", "1Gi"), json!({"name": "b"})]);
    let candidate = Candidate::with_gate(&pod, true);
    memory.allocate(candidate, &pod.containers()[0], hint(&[0], true)).unwrap();
    assert_eq!(free(&memory), [GIB]);
    let hints = memory.pod_hints(candidate);
    assert_eq!(hints.get("memory"), Some(&vec![hint(&[0], true)]));
    memory.allocate_pod(candidate, hint(&[0], true)).unwrap();
    assert_eq!((free(&memory), memory.pod_blocks(pod.uid())[0].bytes), (vec![0], 2 * GIB));
}

#[test]
fn pod_as_a_whole_that_was_resized_is_admitted_again_with_the_memory_that_it_has() {
    let mut memory = memory(2);
    let containers = vec![container("a", "1Gi"), json!({"name": "b"})];
    let pod = whole_pod("p", Vec::new(), containers.clone());
    memory.allocate_pod(Candidate::with_gate(&pod, true), hint(&[1], true)).unwrap();
    let before = memory.clone();
    // Less, of which nothing would be left to share; more; more than a node has.
    for bytes in ["1Gi", "3Gi", "8Gi"] {
        let amounts = json!({"cpu": "2", "memory": bytes});
        let whole = json!({"limits": amounts, "requests": amounts});
        let pod = pod_of("p", json!({"resources": whole, "containers": containers}));
        let candidate = Candidate::with_gate(&pod, true);
        let expected = Hints::from([("memory".to_owned(), vec![hint(&[1], true)])]);
        assert_eq!(memory.pod_hints(candidate), expected, "{bytes}");
        memory.allocate_pod(candidate, hint(&[1], true)).unwrap();
        assert_eq!(memory, before, "{bytes}");
    }
}

#[test]
fn pod_whose_containers_leave_no_memory_to_share_is_refused() {
    let mut memory = memory(1);
    let before = memory.clone();
    let pod = whole_pod("p", Vec::new(), vec![container("a", "2Gi"), json!({"name": "b"})]);
    let candidate = Candidate::with_gate(&pod, true);
    assert_eq!(memory.pod_hints(candidate), Hints::from([("memory".to_owned(), Vec::new())]));
    let text = "pod rejected, sum of exclusive container memory requests equals pod budget, leaving no memory \
                for shared containers";
    let refused = AllocateError::Denied { reason: "EmptyPodSharedPoolError", message: text.to_owned() };
    assert_eq!(memory.allocate_pod(candidate, ANY), Err(refused));
    assert_eq!(memory, before);
    // Without the gate the pod has no memory of its own.
    assert_eq!(memory.pod_hints(Candidate::new(&pod)), Hints::new());
    assert_eq!(allocate(&mut memory, &pod, ANY), Ok(()));
    assert_eq!(memory, before);
}

#[test]
fn file_of_1_37_is_read_and_written_byte_by_byte() {
    // Written by upstream's code for this machine and pod.
    let text = r#"{"policyName":"Static","machineState":{"0":{"numberOfAssignments":1,"memoryMap":{"hugepages-2Mi":{"total":1073741824,"systemReserved":0,"allocatable":1073741824,"reserved":0,"free":1073741824},"memory":{"total":4294967296,"systemReserved":1073741824,"allocatable":2147483648,"reserved":2147483648,"free":0}},"cells":[0,1]},"1":{"numberOfAssignments":1,"memoryMap":{"hugepages-2Mi":{"total":1073741824,"systemReserved":0,"allocatable":1073741824,"reserved":0,"free":1073741824},"memory":{"total":4294967296,"systemReserved":0,"allocatable":3221225472,"reserved":2147483648,"free":1073741824}},"cells":[0,1]}},"entries":{"a":{"c":[{"numaAffinity":[0,1],"type":"memory","size":4294967296}]}},"checksum":2540868451,"data":"{\"policyName\":\"Static\",\"machineState\":{\"0\":{\"numberOfAssignments\":1,\"memoryMap\":{\"hugepages-2Mi\":{\"total\":1073741824,\"systemReserved\":0,\"allocatable\":1073741824,\"reserved\":0,\"free\":1073741824},\"memory\":{\"total\":4294967296,\"systemReserved\":1073741824,\"allocatable\":2147483648,\"reserved\":2147483648,\"free\":0}},\"cells\":[0,1]},\"1\":{\"numberOfAssignments\":1,\"memoryMap\":{\"hugepages-2Mi\":{\"total\":1073741824,\"systemReserved\":0,\"allocatable\":1073741824,\"reserved\":0,\"free\":1073741824},\"memory\":{\"total\":4294967296,\"systemReserved\":0,\"allocatable\":3221225472,\"reserved\":2147483648,\"free\":1073741824}},\"cells\":[0,1]}},\"entries\":{\"a\":{\"c\":[{\"numaAffinity\":[0,1],\"type\":\"memory\",\"size\":4294967296}]}}}","dataChecksum":213174178}"#;
    let node = |number| NumaNode {
        number,
        memory_bytes: 4 * GIB,
        huge_pages: BTreeMap::from([(2 << 20, 512)]),
        distances: None,
    };
    let machine = [node(0), node(1)];
    let amounts = amounts(&[("memory", "1Gi")]);
    let reserved = Reserved::new(&machine, &[(0, amounts.clone())], &amounts).unwrap();
    let memory = Memory::restore(&machine, &reserved, text).unwrap();
    assert_eq!(memory.cpuset_mems(&"a".into(), "c"), Some(mask(&[0, 1])));
    assert_eq!(memory.state_file(), text);
}

#[test]
fn file_of_format_2_is_read() {
    let (machine, reserved) = machine(1);
    let mut memory = Memory::new(&machine, &reserved);
    let pod = whole_pod("p", Vec::new(), vec![container("a", "1Gi"), json!({"name": "b"})]);
    memory.allocate_pod(Candidate::with_gate(&pod, true), ANY).unwrap();
    // The checksum is that of upstream's code.
    let text = r#"{"policyName":"Static","machineState":{"0":{"numberOfAssignments":1,"memoryMap":{"hugepages-1Gi":{"total":0,"systemReserved":0,"allocatable":0,"reserved":0,"free":0},"hugepages-2Mi":{"total":1073741824,"systemReserved":0,"allocatable":1073741824,"reserved":0,"free":1073741824},"memory":{"total":4294967296,"systemReserved":1073741824,"allocatable":2147483648,"reserved":2147483648,"free":0}},"cells":[0]}},"entries":{"p":{"a":[{"numaAffinity":[0],"type":"memory","size":1073741824}],"b":[{"numaAffinity":[0],"type":"memory","size":1073741824}]}},"podEntries":{"p":{"memoryBlocks":[{"numaAffinity":[0],"type":"memory","size":2147483648}]}},"checksum":2434704815}"#;
    let found = Memory::restore(&machine, &reserved, text).unwrap();
    assert_eq!(
        (&found.nodes, &found.assignments, &found.pods),
        (&memory.nodes, &memory.assignments, &memory.pods)
    );
    assert_eq!(found.state_file(), memory.state_file());
    let wrong = text.replace("2147483648}]}}", "2147483647}]}}");
    assert_eq!(Memory::restore(&machine, &reserved, &wrong), Err(StateError::Checksum));
}

#[test]
fn unusable_state_files_are_errors_with_a_type() {
    let (machine, reserved) = machine(2);
    let mut memory = Memory::new(&machine, &reserved);
    allocate(&mut memory, &pod("a", vec![container("c", "1Gi")]), ANY).unwrap();
    let good = memory.state_file();
    let unsigned = |text: &str| {
        let checksum = text.find(",\"checksum\":").unwrap();
        format!("{}}}", &text[..checksum])
    };
    let restore = |text: &str| Memory::restore(&machine, &reserved, text).unwrap_err();
    for text in ["", "{}", "[]", "{\"policyName\":1}", "\u{0}"] {
        assert!(matches!(restore(text), StateError::Content { .. }), "{text}");
    }
    let older = without_data(&good);
    assert_eq!(restore(&older.replace("\"size\":1073741824", "\"size\":1073741825")), StateError::Checksum);
    assert_eq!(
        restore(NONE_STATE).to_string(),
        "[memorymanager] configured policy \"Static\" differs from state checkpoint policy \"None\""
    );
    assert!(matches!(check_none(&good), Err(StateError::Policy { configured: "None", .. })));
    let good = unsigned(&good);
    assert!(Memory::restore(&machine, &reserved, &good).is_ok());
    let block = "\"numaAffinity\":[0]";
    let number = |list: &str| good.replace(block, &format!("\"numaAffinity\":{list}"));
    assert!(matches!(restore(&number("[9]")), StateError::UnknownNode { .. }));
    for list in ["[]", "[1,0]", "[64]", "[0,0]", "[-1]"] {
        assert!(matches!(restore(&number(list)), StateError::Content { .. }), "{list}");
    }
    let resource = good.replace("\"type\":\"memory\"", "\"type\":\"hugepages-64Ki\"");
    assert!(matches!(restore(&resource), StateError::UnknownResource { .. }));
    assert_eq!(restore(&number("[1]")), StateError::Machine);
    let no_machine = r#"{"policyName":"Static","machineState":null,"entries":{"a":{"c":[]}}}"#;
    assert_eq!(restore(no_machine), StateError::NoMachine);
    // Another machine, or another reservation.
    let (other, _) = super::tests::machine(1);
    assert_eq!(Memory::restore(&other, &reserved, &good).unwrap_err(), StateError::Machine);
}

#[test]
fn state_is_rebuilt_from_running_containers() {
    let (machine, reserved) = machine(4);
    let mut memory = Memory::new(&machine, &reserved);
    let group = pod("a", vec![container("c", "4Gi")]);
    let single = pod("b", vec![container("c", "1Gi"), container("d", "1Gi")]);
    allocate(&mut memory, &group, ANY).unwrap();
    allocate(&mut memory, &single, ANY).unwrap();
    let running = |pod: &'static Pod, index: usize, mems: Option<&[u32]>| RunningContainer {
        pod: Candidate::new(pod),
        container: &pod.containers()[index],
        mems: mems.map(mask),
    };
    // Leaked: a test.
    let leak = |pod: Pod| -> &'static Pod { Box::leak(Box::new(pod)) };
    let (group, single) = (leak(group), leak(single));
    let burstable = leak(pod("c", vec![json!({"name": "c"})]));
    let odd = leak(pod("d", ["e", "f", "g", "h"].map(|name| container(name, "1Gi")).into()));
    let all = [
        running(group, 0, Some(&[0, 1])),
        running(single, 0, Some(&[2])),
        running(single, 0, Some(&[3])),
        running(single, 1, Some(&[2])),
        running(burstable, 0, None),
    ];
    let (rebuilt, problems) = Memory::rebuild(&machine, &reserved, all);
    assert_eq!(problems, []);
    assert_eq!((rebuilt.nodes(), rebuilt.assignments()), (memory.nodes(), memory.assignments()));
    let wrong = [
        running(odd, 0, None),
        running(odd, 1, Some(&[1, 2])),
        running(odd, 2, Some(&[0])),
        running(odd, 3, Some(&[0, 9])),
    ];
    let (mut rebuilt, problems) = Memory::rebuild(&machine, &reserved, all.into_iter().chain(wrong));
    let names: Vec<&str> = problems.iter().map(|problem| problem.container.as_str()).collect();
    assert_eq!(names, ["e", "f", "g", "h"]);
    assert!(rebuilt.take_changed());
    assert!(Memory::restore(&machine, &reserved, &rebuilt.state_file()).is_ok());
}

#[test]
fn container_with_its_own_memory_in_a_pod_with_resources_as_a_whole_is_adopted_with_the_gate() {
    let mut memory = memory(2);
    let pod = whole_pod("p", Vec::new(), vec![container("a", "1Gi"), json!({"name": "b"})]);
    for (gate, expected) in [(false, [0, 0]), (true, [1, 0])] {
        let candidate = Candidate::with_gate(&pod, gate);
        for container in pod.containers() {
            memory
                .add_running(RunningContainer { pod: candidate, container, mems: Some(mask(&[1])) })
                .unwrap();
        }
        assert_eq!(["a", "b"].map(|name| memory.blocks(pod.uid(), name).len()), expected, "{gate}");
    }
    assert_eq!(free(&memory), [2 * GIB, 2 * GIB]);
}

/// The other state file is lost: the containers of this one's pods are found, too.
#[test]
fn nothing_is_adopted_twice_that_a_good_file_has_of_a_pod_or_of_its_containers() {
    let (machine, reserved) = machine(2);
    let restore = |memory: &Memory| Memory::restore(&machine, &reserved, &memory.state_file());
    let pod = whole_pod("p", Vec::new(), vec![container("a", "1Gi"), json!({"name": "b"})]);
    let candidate = Candidate::with_gate(&pod, true);
    let empty = Memory::new(&machine, &reserved);
    let mut both = empty.clone();
    both.allocate_pod(candidate, hint(&[1], true)).unwrap();
    // As after the end of an init container.
    let mut without_a = both.clone();
    without_a.release(pod.uid(), "a");
    let mut of_container = empty;
    of_container.allocate(candidate, &pod.containers()[0], hint(&[1], true)).unwrap();
    for (memory, has_pod, entries) in [(&both, true, 2), (&without_a, true, 1), (&of_container, false, 1)] {
        let mut restored = restore(memory).unwrap();
        let before = restored.clone();
        let found = (before.pods.contains_key(pod.uid()), before.assignments[pod.uid()].len());
        assert_eq!(found, (has_pod, entries));
        for container in pod.containers() {
            restored
                .add_running(RunningContainer { pod: candidate, container, mems: Some(mask(&[1])) })
                .unwrap();
        }
        assert_eq!(restored, before);
    }
    // A pod without a container does not count, and its memory would never be released.
    let mut of_pod = both;
    of_pod.assignments.clear();
    assert_eq!(restore(&of_pod), Err(StateError::Machine));
}

#[test]
fn a_thousand_containers_are_admitted_quickly() {
    let mut memory = memory(8);
    let containers: Vec<Value> = (0..1000).map(|number| container(&format!("c{number}"), "1Mi")).collect();
    let init: Vec<Value> = (0..500).map(|number| container(&format!("i{number}"), "1Mi")).collect();
    let pod = pod_of("p", json!({"containers": containers, "initContainers": init}));
    assert!(!memory.pod_hints(Candidate::new(&pod)).is_empty());
    allocate(&mut memory, &pod, ANY).unwrap();
    let used: u64 = memory.nodes().values().map(|node| node.tables["memory"].reserved).sum();
    assert_eq!(used, 1000 << 20);
}

#[test]
fn large_machines_have_hints_for_small_sets() {
    let memory = memory(60);
    let hints = |bytes: &str| {
        let pod = pod("p", vec![container("c", bytes)]);
        memory.hints(Candidate::new(&pod), &pod.containers()[0]).remove("memory").unwrap_or_default()
    };
    assert_eq!(hints("1Gi").iter().filter(|hint| hint.preferred).count(), 60);
    assert!(hints("6Gi").iter().any(|hint| hint.preferred && hint.nodes.unwrap().len() == 2));
    assert!(hints("100Gi").is_empty());
}

proptest! {
    #[test]
    fn no_amounts_cause_a_panic(
        bytes in prop::collection::vec((any::<i64>(), 0_u64..16, any::<bool>()), 1..8),
        total in any::<u64>(),
        pages in any::<u64>(),
    ) {
        let node = |number| NumaNode {
            number,
            memory_bytes: total,
            huge_pages: BTreeMap::from([(2 << 20, pages), (u64::MAX, 1)]),
            distances: None,
        };
        let machine: Vec<NumaNode> = (0..4).map(node).collect();
        let amounts = amounts(&[("memory", "9223372036854775807")]);
        let reserved = Reserved::new(&machine, &[(1, amounts.clone())], &amounts).unwrap();
        let mut memory = Memory::new(&machine, &reserved);
        for (index, (bytes, nodes, restart)) in bytes.into_iter().enumerate() {
            let text = bytes.to_string();
            let limits = json!({"cpu": "1", "memory": text, "hugepages-2Mi": text});
            let container = json!({"name": "c", "resources": {"limits": limits}});
            let pod = pod_of(&format!("u{index}"), json!({"containers": [container], "initContainers": [container]}));
            let _ = (memory.pod_hints(Candidate::new(&pod)), memory.hints(Candidate::new(&pod), &pod.containers()[0]));
            let hint = Hint { nodes: Some(NumaMask(nodes)).filter(|_| nodes > 0), preferred: restart };
            let _: Result<(), AllocateError> = memory.allocate(Candidate::new(&pod), &pod.containers()[0], hint);
            if restart {
                memory.release(&PodUid::from("u0"), "c");
                let _ = Memory::restore(&machine, &reserved, &memory.state_file());
            }
        }
    }

    #[test]
    fn no_state_file_causes_a_panic(text: String) {
        let (machine, reserved) = machine(1);
        let _ = Memory::restore(&machine, &reserved, &text);
        let _ = check_none(&text);
    }
}
