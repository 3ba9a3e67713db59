//! Threads, descriptors, memory and mounts of a process, before and after a test. Every tier above
//! unit checks them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::wait::wait_until;

/// What a process uses at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessUsage {
    pub threads: usize,
    /// The threads of pods among them.
    pub pod_threads: usize,
    pub descriptors: usize,
    pub resident_kib: u64,
    /// The anonymous part: heap and stacks. The text of the program is not part of it, because more
    /// of that is in memory the more of it has run.
    pub anonymous_kib: u64,
}

/// More than this above the first measurement is a leak. Lazily opened descriptors and a pool's
/// second thread are not, nor threads of watches, plugins and of the gRPC library that a loaded machine starts
/// only after the first measurement. Of the threads of pods none may be left.
const SPARE_THREADS: usize = 10;
const SPARE_DESCRIPTORS: usize = 12;

impl ProcessUsage {
    /// Reads it from `/proc`; `None` when the process is gone.
    pub(crate) fn read(pid: u32) -> Option<ProcessUsage> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        Some(ProcessUsage {
            threads: usize::try_from(field("Threads:")?).ok()?,
            pod_threads: thread_names(pid).iter().filter(|name| name.starts_with("pod/")).count(),
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count(),
            resident_kib: field("VmRSS:")?,
            anonymous_kib: field("RssAnon:")?,
        })
    }

    /// The greater one of each number.
    pub(crate) fn or_more(self, other: ProcessUsage) -> ProcessUsage {
        ProcessUsage {
            threads: self.threads.max(other.threads),
            pod_threads: self.pod_threads.max(other.pod_threads),
            descriptors: self.descriptors.max(other.descriptors),
            resident_kib: self.resident_kib.max(other.resident_kib),
            anonymous_kib: self.anonymous_kib.max(other.anonymous_kib),
        }
    }
}

/// The names of the threads of a process, sorted.
fn thread_names(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    let mut names: Vec<String> = tasks.filter_map(name).map(|name| name.trim_end().to_owned()).collect();
    names.sort();
    names
}

/// Asserts that the process comes back to what it held at first, and stays below a ceiling.
pub(crate) fn assert_back_to(first: ProcessUsage, pid: u32, max_resident_kib: u64) {
    let mut last = first;
    let back = |last: &mut ProcessUsage| {
        let Some(now) = ProcessUsage::read(pid) else { return false };
        *last = now;
        now.threads <= first.threads + SPARE_THREADS
            && now.pod_threads <= first.pod_threads
            && now.descriptors <= first.descriptors + SPARE_DESCRIPTORS
            && now.resident_kib <= max_resident_kib
    };
    // What leaks does not go away, and what only ends late on a busy machine does.
    let limit = Duration::from_secs(150);
    let begun = std::time::Instant::now();
    while !back(&mut last) {
        assert!(
            begun.elapsed() < limit,
            "leak: used {first:?} at first, uses {last:?} at the end, and may have {max_resident_kib} KiB of \
             resident memory; its threads: {:?}",
            thread_names(pid)
        );
        super::wait::pause(Duration::from_millis(50));
    }
}

/// Asserts that the process comes back to the memory that it had after the same had been done
/// before: `spare_kib` is for what an allocator keeps for itself.
pub(crate) fn assert_memory_back_to(warm: ProcessUsage, pid: u32, spare_kib: u64) {
    let begun = std::time::Instant::now();
    let now = || ProcessUsage::read(pid).expect("the process runs");
    while now().anonymous_kib > warm.anonymous_kib + spare_kib {
        let waited = begun.elapsed();
        assert!(waited < Duration::from_secs(150), "memory grows: used {warm:?}, uses {:?}", now());
        super::wait::pause(Duration::from_millis(50));
    }
}

/// The processor time of a process so far, user and system, ended threads included.
pub(crate) fn cpu_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may hold anything; fields 14 and 15 of the line are counted
    // from behind it. The kernel counts in hundredths for every architecture we build for.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = rest.split_whitespace().skip(11).take(2).filter_map(|text| text.parse::<u64>().ok());
    Duration::from_millis(ticks.sum::<u64>() * 10)
}

/// The proportional share of a process's memory: what would be free without it.
pub(crate) fn proportional_kib(pid: u32) -> Option<u64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The mount points below a directory, as the kernel lists them.
pub(crate) fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo is readable");
    table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|path| PathBuf::from(path.replace("\\040", " ")))
        .filter(|path| path.starts_with(dir) && path != dir)
        .collect()
}

/// Ends all mounts below a directory, as the end of the machine does.
pub(crate) fn unmount_below(dir: &Path) {
    let mut mounts = mounts_below(dir);
    // Those inside others come later in the table.
    mounts.reverse();
    for mount in mounts {
        rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH)
            .unwrap_or_else(|error| panic!("cannot unmount {}: {error}", mount.display()));
    }
}

/// Waits until no mount is left below a directory.
pub(crate) fn assert_no_mounts_below(dir: &Path) {
    wait_until(&format!("no mounts below {}", dir.display()), Duration::from_secs(150), || {
        mounts_below(dir).is_empty()
    });
}
