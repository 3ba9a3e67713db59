//! How long a pod has been active, for its `activeDeadlineSeconds`.
//!
//! DIFFERS: the Go kubelet subtracts times of day, so that it ends running pods when the clock is set
//! forward, and lets them run on when it is set back. Here the time since this agent first inspected
//! the pod is that of the monotonic clock, which is never set and stands still while the machine
//! sleeps. The time before that is a difference of times of day. For a pod that runs it counts only if
//! it is plausible, which is between zero and the uptime of the machine: no container is older.
//! Otherwise the clock is wrong, or the pod also ran before the last reboot, and its time begins again.
//! So a clock that is years ahead at a restart of the agent ends no pod.

use std::time::{Duration, Instant};

use jiff::Timestamp;

/// The stored start time has whole seconds, and may differ this much from the first one.
const SAME_START: Duration = Duration::from_secs(2);

/// One pod's time.
#[derive(Debug, Default)]
pub(super) struct ActiveClock {
    known: Option<Known>,
}

#[derive(Debug)]
struct Known {
    start: Timestamp,
    /// The active time before `seen`.
    before: Duration,
    seen: Instant,
}

impl ActiveClock {
    /// The active time of a pod that started at `start` by the time of day; `runs`: a container of it runs
    /// now. `uptime` is called once for each start.
    pub(super) fn inspected(
        &mut self,
        start: Timestamp,
        runs: bool,
        (now, instant): (Timestamp, Instant),
        uptime: impl FnOnce() -> Option<Duration>,
    ) -> Duration {
        if !self.known.as_ref().is_some_and(|known| known.is(start)) {
            let before = difference(start, now);
            let is_plausible = !runs || uptime().is_none_or(|uptime| before <= uptime);
            let before = if is_plausible { before } else { Duration::ZERO };
            self.known = Some(Known { start, before, seen: instant });
        }
        self.active(start, (now, instant))
    }

    /// The active time, between two inspections.
    pub(super) fn active(&self, start: Timestamp, (now, instant): (Timestamp, Instant)) -> Duration {
        match self.known.as_ref().filter(|known| known.is(start)) {
            Some(known) => known.before.saturating_add(instant.saturating_duration_since(known.seen)),
            None => difference(start, now),
        }
    }
}

impl Known {
    fn is(&self, start: Timestamp) -> bool {
        self.start.duration_since(start).unsigned_abs() <= SAME_START
    }
}

fn difference(start: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(start)).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    const YEAR: i64 = 365 * 86_400;

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(1_790_000_000 + second).unwrap()
    }

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn clock_that_is_set_while_the_pod_runs_changes_nothing() {
        let begin = Instant::now();
        let mut clock = ActiveClock::default();
        let mut active = |wall: i64, passed: u64| {
            let now = (time(wall), begin + seconds(passed));
            clock.inspected(time(0), true, now, || Some(seconds(9999)))
        };
        assert_eq!(active(5, 0), seconds(5));
        for jump in [0, -50 * YEAR, 10 * YEAR, 61, -61] {
            assert_eq!(active(15 + jump, 10), seconds(15), "{jump}");
        }
        // The start is stored in whole seconds. Another start begins another time.
        let now = (time(10 * YEAR), begin + seconds(20));
        let start = time(0) + jiff::SignedDuration::from_millis(-900);
        assert_eq!(clock.active(start, now), seconds(25));
        assert_eq!(clock.inspected(time(10 * YEAR - 3), true, now, || None), seconds(3));
    }

    #[test]
    fn wrong_clock_at_a_restart_of_the_agent_ends_no_running_pod() {
        let begin = Instant::now();
        let first = |wall: i64, runs| {
            let uptime = || Some(seconds(600));
            ActiveClock::default().inspected(time(0), runs, (time(wall), begin), uptime)
        };
        assert_eq!(first(300, true), seconds(300));
        assert_eq!(first(601, true), Duration::ZERO);
        assert_eq!(first(10 * YEAR, true), Duration::ZERO);
        assert_eq!(first(-50 * YEAR, true), Duration::ZERO);
        // After a reboot the time of day decides alone, as with the Go kubelet.
        assert_eq!(first(3600, false), seconds(3600));
        // Without an inspection nothing is fixed yet.
        assert_eq!(ActiveClock::default().active(time(0), (time(7), begin)), seconds(7));
    }
}
