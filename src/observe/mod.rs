//! What really runs (Go: pkg/kubelet/pleg, container cache, runtime state).
//!
//! Owns the cache of inspected pods and the runtime's health.
//! Threads: `observe-ev`, which reads the runtime's event stream and notes which pods
//! something happened to; `observe`, which looks at those pods, lists everything (once a
//! second without a stream, up to once a minute with one) and asks for the status.
//! Out: a mailbox of pods to look at again, keyed by UID, and health changes.
//! Workers inspect their own pod on their own thread after they did something
//! ([`Observe::inspect`]); what was heard before that began needs no other look.
//! Invariants: an inspection never replaces a later one; a failed one is repeated within
//! a second; news of a pod are answered only by a look that began after they came, also
//! when they came while its worker was busy; a list follows every opening and every end
//! of the stream. Absent on purpose: an event channel that can overflow.

mod cache;
pub mod diff;
mod health;
mod pace;
mod relist;
mod stream;
mod termination;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Sender, bounded};

use crate::cri::{CriError, RuntimeClient};
use crate::model::ids::PodUid;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::util::mailbox::Post;
use crate::util::stop::StopToken;
use crate::util::threads::{Died, OnDeath, Running};

pub use diff::Change;
use health::Health;
pub use health::RuntimeHealth;
use stream::StreamState;

/// What the `sync` thread hears from this room.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Subject {
    /// Look at this pod again.
    Pod(PodUid),
    /// The runtime or its network became usable, or ceased to be.
    Health,
    /// The first list of all pods is there.
    FirstList,
}

/// Handle for the other rooms; cloning shares the state.
#[derive(Clone)]
pub struct Observe {
    cri: RuntimeClient,
    cache: cache::Cache,
    health: Health,
}

/// What a worker gets to see of its pod.
#[derive(Debug, Clone)]
pub struct View {
    /// The last good inspection; an empty pod if the runtime knows nothing of it.
    pub pod: Arc<PodRuntime>,
    /// Why the newest inspection failed, if it did.
    pub error: Option<String>,
}

/// Makes the handle; nothing runs yet.
#[must_use]
pub fn new(cri: RuntimeClient) -> Observe {
    Observe { cri, cache: cache::Cache::default(), health: Health::default() }
}

/// How changes are found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Whether the runtime's event stream is used where there is one.
    pub events: bool,
}

/// By what means changes are found out now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    /// By the event stream, with a full list from time to time.
    Events,
    /// By full lists, once a second; why.
    Lists(String),
}

impl std::fmt::Display for Mode {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Mode::Events => out.write_str("event stream"),
            Mode::Lists(why) => write!(out, "full list every second: {why}"),
        }
    }
}

/// Starts the threads of this room.
///
/// # Errors
/// When a thread cannot be started.
pub fn spawn(
    observe: &Observe,
    settings: Settings,
    news: Post<Subject, Change>,
    deaths: &Sender<Died>,
) -> std::io::Result<Vec<Running>> {
    let on_death = || OnDeath::Supervisor(deaths.clone());
    let (runtime_is_back, back) = bounded(1);
    let mut threads = Vec::new();
    if settings.events {
        // So that the first list counts as the one that follows the opening.
        observe.cache.set_stream(StreamState::Open { since: Instant::now() });
        threads.push(stream::spawn(observe.clone(), back, on_death())?);
    }
    threads.push(relist::spawn(observe.clone(), news, runtime_is_back, on_death())?);
    Ok(threads)
}

impl Observe {
    /// The newest view of a pod. Waits for the very first list of all pods, without which
    /// an unknown pod cannot be told from one that does not exist. `None`: asked to stop.
    #[must_use]
    pub fn view(&self, uid: &PodUid, stop: &StopToken) -> Option<View> {
        let gate = self.cache.first_relist();
        let _waiting = crate::util::threads::waiting("first list of pods");
        crossbeam_channel::select_biased! {
            recv(stop.signal()) -> _ => return None,
            recv(gate) -> _ => {}
        }
        Some(self.cache.get(uid).map_or_else(
            || View { pod: Arc::new(PodRuntime::absent(uid.clone())), error: None },
            |entry| View { pod: entry.pod, error: entry.error },
        ))
    }

    /// Inspects one pod now, on the calling thread, and stores the result.
    ///
    /// # Errors
    /// When the runtime does not answer; the cache then keeps the last good view.
    pub fn inspect(&self, uid: &PodUid, stop: &StopToken) -> Result<Arc<PodRuntime>, CriError> {
        let _waiting = crate::util::threads::waiting("inspection");
        let cri = self.cri.with_stop(stop.clone());
        let at = Instant::now();
        let result = crate::cri::list_pods(&cri, Some(uid)).and_then(|mut listed| {
            let listed = listed.remove(uid);
            let pod = match &listed {
                Some(pod) => inspect_listed(&cri, pod),
                None => Ok(PodRuntime::absent(uid.clone())),
            };
            self.cache.set_listed_pod(uid, listed, at);
            pod
        });
        crate::model::metrics::PLEG_POD_RELIST.took(at.elapsed());
        match result {
            Ok(pod) => Ok(self.cache.put(uid, pod, at)),
            Err(error) => {
                self.cache.put_error(uid, error.to_string(), at);
                Err(error)
            }
        }
    }

    /// Tells the `observe` thread to leave this pod alone until the guard is dropped. The
    /// caller must [`Observe::inspect`] before that, so that no change goes unseen; what is
    /// heard after that inspection began is looked into when the guard is dropped.
    #[must_use]
    pub fn busy(&self, uid: &PodUid) -> Busy {
        self.cache.set_busy(uid, true);
        Busy { cache: self.cache.clone(), uid: uid.clone() }
    }

    /// The last good inspection of a pod, without waiting for anything.
    #[must_use]
    pub fn cached(&self, uid: &PodUid) -> Option<Arc<PodRuntime>> {
        self.cache.get(uid).map(|entry| entry.pod)
    }

    /// All pods of the last full list.
    #[must_use]
    pub fn listed(&self) -> Arc<BTreeMap<PodUid, ListedPod>> {
        self.cache.listed()
    }

    /// Whether the newest look at the pod showed anything running. Newer than the list:
    /// workers look at their pods in between. At a pod that was refused nobody looks; of that
    /// the list tells.
    #[must_use]
    pub fn still_runs(&self, uid: &PodUid) -> bool {
        self.cache.still_runs(uid)
    }

    /// Another pod of the same namespace and name that still runs: an earlier version,
    /// edited while no agent was there to see it.
    #[must_use]
    pub fn namesake(&self, uid: &PodUid, namespace: &str, name: &str) -> Option<PodUid> {
        let listed = self.cache.listed();
        listed
            .values()
            .filter(|pod| pod.uid != *uid && pod.namespace == namespace && pod.name == name)
            .find(|pod| pod.is_running() && self.still_runs(&pod.uid))
            .map(|pod| pod.uid.clone())
    }

    /// When the last full list was asked for.
    #[must_use]
    pub fn last_relist(&self) -> Option<Instant> {
        self.cache.last_relist()
    }

    /// How changes are found out at the moment.
    #[must_use]
    pub fn mode(&self) -> Mode {
        match self.cache.stream() {
            StreamState::Open { .. }
                if self.cache.untold().is_some_and(|at| at.elapsed() >= pace::TOLD_WITHIN) =>
            {
                Mode::Lists("the event stream is open but tells nothing".to_owned())
            }
            StreamState::Open { .. } => Mode::Events,
            StreamState::Off => Mode::Lists("the event stream is switched off".to_owned()),
            StreamState::Unsupported => Mode::Lists("the runtime has no event stream".to_owned()),
            StreamState::Broken { why } => Mode::Lists(format!("the event stream ended: {why}")),
        }
    }

    /// The runtime's name and version; `containerd` and nothing while it never answered.
    #[must_use]
    pub fn runtime_version(&self) -> (String, String) {
        self.health.version().unwrap_or_else(|| ("containerd".to_owned(), String::new()))
    }

    /// What the runtime can; `None` until it has answered once.
    #[must_use]
    pub fn runtime_features(&self) -> Option<crate::cri::RuntimeFeatures> {
        self.health.features()
    }

    /// What the runtime's handlers can do, by name; none until it has answered once.
    #[must_use]
    pub fn runtime_handlers(&self) -> Arc<[crate::cri::Handler]> {
        self.health.handlers()
    }

    /// Whether a handler (the default one's name is empty) makes read-only mounts read-only
    /// all the way down. No, until the runtime says so.
    #[must_use]
    pub fn can_mount_recursively_read_only(&self, handler: &str) -> bool {
        self.health.handler(handler).is_some_and(|handler| handler.recursive_read_only_mounts)
    }

    /// The runtime's name and version, if it ever answered.
    #[must_use]
    pub fn known_runtime_version(&self) -> Option<(String, String)> {
        self.health.version()
    }

    /// Whether the runtime can be used now, and if not why.
    #[must_use]
    pub fn runtime_health(&self) -> RuntimeHealth {
        self.health.get(self.cache.last_relist(), Instant::now())
    }
}

fn inspect_listed(cri: &RuntimeClient, listed: &ListedPod) -> Result<PodRuntime, CriError> {
    let mut pod = crate::cri::pod_runtime(cri, listed)?;
    for container in &mut pod.containers {
        termination::complete(container);
    }
    Ok(pod)
}

/// See [`Observe::busy`].
pub struct Busy {
    cache: cache::Cache,
    uid: PodUid,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.cache.set_busy(&self.uid, false);
    }
}
