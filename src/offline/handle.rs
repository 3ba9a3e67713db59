//! The handle of the room: other rooms pass in what they received and read what is stored.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::clock;
use super::decide::{Decider, Effect, NodeFact};
use super::fence::{self, Fence};
use super::files::{FileError, Files, MAX_BYTES, MAX_FILES};
use super::format;
use super::key::Key;
use super::problems::Problems;
use super::purge::Purge;
use super::queue::Change;
use super::settings::Settings;
use super::state::{Phase, Report};
use super::stored;
use crate::model::api::Node;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::lock::LockExt;
use crate::util::mailbox::{Inbox, Post, mailbox, replace};
use crate::util::secret::Secret;

/// The most pods with expired tokens that are remembered: a node runs fewer.
const MAX_EXPIRED: usize = 4096;

/// Receives the set of the API server's source, and the phase that it belongs to: in [`Phase::Alone`] and
/// [`Phase::Held`] it is the stored one.
pub type Deliver = Box<dyn Fn(Vec<Pod>, Phase) + Send>;

/// There is no set that waits to be accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no set of pods is held")]
pub struct NothingHeld;

/// The handle. Clones share everything.
#[derive(Clone)]
pub struct Offline {
    pub(super) shared: Arc<Shared>,
}

/// Receives the Node object for admission. Both functions are called under a lock, and must not block.
pub(super) struct NodeAccess {
    /// The stored one counts.
    pub(super) assume: Box<dyn Fn(Node) + Send>,
    /// That of the API server counts.
    pub(super) settle: Box<dyn Fn() + Send>,
}

pub(super) struct Shared {
    pub(super) files: Files,
    /// Which pods are stopped.
    pub(super) fence: Fence,
    /// The number of the phase, for readers that must not wait.
    phase: AtomicU8,
    /// Whether a set of the API server waits for a decision.
    is_open: AtomicBool,
    /// Set by the thread.
    pub(super) events: OnceLock<EventSink>,
    /// Objects whose files were found to be damaged, for the thread: they are not stored any more.
    pub(super) damaged: Mutex<BTreeSet<Key>>,
    /// Orders to remove stored objects, for the thread.
    pub(super) purges: Mutex<Vec<Purge>>,
    /// The pods of the events about expired tokens, since the API server was away.
    pub(super) expired: Mutex<BTreeSet<PodUid>>,
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
    undelivered: Option<(Vec<Pod>, Phase)>,
    /// Effects for the thread: `ReadNode` and `Entered`.
    pub(super) orders: Vec<Effect>,
    stored_node: Option<Node>,
    /// The pods that were delivered before a decision, because they must not run.
    early: BTreeSet<PodUid>,
    /// When the stored set began to count, if another phase in which it counts followed.
    pub(super) alone_since: Option<jiff::Timestamp>,
    /// When the last time began and ended in which the stored set counted, since the start.
    pub(super) last_alone: Option<(jiff::Timestamp, jiff::Timestamp)>,
    /// Set by the thread.
    pub(super) node: Option<NodeAccess>,
    /// What was wrong at the start, for the thread.
    pub(super) problems: Problems,
    /// The parts of the report that the thread knows.
    pub(super) report: Report,
    /// A time that has passed: the stored one, or the date of this version.
    pub(super) clock_bound: Option<jiff::Timestamp>,
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
        let (files, problems) = Files::open(settings);
        Offline::with_files(files, problems, settings, now)
    }

    /// As [`Offline::open`], with these files and what is wrong with them.
    pub(super) fn with_files(
        files: Files,
        problems_of_files: Vec<String>,
        settings: &Settings,
        now: Instant,
    ) -> Offline {
        let mut problems = Problems::default();
        for problem in problems_of_files {
            log::warn!("{problem}");
            problems.add(problem);
        }
        let stored = stored::load(&files, &mut problems);
        let uid = stored.node.as_ref().and_then(|node| node.metadata.uid.clone());
        let decider = Decider::new(stored.pods, uid, settings.wait, settings.accept_after, now)
            .with_cluster(stored.cluster);
        let fence = Fence::new(settings.fence.clone(), stored.contact);
        fence.set_pods(decider.known());
        fence.restore(decider.known());
        let report = Report {
            seal: files.seal_state(),
            since: Some(jiff::Timestamp::now()),
            limit_bytes: MAX_BYTES,
            problems: problems.texts(),
            ..Report::default()
        };
        let (changes, inbox) = mailbox(replace);
        let (bell, rings) = bounded(1);
        let state = State {
            decider,
            deliver: None,
            undelivered: None,
            orders: Vec::new(),
            stored_node: stored.node,
            early: BTreeSet::new(),
            alone_since: None,
            last_alone: None,
            node: None,
            problems,
            report,
            clock_bound: Some(clock::at_start(&files)),
        };
        let shared = Shared {
            files,
            fence,
            phase: AtomicU8::new(Phase::Undecided as u8),
            is_open: AtomicBool::new(false),
            events: OnceLock::new(),
            damaged: Mutex::default(),
            purges: Mutex::default(),
            expired: Mutex::default(),
            state: Mutex::new(state),
            changes,
            inbox: Mutex::new(Some(inbox)),
            bell,
            rings,
        };
        Offline { shared: Arc::new(shared) }
    }

    /// The directory of the files; it may not exist yet.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.shared.files.directory()
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

    /// Whether the API server is away, or has lost its data: stored pods run, or the node's lease could not be
    /// renewed in time, which needs no new start of the agent.
    #[must_use]
    pub fn is_without_server(&self) -> bool {
        self.uses_stored() || self.shared.fence.lease_has_ended(fence::boot_time())
    }

    /// Whether the API server may show that an object is gone or another one: it knows this node, and no
    /// set of it waits for a decision. What does not count is settled when [`Phase::Online`] is entered.
    #[must_use]
    pub fn accepts_absence(&self) -> bool {
        self.phase() == Phase::Online && !self.shared.is_open.load(Ordering::Acquire)
    }

    /// Stores the body of an object, later and only if it changed. Does not wait. Nothing is stored while
    /// a set is held: what the API server has then may be of another cluster.
    pub fn put(&self, key: Key, body: Secret<Vec<u8>>) {
        let is_off = key.kind.is_sealed() && !self.shared.files.stores_secrets();
        // Such a name would be in problems and log lines, and one pod may have thousands of long ones.
        if !is_off && format::can_store_name(&key.name) && self.phase() != Phase::Held {
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

    /// Stores an object; `None`: the API server has none. That is stored, too, because pods may start
    /// without the object; but an object that was stored is removed, which happens only later.
    pub fn put_found<T: Serialize + DeserializeOwned>(&self, key: Key, object: Option<&T>) {
        match object {
            Some(object) => self.put_json(key, object),
            None if !self.accepts_absence() => {}
            None => match self.read_json::<Option<T>>(&key) {
                Some(Some(_)) => self.remove(key),
                Some(None) => {}
                None => self.put_json(key, &None::<T>),
            },
        }
    }

    /// Removes an object, later. Only while the API server's set counts.
    pub fn remove(&self, key: Key) {
        if format::can_store_name(&key.name) && self.accepts_absence() {
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
                if stored::put_aside(&self.shared.files, key, &error) {
                    let mut damaged = self.shared.damaged.locked();
                    if damaged.len() < MAX_FILES && damaged.insert(key.clone()) {
                        let _ = self.shared.bell.try_send(());
                    }
                }
                None
            }
        }
    }

    /// A stored object that is JSON; see [`Offline::read`].
    #[must_use]
    pub fn read_json<T: DeserializeOwned>(&self, key: &Key) -> Option<T> {
        let body = self.read(key)?;
        let object = stored::decode(body.reveal());
        if object.is_none() {
            log::warn!("the stored {} {} has another form", key.kind.word(), key.name);
        }
        object
    }

    /// Sets the receiver of the sets. It is called under a lock, and must not block.
    pub fn deliver_to(&self, deliver: Deliver) {
        let mut state = self.shared.state();
        if let Some((pods, phase)) = state.undelivered.take() {
            deliver(pods, phase);
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

    /// A stored token that is not valid any more is used for a pod. Raises an event, once for each pod
    /// until the API server is back.
    pub fn token_expired(&self, pod: &Pod) {
        let Some(events) = self.shared.events.get() else { return };
        let is_new = {
            let mut expired = self.shared.expired.locked();
            expired.len() < MAX_EXPIRED && expired.insert(pod.uid().clone())
        };
        if is_new {
            let message =
                "a token of its service account has expired; it is used until the API server is back";
            events.warning(pod, reasons::EXPIRED_TOKEN_USED, message);
        }
    }

    /// What the room shows of itself.
    #[must_use]
    pub fn report(&self) -> Report {
        let state = self.shared.state();
        let mut report = state.report.clone();
        report.phase = state.decider.phase();
        let age = self.shared.fence.age(fence::boot_time());
        report.seconds_since_contact = age.map(|age| age.as_secs());
        report.stop_after_seconds = self.shared.fence.stop_after().map(|after| after.as_secs());
        report.stopped_pods = u64::try_from(self.shared.fence.stopped()).unwrap_or(u64::MAX);
        report.problems.extend(clock::problem(state.clock_bound, jiff::Timestamp::now()));
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
        let mut guard = self.state();
        let state = &mut *guard;
        let before = state.decider.phase();
        let effects = step(&mut state.decider);
        let phase = state.decider.phase();
        // Before anything is delivered or stored: readers of the phase follow.
        self.phase.store(phase as u8, Ordering::Release);
        self.is_open.store(state.decider.is_open(), Ordering::Release);
        if phase != before {
            let now = jiff::Timestamp::now();
            let began = state.report.since.replace(now);
            match (before.uses_stored(), phase.uses_stored()) {
                // From alone to held, it continues.
                (true, true) => state.alone_since = state.alone_since.or(began),
                (true, false) => {
                    let began = state.alone_since.take().or(began);
                    state.last_alone = began.map(|began| (began, now));
                }
                (false, _) => state.alone_since = None,
            }
        }
        if phase == Phase::Online && before != Phase::Online {
            // Before its pods are delivered: they may be here because of new labels.
            state.stored_node = None;
            state.node.iter().for_each(|node| (node.settle)());
        }
        if phase == Phase::Held && before == Phase::Online {
            // The same set, but from now on it is the stored one.
            let pods = state.decider.known().to_vec();
            match &state.deliver {
                Some(deliver) => deliver(pods, phase),
                None => state.undelivered = Some((pods, phase)),
            }
        }
        let is_nothing = effects.is_empty();
        if effects.iter().any(|effect| matches!(effect, Effect::Store { .. })) {
            self.fence.set_pods(state.decider.known());
        }
        for effect in effects {
            match effect {
                // Before the pods are delivered: without its labels they would be rejected.
                Effect::UseStoredNode => {
                    if let (Some(node), Some(object)) = (&state.node, state.stored_node.take()) {
                        (node.assume)(object);
                    }
                }
                Effect::Deliver(pods) => match &state.deliver {
                    Some(deliver) => deliver(pods, phase),
                    None => state.undelivered = Some((pods, phase)),
                },
                Effect::Store { changed, removed } => self.store(&changed, &removed),
                Effect::ReadNode | Effect::Entered(_) => state.orders.push(effect),
            }
        }
        drop(guard);
        if !is_nothing {
            self.ring();
        }
    }

    /// Wakes the thread.
    pub(super) fn ring(&self) {
        // If the bell is full, the thread wakes anyway.
        let _ = self.bell.try_send(());
    }

    /// Before a decision: delivers the stored pods that must not run. They may run since before a restart
    /// of the agent, and the wait for the API server is no reason to let them. The other pods follow with
    /// the decision.
    pub(super) fn deliver_stopped(&self, now: i64) {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.decider.phase() != Phase::Undecided {
            return;
        }
        let stopped = state.decider.known().iter().filter(|pod| self.fence.stops(pod, now));
        let stopped: BTreeSet<PodUid> = stopped.map(|pod| pod.uid().clone()).collect();
        if stopped.is_subset(&state.early) {
            return;
        }
        // Also those that were released meanwhile: a pod that is missing in the next set is removed.
        state.early.extend(stopped);
        let delivered = state.decider.known().iter().filter(|pod| state.early.contains(pod.uid()));
        let delivered: Vec<Pod> = delivered.cloned().collect();
        if let (Some(node), Some(object)) = (&state.node, state.stored_node.clone()) {
            (node.assume)(object);
        }
        // As a stored set, which may lack pods: no other pod is stopped.
        match &state.deliver {
            Some(deliver) => deliver(delivered, Phase::Alone),
            None => state.undelivered = Some((delivered, Phase::Alone)),
        }
    }

    fn store(&self, changed: &[Pod], removed: &[PodUid]) {
        for pod in changed.iter().filter(|pod| !pod.is_mirror()) {
            // A pod that ends must not start again after a power cut.
            let is_urgent = pod.is_deleting() || pod.is_over();
            let change = if is_urgent { Change::Urgent } else { Change::Body };
            for (key, body) in stored::of_pod(pod) {
                self.changes.put(key, change(body));
            }
        }
        for key in removed.iter().flat_map(stored::keys_of_pod) {
            self.changes.put(key, Change::Gone);
        }
    }

    /// The result of a read of the Node object.
    pub(super) fn node_read(&self, fact: NodeFact, now: Instant) {
        self.step(|decider| decider.node_read(fact, now));
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::Kind;
    use super::super::testing::{self, pod};
    use super::*;

    /// What is delivered, as UIDs.
    fn deliveries(offline: &Offline) -> Receiver<Vec<String>> {
        let (sender, receiver) = crossbeam_channel::bounded(64);
        offline.deliver_to(Box::new(move |pods, _| sender.send(testing::uids(&pods)).unwrap()));
        receiver
    }

    fn changes(inbox: &Inbox<Key, Change>) -> Vec<(Kind, String, bool)> {
        let is_gone = |change: &Change| matches!(change, Change::Gone);
        let mut all: Vec<_> =
            inbox.drain().iter().map(|(key, c)| (key.kind, key.name.clone(), is_gone(c))).collect();
        all.sort();
        all
    }

    #[test]
    fn nothing_is_stored_while_a_set_is_held_and_removed_only_while_online() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let inbox = offline.shared.take_inbox().unwrap();
        let map = || Key::new(Kind::ConfigMap, "n/a");
        offline.remove(map());
        assert!(inbox.is_empty(), "undecided");
        offline.server_set(vec![pod("x")], true);
        offline.shared.node_read(NodeFact::Absent, Instant::now());
        assert_eq!((offline.phase(), offline.uses_stored()), (Phase::Held, true));
        offline.put(map(), Secret::new(b"{}".to_vec()));
        offline.remove(map());
        assert!(inbox.is_empty() && !offline.accepts_absence());
        offline.accept().unwrap();
        assert_eq!(offline.accept(), Err(NothingHeld));
        assert_eq!(
            changes(&inbox),
            [
                (Kind::Pod, "a".into(), true),
                (Kind::Pod, "x".into(), false),
                (Kind::PodStatus, "a".into(), true)
            ]
        );
        offline.put(map(), Secret::new(b"{}".to_vec()));
        assert_eq!(changes(&inbox), [(Kind::ConfigMap, "n/a".into(), false)]);
        offline.remove(map());
        assert_eq!(changes(&inbox), [(Kind::ConfigMap, "n/a".into(), true)]);
    }

    #[test]
    fn names_that_no_object_can_have_reach_neither_problems_nor_logs() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let inbox = offline.shared.take_inbox().unwrap();
        offline.server_set(vec![pod("a")], true);
        drop(inbox.drain());
        for name in ["n/a\nforged line".to_owned(), format!("n/{}", "a".repeat(1 << 20))] {
            let key = Key::new(Kind::ConfigMap, &name);
            offline.put(key.clone(), Secret::new(b"null".to_vec()));
            offline.remove(key);
        }
        assert!(inbox.is_empty());
        offline.remove(Key::new(Kind::ConfigMap, "n/a"));
        assert_eq!(changes(&inbox).len(), 1);
    }

    #[test]
    fn absence_does_not_count_while_a_list_waits_for_a_decision() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        offline.server_set(vec![pod("a")], true);
        assert!(offline.accepts_absence());
        offline.server_set(Vec::new(), true);
        assert!(offline.phase() == Phase::Online && !offline.accepts_absence());
        offline.shared.state().orders.clear();
        offline.server_set(vec![pod("a")], true);
        assert!(offline.accepts_absence());
        assert_eq!(offline.shared.state().orders, [Effect::Entered(Phase::Online)], "what waited is settled");
    }

    #[test]
    fn set_that_was_decided_first_reaches_a_late_receiver() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        offline.server_set(vec![pod("a")], true);
        offline.server_set(vec![pod("a"), pod("b")], false);
        let delivered = deliveries(&offline);
        assert_eq!(delivered.try_iter().collect::<Vec<_>>(), [["a", "b"]], "the newest one");
        offline.server_set(vec![pod("a")], false);
        assert_eq!(delivered.try_iter().collect::<Vec<_>>(), [["a"]]);
    }

    #[test]
    fn set_that_counts_is_delivered_as_the_stored_one_when_that_of_the_server_is_held() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let (sender, receiver) = crossbeam_channel::bounded(64);
        offline.deliver_to(Box::new(move |pods, phase| sender.send((testing::uids(&pods), phase)).unwrap()));
        let delivered = || receiver.try_iter().collect::<Vec<_>>();
        let of_a = |phase| (vec!["a".to_owned()], phase);
        offline.server_set(vec![pod("a")], true);
        offline.server_set(Vec::new(), true);
        assert_eq!(delivered(), [of_a(Phase::Online)]);
        offline.shared.node_read(NodeFact::Absent, Instant::now());
        assert_eq!(delivered(), [of_a(Phase::Held)]);
        offline.server_set(vec![pod("a")], true);
        assert_eq!(delivered(), [of_a(Phase::Online)]);
    }

    #[test]
    fn decided_set_rings_once_and_a_waiting_one_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let delivered = deliveries(&offline);
        let rung = || offline.shared.rings.try_iter().count();
        offline.server_set(vec![pod("x")], true);
        assert_eq!(rung(), 1, "the Node object has to be read");
        offline.server_set(vec![pod("y")], false);
        offline.shared.step(|decider| decider.tick(Instant::now()));
        assert_eq!((rung(), delivered.len()), (0, 0));
        offline.server_set(vec![pod("a")], false);
        assert_eq!((rung(), delivered.len()), (1, 1));
    }

    #[test]
    fn stored_node_is_assumed_before_the_pods_are_delivered_and_settled_before_those_of_the_server() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let (sender, steps) = crossbeam_channel::bounded(64);
        let (assumed, settled, delivered) = (sender.clone(), sender.clone(), sender);
        offline.shared.state().node = Some(NodeAccess {
            assume: Box::new(move |node| {
                assumed.send(format!("assume {}", node.metadata.uid.unwrap())).unwrap()
            }),
            settle: Box::new(move || settled.send("settle".to_owned()).unwrap()),
        });
        offline.deliver_to(Box::new(move |pods, _| {
            delivered.send(format!("deliver {}", testing::uids(&pods).join(" "))).unwrap();
        }));
        offline.server_set(vec![pod("x")], true);
        assert!(steps.is_empty());
        offline.shared.node_read(NodeFact::Absent, Instant::now());
        assert_eq!(steps.try_iter().collect::<Vec<_>>(), ["assume node", "deliver a"]);
        offline.accept().unwrap();
        assert_eq!(steps.try_iter().collect::<Vec<_>>(), ["settle", "deliver x"]);
        offline.server_set(vec![pod("x")], true);
        assert_eq!(steps.try_iter().collect::<Vec<_>>(), ["deliver x"]);
    }

    #[test]
    fn stored_pods_whose_time_is_over_are_delivered_before_the_decision_and_no_others() {
        let root = tempfile::tempdir().unwrap();
        drop(testing::offline(root.path(), &["a", "b"]));
        // By the wall clock, the last contact was long ago.
        testing::store(root.path(), &Key::contact(), &serde_json::json!({"seconds": 0}));
        let fence = fence::FenceSettings {
            stop_after: Some(std::time::Duration::from_secs(300)),
            ..fence::FenceSettings::default()
        };
        let settings = Settings { fence, ..testing::settings(root.path()) };
        let offline = Offline::with_files(testing::files(root.path()), Vec::new(), &settings, Instant::now());
        let (sender, receiver) = crossbeam_channel::bounded(64);
        offline.deliver_to(Box::new(move |pods, phase| sender.send((testing::uids(&pods), phase)).unwrap()));
        let delivered = || receiver.try_iter().collect::<Vec<_>>();
        let deliver = || offline.shared.deliver_stopped(fence::boot_time());
        deliver();
        assert_eq!(delivered(), [(vec!["a".to_owned(), "b".to_owned()], Phase::Alone)]);
        deliver();
        assert!(delivered().is_empty() && offline.phase() == Phase::Undecided, "once");
        assert_eq!(offline.report().stopped_pods, 2);
        // The list of the API server has one of them; a list alone starts none, because it may be an old one.
        offline.contact(fence::boot_time());
        offline.server_set(vec![pod("a")], true);
        assert!(offline.stops(&pod("a")) && offline.report().stopped_pods == 1);
        offline.shared.fence.release(&[PodUid::from("a")].into());
        assert!(!offline.stops(&pod("a")) && offline.releases().try_iter().count() == 1);
        // Without a contact since, nothing is delivered early.
        let root = tempfile::tempdir().unwrap();
        let unused = testing::offline(root.path(), &["a"]);
        unused.shared.deliver_stopped(i64::MAX);
        assert!(unused.shared.state().undelivered.is_none() && !unused.fences());
    }

    #[test]
    fn node_is_without_its_server_while_a_set_is_held_and_not_with_a_valid_lease() {
        let root = tempfile::tempdir().unwrap();
        drop(testing::offline(root.path(), &["a"]));
        let fence = fence::FenceSettings {
            shortest: std::time::Duration::from_secs(3600),
            ..fence::FenceSettings::default()
        };
        let settings = Settings { fence, ..testing::settings(root.path()) };
        let offline = Offline::with_files(testing::files(root.path()), Vec::new(), &settings, Instant::now());
        assert!(!offline.is_without_server(), "undecided, and without any contact");
        offline.server_set(vec![pod("a")], true);
        offline.contact(fence::boot_time());
        assert!(!offline.is_without_server());
        // The lease is renewed by an API server that has lost its data.
        offline.server_set(Vec::new(), true);
        offline.shared.node_read(NodeFact::Absent, Instant::now());
        assert!(offline.is_without_server() && offline.phase() == Phase::Held);
    }

    #[test]
    fn pod_that_was_released_before_the_decision_is_in_the_next_early_set() {
        let root = tempfile::tempdir().unwrap();
        drop(testing::offline(root.path(), &["a", "b"]));
        let mut longer = serde_json::to_value(pod("a").object()).unwrap();
        longer["metadata"]["annotations"][fence::STOP_AFTER] = "1h".into();
        testing::store(root.path(), &Key::new(Kind::Pod, "a"), &longer);
        let fence = fence::FenceSettings {
            stop_after: Some(std::time::Duration::from_secs(300)),
            ..fence::FenceSettings::default()
        };
        let settings = Settings { fence, ..testing::settings(root.path()) };
        let stopped = serde_json::json!({"phase": "Running", "reason": reasons::STOPPED_OFFLINE});
        testing::store(root.path(), &Key::new(Kind::PodStatus, "a"), &stopped);
        let offline = Offline::with_files(testing::files(root.path()), Vec::new(), &settings, Instant::now());
        let delivered = deliveries(&offline);
        offline.shared.deliver_stopped(fence::boot_time());
        assert_eq!(delivered.try_recv().unwrap(), ["a"], "by its stored status");
        offline.shared.fence.release(&[PodUid::from("a")].into());
        offline.shared.deliver_stopped(fence::boot_time());
        assert!(delivered.is_empty());
        offline.shared.deliver_stopped(fence::boot_time() + 400_000);
        assert_eq!(delivered.try_recv().unwrap(), ["a", "b"], "b is over its time, and a is not");
    }

    #[test]
    fn expired_token_raises_one_event_for_each_pod() {
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &[]);
        offline.token_expired(&pod("a"));
        let (sink, events) = EventSink::new();
        offline.shared.events.set(sink).unwrap();
        for uid in ["a", "b", "a"] {
            offline.token_expired(&pod(uid));
        }
        let reasons: Vec<_> = events.try_iter().map(|event| event.reason).collect();
        assert_eq!(reasons, [reasons::EXPIRED_TOKEN_USED; 2]);
    }

    #[test]
    fn report_shows_phase_time_and_what_was_wrong_at_the_start() {
        let root = tempfile::tempdir().unwrap();
        testing::store(
            root.path(),
            &Key::new(Kind::Pod, "other"),
            &serde_json::json!({"metadata": {"uid": "u"}}),
        );
        let offline = testing::offline(root.path(), &["a"]);
        let report = offline.report();
        assert_eq!((report.phase, report.limit_bytes), (Phase::Undecided, MAX_BYTES));
        assert!(report.since.is_some() && report.problems.len() == 1, "{report:?}");
        offline.server_set(Vec::new(), true);
        offline.shared.node_read(NodeFact::Absent, Instant::now());
        let report = offline.report();
        assert_eq!(report.held, Some(super::super::state::HeldReason::NoNode));
        assert!(report.accepts > report.since);
    }
}
