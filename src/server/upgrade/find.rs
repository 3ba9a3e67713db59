//! From names to the URL of a stream.

use crate::model::ids::{ContainerId, PodUid, SandboxId};
use crate::model::pod::Pod;
use crate::model::runtime::ContainerState;
use crate::server::deps::StreamDeps;
use crate::util::stop::StopToken;

use super::rejection::Rejection;
use super::request::{Verb, Wanted};

/// The pod that a request names.
pub(super) fn pod(wanted: &Wanted, deps: &StreamDeps) -> Result<Pod, Rejection> {
    let pod = (deps.find_pod)(&wanted.namespace, &wanted.pod)
        .ok_or_else(|| Rejection::closing(404, "pod does not exist"))?;
    let uid = PodUid::from(wanted.uid.as_str());
    if uid.is_empty() || uid == *pod.uid() || (deps.is_mirror)(&uid, &pod) {
        return Ok(pod);
    }
    Err(match wanted.verb {
        Verb::PortForward => Rejection::closing(404, "pod not found"),
        Verb::Exec | Verb::Attach => no_container(wanted),
    })
}

fn no_container(wanted: &Wanted) -> Rejection {
    Rejection::closing(500, format!("container not found ({:?})", wanted.container))
}

/// Where the runtime serves the stream.
pub(super) fn url(
    wanted: &Wanted,
    pod: &Pod,
    deps: &StreamDeps,
    stop: &StopToken,
) -> Result<String, Rejection> {
    let cri = deps.cri.with_stop(stop.clone());
    let url = match wanted.verb {
        Verb::Exec => {
            let id = container(wanted, pod, deps, stop)?;
            cri.exec_url(&id, wanted.command.clone(), wanted.streams)
        }
        Verb::Attach => {
            let id = container(wanted, pod, deps, stop)?;
            let mut streams = wanted.streams;
            // A process cannot be given a terminal, or lose it, after its start.
            streams.tty = has_tty(pod, &wanted.container);
            cri.attach_url(&id, streams)
        }
        Verb::PortForward => cri.port_forward_url(&sandbox(pod, deps, stop)?, &wanted.ports),
    };
    url.map_err(|error| Rejection::of_runtime(&error))
}

/// The running instance. One that was started a moment ago may not have been looked at yet:
/// then the runtime itself is asked.
fn container(
    wanted: &Wanted,
    pod: &Pod,
    deps: &StreamDeps,
    stop: &StopToken,
) -> Result<ContainerId, Rejection> {
    let known = (deps.runtime_pod)(pod.uid())
        .and_then(|known| known.running().find(|one| one.name == wanted.container).map(|one| one.id.clone()));
    if let Some(id) = known {
        return Ok(id);
    }
    let listed = crate::cri::list_pods(&deps.cri.with_stop(stop.clone()), Some(pod.uid()))
        .map_err(|error| Rejection::of_runtime(&error))?;
    listed
        .get(pod.uid())
        .and_then(|pod| {
            pod.containers
                .iter()
                .find(|one| one.name == wanted.container && one.state == ContainerState::Running)
        })
        .map(|one| one.id.clone())
        .ok_or_else(|| no_container(wanted))
}

fn sandbox(pod: &Pod, deps: &StreamDeps, stop: &StopToken) -> Result<SandboxId, Rejection> {
    let known = (deps.runtime_pod)(pod.uid())
        .and_then(|known| known.newest_sandbox().map(|sandbox| sandbox.id.clone()));
    if let Some(id) = known {
        return Ok(id);
    }
    let listed = crate::cri::list_pods(&deps.cri.with_stop(stop.clone()), Some(pod.uid()))
        .map_err(|error| Rejection::of_runtime(&error))?;
    listed
        .get(pod.uid())
        .and_then(|pod| pod.sandboxes.first())
        .map(|sandbox| sandbox.id.clone())
        .ok_or_else(|| Rejection::closing(500, format!("pod not found ({:?})", pod.full_name().to_string())))
}

fn has_tty(pod: &Pod, container: &str) -> bool {
    pod.all_containers().any(|one| one.name == container && one.tty == Some(true))
        || pod.ephemeral_containers().iter().any(|one| one.name == container && one.tty == Some(true))
}
