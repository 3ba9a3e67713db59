//! Lifecycle hooks of containers, and how long their termination may take.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::node::{FOREVER, LONG, Node, STAMP, busybox, container, pod, restarts, waiting_reason};
use crate::support::node_inspection::moment;
use crate::support::wait::{holds_for, wait_until};
use crate::support::web::{FixedServer, Reply};

/// Runs until SIGTERM; writes the time of the signal to /out/NAME-term and the last time at which it
/// ran to /out/NAME-beat. A deaf one ignores the signal.
fn signal_recorder(name: &str, deaf: bool) -> String {
    let end = if deaf { "" } else { "; exit 0" };
    format!(
        "trap '{STAMP} >> /out/{name}-term{end}' TERM; \
         while :; do {STAMP} >> /out/{name}-beat; sleep 0.05; done"
    )
}

fn ending(node: &Node, name: &str, grace: u64, deaf: bool, pre_stop: Option<Value>) -> Value {
    let mut manifest = pod(name, json!([busybox("main", &signal_recorder(name, deaf))]));
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(grace);
    if let Some(hook) = pre_stop {
        manifest["spec"]["containers"][0]["lifecycle"] = json!({"preStop": hook});
    }
    node.with_out(manifest)
}

fn shell(script: &str) -> Value {
    json!({"exec": {"command": ["sh", "-c", script]}})
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn pre_stop_hook_time_counts_against_the_grace_period() {
    let web = FixedServer::start();
    web.set("/bye", Reply::text(500, "no"));
    let node = Node::start("prestop");
    let slow = shell(&format!("{STAMP} >> /out/slow-pre; sleep 3"));
    let endless = shell(&format!(
        "{STAMP} >> /out/endless-pre; while :; do {STAMP} >> /out/endless-hook-beat; sleep 0.05; done"
    ));
    let http = json!({"httpGet": {"host": "127.0.0.1", "port": web.port, "path": "/bye"}});
    let pods = [
        ending(&node, "slow", 600, false, Some(slow)),
        ending(&node, "endless", 12, true, Some(endless)),
        ending(&node, "nograce", 0, true, None),
        ending(&node, "http", 600, false, Some(http)),
        ending(&node, "failing", 600, false, Some(shell("exit 3"))),
        ending(&node, "pause", 600, false, Some(json!({"sleep": {"seconds": 2}}))),
    ];
    let names = ["slow", "endless", "nograce", "http", "failing", "pause"];
    for (name, manifest) in names.iter().zip(&pods) {
        node.apply(&format!("{name}.json"), manifest);
    }
    for name in names {
        node.wait_ready(name);
        node.wait_stamp(&format!("{name}-beat"));
    }
    let removed = moment();
    for name in names {
        node.remove(&format!("{name}.json"));
    }
    let gone = |name: &str| {
        node.wait_gone(name);
        moment() - removed
    };
    // First the containers whose termination is timed.
    let (without_grace, endless) = (gone("nograce"), gone("endless"));
    for name in names {
        gone(name);
    }
    let signaled = |name: &str| node.wait_stamp(&format!("{name}-term"));
    let last = |name: &str| node.last_stamp(&format!("{name}-beat"));

    let waited = signaled("slow") - node.wait_stamp("slow-pre");
    assert!((2.9..90.0).contains(&waited), "the signal came {waited} s after the hook began");
    assert!(last("slow") - signaled("slow") < 8.0, "a container that ends at the signal is not waited for");

    // The grace period of 12 s begins after the removal and before the first output of the hook, on a
    // busy machine long before: one limit detects an early signal, the other one a late signal.
    let waited = signaled("endless") - removed;
    assert!(waited >= 11.9, "an endless hook has the whole grace: {waited} s");
    let waited = signaled("endless") - node.wait_stamp("endless-pre");
    assert!(waited < 75.0, "an endless hook ends with the grace: {waited} s");
    // On a busy machine a container may receive the signal late, and its last time stamp is older
    // than its end. The grace period counts from the removal until the container is gone.
    assert!(endless >= 13.9, "gone {endless} s after the removal, with 2 s after the signal");
    let lived = last("endless") - signaled("endless");
    // The default grace is 30 s.
    assert!(lived < 29.0, "killed {lived} s after the signal");
    let lived = last("endless-hook") - signaled("endless");
    assert!(lived > 0.0, "the hook ended {} s before the signal", -lived);

    assert!(without_grace >= 1.9, "without grace gone {without_grace} s after the removal");
    // On a busy machine the shell may be killed before it has run its trap.
    let signal = node.stamps("nograce-term").first().copied();
    let lived = signal.map_or(0.0, |signal| last("nograce") - signal);
    assert!(lived < 29.0, "without grace killed {lived} s after the signal");

    let request = web.received("/bye").first().cloned().expect("the request of the hook");
    assert_eq!(
        (request.method.as_str(), request.header("User-Agent").as_deref()),
        ("GET", Some("kube-lifecycle/1.37"))
    );
    assert!(node.events_with_reason("http", "FailedPreStopHook").is_empty(), "any answer is a success");
    node.wait_event("failing", "FailedPreStopHook", "");
    let failed = node.events_with_reason("failing", "FailedPreStopHook");
    assert_eq!(
        failed.iter().map(|event| (event.kind.as_str(), event.message.as_str())).collect::<Vec<_>>(),
        [("Warning", "PreStopHook failed")]
    );

    for name in names {
        let killing = node.events_with_reason(name, "Killing");
        assert_eq!(killing.iter().map(|event| event.count).sum::<u64>(), 1, "{name}: {killing:#?}");
        assert_eq!(
            (killing[0].message.as_str(), killing[0].field.as_str()),
            ("Stopping container main", "spec.containers{main}")
        );
    }
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn next_container_waits_for_the_previous_post_start_hook() {
    let node = Node::start("poststart");
    let mut manifest = pod("web", json!([busybox("first", FOREVER), busybox("second", FOREVER)]));
    manifest["spec"]["containers"][0]["lifecycle"] =
        json!({"postStart": shell("echo began >> /out/hook; until [ -e /out/go ]; do sleep 0.1; done")});
    node.apply("web.json", &node.with_out(manifest));
    wait_until("the hook to run", LONG, || node.out("hook") == "began\n");
    holds_for("the second container waits", Duration::from_secs(2), || {
        !node.running("web").contains_key("second")
            && node.pod("web").is_some_and(|pod| waiting_reason(&pod, "second") == "ContainerCreating")
    });
    node.touch("go");
    node.wait_ready("web");

    let mut failing = pod("failing", json!([busybox("main", FOREVER)]));
    failing["spec"]["containers"][0]["lifecycle"] = json!({"postStart": shell("echo no luck >&2; exit 4")});
    node.apply("failing.json", &failing);
    let event = node.wait_event("failing", "FailedPostStartHook", "PostStartHook failed");
    assert_eq!(event.kind, "Warning");
    node.wait_event("failing", "Killing", "FailedPostStartHook");
    let seen = node.wait_pod("failing", "waiting after its hook", LONG, |pod| {
        ["PostStartHookError", "CrashLoopBackOff"].contains(&waiting_reason(pod, "main"))
    });
    assert!(!container(&seen, "main").is_some_and(|status| status.ready));
    node.wait_pod("failing", "started again", LONG, |pod| restarts(pod, "main") >= 1);
    assert!(!node.cli(&["events"]).contains("no luck"), "the output of a hook may be secret");
    node.finish();
}
