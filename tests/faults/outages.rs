//! What happens to pods and to the runtime behind the agent's back.

use std::time::Duration;

use coracle::transport::generated::{MessageField, runtime as rt};
use serde_json::json;

use crate::support::fake_cri::BUSYBOX;
use crate::support::node::{FOREVER, busybox, container, is_ready, pod, restarts, simple};
use crate::support::solo::{LONG, Solo, full_name};
use crate::support::wait::{holds_for, wait_for, wait_until};
use crate::{BOTH, two};

#[test]
fn a_restarted_runtime_is_found_again() {
    let solo = Solo::start();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    let before = (solo.running("web"), solo.ready_sandboxes("web"));
    for round in 0..3 {
        solo.fake.restart();
        let name = format!("later{round}");
        solo.apply(&simple(&name));
        solo.assert_runs_once(&name, &["main"]);
        assert_eq!((solo.running("web"), solo.ready_sandboxes("web")), before);
    }
    assert_eq!(restarts(&solo.wait_ready("web"), "one"), 0);
    solo.finish();
}

#[test]
fn a_runtime_that_is_down_is_waited_for() {
    let mut solo = Solo::start();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    let before = solo.running("web");
    solo.fake.go_down();
    wait_until("the agent to notice", LONG, || solo.health("/healthz").0 == 500);
    solo.assert_answers();
    let status = solo.says(&["status"]);
    assert!(status.contains("runtime"), "{status}");
    solo.apply(&two("new"));
    wait_until("the new pod to be listed", LONG, || solo.pod("new").is_some());
    // What was known of a pod stays known. No answer says nothing of that yet.
    let (full, pods) = (full_name("web"), wait_for("/pods", LONG, || solo.try_pods()));
    let web = pods.iter().find(|pod| pod.metadata.name.as_deref() == Some(&full));
    assert!(web.is_some_and(is_ready));
    solo.fake.go_up();
    solo.assert_runs_once("new", &BOTH);
    assert_eq!(solo.running("web"), before);
    solo.wait_healthy();
    solo.finish();
}

#[test]
fn a_runtime_that_comes_after_the_agent() {
    let mut solo = Solo::prepare(json!({}));
    solo.fake.go_down();
    solo.apply(&two("web"));
    solo.launch_agent();
    solo.assert_answers();
    wait_until("the pod to be listed", LONG, || solo.pod("web").is_some());
    solo.fake.go_up();
    solo.assert_runs_once("web", &BOTH);
    solo.wait_healthy();
    solo.finish();
}

#[test]
fn a_runtime_that_says_it_is_not_ready() {
    let mut solo = Solo::start();
    for condition in ["RuntimeReady", "NetworkReady"] {
        solo.fake.set_condition(condition, false, "Broken", "cable is out");
        wait_until("the agent to notice", LONG, || solo.says(&["status"]).contains("cable is out"));
        solo.apply(&two("web"));
        wait_until("the pod to be listed", LONG, || solo.pod("web").is_some());
        holds_for("nothing is started", Duration::from_secs(2), || solo.sandboxes("web").is_empty());
        solo.fake.set_condition(condition, true, "", "");
        solo.assert_runs_once("web", &BOTH);
        solo.remove("web");
        solo.wait_gone("web", LONG);
        // Records of what has ended go a little later.
        wait_until("nothing of the pod to be left", LONG, || solo.sandboxes("web").is_empty());
    }
    solo.wait_healthy();
    solo.finish();
}

#[test]
fn a_pod_removed_during_its_pull_goes_at_once() {
    let solo = Solo::start();
    let gate = solo.fake.hang("PullImage");
    solo.apply(&two("web"));
    wait_until("the pull to hang", LONG, || gate.waiting() > 0);
    solo.remove("web");
    solo.wait_gone("web", LONG);
    assert_eq!(gate.waiting(), 1, "the pull is still under way");
    solo.fake.behave("PullImage");
    solo.finish();
}

#[test]
fn a_dead_sandbox_is_replaced() {
    let solo = Solo::start();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    for attempt in 1..3 {
        let old = solo.ready_sandboxes("web");
        let ids: Vec<_> = solo.running("web").into_values().collect();
        assert!(solo.fake.kill_sandbox(&old[0]));
        wait_until("a new sandbox", LONG, || {
            let new = solo.ready_sandboxes("web");
            new.len() == 1 && new != old
        });
        solo.assert_runs_once("web", &BOTH);
        let sandbox = solo.sandboxes("web").pop().unwrap();
        assert_eq!(sandbox.config.metadata.attempt, attempt);
        assert!(solo.running("web").into_values().all(|id| !ids.contains(&id)));
    }
    solo.finish();
}

#[test]
fn a_dead_container_comes_back_alone() {
    let solo = Solo::start_with(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    for count in 1..4 {
        let before = solo.running("web");
        assert!(solo.fake.kill_container(&before["one"][0], 3));
        let pod =
            solo.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "one") == count && is_ready(pod));
        let last = container(&pod, "one").unwrap().last_state.clone().unwrap().terminated.unwrap();
        assert_eq!(last.exit_code, 3);
        assert_eq!(restarts(&pod, "two"), 0);
        solo.assert_runs_once("web", &BOTH);
        let after = solo.running("web");
        assert_ne!(after["one"], before["one"]);
        assert_eq!(after["two"], before["two"]);
    }
    solo.finish();
}

#[test]
fn everything_of_a_pod_vanishes_from_the_runtime() {
    let solo = Solo::start();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    solo.fake.with_state(|state| {
        state.containers.clear();
        state.sandboxes.clear();
    });
    solo.assert_runs_once("web", &BOTH);
    solo.finish();
}

#[test]
fn a_manifest_removed_while_stopping_hangs_and_written_again() {
    let solo = Solo::start();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    let before = solo.running("web");
    let gate = solo.fake.hang("StopContainer");
    solo.remove("web");
    wait_until("both stops to hang", LONG, || gate.waiting() == 2);
    solo.assert_answers();
    solo.apply(&simple("other"));
    solo.assert_runs_once("other", &["main"]);
    solo.apply(&two("web"));
    // The old instance has to end first, though it is wanted again.
    holds_for("nothing new starts", Duration::from_secs(2), || {
        solo.assert_no_twins();
        solo.running("web") == before
    });
    solo.fake.behave("StopContainer");
    wait_until("new containers", LONG, || {
        let now = solo.running("web");
        now.len() == 2 && now.iter().all(|(name, ids)| before.get(name) != Some(ids))
    });
    solo.assert_runs_once("web", &BOTH);
    solo.finish();
}

/// A call that outlives its deadline and is carried out all the same.
#[test]
fn calls_that_end_after_their_deadline() {
    let cases = ["RunPodSandbox", "CreateContainer", "StartContainer", "StopContainer"];
    crate::side_by_side(&cases, |method| {
        let solo = Solo::start_with(json!({"runtimeRequestTimeout": "2s"}));
        if *method == "StopContainer" {
            solo.apply(&simple("web"));
            solo.assert_runs_once("web", &["main"]);
            let gate = solo.fake.hang_next(method);
            solo.remove("web");
            wait_until("the call to hang", LONG, || gate.waiting() > 0);
            // The end of the sandbox is the end of its containers, too.
            solo.wait_gone("web", LONG);
            gate.open();
        } else {
            let gate = solo.fake.hang_next(method);
            solo.apply(&simple("web"));
            wait_until("the call to hang", LONG, || gate.waiting() > 0);
            let calls = solo.fake.count(method);
            wait_until("the call to be made again", LONG, || {
                solo.assert_answers();
                solo.fake.count(method) > calls
            });
            gate.open();
            solo.assert_runs_once("web", &["main"]);
        }
        solo.finish();
    });
}

#[test]
fn what_others_run_is_left_alone() {
    let mut solo = Solo::prepare(json!({}));
    let (sandbox, container) = foreign(&solo);
    solo.start_agent();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    let dead = solo.running("web")["two"][0].clone();
    solo.fake.kill_container(&dead, 1);
    solo.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "two") == 1 && is_ready(pod));
    solo.remove("web");
    solo.wait_gone("web", LONG);
    wait_until("the pod's records to be removed", LONG, || solo.containers("web").is_empty());
    let journal = serde_json::to_string(
        &solo.fake.journal().into_iter().map(|entry| entry.request).collect::<Vec<_>>(),
    )
    .unwrap();
    for id in [&sandbox, &container] {
        assert!(!journal.contains(id.as_str()), "a call about what is not ours: {journal}");
    }
    assert!(solo.fake.containers().iter().any(|one| one.status.id == container && one.is_running()));
    // Nothing of ours is left; what is theirs goes now, so that the end can look.
    solo.fake.with_state(|state| {
        state.containers.remove(&container);
        state.sandboxes.remove(&sandbox);
    });
    solo.finish();
}

/// A sandbox and a running container without any of our labels.
fn foreign(solo: &Solo) -> (String, String) {
    solo.fake.with_state(|state| {
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

/// A pod that keeps failing costs no more than its waits.
#[test]
fn a_crashing_pod_backs_off_and_leaves_one_record() {
    let solo = Solo::start_with(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    solo.apply(&pod("bad", json!([busybox("main", "exit 7"), busybox("good", FOREVER)])));
    let pod = solo.wait_pod("bad", "restarted four times", LONG, |pod| restarts(pod, "main") >= 4);
    assert_eq!(restarts(&pod, "good"), 0);
    let dead = wait_for("all but the newest dead containers to be removed", LONG, || {
        let dead = solo.containers("bad").into_iter().filter(|one| !one.is_running()).count();
        (dead <= 2).then_some(dead)
    });
    assert!(dead >= 1);
    solo.finish();
}

/// An event whose bytes are no event: the stream is opened anew, and nothing is missed.
#[test]
fn events_that_cannot_be_read() {
    let solo = Solo::start();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    for count in 1..3 {
        wait_until("the stream to be open", LONG, || solo.fake.listeners() == 1);
        let opened = solo.fake.count("GetContainerEvents");
        solo.fake.with_state(|state| {
            let mut garbage = rt::ContainerEventResponse::default();
            // The container's id, which is text, in bytes that are none.
            garbage.special_fields.mut_unknown_fields().add_length_delimited(1, vec![0xff, 0xfe, 0x80]);
            state.news.push(garbage);
        });
        let victim = solo.running("web")["two"][0].clone();
        assert!(solo.fake.kill_container(&victim, 3));
        solo.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "two") == count && is_ready(pod));
        wait_until("another stream", LONG, || solo.fake.count("GetContainerEvents") > opened);
        solo.assert_runs_once("web", &BOTH);
    }
    solo.finish();
}
