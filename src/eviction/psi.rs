//! Memory notifications of cgroup version 2 and of pressure stall information (pure; kernel:
//! Documentation/admin-guide/cgroup-v2.rst, Documentation/accounting/psi.rst).

use std::time::Duration;

/// Pressure of the whole machine, also on cgroup version 1 (kernel 4.20; triggers since 5.2). The
/// file is absent if the kernel was built without it, and reading it fails (`EOPNOTSUPP`) if it
/// was built for, but not booted with, `psi=1`.
pub const MACHINE: &str = "/proc/pressure/memory";
/// Counts of a cgroup; the kernel signals a change through inotify (modify) and poll (priority
/// data), at most every 10 ms.
pub const EVENTS: &str = "memory.events";
/// The use of memory above which the kernel reclaims memory of the cgroup's processes, slows them
/// down, and counts `high` in [`EVENTS`].
pub const HIGH: &str = "memory.high";
/// No limit.
pub const NO_LIMIT: &str = "max";

/// The windows that the kernel accepts.
const WINDOWS: std::ops::RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(10);

/// Which tasks must have waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// At least one.
    Some,
    /// All that were not idle.
    Full,
}

/// When the kernel signals: tasks waited for memory for `stall` within `window`. It signals at most
/// once per window, and does not wake up while no task waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trigger {
    /// Which tasks.
    pub kind: Kind,
    /// How long.
    pub stall: Duration,
    /// Within which time: 500 ms to 10 s.
    pub window: Duration,
}

impl Trigger {
    /// The trigger that shows that the kernel has begun to reclaim memory: its own reclaim in the
    /// background counts as waiting. Since kernel 6.5 only a process with `CAP_SYS_RESOURCE` gets
    /// it; others get `EINVAL`, and use [`Trigger::UNPRIVILEGED`].
    pub const RECLAIM: Trigger =
        Trigger { kind: Kind::Some, stall: Duration::from_millis(20), window: Duration::from_secs(1) };

    /// The same for other processes: the window has to be a multiple of 2 s, and the kernel
    /// compares every 2 s.
    pub const UNPRIVILEGED: Trigger = Trigger { window: Duration::from_secs(2), ..Trigger::RECLAIM };

    /// What to write into the pressure file; `None`: the kernel would refuse it. The file then
    /// signals through poll (priority data) until it is closed. The kernel overwrites the last byte
    /// of what it gets, so the line needs its end.
    #[must_use]
    pub fn text(self) -> Option<String> {
        if !WINDOWS.contains(&self.window) || self.stall > self.window || self.stall.as_micros() == 0 {
            return None;
        }
        let kind = match self.kind {
            Kind::Some => "some",
            Kind::Full => "full",
        };
        Some(format!("{kind} {} {}\n", self.stall.as_micros(), self.window.as_micros()))
    }
}

/// If less is left until a threshold, [`HIGH`] has no limit: pods must not be slowed down by the
/// agent.
pub const LEAST: u64 = 16 << 20;

/// The value of [`HIGH`] of the cgroup of all pods that makes the kernel signal when a threshold
/// may be met: its use and what was left at the same moment. [`NO_LIMIT`] if the pods cannot get
/// there because `max`, their own limit, is lower (then `max` in [`EVENTS`] signals), or if less than
/// [`LEAST`] is left.
#[must_use]
pub fn high(usage: u64, headroom: u64, max: Option<u64>) -> String {
    let level = usage.saturating_add(headroom);
    if headroom < LEAST || max.is_some_and(|max| level >= max) || level > i64::MAX as u64 {
        return NO_LIMIT.to_owned();
    }
    level.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn triggers_have_the_kernels_form_and_limits() {
        assert_eq!(Trigger::RECLAIM.text().as_deref(), Some("some 20000 1000000\n"));
        assert_eq!(Trigger::UNPRIVILEGED.text().as_deref(), Some("some 20000 2000000\n"));
        let with = |stall, window| {
            let (stall, window) = (Duration::from_millis(stall), Duration::from_millis(window));
            Trigger { kind: Kind::Full, stall, window }.text()
        };
        assert_eq!(with(500, 500).as_deref(), Some("full 500000 500000\n"));
        assert_eq!(with(1, 10_000).as_deref(), Some("full 1000 10000000\n"));
        for (stall, window) in [(1, 499), (1, 10_001), (501, 500), (0, 1000)] {
            assert_eq!(with(stall, window), None, "{stall} {window}");
        }
    }

    #[test]
    fn memory_high_is_the_use_plus_what_is_left() {
        const MIB: u64 = 1 << 20;
        assert_eq!(high(100 * MIB, 500 * MIB, None), (600 * MIB).to_string());
        assert_eq!(high(100 * MIB, 500 * MIB, Some(700 * MIB)), (600 * MIB).to_string());
        assert_eq!(high(100 * MIB, 500 * MIB, Some(600 * MIB)), "max");
        assert_eq!(high(100 * MIB, 15 * MIB, None), "max");
        assert_eq!(high(u64::MAX, u64::MAX, None), "max");
    }

    proptest! {
        #[test]
        fn no_number_causes_a_panic(usage: u64, headroom: u64, max: Option<u64>) {
            let _ = high(usage, headroom, max);
        }

        #[test]
        fn every_trigger_has_a_text_that_the_kernel_accepts_or_none(stall: u32, window: u32) {
            let trigger = Trigger {
                kind: Kind::Some,
                stall: Duration::from_micros(stall.into()),
                window: Duration::from_micros(window.into()),
            };
            if let Some(text) = trigger.text() {
                let numbers: Vec<u64> = text.split_whitespace().skip(1).map(|number| number.parse().unwrap()).collect();
                prop_assert!(numbers[0] > 0 && numbers[0] <= numbers[1] && (500_000..=10_000_000).contains(&numbers[1]));
            }
        }
    }
}
