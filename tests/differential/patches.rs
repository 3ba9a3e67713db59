//! Strategic merge patches: what the API server's code makes of the old object and the patch
//! that is sent is the object that was wanted.

use coracle::model::api::{Node, PodStatus};
use coracle::node::node_patch;
use coracle::status::status_patch;
use serde_json::{Map, Value, json};

use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, pick, rarely};

const TIMES: [&str; 3] = ["2026-01-01T00:00:00Z", "2026-01-02T03:04:05Z", "2026-06-01T12:00:00Z"];
const TEXTS: [&str; 4] = ["", "a", "Some Reason", "words: \u{e4} \"quoted\"\n"];
const IPS: [&str; 4] = ["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"];
const QUANTITIES: [&str; 6] = ["0", "1", "250m", "64Mi", "1.5Gi", "2e3"];
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Some of several, each once, in any order.
fn some<T: Copy>(random: &mut Random, among: &[T]) -> Vec<T> {
    let mut chosen: Vec<T> = among.iter().copied().filter(|_| rarely(random, 2)).collect();
    for index in (1..chosen.len()).rev() {
        chosen.swap(index, random.below(index as u64 + 1) as usize);
    }
    chosen
}

/// Makes a random value of a field.
type MakeValue<'a> = &'a dyn Fn(&mut Random) -> Value;

/// An object with some of these fields.
fn fields(random: &mut Random, all: &[(&str, MakeValue<'_>)]) -> Map<String, Value> {
    let mut object = Map::new();
    for (name, make) in all {
        if !rarely(random, 3) {
            object.insert((*name).to_owned(), make(random));
        }
    }
    object
}

fn extended(mut object: Map<String, Value>, more: Value) -> Value {
    object.extend(more.as_object().unwrap().clone());
    Value::Object(object)
}

fn text(random: &mut Random) -> Value {
    json!(pick(random, &TEXTS))
}

fn time(random: &mut Random) -> Value {
    json!(pick(random, &TIMES))
}

fn amounts(random: &mut Random) -> Value {
    let names = some(random, &["cpu", "memory", "ephemeral-storage", "hugepages-2Mi"]);
    names
        .into_iter()
        .map(|name| (name.to_owned(), json!(pick(random, &QUANTITIES))))
        .collect::<Map<_, _>>()
        .into()
}

fn resources(random: &mut Random) -> Value {
    Value::Object(fields(random, &[("limits", &amounts), ("requests", &amounts)]))
}

fn conditions(random: &mut Random, kinds: &[&str], times: [&str; 2]) -> Value {
    let kinds = some(random, kinds);
    let condition = |kind: &str, random: &mut Random| {
        let object =
            fields(random, &[(times[0], &time), (times[1], &time), ("reason", &text), ("message", &text)]);
        extended(object, json!({"type": kind, "status": pick(random, &["True", "False", "Unknown"])}))
    };
    kinds.into_iter().map(|kind| condition(kind, random)).collect()
}

fn addresses(random: &mut Random) -> Value {
    some(random, &IPS).into_iter().map(|ip| json!({"ip": ip})).collect()
}

fn state(random: &mut Random) -> Value {
    match random.below(4) {
        0 => json!({"waiting": fields(random, &[("reason", &text), ("message", &text)])}),
        1 => json!({"running": fields(random, &[("startedAt", &time)])}),
        2 => {
            let object = fields(
                random,
                &[("reason", &text), ("message", &text), ("startedAt", &time), ("finishedAt", &time)],
            );
            json!({"terminated": extended(object, json!({"exitCode": random.below(3)}))})
        }
        _ => json!({}),
    }
}

fn containers(random: &mut Random) -> Value {
    let container = |name: &str, random: &mut Random| {
        let flag = |random: &mut Random| json!(rarely(random, 2));
        let mounts = |random: &mut Random| -> Value {
            let mount = |path: &str| json!({"name": path, "mountPath": format!("/{path}"), "readOnly": true});
            some(random, &NAMES).into_iter().map(mount).collect()
        };
        let object = fields(
            random,
            &[
                ("state", &state),
                ("lastState", &state),
                ("started", &flag),
                ("containerID", &text),
                ("allocatedResources", &amounts),
                ("resources", &resources),
                ("volumeMounts", &mounts),
            ],
        );
        let rest = json!({"name": name, "ready": rarely(random, 2), "restartCount": random.below(3),
            "image": "i", "imageID": pick(random, &TEXTS)});
        extended(object, rest)
    };
    let names = some(random, &NAMES);
    names.into_iter().map(|name| container(name, random)).collect()
}

fn pod_status(random: &mut Random) -> Map<String, Value> {
    let kinds = ["Ready", "Initialized", "PodScheduled", "ContainersReady", "example.org/gate"];
    let all = |random: &mut Random| conditions(random, &kinds, ["lastProbeTime", "lastTransitionTime"]);
    let phase = |random: &mut Random| json!(pick(random, &["Pending", "Running", "Succeeded", "Failed"]));
    fields(
        random,
        &[
            ("phase", &phase),
            ("reason", &text),
            ("message", &text),
            ("hostIP", &|random| json!(pick(random, &IPS))),
            ("hostIPs", &addresses),
            ("podIP", &|random| json!(pick(random, &IPS))),
            ("podIPs", &addresses),
            ("startTime", &time),
            ("qosClass", &|random| json!(pick(random, &["BestEffort", "Burstable", "Guaranteed"]))),
            ("observedGeneration", &|random| json!(1 + random.below(5))),
            ("resize", &|random| json!(pick(random, &["Deferred", "Infeasible"]))),
            ("conditions", &all),
            ("containerStatuses", &containers),
            ("initContainerStatuses", &containers),
            ("ephemeralContainerStatuses", &containers),
            ("resources", &resources),
            ("allocatedResources", &amounts),
        ],
    )
}

/// The same but for some fields, and within the lists for some elements.
fn changed(random: &mut Random, old: &Map<String, Value>, other: Map<String, Value>) -> Map<String, Value> {
    let mut new = old.clone();
    // Now and then nothing but the order of lists.
    if !rarely(random, 10) {
        for (key, value) in &other {
            if rarely(random, 3) {
                new.insert(key.clone(), value.clone());
            }
        }
        new.retain(|key, _| other.contains_key(key) || !rarely(random, 3));
    }
    for list in new.values_mut().filter_map(Value::as_array_mut) {
        match random.below(6) {
            0 => list.reverse(),
            1 => drop(list.pop()),
            2 if !list.is_empty() => drop(list.remove(0)),
            _ => {}
        }
    }
    new
}

/// Lists whose order alone is not worth a request.
const UNORDERED: [&str; 3] = ["conditions", "hostIPs", "podIPs"];

/// What is wanted, with the order of the old lists where nothing else differs.
fn in_old_order(old: &Value, new: &mut Value) {
    let sorted = |list: &Value| {
        let mut all: Vec<String> = list.as_array().into_iter().flatten().map(ToString::to_string).collect();
        all.sort();
        all
    };
    for list in UNORDERED {
        if new.get(list).is_some() && sorted(&old[list]) == sorted(&new[list]) {
            new[list] = old[list].clone();
        }
    }
}

fn check(cases: &mut Cases, peer: &mut Peer, kind: &str, old: &Value, wanted: &Value, patch: Option<Value>) {
    let sent = patch.is_some();
    let patch = patch.unwrap_or_else(|| json!({}));
    let question = json!({"ask": "patch", "kind": kind, "old": old, "wanted": wanted, "patch": patch});
    let response = peer.ask(&question);
    if response["ok"] != true {
        cases.differs(&format!(
            "{}\nold {old}\npatch {patch}\nreached {}\nwanted {}",
            response["error"], response["reached"], response["wanted"]
        ));
    }
    cases.count(if sent { "reached" } else { "without a patch" });
}

#[test]
fn pod_status_patch_produces_the_desired_status() {
    let (mut cases, mut random) = Cases::new("pod patches", 6_000);
    let mut peer = Peer::start();
    while cases.next() {
        let (old, other) = (pod_status(&mut random), pod_status(&mut random));
        let new = changed(&mut random, &old, other);
        let typed =
            |status: Map<String, Value>| -> PodStatus { serde_json::from_value(status.into()).unwrap() };
        let (old, new) = (typed(old), typed(new));
        let patch = status_patch(&"u1".into(), &old, &new);
        let (old, mut new) = (json!(old), json!(new));
        in_old_order(&old, &mut new);
        let pod = |status: Value| json!({"metadata": {"name": "p", "uid": "u1"}, "status": status});
        check(&mut cases, &mut peer, "Pod", &pod(old), &pod(new), patch);
    }
    cases.end("reached", 2);
}

fn node(random: &mut Random) -> (Value, Map<String, Value>) {
    let labels = |random: &mut Random| -> Value {
        let names = some(random, &NAMES);
        names.into_iter().map(|name| (name.to_owned(), text(random))).collect::<Map<_, _>>().into()
    };
    let kinds = ["Ready", "MemoryPressure", "DiskPressure", "NetworkUnavailable", "example.org/x"];
    let all = |random: &mut Random| conditions(random, &kinds, ["lastHeartbeatTime", "lastTransitionTime"]);
    let addresses = |random: &mut Random| -> Value {
        let kinds = ["InternalIP", "InternalIP", "Hostname", "ExternalIP"];
        let ips = some(random, &IPS);
        // The server puts those of one type together. So does the node, and so are those that a
        // cloud controller has sent to the server.
        let mut all: Vec<(&str, &str)> = ips.into_iter().map(|ip| (pick(random, &kinds), ip)).collect();
        all.sort();
        all.into_iter().map(|(kind, ip)| json!({"type": kind, "address": ip})).collect()
    };
    let images = |random: &mut Random| -> Value {
        some(random, &NAMES)
            .into_iter()
            .map(|name| json!({"names": [name, "x"], "sizeBytes": random.below(3)}))
            .collect()
    };
    let info = |random: &mut Random| {
        let mut info = json!({"architecture": "amd64", "bootID": "", "containerRuntimeVersion": "",
            "kernelVersion": "", "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "",
            "operatingSystem": "linux", "osImage": "", "systemUUID": ""});
        info["bootID"] = text(random);
        info["kernelVersion"] = text(random);
        info
    };
    let endpoints = |random: &mut Random| json!({"kubeletEndpoint": {"Port": 10250 + random.below(2)}});
    let handlers = |random: &mut Random| -> Value {
        let handler = |name: &str, random: &mut Random| match rarely(random, 2) {
            true => json!({"name": name}),
            false => json!({"name": name, "features": {"userNamespaces": rarely(random, 2)}}),
        };
        let names = some(random, &NAMES);
        names.into_iter().map(|name| handler(name, random)).collect()
    };
    let texts = |random: &mut Random| json!(some(random, &NAMES));
    let attached = |random: &mut Random| -> Value {
        some(random, &NAMES).into_iter().map(|name| json!({"name": name, "devicePath": ""})).collect()
    };
    let features = |random: &mut Random| json!({"supplementalGroupsPolicy": rarely(random, 2)});
    let status = fields(
        random,
        &[
            ("capacity", &amounts),
            ("allocatable", &amounts),
            ("conditions", &all),
            ("addresses", &addresses),
            ("images", &images),
            ("nodeInfo", &info),
            ("daemonEndpoints", &endpoints),
            ("runtimeHandlers", &handlers),
            ("volumesInUse", &texts),
            ("volumesAttached", &attached),
            ("declaredFeatures", &texts),
            ("features", &features),
        ],
    );
    let metadata =
        extended(fields(random, &[("labels", &labels), ("annotations", &labels)]), json!({"name": "n"}));
    (metadata, status)
}

#[test]
fn node_patch_produces_the_desired_node() {
    let (mut cases, mut random) = Cases::new("node patches", 6_000);
    let mut peer = Peer::start();
    while cases.next() {
        let (metadata, old) = node(&mut random);
        let (other_metadata, other) = node(&mut random);
        let new = changed(&mut random, &old, other);
        let typed = |metadata: Value, status: Map<String, Value>| -> Node {
            let object = json!({"metadata": metadata, "spec": {"podCIDR": "10.1.0.0/16"}, "status": status});
            serde_json::from_value(object).unwrap()
        };
        let new_metadata = if rarely(&mut random, 2) { other_metadata } else { metadata.clone() };
        let (old, new) = (typed(metadata, old), typed(new_metadata, new));
        let patch = node_patch(&old, &new);
        check(&mut cases, &mut peer, "Node", &json!(old), &json!(new), patch);
    }
    cases.end("reached", 2);
}
