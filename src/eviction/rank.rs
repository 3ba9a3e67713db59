//! The order in which pods are evicted (pure; Go: eviction `rankMemoryPressure`,
//! `rankPIDPressure`, `rankDiskPressureFunc`).

use std::cmp::{Ordering, Reverse};

use super::layout::Layout;
use super::observations::Swap;
use super::signal::{Resource, Signal};
use super::usage::{self, PodUses, units};
use crate::model::pod::Pod;
use crate::model::quantity::Amount;

/// What pods are compared by.
struct Entry<'a> {
    pod: &'a Pod,
    /// Whether there are statistics of the pod.
    known: bool,
    exceeds: bool,
    priority: i32,
    used: Amount,
    requested: Amount,
}

impl Entry<'_> {
    /// Larger use above the request first. The sums are compared, as the differences may be
    /// negative.
    fn by_excess(&self, other: &Entry) -> Ordering {
        (other.used + self.requested).cmp(&(self.used + other.requested))
    }
}

/// The pods in the order of eviction. Pods without statistics come first, for process ids first of
/// their priority. Pods that are equal keep their order.
///
/// DIFFERS: if the runtime did not respond, pods without statistics come last: nothing is known
/// against them. Upstream does not evict at all then, also not for a shortage of memory, in which a
/// runtime often does not respond.
pub(super) fn rank<'a>(
    pods: &'a [Pod],
    uses: &PodUses<'_>,
    signal: Signal,
    layout: Layout,
    swap: Swap,
) -> Vec<&'a Pod> {
    let mut entries: Vec<Entry<'a>> = pods.iter().map(|pod| entry(pod, uses, signal, layout, swap)).collect();
    match signal.resource() {
        Resource::Pids => {
            entries.sort_by_key(|entry| (entry.priority, entry.known != uses.incomplete, Reverse(entry.used)))
        }
        _ => entries.sort_by(|a, b| {
            let first = |entry: &Entry| (entry.known != uses.incomplete, !entry.exceeds, entry.priority);
            first(a).cmp(&first(b)).then_with(|| a.by_excess(b))
        }),
    }
    entries.into_iter().map(|entry| entry.pod).collect()
}

fn entry<'a>(pod: &'a Pod, uses: &PodUses<'_>, signal: Signal, layout: Layout, swap: Swap) -> Entry<'a> {
    let resource = signal.resource();
    let mut entry = Entry {
        pod,
        known: false,
        exceeds: false,
        priority: pod.spec().priority.unwrap_or(0),
        used: Amount::ZERO,
        requested: Amount::ZERO,
    };
    let Some(found) = uses.get(pod) else { return entry };
    entry.known = true;
    match resource {
        Resource::Memory => {
            entry.used = usage::memory(&found.numbers, swap).map(units).unwrap_or_default();
            entry.requested = usage::request(pod, resource.as_str());
            entry.exceeds = entry.used > entry.requested;
        }
        Resource::EphemeralStorage | Resource::Inodes => {
            entry.used = usage::disk(pod, found, layout.counted_fs_stats(signal), resource);
            entry.exceeds = entry.used > usage::request(pod, resource.as_str());
            // Also of inodes upstream subtracts the request of bytes: pods with such a request come
            // last. Both agents must choose the same pod.
            entry.requested = usage::request(pod, Resource::EphemeralStorage.as_str());
        }
        Resource::Pids => entry.used = units(usage::processes(found)),
    }
    entry
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::eviction::testing::{pod, used};
    use crate::resources::stats::sample::{ContainerUse, FileSystem, Numbers, PodUse, Snapshot, VolumeUse};

    fn order(pods: &[Pod], uses: Vec<PodUse>, signal: Signal, layout: Layout, swap: Swap) -> Vec<String> {
        let snapshot = Snapshot { pods: uses, ..Snapshot::default() };
        let ranked = rank(pods, &PodUses::new(&snapshot), signal, layout, swap);
        ranked.into_iter().map(|pod| pod.name().to_owned()).collect()
    }

    fn with(name: &str, memory: Option<&str>, priority: Option<i32>) -> Pod {
        let requests = memory.map(|memory| json!({"requests": {"memory": memory}})).unwrap_or(json!({}));
        pod(name, json!({"priority": priority, "containers": [{"name": "c", "resources": requests}]}))
    }

    fn memory(name: &str, mib: u64) -> PodUse {
        used(name, Numbers { working_set: Some(mib << 20), ..Numbers::default() })
    }

    #[test]
    fn memory_compares_excess_then_priority_then_amount() {
        let pods = [
            with("under", Some("100Mi"), None),
            with("over by 10", Some("10Mi"), None),
            with("over by 50", None, None),
            with("over, important", None, Some(5)),
            with("under, unimportant", Some("1Gi"), Some(-5)),
            with("unknown, important", None, Some(1000)),
            with("exactly the request", Some("20Mi"), Some(-9)),
        ];
        let uses = vec![
            memory("under", 90),
            memory("over by 10", 20),
            memory("over by 50", 50),
            memory("over, important", 900),
            memory("under, unimportant", 50),
            memory("exactly the request", 20),
        ];
        assert_eq!(
            order(&pods, uses, Signal::MemoryAvailable, Layout::Single, Swap::Ignored),
            [
                "unknown, important",
                "over by 50",
                "over by 10",
                "over, important",
                "exactly the request",
                "under, unimportant",
                "under",
            ]
        );
    }

    #[test]
    fn pods_without_statistics_come_last_if_the_runtime_did_not_respond() {
        let pods = [with("unknown", None, Some(-5)), with("known", Some("1Gi"), None)];
        let snapshot =
            |incomplete| Snapshot { pods: vec![memory("known", 1)], incomplete, ..Snapshot::default() };
        for (incomplete, first) in [(false, "unknown"), (true, "known")] {
            let snapshot = snapshot(incomplete);
            let ranked =
                rank(&pods, &PodUses::new(&snapshot), Signal::MemoryAvailable, Layout::Single, Swap::Ignored);
            assert_eq!(ranked[0].name(), first);
        }
    }

    #[test]
    fn requests_of_whole_pods_and_overhead_count() {
        let container = json!([{"name": "c", "resources": {"requests": {"memory": "100Mi"}}}]);
        let pods = [
            pod("container", json!({"containers": container})),
            pod("pod", json!({"containers": container, "resources": {"requests": {"memory": "150Mi"}}})),
            pod("pod, cpu only", json!({"containers": container, "resources": {"requests": {"cpu": "1"}}})),
            pod("overhead", json!({"containers": container, "overhead": {"memory": "20Mi"}})),
            pod("only overhead", json!({"containers": [{"name": "c"}], "overhead": {"memory": "1Gi"}})),
            pod(
                "init",
                json!({"containers": container, "initContainers": [{"name": "i", "resources": {"requests": {"memory": "500Mi"}}}]}),
            ),
        ];
        let uses = pods.iter().map(|pod| memory(pod.name(), 160)).collect();
        assert_eq!(
            order(&pods, uses, Signal::AllocatableMemoryAvailable, Layout::Single, Swap::Ignored),
            ["pod, cpu only", "only overhead", "container", "overhead", "pod", "init"]
        );
    }

    #[test]
    fn swap_counts_for_pods_that_may_use_it() {
        let pods = [with("swapped out", None, None), with("resident", None, None)];
        let mut uses = vec![memory("swapped out", 10), memory("resident", 50)];
        uses[0].numbers.swap = Some(100 << 20);
        let order = |swap| order(&pods, uses.clone(), Signal::MemoryAvailable, Layout::Single, swap);
        assert_eq!(order(Swap::Ignored), ["resident", "swapped out"]);
        assert_eq!(order(Swap::Counted), ["swapped out", "resident"]);
    }

    #[test]
    fn processes_are_compared_after_the_priority() {
        let pods = [
            with("few", None, None),
            with("many", None, None),
            with("unknown", None, None),
            with("low", None, Some(-1)),
        ];
        let processes =
            |name: &str, count| used(name, Numbers { processes: Some(count), ..Numbers::default() });
        let uses = vec![processes("few", 1), processes("many", 9), processes("low", 0)];
        assert_eq!(
            order(&pods, uses, Signal::PidAvailable, Layout::Single, Swap::Ignored),
            ["low", "unknown", "many", "few"]
        );
    }

    /// A pod with 1 in its layer, 10 in its logs, and 100, 1,000, … in its volumes.
    fn filled(name: &str, factor: u64) -> PodUse {
        let space = |number: u64| FileSystem {
            used: Some(number * factor),
            inodes_used: Some(number * factor),
            ..FileSystem::default()
        };
        let volume = |name: &str, number| VolumeUse {
            name: name.to_owned(),
            space: space(number),
            ..VolumeUse::default()
        };
        let container =
            ContainerUse { rootfs: Some(space(1)), logs: Some(space(10)), ..ContainerUse::default() };
        PodUse {
            containers: vec![container],
            volumes: vec![
                volume("disk", 100),
                volume("memory", 1_000),
                volume("files", 10_000),
                volume("secret", 100_000),
                volume("host", 1_000_000),
            ],
            ..used(name, Numbers::default())
        }
    }

    fn with_volumes(name: &str, request: &str) -> Pod {
        pod(
            name,
            json!({
                "containers": [{"name": "c", "resources": {"requests": {"ephemeral-storage": request}}}],
                "volumes": [
                    {"name": "disk", "emptyDir": {}},
                    {"name": "memory", "emptyDir": {"medium": "Memory"}},
                    {"name": "files", "configMap": {"name": "m"}},
                    {"name": "secret", "secret": {"secretName": "s"}},
                    {"name": "host", "hostPath": {"path": "/h"}},
                    {"name": "absent", "emptyDir": {}},
                ],
            }),
        )
    }

    #[test]
    fn the_layout_decides_what_counts_as_use_of_a_disk() {
        let pod = with_volumes("p", "0");
        let used = filled("p", 1);
        for (layout, signal, expected) in [
            (Layout::Single, Signal::NodeFsAvailable, 1_010_111),
            (Layout::Single, Signal::ContainerFsAvailable, 1_010_111),
            (Layout::Images, Signal::NodeFsAvailable, 1_010_110),
            (Layout::Images, Signal::ImageFsAvailable, 1),
            (Layout::Images, Signal::ContainerFsInodesFree, 1),
            (Layout::Split, Signal::NodeFsInodesFree, 1_010_111),
            (Layout::Split, Signal::ImageFsAvailable, 0),
        ] {
            let found = usage::disk(&pod, &used, layout.counted_fs_stats(signal), signal.resource());
            assert_eq!(found, Amount::from_units(expected), "{layout:?} {signal:?}");
        }
    }

    #[test]
    fn disks_compare_excess_and_inodes_do_as_upstream() {
        let pods = [
            with_volumes("asks for much", "100Mi"),
            with_volumes("asks for little", "1"),
            with_volumes("asks for nothing", "0"),
        ];
        let uses =
            || vec![filled("asks for much", 60), filled("asks for little", 2), filled("asks for nothing", 1)];
        assert_eq!(
            order(&pods, uses(), Signal::NodeFsAvailable, Layout::Single, Swap::Ignored),
            ["asks for little", "asks for nothing", "asks for much"]
        );
        // All exceed their request of inodes, which is none.
        assert_eq!(
            order(&pods, uses(), Signal::NodeFsInodesFree, Layout::Single, Swap::Ignored),
            ["asks for little", "asks for nothing", "asks for much"]
        );
    }

    /// The cgroup of a pod has no process itself, so that its own number is zero.
    #[test]
    fn processes_of_a_pod_are_those_of_its_containers() {
        let with_processes = |name: &str, own: Option<u64>, containers: &[u64]| {
            let numbers = |processes| Numbers { processes, ..Numbers::default() };
            let container =
                |count: &u64| ContainerUse { numbers: numbers(Some(*count)), ..ContainerUse::default() };
            PodUse { containers: containers.iter().map(container).collect(), ..used(name, numbers(own)) }
        };
        let uses = vec![
            with_processes("few", Some(0), &[2]),
            with_processes("many", Some(0), &[5, 9]),
            with_processes("some", Some(8), &[]),
        ];
        let pods = ["few", "many", "some"].map(|name| with(name, None, None));
        let found = order(&pods, uses, Signal::PidAvailable, Layout::Single, Swap::Ignored);
        assert_eq!(found, ["many", "some", "few"]);
    }

    proptest! {
        /// Any numbers give one order of all pods, and neighbors are in it.
        #[test]
        fn any_numbers_give_an_order(
            pods in proptest::collection::vec((any::<Option<u64>>(), any::<i32>(), "[0-9]{1,25}(Ei|G|m)?"), 0..30),
        ) {
            let all: Vec<Pod> =
                pods.iter().enumerate().map(|(i, (_, priority, request))| with(&i.to_string(), Some(request), Some(*priority))).collect();
            let uses: Vec<PodUse> = pods
                .iter()
                .enumerate()
                .filter_map(|(i, (bytes, ..))| {
                    Some(used(&i.to_string(), Numbers { working_set: Some((*bytes)?), swap: Some((*bytes)?), ..Numbers::default() }))
                })
                .collect();
            for signal in Signal::ALL {
                let found = order(&all, uses.clone(), signal, Layout::Single, Swap::Counted);
                prop_assert_eq!(found.len(), all.len());
                let unknown = found.iter().map(|name| uses.iter().any(|used| &used.name == name)).collect::<Vec<_>>();
                if signal != Signal::PidAvailable {
                    prop_assert!(unknown.is_sorted(), "pods without statistics come first");
                }
            }
        }
    }
}
