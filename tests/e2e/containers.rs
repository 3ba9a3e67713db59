//! Containers and sandboxes that are killed from outside, grace periods, and networks of pods.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::node::{
    FOREVER, LONG, Node, busybox, container, container_id, ended_before, is_ready, pod, restarts, simple,
};
use crate::support::wait::wait_until;

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn killed_container_restarts_without_its_neighbors() {
    let node = Node::start("ckill");
    node.apply("web.json", &pod("web", json!([busybox("main", FOREVER), busybox("other", FOREVER)])));
    let before = node.wait_ready("web");
    let sandbox = node.running_sandboxes("web");
    node.containerd.kill_task(&container_id(&before, "main"));
    let after = node.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "main") == 1 && is_ready(pod));
    // Long before the periodic list that backs up the event stream, by the times of the runtime, which do
    // not depend on when the test reads them.
    let started = container(&after, "main").and_then(|status| status.state.clone()?.running?.started_at);
    let ended = ended_before(&after, "main").and_then(|end| end.finished_at);
    let took =
        started.expect("a time of the start").0.as_second() - ended.expect("a time of the end").0.as_second();
    assert!(took < 55, "it took {took} s");
    assert_eq!(container_id(&after, "other"), container_id(&before, "other"));
    assert_eq!(restarts(&after, "other"), 0);
    assert_eq!(node.running_sandboxes("web"), sandbox);
    let last = container(&after, "main").and_then(|status| status.last_state.clone()?.terminated);
    assert_eq!(last.map(|last| last.exit_code), Some(137), "{:#?}", after.status);
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn a_killed_sandbox_is_replaced_with_its_containers() {
    let node = Node::start("skill");
    node.apply("web.json", &pod("web", json!([busybox("main", FOREVER), busybox("other", FOREVER)])));
    let before = node.wait_ready("web");
    let sandbox = node.running_sandboxes("web");
    assert_eq!(sandbox.len(), 1);
    node.containerd.kill_task(&sandbox[0]);
    let after = node.wait_pod("web", "in a new sandbox", LONG, |pod| {
        is_ready(pod)
            && container_id(pod, "main") != container_id(&before, "main")
            && container_id(pod, "other") != container_id(&before, "other")
    });
    wait_until("one sandbox", LONG, || node.running_sandboxes("web").len() == 1);
    assert_ne!(node.running_sandboxes("web"), sandbox);
    wait_until("one container of each", LONG, || node.running("web").values().flatten().count() == 2);
    assert_eq!(after.metadata.uid, before.metadata.uid);
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn grace_period_is_granted_and_limited() {
    let node = Node::start("grace");
    let shared = node.shared();
    let volume = json!([{"name": "out", "hostPath": {"path": shared}}]);
    let mount = json!([{"name": "out", "mountPath": "/out"}]);
    // One needs 2 s of its 600 to end, the other ignores the signal. Both report that their trap is
    // set: before that the first process of a container ignores the signal.
    let mut polite = pod(
        "polite",
        json!([busybox(
            "main",
            "trap 'sleep 2; echo bye > /out/polite; exit 0' TERM; echo > /out/polite-set; \
             while :; do sleep 0.2; done"
        )]),
    );
    polite["spec"]["terminationGracePeriodSeconds"] = json!(600);
    let script = "trap '' TERM; echo > /out/deaf-set; while :; do sleep 0.2; done";
    let mut deaf = pod("deaf", json!([busybox("main", script)]));
    deaf["spec"]["terminationGracePeriodSeconds"] = json!(4);
    for (file, manifest) in [("polite.json", &mut polite), ("deaf.json", &mut deaf)] {
        manifest["spec"]["volumes"] = volume.clone();
        manifest["spec"]["containers"][0]["volumeMounts"] = mount.clone();
        node.apply(file, manifest);
    }
    node.wait_ready("polite");
    node.wait_ready("deaf");
    wait_until("both to be set", LONG, || {
        ["polite-set", "deaf-set"].iter().all(|file| shared.join(file).exists())
    });

    let begun = Instant::now();
    node.remove("polite.json");
    node.wait_gone("polite");
    let took = begun.elapsed();
    assert_eq!(fs::read_to_string(shared.join("polite")).ok().as_deref(), Some("bye\n"));
    assert!(took < Duration::from_secs(500), "a container that ends early is not waited for: {took:?}");

    let begun = Instant::now();
    node.remove("deaf.json");
    node.wait_gone("deaf");
    let took = begun.elapsed();
    // Less than the 30 s that a pod has by default.
    assert!((4..29).contains(&took.as_secs()), "grace of 4 s took {took:?}");
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn host_network_pod_listens_on_the_host() {
    let node = Node::start("hostnet");
    let mut manifest = pod(
        "web",
        json!([busybox(
            "main",
            "mkdir /tmp/w; echo served > /tmp/w/index.html; exec httpd -f -p 29471 -h /tmp/w"
        )]),
    );
    manifest["spec"]["hostNetwork"] = json!(true);
    node.apply("web.json", &manifest);
    node.wait_ready("web");
    wait_until("the page", LONG, || {
        crate::support::node::http_get(29471, "/").is_ok_and(|(code, body)| code == 200 && body == "served\n")
    });
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn a_pod_has_its_own_network_and_hosts_file() {
    let node = Node::start("podnet");
    node.apply("web.json", &simple("web"));
    let ready = node.wait_ready("web");
    let address = ready.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
    let id = container_id(&ready, "main");
    assert!(
        node.exec(&id, &["ip", "addr"]).contains(&format!("{address}/")),
        "the status has the pod's address"
    );
    let hosts = node.exec(&id, &["cat", "/etc/hosts"]);
    assert!(hosts.contains(&address) && hosts.contains("web-e2e"), "{hosts}");
    node.finish();
}
