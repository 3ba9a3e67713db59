//! Also part of `tests/integration`.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// A port that refuses connections while the first value is kept. A port that is merely free may be
/// used by another test a moment later.
pub(crate) fn refusing() -> (TcpListener, u16) {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    // Bound, but not listening.
    let bound = TcpListener::from(socket);
    let port = bound.local_addr().unwrap().port();
    (bound, port)
}
