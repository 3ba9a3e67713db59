//! CSI: volumes of storage drivers, the node's side (Go: pkg/volume/csi).
//!
//! - `volume`: the front. A set-up is its function `mount`: `prepare` finds the driver and the attachment,
//!   `stage` mounts the volume on the node, `publish` mounts it for the pod (`block` has both steps for
//!   devices), `expand` grows it, and `fs_group` gives its files to the group of the pod.
//! - `remove`, `remove_block`: the other end of a volume's life, with the calls in `undo`. The disk is the
//!   record: `vol_data.json` is written before the driver is called, and removed after the driver has
//!   undone the call. So an agent that was killed at any step finds what it must repeat or undo.
//! - `state`: what all operations share. `rebuild` is what a start finds on the disk; `damaged` and
//!   `recover`: which volume it is if a record is damaged.
//! - `registry`: the drivers on this node, their names, sockets and capabilities. `node_info` is
//!   what the Node and CSINode objects show of them; `announce` writes these objects.
//! - `driver`: the calls of a driver, behind a trait; `client` sends them over gRPC.
//! - `visits`: the thread that has the drivers measure their volumes (`measure`), and asks them again
//!   how many volumes the node may have.
//!
//! Invariants: a driver is called from the thread of the volume's operation, and each call has a
//! deadline; operations on one volume never overlap, also those of several pods, except for walks
//! through its files, which are the last step of a set-up; a directory is
//! removed only if it is empty and nothing is mounted there; secrets are in no log, error or
//! `Debug` output. No file imports one that imports it, also not through others.

mod announce;
mod block;
mod client;
mod cluster;
mod damaged;
mod dirs;
mod driver;
mod error;
mod expand;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod fault_tests;
mod from_pod;
mod fs_group;
mod key_mutex;
mod measure;
mod measured;
#[cfg(test)]
mod model_tests;
mod mounter;
mod names;
mod node_info;
mod prepare;
mod publish;
mod rebuild;
mod record;
mod recover;
mod registry;
mod remove;
mod remove_block;
mod request;
#[cfg(test)]
mod room_tests;
#[cfg(test)]
mod selinux_label_tests;
mod stage;
mod state;
#[cfg(test)]
mod tests;
mod undo;
mod users;
mod versions;
mod visits;
mod volume;

pub use announce::{AnnounceError, NodeObjects};
pub use client::connect;
pub use cluster::{Cluster, NoCluster, PodCluster};
pub use driver::{Usage, VolumeStats};
pub use measured::MeasuredVolume;
pub use mounter::KernelMounter;
pub(crate) use names::DIRECTORY;
pub use registry::Registry;
pub use state::{Csi, CsiSettings};
pub use visits::{VisitSettings, Visits};
pub use volume::CsiVolume;
