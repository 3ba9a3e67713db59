//! The allowed changes of a status, and the form in which it is stored (Go: status manager's
//! updateStatusInternal, normalizeStatus, checkContainerStateTransition).

use jiff::Timestamp;

use crate::model::api::{Container, ContainerState, ContainerStatus, PodCondition, PodStatus};
use crate::model::meta::Time;
use crate::model::pod::{Pod, is_sidecar};
use crate::model::restart;

use super::condition_types::{DISRUPTION_TARGET, OWNED_CONDITIONS};
use super::conditions;
use super::phase::is_terminal;

/// Bytes of termination messages in one pod; each container gets an even share.
const MESSAGE_BUDGET_BYTES: usize = 12288;

/// A change of a container that is impossible: the inspection is wrong or outdated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("container {container} has terminated and may not run again")]
pub(super) struct IllegalTransition {
    /// The container's name.
    pub container: String,
}

/// Refuses a status in which a container runs again that must not restart.
pub(super) fn check(pod: &Pod, old: &PodStatus, new: &PodStatus) -> Result<(), IllegalTransition> {
    if pod.restart_policy() == "Always" || restart::may_restart_all(pod) {
        return Ok(());
    }
    check_list(pod.containers(), &old.container_statuses, &new.container_statuses, |container, code| {
        restart::may_restart(pod, container, code)
    })?;
    // DIFFERS: unless the policy is Never, an init container that succeeded may run again, because
    // a new sandbox begins with the first one. Upstream drops every status until the container has
    // succeeded again.
    check_list(
        pod.init_containers(),
        &old.init_container_statuses,
        &new.init_container_statuses,
        |container, code| {
            is_sidecar(container)
                || (code == 0 && pod.restart_policy() != "Never")
                || restart::may_restart(pod, container, code)
        },
    )
}

fn check_list(
    containers: &[Container],
    old: &Option<Vec<ContainerStatus>>,
    new: &Option<Vec<ContainerStatus>>,
    may_run: impl Fn(&Container, i32) -> bool,
) -> Result<(), IllegalTransition> {
    let ended = |status: &ContainerStatus| {
        status.state.as_ref().and_then(|state| state.terminated.as_ref()).map(|ended| ended.exit_code)
    };
    for before in old.iter().flatten() {
        let Some(code) = ended(before) else { continue };
        let Some(container) = containers.iter().find(|container| container.name == before.name) else {
            continue;
        };
        let undone = new.iter().flatten().any(|after| after.name == before.name && ended(after).is_none());
        if undone && !may_run(container, code) {
            return Err(IllegalTransition { container: before.name.clone() });
        }
    }
    Ok(())
}

/// Normalizes `new`, which is stored after `old`.
pub(super) fn normalize_after(pod: &Pod, old: &PodStatus, new: &mut PodStatus, now: Timestamp) {
    for condition in new.conditions.iter_mut().flatten() {
        if !is_ours(condition) {
            continue;
        }
        let before = conditions::find(old.conditions.as_deref(), &condition.type_)
            .filter(|before| before.status == condition.status)
            .and_then(|before| before.last_transition_time.clone());
        condition.last_transition_time = before.or(Some(Time(now)));
    }
    if old.start_time.is_some() {
        new.start_time.clone_from(&old.start_time);
    } else if new.start_time.is_none() {
        new.start_time = Some(Time(now));
    }
    new.observed_generation = new.observed_generation.max(old.observed_generation);
    if is_terminal(old.phase.as_deref()) && !is_terminal(new.phase.as_deref()) {
        new.phase.clone_from(&old.phase);
    }
    normalize(pod, new);
}

fn is_ours(condition: &PodCondition) -> bool {
    OWNED_CONDITIONS.contains(&condition.type_.as_str()) || condition.type_ == DISRUPTION_TARGET
}

fn normalize(pod: &Pod, status: &mut PodStatus) {
    truncate_to_seconds(&mut status.start_time);
    for condition in status.conditions.iter_mut().flatten() {
        truncate_to_seconds(&mut condition.last_probe_time);
        truncate_to_seconds(&mut condition.last_transition_time);
    }
    let ephemeral = pod.spec().ephemeral_containers.as_ref().map_or(0, Vec::len);
    let budget = MESSAGE_BUDGET_BYTES / (pod.all_containers().count() + ephemeral).max(1);
    let lists = [
        &mut status.init_container_statuses,
        &mut status.container_statuses,
        &mut status.ephemeral_container_statuses,
    ];
    for container in lists.into_iter().flatten().flatten() {
        for state in [&mut container.state, &mut container.last_state].into_iter().flatten() {
            normalize_state(state, budget);
        }
    }
    for list in [&mut status.container_statuses, &mut status.ephemeral_container_statuses] {
        list.iter_mut().for_each(|list| list.sort_by(|a, b| a.name.cmp(&b.name)));
    }
    // Init containers keep the order of the specification.
    if let Some(list) = &mut status.init_container_statuses {
        let place = |name: &str| pod.init_containers().iter().position(|container| container.name == name);
        list.sort_by_key(|status| place(&status.name));
    }
}

fn normalize_state(state: &mut ContainerState, budget: usize) {
    if let Some(running) = &mut state.running {
        truncate_to_seconds(&mut running.started_at);
    }
    if let Some(ended) = &mut state.terminated {
        truncate_to_seconds(&mut ended.started_at);
        truncate_to_seconds(&mut ended.finished_at);
        if let Some(message) = &mut ended.message
            && message.len() > budget
        {
            message.truncate(message.floor_char_boundary(budget));
        }
    }
}

/// The API stores whole seconds only.
fn truncate_to_seconds(time: &mut Option<Time>) {
    if let Some(time) = time
        && let Ok(whole) = Timestamp::from_second(time.0.as_second())
    {
        time.0 = whole;
    }
}

/// Whether two stored statuses are equal in the fields of this agent: conditions of other writers,
/// the times and generations of conditions, and resource claims are not compared.
pub(super) fn own_fields_equal(old: &PodStatus, new: &PodStatus) -> bool {
    let own_conditions = |status: &PodStatus| {
        let mut list: Vec<_> = status
            .conditions
            .iter()
            .flatten()
            .filter(|condition| is_ours(condition))
            .map(|condition| {
                (
                    condition.type_.clone(),
                    condition.status.clone(),
                    condition.reason.clone(),
                    condition.message.clone(),
                )
            })
            .collect();
        list.sort();
        list
    };
    let other_fields =
        |status: &PodStatus| PodStatus { conditions: None, resource_claim_statuses: None, ..status.clone() };
    own_conditions(old) == own_conditions(new) && other_fields(old) == other_fields(new)
}
