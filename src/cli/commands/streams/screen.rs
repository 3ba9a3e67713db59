//! Output that waits to be printed, in order. A slow reader of it delays neither signals nor input.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

/// The number of bytes that a pipe that polls as writable accepts without blocking (`PIPE_BUF`),
/// unless another process writes to it.
const PIECE: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    Stdout,
    Stderr,
}

/// Unwritten bytes for both outputs, which may be one file: their order is kept.
#[derive(Debug, Default)]
pub(super) struct PendingOutput {
    waiting: VecDeque<(Output, Vec<u8>)>,
    /// How many bytes of the first have been written.
    sent: usize,
}

impl PendingOutput {
    /// The output of the next bytes.
    pub(super) fn next(&self) -> Option<Output> {
        self.waiting.front().map(|(output, _)| *output)
    }

    pub(super) fn push(&mut self, output: Output, bytes: &[u8]) {
        match self.waiting.back_mut() {
            Some((last, all)) if *last == output => all.extend_from_slice(bytes),
            _ if bytes.is_empty() => {}
            _ => self.waiting.push_back((output, bytes.to_vec())),
        }
    }

    /// Writes a piece to the next output, which polls as writable.
    pub(super) fn write(&mut self, out: impl AsFd) -> io::Result<()> {
        let Some((_, bytes)) = self.waiting.front() else { return Ok(()) };
        let rest = bytes.get(self.sent..).unwrap_or_default();
        match rustix::io::write(out, rest.get(..PIECE).unwrap_or(rest)) {
            Ok(count) => self.sent += count,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if self.sent >= bytes.len() {
            self.waiting.pop_front();
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
    fn full_pipe_does_not_block_the_writer() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut pending = PendingOutput::default();
        let sent: Vec<u8> = (0..200_000_u32).map(|number| number.to_le_bytes()[0]).collect();
        pending.push(Output::Stdout, &sent);
        let is_writable = || {
            let mut fds = [rustix::event::PollFd::new(&writer, rustix::event::PollFlags::OUT)];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
        };
        let mut got = vec![0; sent.len()];
        let mut filled = 0;
        while pending.next().is_some() {
            while is_writable() && pending.next().is_some() {
                // A blocking write would never return.
                pending.write(&writer).unwrap();
            }
            filled += reader.read(&mut got[filled..]).unwrap();
        }
        drop(writer);
        reader.read_exact(&mut got[filled..]).unwrap();
        assert!(got == sent);
    }

    #[test]
    fn bytes_of_both_outputs_keep_their_order() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut pending = PendingOutput::default();
        let words =
            [(Output::Stdout, "a"), (Output::Stdout, "b"), (Output::Stderr, "c"), (Output::Stdout, "d")];
        words.iter().for_each(|(output, word)| pending.push(*output, word.as_bytes()));
        pending.push(Output::Stderr, b"");
        let mut outputs = Vec::new();
        while let Some(output) = pending.next() {
            outputs.push(output);
            pending.write(&writer).unwrap();
        }
        drop(writer);
        let mut got = String::new();
        reader.read_to_string(&mut got).unwrap();
        assert_eq!(got, "abcd");
        assert_eq!(outputs, [Output::Stdout, Output::Stderr, Output::Stdout]);
    }
}
