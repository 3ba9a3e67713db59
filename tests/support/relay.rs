//! A TCP relay on loopback between clients and one server: each client has a port of its own, for
//! which all bytes are counted in both directions, those of TLS included. One thread serves all
//! connections. It can fall silent, as a network does that loses all packets. A client or a server that
//! ends its direction of a connection ends the connection, as all do that speak HTTP over TLS.
//!
//! With a [`Profile`] it is a bad link: slow, with losses, with a NAT that forgets connections, or one
//! that resets them.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use coracle::util::stop::StopToken;
use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::random::Random;
use super::wait::wait_until;

/// The number of an event of a listener has this bit.
const LISTENER: u64 = 1 << 63;
/// Reads of one connection before the others have their turn.
const READS: usize = 16;
/// How often the thread reads whether it has to stop or to be silent.
const STEP: Duration = Duration::from_millis(50);
/// The end of a turn of the thread.
const LIMIT: Duration = Duration::from_secs(150);
/// The most bytes of a segment on a bad link.
const SEGMENT: usize = 1400;
/// Bytes of one direction of a connection that are on their way over a bad link.
const WINDOW: usize = 16 * 1024;
/// The first retransmission timeout of TCP, which doubles (Linux: TCP_RTO_MIN), and the last one of a segment.
const TIMEOUTS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_millis(3200));
/// The type of service of packets of forgotten connections, for [`silence_forgotten`].
const FORGOTTEN: u8 = 0x10;

/// What the link of a client does to its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Profile {
    /// How long a byte is on its way. The first byte of a client needs two of these more: the handshake of TCP.
    pub delay: Duration,
    /// Bytes per second of all connections of a client in each direction; 0: no limit.
    pub rate: u64,
    /// How many of 100 segments are lost, which TCP sends again after a timeout.
    pub lost: u64,
    /// For the losses: a client's segments of the same number are lost.
    pub seed: u64,
    /// A NAT forgets a connection without a byte for this long: nothing passes any more, and neither end
    /// gets an error.
    pub forget_after: Option<Duration>,
    /// All connections are reset each time that this has passed.
    pub cut_every: Option<Duration>,
}

impl Profile {
    /// A link without limits.
    pub(crate) const QUICK: Profile =
        Profile { delay: Duration::ZERO, rate: 0, lost: 0, seed: 0, forget_after: None, cut_every: None };

    /// Whether bytes are not delayed.
    fn is_quick(&self) -> bool {
        self.delay.is_zero() && self.rate == 0 && self.lost == 0
    }
}

/// From now on the kernel sends no packets of forgotten connections, not even acknowledgements: keep-alive
/// probes of both ends get no reply, as behind a NAT. For all relays of this network namespace, which
/// belongs to the tests.
pub(crate) fn silence_forgotten() {
    static RULES: OnceLock<()> = OnceLock::new();
    RULES.get_or_init(|| {
        assert!(std::env::var_os("E2E_DIR").is_some(), "only in a network namespace of the tests");
        let ip = |words: &str| {
            let output = Command::new("ip").args(words.split(' ')).output().expect("ip runs");
            assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        if ip("rule show").contains("blackhole") {
            return;
        }
        // Nothing can come before the rule of local addresses, but it can be moved.
        ip("rule add pref 5 lookup local");
        ip("rule del pref 0");
        ip(&format!("rule add pref 1 tos {FORGOTTEN:#x} blackhole"));
    });
}

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
    forgotten: AtomicU64,
}

struct Shared {
    counts: Vec<Counts>,
    /// What the test wants.
    silent: AtomicBool,
    /// What the thread does.
    is_silent: AtomicBool,
    cuts: AtomicU64,
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
        Relay::start_with(server, clients, Profile::QUICK)
    }

    /// As [`Relay::start`], over links with this profile.
    pub(crate) fn start_with(server: SocketAddr, clients: usize, profile: Profile) -> Relay {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        Relay::serve_on((0..clients).map(|_| bind()).collect(), server, profile)
    }

    /// One with a listener for each client.
    pub(crate) fn serve_on(listeners: Vec<TcpListener>, server: SocketAddr, profile: Profile) -> Relay {
        let port = |listener: &TcpListener| listener.local_addr().expect("an address").port();
        let ports = listeners.iter().map(port).collect();
        let shared = Arc::new(Shared {
            counts: listeners.iter().map(|_| Counts::default()).collect(),
            silent: AtomicBool::new(false),
            is_silent: AtomicBool::new(false),
            cuts: AtomicU64::new(0),
        });
        let links = Links::new(listeners, server, Arc::clone(&shared), profile).expect("an epoll descriptor");
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

    /// How many connections of a client the NAT has forgotten.
    pub(crate) fn forgotten(&self, client: usize) -> u64 {
        self.shared.counts[client].forgotten.load(Ordering::SeqCst)
    }

    /// How often all connections were reset.
    pub(crate) fn cuts(&self) -> u64 {
        self.shared.cuts.load(Ordering::SeqCst)
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

/// One direction of the link of a client, which its connections share.
struct Queue {
    /// When it has sent all bytes before.
    free: Instant,
    random: Random,
}

impl Queue {
    /// How long a segment that is sent `now` is on its way.
    fn travel(&mut self, profile: &Profile, now: Instant, bytes: usize) -> Duration {
        let micros = (bytes as u64 * 1_000_000).checked_div(profile.rate).unwrap_or(0);
        self.free = self.free.max(now) + Duration::from_micros(micros);
        let mut stall = Duration::ZERO;
        let mut timeout = TIMEOUTS.0;
        while timeout <= TIMEOUTS.1 && self.random.below(100) < profile.lost {
            stall += timeout;
            timeout *= 2;
        }
        self.free.duration_since(now) + profile.delay + stall
    }
}

/// A segment on its way, and when it arrives.
struct Segment {
    due: Instant,
    bytes: Vec<u8>,
}

/// One direction of a connection.
struct Direction {
    delayed: VecDeque<Segment>,
    /// Bytes in `delayed`.
    held: usize,
    /// What has arrived and could not be written yet.
    pending: Vec<u8>,
    /// The source has sent its end.
    ended: bool,
    /// Before this time nothing of it arrives.
    earliest: Instant,
    /// The last byte of the source.
    last: Instant,
}

impl Direction {
    fn new(now: Instant, earliest: Instant) -> Direction {
        let (delayed, pending) = (VecDeque::new(), Vec::new());
        Direction { delayed, held: 0, pending, ended: false, earliest, last: now }
    }

    /// Moves what there is. The number of bytes is counted when they are read.
    fn carry(
        &mut self,
        mut from: &TcpStream,
        to: &TcpStream,
        count: &AtomicU64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        for _ in 0..READS {
            if !self.flush(to)? || self.ended {
                return Ok(());
            }
            match from.read(buffer) {
                Ok(0) => self.ended = true,
                Ok(read) => {
                    count.fetch_add(read as u64, Ordering::SeqCst);
                    self.pending.extend_from_slice(&buffer[..read]);
                    self.last = Instant::now();
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends what there is on its way, and moves what has arrived.
    fn carry_slowly(
        &mut self,
        mut from: &TcpStream,
        to: &TcpStream,
        count: &AtomicU64,
        queue: &mut Queue,
        profile: &Profile,
    ) -> io::Result<()> {
        let now = Instant::now();
        while !self.ended && self.held < WINDOW {
            let mut buffer = [0; SEGMENT];
            match from.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(read) => {
                    count.fetch_add(read as u64, Ordering::SeqCst);
                    // In order: a lost segment delays those after it.
                    self.earliest = self.earliest.max(now + queue.travel(profile, now, read));
                    self.held += read;
                    self.delayed.push_back(Segment { due: self.earliest, bytes: buffer[..read].to_vec() });
                    self.last = now;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        while self.is_due(now)
            && let Some(segment) = self.delayed.pop_front()
        {
            self.held -= segment.bytes.len();
            self.pending.extend_from_slice(&segment.bytes);
        }
        self.flush(to).map(drop)
    }

    /// Writes what has arrived. Returns whether nothing is left.
    fn flush(&mut self, mut to: &TcpStream) -> io::Result<bool> {
        while !self.pending.is_empty() {
            match to.write(&self.pending) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.pending.drain(..written)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn is_due(&self, now: Instant) -> bool {
        self.delayed.front().is_some_and(|segment| segment.due <= now)
    }

    fn is_over(&self) -> bool {
        self.ended && self.delayed.is_empty() && self.pending.is_empty()
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

    fn carry_slowly(
        &mut self,
        counts: &Counts,
        queues: &mut [Queue; 2],
        profile: &Profile,
    ) -> io::Result<()> {
        let [up, down] = queues;
        self.up.carry_slowly(&self.client, &self.server, &counts.to_server, up, profile)?;
        self.down.carry_slowly(&self.server, &self.client, &counts.to_client, down, profile)
    }

    fn has_ended(&self) -> bool {
        self.up.is_over() || self.down.is_over()
    }

    fn is_due(&self, now: Instant) -> bool {
        self.up.is_due(now) || self.down.is_due(now)
    }

    /// When its last byte was sent.
    fn last(&self) -> Instant {
        self.up.last.max(self.down.last)
    }

    /// What has to happen before more can move.
    fn wanted(&self) -> [EventFlags; 2] {
        let flags = |from: &Direction, to: &Direction| {
            let mut flags = EventFlags::empty();
            flags.set(EventFlags::IN, from.pending.is_empty() && from.held < WINDOW && !from.ended);
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
    profile: Profile,
    /// Of each client: to the server, and from it.
    queues: Vec<[Queue; 2]>,
    /// Connections that the NAT has forgotten.
    forgotten: Vec<Link>,
    last_cut: Instant,
}

impl Links {
    fn new(
        listeners: Vec<TcpListener>,
        server: SocketAddr,
        shared: Arc<Shared>,
        profile: Profile,
    ) -> io::Result<Links> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (number, listener) in listeners.iter().enumerate() {
            listener.set_nonblocking(true)?;
            epoll::add(&epoll, listener, EventData::new_u64(LISTENER | number as u64), EventFlags::IN)?;
        }
        let buffer = vec![0; 64 * 1024];
        let now = Instant::now();
        let queue = |number: u64| Queue { free: now, random: Random::new(profile.seed.wrapping_add(number)) };
        let queues = (0..listeners.len() as u64).map(|client| [queue(2 * client), queue(2 * client + 1)]);
        Ok(Links {
            epoll,
            queues: queues.collect(),
            listeners,
            server,
            shared,
            links: BTreeMap::new(),
            last: 0,
            buffer,
            profile,
            forgotten: Vec::new(),
            last_cut: now,
        })
    }

    /// Waits for events, and handles them.
    fn turn(&mut self) -> io::Result<()> {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(256);
        // As STEP, or the precision of arrivals.
        let limit = if self.profile.is_quick() { 50_000_000 } else { 5_000_000 };
        let limit = Timespec { tv_sec: 0, tv_nsec: limit };
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
        self.pass_time(Instant::now())
    }

    /// Does what is due.
    fn pass_time(&mut self, now: Instant) -> io::Result<()> {
        let due = self.links.iter().filter(|(_, link)| link.is_due(now)).map(|(id, _)| *id);
        for id in due.collect::<Vec<u64>>() {
            self.carry(id, EventFlags::empty());
        }
        if let Some(limit) = self.profile.forget_after {
            let is_idle = |link: &Link| now.saturating_duration_since(link.last()) >= limit;
            let idle = self.links.iter().filter(|(_, link)| is_idle(link)).map(|(id, _)| *id);
            for id in idle.collect::<Vec<u64>>() {
                let Some(link) = self.links.remove(&id) else { continue };
                for socket in [&link.client, &link.server] {
                    epoll::delete(&self.epoll, socket)?;
                    sockopt::set_ip_tos(socket, FORGOTTEN)?;
                }
                self.shared.counts[link.number].forgotten.fetch_add(1, Ordering::SeqCst);
                self.forgotten.push(link);
            }
        }
        if self.profile.cut_every.is_some_and(|every| now.saturating_duration_since(self.last_cut) >= every) {
            self.last_cut = now;
            for link in std::mem::take(&mut self.links).into_values() {
                for socket in [&link.client, &link.server] {
                    // The close is a reset.
                    sockopt::set_socket_linger(socket, Some(Duration::ZERO))?;
                }
                self.shared.counts[link.number].closed.fetch_add(1, Ordering::SeqCst);
            }
            self.shared.cuts.fetch_add(1, Ordering::SeqCst);
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
        let now = Instant::now();
        // Its handshake: the bytes of the client leave it when the response of the server has arrived.
        let up = Direction::new(now, now + self.profile.delay * 3);
        let down = Direction::new(now, now);
        self.links.insert(self.last, Link { number, client, server, up, down, interest });
        Ok(())
    }

    fn carry(&mut self, id: u64, flags: EventFlags) {
        // An earlier event of the same turn may have ended it.
        let Some(link) = self.links.get_mut(&id) else { return };
        let number = link.number;
        let counts = &self.shared.counts[number];
        let carried = match self.profile.is_quick() {
            true => link.carry(counts, &mut self.buffer),
            false => link.carry_slowly(counts, &mut self.queues[number], &self.profile),
        };
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
