//! What the node, its pods and their containers use (Go: pkg/kubelet/stats, cadvisor).
//!
//! Owns: one [`Collector`] with the last samples, which rates are made from.
//! Threads: `stats`, while the runtime is asked for statistics. The first caller collects on its
//! own thread; callers that arrive during a collection wait for it and share its result. Without
//! a caller nothing is read.
//! Calls: the runtime is asked at the same time (before, if all numbers come from it), once for
//! all callers (`flight`), for a few seconds at most. A caller that needs only files does not
//! wait for that call.
//! Sources: cgroup files where a container's cgroup is found (`places`), else the runtime
//! (`told`); `/proc`, statfs, and walks through volumes, at most once per period.
//! Invariants: a lock is held for look-ups only; an unknown number is absent; a container that
//! has ended is not shown; the stored samples are limited to what runs now.
//! Absent on purpose: a history, accelerators, metrics that users define.

mod cadvisor;
mod cgroup;
mod collect;
mod disks;
mod flight;
mod mounted;
#[cfg(test)]
mod page_tests;
mod pages;
mod places;
mod proc;
mod processes;
mod rates;
mod sample;
mod space;
mod summary;
#[cfg(test)]
mod tests;
mod told;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use jiff::Timestamp;

pub use cadvisor::cadvisor;
pub use pages::{resource, volumes};
pub use sample::{ContainerUse, FileSystem, NodeUse, Numbers, PodUse, Pressure, Share, Snapshot, VolumeUse};
pub use summary::json;
pub use told::Runtime;

use super::Roots;
use super::cgroups::Cgroups;
use crate::cri::CriError;
use crate::model::ids::PodUid;
use crate::model::runtime::{ListedPod, PodRuntime};
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Stack};
use cgroup::Tree;
use places::Places;
use processes::Budget;
use rates::Rates;
use told::{Answers, Line, Need, Part};

/// Who asks again within this time gets the same numbers.
const FRESH: Duration = Duration::from_secs(1);

/// Between the two samples that a first question is answered from.
const FIRST_GAP: Duration = Duration::from_millis(200);

/// How long somebody waits for a collection that another one makes.
const PATIENCE: Duration = Duration::from_secs(30);

/// How much there is to find out; each includes what is before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// Processors and memory.
    Basic,
    /// Also file systems, networks, processes and volumes.
    Full,
}

/// What a question needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// How much.
    pub depth: Depth,
    /// Whether the details of `/metrics/cadvisor` are needed.
    pub details: bool,
    /// Whether a first question waits for a second sample, so that there are rates.
    pub rates: bool,
}

impl Wanted {
    /// For `/stats/summary`.
    pub const SUMMARY: Wanted = Wanted { depth: Depth::Full, details: false, rates: true };
    /// For `/stats/summary?only_cpu_and_memory=true`, and for people.
    pub const BRIEF: Wanted = Wanted { depth: Depth::Basic, details: false, rates: true };
    /// For `/metrics/resource`.
    pub const RESOURCE: Wanted = Wanted { depth: Depth::Basic, details: false, rates: false };
    /// For `/metrics/cadvisor`.
    pub const CADVISOR: Wanted = Wanted { depth: Depth::Full, details: true, rates: false };

    /// Whether the answer to `other` answers this, too. One with more depth does not: what it
    /// has beyond the question would be shown.
    fn is_met_by(self, other: Wanted) -> bool {
        self.depth == other.depth && self.details <= other.details && self.rates <= other.rates
    }
}

/// A volume of a pod, as far as its fullness goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeAt {
    /// Its name in the pod.
    pub name: String,
    /// Where it is on the node.
    pub path: PathBuf,
    /// Whether its content is counted file by file; else the file system tells.
    pub walk: bool,
    /// Whether it counts as the pod's local storage.
    pub ephemeral: bool,
    /// The PersistentVolumeClaim behind it.
    pub claim: Option<String>,
}

/// What does not change.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The node's name.
    pub node: String,
    /// `/proc` and `/sys`.
    pub roots: Roots,
    /// The cgroup file systems.
    pub cgroups: Cgroups,
    /// `--root-dir`.
    pub root_dir: PathBuf,
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
    /// The cgroups of `kubelet`, `runtime` and `misc`, as configured; empty: not known.
    pub system: [(&'static str, String); 3],
    /// When the agent was started.
    pub started: Timestamp,
    /// Bytes of memory that pods may not have.
    pub reserved_memory: u64,
    /// `volumeStatsAggPeriod`; `None`: volumes are not looked at.
    pub volume_period: Option<Duration>,
}

/// All pods of the last list.
pub type ListPods = dyn Fn() -> Arc<BTreeMap<PodUid, ListedPod>> + Send + Sync;
/// The last look at a pod.
pub type LookAtPod = dyn Fn(&PodUid) -> Option<Arc<PodRuntime>> + Send + Sync;
/// The bytes of memory that a pod may use in all, if all of its containers are limited.
pub type LimitOfPod = dyn Fn(&PodUid) -> Option<u64> + Send + Sync;
/// The volumes of a pod that are mounted.
pub type ListVolumes = dyn Fn(&PodUid) -> Vec<VolumeAt> + Send + Sync;

/// Where facts come from.
pub struct Deps {
    /// What runs.
    pub pods: Box<ListPods>,
    /// The names of images.
    pub pod: Box<LookAtPod>,
    /// Its limit of memory.
    pub memory_limit: Box<LimitOfPod>,
    /// Its volumes.
    pub volumes: Box<ListVolumes>,
    /// The runtime's own numbers.
    pub runtime: Box<dyn Runtime>,
}

/// Why there are no numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StatsError {
    /// The machine's own cgroup cannot be read.
    #[error("failed to get root cgroup stats: there is nothing to read below {}", .0.display())]
    RootCgroup(PathBuf),
    /// The file system of the root directory does not answer.
    #[error("failed to get rootFs stats: cannot look at {}", .0.display())]
    RootFs(PathBuf),
    /// The runtime does not tell where images are.
    #[error("failed to get imageFs stats: {0}")]
    ImageFs(CriError),
    /// Somebody else's collection takes too long.
    #[error("another collection has not ended after {PATIENCE:?}")]
    Busy,
}

/// When the machine was started.
#[must_use]
pub fn booted(roots: &Roots) -> Option<Timestamp> {
    proc::booted(&roots.proc)
}

/// What one collection leaves for the next.
#[derive(Default)]
struct Work {
    rates: Rates,
    places: Places,
    volumes: HashMap<PodUid, (Instant, Vec<VolumeUse>)>,
    /// What may still be read of processes.
    budget: Budget,
}

struct State {
    /// Taken by the one who collects.
    work: Option<Box<Work>>,
    last: Option<(Wanted, Instant, Arc<Snapshot>)>,
    /// Collections that only wait for the runtime.
    finishing: Vec<Wanted>,
}

struct Shared {
    settings: Settings,
    pods: Box<ListPods>,
    pod: Box<LookAtPod>,
    memory_limit: Box<LimitOfPod>,
    volumes: Box<ListVolumes>,
    line: Line,
    tree: Tree,
    state: Mutex<State>,
    done: Condvar,
}

/// The one who knows what is used. Clones share it.
#[derive(Clone)]
pub struct Collector {
    shared: Arc<Shared>,
}

/// Gives the work back, also when the collection panics.
struct Borrowed<'a> {
    shared: &'a Shared,
    work: Box<Work>,
}

impl<'a> Borrowed<'a> {
    /// Gives it back, but is not done yet: who wants the same waits for it.
    fn finish_later(self, wanted: Wanted) -> Finishing<'a> {
        self.shared.lock().finishing.push(wanted);
        Finishing { shared: self.shared, wanted, result: None }
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.shared.lock().work = Some(std::mem::take(&mut self.work));
        self.shared.done.notify_all();
    }
}

/// A collection that waits for the runtime. Ends also when that fails or panics.
struct Finishing<'a> {
    shared: &'a Shared,
    wanted: Wanted,
    result: Option<Arc<Snapshot>>,
}

impl Drop for Finishing<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if let Some(at) = state.finishing.iter().position(|one| *one == self.wanted) {
            state.finishing.swap_remove(at);
        }
        if let Some(result) = self.result.take() {
            state.last = Some((self.wanted, Instant::now(), result));
        }
        drop(state);
        self.shared.done.notify_all();
    }
}

/// What the runtime says to a question under way.
fn wait(answers: &Receiver<Answers>) -> Answers {
    let _waiting = threads::waiting("the runtime's statistics");
    // The question has a deadline of its own.
    answers.recv().unwrap_or_else(|_| Answers { incomplete: true, ..Answers::default() })
}

/// How a question begins.
enum Turn<'a> {
    /// Somebody has found out just now.
    Known(Arc<Snapshot>),
    /// Whoever has the work collects.
    Ours(Borrowed<'a>),
}

impl Shared {
    /// Takes the work, unless the answer is there.
    fn borrow(&self, wanted: Wanted, until: Instant) -> Result<Turn<'_>, StatsError> {
        let mut state = self.lock();
        loop {
            if let Some((had, at, snapshot)) = &state.last
                && wanted.is_met_by(*had)
                && at.elapsed() < FRESH
            {
                return Ok(Turn::Known(Arc::clone(snapshot)));
            }
            let soon = state.finishing.iter().any(|had| wanted.is_met_by(*had));
            if !soon && let Some(work) = state.work.take() {
                return Ok(Turn::Ours(Borrowed { shared: self, work }));
            }
            let _waiting = threads::waiting("another collection of statistics");
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StatsError::Busy);
            }
            state = self.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector {
    /// Nothing is read yet, except that links in the root directory are resolved: the mount table
    /// names mounts by their real path. The directory has to exist by then.
    #[must_use]
    pub fn new(mut settings: Settings, deps: Deps) -> Self {
        if let Ok(real) = std::fs::canonicalize(&settings.root_dir) {
            settings.root_dir = real;
        }
        let tree = Tree::new(&settings.cgroups);
        let state = Mutex::new(State { work: Some(Box::default()), last: None, finishing: Vec::new() });
        let Deps { pods, pod, memory_limit, volumes, runtime } = deps;
        let line = Line::new(runtime);
        let done = Condvar::new();
        let shared = Shared { settings, pods, pod, memory_limit, volumes, line, tree, state, done };
        Collector { shared: Arc::new(shared) }
    }

    /// The numbers of this moment, or those of a collection that ended not a second ago.
    ///
    /// # Errors
    /// When the machine itself cannot be looked at. A pod that cannot is left out.
    pub fn snapshot(&self, wanted: Wanted) -> Result<Arc<Snapshot>, StatsError> {
        let shared = &*self.shared;
        let until = Instant::now() + PATIENCE;
        // Where numbers of pods themselves come from the runtime.
        let mut told: Option<Answers> = None;
        loop {
            let mut borrowed = match shared.borrow(wanted, until)? {
                Turn::Known(snapshot) => return Ok(snapshot),
                Turn::Ours(borrowed) => borrowed,
            };
            let pods = (shared.pods)();
            let need = shared.need(&mut borrowed.work, &pods, wanted);
            if told.is_none() && need.pods == Some(Part::All) {
                // Given back: the runtime may take its time.
                drop(borrowed);
                told = Some(shared.line.ask(&need));
                continue;
            }
            let asking = (told.is_none() && need.is_any()).then(|| self.ask(need.clone()));
            // Of no use any more: two of them need not be kept.
            let old = shared.lock().last.take();
            drop(old);
            if wanted.rates && borrowed.work.rates.is_stale(Instant::now()) {
                shared.first_samples(&mut borrowed.work, &pods);
                let _ = StopToken::never().wait(FIRST_GAP);
            }
            let known = told.unwrap_or_default();
            let mut snapshot = shared.collect(&mut borrowed.work, &pods, &known, wanted)?;
            let mut finishing = borrowed.finish_later(wanted);
            let answers = asking.map_or(Ok(known), |asking| asking.map(|answers| wait(&answers)));
            // Without a thread for it.
            let answers = answers.unwrap_or_else(|_| shared.line.ask(&need));
            shared.complete(&mut snapshot, &answers, wanted)?;
            let snapshot = Arc::new(snapshot);
            finishing.result = Some(Arc::clone(&snapshot));
            return Ok(snapshot);
        }
    }

    /// Asks the runtime while the caller does something else.
    fn ask(&self, need: Need) -> std::io::Result<Receiver<Answers>> {
        let (answer, answers) = bounded(1);
        let shared = Arc::clone(&self.shared);
        let thread = threads::spawn("stats", Stack::Small, OnDeath::Nobody, move |_| {
            // The one who asked may have failed meanwhile.
            let _ = answer.send(shared.line.ask(&need));
        })?;
        // It ends with the call.
        thread.leave();
        Ok(answers)
    }

    /// Volumes with a claim behind them, for the metrics by claim; usually there are none,
    /// and then nothing is looked at.
    #[must_use]
    pub fn claims(&self, uid: &PodUid) -> Vec<VolumeUse> {
        let mut volumes = (self.shared.volumes)(uid);
        volumes.retain(|volume| volume.claim.is_some());
        let until = Instant::now() + collect::WALKS;
        volumes.iter().filter_map(|volume| collect::volume_use(volume, until)).collect()
    }

    /// What the logs of a container take, in bytes.
    #[must_use]
    pub fn log_bytes(&self, pod: &ListedPod, container: &str) -> Option<u64> {
        let dir = collect::logs_dir(&self.shared.settings, pod)?.join(container);
        Some(space::content(&dir, Instant::now() + collect::WALKS)?.bytes)
    }

    /// The cgroup version and the machine's files, for the pages that show them.
    #[must_use]
    pub fn roots(&self) -> &Roots {
        &self.shared.settings.roots
    }
}
