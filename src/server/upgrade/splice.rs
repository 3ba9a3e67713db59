//! Moves bytes between a client and the runtime, on one thread.

use std::io;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::server::http::connection::{Connection, is_passing, timespec};
use crate::util::threads;

use super::channels::Channels;
use super::runtime_connection::RuntimeConnection;
use super::tunnel::Tunnel;

/// The size of a read. Large, because each read and each write is a system call.
const CHUNK: usize = 64 * 1024;

/// A read of fewer bytes has probably emptied the socket.
const RECORD: usize = 8 * 1024;

/// Consecutive reads from one side.
const ROUNDS: u32 = 8;

/// A stream that is idle for this time releases its buffers.
const IDLE_LIMIT: Duration = Duration::from_secs(1);

/// How long the runtime may be idle after the client's last byte.
const END_LIMIT: Duration = Duration::from_secs(10);

/// The limit of unsent bytes for one side. Larger than the result of one read: a side that does not
/// read is still read from, or two sides that write before they read would wait for each other.
const BACKLOG: usize = 2 * CHUNK;

/// Unsent bytes for both sides.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub client: Vec<u8>,
    pub runtime: Vec<u8>,
}

/// The translation between both sides.
pub(super) enum Translation {
    /// Bytes are moved unchanged.
    Raw,
    /// WebSocket v5 on one side, SPDY v4 on the other.
    Channels(Box<Channels>),
    /// SPDY in WebSocket messages on one side, SPDY on the other.
    Tunnel(Box<Tunnel>),
}

impl Translation {
    /// Handles bytes of the client. False: the stream is over.
    fn handle_client_bytes(&mut self, bytes: &mut [u8], out: &mut Buffers) -> bool {
        match self {
            Translation::Raw => {
                out.runtime.extend_from_slice(bytes);
                true
            }
            Translation::Channels(channels) => {
                channels.handle_client_bytes(bytes, &mut out.client, &mut out.runtime)
            }
            Translation::Tunnel(tunnel) => {
                tunnel.handle_client_bytes(bytes, &mut out.client, &mut out.runtime)
            }
        }
    }

    fn handle_runtime_bytes(&mut self, bytes: &[u8], out: &mut Buffers) -> bool {
        match self {
            Translation::Raw => {
                out.client.extend_from_slice(bytes);
                true
            }
            Translation::Channels(channels) => {
                channels.handle_runtime_bytes(bytes, &mut out.client, &mut out.runtime)
            }
            Translation::Tunnel(_) => {
                Tunnel::handle_runtime_bytes(bytes, &mut out.client);
                true
            }
        }
    }

    fn handle_runtime_end(&mut self, out: &mut Buffers) {
        match self {
            Translation::Raw => {}
            Translation::Channels(channels) => channels.handle_runtime_end(&mut out.client),
            Translation::Tunnel(_) => Tunnel::handle_runtime_end(&mut out.client),
        }
    }

    /// Whether the client's bytes can be taken now.
    fn accepts_input(&self) -> bool {
        match self {
            Translation::Channels(channels) => channels.accepts_input(),
            Translation::Raw | Translation::Tunnel(_) => true,
        }
    }

    fn is_over(&self) -> bool {
        matches!(self, Translation::Channels(channels) if channels.is_over())
    }
}

/// A stream between a client and the runtime.
pub(super) struct Splice {
    client: Connection,
    runtime: RuntimeConnection,
    out: Buffers,
    /// Whether more may be read from the client.
    client_open: bool,
    /// Whether the client has disconnected while it was not read.
    client_disconnected: bool,
    /// Whether the end of the client's bytes was sent to the runtime.
    end_sent: bool,
    scratch: Vec<u8>,
}

/// What follows a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Continue,
    /// Send the client's last bytes and end.
    Last,
    /// End immediately.
    Break,
}

impl Splice {
    pub(super) fn new(client: Connection, runtime: RuntimeConnection) -> Self {
        Splice {
            client,
            runtime,
            out: Buffers::default(),
            client_open: true,
            client_disconnected: false,
            end_sent: false,
            scratch: Vec::new(),
        }
    }

    /// Moves bytes until the client, the runtime or the server ends the stream.
    pub(super) fn run(mut self, mut translation: Translation, first: Buffers, mut early: Vec<u8>) {
        let _waiting = threads::waiting("a stream's bytes");
        self.out = first;
        let mut next = if translation.is_over() { Next::Last } else { Next::Continue };
        if next == Next::Continue
            && !early.is_empty()
            && !translation.handle_client_bytes(&mut early, &mut self.out)
        {
            next = Next::Last;
        }
        drop(early);
        while next == Next::Continue {
            next = self.turn(&mut translation);
        }
        let Splice { client, runtime, out, .. } = self;
        drop(runtime);
        if next == Next::Last {
            client.finish(&out.client);
        }
    }

    /// Waits once and moves the bytes that are ready.
    fn turn(&mut self, translation: &mut Translation) -> Next {
        // First the unsent bytes of the last turn.
        if !self.write_client() {
            return Next::Break;
        }
        self.write_runtime();
        if !self.client_open && self.out.runtime.is_empty() && !self.end_sent {
            self.end_sent = true;
            self.runtime.finish_write();
        }
        let from_client = self.client_open
            && self.out.runtime.is_empty()
            && self.out.client.len() < BACKLOG
            && translation.accepts_input();
        let from_runtime = self.out.client.is_empty() && self.out.runtime.len() < BACKLOG;
        let (client, runtime) = match self.wait(from_client, from_runtime) {
            Ok(ready) => ready,
            Err(next) => return next,
        };
        if runtime && from_runtime {
            match self.read_runtime(translation) {
                Next::Continue => {}
                other => return other,
            }
        }
        if client && from_client { self.read_client(translation) } else { Next::Continue }
    }

    /// Waits until one of the two is ready; returns which.
    fn wait(&mut self, from_client: bool, from_runtime: bool) -> Result<(bool, bool), Next> {
        if from_client && self.client.has_buffered() {
            return Ok((true, from_runtime));
        }
        loop {
            let mut client_flags = self.client.flags(from_client, !self.out.client.is_empty());
            // A disconnect of the client is noticed also while the runtime reads nothing.
            let watches = client_flags.is_empty() && self.client_open && !self.client_disconnected;
            if watches {
                client_flags = PollFlags::RDHUP;
            }
            let mut runtime_flags = PollFlags::empty();
            runtime_flags.set(PollFlags::IN, from_runtime);
            runtime_flags.set(PollFlags::OUT, !self.out.runtime.is_empty());
            // A socket without flags could wake the poll again and again: it goes last and is not polled.
            let client = PollFd::new(&self.client, client_flags);
            let runtime = PollFd::new(&self.runtime, runtime_flags);
            let shutdown = PollFd::new(&**self.client.shutdown(), PollFlags::IN);
            let swapped = client_flags.is_empty();
            let mut fds = if swapped { [shutdown, runtime, client] } else { [shutdown, client, runtime] };
            let used = 1 + usize::from(!client_flags.is_empty()) + usize::from(!runtime_flags.is_empty());
            let limit = if !self.client_open || self.client_disconnected {
                Some(END_LIMIT)
            } else if self.scratch.capacity() > 0 {
                Some(IDLE_LIMIT)
            } else {
                None
            };
            let outcome = poll(fds.split_at_mut(used).0, timespec(limit).as_ref());
            let [stopped, first, second] = fds.map(|fd| !fd.revents().is_empty());
            let (client, runtime) = if swapped { (second, first) } else { (first, second) };
            match outcome {
                _ if stopped => return Err(Next::Break),
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(Next::Break),
                Ok(0) if limit == Some(END_LIMIT) => return Err(Next::Break),
                Ok(0) => {
                    self.scratch = Vec::new();
                    self.client.release_buffers();
                    self.out.client.shrink_to_fit();
                    self.out.runtime.shrink_to_fit();
                }
                Ok(_) if watches => {
                    self.client_disconnected |= client;
                    if runtime {
                        return Ok((false, true));
                    }
                }
                Ok(_) => return Ok((client, runtime)),
            }
        }
    }

    fn read_client(&mut self, translation: &mut Translation) -> Next {
        for _ in 0..ROUNDS {
            self.scratch.resize(CHUNK, 0);
            let count = match self.fill() {
                Ok(0) => {
                    self.client_open = false;
                    return Next::Continue;
                }
                Ok(count) => count,
                Err(error) if is_passing(&error) => return Next::Continue,
                Err(_) => return Next::Break,
            };
            let bytes = self.scratch.get_mut(..count).unwrap_or_default();
            let mut sent = 0;
            if matches!(translation, Translation::Raw) {
                // Written directly to the other socket; only the rest is copied.
                sent = self.runtime.write(bytes).unwrap_or(0);
            }
            let rest = bytes.get_mut(sent..).unwrap_or_default();
            if !rest.is_empty() && !translation.handle_client_bytes(rest, &mut self.out) {
                return Next::Last;
            }
            self.write_runtime();
            if count < CHUNK || !self.out.runtime.is_empty() {
                return Next::Continue;
            }
        }
        Next::Continue
    }

    /// Reads from the client. TLS gives a record of 16 KiB at a time: several make one write.
    fn fill(&mut self) -> io::Result<usize> {
        let mut filled = self.client.try_read(&mut self.scratch)?;
        let mut last = filled;
        while last >= RECORD && filled < CHUNK {
            // The next read returns an end or an error again.
            last =
                self.client.try_read(self.scratch.get_mut(filled..).unwrap_or_default()).unwrap_or_default();
            filled += last;
        }
        Ok(filled)
    }

    fn read_runtime(&mut self, translation: &mut Translation) -> Next {
        for _ in 0..ROUNDS {
            self.scratch.resize(CHUNK, 0);
            let count = match self.runtime.read(&mut self.scratch) {
                Ok(count) if count > 0 => count,
                Err(error) if is_passing(&error) => return Next::Continue,
                // The end or an error: earlier bytes are still sent to the client.
                Ok(_) | Err(_) => {
                    translation.handle_runtime_end(&mut self.out);
                    return Next::Last;
                }
            };
            let bytes = self.scratch.get(..count).unwrap_or_default();
            let mut sent = 0;
            if matches!(translation, Translation::Raw) {
                sent = match self.client.try_write(bytes) {
                    Ok(sent) => sent,
                    Err(error) if is_passing(&error) => 0,
                    Err(_) => return Next::Break,
                };
            }
            let rest = bytes.get(sent..).unwrap_or_default();
            if !rest.is_empty() && !translation.handle_runtime_bytes(rest, &mut self.out) {
                return Next::Last;
            }
            if !self.write_client() {
                return Next::Break;
            }
            if count < CHUNK || !self.out.client.is_empty() {
                return Next::Continue;
            }
        }
        Next::Continue
    }

    /// False: the client has disconnected.
    fn write_client(&mut self) -> bool {
        let client = &mut self.client;
        let outcome = match self.out.client.is_empty() {
            // TLS may have records to send.
            true => client.try_flush().map(drop),
            false => write_all(&mut self.out.client, |bytes| client.try_write(bytes)),
        };
        match outcome {
            Ok(()) => true,
            Err(error) => {
                log::debug!("a stream's client has disconnected: {error}");
                false
            }
        }
    }

    /// A runtime that has stopped reading may still send.
    fn write_runtime(&mut self) {
        let runtime = &mut self.runtime;
        if write_all(&mut self.out.runtime, |bytes| runtime.write(bytes)).is_err() {
            self.out.runtime = Vec::new();
        }
    }
}

/// Writes as many bytes as possible; the rest stays.
fn write_all(out: &mut Vec<u8>, mut write: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
    let mut sent = 0;
    let outcome = loop {
        let rest = out.get(sent..).unwrap_or_default();
        if rest.is_empty() {
            break Ok(());
        }
        match write(rest) {
            Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => sent += count,
            Err(error) if is_passing(&error) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    if sent >= out.len() {
        out.clear();
    } else {
        out.drain(..sent);
    }
    outcome
}
