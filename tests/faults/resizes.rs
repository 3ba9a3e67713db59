//! Resizes that something comes in the way of: what was granted is on disk before a container
//! has it, nothing is told as done that is not, and a pod that is over waits for nothing.

use coracle::model::api::Pod;
use serde_json::{Value, json};

use crate::support::node::simple;
use crate::support::solo::{LONG, Solo};
use crate::support::wait::wait_until;
use crate::support::web::metric;

/// How many resizes wait for room.
const DEFERRED: &str = "kubelet_pod_pending_resizes{reason=\"deferred\"}";

/// A pod whose requests are its limits.
fn sized(name: &str, cpu: &str) -> Value {
    let mut pod = simple(name);
    pod["metadata"]["generation"] = json!(1);
    pod["spec"]["restartPolicy"] = json!("Never");
    resized(&mut pod, cpu);
    pod
}

fn resized(pod: &mut Value, cpu: &str) {
    let both = json!({"cpu": cpu, "memory": "16Mi"});
    pod["spec"]["containers"][0]["resources"] = json!({"requests": both, "limits": both});
}

fn resize(solo: &Solo, name: &str, cpu: &str, generation: i64) {
    let path = Solo::pod_path(name);
    let mut pod = solo.api().object(&path).expect("it is there");
    resized(&mut pod, cpu);
    pod["metadata"]["generation"] = json!(generation);
    solo.api().put(&path, pod);
}

/// The reason of a condition; `None` without it.
fn condition(pod: &Pod, kind: &str) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let found = conditions.into_iter().find(|one| one.type_ == kind)?;
    Some(found.reason.clone().unwrap_or_default())
}

fn shows(solo: &Solo, name: &str, kind: &str) -> Option<String> {
    condition(&solo.shown(name).expect("it is there"), kind)
}

/// The CPU limit that a state file has for the only pod's container.
fn kept(solo: &Solo, file: &str) -> String {
    let text = std::fs::read_to_string(solo.root().join(file)).unwrap_or_default();
    let outer: Value = serde_json::from_str(&text).unwrap_or_default();
    let inner: Value = serde_json::from_str(outer["data"].as_str().unwrap_or_default()).unwrap_or_default();
    let entry = inner["entries"].as_object().and_then(|entries| entries.values().next());
    let container = entry.and_then(|entry| entry["ContainerResources"].as_object()?.values().next());
    container.map_or(String::new(), |own| own["limits"]["cpu"].as_str().unwrap_or_default().to_owned())
}

fn quota(solo: &Solo, name: &str) -> i64 {
    let containers = solo.containers(name);
    let container = containers.first().expect("it has a container");
    container.status.resources.linux.cpu_quota
}

#[test]
fn an_agent_that_is_killed_in_a_resize_goes_on_with_it() {
    let mut solo = Solo::join(json!({}));
    solo.bind(&sized("web", "100m"));
    solo.assert_runs_once("web", &["main"]);
    let running = solo.running("web");
    let gate = solo.fake.hang_next("UpdateContainerResources");
    resize(&solo, "web", "200m", 2);
    wait_until("the runtime to be told", LONG, || gate.waiting() > 0);
    // The container may have it any moment.
    assert_eq!(
        (kept(&solo, "allocated_pods_state"), kept(&solo, "actuated_pods_state")),
        ("200m".into(), "100m".into())
    );
    wait_until("the resize to be shown", LONG, || shows(&solo, "web", "PodResizeInProgress").is_some());
    solo.kill_agent();
    gate.open();
    solo.start_agent();
    wait_until("the end of the resize", LONG, || shows(&solo, "web", "PodResizeInProgress").is_none());
    assert_eq!((kept(&solo, "actuated_pods_state"), quota(&solo, "web")), ("200m".into(), 20_000));
    assert_eq!(solo.running("web"), running);
    solo.finish();
}

/// The runtime is away, so that nothing can be done yet.
#[test]
fn what_is_told_as_granted_is_granted_after_a_kill() {
    let mut solo = Solo::join(json!({}));
    solo.bind(&sized("web", "100m"));
    solo.assert_runs_once("web", &["main"]);
    solo.fake.set_condition("NetworkReady", false, "Off", "no network");
    wait_until("the node to be unready", LONG, || !solo.node_is_ready());
    resize(&solo, "web", "200m", 2);
    wait_until("the resize to be shown", LONG, || shows(&solo, "web", "PodResizeInProgress").is_some());
    assert_eq!(kept(&solo, "allocated_pods_state"), "200m");
    solo.kill_agent();
    solo.fake.set_condition("NetworkReady", true, "", "");
    solo.start_agent();
    wait_until("the end of the resize", LONG, || shows(&solo, "web", "PodResizeInProgress").is_none());
    assert_eq!((kept(&solo, "actuated_pods_state"), quota(&solo, "web")), ("200m".into(), 20_000));
    solo.finish();
}

#[test]
fn what_the_runtime_refuses_is_not_told_as_done() {
    let solo = Solo::join(json!({}));
    solo.bind(&sized("web", "100m"));
    solo.assert_runs_once("web", &["main"]);
    solo.fake.fail("UpdateContainerResources", coracle::transport::grpc::Kind::Unavailable, "not today");
    resize(&solo, "web", "200m", 2);
    wait_until("the error", LONG, || shows(&solo, "web", "PodResizeInProgress").as_deref() == Some("Error"));
    assert_eq!(kept(&solo, "actuated_pods_state"), "100m");
    solo.fake.behave("UpdateContainerResources");
    wait_until("the end of the resize", LONG, || shows(&solo, "web", "PodResizeInProgress").is_none());
    assert_eq!((kept(&solo, "actuated_pods_state"), quota(&solo, "web")), ("200m".into(), 20_000));
    solo.finish();
}

#[test]
fn a_pod_that_is_over_waits_for_nothing() {
    let solo = Solo::join(json!({}));
    solo.bind(&sized("web", "100m"));
    solo.assert_runs_once("web", &["main"]);
    resize(&solo, "web", "10k", 2);
    wait_until("the wait", LONG, || shows(&solo, "web", "PodResizePending").as_deref() == Some("Deferred"));
    let waiting = || solo.metric(DEFERRED);
    wait_until("the wait to be counted", LONG, || waiting() > 0.0);
    for id in solo.running("web").into_values().flatten() {
        solo.fake.kill_container(&id, 0);
    }
    let over =
        |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Succeeded");
    wait_until("the end", LONG, || over(&solo.shown("web").expect("it is there")));
    wait_until("the end of the wait", LONG, || shows(&solo, "web", "PodResizePending").is_none());
    wait_until("no wait to be counted", LONG, || {
        let (status, page) = solo.read_only("/metrics");
        status == 200 && metric(&page, DEFERRED) < 1.0
    });
    solo.finish();
}
