//! The state files of released versions: this build of the agent continues on each of them with the pods that
//! run, and starts the stored pods of each without the API server.
//!
//! `states/VERSION.tar.gz` is what the agent of a version had left when it was stopped: its root directory,
//! the manifests, the objects of the API server, and the records of the runtime. Certificates are not in it,
//! because they expire. `UPDATE_STATE=1 tests/run integration -- states::` writes the file of the version
//! of the agent that is tested, also of an older binary: `CORACLE_BINARY`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Map, Value, json};

use crate::support::fake_api::FakeApi;
use crate::support::fake_node::{FakeNode, LONG, binary};
use crate::support::node::{FOREVER, busybox, phase, pod, restarts, simple};
use crate::support::process_usage;
use crate::support::wait::wait_until;

/// Where every node of these tests is. The UID of a static pod depends on the path of its manifest, and
/// containers have mounts below the root directory.
const PLACE: &str = "/run/coracle-states/node";

/// In the archive: what the agent does not write.
const SURROUNDINGS: &str = "surroundings.json";

/// What the API server has that belongs to a state.
const COLLECTIONS: [&str; 4] = ["/api/v1/nodes", "/api/v1/pods", "/api/v1/configmaps", "/api/v1/secrets"];

const SETTINGS: &str = "/api/v1/namespaces/default/configmaps/settings";
const LOGIN: &str = "/api/v1/namespaces/default/secrets/login";
/// The value of the Secret, and as the API server has it.
const PASSWORD: [&str; 2] = ["open sesame", "b3BlbiBzZXNhbWU="];

/// Calls that start or end something.
const CHANGES: [&str; 4] = ["RunPodSandbox", "CreateContainer", "StartContainer", "StopContainer"];

/// The right to use [`PLACE`]; `None`: the directory is that of the machine.
fn turn() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    if std::env::var_os("E2E_DIR").is_none() {
        eprintln!("skipped: no namespace of its own; run through tests/run integration");
        return None;
    }
    Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/integration/states")
}

/// The versions with a state, and its file.
fn states() -> Vec<(String, PathBuf)> {
    let mut states: Vec<(String, PathBuf)> = fs::read_dir(directory())
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap())
        .filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            Some((name.strip_suffix(".tar.gz")?.to_owned(), entry.path()))
        })
        .collect();
    states.sort();
    assert!(!states.is_empty(), "no state in {}: UPDATE_STATE=1 writes one", directory().display());
    states
}

/// A node of a cluster with `--offline`, whose agent is about to start.
fn prepared() -> FakeNode {
    let place = Path::new(PLACE);
    // A test that failed may have left it.
    process_usage::unmount_below(place);
    let _ = fs::remove_dir_all(place);
    let (parent, name) = (place.parent().unwrap(), place.file_name().unwrap());
    fs::create_dir_all(parent).unwrap();
    let dir = tempfile::Builder::new().prefix(name).rand_bytes(0).tempdir_in(parent).unwrap();
    let mut node = FakeNode::prepare_in(dir, json!({}));
    let api = FakeApi::start();
    let cluster = json!({"server": api.url()});
    node.join_cluster(api, cluster);
    node.add_flags(&["--offline", "--offline-wait=1s"]);
    node
}

fn status(node: &FakeNode) -> Value {
    serde_json::from_slice(&node.command(&["status", "-o", "json"]).stdout).unwrap_or_default()
}

fn wait_phase(node: &FakeNode, phase: &str) {
    wait_until(&format!("the phase {phase}"), LONG, || status(node)["offline"]["phase"] == phase);
}

/// A static pod.
fn web() -> Value {
    let mut web = simple("web");
    web["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "scratch", "mountPath": "/scratch"}]);
    web["spec"]["volumes"] = json!([{"name": "scratch", "emptyDir": {}}]);
    web
}

/// A pod of the API server with resources, a ConfigMap and a Secret.
fn app() -> Value {
    let mut main = busybox("main", FOREVER);
    main["resources"] = json!({"requests": {"cpu": "10m", "memory": "8Mi"}, "limits": {"memory": "16Mi"}});
    main["env"] =
        json!([{"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "login", "key": "pw"}}}]);
    main["volumeMounts"] = json!([{"name": "settings", "mountPath": "/settings"}]);
    let mut app = pod("app", json!([main]));
    app["spec"]["volumes"] = json!([{"name": "settings", "configMap": {"name": "settings"}}]);
    app
}

/// A pod of the API server that has ended, and must not run again.
fn job() -> Value {
    let mut job = pod("job", json!([busybox("main", "exit 0")]));
    job["spec"]["restartPolicy"] = json!("Never");
    job
}

/// Starts the agent and all pods; stops the agent when everything is on the disk.
fn run_pods_and_stop(node: &mut FakeNode) {
    node.api().put(SETTINGS, json!({"data": {"text": "one"}}));
    node.api().put(LOGIN, json!({"type": "Opaque", "data": {"pw": PASSWORD[1]}}));
    node.apply(&web());
    node.start_agent();
    wait_until("the node to be ready at the API server", LONG, || node.node_is_ready());
    node.bind(&app());
    node.bind(&job());
    node.wait_ready("web");
    node.wait_ready("app");
    wait_until("the job to be done", LONG, || {
        node.shown("job").is_some_and(|pod| phase(&pod) == "Succeeded")
    });
    wait_until("the objects to be stored", LONG, || {
        let objects = &status(node)["offline"]["objects"];
        let has = |kind: &str, number: u64| objects[kind].as_u64().unwrap_or(0) >= number;
        has("node", 1) && has("pod", 2) && has("podstatus", 2) && has("configmap", 1) && has("secret", 1)
    });
    node.stop_agent();
}

/// The path of an object that a collection has.
fn path_of(collection: &str, object: &Value) -> String {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    let (namespace, name) = (text("namespace"), text("name"));
    if namespace.is_empty() {
        return format!("{collection}/{name}");
    }
    let plural = collection.trim_start_matches("/api/v1/");
    format!("/api/v1/namespaces/{namespace}/{plural}/{name}")
}

/// Writes the state of a node whose agent has been stopped.
fn save(node: &FakeNode, file: &Path) {
    let mut objects = Map::new();
    for collection in COLLECTIONS {
        for mut object in node.api().objects(collection) {
            // What identifies the machine that made the file is no concern of the tests.
            if let Some(info) = object.pointer_mut("/status/nodeInfo").and_then(Value::as_object_mut) {
                for field in ["bootID", "kernelVersion", "machineID", "osImage", "systemUUID"] {
                    info.insert(field.to_owned(), Value::from("test"));
                }
            }
            objects.insert(path_of(collection, &object), object);
        }
    }
    let records = node.fake.with_state(|state| state.records());
    let surroundings = json!({"objects": objects, "runtime": records});
    fs::write(node.path(SURROUNDINGS), surroundings.to_string()).unwrap();
    process_usage::unmount_below(&node.root());
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "-czf"]).arg(file);
    tar.arg("-C").arg(PLACE).args([SURROUNDINGS, "manifests", "root"]);
    assert!(tar.status().unwrap().success());
}

/// Gives a prepared node a state.
fn restore(node: &FakeNode, file: &Path) {
    let mut tar = Command::new("tar");
    tar.arg("-xpzf").arg(file).arg("-C").arg(PLACE);
    assert!(tar.status().unwrap().success());
    let surroundings: Value = serde_json::from_slice(&fs::read(node.path(SURROUNDINGS)).unwrap()).unwrap();
    for (path, object) in surroundings["objects"].as_object().unwrap() {
        node.api().put(path, object.clone());
    }
    node.fake.with_state(|state| state.add_records(&surroundings["runtime"]));
}

/// The ids of the containers of a pod, also of those that have ended.
fn ids(node: &FakeNode, pod: &str) -> BTreeSet<String> {
    node.containers(pod).into_iter().map(|container| container.status.id).collect()
}

fn assert_no_file_was_unusable(node: &FakeNode, version: &str) {
    let names = |directory: &Path| -> Vec<String> {
        let entries = fs::read_dir(directory).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    };
    let events = node.cli(&["events"]);
    assert!(!events.contains("UnusableStateFile"), "{version}: {events}");
    let mut unusable = names(&node.root());
    unusable.extend(names(&node.root().join("device-plugins")));
    unusable.retain(|name| name.ends_with(".unusable"));
    unusable.extend(names(&node.root().join("offline/damaged")));
    assert!(unusable.is_empty(), "{version}: {unusable:?}");
}

/// Starts the agent with the pods of a state, and asserts that they continue.
fn assert_continues(node: &mut FakeNode, version: &str) {
    let running = [node.running("web"), node.running("app")];
    assert!(running.iter().all(|pod| pod.len() == 1), "{version}: {running:?}");
    node.fake.clear_journal();
    node.start_agent();
    wait_phase(node, "online");
    for name in ["web", "app"] {
        node.assert_runs_once(name, &["main"]);
        let pod = node.wait_ready(name);
        assert_eq!(restarts(&pod, "main"), 0, "{version}: {name}");
    }
    assert_eq!([node.running("web"), node.running("app")], running, "{version}");
    assert!(
        node.shown("job").is_some_and(|pod| phase(&pod) == "Succeeded"),
        "{version}: the job has another status"
    );
    let calls = node.fake.calls();
    assert!(!calls.iter().any(|call| CHANGES.contains(call)), "{version}: {calls:?}");
    assert_no_file_was_unusable(node, version);
}

#[test]
fn agent_continues_all_pods_on_the_state_of_each_version() {
    let Some(_turn) = turn() else { return };
    for (version, file) in states() {
        let mut node = prepared();
        restore(&node, &file);
        assert_continues(&mut node, &version);
        // It can end them, too.
        node.remove("web");
        node.api().delete_pod(&FakeNode::pod_path("app"));
        node.wait_gone("web", LONG);
        node.wait_gone("app", LONG);
        node.stop_agent();
    }
}

#[test]
fn stored_pods_of_each_version_start_without_the_api_server() {
    let Some(_turn) = turn() else { return };
    for (version, file) in states() {
        let mut node = prepared();
        restore(&node, &file);
        let before = ids(&node, "job");
        assert!(!before.is_empty(), "{version}: the state has no container of the job");
        node.api().go_down();
        node.cut_power();
        node.start_agent();
        wait_phase(&node, "alone");
        node.wait_ready("web");
        node.wait_ready("app");
        let app = node.containers("app").into_iter().rfind(|container| container.is_running()).unwrap();
        let password = app.config.envs.iter().find(|variable| variable.key == "PASSWORD").unwrap();
        assert_eq!(String::from_utf8_lossy(&password.value), PASSWORD[0], "{version}: the sealed Secret");
        assert!(ids(&node, "job").is_subset(&before), "{version}: the job runs again");
        assert_no_file_was_unusable(&node, &version);
        node.stop_agent();
    }
}

/// `FORMER_BINARY` is the program of the release before (`docs/releases.md`).
#[test]
fn former_agent_continues_all_pods_on_the_state_of_this_version() {
    let Some(former) = std::env::var_os("FORMER_BINARY") else {
        eprintln!("skipped: FORMER_BINARY names no agent");
        return;
    };
    let Some(_turn) = turn() else { return };
    let mut node = prepared();
    run_pods_and_stop(&mut node);
    node.use_program(former.into());
    assert_continues(&mut node, "rolled back");
    node.stop_agent();
    node.use_program(binary());
    assert_continues(&mut node, "upgraded again");
    node.stop_agent();
}

/// The version that a program prints: `coracle 0.2.0 (Kubernetes 1.37.2)`.
fn version_of(program: &Path) -> String {
    let output = Command::new(program).arg("--version").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split(' ').nth(1).expect("a version").to_owned()
}

/// The newest section may be of a version that is still made. With `UPDATE_STATE`, the state of the tested
/// agent is written.
#[test]
fn each_released_version_has_a_state() {
    if std::env::var_os("UPDATE_STATE").is_some() {
        let Some(_turn) = turn() else { return };
        let mut node = prepared();
        run_pods_and_stop(&mut node);
        save(&node, &directory().join(format!("{}.tar.gz", version_of(&binary()))));
    }
    let changelog = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("CHANGELOG.md")).unwrap();
    let sections = changelog.lines().filter_map(|line| line.strip_prefix("## "));
    let released: Vec<&str> = sections.filter_map(|line| line.split(' ').next()).skip(1).collect();
    assert!(!released.is_empty(), "CHANGELOG.md has no sections of versions");
    let states = states();
    for version in released {
        assert!(states.iter().any(|(name, _)| name == version), "there is no state of {version}");
    }
}
