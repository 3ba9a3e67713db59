//! External changes of pods and of the runtime.

use std::time::Duration;

use coracle::transport::generated::{MessageField, runtime as rt};
use serde_json::json;

use crate::support::fake_cri::BUSYBOX;
use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::node::{FOREVER, busybox, container, is_ready, pod, restarts, simple};
use crate::support::wait::{holds_for, wait_for, wait_until};
use crate::{BOTH, two};

#[test]
fn agent_reconnects_to_a_restarted_runtime() {
    let node = FakeNode::start();
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    let before = (node.running("web"), node.ready_sandboxes("web"));
    for round in 0..3 {
        node.fake.restart();
        let name = format!("later{round}");
        node.apply(&simple(&name));
        node.assert_runs_once(&name, &["main"]);
        assert_eq!((node.running("web"), node.ready_sandboxes("web")), before);
    }
    assert_eq!(restarts(&node.wait_ready("web"), "one"), 0);
    node.finish();
}

#[test]
fn pods_survive_a_runtime_outage() {
    let mut node = FakeNode::start();
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    let before = node.running("web");
    node.fake.go_down();
    wait_until("the agent to notice", LONG, || node.health("/healthz").0 == 500);
    node.assert_responsive();
    let status = node.cli(&["status"]);
    assert!(status.contains("runtime"), "{status}");
    node.apply(&two("new"));
    wait_until("the new pod to be listed", LONG, || node.pod("new").is_some());
    // The last known status of a pod stays. No response from the agent proves nothing yet.
    let (full, pods) = (full_name("web"), wait_for("/pods", LONG, || node.try_pods()));
    let web = pods.iter().find(|pod| pod.metadata.name.as_deref() == Some(&full));
    assert!(web.is_some_and(is_ready));
    node.fake.go_up();
    node.assert_runs_once("new", &BOTH);
    assert_eq!(node.running("web"), before);
    node.wait_healthy();
    node.finish();
}

#[test]
fn pods_start_when_the_runtime_starts_after_the_agent() {
    let mut node = FakeNode::prepare(json!({}));
    node.fake.go_down();
    node.apply(&two("web"));
    node.launch_agent();
    node.assert_responsive();
    wait_until("the pod to be listed", LONG, || node.pod("web").is_some());
    node.fake.go_up();
    node.assert_runs_once("web", &BOTH);
    node.wait_healthy();
    node.finish();
}

#[test]
fn pods_wait_until_the_runtime_is_ready() {
    let mut node = FakeNode::start();
    for condition in ["RuntimeReady", "NetworkReady"] {
        node.fake.set_condition(condition, false, "Broken", "cable is out");
        wait_until("the agent to notice", LONG, || node.cli(&["status"]).contains("cable is out"));
        node.apply(&two("web"));
        wait_until("the pod to be listed", LONG, || node.pod("web").is_some());
        holds_for("nothing is started", Duration::from_secs(2), || node.sandboxes("web").is_empty());
        node.fake.set_condition(condition, true, "", "");
        node.assert_runs_once("web", &BOTH);
        node.remove("web");
        node.wait_gone("web", LONG);
        // Records of ended containers are removed a little later.
        wait_until("nothing of the pod to be left", LONG, || node.sandboxes("web").is_empty());
    }
    node.wait_healthy();
    node.finish();
}

#[test]
fn pod_removed_during_its_pull_ends_at_once() {
    let node = FakeNode::start();
    let gate = node.fake.hang("PullImage");
    node.apply(&two("web"));
    wait_until("the pull to hang", LONG, || gate.waiting() > 0);
    node.remove("web");
    node.wait_gone("web", LONG);
    assert_eq!(gate.waiting(), 1, "the pull is still under way");
    node.fake.behave("PullImage");
    node.finish();
}

#[test]
fn dead_sandbox_is_replaced() {
    let node = FakeNode::start();
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    for attempt in 1..3 {
        let old = node.ready_sandboxes("web");
        let ids: Vec<_> = node.running("web").into_values().collect();
        assert!(node.fake.kill_sandbox(&old[0]));
        wait_until("a new sandbox", LONG, || {
            let new = node.ready_sandboxes("web");
            new.len() == 1 && new != old
        });
        node.assert_runs_once("web", &BOTH);
        let sandbox = node.sandboxes("web").pop().unwrap();
        assert_eq!(sandbox.config.metadata.attempt, attempt);
        assert!(node.running("web").into_values().all(|id| !ids.contains(&id)));
    }
    node.finish();
}

#[test]
fn dead_container_restarts_without_its_neighbors() {
    let node = FakeNode::start_with(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    for count in 1..4 {
        let before = node.running("web");
        assert!(node.fake.kill_container(&before["one"][0], 3));
        let pod =
            node.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "one") == count && is_ready(pod));
        let last = container(&pod, "one").unwrap().last_state.clone().unwrap().terminated.unwrap();
        assert_eq!(last.exit_code, 3);
        assert_eq!(restarts(&pod, "two"), 0);
        node.assert_runs_once("web", &BOTH);
        let after = node.running("web");
        assert_ne!(after["one"], before["one"]);
        assert_eq!(after["two"], before["two"]);
    }
    node.finish();
}

#[test]
fn pod_that_vanishes_from_the_runtime_is_recreated() {
    let node = FakeNode::start();
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    node.fake.with_state(|state| {
        state.containers.clear();
        state.sandboxes.clear();
    });
    node.assert_runs_once("web", &BOTH);
    node.finish();
}

#[test]
fn manifest_rewritten_during_a_hanging_stop_restarts_its_pod() {
    let node = FakeNode::start();
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    let before = node.running("web");
    let gate = node.fake.hang("StopContainer");
    node.remove("web");
    wait_until("both stops to hang", LONG, || gate.waiting() == 2);
    node.assert_responsive();
    node.apply(&simple("other"));
    node.assert_runs_once("other", &["main"]);
    node.apply(&two("web"));
    // The old instance must end first, though the pod is wanted again.
    holds_for("nothing new starts", Duration::from_secs(2), || {
        node.assert_no_duplicates();
        node.running("web") == before
    });
    node.fake.behave("StopContainer");
    wait_until("new containers", LONG, || {
        let now = node.running("web");
        now.len() == 2 && now.iter().all(|(name, ids)| before.get(name) != Some(ids))
    });
    node.assert_runs_once("web", &BOTH);
    node.finish();
}

/// A call that the runtime executes after its deadline.
#[test]
fn calls_completed_after_their_deadline_create_no_duplicate() {
    let cases = ["RunPodSandbox", "CreateContainer", "StartContainer", "StopContainer"];
    crate::in_parallel(&cases, |method| {
        let node = FakeNode::start_with(json!({"runtimeRequestTimeout": "2s"}));
        if *method == "StopContainer" {
            node.apply(&simple("web"));
            node.assert_runs_once("web", &["main"]);
            let gate = node.fake.hang_next(method);
            node.remove("web");
            wait_until("the call to hang", LONG, || gate.waiting() > 0);
            // The end of the sandbox is the end of its containers, too.
            node.wait_gone("web", LONG);
            gate.open();
        } else {
            let (gate, calls) = (node.fake.hang_next(method), node.fake.count(method));
            node.apply(&simple("web"));
            wait_until("the call to hang", LONG, || gate.waiting() > 0);
            // Counted from the beginning: it may have been made again by now.
            wait_until("the call to be made again", LONG, || {
                node.assert_responsive();
                node.fake.count(method) > calls + 1
            });
            gate.open();
            node.assert_runs_once("web", &["main"]);
        }
        node.finish();
    });
}

#[test]
fn containers_of_other_clients_are_not_touched() {
    let mut node = FakeNode::prepare(json!({}));
    let (sandbox, container) = foreign(&node);
    node.start_agent();
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    let dead = node.running("web")["two"][0].clone();
    node.fake.kill_container(&dead, 1);
    node.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "two") == 1 && is_ready(pod));
    node.remove("web");
    node.wait_gone("web", LONG);
    wait_until("the pod's records to be removed", LONG, || node.containers("web").is_empty());
    let journal = serde_json::to_string(
        &node.fake.journal().into_iter().map(|entry| entry.request).collect::<Vec<_>>(),
    )
    .unwrap();
    for id in [&sandbox, &container] {
        assert!(!journal.contains(id.as_str()), "a call about what is not ours: {journal}");
    }
    assert!(node.fake.containers().iter().any(|other| other.status.id == container && other.is_running()));
    // Nothing of the agent is left; the foreign pod is removed now, for the final check.
    node.fake.with_state(|state| {
        state.containers.remove(&container);
        state.sandboxes.remove(&sandbox);
    });
    node.finish();
}

/// A sandbox and a running container without any of our labels.
fn foreign(node: &FakeNode) -> (String, String) {
    node.fake.with_state(|state| {
        let config = rt::PodSandboxConfig {
            metadata: MessageField::some(rt::PodSandboxMetadata {
                name: "theirs".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let request =
            rt::RunPodSandboxRequest { config: MessageField::some(config.clone()), ..Default::default() };
        let sandbox = state.run_pod_sandbox(request).unwrap().pod_sandbox_id;
        let request = rt::CreateContainerRequest {
            pod_sandbox_id: sandbox.clone(),
            config: MessageField::some(rt::ContainerConfig {
                metadata: MessageField::some(rt::ContainerMetadata {
                    name: "c".to_owned(),
                    ..Default::default()
                }),
                image: MessageField::some(rt::ImageSpec { image: BUSYBOX.to_owned(), ..Default::default() }),
                command: vec!["run".to_owned()],
                ..Default::default()
            }),
            sandbox_config: MessageField::some(config),
            ..Default::default()
        };
        let container = state.create_container(request).unwrap().container_id;
        let request = rt::StartContainerRequest { container_id: container.clone(), ..Default::default() };
        state.start_container(request).unwrap();
        (sandbox, container)
    })
}

/// A pod that keeps failing causes no more starts than its back-off allows.
#[test]
fn crashing_pod_backs_off_and_leaves_one_record() {
    let node = FakeNode::start_with(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    node.apply(&pod("bad", json!([busybox("main", "exit 7"), busybox("good", FOREVER)])));
    let pod = node.wait_pod("bad", "restarted four times", LONG, |pod| restarts(pod, "main") >= 4);
    assert_eq!(restarts(&pod, "good"), 0);
    let dead = wait_for("all but the newest dead containers to be removed", LONG, || {
        let dead = node.containers("bad").into_iter().filter(|container| !container.is_running()).count();
        (dead <= 2).then_some(dead)
    });
    assert!(dead >= 1);
    node.finish();
}

/// An event that cannot be decoded: the stream is opened again, and no change is lost.
#[test]
fn undecodable_runtime_events_reopen_the_stream() {
    let node = FakeNode::start();
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    for count in 1..3 {
        wait_until("the stream to be open", LONG, || node.fake.listeners() == 1);
        let opened = node.fake.count("GetContainerEvents");
        node.fake.with_state(|state| {
            let mut garbage = rt::ContainerEventResponse::default();
            // The container's id is a string, but its bytes are not UTF-8.
            garbage.special_fields.mut_unknown_fields().add_length_delimited(1, vec![0xff, 0xfe, 0x80]);
            state.unsent_events.push(garbage);
        });
        let victim = node.running("web")["two"][0].clone();
        assert!(node.fake.kill_container(&victim, 3));
        node.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "two") == count && is_ready(pod));
        wait_until("another stream", LONG, || node.fake.count("GetContainerEvents") > opened);
        node.assert_runs_once("web", &BOTH);
    }
    node.finish();
}
