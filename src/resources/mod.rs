//! The machine under the node: its memory, processors, huge pages, cgroups and disks, what this
//! process uses of them, and what pods use of them ([`stats`]).
//!
//! Owns: only the last samples of `stats`. Except in `iptables`, each function reads kernel files
//! or makes one system call. The roots of `/proc` and `/sys` are parameters, so that tests can pass
//! their own. Threads: `stats`, during a statistics request to the runtime (see [`stats`]). Absent
//! on purpose: the making of cgroups (`cgroups`), eviction and device plugins. Go
//! counterpart: pkg/kubelet/cm (facts only), cadvisor's machine package.

pub(crate) mod agent_use;
pub(crate) mod cgroups;
pub(crate) mod compliance;
mod controllers;
pub(crate) mod disk;
#[cfg(test)]
pub(crate) mod fuzz;
pub(crate) mod iptables;
mod kernel_files;
pub(crate) mod machine;
pub(crate) mod network;
pub(crate) mod oom;
pub(crate) mod preflight;
pub(crate) mod small_machine;
pub(crate) mod stats;
pub(crate) mod system;
pub(crate) mod tunables;

pub(crate) use kernel_files::ResourceError;
pub use kernel_files::Roots;
