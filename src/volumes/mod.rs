//! Volumes: what a pod mounts, made ready on the node and cleaned up afterwards.
//!
//! Owns: everything below `<root-dir>/pods/<uid>/volumes`, the `ready` markers beside it,
//! and the removal of directories of pods that nobody knows any more.
//! Threads: none. Each call blocks in the pod's own worker; a call does a handful of
//! system calls, and a removal asks its stop token between entries.
//! Invariants: only volumes that a container refers to are made; a failed volume is not
//! tried again before its wait is over; removal never follows a link and never enters
//! another file system; nothing is removed below a mount that could not be unmounted.
//! Absent on purpose: desired and actual tables with a reconciler, since the mount table
//! and the directories say what is there (DIFFERS: the Go kubelet polls every 100 ms).
//! Go counterpart: pkg/kubelet/volumemanager, pkg/volume/{emptydir,hostpath}.

mod empty_dir;
mod error;
mod host_path;
mod mounts;
mod orphans;
mod paths;
mod retries;
mod setup;
mod teardown;
mod tree;

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::model::event::EventSink;

pub use error::VolumeError;
pub use orphans::OrphanReport;

/// What the room must know of the configuration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `--root-dir`; its symbolic links are resolved by [`Volumes::new`].
    pub root_dir: PathBuf,
    /// The node's allocatable memory: the upper bound of a memory-backed volume.
    /// `None`: such volumes are bounded by the pod's limits and their own only.
    pub allocatable_memory_bytes: Option<u64>,
}

/// What the room needs of others.
#[derive(Debug, Clone)]
pub struct Deps {
    /// Where `FailedMount` goes.
    pub events: EventSink,
}

/// The face of the room; shared by all pod workers.
#[derive(Debug)]
pub struct Volumes {
    settings: Settings,
    events: EventSink,
    /// Held for table look-ups only, never across a system call.
    retries: Mutex<retries::Retries>,
}

impl Volumes {
    /// Nothing is read or made yet, except that links in the root directory are resolved:
    /// the mount table names mounts by their real path.
    #[must_use]
    pub fn new(mut settings: Settings, deps: Deps) -> Self {
        if let Ok(real) = std::fs::canonicalize(&settings.root_dir) {
            settings.root_dir = real;
        }
        Volumes { settings, events: deps.events, retries: Mutex::default() }
    }

    fn retries(&self) -> MutexGuard<'_, retries::Retries> {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
