//! Errors of calls to the runtime, and how often they are logged.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::transport::endpoint::EndpointError;
use crate::transport::grpc::{CallError, Kind};
use crate::util::lock::LockExt;
use crate::util::token;

/// A failed call of the runtime or image service.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CriError {
    /// The call failed. Printed as Go clients print it: events and statuses carry that text.
    #[error("{error}")]
    Call {
        /// Sandbox, container or image of the call; empty for the runtime itself.
        object: String,
        /// Method, kind and the server's message.
        error: CallError,
    },
    /// The call was cancelled because its caller stops.
    #[error("rpc error: code = Canceled desc = context canceled")]
    Stopped {
        /// Bare method name.
        method: &'static str,
        /// As in [`CriError::Call`].
        object: String,
    },
    /// The response lacks a required field.
    #[error("{method} of {object:?}: {what} is not set in the response")]
    Incomplete {
        /// Bare method name.
        method: &'static str,
        /// As in [`CriError::Call`].
        object: String,
        /// The missing field.
        what: &'static str,
    },
    /// A configured endpoint cannot be used.
    #[error("{field}")]
    Endpoint {
        /// The configuration field.
        field: &'static str,
        /// Why.
        source: EndpointError,
    },
}

/// How the caller should handle a [`CriError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// Retry later; the runtime may be stopped or busy.
    Retry,
    /// The object does not exist in the runtime.
    Gone,
    /// This runtime does not offer the call; a retry is useless.
    Unsupported,
    /// The agent or the caller stops.
    Stopping,
}

impl CriError {
    /// How to handle the error.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            CriError::Stopped { .. } => ErrorClass::Stopping,
            CriError::Call { error, .. } => match error.kind {
                Kind::NotFound => ErrorClass::Gone,
                Kind::Unimplemented => ErrorClass::Unsupported,
                _ => ErrorClass::Retry,
            },
            CriError::Incomplete { .. } => ErrorClass::Retry,
            CriError::Endpoint { .. } => ErrorClass::Unsupported,
        }
    }

    /// The gRPC kind, if a server or the connection gave one.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        match self {
            CriError::Call { error, .. } => Some(error.kind),
            CriError::Stopped { .. } => Some(Kind::Cancelled),
            CriError::Incomplete { .. } | CriError::Endpoint { .. } => None,
        }
    }

    /// Whether the object does not exist in the runtime.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.kind() == Some(Kind::NotFound)
    }

    /// The runtime's message without the `rpc error` prefix, as container statuses show it after a
    /// failed create or start.
    #[must_use]
    pub fn desc(&self) -> String {
        match self {
            CriError::Call { error, .. } => error.message.clone(),
            other => other.to_string(),
        }
    }

    /// The bare method name; empty for a bad endpoint.
    #[must_use]
    pub fn method(&self) -> &'static str {
        match self {
            CriError::Call { error, .. } => error.method,
            CriError::Stopped { method, .. } | CriError::Incomplete { method, .. } => method,
            CriError::Endpoint { .. } => "",
        }
    }

    /// Sandbox, container or image of the call.
    #[must_use]
    pub fn object(&self) -> &str {
        match self {
            CriError::Call { object, .. }
            | CriError::Stopped { object, .. }
            | CriError::Incomplete { object, .. } => object,
            CriError::Endpoint { .. } => "",
        }
    }
}

/// A message of the runtime without the tokens of the agent's registry of images: they are a part of its
/// addresses, which errors of pulls and sandboxes contain (`server::registry`: `HOST:PORT/v2/TOKEN` in
/// containerd, `HOST:PORT/TOKEN` in CRI-O). Errors are shown in statuses, events and logs.
pub(super) fn without_tokens(message: &str) -> String {
    let parts: Vec<&str> = message.split('/').collect();
    let has_port = |host: &str| {
        let port = host.rsplit_once(':').map_or("", |(_, port)| port);
        !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit())
    };
    let is_hidden = |index: usize, part: &str| {
        let before = |back: usize| index.checked_sub(back).and_then(|position| parts.get(position)).copied();
        let host = if before(1) == Some("v2") { before(2) } else { before(1) };
        let ends = part.get(token::DIGITS..).is_some_and(|rest| {
            !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_' || next == '-')
        });
        ends && part.get(..token::DIGITS).is_some_and(token::is_token) && host.is_some_and(has_port)
    };
    let shown = parts.iter().enumerate().map(|(index, part)| match part.get(token::DIGITS..) {
        Some(rest) if is_hidden(index, part) => format!("…{rest}"),
        _ => (*part).to_owned(),
    });
    shown.collect::<Vec<_>>().join("/")
}

/// The same error of the same call and object is logged once in this time.
const QUIET: Duration = Duration::from_secs(60);
/// More entries than this are swept; each is one failing call on one object.
const SWEEP_AT: usize = 256;

#[derive(Debug)]
struct LoggedError {
    text: String,
    time: Instant,
}

/// Logs each error at most once a minute (Go: logreduction).
#[derive(Debug, Default)]
pub(super) struct ErrorLog {
    logged: Mutex<HashMap<(&'static str, String), LoggedError>>,
}

impl ErrorLog {
    /// Logs `error` unless the same one was logged within the last minute.
    pub(super) fn note(&self, error: &CriError) {
        // Missing objects and a stop are ordinary; the caller logs them if it matters.
        if matches!(error.class(), ErrorClass::Gone | ErrorClass::Stopping) {
            log::debug!("{} of {:?}: {error}", error.method(), error.object());
        } else if self.is_new(error, Instant::now()) {
            log::warn!("{} of {:?}: {error}", error.method(), error.object());
        }
    }

    /// After a success the next failure is logged again.
    pub(super) fn succeeded(&self, method: &'static str, object: &str) {
        let mut logged = self.logged.locked();
        if !logged.is_empty() {
            logged.remove(&(method, object.to_owned()));
        }
    }

    fn is_new(&self, error: &CriError, now: Instant) -> bool {
        let mut logged = self.logged.locked();
        let fresh = |entry: &LoggedError| now.saturating_duration_since(entry.time) < QUIET;
        if logged.len() >= SWEEP_AT {
            logged.retain(|_, entry| fresh(entry));
        }
        let key = (error.method(), error.object().to_owned());
        let text = error.to_string();
        if logged.get(&key).is_some_and(|entry| entry.text == text && fresh(entry)) {
            return false;
        }
        logged.insert(key, LoggedError { text, time: now });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(kind: Kind, object: &str, message: &str) -> CriError {
        let error = CallError { method: "StartContainer", kind, message: message.into() };
        CriError::Call { object: object.into(), error }
    }

    #[test]
    fn tokens_of_the_registry_are_hidden_and_nothing_else() {
        let token = "0123456789abcdef".repeat(2);
        for (message, hidden) in [
            (
                format!(
                    "HEAD request to http://127.0.0.1:4321/v2/{token}/library/x/manifests/1?ns=docker.io: 503"
                ),
                true,
            ),
            (
                format!(
                    "(Mirrors also failed: [127.0.0.1:4321/{token}/docker.io/library/x:1: reading manifest])"
                ),
                true,
            ),
            (format!("Get \"http://[::1]:5000/v2/{token}\": dial tcp"), true),
            (format!("two: localhost:1/{token}, 127.0.0.1:2/v2/{token}/a"), true),
            (format!("open /run/log/journal/{token}/system.journal: no such file"), false),
            (format!("registry.example/{token}:1: not found"), false),
            (format!("registry.example:5000/{token}0/app: not found"), false),
            ("pull access denied: ü/ö".to_owned(), false),
        ] {
            let shown = without_tokens(&message);
            assert_eq!(shown, if hidden { message.replace(&token, "…") } else { message });
        }
    }

    #[test]
    fn error_has_text_of_go_client_and_class() {
        let error = call(Kind::NotFound, "c1", "no such container");
        assert_eq!(error.to_string(), "rpc error: code = NotFound desc = no such container");
        assert_eq!(error.desc(), "no such container");
        for (kind, class) in [
            (Kind::NotFound, ErrorClass::Gone),
            (Kind::Unimplemented, ErrorClass::Unsupported),
            (Kind::Unavailable, ErrorClass::Retry),
            (Kind::Unknown, ErrorClass::Retry),
            (Kind::Cancelled, ErrorClass::Retry),
        ] {
            assert_eq!(call(kind, "c1", "").class(), class);
        }
        let stopped = CriError::Stopped { method: "StopContainer", object: "c1".into() };
        assert_eq!(stopped.class(), ErrorClass::Stopping);
        assert_eq!(stopped.to_string(), "rpc error: code = Canceled desc = context canceled");
    }

    #[test]
    fn same_error_is_logged_once_a_minute() {
        let log = ErrorLog::default();
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let error = call(Kind::Unknown, "c1", "boom");
        assert!(log.is_new(&error, start));
        assert!(!log.is_new(&error, after(59)));
        assert!(log.is_new(&call(Kind::Unknown, "c2", "boom"), after(59)));
        assert!(log.is_new(&call(Kind::Unknown, "c1", "bang"), after(59)));
        assert!(log.is_new(&error, after(60)));
        assert!(!log.is_new(&error, after(61)));
        log.succeeded("StartContainer", "c1");
        assert!(log.is_new(&error, after(62)));
        for number in 0..2 * SWEEP_AT {
            log.is_new(&call(Kind::Unknown, &number.to_string(), "boom"), after(200 + 60 * number as u64));
        }
        assert!(log.logged.lock().unwrap().len() <= SWEEP_AT);
    }
}
