//! How long a pod has been active, for its `activeDeadlineSeconds`.
//!
//! DIFFERS: the Go kubelet subtracts times of day, so that it ends running pods when the clock is set
//! forward, and lets them run on when it is set back. Here the time since this agent first inspected
//! the pod is that of the monotonic clock, which is never set and stands still while the machine
//! sleeps. The time before that is a difference of times of day. For a pod that runs it counts only if
//! the clock was not set ahead since its containers and sandboxes were made, which is the case if they
//! are not older than the uptime of the machine. Otherwise its time begins again. So a clock that is
//! years ahead at a restart of the agent ends no pod, and a pod that also ran before the last reboot
//! keeps its time.

use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::model::runtime::{PodRuntime, SandboxState};

/// The stored start time has whole seconds, and may differ this much from the first one.
const SAME_START: Duration = Duration::from_secs(2);
/// A clock may be set ahead this much by its own correction soon after a boot.
const CORRECTION: Duration = Duration::from_secs(60);

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
    /// The active time of a pod that started at `start` by the time of day; `running`: see
    /// [`running_since`]. `uptime` is called once for each start.
    pub(super) fn inspected(
        &mut self,
        start: Timestamp,
        running: Option<Timestamp>,
        (now, instant): (Timestamp, Instant),
        uptime: impl FnOnce() -> Option<Duration>,
    ) -> Duration {
        if !self.known.as_ref().is_some_and(|known| known.is(start)) {
            let before = difference(start, now);
            let is_plausible = running.is_none_or(|since| {
                uptime().is_none_or(|uptime| difference(since, now) <= uptime.saturating_add(CORRECTION))
            });
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

/// When the oldest of the containers and sandboxes that run now was made, by the time of day; `None`: none
/// runs. One without a time counts as made when the pod started.
pub(super) fn running_since(runtime: &PodRuntime, start: Timestamp) -> Option<Timestamp> {
    let containers = runtime.running().map(|container| container.created_at);
    let sandboxes = runtime.sandboxes.iter().filter(|sandbox| sandbox.state == SandboxState::Ready);
    containers.chain(sandboxes.map(|sandbox| sandbox.created_at)).map(|made| made.unwrap_or(start)).min()
}

fn difference(start: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(start)).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::runtime::{ContainerState, ContainerStatus, SandboxStatus};

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
            clock.inspected(time(0), Some(time(0)), now, || Some(seconds(9999)))
        };
        assert_eq!(active(5, 0), seconds(5));
        for jump in [0, -50 * YEAR, 10 * YEAR, 61, -61] {
            assert_eq!(active(15 + jump, 10), seconds(15), "{jump}");
        }
        // The start is stored in whole seconds. Another start begins another time.
        let now = (time(10 * YEAR), begin + seconds(20));
        let start = time(0) + jiff::SignedDuration::from_millis(-900);
        assert_eq!(clock.active(start, now), seconds(25));
        assert_eq!(clock.inspected(time(10 * YEAR - 3), Some(time(0)), now, || None), seconds(3));
    }

    /// The active time at the first inspection, 600 s after the boot.
    fn first(wall: i64, running: Option<i64>) -> Duration {
        let uptime = || Some(seconds(600));
        let now = (time(wall), Instant::now());
        ActiveClock::default().inspected(time(0), running.map(time), now, uptime)
    }

    #[test]
    fn wrong_clock_at_a_restart_of_the_agent_ends_no_running_pod() {
        assert_eq!(first(300, Some(0)), seconds(300));
        assert_eq!(first(660, Some(0)), seconds(660));
        assert_eq!(first(661, Some(0)), Duration::ZERO);
        assert_eq!(first(10 * YEAR, Some(5)), Duration::ZERO);
        assert_eq!(first(-50 * YEAR, Some(5)), Duration::ZERO);
        // After a reboot the time of day decides alone, as with the Go kubelet.
        assert_eq!(first(3600, None), seconds(3600));
        // Without an inspection nothing is fixed yet.
        let now = (time(7), Instant::now());
        assert_eq!(ActiveClock::default().active(time(0), now), seconds(7));
    }

    #[test]
    fn pod_that_ran_before_the_last_reboot_keeps_its_time_at_a_restart_of_the_agent() {
        // The machine was booted 600 s ago, and the containers were made 590 s ago.
        assert_eq!(first(30 * 86_400, Some(30 * 86_400 - 590)), seconds(30 * 86_400));
    }

    #[test]
    fn oldest_running_container_or_ready_sandbox_shows_whether_the_clock_was_set() {
        let container = |state, made: Option<i64>| ContainerStatus {
            created_at: made.map(time),
            ..ContainerStatus::blank("id", "c", state)
        };
        let sandbox = |state, made| SandboxStatus {
            id: "s".into(),
            attempt: 0,
            state,
            created_at: Some(time(made)),
            host_network: false,
            network_reported: true,
            ips: Vec::new(),
        };
        let mut runtime = PodRuntime::absent("u".into());
        runtime.sandboxes = vec![sandbox(SandboxState::NotReady, 5)];
        runtime.containers = vec![container(ContainerState::Exited, Some(6))];
        assert_eq!(running_since(&runtime, time(0)), None);
        runtime.sandboxes.push(sandbox(SandboxState::Ready, 20));
        assert_eq!(running_since(&runtime, time(0)), Some(time(20)));
        runtime.containers.push(container(ContainerState::Running, Some(10)));
        assert_eq!(running_since(&runtime, time(0)), Some(time(10)));
        runtime.containers.push(container(ContainerState::Running, None));
        assert_eq!(running_since(&runtime, time(0)), Some(time(0)));
    }
}
