//! Helpers for tests of several rooms.

mod refusing;
mod tables;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crossbeam_channel::Receiver;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::child::{self, Limits};
use super::stop::StopToken;
use super::threads::{OnDeath, Running, Stack, spawn};
pub(crate) use refusing::refusing;
pub(crate) use tables::{Table, table, table_of_policies};

/// Writes a program, by another process: a child process that another test has just forked shortly
/// holds all open files of this process, and a file that is open for writing cannot be executed
/// ("text file busy").
pub(crate) fn program(path: &Path, text: &str) {
    let mut writer = Command::new("/bin/sh");
    writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path);
    let limits = Limits { time: Duration::from_secs(60), output_bytes: 10_000 };
    let written = child::run(&mut writer, text.as_bytes(), limits, &StopToken::never()).unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
}

/// Compresses in one zstd frame.
pub(crate) fn zstd(data: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(data, ruzstd::encoding::CompressionLevel::Fastest)
}

pub(crate) fn fifo(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
}

/// Runs `body` on its own thread: a blocked call fails the test and does not block it.
pub(crate) fn unblocked<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    in_background(body).result()
}

/// Runs `body` on a thread that the permissions of files hold for, also if its user is root.
pub(crate) fn without_access<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    unblocked(|| {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH);
        set_capabilities(None, sets).unwrap();
        body()
    })
}

/// A call on its own thread.
pub(crate) struct BackgroundCall<T> {
    done: Receiver<T>,
    _running: Running,
}

impl<T> BackgroundCall<T> {
    /// Waits for the result.
    pub(crate) fn result(self) -> T {
        self.done.recv_timeout(Duration::from_secs(60)).expect("the call ends")
    }
}

/// Starts `body` on its own thread.
pub(crate) fn in_background<T: Send + 'static>(
    body: impl FnOnce() -> T + Send + 'static,
) -> BackgroundCall<T> {
    let (send, done) = crossbeam_channel::bounded(1);
    let running = spawn("t/in_background", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = send.send(body());
    });
    BackgroundCall { done, _running: running.expect("a thread is started") }
}
