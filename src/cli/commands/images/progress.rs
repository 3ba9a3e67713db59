//! One line on a terminal that shows how far a command is. Without a terminal nothing is printed.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::cli::commands::console::size;
use crate::cli::table::visible;

/// The least time between two lines.
const PERIOD: Duration = Duration::from_millis(100);

/// The widest line: a terminal with fewer columns would break it.
const COLUMNS: usize = 78;

pub(super) struct Progress {
    shown: Option<Instant>,
    is_terminal: bool,
}

impl Progress {
    pub(super) fn new() -> Progress {
        Progress { shown: None, is_terminal: std::io::stderr().is_terminal() }
    }

    /// Shows a part of a whole.
    pub(super) fn bytes(&mut self, name: &str, done: u64, all: u64) {
        if self.is_due() {
            self.put(&line(name, done, all));
        }
    }

    pub(super) fn text(&mut self, text: &str) {
        if self.is_due() {
            self.put(&visible(text));
        }
    }

    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = self.is_terminal && self.shown.is_none_or(|shown| now.duration_since(shown) >= PERIOD);
        if due {
            self.shown = Some(now);
        }
        due
    }

    fn put(&self, text: &str) {
        let text: String = text.chars().take(COLUMNS).collect();
        // If stderr is closed, there is nothing to show.
        let _ = write!(std::io::stderr().lock(), "\r\x1b[K{text}");
    }

    /// Removes the line.
    pub(super) fn clear(&mut self) {
        if self.shown.take().is_some() {
            self.put("");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// `name  [#####     ]  50%  1.0 MiB of 2.0 MiB`.
fn line(name: &str, done: u64, all: u64) -> String {
    const WIDTH: u64 = 20;
    let part = |parts: u64| {
        let part = u128::from(done).saturating_mul(u128::from(parts)) / u128::from(all.max(1));
        usize::try_from(part).unwrap_or(0)
    };
    let bar = "#".repeat(part(WIDTH).min(20));
    let name: String = visible(name).chars().take(24).collect();
    format!("{name}  [{bar:<20}] {:>3}%  {} of {}", part(100), size(done), size(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_shows_part_and_sizes() {
        assert_eq!(line("a.tar", 0, 0), "a.tar  [                    ]   0%  0 B of 0 B");
        assert_eq!(line("a.tar", 512, 1024), "a.tar  [##########          ]  50%  512 B of 1.0 KiB");
        assert!(line("a\u{1b}", u64::MAX, u64::MAX).contains("[####################] 100%"));
    }
}
