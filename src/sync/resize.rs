//! Decides which pods are granted a resize, and when. The only side effect is a metric.

use crate::model::api::Container;
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::quantity::{Amount, amount};
use crate::pods::admission;
use crate::pods::allocation::{PendingReason, PodResources};
use crate::pods::plan::resize::{Decision, Resource, decide, differs, retry_rank};

use super::core::{Core, Desired, Effect, World};

impl Core {
    /// Whether any pod waits for resources that it desires and was not granted.
    #[must_use]
    pub(crate) fn has_deferred_resizes(&self) -> bool {
        !self.deferred_resizes.is_empty()
    }

    /// Whether the pod was granted the resources that it desires.
    #[must_use]
    pub(crate) fn has_desired_resources(&self, uid: &PodUid) -> bool {
        self.desired.get(uid).is_none_or(|desired| !differs(&desired.granted, &desired.pod))
    }

    /// Applies a new version of a pod, which keeps the resources that it was granted. Returns
    /// whether the desired resources have changed.
    pub(super) fn replace(&mut self, pod: Pod) -> bool {
        let uid = pod.uid().clone();
        let Some(desired) = self.desired.get_mut(&uid) else {
            self.desired.insert(uid, Desired::new(pod.clone(), pod));
            return false;
        };
        let resized = differs(&desired.pod, &pod) && !desired.rejected;
        if resized {
            count_requested(&desired.pod, &pod);
        }
        desired.granted = PodResources::from_pod(&desired.granted).applied_to(&pod);
        desired.pod = pod;
        if resized && !self.deferred_resizes.contains(&uid) {
            self.deferred_resizes.push(uid);
        }
        resized
    }

    /// Decides each deferred resize. `trigger` is the reason of this retry, as a label of the
    /// metric.
    pub(crate) fn retry_resizes(&mut self, trigger: &'static str, world: &World<'_>) -> Vec<Effect> {
        if self.deferred_resizes.is_empty() || !self.sources_ready() {
            return Vec::new();
        }
        let mut deferred: Vec<(PodUid, Pod, Pod)> = std::mem::take(&mut self.deferred_resizes)
            .into_iter()
            .filter_map(|uid| {
                let desired = self.desired.get(&uid)?;
                let runs = !desired.rejected && !desired.pod.is_deleting() && !(world.is_over)(&uid);
                (runs && !desired.pod.is_over()).then(|| (uid, desired.granted.clone(), desired.pod.clone()))
            })
            .collect();
        self.deferred_resizes = deferred.iter().map(|(uid, ..)| uid.clone()).collect();
        deferred.sort_by_key(|(_, granted, desired)| retry_rank(granted, desired));
        let mut effects = Vec::new();
        for (uid, granted, desired) in deferred {
            let active_pods = self.active_pods(world);
            // The pod gets its resources at once, so there must be room now, too.
            let fits = |pod: &Pod| {
                admission::admit_resize(pod, &active_pods.later, world.node)?;
                admission::admit_resize(pod, &active_pods.now, world.node)
            };
            let pending = |reason, message, detail| Effect::ResizePending {
                pod: desired.clone(),
                reason,
                message,
                detail,
            };
            let effect = match decide(&granted, &desired, self.resize_rules, &fits) {
                Decision::Unchanged => Effect::ResizeReverted(desired),
                Decision::Granted => {
                    if let Some(entry) = self.desired.get_mut(&uid) {
                        entry.granted = desired.clone();
                    }
                    Effect::Resize { pod: desired, trigger }
                }
                Decision::Deferred((reason, message)) => {
                    effects.push(pending(PendingReason::Deferred, message, reason));
                    continue;
                }
                Decision::Infeasible { message, detail } => {
                    pending(PendingReason::Infeasible, message, detail.into())
                }
            };
            self.deferred_resizes.retain(|other| *other != uid);
            effects.push(effect);
        }
        effects
    }
}

/// Counts the changes of the desired resources of containers.
fn count_requested(before: &Pod, now: &Pod) {
    for container in now.all_containers() {
        let Some(old) = before.all_containers().find(|old| old.name == container.name) else { continue };
        for resource in Resource::ALL {
            for requirement in ["requests", "limits"] {
                let value = |container| amount_of(container, requirement, resource.name());
                let operation = match (value(old), value(container)) {
                    (old, new) if old == new => continue,
                    (None, Some(_)) => "add",
                    (Some(_), None) => "remove",
                    (old, new) if old < new => "increase",
                    _ => "decrease",
                };
                metrics::REQUESTED_RESIZES.inc([resource.name(), requirement, operation]);
            }
        }
    }
}

fn amount_of(container: &Container, requirement: &str, resource: &str) -> Option<Amount> {
    let own = container.resources.as_ref()?;
    let map = if requirement == "limits" { &own.limits } else { &own.requests };
    map.as_ref()?.get(resource).map(amount).filter(|amount| !amount.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::node::NodeView;
    use crate::model::pod::SourceName;
    use crate::pods::plan::resize::ResizeRules;
    use crate::sources::merge::PodSet;
    use jiff::Timestamp;
    use serde_json::json;
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    fn pod(uid: &str, cpu: &str, generation: i64) -> Pod {
        let resources =
            json!({"requests": {"cpu": cpu, "memory": "1Mi"}, "limits": {"cpu": cpu, "memory": "1Mi"}});
        let object = json!({
            "metadata": {"name": uid, "namespace": "default", "uid": uid, "generation": generation},
            "spec": {"containers": [{"name": "c", "image": "i", "resources": resources}]},
        });
        Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
    }

    fn cpu_of(pod: &Pod) -> String {
        let limits = pod.containers()[0].resources.as_ref().unwrap().limits.as_ref().unwrap();
        limits["cpu"].0.clone()
    }

    /// A node with four CPUs and the pods of one source.
    struct Fixture {
        source: SourceName,
        /// The pods that have a worker.
        workers: BTreeSet<PodUid>,
        core: Core,
        node: NodeView,
        /// Every pod was granted one CPU before the agent was restarted.
        restarted: bool,
        over: RefCell<BTreeSet<PodUid>>,
        still_runs: bool,
    }

    impl Fixture {
        fn new() -> Self {
            Fixture::with_source(SourceName::Api)
        }

        fn with_source(source: SourceName) -> Self {
            let mut node = NodeView::default();
            (node.allocatable.pods, node.allocatable.cpu_milli) = (10, 4000);
            node.allocatable.memory_bytes = 1 << 30;
            let core = Core::new(BTreeSet::from([source]));
            let workers = BTreeSet::new();
            Fixture {
                source,
                workers,
                core,
                node,
                restarted: false,
                over: RefCell::default(),
                still_runs: true,
            }
        }

        fn with<T>(&mut self, act: impl FnOnce(&mut Core, &World<'_>) -> T) -> T {
            let before = |wanted: &Pod| {
                let old = pod(wanted.uid().as_str(), "1", 1);
                if self.restarted { PodResources::from_pod(&old).applied_to(wanted) } else { wanted.clone() }
            };
            let world = World {
                has_worker: &|uid| self.workers.contains(uid),
                is_listed: true,
                still_runs: &|_| self.still_runs,
                is_over: &|uid| self.over.borrow().contains(uid),
                may_run: &|_| false,
                ends_for_good: &|_| false,
                uses_claims: &|_| false,
                is_final: &|_| false,
                gates_differ: &|_| false,
                granted: &before,
                allocate: &|_, _, _| crate::pods::admission::Admission::Admit,
                node: &self.node,
            };
            act(&mut self.core, &world)
        }

        /// The effects except `ApiPod…`. An example is `update a=1`: pod `a` with one CPU.
        fn apply(&mut self, pods: Vec<Pod>) -> Vec<String> {
            self.apply_set(pods)
        }

        fn apply_set(&mut self, set: impl Into<PodSet>) -> Vec<String> {
            let (source, set) = (self.source, set.into());
            let effects = self.with(|core, world| core.apply_set(source, set, Timestamp::now(), world));
            texts(&effects)
        }

        fn retry(&mut self, trigger: &'static str) -> Vec<String> {
            let effects = self.with(|core, world| core.retry_resizes(trigger, world));
            texts(&effects)
        }
    }

    fn texts(effects: &[Effect]) -> Vec<String> {
        let word = |effect: &Effect| {
            Some(match effect {
                Effect::Update(pod) => format!("update {}={}", pod.uid(), cpu_of(pod)),
                Effect::Resize { pod, trigger } => format!("{trigger} {}={}", pod.uid(), cpu_of(pod)),
                Effect::ResizePending { pod, reason, message, .. } => {
                    format!("{} {}: {message}", reason.as_str(), pod.uid())
                }
                Effect::ResizeReverted(pod) => format!("reverted {}", pod.uid()),
                Effect::ApiPodChanged(_) | Effect::ApiPodRemoved(_) => return None,
                other => format!("{other:?}"),
            })
        };
        effects.iter().filter_map(word).collect()
    }

    #[test]
    fn waiting_critical_pod_and_its_victim_are_not_both_counted_for_a_resize() {
        let critical = |uid: &str, cpu: &str, generation: i64| {
            let mut object = pod(uid, cpu, generation).into_object();
            object.spec.as_mut().unwrap().priority = Some(2_000_000_000);
            Pod::from(object)
        };
        let mut fixture = Fixture::new();
        let (a, b) = (pod("a", "2", 1), |cpu, generation| critical("b", cpu, generation));
        fixture.still_runs = false;
        fixture.apply(vec![a.clone(), b("1", 1)]);
        let effects = fixture.apply(vec![a.clone(), b("1", 1), critical("p", "2", 1)]);
        assert!(effects.iter().any(|effect| effect.starts_with("StartAfter")), "{effects:?}");
        let with_b = |cpu, generation| vec![a.clone(), b(cpu, generation), critical("p", "2", 1)];
        // Two CPUs are in use by `a`, and then by `p`.
        assert_eq!(fixture.apply(with_b("2", 2)), ["pod_updated b=2", "update b=2"]);
        assert_eq!(fixture.apply(with_b("3", 3)), [format!("Deferred b: {FULL}"), "update b=2".to_owned()]);
    }

    const FULL: &str = "Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000";

    #[test]
    fn resize_that_fits_is_granted_and_others_are_deferred() {
        let mut fixture = Fixture::new();
        fixture.apply(vec![pod("a", "1", 1), pod("b", "2", 1)]);
        assert_eq!(
            fixture.apply(vec![pod("a", "2", 2), pod("b", "2", 1)]),
            ["pod_updated a=2", "update a=2"]
        );
        // The other pod has two of the four CPUs, so three are too many: the pod keeps its two.
        assert_eq!(
            fixture.apply(vec![pod("a", "3", 3), pod("b", "2", 1)]),
            [format!("Deferred a: {FULL}").as_str(), "update a=2"]
        );
        assert_eq!(fixture.retry("periodic_retry"), [format!("Deferred a: {FULL}")]);
        // Admission uses the resources that pods were granted.
        assert!(fixture.core.has_deferred_resizes());
        assert_eq!(cpu_of(fixture.core.admitted(&"a".into()).unwrap()), "2");
        // When another pod shrinks, its CPU is granted in the same turn.
        assert_eq!(
            fixture.apply(vec![pod("a", "3", 3), pod("b", "1", 2)]),
            ["pod_updated b=1", "pod_updated a=3", "update b=1"]
        );
        assert!(!fixture.core.has_deferred_resizes());
    }

    #[test]
    fn edited_static_pod_with_a_uid_of_its_own_is_resized() {
        let mut fixture = Fixture::with_source(SourceName::File);
        fixture.apply(vec![pod("a", "1", 0), pod("b", "2", 0)]);
        assert_eq!(
            fixture.apply(vec![pod("a", "2", 0), pod("b", "2", 0)]),
            ["pod_updated a=2", "update a=2"]
        );
        let deferred = fixture.apply(vec![pod("a", "3", 0), pod("b", "2", 0)]);
        assert_eq!(deferred, [format!("Deferred a: {FULL}").as_str(), "update a=2"]);
        assert_eq!(
            fixture.apply(vec![pod("a", "3", 0)]).last().map(String::as_str),
            Some("pods_removed a=3"),
            "it has what it waited for"
        );
    }

    #[test]
    fn edit_of_a_manifest_while_the_agent_was_stopped_is_a_resize() {
        let mut fixture = Fixture::with_source(SourceName::File);
        fixture.restarted = true;
        assert_eq!(fixture.apply(vec![pod("a", "3", 0)]), ["update a=1", "pods_added a=3"]);
    }

    /// A manifest that was removed and written again is another pod, although it has the same UID.
    #[test]
    fn static_pod_that_comes_back_starts_with_the_resources_of_its_manifest() {
        let mut fixture = Fixture::with_source(SourceName::File);
        fixture.restarted = true;
        let set = |cpu: &str, incarnation| PodSet {
            pods: vec![pod("a", cpu, 0)],
            incarnations: [(PodUid::from("a"), incarnation)].into(),
            ..PodSet::default()
        };
        assert_eq!(fixture.apply_set(set("1", 1)), ["update a=1"]);
        fixture.workers.insert("a".into());
        let effects = fixture.apply_set(set("3", 2));
        assert!(effects[0].starts_with("Kill("), "{effects:?}");
        assert_eq!(effects[1..], ["update a=3"]);
    }

    #[test]
    fn deferred_resize_is_granted_when_another_pod_ends_or_is_removed() {
        for removed in [true, false] {
            let mut fixture = Fixture::new();
            fixture.apply(vec![pod("a", "2", 1), pod("b", "2", 1)]);
            let deferred = fixture.apply(vec![pod("a", "3", 2), pod("b", "2", 1)]);
            assert_eq!(deferred, [format!("Deferred a: {FULL}").as_str(), "update a=2"]);
            if removed {
                let effects = fixture.apply(vec![pod("a", "3", 2)]);
                assert_eq!(effects.last().unwrap(), "pods_removed a=3");
            } else {
                fixture.over.borrow_mut().insert("b".into());
                assert_eq!(fixture.retry("pod_terminated"), ["pod_terminated a=3"]);
            }
        }
    }

    #[test]
    fn reverted_resize_is_no_longer_deferred() {
        let mut fixture = Fixture::new();
        fixture.apply(vec![pod("a", "2", 1), pod("b", "2", 1)]);
        fixture.apply(vec![pod("a", "3", 2), pod("b", "2", 1)]);
        assert_eq!(fixture.apply(vec![pod("a", "2", 3), pod("b", "2", 1)]), ["reverted a", "update a=2"]);
        assert!(!fixture.core.has_deferred_resizes());
    }

    #[test]
    fn infeasible_resize_is_not_retried() {
        let mut fixture = Fixture::new();
        fixture.core.resize_rules = ResizeRules { static_cpu: true, ..ResizeRules::default() };
        fixture.apply(vec![pod("a", "1", 1)]);
        let effects = fixture.apply(vec![pod("a", "2", 2)]);
        assert!(effects[0].starts_with("Infeasible a: Resize is infeasible"), "{effects:?}");
        assert!(!fixture.core.has_deferred_resizes());
        assert_eq!(fixture.apply(vec![pod("a", "1", 3)]), ["reverted a", "update a=1"]);
    }

    #[test]
    fn restored_pods_are_admitted_with_their_granted_resources() {
        let mut fixture = Fixture::new();
        fixture.restarted = true;
        // Together they desire eight CPUs, and the node has four.
        assert_eq!(
            fixture.apply(vec![pod("a", "3", 2), pod("b", "3", 2), pod("c", "2", 2)]),
            [
                "update a=1",
                "update b=1",
                "update c=1",
                "Deferred a: Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000",
                "Deferred b: Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000",
                "pods_added c=2",
            ]
        );
    }

    #[test]
    fn requested_resizes_are_counted_by_resource_and_direction() {
        let before = metrics::REQUESTED_RESIZES.get(["cpu", "limits", "increase"]);
        let mut fixture = Fixture::new();
        fixture.apply(vec![pod("a", "1", 1)]);
        fixture.apply(vec![pod("a", "2", 2)]);
        assert!(metrics::REQUESTED_RESIZES.get(["cpu", "limits", "increase"]) > before);
    }
}
