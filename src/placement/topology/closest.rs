//! Which of two sets of NUMA nodes is better (Go: `NUMAInfo.Narrowest`, `NUMAInfo.Closest`).

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::settings::TopologyError;
use crate::placement::numa::NumaMask;
use crate::placement::numa_nodes::NumaNode;

/// Distances between NUMA nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Distances(BTreeMap<(u32, u32), u64>);

impl Distances {
    /// The distances of `nodes`, which are in the order of their numbers.
    ///
    /// DIFFERS: the kernel writes the distances to the existing nodes in order. Upstream takes the
    /// number of a node for its place in that list, and panics if numbers are missing.
    ///
    /// # Errors
    /// When a node has no list, or one that does not have all nodes.
    pub fn new(nodes: &[NumaNode]) -> Result<Distances, TopologyError> {
        let mut found = BTreeMap::new();
        for from in nodes {
            let list = from.distances.as_deref().filter(|list| list.len() >= nodes.len());
            let list = list.ok_or(TopologyError::NoDistances { node: from.number })?;
            found.extend(nodes.iter().zip(list).map(|(to, distance)| ((from.number, to.number), *distance)));
        }
        Ok(Distances(found))
    }

    /// The sum over all pairs. Sets of the same size are in the order of their averages.
    fn sum(&self, mask: NumaMask) -> u64 {
        let pairs = mask.iter().flat_map(|from| mask.iter().map(move |to| (from, to)));
        let distances = pairs.map(|pair| self.0.get(&pair).copied().unwrap_or(0));
        distances.fold(0, u64::saturating_add)
    }
}

/// Less is better: fewer nodes, then shorter distances if they count, then lower numbers.
pub(super) fn compare(left: NumaMask, right: NumaMask, distances: Option<&Distances>) -> Ordering {
    let far = |mask| distances.map(|distances| distances.sum(mask));
    left.len()
        .cmp(&right.len())
        .then_with(|| if left == right { Ordering::Equal } else { far(left).cmp(&far(right)) })
        .then(left.cmp(&right))
}
