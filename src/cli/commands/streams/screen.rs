//! What waits to be shown. Whoever reads it may take its time: meanwhile signals and input
//! go on.

use std::io;
use std::os::fd::AsFd;

/// A pipe that polls as writable takes so much without making its writer wait (`PIPE_BUF`).
const PIECE: usize = 4096;

/// Bytes for one of our outputs.
#[derive(Debug, Default)]
pub(super) struct Pending {
    bytes: Vec<u8>,
    /// So many of them have been written.
    sent: usize,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.sent >= self.bytes.len()
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Writes a piece to an output that polls as writable.
    pub(super) fn write(&mut self, out: impl AsFd) -> io::Result<()> {
        let rest = self.bytes.get(self.sent..).unwrap_or_default();
        match rustix::io::write(out, rest.get(..PIECE).unwrap_or(rest)) {
            Ok(count) => self.sent += count,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(why) => return Err(why.into()),
        }
        if self.is_empty() {
            self.bytes.clear();
            self.sent = 0;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_pipe_that_is_full_keeps_nobody() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut pending = Pending::default();
        let sent: Vec<u8> = (0..200_000_u32).map(|number| number.to_le_bytes()[0]).collect();
        pending.push(&sent);
        let is_writable = || {
            let mut fds = [rustix::event::PollFd::new(&writer, rustix::event::PollFlags::OUT)];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
        };
        let mut got = vec![0; sent.len()];
        let mut filled = 0;
        while !pending.is_empty() {
            while is_writable() && !pending.is_empty() {
                // Were it to block, it would for ever.
                pending.write(&writer).unwrap();
            }
            filled += reader.read(&mut got[filled..]).unwrap();
        }
        drop(writer);
        reader.read_exact(&mut got[filled..]).unwrap();
        assert!(got == sent);
    }
}
