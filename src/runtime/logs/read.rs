//! Reading one container's log: the end of it, from a time on, as it grows.
//! Memory is bounded by one line and one block of output; a file is never loaded.

use std::io::Write;
use std::path::Path;

use jiff::Timestamp;

use super::LogError;
use super::print::{Printed, Printer};
use super::source::{Rotation, Source};
use super::watch::Watch;
use crate::model::log_line::Stream;
use crate::util::stop::{StopToken, Waited};

/// What part of a log, and how it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReadOptions {
    /// Go on when the end is reached, until the container has ended.
    pub follow: bool,
    /// Only the last lines of the file, before anything else is looked at.
    pub tail_lines: Option<u64>,
    /// Only lines written at this time or later.
    pub since: Option<Timestamp>,
    /// Only what came out of one of the container's outputs.
    pub stream: Option<Stream>,
    /// Put the time before each line of the container.
    pub timestamps: bool,
    /// Stop after so many bytes of output.
    pub limit_bytes: Option<u64>,
}

/// Writes the chosen part of the log at `path` to `out`, and flushes at each end of what is
/// written so far. With `follow` it goes on over rotations until `still_running` says no and
/// everything written so far is out.
///
/// # Errors
/// When the file is missing, cannot be read or is no log, or `out` takes no more.
pub fn read(
    path: &Path,
    options: &ReadOptions,
    out: &mut dyn Write,
    still_running: &dyn Fn() -> bool,
    stop: &StopToken,
) -> Result<(), LogError> {
    // Docker's logs are behind links; what is watched is the directory of the file itself.
    let path = &std::fs::canonicalize(path).map_err(LogError::io("open", path))?;
    let mut source = Source::open(path).map_err(LogError::io("open", path))?;
    if let Some(lines) = options.tail_lines {
        source.seek_tail(lines).map_err(LogError::io("read", path))?;
    }
    let mut printer = Printer::new(out, options);
    if printer.is_over() {
        return printer.flush();
    }
    let mut watch = None;
    // Set once the container has ended: one more pass then finds its last lines.
    let mut ended = false;
    loop {
        while let Some(line) = source.next_line() {
            if printer.print(line)? == Printed::Over {
                return printer.flush();
            }
        }
        if stop.is_stopped() {
            return Err(LogError::Stopping);
        }
        if source.fill().map_err(LogError::io("read", path))? > 0 {
            continue;
        }
        if !options.follow || ended {
            // A last line without its newline: a crash of the node can leave one.
            if !source.unfinished().is_empty() {
                printer.print(source.unfinished())?;
            }
            return printer.flush();
        }
        printer.flush()?;
        let Some(watch) = &mut watch else {
            // What is written before the watch begins is seen in one more pass.
            watch = Some(Watch::new(path));
            continue;
        };
        match source.rotated(path).map_err(LogError::io("read", path))? {
            Rotation::None => {}
            Rotation::Draining => continue,
            // All that was in the old file is out: the runtime writes to the new one only.
            Rotation::Replaced(new) => {
                source = new;
                continue;
            }
        }
        if !still_running() {
            ended = true;
            continue;
        }
        source.rest();
        printer.rest();
        if watch.wait(stop) == Waited::Stopped {
            return Err(LogError::Stopping);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::log_line;
    use crate::runtime::logs::source::MAX_LINE_BYTES;
    use proptest::prelude::*;
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
        check(&format!("{all}rubbish\n\n{{}}\n{all}"), &none, "a\nbc\nd\na\nbc\nd\n");
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
