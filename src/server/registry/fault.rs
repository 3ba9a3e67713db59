//! Errors in the form of the specification, and the documents of the registry itself.

use serde_json::json;

use crate::images::LookupError;
use crate::server::http::response::Response;

/// A sign of this API, which old clients require.
pub(super) const VERSION: (&str, &str) = ("Docker-Distribution-Api-Version", "registry/2.0");

/// Why a request fails: status, code of the specification, and a text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub status: u16,
    pub code: &'static str,
    pub message: String,
}

impl Fault {
    /// Also for a wrong token: a client without it learns nothing.
    pub(super) const NO_PATH: Fault = Fault { status: 404, code: "NAME_UNKNOWN", message: String::new() };

    pub(super) fn new(status: u16, code: &'static str, message: impl Into<String>) -> Fault {
        Fault { status, code, message: message.into() }
    }

    pub(super) fn refused(code: &'static str, refusal: LookupError) -> Fault {
        match refusal {
            LookupError::Unknown(reason) => Fault::new(404, code, reason),
            LookupError::Unavailable(reason) => {
                log::warn!("an image is not served: {reason}");
                Fault::new(503, "UNAVAILABLE", reason)
            }
        }
    }

    pub(super) fn response(&self) -> Response {
        let Fault { status, code, message } = self;
        json_response(*status, &json!({"errors": [{"code": code, "message": message}]}))
    }
}

pub(super) fn json_response(status: u16, document: &serde_json::Value) -> Response {
    Response::json(document).with_status(status).with(VERSION.0, VERSION.1)
}
