//! Room `pods`: one worker thread per pod applies the pod's manifest (Go: podWorkers, SyncPod).
//!
//! Owns: start, updates and end of each pod. The `sync` thread owns [`workers::Workers`]; each
//! worker owns its [`lifecycle::Lifecycle`], its failure reasons and its timer.
//! In: one mailbox per pod: the newest pod replaces older ones, a kill is never lost, and the
//! grace period only gets shorter. Out: statuses, events, and reports of workers that ended.
//! Invariants: at most one thread per UID; two static pods of one full name never run at the same
//! time; a terminating pod never runs again.
//! [`allocation::Allocations`], the CPU and memory that pods were granted, is shared with `sync`.
//! Absent on purpose: several flags for the state of a pod; a pod has exactly one phase.

mod active_clock;
pub mod admission;
pub mod allocation;
pub mod assignments;
pub mod cgroups;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod lifecycle;
pub mod mirror;
pub mod plan;
mod start_clock;
mod worker;
pub mod workers;

pub use worker::{Deps, Settings, WorkerPhase, WorkerReport};
