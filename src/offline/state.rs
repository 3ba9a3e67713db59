//! What the room shows of itself.

use serde::{Deserialize, Serialize};

/// Whose set of pods counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Since the start, the API server has not sent a complete list, and the wait is not over. No pod of
    /// the API server starts.
    #[default]
    Undecided,
    /// That of the API server.
    Online,
    /// The stored one: the API server did not respond in time after a start.
    Alone,
    /// The one before: the API server now knows neither this node nor any of its pods.
    Held,
}

impl Phase {
    /// Whether stored objects come before requests to the API server.
    #[must_use]
    pub fn uses_stored(self) -> bool {
        matches!(self, Phase::Alone | Phase::Held)
    }
}

/// Why the set of the API server is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HeldReason {
    /// It has no Node object of this node.
    NoNode,
    /// Its Node object has another UID.
    OtherNode,
    /// It is that of another cluster, or of one that was made again. Never accepted without an order.
    OtherCluster,
}

/// Whether Secrets and tokens can be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SealState {
    /// Yes, sealed.
    #[default]
    Sealed,
    /// No: `--offline-secrets=none`.
    Off,
    /// No: the key cannot be used. Sealed objects are neither read nor written.
    NoKey,
}

/// The document of `GET /v1/offline` and a part of that of `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Report {
    /// Whose set counts.
    pub phase: Phase,
    /// Since when.
    pub since: Option<jiff::Timestamp>,
    /// Why the set of the API server is held.
    pub held: Option<HeldReason>,
    /// When a held set is accepted without an order.
    pub accepts: Option<jiff::Timestamp>,
    /// Whether Secrets and tokens are stored.
    pub seal: SealState,
    /// Seconds since the node's lease was renewed last; `None`: not since the start of the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_since_contact: Option<u64>,
    /// `--offline-stop-after`; `None`: only pods with an annotation are stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_after_seconds: Option<u64>,
    /// Pods that are stopped because the API server was away for too long.
    pub stopped_pods: u64,
    /// Stored objects by the word of their kind.
    pub objects: std::collections::BTreeMap<String, u64>,
    /// Bytes of all files.
    pub bytes: u64,
    /// Bytes of the files by the word of their kind.
    pub kind_bytes: std::collections::BTreeMap<String, u64>,
    /// Copies of files that could not be used; those of former runs count, too.
    pub damaged_files: u64,
    /// The most bytes that all files may have.
    pub limit_bytes: u64,
    /// Objects that are not stored, or not any more, and why; at most 16. Then what is wrong with the clock.
    pub problems: Vec<String>,
    /// Authorities of the API server that were added with `coracle offline trust`: subject, fingerprint and
    /// end. The room itself does not know them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trusted: Vec<String>,
    /// Each stored object; only with `names` in the request.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stored: Vec<StoredEntry>,
    /// Copies of files that could not be used; likewise.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub damaged: Vec<DamagedFile>,
}

/// A stored object without its body.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StoredEntry {
    /// The word of its kind.
    pub kind: String,
    /// Its name, in the form that [`super::Kind`] says; that of the Node object. Empty if the file cannot be
    /// used.
    pub name: String,
    /// `namespace/name` of its pod, if it goes with a pod of this node.
    pub pod: Option<String>,
    /// Bytes of the file.
    pub bytes: u64,
    /// When it was written.
    pub changed: Option<jiff::Timestamp>,
    /// Whether its body is sealed.
    pub sealed: bool,
    /// Whether header and checksum of the file are right.
    pub usable: bool,
    /// The name of the file.
    pub file: String,
}

/// The copy of a file that could not be used.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DamagedFile {
    /// The name of the file.
    pub file: String,
    /// Its bytes.
    pub bytes: u64,
    /// When it was put aside.
    pub changed: Option<jiff::Timestamp>,
}

/// What a purge has done.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PurgeReport {
    /// Files that are gone.
    pub removed: u64,
    /// Bytes of these files.
    pub bytes: u64,
    /// Whether Secrets and tokens are sealed with a new key from now on.
    pub new_key: bool,
    /// What could not be done.
    pub problems: Vec<String>,
}

/// What `coracle offline trust` has done.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TrustReport {
    /// The authorities that count now: subject, fingerprint and end.
    pub added: Vec<String>,
    /// Whether there were added ones, which count until the agent restarts.
    pub removed: bool,
}

/// Whether pods could start from the store alone.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckReport {
    /// What no pod can do without.
    pub problems: Vec<String>,
    /// The pods that would have to start.
    pub pods: Vec<PodCheck>,
}

impl CheckReport {
    /// Whether something is missing.
    #[must_use]
    pub fn has_problems(&self) -> bool {
        !self.problems.is_empty() || self.pods.iter().any(|pod| !pod.missing.is_empty())
    }
}

/// What a pod would lack.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodCheck {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// What is missing, and why.
    pub missing: Vec<String>,
}
