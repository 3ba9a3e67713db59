//! The event recorder: what is counted, combined and held back.

use serde_json::{Value, json};

use crate::support::node::{FOREVER, LONG, Node, busybox, pod, restarts, simple, waiting_reason};
use crate::support::node_inspection::NodeEvent;
use crate::support::wait::{wait_for, wait_until};

/// A pod of `number` containers with invalid image names, and a valid one last.
fn invalid_images(name: &str, number: usize) -> Value {
    let mut containers: Vec<Value> = (0..number)
        .map(|index| {
            let mut container = busybox(&format!("c{index:02}"), FOREVER);
            container["image"] = json!(format!("UPPER/case{index:02}:!"));
            container
        })
        .collect();
    containers.push(busybox("good", FOREVER));
    pod(name, json!(containers))
}

fn total(events: &[NodeEvent]) -> u64 {
    events.iter().map(|event| event.count).sum()
}

// Runtimes: containerd 2.
#[test]
fn similar_failures_are_aggregated_into_one_event() {
    let node = Node::start("combined");
    node.apply("web.json", &invalid_images("web", 12));
    node.wait_pod("web", "waiting for all images", LONG, |pod| {
        waiting_reason(pod, "c11") == "InvalidImageName"
    });
    let events = wait_for("the combined event", LONG, || {
        let events = node.events_with_reason("web", "InspectFailed");
        events
            .iter()
            .any(|event| event.message.starts_with("(combined from similar events): "))
            .then_some(events)
    });
    let combined: Vec<_> = events.iter().filter(|event| event.message.starts_with("(combined")).collect();
    assert_eq!(combined.len(), 1, "{events:#?}");
    assert!(events.len() <= 11, "{} events, the combined one among them", events.len());
    assert!(node.events_with_reason("web", "Pulling").is_empty(), "a name that cannot be is not pulled");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn warning_events_are_rate_limited_and_normal_ones_are_not() {
    let node = Node::start("flood");
    node.apply("web.json", &invalid_images("web", 30));
    node.wait_pod("web", "waiting for all images", LONG, |pod| {
        waiting_reason(pod, "c29") == "InvalidImageName"
    });
    node.wait_event("web", "Started", "");
    let warnings = |node: &Node| -> Vec<NodeEvent> {
        node.events("web").into_iter().filter(|event| event.kind == "Warning").collect()
    };
    // 60 warnings were raised; 25 at once are sent, and one more every five minutes. A
    // later repetition may include the counts of suppressed ones.
    let events = warnings(&node);
    assert!((10..=26).contains(&events.len()), "{} distinct warnings", events.len());
    // Another pod has its own limit.
    node.apply("other.json", &invalid_images("other", 1));
    node.wait_event("other", "InspectFailed", "");
    // Normal events are still sent.
    node.remove("web.json");
    node.wait_event("web", "Killing", "Stopping container good");
    assert!(warnings(&node).len() <= 26);
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn crash_loop_is_one_event_with_a_count() {
    let mut node = Node::start("counted");
    let mut bad = pod("bad", json!([busybox("main", "exit 1")]));
    bad["spec"]["restartPolicy"] = json!("OnFailure");
    node.apply("bad.json", &bad);
    let waiting = node.wait_pod("bad", "in its second wait", LONG, |pod| {
        restarts(pod, "main") >= 2 && waiting_reason(pod, "main") == "CrashLoopBackOff"
    });
    assert_eq!(crate::support::node::phase(&waiting), "Running");
    let uid = crate::support::node::uid(&waiting);
    wait_until("the event to be counted again", LONG, || {
        total(&node.events_with_reason("bad", "BackOff")) >= 2
    });
    let events = node.events_with_reason("bad", "BackOff");
    assert_eq!(events.len(), 1, "{events:#?}");
    assert_eq!((events[0].kind.as_str(), events[0].field.as_str()), ("Warning", "spec.containers{main}"));
    assert_eq!(
        events[0].message,
        format!("Back-off restarting failed container main in pod bad-e2e_default({uid})")
    );
    assert_eq!((events[0].namespace.as_str(), events[0].uid.as_str()), ("default", uid.as_str()));

    // The node's own events: one start, in the namespace default, about a node without a UID.
    let starts = |node: &Node| -> Vec<NodeEvent> {
        node.events("")
            .into_iter()
            .filter(|event| event.object == "Node" && event.reason == "Starting")
            .collect()
    };
    for _ in 0..2 {
        let events = starts(&node);
        assert_eq!(total(&events), 1, "{events:#?}");
        assert_eq!((events[0].message.as_str(), events[0].kind.as_str()), ("Starting kubelet.", "Normal"));
        assert_eq!(
            (events[0].name.as_str(), events[0].uid.as_str(), events[0].namespace.as_str()),
            ("e2e", "", "default")
        );
        node.kill_agent();
        node.start_agent();
        wait_until("the start to be reported", LONG, || !starts(&node).is_empty());
    }
    node.apply("fine.json", &simple("fine"));
    node.wait_ready("fine");
    node.wait_event("fine", "Started", "");
    let mut events = node.events("fine");
    events.retain(|event| event.kind == "Normal");
    let created: Vec<_> = events.into_iter().map(|event| event.reason).collect();
    assert_eq!(created, ["Pulled", "Created", "Started"]);
    node.finish();
}
