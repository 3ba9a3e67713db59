//! What the pod-resources API shows.

use std::path::Path;

use super::rooms::Rooms;
use crate::server::pod_resources::{self, Deps, NodePod};
use crate::transport::rpc_server::Server;

/// Serves the API; `None`: its socket could not be made, which is logged.
pub(super) fn serve(root_dir: &Path, rooms: &Rooms) -> Option<Server> {
    let view = rooms.view.clone();
    let pods = move || {
        let snapshot = view.get();
        let listed = snapshot.pods.values().filter_map(|entry| {
            let pod = entry.pod.clone()?;
            let has_ended = entry.worker.as_ref().is_some_and(|worker| worker.report().has_stopped());
            let is_active = !entry.rejected && !has_ended && !pod.is_over();
            Some(NodePod { pod, is_active })
        });
        listed.collect()
    };
    let (assigned, assignable) = (rooms.assignments.clone(), rooms.assignments.clone());
    let assigned_pod = rooms.assignments.clone();
    let deps = Deps {
        pods: Box::new(pods),
        assigned: Box::new(move |pod, container| assigned.assigned(pod, container)),
        assigned_pod: Box::new(move |pod| assigned_pod.assigned_pod(pod)),
        assignable: Box::new(move || assignable.assignable()),
    };
    let served = pod_resources::serve(root_dir, deps);
    served.inspect_err(|error| log::error!("the pod-resources API is not served: {error}")).ok()
}
