//! The control plane goes away and comes back.

use std::time::Duration;

use serde_json::json;

use crate::joined::{Joined, LIMIT, condition, directory, pod, text};
use crate::support::control_plane::{API_SERVER, Choice, ControlPlane};
use crate::support::node::{FOREVER, busybox, simple};
use crate::support::wait::{pause, wait_until};

/// For a minute there is no API server: everything goes on, and afterwards all is told.
#[test]
fn a_minute_without_the_api_server() {
    let plane =
        ControlPlane::start_with(&directory("away-cp"), &Choice { scheduler: false, ..Choice::default() });
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    let mut joined = Joined::prepare(&plane, "away", json!({})).start_and_wait();
    joined.bind(&pod("away-web", json!([busybox("main", FOREVER)])));
    let before = joined.wait_ready("away-web");
    joined.node.apply("one.json", &simple("one"));
    joined.wait_ready("one-away");

    plane.stop(API_SERVER);
    // A dead container comes back, a static pod starts, an edit is carried out.
    let id = text(&before, "/status/containerStatuses/0/containerID")
        .trim_start_matches("containerd://")
        .to_owned();
    joined.node.containerd.kill_task(&id);
    joined.node.apply("two.json", &simple("two"));
    joined.node.wait_ready("two");
    wait_until("the killed container to come back", LIMIT, || {
        joined.node.running_ids().len() == 3 && !joined.node.running_ids().contains(&id)
    });
    pause(Duration::from_secs(40));
    let running = joined.node.running_ids();

    plane.resume(API_SERVER);
    joined.wait_pod("away-web", "told of its restart", |pod| {
        pod["status"]["containerStatuses"][0]["restartCount"] == json!(1) && condition(pod, "Ready") == "True"
    });
    joined.wait_ready("two-away");
    joined.wait_node_ready();
    assert_eq!(joined.node.running_ids(), running, "its return restarts nothing");

    // History is forgotten meanwhile: old watches are answered with 410.
    plane.compact();
    plane.stop(API_SERVER);
    plane.resume(API_SERVER);
    joined.bind(&pod("away-late", json!([busybox("main", FOREVER)])));
    joined.wait_ready("away-late");

    // It is there and does not answer: nothing hangs for ever.
    plane.freeze(API_SERVER);
    joined.node.apply("three.json", &simple("three"));
    joined.node.wait_ready("three");
    plane.thaw(API_SERVER);
    joined.wait_ready("three-away");

    // Started while there is nobody to ask: static pods do not wait.
    joined.node.stop_agent();
    plane.stop(API_SERVER);
    joined.node.start_agent();
    joined.node.apply("four.json", &simple("four"));
    joined.node.wait_ready("four");
    assert!(running.iter().all(|id| joined.node.running_ids().contains(id)), "nobody knows of orphans yet");
    plane.resume(API_SERVER);
    joined.wait_ready("four-away");
    for file in ["one.json", "two.json", "three.json", "four.json"] {
        joined.node.remove(file);
    }
    joined.finish(&["away-web", "away-late"]);
}
