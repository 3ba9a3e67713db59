//! Processor time per second, from the last two samples of each counter.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The rate of two samples closer than this is inexact, so the previous rate is kept.
const CLOSEST: Duration = Duration::from_millis(100);

/// The rate since a previous sample older than this is not the present rate.
pub(super) const STALE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
struct Sample {
    nanoseconds: u64,
    time: Instant,
    rate: Option<u64>,
}

/// The last sample of every counter of the last collection, and of the present one.
#[derive(Debug, Default)]
pub(super) struct Rates {
    last: HashMap<String, Sample>,
    next: HashMap<String, Sample>,
}

impl Rates {
    /// Adds a sample and returns the rate since the previous one, if there was one.
    pub(super) fn rate(&mut self, key: &str, nanoseconds: u64, time: Instant) -> Option<u64> {
        let point = match self.last.get(key) {
            // The same sample, or an older one that arrived later.
            Some(before) if time <= before.time => *before,
            // A smaller value means a new counter, such as that of a new cgroup.
            Some(before) if before.nanoseconds > nanoseconds => Sample { nanoseconds, time, rate: None },
            Some(before) => {
                let elapsed = time.saturating_duration_since(before.time);
                if elapsed < CLOSEST {
                    *before
                } else {
                    let grown = u128::from(nanoseconds - before.nanoseconds) * 1_000_000_000;
                    let rate = u64::try_from(grown / elapsed.as_nanos().max(1)).ok();
                    Sample { nanoseconds, time, rate }
                }
            }
            None => Sample { nanoseconds, time, rate: None },
        };
        self.next.insert(key.to_owned(), point);
        point.rate
    }

    /// Whether another sample should be taken first: there is none, or all are recent and have no
    /// rate.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        !self.last.values().any(|point| {
            let age = now.saturating_duration_since(point.time);
            age < STALE && (point.rate.is_some() || age >= CLOSEST)
        })
    }

    /// Ends a collection: counters that had no sample in it are forgotten.
    pub(super) fn end_collection(&mut self) {
        self.last = std::mem::take(&mut self.next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_needs_two_samples_that_are_apart() {
        let mut rates = Rates::default();
        let start = Instant::now();
        let time_after = |millis| start + Duration::from_millis(millis);
        assert!(rates.is_stale(start));
        for (nanoseconds, millis, expected) in [
            (1_000_000_000, 0, None),
            (2_000_000_000, 2_000, Some(500_000_000)),
            // Too close: the rate is kept, and the older sample stays the base.
            (2_000_000_001, 2_050, Some(500_000_000)),
            (2_100_000_000, 3_000, Some(100_000_000)),
            // The same response of a runtime, shared; and an older one.
            (2_100_000_000, 3_000, Some(100_000_000)),
            (2_000_000_000, 2_500, Some(100_000_000)),
            // A new container has the same name.
            (5, 4_000, None),
            (5, 5_000, Some(0)),
        ] {
            assert_eq!(rates.rate("a", nanoseconds, time_after(millis)), expected, "{millis}");
            rates.end_collection();
        }
        assert!(!rates.is_stale(time_after(6_000)));
        // A single recent sample gives no rate.
        let mut first = Rates::default();
        assert_eq!(first.rate("a", 1, time_after(0)), None);
        first.end_collection();
        assert!(first.is_stale(time_after(50)) && !first.is_stale(time_after(150)));
        assert!(rates.is_stale(time_after(5_000) + STALE));
        rates.end_collection();
        assert_eq!(rates.rate("a", 10, time_after(7_000)), None);
    }
}
