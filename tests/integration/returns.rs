//! The requests of a node whose API server was away: how many of each kind follow its return. Many nodes
//! send them in the same minute.

use serde_json::json;

use crate::support::fake_api::ReceivedRequest;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{NODE, phase, simple};
use crate::support::wait::wait_until;

/// The requests that `wanted` selects, as text for a failure.
fn selected(requests: &[ReceivedRequest], wanted: impl Fn(&ReceivedRequest) -> bool) -> Vec<String> {
    let requests = requests.iter().filter(|request| wanted(request));
    requests.map(|request| format!("{} {}", request.method, request.uri)).collect()
}

#[test]
fn each_part_of_a_node_sends_its_requests_once_after_a_return() {
    // The lease is renewed every two seconds.
    let node = FakeNode::join(json!({"nodeLeaseDurationSeconds": 8}));
    node.bind(&simple("web"));
    node.wait_ready("web");
    wait_until("the pod to be reported", LONG, || {
        node.shown("web").is_some_and(|pod| phase(&pod) == "Running")
    });
    let is_lease = |request: &ReceivedRequest| request.path().contains("/leases");
    let renewals = |requests: &[ReceivedRequest]| {
        selected(requests, |request| is_lease(request) && request.method == "PUT").len()
    };
    node.api().go_down();
    wait_until("the eighth failure of the lease", LONG, || {
        let log = node.log();
        log.lines().any(|line| line.contains("the lease of node") && line.contains("(8 times)"))
    });
    let earlier = node.api().requests();
    node.api().go_up();
    let since = || node.api().received().split_off(earlier);
    let is_watch_of = |request: &ReceivedRequest, plural: &str| {
        request.is_watch() && request.path().ends_with(&format!("/{plural}"))
    };
    // Watches return within ten seconds of the first contact. More renewals than this take as long.
    wait_until("all watches and ten renewals of the lease", LONG, || {
        let requests = since();
        let plurals = ["pods", "nodes", "services"];
        let are_open =
            plurals.iter().all(|plural| requests.iter().any(|request| is_watch_of(request, plural)));
        renewals(&requests) >= 10 && are_open
    });

    let requests = since();
    for plural in ["pods", "nodes", "services"] {
        let watches = selected(&requests, |request| is_watch_of(request, plural));
        assert_eq!(watches.len(), 1, "{watches:#?}");
    }
    let reads = selected(&requests, |request| is_lease(request) && request.method == "GET");
    assert_eq!(reads.len(), 1, "{reads:#?}");
    let node_path = format!("/api/v1/nodes/{NODE}");
    let own = selected(&requests, |request| request.path().starts_with(&node_path));
    assert!(own.len() <= 4, "{own:#?}");
    let status = selected(&requests, |request| {
        request.path() == format!("{}/status", FakeNode::pod_path("web"))
            || request.path() == FakeNode::pod_path("web")
    });
    assert!(status.len() <= 2, "an unchanged pod: {status:#?}");
    let others = selected(&requests, |request| {
        let path = request.path();
        !is_lease(request)
            && !request.is_watch()
            && !path.starts_with(&node_path)
            && !path.contains("/pods/")
            && !path.ends_with("/events")
    });
    assert!(others.len() <= 4, "{others:#?}");
    node.finish();
}
