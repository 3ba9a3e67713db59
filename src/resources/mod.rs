//! The machine under the node: its memory, processors, huge pages, cgroups and disks, what this
//! process uses of them, and what pods use of them ([`stats`]).
//!
//! Owns: only the last samples of `stats`. Except in `iptables`, each function reads kernel files
//! or makes one system call. The roots of `/proc` and `/sys` are parameters, so that tests can pass
//! their own. Threads: `stats`, during a statistics request to the runtime (see [`stats`]). Absent
//! on purpose: the making of cgroups (`cgroups`), eviction and device plugins. Go
//! counterpart: pkg/kubelet/cm (facts only), cadvisor's machine package.

pub mod cgroups;
mod controllers;
pub mod disk;
#[cfg(test)]
pub(crate) mod fuzz;
pub mod iptables;
mod kernel_files;
pub mod machine;
pub mod oom;
pub mod own;
pub mod preflight;
pub mod stats;
pub mod system;
pub mod tunables;

pub use kernel_files::{ResourceError, Roots};
