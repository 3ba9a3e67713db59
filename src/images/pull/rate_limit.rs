//! How many pulls may start per second.

use std::sync::Mutex;
use std::time::Instant;

use crate::util::lock::LockExt;

/// A token bucket that never waits.
pub(super) struct RateLimit {
    per_second: f64,
    burst: f64,
    state: Mutex<(f64, Option<Instant>)>,
}

impl RateLimit {
    /// `None` (no limit) for a rate of zero or less.
    pub(super) fn new(per_second: i32, burst: i32) -> Option<RateLimit> {
        let burst = f64::from(burst.max(1));
        (per_second > 0).then(|| RateLimit {
            per_second: f64::from(per_second),
            burst,
            state: Mutex::new((burst, None)),
        })
    }

    /// Takes a token; `false` if there is none at `now`.
    pub(super) fn allow(&self, now: Instant) -> bool {
        let mut state = self.state.locked();
        let (tokens, last) = *state;
        let gained = last.map_or(0.0, |last| now.saturating_duration_since(last).as_secs_f64());
        let tokens = (tokens + gained * self.per_second).min(self.burst);
        let allowed = tokens >= 1.0;
        *state = (if allowed { tokens - 1.0 } else { tokens }, Some(now));
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn rate_limit_allows_burst_then_steady_rate() {
        let start = Instant::now();
        let limit = RateLimit::new(5, 3).unwrap();
        let allowed_at = |millis| limit.allow(start + Duration::from_millis(millis));
        assert_eq!([allowed_at(0), allowed_at(0), allowed_at(0), allowed_at(0)], [true, true, true, false]);
        assert_eq!([allowed_at(200), allowed_at(250), allowed_at(400)], [true, false, true]);
        assert!(RateLimit::new(0, 10).is_none());
    }
}
