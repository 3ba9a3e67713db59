//! `coracle check --cis`: the rules of the CIS Kubernetes Benchmark 1.12 for a worker node (4.x),
//! and those of the Kubernetes STIG for its kubelet, applied to the settings that are in effect.
//! The rules are pure; `files` reads modes and owners.

mod files;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::config::KubeletConfiguration;

pub(crate) use files::NodeFiles;
pub(crate) use rules::check;

/// The fields whose values the rules read, by their paths. Their origins are wanted in [`NodeFacts`].
pub(crate) const FIELDS: &[&str] = &[
    "authentication.anonymous.enabled",
    "authentication.x509.clientCAFile",
    "authorization.mode",
    "enableServer",
    "eventRecordQPS",
    "featureGates",
    "makeIPTablesUtilChains",
    "podPidsLimit",
    "protectKernelDefaults",
    "readOnlyPort",
    "rotateCertificates",
    "seccompDefault",
    "serverTLSBootstrap",
    "staticPodPath",
    "staticPodURL",
    "streamingConnectionIdleTimeout",
    "tlsCertFile",
    "tlsCipherSuites",
    "tlsMinVersion",
    "tlsPrivateKeyFile",
];

/// The result of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum RuleStatus {
    Pass,
    Fail,
    /// The rule is about something that this node does not have.
    NotApplicable,
    /// A person has to decide.
    Manual,
}

/// A rule with its result.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct RuleResult {
    /// The number in the benchmark, such as `4.2.1`, or in the STIG, such as `V-242391`.
    pub id: &'static str,
    /// What is wanted.
    pub title: &'static str,
    pub standing: RuleStatus,
    /// The value in effect and its origin, or the file with its mode and owner.
    pub evidence: String,
    /// What to do; empty when nothing is.
    pub fix: String,
}

/// A file and what the rules need of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileFact {
    pub path: PathBuf,
    pub state: FileState,
}

/// Mode and owner of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileState {
    /// `mode`: the permission bits only.
    Present { mode: u32, user: u32, group: u32 },
    /// The error of the system.
    Unreadable(String),
}

/// All that the rules read.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeFacts {
    /// The settings in effect.
    pub config: KubeletConfiguration,
    /// The flag, or the file and its line, that sets a field of [`FIELDS`]. Others have their default.
    pub origins: BTreeMap<&'static str, String>,
    /// Whether the flags of the agent are known, because it runs.
    pub has_flags: bool,
    /// The value of `--hostname-override`; empty: not set.
    pub hostname_override: String,
    /// Whether the node belongs to a cluster (`--kubeconfig`).
    pub is_in_cluster: bool,
    pub files: NodeFiles,
}
