//! Faults of the event stream: every change of a pod is noticed, no status is stale, and the agent
//! stops in time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coracle::transport::grpc::Kind;
use serde_json::json;

use crate::support::fake_cri::StreamFault;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, busybox, is_ready, pod, restarts, simple};
use crate::support::wait::{pause, wait_until};
use crate::support::web::metric;
use crate::{BOTH, in_parallel, two};

/// The period of the full lists that back up the stream is up to a minute. The rest is for a busy machine.
const NET: Duration = LONG;

/// How often the agent gets another chance to receive an event in time.
const ROUNDS: i32 = 10;

/// How long there is no list before a round, and none that is due after the next list.
const NO_LISTS: Duration = Duration::from_secs(6);

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

/// Each external change of pods, once.
fn live(node: &FakeNode) {
    node.apply(&two("web"));
    node.apply(&simple("calm"));
    node.apply(&{
        let mut job = pod("job", json!([busybox("main", "sleep 1; exit 0")]));
        job["spec"]["restartPolicy"] = json!("Never");
        job
    });
    node.assert_runs_once("web", &BOTH);
    node.assert_runs_once("calm", &["main"]);
    node.wait_pod("job", "over", NET, |pod| {
        pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Succeeded")
    });
    let calm = node.running("calm");

    // A container dies.
    let victim = node.running("web")["one"][0].clone();
    assert!(node.fake.kill_container(&victim, 3));
    node.wait_pod("web", "restarted", NET, |pod| restarts(pod, "one") == 1 && is_ready(pod));
    node.assert_runs_once("web", &BOTH);

    // A sandbox dies.
    let sandbox = node.ready_sandboxes("web")[0].clone();
    assert!(node.fake.kill_sandbox(&sandbox));
    wait_until("another sandbox", NET, || {
        let ready = node.ready_sandboxes("web");
        ready.len() == 1 && ready[0] != sandbox
    });
    node.wait_pod("web", "ready again", NET, is_ready);

    node.remove("web");
    node.wait_gone("web", NET);
    assert_eq!(node.running("calm"), calm, "the pod next door was disturbed");
}

#[test]
fn event_stream_faults_hide_no_change() {
    in_parallel(FAULTS, |fault| {
        let mut node = FakeNode::prepare(json!({}));
        node.fake.set_stream_fault(*fault);
        node.start_agent();
        live(&node);
        node.finish();
    });
}

#[test]
fn lists_replace_a_missing_event_stream() {
    let mut node = FakeNode::prepare(json!({}));
    node.fake.fail("GetContainerEvents", Kind::Unimplemented, "unknown method GetContainerEvents");
    node.start_agent();
    live(&node);
    let status = node.cli(&["status"]);
    assert!(status.contains("full list every second: the runtime has no event stream"), "{status}");
    assert_eq!(node.fake.count("GetContainerEvents"), 1, "asked once");
    let log = node.log();
    let warned = log.lines().find(|line| line.contains("WARN") && line.contains("GetContainerEvents"));
    assert_eq!(warned, None, "not a warning");
    node.finish();

    // Disabled by the feature gate.
    let node = FakeNode::start_with(json!({"featureGates": {"EventedPLEG": false}}));
    live(&node);
    assert_eq!(node.fake.count("GetContainerEvents"), 0);
    node.finish();
}

/// A runtime is replaced by an older one and then by a newer one.
#[test]
fn event_stream_is_used_when_the_runtime_supports_it_again() {
    let node = FakeNode::start();
    let status_contains = |what: &str| node.cli(&["status"]).contains(what);
    // Its own thread opens it, which may not have started yet when the agent is healthy.
    wait_until("the stream to be open", LONG, || status_contains("by event stream"));
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    node.fake.fail("GetContainerEvents", Kind::Unimplemented, "unknown method GetContainerEvents");
    node.fake.end_event_streams();
    wait_until("the lists", LONG, || status_contains("full list every second"));
    let victim = node.running("web")["two"][0].clone();
    assert!(node.fake.kill_container(&victim, 3));
    node.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "two") == 1 && is_ready(pod));

    node.fake.go_down();
    wait_until("the agent to notice", LONG, || node.log().contains("cannot list pods"));
    node.fake.behave("GetContainerEvents");
    node.fake.go_up();
    wait_until("the stream to be open again", LONG, || {
        node.fake.listeners() == 1 && status_contains("by event stream")
    });
    restart_everything(&node);
    node.finish();
}

fn restart_everything(node: &FakeNode) {
    let before = node.running("web");
    let victim = before["one"][0].clone();
    assert!(node.fake.kill_container(&victim, 3));
    node.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "one") == 1 && is_ready(pod));
    node.assert_runs_once("web", &BOTH);
}

/// Sets the flag when it is dropped, also by a panic, so that a thread that waits for it ends.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The stream is cut again and again while pods start, die and go.
#[test]
fn randomly_interrupted_event_stream_hides_no_change() {
    let node = FakeNode::start();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Irregular steps, so that the cuts fall anywhere.
            for step in [7, 130, 41, 260, 3, 89].into_iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                pause(Duration::from_millis(step));
                node.fake.end_event_streams();
            }
        });
        let _end = SetOnDrop(&over);
        for number in 0..8 {
            node.apply(&two(&format!("web{number}")));
        }
        for number in 0..8 {
            node.assert_runs_once(&format!("web{number}"), &BOTH);
        }
        for number in 0..8 {
            let victim = node.running(&format!("web{number}"))["one"][0].clone();
            assert!(node.fake.kill_container(&victim, 3));
        }
        for number in 0..8 {
            let name = format!("web{number}");
            node.wait_pod(&name, "restarted", NET, |pod| restarts(pod, "one") == 1 && is_ready(pod));
            node.remove(&name);
        }
        for number in 0..8 {
            node.wait_gone(&format!("web{number}"), NET);
        }
    });
    node.finish();
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
fn event_stream_faults_do_not_delay_a_stop() {
    use Condition::{Down, Flooded, Hanging, Open, Refused};
    in_parallel(&[Open, Hanging, Refused, Down, Flooded], |condition| {
        let mut node = FakeNode::prepare(json!({}));
        match condition {
            Hanging => drop(node.fake.hang("GetContainerEvents")),
            Refused => node.fake.fail("GetContainerEvents", Kind::Unavailable, "not now"),
            Flooded => node.fake.set_stream_fault(StreamFault::Lies),
            Open | Down => {}
        }
        node.start_agent();
        node.apply(&two("web"));
        node.assert_runs_once("web", &BOTH);
        match condition {
            Down => node.fake.go_down(),
            Flooded => {
                for _ in 0..2000 {
                    node.fake.with_state(|state| state.repeat_all_events());
                }
            }
            _ => {}
        }
        node.stop_agent();
    });
}

/// A burst of events causes a bounded number of inspections, and other pods are still handled.
#[test]
fn burst_of_events_is_coalesced() {
    let node = FakeNode::start();
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    let before = node.fake.count("ListContainers");
    for _ in 0..5000 {
        node.fake.with_state(|state| state.repeat_all_events());
    }
    node.apply(&simple("other"));
    node.assert_runs_once("other", &["main"]);
    let looks = node.fake.count("ListContainers") - before;
    assert!(looks < 2000, "{looks} lists for 5000 events");
    assert_eq!(restarts(&node.wait_ready("web"), "one"), 0);
    node.finish();
}

/// An agent with a working stream sends few requests to the runtime.
#[test]
fn working_event_stream_reduces_relists() {
    // The container dies in each round, and must not wait long for its next start.
    let node = FakeNode::start_with(json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}));
    node.apply(&busy_pod());
    node.assert_runs_once("busy", &["main"]);
    // Counted at their ends: a change during a list may be found by that list.
    let lists = || node.metric("kubelet_pleg_relist_duration_seconds_count");
    // The log reports at once that the stream is not trusted, the count that it is trusted again.
    let trust = || (node.log().matches("listing every second").count(), node.metric(SUCCESSES));
    // A change is noticed all the same, and long before the next list. On a busy machine an event
    // may take longer than the agent waits for it before it makes lists: that proves nothing.
    let proves_it = |round: i32| {
        wait_until("the period of the lists to grow", LONG, || {
            let before = lists();
            pause(NO_LISTS);
            lists() - before < 0.5
        });
        let trusted = trust();
        let before = lists();
        let mut earliest = Instant::now();
        wait_until("a list, after which there is none for a while", NET, || {
            let polled = Instant::now();
            let listed = lists() - before > 0.5;
            earliest = if listed { earliest } else { polled };
            listed
        });
        let before = lists();
        let victim = node.running("busy")["main"][0].clone();
        assert!(node.fake.kill_container(&victim, 3));
        node.wait_pod("busy", "restarted", LONG, |pod| restarts(pod, "main") == round && is_ready(pod));
        let listed = lists() - before > 0.5;
        // The next list may be due: that proves nothing either.
        let is_due = earliest.elapsed() >= NO_LISTS;
        // After the lists: the change that caused them is known by now.
        let counts = trust() == trusted && !(listed && is_due);
        assert!(!counts || !listed, "a list has found it, no event");
        counts
    };
    assert!((1..=ROUNDS).any(proves_it), "the stream was distrusted in each of {ROUNDS} rounds");
    let text = node.metrics();
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
    node.finish();
}

fn busy_pod() -> serde_json::Value {
    pod("busy", json!([busybox("main", FOREVER)]))
}
