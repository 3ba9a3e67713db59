//! Which sets of NUMA nodes can hold a request.

use std::collections::BTreeMap;

use super::requests::Bytes;
use super::tables::{MEMORY, NodeState, Nodes, Table, sum};
use crate::placement::numa::{Hint, NumaMask};

/// How many sets of nodes are examined for one request: all of them on up to 12 nodes.
///
/// DIFFERS: upstream examines all sets, 2ⁿ on n nodes. Here the sets with the fewest nodes come
/// first, and on larger machines the large sets are left out.
const MOST_SETS: usize = 1 << 12;

/// The sets of nodes that can hold `requested`, smallest first; the smallest sets that could hold
/// it on an empty machine are preferred (Go: `calculateHints`). `reusable` is what the pod's
/// init containers leave on exactly this set.
pub(super) fn possible(
    nodes: &Nodes,
    requested: &Bytes,
    reusable: impl Fn(NumaMask, &str) -> u64,
) -> Vec<Hint> {
    let numbers: Vec<u32> = nodes.keys().copied().collect();
    // By number: the node, and what it has of each resource in the order of `requested`.
    let none = Table::default();
    let tables = |node: &NodeState| -> Vec<Table> {
        requested.keys().map(|name| *node.tables.get(name).unwrap_or(&none)).collect()
    };
    let rows: BTreeMap<u32, (&NodeState, Vec<Table>)> =
        nodes.iter().map(|(number, node)| (*number, (node, tables(node)))).collect();
    let rows_of = |mask: NumaMask| mask.iter().filter_map(|number| rows.get(&number));
    let total = |mask: NumaMask, index: usize, number: fn(&Table) -> u64| {
        let amounts = rows_of(mask).filter_map(|(_, tables)| tables.get(index)).map(number);
        amounts.fold(0, u64::saturating_add)
    };
    let mut smallest = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
    let mut found = Vec::new();
    for mask in sets(&numbers).take(MOST_SETS) {
        let mut amounts = requested.values().enumerate();
        if amounts.any(|(index, bytes)| total(mask, index, |table| table.allocatable) < *bytes) {
            continue;
        }
        smallest = smallest.min(mask.len());
        let in_group = |node: &NodeState| match mask.len() {
            1 => node.cells.len() > 1,
            _ => node.assignments > 0 && node.cells != mask,
        };
        if rows_of(mask).any(|(node, _)| in_group(node)) {
            continue;
        }
        let fits = |(index, (name, bytes)): (usize, (&String, &u64))| {
            let free = total(mask, index, |table| table.free);
            free >= *bytes || free.saturating_add(reusable(mask, name)) >= *bytes
        };
        if requested.iter().enumerate().all(fits) {
            found.push(mask);
        }
    }
    found.into_iter().map(|mask| Hint { nodes: Some(mask), preferred: mask.len() == smallest }).collect()
}

/// The best of these hints: a preferred one, then the one with the fewest nodes, then with the
/// lowest numbers (Go: `findBestHint`).
pub(super) fn best(hints: impl IntoIterator<Item = Hint>) -> Option<(NumaMask, bool)> {
    let known = hints.into_iter().filter_map(|hint| Some((hint.nodes?, hint.preferred)));
    known.min_by_key(|(nodes, preferred)| (!preferred, nodes.len(), *nodes))
}

/// Whether `mask` has enough free for `requested`.
pub(super) fn satisfies(nodes: &Nodes, mask: NumaMask, requested: &Bytes) -> bool {
    requested.iter().all(|(name, bytes)| sum(nodes, mask, name, |table| table.free) >= *bytes)
}

/// Hints apply to memory: huge pages never come without it.
pub(super) fn requests_memory(requested: &Bytes) -> bool {
    requested.contains_key(MEMORY)
}

/// All sets of these numbers that are not empty, the smaller ones first.
fn sets(numbers: &[u32]) -> impl Iterator<Item = NumaMask> + '_ {
    (1..=numbers.len()).flat_map(|size| Sets { numbers, positions: (0..size).collect(), done: false })
}

/// The sets of one size, in the order of their numbers.
struct Sets<'a> {
    numbers: &'a [u32],
    /// The positions of the next set's members in `numbers`, ascending.
    positions: Vec<usize>,
    done: bool,
}

impl Iterator for Sets<'_> {
    type Item = NumaMask;

    fn next(&mut self) -> Option<NumaMask> {
        if self.done {
            return None;
        }
        let mask = NumaMask::from_numbers(
            self.positions.iter().filter_map(|position| self.numbers.get(*position).copied()),
        );
        // The last position that can grow; all after it follow closely.
        let size = self.positions.len();
        let room = self.numbers.len().saturating_sub(size);
        let last = self.positions.iter().enumerate().rposition(|(index, position)| *position < index + room);
        match last.and_then(|last| Some((last, *self.positions.get(last)?))) {
            Some((last, position)) => {
                let later = self.positions.iter_mut().skip(last).zip(position + 1..);
                later.for_each(|(position, next)| *position = next);
            }
            None => self.done = true,
        }
        Some(mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_come_in_upstreams_order() {
        let found: Vec<Vec<u32>> = sets(&[0, 2, 5]).map(|mask| mask.iter().collect()).collect();
        let expected: [&[u32]; 7] = [&[0], &[2], &[5], &[0, 2], &[0, 5], &[2, 5], &[0, 2, 5]];
        assert_eq!(found, expected);
        let numbers: Vec<u32> = (0..8).collect();
        let all: std::collections::BTreeSet<NumaMask> = sets(&numbers).collect();
        assert_eq!((all.len(), sets(&numbers).count()), (255, 255));
        assert_eq!(sets(&[]).count(), 0);
    }
}
