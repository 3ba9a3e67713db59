//! What the signals show now, from one snapshot of the statistics (Go: eviction
//! `makeSignalObservations`).

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::signal::Signal;
use crate::model::quantity::{Amount, Form};
use crate::resources::stats::sample::{FileSystem, Numbers, Snapshot};

/// The system part with the numbers of all pods together.
const PODS: &str = "pods";

/// Whether swap counts as memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Swap {
    /// Pods may not use swap.
    #[default]
    Ignored,
    /// Pods may use swap (`memorySwap.swapBehavior: LimitedSwap`).
    ///
    /// DIFFERS: upstream ignores swap. Then a node evicts pods before the kernel has swapped
    /// anything out, and a pod that is swapped out ranks as a small one.
    Counted,
}

impl Swap {
    /// From `memorySwap.swapBehavior`.
    #[must_use]
    pub fn from_behavior(behavior: &str) -> Swap {
        if behavior == "LimitedSwap" { Swap::Counted } else { Swap::Ignored }
    }
}

/// One signal at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observation {
    /// Below zero if there are more processes than ids.
    pub available: Amount,
    /// Shares are taken of this.
    pub capacity: i64,
    /// When it was measured.
    pub time: Timestamp,
    /// How the amount is written.
    pub form: Form,
}

impl Observation {
    /// The available amount as messages show it.
    #[must_use]
    pub fn text(&self) -> String {
        self.available.format(self.form)
    }
}

/// The observations of a snapshot. Signals without numbers are absent.
pub type Observations = BTreeMap<Signal, Observation>;

/// Reads a snapshot.
#[must_use]
pub fn observations(snapshot: &Snapshot, swap: Swap) -> Observations {
    let node = &snapshot.node;
    let swappable = if swap == Swap::Counted { swappable(snapshot) } else { 0 };
    let pods = node.system.iter().find(|part| part.name == PODS);
    let mut found = Observations::new();
    let mut put = |signal, observation: Option<Observation>| {
        if let Some(observation) = observation {
            found.insert(signal, observation);
        }
    };
    put(Signal::MemoryAvailable, memory(&node.numbers, swappable));
    put(Signal::AllocatableMemoryAvailable, pods.and_then(|pods| memory(&pods.numbers, swappable)));
    let containers = node.container_fs.as_ref().or(node.image_fs.as_ref());
    for (bytes_signal, inodes_signal, space) in [
        (Signal::NodeFsAvailable, Signal::NodeFsInodesFree, node.fs.as_ref()),
        (Signal::ImageFsAvailable, Signal::ImageFsInodesFree, node.image_fs.as_ref()),
        (Signal::ContainerFsAvailable, Signal::ContainerFsInodesFree, containers),
    ] {
        put(bytes_signal, space.and_then(bytes));
        put(inodes_signal, space.and_then(inodes));
    }
    let processes = node.processes.and_then(|limit| {
        let (most, now) = (signed(limit.most?), signed(limit.now?));
        let available = Amount::from_units(most.saturating_sub(now));
        Some(Observation { available, capacity: most, time: limit.time, form: Form::Decimal })
    });
    put(Signal::PidAvailable, processes);
    found
}

/// Memory that the kernel can still move to swap: for each container what it uses, within what its
/// cgroup and the node have left.
fn swappable(snapshot: &Snapshot) -> u64 {
    let Some(left) = snapshot.node.numbers.swap_available else { return 0 };
    let containers = snapshot.pods.iter().flat_map(|pod| &pod.containers);
    let movable = containers.filter_map(|container| {
        let numbers = &container.numbers;
        // Without a number for swap the container's limit is not known, and counts as none left.
        let own = numbers.swap_available.or(numbers.swap.map(|_| u64::MAX))?;
        Some(own.min(numbers.rss.or(numbers.working_set)?))
    });
    movable.fold(0_u64, u64::saturating_add).min(left)
}

/// A share is of the memory without swap, as the node reports its capacity.
fn memory(numbers: &Numbers, swappable: u64) -> Option<Observation> {
    let (available, used) = (numbers.available?, numbers.working_set?);
    Some(Observation {
        available: Amount::from_units(signed(available.saturating_add(swappable))),
        capacity: signed(available.saturating_add(used)),
        time: numbers.time,
        form: Form::Binary,
    })
}

fn bytes(space: &FileSystem) -> Option<Observation> {
    Some(Observation {
        available: Amount::from_units(signed(space.available?)),
        capacity: signed(space.capacity?),
        time: space.time,
        form: Form::Binary,
    })
}

fn inodes(space: &FileSystem) -> Option<Observation> {
    Some(Observation {
        available: Amount::from_units(signed(space.inodes_free?)),
        capacity: signed(space.inodes?),
        time: space.time,
        form: Form::Decimal,
    })
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::stats::sample::{ContainerUse, NodeUse, PodUse, ProcessLimit, SystemUse};

    const MIB: u64 = 1 << 20;

    fn node() -> NodeUse {
        let memory = |available: u64, used: u64| Numbers {
            available: Some(available * MIB),
            working_set: Some(used * MIB),
            ..Numbers::default()
        };
        let space = |available: u64| FileSystem {
            available: Some(available * MIB),
            capacity: Some(1000 * MIB),
            inodes_free: Some(available),
            inodes: Some(1000),
            ..FileSystem::default()
        };
        NodeUse {
            numbers: memory(300, 700),
            system: vec![SystemUse { name: "pods", started: None, numbers: memory(200, 600) }],
            fs: Some(space(10)),
            image_fs: Some(space(20)),
            processes: Some(ProcessLimit { most: Some(100), now: Some(150), ..ProcessLimit::default() }),
            ..NodeUse::default()
        }
    }

    fn texts(found: &Observations) -> Vec<String> {
        let text = |(signal, observation): (&Signal, &Observation)| {
            format!("{} {} of {}", signal.as_str(), observation.text(), observation.capacity)
        };
        found.iter().map(text).collect()
    }

    #[test]
    fn every_signal_is_read() {
        let snapshot = Snapshot { node: node(), ..Snapshot::default() };
        assert_eq!(
            texts(&observations(&snapshot, Swap::Ignored)),
            [
                "memory.available 300Mi of 1048576000",
                "allocatableMemory.available 200Mi of 838860800",
                "nodefs.available 10Mi of 1048576000",
                "nodefs.inodesFree 10 of 1000",
                "imagefs.available 20Mi of 1048576000",
                "imagefs.inodesFree 20 of 1000",
                "containerfs.available 20Mi of 1048576000",
                "containerfs.inodesFree 20 of 1000",
                "pid.available -50 of 100",
            ]
        );
    }

    #[test]
    fn numbers_that_are_not_known_make_no_observation() {
        assert_eq!(observations(&Snapshot::default(), Swap::Counted), Observations::new());
        let mut node = node();
        node.system.clear();
        node.numbers.available = None;
        node.fs = Some(FileSystem { available: Some(1), ..FileSystem::default() });
        node.container_fs = Some(FileSystem::default());
        let found = observations(&Snapshot { node, ..Snapshot::default() }, Swap::Ignored);
        let signals: Vec<Signal> = found.into_keys().collect();
        assert_eq!(signals, [Signal::ImageFsAvailable, Signal::ImageFsInodesFree, Signal::PidAvailable]);
    }

    #[test]
    fn swap_that_pods_may_still_use_counts_as_memory() {
        let container = |rss: u64, swap: Option<u64>, left: Option<u64>| ContainerUse {
            numbers: Numbers {
                rss: Some(rss * MIB),
                swap: swap.map(|swap| swap * MIB),
                swap_available: left.map(|left| left * MIB),
                ..Numbers::default()
            },
            ..ContainerUse::default()
        };
        let available = |swap_left: u64, containers: Vec<ContainerUse>| {
            let mut node = node();
            node.numbers.swap_available = Some(swap_left * MIB);
            let pods = vec![PodUse { containers, ..PodUse::default() }];
            let found = observations(&Snapshot { node, pods, ..Snapshot::default() }, Swap::Counted);
            (found[&Signal::MemoryAvailable].text(), found[&Signal::MemoryAvailable].capacity)
        };
        // The second one may not swap; the third one has little to move.
        let some = || {
            vec![
                container(50, Some(1), Some(40)),
                container(90, Some(0), Some(0)),
                container(5, Some(1), Some(99)),
            ]
        };
        assert_eq!(available(1000, some()), ("345Mi".to_owned(), 1_048_576_000));
        assert_eq!(available(30, some()).0, "330Mi", "the node has less swap");
        assert_eq!(available(1000, vec![container(50, None, None)]).0, "300Mi", "not known");
        assert_eq!(available(1000, vec![container(50, Some(3), None)]).0, "350Mi", "without a limit");
        assert_eq!(Swap::from_behavior("LimitedSwap"), Swap::Counted);
        assert_eq!((Swap::from_behavior("NoSwap"), Swap::from_behavior("")), (Swap::Ignored, Swap::Ignored));
    }

    #[test]
    fn huge_numbers_are_limited() {
        let mut node = node();
        node.numbers.available = Some(u64::MAX);
        let found = observations(&Snapshot { node, ..Snapshot::default() }, Swap::Ignored);
        assert_eq!(found[&Signal::MemoryAvailable].capacity, i64::MAX);
    }
}
