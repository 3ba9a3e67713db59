//! A snapshot as `/metrics/resource`, and volumes of claims. Every sample but start times carries
//! the moment at which it was taken.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::sample::{ContainerUse, Numbers, PodUse, Snapshot, VolumeUse};
use crate::util::metrics::{Family, Page, Type};

/// Names and values of labels.
type Labels<'a> = [(&'a str, &'a str)];

pub(super) fn seconds(nanoseconds: Option<u64>) -> Option<f64> {
    Some(nanoseconds? as f64 / 1e9)
}

pub(super) fn number(value: Option<u64>) -> Option<f64> {
    Some(value? as f64)
}

pub(super) fn start_seconds(time: Option<Timestamp>) -> Option<f64> {
    Some(time?.as_millisecond() as f64 / 1e3)
}

fn sample(family: &mut Family<'_>, labels: &Labels<'_>, value: Option<f64>, time: Timestamp) {
    if let Some(value) = value {
        family.sample(labels, value, time.as_millisecond());
    }
}

type Select = fn(&Numbers) -> Option<f64>;
type Row = (&'static str, &'static str, Type, Select);

const NODE: [Row; 3] = [
    ("node_cpu_usage_seconds_total", "Processor time of the node.", Type::Counter, |n| seconds(n.cpu)),
    ("node_memory_working_set_bytes", "Working set of the node.", Type::Gauge, |n| number(n.working_set)),
    ("node_swap_usage_bytes", "Swap in use on the node.", Type::Gauge, |n| number(n.swap)),
];

const PODS: [Row; 3] = [
    ("pod_cpu_usage_seconds_total", "Processor time of a pod.", Type::Counter, |n| seconds(n.cpu)),
    ("pod_memory_working_set_bytes", "Working set of a pod.", Type::Gauge, |n| number(n.working_set)),
    ("pod_swap_usage_bytes", "Swap that a pod uses.", Type::Gauge, |n| number(n.swap)),
];

const CONTAINERS: [Row; 4] = [
    ("container_cpu_usage_seconds_total", "Processor time of a container.", Type::Counter, |n| {
        seconds(n.cpu)
    }),
    ("container_memory_working_set_bytes", "Working set of a container.", Type::Gauge, |n| {
        number(n.working_set)
    }),
    ("container_swap_usage_bytes", "Swap that a container uses.", Type::Gauge, |n| number(n.swap)),
    ("container_swap_limit_bytes", "Swap that a container may use.", Type::Gauge, |n| {
        number(n.swap?.checked_add(n.swap_available?))
    }),
];

/// `/metrics/resource`; `None`: the numbers could not be collected.
pub(crate) fn resource(snapshot: Option<&Snapshot>, page: &mut Page) {
    let failed = snapshot.is_none_or(|snapshot| snapshot.incomplete);
    let help = "Whether something could not be found out.";
    page.gauge("resource_scrape_error", help, if failed { 1.0 } else { 0.0 });
    let Some(snapshot) = snapshot else { return };
    for (name, help, kind, select) in NODE {
        let numbers = &snapshot.node.numbers;
        sample(&mut page.family(name, help, kind), &[], select(numbers), numbers.time);
    }
    for (name, help, kind, select) in PODS {
        let mut family = page.family(name, help, kind);
        for pod in &snapshot.pods {
            let labels = [("namespace", &*pod.namespace), ("pod", &*pod.name)];
            sample(&mut family, &labels, select(&pod.numbers), pod.numbers.time);
        }
    }
    for (name, help, kind, select) in CONTAINERS {
        let mut family = page.family(name, help, kind);
        for (pod, container) in containers(snapshot) {
            sample(&mut family, &labels(pod, container), select(&container.numbers), container.numbers.time);
        }
    }
    let help = "When a container was made, in Unix time.";
    let mut family = page.family("container_start_time_seconds", help, Type::Gauge);
    for (pod, container) in containers(snapshot) {
        if let Some(started) = start_seconds(container.started) {
            family.series(&labels(pod, container), started);
        }
    }
}

fn containers(snapshot: &Snapshot) -> impl Iterator<Item = (&PodUse, &ContainerUse)> {
    snapshot.pods.iter().flat_map(|pod| pod.containers.iter().map(move |container| (pod, container)))
}

fn labels<'a>(pod: &'a PodUse, container: &'a ContainerUse) -> [(&'a str, &'a str); 3] {
    [("container", &container.name), ("namespace", &pod.namespace), ("pod", &pod.name)]
}

/// `kubelet_volume_stats_*`: a claim that several pods use is shown once.
pub(crate) fn volumes<'a>(all: impl Iterator<Item = (&'a str, &'a VolumeUse)>, page: &mut Page) {
    let mut claims: BTreeMap<(&str, &str), &VolumeUse> = BTreeMap::new();
    for (namespace, volume) in all {
        if let Some(claim) = &volume.claim {
            claims.entry((namespace, claim)).or_insert(volume);
        }
    }
    type Count = fn(&VolumeUse) -> Option<u64>;
    let columns: [(&str, &str, Count); 6] = [
        ("kubelet_volume_stats_capacity_bytes", "Size of a claim's volume.", |v| v.space.capacity),
        ("kubelet_volume_stats_available_bytes", "What is left of it.", |v| v.space.available),
        ("kubelet_volume_stats_used_bytes", "What is used of it.", |v| v.space.used),
        ("kubelet_volume_stats_inodes", "Its inodes.", |v| v.space.inodes),
        ("kubelet_volume_stats_inodes_free", "Its free inodes.", |v| v.space.inodes_free),
        ("kubelet_volume_stats_inodes_used", "Its inodes in use.", |v| v.space.inodes_used),
    ];
    for (name, help, select) in columns {
        let mut family = page.family(name, help, Type::Gauge);
        for ((namespace, claim), volume) in &claims {
            if let Some(value) = select(volume) {
                family.series(&[("namespace", namespace), ("persistentvolumeclaim", claim)], value as f64);
            }
        }
    }
}
