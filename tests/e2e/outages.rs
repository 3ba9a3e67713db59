//! A runtime that goes away and comes back.

use std::time::Duration;

use crate::support::node::{LONG, Node, container_id, is_ready, restarts, simple};
use crate::support::wait::{holds_for, pause, wait_until};

// Runtimes: containerd 1, containerd 2.
#[test]
fn pods_survive_half_a_minute_without_the_runtime() {
    let node = Node::start("outage");
    for name in ["one", "two", "three"] {
        node.apply(&format!("{name}.json"), &simple(name));
    }
    let before: Vec<String> =
        ["one", "two", "three"].iter().map(|name| container_id(&node.wait_ready(name), "main")).collect();
    node.containerd.stop();
    // Changes during the outage are applied afterwards.
    node.remove("three.json");
    node.apply("four.json", &simple("four"));
    wait_until("status to name the runtime", LONG, || {
        let (code, text) = node.health("/healthz?verbose");
        code != 200 && text.contains("runtime")
    });
    // The length of the outage is the input here.
    pause(Duration::from_secs(30));
    assert!(node.try_pods().is_some(), "the agent answers while its runtime is away");
    node.containerd.resume();
    node.wait_ready("four");
    node.wait_gone("three");
    wait_until("health", LONG, || node.health("/healthz").0 == 200);
    for (name, id) in ["one", "two"].iter().zip(&before) {
        let after = node.wait_ready(name);
        assert_eq!((&container_id(&after, "main"), restarts(&after, "main")), (id, 0), "{name} ran on");
    }
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn pods_survive_a_runtime_restart() {
    let node = Node::start("cdrestart");
    let names: Vec<String> = (0..8).map(|number| format!("pod{number}")).collect();
    for name in &names {
        node.apply(&format!("{name}.json"), &simple(name));
    }
    let before: Vec<String> = names.iter().map(|name| container_id(&node.wait_ready(name), "main")).collect();
    for _ in 0..2 {
        node.containerd.stop();
        node.containerd.resume();
    }
    // A killed container after it shows that observation works again.
    node.containerd.kill_task(&before[0]);
    node.wait_pod(&names[0], "restarted", LONG, |pod| restarts(pod, "main") == 1 && is_ready(pod));
    let same = || {
        names.iter().zip(&before).skip(1).all(|(name, id)| {
            node.pod(name).is_some_and(|pod| {
                is_ready(&pod) && container_id(&pod, "main") == *id && restarts(&pod, "main") == 0
            })
        })
    };
    wait_until("all statuses to be right", LONG, same);
    holds_for("the containers run on", Duration::from_secs(5), same);
    node.finish();
}
