//! Decides what to do about each event (Go: HandlePod{Additions,Updates,Removes,Cleanups}).
//!
//! Pure but for two things. `World::allocate`, which is called once for a new pod in the middle of its
//! admission, reserves CPUs, memory and devices in the state of the managers; if a later check refuses the
//! pod, they are released at the end of the turn. And resizes that are requested are counted in a metric.
//! All other functions of `World` only read.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::model::ids::PodUid;
use crate::model::pod::{Pod, SourceName};
use crate::model::reasons;
use crate::model::restart::RuleGates;
use crate::model::runtime::ListedPod;
use crate::pods::admission::{self, Admission, NodeView};
use crate::pods::allocation::{PendingReason, PodResources};
use crate::pods::lifecycle::PodKill;
use crate::pods::plan::resize::ResizeRules;
use crate::sources::merge::{Merge, Op, PodSet, Update};

/// The most removed pods that are remembered while the API server is away. What others leave stays until
/// it is back.
const MAX_REMOVED: usize = 4096;

/// An action for the thread.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Effect {
    /// Create the pod's worker or pass the new version to it.
    Update(Pod),
    /// Reject a pod; this is final.
    Reject {
        /// The pod as its source delivered it.
        pod: Pod,
        /// CamelCase reason.
        reason: Cow<'static, str>,
        /// For people.
        message: String,
    },
    /// Admission by the stored Node object refuses a pod: it waits until the API server decides.
    Postpone {
        /// The pod as its source delivered it.
        pod: Pod,
        /// CamelCase reason of the refusal.
        reason: Cow<'static, str>,
        /// For people.
        message: String,
    },
    /// Stop a pod.
    Kill(PodUid, PodKill),
    /// Stop a pod to make room for a critical one.
    Preempt {
        /// The pod to stop.
        victim: Pod,
        /// The resource that is short.
        resource: String,
    },
    /// The next updates of this pod have to wait until other pods have ended.
    StartAfter {
        /// The pod that was admitted.
        pod: PodUid,
        /// The pods that are preempted, for this pod or for one before.
        victims: Vec<Pod>,
    },
    /// Stop a pod that only the runtime knows.
    StopUnknown(ListedPod),
    /// A resize is granted.
    Resize {
        /// The pod, with the resources that it desires.
        pod: Pod,
        /// The cause of the decision: a label of the metric.
        trigger: &'static str,
    },
    /// A resize is not granted.
    ResizePending {
        /// The pod, with the resources that it desires.
        pod: Pod,
        /// Whether it is retried.
        reason: PendingReason,
        /// For people.
        message: String,
        /// For a deferred resize the reason of admission, for an infeasible one the label of the
        /// metric.
        detail: Cow<'static, str>,
    },
    /// The pod no longer desires other resources than it has.
    ResizeReverted(Pod),
    /// Forget the status of a pod that no longer exists.
    ForgetStatus(PodUid),
    /// The API server shows this version of a pod or of a mirror.
    ApiPodChanged(Pod),
    /// The API server no longer shows a pod or a mirror.
    ApiPodRemoved(Pod),
    /// No container of a rejected pod runs, and none of its resource claims is prepared: its status is
    /// final, its object may be deleted.
    FinishStatus(Pod),
    /// A source delivered an object that cannot be used.
    Invalid {
        /// The object.
        pod: Pod,
        /// For people.
        message: String,
    },
}

pub(super) struct Desired {
    /// The pod as its source delivered it.
    pub(super) pod: Pod,
    /// The pod with the resources that it was granted; this version runs.
    pub(super) granted: Pod,
    pub(super) rejected: bool,
    /// The only reason for the rejection was a shutdown of the machine.
    pub(super) rejected_for_shutdown: bool,
    /// It is `rejected` by a stored Node object only, and admission decides again when the API server is
    /// back.
    pub(super) is_postponed: bool,
    /// The pods that end before this one starts.
    pub(super) starts_after: BTreeSet<PodUid>,
    /// Whether it was preempted and has not ended in its time.
    pub(super) is_late: bool,
    /// Whether the stored status is from before the pod was admitted: that of its former incarnation, or
    /// of its rejection. It is forgotten when the effects of the present decision are carried out.
    has_old_status: bool,
}

/// The active pods now, and when the pods that are preempted have ended. Each list has a pod once.
pub(super) struct ActivePods {
    all: Vec<Pod>,
    /// Those that use resources now: the pods that are preempted, but not those that start after them.
    pub(super) now: Vec<Pod>,
    /// Those that will use resources: not the pods that are preempted, but those that start after them.
    pub(super) later: Vec<Pod>,
    /// The pods that are preempted, and have not ended.
    pub(super) victims: Vec<Pod>,
    /// The preempted pods that have not ended in their time. No pod waits for them any more.
    late: BTreeSet<PodUid>,
}

/// The state outside the core that its decisions need.
pub(crate) struct World<'a> {
    /// Whether the pod has a worker, or had one that has finished.
    pub has_worker: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the pods of the runtime were listed once.
    pub is_listed: bool,
    /// Whether any container ran at the newest inspection of the pod.
    pub still_runs: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the last status of this incarnation of the pod is Failed or Succeeded.
    pub is_over: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the pod has a worker that still stops its containers or its sandbox.
    pub may_run: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the source removed this pod of the API before, and its worker stops it: a pod that comes
    /// back with its UID does not start.
    pub ends_for_good: &'a dyn Fn(&PodUid) -> bool,
    /// Whether resource claims are prepared for the pod.
    pub uses_claims: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the pod's last status will not change any more.
    pub is_final: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the readiness gates of the pod, as the API server shows it now, give another
    /// readiness than its last status.
    pub gates_differ: &'a dyn Fn(&Pod) -> bool,
    /// The pod with the resources that it was granted before the agent was restarted.
    pub granted: &'a dyn Fn(&Pod) -> Pod,
    /// Reserves the CPUs, memory and devices of a pod (the only one with a side effect), given the other
    /// active pods, and whether all sources have delivered their pods.
    pub allocate: &'a dyn Fn(&Pod, &[Pod], bool) -> Admission,
    /// The node, for admission.
    pub node: &'a NodeView,
}

impl Desired {
    pub(super) fn new(pod: Pod, granted: Pod) -> Self {
        let (rejected, rejected_for_shutdown, is_postponed) = Default::default();
        let (starts_after, is_late, has_old_status) = Default::default();
        Desired {
            pod,
            granted,
            rejected,
            rejected_for_shutdown,
            is_postponed,
            starts_after,
            is_late,
            has_old_status,
        }
    }

    fn is_rejected_for_good(&self) -> bool {
        self.rejected && !self.is_postponed
    }
}

impl ActivePods {
    /// Decides about a new pod, and whether there is room for it beside the pods that are preempted. One
    /// that has room only without them is admitted, as by the Go kubelet, which decides when they have
    /// ended.
    fn admit(
        &self,
        pod: &Pod,
        runs: bool,
        node: &NodeView,
        ready: bool,
        world: &World<'_>,
    ) -> (Admission, bool) {
        // Pods that are preempted keep their devices and CPUs until they have ended.
        let allocate = || (world.allocate)(pod, &self.all, ready);
        let verdict = admission::admit_with(pod, &self.counted_for(pod, runs, &self.later), node, &allocate);
        let has_room = self.victims.is_empty()
            || admission::admit(pod, &self.counted_for(pod, runs, &self.now), node) == Admission::Admit;
        (verdict, has_room)
    }

    /// Those of `pods` that count against `pod`.
    ///
    /// DIFFERS: upstream counts a late victim also for a critical pod, and may choose it again; and it
    /// refuses a pod that `runs` since before a restart for one that is being deleted, although that
    /// one goes.
    fn counted_for(&self, pod: &Pod, runs: bool, pods: &[Pod]) -> Vec<Pod> {
        let is_late = |other: &Pod| pod.is_critical() && self.late.contains(other.uid());
        let counts = |other: &&Pod| !(is_late(other) || runs && other.is_deleting());
        pods.iter().filter(counts).cloned().collect()
    }
}

/// Whether a pod runs that has no worker. A source may still deliver it.
#[must_use]
pub(crate) fn is_running_without_worker(listed: &BTreeMap<PodUid, ListedPod>, world: &World<'_>) -> bool {
    let mut running = listed.values().filter(|pod| pod.is_running());
    running.any(|pod| !(world.has_worker)(&pod.uid) && (world.still_runs)(&pod.uid))
}

/// The desired pods, and which sources have delivered theirs.
pub(crate) struct Core {
    configured: BTreeSet<SourceName>,
    seen: BTreeSet<SourceName>,
    merge: Merge,
    restart_rules: RuleGates,
    pub(super) resize_rules: ResizeRules,
    pub(super) desired: BTreeMap<PodUid, Desired>,
    /// Pods that desire other resources than they were granted, in the order of their requests.
    pub(super) deferred_resizes: Vec<PodUid>,
    /// Copies of static pods at the API server. They are not run.
    mirrors: BTreeMap<PodUid, Pod>,
    /// Whether the set of the API server's source is the one that was stored: a pod that runs may be
    /// missing, because its file was not written or is damaged.
    may_lack_api_pods: bool,
    /// Pods that other sources have removed since then, up to [`MAX_REMOVED`]: these are not missing.
    removed: BTreeSet<PodUid>,
}

impl Core {
    /// No pods yet; `configured` are the sources that will deliver them.
    #[must_use]
    pub(crate) fn new(configured: BTreeSet<SourceName>) -> Self {
        Core {
            configured,
            seen: BTreeSet::new(),
            merge: Merge::default(),
            restart_rules: RuleGates::default(),
            resize_rules: ResizeRules::default(),
            desired: BTreeMap::new(),
            deferred_resizes: Vec::new(),
            mirrors: BTreeMap::new(),
            may_lack_api_pods: false,
            removed: BTreeSet::new(),
        }
    }

    /// Removes disabled restart rules from all pods.
    #[must_use]
    pub(crate) fn with_restart_rules(self, restart_rules: RuleGates) -> Self {
        Core { restart_rules, ..self }
    }

    /// Declares resizes infeasible that the node's configuration excludes.
    #[must_use]
    pub(crate) fn with_resize_rules(self, resize_rules: ResizeRules) -> Self {
        Core { resize_rules, ..self }
    }

    /// Whether every configured source has delivered a set.
    #[must_use]
    pub(crate) fn sources_ready(&self) -> bool {
        self.configured.is_subset(&self.seen)
    }

    /// Whether a pod that no source has is not to run: every source has delivered a set, and none is a
    /// stored one, which may lack pods.
    #[must_use]
    pub(crate) fn knows_all_pods(&self) -> bool {
        self.sources_ready() && !self.may_lack_api_pods
    }

    /// Whether a set of the API server is the first one after a stored one: as after the first of all, pods
    /// that are missing in it are stopped.
    #[must_use]
    pub(crate) fn follows_stored_set(&self, is_stored: bool) -> bool {
        self.may_lack_api_pods && !is_stored
    }

    /// While the API server's set may lack pods: pods that are known to be in no source, because another
    /// source has removed them.
    #[must_use]
    pub(crate) fn removed(&self) -> &BTreeSet<PodUid> {
        &self.removed
    }

    /// Whether a source has the pod.
    #[must_use]
    pub(crate) fn is_desired(&self, uid: &PodUid) -> bool {
        self.desired.contains_key(uid)
    }

    /// Whether the pod waits until the API server is back: the stored Node object excludes it.
    #[must_use]
    pub(crate) fn is_postponed(&self, uid: &PodUid) -> bool {
        self.desired.get(uid).is_some_and(|desired| desired.is_postponed)
    }

    /// Every desired pod, and whether it was rejected for good.
    pub(crate) fn desired(&self) -> impl Iterator<Item = (&PodUid, &Pod, bool)> {
        self.desired.iter().map(|(uid, desired)| (uid, &desired.pod, desired.is_rejected_for_good()))
    }

    /// The desired pod of this UID, if it was rejected for good.
    #[must_use]
    pub(crate) fn rejected(&self, uid: &PodUid) -> Option<&Pod> {
        self.desired.get(uid).filter(|desired| desired.is_rejected_for_good()).map(|desired| &desired.pod)
    }

    /// The desired pod of this UID with the resources that it was granted, unless it was rejected.
    #[must_use]
    pub(crate) fn admitted(&self, uid: &PodUid) -> Option<&Pod> {
        self.desired.get(uid).filter(|desired| !desired.rejected).map(|desired| &desired.granted)
    }

    /// The pods for which this one waited have ended, or had their time to do so: `late` have not.
    pub(crate) fn end_wait(&mut self, uid: &PodUid, late: &[Pod]) {
        if let Some(desired) = self.desired.get_mut(uid) {
            desired.starts_after.clear();
        }
        for victim in late {
            if let Some(desired) = self.desired.get_mut(victim.uid()) {
                desired.is_late = true;
            }
        }
    }

    /// Marks an admitted pod as rejected: it is to end before it has started. Returns its object;
    /// `None` if it is not admitted.
    pub(crate) fn fail(&mut self, uid: &PodUid) -> Option<Pod> {
        let desired = self.desired.get_mut(uid).filter(|desired| !desired.rejected)?;
        desired.rejected = true;
        self.deferred_resizes.retain(|other| other != uid);
        Some(desired.pod.clone())
    }

    /// The mirrors that the API server shows.
    #[must_use]
    pub(crate) fn mirrors(&self) -> &BTreeMap<PodUid, Pod> {
        &self.mirrors
    }

    /// A source delivered its complete current set.
    pub(crate) fn apply_set(
        &mut self,
        source: SourceName,
        set: impl Into<PodSet>,
        now: Timestamp,
        world: &World<'_>,
    ) -> Vec<Effect> {
        let PodSet { pods, incarnations, is_stored } = set.into();
        let is_back = source == SourceName::Api
            && std::mem::replace(&mut self.may_lack_api_pods, is_stored)
            && !is_stored;
        if !self.may_lack_api_pods {
            self.removed.clear();
        }
        let pods = pods.into_iter().map(|pod| self.restart_rules.without_disabled_rules(pod)).collect();
        let updates = self.merge.apply(source, PodSet { pods, incarnations, is_stored }, now);
        let mut effects: Vec<Effect> = self
            .merge
            .take_rejected()
            .into_iter()
            .map(|rejected| Effect::Invalid { pod: rejected.pod, message: rejected.message })
            .collect();
        for update in updates {
            self.route(update, world, &mut effects);
        }
        if is_back {
            // The publisher of statuses forgets a pod if another server has another pod of its name.
            let own = self.desired.values().map(|desired| &desired.pod);
            let own = own.filter(|pod| pod.source() == SourceName::Api).chain(self.mirrors.values());
            effects.extend(own.cloned().map(Effect::ApiPodChanged));
            effects.extend(self.readmit_if(world, |desired| desired.is_postponed));
        }
        let ready = self.sources_ready();
        self.seen.insert(source);
        if !ready {
            effects.extend(self.retry_resizes("pods_added", world));
        }
        self.end_decision();
        effects
    }

    fn end_decision(&mut self) {
        self.desired.values_mut().for_each(|desired| desired.has_old_status = false);
    }

    fn route(&mut self, mut update: Update, world: &World<'_>, effects: &mut Vec<Effect>) {
        if update.source == SourceName::Api {
            // First, so that the publisher of statuses knows the pod when it gets a status.
            for pod in &update.pods {
                effects.push(match update.op {
                    Op::Remove => Effect::ApiPodRemoved(pod.clone()),
                    Op::Add | Op::Update | Op::Delete | Op::Reconcile => Effect::ApiPodChanged(pod.clone()),
                });
            }
            let (mirrors, pods) = update.pods.into_iter().partition(Pod::is_mirror);
            update.pods = pods;
            for mirror in mirrors {
                match update.op {
                    Op::Remove => drop(self.mirrors.remove(mirror.uid())),
                    Op::Add | Op::Update | Op::Delete | Op::Reconcile => {
                        self.mirrors.insert(mirror.uid().clone(), mirror);
                    }
                }
            }
        }
        match update.op {
            Op::Add => {
                let mut pods = update.pods;
                // Static pods have no creation time and come first.
                // DIFFERS: after a restart, upstream may refuse a pod that runs for a new one that was
                // created before.
                // Without the API server all pods of the node start at once, and no scheduler has placed
                // the important ones first.
                // Which pods run changes at any time, and an order must not change while it is made.
                let is_stored = self.may_lack_api_pods;
                pods.sort_by_cached_key(|pod| {
                    let created = pod.object().metadata.creation_timestamp.as_ref().map(|t| t.0);
                    let priority = is_stored.then(|| Reverse(pod.spec().priority.unwrap_or(0)));
                    (!(world.still_runs)(pod.uid()), priority, created)
                });
                let deferred = self.deferred_resizes.len();
                for pod in pods {
                    self.add(pod, world, effects);
                }
                if self.deferred_resizes.len() > deferred {
                    effects.extend(self.retry_resizes("pods_added", world));
                }
            }
            Op::Update | Op::Delete => {
                let uids: Vec<PodUid> = update.pods.iter().map(|pod| pod.uid().clone()).collect();
                let mut resized = false;
                for pod in update.pods {
                    resized |= self.replace(pod);
                }
                // First, so that the worker reads the new conditions of the resize.
                if resized {
                    effects.extend(self.retry_resizes("pod_updated", world));
                }
                effects.extend(uids.iter().filter_map(|uid| self.admitted(uid)).cloned().map(Effect::Update));
            }
            Op::Remove => {
                for pod in update.pods {
                    // DIFFERS: an object that vanishes before its pod has ended was deleted with force,
                    // and its name may run elsewhere now. The Go kubelet lets such a pod have the rest of
                    // its grace period.
                    let grace_override = pod.is_deleting().then_some(0);
                    self.desired.remove(pod.uid());
                    if self.may_lack_api_pods
                        && update.source != SourceName::Api
                        && self.removed.len() < MAX_REMOVED
                    {
                        self.removed.insert(pod.uid().clone());
                    }
                    for other in self.desired.values_mut() {
                        other.starts_after.remove(pod.uid());
                    }
                    self.deferred_resizes.retain(|other| other != pod.uid());
                    effects.push(if (world.has_worker)(pod.uid()) {
                        Effect::Kill(pod.uid().clone(), PodKill { grace_override, failure: None })
                    } else {
                        Effect::ForgetStatus(pod.uid().clone())
                    });
                }
                effects.extend(self.retry_resizes("pods_removed", world));
            }
            Op::Reconcile => {
                for pod in update.pods {
                    let Some(desired) = self.desired.get_mut(pod.uid()) else { continue };
                    desired.granted = PodResources::from_pod(&desired.granted).applied_to(&pod);
                    desired.pod = pod.clone();
                    // Other clients may set conditions that change the readiness, and a terminal
                    // phase.
                    let gated = (world.gates_differ)(&pod);
                    let ended = pod.is_over() && !(world.is_over)(pod.uid());
                    if !desired.rejected && (gated || ended) {
                        effects.push(Effect::Update(desired.granted.clone()));
                    }
                }
            }
        }
    }

    /// The pods that use resources of the node, with the resources that they were granted. A pod that
    /// has failed, and whose containers still run, has its resources, ports and devices until they
    /// have ended (Go: `isPodInactive`).
    ///
    /// DIFFERS: upstream also counts a pod that is being deleted, and of which nothing runs after a
    /// restart, until its worker has found that out.
    pub(super) fn active(&self, world: &World<'_>) -> Vec<Pod> {
        let is_active = |desired: &&Desired| {
            let uid = desired.pod.uid();
            let is_over = desired.pod.is_over() || (!desired.has_old_status && (world.is_over)(uid));
            let never_runs =
                desired.pod.is_deleting() && !(world.has_worker)(uid) && !(world.still_runs)(uid);
            !desired.rejected && !never_runs && (!is_over || (world.may_run)(uid))
        };
        self.desired.values().filter(is_active).map(|desired| desired.granted.clone()).collect()
    }

    /// The active pods now and later.
    ///
    /// DIFFERS: the Go kubelet handles no other pod until the pods that it preempts have ended.
    pub(super) fn active_pods(&self, world: &World<'_>) -> ActivePods {
        let all = self.active(world);
        let desired = |pod: &Pod| self.desired.get(pod.uid());
        let preempted: BTreeSet<&PodUid> =
            all.iter().filter_map(desired).flat_map(|entry| &entry.starts_after).collect();
        // One that runs again, such as a static pod that was put back, is not late any more.
        let is_late =
            |pod: &&Pod| desired(pod).is_some_and(|entry| entry.is_late) && (world.may_run)(pod.uid());
        let late: BTreeSet<PodUid> = all.iter().filter(is_late).map(|pod| pod.uid().clone()).collect();
        let victims = all.iter().filter(|pod| preempted.contains(pod.uid()) && !is_late(pod));
        let victims: Vec<Pod> = victims.cloned().collect();
        let is_victim = |pod: &Pod| victims.iter().any(|victim| victim.uid() == pod.uid());
        let waits = |pod: &Pod| {
            let after = desired(pod).map(|entry| &entry.starts_after);
            after.is_some_and(|after| victims.iter().any(|victim| after.contains(victim.uid())))
        };
        let now = all.iter().filter(|pod| !waits(pod)).cloned().collect();
        let later = all.iter().filter(|pod| !is_victim(pod)).cloned().collect();
        ActivePods { all, now, later, victims, late }
    }

    /// The shutdown was cancelled: static pods that were rejected for it go through admission
    /// again. No controller would replace them.
    ///
    /// DIFFERS: the Go kubelet keeps such pods rejected until it is restarted.
    pub(crate) fn readmit(&mut self, world: &World<'_>) -> Vec<Effect> {
        let effects =
            self.readmit_if(world, |desired| desired.rejected_for_shutdown && desired.pod.is_static());
        self.end_decision();
        effects
    }

    /// The pods of the runtime were listed: those that run, and were postponed before, were admitted before
    /// the restart of the agent.
    pub(crate) fn readmit_running(&mut self, world: &World<'_>) -> Vec<Effect> {
        let effects = self.readmit_if(world, |desired| {
            desired.is_postponed && world.is_listed && (world.still_runs)(desired.pod.uid())
        });
        self.end_decision();
        effects
    }

    /// Whether a pod waits until the API server is back, or until there is room for it.
    #[must_use]
    pub(crate) fn has_postponed(&self) -> bool {
        self.desired.values().any(|desired| desired.is_postponed)
    }

    /// Pods have ended: those that were postponed, and that the node has room for now, go through admission
    /// again, in the order of a start. The others keep their statuses. The resources of the pods that have
    /// ended must have been released.
    pub(crate) fn readmit_fitting(&mut self, world: &World<'_>) -> Vec<Effect> {
        // Before the first list, every pod counts as running. Before all sources have delivered their pods, those
        // that have ended keep their CPUs, and the refusal of a pod that needs these would be final.
        if !world.is_listed || !self.sources_ready() {
            return Vec::new();
        }
        let waiting = self.desired.iter().filter(|(_, desired)| desired.is_postponed);
        let mut waiting: Vec<_> = waiting
            .map(|(uid, Desired { pod, .. })| {
                let created = pod.object().metadata.creation_timestamp.as_ref().map(|time| time.0);
                (Reverse(pod.spec().priority.unwrap_or(0)), created, uid.clone())
            })
            .collect();
        waiting.sort();
        let mut effects = Vec::new();
        for (.., uid) in waiting {
            if self.has_room(&uid, world) {
                effects.extend(self.readmit_if(world, |desired| *desired.pod.uid() == uid));
            }
        }
        self.end_decision();
        effects
    }

    /// Whether admission would refuse or preempt nothing for a desired pod, apart from the resource managers.
    fn has_room(&self, uid: &PodUid, world: &World<'_>) -> bool {
        let Some(desired) = self.desired.get(uid) else { return false };
        let (granted, active) = ((world.granted)(&desired.pod), self.active_pods(world));
        let others = active.counted_for(&granted, false, &active.all);
        admission::admit(&granted, &others, world.node) == Admission::Admit
    }

    /// Pods that were rejected go through admission again.
    fn readmit_if(&mut self, world: &World<'_>, is_due: impl Fn(&Desired) -> bool) -> Vec<Effect> {
        let rejected = self.desired.iter().filter(|(_, desired)| is_due(desired));
        let rejected: Vec<PodUid> = rejected.map(|(uid, _)| uid.clone()).collect();
        let mut effects = Vec::new();
        for uid in rejected {
            let Some(desired) = self.desired.remove(&uid) else { continue };
            effects.push(Effect::ForgetStatus(uid.clone()));
            self.add(desired.pod, world, &mut effects);
            self.desired.entry(uid).and_modify(|desired| desired.has_old_status = true);
        }
        effects
    }

    fn add(&mut self, pod: Pod, world: &World<'_>, effects: &mut Vec<Effect>) {
        let uid = pod.uid().clone();
        self.removed.remove(&uid);
        // A static pod that is added although it has a worker was removed before: it is another
        // incarnation, and starts with the resources of its manifest.
        // DIFFERS: upstream starts it with those of the former one, and resizes it.
        let is_incarnation = pod.is_static() && (world.has_worker)(&uid);
        let granted = if is_incarnation { pod.clone() } else { (world.granted)(&pod) };
        let active_pods = self.active_pods(world);
        // Before the first list, every pod counts as running.
        let runs = (world.still_runs)(&uid);
        // DIFFERS: if the shutdown or the pressure began before the Go kubelet learned of the pod, it
        // rejects the pod even if it runs; its containers are then stopped without their grace
        // period.
        let closed = world.node.shutting_down || !world.node.pressures.is_empty();
        let node = if closed && runs {
            Cow::Owned(NodeView { shutting_down: false, pressures: Vec::new(), ..world.node.clone() })
        } else {
            Cow::Borrowed(world.node)
        };
        // A pod that runs already, before a restart of the agent, does not wait. Before the first list
        // any waits; that has a limit and stops nothing.
        let can_wait = !world.is_listed || !runs;
        let mut starts_after = Vec::new();
        let (mut rejected, mut rejected_for_shutdown, mut is_postponed) = (false, false, false);
        // One that has ended, or is about to, needs no room (Go: HandlePodAdditions).
        // DIFFERS: after a restart, the Go kubelet may refuse a pod that is being deleted; its containers
        // are then stopped without the rest of their grace period, or others have to make room for it.
        let ends = pod.is_over() || pod.is_deleting() || (world.ends_for_good)(&uid);
        let verdict = match ends {
            true => Admission::Admit,
            false => {
                // A static pod whose former incarnation still stops is new.
                let ran = runs && !(world.has_worker)(&uid);
                let (verdict, has_room) =
                    active_pods.admit(&granted, ran, &node, self.sources_ready(), world);
                starts_after.extend((!has_room).then(|| active_pods.victims.clone()).into_iter().flatten());
                verdict
            }
        };
        let is_stored = self.may_lack_api_pods && pod.source() == SourceName::Api;
        match verdict {
            Admission::Admit => {}
            // The stored Node object may be older than the label that brought the pod here. One that runs
            // was admitted before the restart of the agent.
            Admission::Reject { reason, message } if is_stored && admission::depends_on_node(&reason) => {
                if !world.is_listed || !runs {
                    (rejected, is_postponed) = (true, true);
                    effects.push(Effect::Postpone { pod: pod.clone(), reason, message });
                }
            }
            Admission::Reject { reason, message } => {
                rejected = true;
                rejected_for_shutdown = reason == reasons::NODE_SHUTDOWN;
                effects.push(Effect::Reject { pod: pod.clone(), reason, message });
            }
            Admission::Preempt { victims, resource } => {
                let chosen = active_pods.later.iter().filter(|other| victims.contains(other.uid()));
                let chosen: Vec<Pod> = chosen.cloned().collect();
                effects.extend(
                    chosen
                        .iter()
                        .map(|victim| Effect::Preempt { victim: victim.clone(), resource: resource.clone() }),
                );
                starts_after.extend(chosen);
            }
        }
        if rejected || !can_wait {
            starts_after.clear();
        }
        let after = starts_after.iter().map(|victim| victim.uid().clone()).collect();
        if !starts_after.is_empty() {
            effects.push(Effect::StartAfter { pod: uid.clone(), victims: starts_after });
        }
        if !rejected {
            if !ends {
                admission::count_admitted(&pod);
            }
            effects.push(Effect::Update(granted.clone()));
            if granted != pod {
                self.deferred_resizes.push(uid.clone());
            }
        }
        let starts_after = after;
        let desired = Desired {
            rejected,
            rejected_for_shutdown,
            is_postponed,
            starts_after,
            has_old_status: is_incarnation,
            ..Desired::new(pod, granted)
        };
        self.desired.insert(uid, desired);
    }

    /// Compares the desired pods with the running ones: stops pods that are not desired, starts
    /// missing workers. Before all sources have delivered their pods, only static pods that were
    /// replaced are known not to be desired.
    pub(crate) fn clean_up(&self, listed: &BTreeMap<PodUid, ListedPod>, world: &World<'_>) -> Vec<Effect> {
        let ready = self.sources_ready();
        let unknown = listed
            .values()
            .filter(|pod| pod.is_running() && !(world.has_worker)(&pod.uid))
            .filter(|pod| self.admitted(&pod.uid).is_none() && (world.still_runs)(&pod.uid))
            .filter(|pod| ready || self.is_replaced(pod))
            // Without a sandbox that the runtime lists, the source of a pod is not known.
            .filter(|pod| {
                !self.may_lack_api_pods
                    || pod.source.is_some_and(|source| source != SourceName::Api)
                    || self.rejected(&pod.uid).is_some()
            })
            .map(|pod| Effect::StopUnknown(pod.clone()));
        let workerless = self
            .desired
            .values()
            .filter(|desired| ready && !world.node.shutting_down && !desired.rejected)
            .filter(|desired| !(world.has_worker)(desired.pod.uid()))
            .map(|desired| Effect::Update(desired.granted.clone()));
        let rejected = self
            .desired
            .values()
            .filter(|desired| desired.is_rejected_for_good() && !(world.is_final)(desired.pod.uid()))
            .filter(|desired| !listed.get(desired.pod.uid()).is_some_and(ListedPod::is_running))
            .filter(|desired| !(world.still_runs)(desired.pod.uid()))
            .filter(|desired| !(world.uses_claims)(desired.pod.uid()))
            .map(|desired| Effect::FinishStatus(desired.pod.clone()));
        unknown.chain(workerless).chain(rejected).collect()
    }

    /// Whether the source of the running pod `old` now has another static pod of its name.
    fn is_replaced(&self, old: &ListedPod) -> bool {
        self.desired.values().any(|Desired { pod, rejected, .. }| {
            !rejected
                && pod.is_static()
                && old.source == Some(pod.source())
                && pod.uid() != &old.uid
                && (pod.namespace(), pod.name()) == (old.namespace.as_str(), old.name.as_str())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::preemptions::PreemptionWaits;
    use super::*;
    use crate::model::runtime::{ListedSandbox, SandboxState};
    use expect_test::{Expect, expect};
    use serde_json::json;
    use std::cell::{Cell, RefCell};
    use std::time::Instant;

    fn pod(name: &str, uid: &str) -> Pod {
        Pod::from(
            serde_json::from_value::<crate::model::api::Pod>(json!({
                "metadata": {"name": name, "namespace": "default", "uid": uid},
                "spec": {"containers": [{"name": "c", "image": "i"}]}
            }))
            .unwrap(),
        )
    }

    fn listed(uid: &str, state: SandboxState) -> (PodUid, ListedPod) {
        let uid = PodUid::from(uid);
        let sandbox = ListedSandbox { id: "s".into(), state, attempt: 0, created_at: None };
        (uid.clone(), ListedPod { uid, sandboxes: vec![sandbox], ..ListedPod::default() })
    }

    /// A core with a set of workers that follows its effects, and the record of both.
    struct Fixture {
        core: Core,
        workers: RefCell<BTreeSet<PodUid>>,
        /// The pods that run while sets are applied.
        running: BTreeSet<PodUid>,
        /// The pods whose last status is terminal.
        over: BTreeSet<PodUid>,
        /// The pods that are being stopped.
        stopping: BTreeSet<PodUid>,
        /// The pods of the API that are being stopped because they were removed.
        leaving: BTreeSet<PodUid>,
        /// The pods whose resource claims are prepared.
        claiming: BTreeSet<PodUid>,
        is_listed: bool,
        node: NodeView,
        /// One line per event: the event, and its effects.
        record: String,
    }

    /// Pods by UID, in one line.
    fn join(uids: impl IntoIterator<Item = String>) -> String {
        let uids: Vec<String> = uids.into_iter().collect();
        if uids.is_empty() { "none".to_owned() } else { uids.join(", ") }
    }

    /// An effect in a few words. Pods are named by UID; the API server shows a pod, or has removed it.
    fn render(effect: &Effect) -> String {
        match effect {
            Effect::Update(pod) => format!("update {}", pod.uid()),
            Effect::Reject { pod, reason, .. } => format!("reject {}: {reason}", pod.uid()),
            Effect::Postpone { pod, reason, .. } => format!("postpone {}: {reason}", pod.uid()),
            Effect::Kill(uid, PodKill { grace_override: None, .. }) => format!("kill {uid}"),
            Effect::Kill(uid, PodKill { grace_override: Some(seconds), .. }) => {
                format!("kill {uid} with a grace period of {seconds} s")
            }
            Effect::Preempt { victim, resource } => format!("preempt {}: short of {resource}", victim.uid()),
            Effect::StartAfter { pod, victims } => {
                format!("start {pod} after {}", join(victims.iter().map(|pod| pod.uid().to_string())))
            }
            Effect::StopUnknown(pod) => format!("stop unknown {}", pod.uid),
            Effect::ForgetStatus(uid) => format!("forget status of {uid}"),
            Effect::ApiPodChanged(pod) => format!("shown {}", pod.uid()),
            Effect::ApiPodRemoved(pod) => format!("removed {}", pod.uid()),
            Effect::FinishStatus(pod) => format!("finish status of {}", pod.uid()),
            Effect::Invalid { pod, message } => format!("invalid {}: {message}", pod.uid()),
            Effect::Resize { pod, trigger } => format!("resize {}: {trigger}", pod.uid()),
            Effect::ResizePending { pod, reason, .. } => {
                format!("resize of {} pends: {}", pod.uid(), reason.as_str())
            }
            Effect::ResizeReverted(pod) => format!("resize of {} is reverted", pod.uid()),
        }
    }

    impl Fixture {
        fn new(sources: &[SourceName]) -> Self {
            let mut node = NodeView::default();
            node.allocatable.pods = 10;
            let core = Core::new(sources.iter().copied().collect());
            let (running, over, stopping, leaving, claiming, record) = Default::default();
            let workers = RefCell::default();
            Fixture {
                core,
                workers,
                running,
                over,
                stopping,
                leaving,
                claiming,
                is_listed: true,
                node,
                record,
            }
        }

        fn decide(
            &mut self,
            still_runs: &dyn Fn(&PodUid) -> bool,
            decide: impl FnOnce(&mut Core, &World<'_>) -> Vec<Effect>,
        ) -> Vec<String> {
            self.decide_with(still_runs, &|_, _, _| Admission::Admit, decide)
        }

        fn decide_with(
            &mut self,
            still_runs: &dyn Fn(&PodUid) -> bool,
            allocate: &dyn Fn(&Pod, &[Pod], bool) -> Admission,
            decide: impl FnOnce(&mut Core, &World<'_>) -> Vec<Effect>,
        ) -> Vec<String> {
            let world = World {
                has_worker: &|uid| self.workers.borrow().contains(uid),
                is_listed: self.is_listed,
                still_runs,
                is_over: &|uid| self.over.contains(uid),
                may_run: &|uid| self.stopping.contains(uid),
                ends_for_good: &|uid| self.leaving.contains(uid),
                uses_claims: &|uid| self.claiming.contains(uid),
                is_final: &|_| false,
                gates_differ: &|_| false,
                granted: &Pod::clone,
                allocate,
                node: &self.node,
            };
            let effects = decide(&mut self.core, &world);
            for effect in &effects {
                if let Effect::Update(pod) = effect {
                    self.workers.borrow_mut().insert(pod.uid().clone());
                }
            }
            effects.iter().map(render).collect()
        }

        /// Applies the set of a source. The record has its UIDs.
        fn apply(&mut self, source: SourceName, set: impl Into<PodSet>) {
            let set = set.into();
            let pods = set.pods.iter().map(|pod| match set.incarnations.get(pod.uid()) {
                Some(number) => format!("{} (incarnation {number})", pod.uid()),
                None => pod.uid().to_string(),
            });
            let event = format!("{}: {}", source.as_str(), join(pods));
            let running = self.running.clone();
            let effects = self.decide(&|uid| running.contains(uid), |core, world| {
                core.apply_set(source, set, Timestamp::now(), world)
            });
            self.log(&event, &effects);
        }

        fn clean_up(&mut self, listed: &BTreeMap<PodUid, ListedPod>) {
            let running = listed.values().filter(|pod| pod.is_running()).map(|pod| pod.uid.to_string());
            let event = format!("clean up, running: {}", join(running));
            let still_runs = |uid: &PodUid| listed.get(uid).is_some_and(ListedPod::is_running);
            let effects = self.decide(&still_runs, |core, world| core.clean_up(listed, world));
            self.log(&event, &effects);
        }

        fn readmit(&mut self) {
            let effects = self.decide(&|_| false, Core::readmit);
            self.log("readmit", &effects);
        }

        fn log(&mut self, event: &str, effects: &[String]) {
            let effects = if effects.is_empty() { "nothing".to_owned() } else { effects.join("; ") };
            self.record.push_str(&format!("{event} -> {effects}\n"));
        }

        /// Compares the record.
        fn check(&self, expected: Expect) {
            expected.assert_eq(&self.record);
        }

        /// Adds a line about what changes outside the core.
        fn note(&mut self, text: &str) {
            self.record.push_str(&format!("({text})\n"));
        }

        /// Adds the desired pods.
        fn note_desired(&mut self) {
            let describe = |(uid, _, rejected): (&PodUid, &Pod, bool)| {
                format!("{uid}{}", if rejected { " (rejected)" } else { "" })
            };
            let desired = join(self.core.desired().map(describe));
            self.record.push_str(&format!("desired: {desired}\n"));
        }
    }

    #[test]
    fn edited_static_pod_is_killed_before_its_successor_starts() {
        let mut fixture = Fixture::new(&[SourceName::File]);
        fixture.apply(SourceName::File, vec![pod("web", "1")]);
        fixture.apply(SourceName::File, vec![pod("web", "1")]);
        fixture.apply(SourceName::File, vec![pod("web", "2")]);
        fixture.note_desired();
        fixture.check(expect![[r#"
            file: 1 -> update 1
            file: 1 -> nothing
            file: 2 -> kill 1; update 2
            desired: 2
        "#]]);
    }

    #[test]
    fn new_incarnation_kills_and_restarts_the_pod() {
        let mut fixture = Fixture::new(&[SourceName::File]);
        for number in [1, 1, 2] {
            let incarnations = [("1".into(), number)].into();
            fixture.apply(
                SourceName::File,
                PodSet { pods: vec![pod("web", "1")], incarnations, ..PodSet::default() },
            );
        }
        fixture.note_desired();
        fixture.check(expect![[r#"
            file: 1 (incarnation 1) -> update 1
            file: 1 (incarnation 1) -> nothing
            file: 1 (incarnation 2) -> kill 1; update 1
            desired: 1
        "#]]);
    }

    #[test]
    fn unknown_pods_run_until_all_sources_have_delivered() {
        let mut fixture = Fixture::new(&[SourceName::File, SourceName::Http]);
        let running = BTreeMap::from([listed("9", SandboxState::Ready), listed("8", SandboxState::NotReady)]);
        fixture.apply(SourceName::File, vec![]);
        fixture.clean_up(&running);
        fixture.apply(SourceName::Http, vec![]);
        fixture.clean_up(&running);
        fixture.check(expect![[r#"
            file: none -> nothing
            clean up, running: 9 -> nothing
            http: none -> nothing
            clean up, running: 9 -> stop unknown 9
        "#]]);
    }

    #[test]
    fn replaced_static_pod_is_stopped_before_all_sources_have_delivered() {
        let mut fixture = Fixture::new(&[SourceName::File, SourceName::Http]);
        let running = |uid: &str, name: &str, source| {
            let (uid, pod) = listed(uid, SandboxState::Ready);
            (uid, ListedPod { name: name.to_owned(), namespace: "default".to_owned(), source, ..pod })
        };
        let running = BTreeMap::from([
            running("1", "web", Some(SourceName::File)),
            running("2", "web", Some(SourceName::Api)),
            running("3", "web", Some(SourceName::Http)),
            running("4", "web", None),
            running("5", "other", Some(SourceName::File)),
        ]);
        fixture.apply(SourceName::File, vec![pod("web", "9")]);
        fixture.clean_up(&running);
        fixture.note("all sources have delivered: nothing else is desired");
        fixture.apply(SourceName::Http, vec![]);
        fixture.clean_up(&running);
        fixture.check(expect![[r#"
            file: 9 -> update 9
            clean up, running: 1, 2, 3, 4, 5 -> stop unknown 1
            (all sources have delivered: nothing else is desired)
            http: none -> nothing
            clean up, running: 1, 2, 3, 4, 5 -> stop unknown 1; stop unknown 2; stop unknown 3; stop unknown 4; stop unknown 5
        "#]]);
        // A rejected successor does not replace the running pod.
        let mut fixture = Fixture::new(&[SourceName::File, SourceName::Http]);
        fixture.node.allocatable.pods = 0;
        fixture.apply(SourceName::File, vec![pod("web", "9")]);
        fixture.clean_up(&running);
        fixture.check(expect![[r#"
            file: 9 -> reject 9: UnexpectedAdmissionError
            clean up, running: 1, 2, 3, 4, 5 -> finish status of 9
        "#]]);
    }

    /// The missing resource is named. A critical pod that runs already does not wait, except before the
    /// first list of the runtime.
    #[test]
    fn critical_pod_waits_for_its_victims_also_before_the_first_list() {
        let record = |is_listed: bool, running: &[&str]| {
            let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
            (fixture.node.allocatable.pods, fixture.is_listed) = (1, is_listed);
            fixture.running = running.iter().map(|uid| PodUid::from(*uid)).collect();
            fixture.note(&format!("listed: {is_listed}, running: {running:?}"));
            fixture.apply(SourceName::Api, vec![pod("a", "1")]);
            fixture.apply(SourceName::File, vec![pod("s", "2")]);
            fixture.record
        };
        expect![[r#"
            (listed: true, running: [])
            api: 1 -> shown 1; update 1
            file: 2 -> preempt 1: short of pods; start 2 after 1; update 2
            (listed: false, running: ["1", "2"])
            api: 1 -> shown 1; update 1
            file: 2 -> preempt 1: short of pods; start 2 after 1; update 2
            (listed: true, running: ["1", "2"])
            api: 1 -> shown 1; update 1
            file: 2 -> preempt 1: short of pods; update 2
        "#]]
        .assert_eq(&(record(true, &[]) + &record(false, &["1", "2"]) + &record(true, &["1", "2"])));
    }

    fn with_cpu(name: &str, uid: &str, cpu: &str) -> Pod {
        let mut object = pod(name, uid).into_object();
        let resources = serde_json::from_value(json!({"requests": {"cpu": cpu}})).unwrap();
        object.spec.as_mut().unwrap().containers[0].resources = resources;
        Pod::from(object)
    }

    /// A node with four CPUs, of which pod 1 has three, and a critical pod 9, which needs two.
    fn preempting() -> Fixture {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
        fixture.node.allocatable.cpu_milli = 4000;
        fixture.apply(SourceName::Api, vec![with_cpu("1", "1", "3")]);
        fixture.apply(SourceName::File, vec![with_cpu("s", "9", "2")]);
        fixture.over.insert("1".into());
        fixture.stopping.insert("1".into());
        fixture.note("1 has failed and stops");
        fixture
    }

    /// The API server has pod 1, and a pod with one CPU for each of these UIDs.
    fn api_pods(uids: &[&str]) -> Vec<Pod> {
        let small = uids.iter().map(|uid| with_cpu(uid, uid, "1"));
        std::iter::once(with_cpu("1", "1", "3")).chain(small).collect()
    }

    #[test]
    fn pod_that_fits_with_a_waiting_critical_pod_or_its_victim_is_admitted() {
        let mut fixture = preempting();
        fixture.apply(SourceName::Api, api_pods(&["2"]));
        fixture.note("now there is room for no other pod, but for one when the victim has ended");
        fixture.apply(SourceName::Api, api_pods(&["2", "3"]));
        fixture.apply(SourceName::Api, api_pods(&["2", "3", "4"]));
        fixture.stopping.clear();
        for uid in ["3", "9"] {
            fixture.core.end_wait(&uid.into(), &[]);
        }
        fixture.note("1 has ended, and 3 and 9 start");
        fixture.apply(SourceName::Api, api_pods(&["2", "3", "4", "5"]));
        fixture.apply(SourceName::Api, api_pods(&["3", "4", "5", "6"]));
        fixture.check(expect![[r#"
            api: 1 -> shown 1; update 1
            file: 9 -> preempt 1: short of cpu; start 9 after 1; update 9
            (1 has failed and stops)
            api: 1, 2 -> shown 2; update 2
            (now there is room for no other pod, but for one when the victim has ended)
            api: 1, 2, 3 -> shown 3; start 3 after 1; update 3
            api: 1, 2, 3, 4 -> shown 4; reject 4: OutOfcpu
            (1 has ended, and 3 and 9 start)
            api: 1, 2, 3, 4, 5 -> shown 5; reject 5: OutOfcpu
            api: 1, 3, 4, 5, 6 -> removed 2; kill 2; shown 6; update 6
        "#]]);
    }

    #[test]
    fn victim_that_did_not_end_in_time_counts_until_it_has() {
        let mut fixture = preempting();
        fixture.record.clear();
        fixture.core.end_wait(&"9".into(), &[with_cpu("1", "1", "3")]);
        fixture.note("9 starts, although 1 has not ended");
        fixture.apply(SourceName::Api, api_pods(&["2"]));
        fixture.stopping.clear();
        fixture.note("1 has ended");
        fixture.apply(SourceName::Api, api_pods(&["2", "3"]));
        fixture.check(expect![[r#"
            (9 starts, although 1 has not ended)
            api: 1, 2 -> shown 2; reject 2: OutOfcpu
            (1 has ended)
            api: 1, 2, 3 -> shown 3; update 3
        "#]]);
    }

    #[test]
    fn late_victim_is_neither_preempted_again_nor_waited_for_again() {
        let mut fixture = preempting();
        fixture.record.clear();
        fixture.core.end_wait(&"9".into(), &[with_cpu("1", "1", "3")]);
        fixture.note("there is room for the next critical pod when the late victim has ended");
        let first = with_cpu("s", "9", "2");
        fixture.apply(SourceName::File, vec![first.clone(), with_cpu("t", "8", "2")]);
        fixture.note("a change of the victim's object changes nothing");
        let mut object = api_pods(&[]).remove(0).into_object();
        object.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        fixture.apply(SourceName::Api, vec![Pod::from(object)]);
        fixture.apply(SourceName::File, vec![first, with_cpu("u", "7", "2")]);
        fixture.check(expect![[r#"
            (there is room for the next critical pod when the late victim has ended)
            file: 9, 8 -> update 8
            (a change of the victim's object changes nothing)
            api: 1 -> shown 1; update 1
            file: 9, 7 -> kill 8; update 7
        "#]]);
    }

    /// A victim (0) and the pod that preempts it (1), which share a node, and what `sync` does.
    struct Pair {
        fixture: Fixture,
        waits: PreemptionWaits,
        pods: [Pod; 2],
        /// The victim when its manifest is put back: it has room then.
        smaller: Pod,
        manifests: [bool; 2],
        /// The pods that start again when they have ended.
        again: BTreeSet<PodUid>,
    }

    impl Pair {
        fn new() -> Self {
            let ranked = |uid: &str, cpu: &str, priority: i32| {
                let mut object = with_cpu(uid, uid, cpu).into_object();
                object.spec.as_mut().unwrap().priority = Some(priority);
                Pod::from(object)
            };
            let (waits, manifests, again) = Default::default();
            let (pods, smaller) = ([ranked("1", "3", 1), ranked("9", "2", 2)], ranked("1", "1", 1));
            let mut fixture = Fixture::new(&[SourceName::File]);
            fixture.node.allocatable.cpu_milli = 4000;
            Pair { fixture, waits, pods, smaller, manifests, again }
        }

        /// Removes a manifest, or puts it back.
        fn toggle(&mut self, index: usize) {
            self.manifests[index] ^= true;
            if !self.manifests[0] && index == 0 {
                self.pods[0] = self.smaller.clone();
            }
            let set = self.pods.iter().zip(self.manifests).filter(|(_, is_there)| *is_there);
            let set: Vec<Pod> = set.map(|(pod, _)| pod.clone()).collect();
            let mut effects = Vec::new();
            self.fixture.decide(&|_| false, |core, world| {
                effects = core.apply_set(SourceName::File, set, Timestamp::now(), world);
                effects.clone()
            });
            effects.into_iter().for_each(|effect| self.carry_out(effect));
        }

        fn carry_out(&mut self, effect: Effect) {
            match effect {
                Effect::Preempt { victim, .. } => {
                    self.fixture.over.insert(victim.uid().clone());
                    self.stop(victim.uid());
                }
                Effect::Kill(uid, _) | Effect::ForgetStatus(uid) => self.stop(&uid),
                Effect::StartAfter { pod, victims } => self.waits.begin(pod, victims, Instant::now()),
                Effect::Update(pod) if self.waits.waits(pod.uid()) => {
                    self.fixture.workers.borrow_mut().remove(pod.uid());
                }
                Effect::Update(pod) if self.fixture.stopping.contains(pod.uid()) => {
                    self.again.insert(pod.uid().clone());
                }
                _ => {}
            }
        }

        fn stop(&mut self, uid: &PodUid) {
            self.waits.forget(uid);
            self.again.remove(uid);
            if self.fixture.workers.borrow().contains(uid) {
                self.fixture.stopping.insert(uid.clone());
            }
        }

        /// The pod ends if it is being stopped.
        fn end(&mut self, index: usize) {
            let uid = self.pods[index].uid();
            if self.fixture.stopping.remove(uid) {
                self.fixture.over.remove(uid);
                self.waits.ended(&|other| other == uid);
                if !self.again.remove(uid) {
                    self.fixture.workers.borrow_mut().remove(uid);
                }
            }
        }

        /// The end of a turn.
        fn start_waiting(&mut self) {
            let workers = self.fixture.workers.borrow().clone();
            for ready in self.waits.take_ready(&|uid| !workers.contains(uid), Instant::now()) {
                self.fixture.core.end_wait(&ready.pod, &ready.late);
                self.fixture.workers.borrow_mut().insert(ready.pod);
            }
        }
    }

    #[test]
    fn critical_pod_waits_only_for_pods_that_are_ending_in_every_order_of_events() {
        let (mut waited, mut again) = (0, 0);
        for mut order in 0..4_usize.pow(6) {
            let mut pair = Pair::new();
            for _ in 0..6 {
                match order % 4 {
                    index @ 0..2 => pair.toggle(index),
                    other => pair.end(other - 2),
                }
                order /= 4;
                pair.start_waiting();
                let waits = pair.waits.due(Instant::now()).is_some();
                assert!(!waits || !pair.fixture.stopping.is_empty(), "{:?}", pair.waits);
                let waits_for = |uid: &PodUid| pair.fixture.core.desired[uid].starts_after.len();
                assert!(
                    pair.fixture.core.desired.keys().all(|uid| waits_for(uid) == 0 || pair.waits.waits(uid))
                );
                waited += usize::from(waits);
                again += usize::from(waits && !pair.again.is_empty());
            }
        }
        assert!(waited > 0 && again > 0, "{waited}, {again}");
    }

    #[test]
    fn victim_of_one_critical_pod_is_not_preempted_for_the_next() {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
        fixture.node.allocatable.cpu_milli = 4000;
        fixture.apply(SourceName::Api, vec![with_cpu("a", "1", "2"), with_cpu("b", "2", "2")]);
        fixture.apply(SourceName::File, vec![with_cpu("s", "8", "2"), with_cpu("t", "9", "2")]);
        fixture.check(expect![[r#"
            api: 1, 2 -> shown 1; shown 2; update 1; update 2
            file: 8, 9 -> preempt 1: short of cpu; start 8 after 1; update 8; preempt 2: short of cpu; start 9 after 1, 2; update 9
        "#]]);
    }

    #[test]
    fn victim_keeps_its_devices_until_it_has_ended() {
        let mut fixture = preempting();
        let allocations = Cell::new(0);
        let allocate = |_: &Pod, active: &[Pod], _: bool| {
            allocations.set(allocations.get() + 1);
            // A pod that is not in the list would lose its devices, even if the allocation fails.
            assert!(active.iter().any(|pod| pod.name() == "1"));
            Admission::Reject { reason: "UnexpectedAdmissionError".into(), message: String::new() }
        };
        fixture.decide_with(&|_| false, &allocate, |core, world| {
            core.apply_set(SourceName::Api, api_pods(&["2"]), Timestamp::now(), world)
        });
        assert_eq!(allocations.get(), 1);
        assert!(fixture.core.admitted(&"2".into()).is_none() && fixture.core.rejected(&"2".into()).is_some());
    }

    #[test]
    fn pod_that_fails_before_its_start_is_not_started_later() {
        let mut fixture = Fixture::new(&[SourceName::File]);
        fixture.node.allocatable.pods = 1;
        fixture.apply(SourceName::File, vec![pod("s", "1")]);
        fixture.workers.borrow_mut().clear();
        fixture.note("it waits for others, so it has no worker");
        fixture.clean_up(&BTreeMap::new());
        fixture.workers.borrow_mut().clear();
        assert_eq!(fixture.core.fail(&"1".into()).map(|pod| pod.uid().to_string()), Some("1".to_owned()));
        assert!(fixture.core.fail(&"1".into()).is_none());
        fixture.note("it fails");
        fixture.note_desired();
        fixture.clean_up(&BTreeMap::new());
        fixture.note("what it was to have is free");
        fixture.apply(SourceName::File, vec![pod("s", "1"), pod("t", "2")]);
        fixture.check(expect![[r#"
            file: 1 -> update 1
            (it waits for others, so it has no worker)
            clean up, running: none -> update 1
            (it fails)
            desired: 1 (rejected)
            clean up, running: none -> finish status of 1
            (what it was to have is free)
            file: 1, 2 -> update 2
        "#]]);
    }

    #[test]
    fn pod_that_comes_back_while_it_stops_is_not_admitted_again() {
        let critical = |name: &str, uid: &str| {
            let mut object = pod(name, uid).into_object();
            object.spec.as_mut().unwrap().priority = Some(2_000_000_000);
            Pod::from(object)
        };
        let record = |stops: bool| {
            let mut fixture = Fixture::new(&[SourceName::Api]);
            fixture.node.allocatable.pods = 1;
            fixture.apply(SourceName::Api, vec![critical("a", "1")]);
            fixture.apply(SourceName::Api, vec![pod("b", "2")]);
            fixture.record.clear();
            fixture.leaving.extend(stops.then(|| "1".into()));
            fixture.note(if stops { "1 stops" } else { "1 has ended" });
            fixture.apply(SourceName::Api, vec![critical("a", "1"), pod("b", "2")]);
            fixture.record
        };
        // No pod has to make room for one that ends.
        expect![[r#"
            (1 stops)
            api: 1, 2 -> shown 1; update 1
            (1 has ended)
            api: 1, 2 -> shown 1; preempt 2: short of pods; start 1 after 2; update 1
        "#]]
        .assert_eq(&(record(true) + &record(false)));
    }

    fn deleted(name: &str, uid: &str) -> Pod {
        let mut object = pod(name, uid).into_object();
        object.spec.as_mut().unwrap().priority = Some(2_000_000_000);
        object.metadata.deletion_timestamp = Some(crate::model::meta::Time(Timestamp::UNIX_EPOCH));
        Pod::from(object)
    }

    /// The agent was restarted while a pod was being stopped. It starts nothing any more.
    #[test]
    fn pod_that_is_being_deleted_is_not_refused() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.allocatable.pods = 1;
        fixture.running = ["1".into(), "2".into()].into();
        fixture.apply(SourceName::Api, vec![pod("a", "1"), deleted("b", "2")]);
        fixture.node.shutting_down = true;
        fixture.note("the machine shuts down");
        fixture.apply(SourceName::Api, vec![pod("a", "1"), deleted("b", "2"), deleted("c", "3")]);
        fixture.check(expect![[r#"
            api: 1, 2 -> shown 1; shown 2; update 1; update 2
            (the machine shuts down)
            api: 1, 2, 3 -> shown 3; update 3
        "#]]);
    }

    /// Neither is it in the way after a restart of the agent, when all pods are admitted again.
    #[test]
    fn pod_that_is_being_deleted_takes_no_place_of_a_pod_that_runs() {
        let record = |is_listed| {
            let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
            (fixture.node.allocatable.pods, fixture.is_listed) = (1, is_listed);
            fixture.running = ["1".into(), "2".into(), "3".into()].into();
            fixture.apply(SourceName::Api, vec![deleted("a", "1"), pod("b", "2")]);
            fixture.node.allocatable.pods = 2;
            fixture.note("for a critical pod of another source, no pod is preempted");
            fixture.apply(SourceName::File, vec![file_pod("s", "3")]);
            fixture.record
        };
        assert_eq!(record(true), record(false));
        expect![[r#"
            api: 1, 2 -> shown 1; shown 2; update 1; update 2
            (for a critical pod of another source, no pod is preempted)
            file: 3 -> update 3
        "#]]
        .assert_eq(&record(true));
    }

    #[test]
    fn new_pod_takes_no_place_of_a_pod_that_runs_also_one_that_is_being_deleted() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.allocatable.pods = 2;
        fixture.running = ["2".into(), "3".into()].into();
        fixture.apply(SourceName::Api, vec![pod("a", "1"), deleted("b", "2"), pod("c", "3")]);
        fixture.check(expect![[r#"
            api: 1, 2, 3 -> shown 1; shown 2; shown 3; update 2; update 3; reject 1: OutOfpods
        "#]]);
    }

    /// The list of the runtime changes while a set is handled.
    #[test]
    fn pods_that_end_while_they_are_sorted_are_all_admitted() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.allocatable.pods = 1_000;
        let set: Vec<Pod> = (0..500).map(|n| pod(&format!("p{n}"), &n.to_string())).collect();
        let calls = std::cell::Cell::new(0_usize);
        let still_runs = |_: &PodUid| {
            calls.set(calls.get() + 1);
            calls.get() * 7 % 13 < 6
        };
        let effects = fixture
            .decide(&still_runs, |core, world| core.apply_set(SourceName::Api, set, Timestamp::now(), world));
        assert_eq!(effects.iter().filter(|effect| effect.starts_with("update")).count(), 500);
    }

    #[test]
    fn static_pod_that_comes_back_while_it_stops_takes_no_place_of_one_that_is_being_deleted() {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
        fixture.node.allocatable.pods = 1;
        fixture.running = ["1".into(), "2".into()].into();
        fixture.apply(SourceName::Api, vec![deleted("a", "1")]);
        fixture.workers.borrow_mut().insert("2".into());
        fixture.note("2 has a worker, which stops it");
        fixture.apply(SourceName::File, vec![file_pod("s", "2")]);
        fixture.check(expect![[r#"
            api: 1 -> shown 1; update 1
            (2 has a worker, which stops it)
            file: 2 -> reject 2: UnexpectedAdmissionError
        "#]]);
    }

    #[test]
    fn pod_that_is_being_deleted_and_has_ended_takes_no_place() {
        let record = |has_worker: bool| {
            let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
            fixture.node.allocatable.pods = 2;
            fixture.running = ["1".into()].into();
            fixture.apply(SourceName::Api, vec![pod("a", "1"), deleted("b", "2")]);
            fixture.record.clear();
            if has_worker {
                fixture.note("2 has a worker, and may have begun to start");
            } else {
                fixture.workers.borrow_mut().remove(&"2".into());
                fixture.note("2 has no worker");
            }
            fixture.apply(SourceName::File, vec![file_pod("s", "3")]);
            fixture.record
        };
        expect![[r#"
            (2 has no worker)
            file: 3 -> update 3
            (2 has a worker, and may have begun to start)
            file: 3 -> preempt 1: short of pods; start 3 after 1; update 3
        "#]]
        .assert_eq(&(record(false) + &record(true)));
    }

    fn with_port(name: &str, uid: &str) -> Pod {
        let mut object = pod(name, uid).into_object();
        let ports = json!([{"containerPort": 80, "hostPort": 8080}]);
        object.spec.as_mut().unwrap().containers[0].ports = serde_json::from_value(ports).unwrap();
        Pod::from(object)
    }

    #[test]
    fn port_of_a_completed_pod_that_is_replaced_is_taken() {
        let mut fixture = Fixture::new(&[SourceName::File]);
        let set =
            |number, pods| PodSet { pods, incarnations: [("1".into(), number)].into(), ..PodSet::default() };
        fixture.apply(SourceName::File, set(1, vec![with_port("a", "1")]));
        fixture.over.insert("1".into());
        fixture.note("1 has completed");
        fixture.apply(SourceName::File, set(2, vec![with_port("a", "1"), with_port("b", "2")]));
        fixture.note("now it is the status of the new incarnation");
        let pods = vec![with_port("a", "1"), with_port("b", "2"), with_port("c", "3")];
        fixture.apply(SourceName::File, set(2, pods));
        fixture.check(expect![[r#"
            file: 1 (incarnation 1) -> update 1
            (1 has completed)
            file: 1 (incarnation 2), 2 -> kill 1; update 1; reject 2: NodePorts
            (now it is the status of the new incarnation)
            file: 1 (incarnation 2), 2, 3 -> update 3
        "#]]);
    }

    #[test]
    fn failed_pod_that_still_stops_keeps_its_port() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        let set = |uids: &[&str]| uids.iter().map(|uid| with_port(uid, uid)).collect::<Vec<_>>();
        fixture.apply(SourceName::Api, set(&["1"]));
        fixture.over.insert("1".into());
        fixture.stopping.insert("1".into());
        fixture.note("1 has exceeded its deadline, and its containers have a long grace period");
        fixture.apply(SourceName::Api, set(&["1", "2"]));
        fixture.stopping.clear();
        fixture.note("1 has ended");
        fixture.apply(SourceName::Api, set(&["1", "2", "3"]));
        fixture.check(expect![[r#"
            api: 1 -> shown 1; update 1
            (1 has exceeded its deadline, and its containers have a long grace period)
            api: 1, 2 -> shown 2; reject 2: NodePorts
            (1 has ended)
            api: 1, 2, 3 -> shown 3; update 3
        "#]]);
    }

    #[test]
    fn forced_deletion_of_a_pod_that_stops_ends_its_grace_period() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.apply(SourceName::Api, vec![pod("a", "1"), pod("b", "2")]);
        let mut object = pod("a", "1").into_object();
        object.metadata.deletion_timestamp = Some(crate::model::meta::Time(Timestamp::UNIX_EPOCH));
        fixture.note("1 is being deleted");
        fixture.apply(SourceName::Api, vec![Pod::from(object), pod("b", "2")]);
        fixture.note("2 was not being deleted: the reason of its removal is not known");
        fixture.apply(SourceName::Api, vec![]);
        fixture.check(expect![[r#"
            api: 1, 2 -> shown 1; shown 2; update 1; update 2
            (1 is being deleted)
            api: 1, 2 -> shown 1; update 1
            (2 was not being deleted: the reason of its removal is not known)
            api: none -> removed 1; removed 2; kill 1 with a grace period of 0 s; kill 2
        "#]]);
    }

    fn file_pod(name: &str, uid: &str) -> Pod {
        let mut object = pod(name, uid).into_object();
        let source = (crate::model::pod::CONFIG_SOURCE.to_owned(), "file".to_owned());
        object.metadata.annotations = Some([source].into());
        Pod::from(object)
    }

    #[test]
    fn cancelled_shutdown_readmits_static_pods() {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
        fixture.node.shutting_down = true;
        fixture.apply(SourceName::Api, vec![pod("a", "1")]);
        fixture.apply(SourceName::File, vec![file_pod("s", "2"), file_pod("t", "3")]);
        fixture.node.shutting_down = false;
        fixture.node.allocatable.pods = 1;
        fixture.over = ["2".into(), "3".into()].into();
        fixture.note("the shutdown is cancelled; there is room for one pod, and 1 has a controller");
        fixture.readmit();
        fixture.readmit();
        fixture.note_desired();
        fixture.check(expect![[r#"
            api: 1 -> shown 1; reject 1: NodeShutdown
            file: 2, 3 -> reject 2: NodeShutdown; reject 3: NodeShutdown
            (the shutdown is cancelled; there is room for one pod, and 1 has a controller)
            readmit -> forget status of 2; update 2; forget status of 3; reject 3: UnexpectedAdmissionError
            readmit -> nothing
            desired: 1 (rejected), 2, 3 (rejected)
        "#]]);
    }

    /// The agent was restarted during a shutdown of the machine, while pods run.
    #[test]
    fn running_pod_is_not_rejected_for_a_shutdown() {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
        fixture.node.shutting_down = true;
        fixture.running = ["1".into(), "3".into()].into();
        fixture.apply(SourceName::Api, vec![pod("a", "1"), pod("b", "2")]);
        fixture.node.allocatable.pods = 1;
        fixture.note("there is room for one pod: all other checks of admission still apply");
        fixture.apply(SourceName::File, vec![file_pod("s", "3")]);
        fixture.check(expect![[r#"
            api: 1, 2 -> shown 1; shown 2; update 1; reject 2: NodeShutdown
            (there is room for one pod: all other checks of admission still apply)
            file: 3 -> preempt 1: short of pods; update 3
        "#]]);
    }

    /// The agent was restarted while the node is short of memory.
    #[test]
    fn running_pod_is_not_rejected_for_a_pressure() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.pressures = vec!["MemoryPressure".to_owned()];
        fixture.running = ["1".into()].into();
        fixture.apply(SourceName::Api, vec![pod("a", "1"), pod("b", "2")]);
        fixture.check(expect![[r#"
            api: 1, 2 -> shown 1; shown 2; update 1; reject 2: Evicted
        "#]]);
    }

    /// A pod may run whose file was not written, or is damaged.
    #[test]
    fn pod_of_the_api_that_is_not_stored_is_not_stopped_before_the_server_has_delivered_its_pods() {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
        fixture.apply(SourceName::File, vec![]);
        let stored = PodSet { is_stored: true, ..PodSet::from(vec![pod("a", "1")]) };
        fixture.apply(SourceName::Api, stored);
        let from_source = |uid: &str, source| {
            let (uid, mut pod) = listed(uid, SandboxState::Ready);
            pod.source = source;
            (uid, pod)
        };
        let running = BTreeMap::from([
            from_source("1", Some(SourceName::Api)),
            from_source("2", Some(SourceName::Api)),
            from_source("3", Some(SourceName::File)),
            from_source("4", None),
        ]);
        fixture.clean_up(&running);
        assert!(fixture.core.sources_ready() && !fixture.core.knows_all_pods(), "what they left stays, too");
        // Another source changes nothing about that.
        fixture.apply(SourceName::File, vec![]);
        fixture.clean_up(&running);
        fixture.apply(SourceName::Api, vec![pod("a", "1")]);
        assert!(fixture.core.knows_all_pods());
        fixture.clean_up(&running);
        fixture.check(expect![[r#"
            file: none -> nothing
            api: 1 -> shown 1; update 1
            clean up, running: 1, 2, 3, 4 -> stop unknown 3
            file: none -> nothing
            clean up, running: 1, 2, 3, 4 -> stop unknown 3
            api: 1 -> shown 1
            clean up, running: 1, 2, 3, 4 -> stop unknown 2; stop unknown 3; stop unknown 4
        "#]]);
    }

    fn stored(pods: Vec<Pod>) -> PodSet {
        PodSet { is_stored: true, ..PodSet::from(pods) }
    }

    fn ranked(uid: &str, priority: Option<i32>, second: i64) -> Pod {
        let mut object = pod(uid, uid).into_object();
        object.spec.as_mut().unwrap().priority = priority;
        let created = Timestamp::from_second(second).unwrap();
        object.metadata.creation_timestamp = Some(crate::model::meta::Time(created));
        Pod::from(object)
    }

    #[test]
    fn stored_pods_are_admitted_in_the_order_of_their_priority_and_then_of_their_creation() {
        let pods = || {
            vec![
                ranked("old", None, 1),
                ranked("late", Some(5), 9),
                ranked("low", Some(-1), 0),
                ranked("early", Some(5), 2),
                ranked("top", Some(7), 10),
            ]
        };
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.allocatable.pods = 4;
        fixture.apply(SourceName::Api, stored(pods()));
        let updates = "update top; update early; update late; update old; postpone low: OutOfpods";
        assert!(fixture.record.ends_with(&format!("{updates}\n")), "{}", fixture.record);
        // With the API server, by their creation as ever.
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.apply(SourceName::Api, pods());
        let updates = "update low; update old; update early; update late; update top";
        assert!(fixture.record.ends_with(&format!("{updates}\n")), "{}", fixture.record);
    }

    fn selecting(uid: &str) -> Pod {
        let mut object = pod(uid, uid).into_object();
        object.spec.as_mut().unwrap().node_selector = Some([("rack".to_owned(), "7".to_owned())].into());
        Pod::from(object)
    }

    #[test]
    fn pod_that_a_stored_node_excludes_waits_and_is_admitted_by_the_node_of_the_server() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.apply(SourceName::Api, stored(vec![selecting("1"), selecting("2")]));
        assert!(fixture.core.is_postponed(&"1".into()) && fixture.core.admitted(&"1".into()).is_none());
        assert!(fixture.core.rejected(&"1".into()).is_none(), "its content stays");
        fixture.clean_up(&BTreeMap::new());
        fixture.note("the same set again, as when the server is held");
        fixture.apply(SourceName::Api, stored(vec![selecting("1"), selecting("2")]));
        fixture.note("the server has deleted 2, and its Node object has the label");
        fixture.node.labels.insert("rack".to_owned(), "7".to_owned());
        fixture.apply(SourceName::Api, vec![selecting("1")]);
        fixture.note_desired();
        fixture.check(expect![[r#"
            api: 1, 2 -> shown 1; shown 2; postpone 1: NodeAffinity; postpone 2: NodeAffinity
            clean up, running: none -> nothing
            (the same set again, as when the server is held)
            api: 1, 2 -> nothing
            (the server has deleted 2, and its Node object has the label)
            api: 1 -> removed 2; forget status of 2; shown 1; forget status of 1; update 1
            desired: 1
        "#]]);
    }

    #[test]
    fn pod_that_the_node_of_the_server_excludes_as_well_is_rejected() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.apply(SourceName::Api, stored(vec![selecting("1")]));
        fixture.apply(SourceName::Api, vec![selecting("1")]);
        assert!(!fixture.core.is_postponed(&"1".into()) && fixture.core.rejected(&"1".into()).is_some());
        fixture.check(expect![[r#"
            api: 1 -> shown 1; postpone 1: NodeAffinity
            api: 1 -> shown 1; forget status of 1; reject 1: NodeAffinity
        "#]]);
    }

    #[test]
    fn stored_pod_that_is_rejected_for_good_is_stopped_if_it_runs() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.shutting_down = true;
        fixture.apply(SourceName::Api, stored(vec![pod("a", "1")]));
        let from_api = |uid: &str| {
            let (uid, listed) = listed(uid, SandboxState::Ready);
            (uid, ListedPod { source: Some(SourceName::Api), ..listed })
        };
        fixture.clean_up(&BTreeMap::from([from_api("1"), from_api("2")]));
        fixture.check(expect![[r#"
            api: 1 -> shown 1; reject 1: NodeShutdown
            clean up, running: 1, 2 -> stop unknown 1
        "#]]);
    }

    #[test]
    fn pods_that_wait_for_room_are_admitted_by_priority_when_others_have_ended() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.allocatable.pods = 1;
        let misplaced = selecting("0");
        let pods = [ranked("1", Some(3), 1), ranked("2", Some(1), 1), ranked("3", Some(2), 9)];
        fixture.apply(SourceName::Api, stored([vec![misplaced], pods.into()].concat()));
        let readmit = |fixture: &mut Fixture| fixture.decide(&|_| false, Core::readmit_fitting);
        assert!(fixture.core.has_postponed() && readmit(&mut fixture).is_empty(), "the node is full");
        // Its status is terminal, but it still has its resources.
        fixture.over.insert("1".into());
        fixture.stopping.insert("1".into());
        assert!(readmit(&mut fixture).is_empty());
        fixture.stopping.clear();
        fixture.is_listed = false;
        assert!(readmit(&mut fixture).is_empty(), "what runs is not known");
        fixture.is_listed = true;
        assert_eq!(readmit(&mut fixture), ["forget status of 3", "update 3"]);
        assert!(readmit(&mut fixture).is_empty());
        fixture.over.insert("3".into());
        assert_eq!(readmit(&mut fixture), ["forget status of 2", "update 2"]);
        assert!(fixture.core.is_postponed(&"0".into()), "the stored Node object still excludes it");
    }

    /// The CPUs of a pod that has ended are released only then: a waiting pod would be refused for good.
    #[test]
    fn pods_wait_for_room_until_all_sources_have_delivered() {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::Http]);
        fixture.node.allocatable.pods = 1;
        fixture.apply(SourceName::Api, stored(vec![ranked("1", Some(3), 1), ranked("2", Some(1), 1)]));
        fixture.over.insert("1".into());
        let readmit = |fixture: &mut Fixture| fixture.decide(&|_| false, Core::readmit_fitting);
        assert!(readmit(&mut fixture).is_empty() && fixture.core.is_postponed(&"2".into()));
        fixture.apply(SourceName::Http, vec![]);
        assert_eq!(readmit(&mut fixture), ["forget status of 2", "update 2"]);
    }

    /// Refusals that do not depend on the Node object are final, and pods that run were admitted before.
    #[test]
    fn only_refusals_by_the_stored_node_of_pods_that_do_not_run_are_postponed() {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
        fixture.running.insert("1".into());
        fixture.node.shutting_down = true;
        fixture.apply(SourceName::Api, stored(vec![selecting("1"), pod("2", "2")]));
        fixture.note("before the first list any pod counts as running");
        (fixture.is_listed, fixture.node.shutting_down) = (false, false);
        fixture.running.insert("3".into());
        fixture.apply(SourceName::Api, stored(vec![selecting("1"), pod("2", "2"), selecting("3")]));
        fixture.check(expect![[r#"
            api: 1, 2 -> shown 1; shown 2; update 1; reject 2: NodeShutdown
            (before the first list any pod counts as running)
            api: 1, 2, 3 -> shown 3; postpone 3: NodeAffinity
        "#]]);
        fixture.is_listed = true;
        assert!(fixture.decide(&|_| false, Core::readmit_running).is_empty());
        let effects = fixture.decide(&|uid| uid.as_str() == "3", Core::readmit_running);
        assert_eq!(effects, ["forget status of 3", "update 3"]);
    }

    #[test]
    fn running_pod_without_worker_is_detected() {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
        fixture.apply(SourceName::File, vec![file_pod("s", "1")]);
        let running = |uid| BTreeMap::from([listed(uid, SandboxState::Ready)]);
        let gone = BTreeMap::from([listed("2", SandboxState::NotReady)]);
        for (listed, still_runs, expected) in [
            (running("1"), true, false),
            (running("2"), true, true),
            // An inspection after the list shows that it has ended.
            (running("2"), false, false),
            (gone, true, false),
        ] {
            let mut found = None;
            fixture.decide(&|_| still_runs, |_, world| {
                found = Some(is_running_without_worker(&listed, world));
                Vec::new()
            });
            assert_eq!(found, Some(expected), "{listed:?}");
        }
    }

    #[test]
    fn only_the_first_set_of_the_server_after_a_stored_one_follows_it() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        let follows = |fixture: &Fixture| [true, false].map(|stored| fixture.core.follows_stored_set(stored));
        fixture.apply(SourceName::Api, vec![pod("a", "1")]);
        assert_eq!(follows(&fixture), [false, false]);
        fixture.apply(SourceName::Api, PodSet { is_stored: true, ..PodSet::from(vec![pod("a", "1")]) });
        assert_eq!(follows(&fixture), [false, true]);
        fixture.apply(SourceName::Api, vec![pod("a", "1")]);
        assert_eq!(follows(&fixture), [false, false]);
    }

    #[test]
    fn static_pod_that_is_removed_while_pods_of_the_api_may_be_missing_is_known_to_be_gone() {
        let mut fixture = Fixture::new(&[SourceName::Api, SourceName::File]);
        let stored = |pods: Vec<Pod>| PodSet { is_stored: true, ..PodSet::from(pods) };
        let removed =
            |fixture: &Fixture| fixture.core.removed().iter().map(ToString::to_string).collect::<Vec<_>>();
        fixture.apply(SourceName::File, vec![pod("b", "2"), pod("c", "3")]);
        fixture.apply(SourceName::Api, stored(vec![pod("a", "1")]));
        fixture.apply(SourceName::File, vec![]);
        assert_eq!(removed(&fixture), ["2", "3"]);
        // It comes back with its UID.
        fixture.apply(SourceName::File, vec![pod("c", "3")]);
        assert_eq!(removed(&fixture), ["2"]);
        // Only the server decides about its pods.
        fixture.apply(SourceName::Api, stored(vec![]));
        assert_eq!(removed(&fixture), ["2"]);
        fixture.apply(SourceName::Api, vec![]);
        assert!(removed(&fixture).is_empty() && fixture.core.knows_all_pods());
    }

    #[test]
    fn disabled_restart_rules_are_removed() {
        let gates = RuleGates { rules: false, restart_all: false };
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.core = fixture.core.with_restart_rules(gates);
        let mut object = pod("a", "1").object().clone();
        object.spec.as_mut().unwrap().containers[0].restart_policy = Some("Never".to_owned());
        fixture.apply(SourceName::Api, vec![Pod::from(object)]);
        let admitted = fixture.core.admitted(&"1".into()).unwrap();
        assert_eq!(admitted.containers()[0].restart_policy, None);
    }

    #[test]
    fn rejected_pod_has_no_worker_and_is_stopped_if_it_runs() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.allocatable.pods = 1;
        fixture.apply(SourceName::Api, vec![pod("a", "1"), pod("b", "2")]);
        fixture.clean_up(&BTreeMap::from([listed("2", SandboxState::Ready)]));
        // The pod's status is final only now: a taint may have caused the rejection of a running
        // pod when the agent was restarted.
        fixture.clean_up(&BTreeMap::new());
        fixture.apply(SourceName::Api, vec![pod("a", "1")]);
        fixture.check(expect![[r#"
            api: 1, 2 -> shown 1; shown 2; update 1; reject 2: OutOfpods
            clean up, running: 2 -> stop unknown 2
            clean up, running: none -> finish status of 2
            api: 1 -> removed 2; forget status of 2
        "#]]);
    }

    #[test]
    fn mirror_pods_get_no_worker() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        let mut object = pod("web", "m1").object().clone();
        object.metadata.annotations =
            Some([("kubernetes.io/config.mirror".to_owned(), "s1".to_owned())].into());
        fixture.apply(SourceName::Api, vec![Pod::from(object)]);
        fixture.note_desired();
        assert_eq!(fixture.core.mirrors().len(), 1);
        fixture.apply(SourceName::Api, vec![]);
        assert!(fixture.core.mirrors().is_empty());
        fixture.check(expect![[r#"
            api: m1 -> shown m1
            desired: none
            api: none -> removed m1
        "#]]);
    }

    #[test]
    fn deleted_rejected_pod_is_final_when_no_container_of_it_runs() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.allocatable.pods = 0;
        fixture.apply(SourceName::Api, vec![pod("a", "1")]);
        let mut object = pod("a", "1").object().clone();
        object.metadata.deletion_timestamp = Some(crate::model::meta::Time(Timestamp::UNIX_EPOCH));
        fixture.note("it is being deleted");
        fixture.apply(SourceName::Api, vec![Pod::from(object)]);
        fixture.clean_up(&BTreeMap::from([listed("1", SandboxState::Ready)]));
        fixture.clean_up(&BTreeMap::new());
        fixture.check(expect![[r#"
            api: 1 -> shown 1; reject 1: OutOfpods
            (it is being deleted)
            api: 1 -> shown 1
            clean up, running: 1 -> stop unknown 1
            clean up, running: none -> finish status of 1
        "#]]);
    }

    /// It ran before a restart of the machine. Its devices could be allocated to another pod.
    #[test]
    fn rejected_pod_is_final_when_its_claims_are_unprepared() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.allocatable.pods = 0;
        fixture.apply(SourceName::Api, vec![pod("a", "1")]);
        fixture.claiming.insert(pod("a", "1").uid().clone());
        fixture.clean_up(&BTreeMap::new());
        fixture.note("its claims are unprepared");
        fixture.claiming.clear();
        fixture.clean_up(&BTreeMap::new());
        fixture.check(expect![[r#"
            api: 1 -> shown 1; reject 1: OutOfpods
            clean up, running: none -> nothing
            (its claims are unprepared)
            clean up, running: none -> finish status of 1
        "#]]);
    }

    #[test]
    fn terminal_phase_set_by_another_client_updates_the_worker() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.apply(SourceName::Api, vec![pod("a", "1")]);
        for phase in ["Running", "Failed"] {
            let mut object = pod("a", "1").object().clone();
            object.status.get_or_insert_default().phase = Some(phase.to_owned());
            fixture.note(phase);
            fixture.apply(SourceName::Api, vec![Pod::from(object)]);
        }
        fixture.check(expect![[r#"
            api: 1 -> shown 1; update 1
            (Running)
            api: 1 -> shown 1
            (Failed)
            api: 1 -> shown 1; update 1
        "#]]);
    }

    /// After a restart, the agent knows phases only from the API server.
    #[test]
    fn completed_pods_use_no_resources() {
        let mut fixture = Fixture::new(&[SourceName::Api]);
        fixture.node.allocatable.pods = 1;
        let mut done = pod("a", "1").object().clone();
        done.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
        fixture.apply(SourceName::Api, vec![Pod::from(done), pod("b", "2")]);
        fixture.check(expect![[r#"
            api: 1, 2 -> shown 1; shown 2; update 1; update 2
        "#]]);
    }
}
