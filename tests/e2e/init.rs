//! Init containers, sidecars, and rules for restarts.

use serde_json::{Value, json};

use crate::support::node::{
    FOREVER, LONG, Node, STAMP, busybox, condition, container, ended, init_container, is_ready, phase, pod,
    restarts, waiting_reason,
};
use crate::support::wait::wait_until;

fn words(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.split_whitespace().next()).collect()
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn init_containers_run_in_order_and_again_in_a_new_sandbox() {
    let node = Node::start("init");
    let mut manifest = pod("web", json!([busybox("main", &format!("echo main >> /out/order; {FOREVER}"))]));
    manifest["spec"]["initContainers"] = json!([
        busybox("one", "echo one >> /out/order; until [ -e /out/go ]; do sleep 0.1; done"),
        busybox("two", "echo two >> /out/order"),
    ]);
    node.apply("web.json", &node.with_out(manifest));
    wait_until("the first to run", LONG, || node.out("order") == "one\n");
    let early = node.wait_pod("web", "initializing", LONG, |pod| {
        init_container(pod, "one")
            .is_some_and(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
    });
    assert_eq!((phase(&early), waiting_reason(&early, "main")), ("Pending", "PodInitializing"));
    let (status, message) = condition(&early, "Initialized").unwrap_or_default();
    assert_eq!(
        (status.as_str(), message.as_str()),
        ("False", "containers with incomplete status: [one two]")
    );
    assert_eq!(
        condition(&early, "PodReadyToStartContainers").map(|(status, _)| status).as_deref(),
        Some("True")
    );
    node.touch("go");
    let ready = node.wait_ready("web");
    wait_until("everything to run", LONG, || words(&node.out("order")).len() >= 3);
    assert_eq!(words(&node.out("order")), ["one", "two", "main"]);
    for name in ["one", "two"] {
        let end = init_container(&ready, name).and_then(|status| status.state.as_ref()?.terminated.clone());
        assert_eq!(end.map(|end| (end.exit_code, end.reason)), Some((0, Some("Completed".to_owned()))));
    }
    assert_eq!(condition(&ready, "Initialized").map(|(status, _)| status).as_deref(), Some("True"));

    let (runtime, _) = node.cri();
    let attempts = || -> Vec<u32> {
        let running = node.running_sandboxes("web");
        let sandboxes = runtime.list_pod_sandbox(Default::default()).expect("ListPodSandbox");
        let running = sandboxes.iter().filter(|sandbox| running.contains(&sandbox.id));
        running.filter_map(|sandbox| sandbox.metadata.as_ref()).map(|metadata| metadata.attempt).collect()
    };
    let first = attempts();
    let sandbox = node.running_sandboxes("web");
    node.containerd.kill_task(&sandbox[0]);
    wait_until("everything to run again", LONG, || words(&node.out("order")).len() == 6);
    node.wait_pod("web", "ready in a new sandbox", LONG, |pod| {
        is_ready(pod) && node.running_sandboxes("web") != sandbox
    });
    assert_eq!(words(&node.out("order")), ["one", "two", "main", "one", "two", "main"]);
    let event =
        node.wait_event("web", "SandboxChanged", "Pod sandbox changed, it will be killed and re-created.");
    assert_eq!(event.kind, "Normal");
    // A sandbox that the runtime could not create is retried, and counts as an attempt if it left a
    // record.
    let (second, failed) = (attempts(), node.metric("kubelet_started_pods_errors_total") as u32);
    assert_eq!((first.len(), second.len()), (1, 1), "{first:?} {second:?}");
    assert!(
        first[0] < second[0] && second[0] <= 1 + failed,
        "attempt {} after {}, with {failed} that failed",
        second[0],
        first[0]
    );
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn failed_init_container_fails_or_retries_the_pod_by_policy() {
    let node = Node::start("initfail");
    for (name, policy) in [("never", "Never"), ("again", "OnFailure")] {
        let mut manifest =
            pod(name, json!([busybox("main", &format!("echo ran >> /out/{name}; {FOREVER}"))]));
        manifest["spec"]["initContainers"] = json!([busybox("setup", "exit 3")]);
        manifest["spec"]["restartPolicy"] = json!(policy);
        node.apply(&format!("{name}.json"), &node.with_out(manifest));
    }
    let failed = node.wait_pod("never", "failed", LONG, |pod| phase(pod) == "Failed");
    let end = init_container(&failed, "setup").and_then(|status| status.state.as_ref()?.terminated.clone());
    assert_eq!(end.map(|end| end.exit_code), Some(3));
    let again = node.wait_pod("again", "backing off", LONG, |pod| {
        init_container(pod, "setup").is_some_and(|status| {
            status.restart_count >= 1
                && status.state.as_ref().and_then(|state| state.waiting.as_ref()?.reason.as_deref())
                    == Some("CrashLoopBackOff")
        })
    });
    assert_eq!(phase(&again), "Pending");
    assert_eq!((node.out("never"), node.out("again")), (String::new(), String::new()));
    node.finish();
}

/// Writes down its start and its end, and ends when `last` has ended.
fn ending_with(name: &str, last: &str) -> Value {
    let script = format!(
        "trap '{STAMP} >> /out/{name}-term; {last}; {STAMP} >> /out/{name}-end; exit 0' TERM; \
         {STAMP} >> /out/{name}-start; while :; do sleep 0.05; done"
    );
    busybox(name, &script)
}

/// A sidecar that takes `linger` seconds to end.
fn sidecar(name: &str, linger: &str) -> Value {
    let mut container = ending_with(name, &format!("sleep {linger}"));
    container["restartPolicy"] = json!("Always");
    container
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn sidecars_start_first_and_stop_last() {
    let node = Node::start("sidecars");
    // It ends once the hook of a sidecar has run meanwhile.
    let app = ending_with("app", "until [ -s /out/s1-pre ]; do sleep 0.1; done");
    let mut manifest = pod("web", json!([app]));
    let mut first = sidecar("s1", "0.5");
    first["startupProbe"] = json!({"exec": {"command": ["test", "-e", "/out/go"]}, "periodSeconds": 1,
        "timeoutSeconds": 60, "failureThreshold": 600});
    first["lifecycle"] =
        json!({"preStop": {"exec": {"command": ["sh", "-c", format!("{STAMP} >> /out/s1-pre")]}}});
    let between =
        busybox("between", &format!("{STAMP} >> /out/between-start; sleep 0.5; {STAMP} >> /out/between-end"));
    manifest["spec"]["initContainers"] = json!([first, between, sidecar("s2", "0.5")]);
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(75);
    node.apply("web.json", &node.with_out(manifest));
    node.wait_stamp("s1-start");
    node.wait_event("web", "Unhealthy", "Startup probe failed");
    assert_eq!(
        (node.stamps("between-start").len(), node.stamps("app-start").len()),
        (0, 0),
        "the next one waits for the start"
    );
    node.touch("go");
    node.wait_ready("web");
    let stamp = |what: &str| node.wait_stamp(what);
    for pair in [["s1-start", "between-start"], ["between-start", "between-end"], ["between-end", "s2-start"]]
    {
        assert!(stamp(pair[0]) <= stamp(pair[1]), "{pair:?}");
    }
    // The start of the app waits for no output of a sidecar without a startup probe, so the app's
    // output may come first. The starts themselves are in order.
    stamp("app-start");
    wait_until("all starts to be reported", LONG, || node.events_with_reason("web", "Started").len() >= 4);
    let started: Vec<String> =
        node.events_with_reason("web", "Started").into_iter().map(|event| event.field).collect();
    assert_eq!(
        started,
        [
            "spec.initContainers{s1}",
            "spec.initContainers{between}",
            "spec.initContainers{s2}",
            "spec.containers{app}"
        ]
    );

    node.remove("web.json");
    node.wait_gone("web");
    assert!(stamp("app-end") <= stamp("s2-term"), "the sidecar was signaled before the container had ended");
    assert!(stamp("s2-end") <= stamp("s1-term"), "sidecars end in reverse order");
    // Without it the app is killed at the end of the grace period, and writes no end.
    assert!(stamp("s1-pre") <= stamp("app-end"), "a sidecar's hook runs at once");
    let killing = node.events_with_reason("web", "Killing");
    for name in ["app", "s1", "s2"] {
        let message = format!("Stopping container {name}");
        let matching = killing.iter().filter(|event| event.message == message);
        assert_eq!(matching.map(|event| event.count).sum::<u64>(), 1, "{name}: {killing:#?}");
    }
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn sidecars_stop_when_the_pod_completes() {
    let node = Node::start("sidedone");
    let mut manifest =
        pod("job", json!([busybox("app", "until [ -e /out/done ]; do sleep 0.1; done; exit 0")]));
    manifest["spec"]["initContainers"] = json!([sidecar("s1", "0.3"), sidecar("s2", "0.3")]);
    manifest["spec"]["restartPolicy"] = json!("Never");
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(75);
    node.apply("job.json", &node.with_out(manifest));
    node.wait_ready("job");
    wait_until("all to have started", LONG, || {
        ["s1-start", "s2-start"].iter().all(|file| !node.stamps(file).is_empty())
    });
    // A sidecar that dies is started again, whatever the pod's policy.
    let running = node.running("job");
    node.containerd.kill_task(&running["s2"][0]);
    node.wait_pod("job", "with its sidecar again", LONG, |pod| {
        init_container(pod, "s2").is_some_and(|status| status.restart_count == 1 && status.ready)
    });
    wait_until("it to have started again", LONG, || node.stamps("s2-start").len() == 2);
    node.touch("done");
    let done = node.wait_pod("job", "succeeded", LONG, |pod| phase(pod) == "Succeeded");
    assert_eq!(ended(&done, "app").map(|end| end.exit_code), Some(0));
    wait_until("everything to stop", LONG, || {
        node.running("job").is_empty() && node.running_sandboxes("job").is_empty()
    });
    assert!(node.wait_stamp("s2-end") <= node.wait_stamp("s1-term"), "in reverse order");
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn restart_rules_match_exit_codes() {
    let node = Node::start("rules");
    let once = |file: &str, code: u8, then: &str| {
        format!("echo run >> /out/{file}; [ $(wc -l < /out/{file}) -gt 1 ] || exit {code}; {then}")
    };
    let rule = |action: &str| json!([{"action": action, "exitCodes": {"operator": "In", "values": [42]}}]);
    // Restarted for its exit code although the pod never restarts.
    let mut manifest =
        pod("rule", json!([busybox("main", &once("rule", 42, FOREVER)), busybox("side", FOREVER)]));
    manifest["spec"]["restartPolicy"] = json!("Never");
    manifest["spec"]["containers"][0]["restartPolicy"] = json!("Never");
    manifest["spec"]["containers"][0]["restartPolicyRules"] = rule("Restart");
    node.apply("rule.json", &node.with_out(manifest));
    // Another exit code: the container's own policy applies.
    let mut manifest =
        pod("norule", json!([busybox("main", &once("norule", 41, FOREVER)), busybox("side", FOREVER)]));
    manifest["spec"]["containers"][0]["restartPolicy"] = json!("Never");
    manifest["spec"]["containers"][0]["restartPolicyRules"] = rule("Restart");
    node.apply("norule.json", &node.with_out(manifest));
    // A rule that restarts all containers.
    let mut manifest = pod(
        "all",
        json!([
            busybox("main", &once("all", 42, FOREVER)),
            busybox("side", &format!("echo run >> /out/allside; {FOREVER}")),
        ]),
    );
    manifest["spec"]["initContainers"] = json!([busybox("setup", "echo run >> /out/allinit")]);
    manifest["spec"]["restartPolicy"] = json!("Never");
    manifest["spec"]["containers"][0]["restartPolicy"] = json!("Never");
    manifest["spec"]["containers"][0]["restartPolicyRules"] = rule("RestartAllContainers");
    node.apply("all.json", &node.with_out(manifest));

    let pod = node.wait_pod("rule", "restarted", LONG, |pod| restarts(pod, "main") == 1 && is_ready(pod));
    assert_eq!(restarts(&pod, "side"), 0);
    let pod = node.wait_pod("norule", "ended but for its side", LONG, |pod| {
        ended(pod, "main").is_some() && container(pod, "side").is_some_and(|status| status.ready)
    });
    assert_eq!(ended(&pod, "main").map(|end| end.exit_code), Some(41));
    assert_eq!(phase(&pod), "Running");
    let lines = |file: &str| node.out(file).lines().count();
    // The first `side` may have been stopped before it could write.
    wait_until("all to run again", LONG, || {
        ["all", "allinit"].iter().all(|file| lines(file) == 2) && (1..=2).contains(&lines("allside"))
    });
    // The status may still be that of the time before the restart.
    let pod = node.wait_pod("all", "ready again", LONG, |pod| is_ready(pod) && restarts(pod, "main") == 1);
    assert_eq!(phase(&pod), "Running");
    assert_eq!(restarts(&pod, "side"), 1);
    assert_eq!(node.running_sandboxes("all").len(), 1);
    node.finish();
}
