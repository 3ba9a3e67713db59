//! Hooks, grace periods, orders of start and end, messages of ends.

use std::fs;
use std::time::{Duration, Instant};

use coracle::model::api::Pod;
use serde_json::{Value, json};

use crate::support::node::{
    FOREVER, LONG, Node, busybox, condition, container, container_id, describe, ended_before, is_ready,
    phase, pod, restarts, waiting_reason,
};
use crate::support::wait::{holds_for, wait_until};

/// A pod that has the node's shared directory at `/shared` in every container.
fn sharing(node: &Node, name: &str, containers: Value, init: Value) -> Value {
    let mut manifest = pod(name, containers);
    manifest["spec"]["initContainers"] = init;
    manifest["spec"]["volumes"] = json!([{"name": "shared", "hostPath": {"path": node.shared()}}]);
    for list in ["containers", "initContainers"] {
        for container in manifest["spec"][list].as_array_mut().into_iter().flatten() {
            container["volumeMounts"] = json!([{"name": "shared", "mountPath": "/shared"}]);
        }
    }
    manifest
}

/// Notes its start and its end, which takes a moment.
fn noting(name: &str) -> Value {
    let note = |what: &str| format!("echo {name} {what} >> /shared/notes");
    let script = format!(
        "trap '{}; sleep 0.3; {}; exit 0' TERM; {}; while :; do sleep 1000 & wait $!; done",
        note("asked"),
        note("ended"),
        note("started")
    );
    busybox(name, &script)
}

fn sidecar(name: &str) -> Value {
    let mut sidecar = noting(name);
    sidecar["restartPolicy"] = json!("Always");
    sidecar
}

fn notes(node: &Node) -> Vec<String> {
    let text = fs::read_to_string(node.shared().join("notes")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn at(notes: &[String], note: &str) -> usize {
    notes.iter().position(|one| one == note).unwrap_or_else(|| panic!("{note} in {notes:?}"))
}

#[test]
fn sidecars_start_first_and_end_last() {
    let node = Node::start("sidecars-b");
    let mut s1 = sidecar("s1");
    s1["lifecycle"] =
        json!({"preStop": {"exec": {"command": ["sh", "-c", "echo s1 hook >> /shared/notes"]}}});
    let mut i2 = busybox("i2", "echo i2 started >> /shared/notes; sleep 0.5; echo i2 ended >> /shared/notes");
    i2["terminationMessagePolicy"] = json!("File");
    let mut slow = noting("slow");
    slow["lifecycle"] = json!({"postStart": {"exec": {"command":
        ["sh", "-c", "sleep 2; echo slow hook >> /shared/notes"]}}});
    let mut manifest = sharing(&node, "web", json!([slow, noting("next")]), json!([s1, i2, sidecar("s2")]));
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(20);
    node.apply("web.json", &manifest);
    let ready = node.wait_ready("web");
    let started = notes(&node);
    for pair in [
        ["s1 started", "i2 started"],
        ["i2 started", "i2 ended"],
        ["i2 ended", "s2 started"],
        ["s2 started", "slow started"],
        ["slow hook", "next started"],
    ] {
        assert!(at(&started, pair[0]) < at(&started, pair[1]), "{pair:?} in {started:?}");
    }
    let init = ready.status.as_ref().and_then(|status| status.init_container_statuses.as_ref()).unwrap();
    assert!(
        init.iter().filter(|one| one.name != "i2").all(|one| one.started == Some(true)),
        "{}",
        describe(&ready)
    );

    let begun = Instant::now();
    node.remove("web.json");
    node.wait_gone("web");
    assert!(begun.elapsed() < Duration::from_secs(18), "{:?}", begun.elapsed());
    let ended = notes(&node);
    for pair in [
        ["slow ended", "s2 asked"],
        ["next ended", "s2 asked"],
        ["s2 ended", "s1 asked"],
        // Hooks do not wait for their turn.
        ["s1 hook", "slow ended"],
    ] {
        assert!(at(&ended, pair[0]) < at(&ended, pair[1]), "{pair:?} in {ended:?}");
    }
    let events = node.says(&["events"]);
    for name in ["slow", "next", "s1", "s2"] {
        assert_eq!(events.matches(&format!("Stopping container {name}")).count(), 1, "{events}");
    }
    node.finish();
}

#[test]
fn hooks_and_graces_add_up() {
    const DEAF: &str = "trap '' TERM; while :; do sleep 1; done";
    let node = Node::start("graces");
    let with = |name: &str, script: &str, grace: i64, hook: Option<&str>| {
        let mut main = busybox("main", script);
        if let Some(hook) = hook {
            main["lifecycle"] = json!({"preStop": {"exec": {"command": ["sh", "-c", hook]}}});
        }
        let mut manifest = pod(name, json!([main]));
        manifest["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        node.apply(&format!("{name}.json"), &manifest);
    };
    // Name, and within which seconds it is gone.
    let rows = [("zero", 2, 5), ("endless", 5, 9), ("brief", 2, 5)];
    with("zero", DEAF, 0, None);
    with("endless", DEAF, 3, Some("sleep 60"));
    with("brief", FOREVER, 30, Some("sleep 2"));
    for (name, ..) in rows {
        node.wait_ready(name);
    }
    let begun = Instant::now();
    for (name, ..) in rows {
        node.remove(&format!("{name}.json"));
    }
    let mut gone = [None; 3];
    wait_until("all to be gone", LONG, || {
        for (when, (name, ..)) in gone.iter_mut().zip(rows) {
            if when.is_none() && node.pod(name).is_none() {
                *when = Some(begun.elapsed());
            }
        }
        gone.iter().all(Option::is_some)
    });
    for (when, (name, least, most)) in gone.iter().flatten().zip(rows) {
        assert!((least..most).contains(&when.as_secs()), "{name} was gone after {when:?}");
    }
    let events = node.says(&["events"]);
    assert_eq!(events.matches("PreStopHook failed").count(), 1, "{events}");
    node.finish();
}

fn message(pod: &Pod, name: &str) -> String {
    container(pod, name)
        .and_then(|status| status.state.as_ref()?.terminated.as_ref()?.message.clone())
        .unwrap_or_default()
}

#[test]
fn last_words() {
    let node = Node::start("words-b");
    let speaking = |name: &str, script: &str, policy: &str| {
        let mut one = busybox(name, script);
        one["terminationMessagePolicy"] = json!(policy);
        one
    };
    let long =
        "head -c 5000 /dev/zero | tr '\\0' x > /dev/termination-log; printf end >> /dev/termination-log";
    let fallback = "FallbackToLogsOnError";
    let mut three = pod(
        "three",
        json!([
            speaking("long", long, "File"),
            speaking("log", "echo from the log; exit 1", fallback),
            speaking("fine", "echo from the log; exit 0", fallback),
        ]),
    );
    let mut six = pod("six", json!([0, 1, 2, 3, 4, 5].map(|n| speaking(&format!("c{n}"), long, "File"))));
    for manifest in [&mut three, &mut six] {
        manifest["spec"]["restartPolicy"] = json!("Never");
    }
    node.apply("three.json", &three);
    node.apply("six.json", &six);
    let three = node.wait_pod("three", "Failed", LONG, |pod| phase(pod) == "Failed");
    let words = message(&three, "long");
    assert_eq!((words.len(), words.ends_with("xend")), (4096, true));
    assert_eq!(message(&three, "log"), "from the log\n");
    assert_eq!(message(&three, "fine"), "");
    let six = node.wait_pod("six", "Succeeded", LONG, |pod| phase(pod) == "Succeeded");
    for n in 0..6 {
        assert!(message(&six, &format!("c{n}")).len() <= 2048);
    }
    node.finish();
}

#[test]
fn a_failed_post_start_shows() {
    let node = Node::start("poststart-b");
    let mut main = busybox("main", FOREVER);
    main["lifecycle"] = json!({"postStart": {"exec": {"command": ["sh", "-c", "echo no luck >&2; exit 3"]}}});
    node.apply("web.json", &pod("web", json!([main])));
    let waiting = node.wait_pod("web", "in back-off", LONG, |pod| {
        crate::support::node::waiting_reason(pod, "main") == "CrashLoopBackOff"
    });
    assert!(restarts(&waiting, "main") >= 1, "{}", describe(&waiting));
    let events = node.says(&["events"]);
    assert!(events.contains("PostStartHook failed") && events.contains("FailedPostStartHook"), "{events}");
    assert!(!events.contains("no luck"), "what a hook says may be secret: {events}");
    node.finish();
}

#[test]
fn all_restart_together_and_a_stranger_looks_in() {
    let node = Node::start("together");
    let mut trigger = busybox("trigger", "until [ -e /go ]; do sleep 0.1; done; exit 42");
    trigger["restartPolicy"] = json!("Never");
    trigger["restartPolicyRules"] =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    // One that is deaf takes two seconds to remove: long enough to watch.
    let deaf = busybox("deaf", "trap '' TERM; while :; do sleep 1; done");
    let mut manifest = pod("web", json!([busybox("main", FOREVER), trigger, deaf]));
    manifest["spec"]["initContainers"] = json!([busybox("init", "echo init ran; sleep 1")]);
    node.apply("web.json", &manifest);
    let before = node.wait_ready("web");
    let restarting = |pod: &Pod| condition(pod, "AllContainersRestarting").unwrap_or_default();
    assert_eq!(restarting(&before), ("False".to_owned(), String::new()));
    node.exec(&container_id(&before, "trigger"), &["touch", "/go"]);
    let during = node.wait_pod("web", "restarting as a whole", LONG, |now| restarting(now).0 == "True");
    assert_eq!(restarting(&during).1, "container exited with restart policy rule");
    let conditions = during.status.as_ref().and_then(|status| status.conditions.as_ref()).unwrap();
    let reason = conditions.iter().find(|one| one.type_ == "AllContainersRestarting");
    assert_eq!(reason.and_then(|one| one.reason.as_deref()), Some("RestartAllContainersStarted"));
    let removed = node.wait_pod("web", "removed as a whole", LONG, |now| {
        waiting_reason(now, "main") == "RestartingAllContainers"
    });
    assert_eq!(restarting(&removed).0, "False");
    assert_eq!(condition(&removed, "Initialized").unwrap_or_default().0, "True");
    let after = node.wait_pod("web", "restarted as a whole", LONG, |now| {
        is_ready(now) && container_id(now, "main") != container_id(&before, "main")
    });
    assert_eq!((restarts(&after, "main"), restarts(&after, "trigger")), (1, 1), "{}", describe(&after));
    let ended = ended_before(&after, "main").and_then(|ended| ended.reason);
    assert_eq!(ended.as_deref(), Some("RestartingAllContainers"));
    let ip = |pod: &Pod| pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    assert_eq!(ip(&before), ip(&after), "the sandbox is kept");

    node.says(&[
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
        "ps; echo done",
    ]);
    wait_until("the stranger to have looked", LONG, || {
        let log = node.command(&["logs", "web", "-c", "dbg"]);
        let text = String::from_utf8_lossy(&log.stdout).into_owned();
        text.contains("done") && text.contains("sleep 1000")
    });
    holds_for("the pod goes on as it was", Duration::from_secs(2), || {
        node.pod("web").is_some_and(|now| is_ready(&now) && restarts(&now, "main") == 1)
    });
    node.finish();
}
