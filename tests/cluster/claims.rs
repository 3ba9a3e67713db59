//! What the tests of volumes have in common: claims, their persistent volumes, and pods that use them.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, log_now, pod, served, shared, text};
use crate::support::node::{FOREVER, busybox};
use crate::support::wait::wait_until;

/// The specification of a claim.
pub fn claim_spec(mode: &str, access: &str) -> Value {
    json!({"accessModes": [access], "volumeMode": mode, "storageClassName": "",
        "resources": {"requests": {"storage": "1Gi"}}})
}

/// Makes a persistent volume for a claim, bound in advance. `source` has the fields that describe
/// where its data are.
pub fn volume(name: &str, claim: &str, (mode, access): (&str, &str), source: &Value) {
    let mut spec = json!({"capacity": {"storage": "1Gi"}, "accessModes": [access], "volumeMode": mode,
        "persistentVolumeReclaimPolicy": "Retain", "storageClassName": "",
        "claimRef": {"namespace": "default", "name": claim}});
    for (key, value) in source.as_object().expect("the source is an object") {
        spec[key] = value.clone();
    }
    shared().apply(&json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec,
    }));
}

/// Makes a claim and its volume, and waits until they are bound.
pub fn claim(name: &str, (mode, access): (&str, &str), source: &Value) {
    volume(name, name, (mode, access), source);
    let mut claim = claim_spec(mode, access);
    claim["volumeName"] = json!(name);
    shared().apply(&json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "default"}, "spec": claim,
    }));
    shared().wait(&["pvc", name], "bound", LIMIT, |claim| text(claim, "/status/phase") == "Bound");
}

/// A node whose pods are synced often.
pub fn prepared(name: &str) -> JoinedNode<'static> {
    let mut config = served(shared());
    config["syncFrequency"] = json!("5s");
    config["volumeStatsAggPeriod"] = json!("5s");
    JoinedNode::prepare(shared(), name, config).start_and_wait()
}

/// A pod with one volume, at `/data` or as the device `/dev/data`.
pub fn with_volume(name: &str, volume: Value, is_device: bool, script: &str) -> Value {
    let mut main = busybox("main", &format!("{script}; {FOREVER}"));
    if is_device {
        main["volumeDevices"] = json!([{"name": "v", "devicePath": "/dev/data"}]);
    } else {
        main["volumeMounts"] = json!([{"name": "v", "mountPath": "/data"}]);
    }
    let mut pod = pod(name, json!([main]));
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    let mut volume = volume;
    volume["name"] = json!("v");
    pod["spec"]["volumes"] = json!([volume]);
    pod
}

/// The volume of a pod that uses this claim.
pub fn of_claim(claim: &str) -> Value {
    json!({"persistentVolumeClaim": {"claimName": claim}})
}

/// Waits until the log of a pod has a text.
pub fn wait_log(pod: &str, wanted: &str) {
    wait_until(&format!("{wanted:?} in the log of {pod}"), LIMIT, || log_now(shared(), pod).contains(wanted));
}

/// Waits for an event FailedMount of a pod with this text.
pub fn wait_refusal(joined: &JoinedNode<'_>, pod: &str, text: &str) {
    let is_it = |(reason, message): &(String, String)| reason == "FailedMount" && message.contains(text);
    wait_until(&format!("an event of {pod} with {text:?}"), LIMIT, || joined.events(pod).iter().any(is_it));
}

/// Deletes a pod and waits for its end.
pub fn delete(joined: &JoinedNode<'_>, pod: &str) {
    shared().kubectl(&["delete", "pod", pod, "--wait=false", "--grace-period=1"]);
    joined.wait_gone(pod);
}

/// The mount points below a directory whose paths in it have a word.
pub fn mounts_below(path: &Path, word: &str) -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("the mount table is readable");
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    let is_it = |point: &&str| {
        let below = Path::new(point).strip_prefix(path).ok();
        below.is_some_and(|below| below.to_string_lossy().contains(word))
    };
    points.filter(is_it).map(str::to_owned).collect()
}
