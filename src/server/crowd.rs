//! Who may be connected to the main port at once. A newcomer always finds room among the
//! newcomers: the slowest goes, of the address that has most of them. Whoever was let in stays while it is being served.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

/// DIFFERS: the Go kubelet has no limits here.
/// All connections; one with an open stream costs two threads, or three.
const ALL: usize = 384;

/// Those of one address: an API server has the streams of all its users.
const PER_PEER: usize = 256;

/// Those that nothing is known of yet: in their handshake, their first head, their review.
const NEWCOMERS: usize = 96;

/// Newcomers from one address.
const NEWCOMERS_PER_PEER: usize = 32;

/// What a connection is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing it asked for was granted yet.
    New,
    /// It is being served.
    Busy,
    /// It was served and may ask again.
    Idle,
}

#[derive(Debug)]
struct Member {
    id: u64,
    peer: Peer,
    state: State,
    since: Instant,
    socket: Weak<TcpStream>,
}

/// Whom addresses are counted for: whoever has an IPv6 address has 2^64 of them.
pub(super) type Peer = [u8; 8];

pub(super) fn peer(ip: IpAddr) -> Peer {
    match ip.to_canonical() {
        IpAddr::V4(ip) => {
            let [a, b, c, d] = ip.octets();
            // Not the beginning of any IPv6 address that can be somebody's.
            [0, 0, 0, 0, a, b, c, d]
        }
        IpAddr::V6(ip) => {
            let [a, b, c, d, e, f, g, h, ..] = ip.octets();
            [a, b, c, d, e, f, g, h]
        }
    }
}

#[derive(Debug, Default)]
struct Members {
    next: u64,
    all: Vec<Member>,
}

/// The connections of the main port.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    members: Mutex<Members>,
}

/// A connection's place; dropping it gives the place up.
#[derive(Debug)]
pub(super) struct Place {
    crowd: Arc<Crowd>,
    id: u64,
}

impl Crowd {
    fn lock(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new connection, if need be at the cost of another; `None`: everybody
    /// here is being served.
    pub(super) fn enter(
        self: &Arc<Self>,
        ip: IpAddr,
        socket: &Arc<TcpStream>,
        now: Instant,
    ) -> Option<Place> {
        let peer = peer(ip);
        let mut members = self.lock();
        let theirs = |member: &Member| member.peer == peer;
        let new = |member: &Member| member.state == State::New;
        let idle = |member: &Member| member.state == State::Idle;
        if members.count(|one| new(one) && theirs(one)) >= NEWCOMERS_PER_PEER {
            members.evict(|one| new(one) && theirs(one));
        }
        if members.count(new) >= NEWCOMERS {
            members.evict_newcomer();
        }
        let fits = (members.count(theirs) < PER_PEER || members.evict(|one| idle(one) && theirs(one)))
            && (members.all.len() < ALL || members.evict(idle) || members.evict_newcomer());
        if !fits {
            return None;
        }
        members.next += 1;
        let id = members.next;
        let socket = Arc::downgrade(socket);
        members.all.push(Member { id, peer, state: State::New, since: now, socket });
        Some(Place { crowd: Arc::clone(self), id })
    }
}

impl Members {
    fn count(&self, which: impl Fn(&Member) -> bool) -> usize {
        self.all.iter().filter(|one| which(one)).count()
    }

    /// Ends the slowest newcomer of the address that has most of them: whoever comes with one or
    /// two has the time that it needs, however fast others come.
    fn evict_newcomer(&mut self) -> bool {
        let mut by_peer: HashMap<Peer, (usize, Reverse<Instant>)> = HashMap::new();
        for one in self.all.iter().filter(|one| one.state == State::New) {
            let (count, oldest) = by_peer.entry(one.peer).or_insert((0, Reverse(one.since)));
            *count += 1;
            // The reverse of the earliest is the greatest.
            *oldest = (*oldest).max(Reverse(one.since));
        }
        let most = by_peer.into_iter().max_by_key(|(_, most)| *most);
        most.is_some_and(|(peer, _)| self.evict(|one| one.state == State::New && one.peer == peer))
    }

    /// Ends the connection that has been in its state for longest; false if there is none.
    fn evict(&mut self, which: impl Fn(&Member) -> bool) -> bool {
        let found =
            self.all.iter().enumerate().filter(|(_, one)| which(one)).min_by_key(|(_, one)| one.since);
        let Some(at) = found.map(|(at, _)| at) else { return false };
        let gone = self.all.swap_remove(at);
        if let Some(socket) = gone.socket.upgrade() {
            // One that is closed already has left by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
        true
    }
}

impl Place {
    /// The connection is being served from now on.
    pub(super) fn busy(&self, now: Instant) {
        self.change(|own| (own.state, own.since) = (State::Busy, now));
    }

    /// It was answered. A newcomer that was refused stays one, as old as it is.
    pub(super) fn rest(&self, now: Instant) {
        self.change(|own| {
            if own.state == State::Busy {
                (own.state, own.since) = (State::Idle, now);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Member)) {
        if let Some(own) = self.crowd.lock().all.iter_mut().find(|one| one.id == self.id) {
            change(own);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.crowd.lock().all.retain(|one| one.id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Duration;

    struct Room {
        crowd: Arc<Crowd>,
        sockets: Vec<Arc<TcpStream>>,
        begun: Instant,
        socket: Arc<TcpStream>,
    }

    impl Room {
        fn new() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let socket = Arc::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            Room { crowd: Arc::default(), sockets: Vec::new(), begun: Instant::now(), socket }
        }

        fn at(&self, second: u64) -> Instant {
            self.begun + Duration::from_secs(second)
        }

        fn enter(&mut self, ip: &str, second: u64) -> Option<Place> {
            let socket = Arc::new(self.socket.try_clone().unwrap());
            let place = self.crowd.enter(ip.parse().unwrap(), &socket, self.at(second));
            self.sockets.push(socket);
            place
        }

        fn has(&self, place: &Place) -> bool {
            self.crowd.lock().all.iter().any(|one| one.id == place.id)
        }

        fn len(&self) -> usize {
            self.crowd.lock().all.len()
        }
    }

    #[test]
    fn the_slowest_newcomer_of_an_address_makes_room() {
        let mut room = Room::new();
        let slow = room.enter("10.0.0.1", 0).unwrap();
        let let_in = room.enter("10.0.0.1", 1).unwrap();
        let_in.busy(room.at(1));
        slow.rest(room.at(1));
        let mut others: Vec<_> = (0..31).map(|n| room.enter("10.0.0.1", 2 + n).unwrap()).collect();
        assert!(room.has(&slow));
        // The same one, mapped.
        others.push(room.enter("::ffff:10.0.0.1", 50).unwrap());
        assert!(!room.has(&slow) && room.has(&let_in) && room.has(&others[0]));
        let other = room.enter("10.0.0.2", 51).unwrap();
        assert!(room.has(&others[0]) && room.has(&other));
        drop((slow, other));
        assert_eq!(room.len(), 33);
        drop(others);
        drop(let_in);
        assert_eq!(room.len(), 0);
    }

    #[test]
    fn newcomers_from_everywhere_are_bounded_too() {
        let mut room = Room::new();
        let places: Vec<_> = (0..200_u64).map(|n| room.enter(&format!("10.0.1.{n}"), n).unwrap()).collect();
        assert_eq!(room.len(), NEWCOMERS);
        assert!(!room.has(&places[0]) && room.has(&places[199]));
    }

    #[test]
    fn who_comes_alone_is_not_sent_away_for_those_who_come_in_crowds() {
        let mut room = Room::new();
        let alone = room.enter("10.0.0.1", 0).unwrap();
        let crowd: Vec<_> =
            (0..500).map(|n| room.enter(&format!("10.0.1.{}", n % 40), 1 + n).unwrap()).collect();
        assert_eq!(room.len(), NEWCOMERS);
        assert!(room.has(&alone) && room.has(&crowd[499]) && !room.has(&crowd[0]));
    }

    #[test]
    fn one_address_of_version_6_is_a_network() {
        let mut room = Room::new();
        let places: Vec<_> = (0..40_u64).map(|n| room.enter(&format!("fd00::1:{n}"), n).unwrap()).collect();
        assert_eq!(room.len(), NEWCOMERS_PER_PEER);
        assert!(!room.has(&places[0]));
    }

    #[test]
    fn those_who_wait_for_nothing_make_room_for_newcomers_and_streams_do_not() {
        let mut room = Room::new();
        let mut places = Vec::new();
        for n in 0..PER_PEER as u64 {
            let place = room.enter("10.0.0.1", n).unwrap();
            place.busy(room.at(n));
            if n == 7 {
                place.rest(room.at(n));
            }
            places.push(place);
        }
        let last = room.enter("10.0.0.1", 999).unwrap();
        assert!(!room.has(&places[7]) && room.has(&last));
        last.busy(room.at(999));
        assert!(room.enter("10.0.0.1", 1000).is_none());
        let others: Vec<_> = (0..ALL - PER_PEER)
            .map(|n| {
                let place = room.enter(&format!("10.1.0.{}", n % 8), 1001).unwrap();
                place.busy(room.at(1001));
                place
            })
            .collect();
        assert_eq!(room.len(), ALL);
        assert!(room.enter("10.2.0.1", 1002).is_none());
        drop(others);
        assert!(room.enter("10.2.0.1", 1003).is_some());
    }
}
