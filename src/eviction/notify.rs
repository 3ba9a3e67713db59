//! Memory thresholds of cgroup version 1: what is written into `cgroup.event_control`, and at which
//! use of memory the kernel signals (pure; kernel: Documentation/admin-guide/cgroup-v1/memory.rst;
//! Go: eviction `NewCgroupNotifier`, `UpdateThreshold`).

use std::os::fd::RawFd;

/// The file that connects an eventfd with another file of the cgroup.
pub const EVENT_CONTROL: &str = "cgroup.event_control";
/// The use of memory.
pub const USAGE: &str = "memory.usage_in_bytes";
/// Signals when the kernel reclaims memory.
pub const PRESSURE_LEVEL: &str = "memory.pressure_level";

/// Fluctuations below this do not make the kernel signal.
const LEAST_DISTANCE: u64 = 32 << 20;

/// Memory of one cgroup, in bytes, and what is left until its nearest threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// Use of memory as the file has it, including pages of
    /// files that the kernel can drop.
    pub usage: u64,
    /// What is available beyond the largest threshold; zero if one is met.
    pub headroom: u64,
}

impl Reading {
    /// From the use of memory, what is available, and a threshold.
    ///
    /// A threshold is met when `capacity - working set` is below it, and the working set is the
    /// use without the inactive pages of files. So the use at which it is met is `capacity -
    /// threshold + (usage - working set)`, as upstream computes it. With `available = capacity -
    /// working set` this is `usage + available - threshold`.
    #[must_use]
    pub fn new(usage: u64, available: u64, threshold: u64) -> Reading {
        Reading { usage, headroom: available.saturating_sub(threshold) }
    }
}

/// The uses of memory at which the kernel signals. It signals when the use passes one of them in
/// either direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Levels {
    /// The use fell so far that [`Levels::upper`] would come too late: set both again.
    /// `None`: it cannot fall that far.
    pub lower: Option<u64>,
    /// The threshold may be met.
    pub upper: u64,
}

impl Levels {
    /// The levels for this reading.
    ///
    /// DIFFERS: upstream sets one level every 10 s. The lower one makes that unnecessary: the
    /// level is only wrong after the use of memory has changed.
    #[must_use]
    pub fn from_reading(reading: Reading) -> Levels {
        let distance = (reading.headroom / 4).max(LEAST_DISTANCE);
        Levels {
            lower: reading.usage.checked_sub(distance).filter(|lower| *lower > 0),
            upper: reading.usage.saturating_add(reading.headroom.max(1)),
        }
    }

    /// Whether the kernel has to get new levels: the use has passed one of these, or the upper one
    /// is off by more than an eighth of what is left.
    #[must_use]
    pub fn are_outdated(self, reading: Reading) -> bool {
        let passed = self.lower.is_some_and(|lower| reading.usage <= lower) || reading.usage >= self.upper;
        passed
            || Levels::from_reading(reading).upper.abs_diff(self.upper)
                > (reading.headroom / 8).max(LEAST_DISTANCE)
    }
}

/// The line that makes the kernel signal `event` (an eventfd) when the use of memory passes
/// `level`. `file` is the open [`USAGE`]; it may be closed afterwards.
#[must_use]
pub fn usage_line(event: RawFd, file: RawFd, level: u64) -> String {
    // The kernel's counter has pages, whose number fits into a signed number.
    format!("{event} {file} {}", level.min(i64::MAX as u64))
}

/// The line that makes the kernel signal `event` when it reclaims memory for new allocations.
/// `file` is the open [`PRESSURE_LEVEL`].
#[must_use]
pub fn pressure_line(event: RawFd, file: RawFd) -> String {
    format!("{event} {file} low")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_level_is_upstreams() {
        // capacity 8000, threshold 100, usage 3000 of which 500 are inactive: 8000 - 100 + 500.
        let reading = Reading::new(3000 * MIB, (8000 - 2500) * MIB, 100 * MIB);
        let levels = Levels::from_reading(reading);
        assert_eq!(levels.upper, 8400 * MIB);
        assert_eq!(levels.lower, Some(1650 * MIB));
        assert_eq!(usage_line(7, 8, levels.upper), "7 8 8808038400");
        assert_eq!(pressure_line(7, 8), "7 8 low");
    }

    #[test]
    fn a_met_threshold_has_its_level_at_the_present_use() {
        let levels = Levels::from_reading(Reading::new(100 * MIB, 50 * MIB, 60 * MIB));
        assert_eq!(levels, Levels { lower: Some(68 * MIB), upper: 100 * MIB + 1 });
        assert_eq!(Levels::from_reading(Reading::new(10, 0, 60)).lower, None);
    }

    #[test]
    fn levels_are_set_again_only_after_the_use_has_changed() {
        let reading = |usage: u64, available: u64| Reading::new(usage * MIB, available * MIB, 100 * MIB);
        let levels = Levels::from_reading(reading(3000, 5500));
        assert!(!levels.are_outdated(reading(3000, 5500)));
        assert!(!levels.are_outdated(reading(3500, 5000)), "a pod took 500 MiB: the level is the same");
        assert!(!levels.are_outdated(reading(3300, 5500)), "300 MiB of files were read");
        assert!(levels.are_outdated(reading(5000, 5500)), "many files were read");
        assert!(levels.are_outdated(reading(8400, 100)));
        assert!(levels.are_outdated(reading(1600, 5500)));
    }

    proptest! {
        #[test]
        fn any_numbers_give_levels_around_the_use(usage: u64, available: u64, threshold: u64) {
            let reading = Reading::new(usage, available, threshold);
            let levels = Levels::from_reading(reading);
            prop_assert!(levels.upper > usage || usage == u64::MAX);
            prop_assert!(levels.lower.is_none_or(|lower| lower < usage));
            prop_assert!(usage == u64::MAX || !levels.are_outdated(reading));
            let _ = usage_line(-1, -1, levels.upper);
        }
    }
}
