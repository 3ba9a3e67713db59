//! One worker thread per pod brings it to the state of the manifest (Go: podWorkers, SyncPod).
//!
//! Owns: the life of each pod. [`workers::Workers`] is a plain value that the `sync`
//! thread owns; each worker owns its [`lifecycle::Lifecycle`], its reasons and its timer.
//! In: one mailbox per pod (newest pod wins, a kill beats an update, grace only shrinks).
//! Out: statuses, events, and the reports that a worker ended.
//! Invariants: at most one thread per UID; two static pods of one full name never run
//! together; a pod never goes back from terminating to running.
//! [`allocation::Allocations`] is shared with `sync`: the CPU and memory that pods were granted.
//! Absent on purpose: predicates over several flags; there is one phase.

pub mod admission;
pub mod allocation;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod lifecycle;
pub mod mirror;
pub mod plan;
mod start_clock;
mod worker;
pub mod workers;

pub use worker::{Deps, Settings};
