//! Addresses of the machine and of the API server that change while the node is alone.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;

use coracle::model::api::Pod;

use crate::support::relay::{Profile, Relay};

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

/// The name of an API server whose address changes.
const SERVER_NAME: &str = "api.cluster.test";

/// Passes connections to an address on to the API server, which has the same port of another one.
fn forward(address: Ipv4Addr, port: u16) -> Relay {
    let listener = TcpListener::bind((address, port)).unwrap();
    Relay::serve_on(vec![listener], SocketAddr::from((Ipv4Addr::LOCALHOST, port)), Profile::QUICK)
}

/// As with DNS that a router on the way has: it is away together with the API server.
#[test]
fn server_whose_name_is_away_and_has_another_address_then_takes_the_node_back() {
    const ADDRESSES: [Ipv4Addr; 3] =
        [Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::new(127, 0, 0, 3), Ipv4Addr::new(127, 0, 0, 4)];
    // The names of the machine itself must not change.
    if std::env::var_os("E2E_DIR").is_none() {
        eprintln!("left out: no mount namespace of our own");
        return;
    }
    let mut node = FakeNode::prepare(json!({}));
    let files = node.path("etc");
    fs::create_dir(&files).unwrap();
    // No server is there.
    fs::write(files.join("resolv.conf"), "nameserver 127.0.0.9\noptions timeout:1 attempts:1\n").unwrap();
    let hosts = files.join("hosts");
    let set_address = |address: Option<Ipv4Addr>| {
        let line = address.map(|address| format!("{address} {SERVER_NAME}\n")).unwrap_or_default();
        // In place, because the file is mounted.
        fs::write(&hosts, line).unwrap();
    };
    let api = FakeApi::start();
    let port = api.port;
    set_address(Some(ADDRESSES[0]));
    let first = forward(ADDRESSES[0], port);
    node.join_cluster(api, json!({"server": format!("http://{SERVER_NAME}:{port}")}));
    node.add_flags(&["--offline", "--offline-wait=1s"]);
    node.use_name_files(files);
    let mut node = node.start_joined();
    node.bind(&simple("web"));
    node.wait_ready("web");
    wait_stored_pods(&node, 1);

    set_address(None);
    drop(first);
    node.stop_agent();
    node.cut_power();
    node.start_agent();
    wait_phase(&node, "alone");
    node.wait_ready("web");
    let running = node.running("web");

    let second = forward(ADDRESSES[1], port);
    set_address(Some(ADDRESSES[1]));
    wait_phase(&node, "online");
    wait_until("the status to be reported", LONG, || {
        let shown = node.shown("web");
        shown.is_some_and(|pod| is_ready(&pod) && running["main"] == [container_id(&pod, "main")])
    });
    assert!(second.traffic(0).opened > 0, "by the new address only");

    // Also without a start of the agent.
    set_address(None);
    drop(second);
    let third = forward(ADDRESSES[2], port);
    set_address(Some(ADDRESSES[2]));
    node.bind(&simple("late"));
    node.wait_ready("late");
    assert!(third.traffic(0).opened > 0);
    assert_eq!(node.running("web"), running, "no container restarts");
    node.finish();
}
