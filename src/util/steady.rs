//! Times that are compared within this process only, such as ages of images: a clock that is set
//! changes none of them.
//!
//! DIFFERS: the Go kubelet uses the time of day for the ages of unused images.

use std::sync::OnceLock;
use std::time::Instant;

use jiff::{SignedDuration, Timestamp};

/// The time of day at the first call, and that moment by the monotonic clock.
#[derive(Debug, Clone, Copy)]
struct Begin {
    wall: Timestamp,
    instant: Instant,
}

impl Begin {
    fn reading(self, instant: Instant) -> Timestamp {
        let passed = instant.saturating_duration_since(self.instant);
        let passed = SignedDuration::try_from(passed).unwrap_or(SignedDuration::MAX);
        self.wall.checked_add(passed).unwrap_or(Timestamp::MAX)
    }
}

/// The present time: the time of day when this process called it first, plus what has passed since then
/// by the monotonic clock. It is not to be compared with times of other processes.
#[must_use]
pub fn now() -> Timestamp {
    static BEGIN: OnceLock<Begin> = OnceLock::new();
    BEGIN.get_or_init(|| Begin { wall: Timestamp::now(), instant: Instant::now() }).reading(Instant::now())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn time_passes_with_the_monotonic_clock_alone() {
        let begin = Begin { wall: Timestamp::UNIX_EPOCH, instant: Instant::now() };
        assert_eq!(begin.reading(begin.instant), Timestamp::UNIX_EPOCH);
        let later = begin.reading(begin.instant + Duration::from_secs(60));
        assert_eq!(later, Timestamp::from_second(60).unwrap());
        let last = Begin { wall: Timestamp::MAX, instant: begin.instant };
        assert_eq!(last.reading(begin.instant + Duration::from_secs(1)), Timestamp::MAX);
        assert!(now() <= now());
    }
}
