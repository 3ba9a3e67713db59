//! Doubling waits, one per key (Go: client-go/util/flowcontrol Backoff), and jitter.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use jiff::Timestamp;

/// The wait before the next attempt for one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    delay: Duration,
    updated: Timestamp,
    /// An event with a time in the future, and the time of the first call with it.
    ahead: Option<(Timestamp, Timestamp)>,
}

impl Entry {
    /// When the wait after `event` began. After the clock was set back, that event seems to be in
    /// the future; the wait then begins at the first call with it, not a day later.
    fn begin(&mut self, event: Timestamp, now: Timestamp) -> Timestamp {
        if event <= now {
            return event;
        }
        match self.ahead {
            Some((known, seen)) if known == event && seen <= now => seen,
            _ => {
                self.ahead = Some((event, now));
                now
            }
        }
    }
}

/// Waits that start at `initial`, double up to `max` and are removed when the event that they count
/// is more than `reset_after` later than the last update.
#[derive(Debug)]
pub struct KeyedBackoff<K> {
    initial: Duration,
    max: Duration,
    reset_after: Duration,
    entries: HashMap<K, Entry>,
}

impl<K: Eq + Hash> KeyedBackoff<K> {
    /// An empty table.
    #[must_use]
    pub fn new(initial: Duration, max: Duration, reset_after: Duration) -> Self {
        KeyedBackoff { initial: initial.min(max), max, reset_after, entries: HashMap::new() }
    }

    /// The current wait of `key`; zero before the first [`KeyedBackoff::advance`].
    #[must_use]
    pub fn delay(&self, key: &K) -> Duration {
        self.entries.get(key).map_or(Duration::ZERO, |entry| entry.delay)
    }

    /// When `key` may be retried, if `event` (a failure or an exit) started the wait and the wait
    /// has not ended at `now`.
    ///
    /// DIFFERS: the Go kubelet waits until a clock that was set back has reached the old time again.
    #[must_use]
    pub fn blocked_until(&mut self, key: &K, event: Timestamp, now: Timestamp) -> Option<Timestamp> {
        let reset_after = self.reset_after;
        let entry = self.entries.get_mut(key)?;
        if since(entry.updated, event) > reset_after {
            return None;
        }
        let begin = entry.begin(event, now);
        let until = begin.checked_add(jiff::SignedDuration::try_from(entry.delay).ok()?).ok()?;
        (now < until).then_some(until)
    }

    /// Counts one more attempt at `now`: sets the initial wait, or doubles the current one.
    pub fn advance(&mut self, key: K, event: Timestamp, now: Timestamp) {
        let (initial, max) = (self.initial, self.max);
        let fresh = self.entries.get(&key).is_none_or(|entry| self.expired(entry, event));
        let delay = match self.entries.get(&key) {
            Some(entry) if !fresh => (entry.delay * 2).min(max),
            _ => initial,
        };
        self.entries.insert(key, Entry { delay, updated: now, ahead: None });
    }

    /// Drops every entry that has not changed for longer than the reset time.
    pub fn collect_garbage(&mut self, now: Timestamp) {
        let limit = self.reset_after;
        self.entries.retain(|_, entry| since(entry.updated, now) <= limit);
    }

    fn expired(&self, entry: &Entry, event: Timestamp) -> bool {
        since(entry.updated, event) > self.reset_after
    }
}

fn since(earlier: Timestamp, later: Timestamp) -> Duration {
    Duration::try_from(later.duration_since(earlier)).unwrap_or(Duration::ZERO)
}

/// Consecutive failures of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Failures(u32);

impl Failures {
    /// Counts a failure. Returns whether to log it: the 1st, 2nd, 4th and so on are logged, because
    /// an outage must not fill the log.
    #[must_use]
    pub fn count(&mut self) -> bool {
        self.0 = self.0.saturating_add(1);
        self.0.is_power_of_two()
    }

    /// The number of failures.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    /// Resets after a success. `true`: there were failures before.
    pub fn end(&mut self) -> bool {
        std::mem::take(&mut self.0) > 0
    }

    /// The wait before the next attempt: `first`, then doubled each time up to `most`.
    #[must_use]
    pub fn delay(self, first: Duration, most: Duration) -> Duration {
        first.saturating_mul(1 << self.0.saturating_sub(1).min(16)).min(most)
    }
}

impl std::fmt::Display for Failures {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(out)
    }
}

/// `base` plus up to half of it, so that many pods are not due at the same time. `unit` is a random
/// number in [0, 1).
#[must_use]
pub fn jitter(base: Duration, unit: f64) -> Duration {
    base + base.mul_f64(0.5 * unit.clamp(0.0, 1.0))
}

/// Between half of `wait` and all of it: many nodes that began to wait together do not continue together, and
/// none waits for longer than `wait`. `unit` is a random number in [0, 1).
#[must_use]
pub fn shortened(wait: Duration, unit: f64) -> Duration {
    wait.mul_f64(0.5 + 0.5 * unit.clamp(0.0, 1.0))
}

/// A random number in [0, 1). Not for secrets.
#[must_use]
pub fn random_unit() -> f64 {
    // 53 bits fill the mantissa exactly.
    (random_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// A random number from the standard library's per-process hash keys. Not for secrets.
#[must_use]
pub fn random_u64() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    use std::sync::atomic::{AtomicU64, Ordering};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u64(COUNT.fetch_add(1, Ordering::Relaxed));
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timestamp(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn wait_doubles_to_maximum_and_resets_after_a_long_run() {
        let mut backoff =
            KeyedBackoff::new(Duration::from_secs(10), Duration::from_secs(300), Duration::from_secs(600));
        assert_eq!(backoff.blocked_until(&"c", timestamp(0), timestamp(0)), None);
        let mut seen = Vec::new();
        let mut now = 0;
        for _ in 0..7 {
            backoff.advance("c", timestamp(now), timestamp(now));
            seen.push(backoff.delay(&"c").as_secs());
            now += 1;
        }
        assert_eq!(seen, [10, 20, 40, 80, 160, 300, 300]);
        assert_eq!(backoff.blocked_until(&"c", timestamp(now), timestamp(now)), Some(timestamp(now + 300)));
        assert_eq!(backoff.blocked_until(&"c", timestamp(now), timestamp(now + 300)), None);
        // Exited 601 s after the last start: the next restart is immediate and counts from 10 s.
        assert_eq!(backoff.blocked_until(&"c", timestamp(now + 601), timestamp(now + 601)), None);
        backoff.advance("c", timestamp(now + 601), timestamp(now + 601));
        assert_eq!(backoff.delay(&"c"), Duration::from_secs(10));
        backoff.collect_garbage(timestamp(now + 1300));
        assert_eq!(backoff.delay(&"c"), Duration::ZERO);
    }

    #[test]
    fn repeated_failures_are_reported_and_retried_ever_more_rarely() {
        let mut failures = Failures::default();
        assert!(!failures.end());
        let logged_counts: Vec<u32> = (1..10).filter(|_| failures.count()).collect();
        assert_eq!(logged_counts, [1, 2, 4, 8]);
        assert!(failures.end() && failures == Failures::default());
        let (first, most) = (Duration::from_secs(1), Duration::from_secs(5));
        let waits = (0..5).map(|_| {
            let _ = failures.count();
            failures.delay(first, most).as_secs()
        });
        assert_eq!(waits.collect::<Vec<_>>(), [1, 2, 4, 5, 5]);
        assert_eq!(Failures(u32::MAX).delay(first, most), most);
    }

    #[test]
    fn a_clock_that_is_set_back_prolongs_no_wait() {
        let mut backoff =
            KeyedBackoff::new(Duration::from_secs(10), Duration::from_secs(300), Duration::from_secs(600));
        let day = 86_400;
        backoff.advance("c", timestamp(day), timestamp(day));
        assert_eq!(
            backoff.blocked_until(&"c", timestamp(day), timestamp(day + 3)),
            Some(timestamp(day + 10))
        );
        // The clock is set back by a day: ten seconds from the first call, however many calls follow.
        assert_eq!(backoff.blocked_until(&"c", timestamp(day), timestamp(5)), Some(timestamp(15)));
        assert_eq!(backoff.blocked_until(&"c", timestamp(day), timestamp(14)), Some(timestamp(15)));
        assert_eq!(backoff.blocked_until(&"c", timestamp(day), timestamp(15)), None);
        // And set back once more.
        assert_eq!(backoff.blocked_until(&"c", timestamp(day), timestamp(1)), Some(timestamp(11)));
        // A start and an end by the new clock continue the count.
        backoff.advance("c", timestamp(11), timestamp(11));
        assert_eq!(backoff.blocked_until(&"c", timestamp(12), timestamp(12)), Some(timestamp(32)));
        // The clock is set forward: waits end.
        assert_eq!(backoff.blocked_until(&"c", timestamp(12), timestamp(day)), None);
    }

    #[test]
    fn jitter_adds_up_to_half() {
        let base = Duration::from_secs(10);
        assert_eq!(jitter(base, 0.0), base);
        assert_eq!(jitter(base, 1.0), Duration::from_secs(15));
        let unit = random_unit();
        assert!((0.0..1.0).contains(&unit));
    }

    #[test]
    fn shortened_wait_has_at_least_half_of_its_length() {
        let wait = Duration::from_secs(10);
        let waits = [-1.0, 0.0, 0.5, 1.0, 9.0].map(|unit| shortened(wait, unit).as_millis());
        assert_eq!(waits, [5_000, 5_000, 7_500, 10_000, 10_000]);
    }
}
