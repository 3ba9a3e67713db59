//! What is asked of the API server, and what it may answer.

use std::time::Duration;

use serde_json::Value;

use crate::model::api;

/// One request about one pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`: no other pod of that name is meant.
    pub uid: String,
    /// What to do.
    pub what: What,
}

/// The kinds of request.
#[derive(Debug, Clone, PartialEq)]
pub enum What {
    /// Read the pod.
    Get,
    /// Patch its status strategically.
    Patch(Value),
    /// Delete it at once, if it still has the UID.
    Delete,
}

/// What came of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// The pod as it is now.
    Shown(Box<api::Pod>),
    /// It is deleted.
    Deleted,
    /// There is no such pod.
    Gone,
    /// It is another pod, or changed meanwhile, or the server takes no such status: look first.
    Conflict(String),
    /// The server will not do that.
    Refused(String),
    /// The server cannot do that now.
    Busy(String, Option<Duration>),
    /// No answer.
    Away(String),
    /// The agent stops.
    Stopping,
}

/// Who carries requests out.
pub trait Api: Send {
    /// Sends one request and waits for its end.
    fn send(&self, request: &Request) -> Answer;
}
