//! How often a driver may report on its devices (pure). A report that comes earlier waits in the
//! connection.
//!
//! A driver may report on each of its devices alone, and again and again, because a report does not hold
//! for long (Go: k8s.io/dynamic-resource-allocation/kubeletplugin `DeviceHealthReport`). Such reports
//! must not wait: the health of a device would be known late.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::util::token_bucket::TokenBucket;

/// Reports that change something, and are handled at once.
const BURST: u32 = 100;
/// After them, one in this time: a change is written to the disk, and to the status of pods.
const INTERVAL: Duration = Duration::from_secs(1);
/// The streams of one driver: one for each of its instances.
const STREAMS: u32 = 16;
/// The pause after any report, and for each of its devices.
const REPORT_PAUSE: Duration = Duration::from_millis(10);
const DEVICE_PAUSE: Duration = Duration::from_micros(60);

/// Counts the changes by driver. A new stream, or another instance of the driver, does not begin again.
#[derive(Debug, Default)]
pub(super) struct ReportRateLimits(BTreeMap<String, TokenBucket>);

impl ReportRateLimits {
    /// A report on so many devices was handled. Returns the wait before the next one of this stream.
    pub(super) fn next(&mut self, driver: &str, devices: usize, has_changed: bool, now: Instant) -> Duration {
        let wait = if has_changed { self.record_change(driver, now) } else { Duration::ZERO };
        let devices = u32::try_from(devices).unwrap_or(u32::MAX);
        let pause = DEVICE_PAUSE.saturating_mul(devices).saturating_add(REPORT_PAUSE).min(INTERVAL);
        wait.max(pause)
    }

    fn record_change(&mut self, driver: &str, now: Instant) -> Duration {
        if let Some(bucket) = self.0.get_mut(driver) {
            return bucket.record_of(STREAMS, now);
        }
        // A full bucket equals a new one: drivers that are gone do not accumulate.
        self.0.retain(|_, bucket| !bucket.is_full(now));
        let bucket = self.0.entry(driver.to_owned());
        bucket.or_insert_with(|| TokenBucket::new(BURST, INTERVAL, now)).record_of(STREAMS, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_without_changes_and_a_hundred_changes_hardly_wait() {
        let begun = Instant::now();
        let mut limits = ReportRateLimits::default();
        let mut next = |has_changed, now| limits.next("d", 1, has_changed, now);
        for _ in 0..1_000 {
            assert!(next(false, begun) < REPORT_PAUSE * 2);
        }
        let waits: Vec<Duration> = (0..BURST).map(|_| next(true, begun)).collect();
        assert!(waits.iter().rev().skip(1).all(|wait| *wait < REPORT_PAUSE * 2));
        assert_eq!(waits.last(), Some(&INTERVAL));
        assert_eq!(next(true, begun + INTERVAL), INTERVAL);
        assert!(next(false, begun + INTERVAL) < REPORT_PAUSE * 2);
        assert!(next(true, begun + INTERVAL * 1_000) < REPORT_PAUSE * 2);
    }

    #[test]
    fn all_streams_of_a_driver_together_have_one_change_in_a_second() {
        assert_eq!(STREAMS as usize, super::super::drivers::MAX_INSTANCES);
        let begun = Instant::now();
        let mut limits = ReportRateLimits::default();
        for _ in 0..BURST {
            limits.next("d", 1, true, begun);
        }
        // Each stream has its next change after its wait.
        let mut streams = [begun + INTERVAL; 4];
        let mut changes = 0;
        for second in 1..=60 {
            let now = begun + INTERVAL * second;
            for due in &mut streams {
                if *due <= now {
                    changes += 1;
                    *due = now + limits.next("d", 1, true, now);
                }
            }
        }
        assert!(changes <= 60 + streams.len(), "{changes}");
    }

    #[test]
    fn large_reports_wait_longer_but_not_beyond_a_second() {
        let begun = Instant::now();
        let mut limits = ReportRateLimits::default();
        assert!(limits.next("d", 10_000, false, begun) > INTERVAL / 2);
        assert_eq!(limits.next("d", usize::MAX, false, begun), INTERVAL);
    }

    #[test]
    fn each_driver_has_its_own_limit_and_drivers_that_are_gone_are_removed() {
        let begun = Instant::now();
        let mut limits = ReportRateLimits::default();
        for _ in 0..BURST {
            limits.next("a", 1, true, begun);
        }
        assert!(limits.next("b", 1, true, begun) < REPORT_PAUSE * 2);
        // Its other streams wait for their turns.
        assert_eq!(limits.next("a", 1, true, begun), INTERVAL * 2);
        limits.next("c", 1, true, begun + INTERVAL * 2);
        assert_eq!(limits.0.keys().collect::<Vec<_>>(), ["a", "c"]);
        limits.next("d", 1, false, begun + INTERVAL * 200);
        limits.next("e", 1, true, begun + INTERVAL * 200);
        assert_eq!(limits.0.keys().collect::<Vec<_>>(), ["e"]);
    }
}
