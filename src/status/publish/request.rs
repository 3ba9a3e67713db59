//! The requests to the API server, and the possible responses.

use std::time::Duration;

use serde_json::Value;

use crate::kube::Returns;
use crate::kube::client::{Client, DeleteOptions};
use crate::kube::error::ApiError;
use crate::kube::target::Target;
use crate::model::api;

/// One request about one pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`: another pod with this name is not affected.
    pub uid: String,
    /// The kind of the request.
    pub operation: Operation,
}

/// The kinds of request.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// Read the pod.
    Get,
    /// Patch the pod's status with a strategic merge patch.
    Patch(Value),
    /// Delete the pod immediately, if it still has the UID.
    Delete,
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Response {
    /// The pod as it is now.
    Shown(Box<api::Pod>),
    /// The pod is deleted.
    Deleted,
    /// There is no such pod.
    Gone,
    /// The UID differs, the pod changed meanwhile, or the status is invalid: read the pod first.
    Conflict(String),
    /// The server refused the request.
    Refused(String),
    /// The server is overloaded or failed: the reason, and when to retry.
    Busy(String, Option<Duration>),
    /// The server did not respond.
    Unavailable(String),
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
        let (namespace, name) = (&request.namespace, &request.name);
        let pod = match &request.operation {
            Operation::Get => self.get(&Target::pod(namespace, name)),
            Operation::Patch(body) => self.patch(&Target::pod_status(namespace, name), body),
            Operation::Delete => {
                let options = DeleteOptions { grace_seconds: Some(0), uid: Some(request.uid.clone()) };
                return match self.delete(&Target::pod(namespace, name), &options) {
                    Ok(()) => Response::Deleted,
                    // Another pod has the name.
                    Err(error) if error.is_conflict() => Response::Gone,
                    Err(error) => failure(&error),
                };
            }
        };
        match pod {
            Ok(pod) => Response::Shown(Box::new(pod)),
            Err(error) => failure(&error),
        }
    }
}

/// The result that an error means.
fn failure(error: &ApiError) -> Response {
    let reason = error.to_string();
    if error.is_stopping() {
        return Response::Stopping;
    }
    if error.is_not_found() {
        return Response::Gone;
    }
    if error.is_conflict() {
        return Response::Conflict(reason);
    }
    match error.status() {
        // The response to another UID or to an invalid status.
        Some(422) => Response::Conflict(reason),
        // Failed authentication concerns all pods.
        Some(401) => Response::Unavailable(reason),
        Some(429 | 500..) => Response::Busy(reason, error.retry_after()),
        Some(_) => Response::Refused(reason),
        None if error.is_transport() => Response::Unavailable(reason),
        None => Response::Busy(reason, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_errors_are_classified_by_status_code() {
        let check = |error: ApiError, expected: &str| {
            let response = format!("{:?}", failure(&error));
            assert_eq!(response.split(['(', ' ']).next(), Some(expected), "{error}");
        };
        for (code, reason, expected) in [
            (404, "NotFound", "Gone"),
            (409, "Conflict", "Conflict"),
            (422, "Invalid", "Conflict"),
            (400, "BadRequest", "Refused"),
            (401, "Unauthorized", "Unavailable"),
            (403, "Forbidden", "Refused"),
            (429, "TooManyRequests", "Busy"),
            (500, "InternalError", "Busy"),
            (503, "ServiceUnavailable", "Busy"),
        ] {
            check(ApiError::for_test(code, reason, "m"), expected);
        }
        check(ApiError::for_test_transport(), "Unavailable");
    }
}
