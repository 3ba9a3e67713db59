//! SIGKILL in the middle of every step of a pod's start: the next agent starts as always,
//! finds what is there, and no container runs twice.

use crate::support::solo::{LONG, Solo};
use crate::support::wait::wait_until;
use crate::{BOTH, side_by_side, two};

/// The steps of a start, with the call of that method that hangs when the agent dies.
const STEPS: &[(&str, usize)] = &[
    ("RunPodSandbox", 1),
    ("PodSandboxStatus", 1),
    ("PullImage", 1),
    ("CreateContainer", 1),
    ("StartContainer", 1),
    ("CreateContainer", 2),
    ("StartContainer", 2),
    ("ContainerStatus", 1),
];

/// When the runtime carries out the call whose caller is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Release {
    BeforeTheRestart,
    AfterTheRestart,
}

fn run(&(method, call): &(&'static str, usize), release: Release) {
    let mut solo = Solo::start();
    // The calls before it go through one by one.
    let mut gate = solo.fake.hang_next(method);
    solo.apply(&two("web"));
    for _ in 1..call {
        wait_until(&format!("{method} to be called"), LONG, || gate.waiting() > 0);
        let next = solo.fake.hang_next(method);
        gate.open();
        gate = next;
    }
    wait_until(&format!("call {call} of {method}"), LONG, || gate.waiting() > 0);
    solo.kill_agent();
    if release == Release::BeforeTheRestart {
        gate.open();
        solo.start_agent();
    } else {
        solo.start_agent();
        wait_until("the new agent to have looked around", LONG, || {
            solo.pod("web").is_some_and(|pod| pod.status.is_some())
        });
        gate.open();
    }
    solo.assert_runs_once("web", &BOTH);
    solo.finish();
}

#[test]
fn a_kill_in_each_step_of_a_start_and_the_runtime_finishes_before_the_restart() {
    side_by_side(STEPS, |step| run(step, Release::BeforeTheRestart));
}

#[test]
fn a_kill_in_each_step_of_a_start_and_the_runtime_finishes_after_the_restart() {
    side_by_side(STEPS, |step| run(step, Release::AfterTheRestart));
}

/// A restart with pods running is nothing to them.
#[test]
fn a_restart_takes_over_what_runs() {
    let mut solo = Solo::start();
    // A log that is missing would be reopened.
    solo.fake.write_logs();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    let before = (solo.running("web"), solo.fake.calls());
    for stop in [Solo::kill_agent, Solo::stop_agent, Solo::kill_agent] {
        stop(&mut solo);
        solo.start_agent();
        solo.assert_runs_once("web", &BOTH);
    }
    assert_eq!((solo.running("web"), solo.fake.calls()), before);
    solo.finish();
}

/// What was removed while nobody looked is stopped by the next agent.
#[test]
fn a_manifest_removed_while_the_agent_is_dead() {
    let mut solo = Solo::start();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    solo.kill_agent();
    solo.remove("web");
    solo.start_agent();
    solo.wait_gone("web", LONG);
    solo.finish();
}
