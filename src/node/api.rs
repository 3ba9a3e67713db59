//! The requests of this room, behind traits so that its logic can be tested without a server.

use std::sync::atomic::{AtomicBool, Ordering};

use jiff::Timestamp;
use serde_json::Value;

use super::lease_object::LeaseObject;
use crate::kube::client::{Client, JSON};
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::kube::{Returns, envelope};
use crate::model::api::Node;

/// The encodings of a lease that we read, as the Go kubelet requests them. Errors have them, too.
const PROTOBUF_OR_JSON: &str = "application/vnd.kubernetes.protobuf,application/json";

/// The kinds of failure that this room distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeErrorKind {
    NotFound,
    AlreadyExists,
    Conflict,
    Forbidden,
    /// The server has another encoding, in which the next request will be.
    Encoding,
    Stopping,
    Other,
}

/// A request about the node or its lease that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {attempt} {object}: {reason}")]
pub struct NodeError {
    /// What was attempted: a verb.
    attempt: &'static str,
    /// `node n` or `lease n`.
    object: String,
    /// The message of the server or of the connection.
    reason: String,
    pub(super) kind: NodeErrorKind,
}

impl NodeError {
    pub(super) fn new(attempt: &'static str, object: String, reason: String, kind: NodeErrorKind) -> Self {
        NodeError { attempt, object, reason, kind }
    }
}

/// The requests of the `node` thread.
pub(super) trait NodeApi {
    fn get(&self) -> Result<Node, NodeError>;
    fn create(&self, node: &Node) -> Result<Node, NodeError>;
    fn patch_status(&self, patch: &Value) -> Result<Node, NodeError>;
    /// After a failure: the next request shall not use a connection that may be dead.
    fn drop_connections(&self);
    /// The returns of the API server.
    fn returns(&self) -> Returns {
        Returns::default()
    }
    /// What is wrong with our certificate at this time.
    fn certificate_problem(&self, _now: Timestamp) -> Option<String> {
        None
    }
}

/// The requests of the `lease` thread.
pub(super) trait LeaseApi {
    fn get(&self) -> Result<LeaseObject, NodeError>;
    fn create(&self, lease: &LeaseObject) -> Result<LeaseObject, NodeError>;
    fn update(&self, lease: &LeaseObject) -> Result<LeaseObject, NodeError>;
    /// Whether a lease to create is JSON.
    fn is_json(&self) -> bool {
        true
    }
    /// See [`NodeApi::drop_connections`].
    fn drop_connections(&self);
    /// The returns of the API server.
    fn returns(&self) -> Returns {
        Returns::default()
    }
}

/// The API server, for requests about one node.
pub(super) struct NodeApiClient {
    client: Client,
    name: String,
    /// Whether the server has refused a lease in Protocol Buffers, or a request for it.
    is_json: AtomicBool,
}

impl NodeApiClient {
    pub(super) fn new(client: Client, name: &str) -> Self {
        NodeApiClient { client, name: name.to_owned(), is_json: AtomicBool::new(false) }
    }

    fn node<T>(&self, attempt: &'static str, result: Result<T, ApiError>) -> Result<T, NodeError> {
        result.map_err(|error| failed(attempt, format!("node {}", self.name), &error))
    }

    /// Sends a request for the lease (`verb`), or with it. The response has the encoding of the server's choice.
    fn lease(
        &self,
        attempt: &'static str,
        verb: &'static str,
        target: &Target,
        lease: Option<&LeaseObject>,
    ) -> Result<LeaseObject, NodeError> {
        let is_json = self.is_json();
        let accept = if is_json { JSON } else { PROTOBUF_OR_JSON };
        let outcome = self.client.exchange(verb, target, accept, lease.map(LeaseObject::to_body));
        let object = format!("the lease of node {}", self.name);
        let (mut error, is_refusal) = match outcome {
            Ok(body) => match LeaseObject::from_body(&body) {
                Ok(lease) => return Ok(lease),
                Err(error) => {
                    let error = NodeError::new(attempt, object, error.to_string(), NodeErrorKind::Other);
                    (error, envelope::is_sealed(&body))
                }
            },
            Err(error) => {
                // 400: a server that takes it for JSON.
                let is_refusal = matches!(error.status(), Some(400 | 406 | 415));
                (failed(attempt, object, &error), is_refusal)
            }
        };
        if is_refusal && !is_json {
            log::debug!("{error}: leases are JSON from now on");
            self.is_json.store(true, Ordering::Relaxed);
            error.kind = NodeErrorKind::Encoding;
        }
        Err(error)
    }
}

fn failed(attempt: &'static str, object: String, error: &ApiError) -> NodeError {
    let kind = match error {
        _ if error.is_stopping() => NodeErrorKind::Stopping,
        _ if error.is_not_found() => NodeErrorKind::NotFound,
        _ if error.is_already_exists() => NodeErrorKind::AlreadyExists,
        _ if error.is_conflict() => NodeErrorKind::Conflict,
        _ if error.is_forbidden() => NodeErrorKind::Forbidden,
        _ => NodeErrorKind::Other,
    };
    NodeError::new(attempt, object, error.to_string(), kind)
}

impl NodeApi for NodeApiClient {
    fn get(&self) -> Result<Node, NodeError> {
        self.node("get", self.client.get(&Target::node(&self.name)))
    }

    fn create(&self, node: &Node) -> Result<Node, NodeError> {
        self.node("register", self.client.create(&Target::nodes(), node))
    }

    fn patch_status(&self, patch: &Value) -> Result<Node, NodeError> {
        let target = Target::node_status(&self.name);
        self.node("report the status of", self.client.patch(&target, patch))
    }

    fn drop_connections(&self) {
        self.client.drop_connections();
    }

    fn returns(&self) -> Returns {
        self.client.returns()
    }

    fn certificate_problem(&self, now: Timestamp) -> Option<String> {
        self.client.certificate_problem(now)
    }
}

impl LeaseApi for NodeApiClient {
    fn get(&self) -> Result<LeaseObject, NodeError> {
        self.lease("get", "get", &Target::lease(&self.name), None)
    }

    fn create(&self, lease: &LeaseObject) -> Result<LeaseObject, NodeError> {
        self.lease("create", "create", &Target::leases(), Some(lease))
    }

    fn update(&self, lease: &LeaseObject) -> Result<LeaseObject, NodeError> {
        self.lease("renew", "update", &Target::lease(&self.name), Some(lease))
    }

    fn is_json(&self) -> bool {
        self.is_json.load(Ordering::Relaxed)
    }

    fn drop_connections(&self) {
        self.client.drop_connections();
    }

    fn returns(&self) -> Returns {
        self.client.returns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_errors_are_classified_by_code_and_reason() {
        for (code, reason, kind) in [
            (404, "NotFound", NodeErrorKind::NotFound),
            (409, "AlreadyExists", NodeErrorKind::AlreadyExists),
            (409, "Conflict", NodeErrorKind::Conflict),
            (403, "Forbidden", NodeErrorKind::Forbidden),
            (500, "InternalError", NodeErrorKind::Other),
        ] {
            let error = ApiError::for_test(code, reason, "the server's words");
            let error = failed("get", "node n".to_owned(), &error);
            assert_eq!(
                (error.kind, error.to_string().as_str()),
                (kind, "cannot get node n: the server's words")
            );
        }
        let silent = failed("get", "node n".to_owned(), &ApiError::for_test_transport());
        assert_eq!(silent.kind, NodeErrorKind::Other);
    }
}
