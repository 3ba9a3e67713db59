//! Reads one cgroup of version 1 or 2. The parsers take text and are pure.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::disks;
use super::processes::Processes;
use super::request::Depth;
use super::sample::{Details, DiskTraffic, Numbers, PsiData, PsiStats};
use crate::model::cpu_shares::shares_of_weight;
use crate::resources::cgroups::CgroupHierarchies;
use crate::resources::machine::memory_field;

/// A larger value means no limit: the kernel rounds the maximum in several ways.
const UNLIMITED: u64 = 1 << 62;

/// Nanoseconds in a tick of `cpuacct.stat`; the same on every supported architecture.
const TICK_NANOSECONDS: u64 = 10_000_000;

/// All numbers of the cgroup at a path from the roots of the hierarchies, with its details; `None` if
/// there is none.
pub fn numbers(cgroups: &CgroupHierarchies, path: &str) -> Option<Numbers> {
    Tree::new(cgroups).numbers(path, Depth::Full, true)
}

#[derive(Debug, Clone)]
pub(super) struct Tree {
    cgroups: CgroupHierarchies,
    v2: bool,
}

impl Tree {
    pub(super) fn new(cgroups: &CgroupHierarchies) -> Self {
        Tree { cgroups: cgroups.clone(), v2: cgroups.version.is_v2() }
    }

    /// The directory in which cgroups of containers are searched.
    pub(super) fn top(&self) -> PathBuf {
        self.cgroups.dir("memory")
    }

    fn dir(&self, controller: &str, path: &str) -> PathBuf {
        self.cgroups.dir(controller).join(path.trim_start_matches('/'))
    }

    fn read(&self, controller: &str, path: &str, file: &str) -> Option<String> {
        std::fs::read_to_string(self.dir(controller, path).join(file)).ok()
    }

    fn number(&self, controller: &str, path: &str, file: &str) -> Option<u64> {
        count(&self.read(controller, path, file)?)
    }

    /// The CPU time in nanoseconds, without other numbers: the first sample of a rate.
    pub(super) fn cpu(&self, path: &str) -> Option<u64> {
        if self.v2 {
            micro(field(&self.read("", path, "cpu.stat")?, "usage_usec"))
        } else {
            self.number("cpuacct", path, "cpuacct.usage")
        }
    }

    /// The processes of the cgroup; `None` when there is no such cgroup.
    pub(super) fn processes(&self, path: &str) -> Option<Processes> {
        // As the Go kubelet. In version 1 the root cgroups of two controllers can have different
        // processes.
        let processes_of = |controller| Processes::read(&self.dir(controller, path).join("cgroup.procs"));
        processes_of("cpu").or_else(|| processes_of("memory"))
    }

    /// When the cgroup was made: the earlier modification time of its directory and of a file that
    /// rarely changes later (cadvisor: container/common/helpers.go).
    pub(super) fn made(&self, path: &str) -> Option<Timestamp> {
        let dir = self.dir("memory", path);
        let file = dir.join(if self.v2 { "cgroup.events" } else { "cgroup.clone_children" });
        let changed = |path: &Path| Timestamp::from_second(std::fs::metadata(path).ok()?.mtime()).ok();
        [changed(&dir), changed(&file)].into_iter().flatten().min()
    }

    /// All numbers of a cgroup, without its processes; `None` when there is no such cgroup.
    pub(super) fn numbers(&self, path: &str, depth: Depth, whole: bool) -> Option<Numbers> {
        let mut numbers =
            if self.v2 { self.numbers_v2(path, depth, whole)? } else { self.numbers_v1(path, whole)? };
        if let Some(details) = &mut numbers.details {
            details.path = format!("/{}", path.trim_matches('/'));
        }
        Some(numbers)
    }

    fn numbers_v1(&self, path: &str, whole: bool) -> Option<Numbers> {
        let stat = self.read("memory", path, "memory.stat")?;
        let usage = self.number("memory", path, "memory.usage_in_bytes");
        let memory_limit = self.number("memory", path, "memory.limit_in_bytes");
        let swap_limit = self.number("memory", path, "memory.memsw.limit_in_bytes");
        let mut numbers = Numbers {
            time: Timestamp::now(),
            cpu: self.number("cpuacct", path, "cpuacct.usage"),
            // The kernel omits the line if it does not account for swap.
            swap: field(&stat, "total_swap"),
            ..memory(usage, &stat, ["total_inactive_file", "total_rss"])
        };
        numbers.details = whole.then(|| Box::new(self.details_v1(path, &stat)));
        Some(limited(numbers, memory_limit, swap_limit))
    }

    fn numbers_v2(&self, path: &str, depth: Depth, whole: bool) -> Option<Numbers> {
        let stat = self.read("", path, "memory.stat")?;
        let cpu = self.read("", path, "cpu.stat").unwrap_or_default();
        // The root cgroup has no file `memory.current`.
        let usage = self
            .number("", path, "memory.current")
            .or_else(|| Some(field(&stat, "anon")?.saturating_add(field(&stat, "file")?)));
        let pressure = |file| self.read("", path, file).as_deref().and_then(pressure);
        let (memory_limit, swap_limit) =
            (self.maximum(path, "memory.max"), self.maximum(path, "memory.swap.max"));
        let mut numbers = Numbers {
            time: Timestamp::now(),
            cpu: micro(field(&cpu, "usage_usec")),
            swap: self.number("", path, "memory.swap.current"),
            cpu_pressure: pressure("cpu.pressure"),
            memory_pressure: pressure("memory.pressure"),
            io_pressure: if depth == Depth::Full { pressure("io.pressure") } else { None },
            ..memory(usage, &stat, ["inactive_file", "anon"])
        };
        numbers.details = whole.then(|| Box::new(self.details_v2(path, &stat, &cpu)));
        Some(limited(numbers, memory_limit, swap_limit))
    }

    /// A limit of version 2; `u64::MAX` for `max`, `None` without the file.
    fn maximum(&self, path: &str, file: &str) -> Option<u64> {
        let text = self.read("", path, file)?;
        let text = text.trim();
        if text == "max" { Some(u64::MAX) } else { text.parse().ok() }
    }

    fn details_v1(&self, path: &str, stat: &str) -> Details {
        let text = |controller, file| self.read(controller, path, file).unwrap_or_default();
        let (cpu, times) = (text("cpu", "cpu.stat"), text("cpuacct", "cpuacct.stat"));
        let ticks = |name| field(&times, name).map(|ticks| ticks.saturating_mul(TICK_NANOSECONDS));
        Details {
            user: ticks("user"),
            system: ticks("system"),
            periods: field(&cpu, "nr_periods"),
            throttled: field(&cpu, "nr_throttled"),
            throttled_time: field(&cpu, "throttled_time"),
            bursts: field(&cpu, "nr_bursts"),
            burst_time: field(&cpu, "burst_time"),
            // Minus one: no limit.
            quota: text("cpu", "cpu.cfs_quota_us").trim().parse().ok(),
            period: self.number("cpu", path, "cpu.cfs_period_us"),
            shares: self.number("cpu", path, "cpu.shares"),
            cache: field(stat, "total_cache"),
            mapped: field(stat, "total_mapped_file"),
            active_file: field(stat, "total_active_file"),
            inactive_file: field(stat, "total_inactive_file"),
            // Of this cgroup alone, as upstream shows them.
            file_refaults: field(stat, "workingset_refault_file"),
            anon_refaults: field(stat, "workingset_refault_anon"),
            kernel: self.number("memory", path, "memory.kmem.usage_in_bytes"),
            peak: self.number("memory", path, "memory.max_usage_in_bytes"),
            failures: self.number("memory", path, "memory.failcnt"),
            reservation: limit(self.number("memory", path, "memory.soft_limit_in_bytes")),
            oom_kills: field(&text("memory", "memory.oom_control"), "oom_kill"),
            threads: self.number("pids", path, "pids.current"),
            threads_max: most(&text("pids", "pids.max")),
            disks: self.disks_v1(path),
            ..Details::default()
        }
    }

    fn disks_v1(&self, path: &str) -> Vec<DiskTraffic> {
        for files in disks::FILES {
            let mut found = Vec::new();
            for (index, (file, counted)) in files.iter().enumerate() {
                let text = self.read("blkio", path, file).unwrap_or_default();
                disks::read_v1(&mut found, &text, *counted);
                if index == 0 && found.is_empty() {
                    break;
                }
            }
            if !found.is_empty() {
                return found;
            }
        }
        Vec::new()
    }

    fn details_v2(&self, path: &str, stat: &str, cpu: &str) -> Details {
        let text = |file| self.read("", path, file).unwrap_or_default();
        let events = text("memory.events");
        let max = text("cpu.max");
        let mut max = max.split_whitespace().map(|word| word.parse().ok());
        // "max": no limit.
        let (quota, period) = (max.next().flatten(), max.next().flatten());
        Details {
            user: micro(field(cpu, "user_usec")),
            system: micro(field(cpu, "system_usec")),
            periods: field(cpu, "nr_periods"),
            throttled: field(cpu, "nr_throttled"),
            throttled_time: micro(field(cpu, "throttled_usec")),
            bursts: field(cpu, "nr_bursts"),
            burst_time: micro(field(cpu, "burst_usec")),
            quota,
            period,
            shares: self.number("", path, "cpu.weight").map(shares_of_weight),
            cache: field(stat, "file"),
            mapped: field(stat, "file_mapped"),
            active_file: field(stat, "active_file"),
            inactive_file: field(stat, "inactive_file"),
            dirty: field(stat, "file_dirty"),
            writeback: field(stat, "file_writeback"),
            scanned: field(stat, "pgscan"),
            reclaimed: field(stat, "pgsteal"),
            file_refaults: field(stat, "workingset_refault_file"),
            anon_refaults: field(stat, "workingset_refault_anon"),
            kernel: field(stat, "kernel"),
            peak: self.number("", path, "memory.peak"),
            failures: field(&events, "max"),
            high_events: field(&events, "high"),
            max_events: field(&events, "max"),
            reservation: limit(self.maximum(path, "memory.min")),
            oom_kills: field(&events, "oom_kill"),
            threads: self.number("", path, "pids.current"),
            threads_max: most(&text("pids.max")),
            disks: disks::read_v2(&text("io.stat")),
            ..Details::default()
        }
    }
}

/// A limit of threads. No limit is 0, as in the metrics.
fn most(text: &str) -> Option<u64> {
    let text = text.trim();
    if text == "max" { Some(0) } else { text.parse().ok() }
}

fn memory(usage: Option<u64>, stat: &str, [inactive, rss]: [&str; 2]) -> Numbers {
    let inactive = field(stat, inactive).unwrap_or(0);
    Numbers {
        usage,
        working_set: usage.map(|usage| usage.saturating_sub(inactive)),
        rss: field(stat, rss),
        faults: field(stat, "pgfault"),
        major_faults: field(stat, "pgmajfault"),
        ..Numbers::default()
    }
}

/// The unused part of a limit; `None` without a limit.
pub(super) fn available(limit: Option<u64>, used: Option<u64>) -> Option<u64> {
    Some(limit.filter(|limit| *limit <= UNLIMITED)?.saturating_sub(used?))
}

/// The memory of the machine that is left, from the text of `meminfo`. `excludes_huge_pages`: without
/// the memory that is reserved for huge pages, which only pods that request huge pages can use (Go:
/// pkg/kubelet/server/stats `adjustForHugePages`).
pub(super) fn machine_available(meminfo: &str, used: Option<u64>, excludes_huge_pages: bool) -> Option<u64> {
    let huge = if excludes_huge_pages { memory_field(meminfo, "Hugetlb").unwrap_or(0) } else { 0 };
    Some(available(memory_field(meminfo, "MemTotal"), used)?.saturating_sub(huge))
}

/// Adds the cgroup's limits and the unused part of them.
fn limited(mut numbers: Numbers, memory: Option<u64>, swap: Option<u64>) -> Numbers {
    numbers.available = available(memory, numbers.working_set);
    numbers.swap_available = available(swap, numbers.swap);
    if let Some(details) = &mut numbers.details {
        (details.memory_limit, details.swap_limit) = (limit(memory), limit(swap));
    }
    numbers
}

/// A limit as in the metrics: 0 for no limit.
fn limit(limit: Option<u64>) -> Option<u64> {
    limit.map(|limit| if limit > UNLIMITED { 0 } else { limit })
}

fn micro(micro: Option<u64>) -> Option<u64> {
    micro.map(|micro| micro.saturating_mul(1000))
}

/// The value of a line `name value`.
pub(super) fn field(text: &str, name: &str) -> Option<u64> {
    count(text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?)
}

/// A number. For a moment the kernel's sums over all processors can be below zero; that is zero (Go:
/// opencontainers/cgroups, fscommon `ParseUint`).
fn count(text: &str) -> Option<u64> {
    let text = text.trim();
    match text.strip_prefix('-') {
        Some(digits) => (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(0),
        None => text.parse().ok(),
    }
}

/// Both lines of a pressure file. On some kernels `cpu.pressure` has no line `full`.
pub(super) fn pressure(text: &str) -> Option<PsiStats> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let full = text.lines().find_map(|line| line.strip_prefix("full "));
    Some(PsiStats { some: psi_data(some), full: full.map(psi_data).unwrap_or_default() })
}

fn psi_data(line: &str) -> PsiData {
    let mut data = PsiData::default();
    for (name, value) in line.split_whitespace().filter_map(|word| word.split_once('=')) {
        let percent = || value.parse().unwrap_or(0.0);
        match name {
            "avg10" => data.avg10 = percent(),
            "avg60" => data.avg60 = percent(),
            "avg300" => data.avg300 = percent(),
            "total" => data.total = value.parse().unwrap_or(0),
            _ => {}
        }
    }
    data
}

/// The cgroup of this process; `None` if it is the root cgroup, or if in version 1 it differs
/// between the controllers `memory` and `cpuacct` (Go: pkg/kubelet/cm, getContainer).
pub(super) fn own_cgroup(proc: &Path, v2: bool) -> Option<String> {
    own_path(&std::fs::read_to_string(proc.join("self/cgroup")).ok()?, v2)
}

/// Lines such as `4:cpu,cpuacct:/system.slice/x` and `0::/system.slice/x`.
fn own_path(text: &str, v2: bool) -> Option<String> {
    let lines = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let path_of = |controller: &str| {
        lines().find(|(all, _)| all.split(',').any(|name| name == controller)).map(|(_, path)| path)
    };
    let path =
        if v2 { path_of("")? } else { path_of("memory").filter(|path| path_of("cpuacct") == Some(path))? };
    // The numbers of the root cgroup include all processes.
    (path != "/").then(|| path.to_owned())
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
