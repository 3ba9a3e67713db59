//! The few requests that this room makes, behind a trait so that its logic tests without
//! a server.

use serde_json::Value;

use crate::model::api::Node;
use crate::model::coordination::Lease;

/// What kind of failure it was, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    NotFound,
    AlreadyExists,
    Conflict,
    Forbidden,
    Stopping,
    Other,
}

/// A request about the node or its lease that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {attempt} {object}: {why}")]
pub struct NodeError {
    /// A verb.
    attempt: &'static str,
    /// `node n` or `lease n`.
    object: String,
    /// The server's or the connection's words.
    why: String,
    pub(super) kind: Kind,
}

impl NodeError {
    pub(super) fn new(attempt: &'static str, object: String, why: String, kind: Kind) -> Self {
        NodeError { attempt, object, why, kind }
    }
}

/// The requests of the `node` thread.
pub(super) trait NodeApi {
    fn get(&self) -> Result<Node, NodeError>;
    fn create(&self, node: &Node) -> Result<Node, NodeError>;
    fn patch_status(&self, patch: &Value) -> Result<Node, NodeError>;
    /// After a failure: the next request shall not use a connection that may be dead.
    fn drop_connections(&self);
}

/// The requests of the `lease` thread.
pub(super) trait LeaseApi {
    fn get(&self) -> Result<Lease, NodeError>;
    fn create(&self, lease: &Lease) -> Result<Lease, NodeError>;
    fn update(&self, lease: &Lease) -> Result<Lease, NodeError>;
    /// See [`NodeApi::drop_connections`].
    fn drop_connections(&self);
}
