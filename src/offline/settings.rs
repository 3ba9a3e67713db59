//! Settings of the room.

use std::path::PathBuf;
use std::time::Duration;

use super::fence::FenceSettings;

/// What the flags set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// `<root-dir>/offline`. Made with mode 0700.
    pub directory: PathBuf,
    /// The name of the node: sealed objects of another node cannot be opened.
    pub node_name: String,
    /// `--offline-secrets=sealed`; otherwise Secrets and tokens are not stored.
    pub stores_secrets: bool,
    /// `--offline-key`; `None`: the file `key` in `directory`.
    pub key_file: Option<PathBuf>,
    /// `--offline-wait`: from the first address of the machine until the stored pods are used.
    pub wait: Duration,
    /// `--offline-accept-after`: how long a set that knows nothing of this node is held. Zero: until an
    /// order.
    pub accept_after: Duration,
    /// When pods are stopped without the API server.
    pub fence: FenceSettings,
}
