//! The end of a file, read backwards in blocks: a large file is never loaded.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Read from the disk at once: about one container log line of the largest usual size.
const BLOCK: usize = 16 * 1024;

/// The end of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tail {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Whether they start in the middle of a line.
    pub cut: bool,
}

/// Where the last `lines` lines before `end` begin. A line ends with its newline; an
/// unfinished last line counts as one.
///
/// # Errors
/// Any error of seeking or reading.
pub fn start_of_last_lines(file: &mut (impl Read + Seek), end: u64, lines: u64) -> io::Result<u64> {
    if lines == 0 {
        return Ok(end);
    }
    let mut newlines = 0;
    let mut block = vec![0; BLOCK];
    let mut block_end = end;
    while block_end > 0 {
        let length = block.len().min(usize::try_from(block_end).unwrap_or(usize::MAX));
        let start = block_end - length as u64;
        let Some(part) = block.get_mut(..length) else { break };
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(part)?;
        for (index, byte) in part.iter().enumerate().rev() {
            let after = start + index as u64 + 1;
            // The newline at the very end ends the last line, it does not begin another.
            if *byte == b'\n' && after < end {
                newlines += 1;
                if newlines == lines {
                    return Ok(after);
                }
            }
        }
        block_end = start;
    }
    Ok(0)
}

/// The last `max_lines` lines of a file, as far as they fit in its last `max_bytes` bytes.
///
/// # Errors
/// Any error of opening, seeking or reading.
pub fn last(path: &Path, max_lines: u64, max_bytes: u64) -> io::Result<Tail> {
    let mut file = File::open(path)?;
    let end = file.seek(SeekFrom::End(0))?;
    let window = end.saturating_sub(max_bytes);
    file.seek(SeekFrom::Start(window))?;
    let mut bytes = Vec::new();
    (&mut file).take(max_bytes.min(end)).read_to_end(&mut bytes)?;
    let length = bytes.len() as u64;
    let start = start_of_last_lines(&mut io::Cursor::new(&bytes), length, max_lines)?;
    bytes.drain(..usize::try_from(start).unwrap_or(bytes.len()).min(bytes.len()));
    let cut = if start > 0 || window == 0 {
        false
    } else {
        let mut before = [0];
        file.seek(SeekFrom::Start(window - 1))?;
        file.read_exact(&mut before)?;
        before != *b"\n"
    };
    Ok(Tail { bytes, cut })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(text: &str, lines: u64) -> usize {
        let end = text.len() as u64;
        start_of_last_lines(&mut io::Cursor::new(text.as_bytes()), end, lines).unwrap() as usize
    }

    #[test]
    fn counts_lines_backwards() {
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
    fn reads_the_end_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "first\nsecond\nthird\n").unwrap();
        let check = |lines, bytes, text: &str, cut| {
            let tail = last(&path, lines, bytes).unwrap();
            assert_eq!((String::from_utf8(tail.bytes).unwrap().as_str(), tail.cut), (text, cut));
        };
        check(2, 1000, "second\nthird\n", false);
        check(9, 1000, "first\nsecond\nthird\n", false);
        check(9, 13, "second\nthird\n", false);
        check(9, 10, "ond\nthird\n", true);
        check(1, 10, "third\n", false);
        check(9, 0, "", false);
        assert!(last(&dir.path().join("none"), 1, 1).is_err());
    }
}
