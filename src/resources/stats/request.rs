//! The numbers that a page requests from a collection.

use std::time::Duration;

/// The numbers of a collection are cached for this time.
pub(super) const FRESH: Duration = Duration::from_secs(1);

/// The amount of numbers to collect; each value includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Depth {
    /// Processors and memory.
    Basic,
    /// Also file systems, networks, processes and volumes.
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StatsRequest {
    pub depth: Depth,
    /// Whether the details of `/metrics/cadvisor` are needed.
    pub details: bool,
    /// Whether the first request waits for a second sample, so that rates can be computed.
    pub rates: bool,
}

impl StatsRequest {
    pub(crate) const SUMMARY: StatsRequest = StatsRequest { depth: Depth::Full, details: false, rates: true };
    /// For `/stats/summary?only_cpu_and_memory=true`, and for the command line.
    pub(crate) const BRIEF: StatsRequest = StatsRequest { depth: Depth::Basic, details: false, rates: true };
    pub(crate) const RESOURCE: StatsRequest =
        StatsRequest { depth: Depth::Basic, details: false, rates: false };
    /// For evictions that need pods' use of disks.
    pub(crate) const EVICTION: StatsRequest =
        StatsRequest { depth: Depth::Full, details: false, rates: false };
    pub(crate) const CADVISOR: StatsRequest =
        StatsRequest { depth: Depth::Full, details: true, rates: false };

    /// Whether the numbers collected for `other` can be used for this request. Those of a greater
    /// depth cannot: the additional ones would be shown.
    pub(super) fn is_met_by(self, other: StatsRequest) -> bool {
        self.depth == other.depth && self.details <= other.details && self.rates <= other.rates
    }
}
