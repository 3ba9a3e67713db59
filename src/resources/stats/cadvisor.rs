//! A snapshot as `/metrics/cadvisor`: the series that the Go kubelet has from cadvisor's
//! library, under the same names and labels (cadvisor: metrics/prometheus.go and
//! prometheus_machine.go, with the sets of metrics that pkg/kubelet/server chooses).
//! Samples carry the moment at which they were taken; limits and start times do not.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::pages::{number, seconds, start_seconds};
use super::sample::{
    ContainerUse, Details, DiskCounters, DiskStatKind, DiskTraffic, Interface, MountedDisk, Network, Numbers,
    Operation, PsiStats, Snapshot,
};
use crate::resources::Roots;
use crate::resources::machine::{CpuTopology, Dimms, Machine, dimms};
use crate::resources::system::SystemFacts;
use crate::util::metrics::{CommonLabels, Family, Page, Type};

/// Something with a cgroup.
struct Subject<'a> {
    /// The labels that every series of it has.
    labels: CommonLabels,
    numbers: &'a Numbers,
    started: Option<Timestamp>,
    network: Option<&'a Network>,
    container: Option<&'a ContainerUse>,
    file_systems: &'a [MountedDisk],
    /// Whether the limits of its first process are shown.
    has_limits: bool,
}

impl Subject<'_> {
    fn details(&self) -> Option<&Details> {
        self.numbers.details.as_deref()
    }

    fn put(&self, family: &mut Family<'_>, more: &[(&str, &str)], value: Option<f64>) {
        if let Some(value) = value {
            family.under(&self.labels, more, value, Some(self.numbers.time.as_millisecond()));
        }
    }
}

type Select = fn(&Numbers) -> Option<f64>;
type Row = (&'static str, &'static str, Type, Select);

fn detail(numbers: &Numbers, select: fn(&Details) -> Option<u64>) -> Option<f64> {
    number(select(numbers.details.as_ref()?))
}

/// Periods are counted only with a limit.
fn limited(numbers: &Numbers) -> Option<&Details> {
    numbers.details.as_deref().filter(|details| details.quota.is_some())
}

/// The series of all cgroups.
fn always(numbers: &Numbers, value: f64) -> Option<f64> {
    numbers.details.is_some().then_some(value)
}

fn waiting_seconds(pressure: Option<PsiStats>, full: bool) -> Option<f64> {
    let pressure = pressure?;
    let data = if full { pressure.full } else { pressure.some };
    Some(data.total as f64 / 1e6)
}

const ROWS: [Row; 42] = [
    ("container_last_seen", "When this was read, in Unix time.", Type::Gauge, |n| {
        Some(n.time.as_second() as f64)
    }),
    // A constant of the Go kubelet: it does not read it.
    ("container_health_state", "Always -1: there is no health check.", Type::Gauge, |n| always(n, -1.0)),
    ("container_cpu_user_seconds_total", "Processor time outside the kernel.", Type::Counter, |n| {
        seconds(n.details.as_ref()?.user)
    }),
    ("container_cpu_system_seconds_total", "Processor time in the kernel.", Type::Counter, |n| {
        seconds(n.details.as_ref()?.system)
    }),
    ("container_cpu_cfs_periods_total", "Periods of the CPU limit.", Type::Counter, |n| {
        number(limited(n)?.periods)
    }),
    ("container_cpu_cfs_throttled_periods_total", "Periods in which it waited.", Type::Counter, |n| {
        number(limited(n)?.throttled)
    }),
    ("container_cpu_cfs_throttled_seconds_total", "Waits for the next period.", Type::Counter, |n| {
        seconds(limited(n)?.throttled_time)
    }),
    ("container_cpu_cfs_burst_periods_total", "Periods beyond the limit.", Type::Counter, |n| {
        number(limited(n)?.bursts)
    }),
    ("container_cpu_cfs_burst_seconds_total", "Processor time beyond the limit.", Type::Counter, |n| {
        seconds(limited(n)?.burst_time)
    }),
    ("container_memory_usage_bytes", "Memory with the page cache.", Type::Gauge, |n| number(n.usage)),
    ("container_memory_working_set_bytes", "Working set.", Type::Gauge, |n| number(n.working_set)),
    ("container_memory_rss", "Memory that no file backs.", Type::Gauge, |n| number(n.rss)),
    ("container_memory_cache", "Page cache.", Type::Gauge, |n| detail(n, |d| d.cache)),
    ("container_memory_mapped_file", "Page cache that is mapped.", Type::Gauge, |n| detail(n, |d| d.mapped)),
    ("container_memory_total_active_file_bytes", "Page cache used lately.", Type::Gauge, |n| {
        detail(n, |d| d.active_file)
    }),
    ("container_memory_total_inactive_file_bytes", "Page cache not used lately.", Type::Gauge, |n| {
        detail(n, |d| d.inactive_file)
    }),
    ("container_memory_kernel_usage", "Memory of the kernel's own.", Type::Gauge, |n| {
        detail(n, |d| d.kernel.or(Some(0)))
    }),
    ("container_memory_swap", "Swap in use; 0 where the kernel does not count it.", Type::Gauge, |n| {
        number(n.swap).or(always(n, 0.0))
    }),
    ("container_memory_max_usage_bytes", "The most memory in use.", Type::Gauge, |n| {
        detail(n, |d| d.peak.or(Some(0)))
    }),
    ("container_memory_failcnt", "How often the memory limit was hit.", Type::Counter, |n| {
        detail(n, |d| d.failures.or(Some(0)))
    }),
    // The kernel counts the following for version 2, and only the refaults for version 1, too.
    ("container_memory_events_high_total", "How often memory.high was exceeded.", Type::Counter, |n| {
        detail(n, |d| d.high_events.or(Some(0)))
    }),
    ("container_memory_events_max_total", "How often memory.max was hit.", Type::Counter, |n| {
        detail(n, |d| d.max_events.or(Some(0)))
    }),
    ("container_memory_file_dirty_bytes", "Page cache that is not written yet.", Type::Gauge, |n| {
        detail(n, |d| d.dirty.or(Some(0)))
    }),
    ("container_memory_file_writeback_bytes", "Page cache that is being written.", Type::Gauge, |n| {
        detail(n, |d| d.writeback.or(Some(0)))
    }),
    ("container_memory_pgscan_total", "Pages that the kernel checked for reclaim.", Type::Counter, |n| {
        detail(n, |d| d.scanned.or(Some(0)))
    }),
    ("container_memory_pgsteal_total", "Pages that the kernel reclaimed.", Type::Counter, |n| {
        detail(n, |d| d.reclaimed.or(Some(0)))
    }),
    (
        "container_memory_workingset_refault_file_total",
        "Reclaimed pages of files read again.",
        Type::Counter,
        |n| detail(n, |d| d.file_refaults.or(Some(0))),
    ),
    (
        "container_memory_workingset_refault_anon_total",
        "Reclaimed pages from swap again.",
        Type::Counter,
        |n| detail(n, |d| d.anon_refaults.or(Some(0))),
    ),
    ("container_oom_events_total", "Processes killed because memory ran out.", Type::Counter, |n| {
        detail(n, |d| d.oom_kills.or(Some(0)))
    }),
    ("container_processes", "Processes.", Type::Gauge, |n| number(n.processes)),
    ("container_file_descriptors", "Open file descriptors.", Type::Gauge, |n| {
        number(Some(n.details.as_ref()?.open?.descriptors))
    }),
    ("container_sockets", "Open sockets.", Type::Gauge, |n| number(Some(n.details.as_ref()?.open?.sockets))),
    ("container_threads", "Threads.", Type::Gauge, |n| detail(n, |d| d.threads.or(Some(0)))),
    ("container_threads_max", "How many threads there may be; 0: no limit.", Type::Gauge, |n| {
        detail(n, |d| d.threads_max.or(Some(0)))
    }),
    ("container_pressure_cpu_waiting_seconds_total", "Some task waited for a CPU.", Type::Counter, |n| {
        waiting_seconds(n.cpu_pressure, false)
    }),
    ("container_pressure_cpu_stalled_seconds_total", "All tasks waited for a CPU.", Type::Counter, |n| {
        waiting_seconds(n.cpu_pressure, true)
    }),
    ("container_pressure_memory_waiting_seconds_total", "Some task waited for memory.", Type::Counter, |n| {
        waiting_seconds(n.memory_pressure, false)
    }),
    ("container_pressure_memory_stalled_seconds_total", "All tasks waited for memory.", Type::Counter, |n| {
        waiting_seconds(n.memory_pressure, true)
    }),
    ("container_pressure_io_waiting_seconds_total", "Some task waited for a disk.", Type::Counter, |n| {
        waiting_seconds(n.io_pressure, false)
    }),
    ("container_pressure_io_stalled_seconds_total", "All tasks waited for a disk.", Type::Counter, |n| {
        waiting_seconds(n.io_pressure, true)
    }),
    // With one more label.
    ("container_cpu_usage_seconds_total", "Processor time.", Type::Counter, |n| seconds(n.cpu)),
    ("container_ulimits_soft", "The first process's limit of open files.", Type::Gauge, |n| {
        Some(n.details.as_ref()?.files_limit? as f64)
    }),
];

/// Limits, without a time: 0 where the kernel has none.
const LIMITS: [Row; 6] = [
    ("container_spec_cpu_shares", "CPU weight in shares.", Type::Gauge, |n| {
        detail(n, |d| d.shares.or(Some(0)))
    }),
    ("container_spec_cpu_period", "Period of the CPU limit in microseconds.", Type::Gauge, |n| {
        detail(n, |d| d.period.or(Some(0)))
    }),
    ("container_spec_cpu_quota", "CPU limit in microseconds per period.", Type::Gauge, |n| {
        detail(n, |d| d.quota)
    }),
    ("container_spec_memory_limit_bytes", "Memory limit; 0: none.", Type::Gauge, |n| {
        detail(n, |d| d.memory_limit.or(Some(0)))
    }),
    ("container_spec_memory_swap_limit_bytes", "Limit of swap; 0: none.", Type::Gauge, |n| {
        detail(n, |d| d.swap_limit.or(Some(0)))
    }),
    ("container_spec_memory_reservation_limit_bytes", "Memory that is kept; 0: none.", Type::Gauge, |n| {
        detail(n, |d| d.reservation.or(Some(0)))
    }),
];

/// Selects one number of an interface.
type SelectTraffic = fn(&Interface) -> u64;

const TRAFFIC: [(&str, &str, SelectTraffic); 8] = [
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

/// `/metrics/cadvisor`, with the series of the machine.
pub(crate) fn cadvisor(snapshot: &Snapshot, roots: &Roots, page: &mut Page) {
    machine(roots, page);
    let subjects = subjects(snapshot);
    for &(name, help, kind, select) in &ROWS {
        let mut family = page.family(name, help, kind);
        for subject in &subjects {
            let more: &[(&str, &str)] = match name {
                "container_cpu_usage_seconds_total" => &[("cpu", "total")],
                "container_ulimits_soft" if subject.has_limits => &[("ulimit", "max_open_files")],
                "container_ulimits_soft" => continue,
                _ => &[],
            };
            subject.put(&mut family, more, select(subject.numbers));
        }
    }
    for &(name, help, kind, select) in &LIMITS {
        let mut family = page.family(name, help, kind);
        for subject in &subjects {
            if let Some(value) = select(subject.numbers) {
                family.under(&subject.labels, &[], value, None);
            }
        }
    }
    for name in ["container_creation_time_seconds", "container_start_time_seconds"] {
        let mut family = page.family(name, "When it was made, in Unix time.", Type::Gauge);
        for subject in &subjects {
            if let Some(started) = start_seconds(subject.started) {
                family.under(&subject.labels, &[], started, None);
            }
        }
    }
    faults(&subjects, page);
    for &(name, help, select) in &TRAFFIC {
        let mut family = page.family(name, help, Type::Counter);
        for (subject, network) in subjects.iter().filter_map(|subject| Some((subject, subject.network?))) {
            let time = Some(network.time.as_millisecond());
            for interface in &network.interfaces {
                let more = [("interface", &*interface.name)];
                family.under(&subject.labels, &more, select(interface) as f64, time);
            }
        }
    }
    disks(&subjects, roots, page);
    spaces(&subjects, page);
}

/// Page faults: the kernel counts them for a cgroup with all that is in it, and both scopes
/// of the Go kubelet show the same number.
fn faults(subjects: &[Subject<'_>], page: &mut Page) {
    let mut family = page.family("container_memory_failures_total", "Page faults.", Type::Counter);
    for subject in subjects.iter().filter(|subject| subject.details().is_some()) {
        for (kind, value) in
            [("pgfault", subject.numbers.faults), ("pgmajfault", subject.numbers.major_faults)]
        {
            for scope in ["container", "hierarchy"] {
                subject.put(&mut family, &[("failure_type", kind), ("scope", scope)], number(value));
            }
        }
    }
}

/// The use of file systems: those of the machine, and the writable layers of containers.
fn spaces(subjects: &[Subject<'_>], page: &mut Page) {
    type Count = fn(&super::sample::FileSystem) -> Option<u64>;
    let columns: [(&str, &str, Count, bool); 4] = [
        ("container_fs_usage_bytes", "What is used, or what a writable layer takes.", |fs| fs.used, true),
        ("container_fs_limit_bytes", "The size of a file system.", |fs| fs.capacity, true),
        ("container_fs_inodes_free", "Free inodes.", |fs| fs.inodes_free, false),
        ("container_fs_inodes_total", "All inodes.", |fs| fs.inodes, false),
    ];
    for (name, help, select, of_containers) in columns {
        let mut family = page.family(name, help, Type::Gauge);
        for subject in subjects {
            for disk in subject.file_systems {
                subject.put(&mut family, &[("device", &*disk.device)], number(select(&disk.space)));
            }
            let layer = subject.container.and_then(|container| container.rootfs.as_ref());
            if let Some(layer) = layer.filter(|_| of_containers) {
                subject.put(&mut family, &[("device", "")], number(select(layer)));
            }
        }
    }
}

/// A family of the numbers of disks: what a cgroup counts and its unit, and what the machine
/// counts.
struct DiskRow {
    name: &'static str,
    help: &'static str,
    kind: Type,
    of_cgroup: Option<(DiskStatKind, Operation, f64)>,
    of_machine: Option<fn(&DiskCounters) -> f64>,
}

const fn row(
    name: &'static str,
    help: &'static str,
    of_cgroup: Option<(DiskStatKind, Operation, f64)>,
    of_machine: Option<fn(&DiskCounters) -> f64>,
) -> DiskRow {
    DiskRow { name, help, kind: Type::Counter, of_cgroup, of_machine }
}

const NANO: f64 = 1e-9;
const MICRO: f64 = 1e-6;

/// Milliseconds as seconds.
///
/// DIFFERS: the Go kubelet divides them by a thousand million.
fn milli(time: u64) -> f64 {
    time as f64 / 1e3
}

const DISKS: [DiskRow; 17] = {
    use DiskStatKind::{Bytes, CostDebt, CostDelay, CostUsage, CostWait, Merged, Queued, Served, Time};
    use Operation::{Count, Read, Total, Write};
    [
        row("container_fs_reads_bytes_total", "Bytes read from disks.", Some((Bytes, Read, 1.0)), None),
        row(
            "container_fs_reads_total",
            "Reads from disks.",
            Some((Served, Read, 1.0)),
            Some(|d| d.reads as f64),
        ),
        row(
            "container_fs_reads_merged_total",
            "Reads joined to others.",
            Some((Merged, Read, 1.0)),
            Some(|d| d.reads_merged as f64),
        ),
        row("container_fs_sector_reads_total", "Sectors read.", None, Some(|d| d.sectors_read as f64)),
        row(
            "container_fs_read_seconds_total",
            "Time of reads.",
            Some((Time, Read, NANO)),
            Some(|d| milli(d.read_time)),
        ),
        row("container_fs_writes_bytes_total", "Bytes written to disks.", Some((Bytes, Write, 1.0)), None),
        row(
            "container_fs_writes_total",
            "Writes to disks.",
            Some((Served, Write, 1.0)),
            Some(|d| d.writes as f64),
        ),
        row(
            "container_fs_writes_merged_total",
            "Writes joined to others.",
            Some((Merged, Write, 1.0)),
            Some(|d| d.writes_merged as f64),
        ),
        row("container_fs_sector_writes_total", "Sectors written.", None, Some(|d| d.sectors_written as f64)),
        row(
            "container_fs_write_seconds_total",
            "Time of writes.",
            Some((Time, Write, NANO)),
            Some(|d| milli(d.write_time)),
        ),
        DiskRow {
            kind: Type::Gauge,
            ..row(
                "container_fs_io_current",
                "Requests under way.",
                Some((Queued, Total, 1.0)),
                Some(|d| d.in_flight as f64),
            )
        },
        row(
            "container_fs_io_time_seconds_total",
            "Time with requests under way.",
            Some((Time, Total, NANO)),
            Some(|d| milli(d.busy_time)),
        ),
        row(
            "container_fs_io_time_weighted_seconds_total",
            "The same, times their number.",
            None,
            Some(|d| milli(d.weighted_time)),
        ),
        row(
            "container_fs_io_cost_usage_seconds_total",
            "The disk's time, by its cost model.",
            Some((CostUsage, Count, MICRO)),
            None,
        ),
        row(
            "container_fs_io_cost_wait_seconds_total",
            "Waits for that time.",
            Some((CostWait, Count, MICRO)),
            None,
        ),
        row(
            "container_fs_io_cost_indebt_seconds_total",
            "Time in debt of it.",
            Some((CostDebt, Count, MICRO)),
            None,
        ),
        row(
            "container_fs_io_cost_indelay_seconds_total",
            "Delay because of debt.",
            Some((CostDelay, Count, MICRO)),
            None,
        ),
    ]
};

/// Reads and writes of each disk, with the disk's name.
fn disks(subjects: &[Subject<'_>], roots: &Roots, page: &mut Page) {
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for disk in subjects.iter().filter_map(Subject::details).flat_map(|details| &details.disks) {
        if !names.contains_key(&disk.device) {
            names.insert(disk.device.clone(), device(roots, &disk.device));
        }
    }
    let name_of = |disk: &DiskTraffic| names.get(&disk.device).map_or("", String::as_str);
    for &DiskRow { name, help, kind, of_cgroup, of_machine } in &DISKS {
        let mut family = page.family(name, help, kind);
        for subject in subjects {
            let mut shown: Vec<&str> = Vec::new();
            if let Some((counted, operation, unit)) = of_cgroup {
                for disk in subject.details().into_iter().flat_map(|details| &details.disks) {
                    let name = name_of(disk);
                    if let Some(value) = disk.get(counted, operation)
                        && !shown.contains(&name)
                    {
                        shown.push(name);
                        subject.put(&mut family, &[("device", name)], Some(value as f64 * unit));
                    }
                }
            }
            if let Some(select) = of_machine {
                for disk in subject.file_systems.iter().filter(|disk| !shown.contains(&disk.device.as_str()))
                {
                    subject.put(&mut family, &[("device", &*disk.device)], Some(select(&disk.traffic)));
                }
            }
        }
    }
    let help = "Bytes read from and written to disks.";
    let mut family = page.family("container_blkio_device_usage_total", help, Type::Counter);
    for subject in subjects {
        for disk in subject.details().into_iter().flat_map(|details| &details.disks) {
            let (major, minor) = disk.device.split_once(':').unwrap_or((&disk.device, ""));
            for (_, operation, value) in
                disk.counts.iter().filter(|(counted, ..)| *counted == DiskStatKind::Bytes)
            {
                let more = [
                    ("device", name_of(disk)),
                    ("major", major),
                    ("minor", minor),
                    ("operation", operation.as_str()),
                ];
                subject.put(&mut family, &more, Some(*value as f64));
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

/// The machine, its parts, the QoS classes, and each pod with its sandbox and containers.
fn subjects(snapshot: &Snapshot) -> Vec<Subject<'_>> {
    fn path(numbers: &Numbers) -> &str {
        numbers.details.as_ref().map_or("", |details| &details.path)
    }
    let subject = |numbers, [id, name, image, container, pod, namespace]: [_; 6]| Subject {
        labels: CommonLabels::new(&[
            ("container", container),
            ("id", id),
            ("image", image),
            ("name", name),
            ("namespace", namespace),
            ("pod", pod),
        ]),
        numbers,
        started: None,
        network: None,
        container: None,
        file_systems: &[],
        has_limits: false,
    };
    let node = &snapshot.node;
    let mut all = vec![Subject {
        started: node.booted,
        network: node.network.as_ref(),
        file_systems: &node.file_systems,
        has_limits: true,
        ..subject(&node.numbers, ["/", "", "", "", "", ""])
    }];
    let parts = node.system.iter().chain(&node.classes);
    for part in parts.filter(|part| part.numbers.details.is_some()) {
        let base = subject(&part.numbers, [path(&part.numbers), "", "", "", "", ""]);
        all.push(Subject { started: part.started, ..base });
    }
    for pod in &snapshot.pods {
        // The cgroup around the pod, where it has one.
        if pod.numbers.details.is_some() {
            let base = subject(&pod.numbers, [path(&pod.numbers), "", "", "", &pod.name, &pod.namespace]);
            all.push(Subject { started: pod.started, ..base });
        }
        if let Some(sandbox) = &pod.sandbox {
            let (numbers, network) = (&sandbox.numbers, pod.network.as_ref());
            let (id, name, image) = (path(numbers), &*sandbox.id, &*sandbox.image);
            let base = subject(numbers, [id, name, image, "", &pod.name, &pod.namespace]);
            all.push(Subject { started: pod.started, network, has_limits: true, ..base });
        }
        for container in &pod.containers {
            let numbers = &container.numbers;
            let (id, name, image) = (path(numbers), &*container.id, &*container.image);
            let base = subject(numbers, [id, name, image, &container.name, &pod.name, &pod.namespace]);
            let (started, container) = (container.started, Some(container));
            all.push(Subject { started, container, has_limits: true, ..base });
        }
    }
    all
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
    let machine = Machine::read(roots);
    let help = "Whether something of the machine could not be found out.";
    page.gauge("machine_scrape_error", help, if machine.is_err() { 1.0 } else { 0.0 });
    let Ok(machine) = machine else { return };
    let labels = CommonLabels::new(&[
        ("boot_id", &*facts.boot_id),
        ("machine_id", &*facts.machine_id),
        ("system_uuid", &*facts.system_uuid),
    ]);
    let topology = CpuTopology::read(roots);
    let mut gauge = |name, help, value: f64| {
        page.family(name, help, Type::Gauge).under(&labels, &[], value, None);
    };
    gauge("machine_cpu_cores", "Processors.", f64::from(machine.cpus));
    gauge("machine_cpu_physical_cores", "Cores, of one or more processors each.", topology.cores as f64);
    gauge("machine_cpu_sockets", "Packages of cores.", topology.sockets as f64);
    // Parts of mainframes.
    gauge("machine_cpu_books", "Always 0 on this architecture.", 0.0);
    gauge("machine_cpu_drawers", "Always 0 on this architecture.", 0.0);
    gauge("machine_memory_bytes", "Memory.", machine.memory_bytes as f64);
    gauge("machine_swap_bytes", "Swap space.", facts.swap_bytes as f64);
    // The Go kubelet is built without the library that reads it.
    gauge("machine_nvm_avg_power_budget_watts", "Always 0: not measured.", 0.0);
    let mut family = page.family("machine_nvm_capacity", "Always 0: not measured.", Type::Gauge);
    for mode in ["memory_mode", "app_direct_mode"] {
        family.under(&labels, &[("mode", mode)], 0.0, None);
    }
    drop(family);
    let dimms = dimms(roots);
    let mut family = page.family("machine_dimm_count", "Memory modules, by kind.", Type::Gauge);
    for Dimms { kind, count, .. } in &dimms {
        family.under(&labels, &[("type", kind)], *count as f64, None);
    }
    drop(family);
    let mut family = page.family("machine_dimm_capacity_bytes", "Their size, by kind.", Type::Gauge);
    for Dimms { kind, bytes, .. } in &dimms {
        family.under(&labels, &[("type", kind)], *bytes as f64, None);
    }
}
