//! Responses to requests that do not become streams.

use crate::cri::CriError;
use crate::server::http::connection::Connection;
use crate::server::http::response::{LAST, to_bytes};
use crate::transport::grpc::Kind;

/// A URL of the runtime is valid for a minute; then another one can be issued.
const RETRY_AFTER: (&str, &str) = ("Retry-After", "60");

/// The response to a request that does not become a stream, and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rejection(Vec<u8>, String);

impl Rejection {
    /// A response after which the connection is closed.
    pub(super) fn closing(status: u16, text: impl Into<String>) -> Rejection {
        Rejection::with(status, None, text.into())
    }

    fn with(status: u16, field: Option<(&str, &str)>, text: String) -> Rejection {
        let mut fields =
            vec![("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")];
        fields.extend(field);
        let bytes = to_bytes(LAST, status, &fields, &text);
        Rejection(bytes, text)
    }

    /// The runtime's whole response to the client's own request.
    pub(super) fn forwarded(response: Vec<u8>, text: String) -> Rejection {
        Rejection(response, text)
    }

    pub(super) fn of_runtime(error: &CriError) -> Rejection {
        match error.kind() {
            Some(Kind::NotFound) => Rejection::closing(404, error.to_string()),
            Some(Kind::ResourceExhausted) => Rejection::with(429, Some(RETRY_AFTER), error.to_string()),
            _ => Rejection::closing(500, error.to_string()),
        }
    }

    /// The text without the head.
    pub(super) fn text(&self) -> &str {
        self.1.trim_end()
    }

    /// Sends it and lets the client read it.
    pub(super) fn send(self, client: Connection) {
        client.finish(&self.0);
    }
}

#[cfg(test)]
impl Rejection {
    pub(super) fn status(&self) -> u16 {
        let head = String::from_utf8_lossy(&self.0).into_owned();
        head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
    }
}
