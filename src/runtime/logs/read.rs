//! Reading one container's log: the end of it, from a time on, as it grows.
//! Memory is bounded by one line; a file is never loaded.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;

use super::LogError;
use crate::model::log_line;
use crate::util::stop::{StopToken, Waited};
use crate::util::tail;

/// Longer lines are passed on in pieces of this size. Runtimes cut at 16 KiB by default.
const MAX_LINE_BYTES: usize = 256 * 1024;
/// The first wait at the end of a file that is followed. Polling is enough here: someone
/// looks at the output, and a wake-up costs one `fstat` while they do.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// The wait after some quiet.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// What part of a log, and how it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReadOptions {
    /// Go on when the end is reached, until the container has ended.
    pub follow: bool,
    /// Only the last lines.
    pub tail_lines: Option<u64>,
    /// Only lines written at this time or later.
    pub since: Option<Timestamp>,
    /// Put the time before each line.
    pub timestamps: bool,
    /// Stop after so many bytes of output.
    pub limit_bytes: Option<u64>,
}

/// Writes the chosen part of the log at `path` to `out`. With `follow` it goes on over
/// rotations until `still_running` says no and everything written so far is out.
///
/// # Errors
/// When the file is missing or cannot be read, or `out` takes no more.
pub fn read(
    path: &Path,
    options: &ReadOptions,
    out: &mut dyn Write,
    still_running: &dyn Fn() -> bool,
    stop: &StopToken,
) -> Result<(), LogError> {
    let mut file = File::open(path).map_err(LogError::io("open", path))?;
    if let Some(lines) = options.tail_lines {
        let end = file.seek(SeekFrom::End(0)).map_err(LogError::io("read", path))?;
        let start = tail::start_of_last_lines(&mut file, end, lines).map_err(LogError::io("read", path))?;
        file.seek(SeekFrom::Start(start)).map_err(LogError::io("read", path))?;
    }
    let mut printer = Printer { out, options, left: options.limit_bytes, rest: Rest::None };
    let mut source = Source::new(file).map_err(LogError::io("read", path))?;
    let mut wait = FIRST_WAIT;
    // Set once the container has ended: one more pass then finds its last lines.
    let mut ended = false;
    loop {
        let mut any = false;
        while let Some(line) = source.next_line().map_err(LogError::io("read", path))? {
            any = true;
            if printer.print(line)? == Printed::LimitReached {
                return printer.flush();
            }
            if stop.is_stopped() {
                return Err(LogError::Stopping);
            }
        }
        if !options.follow || ended {
            // A last line without its newline: a crash of the node can leave one.
            if !source.pending.is_empty() {
                printer.print(&std::mem::take(&mut source.pending))?;
            }
            return printer.flush();
        }
        printer.flush()?;
        match source.rotated(path) {
            Ok(Rotation::None) => {}
            // All that was in the old file is out: the runtime writes to the new one only.
            Ok(Rotation::Replaced(new)) => {
                source = Source::new(new).map_err(LogError::io("read", path))?;
                continue;
            }
            Ok(Rotation::Draining) => continue,
            Err(source) => return Err(LogError::io("read", path)(source)),
        }
        if !still_running() {
            ended = true;
            continue;
        }
        wait = if any { FIRST_WAIT } else { (wait * 2).min(LAST_WAIT) };
        if stop.wait(wait) == Waited::Stopped {
            return Err(LogError::Stopping);
        }
    }
}

/// What is at the path now, compared with what is being read.
enum Rotation {
    /// The same file, or nothing yet: the new one is about to come.
    None,
    /// Another file, seen for the first time: the old one may have got lines meanwhile.
    Draining,
    /// Another file, and the old one has been read to its end since it was seen.
    Replaced(File),
}

/// The open file, and a line of it that has no end yet.
struct Source {
    file: BufReader<File>,
    inode: (u64, u64),
    pending: Vec<u8>,
    line: Vec<u8>,
    replaced: bool,
}

impl Source {
    fn new(file: File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Source {
            inode: (metadata.dev(), metadata.ino()),
            file: BufReader::with_capacity(32 * 1024, file),
            pending: Vec::new(),
            line: Vec::new(),
            replaced: false,
        })
    }

    /// The next whole line with its newline, or a piece of a very long one; `None` at the
    /// end of what is written so far.
    fn next_line(&mut self) -> std::io::Result<Option<&[u8]>> {
        loop {
            let buffer = self.file.fill_buf()?;
            if buffer.is_empty() {
                return Ok(None);
            }
            let newline = buffer.iter().position(|byte| *byte == b'\n');
            let taken = newline.map_or(buffer.len(), |at| at + 1);
            self.pending.extend_from_slice(buffer.get(..taken).unwrap_or_default());
            self.file.consume(taken);
            if newline.is_some() || self.pending.len() >= MAX_LINE_BYTES {
                self.line = std::mem::take(&mut self.pending);
                return Ok(Some(&self.line));
            }
        }
    }

    fn rotated(&mut self, path: &Path) -> std::io::Result<Rotation> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Rotation::None),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        if (metadata.dev(), metadata.ino()) != self.inode {
            if !std::mem::replace(&mut self.replaced, true) {
                return Ok(Rotation::Draining);
            }
            return Ok(Rotation::Replaced(file));
        }
        self.replaced = false;
        // Someone emptied the file in place: what is new begins at its start.
        if metadata.len() < self.file.stream_position()? {
            return Ok(Rotation::Replaced(file));
        }
        Ok(Rotation::None)
    }
}

#[derive(PartialEq, Eq)]
enum Printed {
    Done,
    LimitReached,
}

/// Of what the next piece is the rest, after a line longer than a piece.
#[derive(Clone, Copy)]
enum Rest {
    None,
    Printed,
    Skipped,
}

struct Printer<'a> {
    out: &'a mut dyn Write,
    options: &'a ReadOptions,
    left: Option<u64>,
    rest: Rest,
}

impl Printer<'_> {
    /// Lines that are not log lines are skipped, as upstream does.
    fn print(&mut self, line: &[u8]) -> Result<Printed, LogError> {
        let ends = line.ends_with(b"\n");
        let goes_on = !ends && line.len() >= MAX_LINE_BYTES;
        let before = self.rest;
        if ends {
            self.rest = Rest::None;
        }
        match before {
            Rest::None => {}
            Rest::Printed => return self.write(line),
            Rest::Skipped => return Ok(Printed::Done),
        }
        let parsed = log_line::parse(line)
            .ok()
            .filter(|parsed| self.options.since.is_none_or(|since| parsed.at >= since));
        if goes_on {
            self.rest = if parsed.is_some() { Rest::Printed } else { Rest::Skipped };
        }
        let Some(parsed) = parsed else { return Ok(Printed::Done) };
        if self.options.timestamps {
            let time = log_line::full_time(parsed.time_text);
            if self.write(time.as_bytes())? == Printed::LimitReached
                || self.write(b" ")? == Printed::LimitReached
            {
                return Ok(Printed::LimitReached);
            }
        }
        let printed = self.write(parsed.message)?;
        if printed == Printed::Done && !parsed.partial && ends {
            return self.write(b"\n");
        }
        Ok(printed)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<Printed, LogError> {
        let mut part = bytes;
        if let Some(left) = &mut self.left {
            part = bytes.get(..usize::try_from(*left).unwrap_or(usize::MAX)).unwrap_or(bytes);
            *left -= part.len() as u64;
        }
        self.out.write_all(part).map_err(|source| LogError::Output { source })?;
        Ok(if self.left == Some(0) { Printed::LimitReached } else { Printed::Done })
    }

    fn flush(&mut self) -> Result<(), LogError> {
        self.out.flush().map_err(|source| LogError::Output { source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn log(lines: &[&str]) -> String {
        lines
            .iter()
            .enumerate()
            .map(|(n, line)| format!("2026-01-01T00:00:0{n}.5Z stdout {line}\n"))
            .collect()
    }

    fn check(content: &str, options: &ReadOptions, expected: &str) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, content).unwrap();
        let mut out = Vec::new();
        read(&path, options, &mut out, &|| false, &StopToken::never()).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), expected, "{options:?}");
    }

    #[test]
    fn shows_the_chosen_part() {
        let all = log(&["F a", "P b", "F c", "F d"]);
        let none = ReadOptions::default();
        check(&all, &none, "a\nbc\nd\n");
        check("", &none, "");
        check(&format!("rubbish\n{all}\n\n"), &none, "a\nbc\nd\n");
        check(all.trim_end(), &none, "a\nbc\nd");
        check(&all, &ReadOptions { tail_lines: Some(2), ..none.clone() }, "c\nd\n");
        check(&all, &ReadOptions { tail_lines: Some(0), ..none.clone() }, "");
        check(&all, &ReadOptions { tail_lines: Some(99), ..none.clone() }, "a\nbc\nd\n");
        let since = Some("2026-01-01T00:00:02.5Z".parse().unwrap());
        check(&all, &ReadOptions { since, ..none.clone() }, "c\nd\n");
        check(&all, &ReadOptions { limit_bytes: Some(3), ..none.clone() }, "a\nb");
        check(&all, &ReadOptions { limit_bytes: Some(0), ..none.clone() }, "");
        check(
            &log(&["F a", "F b"]),
            &ReadOptions { timestamps: true, ..none.clone() },
            "2026-01-01T00:00:00.500000000Z a\n2026-01-01T00:00:01.500000000Z b\n",
        );
    }

    #[test]
    fn long_lines_pass_in_pieces() {
        let text = "x".repeat(3 * MAX_LINE_BYTES);
        let content = log(&[&format!("F {text}"), "F end"]);
        check(&content, &ReadOptions::default(), &format!("{text}\nend\n"));
        let since = Some("2026-01-01T00:00:01Z".parse().unwrap());
        check(&content, &ReadOptions { since, ..ReadOptions::default() }, "end\n");
    }

    #[test]
    fn a_missing_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none");
        let result = read(&path, &ReadOptions::default(), &mut Vec::new(), &|| false, &StopToken::never());
        assert!(matches!(result, Err(LogError::Missing { .. })));
    }

    /// Each look whether the container runs changes the files, as time would.
    #[test]
    fn follows_over_a_rotation_to_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, log(&["F one"])).unwrap();
        let step = Cell::new(0);
        let append = |path: &Path, text: &str| {
            let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        let still_running = || {
            step.set(step.get() + 1);
            match step.get() {
                1 => append(&path, "2026-01-01T00:00:01Z stdout F tw"),
                2 => {
                    append(&path, "o\n");
                    std::fs::rename(&path, dir.path().join("0.log.old")).unwrap();
                    append(&dir.path().join("0.log.old"), "2026-01-01T00:00:01Z stdout F three\n");
                    std::fs::write(&path, log(&["F four"])).unwrap();
                }
                _ => {
                    append(&path, &log(&["F five"]));
                    return false;
                }
            }
            true
        };
        let mut out = Vec::new();
        let options = ReadOptions { follow: true, ..ReadOptions::default() };
        read(&path, &options, &mut out, &still_running, &StopToken::never()).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "one\ntwo\nthree\nfour\nfive\n");
    }

    #[test]
    fn following_ends_with_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, log(&["F one"])).unwrap();
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        let options = ReadOptions { follow: true, ..ReadOptions::default() };
        let mut out = Vec::new();
        let result = read(&path, &options, &mut out, &|| true, &stop);
        assert!(matches!(result, Err(LogError::Stopping)));
        assert_eq!(out, b"one\n");
    }
}
