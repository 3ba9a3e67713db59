//! The snapshot of all pods, which the server and the cleaner read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use crate::model::ids::{FullName, PodUid};
use crate::model::pod::{Pod, SourceName};
use crate::pods::workers::WorkerHandle;
use crate::sources::SourceProblem;
use crate::util::lock::LockExt;

/// One pod at the time of the snapshot.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// The newest version from the pod's source; `None` if no source has the pod any more.
    pub pod: Option<Pod>,
    /// The last version of a pod that no source has any more, until it has ended.
    pub removed: Option<Pod>,
    /// Whether admission rejected the pod.
    pub rejected: bool,
    /// Whether the pod was evicted or preempted.
    pub evicted: bool,
    /// The pod's worker, if it has one.
    pub worker: Option<WorkerHandle>,
}

impl Entry {
    /// The newest known version; `None` for a pod that only the runtime knows.
    #[must_use]
    pub(crate) fn any_pod(&self) -> Option<&Pod> {
        self.pod.as_ref().or(self.removed.as_ref())
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct SourceState {
    /// Whether the source has delivered a set of pods.
    pub seen: bool,
    /// The number of pods in the source's newest set.
    pub pods: usize,
    /// The manifests that the source could not read, and why.
    pub problems: Vec<SourceProblem>,
}

/// All pods that are desired or have not ended.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot {
    /// The pods by UID.
    pub pods: BTreeMap<PodUid, Entry>,
    /// The mirror pods at the API server, by UID, with the names of their static pods.
    pub mirrors: BTreeMap<PodUid, FullName>,
    /// Every configured source.
    pub sources: BTreeMap<SourceName, SourceState>,
    /// Whether every source has delivered a set.
    pub sources_ready: bool,
    /// Whether no source can have other pods: every one has delivered a set, and none is a stored one
    /// (`--offline`). Before that, nothing of unknown pods is removed.
    pub has_all_pods: bool,
    /// Pods that are in no source any more although `has_all_pods` is false.
    pub removed: BTreeSet<PodUid>,
    /// Whether the machine shuts down. New pods are rejected then.
    pub shutting_down: bool,
    /// Whether, during a shutdown, a pod without a worker runs before all sources have delivered.
    /// A source may still deliver this pod.
    pub workerless: bool,
}

impl Snapshot {
    /// Whether a source may have this pod although it is not in `pods`.
    #[must_use]
    pub(crate) fn may_lack(&self, uid: &PodUid) -> bool {
        !self.has_all_pods && !self.removed.contains(uid)
    }

    /// The pod of this name. One that no source has any more, because it ends, is found only if no
    /// other pod has its name: a pod that was replaced has the name of its successor.
    #[must_use]
    pub(crate) fn pod_named(&self, namespace: &str, name: &str) -> Option<&Pod> {
        let is_named = |pod: &&Pod| pod.name() == name && pod.namespace() == namespace;
        let with_source = self.pods.values().filter_map(|entry| entry.pod.as_ref()).find(is_named);
        with_source.or_else(|| self.pods.values().filter_map(Entry::any_pod).find(is_named))
    }
}

/// Access to the newest snapshot. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct View(Arc<Mutex<Arc<Snapshot>>>);

impl View {
    /// The newest snapshot.
    #[must_use]
    pub(crate) fn get(&self) -> Arc<Snapshot> {
        Arc::clone(&self.0.locked())
    }

    pub(super) fn set(&self, snapshot: Snapshot) {
        *self.0.locked() = Arc::new(snapshot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_pod_is_found_only_until_another_has_its_name() {
        let entry = |uid: &str, has_source: bool| {
            let object = serde_json::json!({"metadata": {"namespace": "a", "name": "web", "uid": uid}});
            let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
            let (pod, removed) = if has_source { (Some(pod), None) } else { (None, Some(pod)) };
            let entry = Entry { pod, removed, rejected: false, evicted: false, worker: None };
            (PodUid::from(uid), entry)
        };
        let found = |entries: [(PodUid, Entry); 2], namespace: &str| {
            let snapshot = Snapshot { pods: entries.into(), ..Snapshot::default() };
            snapshot.pod_named(namespace, "web").map(|pod| pod.uid().to_string())
        };
        assert_eq!(found([entry("1", false), entry("2", true)], "a").as_deref(), Some("2"));
        assert_eq!(found([entry("1", true), entry("2", false)], "a").as_deref(), Some("1"));
        assert_eq!(found([entry("1", false), entry("2", false)], "a").as_deref(), Some("1"));
        assert_eq!(found([entry("1", true), entry("2", true)], "b"), None);
    }
}
