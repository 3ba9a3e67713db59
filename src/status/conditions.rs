//! The conditions that the node agent owns (Go: pkg/kubelet/status generate.go).

use jiff::Timestamp;

use crate::model::api::{Container, ContainerStatus, PodCondition, PodStatus};
use crate::model::meta::Time;
use crate::model::pod::{Pod, is_sidecar};
use crate::model::{reasons, restart};

use super::condition_types::{DISRUPTION_TARGET, OWNED_CONDITIONS};
use super::inputs::{Inputs, generation};
use super::restart_all;

/// Whether a condition holds, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct ConditionValue {
    is_true: bool,
    reason: Option<&'static str>,
    message: Option<String>,
}

impl ConditionValue {
    fn met() -> Self {
        ConditionValue { is_true: true, ..ConditionValue::default() }
    }

    fn unmet(reason: &'static str, message: Option<String>) -> Self {
        ConditionValue { is_true: false, reason: Some(reason), message }
    }
}

/// All conditions of the new status: those of other writers first, then ours in a fixed order.
pub(super) fn compose(inputs: &Inputs, status: &PodStatus) -> Vec<PodCondition> {
    let pod = inputs.pod;
    let source = pod.object().status.as_ref().and_then(|status| status.conditions.as_ref());
    let mut conditions: Vec<PodCondition> = source
        .into_iter()
        .flatten()
        .filter(|condition| !OWNED_CONDITIONS.contains(&condition.type_.as_str()))
        .cloned()
        .collect();
    conditions.extend(
        inputs
            .resize_conditions
            .iter()
            .cloned()
            .map(|resize| PodCondition { last_transition_time: Some(Time(inputs.now)), ..resize }),
    );
    // Controllers write this type, too: our condition of an eviction stays until it is reported.
    if let Some(disrupted) = find(inputs.old.and_then(|old| old.conditions.as_deref()), DISRUPTION_TARGET) {
        conditions.retain(|condition| condition.type_ != disrupted.type_);
        conditions.push(disrupted.clone());
    }
    let containers_ready = containers_ready(pod, status);
    let ready = ready(pod, &containers_ready, &conditions);
    let ours = [
        ("PodReadyToStartContainers", ready_to_start(inputs)),
        ("Initialized", initialized(inputs, status)),
        ("Ready", ready),
        ("ContainersReady", containers_ready),
        ("PodScheduled", ConditionValue::met()),
    ];
    conditions.extend(ours.into_iter().map(|(kind, value)| PodCondition {
        type_: kind.to_owned(),
        status: if value.is_true { "True" } else { "False" }.to_owned(),
        reason: value.reason.map(str::to_owned),
        message: value.message,
        observed_generation: generation(pod),
        last_transition_time: Some(Time(inputs.now)),
        last_probe_time: None,
    }));
    conditions.extend(restart_all::condition(inputs, status));
    conditions
}

/// Adds to `status` that this node disrupted the pod, with `message` as the reason. The API server
/// receives it together with the pod's end.
pub fn disrupt(pod: &Pod, status: &mut PodStatus, message: &str, now: Timestamp) {
    let before = find(status.conditions.as_deref(), DISRUPTION_TARGET)
        .filter(|before| before.status == "True")
        .and_then(|before| before.last_transition_time.clone());
    let disrupted = PodCondition {
        type_: DISRUPTION_TARGET.to_owned(),
        status: "True".to_owned(),
        reason: Some(reasons::TERMINATION_BY_KUBELET.to_owned()),
        message: Some(message.to_owned()),
        observed_generation: generation(pod),
        last_transition_time: before.or(Some(Time(now))),
        last_probe_time: None,
    };
    let conditions = status.conditions.get_or_insert_default();
    match conditions.iter_mut().find(|condition| condition.type_ == DISRUPTION_TARGET) {
        Some(present) => *present = disrupted,
        None => conditions.insert(0, disrupted),
    }
}

/// Whether the readiness gates of `pod`, as the API server shows it now, give another Ready
/// condition than `stored`: then its worker has to compose the status again.
#[must_use]
pub fn gates_differ(pod: &Pod, stored: &PodStatus) -> bool {
    if pod.spec().readiness_gates.as_ref().is_none_or(Vec::is_empty) {
        return false;
    }
    let shown = pod.object().status.as_ref().and_then(|status| status.conditions.as_deref());
    let now = ready(pod, &containers_ready(pod, stored), shown.unwrap_or_default());
    find(stored.conditions.as_deref(), "Ready").is_none_or(|before| {
        (before.status == "True") != now.is_true
            || before.reason.as_deref() != now.reason
            || before.message.as_deref().unwrap_or_default() != now.message.as_deref().unwrap_or_default()
    })
}

/// Computes `ContainersReady` and `Ready` again after a container's readiness changed.
pub(super) fn refresh_ready(pod: &Pod, status: &mut PodStatus) {
    let containers_ready = containers_ready(pod, status);
    let ready = ready(pod, &containers_ready, status.conditions.as_deref().unwrap_or_default());
    for (kind, value) in [("ContainersReady", containers_ready), ("Ready", ready)] {
        let conditions = status.conditions.iter_mut().flatten();
        for condition in conditions.filter(|condition| condition.type_ == kind) {
            condition.status = if value.is_true { "True" } else { "False" }.to_owned();
            condition.reason = value.reason.map(str::to_owned);
            condition.message = value.message.clone();
        }
    }
}

/// The condition of one type.
pub(super) fn find<'a>(conditions: Option<&'a [PodCondition]>, kind: &str) -> Option<&'a PodCondition> {
    conditions?.iter().find(|condition| condition.type_ == kind)
}

/// Whether a condition was true in the previous status.
pub(super) fn holds_before(inputs: &Inputs, kind: &str) -> bool {
    find(inputs.previous_status().and_then(|before| before.conditions.as_deref()), kind)
        .is_some_and(|condition| condition.status == "True")
}

/// Go: status `GeneratePodReadyToStartContainersCondition`.
fn ready_to_start(inputs: &Inputs) -> ConditionValue {
    inputs.sandbox_problem.map_or_else(ConditionValue::met, |problem| {
        ConditionValue::unmet(reasons::POD_SANDBOX_NOT_READY, Some(problem.to_owned()))
    })
}

fn initialized(inputs: &Inputs, status: &PodStatus) -> ConditionValue {
    let pod = inputs.pod;
    let statuses = status.init_container_statuses.as_deref();
    if statuses.is_none() && !pod.init_containers().is_empty() {
        return ConditionValue::unmet(reasons::UNKNOWN_CONTAINER_STATUSES, None);
    }
    let (unknown, incomplete) =
        unknown_and_failing(pod.init_containers().iter(), statuses, |container, status| {
            if is_sidecar(container) { status.started == Some(true) } else { status.ready }
        });
    if phase_is(status, "Succeeded") && unknown.is_empty() {
        return ConditionValue { reason: Some(reasons::POD_COMPLETED), ..ConditionValue::met() };
    }
    // A regular container that has run proves that initialization was complete.
    let has_run = status.container_statuses.iter().flatten().any(|status| {
        status.state.as_ref().is_some_and(|state| state.running.is_some() || state.terminated.is_some())
    });
    // A restart of all containers in the same sandbox does not undo the initialization.
    let was_initialized = || restart::may_restart_all(pod) && holds_before(inputs, "Initialized");
    if has_run || was_initialized() {
        return ConditionValue::met();
    }
    value_for_names(&unknown, "incomplete", &incomplete, reasons::CONTAINERS_NOT_INITIALIZED)
}

fn containers_ready(pod: &Pod, status: &PodStatus) -> ConditionValue {
    if status.container_statuses.is_none() && !pod.containers().is_empty() {
        return ConditionValue::unmet(reasons::UNKNOWN_CONTAINER_STATUSES, None);
    }
    let sidecars = pod.init_containers().iter().filter(|container| is_sidecar(container));
    let is_ready = |_: &Container, status: &ContainerStatus| status.ready;
    let (mut unknown, mut unready) =
        unknown_and_failing(sidecars, status.init_container_statuses.as_deref(), is_ready);
    let (more_unknown, more_unready) =
        unknown_and_failing(pod.containers().iter(), status.container_statuses.as_deref(), is_ready);
    unknown.extend(more_unknown);
    unready.extend(more_unready);
    if phase_is(status, "Succeeded") && unknown.is_empty() {
        return ConditionValue::unmet(reasons::POD_COMPLETED, None);
    }
    // The containers of a failed pod may still be stopping.
    if phase_is(status, "Failed") {
        return ConditionValue::unmet(reasons::POD_FAILED, None);
    }
    value_for_names(&unknown, "unready", &unready, reasons::CONTAINERS_NOT_READY)
}

fn ready(pod: &Pod, containers_ready: &ConditionValue, conditions: &[PodCondition]) -> ConditionValue {
    if !containers_ready.is_true {
        return containers_ready.clone();
    }
    let missing: Vec<String> = pod
        .spec()
        .readiness_gates
        .iter()
        .flatten()
        .filter_map(|gate| {
            let kind = &gate.condition_type;
            match find(Some(conditions), kind) {
                None => {
                    Some(format!("corresponding condition of pod readiness gate {kind:?} does not exist."))
                }
                Some(condition) if condition.status != "True" => Some(format!(
                    "the status of pod readiness gate {kind:?} is not \"True\", but {}",
                    condition.status
                )),
                Some(_) => None,
            }
        })
        .collect();
    if missing.is_empty() {
        return ConditionValue::met();
    }
    ConditionValue::unmet(reasons::READINESS_GATES_NOT_READY, Some(missing.join(", ")))
}

fn phase_is(status: &PodStatus, phase: &str) -> bool {
    status.phase.as_deref() == Some(phase)
}

/// Names without a status, and names whose status is not `good`.
fn unknown_and_failing<'a>(
    containers: impl Iterator<Item = &'a Container>,
    statuses: Option<&[ContainerStatus]>,
    good: impl Fn(&Container, &ContainerStatus) -> bool,
) -> (Vec<&'a str>, Vec<&'a str>) {
    let (mut unknown, mut failing) = (Vec::new(), Vec::new());
    for container in containers {
        match statuses.into_iter().flatten().find(|status| status.name == container.name) {
            None => unknown.push(container.name.as_str()),
            Some(status) if !good(container, status) => failing.push(container.name.as_str()),
            Some(_) => {}
        }
    }
    (unknown, failing)
}

fn value_for_names(unknown: &[&str], word: &str, failing: &[&str], reason: &'static str) -> ConditionValue {
    let parts: Vec<String> = [("unknown", unknown), (word, failing)]
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(word, names)| format!("containers with {word} status: [{}]", names.join(" ")))
        .collect();
    if parts.is_empty() {
        ConditionValue::met()
    } else {
        ConditionValue::unmet(reason, Some(parts.join(", ")))
    }
}
