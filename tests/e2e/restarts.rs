//! Restart policies and the crash-loop back-off.

use std::time::Duration;

use coracle::model::api::{ContainerStateTerminated, Pod};
use serde_json::json;

use crate::support::node::{
    FOREVER, LONG, Node, busybox, condition, container, container_id, describe, ended_before, is_ready,
    phase, pod, restarts, uid, waiting_message, waiting_reason,
};
use crate::support::wait::{holds_for, wait_until};

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn restart_policy_always_restarts_with_growing_back_off() {
    // Without the time of its back-off the pod would be synced again only after that.
    let node = Node::start_with("always", json!({"syncFrequency": "1h"}));
    node.apply("crash.json", &pod("crash", json!([busybox("main", "echo boom; exit 7")])));
    // The first restart is immediate, the second after 10 s, the third after 20 s more.
    let in_back_off = |number: i32| {
        let seen = node.wait_pod("crash", &format!("in back-off after {number} restarts"), LONG, |pod| {
            restarts(pod, "main") == number && waiting_reason(pod, "main") == "CrashLoopBackOff"
        });
        let last = ended_before(&seen, "main").unwrap_or_else(|| panic!("a last state: {}", describe(&seen)));
        (seen, last)
    };
    let (waiting, first) = in_back_off(1);
    assert_eq!((first.exit_code, first.reason.as_deref()), (7, Some("Error")));
    assert_eq!(phase(&waiting), "Running");
    let message = |seconds: &str| {
        let uid = uid(&waiting);
        format!("back-off {seconds} restarting failed container=main pod=crash-e2e_default({uid})")
    };
    assert_eq!(waiting_message(&waiting, "main"), message("10s"));
    let (waiting_again, second) = in_back_off(2);
    assert_eq!(waiting_message(&waiting_again, "main"), message("20s"));
    let (_, third) = in_back_off(3);
    // By the times of the runtime, which do not depend on when the test reads them.
    let apart = |end: &ContainerStateTerminated, start: &ContainerStateTerminated| {
        let (end, start) = (end.finished_at.as_ref(), start.started_at.as_ref());
        start.expect("a time of the start").0.as_second() - end.expect("a time of the end").0.as_second()
    };
    let (short, long) = (apart(&first, &second), apart(&second, &third));
    // The messages above have the exact waits.
    assert!((10..90).contains(&short), "the second restart came {short} s after the end");
    assert!((20..90).contains(&long), "the third restart came {long} s after the end");

    let events = node.cli(&["events"]);
    assert!(events.contains("BackOff"), "{events}");
    assert!(node.cli(&["logs", "crash-e2e", "-p"]).contains("boom"));
    // Four instances have run; the newest and at most one dead one are kept.
    let (runtime, _) = node.cri();
    wait_until("at most two records", LONG, || {
        runtime.list_containers(Default::default()).is_ok_and(|list| list.len() <= 2)
    });
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn restart_policy_on_failure_restarts_failures_only() {
    let node = Node::start("onfail");
    let mut good = pod("good", json!([busybox("main", "exit 0")]));
    good["spec"]["restartPolicy"] = json!("OnFailure");
    let mut bad = pod("bad", json!([busybox("main", "exit 1")]));
    bad["spec"]["restartPolicy"] = json!("OnFailure");
    node.apply("good.json", &good);
    node.apply("bad.json", &bad);
    let done = node.wait_pod("good", "Succeeded", LONG, |pod| phase(pod) == "Succeeded");
    assert_eq!(restarts(&done, "main"), 0);
    node.wait_pod("bad", "restarted", LONG, |pod| restarts(pod, "main") >= 1 && phase(pod) == "Running");
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn restart_policy_never_keeps_the_final_state() {
    let node = Node::start("never");
    for (name, script) in [("good", "echo done > /dev/termination-log; exit 0"), ("bad", "exit 3")] {
        let mut manifest = pod(name, json!([busybox("main", script)]));
        manifest["spec"]["restartPolicy"] = json!("Never");
        node.apply(&format!("{name}.json"), &manifest);
    }
    let good = node.wait_pod("good", "Succeeded", LONG, |pod| phase(pod) == "Succeeded");
    let bad = node.wait_pod("bad", "Failed", LONG, |pod| phase(pod) == "Failed");
    let ended = |pod| {
        container(pod, "main")
            .and_then(|status| status.state.as_ref())
            .and_then(|state| state.terminated.clone())
            .unwrap_or_else(|| panic!("a terminated state: {}", describe(pod)))
    };
    assert_eq!(ended(&good).message.as_deref(), Some("done\n"));
    assert_eq!(ended(&good).reason.as_deref(), Some("Completed"));
    assert_eq!((ended(&bad).exit_code, ended(&bad).reason.as_deref()), (3, Some("Error")));
    holds_for("no restart", Duration::from_secs(4), || {
        node.pod("bad").is_some_and(|pod| restarts(&pod, "main") == 0 && phase(&pod) == "Failed")
    });
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn restart_all_containers_rule_and_ephemeral_container_work() {
    let node = Node::start("together");
    let mut trigger = busybox("trigger", "until rm /out/go 2>/dev/null; do sleep 0.1; done; exit 42");
    trigger["restartPolicy"] = json!("Never");
    trigger["restartPolicyRules"] =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    // Each container that ignores SIGTERM takes two seconds to remove: together long enough to observe.
    let deaf = |name: &str| busybox(name, "trap '' TERM; while :; do sleep 1; done");
    let containers = [busybox("main", FOREVER), trigger, deaf("deaf1"), deaf("deaf2"), deaf("deaf3")];
    let mut manifest = pod("web", json!(containers));
    // While it runs again the others show that they were removed: until the test has seen it.
    let again =
        "echo ran >> /out/init; [ $(wc -l < /out/init) -lt 2 ] || until [ -e /out/seen ]; do sleep 0.1; done";
    manifest["spec"]["initContainers"] = json!([busybox("init", again)]);
    node.apply("web.json", &node.with_out(manifest));
    let before = node.wait_ready("web");
    let restarting = |pod: &Pod| condition(pod, "AllContainersRestarting").unwrap_or_default();
    assert_eq!(restarting(&before), ("False".to_owned(), String::new()));
    node.touch("go");
    let during = node.wait_pod("web", "restarting as a whole", LONG, |now| restarting(now).0 == "True");
    assert_eq!(restarting(&during).1, "container exited with restart policy rule");
    let conditions = during.status.as_ref().and_then(|status| status.conditions.as_ref()).unwrap();
    let reason = conditions.iter().find(|condition| condition.type_ == "AllContainersRestarting");
    assert_eq!(reason.and_then(|condition| condition.reason.as_deref()), Some("RestartAllContainersStarted"));
    let removed = node.wait_pod("web", "removed as a whole", LONG, |now| {
        waiting_reason(now, "main") == "RestartingAllContainers"
    });
    assert_eq!(restarting(&removed).0, "False");
    assert_eq!(condition(&removed, "Initialized").unwrap_or_default().0, "True");
    node.touch("seen");
    let after = node.wait_pod("web", "restarted as a whole", LONG, |now| {
        is_ready(now) && container_id(now, "main") != container_id(&before, "main")
    });
    assert_eq!((restarts(&after, "main"), restarts(&after, "trigger")), (1, 1), "{}", describe(&after));
    let ended = ended_before(&after, "main").and_then(|ended| ended.reason);
    assert_eq!(ended.as_deref(), Some("RestartingAllContainers"));
    let ip = |pod: &Pod| pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    assert_eq!(ip(&before), ip(&after), "the sandbox is kept");

    // The process may start a moment later than its container. The brackets keep `grep` from finding
    // itself.
    node.cli(&[
        "debug",
        "web",
        "--image",
        "localhost/busybox:1",
        "--target",
        "main",
        "-c",
        "dbg",
        "--",
        "sh",
        "-c",
        "until ps | grep -q '[s]leep 1000'; do sleep 0.1; done; ps; echo done",
    ]);
    wait_until("the ephemeral container to see the process", LONG, || {
        let log = node.command(&["logs", "web", "-c", "dbg"]);
        let text = String::from_utf8_lossy(&log.stdout).into_owned();
        text.contains("done") && text.contains("sleep 1000")
    });
    holds_for("the pod does not change", Duration::from_secs(2), || {
        node.pod("web").is_some_and(|now| is_ready(&now) && restarts(&now, "main") == 1)
    });
    node.finish();
}
