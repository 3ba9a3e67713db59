//! Numbers and limits of a cgroup, of version 1 and 2, against cadvisor and the kubelet's reader of a
//! pod's limits; interfaces of a network namespace against cadvisor.

use std::collections::BTreeMap;
use std::path::Path;

use coracle::cgroups::{Cgroups, Driver, Layout, Name};
use coracle::kernel_readers::{
    CgroupHierarchies, DiskStatKind, Numbers, Operation, PsiData, PsiStats, Version, network, numbers,
};
use serde_json::{Value, json};

use crate::machines::{Tree, number};
use crate::peer::Peer;
use crate::random::Random;
use crate::{Cases, mutate_text, pick, rarely};

const CONTROLLERS: [&str; 6] = ["cpu", "cpuacct", "memory", "blkio", "pids", "cpuset"];
const STAT: [&str; 12] = [
    "anon",
    "file",
    "kernel",
    "sock",
    "shmem",
    "file_mapped",
    "inactive_anon",
    "inactive_file",
    "active_file",
    "pgfault",
    "pgmajfault",
    "workingset_refault_file",
];
const FIRST_STAT: [&str; 16] = [
    "cache",
    "rss",
    "mapped_file",
    "swap",
    "pgfault",
    "pgmajfault",
    "inactive_file",
    "active_file",
    "total_cache",
    "total_rss",
    "total_mapped_file",
    "total_swap",
    "total_pgfault",
    "total_pgmajfault",
    "total_inactive_file",
    "total_active_file",
];
const CPU_STAT: [&str; 9] = [
    "usage_usec",
    "user_usec",
    "system_usec",
    "core_sched.force_idle_usec",
    "nr_periods",
    "nr_throttled",
    "throttled_usec",
    "nr_bursts",
    "burst_usec",
];

/// Numbers that do not overflow when they are multiplied.
fn amount(random: &mut Random) -> String {
    match random.below(120) {
        0 => pick(random, &["-1", "-4096", "-9223372036854775809", "+1", "x", "", "1.5", "0x1", "1 2"])
            .to_owned(),
        _ => (random.below(1 << 20) << random.below(25)).to_string(),
    }
}

/// Lines of a name and a number. Some are missing.
fn stat(random: &mut Random, names: &[&str]) -> String {
    let mut text = String::new();
    for name in names {
        if !rarely(random, 30) {
            text += &format!("{name} {}\n", amount(random));
        }
    }
    if rarely(random, 15) { mutate_text(random, text) } else { text }
}

/// A number or no limit.
fn limit(random: &mut Random) -> String {
    match random.below(12) {
        0..4 => "max".to_owned(),
        4 => pick(random, &["00", "x", ""]).to_owned(),
        _ => (4096 * random.below(1 << 22)).to_string(),
    }
}

fn quota(random: &mut Random) -> String {
    if rarely(random, 3) { "max".to_owned() } else { (1000 + random.below(400_000)).to_string() }
}

fn pressure(random: &mut Random) -> String {
    let line = |random: &mut Random, name: &str| {
        let percent = |random: &mut Random| format!("{}.{:02}", random.below(101), random.below(100));
        let (ten, sixty, more) = (percent(random), percent(random), percent(random));
        format!("{name} avg10={ten} avg60={sixty} avg300={more} total={}\n", amount(random))
    };
    let mut text = line(random, "some");
    if !rarely(random, 6) {
        text += &line(random, "full");
    }
    // Upstream ends with a panic at an empty line.
    text
}

fn disks(random: &mut Random) -> String {
    let mut text = String::new();
    for device in ["8:0", "8:16", "253:0", "259:3"] {
        if rarely(random, 2) {
            continue;
        }
        text += device;
        for name in
            ["rbytes", "wbytes", "rios", "wios", "dbytes", "dios", "cost.usage", "cost.wait", "cost.indebt"]
        {
            if !rarely(random, 8) {
                text += &format!(" {name}={}", random.below(1 << 40));
            }
        }
        text.push('\n');
    }
    text
}

fn put_second(random: &mut Random, tree: &mut Tree) {
    let files = [
        ("memory.stat", stat(random, &STAT)),
        ("memory.current", amount(random)),
        ("memory.max", limit(random)),
        ("memory.min", limit(random)),
        ("memory.peak", amount(random)),
        ("memory.swap.current", amount(random)),
        ("memory.swap.max", limit(random)),
        ("memory.events", stat(random, &["low", "high", "max", "oom", "oom_kill"])),
        ("cpu.stat", stat(random, &CPU_STAT)),
        ("cpu.weight", (1 + random.below(10_000)).to_string()),
        ("cpu.max", format!("{} {}", quota(random), pick(random, &["100000", "20000", "1000000"]))),
        ("cpu.pressure", pressure(random)),
        ("memory.pressure", pressure(random)),
        ("io.pressure", pressure(random)),
        ("io.stat", disks(random)),
        ("pids.current", random.below(4000).to_string()),
        ("pids.max", limit(random)),
    ];
    for (name, text) in files {
        let text = if text.ends_with('\n') { text } else { format!("{text}\n") };
        // Without the others upstream counts on with zeros.
        let may_lack = ["memory.min", "memory.peak", "io.stat", "pids.current"].contains(&name)
            || name.ends_with("pressure");
        if !may_lack || !rarely(random, 10) {
            tree.put(&format!("x/{name}"), &text);
        }
    }
}

fn put_first(random: &mut Random, tree: &mut Tree) {
    let blkio = |random: &mut Random| {
        let mut text = String::new();
        for device in ["8:0", "253:0"] {
            for name in ["Read", "Write", "Sync", "Async", "Discard", "Total"] {
                text += &format!("{device} {name} {}\n", random.below(1 << 40));
            }
        }
        format!("{text}Total {}\n", random.below(1 << 40))
    };
    let quota = if rarely(random, 3) { "-1".to_owned() } else { (1000 + random.below(400_000)).to_string() };
    let files = [
        ("memory", "memory.stat", stat(random, &FIRST_STAT)),
        ("memory", "memory.usage_in_bytes", amount(random)),
        ("memory", "memory.max_usage_in_bytes", amount(random)),
        ("memory", "memory.failcnt", amount(random)),
        (
            "memory",
            "memory.limit_in_bytes",
            pick(random, &["9223372036854771712", "9223372036854710272", "104857600", "0"]).to_owned(),
        ),
        (
            "memory",
            "memory.soft_limit_in_bytes",
            pick(random, &["9223372036854771712", "104857600"]).to_owned(),
        ),
        ("memory", "memory.memsw.usage_in_bytes", amount(random)),
        ("memory", "memory.memsw.max_usage_in_bytes", amount(random)),
        ("memory", "memory.memsw.failcnt", amount(random)),
        (
            "memory",
            "memory.memsw.limit_in_bytes",
            pick(random, &["9223372036854771712", "204857600"]).to_owned(),
        ),
        ("memory", "memory.kmem.usage_in_bytes", amount(random)),
        ("memory", "memory.kmem.max_usage_in_bytes", amount(random)),
        ("memory", "memory.kmem.failcnt", amount(random)),
        ("memory", "memory.use_hierarchy", "1".to_owned()),
        ("cpu", "cpu.stat", stat(random, &["nr_periods", "nr_throttled", "throttled_time"])),
        ("cpu", "cpu.shares", random.below(300_000).to_string()),
        ("cpu", "cpu.cfs_quota_us", quota),
        ("cpu", "cpu.cfs_period_us", pick(random, &["100000", "20000"]).to_owned()),
        ("cpuacct", "cpuacct.usage", amount(random)),
        ("cpuacct", "cpuacct.usage_percpu", "1 2 3 4 ".to_owned()),
        (
            "cpuacct",
            "cpuacct.stat",
            format!("user {}\nsystem {}\n", random.below(1 << 30), random.below(1 << 30)),
        ),
        ("pids", "pids.current", random.below(4000).to_string()),
        ("pids", "pids.max", limit(random)),
        ("blkio", "blkio.throttle.io_service_bytes_recursive", blkio(random)),
        ("blkio", "blkio.throttle.io_serviced_recursive", blkio(random)),
    ];
    for (controller, name, text) in files {
        let text = if text.ends_with('\n') { text } else { format!("{text}\n") };
        if controller == "blkio" || !rarely(random, 80) {
            tree.put(&format!("{controller}/x/{name}"), &text);
        }
    }
    for controller in CONTROLLERS {
        tree.directory(&format!("{controller}/x"));
    }
}

/// A number of the answer; 0 is also what upstream leaves out.
fn number_at(value: &Value, path: &str) -> u64 {
    path.split('.').fold(value, |value, name| &value[name]).as_u64().unwrap_or_default()
}

fn pressure_of(value: &Value) -> PsiStats {
    let data = |value: &Value| PsiData {
        avg10: value["avg10"].as_f64().unwrap_or_default(),
        avg60: value["avg60"].as_f64().unwrap_or_default(),
        avg300: value["avg300"].as_f64().unwrap_or_default(),
        total: number_at(value, "total"),
    };
    PsiStats { full: data(&value["full"]), some: data(&value["some"]) }
}

/// Bytes and requests by device, as both count them.
type Disks = BTreeMap<(String, String), u64>;

fn disks_of(numbers: &Numbers) -> Disks {
    let kinds = [
        (DiskStatKind::Bytes, "io_service_bytes"),
        (DiskStatKind::Served, "io_serviced"),
        (DiskStatKind::CostUsage, "io_cost_usage"),
        (DiskStatKind::CostWait, "io_cost_wait"),
        (DiskStatKind::CostDebt, "io_cost_indebt"),
    ];
    let mut all = Disks::new();
    for disk in numbers.details.iter().flat_map(|details| &details.disks) {
        for (counted, operation, value) in &disk.counts {
            let Some((_, name)) = kinds.iter().find(|(kind, _)| kind == counted) else { continue };
            let _ = all
                .insert((disk.device.clone(), format!("{name} {}", Operation::as_str(*operation))), *value);
        }
    }
    all
}

fn disks_of_go(theirs: &Value) -> Disks {
    let mut all = Disks::new();
    for name in ["io_service_bytes", "io_serviced", "io_cost_usage", "io_cost_wait", "io_cost_indebt"] {
        for disk in theirs["diskio"][name].as_array().into_iter().flatten() {
            for (operation, value) in disk["stats"].as_object().into_iter().flatten() {
                let device = format!("{}:{}", number_at(disk, "major"), number_at(disk, "minor"));
                let _ = all.insert((device, format!("{name} {operation}")), value.as_u64().unwrap());
            }
        }
    }
    all
}

const UNLIMITED: i64 = i64::MAX / 65536 * 65536;

/// What upstream takes for no limit.
fn is_limit(bytes: u64) -> bool {
    bytes <= 1 << 62
}

/// The differences of the numbers.
fn compare(numbers: &Numbers, theirs: &Value, second: bool) -> Vec<String> {
    let mut found = Vec::new();
    let ours = numbers;
    let details = ours.details.clone().unwrap_or_default();
    let (stats, spec) = (&theirs["stats"], &theirs["spec"]);
    let mut check = |what: &str, ours: Option<u64>, theirs: u64| {
        if ours.unwrap_or_default() != theirs {
            found.push(format!("{what}: {ours:?}, in Go {theirs}"));
        }
    };
    for (what, ours, path) in [
        ("CPU time", ours.cpu, "cpu.usage.total"),
        ("user", details.user, "cpu.usage.user"),
        ("system", details.system, "cpu.usage.system"),
        ("periods", details.periods, "cpu.cfs.periods"),
        ("throttled", details.throttled, "cpu.cfs.throttled_periods"),
        ("throttled time", details.throttled_time, "cpu.cfs.throttled_time"),
        ("bursts", details.bursts, "cpu.cfs.bursts_periods"),
        ("time of bursts", details.burst_time, "cpu.cfs.burst_time"),
        ("usage", ours.usage, "memory.usage"),
        ("working set", ours.working_set, "memory.working_set"),
        ("rss", ours.rss, "memory.rss"),
        ("swap", ours.swap, "memory.swap"),
        ("faults", ours.faults, "memory.container_data.pgfault"),
        ("major faults", ours.major_faults, "memory.container_data.pgmajfault"),
        ("cache", details.cache, "memory.cache"),
        ("mapped", details.mapped, "memory.mapped_file"),
        ("active", details.active_file, "memory.total_active_file"),
        ("inactive", details.inactive_file, "memory.total_inactive_file"),
        ("peak", details.peak, "memory.max_usage"),
    ] {
        check(what, ours, number_at(stats, path));
    }
    if !second {
        check("failures", details.failures, number_at(stats, "memory.failcnt"));
        check("kernel", details.kernel, number_at(theirs, "kernel"));
    }
    check("threads", details.threads, number_at(theirs, "pids.current"));
    check("limit of threads", details.threads_max, number_at(theirs, "pids.limit"));
    check("shares", details.shares, number_at(spec, "cpu.limit"));
    check("quota", details.quota, number_at(spec, "cpu.quota"));
    check("period", details.period, number_at(spec, "cpu.period"));
    for (what, ours, path) in [
        ("limit", details.memory_limit, "memory.limit"),
        ("limit of swap", details.swap_limit, "memory.swap_limit"),
        ("reservation", details.reservation, "memory.reservation"),
    ] {
        check(what, ours, Some(number_at(spec, path)).filter(|bytes| is_limit(*bytes)).unwrap_or_default());
    }
    for (what, ours, limit, used) in [
        ("available", ours.available, "memory.limit", "memory.working_set"),
        ("available swap", ours.swap_available, "memory.swap_limit", "memory.swap"),
    ] {
        // Upstream subtracts without a check, also from a limit that it cannot read.
        let limit = number_at(spec, limit);
        if what == "available swap" && numbers.swap.is_none() {
            // No line about it.
            continue;
        }
        if is_limit(limit) && limit >= number_at(stats, used) && limit > 0 {
            check(what, ours, limit - number_at(stats, used));
        } else if !is_limit(limit) && ours.is_some() {
            check(what, ours, 0);
        }
    }
    let mut same = |what: &str, ours: String, theirs: String| {
        if ours != theirs {
            found.push(format!("{what}: {ours}, in Go {theirs}"));
        }
    };
    for (what, ours, theirs) in [
        ("CPU pressure", ours.cpu_pressure, &stats["cpu"]["psi"]),
        ("memory pressure", ours.memory_pressure, &stats["memory"]["psi"]),
        ("I/O pressure", ours.io_pressure, &stats["diskio"]["psi"]),
    ] {
        same(what, format!("{:?}", ours.unwrap_or_default()), format!("{:?}", pressure_of(theirs)));
    }
    same("disks", format!("{:?}", disks_of(ours)), format!("{:?}", disks_of_go(stats)));
    found
}

/// The values that a resize of a pod begins with.
fn compare_values(top: &Path, theirs: &Value, second: bool) -> Vec<String> {
    let mount = |controller: &str, path: &Path, kind: &str, options: &str| {
        format!("40 30 0:30 / {} rw,nosuid shared:9 - {kind} {controller} rw{options}\n", path.display())
    };
    let mountinfo: String = match second {
        true => mount("cgroup", top, "cgroup2", ""),
        false => CONTROLLERS
            .iter()
            .map(|controller| mount("cgroup", &top.join(controller), "cgroup", &format!(",{controller}")))
            .collect(),
    };
    let layout = Layout::new("/", Driver::Cgroupfs).unwrap();
    let all = Cgroups::new(layout, &mountinfo, top, Vec::new(), "").unwrap();
    let values = all.read(&Name::parse("/x").unwrap());
    let mut found = Vec::new();
    let mut check = |what: &str, ours: Option<i64>, part: &str, field: &str| {
        let value = &theirs[part];
        if value["error"].is_null() {
            let theirs = value[field].as_i64().or(value[field].as_u64().map(u64::cast_signed));
            // The number of version 1 that stands for no limit.
            let theirs = theirs.map(|bytes| if field == "memory" && bytes >= UNLIMITED { -1 } else { bytes });
            if ours != theirs {
                found.push(format!("{what}: {ours:?}, in Go {theirs:?}"));
            }
        }
    };
    check("shares", values.cpu_shares.map(u64::cast_signed), "config cpu", "shares");
    check("quota", values.cpu_quota.map(|quota| quota.number()), "config cpu", "quota");
    check("period", values.cpu_quota.map(|quota| quota.period.cast_signed()), "config cpu", "period");
    check("memory", values.memory_bytes, "config memory", "memory");
    found
}

fn run(name: &'static str, second: bool, count: u64) {
    let (mut cases, mut random) = Cases::new(name, count);
    let mut peer = Peer::managers();
    let mut tree = Tree::new();
    while cases.next() {
        tree.clear();
        let top = tree.path();
        let controllers = match second {
            true => BTreeMap::new(),
            false => CONTROLLERS
                .iter()
                .map(|controller| ((*controller).to_owned(), top.join(controller)))
                .collect(),
        };
        if second {
            put_second(&mut random, &mut tree);
        } else {
            put_first(&mut random, &mut tree);
        }
        let version = if second { Version::V2 } else { Version::V1 };
        let theirs = peer.ask(&json!({"ask": "cgroup", "dir": top, "unified": second}));
        let ours = numbers(&CgroupHierarchies { root: top.clone(), version, controllers }, "/x");
        for how in compare_values(&top, &theirs, second) {
            cases.differs(&format!("{how}: {theirs}\n{}", tree.shown()));
        }
        // One line that it does not understand takes upstream all numbers of the cgroup.
        if !theirs["error"].is_null() {
            cases.count("refused by Go");
            continue;
        }
        match ours {
            None => cases.count("no memory.stat"),
            Some(ours) => match compare(&ours, &theirs, second).as_slice() {
                [] => cases.count("read alike"),
                found => cases.differs(&format!("{}: {theirs}\n{}", found.join(", "), tree.shown())),
            },
        }
    }
    cases.end("read alike", 3);
}

#[test]
fn numbers_of_cgroup_2_equal_those_of_cadvisor() {
    run("cgroup version 2", true, 6_000);
}

#[test]
fn numbers_of_cgroup_1_equal_those_of_cadvisor() {
    run("cgroup version 1", false, 4_000);
}

#[test]
fn interfaces_equal_those_of_cadvisor() {
    let (mut cases, mut random) = Cases::new("interfaces", 8_000);
    let mut peer = Peer::managers();
    let mut tree = Tree::new();
    tree.clear();
    while cases.next() {
        let mut text = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n"
            .to_owned();
        for _ in 0..random.below(6) {
            let name = pick(
                &mut random,
                &["eth0", "lo", "veth1", "docker0", "bond0.5", "cni0", "a-b", "nerdctl0", "e\u{e9}", "lo0"],
            );
            text += &format!("{name:>6}:");
            for _ in 0..16 {
                text += &format!(
                    " {:>7}",
                    if rarely(&mut random, 900) {
                        number(&mut random)
                    } else {
                        random.below(1 << 40).to_string()
                    }
                );
            }
            text.push('\n');
        }
        tree.put("7/net/dev", &text);
        let theirs = peer.ask(&json!({"ask": "interfaces", "file": tree.path().join("7/net/dev")}));
        if theirs["ok"] != true {
            cases.count("refused by Go");
            continue;
        }
        let ours: Vec<Value> = network(&tree.path(), 7)
            .unwrap()
            .interfaces
            .into_iter()
            .map(|interface| {
                let (received, sent) = (interface.received, interface.sent);
                json!({"name": interface.name, "rx_bytes": received.bytes, "rx_packets": received.packets,
                    "rx_errors": received.errors, "rx_dropped": received.dropped, "tx_bytes": sent.bytes,
                    "tx_packets": sent.packets, "tx_errors": sent.errors, "tx_dropped": sent.dropped})
            })
            .collect();
        match theirs["interfaces"].as_array().cloned().unwrap_or_default() == ours {
            true => cases.count("read alike"),
            false => cases.differs(&format!("{ours:?}, in Go {theirs}: {text}")),
        }
    }
    cases.end("read alike", 2);
}
