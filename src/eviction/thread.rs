//! The thread `evict`: waits for the kernel, for a timer and for ended pods, and lets [`EvictionLoop`]
//! decide.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError};
use jiff::Timestamp;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::driver::{EvictionLoop, StatsScope, Wait, World};
use super::kernel::{Armed, KernelFiles, Signals};
use super::layout::{Layout, Reclaim};
use super::pass::{Settings, Shortage};
use super::report::{LatestReport, Report};
use super::signal::Signal;
use super::victim::Victim;
use super::watch::{SIGNAL_INTERVAL, WatchPlan};
use crate::cri::CriError;
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::resources::stats::sample::{NodeUse, Snapshot};
use crate::resources::stats::{NodePaths, StatsError};
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::wake::Wake;

/// The directories of the runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageDirectories {
    /// For images.
    pub images: PathBuf,
    /// For writable layers, if the runtime reports another one.
    pub containers: Option<PathBuf>,
}

/// Reads the machine's numbers.
pub(super) type ReadNode = dyn Fn(&NodePaths) -> Option<NodeUse> + Send;
pub(super) type Measure = dyn Fn(StatsScope) -> Result<Arc<Snapshot>, StatsError> + Send;

/// Why the directories of the runtime are not known.
#[derive(Debug, thiserror::Error)]
pub enum ImageDirectoriesError {
    /// The runtime does not respond.
    #[error(transparent)]
    Runtime(#[from] CriError),
    /// Its response is empty.
    #[error("the runtime reports no file system")]
    None,
}

/// Handles and functions of the rest of the agent.
pub struct Deps {
    /// Reads the machine's numbers.
    pub read_node: Box<ReadNode>,
    /// Measures pods.
    pub measure: Box<Measure>,
    /// Asks the runtime for its directories.
    pub image_directories: Box<dyn Fn() -> Result<ImageDirectories, ImageDirectoriesError> + Send>,
    /// The path of the cgroup of all pods, if there is one.
    pub pods_cgroup: Box<dyn Fn() -> Option<String> + Send>,
    /// The pods that have not ended.
    pub pods: Box<dyn Fn() -> Vec<Pod> + Send>,
    /// A pod with the resources that it was granted.
    pub granted: Box<dyn Fn(&Pod) -> Pod + Send>,
    /// Whether nothing of a pod runs any more.
    pub has_ended: Box<dyn Fn(&PodUid) -> bool + Send>,
    /// Orders the end of a pod.
    pub evict: Box<dyn Fn(&Victim) + Send>,
    /// Begins to free space. The channel has a message, or is closed, when this has ended; then
    /// the bell rings.
    pub reclaim: Box<dyn Fn(&'static [Reclaim]) -> Receiver<()> + Send>,
    /// Kubernetes events.
    pub events: EventSink,
    /// Where the conditions of the node are published.
    pub reports: LatestReport,
    /// Called when the conditions have changed.
    pub changed: Box<dyn Fn() + Send>,
    /// A directory on the file system of the root directory.
    pub root_dir: PathBuf,
    /// The files of the kernel.
    pub files: KernelFiles,
    /// The number of processors.
    pub processors: u32,
}

/// Starts the thread. `wake` has to ring when a pod that was evicted has ended, when a pod with a
/// limit of local storage was added, and when space was freed.
///
/// # Errors
/// When the thread cannot be started.
pub fn spawn(settings: Settings, deps: Deps, wake: &Wake, on_death: OnDeath) -> std::io::Result<Running> {
    let (own, waker) = (wake.clone(), wake.clone());
    let running = threads::spawn("evict", Stack::Large, on_death, move |stop| {
        let driver = EvictionLoop::new(settings, deps.processors);
        run(
            driver,
            Node { deps, places: NodePaths::default(), layout: None, reclaiming: None, failed: None },
            &own,
            &stop,
        );
    })?;
    Ok(running.with_waker(Box::new(move || waker.ring())))
}

fn run(mut driver: EvictionLoop, mut node: Node, wake: &Wake, stop: &StopToken) {
    let thresholds = driver.thresholds().to_vec();
    let mut signals = Signals::open(node.deps.files.clone(), |kernel| WatchPlan::new(&thresholds, kernel));
    let mut signaled = false;
    while !stop.is_stopped() {
        let mut turn = driver.turn(&mut node, signals.needs_polling(), Instant::now());
        let armed = turn.left.as_ref().map_or(Armed::Set, |left| signals.arm(left));
        if armed == Armed::Near {
            turn.within(SIGNAL_INTERVAL);
        }
        // Memory that grows all the time may pass each level: every second time it is waited.
        signaled =
            if armed == Armed::Passed && !signaled { true } else { wait(&turn, &signals, wake, signaled) };
        wake.silence();
        signals.take();
    }
}

/// Waits for the time of the next turn, for the bell, and for the kernel. Returns whether the kernel
/// may have signaled. After a signal (`signaled`) the next one is only waited for after a rest: the
/// kernel may signal all the time.
fn wait(turn: &Wait, signals: &Signals, wake: &Wake, signaled: bool) -> bool {
    let _waiting = threads::waiting("a shortage of memory or disk space");
    if turn.left.is_none() {
        ready(&[], wake, turn.until);
        return false;
    }
    if signaled {
        let rested = Instant::now() + SIGNAL_INTERVAL;
        let until = turn.until.map_or(rested, |until| until.min(rested));
        if ready(&[], wake, Some(until)) || turn.until.is_some_and(|until| until <= rested) {
            return false;
        }
    }
    ready(&signals.descriptors(), wake, turn.until) && !wake.is_ringing()
}

/// Whether one of the descriptors or the bell is ready before `until`.
fn ready(
    descriptors: &[(std::os::fd::BorrowedFd<'_>, PollFlags)],
    wake: &Wake,
    until: Option<Instant>,
) -> bool {
    let mut fds: Vec<PollFd<'_>> = vec![PollFd::new(wake, PollFlags::IN)];
    fds.extend(descriptors.iter().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)));
    loop {
        let left = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 })
        });
        match poll(&mut fds, left.as_ref()) {
            Err(Errno::INTR) => {}
            Ok(count) => return count > 0,
            Err(error) => {
                log::warn!("cannot wait for a shortage of memory: {error}");
                return false;
            }
        }
    }
}

/// The machine and the other rooms.
struct Node {
    deps: Deps,
    places: NodePaths,
    layout: Option<Layout>,
    reclaiming: Option<Receiver<()>>,
    /// The last failure that was logged.
    failed: Option<String>,
}

impl Node {
    /// Logs a failure once until the next success.
    fn fail(&mut self, text: String) {
        if self.failed.as_ref() != Some(&text) {
            log::warn!("{text}");
            self.failed = Some(text);
        }
    }
}

/// A directory that cannot be read.
type Unread<'a> = (&'a Path, Errno);

/// Reads how the directories share file systems; fails with the directory that cannot be read. If that is the
/// one for writable layers, it counts as being on the file system of the images, and is returned, too.
fn layout_of<'a>(
    root_dir: &'a Path,
    found: &'a ImageDirectories,
) -> Result<(Layout, Option<Unread<'a>>), Unread<'a>> {
    let device =
        |path: &'a Path| rustix::fs::stat(path).map(|stat| stat.st_dev).map_err(|error| (path, error));
    let (layers, unread) = match found.containers.as_deref().map(device).transpose() {
        Ok(layers) => (layers, None),
        Err(unread) => (None, Some(unread)),
    };
    Ok((Layout::from_devices(device(root_dir)?, device(&found.images)?, layers), unread))
}

impl World for Node {
    fn layout(&mut self) -> Option<Layout> {
        if self.layout.is_none() {
            let found = match (self.deps.image_directories)() {
                Ok(found) => found,
                Err(error) => {
                    self.fail(format!("cannot find out where images are: {error}"));
                    return None;
                }
            };
            let (layout, unread) = match layout_of(&self.deps.root_dir, &found) {
                Ok(layout) => layout,
                Err((path, error)) => {
                    self.fail(format!(
                        "cannot read the file system of {}: disks are not watched: {error}",
                        path.display()
                    ));
                    return None;
                }
            };
            self.places.images = Some(found.images.clone());
            if let Some((path, error)) = unread {
                // DIFFERS: upstream reads it once. Here it is read again at each pass.
                self.fail(format!(
                    "cannot read the file system of {}: writable layers count as being with the images: {error}",
                    path.display()
                ));
                return Some(layout);
            }
            self.layout = Some(layout);
            self.places.containers = found.containers;
            self.failed = None;
        }
        self.layout
    }

    fn read_node(&mut self) -> Option<NodeUse> {
        self.places.pods = (self.deps.pods_cgroup)();
        let found = (self.deps.read_node)(&self.places);
        if found.is_none() {
            self.fail("cannot read the machine's memory, so no pod is evicted".to_owned());
        }
        found
    }

    fn pods_cgroup(&mut self) -> Option<String> {
        self.places.pods.clone()
    }

    fn measure(&mut self, scope: StatsScope) -> Option<Snapshot> {
        match (self.deps.measure)(scope) {
            Ok(snapshot) => Some(Snapshot::clone(&snapshot)),
            Err(error) => {
                self.fail(format!("cannot measure pods, so no pod is evicted: {error}"));
                None
            }
        }
    }

    fn pods(&mut self) -> Vec<Pod> {
        (self.deps.pods)()
    }

    fn granted(&mut self, pod: &Pod) -> Pod {
        (self.deps.granted)(pod)
    }

    fn report_shortage(&mut self, shortage: &Shortage) {
        let reason = reasons::EVICTION_THRESHOLD_MET;
        self.deps.events.raise(Regarding::Node, EventType::Warning, reason, shortage.message.as_str());
    }

    fn count_age(&mut self, measured: &[(Signal, Timestamp)]) {
        let now = Timestamp::now();
        for (signal, time) in measured {
            let age = Duration::try_from(now.duration_since(*time)).unwrap_or_default();
            metrics::EVICTION_STATS_AGE.observe_duration([signal.as_str()], age);
        }
    }

    fn exceeded(&mut self, pod: &Pod) {
        let text = super::texts::exceeded_grace_period();
        log::warn!("an evicted pod has not ended in time pod={} uid={}", pod.full_name(), pod.uid());
        self.deps.events.warning(pod, reasons::EXCEEDED_GRACE_PERIOD, text);
    }

    fn reclaim(&mut self, what: &'static [Reclaim]) {
        self.reclaiming = Some((self.deps.reclaim)(what));
    }

    fn is_reclaimed(&mut self) -> bool {
        let ended = |done: &Receiver<()>| done.try_recv() != Err(TryRecvError::Empty);
        self.reclaiming.as_ref().is_none_or(ended)
    }

    fn evict(&mut self, victim: &Victim) {
        metrics::EVICTIONS.inc([victim.signal]);
        let (pod, message) = (&victim.pod, victim.message.as_str());
        log::warn!("evicting a pod: {message} pod={} uid={}", pod.full_name(), pod.uid());
        self.deps.events.annotated_warning(pod, reasons::EVICTED, message, victim.annotations.clone());
        (self.deps.evict)(victim);
    }

    fn has_ended(&mut self, pod: &PodUid) -> bool {
        (self.deps.has_ended)(pod)
    }

    fn publish(&mut self, report: Report) {
        let held: Vec<&str> = report.pressures.held().map(super::Pressure::as_str).collect();
        if self.deps.reports.set(report) {
            let held = if held.is_empty() { "none".to_owned() } else { held.join(", ") };
            log::info!("pressure conditions of the node: {held}");
            (self.deps.changed)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_not_known_before_root_directory_and_images_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let root_dir = dir.path();
        let missing = root_dir.join("missing");
        let layout = |images: &Path, containers: Option<&Path>| {
            let found =
                ImageDirectories { images: images.to_owned(), containers: containers.map(Path::to_owned) };
            let layout = layout_of(root_dir, &found).map_err(|(path, error)| (path.to_owned(), error));
            layout.map(|(layout, unread)| (layout, unread.map(|(path, _)| path.to_owned())))
        };
        assert_eq!(layout(&missing, None), Err((missing.clone(), Errno::NOENT)));
        assert_eq!(layout(root_dir, Some(&missing)), Ok((Layout::Single, Some(missing.clone()))));
        assert_eq!(layout(root_dir, Some(root_dir)), Ok((Layout::Single, None)));
        assert_eq!(layout(root_dir, Some(Path::new("/proc"))), Ok((Layout::Split, None)));
        assert_eq!(layout(Path::new("/proc"), None), Ok((Layout::Images, None)));
    }
}
