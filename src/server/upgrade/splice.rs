//! Moves bytes between a client and the runtime, on one thread.

use std::io::{self, Write};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::server::http::connection::{Connection, Pace, is_passing, timespec};
use crate::util::threads;

use super::backend::Runtime;
use super::channels::Channels;
use super::rejection::RESPONSE_LIMIT;
use super::tunnel::Tunnel;

/// Read at once. Large, because each read and each write is a system call.
const CHUNK: usize = 64 * 1024;

/// After less than this there is probably no more.
const RECORD: usize = 8 * 1024;

/// Reads from one side before the other gets its turn.
const ROUNDS: u32 = 8;

/// A stream that moved nothing for so long gives its buffers back.
const REST: Duration = Duration::from_secs(1);

/// After the client's last byte the runtime may be silent for so long.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// The limit of what waits for one side. More than one read leads to: a side that does not read is
/// still read from, or two sides that write before they read would wait for each other.
const BACKLOG: usize = 2 * CHUNK;

/// What is sent to both before anything is read from them.
#[derive(Debug, Default)]
pub(super) struct Greeting {
    pub client: Vec<u8>,
    pub runtime: Vec<u8>,
}

/// What lies between the two.
pub(super) enum Between {
    /// Nothing: bytes are moved as they are.
    Raw,
    /// WebSocket v5 on one side, SPDY v4 on the other.
    Channels(Box<Channels>),
    /// SPDY in WebSocket messages on one side, SPDY on the other.
    Tunnel(Box<Tunnel>),
}

impl Between {
    /// Bytes of the client. False: the stream is over.
    fn client(&mut self, bytes: &mut [u8], out: &mut Greeting) -> bool {
        match self {
            Between::Raw => {
                out.runtime.extend_from_slice(bytes);
                true
            }
            Between::Channels(channels) => channels.client(bytes, &mut out.client, &mut out.runtime),
            Between::Tunnel(tunnel) => tunnel.client(bytes, &mut out.client, &mut out.runtime),
        }
    }

    fn runtime(&mut self, bytes: &[u8], out: &mut Greeting) -> bool {
        match self {
            Between::Raw => {
                out.client.extend_from_slice(bytes);
                true
            }
            Between::Channels(channels) => channels.runtime(bytes, &mut out.client, &mut out.runtime),
            Between::Tunnel(_) => {
                Tunnel::runtime(bytes, &mut out.client);
                true
            }
        }
    }

    fn runtime_ended(&mut self, out: &mut Greeting) {
        match self {
            Between::Raw => {}
            Between::Channels(channels) => channels.runtime_ended(&mut out.client),
            Between::Tunnel(_) => Tunnel::runtime_ended(&mut out.client),
        }
    }

    /// Whether the client's bytes can be taken now.
    fn takes(&self) -> bool {
        match self {
            Between::Channels(channels) => channels.takes(),
            Between::Raw | Between::Tunnel(_) => true,
        }
    }

    fn is_over(&self) -> bool {
        matches!(self, Between::Channels(channels) if channels.is_over())
    }
}

/// A client and the runtime, connected.
pub(super) struct Line {
    client: Connection,
    runtime: Runtime,
    /// What waits to be written to each.
    out: Greeting,
    /// Whether more may be read from the client.
    client_open: bool,
    /// It has left while nothing was to be read from it.
    client_gone: bool,
    /// Whether the runtime has got the end of the client's bytes.
    end_sent: bool,
    scratch: Vec<u8>,
}

/// Whether there is more to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Go {
    On,
    /// What waits for the client is the last.
    Last,
    /// At once.
    Break,
}

impl Line {
    pub(super) fn new(client: Connection, runtime: Runtime) -> Self {
        Line {
            client,
            runtime,
            out: Greeting::default(),
            client_open: true,
            client_gone: false,
            end_sent: false,
            scratch: Vec::new(),
        }
    }

    /// Moves bytes until one of the two, or the server, ends it.
    pub(super) fn run(mut self, mut between: Between, greeting: Greeting, mut early: Vec<u8>) {
        let _waiting = threads::waiting("a stream's bytes");
        self.out = greeting;
        let mut go = if between.is_over() { Go::Last } else { Go::On };
        if go == Go::On && !early.is_empty() && !between.client(&mut early, &mut self.out) {
            go = Go::Last;
        }
        drop(early);
        while go == Go::On {
            go = self.turn(&mut between);
        }
        let Line { mut client, runtime, out, .. } = self;
        drop(runtime);
        client.set_pace(Some(Pace::within(RESPONSE_LIMIT)));
        if go == Go::Last && client.write_all(&out.client).is_ok() {
            client.close(true);
        }
    }

    /// One wait and what it brought.
    fn turn(&mut self, between: &mut Between) -> Go {
        // What the last turn left is written first: mostly it fits.
        if !self.write_client() {
            return Go::Break;
        }
        self.write_runtime();
        if !self.client_open && self.out.runtime.is_empty() && !self.end_sent {
            self.end_sent = true;
            self.runtime.finish_write();
        }
        let from_client = self.client_open
            && self.out.runtime.is_empty()
            && self.out.client.len() < BACKLOG
            && between.takes();
        let from_runtime = self.out.client.is_empty() && self.out.runtime.len() < BACKLOG;
        let (client, runtime) = match self.wait(from_client, from_runtime) {
            Ok(ready) => ready,
            Err(go) => return go,
        };
        if runtime && from_runtime {
            match self.read_runtime(between) {
                Go::On => {}
                other => return other,
            }
        }
        if client && from_client { self.read_client(between) } else { Go::On }
    }

    /// Which of the two has something.
    fn wait(&mut self, from_client: bool, from_runtime: bool) -> Result<(bool, bool), Go> {
        if from_client && self.client.has_buffered() {
            return Ok((true, from_runtime));
        }
        loop {
            let mut client_flags = self.client.flags(from_client, !self.out.client.is_empty());
            // A client that leaves is noticed even while the runtime reads nothing from it.
            let watches = client_flags.is_empty() && self.client_open && !self.client_gone;
            if watches {
                client_flags = PollFlags::RDHUP;
            }
            let mut runtime_flags = PollFlags::empty();
            runtime_flags.set(PollFlags::IN, from_runtime);
            runtime_flags.set(PollFlags::OUT, !self.out.runtime.is_empty());
            // A socket without flags could still wake the poll again and again: it goes last and is
            // left out.
            let client = PollFd::new(&self.client, client_flags);
            let runtime = PollFd::new(&self.runtime, runtime_flags);
            let shutdown = PollFd::new(&**self.client.shutdown(), PollFlags::IN);
            let swapped = client_flags.is_empty();
            let mut fds = if swapped { [shutdown, runtime, client] } else { [shutdown, client, runtime] };
            let used = 1 + usize::from(!client_flags.is_empty()) + usize::from(!runtime_flags.is_empty());
            let limit = if !self.client_open || self.client_gone {
                Some(LAST_WORDS)
            } else if self.scratch.capacity() > 0 {
                Some(REST)
            } else {
                None
            };
            let outcome = poll(fds.split_at_mut(used).0, timespec(limit).as_ref());
            let [stopped, first, second] = fds.map(|fd| !fd.revents().is_empty());
            let (client, runtime) = if swapped { (second, first) } else { (first, second) };
            match outcome {
                _ if stopped => return Err(Go::Break),
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(Go::Break),
                Ok(0) if limit == Some(LAST_WORDS) => return Err(Go::Break),
                Ok(0) => {
                    self.scratch = Vec::new();
                    self.client.rest();
                    self.out.client.shrink_to_fit();
                    self.out.runtime.shrink_to_fit();
                }
                Ok(_) if watches => {
                    self.client_gone |= client;
                    if runtime {
                        return Ok((false, true));
                    }
                }
                Ok(_) => return Ok((client, runtime)),
            }
        }
    }

    fn read_client(&mut self, between: &mut Between) -> Go {
        for _ in 0..ROUNDS {
            self.scratch.resize(CHUNK, 0);
            let count = match self.fill() {
                Ok(0) => {
                    self.client_open = false;
                    return Go::On;
                }
                Ok(count) => count,
                Err(why) if is_passing(&why) => return Go::On,
                Err(_) => return Go::Break,
            };
            let bytes = self.scratch.get_mut(..count).unwrap_or_default();
            let mut sent = 0;
            if matches!(between, Between::Raw) {
                // Straight from one socket to the other; what does not fit is kept.
                sent = self.runtime.write(bytes).unwrap_or(0);
            }
            let rest = bytes.get_mut(sent..).unwrap_or_default();
            if !rest.is_empty() && !between.client(rest, &mut self.out) {
                return Go::Last;
            }
            self.write_runtime();
            if count < CHUNK || !self.out.runtime.is_empty() {
                return Go::On;
            }
        }
        Go::On
    }

    /// Reads from the client. TLS gives a record of 16 KiB at a time: several make one write.
    fn fill(&mut self) -> io::Result<usize> {
        let mut filled = self.client.try_read(&mut self.scratch)?;
        let mut last = filled;
        while last >= RECORD && filled < CHUNK {
            // An end or an error comes again at the next read.
            last =
                self.client.try_read(self.scratch.get_mut(filled..).unwrap_or_default()).unwrap_or_default();
            filled += last;
        }
        Ok(filled)
    }

    fn read_runtime(&mut self, between: &mut Between) -> Go {
        for _ in 0..ROUNDS {
            self.scratch.resize(CHUNK, 0);
            let count = match self.runtime.read(&mut self.scratch) {
                Ok(count) if count > 0 => count,
                Err(why) if is_passing(&why) => return Go::On,
                // Its end, in order or not: what it has sent still goes to the client.
                Ok(_) | Err(_) => {
                    between.runtime_ended(&mut self.out);
                    return Go::Last;
                }
            };
            let bytes = self.scratch.get(..count).unwrap_or_default();
            let mut sent = 0;
            if matches!(between, Between::Raw) {
                sent = match self.client.try_write(bytes) {
                    Ok(sent) => sent,
                    Err(why) if is_passing(&why) => 0,
                    Err(_) => return Go::Break,
                };
            }
            let rest = bytes.get(sent..).unwrap_or_default();
            if !rest.is_empty() && !between.runtime(rest, &mut self.out) {
                return Go::Last;
            }
            if !self.write_client() {
                return Go::Break;
            }
            if count < CHUNK || !self.out.client.is_empty() {
                return Go::On;
            }
        }
        Go::On
    }

    /// False: the client is gone.
    fn write_client(&mut self) -> bool {
        let client = &mut self.client;
        let outcome = match self.out.client.is_empty() {
            // TLS may owe records of what it took before.
            true => client.try_flush().map(drop),
            false => write_all(&mut self.out.client, |bytes| client.try_write(bytes)),
        };
        match outcome {
            Ok(()) => true,
            Err(why) => {
                log::debug!("a stream's client is gone: {why}");
                false
            }
        }
    }

    /// A runtime that reads nothing more may still send something.
    fn write_runtime(&mut self) {
        let runtime = &mut self.runtime;
        if write_all(&mut self.out.runtime, |bytes| runtime.write(bytes)).is_err() {
            self.out.runtime = Vec::new();
        }
    }
}

/// Writes as much as goes; the rest stays.
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
            Err(why) if is_passing(&why) => break Ok(()),
            Err(why) => break Err(why),
        }
    };
    if sent >= out.len() {
        out.clear();
    } else {
        out.drain(..sent);
    }
    outcome
}
