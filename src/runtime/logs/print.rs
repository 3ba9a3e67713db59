//! Selects and writes log lines: by time, by stream, with or without the timestamp, within a limit.

use std::io::Write;

use super::LogError;
use super::read::ReadOptions;
use super::source::MAX_LINE_BYTES;
use crate::model::log_line::{self, Stream};

/// Written out at once. Memory of a reader is bounded by this and by one line.
const BLOCK: usize = 64 * 1024;

/// Whether more can follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PrintState {
    Done,
    /// All requested lines were written.
    Over,
}

/// The format of the file, which its first line shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Cri,
    Docker,
}

/// Of what the next piece is the rest, after a line longer than a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Remainder {
    None,
    Shown { partial: bool },
    Skipped,
}

pub(super) struct Printer<'a> {
    out: &'a mut dyn Write,
    options: &'a ReadOptions,
    block: Vec<u8>,
    /// Bytes that may still be written.
    left: Option<u64>,
    /// Log lines that may still be read: with a tail and without following.
    lines_left: Option<u64>,
    format: Option<Format>,
    remainder: Remainder,
    /// Whether the next log line begins a line of the container.
    fresh: bool,
}

impl<'a> Printer<'a> {
    pub(super) fn new(out: &'a mut dyn Write, options: &'a ReadOptions) -> Self {
        Printer {
            out,
            options,
            block: Vec::new(),
            left: options.limit_bytes,
            lines_left: options.tail_lines.filter(|_| !options.follow),
            format: None,
            remainder: Remainder::None,
            fresh: true,
        }
    }

    /// Whether the output is complete.
    pub(super) fn is_over(&self) -> bool {
        self.left == Some(0) || self.lines_left == Some(0)
    }

    /// Takes a line with its newline, the first or a further piece of a very long one, or a last
    /// one without newline. Invalid lines are skipped, but the first must be a log line.
    pub(super) fn print(&mut self, line: &[u8]) -> Result<PrintState, LogError> {
        let ends = line.ends_with(b"\n");
        let goes_on = !ends && line.len() >= MAX_LINE_BYTES;
        if self.remainder != Remainder::None {
            return self.print_rest(line, ends, goes_on);
        }
        let format = match self.format {
            Some(format) => format,
            None => {
                let format = if log_line::parse(line).is_ok() {
                    Format::Cri
                } else if log_line::parse_docker(line).is_some() {
                    Format::Docker
                } else {
                    return Err(LogError::Format);
                };
                *self.format.insert(format)
            }
        };
        match format {
            Format::Cri => self.print_cri(line, ends, goes_on),
            Format::Docker => self.print_docker(line, goes_on),
        }
    }

    fn print_cri(&mut self, line: &[u8], ends: bool, goes_on: bool) -> Result<PrintState, LogError> {
        let Ok(parsed) = log_line::parse(line) else {
            return Ok(self.skip_line(goes_on));
        };
        let newline = ends && !parsed.partial;
        let fresh = std::mem::replace(&mut self.fresh, newline || parsed.message.is_empty());
        let shown = self.is_wanted(parsed.time, parsed.stream);
        if goes_on {
            self.remainder =
                if shown { Remainder::Shown { partial: parsed.partial } } else { Remainder::Skipped };
        }
        if shown {
            self.put(
                fresh.then_some(parsed.time_text),
                &[parsed.message, if newline { b"\n" } else { b"" }],
            )?;
        }
        Ok(self.count_line())
    }

    fn print_docker(&mut self, line: &[u8], goes_on: bool) -> Result<PrintState, LogError> {
        let Some(parsed) = log_line::parse_docker(line) else {
            return Ok(self.skip_line(goes_on));
        };
        let fresh = std::mem::replace(&mut self.fresh, parsed.text.is_empty() || parsed.text.ends_with('\n'));
        if self.is_wanted(parsed.time, parsed.stream) {
            self.put(fresh.then_some(&parsed.time_text), &[parsed.text.as_bytes()])?;
        }
        Ok(self.count_line())
    }

    fn print_rest(&mut self, line: &[u8], ends: bool, goes_on: bool) -> Result<PrintState, LogError> {
        let remainder = if goes_on { self.remainder } else { Remainder::None };
        if let Remainder::Shown { partial } = std::mem::replace(&mut self.remainder, remainder) {
            let text = if partial { line.strip_suffix(b"\n").unwrap_or(line) } else { line };
            self.fresh = ends && !partial;
            self.put(None, &[text])?;
        }
        Ok(self.state())
    }

    fn skip_line(&mut self, goes_on: bool) -> PrintState {
        if goes_on {
            self.remainder = Remainder::Skipped;
        }
        PrintState::Done
    }

    fn is_wanted(&self, timestamp: jiff::Timestamp, stream: Stream) -> bool {
        self.options.since.is_none_or(|since| timestamp >= since)
            && self.options.stream.is_none_or(|wanted| wanted == stream)
    }

    /// Adds to the output buffer, up to the limit.
    fn put(&mut self, time: Option<&str>, parts: &[&[u8]]) -> Result<(), LogError> {
        let before = self.block.len();
        if let Some(time) = time.filter(|_| self.options.timestamps) {
            log_line::push_full_time(&mut self.block, time);
            self.block.push(b' ');
        }
        for part in parts {
            self.block.extend_from_slice(part);
        }
        if let Some(left) = &mut self.left {
            let allowed = usize::try_from(*left).unwrap_or(usize::MAX).saturating_add(before);
            self.block.truncate(allowed);
            *left = left.saturating_sub((self.block.len() - before) as u64);
        }
        if self.block.len() >= BLOCK { self.write_block() } else { Ok(()) }
    }

    fn count_line(&mut self) -> PrintState {
        // The last of them may continue in further pieces.
        if let Some(lines) = &mut self.lines_left {
            *lines = lines.saturating_sub(1);
        }
        self.state()
    }

    fn state(&self) -> PrintState {
        let more = self.remainder != Remainder::None && self.left != Some(0);
        if self.is_over() && !more { PrintState::Over } else { PrintState::Done }
    }

    fn write_block(&mut self) -> Result<(), LogError> {
        let written = self.out.write_all(&self.block).map_err(|source| LogError::Output { source });
        self.block.clear();
        written
    }

    /// Writes and flushes the buffer.
    pub(super) fn flush(&mut self) -> Result<(), LogError> {
        if !self.block.is_empty() {
            self.write_block()?;
        }
        self.out.flush().map_err(|source| LogError::Output { source })
    }

    /// Frees memory before a wait.
    pub(super) fn free_block(&mut self) {
        self.block = Vec::new();
    }
}
