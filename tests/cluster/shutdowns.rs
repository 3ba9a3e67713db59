//! The machine shuts down: an inhibitor lock delays logind, and pods end in order, each within its
//! grace period.

use std::fs;
use std::time::{Duration, Instant};

use coracle::transport::dbus::wire::Value as DbusValue;
use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, condition, directory, message, pod, reason, shared, text};
use crate::support::launch::{runs_go_kubelet, skip_on_go_kubelet};
use crate::support::logind::{CONF, FakeSystemBus};
use crate::support::manifest::{FOREVER, busybox, simple};
use crate::support::wait::{holds_for, wait_until};

const BUS: &str = "DBUS_SYSTEM_BUS_ADDRESS";
const TERMINATED: &str = "Pod was terminated in response to imminent node shutdown.";
/// How long the agent waits for statuses to reach the API server.
const NOTICE_LIMIT: Duration = Duration::from_secs(2);
const WATCHED: &str = "shutdowns of the machine wait for the pods";

fn ready_message(node: &Value) -> String {
    let all = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.iter()
        .find(|condition| condition["type"] == "Ready")
        .map_or(String::new(), |condition| text(condition, "/message").to_owned())
}

fn priority(mut pod: Value, class: &str) -> Value {
    pod["spec"]["priorityClassName"] = json!(class);
    pod
}

// Runtimes: containerd 2.
#[test]
fn graceful_shutdown_stops_pods_in_order() {
    let name = "bye";
    let mut bus = FakeSystemBus::new(&directory(name).join("dbus"), Duration::from_secs(5));
    bus.start();
    // The ordinary pod has 300 s: the test ends it, also on a machine that is slow.
    let periods = json!({"shutdownGracePeriod": "420s", "shutdownGracePeriodCriticalPods": "120s"});
    let mut joined = JoinedNode::prepare(shared(), name, periods);
    joined.node.set_env(BUS, bus.address());
    let joined = joined.start_and_wait();
    wait_until("the lock to be taken", LIMIT, || bus.locks() == 1);
    // logind's own maximum delay is 5 s; the agent has raised it.
    assert_eq!(bus.reloads(), 1);
    let conf = fs::read_to_string(CONF).expect("it is there");
    assert!(conf.contains("[Login]\nInhibitDelayMaxSec=420\n"), "{conf}");
    let words = ["shutdown", "kubelet", "Kubelet needs time to handle node shutdown", "delay"];
    assert_eq!(bus.received().1, words.map(|word| DbusValue::Text(word.to_owned())));

    // They end with an error: as upstream, the reason of a pod that ends without one does not show the
    // shutdown. An ordinary pod that ends when the test lets it, and a critical one that ends at once.
    let go = joined.node.shared().join("go");
    let mut slow = busybox(
        "main",
        "trap 'until [ -e /shared/go ]; do sleep 0.1; done; exit 3' TERM; while :; do sleep 1000 & wait $!; done",
    );
    slow["volumeMounts"] = json!([{"name": "shared", "mountPath": "/shared"}]);
    let mut ordinary = pod("bye-ordinary", json!([slow]));
    ordinary["spec"]["volumes"] = json!([{"name": "shared", "hostPath": {"path": joined.node.shared()}}]);
    ordinary["spec"]["terminationGracePeriodSeconds"] = json!(300);
    let at_once = "trap 'exit 3' TERM; while :; do sleep 1000 & wait $!; done";
    let critical = pod("bye-critical", json!([busybox("main", at_once)]));
    joined.bind(&ordinary);
    joined.bind(&priority(critical, "system-cluster-critical"));
    joined.wait_ready("bye-ordinary");
    joined.wait_ready("bye-critical");

    bus.prepare(true);
    joined.plane.wait(&["node", name], "shown as shutting down", LIMIT, |node| {
        condition(node, "Ready") == "False"
            && reason(node, "Ready") == "KubeletNotReady"
            && ready_message(node) == "node is shutting down"
    });
    joined.bind(&pod("bye-late", json!([busybox("main", FOREVER)])));
    let late = joined.wait_pod("bye-late", "refused", |pod| pod["status"]["phase"] == "Failed");
    assert_eq!(text(&late, "/status/reason"), "NodeShutdown");
    let message = text(&late, "/status/message");
    assert!(message.ends_with("Pod was rejected as the node is shutting down."), "{message}");
    // The second group waits for the first, and the shutdown waits for both.
    let running = || joined.node.running_of_all();
    let both = running();
    assert!(both.contains_key("bye-ordinary") && both.contains_key("bye-critical"), "{both:?}");
    assert_eq!(bus.locks(), 1);
    fs::write(&go, "").expect("it can be written");
    let mut ran = Instant::now();
    wait_until("the lock to be released", LIMIT, || {
        let now = Instant::now();
        let locks = bus.locks();
        let running = running();
        let (ordinary, critical) =
            (running.contains_key("bye-ordinary"), running.contains_key("bye-critical"));
        assert!(critical || !ordinary, "the critical pod ended first");
        assert!(locks == 1 || !critical, "the machine was let go too early");
        ran = if critical { now } else { ran };
        locks == 0
    });
    // By then the API server knows, unless telling it took longer than a machine is kept waiting
    // for that; from the Go kubelet it hears later.
    let may_be_late = runs_go_kubelet() || ran.elapsed() >= NOTICE_LIMIT;
    for name in ["bye-ordinary", "bye-critical"] {
        let pod = joined.wait_pod(name, "failed", |pod| {
            let failed = pod["status"]["phase"] == "Failed";
            assert!(failed || may_be_late, "{name} is not has_event: {}", pod["status"]);
            failed
        });
        assert_eq!((text(&pod, "/status/reason"), text(&pod, "/status/message")), ("Terminated", TERMINATED));
        assert_eq!(
            (condition(&pod, "DisruptionTarget"), reason(&pod, "DisruptionTarget")),
            ("True", "TerminationByKubelet")
        );
    }
    let start = joined.node.metric("kubelet_graceful_shutdown_start_time_seconds");
    let end = joined.node.metric("kubelet_graceful_shutdown_end_time_seconds");
    assert!(start > 1e9 && end >= start, "{start} {end}");
    let saved = fs::read_to_string(joined.node.root().join("graceful_node_shutdown_state"));
    assert!(saved.is_ok_and(|text| text.contains("startTime") && text.contains("endTime")));

    bus.prepare(false);
    joined.wait_node_ready();
    // The Go kubelet closes the old lock's descriptor a second time, which by then is the new one.
    if !runs_go_kubelet() {
        wait_until("the lock to be taken again", LIMIT, || bus.locks() == 1);
    }
    joined.bind(&pod("bye-next", json!([busybox("main", FOREVER)])));
    joined.wait_ready("bye-next");
    for words in
        ["Shutdown manager detected shutdown event", "Shutdown manager detected shutdown cancellation"]
    {
        wait_until(words, LIMIT, || {
            joined.events(name).iter().any(|(reason, message)| reason == "Shutdown" && message == words)
        });
    }
    joined.finish(&["bye-ordinary", "bye-critical", "bye-late", "bye-next"]);
}

// Runtimes: containerd 2.
#[test]
fn shutdown_works_after_the_message_bus_restarts() {
    if skip_on_go_kubelet(
        "shutdown_works_after_the_message_bus_restarts",
        "it wants the bus at its start, and believes everyone",
    ) {
        return;
    }
    let name = "bus";
    let mut bus = FakeSystemBus::new(&directory(name).join("dbus"), Duration::from_secs(3600));
    let by_priority = json!({"shutdownGracePeriodByPodPriority": [
        {"priority": 0, "shutdownGracePeriodSeconds": 120},
        {"priority": 1000, "shutdownGracePeriodSeconds": 120},
    ]});
    let mut joined = JoinedNode::prepare(shared(), name, by_priority);
    joined.node.set_env(BUS, bus.address());
    joined.node.apply("st.json", &simple("st"));
    // Without a bus the node works, and logs once that shutdowns are not watched.
    let joined = joined.start_and_wait();
    joined.node.wait_ready("st");
    let warned = || joined.node.log().matches("cannot be watched").count();
    wait_until("the warning", LIMIT, || warned() == 1);
    holds_for("one warning", Duration::from_secs(3), || warned() == 1);
    bus.start();
    // The retries for a bus that never existed become rarer.
    wait_until("the lock to be taken", LIMIT * 4, || bus.locks() == 1);
    wait_until("the log line that shutdowns are watched", LIMIT, || joined.node.log().contains(WATCHED));
    assert_eq!((bus.reloads(), bus.received().0), (0, 1));

    // Any local user can send this.
    bus.forge();
    holds_for("the node ignores it", Duration::from_secs(2), || {
        bus.locks() == 1 && !joined.node.log().contains("the machine shuts down")
    });
    // A new logind has a new lock; the old one is released when the new one is held.
    bus.start_logind();
    wait_until("the lock of the new logind", LIMIT, || bus.received().0 == 2 && bus.locks() == 1);
    // A lock survives the bus, and a restarted bus is found soon.
    bus.stop();
    holds_for("the lock is held without a bus", Duration::from_secs(2), || bus.locks() == 1);
    bus.start();
    wait_until("the lock by the new bus", LIMIT, || bus.received().0 == 3 && bus.locks() == 1);

    // A shutdown that began while the agent was disconnected is detected.
    bus.stop();
    bus.set_preparing(true);
    bus.start();
    wait_until("the lock to be released", LIMIT, || bus.locks() == 0);
    assert!(joined.node.running("st").is_empty());
    let stopped = joined.node.pod("st").and_then(|pod| pod.status).unwrap_or_default();
    assert_eq!((stopped.phase.as_deref(), stopped.message.as_deref()), (Some("Failed"), Some(TERMINATED)));
    // The shutdown is canceled: everything is as before, the static pod too.
    bus.prepare(false);
    wait_until("the lock to be taken again", LIMIT, || bus.locks() == 1);
    joined.wait_node_ready();
    joined.node.wait_ready("st");
    let mirror = joined.node.full_name("st");
    joined.wait_ready(&mirror);
    let mut polite = pod("bus-api", json!([busybox("main", FOREVER)]));
    // Its container ends by itself, also on a busy machine.
    polite["spec"]["terminationGracePeriodSeconds"] = json!(100);
    joined.bind(&polite);
    joined.wait_ready("bus-api");
    // The end of the agent alone stops no pod, and delays no shutdown.
    let JoinedNode { mut node, .. } = joined;
    let before = node.running("st");
    node.stop_agent();
    assert_eq!(bus.locks(), 0);
    assert_eq!(node.running("st"), before);
    node.start_agent();
    wait_until("the lock to be taken after a restart", LIMIT, || bus.locks() == 1);
    assert_eq!(node.running("st"), before);

    // The agent is started while the machine already shuts down: no lock is to be had. What runs
    // is stopped in order all the same, and what is new is refused.
    node.stop_agent();
    bus.set_preparing(true);
    node.start_agent();
    let has_event = |pod: &str, reason: &str| {
        let status = node.pod(pod).and_then(|pod| pod.status).unwrap_or_default();
        status.phase.as_deref() == Some("Failed") && status.reason.as_deref() == Some(reason)
    };
    wait_until("the end of the running pod", LIMIT, || {
        has_event("st", "Terminated") && node.running("st").is_empty()
    });
    node.apply("late.json", &simple("late"));
    // The API server names its pods when the shutdown is known already.
    // Its container exits with 0: only the condition shows the shutdown.
    let is_over = |pod: &Value| ["Failed", "Succeeded"].contains(&text(pod, "/status/phase"));
    let ended = shared().wait(&["pod", "bus-api"], "over", LIMIT, is_over);
    assert_eq!((text(&ended, "/status/phase"), text(&ended, "/status/reason")), ("Succeeded", ""));
    assert_eq!(
        (condition(&ended, "DisruptionTarget"), message(&ended, "DisruptionTarget")),
        ("True", TERMINATED)
    );
    wait_until("the rejection of the new pod", LIMIT, || has_event("late", "NodeShutdown"));
    assert_eq!(bus.locks(), 0);
    // After the canceled shutdown both run.
    bus.prepare(false);
    node.wait_ready("st");
    node.wait_ready("late");
    wait_until("the lock to be taken once more", LIMIT, || bus.locks() == 1);
    shared().kubectl(&["delete", "pod", "bus-api", "--grace-period=1"]);
    node.finish();
    shared().kubectl(&["delete", "node", name, "--ignore-not-found"]);
}
