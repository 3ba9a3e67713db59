//! The threads: one that waits for changes, and one per operation.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use rustix::event::PollFlags;

use super::state::{Operation, OperationResult, PluginState, SocketStatus};
use super::tree::Tree;
use super::{Handlers, handshake};
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
    pub listing: Listing,
}

/// The sockets and plugins that are known. Clones share them; empty until the watcher is started.
#[derive(Clone, Default)]
pub struct Listing {
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
        let state = settings.listing.state;
        let wake = Wake::new()?;
        let (done, ends) = bounded(ENDED_CALLS);
        let worker = Worker {
            tree: Tree::new(&settings.directory),
            handlers: Arc::new(settings.handlers),
            state,
            wake: wake.clone(),
            done,
            ends,
            calls: Vec::new(),
            is_truncated: false,
            is_unread: false,
        };
        let running = threads::spawn("plugins", Stack::Large, on_death, move |stop| worker.run(&stop))?
            .with_waker(Box::new(move || wake.ring()));
        Ok(Plugins { _running: running })
    }
}

impl Listing {
    /// All sockets and plugins, for the status.
    #[must_use]
    pub fn list(&self) -> Vec<SocketStatus> {
        self.state.locked().list()
    }
}

struct Worker {
    tree: Tree,
    handlers: Arc<Handlers>,
    state: Arc<Mutex<PluginState>>,
    wake: Wake,
    done: Sender<(PathBuf, OperationResult)>,
    ends: Receiver<(PathBuf, OperationResult)>,
    calls: Vec<Running>,
    is_truncated: bool,
    is_unread: bool,
}

impl Worker {
    fn run(mut self, stop: &StopToken) {
        let mut scan_at = Some(Instant::now());
        let mut last_scan = None;
        while !stop.is_stopped() {
            self.wake.silence();
            while let Ok((path, ended)) = self.ends.try_recv() {
                let error =
                    if let OperationResult::Failed(error) = &ended { error.clone() } else { String::new() };
                if self.state.locked().ended(&path, ended, Instant::now()) {
                    log::warn!("{error}");
                }
            }
            let now = Instant::now();
            if scan_at.is_some_and(|time| time <= now) {
                last_scan = Some(now);
                scan_at = self.scan().then(|| now + UNWATCHED_INTERVAL);
            }
            let retry = self.start_operations();
            if stop.is_stopped() {
                break;
            }
            let until = [scan_at, self.state.locked().wakes(), retry].into_iter().flatten().min();
            let _waiting = threads::waiting("plugins");
            // A scan that is due soon: changes until then belong to it.
            let is_soon = scan_at.is_some_and(|time| time <= Instant::now() + PACE);
            let changes = self.tree.changes().filter(|_| !is_soon).map(|fd| (fd, PollFlags::IN));
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
        self.calls.iter_mut().for_each(Running::request_stop);
        for call in self.calls {
            call.stop(END_LIMIT);
        }
    }

    /// Reads the directory. Returns whether it is to be read again without an event: it cannot be
    /// watched, or a part of it could not be read.
    fn scan(&mut self) -> bool {
        self.tree.discard_changes();
        let scan = self.tree.scan();
        if scan.is_truncated && !self.is_truncated {
            log::warn!("plugins_registry has too many sockets or directories: some are ignored");
        }
        self.is_truncated = scan.is_truncated;
        if let Some((path, error)) = scan.unread.first().zip(scan.error).filter(|_| !self.is_unread) {
            log::warn!(
                "cannot read {} and {} other paths of plugins_registry, whose plugins stay: {}",
                path.display(),
                scan.unread.len() - 1,
                std::io::Error::from(error)
            );
        }
        self.is_unread = !scan.unread.is_empty();
        self.state.locked().found(&scan.sockets, &scan.unread);
        scan.is_unwatched || self.is_unread
    }

    /// Starts what is due. Returns when to try again, if the kernel has no threads.
    fn start_operations(&mut self) -> Option<Instant> {
        self.calls.retain(|call| !call.is_finished());
        loop {
            let (path, operation) = self.state.locked().next(Instant::now())?;
            let mut end = ResultSender {
                done: self.done.clone(),
                wake: self.wake.clone(),
                ended: Some((path.clone(), OperationResult::NotStarted)),
            };
            let handlers = Arc::clone(&self.handlers);
            let spawned = threads::spawn("plugin-call", Stack::Large, OnDeath::Unsupervised, move |stop| {
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
            });
            match spawned {
                Ok(running) => self.calls.push(running),
                // The end was reported when it was dropped.
                Err(error) => {
                    log::warn!("cannot start a thread for a plugin: {error}");
                    return Some(Instant::now() + PAUSE);
                }
            }
        }
    }
}

/// Reports the end of an operation when dropped, also after a panic.
struct ResultSender {
    done: Sender<(PathBuf, OperationResult)>,
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
            let _ = self.done.send(ended);
            self.wake.ring();
        }
    }
}
