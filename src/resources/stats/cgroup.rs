//! Reading one cgroup, in either version. The parsers take text and are pure.

use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::sample::{Details, DiskTraffic, Numbers, Pressure, Share};
use crate::resources::cgroups::Cgroups;

/// A limit above this is none: the kernel rounds "no limit" in several ways.
const UNLIMITED: u64 = 1 << 62;

/// Nanoseconds in a tick of `cpuacct.stat`; the same on every architecture we build for.
const TICK_NANOSECONDS: u64 = 10_000_000;

/// The cgroup file systems.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    root: PathBuf,
    v2: bool,
}

impl Tree {
    pub(super) fn new(cgroups: &Cgroups) -> Self {
        Tree { root: cgroups.root.clone(), v2: cgroups.version.is_v2() }
    }

    /// The directory in which containers are looked for.
    pub(super) fn top(&self) -> PathBuf {
        if self.v2 { self.root.clone() } else { self.root.join("memory") }
    }

    fn dir(&self, controller: &str, path: &str) -> PathBuf {
        let top = if self.v2 { self.root.clone() } else { self.root.join(controller) };
        top.join(path.trim_start_matches('/'))
    }

    fn read(&self, controller: &str, path: &str, file: &str) -> Option<String> {
        std::fs::read_to_string(self.dir(controller, path).join(file)).ok()
    }

    fn number(&self, controller: &str, path: &str, file: &str) -> Option<u64> {
        self.read(controller, path, file)?.trim().parse().ok()
    }

    /// Processor time alone: the first of two samples.
    pub(super) fn cpu(&self, path: &str) -> Option<u64> {
        if self.v2 {
            micro(field(&self.read("", path, "cpu.stat")?, "usage_usec"))
        } else {
            self.number("cpuacct", path, "cpuacct.usage")
        }
    }

    /// A process of the cgroup.
    pub(super) fn first_process(&self, path: &str) -> Option<u32> {
        self.read("memory", path, "cgroup.procs")?.lines().find_map(|line| line.trim().parse().ok())
    }

    /// All that is said of a cgroup; `None` when there is no such cgroup.
    pub(super) fn numbers(&self, path: &str, whole: bool) -> Option<Numbers> {
        let mut numbers = if self.v2 { self.second(path)? } else { self.first(path)? };
        numbers.processes = self.read("memory", path, "cgroup.procs").map(|text| text.lines().count() as u64);
        if whole {
            let mut details = if self.v2 { self.second_details(path) } else { self.first_details(path) };
            details.path = format!("/{}", path.trim_matches('/'));
            numbers.details = Some(Box::new(details));
        }
        Some(numbers)
    }

    fn first(&self, path: &str) -> Option<Numbers> {
        let stat = self.read("memory", path, "memory.stat")?;
        let usage = self.number("memory", path, "memory.usage_in_bytes");
        let mut numbers = Numbers {
            at: Timestamp::now(),
            cpu: self.number("cpuacct", path, "cpuacct.usage"),
            swap: field(&stat, "total_swap"),
            ..memory(usage, &stat, ["total_inactive_file", "total_rss"])
        };
        let limit = self.number("memory", path, "memory.limit_in_bytes");
        numbers.available = available(limit, numbers.working_set);
        let limit = self.number("memory", path, "memory.memsw.limit_in_bytes");
        numbers.swap_available = available(limit, numbers.swap);
        Some(numbers)
    }

    fn second(&self, path: &str) -> Option<Numbers> {
        let stat = self.read("", path, "memory.stat")?;
        // The root has no file of its own for this.
        let usage = self
            .number("", path, "memory.current")
            .or_else(|| Some(field(&stat, "anon")?.saturating_add(field(&stat, "file")?)));
        let mut numbers = Numbers {
            at: Timestamp::now(),
            cpu: self.cpu(path),
            swap: self.number("", path, "memory.swap.current"),
            cpu_pressure: self.read("", path, "cpu.pressure").as_deref().and_then(pressure),
            memory_pressure: self.read("", path, "memory.pressure").as_deref().and_then(pressure),
            io_pressure: self.read("", path, "io.pressure").as_deref().and_then(pressure),
            ..memory(usage, &stat, ["inactive_file", "anon"])
        };
        numbers.available = available(self.number("", path, "memory.max"), numbers.working_set);
        numbers.swap_available = available(self.number("", path, "memory.swap.max"), numbers.swap);
        Some(numbers)
    }

    fn first_details(&self, path: &str) -> Details {
        let text = |controller, file| self.read(controller, path, file).unwrap_or_default();
        let (stat, cpu, times) =
            (text("memory", "memory.stat"), text("cpu", "cpu.stat"), text("cpuacct", "cpuacct.stat"));
        let ticks = |name| field(&times, name).map(|ticks| ticks.saturating_mul(TICK_NANOSECONDS));
        let mut disks = Vec::new();
        for (file, counted) in [
            ("blkio.throttle.io_service_bytes", Counted::Bytes),
            ("blkio.throttle.io_serviced", Counted::Times),
        ] {
            let recursive = self.read("blkio", path, &format!("{file}_recursive"));
            let text = recursive.or_else(|| self.read("blkio", path, file)).unwrap_or_default();
            first_disks(&mut disks, &text, counted);
        }
        Details {
            user: ticks("user"),
            system: ticks("system"),
            periods: field(&cpu, "nr_periods"),
            throttled: field(&cpu, "nr_throttled"),
            throttled_time: field(&cpu, "throttled_time"),
            // Minus one: no limit.
            quota: self.number("cpu", path, "cpu.cfs_quota_us"),
            period: self.number("cpu", path, "cpu.cfs_period_us"),
            shares: self.number("cpu", path, "cpu.shares"),
            cache: field(&stat, "total_cache"),
            mapped: field(&stat, "total_mapped_file"),
            peak: self.number("memory", path, "memory.max_usage_in_bytes"),
            failures: self.number("memory", path, "memory.failcnt"),
            memory_limit: limit(self.number("memory", path, "memory.limit_in_bytes")),
            swap_limit: limit(self.number("memory", path, "memory.memsw.limit_in_bytes")),
            oom_kills: field(&text("memory", "memory.oom_control"), "oom_kill"),
            threads: self.number("pids", path, "pids.current"),
            disks,
            path: String::new(),
        }
    }

    fn second_details(&self, path: &str) -> Details {
        let text = |file| self.read("", path, file).unwrap_or_default();
        let (stat, cpu, events) = (text("memory.stat"), text("cpu.stat"), text("memory.events"));
        let max = text("cpu.max");
        let mut max = max.split_whitespace().map(|word| word.parse().ok());
        // "max": no limit.
        let (quota, period) = (max.next().flatten(), max.next().flatten());
        let or_none = |file| text(file).trim().parse().or(Ok::<u64, ()>(u64::MAX)).ok();
        Details {
            user: micro(field(&cpu, "user_usec")),
            system: micro(field(&cpu, "system_usec")),
            periods: field(&cpu, "nr_periods"),
            throttled: field(&cpu, "nr_throttled"),
            throttled_time: micro(field(&cpu, "throttled_usec")),
            quota,
            period,
            shares: self.number("", path, "cpu.weight").map(shares),
            cache: field(&stat, "file"),
            mapped: field(&stat, "file_mapped"),
            peak: self.number("", path, "memory.peak"),
            failures: field(&events, "max"),
            memory_limit: limit(or_none("memory.max")),
            swap_limit: limit(or_none("memory.swap.max")),
            oom_kills: field(&events, "oom_kill"),
            threads: self.number("", path, "pids.current"),
            disks: second_disks(&text("io.stat")),
            path: String::new(),
        }
    }
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

/// What a limit leaves; nothing is said where there is no limit.
pub(super) fn available(limit: Option<u64>, used: Option<u64>) -> Option<u64> {
    Some(limit.filter(|limit| *limit <= UNLIMITED)?.saturating_sub(used?))
}

/// As it is exported: 0 for none.
fn limit(limit: Option<u64>) -> Option<u64> {
    limit.map(|limit| if limit > UNLIMITED { 0 } else { limit })
}

fn micro(micro: Option<u64>) -> Option<u64> {
    micro.map(|micro| micro.saturating_mul(1000))
}

/// The value of a line `name value`.
pub(super) fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?.trim().parse().ok()
}

/// Both lines of a pressure file. `full` is missing for processors on some kernels.
pub(super) fn pressure(text: &str) -> Option<Pressure> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let full = text.lines().find_map(|line| line.strip_prefix("full "));
    Some(Pressure { some: share(some), full: full.map(share).unwrap_or_default() })
}

fn share(line: &str) -> Share {
    let mut share = Share::default();
    for (name, value) in line.split_whitespace().filter_map(|word| word.split_once('=')) {
        let percent = || value.parse().unwrap_or(0.0);
        match name {
            "avg10" => share.avg10 = percent(),
            "avg60" => share.avg60 = percent(),
            "avg300" => share.avg300 = percent(),
            "total" => share.total = value.parse().unwrap_or(0),
            _ => {}
        }
    }
    share
}

/// Weights of 1 to 10000 stand for shares of 2 to 262144.
fn shares(weight: u64) -> u64 {
    2 + weight.saturating_sub(1).saturating_mul(262_142) / 9_999
}

#[derive(Clone, Copy)]
enum Counted {
    Bytes,
    Times,
}

/// Lines such as `8:0 Read 4096`.
fn first_disks(disks: &mut Vec<DiskTraffic>, text: &str, counted: Counted) {
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(device), Some(what), Some(Ok(value))) =
            (words.next(), words.next(), words.next().map(str::parse::<u64>))
        else {
            continue;
        };
        let disk = disk(disks, device);
        match (what, counted) {
            ("Read", Counted::Bytes) => disk.read_bytes = value,
            ("Write", Counted::Bytes) => disk.written_bytes = value,
            ("Read", Counted::Times) => disk.reads = value,
            ("Write", Counted::Times) => disk.writes = value,
            _ => {}
        }
    }
}

/// Lines such as `8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0`.
fn second_disks(text: &str) -> Vec<DiskTraffic> {
    let mut disks = Vec::new();
    for line in text.lines() {
        let Some((device, rest)) = line.split_once(' ') else { continue };
        let disk = disk(&mut disks, device);
        for (name, value) in rest.split_whitespace().filter_map(|word| word.split_once('=')) {
            let value = value.parse().unwrap_or(0);
            match name {
                "rbytes" => disk.read_bytes = value,
                "wbytes" => disk.written_bytes = value,
                "rios" => disk.reads = value,
                "wios" => disk.writes = value,
                _ => {}
            }
        }
    }
    disks
}

fn disk<'a>(disks: &'a mut Vec<DiskTraffic>, device: &str) -> &'a mut DiskTraffic {
    let at = disks.iter().position(|disk| disk.device == device).unwrap_or_else(|| {
        disks.push(DiskTraffic { device: device.to_owned(), ..DiskTraffic::default() });
        disks.len() - 1
    });
    // There is an entry at that place.
    &mut disks[at]
}

/// Where this process is, in the tree that containers are looked for in.
pub(super) fn own(proc: &Path, v2: bool) -> Option<String> {
    own_path(&std::fs::read_to_string(proc.join("self/cgroup")).ok()?, v2)
}

/// Lines such as `4:memory:/system.slice/x` and `0::/system.slice/x`.
fn own_path(text: &str, v2: bool) -> Option<String> {
    let path = text.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let fits = if v2 {
            controllers.is_empty()
        } else {
            controllers.split(',').any(|controller| controller == "memory")
        };
        fits.then_some(path)
    })?;
    // The whole machine is nobody's own part.
    (path != "/").then(|| path.to_owned())
}

#[cfg(test)]
#[path = "cgroup_tests.rs"]
mod tests;
