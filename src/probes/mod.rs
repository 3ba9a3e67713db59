//! Room `probes`: asks containers whether they have started, live and are ready (Go:
//! pkg/kubelet/prober).
//!
//! Owns: per probe the row of equal results and the verdict; the times of the next runs.
//! Threads: `probes` (started with the first probe) waits for due times and hands each run
//! to a thread of its own, `probe/<n>`, which stays for a short while for the next one.
//! A waiting probe has no thread: thousands of stacks would cost more than all pods do.
//! In: each pod's worker calls [`Probes::sync`] after every inspection. Out: verdicts, asked
//! for by instance, and a post to look at a pod again when one of them changed.
//! Invariants: a run never delays another probe's; at most one run per probe; a result
//! counts only for the newest instance, and only until the pod is forgotten; the table's
//! lock is held over no call and no send.
//! Absent on purpose: what a verdict leads to, which plan and status decide; the grace
//! period of a kill, which [`grace_seconds`] reads for the one who kills.

mod check;
mod counters;
mod state;
mod table;
mod thread;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;

use crate::cri::RuntimeClient;
use crate::model::api::Container;
use crate::model::event::EventSink;
use crate::model::ids::{ContainerId, PodUid};
use crate::model::pod::Pod;
use crate::model::runtime::PodRuntime;
use crate::model::verdict::Verdict;
use crate::util::mailbox::Post;
use crate::util::threads::Died;

pub use counters::{BUCKETS, ProbeCounters};
pub use state::{Kind, Outcome};

/// What the room works with.
pub struct Deps {
    /// Runs commands in containers.
    pub cri: RuntimeClient,
    /// Gets `Unhealthy` and `ProbeWarning`.
    pub events: EventSink,
    /// Gets pods to look at again.
    pub post: Post<PodUid, ()>,
    /// Is told when the thread `probes` dies.
    pub on_death: Sender<Died>,
}

/// The room's client. Clones share everything.
#[derive(Clone)]
pub struct Probes {
    shared: Arc<thread::Shared>,
}

impl Probes {
    /// Prepares the room; the first probe starts its thread. The agent counts as started now.
    #[must_use]
    pub fn new(deps: Deps) -> Probes {
        Probes { shared: thread::Shared::new(deps) }
    }

    /// Takes in what a pod is and what of it runs: starts probes of containers that have
    /// them, and ends those of instances that are gone. To be called after every inspection,
    /// before plan and status are made from it. Probes without a host of their own go to the
    /// first address in `runtime`, which is to be that of the pod's status; those of a pod on
    /// the node's network without any go to 127.0.0.1. A `terminating` pod keeps its readiness
    /// probes, and all those of sidecars, until it is forgotten.
    pub fn sync(&self, pod: &Pod, runtime: &PodRuntime, terminating: bool) {
        thread::sync(&self.shared, pod, runtime, terminating);
    }

    /// What the probe of one kind says of an instance.
    #[must_use]
    pub fn verdict(&self, kind: Kind, id: &ContainerId) -> Verdict {
        self.shared.verdict(kind, id)
    }

    /// Ends all probes of a pod. Does not wait: a run that is under way is broken off, and
    /// what it finds does not count.
    pub fn forget(&self, uid: &PodUid) {
        self.shared.forget(uid);
    }

    /// Ends everything and waits for the threads, up to `limit` in all.
    pub fn stop(&self, limit: Duration) {
        self.shared.stop(limit);
    }

    /// What each probe has counted.
    #[must_use]
    pub fn counters(&self) -> Vec<ProbeCounters> {
        self.shared.counters()
    }

    /// How many probes there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shared.count()
    }
}

/// The grace period that a probe of this kind brings along for the kill that it causes.
/// A deletion's own grace goes before it; without one, the pod's applies.
#[must_use]
pub fn grace_seconds(container: &Container, kind: Kind) -> Option<i64> {
    kind.of(container)?.termination_grace_period_seconds
}

#[cfg(test)]
mod tests;
