//! What tests of several rooms need, and what looks easier than it is.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::child::{self, Limits};
use super::stop::StopToken;

/// Writes a program. By another process: a child that some other test has just forked holds for
/// a moment whatever this process has open, and what is open for writing cannot be run
/// ("text file busy").
pub(crate) fn program(path: &Path, text: &str) {
    let mut writer = Command::new("/bin/sh");
    writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path);
    let limits = Limits { time: Duration::from_secs(60), output_bytes: 10_000 };
    let written = child::run(&mut writer, text.as_bytes(), limits, &StopToken::never()).unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
}

/// A port that refuses connections for as long as the first one is kept. One that is merely free
/// is another test's a moment later.
pub(crate) fn refusing() -> (TcpListener, u16) {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    // Bound, but nobody listens.
    let bound = TcpListener::from(socket);
    let port = bound.local_addr().unwrap().port();
    (bound, port)
}
