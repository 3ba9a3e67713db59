//! The parts of a request that its response depends on.

use crate::transport::http1::Target;

/// What a listener serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// `/healthz` only.
    Healthz,
    /// `/pods`, `/runningpods`, `/healthz`.
    ReadOnly,
    /// The node API: TLS, and every caller is authenticated.
    Main,
    /// The local API.
    Local,
    /// The registry of image archives.
    Registry,
}

impl ListenerKind {
    /// The maximum of open connections; each holds a thread.
    pub(crate) fn max_connections(self) -> usize {
        match self {
            ListenerKind::Healthz => 8,
            ListenerKind::ReadOnly => 16,
            // The connection limiter has lower limits, but an evicted connection keeps its thread
            // until it notices.
            ListenerKind::Main => 512,
            // 16 streams, and some short requests.
            ListenerKind::Local => 24,
            // A runtime pulls a few layers of a few images at the same time.
            ListenerKind::Registry => 32,
        }
    }
}

/// The method of a request that was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Method {
    /// Reads; a HEAD gets the same response without its body.
    #[default]
    Get,
    /// Like [`Method::Get`], but the node API requires other rights.
    Head,
    /// Changes an object, or runs a command.
    Post,
    /// Sets a value.
    Put,
    /// Any other; few paths accept one.
    Other,
}

impl Method {
    pub(crate) fn from_name(name: &str) -> Method {
        match name {
            "GET" => Method::Get,
            "HEAD" => Method::Head,
            "POST" => Method::Post,
            "PUT" => Method::Put,
            _ => Method::Other,
        }
    }
}

/// A request that was accepted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Request {
    pub method: Method,
    pub target: Target,
    /// The `Accept` header; empty without one.
    pub accept: String,
    /// The `Range` header; empty without one.
    pub range: String,
    /// Whether the client accepts gzip.
    pub gzip: bool,
    /// Only the node API accepts bodies, and only short ones.
    pub body: Vec<u8>,
}

impl Request {
    /// See [`first_element`].
    pub(crate) fn first_element(&self) -> &str {
        first_element(&self.target.path)
    }
}

/// The text between the first two slashes of a path.
pub(crate) fn first_element(path: &str) -> &str {
    path.trim_start_matches('/').split('/').next().unwrap_or_default()
}
