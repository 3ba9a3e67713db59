//! An eventfd that ends a `poll`: for threads that wait on a file descriptor and cannot wait on a
//! channel.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// A bell for `poll`. Clones share it.
#[derive(Debug, Clone)]
pub struct Wake(Arc<OwnedFd>);

impl Wake {
    /// A bell that does not ring.
    ///
    /// # Errors
    /// When the limit of open files is reached.
    pub fn new() -> std::io::Result<Self> {
        Ok(Wake(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Rings until [`Wake::silence`]. Never blocks.
    pub fn ring(&self) {
        // A counter at its maximum also rings.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    /// Stops the ringing.
    pub fn silence(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0_u8; 8]);
    }

    /// Whether the bell rings. Does not wait.
    pub fn is_ringing(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&*self.0, PollFlags::IN)], Some(&now)).is_ok_and(|count| count > 0)
    }

    /// Waits for the bell, and for `other` if it is given, until `until`. Returns whether `other`
    /// is ready. The bell continues to ring.
    ///
    /// # Errors
    /// Those of `poll`, without interruptions.
    pub fn wait(
        &self,
        other: Option<(BorrowedFd<'_>, PollFlags)>,
        until: Option<Instant>,
    ) -> std::io::Result<bool> {
        let (fd, flags) = other.unwrap_or((self.0.as_fd(), PollFlags::IN));
        let mut fds = [PollFd::new(&*self.0, PollFlags::IN), PollFd::from_borrowed_fd(fd, flags)];
        loop {
            let limit = until.map(|until| {
                let left = until.saturating_duration_since(Instant::now());
                Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 })
            });
            match poll(&mut fds, limit.as_ref()) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) => return Ok(other.is_some() && fds.get(1).is_some_and(|fd| !fd.revents().is_empty())),
            }
        }
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    #[test]
    fn ringing_bell_ends_waits_until_silenced() {
        let wake = Wake::new().unwrap();
        let (mut writer, reader) = UnixStream::pair().unwrap();
        let deadline = || Some(Instant::now() + Duration::from_millis(1));
        let other = || Some((reader.as_fd(), PollFlags::IN));
        assert!(!wake.wait(other(), deadline()).unwrap() && !wake.is_ringing());
        wake.ring();
        wake.ring();
        assert!(wake.is_ringing());
        assert!(!wake.wait(other(), None).unwrap());
        assert!(!wake.wait(None, None).unwrap());
        wake.silence();
        writer.write_all(b"x").unwrap();
        assert!(wake.wait(other(), None).unwrap());
    }
}
