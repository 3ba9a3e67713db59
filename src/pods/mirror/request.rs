//! What is asked of the API server, and what it may answer.

use crate::kube::client::{Client, DeleteOptions};
use crate::kube::error::ApiError;
use crate::kube::target::Target;
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

impl Api for Client {
    fn send(&self, request: &Request) -> Answer {
        match request {
            Request::Create(pod) => {
                let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
                match self.create(&Target::pods().namespace(namespace), &**pod) {
                    Ok(made) => Answer::Shown(Box::new(made)),
                    Err(error) if error.is_already_exists() => Answer::Exists,
                    Err(error) => failure(&error),
                }
            }
            Request::Get { namespace, name } => match self.get(&Target::pod(namespace, name)) {
                Ok(pod) => Answer::Shown(Box::new(pod)),
                Err(error) if error.is_not_found() => Answer::Gone,
                Err(error) => failure(&error),
            },
            Request::Delete { namespace, name, uid } => {
                let options = DeleteOptions { grace_seconds: Some(0), uid: Some(uid.clone()) };
                match self.delete(&Target::pod(namespace, name), &options) {
                    Ok(()) => Answer::Gone,
                    // Gone already, or another pod has the name.
                    Err(error) if error.is_not_found() || error.is_conflict() => Answer::Gone,
                    Err(error) => failure(&error),
                }
            }
        }
    }
}

fn failure(error: &ApiError) -> Answer {
    if error.is_stopping() { Answer::Stopping } else { Answer::Failed(error.to_string()) }
}
