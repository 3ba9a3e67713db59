//! The machine's clock is set while the agent runs, and is wrong when it starts: no container
//! restarts because of it, no wait becomes longer, requests stay rare, and statuses and lease are
//! still updated. The runtime has the same clock; the API server has that of another machine.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api_server::{Case, MAX_RATE, attempts, begin_on, case, config, meanwhile, settle, wait_reported};
use crate::support::fake_api::FakeApi;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, busybox, pod, restarts, simple};
use crate::support::wait::{pause, wait_until};
use crate::{in_parallel, print_line, two};

const DAY: i64 = 24 * 3600;

/// Calls to the runtime in a second. A few pods that start and stop take some.
const MAX_CALLS: f64 = 50.0;

/// The offsets of the clock in seconds, one after the other.
const JUMPS: &[(&str, &[i64])] = &[
    ("an hour ahead", &[3600]),
    ("an hour back", &[-3600]),
    ("a day ahead", &[DAY]),
    ("a day back", &[-DAY]),
    ("ten years ahead", &[3653 * DAY]),
    ("twenty years back", &[-7305 * DAY]),
    ("to and fro", &[DAY, -DAY, 30, -30]),
];

const CASE: Case = case("the clock is set", 10, |_| {});

/// A pod that asks for a token.
fn with_token(name: &str) -> Value {
    let mut pod = simple(name);
    pod["spec"]["serviceAccountName"] = json!("default");
    let token = json!({"serviceAccountToken": {"path": "token", "expirationSeconds": 600}});
    pod["spec"]["volumes"] = json!([{"name": "token", "projected": {"sources": [token]}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "token", "mountPath": "/token"}]);
    pod
}

fn joined() -> FakeNode {
    let mut node = FakeNode::prepare(config());
    node.use_own_clock();
    node.start_joined()
}

fn token_requests(node: &FakeNode) -> usize {
    node.api().received().iter().filter(|request| request.path().ends_with("/token")).count()
}

/// How many more requests are correct on a slow machine: for a clock that is ahead each token has
/// expired, and one that is a minute old is requested again.
fn more_requests(bound: Instant) -> usize {
    (bound.elapsed().as_secs() / 60) as usize
}

#[test]
fn changed_clock_restarts_no_container() {
    in_parallel(JUMPS, |(name, jumps)| {
        let (node, before) = begin_on(joined(), &CASE);
        let bound = Instant::now();
        node.bind(&with_token("token"));
        wait_reported(&node, &CASE, "token");
        node.bind(&pod("loop", json!([busybox("main", "sleep 1; exit 1")])));
        let loops = || node.shown("loop").map_or(0, |pod| restarts(&pod, "main"));
        wait_until("a container that waits for its next start", LONG, || loops() >= 1);
        // Into the wait before the second one, which takes ten seconds.
        pause(Duration::from_secs(3));
        let (sent, called, begun) = (attempts(&node), node.fake.calls().len(), Instant::now());
        for ahead in *jumps {
            node.set_clock(*ahead);
            pause(Duration::from_secs(1));
        }
        meanwhile(&node, true);
        while begun.elapsed() < Duration::from_secs(10) {
            node.assert_no_duplicates();
            pause(Duration::from_millis(100));
        }
        let per_second = |count: f64| count / begun.elapsed().as_secs_f64();
        let rate = per_second(attempts(&node) - sent);
        let calls = per_second((node.fake.calls().len() - called) as f64);
        print_line(&format!("clock, {name}: {rate:.1} requests/s, {calls:.1} calls/s"));
        assert!(rate <= MAX_RATE && calls <= MAX_CALLS, "{rate:.1} requests/s, {calls:.1} calls/s");
        wait_until("the next start after its wait", LONG, || loops() >= 2);
        // Once at the start, once for a clock by which it has expired, and the same again.
        let requests = token_requests(&node);
        let most = 1 + jumps.len() + more_requests(bound);
        assert!(requests <= most, "{requests} requests for a token, at most {most}");
        settle(node, &CASE, &before, 0);
    });
}

/// As on a machine without a battery for its clock: it starts with a wrong time, and learns the
/// right one later.
#[test]
fn wrong_clock_at_start_restarts_no_container() {
    in_parallel(&[("a day ahead", DAY), ("a day back", -DAY), ("long ago", -7305 * DAY)], |(_, ahead)| {
        let mut node = joined();
        node.bind(&two("web"));
        let bound = Instant::now();
        node.bind(&with_token("token"));
        node.apply(&simple("fixed"));
        for name in ["web", "token", "fixed"] {
            wait_reported(&node, &CASE, name);
        }
        let running = |node: &FakeNode| ["web", "token", "fixed"].map(|name| node.running(name));
        let before = running(&node);
        node.kill_agent();
        node.set_clock(*ahead);
        node.start_agent();
        node.bind(&simple("late"));
        wait_reported(&node, &CASE, "late");
        node.set_clock(0);
        node.bind(&simple("later"));
        for name in ["web", "token", "fixed", "late", "later"] {
            wait_reported(&node, &CASE, name);
        }
        assert_eq!(running(&node), before);
        assert_eq!(restarts(&node.shown("web").unwrap(), "one"), 0);
        let requests = token_requests(&node);
        let most = 3 + more_requests(bound);
        assert!(requests <= most, "{requests} requests for a token, at most {most}");
        node.finish();
    });
}

/// A pod with a deadline counts its time by the monotonic clock, also over a restart of the agent.
#[test]
fn wrong_clock_ends_no_running_pod_with_a_deadline() {
    in_parallel(&[("ten years ahead", 3653 * DAY), ("fifty years back", -18_262 * DAY)], |(_, ahead)| {
        let mut node = joined();
        let mut limited = pod("limited", json!([busybox("main", FOREVER)]));
        limited["spec"]["activeDeadlineSeconds"] = json!(3600);
        node.bind(&limited);
        wait_reported(&node, &CASE, "limited");
        let before = node.running("limited");
        node.set_clock(*ahead);
        // Syncs follow in the order of their causes: a later pod is a later turn of the loop.
        node.bind(&simple("late"));
        wait_reported(&node, &CASE, "late");
        node.kill_agent();
        node.start_agent();
        node.bind(&simple("later"));
        for name in ["limited", "late", "later"] {
            wait_reported(&node, &CASE, name);
        }
        assert_eq!(node.running("limited"), before);
        node.finish();
    });
}

/// A machine without a battery starts in 1970: an operator sees it, and nothing stops.
#[test]
fn clock_behind_the_stored_bound_is_reported_and_stops_nothing() {
    let mut node = FakeNode::prepare(config());
    node.use_own_clock();
    let api = FakeApi::start();
    let cluster = json!({"server": api.url()});
    node.join_cluster(api, cluster);
    // To join a cluster sets the flags.
    node.add_flags(&["--offline"]);
    let mut node = node.start_joined();
    node.bind(&simple("web"));
    wait_reported(&node, &CASE, "web");
    let before = node.running("web");
    wait_until("the bound to be stored", LONG, || node.root().join("offline/clock").exists());
    node.kill_agent();
    node.set_clock(-7305 * DAY);
    node.start_agent();
    let is_shown = |node: &FakeNode| {
        let output = node.command(&["status", "-o", "json"]);
        String::from_utf8_lossy(&output.stdout).contains("the clock of this machine is behind")
    };
    wait_until("the problem in the status", LONG, || is_shown(&node));
    wait_until("the event", LONG, || node.log().contains("the clock of this machine is behind"));
    node.bind(&simple("late"));
    wait_reported(&node, &CASE, "late");
    assert_eq!(node.running("web"), before);
    node.set_clock(0);
    wait_until("the end of the problem", LONG, || !is_shown(&node));
    node.finish();
}
