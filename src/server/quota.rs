//! Quotas: at most so many at once in all, and so many of those for one address or one user.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Sender, bounded, select_biased};

use super::listen::limiter::{Peer, peer};
use crate::util::stop::StopToken;
use crate::util::threads;

/// For whom a permit counts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Owner {
    Address(Peer),
    User(String),
}

/// Owners, each with the most that it may have at once.
#[derive(Debug, Clone, Default)]
pub(super) struct Limits(Arc<[(Owner, usize)]>);

/// Who asks, as far as quota go by it.
#[derive(Debug, Clone, Default)]
pub(super) struct Caller {
    address: Peer,
    /// The user of a token.
    user: Option<String>,
}

impl Caller {
    /// `user`: the user of a token.
    pub(super) fn new(address: Option<SocketAddr>, user: Option<String>) -> Self {
        Caller { address: address.map(|address| peer(address.ip())).unwrap_or_default(), user }
    }

    /// The limit of its address and, for the user of a token, the one of that user.
    pub(super) fn limits(&self, of_address: usize, of_user: usize) -> Limits {
        let user = self.user.clone().map(|user| (Owner::User(user), of_user));
        Limits([(Owner::Address(self.address), of_address)].into_iter().chain(user).collect())
    }
}

/// Permits, `all` of them.
#[derive(Debug)]
pub(super) struct Quota {
    all: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    by: HashMap<Owner, usize>,
    waiting: VecDeque<Waiter>,
    next: u64,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    limits: Limits,
    give: Sender<Permit>,
}

/// One permit; dropping it gives it back.
#[derive(Debug)]
pub(super) struct Permit {
    quota: Arc<Quota>,
    limits: Limits,
}

impl State {
    fn fits(&self, limits: &Limits, all: usize) -> bool {
        let has = |holder| self.by.get(holder).copied().unwrap_or(0);
        self.taken < all && limits.0.iter().all(|(holder, most)| has(holder) < *most)
    }

    fn take(&mut self, limits: &Limits) {
        self.taken += 1;
        for (holder, _) in limits.0.iter() {
            *self.by.entry(holder.clone()).or_default() += 1;
        }
    }

    fn give_back(&mut self, limits: &Limits) {
        self.taken = self.taken.saturating_sub(1);
        for (holder, _) in limits.0.iter() {
            if let Some(count) = self.by.get_mut(holder) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.by.remove(holder);
                }
            }
        }
    }
}

impl Quota {
    pub(super) fn new(all: usize) -> Arc<Quota> {
        Arc::new(Quota { all, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A permit, if there is one now.
    pub(super) fn take(self: &Arc<Self>, limits: Limits) -> Option<Permit> {
        let mut state = self.lock();
        if !state.fits(&limits, self.all) {
            return None;
        }
        state.take(&limits);
        Some(Permit { quota: Arc::clone(self), limits })
    }

    /// A permit, perhaps after a while.
    pub(super) fn wait(
        self: &Arc<Self>,
        limits: Limits,
        limit: Duration,
        what: &'static str,
        stop: &StopToken,
    ) -> Option<Permit> {
        let (give, given) = bounded(1);
        let id = {
            let mut state = self.lock();
            if state.fits(&limits, self.all) {
                state.take(&limits);
                return Some(Permit { quota: Arc::clone(self), limits });
            }
            state.next += 1;
            let id = state.next;
            state.waiting.push_back(Waiter { id, limits, give });
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

impl Drop for Permit {
    fn drop(&mut self) {
        let next = {
            let mut state = self.quota.lock();
            state.give_back(&self.limits);
            let mut next = Vec::new();
            // Several may have waited for it: for the address's, and for the user's.
            while let Some(at) =
                state.waiting.iter().position(|waiter| state.fits(&waiter.limits, self.quota.all))
                && let Some(waiter) = state.waiting.remove(at)
            {
                state.take(&waiter.limits);
                next.push(waiter);
            }
            next
        };
        for Waiter { limits, give, .. } in next {
            // One that has given up drops it, which gives it to the next.
            let _ = give.try_send(Permit { quota: Arc::clone(&self.quota), limits });
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

    fn is_unused(quota: &Quota) -> bool {
        let state = quota.lock();
        state.taken == 0 && state.by.is_empty() && state.waiting.is_empty()
    }

    #[test]
    fn owner_gets_at_most_its_limit() {
        let quota = Quota::new(10);
        let take = |ip: &str, user| quota.take(caller(ip, user).limits(6, 3));
        let one: Vec<_> = (0..9).filter_map(|_| take("10.0.0.1", None)).collect();
        assert_eq!(one.len(), 6);
        // A user with many addresses, and another one beside it.
        let two: Vec<_> = (2..9).filter_map(|n| take(&format!("10.0.0.{n}"), Some("a"))).collect();
        assert_eq!(two.len(), 3);
        let last = take("10.0.0.2", Some("b")).unwrap();
        assert!(take("10.0.0.9", None).is_none(), "there are ten");
        drop((one, two, last));
        assert!(is_unused(&quota));
        assert!(take("10.0.0.1", None).is_some());
    }

    #[test]
    fn next_waiter_within_its_limit_gets_the_permit() {
        let quota = Quota::new(2);
        let wait = |ip: &'static str, limit| {
            let quota = Arc::clone(&quota);
            let (send, result) = bounded(1);
            let thread = threads::spawn("waiter", Stack::Small, OnDeath::Nobody, move |stop| {
                let limits = caller(ip, None).limits(1, 1);
                let _ = send.send(quota.wait(limits, limit, "a share", &stop));
            });
            (thread.unwrap(), result)
        };
        let long = Duration::from_secs(60);
        let (a, b) = (quota.take(caller("10.0.0.1", None).limits(1, 1)), wait("10.0.0.2", long));
        let b_has = b.1.recv().unwrap().unwrap();
        let first = wait("10.0.0.1", long);
        while quota.lock().waiting.len() != 1 {
            std::thread::yield_now();
        }
        let second = wait("10.0.0.3", long);
        while quota.lock().waiting.len() != 2 {
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
        let (mut thread, result) = wait("10.0.0.4", long);
        thread.ask_to_stop();
        assert!(result.recv().unwrap().is_none());
        assert!(quota.lock().waiting.is_empty());
        drop((first_has, second_has));
        assert!(is_unused(&quota));
    }

    #[test]
    fn one_returned_permit_can_serve_two_waiters() {
        let quota = Quota::new(10);
        let has = quota.take(caller("10.0.0.1", Some("u")).limits(1, 1));
        let wait = |ip: &'static str, user: &'static str| {
            let quota = Arc::clone(&quota);
            let (send, result) = bounded(1);
            let thread = threads::spawn("waiter", Stack::Small, OnDeath::Nobody, move |stop| {
                let limits = caller(ip, Some(user)).limits(1, 1);
                let _ = send.send(quota.wait(limits, Duration::from_secs(60), "a share", &stop));
            });
            (thread.unwrap(), result)
        };
        // One wants the address's share, the other the user's.
        let (address, user) = (wait("10.0.0.1", "v"), wait("10.0.0.2", "u"));
        while quota.lock().waiting.len() != 2 {
            std::thread::yield_now();
        }
        drop(has);
        let both = [address.1.recv().unwrap(), user.1.recv().unwrap()];
        assert!(both.iter().all(Option::is_some));
        drop(both);
        assert!(is_unused(&quota));
    }
}
