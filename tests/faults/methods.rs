//! The fault matrix: every CRI method that the agent uses, times every misbehavior.
//!
//! `ImageFsInfo` and `RemoveImage` are in `images`: the image garbage collector makes its
//! first round after five minutes. What else the stream of events can do is in `stream`.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coracle::transport::grpc::Kind;
use serde_json::{Value, json};

use crate::support::fake_cri::{Gate, StreamFault, Wire};
use crate::support::node::{is_ready, restarts, simple};
use crate::support::solo::{LONG, Solo};
use crate::support::wait::wait_until;
use crate::{RICH, images, rich, side_by_side, tell};

/// Failed steps are tried again after 10 to 15 s, failed pulls after 10, 20 and 40 s,
/// garbage after a minute, so that three failures of it alone take two.
const RETRIES: Duration = Duration::from_secs(240);

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
    /// When probes look at what runs.
    Probing,
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
    (STREAM, Stage::Boot),
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
    // The hook after the start, the probes, and the hook before the end.
    ("ExecSync", Stage::Start),
    ("ExecSync", Stage::Probing),
    ("ExecSync", Stage::Removal),
    ("StopContainer", Stage::Removal),
    ("StopPodSandbox", Stage::Removal),
    ("RemoveContainer", Stage::Collection),
    ("RemovePodSandbox", Stage::Collection),
    ("ReopenContainerLog", Stage::Rotation),
    ("ListImages", Stage::Images),
];

/// The one method with many answers.
const STREAM: &str = "GetContainerEvents";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An error, three times.
    FailsThrice,
    IsAway,
    /// No answer until another pod was started.
    Hangs,
    IsSlow,
    /// It is done, and the caller is told that the connection broke.
    LosesAnswer,
    /// The connection ends while the call is under way; the runtime carries it out later.
    IsCut,
    /// As above, but the connection ends in noise.
    IsGarbled,
}

pub const FAULTS: &[Fault] = &[
    Fault::FailsThrice,
    Fault::IsAway,
    Fault::Hangs,
    Fault::IsSlow,
    Fault::LosesAnswer,
    Fault::IsCut,
    Fault::IsGarbled,
];

impl Fault {
    fn is_on_the_wire(self) -> bool {
        matches!(self, Fault::IsCut | Fault::IsGarbled)
    }
}

/// A fault that is on.
struct Active<'a> {
    fault: Fault,
    method: &'static str,
    wire: Option<&'a Wire>,
    gate: Option<Gate>,
    calls_before: usize,
}

impl<'a> Active<'a> {
    fn begin(solo: &Solo, wire: Option<&'a Wire>, fault: Fault, method: &'static str) -> Active<'a> {
        let fake = &solo.fake;
        let calls_before = fake.count(method);
        let mut gate = None;
        match fault {
            Fault::FailsThrice => fake.fail_times(method, 3, Kind::Unknown, "it failed"),
            Fault::IsAway => fake.fail(method, Kind::Unavailable, "it is away"),
            Fault::IsSlow => fake.delay(method, Duration::from_secs(2)),
            // The answer of a stream is its events.
            Fault::LosesAnswer if method == STREAM => fake.spoil_stream(StreamFault::Loses),
            Fault::LosesAnswer => fake.lose_answers(method, 1),
            Fault::Hangs | Fault::IsCut | Fault::IsGarbled => gate = Some(fake.hang_next(method)),
        }
        Active { fault, method, wire, gate, calls_before }
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
        match (self.fault, self.wire) {
            (Fault::IsCut, Some(wire)) => wire.cut(),
            (Fault::IsGarbled, Some(wire)) => wire.spoil(),
            _ => {}
        }
        solo.assert_answers();
        // A hanging call is its pod's affair: another pod starts meanwhile.
        if let (Fault::Hangs, Some(gate)) = (self.fault, &self.gate)
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
            Fault::FailsThrice | Fault::LosesAnswer => {
                wait_until(&format!("{} to have failed often enough", self.method), RETRIES, || {
                    solo.assert_no_twins();
                    // The end of a sandbox is the end of its containers: no third stop is due.
                    !solo.fake.misbehaves(self.method)
                        || (["StopContainer", "ExecSync"].contains(&self.method)
                            && solo.running("web").is_empty())
                });
                solo.fake.behave(self.method);
                solo.fake.spoil_stream(StreamFault::None);
            }
            Fault::Hangs | Fault::IsCut | Fault::IsGarbled => self.gate.iter().for_each(Gate::open),
            // A slow runtime has to be good enough; it stays slow.
            Fault::IsSlow => {}
            Fault::IsAway => solo.fake.behave(self.method),
        }
    }
}

/// An agent whose logs are rotated often, with a pod that nothing may happen to.
pub fn prepare() -> Solo {
    let solo = Solo::prepare(rotation());
    solo.fake.write_logs();
    solo.apply(&simple("calm"));
    solo
}

fn rotation() -> Value {
    json!({"containerLogMaxSize": "1Ki", "containerLogMonitorInterval": "3s"})
}

/// Brings the agent to the point where it is about to call the method of a stage, which
/// `fault` spoils just before.
pub fn approach<T>(solo: &mut Solo, stage: Stage, fault: impl FnOnce(&Solo) -> T) -> T {
    if stage == Stage::Boot {
        solo.apply(&rich("web"));
        let active = fault(solo);
        solo.launch_agent();
        return active;
    }
    solo.start_agent();
    solo.wait_ready("calm");
    if stage != Stage::Start {
        solo.apply(&rich("web"));
        solo.assert_runs_once("web", &RICH);
    }
    let active = fault(solo);
    match stage {
        Stage::Boot | Stage::Images | Stage::Probing => {}
        Stage::Start => solo.apply(&rich("web")),
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
    let wire = fault.is_on_the_wire().then(|| Wire::start(&solo.fake.socket()));
    if let Some(wire) = &wire {
        let mut config = rotation();
        config["containerRuntimeEndpoint"] = json!(wire.endpoint());
        solo.configure(config);
    }
    let active = approach(&mut solo, stage, |solo| Active::begin(solo, wire.as_ref(), fault, method));
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
            solo.assert_runs_once("web", &RICH);
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
    if method == STREAM {
        // What happens after the fault is seen.
        solo.fake.kill_container(&solo.running("web")["two"][0], 3);
        solo.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "two") == 1 && is_ready(pod));
    }
    solo.wait_healthy();
    assert_known(&solo);
    solo.finish();
}

/// A method that the agent has learned to call is a row that the matrix lacks.
fn assert_known(solo: &Solo) {
    let known: BTreeSet<&str> =
        CASES.iter().map(|case| case.0).chain(images::METHODS.iter().copied()).collect();
    let unknown: Vec<_> = solo.fake.counts().into_keys().filter(|method| !known.contains(method)).collect();
    assert!(unknown.is_empty(), "not in the fault matrix: {unknown:?}");
}

/// `coracle images` shares the fate of the call; the next one is as good as new.
fn ask_for_images(solo: &Solo, active: Active<'_>) {
    let fault = active.fault;
    let code = std::thread::scope(|scope| {
        let asked = scope.spawn(|| solo.command(&["images"]).status.code());
        active.look(solo, Stage::Images);
        if fault == Fault::IsAway {
            let code = asked.join().unwrap();
            active.end(solo);
            return code;
        }
        if fault == Fault::FailsThrice {
            while solo.fake.misbehaves("ListImages") {
                assert_eq!(solo.command(&["images"]).status.code(), Some(1));
            }
        }
        active.end(solo);
        asked.join().unwrap()
    });
    let succeeds = matches!(fault, Fault::Hangs | Fault::IsSlow);
    assert_eq!(code, Some(if succeeds { 0 } else { 1 }));
    wait_until("coracle images to work again", LONG, || solo.command(&["images"]).status.success());
}

fn row(fault: Fault) {
    side_by_side(CASES, |case| run(case, fault));
    passed(CASES.len());
}

/// Counts runs that passed, those of `images` too, and tells of the matrix when it is full.
pub fn passed(runs: usize) {
    static PASSED: AtomicUsize = AtomicUsize::new(0);
    let whole = (CASES.len() + images::METHODS.len()) * FAULTS.len();
    if PASSED.fetch_add(runs, Ordering::Relaxed) + runs == whole {
        let methods: BTreeSet<_> =
            CASES.iter().map(|case| case.0).chain(images::METHODS.iter().copied()).collect();
        let stages = CASES.len() + images::METHODS.len();
        tell(&format!(
            "fault matrix: {} methods at {stages} stages x {} faults = {whole} runs, all passed",
            methods.len(),
            FAULTS.len()
        ));
    }
}

#[test]
fn every_method_fails_three_times() {
    row(Fault::FailsThrice);
}

#[test]
fn every_method_hangs() {
    row(Fault::Hangs);
}

#[test]
fn every_method_is_slow() {
    row(Fault::IsSlow);
}

#[test]
fn every_method_is_unavailable() {
    row(Fault::IsAway);
}

#[test]
fn every_method_loses_its_answer() {
    row(Fault::LosesAnswer);
}

#[test]
fn every_method_is_cut_off() {
    row(Fault::IsCut);
}

#[test]
fn every_method_is_answered_by_noise() {
    row(Fault::IsGarbled);
}
