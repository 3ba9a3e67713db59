//! Hooks around a container's life, and how long its end may take.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::look::moment;
use crate::support::node::{FOREVER, LONG, Node, STAMP, busybox, container, pod, restarts, waiting_reason};
use crate::support::wait::{holds_for, wait_until};
use crate::support::web::{Reply, Web};

/// Runs until it is told to end, notes when it was told in /out/NAME-term and when it last
/// lived in /out/NAME-beat. A deaf one goes on after that.
fn noting(name: &str, deaf: bool) -> String {
    let end = if deaf { "" } else { "; exit 0" };
    format!(
        "trap '{STAMP} >> /out/{name}-term{end}' TERM; \
         while :; do {STAMP} >> /out/{name}-beat; sleep 0.05; done"
    )
}

fn ending(node: &Node, name: &str, grace: u64, deaf: bool, pre_stop: Option<Value>) -> Value {
    let mut manifest = pod(name, json!([busybox("main", &noting(name, deaf))]));
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(grace);
    if let Some(hook) = pre_stop {
        manifest["spec"]["containers"][0]["lifecycle"] = json!({"preStop": hook});
    }
    node.with_out(manifest)
}

fn shell(script: &str) -> Value {
    json!({"exec": {"command": ["sh", "-c", script]}})
}

#[test]
fn what_happens_before_the_signal_counts_against_the_grace() {
    let web = Web::start();
    web.set("/bye", Reply::text(500, "no"));
    let node = Node::start("prestop");
    let slow = shell(&format!("{STAMP} >> /out/slow-pre; sleep 3"));
    let endless = shell(&format!(
        "{STAMP} >> /out/endless-pre; while :; do {STAMP} >> /out/endless-hook-beat; sleep 0.05; done"
    ));
    let http = json!({"httpGet": {"host": "127.0.0.1", "port": web.port, "path": "/bye"}});
    let pods = [
        ending(&node, "slow", 30, false, Some(slow)),
        ending(&node, "endless", 12, true, Some(endless)),
        ending(&node, "nograce", 0, true, None),
        ending(&node, "http", 30, false, Some(http)),
        ending(&node, "failing", 30, false, Some(shell("exit 3"))),
        ending(&node, "pause", 30, false, Some(json!({"sleep": {"seconds": 2}}))),
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
    // Those first whose end is timed.
    let (without_grace, endless) = (gone("nograce"), gone("endless"));
    for name in names {
        gone(name);
    }
    let told = |name: &str| node.wait_stamp(&format!("{name}-term"));
    let last = |name: &str| node.last_stamp(&format!("{name}-beat"));

    let waited = told("slow") - node.wait_stamp("slow-pre");
    assert!((2.9..20.0).contains(&waited), "the signal came {waited} s after the hook began");
    assert!(last("slow") - told("slow") < 8.0, "who ends at the signal is not waited for");

    // The grace of 12 s begins after the removal and before the hook has written its first word, on
    // a busy machine long before: the one shows a signal that comes too early, the other one that
    // comes too late.
    let waited = told("endless") - removed;
    assert!(waited >= 11.9, "an endless hook has the whole grace: {waited} s");
    let waited = told("endless") - node.wait_stamp("endless-pre");
    assert!(waited < 40.0, "an endless hook ends with the grace: {waited} s");
    // A container may hear of its end late, and its last sign of life is older than the end: both
    // on a busy machine. What it was given counts from the removal until it is gone.
    assert!(endless >= 13.9, "gone {endless} s after the removal, with 2 s after the signal");
    let lived = last("endless") - told("endless");
    assert!(lived < 15.0, "killed {lived} s after the signal");
    let lived = last("endless-hook") - told("endless");
    assert!(lived > 0.0, "the hook ended {} s before the signal", -lived);

    assert!(without_grace >= 1.9, "without grace gone {without_grace} s after the removal");
    let lived = last("nograce") - told("nograce");
    assert!(lived < 15.0, "without grace killed {lived} s after the signal");

    let request = web.asked("/bye").first().cloned().expect("the hook asked");
    assert_eq!(
        (request.method.as_str(), request.header("User-Agent").as_deref()),
        ("GET", Some("kube-lifecycle/1.36"))
    );
    assert!(node.told_of("http", "FailedPreStopHook").is_empty(), "any answer is a success");
    node.wait_told("failing", "FailedPreStopHook", "");
    let failed = node.told_of("failing", "FailedPreStopHook");
    assert_eq!(
        failed.iter().map(|event| (event.kind.as_str(), event.message.as_str())).collect::<Vec<_>>(),
        [("Warning", "PreStopHook failed")]
    );

    for name in names {
        let killing = node.told_of(name, "Killing");
        assert_eq!(killing.iter().map(|event| event.count).sum::<u64>(), 1, "{name}: {killing:#?}");
        assert_eq!(
            (killing[0].message.as_str(), killing[0].field.as_str()),
            ("Stopping container main", "spec.containers{main}")
        );
    }
    node.finish();
}

#[test]
fn the_next_container_waits_for_the_hook_of_the_one_before() {
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
    let event = node.wait_told("failing", "FailedPostStartHook", "PostStartHook failed");
    assert_eq!(event.kind, "Warning");
    node.wait_told("failing", "Killing", "FailedPostStartHook");
    let seen = node.wait_pod("failing", "waiting after its hook", LONG, |pod| {
        ["PostStartHookError", "CrashLoopBackOff"].contains(&waiting_reason(pod, "main"))
    });
    assert!(!container(&seen, "main").is_some_and(|one| one.ready));
    node.wait_pod("failing", "started again", LONG, |pod| restarts(pod, "main") >= 1);
    assert!(!node.says(&["events"]).contains("no luck"), "what a hook says may be secret");
    node.finish();
}
