//! What the API server said, for a while: bounded, the least used goes first. Whoever asks
//! what is being asked already waits for that answer.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::settings::Clock;
use crate::server::quota::{Caller, Permit, Quota};
use crate::util::stop::StopToken;
use crate::util::threads;

/// A digest of the question: neither tokens nor long paths stay in memory.
pub(super) type Key = [u8; 32];

/// How long to wait for an answer that another connection has asked for. Those have limits
/// of their own; this only bounds what must not happen.
const WAIT: Duration = Duration::from_secs(30);

/// Each holds a thread while it waits for the answer to somebody else's equal question.
const MAX_WAITING: usize = 128;

/// Of one address: an API server, whose many requests all wait for one answer, is one.
const WAITING_PER_PEER: usize = 96;

/// Questions of one address that are asked at once; its others wait. The API server is asked
/// eight at once and some more wait for that, so no address alone keeps the others out.
const ASKING_PER_PEER: usize = 4;

/// Those who wait for that hold a thread, too, which nothing ends before its time.
const MAX_QUEUE: usize = 96;

/// Of one address.
const QUEUE_PER_PEER: usize = 24;

/// How long they wait.
const TURN_LIMIT: Duration = Duration::from_secs(10);

/// Answers by question.
pub(super) struct Cache<V> {
    capacity: usize,
    clock: Clock,
    state: Mutex<State<V>>,
    /// Those who ask, limited by address only.
    asking: Arc<Quota>,
    /// Those who wait for their turn to ask.
    queue: Arc<Quota>,
    /// Those who wait for a question of somebody else.
    waiting: Arc<Quota>,
}

struct State<V> {
    entries: HashMap<Key, Entry<V>>,
    asking: HashMap<Key, Arc<Asking<V>>>,
    /// Counts uses.
    uses: u64,
}

struct Entry<V> {
    value: V,
    until: Instant,
    used: u64,
}

/// A question under way.
struct Asking<V> {
    answer: OnceLock<Result<V, String>>,
    /// Cut off when the answer is there, or whoever asked has panicked.
    done: Receiver<Infallible>,
}

/// Ends a question, whatever becomes of the thread that asked.
struct Ending<'a, V> {
    cache: &'a Cache<V>,
    key: Key,
    _done: Sender<Infallible>,
}

impl<V> Drop for Ending<'_, V> {
    fn drop(&mut self) {
        self.cache.lock().asking.remove(&self.key);
    }
}

impl<V: Clone> Cache<V> {
    pub(super) fn new(capacity: usize, clock: Clock) -> Self {
        let state = State { entries: HashMap::new(), asking: HashMap::new(), uses: 0 };
        let (asking, waiting) = (Quota::new(usize::MAX), Quota::new(MAX_WAITING));
        let queue = Quota::new(MAX_QUEUE);
        Cache { capacity, clock, state: Mutex::new(state), asking, queue, waiting }
    }

    /// The answer that is remembered, or what `ask` says: with how long to remember it.
    pub(super) fn get_or(
        &self,
        key: Key,
        caller: &Caller,
        ask: impl FnOnce() -> Result<(V, Duration), String>,
    ) -> Result<V, String> {
        let (ending, asking) = {
            let mut state = self.lock();
            if let Some(value) = state.get(&key, (self.clock)()) {
                return Ok(value);
            }
            if let Some(asking) = state.asking.get(&key) {
                let asking = Arc::clone(asking);
                drop(state);
                let limits = caller.limits(WAITING_PER_PEER, WAITING_PER_PEER);
                let _place = self.waiting.take(limits).ok_or_else(too_many)?;
                return asking.wait();
            }
            let (sender, done) = bounded(0);
            let asking = Arc::new(Asking { answer: OnceLock::new(), done });
            state.asking.insert(key, Arc::clone(&asking));
            (Ending { cache: self, key, _done: sender }, asking)
        };
        let outcome = self.turn(caller).and_then(|_turn| ask()).map(|(value, time)| {
            if !time.is_zero() {
                let now = (self.clock)();
                self.lock().put(key, value.clone(), now, time, self.capacity);
            }
            value
        });
        // Nobody else sets it.
        let _ = asking.answer.set(outcome.clone());
        drop(ending);
        outcome
    }
}

fn too_many() -> String {
    "too many reviews at once".to_owned()
}

impl<V> Cache<V> {
    /// Waits until fewer questions of the caller's address are asked.
    pub(super) fn turn(&self, caller: &Caller) -> Result<Permit, String> {
        let limits = caller.limits(ASKING_PER_PEER, ASKING_PER_PEER);
        if let Some(slot) = self.asking.take(limits.clone()) {
            return Ok(slot);
        }
        // Who waits holds a thread, even when its connection has made room for another.
        let places = caller.limits(QUEUE_PER_PEER, QUEUE_PER_PEER);
        let _place = self.queue.take(places).ok_or_else(too_many)?;
        // When the agent stops, the questions before it end at once.
        let never = StopToken::never();
        self.asking.wait(limits, TURN_LIMIT, "a turn to review", &never).ok_or_else(too_many)
    }

    fn lock(&self) -> MutexGuard<'_, State<V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<V: Clone> Asking<V> {
    fn wait(&self) -> Result<V, String> {
        let _waiting = threads::waiting("a review");
        let _ = self.done.recv_timeout(WAIT);
        self.answer.get().cloned().unwrap_or_else(|| Err("the review came to nothing".to_owned()))
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
        // Several at once, so that a full one is not gone through for each.
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

    fn nobody() -> Caller {
        Caller::default()
    }

    fn key(n: usize) -> Key {
        crate::util::sha256::digest(&n.to_le_bytes())
    }

    #[test]
    fn answers_last_their_time_and_errors_do_not() {
        let cache = Cache::new(100, clock);
        let asked = Cell::new(0);
        let ask = |answer: Result<u32, &str>| {
            cache.get_or(key(1), &nobody(), || {
                asked.set(asked.get() + 1);
                answer.map(|value| (value, Duration::from_secs(30))).map_err(str::to_owned)
            })
        };
        assert_eq!(ask(Err("away")), Err("away".to_owned()));
        assert_eq!(ask(Ok(1)), Ok(1));
        pass(29);
        assert_eq!(ask(Err("away")), Ok(1));
        pass(1);
        assert_eq!(ask(Err("away")), Err("away".to_owned()));
        assert_eq!(ask(Ok(2)), Ok(2));
        assert_eq!(asked.get(), 4);
        let at_once = || cache.get_or(key(2), &nobody(), || Ok((7, Duration::ZERO)));
        assert_eq!((at_once(), at_once()), (Ok(7), Ok(7)));
        assert_eq!(cache.lock().entries.len(), 1);
    }

    #[test]
    fn the_least_used_go_when_it_is_full() {
        let cache = Cache::new(64, clock);
        let ask = |n: usize| cache.get_or(key(n), &nobody(), || Ok((n, Duration::from_secs(60)))).unwrap();
        for n in 0..500 {
            ask(n);
            ask(0);
            assert!(cache.lock().entries.len() <= 64);
        }
        let kept = |n: usize| cache.lock().entries.contains_key(&key(n));
        assert!(kept(0) && kept(499) && !kept(100));
    }

    #[test]
    fn many_who_ask_the_same_ask_once() {
        let cache = Arc::new(Cache::new(8, Instant::now));
        let asked = Arc::new(AtomicUsize::new(0));
        let (go, gate) = bounded::<()>(0);
        let threads: Vec<_> = (0..20)
            .map(|_| {
                let (cache, asked, gate) = (Arc::clone(&cache), Arc::clone(&asked), gate.clone());
                threads::spawn("asker", threads::Stack::Small, threads::OnDeath::Nobody, move |_| {
                    let answer = cache.get_or(key(1), &nobody(), || {
                        asked.fetch_add(1, Ordering::SeqCst);
                        let _ = gate.recv();
                        Ok((5, Duration::from_secs(60)))
                    });
                    assert_eq!(answer, Ok(5));
                })
                .unwrap()
            })
            .collect();
        drop(go);
        drop(threads);
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_panic_while_asking_leaves_nobody_waiting() {
        let cache: Arc<Cache<u32>> = Arc::new(Cache::new(8, Instant::now));
        let shared = Arc::clone(&cache);
        drop(threads::spawn("asker", threads::Stack::Small, threads::OnDeath::Nobody, move |_| {
            let _ = shared.get_or(key(1), &nobody(), || panic!("of the test"));
        }));
        assert_eq!(cache.get_or(key(1), &nobody(), || Ok((1, Duration::from_secs(1)))), Ok(1));
    }

    #[test]
    fn no_address_takes_all_the_turns() {
        let cache = Arc::new(Cache::new(1000, Instant::now));
        let (go, gate) = bounded::<()>(0);
        let (tell, asked) = bounded(100);
        let from = |ip: &str| Caller::new(Some(format!("{ip}:1").parse().unwrap()), None);
        let ask = |n: usize, caller: Caller| {
            let (cache, gate, tell) = (Arc::clone(&cache), gate.clone(), tell.clone());
            threads::spawn("asker", threads::Stack::Small, threads::OnDeath::Nobody, move |_| {
                let answer = cache.get_or(key(n), &caller, || {
                    let _ = tell.send(n);
                    let _ = gate.recv();
                    Ok((n, Duration::from_secs(60)))
                });
                assert_eq!(answer, Ok(n));
            })
            .unwrap()
        };
        let strangers: Vec<_> = (0..20).map(|n| ask(n, from("10.0.0.1"))).collect();
        for _ in 0..ASKING_PER_PEER {
            assert!(asked.recv().unwrap() < 20);
        }
        // Only then another one asks, and is heard at once.
        let other = ask(77, from("10.0.0.2"));
        assert_eq!(asked.recv().unwrap(), 77);
        assert!(asked.is_empty());
        drop(go);
        drop((strangers, other));
        assert_eq!(asked.len(), 20 - ASKING_PER_PEER);

        // Nobody's threads pile up in the queue.
        let held: Vec<_> = (0..ASKING_PER_PEER).map(|_| cache.turn(&from("10.0.0.1")).unwrap()).collect();
        let places: Vec<_> = (0..MAX_QUEUE)
            .filter_map(|_| cache.queue.take(from("10.0.0.1").limits(QUEUE_PER_PEER, QUEUE_PER_PEER)))
            .collect();
        assert_eq!(places.len(), QUEUE_PER_PEER);
        assert_eq!(cache.turn(&from("10.0.0.1")).map(drop), Err(too_many()), "at once");
        assert!(cache.turn(&from("10.0.0.2")).is_ok());
        drop((held, places));

        // Of those who wait for somebody else's question some places stay free as well.
        let held: Vec<_> = (0..MAX_WAITING)
            .filter_map(|_| cache.waiting.take(from("10.0.0.1").limits(WAITING_PER_PEER, WAITING_PER_PEER)))
            .collect();
        assert_eq!(held.len(), WAITING_PER_PEER);
    }
}
