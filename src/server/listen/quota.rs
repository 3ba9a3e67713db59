//! Quotas: a maximum of concurrent permits in total, and for one address or one user.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam_channel::{Sender, bounded, select_biased};

use super::limiter::{Peer, peer};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads;

/// The owner whose limit includes a permit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Owner {
    Address(Peer),
    User(String),
}

/// Owners, each with its maximum.
#[derive(Debug, Clone, Default)]
pub(crate) struct Limits(Arc<[(Owner, usize)]>);

/// The sender of a request, by its owners.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller {
    address: Peer,
    /// The user of a token.
    user: Option<String>,
}

impl Caller {
    /// `user`: the user of a token.
    pub(crate) fn new(address: Option<SocketAddr>, user: Option<String>) -> Self {
        Caller { address: address.map(|address| peer(address.ip())).unwrap_or_default(), user }
    }

    /// The limit of its address and, for the user of a token, of that user.
    pub(crate) fn limits(&self, of_address: usize, of_user: usize) -> Limits {
        let user = self.user.clone().map(|user| (Owner::User(user), of_user));
        Limits([(Owner::Address(self.address), of_address)].into_iter().chain(user).collect())
    }
}

#[cfg(test)]
impl Caller {
    pub(crate) fn from_ip(ip: &str, user: Option<&str>) -> Self {
        Caller::new(Some(format!("{ip}:1").parse().unwrap()), user.map(str::to_owned))
    }
}

/// `all` permits.
#[derive(Debug)]
pub(crate) struct Quota {
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
    permits: Sender<Permit>,
}

/// One permit. Dropping it returns it to the quota.
#[derive(Debug)]
pub(crate) struct Permit {
    quota: Arc<Quota>,
    limits: Limits,
}

impl State {
    fn fits(&self, limits: &Limits, all: usize) -> bool {
        let has = |owner| self.by.get(owner).copied().unwrap_or(0);
        self.taken < all && limits.0.iter().all(|(owner, most)| has(owner) < *most)
    }

    fn take(&mut self, limits: &Limits) {
        self.taken += 1;
        for (owner, _) in limits.0.iter() {
            *self.by.entry(owner.clone()).or_default() += 1;
        }
    }

    fn release(&mut self, limits: &Limits) {
        self.taken = self.taken.saturating_sub(1);
        for (owner, _) in limits.0.iter() {
            if let Some(count) = self.by.get_mut(owner) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.by.remove(owner);
                }
            }
        }
    }
}

impl Quota {
    pub(crate) fn new(all: usize) -> Arc<Quota> {
        Arc::new(Quota { all, state: Mutex::default() })
    }

    /// Takes a permit without waiting.
    pub(crate) fn take(self: &Arc<Self>, limits: Limits) -> Option<Permit> {
        let mut state = self.state.locked();
        if !state.fits(&limits, self.all) {
            return None;
        }
        state.take(&limits);
        Some(Permit { quota: Arc::clone(self), limits })
    }

    /// Waits for a permit up to `limit` or until `stop`.
    pub(crate) fn wait(
        self: &Arc<Self>,
        limits: Limits,
        limit: Duration,
        what: &'static str,
        stop: &StopToken,
    ) -> Option<Permit> {
        let (permits, received) = bounded(1);
        let id = {
            let mut state = self.state.locked();
            if state.fits(&limits, self.all) {
                state.take(&limits);
                return Some(Permit { quota: Arc::clone(self), limits });
            }
            state.next += 1;
            let id = state.next;
            state.waiting.push_back(Waiter { id, limits, permits });
            id
        };
        let _waiting = threads::waiting(what);
        let permit = select_biased! {
            recv(received) -> permit => permit.ok(),
            recv(stop.signal()) -> _ => None,
            default(limit) => None,
        };
        if permit.is_none() {
            self.state.locked().waiting.retain(|waiter| waiter.id != id);
        }
        // A permit may have arrived after the end of the wait.
        permit.or_else(|| received.try_recv().ok())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let next = {
            let mut state = self.quota.state.locked();
            state.release(&self.limits);
            let mut next = Vec::new();
            // One returned permit may end two waits: one for the address, one for the user.
            while let Some(index) =
                state.waiting.iter().position(|waiter| state.fits(&waiter.limits, self.quota.all))
                && let Some(waiter) = state.waiting.remove(index)
            {
                state.take(&waiter.limits);
                next.push(waiter);
            }
            next
        };
        for Waiter { limits, permits, .. } in next {
            // A waiter that has left drops it, which passes it to the next.
            let _ = permits.try_send(Permit { quota: Arc::clone(&self.quota), limits });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{OnDeath, Running, Stack};
    use crossbeam_channel::Receiver;

    fn is_unused(quota: &Quota) -> bool {
        let state = quota.state.locked();
        state.taken == 0 && state.by.is_empty() && state.waiting.is_empty()
    }

    /// A thread that waits for a permit, and the result of the wait.
    fn waiter(quota: &Arc<Quota>, limits: Limits, limit: Duration) -> (Running, Receiver<Option<Permit>>) {
        let quota = Arc::clone(quota);
        let (send, result) = bounded(1);
        let thread = threads::spawn("waiter", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let _ = send.send(quota.wait(limits, limit, "a permit", &stop));
        });
        (thread.unwrap(), result)
    }

    fn await_waiters(quota: &Quota, count: usize) {
        while quota.state.locked().waiting.len() != count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn owner_gets_at_most_its_limit() {
        let quota = Quota::new(10);
        let take = |ip: &str, user| quota.take(Caller::from_ip(ip, user).limits(6, 3));
        let of_address: Vec<_> = (0..9).filter_map(|_| take("10.0.0.1", None)).collect();
        assert_eq!(of_address.len(), 6);
        // A user with many addresses, and another user.
        let of_user: Vec<_> = (2..9).filter_map(|n| take(&format!("10.0.0.{n}"), Some("a"))).collect();
        assert_eq!(of_user.len(), 3);
        let last = take("10.0.0.2", Some("b")).unwrap();
        assert!(take("10.0.0.9", None).is_none(), "there are ten");
        drop((of_address, of_user, last));
        assert!(is_unused(&quota));
        assert!(take("10.0.0.1", None).is_some());
    }

    #[test]
    fn next_waiter_within_its_limit_gets_the_permit() {
        let quota = Quota::new(2);
        let wait = |ip, limit| waiter(&quota, Caller::from_ip(ip, None).limits(1, 1), limit);
        let long = Duration::from_secs(60);
        let (a, b) = (quota.take(Caller::from_ip("10.0.0.1", None).limits(1, 1)), wait("10.0.0.2", long));
        let b_has = b.1.recv().unwrap().unwrap();
        let first = wait("10.0.0.1", long);
        await_waiters(&quota, 1);
        let second = wait("10.0.0.3", long);
        await_waiters(&quota, 2);
        // The address of the first still has its permit.
        drop(b_has);
        let second_has = second.1.recv().unwrap().unwrap();
        assert!(first.1.is_empty());
        drop(a);
        let first_has = first.1.recv().unwrap().unwrap();
        // Timeout and stop.
        assert!(wait("10.0.0.4", Duration::ZERO).1.recv().unwrap().is_none());
        let (mut thread, result) = wait("10.0.0.4", long);
        thread.request_stop();
        assert!(result.recv().unwrap().is_none());
        assert!(quota.state.locked().waiting.is_empty());
        drop((first_has, second_has));
        assert!(is_unused(&quota));
    }

    #[test]
    fn one_returned_permit_can_serve_two_waiters() {
        let quota = Quota::new(10);
        let has = quota.take(Caller::from_ip("10.0.0.1", Some("u")).limits(1, 1));
        let long = Duration::from_secs(60);
        let wait = |ip, user| waiter(&quota, Caller::from_ip(ip, Some(user)).limits(1, 1), long);
        // The first request waits for the address, the second one for the user.
        let (address, user) = (wait("10.0.0.1", "v"), wait("10.0.0.2", "u"));
        await_waiters(&quota, 2);
        drop(has);
        let both = [address.1.recv().unwrap(), user.1.recv().unwrap()];
        assert!(both.iter().all(Option::is_some));
        drop(both);
        assert!(is_unused(&quota));
    }
}
