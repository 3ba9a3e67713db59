//! The head of a response, as a client reads it.

use std::io::{self, BufRead, Read};

use super::body::{Chunks, Framing};
use super::fields::Fields;

use crate::util::clip;

/// The limit of status line and fields together.
const MAX_HEAD_BYTES: u64 = 256 * 1024;
const MAX_FIELDS: usize = 1000;
/// The limit of interim responses (100 Continue, 103 Early Hints) before the final one.
/// DIFFERS: Go has a limit for the bytes of each head only, 10 MiB.
pub(in crate::transport) const MAX_INTERIM: usize = 100;
/// The longest part of a line in an error.
const SHOWN_BYTES: usize = 200;

/// The peer's data is not HTTP/1. Contained in an [`io::Error`] of the kind `InvalidData`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub String);

impl From<Malformed> for io::Error {
    fn from(error: Malformed) -> Self {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}

impl Malformed {
    /// Whether `error` contains this error.
    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Malformed>())
    }
}

/// The head of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseHead {
    /// The status code.
    pub status: u16,
    /// The text after the status code; may be empty.
    pub reason: String,
    /// HTTP/1.1 or later, not 1.0.
    pub is_1_1: bool,
    /// The fields.
    pub fields: Fields,
}

impl ResponseHead {
    /// Reads the head of the final response; interim ones are skipped.
    ///
    /// # Errors
    /// Errors of the reader, `UnexpectedEof` when it ends too early, and [`Malformed`].
    pub fn read(reader: &mut impl BufRead) -> io::Result<ResponseHead> {
        for _ in 0..=MAX_INTERIM {
            let head = ResponseHead::parse(&read_bytes(reader)?)?;
            if !(100..200).contains(&head.status) || head.status == 101 {
                return Ok(head);
            }
        }
        Err(Malformed("too many 1xx informational responses".to_owned()).into())
    }

    /// Parses a head with the empty line at its end.
    ///
    /// # Errors
    /// When it is invalid; worded as by Go's client.
    pub fn parse(bytes: &[u8]) -> Result<ResponseHead, Malformed> {
        let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
        let (first, lines) = bytes.split_at(end);
        let (status, reason, is_1_1) = status_line(first)?;
        match Fields::parse(lines.get(1..).unwrap_or_default(), MAX_FIELDS) {
            Ok(Some(fields)) => Ok(ResponseHead { status, reason, is_1_1, fields }),
            Ok(None) => Err(Malformed("too many header fields".to_owned())),
            Err(line) => {
                let line = String::from_utf8_lossy(line);
                Err(Malformed(format!("malformed MIME header line: {}", cut(&line))))
            }
        }
    }
    /// Whether the server closes the connection after this response.
    pub fn closes(&self) -> bool {
        let close = self.fields.has_element("connection", "close");
        close || !(self.is_1_1 || self.fields.has_element("connection", "keep-alive"))
    }

    /// The framing of the body.
    ///
    /// # Errors
    /// When the fields give no valid length.
    pub fn framing(&self) -> Result<Framing, Malformed> {
        let text = |value: &[u8]| cut(&String::from_utf8_lossy(value)).to_owned();
        // HTTP/1.0 has no transfer encodings; a body with this field ends with the connection.
        let mut encodings = self.fields.all("transfer-encoding").filter(|_| self.is_1_1);
        let encoding = encodings.next();
        if let Some(other) = encoding.filter(|value| !value.eq_ignore_ascii_case(b"chunked")) {
            return Err(Malformed(format!("unsupported transfer encoding: {:?}", text(other))));
        }
        if encodings.next().is_some() {
            return Err(Malformed("too many transfer encodings".to_owned()));
        }
        let is_chunked = encoding.is_some();
        let mut lengths = self.fields.all("content-length").map(<[u8]>::trim_ascii);
        let mut length = None;
        if let Some(first) = lengths.next() {
            let bad = || Malformed(format!("bad Content-Length {:?}", text(first)));
            if let Some(other) = lengths.find(|other| *other != first) {
                return Err(Malformed(format!(
                    "http: message cannot contain multiple Content-Length headers; got {:?} and {:?}",
                    text(first),
                    text(other)
                )));
            }
            let digits = first.iter().all(u8::is_ascii_digit);
            let number = std::str::from_utf8(first).ok().filter(|_| digits);
            let number = number.and_then(|text| text.parse::<i64>().ok()).ok_or_else(bad)?;
            length = Some(number.unsigned_abs());
        }
        let of_framing = |key: &&str| {
            ["transfer-encoding", "trailer", "content-length"]
                .iter()
                .any(|name| key.eq_ignore_ascii_case(name))
        };
        if let Some(key) = self.fields.elements("trailer").find(of_framing).filter(|_| is_chunked) {
            return Err(Malformed(format!("bad trailer key {:?}", cut(key))));
        }
        Ok(match (self.status, length) {
            (100..=199 | 204 | 304, _) => Framing::length(0),
            _ if is_chunked => Framing::chunked(Chunks::Lenient),
            (_, Some(length)) => Framing::length(length),
            (_, None) => Framing::until_close(),
        })
    }
}

/// Reads one head as it arrives, with the empty line at its end.
///
/// # Errors
/// Errors of the reader, `UnexpectedEof` when it ends too early, and [`Malformed`] as soon as the
/// first line is not HTTP: such a peer may never send an empty line.
pub fn read_bytes(reader: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut reader = reader.take(MAX_HEAD_BYTES);
    loop {
        let from = bytes.len();
        reader.read_until(b'\n', &mut bytes)?;
        let line = bytes.get(from..).unwrap_or_default();
        if !line.ends_with(b"\n") {
            return Err(match reader.limit() {
                0 => {
                    let text = format!("server response headers exceeded {MAX_HEAD_BYTES} bytes; aborted");
                    Malformed(text).into()
                }
                _ => io::ErrorKind::UnexpectedEof.into(),
            });
        }
        if from == 0 {
            status_line(line.strip_suffix(b"\n").unwrap_or(line))?;
        }
        if matches!(line, b"\r\n" | b"\n") {
            return Ok(bytes);
        }
    }
}

/// Status, reason, and whether it is HTTP/1.1 or later, of a first line with or without CR (Go:
/// net/http `ReadResponse`, `ParseHTTPVersion`).
fn status_line(line: &[u8]) -> Result<(u16, String, bool), Malformed> {
    let line = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line));
    let Some((version, rest)) = line.split_once(' ') else {
        return Err(Malformed(format!("malformed HTTP response {:?}", cut(&line))));
    };
    let rest = rest.trim_start_matches(' ');
    let (code, reason) = rest.split_once(' ').unwrap_or((rest, ""));
    let status = Some(code).filter(|code| code.len() == 3 && !code.starts_with("-") || *code == "-00");
    let status = status.and_then(|code| code.trim_start_matches('-').parse::<u16>().ok());
    let Some(status) = status else {
        return Err(Malformed(format!("malformed HTTP status code {:?}", cut(code))));
    };
    let is_1_1 = match version.as_bytes() {
        [b'H', b'T', b'T', b'P', b'/', major @ b'0'..=b'9', b'.', minor @ b'0'..=b'9'] => {
            (*major, *minor) >= (b'1', b'1') || (*major, *minor) == (b'0', b'0')
        }
        _ => return Err(Malformed(format!("malformed HTTP version {:?}", cut(version)))),
    };
    Ok((status, reason.to_owned(), is_1_1))
}

fn cut(text: &str) -> &str {
    clip::beginning(text, SHOWN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Read = Result<(u16, Vec<u8>, bool), String>;

    /// Status, body up to `max` bytes and whether the connection is closed after it.
    fn read(text: &[u8], max: usize) -> Read {
        let words = |error: io::Error| match error.get_ref() {
            Some(inner) => inner.to_string(),
            None => error.kind().to_string(),
        };
        let mut reader = io::BufReader::with_capacity(7, text);
        let head = ResponseHead::read(&mut reader).map_err(words)?;
        let mut framing = head.framing().map_err(|error| error.0)?;
        let body = framing.read_up_to(&mut reader, max).map_err(words)?;
        assert!(framing.is_done() || body.len() == max);
        Ok((head.status, body, head.closes()))
    }

    #[test]
    fn responses_of_all_kinds_are_read() {
        let ok = |status: u16, body: &[u8], close: bool| Ok((status, body.to_vec(), close));
        let bad = |text: &str| Err(text.to_owned());
        let chunked = |rest: &str| format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{rest}");
        for (text, expected) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi there".to_owned(), ok(200, b"hi", false)),
            (
                "HTTP/1.1 200\r\nContent-Length: 0\r\nConnection: x, Close\r\n\r\n".to_owned(),
                ok(200, b"", true),
            ),
            ("HTTP/1.0 500 \nX: y\n\nto the end".to_owned(), ok(500, b"to the e", true)),
            (
                "HTTP/1.1  404 \r\ncontent-length: 20\r\n\r\n12345678more".to_owned(),
                ok(404, b"12345678", false),
            ),
            (
                "HTTP/1.0 200 \nConnection: keep-alive\nContent-Length: 1\n\nx".to_owned(),
                ok(200, b"x", false),
            ),
            (
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\nContent-Length: 9\r\n\r\n".to_owned(),
                ok(204, b"", false),
            ),
            ("HTTP/1.1 101 Switching\r\n\r\n".to_owned(), ok(101, b"", false)),
            ("HTTP/1.1 200 OK\r\nContent-Length : 1\r\nX: \u{e4}\r\n\r\nx".to_owned(), ok(200, b"x", false)),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx".to_owned(),
                ok(200, b"x", false),
            ),
            // A blank is a part of the name, as in Go.
            ("HTTP/1.1 200 OK\r\nX Y: z\r\nContent-Length: 1\r\n\r\nx".to_owned(), ok(200, b"x", false)),
            (
                "HTTP/1.1 200 OK\r\nX: y;\r\n  z\r\n\t\r\nContent-Length:\r\n 1\r\n\r\nx".to_owned(),
                ok(200, b"x", false),
            ),
            ("HTTP/1.2 200 O\u{1b}K\r\nContent-Length: 1\r\n\r\nx".to_owned(), ok(200, b"x", false)),
            (
                "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx".to_owned(),
                ok(200, b"1\r\nx", true),
            ),
            (chunked("3;x=y\r\nabc\r\n4\r\ndefg\r\n0\r\nTrailer: x\r\n\r\n"), ok(200, b"abcdefg", false)),
            (chunked("ffff\r\n123456789"), ok(200, b"12345678", false)),
            (chunked("0\r\n\r\n"), ok(200, b"", false)),
            (chunked("3\r\nab"), bad("unexpected end of file")),
            (chunked("3\r\nabc\r\n"), bad("unexpected end of file")),
            (chunked("-1\r\n"), bad("invalid byte in chunk length")),
            (chunked("ffffffffffffffffff\r\n"), bad("invalid byte in chunk length")),
            (chunked("1\nx\r\n0\r\n\r\n"), bad("malformed chunked encoding")),
            (chunked("0\r\nTrailer\r\n\r\n"), bad("malformed trailer after chunked body")),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"
                    .to_owned(),
                bad("too many transfer encodings"),
            ),
            (" HTTP/1.1 200 OK\r\n\r\n".to_owned(), bad("malformed HTTP status code \"HTTP/1.1\"")),
            ("HTTP/1.1 200 OK\r\n X: y\r\n\r\n".to_owned(), bad("malformed MIME header line:  X: y")),
            (chunked("1\r\nabc"), bad("malformed chunked encoding")),
            ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi".to_owned(), bad("unexpected end of file")),
            ("HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nhi".to_owned(), bad("bad Content-Length \"+2\"")),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nhi".to_owned(),
                bad("http: message cannot contain multiple Content-Length headers; got \"1\" and \"2\""),
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: br\r\n\r\n".to_owned(),
                bad("unsupported transfer encoding: \"br\""),
            ),
            (String::new(), bad("unexpected end of file")),
            ("HTTP/1.1 200 OK\r\n".to_owned(), bad("unexpected end of file")),
            ("SSH-2.0-x\r\n".to_owned(), bad("malformed HTTP response \"SSH-2.0-x\"")),
            ("\r\n".to_owned(), bad("malformed HTTP response \"\"")),
            ("HTTP/1.1 2x0 OK\r\n\r\n".to_owned(), bad("malformed HTTP status code \"2x0\"")),
            ("HTTP/1.1 2000 OK\r\n\r\n".to_owned(), bad("malformed HTTP status code \"2000\"")),
            ("HTTP/2 200 OK\r\n\r\n".to_owned(), bad("malformed HTTP version \"HTTP/2\"")),
            (
                "HTTP/1.1 200 OK\r\nX: y\r\nnothing\r\n\r\n".to_owned(),
                bad("malformed MIME header line: nothing"),
            ),
            ("HTTP/1.1 200 OK\r\nX: \u{7}\r\n\r\n".to_owned(), bad("malformed MIME header line: X: \u{7}")),
        ] {
            assert_eq!(read(text.as_bytes(), 8), expected, "{text:?}");
        }
    }

    #[test]
    fn response_heads_beyond_a_limit_are_rejected() {
        let long = [b"HTTP/1.1 200 OK\r\nX: ".as_slice(), &vec![b'x'; 300 * 1024]].concat();
        assert!(read(&long, 8).unwrap_err().contains("exceeded"));
        assert!(read(&b"HTTP/1.1 103 Early\r\n\r\n".repeat(MAX_INTERIM + 1), 8).unwrap_err().contains("1xx"));
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "X: y\r\n".repeat(MAX_FIELDS + 1));
        assert_eq!(read(many.as_bytes(), 8), Err("too many header fields".to_owned()));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_or_an_error(
            text in "(HTTP/1\\.[01] [0-9]{3}\r\n)?[-a-zA-Z:; 0-9\r\n]{0,200}",
            bytes: Vec<u8>,
        ) {
            let _ = read(text.as_bytes(), 8);
            let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
            let _ = read(&[chunked.as_slice(), &bytes].concat(), usize::MAX);
            let _ = read(&bytes, usize::MAX);
        }
    }
}
