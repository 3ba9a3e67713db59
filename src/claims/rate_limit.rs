//! How often a driver may report on its devices (pure). A report that comes earlier waits in the
//! connection.
//!
//! A driver may report on each of its devices alone, and again and again, because a report does not hold
//! for long (Go: k8s.io/dynamic-resource-allocation/kubeletplugin `DeviceHealthReport`). Such reports
//! must not wait: the health of a device would be known late.

use std::time::{Duration, Instant};

use crate::util::token_bucket::TokenBucket;

/// Reports that change something, and are handled at once.
const BURST: u32 = 100;
/// After them, one in this time: a change is written to the disk, and to the status of pods.
const INTERVAL: Duration = Duration::from_secs(1);
/// The pause after any report, and for each of its devices.
const REPORT_PAUSE: Duration = Duration::from_millis(10);
const DEVICE_PAUSE: Duration = Duration::from_micros(60);

/// Counts the reports of one driver.
#[derive(Debug, Clone)]
pub(super) struct ReportRateLimit(TokenBucket);

impl ReportRateLimit {
    pub(super) fn new(now: Instant) -> ReportRateLimit {
        ReportRateLimit(TokenBucket::new(BURST, INTERVAL, now))
    }

    /// A report on so many devices was handled. Returns the wait before the next one.
    pub(super) fn next(&mut self, devices: usize, has_changed: bool, now: Instant) -> Duration {
        let wait = if has_changed { self.0.record(now) } else { Duration::ZERO };
        let devices = u32::try_from(devices).unwrap_or(u32::MAX);
        let pause = DEVICE_PAUSE.saturating_mul(devices).saturating_add(REPORT_PAUSE).min(INTERVAL);
        wait.max(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_without_changes_and_a_hundred_changes_hardly_wait() {
        let begun = Instant::now();
        let mut limit = ReportRateLimit::new(begun);
        for _ in 0..1_000 {
            assert!(limit.next(1, false, begun) < REPORT_PAUSE * 2);
        }
        let waits: Vec<Duration> = (0..BURST).map(|_| limit.next(1, true, begun)).collect();
        assert!(waits.iter().rev().skip(1).all(|wait| *wait < REPORT_PAUSE * 2));
        assert_eq!(waits.last(), Some(&INTERVAL));
        assert_eq!(limit.next(1, true, begun + INTERVAL), INTERVAL);
        assert!(limit.next(1, false, begun + INTERVAL) < REPORT_PAUSE * 2);
        assert!(limit.next(1, true, begun + INTERVAL * 1_000) < REPORT_PAUSE * 2);
    }

    #[test]
    fn large_reports_wait_longer_but_not_beyond_a_second() {
        let begun = Instant::now();
        let mut limit = ReportRateLimit::new(begun);
        assert!(limit.next(10_000, false, begun) > INTERVAL / 2);
        assert_eq!(limit.next(usize::MAX, false, begun), INTERVAL);
    }
}
