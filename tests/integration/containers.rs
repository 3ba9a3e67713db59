//! Containers of a pod: order, restarts and termination, with the whole agent on the fake runtime.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use coracle::model::api::{ContainerStatus, Pod};
use serde_json::{Value, json};

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{
    FOREVER, busybox, condition, container, ended, ended_before, init_container, is_ready, phase, pod,
    restarts, simple, waiting_reason,
};
use crate::support::wait::{holds_for, wait_until};

fn sidecar(name: &str) -> Value {
    let mut sidecar = busybox(name, FOREVER);
    sidecar["restartPolicy"] = json!("Always");
    sidecar
}

fn with_init(name: &str, containers: Value, init: Value) -> Value {
    let mut manifest = pod(name, containers);
    manifest["spec"]["initContainers"] = init;
    manifest
}

/// Container names by id, of all that the runtime has now.
fn names(node: &FakeNode) -> BTreeMap<String, String> {
    let all = node.fake.containers().into_iter();
    all.map(|container| (container.status.id.clone(), container.config.metadata.name.clone())).collect()
}

/// Container names of the calls of `method`, in order.
fn order(node: &FakeNode, names: &BTreeMap<String, String>, method: &str) -> Vec<String> {
    let journal = node.fake.journal().into_iter().filter(|entry| entry.method == method);
    journal.filter_map(|entry| names.get(entry.request["container_id"].as_str()?).cloned()).collect()
}

fn running_id(node: &FakeNode, name: &str, container: &str) -> Option<String> {
    node.running(name).get(container)?.first().cloned()
}

fn kill(node: &FakeNode, name: &str, container: &str, code: i32) {
    let id = running_id(node, name, container).unwrap();
    assert!(node.fake.kill_container(&id, code));
}

fn reasons(node: &FakeNode) -> Vec<String> {
    let events: Value = serde_json::from_str(&node.cli(&["events", "-o", "json"])).unwrap();
    let events = events.as_array().unwrap();
    events.iter().filter_map(|event| event["reason"].as_str().map(str::to_owned)).collect()
}

#[test]
fn init_containers_and_sidecars_start_in_order_and_end_in_reverse() {
    let node = FakeNode::start();
    let init = json!([sidecar("s1"), busybox("i2", "sleep 0.1; exit 0"), sidecar("s2")]);
    let mut web = with_init("web", json!([busybox("main", FOREVER)]), init);
    // A sidecar waits for the other containers no longer than this.
    web["spec"]["terminationGracePeriodSeconds"] = json!(60);
    node.apply(&web);
    node.wait_ready("web");
    assert_eq!(order(&node, &names(&node), "StartContainer"), ["s1", "i2", "s2", "main"]);
    // A sidecar restarts like any other container, and no other container restarts.
    let main = running_id(&node, "web", "main");
    kill(&node, "web", "s1", 0);
    wait_until("the sidecar to restart", LONG, || running_id(&node, "web", "s1").is_some());
    assert_eq!(running_id(&node, "web", "main"), main);
    node.fake.clear_journal();
    let names = names(&node);
    node.remove("web");
    node.wait_gone("web", LONG);
    assert_eq!(order(&node, &names, "StopContainer"), ["main", "s2", "s1"]);
    node.finish();
}

fn init_waiting_reason(pod: &Pod, name: &str) -> Option<String> {
    init_container(pod, name)?.state.as_ref()?.waiting.as_ref()?.reason.clone()
}

#[test]
fn sidecar_that_exits_during_initialization_starts_again() {
    let node = FakeNode::start();
    let policies = [("always", "Always"), ("on-failure", "OnFailure"), ("never", "Never")];
    for (name, policy) in policies {
        let init = json!([sidecar("s"), busybox("first", "sleep 0.1; exit 0"), busybox("long", FOREVER)]);
        let mut web = with_init(name, json!([busybox("main", FOREVER)]), init);
        web["spec"]["restartPolicy"] = json!(policy);
        node.apply(&web);
    }
    for (name, _) in policies {
        wait_until("the last init container to run", LONG, || running_id(&node, name, "long").is_some());
        let (before, long) = (running_id(&node, name, "s"), running_id(&node, name, "long"));
        kill(&node, name, "s", 0);
        wait_until("the sidecar to restart", LONG, || {
            running_id(&node, name, "s").is_some_and(|now| Some(now) != before)
        });
        // A second restart waits for the back-off, while the init container keeps running. If a busy machine
        // shows the pod only after the wait, the next end of the sidecar makes a longer one.
        let last_kill = Cell::new(Instant::now());
        kill(&node, name, "s", 1);
        node.wait_pod(name, "to show the wait", LONG, |pod| {
            if let Some(id) = running_id(&node, name, "s") {
                let wait = last_kill.replace(Instant::now()).elapsed();
                assert!(
                    wait > Duration::from_secs(8),
                    "restarted {wait:?} after its end, before the back-off"
                );
                node.fake.kill_container(&id, 1);
            }
            init_waiting_reason(pod, "s").as_deref() == Some("CrashLoopBackOff") && phase(pod) == "Pending"
        });
        assert_eq!(running_id(&node, name, "long"), long);
        // The containers after it do not wait for it.
        kill(&node, name, "long", 0);
        wait_until("the container to run", LONG, || running_id(&node, name, "main").is_some());
    }
    for (name, policy) in policies {
        wait_until("the sidecar to restart after its back-off", LONG, || {
            running_id(&node, name, "s").is_some()
        });
        let made = |container: &str| {
            let all = node.containers(name);
            all.iter().filter(|entry| entry.config.metadata.name == container).count()
        };
        assert_eq!((made("first"), made("long"), made("main")), (1, 1, 1), "{policy}");
    }
    node.finish();
}

#[test]
fn host_network_pod_has_the_reported_addresses() {
    let field =
        |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let asks = |name: &str, script: &str| {
        let mut container = busybox(name, script);
        container["env"] = json!([
            field("IP", "status.podIP"),
            field("IPS", "status.podIPs"),
            field("HOST", "status.hostIP")
        ]);
        container
    };
    let mut web =
        with_init("web", json!([asks("main", FOREVER)]), json!([asks("first", "sleep 0.1; exit 0")]));
    web["spec"]["hostNetwork"] = json!(true);
    let variable = |node: &FakeNode, container: &str, name: &str| {
        let made = node.fake.container(container).unwrap();
        let value = made.config.envs.iter().find(|env| env.key == name).unwrap();
        String::from_utf8(value.value.clone()).unwrap()
    };
    // From the first container on, those of the node at the API server.
    let node = FakeNode::join(json!({}));
    node.bind(&web);
    let shown = node.wait_ready("web").status.unwrap();
    let (pod_ip, host_ip) = (shown.pod_ip.unwrap(), shown.host_ip.unwrap());
    assert_eq!(pod_ip, host_ip);
    for container in ["first", "main"] {
        for name in ["IP", "IPS", "HOST"] {
            assert_eq!(variable(&node, container, name), pod_ip, "{container} {name}");
        }
    }
    let first = running_id(&node, "web", "main");
    kill(&node, "web", "main", 1);
    wait_until("it to run again", LONG, || {
        running_id(&node, "web", "main").is_some_and(|id| Some(id) != first)
    });
    assert_eq!(variable(&node, "main", "IP"), pod_ip);
    drop(node);
    // Without an API server the status shows none, as upstream.
    let node = FakeNode::start();
    node.apply(&web);
    let shown = node.wait_ready("web").status.unwrap();
    assert_eq!((shown.pod_ip, shown.host_ip), (None, None));
    assert_eq!(
        (variable(&node, "first", "IP"), variable(&node, "main", "IPS")),
        (String::new(), String::new())
    );
    node.finish();
}

#[test]
fn sidecars_end_when_all_containers_have_finished() {
    let node = FakeNode::start();
    let mut job = with_init("job", json!([busybox("main", "sleep 0.2; exit 0")]), json!([sidecar("s")]));
    job["spec"]["restartPolicy"] = json!("Never");
    node.apply(&job);
    node.wait_pod("job", "to succeed", LONG, |pod| phase(pod) == "Succeeded");
    wait_until("the sidecar to end", LONG, || node.running("job").is_empty());
    node.finish();
}

#[test]
fn each_container_has_its_own_restart_policy() {
    let node = FakeNode::start();
    let mut never = busybox("once", "sleep 0.1; exit 3");
    never["restartPolicy"] = json!("Never");
    let mut rules = busybox("again", FOREVER);
    rules["restartPolicy"] = json!("Never");
    rules["restartPolicyRules"] =
        json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]);
    node.apply(&pod("web", json!([never, rules])));
    wait_until("both to have started", LONG, || node.containers("web").len() == 2);
    wait_until("one to run", LONG, || running_id(&node, "web", "again").is_some());
    kill(&node, "web", "again", 42);
    wait_until("it to run again", LONG, || {
        node.containers("web").len() == 3 && running_id(&node, "web", "again").is_some()
    });
    holds_for("the other one stays ended", Duration::from_secs(1), || {
        node.containers("web").iter().filter(|container| container.config.metadata.name == "once").count()
            == 1
    });
    kill(&node, "web", "again", 1);
    node.wait_pod("web", "to fail", LONG, |pod| phase(pod) == "Failed");
    node.finish();
}

#[test]
fn restart_all_containers_rule_restarts_the_pod() {
    let node = FakeNode::start();
    // Restart counts go on from the names of the logs.
    node.fake.write_logs();
    let mut trigger = busybox("trigger", FOREVER);
    trigger["restartPolicy"] = json!("Never");
    trigger["restartPolicyRules"] =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let init = json!([busybox("first", "sleep 0.1; exit 0"), sidecar("side")]);
    node.apply(&with_init("web", json!([busybox("other", FOREVER), trigger]), init));
    node.wait_ready("web");
    let (before, sandboxes) = (node.running("web"), node.ready_sandboxes("web"));
    node.fake.clear_journal();
    kill(&node, "web", "trigger", 42);
    wait_until("all to run again", LONG, || {
        let now = node.running("web");
        now.len() == 3 && now.iter().all(|(name, ids)| before.get(name) != Some(ids))
    });
    assert_eq!(order(&node, &names(&node), "StartContainer"), ["first", "side", "other", "trigger"]);
    assert_eq!(node.ready_sandboxes("web"), sandboxes, "the sandbox is kept");
    let again =
        node.wait_pod("web", "to be ready again", LONG, |pod| is_ready(pod) && restarts(pod, "other") == 1);
    assert_eq!((restarts(&again, "other"), restarts(&again, "trigger")), (1, 1));
    let ended = ended_before(&again, "other").unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (137, Some("RestartingAllContainers")));
    // From the second time on the restart waits for the back-off. The other containers continue and
    // are restarted meanwhile. If a slow machine shows all of this only after the wait, the loop
    // tries again, since each wait is twice the one before.
    for (seconds, is_last) in [(10, false), (20, false), (40, true)] {
        node.wait_ready("web");
        let (before, begun) = (node.running("web"), Instant::now());
        kill(&node, "web", "trigger", 42);
        let late = || begun.elapsed() >= Duration::from_secs(seconds);
        let mut waiting = None;
        wait_until("the pod to wait", LONG, || {
            node.assert_no_duplicates();
            waiting = node.pod("web").filter(|pod| waiting_reason(pod, "trigger") == "CrashLoopBackOff");
            waiting.is_some() || late()
        });
        if let Some(other) = running_id(&node, "web", "other") {
            node.fake.kill_container(&other, 1);
        }
        let mut now = BTreeMap::new();
        wait_until("the other one to run again", LONG, || {
            now = node.running("web");
            now.get("other").is_some_and(|ids| *ids != before["other"]) || late()
        });
        if late() && !is_last {
            wait_until("all to run again", LONG, || node.running("web").len() == 3);
            continue;
        }
        assert_eq!(condition(&waiting.unwrap(), "AllContainersRestarting").unwrap().0, "False");
        assert!(
            now.get("other").is_some_and(|ids| *ids != before["other"]),
            "the other container was not handled"
        );
        assert_eq!(now["side"], before["side"], "nothing else was touched");
        // The restart happens at the end of the wait.
        wait_until("all to run again", LONG, || {
            let all = node.running("web");
            all.contains_key("trigger") && all.get("other") != now.get("other")
        });
        assert_ne!(node.running("web")["side"], before["side"]);
        break;
    }
    assert_eq!(node.ready_sandboxes("web"), sandboxes, "the sandbox is kept");
    node.finish();
}

#[test]
fn disabled_restart_rules_do_not_restart_other_containers() {
    for (gates, restarts_it) in [
        (json!({"RestartAllContainersOnContainerExits": false}), true),
        (json!({"RestartAllContainersOnContainerExits": false, "ContainerRestartRules": false}), false),
    ] {
        let node = FakeNode::start_with(json!({"featureGates": gates}));
        let mut trigger = busybox("trigger", FOREVER);
        trigger["restartPolicy"] = json!("Never");
        trigger["restartPolicyRules"] =
            json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
        let mut web = pod("web", json!([busybox("other", FOREVER), trigger]));
        web["spec"]["restartPolicy"] = json!("Never");
        node.apply(&web);
        let ready = node.wait_ready("web");
        assert_eq!(condition(&ready, "AllContainersRestarting"), None);
        let other = running_id(&node, "web", "other");
        kill(&node, "web", "trigger", 42);
        if restarts_it {
            wait_until("it to run again", LONG, || running_id(&node, "web", "trigger").is_some());
        } else {
            node.wait_pod("web", "to show its end", LONG, |pod| ended(pod, "trigger").is_some());
            holds_for("it stays ended", Duration::from_secs(1), || {
                running_id(&node, "web", "trigger").is_none()
            });
        }
        assert_eq!(running_id(&node, "web", "other"), other, "{gates}");
        node.finish();
    }
}

fn ephemeral<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    let list = pod.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
    list.iter().find(|status| status.name == name)
}

#[test]
fn ephemeral_container_runs_once() {
    let node = FakeNode::start();
    node.apply(&simple("web"));
    node.wait_ready("web");
    let output = node.cli(&[
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
        FOREVER,
    ]);
    assert!(output.contains("ephemeral container dbg"), "{output}");
    let runs = |pod: &Pod| {
        ephemeral(pod, "dbg")
            .and_then(|status| status.state.as_ref())
            .is_some_and(|state| state.running.is_some())
    };
    node.wait_pod("web", "to show it", LONG, runs);
    for (args, code) in [
        (&["debug", "web", "--image", "b:1", "-c", "dbg"][..], 1),
        (&["debug", "web", "--image", "b:1", "--target", "none"], 1),
        (&["debug", "none", "--image", "b:1"], 5),
        (&["debug", "web"], 2),
    ] {
        let output = node.command(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    kill(&node, "web", "dbg", 1);
    let ended = |pod: &Pod| {
        ephemeral(pod, "dbg")
            .and_then(|status| status.state.as_ref())
            .is_some_and(|state| state.terminated.is_some())
    };
    node.wait_pod("web", "to show its end", LONG, |pod| ended(pod) && phase(pod) == "Running");
    holds_for("it stays ended", Duration::from_secs(1), || running_id(&node, "web", "dbg").is_none());
    let web = node.pod("web").unwrap();
    assert!(is_ready(&web) && container(&web, "dbg").is_none());
    let shown = ephemeral(&web, "dbg").unwrap();
    assert_eq!((shown.started, shown.ready), (None, false));
    node.finish();
}

#[test]
fn active_deadline_ends_a_pod_in_back_off() {
    let node = FakeNode::start();
    // If a busy machine shows the end of a pod only after the wait, another pod is tried.
    for attempt in 1..=5 {
        let name = format!("job{attempt}");
        let mut job = pod(&name, json!([busybox("main", "exit 1")]));
        // In the middle of the second wait, which is from the 10th second to the 30th.
        job["spec"]["activeDeadlineSeconds"] = json!(15);
        let begun = Instant::now();
        node.apply(&job);
        let seen = node.wait_pod(&name, "to wait", LONG, |pod| {
            waiting_reason(pod, "main") == "CrashLoopBackOff" || phase(pod) == "Failed"
        });
        let was_waiting = waiting_reason(&seen, "main") == "CrashLoopBackOff";
        let over = node.wait_pod(&name, "to fail", LONG, |pod| phase(pod) == "Failed");
        let took = begun.elapsed();
        assert_eq!(over.status.as_ref().unwrap().reason.as_deref(), Some("DeadlineExceeded"));
        if was_waiting && took < Duration::from_secs(28) {
            break;
        }
        assert!(attempt < 5, "in back-off: {was_waiting}; failed after {took:?}");
    }
    wait_until("the event", LONG, || reasons(&node).iter().any(|reason| reason == "DeadlineExceeded"));
    node.finish();
}

#[test]
fn pre_stop_hooks_run_when_a_pod_is_removed() {
    let node = FakeNode::start();
    let mut main = busybox("main", FOREVER);
    main["lifecycle"] = json!({"postStart": {"exec": {"command": ["touch", "/started"]}},
        "preStop": {"exec": {"command": ["touch", "/stopping"]}}});
    let mut slow = busybox("slow", FOREVER);
    slow["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 1}}});
    node.apply(&pod("web", json!([main, slow])));
    node.wait_ready("web");
    let names = names(&node);
    assert_eq!(order(&node, &names, "ExecSync"), ["main"]);
    node.remove("web");
    node.wait_gone("web", LONG);
    assert_eq!(order(&node, &names, "ExecSync"), ["main", "main"]);
    let timeouts: Vec<Value> = node
        .fake
        .journal()
        .into_iter()
        .filter(|entry| entry.method == "StopContainer")
        .map(|entry| entry.request["timeout"].clone())
        .collect();
    assert_eq!(timeouts, [json!("2"), json!("2")]);
    node.finish();
}
