//! The result of a collection, independent of the source of the numbers.

#![expect(missing_docs, reason = "the names say what the values are")]

use jiff::Timestamp;

use crate::model::ids::PodUid;

/// Pressure: the time in which tasks waited for one resource, in percent of the last 10 s, 60 s and
/// 300 s.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PsiData {
    pub avg10: f64,
    pub avg60: f64,
    pub avg300: f64,
    /// The total of this time, in microseconds.
    pub total: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PsiStats {
    /// Every task waited.
    pub full: PsiData,
    /// At least one waited.
    pub some: PsiData,
}

/// The numbers of a cgroup, or of a container from the runtime. Unknown ones are absent.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Numbers {
    pub time: Timestamp,
    /// Processor time since the start, in nanoseconds.
    pub cpu: Option<u64>,
    /// Processor time per second, in nanoseconds, between the last two samples.
    pub rate: Option<u64>,
    pub usage: Option<u64>,
    /// Memory that cannot be reclaimed easily.
    pub working_set: Option<u64>,
    /// Anonymous memory.
    pub rss: Option<u64>,
    /// Bytes that may still be used; absent without a limit.
    pub available: Option<u64>,
    pub faults: Option<u64>,
    /// Page faults that read from a disk.
    pub major_faults: Option<u64>,
    pub swap: Option<u64>,
    /// Swap that may still be used; absent without a limit.
    pub swap_available: Option<u64>,
    /// Processes, not threads.
    pub processes: Option<u64>,
    pub cpu_pressure: Option<PsiStats>,
    pub memory_pressure: Option<PsiStats>,
    pub io_pressure: Option<PsiStats>,
    /// Details of the cgroup, if they were requested.
    pub details: Option<Box<Details>>,
}

impl Numbers {
    /// Adds what another part of the same pod uses. The available memory is not the sum of the
    /// parts: if one part has no limit, the pod has none.
    pub(super) fn add(&mut self, other: &Numbers) {
        let sum = |mine: &mut Option<u64>, theirs: Option<u64>| {
            *mine = match (*mine, theirs) {
                (Some(mine), Some(theirs)) => Some(mine.saturating_add(theirs)),
                (mine, theirs) => mine.or(theirs),
            };
        };
        self.time = self.time.max(other.time);
        sum(&mut self.cpu, other.cpu);
        sum(&mut self.rate, other.rate);
        sum(&mut self.usage, other.usage);
        sum(&mut self.working_set, other.working_set);
        sum(&mut self.rss, other.rss);
        sum(&mut self.faults, other.faults);
        sum(&mut self.major_faults, other.major_faults);
        sum(&mut self.swap, other.swap);
        sum(&mut self.processes, other.processes);
    }
}

/// Numbers that only `/metrics/cadvisor` shows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Details {
    /// The cgroup's path below the root of its tree.
    pub path: String,
    /// Of the processor time, nanoseconds outside the kernel.
    pub user: Option<u64>,
    /// Of the processor time, nanoseconds in the kernel.
    pub system: Option<u64>,
    /// Periods of the quota.
    pub periods: Option<u64>,
    /// Periods in which the quota was used up.
    pub throttled: Option<u64>,
    /// Nanoseconds of waiting for the next period.
    pub throttled_time: Option<u64>,
    /// Periods in which more than the quota was used.
    pub bursts: Option<u64>,
    /// Nanoseconds beyond the quota.
    pub burst_time: Option<u64>,
    /// Microseconds of processor time per period; absent: no limit.
    pub quota: Option<u64>,
    pub period: Option<u64>,
    /// Weight, in shares of which 1024 are one processor.
    pub shares: Option<u64>,
    pub cache: Option<u64>,
    /// Mapped bytes of the page cache.
    pub mapped: Option<u64>,
    /// Recently used bytes of the page cache.
    pub active_file: Option<u64>,
    /// Bytes of the page cache that were not used recently.
    pub inactive_file: Option<u64>,
    /// Bytes of the page cache that are not written to disk yet.
    pub dirty: Option<u64>,
    /// Bytes of the page cache that are being written to disk.
    pub writeback: Option<u64>,
    /// Pages that the kernel checked for reclaim.
    pub scanned: Option<u64>,
    /// Pages that the kernel reclaimed.
    pub reclaimed: Option<u64>,
    /// Reclaimed pages of files that were read again.
    pub file_refaults: Option<u64>,
    /// Reclaimed pages that were read from swap again.
    pub anon_refaults: Option<u64>,
    /// Kernel memory, in bytes.
    pub kernel: Option<u64>,
    /// Peak of the memory use.
    pub peak: Option<u64>,
    /// Number of times that the limit was reached.
    pub failures: Option<u64>,
    /// Number of times that `memory.high` was exceeded.
    pub high_events: Option<u64>,
    /// Number of times that `memory.max` was reached.
    pub max_events: Option<u64>,
    /// The limit of memory; 0: none.
    pub memory_limit: Option<u64>,
    /// The limit of memory and swap (version 1) or of swap (version 2); 0: none.
    pub swap_limit: Option<u64>,
    /// The soft limit of memory; 0: none.
    pub reservation: Option<u64>,
    /// Processes that were killed because memory ran out.
    pub oom_kills: Option<u64>,
    pub threads: Option<u64>,
    /// The limit of threads; 0: none.
    pub threads_max: Option<u64>,
    /// Open files of its processes.
    pub open: Option<OpenFiles>,
    /// The limit of descriptors of its first process; -1: none.
    pub files_limit: Option<i64>,
    pub disks: Vec<DiskTraffic>,
}

/// Descriptors of all processes of a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenFiles {
    pub descriptors: u64,
    pub sockets: u64,
}

/// What a number of a disk is, as the block layer counts it for a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskStatKind {
    Bytes,
    /// Completed requests.
    Served,
    /// Requests that were merged with others.
    Merged,
    Queued,
    /// Nanoseconds of service.
    Time,
    /// Microseconds of the disk's time, by its cost model (version 2).
    CostUsage,
    /// Microseconds of waiting for that time.
    CostWait,
    /// Microseconds in debt.
    CostDebt,
    /// Microseconds of delay because of debt.
    CostDelay,
}

/// The kind of request that is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    /// Requests whose sender waits for them.
    Sync,
    /// The others.
    Async,
    /// Discarded blocks.
    Discard,
    /// The sum of reads, writes and discards.
    Total,
    /// All requests, in statistics without operations.
    Count,
}

impl Operation {
    /// The name in cgroup version 1 and in the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Operation::Read => "Read",
            Operation::Write => "Write",
            Operation::Sync => "Sync",
            Operation::Async => "Async",
            Operation::Discard => "Discard",
            Operation::Total => "Total",
            Operation::Count => "Count",
        }
    }
}

/// What a cgroup has read from and written to one disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiskTraffic {
    /// `major:minor`.
    pub device: String,
    pub counts: Vec<(DiskStatKind, Operation, u64)>,
}

impl DiskTraffic {
    /// A number; absent when the kernel has no such counter, 0 when it counts other operations
    /// only.
    pub fn get(&self, what: DiskStatKind, operation: Operation) -> Option<u64> {
        let mut counted = self.counts.iter().filter(|(counted_kind, ..)| *counted_kind == what).peekable();
        counted.peek()?;
        Some(
            counted
                .find(|(_, counted_operation, _)| *counted_operation == operation)
                .map_or(0, |(.., value)| *value),
        )
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Interface {
    pub name: String,
    pub received: Traffic,
    pub sent: Traffic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    pub bytes: u64,
    pub packets: u64,
    pub errors: u64,
    pub dropped: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Network {
    pub time: Timestamp,
    pub interfaces: Vec<Interface>,
}

/// A file system, or the use of it by a pod, a container or a volume.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileSystem {
    pub time: Timestamp,
    /// Bytes available to unprivileged users.
    pub available: Option<u64>,
    pub capacity: Option<u64>,
    pub used: Option<u64>,
    pub inodes_free: Option<u64>,
    pub inodes: Option<u64>,
    pub inodes_used: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VolumeUse {
    pub name: String,
    pub claim: Option<String>,
    /// Whether it counts as the pod's local storage.
    pub ephemeral: bool,
    pub space: FileSystem,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct ContainerUse {
    pub name: String,
    pub id: String,
    pub image: String,
    pub started: Option<Timestamp>,
    pub numbers: Numbers,
    pub rootfs: Option<FileSystem>,
    pub logs: Option<FileSystem>,
}

/// A pod's sandbox, which runs as long as the pod does.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SandboxUse {
    pub id: String,
    /// The image; empty for runtimes that do not report it.
    pub image: String,
    pub numbers: Numbers,
}

/// A pod with a running sandbox or container.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PodUse {
    pub uid: PodUid,
    pub name: String,
    pub namespace: String,
    pub started: Option<Timestamp>,
    pub numbers: Numbers,
    /// The sandbox, where its cgroup could be read.
    pub sandbox: Option<SandboxUse>,
    pub network: Option<Network>,
    pub containers: Vec<ContainerUse>,
    pub volumes: Vec<VolumeUse>,
    /// Its use of the node's file system.
    pub local_storage: Option<FileSystem>,
}

/// A part of the node's processes, such as the runtime.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SystemUse {
    /// `kubelet`, `runtime`, `misc`, `pods`; `burstable` and `besteffort` for the QoS classes.
    pub name: &'static str,
    pub started: Option<Timestamp>,
    pub numbers: Numbers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProcessLimit {
    pub time: Timestamp,
    pub most: Option<u64>,
    pub now: Option<u64>,
}

/// The machine as a whole.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeUse {
    pub name: String,
    pub booted: Option<Timestamp>,
    pub numbers: Numbers,
    pub network: Option<Network>,
    /// The agent, the runtime, and other named parts.
    pub system: Vec<SystemUse>,
    /// The cgroups of QoS classes, if the details were requested.
    pub classes: Vec<SystemUse>,
    pub fs: Option<FileSystem>,
    pub image_fs: Option<FileSystem>,
    /// The file system with writable layers, if it differs from that of images.
    pub container_fs: Option<FileSystem>,
    pub processes: Option<ProcessLimit>,
    /// All file systems of the machine, if the details were requested.
    pub file_systems: Vec<MountedDisk>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MountedDisk {
    /// The device; for a tmpfs its directory, for an overlay a name with both device numbers.
    pub device: String,
    pub space: FileSystem,
    /// Counters of its disk; zeros for a file system without one.
    pub traffic: DiskCounters,
}

/// A line of `/proc/diskstats`. Times are milliseconds, sectors 512 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskCounters {
    pub reads: u64,
    pub reads_merged: u64,
    pub sectors_read: u64,
    pub read_time: u64,
    pub writes: u64,
    pub writes_merged: u64,
    pub sectors_written: u64,
    pub write_time: u64,
    pub in_flight: u64,
    /// Time in which any request was under way.
    pub busy_time: u64,
    /// Busy time, weighted by the number of requests.
    pub weighted_time: u64,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    pub node: NodeUse,
    pub pods: Vec<PodUse>,
    /// Whether expected numbers are missing.
    pub incomplete: bool,
}
