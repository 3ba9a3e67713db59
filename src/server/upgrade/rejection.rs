//! Responses to requests that do not become streams.

use std::io::Write;
use std::time::Duration;

use jiff::Timestamp;

use crate::cri::CriError;
use crate::server::http::connection::{Connection, Pace};
use crate::transport::grpc::Kind;
use crate::transport::http1::{Form, ResponseWriter};

/// How long a client may take to read a response.
pub(super) const RESPONSE_LIMIT: Duration = Duration::from_secs(10);

/// A URL of the runtime is valid for a minute: by then there is room for new ones.
const RETRY_AFTER: (&str, &str) = ("Retry-After", "60");

/// Why there is no stream: the whole response, and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rejection(Vec<u8>, String);

impl Rejection {
    /// A text of ours; the connection ends with it.
    pub(super) fn closing(status: u16, text: impl Into<String>) -> Rejection {
        Rejection::with(status, None, text.into())
    }

    fn with(status: u16, field: Option<(&str, &str)>, text: String) -> Rejection {
        let mut fields =
            vec![("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")];
        fields.extend(field);
        let form = Form { is_1_1: true, keep_alive: false, head_only: false };
        let mut bytes = Vec::new();
        // Writing to memory does not fail.
        let _ =
            ResponseWriter::new(&mut bytes, form, Timestamp::now()).whole(status, &fields, text.as_bytes());
        Rejection(bytes, text)
    }

    /// The runtime's whole response to the client's own request.
    pub(super) fn passed_on(response: Vec<u8>, text: String) -> Rejection {
        Rejection(response, text)
    }

    /// An error of the runtime.
    pub(super) fn of_runtime(error: &CriError) -> Rejection {
        match error.kind() {
            Some(Kind::NotFound) => Rejection::closing(404, error.to_string()),
            Some(Kind::ResourceExhausted) => Rejection::with(429, Some(RETRY_AFTER), error.to_string()),
            _ => Rejection::closing(500, error.to_string()),
        }
    }

    /// The reason alone.
    pub(super) fn text(&self) -> &str {
        self.1.trim_end()
    }

    /// Sends it and lets the client read it.
    pub(super) fn send(self, mut client: Connection) {
        client.set_pace(Some(Pace::within(RESPONSE_LIMIT)));
        if client.write_all(&self.0).is_ok() {
            client.close(true);
        }
    }
}

#[cfg(test)]
impl Rejection {
    pub(super) fn status(&self) -> u16 {
        let head = String::from_utf8_lossy(&self.0).into_owned();
        head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
    }
}
