//! Sets of NUMA nodes, and the hints that resource managers give for them.

/// A set of NUMA nodes, by their number, which is below 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct NumaMask(pub u64);

impl NumaMask {
    /// The nodes in `numbers`. Numbers above 63 are left out.
    pub fn from_numbers(numbers: impl IntoIterator<Item = u32>) -> NumaMask {
        let bit = |number: u32| 1_u64.checked_shl(number).unwrap_or(0);
        NumaMask(numbers.into_iter().map(bit).fold(0, |mask, bit| mask | bit))
    }

    /// The nodes in both.
    #[must_use]
    pub fn and(self, other: NumaMask) -> NumaMask {
        NumaMask(self.0 & other.0)
    }

    /// How many nodes it has.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether it has no node.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether it has the node `number`.
    #[must_use]
    pub fn contains(self, number: u32) -> bool {
        1_u64.checked_shl(number).is_some_and(|bit| self.0 & bit != 0)
    }

    /// The nodes' numbers, ascending.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        (0..64).filter(move |number| self.contains(*number))
    }
}

/// Where a resource can be taken from (Go: pkg/kubelet/cm/topologymanager, `TopologyHint`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hint {
    /// `None`: any nodes.
    pub nodes: Option<NumaMask>,
    /// Whether no smaller set of nodes would do.
    pub preferred: bool,
}
