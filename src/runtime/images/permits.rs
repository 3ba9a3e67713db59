//! How many pulls may run at once, and how many may start per second.

use std::sync::Mutex;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads;

/// The upper bound of parallel pulls; a larger configured number is reduced to it.
const MOST: usize = 1024;

/// A counted set of permits. Without a limit it has any number.
pub(super) struct Permits {
    free: Option<(Sender<()>, Receiver<()>)>,
}

/// Returns its permit when dropped.
pub(super) struct Permit<'a> {
    back: Option<&'a Sender<()>>,
}

impl Permits {
    pub(super) fn new(limit: Option<usize>) -> Permits {
        let free = limit.map(|limit| {
            let limit = limit.clamp(1, MOST);
            let (tx, rx) = bounded(limit);
            for _ in 0..limit {
                // The channel has the capacity for all permits.
                let _ = tx.try_send(());
            }
            (tx, rx)
        });
        Permits { free }
    }

    /// Waits for a permit; `None` if `stop` comes first.
    pub(super) fn take(&self, stop: &StopToken) -> Option<Permit<'_>> {
        let Some((back, free)) = &self.free else { return Some(Permit { back: None }) };
        let _waiting = threads::waiting("image pull queue");
        select_biased! {
            recv(stop.signal()) -> _ => None,
            recv(free) -> _ => Some(Permit { back: Some(back) }),
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if let Some(back) = self.back {
            let _ = back.try_send(());
        }
    }
}

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
    use crate::util::stop;
    use std::time::Duration;

    #[test]
    fn dropped_permit_is_available_again() {
        let never = StopToken::never();
        let permits = Permits::new(Some(2));
        let one = permits.take(&never).unwrap();
        let _two = permits.take(&never).unwrap();
        let (source, token) = stop::pair();
        drop(source);
        assert!(permits.take(&token).is_none());
        drop(one);
        assert!(permits.take(&never).is_some());
        let unlimited = Permits::new(None);
        let many: Vec<_> = (0..9).map(|_| unlimited.take(&never).is_some()).collect();
        assert_eq!(many, [true; 9]);
    }

    #[test]
    fn rate_limit_allows_burst_then_steady_rate() {
        let start = Instant::now();
        let limit = RateLimit::new(5, 3).unwrap();
        let at = |millis| limit.allow(start + Duration::from_millis(millis));
        assert_eq!([at(0), at(0), at(0), at(0)], [true, true, true, false]);
        assert_eq!([at(200), at(250), at(400)], [true, false, true]);
        assert!(RateLimit::new(0, 10).is_none());
    }
}
