//! The listeners: bind, accept, cap the number of connections.

use std::io;
use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::util::backoff::Failures;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads::{self, Running};

use super::ServerError;
use super::client::Socket;
use super::connection;
use super::http::Gate;
use super::peer;

/// How long to wait before a taken port is tried again, as the Go kubelet does.
const REBIND: Duration = Duration::from_secs(5);

/// A pause after a failed accept (out of descriptors, mostly): long enough not to spin.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Connections that wait to be accepted, as std has it.
const BACKLOG: i32 = 128;

/// Who is listening.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listener {
    /// `/healthz` only.
    Healthz,
    /// `/pods`, `/runningpods`, `/healthz`.
    ReadOnly,
    /// The node API: TLS, and every caller is asked who it is.
    Main,
    /// The local API.
    Local,
}

impl Listener {
    pub(super) fn thread(self) -> &'static str {
        match self {
            Listener::Healthz => "lst/healthz",
            Listener::ReadOnly => "lst/readonly",
            Listener::Main => "lst/main",
            Listener::Local => "lst/local",
        }
    }

    /// Open connections at once; each costs two threads while it lasts.
    fn cap(self) -> usize {
        match self {
            Listener::Healthz => 8,
            Listener::ReadOnly => 16,
            // Only a last resort: its crowd has limits of its own, but a connection that was
            // sent away keeps its thread for the moment until it notices.
            Listener::Main => 512,
            // 16 streams, and room for short requests beside them.
            Listener::Local => 24,
        }
    }
}

/// A bound socket.
pub(super) enum Bound {
    Tcp(TcpListener),
    Unix(UnixListener),
    /// Not bound yet: the port is taken.
    Later(SocketAddr),
}

impl Bound {
    /// Binds a TCP port; `retry` turns a taken one into [`Bound::Later`].
    pub(super) fn tcp(what: &'static str, address: SocketAddr, retry: bool) -> Result<Self, ServerError> {
        match listen(address).and_then(|tcp| tcp.set_nonblocking(true).map(|()| tcp)) {
            Ok(tcp) => Ok(Bound::Tcp(tcp)),
            Err(why) if retry => {
                log::warn!("cannot listen on {address} ({what}), trying again every {REBIND:?}: {why}");
                Ok(Bound::Later(address))
            }
            Err(source) => Err(ServerError::Bind { what, address, source }),
        }
    }

    /// The address it really has.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self {
            Bound::Tcp(tcp) => tcp.local_addr().ok(),
            Bound::Unix(_) | Bound::Later(_) => None,
        }
    }

    /// Makes the local socket, mode 0600 from its first moment under its name. A stale one
    /// is replaced; one on which a process listens, another program's too, is an error.
    pub(super) fn local(path: &Path) -> Result<Self, ServerError> {
        match connect_local(path) {
            Ok(_) => return Err(ServerError::SocketInUse { path: path.to_owned() }),
            // Its queue is full, so there is a listener.
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => {
                return Err(ServerError::SocketInUse { path: path.to_owned() });
            }
            Err(_) => {}
        }
        let unix =
            bind_private(path).map_err(|source| ServerError::Socket { path: path.to_owned(), source })?;
        unix.set_nonblocking(true).map_err(|source| ServerError::Socket { path: path.to_owned(), source })?;
        Ok(Bound::Unix(unix))
    }
}

/// Binds a TCP port. All addresses are those of both families, as in Go, whether they are
/// written `0.0.0.0` or `::`, and whatever the machine's default is.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip().is_unspecified()
        && let Ok(both) = listen_on_both(address.port())
    {
        return Ok(both);
    }
    // Also where the kernel has one family only.
    TcpListener::bind(address)
}

fn listen_on_both(port: u16) -> io::Result<TcpListener> {
    let fd = rustix::net::socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_ipv6_v6only(&fd, false)?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    rustix::net::bind(&fd, &SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
    rustix::net::listen(&fd, BACKLOG)?;
    Ok(TcpListener::from(fd))
}

/// Binds under a passing name, closes it to others, then moves it to `path`.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let passing = beside(path, "new");
    remove(&passing)?;
    let unix = UnixListener::bind(&passing)?;
    std::fs::set_permissions(&passing, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&passing, path)?;
    Ok(unix)
}

/// The name of a file of the socket's own, hidden beside it: other agents' sockets may be there.
pub(super) fn beside(socket: &Path, what: &str) -> PathBuf {
    let name = socket.file_name().unwrap_or_default().to_string_lossy();
    socket.with_file_name(format!(".{name}.{what}"))
}

/// Binds the private socket under its own name, which tiny_http connects to when it ends.
/// A request on it that no listener announced is refused, whoever sends it.
pub(super) fn bind_inner(path: &Path) -> io::Result<UnixListener> {
    remove(path)?;
    let unix = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(unix)
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Connects to a Unix socket without ever blocking: a full queue is `WouldBlock`.
///
/// # Errors
/// As of connect(2): nobody listens, no such file, no permission.
pub fn connect_local(path: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &address)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// The body of a listener's thread.
pub(super) fn run(listener: Listener, mut bound: Bound, gate: &Gate, stop: &StopToken) {
    let mut open: Vec<Running> = Vec::new();
    let mut refused = Failures::default();
    while !stop.is_stopped() {
        let accepted = match &bound {
            Bound::Later(address) => {
                let address = *address;
                let _waiting = threads::waiting("the port");
                if stop.wait(REBIND) == Waited::Stopped {
                    break;
                }
                if let Ok(tcp) = listen(address)
                    && tcp.set_nonblocking(true).is_ok()
                {
                    log::info!("listening on {address} now");
                    bound = Bound::Tcp(tcp);
                }
                continue;
            }
            Bound::Tcp(tcp) => {
                if !wait_readable(tcp.as_fd(), gate) {
                    break;
                }
                tcp.accept().map(|(stream, _)| Socket::Tcp(Arc::new(stream)))
            }
            Bound::Unix(unix) => {
                if !wait_readable(unix.as_fd(), gate) {
                    break;
                }
                unix.accept().map(|(stream, _)| Socket::Unix(stream))
            }
        };
        match accepted {
            Ok(socket) => admit(listener, socket, gate, &mut open, &mut refused),
            Err(why)
                if matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {}
            Err(why) => {
                log::warn!("cannot accept a connection: {why}");
                if stop.wait(ACCEPT_PAUSE) == Waited::Stopped {
                    break;
                }
            }
        }
    }
    for connection in &mut open {
        connection.ask_to_stop();
    }
}

/// Waits for a connection; false when the server stops.
fn wait_readable(fd: BorrowedFd<'_>, gate: &Gate) -> bool {
    let _waiting = threads::waiting("connections");
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN), PollFd::new(&gate.wake, PollFlags::IN)];
    // An interrupted poll leads to an accept that says WouldBlock, and back here.
    let _ = poll(&mut fds, None);
    fds[1].revents().is_empty()
}

fn admit(
    listener: Listener,
    socket: Socket,
    gate: &Gate,
    open: &mut Vec<Running>,
    refused_before: &mut Failures,
) {
    open.retain(|connection| !connection.is_finished());
    if let Err(why) = socket.set_nonblocking() {
        log::debug!("dropping a connection: {why}");
        return;
    }
    if let Socket::Unix(stream) = &socket
        && let Err(refused) = peer::check(stream, gate.any_namespace)
    {
        if refused_before.count() {
            log::warn!("refused at the local socket ({refused_before} so far): {}", refused.why);
        }
        return connection::refuse(socket, 403, refused.answer);
    }
    let full = open.len() >= listener.cap();
    let place = match &socket {
        Socket::Tcp(stream) if listener == Listener::Main => {
            let peer = socket.peer().map(|peer| peer.ip());
            // Whoever enters may cost another one its place: not for nothing.
            let place = peer.filter(|_| !full).and_then(|ip| gate.crowd.enter(ip, stream, Instant::now()));
            // In TLS nothing can be said yet.
            let Some(place) = place else {
                log::debug!("a connection from {peer:?} finds no room");
                return;
            };
            Some(place)
        }
        _ if full => return connection::refuse(socket, 503, "too many connections\n"),
        _ => None,
    };
    match connection::spawn(listener, socket, place, gate) {
        Ok(running) => open.push(running),
        Err(why) => log::warn!("no thread for a connection: {why}"),
    }
}

/// Removes the local socket when its listener is gone.
pub(super) struct Unlink(pub PathBuf);

impl Drop for Unlink {
    fn drop(&mut self) {
        if let Err(why) = remove(&self.0) {
            log::debug!("cannot remove {}: {why}", self.0.display());
        }
    }
}
