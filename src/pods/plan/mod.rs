//! What has to be done so that a pod's containers match its specification, as data.
//!
//! Owns nothing and does nothing: [`compute`] maps a pod, what the runtime says of it and
//! what its probes say onto a [`Plan`]; the pod's worker carries it out.
//! Invariants: same inputs, same plan; a plan for a pod that is as it should be is empty;
//! indices in a plan are in specification order and valid for that specification.
//! Absent on purpose: crash back-off (the worker asks it before each start), resize,
//! and the in-place restart of all containers.
//! Go counterpart: computePodActions in pkg/kubelet/kuberuntime.

mod init;
mod regular;
mod sandbox;
#[cfg(test)]
mod tests;

use crate::model::ids::{ContainerId, SandboxId};
use crate::model::pod::{Pod, container_hash};
use crate::model::restart;
use crate::model::runtime::{ContainerState, ContainerStatus, PodRuntime};
use crate::model::verdict::Verdict;

pub use sandbox::{SandboxCheck, check as check_sandbox};

/// What a plan is made from.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// What should run.
    pub pod: &'a Pod,
    /// What does run.
    pub runtime: &'a PodRuntime,
    /// Liveness of a container instance; only `Failure` matters.
    pub liveness: &'a dyn Fn(&ContainerId) -> Verdict,
    /// Startup of a container instance. A sidecar with a startup probe holds back its
    /// successors until this is `Success`.
    pub startup: &'a dyn Fn(&ContainerId) -> Verdict,
}

impl<'a> Inputs<'a> {
    /// Inputs of a pod without any probe.
    #[must_use]
    pub fn without_probes(pod: &'a Pod, runtime: &'a PodRuntime) -> Self {
        Inputs { pod, runtime, liveness: &|_| Verdict::NoProbe, startup: &|_| Verdict::NoProbe }
    }
}

/// Why a single container is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KillReason {
    /// Its image or name is not the wanted one any more.
    DefinitionChanged,
    /// The runtime cannot tell its state, so it is stopped for certain before a new start.
    Unknown,
    /// A newer instance of it exists.
    Twin,
    /// Its liveness probe failed; the probe's own grace period applies.
    LivenessProbe,
    /// Its startup probe failed; the probe's own grace period applies.
    StartupProbe,
}

/// One container to stop while the rest of the pod goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KillContainer {
    /// Which instance.
    pub id: ContainerId,
    /// Its container's name in the pod.
    pub name: String,
    /// For the `Killing` event.
    pub message: String,
    /// For the choice of the grace period.
    pub reason: KillReason,
}

/// What to do, in the order of the fields.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Stop every running container, then every sandbox. Replaces the list in `kill`.
    pub kill_pod: bool,
    /// Make a new sandbox. With it the records of all init containers are removed first.
    pub create_sandbox: bool,
    /// The new sandbox takes the place of one that was in use: raise `SandboxChanged`.
    pub sandbox_changed: bool,
    /// The newest sandbox at the moment, ready or not.
    pub sandbox_id: Option<SandboxId>,
    /// Attempt number of the sandbox to make, or of the present one.
    pub attempt: u32,
    /// Containers to stop before the starts below.
    pub kill: Vec<KillContainer>,
    /// Ephemeral containers to start, by index.
    pub start_ephemeral: Vec<usize>,
    /// Init containers to start, by index.
    pub start_init: Vec<usize>,
    /// Regular containers to start, by index.
    pub start: Vec<usize>,
}

impl Plan {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.kill_pod
            && !self.create_sandbox
            && self.kill.is_empty()
            && self.start_ephemeral.is_empty()
            && self.start_init.is_empty()
            && self.start.is_empty()
    }
}

/// Compares what should run with what does.
#[must_use]
pub fn compute(inputs: &Inputs) -> Plan {
    let sandbox = sandbox::check(inputs.pod, inputs.runtime);
    let mut plan = Plan {
        sandbox_id: inputs.runtime.newest_sandbox().map(|sandbox| sandbox.id.clone()),
        attempt: sandbox.attempt,
        ..Plan::default()
    };
    if sandbox.needed {
        plan.kill_pod = true;
        start_over(inputs, &sandbox, &mut plan);
        return plan;
    }
    plan.start_ephemeral = ephemeral(inputs);
    match init::compute(inputs, &mut plan) {
        init::Outcome::Initialized => regular::compute(inputs, &mut plan),
        init::Outcome::NotYet => {}
        init::Outcome::Failed => {
            plan.kill_pod = true;
            plan.start_init.clear();
        }
    }
    plan
}

/// Everything begins again in a new sandbox, unless nothing is left to run in it.
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

/// An ephemeral container is started once and never again.
fn ephemeral(inputs: &Inputs) -> Vec<usize> {
    let containers = inputs.pod.spec().ephemeral_containers.as_deref().unwrap_or_default();
    containers
        .iter()
        .enumerate()
        .filter(|(_, container)| inputs.runtime.newest(&container.name).is_none())
        .map(|(index, _)| index)
        .collect()
}

/// Whether an instance was made from another image, or under another name, than wanted.
///
/// DIFFERS: an instance without a readable hash is left alone. Upstream reads it as zero
/// and restarts it, though nothing says that it is wrong.
fn definition_changed(container: &crate::model::api::Container, status: &ContainerStatus) -> bool {
    let image = container.image.as_deref().unwrap_or_default();
    status.hash.is_some_and(|hash| hash != container_hash(&container.name, image))
}
