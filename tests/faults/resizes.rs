//! Interrupted resizes: an allocation is on disk before a container has it, nothing is reported as
//! done that is not, and a finished pod has no pending resize. Static pods with a UID of their own
//! are resized as well, also without an API server.

use coracle::model::api::Pod;
use serde_json::{Value, json};

use crate::SmallDisk;
use crate::support::fake_cri::Gate;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::simple;
use crate::support::wait::wait_until;
use crate::support::web::metric;

/// The metric of deferred resizes.
const DEFERRED: &str = "kubelet_pod_pending_resizes{reason=\"deferred\",priority_bucket=\"normal\"}";

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

fn resize(node: &FakeNode, name: &str, cpu: &str, generation: i64) {
    // A status of the agent that comes in between must not be lost.
    node.api().edit(&FakeNode::pod_path(name), |pod| {
        resized(pod, cpu);
        pod["metadata"]["generation"] = json!(generation);
    });
}

/// The reason of a condition; `None` without it.
fn condition(pod: &Pod, kind: &str) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let found = conditions.into_iter().find(|condition| condition.type_ == kind)?;
    Some(found.reason.clone().unwrap_or_default())
}

fn condition_reason(node: &FakeNode, name: &str, kind: &str) -> Option<String> {
    condition(&node.shown(name).expect("it is there"), kind)
}

/// The CPU limit that a state file has for the only pod's container.
fn saved_limit(node: &FakeNode, file: &str) -> String {
    let text = std::fs::read_to_string(node.root().join(file)).unwrap_or_default();
    let outer: Value = serde_json::from_str(&text).unwrap_or_default();
    let inner: Value = serde_json::from_str(outer["data"].as_str().unwrap_or_default()).unwrap_or_default();
    let entry = inner["entries"].as_object().and_then(|entries| entries.values().next());
    let container = entry.and_then(|entry| entry["ContainerResources"].as_object()?.values().next());
    container.map_or(String::new(), |own| own["limits"]["cpu"].as_str().unwrap_or_default().to_owned())
}

fn quota(node: &FakeNode, name: &str) -> i64 {
    let containers = node.containers(name);
    let container = containers.first().expect("it has a container");
    container.status.resources.linux.cpu_quota
}

/// Begins a resize of the pod `web` from 100m to 200m, up to the call of the runtime, which hangs.
fn begin(node: &FakeNode, request: impl FnOnce()) -> Gate {
    node.assert_runs_once("web", &["main"]);
    wait_until("the resources to be stored", LONG, || {
        (saved_limit(node, "actuated_pods_state"), quota(node, "web")) == ("100m".into(), 10_000)
    });
    let gate = node.fake.hang_next("UpdateContainerResources");
    request();
    wait_until("the call to the runtime", LONG, || gate.waiting() > 0);
    // The container may get it at any moment.
    assert_eq!(saved_limit(node, "actuated_pods_state"), "100m");
    wait_until("the resize to be shown", LONG, || {
        condition_reason(node, "web", "PodResizeInProgress").is_some()
    });
    gate
}

/// Kills the agent during the resize. The next one completes it.
fn complete_after_a_kill(mut node: FakeNode, gate: &Gate) {
    let running = node.running("web");
    node.kill_agent();
    gate.open();
    node.start_agent();
    wait_until("the end of the resize", LONG, || {
        condition_reason(&node, "web", "PodResizeInProgress").is_none()
    });
    assert_eq!((saved_limit(&node, "actuated_pods_state"), quota(&node, "web")), ("200m".into(), 20_000));
    assert_eq!(node.running("web"), running);
    node.finish();
}

#[test]
fn interrupted_resize_continues_after_agent_restart() {
    let node = FakeNode::join(json!({}));
    node.bind(&sized("web", "100m"));
    let gate = begin(&node, || resize(&node, "web", "200m", 2));
    assert_eq!(saved_limit(&node, "allocated_pods_state"), "200m");
    complete_after_a_kill(node, &gate);
}

/// The runtime is away, so that nothing can be done yet.
#[test]
fn reported_allocation_survives_an_agent_kill() {
    let mut node = FakeNode::join(json!({}));
    node.bind(&sized("web", "100m"));
    node.assert_runs_once("web", &["main"]);
    node.fake.set_condition("NetworkReady", false, "Off", "no network");
    wait_until("the node to be unready", LONG, || !node.node_is_ready());
    resize(&node, "web", "200m", 2);
    wait_until("the resize to be shown", LONG, || {
        condition_reason(&node, "web", "PodResizeInProgress").is_some()
    });
    assert_eq!(saved_limit(&node, "allocated_pods_state"), "200m");
    node.kill_agent();
    node.fake.set_condition("NetworkReady", true, "", "");
    node.start_agent();
    wait_until("the end of the resize", LONG, || {
        condition_reason(&node, "web", "PodResizeInProgress").is_none()
    });
    assert_eq!((saved_limit(&node, "actuated_pods_state"), quota(&node, "web")), ("200m".into(), 20_000));
    node.finish();
}

/// The container has no limits of its own, but the pod's.
#[test]
fn interrupted_pod_level_resize_reaches_the_container_after_agent_restart() {
    let node = FakeNode::join(json!({}));
    let whole = |cpu: &str| json!({"limits": {"cpu": cpu, "memory": "16Mi"}});
    let mut pod = simple("web");
    pod["metadata"]["generation"] = json!(1);
    pod["spec"]["resources"] = whole("100m");
    node.bind(&pod);
    let gate = begin(&node, || {
        node.api().edit(&FakeNode::pod_path("web"), |pod| {
            pod["spec"]["resources"] = whole("200m");
            pod["metadata"]["generation"] = json!(2);
        });
    });
    complete_after_a_kill(node, &gate);
}

/// The API server is away when the pressure ends, so that no source delivers anything.
#[test]
fn resize_deferred_for_a_pressure_is_granted_after_its_end_without_an_event_of_a_source() {
    let node = FakeNode::prepare(json!({
        "evictionSoft": {"nodefs.available": "50%"},
        "evictionSoftGracePeriod": {"nodefs.available": "1h"},
        "evictionPressureTransitionPeriod": "1s",
    }));
    let _disk = SmallDisk::mount(&node);
    let node = node.start_joined();
    node.bind(&sized("web", "100m"));
    node.bind(&sized("short", "100m"));
    node.assert_runs_once("web", &["main"]);
    node.wait_ready("short");
    SmallDisk::fill(&node);
    let last = |node: &FakeNode| {
        let log = node.log();
        let line = log.lines().rfind(|line| line.contains("pressure conditions of the node: "));
        line.unwrap_or_default().to_owned()
    };
    wait_until("the pressure", LONG, || last(&node).contains("DiskPressure"));
    resize(&node, "web", "200m", 2);
    wait_until("the wait", LONG, || {
        condition_reason(&node, "web", "PodResizePending").as_deref() == Some("Deferred")
    });
    node.api().go_down();
    SmallDisk::clear(&node);
    wait_until("the end of the pressure", LONG, || last(&node).ends_with("none"));
    // The end of a pod makes the agent decide again.
    for id in node.running("short").into_values().flatten() {
        node.fake.kill_container(&id, 0);
    }
    wait_until("the resize", LONG, || quota(&node, "web") == 20_000);
    node.api().go_up();
    node.finish();
}

#[test]
fn resize_refused_by_the_runtime_is_not_reported_as_done() {
    let node = FakeNode::join(json!({}));
    node.bind(&sized("web", "100m"));
    node.assert_runs_once("web", &["main"]);
    node.fake.fail("UpdateContainerResources", coracle::transport::grpc::Kind::Unavailable, "not today");
    resize(&node, "web", "200m", 2);
    wait_until("the error", LONG, || {
        condition_reason(&node, "web", "PodResizeInProgress").as_deref() == Some("Error")
    });
    assert_eq!(saved_limit(&node, "actuated_pods_state"), "100m");
    node.fake.behave("UpdateContainerResources");
    wait_until("the end of the resize", LONG, || {
        condition_reason(&node, "web", "PodResizeInProgress").is_none()
    });
    assert_eq!((saved_limit(&node, "actuated_pods_state"), quota(&node, "web")), ("200m".into(), 20_000));
    node.finish();
}

#[test]
fn finished_pod_has_no_pending_resize() {
    let node = FakeNode::join(json!({}));
    node.bind(&sized("web", "100m"));
    node.assert_runs_once("web", &["main"]);
    resize(&node, "web", "10k", 2);
    wait_until("the wait", LONG, || {
        condition_reason(&node, "web", "PodResizePending").as_deref() == Some("Deferred")
    });
    let waiting = || node.metric(DEFERRED);
    wait_until("the deferred resize to be counted", LONG, || waiting() > 0.0);
    for id in node.running("web").into_values().flatten() {
        node.fake.kill_container(&id, 0);
    }
    let over =
        |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Succeeded");
    wait_until("the end", LONG, || over(&node.shown("web").expect("it is there")));
    wait_until("the end of the wait", LONG, || condition_reason(&node, "web", "PodResizePending").is_none());
    wait_until("no deferred resize to be counted", LONG, || {
        let (status, page) = node.read_only("/metrics");
        status == 200 && metric(&page, DEFERRED) < 1.0
    });
    node.finish();
}

/// The manifest of a static pod that keeps its UID.
fn with_uid(cpu: &str) -> Value {
    let mut pod = sized("web", cpu);
    pod["metadata"]["uid"] = json!("6f7d7d3e-0c5b-4a7e-9f49-3b1d7a52a001");
    pod
}

#[test]
fn edited_static_pod_is_resized_without_an_api_server() {
    let mut node = FakeNode::start();
    node.apply(&with_uid("100m"));
    node.assert_runs_once("web", &["main"]);
    let running = node.running("web");
    let both = |node: &FakeNode| {
        (saved_limit(node, "allocated_pods_state"), saved_limit(node, "actuated_pods_state"))
    };
    let is_resized = |node: &FakeNode, cpu: &str, microseconds: i64| {
        both(node) == (cpu.into(), cpu.into()) && quota(node, "web") == microseconds
    };
    wait_until("the resources to be stored", LONG, || is_resized(&node, "100m", 10_000));
    node.apply(&with_uid("200m"));
    wait_until("the resize", LONG, || is_resized(&node, "200m", 20_000));

    // The manifest changes while the agent is stopped, and the resize is interrupted.
    node.kill_agent();
    node.apply(&with_uid("300m"));
    let gate = node.fake.hang_next("UpdateContainerResources");
    node.start_agent();
    wait_until("the call to the runtime", LONG, || gate.waiting() > 0);
    assert_eq!(both(&node), ("300m".into(), "200m".into()));
    node.kill_agent();
    gate.open();
    node.start_agent();
    wait_until("the end of the resize", LONG, || is_resized(&node, "300m", 30_000));
    assert_eq!(node.running("web"), running, "nothing was restarted");
    node.finish();
}
