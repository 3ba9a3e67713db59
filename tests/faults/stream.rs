//! The event stream: whatever it does or fails to do, every change of a pod is seen, no
//! status stays behind, and the agent stops in time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coracle::transport::grpc::Kind;
use serde_json::json;

use crate::support::fake_cri::StreamFault;
use crate::support::node::{FOREVER, busybox, is_ready, pod, restarts, simple};
use crate::support::solo::{LONG, Solo};
use crate::support::wait::{pause, wait_until};
use crate::support::web::metric;
use crate::{BOTH, side_by_side, two};

/// The net below the stream is up to a minute wide.
const NET: Duration = Duration::from_secs(90);

/// How often the agent gets another chance to be told in time.
const ROUNDS: i32 = 5;

const SUCCESSES: &str = "kubelet_evented_pleg_connection_success_count";

const FAULTS: &[StreamFault] = &[
    StreamFault::None,
    StreamFault::Silent,
    StreamFault::Repeats,
    StreamFault::Late(Duration::from_millis(700)),
    StreamFault::Reordered,
    StreamFault::Lies,
    StreamFault::Loses,
    StreamFault::Cuts(1),
    StreamFault::Cuts(5),
];

/// Everything that can happen to pods from outside, once each.
fn live(solo: &Solo) {
    solo.apply(&two("web"));
    solo.apply(&simple("calm"));
    solo.apply(&{
        let mut job = pod("job", json!([busybox("main", "sleep 1; exit 0")]));
        job["spec"]["restartPolicy"] = json!("Never");
        job
    });
    solo.assert_runs_once("web", &BOTH);
    solo.assert_runs_once("calm", &["main"]);
    solo.wait_pod("job", "over", NET, |pod| {
        pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Succeeded")
    });
    let calm = solo.running("calm");

    // A container dies.
    let victim = solo.running("web")["one"][0].clone();
    assert!(solo.fake.kill_container(&victim, 3));
    solo.wait_pod("web", "restarted", NET, |pod| restarts(pod, "one") == 1 && is_ready(pod));
    solo.assert_runs_once("web", &BOTH);

    // A sandbox dies.
    let sandbox = solo.ready_sandboxes("web")[0].clone();
    assert!(solo.fake.kill_sandbox(&sandbox));
    wait_until("another sandbox", NET, || {
        let ready = solo.ready_sandboxes("web");
        ready.len() == 1 && ready[0] != sandbox
    });
    solo.wait_pod("web", "ready again", NET, is_ready);

    solo.remove("web");
    solo.wait_gone("web", NET);
    assert_eq!(solo.running("calm"), calm, "the pod next door was disturbed");
}

#[test]
fn no_fault_of_the_stream_hides_a_change() {
    side_by_side(FAULTS, |fault| {
        let mut solo = Solo::prepare(json!({}));
        solo.fake.spoil_stream(*fault);
        solo.start_agent();
        live(&solo);
        solo.finish();
    });
}

#[test]
fn without_a_stream_lists_do() {
    let mut solo = Solo::prepare(json!({}));
    solo.fake.fail("GetContainerEvents", Kind::Unimplemented, "unknown method GetContainerEvents");
    solo.start_agent();
    live(&solo);
    let status = solo.says(&["status"]);
    assert!(status.contains("full list every second: the runtime has no event stream"), "{status}");
    assert_eq!(solo.fake.count("GetContainerEvents"), 1, "asked once");
    let log = solo.log();
    let warned = log.lines().find(|line| line.contains("WARN") && line.contains("GetContainerEvents"));
    assert_eq!(warned, None, "not a warning");
    solo.finish();

    // Switched off by the gate.
    let solo = Solo::start_with(json!({"featureGates": {"EventedPLEG": false}}));
    live(&solo);
    assert_eq!(solo.fake.count("GetContainerEvents"), 0);
    solo.finish();
}

/// A runtime is replaced by an older one and then by a newer one.
#[test]
fn a_stream_that_goes_and_comes() {
    let solo = Solo::start();
    let says = |what: &str| solo.says(&["status"]).contains(what);
    // It is opened by a thread of its own, which a healthy agent may still be about to start.
    wait_until("the stream to be open", LONG, || says("by event stream"));
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    solo.fake.fail("GetContainerEvents", Kind::Unimplemented, "unknown method GetContainerEvents");
    solo.fake.end_event_streams();
    wait_until("the lists", LONG, || says("full list every second"));
    let victim = solo.running("web")["two"][0].clone();
    assert!(solo.fake.kill_container(&victim, 3));
    solo.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "two") == 1 && is_ready(pod));

    solo.fake.go_down();
    wait_until("the agent to notice", LONG, || solo.log().contains("cannot list pods"));
    solo.fake.behave("GetContainerEvents");
    solo.fake.go_up();
    wait_until("the stream to be back", LONG, || solo.fake.listeners() == 1 && says("by event stream"));
    live_on(&solo);
    solo.finish();
}

fn live_on(solo: &Solo) {
    let before = solo.running("web");
    let victim = before["one"][0].clone();
    assert!(solo.fake.kill_container(&victim, 3));
    solo.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "one") == 1 && is_ready(pod));
    solo.assert_runs_once("web", &BOTH);
}

/// The stream is cut again and again while pods start, die and go.
#[test]
fn a_stream_that_is_cut_at_random() {
    let solo = Solo::start();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Odd steps, so that the cuts fall anywhere.
            for step in [7, 130, 41, 260, 3, 89].into_iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                pause(Duration::from_millis(step));
                solo.fake.end_event_streams();
            }
        });
        for number in 0..8 {
            solo.apply(&two(&format!("web{number}")));
        }
        for number in 0..8 {
            solo.assert_runs_once(&format!("web{number}"), &BOTH);
        }
        for number in 0..8 {
            let victim = solo.running(&format!("web{number}"))["one"][0].clone();
            assert!(solo.fake.kill_container(&victim, 3));
        }
        for number in 0..8 {
            let name = format!("web{number}");
            solo.wait_pod(&name, "restarted", NET, |pod| restarts(pod, "one") == 1 && is_ready(pod));
            solo.remove(&name);
        }
        for number in 0..8 {
            solo.wait_gone(&format!("web{number}"), NET);
        }
        over.store(true, Ordering::Relaxed);
    });
    solo.finish();
}

#[derive(Debug)]
enum Condition {
    Open,
    Hanging,
    Refused,
    Down,
    Flooded,
}

#[test]
fn no_condition_of_the_stream_delays_a_stop() {
    use Condition::{Down, Flooded, Hanging, Open, Refused};
    side_by_side(&[Open, Hanging, Refused, Down, Flooded], |condition| {
        let mut solo = Solo::prepare(json!({}));
        match condition {
            Hanging => drop(solo.fake.hang("GetContainerEvents")),
            Refused => solo.fake.fail("GetContainerEvents", Kind::Unavailable, "not now"),
            Flooded => solo.fake.spoil_stream(StreamFault::Lies),
            Open | Down => {}
        }
        solo.start_agent();
        solo.apply(&two("web"));
        solo.assert_runs_once("web", &BOTH);
        match condition {
            Down => solo.fake.go_down(),
            Flooded => {
                for _ in 0..2000 {
                    solo.fake.with_state(|state| state.repeat_news());
                }
            }
            _ => {}
        }
        solo.stop_agent();
    });
}

/// A storm of events costs a bounded number of looks, and other pods go on.
#[test]
fn a_storm_of_events_is_gathered() {
    let solo = Solo::start();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    let before = solo.fake.count("ListContainers");
    for _ in 0..5000 {
        solo.fake.with_state(|state| state.repeat_news());
    }
    solo.apply(&simple("other"));
    solo.assert_runs_once("other", &["main"]);
    let looks = solo.fake.count("ListContainers") - before;
    assert!(looks < 2000, "{looks} lists for 5000 events");
    assert_eq!(restarts(&solo.wait_ready("web"), "one"), 0);
    solo.finish();
}

/// An agent that has watched its runtime for a while asks it for little.
#[test]
fn a_working_stream_makes_lists_rare() {
    // The container dies in each round, and is not to wait long for its next start.
    let solo = Solo::start_with(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    solo.apply(&busy_pod());
    solo.assert_runs_once("busy", &["main"]);
    // Counted at their ends: a change during a list may be found by that list.
    let lists = || solo.metric("kubelet_pleg_relist_duration_seconds_count");
    // The log says at once that the stream is distrusted, the count that it is trusted again.
    let trust = || (solo.log().matches("listing every second").count(), solo.metric(SUCCESSES));
    // A change is seen all the same, and long before the next list. On a busy machine an event
    // may take longer than the agent waits for it before it makes lists: that proves nothing.
    let proves_it = |round: i32| {
        wait_until("the net to widen", LONG, || {
            let before = lists();
            pause(Duration::from_secs(6));
            lists() - before < 0.5
        });
        let trusted = trust();
        let before = lists();
        wait_until("a list, after which there is none for a while", NET, || lists() - before > 0.5);
        let before = lists();
        let victim = solo.running("busy")["main"][0].clone();
        assert!(solo.fake.kill_container(&victim, 3));
        solo.wait_pod("busy", "restarted", LONG, |pod| restarts(pod, "main") == round && is_ready(pod));
        let listed = lists() - before > 0.5;
        // After the lists: what they were made for is known by now.
        let counts = trust() == trusted;
        assert!(!counts || !listed, "a list has found it, no event");
        counts
    };
    assert!((1..=ROUNDS).any(proves_it), "the stream was distrusted in each of {ROUNDS} rounds");
    let text = solo.metrics();
    assert!(metric(&text, SUCCESSES) >= 1.0, "the stream was never trusted:\n{text}");
    for name in [
        "kubelet_running_pods 1",
        "kubelet_pleg_relist_duration_seconds_count",
        "kubelet_runtime_operations_total{operation_type=\"run_podsandbox\"} 1",
        "kubelet_desired_pods{static=\"true\"} 1",
        "kubelet_working_pods{lifecycle=\"sync\",config=\"desired\",static=\"true\"} 1",
        "process_resident_memory_bytes",
    ] {
        assert!(text.contains(name), "{name} is not in:\n{text}");
    }
    solo.finish();
}

fn busy_pod() -> serde_json::Value {
    pod("busy", json!([busybox("main", FOREVER)]))
}
