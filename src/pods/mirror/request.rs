//! Requests to the API server about mirrors, and their results.

use crate::kube::Returns;
use crate::kube::client::{Client, DeleteOptions};
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::model::api;

/// One request about one mirror.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    Create(Box<api::Pod>),
    /// Read the object that has the mirror's name.
    Get {
        namespace: String,
        name: String,
    },
    /// Delete the mirror immediately, if it still has the UID.
    Delete {
        namespace: String,
        name: String,
        /// The UID of the mirror at the API server.
        uid: String,
    },
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Response {
    /// The present object.
    Shown(Box<api::Pod>),
    /// The mirror is deleted, or no longer existed.
    Gone,
    /// Another object has the name.
    Exists,
    /// The request failed and may succeed later.
    Failed(String),
    /// The agent stops.
    Stopping,
}

/// Carries requests out.
pub trait Api: Send {
    /// Sends one request and waits for its end.
    fn send(&self, request: &Request) -> Response;

    /// The returns of the API server.
    fn returns(&self) -> Returns {
        Returns::default()
    }
}

impl Api for Client {
    fn returns(&self) -> Returns {
        Client::returns(self)
    }

    fn send(&self, request: &Request) -> Response {
        match request {
            Request::Create(pod) => {
                let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
                match self.create(&Target::pods().namespace(namespace), &**pod) {
                    Ok(made) => Response::Shown(Box::new(made)),
                    Err(error) if error.is_already_exists() => Response::Exists,
                    Err(error) => failure(&error),
                }
            }
            Request::Get { namespace, name } => match self.get(&Target::pod(namespace, name)) {
                Ok(pod) => Response::Shown(Box::new(pod)),
                Err(error) if error.is_not_found() => Response::Gone,
                Err(error) => failure(&error),
            },
            Request::Delete { namespace, name, uid } => {
                let options = DeleteOptions { grace_seconds: Some(0), uid: Some(uid.clone()) };
                match self.delete(&Target::pod(namespace, name), &options) {
                    Ok(()) => Response::Gone,
                    // Deleted already, or another pod has the name.
                    Err(error) if error.is_not_found() || error.is_conflict() => Response::Gone,
                    Err(error) => failure(&error),
                }
            }
        }
    }
}

fn failure(error: &ApiError) -> Response {
    if error.is_stopping() { Response::Stopping } else { Response::Failed(error.to_string()) }
}
