//! Signals for commands that wait in a poll: each becomes a byte in a socket.

use std::io;
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use signal_hook::low_level::pipe;

/// Readable once the terminal has another size.
///
/// # Errors
/// When the kernel refuses.
pub fn window_changes() -> io::Result<UnixStream> {
    on(&[SIGWINCH])
}

/// Readable once the process is asked to end.
///
/// # Errors
/// When the kernel refuses.
pub fn endings() -> io::Result<UnixStream> {
    on(&[SIGINT, SIGTERM, SIGHUP])
}

fn on(signals: &[i32]) -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in signals {
        pipe::register(*signal, write.try_clone()?)?;
    }
    Ok(read)
}
