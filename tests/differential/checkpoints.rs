//! State files of devices, resource claims and resizes: the kubelet's code reads what the agent writes,
//! and writes the same.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use coracle::claims::info::{ClaimId, ClaimInfo, ClaimKey, Device as ClaimDevice};
use coracle::claims::state_file;
use coracle::devices::{
    self, Device, DeviceId, DeviceSetup, DeviceState, GrantedDevices, Hold, HoldState, Holds, PluginOptions,
};
use coracle::model::ids::PodUid;
use coracle::model::numa::NumaMask;
use coracle::model::pod::Pod;
use coracle::pods::allocation::Allocations;
use serde_json::{Value, json};

use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, pick, rarely};

const RESOURCES: [&str; 2] = ["example.com/gadget", "example.com/widget"];

fn device_id(random: &mut Random) -> DeviceId {
    DeviceId::from(pick(random, &["d1", "d2", "d3", "d10", "a<b>&c", "\u{e9}"]))
}

fn hold(random: &mut Random) -> Hold {
    let mut devices = BTreeMap::new();
    for _ in 0..=random.below(4) {
        let nodes: Vec<u32> = (0..random.below(3)).map(|_| random.below(12) as u32).collect();
        devices.insert(device_id(random), NumaMask::from_numbers(nodes));
    }
    // A response without any field is empty.
    let raw: Vec<u8> = (0..random.below(20)).map(|_| random.below(256) as u8).collect();
    let granted = GrantedDevices { setup: DeviceSetup::default(), raw: raw.into() };
    Hold { devices, state: HoldState::Granted(granted) }
}

fn device_state(random: &mut Random) -> DeviceState {
    let mut holds = Holds::default();
    for number in 0..random.below(4) {
        let uid = PodUid::from(format!("uid-{number}"));
        for container in ["a", "b"] {
            for resource in RESOURCES {
                if !rarely(random, 3) {
                    holds.insert(&uid, container, resource, hold(random));
                }
            }
        }
    }
    let mut state = DeviceState::new(holds, BTreeMap::new(), vec![0, 1], Instant::now());
    for (generation, resource) in (1..).zip(RESOURCES) {
        if rarely(random, 3) {
            continue;
        }
        state.connected(resource, generation, PluginOptions::default()).unwrap();
        let mut list = BTreeMap::new();
        for _ in 0..random.below(4) {
            let device = Device { is_healthy: !rarely(random, 3), ..Device::default() };
            list.insert(device_id(random), device);
        }
        state.listed(resource, generation, list).unwrap();
    }
    state
}

fn claim_device(random: &mut Random) -> ClaimDevice {
    let texts = |random: &mut Random, text: &str| -> Vec<String> {
        (0..random.below(3)).map(|number| format!("{text}{number}")).collect()
    };
    ClaimDevice {
        pool: pick(random, &["node-1", "pool/a"]).to_owned(),
        name: pick(random, &["dev-1", "dev-2"]).to_owned(),
        share_id: rarely(random, 3).then(|| "067798be-454e-4be4-9047-1aa06aea63f7".to_owned()),
        requests: texts(random, "request-"),
        cdi_ids: texts(random, "example.com/gpu="),
    }
}

fn claim(random: &mut Random, number: u64) -> ClaimInfo {
    let key = ClaimKey { namespace: "default".to_owned(), name: format!("claim-{number}") };
    let mut claim = ClaimInfo::new(ClaimId { key, uid: format!("uid-{number}") });
    claim.pods = (0..random.below(3)).map(|pod| PodUid::from(format!("pod-{pod}"))).collect();
    for driver in ["a.example.com", "b.example.com"] {
        if rarely(random, 3) {
            continue;
        }
        let devices = (0..random.below(3)).map(|_| claim_device(random)).collect();
        claim.drivers.insert(driver.to_owned(), devices);
        if rarely(random, 4) {
            claim.skips.insert(driver.to_owned(), vec!["NodeUnprepareResources".to_owned()]);
        }
    }
    claim.incomplete = rarely(random, 4);
    claim
}

/// Requests and limits in the form in which the API server writes quantities.
fn resources(random: &mut Random) -> Value {
    let mut found = json!({});
    for field in ["requests", "limits"] {
        if !rarely(random, 3) {
            found[field] = json!({
                "cpu": pick(random, &["100m", "1", "2500m"]),
                "memory": pick(random, &["64Mi", "1Gi", "1500M"]),
            });
        }
    }
    found
}

fn pod(random: &mut Random, number: u64) -> Pod {
    let mut spec = json!({
        "initContainers": [{"name": "i", "resources": resources(random)}],
        "containers": [{"name": "a", "resources": resources(random)}, {"name": "b"}],
    });
    if rarely(random, 2) {
        spec["resources"] = resources(random);
    }
    let uid = format!("uid-{number}");
    let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": uid}, "spec": spec});
    Pod::from(serde_json::from_value::<coracle::model::api::Pod>(object).unwrap())
}

/// The files of granted and of actuated resources; one without any pod may be absent.
fn resource_files(random: &mut Random, dir: &Path) -> Vec<(&'static str, String)> {
    let allocations = Allocations::load(dir);
    for number in 0..=random.below(3) {
        let pod = pod(random, number);
        allocations.grant(&pod);
        for container in pod.containers() {
            allocations.set_all_actuated(&pod, container);
        }
    }
    allocations.store().unwrap();
    let read = |name: &'static str| Some((name, std::fs::read_to_string(dir.join(name)).ok()?));
    ["allocated_pods_state", "actuated_pods_state"].into_iter().filter_map(read).collect()
}

/// The entries of such a file as the kubelet writes them: what a pod does not have is null.
fn entries(text: &str) -> Value {
    let file: Value = serde_json::from_str(text).unwrap();
    let mut data: Value = serde_json::from_str(file["data"].as_str().unwrap()).unwrap();
    for entry in data["entries"].as_object_mut().into_iter().flat_map(|entries| entries.values_mut()) {
        for field in ["PodLevelResources", "EmptyDirVolumeLimits"] {
            let _ = entry.as_object_mut().unwrap().entry(field).or_insert(Value::Null);
        }
    }
    data
}

#[test]
fn state_files_of_devices_claims_and_resizes_are_read_by_the_kubelet() {
    let (mut cases, mut random) = Cases::new("state files of devices, claims and resizes", 500);
    let mut peer = Peer::managers();
    while cases.next() {
        let mut ask =
            |file: &str, text: &str| peer.ask(&json!({"ask": "checkpoint", "file": file, "data": text}));

        let ours = devices::encode(&device_state(&mut random));
        let mut theirs = vec![(ours.clone(), ask(devices::CHECKPOINT, &ours), Value::from(ours))];

        let mut claims: Vec<ClaimInfo> =
            (0..random.below(4)).map(|number| claim(&mut random, number)).collect();
        let ours = state_file::write(&claims);
        let found = ask(state_file::NAME, &ours);
        // The kubelet does not know which claims are incomplete.
        claims.iter_mut().for_each(|claim| claim.incomplete = false);
        theirs.push((ours, found, Value::from(state_file::write(&claims))));
        for (text, found, expected) in theirs {
            if found["written"] != expected {
                cases.differs(&format!("{text}, in Go {found}"));
            }
        }

        let dir = crate::directory();
        for (name, text) in resource_files(&mut random, dir.path()) {
            let found = ask(name, &text);
            if found["written"].as_str().map(entries) != Some(entries(&text)) {
                cases.differs(&format!("{name}: {text}, in Go {found}"));
            }
        }
        cases.count("read alike");
    }
    cases.end("read alike", 1);
}
