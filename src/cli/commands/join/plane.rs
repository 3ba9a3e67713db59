//! The control plane, as this command uses it: the one place that names the room `join`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;

pub(super) use crate::join::JoinError;
use crate::join::Retry;
pub(super) use crate::join::authority::AuthorityPin;
pub(super) use crate::join::cluster::{Cluster, environment_proxy};
use crate::join::configuration::node_state_within;
pub(super) use crate::join::configuration::{NodeState, kubelet_configuration, node_state, server_version};
pub(super) use crate::join::credentials::{Credentials, bootstrap_kubeconfig};
pub(super) use crate::join::discovery::{
    Trust, by_file_within, by_k0s_token, by_kubeconfig, by_token_within, server_of_file,
};
pub(super) use crate::join::token::BootstrapToken;
use crate::kube::certificates::{Purpose, Store, Template, bootstrap};

/// The limits of a discovery. `progress`: receives the error before each repetition.
pub(super) fn discovery_retry(progress: &dyn Fn(&JoinError)) -> Retry<'_> {
    Retry { progress, ..Retry::discovery() }
}

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

/// The certificate that the agent would use in the place of a new one, with its file: it is for this node,
/// and valid now.
pub(super) fn present_certificate(directory: &Path, node: &str) -> Option<(PathBuf, Credentials)> {
    let store = Store::new(directory, Purpose::Client);
    let identity = bootstrap::valid_identity(&store, &Template::client(node), Timestamp::now())?;
    let key_pem = identity.key_pem.reveal().clone();
    Some((
        store.current_path(),
        Credentials::ClientCertificate { certificate_pem: identity.chain_pem, key_pem },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::certificates::testing;

    #[test]
    fn only_a_valid_certificate_for_the_node_is_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubelet-client-current.pem");
        let found = |text: String| {
            std::fs::write(&path, text).unwrap();
            present_certificate(dir.path(), "n")
        };
        assert_eq!(present_certificate(dir.path(), "n"), None);
        assert_eq!(found(testing::expired()), None);
        assert_eq!(found(testing::valid_for("other")), None);
        let (file, credentials) = found(testing::valid_for("n")).unwrap();
        assert_eq!(file, path);
        assert!(matches!(credentials, Credentials::ClientCertificate { .. }));
    }
}
