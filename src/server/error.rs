//! Why the server could not start.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServerError {
    /// Another agent has this root directory.
    #[error("another agent already runs here: it has {}", path.display())]
    AlreadyRunning { path: PathBuf },
    /// Another agent, or another program, listens on the local socket.
    #[error("another process answers at {}; --local-socket gives this agent another socket", path.display())]
    SocketInUse { path: PathBuf },
    /// The root directory or the local socket could not be locked for this process.
    #[error("cannot lock {}", path.display())]
    InstanceLock { path: PathBuf, source: std::io::Error },
    /// The local socket could not be made.
    #[error("cannot listen on the socket {}", path.display())]
    Socket { path: PathBuf, source: std::io::Error },
    /// A TCP port could not be bound.
    #[error("cannot listen on {address} ({what})")]
    Bind { what: &'static str, address: SocketAddr, source: std::io::Error },
    /// The kernel refused the thread or a descriptor that it needs.
    #[error("cannot start the server's thread listen")]
    Thread { source: std::io::Error },
}
