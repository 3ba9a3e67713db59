//! Makes one API status per container from the runtime's instances of it
//! (Go: convertToAPIContainerStatuses).

use jiff::Timestamp;

use crate::model::api::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, ContainerUser, LinuxContainerUser, PodStatus, VolumeMountStatus,
};
use crate::model::meta::Time;
use crate::model::pod::{Pod, is_sidecar};
use crate::model::runtime::{ContainerState as RuntimeState, ContainerStatus as Instance};
use crate::model::{reasons, restart};

use super::inputs::Inputs;
use super::{resources, restart_all};

/// Which of the pod's lists a container is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `initContainers`, sidecars among them.
    Init,
    /// `containers`.
    Regular,
    /// `ephemeralContainers`.
    Ephemeral,
}

/// The exit code if the real one is unknown: that of SIGKILL.
pub(super) const UNKNOWN_EXIT: i32 = 137;
/// Message of a container that vanished while the pod was being stopped.
pub(super) const LOST_WHEN_TERMINATED: &str =
    "The container could not be located when the pod was terminated";
const LOST_WHEN_DELETED: &str =
    "The container could not be located when the pod was deleted.  The container used to be Running";
const LOST_INIT: &str = "Unable to get init container status from container runtime and pod has been \
                         initialized, treat it as exited normally";

/// The statuses of `specs`: init containers in specification order, others by name.
pub(super) fn convert(inputs: &Inputs, specs: &[Container], kind: Kind) -> Vec<ContainerStatus> {
    let mut statuses: Vec<ContainerStatus> =
        specs.iter().map(|spec| container_status(inputs, spec, kind)).collect();
    if kind != Kind::Init {
        statuses.sort_by(|a, b| a.name.cmp(&b.name));
    }
    statuses
}

/// All container statuses of a pod: init, regular, ephemeral.
pub(super) fn all_statuses(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let lists =
        [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    lists.into_iter().flatten().flatten()
}

/// Ephemeral containers in the form of the others; they never restart.
pub(super) fn ephemeral(pod: &Pod) -> Vec<Container> {
    pod.spec()
        .ephemeral_containers
        .iter()
        .flatten()
        .map(|container| Container {
            name: container.name.clone(),
            image: container.image.clone(),
            resources: container.resources.clone(),
            volume_mounts: container.volume_mounts.clone(),
            restart_policy: Some("Never".to_owned()),
            ..Container::default()
        })
        .collect()
}

/// A terminated state for a container whose real exit code is unknown.
pub(super) fn terminated_without_record(message: &str) -> ContainerStateTerminated {
    ContainerStateTerminated {
        exit_code: UNKNOWN_EXIT,
        reason: Some(reasons::CONTAINER_STATUS_UNKNOWN.to_owned()),
        message: Some(message.to_owned()),
        ..ContainerStateTerminated::default()
    }
}

fn container_status(inputs: &Inputs, spec: &Container, kind: Kind) -> ContainerStatus {
    let old = inputs
        .previous_status()
        .and_then(|before| match kind {
            Kind::Init => before.init_container_statuses.as_ref(),
            Kind::Regular => before.container_statuses.as_ref(),
            Kind::Ephemeral => before.ephemeral_container_statuses.as_ref(),
        })
        .and_then(|list| list.iter().find(|old| old.name == spec.name));
    let mut instances = inputs.runtime.containers.iter().filter(|instance| instance.name == spec.name);
    let newest = instances.next();
    let mut status = match newest {
        Some(newest) => {
            let mut status = instance_status(inputs, spec, newest, old);
            status.last_state = instances
                .next()
                .map(|second| ContainerState { terminated: ended(inputs, second), ..empty() })
                .or_else(|| restart_all::state_before_removal(old, &status))
                .or_else(|| Some(empty()));
            status
        }
        None => unknown_to_runtime(inputs, spec, kind, old),
    };
    status.volume_mounts = volume_mounts(spec, newest);
    // As upstream, only of regular containers.
    let devices = if kind == Kind::Regular { (inputs.devices)(spec) } else { Vec::new() };
    status.allocated_resources_status = Some(devices).filter(|devices| !devices.is_empty());
    show_failure(inputs, spec, kind, newest, &mut status);
    status
}

fn empty() -> ContainerState {
    ContainerState::default()
}

pub(super) fn waiting(reason: Option<&str>, message: Option<String>) -> ContainerState {
    let waiting = ContainerStateWaiting { reason: reason.map(str::to_owned), message };
    ContainerState { waiting: Some(waiting), ..empty() }
}

/// The status of the container's newest instance.
fn instance_status(
    inputs: &Inputs,
    spec: &Container,
    instance: &Instance,
    old: Option<&ContainerStatus>,
) -> ContainerStatus {
    let id = full_id(inputs, instance);
    let mut restart_count = i32::try_from(instance.restart_count).unwrap_or(i32::MAX);
    let state = match instance.state {
        RuntimeState::Running => ContainerState {
            running: Some(ContainerStateRunning {
                started_at: instance.started_at.or(instance.created_at).map(Time),
            }),
            ..empty()
        },
        RuntimeState::Exited => ContainerState { terminated: ended(inputs, instance), ..empty() },
        RuntimeState::Created => waiting(None, None),
        RuntimeState::Unknown => {
            let old_state = old.and_then(|old| old.state.as_ref());
            if old_state.is_some_and(|old_state| old_state.running.is_some()) {
                restart_count = old.map_or(0, |old| old.restart_count).saturating_add(1);
                let mut end = terminated_without_record(LOST_WHEN_TERMINATED);
                if restart_all::is_in_progress(inputs) {
                    end.reason = Some(reasons::RESTARTING_ALL_CONTAINERS.to_owned());
                }
                ContainerState { terminated: Some(end), ..empty() }
            } else if let Some(old) = old.filter(|old| {
                old.container_id.as_deref() == Some(&id)
                    && old.state.as_ref().is_some_and(|state| state.terminated.is_some())
            }) {
                // The restart is already counted; the next inspection must not reset the count.
                restart_count = old.restart_count;
                old.state.clone().unwrap_or_default()
            } else {
                waiting(None, None)
            }
        }
    };
    ContainerStatus {
        name: spec.name.clone(),
        container_id: Some(id),
        image: instance.image.clone(),
        image_id: instance.image_id.to_string(),
        restart_count,
        state: Some(state),
        resources: Some(resources::of_container(spec, instance, (inputs.memory_request)(&spec.name))),
        allocated_resources: resources::allocated(spec),
        user: instance.user.as_ref().map(|user| ContainerUser {
            linux: Some(LinuxContainerUser {
                uid: user.uid,
                gid: user.gid,
                supplemental_groups: Some(user.supplemental_groups.clone()),
            }),
        }),
        ..ContainerStatus::default()
    }
}

/// The status of a container without an instance in the runtime.
fn unknown_to_runtime(
    inputs: &Inputs,
    spec: &Container,
    kind: Kind,
    old: Option<&ContainerStatus>,
) -> ContainerStatus {
    let is = |old: &ContainerStatus, what: fn(&ContainerState) -> bool| old.state.as_ref().is_some_and(what);
    let restarting = kind != Kind::Ephemeral && restart_all::is_in_progress(inputs);
    if let Some(old) = old.filter(|old| !restarting && is(old, |state| state.terminated.is_some())) {
        return old.clone();
    }
    let first_reason = if inputs.pod.init_containers().is_empty() {
        reasons::CONTAINER_CREATING
    } else {
        reasons::POD_INITIALIZING
    };
    let mut status = ContainerStatus {
        name: spec.name.clone(),
        image: spec.image.clone().unwrap_or_default(),
        state: Some(waiting(Some(first_reason), None)),
        last_state: Some(old.and_then(|old| old.last_state.clone()).unwrap_or_default()),
        restart_count: old.map_or(0, |old| old.restart_count),
        ..ContainerStatus::default()
    };
    if let Some(old) = old.filter(|old| restarting && is(old, |state| state.waiting.is_none())) {
        restart_all::show_removed(&mut status, old);
        return status;
    }
    if let Some(state) = old.and_then(restart_all::removed_state) {
        status.state = Some(state.clone());
        return status;
    }
    if kind == Kind::Init && !is_sidecar(spec) && any_regular_created(inputs) {
        status.state = Some(ContainerState {
            terminated: Some(ContainerStateTerminated {
                exit_code: 0,
                reason: Some(reasons::COMPLETED.to_owned()),
                message: Some(LOST_INIT.to_owned()),
                ..ContainerStateTerminated::default()
            }),
            ..empty()
        });
        return status;
    }
    let was_running = old.and_then(|old| old.state.as_ref()).is_some_and(|state| state.running.is_some());
    let never_ended = status.last_state.as_ref().is_none_or(|last| last.terminated.is_none());
    if was_running && never_ended {
        // Without a last state the container would seem new, and the pod would be Pending again.
        status.last_state = Some(ContainerState {
            terminated: Some(terminated_without_record(LOST_WHEN_DELETED)),
            ..empty()
        });
        if !inputs.is_deleting() {
            status.restart_count = status.restart_count.saturating_add(1);
        }
    }
    status
}

/// Whether any regular container was ever made, whatever became of it.
fn any_regular_created(inputs: &Inputs) -> bool {
    inputs.pod.containers().iter().any(|container| {
        inputs.runtime.newest(&container.name).is_some_and(|instance| instance.state != RuntimeState::Unknown)
    })
}

/// A container that will restart and whose last start failed is shown as waiting with that reason;
/// its end moves to the last state.
fn show_failure(
    inputs: &Inputs,
    spec: &Container,
    kind: Kind,
    newest: Option<&Instance>,
    status: &mut ContainerStatus,
) {
    let has_completed =
        newest.is_some_and(|newest| newest.state == RuntimeState::Exited && newest.exit_code == 0);
    // DIFFERS: a sidecar that exited with 0 restarts and so may show a back-off, too.
    if kind == Kind::Init && has_completed && !is_sidecar(spec) {
        return;
    }
    if inputs.is_deleting() || !restart::should_start(inputs.pod, spec, newest) {
        return;
    }
    let Some(failure) = (inputs.failures)(&spec.name) else { return };
    if let Some(ended) = status.state.take().and_then(|state| state.terminated) {
        status.last_state = Some(ContainerState { terminated: Some(ended), ..empty() });
    }
    let message = Some(failure.message).filter(|message| !message.is_empty());
    status.state = Some(waiting(Some(failure.reason), message));
}

/// The end of an instance; `None` if it has not ended.
fn ended(inputs: &Inputs, instance: &Instance) -> Option<ContainerStateTerminated> {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    (instance.state == RuntimeState::Exited).then(|| ContainerStateTerminated {
        container_id: Some(full_id(inputs, instance)),
        exit_code: instance.exit_code,
        reason: text(&instance.reason),
        message: text(&instance.message),
        // A container whose start failed never started: tools expect the epoch there.
        started_at: Some(Time(instance.started_at.unwrap_or(Timestamp::UNIX_EPOCH))),
        finished_at: Some(Time(instance.finished_at.unwrap_or(Timestamp::UNIX_EPOCH))),
        signal: None,
    })
}

fn full_id(inputs: &Inputs, instance: &Instance) -> String {
    format!("{}://{}", inputs.runtime_name, instance.id)
}

/// The volume mounts of the specification; the runtime does not have the volumes' names.
fn volume_mounts(spec: &Container, instance: Option<&Instance>) -> Option<Vec<VolumeMountStatus>> {
    let mounts: Vec<VolumeMountStatus> =
        spec.volume_mounts
            .iter()
            .flatten()
            .map(|mount| {
                let read_only = mount.read_only == Some(true);
                let recursive = read_only
                    && match mount.recursive_read_only.as_deref() {
                        Some("Enabled") => true,
                        Some("IfPossible") => instance.is_some_and(|instance| {
                            instance.mounts.iter().any(|real| {
                                real.container_path == mount.mount_path && real.recursive_read_only
                            })
                        }),
                        _ => false,
                    };
                VolumeMountStatus {
                    name: mount.name.clone(),
                    mount_path: mount.mount_path.clone(),
                    read_only: read_only.then_some(true),
                    recursive_read_only: read_only
                        .then(|| if recursive { "Enabled" } else { "Disabled" }.to_owned()),
                    ..VolumeMountStatus::default()
                }
            })
            .collect();
    (!mounts.is_empty()).then_some(mounts)
}
