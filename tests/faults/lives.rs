//! Pods that end before they have started, and pods that come back before they have ended.

use std::fs;

use coracle::model::api::Pod;
use serde_json::{Value, json};

use crate::support::fake_api::{Fault, FaultResponse};
use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::node::{busybox, phase, pod, simple};
use crate::support::wait::{wait_for, wait_until};

fn reason(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.reason.as_deref()).unwrap_or_default()
}

fn uid(node: &FakeNode, name: &str) -> String {
    // No response of a busy agent is not a pod without a UID.
    wait_for("the pod's UID", LONG, || node.pod(name)?.metadata.uid)
}

/// A pod whose container runs until its long grace period is over.
fn stubborn(name: &str, version: &str) -> Value {
    let mut main = busybox("main", "stubborn");
    main["env"] = json!([{"name": "VERSION", "value": version}]);
    let mut pod = pod(name, json!([main]));
    pod["spec"]["terminationGracePeriodSeconds"] = json!(600);
    pod
}

/// Waits until the pod has failed at the API server because it was preempted.
fn wait_preempted(node: &FakeNode, name: &str) {
    wait_until(&format!("the failure of pod {name}"), LONG, || {
        node.shown(name).is_some_and(|pod| phase(&pod) == "Failed" && reason(&pod) == "Preempting")
    });
}

/// Whether the runtime got a request of this kind that names the pod.
fn was_requested(node: &FakeNode, method: &str, text: &str) -> bool {
    let journal = node.fake.journal();
    journal.iter().any(|entry| entry.method == method && entry.request.to_string().contains(text))
}

/// A node with room for one pod. Its agent lists all pods once a second.
fn node_for_one() -> FakeNode {
    FakeNode::join(json!({"maxPods": 1, "featureGates": {"EventedPLEG": false}}))
}

/// Waits until a pod has no sandbox, container or log any more. By the agent's own clock, that takes less
/// than a minute.
fn wait_removed(node: &FakeNode, name: &str) {
    let seconds = || node.metric("kubelet_pleg_relist_duration_seconds_count");
    let has_logs = || {
        let logs = fs::read_dir(node.path("logs")).expect("it is there");
        logs.flatten().any(|dir| dir.file_name().to_string_lossy().contains(&full_name(name)))
    };
    let begin = seconds();
    wait_until(&format!("pod {name} to leave nothing"), LONG, || {
        node.sandboxes(name).is_empty() && node.containers(name).is_empty() && !has_logs()
    });
    let took = seconds() - begin;
    assert!(took < 60.0, "{took}");
}

#[test]
fn pod_preempted_during_its_first_pull_fails_and_leaves_nothing() {
    let node = node_for_one();
    let mut web = simple("web");
    web["spec"]["containers"][0]["image"] = json!("registry.test/endless:1");
    node.bind(&web);
    wait_until("the pull", LONG, || was_requested(&node, "PullImage", "endless"));
    node.apply(&simple("critical"));
    wait_preempted(&node, "web");
    wait_removed(&node, "web");
    node.wait_ready("critical");
    node.fake.release_endless();
    node.assert_runs_once("critical", &["main"]);
    assert!(!was_requested(&node, "CreateContainer", &full_name("web")), "{:?}", node.fake.calls());
    node.finish();
}

/// As for the Go kubelet, the exit codes decide about the phase, and the condition shows what happened.
#[test]
fn preempted_pod_whose_container_exits_with_zero_succeeds_and_leaves_nothing() {
    let node = node_for_one();
    node.bind(&simple("web"));
    node.wait_ready("web");
    node.apply(&simple("critical"));
    wait_until("the end of the pod", LONG, || {
        node.shown("web").is_some_and(|pod| ["Failed", "Succeeded"].contains(&phase(&pod)))
    });
    let ended = node.shown("web").expect("it was not deleted").status.expect("a status");
    assert_eq!((ended.phase.as_deref(), ended.reason, ended.message), (Some("Succeeded"), None, None));
    let conditions = ended.conditions.unwrap_or_default();
    let disrupted = conditions.iter().find(|condition| condition.type_ == "DisruptionTarget");
    assert_eq!(disrupted.map(|condition| condition.status.as_str()), Some("True"), "{conditions:?}");
    wait_removed(&node, "web");
    node.assert_runs_once("critical", &["main"]);
    assert!(node.running("web").is_empty());
    node.finish();
}

/// It waits for the end of a pod that was preempted for it.
#[test]
fn pod_preempted_before_it_had_a_worker_fails_and_never_starts() {
    let node = node_for_one();
    let critical = |name: &str, priority: i64| {
        let mut pod = simple(name);
        pod["spec"]["priority"] = json!(priority);
        pod
    };
    node.bind(&stubborn("first", "1"));
    wait_until("the first pod to run", LONG, || !node.running("first").is_empty());
    node.apply(&critical("second", 2_000_000_000));
    wait_until("the end of the first pod to begin", LONG, || node.fake.count("StopContainer") > 0);
    node.apply(&critical("third", 2_000_001_000));
    wait_preempted(&node, "second");
    assert!(node.sandboxes("third").is_empty(), "the first pod has not ended");
    node.fake.release_endless();
    wait_removed(&node, "first");
    node.assert_runs_once("third", &["main"]);
    wait_preempted(&node, "first");
    assert!(!was_requested(&node, "RunPodSandbox", &full_name("second")), "{:?}", node.fake.calls());
    node.finish();
}

/// The victim's manifest is edited back while it stops, and now there is room for both.
#[test]
fn critical_pod_starts_when_its_victim_has_ended_and_not_when_that_ends_again() {
    let node = FakeNode::start_with(json!({"maxPods": 2}));
    let ranked = |mut pod: Value, priority: i64| {
        pod["spec"]["priority"] = json!(priority);
        pod
    };
    let victim = |version: &str| ranked(stubborn("victim", version), 1);
    node.apply(&victim("1"));
    node.apply(&ranked(simple("other"), 2_000_002_000));
    node.wait_ready("victim");
    node.wait_ready("other");
    let (first, before) = (uid(&node, "victim"), node.running("victim"));
    node.apply(&ranked(simple("critical"), 2_000_001_000));
    wait_until("the end of the victim to begin", LONG, || node.fake.count("StopContainer") > 0);
    node.remove("other");
    node.wait_gone("other", LONG);
    let uids = || -> Vec<String> {
        let pods = node.try_pods().unwrap_or_default().into_iter();
        let victims = pods.filter(|pod| pod.metadata.name == Some(full_name("victim")));
        victims.filter_map(|pod| pod.metadata.uid).collect()
    };
    node.apply(&victim("2"));
    wait_until("the second version", LONG, || uids().iter().any(|uid| *uid != first));
    node.apply(&victim("1"));
    wait_until("the first version again", LONG, || uids() == [first.clone()]);
    assert_eq!(node.running("victim"), before, "its end takes long");
    node.fake.release_endless();
    node.assert_runs_once("critical", &["main"]);
    wait_until("the new incarnation", LONG, || {
        let now = node.running("victim");
        !now.is_empty() && now != before
    });
    node.finish();
}

#[test]
fn static_pod_edited_back_while_it_stops_gets_a_new_incarnation() {
    let node = FakeNode::start();
    node.apply(&stubborn("web", "1"));
    node.wait_ready("web");
    let (first, before) = (uid(&node, "web"), node.running("web"));
    let uids = || -> Vec<String> {
        let pods = node.try_pods().unwrap_or_default();
        pods.into_iter().filter_map(|pod| pod.metadata.uid).collect()
    };
    node.apply(&stubborn("web", "2"));
    wait_until("the second version", LONG, || uids().iter().any(|uid| *uid != first));
    wait_until("the end of the first one to begin", LONG, || node.fake.count("StopContainer") > 0);
    node.apply(&stubborn("web", "1"));
    wait_until("the first version again", LONG, || uids() == [first.clone()]);
    assert_eq!(node.running("web"), before, "its end takes long");
    node.fake.release_endless();
    wait_until("the new incarnation", LONG, || {
        let now = node.running("web");
        !now.is_empty() && now != before
    });
    node.assert_runs_once("web", &["main"]);
    assert_eq!(uid(&node, "web"), first);
    assert!(!was_requested(&node, "CreateContainer", "\"value\":\"2\""), "{:?}", node.fake.calls());
    node.finish();
}

/// A client removed the pod's object with force, and made it again with the UID that it had: from a
/// backup, for example. As for the Go kubelet, a UID has one life: its end is the end of the new
/// object, too, and a controller replaces the pod.
#[test]
fn pod_of_the_api_that_comes_back_with_its_uid_while_it_stops_fails() {
    let node = FakeNode::join(json!({}));
    let round = |number: &str| {
        let mut pod = stubborn("web", "1");
        pod["metadata"]["uid"] = json!("33333333-0000-4000-8000-000000000001");
        pod["metadata"]["annotations"] = json!({"round": number});
        pod
    };
    node.bind(&round("1"));
    node.wait_ready("web");
    let before = node.running("web");
    node.api().delete_pod_within(&FakeNode::pod_path("web"), 0);
    wait_until("the end to begin", LONG, || node.fake.count("StopContainer") > 0);
    node.bind(&round("2"));
    let is_second = |pod: &Pod| {
        let annotations = pod.metadata.annotations.as_ref();
        annotations.and_then(|all| all.get("round")).is_some_and(|round| round == "2")
    };
    wait_until("the new object to be read", LONG, || node.pod("web").as_ref().is_some_and(is_second));
    assert_eq!(node.running("web"), before, "its end takes long");
    // The agent does not rely on the API server, which gets the end later.
    node.api().fault(Fault::always(
        "PATCH",
        "/status",
        FaultResponse::Status(503, "ServiceUnavailable", None),
    ));
    node.fake.release_endless();
    wait_until("the end", LONG, || node.running("web").is_empty());
    // A later pod starts, so this one would have started, too.
    node.bind(&simple("other"));
    node.assert_runs_once("other", &["main"]);
    assert!(node.running("web").is_empty());
    assert_eq!(node.fake.count("RunPodSandbox"), 2, "{:?}", node.fake.calls());
    node.api().clear_faults();
    let has_failed = |pod: &Pod| is_second(pod) && phase(pod) == "Failed";
    wait_until("the status", LONG, || node.shown("web").as_ref().is_some_and(has_failed));
    node.finish();
}
