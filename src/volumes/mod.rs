//! Volumes: what a pod mounts, made ready on the node and cleaned up afterwards.
//!
//! Owns: everything below `<root-dir>/pods/<uid>/{volumes,volume-subpaths}`, the `ready`
//! markers beside it, and the removal of directories of pods that nobody knows any more.
//! Threads: `vol/<uid8>` for an operation on a file system that may hang. The pod's worker waits
//! for it up to two minutes, and continues with the pod's other volumes meanwhile. All other
//! calls block the worker, for a few system calls on the agent's own file system.
//! Invariants: only volumes that a container refers to are made, each once; a failed volume
//! is not tried again before its wait is over, unless another volume of its pod may have
//! helped it; one operation per volume at a time; no walk in a volume follows a link out of
//! it; removal never follows a link and never enters another file system; nothing is removed
//! below a mount that could not be unmounted.
//! Absent on purpose: a reconciler. The desired state is the pod's specification, the actual
//! one the table in `actual` on top of the disk and the mount table, and each pod's worker
//! compares them when something happens (DIFFERS: the Go kubelet polls every 100 ms).
//! Go counterpart: pkg/kubelet/volumemanager, pkg/volume/{emptydir,hostpath,downwardapi,
//! configmap,secret,projected}, pkg/volume/util, pkg/volume/util/subpath.

mod actual;
mod atomic_writer;
mod config_map;
mod downward_api;
mod empty_dir;
mod error;
mod files;
#[cfg(test)]
pub(crate) mod fuzz;
mod host_path;
mod mounts;
mod operations;
mod orphans;
mod ownership;
mod paths;
mod projected;
mod queue;
mod retries;
mod secret;
mod setup;
mod sub_path;
mod teardown;

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::kube::PodApi;
use crate::model::event::EventSink;
use crate::model::fields::NodeAllocatable;
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;
use crate::util::tree;

pub use atomic_writer::PathError;
pub use error::VolumeError;
pub use orphans::OrphanReport;
pub use setup::plugins;

/// What the room must know of the configuration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `--root-dir`; its symbolic links are resolved by [`Volumes::new`].
    pub root_dir: PathBuf,
    /// What stands in for limits that a pod does not have. The memory is also the upper
    /// bound of a memory-backed volume; zero: bounded by the pod's limits and its own only.
    pub allocatable: NodeAllocatable,
}

/// What the room needs of others.
#[derive(Debug, Clone)]
pub struct Deps {
    /// Where `FailedMount` goes.
    pub events: EventSink,
    /// What pods get from the API server, on a node that has one.
    pub api: Option<PodApi>,
}

/// The face of the room; shared by all pod workers.
#[derive(Debug)]
pub struct Volumes {
    settings: Settings,
    events: EventSink,
    api: Option<PodApi>,
    /// Held for table look-ups only, never across a system call.
    retries: Mutex<retries::Retries>,
    /// Likewise.
    actual: Mutex<actual::Actual>,
    operations: operations::Operations,
}

impl Volumes {
    /// Nothing is read or made yet, except that links in the root directory are resolved:
    /// the mount table names mounts by their real path.
    #[must_use]
    pub fn new(mut settings: Settings, deps: Deps) -> Self {
        if let Ok(real) = std::fs::canonicalize(&settings.root_dir) {
            settings.root_dir = real;
        }
        Volumes {
            settings,
            events: deps.events,
            api: deps.api,
            retries: Mutex::default(),
            actual: Mutex::default(),
            operations: operations::Operations::default(),
        }
    }

    /// The volumes that are mounted for a pod now, as far as this process has seen to it.
    #[must_use]
    pub fn mounted(&self, uid: &PodUid) -> Vec<MountedVolume> {
        self.actual().of(uid)
    }

    fn retries(&self) -> MutexGuard<'_, retries::Retries> {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn actual(&self) -> MutexGuard<'_, actual::Actual> {
        self.actual.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
