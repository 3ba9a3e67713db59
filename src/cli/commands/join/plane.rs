//! The control plane, as this command uses it: the one place that names the room `join`.

pub(super) use crate::join::{
    AuthorityPin, BootstrapToken, Cluster, Credentials, JoinError, NodeState, Trust, bootstrap_kubeconfig,
    by_file, by_k0s_token, by_token, kubelet_configuration, node_state, server_version,
};
