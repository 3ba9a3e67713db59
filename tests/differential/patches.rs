//! Strategic merge patches: what the API server's code makes of the old object and the patch
//! that is sent is the object that was wanted.

use coracle::model::api::{Node, PodStatus};
use coracle::node::node_patch;
use coracle::status::status_patch;
use serde_json::{Map, Value, json};

use crate::dice::Dice;
use crate::peer::Peer;
use crate::{Cases, pick, rarely};

const TIMES: [&str; 3] = ["2026-01-01T00:00:00Z", "2026-01-02T03:04:05Z", "2026-06-01T12:00:00Z"];
const TEXTS: [&str; 4] = ["", "a", "Some Reason", "words: \u{e4} \"quoted\"\n"];
const IPS: [&str; 4] = ["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"];
const QUANTITIES: [&str; 6] = ["0", "1", "250m", "64Mi", "1.5Gi", "2e3"];
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Some of several, each once, in any order.
fn some<T: Copy>(dice: &mut Dice, among: &[T]) -> Vec<T> {
    let mut chosen: Vec<T> = among.iter().copied().filter(|_| rarely(dice, 2)).collect();
    for at in (1..chosen.len()).rev() {
        chosen.swap(at, dice.below(at as u64 + 1) as usize);
    }
    chosen
}

/// An object of fields that are there or not.
fn fields(dice: &mut Dice, all: &[(&str, &dyn Fn(&mut Dice) -> Value)]) -> Map<String, Value> {
    let mut object = Map::new();
    for (name, make) in all {
        if !rarely(dice, 3) {
            object.insert((*name).to_owned(), make(dice));
        }
    }
    object
}

fn with(mut object: Map<String, Value>, more: Value) -> Value {
    object.extend(more.as_object().unwrap().clone());
    Value::Object(object)
}

fn text(dice: &mut Dice) -> Value {
    json!(pick(dice, &TEXTS))
}

fn time(dice: &mut Dice) -> Value {
    json!(pick(dice, &TIMES))
}

fn amounts(dice: &mut Dice) -> Value {
    let names = some(dice, &["cpu", "memory", "ephemeral-storage", "hugepages-2Mi"]);
    names
        .into_iter()
        .map(|name| (name.to_owned(), json!(pick(dice, &QUANTITIES))))
        .collect::<Map<_, _>>()
        .into()
}

fn resources(dice: &mut Dice) -> Value {
    Value::Object(fields(dice, &[("limits", &amounts), ("requests", &amounts)]))
}

fn conditions(dice: &mut Dice, kinds: &[&str], times: [&str; 2]) -> Value {
    let kinds = some(dice, kinds);
    let one = |kind: &str, dice: &mut Dice| {
        let object =
            fields(dice, &[(times[0], &time), (times[1], &time), ("reason", &text), ("message", &text)]);
        with(object, json!({"type": kind, "status": pick(dice, &["True", "False", "Unknown"])}))
    };
    kinds.into_iter().map(|kind| one(kind, dice)).collect()
}

fn addresses(dice: &mut Dice) -> Value {
    some(dice, &IPS).into_iter().map(|ip| json!({"ip": ip})).collect()
}

fn state(dice: &mut Dice) -> Value {
    match dice.below(4) {
        0 => json!({"waiting": fields(dice, &[("reason", &text), ("message", &text)])}),
        1 => json!({"running": fields(dice, &[("startedAt", &time)])}),
        2 => {
            let object = fields(
                dice,
                &[("reason", &text), ("message", &text), ("startedAt", &time), ("finishedAt", &time)],
            );
            json!({"terminated": with(object, json!({"exitCode": dice.below(3)}))})
        }
        _ => json!({}),
    }
}

fn containers(dice: &mut Dice) -> Value {
    let one = |name: &str, dice: &mut Dice| {
        let flag = |dice: &mut Dice| json!(rarely(dice, 2));
        let mounts = |dice: &mut Dice| -> Value {
            let one = |path: &str| json!({"name": path, "mountPath": format!("/{path}"), "readOnly": true});
            some(dice, &NAMES).into_iter().map(one).collect()
        };
        let object = fields(
            dice,
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
        let rest = json!({"name": name, "ready": rarely(dice, 2), "restartCount": dice.below(3),
            "image": "i", "imageID": pick(dice, &TEXTS)});
        with(object, rest)
    };
    let names = some(dice, &NAMES);
    names.into_iter().map(|name| one(name, dice)).collect()
}

fn pod_status(dice: &mut Dice) -> Map<String, Value> {
    let kinds = ["Ready", "Initialized", "PodScheduled", "ContainersReady", "example.org/gate"];
    let all = |dice: &mut Dice| conditions(dice, &kinds, ["lastProbeTime", "lastTransitionTime"]);
    let phase = |dice: &mut Dice| json!(pick(dice, &["Pending", "Running", "Succeeded", "Failed"]));
    fields(
        dice,
        &[
            ("phase", &phase),
            ("reason", &text),
            ("message", &text),
            ("hostIP", &|dice| json!(pick(dice, &IPS))),
            ("hostIPs", &addresses),
            ("podIP", &|dice| json!(pick(dice, &IPS))),
            ("podIPs", &addresses),
            ("startTime", &time),
            ("qosClass", &|dice| json!(pick(dice, &["BestEffort", "Burstable", "Guaranteed"]))),
            ("observedGeneration", &|dice| json!(1 + dice.below(5))),
            ("resize", &|dice| json!(pick(dice, &["Deferred", "Infeasible"]))),
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
fn changed(dice: &mut Dice, old: &Map<String, Value>, other: Map<String, Value>) -> Map<String, Value> {
    let mut new = old.clone();
    // Now and then nothing but the order of lists.
    if !rarely(dice, 10) {
        for (key, value) in &other {
            if rarely(dice, 3) {
                new.insert(key.clone(), value.clone());
            }
        }
        new.retain(|key, _| other.contains_key(key) || !rarely(dice, 3));
    }
    for list in new.values_mut().filter_map(Value::as_array_mut) {
        match dice.below(6) {
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
    let answer = peer.ask(&question);
    if answer["ok"] != true {
        cases.differs(&format!(
            "{}\nold {old}\npatch {patch}\nreached {}\nwanted {}",
            answer["error"], answer["reached"], answer["wanted"]
        ));
    }
    cases.count(if sent { "reached" } else { "without a patch" });
}

#[test]
fn a_patch_of_a_pod_status_leads_to_the_status_that_is_wanted() {
    let (mut cases, mut dice) = Cases::new("pod patches", 6_000);
    let mut peer = Peer::start();
    while cases.next() {
        let (old, other) = (pod_status(&mut dice), pod_status(&mut dice));
        let new = changed(&mut dice, &old, other);
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

fn node(dice: &mut Dice) -> (Value, Map<String, Value>) {
    let labels = |dice: &mut Dice| -> Value {
        let names = some(dice, &NAMES);
        names.into_iter().map(|name| (name.to_owned(), text(dice))).collect::<Map<_, _>>().into()
    };
    let kinds = ["Ready", "MemoryPressure", "DiskPressure", "NetworkUnavailable", "example.org/x"];
    let all = |dice: &mut Dice| conditions(dice, &kinds, ["lastHeartbeatTime", "lastTransitionTime"]);
    let addresses = |dice: &mut Dice| -> Value {
        let kinds = ["InternalIP", "InternalIP", "Hostname", "ExternalIP"];
        let ips = some(dice, &IPS);
        // The server puts those of one type together. So does the node, and so are those that a
        // cloud controller has sent to the server.
        let mut all: Vec<(&str, &str)> = ips.into_iter().map(|ip| (pick(dice, &kinds), ip)).collect();
        all.sort();
        all.into_iter().map(|(kind, ip)| json!({"type": kind, "address": ip})).collect()
    };
    let images = |dice: &mut Dice| -> Value {
        some(dice, &NAMES)
            .into_iter()
            .map(|name| json!({"names": [name, "x"], "sizeBytes": dice.below(3)}))
            .collect()
    };
    let info = |dice: &mut Dice| {
        let mut info = json!({"architecture": "amd64", "bootID": "", "containerRuntimeVersion": "",
            "kernelVersion": "", "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "",
            "operatingSystem": "linux", "osImage": "", "systemUUID": ""});
        info["bootID"] = text(dice);
        info["kernelVersion"] = text(dice);
        info
    };
    let endpoints = |dice: &mut Dice| json!({"kubeletEndpoint": {"Port": 10250 + dice.below(2)}});
    let handlers = |dice: &mut Dice| -> Value {
        let one = |name: &str, dice: &mut Dice| match rarely(dice, 2) {
            true => json!({"name": name}),
            false => json!({"name": name, "features": {"userNamespaces": rarely(dice, 2)}}),
        };
        let names = some(dice, &NAMES);
        names.into_iter().map(|name| one(name, dice)).collect()
    };
    let texts = |dice: &mut Dice| json!(some(dice, &NAMES));
    let attached = |dice: &mut Dice| -> Value {
        some(dice, &NAMES).into_iter().map(|name| json!({"name": name, "devicePath": ""})).collect()
    };
    let features = |dice: &mut Dice| json!({"supplementalGroupsPolicy": rarely(dice, 2)});
    let status = fields(
        dice,
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
    let metadata = with(fields(dice, &[("labels", &labels), ("annotations", &labels)]), json!({"name": "n"}));
    (metadata, status)
}

#[test]
fn a_patch_of_a_node_leads_to_the_node_that_is_wanted() {
    let (mut cases, mut dice) = Cases::new("node patches", 6_000);
    let mut peer = Peer::start();
    while cases.next() {
        let (metadata, old) = node(&mut dice);
        let (other_metadata, other) = node(&mut dice);
        let new = changed(&mut dice, &old, other);
        let typed = |metadata: Value, status: Map<String, Value>| -> Node {
            let object = json!({"metadata": metadata, "spec": {"podCIDR": "10.1.0.0/16"}, "status": status});
            serde_json::from_value(object).unwrap()
        };
        let new_metadata = if rarely(&mut dice, 2) { other_metadata } else { metadata.clone() };
        let (old, new) = (typed(metadata, old), typed(new_metadata, new));
        let patch = node_patch(&old, &new);
        check(&mut cases, &mut peer, "Node", &json!(old), &json!(new), patch);
    }
    cases.end("reached", 2);
}
