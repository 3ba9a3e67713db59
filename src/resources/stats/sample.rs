//! What a collection finds, free of where it came from.

use jiff::Timestamp;

use crate::model::ids::PodUid;

/// How long tasks waited for one resource.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Share {
    /// Percent of the last 10 s.
    pub avg10: f64,
    /// Percent of the last minute.
    pub avg60: f64,
    /// Percent of the last five minutes.
    pub avg300: f64,
    /// All of it, in microseconds, as the kernel counts.
    pub total: u64,
}

/// Pressure on one resource.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pressure {
    /// Every task waited.
    pub full: Share,
    /// At least one waited.
    pub some: Share,
}

/// What a cgroup, or the runtime for a container, says. Whatever is not known is absent.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Numbers {
    /// When it was read.
    pub at: Timestamp,
    /// Processor time since the start, in nanoseconds.
    pub cpu: Option<u64>,
    /// Processor time per second, in nanoseconds, between the last two samples.
    pub rate: Option<u64>,
    /// Memory with the page cache.
    pub usage: Option<u64>,
    /// Memory that cannot be taken away easily.
    pub working_set: Option<u64>,
    /// Memory that no file backs.
    pub rss: Option<u64>,
    /// What may still be used; absent without a limit.
    pub available: Option<u64>,
    /// Page faults.
    pub faults: Option<u64>,
    /// Page faults that read from a disk.
    pub major_faults: Option<u64>,
    /// Swap in use.
    pub swap: Option<u64>,
    /// Swap that may still be used; absent without a limit.
    pub swap_available: Option<u64>,
    /// Processes, not threads.
    pub processes: Option<u64>,
    /// Waits for a processor.
    pub cpu_pressure: Option<Pressure>,
    /// Waits for memory.
    pub memory_pressure: Option<Pressure>,
    /// Waits for disks.
    pub io_pressure: Option<Pressure>,
    /// More of the cgroup, where that was asked for.
    pub details: Option<Box<Details>>,
}

impl Numbers {
    /// Adds what another part of the same pod uses.
    pub(super) fn add(&mut self, other: &Numbers) {
        let sum = |mine: &mut Option<u64>, theirs: Option<u64>| {
            *mine = match (*mine, theirs) {
                (Some(mine), Some(theirs)) => Some(mine.saturating_add(theirs)),
                (mine, theirs) => mine.or(theirs),
            };
        };
        self.at = self.at.max(other.at);
        sum(&mut self.cpu, other.cpu);
        sum(&mut self.rate, other.rate);
        sum(&mut self.usage, other.usage);
        sum(&mut self.working_set, other.working_set);
        sum(&mut self.rss, other.rss);
        sum(&mut self.faults, other.faults);
        sum(&mut self.major_faults, other.major_faults);
        sum(&mut self.swap, other.swap);
        sum(&mut self.swap_available, other.swap_available);
        sum(&mut self.processes, other.processes);
    }
}

/// What only `/metrics/cadvisor` shows.
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
    /// Microseconds of processor time per period; absent: no limit.
    pub quota: Option<u64>,
    /// The period in microseconds.
    pub period: Option<u64>,
    /// Weight, in shares of which 1024 are one processor.
    pub shares: Option<u64>,
    /// Page cache.
    pub cache: Option<u64>,
    /// Of the cache, what is mapped.
    pub mapped: Option<u64>,
    /// The most memory that was in use.
    pub peak: Option<u64>,
    /// How often the limit was hit.
    pub failures: Option<u64>,
    /// The limit of memory; 0: none.
    pub memory_limit: Option<u64>,
    /// The limit of memory and swap; 0: none.
    pub swap_limit: Option<u64>,
    /// Processes that were killed for want of memory.
    pub oom_kills: Option<u64>,
    /// Threads.
    pub threads: Option<u64>,
    /// By disk.
    pub disks: Vec<DiskTraffic>,
}

/// What was read from and written to one disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiskTraffic {
    /// `major:minor`.
    pub device: String,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Received: bytes, packets, errors, dropped packets.
    pub received: Traffic,
    /// Sent, likewise.
    pub sent: Traffic,
}

/// One direction of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Bytes.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
    /// Packets with errors.
    pub errors: u64,
    /// Packets that were dropped.
    pub dropped: u64,
}

/// The interfaces of a network namespace.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Network {
    /// When they were read.
    pub at: Timestamp,
    /// All that count.
    pub interfaces: Vec<Interface>,
}

/// A file system, or what something uses of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileSystem {
    /// When it was looked at.
    pub at: Timestamp,
    /// Bytes left to ordinary users.
    pub available: Option<u64>,
    /// All bytes.
    pub capacity: Option<u64>,
    /// Bytes in use.
    pub used: Option<u64>,
    /// Free inodes.
    pub inodes_free: Option<u64>,
    /// All inodes.
    pub inodes: Option<u64>,
    /// Inodes in use.
    pub inodes_used: Option<u64>,
}

/// A volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VolumeUse {
    /// Its name in the pod.
    pub name: String,
    /// The PersistentVolumeClaim behind it.
    pub claim: Option<String>,
    /// Whether it counts as the pod's local storage.
    pub ephemeral: bool,
    /// How full it is.
    pub space: FileSystem,
}

/// A container that runs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ContainerUse {
    /// Its name in the pod.
    pub name: String,
    /// The runtime's id.
    pub id: String,
    /// What it was made from.
    pub image: String,
    /// When it was made.
    pub started: Option<Timestamp>,
    /// What it uses.
    pub numbers: Numbers,
    /// Its writable layer.
    pub rootfs: Option<FileSystem>,
    /// Its logs.
    pub logs: Option<FileSystem>,
}

/// A pod of which something runs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PodUse {
    /// The UID of its manifest.
    pub uid: PodUid,
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// When its sandbox was made.
    pub started: Option<Timestamp>,
    /// All of it.
    pub numbers: Numbers,
    /// The sandbox's id and its own cgroup, where that could be read.
    pub sandbox: Option<(String, Numbers)>,
    /// The sandbox's.
    pub network: Option<Network>,
    /// Its containers that run.
    pub containers: Vec<ContainerUse>,
    /// Its volumes.
    pub volumes: Vec<VolumeUse>,
    /// What it takes of the node's own file system.
    pub local_storage: Option<FileSystem>,
}

/// A part of the node beside the pods.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SystemUse {
    /// `kubelet`, `runtime`, `misc`, `pods`.
    pub name: &'static str,
    /// Since when.
    pub started: Option<Timestamp>,
    /// What it uses.
    pub numbers: Numbers,
}

/// Processes of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProcessLimit {
    /// When it was read.
    pub at: Timestamp,
    /// How many there may be.
    pub most: Option<u64>,
    /// How many there are, threads counted.
    pub now: Option<u64>,
}

/// The machine as a whole.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeUse {
    /// The node's name.
    pub name: String,
    /// When the machine was started.
    pub booted: Option<Timestamp>,
    /// The root cgroup.
    pub numbers: Numbers,
    /// The network of the machine.
    pub network: Option<Network>,
    /// The agent, the runtime, and other named parts.
    pub system: Vec<SystemUse>,
    /// The file system with the root directory.
    pub fs: Option<FileSystem>,
    /// The file system with the images.
    pub image_fs: Option<FileSystem>,
    /// The file system with writable layers, where it is another one.
    pub container_fs: Option<FileSystem>,
    /// Processes.
    pub processes: Option<ProcessLimit>,
}

/// All of it at one time.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    /// The machine.
    pub node: NodeUse,
    /// Pods that run.
    pub pods: Vec<PodUse>,
    /// Whether something could not be found out that should be there.
    pub incomplete: bool,
}
