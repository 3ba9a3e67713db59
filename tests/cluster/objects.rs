//! configMaps, secrets, tokens and services in volumes and environments.

use serde_json::{Value, json};

use crate::joined::{Joined, LIMIT, pod, text};
use crate::support::node::{FOREVER, busybox};
use crate::support::wait::wait_until;

fn id_of(pod: &Value, container: &str) -> String {
    let statuses = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
    let found = statuses.iter().find(|one| one["name"] == container);
    let full = found.map(|one| text(one, "/containerID").to_owned()).unwrap_or_default();
    full.split_once("://").map_or(full.clone(), |(_, id)| id.to_owned())
}

fn object(kind: &str, name: &str, field: &str, data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "default"}, field: data})
}

#[test]
fn objects_reach_volumes_and_environments_and_edits_follow() {
    let joined = Joined::start("objs");
    joined.plane.apply(&object(
        "ConfigMap",
        "objs-cm",
        "data",
        json!({"k1": "one", "k2": "two", "not.a.name-": "x"}),
    ));
    joined.plane.apply(&object("Secret", "objs-secret", "stringData", json!({"pw": "swordfish"})));
    let mut main = busybox("main", FOREVER);
    main["env"] = json!([
        {"name": "K1", "valueFrom": {"configMapKeyRef": {"name": "objs-cm", "key": "k1"}}},
        {"name": "PW", "valueFrom": {"secretKeyRef": {"name": "objs-secret", "key": "pw"}}},
        {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "objs-none", "key": "k", "optional": true}}},
    ]);
    main["envFrom"] = json!([{"prefix": "P_", "configMapRef": {"name": "objs-cm"}}]);
    main["volumeMounts"] = json!([
        {"name": "cm", "mountPath": "/cm"}, {"name": "secret", "mountPath": "/secret"},
        {"name": "all", "mountPath": "/all"}, {"name": "cm", "mountPath": "/one", "subPath": "k1"},
    ]);
    let mut web = pod("objs-web", json!([main]));
    web["spec"]["volumes"] = json!([
        {"name": "cm", "configMap": {"name": "objs-cm"}},
        {"name": "secret", "secret": {"secretName": "objs-secret", "defaultMode": 0o400}},
        {"name": "all", "projected": {"sources": [
            {"configMap": {"name": "objs-cm", "items": [{"key": "k2", "path": "deep/two"}]}},
            {"secret": {"name": "objs-secret"}},
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 600, "audience": "test"}},
            {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        ]}},
    ]);
    joined.bind(&web);
    let ready = joined.wait_ready("objs-web");
    let id = id_of(&ready, "main");
    let sh = |script: &str| joined.node.exec(&id, &["sh", "-c", script]);
    assert_eq!(sh("echo $K1-$PW-$NONE-$P_k2"), "one-swordfish--two\n");
    assert_eq!(
        sh("cat /cm/k1 /secret/pw /all/deep/two /all/pw /all/name /one"),
        "oneswordfishtwoswordfishobjs-webone"
    );
    assert_eq!(sh("stat -Lc %a /secret/pw"), "400\n");
    assert_eq!(sh("grep -c ' /secret tmpfs ' /proc/mounts"), "1\n");
    assert_eq!(sh("tr -dc . < /all/token"), "..", "a token has three parts");
    assert_eq!(sh("ls /var/run/secrets/kubernetes.io/serviceaccount"), "ca.crt\nnamespace\ntoken\n");
    assert!(!sh("echo $KUBERNETES_SERVICE_HOST").trim().is_empty());

    joined.plane.kubectl(&["patch", "configmap", "objs-cm", "-p", r#"{"data":{"k1":"changed"}}"#]);
    wait_until("the edit to arrive", LIMIT, || sh("cat /cm/k1") == "changed");
    assert_eq!(sh("cat /one"), "one", "a sub path stays as it was mounted");
    joined.finish(&["objs-web"]);
}

#[test]
fn what_is_missing_is_named_and_waited_for() {
    let joined = Joined::start("miss");
    let mut volume = pod("miss-volume", json!([busybox("main", FOREVER)]));
    volume["spec"]["volumes"] = json!([{"name": "cm", "configMap": {"name": "miss-cm"}}]);
    volume["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "cm", "mountPath": "/cm"}]);
    let mut env = pod("miss-env", json!([busybox("main", FOREVER)]));
    env["spec"]["containers"][0]["env"] =
        json!([{"name": "K", "valueFrom": {"secretKeyRef": {"name": "miss-secret", "key": "k"}}}]);
    joined.bind(&volume);
    joined.bind(&env);
    let told = |pod: &str, reason: &str, part: &str| {
        joined.events(pod).iter().any(|(one, message)| one == reason && message.contains(part))
    };
    wait_until("the volume's event", LIMIT, || {
        told("miss-volume", "FailedMount", "configmap \"miss-cm\" not found")
    });
    let waiting = joined.wait_pod("miss-env", "refused by its environment", |pod| {
        text(pod, "/status/containerStatuses/0/state/waiting/reason") == "CreateContainerConfigError"
    });
    let message = text(&waiting, "/status/containerStatuses/0/state/waiting/message");
    assert_eq!(message, "secret \"miss-secret\" not found");
    joined.plane.apply(&object("ConfigMap", "miss-cm", "data", json!({"k": "v"})));
    joined.plane.apply(&object("Secret", "miss-secret", "stringData", json!({"k": "v"})));
    joined.wait_ready("miss-volume");
    joined.wait_ready("miss-env");
    joined.finish(&["miss-volume", "miss-env"]);
}
