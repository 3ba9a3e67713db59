//! HTTP/1.1 answers: the head, and the body piece by piece.

use std::io::{self, BufRead, Read};

/// All header lines together.
const MAX_HEAD_BYTES: u64 = 256 * 1024;
/// A line that says how long the next chunk is, or a trailer.
const MAX_CHUNK_LINE_BYTES: u64 = 16 * 1024;
/// Interim answers (100 Continue, 103 Early Hints) before the real one.
const MAX_INTERIM: usize = 5;

/// What the lines before the body say, as far as clients of the API care.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) status: u16,
    pub(super) retry_after: Option<String>,
    /// Whether the server closes the connection after this answer.
    pub(super) close: bool,
    pub(super) framing: Framing,
}

/// How the end of a body shows, and how much is left.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// So many bytes are left.
    Length(u64),
    /// So many bytes of the chunk are left; then comes the line of the next one.
    Chunk(u64),
    /// Before the line of the first chunk.
    FirstChunk,
    /// The connection's end.
    Close,
    /// Nothing is left.
    #[default]
    Done,
}

fn malformed(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads the head of the final answer.
pub(super) fn head(reader: &mut impl BufRead) -> io::Result<Head> {
    for _ in 0..=MAX_INTERIM {
        let head = one_head(reader)?;
        if !(100..200).contains(&head.status) || head.status == 101 {
            return Ok(head);
        }
    }
    Err(malformed("too many 1xx informational responses".to_owned()))
}

fn one_head(reader: &mut impl BufRead) -> io::Result<Head> {
    let mut reader = reader.take(MAX_HEAD_BYTES);
    let first = line(&mut reader)?;
    let mut head = Head { status: status(&first)?, ..Head::default() };
    head.close = first.starts_with("HTTP/1.0");
    let (mut length, mut chunked) = (None, false);
    loop {
        let line = line(&mut reader)?;
        if line.is_empty() {
            break;
        }
        let Some((name, value)) = line.split_once(':') else {
            return Err(malformed(format!("malformed MIME header line: {}", cut(&line))));
        };
        let value = value.trim();
        if name.eq_ignore_ascii_case("Retry-After") {
            head.retry_after = Some(value.to_owned());
        } else if name.eq_ignore_ascii_case("Connection") {
            let says = |word: &str| value.split(',').any(|one| one.trim().eq_ignore_ascii_case(word));
            head.close = says("close") || (head.close && !says("keep-alive"));
        } else if name.eq_ignore_ascii_case("Content-Length") {
            let number = value.parse::<u64>().ok().filter(|_| value.bytes().all(|b| b.is_ascii_digit()));
            length = Some(number.ok_or_else(|| malformed(format!("bad Content-Length {:?}", cut(value))))?);
        } else if name.eq_ignore_ascii_case("Transfer-Encoding") {
            if !value.eq_ignore_ascii_case("chunked") {
                return Err(malformed(format!("unsupported transfer encoding: {:?}", cut(value))));
            }
            chunked = true;
        } else if name.eq_ignore_ascii_case("Content-Encoding") && !value.eq_ignore_ascii_case("identity") {
            return Err(malformed(format!("content encoding {:?} was not asked for", cut(value))));
        }
    }
    head.framing = match (head.status, chunked, length) {
        (100..=199 | 204 | 304, ..) => Framing::Done,
        (_, true, _) => Framing::FirstChunk,
        (_, false, Some(0)) => Framing::Done,
        (_, false, Some(length)) => Framing::Length(length),
        (_, false, None) => Framing::Close,
    };
    Ok(head)
}

fn status(line: &str) -> io::Result<u16> {
    let wrong = || malformed(format!("malformed HTTP response {:?}", cut(line)));
    let (protocol, rest) = line.split_once(' ').ok_or_else(wrong)?;
    let code = rest.trim_start().split(' ').next().unwrap_or_default();
    if !protocol.starts_with("HTTP/1.") || code.len() != 3 || !code.bytes().all(|one| one.is_ascii_digit()) {
        return Err(wrong());
    }
    code.parse().map_err(|_| wrong())
}

/// One line without its end.
fn line(reader: &mut io::Take<impl BufRead>) -> io::Result<String> {
    let mut bytes = Vec::new();
    reader.read_until(b'\n', &mut bytes)?;
    if bytes.pop() != Some(b'\n') {
        if reader.limit() == 0 {
            return Err(malformed("server response headers are too long; aborted".to_owned()));
        }
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if bytes.last() == Some(&b'\r') {
        bytes.pop();
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn cut(text: &str) -> &str {
    text.get(..text.floor_char_boundary(200)).unwrap_or_default()
}

impl Framing {
    /// What is there of the body, waiting for at least a byte; nothing is its proper end.
    /// What is used of it must be told to [`Framing::consume`].
    pub(super) fn fill<'a, R: BufRead>(&mut self, reader: &'a mut R) -> io::Result<&'a [u8]> {
        if matches!(self, Framing::Chunk(0) | Framing::FirstChunk) {
            self.next_chunk(reader)?;
        }
        let left = match self {
            Framing::Done => return Ok(&[]),
            Framing::Close => u64::MAX,
            Framing::Length(left) | Framing::Chunk(left) => *left,
            Framing::FirstChunk => return Err(malformed("malformed chunked encoding".to_owned())),
        };
        let there = reader.fill_buf()?;
        if there.is_empty() {
            return match self {
                Framing::Close => {
                    *self = Framing::Done;
                    Ok(&[])
                }
                _ => Err(io::ErrorKind::UnexpectedEof.into()),
            };
        }
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(there.len());
        Ok(there.get(..most).unwrap_or_default())
    }

    /// So many bytes of what is there are used.
    pub(super) fn consume(&mut self, reader: &mut impl BufRead, count: usize) {
        reader.consume(count);
        if let Framing::Length(left) | Framing::Chunk(left) = self {
            *left = left.saturating_sub(count as u64);
        }
        if *self == Framing::Length(0) {
            *self = Framing::Done;
        }
    }

    fn next_chunk(&mut self, reader: &mut impl BufRead) -> io::Result<()> {
        if *self == Framing::Chunk(0) && !line(&mut reader.by_ref().take(2))?.is_empty() {
            return Err(malformed("malformed chunked encoding".to_owned()));
        }
        let size = line(&mut reader.by_ref().take(MAX_CHUNK_LINE_BYTES))?;
        let digits = size.split(';').next().unwrap_or_default().trim();
        let size = u64::from_str_radix(digits, 16)
            .ok()
            .filter(|_| digits.bytes().all(|one| one.is_ascii_hexdigit()))
            .ok_or_else(|| malformed("invalid byte in chunk length".to_owned()))?;
        *self = Framing::Chunk(size);
        if size == 0 {
            // Trailers.
            let mut rest = reader.by_ref().take(MAX_CHUNK_LINE_BYTES);
            while !line(&mut rest)?.is_empty() {}
            *self = Framing::Done;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<(u16, Vec<u8>, bool), String> {
        let mut reader = io::BufReader::with_capacity(7, text);
        let told = |error: io::Error| match error.get_ref() {
            Some(inner) => inner.to_string(),
            None => error.kind().to_string(),
        };
        let mut head = head(&mut reader).map_err(told)?;
        let mut body = Vec::new();
        loop {
            let there = head.framing.fill(&mut reader).map_err(told)?;
            if there.is_empty() {
                break;
            }
            body.extend_from_slice(&there[..there.len().min(5)]);
            let count = there.len().min(5);
            head.framing.consume(&mut reader, count);
        }
        assert_eq!(head.framing, Framing::Done);
        Ok((head.status, body, head.close))
    }

    #[test]
    fn answers_of_all_kinds() {
        let ok = |status: u16, body: &[u8], close: bool| Ok((status, body.to_vec(), close));
        let bad = |text: &str| Err(text.to_owned());
        let chunked = |rest: &str| format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{rest}");
        let cases = [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi there".to_owned(), ok(200, b"hi", false)),
            ("HTTP/1.1 200\r\nContent-Length: 0\r\nConnection: x, Close\r\n\r\n".to_owned(), ok(200, b"", true)),
            ("HTTP/1.0 500 \nX: y\n\nto the end".to_owned(), ok(500, b"to the end", true)),
            (
                "HTTP/1.0 200 \nConnection: keep-alive\nContent-Length: 1\n\nx".to_owned(),
                ok(200, b"x", false),
            ),
            (
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\nContent-Length: 9\r\n\r\n".to_owned(),
                ok(204, b"", false),
            ),
            (chunked("3;x=y\r\nabc\r\n4\r\ndefg\r\n0\r\nTrailer: x\r\n\r\n"), ok(200, b"abcdefg", false)),
            (chunked("0\r\n\r\n"), ok(200, b"", false)),
            (chunked("3\r\nab"), bad("unexpected end of file")),
            (chunked("3\r\nabc\r\n"), bad("unexpected end of file")),
            (chunked("-1\r\n"), bad("invalid byte in chunk length")),
            (chunked("ffffffffffffffffff\r\n"), bad("invalid byte in chunk length")),
            (chunked("1\r\nabc"), bad("server response headers are too long; aborted")),
            ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi".to_owned(), bad("unexpected end of file")),
            ("HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nhi".to_owned(), bad("bad Content-Length \"+2\"")),
            (
                "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n".to_owned(),
                bad("content encoding \"gzip\" was not asked for"),
            ),
            ("HTTP/2 200 OK\r\n\r\n".to_owned(), bad("malformed HTTP response \"HTTP/2 200 OK\"")),
            ("HTTP/1.1 2x0 OK\r\n\r\n".to_owned(), bad("malformed HTTP response \"HTTP/1.1 2x0 OK\"")),
            (String::new(), bad("unexpected end of file")),
        ];
        for (text, expected) in cases {
            assert_eq!(read(text.as_bytes()), expected, "{text:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_answered(text in "(HTTP/1\\.[01] [0-9]{3}\r\n)?[-a-zA-Z:; 0-9\r\n]{0,200}") {
            let _ = read(text.as_bytes());
        }
    }
}
