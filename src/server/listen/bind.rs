//! Listening sockets: TCP ports and the local socket.

use std::io;
use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::server::error::ServerError;
use crate::server::http::connection::Socket;
use crate::util::disk_writes;
use crate::util::stop::StopToken;

/// Connections that wait to be accepted, as in std.
const BACKLOG: i32 = 128;

/// How long the local socket of an agent that was killed may be open. A program that the agent had
/// just started has a copy of the socket until its `exec`, which a busy machine delays. Another agent
/// is found before, by its lock.
const LINGER: Duration = Duration::from_secs(10);
/// The wait for the socket that is not logged: most programs reach their `exec` in this time.
const SILENT: Duration = Duration::from_secs(1);
/// Between two attempts to find the socket closed.
const PAUSE: Duration = Duration::from_millis(50);

/// A listening socket, which does not block.
pub(crate) enum Bound {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl AsFd for Bound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Bound::Tcp(tcp) => tcp.as_fd(),
            Bound::Unix(unix) => unix.as_fd(),
        }
    }
}

impl Bound {
    pub(crate) fn tcp(address: SocketAddr) -> io::Result<Self> {
        let tcp = listen(address)?;
        tcp.set_nonblocking(true)?;
        Ok(Bound::Tcp(tcp))
    }

    /// `None`: not a TCP port.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match self {
            Bound::Tcp(tcp) => tcp.local_addr().ok(),
            Bound::Unix(_) => None,
        }
    }

    pub(crate) fn accept(&self) -> io::Result<Socket> {
        match self {
            Bound::Tcp(tcp) => tcp.accept().map(|(stream, _)| Socket::Tcp(Arc::new(stream))),
            Bound::Unix(unix) => unix.accept().map(|(stream, _)| Socket::Unix(stream)),
        }
    }

    /// Makes the local socket with mode 0600. Replaces a stale socket; a socket on which a process
    /// listens for longer than [`LINGER`] is an error.
    pub(crate) fn local(path: &Path) -> Result<Self, ServerError> {
        Bound::local_within(path, LINGER)
    }

    fn local_within(path: &Path, limit: Duration) -> Result<Self, ServerError> {
        let (begun, mut is_logged) = (Instant::now(), false);
        while is_in_use(path) {
            let waited = begun.elapsed();
            if waited >= limit {
                return Err(ServerError::SocketInUse { path: path.to_owned() });
            }
            if waited >= SILENT && !is_logged {
                log::warn!(
                    "another process listens on {}; waiting up to {limit:?} for its end",
                    path.display()
                );
                is_logged = true;
            }
            let _ = StopToken::never().wait(PAUSE);
        }
        let failed = |source| ServerError::Socket { path: path.to_owned(), source };
        let unix = bind_private(path).map_err(failed)?;
        unix.set_nonblocking(true).map_err(failed)?;
        Ok(Bound::Unix(unix))
    }
}

/// Binds a TCP port. An unspecified address means both families, as in Go, whether it is written
/// `0.0.0.0` or `::`, and whatever the machine's default is.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip().is_unspecified()
        && let Ok(both) = listen_on_both(address.port())
    {
        return Ok(both);
    }
    // This also works on a kernel with one family.
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

/// Whether a process listens, perhaps with a full queue.
fn is_in_use(path: &Path) -> bool {
    match connect_local(path) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// Binds under a temporary name, sets the mode, then renames it to `path`.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // The directory may have the sockets of other agents.
    let temporary = path.with_file_name(format!(".{name}.new"));
    remove(&temporary)?;
    let unix = disk_writes::created(UnixListener::bind(&temporary))?;
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&temporary, path)?;
    Ok(unix)
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Connects to a Unix socket without blocking: a full queue is `WouldBlock`.
///
/// # Errors
/// As of connect(2): no listener, no such file, no permission.
pub(crate) fn connect_local(path: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &address)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Removes the local socket when it is dropped.
pub(crate) struct Unlink(pub PathBuf);

impl Drop for Unlink {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            log::debug!("cannot remove {}: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{self, OnDeath, Stack};
    use std::net::TcpStream;

    #[test]
    fn each_unspecified_address_listens_on_both_families() {
        for address in ["0.0.0.0:0", "[::]:0"] {
            let bound = Bound::tcp(address.parse().unwrap()).unwrap();
            let port = bound.address().unwrap().port();
            // The machine may have no IPv6.
            let v6 =
                std::net::UdpSocket::bind("[::1]:0").is_err() || TcpStream::connect(("::1", port)).is_ok();
            assert!(v6 && TcpStream::connect(("127.0.0.1", port)).is_ok(), "{address}");
        }
    }

    #[test]
    fn socket_that_a_killed_agent_left_open_is_replaced_when_it_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("coracle.sock");
        let old_listener = UnixListener::bind(&path).unwrap();
        let closing = threads::spawn("closing", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let _ = stop.wait(PAUSE * 2);
            drop(old_listener);
        });
        assert!(Bound::local_within(&path, Duration::from_secs(60)).is_ok());
        drop(closing);
    }

    #[test]
    fn socket_in_use_is_an_error_and_a_stale_one_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("coracle.sock");
        let _bound = Bound::local(&path).unwrap();
        let used = Bound::local_within(&path, PAUSE);
        assert!(matches!(used, Err(ServerError::SocketInUse { .. })));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let stale = dir.path().join("stale.sock");
        drop(UnixListener::bind(&stale).unwrap());
        assert!(stale.exists());
        let _bound = Bound::local(&stale).unwrap();
        assert!(connect_local(&stale).is_ok());
    }
}
