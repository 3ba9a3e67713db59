//! Probes: their requests, their periods, and the effects of their results.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::node::{
    FOREVER, LONG, Node, STAMP, busybox, container, ended_before, is_ready, pod, restarts, simple,
};
use crate::support::node_inspection::moment;
use crate::support::wait::{holds_for, pause, wait_until};
use crate::support::web::{FixedServer, Reply};

fn probed(name: &str, probes: &[(&str, Value)]) -> Value {
    let mut manifest = simple(name);
    for (kind, probe) in probes {
        manifest["spec"]["containers"][0][*kind] = probe.clone();
    }
    manifest
}

/// On a busy machine a check can take longer than the second that it has by default, and would
/// fail.
const PATIENCE: u64 = 60;

fn exec(script: &str) -> Value {
    json!({"exec": {"command": ["sh", "-c", script]}, "periodSeconds": 1, "timeoutSeconds": PATIENCE})
}

fn get(port: u16, path: &str) -> Value {
    let action = json!({"host": "127.0.0.1", "port": port, "path": path});
    json!({"httpGet": action, "periodSeconds": 1, "timeoutSeconds": PATIENCE})
}

// Runtimes: containerd 2.
#[test]
fn first_readiness_probe_runs_at_container_start() {
    let node = Node::start("started");
    let mut readiness = exec("echo asked >> /out/readiness");
    // A first probe at a random moment of its period would be too late with near certainty.
    readiness["periodSeconds"] = json!(36_000);
    let mut startup = exec("test -f /out/started");
    // Not restarted while the test checks it.
    startup["failureThreshold"] = json!(600);
    let manifest = probed("web", &[("startupProbe", startup), ("readinessProbe", readiness)]);
    node.apply("web.json", &node.with_out(manifest));
    node.wait_pod("web", "running", LONG, |pod| {
        container(pod, "main")
            .is_some_and(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
    });
    node.wait_event("web", "Unhealthy", "Startup probe failed: ");
    let waiting = node.pod("web").expect("the pod is listed");
    assert_eq!(
        container(&waiting, "main").map(|status| (status.started, status.ready)),
        Some((Some(false), false))
    );
    assert_eq!(node.out("readiness"), "", "readiness waits for the start");
    node.touch("started");
    // Long before its period is over.
    let ready = node.wait_ready("web");
    assert_eq!(container(&ready, "main").and_then(|status| status.started), Some(true));
    node.finish();
}

// Runtimes: containerd 2, CRI-O.
#[test]
fn container_with_failing_startup_probe_is_restarted() {
    let node = Node::start("startup");
    let mut startup = exec("echo asked >> /out/startup; exit 1");
    startup["failureThreshold"] = json!(3);
    let manifest =
        probed("web", &[("startupProbe", startup), ("livenessProbe", exec("echo asked >> /out/liveness"))]);
    node.apply("web.json", &node.with_out(manifest));
    node.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "main") >= 1);
    let killing = node.wait_event("web", "Killing", "failed startup probe");
    assert_eq!(killing.message, "Container main failed startup probe, will be restarted");
    assert_eq!(killing.field, "spec.containers{main}");
    let unhealthy = node.events_with_reason("web", "Unhealthy");
    // A busy runtime may answer a check with an error, which proves nothing about the container.
    let begins = ["Startup probe failed", "Startup probe errored and resulted in "];
    assert!(
        unhealthy.iter().all(|event| {
            event.kind == "Warning" && begins.iter().any(|words| event.message.starts_with(words))
        }),
        "{unhealthy:#?}"
    );
    let failed = unhealthy.iter().filter(|event| event.message.starts_with(begins[0]));
    assert!(
        failed.map(|event| event.count).sum::<u64>() >= 3,
        "each failed round is reported: {unhealthy:#?}"
    );
    assert_eq!(node.out("liveness"), "", "liveness waits for the start");
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn http_probes_send_expected_requests_and_follow_redirects() {
    let web = FixedServer::start();
    let node = Node::start("http");
    web.set("/away", Reply::text(302, "over there").with("Location", "http://192.0.2.99:1/elsewhere"));
    web.set("/here", Reply::text(302, "").with("Location", "/there"));
    web.set("/there", Reply::text(200, "there"));
    web.set("/broken", Reply::text(500, "no"));
    for (name, path) in [("away", "/away"), ("here", "/here"), ("broken", "/broken")] {
        node.apply(&format!("{name}.json"), &probed(name, &[("readinessProbe", get(web.port, path))]));
    }
    let mut own = probed("own", &[("readinessProbe", get(web.port, "/own"))]);
    own["spec"]["containers"][0]["readinessProbe"]["httpGet"]["httpHeaders"] =
        json!([{"name": "Host", "value": "inside.example"}, {"name": "User-Agent", "value": "mine"}]);
    web.set("/own", Reply::text(204, ""));
    node.apply("own.json", &own);
    // A port by its name, on the pod's own address.
    let mut named = pod(
        "named",
        json!([busybox("main", "mkdir /tmp/w; echo up > /tmp/w/ok; exec httpd -f -p 8000 -h /tmp/w")]),
    );
    named["spec"]["containers"][0]["ports"] = json!([{"name": "web", "containerPort": 8000}]);
    named["spec"]["containers"][0]["readinessProbe"] =
        json!({"httpGet": {"port": "web", "path": "/ok"}, "periodSeconds": 1, "timeoutSeconds": PATIENCE});
    // The program may need a while until it listens.
    named["spec"]["containers"][0]["livenessProbe"] = json!({"tcpSocket": {"port": 8000},
        "periodSeconds": 1, "timeoutSeconds": PATIENCE, "failureThreshold": 60});
    node.apply("named.json", &named);

    node.wait_ready("away");
    let warning = node.wait_event("away", "ProbeWarning", "Probe terminated redirects");
    assert!(
        warning.kind == "Warning" && warning.message.starts_with("Readiness probe warning: "),
        "{}",
        warning.message
    );
    let request = web.received("/away")[0].clone();
    assert_eq!(request.method, "GET");
    assert_eq!(request.header("User-Agent").as_deref(), Some("kube-probe/1.37"));
    assert_eq!(request.header("Accept").as_deref(), Some("*/*"));
    assert_eq!(request.header("Accept-Encoding"), None);

    node.wait_ready("here");
    assert!(!web.received("/there").is_empty(), "a redirect to the same host is followed");
    node.wait_ready("own");
    let request = web.received("/own")[0].clone();
    assert_eq!(request.header("Host").as_deref(), Some("inside.example"));
    assert_eq!(request.header("User-Agent").as_deref(), Some("mine"));
    node.wait_ready("named");

    let event = node.wait_event("broken", "Unhealthy", "Readiness probe failed: ");
    assert_eq!(event.message, "Readiness probe failed: HTTP probe failed with statuscode: 500");
    let broken = node.pod("broken").expect("the pod is listed");
    assert!(!is_ready(&broken) && restarts(&broken, "main") == 0, "readiness restarts nothing");
    web.set("/broken", Reply::text(200, "yes"));
    node.wait_ready("broken");
    web.set("/broken", Reply::text(500, "no"));
    node.wait_pod("broken", "not ready again", LONG, |pod| !is_ready(pod));
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn probe_that_cannot_run_changes_no_result() {
    let node = Node::start("proberr");
    let script = format!("printf '#!/bin/sh\\nexit 0\\n' > /tmp/check; chmod 755 /tmp/check; {FOREVER}");
    let mut manifest = pod("web", json!([busybox("main", &script)]));
    manifest["spec"]["containers"][0]["readinessProbe"] = json!({"exec": {"command": ["/tmp/check"]},
        "periodSeconds": 1, "timeoutSeconds": PATIENCE, "failureThreshold": 1});
    node.apply("web.json", &manifest);
    let ready = node.wait_ready("web");
    node.exec(&crate::support::node::container_id(&ready, "main"), &["rm", "/tmp/check"]);
    let event = node.wait_event("web", "Unhealthy", "Readiness probe errored and resulted in unknown state");
    assert_eq!(event.kind, "Warning");
    holds_for("the pod stays ready", Duration::from_secs(3), || {
        node.pod("web").is_some_and(|pod| is_ready(&pod))
    });
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn probe_grace_period_applies_to_probe_kills_only() {
    let node = Node::start("probegrace");
    let script = format!(
        "trap '{STAMP} >> /out/terms' TERM; {STAMP} >> /out/starts; while :; do {STAMP} >> /out/beat; sleep 0.1; done"
    );
    let mut manifest = pod("web", json!([busybox("main", &script)]));
    // So different from the grace period of the probe that a slow machine does not confuse them.
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(25);
    // It fails once: the next instance is healthy, however late the test checks it.
    let mut liveness = exec("! rm /out/sick 2>/dev/null");
    liveness["failureThreshold"] = json!(1);
    liveness["terminationGracePeriodSeconds"] = json!(1);
    manifest["spec"]["containers"][0]["livenessProbe"] = liveness;
    node.apply("web.json", &node.with_out(manifest));
    node.wait_stamp("starts");
    let sick = moment();
    node.touch("sick");
    wait_until("the container to receive SIGTERM", LONG, || !node.stamps("terms").is_empty());
    let again = node.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "main") == 1 && is_ready(pod));
    assert_eq!(ended_before(&again, "main").map(|end| end.exit_code), Some(137));
    // The container becomes ready before the first line of the script runs.
    wait_until("the second start", LONG, || node.stamps("starts").len() >= 2);
    let (first, again) = (node.stamps("terms")[0], node.stamps("starts")[1]);
    assert!(again - sick >= 1.9, "it was given 2 s: started again {} s after its failure", again - sick);
    // By its last sign of life: on a busy machine the next start takes longer than the end.
    let killed = node.stamps("beat").into_iter().filter(|beat| *beat < again).fold(first, f64::max);
    assert!(killed - first < 20.0, "killed {} s after the signal", killed - first);
    let killing = node.wait_event("web", "Killing", "");
    assert_eq!(killing.message, "Container main failed liveness probe, will be restarted");

    let (signals, removed) = (node.stamps("terms").len(), moment());
    node.remove("web.json");
    wait_until("the container to receive SIGTERM", LONG, || node.stamps("terms").len() > signals);
    node.wait_gone("web");
    let (gone, last) = (moment() - removed, node.last_stamp("beat") - removed);
    assert!(gone >= 24.9 && last < 60.0, "with the pod's own grace it lived {last} s, gone after {gone} s");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn agent_restart_keeps_ready_containers_ready() {
    let mut node = Node::start("keepready");
    let manifest = probed(
        "web",
        &[
            ("readinessProbe", exec("echo asked >> /out/readiness")),
            ("startupProbe", exec("true")),
            ("livenessProbe", exec("echo asked >> /out/liveness")),
        ],
    );
    node.apply("web.json", &node.with_out(manifest));
    node.wait_ready("web");
    // A container that started less than ten seconds before the agent is probed like a new one: the
    // age is the input.
    pause(Duration::from_secs(11));
    node.stop_agent();
    let probes = node.out("readiness").lines().count();
    node.start_agent();
    // It is listed before its first inspection.
    node.wait_pod("web", "inspected", LONG, |pod| container(pod, "main").is_some());
    holds_for("the pod is ready from the first moment on", Duration::from_secs(3), || {
        node.pod("web").is_some_and(|pod| is_ready(&pod) && restarts(&pod, "main") == 0)
    });
    wait_until("the probes to go on", LONG, || node.out("readiness").lines().count() > probes);
    node.finish();
}
