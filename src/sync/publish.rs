//! Publishes the state of the sync loop: the snapshot of all pods, and the static pods for their
//! mirrors.

use super::evictions;
use super::thread::Loop;
use super::view::{Entry, Snapshot};
use crate::model::metrics;
use crate::model::pod::{Pod, SourceName};
use crate::pods::mirror;

impl Loop {
    pub(super) fn publish(&mut self) {
        self.ephemeral.retain(|uid| self.core.is_desired(uid));
        if self.core.knows_all_pods() {
            let (core, workers) = (&self.core, &self.deps.workers);
            self.deps.allocations.retain(|uid| core.is_desired(uid) || workers.knows(uid));
        }
        let workerless = self.settings.node.shutting_down && !self.ready && self.is_running_without_worker();
        let workers = self.deps.workers.reports();
        let mut snapshot = Snapshot {
            workerless,
            sources_ready: self.ready,
            has_all_pods: self.ready && self.core.knows_all_pods(),
            removed: self.core.removed().clone(),
            sources: self.sources.clone(),
            shutting_down: self.settings.node.shutting_down,
            mirrors: self.core.mirrors().iter().map(|(uid, pod)| (uid.clone(), pod.full_name())).collect(),
            ..Snapshot::default()
        };
        for (uid, pod, rejected) in self.core.desired() {
            snapshot.pods.insert(
                uid.clone(),
                Entry {
                    pod: Some(self.ephemeral.complete(pod)),
                    removed: None,
                    rejected,
                    evicted: self.is_evicted(pod),
                    worker: workers.get(uid).cloned(),
                },
            );
        }
        for (uid, worker) in workers {
            snapshot.pods.entry(uid).or_insert_with_key(|uid| Entry {
                pod: None,
                removed: self.deps.workers.pod(uid).cloned(),
                rejected: false,
                evicted: false,
                worker: Some(worker),
            });
        }
        let is_limited_pod_added = evictions::is_limited_pod_added(&self.deps.view.get(), &snapshot);
        self.deps.view.set(snapshot);
        // After the snapshot, from which that thread takes the pods.
        if is_limited_pod_added {
            self.deps.evictions.wake.ring();
        }
        if let Some(wake) = self.deps.shutdown.wake.as_ref().filter(|_| self.settings.node.shutting_down) {
            wake.ring();
        }
        self.publish_mirrors();
    }

    pub(super) fn publish_mirrors(&self) {
        metrics::MIRROR_PODS.set(self.core.mirrors().len() as f64);
        let Some(mirrors) = &self.deps.mirrors else { return };
        let desired = self.core.desired().filter(|(_, pod, rejected)| !rejected && pod.is_static());
        let workers = &self.deps.workers;
        let removed = workers.uids().filter(|uid| !self.core.is_desired(uid) && !workers.is_finished(uid));
        // Their mirrors show the rejection.
        let rejected = self.core.desired().filter(|(_, pod, rejected)| *rejected && pod.is_static());
        let api_source_seen = self.sources.get(&SourceName::Api).is_some_and(|state| state.seen);
        mirrors.put(
            (),
            mirror::View {
                desired: desired.map(|(_, pod, _)| pod.clone()).collect(),
                removed: removed
                    .filter_map(|uid| workers.pod(uid))
                    .filter(|pod| pod.is_static())
                    .map(Pod::full_name)
                    .chain(rejected.map(|(_, pod, _)| pod.full_name()))
                    .chain(self.departed.names())
                    .collect(),
                mirrors: api_source_seen.then(|| self.core.mirrors().values().cloned().collect()),
                sources_ready: self.core.sources_ready(),
            },
        );
    }
}
