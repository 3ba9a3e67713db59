//! Static pods with ConfigMaps and Secrets from files of the node.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, busybox, pod};
use crate::support::wait::wait_until;

/// A pod with a secret volume, and a variable of each kind.
fn manifest() -> Value {
    let mut main = busybox("main", FOREVER);
    main["env"] = json!([{"name": "PW", "valueFrom": {"secretKeyRef": {"name": "login", "key": "pw"}}}]);
    main["envFrom"] = json!([{"configMapRef": {"name": "settings"}}]);
    main["volumeMounts"] = json!([{"name": "login", "mountPath": "/login"}]);
    let mut web = pod("web", json!([main]));
    web["spec"]["volumes"] = json!([{"name": "login", "secret": {"secretName": "login"}}]);
    web
}

fn objects(password: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: settings\ndata:\n  COLOR: blue\n---\n\
         apiVersion: v1\nkind: Secret\nmetadata:\n  name: login\nstringData:\n  pw: {password}\n"
    )
}

/// Writes the file of objects as a tool does: whole, and for root only.
fn write(node: &FakeNode, text: &str) {
    let directory = node.root().join("local-objects");
    fs::create_dir_all(&directory).unwrap();
    let new = directory.join(".new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&new, directory.join("web.yaml")).unwrap();
}

fn variable(node: &FakeNode, id: &str, name: &str) -> Option<String> {
    let made = node.fake.containers().into_iter().find(|made| made.status.id == id)?;
    let env = made.config.envs.iter().find(|env| env.key == name)?;
    Some(String::from_utf8(env.value.clone()).unwrap())
}

fn running(node: &FakeNode) -> Option<String> {
    node.running("web").get("main")?.first().cloned()
}

fn volume_file(node: &FakeNode) -> PathBuf {
    let pod = node.pod("web").unwrap();
    let uid = pod.metadata.uid.unwrap();
    node.root().join("pods").join(uid).join("volumes/kubernetes.io~secret/login/pw")
}

#[test]
fn static_pod_gets_local_objects_and_their_updates() {
    let node = FakeNode::start();
    node.apply(&manifest());
    // Without its objects the pod waits.
    wait_until("the missing object to be reported", LONG, || {
        node.cli(&["events"]).contains("secret \"login\" not found")
    });
    write(&node, &objects("one"));
    node.wait_ready("web");
    let first = running(&node).unwrap();
    assert_eq!(variable(&node, &first, "PW").as_deref(), Some("one"));
    assert_eq!(variable(&node, &first, "COLOR").as_deref(), Some("blue"));
    let file = volume_file(&node);
    assert_eq!(fs::read_to_string(&file).unwrap(), "one");

    write(&node, &objects("two"));
    wait_until("the update to reach the volume", LONG, || {
        fs::read_to_string(&file).is_ok_and(|text| text == "two")
    });

    write(&node, &objects("[secret-value]"));
    wait_until("the broken file to be named", LONG, || {
        let status = node.cli(&["status"]);
        status.contains("web.yaml:13: stringData[pw]: Invalid value: want a string, found a list")
    });
    // The next container gets the values of the last valid version.
    assert!(node.fake.kill_container(&first, 1));
    wait_until("the container to restart", LONG, || running(&node).is_some_and(|id| id != first));
    let second = running(&node).unwrap();
    assert_eq!(variable(&node, &second, "PW").as_deref(), Some("two"));
    assert_eq!(fs::read_to_string(&file).unwrap(), "two");
    assert!(!node.log().contains("secret-value"), "{}", node.log());
    node.finish();
}

#[test]
fn mirror_of_a_pod_with_local_objects_names_none() {
    let node = FakeNode::prepare(json!({}));
    fs::create_dir_all(node.root()).unwrap();
    write(&node, &objects("one"));
    let node = node.start_joined();
    // Pods of the API server do not see local objects.
    let mut other = manifest();
    other["metadata"]["name"] = json!("other");
    node.bind(&other);
    node.apply(&manifest());
    node.wait_ready("web");
    wait_until("the mirror to exist", LONG, || node.shown("web").is_some());
    let mirror = serde_json::to_value(node.shown("web").unwrap().spec.unwrap()).unwrap();
    assert_eq!(mirror["volumes"], json!([{"name": "login", "emptyDir": {}}]));
    assert!(!mirror.to_string().contains("secretKeyRef") && !mirror.to_string().contains("settings"));
    wait_until("the other pod's missing object to be reported", LONG, || {
        let events: Value = serde_json::from_str(&node.cli(&["events", "-o", "json"])).unwrap();
        let text = events.to_string();
        text.contains("other") && text.contains("secret \\\"login\\\" not found")
    });
    assert!(node.running("other").is_empty());
    node.finish();
}
