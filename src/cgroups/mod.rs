//! Cgroups of the node, the tiers and the pods (Go: pkg/kubelet/cm).
//!
//! Owns: the names of cgroups with both drivers ([`Layout`]), their values (`pod`, `tiers`, `node`,
//! pure), the order of a resize (`resize`, pure), and the access to them ([`Cgroups`]).
//! Threads: none; each operation runs on the caller's thread and may block on the kernel or systemd.
//! In: pods with the resources that they were granted, the capacity, settings.
//! Out: values and steps as data; files of the kernel; requests to systemd over D-Bus.
//! Invariants: only cgroups in `kubepods` below `cgroupRoot` are made or removed; others are changed
//! only if the configuration names them and they exist; no link is followed; a file that has its
//! value is not written; each call is bounded in time and memory, whatever containers have made.
//! Absent on purpose: the cgroups of containers, which the runtime makes; statistics (`resources`);
//! resource managers; the decision when to call this.

mod access;
mod dir;
mod error;
#[cfg(test)]
mod fake;
mod files;
#[cfg(test)]
mod golden_tests;
pub mod names;
pub mod node;
pub mod pod;
pub mod processes;
mod reap;
pub mod resize;
mod sent;
mod systemd;
#[cfg(test)]
mod systemd_tests;
#[cfg(test)]
mod tests;
pub mod tiers;
pub mod units;
mod v1;
mod v2;
pub mod values;

pub use access::{CgroupWrites, Cgroups, PodCgroup};
pub use error::CgroupError;
pub use names::{Driver, Layout, Name};
pub use values::Values;

pub use crate::util::cgroup_mounts as mounts;
