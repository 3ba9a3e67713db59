//! How often a driver may report on its devices (pure). A report that comes earlier waits in the
//! connection.
//!
//! A driver may report on each of its devices alone, and again and again, because a report does not hold
//! for long (Go: k8s.io/dynamic-resource-allocation/kubeletplugin `DeviceHealthReport`). Such reports
//! must not wait: the health of a device would be known late.

use std::time::{Duration, Instant};

/// Reports that change something, and are handled at once.
const BURST: u32 = 100;
/// After them, one in this time: a change is written to the disk, and to the status of pods.
const INTERVAL: Duration = Duration::from_secs(1);
/// The pause after any report, and for each of its devices.
const REPORT_PAUSE: Duration = Duration::from_millis(10);
const DEVICE_PAUSE: Duration = Duration::from_micros(60);

/// Counts the reports of one driver.
#[derive(Debug, Clone)]
pub(super) struct ReportRateLimit {
    left: u32,
    counted: Instant,
}

impl ReportRateLimit {
    pub(super) fn new(now: Instant) -> ReportRateLimit {
        ReportRateLimit { left: BURST, counted: now }
    }

    /// A report on so many devices was handled. Returns the wait before the next one.
    pub(super) fn next(&mut self, devices: usize, has_changed: bool, now: Instant) -> Duration {
        if has_changed {
            let earned = now.saturating_duration_since(self.counted).as_secs() / INTERVAL.as_secs();
            if earned > 0 {
                let earned = u32::try_from(earned).unwrap_or(BURST).min(BURST);
                self.left = self.left.saturating_add(earned).min(BURST);
                self.counted = now;
            }
            self.left = self.left.saturating_sub(1);
            if self.left == 0 {
                return INTERVAL;
            }
        }
        let devices = u32::try_from(devices).unwrap_or(u32::MAX);
        DEVICE_PAUSE.saturating_mul(devices).saturating_add(REPORT_PAUSE).min(INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_without_changes_and_a_hundred_changes_hardly_wait() {
        let begun = Instant::now();
        let mut rate_limit = ReportRateLimit::new(begun);
        for _ in 0..1_000 {
            assert!(rate_limit.next(1, false, begun) < REPORT_PAUSE * 2);
        }
        let waits: Vec<Duration> = (0..BURST).map(|_| rate_limit.next(1, true, begun)).collect();
        assert!(waits.iter().rev().skip(1).all(|wait| *wait < REPORT_PAUSE * 2));
        assert_eq!(waits.last(), Some(&INTERVAL));
        assert_eq!(rate_limit.next(1, true, begun + INTERVAL), INTERVAL);
        assert!(rate_limit.next(1, false, begun + INTERVAL) < REPORT_PAUSE * 2);
        assert!(rate_limit.next(1, true, begun + INTERVAL * 1_000) < REPORT_PAUSE * 2);
    }

    #[test]
    fn large_reports_wait_longer_but_not_beyond_a_second() {
        let begun = Instant::now();
        let mut rate_limit = ReportRateLimit::new(begun);
        assert!(rate_limit.next(10_000, false, begun) > INTERVAL / 2);
        assert_eq!(rate_limit.next(usize::MAX, false, begun), INTERVAL);
    }
}
