//! Endpoints in flags and configuration files.

use std::net::{IpAddr, SocketAddr};

/// An endpoint that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum EndpointError {
    /// The text is empty.
    #[error("the endpoint is empty")]
    Empty,
    /// A path that does not start at the root.
    #[error(
        "endpoint {0:?}: the socket's path must be absolute, as in unix:///run/containerd/containerd.sock"
    )]
    Relative(String),
    /// The kernel's limit is 107 bytes.
    #[error("endpoint {0:?}: the socket's path is longer than 107 bytes")]
    TooLong(String),
    #[error("endpoint {0:?}: unknown scheme, use unix:///path")]
    Scheme(String),
    #[error("endpoint {0:?}: expected a loopback address and a port")]
    Address(String),
    /// The interface has no authentication, so it must not be reachable from other machines.
    #[error("endpoint {0:?}: only loopback addresses are allowed, the interface has no authentication")]
    NotLoopback(String),
}

const MAX_PATH_BYTES: usize = 107;

/// The same endpoint in the notation of the gRPC library.
///
/// # Errors
/// When it is not `unix:///path`, an absolute path, or a loopback address with a port.
pub fn target(endpoint: &str) -> Result<String, EndpointError> {
    let endpoint = endpoint.trim();
    if endpoint.is_empty() {
        return Err(EndpointError::Empty);
    }
    let path = endpoint.strip_prefix("unix://").or_else(|| endpoint.strip_prefix("unix:"));
    match (path, endpoint.split_once("://")) {
        (Some(path), _) => unix(endpoint, path),
        (None, None) => unix(endpoint, endpoint),
        (None, Some(("tcp" | "http", address))) => loopback(endpoint, address.trim_end_matches('/')),
        (None, Some(_)) => Err(EndpointError::Scheme(endpoint.to_owned())),
    }
}

fn unix(endpoint: &str, path: &str) -> Result<String, EndpointError> {
    if !path.starts_with('/') || path.contains('\0') {
        return Err(EndpointError::Relative(endpoint.to_owned()));
    }
    if path.len() > MAX_PATH_BYTES {
        return Err(EndpointError::TooLong(endpoint.to_owned()));
    }
    Ok(format!("unix:{path}"))
}

fn loopback(endpoint: &str, address: &str) -> Result<String, EndpointError> {
    let address = address.replacen("localhost:", "127.0.0.1:", 1);
    let address: SocketAddr = address.parse().map_err(|_| EndpointError::Address(endpoint.to_owned()))?;
    match address.ip() {
        ip if !ip.is_loopback() => Err(EndpointError::NotLoopback(endpoint.to_owned())),
        IpAddr::V4(_) => Ok(format!("ipv4:{address}")),
        IpAddr::V6(_) => Ok(format!("ipv6:{address}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_endpoints_are_named_as_the_library_wants_them() {
        for (endpoint, expected) in [
            ("unix:///run/containerd/containerd.sock", "unix:/run/containerd/containerd.sock"),
            ("unix:/run/crio/crio.sock", "unix:/run/crio/crio.sock"),
            ("/run/containerd/containerd.sock", "unix:/run/containerd/containerd.sock"),
            (" unix:///a b ", "unix:/a b"),
            ("tcp://127.0.0.1:3735", "ipv4:127.0.0.1:3735"),
            ("tcp://localhost:3735", "ipv4:127.0.0.1:3735"),
            ("http://[::1]:80/", "ipv6:[::1]:80"),
        ] {
            assert_eq!(target(endpoint).as_deref(), Ok(expected), "{endpoint}");
        }
    }

    #[test]
    fn invalid_endpoints_are_refused_with_the_reason() {
        let long = format!("unix:///{}", "x".repeat(107));
        let owned = |text: &str| text.to_owned();
        for (endpoint, expected) in [
            ("  ", EndpointError::Empty),
            ("run/x.sock", EndpointError::Relative(owned("run/x.sock"))),
            ("unix://run/x.sock", EndpointError::Relative(owned("unix://run/x.sock"))),
            ("unix://", EndpointError::Relative(owned("unix://"))),
            ("unix:///a\0b", EndpointError::Relative(owned("unix:///a\0b"))),
            (long.as_str(), EndpointError::TooLong(long.clone())),
            ("npipe:////./pipe/x", EndpointError::Scheme(owned("npipe:////./pipe/x"))),
            ("https://127.0.0.1:1", EndpointError::Scheme(owned("https://127.0.0.1:1"))),
            ("tcp://127.0.0.1", EndpointError::Address(owned("tcp://127.0.0.1"))),
            ("tcp://192.0.2.1:99", EndpointError::NotLoopback(owned("tcp://192.0.2.1:99"))),
        ] {
            assert_eq!(target(endpoint), Err(expected), "{endpoint}");
        }
    }
}
