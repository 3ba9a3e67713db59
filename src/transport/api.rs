//! HTTP/1.1 connections to one API server: kept open between requests, broken off at once
//! by a [`Breaker`], closed when the peer is dead (Go: net/http's Transport as client-go
//! sets it up).
//!
//! Written here and not on the HTTP library: a watch must end within milliseconds when the
//! agent stops or gets a new certificate, half-open connections must be noticed, and a node
//! holds several answers open for years, so their buffers count.
//!
//! DIFFERS: HTTP/1.1 where upstream prefers HTTP/2: one connection per watch and per call
//! under way. Proxies of the environment are not used.

mod answer;
mod breaker;
mod socket;
mod tls;

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use breaker::{Breaker, Use};
pub use tls::{Identity, Roots, TlsSetupError};

use super::dial::lookup::lookup;
use super::dial::socket::Limit;
use super::dial::{join_host_port, words};
use answer::Framing;
use socket::Socket;
use tls::Tls;
pub(super) use tls::system_bundle;

pub use super::dial::DialError;

/// For look-up, connect and TLS handshake together.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Idle connections that are kept; a burst of pods may have opened more.
const MAX_IDLE: usize = 4;
/// API servers close what was idle for 90 s; we do it first, so that none is closed under
/// a request.
const MAX_IDLE_TIME: Duration = Duration::from_secs(60);
/// Per connection, for as long as it is open.
const BUFFER_BYTES: usize = 4 * 1024;

/// Where a server is, who it must be and who we are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// With or without TLS.
    pub https: bool,
    /// A name or an address, an IPv6 one without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Who vouches for the server.
    pub roots: Roots,
    /// The name in the server's certificate, where it is not the host.
    pub server_name: Option<String>,
    /// Our certificate.
    pub identity: Option<Identity>,
}

/// One request.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// GET, POST and so on.
    pub method: &'static str,
    /// Path and query, escaped.
    pub path: &'a str,
    /// Names and values.
    pub headers: &'a [(&'a str, &'a str)],
    /// Its type and its bytes.
    pub body: Option<(&'a str, &'a [u8])>,
    /// Until when the head of the answer must be there. The body's reader has
    /// [`Body::set_deadline`].
    pub deadline: Instant,
    /// Whether the answer goes on for minutes.
    pub kind: Use,
}

/// An answer of whatever status.
pub struct Response {
    /// The HTTP status code.
    pub status: u16,
    /// The header of this name.
    pub retry_after: Option<String>,
    /// What follows.
    pub body: Body,
}

/// Connections to one server. Clones share them.
#[derive(Clone)]
pub struct Connections {
    shared: Arc<Shared>,
}

struct Shared {
    host: String,
    port: u16,
    authority: String,
    tls: Option<Tls>,
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    connections: Vec<(Connection, Instant)>,
    /// Counts the orders to close all: who was in use then is not kept, either.
    era: u64,
}

struct Connection {
    reader: BufReader<Stream>,
    era: u64,
}

enum Stream {
    Plain(Socket),
    Tls(Box<rustls::StreamOwned<rustls::ClientConnection, Socket>>),
}

impl Stream {
    fn socket(&mut self) -> &mut Socket {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(stream) => &mut stream.sock,
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.read(into),
            Stream::Tls(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.write(bytes),
            Stream::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(socket) => socket.flush(),
            Stream::Tls(stream) => stream.flush(),
        }
    }
}

impl Connections {
    /// Nothing is opened yet.
    ///
    /// # Errors
    /// When certificates or keys cannot be used.
    pub fn new(endpoint: &Endpoint) -> Result<Connections, TlsSetupError> {
        let Endpoint { https, host, port, roots, server_name, identity } = endpoint;
        let tls = match https {
            false => None,
            true => Some(Tls::new(roots, identity.as_ref(), server_name.as_ref().unwrap_or(host))?),
        };
        let authority = join_host_port(host, *port);
        let shared = Shared { host: host.clone(), port: *port, authority, tls, idle: Mutex::default() };
        Ok(Connections { shared: Arc::new(shared) })
    }

    /// Sends a request and reads the head of its answer.
    ///
    /// # Errors
    /// When there is no answer in time, or the breaker was tripped.
    pub fn send(&self, request: &Request<'_>, breaker: &Breaker) -> Result<Response, DialError> {
        let bytes = self.shared.bytes(request)?;
        // Nothing goes out twice but what changes nothing: a kept connection may have been
        // closed by the server in this moment.
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

    /// Closes the idle connections, and those in use after their answers.
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
        let shared = &self.shared;
        let era = shared.lock().era;
        let deadline = request.deadline.min(Instant::now() + CONNECT_LIMIT);
        let limit = Limit { deadline: Some(deadline), stop: breaker.token().clone() };
        let addresses = match shared.host.parse::<IpAddr>() {
            Ok(address) => vec![(address, shared.port).into()],
            Err(_) => lookup(&shared.host, shared.port, &limit)?,
        };
        let mut outcome = Err(DialError::Stopped);
        for (index, address) in addresses.iter().enumerate() {
            let share = limit.share(addresses.len() - index).deadline.unwrap_or(deadline);
            let attempt = Socket::connect(*address, share, breaker, request.kind);
            let first = index == 0;
            match attempt {
                Err(DialError::Stopped) => return Err(DialError::Stopped),
                Err(_) if !first => {}
                attempt => outcome = attempt,
            }
            if outcome.is_ok() {
                break;
            }
        }
        let mut socket = outcome?;
        socket.set_deadline(deadline);
        let stream = match &shared.tls {
            None => Stream::Plain(socket),
            Some(tls) => match tls.wrap(socket) {
                Ok(stream) => Stream::Tls(Box::new(stream)),
                Err(_) if breaker.is_tripped() => return Err(DialError::Stopped),
                Err((_, socket)) if socket.is_late() => {
                    return Err(DialError::Tls("handshake timeout".to_owned()));
                }
                Err((error, _)) => return Err(tls::explain(&error)),
            },
        };
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, stream);
        reader.get_mut().socket().set_deadline(request.deadline);
        Ok(Connection { reader, era })
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
        // A server may answer and close without reading: then the answer counts.
        let head = answer::head(&mut connection.reader).map_err(|error| match sent {
            Err(sent) => connection.failed(&sent, "write", breaker),
            Ok(()) => connection.failed(&error, "read", breaker),
        })?;
        let body = Body {
            connection: Some(connection),
            framing: head.framing,
            close: head.close,
            taken: 0,
            home: self.clone(),
            breaker: breaker.clone(),
        };
        Ok(Response { status: head.status, retry_after: head.retry_after, body })
    }
}

impl Connection {
    /// Why reading or writing did not work.
    fn failed(&mut self, error: &io::Error, op: &'static str, breaker: &Breaker) -> DialError {
        let stream = self.reader.get_mut();
        let secure = matches!(stream, Stream::Tls(_));
        let socket = stream.socket();
        match error {
            _ if breaker.is_tripped() => DialError::Stopped,
            _ if socket.is_late() => DialError::Timeout,
            error if error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) => tls::explain(error),
            error if error.kind() == io::ErrorKind::InvalidData => DialError::Malformed(error.to_string()),
            error if error.kind() == io::ErrorKind::UnexpectedEof => DialError::Eof,
            error if secure && error.kind() == io::ErrorKind::ConnectionAborted => DialError::Eof,
            error => DialError::Broken { op, ends: socket.ends(), words: words(error) },
        }
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
        let mut text =
            format!("{} {} HTTP/1.1\r\nHost: {}\r\n", request.method, request.path, self.authority);
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

/// The body of an answer, read as it comes. The connection is kept if it is read to its end.
pub struct Body {
    connection: Option<Connection>,
    framing: Framing,
    close: bool,
    /// Bytes that were read of it.
    taken: u64,
    home: Connections,
    breaker: Breaker,
}

impl Body {
    /// How many bytes were read so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.taken
    }

    /// Until when the rest must be there; at first the request's deadline.
    pub fn set_deadline(&mut self, deadline: Instant) {
        if let Some(connection) = &mut self.connection {
            connection.reader.get_mut().socket().set_deadline(deadline);
        }
    }

    /// Why reading it failed with `error`.
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

    /// Keeps the connection for the next request if this one is through, which is when the
    /// body has been read to its end and dropped.
    fn give_back(&mut self) {
        if self.framing != Framing::Done {
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

    /// The next line that is not empty, without its end; `None` at the end of the body. A
    /// last line without an end is cut off and an error.
    ///
    /// # Errors
    /// When the body breaks off, a line is too long, or the deadline is over.
    pub fn next_line(&mut self) -> Result<Option<&[u8]>, DialError> {
        // A large object must not occupy its room for ever.
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
