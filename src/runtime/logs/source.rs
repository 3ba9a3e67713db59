//! The file behind a log, line by line without a copy of each, and what becomes of it:
//! it grows, it is rotated away, it is emptied.

use std::fs::File;
use std::io::{self, BufRead, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;

use crate::util::stop::StopToken;
use crate::util::tail;
use crate::util::untrusted::Place;

/// Longer lines are passed on in pieces of this size. Runtimes cut at 16 KiB by default.
pub(super) const MAX_LINE_BYTES: usize = 256 * 1024;

/// The first read of a file. Those that follow are larger as long as they are filled.
const FIRST_READ: usize = 16 * 1024;

/// What is at the path now, compared with what is being read.
#[derive(Debug)]
pub(super) enum Rotation {
    /// The same file, or nothing yet: the new one is about to come.
    None,
    /// Another file, seen for the first time: the old one may have got lines meanwhile.
    Draining,
    /// Another file, and the old one has been read to its end since it was seen.
    Replaced(Source),
}

/// The open file, and the part of it that is in memory.
#[derive(Debug)]
pub(super) struct Source {
    file: File,
    identity: (u64, u64),
    /// Where in the file the next read begins.
    position: u64,
    buffer: Vec<u8>,
    /// What of the buffer is not yet taken: from here
    start: usize,
    /// to here.
    end: usize,
    /// So much of that has no newline.
    searched: usize,
    replaced: bool,
}

impl Source {
    pub(super) fn open(place: &Place) -> io::Result<Self> {
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
            replaced: false,
        })
    }

    /// Goes to where the last `lines` lines begin. A line that has no newline yet is not
    /// counted: it comes after them.
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

    /// The next line of the buffer with its newline, or a piece of a very long one.
    pub(super) fn next_line(&mut self) -> Option<&[u8]> {
        let unread = self.buffer.get(self.start..self.end)?;
        let mut rest = unread.get(self.searched..)?;
        // The one search of the standard library that is as fast as the machine allows.
        let length = self.searched + rest.skip_until(b'\n').ok()?;
        let whole = length.checked_sub(1).and_then(|last| unread.get(last)) == Some(&b'\n');
        if !whole && length < MAX_LINE_BYTES {
            self.searched = length;
            return None;
        }
        self.searched = 0;
        let from = self.start;
        self.start += length;
        self.buffer.get(from..self.start)
    }

    /// Reads on. How much came; 0 at the end of what is written so far.
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

    /// What is there of a line that has no newline yet.
    pub(super) fn unfinished(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    /// Gives memory back before a wait.
    pub(super) fn rest(&mut self) {
        if self.start == self.end {
            (self.buffer, self.start, self.end, self.searched) = (Vec::new(), 0, 0, 0);
        }
    }

    /// Looks whether the runtime writes to another file by now.
    pub(super) fn rotated(&mut self, place: &Place) -> io::Result<Rotation> {
        let Some(stat) = place.stat()? else { return Ok(Rotation::None) };
        let same = (stat.st_dev, stat.st_ino) == self.identity;
        // One that was emptied in place is read from its start.
        if same && u64::try_from(stat.st_size).unwrap_or(0) >= self.position {
            self.replaced = false;
            return Ok(Rotation::None);
        }
        if !same && !std::mem::replace(&mut self.replaced, true) {
            return Ok(Rotation::Draining);
        }
        match Source::open(place) {
            Ok(new) => Ok(Rotation::Replaced(new)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Rotation::None),
            Err(error) => Err(error),
        }
    }
}
