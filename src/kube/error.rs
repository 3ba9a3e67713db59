//! Errors of requests to the API server.

use std::time::Duration;

use serde::Deserialize;

use super::envelope;
use crate::model::meta;
use crate::transport::api::{DialError, TlsSetupError};
use crate::util::wire::{self, Content};

/// A request that failed, with its verb and its object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub struct ApiError {
    /// `get pods "ns/p"`.
    attempt: Box<str>,
    cause: Cause,
    /// What our own certificate may have to do with it. In a box, because errors are returned by value.
    note: Option<Box<Note>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Note(String);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Cause {
    /// An error response.
    Status {
        code: u16,
        reason: String,
        message: String,
        retry_after: Option<Duration>,
        /// A cause says that the namespace is being deleted.
        is_namespace_ending: bool,
    },
    /// No response.
    Transport { url: String, error: DialError },
    /// The request or the response is not an object of the expected kind.
    Form(String),
    /// There are no credentials.
    Credentials(String),
    /// No API server is configured.
    NoServer,
    /// The client was shut down.
    Stopping,
}

/// The fields of a `Status` that are used here. All are optional: a response from a proxy is no
/// `Status` at all.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    kind: Option<String>,
    reason: Option<String>,
    message: Option<String>,
    code: Option<u16>,
    details: Option<Details>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Details {
    retry_after_seconds: Option<u64>,
    causes: Option<Vec<meta::StatusCause>>,
}

impl Status {
    /// The status of a response to a request that accepts any encoding.
    fn from_body(body: &[u8]) -> Option<Status> {
        if envelope::is_sealed(body) {
            Status::from_protobuf(body)
        } else {
            serde_json::from_slice(body).ok()
        }
    }

    /// The numbers are those of apimachinery: pkg/apis/meta/v1/generated.proto.
    fn from_protobuf(body: &[u8]) -> Option<Status> {
        let envelope = envelope::open(body).filter(|envelope| envelope.kind == b"Status")?;
        let mut status = Status { kind: Some("Status".to_owned()), ..Status::default() };
        let mut rest = envelope.object;
        while !rest.is_empty() {
            let field = wire::next_field(&mut rest)?;
            match (field.number, field.content) {
                (3, Content::Bytes(message)) => status.message = Some(text(message)),
                (4, Content::Bytes(reason)) => status.reason = Some(text(reason)),
                (5, Content::Bytes(details)) => status.details = Some(Details::from_protobuf(details)?),
                _ => {}
            }
        }
        Some(status)
    }
}

impl Details {
    fn from_protobuf(mut rest: &[u8]) -> Option<Details> {
        let (mut retry_after_seconds, mut causes) = (None, Vec::new());
        while !rest.is_empty() {
            let field = wire::next_field(&mut rest)?;
            match (field.number, field.content) {
                (4, Content::Bytes(mut cause)) => {
                    while !cause.is_empty() {
                        let field = wire::next_field(&mut cause)?;
                        if let (1, Content::Bytes(reason)) = (field.number, field.content) {
                            let reason = Some(text(reason));
                            causes.push(meta::StatusCause { reason, ..meta::StatusCause::default() });
                        }
                    }
                }
                // A negative number is written with 64 bits.
                (5, Content::Number(seconds)) => {
                    retry_after_seconds = u32::try_from(seconds).ok().map(u64::from);
                }
                _ => {}
            }
        }
        Some(Details { retry_after_seconds, causes: Some(causes) })
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl ApiError {
    fn new(attempt: String, cause: Cause) -> ApiError {
        ApiError { attempt: attempt.into_boxed_str(), cause, note: None }
    }

    /// Adds what is wrong with our own certificate, if that may be the cause.
    pub(super) fn with_note(mut self, note: impl FnOnce() -> Option<String>) -> ApiError {
        let may_be_cause = match &self.cause {
            Cause::Status { code, .. } => *code == 401,
            Cause::Transport { error, .. } => matches!(error, DialError::Tls(_)),
            _ => false,
        };
        if may_be_cause {
            self.note = note().map(Note).map(Box::new);
        }
        self
    }

    /// A response with an error status.
    pub(super) fn from_response(
        attempt: String,
        code: u16,
        body: &[u8],
        retry_after: Option<Duration>,
    ) -> ApiError {
        let status = Status::from_body(body);
        // Not the bytes of a message.
        let body: &[u8] = if envelope::is_sealed(body) { &[] } else { body };
        let text = || String::from_utf8_lossy(body).trim().chars().take(1024).collect::<String>();
        let reason = status.as_ref().and_then(|status| status.reason.clone());
        let reason = reason.filter(|reason| !reason.is_empty()).unwrap_or_else(|| {
            // A proxy does not know the path; the object may still exist.
            let kind = status.as_ref().and_then(|status| status.kind.as_deref());
            let is_proxy = code == 404 && kind != Some("Status");
            if is_proxy { "Unknown" } else { reason_of(code) }.to_owned()
        });
        let sent_message = status.as_ref().and_then(|status| status.message.clone());
        let message = sent_message.filter(|message| !message.is_empty()).unwrap_or_else(|| match text() {
            text if text.is_empty() || status.is_some() => {
                format!("the server responded with {code} ({reason})")
            }
            text => format!("the server responded with {code}: {text}"),
        });
        let details = status.and_then(|status| status.details).unwrap_or_default();
        let seconds_of_details = details.retry_after_seconds;
        let retry_after =
            retry_after.or(seconds_of_details.filter(|seconds| *seconds > 0).map(Duration::from_secs));
        let mut causes = details.causes.iter().flatten();
        let is_namespace_ending = causes.any(|cause| cause.reason.as_deref() == Some(NAMESPACE_TERMINATING));
        ApiError::new(attempt, Cause::Status { code, reason, message, retry_after, is_namespace_ending })
    }

    /// An ERROR event of a watch.
    pub(super) fn from_event(attempt: String, object: serde_json::Value) -> ApiError {
        let status: Status = serde_json::from_value(object).unwrap_or_default();
        let code = status.code.unwrap_or(500);
        let reason = status.reason.unwrap_or_else(|| reason_of(code).to_owned());
        let message = status.message.unwrap_or_else(|| "the server ended the watch".to_owned());
        let details = status.details.unwrap_or_default();
        let too_large = "ResourceVersionTooLarge";
        let causes = details.causes.unwrap_or_default();
        let reason = match causes.iter().any(|cause| cause.reason.as_deref() == Some(too_large)) {
            true => too_large.to_owned(),
            false => reason,
        };
        let retry_after = details.retry_after_seconds.map(Duration::from_secs);
        let is_namespace_ending = false;
        ApiError::new(attempt, Cause::Status { code, reason, message, retry_after, is_namespace_ending })
    }

    pub(super) fn transport(attempt: String, url: String, error: DialError) -> ApiError {
        match error {
            DialError::Stopped => ApiError::stopping(attempt),
            error => ApiError::new(attempt, Cause::Transport { url, error }),
        }
    }

    pub(super) fn form(attempt: String, what: String) -> ApiError {
        ApiError::new(attempt, Cause::Form(what))
    }

    pub(super) fn credentials(attempt: String, what: String) -> ApiError {
        ApiError::new(attempt, Cause::Credentials(what))
    }

    pub(super) fn setup(error: &TlsSetupError) -> ApiError {
        ApiError::credentials("set up the connection to the API server".to_owned(), error.to_string())
    }

    /// This agent has no API server.
    pub fn no_server() -> ApiError {
        ApiError::new(String::new(), Cause::NoServer)
    }

    pub(super) fn stopping(attempt: String) -> ApiError {
        ApiError::new(attempt, Cause::Stopping)
    }

    /// For tests of other rooms: a response of this status and reason.
    #[cfg(test)]
    #[must_use]
    pub fn for_test(code: u16, reason: &str, message: &str) -> ApiError {
        let cause = Cause::Status {
            code,
            reason: reason.to_owned(),
            message: message.to_owned(),
            retry_after: None,
            is_namespace_ending: false,
        };
        ApiError::new("test".to_owned(), cause)
    }

    /// For tests of other rooms: a request in a namespace that is being deleted.
    #[cfg(test)]
    #[must_use]
    pub fn for_test_namespace_ending() -> ApiError {
        let body = br#"{"kind":"Status","code":403,"reason":"Forbidden","message":"m",
            "details":{"causes":[{"reason":"NamespaceTerminating"}]}}"#;
        ApiError::from_response("test".to_owned(), 403, body, None)
    }

    /// For tests of other rooms: the client was shut down.
    #[cfg(test)]
    #[must_use]
    pub fn for_test_stopping() -> ApiError {
        ApiError::new("test".to_owned(), Cause::Stopping)
    }

    /// For tests of other rooms: no response.
    #[cfg(test)]
    #[must_use]
    pub fn for_test_transport() -> ApiError {
        ApiError::transport("test".to_owned(), "https://test/".to_owned(), DialError::Timeout)
    }

    fn text(&self) -> String {
        match &self.note {
            Some(note) => format!("{} ({})", self.text_of_cause(), note.0),
            None => self.text_of_cause(),
        }
    }

    fn text_of_cause(&self) -> String {
        match &self.cause {
            // The server names the object.
            Cause::Status { message, .. } => message.clone(),
            Cause::Transport { url, error } => format!("{}: {url:?}: {error}", self.attempt),
            Cause::Form(what) | Cause::Credentials(what) => format!("{}: {what}", self.attempt),
            Cause::NoServer => "there is no API server".to_owned(),
            Cause::Stopping => format!("{}: the agent is stopping", self.attempt),
        }
    }

    /// The HTTP status, if there was a response.
    pub fn status(&self) -> Option<u16> {
        match &self.cause {
            Cause::Status { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// The server's reason, such as `NotFound`; empty if there was no response.
    pub fn reason(&self) -> &str {
        match &self.cause {
            Cause::Status { reason, .. } => reason,
            _ => "",
        }
    }

    /// The object does not exist.
    pub fn is_not_found(&self) -> bool {
        self.reason() == "NotFound"
    }

    /// Another client has changed the object meanwhile.
    pub fn is_conflict(&self) -> bool {
        self.reason() == "Conflict"
    }

    /// An object with this name exists.
    pub fn is_already_exists(&self) -> bool {
        self.reason() == "AlreadyExists"
    }

    /// Access is denied.
    pub fn is_forbidden(&self) -> bool {
        self.reason() == "Forbidden"
    }

    /// The server refuses the request because the namespace is being deleted (Go: `HasStatusCause`).
    pub fn is_namespace_ending(&self) -> bool {
        matches!(&self.cause, Cause::Status { is_namespace_ending: true, .. })
    }

    /// The resource version is too old, or the object no longer exists.
    pub fn is_gone(&self) -> bool {
        matches!(self.reason(), "Gone" | "Expired")
    }

    /// The server's resource version is older than ours.
    pub(super) fn is_too_large_version(&self) -> bool {
        self.reason() == "ResourceVersionTooLarge"
            || matches!(&self.cause, Cause::Status { reason, message, .. }
                if reason == "Timeout" && message.contains("Too large resource version"))
    }

    /// The client was shut down.
    pub fn is_stopping(&self) -> bool {
        matches!(self.cause, Cause::Stopping)
    }

    /// There was no HTTP response.
    pub fn is_transport(&self) -> bool {
        matches!(self.cause, Cause::Transport { .. })
    }

    /// There are no credentials, or not yet.
    pub(super) fn is_unauthenticated(&self) -> bool {
        matches!(self.cause, Cause::Credentials(_))
    }

    /// The server's address refuses connections.
    pub(super) fn is_refused(&self) -> bool {
        matches!(&self.cause, Cause::Transport { error, .. } if error.is_refused())
    }

    /// There was no connection to the server.
    pub(super) fn is_unreachable(&self) -> bool {
        matches!(&self.cause, Cause::Transport { error, .. } if error.is_unreachable())
    }

    /// The connection to the server broke before a response, or the server was silent.
    pub(super) fn is_broken(&self) -> bool {
        matches!(&self.cause, Cause::Transport { error, .. } if error.is_broken())
    }

    /// The server's `Retry-After`.
    pub fn retry_after(&self) -> Option<Duration> {
        match &self.cause {
            Cause::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// The reason of a cause (Go: api/core/v1 `NamespaceTerminatingCause`).
const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";

/// The default reason of a status without a reason.
fn reason_of(code: u16) -> &'static str {
    match code {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        405 => "MethodNotAllowed",
        406 => "NotAcceptable",
        409 => "Conflict",
        410 => "Gone",
        413 => "RequestEntityTooLarge",
        415 => "UnsupportedMediaType",
        422 => "Invalid",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        504 => "Timeout",
        500..=599 => "InternalError",
        _ => "Unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_for(code: u16, body: &str) -> ApiError {
        ApiError::from_response("get pods \"ns/p\"".to_owned(), code, body.as_bytes(), None)
    }

    #[test]
    fn namespace_that_is_being_deleted_is_a_cause_and_not_each_forbidden_response() {
        assert!(ApiError::for_test_namespace_ending().is_namespace_ending());
        assert!(ApiError::for_test_namespace_ending().is_forbidden());
        assert!(!error_for(403, r#"{"kind":"Status","reason":"Forbidden"}"#).is_namespace_ending());
    }

    #[test]
    fn error_responses_determine_the_kind_of_error() {
        let error = error_for(
            404,
            r#"{"kind":"Status","status":"Failure","message":"pods \"p\" not found","reason":"NotFound","code":404}"#,
        );
        assert!(error.is_not_found() && !error.is_conflict() && !error.is_transport());
        assert_eq!((error.to_string().as_str(), error.status()), ("pods \"p\" not found", Some(404)));
        let error = error_for(409, r#"{"reason":"AlreadyExists","message":"m"}"#);
        assert!(error.is_already_exists() && !error.is_conflict());
        let error = error_for(502, "<html>bad gateway</html>\n");
        assert_eq!(error.to_string(), "the server responded with 502: <html>bad gateway</html>");
        assert_eq!(error.reason(), "InternalError");
        // A 404 of a proxy does not mean that the object is missing: nothing is removed because of it.
        for body in ["404 page not found\n", "", "<html>", "[]", "null", r#"{"error":"no route"}"#] {
            let error = error_for(404, body);
            assert!(!error.is_not_found() && error.status() == Some(404), "{body:?}");
        }
        assert!(
            error_for(404, r#"{"kind":"Status","code":404}"#).is_not_found(),
            "a Status without a reason"
        );
        assert_eq!(error_for(401, "").to_string(), "the server responded with 401 (Unauthorized)");
        assert!(error_for(401, "").reason() == "Unauthorized" && error_for(410, "[]").is_gone());
        let error = error_for(429, r#"{"details":{"retryAfterSeconds":3}}"#);
        assert_eq!(error.retry_after(), Some(Duration::from_secs(3)));
    }

    #[test]
    fn error_in_protocol_buffers_is_that_of_the_same_error_in_json() {
        let error =
            |code, body: &[u8]| ApiError::from_response("get leases \"n\"".to_owned(), code, body, None);
        // Status: status 2, message 3, reason 4, details 5 (name 1, kind 3, causes 4, retryAfterSeconds 5), code 6.
        let conflict = b"k8s\0\x0a\x0c\x0a\x02v1\x12\x06Status\
            \x12\x29\x0a\0\x12\x07Failure\x1a\x07changed\x22\x08Conflict\
            \x2a\x06\x0a\x01n\x1a\x01k\x30\x99\x03\x1a\0\x22\0";
        let json = br#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",
            "message":"changed","reason":"Conflict","details":{"name":"n","kind":"k"},"code":409}"#;
        assert_eq!(error(409, conflict), error(409, json));
        assert!(error(409, conflict).is_conflict());
        let ending = b"k8s\0\x0a\x0c\x0a\x02v1\x12\x06Status\
            \x12\x29\x22\x09Forbidden\
            \x2a\x1c\x22\x18\x0a\x14NamespaceTerminating\x12\0\x28\x03";
        assert!(error(403, ending).is_forbidden() && error(403, ending).is_namespace_ending());
        assert_eq!(error(403, ending).retry_after(), Some(Duration::from_secs(3)));
        // Without a reason, and a message that is no Status: a 404 of a proxy, whose bytes are not shown.
        assert!(error(404, b"k8s\0\x0a\x0c\x0a\x02v1\x12\x06Status").is_not_found());
        let other = error(404, b"k8s\0\x0a\x09\x0a\x02v1\x12\x03Pod\x12\x02\x22\0");
        assert!(!other.is_not_found());
        assert_eq!(other.to_string(), "the server responded with 404 (Unknown)");
        for length in 0..conflict.len() {
            let _ = error(409, &conflict[..length]).to_string();
        }
    }

    #[test]
    fn only_errors_of_authentication_and_tls_name_our_own_certificate() {
        let note = || Some("the client certificate has expired".to_owned());
        let tls = DialError::Tls("remote error: expired certificate".to_owned());
        let tls = ApiError::transport("get nodes \"n\"".to_owned(), "https://h:1/x".to_owned(), tls);
        for error in [error_for(401, "[]"), tls] {
            let text = error.to_string();
            assert_eq!(
                error.with_note(note).to_string(),
                format!("{text} (the client certificate has expired)")
            );
        }
        for error in [error_for(403, "[]"), ApiError::for_test_transport(), ApiError::no_server()] {
            let text = error.to_string();
            assert_eq!(error.with_note(note).to_string(), text);
        }
    }

    #[test]
    fn error_events_of_a_watch_determine_the_kind_of_error() {
        let event = |object| ApiError::from_event("watch pods".to_owned(), object);
        assert!(event(serde_json::json!({"code": 410, "reason": "Expired", "message": "too old"})).is_gone());
        assert!(event(serde_json::json!({"code": 410})).is_gone());
        assert_eq!(event(serde_json::json!(7)).status(), Some(500));
        let large = serde_json::json!({"code": 504, "reason": "Timeout",
            "details": {"causes": [{"reason": "ResourceVersionTooLarge", "message": "m"}]}});
        assert!(event(large).is_too_large_version());
    }

    #[test]
    fn failed_connections_are_transport_errors() {
        let refused =
            DialError::Connect { address: "h:1".to_owned(), message: "connection refused".to_owned() };
        let error = ApiError::transport("get nodes \"n\"".to_owned(), "https://h:1/x".to_owned(), refused);
        assert!(error.is_transport() && error.is_refused() && error.status().is_none());
        assert_eq!(
            error.to_string(),
            "get nodes \"n\": \"https://h:1/x\": dial tcp h:1: connect: connection refused"
        );
        assert!(ApiError::transport(String::new(), String::new(), DialError::Stopped).is_stopping());
        let refused =
            DialError::Connect { address: "p:1".to_owned(), message: "connection refused".to_owned() };
        let proxy = DialError::Proxy { proxy: "p:1".to_owned(), cause: Box::new(refused) };
        let error = ApiError::transport("get nodes \"n\"".to_owned(), "https://h:1/x".to_owned(), proxy);
        assert!(error.is_refused(), "a proxy that is away is a server that is away");
    }
}
