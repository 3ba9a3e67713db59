//! Signals for commands that wait in a poll: each becomes a byte in a socket.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use signal_hook::flag;
use signal_hook::low_level::pipe;

/// Readable once the terminal has another size.
///
/// # Errors
/// When the kernel refuses.
pub fn window_changes() -> io::Result<UnixStream> {
    on(&[SIGWINCH])
}

/// Readable once the process is asked to end. When `unheard` has become true, and nobody looks
/// here any more, the signals end the process by themselves again.
///
/// # Errors
/// When the kernel refuses.
pub fn endings(unheard: &Arc<AtomicBool>) -> io::Result<UnixStream> {
    let signals = [SIGINT, SIGTERM, SIGHUP];
    for signal in signals {
        flag::register_conditional_default(signal, Arc::clone(unheard))?;
    }
    on(&signals)
}

fn on(signals: &[i32]) -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in signals {
        pipe::register(*signal, write.try_clone()?)?;
    }
    Ok(read)
}
