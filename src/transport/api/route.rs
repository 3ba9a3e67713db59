//! Connections to one server: look-up, TCP, a proxy if there is one, TLS.

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, StreamOwned};

use super::breaker::{Breaker, Use};
use super::socket::Socket;
use crate::transport::dial::lookup::lookup;
use crate::transport::dial::socket::Limit;
use crate::transport::dial::{DialError, join_host_port, words};
use crate::transport::proxy::tunnel::{self, TunnelError};
use crate::transport::proxy::{Proxy, ProxyScheme};
use crate::transport::tls::client::Tls;

/// The limit of look-up, connect and TLS handshake together.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// The same limit through a proxy, which needs additional time to connect to the server.
const PROXY_CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// How to connect to one server.
pub(in crate::transport) struct Route {
    host: String,
    port: u16,
    tls: Option<Tls>,
    hop: Option<Hop>,
    peer: &'static str,
}

struct Hop {
    proxy: Proxy,
    /// TLS to the proxy itself.
    tls: Option<Tls>,
}

impl Route {
    /// A direct route. `peer` is the name of the server in the thread table.
    pub(in crate::transport) fn direct(host: &str, port: u16, tls: Option<Tls>, peer: &'static str) -> Route {
        Route { host: host.to_owned(), port, tls, hop: None, peer }
    }

    /// A route through `proxy`, with `tls` to an https proxy.
    pub(in crate::transport) fn through(self, proxy: Proxy, tls: Option<Tls>) -> Route {
        Route { hop: Some(Hop { proxy, tls }), ..self }
    }

    /// The proxy that gets each request with the whole URL in it, without CONNECT: an HTTP proxy to
    /// a server without TLS (RFC 9112, section 3.2.2).
    pub(in crate::transport) fn forwarder(&self) -> Option<&Proxy> {
        let hop = self.hop.as_ref().filter(|_| self.tls.is_none())?;
        (hop.proxy.scheme != ProxyScheme::Socks5).then_some(&hop.proxy)
    }

    /// Opens a connection to the server. `deadline` also covers the requests on it.
    pub(in crate::transport) fn open(
        &self,
        deadline: Instant,
        breaker: &Breaker,
        kind: Use,
    ) -> Result<Stream, DialError> {
        let dial = |host: &str, port: u16, limit: Duration| {
            dial(host, port, (deadline, limit), breaker, kind, self.peer).map(Stream::Plain)
        };
        let mut stream = match &self.hop {
            None => dial(&self.host, self.port, CONNECT_LIMIT)?,
            Some(hop) => {
                let named = |cause: DialError| match cause {
                    DialError::Stopped => DialError::Stopped,
                    cause => DialError::Proxy { proxy: hop.proxy.address(), cause: Box::new(cause) },
                };
                let stream = dial(&hop.proxy.host, hop.proxy.port, PROXY_CONNECT_LIMIT).map_err(named)?;
                let mut stream = secure(stream, hop.tls.as_ref(), breaker).map_err(named)?;
                if self.forwarder().is_none() {
                    self.tunnel(&mut stream, &hop.proxy, breaker).map_err(named)?;
                }
                stream
            }
        };
        stream = secure(stream, self.tls.as_ref(), breaker)?;
        stream.socket().set_deadline(deadline);
        Ok(stream)
    }

    fn tunnel(&self, stream: &mut Stream, proxy: &Proxy, breaker: &Breaker) -> Result<(), DialError> {
        tunnel::open(stream, proxy, &self.host, self.port).map_err(|error| match error {
            TunnelError::Refused(why) => DialError::Tunnel(why),
            TunnelError::Io(error) => match stream.failed(&error, "read", breaker) {
                DialError::Stopped => DialError::Stopped,
                cause => {
                    let cause = match cause {
                        DialError::Timeout => "i/o timeout".to_owned(),
                        cause => cause.to_string(),
                    };
                    DialError::Tunnel(format!("CONNECT {}: {cause}", join_host_port(&self.host, self.port)))
                }
            },
        })
    }
}

/// Connects to the first address that accepts, within `limit` after the name was looked up.
fn dial(
    host: &str,
    port: u16,
    (deadline, limit): (Instant, Duration),
    breaker: &Breaker,
    kind: Use,
    peer: &'static str,
) -> Result<Socket, DialError> {
    let all = Limit { deadline: Some(deadline), stop: breaker.token().clone() };
    let addresses = match host.parse::<IpAddr>() {
        Ok(address) => vec![(address, port).into()],
        // A server that does not answer takes as long as it has in `resolv.conf`.
        Err(_) => lookup(host, port, &all)?,
    };
    let limit = all.within(limit);
    let deadline = limit.deadline.unwrap_or(deadline);
    let mut outcome = Err(DialError::Stopped);
    for (index, address) in addresses.iter().enumerate() {
        let share = limit.share(addresses.len() - index).deadline.unwrap_or(deadline);
        let attempt = Socket::connect(*address, share, breaker, kind, peer);
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
    Ok(socket)
}

/// Makes a TLS session over `stream`, if TLS is configured.
fn secure(mut stream: Stream, tls: Option<&Tls>, breaker: &Breaker) -> Result<Stream, DialError> {
    let Some(tls) = tls else { return Ok(stream) };
    let outcome = tls.handshake(&mut stream);
    let session = outcome.map_err(|error| match error {
        _ if breaker.is_tripped() => DialError::Stopped,
        _ if stream.socket().is_late() => DialError::Tls("handshake timeout".to_owned()),
        error => DialError::of_tls(&error),
    })?;
    Ok(Stream::Tls(Box::new(StreamOwned::new(session, stream))))
}

/// A connection: a socket, or TLS over a connection.
pub(in crate::transport) enum Stream {
    Plain(Socket),
    Tls(Box<StreamOwned<ClientConnection, Stream>>),
}

impl Stream {
    pub(in crate::transport) fn socket(&mut self) -> &mut Socket {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(stream) => stream.sock.socket(),
        }
    }

    /// Converts an error of reading or writing.
    pub(in crate::transport) fn failed(
        &mut self,
        error: &io::Error,
        op: &'static str,
        breaker: &Breaker,
    ) -> DialError {
        let secure = matches!(self, Stream::Tls(_));
        let socket = self.socket();
        match error {
            _ if breaker.is_tripped() => DialError::Stopped,
            _ if socket.is_late() => DialError::Timeout,
            error if error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) => {
                DialError::of_tls(error)
            }
            error if error.kind() == io::ErrorKind::InvalidData => DialError::Malformed(error.to_string()),
            error if error.kind() == io::ErrorKind::UnexpectedEof => DialError::Eof,
            error if secure && error.kind() == io::ErrorKind::ConnectionAborted => DialError::Eof,
            error => DialError::Broken { op, ends: socket.ends(), words: words(error) },
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
