//! The phase of a pod, from the statuses of its containers (Go: getPhase).

use crate::model::api::{Container, ContainerStatus, PodStatus};
use crate::model::pod::{Pod, is_sidecar};
use crate::model::{reasons, restart};

use super::inputs::Inputs;

/// Whether `status.phase` is one of a pod that will never run again.
#[must_use]
pub fn is_terminal(phase: Option<&str>) -> bool {
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// The state of a container, as far as the phase depends on it.
enum RunState {
    /// No status, or one without a state.
    Unknown,
    Running,
    /// Ended, with its exit code.
    Ended(i32),
    /// Waiting for its next run; with the exit code of the last one.
    BetweenRuns(i32),
    /// Waiting for its first run.
    Waiting,
    /// Ended by a restart of all containers of the pod.
    Reset,
}

/// Whether containers can still start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContainerStarts {
    /// Containers can start and restart.
    Allowed,
    /// No container starts again, independent of the restart policy.
    Forbidden,
}

/// The phase, computed without the previous one.
pub(super) fn compute(inputs: &Inputs, status: &PodStatus) -> &'static str {
    // A static pod that is stopped is not finished: its containers' restart policy still applies.
    let starts = if inputs.terminal && !inputs.pod.is_static() {
        ContainerStarts::Forbidden
    } else {
        ContainerStarts::Allowed
    };
    from_statuses(inputs.pod, status, starts, regular_in_sandbox(inputs))
}

/// Whether a regular container was created in the present sandbox.
fn regular_in_sandbox(inputs: &Inputs) -> bool {
    let sandbox = inputs.runtime.newest_sandbox().map(|sandbox| &sandbox.id);
    inputs.runtime.containers.iter().any(|instance| {
        sandbox.is_none_or(|id| instance.sandbox_id.is_empty() || *id == instance.sandbox_id)
            && inputs.pod.containers().iter().any(|container| container.name == instance.name)
    })
}

#[derive(Default)]
struct Count {
    pending_init: bool,
    failed_init: bool,
    pending_sidecar: bool,
    unknown: bool,
    running: bool,
    waiting: bool,
    stopped: usize,
    succeeded: usize,
    restarting: bool,
}

fn from_statuses(pod: &Pod, status: &PodStatus, starts: ContainerStarts, initialized: bool) -> &'static str {
    let mut count = Count::default();
    for container in pod.init_containers() {
        let seen = run_state(container, status.init_container_statuses.as_deref());
        if is_sidecar(container) {
            count_sidecar(&mut count, container, status, &seen);
        } else {
            match seen {
                RunState::Ended(0) | RunState::BetweenRuns(0) | RunState::Reset => {}
                RunState::Ended(code) | RunState::BetweenRuns(code) => {
                    count.failed_init |= !restart::may_restart(pod, container, code);
                }
                RunState::Unknown | RunState::Running | RunState::Waiting => count.pending_init = true,
            }
        }
    }
    for container in pod.containers() {
        match run_state(container, status.container_statuses.as_deref()) {
            RunState::Unknown => count.unknown = true,
            RunState::Running => count.running = true,
            RunState::Waiting => count.waiting = true,
            RunState::Ended(code) => {
                count.stopped += 1;
                count.succeeded += usize::from(code == 0);
                count.restarting |= restart::may_restart(pod, container, code);
            }
            RunState::BetweenRuns(code) => {
                count.stopped += 1;
                count.restarting |= restart::may_restart(pod, container, code);
            }
            RunState::Reset => {
                count.stopped += 1;
                count.restarting = true;
            }
        }
    }
    decide(&count, starts, initialized)
}

fn count_sidecar(count: &mut Count, container: &Container, status: &PodStatus, seen: &RunState) {
    match seen {
        RunState::Running => {
            count.running = true;
            count.pending_sidecar |= find(container, status.init_container_statuses.as_deref())
                .is_none_or(|status| status.started != Some(true));
        }
        RunState::Ended(_) | RunState::BetweenRuns(_) | RunState::Reset => {}
        RunState::Waiting => {
            count.pending_sidecar = true;
            count.waiting = true;
        }
        RunState::Unknown => count.unknown = true,
    }
}

fn decide(count: &Count, starts: ContainerStarts, initialized: bool) -> &'static str {
    if count.failed_init {
        return "Failed";
    }
    if count.pending_init || (count.pending_sidecar && !initialized) || count.waiting {
        return "Pending";
    }
    if count.unknown {
        return "Pending";
    }
    if count.running {
        return "Running";
    }
    if count.stopped == 0 {
        return "Pending";
    }
    let all_succeeded = count.stopped == count.succeeded;
    match starts {
        ContainerStarts::Allowed if count.restarting => "Running",
        _ if all_succeeded => "Succeeded",
        _ => "Failed",
    }
}

fn find<'a>(container: &Container, list: Option<&'a [ContainerStatus]>) -> Option<&'a ContainerStatus> {
    list?.iter().find(|status| status.name == container.name)
}

fn run_state(container: &Container, list: Option<&[ContainerStatus]>) -> RunState {
    let Some(status) = find(container, list) else { return RunState::Unknown };
    let Some(state) = &status.state else { return RunState::Unknown };
    if state.running.is_some() {
        return RunState::Running;
    }
    let ended = [Some(state), status.last_state.as_ref().filter(|_| state.waiting.is_some())];
    let ended = ended.into_iter().flatten().find_map(|state| state.terminated.as_ref());
    if ended.is_some_and(|ended| ended.reason.as_deref() == Some(reasons::RESTARTING_ALL_CONTAINERS)) {
        return RunState::Reset;
    }
    if let Some(ended) = &state.terminated {
        return RunState::Ended(ended.exit_code);
    }
    if state.waiting.is_none() {
        return RunState::Unknown;
    }
    match status.last_state.as_ref().and_then(|last| last.terminated.as_ref()) {
        Some(ended) => RunState::BetweenRuns(ended.exit_code),
        None => RunState::Waiting,
    }
}
