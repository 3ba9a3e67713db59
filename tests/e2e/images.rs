//! Images and configurations that cannot run, and their statuses.

use serde_json::{Value, json};

use crate::support::node::{
    FOREVER, LONG, Node, busybox, container, describe, phase, pod, restarts, simple, waiting_reason,
};
use crate::support::wait::wait_until;

fn with_image(name: &str, image: &str, policy: &str) -> Value {
    let mut manifest = pod(name, json!([busybox("main", FOREVER)]));
    manifest["spec"]["containers"][0]["image"] = json!(image);
    manifest["spec"]["containers"][0]["imagePullPolicy"] = json!(policy);
    manifest
}

// Runtimes: containerd 2.
#[test]
fn unavailable_image_is_a_waiting_reason() {
    let node = Node::start("image");
    node.apply("never.json", &with_image("never", "localhost/none:1", "Never"));
    node.apply("invalid.json", &with_image("invalid", "UPPER/case:!", "IfNotPresent"));
    node.apply("absent.json", &with_image("absent", "registry.invalid/none:1", "IfNotPresent"));
    let never = node.wait_pod("never", "ErrImageNeverPull", LONG, |pod| {
        waiting_reason(pod, "main") == "ErrImageNeverPull"
    });
    assert_eq!(phase(&never), "Pending");
    node.wait_pod("invalid", "InvalidImageName", LONG, |pod| {
        waiting_reason(pod, "main") == "InvalidImageName"
    });
    node.wait_pod("absent", "ImagePullBackOff", LONG, |pod| {
        waiting_reason(pod, "main") == "ImagePullBackOff"
    });
    node.wait_pod("absent", "ErrImagePull again", LONG, |pod| waiting_reason(pod, "main") == "ErrImagePull");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn invalid_container_config_is_a_waiting_reason() {
    let node = Node::start("config");
    let mut root = simple("root");
    root["spec"]["securityContext"] = json!({"runAsNonRoot": true});
    node.apply("root.json", &root);
    let waiting = node.wait_pod("root", "CreateContainerConfigError", LONG, |pod| {
        waiting_reason(pod, "main") == "CreateContainerConfigError"
    });
    let message = container(&waiting, "main")
        .and_then(|status| status.state.as_ref()?.waiting.as_ref()?.message.clone())
        .unwrap_or_default();
    assert!(message.starts_with("container has runAsNonRoot and image will run as root"), "{message}");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn program_that_cannot_be_executed_is_a_start_error() {
    let node = Node::start("starterr");
    let mut manifest = pod("nothing", json!([busybox("main", "")]));
    manifest["spec"]["containers"][0]["command"] = json!(["/no/such/binary"]);
    node.apply("nothing.json", &manifest);
    // RunContainerError shows between the failed start and the next observation, then the
    // dead container's own reason, then the back-off.
    let seen = node.wait_pod("nothing", "restarted", LONG, |pod| restarts(pod, "main") >= 1);
    let status = container(&seen, "main").cloned().unwrap_or_default();
    let ends = [status.state.unwrap_or_default(), status.last_state.unwrap_or_default()];
    let ended = ends.iter().find_map(|state| state.terminated.as_ref());
    let ended = ended.unwrap_or_else(|| panic!("a terminated state: {}", describe(&seen)));
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (128, Some("StartError")));
    wait_until("an event to say what failed", LONG, || node.cli(&["events"]).contains("/no/such/binary"));
    node.wait_pod("nothing", "in back-off or RunContainerError", LONG, |pod| {
        ["CrashLoopBackOff", "RunContainerError"].contains(&waiting_reason(pod, "main"))
    });
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn image_that_appears_later_is_used() {
    let node = Node::start("appears");
    node.apply("late.json", &with_image("late", "localhost/late:1", "Never"));
    node.wait_pod("late", "waiting", LONG, |pod| waiting_reason(pod, "main") == "ErrImageNeverPull");
    node.containerd.ctr(&["images", "tag", "localhost/busybox:1", "localhost/late:1"]);
    node.wait_ready("late");
    node.finish();
}
