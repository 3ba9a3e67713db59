//! A client's end of a connection, in the clear or in TLS. Nothing here blocks but
//! [`Client::wait`], which ends with the server.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::transport::tls::Session;
use crate::util::threads;

/// One connection's socket. That of a TCP client is shared with those who may have to shut
/// it down.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(Arc<TcpStream>),
    Unix(UnixStream),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&**stream).read(buffer),
            Socket::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&**stream).write(bytes),
            Socket::Unix(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&**stream).write_vectored(slices),
            Socket::Unix(stream) => stream.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Socket::Tcp(stream) => stream.set_nonblocking(true),
            Socket::Unix(stream) => stream.set_nonblocking(true),
        }
    }

    pub(super) fn shutdown_write(&self) {
        // A peer that is gone already needs no farewell.
        let _ = match self {
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Socket::Unix(stream) => stream.shutdown(Shutdown::Write),
        };
    }

    pub(super) fn peer(&self) -> Option<SocketAddr> {
        match self {
            Socket::Tcp(stream) => stream.peer_addr().ok(),
            Socket::Unix(_) => None,
        }
    }
}

/// How a wait for a client ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ready {
    /// There is something to do.
    Yes,
    /// The time is over.
    Late,
    /// The server stops.
    Stopped,
}

/// The client's end: plain (Unix, TCP) or TLS.
///
/// Poll [`AsFd::as_fd`] for [`Client::flags`], but not while [`Client::has_buffered`]: those
/// bytes were decrypted already and no poll tells of them. After an event that allows to
/// write, call [`Client::write`] or [`Client::flush`]: TLS may owe records.
pub(super) struct Client {
    socket: Socket,
    tls: Option<Box<Session>>,
    /// The direction is to be shut down once nothing is owed.
    finishing: bool,
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Client {
    pub(super) fn plain(socket: Socket) -> Self {
        Client { socket, tls: None, finishing: false }
    }

    /// Goes on in TLS.
    pub(super) fn into_tls(self, session: Session) -> Self {
        Client { tls: Some(Box::new(session)), ..self }
    }

    /// Whether what came first looks like HTTP in the clear; it stays where it is.
    pub(super) fn peek_is_http(&self) -> bool {
        let mut start = [0; 5];
        let count = match &self.socket {
            Socket::Tcp(stream) => stream.peek(&mut start).unwrap_or(0),
            Socket::Unix(_) => 0,
        };
        count == start.len() && [b"GET /", b"HEAD ", b"POST ", b"PUT /", b"OPTIO"].contains(&&start)
    }

    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.socket.peer()
    }

    /// Goes on with the handshake; true once it is done.
    pub(super) fn handshake(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            None => Ok(true),
            Some(session) => session.handshake(&mut self.socket),
        }
    }

    /// The certificates that the client showed, its own one first, judged by nobody yet.
    pub(super) fn certificates(&self) -> Vec<Vec<u8>> {
        self.tls.as_ref().map(|session| session.peer_certificates()).unwrap_or_default()
    }

    /// Reads into a buffer that is not empty. `WouldBlock`: nothing is there; `Ok(0)`: the
    /// orderly end of the client's direction.
    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.read(into),
            Some(session) => session.read(&mut self.socket, into),
        }
    }

    /// Takes what fits, else `WouldBlock`. What was taken may still be owed.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.write(bytes),
            Some(session) => session.write(&mut self.socket, bytes),
        }
    }

    /// Sends what is owed; true when nothing is left.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        let Some(session) = &mut self.tls else { return Ok(true) };
        let done = session.flush(&mut self.socket)?;
        if done && self.finishing {
            self.finishing = false;
            self.socket.shutdown_write();
        }
        Ok(done)
    }

    /// Whether bytes that were taken have not been sent yet.
    pub(super) fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(|session| session.owes())
    }

    /// Whether bytes are there to read without any wait.
    pub(super) fn has_buffered(&mut self) -> bool {
        self.tls.as_mut().is_some_and(|session| session.has_buffered())
    }

    /// Gives back what is needed only while bytes come.
    pub(super) fn rest(&mut self) {
        if let Some(session) = &mut self.tls {
            session.rest();
        }
    }

    /// What to poll for, given what the caller wants to do.
    pub(super) fn flags(&self, read: bool, write: bool) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, read);
        flags.set(PollFlags::OUT, write || self.owes());
        flags
    }

    /// Ends this direction: the farewell of TLS, then the socket's. While something is owed
    /// it ends when [`Client::flush`] has sent that.
    pub(super) fn finish_write(&mut self) {
        match &mut self.tls {
            None => self.socket.shutdown_write(),
            Some(session) => {
                session.close();
                self.finishing = true;
                // A client that is gone needs no farewell.
                let _ = self.flush();
            }
        }
    }

    /// Waits until the client can be read from or written to; `wake` is the server's end.
    pub(super) fn wait(&mut self, read: bool, write: bool, wake: &UnixStream, deadline: Instant) -> Ready {
        // Also of a client that sends without end what means nothing.
        if Instant::now() >= deadline {
            return Ready::Late;
        }
        if read && self.has_buffered() {
            return Ready::Yes;
        }
        let _waiting = threads::waiting("a client");
        let flags = self.flags(read, write);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(&self.socket, flags), PollFd::new(wake, PollFlags::IN)];
            let outcome = poll(&mut fds, timespec(Some(left)).as_ref());
            if !fds[1].revents().is_empty() {
                return Ready::Stopped;
            }
            if outcome.is_ok() && !fds[0].revents().is_empty() {
                return Ready::Yes;
            }
            if left.is_zero() {
                return Ready::Late;
            }
        }
    }

    /// Writes all of it, or fails: the client is gone, too slow, or the server stops.
    pub(super) fn write_all(
        &mut self,
        mut bytes: &[u8],
        wake: &UnixStream,
        limit: Duration,
    ) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        while !(bytes.is_empty() && self.flush()?) {
            match self.write(bytes) {
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(why) if is_passing(&why) => match self.wait(false, true, wake, deadline) {
                    Ready::Yes => {}
                    Ready::Late => return Err(io::ErrorKind::TimedOut.into()),
                    Ready::Stopped => return Err(io::ErrorKind::ConnectionAborted.into()),
                },
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }
}

/// Errors after which one just tries again later.
pub(super) fn is_passing(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

pub(super) fn timespec(limit: Option<Duration>) -> Option<Timespec> {
    // Longer than a Timespec holds means for ever.
    limit.and_then(|limit| Timespec::try_from(limit).ok())
}
