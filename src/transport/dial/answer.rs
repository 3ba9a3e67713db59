//! Reading an HTTP/1 answer, as much of it as a caller wants.

use std::io::{self, BufRead, Read};

/// All header lines together.
const MAX_HEAD_BYTES: u64 = 256 * 1024;
/// Interim answers (100 Continue, 103 Early Hints) before the real one.
const MAX_INTERIM: usize = 5;

/// Why an answer cannot be read.
#[derive(Debug)]
pub(super) enum Fault {
    Io(io::Error),
    Malformed(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Fault::Io(error)
    }
}

/// How the end of a body shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    Length(u64),
    Chunked,
    Close,
}

/// What the lines before the body say.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) status: u16,
    pub(super) location: Option<String>,
    framing: Framing,
}

/// Reads the head of the final answer.
pub(super) fn head(reader: &mut impl BufRead) -> Result<Head, Fault> {
    for _ in 0..=MAX_INTERIM {
        let head = one_head(reader)?;
        if !(100..200).contains(&head.status) || head.status == 101 {
            return Ok(head);
        }
    }
    Err(Fault::Malformed("too many 1xx informational responses".to_owned()))
}

fn one_head(reader: &mut impl BufRead) -> Result<Head, Fault> {
    let mut reader = reader.take(MAX_HEAD_BYTES);
    let status = status(&line(&mut reader)?)?;
    let (mut location, mut length, mut chunked) = (None, None, false);
    loop {
        let line = line(&mut reader)?;
        if line.is_empty() {
            break;
        }
        let Some((name, value)) = line.split_once(':') else {
            return Err(Fault::Malformed(format!("malformed MIME header line: {}", cut(&line))));
        };
        let value = value.trim();
        if name.eq_ignore_ascii_case("Location") && location.is_none() && !value.is_empty() {
            location = Some(value.to_owned());
        } else if name.eq_ignore_ascii_case("Content-Length") {
            let number = value.parse::<u64>().ok().filter(|_| value.bytes().all(|b| b.is_ascii_digit()));
            length = Some(number.ok_or_else(|| Fault::Malformed(format!("bad Content-Length {value:?}")))?);
        } else if name.eq_ignore_ascii_case("Transfer-Encoding") {
            if !value.eq_ignore_ascii_case("chunked") {
                return Err(Fault::Malformed(format!("unsupported transfer encoding: {value:?}")));
            }
            chunked = true;
        }
    }
    let framing = match (status, chunked, length) {
        (204 | 304, ..) => Framing::Length(0),
        (_, true, _) => Framing::Chunked,
        (_, false, Some(length)) => Framing::Length(length),
        (_, false, None) => Framing::Close,
    };
    Ok(Head { status, location, framing })
}

fn status(line: &str) -> Result<u16, Fault> {
    let malformed = || Fault::Malformed(format!("malformed HTTP response {:?}", cut(line)));
    let (protocol, rest) = line.split_once(' ').ok_or_else(malformed)?;
    let code = rest.trim_start().split(' ').next().unwrap_or_default();
    if code.len() != 3 || !code.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Fault::Malformed(format!("malformed HTTP status code {:?}", cut(code))));
    }
    if !protocol.starts_with("HTTP/1.") {
        return Err(Fault::Malformed(format!("malformed HTTP version {:?}", cut(protocol))));
    }
    code.parse().map_err(|_| malformed())
}

/// One line without its end.
fn line(reader: &mut io::Take<impl BufRead>) -> Result<String, Fault> {
    let mut bytes = Vec::new();
    reader.read_until(b'\n', &mut bytes)?;
    if bytes.pop() != Some(b'\n') {
        if reader.limit() == 0 {
            return Err(Fault::Malformed(
                "server response headers exceeded 262144 bytes; aborted".to_owned(),
            ));
        }
        return Err(Fault::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    if bytes.last() == Some(&b'\r') {
        bytes.pop();
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn cut(text: &str) -> &str {
    text.get(..text.floor_char_boundary(200)).unwrap_or_default()
}

/// Reads up to `max` bytes of the body; what follows stays unread.
pub(super) fn body(reader: &mut impl BufRead, head: &Head, max: usize) -> Result<Vec<u8>, Fault> {
    let mut body = Vec::new();
    let max = max as u64;
    match head.framing {
        Framing::Length(length) => {
            let wanted = length.min(max);
            if reader.take(wanted).read_to_end(&mut body)? as u64 != wanted {
                return Err(Fault::Io(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        Framing::Close => {
            reader.take(max).read_to_end(&mut body)?;
        }
        Framing::Chunked => loop {
            let size = line(&mut reader.take(4096))?;
            let digits = size.split(';').next().unwrap_or_default().trim();
            let size = u64::from_str_radix(digits, 16)
                .ok()
                .filter(|_| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
                .ok_or_else(|| Fault::Malformed("invalid byte in chunk length".to_owned()))?;
            let wanted = size.min(max.saturating_sub(body.len() as u64));
            if reader.take(wanted).read_to_end(&mut body)? as u64 != wanted {
                return Err(Fault::Io(io::ErrorKind::UnexpectedEof.into()));
            }
            if size == 0 || body.len() as u64 >= max {
                break;
            }
            let mut end = [0; 2];
            reader.read_exact(&mut end)?;
            if end != *b"\r\n" {
                return Err(Fault::Malformed("malformed chunked encoding".to_owned()));
            }
        },
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Read = Result<(u16, Vec<u8>), String>;

    fn read(text: &[u8]) -> Read {
        let mut reader = io::BufReader::with_capacity(7, text);
        let told = |fault| match fault {
            Fault::Io(error) => error.kind().to_string(),
            Fault::Malformed(what) => what,
        };
        let head = head(&mut reader).map_err(told)?;
        let body = body(&mut reader, &head, 8).map_err(told)?;
        Ok((head.status, body))
    }

    #[test]
    fn answers_of_all_kinds() {
        let ok = |status: u16, body: &[u8]| Ok((status, body.to_vec()));
        let bad = |text: &str| Err(text.to_owned());
        let cases: &[(&[u8], Read)] = &[
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi there", ok(200, b"hi")),
            (b"HTTP/1.0 500 \nX: y\n\nto the end", ok(500, b"to the e")),
            (b"HTTP/1.1 404\r\ncontent-length: 20\r\n\r\n12345678more", ok(404, b"12345678")),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\nContent-Length: 9\r\n\r\n", ok(204, b"")),
            (b"HTTP/1.1 101 Switching\r\n\r\n", ok(101, b"")),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
                ok(200, b"abcde"),
            ),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n123456789", ok(200, b"12345678")),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
                bad("invalid byte in chunk length"),
            ),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
                bad("malformed chunked encoding"),
            ),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: br\r\n\r\n",
                bad("unsupported transfer encoding: \"br\""),
            ),
            (b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nhi", bad("bad Content-Length \"+2\"")),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi", bad("unexpected end of file")),
            (b"", bad("unexpected end of file")),
            (b"HTTP/1.1 200 OK\r\n", bad("unexpected end of file")),
            (b"SSH-2.0-x\r\n", bad("malformed HTTP response \"SSH-2.0-x\"")),
            (b"HTTP/1.1 2x0 OK\r\n\r\n", bad("malformed HTTP status code \"2x0\"")),
            (b"HTTP/2 200 OK\r\n\r\n", bad("malformed HTTP version \"HTTP/2\"")),
            (b"HTTP/1.1 200 OK\r\nnothing\r\n\r\n", bad("malformed MIME header line: nothing")),
        ];
        for (text, expected) in cases {
            assert_eq!(&read(text), expected, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn heads_are_bounded() {
        let endless = [b"HTTP/1.1 200 OK\r\nX: ".as_slice(), &vec![b'x'; 300 * 1024]].concat();
        assert!(read(&endless).unwrap_err().contains("exceeded"));
        assert!(read(&b"HTTP/1.1 103 Early\r\n\r\n".repeat(20)).unwrap_err().contains("1xx"));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_answered(bytes: Vec<u8>) {
            let _ = read(&[b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".as_slice(), &bytes].concat());
            let _ = read(&bytes);
        }
    }
}
