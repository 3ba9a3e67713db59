//! What a test prints.

use std::io::Write as _;

/// Prints a line also when the test passes: the test harness hides the output of the macros.
pub(crate) fn print_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
