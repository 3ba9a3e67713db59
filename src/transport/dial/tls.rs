//! TLS around a socket; the server may show any certificate.
//!
//! DIFFERS: HTTP/1.1 only; upstream uses HTTP/2 where the server supports it.

use std::io::{self, Read, Write};

use rustls::{ClientConnection, StreamOwned};

use super::error::DialError;
use super::socket::{Limit, Socket};
use crate::transport::tls::client::Tls;

/// The first bytes of a response without TLS.
const HTTP: &[u8] = b"HTTP/";

/// Makes a TLS session over `socket` for the server name `host`.
pub(super) fn wrap(socket: Socket, host: &str, limit: &Limit) -> Result<Session, DialError> {
    let host = if host.is_empty() { "127.0.0.1" } else { host };
    let tls = Tls::unverified(host).map_err(|error| DialError::Tls(error.to_string()))?;
    let mut socket = RecordingSocket { socket, received: Vec::new() };
    let outcome = tls.handshake(&mut socket);
    let RecordingSocket { socket, received } = socket;
    match outcome {
        Ok(session) => Ok(Session(StreamOwned::new(session, socket))),
        Err(_) if limit.stop.is_stopped() => Err(DialError::Stopped),
        Err(_) if limit.is_over() => Err(DialError::Timeout),
        Err(_) if received == HTTP => Err(DialError::PlainHttp),
        Err(error) => Err(DialError::of_tls(&error)),
    }
}

/// A socket that stores the first bytes that it receives.
struct RecordingSocket {
    socket: Socket,
    received: Vec<u8>,
}

impl Read for RecordingSocket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.socket.read(into)?;
        let missing = HTTP.len() - self.received.len();
        self.received.extend(into.iter().take(count.min(missing)));
        Ok(count)
    }
}

impl Write for RecordingSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

pub(super) struct Session(StreamOwned<ClientConnection, Socket>);

impl Read for Session {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.0.read(into) {
            // Many servers close without a close_notify; lengths and chunks show whether data is missing.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            outcome => outcome,
        }
    }
}

impl Write for Session {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
