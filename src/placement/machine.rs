//! The machine's CPUs: which core, socket, NUMA node and cache each belongs to (Go: cadvisor
//! utils/sysinfo, Go: pkg/kubelet/cm/cpumanager/topology).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::cpus::CpuSet;

/// Where a CPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// The lowest CPU of its core. The kernel's core numbers are not unique in a machine.
    pub core: u32,
    /// The physical package.
    pub socket: u32,
    /// The NUMA node, below 64.
    pub node: u32,
    /// The last-level cache that only a part of a NUMA node shares; else the socket.
    pub cache: u32,
}

/// A level at which CPUs are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// NUMA nodes.
    Node,
    /// Sockets.
    Socket,
    /// Uncore caches.
    Cache,
    /// Cores.
    Core,
}

/// The machine's online CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Machine {
    cpus: BTreeMap<u32, Cpu>,
    all: CpuSet,
}

/// Why the CPUs cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// A file of sysfs cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file of sysfs has another format.
    #[error("{}: unexpected content {text:?}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its content.
        text: String,
    },
    /// A NUMA node has a number that no mask holds.
    #[error("NUMA node {number}: numbers above 63 are not supported")]
    NodeNumber {
        /// Its number.
        number: u32,
    },
    /// There is no CPU.
    #[error("no CPU found below {}", path.display())]
    NoCpus {
        /// The directory.
        path: PathBuf,
    },
}

impl Machine {
    /// A machine with these CPUs, by number. CPUs whose number is above the limit are left out.
    #[must_use]
    pub fn new(cpus: BTreeMap<u32, Cpu>) -> Machine {
        let all: CpuSet = cpus.keys().copied().collect();
        Machine { cpus: cpus.into_iter().filter(|(cpu, _)| all.contains(*cpu)).collect(), all }
    }

    /// All online CPUs.
    #[must_use]
    pub fn all(&self) -> &CpuSet {
        &self.all
    }

    /// Where a CPU is; `None`: it is not online.
    #[must_use]
    pub fn cpu(&self, cpu: u32) -> Option<Cpu> {
        self.cpus.get(&cpu).copied()
    }

    /// The group of a CPU at a level.
    #[must_use]
    pub fn group(&self, cpu: u32, level: Level) -> Option<u32> {
        let found = self.cpu(cpu)?;
        Some(match level {
            Level::Node => found.node,
            Level::Socket => found.socket,
            Level::Cache => found.cache,
            Level::Core => found.core,
        })
    }

    /// The groups at a level that have CPUs of `among`, each with these CPUs.
    #[must_use]
    pub fn groups(&self, among: &CpuSet, level: Level) -> BTreeMap<u32, CpuSet> {
        let mut groups: BTreeMap<u32, CpuSet> = BTreeMap::new();
        for cpu in among.iter() {
            if let Some(group) = self.group(cpu, level) {
                groups.entry(group).or_default().insert(cpu);
            }
        }
        groups
    }

    /// The CPUs of `among` that are in one of the groups.
    #[must_use]
    pub fn within(&self, among: &CpuSet, level: Level, groups: &BTreeSet<u32>) -> CpuSet {
        let inside = |cpu: &u32| self.group(*cpu, level).is_some_and(|group| groups.contains(&group));
        among.iter().filter(inside).collect()
    }

    /// How many groups there are at a level.
    #[must_use]
    pub fn count(&self, level: Level) -> u32 {
        u32::try_from(self.groups(&self.all, level).len()).unwrap_or(u32::MAX)
    }

    /// The CPUs per group at a level, rounded down; 0 without CPUs.
    #[must_use]
    pub fn cpus_per_group(&self, level: Level) -> u32 {
        self.all.len().checked_div(self.count(level)).unwrap_or(0)
    }

    /// Reads the online CPUs from the directory that is `/sys/devices/system` on a running machine.
    /// Without NUMA nodes there is one, 0, with all CPUs.
    ///
    /// # Errors
    /// When a file is unreadable or has another format, or when there is no CPU.
    ///
    /// DIFFERS: upstream, without NUMA nodes, takes sockets for them, and counts offline CPUs for the
    /// number of CPUs per core.
    /// DIFFERS: a socket or core number that the kernel does not know (-1) is 0 here.
    pub fn read(system: &Path) -> Result<Machine, MachineError> {
        let online = match read(&system.join("cpu/online"))? {
            Some(text) => {
                Some(CpuSet::parse(&text).map_err(|_| unexpected(&system.join("cpu/online"), &text))?)
            }
            // Without CPU hotplug all are online.
            None => None,
        };
        let mut by_node: BTreeMap<u32, CpuSet> = BTreeMap::new();
        for node in numbered(&system.join("node"), "node")? {
            if node >= u64::BITS {
                return Err(MachineError::NodeNumber { number: node });
            }
            by_node.insert(
                node,
                numbered(&system.join(format!("node/node{node}")), "cpu")?.into_iter().collect(),
            );
        }
        if by_node.is_empty() {
            by_node.insert(0, numbered(&system.join("cpu"), "cpu")?.into_iter().collect());
        }
        let mut cpus = BTreeMap::new();
        for (node, members) in &by_node {
            let members = match &online {
                Some(online) => members.intersection(online),
                None => members.clone(),
            };
            read_node(system, *node, &members, &mut cpus)?;
        }
        if cpus.is_empty() {
            return Err(MachineError::NoCpus { path: system.to_owned() });
        }
        Ok(Machine::new(cpus))
    }
}

/// Adds the CPUs of one node.
fn read_node(
    system: &Path,
    node: u32,
    members: &CpuSet,
    cpus: &mut BTreeMap<u32, Cpu>,
) -> Result<(), MachineError> {
    let mut cores: BTreeMap<(u32, u32), CpuSet> = BTreeMap::new();
    for cpu in members.iter() {
        let core = topology(system, cpu, "core_id")?;
        let socket = topology(system, cpu, "physical_package_id")?;
        // Upstream leaves a CPU out that has no such file.
        if let (Some(core), Some(socket)) = (core, socket) {
            cores.entry((socket, core)).or_default().insert(cpu);
        }
    }
    let mut caches_known = true;
    for ((socket, _), threads) in &cores {
        let Some(first) = threads.iter().next() else { continue };
        // A cache of this many CPUs counts as the node's.
        let whole = u64::try_from(cores.len()).unwrap_or(u64::MAX).saturating_mul(u64::from(threads.len()));
        let cache = if caches_known { uncore_cache(system, first, whole) } else { Ok(None) };
        // Upstream ends the search of the node at the first error.
        caches_known &= cache.is_ok();
        let cache = cache.ok().flatten().unwrap_or(*socket);
        for cpu in threads.iter() {
            cpus.insert(cpu, Cpu { core: first, socket: *socket, node, cache });
        }
    }
    Ok(())
}

/// The caches' descriptions are incomplete, as in some virtual machines.
struct NoCaches;

/// The cache above level 2 that less than the whole node shares.
fn uncore_cache(system: &Path, cpu: u32, whole: u64) -> Result<Option<u32>, NoCaches> {
    let directory = system.join(format!("cpu/cpu{cpu}/cache"));
    if !directory.is_dir() {
        return Err(NoCaches);
    }
    let mut found = None;
    for index in numbered(&directory, "index").map_err(|_| NoCaches)? {
        let text =
            |name: &str| read(&directory.join(format!("index{index}/{name}"))).ok().flatten().ok_or(NoCaches);
        let number = |name: &str| text(name)?.parse::<u32>().map_err(|_| NoCaches);
        let (id, level) = (number("id")?, number("level")?);
        // Not used, but upstream takes no cache for known whose size or kind the firmware does not say.
        let size = text("size")?;
        size.strip_suffix('K').and_then(|size| size.parse::<u64>().ok()).ok_or(NoCaches)?;
        text("type")?;
        let mut sharing = 0_u64;
        for word in text("shared_cpu_map")?.split(',') {
            let word = u64::from_str_radix(word.trim(), 16).map_err(|_| NoCaches)?;
            sharing = sharing.saturating_add(u64::from(word.count_ones()));
        }
        if level > 2 && sharing != whole {
            found = found.or(Some(id));
        }
    }
    Ok(found)
}

/// A number of a CPU's topology; `None` without the file.
fn topology(system: &Path, cpu: u32, name: &str) -> Result<Option<u32>, MachineError> {
    let path = system.join(format!("cpu/cpu{cpu}/topology/{name}"));
    let Some(text) = read(&path)? else { return Ok(None) };
    let number = text.parse::<i64>().map_err(|_| unexpected(&path, &text))?;
    u32::try_from(number.max(0)).map(Some).map_err(|_| unexpected(&path, &text))
}

/// The numbers of the entries `<prefix><number>`, ascending; none without the directory.
fn numbered(directory: &Path, prefix: &str) -> Result<BTreeSet<u32>, MachineError> {
    let failed = |source| MachineError::Read { path: directory.to_owned(), source };
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        other => other.map_err(failed)?,
    };
    let mut numbers = BTreeSet::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(prefix));
        numbers.extend(rest.and_then(|rest| rest.parse::<u32>().ok()));
    }
    Ok(numbers)
}

/// A small file's trimmed text; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<String>, MachineError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(MachineError::Read { path: path.to_owned(), source }),
    }
}

fn unexpected(path: &Path, text: &str) -> MachineError {
    MachineError::Format { path: path.to_owned(), text: text.chars().take(100).collect() }
}

#[cfg(test)]
mod tests;
