//! Signals of the process: values on a channel for the agent, bytes on a socket for commands
//! that wait in `poll`.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGWINCH};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::pipe;

use super::threads::{self, OnDeath, Running, Stack};

/// The capacity for signals that wait; more of the same kind have no effect.
const QUEUE: usize = 8;

/// A signal that the agent handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGQUIT.
    DumpThreads,
}

/// The thread `signals`, which receives the agent's signals.
pub struct Listener {
    handle: Handle,
    thread: Running,
}

impl Listener {
    /// Starts the thread. Its channel disconnects when the thread has ended.
    ///
    /// # Errors
    /// When the handlers or the thread cannot be set up.
    pub fn start() -> io::Result<(Self, Receiver<Signal>)> {
        let mut incoming = Signals::new([SIGTERM, SIGINT, SIGQUIT])?;
        let handle = incoming.handle();
        let (sender, signals) = bounded(QUEUE);
        // The thread blocks in a read of a pipe; closing the handle wakes it.
        let thread = threads::spawn("signals", Stack::Small, OnDeath::Unsupervised, move |_| {
            let _waiting = threads::waiting("signal");
            for number in incoming.forever() {
                let signal = if number == SIGQUIT { Signal::DumpThreads } else { Signal::Stop };
                if sender.try_send(signal).is_err() {
                    log::warn!("signal {number} came too often and was dropped");
                }
            }
        })?;
        Ok((Listener { handle, thread }, signals))
    }

    /// Ends the thread.
    pub fn close(self) {
        self.handle.close();
        self.thread.stop(Duration::from_secs(1));
    }
}

/// A socket that becomes readable when the terminal's size changes.
///
/// # Errors
/// When the kernel returns an error.
pub fn window_changes() -> io::Result<UnixStream> {
    on(&[SIGWINCH])
}

/// A socket that becomes readable when the process receives SIGINT, SIGTERM or SIGHUP. Once
/// `default_action` is true, these signals end the process again. A SIGHUP that is ignored, as nohup does it,
/// stays so: the process outlives its terminal.
///
/// # Errors
/// When the kernel returns an error.
pub fn termination(default_action: &Arc<AtomicBool>) -> io::Result<UnixStream> {
    let mut signals = vec![SIGINT, SIGTERM];
    if !is_ignored(SIGHUP, &std::fs::read_to_string("/proc/self/status").unwrap_or_default()) {
        signals.push(SIGHUP);
    }
    for signal in &signals {
        flag::register_conditional_default(*signal, Arc::clone(default_action))?;
    }
    on(&signals)
}

/// Whether a process with this `/proc/PID/status` (proc(5)) ignores a signal.
fn is_ignored(signal: i32, status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    let bit = u32::try_from(signal).ok().and_then(|signal| signal.checked_sub(1));
    bit.and_then(|bit| mask.checked_shr(bit)).is_some_and(|rest| rest & 1 == 1)
}

fn on(signals: &[i32]) -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in signals {
        pipe::register(*signal, write.try_clone()?)?;
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_those_of_the_mask() {
        let status = "Name:\tcoracle\nSigBlk:\tffffffffffffffff\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(SIGHUP, status));
        assert!(!is_ignored(SIGINT, status) && !is_ignored(SIGTERM, status) && !is_ignored(0, status));
        assert!(!is_ignored(SIGHUP, "SigIgn:\t0000000000001000\n") && !is_ignored(SIGHUP, ""));
    }
}
