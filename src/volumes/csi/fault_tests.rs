//! Every method of a driver fails in every way, and the agent is killed at every step: nothing is
//! mounted twice, nothing is lost, nothing is left.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::super::kind::Form;
use super::fake::{FAULTS, FakeAgent, KILLED};
use super::request::VolumeRequest;
use super::request::tests::wanted;

/// What happens to a pod's volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Up(usize),
    Down(usize),
}

/// Two pods come and go, on one volume.
const LIFE: [Step; 4] = [Step::Up(0), Step::Up(1), Step::Down(0), Step::Down(1)];

fn volumes(form: Form) -> [VolumeRequest; 2] {
    ["a", "b"].map(|pod| VolumeRequest { form, grow_to: Some(5), ..wanted(pod, "h") })
}

fn run(agent: &FakeAgent, volumes: &[VolumeRequest; 2], step: Step) -> bool {
    match step {
        Step::Up(pod) => agent.set_up(&volumes[pod]).is_ok(),
        Step::Down(pod) => agent.tear_down(&volumes[pod]).is_ok(),
    }
}

/// The pods that use the volume after a number of steps.
fn wanted_after(steps: usize) -> Vec<usize> {
    let mut pods = Vec::new();
    for step in &LIFE[..steps] {
        match step {
            Step::Up(pod) => pods.push(*pod),
            Step::Down(pod) => pods.retain(|other| other != pod),
        }
    }
    pods
}

/// What is there is what `pods` need.
fn check(agent: &FakeAgent, form: Form, pods: &[usize], what: &str) {
    agent.node.check();
    assert_eq!(agent.node.published(), pods.len(), "{what}");
    assert_eq!(agent.node.staged(), usize::from(!pods.is_empty()), "{what}");
    let mounts = match form {
        Form::Filesystem if pods.is_empty() => 0,
        Form::Filesystem => 1 + pods.len(),
        Form::Block => pods.len(),
    };
    assert_eq!(agent.node.mounts().len(), mounts, "{what}: {:?}", agent.node.mounts());
    if pods.is_empty() {
        assert!(agent.left().is_empty(), "{what}: {:?}", agent.left());
    }
}

/// Makes the node as `pods` need it, as the agent does at each sync.
fn settle(agent: &FakeAgent, volumes: &[VolumeRequest; 2], pods: &[usize], what: &str) {
    for (pod, volume) in volumes.iter().enumerate() {
        let step = if pods.contains(&pod) { Step::Up(pod) } else { Step::Down(pod) };
        assert!(run(agent, volumes, step), "{what}: {step:?} of {}", volume.pod.uid.as_str());
    }
    agent.release_unused().unwrap();
}

#[test]
fn each_method_may_fail_in_each_way_at_each_step() {
    let mut count = 0;
    for form in [Form::Filesystem, Form::Block] {
        for method in ["capabilities", "stage", "publish", "expand", "unpublish", "unstage"] {
            for fault in FAULTS {
                for index in 0..LIFE.len() {
                    for is_given_up in [false, true] {
                        let what =
                            format!("{form:?} {method} {fault:?} at step {index}, given up: {is_given_up}");
                        let agent = FakeAgent::new();
                        let volumes = volumes(form);
                        for (number, step) in LIFE.into_iter().enumerate() {
                            if number != index {
                                assert!(run(&agent, &volumes, step), "{what}");
                                continue;
                            }
                            agent.node.fail(method, fault);
                            let is_done = run(&agent, &volumes, step);
                            // Not each step calls each method.
                            agent.node.forget_faults();
                            if is_done {
                                // A volume that is still staged does not keep its pod.
                                agent.release_unused().unwrap();
                            }
                            if is_given_up && let (false, Step::Up(pod)) = (is_done, step) {
                                // The pod is deleted before its volume is ready.
                                settle(&agent, &volumes, &wanted_after(number), &what);
                                check(&agent, form, &wanted_after(number), &what);
                                assert!(run(&agent, &volumes, Step::Up(pod)), "{what}");
                            } else if !is_done {
                                settle(&agent, &volumes, &wanted_after(number + 1), &what);
                            }
                            check(&agent, form, &wanted_after(number + 1), &what);
                            count += 1;
                        }
                        check(&agent, form, &[], &what);
                    }
                }
            }
        }
    }
    println!("{count} faults: nothing mounted twice, nothing lost, nothing left");
}

#[test]
fn agent_may_be_killed_at_each_step() {
    let mut count = 0;
    for form in [Form::Filesystem, Form::Block] {
        for call in 0.. {
            let mut agent = FakeAgent::new();
            let volumes = volumes(form);
            agent.node.kill_in(Some(call));
            let mut killed_at = None;
            for (number, step) in LIFE.into_iter().enumerate() {
                let what = format!("{form:?} killed at {call}, in {step:?}");
                let ended = catch_unwind(AssertUnwindSafe(|| run(&agent, &volumes, step)));
                match ended {
                    Ok(is_done) => assert!(is_done, "{what}"),
                    Err(panic) => {
                        assert_eq!(panic.downcast_ref::<&str>(), Some(&KILLED), "{what}");
                        killed_at = Some(number);
                        count += 1;
                        agent.restart();
                        // The pod that came may be wanted still, or be gone.
                        let pods = wanted_after(if call % 2 == 0 { number + 1 } else { number });
                        let pods: Vec<usize> = match step {
                            Step::Down(pod) => pods.into_iter().filter(|other| *other != pod).collect(),
                            Step::Up(_) => pods,
                        };
                        settle(&agent, &volumes, &pods, &what);
                        check(&agent, form, &pods, &what);
                        settle(&agent, &volumes, &wanted_after(number + 1), &what);
                    }
                }
                check(&agent, form, &wanted_after(number + 1), &what);
            }
            if killed_at.is_none() {
                break;
            }
        }
    }
    assert!(count > 50, "{count}");
    println!("{count} kills: nothing mounted twice, nothing lost, nothing left");
}
