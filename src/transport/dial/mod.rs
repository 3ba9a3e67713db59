//! One-shot calls into a container's network: an HTTP GET and a bare TCP connect, as
//! probes and lifecycle hooks make them (Go: pkg/probe/http, pkg/probe/tcp).
//!
//! Each call opens a connection of its own and closes it again. A deadline covers the whole
//! call, names and redirects included, and a stop token ends it within [`STOP_LATENCY`].
//! Certificates are not verified: who answers on a pod's address is the pod by definition.
//! Proxies of the environment are not used. HTTP is read and written here and not by the
//! HTTP library, because a probe sends what the manifest says, byte for byte, and users
//! know the texts of its failures; of the library only TLS is used.

mod answer;
pub(super) mod error;
#[cfg(test)]
pub(super) mod fuzz;
pub(super) mod lookup;
pub(super) mod socket;
mod tls;
mod url;

use std::io::{BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::util::stop::StopToken;

use answer::{Fault, Head};
pub use error::DialError;
pub(super) use error::words;
pub use socket::STOP_LATENCY;
use socket::{Limit, Socket};
use url::Url;

/// How much of an answer's body is kept; the rest is not read.
pub const MAX_BODY_BYTES: usize = 10 * 1024;
/// Redirects on the same host that are followed.
const MAX_REDIRECTS: usize = 10;

/// With or without TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Plain.
    Http,
    /// TLS, whoever answers.
    Https,
}

/// One GET.
#[derive(Debug, Clone)]
pub struct HttpGet<'a> {
    /// With or without TLS.
    pub scheme: Scheme,
    /// An address or a name; empty for this machine.
    pub host: &'a str,
    /// TCP port.
    pub port: u16,
    /// Path, with a query if it has one, as the manifest writes it.
    pub path: &'a str,
    /// Names and values in the manifest's order; names may repeat. `Host` sets the host that
    /// the request names; an empty `Accept` or `User-Agent` sends none.
    pub headers: &'a [(String, String)],
    /// `User-Agent` where the headers have none, such as `kube-probe/1.36`.
    pub user_agent: &'a str,
    /// For everything together; `None`: only the stop token ends it.
    pub timeout: Option<Duration>,
}

/// An answer of whatever status. A status from 301 to 308 with a redirect in it means that
/// the redirect led to another host and was not followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpAnswer {
    /// The HTTP status code.
    pub status: u16,
    /// The first [`MAX_BODY_BYTES`] of the body.
    pub body: Vec<u8>,
}

/// Sends one GET, follows redirects to the same host name, and reads the answer.
///
/// # Errors
/// When no complete answer comes in time; [`DialError::is_body`] tells whether only the body
/// was cut short.
pub fn http_get(get: &HttpGet<'_>, stop: &StopToken) -> Result<HttpAnswer, DialError> {
    let limit = Limit::new(get.timeout, stop);
    let mut url = Url::new(get.scheme, get.host, get.port, get.path);
    let first_host = url.host.clone();
    let mut fields = Fields::of(get);
    let mut hops = 0;
    loop {
        let failed = |url: &Url, cause: DialError| match cause {
            cause if cause.is_body() => cause,
            cause => DialError::Get { url: url.to_string(), cause: Box::new(cause) },
        };
        let fields_sent = fields.as_ref().map_err(|error| failed(&url, error.clone()))?;
        let (head, body) = exchange(&url, fields_sent, &limit).map_err(|cause| failed(&url, cause))?;
        let answer = HttpAnswer { status: head.status, body };
        let Some(location) = head.location.filter(|_| matches!(head.status, 301..=303 | 307 | 308)) else {
            return Ok(answer);
        };
        let next = url.redirect(&location).ok_or_else(|| {
            let why = format!("failed to parse Location header {location:?}");
            failed(&url, DialError::Request(why))
        })?;
        if next.host != first_host {
            return Ok(answer);
        }
        hops += 1;
        if hops >= MAX_REDIRECTS {
            return Err(failed(&next, DialError::TooManyRedirects));
        }
        if let Ok(fields) = &mut fields {
            fields.redirected(&url, &next, &location);
        }
        url = next;
    }
}

/// Opens a TCP connection and closes it. `timeout` covers the look-up of a name, too.
///
/// # Errors
/// When nobody accepts in time.
pub fn tcp_connect(host: &str, port: u16, timeout: Duration, stop: &StopToken) -> Result<(), DialError> {
    connect(host, port, &Limit::new(Some(timeout), stop)).map(drop)
}

/// `host:port` as Go joins them.
#[must_use]
pub fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn connect(host: &str, port: u16, limit: &Limit) -> Result<Socket, DialError> {
    let address = match host {
        // As Go's dialer takes an address without a host.
        "" => Some(IpAddr::from(Ipv4Addr::LOCALHOST)),
        host => host.parse().ok(),
    };
    let addresses = match address {
        Some(address) => vec![(address, port).into()],
        None => lookup::lookup(host, port, limit)?,
    };
    let mut first = None;
    for (index, address) in addresses.iter().enumerate() {
        match Socket::connect(*address, &limit.share(addresses.len() - index), limit) {
            Ok(socket) => return Ok(socket),
            Err(error) if limit.stop.is_stopped() => return Err(error),
            Err(error) => first = first.or(Some(error)),
        }
    }
    Err(first
        .unwrap_or_else(|| DialError::Lookup { host: host.to_owned(), detail: "no such host".to_owned() }))
}

/// A connection that requests go over.
trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

fn exchange(url: &Url, fields: &Fields, limit: &Limit) -> Result<(Head, Vec<u8>), DialError> {
    let socket = connect(&url.host, url.port(), limit).map_err(|error| match error {
        DialError::ConnectTimeout { .. } => DialError::Timeout,
        other => other,
    })?;
    let ends = socket.ends();
    let mut stream: Box<dyn Stream> = match url.scheme {
        Scheme::Http => Box::new(socket),
        Scheme::Https => Box::new(tls::wrap(socket, &url.host, limit)?),
    };
    let broken = |fault: Fault, in_body: bool, op: &'static str| match fault {
        _ if limit.stop.is_stopped() => DialError::Stopped,
        _ if limit.is_over() && in_body => DialError::BodyTimeout,
        _ if limit.is_over() => DialError::Timeout,
        Fault::Malformed(what) if in_body => DialError::Body(what),
        Fault::Malformed(what) => DialError::Malformed(what),
        Fault::Io(error) if in_body => DialError::Body(error::words(&error)),
        Fault::Io(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => DialError::Eof,
        Fault::Io(error) => DialError::Broken { op, ends: ends.clone(), words: error::words(&error) },
    };
    let sent = stream.write_all(&fields.request(url)).and_then(|()| stream.flush());
    let mut reader = BufReader::with_capacity(2048, stream);
    // A server may answer and close without reading: then the answer counts.
    let head = answer::head(&mut reader).map_err(|fault| match sent {
        Err(error) => broken(Fault::Io(error), false, "write"),
        Ok(()) => broken(fault, false, "read"),
    })?;
    let body =
        answer::body(&mut reader, &head, MAX_BODY_BYTES).map_err(|fault| broken(fault, true, "read"))?;
    Ok((head, body))
}

/// The header fields of a request, as upstream's client would send them.
#[derive(Debug, Clone)]
struct Fields {
    /// What the manifest wants as `Host`.
    host: Option<String>,
    lines: Vec<(String, String)>,
    /// Whether the manifest has a `Referer` of its own.
    referer: Option<String>,
}

impl Fields {
    fn of(get: &HttpGet<'_>) -> Result<Fields, DialError> {
        let first = |wanted: &str| {
            get.headers
                .iter()
                .find(|(name, _)| name.eq_ignore_ascii_case(wanted))
                .map(|(_, value)| value.trim())
        };
        let host = first("Host").filter(|host| !host.is_empty()).map(str::to_owned);
        if host.as_ref().is_some_and(|host| host.bytes().any(|byte| byte <= b' ' || byte == 0x7f)) {
            return Err(DialError::Request("http: invalid Host header".to_owned()));
        }
        let mut lines = Vec::with_capacity(get.headers.len() + 3);
        let agent = first("User-Agent").unwrap_or(get.user_agent);
        if !agent.is_empty() {
            lines.push(("User-Agent".to_owned(), agent.to_owned()));
        }
        let accept = first("Accept");
        if accept.is_none() {
            lines.push(("Accept".to_owned(), "*/*".to_owned()));
        }
        for (name, value) in get.headers {
            let is = |other: &str| name.eq_ignore_ascii_case(other);
            let elsewhere =
                ["Host", "User-Agent", "Content-Length", "Transfer-Encoding", "Trailer", "Referer"];
            if elsewhere.into_iter().any(is) || (is("Accept") && accept == Some("")) {
                continue;
            }
            lines.push((name.clone(), value.trim().to_owned()));
        }
        if first("Connection").is_none() {
            lines.push(("Connection".to_owned(), "close".to_owned()));
        }
        for (name, value) in &lines {
            if name.is_empty() || !name.bytes().all(is_token) {
                return Err(DialError::Request(format!("net/http: invalid header field name {name:?}")));
            }
            if value.bytes().any(|byte| (byte < b' ' && byte != b'\t') || byte == 0x7f) {
                return Err(DialError::Request(format!("net/http: invalid header field value for {name:?}")));
            }
        }
        let referer = first("Referer").map(str::to_owned);
        Ok(Fields { host, lines, referer })
    }

    /// Adjusts them for a redirect from `from` to `to`.
    fn redirected(&mut self, from: &Url, to: &Url, location: &str) {
        // The manifest's host name stays only where the redirect names no other.
        if url::is_absolute(location) {
            self.host = None;
        }
        let downgrade = from.scheme == Scheme::Https && to.scheme == Scheme::Http;
        if self.referer.is_none() && !downgrade {
            self.lines.retain(|(name, _)| name != "Referer");
            self.lines.push(("Referer".to_owned(), from.to_string()));
        }
    }

    fn request(&self, url: &Url) -> Vec<u8> {
        let mut text = format!("GET {} HTTP/1.1\r\nHost: ", url.target);
        text.push_str(self.host.as_deref().unwrap_or(&url.authority()));
        text.push_str("\r\n");
        let own = self.referer.as_ref().map(|value| ("Referer", value.as_str()));
        for (name, value) in self.lines.iter().map(|(name, value)| (name.as_str(), value.as_str())).chain(own)
        {
            for part in [name, ": ", value, "\r\n"] {
                text.push_str(part);
            }
        }
        text.push_str("\r\n");
        text.into_bytes()
    }
}

/// Whether a byte may be in a header's name.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests;
