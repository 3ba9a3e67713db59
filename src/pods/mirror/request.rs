//! What is asked of the API server, and what it may answer.

use crate::model::api;

/// One request about one mirror.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// Make it.
    Create(Box<api::Pod>),
    /// Look what has its name.
    Get {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// Delete it at once, if it still has the UID.
    Delete {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Its UID at the API server.
        uid: String,
    },
}

/// What came of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// The pod as it is now.
    Shown(Box<api::Pod>),
    /// It is deleted, or was not there any more.
    Gone,
    /// The name is taken.
    Exists,
    /// It did not work; later it may.
    Failed(String),
    /// The agent stops.
    Stopping,
}

/// Who carries requests out.
pub trait Api: Send {
    /// Sends one request and waits for its end.
    fn send(&self, request: &Request) -> Answer;
}
