//! The control plane of the tests itself, without any agent.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::containerd::kill;
use crate::support::control_plane::{
    API_SERVER, CONTROLLERS, ControlPlane, ControlPlaneOptions, ETCD, SCHEDULER, server_release, wait_ended,
};
use crate::support::node::Node;
use crate::support::wait::wait_until;

const LIMIT: Duration = Duration::from_secs(120);

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "room"},
        "spec": {"containers": [{"name": "c", "image": "localhost/busybox:1"}]},
    })
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

fn made_in(name: &str, options: &ControlPlaneOptions) -> (PathBuf, ControlPlane) {
    let dir = Node::base(name);
    let plane = ControlPlane::start_with(&dir, options);
    (dir, plane)
}

// Runtimes: containerd 2, former control plane.
#[test]
fn control_plane_survives_an_api_server_restart_and_leaves_no_process() {
    let (dir, plane) = made_in("cp1", &ControlPlaneOptions::default());
    let version: Value = serde_json::from_str(&plane.kubectl(&["get", "--raw", "/version"])).expect("JSON");
    assert_eq!(text(&version, "/gitVersion"), server_release());

    plane.kubectl(&["create", "namespace", "room"]);
    // A controller creates the service account without which no pod is admitted.
    let account = ["serviceaccount", "default", "-n", "room"];
    plane.wait(&account, "made", LIMIT, |_| true);
    plane.apply(&pod("waiting"));
    let unbound = ["pod", "waiting", "-n", "room"];
    let seen = plane.wait(&unbound, "handled by the scheduler", LIMIT, |pod| {
        text(pod, "/status/conditions/0/reason") == "Unschedulable"
    });
    assert_eq!(text(&seen, "/spec/nodeName"), "");

    plane.stop(API_SERVER);
    assert!(!plane.try_kubectl(&["get", "pods", "-n", "room"], "").status.success());
    plane.resume(API_SERVER);
    let again = plane.get(&unbound).expect("etcd has kept the pod");
    assert_eq!(text(&again, "/metadata/uid"), text(&seen, "/metadata/uid"));

    let pids = plane.pids();
    assert_eq!(pids.len(), 5, "{pids:?}");
    drop(plane);
    wait_ended(&pids);
    assert!(!dir.join("cp").exists());
}

// Runtimes: containerd 2.
#[test]
fn control_plane_ends_with_its_parent_process() {
    let (_, plane) = made_in("cp2", &ControlPlaneOptions::bare());
    let pids = plane.pids();
    assert_eq!(pids.len(), 3, "{pids:?}");
    plane.freeze(ETCD);
    // SIGKILL to the program itself: it cannot clean up.
    kill(pids[0], "KILL");
    wait_ended(&pids[1..]);
    assert!(plane.command("pid etcd").is_err());
    drop(plane);
    wait_ended(&pids);
}

/// What a node may do, and that the audit log has it.
// Runtimes: containerd 2.
#[test]
fn nodes_have_only_the_permissions_of_nodes() {
    let plane = ControlPlane::shared();
    let own = plane.node_kubeconfig("n1");
    let node =
        |name: &str| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}).to_string();
    let create = ["create", "-f", "-"];
    let output = plane.kubectl_as(&own, &create, &node("n1"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let refused = |kubeconfig: &Path, args: &[&str], input: &str, message: &str| {
        let output = plane.kubectl_as(kubeconfig, args, input);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(message), "{args:?}: {stderr}");
    };
    refused(&own, &create, &node("n2"), "is not allowed to modify node");
    refused(&own, &["get", "secrets", "-A"], "", "can only read namespaced object of this type");
    refused(&plane.bootstrap_kubeconfig(), &["get", "nodes"], "", "cannot list resource \"nodes\"");

    // Only its own objects: pods bound to it, objects that these name, and its Node.
    const NO: &str = "(Forbidden)";
    refused(&own, &["get", "pods", "-A"], "", NO);
    let mine = plane.kubectl_as(&own, &["get", "pods", "-A", "--field-selector=spec.nodeName=n1"], "");
    assert!(mine.status.success(), "{}", String::from_utf8_lossy(&mine.stderr));
    refused(&own, &["get", "secret", "nobodys"], "", "no relationship found between node 'n1'");
    let mirror = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "mirror-n1", "annotations": {"kubernetes.io/config.mirror": "1"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]},
    });
    refused(&own, &create, &mirror.to_string(), NO);
    for patch in [
        json!({"metadata": {"labels": {"node-role.kubernetes.io/worker": ""}}}),
        json!({"spec": {"taints": [{"key": "example.org/t", "effect": "NoSchedule"}]}}),
    ] {
        refused(&own, &["patch", "node", "n1", "-p", &patch.to_string()], "", NO);
    }

    let requests = plane.requests();
    let created = requests
        .iter()
        .find(|request| text(request, "/verb") == "create" && text(request, "/objectRef/name") == "n1");
    let created = created.unwrap_or_else(|| panic!("not in the audit log: {requests:?}"));
    assert_eq!(text(created, "/user/username"), "system:node:n1");
    assert_eq!(text(created, "/requestObject/metadata/name"), "n1");
    assert!(requests.iter().all(|request| text(request, "/user/username") != "admin"));
}

/// A request for a certificate with the bootstrap token is approved and signed.
// Runtimes: containerd 2.
#[test]
fn bootstrap_certificate_request_is_approved_and_signed() {
    let plane = ControlPlane::shared();
    let request = plane.request("n3");
    let csr = json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": "csr-n3"},
        "spec": {
            "request": request,
            "signerName": "kubernetes.io/kube-apiserver-client-kubelet",
            "usages": ["digital signature", "client auth"],
        },
    });
    let output = plane.kubectl_as(&plane.bootstrap_kubeconfig(), &["create", "-f", "-"], &csr.to_string());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    plane.wait(&["csr", "csr-n3"], "signed", LIMIT, |csr| !text(csr, "/status/certificate").is_empty());
}

/// A watch from before the compaction is answered with 410 after the API server has restarted.
// Runtimes: containerd 2.
#[test]
fn compacted_history_gives_410() {
    let (_, plane) = made_in("cp5", &ControlPlaneOptions::bare());
    let before = plane.get(&["configmap", "kube-root-ca.crt"]).expect("it is made at the start");
    let version = text(&before, "/metadata/resourceVersion");
    for round in 0..3 {
        plane.kubectl(&["label", "--overwrite", "configmap", "kube-root-ca.crt", &format!("round={round}")]);
    }
    plane.compact();
    plane.stop(API_SERVER);
    plane.resume(API_SERVER);
    let path =
        format!("/api/v1/namespaces/default/configmaps?watch=1&timeoutSeconds=5&resourceVersion={version}");
    wait_until("410", LIMIT, || {
        let output = plane.try_kubectl(&["get", "--raw", &path], "");
        let all = [output.stdout, output.stderr].concat();
        let all = String::from_utf8_lossy(&all);
        all.contains("too old resource version") || all.contains("has been compacted")
    });
    // A frozen server does not respond; after thawing it does.
    plane.freeze(API_SERVER);
    let output = plane.try_kubectl(&["get", "--raw", "/readyz", "--request-timeout=1s"], "");
    assert!(!output.status.success());
    plane.thaw(API_SERVER);
    wait_until("readiness", LIMIT, || plane.try_kubectl(&["get", "--raw", "/readyz"], "").status.success());
    assert!(plane.command(&format!("pid {CONTROLLERS}")).is_err());
    assert!(plane.command(&format!("pid {SCHEDULER}")).is_err());
}
