//! The control plane, as this command uses it: the one place that names the room `join`.

use std::path::Path;
use std::time::Duration;

pub(super) use crate::join::JoinError;
use crate::join::Retry;
pub(super) use crate::join::authority::AuthorityPin;
pub(super) use crate::join::cluster::Cluster;
use crate::join::configuration::node_state_within;
pub(super) use crate::join::configuration::{NodeState, kubelet_configuration, node_state, server_version};
pub(super) use crate::join::credentials::{Credentials, bootstrap_kubeconfig};
use crate::join::discovery::by_file_within;
pub(super) use crate::join::discovery::{Trust, by_file, by_k0s_token, by_token, server_of_file};
pub(super) use crate::join::token::BootstrapToken;

/// The state of the node, read once with its own credentials; `None`: the file has none.
///
/// # Errors
/// When the file cannot be used, or the API server gives no state.
pub(super) fn own_state(kubeconfig: &Path, node: &str) -> Result<Option<NodeState>, JoinError> {
    // The caller repeats it, and reports each state in between.
    let once = Retry { limit: Duration::ZERO, ..Retry::request() };
    let (cluster, credentials) = by_file_within(kubeconfig, &once)?;
    credentials.map(|credentials| node_state_within(&cluster, &credentials, node, &once)).transpose()
}
