//! Which CPUs are shared, and which belong to a container.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::ids::PodUid;
use crate::placement::cpus::CpuSet;

/// Exclusive CPUs by container name.
pub type ByContainer = BTreeMap<String, CpuSet>;

/// The assignments of the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct State {
    /// The CPUs of all containers without exclusive ones. Under policy none it is empty.
    pub shared: CpuSet,
    /// Exclusive CPUs by pod and container. No pod is without containers.
    pub exclusive: BTreeMap<PodUid, ByContainer>,
    /// The CPUs of pods that were allocated as a whole (gate `PodLevelResourceManagers`): each container
    /// of such a pod has some of them, which several of its containers can share. Each pod has a
    /// container in `exclusive`.
    pub pods: BTreeMap<PodUid, CpuSet>,
    /// The exclusive CPUs that containers were admitted with, from the file of a kubelet that can resize
    /// them. Each is of a container in `exclusive`.
    pub baselines: BTreeMap<PodUid, ByContainer>,
    /// CPUs of the init containers of the pod that was allocated last; its other containers may
    /// use them. They are not in the state file.
    pub reusable: Option<(PodUid, CpuSet)>,
}

impl State {
    /// The exclusive CPUs of a container.
    #[must_use]
    pub fn exclusive_of(&self, pod: &PodUid, container: &str) -> Option<&CpuSet> {
        self.exclusive.get(pod)?.get(container)
    }

    /// The CPUs that a container runs on: its own, else the shared ones. `None` if there are none:
    /// the runtime then gets no set. For the CRI field `cpuset_cpus`.
    #[must_use]
    pub fn cpus_of(&self, pod: &PodUid, container: &str) -> Option<&CpuSet> {
        Some(self.exclusive_of(pod, container).unwrap_or(&self.shared)).filter(|cpus| !cpus.is_empty())
    }

    /// All exclusive CPUs, and those of whole pods.
    #[must_use]
    pub fn all_exclusive(&self) -> CpuSet {
        let sets = self.exclusive.values().flat_map(BTreeMap::values).chain(self.pods.values());
        sets.fold(CpuSet::new(), |all, cpus| all.union(cpus))
    }

    /// What may be reused by the containers of a pod.
    #[must_use]
    pub fn reusable_by(&self, pod: &PodUid) -> CpuSet {
        self.reusable
            .as_ref()
            .filter(|(owner, _)| owner == pod)
            .map(|(_, cpus)| cpus.clone())
            .unwrap_or_default()
    }

    /// Gives a container CPUs for itself.
    pub fn assign(&mut self, pod: &PodUid, container: &str, cpus: CpuSet) {
        self.shared = self.shared.difference(&cpus);
        self.exclusive.entry(pod.clone()).or_default().insert(container.to_owned(), cpus);
    }

    /// Gives a pod CPUs for itself, and each of its containers some of them.
    pub fn assign_pod(&mut self, pod: &PodUid, cpus: CpuSet, containers: ByContainer) {
        self.shared = self.shared.difference(&cpus);
        self.pods.insert(pod.clone(), cpus);
        self.exclusive.insert(pod.clone(), containers);
    }

    /// Takes a container's CPUs back, except those of other containers of its pod. Those of a pod as a
    /// whole are taken back with its last container. Returns the CPUs that are shared again.
    pub fn release(&mut self, pod: &PodUid, container: &str) -> CpuSet {
        let Some(of_pod) = self.exclusive.get_mut(pod) else { return CpuSet::new() };
        let Some(cpus) = of_pod.remove(container) else { return CpuSet::new() };
        if let Some(of_pod) = self.baselines.get_mut(pod) {
            of_pod.remove(container);
        }
        let is_last = of_pod.is_empty();
        let mut freed = of_pod.values().fold(cpus, |freed, others| freed.difference(others));
        if let Some(pool) = self.pods.get(pod) {
            freed = if is_last { pool.clone() } else { CpuSet::new() };
        }
        if is_last {
            self.exclusive.remove(pod);
            self.pods.remove(pod);
            self.baselines.remove(pod);
        }
        self.shared = self.shared.union(&freed);
        freed
    }

    /// Takes the CPUs of all containers back that are not active, which the caller may only do when
    /// all sources of pods are ready. Returns the containers.
    pub fn release_inactive(&mut self, active: &BTreeMap<PodUid, BTreeSet<String>>) -> Vec<(PodUid, String)> {
        let is_active =
            |pod: &PodUid, name: &String| active.get(pod).is_some_and(|names| names.contains(name));
        let gone: Vec<(PodUid, String)> = self
            .exclusive
            .iter()
            .flat_map(|(pod, of_pod)| of_pod.keys().map(move |name| (pod.clone(), name.clone())))
            .filter(|(pod, name)| !is_active(pod, name))
            .collect();
        for (pod, name) in &gone {
            self.release(pod, name);
        }
        gone
    }
}
