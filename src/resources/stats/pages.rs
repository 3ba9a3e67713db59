//! A snapshot as pages of metrics: `/metrics/resource` and `/metrics/cadvisor`. Every sample
//! but start times carries the moment at which it was taken.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::sample::{ContainerUse, Interface, Network, Numbers, PodUse, Pressure, Snapshot, VolumeUse};
use crate::resources::Roots;
use crate::resources::machine::Machine;
use crate::resources::system::SystemFacts;
use crate::util::metrics::{Family, Page, Type};

/// Names and values of labels.
pub type Labels<'a> = [(&'a str, &'a str)];

fn seconds(nanoseconds: Option<u64>) -> Option<f64> {
    Some(nanoseconds? as f64 / 1e9)
}

fn number(value: Option<u64>) -> Option<f64> {
    Some(value? as f64)
}

fn start(at: Option<Timestamp>) -> Option<f64> {
    Some(at?.as_millisecond() as f64 / 1e3)
}

fn sample(family: &mut Family<'_>, labels: &Labels<'_>, value: Option<f64>, at: Timestamp) {
    if let Some(value) = value {
        family.sample(labels, value, at.as_millisecond());
    }
}

type Of = fn(&Numbers) -> Option<f64>;
type Row = (&'static str, &'static str, Type, Of);

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

/// `/metrics/resource`; `None`: the numbers could not be had.
pub fn resource(snapshot: Option<&Snapshot>, page: &mut Page) {
    let failed = snapshot.is_none_or(|snapshot| snapshot.incomplete);
    let help = "Whether something could not be found out.";
    page.gauge("resource_scrape_error", help, if failed { 1.0 } else { 0.0 });
    let Some(snapshot) = snapshot else { return };
    for (name, help, kind, of) in NODE {
        let numbers = &snapshot.node.numbers;
        sample(&mut page.family(name, help, kind), &[], of(numbers), numbers.at);
    }
    for (name, help, kind, of) in PODS {
        let mut family = page.family(name, help, kind);
        for pod in &snapshot.pods {
            let labels = [("namespace", &*pod.namespace), ("pod", &*pod.name)];
            sample(&mut family, &labels, of(&pod.numbers), pod.numbers.at);
        }
    }
    for (name, help, kind, of) in CONTAINERS {
        let mut family = page.family(name, help, kind);
        for (pod, container) in containers(snapshot) {
            sample(&mut family, &labels(pod, container), of(&container.numbers), container.numbers.at);
        }
    }
    let help = "When a container was made, in Unix time.";
    let mut family = page.family("container_start_time_seconds", help, Type::Gauge);
    for (pod, container) in containers(snapshot) {
        if let Some(started) = start(container.started) {
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

/// Something with a cgroup, under the labels that every series of it has.
struct Subject<'a> {
    labels: [(&'static str, &'a str); 6],
    numbers: &'a Numbers,
    started: Option<Timestamp>,
    network: Option<&'a Network>,
    container: Option<&'a ContainerUse>,
}

fn wait(pressure: Option<Pressure>, full: bool) -> Option<f64> {
    let pressure = pressure?;
    let share = if full { pressure.full } else { pressure.some };
    Some(share.total as f64 / 1e6)
}

const CGROUP: [Row; 28] = [
    ("container_cpu_user_seconds_total", "Processor time outside the kernel.", Type::Counter, |n| {
        seconds(n.details.as_ref()?.user)
    }),
    ("container_cpu_system_seconds_total", "Processor time in the kernel.", Type::Counter, |n| {
        seconds(n.details.as_ref()?.system)
    }),
    ("container_cpu_cfs_periods_total", "Periods of the CPU limit.", Type::Counter, |n| {
        number(n.details.as_ref()?.periods.filter(|_| is_limited(n)))
    }),
    ("container_cpu_cfs_throttled_periods_total", "Periods in which it waited.", Type::Counter, |n| {
        number(n.details.as_ref()?.throttled.filter(|_| is_limited(n)))
    }),
    ("container_cpu_cfs_throttled_seconds_total", "Waits for the next period.", Type::Counter, |n| {
        seconds(n.details.as_ref()?.throttled_time.filter(|_| is_limited(n)))
    }),
    ("container_memory_usage_bytes", "Memory with the page cache.", Type::Gauge, |n| number(n.usage)),
    ("container_memory_working_set_bytes", "Working set.", Type::Gauge, |n| number(n.working_set)),
    ("container_memory_rss", "Memory that no file backs.", Type::Gauge, |n| number(n.rss)),
    ("container_memory_cache", "Page cache.", Type::Gauge, |n| number(n.details.as_ref()?.cache)),
    ("container_memory_mapped_file", "Page cache that is mapped.", Type::Gauge, |n| {
        number(n.details.as_ref()?.mapped)
    }),
    ("container_memory_swap", "Swap in use.", Type::Gauge, |n| number(n.swap)),
    ("container_memory_max_usage_bytes", "The most memory in use.", Type::Gauge, |n| {
        number(n.details.as_ref()?.peak)
    }),
    ("container_memory_failcnt", "How often the memory limit was hit.", Type::Counter, |n| {
        number(n.details.as_ref()?.failures)
    }),
    ("container_oom_events_total", "Processes killed for want of memory.", Type::Counter, |n| {
        number(n.details.as_ref()?.oom_kills)
    }),
    ("container_processes", "Processes.", Type::Gauge, |n| number(n.processes)),
    ("container_threads", "Threads.", Type::Gauge, |n| number(n.details.as_ref()?.threads)),
    ("container_spec_cpu_shares", "CPU weight in shares.", Type::Gauge, |n| {
        number(n.details.as_ref()?.shares)
    }),
    ("container_spec_cpu_period", "Period of the CPU limit in microseconds.", Type::Gauge, |n| {
        number(n.details.as_ref()?.period)
    }),
    ("container_spec_cpu_quota", "CPU limit in microseconds per period.", Type::Gauge, |n| {
        number(n.details.as_ref()?.quota)
    }),
    ("container_spec_memory_limit_bytes", "Memory limit; 0: none.", Type::Gauge, |n| {
        number(n.details.as_ref()?.memory_limit)
    }),
    ("container_spec_memory_swap_limit_bytes", "Limit of swap; 0: none.", Type::Gauge, |n| {
        number(n.details.as_ref()?.swap_limit)
    }),
    ("container_pressure_cpu_waiting_seconds_total", "Some task waited for a CPU.", Type::Counter, |n| {
        wait(n.cpu_pressure, false)
    }),
    ("container_pressure_cpu_stalled_seconds_total", "All tasks waited for a CPU.", Type::Counter, |n| {
        wait(n.cpu_pressure, true)
    }),
    ("container_pressure_memory_waiting_seconds_total", "Some task waited for memory.", Type::Counter, |n| {
        wait(n.memory_pressure, false)
    }),
    ("container_pressure_memory_stalled_seconds_total", "All tasks waited for memory.", Type::Counter, |n| {
        wait(n.memory_pressure, true)
    }),
    ("container_pressure_io_waiting_seconds_total", "Some task waited for a disk.", Type::Counter, |n| {
        wait(n.io_pressure, false)
    }),
    ("container_pressure_io_stalled_seconds_total", "All tasks waited for a disk.", Type::Counter, |n| {
        wait(n.io_pressure, true)
    }),
    ("container_last_seen", "When this was read, in Unix time.", Type::Gauge, |n| {
        Some(n.at.as_second() as f64)
    }),
];

/// Without a limit the periods say nothing.
fn is_limited(numbers: &Numbers) -> bool {
    numbers.details.as_ref().is_some_and(|details| details.quota.is_some())
}

/// Takes one number out of an interface's.
type Counted = fn(&Interface) -> u64;

const TRAFFIC: [(&str, &str, Counted); 8] = [
    ("container_network_receive_bytes_total", "Bytes received.", |i| i.received.bytes),
    ("container_network_receive_packets_total", "Packets received.", |i| i.received.packets),
    ("container_network_receive_packets_dropped_total", "Packets dropped on receipt.", |i| {
        i.received.dropped
    }),
    ("container_network_receive_errors_total", "Errors of receipt.", |i| i.received.errors),
    ("container_network_transmit_bytes_total", "Bytes sent.", |i| i.sent.bytes),
    ("container_network_transmit_packets_total", "Packets sent.", |i| i.sent.packets),
    ("container_network_transmit_packets_dropped_total", "Packets dropped on sending.", |i| i.sent.dropped),
    ("container_network_transmit_errors_total", "Errors of sending.", |i| i.sent.errors),
];

/// `/metrics/cadvisor`, with what concerns the machine.
pub fn cadvisor(snapshot: &Snapshot, roots: &Roots, page: &mut Page) {
    machine(roots, page);
    let subjects = subjects(snapshot);
    let help = "Processor time.";
    let mut family = page.family("container_cpu_usage_seconds_total", help, Type::Counter);
    for subject in &subjects {
        let labels = with(subject, "cpu", "total");
        sample(&mut family, &labels, seconds(subject.numbers.cpu), subject.numbers.at);
    }
    drop(family);
    for (name, help, kind, of) in CGROUP {
        let mut family = page.family(name, help, kind);
        for subject in &subjects {
            sample(&mut family, &subject.labels, of(subject.numbers), subject.numbers.at);
        }
    }
    let help = "When it was made, in Unix time.";
    let mut family = page.family("container_start_time_seconds", help, Type::Gauge);
    for subject in &subjects {
        sample(&mut family, &subject.labels, start(subject.started), subject.numbers.at);
    }
    drop(family);
    for (name, help, of) in TRAFFIC {
        let mut family = page.family(name, help, Type::Counter);
        for (subject, network) in subjects.iter().filter_map(|one| Some((one, one.network?))) {
            for interface in &network.interfaces {
                let labels = with(subject, "interface", &interface.name);
                sample(&mut family, &labels, Some(of(interface) as f64), network.at);
            }
        }
    }
    disks(&subjects, roots, page);
    for (name, help, used) in [
        ("container_fs_usage_bytes", "What the writable layer takes.", true),
        ("container_fs_limit_bytes", "The size of its file system.", false),
    ] {
        let mut family = page.family(name, help, Type::Gauge);
        for subject in &subjects {
            let Some(layer) = subject.container.and_then(|container| container.rootfs.as_ref()) else {
                continue;
            };
            let value = if used { layer.used } else { layer.capacity };
            sample(&mut family, &with(subject, "device", ""), number(value), subject.numbers.at);
        }
    }
}

fn with<'a>(subject: &Subject<'a>, name: &'static str, value: &'a str) -> [(&'static str, &'a str); 7] {
    let [container, id, image, its_name, namespace, pod] = subject.labels;
    [container, (name, value), id, image, its_name, namespace, pod]
}

/// The machine, its parts, and each pod with its sandbox and containers.
fn subjects(snapshot: &Snapshot) -> Vec<Subject<'_>> {
    fn path(numbers: &Numbers) -> &str {
        numbers.details.as_ref().map_or("", |details| &details.path)
    }
    let subject = |numbers, [id, name, image, container, pod, namespace]: [_; 6]| Subject {
        labels: [
            ("container", container),
            ("id", id),
            ("image", image),
            ("name", name),
            ("namespace", namespace),
            ("pod", pod),
        ],
        numbers,
        started: None,
        network: None,
        container: None,
    };
    let node = &snapshot.node;
    let mut all = vec![Subject {
        started: node.booted,
        network: node.network.as_ref(),
        ..subject(&node.numbers, ["/", "", "", "", "", ""])
    }];
    for part in node.system.iter().filter(|part| part.numbers.details.is_some()) {
        let of = subject(&part.numbers, [path(&part.numbers), "", "", "", "", ""]);
        all.push(Subject { started: part.started, ..of });
    }
    for pod in &snapshot.pods {
        // The cgroup around the pod, where it has one.
        if pod.numbers.details.is_some() {
            let of = subject(&pod.numbers, [path(&pod.numbers), "", "", "", &pod.name, &pod.namespace]);
            all.push(Subject { started: pod.started, ..of });
        }
        if let Some((id, numbers)) = &pod.sandbox {
            let of = subject(numbers, [path(numbers), id, "", "", &pod.name, &pod.namespace]);
            all.push(Subject { started: pod.started, network: pod.network.as_ref(), ..of });
        }
        for container in &pod.containers {
            let numbers = &container.numbers;
            let (id, name, image) = (path(numbers), &*container.id, &*container.image);
            let of = subject(numbers, [id, name, image, &container.name, &pod.name, &pod.namespace]);
            all.push(Subject { started: container.started, container: Some(container), ..of });
        }
    }
    all
}

/// What was read from and written to each disk, under the disk's name.
fn disks(subjects: &[Subject<'_>], roots: &Roots, page: &mut Page) {
    let traffic = |subject: &Subject<'_>| {
        subject.numbers.details.as_ref().map(|details| details.disks.clone()).unwrap_or_default()
    };
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for disk in subjects.iter().flat_map(traffic) {
        names.entry(disk.device).or_insert_with_key(|numbers| device(roots, numbers));
    }
    type Count = fn(&super::sample::DiskTraffic) -> u64;
    let columns: [(&str, &str, Count); 4] = [
        ("container_fs_reads_total", "Reads from disks.", |disk| disk.reads),
        ("container_fs_writes_total", "Writes to disks.", |disk| disk.writes),
        ("container_fs_reads_bytes_total", "Bytes read from disks.", |disk| disk.read_bytes),
        ("container_fs_writes_bytes_total", "Bytes written to disks.", |disk| disk.written_bytes),
    ];
    for (name, help, of) in columns {
        let mut family = page.family(name, help, Type::Counter);
        for subject in subjects {
            for disk in subject.numbers.details.iter().flat_map(|details| &details.disks) {
                let name = names.get(&disk.device).map_or("", String::as_str);
                let labels = with(subject, "device", name);
                sample(&mut family, &labels, Some(of(disk) as f64), subject.numbers.at);
            }
        }
    }
}

/// `/dev/sda` for `8:0`.
fn device(roots: &Roots, numbers: &str) -> String {
    let path = roots.sys.join("dev/block").join(numbers).join("uevent");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    name.map_or_else(|| numbers.to_owned(), |name| format!("/dev/{name}"))
}

fn machine(roots: &Roots, page: &mut Page) {
    let facts = SystemFacts::read(roots, std::path::Path::new("/"));
    page.family("cadvisor_version_info", "The agent stands in for cAdvisor.", Type::Gauge).series(
        &[
            ("cadvisorRevision", ""),
            ("cadvisorVersion", ""),
            ("dockerVersion", ""),
            ("kernelVersion", &facts.kernel_version),
            ("osVersion", &facts.os_image),
        ],
        1.0,
    );
    let Ok(machine) = Machine::read(roots) else { return };
    let labels = [
        ("boot_id", &*facts.boot_id),
        ("machine_id", &*facts.machine_id),
        ("system_uuid", &*facts.system_uuid),
    ];
    let mut one = |name, help, value| {
        page.family(name, help, Type::Gauge).series(&labels, value);
    };
    one("machine_cpu_cores", "Processors.", f64::from(machine.cpus));
    one("machine_memory_bytes", "Memory.", machine.memory_bytes as f64);
    one("machine_swap_bytes", "Swap space.", facts.swap_bytes as f64);
}

/// `kubelet_volume_stats_*`: a claim that several pods use is shown once.
pub fn volumes<'a>(all: impl Iterator<Item = (&'a str, &'a VolumeUse)>, page: &mut Page) {
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
    for (name, help, of) in columns {
        let mut family = page.family(name, help, Type::Gauge);
        for ((namespace, claim), volume) in &claims {
            if let Some(value) = of(volume) {
                family.series(&[("namespace", namespace), ("persistentvolumeclaim", claim)], value as f64);
            }
        }
    }
}
