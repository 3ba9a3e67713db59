//! The end of a body (RFC 9112, section 6), for readers of a byte stream.

use std::io::{self, BufRead, Read};

use super::fields::Fields;
use super::response::Malformed;

/// The longest line with the size of the next chunk, extensions included, and the longest trailer
/// (Go: the buffer of a connection of net/http).
const MAX_LINE_BYTES: u64 = 4096;
/// The limit of bytes beside the content: extensions, and lines of small chunks (Go:
/// net/http/internal `chunkedReader`).
const MAX_EXCESS: u64 = 16 * 1024;
const MAX_TRAILERS: usize = 1000;
/// The longest line of a chunk without extensions: eight digits and the line's end.
const STRICT_LINE_BYTES: u64 = 10;

/// How strictly chunks are parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunks {
    /// Extensions and trailers are skipped, as by Go's client.
    Lenient,
    /// Extensions, trailers and LF alone are errors.
    Strict,
}

/// The rest of a body, and how its end is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Framing {
    state: State,
    chunks: Chunks,
    /// Bytes beside the content, less those that each chunk may have.
    excess: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The number of bytes that are left.
    Length(u64),
    /// The number of bytes left in the chunk, before the line of the next one.
    Chunk(u64),
    /// The line of the first chunk comes next.
    FirstChunk,
    /// The body ends when the connection is closed.
    Close,
    Done,
}

fn malformed(what: &str) -> io::Error {
    Malformed(what.to_owned()).into()
}

impl Framing {
    /// A body of this number of bytes.
    pub fn length(bytes: u64) -> Framing {
        let state = if bytes == 0 { State::Done } else { State::Length(bytes) };
        Framing { state, chunks: Chunks::Strict, excess: 0 }
    }

    /// A body in chunks.
    pub fn chunked(chunks: Chunks) -> Framing {
        Framing { state: State::FirstChunk, chunks, excess: 0 }
    }

    /// A body that ends when the connection is closed.
    pub fn until_close() -> Framing {
        Framing { state: State::Close, chunks: Chunks::Strict, excess: 0 }
    }

    /// Whether all of the body was consumed.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// The number of bytes before the next chunk or the end; reads the line of a chunk if that is
    /// next. 0: the body has ended. `u64::MAX`: it ends when the connection is closed.
    ///
    /// # Errors
    /// Errors of the reader, and [`Malformed`].
    pub fn remaining(&mut self, reader: &mut impl BufRead) -> io::Result<u64> {
        if matches!(self.state, State::Chunk(0) | State::FirstChunk) {
            self.next_chunk(reader)?;
        }
        Ok(match self.state {
            State::Length(left) | State::Chunk(left) => left,
            State::Close => u64::MAX,
            State::FirstChunk | State::Done => 0,
        })
    }

    /// The buffered part of the body; waits for at least a byte. Empty at its end. The caller
    /// passes the number of used bytes to [`Framing::consume`].
    ///
    /// # Errors
    /// Errors of the reader, `UnexpectedEof` when it ends before the body, and [`Malformed`].
    pub fn fill<'a, R: BufRead>(&mut self, reader: &'a mut R) -> io::Result<&'a [u8]> {
        let left = self.remaining(reader)?;
        if left == 0 {
            return Ok(&[]);
        }
        let there = reader.fill_buf()?;
        if there.is_empty() {
            return match self.state {
                State::Close => {
                    self.state = State::Done;
                    Ok(&[])
                }
                _ => Err(io::ErrorKind::UnexpectedEof.into()),
            };
        }
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(there.len());
        Ok(there.get(..most).unwrap_or_default())
    }

    /// Marks this number of buffered bytes as used.
    pub fn consume(&mut self, reader: &mut impl BufRead, count: usize) {
        reader.consume(count);
        if let State::Length(left) | State::Chunk(left) = &mut self.state {
            *left = left.saturating_sub(count as u64);
        }
        if self.state == State::Length(0) {
            self.state = State::Done;
        }
    }

    /// Reads at most `max` bytes of the body; what follows stays unread.
    ///
    /// # Errors
    /// Those of [`Framing::fill`].
    pub fn read_up_to(&mut self, reader: &mut impl BufRead, max: usize) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        while body.len() < max {
            let there = self.fill(reader)?;
            let count = there.len().min(max - body.len());
            if count == 0 {
                break;
            }
            body.extend_from_slice(there.get(..count).unwrap_or_default());
            self.consume(reader, count);
        }
        Ok(body)
    }

    fn next_chunk(&mut self, reader: &mut impl BufRead) -> io::Result<()> {
        if self.state == State::Chunk(0) {
            self.empty_line(reader)?;
        }
        let limit = if self.chunks == Chunks::Strict { STRICT_LINE_BYTES } else { MAX_LINE_BYTES };
        let line = self.line(reader, limit)?;
        let digits = match self.chunks {
            Chunks::Strict => line.as_slice(),
            Chunks::Lenient => {
                let blanks = line.iter().rev().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
                let line = line.get(..line.len() - blanks).unwrap_or_default();
                line.split(|byte| *byte == b';').next().unwrap_or_default()
            }
        };
        let size = std::str::from_utf8(digits)
            .ok()
            .filter(|text| text.len() <= 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit()))
            .and_then(|text| u64::from_str_radix(text, 16).ok())
            .ok_or_else(|| malformed("invalid byte in chunk length"))?;
        self.state = State::Chunk(size);
        let allowed = size.saturating_mul(2).saturating_add(16);
        self.excess = (self.excess + line.len() as u64 + 2).saturating_sub(allowed);
        if self.excess > MAX_EXCESS {
            return Err(malformed("chunked encoding contains too much non-data"));
        }
        if size == 0 {
            match self.chunks {
                Chunks::Strict => self.empty_line(reader)?,
                Chunks::Lenient => trailers(reader)?,
            }
            self.state = State::Done;
        }
        Ok(())
    }

    fn empty_line(&self, reader: &mut impl BufRead) -> io::Result<()> {
        match self.line(reader, 2)?.is_empty() {
            true => Ok(()),
            false => Err(malformed("malformed chunked encoding")),
        }
    }

    /// One line of at most `limit` bytes, without its end.
    fn line(&self, reader: &mut impl BufRead, limit: u64) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        reader.by_ref().take(limit).read_until(b'\n', &mut line)?;
        if line.pop_if(|last| *last == b'\n').is_none() {
            return Err(match line.len() as u64 == limit {
                true => malformed("malformed chunked encoding"),
                false => io::ErrorKind::UnexpectedEof.into(),
            });
        }
        if line.pop_if(|last| *last == b'\r').is_none() || line.contains(&b'\r') {
            return Err(malformed("malformed chunked encoding"));
        }
        Ok(line)
    }
}

/// Skips the fields after the last chunk, up to an empty line.
fn trailers(reader: &mut impl BufRead) -> io::Result<()> {
    let mut reader = reader.take(MAX_LINE_BYTES);
    let mut lines = Vec::new();
    loop {
        let from = lines.len();
        reader.read_until(b'\n', &mut lines)?;
        match lines.get(from..).unwrap_or_default() {
            b"\r\n" if from == 0 => return Ok(()),
            b"\r\n" | b"\n" => break,
            line if line.ends_with(b"\n") => {}
            _ if reader.limit() == 0 => {
                return Err(malformed("http: suspiciously long trailer after chunked body"));
            }
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
    match Fields::parse(&lines, MAX_TRAILERS) {
        Ok(Some(_)) if lines.ends_with(b"\r\n\r\n") => Ok(()),
        _ => Err(malformed("malformed trailer after chunked body")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Lenient chunks and lengths are tested in `response`.

    #[test]
    fn strict_chunks_have_neither_extensions_nor_trailers() {
        let read = |raw: &str| {
            let mut reader = raw.as_bytes();
            let mut framing = Framing::chunked(Chunks::Strict);
            let body = framing.read_up_to(&mut reader, usize::MAX)?;
            Ok((String::from_utf8(body).unwrap(), reader.len()))
        };
        let kind = |error: io::Error| error.kind();
        for (raw, body, rest) in [
            ("0\r\n\r\nGET", "", 3),
            ("1\r\n4\r\n0\r\n\r\n", "4", 0),
            ("A\r\n0123456789\r\n2\r\nab\r\n00000000\r\n\r\n", "0123456789ab", 0),
        ] {
            assert_eq!(read(raw).map_err(kind), Ok((body.to_owned(), rest)), "{raw:?}");
        }
        for part in ["", "1", "1\r", "1\r\n4", "1\r\n4\r\n", "1\r\n4\r\n0\r\n", "1\r\n4\r\n0\r\n\r"] {
            assert_eq!(read(part).map_err(kind), Err(io::ErrorKind::UnexpectedEof), "{part:?}");
        }
        for raw in [
            "x\r\n",
            "\r\n",
            "+1\r\n4\r\n",
            "1;a=b\r\n4\r\n",
            "1 \r\n4\r\n",
            "1\n4\r\n0\r\n\r\n",
            "1\r\n44\r\n",
            "0\r\nA: b\r\n\r\n",
            "0\r\n\n",
            "000000001\r\n4\r\n",
            "0123456789",
        ] {
            assert_eq!(read(raw).map_err(kind), Err(io::ErrorKind::InvalidData), "{raw:?}");
        }
    }

    #[test]
    fn size_of_a_chunk_is_known_before_its_bytes_are_there() {
        let mut reader = b"ffffffff\r\n".as_slice();
        assert_eq!(Framing::chunked(Chunks::Strict).remaining(&mut reader).unwrap(), 0xffff_ffff);
        assert_eq!(Framing::length(7).remaining(&mut b"".as_slice()).unwrap(), 7);
        assert_eq!(Framing::length(0).remaining(&mut b"".as_slice()).unwrap(), 0);
    }
}
