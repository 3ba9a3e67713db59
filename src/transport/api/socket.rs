//! A TCP socket that detects unreachable peers, with a deadline for each wait.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, sockopt};

use super::call::Call;
use crate::transport::dial::{DialError, go_message};
use crate::util::threads;

/// The time after which a silent peer gets a keep-alive probe.
pub(super) const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(15);
/// The time between keep-alive probes.
pub(super) const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(5);
pub(super) const KEEP_ALIVE_COUNT: u32 = 3;
/// If data is not acknowledged for this time, the connection fails. The kernel would retry for
/// about 15 minutes, in which the node would be considered lost.
pub(super) const DEAD_AFTER: Duration = Duration::from_secs(30);

/// A connected socket, whose waits end with the deadline and the breaker of its call.
pub(in crate::transport) struct Socket {
    stream: Arc<TcpStream>,
    /// The call that uses it now; none while it is idle.
    call: Weak<Call>,
    /// The limit of connecting.
    limit: Option<Instant>,
    /// By how much a received byte postpones the limit, and the time beyond which it does not.
    progress: Option<(Duration, Instant)>,
    /// What a blocked thread waits for, in the thread table.
    peer: &'static str,
    /// Whether writes send nothing, and succeed.
    discards_writes: bool,
}

impl Socket {
    /// Connects before `limit`, which stays the limit of waits until [`Socket::set_limit`].
    pub(super) fn connect(
        address: SocketAddr,
        limit: Instant,
        call: &Arc<Call>,
        peer: &'static str,
    ) -> Result<Socket, DialError> {
        let refused = |error: io::Error| match error {
            _ if call.breaker.is_tripped() => DialError::Stopped,
            error if error.kind() == io::ErrorKind::TimedOut && limit <= Instant::now() => {
                DialError::ConnectTimeout { address: address.to_string() }
            }
            error => DialError::Connect { address: address.to_string(), message: go_message(&error) },
        };
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
            .map_err(|error| refused(error.into()))?;
        notice_dead_peers(&fd).map_err(|error| refused(error.into()))?;
        let stream = Arc::new(TcpStream::from(fd));
        // Registered before the connect: shutting down a connecting socket ends the wait for it.
        call.register_socket(&stream, false);
        let socket = Socket {
            stream,
            call: Arc::downgrade(call),
            limit: Some(limit),
            progress: None,
            peer,
            discards_writes: false,
        };
        match rustix::net::connect(&socket.stream, &address) {
            Ok(()) => {}
            Err(Errno::INPROGRESS | Errno::INTR) => {
                socket.ready(PollFlags::OUT).map_err(refused)?;
                sockopt::socket_error(&socket.stream)
                    .and_then(|outcome| outcome)
                    .map_err(|error| refused(error.into()))?;
            }
            Err(error) => return Err(refused(error.into())),
        }
        if call.breaker.is_tripped() {
            return Err(DialError::Stopped);
        }
        Ok(socket)
    }

    /// Uses the socket for another call.
    pub(super) fn begin_call(&mut self, call: &Arc<Call>) {
        self.call = Arc::downgrade(call);
        call.register_socket(&self.stream, true);
    }

    /// The limit of waits beside the call's deadline.
    pub(super) fn set_limit(&mut self, limit: Option<Instant>) {
        (self.limit, self.progress) = (limit, None);
    }

    /// From now on that limit is `quiet` after the last received byte, but not later than `end`.
    pub(super) fn limit_pauses(&mut self, quiet: Duration, end: Instant) {
        self.progress = Some((quiet, end));
        self.postpone_limit();
    }

    fn postpone_limit(&mut self) {
        if let Some((quiet, end)) = self.progress {
            self.limit = Some(Instant::now().checked_add(quiet).map_or(end, |time| time.min(end)));
        }
    }

    /// Lets all later writes succeed without sending anything.
    pub(super) fn end_sending(&mut self) {
        self.discards_writes = true;
    }

    pub(super) fn is_late(&self) -> bool {
        self.deadline() <= Instant::now()
    }

    /// Whether the breaker of its call was tripped.
    pub(super) fn is_stopped(&self) -> bool {
        self.call.upgrade().is_none_or(|call| call.breaker.is_tripped())
    }

    fn deadline(&self) -> Instant {
        let end = self.call.upgrade().map_or_else(Instant::now, |call| call.deadline());
        self.limit.map_or(end, |limit| limit.min(end))
    }

    /// Whether the peer has neither closed it nor sent data: only then may it be used again.
    pub(super) fn is_quiet(&self) -> bool {
        let mut byte = [0];
        matches!(rustix::net::recv(&self.stream, &mut byte, RecvFlags::PEEK), Err(Errno::AGAIN))
    }

    /// `local->peer`.
    pub(super) fn ends(&self) -> Arc<str> {
        let text = |address: io::Result<SocketAddr>| {
            address.map_or_else(|_| String::new(), |socket_address| socket_address.to_string())
        };
        Arc::from(format!("{}->{}", text(self.stream.local_addr()), text(self.stream.peer_addr())))
    }

    /// Waits until the socket can be read from or written to. A breaker ends the wait by shutting
    /// the socket down.
    pub(super) fn ready(&self, flags: PollFlags) -> io::Result<()> {
        let _waiting = threads::waiting(self.peer);
        loop {
            let left = self.deadline().saturating_duration_since(Instant::now());
            let interval = self.call.upgrade().and_then(|call| call.breaker.interval());
            if left.is_zero() || (interval.is_some() && self.is_stopped()) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let left = interval.map_or(left, |interval| left.min(interval));
            let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 });
            match poll(&mut [PollFd::from_borrowed_fd(self.stream.as_fd(), flags)], Some(&left)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn retry_until_ready<T>(
        &mut self,
        flags: PollFlags,
        mut attempt: impl FnMut(&TcpStream) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            // A peer that always sends something, such as empty TLS records, is never waited for.
            if self.is_late() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match attempt(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => return outcome,
            }
            self.ready(flags)?;
        }
    }
}

fn notice_dead_peers(fd: impl AsFd) -> Result<(), Errno> {
    let fd = fd.as_fd();
    sockopt::set_tcp_nodelay(fd, true)?;
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, KEEP_ALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(fd, KEEP_ALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(fd, KEEP_ALIVE_COUNT)?;
    let dead_after = u32::try_from(DEAD_AFTER.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(fd, dead_after)
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.retry_until_ready(PollFlags::IN, |mut stream| stream.read(into))?;
        if count > 0 {
            self.postpone_limit();
            if let Some(call) = self.call.upgrade() {
                call.note_received();
            }
        }
        Ok(count)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.discards_writes {
            return Ok(bytes.len());
        }
        let count = self.retry_until_ready(PollFlags::OUT, |mut stream| stream.write(bytes))?;
        if let Some(call) = self.call.upgrade() {
            call.note_sent();
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::api::{Breaker, RequestKind};
    use std::net::TcpListener;

    fn call(deadline: Instant) -> Arc<Call> {
        Call::new(&Breaker::default(), RequestKind::Call, (deadline, deadline), true, 0)
    }

    #[test]
    fn a_dead_peer_is_noticed_within_half_a_minute() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let soon = Instant::now() + Duration::from_secs(10);
        let call = call(soon);
        let socket = Socket::connect(listener.local_addr().unwrap(), soon, &call, "t").unwrap();
        let fd = &socket.stream;
        assert!(sockopt::socket_keepalive(fd).unwrap());
        let silent = sockopt::tcp_keepidle(fd).unwrap()
            + sockopt::tcp_keepintvl(fd).unwrap() * sockopt::tcp_keepcnt(fd).unwrap();
        assert_eq!(silent, Duration::from_secs(30));
        assert_eq!(sockopt::tcp_user_timeout(fd).unwrap(), 30_000);
        assert!(socket.is_quiet());
        drop(listener.accept().unwrap());
        socket.ready(PollFlags::IN).unwrap();
        assert!(!socket.is_quiet());
    }

    #[test]
    fn received_bytes_postpone_a_limit_of_pauses_to_its_end_at_most() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let later = Instant::now() + Duration::from_secs(3600);
        let call = call(later);
        let mut socket = Socket::connect(listener.local_addr().unwrap(), later, &call, "t").unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let (quiet, end) = (Duration::from_secs(60), Instant::now() + Duration::from_secs(1800));
        socket.limit_pauses(quiet, end);
        let before = socket.deadline();
        assert!(before < end);
        peer.write_all(b"ab").unwrap();
        socket.read_exact(&mut [0]).unwrap();
        assert!(socket.deadline() > before);
        socket.limit_pauses(quiet * 60, end);
        socket.read_exact(&mut [0]).unwrap();
        assert_eq!(socket.deadline(), end);
        // The limit of another phase.
        socket.set_limit(None);
        peer.write_all(b"c").unwrap();
        socket.read_exact(&mut [0]).unwrap();
        assert_eq!(socket.deadline(), later);
    }

    #[test]
    fn waits_end_with_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let soon = Instant::now() + Duration::from_secs(2);
        let call = call(soon);
        let mut socket = Socket::connect(listener.local_addr().unwrap(), soon, &call, "t").unwrap();
        assert_eq!(socket.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(socket.is_late());
    }
}
