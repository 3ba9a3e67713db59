//! The status of each pod: composed, stored, and compared with the previous one.
//!
//! Owns: [`StatusCache`], the last status that this agent computed for every pod; only [`publish`]
//! has the statuses that the API server shows.
//! Threads: `status`, which reports to the API server; readers of the cache may wait for a newer
//! version. Inbox of `status`: the pods as the API server shows them, by UID.
//! Inputs: the worker of a pod calls [`compose`] with its inspection and the verdicts of probes and
//! stores the result. Only the thread does I/O or reads a clock.
//! Invariants: a stored phase never leaves Succeeded or Failed; a start time never changes;
//! versions only grow; a condition's transition time changes only with its status; times
//! have no fractions of seconds; the end of a pod is reported when none of its containers runs.
//! Go counterpart: pkg/kubelet/kubelet_pods.go (generateAPIPodStatus) and
//! pkg/kubelet/status (manager, generators).

mod cache;
mod compose;
mod condition_types;
mod conditions;
mod containers;
mod ended;
mod feed;
mod inputs;
mod merge;
mod phase;
pub mod publish;
mod resources;
mod restart_all;
mod strategic;
#[cfg(test)]
mod tests;
mod transitions;

pub use cache::StatusCache;
pub use compose::{Deadline, active_deadline, compose, known_start, pod_ips, start_time};
pub use conditions::{disrupt, gates_differ};
pub use feed::{Change, Feed};
pub use inputs::{Inputs, NodeAddresses, StartReason};
pub use merge::Activity;
pub use phase::is_terminal;
pub use strategic::patch as status_patch;
