//! From which NUMA nodes devices can come (pure; Go: `topology_hints.go`).

use std::collections::BTreeMap;

use super::choose::DeviceIds;
use super::requests::{ContainerRequest, PodRequest};
use super::state::{DeviceState, Resource};
use crate::model::numa::{Hint, NumaMask};

/// How many nodes with devices are examined in all sets for one request.
///
/// DIFFERS: upstream examines all sets, 2ⁿ on n nodes. Here larger machines get hints for the sets of
/// one node, and for all nodes.
const MAX_NODES: usize = 12;

/// Hints by resource. A resource without an entry has no preference; one with an empty list can come
/// from no nodes.
pub type DeviceHints = BTreeMap<String, Vec<Hint>>;

impl DeviceState {
    /// Where the devices of a container can come from.
    #[must_use]
    pub fn hints(&self, pod: &PodRequest, container: &str) -> DeviceHints {
        let Some(request) = pod.container(container) else { return DeviceHints::new() };
        let held = |resource: &str| {
            self.holds.get(&pod.uid, container, resource).map(|hold| hold.ids()).unwrap_or_default()
        };
        let wanted = self.device_limits(request).into_iter();
        wanted
            .filter_map(|(resource, count)| {
                let reusable = self.holds.reusable(pod, container, resource);
                Some((resource.clone(), self.hints_of(resource, count, &held(resource), &reusable)?))
            })
            .collect()
    }

    /// Where the devices of all containers of a pod can come from.
    #[must_use]
    pub fn pod_hints(&self, pod: &PodRequest) -> DeviceHints {
        let all = |_: &ContainerRequest| true;
        let mut hints = DeviceHints::new();
        for resource in pod.resources().into_iter().filter(|name| self.is_known(name)) {
            let holds = self.holds.pod(&pod.uid).into_iter().flat_map(BTreeMap::values);
            let held = holds.filter_map(|holds| holds.get(resource)).flat_map(|hold| hold.ids()).collect();
            if let Some(of_resource) =
                self.hints_of(resource, pod.max_in_use(resource, all), &held, &DeviceIds::new())
            {
                hints.insert(resource.to_owned(), of_resource);
            }
        }
        hints
    }

    /// `None`: no preference, because no device has nodes.
    fn hints_of(
        &self,
        resource: &str,
        wanted: u64,
        held: &DeviceIds,
        reusable: &DeviceIds,
    ) -> Option<Vec<Hint>> {
        let known = self.resources.get(resource)?;
        if known.devices.values().all(|device| device.nodes.is_empty()) {
            return None;
        }
        if !held.is_empty() {
            if held.len() as u64 != wanted {
                return Some(Vec::new());
            }
            return Some(possible(&self.nodes, known, held, &DeviceIds::new(), wanted));
        }
        let in_use = self.holds.in_use(resource, |_, _, _| true);
        let free: DeviceIds = known.healthy().filter(|id| !in_use.contains(*id)).cloned().collect();
        if (free.union(reusable).count() as u64) < wanted {
            return Some(Vec::new());
        }
        Some(possible(&self.nodes, known, &free, reusable, wanted))
    }
}

/// How many devices are near to at least one node of a set, counted by the sets of nodes that occur.
struct Counts(BTreeMap<NumaMask, u64>);

impl Counts {
    fn new(devices: impl Iterator<Item = NumaMask>, all: NumaMask) -> Counts {
        let mut counts = BTreeMap::new();
        for nodes in devices {
            let mut nodes = nodes.and(all);
            if all.len() as usize > MAX_NODES {
                // Few different sets, so that the work is bounded.
                nodes = NumaMask::from_numbers(nodes.iter().next());
            }
            *counts.entry(nodes).or_insert(0) += 1;
        }
        Counts(counts)
    }

    fn near(&self, mask: NumaMask) -> u64 {
        self.0.iter().filter(|(nodes, _)| !nodes.and(mask).is_empty()).map(|(_, count)| count).sum()
    }
}

/// The NUMA nodes of the machine that have devices of the resource; if none has one, all nodes (Go:
/// `deviceNUMANodes`).
fn with_devices(nodes: &[u32], known: &Resource) -> Vec<u32> {
    let listed =
        known.devices.values().fold(NumaMask::default(), |all, device| NumaMask(all.0 | device.nodes.0));
    let found: Vec<u32> = nodes.iter().copied().filter(|node| listed.contains(*node)).collect();
    if found.is_empty() { nodes.to_vec() } else { found }
}

/// The sets of nodes that can provide `wanted` devices: all of `reusable`, and others of `free`. Nodes
/// without devices are in no set. The smallest sets that could provide them if no device were in use are
/// preferred (Go: `generateDeviceTopologyHints`).
fn possible(
    nodes: &[u32],
    known: &Resource,
    free: &DeviceIds,
    reusable: &DeviceIds,
    wanted: u64,
) -> Vec<Hint> {
    let nodes = with_devices(nodes, known);
    let all = NumaMask::from_numbers(nodes.iter().copied());
    let nodes_of = |ids: &DeviceIds| {
        let listed: Vec<NumaMask> =
            ids.iter().filter_map(|id| known.devices.get(id)).map(|device| device.nodes).collect();
        listed
    };
    let every = Counts::new(known.devices.values().map(|device| device.nodes), all);
    let free = Counts::new(nodes_of(free).into_iter(), all);
    let reusable: Vec<NumaMask> = nodes_of(reusable).into_iter().filter(|nodes| !nodes.is_empty()).collect();
    let must = Counts::new(reusable.iter().copied(), all);
    let mut smallest = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    let mut found = Vec::new();
    for mask in sets(&nodes) {
        if every.near(mask) >= wanted {
            smallest = smallest.min(mask.len());
        }
        let reused = must.near(mask);
        if reused == reusable.len() as u64 && reused.saturating_add(free.near(mask)) >= wanted {
            found.push(mask);
        }
    }
    found.into_iter().map(|mask| Hint { nodes: Some(mask), preferred: mask.len() == smallest }).collect()
}

/// All sets of these nodes that are not empty; on large machines only those of one node, and all.
fn sets(nodes: &[u32]) -> Vec<NumaMask> {
    if nodes.len() > MAX_NODES {
        let single = nodes.iter().map(|node| NumaMask::from_numbers([*node]));
        return single.chain([NumaMask::from_numbers(nodes.iter().copied())]).collect();
    }
    let mut sets = vec![NumaMask::default()];
    for node in nodes {
        let with: Vec<NumaMask> =
            sets.iter().map(|set| NumaMask::from_numbers(set.iter().chain([*node]))).collect();
        sets.extend(with);
    }
    sets.sort_by_key(|set| (set.len(), *set));
    sets.retain(|set| !set.is_empty());
    sets
}
