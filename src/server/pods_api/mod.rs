//! The pods API, v1alpha1: the node's pods with their newest statuses, also while the API server cannot
//! be reached (Go: pkg/kubelet/apis/pods).
//!
//! Agents of the node call it over a socket below the root directory, which only root can open. A call
//! has a thread while it lasts (`rpc-call`), also a watch. A watch reads the changes of all statuses from
//! a channel with [`BUFFERED_EVENTS`] places; without a watch there is no channel.

mod compose;
mod encode;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crossbeam_channel::select_biased;

use super::bucket::Bucket;
use crate::model::api::{self, PodStatus};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::status::{Change, Feed};
use crate::transport::generated::{methods, pods as pb};
use crate::transport::rpc_server::{Outgoing, RpcError, Server, Service};
use crate::util::disk_writes;
use crate::util::lock::LockExt;
use crate::util::metrics::CounterVec;
use crate::util::stop::StopToken;

/// The directory below the root directory.
const DIRECTORY: &str = "pods-api";
const SOCKET: &str = "pods-api.sock";
const VERSION: &str = "v1alpha1";
/// Changes that wait for the client of a watch.
const BUFFERED_EVENTS: usize = 100;
/// Watches at once: each has a thread, and the other calls of the socket need some, too.
///
/// DIFFERS: upstream has no limit.
const MAX_WATCHES: usize = 16;
/// The status of a watch whose client did not read in time.
const SLOW: &str = "watch client channel closed";

/// Returns the status of a pod, if this agent has computed it.
type FindStatus = dyn Fn(&PodUid) -> Option<Arc<PodStatus>> + Send + Sync;

/// Where the responses come from.
pub(crate) struct Deps {
    /// All pods that sources have; `None` until every source has delivered a set.
    pub pods: Box<dyn Fn() -> Option<Vec<Pod>> + Send + Sync>,
    /// The status that this agent has computed for a pod.
    pub status: Box<FindStatus>,
    /// All changes of statuses from now on, of which so many may wait.
    pub changes: Box<dyn Fn(usize) -> Feed + Send + Sync>,
}

/// Serves the API on `<root_dir>/pods-api/pods-api.sock`. Dropping the server ends it.
///
/// # Errors
/// When the directory or the socket cannot be made.
pub(crate) fn serve(root_dir: &Path, deps: Deps) -> io::Result<Server> {
    let directory = root_dir.join(DIRECTORY);
    disk_writes::make_directories(&directory, 0o750)?;
    Server::start(&directory.join(SOCKET), [service(deps, Bucket::new(Instant::now()))])
}

struct Shared {
    deps: Deps,
    /// The rate of all requests but watches.
    bucket: Mutex<Bucket>,
    watches: AtomicUsize,
}

impl Shared {
    fn admit(&self) -> Result<&Deps, RpcError> {
        match self.bucket.locked().take(Instant::now()) {
            true => Ok(&self.deps),
            false => Err(RpcError::resource_exhausted("rejected by rate limit")),
        }
    }

    /// `None`: there are enough.
    fn admit_watch(&self) -> Option<WatchPermit<'_>> {
        let before = self.watches.fetch_add(1, Ordering::AcqRel);
        // Dropped again if there are too many.
        let permit = WatchPermit(&self.watches);
        (before < MAX_WATCHES).then_some(permit)
    }
}

/// One watch among [`MAX_WATCHES`], counted until this is dropped.
struct WatchPermit<'a>(&'a AtomicUsize);

impl Drop for WatchPermit<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn service(deps: Deps, bucket: Bucket) -> Service {
    let shared = Arc::new(Shared { deps, bucket: Mutex::new(bucket), watches: AtomicUsize::new(0) });
    let (for_list, for_get, for_watch) = (Arc::clone(&shared), Arc::clone(&shared), shared);
    Service::new()
        .unary(&methods::pods::LIST_PODS, move |_: pb::ListPodsRequest, _| {
            let deps = for_list.admit()?;
            counted(&metrics::PODS_API_LISTS, list(deps))
        })
        .unary(&methods::pods::GET_POD, move |request: pb::GetPodRequest, _| {
            let deps = for_get.admit()?;
            counted(&metrics::PODS_API_GETS, get(deps, &request.pod_uid))
        })
        .stream(&methods::pods::WATCH_PODS, move |_: pb::WatchPodsRequest, out, stop| {
            let ended = match for_watch.admit_watch() {
                Some(_place) => watch(&for_watch.deps, out, stop),
                None => Err(RpcError::resource_exhausted(format!("{MAX_WATCHES} watches are open"))),
            };
            counted(&metrics::PODS_API_WATCHES, ended)
        })
}

/// Counts a request by its outcome. Those above the rate are not counted, as upstream.
fn counted<T>(of_method: &CounterVec<2>, outcome: Result<T, RpcError>) -> Result<T, RpcError> {
    let code = outcome.as_ref().err().map_or("OK", |refusal| refusal.kind().as_str());
    metrics::PODS_API_REQUESTS.inc([VERSION, code]);
    of_method.inc([VERSION, code]);
    outcome
}

/// All pods by UID, with their statuses.
fn pods(deps: &Deps) -> Result<Vec<Pod>, RpcError> {
    let Some(mut pods) = (deps.pods)() else {
        return Err(RpcError::failed_precondition("Kubelet is initializing"));
    };
    pods.sort_by(|left, right| left.uid().as_str().cmp(right.uid().as_str()));
    Ok(pods)
}

fn encoded(object: &api::Pod) -> Result<Vec<u8>, RpcError> {
    encode::pod(object).map_err(|error| RpcError::internal(format!("failed to marshal pod: {error}")))
}

fn encoded_now(deps: &Deps, pod: &Pod) -> Result<Vec<u8>, RpcError> {
    encoded(&compose::with_status(pod, (deps.status)(pod.uid()).as_deref()))
}

fn list(deps: &Deps) -> Result<pb::ListPodsResponse, RpcError> {
    let all: Result<_, RpcError> = pods(deps)?.iter().map(|pod| encoded_now(deps, pod)).collect();
    Ok(pb::ListPodsResponse { pods: all?, ..Default::default() })
}

fn get(deps: &Deps, uid: &str) -> Result<pb::GetPodResponse, RpcError> {
    match pods(deps)?.iter().find(|pod| pod.uid().as_str() == uid) {
        Some(pod) => Ok(pb::GetPodResponse { pod: encoded_now(deps, pod)?, ..Default::default() }),
        None => Err(RpcError::not_found(format!("pod with UID {uid} not found"))),
    }
}

/// Sends all pods and then all changes, until the client leaves or reads too slowly.
fn watch(deps: &Deps, out: &mut Outgoing<pb::WatchPodsEvent>, stop: &StopToken) -> Result<(), RpcError> {
    // Before the pods are listed: a change meanwhile is sent after them.
    let feed = (deps.changes)(BUFFERED_EVENTS);
    let mut sent = SentPods::default();
    for pod in pods(deps)? {
        sent.0.insert(pod.uid().clone(), SentPod::new(&pod));
        send(&feed, out, stop, pb::EventType::ADDED, encoded_now(deps, &pod)?)?;
    }
    send(&feed, out, stop, pb::EventType::INITIAL_SYNC_COMPLETE, Vec::new())?;
    let progress = out.progress();
    loop {
        if out.has_client_left() {
            return Err(RpcError::canceled("context canceled"));
        }
        select_biased! {
            recv(stop.signal()) -> _ => return Err(RpcError::unavailable("the kubelet stops")),
            recv(progress) -> _ => {}
            recv(feed.changes()) -> change => {
                let Ok(change) = change else { return Err(RpcError::resource_exhausted(SLOW)) };
                if let Some((kind, object)) = sent.event(change) {
                    send(&feed, out, stop, kind, encoded(&object)?)?;
                }
            }
        }
    }
}

fn send(
    feed: &Feed,
    out: &mut Outgoing<pb::WatchPodsEvent>,
    stop: &StopToken,
    kind: pb::EventType,
    pod: Vec<u8>,
) -> Result<(), RpcError> {
    let event = pb::WatchPodsEvent { type_: kind.into(), pod, ..Default::default() };
    if out.send(event, stop).is_ok() {
        return Ok(());
    }
    if out.has_client_left() {
        return Err(RpcError::canceled("context canceled"));
    }
    if stop.is_stopped() {
        return Err(RpcError::unavailable("the kubelet stops"));
    }
    feed.count_dropped();
    Err(RpcError::resource_exhausted(SLOW))
}

/// A pod as a watch has sent it last.
enum SentPod {
    /// With its namespace and name.
    Present(String, String),
    /// Its end was sent.
    Ended,
}

impl SentPod {
    fn new(pod: &Pod) -> SentPod {
        SentPod::Present(pod.namespace().to_owned(), pod.name().to_owned())
    }
}

/// The pods that a watch has sent.
#[derive(Default)]
struct SentPods(BTreeMap<PodUid, SentPod>);

impl SentPods {
    /// The event of a change; `None`: it was sent already.
    fn event(&mut self, change: Change) -> Option<(pb::EventType, api::Pod)> {
        match change {
            Change::Stored { pod, status, is_first } => {
                if matches!(self.0.get(pod.uid()), Some(SentPod::Ended)) {
                    return None;
                }
                self.0.insert(pod.uid().clone(), SentPod::new(&pod));
                let kind = if is_first { pb::EventType::ADDED } else { pb::EventType::MODIFIED };
                Some((kind, compose::with_status(&pod, Some(&status))))
            }
            Change::Ended(pod) => {
                let before = self.0.insert(pod.uid().clone(), SentPod::Ended);
                let is_new = !matches!(before, Some(SentPod::Ended));
                let object = compose::identity(pod.uid(), pod.namespace(), pod.name());
                is_new.then_some((pb::EventType::DELETED, object))
            }
            // A pod that was refused has no other end.
            Change::Forgotten(uid) => match self.0.remove(&uid)? {
                SentPod::Present(namespace, name) => {
                    Some((pb::EventType::DELETED, compose::identity(&uid, &namespace, &name)))
                }
                SentPod::Ended => None,
            },
        }
    }
}

#[cfg(test)]
mod tests;
