//! When the sync loop has periodic work (pure).

use std::time::{Duration, Instant};

/// The desired pods are compared with the running ones at least this often, in case an event was
/// missed.
const CLEAN_UP_PERIOD: Duration = Duration::from_secs(10);
/// Deferred resizes are retried at least this often.
const RESIZE_PERIOD: Duration = Duration::from_secs(180);

/// The due times.
pub(super) struct Schedule {
    clean_up: Instant,
    /// `None`: no resize is deferred.
    resizes: Option<Instant>,
}

impl Schedule {
    pub(super) fn new(now: Instant) -> Self {
        Schedule { clean_up: now + CLEAN_UP_PERIOD, resizes: None }
    }

    /// The next due time.
    pub(super) fn next(&self) -> Instant {
        self.resizes.map_or(self.clean_up, |resizes| resizes.min(self.clean_up))
    }

    /// Whether to clean up now; if so, the next period begins.
    pub(super) fn take_clean_up(&mut self, now: Instant) -> bool {
        let is_due = now >= self.clean_up;
        if is_due {
            self.clean_up = now + CLEAN_UP_PERIOD;
        }
        is_due
    }

    /// Whether to retry deferred resizes now.
    pub(super) fn are_resizes_due(&self, now: Instant) -> bool {
        self.resizes.is_some_and(|due| now >= due)
    }

    /// Resizes were retried, periodically or after an event: the next period begins.
    pub(super) fn resizes_retried(&mut self) {
        self.resizes = None;
    }

    /// Records at the end of a turn whether resizes are deferred.
    pub(super) fn set_deferred(&mut self, any: bool, now: Instant) {
        self.resizes = any.then(|| self.resizes.unwrap_or(now + RESIZE_PERIOD));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clean_up_is_periodic_and_resizes_are_retried_only_while_deferred() {
        let now = Instant::now();
        let mut schedule = Schedule::new(now);
        assert_eq!(schedule.next(), now + CLEAN_UP_PERIOD);
        assert!(!schedule.take_clean_up(now) && !schedule.are_resizes_due(now + RESIZE_PERIOD));
        let later = now + CLEAN_UP_PERIOD;
        assert!(schedule.take_clean_up(later) && !schedule.take_clean_up(later));
        assert_eq!(schedule.next(), later + CLEAN_UP_PERIOD);

        schedule.set_deferred(true, now);
        // A second turn does not move the due time.
        schedule.set_deferred(true, later);
        assert!(schedule.are_resizes_due(now + RESIZE_PERIOD));
        schedule.resizes_retried();
        schedule.set_deferred(true, later);
        assert!(!schedule.are_resizes_due(now + RESIZE_PERIOD));
        schedule.set_deferred(false, later);
        assert!(!schedule.are_resizes_due(later + RESIZE_PERIOD));
    }
}
