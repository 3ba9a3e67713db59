//! SIGKILL in the middle of every step of a pod's lifecycle: the next agent starts normally, reads
//! the state, and completes the step; nothing is done twice and nothing is left.
//! Between the calls, where directories and mounts are made, see `syscalls`.

use crate::support::fake_node::{FakeNode, LONG};
use crate::support::wait::wait_until;
use crate::{RICH, in_parallel, rich};

/// The change that the agent was making when it was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InterruptedWork {
    /// Start a pod.
    Start,
    /// Stop a pod, and remove what it left.
    End,
    /// Stop a pod and start the next version of it.
    Edit,
}

/// The steps: the method, and which of its calls since the change hangs when the agent is killed.
const STEPS: &[(InterruptedWork, &str, usize)] = &[
    (InterruptedWork::Start, "RunPodSandbox", 1),
    (InterruptedWork::Start, "PodSandboxStatus", 1),
    (InterruptedWork::Start, "ImageStatus", 1),
    (InterruptedWork::Start, "PullImage", 1),
    (InterruptedWork::Start, "CreateContainer", 1),
    (InterruptedWork::Start, "StartContainer", 1),
    (InterruptedWork::Start, "ContainerStatus", 1),
    (InterruptedWork::Start, "CreateContainer", 2),
    (InterruptedWork::Start, "StartContainer", 2),
    (InterruptedWork::Start, "CreateContainer", 3),
    (InterruptedWork::Start, "StartContainer", 3),
    (InterruptedWork::Start, "CreateContainer", 4),
    (InterruptedWork::Start, "StartContainer", 4),
    (InterruptedWork::Start, "ExecSync", 1),
    (InterruptedWork::End, "ExecSync", 1),
    (InterruptedWork::End, "StopContainer", 1),
    (InterruptedWork::End, "StopPodSandbox", 1),
    (InterruptedWork::End, "RemoveContainer", 1),
    (InterruptedWork::End, "RemoveContainer", 2),
    (InterruptedWork::End, "RemoveContainer", 3),
    (InterruptedWork::End, "RemoveContainer", 4),
    (InterruptedWork::End, "RemovePodSandbox", 1),
    (InterruptedWork::Edit, "StopContainer", 1),
    (InterruptedWork::Edit, "StopPodSandbox", 1),
    (InterruptedWork::Edit, "RunPodSandbox", 1),
    (InterruptedWork::Edit, "CreateContainer", 1),
    (InterruptedWork::Edit, "StartContainer", 1),
];

/// When the runtime executes the call of the killed agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallRelease {
    BeforeTheRestart,
    AfterTheRestart,
}

fn run(&(work, method, call): &(InterruptedWork, &'static str, usize), release: CallRelease) {
    let mut node = FakeNode::start();
    if work != InterruptedWork::Start {
        node.apply(&rich("web"));
        node.assert_runs_once("web", &RICH);
    }
    let old = node.running("web");
    // The calls before it are released one by one.
    let mut gate = node.fake.hang_next(method);
    match work {
        InterruptedWork::Start => node.apply(&rich("web")),
        InterruptedWork::End => node.remove("web"),
        InterruptedWork::Edit => {
            let mut next = rich("web");
            next["metadata"]["labels"] = serde_json::json!({"version": "2"});
            node.apply(&next);
        }
    }
    for _ in 1..call {
        wait_until(&format!("{method} to be called"), LONG, || gate.waiting() > 0);
        let next = node.fake.hang_next(method);
        gate.open();
        gate = next;
    }
    wait_until(&format!("call {call} of {method}"), LONG, || gate.waiting() > 0);
    node.kill_agent();
    if release == CallRelease::BeforeTheRestart {
        gate.open();
        node.start_agent();
    } else {
        let lists = node.fake.count("ListContainers");
        node.start_agent();
        wait_until("the new agent to have inspected its pods", LONG, || {
            node.fake.count("ListContainers") > lists
                && (work == InterruptedWork::End || node.pod("web").is_some_and(|pod| pod.status.is_some()))
        });
        gate.open();
    }
    match work {
        InterruptedWork::Start => {}
        InterruptedWork::End => node.wait_gone("web", LONG),
        InterruptedWork::Edit => wait_until("the old version to be gone", LONG, || {
            let running = node.running("web");
            old.iter().all(|(name, ids)| running.get(name) != Some(ids))
        }),
    }
    if work != InterruptedWork::End {
        node.assert_runs_once("web", &RICH);
    }
    node.finish();
}

#[test]
fn agent_killed_in_each_call_recovers_when_the_call_completes_before_restart() {
    in_parallel(STEPS, |step| run(step, CallRelease::BeforeTheRestart));
    print_steps("before");
}

#[test]
fn agent_killed_in_each_call_recovers_when_the_call_completes_after_restart() {
    in_parallel(STEPS, |step| run(step, CallRelease::AfterTheRestart));
    print_steps("after");
}

fn print_steps(release: &str) {
    crate::print_line(&format!(
        "kills: {} steps of start, end and edit; the call is carried out {release} the restart; all passed",
        STEPS.len()
    ));
}

/// A restart of the agent does not affect running pods.
#[test]
fn restarted_agent_takes_over_running_pods() {
    let mut node = FakeNode::start();
    // A log that is missing would be reopened.
    node.fake.write_logs();
    node.apply(&rich("web"));
    node.assert_runs_once("web", &RICH);
    let before = (node.running("web"), changing_calls(&node));
    for stop in [FakeNode::kill_agent, FakeNode::stop_agent, FakeNode::kill_agent] {
        stop(&mut node);
        node.start_agent();
        node.assert_runs_once("web", &RICH);
    }
    assert_eq!((node.running("web"), changing_calls(&node)), before);
    node.finish();
}

/// The calls that change the runtime, hooks included; probes continue.
fn changing_calls(node: &FakeNode) -> Vec<&'static str> {
    let mut journal = node.fake.journal();
    journal.retain(|entry| !entry.request["cmd"][0].as_str().is_some_and(|word| word.ends_with("Probe")));
    journal.iter().map(|entry| entry.method).collect()
}

/// A pod whose manifest was removed between two agents is stopped by the next one.
#[test]
fn manifest_removed_while_the_agent_is_down_stops_its_pod() {
    let mut node = FakeNode::start();
    node.apply(&rich("web"));
    node.assert_runs_once("web", &RICH);
    node.kill_agent();
    node.remove("web");
    node.start_agent();
    node.wait_gone("web", LONG);
    node.finish();
}
