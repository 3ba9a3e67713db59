use super::*;
use crate::resources::cgroups::Version;
use crate::resources::stats::sample::{DiskStatKind, Operation};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;

fn tree(version: Version, files: &[(&str, &str)]) -> (tempfile::TempDir, Tree) {
    let dir = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    let cgroups = CgroupHierarchies { root: dir.path().to_owned(), version, controllers: BTreeMap::new() };
    let tree = Tree::new(&cgroups);
    (dir, tree)
}

/// As a kernel 6.1 wrote them.
const SECOND: &[(&str, &str)] = &[
    (
        "a/b/cpu.stat",
        "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\nnr_periods 40\nnr_throttled 3\nthrottled_usec 250000\nnr_bursts 2\nburst_usec 70\n",
    ),
    ("a/b/cpu.max", "50000 100000\n"),
    ("a/b/cpu.weight", "39\n"),
    (
        "a/b/cpu.pressure",
        "some avg10=1.50 avg60=0.25 avg300=0.05 total=123456\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=23456\n",
    ),
    ("a/b/io.pressure", "some avg10=1.50 avg60=0.25 avg300=0.05 total=123456\n"),
    ("a/b/memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"),
    ("a/b/memory.current", "10485760\n"),
    (
        "a/b/memory.stat",
        "anon 4194304\nfile 6291456\nkernel 100000\nfile_mapped 1048576\ninactive_anon 0\ninactive_file 2097152\nactive_file 4194304\npgfault 900\npgmajfault 7\n",
    ),
    ("a/b/memory.max", "20971520\n"),
    ("a/b/memory.peak", "11485760\n"),
    ("a/b/memory.swap.current", "4096\n"),
    ("a/b/memory.swap.max", "max\n"),
    ("a/b/memory.min", "1048576\n"),
    ("a/b/memory.events", "low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n"),
    ("a/b/pids.current", "5\n"),
    ("a/b/pids.max", "max\n"),
    ("a/b/cgroup.procs", "101\n102\n"),
    ("a/b/io.stat", "8:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n259:1 \n"),
];

#[test]
fn number_below_zero_is_zero() {
    let stat = "anon -4096\nfile 8192\nshmem -\ninactive_file x\n";
    let names = ["anon", "file", "shmem", "inactive_file"];
    assert_eq!(names.map(|name| field(stat, name)), [Some(0), Some(8192), None, None]);
    let (_dir, tree) = tree(Version::V2, &[("a/memory.stat", stat), ("a/memory.current", "-1\n")]);
    assert_eq!(tree.numbers("/a", Depth::Full, false).unwrap().usage, Some(0), "not that of the root cgroup");
}

#[test]
fn version_2_is_read_file_by_file() {
    let (_dir, tree) = tree(Version::V2, SECOND);
    let found = tree.numbers("/a/b", Depth::Full, true).unwrap();
    assert_eq!(found.cpu, Some(1_500_000_000));
    assert_eq!(tree.cpu("a/b"), Some(1_500_000_000));
    assert_eq!((found.usage, found.working_set), (Some(10_485_760), Some(8_388_608)));
    assert_eq!((found.rss, found.available), (Some(4_194_304), Some(12_582_912)));
    assert_eq!((found.faults, found.major_faults), (Some(900), Some(7)));
    assert_eq!((found.swap, found.swap_available, found.processes), (Some(4096), None, None));
    assert_eq!(tree.processes("/a/b").unwrap().ids, [101, 102]);
    let cpu = found.cpu_pressure.unwrap();
    assert_eq!(
        (cpu.some.avg10, cpu.some.avg60, cpu.some.total, cpu.full.total),
        (1.5, 0.25, 123_456, 23_456)
    );
    // Without a `full` line.
    assert_eq!(found.memory_pressure, Some(PsiStats::default()));
    assert_eq!(found.io_pressure, Some(PsiStats { some: cpu.some, full: PsiData::default() }));
    assert_eq!(tree.numbers("/a/b", Depth::Basic, false).unwrap().io_pressure, None);
    let details = found.details.unwrap();
    assert_eq!(details.path, "/a/b");
    assert_eq!((details.user, details.system), (Some(1_000_000_000), Some(500_000_000)));
    assert_eq!(
        (details.periods, details.throttled, details.throttled_time),
        (Some(40), Some(3), Some(250_000_000))
    );
    assert_eq!((details.quota, details.period, details.shares), (Some(50_000), Some(100_000), Some(998)));
    assert_eq!((details.memory_limit, details.swap_limit), (Some(20_971_520), Some(0)));
    assert_eq!((details.oom_kills, details.failures, details.threads), (Some(1), Some(12), Some(5)));
    assert_eq!((details.bursts, details.burst_time), (Some(2), Some(70_000)));
    assert_eq!((details.active_file, details.inactive_file), (Some(4_194_304), Some(2_097_152)));
    assert_eq!((details.kernel, details.reservation), (Some(100_000), Some(1_048_576)));
    assert_eq!((details.threads_max, details.disks.len()), (Some(0), 1));
    assert_eq!(details.disks[0].get(DiskStatKind::Bytes, Operation::Read), Some(4096));
    assert_eq!(details.disks[0].get(DiskStatKind::Served, Operation::Write), Some(2));
    assert_eq!((tree.numbers("a/c", Depth::Full, false), tree.processes("a/c")), (None, None));
    assert!(tree.made("a/b").is_some() && tree.made("a/c").is_none());
}

#[test]
fn the_root_of_version_2_has_no_memory_current() {
    let (_dir, tree) = tree(
        Version::V2,
        &[
            ("memory.stat", "anon 100\nfile 50\ninactive_file 20\n"),
            ("cpu.stat", "usage_usec 3\n"),
            ("cpu.max", "max 100000\n"),
        ],
    );
    let found = tree.numbers("/", Depth::Full, true).unwrap();
    assert_eq!((found.usage, found.working_set, found.cpu), (Some(150), Some(130), Some(3000)));
    assert_eq!((found.available, found.processes), (None, None));
    let details = found.details.unwrap();
    assert_eq!((details.quota, details.period), (None, Some(100_000)));
    assert_eq!((details.memory_limit, details.reservation, details.threads_max), (None, None, None));
}

/// As a kernel 6.18 wrote them.
const FIRST: &[(&str, &str)] = &[
    ("cpuacct/k/1/cpuacct.usage", "7000000000\n"),
    ("cpuacct/k/1/cpuacct.stat", "user 500\nsystem 200\n"),
    ("cpu/k/1/cpu.stat", "nr_periods 10\nnr_throttled 4\nthrottled_time 99\nnr_bursts 2\nburst_time 70\n"),
    ("cpu/k/1/cpu.cfs_quota_us", "-1\n"),
    ("cpu/k/1/cpu.cfs_period_us", "100000\n"),
    ("cpu/k/1/cpu.shares", "1024\n"),
    ("memory/k/1/memory.usage_in_bytes", "5000000\n"),
    ("memory/k/1/memory.max_usage_in_bytes", "6000000\n"),
    ("memory/k/1/memory.failcnt", "0\n"),
    ("memory/k/1/memory.limit_in_bytes", "9223372036854771712\n"),
    ("memory/k/1/memory.memsw.limit_in_bytes", "9000000\n"),
    ("memory/k/1/memory.soft_limit_in_bytes", "9223372036854771712\n"),
    ("memory/k/1/memory.kmem.usage_in_bytes", "430080\n"),
    ("memory/k/1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    (
        "memory/k/1/memory.stat",
        "cache 1\nrss 2\ninactive_file 3\npgfault 683\npgmajfault 1\ntotal_cache 3000000\ntotal_rss 1000000\ntotal_mapped_file 4096\ntotal_swap 1000\ntotal_inactive_file 2000000\ntotal_active_file 1000000\n",
    ),
    ("memory/k/1/cgroup.procs", "7\n"),
    ("pids/k/1/pids.current", "3\n"),
    ("pids/k/1/pids.max", "100\n"),
    // Of another scheduler, which has no disk.
    ("blkio/k/1/blkio.bfq.io_service_bytes_recursive", "Total 0\n"),
    ("blkio/k/1/blkio.bfq.io_serviced_recursive", "Total 0\n"),
    (
        "blkio/k/1/blkio.throttle.io_service_bytes_recursive",
        "8:0 Read 4096\n8:0 Write 0\n8:0 Sync 4096\n8:0 Async 0\n8:0 Discard 0\n8:0 Total 4096\nTotal 4096\n",
    ),
    ("blkio/k/1/blkio.throttle.io_serviced_recursive", "8:0 Read 2\n8:0 Write 1\nTotal 3\n"),
    // Without what is in the cgroups below.
    ("blkio/k/1/blkio.throttle.io_serviced", "8:0 Read 1\n8:0 Write 1\nTotal 2\n"),
];

#[test]
fn version_1_has_a_tree_per_controller() {
    for version in [Version::V1, Version::Hybrid] {
        let (_dir, tree) = tree(version, FIRST);
        let found = tree.numbers("/k/1", Depth::Full, true).unwrap();
        assert_eq!(
            (found.cpu, found.usage, found.working_set),
            (Some(7_000_000_000), Some(5_000_000), Some(3_000_000))
        );
        assert_eq!((found.rss, found.available, found.faults), (Some(1_000_000), None, Some(683)));
        assert_eq!((found.swap, found.swap_available), (Some(1000), Some(8_999_000)));
        assert_eq!((tree.processes("k/1").unwrap().ids, found.cpu_pressure), (vec![7], None));
        let details = found.details.unwrap();
        assert_eq!((details.user, details.system), (Some(5_000_000_000), Some(2_000_000_000)));
        assert_eq!((details.quota, details.period, details.shares), (None, Some(100_000), Some(1024)));
        assert_eq!(
            (details.throttled, details.throttled_time, details.oom_kills),
            (Some(4), Some(99), Some(2))
        );
        assert_eq!(
            (details.memory_limit, details.cache, details.threads),
            (Some(0), Some(3_000_000), Some(3))
        );
        assert_eq!((details.bursts, details.burst_time), (Some(2), Some(70)));
        assert_eq!((details.active_file, details.inactive_file), (Some(1_000_000), Some(2_000_000)));
        assert_eq!((details.kernel, details.reservation), (Some(430_080), Some(0)));
        assert_eq!(details.threads_max, Some(100));
        let [disk] = &details.disks[..] else { panic!("{:?}", details.disks) };
        assert_eq!((disk.device.as_str(), disk.counts.len()), ("8:0", 8));
        assert_eq!(disk.get(DiskStatKind::Bytes, Operation::Sync), Some(4096));
        assert_eq!(disk.get(DiskStatKind::Served, Operation::Read), Some(2));
        assert_eq!(disk.get(DiskStatKind::Merged, Operation::Read), None);
        assert!(tree.top().ends_with("memory"));
    }
}

#[test]
fn counters_of_bfq_are_preferred_to_those_of_throttling() {
    let lines = |read: u64| format!("8:0 Read {read}\n8:0 Write 1\n8:0 Total {}\nTotal 9\n", read + 1);
    let texts: Vec<String> = (1..=8).map(lines).collect();
    let names = [
        "throttle.io_service_bytes",
        "throttle.io_serviced",
        "bfq.io_service_bytes_recursive",
        "bfq.io_serviced_recursive",
        "bfq.io_merged_recursive",
        "bfq.io_queued_recursive",
        "bfq.io_service_time_recursive",
    ];
    let paths: Vec<String> = names.iter().map(|name| format!("blkio/k/1/blkio.{name}")).collect();
    let files: Vec<(&str, &str)> =
        paths.iter().zip(&texts).map(|(path, text)| (path.as_str(), text.as_str())).collect();
    let numbers = |files: &[(&str, &str)]| {
        let all =
            [FIRST.iter().filter(|(path, _)| !path.starts_with("blkio")).copied().collect(), files.to_vec()];
        let (_dir, tree) = tree(Version::V1, &all.concat());
        tree.numbers("k/1", Depth::Full, true).unwrap().details.unwrap().disks
    };
    use DiskStatKind::{Bytes, Merged, Queued, Served, Time};
    let [disk] = &numbers(&files)[..] else { panic!("one disk") };
    let read = |counted| disk.get(counted, Operation::Read);
    assert_eq!([Bytes, Served, Merged, Queued, Time].map(read), [3, 4, 5, 6, 7].map(Some));
    // A kernel that counts no more than bytes and requests.
    let [disk] = &numbers(&files[..2])[..] else { panic!("one disk") };
    let read = |counted| disk.get(counted, Operation::Read);
    assert_eq!([Bytes, Served, Merged].map(read), [Some(1), Some(2), None]);
}

#[test]
fn limits() {
    for (limit, used, left) in [
        (Some(100), Some(30), Some(70)),
        (Some(100), Some(130), Some(0)),
        (Some(u64::MAX), Some(1), None),
        (Some((1 << 62) + 1), Some(1), None),
        (None, Some(1), None),
        (Some(1), None, None),
    ] {
        assert_eq!(available(limit, used), left, "{limit:?} {used:?}");
    }
}

#[test]
fn own_cgroup_is_that_of_memory_and_cpuacct() {
    for (first, expected) in [
        ("5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n", Some("/x")),
        // Memory alone is counted there.
        ("5:cpu,cpuacct:/\n4:memory:/x\n1:name=systemd:/x\n", None),
        ("4:memory:/x\n", None),
        ("5:cpu,cpuacct:/\n4:memory:/\n", None),
    ] {
        assert_eq!(own_path(first, false).as_deref(), expected, "{first}");
        assert_eq!(own_path(first, true), None);
    }
    let second = "0::/system.slice/coracle.service\n";
    assert_eq!(own_path(second, true).as_deref(), Some("/system.slice/coracle.service"));
    assert_eq!(own_path("", true), None);
    let _ = own_cgroup(Path::new("/proc"), false);
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text: String) {
        let _ = field(&text, "x");
        let _ = pressure(&text);
        let _ = most(&text);
        let _ = own_path(&text, true);
    }
}
