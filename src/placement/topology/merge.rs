//! One hint out of the hints for each resource (Go: `HintMerger.Merge`).
//!
//! Upstream goes through all combinations of one hint per resource: the product of the lengths of
//! the lists, which grows exponentially with the resources of a container. The results here are
//! the same, but they are computed from sets of nodes:
//!
//! - A combination is preferred if all its hints are and all name the same nodes. The candidates
//!   are therefore the sets that all lists have in common: linear work.
//! - The nodes of any other combination are the intersection of its sets. There are at most 2ⁿ
//!   different ones on n nodes, and each list changes which of them can be reached. With counts of
//!   supersets one list costs n·2ⁿ steps, whatever its length.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use super::closest::{Distances, compare};
use super::settings::Policy;
use crate::placement::numa::{Hint, NumaMask};

/// The number of NUMA nodes up to which combinations that are not preferred are compared.
pub const DENSE_NODES: u32 = 12;

/// The best hint that can be built from one hint of each list, on the nodes `all`. A list without
/// hints stands for a resource that no nodes can provide; a resource without a preference has no
/// list.
///
/// DIFFERS: with more than [`DENSE_NODES`] nodes, and no preferred combination, the result is any
/// nodes, not preferred. Only the policy best-effort admits a pod then, and its resources are
/// taken as without the manager. Upstream would need hours for its comparisons.
#[must_use]
pub fn merge(policy: Policy, lists: &[&[Hint]], all: NumaMask, distances: Option<&Distances>) -> Hint {
    if policy == Policy::None {
        return Hint { nodes: None, preferred: false };
    }
    let single = policy == Policy::SingleNumaNode;
    let lists: Vec<Choices> = lists.iter().map(|list| Choices::new(list, single)).collect();
    if let Some(nodes) = best_preferred(&lists, all, distances) {
        // Upstream: all nodes are any nodes, for this policy.
        let nodes = Some(nodes).filter(|nodes| !single || *nodes != all);
        return Hint { nodes, preferred: true };
    }
    if single {
        // Hints of one node each have no other intersection than that node.
        return Hint { nodes: None, preferred: false };
    }
    if all.len() > DENSE_NODES {
        return Hint { nodes: None, preferred: false };
    }
    Hint { nodes: Some(best_other(&lists, all, distances).unwrap_or(all)), preferred: false }
}

/// The hints of one resource.
struct Choices {
    /// Whether any nodes will do, and that is preferred.
    any_preferred: bool,
    preferred: BTreeSet<NumaMask>,
    /// Whether any nodes will do.
    any: bool,
    sets: BTreeSet<NumaMask>,
}

impl Choices {
    fn new(list: &[Hint], single: bool) -> Choices {
        let usable =
            |hint: &&Hint| !single || (hint.preferred && hint.nodes.is_none_or(|nodes| nodes.len() == 1));
        let preferred = || list.iter().filter(|hint| hint.preferred).filter(usable);
        let mut choices = Choices {
            any_preferred: preferred().any(|hint| hint.nodes.is_none()),
            preferred: preferred().filter_map(|hint| hint.nodes).collect(),
            any: list.iter().filter(usable).any(|hint| hint.nodes.is_none()),
            sets: list.iter().filter(usable).filter_map(|hint| hint.nodes).collect(),
        };
        // Upstream: an empty list counts as any nodes, not preferred.
        choices.any |= list.is_empty() && !single;
        choices
    }
}

/// The best set that is in all lists as a preferred one. A list in which any nodes are preferred
/// allows each set.
fn best_preferred(lists: &[Choices], all: NumaMask, distances: Option<&Distances>) -> Option<NumaMask> {
    let mut strict = lists.iter().filter(|list| !list.any_preferred);
    let common: BTreeSet<NumaMask> = match strict.next() {
        Some(first) => {
            let mut common = first.preferred.clone();
            strict.for_each(|list| common.retain(|nodes| list.preferred.contains(nodes)));
            common
        }
        None => lists.iter().flat_map(|list| &list.preferred).copied().chain([all]).collect(),
    };
    let usable = common.into_iter().map(|nodes| nodes.and(all)).filter(|nodes| !nodes.is_empty());
    usable.min_by(|left, right| compare(*left, *right, distances))
}

/// The best intersection of one set of each list: with as many nodes as the resource with the
/// largest minimum needs, else with fewer, but as many as possible, else with more, but as few as
/// possible (Go: `BestNonPreferredAffinityCount`).
fn best_other(lists: &[Choices], all: NumaMask, distances: Option<&Distances>) -> Option<NumaMask> {
    let narrowest = |list: &Choices| list.sets.iter().map(|nodes| nodes.len()).min();
    let wanted = lists.iter().filter_map(narrowest).max().unwrap_or(0);
    let rank = |nodes: NumaMask| match nodes.len().cmp(&wanted) {
        Ordering::Equal => (0, 0),
        Ordering::Less => (1, wanted - nodes.len()),
        Ordering::Greater => (2, 0),
    };
    reachable(lists, all)
        .into_iter()
        .filter(|nodes| !nodes.is_empty())
        .min_by(|left, right| rank(*left).cmp(&rank(*right)).then_with(|| compare(*left, *right, distances)))
}

/// All intersections of one set of each list with `all`, which has at most [`DENSE_NODES`] nodes.
fn reachable(lists: &[Choices], all: NumaMask) -> Vec<NumaMask> {
    let numbers: Vec<u32> = all.iter().collect();
    let index_of = |nodes: NumaMask| {
        let bits = numbers.iter().enumerate().filter(|(_, number)| nodes.contains(**number));
        bits.fold(0_usize, |index, (bit, _)| index | 1 << bit)
    };
    let mut table = NodeSets::new(numbers.len());
    table.set(index_of(all));
    for list in lists {
        let mut other = NodeSets::new(numbers.len());
        list.sets.iter().for_each(|nodes| other.set(index_of(*nodes)));
        if list.any {
            other.set(index_of(all));
        }
        table.intersect(other);
    }
    let nodes_of = |index: usize| {
        let bits = numbers.iter().enumerate().filter(|(bit, _)| index & (1 << bit) != 0);
        NumaMask::from_numbers(bits.map(|(_, number)| *number))
    };
    table.indices().map(nodes_of).collect()
}

/// Which of the 2ⁿ sets of n nodes there are. An index is a set: bit i is the i-th node.
struct NodeSets {
    bits: usize,
    counts: Vec<u32>,
}

impl NodeSets {
    fn new(bits: usize) -> NodeSets {
        NodeSets { bits, counts: vec![0; 1 << bits] }
    }

    fn set(&mut self, index: usize) {
        if let Some(count) = self.counts.get_mut(index) {
            *count = 1;
        }
    }

    fn indices(&self) -> impl Iterator<Item = usize> {
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(index, _)| index)
    }

    /// Replaces the sets by all intersections of one of them with one of `other`.
    ///
    /// A pair's intersection contains a set exactly if both do. So after counting, for each set,
    /// its supersets, the products count the pairs; taking the counts apart again gives the number
    /// of pairs for each intersection. The numbers stay below 2²⁴.
    fn intersect(&mut self, mut other: NodeSets) {
        self.combine(u32::wrapping_add);
        other.combine(u32::wrapping_add);
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.wrapping_mul(*more);
        }
        self.combine(u32::wrapping_sub);
        self.counts.iter_mut().for_each(|count| *count = u32::from(*count > 0));
    }

    /// For each bit, adds (or subtracts) the count of each set with it to that of the same set
    /// without it.
    fn combine(&mut self, operation: fn(u32, u32) -> u32) {
        for bit in 0..self.bits {
            for block in self.counts.chunks_mut(2 << bit) {
                let (without, with) = block.split_at_mut(1 << bit);
                for (count, more) in without.iter_mut().zip(with) {
                    *count = operation(*count, *more);
                }
            }
        }
    }
}
