//! The `sync` thread: waits for an event, lets the pure cores decide, carries their effects out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, never, select_biased};
use jiff::Timestamp;

use super::core::{Core, World, is_running_without_worker};
use super::deferred::{Deferred, NodeState};
use super::departed::Departed;
use super::ephemeral::{self, EphemeralContainers};
use super::event::Event;
use super::evictions;
use super::fence::Fence;
use super::preemptions::PreemptionWaits;
use super::schedule::Schedule;
use super::shutdown::{Orders, SyncEnds};
use super::view::{SourceState, View};
use crate::model::event::EventSink;
use crate::model::ids::{ContainerId, PodUid};
use crate::model::metrics;
use crate::model::pod::{Pod, SourceName};
use crate::model::restart::RuleGates;
use crate::model::verdict::ProbeVerdict;
use crate::node::{self, NodeReader, NodeWatch};
use crate::observe::{ExitedContainers, Observe, ObservedChange};
use crate::offline::Offline;
use crate::pods::admission::{self, NodeView};
use crate::pods::allocation::Allocations;
use crate::pods::assignments::Assignments;
use crate::pods::lifecycle::{Failure, PodKill};
use crate::pods::mirror;
use crate::pods::plan::resize::ResizeRules;
use crate::pods::plan::shutdown;
use crate::pods::workers::{AfterEnd, WorkerEnd, Workers};
use crate::probes::{Kind, Probes};
use crate::sources::SourceSet;
use crate::sources::merge::PodSet;
use crate::status::publish::ApiPodSender;
use crate::status::{StatusCache, gates_differ, is_terminal};
use crate::util::lock::LockExt;
use crate::util::mailbox::Inbox;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// A longer turn is logged, because all other events wait for its end.
const LONG_TURN: Duration = Duration::from_millis(100);
/// How long all workers together may take to stop with the agent.
const STOP_LIMIT: Duration = Duration::from_secs(4);

/// Settings of the room.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The configured sources.
    pub sources: BTreeSet<SourceName>,
    /// The node, for admission.
    pub node: NodeView,
    /// Which restart rules are enabled.
    pub restart_rules: RuleGates,
    /// Which resizes are infeasible on this node.
    pub resize_rules: ResizeRules,
}

/// Handles and channel ends of the room.
pub(crate) struct Deps {
    /// The pod workers.
    pub workers: Workers,
    /// The pods and containers that run.
    pub observe: Observe,
    /// The last status of each pod.
    pub status: StatusCache,
    /// The CPU and memory that pods were granted.
    pub allocations: Allocations,
    /// The CPUs, memory and NUMA nodes of pods.
    pub assignments: Assignments,
    /// Kubernetes events.
    pub events: EventSink,
    /// Where the snapshot of all pods is published.
    pub view: View,
    /// Rung when a pod has ended or a container has died: there is garbage to collect.
    pub clean: Sender<()>,
    /// Complete sets from the sources.
    pub from_sources: Inbox<SourceName, SourceSet>,
    /// Changes in the runtime.
    pub from_observe: Inbox<ObservedChange, ExitedContainers>,
    /// Workers that ended.
    pub from_workers: Inbox<PodUid, WorkerEnd>,
    /// Pods with changed verdicts of probes.
    pub from_probes: Inbox<PodUid, ()>,
    /// The verdicts of probes.
    pub probes: Probes,
    /// Requests for ephemeral containers.
    pub ephemeral: ephemeral::Requests,
    /// Our Node object. `None` without an API server.
    pub node: Option<NodeWatch>,
    /// Reads the Node object again. `None` without an API server.
    pub reader: Option<NodeReader>,
    /// Rung when the runtime's health has changed: it is a condition of the Node object.
    pub health: Option<Sender<()>>,
    /// Receives the pods as the API server shows them. `None` without an API server.
    pub api_pods: Option<ApiPodSender>,
    /// Receives the static pods and their mirrors. `None` without an API server.
    pub mirrors: Option<mirror::ViewSender>,
    /// Pods that refer to an object that has changed.
    pub from_objects: Inbox<PodUid, ()>,
    /// Pods to evict, and the node's pressure conditions.
    pub evictions: evictions::SyncEnds,
    /// Orders during a shutdown of the machine.
    pub shutdown: SyncEnds,
    /// Which pods must not run; `None` without `--offline`.
    pub offline: Option<Offline>,
    /// Set at the end of each turn, for the health check.
    pub turn: Arc<Mutex<Instant>>,
}

/// Starts the thread.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn spawn(settings: Settings, deps: Deps, on_death: OnDeath) -> std::io::Result<Running> {
    threads::spawn("sync", Stack::Large, on_death, move |stop| {
        let core = Core::new(settings.sources.clone())
            .with_restart_rules(settings.restart_rules)
            .with_resize_rules(settings.resize_rules);
        let sources = settings.sources.iter().map(|name| (*name, SourceState::default())).collect();
        Loop {
            ready: core.sources_ready(),
            core,
            settings,
            deps,
            sources,
            first_list: false,
            garbage: false,
            ephemeral: EphemeralContainers::default(),
            deferred: Deferred::default(),
            node_read: None,
            schedule: Schedule::new(Instant::now()),
            departed: Departed::default(),
            preemptions: PreemptionWaits::default(),
            fence: Fence::default(),
        }
        .run(&stop);
    })
}

/// The state of the thread. `effects.rs` and `publish.rs` have more of its methods.
pub(super) struct Loop {
    pub(super) settings: Settings,
    pub(super) deps: Deps,
    pub(super) core: Core,
    pub(super) sources: BTreeMap<SourceName, SourceState>,
    /// Whether all pods of the runtime were listed once.
    pub(super) first_list: bool,
    /// Ring the cleaner at the end of the turn, because it reads the new snapshot.
    pub(super) garbage: bool,
    pub(super) ephemeral: EphemeralContainers,
    deferred: Deferred,
    /// The read of the Node object that is in progress; disconnects at its end.
    node_read: Option<Receiver<()>>,
    schedule: Schedule,
    pub(super) departed: Departed,
    /// Pods that wait for the end of preempted ones.
    pub(super) preemptions: PreemptionWaits,
    /// Pods that are stopped because the API server was away for too long.
    pub(super) fence: Fence,
    /// Every source has delivered a set, and all pods in it have their workers.
    pub(super) ready: bool,
}

impl Loop {
    fn run(mut self, stop: &StopToken) {
        let node_changes = self.deps.node.as_ref().map_or_else(never, NodeWatch::subscribe);
        let releases = self.deps.offline.as_ref().map_or_else(never, Offline::releases);
        self.node_changed();
        self.publish();
        while let Some(event) = self.wait(stop, &node_changes, &releases) {
            let (start, name) = (Instant::now(), event.name());
            self.handle(event, start);
            self.end_turn(start);
            let took = start.elapsed();
            if took > LONG_TURN {
                log::warn!("a turn of the sync loop took {took:?}: {name}");
            }
            *self.deps.turn.locked() = Instant::now();
        }
        self.deps.workers.stop(STOP_LIMIT);
    }

    /// The next event; `None` when the agent stops.
    fn wait(&self, stop: &StopToken, node_changes: &Receiver<()>, releases: &Receiver<()>) -> Option<Event> {
        let now = Instant::now();
        let due = [
            self.deps.workers.next_retry(),
            self.deferred.due(),
            self.departed.due(now),
            self.fence.due(),
            // During a shutdown they do not start.
            self.preemptions.due(now).filter(|_| !self.settings.node.shutting_down),
        ];
        let timer = due.into_iter().flatten().fold(self.schedule.next(), Instant::min);
        let no_read = never();
        let uids = |inbox: &Inbox<PodUid, ()>| inbox.drain().into_keys().collect();
        let _waiting = threads::waiting("pods, runtime, workers");
        Some(select_biased! {
            recv(stop.signal()) -> _ => return None,
            recv(self.deps.from_workers.bell()) -> _ => Event::WorkersEnded(self.deps.from_workers.drain()),
            recv(self.deps.shutdown.orders.bell()) -> _ => {
                Event::Shutdown(self.deps.shutdown.orders.drain().remove(&()).unwrap_or_default())
            }
            recv(self.deps.evictions.orders.bell()) -> _ => Event::Evict(self.deps.evictions.orders.drain()),
            // The end of the turn starts and stops pods.
            recv(releases) -> _ => Event::Timer,
            recv(node_changes) -> _ => Event::NodeChanged,
            recv(self.node_read.as_ref().unwrap_or(&no_read)) -> _ => Event::NodeRead,
            recv(self.deps.from_sources.bell()) -> _ => {
                Event::Sources(self.deps.from_sources.drain().into_iter().collect())
            }
            recv(self.deps.from_observe.bell()) -> _ => Event::Runtime(self.deps.from_observe.drain()),
            recv(self.deps.from_probes.bell()) -> _ => Event::Probes(uids(&self.deps.from_probes)),
            recv(self.deps.from_objects.bell()) -> _ => Event::Objects(uids(&self.deps.from_objects)),
            recv(self.deps.ephemeral.queue) -> request => {
                request.map_or(Event::Timer, |request| Event::Ephemeral(Box::new(request)))
            }
            recv(timers::deadline_channel(Some(timer))) -> _ => Event::Timer,
        })
    }

    fn handle(&mut self, event: Event, now: Instant) {
        match event {
            Event::WorkersEnded(ended) => self.workers_ended(ended),
            Event::Shutdown(orders) => self.shutdown(orders),
            Event::Evict(orders) => self.evict(orders),
            Event::NodeChanged => self.node_changed(),
            Event::NodeRead => {
                self.node_read = None;
                self.deferred.read_ended();
                self.offer_deferred();
            }
            Event::Sources(sets) => self.sources_changed(sets),
            Event::Runtime(changes) => self.runtime_changed(changes),
            Event::Probes(uids) => uids.iter().for_each(|uid| self.verdict_changed(uid)),
            Event::Objects(uids) => {
                for uid in uids {
                    self.deps.workers.resync(&uid);
                }
            }
            Event::Ephemeral(request) => self.add_ephemeral(*request),
            Event::Timer => {
                self.deps.workers.retry(now);
                if self.schedule.are_resizes_due(now) {
                    self.retry_resizes("periodic_retry");
                }
                if self.schedule.take_clean_up(now) {
                    self.clean_up();
                }
            }
        }
    }

    /// Work that any event may have made necessary.
    fn end_turn(&mut self, start: Instant) {
        self.forget_departed();
        self.fence_pods();
        self.start_preempting();
        if self.deferred.due().is_some_and(|due| start >= due) {
            self.offer_deferred();
        }
        if std::mem::take(&mut self.garbage) {
            self.release_resources();
            self.readmit_fitting();
            // If the bell is full, the thread wakes anyway.
            let _ = self.deps.clean.try_send(());
        }
        self.schedule.set_deferred(self.core.has_deferred_resizes(), start);
    }

    /// Pods that have ended or were rejected need no CPUs and devices any more.
    fn release_resources(&mut self) {
        if self.core.sources_ready() && self.deps.assignments.holds_resources() {
            let active = self.decide(|core, world| core.active(world));
            let observe = &self.deps.observe;
            self.deps.assignments.release_inactive(&active, &|uid| observe.still_runs(uid));
        }
    }

    /// Starts pods that wait for room, without the API server.
    fn readmit_fitting(&mut self) {
        // The API server's set may lack them, and all are decided again with it.
        if !self.core.has_postponed() || self.deferred.has_set() {
            return;
        }
        let effects = self.decide(Core::readmit_fitting);
        if !effects.is_empty() {
            // First, because the cleaner removes pods that are rejected in the snapshot.
            self.publish();
            self.carry_out(effects);
        }
    }

    fn workers_ended(&mut self, ended: impl IntoIterator<Item = (PodUid, WorkerEnd)>) {
        let mut evicted = false;
        for (uid, how) in ended {
            let desired = self.core.admitted(&uid).cloned();
            let pod = self.deps.workers.pod(&uid).cloned();
            evicted |= self.was_evicted(&uid);
            if how == WorkerEnd::Finished {
                self.preemptions.ended(&|other| *other == uid);
            }
            match self.deps.workers.ended(&uid, &how, desired.is_some()) {
                AfterEnd::Restart => {
                    if let Some(pod) = desired {
                        metrics::RESTARTED_PODS.inc([if pod.is_static() { "true" } else { "" }]);
                        self.ephemeral.retain(|other| *other != uid);
                        self.deps.status.forget(&uid);
                        // If the shutdown is cancelled, the pod is revived. One that waits for the
                        // pods that it preempts starts after them.
                        if !self.settings.node.shutting_down && !self.preemptions.waits(&uid) {
                            self.deps.workers.update(&pod);
                        }
                    }
                }
                AfterEnd::Removed => match self.core.rejected(&uid) {
                    // The rejected pod's last containers have ended: its status is now final.
                    Some(rejected) => {
                        self.deps.status.finish(rejected, Timestamp::now());
                    }
                    None => self.depart(uid, pod),
                },
                AfterEnd::Retained => {}
            }
            self.garbage = true;
        }
        self.retry_resizes("pod_terminated");
        self.publish();
        if evicted {
            self.deps.evictions.wake.ring();
        }
    }

    /// A pod has ended and is not desired. The last status of a static one is published by its
    /// mirror first.
    fn depart(&mut self, uid: PodUid, pod: Option<Pod>) {
        let pod = pod.filter(|pod| pod.is_static() && self.deps.mirrors.is_some());
        match pod.filter(|_| !self.deps.status.is_published(&uid)) {
            Some(pod) => self.departed.add(uid, pod.full_name(), Instant::now()),
            None => self.deps.status.forget(&uid),
        }
    }

    fn forget_departed(&mut self) {
        let status = &self.deps.status;
        let done = self.departed.take_done(&|uid| status.is_published(uid), Instant::now());
        for uid in &done {
            self.deps.status.forget(uid);
        }
        if !done.is_empty() {
            self.publish_mirrors();
        }
    }

    fn shutdown(&mut self, orders: Orders) {
        if let Some(on) = orders.shutting_down {
            self.settings.node.shutting_down = on;
            if !on {
                self.revive();
            }
        }
        for (uid, grace) in orders.kills {
            // A pod that has just ended by itself keeps its status.
            if !self.deps.workers.knows(&uid) || self.deps.workers.is_finished(&uid) {
                continue;
            }
            let failure =
                Failure { reason: shutdown::REASON, message: shutdown::MESSAGE.to_owned(), disrupts: true };
            self.kill(&uid, PodKill { grace_override: Some(grace), failure: Some(failure) });
        }
        self.publish();
    }

    /// The shutdown was cancelled: static pods that it stopped or rejected start again. Other pods
    /// are replaced by their controllers.
    ///
    /// DIFFERS: the Go kubelet's static pods stay failed until it is restarted, and with them
    /// a control plane that consists of them.
    fn revive(&mut self) {
        let stopped: Vec<PodUid> = self
            .core
            .desired()
            .filter(|(uid, pod, rejected)| pod.is_static() && !rejected && self.was_stopped(uid))
            .map(|(uid, ..)| uid.clone())
            .collect();
        for uid in stopped {
            if self.deps.workers.revive(&uid) {
                self.deps.status.forget(&uid);
            }
        }
        let effects = self.decide(Core::readmit);
        // The snapshot is published before a worker starts: the cleaner removes pods that are
        // rejected or ended in it.
        self.publish();
        self.carry_out(effects);
        // Their limits of local storage count again.
        self.deps.evictions.wake.ring();
        self.clean_up();
    }

    /// Whether the pod was stopped for a shutdown, or is being stopped for one.
    fn was_stopped(&self, uid: &PodUid) -> bool {
        let status = self.deps.status.get(uid);
        let reason = status.as_ref().and_then(|status| status.reason.as_deref());
        let workers = &self.deps.workers;
        shutdown::is_end(reason, workers.kill_of(uid), workers.is_evicted(uid) == Some(true))
    }

    fn node_changed(&mut self) {
        if self.deps.node.is_some() {
            self.offer_deferred();
            self.publish_mirrors();
        }
    }

    fn offer_deferred(&mut self) {
        if let Some(set) = self.deferred.take() {
            self.offer(SourceName::Api, set);
            self.publish();
        }
    }

    fn sources_changed(&mut self, sets: BTreeMap<SourceName, SourceSet>) {
        // Until the runtime has reported its features, they count as supported; the start of a
        // sandbox checks again.
        self.settings.node.strict_supplemental_groups =
            self.deps.observe.runtime_features().is_none_or(|features| features.supplemental_groups_policy);
        for (source, set) in sets {
            self.offer(source, set);
        }
        self.publish();
    }

    /// Applies the part of a set that can be admitted now.
    fn offer(&mut self, source: SourceName, set: SourceSet) {
        if source != SourceName::Api {
            self.update_node();
            return self.apply(source, set);
        }
        let is_ready = self.deps.node.as_ref().is_none_or(NodeWatch::ready_for_pods);
        if is_ready {
            self.update_node();
        }
        let node = NodeState::for_set(&set, is_ready, self.deps.reader.is_some());
        let is_seen = self.sources.get(&source).is_some_and(|state| state.seen);
        let is_first = !is_seen || self.core.follows_stored_set(set.is_stored);
        let (core, view) = (&self.core, &self.settings.node);
        let is_misplaced = |pod: &Pod| {
            let is_decided = core.is_desired(pod.uid()) && !core.is_postponed(pod.uid());
            let known = is_decided || pod.is_mirror() || pod.is_over();
            !known && admission::is_misplaced(pod, view)
        };
        let decision = self.deferred.offer(set, node, is_first, &is_misplaced, Instant::now());
        if decision.timed_out > 0 {
            log::warn!(
                "cannot read the Node object in time; {} pods are admitted by its last known labels",
                decision.timed_out
            );
        }
        if let Some(reader) = self.deps.reader.as_ref().filter(|_| decision.read_node) {
            self.node_read = Some(reader.read());
        }
        if let Some(set) = decision.admit {
            self.apply(source, set);
        }
    }

    /// Takes the newest Node object for admission, even if its event has not arrived yet: the pod
    /// may be here because of a new label.
    fn update_node(&mut self) {
        if let Some(object) = self.deps.node.as_ref().and_then(NodeWatch::object) {
            self.settings.node = node::view_of(&object, &self.settings.node);
            // The device manager knows better, and devices may still wait for their plugin.
            let extended = &mut self.settings.node.allocatable.extended;
            extended.retain(|name, _| !self.deps.assignments.has_devices(name));
        }
    }

    fn apply(&mut self, source: SourceName, set: SourceSet) {
        let state = self.sources.entry(source).or_default();
        state.problems = set.problems;
        // A source that could not be read yet does not have an empty set.
        let Some(pods) = set.pods else { return };
        state.seen = true;
        state.pods = pods.len();
        // Before pods are admitted: in its stored status, a pod that comes back has ended.
        // DIFFERS: upstream continues that status, and does not start a pod again that has ended for good.
        for uid in self.departed.take_returned(&|uid| pods.iter().any(|pod| pod.uid() == uid)) {
            self.deps.status.forget(&uid);
        }
        let before = self.core.sources_ready();
        let set = PodSet { pods, incarnations: set.incarnations, is_stored: set.is_stored };
        let effects = self.decide(|core, world| core.apply_set(source, set, Timestamp::now(), world));
        // This precedes the start of workers: the cleaner removes pods that the snapshot lacks.
        self.publish();
        self.carry_out(effects);
        self.ready = self.core.sources_ready();
        if !before {
            if self.core.sources_ready() {
                log::info!("all sources have delivered their pods");
                // The CPUs and devices of pods that were removed while no agent ran, and what waits for room.
                self.garbage |= self.deps.assignments.holds_resources() || self.core.has_postponed();
            }
            self.clean_up();
        }
    }

    fn runtime_changed(&mut self, changes: impl IntoIterator<Item = (ObservedChange, ExitedContainers)>) {
        let mut unknown = false;
        for (change, exited) in changes {
            match change {
                ObservedChange::Pod(uid) => {
                    if !exited.died.is_empty() {
                        self.garbage = true;
                    }
                    unknown |= !self.deps.workers.resync(&uid) && !self.deps.workers.knows(&uid);
                }
                ObservedChange::Health => {
                    if let Some(health) = &self.deps.health {
                        // If the bell is full, the thread wakes anyway.
                        let _ = health.try_send(());
                    }
                    self.deps.workers.resync_all();
                }
                ObservedChange::FirstList => {
                    self.first_list = true;
                    unknown = true;
                    // Until now every pod counted as running, so nothing was released or made room.
                    self.garbage |= self.deps.assignments.holds_resources() || self.core.has_postponed();
                    let effects = self.decide(Core::readmit_running);
                    if !effects.is_empty() {
                        self.publish();
                        self.carry_out(effects);
                    }
                }
            }
        }
        if unknown {
            self.clean_up();
            if self.settings.node.shutting_down {
                self.publish();
            }
        }
    }

    /// Updates the pod's readiness at once, even while its worker waits for a pull or for the end
    /// of a container.
    fn verdict_changed(&mut self, uid: &PodUid) {
        if let (Some(pod), Some(status)) = (self.deps.workers.pod(uid), self.deps.status.get(uid)) {
            let lists = [&status.init_container_statuses, &status.container_statuses];
            for container in lists.into_iter().flatten().flatten() {
                let Some(full) = container.container_id.as_deref() else { continue };
                let id = ContainerId::from(full.split_once("://").map_or(full, |(_, id)| id));
                let now = Timestamp::now();
                match self.deps.probes.verdict(Kind::Readiness, &id) {
                    ProbeVerdict::Success => self.deps.status.set_ready(pod, full, true, now),
                    ProbeVerdict::Failure => self.deps.status.set_ready(pod, full, false, now),
                    ProbeVerdict::NoProbe | ProbeVerdict::Pending | ProbeVerdict::Assumed => continue,
                };
            }
        }
        self.deps.workers.resync(uid);
    }

    fn add_ephemeral(&mut self, request: ephemeral::Request) {
        if !request.claim() {
            return;
        }
        let uid = &request.pod;
        let has_worker = self.deps.workers.knows(uid) && !self.deps.workers.is_finished(uid);
        let response = match self.core.admitted(uid) {
            Some(pod) if has_worker => self.ephemeral.add(pod, request.container).map(|pod| {
                self.deps.workers.update(&pod);
                self.publish();
            }),
            _ => Err(ephemeral::RequestError::NotRunning),
        };
        // After a very long turn the requester waits no more.
        let _ = request.response.send(response);
    }

    /// Pods may have freed resources for those that wait for a resize.
    fn retry_resizes(&mut self, trigger: &'static str) {
        if !self.core.has_deferred_resizes() {
            return;
        }
        let effects = self.decide(|core, world| core.retry_resizes(trigger, world));
        self.schedule.resizes_retried();
        self.carry_out(effects);
    }

    /// Compares the desired pods with a fresh list: in an old one, a pod that was started since
    /// would look unknown.
    fn clean_up(&mut self) {
        if !self.first_list {
            return;
        }
        let listed = self.deps.observe.listed();
        let effects = self.decide(|core, world| core.clean_up(&listed, world));
        if !effects.is_empty() {
            self.carry_out(effects);
            self.publish();
        }
    }

    /// Whether a container runs without a worker. While the machine shuts down, it may belong to a
    /// pod that a source has not delivered yet.
    pub(super) fn is_running_without_worker(&mut self) -> bool {
        let listed = self.deps.observe.listed();
        !self.first_list || self.decide(|_, world| is_running_without_worker(&listed, world))
    }

    /// Calls the core with the state of the rest of the world.
    fn decide<T>(&mut self, decide: impl FnOnce(&mut Core, &World<'_>) -> T) -> T {
        // A resize may be decided long after a source has delivered anything.
        self.settings.node.pressures = (self.deps.evictions.pressures)();
        let Deps { workers, status, observe, allocations, assignments, .. } = &self.deps;
        let first_list = self.first_list;
        // A new version of a static pod starts after the old one has ended, and takes its CPUs.
        let is_other = |uid: &PodUid, pod: &Pod| {
            workers.pod(uid).is_none_or(|other| other.full_name() != pod.full_name())
        };
        let world = World {
            has_worker: &|uid| workers.knows(uid),
            is_listed: first_list,
            still_runs: &|uid| observe.still_runs(uid),
            is_over: &|uid| {
                let is_over = || status.get(uid).is_some_and(|status| is_terminal(status.phase.as_deref()));
                !workers.starts_again(uid) && is_over()
            },
            // Before the first list, every pod counts as running.
            may_run: &|uid| first_list && workers.may_run(uid) && observe.still_runs(uid),
            ends_for_good: &|uid| workers.ends_for_good(uid),
            uses_claims: &|uid| assignments.uses_claims(uid),
            is_final: &|uid| status.entry(uid).is_some_and(|entry| entry.finished),
            gates_differ: &|pod| status.get(pod.uid()).is_none_or(|stored| gates_differ(pod, &stored)),
            granted: &|pod| allocations.granted(pod),
            // Before the first list, every pod counts as running.
            allocate: &|pod, active, ready| {
                let ends = |uid: &PodUid| first_list && observe.still_runs(uid) && is_other(uid, pod);
                assignments.allocate(pod, active, ready, &ends)
            },
            node: &self.settings.node,
        };
        decide(&mut self.core, &world)
    }
}
