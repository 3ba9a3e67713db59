//! What the policy `static` says to the topology manager (Go:
//! pkg/kubelet/cm/cpumanager/policy_static.go).

use std::collections::BTreeMap;

use super::policy::StaticPolicy;
use super::request::{ContainerCpus, PodCpus};
use super::state::State;
use crate::placement::cpus::CpuSet;
use crate::placement::machine::Level;
use crate::placement::numa::{Hint, NumaMask};

/// At most so many sets of nodes are considered, smallest first; 16 nodes have as many.
///
/// DIFFERS: upstream has no limit.
const MOST_MASKS: usize = 65_536;

impl StaticPolicy {
    /// The hints for a container; `None`: any nodes do. An empty list: no nodes do.
    #[must_use]
    pub fn hints(&self, state: &State, pod: &PodCpus, container: &ContainerCpus) -> Option<Vec<Hint>> {
        let wanted = container.exclusive;
        if wanted == 0 {
            return None;
        }
        Some(match state.exclusive_of(&pod.uid, &container.name) {
            Some(cpus) if cpus.len() != wanted => Vec::new(),
            Some(cpus) => self.masks(cpus, &CpuSet::new(), wanted),
            None => self.masks(&self.free(state), &state.reusable_by(&pod.uid), wanted),
        })
    }

    /// The hints for a pod as a whole (scope `pod`).
    #[must_use]
    pub fn pod_hints(&self, state: &State, pod: &PodCpus) -> Option<Vec<Hint>> {
        let wanted = pod.total();
        if wanted == 0 {
            return None;
        }
        if pod.whole.is_some() {
            return Some(self.whole_hints(state, pod, wanted));
        }
        let mut assigned = CpuSet::new();
        for container in &pod.containers {
            match state.exclusive_of(&pod.uid, &container.name) {
                Some(cpus) if cpus.len() != container.exclusive => return Some(Vec::new()),
                Some(cpus) => assigned = assigned.union(cpus),
                None => {}
            }
        }
        if assigned.len() == wanted {
            return Some(self.masks(&assigned, &CpuSet::new(), wanted));
        }
        let reusable = state.reusable_by(&pod.uid).union(&assigned);
        Some(self.masks(&self.free(state), &reusable, wanted))
    }

    /// The hints for a pod that gets CPUs as a whole; none if it would have none to share. What it has
    /// already does not follow a resize.
    ///
    /// DIFFERS: upstream has none for such a pod after a restart of the agent.
    fn whole_hints(&self, state: &State, pod: &PodCpus, wanted: u32) -> Vec<Hint> {
        if let Some(cpus) = state.pods.get(&pod.uid) {
            return self.masks(cpus, &CpuSet::new(), cpus.len());
        }
        if pod.check_shared().is_err() {
            return Vec::new();
        }
        // What its containers have one by one is taken back before it gets any.
        let own = state.exclusive.get(&pod.uid).into_iter().flat_map(BTreeMap::values);
        let free = own.fold(self.free(state), |free, cpus| free.union(cpus));
        self.masks(&free, &CpuSet::new(), wanted)
    }

    /// The sets of nodes with enough CPUs and all reusable ones; the smallest sets that could ever do
    /// are preferred.
    fn masks(&self, available: &CpuSet, reusable: &CpuSet, wanted: u32) -> Vec<Hint> {
        let machine = &self.machine;
        let sizes = |among: &CpuSet| -> BTreeMap<u32, u32> {
            machine.groups(among, Level::Node).into_iter().map(|(node, cpus)| (node, cpus.len())).collect()
        };
        let (all, free, reused) = (sizes(machine.all()), sizes(available), sizes(reusable));
        let must = NumaMask::from_numbers(reused.keys().copied());
        let sum = |sizes: &BTreeMap<u32, u32>, mask: NumaMask| {
            mask.iter().filter_map(|node| sizes.get(&node)).fold(0_u32, |sum, size| sum.saturating_add(*size))
        };
        let mut least = machine.count(Level::Node);
        let mut found = Vec::new();
        for mask in by_size(&all.keys().copied().collect::<Vec<u32>>()) {
            if sum(&all, mask) >= wanted {
                least = least.min(mask.len());
            }
            let enough = sum(&free, mask).saturating_add(sum(&reused, mask)) >= wanted;
            if enough && must.and(mask) == must {
                found.push(mask);
            }
        }
        let preferred = |mask: NumaMask| {
            mask.len() == least || (self.options.by_socket && self.on_fewest_sockets(mask, least))
        };
        found.into_iter().map(|mask| Hint { nodes: Some(mask), preferred: preferred(mask) }).collect()
    }

    /// Option `align-by-socket`: whether the nodes are on as few sockets as `least` nodes can be.
    fn on_fewest_sockets(&self, mask: NumaMask, least: u32) -> bool {
        let machine = &self.machine;
        let per_socket = machine.count(Level::Node).checked_div(machine.count(Level::Socket)).unwrap_or(0);
        if per_socket == 0 {
            return false;
        }
        let cpus = machine.within(machine.all(), Level::Node, &mask.iter().collect());
        machine.groups(&cpus, Level::Socket).len() == least.div_ceil(per_socket) as usize
    }
}

/// The sets of these nodes: those of one node first, each size in the order of the nodes' numbers.
fn by_size(nodes: &[u32]) -> Vec<NumaMask> {
    let mut masks: Vec<NumaMask> = Vec::new();
    // Each set with the position of its last node, so that it only grows to the right.
    let mut previous: Vec<(NumaMask, usize)> = vec![(NumaMask::default(), 0)];
    while !previous.is_empty() && masks.len() < MOST_MASKS {
        let mut next = Vec::new();
        for (mask, from) in previous {
            for (position, node) in nodes.iter().enumerate().skip(from) {
                if masks.len() + next.len() >= MOST_MASKS {
                    break;
                }
                next.push((NumaMask(mask.0 | NumaMask::from_numbers([*node]).0), position + 1));
            }
        }
        masks.extend(next.iter().map(|(mask, _)| *mask));
        previous = next;
    }
    masks
}
