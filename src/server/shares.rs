//! Shares of what the main port has little of: so many at once in all, and so many of those
//! for one address or one user.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Sender, bounded, select_biased};

use super::crowd::{self, Peer};
use crate::util::stop::StopToken;
use crate::util::threads;

/// Whose share.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Holder {
    Address(Peer),
    User(String),
}

/// Holders, each with the most that it may have.
#[derive(Debug, Clone, Default)]
pub(super) struct Claims(Arc<[(Holder, usize)]>);

/// Who asks, as far as shares go by it.
#[derive(Debug, Clone, Default)]
pub(super) struct Caller {
    address: Peer,
    /// Whom a token named.
    user: Option<String>,
}

impl Caller {
    /// `user`: whom a token named.
    pub(super) fn new(address: Option<SocketAddr>, user: Option<String>) -> Self {
        Caller { address: address.map(|address| crowd::peer(address.ip())).unwrap_or_default(), user }
    }

    /// A share of its address and, where a token named somebody, one of that user.
    pub(super) fn claims(&self, of_address: usize, of_user: usize) -> Claims {
        let user = self.user.clone().map(|user| (Holder::User(user), of_user));
        Claims([(Holder::Address(self.address), of_address)].into_iter().chain(user).collect())
    }
}

/// Something that there is so much of.
#[derive(Debug)]
pub(super) struct Shares {
    all: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    by: HashMap<Holder, usize>,
    waiting: VecDeque<Waiter>,
    next: u64,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    claims: Claims,
    give: Sender<Slot>,
}

/// One of them; dropping it gives it back.
#[derive(Debug)]
pub(super) struct Slot {
    shares: Arc<Shares>,
    claims: Claims,
}

impl State {
    fn fits(&self, claims: &Claims, all: usize) -> bool {
        let has = |holder| self.by.get(holder).copied().unwrap_or(0);
        self.taken < all && claims.0.iter().all(|(holder, most)| has(holder) < *most)
    }

    fn take(&mut self, claims: &Claims) {
        self.taken += 1;
        for (holder, _) in claims.0.iter() {
            *self.by.entry(holder.clone()).or_default() += 1;
        }
    }

    fn give_back(&mut self, claims: &Claims) {
        self.taken = self.taken.saturating_sub(1);
        for (holder, _) in claims.0.iter() {
            if let Some(count) = self.by.get_mut(holder) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.by.remove(holder);
                }
            }
        }
    }
}

impl Shares {
    pub(super) fn new(all: usize) -> Arc<Shares> {
        Arc::new(Shares { all, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of them now, or none.
    pub(super) fn take(self: &Arc<Self>, claims: Claims) -> Option<Slot> {
        let mut state = self.lock();
        if !state.fits(&claims, self.all) {
            return None;
        }
        state.take(&claims);
        Some(Slot { shares: Arc::clone(self), claims })
    }

    /// One of them, perhaps after a while.
    pub(super) fn wait(
        self: &Arc<Self>,
        claims: Claims,
        limit: Duration,
        what: &'static str,
        stop: &StopToken,
    ) -> Option<Slot> {
        let (give, given) = bounded(1);
        let id = {
            let mut state = self.lock();
            if state.fits(&claims, self.all) {
                state.take(&claims);
                return Some(Slot { shares: Arc::clone(self), claims });
            }
            state.next += 1;
            let id = state.next;
            state.waiting.push_back(Waiter { id, claims, give });
            id
        };
        let _waiting = threads::waiting(what);
        let slot = select_biased! {
            recv(given) -> slot => slot.ok(),
            recv(stop.signal()) -> _ => None,
            default(limit) => None,
        };
        if slot.is_none() {
            self.lock().waiting.retain(|waiter| waiter.id != id);
        }
        // It may have come at the last moment.
        slot.or_else(|| given.try_recv().ok())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let next = {
            let mut state = self.shares.lock();
            state.give_back(&self.claims);
            let mut next = Vec::new();
            // Several may have waited for it: for the address's share, and for the user's.
            while let Some(at) =
                state.waiting.iter().position(|waiter| state.fits(&waiter.claims, self.shares.all))
                && let Some(waiter) = state.waiting.remove(at)
            {
                state.take(&waiter.claims);
                next.push(waiter);
            }
            next
        };
        for Waiter { claims, give, .. } in next {
            // One that has given up drops it, which goes on to the next.
            let _ = give.try_send(Slot { shares: Arc::clone(&self.shares), claims });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{OnDeath, Stack};

    fn caller(ip: &str, user: Option<&str>) -> Caller {
        Caller::new(Some(format!("{ip}:1").parse().unwrap()), user.map(str::to_owned))
    }

    fn is_unused(shares: &Shares) -> bool {
        let state = shares.lock();
        state.taken == 0 && state.by.is_empty() && state.waiting.is_empty()
    }

    #[test]
    fn nobody_has_more_than_its_share() {
        let shares = Shares::new(10);
        let take = |ip: &str, user| shares.take(caller(ip, user).claims(6, 3));
        let one: Vec<_> = (0..9).filter_map(|_| take("10.0.0.1", None)).collect();
        assert_eq!(one.len(), 6);
        // A user with many addresses, and another one beside it.
        let two: Vec<_> = (2..9).filter_map(|n| take(&format!("10.0.0.{n}"), Some("a"))).collect();
        assert_eq!(two.len(), 3);
        let last = take("10.0.0.2", Some("b")).unwrap();
        assert!(take("10.0.0.9", None).is_none(), "there are ten");
        drop((one, two, last));
        assert!(is_unused(&shares));
        assert!(take("10.0.0.1", None).is_some());
    }

    #[test]
    fn who_waits_is_next_when_its_share_allows() {
        let shares = Shares::new(2);
        let wait = |ip: &'static str, limit| {
            let shares = Arc::clone(&shares);
            let (tell, told) = bounded(1);
            let thread = threads::spawn("waiter", Stack::Small, OnDeath::Nobody, move |stop| {
                let claims = caller(ip, None).claims(1, 1);
                let _ = tell.send(shares.wait(claims, limit, "a share", &stop));
            });
            (thread.unwrap(), told)
        };
        let long = Duration::from_secs(60);
        let (a, b) = (shares.take(caller("10.0.0.1", None).claims(1, 1)), wait("10.0.0.2", long));
        let b_has = b.1.recv().unwrap().unwrap();
        let first = wait("10.0.0.1", long);
        while shares.lock().waiting.len() != 1 {
            std::thread::yield_now();
        }
        let second = wait("10.0.0.3", long);
        while shares.lock().waiting.len() != 2 {
            std::thread::yield_now();
        }
        // The first one's address has its share still.
        drop(b_has);
        let second_has = second.1.recv().unwrap().unwrap();
        assert!(first.1.is_empty());
        drop(a);
        let first_has = first.1.recv().unwrap().unwrap();
        // In vain, and stopped.
        assert!(wait("10.0.0.4", Duration::ZERO).1.recv().unwrap().is_none());
        let (mut thread, told) = wait("10.0.0.4", long);
        thread.ask_to_stop();
        assert!(told.recv().unwrap().is_none());
        assert!(shares.lock().waiting.is_empty());
        drop((first_has, second_has));
        assert!(is_unused(&shares));
    }

    #[test]
    fn one_that_ends_may_make_room_for_two() {
        let shares = Shares::new(10);
        let has = shares.take(caller("10.0.0.1", Some("u")).claims(1, 1));
        let wait = |ip: &'static str, user: &'static str| {
            let shares = Arc::clone(&shares);
            let (tell, told) = bounded(1);
            let thread = threads::spawn("waiter", Stack::Small, OnDeath::Nobody, move |stop| {
                let claims = caller(ip, Some(user)).claims(1, 1);
                let _ = tell.send(shares.wait(claims, Duration::from_secs(60), "a share", &stop));
            });
            (thread.unwrap(), told)
        };
        // One wants the address's share, the other the user's.
        let (address, user) = (wait("10.0.0.1", "v"), wait("10.0.0.2", "u"));
        while shares.lock().waiting.len() != 2 {
            std::thread::yield_now();
        }
        drop(has);
        let both = [address.1.recv().unwrap(), user.1.recv().unwrap()];
        assert!(both.iter().all(Option::is_some));
        drop(both);
        assert!(is_unused(&shares));
    }
}
