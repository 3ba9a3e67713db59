//! The state of all managers (pure).

use std::collections::{BTreeMap, BTreeSet};

use super::provider::DeviceProvider;
use super::settings::{HeldResources, Settings};
use super::store::{Snapshot, Stored, Version};
use crate::model::ids::{ContainerId, PodUid};
use crate::model::metrics;
use crate::model::pod::Pod;
use crate::model::runtime::PodRuntime;
use crate::placement::cpu::policy::StaticPolicy;
use crate::placement::cpu::provider::CpuProvider;
use crate::placement::cpu::request::{PodCpus, is_isolated};
use crate::placement::cpu::state::State;
use crate::placement::cpu::state_file;
use crate::placement::cpu::updates::{Applied, RunningContainer, Update};
use crate::placement::cpus::CpuSet;
use crate::placement::machine::Level;
use crate::placement::memory::{self, Memory};
use crate::placement::numa::NumaMask;
use crate::placement::topology::{Candidate, Outcome, Provider};
use crate::runtime::CpusetPlacement;

/// What all containers have.
pub(super) struct AssignmentState {
    pub(super) cpu: State,
    /// `None`: policy `None`.
    pub(super) memory: Option<Memory>,
    /// The content that the CPU manager's state file is to have, and the number of its changes.
    pub(super) cpu_text: String,
    cpu_changes: u64,
    /// The number of changes of the memory manager's state.
    memory_changes: u64,
    /// Running containers, with their pod and name.
    running: BTreeMap<ContainerId, (PodUid, String)>,
    /// The metric of each NUMA node.
    shown: BTreeMap<u32, i64>,
    applied: Applied,
    /// The CPUs that containers are created with, by pod and name.
    created: BTreeMap<(PodUid, String), CpuSet>,
    /// The containers that ran at the start without a usable state file, until their pods are
    /// admitted: their NUMA nodes by name.
    pub(super) recovered: BTreeMap<PodUid, BTreeMap<String, Option<NumaMask>>>,
}

impl AssignmentState {
    pub(super) fn new(cpu: State, memory: Option<Memory>) -> AssignmentState {
        AssignmentState {
            cpu,
            memory,
            cpu_text: String::new(),
            cpu_changes: 0,
            memory_changes: 0,
            running: BTreeMap::new(),
            shown: BTreeMap::new(),
            applied: Applied::default(),
            created: BTreeMap::new(),
            recovered: BTreeMap::new(),
        }
    }

    pub(super) fn admit(
        &mut self,
        settings: &Settings,
        pod: &Pod,
        devices: Option<&mut DeviceProvider<'_>>,
    ) -> Outcome {
        let mut cpu = settings.cpu.as_ref().map(|policy| CpuProvider { policy, state: &mut self.cpu });
        let mut providers: Vec<&mut dyn Provider> = Vec::new();
        if let Some(devices) = devices {
            providers.push(devices);
        }
        if let Some(cpu) = &mut cpu {
            providers.push(cpu);
        }
        if let Some(memory) = &mut self.memory {
            providers.push(memory);
        }
        settings.topology.admit(pod, &mut providers)
    }

    /// Takes everything back that other pods have.
    ///
    /// DIFFERS: upstream also takes it from removed pods whose containers are still ending. Then two
    /// containers may share CPUs that each has for itself, although others are free.
    pub(super) fn release_inactive<'a>(
        &mut self,
        active: impl Iterator<Item = &'a Pod> + Clone,
        still_runs: &dyn Fn(&PodUid) -> bool,
    ) {
        self.release_cpus(active.clone(), still_runs);
        if let Some(memory) = &mut self.memory {
            memory.release_inactive(active, still_runs);
        }
    }

    /// The pods that have CPUs or memory for themselves.
    pub(super) fn holders(&self) -> impl Iterator<Item = &PodUid> {
        let of_memory = self.memory.as_ref().map(Memory::assignments);
        self.cpu.exclusive.keys().chain(of_memory.into_iter().flat_map(|all| all.keys()))
    }

    /// Takes the CPUs back that other pods have.
    pub(super) fn release_cpus<'a>(
        &mut self,
        active: impl Iterator<Item = &'a Pod>,
        still_runs: &dyn Fn(&PodUid) -> bool,
    ) {
        let exclusive = &self.cpu.exclusive;
        let names = |pod: &Pod| pod.all_containers().map(|container| container.name.clone()).collect();
        let mut active: BTreeMap<PodUid, BTreeSet<String>> = active
            .filter(|pod| exclusive.contains_key(pod.uid()))
            .map(|pod| (pod.uid().clone(), names(pod)))
            .collect();
        for (pod, of_pod) in exclusive {
            if !active.contains_key(pod) && still_runs(pod) {
                active.insert(pod.clone(), of_pod.keys().cloned().collect());
            }
        }
        for (pod, container) in self.cpu.release_inactive(&active) {
            log::info!("the CPUs of a container are free uid={pod} container={container}");
        }
    }

    /// A pod that ran without a usable state file is admitted again: it keeps what it requests, and
    /// nothing else.
    ///
    /// A pod that gets CPUs and memory as a whole can get others: what runs does not show what it had.
    pub(super) fn recover(&mut self, candidate: Candidate<'_>) {
        let pod = candidate.pod;
        let Some(found) = self.recovered.remove(pod.uid()) else { return };
        let cpus = PodCpus::from_candidate(candidate);
        let wanted = |name: &str| cpus.container(name).map_or(0, |container| container.exclusive);
        // A pod with CPUs as a whole is from a good file of the CPU manager: only the memory manager's is
        // lost. The containers that share the pod's CPUs are entitled to none of their own.
        let is_known = self.cpu.pods.contains_key(pod.uid());
        let held = self.cpu.exclusive.get(pod.uid()).filter(|_| !is_known).cloned().unwrap_or_default();
        for (name, _) in held.iter().filter(|(name, cpus)| cpus.len() != wanted(name)) {
            self.cpu.release(pod.uid(), name);
        }
        let Some(memory) = &mut self.memory else { return };
        for container in pod.all_containers() {
            let Some(mems) = found.get(&container.name) else { continue };
            let running = memory::RunningContainer { pod: candidate, container, mems: *mems };
            if let Err(problem) = memory.add_running(running) {
                log::warn!("{problem}");
            }
        }
    }

    /// The sets of a container that is created now.
    pub(super) fn place(&mut self, settings: &Settings, pod: &Pod, container: &str) -> CpusetPlacement {
        let mut placed = CpusetPlacement::default();
        if settings.cpu.is_some() {
            let key = (pod.uid().clone(), container.to_owned());
            match self.cpu.cpus_of(pod.uid(), container) {
                Some(cpus) => {
                    placed.cpus = cpus.to_string();
                    self.created.insert(key, cpus.clone());
                }
                None => drop(self.created.remove(&key)),
            }
            let found = pod.all_containers().find(|candidate| candidate.name == container);
            placed.without_quota = settings.without_quota
                && found.is_some_and(|found| is_isolated(&self.cpu, settings.topology.candidate(pod), found));
        }
        if let Some(memory) = &mut self.memory {
            memory.release_ended_init_containers(pod, container);
            let nodes = memory.cpuset_mems(pod.uid(), container);
            let numbers: Vec<String> =
                nodes.iter().flat_map(|nodes| nodes.iter()).map(|node| node.to_string()).collect();
            placed.mems = numbers.join(",");
        }
        placed
    }

    /// Whether a pod has CPUs for itself: one of its containers has, or all of them if it has CPUs as a
    /// whole (Go: `PodHasExclusiveCPUs`).
    pub(super) fn has_own_cpus(&self, pod: Candidate<'_>) -> bool {
        let uid = pod.pod.uid();
        if pod.as_whole || self.cpu.pods.contains_key(uid) {
            return pod.pod.all_containers().all(|container| is_isolated(&self.cpu, pod, container));
        }
        self.cpu.exclusive.contains_key(uid)
    }

    /// A container runs. Returns whether its set has changed since it was created.
    pub(super) fn started(&mut self, pod: &PodUid, container: &str, id: &ContainerId) -> bool {
        let Some(cpus) = self.created.remove(&(pod.clone(), container.to_owned())) else { return false };
        let differs = self.cpu.cpus_of(pod, container) != Some(&cpus);
        self.running.insert(id.clone(), (pod.clone(), container.to_owned()));
        self.applied.note(id.clone(), cpus);
        differs
    }

    /// The containers of a pod at its inspection. Returns whether one was not known.
    pub(super) fn observe_runtime(&mut self, runtime: &PodRuntime) -> bool {
        let now: BTreeMap<&ContainerId, &str> =
            runtime.running().map(|container| (&container.id, container.name.as_str())).collect();
        self.running.retain(|id, (pod, _)| *pod != runtime.uid || now.contains_key(id));
        let mut is_new = false;
        for container in runtime.running() {
            if self.running.contains_key(&container.id) {
                continue;
            }
            self.running.insert(container.id.clone(), (runtime.uid.clone(), container.name.clone()));
            if let Some(cpus) = container.cpus.as_deref().and_then(|cpus| CpuSet::parse(cpus).ok()) {
                self.applied.note(container.id.clone(), cpus);
            }
            is_new = true;
        }
        is_new
    }

    pub(super) fn forget(&mut self, uid: &PodUid) {
        self.running.retain(|_, (pod, _)| pod != uid);
        self.created.retain(|(pod, _), _| pod != uid);
    }

    /// The updates of running containers that are due.
    pub(super) fn updates(&mut self) -> Vec<Update> {
        let running = self.running.iter();
        let running: Vec<RunningContainer> = running
            .map(|(id, (pod, name))| RunningContainer {
                pod: pod.clone(),
                name: name.clone(),
                id: id.clone(),
            })
            .collect();
        self.applied.updates(&self.cpu, &running)
    }

    /// An update succeeded; `None`: the container does not exist any more.
    pub(super) fn updated(&mut self, id: &ContainerId, cpus: Option<CpuSet>) {
        match cpus {
            Some(cpus) => self.applied.note(id.clone(), cpus),
            None => drop(self.running.remove(id)),
        }
    }

    pub(super) fn held(&self, uid: &PodUid) -> HeldResources {
        let cpus = self.cpu.exclusive.get(uid).cloned().unwrap_or_default();
        let memory = self.memory.as_ref();
        let names = memory.and_then(|memory| memory.assignments().get(uid)).into_iter().flatten();
        let nodes = names.filter_map(|(name, _)| Some((name.clone(), memory?.cpuset_mems(uid, name)?)));
        HeldResources { cpus, nodes: nodes.collect() }
    }

    /// Numbers the change of the CPU manager's state, if there is one. Returns whether there is.
    pub(super) fn note_cpu(&mut self) -> bool {
        let text = state_file::encode(state_file::STATIC, &self.cpu);
        if text == self.cpu_text {
            return false;
        }
        self.cpu_text = text;
        self.cpu_changes += 1;
        true
    }

    /// Numbers the change of the memory manager's state, if there is one. Returns whether there is.
    pub(super) fn note_memory(&mut self) -> bool {
        let is_new = self.memory.as_mut().is_some_and(Memory::take_changed);
        self.memory_changes += u64::from(is_new);
        is_new
    }

    /// What is newer than in the files.
    pub(super) fn snapshot(&self, stored: Stored) -> Snapshot {
        let cpu = (self.cpu_changes > stored.cpu)
            .then(|| Version { number: self.cpu_changes, text: self.cpu_text.clone() });
        let memory = self.memory.as_ref().filter(|_| self.memory_changes > stored.memory);
        let memory = memory.map(|memory| Version { number: self.memory_changes, text: memory.state_file() });
        Snapshot { cpu, memory }
    }

    /// Shows the numbers of CPUs as metrics.
    pub(super) fn update_metrics(&mut self, policy: &StaticPolicy) {
        let exclusive = self.cpu.all_exclusive();
        metrics::SHARED_CPUS.set(f64::from(policy.free(&self.cpu).len()) * 1000.0);
        metrics::EXCLUSIVE_CPUS.set(f64::from(exclusive.len()));
        let of_nodes = policy.machine().groups(&exclusive, Level::Node);
        for node in policy.machine().groups(policy.machine().all(), Level::Node).into_keys() {
            let label = node.to_string();
            let now = of_nodes.get(&node).map_or(0, |cpus| i64::from(cpus.len()));
            let before = self.shown.insert(node, now).unwrap_or(0);
            metrics::CPUS_PER_NODE.add([label], now - before);
        }
    }
}
