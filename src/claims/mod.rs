//! The resource claims of the node's pods: dynamic resource allocation (Go: pkg/kubelet/cm/dra).
//!
//! Owns: which pods use which claims, the devices of these claims, and the state file.
//! Invariants: no lock is held while a driver or the API server is called; the state file is
//! written before a driver is called and before its devices are used; what a driver sends is
//! limited.
//! Threads: `claims` cleans up after pods and drivers that are gone; `dra/<driver>`, one per instance
//! of a driver, reads its health reports. Calls run on the threads of pods.
//! Absent on purpose: the choice of devices (the scheduler's), and ResourceSlices (the drivers').

pub mod api;
pub mod client;
pub mod drivers;
pub mod health;
pub mod info;
pub mod manager;
pub mod names;
pub mod object;
mod rate_limit;
mod registration;
pub mod response;
pub mod state;
pub mod state_file;
#[cfg(test)]
pub(crate) mod testing;
mod thread;
pub mod wipes;

pub use manager::{ClaimError, Failure, ResourceClaims, Settings};
pub use thread::Active;
