//! Values as texts of the kernel's files, and back (pure).

use super::values::{
    DEFAULT_PERIOD, HugePages, Quota, UNLIMITED_BYTES, UNLIMITED_HUGE_PAGES, Values, cpus, page_size_name,
};
use crate::model::cpu_shares::{shares_of_weight, weight};
use crate::util::cgroup_mounts::Version;

/// One text for one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) controller: &'static str,
    pub(super) file: String,
    pub(super) text: String,
    /// Older kernels lack the file.
    pub(super) optional: bool,
}

fn write(controller: &'static str, file: &str, text: impl ToString) -> Write {
    Write { controller, file: file.to_owned(), text: text.to_string(), optional: false }
}

/// The files of `values` in the order in which they are written (github.com/opencontainers/cgroups
/// fs and fs2). `page_sizes`: those of the machine; empty if the kernel does not limit huge pages.
pub(super) fn writes(values: &Values, version: Version, page_sizes: &[u64]) -> Vec<Write> {
    let mut all = match version {
        Version::V1 => v1(values),
        Version::V2 => v2(values),
    };
    all.extend(huge_pages(&values.huge_pages, version, page_sizes));
    if version == Version::V2 {
        let protected = [("memory.min", values.memory_min), ("memory.low", values.memory_low)];
        all.extend(
            protected.into_iter().filter_map(|(file, bytes)| Some(write("memory", file, bytes?.max(0)))),
        );
        let high = values.memory_high.map(|bytes| or_max(Some(bytes).filter(|bytes| *bytes >= 0)));
        all.extend(high.map(|text| write("memory", "memory.high", text)));
    }
    all
}

fn v1(values: &Values) -> Vec<Write> {
    let mut all = Vec::new();
    if let Some(cpus) = &values.cpus {
        all.push(write("cpuset", "cpuset.cpus", cpus));
    }
    if let Some(bytes) = values.memory_bytes.filter(|bytes| *bytes != 0) {
        all.push(write("memory", "memory.limit_in_bytes", bytes.max(-1)));
    }
    if let Some(shares) = values.cpu_shares {
        all.push(write("cpu", "cpu.shares", shares));
    }
    if let Some(quota) = values.cpu_quota {
        all.push(write("cpu", PERIOD, quota.period));
        all.push(write("cpu", QUOTA, quota.number()));
    }
    all.extend(values.pids.map(pids));
    all
}

fn v2(values: &Values) -> Vec<Write> {
    let mut all: Vec<Write> = values.pids.map(pids).into_iter().collect();
    if let Some(bytes) = values.memory_bytes.filter(|bytes| *bytes != 0) {
        all.push(write("memory", "memory.max", or_max(Some(bytes).filter(|bytes| *bytes > 0))));
    }
    if let Some(shares) = values.cpu_shares {
        all.push(write("cpu", "cpu.weight", weight(shares)));
    }
    if let Some(Quota { microseconds, period }) = values.cpu_quota {
        all.push(write("cpu", "cpu.max", format!("{} {period}", or_max(microseconds))));
    }
    if let Some(cpus) = &values.cpus {
        all.push(write("cpuset", "cpuset.cpus", cpus));
    }
    all
}

/// The kernel accepts the period before the quota, or after it.
pub(super) const PERIOD: &str = "cpu.cfs_period_us";
/// See [`PERIOD`].
pub(super) const QUOTA: &str = "cpu.cfs_quota_us";

fn pids(limit: i64) -> Write {
    // As systemd, which does not accept 0.
    write("pids", "pids.max", or_max(Some(limit).filter(|limit| *limit >= 0).map(|limit| limit.max(1))))
}

fn or_max(number: Option<i64>) -> String {
    number.map_or_else(|| "max".to_owned(), |number| number.to_string())
}

/// DIFFERS: a limit for pages of a size that the machine lacks is ignored. The Go kubelet fails at
/// its file.
fn huge_pages(limits: &HugePages, version: Version, page_sizes: &[u64]) -> Vec<Write> {
    let suffix = if version == Version::V1 { "limit_in_bytes" } else { "max" };
    let mut all = Vec::new();
    for size in page_sizes {
        let bytes = match limits {
            HugePages::Unchanged => return Vec::new(),
            HugePages::Unlimited => UNLIMITED_HUGE_PAGES,
            HugePages::Limits(limits) => limits.get(size).copied().unwrap_or(0),
        };
        let name = page_size_name(*size);
        all.push(write("hugetlb", &format!("hugetlb.{name}.{suffix}"), bytes));
        let reserved = write("hugetlb", &format!("hugetlb.{name}.rsvd.{suffix}"), bytes);
        all.push(Write { optional: true, ..reserved });
    }
    all
}

/// Whether a file that reads `current` has the value `wanted`: then it is not written. The kernel
/// rounds bytes down to pages, whose size is `page` bytes, above 0; and prints large numbers for no
/// limit.
pub(super) fn is_same(file: &str, current: &str, wanted: &str, page: u64) -> bool {
    let current = current.trim();
    if current == wanted {
        return true;
    }
    if file == "cpuset.cpus" {
        return cpus(current).is_some_and(|all| Some(all) == cpus(wanted));
    }
    if file.starts_with("memory.") || file.starts_with("hugetlb.") {
        return match (bytes(current), bytes(wanted)) {
            (Some(Bytes::Unlimited), Some(Bytes::Unlimited)) => true,
            (Some(Bytes::Limit(current)), Some(Bytes::Limit(wanted))) => current == wanted - wanted % page,
            _ => false,
        };
    }
    false
}

enum Bytes {
    Limit(u64),
    Unlimited,
}

fn bytes(text: &str) -> Option<Bytes> {
    match text {
        "max" | "-1" => Some(Bytes::Unlimited),
        number => match number.parse::<u64>().ok()? {
            limit if limit >= UNLIMITED_BYTES => Some(Bytes::Unlimited),
            limit => Some(Bytes::Limit(limit)),
        },
    }
}

/// The values that files have; `get` returns the text of a file of a controller. Missing files have
/// no value.
pub(super) fn read(version: Version, get: impl Fn(&str, &str) -> Option<String>) -> Values {
    let number = |controller: &str, file: &str| get(controller, file)?.trim().parse::<u64>().ok();
    let limit = |controller: &str, file: &str| match bytes(get(controller, file)?.trim())? {
        Bytes::Unlimited => Some(-1),
        Bytes::Limit(bytes) => i64::try_from(bytes).ok(),
    };
    let pids = get("pids", "pids.max").and_then(|text| match text.trim() {
        "max" => Some(-1),
        number => number.parse().ok(),
    });
    let cpus =
        get("cpuset", "cpuset.cpus").map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    match version {
        Version::V1 => {
            let microseconds = get("cpu", QUOTA).and_then(|text| text.trim().parse::<i64>().ok());
            let period = number("cpu", PERIOD);
            Values {
                cpu_shares: number("cpu", "cpu.shares"),
                cpu_quota: microseconds.zip(period).map(|(microseconds, period)| Quota {
                    microseconds: Some(microseconds).filter(|time| *time > 0),
                    period,
                }),
                memory_bytes: limit("memory", "memory.limit_in_bytes"),
                pids,
                cpus,
                ..Values::default()
            }
        }
        Version::V2 => Values {
            cpu_shares: number("cpu", "cpu.weight").map(shares_of_weight),
            cpu_quota: get("cpu", "cpu.max").and_then(|text| cpu_max(&text)),
            memory_bytes: limit("memory", "memory.max"),
            pids,
            cpus,
            memory_min: limit("memory", "memory.min"),
            memory_low: limit("memory", "memory.low"),
            memory_high: limit("memory", "memory.high"),
            ..Values::default()
        },
    }
}

fn cpu_max(text: &str) -> Option<Quota> {
    let mut words = text.split_whitespace();
    let microseconds = match words.next()? {
        "max" => None,
        number => Some(number.parse().ok()?),
    };
    let period = words.next().map_or(Ok(DEFAULT_PERIOD), str::parse).ok()?;
    Some(Quota { microseconds, period })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values() -> Values {
        Values {
            cpu_shares: Some(512),
            cpu_quota: Some(Quota { microseconds: Some(50_000), period: 100_000 }),
            memory_bytes: Some(100 << 20),
            pids: Some(128),
            huge_pages: HugePages::Limits([(2 << 20, 4 << 20)].into()),
            cpus: Some("0-1".to_owned()),
            memory_min: Some(100 << 20),
            memory_low: None,
            memory_high: Some(90 << 20),
        }
    }

    fn check(values: &Values, version: Version, expected: &[&str]) {
        let found: Vec<String> = writes(values, version, &[2 << 20, 1 << 30])
            .iter()
            .map(|write| format!("{}={}{}", write.file, write.text, if write.optional { " ?" } else { "" }))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn values_are_written_to_the_files_of_both_versions() {
        check(
            &values(),
            Version::V1,
            &[
                "cpuset.cpus=0-1",
                "memory.limit_in_bytes=104857600",
                "cpu.shares=512",
                "cpu.cfs_period_us=100000",
                "cpu.cfs_quota_us=50000",
                "pids.max=128",
                "hugetlb.2MB.limit_in_bytes=4194304",
                "hugetlb.2MB.rsvd.limit_in_bytes=4194304 ?",
                "hugetlb.1GB.limit_in_bytes=0",
                "hugetlb.1GB.rsvd.limit_in_bytes=0 ?",
            ],
        );
        check(
            &values(),
            Version::V2,
            &[
                "pids.max=128",
                "memory.max=104857600",
                "cpu.weight=20",
                "cpu.max=50000 100000",
                "cpuset.cpus=0-1",
                "hugetlb.2MB.max=4194304",
                "hugetlb.2MB.rsvd.max=4194304 ?",
                "hugetlb.1GB.max=0",
                "hugetlb.1GB.rsvd.max=0 ?",
                "memory.min=104857600",
                "memory.high=94371840",
            ],
        );
        check(&Values::default(), Version::V1, &[]);
        let free = Values {
            cpu_quota: Some(Quota { microseconds: None, period: 20_000 }),
            memory_bytes: Some(-1),
            pids: Some(0),
            ..Values::default()
        };
        check(
            &free,
            Version::V1,
            &["memory.limit_in_bytes=-1", "cpu.cfs_period_us=20000", "cpu.cfs_quota_us=-1", "pids.max=1"],
        );
        check(&free, Version::V2, &["pids.max=1", "memory.max=max", "cpu.max=max 20000"]);
        let none =
            Values { memory_bytes: Some(0), pids: Some(-1), memory_high: Some(-1), ..Values::default() };
        check(&none, Version::V2, &["pids.max=max", "memory.high=max"]);
        let unlimited = writes(
            &Values { huge_pages: HugePages::Unlimited, ..Values::default() },
            Version::V2,
            &[2 << 20],
        );
        assert_eq!(unlimited[0].text, "4611686018427387904");
    }

    #[test]
    fn equal_values_are_recognised() {
        for (file, current, wanted, same) in [
            ("cpu.shares", "512\n", "512", true),
            ("cpu.shares", "513\n", "512", false),
            ("memory.limit_in_bytes", "104857600\n", "104857600", true),
            ("memory.limit_in_bytes", "104857600\n", "104857601", true),
            ("memory.limit_in_bytes", "9223372036854771712\n", "-1", true),
            ("memory.limit_in_bytes", "104857600\n", "-1", false),
            ("memory.max", "max\n", "max", true),
            ("memory.max", "max\n", "4096", false),
            ("cpuset.cpus", "0-1\n", "0,1", true),
            ("cpuset.cpus", "0-2\n", "0,1", false),
            ("cpuset.cpus", "x\n", "y", false),
            ("pids.max", "max\n", "5", false),
            ("hugetlb.2MB.max", "max\n", "9223372036854775807", true),
        ] {
            assert_eq!(is_same(file, current, wanted, 4096), same, "{file} {current:?} {wanted}");
        }
        // 100,000,000 bytes are no whole number of pages.
        for (page, current, same) in
            [(4096, "99999744\n", true), (65_536, "99942400\n", true), (4096, "99942400\n", false)]
        {
            assert_eq!(is_same("memory.max", current, "100000000", page), same, "{page} {current:?}");
        }
    }

    #[test]
    fn written_values_are_read_back() {
        for version in [Version::V1, Version::V2] {
            let all = writes(&values(), version, &[]);
            let get = |controller: &str, file: &str| {
                let write = all.iter().find(|write| write.controller == controller && write.file == file)?;
                Some(format!("{}\n", write.text))
            };
            let found = read(version, get);
            let mut expected = Values { huge_pages: HugePages::Unchanged, ..values() };
            match version {
                Version::V1 => (expected.memory_min, expected.memory_high) = (None, None),
                // The weight is coarser than shares.
                Version::V2 => expected.cpu_shares = Some(500),
            }
            assert_eq!(found, expected);
        }
        let get = |_: &str, file: &str| match file {
            "cpu.max" => Some("max 100000\n".to_owned()),
            "memory.max" | "memory.high" | "pids.max" => Some("max\n".to_owned()),
            _ => Some("nonsense".to_owned()),
        };
        let found = read(Version::V2, get);
        assert_eq!((found.memory_bytes, found.pids, found.cpu_shares), (Some(-1), Some(-1), None));
        assert_eq!((found.memory_high, found.memory_low), (Some(-1), None));
        assert_eq!(found.cpu_quota, Some(Quota { microseconds: None, period: 100_000 }));
    }
}
