//! The calls of a driver, as the rest of the room sees them.

use std::collections::BTreeMap;

pub(super) use crate::transport::grpc::Kind as Code;
use crate::util::stop::StopToken;

/// Text pairs of a request.
pub(super) type Pairs = BTreeMap<String, String>;

/// The secrets of a call. `Debug` shows their names only.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets(Pairs);

impl Secrets {
    /// Wraps the pairs.
    #[must_use]
    pub fn new(pairs: Pairs) -> Secrets {
        Secrets(pairs)
    }

    /// The pairs, for the request itself.
    #[must_use]
    pub fn expose(&self) -> &Pairs {
        &self.0
    }

    pub(super) fn insert(&mut self, key: &str, value: String) {
        self.0.insert(key.to_owned(), value);
    }
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_set().entries(self.0.keys()).finish()
    }
}

/// How a volume is used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumeCapability {
    /// As a block device; otherwise as a file system.
    pub is_block: bool,
    /// The type of the file system; empty: the driver chooses.
    pub fs_type: String,
    /// Options for mount.
    pub mount_flags: Vec<String>,
    /// The group for the files, for drivers that set it themselves.
    pub mount_group: Option<u32>,
    /// The access mode's number in the protocol.
    pub access_mode: i32,
}

/// A request to stage a volume on the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stage {
    pub volume: String,
    pub publish_context: Pairs,
    pub staging_path: String,
    pub volume_capability: VolumeCapability,
    pub secrets: Secrets,
    pub volume_context: Pairs,
}

/// A request to publish a volume for a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Publish {
    pub volume: String,
    pub publish_context: Pairs,
    /// Empty if the driver does not stage.
    pub staging_path: String,
    pub target_path: String,
    pub volume_capability: VolumeCapability,
    pub read_only: bool,
    pub secrets: Secrets,
    pub volume_context: Pairs,
}

/// A request to grow the file system of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expand {
    pub volume: String,
    pub path: String,
    pub bytes: i64,
    pub staging_path: String,
    pub volume_capability: VolumeCapability,
    pub secrets: Secrets,
}

/// What a driver can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverCapabilities {
    /// It stages volumes before it publishes them.
    pub stage: bool,
    /// It measures volumes.
    pub stats: bool,
    /// It grows file systems on the node.
    pub expand: bool,
    /// It distinguishes one pod from several pods on one node.
    pub single_node_multi_writer: bool,
    /// It sets the group of files itself.
    pub mount_group: bool,
}

/// The driver's answer about this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// The driver's name of this node.
    pub id: String,
    /// The number of its volumes that the node can have; 0: no limit.
    pub max_volumes: i64,
    /// Labels of the node.
    pub topology: Pairs,
}

/// One measure of a volume. A negative number was not reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// What is left.
    pub available: i64,
    /// The size.
    pub total: i64,
    /// What is in use.
    pub used: i64,
}

/// The measures of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumeStats {
    /// In bytes.
    pub bytes: Option<Usage>,
    /// In inodes.
    pub inodes: Option<Usage>,
}

/// A call that failed, or was not begun.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DriverError {
    /// The text, as Go prints it.
    pub message: String,
    /// The code of gRPC.
    pub code: Code,
}

impl DriverError {
    /// Whether the call has ended and changed nothing. Otherwise it may have been carried out, or
    /// still be running.
    #[must_use]
    pub fn is_final(&self) -> bool {
        !matches!(
            self.code,
            Code::Cancelled
                | Code::DeadlineExceeded
                | Code::Unavailable
                | Code::ResourceExhausted
                | Code::Aborted
        )
    }
}

/// The node service of one driver. Each call ends at the stop signal, and has a deadline.
pub trait Driver: Send + Sync {
    fn info(&self, stop: &StopToken) -> Result<NodeInfo, DriverError>;
    fn capabilities(&self, stop: &StopToken) -> Result<DriverCapabilities, DriverError>;
    fn stage(&self, request: &Stage, stop: &StopToken) -> Result<(), DriverError>;
    fn unstage(&self, volume: &str, staging_path: &str, stop: &StopToken) -> Result<(), DriverError>;
    fn publish(&self, request: &Publish, stop: &StopToken) -> Result<(), DriverError>;
    fn unpublish(&self, volume: &str, target_path: &str, stop: &StopToken) -> Result<(), DriverError>;
    /// The new size in bytes.
    fn expand(&self, request: &Expand, stop: &StopToken) -> Result<i64, DriverError>;
    fn stats(
        &self,
        volume: &str,
        path: &str,
        staging_path: &str,
        stop: &StopToken,
    ) -> Result<VolumeStats, DriverError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        let mut secrets = Secrets::default();
        secrets.insert("user", "geheim".to_owned());
        let request = Stage { secrets, ..Stage::default() };
        let shown = format!("{request:?}");
        assert!(shown.contains("user") && !shown.contains("geheim"), "{shown}");
    }

    #[test]
    fn five_codes_leave_the_result_open() {
        let is_final = |code| DriverError { message: String::new(), code }.is_final();
        for code in [
            Code::Cancelled,
            Code::DeadlineExceeded,
            Code::Unavailable,
            Code::ResourceExhausted,
            Code::Aborted,
        ] {
            assert!(!is_final(code), "{code:?}");
        }
        for code in [Code::Internal, Code::NotFound, Code::FailedPrecondition, Code::Unimplemented] {
            assert!(is_final(code), "{code:?}");
        }
    }
}
