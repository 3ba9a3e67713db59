//! The handle of this room for all others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::cache::Cache;
use super::health::{Health, RuntimeHealth};
use super::stream_state::StreamState;
use super::{schedule, termination};
use crate::cri::{self, CriError, RuntimeClient, RuntimeVersion};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::util::stop::StopToken;
use crate::util::threads;

/// What a change reported to the `sync` thread is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum ObservedChange {
    /// A pod, which has to be synced.
    Pod(PodUid),
    /// The runtime or its network became ready, or ceased to be.
    Health,
    /// The first list of all pods is complete.
    FirstList,
}

/// Access to the inspected pods. Clones share the state.
#[derive(Clone)]
pub struct Observe {
    pub(super) cri: RuntimeClient,
    pub(super) cache: Cache,
    pub(super) health: Health,
}

/// A worker's view of its pod.
#[derive(Debug, Clone)]
pub struct PodView {
    /// The last successful inspection; an empty pod if the runtime does not know it.
    pub pod: Arc<PodRuntime>,
    /// The error of the newest inspection, if it failed.
    pub error: Option<String>,
}

/// How changes are detected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RelistMode {
    /// By the event stream, with a full list from time to time.
    Events,
    /// By full lists, once a second, for this reason.
    Lists(String),
}

impl std::fmt::Display for RelistMode {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RelistMode::Events => out.write_str("event stream"),
            RelistMode::Lists(reason) => write!(out, "full list every second: {reason}"),
        }
    }
}

/// Makes the handle, without threads.
#[must_use]
pub(crate) fn new(cri: RuntimeClient) -> Observe {
    Observe { cri, cache: Cache::default(), health: Health::default() }
}

impl Observe {
    /// The newest view of a pod. Waits for the first list of all pods: before it, an unknown pod
    /// cannot be distinguished from one that does not exist. `None`: the caller has to stop.
    #[must_use]
    pub fn view(&self, uid: &PodUid, stop: &StopToken) -> Option<PodView> {
        let first_list = self.cache.first_relist();
        let _waiting = threads::waiting("first list of pods");
        crossbeam_channel::select_biased! {
            recv(stop.signal()) -> _ => return None,
            recv(first_list) -> _ => {}
        }
        Some(self.cache.get(uid).map_or_else(
            || PodView { pod: Arc::new(PodRuntime::absent(uid.clone())), error: None },
            |entry| PodView { pod: entry.pod, error: entry.error },
        ))
    }

    /// Inspects one pod now, on the calling thread, and stores the result.
    ///
    /// # Errors
    /// When the call to the runtime fails; the cache then keeps the last successful inspection.
    pub fn inspect(&self, uid: &PodUid, stop: &StopToken) -> Result<Arc<PodRuntime>, CriError> {
        let _waiting = threads::waiting("inspection");
        let cri = self.cri.with_stop(stop.clone());
        let requested_at = Instant::now();
        let result = cri::list_pods(&cri, Some(uid)).and_then(|mut listed| {
            let listed = listed.remove(uid);
            let pod = match &listed {
                Some(pod) => inspect_listed(&cri, pod),
                None => Ok(PodRuntime::absent(uid.clone())),
            };
            self.cache.set_listed_pod(uid, listed, requested_at);
            pod
        });
        metrics::PLEG_POD_RELIST.observe_duration(requested_at.elapsed());
        match result {
            Ok(pod) => Ok(self.cache.put(uid, pod, requested_at)),
            Err(error) => {
                self.cache.put_error(uid, error.to_string(), requested_at);
                Err(error)
            }
        }
    }

    /// Keeps the `observe` thread from inspecting this pod until the guard is dropped. Before
    /// that the caller must call [`Observe::inspect`], so that no change is missed. Events that
    /// come after that inspection began are handled when the guard is dropped.
    #[must_use]
    pub fn mark_busy(&self, uid: &PodUid) -> BusyGuard {
        self.cache.set_busy(uid, true);
        BusyGuard { cache: self.cache.clone(), uid: uid.clone() }
    }

    /// The last successful inspection of a pod. Does not block.
    #[must_use]
    pub fn cached(&self, uid: &PodUid) -> Option<Arc<PodRuntime>> {
        self.cache.get(uid).map(|entry| entry.pod)
    }

    /// All pods of the last full list, updated by later lists of single pods.
    #[must_use]
    pub fn listed(&self) -> Arc<BTreeMap<PodUid, ListedPod>> {
        self.cache.listed()
    }

    /// Whether any container of the pod runs, by the newest inspection, which workers make between
    /// two lists; by the list for a pod that was not inspected, such as a rejected one.
    #[must_use]
    pub fn still_runs(&self, uid: &PodUid) -> bool {
        self.cache.still_runs(uid)
    }

    /// Another pod of the same namespace and name that still runs: an earlier version of a static
    /// pod, whose manifest was edited while the agent was stopped.
    #[must_use]
    pub fn namesake(&self, uid: &PodUid, namespace: &str, name: &str) -> Option<PodUid> {
        let listed = self.cache.listed();
        listed
            .values()
            .filter(|pod| pod.uid != *uid && pod.namespace == namespace && pod.name == name)
            .find(|pod| pod.is_running() && self.still_runs(&pod.uid))
            .map(|pod| pod.uid.clone())
    }

    /// When the last full list was requested.
    #[must_use]
    pub fn last_relist(&self) -> Option<Instant> {
        self.cache.last_relist()
    }

    /// How changes are detected now.
    #[must_use]
    pub fn mode(&self) -> RelistMode {
        match self.cache.stream() {
            StreamState::Open { .. }
                if self
                    .cache
                    .unreported()
                    .is_some_and(|changed_at| changed_at.elapsed() >= schedule::REPORT_LIMIT) =>
            {
                RelistMode::Lists("the event stream is open but reports no changes".to_owned())
            }
            StreamState::Open { .. } => RelistMode::Events,
            StreamState::Off => RelistMode::Lists("the event stream is switched off".to_owned()),
            StreamState::Unsupported => RelistMode::Lists("the runtime has no event stream".to_owned()),
            StreamState::Broken { reason } => RelistMode::Lists(format!("the event stream ended: {reason}")),
        }
    }

    /// The runtime's name and version; `containerd` and an empty version until it has responded.
    #[must_use]
    pub fn runtime_version(&self) -> RuntimeVersion {
        self.health.version().unwrap_or_else(|| RuntimeVersion {
            runtime_name: "containerd".to_owned(),
            runtime_version: String::new(),
            runtime_api_version: String::new(),
        })
    }

    /// The runtime's features; `None` until it has responded.
    #[must_use]
    pub fn runtime_features(&self) -> Option<cri::RuntimeFeatures> {
        self.health.features()
    }

    /// The runtime's handlers; none until it has responded.
    #[must_use]
    pub fn runtime_handlers(&self) -> Arc<[cri::Handler]> {
        self.health.handlers()
    }

    /// Whether a handler supports recursive read-only mounts; the default handler's name is empty.
    /// `false` until the runtime has responded.
    #[must_use]
    pub fn can_mount_recursively_read_only(&self, handler: &str) -> bool {
        self.health.handler(handler).is_some_and(|handler| handler.recursive_read_only_mounts)
    }

    /// The runtime's name and version; `None` until it has responded.
    #[must_use]
    pub fn known_runtime_version(&self) -> Option<RuntimeVersion> {
        self.health.version()
    }

    /// Whether the runtime is ready, and if not, why.
    #[must_use]
    pub fn runtime_health(&self) -> RuntimeHealth {
        self.health.get(self.cache.last_relist(), Instant::now())
    }
}

/// Inspects a pod that was listed.
pub(super) fn inspect_listed(cri: &RuntimeClient, listed: &ListedPod) -> Result<PodRuntime, CriError> {
    let mut pod = cri::inspect_pod(cri, listed)?;
    for container in &mut pod.containers {
        termination::add_message(container);
    }
    Ok(pod)
}

/// A guard: the `observe` thread does not inspect the pod before it is dropped; see [`Observe::mark_busy`].
pub struct BusyGuard {
    cache: Cache,
    uid: PodUid,
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.cache.set_busy(&self.uid, false);
    }
}
