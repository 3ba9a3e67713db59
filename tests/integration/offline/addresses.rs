//! Addresses of the machine that change while the API server is away.

use std::process::Command;

use coracle::model::api::Pod;

use super::starts::{node_path, restart_alone, wait_stored_pods};
use super::*;

/// An interface in the network namespace of the tests, which is removed in the end.
struct Link(&'static str);

impl Link {
    fn add(name: &'static str) -> Link {
        ip(&format!("link add {name} type bridge"));
        Link(name)
    }

    fn up(&self, address: &str) {
        ip(&format!("link set {} up", self.0));
        self.address("add", address);
    }

    /// Replaces an address without a moment in which there is none.
    fn renumber(&self, from: &str, to: &str) {
        self.address("add", to);
        self.address("del", from);
    }

    fn address(&self, order: &str, address: &str) {
        ip(&format!(
            "-6 addr {order} {address}/64 dev {}{}",
            self.0,
            if order == "add" { " nodad" } else { "" }
        ));
    }

    /// The kernel removes the addresses of IPv6.
    fn down(&self) {
        ip(&format!("link set {} down", self.0));
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", self.0]).status();
    }
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// The addresses of the node and of the pod in a status.
fn addresses(pod: &Pod) -> [String; 2] {
    let status = pod.status.clone().unwrap_or_default();
    [status.host_ip, status.pod_ip].map(Option::unwrap_or_default)
}

/// Waits until the status of the pod `host` has these addresses: of the node, and of the pod.
fn wait_addresses(node: &FakeNode, expected: [&str; 2]) {
    node.wait_pod("host", &format!("at {expected:?}"), LONG, |pod| addresses(pod) == expected);
}

/// A machine in a vehicle: switched on in another network, without an API server, and moved again.
#[test]
fn addresses_are_followed_without_the_api_server_and_without_a_restart() {
    // The addresses of the machine itself must not change: only in a namespace of our own.
    if std::env::var_os("E2E_DIR").is_none() {
        eprintln!("left out: no network namespace of our own");
        return;
    }
    let link = Link::add("moved0");
    link.up("2001:db8::10");
    let mut node = FakeNode::prepare(json!({}));
    let api = FakeApi::start();
    let cluster = json!({"server": api.url()});
    node.join_cluster(api, cluster);
    // Without an address of its own, the node has that of the route; of IPv6, which other tests do not use.
    node.add_flags(&["--offline", "--offline-wait=1s", "--node-ip=::"]);
    let mut node = node.start_joined();
    let mut host = simple("host");
    host["spec"]["hostNetwork"] = json!(true);
    host["spec"]["containers"][0]["env"] = json!([
        {"name": "HOST", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.hostIP"}}},
        {"name": "POD", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
    ]);
    node.bind(&host);
    node.wait_ready("host");
    wait_addresses(&node, ["2001:db8::10"; 2]);
    wait_stored_pods(&node, 1);
    wait_reported_address(&node, "2001:db8::10");

    node.api().go_down();
    link.renumber("2001:db8::10", "2001:db8::20");
    restart_alone(&mut node);
    node.wait_ready("host");
    wait_addresses(&node, ["2001:db8::20"; 2]);
    let alone = node.running("host");
    for name in ["HOST", "POD"] {
        let value = variable(&node, &alone["main"][0], name);
        assert_eq!(value.as_deref(), Some("2001:db8::20"), "{name}");
    }

    // Without the link, only the other family has a route.
    link.down();
    wait_addresses(&node, ["192.0.2.10"; 2]);
    link.up("2001:db8::30");
    wait_addresses(&node, ["2001:db8::30"; 2]);
    assert_eq!(node.running("host"), alone, "no container restarts");

    node.api().go_up();
    wait_phase(&node, "online");
    wait_reported_address(&node, "2001:db8::30");
    wait_until("the addresses of the pod to be reported", LONG, || {
        node.shown("host").is_some_and(|pod| addresses(&pod) == ["2001:db8::30"; 2])
    });
    // Online, and moved again.
    link.renumber("2001:db8::30", "2001:db8::40");
    wait_reported_address(&node, "2001:db8::40");
    wait_addresses(&node, ["2001:db8::40"; 2]);
    assert_eq!(node.running("host"), alone, "no container restarts");
    node.finish();
}

/// Waits until the Node object at the API server has this address.
fn wait_reported_address(node: &FakeNode, address: &str) {
    wait_until(&format!("the node to be reported at {address}"), LONG, || {
        let object = node.api().object(&node_path()).unwrap_or_default();
        let shown = object["status"]["addresses"].as_array().cloned().unwrap_or_default();
        shown.iter().any(|shown| shown["type"] == "InternalIP" && shown["address"] == address)
    });
}
