//! Volumes: what a pod mounts, made ready on the node and cleaned up afterwards.
//!
//! Owns: everything below `<root-dir>/pods/<uid>/{volumes,volume-subpaths}`, the `ready` markers
//! beside it, and the removal of directories of pods that are in no source any more. Threads:
//! `vol/<uid8>` for an operation on a file system that may hang; `vol/teardown` for volumes of one
//! pod that are unmounted at the same time; `csi` and `csi/visit`, which have CSI
//! drivers measure their volumes; `vol/unmount` and `vol/size` for one call on a file server;
//! `vol/release` while a pod with such a volume is stopped. The pod's worker waits for the
//! thread up to two minutes, and continues with the pod's other volumes meanwhile. All other calls
//! block the worker, for a few system calls on the agent's own file system. Invariants: only
//! volumes that a container refers to are made, each once; a failed volume is not retried before
//! the end of its back-off, unless another volume of its pod has become ready since; one operation
//! per volume at a time; no walk in a volume follows a link out of it; removal never follows a link
//! and never enters another file system; nothing is removed below a mount that could not be
//! unmounted. This room has no reconciler. The desired state is the pod's specification, the actual
//! state is in the table of `actual`, on the disk and in the mount table, and each pod's worker
//! compares them when something happens (DIFFERS: the Go kubelet polls every 100 ms). Go
//! counterpart: pkg/kubelet/volumemanager, pkg/volume/{emptydir,hostpath,downwardapi,
//! configmap,secret,projected}, pkg/volume/util, pkg/volume/util/subpath.

mod actual;
mod atomic_writer;
mod attachment;
mod config_map;
pub mod csi;
mod downward_api;
mod empty_dir;
mod error;
mod file_owner;
mod files;
#[cfg(test)]
pub(crate) mod fuzz;
mod group_marker;
mod host_path;
pub mod kind;
mod manager;
mod mounts;
mod operations;
mod orphans;
mod ownership;
mod paths;
mod persistent;
mod plugin;
mod plugin_table;
mod progress;
mod projected;
mod queue;
mod refresh;
mod release;
mod retries;
mod secret;
mod selinux;
mod selinux_labels;
mod setup;
mod sub_path;
mod teardown;
#[cfg(test)]
mod testing;
mod unmount;
mod volume_status;
mod waker;

pub use attachment::{AttachmentWait, Controller, NodeVolumes};
pub use error::{ToolError, VolumeError};
pub use manager::{Deps, Settings, SlowOperation, UnremovedPod, Volumes};
pub use mounts::{Mount, table_of};
pub use orphans::OrphanReport;
pub use progress::VolumeState;
pub use release::StopWatcher;
pub use setup::plugins;
pub use unmount::{HungCall, hung_calls};
pub use volume_status::VolumeStatus;
pub use waker::Waker;
