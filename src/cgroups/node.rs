//! What of the node pods may use, and the values of the cgroups that enforce it (pure).
//! `node::resources` has the numbers of the Node object, which differ: there thresholds of
//! eviction and huge pages are subtracted, too.

use std::collections::BTreeMap;

use crate::model::quantity::Amount;

use super::error::CgroupError;
use super::values::{HugePages, Values};
use crate::model::cpu_shares::shares;
use crate::model::node::HardThresholds;

/// What the machine has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Capacity {
    /// CPU in thousandths of a core.
    pub cpu_milli: i64,
    /// Memory.
    pub memory_bytes: i64,
    /// Processes and threads; `None`: unknown.
    pub pids: Option<i64>,
    /// Bytes of huge pages by the size of a page.
    pub huge_pages: BTreeMap<u64, u64>,
    /// Size of the file system of the root directory; `None`: unknown, or not a resource.
    pub ephemeral_bytes: Option<i64>,
}

/// How many processes and threads the kernel allows (Go: pkg/kubelet/stats/pidlimit), from the
/// texts of `/proc/sys/kernel/pid_max` and `/proc/sys/kernel/threads-max`.
#[must_use]
pub fn max_pids(pid_max: Option<&str>, threads_max: Option<&str>) -> Option<i64> {
    [pid_max, threads_max].into_iter().flatten().filter_map(|text| text.trim().parse().ok()).min()
}

/// What is reserved for one kind of daemons (`systemReserved`, `kubeReserved`); `None`: nothing is
/// stated, and no value is written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reserved {
    /// CPU in thousandths of a core.
    pub cpu_milli: Option<i64>,
    /// Memory.
    pub memory_bytes: Option<i64>,
    /// Processes and threads.
    pub pids: Option<i64>,
    /// Disk space.
    pub ephemeral_bytes: Option<i64>,
}

impl Reserved {
    /// From the configuration, which was validated: invalid quantities count as none.
    #[must_use]
    pub fn parse(map: &BTreeMap<String, String>) -> Reserved {
        let amount = |resource: &str| Amount::parse(map.get(resource)?).ok();
        Reserved {
            cpu_milli: amount("cpu").map(Amount::nearest_milli),
            memory_bytes: amount("memory").map(Amount::units),
            pids: amount("pid").map(Amount::units),
            ephemeral_bytes: amount("ephemeral-storage").map(Amount::units),
        }
    }
}

/// Both reservations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reservations {
    /// `systemReserved`.
    pub system: Reserved,
    /// `kubeReserved`.
    pub kube: Reserved,
}

impl Reservations {
    /// From the configuration. `reserved_cpus`: the number of `reservedSystemCPUs`, which replaces
    /// the CPU of both (Go: cmd/kubelet/app/server.go).
    #[must_use]
    pub fn new(
        system: &BTreeMap<String, String>,
        kube: &BTreeMap<String, String>,
        reserved_cpus: Option<u32>,
    ) -> Reservations {
        let mut all = Reservations { system: Reserved::parse(system), kube: Reserved::parse(kube) };
        if let Some(count) = reserved_cpus.filter(|count| *count > 0) {
            all.system.cpu_milli = Some(i64::from(count).saturating_mul(1000));
            all.kube.cpu_milli = None;
        }
        all
    }

    fn sum(&self, amount: impl Fn(&Reserved) -> Option<i64>) -> i64 {
        [&self.system, &self.kube]
            .into_iter()
            .filter_map(amount)
            .fold(0, |sum: i64, more| sum.saturating_add(more.max(0)))
    }
}

/// The values of the cgroup of all pods (Go: `getCgroupConfig`). `enforced`:
/// `enforceNodeAllocatable` has `pods`; else the values are the machine's. Thresholds of eviction
/// are not subtracted. `all_cpus`: the machine's CPUs if the CPU manager's policy is `none`: systemd
/// removes the controller from cgroups without such a value.
#[must_use]
pub fn pods_values(
    capacity: &Capacity,
    reserved: &Reservations,
    enforced: bool,
    all_cpus: Option<&str>,
) -> Values {
    let left = |all: i64, amount: fn(&Reserved) -> Option<i64>| {
        if enforced { all.saturating_sub(reserved.sum(amount)).max(0) } else { all }
    };
    Values {
        cpu_shares: Some(shares(left(capacity.cpu_milli, |reservation| reservation.cpu_milli))),
        memory_bytes: Some(left(capacity.memory_bytes, |reservation| reservation.memory_bytes)),
        pids: capacity.pids.map(|pids| left(pids, |reservation| reservation.pids)),
        huge_pages: HugePages::Limits(capacity.huge_pages.clone()),
        cpus: all_cpus.map(str::to_owned),
        ..Values::default()
    }
}

/// The memory of the machine that is not reserved, whether that is enforced or not. Unlike in the Node
/// object, thresholds of eviction and huge pages are not subtracted (Go:
/// `GetNodeAllocatableAbsolute`).
#[must_use]
pub fn unreserved_memory(memory_bytes: i64, reserved: &Reservations) -> i64 {
    memory_bytes.saturating_sub(reserved.sum(|reservation| reservation.memory_bytes)).max(0)
}

/// Which of a reservation's resources are enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnforcedResources {
    /// `system-reserved`, `kube-reserved`.
    All,
    /// `system-reserved-compressible`, `kube-reserved-compressible`: CPU only.
    Compressible,
}

/// The values of a cgroup of daemons (Go: `enforceExistingCgroup`). `memory_qos`: the gate
/// `MemoryQoS` is on, and the machine has version 2.
///
/// DIFFERS: the Go kubelet also limits huge pages to 0 if only compressible resources are enforced.
#[must_use]
pub fn reserved_values(
    reserved: &Reserved,
    enforced: EnforcedResources,
    memory_qos: bool,
    all_cpus: Option<&str>,
) -> Values {
    let cpu = Values {
        cpu_shares: reserved.cpu_milli.map(shares),
        cpus: all_cpus.map(str::to_owned),
        ..Values::default()
    };
    match enforced {
        EnforcedResources::Compressible => cpu,
        EnforcedResources::All => Values {
            memory_bytes: reserved.memory_bytes,
            pids: reserved.pids,
            huge_pages: HugePages::Limits(BTreeMap::new()),
            memory_min: reserved.memory_bytes.filter(|_| memory_qos),
            ..cpu
        },
    }
}

/// A cgroup of daemons to limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonCgroup {
    /// The text in messages: `System Reserved`, `Kube Reserved Compressible`.
    what: &'static str,
    /// The text in the message of success: `system`, `kube`.
    kind: &'static str,
    /// The configured name, with the driver's form.
    pub cgroup: String,
    /// Its values.
    pub values: Values,
}

impl DaemonCgroup {
    /// The message of the event `NodeAllocatableEnforced`.
    #[must_use]
    pub fn enforced(&self) -> String {
        format!("Updated limits on {} reserved cgroup {}", self.kind, self.cgroup)
    }

    /// The message of the event `FailedNodeAllocatableEnforcement`, and of the end of the agent.
    #[must_use]
    pub fn failure_message(&self, error: &dyn std::fmt::Display) -> String {
        format!("Failed to enforce {} Cgroup Limits on {:?}: {error}", self.what, self.cgroup)
    }
}

/// The cgroups of daemons to limit, in upstream's order, for the words of
/// `enforceNodeAllocatable`. The first one that fails ends the agent (Go:
/// `enforceNodeAllocatableCgroups`).
#[must_use]
pub fn limited_daemons(
    words: &[String],
    reserved: &Reservations,
    system_cgroup: &str,
    kube_cgroup: &str,
    memory_qos: bool,
    all_cpus: Option<&str>,
) -> Vec<DaemonCgroup> {
    let (system, kube) = ((&reserved.system, "system", system_cgroup), (&reserved.kube, "kube", kube_cgroup));
    let all = [
        ("system-reserved", "System Reserved", EnforcedResources::All, system),
        ("kube-reserved", "Kube Reserved", EnforcedResources::All, kube),
        (
            "system-reserved-compressible",
            "System Reserved Compressible",
            EnforcedResources::Compressible,
            system,
        ),
        ("kube-reserved-compressible", "Kube Reserved Compressible", EnforcedResources::Compressible, kube),
    ];
    all.into_iter()
        .filter(|(word, ..)| words.iter().any(|other| other == word))
        .map(|(_, what, enforced, (reserved, kind, cgroup))| DaemonCgroup {
            what,
            kind,
            cgroup: cgroup.to_owned(),
            values: reserved_values(reserved, enforced, memory_qos, all_cpus),
        })
        .collect()
}

/// Checks that no more is reserved than the machine has (Go: `validateNodeAllocatable`).
///
/// # Errors
/// [`CgroupError::Reservations`], which ends the agent.
///
/// DIFFERS: the Go kubelet prints the fields of its type for numbers.
pub fn check_reservations(
    capacity: &Capacity,
    reserved: &Reservations,
    thresholds: HardThresholds,
) -> Result<(), CgroupError> {
    let milli: fn(i64) -> String = |value| format!("{value}m");
    let bytes: fn(i64) -> String = |value| value.to_string();
    let rows = [
        ("cpu", Some(capacity.cpu_milli), reserved.sum(|reservation| reservation.cpu_milli), 0, milli),
        (
            "memory",
            Some(capacity.memory_bytes),
            reserved.sum(|reservation| reservation.memory_bytes),
            thresholds.memory_bytes,
            bytes,
        ),
        (
            "ephemeral-storage",
            capacity.ephemeral_bytes,
            reserved.sum(|reservation| reservation.ephemeral_bytes),
            thresholds.disk_bytes,
            bytes,
        ),
    ];
    let mut problems = Vec::new();
    for (name, has, wanted, threshold, print) in rows {
        let wanted = wanted.saturating_add(threshold);
        if let Some(has) = has.filter(|has| *has < wanted) {
            problems.push(format!(
                "Resource {name:?} has a reservation of {} but capacity of {}. Expected capacity >= reservation.",
                print(wanted),
                print(has)
            ));
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(CgroupError::Reservations(problems)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn capacity() -> Capacity {
        Capacity {
            cpu_milli: 2000,
            memory_bytes: 8 << 30,
            pids: Some(32_768),
            huge_pages: [(2 << 20, 64 << 20)].into(),
            ephemeral_bytes: Some(100 << 30),
        }
    }

    #[test]
    fn pods_have_what_is_not_reserved() {
        let system = map(&[("cpu", "100m"), ("memory", "200Mi"), ("pid", "1000")]);
        let kube = map(&[("cpu", "250m"), ("memory", "300Mi"), ("pid", "500")]);
        let check = |reserved: &Reservations, enforced, shares, memory, pids| {
            let values = pods_values(&capacity(), reserved, enforced, Some("0-1"));
            let found = (values.cpu_shares, values.memory_bytes, values.pids);
            assert_eq!(found, (Some(shares), Some(memory), Some(pids)));
            assert_eq!(values.huge_pages, HugePages::Limits([(2 << 20, 64 << 20)].into()));
            assert_eq!(values.cpus.as_deref(), Some("0-1"));
        };
        let both = Reservations::new(&system, &kube, None);
        check(&both, true, 1689, (8 << 30) - (500 << 20), 31_268);
        check(&both, false, 2048, 8 << 30, 32_768);
        let all = map(&[("cpu", "9223372036854775807"), ("memory", "100Ti"), ("pid", "40000")]);
        check(&Reservations::new(&all, &all, None), true, 2, 0, 0);
        // Reserved CPUs replace both shares.
        check(&Reservations::new(&system, &kube, Some(1)), true, 1024, (8 << 30) - (500 << 20), 31_268);
        let unknown = pods_values(&Capacity { pids: None, ..capacity() }, &both, true, None);
        assert_eq!((unknown.pids, unknown.cpus), (None, None));
    }

    #[test]
    fn reserved_cpu_is_rounded_to_the_nearest_thousandth() {
        let milli = |text| Reserved::parse(&map(&[("cpu", text)])).cpu_milli;
        assert_eq!((milli("100400u"), milli("100500u"), milli("0.0001")), (Some(100), Some(101), Some(0)));
    }

    #[test]
    fn only_reservations_are_missing_in_the_unreserved_memory() {
        let both = Reservations::new(&map(&[("memory", "200Mi")]), &map(&[("memory", "300Mi")]), None);
        assert_eq!(unreserved_memory(8 << 30, &both), (8 << 30) - (500 << 20));
        assert_eq!(unreserved_memory(8 << 30, &Reservations::default()), 8 << 30);
        assert_eq!(unreserved_memory(100 << 20, &both), 0);
    }

    #[test]
    fn pids_of_the_kernel() {
        assert_eq!(max_pids(Some("4194304\n"), Some("127000\n")), Some(127_000));
        assert_eq!(max_pids(Some("32768\n"), None), Some(32_768));
        assert_eq!(max_pids(Some("x"), None), None);
    }

    #[test]
    fn daemons_are_limited_in_upstreams_order() {
        let reserved = Reservations::new(
            &map(&[("cpu", "100m"), ("memory", "200Mi"), ("pid", "1000")]),
            &map(&[("memory", "300Mi")]),
            None,
        );
        let daemons = |words: &[&str], qos| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            limited_daemons(&words, &reserved, "/sys", "/kube", qos, None)
        };
        let both =
            daemons(&["pods", "kube-reserved", "system-reserved-compressible", "system-reserved"], true);
        let names: Vec<&str> = both.iter().map(|daemon| daemon.what).collect();
        assert_eq!(names, ["System Reserved", "Kube Reserved", "System Reserved Compressible"]);
        let expected = Values {
            cpu_shares: Some(102),
            memory_bytes: Some(200 << 20),
            pids: Some(1000),
            huge_pages: HugePages::Limits(BTreeMap::new()),
            memory_min: Some(200 << 20),
            ..Values::default()
        };
        assert_eq!(both[0].values, expected);
        assert_eq!((both[1].values.cpu_shares, both[1].values.memory_bytes), (None, Some(300 << 20)));
        assert_eq!(both[2].values, Values { cpu_shares: Some(102), ..Values::default() });
        assert_eq!(daemons(&["system-reserved"], false)[0].values.memory_min, None);
        assert!(daemons(&["pods", "none"], true).is_empty());
        assert_eq!(both[1].enforced(), "Updated limits on kube reserved cgroup /kube");
        let text = "Failed to enforce System Reserved Cgroup Limits on \"/sys\": no";
        assert_eq!(both[0].failure_message(&"no"), text);
    }

    #[test]
    fn reservations_beyond_the_machine_are_refused() {
        let check = |system: &[(&str, &str)], (memory_bytes, disk_bytes), expected: Result<(), &str>| {
            let thresholds = HardThresholds { memory_bytes, disk_bytes };
            let reserved = Reservations::new(&map(system), &BTreeMap::new(), None);
            let found = check_reservations(&capacity(), &reserved, thresholds);
            assert_eq!(found.map_err(|error| error.to_string()), expected.map_err(str::to_owned));
        };
        check(&[("cpu", "2"), ("memory", "8Gi")], (0, 0), Ok(()));
        check(
            &[("cpu", "64")],
            (0, 0),
            Err("invalid Node Allocatable configuration. Resource \"cpu\" has a reservation of 64000m but \
                 capacity of 2000m. Expected capacity >= reservation."),
        );
        check(
            &[("memory", "8Gi"), ("ephemeral-storage", "100Gi")],
            (1, i64::MAX),
            Err(
                "invalid Node Allocatable configuration. Resource \"memory\" has a reservation of 8589934593 \
                 but capacity of 8589934592. Expected capacity >= reservation. Resource \
                 \"ephemeral-storage\" has a reservation of 9223372036854775807 but capacity of \
                 107374182400. Expected capacity >= reservation.",
            ),
        );
    }
}
