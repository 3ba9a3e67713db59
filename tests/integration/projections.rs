//! Trust bundles and certificates of pods in projected volumes, on a node of a cluster.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::node::{FOREVER, NODE, busybox, pod};
use crate::support::wait::{wait_for, wait_until};

const BUNDLES: &str = "/apis/certificates.k8s.io/v1/clustertrustbundles";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/namespaces/default/podcertificaterequests";
/// An older version of the group.
const BETA: &str = "/apis/certificates.k8s.io/v1beta1";
const ACCOUNT: &str = "/api/v1/namespaces/default/serviceaccounts/default";

/// PEM of any bytes.
fn certificate(base64: &str) -> String {
    format!("-----BEGIN CERTIFICATE-----\n{base64}\n-----END CERTIFICATE-----\n")
}

fn manifest(sources: Value) -> Value {
    let mut main = busybox("main", FOREVER);
    main["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    let mut web = pod("web", json!([main]));
    web["metadata"]["uid"] = json!("0a1b2c3d-0000-4000-8000-000000000001");
    web["spec"]["serviceAccountName"] = json!("default");
    web["spec"]["volumes"] = json!([{"name": "v", "projected": {"defaultMode": 0o644, "sources": sources}}]);
    web
}

fn volume(node: &FakeNode) -> PathBuf {
    let uid = node.pod("web").unwrap().metadata.uid.unwrap();
    node.root().join("pods").join(uid).join("volumes/kubernetes.io~projected/v")
}

/// The request with this place in the order of creation.
fn request(node: &FakeNode, number: usize) -> Value {
    wait_for("the request for a certificate", LONG, || node.api().objects(REQUESTS).get(number).cloned())
}

/// Answers as a signer does.
fn issue(node: &FakeNode, request: &Value, leaf: &str) {
    issue_at(node, REQUESTS, request, leaf);
}

fn issue_at(node: &FakeNode, requests: &str, request: &Value, leaf: &str) {
    let mut issued = request.clone();
    issued["status"] = json!({
        "conditions": [{"type": "Issued", "status": "True", "reason": "Test", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        "certificateChain": format!("{}{}", certificate(leaf), certificate("aW50ZXJtZWRpYXRl")),
        "notBefore": "2026-01-01T00:00:00Z",
        "beginRefreshAt": "2998-01-01T00:00:00Z",
        "notAfter": "2999-01-01T00:00:00Z",
    });
    let name = request["metadata"]["name"].as_str().unwrap();
    node.api().put(&format!("{requests}/{name}"), issued);
}

#[test]
fn pod_waits_for_its_trust_bundles() {
    let node = FakeNode::join(json!({}));
    node.api().put(
        &format!("{BUNDLES}/x.org:ca:one"),
        json!({"metadata": {"name": "x.org:ca:one", "labels": {"env": "test"}},
            "spec": {"signerName": "x.org/ca", "trustBundle": certificate("b25l") + &certificate("dHdv")}}),
    );
    node.bind(&manifest(json!([
        {"clusterTrustBundle": {"name": "roots", "path": "named.pem"}},
        {"clusterTrustBundle": {"name": "none", "optional": true, "path": "none.pem"}},
        {"clusterTrustBundle": {"signerName": "x.org/ca", "labelSelector": {"matchLabels": {"env": "test"}}, "path": "signer.pem"}},
    ])));
    wait_until("the missing bundle to be reported", LONG, || {
        node.cli(&["events"]).contains("clustertrustbundle.certificates.k8s.io \"roots\" not found")
    });
    node.api().put(
        &format!("{BUNDLES}/roots"),
        json!({"metadata": {"name": "roots"}, "spec": {"trustBundle": certificate("cm9vdA==")}}),
    );
    node.wait_ready("web");
    let read = |name: &str| fs::read_to_string(volume(&node).join(name)).unwrap();
    assert_eq!(read("named.pem"), certificate("cm9vdA=="));
    assert_eq!(read("none.pem"), "");
    let both = read("signer.pem");
    let (first, second) = (certificate("b25l"), certificate("dHdv"));
    assert!(both == format!("{first}{second}") || both == format!("{second}{first}"), "{both}");
    node.finish();
}

#[test]
fn pod_gets_a_certificate_and_another_one_after_a_restart_of_the_agent() {
    let mut node = FakeNode::join(json!({}));
    node.api().put(ACCOUNT, json!({"metadata": {"name": "default", "namespace": "default"}}));
    let account = node.api().object(ACCOUNT).unwrap();
    node.bind(&manifest(json!([{"podCertificate": {"signerName": "x.org/signer", "keyType": "ECDSAP256",
        "credentialBundlePath": "bundle.pem", "keyPath": "key.pem", "certificateChainPath": "chain.pem"}}])));
    let first = request(&node, 0);
    let spec = &first["spec"];
    let created = node.api().received().into_iter().find(|sent| sent.path() == REQUESTS);
    assert_eq!(created.unwrap().body["apiVersion"], "certificates.k8s.io/v1");
    assert_eq!(spec["signerName"], "x.org/signer");
    assert_eq!((&spec["nodeName"], &spec["podName"]), (&json!(NODE), &json!(full_name("web"))));
    assert_eq!(spec["serviceAccountUID"], account["metadata"]["uid"]);
    assert_eq!(spec["podUID"], first["metadata"]["ownerReferences"][0]["uid"]);
    assert!(spec["stubPKCS10Request"].as_str().is_some_and(|text| !text.is_empty()));
    issue(&node, &first, "b25l");
    node.wait_ready("web");
    let states = node.metrics();
    let expected = r#"kubelet_podcertificate_states{signer_name="x.org/signer",state="fresh"} 1"#;
    assert!(states.contains(expected), "{states}");
    let read = |node: &FakeNode, name: &str| fs::read_to_string(volume(node).join(name)).unwrap_or_default();
    let (key, chain) = (read(&node, "key.pem"), read(&node, "chain.pem"));
    assert!(key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert_eq!(chain, certificate("b25l") + &certificate("aW50ZXJtZWRpYXRl"));
    assert_eq!(read(&node, "bundle.pem"), format!("{key}{chain}"));

    node.stop_agent();
    node.start_agent();
    let second = request(&node, 1);
    // The old files serve until the answer.
    assert_eq!(read(&node, "bundle.pem"), format!("{key}{chain}"));
    issue(&node, &second, "dHdv");
    wait_until("the new certificate", LONG, || read(&node, "chain.pem").contains("dHdv"));
    assert_ne!(read(&node, "key.pem"), key);
    assert!(!node.log().contains("PRIVATE KEY"));
    node.finish();
}

#[test]
fn beta_version_of_certificates_is_used_if_the_api_server_has_no_other() {
    let node = FakeNode::join(json!({}));
    node.api().certificate_versions(&["v1beta1"]);
    node.api().put(ACCOUNT, json!({"metadata": {"name": "default", "namespace": "default"}}));
    node.api().put(
        &format!("{BETA}/clustertrustbundles/roots"),
        json!({"metadata": {"name": "roots"}, "spec": {"trustBundle": certificate("cm9vdA==")}}),
    );
    node.bind(&manifest(json!([
        {"clusterTrustBundle": {"name": "roots", "path": "roots.pem"}},
        {"podCertificate": {"signerName": "x.org/signer", "keyType": "ECDSAP256",
            "credentialBundlePath": "bundle.pem", "certificateChainPath": "chain.pem"}},
    ])));
    let requests = format!("{BETA}/namespaces/default/podcertificaterequests");
    let requested =
        wait_for("the request for a certificate", LONG, || node.api().objects(&requests).first().cloned());
    let created = node.api().received().into_iter().find(|sent| sent.path() == requests);
    assert_eq!(created.unwrap().body["apiVersion"], "certificates.k8s.io/v1beta1");
    issue_at(&node, &requests, &requested, "b25l");
    node.wait_ready("web");
    let read = |name: &str| fs::read_to_string(volume(&node).join(name)).unwrap();
    assert_eq!(read("roots.pem"), certificate("cm9vdA=="));
    assert!(read("chain.pem").starts_with(&certificate("b25l")));
    // The server was asked for the best version first.
    let paths: Vec<String> = node.api().received().iter().map(|request| request.path()).collect();
    assert!(paths.iter().any(|path| path == "/apis/certificates.k8s.io/v1"));
    node.finish();
}

#[test]
fn version_of_certificates_is_found_again_after_an_upgrade_of_the_api_server() {
    let node = FakeNode::join(json!({}));
    node.api().certificate_versions(&["v1beta1"]);
    let bundle =
        |name: &str| json!({"metadata": {"name": name}, "spec": {"trustBundle": certificate("cm9vdA==")}});
    node.api().put(&format!("{BETA}/clustertrustbundles/old"), bundle("old"));
    node.bind(&manifest(json!([
        {"clusterTrustBundle": {"name": "old", "path": "old.pem"}},
        {"clusterTrustBundle": {"name": "new", "path": "new.pem"}},
    ])));
    wait_until("the missing bundle to be reported", LONG, || {
        node.cli(&["events"]).contains("clustertrustbundle.certificates.k8s.io \"new\" not found")
    });
    for name in ["old", "new"] {
        node.api().put(&format!("{BUNDLES}/{name}"), bundle(name));
    }
    node.api().certificate_versions(&["v1"]);
    node.wait_ready("web");
    let read = |name: &str| fs::read_to_string(volume(&node).join(name)).unwrap();
    assert_eq!(read("new.pem"), certificate("cm9vdA=="));
    node.finish();
}

#[test]
fn denied_certificate_names_the_reason() {
    let node = FakeNode::join(json!({}));
    node.api().put(ACCOUNT, json!({"metadata": {"name": "default", "namespace": "default"}}));
    node.bind(&manifest(json!([{"podCertificate": {"signerName": "x.org/signer", "keyType": "ED25519",
        "credentialBundlePath": "bundle.pem"}}])));
    let mut denied = request(&node, 0);
    denied["status"] = json!({"conditions": [{"type": "Denied", "status": "True",
        "reason": "UnsupportedKeyType", "message": "use ECDSAP256"}]});
    let name = denied["metadata"]["name"].as_str().unwrap().to_owned();
    node.api().put(&format!("{REQUESTS}/{name}"), denied);
    wait_until("the reason to be reported", LONG, || {
        node.cli(&["events"])
            .contains("permanently denied: reason=\"UnsupportedKeyType\" message=\"use ECDSAP256\"")
    });
    assert_eq!(node.api().objects(REQUESTS).len(), 1);
    assert!(node.running("web").is_empty());
    node.finish();
}

#[test]
fn without_the_gate_trust_bundles_are_not_read() {
    let node = FakeNode::join(json!({"featureGates": {"ClusterTrustBundleProjection": false}}));
    node.api().put(
        &format!("{BUNDLES}/roots"),
        json!({"metadata": {"name": "roots"}, "spec": {"trustBundle": certificate("cm9vdA==")}}),
    );
    node.bind(&manifest(json!([{"clusterTrustBundle": {"name": "roots", "path": "roots.pem"}}])));
    wait_until("the volume to fail", LONG, || node.cli(&["events"]).contains("FailedMount"));
    assert!(!node.api().received().iter().any(|sent| sent.path().starts_with(BUNDLES)));
    assert!(!node.log().contains("featureGates[ClusterTrustBundleProjection]"), "{}", node.log());
    node.finish();
}
