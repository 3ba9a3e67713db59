//! `podCIDR` of a node without an API server: the runtime receives the address range once (Go:
//! `updatePodCIDR` in pkg/kubelet/kubelet_network.go). With an API server the node's object has the
//! range, and room `node` sends it.

use std::time::Duration;

use super::error::{StartError, thread_error};
use super::rooms::{Context, Rooms};
use crate::util::stop::Waited;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// The time between attempts. DIFFERS: the Go kubelet makes one attempt.
const RETRY: Duration = Duration::from_secs(10);

/// Starts the thread `pod-cidr`, which ends when the runtime has the range. `None`: there is no range
/// to send.
///
/// # Errors
/// When the thread cannot be started.
pub(super) fn start(context: Context<'_>, rooms: &Rooms) -> Result<Option<Running>, StartError> {
    let range = context.config.pod_cidr.clone();
    if range.is_empty() || context.args.kubeconfig.is_some() {
        return Ok(None);
    }
    let cri = rooms.cri.clone();
    let running = threads::spawn("pod-cidr", Stack::Large, OnDeath::Unsupervised, move |stop| {
        while let Err(error) = cri.update_runtime_config(&range) {
            log::warn!("cannot send the pod address range {range} to the runtime: {error}");
            let _waiting = threads::waiting("the next attempt");
            if stop.wait(RETRY) == Waited::Stopped {
                return;
            }
        }
        log::info!("pods of this node get addresses from {range}");
    });
    running.map(Some).map_err(thread_error("pod-cidr"))
}
