//! Init containers run one after another, sidecars at the same time.

use crate::model::api::Container;
use crate::model::pod::is_sidecar;
use crate::model::restart;
use crate::model::runtime::{ContainerState, ContainerStatus};
use crate::model::verdict::ProbeVerdict;

use super::{Inputs, KillContainer, KillReason, Plan, definition_changed, stop_twins};

/// How far the pod's initialization is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InitProgress {
    /// Regular containers may run.
    Initialized,
    /// An init container runs or is about to.
    NotYet,
    /// An init container failed and is not restarted: the pod is to end.
    Failed,
}

/// The state of the initialization, derived from the newest init container.
enum InitContainerState {
    /// The initialization waits for this container.
    Wait,
    /// This container has ended, or is ready for its successors.
    Done,
    Failed,
}

/// Fills `start_init` and `kill` of the plan.
pub(super) fn plan_init_containers(inputs: &Inputs, plan: &mut Plan) -> InitProgress {
    let containers = inputs.pod.init_containers();
    if containers.is_empty() {
        return InitProgress::Initialized;
    }
    for container in containers {
        stop_twins(inputs, "Init container", &container.name, plan);
    }
    // A regular container in the present sandbox proves that the init containers have run there, also
    // one that has ended, because their records may be gone. After a reboot the containers of the
    // former sandbox may be listed in any state, and the new sandbox is not initialized (Go, since 1.37:
    // `HasAnyRegularContainerCreated`).
    let initialized_before = inputs.pod.containers().iter().any(|container| {
        newest_in_sandbox(inputs, &container.name)
            .is_some_and(|status| status.state != ContainerState::Unknown)
    });
    let mut outcome = if initialized_before { InitProgress::Initialized } else { InitProgress::NotYet };
    // The loop runs from the last container to the first: the newest init container shows how far
    // the initialization is. Every sidecar before it was started once and must keep running;
    // ordinary containers before it have ended. After the initialization this applies to all
    // init containers.
    let mut progress_known = initialized_before;
    for (index, container) in containers.iter().enumerate().rev() {
        let status = newest_in_sandbox(inputs, &container.name);
        if progress_known {
            if is_sidecar(container) && !inputs.waits_for_all(container, status) {
                keep_sidecar(inputs, index, container, status, plan);
            }
            continue;
        }
        let Some(status) = status else { continue };
        progress_known = true;
        let step = if inputs.waits_for_all(container, Some(status)) {
            InitContainerState::Wait
        } else if is_sidecar(container) {
            newest_sidecar(inputs, index, container, status, plan)
        } else {
            ordinary(inputs, index, container, status, plan)
        };
        match step {
            InitContainerState::Wait => {}
            InitContainerState::Done if index + 1 == containers.len() => outcome = InitProgress::Initialized,
            InitContainerState::Done => plan.start_init.push(index + 1),
            InitContainerState::Failed => return InitProgress::Failed,
        }
    }
    if !progress_known {
        plan.start_init.push(0);
    }
    plan.start_init.sort_unstable();
    outcome
}

/// The newest instance, unless it belongs to a sandbox that was removed: an init container
/// has to run once in every sandbox.
fn newest_in_sandbox<'a>(inputs: &Inputs<'a>, name: &str) -> Option<&'a ContainerStatus> {
    let sandbox = inputs.runtime.newest_sandbox().map(|sandbox| &sandbox.id);
    inputs
        .runtime
        .newest(name)
        .filter(|status| status.sandbox_id.is_empty() || sandbox.is_none_or(|id| *id == status.sandbox_id))
}

/// Keeps a sidecar running that was started once, independent of the pod's restart policy and of
/// later containers (Go: computeInitContainerActions).
fn keep_sidecar(
    inputs: &Inputs,
    index: usize,
    container: &Container,
    status: Option<&ContainerStatus>,
    plan: &mut Plan,
) {
    if inputs.pod.is_deleting() {
        // No container restarts any more.
        return;
    }
    let Some(status) = status else {
        plan.start_init.push(index);
        return;
    };
    match status.state {
        ContainerState::Created | ContainerState::Exited => plan.start_init.push(index),
        ContainerState::Unknown => replace(index, container, status, KillReason::Unknown, plan),
        ContainerState::Running => {
            if let Some(reason) = defect(inputs, container, status) {
                replace(index, container, status, reason, plan);
            }
        }
    }
}

/// A sidecar that is the newest init container: its successors wait until it has started.
fn newest_sidecar(
    inputs: &Inputs,
    index: usize,
    container: &Container,
    status: &ContainerStatus,
    plan: &mut Plan,
) -> InitContainerState {
    match status.state {
        ContainerState::Created | ContainerState::Exited => {
            plan.start_init.push(index);
            InitContainerState::Wait
        }
        ContainerState::Unknown => {
            replace(index, container, status, KillReason::Unknown, plan);
            InitContainerState::Wait
        }
        ContainerState::Running => match defect(inputs, container, status) {
            // The successor does not wait for its liveness.
            Some(KillReason::LivenessProbe) if started(inputs, container, status) => {
                replace(index, container, status, KillReason::LivenessProbe, plan);
                InitContainerState::Done
            }
            Some(reason) => {
                replace(index, container, status, reason, plan);
                InitContainerState::Wait
            }
            None if started(inputs, container, status) => InitContainerState::Done,
            None => InitContainerState::Wait,
        },
    }
}

/// An ordinary init container that is the newest one.
fn ordinary(
    inputs: &Inputs,
    index: usize,
    container: &Container,
    status: &ContainerStatus,
    plan: &mut Plan,
) -> InitContainerState {
    match status.state {
        ContainerState::Created => {
            plan.start_init.push(index);
            InitContainerState::Wait
        }
        ContainerState::Running => InitContainerState::Wait,
        ContainerState::Exited if !failed(status) => InitContainerState::Done,
        // A deleting pod starts nothing; its worker ends it.
        _ if inputs.pod.is_deleting() => InitContainerState::Wait,
        ContainerState::Exited if is_retried(inputs, container, status.exit_code) => {
            plan.start_init.push(index);
            InitContainerState::Wait
        }
        // An instance in an unknown state counts as failed; its code is not known.
        ContainerState::Unknown if is_retried(inputs, container, 1) => {
            replace(index, container, status, KillReason::Unknown, plan);
            InitContainerState::Wait
        }
        ContainerState::Exited | ContainerState::Unknown => InitContainerState::Failed,
    }
}

fn failed(status: &ContainerStatus) -> bool {
    status.exit_code != 0 || status.reason == crate::model::reasons::OOM_KILLED
}

/// Whether a failed init container is retried. After an out-of-memory kill the exit code may
/// be 0, which no policy treats as a failure.
fn is_retried(inputs: &Inputs, container: &Container, exit_code: i32) -> bool {
    let code = if exit_code == 0 { 137 } else { exit_code };
    restart::may_restart(inputs.pod, container, code)
}

/// Whether a running sidecar's startup probe (if any) has passed.
fn started(inputs: &Inputs, container: &Container, status: &ContainerStatus) -> bool {
    container.startup_probe.is_none() || (inputs.startup)(&status.id) == ProbeVerdict::Success
}

/// Why a running sidecar has to be replaced.
fn defect(inputs: &Inputs, container: &Container, status: &ContainerStatus) -> Option<KillReason> {
    if definition_changed(container, status) {
        return Some(KillReason::DefinitionChanged);
    }
    if container.startup_probe.is_some() && (inputs.startup)(&status.id) == ProbeVerdict::Failure {
        return Some(KillReason::StartupProbe);
    }
    if container.liveness_probe.is_some() && (inputs.liveness)(&status.id) == ProbeVerdict::Failure {
        return Some(KillReason::LivenessProbe);
    }
    None
}

fn replace(
    index: usize,
    container: &Container,
    status: &ContainerStatus,
    reason: KillReason,
    plan: &mut Plan,
) {
    let name = &container.name;
    let message = match reason {
        KillReason::DefinitionChanged => format!("Init container {name} definition changed"),
        KillReason::StartupProbe => format!("Init container {name} failed startup probe"),
        KillReason::LivenessProbe => format!("Init container {name} failed liveness probe"),
        KillReason::Resize => format!("Init container {name} resize requires restart"),
        KillReason::Twin => format!("Init container {name} runs twice, stopping the older instance"),
        KillReason::Unknown => {
            "Init container is in \"unknown\" state, try killing it before restart".to_owned()
        }
    };
    plan.kill.push(KillContainer { id: status.id.clone(), name: name.clone(), message, reason });
    plan.start_init.push(index);
}
