//! The thread `offline`: writes files, reads the Node object for a decision, and waits for what is due.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, never, select_biased};

use super::decide::{Effect, NodeFact};
use super::handle::{Change, Offline};
use super::key::Key;
use super::state::Phase;
use super::store::Store;
use super::stored;
use crate::model::api::{Node, PodStatus};
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::util::secret::Secret;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// The functions of other rooms that the thread calls. None of them may wait, except `read_node`.
pub struct Deps {
    /// Our Node object as the API server showed it; `None`: not yet, or it does not exist.
    pub node: Box<dyn Fn() -> Option<Arc<Node>> + Send>,
    /// Rings when it changed.
    pub node_changes: Receiver<()>,
    /// Reads it from the API server, with a limit of 5 s. Ends when the client is shut down.
    pub read_node: Box<dyn Fn() -> NodeFact + Send>,
    /// Receives the stored Node object, for admission until the API server shows it.
    pub use_node: Box<dyn Fn(Node) + Send>,
    /// Called at each new phase: objects whose absence did not count before are settled.
    pub entered: Box<dyn Fn(Phase) + Send>,
    /// Rings after every change of a pod's status on this node.
    pub status_changes: Receiver<()>,
    /// The statuses that were stored after a version, and the newest version.
    pub statuses: Box<dyn Fn(u64) -> (u64, Vec<(PodUid, Arc<PodStatus>)>) + Send>,
    /// Rings when services changed.
    pub service_changes: Receiver<()>,
    /// The stored forms of the services that pods of these namespaces see.
    pub services: Box<dyn Fn(&BTreeSet<String>) -> Vec<(Key, Secret<Vec<u8>>)> + Send>,
    /// The keys of all objects that a pod needs. The second function reads what is stored: a claim names a
    /// volume, and a volume a driver.
    pub needs: Needs,
    /// Kubernetes events.
    pub events: EventSink,
}

/// See [`Deps::needs`].
pub type Needs = Box<dyn Fn(&Pod, &dyn Fn(&Key) -> Option<Secret<Vec<u8>>>) -> BTreeSet<Key> + Send>;

impl Offline {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the kernel cannot create it.
    pub fn spawn(&self, deps: Deps, on_death: OnDeath) -> io::Result<Running> {
        let writer = Writer { offline: self.clone(), deps, store: Store::default() };
        threads::spawn("offline", Stack::Large, on_death, move |stop| writer.run(&stop))
    }
}

struct Writer {
    offline: Offline,
    deps: Deps,
    store: Store,
}

impl Writer {
    fn run(mut self, stop: &StopToken) {
        let shared = Arc::clone(&self.offline.shared);
        let Some(inbox) = shared.take_inbox() else { return };
        let (store, problems) = Store::open(&shared.files);
        self.store = store;
        problems.iter().for_each(|problem| log::warn!("a stored object cannot be used: {problem}"));
        loop {
            let due = shared.state().decider.due();
            let _waiting = threads::waiting("objects, sets, times");
            select_biased! {
                recv(stop.signal()) -> _ => return,
                recv(shared.rings) -> _ => {}
                recv(self.deps.node_changes) -> rung => if rung.is_err() { self.deps.node_changes = never() },
                recv(inbox.bell()) -> _ => inbox.drain().into_iter().for_each(|(key, change)| self.write(&key, change)),
                recv(timers::deadline_channel(due)) -> _ => {}
            }
            self.node_changed();
            shared.step(|decider| decider.tick(Instant::now()));
            self.carry_out();
        }
    }

    /// Stores the Node object, if it changed. Written directly: through the inbox, each turn would cause
    /// the next one.
    fn node_changed(&mut self) {
        if self.offline.phase() != Phase::Online {
            return;
        }
        let Some(node) = (self.deps.node)() else { return };
        if let Some(uid) = &node.metadata.uid {
            self.offline.shared.state().decider.node_shown(uid);
        }
        if let Ok(body) = serde_json::to_vec(&stored::node(&node)) {
            self.write(&Key::node(), Change::Body(Secret::new(body)));
        }
    }

    fn carry_out(&self) {
        let orders = std::mem::take(&mut self.offline.shared.state().orders);
        for order in orders {
            match order {
                Effect::UseStoredNode => {
                    let node = self.offline.shared.state().stored_node.take();
                    node.into_iter().for_each(&self.deps.use_node);
                }
                Effect::ReadNode => self.offline.shared.node_read((self.deps.read_node)(), Instant::now()),
                Effect::Entered(phase) => (self.deps.entered)(phase),
                Effect::Deliver(_) | Effect::Store { .. } => {}
            }
        }
    }

    fn write(&mut self, key: &Key, change: Change) {
        let files = &self.offline.shared.files;
        let result = match change {
            Change::Body(body) => self.store.put(files, key, body.reveal()).map(drop),
            Change::Gone => self.store.remove(files, key),
        };
        if let Err(error) = result {
            log::warn!("cannot store {} {}: {error}", key.kind.word(), key.name);
        }
    }
}
