//! Services on other machines that the configuration names as grpc-go does (gRPC: doc/naming.md), for
//! connections without TLS. Local interfaces have stricter rules ([`super::endpoint`]).

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::dial::lookup::lookup;
use super::dial::socket::Limit;
use super::grpc::{CallError, Channel, Kind, UnaryMethod};
use crate::util::stop::StopToken;

/// The port of a name without one, as in grpc-go.
const DEFAULT_PORT: u16 = 443;
/// The most addresses of a name that are tried.
const MAX_ADDRESSES: usize = 4;
/// The largest response; those of collectors are a few bytes long.
const MAX_MESSAGE_BYTES: i32 = 4 * 1024 * 1024;

/// A name that no connection can be made to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum DestinationError {
    #[error("{0:?} has no host")]
    NoHost(String),
    #[error("{0:?} has no valid port")]
    Port(String),
    #[error("{0:?} names a DNS server, which is not supported: use host:port or dns:///host:port")]
    Authority(String),
    #[error("{0:?} has an unknown scheme: use host:port, dns:///host:port or unix:///path")]
    Scheme(String),
    #[error("{0:?} must name an absolute path")]
    Path(String),
}

/// Where a service listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A host, which is looked up for each connection, and its port.
    Host {
        /// A name or an address.
        host: String,
        /// Its TCP port.
        port: u16,
    },
    /// A Unix socket in the notation of the gRPC library.
    Socket(String),
}

impl Destination {
    /// Reads `host:port`, `dns:///host:port`, `unix:///path` or `unix-abstract:name`.
    ///
    /// # Errors
    /// When the text has none of these forms.
    pub fn parse(text: &str) -> Result<Destination, DestinationError> {
        let error = |make: fn(String) -> DestinationError| make(text.to_owned());
        if let Some(name) = after_scheme(text, "unix-abstract") {
            let name = name.strip_prefix("//").unwrap_or(name);
            return Ok(Destination::Socket(format!("unix-abstract:{name}")));
        }
        if let Some(path) = after_scheme(text, "unix") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return match path.starts_with('/') && !path.contains('\0') {
                true => Ok(Destination::Socket(format!("unix:{path}"))),
                false => Err(error(DestinationError::Path)),
            };
        }
        let name = match after_scheme(text, "dns") {
            Some(rest) => match rest.strip_prefix("//") {
                Some(rest) => rest.strip_prefix('/').ok_or_else(|| error(DestinationError::Authority))?,
                None => rest,
            },
            None if text.contains("//") => return Err(error(DestinationError::Scheme)),
            None => text,
        };
        let (host, port) = match name.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, port)) => (host, port.strip_prefix(':')),
            // An address of IPv6 without brackets has no port.
            None if name.matches(':').count() > 1 => (name, None),
            None => name.split_once(':').map_or((name, None), |(host, port)| (host, Some(port))),
        };
        if host.is_empty() {
            return Err(error(DestinationError::NoHost));
        }
        let port = match port {
            Some(port) => port.parse().map_err(|_| error(DestinationError::Port))?,
            None => DEFAULT_PORT,
        };
        Ok(Destination::Host { host: host.to_owned(), port })
    }

    /// The targets to try, in the notation of the gRPC library.
    fn targets(&self, limit: &Limit) -> Result<Vec<String>, String> {
        let (host, port) = match self {
            Destination::Socket(target) => return Ok(vec![target.clone()]),
            Destination::Host { host, port } => (host, *port),
        };
        let addresses = match host.parse() {
            Ok(address) => vec![SocketAddr::new(address, port)],
            Err(_) => lookup(host, port, limit).map_err(|error| error.to_string())?,
        };
        let target = |address: SocketAddr| match address {
            SocketAddr::V4(address) => format!("ipv4:{address}"),
            SocketAddr::V6(address) => format!("ipv6:{address}"),
        };
        Ok(addresses.into_iter().take(MAX_ADDRESSES).map(target).collect())
    }
}

/// What follows this scheme and its colon. The case of a scheme does not count (RFC 3986, section 3.1).
fn after_scheme<'a>(text: &'a str, scheme: &str) -> Option<&'a str> {
    let (found, rest) = text.split_once(':')?;
    found.eq_ignore_ascii_case(scheme).then_some(rest)
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceError {
    /// The name has no address now.
    #[error("{0}")]
    Lookup(String),
    /// The service's status, or no response.
    #[error("{0}")]
    Call(CallError),
}

impl ServiceError {
    /// Whether the same call may succeed later (OTLP: `Failures` of OTLP/gRPC).
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        match self {
            ServiceError::Lookup(_) => true,
            ServiceError::Call(error) => matches!(
                error.kind,
                Kind::Cancelled
                    | Kind::DeadlineExceeded
                    | Kind::Aborted
                    | Kind::OutOfRange
                    | Kind::Unavailable
                    | Kind::DataLoss
            ),
        }
    }
}

/// A service with its connection, which is made by a call and closed by a failure: a service that is
/// away causes no attempts between calls.
#[derive(Debug)]
pub struct RemoteService {
    destination: Destination,
    channel: Option<Channel>,
}

impl RemoteService {
    /// Makes no connection.
    #[must_use]
    pub fn new(destination: Destination) -> RemoteService {
        RemoteService { destination, channel: None }
    }

    /// Calls `method`; `limit` covers the look-up, the connection and the response. Of several addresses
    /// the first that can be connected to is used.
    ///
    /// # Errors
    /// When there is no successful response in time.
    pub fn call<Req, Resp: Unpin>(
        &mut self,
        method: &'static UnaryMethod<Req, Resp>,
        request: &Req,
        limit: Duration,
        stop: &StopToken,
    ) -> Result<Resp, ServiceError> {
        let begun = Instant::now();
        let left = || limit.saturating_sub(begun.elapsed());
        if let Some(channel) = self.channel.take() {
            let result = channel.call_with_stop(method, request, Some(left()), stop);
            match result {
                Ok(response) => {
                    self.channel = Some(channel);
                    return Ok(response);
                }
                // The service has been restarted, perhaps at another address.
                Err(error) if error.kind == Kind::Unavailable => {}
                Err(error) => return Err(ServiceError::Call(error)),
            }
        }
        let look_up = Limit { deadline: begun.checked_add(limit), stop: stop.clone() };
        let targets = self.destination.targets(&look_up).map_err(ServiceError::Lookup)?;
        let mut failure = ServiceError::Lookup("the name has no address".to_owned());
        for target in targets {
            let agent = concat!("coracle/", env!("CARGO_PKG_VERSION"));
            let channel = Channel::to(&target, &target, agent, MAX_MESSAGE_BYTES);
            match channel.call_with_stop(method, request, Some(left()), stop) {
                Ok(response) => {
                    self.channel = Some(channel);
                    return Ok(response);
                }
                Err(error) => {
                    let is_away = error.kind == Kind::Unavailable;
                    failure = ServiceError::Call(error);
                    if !is_away {
                        break;
                    }
                }
            }
        }
        Err(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_by_grpc_go() {
        let host = |host: &str, port| Ok(Destination::Host { host: host.to_owned(), port });
        for (text, expected) in [
            ("localhost:4317", host("localhost", 4317)),
            ("dns:///collector.example:1", host("collector.example", 1)),
            ("dns:collector", host("collector", 443)),
            ("[fd00::1]:4317", host("fd00::1", 4317)),
            ("fd00::1", host("fd00::1", 443)),
            ("unix:///run/c.sock", Ok(Destination::Socket("unix:/run/c.sock".into()))),
            ("unix-abstract:c", Ok(Destination::Socket("unix-abstract:c".into()))),
            ("", Err(DestinationError::NoHost(String::new()))),
            (":4317", Err(DestinationError::NoHost(":4317".into()))),
            ("host:x", Err(DestinationError::Port("host:x".into()))),
            ("host:65536", Err(DestinationError::Port("host:65536".into()))),
            ("dns://host:1", Err(DestinationError::Authority("dns://host:1".into()))),
            ("http://host:1", Err(DestinationError::Scheme("http://host:1".into()))),
            ("DNS:///collector:1", host("collector", 1)),
            ("Unix:///run/C.sock", Ok(Destination::Socket("unix:/run/C.sock".into()))),
            ("UNIX-abstract:C", Ok(Destination::Socket("unix-abstract:C".into()))),
            ("HTTP://host:1", Err(DestinationError::Scheme("HTTP://host:1".into()))),
            ("unix:c.sock", Err(DestinationError::Path("unix:c.sock".into()))),
        ] {
            assert_eq!(Destination::parse(text), expected, "{text:?}");
        }
    }

    #[test]
    fn addresses_need_no_look_up() {
        let limit = Limit { deadline: None, stop: StopToken::never() };
        for (text, target) in [("192.0.2.1:5", "ipv4:192.0.2.1:5"), ("[::1]:5", "ipv6:[::1]:5")] {
            assert_eq!(Destination::parse(text).unwrap().targets(&limit), Ok(vec![target.to_owned()]));
        }
    }

    #[test]
    fn only_failures_that_may_pass_are_temporary() {
        let failed = |kind| ServiceError::Call(CallError { method: "Export", kind, message: String::new() });
        assert!(failed(Kind::Unavailable).is_temporary() && failed(Kind::DeadlineExceeded).is_temporary());
        assert!(!failed(Kind::Unimplemented).is_temporary() && !failed(Kind::InvalidArgument).is_temporary());
    }
}
