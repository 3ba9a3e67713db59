//! How often a plugin may list its devices (pure). A list that comes earlier waits in the connection.

use std::time::{Duration, Instant};

/// Lists that are handled at once.
const BURST: u32 = 20;
/// After them, one in this time.
const INTERVAL: Duration = Duration::from_secs(1);

/// Counts the lists of one plugin.
#[derive(Debug, Clone)]
pub(super) struct ListRateLimit {
    left: u32,
    counted: Instant,
}

impl ListRateLimit {
    pub(super) fn new(now: Instant) -> ListRateLimit {
        ListRateLimit { left: BURST, counted: now }
    }

    /// A list was handled. Returns the wait before the next one.
    pub(super) fn next(&mut self, now: Instant) -> Duration {
        let earned = now.saturating_duration_since(self.counted).as_secs() / INTERVAL.as_secs();
        if earned > 0 {
            let earned = u32::try_from(earned).unwrap_or(BURST).min(BURST);
            self.left = self.left.saturating_add(earned).min(BURST);
            self.counted = now;
        }
        self.left = self.left.saturating_sub(1);
        if self.left == 0 { INTERVAL } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_twenty_lists_at_once_the_plugin_is_slowed_down_to_one_per_second() {
        let begun = Instant::now();
        let mut rate_limit = ListRateLimit::new(begun);
        let waits: Vec<Duration> = (0..20).map(|_| rate_limit.next(begun)).collect();
        assert!(waits.iter().take(19).all(Duration::is_zero));
        assert_eq!(waits.last(), Some(&INTERVAL));
        assert_eq!(rate_limit.next(begun + INTERVAL), INTERVAL);
        let later = begun + INTERVAL * 100;
        assert_eq!(rate_limit.next(later), Duration::ZERO);
    }
}
