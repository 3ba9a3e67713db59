//! Reads the end of a file backwards in blocks, and never loads a large file as a whole. A file
//! that a container can replace must be opened with `untrusted`.

use std::io::{self, Read, Seek, SeekFrom};

use super::stop::StopToken;

/// The size of one read. By default containerd splits log lines at this size.
const BLOCK: usize = 16 * 1024;

/// The end of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tail {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Whether the bytes start in the middle of a line.
    pub cut: bool,
}

/// The limits of reading a file's end. Memory and reads are bounded by the sum of both sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The maximum number of lines.
    pub lines: u64,
    /// Only lines with at least one byte among this many last bytes are read.
    pub bytes: u64,
    /// How many bytes before these are searched for the beginning of the first line.
    pub before: u64,
}

/// The start of the last `lines` lines before `end`. A line ends with its newline; an unfinished
/// last line counts as one.
///
/// # Errors
/// Any error of seeking or reading; [`io::ErrorKind::Interrupted`] once `stop` is closed:
/// a search for long lines takes time.
pub fn start_of_last_lines(
    file: &mut (impl Read + Seek),
    end: u64,
    lines: u64,
    stop: &StopToken,
) -> io::Result<u64> {
    Ok(start_within(file, 0, end, lines, stop)?.unwrap_or(0))
}

/// Returns the same as [`start_of_last_lines`]; `None` when the start is before `floor`.
fn start_within(
    file: &mut (impl Read + Seek),
    floor: u64,
    end: u64,
    lines: u64,
    stop: &StopToken,
) -> io::Result<Option<u64>> {
    if lines == 0 {
        return Ok(Some(end));
    }
    let mut newlines = 0;
    let mut block = vec![0; BLOCK];
    let mut block_end = end;
    while block_end > floor {
        if stop.is_stopped() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let length = block.len().min(usize::try_from(block_end - floor).unwrap_or(usize::MAX));
        let start = block_end - length as u64;
        let Some(part) = block.get_mut(..length) else { break };
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(part)?;
        for (index, byte) in part.iter().enumerate().rev() {
            let after = start + index as u64 + 1;
            // The newline at the very end ends the last line and begins no other line.
            if *byte == b'\n' && after < end {
                newlines += 1;
                if newlines == lines {
                    return Ok(Some(after));
                }
            }
        }
        block_end = start;
    }
    Ok((floor == 0).then_some(0))
}

/// The last lines of a file. The first one is cut if its beginning is too far away.
///
/// # Errors
/// Any error of seeking or reading.
pub fn last_lines(file: &mut (impl Read + Seek), window: Window) -> io::Result<Tail> {
    let never = StopToken::never();
    let end = file.seek(SeekFrom::End(0))?;
    let from = end.saturating_sub(window.bytes);
    let (start, cut) = match start_within(file, from, end, window.lines, &never)? {
        Some(start) => (start, false),
        None => {
            let floor = from.saturating_sub(window.before.max(1));
            // The start of the line that contains the window's first byte.
            let start = start_within(file, floor, end.min(from + 1), 1, &never)?;
            (start.unwrap_or(from), start.is_none())
        }
    };
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    // Bytes that are appended meanwhile are ignored.
    file.take(end - start).read_to_end(&mut bytes)?;
    Ok(Tail { bytes, cut })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(text: &str, lines: u64) -> usize {
        let end = text.len() as u64;
        let mut file = io::Cursor::new(text.as_bytes());
        start_of_last_lines(&mut file, end, lines, &StopToken::never()).unwrap() as usize
    }

    #[test]
    fn start_of_last_lines_is_found() {
        for (text, lines, expected) in [
            ("", 3, ""),
            ("a\nb\nc\n", 0, ""),
            ("a\nb\nc\n", 1, "c\n"),
            ("a\nb\nc\n", 2, "b\nc\n"),
            ("a\nb\nc\n", 3, "a\nb\nc\n"),
            ("a\nb\nc\n", 9, "a\nb\nc\n"),
            ("a\nb\nc", 1, "c"),
            ("\n\n\n", 2, "\n\n"),
        ] {
            assert_eq!(&text[start(text, lines)..], expected, "{text:?} {lines}");
        }
        let long: String = (0..10_000).map(|n| format!("line {n}\n")).collect();
        assert!(long[start(&long, 5_000)..].starts_with("line 5000\n"));
    }

    #[test]
    fn last_lines_are_read_within_limits() {
        let check = |text: &str, (lines, bytes, before), expected: &str, cut| {
            let tail = last_lines(&mut io::Cursor::new(text), Window { lines, bytes, before }).unwrap();
            let found = String::from_utf8(tail.bytes).unwrap();
            assert_eq!((found.as_str(), tail.cut), (expected, cut), "{lines} {bytes} {before}");
        };
        let text = "first\nsecond\nthird\n";
        check(text, (2, 1000, 0), "second\nthird\n", false);
        check(text, (9, 1000, 0), text, false);
        check(text, (9, 13, 0), "second\nthird\n", false);
        check(text, (1, 10, 0), "third\n", false);
        check(text, (0, 10, 0), "", false);
        // The window starts inside a line: the beginning is searched only within the limit.
        check(text, (9, 14, 0), "\nsecond\nthird\n", true);
        check(text, (9, 10, 0), "ond\nthird\n", true);
        check(text, (9, 10, 2), "ond\nthird\n", true);
        check(text, (9, 10, 4), "second\nthird\n", false);
        check(text, (9, 10, 1000), "second\nthird\n", false);
        check(text, (2, 4, 1000), "third\n", false);
        check("no newline", (9, 4, 1000), "no newline", false);
        check("no newline", (9, 4, 3), "line", true);
        check("", (9, 4, 3), "", false);
        let long = format!("{}\nend\n", "x".repeat(100_000));
        check(&long, (9, 10, 50_000), "xxxxx\nend\n", true);
        check(&long, (9, 10, 200_000), &long, false);
    }

    #[test]
    fn search_for_lines_ends_when_it_is_stopped() {
        let (source, stop) = super::super::stop::pair();
        drop(source);
        let mut file = io::Cursor::new(vec![0; 100_000]);
        let error = start_of_last_lines(&mut file, 100_000, 1, &stop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }
}
