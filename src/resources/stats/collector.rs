//! One collection at a time, whose result all callers share.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::cri::CriError;
use crate::model::ids::PodUid;
use crate::model::runtime::ListedPod;
use crate::resources::Roots;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Stack};
use crate::util::tracing;
use crossbeam_channel::{Receiver, bounded};

use super::cgroup::Tree;
use super::cgroup_paths::CgroupPaths;
use super::collect::VolumeReading;
use super::node_use::NodePaths;
use super::processes::Budget;
use super::rates::Rates;
use super::request::{FRESH, StatsRequest};
use super::runtime_stats::{Part, Query, Responses, RuntimeQueries};
use super::sample::{NodeUse, Snapshot, VolumeUse};
use super::settings::{
    Deps, FindInspection, ListPods, ListVolumes, PodCgroupPaths, PodMemoryLimit, Settings,
};
use super::space::Walk;
use super::{collect, node_use, space};

/// The time between the two samples of the first request.
const FIRST_GAP: Duration = Duration::from_millis(200);

/// The longest wait for another caller's collection.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Why there are no numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StatsError {
    /// The machine's own cgroup cannot be read.
    #[error("failed to get root cgroup stats: there is nothing to read below {}", .0.display())]
    RootCgroup(PathBuf),
    /// The file system of the root directory cannot be read.
    #[error("failed to get rootFs stats: cannot read {}", .0.display())]
    RootFs(PathBuf),
    /// The runtime does not report the file system of images.
    #[error("failed to get imageFs stats: {0}")]
    ImageFs(CriError),
    /// Another caller's collection takes too long.
    #[error("another collection has not ended after {MAX_WAIT:?}")]
    Busy,
}

/// The state of a collection, which it leaves for the next one.
#[derive(Default)]
pub(super) struct CollectionState {
    pub(super) rates: Rates,
    pub(super) cgroup_paths: CgroupPaths,
    pub(super) volumes: HashMap<PodUid, PodWalk>,
    /// The remaining budget for reading processes.
    pub(super) budget: Budget,
}

/// The last walk through the volumes of a pod.
pub(super) struct PodWalk {
    /// When the next one is due.
    pub(super) due: Instant,
    pub(super) took: Duration,
    pub(super) volumes: Vec<VolumeUse>,
    /// The walks that go on next time, by volume.
    pub(super) walks: BTreeMap<String, Walk>,
}

impl Default for PodWalk {
    fn default() -> Self {
        PodWalk { due: Instant::now(), took: Duration::ZERO, volumes: Vec::new(), walks: BTreeMap::new() }
    }
}

struct State {
    /// Taken by the caller that collects.
    collection: Option<Box<CollectionState>>,
    last: Option<(StatsRequest, Instant, Arc<Snapshot>)>,
    /// Collections that only wait for the runtime.
    finishing: Vec<StatsRequest>,
}

pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) cgroups: PodCgroupPaths,
    pub(super) pods: Box<ListPods>,
    pub(super) pod: Box<FindInspection>,
    pub(super) memory_limit: Box<PodMemoryLimit>,
    pub(super) volumes: Box<ListVolumes>,
    pub(super) queries: RuntimeQueries,
    pub(super) tree: Tree,
    state: Mutex<State>,
    done: Condvar,
}

/// Collects statistics. Clones share it.
#[derive(Clone)]
pub(crate) struct Collector {
    shared: Arc<Shared>,
}

/// The right to collect, with the state of the collections. Dropping it returns both, also when the
/// collection panics.
struct CollectionGuard<'a> {
    shared: &'a Shared,
    collection: Box<CollectionState>,
}

impl<'a> CollectionGuard<'a> {
    /// Lets others collect before the collection has ended: callers with the same request wait for it.
    fn finish_later(self, wanted: StatsRequest) -> PendingCollection<'a> {
        self.shared.state.locked().finishing.push(wanted);
        PendingCollection { shared: self.shared, wanted, result: None }
    }
}

impl Drop for CollectionGuard<'_> {
    fn drop(&mut self) {
        self.shared.state.locked().collection = Some(std::mem::take(&mut self.collection));
        self.shared.done.notify_all();
    }
}

/// A collection that waits for the runtime. Ends also when that fails or panics.
struct PendingCollection<'a> {
    shared: &'a Shared,
    wanted: StatsRequest,
    result: Option<Arc<Snapshot>>,
}

impl Drop for PendingCollection<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.locked();
        if let Some(index) = state.finishing.iter().position(|request| *request == self.wanted) {
            state.finishing.swap_remove(index);
        }
        if let Some(result) = self.result.take() {
            state.last = Some((self.wanted, Instant::now(), result));
        }
        drop(state);
        self.shared.done.notify_all();
    }
}

/// Waits for the runtime's responses to a pending query.
fn wait(responses: &Receiver<Responses>) -> Responses {
    let _waiting = threads::waiting("the runtime's statistics");
    // The query has its own deadline.
    responses.recv().unwrap_or_else(|_| Responses { incomplete: true, ..Responses::default() })
}

/// The start of a request.
enum Start<'a> {
    /// Another caller has just collected.
    Snapshot(Arc<Snapshot>),
    /// The caller collects.
    Collect(CollectionGuard<'a>),
}

impl Shared {
    /// Waits for the right to collect, unless the numbers are known already.
    fn borrow(&self, wanted: StatsRequest, until: Instant) -> Result<Start<'_>, StatsError> {
        let mut state = self.state.locked();
        loop {
            if let Some((last_request, time, snapshot)) = &state.last
                && wanted.is_met_by(*last_request)
                && time.elapsed() < FRESH
            {
                return Ok(Start::Snapshot(Arc::clone(snapshot)));
            }
            let is_pending = state.finishing.iter().any(|pending| wanted.is_met_by(*pending));
            if !is_pending && let Some(collection) = state.collection.take() {
                return Ok(Start::Collect(CollectionGuard { shared: self, collection }));
            }
            let _waiting = threads::waiting("another collection of statistics");
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StatsError::Busy);
            }
            state = self.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Collector {
    /// Nothing is read yet, except that links in the root directory are resolved: the mount table
    /// names mounts by their real path. The directory has to exist by then.
    pub(crate) fn new(mut settings: Settings, deps: Deps) -> Self {
        if let Ok(real) = std::fs::canonicalize(&settings.root_dir) {
            settings.root_dir = real;
        }
        let tree = Tree::new(&settings.cgroups);
        let state = Mutex::new(State { collection: Some(Box::default()), last: None, finishing: Vec::new() });
        let Deps { cgroups, pods, pod, memory_limit, volumes, runtime } = deps;
        let queries = RuntimeQueries::new(runtime);
        let done = Condvar::new();
        let shared =
            Shared { settings, cgroups, pods, pod, memory_limit, volumes, queries, tree, state, done };
        Collector { shared: Arc::new(shared) }
    }

    /// The numbers of this moment, or those of a collection that ended not a second ago.
    ///
    /// # Errors
    /// When the machine itself cannot be read. A pod that cannot is left out.
    pub(crate) fn snapshot(&self, wanted: StatsRequest) -> Result<Arc<Snapshot>, StatsError> {
        let shared = &*self.shared;
        let until = Instant::now() + MAX_WAIT;
        // If the numbers of pods come from the runtime.
        let mut stats: Option<Responses> = None;
        loop {
            let mut borrowed = match shared.borrow(wanted, until)? {
                Start::Snapshot(snapshot) => return Ok(snapshot),
                Start::Collect(borrowed) => borrowed,
            };
            let pods = (shared.pods)();
            let query = shared.query_for(&mut borrowed.collection, &pods, wanted);
            if stats.is_none() && query.pods == Some(Part::All) {
                // Returned before the wait, as the runtime may be slow.
                drop(borrowed);
                stats = Some(shared.queries.send(&query));
                continue;
            }
            let pending = (stats.is_none() && query.is_any()).then(|| self.send_in_thread(query.clone()));
            // It is not needed any more; two would take memory.
            let old = shared.state.locked().last.take();
            drop(old);
            if wanted.rates && borrowed.collection.rates.is_stale(Instant::now()) {
                shared.first_samples(&mut borrowed.collection, &pods);
                let _ = StopToken::never().wait(FIRST_GAP);
            }
            let known = stats.unwrap_or_default();
            let mut snapshot = shared.collect(&mut borrowed.collection, &pods, &known, wanted)?;
            let mut finishing = borrowed.finish_later(wanted);
            let responses = pending.map_or(Ok(known), |pending| pending.map(|responses| wait(&responses)));
            // If no thread could be started.
            let responses = responses.unwrap_or_else(|_| shared.queries.send(&query));
            shared.complete(&mut snapshot, &responses, wanted)?;
            let snapshot = Arc::new(snapshot);
            finishing.result = Some(Arc::clone(&snapshot));
            return Ok(snapshot);
        }
    }

    /// Sends the query to the runtime in a thread, parallel to the caller.
    fn send_in_thread(&self, query: Query) -> std::io::Result<Receiver<Responses>> {
        let (sender, responses) = bounded(1);
        let (shared, parent) = (Arc::clone(&self.shared), tracing::current());
        let thread = threads::spawn("stats", Stack::Small, OnDeath::Unsupervised, move |_| {
            let _span = tracing::enter(parent);
            // The caller may have failed meanwhile.
            let _ = sender.send(shared.queries.send(&query));
        })?;
        // The thread ends with the call.
        thread.leave();
        Ok(responses)
    }

    /// The numbers of the machine that eviction compares with its thresholds, read now. Never waits
    /// for another collection or for the runtime. `None`: the machine's memory cannot be read.
    pub(crate) fn node_use(&self, places: &NodePaths) -> Option<NodeUse> {
        node_use::read(&self.shared.tree, &self.shared.settings, places)
    }

    /// Volumes with a claim behind them, for the metrics by claim; usually there are none,
    /// and then nothing is read.
    pub(crate) fn claims(&self, uid: &PodUid) -> Vec<VolumeUse> {
        let mut volumes = (self.shared.volumes)(uid);
        volumes.retain(|volume| volume.claim.is_some());
        let until = Instant::now() + collect::WALKS;
        let used = |volume| match collect::volume_use(uid, volume, None, until, until) {
            VolumeReading::Known(used, _) => Some(*used),
            VolumeReading::Pending | VolumeReading::Gone => None,
        };
        volumes.iter().filter_map(used).collect()
    }

    /// The size of a container's logs, in bytes.
    pub(crate) fn log_bytes(&self, pod: &ListedPod, container: &str) -> Option<u64> {
        let dir = collect::logs_dir(&self.shared.settings, pod)?.join(container);
        let content = space::directory_usage(&dir, Instant::now() + collect::WALKS)?;
        content.complete.then_some(content.bytes)
    }

    /// The cgroup version and the machine's files, for the pages that show them.
    pub(crate) fn roots(&self) -> &Roots {
        &self.shared.settings.roots
    }
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod page_tests;
#[cfg(test)]
#[path = "tests.rs"]
mod tests;
