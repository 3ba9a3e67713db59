//! Limits the connections of the node API. Unauthenticated connections are evicted first, slowest
//! first, from the address that has most of them. A connection with a running request is never
//! evicted.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use crate::util::lock::LockExt;

/// DIFFERS: the Go kubelet has no limits here.
/// All connections; each costs a thread.
const ALL: usize = 384;

/// Maximum per client address: an API server has the streams of all its users.
const PER_PEER: usize = 256;

/// Maximum of connections in their handshake, their first head or their review.
const UNAUTHENTICATED: usize = 96;

/// Maximum of those per client address.
const UNAUTHENTICATED_PER_PEER: usize = 32;

/// What a connection is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The connection has had no authorized request.
    Unauthenticated,
    /// A request of the connection is running.
    Busy,
    /// The connection waits for the next request.
    Idle,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    peer: Peer,
    state: State,
    since: Instant,
    socket: Weak<TcpStream>,
}

/// The address that connections are counted by: an IPv4 address, or an IPv6 network of 64 bits, which
/// may belong to one client.
pub(crate) type Peer = [u8; 8];

pub(crate) fn peer(ip: IpAddr) -> Peer {
    match ip.to_canonical() {
        IpAddr::V4(ip) => {
            let [a, b, c, d] = ip.octets();
            // No IPv6 address of a client has this prefix.
            [0, 0, 0, 0, a, b, c, d]
        }
        IpAddr::V6(ip) => {
            let [a, b, c, d, e, f, g, h, ..] = ip.octets();
            [a, b, c, d, e, f, g, h]
        }
    }
}

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    all: Vec<Entry>,
}

/// The connections of the node API.
#[derive(Debug, Default)]
pub(crate) struct ConnectionLimiter {
    entries: Mutex<Entries>,
}

/// A connection that is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    limiter: Arc<ConnectionLimiter>,
    id: u64,
}

impl ConnectionLimiter {
    /// Admits a new connection, if necessary by evicting another. `None`: all others are busy.
    pub(crate) fn admit(
        self: &Arc<Self>,
        ip: IpAddr,
        socket: &Arc<TcpStream>,
        now: Instant,
    ) -> Option<ConnectionPermit> {
        let peer = peer(ip);
        let mut entries = self.entries.locked();
        let theirs = |entry: &Entry| entry.peer == peer;
        let new = |entry: &Entry| entry.state == State::Unauthenticated;
        let idle = |entry: &Entry| entry.state == State::Idle;
        if entries.count(|entry| new(entry) && theirs(entry)) >= UNAUTHENTICATED_PER_PEER {
            entries.evict(|entry| new(entry) && theirs(entry));
        }
        if entries.count(new) >= UNAUTHENTICATED {
            entries.evict_unauthenticated();
        }
        let fits = (entries.count(theirs) < PER_PEER || entries.evict(|entry| idle(entry) && theirs(entry)))
            && (entries.all.len() < ALL || entries.evict(idle) || entries.evict_unauthenticated());
        if !fits {
            return None;
        }
        entries.next += 1;
        let id = entries.next;
        let socket = Arc::downgrade(socket);
        entries.all.push(Entry { id, peer, state: State::Unauthenticated, since: now, socket });
        Some(ConnectionPermit { limiter: Arc::clone(self), id })
    }
}

impl Entries {
    fn count(&self, which: impl Fn(&Entry) -> bool) -> usize {
        self.all.iter().filter(|entry| which(entry)).count()
    }

    /// Evicts the slowest unauthenticated connection of the address that has most of them: a client
    /// with one or two of them gets the time that it needs, however fast others connect.
    fn evict_unauthenticated(&mut self) -> bool {
        let mut by_peer: HashMap<Peer, (usize, Reverse<Instant>)> = HashMap::new();
        for entry in self.all.iter().filter(|entry| entry.state == State::Unauthenticated) {
            let (count, oldest) = by_peer.entry(entry.peer).or_insert((0, Reverse(entry.since)));
            *count += 1;
            // The earliest has the greatest reverse.
            *oldest = (*oldest).max(Reverse(entry.since));
        }
        let most = by_peer.into_iter().max_by_key(|(_, most)| *most);
        most.is_some_and(|(peer, _)| {
            self.evict(|entry| entry.state == State::Unauthenticated && entry.peer == peer)
        })
    }

    /// Evicts the connection that has been in its state for longest; false if there is none.
    fn evict(&mut self, which: impl Fn(&Entry) -> bool) -> bool {
        let found = self
            .all
            .iter()
            .enumerate()
            .filter(|(_, entry)| which(entry))
            .min_by_key(|(_, entry)| entry.since);
        let Some(index) = found.map(|(index, _)| index) else { return false };
        let gone = self.all.swap_remove(index);
        if let Some(socket) = gone.socket.upgrade() {
            // `shutdown` fails if the socket is closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        true
    }
}

impl ConnectionPermit {
    /// A request of the connection is running.
    pub(crate) fn busy(&self, now: Instant) {
        self.change(|own| (own.state, own.since) = (State::Busy, now));
    }

    /// The request has ended. A connection whose request was rejected stays unauthenticated.
    pub(crate) fn idle(&self, now: Instant) {
        self.change(|own| {
            if own.state == State::Busy {
                (own.state, own.since) = (State::Idle, now);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Entry)) {
        if let Some(own) = self.limiter.entries.locked().all.iter_mut().find(|entry| entry.id == self.id) {
            change(own);
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.limiter.entries.locked().all.retain(|entry| entry.id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Duration;

    struct Fixture {
        limiter: Arc<ConnectionLimiter>,
        sockets: Vec<Arc<TcpStream>>,
        begun: Instant,
        socket: Arc<TcpStream>,
    }

    impl Fixture {
        fn new() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let socket = Arc::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            Fixture { limiter: Arc::default(), sockets: Vec::new(), begun: Instant::now(), socket }
        }

        fn time_at(&self, second: u64) -> Instant {
            self.begun + Duration::from_secs(second)
        }

        fn admit(&mut self, ip: &str, second: u64) -> Option<ConnectionPermit> {
            let socket = Arc::new(self.socket.try_clone().unwrap());
            let permit = self.limiter.admit(ip.parse().unwrap(), &socket, self.time_at(second));
            self.sockets.push(socket);
            permit
        }

        fn has(&self, permit: &ConnectionPermit) -> bool {
            self.limiter.entries.locked().all.iter().any(|entry| entry.id == permit.id)
        }

        fn len(&self) -> usize {
            self.limiter.entries.locked().all.len()
        }
    }

    #[test]
    fn slowest_unauthenticated_connection_of_an_address_is_evicted() {
        let mut fixture = Fixture::new();
        let slow = fixture.admit("10.0.0.1", 0).unwrap();
        let authorized = fixture.admit("10.0.0.1", 1).unwrap();
        authorized.busy(fixture.time_at(1));
        slow.idle(fixture.time_at(1));
        let mut others: Vec<_> = (0..31).map(|n| fixture.admit("10.0.0.1", 2 + n).unwrap()).collect();
        assert!(fixture.has(&slow));
        // The same address, mapped to IPv6.
        others.push(fixture.admit("::ffff:10.0.0.1", 50).unwrap());
        assert!(!fixture.has(&slow) && fixture.has(&authorized) && fixture.has(&others[0]));
        let other = fixture.admit("10.0.0.2", 51).unwrap();
        assert!(fixture.has(&others[0]) && fixture.has(&other));
        drop((slow, other));
        assert_eq!(fixture.len(), 33);
        drop(others);
        drop(authorized);
        assert_eq!(fixture.len(), 0);
    }

    #[test]
    fn unauthenticated_connections_of_all_addresses_are_limited() {
        let mut fixture = Fixture::new();
        let permits: Vec<_> =
            (0..200_u64).map(|n| fixture.admit(&format!("10.0.1.{n}"), n).unwrap()).collect();
        assert_eq!(fixture.len(), UNAUTHENTICATED);
        assert!(!fixture.has(&permits[0]) && fixture.has(&permits[199]));
    }

    #[test]
    fn single_connection_of_an_address_outlasts_floods_of_others() {
        let mut fixture = Fixture::new();
        let alone = fixture.admit("10.0.0.1", 0).unwrap();
        let limiter: Vec<_> =
            (0..500).map(|n| fixture.admit(&format!("10.0.1.{}", n % 40), 1 + n).unwrap()).collect();
        assert_eq!(fixture.len(), UNAUTHENTICATED);
        assert!(fixture.has(&alone) && fixture.has(&limiter[499]) && !fixture.has(&limiter[0]));
    }

    #[test]
    fn ipv6_addresses_of_one_network_count_together() {
        let mut fixture = Fixture::new();
        let permits: Vec<_> =
            (0..40_u64).map(|n| fixture.admit(&format!("fd00::1:{n}"), n).unwrap()).collect();
        assert_eq!(fixture.len(), UNAUTHENTICATED_PER_PEER);
        assert!(!fixture.has(&permits[0]));
    }

    #[test]
    fn idle_connections_are_evicted_and_busy_ones_are_not() {
        let mut fixture = Fixture::new();
        let mut permits = Vec::new();
        for n in 0..PER_PEER as u64 {
            let permit = fixture.admit("10.0.0.1", n).unwrap();
            permit.busy(fixture.time_at(n));
            if n == 7 {
                permit.idle(fixture.time_at(n));
            }
            permits.push(permit);
        }
        let last = fixture.admit("10.0.0.1", 999).unwrap();
        assert!(!fixture.has(&permits[7]) && fixture.has(&last));
        last.busy(fixture.time_at(999));
        assert!(fixture.admit("10.0.0.1", 1000).is_none());
        let others: Vec<_> = (0..ALL - PER_PEER)
            .map(|n| {
                let permit = fixture.admit(&format!("10.1.0.{}", n % 8), 1001).unwrap();
                permit.busy(fixture.time_at(1001));
                permit
            })
            .collect();
        assert_eq!(fixture.len(), ALL);
        assert!(fixture.admit("10.2.0.1", 1002).is_none());
        drop(others);
        assert!(fixture.admit("10.2.0.1", 1003).is_some());
    }
}
