//! The actions that make a pod's containers match its specification, as data.
//!
//! Owns nothing and does nothing: [`compute`] maps a pod, its state in the runtime and
//! the verdicts of its probes onto a [`Plan`]; the pod's worker carries it out.
//! Invariants: same inputs, same plan; a plan for a pod that is in the desired state is empty;
//! indices in a plan are in specification order and valid for that specification.
//! Absent on purpose: crash back-off (the worker checks it before each start).
//! Go counterpart: computePodActions in pkg/kubelet/kuberuntime.

mod init;
#[cfg(test)]
mod properties;
mod regular;
mod reset;
pub mod resize;
mod sandbox;
pub mod shutdown;
#[cfg(test)]
mod tests;

use crate::model::api::Container;
use crate::model::ids::{ContainerId, SandboxId};
use crate::model::pod::{Pod, container_hash};
use crate::model::pod_size::MAX_CONTAINERS;
use crate::model::restart;
use crate::model::runtime::{ContainerState, ContainerStatus, PodRuntime};
use crate::model::verdict::ProbeVerdict;
use crate::probes::{self, Kind};

pub use reset::Reset;
pub use resize::Resize;
pub use sandbox::{SandboxCheck, check as check_sandbox};

/// The inputs of a plan.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// The desired pod.
    pub pod: &'a Pod,
    /// The sandboxes and containers of the runtime.
    pub runtime: &'a PodRuntime,
    /// Liveness of a container instance; only `Failure` matters.
    pub liveness: &'a dyn Fn(&ContainerId) -> ProbeVerdict,
    /// Startup of a container instance. A sidecar with a startup probe holds back its
    /// successors until this is `Success`.
    pub startup: &'a dyn Fn(&ContainerId) -> ProbeVerdict,
    /// The restart of all containers has to wait for a crash-loop back-off. Until then the
    /// container that requested it stays as it is; the other containers are synced as usual.
    pub reset_held: bool,
}

impl<'a> Inputs<'a> {
    #[cfg(test)]
    pub(super) fn without_probes(pod: &'a Pod, runtime: &'a PodRuntime) -> Self {
        Inputs {
            pod,
            runtime,
            liveness: &|_| ProbeVerdict::NoProbe,
            startup: &|_| ProbeVerdict::NoProbe,
            reset_held: false,
        }
    }

    /// Whether `container`, whose newest instance is `status`, waits for the restart of all.
    fn waits_for_all(&self, container: &Container, status: Option<&ContainerStatus>) -> bool {
        self.reset_held && restart::requests_restart_of_all(container, status)
    }
}

/// Why a single container is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KillReason {
    /// The container's image or name differs from the specification.
    DefinitionChanged,
    /// The runtime does not know the container's state: it is stopped before a new start.
    Unknown,
    /// A newer instance of the container exists.
    Twin,
    /// The liveness probe failed; the probe's own grace period applies.
    LivenessProbe,
    /// The startup probe failed; the probe's own grace period applies.
    StartupProbe,
    /// The container's resources changed, and its resize policy requires a restart.
    Resize,
}

impl KillReason {
    /// The grace period for this reason: that of the failed probe. It may be longer than the pod's.
    #[must_use]
    pub fn probe_grace(self, container: &Container) -> Option<i64> {
        let kind = match self {
            KillReason::LivenessProbe => Kind::Liveness,
            KillReason::StartupProbe => Kind::Startup,
            _ => return None,
        };
        probes::grace_seconds(container, kind)
    }
}

/// One container to stop while the rest of the pod continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KillContainer {
    /// The instance to stop.
    pub id: ContainerId,
    /// The container's name in the pod.
    pub name: String,
    /// The message of the `Killing` event.
    pub message: String,
    /// The reason, which determines the grace period.
    pub reason: KillReason,
}

/// The actions for a pod, in the order of the fields.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Stop every running container, then every sandbox. Replaces the list in `kill`.
    pub kill_pod: bool,
    /// Make a new sandbox. The records of all init containers are removed first.
    pub create_sandbox: bool,
    /// The new sandbox takes the place of one that was in use: raise `SandboxChanged`.
    pub sandbox_changed: bool,
    /// The newest sandbox at the moment, ready or not.
    pub sandbox_id: Option<SandboxId>,
    /// Attempt number of the sandbox to make, or of the present one.
    pub attempt: u32,
    /// Containers to stop before the starts below.
    pub kill: Vec<KillContainer>,
    /// Instances to stop and to remove, in this order: all containers start again. The
    /// instance that requested it comes last, so that an interrupted reset is continued.
    pub reset: Vec<Reset>,
    /// Ephemeral containers to start, by index.
    pub start_ephemeral: Vec<usize>,
    /// Init containers to start, by index.
    pub start_init: Vec<usize>,
    /// Running containers that get other resources, in this order. See [`resize::add`].
    pub resize: Vec<Resize>,
    /// The resources of the pod as a whole have changed.
    pub resize_pod: bool,
    /// Regular containers to start, by index.
    pub start: Vec<usize>,
}

impl Plan {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        !self.kill_pod
            && !self.create_sandbox
            && self.kill.is_empty()
            && self.reset.is_empty()
            && self.resize.is_empty()
            && !self.resize_pod
            && self.start_ephemeral.is_empty()
            && self.start_init.is_empty()
            && self.start.is_empty()
    }
}

/// Compares the desired containers with the existing ones.
#[must_use]
pub fn compute(inputs: &Inputs) -> Plan {
    let sandbox = sandbox::check(inputs.pod, inputs.runtime);
    let mut plan = Plan {
        sandbox_id: inputs.runtime.newest_sandbox().map(|sandbox| sandbox.id.clone()),
        attempt: sandbox.attempt,
        ..Plan::default()
    };
    // With a dead sandbox all containers start again in any case.
    if !inputs.reset_held || sandbox.needed() {
        plan.reset = reset::compute(inputs.pod, inputs.runtime);
    }
    if !plan.reset.is_empty() {
        return plan;
    }
    if sandbox.needed() {
        plan.kill_pod = true;
        start_over(inputs, &sandbox, &mut plan);
        return plan;
    }
    plan.start_ephemeral = ephemeral(inputs, &mut plan);
    match init::plan_init_containers(inputs, &mut plan) {
        init::InitProgress::Initialized => regular::compute(inputs, &mut plan),
        init::InitProgress::NotYet => {}
        init::InitProgress::Failed => {
            plan.kill_pod = true;
            plan.start_init.clear();
        }
    }
    if plan.kill_pod {
        // The pod ends: containers that were planned before are not started.
        plan.start_ephemeral.clear();
    }
    plan
}

/// All containers start again in a new sandbox, unless none has to run.
fn start_over(inputs: &Inputs, sandbox: &SandboxCheck, plan: &mut Plan) {
    let (pod, runtime) = (inputs.pod, inputs.runtime);
    if pod.restart_policy() == "Never" && sandbox.attempt != 0 && !runtime.containers.is_empty() {
        return;
    }
    let start: Vec<usize> = pod
        .containers()
        .iter()
        .enumerate()
        .filter(|(_, container)| {
            let succeeded = runtime
                .newest(&container.name)
                .is_some_and(|status| status.state == ContainerState::Exited && status.exit_code == 0);
            !(succeeded && restart::policy(pod, container) == "OnFailure")
        })
        .map(|(index, _)| index)
        .collect();
    let ever_created = pod.containers().iter().any(|container| {
        runtime.newest(&container.name).is_some_and(|status| status.state != ContainerState::Unknown)
    });
    if start.is_empty() && ever_created {
        return;
    }
    plan.create_sandbox = true;
    plan.sandbox_changed = sandbox.replaces.is_some();
    if pod.init_containers().is_empty() {
        plan.start = start;
    } else {
        plan.start_init = vec![0];
    }
}

/// An ephemeral container is started once and never again. They are added to pods that were
/// admitted, so the limit of [`MAX_CONTAINERS`] is applied here: later ones stay waiting.
fn ephemeral(inputs: &Inputs, plan: &mut Plan) -> Vec<usize> {
    let spec = inputs.pod.spec();
    let others = spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len);
    let containers = spec.ephemeral_containers.as_deref().unwrap_or_default();
    let mut start = Vec::new();
    for (index, container) in containers.iter().enumerate().take(MAX_CONTAINERS.saturating_sub(others)) {
        stop_twins(inputs, "Ephemeral container", &container.name, plan);
        if inputs.runtime.newest(&container.name).is_none() && !inputs.pod.is_deleting() {
            start.push(index);
        }
    }
    start
}

/// Stops older instances that run at the same time as the newest one. A runtime may carry out a
/// start after its caller has timed out or ended, when a newer instance exists already.
///
/// DIFFERS: upstream inspects the newest instance only; older ones continue to run.
fn stop_twins(inputs: &Inputs, kind: &str, name: &str, plan: &mut Plan) {
    let Some(newest) = inputs.runtime.newest(name) else { return };
    for twin in inputs.runtime.running() {
        if twin.name == name && twin.id != newest.id {
            plan.kill.push(KillContainer {
                id: twin.id.clone(),
                name: name.to_owned(),
                message: format!("{kind} {name} runs twice, stopping the older instance"),
                reason: KillReason::Twin,
            });
        }
    }
}

/// Whether an instance has another image or another name than the specification.
/// DIFFERS: an instance without a readable hash is not changed. Upstream reads it as zero and
/// restarts it, although its definition may be the right one.
fn definition_changed(container: &Container, status: &ContainerStatus) -> bool {
    let image = container.image.as_deref().unwrap_or_default();
    status.hash.is_some_and(|hash| hash != container_hash(&container.name, image))
}
