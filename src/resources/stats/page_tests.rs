//! `/metrics/cadvisor` of recorded machines, number by number.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;

use super::tests::{FakeRuntime, listed, no_cgroups, write};
use super::*;
use crate::model::runtime::ContainerState;
use crate::resources::cgroups::CgroupHierarchies;
use crate::resources::cgroups::Version;
use crate::resources::stats::cadvisor::cadvisor;
use crate::resources::stats::summary::json;
use crate::util::lock::LockExt;
use crate::util::metrics::Page;
use jiff::Timestamp;
use std::collections::BTreeMap;

/// A container and its sandbox of a node with version 1, as a kernel 6.18 wrote them; without
/// unread parts. The container has limits, and its disk's throttling is on.
const FIRST: &[(&str, &str)] = &[
    ("blkio/k8s.io/c1/blkio.bfq.io_service_bytes_recursive", "Total 0\n"),
    (
        "blkio/k8s.io/c1/blkio.throttle.io_service_bytes_recursive",
        "7:0 Read 12288\n7:0 Write 2097152\n7:0 Sync 2109440\n7:0 Async 0\n7:0 Discard 0\n7:0 Total 2109440\nTotal 2109440\n",
    ),
    (
        "blkio/k8s.io/c1/blkio.throttle.io_serviced_recursive",
        "7:0 Read 3\n7:0 Write 32\n7:0 Sync 35\n7:0 Async 0\n7:0 Discard 0\n7:0 Total 35\nTotal 35\n",
    ),
    ("cpu/k8s.io/c1/cgroup.procs", "78\n79\n"),
    ("cpu/k8s.io/c1/cpu.cfs_period_us", "100000\n"),
    ("cpu/k8s.io/c1/cpu.cfs_quota_us", "50000\n"),
    ("cpu/k8s.io/c1/cpu.shares", "102\n"),
    (
        "cpu/k8s.io/c1/cpu.stat",
        "nr_periods 5\nnr_throttled 2\nthrottled_time 1500000000\nnr_bursts 1\nburst_time 500000000\n",
    ),
    ("cpuacct/k8s.io/c1/cpuacct.stat", "user 100\nsystem 50\n"),
    ("cpuacct/k8s.io/c1/cpuacct.usage", "1515381500\n"),
    ("memory/k8s.io/c1/memory.failcnt", "4\n"),
    ("memory/k8s.io/c1/memory.kmem.usage_in_bytes", "303104\n"),
    ("memory/k8s.io/c1/memory.limit_in_bytes", "67108864\n"),
    ("memory/k8s.io/c1/memory.max_usage_in_bytes", "3047424\n"),
    ("memory/k8s.io/c1/memory.memsw.limit_in_bytes", "67108864\n"),
    ("memory/k8s.io/c1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"),
    ("memory/k8s.io/c1/memory.soft_limit_in_bytes", "33554432\n"),
    (
        "memory/k8s.io/c1/memory.stat",
        "cache 0\nrss 114688\nmapped_file 0\nswap 0\npgfault 1036\npgmajfault 3\nworkingset_refault_anon 22\nworkingset_refault_file 21\ntotal_cache 12288\ntotal_rss 114688\ntotal_mapped_file 4096\ntotal_swap 0\ntotal_pgfault 1036\ntotal_pgmajfault 3\ntotal_inactive_file 8192\ntotal_active_file 4096\n",
    ),
    ("memory/k8s.io/c1/memory.usage_in_bytes", "417792\n"),
    ("pids/k8s.io/c1/pids.current", "3\n"),
    ("pids/k8s.io/c1/pids.max", "100\n"),
    ("cpu/k8s.io/s1/cgroup.procs", "77\n"),
    ("cpu/k8s.io/s1/cpu.cfs_period_us", "100000\n"),
    ("cpu/k8s.io/s1/cpu.cfs_quota_us", "-1\n"),
    ("cpu/k8s.io/s1/cpu.shares", "2\n"),
    ("cpuacct/k8s.io/s1/cpuacct.usage", "15153815\n"),
    ("memory/k8s.io/s1/memory.limit_in_bytes", "9223372036854771712\n"),
    // A kernel without accounting of swap: no line of it, nor its files.
    ("memory/k8s.io/s1/memory.stat", "pgfault 10\npgmajfault 0\ntotal_rss 45056\ntotal_inactive_file 0\n"),
    ("memory/k8s.io/s1/memory.usage_in_bytes", "208896\n"),
    ("pids/k8s.io/s1/pids.current", "1\n"),
    ("pids/k8s.io/s1/pids.max", "max\n"),
    ("cpu/cgroup.procs", "1\n"),
    ("cpu/cpu.shares", "1024\n"),
    ("cpuacct/cpuacct.usage", "8582794799323\n"),
    ("memory/memory.stat", "pgfault 96523\npgmajfault 0\ntotal_rss 4688818176\ntotal_inactive_file 1024\n"),
    ("memory/memory.usage_in_bytes", "23612936192\n"),
    ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
    (
        "blkio/blkio.throttle.io_service_bytes_recursive",
        "254:0 Read 1\n254:0 Write 2\n254:0 Total 3\nTotal 3\n",
    ),
    ("blkio/blkio.throttle.io_serviced_recursive", "254:0 Read 4\n254:0 Write 5\nTotal 9\n"),
];

/// The same with version 2, as a kernel 6.1 wrote it with the cost model of its disk switched on.
const SECOND: &[(&str, &str)] = &[
    ("k8s.io/c1/cgroup.procs", "78\n79\n"),
    (
        "k8s.io/c1/cpu.stat",
        "usage_usec 1515381\nuser_usec 1000000\nsystem_usec 515381\nnr_periods 5\nnr_throttled 2\nthrottled_usec 1500000\nnr_bursts 1\nburst_usec 500000\n",
    ),
    ("k8s.io/c1/cpu.max", "50000 100000\n"),
    ("k8s.io/c1/cpu.weight", "4\n"),
    (
        "k8s.io/c1/cpu.pressure",
        "some avg10=1.50 avg60=0.25 avg300=0.05 total=1500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=250000\n",
    ),
    (
        "k8s.io/c1/memory.pressure",
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=2000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\n",
    ),
    (
        "k8s.io/c1/io.pressure",
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=4000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=3000000\n",
    ),
    ("k8s.io/c1/memory.current", "417792\n"),
    ("k8s.io/c1/memory.events", "low 0\nhigh 3\nmax 4\noom 1\noom_kill 1\noom_group_kill 0\n"),
    ("k8s.io/c1/memory.max", "67108864\n"),
    ("k8s.io/c1/memory.min", "33554432\n"),
    ("k8s.io/c1/memory.peak", "3047424\n"),
    (
        "k8s.io/c1/memory.stat",
        "anon 114688\nfile 12288\nkernel 303104\nfile_mapped 4096\ninactive_file 8192\nactive_file 4096\npgfault 1036\npgmajfault 3\nfile_dirty 8192\nfile_writeback 1024\npgscan 31\npgsteal 30\nworkingset_refault_anon 22\nworkingset_refault_file 21\n",
    ),
    ("k8s.io/c1/memory.swap.current", "0\n"),
    ("k8s.io/c1/memory.swap.max", "0\n"),
    ("k8s.io/c1/pids.current", "3\n"),
    ("k8s.io/c1/pids.max", "100\n"),
    (
        "k8s.io/c1/io.stat",
        "7:0 rbytes=12288 wbytes=2097152 rios=3 wios=32 dbytes=0 dios=0 cost.usage=1000000 cost.wait=2000000 cost.indebt=3000000 cost.indelay=4000000\n",
    ),
    ("k8s.io/s1/cgroup.procs", "77\n"),
    ("k8s.io/s1/memory.stat", "anon 45056\nfile 0\n"),
    ("memory.stat", "anon 100\nfile 50\ninactive_file 20\n"),
    ("cpu.stat", "usage_usec 3\nuser_usec 2\nsystem_usec 1\n"),
    (
        "cpu.pressure",
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=9000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    ),
];

/// `/proc` and `/sys` of both.
const MACHINE: &[(&str, &str)] = &[
    ("proc/meminfo", "MemTotal: 24684084 kB\nSwapTotal: 8 kB\nSwapFree: 6 kB\n"),
    ("proc/stat", "cpu 1\nbtime 1795358995\n"),
    ("proc/loadavg", "0.1 0.1 0.1 2/345 9\n"),
    ("proc/sys/kernel/pid_max", "4194304\n"),
    ("proc/sys/kernel/threads-max", "30000\n"),
    ("proc/self/cgroup", "9:name=systemd:/\n4:memory:/\n2:cpuacct:/\n0::/\n"),
    (
        "proc/self/mountinfo",
        "28 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n26 28 0:24 / /dev rw shared:5 - tmpfs tmpfs rw\n",
    ),
    (
        "proc/diskstats",
        " 254       0 vda 1550951 47645 71625066 3714129 159146 500750 223151792 1059942 3 184672 4811653 139825 7 98239368 36689 2859 892\n",
    ),
    (
        "proc/pressure/io",
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=7000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=6000000\n",
    ),
    ("proc/1/limits", "Max open files            1048576              1048576              files     \n"),
    ("proc/1/net/dev", "eth0: 1 2 3 4 0 0 0 0 5 6 7 8 0 0 0 0\n"),
    ("proc/77/limits", "Max open files            1024                 524288               files     \n"),
    ("proc/77/net/dev", "eth0: 10 20 30 40 0 0 0 0 50 60 70 80 0 0 0 0\n"),
    (
        "proc/78/stat",
        "78 (sh) S 77 78 78 0 -1 4194560 822 76 0 0 0 1 0 0 30 10 1 0 730497 2322432 384 18446744073709551615 0\n",
    ),
    ("proc/78/limits", "Max open files            20000                20000                files     \n"),
    (
        "proc/79/stat",
        "79 (sleep) S 78 78 78 0 -1 4194304 60 0 0 0 0 0 0 0 30 10 1 0 730507 2322432 315 18446744073709551615 0\n",
    ),
    ("proc/79/limits", "Max open files            unlimited            unlimited            files     \n"),
    ("sys/devices/system/cpu/online", "0-1\n"),
    ("sys/devices/system/cpu/cpu0/topology/core_id", "0\n"),
    ("sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n"),
    ("sys/devices/system/cpu/cpu1/topology/core_id", "0\n"),
    ("sys/devices/system/cpu/cpu1/topology/physical_package_id", "0\n"),
    ("sys/devices/system/edac/mc/mc0/dimm0/dimm_mem_type", "Unbuffered-DDR4\n"),
    ("sys/devices/system/edac/mc/mc0/dimm0/size", "8192\n"),
    ("sys/dev/block/7:0/uevent", "MAJOR=7\nMINOR=0\nDEVNAME=loop0\nDEVTYPE=disk\nDISKSEQ=11\n"),
    ("sys/dev/block/254:0/uevent", "MAJOR=254\nMINOR=0\nDEVNAME=vda\nDEVTYPE=disk\n"),
];

struct Fixture {
    _dir: tempfile::TempDir,
    fake: FakeRuntime,
    collector: Collector,
}

fn fixture(version: Version, cgroups: &[(&str, &str)]) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    write(&root, MACHINE);
    write(&root.join("cg"), cgroups);
    for (process, links) in
        [(77, &["/dev/null"][..]), (78, &["/dev/null", "pipe:[7]", "socket:[8]"]), (79, &["socket:[9]"])]
    {
        let fd = root.join(format!("proc/{process}/fd"));
        std::fs::create_dir_all(&fd).unwrap();
        links
            .iter()
            .enumerate()
            .for_each(|(number, link)| symlink(link, fd.join(number.to_string())).unwrap());
    }
    let settings = Settings {
        node: "n1".into(),
        roots: Roots { proc: root.join("proc"), sys: root.join("sys") },
        cgroups: CgroupHierarchies { root: root.join("cg"), version, controllers: BTreeMap::new() },
        root_dir: root.clone(),
        pod_logs_dir: root.join("logs"),
        system: [("kubelet", String::new()), ("runtime", String::new()), ("misc", String::new())],
        started: Timestamp::from_second(1_795_359_000).unwrap(),
        reserved_memory: 0,
        excludes_huge_pages: true,
        volume_period: None,
    };
    let pod = listed("u1", "web", "s1", &[("c1", "a", ContainerState::Running)]);
    let pods = Arc::new(BTreeMap::from([(pod.uid.clone(), pod)]));
    let fake = FakeRuntime::default();
    let deps = Deps {
        cgroups: no_cgroups(),
        pods: Box::new(move || Arc::clone(&pods)),
        pod: Box::new(|_| None),
        memory_limit: Box::new(|_| None),
        volumes: Box::new(|_| Vec::new()),
        runtime: Box::new(fake.clone()),
    };
    Fixture { _dir: dir, fake, collector: Collector::new(settings, deps) }
}

impl Fixture {
    fn page(&self) -> String {
        let snapshot = self.collector.snapshot(StatsRequest::CADVISOR).unwrap();
        let mut page = Page::new();
        cadvisor(&snapshot, self.collector.roots(), &mut page);
        page.into_text()
    }
}

/// The value of the series of a cgroup with these labels in addition to the common ones.
fn value<'a>(page: &'a str, name: &str, id: &str, more: &[(&str, &str)]) -> Option<&'a str> {
    let more: String = more.iter().map(|(label, value)| format!(",{label}=\"{value}\"")).collect();
    page.lines().find_map(|line| {
        let rest = line.strip_prefix(name)?.strip_prefix('{')?;
        let (labels, rest) = rest.split_once("} ")?;
        let fits = labels.contains(&format!("id=\"{id}\"")) && labels.ends_with(&format!("\"{more}"));
        let is_exact = !more.is_empty() || labels.split(',').count() == 6;
        (fits && is_exact).then(|| rest.split(' ').next()).flatten()
    })
}

/// A family, the labels in addition to the common ones, and the value.
type Expected<'a> = (&'a str, &'a [(&'a str, &'a str)], Option<&'a str>);

fn check(page: &str, id: &str, all: &[Expected<'_>]) {
    for (name, more, expected) in all {
        assert_eq!(value(page, name, id, more), *expected, "{name} {more:?} of {id} in\n{page}");
    }
}

/// The numbers of the container in both versions.
const CONTAINER: &[Expected<'_>] = &[
    ("container_health_state", &[], Some("-1")),
    // The Go kubelet has these no more, from 1.37 on.
    ("container_cpu_load_average_10s", &[], None),
    ("container_cpu_load_d_average_10s", &[], None),
    ("container_tasks_state", &[("state", "running")], None),
    ("container_memory_workingset_refault_file_total", &[], Some("21")),
    ("container_memory_workingset_refault_anon_total", &[], Some("22")),
    ("container_cpu_cfs_periods_total", &[], Some("5")),
    ("container_cpu_cfs_throttled_periods_total", &[], Some("2")),
    ("container_cpu_cfs_throttled_seconds_total", &[], Some("1.5")),
    ("container_cpu_cfs_burst_periods_total", &[], Some("1")),
    ("container_cpu_cfs_burst_seconds_total", &[], Some("0.5")),
    ("container_memory_usage_bytes", &[], Some("417792")),
    ("container_memory_working_set_bytes", &[], Some("409600")),
    ("container_memory_rss", &[], Some("114688")),
    ("container_memory_cache", &[], Some("12288")),
    ("container_memory_mapped_file", &[], Some("4096")),
    ("container_memory_total_active_file_bytes", &[], Some("4096")),
    ("container_memory_total_inactive_file_bytes", &[], Some("8192")),
    ("container_memory_kernel_usage", &[], Some("303104")),
    ("container_memory_swap", &[], Some("0")),
    ("container_memory_max_usage_bytes", &[], Some("3047424")),
    ("container_memory_failcnt", &[], Some("4")),
    ("container_memory_failures_total", &[("failure_type", "pgfault"), ("scope", "container")], Some("1036")),
    ("container_memory_failures_total", &[("failure_type", "pgfault"), ("scope", "hierarchy")], Some("1036")),
    ("container_memory_failures_total", &[("failure_type", "pgmajfault"), ("scope", "hierarchy")], Some("3")),
    ("container_oom_events_total", &[], Some("1")),
    ("container_processes", &[], Some("2")),
    ("container_file_descriptors", &[], Some("4")),
    ("container_sockets", &[], Some("2")),
    ("container_threads", &[], Some("3")),
    ("container_threads_max", &[], Some("100")),
    // Of the shell, which was started first.
    ("container_ulimits_soft", &[("ulimit", "max_open_files")], Some("20000")),
    ("container_spec_cpu_period", &[], Some("100000")),
    ("container_spec_cpu_quota", &[], Some("50000")),
    ("container_spec_memory_limit_bytes", &[], Some("67108864")),
    ("container_spec_memory_reservation_limit_bytes", &[], Some("33554432")),
    ("container_fs_reads_bytes_total", &[("device", "/dev/loop0")], Some("12288")),
    ("container_fs_writes_bytes_total", &[("device", "/dev/loop0")], Some("2097152")),
    ("container_fs_reads_total", &[("device", "/dev/loop0")], Some("3")),
    ("container_fs_writes_total", &[("device", "/dev/loop0")], Some("32")),
    (
        "container_blkio_device_usage_total",
        &[("device", "/dev/loop0"), ("major", "7"), ("minor", "0"), ("operation", "Write")],
        Some("2097152"),
    ),
    // The kernel does not count these of a cgroup.
    ("container_fs_sector_reads_total", &[("device", "/dev/loop0")], None),
    ("container_fs_reads_merged_total", &[("device", "/dev/loop0")], None),
    ("container_fs_io_current", &[("device", "/dev/loop0")], None),
    ("container_fs_inodes_free", &[("device", "")], None),
    // Limits have no time.
    ("container_start_time_seconds", &[], Some("1600000001")),
    ("container_creation_time_seconds", &[], Some("1600000001")),
];

/// The numbers of the machine in both versions.
const ROOT: &[Expected<'_>] = &[
    ("container_fs_sector_reads_total", &[("device", "/dev/vda")], Some("71625066")),
    ("container_fs_sector_writes_total", &[("device", "/dev/vda")], Some("223151792")),
    ("container_fs_reads_merged_total", &[("device", "/dev/vda")], Some("47645")),
    ("container_fs_writes_merged_total", &[("device", "/dev/vda")], Some("500750")),
    ("container_fs_read_seconds_total", &[("device", "/dev/vda")], Some("3714.129")),
    ("container_fs_write_seconds_total", &[("device", "/dev/vda")], Some("1059.942")),
    ("container_fs_io_current", &[("device", "/dev/vda")], Some("3")),
    ("container_fs_io_time_seconds_total", &[("device", "/dev/vda")], Some("184.672")),
    ("container_fs_io_time_weighted_seconds_total", &[("device", "/dev/vda")], Some("4811.653")),
    ("container_fs_reads_total", &[("device", "/dev")], Some("0")),
    ("container_fs_reads_bytes_total", &[("device", "/dev")], None),
    ("container_threads", &[], Some("345")),
    ("container_threads_max", &[], Some("30000")),
    ("container_ulimits_soft", &[("ulimit", "max_open_files")], Some("1048576")),
    ("container_spec_memory_limit_bytes", &[], Some("25276502016")),
    ("container_spec_memory_swap_limit_bytes", &[], Some("8192")),
    ("container_spec_cpu_period", &[], Some("0")),
    ("container_spec_cpu_quota", &[], None),
    ("container_cpu_cfs_periods_total", &[], None),
    ("container_start_time_seconds", &[], Some("1795358995")),
    // Not of its cgroup, which has none here.
    ("container_pressure_io_waiting_seconds_total", &[], Some("7")),
    ("container_pressure_io_stalled_seconds_total", &[], Some("6")),
];

#[test]
fn version_1_has_the_series_of_the_go_kubelet() {
    let fixture = fixture(Version::V1, FIRST);
    let page = fixture.page();
    check(&page, "/k8s.io/c1", CONTAINER);
    check(
        &page,
        "/k8s.io/c1",
        &[
            ("container_cpu_usage_seconds_total", &[("cpu", "total")], Some("1.5153815")),
            ("container_cpu_user_seconds_total", &[], Some("1")),
            ("container_cpu_system_seconds_total", &[], Some("0.5")),
            ("container_spec_cpu_shares", &[], Some("102")),
            ("container_spec_memory_swap_limit_bytes", &[], Some("67108864")),
            ("container_pressure_cpu_waiting_seconds_total", &[], None),
            (
                "container_blkio_device_usage_total",
                &[("device", "/dev/loop0"), ("major", "7"), ("minor", "0"), ("operation", "Sync")],
                Some("2109440"),
            ),
        ],
    );
    check(
        &page,
        "/k8s.io/s1",
        &[
            ("container_spec_memory_limit_bytes", &[], Some("0")),
            ("container_spec_memory_swap_limit_bytes", &[], Some("0")),
            ("container_spec_memory_reservation_limit_bytes", &[], Some("0")),
            ("container_spec_cpu_quota", &[], None),
            ("container_cpu_cfs_burst_periods_total", &[], None),
            ("container_memory_swap", &[], Some("0")),
            ("container_memory_kernel_usage", &[], Some("0")),
            ("container_threads_max", &[], Some("0")),
            ("container_file_descriptors", &[], Some("1")),
            ("container_sockets", &[], Some("0")),
            ("container_ulimits_soft", &[("ulimit", "max_open_files")], Some("1024")),
            ("container_network_receive_errors_total", &[("interface", "eth0")], Some("30")),
        ],
    );
    assert!(page.contains("id=\"/k8s.io/s1\",image=\"pause:1\",name=\"s1\""), "{page}");
    check(&page, "/", ROOT);
    check(
        &page,
        "/",
        &[
            ("container_spec_cpu_shares", &[], Some("1024")),
            // The cgroup's counters of a disk, not the machine's: one series each.
            ("container_fs_reads_total", &[("device", "/dev/vda")], Some("4")),
            ("container_processes", &[], Some("1")),
        ],
    );
    for line in
        ["machine_cpu_cores{boot_id=\"\",machine_id=\"", "machine_scrape_error 0", "machine_nvm_capacity{"]
    {
        assert!(page.lines().any(|shown| shown.starts_with(line)), "{line} in\n{page}");
    }
    for (name, value) in [
        ("machine_cpu_physical_cores", 1.0),
        ("machine_cpu_sockets", 1.0),
        ("machine_cpu_books", 0.0),
        ("machine_cpu_drawers", 0.0),
        ("machine_dimm_count", 1.0),
        ("machine_dimm_capacity_bytes", 8.0 * 1024.0 * 1024.0 * 1024.0),
        ("machine_nvm_avg_power_budget_watts", 0.0),
    ] {
        let line = page.lines().find(|line| line.starts_with(&format!("{name}{{")));
        let shown: f64 =
            line.unwrap_or_else(|| panic!("{name}")).rsplit(' ').next().unwrap().parse().unwrap();
        assert!((shown - value).abs() < f64::EPSILON, "{name} {shown}");
    }
    // No series twice, and times for samples only.
    let mut seen = BTreeSet::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (series, rest) = line.split_once("} ").unwrap_or((line, ""));
        assert!(seen.insert(series), "twice: {line}");
        let untimed = line.starts_with("machine_")
            || line.starts_with("cadvisor_")
            || line.starts_with("container_spec_")
            || line.starts_with("container_start_time_")
            || line.starts_with("container_creation_time_");
        assert_eq!(rest.split(' ').count(), if untimed { 1 } else { 2 }, "{line}");
    }
    // The image of a sandbox never changes.
    fixture.collector.shared.state.locked().last = None;
    assert!(fixture.page().contains("image=\"pause:1\""));
    assert_eq!(*fixture.fake.requested_images.lock().unwrap(), ["s1"]);
}

#[test]
fn version_2_has_the_series_of_the_go_kubelet() {
    let page = fixture(Version::V2, SECOND).page();
    check(&page, "/k8s.io/c1", CONTAINER);
    let disk: &[(&str, &str)] = &[("device", "/dev/loop0")];
    check(
        &page,
        "/k8s.io/c1",
        &[
            ("container_cpu_usage_seconds_total", &[("cpu", "total")], Some("1.515381")),
            ("container_spec_cpu_shares", &[], Some("80")),
            ("container_spec_memory_swap_limit_bytes", &[], Some("0")),
            ("container_memory_events_high_total", &[], Some("3")),
            ("container_memory_events_max_total", &[], Some("4")),
            ("container_memory_file_dirty_bytes", &[], Some("8192")),
            ("container_memory_file_writeback_bytes", &[], Some("1024")),
            ("container_memory_pgscan_total", &[], Some("31")),
            ("container_memory_pgsteal_total", &[], Some("30")),
            ("container_pressure_cpu_waiting_seconds_total", &[], Some("1.5")),
            ("container_pressure_cpu_stalled_seconds_total", &[], Some("0.25")),
            ("container_pressure_memory_waiting_seconds_total", &[], Some("2")),
            ("container_pressure_memory_stalled_seconds_total", &[], Some("1")),
            ("container_pressure_io_waiting_seconds_total", &[], Some("4")),
            ("container_pressure_io_stalled_seconds_total", &[], Some("3")),
            ("container_fs_io_cost_usage_seconds_total", disk, Some("1")),
            ("container_fs_io_cost_wait_seconds_total", disk, Some("2")),
            ("container_fs_io_cost_indebt_seconds_total", disk, Some("3")),
            ("container_fs_io_cost_indelay_seconds_total", disk, Some("4")),
        ],
    );
    check(&page, "/", ROOT);
    check(
        &page,
        "/",
        &[
            ("container_pressure_cpu_waiting_seconds_total", &[], Some("9")),
            ("container_fs_reads_total", disk, None),
            ("container_fs_reads_total", &[("device", "/dev/vda")], Some("1550951")),
        ],
    );
}

#[test]
fn descriptors_are_read_for_the_cadvisor_page_only() {
    let fixture = fixture(Version::V1, FIRST);
    let open = |wanted| {
        fixture.collector.shared.state.locked().last = None;
        let snapshot = fixture.collector.snapshot(wanted).unwrap();
        let numbers = &snapshot.pods[0].containers[0].numbers;
        (numbers.processes, numbers.details.as_ref().map(|details| details.open.is_some()))
    };
    assert_eq!(open(StatsRequest::SUMMARY), (Some(2), None));
    assert_eq!(open(StatsRequest::RESOURCE), (Some(2), None));
    assert!(fixture.fake.requested_images.lock().unwrap().is_empty());
    assert_eq!(open(StatsRequest::CADVISOR), (Some(2), Some(true)));
}

#[test]
fn an_agent_without_a_cgroup_of_its_own_shows_its_process() {
    let fixture = fixture(Version::V1, FIRST);
    let status = "Name: coracle\nVmRSS:     9000 kB\nRssAnon:   4000 kB\nVmSwap: 0 kB\n";
    let stat = "7 (coracle) S 1 7 7 0 -1 4194304 100 20 3 40 250 50 0 0 20 0 1 0 100 1 1\n";
    let proc = fixture.collector.roots().proc.clone();
    write(&proc, &[("self/status", status), ("self/stat", stat)]);
    let summary = json(&fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap());
    let part = &summary["node"]["systemContainers"][0];
    assert_eq!(part["name"], "kubelet");
    assert_eq!(part["startTime"], "2026-11-22T14:50:00Z");
    assert!(part["cpu"]["usageCoreNanoSeconds"].as_u64() > Some(0), "{part}");
    assert!(part["cpu"]["usageNanoCores"].is_u64(), "a rate also for who asks first: {part}");
    assert_eq!(
        (&part["memory"]["rssBytes"], &part["memory"]["workingSetBytes"]),
        (&(4_096_000.into()), &(9_216_000.into()))
    );
    assert_eq!(
        (&part["memory"]["pageFaults"], &part["memory"]["majorPageFaults"]),
        (&(103.into()), &(3.into()))
    );
    // It has no series: there is no cgroup to name.
    assert!(!fixture.page().contains("coracle"));
}
