//! A connection to a bus: authentication, calls, and signals.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};

use super::address::connect;
use super::wire::{self, Kind, Message, Value};
use crate::util::stop::StopToken;
use crate::util::threads;
use crate::util::wake::Wake;

/// Time limit of a call or of the authentication; a service may have to be started first.
const LIMIT: Duration = Duration::from_secs(10);
/// Longer messages are skipped; no expected message is longer.
const MAX_MESSAGE: usize = 64 * 1024;
/// Signals that may wait during a call: only those of trusted senders are stored, which send few.
const MAX_QUEUED: usize = 256;
/// File descriptors that may be received before their message.
const MAX_FDS: usize = 64;
/// File descriptors in one read; the bus allows fewer in a message.
const FDS_AT_ONCE: usize = 32;
const MAX_LINE: usize = 1024;

/// Errors of a bus.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum DbusError {
    /// The address is not supported.
    #[error("D-Bus address {0}: neither a path nor an abstract name of a Unix socket")]
    Address(String),
    /// The connection to the bus failed.
    #[error("cannot connect to D-Bus at {address}: {source}")]
    Connect { address: String, source: io::Error },
    /// The bus refused the authentication, or its response is invalid.
    #[error("D-Bus refused the connection: {0}")]
    Refused(String),
    #[error("the connection to D-Bus was lost: {0}")]
    Lost(#[from] io::Error),
    #[error("no reply to {0} from D-Bus within {LIMIT:?}")]
    TimedOut(&'static str),
    /// The reply is an error.
    #[error("{member}: {name}: {message}")]
    Remote { member: &'static str, name: String, message: String },
    /// The reply is not of the expected form.
    #[error("{0}: the reply is not of the expected form")]
    UnexpectedReply(&'static str),
    /// The owner stopped the call.
    #[error("stopping")]
    Stopped,
}

/// A message with its file descriptors.
#[derive(Debug)]
pub struct ReceivedMessage {
    /// The message.
    pub message: Message,
    /// The file descriptors that were received with it.
    pub fds: Vec<OwnedFd>,
}

/// A method to call.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The destination.
    pub destination: &'static str,
    /// The object.
    pub path: &'static str,
    /// The interface.
    pub interface: &'static str,
    /// The method's name.
    pub member: &'static str,
}

/// An authenticated connection to a bus.
pub struct Bus {
    socket: OwnedFd,
    wake: Wake,
    stop: StopToken,
    serial: u32,
    /// Received bytes that are not yet a complete message.
    bytes: Vec<u8>,
    /// The number of following bytes that belong to a skipped message.
    skip: usize,
    /// The number of bytes that were removed from the stream before `bytes`.
    taken: u64,
    /// File descriptors, each with the position in the stream of the last byte that was sent with
    /// it: the kernel ends a read after the bytes that were sent with file descriptors.
    fds: VecDeque<(u64, OwnedFd)>,
    /// The senders whose signals are stored.
    senders: Vec<String>,
    queued: VecDeque<ReceivedMessage>,
}

impl Bus {
    /// Connects to the first address of a list that accepts. The bell ends a wait; once the owner
    /// stops, every wait ends.
    ///
    /// # Errors
    /// The error of the last address.
    pub fn open(addresses: &str, wake: &Wake, stop: &StopToken) -> Result<Self, DbusError> {
        let mut last = DbusError::Address(addresses.to_owned());
        for address in addresses.split(';').filter(|address| !address.is_empty()) {
            match connect(address) {
                Ok(socket) => {
                    let mut bus = Bus {
                        socket,
                        wake: wake.clone(),
                        stop: stop.clone(),
                        serial: 0,
                        bytes: Vec::new(),
                        skip: 0,
                        taken: 0,
                        fds: VecDeque::new(),
                        senders: Vec::new(),
                        queued: VecDeque::new(),
                    };
                    bus.greet()?;
                    return Ok(bus);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// From now on, the signals of these connections, given by their names on the bus, are stored;
    /// before the first call of this, none are. Every user of the machine may send signals to a
    /// connection, without a limit: signals of other senders are dropped when they arrive, and
    /// never delay a reply or a stored signal.
    pub fn listen_to(&mut self, senders: &[&str]) {
        self.senders = senders.iter().map(|sender| (*sender).to_owned()).collect();
    }

    /// Calls a method and waits for the reply. Signals that arrive meanwhile are stored for
    /// [`Bus::next`].
    ///
    /// # Errors
    /// [`DbusError::Remote`] if the reply is an error; other errors if there is no reply.
    pub fn call(&mut self, call: Call, args: Vec<Value>) -> Result<ReceivedMessage, DbusError> {
        let serial = self.next_serial();
        let message = Message {
            serial,
            path: call.path.to_owned(),
            interface: call.interface.to_owned(),
            member: call.member.to_owned(),
            destination: call.destination.to_owned(),
            args,
            ..Message::new(Kind::Call)
        };
        let deadline = Instant::now() + LIMIT;
        let _waiting = threads::waiting("a reply from D-Bus");
        self.send(&message.encode(), deadline, call.member)?;
        loop {
            let Some(mut incoming) = self.receive(Some(deadline), false, Some(serial))? else {
                return Err(DbusError::TimedOut(call.member));
            };
            let reply = &mut incoming.message;
            match reply.kind {
                Kind::Return => return Ok(incoming),
                Kind::Error => {
                    return Err(DbusError::Remote {
                        member: call.member,
                        name: std::mem::take(&mut reply.error),
                        message: reply.text(0).unwrap_or_default().to_owned(),
                    });
                }
                Kind::Signal | Kind::Call => self.queue(incoming)?,
            }
        }
    }

    /// Waits for a signal; `None`: the bell rang, or `until` has passed.
    ///
    /// # Errors
    /// When the connection is lost or the owner stopped it.
    pub fn next(&mut self, until: Option<Instant>) -> Result<Option<ReceivedMessage>, DbusError> {
        if let Some(queued) = self.queued.pop_front() {
            return Ok(Some(queued));
        }
        self.receive(until, true, None)
    }

    /// Waits until a time. Signals that arrive meanwhile are stored for [`Bus::next`]; unread signals
    /// would fill the bus's queue for this connection, and it would drop replies and signals.
    ///
    /// # Errors
    /// As [`Bus::next`].
    pub fn pause(&mut self, limit: Duration) -> Result<(), DbusError> {
        let until = Instant::now() + limit;
        while let Some(incoming) = self.receive(Some(until), false, None)? {
            self.queue(incoming)?;
        }
        Ok(())
    }

    fn queue(&mut self, signal: ReceivedMessage) -> Result<(), DbusError> {
        if self.queued.len() >= MAX_QUEUED {
            return Err(io::Error::other("too many unread signals").into());
        }
        self.queued.push_back(signal);
        Ok(())
    }

    /// Whether a message is the reply to this call, or a signal of a trusted sender.
    fn counts(&self, message: &Message, call: Option<u32>) -> bool {
        match message.kind {
            Kind::Return | Kind::Error => call.is_some() && message.reply_to == call,
            Kind::Signal => self.senders.contains(&message.sender),
            Kind::Call => false,
        }
    }

    fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1).max(1);
        self.serial
    }

    /// Authentication by SASL, then `Hello`.
    fn greet(&mut self) -> Result<(), DbusError> {
        let deadline = Instant::now() + LIMIT;
        let uid: String = rustix::process::geteuid()
            .as_raw()
            .to_string()
            .bytes()
            .map(|digit| format!("{digit:02x}"))
            .collect();
        self.send(format!("\0AUTH EXTERNAL {uid}\r\n").as_bytes(), deadline, "AUTH")?;
        for (expected, then) in [("OK", "NEGOTIATE_UNIX_FD\r\n"), ("AGREE_UNIX_FD", "BEGIN\r\n")] {
            let line = self.line(deadline)?;
            if line.split(' ').next() != Some(expected) {
                return Err(DbusError::Refused(line));
            }
            self.send(then.as_bytes(), deadline, "AUTH")?;
        }
        let bus = "org.freedesktop.DBus";
        let hello = Call { destination: bus, path: "/org/freedesktop/DBus", interface: bus, member: "Hello" };
        self.call(hello, Vec::new()).map(drop)
    }

    fn line(&mut self, deadline: Instant) -> Result<String, DbusError> {
        loop {
            if let Some(end) = self.bytes.windows(2).position(|two| two == b"\r\n") {
                let line = String::from_utf8_lossy(self.bytes.get(..end).unwrap_or_default()).into_owned();
                self.take(end + 2);
                return Ok(line);
            }
            if self.bytes.len() > MAX_LINE {
                return Err(DbusError::Refused("it is not a D-Bus server".to_owned()));
            }
            if !self.fill(Some(deadline), false)? {
                return Err(DbusError::TimedOut("AUTH"));
            }
        }
    }

    fn send(&mut self, bytes: &[u8], deadline: Instant, what: &'static str) -> Result<(), DbusError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match rustix::net::send(&self.socket, rest, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(Errno::AGAIN) => {
                    if !self.ready(PollFlags::OUT, Some(deadline), false)? {
                        return Err(DbusError::TimedOut(what));
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(DbusError::Lost(error.into())),
            }
        }
        Ok(())
    }

    /// The next expected message; `None` when the deadline has passed, or the bell rang in a wait
    /// that the bell ends.
    fn receive(
        &mut self,
        until: Option<Instant>,
        bell: bool,
        call: Option<u32>,
    ) -> Result<Option<ReceivedMessage>, DbusError> {
        loop {
            while let Some(incoming) = self.cut_out()? {
                if self.counts(&incoming.message, call) {
                    return Ok(Some(incoming));
                }
            }
            if !self.fill(until, bell)? {
                return Ok(None);
            }
        }
    }

    /// Takes one message out of the received bytes.
    fn cut_out(&mut self) -> Result<Option<ReceivedMessage>, DbusError> {
        loop {
            let dropped = self.skip.min(self.bytes.len());
            self.take(dropped);
            self.skip -= dropped;
            let Some(head) = self.bytes.get(..wire::HEAD) else { return Ok(None) };
            let length = wire::length(head).ok_or_else(|| io::Error::other("it sent an invalid message"))?;
            if length > MAX_MESSAGE {
                log::debug!("skipping a D-Bus message of {length} bytes");
                self.skip = length;
                continue;
            }
            if self.bytes.len() < length {
                return Ok(None);
            }
            let message = Message::decode(&self.bytes);
            let fds = self.take(length);
            match message {
                Some(message) => return Ok(Some(ReceivedMessage { message, fds })),
                None => log::debug!("skipping an invalid D-Bus message"),
            }
        }
    }

    /// Takes bytes out of the stream, and the file descriptors that came with them.
    fn take(&mut self, count: usize) -> Vec<OwnedFd> {
        self.bytes.drain(..count.min(self.bytes.len()));
        self.taken = self.taken.saturating_add(count as u64);
        let own = self.fds.iter().take_while(|(last, _)| *last < self.taken).count();
        self.fds.drain(..own).map(|(_, fd)| fd).collect()
    }

    /// Reads available bytes, or waits for some. `false`: no bytes arrived in time, or the bell
    /// rang in a wait that it ends. Both are checked before each read: a peer that never stops
    /// sending would always have more bytes to read.
    fn fill(&mut self, until: Option<Instant>, bell: bool) -> Result<bool, DbusError> {
        let mut buffer = [0_u8; 4096];
        loop {
            if !self.ready(PollFlags::IN, until, bell)? {
                return Ok(false);
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_AT_ONCE))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::net::recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut buffer)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            );
            match received {
                Ok(received) => {
                    let last = self.taken + (self.bytes.len() + received.bytes).saturating_sub(1) as u64;
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(fds) = message {
                            self.fds.extend(fds.map(|fd| (last, fd)));
                        }
                    }
                    if received.bytes == 0 {
                        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                    }
                    if self.fds.len() > MAX_FDS {
                        return Err(io::Error::other("too many file descriptors").into());
                    }
                    self.bytes.extend(buffer.iter().take(received.bytes));
                    return Ok(true);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(DbusError::Lost(error.into())),
            }
        }
    }

    /// Waits for the socket. `false`: the deadline has passed, or the bell rang in a wait that it
    /// ends, even if the socket is ready.
    fn ready(&self, flags: PollFlags, until: Option<Instant>, bell: bool) -> Result<bool, DbusError> {
        loop {
            let ready = self.wake.wait(Some((self.socket.as_fd(), flags)), until)?;
            if self.stop.is_stopped() {
                return Err(DbusError::Stopped);
            }
            if bell && self.wake.is_ringing() || until.is_some_and(|until| until <= Instant::now()) {
                return Ok(false);
            }
            if ready {
                return Ok(true);
            }
            if bell {
                return Ok(false);
            }
            // The bell rang during a call: the next wait reads the state anyway.
            self.wake.silence();
        }
    }
}
