//! The state that all operations on volumes share.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::kube::{LocalObjects, PodApi};
use crate::model::event::EventSink;
use crate::model::fields::NodeAllocatable;
use crate::model::ids::PodUid;
use crate::model::mount::MountedVolume;

use super::actual::Actual;
use super::operations::Operations;
use super::retries::Retries;

/// The configuration of volumes.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `--root-dir`; its symbolic links are resolved by [`Volumes::new`].
    pub root_dir: PathBuf,
    /// Defaults for limits that a pod does not have. The memory is also the upper bound of a
    /// memory-backed volume; zero: bounded by the pod's limits and its own only.
    pub allocatable: NodeAllocatable,
}

/// The other rooms that volumes need.
#[derive(Debug, Clone)]
pub struct Deps {
    /// The sink of `FailedMount` events.
    pub events: EventSink,
    /// Objects that pods need from the API server, on a node that has one.
    pub api: Option<PodApi>,
    /// ConfigMaps and Secrets of static pods.
    pub local: LocalObjects,
}

/// The volumes of all pods. All pod workers share it.
#[derive(Debug)]
pub struct Volumes {
    pub(super) settings: Settings,
    pub(super) events: EventSink,
    pub(super) api: Option<PodApi>,
    pub(super) local: LocalObjects,
    /// Held for table look-ups only, never across a system call.
    retries: Mutex<Retries>,
    /// Likewise.
    actual: Mutex<Actual>,
    pub(super) operations: Operations,
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
            local: deps.local,
            retries: Mutex::default(),
            actual: Mutex::default(),
            operations: Operations::default(),
        }
    }

    /// The volumes that this process has mounted for a pod.
    #[must_use]
    pub fn mounted(&self, uid: &PodUid) -> Vec<MountedVolume> {
        self.actual().of(uid)
    }

    pub(super) fn retries(&self) -> MutexGuard<'_, Retries> {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn actual(&self) -> MutexGuard<'_, Actual> {
        self.actual.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
