//! Finds the pod and the container of a stream, and requests its URL from the runtime.

use crate::model::ids::{ContainerId, PodUid, SandboxId};
use crate::model::pod::Pod;
use crate::model::runtime::{ContainerState, ListedPod};
use crate::server::backend::NodeBackend;
use crate::util::stop::StopToken;

use super::rejection::Rejection;
use super::request::{StreamRequest, Verb};

/// The pod that a request names.
pub(super) fn pod(request: &StreamRequest, node: &dyn NodeBackend) -> Result<Pod, Rejection> {
    let pod = node
        .find_pod(&request.namespace, &request.pod)
        .ok_or_else(|| Rejection::closing(404, "pod does not exist"))?;
    let uid = PodUid::from(request.uid.as_str());
    if uid.is_empty() || uid == *pod.uid() || node.is_mirror(&uid, &pod) {
        return Ok(pod);
    }
    Err(match request.verb {
        Verb::PortForward => Rejection::closing(404, "pod not found"),
        Verb::Exec | Verb::Attach => no_container(request),
    })
}

fn no_container(request: &StreamRequest) -> Rejection {
    Rejection::closing(500, format!("container not found ({:?})", request.container))
}

/// The URL at which the runtime serves the stream.
pub(super) fn url(
    request: &StreamRequest,
    pod: &Pod,
    node: &dyn NodeBackend,
    stop: &StopToken,
) -> Result<String, Rejection> {
    let cri = node.runtime().with_stop(stop.clone());
    let url = match request.verb {
        Verb::Exec => {
            let id = container(request, pod, node, stop)?;
            cri.exec_url(&id, request.command.clone(), request.streams)
        }
        Verb::Attach => {
            let id = container(request, pod, node, stop)?;
            let mut streams = request.streams;
            // A process gets a terminal at its start or never.
            streams.tty = has_tty(pod, &request.container);
            cri.attach_url(&id, streams)
        }
        Verb::PortForward => cri.port_forward_url(&sandbox(pod, node, stop)?, &request.ports),
    };
    url.map_err(|error| Rejection::of_runtime(&error))
}

/// The running instance. If it was started after the last inspection, it is requested from the
/// runtime.
fn container(
    request: &StreamRequest,
    pod: &Pod,
    node: &dyn NodeBackend,
    stop: &StopToken,
) -> Result<ContainerId, Rejection> {
    let known = node.containers(pod.uid()).and_then(|known| {
        known
            .running()
            .find(|container| container.name == request.container)
            .map(|container| container.id.clone())
    });
    if let Some(id) = known {
        return Ok(id);
    }
    let instances = list(pod, node, stop)?.map(|pod| pod.containers).unwrap_or_default();
    let found = instances
        .into_iter()
        .find(|instance| instance.name == request.container && instance.state == ContainerState::Running);
    found.map(|instance| instance.id).ok_or_else(|| no_container(request))
}

fn sandbox(pod: &Pod, node: &dyn NodeBackend, stop: &StopToken) -> Result<SandboxId, Rejection> {
    let known =
        node.containers(pod.uid()).and_then(|known| known.newest_sandbox().map(|sandbox| sandbox.id.clone()));
    if let Some(id) = known {
        return Ok(id);
    }
    let found = list(pod, node, stop)?.and_then(|pod| pod.sandboxes.into_iter().next());
    found
        .map(|sandbox| sandbox.id)
        .ok_or_else(|| Rejection::closing(500, format!("pod not found ({:?})", pod.full_name().to_string())))
}

/// The pod as the runtime lists it.
fn list(pod: &Pod, node: &dyn NodeBackend, stop: &StopToken) -> Result<Option<ListedPod>, Rejection> {
    crate::cri::list_pods(&node.runtime().with_stop(stop.clone()), Some(pod.uid()))
        .map(|mut pods| pods.remove(pod.uid()))
        .map_err(|error| Rejection::of_runtime(&error))
}

fn has_tty(pod: &Pod, container: &str) -> bool {
    pod.all_containers().any(|candidate| candidate.name == container && candidate.tty == Some(true))
        || pod
            .ephemeral_containers()
            .iter()
            .any(|candidate| candidate.name == container && candidate.tty == Some(true))
}
