//! The fault matrix: every CRI method that the agent uses, with every fault.
//!
//! `ImageFsInfo` and `RemoveImage` are in `images`: the image garbage collector makes its
//! first round after five minutes. Other faults of the event stream are in `event_stream`.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coracle::transport::grpc::Kind;
use serde_json::{Value, json};

use crate::support::fake_cri::{Gate, StreamFault, Wire};
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{is_ready, restarts, simple};
use crate::support::wait::wait_until;
use crate::{RICH, images, in_parallel, print_line, rich};

/// Failed steps are tried again after 10 to 15 s, failed pulls after 10, 20 and 40 s,
/// garbage collection after a minute, so that three failures of it alone take two.
const RETRIES: Duration = Duration::from_secs(400);

/// When a method is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// While the agent starts.
    Boot,
    /// While a pod starts.
    Start,
    /// While a pod stops.
    Removal,
    /// When the records of a stopped pod are removed.
    Collection,
    /// When probes check running containers.
    Probing,
    /// When a log is rotated.
    Rotation,
    /// When a user lists the images.
    Images,
}

/// A method at a stage.
pub(crate) type Case = (&'static str, Stage);

pub(crate) const CASES: &[Case] = &[
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

/// The only method with a stream of responses.
const STREAM: &str = "GetContainerEvents";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An error, three times.
    FailsThrice,
    IsAway,
    /// No response until another pod was started.
    Hangs,
    IsSlow,
    /// It is done, and the caller gets an error of the connection.
    LosesResponse,
    /// The connection ends while the call is under way; the runtime carries it out later.
    IsCut,
    /// As above, but the connection ends with random bytes.
    IsGarbled,
}

pub(crate) const FAULTS: &[Fault] = &[
    Fault::FailsThrice,
    Fault::IsAway,
    Fault::Hangs,
    Fault::IsSlow,
    Fault::LosesResponse,
    Fault::IsCut,
    Fault::IsGarbled,
];

impl Fault {
    fn is_on_the_wire(self) -> bool {
        matches!(self, Fault::IsCut | Fault::IsGarbled)
    }
}

struct ActiveFault<'a> {
    fault: Fault,
    method: &'static str,
    wire: Option<&'a Wire>,
    gate: Option<Gate>,
    calls_before: usize,
}

impl<'a> ActiveFault<'a> {
    fn begin(node: &FakeNode, wire: Option<&'a Wire>, fault: Fault, method: &'static str) -> ActiveFault<'a> {
        let fake = &node.fake;
        let calls_before = fake.count(method);
        let mut gate = None;
        match fault {
            Fault::FailsThrice => fake.fail_times(method, 3, Kind::Unknown, "it failed"),
            Fault::IsAway => fake.fail(method, Kind::Unavailable, "it is away"),
            Fault::IsSlow => fake.delay(method, Duration::from_secs(2)),
            // The response of a stream is its events.
            Fault::LosesResponse if method == STREAM => fake.set_stream_fault(StreamFault::Loses),
            Fault::LosesResponse => fake.lose_responses(method, 1),
            Fault::Hangs | Fault::IsCut | Fault::IsGarbled => gate = Some(fake.hang_next(method)),
        }
        ActiveFault { fault, method, wire, gate, calls_before }
    }

    /// Waits until the fault applied to a call.
    fn wait_applied(&self, node: &FakeNode) {
        wait_until(&format!("{} to be called", self.method), RETRIES, || match &self.gate {
            Some(gate) => gate.waiting() > 0,
            None => node.fake.count(self.method) > self.calls_before,
        });
    }

    /// Waits until the fault applied to a call and checks the agent meanwhile.
    fn check(&self, node: &FakeNode, stage: Stage) {
        self.wait_applied(node);
        match (self.fault, self.wire) {
            (Fault::IsCut, Some(wire)) => wire.cut(),
            (Fault::IsGarbled, Some(wire)) => wire.send_random_bytes(),
            _ => {}
        }
        node.assert_responsive();
        // A hanging call delays only its own pod: another pod starts meanwhile.
        if let (Fault::Hangs, Some(gate)) = (self.fault, &self.gate)
            && stage != Stage::Boot
        {
            node.apply(&simple("other"));
            node.assert_runs_once("other", &["main"]);
            assert!(gate.waiting() > 0, "{} hangs no more", self.method);
            node.assert_responsive();
        }
    }

    /// Waits until the fault is over, or ends it.
    fn end(self, node: &FakeNode) {
        match self.fault {
            Fault::FailsThrice | Fault::LosesResponse => {
                wait_until(&format!("{} to have failed often enough", self.method), RETRIES, || {
                    node.assert_no_duplicates();
                    // The end of a sandbox is the end of its containers: no third stop is due.
                    !node.fake.misbehaves(self.method)
                        || (["StopContainer", "ExecSync"].contains(&self.method)
                            && node.running("web").is_empty())
                });
                node.fake.behave(self.method);
                node.fake.set_stream_fault(StreamFault::None);
            }
            Fault::Hangs | Fault::IsCut | Fault::IsGarbled => self.gate.iter().for_each(Gate::open),
            // The agent must work with a slow runtime; it stays slow.
            Fault::IsSlow => {}
            Fault::IsAway => node.fake.behave(self.method),
        }
    }
}

/// An agent that rotates logs often, with a pod that must not be affected.
pub(crate) fn prepare() -> FakeNode {
    let node = FakeNode::prepare(rotation());
    node.fake.write_logs();
    node.apply(&simple("calm"));
    node
}

fn rotation() -> Value {
    json!({"containerLogMaxSize": "1Ki", "containerLogMonitorInterval": "3s"})
}

/// Brings the agent to the point where it is about to call the method of a stage; `fault` is
/// activated just before.
pub(crate) fn approach<T>(node: &mut FakeNode, stage: Stage, fault: impl FnOnce(&FakeNode) -> T) -> T {
    if stage == Stage::Boot {
        node.apply(&rich("web"));
        let active = fault(node);
        node.launch_agent();
        return active;
    }
    node.start_agent();
    node.wait_ready("calm");
    if stage != Stage::Start {
        node.apply(&rich("web"));
        node.assert_runs_once("web", &RICH);
    }
    if stage == Stage::Images {
        // Five seconds after its start the agent lists the images for itself, once: that call must not
        // take the fault.
        wait_until("the agent's own list of images", LONG, || node.fake.count("ListImages") > 0);
    }
    let active = fault(node);
    match stage {
        Stage::Boot | Stage::Images | Stage::Probing => {}
        Stage::Start => node.apply(&rich("web")),
        Stage::Removal | Stage::Collection => node.remove("web"),
        Stage::Rotation => fill_log(node, "web"),
    }
    active
}

/// Makes the log of a pod's newest container longer than it may be.
fn fill_log(node: &FakeNode, name: &str) {
    let path = node.containers(name).pop().unwrap().status.log_path;
    let line = "2026-01-02T03:04:05.000000006Z stdout F a line of the log\n";
    OpenOptions::new().append(true).open(path).unwrap().write_all(line.repeat(40).as_bytes()).unwrap();
}

fn run(&(method, stage): &Case, fault: Fault) {
    let mut node = prepare();
    let wire = fault.is_on_the_wire().then(|| Wire::start(&node.fake.socket()));
    if let Some(wire) = &wire {
        let mut config = rotation();
        config["containerRuntimeEndpoint"] = json!(wire.endpoint());
        node.configure(config);
    }
    let active = approach(&mut node, stage, |node| ActiveFault::begin(node, wire.as_ref(), fault, method));
    let calm = node.running("calm");
    if stage == Stage::Images {
        ask_for_images(&node, active);
    } else {
        active.check(&node, stage);
        active.end(&node);
    }
    match stage {
        Stage::Removal | Stage::Collection => node.wait_gone("web", RETRIES),
        _ => {
            node.wait_pod("web", "ready", RETRIES, is_ready);
            node.assert_runs_once("web", &RICH);
        }
    }
    if stage == Stage::Rotation {
        wait_until("the log to be reopened", LONG, || {
            let journal = node.fake.journal();
            journal.iter().any(|entry| entry.method == "ReopenContainerLog" && entry.error.is_none())
        });
    }
    if stage != Stage::Boot {
        assert_eq!(node.running("calm"), calm, "the pod next door was disturbed");
    }
    if method == STREAM {
        // Changes after the fault are noticed.
        node.fake.kill_container(&node.running("web")["two"][0], 3);
        node.wait_pod("web", "restarted", LONG, |pod| restarts(pod, "two") == 1 && is_ready(pod));
    }
    node.wait_healthy();
    assert_known(&node);
    node.finish();
}

/// Fails when the agent calls a method that is missing in the matrix.
fn assert_known(node: &FakeNode) {
    let known: BTreeSet<&str> =
        CASES.iter().map(|case| case.0).chain(images::METHODS.iter().copied()).collect();
    let unknown: Vec<_> = node.fake.counts().into_keys().filter(|method| !known.contains(method)).collect();
    assert!(unknown.is_empty(), "not in the fault matrix: {unknown:?}");
}

/// `coracle images` fails like the call; the next one works.
fn ask_for_images(node: &FakeNode, active: ActiveFault<'_>) {
    let fault = active.fault;
    let code = std::thread::scope(|scope| {
        let running = scope.spawn(|| node.command(&["images"]).status.code());
        active.check(node, Stage::Images);
        if fault == Fault::IsAway {
            let code = running.join().unwrap();
            active.end(node);
            return code;
        }
        if fault == Fault::FailsThrice {
            while node.fake.misbehaves("ListImages") {
                assert_eq!(node.command(&["images"]).status.code(), Some(1));
            }
        }
        active.end(node);
        running.join().unwrap()
    });
    let succeeds = matches!(fault, Fault::Hangs | Fault::IsSlow);
    assert_eq!(code, Some(if succeeds { 0 } else { 1 }));
    wait_until("coracle images to work again", LONG, || node.command(&["images"]).status.success());
}

fn row(fault: Fault) {
    in_parallel(CASES, |case| run(case, fault));
    passed(CASES.len());
}

/// Counts runs that passed, those of `images` too, and prints the matrix when it is complete.
pub(crate) fn passed(runs: usize) {
    static PASSED: AtomicUsize = AtomicUsize::new(0);
    let whole = (CASES.len() + images::METHODS.len()) * FAULTS.len();
    if PASSED.fetch_add(runs, Ordering::Relaxed) + runs == whole {
        let methods: BTreeSet<_> =
            CASES.iter().map(|case| case.0).chain(images::METHODS.iter().copied()).collect();
        let stages = CASES.len() + images::METHODS.len();
        print_line(&format!(
            "fault matrix: {} methods at {stages} stages x {} faults = {whole} runs, all passed",
            methods.len(),
            FAULTS.len()
        ));
    }
}

#[test]
fn pods_recover_when_each_method_fails_three_times() {
    row(Fault::FailsThrice);
}

#[test]
fn pods_recover_when_each_method_hangs() {
    row(Fault::Hangs);
}

#[test]
fn pods_start_when_each_method_is_slow() {
    row(Fault::IsSlow);
}

#[test]
fn pods_recover_when_each_method_is_unavailable() {
    row(Fault::IsAway);
}

#[test]
fn pods_recover_when_each_method_loses_its_response() {
    row(Fault::LosesResponse);
}

#[test]
fn pods_recover_when_each_method_is_disconnected() {
    row(Fault::IsCut);
}

#[test]
fn pods_recover_when_each_method_returns_random_bytes() {
    row(Fault::IsGarbled);
}
