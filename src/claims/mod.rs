//! The resource claims of the node's pods: dynamic resource allocation (Go: pkg/kubelet/cm/dra).
//!
//! Owns: which pods use which claims, the devices of these claims, and the state file.
//! Invariants: no lock is held while a driver or the API server is called; the state file is
//! written before a driver is called and before its devices are used; what a driver sends is
//! limited.

pub mod answer;
pub mod api;
pub mod books;
pub mod drivers;
pub mod health;
pub mod info;
pub mod manager;
pub mod names;
pub mod object;
pub mod state_file;
#[cfg(test)]
pub(crate) mod testing;
pub mod wipes;
