//! The end of pods that the thread `evict` has chosen.

use std::sync::Arc;

use super::thread::Loop;
use super::view::Snapshot;
use crate::eviction;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::pods::lifecycle::{Failure, PodKill};
use crate::util::mailbox::{self, Inbox, Post};
use crate::util::wake::Wake;

/// An order to evict a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    /// The grace period in seconds; a shorter one that is already in force stays.
    pub grace_seconds: i64,
    /// For the status.
    pub message: String,
    /// Whether the pod gets the condition `DisruptionTarget`.
    pub disrupts: bool,
}

/// What `sync` holds of the channels to and from the thread `evict`.
pub(crate) struct SyncEnds {
    /// Pods to evict.
    pub orders: Inbox<PodUid, Order>,
    /// Rung when an evicted pod has ended, and when a pod with a limit of local storage was added:
    /// that thread may sleep until then.
    pub wake: Wake,
    /// The names of the node's pressure conditions, for admission.
    pub pressures: Arc<dyn Fn() -> Vec<String> + Send + Sync>,
}

/// Makes the mailbox of orders.
#[must_use]
pub(crate) fn orders() -> (Post<PodUid, Order>, Inbox<PodUid, Order>) {
    mailbox::mailbox(mailbox::replace)
}

/// Whether a pod with a limit of local storage has got its worker since the snapshot `before`.
pub(super) fn is_limited_pod_added(before: &Snapshot, now: &Snapshot) -> bool {
    let runs = |snapshot: &Snapshot, uid: &PodUid| {
        snapshot.pods.get(uid).is_some_and(|entry| !entry.rejected && entry.worker.is_some())
    };
    now.pods.iter().any(|(uid, entry)| {
        runs(now, uid) && !runs(before, uid) && entry.any_pod().is_some_and(eviction::is_limited)
    })
}

impl Loop {
    /// Orders the end of pods, unless they have just ended by themselves.
    pub(super) fn evict(&mut self, orders: impl IntoIterator<Item = (PodUid, Order)>) {
        for (uid, order) in orders {
            if !self.deps.workers.knows(&uid) || self.deps.workers.is_finished(&uid) {
                continue;
            }
            let failure =
                Failure { reason: reasons::EVICTED, message: order.message, disrupts: order.disrupts };
            self.fail(&uid, PodKill { grace_override: Some(order.grace_seconds), failure: Some(failure) });
        }
        self.publish();
        // A pod that had ended already does not ring.
        self.deps.evictions.wake.ring();
    }

    /// Whether the pod was evicted or preempted, by this agent or, as its status shows, by the one
    /// before: nothing of it is kept for its user.
    pub(super) fn is_evicted(&self, pod: &Pod) -> bool {
        let is_eviction = |reason: &str| [reasons::EVICTED, reasons::PREEMPTING].contains(&reason);
        let reported = pod.object().status.as_ref().and_then(|status| status.reason.as_deref());
        let evicted = self.deps.workers.is_evicted(pod.uid());
        evicted.unwrap_or_else(|| pod.is_over() && reported.is_some_and(is_eviction))
    }

    /// Whether the pod was evicted by the thread `evict`.
    pub(super) fn was_evicted(&self, uid: &PodUid) -> bool {
        let kill = self.deps.workers.kill_of(uid);
        let failure = kill.and_then(|kill| kill.failure.as_ref());
        failure.is_some_and(|failure| failure.reason == reasons::EVICTED)
    }
}
