//! The agent stops within five seconds, whatever the runtime does, and the pods run on.

use crate::methods::{CASES, Case, Stage, approach, prepare};
use crate::support::solo::{LONG, Solo};
use crate::support::wait::{wait_for, wait_until};
use crate::{BOTH, RICH, side_by_side, two};

fn stop_while_it_hangs(&(method, stage): &Case) {
    let mut solo = prepare();
    let gate = approach(&mut solo, stage, |solo| solo.fake.hang(method));
    std::thread::scope(|scope| {
        if stage == Stage::Images {
            // Fails when the agent goes; with what is not the point here.
            scope.spawn(|| solo.command(&["images"]));
        }
        wait_until(&format!("{method} to hang"), LONG, || gate.waiting() > 0);
        solo.signal("TERM");
    });
    solo.stop_agent();
    solo.fake.behave(method);
    solo.start_agent();
    match stage {
        Stage::Removal | Stage::Collection => solo.wait_gone("web", LONG),
        _ => solo.assert_runs_once("web", &RICH),
    }
    solo.finish();
}

#[test]
fn no_hanging_method_delays_a_stop() {
    side_by_side(CASES, stop_while_it_hangs);
}

#[test]
fn a_stop_while_the_runtime_is_down() {
    let mut solo = Solo::start();
    solo.apply(&two("web"));
    solo.assert_runs_once("web", &BOTH);
    let before = solo.running("web");
    solo.fake.go_down();
    wait_until("the agent to notice", LONG, || solo.health("/healthz").0 == 500);
    solo.stop_agent();
    solo.fake.go_up();
    solo.start_agent();
    solo.assert_runs_once("web", &BOTH);
    assert_eq!(solo.running("web"), before);
    solo.finish();
}

#[test]
fn a_quit_signal_shows_every_thread() {
    let solo = Solo::start();
    let gate = solo.fake.hang("PullImage");
    solo.apply(&two("web"));
    wait_until("the pull to hang", LONG, || gate.waiting() > 0);
    solo.signal("QUIT");
    wait_until("the dump", LONG, || solo.log().contains(" threads:"));
    let uid = wait_for("the pod's UID", LONG, || solo.pod("web")?.metadata.uid);
    let worker = format!("pod/{}", &uid[..8]);
    wait_until("all threads to be named", LONG, || {
        let log = solo.log();
        ["main", "sync", "observe", "clean", "src-file", &worker]
            .iter()
            .all(|name| log.lines().any(|line| line.contains(&format!("  {name} ")) && line.contains(" s  ")))
    });
    solo.assert_answers();
    gate.open();
    solo.fake.behave("PullImage");
    solo.assert_runs_once("web", &BOTH);
    solo.finish();
}
