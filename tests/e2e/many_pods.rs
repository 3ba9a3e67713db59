//! Many pods at once, and an agent that restarts while they run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::support::node::{LONG, Node, container_id, is_ready, restarts, simple};
use crate::support::wait::{holds_for, wait_until};

const PODS: usize = 30;

fn name(number: usize) -> String {
    format!("pod{number:02}")
}

fn start_all(node: &Node) -> BTreeMap<String, String> {
    for number in 0..PODS {
        node.apply(&format!("{}.json", name(number)), &simple(&name(number)));
    }
    let begun = Instant::now();
    wait_until("all pods to be ready", LONG * 4, || {
        node.pods().iter().filter(|pod| is_ready(pod)).count() == PODS
    });
    println!("{PODS} pods ready after {:?}", begun.elapsed());
    node.pods()
        .iter()
        .map(|pod| (pod.metadata.name.clone().unwrap_or_default(), container_id(pod, "main")))
        .collect()
}

// Runtimes: containerd 2.
#[test]
fn thirty_pods_start_at_once() {
    let node = Node::start("thirty");
    let ids = start_all(&node);
    assert_eq!(ids.len(), PODS);
    let running = node.running_of_all();
    assert_eq!(running.len(), PODS);
    assert!(
        running.values().all(|pod| pod.values().flatten().count() == 1),
        "each exactly once: {running:?}"
    );
    println!("usage with {PODS} pods: {:?}", node.usage());
    node.finish_with_empty_runtime();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn agent_restart_restarts_no_container() {
    let mut node = Node::start("takeover");
    let before = start_all(&node);
    for way in ["stop", "kill"] {
        if way == "stop" {
            node.stop_agent();
        } else {
            node.kill_agent();
        }
        let begun = Instant::now();
        node.start_agent();
        wait_until("all statuses to be right", LONG, || {
            let pods = node.try_pods().unwrap_or_default();
            pods.iter().filter(|pod| is_ready(pod) && restarts(pod, "main") == 0).count() == PODS
        });
        let took = begun.elapsed();
        println!("after {way}: all statuses right {took:?} after the start");
        let same = || {
            node.pods().iter().all(|pod| {
                let name = pod.metadata.name.clone().unwrap_or_default();
                before.get(&name) == Some(&container_id(pod, "main"))
                    && is_ready(pod)
                    && restarts(pod, "main") == 0
            })
        };
        holds_for("the same containers run on", Duration::from_secs(5), same);
    }
    let running = node.running_of_all();
    assert_eq!(running.values().flat_map(BTreeMap::values).flatten().count(), PODS);
    node.finish();
}
