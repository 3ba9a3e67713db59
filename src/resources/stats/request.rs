//! What a page needs of a collection.

use std::time::Duration;

/// Numbers of a collection are returned again for this time.
pub(super) const FRESH: Duration = Duration::from_secs(1);

/// How much there is to find out; each includes what is before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// Processors and memory.
    Basic,
    /// Also file systems, networks, processes and volumes.
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub depth: Depth,
    /// Whether the details of `/metrics/cadvisor` are needed.
    pub details: bool,
    /// Whether a first question waits for a second sample, so that there are rates.
    pub rates: bool,
}

impl Wanted {
    pub const SUMMARY: Wanted = Wanted { depth: Depth::Full, details: false, rates: true };
    /// For `/stats/summary?only_cpu_and_memory=true`, and for people.
    pub const BRIEF: Wanted = Wanted { depth: Depth::Basic, details: false, rates: true };
    pub const RESOURCE: Wanted = Wanted { depth: Depth::Basic, details: false, rates: false };
    pub const CADVISOR: Wanted = Wanted { depth: Depth::Full, details: true, rates: false };

    /// Whether the answer to `other` answers this, too. One with more depth does not: what it
    /// has beyond the question would be shown.
    pub(super) fn is_met_by(self, other: Wanted) -> bool {
        self.depth == other.depth && self.details <= other.details && self.rates <= other.rates
    }
}
