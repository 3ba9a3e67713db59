//! The thread of one pod: inspect, plan, act, inspect again (Go: podWorkerLoop, SyncPod,
//! SyncTerminatingPod, SyncTerminatedPod).

mod claims;
mod devices;
mod kills;
mod resize;
mod spans;
mod volumes;

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, select_biased};
use jiff::Timestamp;

use super::active_clock::{ActiveClock, running_since};
use super::allocation::Allocations;
use super::assignments::Assignments;
use super::cgroups::PodCgroups;
use super::lifecycle::{Lifecycle, Phase, PodKill, Update, must_end};
use super::plan::{self, Plan};
use super::start_clock::StartClock;
use crate::images::{self, ImageCheck};
use crate::kube::{LocalObjects, PodDependencies};
use crate::model::api::PodStatus;
use crate::model::event::EventSink;
use crate::model::ids::{ContainerId, PodUid, SandboxId};
use crate::model::metrics;
use crate::model::mount::MountedVolume;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::runtime::{ContainerState, ContainerStatus, ListedPod, PodRuntime, SandboxState};
use crate::observe::Observe;
use crate::offline::Offline;
use crate::probes::{Kind as ProbeKind, Probes};
use crate::resources::{Roots, stats};
use crate::runtime::grace::Grace;
use crate::runtime::{KnownPod, Runtime, Start, StartFailure};
use crate::status::{self, Deadline, NodeAddresses, StartReason, StatusCache};
use crate::util::backoff::{Failures, jitter, random_unit};
use crate::util::lock::LockExt;
use crate::util::mailbox::Inbox;
use crate::util::stop::StopToken;
use crate::util::{memory, threads, timers};
use crate::volumes::Volumes;

/// Wait after a failed sync, before jitter.
const RETRY: Duration = Duration::from_secs(10);
/// Wait for the network or the runtime, before jitter.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// Steps that may follow one another without a pause. After that each step waits a second, so that
/// a plan that never becomes empty does not keep a CPU busy.
const STEPS_AT_ONCE: u32 = 10;

/// Settings of the workers.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pause between two syncs of a healthy pod, before jitter (`syncFrequency`).
    pub sync_frequency: Duration,
}

/// Handles and channel ends of the workers.
#[derive(Clone)]
pub struct Deps {
    /// Starts and stops sandboxes and containers in the runtime.
    pub runtime: Runtime,
    /// Inspects pods.
    pub observe: Observe,
    /// The verdicts of probes.
    pub probes: Probes,
    /// Mounts volumes.
    pub volumes: Arc<Volumes>,
    /// Makes and removes the cgroups of pods.
    pub cgroups: PodCgroups,
    /// The CPUs, memory and NUMA nodes of pods.
    pub assignments: Assignments,
    /// Stores the last status of each pod.
    pub status: StatusCache,
    /// The resources that pods were granted, and those that the runtime received.
    pub allocations: Allocations,
    /// The node's addresses, for statuses.
    pub node_addresses: Arc<dyn Fn() -> NodeAddresses + Send + Sync>,
    /// The addresses that this machine has now: `status.hostIP` in environment variables while no status
    /// shows any.
    pub own_addresses: Arc<dyn Fn() -> Vec<IpAddr> + Send + Sync>,
    /// Kubernetes events.
    pub events: EventSink,
    /// Finds and replaces damaged files of images.
    pub image_check: ImageCheck,
    /// Reads objects of the API server for pods; `None` without one.
    pub api: Option<PodDependencies>,
    /// ConfigMaps and Secrets of static pods.
    pub local: LocalObjects,
    /// Whether pods must not run, because the API server was away for too long; `None` without `--offline`.
    pub offline: Option<Offline>,
    /// Rung when a container has several dead instances, which the cleaner removes. The relist does
    /// not report a death that a worker has seen first.
    pub clean: Sender<()>,
}

/// The state of a worker, as other rooms see it.
#[derive(Debug, Clone, Default)]
pub struct WorkerReport {
    /// What it does.
    pub phase: WorkerPhase,
    /// Why the last step failed; `None` if it succeeded.
    pub last_error: Option<String>,
    /// When the next step is due.
    pub next_sync: Option<Timestamp>,
    /// Whether it stops the pod because the API server was away for too long, without an order.
    pub is_stopped_offline: bool,
}

/// What a worker does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WorkerPhase {
    /// Its first step has not begun.
    #[default]
    New,
    /// It waits for the end of an earlier pod of the same name.
    Waiting,
    /// It brings the containers to the state that the manifest describes.
    Syncing,
    /// It stops the containers.
    Terminating,
    /// All containers have stopped; it cleans up.
    Terminated,
    /// The pod has ended on this node.
    Finished,
}

impl WorkerPhase {
    /// As commands show it; empty before the first step.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            WorkerPhase::New => "",
            WorkerPhase::Waiting => "Waiting",
            WorkerPhase::Syncing => "Syncing",
            WorkerPhase::Terminating => "Terminating",
            WorkerPhase::Terminated => "Terminated",
            WorkerPhase::Finished => "Finished",
        }
    }
}

impl WorkerReport {
    /// Notes whether the worker is about to stop the pod without an order. With the lock of the report: the
    /// sync loop, which may release the pod at once, waits for the result.
    fn note_stop(&mut self, stops: impl FnOnce() -> bool) -> bool {
        self.is_stopped_offline = stops();
        self.is_stopped_offline
    }

    /// Whether all containers of the pod have stopped and none will start again.
    pub fn has_stopped(&self) -> bool {
        matches!(self.phase, WorkerPhase::Terminated | WorkerPhase::Finished)
    }

    /// Whether the pod is being stopped, or has ended.
    pub fn is_ending(&self) -> bool {
        self.phase == WorkerPhase::Terminating || self.has_stopped()
    }

    /// Whether the worker has finished: the pod has ended on this node.
    pub fn is_finished(&self) -> bool {
        self.phase == WorkerPhase::Finished
    }
}

pub(super) type Shared = Arc<Mutex<WorkerReport>>;

enum StepOutcome {
    /// Another step is due now.
    Now,
    /// Another step is due after this time, or at the next update.
    After(Duration),
    Done,
}

/// Why a step failed, and when to try again.
struct StepError {
    message: String,
    retry: Duration,
    /// The level of the log line: a wait in a back-off has its own event each time.
    level: log::Level,
}

impl StepError {
    fn retry_later(message: impl Into<String>) -> Self {
        StepError { message: message.into(), retry: jitter(RETRY, random_unit()), level: log::Level::Warn }
    }

    fn retry_soon(message: impl Into<String>) -> Self {
        StepError {
            message: message.into(),
            retry: jitter(RETRY_SOON, random_unit()),
            level: log::Level::Warn,
        }
    }
}

/// The state of one worker, owned by its thread.
pub(super) struct Worker {
    settings: Settings,
    deps: Deps,
    lifecycle: Lifecycle,
    shared: Shared,
    /// Container name → the reason of the last failed start.
    reasons: HashMap<String, StartReason>,
    volumes_ready: bool,
    first_sync: bool,
    /// Whether a container ran when the stop of the pod began. Ephemeral ones do not count: the phase does
    /// not depend on them.
    ran_at_stop: bool,
    failures: Failures,
    clock: StartClock,
    active: ActiveClock,
}

impl Worker {
    pub(super) fn new(settings: Settings, deps: Deps, pod: Pod, shared: Shared) -> Self {
        Worker {
            clock: StartClock::new(&pod, Timestamp::now()),
            active: ActiveClock::default(),
            settings,
            deps,
            lifecycle: Lifecycle::new(pod),
            shared,
            reasons: HashMap::new(),
            volumes_ready: false,
            first_sync: true,
            ran_at_stop: false,
            failures: Failures::default(),
        }
    }

    /// The thread's body. `cancel` fires when the pod is to be stopped or the agent stops; `grace` is
    /// the time that stopping it may take, which may be shortened; `stop` fires only when the agent
    /// stops. Returns whether the pod's life on this node is over.
    pub(super) fn run(
        mut self,
        inbox: &Inbox<(), Update>,
        grace: &Grace,
        cancel: &StopToken,
        stop: &StopToken,
    ) -> bool {
        let mut due = Some(Instant::now());
        loop {
            memory::release_stack();
            {
                let _waiting = threads::waiting("update or timer");
                select_biased! {
                    recv(stop.signal()) -> _ => return false,
                    recv(inbox.bell()) -> _ => {}
                    recv(timers::deadline_channel(due)) -> _ => {}
                }
            }
            self.receive(inbox, grace);
            let mut steps = 0;
            let next = loop {
                if stop.is_stopped() {
                    return false;
                }
                self.report_phase();
                steps += 1;
                let (work, begun) = (self.work(), Instant::now());
                let stepped = self.step(inbox, grace, cancel, stop);
                metrics::POD_WORKER.observe_duration([work], begun.elapsed());
                match stepped {
                    Ok(StepOutcome::Now) if steps >= STEPS_AT_ONCE => {
                        self.succeeded();
                        break StepOutcome::After(jitter(RETRY_SOON, random_unit()));
                    }
                    Ok(StepOutcome::Now) => self.succeeded(),
                    Ok(next) => {
                        self.succeeded();
                        break next;
                    }
                    Err(error) => {
                        if stop.is_stopped() {
                            return false;
                        }
                        // A kill in the mailbox interrupted the step: this is no failure.
                        if self.lifecycle.phase == Phase::Syncing && cancel.is_stopped() {
                            break StepOutcome::Now;
                        }
                        self.failed(&error);
                        // A pod ends at its deadline even if its steps fail, without a hot loop.
                        let wait = self.within_deadline(error.retry).max(RETRY_SOON.min(error.retry));
                        break StepOutcome::After(wait);
                    }
                }
                self.receive(inbox, grace);
            };
            match next {
                StepOutcome::Done => {
                    self.report_phase();
                    return true;
                }
                StepOutcome::Now => due = Some(Instant::now()),
                StepOutcome::After(wait) => {
                    due = Some(Instant::now() + wait);
                    self.shared.locked().next_sync = jiff::SignedDuration::try_from(wait)
                        .ok()
                        .and_then(|wait| Timestamp::now().checked_add(wait).ok());
                }
            }
        }
    }

    /// Applies what is in the mailbox. The grace period is reset before: an update that shortens it
    /// later was not read here.
    fn receive(&mut self, inbox: &Inbox<(), Update>, grace: &Grace) {
        grace.reset();
        for (_, update) in inbox.drain() {
            self.lifecycle.apply(update);
        }
        // The sync loop orders it, too; a worker that is made later must not start the pod before that.
        if self.lifecycle.phase == Phase::Syncing
            && let Some(offline) = &self.deps.offline
        {
            let is_stopped = self.shared.locked().note_stop(|| offline.stops(&self.lifecycle.pod));
            if is_stopped {
                self.lifecycle.apply(Update { pod: None, kill: Some(PodKill::until_server_is_back()) });
            }
        }
    }

    /// Whether the pod is stopped until the API server has shown it again. One that is being deleted ends.
    fn is_stopped_offline(&self) -> bool {
        let Phase::Terminating { failure: Some(failure), .. } = &self.lifecycle.phase else { return false };
        failure.reason == reasons::STOPPED_OFFLINE && !must_end(self.pod())
    }

    fn step(
        &mut self,
        inbox: &Inbox<(), Update>,
        grace: &Grace,
        cancel: &StopToken,
        stop: &StopToken,
    ) -> Result<StepOutcome, StepError> {
        match self.lifecycle.phase.clone() {
            Phase::Syncing => {
                let span = spans::start("syncPod", self.pod(), Some(self.work()));
                let outcome = self.sync(cancel);
                spans::end(span, outcome.as_ref().err().map(|error| error.message.as_str()));
                outcome
            }
            Phase::Terminating { grace_seconds, failure } => {
                let span = spans::start("syncTerminatingPod", self.pod(), None);
                let outcome = self.terminate(grace_seconds, failure.as_ref(), (inbox, grace), stop);
                spans::end(span, outcome.as_ref().err().map(|error| error.message.as_str()));
                outcome
            }
            Phase::Terminated => {
                // As upstream, its failure is not recorded.
                let _span = spans::start("syncTerminatedPod", self.pod(), None);
                self.clean_up(stop)
            }
            Phase::Finished => Ok(StepOutcome::Done),
        }
    }

    /// The name of the next step in metrics.
    fn work(&self) -> &'static str {
        match self.lifecycle.phase {
            Phase::Syncing if self.first_sync => "create",
            Phase::Syncing => "sync",
            Phase::Terminating { .. } => "kill",
            Phase::Terminated | Phase::Finished => "terminated",
        }
    }

    fn pod(&self) -> &Pod {
        &self.lifecycle.pod
    }

    fn uid(&self) -> PodUid {
        self.lifecycle.pod.uid().clone()
    }

    fn report_phase(&self) {
        let mut shared = self.shared.locked();
        shared.phase = match self.lifecycle.phase {
            Phase::Syncing => WorkerPhase::Syncing,
            Phase::Terminating { .. } => WorkerPhase::Terminating,
            Phase::Terminated => WorkerPhase::Terminated,
            Phase::Finished => WorkerPhase::Finished,
        };
        shared.next_sync = None;
    }

    fn succeeded(&mut self) {
        if self.failures.end() {
            self.shared.locked().last_error = None;
        }
    }

    fn failed(&mut self, error: &StepError) {
        if self.failures.count() {
            log::log!(
                error.level,
                "{} ({} times) pod={} uid={}",
                error.message,
                self.failures,
                self.pod().full_name(),
                self.pod().uid()
            );
        }
        self.shared.locked().last_error = Some(error.message.clone());
    }

    /// Brings the containers to the state that the manifest describes. The order of the steps is a
    /// protocol: each relies on those before it, and one that fails ends the sync. The next sync begins
    /// with the first step, so each step finds done what it did before, and is complete without it.
    ///
    /// | Step | Needs | If it fails | Go, in `Kubelet.SyncPod` |
    /// |---|---|---|---|
    /// | `observed` | | event `FailedSync`, if the runtime is usable; again after 1 s | `podCache.GetNewerThan` (`podWorkerLoop`) |
    /// | `evaluate` | the inspection | cannot; a pod that is over is stopped | `generateAPIPodStatus`, `SetPodStatus`, `probeManager.AddPod` |
    /// | `leave_foreign_cgroup`, and no other step | running containers without the pod's cgroup | again after 10 s | `pcm.Exists`, `killPod` |
    /// | `idle`, the end if the plan is empty | volumes that were set up | again when a held restart may be made | |
    /// | `await_node` | a plan with changes, or volumes to set up | event `NetworkNotReady`; again after 1 s | `runtimeState.networkErrors`; `allowPodStart` |
    /// | `allocate_devices` | what was reserved at admission | the pod waits for the plugin, or fails | `devicemanager.Allocate`, at admission |
    /// | `make_cgroup`, for a new sandbox | | event `FailedCreatePodContainer`; again after 1 s | `pcm.EnsureExists` |
    /// | `set_up_volumes` | the pod's cgroup, which shows what the pod will use | the back-off of the volume; without a place on the node the pod fails | `secretManager.RegisterPod`, `WaitForAttachAndMount` |
    /// | `act` | mounts and devices | as for the steps of [`Worker::carry_out`] | `containerRuntime.SyncPod` |
    /// | `evaluate` | the inspection after the change | cannot | the next sync |
    fn sync(&mut self, cancel: &StopToken) -> Result<StepOutcome, StepError> {
        let Some(runtime) = self.observed(cancel)? else { return Ok(StepOutcome::Now) };
        let Some((plan, held)) = self.evaluate(&runtime) else { return Ok(StepOutcome::Now) };
        if runtime.running().next().is_some() && self.deps.cgroups.is_missing(self.pod()) {
            return self.leave_foreign_cgroup(&runtime, cancel);
        }
        if plan.is_empty() && self.volumes_ready {
            self.deps.volumes.remount(self.pod(), cancel);
            return self.idle(held);
        }
        self.await_node(&plan)?;
        if let Some(refused) = self.allocate_devices(&runtime, cancel)? {
            return Ok(refused);
        }
        if plan.create_sandbox {
            self.make_cgroup(cancel)?;
        }
        let mounts = match self.set_up_volumes(cancel) {
            Ok(mounts) => mounts,
            Err(error) => return self.volumes_failed(&error),
        };
        if plan.is_empty() {
            return self.idle(held);
        }
        let (outcome, inspected) = self.act(&plan, &runtime, &mounts, cancel)?;
        let Some((after, held)) = self.evaluate(&inspected) else { return Ok(StepOutcome::Now) };
        match (outcome, held) {
            (Err(error), Some(held)) if held.retry < error.retry => Err(held),
            (Err(error), _) => Err(error),
            (Ok(()), held) if after.is_empty() => self.idle(held),
            (Ok(()), _) => Ok(StepOutcome::Now),
        }
    }

    /// The last inspection of the pod, or a new one; `None` if it is to be read again.
    fn observed(&self, cancel: &StopToken) -> Result<Option<Arc<PodRuntime>>, StepError> {
        let uid = self.uid();
        let Some(view) = self.deps.observe.view(&uid, cancel) else { return Ok(None) };
        let Some(error) = view.error else {
            if !(self.first_sync && may_show_former_incarnation(self.pod(), &view.pod)) {
                return Ok(Some(self.with_pod_ips(view.pod)));
            }
            let inspected = self.deps.observe.inspect(&uid, cancel);
            let inspected = inspected
                .map_err(|error| StepError::retry_soon(format!("error determining status: {error}")))?;
            return Ok(Some(self.with_pod_ips(inspected)));
        };
        let message = format!("error determining status: {error}");
        // An unavailable runtime is shown on the node, not on each pod.
        if self.deps.observe.runtime_health().is_usable() {
            self.deps.events.warning(self.pod(), reasons::FAILED_SYNC, message.as_str());
        }
        self.deps.observe.inspect(&uid, cancel).map(|_| None).map_err(|_| StepError::retry_soon(message))
    }

    /// Passes an inspection on to probes and managers, and decides what has to change. Stores the status;
    /// `None` if the pod is over by it. The second value is as for [`Worker::plan`].
    fn evaluate(&mut self, runtime: &Arc<PodRuntime>) -> Option<(Plan, Option<StepError>)> {
        self.deps.assignments.observe_runtime(runtime);
        self.deps.probes.sync(self.pod(), runtime, false);
        if self.first_sync {
            self.record_running(runtime);
        }
        let decided = self.plan(runtime);
        self.report_resize(runtime);
        if self.store_status(runtime, Finality::Open) {
            self.completed(runtime);
            return None;
        }
        Some(decided)
    }

    /// Whether the runtime, its network and other pods of the name permit the changes.
    fn await_node(&self, plan: &Plan) -> Result<(), StepError> {
        let (pod, health) = (self.pod(), self.deps.observe.runtime_health());
        if !health.is_usable() {
            return Err(StepError::retry_soon(health.runtime.join("; ")));
        }
        // The queues of `Workers` contain only versions that this process has seen.
        if plan.create_sandbox
            && pod.is_static()
            && let Some(other) = self.deps.observe.namesake(pod.uid(), pod.namespace(), pod.name())
        {
            return Err(StepError::retry_soon(format!(
                "waiting for the end of the pod's earlier version {other}"
            )));
        }
        let Some(network) = health.network.filter(|_| !pod.host_network()) else { return Ok(()) };
        let message = format!("network is not ready: {network}");
        self.deps.events.warning(pod, reasons::NETWORK_NOT_READY, message.as_str());
        Err(StepError::retry_soon(message))
    }

    /// Carries the plan out. Returns how that ended, and an inspection after it: a started container may
    /// have ended already.
    ///
    /// DIFFERS: the reason why a start failed or waits is shown immediately, not after the next sync.
    fn act(
        &mut self,
        plan: &Plan,
        runtime: &Arc<PodRuntime>,
        mounts: &[MountedVolume],
        cancel: &StopToken,
    ) -> Result<(Result<(), StepError>, Arc<PodRuntime>), StepError> {
        let uid = self.uid();
        let busy = self.deps.observe.mark_busy(&uid);
        let outcome = self.carry_out(plan, runtime, mounts, cancel);
        let inspected = self.deps.observe.inspect(&uid, cancel);
        drop(busy);
        let inspected =
            self.with_pod_ips(inspected.map_err(|error| StepError::retry_soon(error.to_string()))?);
        if has_surplus(&inspected) {
            // If the bell is full, the cleaner wakes anyway.
            let _ = self.deps.clean.try_send(());
        }
        Ok((outcome, inspected))
    }

    /// The pod runs, but not in its cgroup: another agent started it, or this one with other
    /// settings, or the cgroup was removed. Stops it; the next step starts it in its cgroup, if its
    /// restart policy allows that (Go: `SyncPod`).
    fn leave_foreign_cgroup(
        &self,
        runtime: &Arc<PodRuntime>,
        cancel: &StopToken,
    ) -> Result<StepOutcome, StepError> {
        let uid = self.uid();
        log::warn!("the pod has no cgroup and is restarted pod={} uid={uid}", self.pod().full_name());
        let busy = self.deps.observe.mark_busy(&uid);
        let killed = self.deps.runtime.kill_pod(Some(self.pod()), KnownPod::Runtime(runtime), None, cancel);
        let inspected = self.deps.observe.inspect(&uid, cancel);
        drop(busy);
        killed.map_err(|error| StepError::retry_later(error.to_string()))?;
        inspected.map_err(|error| StepError::retry_soon(error.to_string()))?;
        Ok(StepOutcome::Now)
    }

    /// The plan is empty, but a restart of all containers may be waiting.
    fn idle(&self, held: Option<StepError>) -> Result<StepOutcome, StepError> {
        held.map_or_else(|| Ok(StepOutcome::After(self.until_next_sync())), Err)
    }

    /// The plan, and the reason why a restart of all containers has to wait.
    fn plan(&mut self, runtime: &PodRuntime) -> (Plan, Option<StepError>) {
        let plan = self.plan_with(runtime, false);
        let Some(held) = self.hold_reset(&plan.reset, runtime) else { return (plan, None) };
        (self.plan_with(runtime, true), Some(held))
    }

    fn plan_with(&self, runtime: &PodRuntime, reset_held: bool) -> Plan {
        let mut plan = plan::compute(&plan::Inputs {
            pod: self.pod(),
            runtime,
            liveness: &|id| self.deps.probes.verdict(ProbeKind::Liveness, id),
            startup: &|id| self.deps.probes.verdict(ProbeKind::Startup, id),
            reset_held,
        });
        let actuated = |name: &str| self.deps.allocations.actuated(self.pod().uid(), name);
        plan::resize::add(self.pod(), runtime, &actuated, &mut plan);
        plan.resize_pod =
            !plan.kill_pod && !plan.create_sandbox && plan.reset.is_empty() && self.is_pod_resize_due();
        plan
    }

    /// Carries out a plan, in this order. Each step needs those before it.
    ///
    /// | Step | If it fails | Go, in `kubeGenericRuntimeManager.SyncPod` |
    /// |---|---|---|
    /// | `kill_pod`, or `kill_single` for each container | again after 10 s | steps 2 and 3 |
    /// | `reset`, and no other step | again after 10 s | step 3, `restartAllContainers` |
    /// | `remove_init_records`, for a new sandbox | logged; garbage collection removes them | `purgeInitContainers` |
    /// | `prepare_claims` | event; again after 10 s | `PrepareDynamicResources` (step 4) |
    /// | `make_cgroup` | event; again after 1 s | `pcm.EnsureExists`, in `Kubelet.SyncPod` |
    /// | `note_starts`: what the containers will have is on disk | logged | `actuatedState`, when a container is created |
    /// | `resize` | the other steps follow; again after 10 s | step 6, in the new sandbox |
    /// | `sandbox` | again after 10 s | step 4 |
    /// | `start_all` | the others are started; the earliest retry counts | steps 7 to 9 |
    fn carry_out(
        &mut self,
        plan: &Plan,
        runtime: &Arc<PodRuntime>,
        mounts: &[MountedVolume],
        cancel: &StopToken,
    ) -> Result<(), StepError> {
        if plan.sandbox_changed {
            self.deps.events.normal(
                self.pod(),
                reasons::SANDBOX_CHANGED,
                "Pod sandbox changed, it will be killed and re-created.",
            );
        }
        if plan.kill_pod {
            self.deps
                .runtime
                .kill_pod(Some(self.pod()), KnownPod::Runtime(runtime), None, cancel)
                .map_err(|error| StepError::retry_later(error.to_string()))?;
        } else {
            self.kill_single(&plan.kill, runtime, cancel)?;
        }
        if !plan.reset.is_empty() {
            return self.reset(&plan.reset, runtime, cancel);
        }
        if plan.create_sandbox {
            self.remove_init_records(runtime, cancel);
        }
        self.prepare_claims(plan, cancel)?;
        self.make_cgroup(cancel)?;
        self.note_starts(plan);
        let resized = self.resize(plan, cancel);
        let Some(sandbox) = self.sandbox(plan, runtime, cancel)? else { return resized };
        self.start_all(plan, runtime, &sandbox, mounts, resized.err(), cancel)
    }

    /// The sandbox for the containers, which is made if the plan says so; `None`: there is none.
    fn sandbox(
        &self,
        plan: &Plan,
        runtime: &PodRuntime,
        cancel: &StopToken,
    ) -> Result<Option<Sandbox>, StepError> {
        let attempt = plan.attempt;
        if !plan.create_sandbox {
            let ips = runtime.ips.clone();
            return Ok(plan.sandbox_id.clone().map(|id| Sandbox { id, ips, attempt }));
        }
        let created = self.deps.runtime.create_sandbox(self.pod(), attempt, cancel);
        let created = created.map_err(|error| StepError::retry_later(error.to_string()))?;
        // A pull may take long, and the next complete status is composed after it.
        self.deps.status.set_sandbox_ready(self.pod(), Timestamp::now());
        Ok(Some(Sandbox { ips: self.pod_ips(&created.ips), id: created.id, attempt }))
    }

    /// Starts the plan's containers. Starts are independent of each other: returns the failure with the
    /// earliest retry, `first` included.
    fn start_all(
        &mut self,
        plan: &Plan,
        runtime: &Arc<PodRuntime>,
        sandbox: &Sandbox,
        mounts: &[MountedVolume],
        mut first: Option<StepError>,
        cancel: &StopToken,
    ) -> Result<(), StepError> {
        let pod = self.pod().clone();
        let ephemeral = pod.ephemeral_containers();
        let ephemeral = plan.start_ephemeral.iter().filter_map(|index| ephemeral.get(*index));
        let init = plan.start_init.iter().filter_map(|index| pod.init_containers().get(*index));
        let regular = plan.start.iter().filter_map(|index| pod.containers().get(*index));
        for container in ephemeral.chain(init).chain(regular) {
            if cancel.is_stopped() {
                return Ok(());
            }
            let name = container.name.clone();
            match self.start(container, runtime, sandbox, mounts, cancel) {
                Ok(_) => {
                    self.reasons.remove(&name);
                }
                Err(failure) if failure.stopping => return Ok(()),
                Err(failure) => {
                    let error = self.not_started(&name, failure);
                    first = Some(match first {
                        Some(other) if other.retry <= error.retry => other,
                        _ => error,
                    });
                }
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// Makes the pod's cgroup if it does not exist.
    fn make_cgroup(&self, cancel: &StopToken) -> Result<(), StepError> {
        self.deps.cgroups.make(self.pod(), cancel).map_err(|error| {
            let message = format!("unable to ensure pod container exists: {error}");
            if !cancel.is_stopped() {
                self.deps.events.warning(self.pod(), reasons::FAILED_CREATE_POD_CONTAINER, message.as_str());
            }
            StepError::retry_soon(message)
        })
    }

    fn start(
        &self,
        container: &crate::model::api::Container,
        runtime: &Arc<PodRuntime>,
        sandbox: &Sandbox,
        mounts: &[MountedVolume],
        cancel: &StopToken,
    ) -> Result<ContainerId, StartFailure> {
        let pod = self.pod();
        self.suspect_image(container, runtime);
        self.deps.runtime.restart_allowed(pod, container, runtime, Timestamp::now())?;
        let handler = self.deps.runtime.known_handler(pod);
        let mut host_ips = (self.deps.node_addresses)().host_ips;
        if host_ips.is_empty() {
            host_ips = (self.deps.own_addresses)();
        }
        let started = self.deps.runtime.start_container(Start {
            pod,
            container,
            sandbox_id: &sandbox.id,
            sandbox_attempt: sandbox.attempt,
            pod_ips: &sandbox.ips,
            host_ips: &host_ips,
            runtime,
            volumes: mounts,
            sub_paths: &*self.deps.volumes,
            recursive_read_only_mounts: self.deps.observe.can_mount_recursively_read_only(&handler),
            stop: cancel,
        });
        if let Err(failure) = &started
            && [reasons::CREATE_CONTAINER_ERROR, reasons::RUN_CONTAINER_ERROR].contains(&failure.reason)
            && images::points_to_image(&failure.message)
        {
            let image = container.image.as_deref().unwrap_or_default();
            self.deps.image_check.container_failed(pod, &container.name, image, &failure.message);
        }
        started
    }

    /// The pod is over. Its containers are not started again, but others of their images may be.
    fn completed(&mut self, runtime: &PodRuntime) {
        self.pod().all_containers().for_each(|container| self.suspect_image(container, runtime));
        self.lifecycle.completed();
    }

    /// Has the image of a container checked whose last instance ended as if the image was damaged.
    fn suspect_image(&self, container: &crate::model::api::Container, runtime: &PodRuntime) {
        if let Some(damage) = runtime.newest(&container.name).and_then(images::signs_of_damage) {
            let image = container.image.as_deref().unwrap_or_default();
            self.deps.image_check.container_failed(self.pod(), &container.name, image, &damage);
        }
    }

    /// The inspected pod, with the addresses of its status. A runtime reports none for
    /// a pod on the host's network.
    fn with_pod_ips(&self, runtime: Arc<PodRuntime>) -> Arc<PodRuntime> {
        let ips = self.pod_ips(&runtime.ips);
        if ips == runtime.ips { runtime } else { Arc::new(PodRuntime { ips, ..PodRuntime::clone(&runtime) }) }
    }

    /// The pod's addresses as its status has them; `found` are those of its sandbox.
    fn pod_ips(&self, found: &[IpAddr]) -> Vec<IpAddr> {
        let old = self.deps.status.get(self.pod().uid());
        status::pod_ips(self.pod(), found, old.as_deref(), &(self.deps.node_addresses)())
    }

    /// Composes and stores the status. Returns whether the pod is over.
    fn store_status(&mut self, runtime: &PodRuntime, finality: Finality) -> bool {
        let pod = self.pod().clone();
        let old = self.deps.status.get(pod.uid());
        let now = Timestamp::now();
        let active = self.active(old.as_deref(), runtime, now);
        let failures = |name: &str| self.reasons.get(name).cloned();
        let runtime_name = self.deps.observe.runtime_version().runtime_name;
        if finality == Finality::Final {
            self.deps.allocations.end(pod.uid());
        }
        let resizes = self.deps.allocations.conditions(pod.uid());
        let in_resize = self.deps.allocations.in_resize(&pod);
        let node = (self.deps.node_addresses)();
        let mut composed = status::compose(&status::Inputs {
            old: old.as_deref(),
            failures: &failures,
            terminal: finality == Finality::Final && !self.is_stopped_offline(),
            exit_codes_decide: finality == Finality::Final && self.ran_until_order(),
            deleting: self.lifecycle.phase != Phase::Syncing,
            runtime_name: &runtime_name,
            readiness: &|id| self.deps.probes.verdict(ProbeKind::Readiness, id),
            startup: &|id| self.deps.probes.verdict(ProbeKind::Startup, id),
            resize_conditions: &resizes,
            actual_pod: in_resize.as_ref(),
            active,
            memory_request: &|name| self.deps.allocations.actuated(pod.uid(), name)?.memory.request,
            devices: &|container| self.deps.assignments.device_health(&pod, container),
            // The condition is also reported for a pod that has ended and gets no new sandbox.
            sandbox_problem: plan::check_sandbox(&pod, runtime).problem,
            ..status::Inputs::new(&pod, runtime, &node, now)
        });
        if composed.reason.as_deref() == Some(reasons::STOPPED_OFFLINE) {
            (composed.reason, composed.message) = (None, None);
        }
        let is_terminal = matches!(composed.phase.as_deref(), Some("Failed" | "Succeeded"));
        if let Phase::Terminating { failure: Some(failure), .. } = &self.lifecycle.phase
            && failure.reason == reasons::STOPPED_OFFLINE
        {
            // It has not failed: it runs again when the API server is back.
            if !is_terminal && !must_end(&pod) {
                composed.reason = Some(failure.reason.to_owned());
                composed.message = Some(failure.message.clone());
            }
        } else if let Phase::Terminating { failure: Some(failure), .. } = &self.lifecycle.phase {
            failure.show(&pod, &mut composed, now);
        }
        let has_ended = matches!(composed.phase.as_deref(), Some("Failed" | "Succeeded"));
        if has_ended
            && composed.reason.as_deref() == Some(reasons::DEADLINE_EXCEEDED)
            && self.lifecycle.phase == Phase::Syncing
        {
            let message = composed.message.clone().unwrap_or_default();
            self.deps.events.normal(&pod, reasons::DEADLINE_EXCEEDED, message);
        }
        self.clock.stored(&pod, &composed, now);
        let end = || {
            if finality == Finality::Final {
                self.shared.locked().phase = WorkerPhase::Terminated;
            }
        };
        self.deps.status.set_and(&pod, composed, now, end);
        if std::mem::take(&mut self.first_sync) {
            log::info!("began to manage a pod pod={} uid={}", pod.full_name(), pod.uid());
        }
        has_ended
    }

    /// Whether the pod has to make room, or ends with the machine, and ran until then. If all its containers
    /// exit with 0 it has succeeded (Go: `SyncTerminatingPod`, which computes the phase again at its end).
    ///
    /// DIFFERS: upstream, it also has if none ran and the last runs ended with 0, unless a restart was delayed.
    fn ran_until_order(&self) -> bool {
        let Phase::Terminating { failure: Some(failure), .. } = &self.lifecycle.phase else { return false };
        self.ran_at_stop && failure.is_for_node()
    }

    /// Whether a container runs that is not an ephemeral one.
    fn is_running(&self, runtime: &PodRuntime) -> bool {
        let pod = self.pod();
        runtime.running().any(|instance| pod.all_containers().any(|known| known.name == instance.name))
    }

    /// How long the pod has been active; `None` without a deadline, or before its start.
    fn active(&mut self, old: Option<&PodStatus>, runtime: &PodRuntime, now: Timestamp) -> Option<Duration> {
        self.pod().spec().active_deadline_seconds?;
        let start = status::start_time(self.pod(), old, runtime, now)?;
        let running = running_since(runtime, start);
        let uptime = || stats::uptime(&Roots::default());
        Some(self.active.inspected(start, running, (now, Instant::now()), uptime))
    }

    fn until_next_sync(&self) -> Duration {
        self.within_deadline(jitter(self.settings.sync_frequency, random_unit()))
    }

    /// Returns `wait`, or less if the pod's active deadline is earlier.
    fn within_deadline(&self, wait: Duration) -> Duration {
        if self.lifecycle.phase != Phase::Syncing {
            return wait;
        }
        let stored = self.deps.status.get(self.pod().uid());
        let now = (Timestamp::now(), Instant::now());
        let start = status::known_start(self.pod(), stored.as_deref());
        let active = start.map(|start| self.active.active(start, now));
        match active.and_then(|active| status::active_deadline(self.pod(), active)) {
            Some(Deadline::Remaining(left)) => wait.min(left),
            Some(Deadline::Exceeded) => Duration::ZERO,
            None => wait,
        }
    }

    /// Stops all containers and sandboxes of the pod.
    fn terminate(
        &mut self,
        grace_seconds: i64,
        failure: Option<&super::lifecycle::Failure>,
        (inbox, grace): (&Inbox<(), Update>, &Grace),
        stop: &StopToken,
    ) -> Result<StepOutcome, StepError> {
        let uid = self.uid();
        let Some(view) = self.deps.observe.view(&uid, stop) else { return Ok(StepOutcome::Now) };
        let runtime = self.with_pod_ips(view.pod);
        self.deps.probes.sync(self.pod(), &runtime, true);
        self.ran_at_stop |= self.is_running(&runtime);
        self.store_status(&runtime, Finality::Open);
        if let Some(failure) = failure {
            log::info!(
                "pod is stopped: {}: {} pod={} uid={uid}",
                failure.reason,
                failure.message,
                self.pod().full_name()
            );
        }
        let busy = self.deps.observe.mark_busy(&uid);
        // The last inspection may be older than the last start: inspect again.
        let before = self
            .deps
            .observe
            .inspect(&uid, stop)
            .map_err(|error| StepError::retry_soon(error.to_string()))?;
        let before = self.with_pod_ips(before);
        self.ran_at_stop |= self.is_running(&before);
        // The order may have interrupted a start that the runtime completed: what runs does not wait to start.
        for container in before.running() {
            self.reasons.remove(&container.name);
        }
        grace.begin(grace_seconds);
        // Processes that wait for a dead file server cannot be killed.
        let watch = self.deps.volumes.watch_stop(&uid, self.deps.runtime.overdue(grace));
        let killed = self.deps.runtime.kill_pod_within(
            Some(self.pod()),
            KnownPod::Runtime(&before),
            Some(grace_seconds),
            grace,
            stop,
        );
        drop(watch);
        let after = self.deps.observe.inspect(&uid, stop);
        drop(busy);
        if let Err(error) = killed {
            let message = format!("error killing pod: {error}");
            if !stop.is_stopped() {
                self.deps.events.warning(self.pod(), reasons::FAILED_KILL_POD, message.as_str());
            }
            return Err(StepError::retry_later(message));
        }
        let after = after.map_err(|error| StepError::retry_soon(error.to_string()))?;
        let running: Vec<&str> = after.running().map(|container| container.name.as_str()).collect();
        if !running.is_empty() {
            return Err(StepError::retry_later(format!(
                "detected running containers after a successful KillPod, CRI violation: {}",
                running.join(", ")
            )));
        }
        // Before the status is final, because the pod may be deleted then.
        let unprepared = self.deps.assignments.unprepare_claims(&uid, stop);
        unprepared.map_err(|error| StepError::retry_later(error.to_string()))?;
        self.deps.probes.forget(&uid);
        // The pod may have been evicted or deleted meanwhile: the last status shows that.
        self.receive(inbox, grace);
        if let Phase::Terminating { failure: newest, .. } = &self.lifecycle.phase
            && newest.as_ref() != failure
        {
            // A new reason fails the pod first; then its exit codes may decide, as for an earlier order.
            self.store_status(&after, Finality::Open);
        }
        self.store_status(&after, Finality::Final);
        self.lifecycle.phase = Phase::Terminated;
        Ok(StepOutcome::Now)
    }

    /// All containers have stopped: unmounts, and makes the status final.
    fn clean_up(&mut self, stop: &StopToken) -> Result<StepOutcome, StepError> {
        let uid = self.uid();
        self.deps.volumes.tear_down(&uid, stop).map_err(|error| StepError::retry_later(error.to_string()))?;
        if let Some(api) = &self.deps.api {
            api.forget(&uid);
        }
        self.deps.local.forget(&uid);
        let removed = self.deps.cgroups.remove(self.pod(), stop);
        removed.map_err(|error| StepError::retry_soon(format!("cannot remove the pod's cgroup: {error}")))?;
        self.deps.assignments.forget_pod(&uid);
        let stored = self.deps.status.get(&uid);
        let reason = stored.as_ref().and_then(|status| status.reason.as_deref());
        if reason != Some(reasons::STOPPED_OFFLINE) || must_end(self.pod()) {
            self.deps.status.finish(self.pod(), Timestamp::now());
        }
        self.lifecycle.phase = Phase::Finished;
        Ok(StepOutcome::Done)
    }
}

/// The sandbox in which containers start.
struct Sandbox {
    id: SandboxId,
    ips: Vec<IpAddr>,
    attempt: u32,
}

/// Whether a status is the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finality {
    Open,
    Final,
}

/// Whether a container has more than one dead instance.
fn has_surplus(runtime: &PodRuntime) -> bool {
    let mut dead = std::collections::HashSet::new();
    let exited = |container: &&ContainerStatus| container.state == ContainerState::Exited;
    runtime.containers.iter().filter(exited).any(|container| !dead.insert(container.name.as_str()))
}

/// Whether an inspection shows containers that may be removed by now: those of a static pod that was
/// removed and has come back under its UID. With the restart policy `Never` they would be its end.
fn may_show_former_incarnation(pod: &Pod, runtime: &PodRuntime) -> bool {
    pod.is_static() && !runtime.containers.is_empty() && runtime.running().next().is_none()
}

fn time_until(time: Timestamp) -> Duration {
    Duration::try_from(time.duration_since(Timestamp::now())).unwrap_or(Duration::ZERO)
}

/// The body of a worker that stops a pod that only the runtime knows: grace period 1 s, no hooks,
/// no status. Returns whether it has stopped.
pub(super) fn stop_unknown(deps: &Deps, pod: &ListedPod, shared: &Shared, stop: &StopToken) -> bool {
    shared.locked().phase = WorkerPhase::Terminating;
    loop {
        let busy = deps.observe.mark_busy(&pod.uid);
        let result = deps
            .observe
            .inspect(&pod.uid, stop)
            .map_err(|error| error.to_string())
            .and_then(|_| {
                // The inspection may show more containers than were known at first.
                let newest = deps.observe.listed().get(&pod.uid).cloned();
                let grace = Grace::fixed(stop);
                grace.begin(1);
                let _watch = deps.volumes.watch_stop(&pod.uid, deps.runtime.overdue(&grace));
                deps.runtime
                    .kill_pod(None, KnownPod::Listed(newest.as_ref().unwrap_or(pod)), Some(1), stop)
                    .map_err(|error| error.to_string())
            })
            .and_then(|()| deps.observe.inspect(&pod.uid, stop).map_err(|error| error.to_string()));
        drop(busy);
        match result {
            Ok(now)
                if now.running().next().is_none()
                    && now.sandboxes.iter().all(|sandbox| sandbox.state == SandboxState::NotReady) =>
            {
                return true;
            }
            Ok(_) => log::warn!("pod without a manifest still runs after it was stopped uid={}", pod.uid),
            Err(error) => {
                if stop.is_stopped() {
                    return false;
                }
                log::warn!("cannot stop pod without a manifest: {error} uid={}", pod.uid);
                shared.locked().last_error = Some(error);
            }
        }
        let _waiting = threads::waiting("retry");
        if stop.wait(jitter(RETRY, random_unit())) == crate::util::stop::Waited::Stopped {
            return false;
        }
    }
}
