//! A client's connection: its socket, TLS, unused input, and the limits of waits for the client.
//!
//! Reads wait until the deadline, writes as long as [`Pace`] allows, both until the server stops
//! at the latest. Functions called `try_…` do not wait.

use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::transport::tls::Session;
use crate::util::threads;

/// How much a client may send before it has read the response.
const AHEAD_BYTES: usize = 64 * 1024;

/// How long a client may take to read a short response.
pub(crate) const RESPONSE_LIMIT: Duration = Duration::from_secs(10);

/// How long a client may take for the last bytes.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// How much input is read before the socket is closed, and for how long: a close with unread input
/// resets the connection, and the client may lose the response.
const LINGER: (usize, Duration) = (1024 * 1024, Duration::from_secs(1));

/// The size of a read.
const READ_BYTES: usize = 4096;

/// One connection's socket. A TCP socket is shared with the connection limiter, which may shut
/// it down.
#[derive(Debug)]
pub(crate) enum Socket {
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
    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Socket::Tcp(stream) => stream.set_nonblocking(true),
            Socket::Unix(stream) => stream.set_nonblocking(true),
        }
    }

    pub(crate) fn shutdown_write(&self) {
        // An error means that the peer has already disconnected.
        let _ = match self {
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Socket::Unix(stream) => stream.shutdown(Shutdown::Write),
        };
    }

    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        match self {
            Socket::Tcp(stream) => stream.peer_addr().ok(),
            Socket::Unix(_) => None,
        }
    }
}

/// The result of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ready {
    Yes,
    /// The deadline has passed.
    Late,
    /// The server stops.
    Stopped,
}

/// How long writes may wait for the client in total.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    limit: Limit,
    waited: Duration,
    written: u64,
}

#[derive(Debug, Clone, Copy)]
enum Limit {
    /// In total: `grace`, plus the time for the written bytes at `rate` bytes per second.
    Total { grace: Duration, rate: u32 },
    /// Since the last written byte.
    Progress(Duration),
}

impl Pace {
    /// The pace of a whole response. `rate`: bytes per second.
    pub(crate) const fn total(grace: Duration, rate: u32) -> Pace {
        Pace { limit: Limit::Total { grace, rate }, waited: Duration::ZERO, written: 0 }
    }

    /// For a stream.
    pub(crate) const fn progress(limit: Duration) -> Pace {
        Pace { limit: Limit::Progress(limit), waited: Duration::ZERO, written: 0 }
    }

    /// For a few bytes.
    pub(crate) const fn within(limit: Duration) -> Pace {
        Pace::total(limit, u32::MAX)
    }

    fn left(&self) -> Duration {
        let limit = match self.limit {
            Limit::Progress(limit) => limit,
            Limit::Total { grace, rate } => {
                let earned = self.written.saturating_mul(1000) / u64::from(rate.max(1));
                grace.saturating_add(Duration::from_millis(earned))
            }
        };
        limit.saturating_sub(self.waited)
    }

    fn wrote(&mut self, count: usize) {
        self.written = self.written.saturating_add(count as u64);
        if matches!(self.limit, Limit::Progress(_)) && count > 0 {
            self.waited = Duration::ZERO;
        }
    }
}

/// A connection with a client: without TLS (Unix, TCP) or with it.
///
/// To wait outside of it, poll [`AsFd::as_fd`] for [`Connection::flags`], but not while
/// [`Connection::has_buffered`]: those bytes were decrypted already and no poll shows them. After
/// an event that allows to write, call [`Connection::try_write`] or [`Connection::try_flush`]:
/// TLS may have records to send.
pub(crate) struct Connection {
    socket: Socket,
    tls: Option<Box<Session>>,
    /// Readable as soon as the server stops.
    shutdown: Arc<UnixStream>,
    /// The socket is to be shut down for writing when all bytes are sent.
    finishing: bool,
    /// Bytes of the client; the first `used` of them are used.
    input: Vec<u8>,
    used: usize,
    /// The client has ended its direction.
    ended: bool,
    /// The deadline of reads.
    deadline: Instant,
    /// The limit of writes; `None`: until the server stops.
    pace: Option<Pace>,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// A connection without TLS. `shutdown` becomes readable as soon as the server stops.
    pub(crate) fn new(socket: Socket, shutdown: Arc<UnixStream>) -> Self {
        Connection {
            socket,
            tls: None,
            shutdown,
            finishing: false,
            input: Vec::new(),
            used: 0,
            ended: false,
            deadline: Instant::now(),
            pace: None,
        }
    }

    /// Continues in TLS.
    pub(crate) fn into_tls(self, session: Session) -> Self {
        Connection { tls: Some(Box::new(session)), ..self }
    }

    /// Readable as soon as the server stops.
    pub(crate) fn shutdown(&self) -> &Arc<UnixStream> {
        &self.shutdown
    }

    /// Whether the first bytes look like HTTP without TLS. They stay unread.
    pub(crate) fn peek_is_http(&self) -> bool {
        let mut start = [0; 5];
        let count = match &self.socket {
            Socket::Tcp(stream) => stream.peek(&mut start).unwrap_or(0),
            Socket::Unix(_) => 0,
        };
        count == start.len() && [b"GET /", b"HEAD ", b"POST ", b"PUT /", b"OPTIO"].contains(&&start)
    }

    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.socket.peer()
    }

    /// Continues the handshake; true once it is done.
    pub(crate) fn handshake(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            None => Ok(true),
            Some(session) => session.handshake(&mut self.socket),
        }
    }

    /// The client's certificates, its own one first; not verified.
    pub(crate) fn certificates(&self) -> Vec<Vec<u8>> {
        self.tls.as_ref().map(|session| session.peer_certificates()).unwrap_or_default()
    }

    /// Reads new bytes, which follow [`Connection::input`]. `Ok(0)`: the orderly end of the client's
    /// direction.
    pub(crate) fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.read(into),
            Some(session) => session.read(&mut self.socket, into),
        }
    }

    /// Accepts as many bytes as possible; TLS may still have to send them.
    pub(crate) fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.write(bytes),
            Some(session) => session.write(&mut self.socket, bytes),
        }
    }

    /// Sends accepted bytes; true when all are sent.
    pub(crate) fn try_flush(&mut self) -> io::Result<bool> {
        let Some(session) = &mut self.tls else { return Ok(true) };
        let done = session.flush(&mut self.socket)?;
        if done && self.finishing {
            self.finishing = false;
            self.socket.shutdown_write();
        }
        Ok(done)
    }

    /// Whether accepted bytes are still to be sent.
    pub(crate) fn has_unsent_output(&self) -> bool {
        self.tls.as_ref().is_some_and(|session| session.has_unsent_output())
    }

    /// Whether [`Connection::try_read`] returns bytes without the socket.
    pub(crate) fn has_buffered(&mut self) -> bool {
        self.tls.as_mut().is_some_and(|session| session.has_buffered())
    }

    /// Releases buffers until the next bytes arrive.
    pub(crate) fn release_buffers(&mut self) {
        if self.input().is_empty() {
            self.input = Vec::new();
            self.used = 0;
        }
        if let Some(session) = &mut self.tls {
            session.release_buffers();
        }
    }

    /// The events to poll for.
    pub(crate) fn flags(&self, read: bool, write: bool) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, read);
        flags.set(PollFlags::OUT, write || self.has_unsent_output());
        flags
    }

    /// Ends our direction: by the close_notify of TLS and, once all is sent, at the socket.
    fn finish_write(&mut self) {
        match &mut self.tls {
            None => self.socket.shutdown_write(),
            Some(session) => {
                session.close();
                self.finishing = true;
            }
        }
    }

    /// Waits until the client can be read from or written to.
    pub(crate) fn wait(&mut self, read: bool, write: bool, deadline: Instant) -> Ready {
        // Checked first: a client may send empty records without end.
        if Instant::now() >= deadline {
            return Ready::Late;
        }
        if read && self.has_buffered() {
            return Ready::Yes;
        }
        let _waiting = threads::waiting("a client");
        wait_for(self.as_fd(), self.flags(read, write), &self.shutdown, deadline)
    }

    /// Unused bytes of the client.
    pub(crate) fn input(&self) -> &[u8] {
        self.input.get(self.used..).unwrap_or_default()
    }

    /// Takes the unused bytes of the client.
    pub(crate) fn take_input(&mut self) -> Vec<u8> {
        let mut input = std::mem::take(&mut self.input);
        input.drain(..std::mem::take(&mut self.used).min(input.len()));
        input
    }

    /// The deadline of reads.
    pub(crate) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// The limit of a response's writes; `None`: none.
    pub(crate) fn set_pace(&mut self, pace: Option<Pace>) {
        self.pace = pace;
    }

    /// Waits for bytes and adds them to [`Connection::input`]. 0: the client has ended its direction.
    ///
    /// # Errors
    /// `TimedOut` at the deadline, `ConnectionAborted` when the server stops, and those of the
    /// client.
    pub(crate) fn read_more(&mut self) -> io::Result<usize> {
        loop {
            match self.wait(true, false, self.deadline) {
                Ready::Yes => {}
                Ready::Late => return Err(io::ErrorKind::TimedOut.into()),
                Ready::Stopped => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
            self.try_flush()?;
            match self.try_append() {
                Err(error) if is_passing(&error) => {}
                outcome => return outcome,
            }
        }
    }

    fn try_append(&mut self) -> io::Result<usize> {
        if self.ended {
            return Ok(0);
        }
        let mut chunk = [0; READ_BYTES];
        let count = self.try_read(&mut chunk)?;
        self.ended = count == 0;
        self.input.drain(..std::mem::take(&mut self.used).min(self.input.len()));
        self.input.extend_from_slice(chunk.get(..count).unwrap_or_default());
        Ok(count)
    }

    /// Waits until the socket is writable, and reads what the client sends, up to a limit.
    fn wait_writable(&mut self) -> io::Result<()> {
        let left = self.pace.map(|pace| pace.left());
        if left == Some(Duration::ZERO) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let _waiting = threads::waiting("a client");
        let flags = self.flags(!self.ended, true);
        let mut fds = [PollFd::new(&self.socket, flags), PollFd::new(&*self.shutdown, PollFlags::IN)];
        let begun = Instant::now();
        let outcome = poll(&mut fds, timespec(left).as_ref());
        let [events, stopped] = fds.map(|fd| fd.revents());
        if let Some(pace) = &mut self.pace {
            pace.waited += begun.elapsed();
        }
        match outcome {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if !stopped.is_empty() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        // With HUP both directions are closed.
        if events.intersects(PollFlags::ERR | PollFlags::HUP) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if events.contains(PollFlags::IN) {
            match self.try_append() {
                Err(error) if !is_passing(&error) => return Err(error),
                _ if self.input().len() > AHEAD_BYTES => {
                    return Err(io::Error::other("the client sends and does not read"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Sends a short response and closes the connection, which may have unread input.
    pub(crate) fn finish(mut self, bytes: &[u8]) {
        self.pace = Some(Pace::within(RESPONSE_LIMIT));
        if self.write_all(bytes).is_ok() {
            self.close(true);
        }
    }

    /// Ends the connection after a response. `more`: the client may still be sending, and gets time to
    /// read the response before the socket is closed.
    pub(crate) fn close(mut self, more: bool) {
        self.finish_write();
        self.pace = Some(Pace::within(CLOSE_LIMIT));
        if self.flush().is_err() {
            return;
        }
        let (mut bytes, limit) = LINGER;
        let deadline = Instant::now() + limit;
        let mut chunk = [0; READ_BYTES];
        while bytes > 0 {
            match self.try_read(&mut chunk) {
                Ok(0) => return,
                Ok(count) => bytes = bytes.saturating_sub(count),
                Err(error) if is_passing(&error) => {
                    if !more || self.wait(true, false, deadline) != Ready::Yes {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }
}

impl Read for Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(into)?;
        self.consume(count);
        Ok(count)
    }
}

impl BufRead for Connection {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.input().is_empty() {
            self.read_more()?;
        }
        Ok(self.input())
    }

    fn consume(&mut self, count: usize) {
        self.used = self.used.saturating_add(count).min(self.input.len());
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.try_write(bytes) {
                Ok(count) => {
                    if let Some(pace) = &mut self.pace {
                        pace.wrote(count);
                    }
                    return Ok(count);
                }
                Err(error) if is_passing(&error) => self.wait_writable()?,
                Err(error) => return Err(error),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.try_flush()? {
            self.wait_writable()?;
        }
        Ok(())
    }
}

/// Waits until a socket is ready. `shutdown` is readable as soon as the server stops.
pub(crate) fn wait_for(
    fd: BorrowedFd<'_>,
    flags: PollFlags,
    shutdown: &UnixStream,
    deadline: Instant,
) -> Ready {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::from_borrowed_fd(fd, flags), PollFd::new(shutdown, PollFlags::IN)];
        let outcome = poll(&mut fds, timespec(Some(left)).as_ref());
        let [socket, stopped] = fds.map(|fd| fd.revents());
        if !stopped.is_empty() {
            return Ready::Stopped;
        }
        if outcome.is_ok() && !socket.is_empty() {
            return Ready::Yes;
        }
        if left.is_zero() {
            return Ready::Late;
        }
    }
}

/// Errors after which a call is repeated later.
pub(crate) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// A limit for poll; a limit that poll cannot express means no limit.
pub(crate) fn timespec(limit: Option<Duration>) -> Option<Timespec> {
    limit.and_then(|limit| Timespec::try_from(limit).ok())
}

#[cfg(test)]
mod tests;
