//! SIGKILL in the middle of every step of a pod's life: the next agent starts as always, finds
//! what is there, and finishes the job; nothing is done twice and nothing is left.
//! Between the calls, where directories and mounts are made, see `syscalls`.

use crate::support::solo::{LONG, Solo};
use crate::support::wait::wait_until;
use crate::{RICH, rich, side_by_side};

/// What was asked of the agent before it died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Start a pod.
    Start,
    /// Stop a pod, and remove what it left.
    End,
    /// Stop a pod and start the next version of it.
    Edit,
}

/// The steps, with the call of that method, counted from the order on, that hangs when the
/// agent dies.
const STEPS: &[(Work, &str, usize)] = &[
    (Work::Start, "RunPodSandbox", 1),
    (Work::Start, "PodSandboxStatus", 1),
    (Work::Start, "ImageStatus", 1),
    (Work::Start, "PullImage", 1),
    (Work::Start, "CreateContainer", 1),
    (Work::Start, "StartContainer", 1),
    (Work::Start, "ContainerStatus", 1),
    (Work::Start, "CreateContainer", 2),
    (Work::Start, "StartContainer", 2),
    (Work::Start, "CreateContainer", 3),
    (Work::Start, "StartContainer", 3),
    (Work::Start, "CreateContainer", 4),
    (Work::Start, "StartContainer", 4),
    (Work::Start, "ExecSync", 1),
    (Work::End, "ExecSync", 1),
    (Work::End, "StopContainer", 1),
    (Work::End, "StopPodSandbox", 1),
    (Work::End, "RemoveContainer", 1),
    (Work::End, "RemoveContainer", 2),
    (Work::End, "RemoveContainer", 3),
    (Work::End, "RemoveContainer", 4),
    (Work::End, "RemovePodSandbox", 1),
    (Work::Edit, "StopContainer", 1),
    (Work::Edit, "StopPodSandbox", 1),
    (Work::Edit, "RunPodSandbox", 1),
    (Work::Edit, "CreateContainer", 1),
    (Work::Edit, "StartContainer", 1),
];

/// When the runtime carries out the call whose caller is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Release {
    BeforeTheRestart,
    AfterTheRestart,
}

fn run(&(work, method, call): &(Work, &'static str, usize), release: Release) {
    let mut solo = Solo::start();
    if work != Work::Start {
        solo.apply(&rich("web"));
        solo.assert_runs_once("web", &RICH);
    }
    let old = solo.running("web");
    // The calls before it go through one by one.
    let mut gate = solo.fake.hang_next(method);
    match work {
        Work::Start => solo.apply(&rich("web")),
        Work::End => solo.remove("web"),
        Work::Edit => {
            let mut next = rich("web");
            next["metadata"]["labels"] = serde_json::json!({"version": "2"});
            solo.apply(&next);
        }
    }
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
        let lists = solo.fake.count("ListContainers");
        solo.start_agent();
        wait_until("the new agent to have looked around", LONG, || {
            solo.fake.count("ListContainers") > lists
                && (work == Work::End || solo.pod("web").is_some_and(|pod| pod.status.is_some()))
        });
        gate.open();
    }
    match work {
        Work::Start => {}
        Work::End => solo.wait_gone("web", LONG),
        Work::Edit => wait_until("the old version to be gone", LONG, || {
            let running = solo.running("web");
            old.iter().all(|(name, ids)| running.get(name) != Some(ids))
        }),
    }
    if work != Work::End {
        solo.assert_runs_once("web", &RICH);
    }
    solo.finish();
}

#[test]
fn a_kill_in_each_step_and_the_runtime_finishes_before_the_restart() {
    side_by_side(STEPS, |step| run(step, Release::BeforeTheRestart));
    tell_steps("before");
}

#[test]
fn a_kill_in_each_step_and_the_runtime_finishes_after_the_restart() {
    side_by_side(STEPS, |step| run(step, Release::AfterTheRestart));
    tell_steps("after");
}

fn tell_steps(release: &str) {
    crate::tell(&format!(
        "kills: {} steps of start, end and edit; the call is carried out {release} the restart; all passed",
        STEPS.len()
    ));
}

/// A restart with pods running is nothing to them.
#[test]
fn a_restart_takes_over_what_runs() {
    let mut solo = Solo::start();
    // A log that is missing would be reopened.
    solo.fake.write_logs();
    solo.apply(&rich("web"));
    solo.assert_runs_once("web", &RICH);
    let before = (solo.running("web"), deeds(&solo));
    for stop in [Solo::kill_agent, Solo::stop_agent, Solo::kill_agent] {
        stop(&mut solo);
        solo.start_agent();
        solo.assert_runs_once("web", &RICH);
    }
    assert_eq!((solo.running("web"), deeds(&solo)), before);
    solo.finish();
}

/// What the runtime was asked to do, hooks included; probes go on.
fn deeds(solo: &Solo) -> Vec<&'static str> {
    let mut journal = solo.fake.journal();
    journal.retain(|entry| !entry.request["cmd"][0].as_str().is_some_and(|word| word.ends_with("Probe")));
    journal.iter().map(|entry| entry.method).collect()
}

/// What was removed while nobody looked is stopped by the next agent.
#[test]
fn a_manifest_removed_while_the_agent_is_dead() {
    let mut solo = Solo::start();
    solo.apply(&rich("web"));
    solo.assert_runs_once("web", &RICH);
    solo.kill_agent();
    solo.remove("web");
    solo.start_agent();
    solo.wait_gone("web", LONG);
    solo.finish();
}
