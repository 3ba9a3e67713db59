//! What a pod uses and requests of a resource, as eviction counts it (Go: eviction helpers.go,
//! pkg/api/v1/resource `GetResourceRequestQuantity`).

use std::collections::HashMap;

use super::layout::FsStatsType;
use super::observations::Swap;
use super::signal::Resource;
use crate::model::Quantity;
use crate::model::api::{ResourceRequirements, Volume};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::quantity::{Amount, amount};
use crate::model::requests::container_requests;
use crate::resources::stats::sample::{FileSystem, Numbers, PodUse, Snapshot};

/// The statistics of pods, by UID.
pub(super) struct PodUses<'a> {
    pods: HashMap<&'a PodUid, &'a PodUse>,
    /// Whether statistics of some pods may be missing.
    pub(super) incomplete: bool,
}

impl<'a> PodUses<'a> {
    pub(super) fn new(snapshot: &'a Snapshot) -> Self {
        let pods = snapshot.pods.iter().map(|used| (&used.uid, used)).collect();
        PodUses { pods, incomplete: snapshot.incomplete }
    }

    pub(super) fn get(&self, pod: &Pod) -> Option<&'a PodUse> {
        self.pods.get(pod.uid()).copied()
    }
}

/// Bytes or counts as an amount.
pub(super) fn units(number: u64) -> Amount {
    Amount::from_units(i64::try_from(number).unwrap_or(i64::MAX))
}

/// Memory in use; `None` if it is not known.
pub(super) fn memory(numbers: &Numbers, swap: Swap) -> Option<u64> {
    let swapped = match swap {
        Swap::Counted => numbers.swap.unwrap_or(0),
        Swap::Ignored => 0,
    };
    Some(numbers.working_set?.saturating_add(swapped))
}

/// The processes of a pod. Its cgroup contains none itself: they are in those of its containers.
pub(super) fn processes(used: &PodUse) -> u64 {
    let containers = used.containers.iter().filter_map(|container| container.numbers.processes);
    let sum = containers.fold(0_u64, u64::saturating_add);
    sum.max(used.numbers.processes.unwrap_or(0))
}

/// A pod's use of disks: bytes or inodes.
pub(super) fn disk(pod: &Pod, used: &PodUse, parts: &[FsStatsType], resource: Resource) -> Amount {
    let number = |space: &FileSystem| match resource {
        Resource::Inodes => space.inodes_used,
        _ => space.used,
    };
    let units_of = |space: Option<&FileSystem>| space.and_then(number).map(units).unwrap_or_default();
    let mut sum = Amount::ZERO;
    for part in parts {
        sum = sum
            + match part {
                FsStatsType::Layers => {
                    used.containers.iter().map(|container| units_of(container.rootfs.as_ref())).sum()
                }
                FsStatsType::Logs => {
                    used.containers.iter().map(|container| units_of(container.logs.as_ref())).sum()
                }
                FsStatsType::Volumes => volumes(pod, used, number),
            };
    }
    sum
}

fn volumes(pod: &Pod, used: &PodUse, number: impl Fn(&FileSystem) -> Option<u64>) -> Amount {
    // A pod may have many volumes: each list is read once.
    let mut by_name: HashMap<&str, &FileSystem> = HashMap::new();
    for volume in &used.volumes {
        by_name.entry(&volume.name).or_insert(&volume.space);
    }
    let local = pod.spec().volumes.iter().flatten().filter(|volume| is_local(volume));
    local.filter_map(|volume| number(by_name.get(volume.name.as_str())?)).map(units).sum()
}

/// Whether a volume uses the node's own disk.
fn is_local(volume: &Volume) -> bool {
    let on_disk = |medium: Option<&str>| medium.is_none_or(str::is_empty);
    volume.host_path.is_some()
        || volume.git_repo.is_some()
        || volume.config_map.is_some()
        || volume.empty_dir.as_ref().is_some_and(|dir| on_disk(dir.medium.as_deref()))
}

/// The request of a pod, with the overhead of its sandbox if it requests any. If resources of the
/// whole pod are set, only those count, as upstream has it.
pub(super) fn request(pod: &Pod, resource: &str) -> Amount {
    let of_pod = pod.spec().resources.as_ref().filter(|resources| is_pod_level(resources));
    let request = match of_pod {
        Some(resources) => get(resources.requests.as_ref(), resource).map(amount).unwrap_or_default(),
        None => container_requests(pod).get(resource).copied().unwrap_or_default(),
    };
    let overhead = get(pod.spec().overhead.as_ref(), resource).map(amount).unwrap_or_default();
    if request.is_zero() { request } else { request + overhead }
}

/// The pod's own request of a resource, not that of its containers.
pub(super) fn pod_level_request<'a>(pod: &'a Pod, resource: &str) -> Option<&'a Quantity> {
    let resources = pod.spec().resources.as_ref().filter(|resources| is_pod_level(resources))?;
    get(resources.requests.as_ref(), resource)
}

/// Whether any resource that may be set for a whole pod is set (component-helpers resource:
/// `IsPodLevelResourcesSet`).
fn is_pod_level(resources: &ResourceRequirements) -> bool {
    let names = resources.requests.iter().flatten().chain(resources.limits.iter().flatten());
    names
        .map(|(name, _)| name)
        .any(|name| name == "cpu" || name == "memory" || name.starts_with("hugepages-"))
}

fn get<'a>(
    map: Option<&'a std::collections::BTreeMap<String, Quantity>>,
    resource: &str,
) -> Option<&'a Quantity> {
    map?.get(resource)
}
