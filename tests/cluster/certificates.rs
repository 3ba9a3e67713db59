//! A node joins with a bootstrap token, and its certificate is renewed while it works.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::json;

use crate::joined::{Joined, LIMIT, directory, pod, text};
use crate::support::control_plane::{CONTROLLERS, Choice, ControlPlane};
use crate::support::node::{FOREVER, Node, busybox, simple};
use crate::support::wait::wait_until;

/// Nobody else reads what has a key, or points at one.
fn assert_private(dir: &Path) {
    for entry in fs::read_dir(dir).expect("the directory is there").flatten() {
        let text = fs::read_to_string(entry.path()).expect("it is readable");
        if !text.contains("PRIVATE KEY") {
            continue;
        }
        let mode = entry.path().metadata().expect("the file is there").permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", entry.path().display());
    }
}

/// Signed requests for client certificates of a node.
fn signed(plane: &ControlPlane, node: &str) -> usize {
    let list = plane.get(&["csr"]).unwrap_or_default();
    let user = format!("system:node:{node}");
    let of_node = |csr: &&serde_json::Value| {
        let own = text(csr, "/spec/username") == user
            || text(csr, "/spec/username").starts_with("system:bootstrap:");
        own && !text(csr, "/status/certificate").is_empty()
    };
    list["items"].as_array().map_or(0, |all| all.iter().filter(of_node).count())
}

#[test]
fn a_node_joins_by_token_and_renews_its_certificate() {
    // Short-lived, so that there is something to renew.
    let choice =
        Choice { scheduler: false, ..Choice::default() }.flag(CONTROLLERS, "--cluster-signing-duration=90s");
    let plane = ControlPlane::start_with(&directory("boot-cp"), &choice);
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    let dir = Node::base("boot");
    let (kubeconfig, pki) = (dir.join("kubelet.conf"), dir.join("pki"));
    let flags = [
        "--kubeconfig",
        &kubeconfig.display().to_string(),
        "--bootstrap-kubeconfig",
        &plane.bootstrap_kubeconfig().display().to_string(),
        "--cert-dir",
        &pki.display().to_string(),
    ];
    let joined = Joined::prepare_with(&plane, "boot", json!({"rotateCertificates": true}), &flags);
    let mut joined = joined.start_and_wait();
    joined.node.apply("web.json", &simple("web"));
    joined.bind(&pod("boot-api", json!([busybox("main", FOREVER)])));
    joined.wait_ready("web-boot");
    joined.wait_ready("boot-api");
    assert_private(&pki);
    assert_eq!(fs::metadata(&kubeconfig).expect("it is written").permissions().mode() & 0o777, 0o600);
    let text = fs::read_to_string(&kubeconfig).expect("it is readable");
    assert!(text.contains("kubelet-client-current.pem"), "{text}");

    // Renewed twice, and nobody has noticed.
    let running = joined.node.running_ids();
    wait_until("two more certificates", LIMIT * 3, || signed(&plane, "boot") >= 3);
    joined.wait_node_ready();
    joined.bind(&pod("boot-late", json!([busybox("main", FOREVER)])));
    joined.wait_ready("boot-late");
    assert!(running.iter().all(|id| joined.node.running_ids().contains(id)));

    // Started again it uses what it has.
    joined.node.stop_agent();
    let before = signed(&plane, "boot");
    joined.node.start_agent();
    joined.wait_node_ready();
    // One request may have been under way when the agent was stopped, and one be due.
    assert!(signed(&plane, "boot") <= before + 2, "a good certificate is not thrown away");
    joined.node.remove("web.json");
    joined.finish(&["boot-api", "boot-late"]);
}
