//! Helpers for tests of several rooms.

mod refusing;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::child::{self, Limits};
use super::stop::StopToken;
use super::threads::{OnDeath, Stack, spawn};
pub(crate) use refusing::refusing;

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

/// Makes a pipe with a name.
pub(crate) fn fifo(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
}

/// Runs `body` on a thread of its own: what blocks fails the test instead of hanging it.
pub(crate) fn unblocked<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, done) = crossbeam_channel::bounded(1);
    let _running = spawn("t/unblocked", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = send.send(body());
    });
    done.recv_timeout(Duration::from_secs(60)).expect("the call ends")
}
