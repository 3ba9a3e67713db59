//! Room `probes`: checks whether containers have started, live and are ready (Go:
//! pkg/kubelet/prober).
//!
//! Owns: per probe the series of equal results and the verdict, and which pod has which probes.
//! Threads: `probe/<uid8>` for each probe of a container that runs, at most 4,096 and the reserves of
//! pods. The thread owns its probe: it waits for the time of the next check and for a permit, makes the
//! check, counts the result and posts a changed verdict. While it waits, it gives its stack back. It ends when no
//! check can be due: the container has exited, its startup probe has passed, or the pod is
//! forgotten. The next instance of the container gets a new thread.
//! In: each pod's worker calls [`Probes::sync`] after every inspection, which posts to the
//! mailboxes of the threads what they have to know. Out: verdicts by instance, and a post when one
//! of them changed, so that the pod's worker runs.
//! Invariants: no check delays another probe's, unless so many run that they need permits
//! ([`permits`]); a result counts only for the newest instance, and
//! only until the pod is forgotten; a check ends with its instance; the registry's lock is held
//! over no check and no wait.
//! Absent on purpose: the consequences of a verdict, which plan and status decide; the grace
//! period of a kill, which the caller of [`grace_seconds`] applies.

mod check;
mod container;
mod counters;
mod parking;
mod permits;
mod probe;
mod registry;
mod state;
mod thread;
mod verdicts;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;

use crate::cri::RuntimeClient;
use crate::model::api::Container;
use crate::model::event::EventSink;
use crate::model::ids::{ContainerId, PodUid};
use crate::model::pod::Pod;
use crate::model::runtime::PodRuntime;
use crate::model::verdict::ProbeVerdict;
use crate::util::mailbox::Post;
use crate::util::threads::Died;

pub(crate) use counters::{BUCKETS, ProbeCounters};
pub(crate) use state::Kind;

/// The room's connections.
pub struct Deps {
    /// Runs commands in containers.
    pub cri: RuntimeClient,
    /// Receives `Unhealthy` and `ProbeWarning`.
    pub events: EventSink,
    /// Receives the pods with a changed verdict.
    pub post: Post<PodUid, ()>,
    /// Receives the panic of a probe's thread outside of a check.
    pub on_death: Sender<Died>,
}

/// The room's client. Clones share everything.
#[derive(Clone)]
pub struct Probes {
    shared: Arc<thread::Shared>,
}

impl Probes {
    /// A room without threads. The agent counts as started now.
    #[must_use]
    pub fn new(deps: Deps) -> Probes {
        Probes { shared: Arc::new(thread::Shared::new(deps)) }
    }

    /// Passes a pod's inspection to its probes: starts the threads of containers that run for the
    /// first time, and aborts checks of instances that have ended. To be called after every
    /// inspection, before plan and status are made from it. Probes without a host go to the first
    /// address in `runtime`, which is to be that of the pod's status; those of a pod on the node's
    /// network without an address go to 127.0.0.1. A `terminating` pod keeps its readiness probes,
    /// and all probes of sidecars, until it is forgotten.
    pub fn sync(&self, pod: &Pod, runtime: &PodRuntime, terminating: bool) {
        self.shared.sync(pod, runtime, terminating);
    }

    /// The verdict of one kind of probe on an instance.
    #[must_use]
    pub fn verdict(&self, kind: Kind, id: &ContainerId) -> ProbeVerdict {
        self.shared.verdict(kind, id)
    }

    /// Ends all probes of a pod. Does not wait: a running check is aborted, and its result does
    /// not count.
    pub fn forget(&self, uid: &PodUid) {
        self.shared.forget(uid);
    }

    /// Ends all probes and waits for the threads, up to `limit` in all.
    pub fn stop(&self, limit: Duration) {
        self.shared.stop(limit);
    }

    /// The counters of each probe.
    #[must_use]
    pub fn counters(&self) -> Vec<ProbeCounters> {
        self.shared.counters()
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.counters().len()
    }
}

/// The grace period of a probe of this kind for the kill that it causes. The grace period of a
/// deletion has precedence; without a value, the pod's applies.
#[must_use]
pub(crate) fn grace_seconds(container: &Container, kind: Kind) -> Option<i64> {
    kind.find_probe(container)?.termination_grace_period_seconds
}

#[cfg(test)]
mod tests;
