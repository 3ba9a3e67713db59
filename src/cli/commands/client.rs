//! Requests to the agent's Unix socket. In HTTP/1.0: a stream is not sent in chunks.

use std::convert::Infallible;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::model::typed;
use crate::server::connect_local;
use crate::transport::http1::{Malformed, RequestWriter, ResponseHead};
use crate::util::encoding::escape_percent;

use super::error::CommandError;

/// A response may need a runtime call, whose limit is two minutes.
const RESPONSE_LIMIT: Duration = Duration::from_secs(130);

/// A request has a few hundred bytes; sending it takes long only if the agent hangs.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// The limit of a whole response; 500 large pods are about 10 MB.
const RESPONSE_BYTES: usize = 256 * 1024 * 1024;

/// How long a read waits for the next byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadTimeout {
    /// [`RESPONSE_LIMIT`], or that of [`Client::with_limit`].
    Response,
    /// No limit, for streams.
    None,
}

/// A client of the agent's local socket.
#[derive(Debug, Clone)]
pub(super) struct Client {
    socket: PathBuf,
    limit: Duration,
}

/// A response whose body is still to be read.
pub(super) struct Response {
    head: ResponseHead,
    pub body: BufReader<Uninterrupted<UnixStream>>,
}

/// A reader that reads again after an interruption. A process that ^Z stops and `fg` continues gets one
/// in each read with a time limit, even without a handler of a signal (signal(7)).
pub(super) struct Uninterrupted<R>(R);

impl<R: Read> Read for Uninterrupted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(into) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => return outcome,
            }
        }
    }
}

impl<R: AsFd> AsFd for Uninterrupted<R> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Response {
    pub(super) fn header<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.head.fields.get(name)
    }
}

impl Client {
    pub(super) fn new(socket: &Path) -> Self {
        Client { socket: socket.to_owned(), limit: RESPONSE_LIMIT }
    }

    /// A client for requests that need no runtime call. `limit`: how long a read waits for the next byte.
    pub(super) fn with_limit(&self, limit: Duration) -> Client {
        Client { limit, ..self.clone() }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// For `map_err`.
    pub(super) fn io_error(&self, what: &'static str) -> impl FnOnce(io::Error) -> CommandError {
        let path = self.socket.clone();
        move |source| CommandError::Connection { what, path, source }
    }

    /// Sends a GET and returns after the head of a successful response.
    pub(super) fn open(&self, target: &str, timeout: ReadTimeout) -> Result<Response, CommandError> {
        self.request("GET", target, timeout)
    }

    fn request(&self, method: &str, target: &str, timeout: ReadTimeout) -> Result<Response, CommandError> {
        self.send(RequestWriter::without_chunks(method, target), target, 200, timeout)
    }

    /// Upgrades a connection to SPDY. Also returns the bytes that came with the response's head.
    pub(super) fn upgrade(
        &self,
        target: &str,
        protocol: &str,
    ) -> Result<(UnixStream, Vec<u8>), CommandError> {
        let request = RequestWriter::new("POST", target, "coracle")
            .field("Connection", "Upgrade")
            .field("Upgrade", "SPDY/3.1")
            .field("X-Stream-Protocol-Version", protocol);
        let body = self.send(request, target, 101, ReadTimeout::None)?.body;
        let early = body.buffer().to_vec();
        let Uninterrupted(stream) = body.into_inner();
        stream
            .set_write_timeout(None)
            .and_then(|()| stream.set_nonblocking(true))
            .map_err(self.io_error("communicate with"))?;
        Ok((stream, early))
    }

    fn send(
        &self,
        request: RequestWriter,
        target: &str,
        wanted: u16,
        timeout: ReadTimeout,
    ) -> Result<Response, CommandError> {
        let path = || self.socket.clone();
        let mut stream = connect_local(&self.socket).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => CommandError::NoSocket(path()),
            io::ErrorKind::ConnectionRefused => CommandError::NotListening(path()),
            io::ErrorKind::PermissionDenied => CommandError::NoPermission(path()),
            _ => self.io_error("reach")(error),
        })?;
        let sent = stream
            .set_write_timeout(Some(SEND_LIMIT))
            .and_then(|()| stream.set_read_timeout(Some(self.limit)))
            .and_then(|()| stream.write_all(&request.finish()));
        let mut body = BufReader::new(Uninterrupted(stream));
        let head = ResponseHead::read(&mut body).map_err(|error| match sent {
            // An agent that rejects a client does not read its request, and has sent the reason.
            Err(sent) => self.io_error("send a request to")(sent),
            Ok(()) => self.read_error(target, error),
        })?;
        if head.status != wanted {
            let mut text = Vec::new();
            // A part of the reason is better than no reason.
            let _ = body.take(64 * 1024).read_to_end(&mut text);
            let text = String::from_utf8_lossy(&text).trim_end().to_owned();
            return Err(CommandError::Rejected { status: head.status, text });
        }
        if timeout == ReadTimeout::None {
            body.get_ref().0.set_read_timeout(None).map_err(self.io_error("communicate with"))?;
        }
        Ok(Response { head, body })
    }

    /// Why a response could not be read.
    fn read_error(&self, target: &str, error: io::Error) -> CommandError {
        if Malformed::is(&error) {
            return CommandError::Response { target: target.to_owned(), reason: error.to_string() };
        }
        self.io_error("read from")(match error.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "the response ends too early"),
            // The limit of the socket has passed.
            io::ErrorKind::WouldBlock => {
                let text = format!("no response for {:?}; the agent may hang", self.limit);
                io::Error::new(io::ErrorKind::TimedOut, text)
            }
            _ => error,
        })
    }

    pub(super) fn get<T: DeserializeOwned>(&self, target: &str) -> Result<T, CommandError> {
        self.document("GET", target)
    }

    pub(super) fn post<T: DeserializeOwned>(&self, target: &str) -> Result<T, CommandError> {
        self.document("POST", target)
    }

    fn document<T: DeserializeOwned>(&self, method: &str, target: &str) -> Result<T, CommandError> {
        let response = self.request(method, target, ReadTimeout::Response)?;
        decode_document(target, &self.read_body(response, target, RESPONSE_BYTES)?)
    }

    /// Reads the whole body of a response, which may have at most `limit` bytes.
    pub(super) fn read_body(
        &self,
        response: Response,
        target: &str,
        limit: usize,
    ) -> Result<Vec<u8>, CommandError> {
        let Response { head, mut body } = response;
        let bytes = head
            .framing()
            .map_err(io::Error::from)
            .and_then(|mut framing| framing.read_up_to(&mut body, limit.saturating_add(1)))
            .map_err(|error| self.read_error(target, error))?;
        if bytes.len() > limit {
            let reason = format!("it has more than {limit} bytes");
            return Err(CommandError::Response { target: target.to_owned(), reason });
        }
        Ok(bytes)
    }

    /// Reads the whole body of a response and returns its last `limit` bytes, and whether there were more.
    pub(super) fn read_end(
        &self,
        response: Response,
        target: &str,
        limit: usize,
    ) -> Result<(Vec<u8>, bool), CommandError> {
        let Response { head, mut body } = response;
        let (mut end, mut total) = (Vec::new(), 0_usize);
        let mut read = || -> io::Result<()> {
            let mut framing = head.framing()?;
            loop {
                let piece = framing.fill(&mut body)?;
                let count = piece.len();
                total = total.saturating_add(count);
                if count == 0 || total > RESPONSE_BYTES {
                    return Ok(());
                }
                end.extend_from_slice(piece);
                framing.consume(&mut body, count);
                // Not for each piece: the rest is moved.
                if end.len() > limit.saturating_mul(2) {
                    keep_end(&mut end, limit);
                }
            }
        };
        read().map_err(|error| self.read_error(target, error))?;
        if total > RESPONSE_BYTES {
            let reason = format!("it has more than {RESPONSE_BYTES} bytes");
            return Err(CommandError::Response { target: target.to_owned(), reason });
        }
        keep_end(&mut end, limit);
        Ok((end, total > limit))
    }

    /// Calls `each` with each line's document until the agent stops or `each` fails.
    pub(super) fn follow<T: DeserializeOwned>(
        &self,
        target: &str,
        mut each: impl FnMut(T) -> Result<(), CommandError>,
    ) -> Result<Infallible, CommandError> {
        let mut body = self.open(target, ReadTimeout::None)?.body;
        let mut line = Vec::new();
        loop {
            line.clear();
            let count = (&mut body)
                .take(RESPONSE_BYTES as u64)
                .read_until(b'\n', &mut line)
                .map_err(self.io_error("read from"))?;
            // The rest of a line that is cut off is no document.
            if !line.ends_with(b"\n") && count < RESPONSE_BYTES {
                return Err(CommandError::Ended(self.socket.clone()));
            }
            each(decode_document(target, &line)?)?;
        }
    }
}

/// Removes all but the last `limit` bytes.
fn keep_end(bytes: &mut Vec<u8>, limit: usize) {
    bytes.drain(..bytes.len().saturating_sub(limit));
}

/// Reads a document by the decoder of objects: one of serde_json's would be compiled for each of the
/// three dozen types of responses.
fn decode_document<T: DeserializeOwned>(target: &str, bytes: &[u8]) -> Result<T, CommandError> {
    serde_json::from_slice(bytes)
        .map_err(|error| error.to_string())
        .and_then(|value| typed::decode(&value).map_err(|error| error.to_string()))
        .map_err(|reason| CommandError::Response { target: target.to_owned(), reason })
}

/// Percent-encodes a query value.
pub(super) fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~/:".contains(&byte);
    escape_percent(text.as_bytes(), is_plain, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::scripted;
    use super::*;
    use crate::cli::exit::Exit;

    #[test]
    fn encodes_what_a_target_cannot_hold() {
        assert_eq!(encode("kube-system/a b&c=ä"), "kube-system/a%20b%26c%3D%C3%A4");
    }

    #[test]
    fn interrupted_read_is_repeated() {
        struct Interrupted(u8);
        impl Read for Interrupted {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                self.0 += 1;
                match self.0 % 3 {
                    0 => (&b"x"[..]).read(into),
                    _ => Err(io::ErrorKind::Interrupted.into()),
                }
            }
        }
        let mut body = BufReader::new(Uninterrupted(Interrupted(0)));
        assert_eq!(body.read(&mut [0; 9]).unwrap(), 1);
        assert_eq!(body.fill_buf().unwrap(), b"x");
        body.consume(1);
        assert_eq!(body.fill_buf().unwrap(), b"x");
    }

    #[test]
    fn an_absent_agent_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("coracle.sock");
        let check = |expected: &str| {
            let error = Client::new(&socket).open("/v1/pods", ReadTimeout::Response).map(|_| ()).unwrap_err();
            assert!(error.to_string().starts_with(expected), "{error}");
            assert_eq!(error.exit(), Exit::NotReachable);
        };
        check("no agent runs here: there is no socket ");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        // A program that another test starts has a copy of the descriptor until it is executed.
        while std::os::unix::net::UnixStream::connect(&socket).is_ok() {
            std::thread::yield_now();
        }
        check("no agent runs here: no process listens on ");
    }

    #[test]
    fn malformed_responses_are_errors() {
        let check = |response: &str, expected: &str| {
            let (client, _dir, agent) = scripted(response);
            let error = client.get::<Vec<String>>("/x").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            drop(agent);
        };
        check("", "too early");
        check("SSH-2.0\r\n", "malformed HTTP response");
        check("HTTP/1.0 200 OK\r\nbad\r\n\r\n", "malformed MIME header line: bad");
        check("HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n[]", "too early");
        check("HTTP/1.0 200 OK\r\n\r\n{}", "is malformed");
        check("HTTP/1.0 404 Not Found\r\n\r\nno such pod\n", "no such pod");
    }

    #[test]
    fn agent_that_does_not_respond_is_reported_after_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("coracle.sock");
        let _hung = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let client = Client::new(&socket).with_limit(Duration::from_millis(10));
        let error = client.get::<Vec<String>>("/v1/pods").unwrap_err();
        assert!(error.to_string().ends_with("no response for 10ms; the agent may hang"), "{error}");
        assert_eq!(error.exit(), Exit::NotReachable);
    }

    #[test]
    fn end_of_a_body_has_its_last_bytes() {
        let end = |body: &str, limit| {
            let (client, _dir, _agent) = scripted(&format!("HTTP/1.0 200 OK\r\n\r\n{body}"));
            let response = client.open("/x", ReadTimeout::Response).unwrap();
            let (bytes, is_cut) = client.read_end(response, "/x", limit).unwrap();
            (String::from_utf8(bytes).unwrap(), is_cut)
        };
        assert_eq!(end("", 3), (String::new(), false));
        assert_eq!(end("abc", 3), ("abc".to_owned(), false));
        assert_eq!(end("abcd", 3), ("bcd".to_owned(), true));
        assert_eq!(end(&format!("{}end", "x".repeat(100_000)), 3), ("end".to_owned(), true));
    }

    #[test]
    fn line_that_is_cut_off_is_the_end_of_the_agent() {
        let (client, _dir, _agent) = scripted("HTTP/1.0 200 OK\r\n\r\n[\"a\"]\n[\"b");
        let mut lines: Vec<Vec<String>> = Vec::new();
        let Err(error) = client.follow("/x", |line| {
            lines.push(line);
            Ok(())
        });
        assert!(matches!(error, CommandError::Ended(_)), "{error}");
        assert_eq!(lines, [["a"]]);
    }
}
