//! The control plane goes away and comes back.

use std::time::Duration;

use serde_json::json;

use crate::joined::{JoinedNode, LIMIT, condition, directory, pod, text};
use crate::support::control_plane::{API_SERVER, ControlPlane, ControlPlaneOptions};
use crate::support::node::{FOREVER, busybox, simple};
use crate::support::wait::{pause, wait_until};

/// The API server is down for a minute: pods continue, and their statuses are sent afterwards.
// Runtimes: containerd 2.
#[test]
fn pods_survive_a_minute_without_the_api_server() {
    let plane = ControlPlane::start_with(
        &directory("away-cp"),
        &ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() },
    );
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    let mut joined = JoinedNode::prepare(&plane, "away", json!({})).start_and_wait();
    joined.bind(&pod("away-web", json!([busybox("main", FOREVER)])));
    let before = joined.wait_ready("away-web");
    joined.node.apply("one.json", &simple("one"));
    joined.wait_ready("one-away");

    plane.stop(API_SERVER);
    // A dead container restarts, a static pod starts, an edit is applied.
    let id = text(&before, "/status/containerStatuses/0/containerID")
        .trim_start_matches("containerd://")
        .to_owned();
    joined.node.containerd.kill_task(&id);
    joined.node.apply("two.json", &simple("two"));
    joined.node.wait_ready("two");
    wait_until("the killed container to restart", LIMIT, || {
        joined.node.running_ids().len() == 3 && !joined.node.running_ids().contains(&id)
    });
    pause(Duration::from_secs(40));
    let running = joined.node.running_ids();

    plane.resume(API_SERVER);
    joined.wait_pod("away-web", "shown with its restart", |pod| {
        pod["status"]["containerStatuses"][0]["restartCount"] == json!(1) && condition(pod, "Ready") == "True"
    });
    joined.wait_ready("two-away");
    joined.wait_node_ready();
    assert_eq!(joined.node.running_ids(), running, "its return restarts no container");

    // History is forgotten meanwhile: old watches are answered with 410.
    plane.compact();
    plane.stop(API_SERVER);
    plane.resume(API_SERVER);
    joined.bind(&pod("away-late", json!([busybox("main", FOREVER)])));
    joined.wait_ready("away-late");

    // It accepts connections and does not respond: nothing hangs forever.
    plane.freeze(API_SERVER);
    joined.node.apply("three.json", &simple("three"));
    joined.node.wait_ready("three");
    plane.thaw(API_SERVER);
    joined.wait_ready("three-away");

    // Started without an API server: static pods do not wait.
    joined.node.stop_agent();
    plane.stop(API_SERVER);
    joined.node.start_agent();
    joined.node.apply("four.json", &simple("four"));
    joined.node.wait_ready("four");
    assert!(
        running.iter().all(|id| joined.node.running_ids().contains(id)),
        "no pod is taken for an orphan yet"
    );
    plane.resume(API_SERVER);
    joined.wait_ready("four-away");
    for file in ["one.json", "two.json", "three.json", "four.json"] {
        joined.node.remove(file);
    }
    joined.finish(&["away-web", "away-late"]);
}
