//! The connections of a node to its API server, the bytes on them, and what arrives without a watch.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::fake_api::{FakeApi, Fault, FaultResponse, ReceivedRequest};
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, NODE, busybox, pod};
use crate::support::relay::{Relay, Traffic};
use crate::support::wait::{wait_for, wait_until};

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

/// A renewal of the lease with its response, in bytes of HTTP to and from the API server.
const RENEWAL: (u64, u64) = (580, 350);
/// The life of a pod from its creation to the end of its object, with events, statuses, a token and the
/// changes that the watch of pods shows: 10 and 27 kB in 13 requests, and on a slow machine another status.
const LIFE: (u64, u64) = (13_000, 35_000);
/// The requests in [`LIFE`], and the most on a machine that is so slow that there are further statuses.
const LIFE_REQUESTS: (usize, usize) = (14, 16);
/// A further status, whose response and change have the whole pod.
const STATUS: (u64, u64) = (1_500, 7_000);

/// Requests that renew the lease, and all others.
fn renewals_and_others(node: &FakeNode) -> (usize, usize) {
    let requests = node.api().received();
    let renewals = requests.iter().filter(|request| request.path().contains("/leases/")).count();
    (renewals, requests.len() - renewals)
}

#[test]
fn renewals_and_the_life_of_a_pod_take_few_bytes_and_requests() {
    let api = FakeApi::start();
    let relay = Relay::start(SocketAddr::from((Ipv4Addr::LOCALHOST, api.port)), 1);
    let mut node = FakeNode::prepare(json!({"nodeLeaseDurationSeconds": 8}));
    node.join_cluster(api, json!({"server": format!("http://127.0.0.1:{}", relay.port(0))}));
    let node = node.start_joined();
    put_objects(&node);
    wait_rest(&node, AT_REST);
    let sample = || (relay.traffic(0), renewals_and_others(&node));
    // Bytes of both directions without those of renewals, of which one may be half counted at both ends.
    let used = |before: (Traffic, (usize, usize)), after: (Traffic, (usize, usize))| {
        let renewals = (after.1.0 - before.1.0 + 1) as u64;
        let sent = after.0.to_server - before.0.to_server;
        let received = after.0.to_client - before.0.to_client;
        (sent.saturating_sub(renewals * RENEWAL.0), received.saturating_sub(renewals * RENEWAL.1))
    };

    // The start may still send events and statuses.
    let (before, after) = wait_for("a time with nothing but renewals", LONG, || {
        let (renewals, others) = renewals_and_others(&node);
        // Until then the responses to the others have passed, and the changes that a watch shows of them.
        wait_until("two renewals", LONG, || renewals_and_others(&node).0 >= renewals + 2);
        let before = sample();
        wait_until("three renewals", LONG, || renewals_and_others(&node).0 >= before.1.0 + 3);
        let after = sample();
        (after.1.1 == others).then_some((before, after))
    });
    println!("at rest: {before:?}, {after:?}");
    assert_eq!(used(before, after), (0, 0), "{before:?}, {after:?}");

    let before = sample();
    node.bind(&manifest("web"));
    node.wait_ready("web");
    node.api().delete_pod(&FakeNode::pod_path("web"));
    wait_until("the end of the object", LONG, || node.api().object(&FakeNode::pod_path("web")).is_none());
    node.wait_gone("web", LONG);
    let after = sample();
    let (sent, received) = used(before, after);
    println!("a pod: {before:?}, {after:?}, {sent} and {received} bytes");
    let requests = after.1.1 - before.1.1;
    assert!(requests <= LIFE_REQUESTS.1, "{requests} requests: {before:?}, {after:?}");
    let further = requests.saturating_sub(LIFE_REQUESTS.0) as u64;
    let limits = (LIFE.0 + further * STATUS.0, LIFE.1 + further * STATUS.1);
    assert!(sent <= limits.0 && received <= limits.1, "{sent} and {received} bytes in {requests} requests");
    node.finish();
}

/// Requests that update the lease, with a body of this content type.
fn is_renewal(request: &ReceivedRequest, content_type: &str) -> bool {
    request.method == "PUT"
        && request.path().contains("/leases/")
        && request.header("content-type") == content_type
}

#[test]
fn lease_is_renewed_in_protocol_buffers_and_in_json_after_the_server_has_refused_them() {
    const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
    const JSON: &str = "application/json";
    let lease = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{NODE}");
    let node = FakeNode::join(json!({"nodeLeaseDurationSeconds": 8}));
    node.api().wait_for(2, |request| is_renewal(request, PROTOBUF));

    // Another client changes the lease: the response to the next renewal is a conflict, also in Protocol Buffers.
    // Without its reason the same update would be repeated five times before the lease is read.
    let label = json!({"a": "b"});
    let before = node.api().requests();
    let mut edited = Value::Null;
    node.api().edit(&lease, |lease| {
        lease["metadata"]["labels"] = label.clone();
        edited = lease.clone();
    });
    wait_until("the renewal of the edited lease", LONG, || {
        node.api().object(&lease).is_some_and(|now| now["spec"]["renewTime"] != edited["spec"]["renewTime"])
    });
    let requests = node.api().received().split_off(before);
    let mut of_lease = requests.iter().filter(|request| request.path() == lease);
    let updates = of_lease.position(|request| request.method == "GET");
    assert!(updates.is_some_and(|updates| updates < 5), "{requests:#?}");
    let renewed = node.api().object(&lease).expect("the lease exists");
    assert_eq!(renewed["metadata"]["labels"], label);
    assert_eq!(renewed["metadata"]["ownerReferences"], edited["metadata"]["ownerReferences"]);

    let refusal = FaultResponse::Status(415, "UnsupportedMediaType", None);
    node.api().fault(Fault::once("PUT", "/leases/", refusal));
    node.api().wait_for(3, |request| is_renewal(request, JSON));
    let requests = node.api().received();
    let first = requests.iter().position(|request| is_renewal(request, JSON)).expect("it was waited for");
    for request in requests[first..].iter().filter(|request| request.path() == lease) {
        assert!(request.header("accept") == JSON && !is_renewal(request, PROTOBUF), "{request:?}");
    }
    let renewed = node.api().object(&lease).expect("the lease exists");
    assert_eq!(renewed["metadata"]["labels"], label);
    node.finish();
}
