//! Option `distribute-cpus-across-numa`: equal shares of several NUMA nodes (Go:
//! pkg/kubelet/cm/cpumanager/cpu_assignment.go, KEP-2902).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use super::error::TakeError;
use super::options::Options;
use super::take::{nodes_in_order, packed};
use crate::placement::cpus::CpuSet;
use crate::placement::machine::{Level, Machine};

/// Choices of NUMA nodes that are compared at most; 8 nodes have fewer. Then the CPUs are packed.
const MOST_CHOICES: u32 = 100_000;

/// Takes `count` CPUs, in groups of `group`, of as few NUMA nodes as can give equal shares. What is
/// left over goes to the nodes with which the free CPUs of all nodes stay most alike. If no nodes
/// can, the CPUs are packed.
///
/// With `align-by-socket` nodes of one socket win over nodes of several sockets, however alike the
/// free CPUs stay, and the shares are as small as the node with the fewest free CPUs needs.
///
/// # Errors
/// When there are not enough CPUs.
///
/// DIFFERS: upstream keeps the best choice of four or more nodes in memory that later choices
/// overwrite, so it can take the CPUs of other nodes, or fail.
/// DIFFERS: upstream does not end when no node of a choice has a whole group left.
pub(super) fn across_nodes(
    machine: &Machine,
    available: &CpuSet,
    count: u32,
    group: u32,
    options: Options,
) -> Result<CpuSet, TakeError> {
    let options = Options { by_cache: false, ..options };
    let free = available.intersection(machine.all());
    if !count.is_multiple_of(group) || count == 0 || count > free.len() {
        return packed(machine, available, count, options);
    }
    let nodes = nodes_in_order(machine, &free);
    let mut search = Search {
        sizes: machine
            .groups(&free, Level::Node)
            .into_iter()
            .map(|(node, cpus)| (node, cpus.len()))
            .collect(),
        sockets: if options.by_socket { Some(sockets_of_nodes(machine)) } else { None },
        count,
        group,
        choices: 0,
        best: None,
    };
    let (fewest, most) = range(machine, nodes.len(), count, group);
    for number in fewest..=most {
        let _ = combinations(&nodes, number, &mut |chosen| search.consider(chosen));
        if search.choices >= MOST_CHOICES {
            break;
        }
        if let Some(best) = search.best.take() {
            return best.take(machine, &free, count, group, options);
        }
    }
    packed(machine, available, count, options)
}

/// The fewest and the most nodes that can be needed.
fn range(machine: &Machine, available_nodes: usize, count: u32, group: u32) -> (usize, usize) {
    let groups = machine.all().len().div_ceil(group);
    let groups_per_node = groups.div_ceil(machine.count(Level::Node).max(1)).max(1);
    let needed = count.div_ceil(group);
    let fewest = needed.div_ceil(groups_per_node).max(1);
    let as_size = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
    (as_size(fewest), as_size(needed).min(available_nodes))
}

/// The sockets that each node has CPUs of, online ones that are not free included.
fn sockets_of_nodes(machine: &Machine) -> BTreeMap<u32, BTreeSet<u32>> {
    let nodes = machine.groups(machine.all(), Level::Node);
    let sockets = |cpus: &CpuSet| machine.groups(cpus, Level::Socket).into_keys().collect();
    nodes.iter().map(|(node, cpus)| (*node, sockets(cpus))).collect()
}

struct Search {
    /// Free CPUs per node.
    sizes: BTreeMap<u32, u32>,
    /// The sockets of each node; `None`: they do not matter.
    sockets: Option<BTreeMap<u32, BTreeSet<u32>>>,
    count: u32,
    group: u32,
    choices: u32,
    best: Option<Choice>,
}

/// Nodes that can give equal shares.
struct Choice {
    balance: f64,
    /// Whether the nodes are of one socket; `false` if sockets do not matter.
    in_one_socket: bool,
    nodes: Vec<u32>,
    /// What each node gives, in whole groups.
    share: u32,
    /// The nodes that give what is left over.
    rest: Vec<u32>,
}

impl Choice {
    fn take(
        self,
        machine: &Machine,
        free: &CpuSet,
        count: u32,
        group: u32,
        options: Options,
    ) -> Result<CpuSet, TakeError> {
        let share = self.share;
        let mut free = free.clone();
        let mut taken = CpuSet::new();
        let mut from = |node: u32, number: u32| {
            let members = machine.groups(&free, Level::Node).remove(&node).unwrap_or_default();
            if members.len() < number {
                return Ok(false);
            }
            let cpus = packed(machine, &members, number, options)?;
            free = free.difference(&cpus);
            taken = taken.union(&cpus);
            Ok::<bool, TakeError>(true)
        };
        let mut rest = count;
        for node in &self.nodes {
            if !from(*node, share)? {
                return Err(TakeError::Failed);
            }
            rest = rest.saturating_sub(share);
        }
        while rest > 0 {
            let before = rest;
            for node in &self.rest {
                if rest > 0 && from(*node, group)? {
                    rest = rest.saturating_sub(group);
                }
            }
            if rest == before {
                return Err(TakeError::Failed);
            }
        }
        Ok(taken)
    }
}

/// What each of `nodes` nodes gives, in whole groups.
fn share(count: u32, nodes: usize, group: u32) -> u32 {
    let nodes = u32::try_from(nodes).unwrap_or(u32::MAX).max(1);
    count / nodes / group * group
}

impl Search {
    fn size(&self, node: u32) -> u32 {
        self.sizes.get(&node).copied().unwrap_or(0)
    }

    /// Whether sockets matter, and all these nodes are of the same one.
    fn is_one_socket(&self, chosen: &[u32]) -> bool {
        let Some(sockets) = &self.sockets else { return false };
        let all: BTreeSet<u32> =
            chosen.iter().filter_map(|node| sockets.get(node)).flatten().copied().collect();
        all.len() <= 1
    }

    /// Whether no other choice can be better.
    fn is_over(&self) -> bool {
        let is_perfect =
            |best: &Choice| best.balance == 0.0 && (self.sockets.is_none() || best.in_one_socket);
        self.choices >= MOST_CHOICES || self.best.as_ref().is_some_and(is_perfect)
    }

    /// Compares one choice with the best one.
    fn consider(&mut self, chosen: &[u32]) -> ControlFlow<()> {
        self.choices = self.choices.saturating_add(1);
        if self.is_over() {
            return ControlFlow::Break(());
        }
        let whole_of = |node: &u32| self.size(*node) / self.group * self.group;
        let whole: u32 = chosen.iter().map(whole_of).sum();
        let mut share = share(self.count, chosen.len(), self.group);
        if self.sockets.is_some() {
            share = chosen.iter().map(whole_of).fold(share, u32::min);
        }
        if whole < self.count || chosen.iter().any(|node| self.size(*node) < share) {
            return ControlFlow::Continue(());
        }
        let mut left = self.sizes.clone();
        for node in chosen {
            left.entry(*node).and_modify(|size| *size = size.saturating_sub(share));
        }
        let given = share.saturating_mul(u32::try_from(chosen.len()).unwrap_or(u32::MAX));
        let rest = self.count.saturating_sub(given);
        let found = if rest == 0 {
            Some((deviation(&left), Vec::new()))
        } else {
            self.place_rest(chosen, &left, rest)
        };
        let Some((balance, rest)) = found else { return ControlFlow::Continue(()) };
        let in_one_socket = self.is_one_socket(chosen);
        let is_better = self.best.as_ref().is_none_or(|best| {
            if in_one_socket == best.in_one_socket { balance < best.balance } else { in_one_socket }
        });
        if is_better {
            self.best = Some(Choice { balance, in_one_socket, nodes: chosen.to_vec(), share, rest });
        }
        ControlFlow::Continue(())
    }

    /// The nodes that give the rest, and how alike all nodes are afterwards.
    fn place_rest(
        &mut self,
        chosen: &[u32],
        left: &BTreeMap<u32, u32>,
        rest: u32,
    ) -> Option<(f64, Vec<u32>)> {
        let size = |left: &BTreeMap<u32, u32>, node: u32| left.get(&node).copied().unwrap_or(0);
        let group = self.group;
        let able: Vec<u32> = chosen.iter().copied().filter(|node| size(left, *node) >= group).collect();
        let mut best: Option<(f64, Vec<u32>)> = None;
        for number in (1..=able.len()).rev() {
            let _ = combinations(&able, number, &mut |subset| {
                self.choices = self.choices.saturating_add(1);
                if self.choices >= MOST_CHOICES {
                    return ControlFlow::Break(());
                }
                let mut left = left.clone();
                let mut rest = rest;
                while rest > 0 {
                    let before = rest;
                    for node in subset {
                        let has = size(&left, *node);
                        if rest > 0 && has >= group {
                            left.insert(*node, has - group);
                            rest = rest.saturating_sub(group);
                        }
                    }
                    if rest == before {
                        return ControlFlow::Continue(());
                    }
                }
                let balance = deviation(&left);
                if best.as_ref().is_none_or(|(least, _)| balance < *least) {
                    best = Some((balance, subset.to_vec()));
                }
                ControlFlow::Continue(())
            });
        }
        best
    }
}

/// The standard deviation, rounded as upstream does.
fn deviation(sizes: &BTreeMap<u32, u32>) -> f64 {
    let rounded = |number: f64| (number * 1000.0).round() / 1000.0;
    let number = f64::from(u32::try_from(sizes.len()).unwrap_or(u32::MAX).max(1));
    let mean = rounded(sizes.values().map(|size| f64::from(*size)).sum::<f64>() / number);
    let squares: f64 = sizes.values().map(|size| (f64::from(*size) - mean) * (f64::from(*size) - mean)).sum();
    rounded((squares / number).sqrt())
}

/// Calls `see` with each choice of `number` of the nodes, in their order.
fn combinations(
    nodes: &[u32],
    number: usize,
    see: &mut impl FnMut(&[u32]) -> ControlFlow<()>,
) -> ControlFlow<()> {
    if number == 0 || number > nodes.len() {
        return ControlFlow::Continue(());
    }
    let mut positions: Vec<usize> = (0..number).collect();
    loop {
        let chosen: Vec<u32> =
            positions.iter().filter_map(|position| nodes.get(*position).copied()).collect();
        see(&chosen)?;
        // The last position that can move on, and those after it right behind it.
        let last = nodes.len() - number;
        let Some(index) =
            positions.iter().enumerate().rposition(|(index, position)| *position < index + last)
        else {
            return ControlFlow::Continue(());
        };
        let start = positions.get(index).copied().unwrap_or(0) + 1;
        for (offset, position) in positions.iter_mut().skip(index).enumerate() {
            *position = start + offset;
        }
    }
}
