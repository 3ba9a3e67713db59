//! The phase of a pod, from the statuses of its containers (Go: getPhase).

use crate::model::api::{Container, ContainerStatus, PodStatus};
use crate::model::pod::{Pod, is_sidecar};
use crate::model::{reasons, restart};

use super::inputs::Inputs;

/// `status.phase` of a pod that will never run again.
#[must_use]
pub fn is_terminal(phase: Option<&str>) -> bool {
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// A container as the phase sees it.
enum Seen {
    /// No status, or one without a state.
    Unknown,
    /// Running.
    Running,
    /// Over, with its exit code.
    Ended(i32),
    /// Between two runs; the exit code is that of the last one.
    Between(i32),
    /// Waiting for its first run.
    Waiting,
    /// Removed, to start again together with all the others.
    Reset,
}

/// Whether anything can still start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outlook {
    /// The pod goes on.
    Open,
    /// Nothing starts any more, whatever the restart policy.
    Closed,
}

/// The phase, without regard to what it was before.
pub(super) fn compute(inputs: &Inputs, status: &PodStatus) -> &'static str {
    // A static pod that stops is replaced, not finished, so its termination forces no phase.
    let outlook = if inputs.terminal && !inputs.pod.is_static() { Outlook::Closed } else { Outlook::Open };
    of(inputs.pod, status, outlook, regular_in_sandbox(inputs))
}

/// Whether a regular container was made in the present sandbox.
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

fn of(pod: &Pod, status: &PodStatus, outlook: Outlook, initialized: bool) -> &'static str {
    let mut count = Count::default();
    for container in pod.init_containers() {
        let seen = look(container, status.init_container_statuses.as_deref());
        if is_sidecar(container) {
            count_sidecar(&mut count, container, status, &seen);
        } else {
            match seen {
                Seen::Ended(0) | Seen::Between(0) | Seen::Reset => {}
                Seen::Ended(code) | Seen::Between(code) => {
                    count.failed_init |= !restart::may_restart(pod, container, code);
                }
                Seen::Unknown | Seen::Running | Seen::Waiting => count.pending_init = true,
            }
        }
    }
    for container in pod.containers() {
        match look(container, status.container_statuses.as_deref()) {
            Seen::Unknown => count.unknown = true,
            Seen::Running => count.running = true,
            Seen::Waiting => count.waiting = true,
            Seen::Ended(code) => {
                count.stopped += 1;
                count.succeeded += usize::from(code == 0);
                count.restarting |= restart::may_restart(pod, container, code);
            }
            Seen::Between(code) => {
                count.stopped += 1;
                count.restarting |= restart::may_restart(pod, container, code);
            }
            Seen::Reset => {
                count.stopped += 1;
                count.restarting = true;
            }
        }
    }
    decide(&count, outlook, initialized)
}

fn count_sidecar(count: &mut Count, container: &Container, status: &PodStatus, seen: &Seen) {
    match seen {
        Seen::Running => {
            count.running = true;
            count.pending_sidecar |= find(container, status.init_container_statuses.as_deref())
                .is_none_or(|status| status.started != Some(true));
        }
        Seen::Ended(_) | Seen::Between(_) | Seen::Reset => {}
        Seen::Waiting => {
            count.pending_sidecar = true;
            count.waiting = true;
        }
        Seen::Unknown => count.unknown = true,
    }
}

fn decide(count: &Count, outlook: Outlook, initialized: bool) -> &'static str {
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
    match outlook {
        Outlook::Open if count.restarting => "Running",
        _ if all_succeeded => "Succeeded",
        _ => "Failed",
    }
}

fn find<'a>(container: &Container, list: Option<&'a [ContainerStatus]>) -> Option<&'a ContainerStatus> {
    list?.iter().find(|status| status.name == container.name)
}

fn look(container: &Container, list: Option<&[ContainerStatus]>) -> Seen {
    let Some(status) = find(container, list) else { return Seen::Unknown };
    let Some(state) = &status.state else { return Seen::Unknown };
    if state.running.is_some() {
        return Seen::Running;
    }
    let ended = [Some(state), status.last_state.as_ref().filter(|_| state.waiting.is_some())];
    let ended = ended.into_iter().flatten().find_map(|state| state.terminated.as_ref());
    if ended.is_some_and(|ended| ended.reason.as_deref() == Some(reasons::RESTARTING_ALL_CONTAINERS)) {
        return Seen::Reset;
    }
    if let Some(ended) = &state.terminated {
        return Seen::Ended(ended.exit_code);
    }
    if state.waiting.is_none() {
        return Seen::Unknown;
    }
    match status.last_state.as_ref().and_then(|last| last.terminated.as_ref()) {
        Some(ended) => Seen::Between(ended.exit_code),
        None => Seen::Waiting,
    }
}
