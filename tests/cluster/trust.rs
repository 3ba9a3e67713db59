//! Certificates in projected volumes: bundles of authorities, and certificates of the pods' own. A node
//! uses the version of `certificates.k8s.io` that the API server has: `v1`, with the former release
//! `v1beta1`, which is served only if an administrator switches it on.

use std::fs;

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, directory, pod, shared, text};
use crate::support::control_plane::{API_SERVER, ControlPlane, ControlPlaneOptions, is_former};
use crate::support::node::{FOREVER, busybox};
use crate::support::wait::{wait_for, wait_until};

const SIGNER: &str = "example.org/trust";

/// A control plane of the former release whose administrator has switched these objects on.
fn with_beta_objects() -> ControlPlane {
    const GATES: &str =
        "ClusterTrustBundle=true,ClusterTrustBundleProjection=true,PodCertificateRequest=true";
    let options = ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() }
        .flag(API_SERVER, "--runtime-config=certificates.k8s.io/v1beta1=true")
        .flag(API_SERVER, &format!("--feature-gates={GATES}"));
    let plane = ControlPlane::start_with(&directory("trust-cp"), &options);
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    plane
}

/// Makes or changes a bundle. One of a signer has the signer in its name.
fn apply_bundle(plane: &ControlPlane, version: &str, name: &str, signer: Option<&str>, certificates: &str) {
    let mut bundle = json!({
        "apiVersion": format!("certificates.k8s.io/{version}"),
        "kind": "ClusterTrustBundle",
        "metadata": {"name": name},
        "spec": {"trustBundle": certificates},
    });
    if let Some(signer) = signer {
        bundle["spec"]["signerName"] = json!(signer);
    }
    plane.apply(&bundle);
}

/// The request for the certificate of a pod.
fn certificate_request(plane: &ControlPlane, pod: &str) -> Value {
    wait_for("the request for a certificate", LIMIT, || {
        let list = plane.poll(&["podcertificaterequests"])?;
        let mut items = list["items"].as_array()?.iter();
        items.find(|request| text(request, "/spec/podName") == pod).cloned()
    })
}

// Runtimes: containerd 2, former control plane.
#[test]
fn pods_have_bundles_of_authorities_and_certificates_of_their_own() {
    let former = is_former().then(with_beta_objects);
    let plane = if let Some(former) = &former { former } else { shared() };
    let version = if is_former() { "v1beta1" } else { "v1" };
    let authority = |name: &str| {
        let path = plane.dir().join(format!("pki/{name}.crt"));
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let (first, second) = (authority("ca"), authority("front-proxy-ca"));
    apply_bundle(plane, version, "trust-named", None, &first);
    apply_bundle(plane, version, "example.org:trust:signed", Some(SIGNER), &second);
    let joined = JoinedNode::prepare(plane, "trust", json!({"syncFrequency": "5s"})).start_and_wait();
    let mut main = busybox("main", FOREVER);
    main["volumeMounts"] = json!([{"name": "trust", "mountPath": "/trust"}]);
    let mut wanted = pod("trust-pod", json!([main]));
    wanted["spec"]["volumes"] = json!([{"name": "trust", "projected": {"sources": [
        {"clusterTrustBundle": {"name": "trust-named", "path": "named.pem"}},
        {"clusterTrustBundle": {"signerName": SIGNER, "labelSelector": {}, "path": "signer.pem"}},
        {"podCertificate": {"signerName": SIGNER, "keyType": "ECDSAP256",
            "keyPath": "key.pem", "certificateChainPath": "chain.pem"}},
    ]}}]);
    joined.bind(&wanted);

    // The pod waits until its signer has signed.
    let request = certificate_request(plane, "trust-pod");
    assert_eq!(text(&request, "/spec/nodeName"), "trust");
    let mut status = plane.sign(text(&request, "/spec/stubPKCS10Request"));
    status["conditions"] = json!([{
        "type": "Issued", "status": "True", "reason": "Signed", "message": "signed by the test",
        "lastTransitionTime": status["notBefore"],
    }]);
    let patch = json!({"status": status}).to_string();
    let name = text(&request, "/metadata/name");
    plane.kubectl(&[
        "patch",
        "podcertificaterequest",
        name,
        "--subresource=status",
        "--type=merge",
        "-p",
        &patch,
    ]);
    let ready = joined.wait_ready("trust-pod");
    let id = text(&ready, "/status/containerStatuses/0/containerID");
    let id = id.rsplit('/').next().unwrap_or_default().to_owned();
    let file = |name: &str| joined.node.exec(&id, &["cat", &format!("/trust/{name}")]);
    assert_eq!((file("named.pem"), file("signer.pem")), (first, second.clone()));
    assert_eq!(file("chain.pem"), text(&status, "/certificateChain"));
    assert!(file("key.pem").contains("PRIVATE KEY"));

    // An edit arrives when the bundle that was read before is a minute old.
    apply_bundle(plane, version, "trust-named", None, &second);
    wait_until("the edited bundle in the volume", LIMIT, || file("named.pem") == second);
    let uris: Vec<String> = plane
        .requests()
        .iter()
        .filter(|request| text(request, "/user/username") == "system:node:trust")
        .map(|request| text(request, "/requestURI").to_owned())
        .collect();
    for resource in ["clustertrustbundles", "namespaces/default/podcertificaterequests"] {
        let path = format!("/apis/certificates.k8s.io/{version}/{resource}");
        assert!(uris.iter().any(|uri| uri.starts_with(&path)), "{path}: {uris:?}");
    }
    joined.finish(&["trust-pod"]);
    plane.kubectl(&["delete", "clustertrustbundle", "trust-named", "example.org:trust:signed"]);
}
