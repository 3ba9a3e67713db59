//! Requests to a control plane, with limits of time and size.

use std::io::Read;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::Value;

use super::cluster::resolve;
use super::credentials::Credentials;
use super::error::JoinError;
use crate::model::kubeconfig;
use crate::transport::api::{Breaker, Connections, DialError, Identity, Request, RequestKind};
use crate::util::clip;
use crate::util::secret::Secret;

/// The time for a request with its response (kubeadm: `ToClientSet`).
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// The largest response: API servers store no ConfigMap above 1.5 MiB.
const MAX_BODY_BYTES: u64 = 4 * 1024 * 1024;
/// The part of an error response that is read.
const MAX_ERROR_BYTES: u64 = 64 * 1024;
/// The longest text of a server in an error.
const MAX_MESSAGE_BYTES: usize = 500;
const USER_AGENT: &str = concat!("coracle/", env!("CARGO_PKG_VERSION"), " join");

/// Which servers are accepted.
#[derive(Clone, Copy)]
pub(super) enum Verification<'a> {
    /// Those whose certificate one of these authorities signed, PEM.
    Authority(&'a str),
    /// Those whose certificate an authority of this machine signed.
    System,
    /// All.
    Unverified,
}

/// An API server.
pub(super) struct Server {
    /// `https://HOST:PORT`.
    name: String,
    base_path: String,
    connections: Connections,
    token: Option<Secret<String>>,
    breaker: Breaker,
}

impl Server {
    /// The server of a URL that [`super::cluster::server_url`] returned. Nothing is sent yet.
    pub(super) fn new(
        url: &str,
        verification: Verification<'_>,
        credentials: Option<&Credentials>,
        breaker: &Breaker,
    ) -> Result<Server, JoinError> {
        let not_usable = |reason: String| JoinError::NotTrusted { server: url.to_owned(), reason };
        let pem = match verification {
            Verification::Authority(pem) => Some(k8s_openapi::ByteString(pem.as_bytes().to_vec())),
            Verification::System | Verification::Unverified => None,
        };
        let cluster = kubeconfig::Cluster {
            server: Some(url.to_owned()),
            insecure_skip_tls_verify: Some(matches!(verification, Verification::Unverified)),
            certificate_authority_data: pem,
            ..kubeconfig::Cluster::default()
        };
        let mut found = resolve(cluster).map_err(|error| not_usable(error.to_string()))?;
        let mut token = None;
        match credentials {
            Some(Credentials::Token(text)) => token = Some(Secret::new(text.clone())),
            Some(Credentials::ClientCertificate { certificate_pem, key_pem }) => {
                found.endpoint.identity = Some(Identity {
                    certificate: certificate_pem.clone().into_bytes().into(),
                    key: key_pem.clone().into_bytes().into(),
                });
            }
            None => {}
        }
        let connections = Connections::new(&found.endpoint).map_err(|error| not_usable(error.to_string()))?;
        let base_path = found.base_path;
        let name = url.strip_suffix(base_path.as_str()).unwrap_or(url).to_owned();
        Ok(Server { name, base_path, connections, token, breaker: breaker.clone() })
    }

    /// `https://HOST:PORT`.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Reads the JSON document at an escaped path. `object` names it in errors.
    pub(super) fn get(&self, object: &str, path: &str) -> Result<Value, JoinError> {
        let path = format!("{}{path}", self.base_path);
        let bearer = self.token.as_ref().map(|token| format!("Bearer {}", token.reveal()));
        let mut headers = vec![("Accept", "application/json"), ("User-Agent", USER_AGENT)];
        headers.extend(bearer.as_deref().map(|bearer| ("Authorization", bearer)));
        let request = Request {
            method: "GET",
            path: &path,
            headers: &headers,
            body: None,
            deadline: Instant::now() + REQUEST_LIMIT,
            kind: RequestKind::Call,
            is_urgent: false,
        };
        let outcome = self.connections.send(&request, &self.breaker);
        let mut response = outcome.map_err(|error| self.failure(&error))?;
        let status = response.status;
        let is_success = (200..300).contains(&status);
        let limit = if is_success { MAX_BODY_BYTES } else { MAX_ERROR_BYTES };
        let mut body = Vec::new();
        let outcome = response.body.by_ref().take(limit + 1).read_to_end(&mut body);
        if !is_success {
            // The status counts, also if its text is incomplete.
            return Err(self.refusal(object, status, &body));
        }
        outcome.map_err(|error| self.failure(&response.body.failed(&error)))?;
        let (server, object) = (self.name.clone(), object.to_owned());
        if body.len() as u64 > limit {
            return Err(JoinError::TooLarge { server, object, limit });
        }
        serde_json::from_slice(&body).map_err(|error| {
            let reason = format!("the response is no JSON: {error}");
            JoinError::Malformed { server, object, reason }
        })
    }

    /// The error for a response that was read and cannot be used.
    pub(super) fn malformed(&self, object: &str, reason: &str) -> JoinError {
        JoinError::Malformed {
            server: self.name.clone(),
            object: object.to_owned(),
            reason: clip::line(reason, MAX_MESSAGE_BYTES),
        }
    }

    fn failure(&self, error: &DialError) -> JoinError {
        let (server, reason) = (self.name.clone(), clip::line(&error.to_string(), MAX_MESSAGE_BYTES));
        if error.is_stopped() {
            JoinError::Interrupted
        } else if error.may_be_clock() {
            JoinError::Clock { server, reason, now: format!("{:.0}", Timestamp::now()) }
        } else if error.is_tls() {
            JoinError::NotTrusted { server, reason }
        } else {
            JoinError::Unreachable { server, reason }
        }
    }

    fn refusal(&self, object: &str, status: u16, body: &[u8]) -> JoinError {
        let (server, object) = (self.name.clone(), object.to_owned());
        let document: Option<Value> = serde_json::from_slice(body).ok();
        let text = |field: &str| document.as_ref().and_then(|document| document.get(field)?.as_str());
        // A proxy or another server responds with something else.
        let is_status = text("kind") == Some("Status");
        let message = match text("message").filter(|message| is_status && !message.is_empty()) {
            Some(message) => clip::line(message, MAX_MESSAGE_BYTES),
            None if body.is_empty() => "the response has no text".to_owned(),
            None => clip::line(String::from_utf8_lossy(body).trim(), MAX_MESSAGE_BYTES),
        };
        match status {
            401 | 403 => JoinError::Denied { server, object, status, message },
            404 if is_status => JoinError::Missing { server, object, message },
            _ => JoinError::Refused { server, object, status, message },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::testing::{AUTHORITY, HttpsServer, OTHER_AUTHORITY, json_response};

    const OBJECT: &str = "ConfigMap a/b";

    fn get(server: &HttpsServer, verification: Verification<'_>) -> Result<Value, JoinError> {
        let url = format!("https://{}", server.address());
        Server::new(&url, verification, None, &Breaker::default())?.get(OBJECT, "/x")
    }

    #[test]
    fn only_servers_of_the_authority_are_verified() {
        let server = HttpsServer::start(|_, _| json_response(200, "{}"));
        assert_eq!(get(&server, Verification::Authority(AUTHORITY)), Ok(serde_json::json!({})));
        assert_eq!(get(&server, Verification::Unverified), Ok(serde_json::json!({})));
        let error = get(&server, Verification::Authority(OTHER_AUTHORITY)).unwrap_err();
        assert!(matches!(error, JoinError::NotTrusted { .. }), "{error}");
        let error = get(&server, Verification::Authority("no PEM")).unwrap_err();
        assert!(matches!(error, JoinError::NotTrusted { .. }), "{error}");
        assert_eq!(server.requests().len(), 2);
    }

    #[test]
    fn each_status_is_a_refusal_that_names_the_object() {
        let status = r#"{"kind":"Status","message":"forbidden: \u001b[31m x"}"#;
        let long = "é".repeat(100_000);
        for (code, body, exit_code, text) in [
            (401, status, 28, "(status 401): forbidden:  [31m x"),
            (403, "<html>", 28, "(status 403): <html>"),
            (404, status, 29, "has no ConfigMap a/b: forbidden"),
            (404, "404 page not found\n", 30, "(status 404): 404 page not found"),
            (500, "", 30, "(status 500): the response has no text"),
            (503, long.as_str(), 30, "(status 503): éé"),
            (200, "<html>", 30, "the response is no JSON"),
        ] {
            let body = body.to_owned();
            let server = HttpsServer::start(move |_, _| json_response(code, &body));
            let error = get(&server, Verification::Unverified).unwrap_err();
            let shown = error.to_string();
            assert!(shown.contains(text) && shown.contains(OBJECT) && shown.len() < 800, "{shown}");
            assert_eq!(error.exit_code(), exit_code, "{shown}");
        }
    }

    #[test]
    fn huge_response_is_refused_at_its_limit() {
        let server = HttpsServer::start(|_, _| json_response(200, &" ".repeat(MAX_BODY_BYTES as usize + 2)));
        let error = get(&server, Verification::Unverified).unwrap_err();
        assert_eq!(
            error,
            JoinError::TooLarge {
                server: format!("https://{}", server.address()),
                object: OBJECT.to_owned(),
                limit: MAX_BODY_BYTES
            }
        );
    }

    #[test]
    fn deep_response_is_an_error() {
        let server = HttpsServer::start(|_, _| json_response(200, &"[".repeat(100_000)));
        assert_eq!(get(&server, Verification::Unverified).unwrap_err().exit_code(), 30);
    }

    #[test]
    fn token_is_sent_to_its_server_below_the_base_path() {
        let server = HttpsServer::start(|_, _| json_response(200, "{}"));
        let (url, token) = (format!("https://{}/base", server.address()), Credentials::Token("t".to_owned()));
        let breaker = Breaker::default();
        let api = Server::new(&url, Verification::Authority(AUTHORITY), Some(&token), &breaker).unwrap();
        assert_eq!(api.name(), format!("https://{}", server.address()));
        api.get(OBJECT, "/x").unwrap();
        let head = server.requests().remove(0);
        assert!(head.starts_with("GET /base/x HTTP/1.1\r\n"), "{head}");
        assert!(head.to_ascii_lowercase().contains("\r\nauthorization: bearer t\r\n"), "{head}");
        breaker.trip();
        assert_eq!(api.get(OBJECT, "/x"), Err(JoinError::Interrupted));
    }

    #[test]
    fn certificate_outside_of_its_time_is_a_matter_of_the_clock() {
        let url = "https://h:1";
        let api = Server::new(url, Verification::Unverified, None, &Breaker::default()).unwrap();
        let text = "failed to verify certificate: x509: certificate has expired or is not yet valid; the certificate \
                    is valid from a until b: is the clock of this machine right?";
        let error = api.failure(&DialError::Tls(text.to_owned()));
        assert!(matches!(&error, JoinError::Clock { .. }) && error.to_string().contains("clock"), "{error}");
        let late = api.failure(&DialError::Tls("handshake timeout".to_owned()));
        assert!(matches!(late, JoinError::Unreachable { .. }), "a server that is slow may respond later");
        let plain = api.failure(&DialError::PlainHttp);
        assert!(matches!(plain, JoinError::NotTrusted { .. }));
    }
}
