//! The waits after failures.

use std::time::{Duration, Instant};

/// The first wait; the next ones double.
const FIRST: Duration = Duration::from_millis(800);
/// The longest base wait.
const LAST: Duration = Duration::from_secs(30);
/// After this time the base starts again at the first wait, even after failures, as upstream's does.
const RESET: Duration = Duration::from_secs(120);

/// Doubling waits that start again every two minutes.
#[derive(Debug)]
pub(super) struct WatchBackoff {
    base: Duration,
    since: Instant,
}

impl WatchBackoff {
    pub(super) fn new(now: Instant) -> WatchBackoff {
        WatchBackoff { base: FIRST, since: now }
    }

    /// The next wait: random in [base, 2·base). `unit` is a random number in [0, 1).
    pub(super) fn next(&mut self, now: Instant, unit: f64) -> Duration {
        if now.saturating_duration_since(self.since) > RESET {
            *self = WatchBackoff::new(now);
        }
        let wait = self.base.mul_f64(1.0 + unit.clamp(0.0, 1.0));
        self.base = (self.base * 2).min(LAST);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_with_jitter_and_start_again_after_two_minutes() {
        let start = Instant::now();
        let mut backoff = WatchBackoff::new(start);
        let millis: Vec<u128> = (0..8).map(|_| backoff.next(start, 0.0).as_millis()).collect();
        assert_eq!(millis, [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
        assert_eq!(backoff.next(start + RESET, 0.5), Duration::from_secs(45));
        assert_eq!(backoff.next(start + RESET + Duration::from_secs(1), 0.5), Duration::from_millis(1200));
    }
}
