//! CSI: volumes of storage drivers, the node's side (Go: pkg/volume/csi).
//!
//! - `registry`: the drivers on this node, their names, sockets and capabilities. `node_info` is
//!   what the Node and CSINode objects show of them; `announce` writes these objects.
//! - `stage`, `publish`, `block`, `remove`, `expand`: the life of a volume. The disk is the record:
//!   `vol_data.json` is written before the driver is called, and removed after the driver has
//!   undone the call. So an agent that was killed at any step finds what it must repeat or undo.
//! - `driver`: the calls of a driver, behind a trait; `client` sends them over gRPC.
//! - `visits`: the thread that has the drivers measure their volumes (`measure`), and asks them again
//!   how many volumes the node may have.
//! - `rebuild`: what a start finds on the disk; `lost` and `recover`: which volume it is if a
//!   record is damaged.
//!
//! Invariants: a driver is called from the thread of the volume's operation, and each call has a
//! deadline; operations on one volume never overlap, also those of several pods, except for walks
//! through its files, which are the last step of a set-up; a directory is
//! removed only if it is empty and nothing is mounted there; secrets are in no log, error or
//! `Debug` output.

mod announce;
mod block;
mod client;
mod cluster;
mod driver;
mod error;
mod expand;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod fault_tests;
mod lost;
mod measure;
#[cfg(test)]
mod model_tests;
mod mounter;
mod names;
mod node_info;
mod publish;
mod rebuild;
mod record;
mod recover;
mod registry;
mod remove;
mod request;
#[cfg(test)]
mod room_tests;
mod selinux;
mod stage;
#[cfg(test)]
mod tests;
mod turns;
mod users;
mod versions;
mod visits;
mod volume;
mod wanted;

pub use announce::NodeObjects;
pub use client::{GrpcDriver, connect};
pub use cluster::{Attached, Cluster, ClusterError, NoCluster, PodCluster, TokenText};
pub use driver::{
    Abilities, Capability, Code, Driver, DriverError, DriverNode, Expand, Pairs, Publish, Secrets, Stage,
    Usage, VolumeStats,
};
pub use measure::OfPod;
pub use mounter::{KernelMounter, Mounter};
pub(crate) use names::DIRECTORY;
pub use names::{attachment_name, inline_handle};
pub use node_info::{
    Allocatable, CsiNodeEntry, NODE_ID_ANNOTATION, NodeChanges, compose_csi_node, node_changes,
};
pub use rebuild::{Found, find};
pub use registry::{NodeInfo, RegisteredDriver, Registry};
pub use request::{Lifecycle, PodFacts, Wanted};
pub(crate) use selinux::FileContext;
pub use selinux::Labels;
pub use visits::{VisitSettings, Visits};
pub use volume::{Csi, CsiSettings, CsiVolume};
