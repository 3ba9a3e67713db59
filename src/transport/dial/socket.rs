//! A socket whose every wait has a deadline and a stop token.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::error::{self, ConnectionEnds, DialError};
use crate::util::stop::StopToken;
use crate::util::threads;

/// A stop is noticed within this time: waits on a socket are split into pieces of this length.
pub(crate) const STOP_LATENCY: Duration = Duration::from_millis(200);
/// Closing a socket drops data that was not sent by then, so that an unreachable peer does not
/// leave thousands of half-closed sockets; the Go kubelet's value.
const LINGER: Duration = Duration::from_secs(1);
/// Each of several addresses gets at least this much of the remaining time.
const LEAST_SHARE: Duration = Duration::from_secs(2);

/// The deadline of a request.
#[derive(Debug, Clone)]
pub(in crate::transport) struct Limit {
    pub(in crate::transport) deadline: Option<Instant>,
    pub(in crate::transport) stop: StopToken,
}

impl Limit {
    pub(super) fn new(timeout: Option<Duration>, stop: &StopToken) -> Limit {
        // A timeout beyond the range of the clock is no limit.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Limit { deadline, stop: stop.clone() }
    }

    /// The part of the remaining time for the next of `left` addresses.
    pub(in crate::transport) fn share(&self, left: usize) -> Limit {
        let now = Instant::now();
        let deadline = self.deadline.map(|deadline| {
            let all = deadline.saturating_duration_since(now);
            let part = all / u32::try_from(left.max(1)).unwrap_or(u32::MAX);
            now + part.max(LEAST_SHARE).min(all)
        });
        Limit { deadline, stop: self.stop.clone() }
    }

    /// The same with at most this much time.
    pub(in crate::transport) fn within(&self, time: Duration) -> Limit {
        let end = Instant::now().checked_add(time);
        let deadline = match (self.deadline, end) {
            (Some(deadline), Some(end)) => Some(deadline.min(end)),
            (deadline, end) => deadline.or(end),
        };
        Limit { deadline, stop: self.stop.clone() }
    }

    /// Whether the deadline has passed.
    pub(in crate::transport) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Waits until `fd` can be read from or written to.
    pub(in crate::transport) fn ready(&self, fd: BorrowedFd<'_>, flags: PollFlags) -> io::Result<()> {
        let _waiting = threads::waiting("a pod's socket");
        loop {
            if self.stop.is_stopped() {
                // The kind is not `Interrupted`, because callers of `Read` would retry.
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, Stopped));
            }
            let left = self
                .deadline
                .map_or(STOP_LATENCY, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let piece =
                Timespec::try_from(left.min(STOP_LATENCY)).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 1 });
            match poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&piece)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The error of a wait that the stop token ended.
#[derive(Debug, thiserror::Error)]
#[error("context canceled")]
struct Stopped;

#[derive(Debug)]
pub(in crate::transport) struct Socket {
    stream: TcpStream,
    limit: Limit,
    ends: ConnectionEnds,
}

impl Socket {
    /// Connects within `share`; later operations may take all of `limit`.
    pub(in crate::transport) fn connect(
        address: SocketAddr,
        share: &Limit,
        limit: &Limit,
    ) -> Result<Socket, DialError> {
        let refused = |error: io::Error| match error {
            _ if limit.stop.is_stopped() => DialError::Stopped,
            _ if share.is_over() => DialError::ConnectTimeout { address: address.to_string() },
            error => DialError::Connect { address: address.to_string(), message: error::go_message(&error) },
        };
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
            .map_err(|error| refused(error.into()))?;
        sockopt::set_socket_linger(&fd, Some(LINGER)).map_err(|error| refused(error.into()))?;
        match rustix::net::connect(&fd, &address) {
            Ok(()) => {}
            Err(Errno::INPROGRESS | Errno::INTR) => {
                share.ready(fd.as_fd(), PollFlags::OUT).map_err(refused)?;
                sockopt::socket_error(&fd)
                    .and_then(|outcome| outcome)
                    .map_err(|error| refused(error.into()))?;
            }
            Err(error) => return Err(refused(error.into())),
        }
        let stream = TcpStream::from(fd);
        let local = stream.local_addr().map_or_else(|_| String::new(), |local| local.to_string());
        let ends = ConnectionEnds::from(format!("{local}->{address}"));
        Ok(Socket { stream, limit: limit.clone(), ends })
    }

    /// Both addresses of the connection.
    pub(super) fn ends(&self) -> ConnectionEnds {
        self.ends.clone()
    }

    fn retry_until_ready<T>(
        &mut self,
        flags: PollFlags,
        mut attempt: impl FnMut(&mut TcpStream) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match attempt(&mut self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => return outcome,
            }
            self.limit.ready(self.stream.as_fd(), flags)?;
        }
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.retry_until_ready(PollFlags::IN, |stream| stream.read(into))
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.retry_until_ready(PollFlags::OUT, |stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
