//! Single requests into a container's network: an HTTP GET and a TCP connect, as probes and
//! lifecycle hooks make them (Go: pkg/probe/http, pkg/probe/tcp).
//!
//! Each request opens its own connection and closes it. A deadline covers the whole request,
//! look-ups and redirects included, and a stop token ends it within `socket::STOP_LATENCY`.
//! Certificates are not verified: any server at a pod's address belongs to the pod. Proxies of the
//! environment are not used. A probe sends the manifest's headers, byte for byte, and users know the
//! texts of its failures.

pub(super) mod error;
#[cfg(test)]
pub(super) mod fuzz;
pub(super) mod lookup;
pub(super) mod socket;
mod tls;
pub(super) mod url;

use std::io::{self, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::http1::{Malformed, RequestWriter, ResponseHead, is_token};
use crate::util::stop::StopToken;

pub use error::DialError;
pub(super) use error::go_message;
use socket::{Limit, Socket};
use url::Url;
pub use url::UrlParts;

/// The longest part of a response's body that is stored; the rest is not read.
pub const MAX_BODY_BYTES: usize = 10 * 1024;
/// The limit of redirects on the same host.
const MAX_REDIRECTS: usize = 10;

/// The scheme of a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Plain.
    Http,
    /// TLS, with any certificate.
    Https,
}

/// A GET request.
#[derive(Debug, Clone)]
pub struct HttpGet<'a> {
    /// The scheme of the URL.
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
    /// `User-Agent` where the headers have none, such as `kube-probe/1.37`.
    pub user_agent: &'a str,
    /// Time limit of everything together; `None`: only the stop token ends it.
    pub timeout: Option<Duration>,
}

/// A response of any status. A status from 301 to 308 with a `Location` means that the redirect led
/// to another host and was not followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpResponse {
    /// The HTTP status code.
    pub status: u16,
    /// The first [`MAX_BODY_BYTES`] of the body.
    pub body: Vec<u8>,
}

/// Sends one GET, follows redirects to the same host name, and reads the response.
///
/// # Errors
/// When no complete response arrives in time; [`DialError::is_body`] shows whether only the body
/// was incomplete.
pub fn http_get(get: &HttpGet<'_>, stop: &StopToken) -> Result<HttpResponse, DialError> {
    let limit = Limit::new(get.timeout, stop);
    let mut url = Url::new(get.scheme, get.host, get.port, get.path);
    let first_host = url.host.clone();
    let mut fields = RequestFields::new(get.headers, get.user_agent);
    let mut hops = 0;
    loop {
        let failed = |url: &Url, cause: DialError| match cause {
            cause if cause.is_body() => cause,
            cause => DialError::Get { url: url.to_string(), cause: Box::new(cause) },
        };
        let fields_sent = fields.as_ref().map_err(|error| failed(&url, error.clone()))?;
        let (response, location) =
            exchange(&url, fields_sent, &limit).map_err(|cause| failed(&url, cause))?;
        let Some(location) = location.filter(|_| matches!(response.status, 301..=303 | 307 | 308)) else {
            return Ok(response);
        };
        let next = url.redirect(&location).ok_or_else(|| {
            let message = format!("failed to parse Location header {location:?}");
            failed(&url, DialError::Request(message))
        })?;
        if next.host != first_host {
            return Ok(response);
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
/// When no connection is accepted in time.
pub fn tcp_connect(host: &str, port: u16, timeout: Duration, stop: &StopToken) -> Result<(), DialError> {
    connect(host, port, &Limit::new(Some(timeout), stop)).map(drop)
}

/// `host:port`, formatted as by Go.
#[must_use]
pub fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn connect(host: &str, port: u16, limit: &Limit) -> Result<Socket, DialError> {
    let address = match host {
        // Go's dialer treats an address without a host like this.
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

/// A connection for requests.
trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// A response, and the target of its redirect.
fn exchange(
    url: &Url,
    fields: &RequestFields,
    limit: &Limit,
) -> Result<(HttpResponse, Option<String>), DialError> {
    let socket = connect(&url.host, url.port(), limit).map_err(|error| match error {
        DialError::ConnectTimeout { .. } => DialError::Timeout,
        other => other,
    })?;
    let ends = socket.ends();
    let mut stream: Box<dyn Stream> = match url.scheme {
        Scheme::Http => Box::new(socket),
        Scheme::Https => Box::new(tls::wrap(socket, &url.host, limit)?),
    };
    let broken = |error: &io::Error, in_body: bool, op: &'static str| match error {
        _ if limit.stop.is_stopped() => DialError::Stopped,
        _ if limit.is_over() && in_body => DialError::BodyTimeout,
        _ if limit.is_over() => DialError::Timeout,
        error if in_body => DialError::Body(go_message(error)),
        error if Malformed::is(error) => DialError::Malformed(error.to_string()),
        error if error.kind() == io::ErrorKind::UnexpectedEof => DialError::Eof,
        error => DialError::Broken { op, ends: ends.clone(), message: go_message(error) },
    };
    let sent = stream.write_all(&fields.request(url)).and_then(|()| stream.flush());
    let mut reader = BufReader::with_capacity(2048, stream);
    let head = ResponseHead::read(&mut reader).and_then(|head| Ok((head.framing()?, head)));
    // A server may respond and close without reading the request: then the response counts.
    let (mut framing, head) = head.map_err(|error| match sent {
        Err(error) => broken(&error, false, "write"),
        Ok(()) => broken(&error, false, "read"),
    })?;
    let body =
        framing.read_up_to(&mut reader, MAX_BODY_BYTES).map_err(|error| broken(&error, true, "read"))?;
    let mut locations = head.fields.all("Location").map(|value| String::from_utf8_lossy(value).into_owned());
    let location = locations.find(|value| !value.is_empty());
    Ok((HttpResponse { status: head.status, body }, location))
}

/// The header fields of a request, as upstream's client would send them.
#[derive(Debug, Clone)]
struct RequestFields {
    /// The manifest's value of `Host`.
    host: Option<String>,
    lines: Vec<(String, String)>,
    /// Whether the manifest has a `Referer`.
    referer: Option<String>,
}

impl RequestFields {
    fn new(headers: &[(String, String)], user_agent: &str) -> Result<RequestFields, DialError> {
        let first = |wanted: &str| {
            headers.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value.trim())
        };
        let host = first("Host").filter(|host| !host.is_empty()).map(str::to_owned);
        if host.as_ref().is_some_and(|host| host.bytes().any(|byte| byte <= b' ' || byte == 0x7f)) {
            return Err(DialError::Request("http: invalid Host header".to_owned()));
        }
        let mut lines = Vec::with_capacity(headers.len() + 3);
        let agent = first("User-Agent").unwrap_or(user_agent);
        if !agent.is_empty() {
            lines.push(("User-Agent".to_owned(), agent.to_owned()));
        }
        let accept = first("Accept");
        if accept.is_none() {
            lines.push(("Accept".to_owned(), "*/*".to_owned()));
        }
        for (name, value) in headers {
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
        Ok(RequestFields { host, lines, referer })
    }

    /// Adjusts them for a redirect from `from` to `to`.
    fn redirected(&mut self, from: &Url, to: &Url, location: &str) {
        // The manifest's host name stays only if the redirect names no other host.
        if url::is_absolute(location) {
            self.host = None;
        }
        let downgrade = from.scheme == Scheme::Https && to.scheme == Scheme::Http;
        if self.referer.is_none() && !downgrade {
            self.lines.retain(|(name, _)| name != "Referer");
            self.lines.push(("Referer".to_owned(), from.to_string()));
        }
    }

    /// The head of a request.
    fn request(&self, url: &Url) -> Vec<u8> {
        let authority = self.host.clone().unwrap_or_else(|| url.authority());
        let own = self.referer.as_ref().map(|value| ("Referer", value.as_str()));
        let lines = self.lines.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let head = RequestWriter::new("GET", &url.target, &authority);
        lines.chain(own).fold(head, |head, (name, value)| head.field(name, value)).finish()
    }
}

#[cfg(test)]
mod tests;
