//! What becomes of a pod's containers: order, restarts and ends, by the whole agent on the
//! fake runtime.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use coracle::model::api::{ContainerStatus, Pod};
use serde_json::{Value, json};

use crate::support::node::{
    FOREVER, busybox, condition, container, ended, ended_before, init_container, is_ready, phase, pod,
    restarts, simple, waiting_reason,
};
use crate::support::solo::{LONG, Solo};
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
fn names(solo: &Solo) -> BTreeMap<String, String> {
    let all = solo.fake.containers().into_iter();
    all.map(|one| (one.status.id.clone(), one.config.metadata.name.clone())).collect()
}

/// Container names of the calls of `method`, in order.
fn order(solo: &Solo, names: &BTreeMap<String, String>, method: &str) -> Vec<String> {
    let journal = solo.fake.journal().into_iter().filter(|entry| entry.method == method);
    journal.filter_map(|entry| names.get(entry.request["container_id"].as_str()?).cloned()).collect()
}

fn running_id(solo: &Solo, name: &str, container: &str) -> Option<String> {
    solo.running(name).get(container)?.first().cloned()
}

fn kill(solo: &Solo, name: &str, container: &str, code: i32) {
    let id = running_id(solo, name, container).unwrap();
    assert!(solo.fake.kill_container(&id, code));
}

fn reasons(solo: &Solo) -> Vec<String> {
    let events: Value = serde_json::from_str(&solo.says(&["events", "-o", "json"])).unwrap();
    let events = events.as_array().unwrap();
    events.iter().filter_map(|event| event["reason"].as_str().map(str::to_owned)).collect()
}

#[test]
fn init_containers_and_sidecars_start_in_order_and_end_in_reverse() {
    let solo = Solo::start();
    let init = json!([sidecar("s1"), busybox("i2", "sleep 0.1; exit 0"), sidecar("s2")]);
    let mut web = with_init("web", json!([busybox("main", FOREVER)]), init);
    // A sidecar waits for the others no longer than this.
    web["spec"]["terminationGracePeriodSeconds"] = json!(60);
    solo.apply(&web);
    solo.wait_ready("web");
    assert_eq!(order(&solo, &names(&solo), "StartContainer"), ["s1", "i2", "s2", "main"]);
    // A sidecar comes back like any other, and nothing else moves.
    let main = running_id(&solo, "web", "main");
    kill(&solo, "web", "s1", 0);
    wait_until("the sidecar to be back", LONG, || running_id(&solo, "web", "s1").is_some());
    assert_eq!(running_id(&solo, "web", "main"), main);
    solo.fake.clear_journal();
    let names = names(&solo);
    solo.remove("web");
    solo.wait_gone("web", LONG);
    assert_eq!(order(&solo, &names, "StopContainer"), ["main", "s2", "s1"]);
    solo.finish();
}

fn init_waiting_reason(pod: &Pod, name: &str) -> Option<String> {
    init_container(pod, name)?.state.as_ref()?.waiting.as_ref()?.reason.clone()
}

#[test]
fn sidecar_that_exits_during_initialization_starts_again() {
    let solo = Solo::start();
    let policies = [("always", "Always"), ("on-failure", "OnFailure"), ("never", "Never")];
    for (name, policy) in policies {
        let init = json!([sidecar("s"), busybox("first", "sleep 0.1; exit 0"), busybox("long", FOREVER)]);
        let mut web = with_init(name, json!([busybox("main", FOREVER)]), init);
        web["spec"]["restartPolicy"] = json!(policy);
        solo.apply(&web);
    }
    for (name, _) in policies {
        wait_until("the last init container to run", LONG, || running_id(&solo, name, "long").is_some());
        let (before, long) = (running_id(&solo, name, "s"), running_id(&solo, name, "long"));
        kill(&solo, name, "s", 0);
        wait_until("the sidecar to be back", LONG, || {
            running_id(&solo, name, "s").is_some_and(|now| Some(now) != before)
        });
        // Again at once is too soon: it waits, while the init container runs on.
        kill(&solo, name, "s", 1);
        solo.wait_pod(name, "to show the wait", LONG, |pod| {
            init_waiting_reason(pod, "s").as_deref() == Some("CrashLoopBackOff") && phase(pod) == "Pending"
        });
        assert_eq!(running_id(&solo, name, "long"), long);
        // The containers after it do not wait for it.
        kill(&solo, name, "long", 0);
        wait_until("the container to run", LONG, || running_id(&solo, name, "main").is_some());
    }
    for (name, policy) in policies {
        wait_until("the sidecar to be back after its wait", LONG, || running_id(&solo, name, "s").is_some());
        let made = |container: &str| {
            let all = solo.containers(name);
            all.iter().filter(|one| one.config.metadata.name == container).count()
        };
        assert_eq!((made("first"), made("long"), made("main")), (1, 1, 1), "{policy}");
    }
    solo.finish();
}

#[test]
fn host_network_pod_has_the_addresses_of_its_status() {
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
    let told = |solo: &Solo, container: &str, name: &str| {
        let made = solo.fake.container(container).unwrap();
        let value = made.config.envs.iter().find(|env| env.key == name).unwrap();
        String::from_utf8(value.value.clone()).unwrap()
    };
    // From the first container on, those of the node at the API server.
    let solo = Solo::join(json!({}));
    solo.bind(&web);
    let shown = solo.wait_ready("web").status.unwrap();
    let (pod_ip, host_ip) = (shown.pod_ip.unwrap(), shown.host_ip.unwrap());
    assert_eq!(pod_ip, host_ip);
    for container in ["first", "main"] {
        for name in ["IP", "IPS", "HOST"] {
            assert_eq!(told(&solo, container, name), pod_ip, "{container} {name}");
        }
    }
    let first = running_id(&solo, "web", "main");
    kill(&solo, "web", "main", 1);
    wait_until("it to run again", LONG, || {
        running_id(&solo, "web", "main").is_some_and(|id| Some(id) != first)
    });
    assert_eq!(told(&solo, "main", "IP"), pod_ip);
    drop(solo);
    // Without an API server the status shows none, as upstream.
    let solo = Solo::start();
    solo.apply(&web);
    let shown = solo.wait_ready("web").status.unwrap();
    assert_eq!((shown.pod_ip, shown.host_ip), (None, None));
    assert_eq!((told(&solo, "first", "IP"), told(&solo, "main", "IPS")), (String::new(), String::new()));
    solo.finish();
}

#[test]
fn sidecars_do_not_keep_a_finished_pod_alive() {
    let solo = Solo::start();
    let mut job = with_init("job", json!([busybox("main", "sleep 0.2; exit 0")]), json!([sidecar("s")]));
    job["spec"]["restartPolicy"] = json!("Never");
    solo.apply(&job);
    solo.wait_pod("job", "to succeed", LONG, |pod| phase(pod) == "Succeeded");
    wait_until("the sidecar to end", LONG, || solo.running("job").is_empty());
    solo.finish();
}

#[test]
fn each_container_has_its_own_restart_policy() {
    let solo = Solo::start();
    let mut never = busybox("once", "sleep 0.1; exit 3");
    never["restartPolicy"] = json!("Never");
    let mut rules = busybox("again", FOREVER);
    rules["restartPolicy"] = json!("Never");
    rules["restartPolicyRules"] =
        json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]);
    solo.apply(&pod("web", json!([never, rules])));
    wait_until("both to have started", LONG, || solo.containers("web").len() == 2);
    wait_until("one to run", LONG, || running_id(&solo, "web", "again").is_some());
    kill(&solo, "web", "again", 42);
    wait_until("it to run again", LONG, || {
        solo.containers("web").len() == 3 && running_id(&solo, "web", "again").is_some()
    });
    holds_for("the other one stays ended", Duration::from_secs(1), || {
        solo.containers("web").iter().filter(|one| one.config.metadata.name == "once").count() == 1
    });
    kill(&solo, "web", "again", 1);
    solo.wait_pod("web", "to fail", LONG, |pod| phase(pod) == "Failed");
    solo.finish();
}

#[test]
fn all_containers_start_again_when_one_asks_for_it() {
    let solo = Solo::start();
    // Restart counts go on from the names of the logs.
    solo.fake.write_logs();
    let mut trigger = busybox("trigger", FOREVER);
    trigger["restartPolicy"] = json!("Never");
    trigger["restartPolicyRules"] =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let init = json!([busybox("first", "sleep 0.1; exit 0"), sidecar("side")]);
    solo.apply(&with_init("web", json!([busybox("other", FOREVER), trigger]), init));
    solo.wait_ready("web");
    let (before, sandboxes) = (solo.running("web"), solo.ready_sandboxes("web"));
    solo.fake.clear_journal();
    kill(&solo, "web", "trigger", 42);
    wait_until("all to run again", LONG, || {
        let now = solo.running("web");
        now.len() == 3 && now.iter().all(|(name, ids)| before.get(name) != Some(ids))
    });
    assert_eq!(order(&solo, &names(&solo), "StartContainer"), ["first", "side", "other", "trigger"]);
    assert_eq!(solo.ready_sandboxes("web"), sandboxes, "the sandbox is kept");
    let again =
        solo.wait_pod("web", "to be ready again", LONG, |pod| is_ready(pod) && restarts(pod, "other") == 1);
    assert_eq!((restarts(&again, "other"), restarts(&again, "trigger")), (1, 1));
    let ended = ended_before(&again, "other").unwrap();
    assert_eq!((ended.exit_code, ended.reason.as_deref()), (137, Some("RestartingAllContainers")));
    // From the second time on that comes too soon. The others go on meanwhile, and are looked after.
    // Where a slow machine has seen all of this only when the wait was over: once more, since each
    // wait is twice the one before.
    for (seconds, is_last) in [(10, false), (20, false), (40, true)] {
        solo.wait_ready("web");
        let (before, begun) = (solo.running("web"), Instant::now());
        kill(&solo, "web", "trigger", 42);
        let late = || begun.elapsed() >= Duration::from_secs(seconds);
        let mut waiting = None;
        wait_until("the pod to wait", LONG, || {
            solo.assert_no_twins();
            waiting = solo.pod("web").filter(|pod| waiting_reason(pod, "trigger") == "CrashLoopBackOff");
            waiting.is_some() || late()
        });
        if let Some(other) = running_id(&solo, "web", "other") {
            solo.fake.kill_container(&other, 1);
        }
        let mut now = BTreeMap::new();
        wait_until("the other one to run again", LONG, || {
            now = solo.running("web");
            now.get("other").is_some_and(|ids| *ids != before["other"]) || late()
        });
        if late() && !is_last {
            wait_until("all to run again", LONG, || solo.running("web").len() == 3);
            continue;
        }
        assert_eq!(condition(&waiting.unwrap(), "AllContainersRestarting").unwrap().0, "False");
        assert!(now.get("other").is_some_and(|ids| *ids != before["other"]), "nobody looked after it");
        assert_eq!(now["side"], before["side"], "nothing else was touched");
        // At the end of the wait it happens after all.
        wait_until("all to run again", LONG, || {
            let all = solo.running("web");
            all.contains_key("trigger") && all.get("other") != now.get("other")
        });
        assert_ne!(solo.running("web")["side"], before["side"]);
        break;
    }
    assert_eq!(solo.ready_sandboxes("web"), sandboxes, "the sandbox is kept");
    solo.finish();
}

#[test]
fn rules_that_are_switched_off_restart_their_own_container_at_most() {
    for (gates, restarts_it) in [
        (json!({"RestartAllContainersOnContainerExits": false}), true),
        (json!({"RestartAllContainersOnContainerExits": false, "ContainerRestartRules": false}), false),
    ] {
        let solo = Solo::start_with(json!({"featureGates": gates}));
        let mut trigger = busybox("trigger", FOREVER);
        trigger["restartPolicy"] = json!("Never");
        trigger["restartPolicyRules"] =
            json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
        let mut web = pod("web", json!([busybox("other", FOREVER), trigger]));
        web["spec"]["restartPolicy"] = json!("Never");
        solo.apply(&web);
        let ready = solo.wait_ready("web");
        assert_eq!(condition(&ready, "AllContainersRestarting"), None);
        let other = running_id(&solo, "web", "other");
        kill(&solo, "web", "trigger", 42);
        if restarts_it {
            wait_until("it to run again", LONG, || running_id(&solo, "web", "trigger").is_some());
        } else {
            solo.wait_pod("web", "to show its end", LONG, |pod| ended(pod, "trigger").is_some());
            holds_for("it stays ended", Duration::from_secs(1), || {
                running_id(&solo, "web", "trigger").is_none()
            });
        }
        assert_eq!(running_id(&solo, "web", "other"), other, "{gates}");
        solo.finish();
    }
}

fn ephemeral<'a>(pod: &'a Pod, name: &str) -> Option<&'a ContainerStatus> {
    let list = pod.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
    list.iter().find(|one| one.name == name)
}

#[test]
fn an_ephemeral_container_runs_once() {
    let solo = Solo::start();
    solo.apply(&simple("web"));
    solo.wait_ready("web");
    let said = solo.says(&[
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
    assert!(said.contains("ephemeral container dbg"), "{said}");
    let runs = |pod: &Pod| {
        ephemeral(pod, "dbg").and_then(|one| one.state.as_ref()).is_some_and(|state| state.running.is_some())
    };
    solo.wait_pod("web", "to show it", LONG, runs);
    for (args, code) in [
        (&["debug", "web", "--image", "b:1", "-c", "dbg"][..], 1),
        (&["debug", "web", "--image", "b:1", "--target", "nobody"], 1),
        (&["debug", "nobody", "--image", "b:1"], 5),
        (&["debug", "web"], 2),
    ] {
        let output = solo.command(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    kill(&solo, "web", "dbg", 1);
    let ended = |pod: &Pod| {
        ephemeral(pod, "dbg")
            .and_then(|one| one.state.as_ref())
            .is_some_and(|state| state.terminated.is_some())
    };
    solo.wait_pod("web", "to show its end", LONG, |pod| ended(pod) && phase(pod) == "Running");
    holds_for("it stays ended", Duration::from_secs(1), || running_id(&solo, "web", "dbg").is_none());
    let web = solo.pod("web").unwrap();
    assert!(is_ready(&web) && container(&web, "dbg").is_none());
    let shown = ephemeral(&web, "dbg").unwrap();
    assert_eq!((shown.started, shown.ready), (None, false));
    solo.finish();
}

#[test]
fn a_deadline_ends_a_pod_that_waits_in_a_crash_loop() {
    let solo = Solo::start();
    let mut job = pod("job", json!([busybox("main", "exit 1")]));
    // In the middle of the second wait, which is from the 10th second to the 30th.
    job["spec"]["activeDeadlineSeconds"] = json!(15);
    let begun = Instant::now();
    solo.apply(&job);
    solo.wait_pod("job", "to wait", LONG, |pod| waiting_reason(pod, "main") == "CrashLoopBackOff");
    let left = Duration::from_secs(28).saturating_sub(begun.elapsed());
    let over = solo.wait_pod("job", "to fail", left, |pod| phase(pod) == "Failed");
    assert_eq!(over.status.as_ref().unwrap().reason.as_deref(), Some("DeadlineExceeded"));
    wait_until("the event", LONG, || reasons(&solo).iter().any(|reason| reason == "DeadlineExceeded"));
    solo.finish();
}

#[test]
fn hooks_of_a_pod_that_is_removed() {
    let solo = Solo::start();
    let mut main = busybox("main", FOREVER);
    main["lifecycle"] = json!({"postStart": {"exec": {"command": ["touch", "/started"]}},
        "preStop": {"exec": {"command": ["touch", "/stopping"]}}});
    let mut slow = busybox("slow", FOREVER);
    slow["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 1}}});
    solo.apply(&pod("web", json!([main, slow])));
    solo.wait_ready("web");
    let names = names(&solo);
    assert_eq!(order(&solo, &names, "ExecSync"), ["main"]);
    solo.remove("web");
    solo.wait_gone("web", LONG);
    assert_eq!(order(&solo, &names, "ExecSync"), ["main", "main"]);
    let timeouts: Vec<Value> = solo
        .fake
        .journal()
        .into_iter()
        .filter(|entry| entry.method == "StopContainer")
        .map(|entry| entry.request["timeout"].clone())
        .collect();
    assert_eq!(timeouts, [json!("2"), json!("2")]);
    solo.finish();
}
