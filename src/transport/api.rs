//! HTTP/1.1 connections to one API server: kept open between requests, ended immediately by a
//! [`Breaker`], closed when the peer does not respond (Go: net/http's Transport as client-go sets
//! it up).
//!
//! ureq sends the requests, over connections of ours (`adapter`).
//!
//! DIFFERS: HTTP/1.1 where upstream prefers HTTP/2: one connection per watch and per request in
//! progress (`openings` limits how many are opened at the same time). A redirect to another host gets
//! neither token nor certificate, where upstream's token follows.

pub(super) mod adapter;
mod breaker;
mod call;
mod openings;
pub(super) mod route;
mod socket;
mod usage;

use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ureq::config::RedirectAuthHeaders;
use ureq::http::{self, header};

pub use super::tls::{
    Identity, Roots, ServerAuthority, TlsSetupError, bundle_certificates, server_authorities,
};
pub use breaker::{Breaker, RequestKind, STOP_INTERVAL};
pub use route::Endpoint;

use super::dial::join_host_port;
use adapter::{Client, FinalResponse, ResponseBody};
use route::Routes;

pub use super::dial::DialError;

/// Buffer size of a body, allocated while it is read.
const BUFFER_BYTES: usize = 4 * 1024;

/// One request.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The method.
    pub method: &'static str,
    /// Path and query, escaped.
    pub path: &'a str,
    /// Names and values.
    pub headers: &'a [(&'a str, &'a str)],
    /// Content type and bytes.
    pub body: Option<(&'a str, &'a [u8])>,
    /// The time limit for the head of the response, and for the body without [`Body::follow_progress`].
    pub deadline: Instant,
    /// Whether the response lasts for minutes.
    pub kind: RequestKind,
    /// Whether it opens a connection also while others open many.
    pub is_urgent: bool,
}

/// A response of any status.
pub struct Response {
    /// The HTTP status code.
    pub status: u16,
    /// The header of this name.
    pub retry_after: Option<String>,
    /// The body.
    pub body: Body,
}

/// Connections to one server. Clones share them.
#[derive(Clone)]
pub struct Connections {
    shared: Arc<Shared>,
}

struct Shared {
    client: Client,
    /// `https://host:port`
    origin: String,
}

impl Connections {
    /// A client without open connections.
    ///
    /// # Errors
    /// When certificates or keys cannot be used.
    pub fn new(endpoint: &Endpoint) -> Result<Connections, TlsSetupError> {
        // Names of interfaces of this machine are not part of a URL.
        let (host, _zone) = endpoint.host.split_once('%').unwrap_or((&endpoint.host, ""));
        let scheme = if endpoint.https { "https" } else { "http" };
        let origin = format!("{scheme}://{}", join_host_port(host, endpoint.port));
        let config = adapter::settings()
            .https_only(endpoint.https)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .user_agent("")
            .accept("")
            .build();
        let client = Client::new(Routes::to(endpoint)?, config);
        Ok(Connections { shared: Arc::new(Shared { client, origin }) })
    }

    /// Sends a request and reads the head of its response.
    ///
    /// # Errors
    /// When there is no response in time, or the breaker was tripped.
    pub fn send(&self, request: &Request<'_>, breaker: &Breaker) -> Result<Response, DialError> {
        let Request { deadline, kind, is_urgent, .. } = *request;
        let client = &self.shared.client;
        let head = self.head(request)?;
        let outcome = match request.body {
            Some((_, bytes)) => client.send(&head.map(|()| bytes), deadline, (kind, is_urgent), breaker),
            None => client.send(&head, deadline, (kind, is_urgent), breaker),
        };
        let FinalResponse { status, headers, uri, body } = outcome?;
        if status == 407
            && let Some(proxy) = client.forwarder(&uri)
        {
            let cause = DialError::Tunnel("407 Proxy Authentication Required".to_owned());
            return Err(DialError::Proxy { proxy, cause: Box::new(cause) });
        }
        let retry_after = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
        let body = Body { reader: BufReader::with_capacity(BUFFER_BYTES, body) };
        Ok(Response { status, retry_after: retry_after.map(str::to_owned), body })
    }

    /// Uses none of the present connections again: those in use are closed after their responses, idle
    /// ones by the next request.
    pub fn retire(&self) {
        self.shared.client.retire();
    }

    fn head(&self, request: &Request<'_>) -> Result<http::Request<()>, DialError> {
        if !request.path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(DialError::Request(format!("the path {:?} is not escaped", request.path)));
        }
        let url = format!("{}{}", self.shared.origin, request.path);
        let mut head = http::Request::builder().method(request.method).uri(url);
        let kind = request.body.map(|(kind, _)| ("Content-Type", kind));
        for (name, value) in request.headers.iter().copied().chain(kind) {
            // The value may be a secret.
            let wrong = |_| DialError::Request(format!("invalid header field value for {name:?}"));
            head = head.header(name, http::HeaderValue::from_bytes(value.as_bytes()).map_err(wrong)?);
        }
        head.body(()).map_err(|error| DialError::Request(error.to_string()))
    }
}

/// The body of a response, read in pieces. The connection is reused if it is read to its end.
pub struct Body {
    reader: BufReader<ResponseBody>,
}

impl Body {
    /// The number of bytes that were received so far.
    pub fn bytes(&self) -> u64 {
        self.reader.get_ref().taken()
    }

    /// Replaces the request's deadline for the rest: reading fails after `quiet` without a byte of the
    /// connection, and at `end`. So a body arrives on a link of any speed, and a silent server is noticed.
    pub fn follow_progress(&mut self, quiet: Duration, end: Instant) {
        self.reader.get_ref().follow_progress(quiet, end);
    }

    /// Why reading the body failed with `error`.
    pub fn failed(&mut self, error: &io::Error) -> DialError {
        ResponseBody::failed(error)
    }
}

impl BufRead for Body {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.reader.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.reader.consume(count);
    }
}

impl Read for Body {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.reader.read(into)
    }
}

/// Lines of a [`Body`], one at a time.
pub struct Lines {
    body: Body,
    line: Vec<u8>,
    max_bytes: usize,
}

impl Lines {
    /// Lines of at most `max_bytes`.
    #[must_use]
    pub fn new(body: Body, max_bytes: usize) -> Lines {
        Lines { body, line: Vec::new(), max_bytes }
    }

    /// The next line that is not empty, without its line end; `None` at the end of the body. A last
    /// line without a line end is an error.
    ///
    /// # Errors
    /// When the body ends early, a line is too long, or the deadline has passed.
    pub fn next_line(&mut self) -> Result<Option<&[u8]>, DialError> {
        // Frees the memory of a large object.
        self.line = Vec::new();
        loop {
            self.line.clear();
            let mut limited = self.body.by_ref().take(self.max_bytes as u64);
            if let Err(error) = limited.read_until(b'\n', &mut self.line) {
                return Err(self.body.failed(&error));
            }
            if self.line.is_empty() {
                return Ok(None);
            }
            if self.line.pop_if(|last| *last == b'\n').is_none() {
                let what =
                    if self.line.len() >= self.max_bytes { "line is too long" } else { "unexpected EOF" };
                return Err(DialError::Body(what.to_owned()));
            }
            self.line.pop_if(|last| *last == b'\r');
            if !self.line.is_empty() {
                return Ok(Some(&self.line));
            }
        }
    }
}

#[cfg(test)]
mod tests;
