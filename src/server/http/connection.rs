//! A client's connection: socket, TLS, what was read and not used yet, and how long the client
//! is waited for.
//!
//! Reads and writes through [`Read`], [`BufRead`] and [`Write`] wait, until the deadline, as
//! long as [`Pace`] allows, and never longer than the server runs. Those called `try_…` do not.

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

/// What a client may send while it is written to: of a next request, or nonsense.
const AHEAD_BYTES: usize = 64 * 1024;

/// How long a client may take for the last bytes.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// What a client may still send before the socket is closed, and for how long: a close with
/// unread input resets the connection, and the client may lose the response.
const LINGER: (usize, Duration) = (1024 * 1024, Duration::from_secs(1));

/// Read from a client at once.
const READ_BYTES: usize = 4096;

/// One connection's socket. A TCP socket is shared with the connection limiter, which may shut
/// it down.
#[derive(Debug)]
pub(in crate::server) enum Socket {
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
    pub(in crate::server) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Socket::Tcp(stream) => stream.set_nonblocking(true),
            Socket::Unix(stream) => stream.set_nonblocking(true),
        }
    }

    pub(in crate::server) fn shutdown_write(&self) {
        // An error means that the peer is gone already.
        let _ = match self {
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Socket::Unix(stream) => stream.shutdown(Shutdown::Write),
        };
    }

    pub(in crate::server) fn peer(&self) -> Option<SocketAddr> {
        match self {
            Socket::Tcp(stream) => stream.peer_addr().ok(),
            Socket::Unix(_) => None,
        }
    }
}

/// How a wait for a client ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) enum Ready {
    /// There is something to do.
    Yes,
    /// The time is over.
    Late,
    /// The server stops.
    Stopped,
}

/// How long a client may keep a response waiting: only the time counts in which it takes nothing.
#[derive(Debug, Clone, Copy)]
pub(in crate::server) struct Pace {
    limit: Limit,
    waited: Duration,
    taken: u64,
}

#[derive(Debug, Clone, Copy)]
enum Limit {
    /// In all, and longer by what was taken at so many bytes per second.
    Total { grace: Duration, rate: u32 },
    /// Since the client took something.
    Progress(Duration),
}

impl Pace {
    /// For a whole response.
    pub(in crate::server) const fn total(grace: Duration, rate: u32) -> Pace {
        Pace { limit: Limit::Total { grace, rate }, waited: Duration::ZERO, taken: 0 }
    }

    /// For a stream.
    pub(in crate::server) const fn progress(limit: Duration) -> Pace {
        Pace { limit: Limit::Progress(limit), waited: Duration::ZERO, taken: 0 }
    }

    /// For a few bytes.
    pub(in crate::server) const fn within(limit: Duration) -> Pace {
        Pace::total(limit, u32::MAX)
    }

    fn left(&self) -> Duration {
        let limit = match self.limit {
            Limit::Progress(limit) => limit,
            Limit::Total { grace, rate } => {
                let earned = self.taken.saturating_mul(1000) / u64::from(rate.max(1));
                grace.saturating_add(Duration::from_millis(earned))
            }
        };
        limit.saturating_sub(self.waited)
    }

    fn took(&mut self, count: usize) {
        self.taken = self.taken.saturating_add(count as u64);
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
pub(in crate::server) struct Connection {
    socket: Socket,
    tls: Option<Box<Session>>,
    /// Readable as soon as the server stops.
    shutdown: Arc<UnixStream>,
    /// Our direction is to be shut down once all was sent.
    finishing: bool,
    /// Read from the client; the first `used` bytes of it were used.
    input: Vec<u8>,
    used: usize,
    /// The client has ended its direction.
    ended: bool,
    /// Until when a read waits.
    deadline: Instant,
    /// How long a write waits; `None`: as long as the server runs.
    pace: Option<Pace>,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// Without TLS. `shutdown` becomes readable as soon as the server stops.
    pub(in crate::server) fn new(socket: Socket, shutdown: Arc<UnixStream>) -> Self {
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

    /// Goes on in TLS.
    pub(in crate::server) fn into_tls(self, session: Session) -> Self {
        Connection { tls: Some(Box::new(session)), ..self }
    }

    /// Readable as soon as the server stops.
    pub(in crate::server) fn shutdown(&self) -> &Arc<UnixStream> {
        &self.shutdown
    }

    /// Whether the first bytes look like HTTP without TLS; they stay where they are.
    pub(in crate::server) fn peek_is_http(&self) -> bool {
        let mut start = [0; 5];
        let count = match &self.socket {
            Socket::Tcp(stream) => stream.peek(&mut start).unwrap_or(0),
            Socket::Unix(_) => 0,
        };
        count == start.len() && [b"GET /", b"HEAD ", b"POST ", b"PUT /", b"OPTIO"].contains(&&start)
    }

    pub(in crate::server) fn peer(&self) -> Option<SocketAddr> {
        self.socket.peer()
    }

    /// Goes on with the handshake; true once it is done.
    pub(in crate::server) fn handshake(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            None => Ok(true),
            Some(session) => session.handshake(&mut self.socket),
        }
    }

    /// The certificates that the client showed, its own one first; not verified.
    pub(in crate::server) fn certificates(&self) -> Vec<Vec<u8>> {
        self.tls.as_ref().map(|session| session.peer_certificates()).unwrap_or_default()
    }

    /// Reads into a buffer that is not empty, past [`Connection::input`]. `WouldBlock`: there is
    /// nothing; `Ok(0)`: the orderly end of the client's direction.
    pub(in crate::server) fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.read(into),
            Some(session) => session.read(&mut self.socket, into),
        }
    }

    /// Takes what fits, else `WouldBlock`. What was taken may still have to be sent.
    pub(in crate::server) fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.write(bytes),
            Some(session) => session.write(&mut self.socket, bytes),
        }
    }

    /// Sends what was taken; true when nothing is left.
    pub(in crate::server) fn try_flush(&mut self) -> io::Result<bool> {
        let Some(session) = &mut self.tls else { return Ok(true) };
        let done = session.flush(&mut self.socket)?;
        if done && self.finishing {
            self.finishing = false;
            self.socket.shutdown_write();
        }
        Ok(done)
    }

    /// Whether bytes that were taken have not been sent yet.
    pub(in crate::server) fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(|session| session.owes())
    }

    /// Whether [`Connection::try_read`] returns bytes without the socket.
    pub(in crate::server) fn has_buffered(&mut self) -> bool {
        self.tls.as_mut().is_some_and(|session| session.has_buffered())
    }

    /// Gives back the memory that is needed only while bytes come.
    pub(in crate::server) fn rest(&mut self) {
        if self.input().is_empty() {
            self.input = Vec::new();
            self.used = 0;
        }
        if let Some(session) = &mut self.tls {
            session.rest();
        }
    }

    /// What to poll for, given what the caller wants to do.
    pub(in crate::server) fn flags(&self, read: bool, write: bool) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, read);
        flags.set(PollFlags::OUT, write || self.owes());
        flags
    }

    /// Ends our direction: with the close_notify of TLS, then at the socket, once all was sent.
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
    pub(in crate::server) fn wait(&mut self, read: bool, write: bool, deadline: Instant) -> Ready {
        // Checked first, because a client may send empty records without end.
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
            let mut fds = [PollFd::new(&self.socket, flags), PollFd::new(&*self.shutdown, PollFlags::IN)];
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

    /// What was read and not used yet.
    pub(in crate::server) fn input(&self) -> &[u8] {
        self.input.get(self.used..).unwrap_or_default()
    }

    /// What was read and not used yet; it is used now.
    pub(in crate::server) fn take_input(&mut self) -> Vec<u8> {
        let mut input = std::mem::take(&mut self.input);
        input.drain(..std::mem::take(&mut self.used).min(input.len()));
        input
    }

    /// Until when a read waits.
    pub(in crate::server) fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// How long the writes of a response wait; `None`: as long as the server runs.
    pub(in crate::server) fn set_pace(&mut self, pace: Option<Pace>) {
        self.pace = pace;
    }

    /// Waits for bytes and adds them to [`Connection::input`]: how many; 0: the client has ended
    /// its direction.
    ///
    /// # Errors
    /// `TimedOut` at the deadline, `ConnectionAborted` when the server stops, and those of the
    /// client.
    pub(in crate::server) fn read_more(&mut self) -> io::Result<usize> {
        loop {
            match self.wait(true, false, self.deadline) {
                Ready::Yes => {}
                Ready::Late => return Err(io::ErrorKind::TimedOut.into()),
                Ready::Stopped => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
            self.try_flush()?;
            match self.try_append() {
                Err(why) if is_passing(&why) => {}
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

    /// Waits until the client takes more. It may send meanwhile, but not without bound.
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
            Err(why) => return Err(why.into()),
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
                Err(why) if !is_passing(&why) => return Err(why),
                _ if self.input().len() > AHEAD_BYTES => {
                    return Err(io::Error::other("the client sends and does not read"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Ends the connection after a response. `more`: the client may still be sending, and must
    /// get a moment to read the response before the socket is closed.
    pub(in crate::server) fn close(mut self, more: bool) {
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
                Err(why) if is_passing(&why) => {
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
                        pace.took(count);
                    }
                    return Ok(count);
                }
                Err(why) if is_passing(&why) => self.wait_writable()?,
                Err(why) => return Err(why),
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

/// Errors after which a call is repeated later.
pub(in crate::server) fn is_passing(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// A limit for poll; one that is longer than it can express is none.
pub(in crate::server) fn timespec(limit: Option<Duration>) -> Option<Timespec> {
    limit.and_then(|limit| Timespec::try_from(limit).ok())
}

#[cfg(test)]
mod tests;
