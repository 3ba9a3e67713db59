//! A TCP relay on loopback between clients and one server: each client has a port of its own, for
//! which all bytes are counted in both directions, those of TLS included. One thread serves all
//! connections. It can fall silent, as a network does that loses all packets. A client or a server that
//! ends its direction of a connection ends the connection, as all do that speak HTTP over TLS.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use coracle::util::stop::StopToken;
use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::wait::wait_until;

/// The number of an event of a listener has this bit.
const LISTENER: u64 = 1 << 63;
/// Reads of one connection before the others have their turn.
const READS: usize = 16;
/// How often the thread reads whether it has to stop or to be silent.
const STEP: Duration = Duration::from_millis(50);
/// The end of a turn of the thread.
const LIMIT: Duration = Duration::from_secs(30);

/// What one client and the server have sent each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Bytes that the client has sent.
    pub to_server: u64,
    /// Bytes that the server has sent.
    pub to_client: u64,
    /// Connections of the client so far.
    pub opened: u64,
    /// Connections that are open now.
    pub open: u64,
}

#[derive(Default)]
struct Counts {
    to_server: AtomicU64,
    to_client: AtomicU64,
    opened: AtomicU64,
    closed: AtomicU64,
}

struct Shared {
    counts: Vec<Counts>,
    /// What the test wants.
    silent: AtomicBool,
    /// What the thread does.
    is_silent: AtomicBool,
}

/// The relay. Its connections end when it is dropped.
pub(crate) struct Relay {
    ports: Vec<u16>,
    shared: Arc<Shared>,
    _running: Running,
}

impl Relay {
    /// One with a port for each of so many clients.
    pub(crate) fn start(server: SocketAddr, clients: usize) -> Relay {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let listeners: Vec<TcpListener> = (0..clients).map(|_| bind()).collect();
        let port = |listener: &TcpListener| listener.local_addr().expect("an address").port();
        let ports = listeners.iter().map(port).collect();
        let shared = Arc::new(Shared {
            counts: listeners.iter().map(|_| Counts::default()).collect(),
            silent: AtomicBool::new(false),
            is_silent: AtomicBool::new(false),
        });
        let links = Links::new(listeners, server, Arc::clone(&shared)).expect("an epoll descriptor");
        let own = Arc::clone(&shared);
        let running = spawn("relay", Stack::Large, OnDeath::Unsupervised, move |stop| {
            serve(links, &own, &stop);
        });
        Relay { ports, shared, _running: running.expect("a thread") }
    }

    /// The port of a client.
    pub(crate) fn port(&self, client: usize) -> u16 {
        self.ports[client]
    }

    /// What has passed for a client so far.
    pub(crate) fn traffic(&self, client: usize) -> Traffic {
        let counts = &self.shared.counts[client];
        let read = |count: &AtomicU64| count.load(Ordering::SeqCst);
        // In this order, so that none closes that was not opened.
        let closed = read(&counts.closed);
        let opened = read(&counts.opened);
        Traffic {
            to_server: read(&counts.to_server),
            to_client: read(&counts.to_client),
            opened,
            open: opened - closed,
        }
    }

    /// From now on nothing passes, and connections stay as they are; or the contrary.
    pub(crate) fn set_silent(&self, silent: bool) {
        self.shared.silent.store(silent, Ordering::SeqCst);
        wait_until("the relay to change", LIMIT, || self.shared.is_silent.load(Ordering::SeqCst) == silent);
    }
}

fn serve(mut links: Links, shared: &Shared, stop: &StopToken) {
    while !stop.is_stopped() {
        let silent = shared.silent.load(Ordering::SeqCst);
        shared.is_silent.store(silent, Ordering::SeqCst);
        if silent {
            let _ = stop.wait(STEP);
        } else {
            links.turn().expect("epoll works");
        }
    }
}

/// One direction of a connection.
#[derive(Default)]
struct Direction {
    /// What was read and could not be written yet.
    pending: Vec<u8>,
    /// The source has sent its end.
    ended: bool,
}

impl Direction {
    /// Moves what there is. The number of bytes is counted when they are read.
    fn carry(
        &mut self,
        mut from: &TcpStream,
        mut to: &TcpStream,
        count: &AtomicU64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        for _ in 0..READS {
            while !self.pending.is_empty() {
                match to.write(&self.pending) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Ok(written) => drop(self.pending.drain(..written)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            if self.ended {
                return Ok(());
            }
            match from.read(buffer) {
                Ok(0) => self.ended = true,
                Ok(read) => {
                    count.fetch_add(read as u64, Ordering::SeqCst);
                    self.pending.extend_from_slice(&buffer[..read]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.ended && self.pending.is_empty()
    }
}

/// A connection of a client with its own to the server.
struct Link {
    number: usize,
    client: TcpStream,
    server: TcpStream,
    up: Direction,
    down: Direction,
    /// The events that the kernel reports of the client and of the server.
    interest: [EventFlags; 2],
}

impl Link {
    fn carry(&mut self, counts: &Counts, buffer: &mut [u8]) -> io::Result<()> {
        self.up.carry(&self.client, &self.server, &counts.to_server, buffer)?;
        self.down.carry(&self.server, &self.client, &counts.to_client, buffer)
    }

    fn has_ended(&self) -> bool {
        self.up.is_over() || self.down.is_over()
    }

    /// What has to happen before more can move.
    fn wanted(&self) -> [EventFlags; 2] {
        let flags = |from: &Direction, to: &Direction| {
            let mut flags = EventFlags::empty();
            flags.set(EventFlags::IN, from.pending.is_empty() && !from.ended);
            flags.set(EventFlags::OUT, !to.pending.is_empty());
            flags
        };
        [flags(&self.up, &self.down), flags(&self.down, &self.up)]
    }
}

/// All connections. Events of the connection `id` have the number `id`.
struct Links {
    epoll: OwnedFd,
    listeners: Vec<TcpListener>,
    server: SocketAddr,
    shared: Arc<Shared>,
    links: BTreeMap<u64, Link>,
    last: u64,
    buffer: Vec<u8>,
}

impl Links {
    fn new(listeners: Vec<TcpListener>, server: SocketAddr, shared: Arc<Shared>) -> io::Result<Links> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (number, listener) in listeners.iter().enumerate() {
            listener.set_nonblocking(true)?;
            epoll::add(&epoll, listener, EventData::new_u64(LISTENER | number as u64), EventFlags::IN)?;
        }
        let buffer = vec![0; 64 * 1024];
        Ok(Links { epoll, listeners, server, shared, links: BTreeMap::new(), last: 0, buffer })
    }

    /// Waits for events, and handles them.
    fn turn(&mut self) -> io::Result<()> {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(256);
        // As STEP.
        let limit = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        for event in &events {
            let (id, flags) = (event.data.u64(), event.flags);
            if id & LISTENER == 0 {
                self.carry(id, flags);
            } else {
                self.accept(usize::try_from(id & !LISTENER).unwrap_or(usize::MAX));
            }
        }
        Ok(())
    }

    fn accept(&mut self, number: usize) {
        while let Some(Ok((client, _))) = self.listeners.get(number).map(TcpListener::accept) {
            // A client that gave up while nothing passed: the server would not have seen it.
            if has_left(&client) {
                continue;
            }
            self.shared.counts[number].opened.fetch_add(1, Ordering::SeqCst);
            // A server that refuses shows as the end of the client's connection.
            if self.open(number, client).is_err() {
                self.shared.counts[number].closed.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    fn open(&mut self, number: usize, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(self.server)?;
        for socket in [&client, &server] {
            socket.set_nonblocking(true)?;
            socket.set_nodelay(true)?;
        }
        self.last += 1;
        let interest = [EventFlags::IN; 2];
        let data = EventData::new_u64(self.last);
        epoll::add(&self.epoll, &client, data, interest[0])?;
        epoll::add(&self.epoll, &server, data, interest[1])?;
        let (up, down) = (Direction::default(), Direction::default());
        self.links.insert(self.last, Link { number, client, server, up, down, interest });
        Ok(())
    }

    fn carry(&mut self, id: u64, flags: EventFlags) {
        // An earlier event of the same turn may have ended it.
        let Some(link) = self.links.get_mut(&id) else { return };
        let counts = &self.shared.counts[link.number];
        let carried = link.carry(counts, &mut self.buffer);
        // Both directions of a socket: none was shut here, so the other end has reset it.
        let is_reset = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        if carried.is_err() || is_reset || link.has_ended() {
            counts.closed.fetch_add(1, Ordering::SeqCst);
            // Closing the sockets takes them out of the epoll descriptor.
            self.links.remove(&id);
            return;
        }
        let wanted = link.wanted();
        if wanted == link.interest {
            return;
        }
        let data = EventData::new_u64(id);
        let changed = epoll::modify(&self.epoll, &link.client, data, wanted[0])
            .and_then(|()| epoll::modify(&self.epoll, &link.server, data, wanted[1]));
        changed.expect("both sockets are in the epoll descriptor");
        link.interest = wanted;
    }
}

/// Whether the other end has closed the connection.
fn has_left(socket: &TcpStream) -> bool {
    let mut sockets = [PollFd::new(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let polled = poll(&mut sockets, Some(&now)).is_ok();
    polled && sockets[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}
