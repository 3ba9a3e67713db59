//! Which CPUs of a set are taken for a request (Go: pkg/kubelet/cm/cpumanager/cpu_assignment.go).

use std::collections::{BTreeMap, BTreeSet};

use super::error::TakeError;
use super::options::Options;
use super::spread;
use crate::placement::cpus::CpuSet;
use crate::placement::machine::{Level, Machine};

/// Takes `count` CPUs of `available` in the order that the options say.
///
/// # Errors
/// When there are not enough.
pub(super) fn take(
    machine: &Machine,
    available: &CpuSet,
    count: u32,
    options: &Options,
) -> Result<CpuSet, TakeError> {
    if options.across_nodes {
        let group = if options.full_cores { machine.cpus_per_group(Level::Core) } else { 1 };
        return spread::across_nodes(machine, available, count, group.max(1), *options);
    }
    packed(machine, available, count, *options)
}

/// Packs: whole NUMA nodes and sockets, then (if the options say so) whole uncore caches or parts of
/// one, then whole cores, then single threads of the fullest groups.
///
/// # Errors
/// When there are not enough CPUs.
pub(super) fn packed(
    machine: &Machine,
    available: &CpuSet,
    count: u32,
    options: Options,
) -> Result<CpuSet, TakeError> {
    let free = available.intersection(machine.all());
    if count > free.len() {
        return Err(TakeError::NotEnough { requested: count, available: available.len() });
    }
    let mut allocation = Allocation { machine, options, free, needed: count, taken: CpuSet::new() };
    allocation.run();
    // INVARIANT: single threads are taken until the request is met.
    if allocation.needed == 0 { Ok(allocation.taken) } else { Err(TakeError::Failed) }
}

/// The numbers of the NUMA nodes with CPUs of `free`, in the order in which they are used.
pub(super) fn nodes_in_order(machine: &Machine, free: &CpuSet) -> Vec<u32> {
    Order { machine, free }.nodes()
}

struct Allocation<'a> {
    machine: &'a Machine,
    options: Options,
    free: CpuSet,
    needed: u32,
    taken: CpuSet,
}

impl Allocation<'_> {
    fn run(&mut self) {
        let levels = if nodes_are_larger(self.machine) {
            [Level::Node, Level::Socket]
        } else {
            [Level::Socket, Level::Node]
        };
        for level in levels {
            self.take_whole(level);
        }
        if self.options.by_cache {
            self.take_caches();
        }
        if !self.options.across_cores {
            self.take_whole(Level::Core);
        }
        let threads = self.order().threads(self.options.across_cores);
        for cpu in threads {
            if self.needed == 0 {
                return;
            }
            self.take(&CpuSet::from_iter([cpu]));
        }
    }

    fn order(&self) -> Order<'_> {
        Order { machine: self.machine, free: &self.free }
    }

    fn take(&mut self, cpus: &CpuSet) {
        let cpus = cpus.intersection(&self.free);
        self.needed = self.needed.saturating_sub(cpus.len());
        self.free = self.free.difference(&cpus);
        self.taken = self.taken.union(&cpus);
    }

    /// Takes groups of which every CPU is free, as long as the request has room for them.
    ///
    /// DIFFERS: upstream compares the free CPUs of a socket or core with the mean of the machine,
    /// and then takes all of its CPUs. On a machine whose cores or sockets are not equal it can so
    /// take CPUs that are not free.
    fn take_whole(&mut self, level: Level) {
        if self.needed == 0 {
            return;
        }
        let groups = self.machine.groups(self.machine.all(), level);
        let mean = self.machine.cpus_per_group(level);
        let order = match level {
            Level::Node => self.order().nodes(),
            Level::Socket => self.order().sockets(),
            Level::Cache => self.order().caches(),
            Level::Core => self.order().cores(),
        };
        let usual = |cpus: &CpuSet| match level {
            Level::Socket | Level::Core => cpus.len() == mean,
            Level::Node | Level::Cache => true,
        };
        let whole: Vec<&CpuSet> = order
            .iter()
            .filter_map(|group| groups.get(group))
            .filter(|cpus| usual(cpus) && cpus.is_subset(&self.free))
            .collect();
        for cpus in whole {
            // A group can be in the list twice.
            if self.needed >= cpus.len() && cpus.is_subset(&self.free) {
                self.take(cpus);
            }
        }
    }

    fn take_caches(&mut self) {
        let mean = self.machine.cpus_per_group(Level::Cache);
        for cache in self.order().caches() {
            if self.needed >= mean {
                self.take_whole(Level::Cache);
            }
            if self.needed == 0 {
                return;
            }
            self.take_part_of_cache(cache);
            if self.needed == 0 {
                return;
            }
        }
    }

    /// Takes what is needed from the cores of one cache, if that meets the whole request.
    fn take_part_of_cache(&mut self, cache: u32) {
        let per_core = self.machine.cpus_per_group(Level::Core).max(1);
        let cores_needed = self.needed.div_ceil(per_core);
        let in_cache = self.machine.within(&self.free, Level::Cache, &BTreeSet::from([cache]));
        let cores: BTreeSet<u32> = self
            .machine
            .groups(&in_cache, Level::Core)
            .into_keys()
            .take(usize::try_from(cores_needed).unwrap_or(usize::MAX))
            .collect();
        let mut cpus: Vec<u32> = self.machine.within(&self.free, Level::Core, &cores).iter().collect();
        let needed = usize::try_from(self.needed).unwrap_or(usize::MAX);
        // One thread of the last core is left over.
        if !self.needed.is_multiple_of(2) && per_core > 1 && cpus.len() > needed {
            cpus.pop();
        }
        if cpus.len() == needed {
            self.take(&cpus.into_iter().collect());
        }
    }
}

/// Whether a NUMA node has one socket or more.
fn nodes_are_larger(machine: &Machine) -> bool {
    machine.count(Level::Socket) >= machine.count(Level::Node)
}

/// The orders of groups: those with the fewest free CPUs first, then by number; first the larger
/// groups, then the smaller ones in each.
struct Order<'a> {
    machine: &'a Machine,
    free: &'a CpuSet,
}

impl Order<'_> {
    fn nodes(&self) -> Vec<u32> {
        if nodes_are_larger(self.machine) {
            return sorted(self.sizes(Level::Node), None);
        }
        self.inside(&self.sockets(), Level::Socket, Level::Node)
    }

    fn sockets(&self) -> Vec<u32> {
        if nodes_are_larger(self.machine) {
            return self.inside(&self.nodes(), Level::Node, Level::Socket);
        }
        sorted(self.sizes(Level::Socket), None)
    }

    fn caches(&self) -> Vec<u32> {
        self.inside(&self.nodes(), Level::Node, Level::Cache)
    }

    fn cores(&self) -> Vec<u32> {
        if nodes_are_larger(self.machine) {
            self.inside(&self.sockets(), Level::Socket, Level::Core)
        } else {
            self.inside(&self.nodes(), Level::Node, Level::Core)
        }
    }

    /// Single CPUs: core by core, or (for one thread of each core) socket by socket.
    fn threads(&self, across_cores: bool) -> Vec<u32> {
        let (outer, level) =
            if across_cores { (self.sockets(), Level::Socket) } else { (self.cores(), Level::Core) };
        let groups = self.machine.groups(self.free, level);
        outer.iter().filter_map(|group| groups.get(group)).flat_map(CpuSet::iter).collect()
    }

    /// The free CPUs of each group.
    fn sizes(&self, level: Level) -> BTreeMap<u32, u32> {
        let groups = self.machine.groups(self.free, level);
        groups.into_iter().map(|(group, cpus)| (group, cpus.len())).collect()
    }

    /// The groups of a level inside of each outer group.
    fn inside(&self, outer: &[u32], outer_level: Level, level: Level) -> Vec<u32> {
        let sizes = self.sizes(level);
        let mut members: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for cpu in self.free.iter() {
            if let Some(cpu) = self.machine.group(cpu, outer_level).zip(self.machine.group(cpu, level)) {
                members.entry(cpu.0).or_default().insert(cpu.1);
            }
        }
        outer
            .iter()
            .filter_map(|group| members.get(group))
            .flat_map(|inner| sorted(sizes.clone(), Some(inner)))
            .collect()
    }
}

/// Groups by their number of free CPUs, then by their number.
fn sorted(sizes: BTreeMap<u32, u32>, among: Option<&BTreeSet<u32>>) -> Vec<u32> {
    let wanted = |group: &u32| among.is_none_or(|among| among.contains(group));
    let mut groups: Vec<(u32, u32)> =
        sizes.into_iter().filter(|(group, _)| wanted(group)).map(|(group, size)| (size, group)).collect();
    groups.sort_unstable();
    groups.into_iter().map(|(_, group)| group).collect()
}
