//! Evicts pods when the node runs out of memory, disk space, inodes or process ids, and pods that
//! exceed limits of their own (Go: pkg/kubelet/eviction).
//!
//! Owns: the history of thresholds ([`EvictionManager`]) and the descriptors of the kernel ([`kernel`]).
//! Thread: `evict`, if there is a threshold or a limit of local storage. In: the configuration,
//! statistics, the pods, signals of the kernel, the ends of evicted pods. Out: the conditions of the
//! node ([`LatestReport`]), orders to end pods and to free space, events, metrics. Everything but
//! `thread` and `kernel` is pure. Read [`driver`] first, then [`pass`] and [`state`]; [`watch`]
//! explains how a shortage of memory is noticed on an idle node.
//!
//! Invariants: a pass evicts at most one pod for a threshold; critical pods are never evicted; a
//! pass acts only on statistics that the last one did not act on; all sums saturate, as the numbers
//! and requests of a pod are its author's. Absent on purpose: the conditions' texts (`node`), the
//! end of a pod (`pods`), images and dead containers (`runtime`), preemption (`pods::admission`).

#[cfg(test)]
mod admit;
pub mod driver;
#[cfg(test)]
pub(crate) mod fuzz;
#[cfg(test)]
mod golden_tests;
pub mod kernel;
mod layout;
mod local;
pub mod notify;
mod observations;
pub mod pass;
pub mod psi;
mod rank;
mod report;
mod signal;
pub mod state;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod texts;
mod thread;
mod thresholds;
#[cfg(test)]
mod upstream_tests;
mod usage;
mod victim;
pub mod watch;

pub use layout::{FsStatsType, Layout, Reclaim};
pub use local::is_limited;
pub use observations::{Observation, Observations, Swap, observations};
pub use pass::{Action, EvictionManager, Outcome, Settings, Shortage};
pub use report::{LatestReport, Report, ThresholdStatus};
pub use signal::{Pressure, Pressures, Resource, Signal};
pub use state::{Decision, State, step};
pub use thread::{Deps, ImageDirectories, ImageDirectoriesError, spawn};
pub use thresholds::{Problem, Threshold, Value, ignored_fields, thresholds, with_container_fs};
pub use victim::Victim;
