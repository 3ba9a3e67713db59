//! Caches reviews of the API server. The cache is bounded; the least recently used entries are
//! removed first. Equal reviews at the same time are one request, for whose result all wait.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::settings::Clock;
use crate::server::listen::quota::{Caller, Limits, Permit, Quota};
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads;

/// A digest of the review: neither tokens nor long paths stay in memory.
pub(super) type Key = [u8; 32];

/// How long a caller waits before its own review, for others' equal reviews, whose requests have a
/// shorter limit, and for a permit.
const WAIT_LIMIT: Duration = Duration::from_secs(30);

/// Connections that wait for another one's equal review; each holds a thread.
const MAX_WAITING: usize = 128;

/// Maximum of those per client address. Many requests of an API server may wait for one review.
const WAITING_PER_PEER: usize = 96;

/// Maximum of concurrent reviews per client address; its others wait. There are eight concurrent
/// requests to the API server, so one address alone cannot use them all.
const ACTIVE_PER_PEER: usize = 4;

/// Connections that wait to start a review; each holds a thread.
const MAX_QUEUE: usize = 96;

/// Maximum of those per client address.
const QUEUE_PER_PEER: usize = 24;

/// How long these connections wait.
const QUEUE_LIMIT: Duration = Duration::from_secs(10);

pub(super) struct Cache<V> {
    capacity: usize,
    clock: Clock,
    state: Mutex<State<V>>,
    /// Reviews in progress, limited by address only.
    active: Arc<Quota>,
    /// Connections that wait to start a review.
    queue: Arc<Quota>,
    /// Connections that wait for another one's equal review.
    waiting: Arc<Quota>,
}

struct State<V> {
    entries: HashMap<Key, Entry<V>>,
    pending: HashMap<Key, Arc<Pending<V>>>,
    uses: u64,
}

struct Entry<V> {
    value: V,
    until: Instant,
    used: u64,
}

/// A review that is in progress, or whose caller waits for a permit.
struct Pending<V> {
    has_permit: AtomicBool,
    /// `None`: the caller got no permit, which says nothing about other callers.
    result: OnceLock<Option<Result<V, String>>>,
    /// Disconnected when the result is set, or when the reviewing thread has panicked.
    done: Receiver<Infallible>,
}

/// Ends a review when it is dropped, also by a panic.
struct Active<'a, V> {
    cache: &'a Cache<V>,
    key: Key,
    pending: Arc<Pending<V>>,
    _done: Sender<Infallible>,
}

impl<V> Drop for Active<'_, V> {
    fn drop(&mut self) {
        let mut state = self.cache.state.locked();
        // A caller that got a permit earlier may have replaced it.
        if state.pending.get(&self.key).is_some_and(|pending| Arc::ptr_eq(pending, &self.pending)) {
            state.pending.remove(&self.key);
        }
    }
}

impl<V: Clone> Cache<V> {
    pub(super) fn new(capacity: usize, clock: Clock) -> Self {
        let state = State { entries: HashMap::new(), pending: HashMap::new(), uses: 0 };
        let (active, waiting) = (Quota::new(usize::MAX), Quota::new(MAX_WAITING));
        let queue = Quota::new(MAX_QUEUE);
        Cache { capacity, clock, state: Mutex::new(state), active, queue, waiting }
    }

    /// The cached result, or the one of `review`, which also returns how long to cache it.
    pub(super) fn get_or(
        &self,
        key: Key,
        caller: &Caller,
        review: impl FnOnce() -> Result<(V, Duration), String>,
    ) -> Result<V, String> {
        self.get_until(Instant::now() + WAIT_LIMIT, key, caller, review)
    }

    fn get_until(
        &self,
        deadline: Instant,
        key: Key,
        caller: &Caller,
        review: impl FnOnce() -> Result<(V, Duration), String>,
    ) -> Result<V, String> {
        let remaining = || deadline.saturating_duration_since(Instant::now());
        let (active, permit) = loop {
            let mut state = self.state.locked();
            if let Some(value) = state.get(&key, (self.clock)()) {
                return Ok(value);
            }
            let earlier = state.pending.get(&key).cloned();
            let is_reviewed =
                earlier.as_ref().is_some_and(|earlier| earlier.has_permit.load(Ordering::SeqCst));
            // An earlier caller without a permit does not delay this one.
            let permit = if is_reviewed { None } else { self.active.take(active_limits(caller)) };
            if let Some(earlier) = earlier.filter(|_| permit.is_none()) {
                drop(state);
                let limits = caller.limits(WAITING_PER_PEER, WAITING_PER_PEER);
                let _permit = self.waiting.take(limits).ok_or_else(too_many)?;
                // The refusal of its permit is not this caller's, which has places of its own.
                match earlier.wait(remaining()) {
                    Some(result) => return result,
                    None if remaining().is_zero() => return Err(too_many()),
                    None => continue,
                }
            }
            let (sender, done) = bounded(0);
            let has_permit = AtomicBool::new(permit.is_some());
            let pending = Arc::new(Pending { has_permit, result: OnceLock::new(), done });
            state.pending.insert(key, Arc::clone(&pending));
            break (Active { cache: self, key, pending, _done: sender }, permit);
        };
        let pending = &active.pending;
        // No other thread sets the result.
        let _permit = match permit {
            Some(permit) => permit,
            None => {
                let limit = QUEUE_LIMIT.min(remaining());
                let permit = self.permit_within(limit, caller);
                permit.inspect_err(|_| drop(pending.result.set(None)))?
            }
        };
        pending.has_permit.store(true, Ordering::SeqCst);
        let known = self.state.locked().get(&key, (self.clock)());
        let outcome = known.map_or_else(review, |value| Ok((value, Duration::ZERO))).map(|(value, time)| {
            if !time.is_zero() {
                let now = (self.clock)();
                self.state.locked().put(key, value.clone(), now, time, self.capacity);
            }
            value
        });
        let _ = pending.result.set(Some(outcome.clone()));
        outcome
    }
}

fn too_many() -> String {
    "too many reviews at once".to_owned()
}

fn active_limits(caller: &Caller) -> Limits {
    caller.limits(ACTIVE_PER_PEER, ACTIVE_PER_PEER)
}

impl<V> Cache<V> {
    /// Waits until the caller's address has fewer reviews in progress.
    pub(super) fn review_permit(&self, caller: &Caller) -> Result<Permit, String> {
        self.permit_within(QUEUE_LIMIT, caller)
    }

    fn permit_within(&self, limit: Duration, caller: &Caller) -> Result<Permit, String> {
        let limits = active_limits(caller);
        if let Some(permit) = self.active.take(limits.clone()) {
            return Ok(permit);
        }
        // A waiting connection holds its thread even after it was evicted for another one.
        let queued = caller.limits(QUEUE_PER_PEER, QUEUE_PER_PEER);
        let _permit = self.queue.take(queued).ok_or_else(too_many)?;
        // When the agent stops, the earlier reviews end immediately.
        let never = StopToken::never();
        self.active.wait(limits, limit, "a permit to review", &never).ok_or_else(too_many)
    }
}

impl<V: Clone> Pending<V> {
    /// The result of the other caller; `None`: it got no permit.
    fn wait(&self, limit: Duration) -> Option<Result<V, String>> {
        let _waiting = threads::waiting("a review");
        let _ = self.done.recv_timeout(limit);
        self.result.get().cloned().unwrap_or_else(|| Some(Err("the review has failed".to_owned())))
    }
}

impl<V: Clone> State<V> {
    fn get(&mut self, key: &Key, now: Instant) -> Option<V> {
        let entry = self.entries.get_mut(key)?;
        if entry.until <= now {
            self.entries.remove(key);
            return None;
        }
        self.uses += 1;
        entry.used = self.uses;
        Some(entry.value.clone())
    }

    fn put(&mut self, key: Key, value: V, now: Instant, time: Duration, capacity: usize) {
        // Several entries together, so that a full cache is not searched for each new one.
        if self.entries.len() >= capacity {
            self.entries.retain(|_, entry| entry.until > now);
        }
        if self.entries.len() >= capacity {
            let mut uses: Vec<u64> = self.entries.values().map(|entry| entry.used).collect();
            uses.sort_unstable();
            let least = uses.get(capacity / 8).copied().unwrap_or(u64::MAX);
            self.entries.retain(|_, entry| entry.used > least);
        }
        self.uses += 1;
        if let Some(until) = now.checked_add(time) {
            self.entries.insert(key, Entry { value, until, used: self.uses });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::testing::{BackgroundCall, in_background};
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    thread_local! {
        static LATER: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    fn clock() -> Instant {
        static BEGUN: OnceLock<Instant> = OnceLock::new();
        *BEGUN.get_or_init(Instant::now) + LATER.get()
    }

    fn pass(seconds: u64) {
        LATER.set(LATER.get() + Duration::from_secs(seconds));
    }

    fn key(n: usize) -> Key {
        crate::util::sha256::sha256(&n.to_le_bytes())
    }

    #[test]
    fn results_expire_and_errors_are_not_cached() {
        let cache = Cache::new(100, clock);
        let reviews = Cell::new(0);
        let review = |result: Result<u32, &str>| {
            cache.get_or(key(1), &Caller::default(), || {
                reviews.set(reviews.get() + 1);
                result.map(|value| (value, Duration::from_secs(30))).map_err(str::to_owned)
            })
        };
        assert_eq!(review(Err("unavailable")), Err("unavailable".to_owned()));
        assert_eq!(review(Ok(1)), Ok(1));
        pass(29);
        assert_eq!(review(Err("unavailable")), Ok(1));
        pass(1);
        assert_eq!(review(Err("unavailable")), Err("unavailable".to_owned()));
        assert_eq!(review(Ok(2)), Ok(2));
        assert_eq!(reviews.get(), 4);
        let at_once = || cache.get_or(key(2), &Caller::default(), || Ok((7, Duration::ZERO)));
        assert_eq!((at_once(), at_once()), (Ok(7), Ok(7)));
        assert_eq!(cache.state.locked().entries.len(), 1);
    }

    #[test]
    fn full_cache_removes_the_least_used_entries() {
        let cache = Cache::new(64, clock);
        let review =
            |n: usize| cache.get_or(key(n), &Caller::default(), || Ok((n, Duration::from_secs(60)))).unwrap();
        for n in 0..500 {
            review(n);
            review(0);
            assert!(cache.state.locked().entries.len() <= 64);
        }
        let has = |n: usize| cache.state.locked().entries.contains_key(&key(n));
        assert!(has(0) && has(499) && !has(100));
    }

    #[test]
    fn equal_reviews_at_the_same_time_are_one_request() {
        let cache = Arc::new(Cache::new(8, Instant::now));
        let requests = Arc::new(AtomicUsize::new(0));
        let (go, gate) = bounded::<()>(0);
        let threads: Vec<_> = (0..20)
            .map(|_| {
                let (cache, requests, gate) = (Arc::clone(&cache), Arc::clone(&requests), gate.clone());
                threads::spawn("reviewer", threads::Stack::Small, threads::OnDeath::Unsupervised, move |_| {
                    let result = cache.get_or(key(1), &Caller::default(), || {
                        requests.fetch_add(1, Ordering::SeqCst);
                        let _ = gate.recv();
                        Ok((5, Duration::from_secs(60)))
                    });
                    assert_eq!(result, Ok(5));
                })
                .unwrap()
            })
            .collect();
        drop(go);
        drop(threads);
        assert_eq!(requests.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn panic_during_a_review_ends_the_wait_of_others() {
        let cache: Arc<Cache<u32>> = Arc::new(Cache::new(8, Instant::now));
        let shared = Arc::clone(&cache);
        drop(threads::spawn("reviewer", threads::Stack::Small, threads::OnDeath::Unsupervised, move |_| {
            let _ = shared.get_or(key(1), &Caller::default(), || panic!("of the test"));
        }));
        assert_eq!(cache.get_or(key(1), &Caller::default(), || Ok((1, Duration::from_secs(1)))), Ok(1));
    }

    #[test]
    fn address_without_permits_delays_no_equal_review_of_another() {
        let cache = Arc::new(Cache::new(8, Instant::now));
        let (busy, other) = (Caller::from_ip("10.0.0.1", None), Caller::from_ip("10.0.0.2", None));
        let held: Vec<_> = (0..ACTIVE_PER_PEER).map(|_| cache.review_permit(&busy).unwrap()).collect();
        let (shared, caller) = (Arc::clone(&cache), busy.clone());
        let first =
            in_background(move || shared.get_or(key(1), &caller, || Err("a second review".to_owned())));
        while !cache.state.locked().pending.contains_key(&key(1)) {
            std::thread::yield_now();
        }
        let review = || Ok((5, Duration::from_secs(60)));
        assert_eq!(cache.get_or(key(1), &other, review), Ok(5));
        drop(held);
        assert_eq!(first.result(), Ok(5), "the earlier caller uses its result");
        assert!(cache.state.locked().pending.is_empty());
    }

    /// The review of another caller, which ends when the sender is dropped.
    fn insert(
        cache: &Cache<i32>,
        key: Key,
        result: OnceLock<Option<Result<i32, String>>>,
    ) -> (Arc<Pending<i32>>, Sender<Infallible>) {
        let (sender, done) = bounded(0);
        let pending = Arc::new(Pending { has_permit: AtomicBool::new(true), result, done });
        cache.state.locked().pending.insert(key, Arc::clone(&pending));
        (pending, sender)
    }

    /// Waits until the caller has a place.
    fn wait_taken(quota: &Arc<Quota>, caller: &Caller) {
        let end = Instant::now() + Duration::from_secs(60);
        while quota.take(caller.limits(1, 1)).is_some() {
            assert!(Instant::now() < end, "it does not wait");
            std::thread::yield_now();
        }
    }

    /// A call that has waited for an equal one of another caller, which got no permit then.
    fn wait_for_refused(cache: &Arc<Cache<i32>>, caller: &Caller) -> BackgroundCall<Result<i32, String>> {
        let (refused, sender) = insert(cache, key(1), OnceLock::new());
        let (shared, waiting) = (Arc::clone(cache), caller.clone());
        let call =
            in_background(move || shared.get_or(key(1), &waiting, || Ok((5, Duration::from_secs(60)))));
        wait_taken(&cache.waiting, caller);
        refused.result.set(None).unwrap();
        cache.state.locked().pending.remove(&key(1));
        drop(sender);
        call
    }

    #[test]
    fn refusal_of_a_permit_is_only_for_its_caller() {
        let cache = Arc::new(Cache::new(8, Instant::now));
        let other = Caller::from_ip("10.0.0.2", None);
        assert_eq!(wait_for_refused(&cache, &other).result(), Ok(5));

        let held: Vec<_> = (0..ACTIVE_PER_PEER).map(|_| cache.review_permit(&other).unwrap()).collect();
        let queued: Vec<_> =
            (0..QUEUE_PER_PEER).map(|_| cache.queue.take(other.limits(QUEUE_PER_PEER, 1)).unwrap()).collect();
        assert_eq!(cache.get_or(key(2), &other, || Ok((1, Duration::ZERO))), Err(too_many()));
        assert!(cache.state.locked().pending.is_empty());
        drop((held, queued));
    }

    #[test]
    fn caller_that_waited_for_a_refused_one_uses_its_own_queue() {
        let cache = Arc::new(Cache::new(8, Instant::now));
        let caller = Caller::from_ip("10.0.0.2", None);
        let take_all =
            || (0..ACTIVE_PER_PEER).map(|_| cache.review_permit(&caller).unwrap()).collect::<Vec<_>>();
        let held = take_all();
        let second = wait_for_refused(&cache, &caller);
        wait_taken(&cache.queue, &caller);
        drop(held);
        assert_eq!(second.result(), Ok(5));

        // All waits of a call have one deadline.
        let held = take_all();
        let get = |digest| cache.get_until(Instant::now(), digest, &caller, || Ok((1, Duration::ZERO)));
        assert_eq!(get(key(1)), Ok(5), "a cached result needs no wait");
        assert_eq!(get(key(2)), Err(too_many()), "no time to wait for a permit");
        let _pending = insert(&cache, key(3), OnceLock::new());
        assert_eq!(get(key(3)), Err("the review has failed".to_owned()));
        let _pending = insert(&cache, key(4), OnceLock::from(None));
        assert_eq!(get(key(4)), Err(too_many()), "refusals of others do not prolong the wait");
        drop(held);
    }

    #[test]
    fn reviews_of_one_address_are_limited() {
        let cache = Arc::new(Cache::new(1000, Instant::now));
        let (go, gate) = bounded::<()>(0);
        let (begins, begun) = bounded(100);
        let from = |ip: &str| Caller::from_ip(ip, None);
        let review = |n: usize, caller: Caller| {
            let (cache, gate, begins) = (Arc::clone(&cache), gate.clone(), begins.clone());
            threads::spawn("reviewer", threads::Stack::Small, threads::OnDeath::Unsupervised, move |_| {
                let result = cache.get_or(key(n), &caller, || {
                    let _ = begins.send(n);
                    let _ = gate.recv();
                    Ok((n, Duration::from_secs(60)))
                });
                assert_eq!(result, Ok(n));
            })
            .unwrap()
        };
        let first: Vec<_> = (0..20).map(|n| review(n, from("10.0.0.1"))).collect();
        for _ in 0..ACTIVE_PER_PEER {
            assert!(begun.recv().unwrap() < 20);
        }
        // Another address is not delayed.
        let other = review(77, from("10.0.0.2"));
        assert_eq!(begun.recv().unwrap(), 77);
        assert!(begun.is_empty());
        drop(go);
        drop((first, other));
        assert_eq!(begun.len(), 20 - ACTIVE_PER_PEER);

        // The queue is limited per address.
        let held: Vec<_> =
            (0..ACTIVE_PER_PEER).map(|_| cache.review_permit(&from("10.0.0.1")).unwrap()).collect();
        let queued: Vec<_> = (0..MAX_QUEUE)
            .filter_map(|_| cache.queue.take(from("10.0.0.1").limits(QUEUE_PER_PEER, QUEUE_PER_PEER)))
            .collect();
        assert_eq!(queued.len(), QUEUE_PER_PEER);
        assert_eq!(cache.review_permit(&from("10.0.0.1")).map(drop), Err(too_many()), "at once");
        assert!(cache.review_permit(&from("10.0.0.2")).is_ok());
        drop((held, queued));

        // Connections that wait for another connection's review are limited, too.
        let held: Vec<_> = (0..MAX_WAITING)
            .filter_map(|_| cache.waiting.take(from("10.0.0.1").limits(WAITING_PER_PEER, WAITING_PER_PEER)))
            .collect();
        assert_eq!(held.len(), WAITING_PER_PEER);
    }
}
