//! Evictions on the fake runtime, with a fake API server: what is removed before a pod is evicted,
//! and what a pod that was evicted stays.

use serde_json::{Value, json};

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{busybox, is_ready, pod, simple};
use crate::support::wait::wait_until;

/// No disk in use has so much space: every pod but critical ones is evicted. The agent knows the
/// images after five seconds, and later on a busy machine.
fn no_space() -> Value {
    json!({
        "evictionSoft": {"nodefs.available": "99.9%"},
        "evictionSoftGracePeriod": {"nodefs.available": "20s"},
        "imageMinimumGCAge": "1ns",
    })
}

fn status(node: &FakeNode, name: &str) -> Value {
    let shown = node.api().object(&FakeNode::pod_path(name)).unwrap_or_default();
    shown["status"].clone()
}

fn wait_shown_ready(node: &FakeNode, name: &str) {
    wait_until("the pod to be ready at the API server", LONG, || {
        node.shown(name).is_some_and(|pod| is_ready(&pod))
    });
}

#[test]
fn short_disk_removes_images_and_dead_containers_and_then_evicts_pods() {
    let mut node = FakeNode::join(json!({}));
    node.fake.add_image("registry.test/unused:1");
    node.apply(&simple("static"));
    // One that ends with an error, and one that exits with 0.
    node.bind(&pod("web", json!([busybox("main", "sleep 100000")])));
    node.bind(&simple("polite"));
    wait_shown_ready(&node, "web");
    wait_shown_ready(&node, "polite");
    node.wait_ready("static");
    // A pod that has ended keeps its last container.
    let mut done = simple("done");
    done["spec"]["restartPolicy"] = json!("Never");
    node.bind(&done);
    wait_shown_ready(&node, "done");
    assert!(node.fake.kill_container(&node.containers("done")[0].status.id.clone(), 0));
    wait_until("the pod to end", LONG, || status(&node, "done")["phase"] == "Succeeded");
    node.stop_agent();

    node.configure(no_space());
    node.fake.clear_journal();
    node.start_agent();
    wait_until("the pod to be evicted", LONG, || status(&node, "web")["reason"] == "Evicted");
    let ended = status(&node, "web");
    assert_eq!(ended["phase"], "Failed");
    let text = ended["message"].as_str().expect("a message");
    let start = "The node was low on resource: ephemeral-storage. Threshold quantity: ";
    assert!(text.starts_with(start), "{text}");
    // Only what was not needed was removed, and before the pod was stopped.
    let calls = node.fake.calls();
    let first = |method: &str| calls.iter().position(|call| *call == method);
    assert!(
        first("RemoveContainer").is_some() && first("RemoveContainer") < first("StopContainer"),
        "{calls:?}"
    );
    assert!(first("RemoveImage").is_some() && first("RemoveImage") < first("StopContainer"), "{calls:?}");
    assert!(node.containers("done").is_empty());
    assert_eq!(status(&node, "done")["phase"], "Succeeded");
    // As upstream, the end of its container decides about the phase, and only the condition and the event
    // show the eviction.
    let ending = || status(&node, "polite")["phase"].as_str().is_some_and(|phase| phase != "Running");
    wait_until("the other pod to be evicted", LONG, ending);
    let polite = status(&node, "polite");
    assert_eq!((&polite["phase"], &polite["reason"]), (&json!("Succeeded"), &Value::Null));
    let mut conditions = polite["conditions"].as_array().into_iter().flatten();
    let disrupted = conditions.find(|condition| condition["type"] == "DisruptionTarget");
    let message = disrupted.and_then(|condition| condition["message"].as_str()).unwrap_or_default();
    assert!(message.starts_with(start), "{polite}");
    node.assert_runs_once("static", &["main"]);
    wait_until("the condition", LONG, || {
        let object = node.api().object("/api/v1/nodes/e2e").unwrap_or_default();
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions
            .iter()
            .any(|condition| condition["type"] == "DiskPressure" && condition["status"] == "True")
    });
    // A static pod runs, and another one does not.
    node.apply(&simple("static2"));
    node.wait_ready("static2");
    node.bind(&pod("late", json!([{"name": "main", "image": "localhost/busybox:1"}])));
    wait_until("the pod to be refused", LONG, || status(&node, "late")["reason"] == "Evicted");
    let refused = "Pod was rejected: The node had condition: [DiskPressure]. ";
    assert_eq!(status(&node, "late")["message"], refused);
    // Both stay as they are when the agent is restarted without the threshold.
    node.stop_agent();
    node.configure(json!({}));
    node.start_agent();
    node.bind(&simple("after"));
    wait_shown_ready(&node, "after");
    assert_eq!(status(&node, "web")["message"], text);
    assert_eq!(status(&node, "late")["message"], refused);
    assert_eq!(status(&node, "polite")["phase"], "Succeeded");
    for name in ["web", "polite", "late"] {
        assert!(node.running(name).is_empty(), "{name}");
    }
    for name in ["web", "polite", "done", "late", "after"] {
        node.api().delete_pod(&FakeNode::pod_path(name));
    }
    for name in ["static", "static2"] {
        node.remove(name);
    }
    wait_until("the pods to be gone", LONG, || node.fake.sandboxes().is_empty());
    node.finish();
}
