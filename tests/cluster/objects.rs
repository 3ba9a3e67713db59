//! configMaps, secrets, tokens and services in volumes and environments.

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, directory, pod, text};
use crate::support::node::{FOREVER, busybox};
use crate::support::registry::{Registry, base64};
use crate::support::wait::{holds_for, wait_until};

fn id_of(pod: &Value, container: &str) -> String {
    let statuses = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
    let found = statuses.iter().find(|status| status["name"] == container);
    let full = found.map(|status| text(status, "/containerID").to_owned()).unwrap_or_default();
    full.split_once("://").map_or(full.clone(), |(_, id)| id.to_owned())
}

fn object(kind: &str, name: &str, field: &str, data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "default"}, field: data})
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn objects_appear_in_volumes_and_environments_and_edits_are_applied() {
    let joined = JoinedNode::start("objs");
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

// Runtimes: containerd 2.
#[test]
fn missing_objects_are_reported_and_pods_wait_for_them() {
    let joined = JoinedNode::start("miss");
    let mut volume = pod("miss-volume", json!([busybox("main", FOREVER)]));
    volume["spec"]["volumes"] = json!([{"name": "cm", "configMap": {"name": "miss-cm"}}]);
    volume["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "cm", "mountPath": "/cm"}]);
    let mut env = pod("miss-env", json!([busybox("main", FOREVER)]));
    env["spec"]["containers"][0]["env"] =
        json!([{"name": "K", "valueFrom": {"secretKeyRef": {"name": "miss-secret", "key": "k"}}}]);
    joined.bind(&volume);
    joined.bind(&env);
    let has_event = |pod: &str, reason: &str, part: &str| {
        joined
            .events(pod)
            .iter()
            .any(|(event_reason, message)| event_reason == reason && message.contains(part))
    };
    wait_until("the volume's event", LIMIT, || {
        has_event("miss-volume", "FailedMount", "configmap \"miss-cm\" not found")
    });
    joined.wait_pod("miss-env", "refused by its environment", |pod| {
        let waiting = |field| text(pod, &format!("/status/containerStatuses/0/state/waiting/{field}"));
        // Before the secret's absence is known it is named as not read yet.
        waiting("reason") == "CreateContainerConfigError"
            && waiting("message") == "secret \"miss-secret\" not found"
    });
    joined.plane.apply(&object("ConfigMap", "miss-cm", "data", json!({"k": "v"})));
    joined.plane.apply(&object("Secret", "miss-secret", "stringData", json!({"k": "v"})));
    joined.wait_ready("miss-volume");
    joined.wait_ready("miss-env");
    joined.finish(&["miss-volume", "miss-env"]);
}

/// The TokenReview of a token.
fn review(joined: &JoinedNode<'_>, token: &str) -> Value {
    let body =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
    let path = "/apis/authentication.k8s.io/v1/tokenreviews";
    let output = joined.plane.try_kubectl(&["create", "--raw", path, "-f", "-"], &body.to_string());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice::<Value>(&output.stdout).expect("a TokenReview")["status"].clone()
}

/// The token in the file is valid, belongs to its pod alone, and becomes invalid with it.
// Runtimes: containerd 1, containerd 2.
#[test]
fn each_pod_has_its_own_token() {
    let joined = JoinedNode::start("token");
    let token = |name: &str| {
        let mut main = busybox("main", FOREVER);
        main["volumeMounts"] = json!([{"name": "token", "mountPath": "/t"}]);
        let mut pod = pod(name, json!([main]));
        pod["spec"]["volumes"] = json!([{"name": "token", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}}]}}]);
        joined.bind(&pod);
    };
    token("token-one");
    token("token-two");
    let pods = ["token-one", "token-two"].map(|name| joined.wait_ready(name));
    let tokens: Vec<String> =
        pods.iter().map(|pod| joined.node.exec(&id_of(pod, "main"), &["cat", "/t/token"])).collect();
    assert_ne!(tokens[0], tokens[1]);
    for (pod, token) in pods.iter().zip(&tokens) {
        let status = review(&joined, token);
        assert_eq!(status["authenticated"], json!(true), "{status}");
        assert_eq!(status["user"]["username"], "system:serviceaccount:default:default");
        let extra =
            |key: &str| status["user"]["extra"][format!("authentication.kubernetes.io/{key}")][0].clone();
        assert_eq!(extra("pod-name"), pod["metadata"]["name"]);
        assert_eq!(extra("pod-uid"), pod["metadata"]["uid"]);
        assert_eq!(extra("node-name"), "token");
    }
    // Requested for as long as the pod wants it, and no more often than there are tokens: one for
    // the account of each pod beside the one that it names.
    let expirations: Vec<Value> = joined
        .plane
        .requests()
        .into_iter()
        .filter(|request| text(request, "/user/username") == "system:node:token")
        .filter(|request| text(request, "/objectRef/subresource") == "token")
        .filter(|request| text(request, "/stage") == "ResponseComplete")
        // Requested at once, the API server may not know yet whose the pod is (403), or of the pod
        // itself (404, where another pod has the same account), and is asked again.
        .filter(|request| request["responseStatus"]["code"] == json!(201))
        .map(|request| request["requestObject"]["spec"]["expirationSeconds"].clone())
        .collect();
    assert_eq!(expirations.iter().filter(|seconds| **seconds == json!(600)).count(), 2, "{expirations:?}");
    assert_eq!(expirations.len(), 4, "{expirations:?}");

    joined.plane.kubectl(&["delete", "pod", "token-one", "--grace-period=1"]);
    wait_until("the token of a pod that has gone to be refused", LIMIT, || {
        review(&joined, &tokens[0])["authenticated"] != json!(true)
    });
    assert_eq!(review(&joined, &tokens[1])["authenticated"], json!(true));
    joined.finish(&["token-two"]);
}

/// An image that was pulled with the secret of one pod is on the node, but not for other pods.
// Runtimes: containerd 2.
#[test]
fn private_image_requires_its_pull_secret() {
    let joined = JoinedNode::start("priv");
    let registry = Registry::with_password(&directory("priv-images"), "user", "door");
    let auths = json!({"auths": {registry.host(): {"auth": base64(b"user:door")}}});
    joined.plane.apply(&json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "priv-pull", "namespace": "default"},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": auths.to_string()},
    }));
    let image = registry.image("priv");
    let with = |name: &str, policy: &str, secret: bool| {
        let mut main = busybox("main", FOREVER);
        main["image"] = json!(image);
        main["imagePullPolicy"] = json!(policy);
        let mut pod = pod(name, json!([main]));
        if secret {
            pod["spec"]["imagePullSecrets"] = json!([{"name": "priv-pull"}]);
        }
        joined.bind(&pod);
    };
    with("priv-one", "IfNotPresent", true);
    joined.wait_ready("priv-one");
    with("priv-none", "IfNotPresent", false);
    with("priv-never", "Never", false);
    with("priv-two", "IfNotPresent", true);
    let waiting = |name: &str, reasons: &[&str]| {
        joined.wait_pod(name, "refused its image", |pod| {
            reasons.contains(&text(pod, "/status/containerStatuses/0/state/waiting/reason"))
        });
    };
    joined.wait_ready("priv-two");
    waiting("priv-none", &["ErrImagePull", "ImagePullBackOff"]);
    waiting("priv-never", &["ErrImageNeverPull"]);
    holds_for("nothing else runs", std::time::Duration::from_secs(1), || {
        joined.node.running_ids().len() == 2
    });
    joined.finish(&["priv-one", "priv-none", "priv-never", "priv-two"]);
}
