//! Slow and dirty links between a node and the API server: a satellite, a modem, a NAT that forgets.
//!
//! The relay of `support/relay.rs` is the link. What each test measured is printed, also when it passes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, condition, pod, shared, text};
use crate::support::control_plane::ControlPlane;
use crate::support::launch::{runs_go_kubelet, skip_on_go_kubelet};
use crate::support::node::{FOREVER, busybox, free_port};
use crate::support::relay::{Profile, Relay, silence_forgotten};
use crate::support::wait::{holds_for, pause, wait_for, wait_until};

/// The address of every node (`--node-ip`), which the API server connects to.
const NODE_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);

/// 600 ms of round trip, 64 kbit/s, 5 % of loss.
const SATELLITE: Profile =
    Profile { delay: Duration::from_millis(300), rate: 8_000, lost: 5, seed: 1, ..Profile::QUICK };

/// The duration of a lease, with which the control plane knows that a node is there.
const LEASE: Duration = Duration::from_secs(40);

/// How long a node has to stay Ready: longer than the grace period of the node life-cycle controller, 50 s.
const SPAN: Duration = Duration::from_secs(55);

/// What a slow link may cost in requests: one repeated read of each of the pod's three objects, two events
/// about a volume that was not ready in the first three seconds, and the statuses of two such attempts.
const SPARE: usize = 7;

/// What a node watches from its start on.
const COLLECTIONS: [&str; 3] = ["pods", "nodes", "services"];

/// The limit of this test's own waits on a link that makes everything slow.
const LONG: Duration = Duration::from_secs(120);

/// A node behind links of the same kind: its own to the API server, and the API server's to it.
struct LinkedNode {
    joined: JoinedNode<'static>,
    to_server: Relay,
    _to_node: Relay,
    /// When the Node object first was Ready, and since when it says so.
    ready: (Instant, String),
    begun: Instant,
}

impl LinkedNode {
    fn start(name: &str, profile: Profile) -> LinkedNode {
        let plane = shared();
        let to_server = Relay::start_with(address_of(plane), 1, profile);
        let server = format!("server=https://127.0.0.1:{}", to_server.port(0));
        let kubeconfig = plane.node_kubeconfig_with(name, &server).display().to_string();
        // The agent listens on loopback; at the node's address the link does.
        let port = free_port();
        let listener = TcpListener::bind((NODE_ADDRESS, port)).expect("the port of the node");
        let to_node = Relay::serve_on(vec![listener], (Ipv4Addr::LOCALHOST, port).into(), profile);
        let config = json!({"address": "127.0.0.1", "port": port});
        let mut joined = JoinedNode::prepare_with(plane, name, config, &["--kubeconfig", &kubeconfig]);
        let begun = Instant::now();
        joined.node.start_agent();
        let node = plane.wait(&["node", name], "ready", LONG, |node| condition(node, "Ready") == "True");
        joined.node.measure_when_ready();
        let ready = (Instant::now(), ready_since(&node));
        LinkedNode { joined, to_server, _to_node: to_node, ready, begun }
    }

    fn is_still_ready(&self) -> bool {
        // A request of this test that fails is no sign of the node's.
        self.joined
            .object()
            .is_none_or(|node| condition(&node, "Ready") == "True" && ready_since(&node) == self.ready.1)
    }

    /// The requests of the node so far, each once.
    fn requests(&self) -> Vec<Value> {
        let user = format!("system:node:{}", self.joined.name);
        let mut ids = BTreeSet::new();
        let mut requests = self.joined.plane.requests();
        requests.retain(|request| {
            text(request, "/user/username") == user && ids.insert(text(request, "/auditID").to_owned())
        });
        requests
    }

    /// The longest time between two renewals of the lease; `None`: there were not two yet.
    fn longest_lease(&self) -> Option<Duration> {
        let requests = self.requests();
        let times: Vec<i64> = requests
            .iter()
            .filter(|request| text(request, "/objectRef/resource") == "leases")
            .filter(|request| ["create", "update", "patch"].contains(&text(request, "/verb")))
            .filter_map(|request| text(request, "/requestReceivedTimestamp").parse::<jiff::Timestamp>().ok())
            .map(jiff::Timestamp::as_millisecond)
            .collect();
        let longest = times.windows(2).map(|pair| pair[1] - pair[0]).max()?;
        u64::try_from(longest).ok().map(Duration::from_millis)
    }

    /// The lists of these collections: streaming lists, too.
    fn lists(&self, resources: &[&str]) -> usize {
        let requests = self.requests();
        let is_list = |request: &&Value| {
            resources.contains(&text(request, "/objectRef/resource"))
                && (text(request, "/verb") == "list"
                    || text(request, "/requestURI").contains("sendInitialEvents=true"))
        };
        requests.iter().filter(is_list).count()
    }

    /// Prints what was measured, not by a macro, whose output the harness hides when a test passes.
    fn print(&self, what: &str) {
        let traffic = self.to_server.traffic(0);
        let line = format!(
            "slow_links {} ({}): {what}; {} connections, {} B to the API server, {} B from it, \
             longest time between renewals of the lease {}\n",
            self.joined.name,
            if runs_go_kubelet() { "Go kubelet" } else { "coracle" },
            traffic.opened,
            traffic.to_server,
            traffic.to_client,
            self.longest_lease()
                .map_or("not known".to_owned(), |time| format!("{:.1} s", time.as_secs_f64())),
        );
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

fn address_of(plane: &ControlPlane) -> SocketAddr {
    let address = plane.server().strip_prefix("https://").and_then(|address| address.parse().ok());
    address.expect("the address of the API server")
}

/// Since when the Node object has its condition Ready.
fn ready_since(node: &Value) -> String {
    let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let ready = conditions.iter().find(|condition| condition["type"] == "Ready");
    ready.map(|condition| text(condition, "/lastTransitionTime").to_owned()).unwrap_or_default()
}

/// The requests for pods and what belongs to them, by kind. Leases, the node and watches depend on time.
fn counted(requests: &[Value]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for request in requests {
        let resource = text(request, "/objectRef/resource");
        let verb = text(request, "/verb");
        if ["leases", "nodes"].contains(&resource) || ["watch", "list"].contains(&verb) {
            continue;
        }
        *counts
            .entry(format!("{verb} {resource} {}", text(request, "/objectRef/subresource")))
            .or_default() += 1;
    }
    counts
}

/// A pod with a ConfigMap as a volume, one as an environment, and a token.
fn configured(name: &str) -> Value {
    let script = format!("cat /settings/key; echo env $KEY; wc -c <$TOKEN; {FOREVER}");
    let mut configured = pod(name, json!([busybox("main", &script)]));
    let config_map = format!("{name}-settings");
    configured["spec"]["volumes"] = json!([{"name": "settings", "configMap": {"name": config_map}}]);
    let container = &mut configured["spec"]["containers"][0];
    container["volumeMounts"] = json!([{"name": "settings", "mountPath": "/settings"}]);
    container["env"] = json!([
        {"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": config_map, "key": "key"}}},
        {"name": "TOKEN", "value": "/var/run/secrets/kubernetes.io/serviceaccount/token"},
    ]);
    configured
}

/// A pod starts, its log is read, a command runs in it, and it is deleted. Returns the requests by kind, and
/// how long start, log, command and deletion took.
fn live(linked: &LinkedNode) -> (BTreeMap<String, usize>, String) {
    let joined = &linked.joined;
    let (plane, name) = (joined.plane, format!("{}-web", joined.name));
    plane.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": format!("{name}-settings"), "namespace": "default"},
        "data": {"key": "value\n"},
    }));
    let mut begun = Instant::now();
    let mut lap = || std::mem::replace(&mut begun, Instant::now()).elapsed().as_secs_f64();
    joined.bind(&configured(&name));
    joined.wait_ready(&name);
    let start = lap();
    let log = wait_for("the log", LONG, || {
        // On such a link a connection to the node may need too long.
        let output = plane.try_kubectl(&["logs", &name], "");
        let log = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success() && log.lines().count() == 3).then_some(log)
    });
    assert!(log.starts_with("value\nenv value\n") && !log.ends_with("\n0\n"), "{log}");
    let logs = lap();
    let output = plane.try_kubectl(&["exec", "-i", &name, "--", "wc", "-c"], &"x".repeat(10_000));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "10000", "{output:?}");
    let exec = lap();
    plane.kubectl(&["delete", "pod", &name, "--wait=false", "--grace-period=1"]);
    joined.wait_gone(&name);
    let deletion = lap();
    let times = format!(
        "pod Ready after {start:.1} s, logs {logs:.1} s, exec with 10 kB of input {exec:.1} s, deletion \
         {deletion:.1} s"
    );
    (counted(&linked.requests()), times)
}

/// Round trips of 600 ms, 64 kbit/s and 5 % of loss, in both directions and for the API server's own
/// connections to the node: a node is Ready and stays so, and nothing is sent twice without need.
// Runtimes: containerd 2.
#[test]
fn node_behind_a_satellite_runs_pods_and_sends_little_more_than_on_a_quick_link() {
    let quick = LinkedNode::start("quicklink", Profile::QUICK);
    let (expected, times) = live(&quick);
    let total: usize = expected.values().sum();
    quick.print(&format!("{times}; {total} requests for a pod"));
    quick.joined.finish(&[]);

    let slow = LinkedNode::start("slowlink", SATELLITE);
    let ready = slow.ready.0.duration_since(slow.begun);
    let (found, times) = live(&slow);
    let total_found: usize = found.values().sum();
    holds_for("Ready", SPAN.saturating_sub(slow.ready.0.elapsed()), || slow.is_still_ready());
    assert!(slow.is_still_ready(), "{:?}", slow.joined.object());
    slow.print(&format!(
        "Node Ready after {:.1} s, {times}; {total_found} requests for a pod",
        ready.as_secs_f64()
    ));
    assert!(slow.longest_lease().is_some_and(|time| time < LEASE), "{:?}", slow.longest_lease());
    if !skip_on_go_kubelet("requests on a slow link", "their number is not ours") {
        assert!(total_found <= total + SPARE, "quick {expected:#?}, slow {found:#?}");
    }
    slow.joined.finish(&[]);
}

/// A NAT forgets the watches, which have nothing to say for 20 s, and the lease's connection survives. Only
/// keep-alive shows that: probes after 15 s, and the end 30 s after the last one with a reply.
// Runtimes: containerd 2.
#[test]
fn change_arrives_after_a_nat_has_forgotten_the_watches() {
    let reason = "its one connection is never without a byte for 20 s";
    if skip_on_go_kubelet("a NAT that forgets", reason) {
        return;
    }
    silence_forgotten();
    let memory = Duration::from_secs(20);
    let profile = Profile { forget_after: Some(memory), ..Profile::QUICK };
    let linked = LinkedNode::start("natlink", profile);
    let joined = &linked.joined;
    joined.bind(&pod("natlink-web", json!([busybox("main", FOREVER)])));
    joined.wait_ready("natlink-web");
    // The last change of the pod was its Ready: from here on the watch has nothing to deliver.
    let silent = Instant::now();
    pause(memory + Duration::from_secs(3));
    wait_until("connections to be forgotten", LIMIT, || linked.to_server.forgotten(0) >= 3);
    let begun = Instant::now();
    let patch = r#"{"spec":{"activeDeadlineSeconds":1}}"#;
    joined.plane.kubectl(&["patch", "pod", "natlink-web", "-p", patch]);
    // Without keep-alive the watch would be opened again 150 s after its last byte.
    let limit = Duration::from_secs(140).saturating_sub(silent.elapsed());
    wait_until("the change to arrive", limit, || {
        let pod = joined.plane.poll(&["pod", "natlink-web"]);
        pod.is_some_and(|pod| text(&pod, "/status/reason") == "DeadlineExceeded")
    });
    assert!(linked.is_still_ready(), "{:?}", joined.object());
    linked.print(&format!("a change arrived {:.1} s after it was made", begun.elapsed().as_secs_f64()));
    assert!(linked.longest_lease().is_some_and(|time| time < LEASE), "{:?}", linked.longest_lease());
    linked.joined.finish(&["natlink-web"]);
}

/// All connections are reset every 20 s, at any moment of a request.
// Runtimes: containerd 2.
#[test]
fn node_whose_connections_are_reset_every_20_s_stays_ready_and_lists_nothing_again() {
    let cut_every = Some(Duration::from_secs(20));
    let profile = Profile { delay: Duration::from_millis(100), cut_every, ..Profile::QUICK };
    let linked = LinkedNode::start("cutlink", profile);
    let joined = &linked.joined;
    joined.bind(&pod("cutlink-a", json!([busybox("main", FOREVER)])));
    joined.wait_ready("cutlink-a");
    let before = (linked.lists(&COLLECTIONS), linked.to_server.cuts());
    wait_until("two resets more", LIMIT, || linked.to_server.cuts() >= before.1 + 2);
    joined.bind(&pod("cutlink-b", json!([busybox("main", FOREVER)])));
    joined.wait_ready("cutlink-b");
    holds_for("Ready", SPAN.saturating_sub(linked.ready.0.elapsed()), || linked.is_still_ready());
    let lists = linked.lists(&COLLECTIONS) - before.0;
    linked.print(&format!("{} resets, {lists} lists after them", linked.to_server.cuts()));
    assert!(linked.longest_lease().is_some_and(|time| time < LEASE), "{:?}", linked.longest_lease());
    if !skip_on_go_kubelet("lists after resets", "their number is not ours") {
        assert_eq!(lists, 0);
    }
    linked.joined.finish(&["cutlink-a", "cutlink-b"]);
}
