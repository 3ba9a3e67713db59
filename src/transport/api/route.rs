//! Connections to one server: look-up, TCP, a proxy if there is one, TLS.

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustls::{ClientConnection, StreamOwned};
use ureq::http::Uri;
use ureq::http::uri::Scheme;

use super::call::Call;
use super::socket::Socket;
use crate::transport::dial::error::HANDSHAKE_TIMEOUT;
use crate::transport::dial::lookup::{LOOKUP_LIMIT, lookup};
use crate::transport::dial::socket::Limit;
use crate::transport::dial::{DialError, go_message, join_host_port};
use crate::transport::proxy::tunnel::{self, TunnelError};
use crate::transport::proxy::{Environment, Proxy, ProxyScheme};
use crate::transport::tls::client::Tls;
use crate::transport::tls::{Identity, Roots, TlsSetupError};

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

/// The limit of a connect, and then of each pause in the TLS handshake (Go: client-go/transport/cache.go,
/// 30 s for the connect and 10 s for the handshake).
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// The limit of a TLS handshake whose bytes arrive slowly. DIFFERS: upstream's handshake ends after 10 s also
/// then, and begins again from the start.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);
/// The limit of connect and all handshakes through a proxy, which needs additional time to connect to the
/// server.
const PROXY_CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// How to connect to the server of a URL.
pub(in crate::transport) struct Routes {
    /// The server that gets our certificate.
    certificate_server: Option<CertificateServer>,
    roots: Roots,
    proxies: Proxies,
    /// Sessions with other servers, created for the first one.
    others: OnceLock<Tls>,
    /// Sessions with https proxies, which do not get our certificate.
    proxy_tls: OnceLock<Tls>,
    /// The name of the server in the thread table.
    peer: &'static str,
}

struct CertificateServer {
    /// The host in URLs.
    name: String,
    /// The host to connect to; may have an IPv6 zone.
    host: String,
    port: u16,
    tls: Option<Tls>,
}

enum Proxies {
    /// One for all URLs, or none.
    Fixed(Option<Proxy>),
    Environment(Environment),
}

impl Routes {
    /// Routes to an API server, and to where it redirects.
    pub(super) fn to(endpoint: &Endpoint) -> Result<Routes, TlsSetupError> {
        let Endpoint { https, host, port, roots, server_name, identity, proxy } = endpoint;
        let tls = match https {
            false => None,
            true => Some(Tls::new(roots, identity.as_ref(), server_name.as_ref().unwrap_or(host))?),
        };
        let (name, _zone) = host.split_once('%').unwrap_or((host, ""));
        let certificate_server =
            CertificateServer { name: name.to_owned(), host: host.clone(), port: *port, tls };
        let mut routes = Routes::new(roots.clone(), Proxies::Fixed(proxy.clone()), "the API server");
        routes.certificate_server = Some(certificate_server);
        Ok(routes)
    }

    /// Routes to any server, without a certificate of ours.
    pub(in crate::transport) fn to_any_server(
        roots: Roots,
        environment: Environment,
        peer: &'static str,
    ) -> Routes {
        Routes::new(roots, Proxies::Environment(environment), peer)
    }

    fn new(roots: Roots, proxies: Proxies, peer: &'static str) -> Routes {
        let (others, proxy_tls) = (OnceLock::new(), OnceLock::new());
        Routes { certificate_server: None, roots, proxies, others, proxy_tls, peer }
    }

    /// The route to the server of an absolute URL.
    pub(super) fn route(&self, uri: &Uri) -> Result<Route, TlsSetupError> {
        let https = uri.scheme() == Some(&Scheme::HTTPS);
        let name = uri.host().unwrap_or_default();
        let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        let port = uri.port_u16().unwrap_or(if https { 443 } else { 80 });
        let is_certificate_server = |server: &&CertificateServer| {
            (server.name.as_str(), server.port, server.tls.is_some()) == (name, port, https)
        };
        let (host, tls) = match self.certificate_server.as_ref().filter(is_certificate_server) {
            Some(server) => (server.host.as_str(), server.tls.clone()),
            None if https => (name, Some(session(&self.others, || self.roots.clone(), name)?)),
            None => (name, None),
        };
        let proxy = match &self.proxies {
            Proxies::Fixed(proxy) => proxy.as_ref(),
            Proxies::Environment(environment) => environment.proxy_for(https, name, port),
        };
        let hop = match proxy {
            None => None,
            Some(proxy) => {
                let tls = match proxy.scheme {
                    ProxyScheme::Https => {
                        Some(session(&self.proxy_tls, || self.roots.of_proxy(), &proxy.host)?)
                    }
                    ProxyScheme::Http | ProxyScheme::Socks5 => None,
                };
                Some(Hop { proxy: proxy.clone(), tls })
            }
        };
        Ok(Route { host: host.to_owned(), port, tls, hop, peer: self.peer })
    }
}

/// Sessions with `host`, with settings that are created once.
fn session(
    settings: &OnceLock<Tls>,
    roots: impl FnOnce() -> Roots,
    host: &str,
) -> Result<Tls, TlsSetupError> {
    match settings.get() {
        Some(tls) => tls.to(host),
        None => {
            let first = Tls::new(&roots(), None, host)?;
            settings.get_or_init(|| first).to(host)
        }
    }
}

/// How to connect to one server.
pub(super) struct Route {
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
    /// Whether there is TLS to the server.
    pub(super) fn is_secure(&self) -> bool {
        self.tls.is_some()
    }

    /// The proxy that gets each request with the whole URL in it, without CONNECT: an HTTP proxy to
    /// a server without TLS (RFC 9112, section 3.2.2).
    pub(super) fn forwarder(&self) -> Option<&Proxy> {
        let hop = self.hop.as_ref().filter(|_| self.tls.is_none())?;
        (hop.proxy.scheme != ProxyScheme::Socks5).then_some(&hop.proxy)
    }

    /// Opens a connection to the server for `call`.
    pub(super) fn open(&self, call: &Arc<Call>) -> Result<Stream, DialError> {
        let dial = |host: &str, port: u16, limit: Duration| {
            dial(host, port, limit, call, self.peer).map(Stream::Plain)
        };
        let mut stream = match &self.hop {
            None => {
                let mut stream = dial(&self.host, self.port, CONNECT_LIMIT)?;
                stream.socket().limit_pauses(CONNECT_LIMIT, Instant::now() + HANDSHAKE_LIMIT);
                stream
            }
            Some(hop) => {
                let named = |cause: DialError| match cause {
                    DialError::Stopped => DialError::Stopped,
                    cause => DialError::Proxy { proxy: hop.proxy.address(), cause: Box::new(cause) },
                };
                let stream = dial(&hop.proxy.host, hop.proxy.port, PROXY_CONNECT_LIMIT).map_err(named)?;
                let mut stream = secure(stream, hop.tls.as_ref()).map_err(named)?;
                if self.forwarder().is_none() {
                    self.tunnel(&mut stream, &hop.proxy).map_err(named)?;
                }
                stream
            }
        };
        stream = secure(stream, self.tls.as_ref())?;
        stream.socket().set_limit(None);
        Ok(stream)
    }

    fn tunnel(&self, stream: &mut Stream, proxy: &Proxy) -> Result<(), DialError> {
        tunnel::open(stream, proxy, &self.host, self.port).map_err(|error| match error {
            TunnelError::Refused(reason) => DialError::Tunnel(reason),
            TunnelError::Io(error) => match stream.failed(&error, "read") {
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
    limit: Duration,
    call: &Arc<Call>,
    peer: &'static str,
) -> Result<Socket, DialError> {
    let deadline = call.deadline();
    let all = Limit { deadline: Some(deadline), stop: call.breaker.token().clone() };
    let addresses = match host.parse::<IpAddr>() {
        Ok(address) => vec![(address, port).into()],
        // A server that does not answer takes as long as it has in `resolv.conf`.
        Err(_) => {
            // The signal beside the breaker does not end a look-up.
            let most = call.breaker.interval().map_or(LOOKUP_LIMIT, |_| CONNECT_LIMIT);
            lookup(host, port, &all.within(most))?
        }
    };
    let limit = all.within(limit);
    let deadline = limit.deadline.unwrap_or(deadline);
    let mut outcome = Err(DialError::Stopped);
    for (index, address) in addresses.iter().enumerate() {
        let share = limit.share(addresses.len() - index).deadline.unwrap_or(deadline);
        let attempt = Socket::connect(*address, share, call, peer);
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
    socket.set_limit(Some(deadline));
    Ok(socket)
}

/// Makes a TLS session over `stream`, if TLS is configured.
fn secure(mut stream: Stream, tls: Option<&Tls>) -> Result<Stream, DialError> {
    let Some(tls) = tls else { return Ok(stream) };
    let outcome = tls.handshake(&mut stream);
    let session = outcome.map_err(|error| match error {
        _ if stream.socket().is_stopped() => DialError::Stopped,
        _ if stream.socket().is_late() => DialError::Tls(HANDSHAKE_TIMEOUT.to_owned()),
        error => DialError::of_tls(&error),
    })?;
    Ok(Stream::Tls(Box::new(StreamOwned::new(session, stream))))
}

/// A connection: a socket, or TLS over a connection.
pub(super) enum Stream {
    Plain(Socket),
    Tls(Box<StreamOwned<ClientConnection, Stream>>),
}

impl Stream {
    pub(super) fn socket(&mut self) -> &mut Socket {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(stream) => stream.sock.socket(),
        }
    }
}

/// A stream of bytes to a server.
pub(super) trait Wire: Read + Write + Send + Sync + 'static {
    /// Belongs to `call` from now on.
    fn begin_call(&mut self, call: &Arc<Call>);

    /// Waits until there is something to read.
    fn wait(&mut self) -> io::Result<()>;

    /// Sends nothing any more after a write failed: a TLS session would try it again before each read.
    fn end_sending(&mut self);

    /// Whether the peer has neither closed it nor sent data: only then may it be used again.
    fn is_quiet(&mut self) -> bool;

    /// Converts an error of reading or writing.
    fn failed(&mut self, error: &io::Error, op: &'static str) -> DialError;
}

impl Wire for Stream {
    fn begin_call(&mut self, call: &Arc<Call>) {
        self.socket().begin_call(call);
    }

    fn wait(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(socket) => socket.ready(PollFlags::IN),
            Stream::Tls(stream) if stream.conn.wants_read() => stream.sock.wait(),
            // The session has data.
            Stream::Tls(_) => Ok(()),
        }
    }

    fn end_sending(&mut self) {
        self.socket().end_sending();
    }

    fn is_quiet(&mut self) -> bool {
        match self {
            Stream::Plain(socket) => socket.is_quiet(),
            // Received data that is not read yet, and the end of the session, are in the TLS library.
            Stream::Tls(stream) => stream.conn.wants_read() && stream.sock.is_quiet(),
        }
    }

    fn failed(&mut self, error: &io::Error, op: &'static str) -> DialError {
        let secure = matches!(self, Stream::Tls(_));
        let socket = self.socket();
        match error {
            _ if socket.is_stopped() => DialError::Stopped,
            _ if socket.is_late() => DialError::Timeout,
            error if error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) => {
                DialError::of_tls(error)
            }
            error if error.kind() == io::ErrorKind::InvalidData => DialError::Malformed(error.to_string()),
            error if error.kind() == io::ErrorKind::UnexpectedEof => DialError::Eof,
            error if secure && error.kind() == io::ErrorKind::ConnectionAborted => DialError::Eof,
            error => DialError::Broken { op, ends: socket.ends(), message: go_message(error) },
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
