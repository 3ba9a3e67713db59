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
    /// The most bytes that all files may have.
    pub limit_bytes: u64,
    /// Objects that are not stored, or not any more, and why; at most 16.
    pub problems: Vec<String>,
}
