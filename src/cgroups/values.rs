//! The values of a cgroup, and the conversions between their units (pure).

use std::collections::BTreeMap;

use crate::model::cpu_shares::MIN_SHARES;

/// The CFS period of the kernel and the configuration, in microseconds.
pub const DEFAULT_PERIOD: u64 = 100_000;
/// The kernel refuses a shorter CFS quota, in microseconds.
const MIN_QUOTA: i64 = 1000;
/// The kernel refuses a longer CFS quota, in microseconds (kernel: kernel/sched/sched.h `MAX_BW`).
const MAX_QUOTA: i64 = (1 << 44) - 1;
/// A limit of memory from this one on is none: version 1 prints the largest number of pages, in bytes.
pub const UNLIMITED_BYTES: u64 = (i64::MAX as u64) / (1 << 16) * (1 << 16);
/// The limit of huge pages that has no effect (Go: pkg/kubelet/cm qos_container_manager).
pub const UNLIMITED_HUGE_PAGES: u64 = 1 << 62;

/// A limit of CPU time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Microseconds of CPU time per period; `None`: not limited.
    pub microseconds: Option<i64>,
    /// Microseconds.
    pub period: u64,
}

impl Quota {
    /// The number in the files of version 1 and in the CRI: -1 is no limit.
    #[must_use]
    pub fn number(self) -> i64 {
        self.microseconds.unwrap_or(-1)
    }
}

/// Limits of huge pages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum HugePages {
    /// No limit is written.
    #[default]
    Unchanged,
    /// Bytes by size of a page; the limit of each other size is 0.
    Limits(BTreeMap<u64, u64>),
    /// The limit of each size has no effect.
    Unlimited,
}

/// The values of one cgroup; `None`: not written (Go: pkg/kubelet/cm `ResourceConfig`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Values {
    /// CPU weight in the scale of version 1, which has 1,024 per core.
    pub cpu_shares: Option<u64>,
    /// Limit of CPU time.
    pub cpu_quota: Option<Quota>,
    /// Limit of memory in bytes; -1: none; 0 is never written.
    pub memory_bytes: Option<i64>,
    /// Limit of processes and threads; negative: none; 0 is written as 1.
    pub pids: Option<i64>,
    /// Limits of huge pages.
    pub huge_pages: HugePages,
    /// CPUs in the kernel's form, such as `0-3,8`.
    pub cpus: Option<String>,
    /// `memory.min` of version 2, bytes.
    pub memory_min: Option<i64>,
    /// `memory.low` of version 2, bytes.
    pub memory_low: Option<i64>,
    /// `memory.high` of version 2, bytes; -1: none. Never of the cgroup of all pods, where evictions
    /// use the file.
    pub memory_high: Option<i64>,
}

impl Values {
    /// These values, with those that `update` has (Go: kuberuntime `mergeResourceConfig`).
    #[must_use]
    pub fn merged(&self, update: &Values) -> Values {
        Values {
            cpu_shares: update.cpu_shares.or(self.cpu_shares),
            cpu_quota: update.cpu_quota.or(self.cpu_quota),
            memory_bytes: update.memory_bytes.or(self.memory_bytes),
            pids: update.pids.or(self.pids),
            huge_pages: match &update.huge_pages {
                HugePages::Unchanged => self.huge_pages.clone(),
                other => other.clone(),
            },
            cpus: update.cpus.as_ref().or(self.cpus.as_ref()).cloned(),
            memory_min: update.memory_min.or(self.memory_min),
            memory_low: update.memory_low.or(self.memory_low),
            memory_high: update.memory_high.or(self.memory_high),
        }
    }

    /// The least weight, for a cgroup whose pod has ended but which cannot be removed yet (Go:
    /// `ReduceCPULimits`).
    ///
    /// DIFFERS: the Go kubelet also sets the limits of huge pages to 0.
    #[must_use]
    pub fn least_cpu() -> Values {
        Values { cpu_shares: Some(MIN_SHARES), ..Values::default() }
    }
}

/// The CFS quota of a limit in millicores, in microseconds; `None` without a limit
/// (`MilliCPUToQuota`).
#[must_use]
pub fn quota(millicores: i64, period: u64) -> Option<i64> {
    let time = i128::from(millicores) * i128::from(period) / 1000;
    (millicores > 0).then(|| i64::try_from(time).unwrap_or(i64::MAX).clamp(MIN_QUOTA, MAX_QUOTA))
}

/// Systemd limits CPU time in whole percents of a core, so a quota is rounded up to 10 ms of each
/// second (github.com/opencontainers/cgroups systemd `addCPUQuota`). Returns the microseconds per
/// second ([`u64::MAX`]: not limited), and the quota for the files.
#[must_use]
pub fn rounded_for_systemd(quota: Quota) -> (u64, Quota) {
    const PERCENT: u128 = 10_000;
    let time = quota.microseconds.and_then(|time| u128::try_from(time).ok()).filter(|time| *time > 0);
    let Some(time) = time else { return (u64::MAX, Quota { microseconds: None, ..quota }) };
    let period = u128::from(quota.period.max(1));
    let second = time * 1_000_000 / period;
    if second.is_multiple_of(PERCENT) {
        return (u64::try_from(second).unwrap_or(u64::MAX), quota);
    }
    let second = second.next_multiple_of(PERCENT);
    let time = i64::try_from(second * period / 1_000_000).unwrap_or(MAX_QUOTA);
    (u64::try_from(second).unwrap_or(u64::MAX), Quota { microseconds: Some(time), ..quota })
}

/// A size of huge pages in the names of kernel files: `2MB`, `1GB` (kernel: mm/hugetlb_cgroup.c).
#[must_use]
pub fn page_size_name(bytes: u64) -> String {
    let (mut size, mut unit) = (bytes >> 10, "KB");
    for larger in ["MB", "GB"] {
        if size >= 1024 {
            size >>= 10;
            unit = larger;
        }
    }
    format!("{size}{unit}")
}

/// The CPUs of a list in the kernel's form; `None`: it is invalid. At most 65,536 CPUs.
#[must_use]
pub fn cpus(list: &str) -> Option<Vec<u16>> {
    let mut all = std::collections::BTreeSet::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        if first > last {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quotas_follow_the_period_and_the_limits_of_the_kernel() {
        for (milli, period, expected) in [
            (0, 100_000, None),
            (-1, 100_000, None),
            (1, 100_000, Some(1000)),
            (150, 100_000, Some(15_000)),
            (1200, 20_000, Some(24_000)),
            (5, 20_000, Some(1000)),
            (i64::MAX, u64::MAX, Some(MAX_QUOTA)),
        ] {
            assert_eq!(quota(milli, period), expected, "{milli} {period}");
        }
    }

    #[test]
    fn systemd_rounds_up_to_whole_percents() {
        let check = |time: Option<i64>, period, second, rounded: Option<i64>| {
            let found = rounded_for_systemd(Quota { microseconds: time, period });
            assert_eq!(found, (second, Quota { microseconds: rounded, period }));
        };
        check(Some(50_000), 100_000, 500_000, Some(50_000));
        check(Some(12_300), 100_000, 130_000, Some(13_000));
        check(Some(1000), 20_000, 50_000, Some(1000));
        check(Some(1001), 20_000, 60_000, Some(1200));
        check(None, 100_000, u64::MAX, None);
        check(Some(-1), 100_000, u64::MAX, None);
    }

    #[test]
    fn page_sizes_and_lists() {
        let names = [64 << 10, 2 << 20, 32 << 20, 1 << 30, 16 << 30].map(page_size_name);
        assert_eq!(names, ["64KB", "2MB", "32MB", "1GB", "16GB"]);
        assert_eq!(cpus("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!((cpus(""), cpus("2-1"), cpus("x")), (Some(vec![]), None, None));
    }

    #[test]
    fn merging_keeps_what_the_update_lacks() {
        let all = Values { cpu_shares: Some(5), memory_bytes: Some(7), pids: Some(9), ..Values::default() };
        let merged = all.merged(&Values {
            cpu_shares: Some(6),
            huge_pages: HugePages::Unlimited,
            ..Values::default()
        });
        let expected = Values { cpu_shares: Some(6), huge_pages: HugePages::Unlimited, ..all };
        assert_eq!(merged, expected);
    }

    proptest! {
        #[test]
        fn every_number_is_within_the_limits_of_the_kernel(milli: i64, period: u64, time: i64, any: u64) {
            if let Some(time) = quota(milli, period) {
                prop_assert!((MIN_QUOTA..=MAX_QUOTA).contains(&time));
            }
            let quota = Quota { microseconds: Some(time), period };
            let (_, rounded) = rounded_for_systemd(quota);
            if time > 0 && time <= MAX_QUOTA && (1000..=1_000_000).contains(&period) {
                prop_assert!(rounded.microseconds.is_some_and(|rounded| rounded >= time));
            }
            let _ = page_size_name(any);
        }
    }
}
