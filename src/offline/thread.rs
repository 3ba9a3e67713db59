//! The thread `offline`: writes files, reads the Node object for a decision, and waits for what is due.

mod purge;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, never, select_biased};
use jiff::Timestamp;

use super::clock::{self, ClockCheck};
use super::decide::{Effect, NodeFact};
use super::fence::boot_time;
use super::files::FileError;
use super::handle::{NodeAccess, Offline};
use super::key::{Key, Kind};
use super::problems::Problems;
use super::queue::{Change, Queue, SERVICES_PACE};
use super::state::{HeldReason, Phase};
use super::store::{Store, Stored};
use super::stored;
use crate::model::api::{Node, PodStatus};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::util::lock::LockExt;
use crate::util::mailbox::Inbox;
use crate::util::secret::Secret;
use crate::util::sha256::sha256;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// How long the thread writes after the stop signal.
const STOP_LIMIT: Duration = Duration::from_secs(1);
/// The wait after the time of the last contact could not be written.
const CONTACT_RETRY: Duration = Duration::from_secs(60);

/// The most pods that have ended and are stored, the newest ones. They do not run again, stored or not, and no
/// quota limits their number: pods that a node refuses end at once.
const MAX_ENDED: usize = 256;

/// How often a machine without an address looks for its first one, before the decision only.
const ADDRESS_CHECK: Duration = Duration::from_secs(1);

/// The functions of other rooms that the thread calls. None of them may wait, except `read_node`.
pub struct Deps {
    /// Our Node object as the API server showed it; `None`: not yet, or it does not exist.
    pub node: Box<dyn Fn() -> Option<Arc<Node>> + Send>,
    /// Rings when it changed.
    pub node_changes: Receiver<()>,
    /// Reads it from the API server, with a limit of 5 s. Ends when the client is shut down.
    pub read_node: Box<dyn Fn() -> NodeFact + Send>,
    /// Reads the UIDs of this node's pods that are to run from the API server, with a limit of 5 s; `None`:
    /// they cannot be read. Ends when the client is shut down.
    pub read_pods: ReadPods,
    /// Receives the stored Node object, for admission until `release_node` is called. Must not block.
    pub use_node: Box<dyn Fn(Node) + Send>,
    /// The Node object of the API server counts for admission again. Must not block.
    pub release_node: Box<dyn Fn() + Send>,
    /// Called at each new phase: objects whose absence did not count before are settled.
    pub entered: Box<dyn Fn(Phase) + Send>,
    /// Rings after every change of a pod's status on this node.
    pub status_changes: Receiver<()>,
    /// The statuses that were stored after a version, and the newest version.
    pub statuses: ReadStatuses,
    /// Rings when services changed.
    pub service_changes: Receiver<()>,
    /// The UID of the service `default/kubernetes` as the API server showed it; `None`: not yet, or it does not
    /// exist.
    pub cluster: Box<dyn Fn() -> Option<String> + Send>,
    /// The stored forms of the services that pods of these namespaces see.
    pub services: ReadServices,
    /// The keys of all objects that a pod needs. The second function reads what is stored: a claim names a
    /// volume, and a volume a driver.
    pub needs: Needs,
    /// Whether the machine has an address in a network.
    pub has_address: Box<dyn Fn() -> bool + Send>,
    /// Kubernetes events.
    pub events: EventSink,
}

/// See [`Deps::read_pods`].
pub type ReadPods = Box<dyn Fn() -> Option<BTreeSet<PodUid>> + Send>;
/// See [`Deps::statuses`].
pub type ReadStatuses = Box<dyn Fn(u64) -> (u64, ChangedStatuses) + Send>;
/// Statuses by the UIDs of their pods.
pub type ChangedStatuses = Vec<(PodUid, Arc<PodStatus>)>;
/// See [`Deps::services`].
pub type ReadServices = Box<dyn Fn(&BTreeSet<String>) -> Bodies + Send>;
/// Objects to store.
pub type Bodies = Vec<(Key, Secret<Vec<u8>>)>;
/// See [`Deps::needs`].
pub type Needs = Box<dyn Fn(&Pod, &dyn Fn(&Key) -> Option<Secret<Vec<u8>>>) -> BTreeSet<Key> + Send>;

impl Offline {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the kernel cannot create it.
    pub fn spawn(&self, mut deps: Deps, on_death: OnDeath) -> io::Result<Running> {
        let offline = self.clone();
        let _ = offline.shared.events.set(deps.events.clone());
        offline.shared.state().node = Some(NodeAccess {
            assume: std::mem::replace(&mut deps.use_node, Box::new(drop)),
            settle: std::mem::replace(&mut deps.release_node, Box::new(|| {})),
        });
        threads::spawn("offline", Stack::Large, on_death, move |stop| {
            if let Some(inbox) = offline.shared.take_inbox() {
                Writer::new(offline, deps, inbox).run(&stop);
            }
        })
    }
}

struct Writer {
    offline: Offline,
    deps: Deps,
    inbox: Inbox<Key, Change>,
    store: Store,
    queue: Queue,
    problems: Problems,
    /// The Node object that was queued last, and the digest of its stored form.
    node: Weak<Node>,
    node_digest: Option<[u8; 32]>,
    is_node_stored: bool,
    /// The UID of the cluster that was queued last, or read from its file.
    cluster: Option<String>,
    /// What was queued last of the status of each pod.
    statuses: BTreeMap<PodUid, [u8; 16]>,
    seen_statuses: u64,
    services_due: Option<Instant>,
    services_read: Option<Instant>,
    /// The namespaces of the pods, for services.
    namespaces: BTreeSet<String>,
    /// The phase whose entry was handled last.
    entered: Phase,
    /// Whether pods were added, or stored objects may be without a pod.
    has_new_pods: bool,
    has_old_pods: bool,
    is_report_old: bool,
    /// When a failed write of the last contact is repeated.
    contact_retry: Option<Instant>,
    /// The contact after which the pods were read last.
    pods_read: i64,
    /// When the first address is looked for again.
    address_due: Option<Instant>,
    clock: ClockCheck,
}

impl Writer {
    fn new(offline: Offline, deps: Deps, inbox: Inbox<Key, Change>) -> Writer {
        let (store, found) = Store::open(&offline.shared.files);
        let (mut problems, known, bound, cluster) = {
            let mut state = offline.shared.state();
            let cluster = state.decider.cluster().map(str::to_owned);
            (std::mem::take(&mut state.problems), state.decider.known().to_vec(), state.clock_bound, cluster)
        };
        for problem in found {
            log::warn!("a stored object cannot be used: {problem}");
            problems.add(problem);
        }
        // Those that were read from files.
        let status =
            |pod: &Pod| Some((pod.uid().clone(), stored::significant(pod.object().status.as_ref()?)));
        let is_node_stored = store.keys().any(|key| key.kind == Kind::Node);
        Writer {
            statuses: known.iter().filter_map(status).collect(),
            offline,
            deps,
            inbox,
            store,
            queue: Queue::default(),
            problems,
            node: Weak::new(),
            node_digest: None,
            is_node_stored,
            cluster,
            seen_statuses: 0,
            services_due: None,
            services_read: None,
            namespaces: BTreeSet::new(),
            entered: Phase::Undecided,
            has_new_pods: false,
            has_old_pods: false,
            is_report_old: true,
            contact_retry: None,
            pods_read: i64::MIN,
            address_due: None,
            clock: ClockCheck::new(bound),
        }
    }

    fn run(mut self, stop: &StopToken) {
        // Before anything that may wait: pods that must not run may run.
        self.offline.shared.deliver_stopped(boot_time());
        self.begin_wait(Instant::now());
        self.report();
        let rings = self.offline.shared.rings.clone();
        loop {
            self.check_clock(Timestamp::now(), Instant::now());
            let due = [self.due(), self.clock.due()].into_iter().flatten().min();
            let due = timers::deadline_channel(due);
            let waiting = threads::waiting("objects, sets, times");
            // A bell without a sender would always be ready.
            select_biased! {
                recv(stop.signal()) -> _ => break,
                recv(rings) -> _ => {}
                recv(self.deps.node_changes) -> rung => if rung.is_err() { self.deps.node_changes = never() },
                recv(due) -> _ => {}
                recv(self.deps.status_changes) -> rung => match rung {
                    Ok(()) => self.read_statuses(Instant::now()),
                    Err(_) => self.deps.status_changes = never(),
                },
                recv(self.deps.service_changes) -> rung => match rung {
                    Ok(()) => self.services_changed(Instant::now()),
                    Err(_) => self.deps.service_changes = never(),
                },
                recv(self.inbox.bell()) -> _ => {}
            }
            drop(waiting);
            self.turn(Instant::now());
        }
        self.finish(Instant::now());
    }

    /// When a turn has something to do.
    fn due(&self) -> Option<Instant> {
        let decision = self.offline.shared.state().decider.due();
        let write = self.queue.due(self.offline.accepts_absence());
        [decision, write, self.services_due, self.fence_due(), self.address_due].into_iter().flatten().min()
    }

    /// Without an address, the wait for the API server has not begun.
    fn begin_wait(&mut self, now: Instant) {
        if !(self.deps.has_address)() {
            self.offline.shared.state().decider.no_address();
            self.address_due = Some(now);
            self.find_address(now);
        }
    }

    /// Looks for the first address, if that is due.
    fn find_address(&mut self, now: Instant) {
        if self.address_due.is_none_or(|due| due > now) {
            return;
        }
        self.address_due = None;
        if !self.offline.shared.state().decider.awaits_address() {
            return;
        }
        if (self.deps.has_address)() {
            log::info!("this machine has an address now: the wait for the API server begins");
            self.offline.shared.state().decider.address_found(now);
        } else {
            self.address_due = now.checked_add(ADDRESS_CHECK);
        }
    }

    /// When a pod has to be stopped before the decision, or the time of the last contact is to be written.
    fn fence_due(&self) -> Option<Instant> {
        let (shared, now) = (&self.offline.shared, Instant::now());
        let boot = boot_time();
        let store =
            shared.fence.is_store_due(boot).then(|| self.contact_retry.map_or(now, |retry| retry.max(now)));
        let stop = (self.offline.phase() == Phase::Undecided && self.offline.fences())
            .then(|| {
                let state = shared.state();
                let left = state.decider.known().iter().filter_map(|pod| shared.fence.left(pod, boot));
                left.filter(|left| *left > 0).min()
            })
            .flatten();
        let later = |wait: i64| now.checked_add(Duration::from_millis(u64::try_from(wait).unwrap_or(0)));
        [store, stop.and_then(later)].into_iter().flatten().min()
    }

    /// Carries out the decisions, and writes one file: then a decision may be next, because a write may take
    /// seconds.
    fn turn(&mut self, now: Instant) {
        self.find_address(now);
        // First: it may say that a set is not accepted by itself.
        self.cluster_changed(now);
        self.offline.shared.step(|decider| decider.tick(now));
        self.offline.shared.deliver_stopped(boot_time());
        self.carry_out(now);
        self.release_pods();
        self.forget_damaged();
        self.take_changes(now);
        self.purge(now);
        self.node_changed(now);
        self.read_services(now);
        self.collect(now);
        self.store_contact(now, false);
        self.write_next(now);
        if !self.is_node_stored {
            // It may have waited for the pods.
            self.node_changed(now);
        }
        self.report();
    }

    /// After a new contact: stopped pods that the API server has may run again. Its watch may not have
    /// noticed yet that it was away, so they are read.
    fn release_pods(&mut self) {
        let fence = &self.offline.shared.fence;
        let contact = fence.own_contact();
        if !fence.waits_for_server() || contact.is_none_or(|contact| contact <= self.pods_read) {
            return;
        }
        // After a failure the next contact tries again.
        self.pods_read = contact.unwrap_or(i64::MIN);
        if let Some(shown) = (self.deps.read_pods)() {
            fence.release(&shown);
        }
    }

    /// Writes the time of the last contact, if that is due.
    fn store_contact(&mut self, now: Instant, is_stop: bool) {
        if self.contact_retry.is_some_and(|retry| retry > now && !is_stop) {
            return;
        }
        self.contact_retry = None;
        let shared = &self.offline.shared;
        if !shared.fence.is_used() {
            // As the file in memory: it is not brought up to date any more.
            if self.store.has(&Key::contact()) && self.offline.accepts_absence() {
                match self.store.remove(&shared.files, &Key::contact()) {
                    Ok(()) => {
                        shared.fence.forget_stored();
                        self.is_report_old = true;
                    }
                    Err(error) => {
                        log::warn!("cannot remove the time of the last contact: {error}");
                        self.contact_retry = now.checked_add(CONTACT_RETRY);
                    }
                }
            }
            return;
        }
        let Some((contact, seconds)) = shared.fence.to_store(shared.fence.stored(), boot_time(), is_stop)
        else {
            return;
        };
        let Ok(body) = serde_json::to_vec(&stored::Contact { seconds }) else { return };
        match self.store.put(&shared.files, &Key::contact(), &body) {
            Ok(_) => {
                shared.fence.set_stored(contact);
                self.is_report_old = true;
            }
            Err(error) => {
                log::warn!("cannot store the time of the last contact: {error}");
                self.contact_retry = now.checked_add(CONTACT_RETRY);
            }
        }
        self.report_evicted();
    }

    fn carry_out(&mut self, now: Instant) {
        let orders = std::mem::take(&mut self.offline.shared.state().orders);
        for order in orders {
            match order {
                Effect::ReadNode => {
                    self.offline.shared.node_read((self.deps.read_node)(), Instant::now());
                    // The Node object may have proved it.
                    self.cluster_changed(now);
                }
                Effect::Entered(phase) => self.enter(phase, now),
                Effect::UseStoredNode | Effect::Deliver(_) | Effect::Store { .. } => {}
            }
        }
    }

    fn enter(&mut self, phase: Phase, now: Instant) {
        (self.deps.entered)(phase);
        let before = std::mem::replace(&mut self.entered, phase);
        if phase == Phase::Online {
            // Also those that were left out, because their pods were not stored.
            self.seen_statuses = 0;
        }
        // Statuses from before the decision.
        self.read_statuses(now);
        let pods = self.known().iter().filter(|pod| !pod.is_mirror()).count();
        match phase {
            Phase::Undecided => {}
            Phase::Alone => {
                let message =
                    format!("The API server has not responded since the start: {pods} stored pods run");
                self.raise(EventType::Warning, reasons::RUNNING_OFFLINE, message);
            }
            Phase::Held => {
                let report = self.offline.report();
                let node = match report.held {
                    Some(HeldReason::OtherCluster) => "is that of another cluster",
                    Some(HeldReason::OtherNode) => "has another Node object of this name",
                    Some(HeldReason::NoNode) | None => "has no Node object of this node",
                };
                let end = report.accepts.map_or_else(String::new, |time| format!(", or wait until {time}"));
                let message = format!(
                    "The API server {node}, and has none of the node's {pods} pods, so these continue to run; if its \
                     data are right, run coracle offline accept{end}"
                );
                self.raise(EventType::Warning, reasons::SERVER_PODS_HELD, message);
            }
            Phase::Online => {
                if before.uses_stored() {
                    let message = format!("The {pods} pods of the API server count again");
                    self.raise(EventType::Normal, reasons::SERVER_PODS_ACCEPTED, message);
                }
                self.offline.shared.expired.locked().clear();
                self.queue.postpone_removals(now);
                (self.has_new_pods, self.has_old_pods) = (true, true);
                self.services_changed(now);
            }
        }
    }

    /// Compares the clock with the stored bound, and raises the bound.
    fn check_clock(&mut self, wall: Timestamp, now: Instant) {
        let finding = self.clock.step(wall, now, self.offline.accepts_absence());
        match finding.changed {
            Some(true) => {
                let message = self.clock.problem(wall).unwrap_or_default();
                self.raise(EventType::Warning, reasons::CLOCK_BEHIND, message);
            }
            Some(false) => log::info!("the clock of this machine is not behind any more"),
            None => {}
        }
        if let Some(bound) = finding.write {
            // This process knows it, also if it cannot be stored.
            self.offline.shared.state().clock_bound = Some(bound);
            if let Err(error) = clock::write(&self.offline.shared.files, bound) {
                log::warn!("cannot store the bound for the time: {error}");
            }
        }
    }

    fn raise(&self, kind: EventType, reason: &'static str, message: String) {
        log::info!("{message}");
        self.deps.events.raise(Regarding::Node, kind, reason, message);
    }

    fn known(&self) -> Vec<Pod> {
        self.offline.shared.state().decider.known().to_vec()
    }

    /// Objects whose files were put aside are stored again as soon as the API server shows them, although
    /// they have not changed.
    fn forget_damaged(&mut self) {
        let damaged = std::mem::take(&mut *self.offline.shared.damaged.locked());
        let shared = Arc::clone(&self.offline.shared);
        let files = &shared.files;
        for key in damaged {
            // It may have been written again meanwhile.
            if matches!(files.read(&key), Ok(Some(_))) {
                continue;
            }
            if let Err(error) = self.store.remove(files, &key) {
                log::warn!("cannot remove the damaged {} {}: {error}", key.kind.word(), key.name);
            }
            self.has_old_pods |= key.kind == Kind::Pod;
            self.forget(&key);
            self.is_report_old = true;
        }
    }

    /// The object is not stored any more, although its next version may be the same.
    fn forget(&mut self, key: &Key) {
        match key.kind {
            Kind::PodStatus => {
                self.statuses.remove(&PodUid::from(key.name.as_str()));
            }
            Kind::Node => (self.node, self.node_digest, self.is_node_stored) = (Weak::new(), None, false),
            Kind::Contact => self.offline.shared.fence.forget_stored(),
            Kind::Cluster => self.cluster = None,
            _ => {}
        }
    }

    fn take_changes(&mut self, now: Instant) {
        let mut may_have_ended = false;
        for (key, change) in self.inbox.drain() {
            match (key.kind, &change) {
                (Kind::Pod, Change::Gone) => {
                    self.statuses.remove(&PodUid::from(key.name.as_str()));
                    self.has_old_pods = true;
                }
                (Kind::Pod, _) => {
                    self.has_new_pods = true;
                    may_have_ended |= matches!(change, Change::Urgent(_));
                }
                _ => {}
            }
            self.queue.offer(key, change, now);
        }
        self.has_old_pods |= may_have_ended && !surplus(&self.known()).is_empty();
    }

    /// Queues the Node object, if it changed and belongs to the set that counts: after a start, another UID
    /// would prove the list of a server that has lost its data.
    fn node_changed(&mut self, now: Instant) {
        let Some(node) = (self.deps.node)() else { return };
        let Some(uid) = &node.metadata.uid else { return };
        {
            // With the lock, so that the pods of a set that was just accepted are in the inbox.
            let mut state = self.offline.shared.state();
            let decider = &mut state.decider;
            decider.node_shown(uid);
            if decider.phase() != Phase::Online || decider.is_open() || decider.node() != Some(uid.as_str()) {
                return;
            }
        }
        // A stored Node object means that the stored pods are complete: without it the node never starts alone,
        // which would stop the others.
        let has_new_pods = self.queue.has_new_pods(|key| self.store.has(key)) || !self.inbox.is_empty();
        if std::ptr::eq(self.node.as_ptr(), Arc::as_ptr(&node)) || (has_new_pods && !self.is_node_stored) {
            return;
        }
        let Ok(body) = serde_json::to_vec(&stored::node(&node)) else { return };
        self.node = Arc::downgrade(&node);
        let digest = sha256(&body);
        // Heartbeats change only other parts.
        if self.node_digest.replace(digest) != Some(digest) {
            self.queue.offer(Key::node(), Change::Body(Secret::new(body)), now);
        }
    }

    /// Passes on which cluster the API server has, and queues that of the set that counts.
    fn cluster_changed(&mut self, now: Instant) {
        let shown = (self.deps.cluster)();
        self.offline.shared.step(|decider| decider.cluster_shown(shown.as_deref(), now));
        if !self.offline.accepts_absence() {
            // One that was purged is not there at the next start.
            return;
        }
        let cluster = self.offline.shared.state().decider.cluster().map(str::to_owned);
        let Some(uid) = cluster.filter(|uid| self.cluster.as_ref() != Some(uid)) else { return };
        let Ok(body) = serde_json::to_vec(&stored::Cluster { uid: uid.clone() }) else { return };
        self.cluster = Some(uid);
        self.queue.offer(Key::cluster(), Change::Body(Secret::new(body)), now);
    }

    /// Queues the statuses of known pods that changed in a part that is worth a write.
    fn read_statuses(&mut self, now: Instant) {
        let phase = self.offline.phase();
        if phase == Phase::Undecided {
            return;
        }
        let (version, changed) = (self.deps.statuses)(self.seen_statuses);
        self.seen_statuses = version;
        if changed.is_empty() {
            return;
        }
        let known: BTreeMap<PodUid, bool> =
            self.known().iter().map(|pod| (pod.uid().clone(), pod.is_over())).collect();
        for (uid, status) in changed {
            let is_terminal = stored::is_terminal(&status);
            // A pod that the API server shows as ended never runs again, although its containers may still run.
            let Some(&is_over) = known.get(&uid) else { continue };
            if is_over && !is_terminal {
                continue;
            }
            // A pod that was purged, or is one of too many that have ended, is not there at the next start.
            let pod = Key::new(Kind::Pod, uid.as_str());
            let is_stored = self.store.has(&pod) || self.queue.has(&pod) || !self.inbox.is_empty();
            if (phase.uses_stored() || is_over) && !is_stored {
                continue;
            }
            let digest = stored::significant(&status);
            if self.statuses.insert(uid.clone(), digest) == Some(digest) {
                continue;
            }
            if let Some((key, body)) = stored::of_status(&uid, &status) {
                // The next contact is stored at once, and after it only this says that the pod is stopped.
                let is_urgent = is_terminal || status.reason.as_deref() == Some(reasons::STOPPED_OFFLINE);
                let change = if is_urgent { Change::Urgent(body) } else { Change::Body(body) };
                self.queue.offer(key, change, now);
            }
        }
    }

    fn services_changed(&mut self, now: Instant) {
        let due = self.services_read.and_then(|read| read.checked_add(SERVICES_PACE));
        self.services_due.get_or_insert(due.map_or(now, |due| due.max(now)));
    }

    /// Queues the services that the pods see, if that is due. Not while a list waits for a decision: they may
    /// be those of another cluster. The entry of the next phase repeats it.
    fn read_services(&mut self, now: Instant) {
        if !self.offline.accepts_absence() {
            self.services_due = None;
            return;
        }
        let mut is_urgent = false;
        if std::mem::take(&mut self.has_new_pods) {
            let namespaces = namespaces(&self.known());
            if namespaces != self.namespaces {
                self.namespaces = namespaces;
                // Without the pace: a power cut may follow, and the new pods need them.
                self.services_due = Some(now);
                is_urgent = true;
            }
        }
        if self.services_due.is_none_or(|due| due > now) {
            return;
        }
        (self.services_due, self.services_read) = (None, Some(now));
        for (key, body) in (self.deps.services)(&self.namespaces) {
            let change = if is_urgent { Change::Urgent(body) } else { Change::Body(body) };
            self.queue.offer(key, change, now);
        }
    }

    /// After pods were removed, or too many have ended: removes the objects that no pod needs, and the oldest
    /// ended pods. Queues pods that are not stored because their files were damaged, or did not fit.
    fn collect(&mut self, now: Instant) {
        if !self.has_old_pods || !self.offline.accepts_absence() {
            return;
        }
        self.has_old_pods = false;
        let mut known: Vec<Pod> = self.known().into_iter().filter(|pod| !pod.is_mirror()).collect();
        let surplus = surplus(&known);
        known.retain(|pod| !surplus.contains(pod.uid()));
        let uids: BTreeSet<&str> = known.iter().map(|pod| pod.uid().as_str()).collect();
        let (offline, queue) = (&self.offline, &self.queue);
        let read = |key: &Key| queue.body(key).or_else(|| offline.read(key));
        let needed: BTreeSet<Key> = known.iter().flat_map(|pod| (self.deps.needs)(pod, &read)).collect();
        let namespaces = namespaces(&known);
        let is_needed = |key: &Key| match key.kind {
            Kind::Node | Kind::Contact | Kind::Cluster => true,
            Kind::Pod | Kind::PodStatus => uids.contains(key.name.as_str()),
            // The name begins with the UID of its pod; see `Key::belongs_to`.
            Kind::Token | Kind::PodCertificate => {
                key.name.split_once('/').is_some_and(|(uid, _)| uids.contains(uid))
            }
            Kind::Services => key.name == "default" || namespaces.contains(&key.name),
            _ => needed.contains(key),
        };
        self.queue.forget(is_needed);
        self.is_report_old |= self.problems.forget(is_needed);
        for key in self.store.keys().filter(|key| !is_needed(key)) {
            self.queue.collect(key.clone(), now);
        }
        let stored: BTreeSet<&Key> = self.store.keys().filter(|key| key.kind == Kind::Pod).collect();
        for pod in &known {
            let key = Key::new(Kind::Pod, pod.uid().as_str());
            if !stored.contains(&key) && !self.queue.has(&key) {
                stored::of_pod(pod).into_iter().for_each(|(key, body)| {
                    self.queue.offer(key, Change::Body(body), now);
                });
            }
        }
    }

    /// Writes or removes the first file that is due. Returns whether there was one.
    fn write_next(&mut self, now: Instant) -> bool {
        let Some(due) = self.queue.next(now, self.offline.accepts_absence()) else { return false };
        let files = &self.offline.shared.files;
        let result = match &due.change {
            // One whose deletion was forced may run elsewhere already, and was not marked for deletion before.
            Change::Gone if due.key.kind == Kind::Pod => {
                self.store.remove_for_good(files, &due.key).map(|()| None)
            }
            Change::Gone => self.store.remove(files, &due.key).map(|()| None),
            Change::Body(body) | Change::Urgent(body) => {
                self.store.put(files, &due.key, body.reveal()).map(Some)
            }
        };
        match result {
            Ok(stored) => {
                self.is_report_old |= self.problems.clear(&due.key) || stored != Some(Stored::Same);
                self.is_node_stored |= due.key.kind == Kind::Node && stored.is_some();
                if stored == Some(Stored::Written) {
                    self.queue.wrote(due.key, now);
                }
            }
            Err(error) => {
                self.is_report_old = true;
                if let Some(failures) = self.problems.set(&due.key, &error.to_string()) {
                    let (word, name) = (due.key.kind.word(), &due.key.name);
                    log::warn!("cannot store {word} {name}: {error} ({failures} failures since the start)");
                }
                let is_final = matches!(error, FileError::Format(_) | FileError::NotStored(_));
                if !is_final {
                    self.queue.failed(due, now);
                }
            }
        }
        self.report_evicted();
        true
    }

    /// Objects that went because others needed the space are problems until they are stored again.
    fn report_evicted(&mut self) {
        for key in self.store.take_evicted() {
            self.is_report_old = true;
            let error = FileError::Full;
            if let Some(failures) = self.problems.set(&key, &error.to_string()) {
                let (word, name) = (key.kind.word(), &key.name);
                log::warn!("removed the stored {word} {name}: {error} ({failures} failures since the start)");
            }
        }
    }

    /// The agent stops: writes what waits, for a limited time.
    fn finish(&mut self, now: Instant) {
        self.offline.shared.fence.finish();
        self.store_contact(now, true);
        // Their clients see that there is no thread.
        self.offline.shared.purges.locked().clear();
        self.read_statuses(now);
        self.take_changes(now);
        if self.deps.service_changes.try_recv().is_ok() || self.services_due.is_some() {
            self.services_due = Some(now);
        }
        self.read_services(now);
        self.queue.hurry(now);
        let start = Instant::now();
        while start.elapsed() < STOP_LIMIT && self.write_next(now) {}
        if self.queue.len() > 0 {
            log::warn!("{} changes of stored objects are not written", self.queue.len());
        }
    }

    fn report(&mut self) {
        if std::mem::take(&mut self.is_report_old) {
            let (objects, problems) = (self.store.objects(), self.problems.texts());
            let (kind_bytes, copies) = (self.store.kind_bytes(), self.offline.shared.files.copies().len());
            let mut state = self.offline.shared.state();
            let report = &mut state.report;
            (report.objects, report.bytes, report.problems) = (objects, self.store.bytes(), problems);
            (report.kind_bytes, report.damaged_files) =
                (kind_bytes, u64::try_from(copies).unwrap_or(u64::MAX));
        }
    }
}

fn namespaces(pods: &[Pod]) -> BTreeSet<String> {
    pods.iter().filter(|pod| !pod.is_mirror()).map(|pod| pod.namespace().to_owned()).collect()
}

/// The pods that are not stored, because they have ended and there are too many of them.
fn surplus(pods: &[Pod]) -> BTreeSet<PodUid> {
    let age = |pod: &Pod| {
        let created = pod.object().metadata.creation_timestamp.as_ref().map(|time| time.0);
        (created, pod.uid().clone())
    };
    let mut ended: Vec<_> = pods.iter().filter(|pod| pod.is_over() && !pod.is_mirror()).map(age).collect();
    ended.sort_unstable();
    ended.truncate(ended.len().saturating_sub(MAX_ENDED));
    ended.into_iter().map(|(_, uid)| uid).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use crossbeam_channel::bounded;
    use serde_json::json;

    use super::super::testing::{self, pod};
    use super::*;
    use crate::util::disk_writes;

    /// More than a test causes.
    const EVENTS: usize = 4096;

    /// A writer whose turns the test makes.
    pub(super) struct Fixture {
        pub(super) root: tempfile::TempDir,
        pub(super) writer: Writer,
        start: Instant,
    }

    impl Fixture {
        pub(super) fn new(stored: &[&str], deps: Deps) -> Fixture {
            let root = tempfile::tempdir().unwrap();
            let offline = testing::offline(root.path(), stored);
            Fixture::with(root, offline, deps)
        }

        pub(super) fn with(root: tempfile::TempDir, offline: Offline, deps: Deps) -> Fixture {
            let inbox = offline.shared.take_inbox().unwrap();
            Fixture { root, writer: Writer::new(offline, deps, inbox), start: Instant::now() }
        }

        pub(super) fn offline(&self) -> &Offline {
            &self.writer.offline
        }

        /// Turns at this second after the start, until nothing is due.
        pub(super) fn turns(&mut self, second: u64) {
            let now = self.start + Duration::from_secs(second);
            self.writer.turn(now);
            for _ in 0..100 {
                if self.offline().shared.rings.try_recv().is_err()
                    && self.writer.due().is_none_or(|due| due > now)
                {
                    return;
                }
                self.writer.turn(now);
            }
            panic!("the thread does not come to rest");
        }

        fn files(&self) -> BTreeSet<String> {
            files(self.root.path())
        }

        pub(super) fn has(&self, key: &Key) -> bool {
            self.files().contains(&key.file_name())
        }

        pub(super) fn put(&self, key: &Key, text: &str) {
            self.offline().put(key.clone(), Secret::new(text.as_bytes().to_vec()));
        }
    }

    fn files(root: &Path) -> BTreeSet<String> {
        let entries = std::fs::read_dir(testing::settings(root).directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn key(kind: Kind, name: &str) -> Key {
        Key::new(kind, name)
    }

    pub(super) fn node(uid: &str, label: &str) -> Arc<Node> {
        let object = json!({"metadata": {"name": "node1", "uid": uid, "labels": {"a": label}}});
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn status(value: serde_json::Value) -> Arc<PodStatus> {
        Arc::new(serde_json::from_value(value).unwrap())
    }

    /// A room without files.
    pub(super) fn empty() -> (tempfile::TempDir, Offline) {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        let settings = testing::settings(root.path());
        let offline = Offline::with_files(files, Vec::new(), &settings, Instant::now());
        (root, offline)
    }

    #[test]
    fn stopped_pods_are_read_once_after_each_contact_and_the_contact_is_stored() {
        let reads = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&reads);
        let read_pods = move || {
            let shown: BTreeSet<PodUid> = [PodUid::from("a")].into();
            (counted.fetch_add(1, Ordering::Relaxed) > 0).then_some(shown)
        };
        let root = tempfile::tempdir().unwrap();
        drop(testing::offline(root.path(), &["a"]));
        testing::store(root.path(), &Key::contact(), &json!({"seconds": 0}));
        let fence = super::super::fence::FenceSettings {
            stop_after: Some(Duration::from_secs(300)),
            ..Default::default()
        };
        let settings = super::super::settings::Settings { fence, ..testing::settings(root.path()) };
        let offline = Offline::with_files(testing::files(root.path()), Vec::new(), &settings, Instant::now());
        let mut fixture =
            Fixture::with(root, offline, Deps { read_pods: Box::new(read_pods), ..testing::deps() });
        fixture.turns(0);
        let count = || reads.load(Ordering::Relaxed);
        assert!(fixture.offline().stops(&pod("a")) && count() == 0, "there is no contact");
        let now = boot_time();
        fixture.offline().contact(now);
        fixture.turns(1);
        fixture.turns(2);
        assert!(fixture.offline().stops(&pod("a")) && count() == 1, "the read has failed");
        fixture.offline().contact(now + 1);
        fixture.turns(3);
        assert!(!fixture.offline().stops(&pod("a")) && count() == 2);
        fixture.offline().contact(now + 2);
        fixture.turns(4);
        assert_eq!(count(), 2, "no pod waits");
        let stored: stored::Contact = fixture.offline().read_json(&Key::contact()).unwrap();
        assert!(stored.seconds > 0, "{stored:?}");
    }

    /// At a later start with such a pod, it would be old.
    #[test]
    fn contact_goes_from_the_store_when_no_pod_is_stopped_after_a_time() {
        let (root, offline) = empty();
        let mut fixture = Fixture::with(root, offline, testing::deps());
        let with_time = |uid: &str| {
            let mut object = pod(uid).into_object();
            let annotation = (super::super::fence::STOP_AFTER.to_owned(), "1h".to_owned());
            object.metadata.annotations = Some([annotation].into());
            Pod::from(object)
        };
        fixture.offline().server_set(vec![with_time("a")], true);
        fixture.offline().contact(boot_time());
        fixture.turns(0);
        assert!(fixture.has(&Key::contact()));
        fixture.offline().server_set(vec![pod("b")], false);
        fixture.turns(1);
        assert!(!fixture.has(&Key::contact()) && fixture.has(&key(Kind::Pod, "b")));
        fixture.offline().server_set(vec![pod("b"), with_time("c")], false);
        fixture.offline().contact(boot_time());
        fixture.turns(2);
        assert!(fixture.has(&Key::contact()));
    }

    #[test]
    fn clock_that_is_set_back_is_reported_although_the_bound_cannot_be_stored() {
        let (root, offline) = empty();
        let (events, queue) = EventSink::new();
        let mut fixture = Fixture::with(root, offline, Deps { events, ..testing::deps() });
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(0);
        assert!(fixture.offline().accepts_absence());
        std::fs::create_dir(testing::settings(fixture.root.path()).directory.join("clock")).unwrap();
        // The report compares the bound with the clock of this machine.
        let wall = Timestamp::now().checked_add(jiff::SignedDuration::from_hours(2)).unwrap();
        let start = fixture.start;
        fixture.writer.check_clock(wall, start);
        fixture.writer.check_clock(Timestamp::now(), start);
        let is_behind = |text: &str| text.contains("the clock of this machine is behind");
        let event = queue.try_iter().find(|event| event.reason == reasons::CLOCK_BEHIND).unwrap();
        assert!(is_behind(&event.message), "{}", event.message);
        assert!(fixture.offline().report().problems.iter().any(|problem| is_behind(problem)));
    }

    #[test]
    fn accepted_pod_is_stored_and_goes_with_its_tokens() {
        let (root, offline) = empty();
        let mut fixture = Fixture::with(root, offline, testing::deps());
        fixture.offline().server_set(vec![pod("a"), pod("b")], true);
        let (a, token) = (key(Kind::Pod, "a"), key(Kind::Token, "a/0"));
        fixture.put(&token, "token");
        fixture.put(&key(Kind::Token, "b/0"), "token");
        fixture.turns(0);
        assert!(fixture.has(&a) && fixture.has(&token) && fixture.has(&key(Kind::Pod, "b")));
        let report = fixture.offline().report();
        assert_eq!((report.objects["pod"], report.objects["token"]), (2, 2));
        assert!(report.bytes > 0 && report.problems.is_empty());
        assert_eq!((report.kind_bytes.values().sum::<u64>(), report.damaged_files), (report.bytes, 0));
        fixture.offline().server_set(vec![pod("b")], false);
        fixture.turns(1);
        assert!(!fixture.has(&a) && !fixture.has(&token));
        assert!(fixture.has(&key(Kind::Pod, "b")) && fixture.has(&key(Kind::Token, "b/0")));
    }

    /// Some file systems write a removal half a minute later.
    #[test]
    fn removal_of_a_pod_is_permanent_at_once_and_costs_one_sync() {
        let (root, offline) = empty();
        let mut fixture = Fixture::with(root, offline, testing::deps());
        let mut mirror = pod("m").into_object();
        mirror.metadata.annotations =
            Some([("kubernetes.io/config.mirror".to_owned(), "x".to_owned())].into());
        let mirror = Pod::from(mirror);
        fixture.offline().server_set(vec![pod("a"), pod("b"), mirror.clone()], true);
        fixture.put(&key(Kind::Token, "a/0"), "token");
        fixture.turns(0);
        let before = disk_writes::thread_syncs();
        fixture.offline().server_set(vec![pod("b"), mirror], false);
        fixture.turns(1);
        assert!(!fixture.has(&key(Kind::Pod, "a")) && !fixture.has(&key(Kind::Token, "a/0")));
        assert_eq!(disk_writes::thread_syncs() - before, 1);
        fixture.offline().server_set(vec![pod("b")], false);
        fixture.turns(2);
        assert_eq!(disk_writes::thread_syncs() - before, 1, "mirrors are not stored");
    }

    #[test]
    fn node_object_is_stored_after_the_pods_and_with_the_uid_of_the_accepted_set_only() {
        let (root, offline) = empty();
        let shown = Arc::new(Mutex::new(Some(node("u", "1"))));
        let shared = Arc::clone(&shown);
        let deps = Deps { node: Box::new(move || shared.locked().clone()), ..testing::deps() };
        let mut fixture = Fixture::with(root, offline, deps);
        fixture.turns(0);
        fixture.offline().server_set(vec![pod("a"), pod("b")], true);
        let now = fixture.start;
        fixture.writer.turn(now);
        fixture.writer.turn(now);
        let key = Key::node();
        assert!(!fixture.has(&key), "a start alone would stop the pods that are not stored yet");
        fixture.turns(0);
        let label = |fixture: &Fixture| {
            let stored: Node = fixture.offline().read_json(&key).unwrap();
            (stored.metadata.uid.unwrap(), stored.metadata.labels.unwrap()["a"].clone())
        };
        assert_eq!(label(&fixture), ("u".to_owned(), "1".to_owned()));
        *shown.locked() = Some(node("u", "2"));
        fixture.turns(20);
        assert_eq!(label(&fixture), ("u".to_owned(), "2".to_owned()));
        // The server has lost its data, and the node was registered again before its list of pods arrives.
        *shown.locked() = Some(node("v", "3"));
        fixture.turns(40);
        fixture.offline().server_set(Vec::new(), true);
        fixture.turns(40);
        assert_eq!(label(&fixture), ("u".to_owned(), "2".to_owned()));
        assert_eq!(fixture.offline().phase(), Phase::Held);
        fixture.offline().accept().unwrap();
        fixture.turns(60);
        assert_eq!(label(&fixture), ("v".to_owned(), "3".to_owned()));
    }

    /// With several pods whose annotations change every few seconds, a new version of some pod always waits.
    #[test]
    fn node_object_does_not_wait_for_further_versions_of_stored_pods() {
        let (root, offline) = empty();
        let shown: Arc<Mutex<Option<Arc<Node>>>> = Arc::default();
        let shared = Arc::clone(&shown);
        let deps = Deps { node: Box::new(move || shared.locked().clone()), ..testing::deps() };
        let mut fixture = Fixture::with(root, offline, deps);
        let version = |version: &str| {
            let mut object = pod("a").into_object();
            object.metadata.resource_version = Some(version.to_owned());
            object.metadata.labels = Some(BTreeMap::from([("version".to_owned(), version.to_owned())]));
            Pod::from(object)
        };
        fixture.offline().server_set(vec![version("1")], true);
        fixture.turns(0);
        let key = key(Kind::Pod, "a");
        assert!(fixture.has(&key));
        // Its file was just written, so this version waits.
        fixture.offline().server_set(vec![version("2")], false);
        *shown.locked() = Some(node("u", "1"));
        fixture.turns(1);
        assert!(fixture.writer.queue.has(&key) && fixture.has(&Key::node()));
    }

    #[test]
    fn uid_of_the_cluster_is_stored_with_the_accepted_set_and_holds_that_of_another_one() {
        let shown = Arc::new(Mutex::new(Some("own".to_owned())));
        let deps = |shown: &Arc<Mutex<Option<String>>>, events| {
            let shown = Arc::clone(shown);
            Deps { cluster: Box::new(move || shown.locked().clone()), events, ..testing::deps() }
        };
        let mut fixture = Fixture::new(&["a"], deps(&shown, EventSink::new().0));
        fixture.turns(0);
        let stored = |offline: &Offline| {
            offline.read_json::<stored::Cluster>(&Key::cluster()).map(|cluster| cluster.uid)
        };
        assert_eq!(stored(fixture.offline()), None, "undecided");
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(1);
        assert_eq!(stored(fixture.offline()).as_deref(), Some("own"));
        // The next start is at another cluster, whose services arrive after its list of pods.
        let (events, queue) = EventSink::new();
        let (root, none) = (fixture.root, Arc::new(Mutex::new(None)));
        let offline = testing::offline(root.path(), &["a"]);
        let mut fixture = Fixture::with(root, offline, deps(&none, events));
        fixture.offline().server_set(vec![pod("x")], true);
        fixture.turns(0);
        let held = |fixture: &Fixture| fixture.offline().report().held;
        assert_eq!(held(&fixture), Some(HeldReason::NoNode));
        *none.locked() = Some("other".to_owned());
        fixture.turns(1);
        let report = fixture.offline().report();
        assert_eq!((held(&fixture), report.accepts), (Some(HeldReason::OtherCluster), None));
        fixture.turns(1_000_000);
        assert_eq!(fixture.offline().phase(), Phase::Held);
        assert_eq!(stored(fixture.offline()).as_deref(), Some("own"));
        let condition = fixture.offline().condition().unwrap();
        assert!(condition.2.contains("that of another cluster"), "{condition:?}");
        let messages: Vec<_> = queue.try_iter().map(|event| event.message).collect();
        assert!(messages.len() == 2 && messages[1].contains("is that of another cluster"), "{messages:?}");
        fixture.offline().accept().unwrap();
        fixture.turns(1_000_100);
        assert_eq!(stored(fixture.offline()).as_deref(), Some("other"));
    }

    #[test]
    fn uid_of_a_service_that_was_made_again_is_stored_when_the_node_proves_the_cluster() {
        let shown = Arc::new(Mutex::new("own"));
        let read = Arc::clone(&shown);
        let deps = Deps {
            cluster: Box::new(move || Some((*read.locked()).to_owned())),
            read_node: Box::new(|| NodeFact::Exists("node".to_owned())),
            ..testing::deps()
        };
        let mut fixture = Fixture::new(&["a"], deps);
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(0);
        *shown.locked() = "again";
        let stored = |fixture: &Fixture| {
            fixture.offline().read_json::<stored::Cluster>(&Key::cluster()).map(|cluster| cluster.uid)
        };
        fixture.turns(20);
        assert_eq!(stored(&fixture).as_deref(), Some("own"));
        fixture.turns(80);
        fixture.turns(120);
        assert_eq!(stored(&fixture).as_deref(), Some("again"));
    }

    #[test]
    fn status_is_written_if_it_changed_in_a_part_that_counts() {
        let statuses = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&statuses);
        let read = move |seen: u64| (seen + 1, std::mem::take(&mut *shared.locked()));
        let deps = Deps { statuses: Box::new(read), ..testing::deps() };
        let mut fixture = Fixture::new(&["a"], deps);
        let body = |phase: &str, ready: bool, restarts: i32| {
            status(json!({"phase": phase, "containerStatuses": [{"name": "c", "image": "i", "imageID": "x",
                "ready": ready, "restartCount": restarts, "state": {"running": {}}}]}))
        };
        let change = |fixture: &mut Fixture, uid: &str, status: &Arc<PodStatus>, second: u64| {
            statuses.locked().push((PodUid::from(uid), Arc::clone(status)));
            fixture.writer.read_statuses(fixture.start + Duration::from_secs(second));
            fixture.turns(second);
            fixture.offline().read_json::<PodStatus>(&key(Kind::PodStatus, "a"))
        };
        assert!(change(&mut fixture, "a", &body("Running", false, 0), 0).is_none(), "undecided");
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(0);
        let first = change(&mut fixture, "a", &body("Running", false, 0), 1).unwrap();
        assert!(!first.container_statuses.unwrap()[0].ready);
        let same = change(&mut fixture, "a", &body("Running", true, 0), 30).unwrap();
        assert!(!same.container_statuses.unwrap()[0].ready, "readiness is not stored");
        let restarted = change(&mut fixture, "a", &body("Running", true, 1), 60).unwrap();
        assert_eq!(restarted.container_statuses.unwrap()[0].restart_count, 1);
        let soon = change(&mut fixture, "a", &body("Running", true, 2), 65).unwrap();
        assert_eq!(soon.container_statuses.unwrap()[0].restart_count, 1, "the file was written 5 s ago");
        let mut stopped = PodStatus::clone(&body("Running", true, 2));
        stopped.reason = Some("StoppedOffline".to_owned());
        let stopped = change(&mut fixture, "a", &Arc::new(stopped), 65).unwrap();
        assert_eq!(stopped.reason.as_deref(), Some("StoppedOffline"), "at once");
        let ended = change(&mut fixture, "a", &body("Succeeded", true, 2), 66).unwrap();
        assert_eq!(ended.phase.as_deref(), Some("Succeeded"), "at once");
        change(&mut fixture, "static", &body("Running", true, 0), 90);
        assert!(!fixture.has(&key(Kind::PodStatus, "static")));
    }

    #[test]
    fn pod_that_the_server_shows_as_failed_does_not_run_again() {
        let running = || (PodUid::from("a"), status(json!({"phase": "Running"})));
        let deps = Deps { statuses: Box::new(move |seen| (seen + 1, vec![running()])), ..testing::deps() };
        let mut fixture = Fixture::new(&["a"], deps);
        let mut failed = pod("a").into_object();
        failed.metadata.resource_version = Some("2".to_owned());
        failed.status = Some(PodStatus { phase: Some("Failed".to_owned()), ..PodStatus::default() });
        fixture.offline().server_set(vec![Pod::from(failed)], true);
        fixture.turns(0);
        fixture.writer.read_statuses(fixture.start);
        fixture.turns(60);
        let stored: PodStatus = fixture.offline().read_json(&key(Kind::PodStatus, "a")).unwrap();
        assert_eq!(stored.phase.as_deref(), Some("Failed"));
    }

    /// A controller whose pods this node refuses makes thousands of them, which would take the places of all
    /// other objects.
    #[test]
    fn of_pods_that_have_ended_only_the_newest_are_stored() {
        // Another one at each read.
        let failed = |seen: u64| status(json!({"phase": "Failed", "reason": seen.to_string()}));
        let deps = Deps {
            statuses: Box::new(move |seen| (seen + 1, vec![(PodUid::from("e000"), failed(seen))])),
            ..testing::deps()
        };
        let (root, offline) = empty();
        let mut fixture = Fixture::with(root, offline, deps);
        let ended = |number: usize| {
            let mut object = pod(&format!("e{number:03}")).into_object();
            let created = json!(format!("2026-01-01T00:{:02}:{:02}Z", number / 60, number % 60));
            object.metadata.creation_timestamp = serde_json::from_value(created).unwrap();
            object.status = serde_json::from_value(json!({"phase": "Failed"})).unwrap();
            Pod::from(object)
        };
        let mut pods: Vec<Pod> = (0..MAX_ENDED + 2).map(ended).collect();
        pods.push(pod("a"));
        fixture.offline().server_set(pods.clone(), true);
        let now = fixture.start;
        // It writes one file.
        fixture.writer.turn(now);
        let has = |fixture: &Fixture, kind: Kind, uid: &str| {
            let key = key(kind, uid);
            fixture.writer.queue.body(&key).is_some() || fixture.has(&key)
        };
        let is_stored =
            |fixture: &Fixture, uid: &str| [Kind::Pod, Kind::PodStatus].map(|kind| has(fixture, kind, uid));
        assert_eq!(
            ["e000", "e001", "e002"].map(|uid| is_stored(&fixture, uid)),
            [[false, false], [false, false], [true, true]]
        );
        assert!(has(&fixture, Kind::Pod, "a"), "however old a pod is that runs");
        fixture.writer.read_statuses(now);
        assert_eq!(is_stored(&fixture, "e000"), [false, false]);
        pods.push(ended(MAX_ENDED + 2));
        fixture.offline().server_set(pods, false);
        fixture.writer.turn(now);
        assert!(!has(&fixture, Kind::Pod, "e002") && has(&fixture, Kind::Pod, "e003"));
        assert!(has(&fixture, Kind::Pod, "e258"));
    }

    /// As with a slow DHCP server.
    #[test]
    fn wait_begins_with_the_first_address_of_the_machine() {
        let has_address = Arc::new(AtomicBool::new(false));
        let read = Arc::clone(&has_address);
        let deps = Deps { has_address: Box::new(move || read.load(Ordering::SeqCst)), ..testing::deps() };
        let mut fixture = Fixture::new(&["a"], deps);
        let start = fixture.start;
        fixture.writer.begin_wait(start);
        fixture.turns(45);
        assert_eq!(fixture.offline().phase(), Phase::Undecided);
        let next = fixture.writer.address_due.map(|due| due.duration_since(start).as_secs());
        assert_eq!(next, Some(46), "it is found within a second");
        has_address.store(true, Ordering::SeqCst);
        fixture.turns(60);
        assert_eq!(fixture.writer.address_due, None, "it is found once");
        fixture.turns(89);
        assert_eq!(fixture.offline().phase(), Phase::Undecided);
        fixture.turns(90);
        assert_eq!(fixture.offline().phase(), Phase::Alone);
    }

    #[test]
    fn stored_node_starts_alone_after_the_wait_with_an_event() {
        let (sink, events) = EventSink::new();
        let (entered, phases) = bounded(EVENTS);
        let deps = Deps {
            events: sink,
            entered: Box::new(move |phase| entered.send(phase).unwrap()),
            ..testing::deps()
        };
        let mut fixture = Fixture::new(&["a"], deps);
        fixture.turns(0);
        assert!(phases.is_empty() && fixture.writer.due().is_some());
        fixture.turns(31);
        assert_eq!(fixture.offline().phase(), Phase::Alone);
        // Another cluster, and then the order.
        fixture.offline().server_set(vec![pod("x")], true);
        fixture.turns(32);
        fixture.offline().accept().unwrap();
        fixture.turns(33);
        assert_eq!(phases.try_iter().collect::<Vec<_>>(), [Phase::Alone, Phase::Held, Phase::Online]);
        let events: Vec<_> = events.try_iter().map(|event| (event.kind, event.reason)).collect();
        assert_eq!(
            events,
            [
                (EventType::Warning, "RunningOffline"),
                (EventType::Warning, "ServerPodsHeld"),
                (EventType::Normal, "ServerPodsAccepted"),
            ]
        );
    }

    #[test]
    fn first_list_in_time_raises_no_event() {
        let (sink, events) = EventSink::new();
        let mut fixture = Fixture::new(&["a"], Deps { events: sink, ..testing::deps() });
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(0);
        assert!(fixture.offline().phase() == Phase::Online && events.is_empty());
    }

    #[test]
    fn object_that_another_one_pushed_out_is_a_problem_of_the_report() {
        let mut fixture = Fixture::new(&["a"], testing::deps());
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(0);
        let (large, small) = (key(Kind::ConfigMap, "large/m"), key(Kind::ConfigMap, "small/m"));
        fixture.put(&large, &"x".repeat(1000));
        fixture.turns(1);
        assert!(fixture.has(&large) && fixture.offline().report().problems.is_empty());
        fixture.writer.store.set_full();
        fixture.put(&small, "x");
        fixture.turns(2);
        assert!(fixture.has(&small) && !fixture.has(&large));
        let problems = fixture.offline().report().problems;
        assert!(
            problems.len() == 1 && problems[0].starts_with("configmap large/m: the limit"),
            "{problems:?}"
        );
    }

    #[test]
    fn objects_without_a_pod_are_removed_only_while_the_servers_set_counts() {
        let map = |name: &str| key(Kind::ConfigMap, name);
        let needs = move |pod: &Pod, read: &dyn Fn(&Key) -> Option<Secret<Vec<u8>>>| {
            assert!(read(&key(Kind::Volume, "none")).is_none());
            BTreeSet::from([map(pod.uid().as_str())])
        };
        let mut fixture = Fixture::new(&["a", "b"], Deps { needs: Box::new(needs), ..testing::deps() });
        fixture.turns(31);
        assert_eq!(fixture.offline().phase(), Phase::Alone);
        let services = |name: &str| key(Kind::Services, name);
        for key in [map("a"), map("b"), map("other"), services("n"), services("default"), services("m")] {
            fixture.put(&key, "{}");
        }
        fixture.turns(32);
        assert!(fixture.has(&map("other")));
        fixture.offline().server_set(vec![pod("b")], true);
        fixture.turns(33);
        let left = [map("b"), services("n"), services("default"), key(Kind::Pod, "b"), Key::node()];
        assert_eq!(fixture.files(), left.iter().map(Key::file_name).collect::<BTreeSet<_>>());
    }

    #[test]
    fn object_that_a_waiting_one_names_is_not_collected() {
        let (claim, volume) = (|| key(Kind::Claim, "n/c"), || key(Kind::Volume, "v"));
        let needs = move |_: &Pod, read: &dyn Fn(&Key) -> Option<Secret<Vec<u8>>>| {
            let named = read(&claim()).map(|_| volume());
            named.into_iter().chain([claim()]).collect::<BTreeSet<Key>>()
        };
        let mut fixture = Fixture::new(&["a", "b"], Deps { needs: Box::new(needs), ..testing::deps() });
        fixture.offline().server_set(vec![pod("a"), pod("b")], true);
        fixture.turns(0);
        fixture.put(&claim(), "{}");
        fixture.put(&volume(), "{}");
        fixture.offline().server_set(vec![pod("a")], false);
        fixture.turns(1);
        assert!(fixture.has(&claim()) && fixture.has(&volume()));
    }

    #[test]
    fn object_whose_file_is_damaged_is_stored_again_although_it_is_the_same() {
        let mut fixture = Fixture::new(&["a"], testing::deps());
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(0);
        let map = key(Kind::ConfigMap, "n/a");
        fixture.put(&map, "{}");
        fixture.turns(1);
        for key in [&map, &key(Kind::Pod, "a")] {
            let path = testing::path(fixture.root.path(), key);
            std::fs::write(&path, "damaged").unwrap();
            assert!(fixture.offline().read(key).is_none());
            let _ = std::fs::remove_file(&path);
        }
        fixture.turns(2);
        let report = fixture.offline().report();
        assert_eq!((report.damaged_files, report.kind_bytes.get("configmap")), (2, None));
        fixture.put(&map, "{}");
        fixture.turns(30);
        assert_eq!(fixture.offline().read(&map).unwrap().reveal(), b"{}");
        assert!(fixture.has(&key(Kind::Pod, "a")), "from the set that counts");
    }

    #[test]
    fn object_that_is_gone_from_a_server_without_data_stays() {
        let needs = |_: &Pod, _: &dyn Fn(&Key) -> Option<Secret<Vec<u8>>>| {
            BTreeSet::from([key(Kind::ConfigMap, "n/a")])
        };
        let mut fixture = Fixture::new(&["a"], Deps { needs: Box::new(needs), ..testing::deps() });
        fixture.offline().server_set(vec![pod("a")], true);
        let map = key(Kind::ConfigMap, "n/a");
        fixture.put(&map, "{}");
        fixture.turns(0);
        // Its list of ConfigMaps comes before that of pods.
        fixture.offline().remove(map.clone());
        fixture.turns(1);
        fixture.offline().server_set(Vec::new(), true);
        fixture.turns(200);
        assert!(fixture.offline().phase() == Phase::Held && fixture.has(&map));
        // The data are back, without the ConfigMap.
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(201);
        assert!(fixture.has(&map));
        fixture.turns(400);
        assert!(!fixture.has(&map));
    }

    #[test]
    fn services_are_read_at_once_and_then_each_minute_at_most() {
        let (called, calls) = bounded(EVENTS);
        let reads = AtomicUsize::new(0);
        let services = move |namespaces: &BTreeSet<String>| {
            called.send(namespaces.iter().cloned().collect::<Vec<_>>()).unwrap();
            let read = reads.fetch_add(1, Ordering::Relaxed) + 1;
            vec![(key(Kind::Services, "n"), Secret::new(read.to_string().into_bytes()))]
        };
        let mut fixture = Fixture::new(&["a"], Deps { services: Box::new(services), ..testing::deps() });
        let ring = |fixture: &mut Fixture, second: u64| {
            fixture.writer.services_changed(fixture.start + Duration::from_secs(second));
            fixture.turns(second);
            calls.try_iter().collect::<Vec<_>>()
        };
        assert!(ring(&mut fixture, 0).is_empty(), "undecided");
        fixture.offline().server_set(vec![pod("a")], true);
        assert_eq!(ring(&mut fixture, 1), [["n"]]);
        assert!(fixture.has(&key(Kind::Services, "n")));
        assert!(ring(&mut fixture, 2).is_empty() && ring(&mut fixture, 60).is_empty());
        assert_eq!(ring(&mut fixture, 61), [["n"]]);
        let mut other = pod("b").into_object();
        other.metadata.namespace = Some("m".to_owned());
        let other = Pod::from(other);
        fixture.offline().server_set(vec![pod("a"), other], false);
        assert_eq!(
            ring(&mut fixture, 62),
            [["m", "n"]],
            "pods of another namespace need its services at once"
        );
        let stored = fixture.offline().read(&key(Kind::Services, "n")).unwrap();
        assert_eq!(
            stored.reveal(),
            b"3",
            "they are also written at once, although a file was written before"
        );
    }

    #[test]
    fn failed_write_is_a_problem_until_it_succeeds() {
        let (root, offline) = empty();
        // A file in the place of the directory.
        let directory = testing::settings(root.path()).directory;
        std::fs::write(&directory, "").unwrap();
        let mut fixture = Fixture::with(root, offline, testing::deps());
        fixture.offline().server_set(vec![pod("a")], true);
        fixture.turns(0);
        let problems = fixture.offline().report().problems;
        assert!(problems.iter().any(|problem| problem.starts_with("pod a: ")), "{problems:?}");
        std::fs::remove_file(&directory).unwrap();
        fixture.turns(9);
        assert!(!directory.exists());
        fixture.turns(10);
        assert!(fixture.has(&key(Kind::Pod, "a")));
        let problems = fixture.offline().report().problems;
        assert!(!problems.iter().any(|problem| problem.starts_with("pod a: ")), "{problems:?}");
    }

    #[test]
    fn pod_whose_file_is_gone_is_stored_again_with_the_next_collection() {
        let mut fixture = Fixture::new(&["a", "b"], testing::deps());
        let a = key(Kind::Pod, "a");
        fixture.writer.store.remove(&fixture.writer.offline.shared.files, &a).unwrap();
        // The same versions as stored: nothing changed.
        fixture.offline().server_set(vec![pod("a"), pod("b")], true);
        fixture.turns(0);
        assert!(fixture.has(&a));
    }

    #[test]
    fn stop_writes_what_waits() {
        let statuses = |seen: u64| (seen + 1, vec![(PodUid::from("a"), status(json!({"phase": "Running"})))]);
        let services = |_: &BTreeSet<String>| vec![(key(Kind::Services, "n"), Secret::new(b"{}".to_vec()))];
        let deps = Deps { statuses: Box::new(statuses), services: Box::new(services), ..testing::deps() };
        let mut fixture = Fixture::new(&["a"], deps);
        fixture.offline().server_set(vec![pod("a")], true);
        let map = key(Kind::ConfigMap, "n/a");
        fixture.turns(0);
        fixture.put(&map, "1");
        fixture.turns(1);
        // Paced, and not taken from the inbox.
        fixture.put(&map, "2");
        fixture.turns(2);
        fixture.put(&key(Kind::Secret, "n/s"), "s");
        let now = fixture.start + Duration::from_secs(2);
        // Read less than a minute ago.
        let services = key(Kind::Services, "n");
        std::fs::remove_file(testing::path(fixture.root.path(), &services)).unwrap();
        fixture.writer.services_changed(now);
        fixture.writer.finish(now);
        assert!(fixture.has(&services));
        assert_eq!(fixture.offline().read(&map).unwrap().reveal(), b"2");
        assert!(fixture.has(&key(Kind::Secret, "n/s")) && fixture.has(&key(Kind::PodStatus, "a")));
    }

    /// Each wait of the test ends with a turn that it caused, so more turns than that are turns of an idle
    /// thread.
    #[test]
    fn idle_thread_makes_no_turn_also_without_senders_of_its_bells() {
        const RINGS: usize = 50;
        let root = tempfile::tempdir().unwrap();
        let offline = testing::offline(root.path(), &["a"]);
        let turns = Arc::new(AtomicUsize::new(0));
        let (counted, (sender, made)) = (Arc::clone(&turns), bounded(EVENTS));
        let (bell, node_changes) = bounded(1);
        let object = node("node", "1");
        let read = move || {
            counted.fetch_add(1, Ordering::SeqCst);
            sender.send(()).unwrap();
            Some(Arc::clone(&object))
        };
        let deps = Deps {
            node: Box::new(read),
            node_changes,
            status_changes: bounded(1).1,
            service_changes: bounded(1).1,
            services: Box::new(|_| vec![(key(Kind::Services, "n"), Secret::new(b"{}".to_vec()))]),
            ..testing::deps()
        };
        offline.server_set(vec![pod("a")], true);
        let running = offline.spawn(deps, OnDeath::Unsupervised).unwrap();
        let limit = Duration::from_secs(60);
        let is_stored = || files(root.path()).contains(&key(Kind::Services, "n").file_name());
        while !is_stored() {
            bell.send_timeout((), limit).unwrap();
            made.recv_timeout(limit).unwrap();
        }
        // What the decision, the Node object and the services caused.
        let begin = turns.load(Ordering::SeqCst);
        for _ in 0..RINGS {
            while made.try_recv().is_ok() {}
            bell.send_timeout((), limit).unwrap();
            made.recv_timeout(limit).unwrap();
        }
        drop(running);
        let more = turns.load(Ordering::SeqCst) - begin;
        assert!(more <= RINGS + 10, "{more} turns");
    }

    #[test]
    fn decision_comes_between_two_writes() {
        let (root, offline) = empty();
        let mut fixture = Fixture::with(root, offline, testing::deps());
        fixture.offline().server_set(vec![pod("a"), pod("b"), pod("c")], true);
        let now = fixture.start;
        fixture.writer.turn(now);
        assert_eq!(fixture.files().len(), 1, "one file in a turn");
        fixture.offline().server_set(Vec::new(), true);
        fixture.writer.turn(now);
        assert_eq!(fixture.offline().phase(), Phase::Held);
        assert!(fixture.files().len() < 3);
    }
}
