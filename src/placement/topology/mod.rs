//! Admission of pods by the NUMA nodes of their resources (Go: pkg/kubelet/cm/topologymanager).
//!
//! Owns: the policy and the distances between nodes. The state of resources is with the
//! [`Provider`]s. Threads: none; the caller serializes admissions. In: a pod and the providers in
//! the order devices, CPUs, memory. Out: an [`Outcome`], and allocations in the providers.
//! Invariants: the work of a merge is bounded by the number of hints and by 2^[`DENSE_NODES`], not
//! by the product of the lists ([`merge`]). Absent on purpose: a store of the chosen hints: they
//! are passed to `allocate`, which is their only use.

mod admit;
mod closest;
mod merge;
mod settings;

#[cfg(test)]
mod tests;

pub use admit::{AllocateError, Candidate, Denial, EMPTY_POOL, Hints, Outcome, Provider, is_guaranteed};
pub use closest::Distances;
pub use merge::{DENSE_NODES, merge};
pub use settings::{MAX_NUMA_NODES, Options, Policy, Scope, TopologyError, TopologyManager};
