//! What to do about each event (pure; Go: HandlePod{Additions,Updates,Removes,Cleanups}).

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::model::ids::PodUid;
use crate::model::pod::{Pod, SourceName};
use crate::model::reasons;
use crate::model::restart::RuleGates;
use crate::model::runtime::ListedPod;
use crate::pods::admission::{self, Admission, NodeView};
use crate::pods::allocation::{Pending, PodResources};
use crate::pods::lifecycle::Kill;
use crate::pods::plan::resize::Rules;
use crate::sources::merge::{Merge, Op, PodSet, Update};

/// What the thread has to do, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Create the pod's worker or hand it the new version.
    Update(Pod),
    /// Refuse a pod for good.
    Reject {
        /// The pod.
        pod: Pod,
        /// CamelCase reason.
        reason: Cow<'static, str>,
        /// For people.
        message: String,
    },
    /// Stop a pod.
    Kill(PodUid, Kill),
    /// Stop a pod to make room for a critical one.
    Preempt {
        /// Who has to go.
        victim: Pod,
        /// What is short.
        resource: String,
    },
    /// Stop a pod that only the runtime knows.
    StopUnknown(ListedPod),
    /// The pod gets the resources that it asks for now.
    Resize {
        /// The pod.
        pod: Pod,
        /// What made it be looked at.
        trigger: &'static str,
    },
    /// It does not get them.
    ResizePending {
        /// The pod, with what it asks for.
        pod: Pod,
        /// For how long.
        reason: Pending,
        /// For people.
        message: String,
        /// Whose refusal it is: a reason of admission, or the word in the metric of those that
        /// are never granted.
        detail: Cow<'static, str>,
    },
    /// It does not want them any more.
    ResizeReverted(Pod),
    /// Forget the status of a pod that is gone.
    Forget(PodUid),
    /// This is how the API server shows a pod, or the mirror of a static one, now.
    Shown(Pod),
    /// The API server shows it no more.
    NotShown(Pod),
    /// A refused pod of which nothing runs any more: its end may be told, its object may go.
    Finish(Pod),
    /// An object of a source was left out.
    LeftOut {
        /// The object.
        pod: Pod,
        /// For people.
        message: String,
    },
}

pub(super) struct Desired {
    /// As its source has it.
    pub(super) pod: Pod,
    /// The same with the resources that it was granted: so it is to run.
    pub(super) granted: Pod,
    pub(super) rejected: bool,
    /// It was refused because the machine shuts down, and for nothing else.
    pub(super) too_late: bool,
}

/// What the core may ask about the rest of the world.
pub struct World<'a> {
    /// Whether a worker, or the memory of one, exists.
    pub has_worker: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the newest look at the pod still showed something running.
    pub still_runs: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the pod's last status is Failed or Succeeded.
    pub is_over: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the books on the pod are closed: its last status is stored.
    pub is_closed: &'a dyn Fn(&PodUid) -> bool,
    /// Whether the readiness gates of the pod, as the API server shows it now, speak against
    /// its last status.
    pub gates_differ: &'a dyn Fn(&Pod) -> bool,
    /// The pod with the resources that it was granted in an earlier life of the agent.
    pub granted: &'a dyn Fn(&Pod) -> Pod,
    /// The node, for admission.
    pub node: &'a NodeView,
}

/// Whether something runs that has no worker: its source may still name it.
#[must_use]
pub fn has_strangers(listed: &BTreeMap<PodUid, ListedPod>, world: &World<'_>) -> bool {
    let mut running = listed.values().filter(|pod| pod.is_running());
    running.any(|pod| !(world.has_worker)(&pod.uid) && (world.still_runs)(&pod.uid))
}

/// The desired pods and who has spoken.
pub struct Core {
    configured: BTreeSet<SourceName>,
    seen: BTreeSet<SourceName>,
    merge: Merge,
    restart_rules: RuleGates,
    pub(super) resize_rules: Rules,
    pub(super) desired: BTreeMap<PodUid, Desired>,
    /// Those that want other resources than they have, in the order in which they began to.
    pub(super) waiting: Vec<PodUid>,
    /// What the API server shows of static pods: objects for others to see, not to run.
    mirrors: BTreeMap<PodUid, Pod>,
}

impl Core {
    /// A node on which these sources are configured.
    #[must_use]
    pub fn new(configured: BTreeSet<SourceName>) -> Self {
        Core {
            configured,
            seen: BTreeSet::new(),
            merge: Merge::default(),
            restart_rules: RuleGates::default(),
            resize_rules: Rules::default(),
            desired: BTreeMap::new(),
            waiting: Vec::new(),
            mirrors: BTreeMap::new(),
        }
    }

    /// Restart rules that are switched off have no effect, whoever wrote them.
    #[must_use]
    pub fn with_restart_rules(self, restart_rules: RuleGates) -> Self {
        Core { restart_rules, ..self }
    }

    /// Resizes that the node's configuration rules out are not carried out.
    #[must_use]
    pub fn with_resize_rules(self, resize_rules: Rules) -> Self {
        Core { resize_rules, ..self }
    }

    /// Whether every configured source has spoken.
    #[must_use]
    pub fn sources_ready(&self) -> bool {
        self.configured.is_subset(&self.seen)
    }

    /// Whether a source names the pod.
    #[must_use]
    pub fn wants(&self, uid: &PodUid) -> bool {
        self.desired.contains_key(uid)
    }

    /// Every desired pod, and whether it was refused.
    pub fn desired(&self) -> impl Iterator<Item = (&PodUid, &Pod, bool)> {
        self.desired.iter().map(|(uid, desired)| (uid, &desired.pod, desired.rejected))
    }

    /// The pod of this UID, if it was refused.
    #[must_use]
    pub fn refused(&self, uid: &PodUid) -> Option<&Pod> {
        self.desired.get(uid).filter(|desired| desired.rejected).map(|desired| &desired.pod)
    }

    /// The desired pod of this UID with the resources that it was granted, unless it was refused.
    #[must_use]
    pub fn admitted(&self, uid: &PodUid) -> Option<&Pod> {
        self.desired.get(uid).filter(|desired| !desired.rejected).map(|desired| &desired.granted)
    }

    /// The mirrors of static pods that the API server shows.
    #[must_use]
    pub fn mirrors(&self) -> &BTreeMap<PodUid, Pod> {
        &self.mirrors
    }

    /// The mirror of a static pod: it has the same name, and a UID of its own.
    #[must_use]
    pub fn mirror_of(&self, pod: &Pod) -> Option<&Pod> {
        let name = pod.full_name();
        self.mirrors.values().find(|mirror| mirror.full_name() == name)
    }

    /// A source handed over its complete current set.
    pub fn source_spoke(
        &mut self,
        source: SourceName,
        set: impl Into<PodSet>,
        now: Timestamp,
        world: &World<'_>,
    ) -> Vec<Effect> {
        let PodSet { pods, incarnations } = set.into();
        let pods = pods.into_iter().map(|pod| self.restart_rules.applied_to(pod)).collect();
        let updates = self.merge.apply(source, PodSet { pods, incarnations }, now);
        let mut effects: Vec<Effect> = self
            .merge
            .take_rejected()
            .into_iter()
            .map(|rejected| Effect::LeftOut { pod: rejected.pod, message: rejected.message })
            .collect();
        for update in updates {
            self.route(update, world, &mut effects);
        }
        let ready = self.sources_ready();
        self.seen.insert(source);
        if !ready {
            effects.extend(self.retry_resizes("pods_added", world));
        }
        effects
    }

    fn route(&mut self, mut update: Update, world: &World<'_>, effects: &mut Vec<Effect>) {
        if update.source == SourceName::Api {
            // Before anything is done about a pod: whoever tells of it knows it then.
            for pod in &update.pods {
                effects.push(match update.op {
                    Op::Remove => Effect::NotShown(pod.clone()),
                    Op::Add | Op::Update | Op::Delete | Op::Reconcile => Effect::Shown(pod.clone()),
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
                pods.sort_by_key(|pod| pod.object().metadata.creation_timestamp.as_ref().map(|t| t.0));
                let waiting = self.waiting.len();
                for pod in pods {
                    self.add(pod, world, effects);
                }
                if self.waiting.len() > waiting {
                    effects.extend(self.retry_resizes("pods_added", world));
                }
            }
            Op::Update | Op::Delete => {
                let uids: Vec<PodUid> = update.pods.iter().map(|pod| pod.uid().clone()).collect();
                let mut resized = false;
                for pod in update.pods {
                    resized |= self.replace(pod);
                }
                // First, so that the new version finds its conditions.
                if resized {
                    effects.extend(self.retry_resizes("pod_updated", world));
                }
                effects.extend(uids.iter().filter_map(|uid| self.admitted(uid)).cloned().map(Effect::Update));
            }
            Op::Remove => {
                for pod in update.pods {
                    self.desired.remove(pod.uid());
                    self.waiting.retain(|waiting| waiting != pod.uid());
                    effects.push(if (world.has_worker)(pod.uid()) {
                        Effect::Kill(pod.uid().clone(), Kill::default())
                    } else {
                        Effect::Forget(pod.uid().clone())
                    });
                }
                effects.extend(self.retry_resizes("pods_removed", world));
            }
            Op::Reconcile => {
                for pod in update.pods {
                    let Some(desired) = self.desired.get_mut(pod.uid()) else { continue };
                    desired.granted = PodResources::of(&desired.granted).applied_to(&pod);
                    desired.pod = pod.clone();
                    // Conditions that others set decide over readiness; and somebody else
                    // may have declared the pod over.
                    let gated = (world.gates_differ)(&pod);
                    let ended = pod.is_over() && !(world.is_over)(pod.uid());
                    if !desired.rejected && (gated || ended) {
                        effects.push(Effect::Update(desired.granted.clone()));
                    }
                }
            }
        }
    }

    /// The pods that take room here, with the resources that they were granted.
    pub(super) fn active(&self, world: &World<'_>) -> Vec<Pod> {
        let takes_room =
            |one: &&Desired| !one.rejected && !one.pod.is_over() && !(world.is_over)(one.pod.uid());
        self.desired.values().filter(takes_room).map(|one| one.granted.clone()).collect()
    }

    /// The machine goes on: static pods that were refused for its shutdown are judged anew.
    /// Nobody else would make them again.
    ///
    /// DIFFERS: the Go kubelet's stay refused until it is restarted.
    pub fn readmit(&mut self, world: &World<'_>) -> Vec<Effect> {
        let refused = self.desired.iter().filter(|(_, one)| one.too_late && one.pod.is_static());
        let refused: Vec<PodUid> = refused.map(|(uid, _)| uid.clone()).collect();
        let mut effects = Vec::new();
        for uid in refused {
            let Some(one) = self.desired.remove(&uid) else { continue };
            effects.push(Effect::Forget(uid));
            self.add(one.pod, world, &mut effects);
        }
        effects
    }

    fn add(&mut self, pod: Pod, world: &World<'_>, effects: &mut Vec<Effect>) {
        let uid = pod.uid().clone();
        let granted = (world.granted)(&pod);
        let active = self.active(world);
        // DIFFERS: the Go kubelet refuses what runs, too, if the shutdown began before it heard
        // of the pod; that ends then without the time that it was to have.
        let running = world.node.shutting_down && (world.still_runs)(&uid);
        let node = if running {
            Cow::Owned(NodeView { shutting_down: false, ..world.node.clone() })
        } else {
            Cow::Borrowed(world.node)
        };
        let verdict =
            if pod.is_over() { Admission::Admit } else { admission::admit(&granted, &active, &node) };
        let (mut rejected, mut too_late) = (false, false);
        match verdict {
            Admission::Admit => effects.push(Effect::Update(granted.clone())),
            Admission::Reject { reason, message } => {
                rejected = true;
                too_late = reason == reasons::NODE_SHUTDOWN;
                effects.push(Effect::Reject { pod: pod.clone(), reason, message });
            }
            Admission::Preempt { victims, resource } => {
                let chosen = active.iter().filter(|other| victims.contains(other.uid()));
                effects.extend(
                    chosen
                        .map(|victim| Effect::Preempt { victim: victim.clone(), resource: resource.clone() }),
                );
                effects.push(Effect::Update(granted.clone()));
            }
        }
        if !rejected && granted != pod {
            self.waiting.push(uid.clone());
        }
        self.desired.insert(uid, Desired { pod, granted, rejected, too_late });
    }

    /// Compares with what runs: stops pods that nobody wants, gives wanted pods a worker.
    /// Before all sources have spoken only pods that were replaced are known to be unwanted.
    pub fn clean_up(&self, listed: &BTreeMap<PodUid, ListedPod>, world: &World<'_>) -> Vec<Effect> {
        let ready = self.sources_ready();
        let unknown = listed
            .values()
            .filter(|pod| pod.is_running() && !(world.has_worker)(&pod.uid))
            .filter(|pod| self.admitted(&pod.uid).is_none() && (world.still_runs)(&pod.uid))
            .filter(|pod| ready || self.is_replaced(pod))
            .map(|pod| Effect::StopUnknown(pod.clone()));
        let workerless = self
            .desired
            .values()
            .filter(|desired| ready && !world.node.shutting_down && !desired.rejected)
            .filter(|desired| !(world.has_worker)(desired.pod.uid()))
            .map(|desired| Effect::Update(desired.granted.clone()));
        let refused = self
            .desired
            .values()
            .filter(|desired| desired.rejected && !(world.is_closed)(desired.pod.uid()))
            .filter(|desired| !listed.get(desired.pod.uid()).is_some_and(ListedPod::is_running))
            .filter(|desired| !(world.still_runs)(desired.pod.uid()))
            .map(|desired| Effect::Finish(desired.pod.clone()));
        unknown.chain(workerless).chain(refused).collect()
    }

    /// Whether the source of `old`, which runs, now has another static pod under its name.
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
    use super::*;
    use crate::model::runtime::{ListedSandbox, SandboxState};
    use serde_json::json;
    use std::cell::RefCell;

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

    /// Runs the core with a set of workers that follows the effects.
    struct Bench {
        core: Core,
        workers: RefCell<BTreeSet<PodUid>>,
        /// What is seen to run while a source speaks.
        running: BTreeSet<PodUid>,
        node: NodeView,
    }

    impl Bench {
        fn new(sources: &[SourceName]) -> Self {
            let mut node = NodeView::default();
            node.allocatable.pods = 10;
            let core = Core::new(sources.iter().copied().collect());
            Bench { core, workers: RefCell::default(), running: BTreeSet::new(), node }
        }

        fn ask(
            &mut self,
            still_runs: &dyn Fn(&PodUid) -> bool,
            decide: impl FnOnce(&mut Core, &World<'_>) -> Vec<Effect>,
        ) -> Vec<String> {
            let world = World {
                has_worker: &|uid| self.workers.borrow().contains(uid),
                still_runs,
                is_over: &|_| false,
                is_closed: &|_| false,
                gates_differ: &|_| false,
                granted: &Pod::clone,
                node: &self.node,
            };
            let effects = decide(&mut self.core, &world);
            self.follow(&effects)
        }

        fn speak(&mut self, source: SourceName, set: impl Into<PodSet>) -> Vec<String> {
            let running = self.running.clone();
            self.ask(&|uid| running.contains(uid), |core, world| {
                core.source_spoke(source, set, Timestamp::now(), world)
            })
        }

        fn clean_up(&mut self, listed: &BTreeMap<PodUid, ListedPod>) -> Vec<String> {
            let still_runs = |uid: &PodUid| listed.get(uid).is_some_and(ListedPod::is_running);
            self.ask(&still_runs, |core, world| core.clean_up(listed, world))
        }

        fn readmit(&mut self) -> Vec<String> {
            self.ask(&|_| false, Core::readmit)
        }

        fn follow(&self, effects: &[Effect]) -> Vec<String> {
            effects
                .iter()
                .map(|effect| match effect {
                    Effect::Update(pod) => {
                        self.workers.borrow_mut().insert(pod.uid().clone());
                        format!("update {}", pod.uid())
                    }
                    Effect::Reject { pod, reason, .. } => format!("reject {} {reason}", pod.uid()),
                    Effect::Kill(uid, _) => format!("kill {uid}"),
                    Effect::Preempt { victim, resource } => format!("preempt {} {resource}", victim.uid()),
                    Effect::StopUnknown(pod) => format!("stop {}", pod.uid),
                    Effect::Forget(uid) => format!("forget {uid}"),
                    Effect::Shown(pod) => format!("shown {}", pod.uid()),
                    Effect::NotShown(pod) => format!("not shown {}", pod.uid()),
                    Effect::Finish(pod) => format!("finish {}", pod.uid()),
                    Effect::LeftOut { pod, .. } => format!("left out {}", pod.uid()),
                    Effect::Resize { pod, trigger } => format!("resize {} {trigger}", pod.uid()),
                    Effect::ResizePending { pod, reason, .. } => {
                        format!("{} {}", reason.as_str(), pod.uid())
                    }
                    Effect::ResizeReverted(pod) => format!("reverted {}", pod.uid()),
                })
                .collect()
        }
    }

    #[test]
    fn an_edited_static_pod_is_removed_before_its_successor_is_added() {
        let mut bench = Bench::new(&[SourceName::File]);
        assert_eq!(bench.speak(SourceName::File, vec![pod("web", "1")]), ["update 1"]);
        assert_eq!(bench.speak(SourceName::File, vec![pod("web", "1")]), Vec::<String>::new());
        assert_eq!(bench.speak(SourceName::File, vec![pod("web", "2")]), ["kill 1", "update 2"]);
        assert!(bench.core.wants(&"2".into()) && !bench.core.wants(&"1".into()));
    }

    #[test]
    fn another_incarnation_of_a_pod_is_stopped_and_started() {
        let mut bench = Bench::new(&[SourceName::File]);
        let web =
            |number| PodSet { pods: vec![pod("web", "1")], incarnations: [("1".into(), number)].into() };
        assert_eq!(bench.speak(SourceName::File, web(1)), ["update 1"]);
        assert_eq!(bench.speak(SourceName::File, web(1)), Vec::<String>::new());
        assert_eq!(bench.speak(SourceName::File, web(2)), ["kill 1", "update 1"]);
        assert!(bench.core.wants(&"1".into()));
    }

    #[test]
    fn nothing_unknown_is_stopped_before_all_sources_spoke() {
        let mut bench = Bench::new(&[SourceName::File, SourceName::Http]);
        let running = BTreeMap::from([listed("9", SandboxState::Ready), listed("8", SandboxState::NotReady)]);
        bench.speak(SourceName::File, vec![]);
        assert!(bench.clean_up(&running).is_empty());
        bench.speak(SourceName::Http, vec![]);
        assert_eq!(bench.clean_up(&running), ["stop 9"]);
    }

    #[test]
    fn what_was_replaced_is_stopped_though_another_source_is_silent() {
        let mut bench = Bench::new(&[SourceName::File, SourceName::Http]);
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
        assert_eq!(bench.speak(SourceName::File, vec![pod("web", "9")]), ["update 9"]);
        assert_eq!(bench.clean_up(&running), ["stop 1"]);
        // The other source's own turn: now everything else is known to be unwanted.
        bench.speak(SourceName::Http, vec![]);
        assert_eq!(bench.clean_up(&running), ["stop 1", "stop 2", "stop 3", "stop 4", "stop 5"]);
        // A successor that was refused replaces nothing.
        let mut bench = Bench::new(&[SourceName::File, SourceName::Http]);
        bench.node.allocatable.pods = 0;
        bench.speak(SourceName::File, vec![pod("web", "9")]);
        assert_eq!(bench.clean_up(&running), ["finish 9"]);
    }

    #[test]
    fn a_pod_that_makes_room_is_told_for_what() {
        let mut bench = Bench::new(&[SourceName::Api, SourceName::File]);
        bench.node.allocatable.pods = 1;
        bench.speak(SourceName::Api, vec![pod("a", "1")]);
        assert_eq!(bench.speak(SourceName::File, vec![pod("s", "2")]), ["preempt 1 pods", "update 2"]);
    }

    fn of_file(name: &str, uid: &str) -> Pod {
        let mut object = pod(name, uid).into_object();
        let source = (crate::model::pod::CONFIG_SOURCE.to_owned(), "file".to_owned());
        object.metadata.annotations = Some([source].into());
        Pod::from(object)
    }

    #[test]
    fn a_cancelled_shutdown_takes_the_refusals_of_static_pods_back() {
        let mut bench = Bench::new(&[SourceName::Api, SourceName::File]);
        bench.node.shutting_down = true;
        bench.speak(SourceName::Api, vec![pod("a", "1")]);
        let refused = bench.speak(SourceName::File, vec![of_file("s", "2"), of_file("t", "3")]);
        assert_eq!(refused, ["reject 2 NodeShutdown", "reject 3 NodeShutdown"]);
        // For another reason now; its owner makes the other one anew, elsewhere perhaps.
        bench.node.shutting_down = false;
        bench.node.allocatable.pods = 1;
        assert_eq!(
            bench.readmit(),
            ["forget 2", "update 2", "forget 3", "reject 3 UnexpectedAdmissionError"]
        );
        assert_eq!(bench.readmit(), Vec::<String>::new());
        assert!(bench.core.refused(&"1".into()).is_some() && bench.core.admitted(&"2".into()).is_some());
    }

    /// The agent was started again just before.
    #[test]
    fn what_runs_is_not_refused_for_a_shutdown() {
        let mut bench = Bench::new(&[SourceName::Api, SourceName::File]);
        bench.node.shutting_down = true;
        bench.running = ["1".into(), "3".into()].into();
        assert_eq!(
            bench.speak(SourceName::Api, vec![pod("a", "1"), pod("b", "2")]),
            ["shown 1", "shown 2", "update 1", "reject 2 NodeShutdown"]
        );
        bench.node.allocatable.pods = 1;
        // Everything else counts.
        let told = bench.speak(SourceName::File, vec![of_file("s", "3")]);
        assert_eq!(told, ["preempt 1 pods", "update 3"]);
    }

    #[test]
    fn strangers_run_and_have_no_worker() {
        let mut bench = Bench::new(&[SourceName::Api, SourceName::File]);
        bench.speak(SourceName::File, vec![of_file("s", "1")]);
        let running = |uid| BTreeMap::from([listed(uid, SandboxState::Ready)]);
        let gone = BTreeMap::from([listed("2", SandboxState::NotReady)]);
        for (listed, still_runs, expected) in [
            (running("1"), true, false),
            (running("2"), true, true),
            // A worker's look was newer.
            (running("2"), false, false),
            (gone, true, false),
        ] {
            let mut found = None;
            bench.ask(&|_| still_runs, |_, world| {
                found = Some(has_strangers(&listed, world));
                Vec::new()
            });
            assert_eq!(found, Some(expected), "{listed:?}");
        }
    }

    #[test]
    fn rules_that_are_switched_off_have_no_effect() {
        let gates = RuleGates { rules: false, restart_all: false };
        let mut bench = Bench::new(&[SourceName::Api]);
        bench.core = bench.core.with_restart_rules(gates);
        let mut object = pod("a", "1").object().clone();
        object.spec.as_mut().unwrap().containers[0].restart_policy = Some("Never".to_owned());
        bench.speak(SourceName::Api, vec![Pod::from(object)]);
        let kept = bench.core.admitted(&"1".into()).unwrap();
        assert_eq!(kept.containers()[0].restart_policy, None);
    }

    #[test]
    fn a_rejected_pod_gets_no_worker_and_what_runs_of_it_is_stopped() {
        let mut bench = Bench::new(&[SourceName::Api]);
        bench.node.allocatable.pods = 1;
        assert_eq!(
            bench.speak(SourceName::Api, vec![pod("a", "1"), pod("b", "2")]),
            ["shown 1", "shown 2", "update 1", "reject 2 OutOfpods"]
        );
        let running = BTreeMap::from([listed("2", SandboxState::Ready)]);
        assert_eq!(bench.clean_up(&running), ["stop 2"]);
        // Not before that its end is told: a taint may have put it out at a start of the agent.
        assert_eq!(bench.clean_up(&BTreeMap::new()), ["finish 2"]);
        assert_eq!(bench.speak(SourceName::Api, vec![pod("a", "1")]), ["not shown 2", "forget 2"]);
    }

    #[test]
    fn mirrors_are_shown_and_never_run() {
        let mut bench = Bench::new(&[SourceName::Api]);
        let mut object = pod("web", "m1").object().clone();
        object.metadata.annotations =
            Some([("kubernetes.io/config.mirror".to_owned(), "s1".to_owned())].into());
        let mirror = Pod::from(object);
        assert_eq!(bench.speak(SourceName::Api, vec![mirror]), ["shown m1"]);
        assert!(!bench.core.wants(&"m1".into()) && bench.core.mirrors().len() == 1);
        assert_eq!(bench.speak(SourceName::Api, vec![]), ["not shown m1"]);
        assert!(bench.core.mirrors().is_empty());
    }

    #[test]
    fn a_refused_pod_that_is_deleted_is_finished_once_nothing_of_it_runs() {
        let mut bench = Bench::new(&[SourceName::Api]);
        bench.node.allocatable.pods = 0;
        bench.speak(SourceName::Api, vec![pod("a", "1")]);
        let mut object = pod("a", "1").object().clone();
        object.metadata.deletion_timestamp = Some(crate::model::meta::Time(Timestamp::UNIX_EPOCH));
        assert_eq!(bench.speak(SourceName::Api, vec![Pod::from(object)]), ["shown 1"]);
        let running = BTreeMap::from([listed("1", SandboxState::Ready)]);
        assert_eq!(bench.clean_up(&running), ["stop 1"]);
        assert_eq!(bench.clean_up(&BTreeMap::new()), ["finish 1"]);
    }

    #[test]
    fn a_pod_that_somebody_declared_over_is_told_to_its_worker() {
        let mut bench = Bench::new(&[SourceName::Api]);
        assert_eq!(bench.speak(SourceName::Api, vec![pod("a", "1")]), ["shown 1", "update 1"]);
        let shown = |phase: &str| {
            let mut object = pod("a", "1").object().clone();
            object.status.get_or_insert_default().phase = Some(phase.to_owned());
            vec![Pod::from(object)]
        };
        assert_eq!(bench.speak(SourceName::Api, shown("Running")), ["shown 1"]);
        assert_eq!(bench.speak(SourceName::Api, shown("Failed")), ["shown 1", "update 1"]);
    }

    /// A restarted agent knows no statuses yet; what the API server shows as over takes no room.
    #[test]
    fn completed_pods_leave_their_place_to_those_that_run() {
        let mut bench = Bench::new(&[SourceName::Api]);
        bench.node.allocatable.pods = 1;
        let mut done = pod("a", "1").object().clone();
        done.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
        assert_eq!(
            bench.speak(SourceName::Api, vec![Pod::from(done), pod("b", "2")]),
            ["shown 1", "shown 2", "update 1", "update 2"]
        );
    }
}
