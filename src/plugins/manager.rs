//! The threads: one that waits for changes, and one per operation.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use rustix::event::PollFlags;
use rustix::io::Errno;

use super::state::{Operation, OperationResult, PluginState, SocketStatus};
use super::tree::Tree;
use super::{Handlers, handshake};
use crate::util::backoff::Failures;
use crate::util::lock::LockExt;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::untrusted;
use crate::util::wake::Wake;

/// The least time between two scans of a directory that changes all the time.
const PACE: Duration = Duration::from_millis(100);
/// The time between scans of directories that cannot be watched or read.
const UNWATCHED_INTERVAL: Duration = Duration::from_secs(10);
/// The pause after the kernel refused to start a thread or to wait.
const PAUSE: Duration = Duration::from_secs(1);
/// Results of operations that wait to be read; more of them wait in their threads.
const ENDED_CALLS: usize = 64;
/// How long an operation may take to end when the agent ends.
const END_LIMIT: Duration = Duration::from_secs(2);

/// What the watcher needs.
pub struct Settings {
    /// `<root-dir>/plugins_registry`.
    pub directory: PathBuf,
    /// The handler of each type.
    pub handlers: Handlers,
    /// Where sockets and plugins are entered.
    pub listing: KnownPlugins,
}

/// The sockets and plugins that are known. Clones share them; empty until the watcher is started.
#[derive(Clone, Default)]
pub struct KnownPlugins {
    state: Arc<Mutex<PluginState>>,
}

/// The watcher of the directory. Dropping it ends its threads; plugins stay registered.
pub struct Plugins {
    _running: Running,
}

impl Plugins {
    /// Creates the directory and starts the thread `plugins`.
    ///
    /// # Errors
    /// When the directory cannot be created, or a limit of the kernel is reached.
    pub fn start(settings: Settings, on_death: OnDeath) -> std::io::Result<Plugins> {
        let _created: OwnedFd = untrusted::make_directory(&settings.directory, 1, 0o750)?;
        let worker = PluginWatcher::new(settings, Box::new(spawn_call))?;
        let wake = worker.wake.clone();
        let running = threads::spawn("plugins", Stack::Large, on_death, move |stop| worker.run(&stop))?
            .with_waker(Box::new(move || wake.ring()));
        Ok(Plugins { _running: running })
    }
}

impl KnownPlugins {
    /// All sockets and plugins, for the status.
    #[must_use]
    pub fn list(&self) -> Vec<SocketStatus> {
        self.state.locked().list()
    }
}

type Call = Box<dyn FnOnce(StopToken) + Send>;

/// Starts the thread of an operation.
type SpawnCall = Box<dyn Fn(Call) -> std::io::Result<Running> + Send>;

fn spawn_call(call: Call) -> std::io::Result<Running> {
    threads::spawn("plugin-call", Stack::Large, OnDeath::Unsupervised, call)
}

struct PluginWatcher {
    tree: Tree,
    handlers: Arc<Handlers>,
    state: Arc<Mutex<PluginState>>,
    wake: Wake,
    results_tx: Sender<(PathBuf, OperationResult)>,
    results_rx: Receiver<(PathBuf, OperationResult)>,
    operation_threads: Vec<Running>,
    spawn: SpawnCall,
    /// Operations in sequence for which the kernel had no thread.
    refusals: Failures,
    /// No operation is started before this time.
    retry: Option<Instant>,
    is_truncated: bool,
    /// The error of the last scan.
    scan_error: Option<(PathBuf, Errno)>,
}

impl PluginWatcher {
    fn new(settings: Settings, spawn: SpawnCall) -> std::io::Result<PluginWatcher> {
        let (results_tx, results_rx) = bounded(ENDED_CALLS);
        Ok(PluginWatcher {
            tree: Tree::new(&settings.directory),
            handlers: Arc::new(settings.handlers),
            state: settings.listing.state,
            wake: Wake::new()?,
            results_tx,
            results_rx,
            operation_threads: Vec::new(),
            spawn,
            refusals: Failures::default(),
            retry: None,
            is_truncated: false,
            scan_error: None,
        })
    }

    fn run(mut self, stop: &StopToken) {
        let mut scan_at = Some(Instant::now());
        let mut last_scan = None;
        while !stop.is_stopped() {
            self.wake.silence();
            let now = Instant::now();
            self.finish_operations(now);
            if scan_at.is_some_and(|time| time <= now) {
                last_scan = Some(now);
                scan_at = self.scan().then(|| now + UNWATCHED_INTERVAL);
            }
            let next = self.start_operations(now);
            if stop.is_stopped() {
                break;
            }
            let until = [scan_at, next].into_iter().flatten().min();
            let _waiting = threads::waiting("plugins");
            // A scan that is due soon: changes until then belong to it.
            let is_soon = scan_at.is_some_and(|time| time <= Instant::now() + PACE);
            let changes = self.tree.inotify_fd().filter(|_| !is_soon).map(|fd| (fd, PollFlags::IN));
            match self.wake.wait(changes, until) {
                Ok(true) => {
                    let earliest = last_scan.map_or_else(Instant::now, |last| last + PACE);
                    scan_at = Some(earliest.max(Instant::now()));
                }
                Ok(false) => {}
                Err(error) => {
                    log::warn!("cannot wait for changes of plugins_registry: {error}");
                    let _ = stop.wait(PAUSE);
                }
            }
        }
        self.operation_threads.iter_mut().for_each(Running::request_stop);
        for call in self.operation_threads {
            call.stop(END_LIMIT);
        }
    }

    /// Reads the directory. Returns whether it is to be read again without an event: it cannot be
    /// watched, or a part of it could not be read.
    fn scan(&mut self) -> bool {
        self.tree.discard_changes();
        let scan = self.tree.scan();
        if scan.is_truncated && !self.is_truncated {
            log::warn!(
                "plugins_registry has too many entries: some are ignored, and plugins that have registered there stay"
            );
        }
        self.is_truncated = scan.is_truncated;
        if let Some((path, errno)) = scan.error.as_ref().filter(|_| scan.error != self.scan_error) {
            log::warn!(
                "cannot read {} and perhaps other paths of plugins_registry, whose plugins stay: {}",
                path.display(),
                std::io::Error::from(*errno)
            );
        }
        self.scan_error = scan.error;
        self.state.locked().found(&scan.sockets, &scan.unread);
        scan.is_unwatched || self.scan_error.is_some()
    }

    /// Reads the results of operations that have ended.
    fn finish_operations(&self, now: Instant) {
        while let Ok((path, ended)) = self.results_rx.try_recv() {
            let error =
                if let OperationResult::Failed(error) = &ended { error.clone() } else { String::new() };
            if self.state.locked().ended(&path, ended, now) {
                log::warn!("{error}");
            }
        }
    }

    /// Starts what is due. Returns when more may be due without an event before.
    fn start_operations(&mut self, now: Instant) -> Option<Instant> {
        self.operation_threads.retain(|call| !call.is_finished());
        // All operations need a thread, so the next one would fail as well. The end of one that was not
        // started is an event, which must not shorten the pause.
        if self.retry.is_some_and(|retry| now < retry) {
            return self.retry;
        }
        self.retry = None;
        loop {
            let next = self.state.locked().next(now);
            let Some((path, operation)) = next else { return self.state.locked().due() };
            let mut end = ResultSender {
                results_tx: self.results_tx.clone(),
                wake: self.wake.clone(),
                ended: Some((path.clone(), OperationResult::NotStarted)),
            };
            let handlers = Arc::clone(&self.handlers);
            let spawned = (self.spawn)(Box::new(move |stop| {
                let _waiting = threads::waiting("a plugin");
                let died = OperationResult::Failed(format!("the operation for {} died", path.display()));
                end.ended = Some((path.clone(), died));
                let ended = match operation {
                    Operation::Register(_) => match handshake::register(&path, &handlers, &stop) {
                        Ok(plugin) => {
                            log::info!("registered {} {} at {}", plugin.kind, plugin.name, path.display());
                            OperationResult::Registered(plugin)
                        }
                        Err(error) => OperationResult::Failed(error),
                    },
                    Operation::Deregister(plugin) => {
                        log::info!("removing {} {} of {}", plugin.kind, plugin.name, path.display());
                        if let Some(handler) = handlers.get(plugin.kind.as_str()) {
                            handler.deregister(&plugin.name, &plugin.endpoint);
                        }
                        OperationResult::Deregistered
                    }
                };
                end.report(path, ended);
            }));
            match spawned {
                Ok(running) => {
                    self.operation_threads.push(running);
                    self.refusals.end();
                }
                // The end was reported when it was dropped.
                Err(error) => {
                    if self.refusals.count() {
                        log::warn!(
                            "cannot start a thread for a plugin: {error} ({} times now)",
                            self.refusals
                        );
                    }
                    self.retry = Some(now + PAUSE);
                    return self.retry;
                }
            }
        }
    }
}

/// Reports the end of an operation when dropped, also after a panic.
struct ResultSender {
    results_tx: Sender<(PathBuf, OperationResult)>,
    wake: Wake,
    ended: Option<(PathBuf, OperationResult)>,
}

impl ResultSender {
    fn report(mut self, path: PathBuf, ended: OperationResult) {
        self.ended = Some((path, ended));
    }
}

impl Drop for ResultSender {
    fn drop(&mut self) {
        if let Some(ended) = self.ended.take() {
            let _ = self.results_tx.send(ended);
            self.wake.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::super::state::Identity;
    use super::*;
    use crate::util::testing;

    fn worker(directory: &std::path::Path, spawn: SpawnCall) -> PluginWatcher {
        let settings = Settings {
            directory: directory.to_owned(),
            handlers: Handlers::new(),
            listing: KnownPlugins::default(),
        };
        PluginWatcher::new(settings, spawn).unwrap()
    }

    #[test]
    fn directory_that_cannot_be_read_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let closed = dir.path().join("closed");
        std::fs::create_dir(&closed).unwrap();
        let _socket = UnixListener::bind(closed.join("a.sock")).unwrap();
        let mut worker = worker(dir.path(), Box::new(spawn_call));
        assert!(!worker.scan(), "an event reports the next change");
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o0)).unwrap();
        let mut worker = testing::without_access(move || {
            assert!(worker.scan());
            worker
        });
        assert_eq!(worker.scan_error, Some((closed.clone(), Errno::ACCESS)));
        let exists = |worker: &PluginWatcher| worker.state.locked().list().iter().any(|socket| socket.exists);
        assert!(exists(&worker));
        std::fs::remove_dir_all(&closed).unwrap();
        assert!(!worker.scan());
        assert!(worker.scan_error.is_none() && !exists(&worker));
    }

    #[test]
    fn lack_of_threads_is_noticed_once_per_pause() {
        let dir = tempfile::tempdir().unwrap();
        let attempts = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&attempts);
        let mut worker = worker(
            dir.path(),
            Box::new(move |_call| {
                counter.fetch_add(1, Ordering::SeqCst);
                Err(std::io::ErrorKind::WouldBlock.into())
            }),
        );
        let identity = |inode| Identity { device: 1, inode, modified: 0 };
        let sockets = (0..20).map(|n| (PathBuf::from(format!("/r/{n}")), identity(n))).collect();
        worker.state.locked().found(&sockets, &BTreeSet::new());
        let mut now = Instant::now();
        for pause in 1..=64 {
            // Each attempt rings the bell.
            for _ in 0..3 {
                assert_eq!(worker.start_operations(now).map(|next| next > now), Some(true));
                worker.finish_operations(now);
                assert_eq!(attempts.load(Ordering::SeqCst), pause);
                now += PAUSE / 4;
            }
            now += PAUSE / 4;
        }
        assert_eq!(worker.refusals.number(), 64);
        // All start as soon as there are threads.
        worker.spawn = Box::new(spawn_call);
        assert_eq!(worker.start_operations(now), None);
        assert_eq!(
            (worker.operation_threads.len(), worker.refusals.number()),
            (super::super::state::MOST_OPERATIONS, 0)
        );
    }
}
