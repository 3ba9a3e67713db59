//! coracle: a Kubernetes node agent (a kubelet) on OS threads.
//!
//! Read `docs/architecture.md`, then `agent/wiring.rs`, `sync/core.rs` and `pods/plan/`.
//! The modules below are the rooms, from the ground up; `tests/tidy.rs` enforces which
//! room may import which.

// layer 0
pub mod model;
pub mod util;
// layer 1
pub mod config;
pub mod cri;
pub mod kube;
pub mod offline;
pub mod transport;
// layer 2
pub mod images;
pub mod join;
pub mod tracing;
// layer 3
pub mod cgroups;
pub mod claims;
pub mod devices;
pub(crate) mod observe;
pub mod placement;
pub mod plugins;
pub(crate) mod probes;
pub(crate) mod resources;
pub mod runtime;
pub(crate) mod sources;
pub mod status;
pub mod volumes;
// layer 4
pub mod eviction;
pub mod node;
pub mod pods;
// layer 5
pub(crate) mod server;
pub(crate) mod sync;
// layer 6
pub mod agent;
pub mod cli;

/// Readers of the kernel's files, for tests/differential only.
#[doc(hidden)]
pub mod kernel_readers {
    pub use crate::resources::Roots;
    pub use crate::resources::cgroups::{CgroupHierarchies, Version};
    pub use crate::resources::machine::{CpuTopology, Dimms, HugePages, Machine, dimms};
    pub use crate::resources::stats::sample::{DiskStatKind, Numbers, Operation, PsiData, PsiStats};
    pub use crate::resources::stats::{network, numbers};
}

#[cfg(test)]
mod fuzz;
