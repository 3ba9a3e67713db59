//! Which sockets there are, which are registered, and what is done next. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::util::backoff::Failures;

/// Operations at once: one that hangs must not delay others.
pub const MOST_OPERATIONS: usize = 8;
/// Sockets that are considered. Upstream has no limit.
pub const MOST_SOCKETS: usize = 4096;
/// The pause after the first failure, which doubles with each further one (Go:
/// `exponentialbackoff`).
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(122);

/// What distinguishes a socket from an earlier one of the same path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The file system.
    pub device: u64,
    /// The inode, which the kernel may use again.
    pub inode: u64,
    /// The time of creation, in nanoseconds: a socket is not written to.
    pub modified: i128,
}

/// A plugin as it registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    /// The type, such as [`super::CSI`].
    pub kind: String,
    /// The name.
    pub name: String,
    /// The socket of its service.
    pub endpoint: String,
    /// The versions that it offers.
    pub versions: Vec<String>,
}

/// What is to be done with a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Make the handshake with this socket.
    Register(Identity),
    /// Remove the plugin from its handler.
    Deregister(Plugin),
}

/// How an operation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperationResult {
    /// The plugin is registered.
    Registered(Plugin),
    /// It is not, for this reason.
    Failed(String),
    /// It is removed.
    Deregistered,
    /// The operation has not begun; it is due again.
    NotStarted,
}

#[derive(Debug, Default)]
struct Socket {
    desired: Option<Identity>,
    actual: Option<(Identity, Plugin)>,
    /// The operation that runs.
    busy: Option<Operation>,
    failures: Failures,
    /// Not before this time.
    due: Option<Instant>,
    error: Option<String>,
    /// When it was registered, or when the failures began.
    since: Option<Instant>,
}

impl Socket {
    fn next(&self) -> Option<Operation> {
        match (&self.actual, self.desired) {
            (Some((identity, plugin)), desired) if desired != Some(*identity) => {
                Some(Operation::Deregister(plugin.clone()))
            }
            (None, Some(identity)) => Some(Operation::Register(identity)),
            _ => None,
        }
    }
}

/// A socket, for the status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketStatus {
    /// The registration socket.
    pub socket: PathBuf,
    /// Whether the socket exists.
    pub exists: bool,
    /// The plugin, while it is registered.
    pub plugin: Option<Plugin>,
    /// Why the last attempt failed.
    pub error: Option<String>,
    /// When it was registered; if it is not: when the failures began.
    pub since: Option<Instant>,
}

/// All sockets.
#[derive(Debug, Default)]
pub struct PluginState {
    sockets: BTreeMap<PathBuf, Socket>,
    busy: usize,
}

impl PluginState {
    /// The directory was read, and has these sockets. Below the paths of `unread`, which could not be
    /// read, known sockets are considered unchanged.
    pub fn found(&mut self, sockets: &BTreeMap<PathBuf, Identity>, unread: &BTreeSet<PathBuf>) {
        let is_unread = |path: &Path| path.ancestors().any(|path| unread.contains(path));
        for (path, socket) in &mut self.sockets {
            if !sockets.contains_key(path) && !is_unread(path) {
                socket.desired = None;
            }
        }
        for (path, identity) in sockets {
            if !self.sockets.contains_key(path) && self.sockets.len() >= MOST_SOCKETS {
                continue;
            }
            let socket = self.sockets.entry(path.clone()).or_default();
            if socket.desired != Some(*identity) {
                // The back-off stays: it is that of the path, as upstream's.
                socket.desired = Some(*identity);
            }
        }
        self.sweep();
    }

    /// The next operation; it runs until [`PluginState::ended`]. The one that is due for the longest time
    /// is first, so that sockets that hang do not hold up others.
    pub fn next(&mut self, now: Instant) -> Option<(PathBuf, Operation)> {
        if self.busy >= MOST_OPERATIONS {
            return None;
        }
        let ready = |socket: &Socket| socket.busy.is_none() && socket.due.is_none_or(|due| due <= now);
        let (path, socket, operation) = self
            .sockets
            .iter_mut()
            .filter(|(_, socket)| ready(socket))
            .filter_map(|(path, socket)| socket.next().map(|operation| (path, socket, operation)))
            .min_by_key(|(_, socket, _)| socket.due)?;
        socket.busy = Some(operation.clone());
        self.busy += 1;
        Some((path.clone(), operation))
    }

    /// An operation has ended. Returns whether a failure is to be logged.
    pub fn ended(&mut self, path: &Path, ended: OperationResult, now: Instant) -> bool {
        let Some(socket) = self.sockets.get_mut(path) else { return false };
        let Some(operation) = socket.busy.take() else { return false };
        let mut is_news = false;
        self.busy -= 1;
        socket.due = None;
        match (operation, ended) {
            (Operation::Register(identity), OperationResult::Registered(plugin)) => {
                socket.actual = Some((identity, plugin));
                socket.failures.end();
                socket.error = None;
                socket.since = Some(now);
            }
            (_, OperationResult::NotStarted) => socket.due = Some(now + FIRST_PAUSE),
            (Operation::Deregister(_), _) => (socket.actual, socket.since) = (None, None),
            (Operation::Register(_), OperationResult::Failed(error)) => {
                is_news = socket.failures.count();
                socket.due = Some(now + socket.failures.delay(FIRST_PAUSE, LONGEST_PAUSE));
                socket.error = Some(error);
                socket.since.get_or_insert(now);
            }
            (Operation::Register(_), OperationResult::Deregistered) => {}
        }
        self.sweep();
        is_news
    }

    /// When [`PluginState::next`] may have more to do, without an event before.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        if self.busy >= MOST_OPERATIONS {
            return None;
        }
        let waits = |socket: &&Socket| socket.busy.is_none() && socket.next().is_some();
        self.sockets.values().filter(waits).filter_map(|socket| socket.due).min()
    }

    /// All sockets that exist or are registered.
    #[must_use]
    pub fn list(&self) -> Vec<SocketStatus> {
        let status = |(path, socket): (&PathBuf, &Socket)| SocketStatus {
            socket: path.clone(),
            exists: socket.desired.is_some(),
            plugin: socket.actual.as_ref().map(|(_, plugin)| plugin.clone()),
            error: socket.error.clone(),
            since: socket.since,
        };
        self.sockets.iter().map(status).collect()
    }

    fn sweep(&mut self) {
        self.sockets
            .retain(|_, socket| socket.desired.is_some() || socket.actual.is_some() || socket.busy.is_some());
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
