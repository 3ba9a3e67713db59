//! The handle of the room: other rooms pass in what they received and read what is stored.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::decide::{Decider, Effect, NodeFact};
use super::files::{FileError, Files, MAX_BYTES};
use super::key::Key;
use super::settings::Settings;
use super::state::{Phase, Report};
use super::stored;
use crate::model::api::Node;
use crate::model::pod::Pod;
use crate::util::lock::LockExt;
use crate::util::mailbox::{Inbox, Post, mailbox, replace};
use crate::util::secret::Secret;

/// The most problems that a report names.
const MAX_PROBLEMS: usize = 16;

/// What has to happen to the file of an object.
#[derive(Debug, Clone)]
pub(super) enum Change {
    /// It gets this body, unless it has it.
    Body(Secret<Vec<u8>>),
    /// It goes.
    Gone,
}

/// Receives the set of the API server's source.
pub type Deliver = Box<dyn Fn(Vec<Pod>) + Send>;

/// There is no set that waits to be accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no set of pods is held")]
pub struct NothingHeld;

/// The handle. Clones share everything.
#[derive(Clone)]
pub struct Offline {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) files: Files,
    /// The number of the phase, for readers that must not wait.
    phase: AtomicU8,
    /// Never locked while a file is read or written.
    pub(super) state: Mutex<State>,
    changes: Post<Key, Change>,
    inbox: Mutex<Option<Inbox<Key, Change>>>,
    /// Rung when the thread has to read the Node object, or a new time is due.
    bell: Sender<()>,
    pub(super) rings: Receiver<()>,
}

pub(super) struct State {
    pub(super) decider: Decider,
    deliver: Option<Deliver>,
    /// A set that was decided before `deliver` was there.
    undelivered: Option<Vec<Pod>>,
    /// Effects for the thread: `ReadNode`, `UseStoredNode`, `Entered`.
    pub(super) orders: Vec<Effect>,
    pub(super) stored_node: Option<Node>,
    /// The parts of the report that the thread knows.
    pub(super) report: Report,
}

impl fmt::Debug for Offline {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Offline({:?})", self.phase())
    }
}

impl Offline {
    /// Reads the key and the stored pods. Makes no file. Whatever is wrong with the files is a problem of
    /// the report: the agent starts.
    #[must_use]
    pub fn open(settings: &Settings, now: Instant) -> Offline {
        let (files, mut problems) = Files::open(settings);
        let stored = stored::load(&files, &mut problems);
        let uid = stored.node.as_ref().and_then(|node| node.metadata.uid.clone());
        let decider = Decider::new(stored.pods, uid, settings.wait, settings.accept_after, now);
        problems.truncate(MAX_PROBLEMS);
        let seal = files.seal_state();
        let report = Report { seal, limit_bytes: MAX_BYTES, problems, ..Report::default() };
        let (changes, inbox) = mailbox(replace);
        let (bell, rings) = bounded(1);
        let state = State {
            decider,
            deliver: None,
            undelivered: None,
            orders: Vec::new(),
            stored_node: stored.node,
            report,
        };
        let shared = Shared {
            files,
            phase: AtomicU8::new(Phase::Undecided as u8),
            state: Mutex::new(state),
            changes,
            inbox: Mutex::new(Some(inbox)),
            bell,
            rings,
        };
        Offline { shared: Arc::new(shared) }
    }

    /// Whose set of pods counts.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.shared.phase.load(Ordering::Acquire) {
            number if number == Phase::Online as u8 => Phase::Online,
            number if number == Phase::Alone as u8 => Phase::Alone,
            number if number == Phase::Held as u8 => Phase::Held,
            _ => Phase::Undecided,
        }
    }

    /// Whether stored objects come before requests to the API server.
    #[must_use]
    pub fn uses_stored(&self) -> bool {
        self.phase().uses_stored()
    }

    /// Whether the API server may say that an object is gone or another one: it knows this node.
    #[must_use]
    pub fn accepts_absence(&self) -> bool {
        self.phase() == Phase::Online
    }

    /// Stores the body of an object, later and only if it changed. Does not wait. Nothing is stored while
    /// a set is held: what the API server has then may be of another cluster.
    pub fn put(&self, key: Key, body: Secret<Vec<u8>>) {
        let is_off = key.kind.is_sealed() && !self.shared.files.stores_secrets();
        if !is_off && self.phase() != Phase::Held {
            self.shared.changes.put(key, Change::Body(body));
        }
    }

    /// Stores an object as JSON; see [`Offline::put`].
    pub fn put_json(&self, key: Key, object: &impl Serialize) {
        match serde_json::to_vec(object) {
            Ok(body) => self.put(key, Secret::new(body)),
            Err(error) => log::warn!("cannot store {} {}: {error}", key.kind.word(), key.name),
        }
    }

    /// Removes an object. Only while the API server's set counts.
    pub fn remove(&self, key: Key) {
        if self.accepts_absence() {
            self.shared.changes.put(key, Change::Gone);
        }
    }

    /// The stored body of an object: reads a file. `None`: there is none that can be used.
    #[must_use]
    pub fn read(&self, key: &Key) -> Option<Secret<Vec<u8>>> {
        match self.shared.files.read(key) {
            Ok(body) => body,
            Err(FileError::NotStored(_)) => None,
            Err(error) => {
                self.shared.files.put_aside(key, &error);
                None
            }
        }
    }

    /// A stored object that is JSON; see [`Offline::read`].
    #[must_use]
    pub fn read_json<T: DeserializeOwned>(&self, key: &Key) -> Option<T> {
        let body = self.read(key)?;
        match serde_json::from_slice(body.reveal()) {
            Ok(object) => Some(object),
            Err(error) => {
                // Its text may have parts of the object.
                log::warn!(
                    "the stored {} {} has another form (line {})",
                    key.kind.word(),
                    key.name,
                    error.line()
                );
                None
            }
        }
    }

    /// Sets the receiver of the sets. It is called under a lock, and must not block.
    pub fn deliver_to(&self, deliver: Deliver) {
        let mut state = self.shared.state();
        if let Some(pods) = state.undelivered.take() {
            deliver(pods);
        }
        state.deliver = Some(deliver);
    }

    /// The API server sent a set; `is_list`: a complete list.
    pub fn server_set(&self, pods: Vec<Pod>, is_list: bool) {
        self.shared.step(|decider| decider.server_set(pods, is_list));
    }

    /// Accepts the set that is held.
    ///
    /// # Errors
    /// [`NothingHeld`].
    pub fn accept(&self) -> Result<(), NothingHeld> {
        let mut is_held = true;
        self.shared.step(|decider| {
            let effects = decider.accept_held();
            is_held = effects.is_some();
            effects.unwrap_or_default()
        });
        if is_held { Ok(()) } else { Err(NothingHeld) }
    }

    /// What the room shows of itself.
    #[must_use]
    pub fn report(&self) -> Report {
        let state = self.shared.state();
        let mut report = state.report.clone();
        report.phase = state.decider.phase();
        if let Some((reason, until)) = state.decider.held() {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            report.held = Some(reason);
            report.accepts = left.and_then(|left| {
                jiff::Timestamp::now().checked_add(jiff::SignedDuration::try_from(left).ok()?).ok()
            });
        }
        report
    }
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    /// The inbox, for the one thread.
    pub(super) fn take_inbox(&self) -> Option<Inbox<Key, Change>> {
        self.inbox.locked().take()
    }

    /// Makes a step of the decider and does what follows from it without waiting; the rest is for the
    /// thread.
    pub(super) fn step(&self, step: impl FnOnce(&mut Decider) -> Vec<Effect>) {
        let mut state = self.state();
        let effects = step(&mut state.decider);
        // Before anything is delivered or stored: readers of the phase follow.
        self.phase.store(state.decider.phase() as u8, Ordering::Release);
        let is_nothing = effects.is_empty();
        for effect in effects {
            match effect {
                Effect::Deliver(pods) => match &state.deliver {
                    Some(deliver) => deliver(pods),
                    None => state.undelivered = Some(pods),
                },
                Effect::Store { changed, removed } => {
                    for pod in changed.iter().filter(|pod| !pod.is_mirror()) {
                        for (key, body) in stored::of_pod(pod) {
                            self.changes.put(key, Change::Body(body));
                        }
                    }
                    for uid in removed {
                        for key in stored::keys_of_pod(&uid) {
                            self.changes.put(key, Change::Gone);
                        }
                    }
                }
                Effect::UseStoredNode | Effect::ReadNode | Effect::Entered(_) => state.orders.push(effect),
            }
        }
        drop(state);
        if !is_nothing {
            // If the bell is full, the thread wakes anyway.
            let _ = self.bell.try_send(());
        }
    }

    /// The result of a read of the Node object.
    pub(super) fn node_read(&self, fact: NodeFact, now: Instant) {
        self.step(|decider| decider.node_read(fact, now));
    }
}
