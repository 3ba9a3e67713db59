//! A rate with a burst (pure): each use takes a token, and tokens come back at a constant rate.

use std::time::{Duration, Instant};

/// A token bucket. Its state is the time at which it is full again. It never reads a clock.
#[derive(Debug, Clone, Copy)]
pub struct TokenBucket {
    full: Instant,
    /// From an empty bucket to a full one.
    refill: Duration,
    interval: Duration,
}

impl TokenBucket {
    /// A full bucket of so many tokens, at least one; `interval` is the time in which one token comes
    /// back.
    #[must_use]
    pub fn new(tokens: u32, interval: Duration, now: Instant) -> TokenBucket {
        TokenBucket { full: now, refill: interval.saturating_mul(tokens.max(1)), interval }
    }

    /// Takes a token. Returns whether there was one.
    pub fn take(&mut self, now: Instant) -> bool {
        let next = self.full.max(now) + self.interval;
        let is_allowed = next.saturating_duration_since(now) <= self.refill;
        if is_allowed {
            self.full = next;
        }
        is_allowed
    }

    /// Takes a token for what has happened already, if there is one. Returns the time until there is
    /// one again, which is at most the interval; zero if there is one now.
    pub fn record(&mut self, now: Instant) -> Duration {
        self.record_of(1, now)
    }

    /// As [`TokenBucket::record`], for one of so many users that wait at the same time: each gets a later
    /// turn than the one before, so that all together have the rate of one. The time is at most an interval
    /// for each of them.
    pub fn record_of(&mut self, users: u32, now: Instant) -> Duration {
        let most = self.refill.saturating_add(self.interval.saturating_mul(users.saturating_sub(1)));
        self.full = (self.full.max(now) + self.interval).min(now + most);
        let last = self.refill.saturating_sub(self.interval);
        self.full.saturating_duration_since(now).saturating_sub(last)
    }

    /// Whether it has all its tokens, as a new one.
    #[must_use]
    pub fn is_full(&self, now: Instant) -> bool {
        self.full <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn uses_beyond_the_burst_wait_for_the_next_token() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(20, SECOND, start);
        let waits: Vec<Duration> = (0..20).map(|_| bucket.record(start)).collect();
        assert!(waits.iter().take(19).all(Duration::is_zero));
        assert_eq!(waits.last(), Some(&SECOND));
        assert_eq!(bucket.record(start + SECOND), SECOND);
        // A use that does not wait owes nothing more.
        assert_eq!(bucket.record(start + SECOND), SECOND);
        assert_eq!(bucket.record(start + SECOND * 5 / 2), SECOND / 2);
        assert_eq!(bucket.record(start + SECOND * 100), Duration::ZERO);
    }

    #[test]
    fn users_that_wait_at_the_same_time_have_the_rate_of_one() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(2, SECOND, start);
        let mut waits = |second: u32| -> Vec<u64> {
            let now = start + SECOND * second;
            (0..6).map(|_| bucket.record_of(4, now).as_secs()).collect()
        };
        assert_eq!(waits(0), [0, 1, 2, 3, 4, 4]);
        assert_eq!(waits(1), [4, 4, 4, 4, 4, 4]);
        assert_eq!(waits(100), [0, 1, 2, 3, 4, 4]);
    }

    #[test]
    fn bucket_is_full_again_when_all_tokens_are_back() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(2, SECOND, start);
        assert!(bucket.is_full(start));
        assert!(bucket.take(start) && bucket.take(start) && !bucket.take(start));
        assert!(!bucket.is_full(start + SECOND) && bucket.is_full(start + SECOND * 2));
        assert!(bucket.take(start + SECOND) && !bucket.take(start + SECOND));
        assert!(TokenBucket::new(0, SECOND, start).take(start));
    }
}
