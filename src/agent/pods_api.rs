//! What the pods API shows.

use std::path::Path;

use super::rooms::Rooms;
use crate::server::pods_api::{self, Deps};
use crate::transport::rpc_server::Server;

/// Serves the API; `None`: its socket could not be made, which is logged.
pub(super) fn serve(root_dir: &Path, rooms: &Rooms) -> Option<Server> {
    let view = rooms.view.clone();
    let pods = move || {
        let snapshot = view.get();
        let listed = snapshot.pods.values().filter_map(|entry| entry.pod.clone());
        snapshot.sources_ready.then(|| listed.collect())
    };
    let (statuses, changes) = (rooms.status.clone(), rooms.status.clone());
    let deps = Deps {
        pods: Box::new(pods),
        status: Box::new(move |uid| statuses.get(uid)),
        changes: Box::new(move |capacity| changes.feed(capacity)),
    };
    let served = pods_api::serve(root_dir, deps);
    served.inspect_err(|error| log::error!("the pods API is not served: {error}")).ok()
}
