//! What tests of several rooms need, and what looks easier than it is.

mod refusing;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::child::{self, Limits};
use super::stop::StopToken;
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
