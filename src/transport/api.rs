//! HTTP/1.1 connections to one API server: kept open between requests, ended immediately by a
//! [`Breaker`], closed when the peer does not respond (Go: net/http's Transport as client-go sets
//! it up).
//!
//! Uses no HTTP library: only its codec would be useful, with three times the memory per watch
//! (`docs/dependencies.md`).
//!
//! DIFFERS: HTTP/1.1 where upstream prefers HTTP/2: one connection per watch and per request in
//! progress.

mod breaker;
#[cfg(test)]
pub(super) mod fuzz;
pub(super) mod route;
mod socket;

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use super::tls::{Identity, Roots, TlsSetupError};
pub use breaker::{Breaker, Use};

use super::dial::{join_host_port, words};
use super::http1::{Framing, Malformed, ResponseHead};
use super::proxy::{Proxy, ProxyScheme};
use super::tls::client::Tls;
use route::{Route, Stream};

pub use super::dial::DialError;

/// Idle connections that are kept; after a burst of pods, more may have been opened.
const MAX_IDLE: usize = 4;
/// API servers close connections after 90 s without a request; we close them earlier, so that none
/// is closed during a request.
const MAX_IDLE_TIME: Duration = Duration::from_secs(60);
/// Buffer size of a connection, allocated while it is open.
const BUFFER_BYTES: usize = 4 * 1024;

/// The address of a server, how it is verified, and our credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Whether the connection has TLS.
    pub https: bool,
    /// A name or an address, an IPv6 one without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// The authorities that sign the server's certificate.
    pub roots: Roots,
    /// The name in the server's certificate, if it is not the host.
    pub server_name: Option<String>,
    /// Our client certificate.
    pub identity: Option<Identity>,
    /// The proxy to use, if there is one.
    pub proxy: Option<Proxy>,
}

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
    /// The time limit for the head of the response. The body's reader has [`Body::set_deadline`].
    pub deadline: Instant,
    /// Whether the response lasts for minutes.
    pub kind: Use,
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
    route: Route,
    authority: String,
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    connections: Vec<(Connection, Instant)>,
    /// Counts the closing of all connections: a connection from before the last one is not kept.
    era: u64,
}

struct Connection {
    reader: BufReader<Stream>,
    era: u64,
}

impl Connections {
    /// A client without open connections.
    ///
    /// # Errors
    /// When certificates or keys cannot be used.
    pub fn new(endpoint: &Endpoint) -> Result<Connections, TlsSetupError> {
        let Endpoint { https, host, port, roots, server_name, identity, proxy } = endpoint;
        let tls = match https {
            false => None,
            true => Some(Tls::new(roots, identity.as_ref(), server_name.as_ref().unwrap_or(host))?),
        };
        let mut route = Route::direct(host, *port, tls, "the API server");
        if let Some(proxy) = proxy {
            // Our certificate is only for the server, not for a proxy.
            let tls = match proxy.scheme {
                ProxyScheme::Https => Some(Tls::new(&roots.of_proxy(), None, &proxy.host)?),
                ProxyScheme::Http | ProxyScheme::Socks5 => None,
            };
            route = route.through(proxy.clone(), tls);
        }
        let shared = Shared { route, authority: join_host_port(host, *port), idle: Mutex::default() };
        Ok(Connections { shared: Arc::new(shared) })
    }

    /// Sends a request and reads the head of its response.
    ///
    /// # Errors
    /// When there is no response in time, or the breaker was tripped.
    pub fn send(&self, request: &Request<'_>, breaker: &Breaker) -> Result<Response, DialError> {
        let bytes = self.shared.bytes(request)?;
        // Only requests without side effects are sent twice: the server may be closing a reused
        // connection at this moment.
        if let Some(connection) = self.take_idle() {
            match self.exchange(connection, request, &bytes, breaker) {
                Err(DialError::Eof | DialError::Broken { .. })
                    if request.method == "GET" && !breaker.is_tripped() => {}
                outcome => return outcome,
            }
        }
        let connection = self.open(request, breaker)?;
        self.exchange(connection, request, &bytes, breaker)
    }

    /// Closes the idle connections, and those in use after their responses.
    pub fn close_idle(&self) {
        let closed = {
            let mut idle = self.shared.lock();
            idle.era += 1;
            std::mem::take(&mut idle.connections)
        };
        drop(closed);
    }

    fn take_idle(&self) -> Option<Connection> {
        let mut old = Vec::new();
        let mut idle = self.shared.lock();
        while let Some((mut connection, since)) = idle.connections.pop() {
            if since.elapsed() < MAX_IDLE_TIME && connection.reader.get_mut().socket().is_quiet() {
                return Some(connection);
            }
            old.push(connection);
        }
        drop(idle);
        None
    }

    fn open(&self, request: &Request<'_>, breaker: &Breaker) -> Result<Connection, DialError> {
        let era = self.shared.lock().era;
        let stream = self.shared.route.open(request.deadline, breaker, request.kind)?;
        Ok(Connection { reader: BufReader::with_capacity(BUFFER_BYTES, stream), era })
    }

    fn exchange(
        &self,
        mut connection: Connection,
        request: &Request<'_>,
        bytes: &[u8],
        breaker: &Breaker,
    ) -> Result<Response, DialError> {
        connection.reader.get_mut().socket().adopt(request.deadline, breaker, request.kind);
        let stream = connection.reader.get_mut();
        let sent = stream.write_all(bytes).and_then(|()| stream.flush());
        // A server may respond and close without reading the request: then the response counts.
        let outcome = head(&mut connection.reader);
        let (head, framing) = outcome.map_err(|error| match sent {
            Err(sent) => connection.failed(&sent, "write", breaker),
            Ok(()) => connection.failed(&error, "read", breaker),
        })?;
        if let Some(proxy) = self.shared.route.forwarder().filter(|_| head.status == 407) {
            let cause = DialError::Tunnel("407 Proxy Authentication Required".to_owned());
            return Err(DialError::Proxy { proxy: proxy.address(), cause: Box::new(cause) });
        }
        let body = Body {
            connection: Some(connection),
            framing,
            close: head.closes(),
            taken: 0,
            home: self.clone(),
            breaker: breaker.clone(),
        };
        let retry_after = head.fields.get("Retry-After").map(str::to_owned);
        Ok(Response { status: head.status, retry_after, body })
    }
}

/// Reads the head of a response, and determines where its body ends.
fn head(reader: &mut impl BufRead) -> io::Result<(ResponseHead, Framing)> {
    let head = ResponseHead::read(reader)?;
    let identity = |encoding: &str| encoding.eq_ignore_ascii_case("identity");
    if let Some(other) = head.fields.elements("Content-Encoding").find(|encoding| !identity(encoding)) {
        return Err(Malformed(format!("content encoding {other:?} was not requested")).into());
    }
    let framing = head.framing()?;
    Ok((head, framing))
}

impl Connection {
    /// Converts an error of reading or writing.
    fn failed(&mut self, error: &io::Error, op: &'static str, breaker: &Breaker) -> DialError {
        self.reader.get_mut().failed(error, op, breaker)
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self, request: &Request<'_>) -> Result<Vec<u8>, DialError> {
        let clean = |text: &str| text.bytes().all(|byte| byte >= b' ' && byte != 0x7f);
        if !request.path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(DialError::Request(format!("the path {:?} is not escaped", request.path)));
        }
        let forwarder = self.route.forwarder();
        let origin = forwarder.map(|_| format!("http://{}", self.authority)).unwrap_or_default();
        let Request { method, path, .. } = request;
        let mut text = format!("{method} {origin}{path} HTTP/1.1\r\nHost: {}\r\n", self.authority);
        if let Some(value) = forwarder.and_then(Proxy::authorization) {
            let _ = write!(text, "Proxy-Authorization: {value}\r\n");
        }
        for (name, value) in request.headers {
            if !clean(value) {
                // The value may be a secret.
                return Err(DialError::Request(format!("invalid header field value for {name:?}")));
            }
            let _ = write!(text, "{name}: {value}\r\n");
        }
        if let Some((kind, bytes)) = request.body {
            let _ = write!(text, "Content-Type: {kind}\r\nContent-Length: {}\r\n", bytes.len());
        }
        text.push_str("\r\n");
        let mut all = text.into_bytes();
        all.extend_from_slice(request.body.map_or(&[][..], |(_, bytes)| bytes));
        Ok(all)
    }
}

/// The body of a response, read in pieces. The connection is reused if it is read to its end.
pub struct Body {
    connection: Option<Connection>,
    framing: Framing,
    close: bool,
    /// The number of bytes that were read.
    taken: u64,
    home: Connections,
    breaker: Breaker,
}

impl Body {
    /// The number of bytes that were read so far.
    pub fn bytes(&self) -> u64 {
        self.taken
    }

    /// Sets the time limit for the rest; at first it is the request's deadline.
    pub fn set_deadline(&mut self, deadline: Instant) {
        if let Some(connection) = &mut self.connection {
            connection.reader.get_mut().socket().set_deadline(deadline);
        }
    }

    /// Why reading the body failed with `error`.
    pub fn failed(&mut self, error: &io::Error) -> DialError {
        match &mut self.connection {
            Some(connection) => match connection.failed(error, "read", &self.breaker) {
                DialError::Timeout => DialError::BodyTimeout,
                DialError::Eof => DialError::Body("unexpected EOF".to_owned()),
                DialError::Malformed(what) => DialError::Body(what),
                other => other,
            },
            None => DialError::Body(words(error)),
        }
    }

    /// Keeps the connection for the next request if this one is complete: its body has been read to
    /// the end and dropped.
    fn give_back(&mut self) {
        if !self.framing.is_done() {
            return;
        }
        let Some(mut connection) = self.connection.take() else { return };
        let unread = !connection.reader.buffer().is_empty();
        if self.close || unread || self.breaker.is_tripped() {
            return;
        }
        connection.reader.get_mut().socket().rest();
        let mut idle = self.home.shared.lock();
        let surplus = if connection.era != idle.era {
            Some(connection)
        } else {
            idle.connections.push((connection, Instant::now()));
            let old = idle.connections.first().is_some_and(|(_, since)| since.elapsed() >= MAX_IDLE_TIME);
            (old || idle.connections.len() > MAX_IDLE).then(|| idle.connections.remove(0).0)
        };
        drop(idle);
        drop(surplus);
    }
}

impl BufRead for Body {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        match &mut self.connection {
            Some(connection) => self.framing.fill(&mut connection.reader),
            None => Ok(&[]),
        }
    }

    fn consume(&mut self, count: usize) {
        self.taken = self.taken.saturating_add(count as u64);
        if let Some(connection) = &mut self.connection {
            self.framing.consume(&mut connection.reader, count);
        }
    }
}

impl Read for Body {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let there = self.fill_buf()?;
        let count = there.len().min(into.len());
        if let (Some(to), Some(from)) = (into.get_mut(..count), there.get(..count)) {
            to.copy_from_slice(from);
        }
        self.consume(count);
        Ok(count)
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        self.give_back();
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
