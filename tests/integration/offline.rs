//! A node with `--offline`: it starts its pods without the API server, and no loss of the server's data,
//! no error and no damage stops them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirEntry};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::disk_search::files_with;
use crate::support::fake_api::{FakeApi, Fault, FaultResponse, ReceivedRequest};
use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::node::{FOREVER, NODE, busybox, container_id, is_ready, phase, pod, push, simple};
use crate::support::output::print_line;
use crate::support::random::{Random, random_seed};
use crate::support::tls_front::{Authority, TlsFront};
use crate::support::wait::{pause, wait_for, wait_until};

mod addresses;
mod clocks;
mod damage;
mod starts;

const SETTINGS: &str = "/api/v1/namespaces/default/configmaps/settings";
const SERVICE: &str = "/api/v1/namespaces/default/services/db";
const KUBERNETES: &str = "/api/v1/namespaces/default/services/kubernetes";
const LOGIN: &str = "/api/v1/namespaces/default/secrets/login";

/// The value of the Secret, which must be nowhere on the disk; also in base64.
const CANARY: [&str; 2] = ["canary-5f2c9e7ab1d", "Y2FuYXJ5LTVmMmM5ZTdhYjFk"];
/// How every token of the fake API server begins; also in base64.
const TOKEN: [&str; 2] = ["token-of-default-", "dG9rZW4tb2YtZGVmYXVs"];

/// A node of a cluster, with `--offline`, whose agent does not run yet.
fn prepared(config: Value) -> FakeNode {
    let mut node = FakeNode::prepare(config);
    let api = FakeApi::start();
    let cluster = json!({"server": api.url()});
    node.join_cluster(api, cluster);
    node.add_flags(&["--offline", "--offline-wait=1s"]);
    node
}

/// The same, when it is ready.
fn joined(config: Value) -> FakeNode {
    prepared(config).start_joined()
}

fn settings(text: &str) -> Value {
    json!({"data": {"text": text}})
}

/// Makes the objects that the pods of [`manifest`] mount.
fn put_mounted_objects(node: &FakeNode) {
    node.api().put(SETTINGS, settings("one"));
    node.api().put(LOGIN, json!({"type": "Opaque", "data": {"pw": CANARY[1]}}));
}

/// The same, and a service that they see.
fn put_objects(node: &FakeNode) {
    put_mounted_objects(node);
    node.api().put(SERVICE, json!({"spec": {"clusterIP": "10.0.0.7", "ports": [{"port": 5432}]}}));
}

/// A variable in the environment of a container.
fn variable(node: &FakeNode, id: &str, name: &str) -> Option<String> {
    let container = node.fake.containers().into_iter().find(|container| container.status.id == id)?;
    let variable = container.config.envs.iter().find(|variable| variable.key == name)?;
    Some(String::from_utf8_lossy(&variable.value).into_owned())
}

/// A pod that uses a ConfigMap, a Secret and a token of its service account.
fn manifest(name: &str) -> Value {
    let mut main = busybox("main", FOREVER);
    main["volumeMounts"] = json!([{"name": "settings", "mountPath": "/settings"},
        {"name": "login", "mountPath": "/login"}, {"name": "token", "mountPath": "/token"}]);
    let mut web = pod(name, json!([main]));
    web["spec"]["serviceAccountName"] = json!("default");
    web["spec"]["volumes"] = json!([
        {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "login", "secret": {"secretName": "login"}},
        {"name": "token", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}]}},
    ]);
    web
}

/// A pod that ends at once and stays ended.
fn job(name: &str) -> Value {
    let mut job = pod(name, json!([busybox("main", "exit 0")]));
    job["spec"]["restartPolicy"] = json!("Never");
    job
}

/// Binds pods with their objects, and waits until they run.
fn run_pods(node: &FakeNode, names: &[&str]) {
    put_objects(node);
    names.iter().for_each(|name| node.bind(&manifest(name)));
    names.iter().for_each(|name| drop(node.wait_ready(name)));
}

/// A file of a volume of a pod: `kind` is the directory of the plugin.
fn volume(node: &FakeNode, pod: &str, kind: &str, file: &str) -> PathBuf {
    let uid = node.api().object(&FakeNode::pod_path(pod)).expect("the API server has the pod");
    let uid = uid["metadata"]["uid"].as_str().expect("it has a UID").to_owned();
    node.root().join("pods").join(uid).join("volumes").join(format!("kubernetes.io~{kind}")).join(file)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The document of `coracle status`; null while the agent does not respond.
fn status(node: &FakeNode) -> Value {
    let output = node.command(&["status", "-o", "json"]);
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

fn wait_phase(node: &FakeNode, phase: &str) {
    wait_until(&format!("the phase {phase}"), LONG, || status(node)["offline"]["phase"] == phase);
}

/// Waits until so many pods are stored with their statuses, and one object of each kind that they use.
fn wait_stored(node: &FakeNode, pods: u64) {
    wait_until("the objects to be stored", LONG, || {
        let objects = &status(node)["offline"]["objects"];
        let count = |kind: &str| objects[kind].as_u64().unwrap_or(0);
        count("pod") == pods
            && count("podstatus") == pods
            && ["node", "configmap", "secret", "token", "services"].iter().all(|kind| count(kind) > 0)
    });
}

/// Waits until an event has this text, and returns all events. Another thread collects them.
fn wait_event(node: &FakeNode, text: &str) -> String {
    wait_for(&format!("an event with {text:?}"), LONG, || {
        let output = node.command(&["events", "-o", "json"]);
        let events = String::from_utf8_lossy(&output.stdout).into_owned();
        events.contains(text).then_some(events)
    })
}

/// Those of some events that are of a pod and have this reason.
fn events_of_pod(events: Vec<Value>, pod: &str, reason: &str) -> Vec<Value> {
    let name = full_name(pod);
    let is_wanted = |event: &Value| event["involvedObject"]["name"] == name && event["reason"] == reason;
    events.into_iter().filter(is_wanted).collect()
}

/// Waits until the agent has an event of the pod with this reason, and returns all of them.
fn wait_pod_events(node: &FakeNode, pod: &str, reason: &str) -> Vec<Value> {
    wait_for(&format!("an event {reason} of pod {pod}"), LONG, || {
        let output = node.command(&["events", "-o", "json"]);
        let events: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        Some(events_of_pod(events, pod, reason)).filter(|events| !events.is_empty())
    })
}

/// Waits until the status shows so many stopped pods.
fn wait_stopped_pods(node: &FakeNode, count: u64) {
    wait_until(&format!("{count} stopped pods"), LONG, || status(node)["offline"]["stoppedPods"] == count);
}

/// Whether the runtime got a request of this kind that names the pod.
fn was_requested(node: &FakeNode, method: &str, pod: &str) -> bool {
    let name = full_name(pod);
    let journal = node.fake.journal();
    journal.iter().any(|entry| entry.method == method && entry.request.to_string().contains(&name))
}

/// Everything but a finished job starts after a power cut without the API server. When the server is
/// back, no container restarts, statuses are reported, and changes of the time between arrive.
#[test]
fn pods_start_without_the_api_server_and_continue_when_it_is_back() {
    let mut node = joined(json!({}));
    run_pods(&node, &["web", "other"]);
    node.bind(&job("job"));
    wait_until("the job to be done", LONG, || {
        node.shown("job").is_some_and(|pod| phase(&pod) == "Succeeded")
    });
    wait_stored(&node, 3);
    let (text, password, token) = (
        volume(&node, "web", "configmap", "settings/text"),
        volume(&node, "web", "secret", "login/pw"),
        volume(&node, "web", "projected", "token/token"),
    );
    let first = node.running("web");

    node.api().go_down();
    node.stop_agent();
    node.cut_power();
    assert!(!password.exists() && !token.exists(), "a power cut clears the memory");
    node.fake.clear_journal();
    node.start_agent();
    wait_phase(&node, "alone");
    node.wait_ready("web");
    node.wait_ready("other");
    let alone = node.running("web");
    assert_ne!(alone, first);
    assert_eq!((read(&text).as_str(), read(&password).as_str()), ("one", CANARY[0]));
    assert!(read(&token).starts_with(TOKEN[0]), "{}", read(&token));
    assert_eq!(variable(&node, &alone["main"][0], "DB_SERVICE_HOST").as_deref(), Some("10.0.0.7"));
    assert!(!was_requested(&node, "RunPodSandbox", "job"), "{:?}", node.fake.calls());
    let shown = node.cli(&["status"]);
    assert!(shown.contains("stored pods run"), "{shown}");
    let listed = node.cli(&["offline", "list"]);
    assert!(listed.contains("secret") && !listed.contains(CANARY[0]), "{listed}");

    // The server is changed before the node reaches it again.
    node.api().remove(&FakeNode::pod_path("other"));
    node.api().put(SETTINGS, settings("two"));
    node.api().go_up();
    wait_phase(&node, "online");
    node.wait_gone("other", LONG);
    wait_until("the status to be reported", LONG, || {
        let shown = node.shown("web");
        shown.is_some_and(|pod| is_ready(&pod) && alone["main"] == [container_id(&pod, "main")])
    });
    wait_until("the edited ConfigMap to arrive", LONG, || read(&text) == "two");
    assert_eq!(node.running("web"), alone, "no container restarts");
    assert!(!was_requested(&node, "RunPodSandbox", "job"), "{:?}", node.fake.calls());
    assert_eq!(node.shown("job").map(|pod| phase(&pod).to_owned()).as_deref(), Some("Succeeded"));
    node.finish();
}

/// The runtime has lost its records, and the server accepts connections without a response.
#[test]
fn frozen_api_server_delays_no_stored_object_and_a_wiped_runtime_repeats_no_job() {
    let mut node = joined(json!({}));
    run_pods(&node, &["web"]);
    node.bind(&job("job"));
    wait_until("the job to be done", LONG, || {
        node.shown("job").is_some_and(|pod| phase(&pod) == "Succeeded")
    });
    wait_stored(&node, 2);
    node.stop_agent();
    node.cut_power();
    node.fake.with_state(|state| {
        state.containers.clear();
        state.sandboxes.clear();
    });
    node.fake.clear_journal();
    node.api().freeze();
    let earlier = node.api().requests();
    node.start_agent();
    node.wait_ready("web");
    let running = node.running("web");
    let token = |request: &&ReceivedRequest| request.path().ends_with("/token");
    assert_eq!(node.api().received().iter().skip(earlier).filter(token).count(), 0);
    assert!(!was_requested(&node, "RunPodSandbox", "job"), "{:?}", node.fake.calls());
    node.api().thaw();
    wait_phase(&node, "online");
    assert_eq!(node.running("web"), running);
    assert!(!was_requested(&node, "RunPodSandbox", "job"), "{:?}", node.fake.calls());
    node.finish();
}

/// An API server that was restored from nothing knows neither the node nor its pods.
#[test]
fn api_server_without_data_stops_no_pod_until_it_is_accepted() {
    let mut node = joined(json!({}));
    run_pods(&node, &["web"]);
    wait_stored(&node, 1);
    let before = node.running("web");
    node.replace_api();
    wait_phase(&node, "held");
    assert_eq!(node.running("web"), before);
    let report = status(&node);
    let problems = report["problems"].to_string();
    assert!(problems.contains("coracle offline accept"), "{problems}");
    assert!(report["offline"]["accepts"].is_string(), "{report}");

    // Also for an agent that starts now, and for the pods that it starts then.
    node.stop_agent();
    node.start_agent();
    wait_phase(&node, "held");
    node.wait_ready("web");
    assert_eq!(node.running("web"), before);
    wait_until("the node to be registered again", LONG, || {
        node.api().object(&format!("/api/v1/nodes/{NODE}")).is_some()
    });

    node.cli(&["offline", "accept"]);
    node.wait_gone("web", LONG);
    wait_phase(&node, "online");
    let again = node.command(&["offline", "accept"]);
    assert_eq!(again.status.code(), Some(5), "{again:?}");
    assert_eq!(status(&node)["offline"]["held"], Value::Null);
    node.bind(&simple("new"));
    node.wait_ready("new");
    node.finish();
}

/// Its service `kubernetes` has another UID, so no time makes its pods count.
#[test]
fn api_server_of_another_cluster_is_accepted_by_an_order_only() {
    let mut node = joined(json!({}));
    let service = || json!({"spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 443}]}});
    node.api().put(KUBERNETES, service());
    run_pods(&node, &["web"]);
    wait_stored(&node, 1);
    wait_until("the UID of the cluster to be stored", LONG, || {
        status(&node)["offline"]["objects"]["cluster"] == json!(1)
    });
    let before = node.running("web");
    node.replace_api();
    node.api().put(KUBERNETES, service());
    wait_until("another cluster to be found", LONG, || {
        status(&node)["offline"]["held"] == json!("otherCluster")
    });
    assert_eq!(node.running("web"), before);
    assert_eq!(status(&node)["offline"]["accepts"], Value::Null);
    node.cli(&["offline", "accept"]);
    node.wait_gone("web", LONG);
    wait_phase(&node, "online");
    node.finish();
}

/// Pods are stopped when the API server was away for their time, also over restarts, and start again only
/// when it has shown them. A pod with the annotation continues, and one that was deleted meanwhile never
/// starts.
#[test]
fn pods_stop_without_the_api_server_after_their_time_and_start_when_it_shows_them() {
    let mut node = FakeNode::prepare(json!({"nodeLeaseDurationSeconds": 2}));
    let api = FakeApi::start();
    let cluster = json!({"server": api.url()});
    node.join_cluster(api, cluster);
    node.add_flags(&["--offline", "--offline-wait=1s", "--offline-stop-after=6s"]);
    let mut node = node.start_joined();
    let mut sensor = manifest("sensor");
    sensor["metadata"]["annotations"] = json!({"coracle.dev/offline-stop-after": "never"});
    put_objects(&node);
    ["web", "gone"].iter().for_each(|name| node.bind(&manifest(name)));
    node.bind(&sensor);
    ["web", "gone", "sensor"].iter().for_each(|name| drop(node.wait_ready(name)));
    wait_stored(&node, 3);
    let before = node.running("sensor");

    node.api().go_down();
    for name in ["web", "gone"] {
        wait_until(&format!("{name} to stop"), LONG, || {
            node.running(name).is_empty() && node.ready_sandboxes(name).is_empty()
        });
    }
    assert_eq!(node.running("sensor"), before, "its annotation says never");
    wait_event(&node, "StoppedOffline");
    wait_stopped_pods(&node, 2);

    node.stop_agent();
    node.cut_power();
    node.fake.clear_journal();
    node.start_agent();
    wait_phase(&node, "alone");
    node.wait_ready("sensor");
    wait_stopped_pods(&node, 2);
    for name in ["web", "gone"] {
        assert!(!was_requested(&node, "RunPodSandbox", name), "{:?}", node.fake.calls());
    }

    let running = node.running("sensor");
    node.api().remove(&FakeNode::pod_path("gone"));
    node.api().go_up();
    wait_phase(&node, "online");
    node.wait_gone("gone", LONG);
    wait_until("web to run again and to be reported", LONG, || {
        !node.running("web").is_empty()
            && node.shown("web").is_some_and(|pod| is_ready(&pod) && phase(&pod) == "Running")
    });
    assert_eq!(node.running("sensor"), running);
    assert!(!was_requested(&node, "RunPodSandbox", "gone"), "{:?}", node.fake.calls());
    wait_stopped_pods(&node, 0);
    node.finish();
}

/// Without a stored Node object, stored pods do not start; those that run since before a restart of the agent
/// are stopped at their time nevertheless.
#[test]
fn running_pods_stop_after_their_time_also_if_no_node_object_is_stored() {
    let mut node = FakeNode::prepare(json!({"nodeLeaseDurationSeconds": 2}));
    let api = FakeApi::start();
    let cluster = json!({"server": api.url()});
    node.join_cluster(api, cluster);
    node.add_flags(&["--offline", "--offline-wait=1s", "--offline-stop-after=6s"]);
    let mut node = node.start_joined();
    run_pods(&node, &["web"]);
    wait_stored(&node, 1);

    node.api().go_down();
    node.stop_agent();
    let files = fs::read_dir(node.root().join("offline")).unwrap().flatten();
    let files: Vec<_> =
        files.filter(|file| file.file_name().to_string_lossy().starts_with("node-")).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    fs::remove_file(files[0].path()).unwrap();
    node.start_agent();
    wait_until("web to stop", LONG, || {
        node.running("web").is_empty() && node.ready_sandboxes("web").is_empty()
    });
    wait_phase(&node, "undecided");

    node.api().go_up();
    wait_phase(&node, "online");
    wait_until("web to run again", LONG, || !node.running("web").is_empty());
    node.finish();
}

/// No copy of a Secret or a token is in clear on the disk, in a log, or in a response.
#[test]
fn secrets_and_tokens_are_in_clear_in_no_file() {
    let mut node = joined(json!({}));
    run_pods(&node, &["web"]);
    wait_stored(&node, 1);
    let password = volume(&node, "web", "secret", "login/pw");
    assert_eq!(read(&password), CANARY[0]);
    let texts = [CANARY[0], CANARY[1], TOKEN[0], TOKEN[1]];
    // The search finds what is there.
    fs::write(node.path("seen"), format!("x{}", CANARY[1])).unwrap();
    assert_eq!(files_with(&node.path(""), &texts), [node.path("seen")]);
    fs::remove_file(node.path("seen")).unwrap();

    node.api().go_down();
    node.stop_agent();
    assert_eq!(files_with(&node.path(""), &texts), [""; 0].map(PathBuf::from));
    node.cut_power();
    node.start_agent();
    node.wait_ready("web");
    assert_eq!(read(&password), CANARY[0]);
    assert_eq!(files_with(&node.path(""), &texts), [""; 0].map(PathBuf::from));
    for command in [&["events", "-o", "json"][..], &["status", "-o", "json"], &["offline", "list"]] {
        let output = node.cli(command);
        assert!(texts.iter().all(|text| !output.contains(text)), "{command:?}: {output}");
    }
    node.api().go_up();
    wait_phase(&node, "online");
    node.finish();
}

/// A check names what a start would lack; what is purged is gone, and the pod continues.
#[test]
fn check_follows_what_is_stored_and_purged() {
    let mut node = joined(json!({}));
    run_pods(&node, &["web"]);
    wait_stored(&node, 1);
    let check = || node.command(&["offline", "check", "-o", "json"]);
    wait_until("the pod to be complete in the store", LONG, || check().status.success());
    let running = container_id(&node.wait_ready("web"), "main");
    let list = node.cli(&["offline", "list", "-o", "json"]);
    let report: Value = serde_json::from_str(&list).unwrap();
    let entry = |kind: &str, name: &str| {
        let mut entries = report["stored"].as_array().unwrap().iter();
        entries.find(|entry| entry["kind"] == kind && entry["name"] == name).cloned().unwrap_or_default()
    };
    assert_eq!(entry("secret", "default/login")["sealed"], true, "{list}");
    assert_eq!(entry("configmap", "default/settings")["sealed"], false, "{list}");
    assert_eq!(entry("node", NODE)["usable"], true, "{list}");
    assert!(CANARY.iter().all(|text| !list.contains(text)), "{list}");

    node.cli(&["offline", "purge", "secret/default/login"]);
    let output = check();
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["pods"][0]["missing"], json!(["secret default/login: not stored"]), "{report}");
    let again = node.command(&["offline", "purge", "secret/default/login"]);
    assert_eq!(again.status.code(), Some(5), "{again:?}");

    let key = || fs::read(node.root().join("offline/key")).unwrap();
    let former = key();
    node.cli(&["offline", "purge", "--all", "--yes"]);
    assert_ne!(key(), former);
    assert_eq!(container_id(&node.wait_ready("web"), "main"), running);
    // The API server sends all objects to the next agent.
    node.stop_agent();
    node.start_agent();
    wait_stored(&node, 1);
    wait_until("the pod to be complete again", LONG, || {
        node.command(&["offline", "check", "web"]).status.success()
    });
    node.finish();
}

/// The control plane has a new authority, which the kubeconfig does not name.
#[test]
fn trusted_authority_brings_the_api_server_back_and_survives_a_restart() {
    let mut node = FakeNode::prepare(json!({}));
    let api = FakeApi::start();
    let front = TlsFront::before(api.port);
    let former = node.path("ca.pem");
    fs::write(&former, Authority::new().pem()).unwrap();
    node.join_cluster(api, json!({"server": front.url(), "certificate-authority": former}));
    node.add_flags(&["--offline", "--offline-wait=1s"]);
    node.start_agent();
    wait_until("the remedy to be named", LONG, || {
        let output = node.command(&["status"]);
        String::from_utf8_lossy(&output.stdout).contains("coracle offline trust FILE")
    });
    let trust = |node: &FakeNode, pem: &str| {
        let file = node.path("new.pem");
        fs::write(&file, pem).unwrap();
        node.command(&["offline", "trust", &file.to_string_lossy()])
    };
    // An authority that has not signed the server's certificate, and no authority at all.
    for wrong in [Authority::new().pem(), "text".to_owned()] {
        let output = trust(&node, &wrong);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
    }
    assert!(!node.node_is_ready() && !node.root().join("offline/authorities.pem").exists());
    let output = trust(&node, &front.authority());
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("\"fake-api\" (SHA-256 "), "{output:?}");
    wait_until("the node to be ready", LONG, || node.node_is_ready());
    // Before, the threads of the watches were perhaps not there.
    node.measure();
    assert_eq!(status(&node)["offline"]["trusted"].as_array().map(Vec::len), Some(1));

    node.stop_agent();
    node.start_agent();
    node.bind(&simple("web"));
    node.wait_ready("web");
    node.cli(&["offline", "trust", "--remove"]);
    assert_eq!(status(&node)["offline"]["trusted"], Value::Null);
    node.finish();
}

#[test]
fn agent_without_the_flag_stores_nothing_and_has_no_thread() {
    let node = FakeNode::join(json!({}));
    run_pods(&node, &["web"]);
    let report = status(&node);
    let threads = report["threads"].as_array().unwrap();
    assert!(!threads.is_empty() && threads.iter().all(|thread| thread["name"] != "offline"), "{report}");
    assert_eq!(report["offline"], Value::Null);
    assert!(!node.root().join("offline").exists());
    let output = node.command(&["offline", "list"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), error.contains("without --offline")), (Some(5), true), "{error}");
    node.finish();
}

/// A list that ends after one of two pods, and errors after it, are no complete list.
#[test]
fn partial_lists_and_errors_stop_no_pod() {
    let mut node = joined(json!({}));
    run_pods(&node, &["web", "other"]);
    wait_stored(&node, 2);
    let running = |node: &FakeNode| (node.running("web"), node.running("other"));
    let before = running(&node);
    let shown = node.api().object(&FakeNode::pod_path("web")).unwrap();
    let line = json!({"type": "ADDED", "object": shown});
    let lists = |node: &FakeNode| {
        let requests = node.api().received();
        requests.iter().filter(|request| request.method == "GET" && request.path() == "/api/v1/pods").count()
    };
    let error = FaultResponse::Status(500, "InternalError", None);
    node.api().fault(Fault::once("GET", "/api/v1/pods?", FaultResponse::HalfLine(format!("{line}\n"))));
    node.api().fault(Fault::always("GET", "/api/v1/pods?", error));
    let earlier = lists(&node);
    // The watch ends with an error, so that a list follows.
    node.api().compact();
    wait_until("a partial list and errors", LONG, || lists(&node) >= earlier + 3);
    assert_eq!(running(&node), before);
    assert_eq!(status(&node)["offline"]["phase"], "online");

    // Errors at a start are as no response.
    node.stop_agent();
    node.start_agent();
    wait_phase(&node, "alone");
    node.wait_ready("web");
    node.wait_ready("other");
    assert_eq!(running(&node), before);
    node.api().clear_faults();
    wait_phase(&node, "online");
    node.bind(&simple("late"));
    node.wait_ready("late");
    assert_eq!(running(&node), before);
    node.finish();
}

/// After a kill at any moment of a write, each stored object is the one before or the one after.
#[test]
fn stored_objects_are_whole_after_kills_at_any_moment() {
    /// A digit three times, and its base64.
    const ROUNDS: [(&str, &str); 6] = [
        ("111", "MTEx"),
        ("222", "MjIy"),
        ("333", "MzMz"),
        ("444", "NDQ0"),
        ("555", "NTU1"),
        ("666", "NjY2"),
    ];
    const TIMES: usize = 50_000;
    let mut node = joined(json!({}));
    run_pods(&node, &["web"]);
    wait_stored(&node, 1);
    let seed = random_seed();
    eprintln!("seed {seed}");
    let mut random = Random::new(seed);
    for (text, base64) in ROUNDS {
        node.api().put(SETTINGS, settings(&text.repeat(TIMES)));
        node.api().put(LOGIN, json!({"type": "Opaque", "data": {"pw": base64.repeat(TIMES)}}));
        pause(Duration::from_millis(random.below(400)));
        node.kill_agent();
        node.start_agent();
        wait_phase(&node, "online");
    }
    let files =
        [volume(&node, "web", "configmap", "settings/text"), volume(&node, "web", "secret", "login/pw")];
    node.api().go_down();
    node.cut_power();
    node.start_agent();
    wait_phase(&node, "alone");
    node.wait_ready("web");
    let first = ["one", CANARY[0]];
    for (file, first) in files.iter().zip(first) {
        let content = read(file);
        let is_whole = content == first || ROUNDS.iter().any(|(text, _)| content == text.repeat(TIMES));
        assert!(is_whole, "{}: {} bytes, {:.9}", file.display(), content.len(), content);
    }
    let report = status(&node);
    assert_eq!(report["offline"]["problems"], json!([]), "{report}");
    let damaged = fs::read_dir(node.root().join("offline/damaged"));
    assert_eq!(damaged.into_iter().flatten().count(), 0);
    node.api().go_up();
    wait_phase(&node, "online");
    node.finish();
}

/// Waits for so many lists of pods, each of which is a turn of the agent.
fn wait_turns(node: &FakeNode, count: f64) {
    let lists = || node.metric("kubelet_pleg_relist_duration_seconds_count");
    let begin = lists();
    wait_until("turns of the agent", LONG, || lists() >= begin + count);
}

/// What the agent has written since its start: files, bytes and syncs. `None` while it does not respond.
fn written(node: &FakeNode) -> Option<[u64; 3]> {
    let report = status(node);
    let count = |field: &str| report["diskWrites"][field].as_u64();
    Some([count("files")?, count("bytes")?, count("syncs")?])
}

/// Waits until the agent, which lists all pods once a second, has written everything, also what it writes
/// at most once in ten seconds. Returns what it has written.
fn wait_written(node: &FakeNode) -> [u64; 3] {
    let mut last = written(node);
    wait_for("the agent to have written everything", LONG, || {
        wait_turns(node, 12.0);
        let before = std::mem::replace(&mut last, written(node));
        last.filter(|_| before == last)
    })
}

/// A new version of a pod without a new content, and turns without news, write nothing.
#[test]
fn idle_node_writes_no_stored_object() {
    let node = joined(json!({"featureGates": {"EventedPLEG": false}}));
    // No service: the services were written before the pods, and a new one is written a minute later.
    put_mounted_objects(&node);
    node.bind(&manifest("web"));
    node.wait_ready("web");
    wait_stored(&node, 1);
    let before = wait_written(&node);
    // The same content with another version.
    let object = node.api().object(&FakeNode::pod_path("web")).unwrap();
    node.api().put(&FakeNode::pod_path("web"), object);
    wait_turns(&node, 12.0);
    assert_eq!(written(&node), Some(before));
    node.finish();
}

/// Inode, time of the last change in seconds and nanoseconds, and size of each file of the store.
fn stored_files(node: &FakeNode) -> BTreeMap<String, [i64; 4]> {
    let files = fs::read_dir(node.root().join("offline")).into_iter().flatten().flatten();
    let stamp = |file: DirEntry| {
        let meta = fs::symlink_metadata(file.path()).ok()?;
        let [inode, size] = [meta.ino(), meta.size()].map(|number| i64::try_from(number).unwrap());
        Some((
            file.file_name().to_string_lossy().into_owned(),
            [inode, meta.mtime(), meta.mtime_nsec(), size],
        ))
    };
    files.filter_map(stamp).collect()
}

/// The kinds of the files that were added, replaced or removed: one for each file.
fn changed_kinds(before: &BTreeMap<String, [i64; 4]>, now: &BTreeMap<String, [i64; 4]>) -> Vec<String> {
    let names: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let changed = names.into_iter().filter(|name| before.get(*name) != now.get(*name));
    changed.map(|name| name.split('-').next().unwrap_or_default().to_owned()).collect()
}

/// The disk of a small machine wears out: what a pod costs that changes, is in docs/offline.md.
#[test]
fn each_change_of_a_pod_writes_one_file_and_a_status_of_other_clients_writes_none() {
    const CHANGES: u64 = 3;
    let node = joined(json!({"featureGates": {"EventedPLEG": false}}));
    // No service: the services were written before the pods, and a new one is written a minute later.
    put_mounted_objects(&node);
    ["web", "other"].iter().for_each(|name| node.bind(&manifest(name)));
    ["web", "other"].iter().for_each(|name| drop(node.wait_ready(name)));
    wait_stored(&node, 2);
    let path = FakeNode::pod_path("web");
    let begin = wait_written(&node);
    let mut last = begin;
    for change in 1..=CHANGES {
        let files = stored_files(&node);
        node.api().edit(&path, |pod| pod["metadata"]["labels"] = json!({"change": change.to_string()}));
        wait_until("the change to be stored", LONG, || written(&node).is_some_and(|now| now[2] > last[2]));
        last = wait_written(&node);
        assert_eq!(changed_kinds(&files, &stored_files(&node)), ["pod"], "change {change}");
    }
    let [files, bytes, syncs]: [u64; 3] = std::array::from_fn(|index| last[index] - begin[index]);
    assert_eq!((files, syncs), (CHANGES, 2 * CHANGES), "a file, which is synced with its directory");

    // What a controller writes into the status.
    let checked = json!({"type": "example.org/checked", "status": "True"});
    node.api().edit(&path, |pod| push(&mut pod["status"]["conditions"], checked));
    assert_eq!(wait_written(&node), last);

    // The container that ends and the next one may be two statuses.
    let before = stored_files(&node);
    starts::end_container(&node);
    let after = wait_written(&node);
    assert_eq!(changed_kinds(&before, &stored_files(&node)), ["podstatus"]);
    let restart = after[2] - last[2];
    assert!(restart == 2 || restart == 4, "{restart} syncs");
    print_line(&format!(
        "store: {} bytes and 2 syncs for each change of the labels of a pod; {} bytes and {restart} syncs for a \
         restart of its container",
        bytes / CHANGES,
        after[1] - last[1]
    ));
    node.finish();
}
