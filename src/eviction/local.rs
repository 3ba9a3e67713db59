//! Pods that use more local storage than they may (pure; Go: eviction `localStorageEviction`).

use std::collections::HashMap;

use super::layout::Layout;
use super::texts::{self, Annotations};
use super::usage::{PodUses, units};
use super::victim::{IMMEDIATE_GRACE_SECONDS, Victim};
use crate::model::Quantity;
use crate::model::api::{Container, EmptyDirVolumeSource};
use crate::model::pod::{Pod, is_sidecar};
use crate::model::quantity::{Amount, Form, amount, canonical};
use crate::model::requests::{Overhead, pod_limits};
use crate::resources::stats::sample::{FileSystem, PodUse};

const STORAGE: &str = "ephemeral-storage";

/// The labels of `kubelet_evictions`.
const EMPTY_DIR: &str = "emptydirfs.limit";
const POD: &str = "ephemeralpodfs.limit";
const CONTAINER: &str = "ephemeralcontainerfs.limit";

/// The pods above a limit, each with the first limit that it exceeds. Critical pods are never
/// evicted.
pub(super) fn above_limits(pods: &[Pod], uses: &PodUses<'_>, layout: Layout) -> Vec<Victim> {
    let ordinary = pods.iter().filter(|pod| !pod.is_critical());
    ordinary.filter_map(|pod| above_limit(pod, uses.get(pod)?, layout)).collect()
}

fn above_limit(pod: &Pod, used: &PodUse, layout: Layout) -> Option<Victim> {
    let (signal, message) = empty_dir(pod, used)
        .map(|message| (EMPTY_DIR, message))
        .or_else(|| Some((POD, whole_pod(pod, used)?)))
        .or_else(|| Some((CONTAINER, container(pod, used, layout)?)))?;
    Some(Victim {
        pod: pod.clone(),
        grace_seconds: IMMEDIATE_GRACE_SECONDS,
        message,
        annotations: Annotations::new(),
        disruption_target: false,
        signal,
    })
}

/// An emptyDir above its `sizeLimit`. Those in memory count, too.
fn empty_dir(pod: &Pod, used: &PodUse) -> Option<String> {
    let dirs = pod.spec().volumes.iter().flatten();
    let mut limited =
        dirs.filter_map(|volume| Some((volume.name.as_str(), limit_of(volume.empty_dir.as_ref()?)?)));
    let used: HashMap<&str, u64> =
        used.volumes.iter().filter_map(|volume| Some((volume.name.as_str(), volume.space.used?))).collect();
    limited.find_map(|(name, limit)| {
        let above = units(*used.get(name)?) > amount(limit);
        above.then(|| texts::empty_dir(name, &canonical(&limit.0)))
    })
}

/// Whether the pod may be evicted for its use of local storage.
pub fn is_limited(pod: &Pod) -> bool {
    !pod.is_critical() && has_limit(pod)
}

fn has_limit(pod: &Pod) -> bool {
    let containers = pod.containers().iter().chain(pod.init_containers());
    let dirs = pod.spec().volumes.iter().flatten().filter_map(|volume| volume.empty_dir.as_ref());
    containers.filter_map(storage_limit).next().is_some() || dirs.filter_map(limit_of).next().is_some()
}

fn limit_of(dir: &EmptyDirVolumeSource) -> Option<&Quantity> {
    dir.size_limit.as_ref().filter(|limit| amount(limit) > Amount::ZERO)
}

/// The pod's use of local storage, above the sum of its containers' limits. Containers without a
/// limit do not raise the sum, but their use counts.
fn whole_pod(pod: &Pod, used: &PodUse) -> Option<String> {
    let limit = *pod_limits(pod, Overhead::Excluded).get(STORAGE)?;
    // A limit of zero stays zero.
    let overhead = pod.spec().overhead.iter().flatten().find(|(name, _)| *name == STORAGE);
    let overhead = overhead.filter(|_| !limit.is_zero()).map(|(_, quantity)| amount(quantity));
    let limit = limit + overhead.unwrap_or_default();
    let used = used.local_storage.as_ref().and_then(|space| space.used).map(units).unwrap_or_default();
    (used > limit).then(|| texts::pod_storage(&sum_text(pod, limit)))
}

/// A sum of limits in the form of the limits.
fn sum_text(pod: &Pod, sum: Amount) -> String {
    let limits = || pod.containers().iter().chain(pod.init_containers()).filter_map(storage_limit);
    if let Some(only) = limits().find(|limit| amount(limit) == sum) {
        return canonical(&only.0);
    }
    let first = limits().find(|limit| !amount(limit).is_zero());
    sum.format(first.map_or(Form::Binary, |first| Form::from_text(&first.0)))
}

fn storage_limit(container: &Container) -> Option<&Quantity> {
    container.resources.as_ref()?.limits.as_ref()?.get(STORAGE)
}

/// A container above its limit: its logs and, unless images have a file system of their own, its
/// writable layer. Sidecars count like regular containers; other init containers have ended or hold the
/// pod up, and are only part of the whole pod (Go: pkg/kubelet/eviction, since 1.37).
fn container(pod: &Pod, used: &PodUse, layout: Layout) -> Option<String> {
    let limits: HashMap<&str, &Quantity> = pod
        .containers()
        .iter()
        .chain(pod.init_containers().iter().filter(|container| is_sidecar(container)))
        .filter_map(|container| Some((container.name.as_str(), storage_limit(container)?)))
        .filter(|(_, limit)| !amount(limit).is_zero())
        .collect();
    let used_bytes = |space: Option<&FileSystem>| space.and_then(|space| space.used).unwrap_or(0);
    used.containers.iter().find_map(|container| {
        let limit = limits.get(container.name.as_str())?;
        let layer = if layout.has_image_fs() { 0 } else { used_bytes(container.rootfs.as_ref()) };
        let used = used_bytes(container.logs.as_ref()).saturating_add(layer);
        (units(used) > amount(limit)).then(|| texts::container_storage(&container.name, &canonical(&limit.0)))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::eviction::testing::{pod, static_pod, used};
    use crate::resources::stats::sample::{ContainerUse, Numbers, Snapshot, VolumeUse};

    const MIB: u64 = 1 << 20;

    fn space(mib: u64) -> FileSystem {
        FileSystem { used: Some(mib * MIB), ..FileSystem::default() }
    }

    /// Volumes, local storage, and each container's layer and logs, in MiB.
    fn uses(volumes: &[(&str, u64)], storage: u64, containers: &[(&str, u64, u64)]) -> PodUse {
        let volume = |(name, mib): &(&str, u64)| VolumeUse {
            name: (*name).to_owned(),
            space: space(*mib),
            ..VolumeUse::default()
        };
        let container = |(name, layer, logs): &(&str, u64, u64)| ContainerUse {
            name: (*name).to_owned(),
            rootfs: Some(space(*layer)),
            logs: Some(space(*logs)),
            ..ContainerUse::default()
        };
        PodUse {
            volumes: volumes.iter().map(volume).collect(),
            containers: containers.iter().map(container).collect(),
            local_storage: Some(space(storage)),
            ..used("p", Numbers::default())
        }
    }

    fn check(spec: Value, used: PodUse, layout: Layout, expected: Option<(&str, &str)>) {
        let snapshot = Snapshot { pods: vec![used], ..Snapshot::default() };
        let found = above_limits(&[pod("p", spec.clone())], &PodUses::new(&snapshot), layout);
        let shown = found.first().map(|victim| (victim.signal, victim.message.as_str()));
        assert_eq!(shown, expected);
        for victim in found {
            assert_eq!((victim.grace_seconds, victim.disruption_target), (1, false));
        }
        let critical = above_limits(&[static_pod("p", spec)], &PodUses::new(&snapshot), layout);
        assert_eq!(critical, [], "static pods are critical");
    }

    fn limited(limits: &[(&str, &str)]) -> Value {
        let container = |(name, limit): &(&str, &str)| match *limit {
            "" => json!({"name": name}),
            limit => json!({"name": name, "resources": {"limits": {"ephemeral-storage": limit}}}),
        };
        json!({"containers": limits.iter().map(container).collect::<Vec<Value>>()})
    }

    #[test]
    fn an_empty_dir_above_its_limit_is_found_first() {
        let mut spec = limited(&[("a", "1Mi")]);
        spec["volumes"] = json!([
            {"name": "free", "emptyDir": {}},
            {"name": "zero", "emptyDir": {"sizeLimit": "0"}},
            {"name": "d", "emptyDir": {"sizeLimit": "0.5Gi", "medium": "Memory"}},
        ]);
        let all = |d| uses(&[("free", 9000), ("zero", 9000), ("d", d)], 9000, &[("a", 9000, 9000)]);
        check(
            spec.clone(),
            all(513),
            Layout::Single,
            Some((EMPTY_DIR, "Usage of EmptyDir volume \"d\" exceeds the limit \"512Mi\". ")),
        );
        let pod_limit = "Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. ";
        check(spec, all(512), Layout::Single, Some((POD, pod_limit)));
    }

    #[test]
    fn a_pod_is_compared_with_the_sum_of_its_limits() {
        let message = |sum: &str| {
            format!("Pod ephemeral local storage usage exceeds the total limit of containers {sum}. ")
        };
        let stored = |storage| uses(&[], storage, &[]);
        check(limited(&[("a", ""), ("b", "")]), stored(9000), Layout::Single, None);
        check(limited(&[("a", "10Mi"), ("b", "")]), stored(10), Layout::Single, None);
        check(
            limited(&[("a", "10Mi"), ("b", "")]),
            stored(11),
            Layout::Single,
            Some((POD, &message("10Mi"))),
        );
        check(
            limited(&[("a", "10Mi"), ("b", "10240Ki")]),
            stored(21),
            Layout::Single,
            Some((POD, &message("20Mi"))),
        );
        check(limited(&[("a", "5M"), ("b", "5M")]), stored(21), Layout::Single, Some((POD, &message("10M"))));
        check(limited(&[("a", "0")]), stored(1), Layout::Single, Some((POD, &message("0"))));
        let with_overhead = |limit| {
            let mut spec = limited(&[("a", limit)]);
            spec["overhead"] = json!({"ephemeral-storage": "5Mi"});
            spec
        };
        check(with_overhead("10Mi"), stored(15), Layout::Single, None);
        check(with_overhead("10Mi"), stored(16), Layout::Single, Some((POD, &message("15Mi"))));
        check(with_overhead("0"), stored(1), Layout::Single, Some((POD, &message("0"))));
    }

    #[test]
    fn a_container_is_compared_with_its_own_limit() {
        let spec = limited(&[("a", "100Mi"), ("b", "10Mi"), ("c", "0")]);
        let message = "Container b exceeded its local ephemeral storage limit \"10Mi\". ";
        let all =
            |layer, logs| uses(&[], 0, &[("c", 99, 99), ("a", 50, 50), ("b", layer, logs), ("x", 99, 99)]);
        check(spec.clone(), all(5, 5), Layout::Single, None);
        check(spec.clone(), all(5, 6), Layout::Single, Some((CONTAINER, message)));
        check(spec.clone(), all(99, 6), Layout::Images, None);
        check(spec.clone(), all(99, 6), Layout::Split, None);
        check(spec, all(0, 11), Layout::Images, Some((CONTAINER, message)));
    }

    #[test]
    fn a_sidecar_is_compared_with_its_own_limit_and_another_init_container_is_not() {
        let mut spec = limited(&[("a", "100Mi")]);
        let mut init = limited(&[("sidecar", "10Mi"), ("init", "10Mi")])["containers"].clone();
        init[0]["restartPolicy"] = json!("Always");
        spec["initContainers"] = init;
        let used = |sidecar, init| uses(&[], 0, &[("sidecar", sidecar, 0), ("init", init, 0)]);
        check(spec.clone(), used(10, 99), Layout::Single, None);
        let message = "Container sidecar exceeded its local ephemeral storage limit \"10Mi\". ";
        check(spec, used(11, 0), Layout::Single, Some((CONTAINER, message)));
    }

    #[test]
    fn pods_without_statistics_are_left_alone() {
        let spec = limited(&[("a", "0")]);
        assert_eq!(above_limits(&[pod("p", spec)], &PodUses::new(&Snapshot::default()), Layout::Single), []);
    }

    #[test]
    fn all_pods_above_a_limit_are_found_in_their_order() {
        let names = ["b", "a", "c"];
        let pods: Vec<Pod> = names.iter().map(|name| pod(name, limited(&[("c", "1Mi")]))).collect();
        let used = |name: &&str, mib| PodUse { uid: (*name).to_owned().into(), ..uses(&[], mib, &[]) };
        let snapshot =
            Snapshot { pods: vec![used(&"a", 2), used(&"b", 2), used(&"c", 1)], ..Snapshot::default() };
        let found = above_limits(&pods, &PodUses::new(&snapshot), Layout::Single);
        assert_eq!(found.iter().map(|victim| victim.pod.name()).collect::<Vec<_>>(), ["b", "a"]);
    }
}
