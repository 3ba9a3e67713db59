//! The agent stops within five seconds, whatever the runtime does, and the pods keep running.

use crate::method_faults::{CASES, Case, Stage, approach, prepare};
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::wait::{wait_for, wait_until};
use crate::{BOTH, RICH, in_parallel, two};

fn stop_while_it_hangs(&(method, stage): &Case) {
    let mut node = prepare();
    let gate = approach(&mut node, stage, |node| node.fake.hang(method));
    std::thread::scope(|scope| {
        if stage == Stage::Images {
            // Fails when the agent ends; the error does not matter here.
            scope.spawn(|| node.command(&["images"]));
        }
        wait_until(&format!("{method} to hang"), LONG, || gate.waiting() > 0);
        node.signal("TERM");
    });
    node.stop_agent();
    node.fake.behave(method);
    node.start_agent();
    match stage {
        Stage::Removal | Stage::Collection => node.wait_gone("web", LONG),
        _ => node.assert_runs_once("web", &RICH),
    }
    node.finish();
}

#[test]
fn hanging_runtime_calls_do_not_delay_a_stop() {
    in_parallel(CASES, stop_while_it_hangs);
}

#[test]
fn agent_stops_in_time_while_the_runtime_is_down() {
    let mut node = FakeNode::start();
    node.apply(&two("web"));
    node.assert_runs_once("web", &BOTH);
    let before = node.running("web");
    node.fake.go_down();
    wait_until("the agent to notice", LONG, || node.health("/healthz").0 == 500);
    node.stop_agent();
    node.fake.go_up();
    node.start_agent();
    node.assert_runs_once("web", &BOTH);
    assert_eq!(node.running("web"), before);
    node.finish();
}

#[test]
fn quit_signal_logs_every_thread() {
    let node = FakeNode::start();
    let gate = node.fake.hang("PullImage");
    node.apply(&two("web"));
    wait_until("the pull to hang", LONG, || gate.waiting() > 0);
    node.signal("QUIT");
    wait_until("the dump", LONG, || node.log().contains(" threads:"));
    let uid = wait_for("the pod's UID", LONG, || node.pod("web")?.metadata.uid);
    let worker = format!("pod/{}", &uid[..8]);
    wait_until("all threads to be named", LONG, || {
        let log = node.log();
        ["main", "sync", "observe", "clean", "src-file", &worker]
            .iter()
            .all(|name| log.lines().any(|line| line.contains(&format!("  {name} ")) && line.contains(" s  ")))
    });
    node.assert_responsive();
    gate.open();
    node.fake.behave("PullImage");
    node.assert_runs_once("web", &BOTH);
    node.finish();
}
