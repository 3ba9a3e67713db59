//! A request, as far as its response depends on it.

use crate::transport::http1::Target;

/// Where a request came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) enum Listener {
    /// `/healthz` only.
    Healthz,
    /// `/pods`, `/runningpods`, `/healthz`.
    ReadOnly,
    /// The node API: TLS, and every caller is authenticated.
    Main,
    /// The local API.
    Local,
}

impl Listener {
    /// Open connections at once; each costs a thread while it lasts.
    pub(in crate::server) fn max_connections(self) -> usize {
        match self {
            Listener::Healthz => 8,
            Listener::ReadOnly => 16,
            // Only a last resort: the connection limiter has limits of its own, but an evicted
            // connection keeps its thread for the moment until it notices.
            Listener::Main => 512,
            // 16 streams, and room for short requests beside them.
            Listener::Local => 24,
        }
    }
}

/// The method of a request that was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::server) enum Method {
    /// Reads; a HEAD gets the same response without its body.
    #[default]
    Get,
    /// As [`Method::Get`], but the node API requires other rights.
    Head,
    /// Changes, or runs something.
    Post,
    /// Sets something.
    Put,
    /// Any other; few paths accept one.
    Other,
}

impl Method {
    /// The method of this name.
    pub(super) fn of(name: &str) -> Method {
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
pub(in crate::server) struct Request {
    pub method: Method,
    pub target: Target,
    /// The `Accept` header; empty without one.
    pub accept: String,
    /// Whether the client accepts gzip.
    pub gzip: bool,
    /// Only the node API accepts bodies, and only short ones.
    pub body: Vec<u8>,
}

impl Request {
    /// What stands between the first two slashes of the path.
    pub(in crate::server) fn first_element(&self) -> &str {
        first_element(&self.target.path)
    }
}

/// What stands between the first two slashes of a path.
pub(in crate::server) fn first_element(path: &str) -> &str {
    path.trim_start_matches('/').split('/').next().unwrap_or_default()
}
