//! Conditions under which the agent starts.

use std::path::Path;

use serde_json::json;

use crate::support::containerd::kill;
use crate::support::fake_node::free_port;
use crate::support::launch;
use crate::support::node::{LONG, Node, http_get_within};
use crate::support::tls_client::TlsClient;

// Runtimes: containerd 2.
#[test]
fn cgroup_v1_requires_explicit_configuration() {
    let mut node = Node::prepare("cgroups", json!({"failCgroupV1": true}));
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        // The unified hierarchy is supported.
        node.start_agent();
        node.finish();
        return;
    }
    node.launch_agent();
    let (status, log) = node.wait_ended();
    assert!(!status.success(), "{status}");
    assert!(log.contains("cgroup v1") && log.contains("failCgroupV1"), "{log}");
    node.configure(json!({"failCgroupV1": false}));
    node.start_agent();
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn without_configuration_file_anonymous_reads_are_allowed() {
    let mut node = Node::prepare("flags", json!({}));
    let [port, read_only, healthz] = [free_port(), free_port(), free_port()];
    let dir = Node::base("flags");
    let mut command = node.command_line(&[
        &format!("--container-runtime-endpoint={}", node.containerd.endpoint()),
        &format!("--cert-dir={}", dir.join("pki").display()),
        &format!("--port={port}"),
        &format!("--read-only-port={read_only}"),
        &format!("--healthz-port={healthz}"),
        "--fail-swap-on=false",
        "--fail-cgroupv1=false",
        "--cgroups-per-qos=false",
        "--enforce-node-allocatable=",
    ]);
    let mut agent = launch::spawn(&mut command, &dir.join("flags.log"));
    launch::wait_healthy(&mut agent, healthz, LONG);
    let response = TlsClient::new(port, None).get("/pods");
    assert!(response.status == 200 && response.body.contains("\"PodList\""), "{response:?}");
    assert!(http_get_within(read_only, "/metrics", LONG).is_ok_and(|(code, _)| code == 200));
    kill(agent.id(), "TERM");
    assert!(agent.wait().expect("the agent ends").success());

    // With a file that does not mention anonymous requests these are denied.
    let port = free_port();
    node.configure(json!({
        "port": port,
        "authentication": {"webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
    }));
    node.start_agent();
    assert_eq!(TlsClient::new(port, None).get("/pods").status, 401);
    node.finish();
}
