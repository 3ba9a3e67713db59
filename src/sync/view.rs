//! The snapshot of all pods that servers and cleaners read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::model::ids::{FullName, PodUid};
use crate::model::pod::{Pod, SourceName};
use crate::pods::workers::WorkerHandle;
use crate::sources::SourceProblem;

/// One pod at the time of the snapshot.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The newest version that a source gave; `None` for pods that no source names any more.
    pub pod: Option<Pod>,
    /// The last version of a pod that no source names any more, until it has ended.
    pub leaving: Option<Pod>,
    /// Whether it was refused by admission.
    pub rejected: bool,
    /// Its worker, if it has one.
    pub worker: Option<WorkerHandle>,
}

/// How one source stands.
#[derive(Debug, Clone, Default)]
pub struct SourceState {
    /// Whether it has handed over a set.
    pub seen: bool,
    /// How many pods it gives.
    pub pods: usize,
    /// What it could not read.
    pub problems: Vec<SourceProblem>,
}

/// All pods that the node wants or still has to do with.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// By UID.
    pub pods: BTreeMap<PodUid, Entry>,
    /// The mirrors of static pods that the API server shows, and whose they are by name.
    pub mirrors: BTreeMap<PodUid, FullName>,
    /// Every configured source.
    pub sources: BTreeMap<SourceName, SourceState>,
    /// Whether every source has spoken: only then may anything unknown be removed.
    pub sources_ready: bool,
    /// New pods are refused: the machine shuts down.
    pub shutting_down: bool,
    /// While it does: something may run that a source is still to name.
    pub strangers: bool,
}

/// The place where the newest snapshot is found.
#[derive(Debug, Clone, Default)]
pub struct View(Arc<Mutex<Arc<Snapshot>>>);

impl View {
    /// The newest snapshot.
    #[must_use]
    pub fn get(&self) -> Arc<Snapshot> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set(&self, snapshot: Snapshot) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(snapshot);
    }
}
