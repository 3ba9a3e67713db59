//! The event recorder: what is counted, combined and held back.

use serde_json::{Value, json};

use crate::support::look::Told;
use crate::support::node::{FOREVER, LONG, Node, busybox, pod, restarts, simple, waiting_reason};
use crate::support::wait::{wait_for, wait_until};

/// A pod of `number` containers whose images have names that cannot be, and a good one last.
fn unnameable(name: &str, number: usize) -> Value {
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

fn total(told: &[Told]) -> u64 {
    told.iter().map(|event| event.count).sum()
}

#[test]
fn many_failures_of_one_kind_become_one_event() {
    let node = Node::start("combined");
    node.apply("web.json", &unnameable("web", 12));
    node.wait_pod("web", "waiting for all images", LONG, |pod| {
        waiting_reason(pod, "c11") == "InvalidImageName"
    });
    let told = wait_for("the combined event", LONG, || {
        let told = node.told_of("web", "InspectFailed");
        told.iter().any(|event| event.message.starts_with("(combined from similar events): ")).then_some(told)
    });
    let combined: Vec<_> = told.iter().filter(|event| event.message.starts_with("(combined")).collect();
    assert_eq!(combined.len(), 1, "{told:#?}");
    assert!(told.len() <= 11, "{} events, the combined one among them", told.len());
    assert!(node.told_of("web", "Pulling").is_empty(), "a name that cannot be is not pulled");
    node.finish();
}

#[test]
fn a_flood_of_warnings_is_held_back_and_the_rest_is_not() {
    let node = Node::start("flood");
    node.apply("web.json", &unnameable("web", 30));
    node.wait_pod("web", "waiting for all images", LONG, |pod| {
        waiting_reason(pod, "c29") == "InvalidImageName"
    });
    node.wait_told("web", "Started", "");
    let warnings = |node: &Node| -> Vec<Told> {
        node.told("web").into_iter().filter(|event| event.kind == "Warning").collect()
    };
    // 60 warnings were raised; 25 at once are let through, and one more every five minutes. A
    // later repeat may count those held back before it.
    let told = warnings(&node);
    assert!((10..=26).contains(&told.len()), "{} distinct warnings", told.len());
    // Another pod has a budget of its own.
    node.apply("other.json", &unnameable("other", 1));
    node.wait_told("other", "InspectFailed", "");
    // What is normal still comes.
    node.remove("web.json");
    node.wait_told("web", "Killing", "Stopping container good");
    assert!(warnings(&node).len() <= 26);
    node.finish();
}

#[test]
fn a_crash_loop_is_one_event_and_starts_are_counted() {
    let mut node = Node::start("counted");
    let mut bad = pod("bad", json!([busybox("main", "exit 1")]));
    bad["spec"]["restartPolicy"] = json!("OnFailure");
    node.apply("bad.json", &bad);
    let waiting = node.wait_pod("bad", "in its second wait", LONG, |pod| {
        restarts(pod, "main") >= 2 && waiting_reason(pod, "main") == "CrashLoopBackOff"
    });
    assert_eq!(crate::support::node::phase(&waiting), "Running");
    let uid = crate::support::node::uid(&waiting);
    wait_until("the event to be counted again", LONG, || total(&node.told_of("bad", "BackOff")) >= 2);
    let told = node.told_of("bad", "BackOff");
    assert_eq!(told.len(), 1, "{told:#?}");
    assert_eq!((told[0].kind.as_str(), told[0].field.as_str()), ("Warning", "spec.containers{main}"));
    assert_eq!(
        told[0].message,
        format!("Back-off restarting failed container main in pod bad-e2e_default({uid})")
    );
    assert_eq!((told[0].namespace.as_str(), told[0].uid.as_str()), ("default", uid.as_str()));

    // The node's own events: one start, in the namespace default, about a node without a UID.
    let starts = |node: &Node| -> Vec<Told> {
        node.told("")
            .into_iter()
            .filter(|event| event.object == "Node" && event.reason == "Starting")
            .collect()
    };
    for _ in 0..2 {
        let told = starts(&node);
        assert_eq!(total(&told), 1, "{told:#?}");
        assert_eq!((told[0].message.as_str(), told[0].kind.as_str()), ("Starting kubelet.", "Normal"));
        assert_eq!(
            (told[0].name.as_str(), told[0].uid.as_str(), told[0].namespace.as_str()),
            ("e2e", "", "default")
        );
        node.kill_agent();
        node.start_agent();
        wait_until("the start to be told", LONG, || !starts(&node).is_empty());
    }
    node.apply("fine.json", &simple("fine"));
    node.wait_ready("fine");
    node.wait_told("fine", "Started", "");
    let mut told = node.told("fine");
    told.retain(|event| event.kind == "Normal");
    let created: Vec<_> = told.into_iter().map(|event| event.reason).collect();
    assert_eq!(created, ["Pulled", "Created", "Started"]);
    node.finish();
}
