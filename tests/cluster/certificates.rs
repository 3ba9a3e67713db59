//! A node joins with a bootstrap token, and its certificate is renewed while it works.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::joined::{JoinedNode, LIMIT, directory, pod, text};
use crate::support::control_plane::{API_SERVER, CONTROLLERS, ControlPlane, ControlPlaneOptions};
use crate::support::launch::skip_on_go_kubelet;
use crate::support::node::{FOREVER, Node, busybox, simple};
use crate::support::wait::{pause, wait_for, wait_until};

const BY_TOKEN: &str = "system:bootstrap:";

/// Asserts that only root can read the files with keys and the links to them.
fn assert_private(dir: &Path) {
    let mut keys = 0;
    for entry in fs::read_dir(dir).expect("the directory is there").flatten() {
        // Files are written under temporary names first, and the next certificate may be written just now.
        let Ok(mut file) = File::open(entry.path()) else { continue };
        let mode = file.metadata().expect("it is open").permissions().mode() & 0o777;
        let mut text = String::new();
        file.read_to_string(&mut text).expect("it is readable");
        if text.contains("PRIVATE KEY") {
            assert_eq!(mode, 0o600, "{}", entry.path().display());
            keys += 1;
        }
    }
    assert!(keys > 0, "no key in {}", dir.display());
}

/// The users that requested the signed client certificates of a node.
fn requesters(plane: &ControlPlane, node: &str) -> Vec<String> {
    let list = plane.get(&["csr"]).unwrap_or_default();
    let user = format!("system:node:{node}");
    let signed = list["items"].as_array().into_iter().flatten();
    let signed = signed.filter(|csr| !text(csr, "/status/certificate").is_empty());
    let usernames = signed.map(|csr| text(csr, "/spec/username").to_owned());
    usernames.filter(|username| *username == user || username.starts_with(BY_TOKEN)).collect()
}

/// Signed requests for client certificates of a node.
fn signed(plane: &ControlPlane, node: &str) -> usize {
    requesters(plane, node).len()
}

/// The ones that were requested with the bootstrap token.
pub fn joined_by_token(plane: &ControlPlane, node: &str) -> usize {
    requesters(plane, node).iter().filter(|username| username.starts_with(BY_TOKEN)).count()
}

// Runtimes: containerd 2.
#[test]
fn a_node_joins_by_token_and_renews_its_certificate() {
    // Short-lived, so that renewals happen during the test.
    let options = ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() }
        .flag(CONTROLLERS, "--cluster-signing-duration=90s");
    let plane = ControlPlane::start_with(&directory("boot-cp"), &options);
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
    let joined = JoinedNode::prepare_with(&plane, "boot", json!({"rotateCertificates": true}), &flags);
    let mut joined = joined.start_and_wait();
    joined.node.apply("web.json", &simple("web"));
    joined.bind(&pod("boot-api", json!([busybox("main", FOREVER)])));
    joined.wait_ready("web-boot");
    joined.wait_ready("boot-api");
    assert_private(&pki);
    assert_eq!(fs::metadata(&kubeconfig).expect("it is written").permissions().mode() & 0o777, 0o600);
    let text = fs::read_to_string(&kubeconfig).expect("it is readable");
    assert!(text.contains("kubelet-client-current.pem"), "{text}");

    // Renewed twice, without an effect on pods.
    let running = joined.node.running_ids();
    wait_until("two more certificates", LIMIT * 3, || signed(&plane, "boot") >= 3);
    joined.wait_node_ready();
    joined.bind(&pod("boot-late", json!([busybox("main", FOREVER)])));
    joined.wait_ready("boot-late");
    assert!(running.iter().all(|id| joined.node.running_ids().contains(id)));

    // After a restart it uses the stored certificate, though a renewal may be due at once.
    joined.node.stop_agent();
    joined.node.start_agent();
    joined.bind(&pod("boot-again", json!([busybox("main", FOREVER)])));
    joined.wait_ready("boot-again");
    assert_eq!(joined_by_token(&plane, "boot"), 1, "a good certificate is not thrown away");
    joined.node.remove("web.json");
    joined.finish(&["boot-api", "boot-late", "boot-again"]);
}

/// Attempts of requests to the API server so far, failed ones included.
fn attempts(joined: &JoinedNode<'_>) -> f64 {
    let page = wait_for("the metrics", LIMIT, || {
        let (code, page) = joined.node.read_only("/metrics");
        (code == 200).then_some(page)
    });
    let lines = page.lines().filter(|line| line.starts_with("rest_client_requests_total"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Certificates expire while the API server is unreachable. Pods continue; the node with a
/// bootstrap token recovers by itself, the other one with a new kubeconfig.
// Runtimes: containerd 2.
#[test]
fn pods_survive_expired_certificates_and_the_node_recovers() {
    if skip_on_go_kubelet("run out", "it ends five minutes later, and asks at its next start") {
        return;
    }
    let options = ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() };
    let plane = ControlPlane::start_with(&directory("late-cp"), &options);
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    // Two thirds of it are for the start of two agents on a busy machine.
    let life = Duration::from_secs(180);
    let node = |name: &'static str, rotates: bool| {
        let kubeconfig = plane.node_kubeconfig(name).display().to_string();
        let (bootstrap, pki) = (plane.bootstrap_kubeconfig(), Node::base(name).join("pki"));
        let (bootstrap, pki) = (bootstrap.display().to_string(), pki.display().to_string());
        let mut flags = vec!["--kubeconfig", &kubeconfig, "--cert-dir", &pki];
        if rotates {
            flags.extend(["--bootstrap-kubeconfig", &bootstrap]);
        }
        JoinedNode::prepare_with(&plane, name, json!({"rotateCertificates": rotates}), &flags)
    };
    let (mut asks, mut waits) = (node("asks", true), node("waits", false));
    for joined in [&mut asks, &mut waits] {
        joined.node.start_agent();
    }
    // The pods tolerate the taints of an unreachable node for any time.
    let lasting = |name: &str| {
        let mut pod = pod(name, json!([busybox("main", FOREVER)]));
        pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
        pod
    };
    for joined in [&asks, &waits] {
        joined.wait_node_ready();
        joined.node.apply("web.json", &simple("web"));
        joined.bind(&lasting(&format!("{}-api", joined.name)));
    }
    for joined in [&asks, &waits] {
        joined.wait_ready(&format!("web-{}", joined.name));
        joined.wait_ready(&format!("{}-api", joined.name));
    }
    let running = [&asks, &waits].map(|joined| joined.node.running_ids());

    // Everything that takes long on a slow machine is done: only now lifetimes matter. The short
    // certificates are written to the same files.
    let renewed = |joined: &JoinedNode<'_>| {
        let lease = plane.get(&["lease", "-n", "kube-node-lease", &joined.name]).unwrap_or_default();
        text(&lease, "/spec/renewTime").to_owned()
    };
    for joined in [&mut asks, &mut waits] {
        joined.node.stop_agent();
        let _ = fs::remove_dir_all(Node::base(&joined.name).join("pki"));
    }
    let before = [&asks, &waits].map(renewed);
    let born = Instant::now();
    for joined in [&mut asks, &mut waits] {
        plane.node_kubeconfig_with(&joined.name, &format!("ttl={}s", life.as_secs()));
        joined.node.launch_agent();
    }
    for joined in [&mut asks, &mut waits] {
        joined.node.wait_healthy();
    }
    for (joined, before) in [&asks, &waits].into_iter().zip(before) {
        wait_until("the lease to be renewed with it", LIMIT, || renewed(joined) != before);
    }
    // A certificate is renewed after 70% of its life at the earliest.
    assert!(born.elapsed() < life * 2 / 3, "too slow a machine for this: {:?}", born.elapsed());
    assert_eq!(signed(&plane, "asks"), 0, "its own certificate is valid for a while");
    // The API server is down when a renewal is due.
    plane.stop(API_SERVER);
    pause((life + Duration::from_secs(5)).saturating_sub(born.elapsed()));
    plane.resume(API_SERVER);

    // Its old certificate is refused: the bootstrap token is accepted. The controllers, too,
    // come back only after a while.
    wait_until("the next certificate", LIMIT * 3, || signed(&plane, "asks") == 1);
    asks.wait_node_ready();
    asks.bind(&lasting("asks-late"));
    asks.wait_ready("asks-late");
    assert_eq!((signed(&plane, "asks"), joined_by_token(&plane, "asks")), (1, 1));
    let pki = Node::base("asks").join("pki/kubelet-client-current.pem");
    let issued = fs::read(&pki).expect("the new certificate is kept");

    // A node without valid credentials is refused, and its requests stay rare.
    waits.bind(&lasting("waits-late"));
    waits.node.apply("two.json", &simple("two"));
    waits.node.wait_ready("two");
    let (sent, begun) = (attempts(&waits), Instant::now());
    pause(Duration::from_secs(8));
    // Its back-off grows.
    let more = wait_for("another attempt", LIMIT, || {
        let more = attempts(&waits) - sent;
        (more > 0.0).then_some(more)
    });
    let rate = more / begun.elapsed().as_secs_f64();
    assert!(rate <= 10.0, "{rate:.1} requests/s");
    let late = plane.get(&["pod", "waits-late"]).unwrap_or_default();
    assert_eq!(late["status"]["containerStatuses"], json!(null), "the agent has not received the pod");
    for (joined, before) in [&asks, &waits].into_iter().zip(&running) {
        let now = joined.node.running_ids();
        assert!(before.iter().all(|id| now.contains(id)), "{}: pods go on", joined.name);
    }

    // At the next start the issued certificate is used, though that of the kubeconfig has expired.
    asks.node.stop_agent();
    asks.node.start_agent();
    asks.bind(&lasting("asks-later"));
    asks.wait_ready("asks-later");
    assert_eq!(signed(&plane, "asks"), 1, "a good certificate is not thrown away");
    assert_eq!(fs::read(&pki).expect("it is still there"), issued);
    waits.node.stop_agent();
    plane.node_kubeconfig("waits");
    waits.node.start_agent();
    waits.wait_ready("waits-late");
    waits.wait_ready("two-waits");
    for (joined, before) in [&asks, &waits].into_iter().zip(&running) {
        let now = joined.node.running_ids();
        assert!(before.iter().all(|id| now.contains(id)), "{}: pods go on", joined.name);
    }
    asks.node.remove("web.json");
    asks.finish(&["asks-api", "asks-late", "asks-later"]);
    waits.node.remove("web.json");
    waits.node.remove("two.json");
    waits.finish(&["waits-api", "waits-late"]);
}
