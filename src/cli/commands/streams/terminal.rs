//! The terminal of an interactive command.

use std::io::{self, Stdin};

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

/// A terminal in raw mode; dropping this restores its mode.
pub(super) struct RawTerminal {
    stdin: Stdin,
    original: Termios,
}

impl RawTerminal {
    pub(super) fn new() -> io::Result<RawTerminal> {
        let stdin = io::stdin();
        let original = tcgetattr(&stdin)?;
        let mut raw = original.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(RawTerminal { stdin, original })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // `tcsetattr` fails if the terminal is closed.
        let _ = tcsetattr(&self.stdin, OptionalActions::Now, &self.original);
    }
}

/// Whether the input is a terminal.
pub(super) fn is_input() -> bool {
    isatty(io::stdin())
}

/// The size of the terminal, as the runtime reads it.
pub(super) fn size() -> Option<String> {
    let size = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin())).ok()?;
    (size.ws_col > 0).then(|| format!("{{\"Width\":{},\"Height\":{}}}\n", size.ws_col, size.ws_row))
}
