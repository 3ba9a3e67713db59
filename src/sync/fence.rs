//! Stops pods when the API server was away for too long, and starts them again when it has shown them
//! (`--offline-stop-after`). The room `offline` decides which; this part orders it.

use std::collections::BTreeSet;
use std::time::Instant;

use super::core::Effect;
use super::thread::Loop;
use crate::model::ids::PodUid;
use crate::model::pod::{Pod, SourceName};
use crate::model::reasons;
use crate::pods::lifecycle::{PodKill, STOPPED_OFFLINE, must_end};
use crate::status::is_terminal;

/// The pods that are stopped.
#[derive(Debug, Default)]
pub(super) struct Fence {
    /// Pods that are stopped, or are being stopped.
    stopped: BTreeSet<PodUid>,
    /// Those of them that the API server has shown.
    released: BTreeSet<PodUid>,
    /// Pods with a malformed annotation whose event was raised.
    reported: BTreeSet<PodUid>,
    /// When the next pod is to be stopped, unless the API server is reached before.
    due: Option<Instant>,
}

impl Fence {
    /// Whether the pod is stopped, or is being stopped.
    pub(super) fn has(&self, uid: &PodUid) -> bool {
        self.stopped.contains(uid)
    }

    /// The API server has shown these pods. `stops_by_itself`: whether the worker of a pod has stopped it
    /// without an order, which this part has not noticed.
    fn release(&mut self, pods: BTreeSet<PodUid>, stops_by_itself: impl Fn(&PodUid) -> bool) {
        self.stopped.extend(pods.iter().filter(|uid| stops_by_itself(uid)).cloned());
        self.released.extend(pods.into_iter().filter(|uid| self.stopped.contains(uid)));
    }

    /// Whether a pod that is stopped is so no more, and forgets it then. Only if it was released, or it ends:
    /// the room `offline` forgets a pod that ends before its new version has arrived here. Not before it is
    /// settled how it continues.
    fn resume(&mut self, uid: &PodUid, ends: bool, is_settled: bool) -> bool {
        let is_due = is_settled && self.stopped.contains(uid) && (ends || self.released.contains(uid));
        if is_due {
            self.stopped.remove(uid);
            self.released.remove(uid);
        }
        is_due
    }

    /// When the next pod may have to be stopped.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }
}

impl Loop {
    /// Stops the pods whose time is over, and starts those again that the API server has shown. At the end
    /// of each turn: after the machine was suspended, no timer is right.
    pub(super) fn fence_pods(&mut self) {
        let Some(offline) = self.deps.offline.clone() else { return };
        self.fence.due = None;
        // A worker may have stopped its pod by itself, and the API server may have been reached before this
        // turn, for example after the machine was suspended.
        let workers = &self.deps.workers;
        self.fence.release(offline.take_released(), |uid| workers.is_stopped_offline(uid));
        if !offline.fences() && self.fence.stopped.is_empty() {
            return;
        }
        let is_api = |pod: &Pod| pod.source() == SourceName::Api && !pod.is_mirror();
        let pods: Vec<Pod> = self
            .core
            .desired()
            .filter(|(_, pod, rejected)| !rejected && is_api(pod))
            .map(|(_, pod, _)| pod.clone())
            .collect();
        let mut resumed = Vec::new();
        for pod in &pods {
            let uid = pod.uid();
            if let Some(problem) = offline.stop_problem(pod) {
                if self.fence.reported.insert(uid.clone()) {
                    log::warn!("{problem} pod={} uid={uid}", pod.full_name());
                    self.deps.events.warning(pod, reasons::INVALID_ANNOTATION, problem);
                }
            } else {
                self.fence.reported.remove(uid);
            }
            // One that has ended by itself does not run again.
            let has_ended =
                self.deps.status.get(uid).is_some_and(|status| is_terminal(status.phase.as_deref()));
            // A pod that is deleted or evicted while it is stopped ends with that. If its worker was already
            // cleaning up, it finishes without having ended: the next worker ends the pod, or runs it again.
            let is_settled = has_ended
                || self.deps.workers.is_finished(uid)
                || (!must_end(pod) && self.deps.workers.may_resume(uid));
            if !has_ended && offline.stops(pod) {
                self.stop_offline(pod);
            } else if !self.settings.node.shutting_down
                && self.fence.resume(uid, has_ended || must_end(pod), is_settled)
                && !has_ended
            {
                if self.deps.workers.revive(uid) {
                    resumed.push(uid.clone());
                }
                if !must_end(pod) {
                    let message = "The API server has shown the pod again: it is started";
                    self.deps.events.normal(pod, reasons::RESUMED_ONLINE, message);
                }
            }
        }
        let left = pods.iter().filter_map(|pod| offline.stops_in(pod)).min();
        self.fence.due = left.and_then(|left| Instant::now().checked_add(left));
        let core = &self.core;
        self.fence.stopped.retain(|uid| core.is_desired(uid));
        self.fence.released.retain(|uid| core.is_desired(uid));
        self.fence.reported.retain(|uid| core.is_desired(uid));
        if !resumed.is_empty() {
            // First, because the cleaner removes pods that have ended in the snapshot.
            self.publish();
            let admitted = resumed.iter().filter_map(|uid| self.core.admitted(uid));
            let updates = admitted.cloned().map(Effect::Update).collect();
            self.carry_out(updates);
            self.publish();
        }
    }

    fn stop_offline(&mut self, pod: &Pod) {
        let uid = pod.uid();
        self.fence.released.remove(uid);
        if self.fence.stopped.insert(uid.clone()) {
            log::warn!("{STOPPED_OFFLINE} pod={} uid={uid}", pod.full_name());
            self.deps.events.warning(pod, reasons::STOPPED_OFFLINE, STOPPED_OFFLINE);
        }
        // A worker that is made later stops the pod by itself; with the order it can be cancelled.
        let workers = &self.deps.workers;
        if workers.has_started(uid) && !workers.is_finished(uid) && workers.kill_of(uid).is_none() {
            self.kill(uid, PodKill::until_server_is_back());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_resumes_only_if_it_was_released_or_ends() {
        let mut fence = Fence::default();
        let [a, b, c, d] = ["a", "b", "c", "d"].map(PodUid::from);
        fence.stopped.extend([a.clone(), b.clone()]);
        assert!(!fence.resume(&a, false, true), "its mark for deletion may not have arrived");
        assert!(fence.resume(&a, true, true) && !fence.resume(&a, true, true) && !fence.has(&a));
        // The worker of c has stopped it before this part did; that of d has not.
        fence.release([b.clone(), c.clone(), d.clone()].into(), |uid| uid.as_str() == "c");
        assert!(fence.resume(&b, false, true) && fence.resume(&c, false, true));
        assert!(!fence.resume(&d, false, true));
        assert!(fence.stopped.is_empty() && fence.released.is_empty());
    }

    /// Otherwise one whose mark for deletion or eviction arrives while its worker cleans up would never end
    /// or run.
    #[test]
    fn pod_stays_stopped_until_its_worker_has_finished_if_it_ends_otherwise() {
        let mut fence = Fence::default();
        let [deleted, evicted] = ["deleted", "evicted"].map(PodUid::from);
        fence.stopped.extend([deleted.clone(), evicted.clone()]);
        fence.release([evicted.clone()].into(), |_| false);
        assert!(!fence.resume(&deleted, true, false) && !fence.resume(&evicted, false, false));
        assert!(fence.resume(&deleted, true, true) && fence.resume(&evicted, false, true));
    }
}
