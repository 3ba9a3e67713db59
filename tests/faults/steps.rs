//! The step table: every step in which the worker of a pod blocks, with every reason to end it. The
//! step ends, or the time that it may take shrinks, and nothing is left over. Each step would last an
//! hour or longer by itself.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::plugin_node::put_attachable_volume;
use crate::support::fake_api::FakeApi;
use crate::support::fake_node::{FakeNode, LONG, full_name};
use crate::support::fake_plugins::{CLAIM_DRIVER, CarriedOut, DRIVER, FakePlugins, Gate, RESOURCE};
use crate::support::logind::FakeSystemBus;
use crate::support::node::{FOREVER, NODE, busybox, pod};
use crate::support::wait::{pause, wait_for, wait_until};
use crate::{SmallDisk, in_parallel, print_line};

/// The wait for the ends of all steps of a node; the agent needs about a second, and the evictions of
/// a node come one after the other.
const LIMIT: Duration = Duration::from_secs(480);

/// In seconds; longer than any test.
const HOUR: i64 = 3600;

/// A step in which the worker of a pod blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// The pull of an image.
    Pull,
    /// `RunPodSandbox` with a CNI plugin that hangs.
    Sandbox,
    /// The set-up of a volume.
    Volume,
    /// The wait for the attachment of a volume.
    Attachment,
    /// `Allocate` of a device plugin.
    Devices,
    /// The preparation of a resource claim.
    Claim,
    PostStart,
    /// The stop of one container, whose liveness probe has failed, with a long grace period.
    SingleKill,
    /// The stop of a pod with a long grace period.
    PodKill,
    /// The hook before that.
    PreStop,
}

const STEPS: [Step; 10] = [
    Step::Pull,
    Step::Sandbox,
    Step::Volume,
    Step::Attachment,
    Step::Devices,
    Step::Claim,
    Step::PostStart,
    Step::SingleKill,
    Step::PodKill,
    Step::PreStop,
];

/// A reason to end a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    Deletion,
    /// A second deletion with a shorter grace period.
    ShorterDeletion,
    ForcedDeletion,
    /// The manifest of a static pod was removed.
    Removal,
    /// The manifest of a static pod was replaced.
    Replacement,
    /// Another client has set a terminal phase.
    TerminalPhase,
    SoftEviction,
    HardEviction,
    Preemption,
    Shutdown,
    AgentStop,
}

const REASONS: [Reason; 11] = [
    Reason::Deletion,
    Reason::ShorterDeletion,
    Reason::ForcedDeletion,
    Reason::Removal,
    Reason::Replacement,
    Reason::TerminalPhase,
    Reason::SoftEviction,
    Reason::HardEviction,
    Reason::Preemption,
    Reason::Shutdown,
    Reason::AgentStop,
];

impl Step {
    /// Whether the pod is being stopped in this step.
    fn is_stop(self) -> bool {
        matches!(self, Step::PodKill | Step::PreStop)
    }

    /// The name of the pod in this step.
    fn name(self) -> &'static str {
        match self {
            Step::Pull => "pull",
            Step::Sandbox => "endless-sandbox",
            Step::Volume => "volume",
            Step::Attachment => "attachment",
            Step::Devices => "devices",
            Step::Claim => "claim",
            Step::PostStart => "post-start",
            Step::SingleKill => "single-kill",
            Step::PodKill => "pod-kill",
            Step::PreStop => "pre-stop",
        }
    }

    /// The UID of the pod, unless it is static. Its beginning is in the name of the worker's thread.
    fn uid(self) -> String {
        format!("57e9{:04x}-0000-4000-8000-000000000000", self as u32)
    }
}

impl Reason {
    fn is_for_static_pods(self) -> bool {
        matches!(self, Reason::Removal | Reason::Replacement)
    }
}

/// Why there is no such cell.
fn impossible(step: Step, reason: Reason) -> Option<&'static str> {
    use Reason::{Preemption, ShorterDeletion, TerminalPhase};
    match (step, reason) {
        (Step::Attachment | Step::Claim, reason) if reason.is_for_static_pods() => {
            Some("a static pod has no claims")
        }
        (Step::Volume, reason) if reason.is_for_static_pods() => {
            Some("a static pod has no volume of a driver")
        }
        (step, reason) if step.is_stop() && reason.is_for_static_pods() => {
            Some("a manifest that goes has no grace period of its own")
        }
        (step, TerminalPhase | Preemption) if step.is_stop() => Some("it has no grace period of its own"),
        (step, ShorterDeletion) if !step.is_stop() => Some("the first deletion has ended the step"),
        _ => None,
    }
}

/// The pod of a step. Only the pods that are stopped in it have a long grace period.
fn manifest(step: Step, reason: Reason) -> Value {
    let mut main = busybox("main", FOREVER);
    main["resources"] = json!({"requests": {"cpu": "100m"}});
    let exec = |name: &str| json!({"exec": {"command": [name, step.name()]}});
    match step {
        Step::Pull => {
            main["image"] = json!("registry.test/endless:1");
            main["imagePullPolicy"] = json!("Always");
        }
        Step::Sandbox => {}
        Step::Volume => main["volumeMounts"] = json!([{"name": "own", "mountPath": "/own"}]),
        Step::Attachment => main["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]),
        Step::Devices => main["resources"]["limits"] = json!({RESOURCE: "1"}),
        Step::Claim => main["resources"]["claims"] = json!([{"name": "gadget"}]),
        Step::PostStart => main["lifecycle"] = json!({"postStart": exec("endless")}),
        Step::SingleKill => {
            main["command"] = json!(["stubborn"]);
            let mut probe = exec("fails");
            probe["periodSeconds"] = json!(1);
            probe["failureThreshold"] = json!(1);
            probe["terminationGracePeriodSeconds"] = json!(HOUR);
            main["livenessProbe"] = probe;
        }
        Step::PodKill => main["command"] = json!(["stubborn"]),
        Step::PreStop => main["lifecycle"] = json!({"preStop": exec("endless")}),
    }
    let mut pod = pod(step.name(), json!([main]));
    let spec = &mut pod["spec"];
    spec["automountServiceAccountToken"] = json!(false);
    if !reason.is_for_static_pods() {
        pod["metadata"]["uid"] = json!(step.uid());
    }
    let spec = &mut pod["spec"];
    match step {
        Step::Volume => {
            spec["volumes"] = json!([{"name": "own", "csi": {"driver": DRIVER}}]);
        }
        Step::Attachment => {
            spec["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "far"}}]);
        }
        Step::Claim => {
            spec["resourceClaims"] = json!([{"name": "gadget", "resourceClaimName": "gadget"}]);
        }
        Step::PodKill | Step::PreStop => {
            spec["terminationGracePeriodSeconds"] = json!(HOUR);
            if reason == Reason::Deletion {
                // It is stopped before it is deleted.
                spec["activeDeadlineSeconds"] = json!(1);
            }
        }
        _ => {}
    }
    pod
}

/// A node with a pod in each step.
struct Fixture {
    node: FakeNode,
    plugins: FakePlugins,
    gates: Vec<Gate>,
    bus: Option<FakeSystemBus>,
    reason: Reason,
    /// The steps, and the UIDs of their pods.
    steps: BTreeMap<Step, String>,
    /// The file system of the agent's directories, which can be filled.
    disk: Option<SmallDisk>,
}

impl Fixture {
    fn new(reason: Reason) -> Fixture {
        let config = match reason {
            Reason::SoftEviction => json!({
                "evictionSoft": {"nodefs.available": "50%"},
                "evictionSoftGracePeriod": {"nodefs.available": "1s"},
                "evictionMaxPodGracePeriod": 2,
                "evictionPressureTransitionPeriod": "1s",
            }),
            Reason::HardEviction => json!({
                "evictionHard": {"nodefs.available": "50%"},
                "evictionPressureTransitionPeriod": "1s",
            }),
            Reason::Shutdown => json!({"shutdownGracePeriod": "4s"}),
            _ => json!({}),
        };
        let mut node = FakeNode::prepare(config);
        node.fake.on_exec(|_, command| {
            let code = i32::from(command.first().is_some_and(|word| word == "fails"));
            (code, Vec::new(), Vec::new())
        });
        let is_eviction = matches!(reason, Reason::SoftEviction | Reason::HardEviction);
        let disk = is_eviction.then(|| SmallDisk::mount(&node));
        let bus = (reason == Reason::Shutdown).then(|| {
            let mut bus = FakeSystemBus::new(&node.path("dbus"), Duration::from_secs(60));
            bus.start();
            node.set_variable("DBUS_SYSTEM_BUS_ADDRESS", &bus.address());
            bus
        });
        let node = node.joined(create_objects);
        let mut plugins = FakePlugins::new(&node.root());
        plugins.start();
        let methods = [
            ("NodePublishVolume", CarriedOut::AfterwardsOnly),
            ("Allocate", CarriedOut::Never),
            ("NodePrepareResources", CarriedOut::AfterwardsOnly),
        ];
        let gates = methods.map(|(method, carried_out)| plugins.hang_next(method, carried_out)).into();
        let steps = BTreeMap::new();
        let fixture = Fixture { node, plugins, gates, bus, reason, steps, disk };
        crate::plugin_node::wait_registered(&fixture.node);
        if let Some(bus) = &fixture.bus {
            wait_until("the lock to be taken", LONG, || bus.locks() == 1);
        }
        fixture
    }

    fn path(step: Step) -> String {
        FakeNode::pod_path(step.name())
    }

    /// Brings a pod into the step.
    fn enter(&mut self, step: Step) {
        let (node, name) = (&self.node, step.name());
        let manifest = manifest(step, self.reason);
        if self.reason.is_for_static_pods() {
            node.apply(&manifest);
        } else {
            node.bind(&manifest);
        }
        let called = |method: &str, text: &str| {
            let journal = node.fake.journal();
            journal.iter().any(|entry| entry.method == method && entry.request.to_string().contains(text))
        };
        let id =
            || node.containers(name).pop().map_or_else(|| "-".to_owned(), |container| container.status.id);
        if step.is_stop() {
            wait_until("the pod to run", LONG, || !node.running(name).is_empty());
            if self.reason != Reason::Deletion {
                node.api().delete_pod(&Fixture::path(step));
            }
        }
        wait_until(&format!("the step {step:?}"), LONG, || match step {
            Step::Pull => called("PullImage", "endless"),
            Step::Sandbox => called("RunPodSandbox", name),
            Step::Volume => self.plugins.count("NodePublishVolume").faulty > 0,
            Step::Attachment => node.root().join("pods").join(step.uid()).exists(),
            Step::Devices => self.plugins.count("Allocate").faulty > 0,
            Step::Claim => self.plugins.count("NodePrepareResources").faulty > 0,
            Step::PostStart | Step::PreStop => called("ExecSync", &format!("\"endless\",\"{name}\"")),
            Step::SingleKill | Step::PodKill => called("StopContainer", &id()),
        });
        let mut uid = step.uid();
        if self.reason.is_for_static_pods() {
            uid = wait_for("the pod's UID", LONG, || node.pod(name)?.metadata.uid);
        }
        self.steps.insert(step, uid);
    }

    /// Gives the reason to all pods at once.
    fn give_reason(&mut self) {
        let api = self.node.api();
        let steps: Vec<Step> = self.steps.keys().copied().collect();
        for step in &steps {
            let (path, name) = (Fixture::path(*step), step.name());
            match self.reason {
                Reason::Deletion | Reason::ShorterDeletion => api.delete_pod_within(&path, 2),
                Reason::ForcedDeletion => api.delete_pod_within(&path, 0),
                Reason::Removal => self.node.remove(name),
                Reason::Replacement => {
                    let mut main = busybox("main", FOREVER);
                    main["env"] = json!([{"name": "VERSION", "value": "2"}]);
                    self.node.apply(&pod(name, json!([main])));
                }
                Reason::TerminalPhase => {
                    api.edit(&path, |pod| pod["status"]["phase"] = json!("Failed"));
                }
                _ => {}
            }
        }
        match self.reason {
            Reason::SoftEviction | Reason::HardEviction => {
                SmallDisk::fill(&self.node);
            }
            Reason::Preemption => self.node.apply(&preemptor(&self.node)),
            Reason::Shutdown => self.bus.as_mut().expect("the machine").prepare(true),
            Reason::AgentStop => self.node.stop_agent(),
            _ => {}
        }
    }

    /// Whether the step has ended, and the pod with it.
    fn is_over(&self, step: Step, uid: &str) -> bool {
        // A driver still carries out the call that the agent has left, and is called again to undo it.
        let undone = match step {
            Step::Volume => "NodeUnpublishVolume",
            Step::Claim => "NodeUnprepareResources",
            _ => "",
        };
        let undone = self.plugins.count(undone);
        if undone.called + undone.refused > 0 {
            return true;
        }
        let has_ended = self.node.running(step.name()).is_empty()
            || (self.reason == Reason::Replacement && !self.runs(step, uid));
        has_ended && !has_thread(self.node.pid(), &format!("pod/{}", &uid[..8]))
    }

    /// Whether the pod of this UID runs.
    fn runs(&self, step: Step, uid: &str) -> bool {
        let of_pod = |container: &crate::support::fake_cri::Container| {
            container.config.labels.get("io.kubernetes.pod.uid").is_some_and(|other| other == uid)
        };
        self.node.containers(step.name()).iter().any(|container| container.is_running() && of_pod(container))
    }

    /// Waits for the ends of all steps. Returns those that go on.
    fn wait(&self) -> Vec<String> {
        let begun = Instant::now();
        let mut open = self.steps.clone();
        loop {
            self.node.assert_no_duplicates();
            open.retain(|step, uid| !self.is_over(*step, uid));
            if open.is_empty() || begun.elapsed() > LIMIT {
                return open.keys().map(|step| format!("{step:?} x {:?} goes on", self.reason)).collect();
            }
            pause(Duration::from_millis(50));
        }
    }

    /// Asserts that nothing is left of the steps, although what they waited for happens now.
    fn finish(mut self) {
        self.gates.iter().for_each(Gate::open);
        self.node.fake.release_endless();
        match self.reason {
            Reason::AgentStop => self.node.start_agent(),
            Reason::Replacement => {
                for step in self.steps.keys() {
                    self.node.wait_ready(step.name());
                }
            }
            Reason::Preemption => {
                self.node.wait_ready(PREEMPTOR);
                assert_preempted_first(&self.node);
            }
            Reason::SoftEviction | Reason::HardEviction => {
                SmallDisk::clear(&self.node);
            }
            Reason::Shutdown => {
                let bus = self.bus.as_mut().expect("the machine");
                wait_until("the lock to be released", LONG, || bus.locks() == 0);
                bus.prepare(false);
            }
            _ => {}
        }
        // Static pods have only mirrors there.
        for step in self.steps.keys().filter(|_| !self.reason.is_for_static_pods()) {
            self.node.api().delete_pod_within(&Fixture::path(*step), 1);
        }
        wait_until("the plugins to have nothing left", LONG, || self.plugins.left().is_empty());
        let Fixture { node, plugins, disk, .. } = self;
        node.finish();
        drop((plugins, disk));
    }
}

const PREEMPTOR: &str = "preemptor";

/// A critical pod that needs what all others have.
fn preemptor(node: &FakeNode) -> Value {
    let object = node.api().object(&format!("/api/v1/nodes/{NODE}")).expect("the node exists");
    let cpu = object["status"]["allocatable"]["cpu"].as_str().expect("the node has processors").to_owned();
    let millis = match cpu.strip_suffix('m') {
        Some(millis) => millis.parse::<u64>().unwrap(),
        None => cpu.parse::<u64>().unwrap() * 1000,
    };
    let mut main = busybox("main", FOREVER);
    main["resources"] = json!({"requests": {"cpu": format!("{}m", millis - 50)}});
    pod(PREEMPTOR, json!([main]))
}

/// The preempting pod started when the containers of the others had ended.
fn assert_preempted_first(node: &FakeNode) {
    let journal = node.fake.journal();
    let name = full_name(PREEMPTOR);
    let began = journal
        .iter()
        .position(|entry| entry.method == "RunPodSandbox" && entry.request.to_string().contains(&name))
        .expect("the preempting pod has a sandbox");
    let last_stop = journal.iter().take(began).filter(|entry| entry.method == "StopContainer").count();
    let all_stops = journal.iter().filter(|entry| entry.method == "StopContainer").count();
    assert_eq!(last_stop, all_stops, "the preempting pod started before its victims had ended");
}

fn has_thread(pid: u32, name: &str) -> bool {
    let mut tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.any(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name))
}

/// The objects that the pods need.
fn create_objects(api: &FakeApi) {
    crate::plugin_node::create_volume_objects(api);
    put_attachable_volume(api);
    api.put(
        "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/gadget",
        json!({
            "metadata": {"uid": "22222222-0000-4000-8000-000000000001"},
            "spec": {"devices": {}},
            "status": {
                "allocation": {"devices": {"results": [
                    {"driver": CLAIM_DRIVER, "pool": "pool", "device": "gadget", "request": "r"},
                ]}},
                "reservedFor": [{"resource": "pods", "name": Step::Claim.name(), "uid": Step::Claim.uid()}],
            },
        }),
    );
}

/// One column of the table. Returns the number of its cells.
fn column(reason: Reason) -> (usize, Vec<String>) {
    let mut fixture = Fixture::new(reason);
    for step in STEPS.into_iter().filter(|step| impossible(*step, reason).is_none()) {
        fixture.enter(step);
    }
    let cells = fixture.steps.len();
    let before: Vec<_> = fixture.steps.keys().map(|step| fixture.node.running(step.name())).collect();
    fixture.give_reason();
    if reason == Reason::AgentStop {
        // The pods continue to run.
        let after: Vec<_> = fixture.steps.keys().map(|step| fixture.node.running(step.name())).collect();
        assert_eq!(after, before);
    }
    let open = if reason == Reason::AgentStop { Vec::new() } else { fixture.wait() };
    if open.is_empty() {
        fixture.finish();
    }
    (cells, open)
}

#[test]
fn each_step_of_a_pod_ends_for_each_reason() {
    let results = std::sync::Mutex::new((0, Vec::new()));
    let run = |reason: &Reason| {
        let (cells, open) = column(*reason);
        let mut results = results.lock().unwrap();
        results.0 += cells - open.len();
        results.1.extend(open);
    };
    in_parallel(&REASONS, run);
    let mut whole = 0;
    for reason in REASONS {
        for step in STEPS {
            match impossible(step, reason) {
                Some(cause) => print_line(&format!("no cell {step:?} x {reason:?}: {cause}")),
                None => whole += 1,
            }
        }
    }
    let (passed, open) = results.into_inner().unwrap();
    print_line(&format!("steps: {passed} of {whole} cells passed"));
    assert!(open.is_empty(), "{}", open.join("\n"));
    assert_eq!(passed, whole);
}
