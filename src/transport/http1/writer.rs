//! A server's response: its head, and its body framed as the client's version allows.

use std::io::{self, Cursor, Write};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use tiny_http::HTTPVersion;
pub use tiny_http::{Header, StatusCode};

use crate::util::tracing;

/// The largest amount of data that is buffered before it is written. With its frame a chunk has
/// 64 KiB: a TLS connection takes no more in one call.
const BUFFER_BYTES: usize = 64 * 1024 - SIZE_LINE - 2;
/// A body up to this length is written together with its head.
const SHORT_BODY_BYTES: usize = 16 * 1024;
/// Space before a chunk for its size (8 digits are 4 GiB) and the line's end.
const SIZE_LINE: usize = 10;

const SERVER: (&str, &str) = ("Server", "coracle");
const LINE_END: &str = "\r\n";

/// A response whose body is complete.
pub type BufferedResponse = tiny_http::Response<Cursor<Vec<u8>>>;

/// What determines the form of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// The client supports HTTP/1.1: a body of unknown length is sent in chunks.
    pub is_1_1: bool,
    /// The connection may be used for another request.
    pub keep_alive: bool,
    /// The request was a HEAD: the body is left out.
    pub head_only: bool,
}

/// Writes one response. A body that is not [finished](ResponseWriter::finish) is visibly incomplete
/// for a client of HTTP/1.1.
pub struct ResponseWriter<'a> {
    out: &'a mut dyn Write,
    form: Form,
    date: Timestamp,
    body: Body,
    /// The part of the body that was not sent yet; a chunk begins after [`SIZE_LINE`] bytes.
    buffer: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    /// The head was not written yet.
    None,
    /// The number of bytes that are missing.
    Length(u64),
    Chunked,
    UntilClose,
    /// The written bytes are dropped.
    LeftOut,
}

impl<'a> ResponseWriter<'a> {
    /// A response that goes to `out`.
    pub fn new(out: &'a mut dyn Write, form: Form, date: Timestamp) -> Self {
        ResponseWriter { out, form, date, body: Body::None, buffer: Vec::new() }
    }

    /// Whether the head was written.
    pub fn has_started(&self) -> bool {
        self.body != Body::None
    }

    /// Writes the head and sends it immediately. `length` is the body's, if it is known.
    ///
    /// # Errors
    /// Errors of the output.
    pub fn start(&mut self, status: u16, fields: &[(&str, &str)], length: Option<u64>) -> io::Result<()> {
        self.begin(length);
        tracing::note_status(status);
        let phrase = StatusCode(status).default_reason_phrase();
        let mut head = format!("HTTP/1.1 {status} {phrase}\r\n");
        let mut push = |name: &str, value: &str| {
            for part in [name, ": ", value, "\r\n"] {
                head.push_str(part);
            }
        };
        let date = self.date();
        for (name, value) in [SERVER, ("Date", date.as_str())].iter().chain(fields) {
            push(name, value);
        }
        match length {
            Some(length) => push("Content-Length", &length.to_string()),
            None if self.body == Body::Chunked => push("Transfer-Encoding", "chunked"),
            None => {}
        }
        head.push_str(self.end());
        self.out.write_all(head.as_bytes())?;
        self.out.flush()
    }

    /// Writes a response with a complete body, and sends it.
    ///
    /// # Errors
    /// Errors of the output.
    pub fn write_response(&mut self, response: BufferedResponse) -> io::Result<()> {
        let (status, fields) = (response.status_code(), response.headers().to_vec());
        let body = response.into_reader().into_inner();
        tracing::note_status(status.0);
        self.begin(Some(body.len() as u64));
        let date = self.date();
        let own = [SERVER, ("Date", date.as_str())];
        let own = own.iter().filter_map(|(name, value)| Header::from_bytes(*name, *value).ok());
        let mut head = Vec::new();
        // The body follows separately: raw_print copies it in small pieces.
        tiny_http::Response::new(status, own.chain(fields).collect(), io::empty(), Some(body.len()), None)
            .with_chunked_threshold(usize::MAX)
            .raw_print(&mut head, HTTPVersion(1, 1), &[], true, None)?;
        // The library's server decides about the connection; a response cannot have this field.
        head.truncate(head.len().saturating_sub(LINE_END.len()));
        head.extend_from_slice(self.end().as_bytes());
        let body = if self.body == Body::LeftOut { &[] } else { body.as_slice() };
        if body.len() <= SHORT_BODY_BYTES {
            head.extend_from_slice(body);
            self.out.write_all(&head)?;
        } else {
            self.out.write_all(&head)?;
            self.out.write_all(body)?;
        }
        if let Body::Length(left) = &mut self.body {
            *left = 0;
        }
        self.out.flush()
    }

    /// Ends the body and sends the rest of it. True: the connection may be used for another
    /// request.
    ///
    /// # Errors
    /// Errors of the output, and when the body is shorter than was announced.
    pub fn finish(mut self) -> io::Result<bool> {
        match self.body {
            Body::None | Body::Length(1..) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Body::Chunked | Body::Length(0) | Body::UntilClose | Body::LeftOut => {}
        }
        let from = self.frame();
        if self.body == Body::Chunked {
            self.buffer.extend_from_slice(b"0\r\n\r\n");
        }
        self.out.write_all(self.buffer.get(from..).unwrap_or_default())?;
        self.out.flush()?;
        Ok(self.form.keep_alive)
    }

    /// Determines how the body is framed.
    fn begin(&mut self, length: Option<u64>) {
        let Form { is_1_1, head_only, .. } = self.form;
        self.body = match length {
            _ if head_only => Body::LeftOut,
            Some(length) => Body::Length(length),
            None if is_1_1 => Body::Chunked,
            None => Body::UntilClose,
        };
        self.form.keep_alive &= self.body != Body::UntilClose;
    }

    fn date(&self) -> String {
        self.date.to_zoned(TimeZone::UTC).strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
    }

    /// The end of the head.
    fn end(&self) -> &'static str {
        match (self.form.keep_alive, self.form.is_1_1) {
            (true, false) => "Connection: keep-alive\r\n\r\n",
            (false, true) => "Connection: close\r\n\r\n",
            _ => LINE_END,
        }
    }

    /// Writes the size before the chunk in the buffer, and a line end after it. Returns the start
    /// of the bytes to send.
    fn frame(&mut self) -> usize {
        let size = self.buffer.len().saturating_sub(SIZE_LINE);
        if self.body != Body::Chunked || size == 0 {
            return 0;
        }
        let line = format!("{size:x}\r\n");
        let from = SIZE_LINE.saturating_sub(line.len());
        if let Some(place) = self.buffer.get_mut(from..SIZE_LINE) {
            place.copy_from_slice(line.as_bytes());
        }
        self.buffer.extend_from_slice(b"\r\n");
        from
    }

    /// Sends the content of the buffer.
    fn send(&mut self) -> io::Result<()> {
        let from = self.frame();
        let sent = self.out.write_all(self.buffer.get(from..).unwrap_or_default());
        self.buffer.clear();
        sent
    }
}

impl Write for ResponseWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let reserved = if self.body == Body::Chunked { SIZE_LINE } else { 0 };
        if bytes.is_empty() {
            return Ok(0);
        }
        if self.buffer.is_empty() {
            self.buffer.resize(reserved, 0);
        }
        let room = (BUFFER_BYTES + reserved).saturating_sub(self.buffer.len());
        let count = bytes.len().min(room);
        match &mut self.body {
            Body::None => return Err(io::Error::other("a body without a head")),
            Body::LeftOut => return Ok(bytes.len()),
            Body::Length(left) => match left.checked_sub(count as u64) {
                Some(less) => *left = less,
                None => return Err(io::Error::other("a body longer than was announced")),
            },
            Body::Chunked | Body::UntilClose => {}
        }
        self.buffer.extend_from_slice(bytes.get(..count).unwrap_or_default());
        if count == room {
            self.send()?;
        }
        Ok(count)
    }

    /// Sends the written bytes, and frees the buffer: more may follow much later.
    fn flush(&mut self) -> io::Result<()> {
        if !self.buffer.is_empty() {
            self.send()?;
            self.buffer = Vec::new();
        }
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: Form = Form { is_1_1: true, keep_alive: true, head_only: false };
    const OLD: Form = Form { is_1_1: false, ..FORM };

    /// The response without `Server` and `Date`, and whether the connection may be used again.
    fn written(
        form: Form,
        respond: impl FnOnce(&mut ResponseWriter<'_>) -> io::Result<()>,
    ) -> (String, Option<bool>) {
        let mut out = Vec::new();
        let mut writer = ResponseWriter::new(&mut out, form, Timestamp::UNIX_EPOCH);
        let outcome = respond(&mut writer).and_then(|()| writer.finish()).ok();
        let text = String::from_utf8(out).unwrap();
        let ours = "Server: coracle\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n";
        assert_eq!(text.matches(ours).count(), usize::from(!text.is_empty()), "{text}");
        (text.replace(ours, ""), outcome)
    }

    fn stream(pieces: &'static [&'static str]) -> impl Fn(&mut ResponseWriter<'_>) -> io::Result<()> {
        move |out| {
            out.start(200, &[("A", "b")], None)?;
            pieces.iter().try_for_each(|piece| out.write_all(piece.as_bytes()).and_then(|()| out.flush()))
        }
    }

    #[test]
    fn whole_bodies_have_their_length() {
        let whole = |form| {
            written(form, |out| {
                let field = Header::from_bytes("A", "b").unwrap();
                out.write_response(
                    BufferedResponse::from_data("abc").with_status_code(404).with_header(field),
                )
            })
        };
        let head = "HTTP/1.1 404 Not Found\r\nA: b\r\nContent-Length: 3\r\n";
        assert_eq!(whole(FORM), (format!("{head}\r\nabc"), Some(true)));
        let close = Form { keep_alive: false, ..FORM };
        assert_eq!(whole(close), (format!("{head}Connection: close\r\n\r\nabc"), Some(false)));
        assert_eq!(whole(OLD), (format!("{head}Connection: keep-alive\r\n\r\nabc"), Some(true)));
        assert_eq!(whole(Form { keep_alive: false, ..OLD }), (format!("{head}\r\nabc"), Some(false)));
        assert_eq!(whole(Form { head_only: true, ..FORM }), (format!("{head}\r\n"), Some(true)));
        let long = vec![b'x'; 3 * BUFFER_BYTES];
        let (text, _) = written(FORM, |out| out.write_response(BufferedResponse::from_data(long.as_slice())));
        assert_eq!(text.len(), "HTTP/1.1 200 OK\r\nContent-Length: 196608\r\n\r\n".len() + long.len());
    }

    #[test]
    fn bodies_of_unknown_length_are_framed_as_the_client_understands() {
        let head = "HTTP/1.1 200 OK\r\nA: b\r\n";
        let pieces = stream(&["ab", "", "cde"]);
        let chunks = format!("{head}Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n");
        assert_eq!(written(FORM, &pieces), (chunks, Some(true)));
        assert_eq!(written(OLD, &pieces), (format!("{head}\r\nabcde"), Some(false)));
        let head_only = Form { head_only: true, ..FORM };
        assert_eq!(written(head_only, &pieces), (format!("{head}\r\n"), Some(true)));
        let empty = format!("{head}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n");
        assert_eq!(written(FORM, stream(&[])), (empty, Some(true)));
        // The last piece and the end are sent together, without a flush.
        let (text, _) = written(FORM, |out| {
            out.start(200, &[], None)?;
            out.write_all(b"ab")
        });
        assert!(text.ends_with("\r\n\r\n2\r\nab\r\n0\r\n\r\n"), "{text}");
    }

    #[test]
    fn incomplete_body_has_no_end() {
        let fails = |out: &mut ResponseWriter<'_>| {
            out.start(200, &[], None)?;
            out.write_all(b"ab")?;
            out.flush()?;
            Err(io::ErrorKind::InvalidData.into())
        };
        let (text, outcome) = written(FORM, fails);
        assert!(outcome.is_none() && text.ends_with("2\r\nab\r\n"), "{text}");
        let announced = |length, body: &'static [u8]| {
            written(FORM, move |out| {
                out.start(200, &[], Some(length))?;
                out.write_all(body)
            })
        };
        assert_eq!(announced(2, b"ab").1, Some(true));
        assert_eq!(announced(3, b"ab").1, None);
        // The client would parse bytes after it as another response.
        assert_eq!(announced(1, b"ab").1, None);
        assert_eq!(written(FORM, |out| out.write_all(b"a")).1, None, "without a head");
    }

    proptest::proptest! {
        #[test]
        fn chunks_are_read_as_they_were_written(
            pieces in proptest::collection::vec((0..3 * BUFFER_BYTES / 2, proptest::bool::ANY), 0..6),
        ) {
            let (mut out, mut expected) = (Vec::new(), Vec::new());
            let mut writer = ResponseWriter::new(&mut out, FORM, Timestamp::UNIX_EPOCH);
            writer.start(200, &[], None).unwrap();
            for (number, (length, flush)) in pieces.into_iter().enumerate() {
                let piece = vec![b'a' + number as u8; length];
                writer.write_all(&piece).unwrap();
                expected.extend(piece);
                if flush {
                    writer.flush().unwrap();
                }
            }
            assert!(writer.finish().unwrap());
            let mut reader = out.as_slice();
            super::super::response::read_bytes(&mut reader).unwrap();
            let mut framing = super::super::Framing::chunked(super::super::body::Chunks::Strict);
            assert!(framing.read_up_to(&mut reader, usize::MAX).unwrap() == expected && reader.is_empty());
        }
    }
}
