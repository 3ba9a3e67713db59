//! A limit of requests per second, with a burst (Go: client-go/util/flowcontrol).

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::util::lock::LockExt;
use crate::util::stop::{StopToken, Waited};

/// A bucket that fills with `qps` tokens per second up to `burst`; a request takes one. A caller
/// that finds it empty reserves a future token and waits for it, so the order is kept.
#[derive(Debug)]
pub(super) struct Bucket {
    qps: f64,
    burst: f64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tokens: f64,
    updated: Instant,
}

impl Bucket {
    /// A full bucket; `qps` of 0 or less means the library's default of 5 with a burst of 10.
    #[must_use]
    pub(super) fn new(qps: f64, burst: u32, now: Instant) -> Bucket {
        let (qps, burst) = if qps > 0.0 && qps.is_finite() { (qps, burst.max(1)) } else { (5.0, 10) };
        let burst = f64::from(burst);
        Bucket { qps, burst, state: Mutex::new(State { tokens: burst, updated: now }) }
    }

    /// Takes a token and returns the time until it is valid.
    fn reserve(&self, now: Instant) -> Duration {
        let mut state = self.state.locked();
        let passed = now.saturating_duration_since(state.updated).as_secs_f64();
        state.updated = state.updated.max(now);
        state.tokens = (state.tokens + passed * self.qps).min(self.burst) - 1.0;
        if state.tokens >= 0.0 {
            return Duration::ZERO;
        }
        // For very low rates, the wait is limited to an hour.
        Duration::try_from_secs_f64(-state.tokens / self.qps)
            .unwrap_or(Duration::MAX)
            .min(Duration::from_secs(3600))
    }

    /// Waits for a token.
    pub(super) fn take(&self, stop: &StopToken) -> Waited {
        match self.reserve(Instant::now()) {
            Duration::ZERO if stop.is_stopped() => Waited::Stopped,
            Duration::ZERO => Waited::TimedOut,
            wait => {
                if wait > Duration::from_secs(1) {
                    log::info!("waited for {wait:?} due to client-side throttling");
                }
                stop.wait(wait)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_delayed_after_a_burst() {
        let start = Instant::now();
        let bucket = Bucket::new(10.0, 3, start);
        let waits = |now: Instant, count: usize| {
            (0..count).map(|_| bucket.reserve(now).as_millis()).collect::<Vec<_>>()
        };
        assert_eq!(waits(start, 5), [0, 0, 0, 100, 200]);
        assert_eq!(waits(start + Duration::from_millis(300), 2), [0, 100]);
        assert_eq!(waits(start + Duration::from_secs(60), 4), [0, 0, 0, 100]);
        // A clock that stands still or is set back adds no tokens.
        assert_eq!(waits(start, 1), [200]);
    }

    #[test]
    fn invalid_rates_become_the_default() {
        for qps in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let bucket = Bucket::new(qps, 0, Instant::now());
            assert_eq!((bucket.qps, bucket.burst), (5.0, 10.0));
        }
        let slow = Bucket::new(1e-300, 1, Instant::now());
        slow.reserve(Instant::now());
        assert_eq!(slow.reserve(Instant::now()), Duration::from_secs(3600));
    }
}
