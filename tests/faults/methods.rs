//! Every CRI method that the agent uses, times every misbehavior.
//!
//! Two methods are left out: the image garbage collector, which calls `ImageFsInfo` and
//! `RemoveImage`, makes its first round after five minutes; it has tests of its own.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Duration;

use coracle::transport::grpc::Kind;
use serde_json::json;

use crate::support::fake_cri::Gate;
use crate::support::node::{is_ready, simple};
use crate::support::solo::{LONG, Solo};
use crate::support::wait::wait_until;
use crate::{BOTH, side_by_side, two};

/// Failed steps are tried again after 10 to 15 s, failed pulls after 10, 20 and 40 s,
/// garbage after a minute.
const RETRIES: Duration = Duration::from_secs(150);

/// When a method is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// While the agent starts.
    Boot,
    /// While a pod starts.
    Start,
    /// While a pod stops.
    Removal,
    /// When what a stopped pod left is removed.
    Collection,
    /// When a log is rotated.
    Rotation,
    /// When somebody asks for the images.
    Images,
}

/// A method at a stage.
pub type Case = (&'static str, Stage);

pub const CASES: &[Case] = &[
    ("Version", Stage::Boot),
    ("Status", Stage::Boot),
    ("ListPodSandbox", Stage::Boot),
    ("ListContainers", Stage::Boot),
    ("Status", Stage::Start),
    ("ListPodSandbox", Stage::Start),
    ("ListContainers", Stage::Start),
    ("RunPodSandbox", Stage::Start),
    ("PodSandboxStatus", Stage::Start),
    ("ImageStatus", Stage::Start),
    ("PullImage", Stage::Start),
    ("CreateContainer", Stage::Start),
    ("StartContainer", Stage::Start),
    ("ContainerStatus", Stage::Start),
    ("StopContainer", Stage::Removal),
    ("StopPodSandbox", Stage::Removal),
    ("RemoveContainer", Stage::Collection),
    ("RemovePodSandbox", Stage::Collection),
    ("ReopenContainerLog", Stage::Rotation),
    ("ListImages", Stage::Images),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    FailsOnce,
    FailsThrice,
    Hangs,
    IsSlow,
    IsAway,
}

/// A fault that is on.
struct Active {
    fault: Fault,
    method: &'static str,
    gate: Option<Gate>,
    calls_before: usize,
}

impl Active {
    fn begin(solo: &Solo, fault: Fault, method: &'static str) -> Active {
        let fake = &solo.fake;
        let calls_before = fake.count(method);
        let mut gate = None;
        match fault {
            Fault::FailsOnce => fake.fail_times(method, 1, Kind::Unknown, "it failed"),
            Fault::FailsThrice => fake.fail_times(method, 3, Kind::Unknown, "it failed"),
            Fault::Hangs => gate = Some(fake.hang_next(method)),
            Fault::IsSlow => fake.delay(method, Duration::from_secs(2)),
            Fault::IsAway => fake.fail(method, Kind::Unavailable, "it is away"),
        }
        Active { fault, method, gate, calls_before }
    }

    /// Waits until a call has met the fault.
    fn wait_met(&self, solo: &Solo) {
        wait_until(&format!("{} to be called", self.method), RETRIES, || match &self.gate {
            Some(gate) => gate.waiting() > 0,
            None => solo.fake.count(self.method) > self.calls_before,
        });
    }

    /// Waits until a call has met the fault and looks how the agent bears it.
    fn look(&self, solo: &Solo, stage: Stage) {
        self.wait_met(solo);
        solo.assert_answers();
        // A hanging call is its pod's affair: another pod starts meanwhile.
        if let Some(gate) = &self.gate
            && stage != Stage::Boot
        {
            solo.apply(&simple("other"));
            solo.assert_runs_once("other", &["main"]);
            assert!(gate.waiting() > 0, "{} hangs no more", self.method);
            solo.assert_answers();
        }
    }

    /// Waits until the fault is over, or ends it.
    fn end(self, solo: &Solo) {
        match self.fault {
            Fault::FailsOnce | Fault::FailsThrice => {
                wait_until(&format!("{} to have failed often enough", self.method), RETRIES, || {
                    solo.assert_no_twins();
                    // The end of a sandbox is the end of its containers: no third stop is due.
                    !solo.fake.misbehaves(self.method)
                        || (self.method == "StopContainer" && solo.running("web").is_empty())
                });
                solo.fake.behave(self.method);
            }
            Fault::Hangs => self.gate.iter().for_each(Gate::open),
            // A slow runtime has to be good enough; it stays slow.
            Fault::IsSlow => {}
            Fault::IsAway => solo.fake.behave(self.method),
        }
    }
}

/// An agent whose logs are rotated often, with a pod that nothing may happen to.
pub fn prepare() -> Solo {
    let solo = Solo::prepare(json!({"containerLogMaxSize": "1Ki", "containerLogMonitorInterval": "3s"}));
    solo.fake.write_logs();
    solo.apply(&simple("calm"));
    solo
}

/// Brings the agent to the point where it is about to call the method of a stage, which
/// `fault` spoils just before.
pub fn approach<T>(solo: &mut Solo, stage: Stage, fault: impl FnOnce(&Solo) -> T) -> T {
    if stage == Stage::Boot {
        solo.apply(&two("web"));
        let active = fault(solo);
        solo.launch_agent();
        return active;
    }
    solo.start_agent();
    solo.wait_ready("calm");
    if stage != Stage::Start {
        solo.apply(&two("web"));
        solo.assert_runs_once("web", &BOTH);
    }
    let active = fault(solo);
    match stage {
        Stage::Boot | Stage::Images => {}
        Stage::Start => solo.apply(&two("web")),
        Stage::Removal | Stage::Collection => solo.remove("web"),
        Stage::Rotation => fill_log(solo, "web"),
    }
    active
}

/// Makes the log of a pod's newest container longer than it may be.
fn fill_log(solo: &Solo, name: &str) {
    let path = solo.containers(name).pop().unwrap().status.log_path;
    let line = "2026-01-02T03:04:05.000000006Z stdout F a line of the log\n";
    OpenOptions::new().append(true).open(path).unwrap().write_all(line.repeat(40).as_bytes()).unwrap();
}

fn run(&(method, stage): &Case, fault: Fault) {
    let mut solo = prepare();
    let active = approach(&mut solo, stage, |solo| Active::begin(solo, fault, method));
    let calm = solo.running("calm");
    if stage == Stage::Images {
        ask_for_images(&solo, active);
    } else {
        active.look(&solo, stage);
        active.end(&solo);
    }
    match stage {
        Stage::Removal | Stage::Collection => solo.wait_gone("web", RETRIES),
        _ => {
            solo.wait_pod("web", "ready", RETRIES, is_ready);
            solo.assert_runs_once("web", &BOTH);
        }
    }
    if stage == Stage::Rotation {
        wait_until("the log to be reopened", LONG, || {
            let journal = solo.fake.journal();
            journal.iter().any(|entry| entry.method == "ReopenContainerLog" && entry.error.is_none())
        });
    }
    if stage != Stage::Boot {
        assert_eq!(solo.running("calm"), calm, "the pod next door was disturbed");
    }
    solo.wait_healthy();
    solo.finish();
}

/// `coracle images` shares the fate of the call; the next one is as good as new.
fn ask_for_images(solo: &Solo, active: Active) {
    let is_slow = active.fault == Fault::IsSlow;
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| solo.command(&["images"]));
        active.look(solo, Stage::Images);
        if !matches!(active.fault, Fault::FailsOnce | Fault::FailsThrice) {
            if active.fault == Fault::IsAway {
                assert_eq!(asked.join().unwrap().status.code(), Some(1));
                active.end(solo);
            } else {
                active.end(solo);
                assert!(asked.join().unwrap().status.success());
            }
        }
    });
    wait_until("coracle images to work again", LONG, || solo.command(&["images"]).status.success());
    assert!(is_slow || !solo.fake.misbehaves("ListImages"));
}

#[test]
fn every_method_fails_once() {
    side_by_side(CASES, |case| run(case, Fault::FailsOnce));
}

#[test]
fn every_method_fails_three_times() {
    side_by_side(CASES, |case| run(case, Fault::FailsThrice));
}

#[test]
fn every_method_hangs() {
    side_by_side(CASES, |case| run(case, Fault::Hangs));
}

#[test]
fn every_method_is_slow() {
    side_by_side(CASES, |case| run(case, Fault::IsSlow));
}

#[test]
fn every_method_is_unavailable() {
    side_by_side(CASES, |case| run(case, Fault::IsAway));
}
