//! The connections of a node to its API server, and what arrives without a watch.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::fake_api::ReceivedRequest;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, NODE, busybox, pod};
use crate::support::wait::wait_until;

const SETTINGS: &str = "/api/v1/namespaces/default/configmaps/settings";
const AUTHORITIES: &str = "/api/v1/namespaces/default/configmaps/kube-root-ca.crt";

/// The connections of a node at rest: the watches of its pods, of its Node and of services, and one for
/// requests.
const AT_REST: usize = 4;

fn settings(text: &str) -> Value {
    json!({"data": {"text": text}})
}

/// A pod with a ConfigMap and the volume of a service account.
fn manifest(name: &str) -> Value {
    let mut main = busybox("main", FOREVER);
    main["volumeMounts"] = json!([{"name": "settings", "mountPath": "/settings"},
        {"name": "access", "mountPath": "/access"}]);
    let mut web = pod(name, json!([main]));
    web["spec"]["serviceAccountName"] = json!("default");
    web["spec"]["volumes"] = json!([
        {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "access", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
            {"configMap": {"name": "kube-root-ca.crt"}}]}},
    ]);
    web
}

/// A file of the volume `settings` of a pod.
fn text_file(node: &FakeNode, pod: &str) -> PathBuf {
    let uid = node.api().object(&FakeNode::pod_path(pod)).expect("the API server has the pod");
    let uid = uid["metadata"]["uid"].as_str().expect("it has a UID").to_owned();
    node.root().join("pods").join(uid).join("volumes/kubernetes.io~configmap/settings/text")
}

fn put_objects(node: &FakeNode) {
    node.api().put(SETTINGS, settings("one"));
    node.api().put(AUTHORITIES, json!({"data": {"ca.crt": "authority"}}));
}

/// The collections that were watched, each once.
fn watched(node: &FakeNode) -> Vec<String> {
    let requests = node.api().received();
    let mut paths: Vec<String> =
        requests.iter().filter(|request| request.is_watch()).map(ReceivedRequest::path).collect();
    paths.sort_unstable();
    paths.dedup();
    paths
}

fn wait_rest(node: &FakeNode, connections: usize) {
    wait_until(&format!("{connections} connections"), LONG, || node.api().connections() == connections);
}

#[test]
fn node_has_four_connections_at_rest_also_with_pods_if_objects_are_not_watched() {
    // The lease is renewed every two seconds, also to use idle connections.
    let config = json!({"nodeLeaseDurationSeconds": 8, "configMapAndSecretChangeDetectionStrategy": "Cache"});
    let node = FakeNode::join(config);
    let own = ["/api/v1/nodes", "/api/v1/pods", "/api/v1/services"];
    wait_until("the watches", LONG, || watched(&node) == own);
    wait_rest(&node, AT_REST);
    put_objects(&node);
    for name in ["web", "other"] {
        node.bind(&manifest(name));
    }
    for name in ["web", "other"] {
        node.wait_ready(name);
        assert_eq!(fs::read_to_string(text_file(&node, name)).unwrap(), "one");
    }
    wait_rest(&node, AT_REST);
    assert_eq!(watched(&node), own);
    node.finish();
}

#[test]
fn watched_object_costs_one_connection_and_the_authorities_of_the_cluster_none() {
    let node = FakeNode::join(json!({"nodeLeaseDurationSeconds": 8}));
    put_objects(&node);
    node.bind(&manifest("web"));
    node.wait_ready("web");
    wait_rest(&node, AT_REST + 1);
    let expected =
        ["/api/v1/namespaces/default/configmaps", "/api/v1/nodes", "/api/v1/pods", "/api/v1/services"];
    assert_eq!(watched(&node), expected);
    let requests = node.api().received();
    assert_eq!(requests.iter().filter(|request| request.path() == AUTHORITIES).count(), 1);
    node.finish();
}

#[test]
fn edited_object_that_is_not_watched_arrives_within_the_time_to_live_of_the_node() {
    let node =
        FakeNode::join(json!({"syncFrequency": "1s", "configMapAndSecretChangeDetectionStrategy": "Cache"}));
    put_objects(&node);
    let path = format!("/api/v1/nodes/{NODE}");
    let mut own = node.api().object(&path).expect("the node is registered");
    own["metadata"]["annotations"]["node.alpha.kubernetes.io/ttl"] = json!("0");
    node.api().put(&path, own);
    node.bind(&manifest("web"));
    node.wait_ready("web");
    node.api().put(SETTINGS, settings("two"));
    let file = text_file(&node, "web");
    wait_until("the edited ConfigMap", LONG, || fs::read_to_string(&file).is_ok_and(|text| text == "two"));
    node.finish();
}
