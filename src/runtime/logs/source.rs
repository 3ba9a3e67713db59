//! Reads the file of a log line by line without copying, while it grows, is rotated or is
//! truncated.

use std::fs::File;
use std::io::{self, BufRead, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;

use crate::util::stop::StopToken;
use crate::util::tail;
use crate::util::untrusted::UntrustedPath;

/// Longer lines are returned in pieces of this size. Runtimes split lines at 16 KiB by default.
pub(super) const MAX_LINE_BYTES: usize = 256 * 1024;

/// The size of the first read of a file. Later reads are larger as long as they fill the buffer.
const FIRST_READ: usize = 16 * 1024;

/// The file at the path now, compared with the open one.
#[derive(Debug)]
pub(super) enum Rotation {
    /// The same file; or no file, as the new one does not exist yet.
    None,
    /// Another file. The runtime may still write to the open one.
    Renamed,
    /// The same file, truncated.
    Truncated,
}

/// The open file, and the part of it that is in memory.
#[derive(Debug)]
pub(super) struct Source {
    file: File,
    identity: (u64, u64),
    /// Where in the file the next read begins.
    position: u64,
    buffer: Vec<u8>,
    /// Where the unread part of the buffer starts.
    start: usize,
    /// Where the unread part ends.
    end: usize,
    /// The length of the unread part's beginning that is known to have no newline.
    searched: usize,
}

impl Source {
    pub(super) fn open(place: &UntrustedPath) -> io::Result<Self> {
        let file = place.open()?;
        let metadata = file.metadata()?;
        Ok(Source {
            file,
            identity: (metadata.dev(), metadata.ino()),
            position: 0,
            buffer: Vec::new(),
            start: 0,
            end: 0,
            searched: 0,
        })
    }

    /// Device and inode of the file.
    pub(super) fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// Seeks to the start of the last `lines` lines. A last line that has no newline yet is read,
    /// too, but not counted.
    pub(super) fn seek_tail(&mut self, lines: u64, stop: &StopToken) -> io::Result<()> {
        let mut end = self.file.seek(SeekFrom::End(0))?;
        if end > 0 {
            let mut last = [0];
            self.file.seek(SeekFrom::Start(end - 1))?;
            self.file.read_exact(&mut last)?;
            if last != *b"\n" {
                end = tail::start_of_last_lines(&mut self.file, end, 1, stop)?;
            }
        }
        self.position = tail::start_of_last_lines(&mut self.file, end, lines, stop)?;
        self.file.seek(SeekFrom::Start(self.position))?;
        Ok(())
    }

    /// The next line of the buffer with its newline, or a piece of a very long line.
    pub(super) fn next_line(&mut self) -> Option<&[u8]> {
        let unread = self.buffer.get(self.start..self.end)?;
        let mut rest = unread.get(self.searched..)?;
        // The fastest search for a byte in the standard library.
        let length = self.searched + rest.skip_until(b'\n').ok()?;
        let has_newline = length.checked_sub(1).and_then(|last| unread.get(last)) == Some(&b'\n');
        if !has_newline && length < MAX_LINE_BYTES {
            self.searched = length;
            return None;
        }
        self.searched = 0;
        let from = self.start;
        self.start += length;
        self.buffer.get(from..self.start)
    }

    /// Reads more bytes into the buffer. Returns their number; 0 at the present end of the file.
    pub(super) fn fill(&mut self) -> io::Result<usize> {
        let unread = self.end - self.start;
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, unread);
        }
        if self.end == self.buffer.len() {
            let size = (self.buffer.len() * 2).clamp(FIRST_READ, MAX_LINE_BYTES);
            self.buffer.resize(size, 0);
        }
        let room = self.buffer.get_mut(self.end..).unwrap_or_default();
        let size = room.len();
        let count = loop {
            match self.file.read(room) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                outcome => break outcome?,
            }
        };
        self.end += count;
        self.position += count as u64;
        if count == size && unread == 0 && self.buffer.len() < MAX_LINE_BYTES {
            self.buffer.resize(self.buffer.len() * 2, 0);
        }
        Ok(count)
    }

    /// The start of a line that has no newline yet.
    pub(super) fn unfinished(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    /// Frees the buffer before a wait if all of it has been read.
    pub(super) fn free_buffer(&mut self) {
        if self.start == self.end {
            (self.buffer, self.start, self.end, self.searched) = (Vec::new(), 0, 0, 0);
        }
    }

    /// Checks whether the file was truncated, or another one is at its path.
    pub(super) fn rotated(&self, place: &UntrustedPath) -> io::Result<Rotation> {
        let Some(stat) = place.stat()? else { return Ok(Rotation::None) };
        if (stat.st_dev, stat.st_ino) != self.identity {
            return Ok(Rotation::Renamed);
        }
        let shorter = u64::try_from(stat.st_size).unwrap_or(0) < self.position;
        Ok(if shorter { Rotation::Truncated } else { Rotation::None })
    }

    /// Continues at the start of the file that is at the path now. Without one, nothing changes.
    pub(super) fn replace(&mut self, place: &UntrustedPath) -> io::Result<()> {
        match Source::open(place) {
            Ok(new) => *self = new,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
