//! Answers that are no streams.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::cri::CriError;
use crate::server::client::Client;
use crate::transport::grpc::Kind;

use super::splice;

/// A client takes an answer within this time, or goes without.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A URL of the runtime is good for a minute: by then there is room for new ones.
const RETRY_AFTER: u32 = 60;

/// Why there is no stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal(Vec<u8>, String);

impl Refusal {
    /// A text of ours; the connection ends with it.
    pub(super) fn closing(status: u16, text: impl Into<String>) -> Refusal {
        Refusal::with(status, "", text.into())
    }

    fn with(status: u16, headers: &str, text: String) -> Refusal {
        let phrase = match status {
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            429 => "Too Many Requests",
            _ => "Internal Server Error",
        };
        let mut bytes = format!(
            "HTTP/1.1 {status} {phrase}\r\nServer: coracle\r\nContent-Type: text/plain; charset=utf-8\r\n\
             X-Content-Type-Options: nosniff\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n",
            text.len()
        )
        .into_bytes();
        bytes.extend_from_slice(text.as_bytes());
        Refusal(bytes, text)
    }

    /// What the runtime said to the client's own request: its whole answer.
    pub(super) fn passed_on(answer: Vec<u8>, text: String) -> Refusal {
        Refusal(answer, text)
    }

    /// A refusal of the runtime.
    pub(super) fn of_runtime(error: &CriError) -> Refusal {
        match error.kind() {
            Some(Kind::NotFound) => Refusal::closing(404, error.to_string()),
            Some(Kind::ResourceExhausted) => {
                Refusal::with(429, &format!("Retry-After: {RETRY_AFTER}\r\n"), error.to_string())
            }
            _ => Refusal::closing(500, error.to_string()),
        }
    }

    /// The reason alone.
    pub(super) fn text(&self) -> &str {
        self.1.trim_end()
    }

    /// Sends it and lets the client read it.
    pub(super) fn send(self, mut client: Client, wake: &UnixStream) {
        if client.write_all(&self.0, wake, ANSWER_LIMIT).is_ok() {
            splice::farewell(client, wake);
        }
    }
}

#[cfg(test)]
impl Refusal {
    pub(super) fn status(&self) -> u16 {
        let head = String::from_utf8_lossy(&self.0).into_owned();
        head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
    }
}
