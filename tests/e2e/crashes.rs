//! The agent is killed at random times while pods start.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::support::node::{LONG, Node, is_ready, simple};
use crate::support::wait::{pause, wait_until};

const PODS: usize = 20;

/// Random delays; a failed run can be repeated with the seed that it printed.
struct RandomDelays(u64);

impl RandomDelays {
    fn next(&mut self) -> Duration {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        Duration::from_millis(self.0 % 900)
    }
}

// Runtimes: containerd 2.
#[test]
fn pods_run_once_though_the_agent_is_killed_at_random_times() {
    let seed = std::env::var("E2E_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(1, |since| since.as_secs() | 1)
    });
    println!("E2E_SEED={seed}");
    let mut moments = RandomDelays(seed);
    let mut node = Node::start("crash");
    for number in 0..PODS {
        let mut manifest = simple(&format!("pod{number:02}"));
        manifest["spec"]["volumes"] = serde_json::json!([{"name": "fast", "emptyDir": {"medium": "Memory"}}]);
        manifest["spec"]["containers"][0]["volumeMounts"] =
            serde_json::json!([{"name": "fast", "mountPath": "/fast"}]);
        node.apply(&format!("pod{number:02}.json"), &manifest);
    }
    let mut kills = 0;
    let begun = Instant::now();
    while kills < 12 && begun.elapsed() < Duration::from_secs(60) {
        pause(moments.next());
        node.kill_agent();
        node.launch_agent();
        kills += 1;
    }
    node.wait_healthy();
    wait_until("all pods to be ready", LONG * 4, || {
        node.try_pods().unwrap_or_default().iter().filter(|pod| is_ready(pod)).count() == PODS
    });
    wait_until("each pod to run exactly once", LONG, || {
        let running = node.running_of_all();
        running.len() == PODS && running.values().flat_map(BTreeMap::values).all(|ids| ids.len() == 1)
    });
    // Leftovers of an interrupted start may still be removed.
    wait_until("one sandbox each", LONG, || {
        (0..PODS).all(|number| node.running_sandboxes(&format!("pod{number:02}")).len() == 1)
    });
    let mut strangers = Vec::new();
    wait_until("no task except those of the pods", LONG, || {
        node.running_tasks().is_some_and(|(own, others)| {
            strangers = others;
            own.len() == 2 * PODS
        })
    });
    if !strangers.is_empty() {
        eprintln!("tasks that containerd runs and its CRI does not know: {strangers:?}");
    }
    node.finish_with_empty_runtime();
}
