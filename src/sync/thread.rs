//! The `sync` thread: waits in one place, lets the core decide, carries the effects out.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, never, select_biased};
use jiff::Timestamp;

use super::core::{Core, Effect, World, has_strangers};
use super::ephemeral::{Granted, Wish, Wishes};
use super::misplaced::Misplaced;
use super::shutdown::Link;
use super::view::{Entry, Snapshot, SourceState, View};
use crate::model::event::EventSink;
use crate::model::ids::{ContainerId, FullName, PodUid};
use crate::model::metrics;
use crate::model::pod::{CONFIG_MIRROR, Pod, SourceName};
use crate::model::reasons;
use crate::model::restart::RuleGates;
use crate::model::verdict::Verdict;
use crate::node::{self, NodeReader, NodeWatch};
use crate::observe::{Change, Observe, Subject};
use crate::pods::admission::{self, NodeView};
use crate::pods::allocation::{Allocations, Pending, summary};
use crate::pods::lifecycle::{Failure, Kill};
use crate::pods::mirror;
use crate::pods::plan::resize::Rules;
use crate::pods::plan::shutdown;
use crate::pods::workers::{Aftermath, Ended, Workers};
use crate::probes::{Kind, Probes};
use crate::sources::merge::PodSet;
use crate::sources::{SourceSet, unsupported_fields};
use crate::status::publish::{ApiPod, ApiPods};
use crate::status::{StatusCache, gates_differ};
use crate::util::mailbox::Inbox;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::timers;

/// Upper bound between two comparisons of the desired with the running pods, should an
/// event have been missed.
const CLEAN_UP_PERIOD: Duration = Duration::from_secs(10);
/// Pods that wait for more resources are asked again after this at the latest.
const RESIZE_PERIOD: Duration = Duration::from_secs(180);
/// How soon it is looked again whether the end of a static pod was told.
const DEPARTED_PERIOD: Duration = Duration::from_millis(50);
/// After that the mirror goes all the same: the API server may be away.
const DEPARTED_LIMIT: Duration = Duration::from_secs(2);
/// A longer turn is logged: everything else waits meanwhile.
const LONG_TURN: Duration = Duration::from_millis(100);
/// How long all workers together may take to stop with the agent.
const STOP_LIMIT: Duration = Duration::from_secs(4);

/// What the room needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The sources that are configured.
    pub sources: BTreeSet<SourceName>,
    /// The node, for admission.
    pub node: NodeView,
    /// Which restart rules count.
    pub restart_rules: RuleGates,
    /// Which resizes are ruled out.
    pub resize_rules: Rules,
}

/// What the room works with.
pub struct Deps {
    /// The workers.
    pub workers: Workers,
    /// Sees what runs.
    pub observe: Observe,
    /// Keeps statuses.
    pub status: StatusCache,
    /// Keeps what pods were granted.
    pub allocations: Allocations,
    /// Tells users.
    pub events: EventSink,
    /// Where the snapshot goes.
    pub view: View,
    /// Rung when a pod has ended or a container has died: the cleaner has work.
    pub clean: Sender<()>,
    /// Complete sets from the sources.
    pub from_sources: Inbox<SourceName, SourceSet>,
    /// Pods to look at again.
    pub from_observe: Inbox<Subject, Change>,
    /// Workers that ended.
    pub from_workers: Inbox<PodUid, Ended>,
    /// Pods of which a probe has changed its mind.
    pub from_probes: Inbox<PodUid, ()>,
    /// Knows what probes say.
    pub probes: Probes,
    /// Ephemeral containers that somebody wants.
    pub wishes: Wishes,
    /// Our Node object. `None` without an API server.
    pub node: Option<NodeWatch>,
    /// Reads it anew. `None` without an API server.
    pub reader: Option<NodeReader>,
    /// Rung when the runtime's health has changed: the Node object tells of it.
    pub health: Option<Sender<()>>,
    /// Is told how the API server shows the pods. `None` without one.
    pub api_pods: Option<ApiPods>,
    /// Is told which static pods there are, and which mirrors. `None` without an API server.
    pub mirrors: Option<mirror::Views>,
    /// Pods of which an object has changed that they name.
    pub from_objects: Inbox<PodUid, ()>,
    /// What a shutdown of the machine asks for.
    pub shutdown: Link,
    /// Told after each turn, for the health check.
    pub turn: Arc<std::sync::Mutex<Instant>>,
}

/// Starts the thread.
///
/// # Errors
/// When the thread cannot be started.
pub fn spawn(settings: Settings, deps: Deps, on_death: OnDeath) -> std::io::Result<Running> {
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
            ephemeral: Granted::default(),
            held: None,
            misplaced: Misplaced::default(),
            look: None,
            resize_due: None,
            departed: Vec::new(),
        }
        .run(&stop);
    })
}

struct Loop {
    settings: Settings,
    deps: Deps,
    core: Core,
    sources: BTreeMap<SourceName, SourceState>,
    first_list: bool,
    /// The cleaner is to be rung at the end of the turn: it reads the snapshot, which has
    /// to be the new one by then.
    garbage: bool,
    ephemeral: Granted,
    /// The newest set of the API server, while all of it waits for the first look at our Node
    /// object (admission goes by its labels and taints), or some of it for a newer one.
    held: Option<SourceSet>,
    misplaced: Misplaced,
    /// The look under way; ends when it is over.
    look: Option<Receiver<()>>,
    /// When those that wait for resources are asked again.
    resize_due: Option<Instant>,
    /// Static pods that have ended and are not wanted, until their mirrors tell so.
    departed: Vec<Departed>,
    /// Every source has spoken, and what came of that is done: pods have their workers.
    ready: bool,
}

impl Loop {
    fn run(mut self, stop: &StopToken) {
        let mut clean_up_due = Instant::now() + CLEAN_UP_PERIOD;
        let node_changed = self.deps.node.as_ref().map_or_else(never, NodeWatch::subscribe);
        let nothing = never();
        self.node_changed();
        self.publish();
        loop {
            let mut timer = clean_up_due;
            let due = [self.deps.workers.next_retry(), self.resize_due, self.misplaced.due()];
            for other in due.into_iter().flatten() {
                timer = timer.min(other);
            }
            if !self.departed.is_empty() {
                timer = timer.min(Instant::now() + DEPARTED_PERIOD);
            }
            let mut wish = None;
            let what = {
                let _waiting = threads::waiting("pods, runtime, workers");
                select_biased! {
                    recv(stop.signal()) -> _ => break,
                    recv(self.deps.from_workers.bell()) -> _ => "worker ended",
                    recv(self.deps.shutdown.orders.bell()) -> _ => "shutdown",
                    recv(node_changed) -> _ => "node",
                    recv(self.look.as_ref().unwrap_or(&nothing)) -> _ => "look",
                    recv(self.deps.from_sources.bell()) -> _ => "source",
                    recv(self.deps.from_observe.bell()) -> _ => "runtime change",
                    recv(self.deps.from_probes.bell()) -> _ => "probe",
                    recv(self.deps.from_objects.bell()) -> _ => "object",
                    recv(self.deps.wishes.queue) -> asked => {
                        wish = asked.ok();
                        "wish"
                    }
                    recv(timers::at(Some(timer))) -> _ => "timer",
                }
            };
            let start = Instant::now();
            match what {
                "worker ended" => self.workers_ended(),
                "shutdown" => self.shutdown_ordered(),
                "node" => self.node_changed(),
                "look" => {
                    self.look = None;
                    self.misplaced.end_look();
                    self.look_at_held();
                }
                "source" => self.sources_spoke(),
                "runtime change" => self.runtime_changed(),
                "probe" => self.probes_spoke(),
                "object" => {
                    for (uid, ()) in self.deps.from_objects.take() {
                        self.deps.workers.look_again(&uid);
                    }
                }
                "wish" => wish.into_iter().for_each(|wish| self.wished(wish)),
                _ => {
                    self.deps.workers.retry(start);
                    if self.resize_due.is_some_and(|due| start >= due) {
                        self.retry_resizes("periodic_retry");
                    }
                    if start >= clean_up_due {
                        clean_up_due = start + CLEAN_UP_PERIOD;
                        self.clean_up();
                    }
                }
            }
            self.forget_departed();
            if self.misplaced.due().is_some_and(|due| start >= due) {
                self.look_at_held();
            }
            if std::mem::take(&mut self.garbage) {
                self.ring_cleaner();
            }
            let waiting = self.core.is_anyone_waiting();
            self.resize_due = waiting.then(|| self.resize_due.unwrap_or_else(|| start + RESIZE_PERIOD));
            let took = start.elapsed();
            if took > LONG_TURN {
                log::warn!("a turn of the sync loop took {took:?}: {what}");
            }
            *self.deps.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Instant::now();
        }
        self.deps.workers.stop(STOP_LIMIT);
    }

    fn sources_spoke(&mut self) {
        // Until the runtime has answered it counts as able; the sandbox asks it again.
        self.settings.node.strict_supplemental_groups =
            self.deps.observe.runtime_features().is_none_or(|features| features.supplemental_groups_policy);
        // Static pods first: what is left is for the others.
        for (source, set) in self.deps.from_sources.take().into_iter().collect::<BTreeMap<_, _>>() {
            self.source_spoke(source, set);
        }
        self.publish();
    }

    /// The machine is about to shut down, or no longer is.
    fn shutdown_ordered(&mut self) {
        for (_, orders) in self.deps.shutdown.orders.take() {
            if let Some(on) = orders.shutting_down {
                self.settings.node.shutting_down = on;
                if !on {
                    self.revive();
                }
            }
            for (uid, grace) in orders.kills {
                // One that has just ended by itself keeps its status.
                if !self.deps.workers.knows(&uid) || self.deps.workers.is_finished(&uid) {
                    continue;
                }
                let failure = Failure { reason: shutdown::REASON, message: shutdown::MESSAGE.to_owned() };
                self.kill(&uid, Kill { grace_override: Some(grace), failure: Some(failure) });
            }
        }
        self.publish();
    }

    /// The machine goes on: what nobody else would start again is.
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
        let effects = self.ask(Core::readmit);
        // Before any worker starts: the cleaner takes what the snapshot calls refused or over
        // for garbage.
        self.publish();
        self.carry_out(effects);
        self.clean_up();
    }

    /// Whether a shutdown is, or was, its end.
    fn was_stopped(&self, uid: &PodUid) -> bool {
        let status = self.deps.status.get(uid);
        let told = status.as_ref().and_then(|status| status.reason.as_deref());
        shutdown::is_end(told, self.deps.workers.kill_of(uid))
    }

    /// Our Node object is another one, or was looked at for the first time.
    fn node_changed(&mut self) {
        if self.deps.node.is_some() {
            self.look_at_held();
            self.tell_mirrors();
        }
    }

    /// Looks again whom of the API server's pods nothing keeps waiting any more.
    fn look_at_held(&mut self) {
        if let Some(set) = self.held.take() {
            self.source_spoke(SourceName::Api, set);
            self.publish();
        }
    }

    fn source_spoke(&mut self, source: SourceName, set: SourceSet) {
        if source == SourceName::Api && self.deps.node.as_ref().is_some_and(|node| !node.ready_for_pods()) {
            self.held = Some(set);
            return;
        }
        // The newest there is, though its bell may not have been heard yet: a label may have
        // brought the pod here.
        if let Some(object) = self.deps.node.as_ref().and_then(NodeWatch::object) {
            self.settings.node = node::view_of(&object, &self.settings.node);
        }
        let judged = if source == SourceName::Api { self.without_waiting(set) } else { Some(set) };
        if let Some(set) = judged {
            self.take_in(source, set);
        }
    }

    /// What of the API server's set can be judged now. The rest waits for a newer look at the
    /// node, and so does all of the first set: who is not in that is stopped.
    fn without_waiting(&mut self, mut set: SourceSet) -> Option<SourceSet> {
        self.held = None;
        let Some(reader) = &self.deps.reader else { return Some(set) };
        let is_misplaced = |pod: &&Pod| {
            let known = self.core.wants(pod.uid()) || pod.is_mirror() || pod.is_over();
            !known && admission::is_misplaced(pod, &self.settings.node)
        };
        let misplaced = set.pods.iter().flatten().filter(is_misplaced).map(|pod| pod.uid().clone());
        let late = self.misplaced.set(misplaced.collect(), Instant::now());
        if late > 0 {
            log::warn!("the node's labels as last seen count for {late} pods: it cannot be read in time");
        }
        // One at a time: its end brings us here again.
        if self.look.is_none() && self.misplaced.begin_look() {
            self.look = Some(reader.read());
        }
        if self.misplaced.due().is_some() {
            self.held = Some(set.clone());
            if !self.sources.get(&SourceName::Api).is_some_and(|state| state.seen) {
                return None;
            }
            set.pods.iter_mut().for_each(|pods| pods.retain(|pod| !self.misplaced.waits(pod.uid())));
        }
        Some(set)
    }

    fn take_in(&mut self, source: SourceName, set: SourceSet) {
        let state = self.sources.entry(source).or_default();
        state.problems = set.problems;
        // Nothing could be read yet: that is not the same as an empty set.
        let Some(pods) = set.pods else { return };
        state.seen = true;
        state.pods = pods.len();
        let before = self.core.sources_ready();
        let set = PodSet { pods, incarnations: set.incarnations };
        let effects = self.ask(|core, world| core.source_spoke(source, set, Timestamp::now(), world));
        // Before any worker starts: the cleaner removes what the snapshot does not know.
        self.publish();
        self.carry_out(effects);
        self.ready = self.core.sources_ready();
        if !before {
            if self.core.sources_ready() {
                log::info!("all sources have spoken");
            }
            self.clean_up();
        }
    }

    fn runtime_changed(&mut self) {
        let mut unknown = false;
        for (subject, change) in self.deps.from_observe.take() {
            match subject {
                Subject::Pod(uid) => {
                    if !change.died.is_empty() {
                        self.garbage = true;
                    }
                    unknown |= !self.deps.workers.look_again(&uid) && !self.deps.workers.knows(&uid);
                }
                Subject::Health => {
                    if let Some(health) = &self.deps.health {
                        // A full bell already rings.
                        let _ = health.try_send(());
                    }
                    self.deps.workers.look_again_all();
                }
                Subject::FirstList => {
                    self.first_list = true;
                    unknown = true;
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

    /// Somebody wants an ephemeral container.
    fn wished(&mut self, wish: Wish) {
        let uid = &wish.pod;
        let at_work = self.deps.workers.knows(uid) && !self.deps.workers.is_finished(uid);
        let answer = match self.core.admitted(uid) {
            Some(pod) if at_work => self.ephemeral.grant(pod, wish.container).map(|pod| {
                self.deps.workers.update(&pod);
                self.publish();
            }),
            _ => Err("the pod does not run".to_owned()),
        };
        // Whoever asked may have given up.
        let _ = wish.answer.send(answer);
    }

    /// Readiness shows at once, also while the pod's worker waits for a pull or an end.
    fn probes_spoke(&mut self) {
        for (uid, ()) in self.deps.from_probes.take() {
            if let (Some(pod), Some(status)) = (self.deps.workers.pod(&uid), self.deps.status.get(&uid)) {
                let lists = [&status.init_container_statuses, &status.container_statuses];
                for container in lists.into_iter().flatten().flatten() {
                    let Some(full) = container.container_id.as_deref() else { continue };
                    let id = ContainerId::from(full.split_once("://").map_or(full, |(_, id)| id));
                    let now = Timestamp::now();
                    match self.deps.probes.verdict(Kind::Readiness, &id) {
                        Verdict::Success => self.deps.status.set_ready(pod, full, true, now),
                        Verdict::Failure => self.deps.status.set_ready(pod, full, false, now),
                        Verdict::NoProbe | Verdict::Pending | Verdict::Kept => continue,
                    };
                }
            }
            self.deps.workers.look_again(&uid);
        }
    }

    fn workers_ended(&mut self) {
        for (uid, how) in self.deps.from_workers.take() {
            let wanted = self.core.admitted(&uid).cloned();
            let pod = self.deps.workers.pod(&uid).cloned();
            match self.deps.workers.ended(&uid, &how, wanted.is_some()) {
                Aftermath::StartAnew => {
                    if let Some(pod) = wanted {
                        metrics::RESTARTED_PODS.inc([if pod.is_static() { "true" } else { "" }]);
                        self.ephemeral.retain(|other| *other != uid);
                        self.deps.status.forget(&uid);
                        // Should the machine go on, the pod does, too.
                        if !self.settings.node.shutting_down {
                            self.deps.workers.update(&pod);
                        }
                    }
                }
                Aftermath::Gone => match self.core.refused(&uid) {
                    // What was left of a refused pod has ended: now its own end can be told.
                    Some(refused) => {
                        self.deps.status.finish(refused, Timestamp::now());
                    }
                    None => self.depart(uid, pod),
                },
                Aftermath::Stays => {}
            }
            self.garbage = true;
        }
        self.retry_resizes("pod_terminated");
        self.publish();
    }

    /// Something may have made room for those that want more.
    fn retry_resizes(&mut self, trigger: &'static str) {
        if !self.core.is_anyone_waiting() {
            return;
        }
        let effects = self.ask(|core, world| core.retry_resizes(trigger, world));
        self.resize_due = None;
        self.carry_out(effects);
    }

    /// Only with a fresh list: a pod that was started since would look unknown in an old one.
    fn clean_up(&mut self) {
        if !self.first_list {
            return;
        }
        let listed = self.deps.observe.listed();
        let effects = self.ask(|core, world| core.clean_up(&listed, world));
        if !effects.is_empty() {
            self.carry_out(effects);
            self.publish();
        }
    }

    /// Lets the core decide about something, or say something.
    fn ask<T>(&mut self, decide: impl FnOnce(&mut Core, &World<'_>) -> T) -> T {
        let Deps { workers, status, observe, allocations, .. } = &self.deps;
        let world = World {
            has_worker: &|uid| workers.knows(uid),
            still_runs: &|uid| observe.still_runs(uid),
            is_over: &|uid| is_over(status, uid),
            is_closed: &|uid| status.entry(uid).is_some_and(|entry| entry.finished),
            gates_differ: &|pod| status.get(pod.uid()).is_none_or(|stored| gates_differ(pod, &stored)),
            granted: &|pod| allocations.granted(pod),
            node: &self.settings.node,
        };
        decide(&mut self.core, &world)
    }

    fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Update(pod) => {
                    if !self.deps.workers.knows(pod.uid()) {
                        self.warn_of_unsupported(&pod);
                        self.deps.allocations.restore(&pod);
                        if self.core.has_what_it_wants(pod.uid()) {
                            self.deps.allocations.settle(pod.uid());
                        }
                    }
                    self.feed(&pod);
                }
                Effect::Resize { pod, trigger } => self.resize(&pod, trigger),
                Effect::ResizePending { pod, reason, message, detail } => {
                    self.resize_pending(&pod, reason, &message, detail);
                }
                Effect::ResizeReverted(pod) => {
                    if self.deps.allocations.settle(pod.uid()).is_some() {
                        self.deps.workers.look_again(pod.uid());
                    }
                }
                Effect::Reject { pod, reason, message } => self.reject(&pod, &reason, &message),
                Effect::Kill(uid, kill) => self.kill(&uid, kill),
                Effect::Preempt { victim, resource } => self.preempt(&victim, resource),
                Effect::StopUnknown(pod) => self.deps.workers.stop_unknown(&pod),
                Effect::Forget(uid) => {
                    self.deps.status.forget(&uid);
                    self.garbage = true;
                }
                Effect::Shown(pod) => self.shown(pod, false),
                Effect::NotShown(pod) => self.shown(pod, true),
                Effect::Finish(pod) => {
                    if self.deps.status.entry(pod.uid()).is_some_and(|entry| !entry.finished) {
                        self.deps.status.finish(&pod, Timestamp::now());
                    }
                }
                Effect::LeftOut { pod, message } => {
                    self.deps.events.warning(&pod, reasons::FAILED_VALIDATION, message);
                }
            }
        }
    }

    /// Creates the pod's worker or hands it the new version. `pod` has what it was granted.
    fn feed(&mut self, pod: &Pod) {
        self.deps.allocations.grant(pod);
        self.deps.workers.update(&self.ephemeral.complete(pod));
    }

    /// The pod gets what it wants; its worker sees to the rest.
    fn resize(&mut self, pod: &Pod, trigger: &'static str) {
        let allocations = &self.deps.allocations;
        if allocations.settle(pod.uid()) == Some(Pending::Deferred) {
            metrics::DEFERRED_RESIZES_ACCEPTED.inc([trigger]);
        }
        allocations.begin(pod);
        let generation = pod.object().metadata.generation.unwrap_or(0);
        self.deps.events.normal(pod, reasons::RESIZE_STARTED, summary("started", pod, generation, ""));
        log::info!("resize is granted: {trigger} pod={} uid={}", pod.full_name(), pod.uid());
        self.feed(pod);
    }

    /// The pod keeps what it has.
    fn resize_pending(&mut self, pod: &Pod, reason: Pending, message: &str, detail: Cow<'static, str>) {
        let head = match reason {
            // Upstream's event names the refusal, its condition does not.
            Pending::Deferred => detail,
            Pending::Infeasible => {
                metrics::INFEASIBLE_RESIZES.inc([detail]);
                reason.as_str().into()
            }
        };
        if !self.deps.allocations.pend(pod, reason, message) {
            return;
        }
        let generation = pod.object().metadata.generation.unwrap_or(0);
        let text = summary(&head, pod, generation, message);
        self.deps.events.warning(pod, reason.event(), text);
        self.deps.workers.look_again(pod.uid());
    }

    /// The API server shows a pod, or shows it no more.
    fn shown(&self, pod: Pod, removed: bool) {
        // Whoever may make pods may write any mark: a mirror has the name of its static pod.
        let forged = pod.annotation(CONFIG_MIRROR).and_then(|uid| self.core.admitted(&uid.into()));
        if forged.is_some_and(|other| other.full_name() != pod.full_name()) {
            log::warn!("a pod calls itself the mirror of another pod={} uid={}", pod.full_name(), pod.uid());
            return;
        }
        if let Some(api_pods) = &self.deps.api_pods {
            api_pods.put(pod.uid().clone(), ApiPod { pod, removed });
        }
    }

    fn kill(&mut self, uid: &PodUid, kill: Kill) {
        if self.deps.workers.kill(uid, kill) == Aftermath::Gone {
            self.deps.status.forget(uid);
            self.garbage = true;
        }
    }

    fn preempt(&mut self, victim: &Pod, resource: String) {
        metrics::PREEMPTIONS.inc([resource]);
        self.deps.events.warning(victim, reasons::PREEMPTING, admission::PREEMPTED_MESSAGE);
        let failure =
            Failure { reason: reasons::PREEMPTING, message: admission::PREEMPTED_MESSAGE.to_owned() };
        self.kill(victim.uid(), Kill { grace_override: None, failure: Some(failure) });
    }

    /// A field without an effect is named, once per pod: silence would be a lie.
    fn warn_of_unsupported(&self, pod: &Pod) {
        let fields = unsupported_fields(pod);
        if !fields.is_empty() {
            let text = format!("this version of coracle does not support: {}", fields.join(", "));
            log::warn!("{text} pod={} uid={}", pod.full_name(), pod.uid());
            self.deps.events.warning(pod, reasons::UNSUPPORTED_FIELD, text);
        }
    }

    fn reject(&mut self, pod: &Pod, reason: &str, message: &str) {
        metrics::ADMISSION_REJECTIONS.inc([reasons::intern(reason)]);
        log::warn!("pod was rejected: {reason}: {message} pod={} uid={}", pod.full_name(), pod.uid());
        self.deps.events.warning(pod, reasons::intern(reason), message);
        let status = admission::rejected_status(pod, reason, message, pod.qos());
        if self.deps.observe.still_runs(pod.uid()) {
            self.deps.status.set(pod, status, Timestamp::now());
        } else {
            self.deps.status.set_rejected(pod, status, Timestamp::now());
        }
    }

    fn ring_cleaner(&self) {
        // A full bell already rings.
        let _ = self.deps.clean.try_send(());
    }

    fn publish(&mut self) {
        self.ephemeral.retain(|uid| self.core.wants(uid));
        if self.core.sources_ready() {
            let (core, workers) = (&self.core, &self.deps.workers);
            self.deps.allocations.retain(|uid| core.wants(uid) || workers.knows(uid));
        }
        let strangers = self.settings.node.shutting_down && !self.ready && {
            let listed = self.deps.observe.listed();
            !self.first_list || self.ask(|_, world| has_strangers(&listed, world))
        };
        let workers = self.deps.workers.reports();
        let mut snapshot = Snapshot {
            strangers,
            sources_ready: self.ready,
            sources: self.sources.clone(),
            shutting_down: self.settings.node.shutting_down,
            mirrors: self.core.mirrors().iter().map(|(uid, pod)| (uid.clone(), pod.full_name())).collect(),
            ..Snapshot::default()
        };
        for (uid, pod, rejected) in self.core.desired() {
            snapshot.pods.insert(
                uid.clone(),
                Entry {
                    pod: Some(self.ephemeral.complete(pod)),
                    leaving: None,
                    rejected,
                    worker: workers.get(uid).cloned(),
                },
            );
        }
        for (uid, worker) in workers {
            snapshot.pods.entry(uid).or_insert_with_key(|uid| Entry {
                pod: None,
                leaving: self.deps.workers.pod(uid).cloned(),
                rejected: false,
                worker: Some(worker),
            });
        }
        self.deps.view.set(snapshot);
        if let Some(wake) = self.deps.shutdown.wake.as_ref().filter(|_| self.settings.node.shutting_down) {
            wake.ring();
        }
        self.tell_mirrors();
    }

    /// Which static pods there are, and what the API server shows of them.
    /// A pod is over and nobody wants it. The end of a static one is told by its mirror first.
    fn depart(&mut self, uid: PodUid, pod: Option<Pod>) {
        let pod = pod.filter(|pod| pod.is_static() && self.deps.mirrors.is_some());
        match pod.filter(|_| !self.deps.status.is_published(&uid)) {
            Some(pod) => {
                let until = Instant::now() + DEPARTED_LIMIT;
                self.departed.push(Departed { uid, name: pod.full_name(), until });
            }
            None => self.deps.status.forget(&uid),
        }
    }

    fn forget_departed(&mut self) {
        let (before, now) = (self.departed.len(), Instant::now());
        let status = &self.deps.status;
        self.departed.retain(|departed| {
            let stays = now < departed.until && !status.is_published(&departed.uid);
            if !stays {
                status.forget(&departed.uid);
            }
            stays
        });
        if self.departed.len() < before {
            self.tell_mirrors();
        }
    }

    fn tell_mirrors(&self) {
        metrics::MIRROR_PODS.set(self.core.mirrors().len() as f64);
        let Some(mirrors) = &self.deps.mirrors else { return };
        let wanted = self.core.desired().filter(|(_, pod, rejected)| !rejected && pod.is_static());
        let workers = &self.deps.workers;
        let leaving = workers.uids().filter(|uid| !self.core.wants(uid) && !workers.is_finished(uid));
        // Their mirrors tell that they were refused.
        let refused = self.core.desired().filter(|(_, pod, rejected)| *rejected && pod.is_static());
        let shown = self.sources.get(&SourceName::Api).is_some_and(|state| state.seen);
        mirrors.put(
            (),
            mirror::View {
                wanted: wanted.map(|(_, pod, _)| pod.clone()).collect(),
                leaving: leaving
                    .filter_map(|uid| workers.pod(uid))
                    .filter(|pod| pod.is_static())
                    .map(Pod::full_name)
                    .chain(refused.map(|(_, pod, _)| pod.full_name()))
                    .chain(self.departed.iter().map(|departed| departed.name.clone()))
                    .collect(),
                mirrors: shown.then(|| self.core.mirrors().values().cloned().collect()),
                sources_ready: self.core.sources_ready(),
            },
        );
    }
}

/// A static pod whose end is still to be told.
struct Departed {
    uid: PodUid,
    name: FullName,
    until: Instant,
}

fn is_over(status: &StatusCache, uid: &PodUid) -> bool {
    status.get(uid).is_some_and(|status| matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")))
}
