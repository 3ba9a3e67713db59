//! When a status is computed and when it is written (pure).

use std::time::{Duration, Instant};

use crate::util::backoff::{jitter, shortened};

/// How often a node that is not ready yet is checked after the start.
const FAST: Duration = Duration::from_millis(100);
/// How long this fast check lasts after the start.
const FAST_LIMIT: Duration = Duration::from_secs(120);
/// How long a start waits at most for the first reports of the runtime and of the watch.
const SETTLE_LIMIT: Duration = Duration::from_secs(5);
/// Spreads the requests of many nodes over time.
const JITTER: f64 = 0.04;
/// Waits between attempts to register.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(7);
/// The wait while the API server is away; its return ends the wait. It is shortened by a random part.
const AWAY: Duration = Duration::from_secs(60);

/// The due times of the `node` thread. It never reads a clock.
#[derive(Debug)]
pub(super) struct StatusSchedule {
    update_every: Duration,
    report_every: Duration,
    next: Instant,
    settle_until: Option<Instant>,
    fast_until: Option<Instant>,
    last_write: Option<Instant>,
    /// From the last write to the next one if nothing changes.
    report_after: Duration,
    refusals: u32,
}

impl StatusSchedule {
    pub(super) fn new(update_every: Duration, report_every: Duration, now: Instant) -> Self {
        StatusSchedule {
            update_every,
            report_every,
            next: now,
            settle_until: Some(now + SETTLE_LIMIT),
            fast_until: Some(now + FAST_LIMIT),
            last_write: None,
            report_after: report_every,
            refusals: 0,
        }
    }

    /// When to act next if nothing rings before.
    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// Whether a wait is over. Before registration rings do not shorten it.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    /// Whether to wait before the first report: a node that was ready before a restart must not be
    /// reported as not ready because its state is not read yet.
    pub(super) fn is_settling(&mut self, settled: bool, now: Instant) -> bool {
        if settled || self.settle_until.is_some_and(|until| now >= until) {
            self.settle_until = None;
        }
        if self.settle_until.is_some() {
            self.next = now + FAST;
        }
        self.settle_until.is_some()
    }

    /// Makes the next action due now.
    pub(super) fn at_once(&mut self, now: Instant) {
        self.next = now;
        self.refusals = 0;
    }

    /// Another status is due within this time.
    pub(super) fn within(&mut self, wait: Duration, now: Instant) {
        self.next = self.next.min(now + wait);
    }

    /// An attempt failed because the API server is away. The thread of the lease notices its return: another
    /// connection that waits for a server that starts would only add to the requests of its first second.
    pub(super) fn record_outage(&mut self, now: Instant, unit: f64) {
        self.next = now + shortened(AWAY, unit);
    }

    /// When to read the addresses of the machine before the next status; `None`: that is due soon.
    pub(super) fn address_check(&self, now: Instant) -> Option<Instant> {
        let check = now + self.update_every.max(FIRST_WAIT);
        (self.next > check + self.update_every / 2).then_some(check)
    }

    /// Registration failed.
    pub(super) fn record_refusal(&mut self, now: Instant, unit: f64) {
        let doubled = FIRST_WAIT.saturating_mul(1_u32.checked_shl(self.refusals).unwrap_or(u32::MAX));
        self.refusals = self.refusals.saturating_add(1).min(16);
        self.next = now + jitter(doubled.min(LONGEST_WAIT), unit);
    }

    /// Whether a status has to be written.
    pub(super) fn must_write(&self, changed: bool, now: Instant) -> bool {
        changed || self.last_write.is_none_or(|last| now.saturating_duration_since(last) >= self.report_after)
    }

    /// A status was written. After a change the next periodic one is moved by up to half
    /// its period: the same change may have happened on many nodes at the same time.
    pub(super) fn record_write(&mut self, changed: bool, now: Instant, unit: f64) {
        self.last_write = Some(now);
        self.report_after =
            if changed { self.report_every.mul_f64(0.5 + unit.clamp(0.0, 1.0)) } else { self.report_every };
    }

    /// A status was computed, and written if it had to be. `ready`: its readiness; `None` if it
    /// could not be written.
    pub(super) fn record_status(&mut self, ready: Option<bool>, now: Instant, unit: f64) {
        self.refusals = 0;
        if ready == Some(true) || self.fast_until.is_some_and(|until| now >= until) {
            self.fast_until = None;
        }
        // A server that does not respond does not get ten requests a second.
        let fast = self.fast_until.is_some() && ready.is_some();
        let wait = match ready {
            _ if fast => FAST,
            Some(_) => self.update_every.mul_f64(1.0 + JITTER * unit.clamp(0.0, 1.0)),
            None => jitter(self.update_every, unit),
        };
        self.next = now + wait;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn schedule(now: Instant) -> StatusSchedule {
        StatusSchedule::new(SECOND * 10, SECOND * 300, now)
    }

    #[test]
    fn unchanged_status_waits_for_the_report_period() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        assert!(schedule.must_write(false, start));
        schedule.record_write(true, start, 0.25);
        // 75 % of the period after a change, all of it after that.
        assert!(!schedule.must_write(false, start + SECOND * 224) && schedule.must_write(true, start));
        assert!(schedule.must_write(false, start + SECOND * 225));
        schedule.record_write(false, start + SECOND * 225, 0.25);
        assert!(!schedule.must_write(false, start + SECOND * 524));
        assert!(schedule.must_write(false, start + SECOND * 525));
        for (unit, most) in [(0.0, 150), (1.0, 450), (9.0, 450)] {
            schedule.record_write(true, start, unit);
            assert!(!schedule.must_write(false, start + SECOND * most - SECOND));
            assert!(schedule.must_write(false, start + SECOND * most));
        }
    }

    #[test]
    fn fast_until_ready_then_every_ten_seconds() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        assert!(schedule.is_due(start) && schedule.fast_until.is_some());
        schedule.record_status(Some(false), start, 0.5);
        assert_eq!(schedule.next(), start + FAST);
        schedule.record_status(None, start, 0.0);
        assert_eq!(schedule.next(), start + SECOND * 10);
        schedule.record_status(Some(true), start, 0.0);
        assert!(schedule.fast_until.is_none());
        schedule.record_status(Some(false), start, 1.0);
        assert_eq!(schedule.next(), start + Duration::from_millis(10_400));
        let mut late = self::schedule(start);
        late.record_status(Some(false), start + FAST_LIMIT, 0.0);
        assert_eq!(late.next(), start + FAST_LIMIT + SECOND * 10);
    }

    #[test]
    fn failed_status_is_repeated_at_random_and_rarely_while_the_server_is_away() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        let mut after_failure = |unit: f64| {
            schedule.record_status(None, start, unit);
            schedule.next().duration_since(start).as_secs_f64()
        };
        assert_eq!([0.0, 0.5, 1.0].map(&mut after_failure), [10.0, 12.5, 15.0]);
        let mut after_outage = |unit: f64| {
            schedule.record_outage(start, unit);
            schedule.next().duration_since(start).as_secs_f64()
        };
        assert_eq!([0.0, 0.5, 1.0].map(&mut after_outage), [30.0, 45.0, 60.0]);
        // The return.
        schedule.within(SECOND * 5, start);
        assert_eq!(schedule.next(), start + SECOND * 5);
    }

    /// A machine that moves while the API server is away must not give its pods former addresses.
    #[test]
    fn addresses_are_read_in_each_period_while_the_status_waits_for_the_server() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        for unit in [0.0, 1.0] {
            schedule.record_status(Some(true), start, unit);
            assert_eq!(schedule.address_check(start), None);
            schedule.record_status(None, start, unit);
            assert_eq!(schedule.address_check(start), None);
        }
        schedule.record_outage(start, 0.5);
        let check = |seconds: u32| schedule.address_check(start + SECOND * seconds);
        assert_eq!([0, 10, 20].map(check), [10, 20, 30].map(|seconds: u32| Some(start + SECOND * seconds)));
        assert_eq!([30, 45, 50].map(check), [None; 3], "the status is due at 45 s");
    }

    #[test]
    fn nothing_is_reported_before_the_first_check() {
        let start = Instant::now();
        let mut late = schedule(start);
        assert!(late.is_settling(false, start) && late.is_settling(false, start + SECOND * 4));
        assert_eq!(late.next(), start + SECOND * 4 + FAST);
        assert!(!late.is_settling(false, start + SECOND * 5) && !late.is_settling(false, start));
        let mut soon = schedule(start);
        assert!(!soon.is_settling(true, start) && !soon.is_settling(false, start));
    }

    #[test]
    fn registration_waits_double_up_to_seven_seconds() {
        let start = Instant::now();
        let mut schedule = schedule(start);
        let mut waits = Vec::new();
        for _ in 0..9 {
            schedule.record_refusal(start, 0.0);
            waits.push(schedule.next().duration_since(start).as_millis());
        }
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400, 7000, 7000]);
        schedule.at_once(start);
        assert!(schedule.is_due(start));
        schedule.record_refusal(start, 0.0);
        assert_eq!(schedule.next(), start + FIRST_WAIT);
    }
}
