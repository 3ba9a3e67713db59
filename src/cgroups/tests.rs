//! The access to cgroups: with plain directories in their place, and with the machine's.

use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

use super::fake;
use super::names::{Driver, Layout, Name};
use super::values::{HugePages, Quota, Values};
use super::{CgroupError, Cgroups};
use crate::model::ids::PodUid;
use crate::model::metrics::CGROUP_OPERATIONS;
use crate::model::pod::QosClass;
use crate::util::cgroup_mounts::{Hierarchy, Mounts, Version};
use crate::util::stop::{self, StopToken};

const ALONE: [&str; 9] =
    ["cpu", "cpuacct", "cpuset", "memory", "pids", "systemd", "devices", "unified", "name-of-another"];
const TOGETHER: [&str; 6] = ["cpu,cpuacct", "cpuset", "memory,pids", "systemd", "devices", "hugetlb"];

fn never() -> StopToken {
    StopToken::never()
}

fn layout(root: &str) -> Layout {
    Layout::new(root, Driver::Cgroupfs).unwrap()
}

fn cgroups(mounts: Mounts, root: &str) -> Cgroups {
    Cgroups::with_mounts(layout(root), mounts, vec![2 << 20], "")
}

fn pod(cgroups: &Cgroups, uid: &str) -> Name {
    cgroups.layout().pod(&PodUid::from(uid), QosClass::Burstable).unwrap()
}

fn values() -> Values {
    Values {
        cpu_shares: Some(512),
        cpu_quota: Some(Quota { microseconds: Some(50_000), period: 100_000 }),
        memory_bytes: Some(100 << 20),
        pids: Some(128),
        ..Values::default()
    }
}

fn text(path: PathBuf) -> String {
    std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        .trim()
        .to_owned()
}

#[test]
fn v1_cgroups_are_made_in_all_hierarchies_but_that_of_devices() {
    for hierarchies in [&ALONE[..], &TOGETHER[..]] {
        let dir = tempfile::tempdir().unwrap();
        let all = cgroups(fake::v1(dir.path(), hierarchies), "");
        let name = pod(&all, "1");
        assert!(!all.exists(&name));
        let outcome = all.make(&name, &values(), &never()).unwrap();
        assert!(outcome.made && outcome.failed.is_empty(), "{outcome:?}");
        assert!(all.exists(&name) && all.exists(all.layout().pods()));
        for hierarchy in hierarchies {
            let made = dir.path().join(hierarchy).join("kubepods/burstable/pod1").exists();
            assert_eq!(made, !["devices", "name-of-another"].contains(hierarchy), "{hierarchy}");
        }
        // No process could enter a cgroup without CPUs.
        for level in ["kubepods", "kubepods/burstable/pod1"] {
            let level = dir.path().join("cpuset").join(level);
            assert_eq!(
                (text(level.join("cpuset.cpus")), text(level.join("cpuset.mems"))),
                ("0-3".into(), "0".into())
            );
        }
        let expected = Values { cpus: Some("0-3".to_owned()), ..values() };
        assert_eq!(all.read(&name), expected);
        assert_eq!(all.memory_usage(&name).unwrap(), 0);
        assert!(all.memory_usage(&pod(&all, "2")).unwrap_err().is_missing());
    }
}

#[test]
fn v1_cgroup_that_lacks_a_hierarchy_does_not_exist_and_is_completed() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v1(dir.path(), &ALONE), "");
    let name = pod(&all, "1");
    all.make(&name, &values(), &never()).unwrap();
    // The recording `a-qos-lost`: some directories of the tier were removed.
    for hierarchy in ["cpu", "cpuset"] {
        std::fs::remove_dir_all(dir.path().join(hierarchy).join("kubepods/burstable")).unwrap();
    }
    let error = all.check(&name).unwrap_err();
    let place = dir.path().display();
    let expected = format!(
        "cgroup /kubepods/burstable/pod1 has some missing paths: {place}/cpu/kubepods/burstable/pod1, \
         {place}/cpuset/kubepods/burstable/pod1"
    );
    assert_eq!((error.to_string(), error.is_missing()), (expected, true));
    let outcome = all.make(&name, &values(), &never()).unwrap();
    // The other hierarchies have their values.
    assert_eq!(
        (outcome.made, outcome.written),
        (true, vec!["cpu.shares".to_owned(), "cpu.cfs_quota_us".to_owned()])
    );
    assert!(all.exists(&name));
    // Other hierarchies do not count.
    std::fs::remove_dir_all(dir.path().join("unified/kubepods")).unwrap();
    assert!(all.exists(&name));
}

#[test]
fn only_changed_values_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v1(dir.path(), &TOGETHER), "");
    let name = pod(&all, "1");
    let huge = Values { huge_pages: HugePages::Limits([].into()), ..values() };
    let written =
        |values: &Values| all.update(&name, values, &never()).unwrap().into_result().unwrap().written;
    let first = all.make(&name, &huge, &never()).unwrap();
    let expected =
        ["memory.limit_in_bytes", "cpu.shares", "cpu.cfs_quota_us", "pids.max", "hugetlb.2MB.limit_in_bytes"];
    assert_eq!(first.written, expected);
    assert!(written(&huge).is_empty());
    assert_eq!(written(&Values { cpu_shares: Some(2), ..huge }), ["cpu.shares"]);
    assert!(!all.make(&name, &Values::default(), &never()).unwrap().made);
    // A file that is missing is named, and the others are written.
    std::fs::remove_file(dir.path().join("cpu,cpuacct/kubepods/burstable/pod1/cpu.shares")).unwrap();
    let outcome = all.update(&name, &Values { pids: Some(5), ..values() }, &never()).unwrap();
    assert_eq!((outcome.written.as_slice(), outcome.failed.len()), (&["pids.max".to_owned()][..], 1));
    assert!(outcome.into_result().unwrap_err().is_missing());
}

#[test]
fn missing_controllers_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v1(dir.path(), &["cpu,cpuacct", "cpuset", "memory"]), "");
    let outcome = all.make(&pod(&all, "1"), &values(), &never()).unwrap();
    let error = outcome.into_result().unwrap_err().to_string();
    assert_eq!(error, "cannot set pids.max: the machine has no controller pids");
}

#[test]
fn pods_are_removed_from_every_hierarchy_with_all_cgroups_in_them() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v1(dir.path(), &ALONE), "");
    let (name, other) = (pod(&all, "1"), pod(&all, "2"));
    for name in [&name, &other] {
        all.make(name, &values(), &never()).unwrap();
    }
    // The runtime's: containers, also in `devices`.
    for path in ["cpu/kubepods/burstable/pod1/container", "devices/kubepods/burstable/pod1/container"] {
        std::fs::create_dir_all(dir.path().join(path)).unwrap();
    }
    let mut deep = dir.path().join("memory/kubepods/burstable/pod1");
    for level in 0..300 {
        std::fs::create_dir(deep.join("beside")).unwrap();
        deep.push(format!("{level}"));
        std::fs::create_dir(&deep).unwrap();
    }
    all.remove_pod(&name, &never()).unwrap();
    all.remove_pod(&name, &never()).unwrap();
    let left: Vec<String> =
        fake::directories(dir.path()).into_iter().filter(|path| path.contains("pod")).collect();
    assert!(left.iter().all(|path| !path.contains("pod1")), "{left:?}");
    assert!(all.exists(&other));
}

#[test]
fn busy_pods_are_an_error_and_the_rest_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v1(dir.path(), &TOGETHER), "");
    let name = pod(&all, "1");
    all.make(&name, &values(), &never()).unwrap();
    let busy = dir.path().join("cpuset/kubepods/burstable/pod1/container");
    std::fs::create_dir_all(&busy).unwrap();
    std::fs::write(busy.join("busy"), "").unwrap();
    // Numbers that must not be killed: none, init, and the agent itself.
    std::fs::write(busy.join("cgroup.procs"), format!("0\n1\n{}\nx\n", std::process::id())).unwrap();
    let error = all.remove_pod(&name, &never()).unwrap_err();
    assert!(matches!(error, CgroupError::Busy { left: 0, .. }), "{error}");
    let left: Vec<String> =
        fake::directories(dir.path()).into_iter().filter(|path| path.ends_with("pod1")).collect();
    assert_eq!(left, ["cpuset/kubepods/burstable/pod1"]);
    let (source, stop) = stop::pair();
    drop(source);
    assert!(matches!(all.remove_pod(&name, &stop), Err(CgroupError::Stopping)));
    std::fs::remove_file(busy.join("busy")).unwrap();
    all.remove_pod(&name, &never()).unwrap();
}

#[test]
fn only_pods_of_this_agent_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v1(dir.path(), &TOGETHER), "/base");
    all.make(&pod(&all, "1"), &values(), &never()).unwrap();
    std::fs::create_dir_all(dir.path().join("memory,pids/base/other/pod1")).unwrap();
    let before = fake::directories(dir.path());
    for path in [
        "/",
        "/base",
        "/base/kubepods",
        "/base/kubepods/burstable",
        "/base/kubepods/besteffort",
        "/base/other/pod1",
        "/kubepods/burstable/pod1",
        "/base/kubepods/burstable/pod1/container",
    ] {
        let name = Name::parse(path).unwrap();
        let error = all.remove_pod(&name, &never()).unwrap_err();
        assert!(matches!(error, CgroupError::Foreign(_)), "{path}: {error}");
        if !path.starts_with("/base/kubepods") {
            assert!(matches!(all.make(&name, &values(), &never()), Err(CgroupError::Foreign(_))), "{path}");
            assert!(matches!(all.update(&name, &values(), &never()), Err(CgroupError::Foreign(_))), "{path}");
        }
    }
    assert_eq!(fake::directories(dir.path()), before);
}

#[test]
fn no_link_leads_out_of_the_tree() {
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside");
    std::fs::create_dir_all(outside.join("pod1/container")).unwrap();
    std::fs::write(outside.join("pod1/cpu.shares"), "7").unwrap();
    std::fs::write(outside.join("file"), "7").unwrap();
    let all = cgroups(fake::v1(&dir.path().join("cgroup"), &["cpu"]), "");
    let name = pod(&all, "1");
    all.make(all.layout().pods(), &Values::default(), &never()).unwrap();
    let tier = dir.path().join("cgroup/cpu/kubepods/burstable");
    symlink(&outside, &tier).unwrap();
    assert!(all.make(&name, &values(), &never()).is_err());
    assert!(all.remove_pod(&name, &never()).is_err());
    assert!(all.list_pods().is_err());
    assert_eq!(all.read(&name), Values::default());
    assert_eq!(all.update(&name, &values(), &never()).unwrap().written, Vec::<String>::new());
    std::fs::remove_file(&tier).unwrap();
    all.make(&name, &Values::default(), &never()).unwrap();
    // A file that is a link is neither read nor written.
    std::fs::remove_file(tier.join("pod1/cpu.shares")).unwrap();
    symlink(outside.join("file"), tier.join("pod1/cpu.shares")).unwrap();
    assert_eq!(all.read(&name).cpu_shares, None);
    assert_eq!(all.update(&name, &values(), &never()).unwrap().written, ["cpu.cfs_quota_us"]);
    std::fs::remove_file(tier.join("pod1/cpu.shares")).unwrap();
    // A link in the pod's cgroup is not followed when the pod is removed.
    symlink(&outside, tier.join("pod1/link")).unwrap();
    assert!(all.remove_pod(&name, &never()).is_err());
    assert_eq!((text(outside.join("file")), text(outside.join("pod1/cpu.shares"))), ("7".into(), "7".into()));
    assert!(outside.join("pod1/container").exists());
}

/// The recording `a-orphans`.
#[test]
fn orphans_are_found_in_any_hierarchy_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v1(dir.path(), &ALONE), "");
    all.make(&pod(&all, "known"), &values(), &never()).unwrap();
    let tier = all.layout().tier(QosClass::BestEffort);
    all.make(&tier, &Values::default(), &never()).unwrap();
    for path in [
        "cpu/kubepods/burstable/pod11111111-1111-1111-1111-111111111111",
        "cpu/kubepods/besteffort/pod22222222-2222-2222-2222-222222222222/some-container",
        "memory/kubepods/pod33333333-3333-3333-3333-333333333333",
        "pids/kubepods/burstable/notapod",
        "cpuset/kubepods/podnot-a-uuid",
        "devices/kubepods/burstable/xpod44444444-4444-4444-4444-444444444444",
        "cpu/kubepods/burstable/other",
        "cpu/kubepods/podpod5",
        "cpu/other/pod66666666-6666-6666-6666-666666666666",
    ] {
        std::fs::create_dir_all(dir.path().join(path)).unwrap();
    }
    let found = all.list_pods().unwrap();
    let uids: Vec<(&str, QosClass)> =
        found.iter().map(|cgroup| (cgroup.uid.as_str(), cgroup.class)).collect();
    let expected = [
        ("", QosClass::Burstable),
        ("11111111-1111-1111-1111-111111111111", QosClass::Burstable),
        ("22222222-2222-2222-2222-222222222222", QosClass::BestEffort),
        ("33333333-3333-3333-3333-333333333333", QosClass::Guaranteed),
        ("44444444-4444-4444-4444-444444444444", QosClass::Burstable),
        ("known", QosClass::Burstable),
        ("not-a-uuid", QosClass::Guaranteed),
    ];
    assert_eq!(uids, expected);
    for orphan in found.iter().filter(|cgroup| cgroup.uid.as_str() != "known") {
        all.remove_listed(orphan, &never()).unwrap();
    }
    let left: Vec<String> = fake::directories(&dir.path().join("cpu"));
    let expected = [
        "kubepods",
        "kubepods/besteffort",
        "kubepods/burstable",
        "kubepods/burstable/other",
        "kubepods/burstable/podknown",
        "kubepods/podpod5",
        "other",
        "other/pod66666666-6666-6666-6666-666666666666",
    ];
    assert_eq!(left, expected);
    assert_eq!(all.list_pods().unwrap().len(), 1);
}

#[test]
fn daemons_are_limited_in_existing_cgroups_only() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v1(dir.path(), &TOGETHER), "");
    let error = all.limit_daemons("/sys", &values(), &never()).unwrap_err();
    assert!(error.is_missing(), "{error}");
    assert!(!dir.path().join("cpuset/sys").exists());
    // An administrator's cgroup has the kernel's files.
    let other = cgroups(all.clone_mounts(), "/sys");
    other.make(other.layout().pods(), &Values::default(), &never()).unwrap();
    all.limit_daemons("/sys", &values(), &never()).unwrap();
    assert_eq!(text(dir.path().join("cpu,cpuacct/sys/cpu.shares")), "512");
    assert!(all.limit_daemons("/sys/../kubepods", &values(), &never()).is_err());
}

#[test]
fn the_root_has_to_exist() {
    let dir = tempfile::tempdir().unwrap();
    let mounts = fake::v1(dir.path(), &["cpu"]);
    let all = cgroups(mounts.clone(), "/<root>/nothing-here");
    let place = dir.path().display();
    let expected =
        format!("cgroup /<root>/nothing-here has some missing paths: {place}/cpu/<root>/nothing-here");
    assert_eq!(all.check_root().unwrap_err().to_string(), expected);
    cgroups(mounts.clone(), "/").check_root().unwrap();
    // With systemd, too, these are the names of directories.
    std::fs::create_dir_all(dir.path().join("cpu/a-b/c")).unwrap();
    let layout = Layout::new("/a-b/c", Driver::Systemd).unwrap();
    Cgroups::with_mounts(layout, mounts, Vec::new(), "").check_root().unwrap();
}

#[test]
fn v2_controllers_are_enabled_below_the_root_of_the_agent() {
    let dir = tempfile::tempdir().unwrap();
    let mount = dir.path().join("cgroup");
    let mounts = fake::v2(&mount, "cpuset cpu io memory hugetlb pids\n");
    let all = cgroups(mounts.clone(), "");
    let name = pod(&all, "1");
    let outcome = all.make(&name, &Values { memory_min: Some(4096), ..values() }, &never()).unwrap();
    assert!(outcome.made && outcome.failed.is_empty(), "{outcome:?}");
    assert_eq!(all.version(), Version::V2);
    assert!(all.exists(&name));
    assert_eq!(text(mount.join("cgroup.subtree_control")), "+cpu +cpuset +hugetlb +io +memory +pids");
    let file = |file: &str| text(mount.join("kubepods/burstable/pod1").join(file));
    assert_eq!(
        (file("cpu.weight"), file("cpu.max"), file("memory.max")),
        ("20".into(), "50000 100000".into(), "104857600".into())
    );
    assert_eq!(
        (file("pids.max"), file("memory.min"), file("cgroup.subtree_control")),
        ("128".into(), "4096".into(), String::new())
    );
    assert!(all.make(&name, &values(), &never()).unwrap().written.is_empty());
    assert_eq!(all.list_pods().unwrap().len(), 1);
    all.remove_pod(&name, &never()).unwrap();
    assert!(!mount.join("kubepods/burstable/pod1").exists());

    // A cgroup that lacks a controller does not exist, although its directory does.
    let tier = mount.join("kubepods/burstable");
    std::fs::write(tier.join("cgroup.controllers"), "cpu memory pids hugetlb").unwrap();
    let error = all.check(&all.layout().tier(QosClass::Burstable)).unwrap_err().to_string();
    assert_eq!(error, "cgroup /kubepods/burstable has some missing controllers: cpuset");
    std::fs::write(mount.join("cgroup.controllers"), "cpu memory pids").unwrap();
    assert!(all.exists(&all.layout().tier(QosClass::Burstable)));

    // Above `cgroupRoot` nothing is changed.
    let mount = dir.path().join("second");
    let mounts = fake::v2(&mount, "cpu memory\n");
    std::fs::create_dir(mount.join("base")).unwrap();
    std::fs::write(mount.join("base/cgroup.controllers"), "cpu").unwrap();
    std::fs::write(mount.join("base/cgroup.subtree_control"), "").unwrap();
    let below = cgroups(mounts, "/base");
    below.make(below.layout().pods(), &Values::default(), &never()).unwrap();
    assert_eq!(text(mount.join("cgroup.subtree_control")), "");
    assert_eq!(text(mount.join("base/cgroup.subtree_control")), "+cpu");
    let error = below.check(below.layout().pods()).unwrap_err().to_string();
    assert_eq!(error, "cgroup /base/kubepods has some missing controllers: memory");
}

#[test]
fn v2_cgroup_in_another_mode_is_an_error_and_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v2(dir.path(), "cpu memory\n"), "");
    all.make(all.layout().pods(), &Values::default(), &never()).unwrap();
    std::fs::write(dir.path().join("kubepods/cgroup.type"), "domain invalid\n").unwrap();
    let error = all.make(&pod(&all, "1"), &values(), &never()).unwrap_err().to_string();
    let place = dir.path().display();
    let expected = format!(
        "cgroup {place}/kubepods is in the mode \"domain invalid\", in which controllers cannot be used"
    );
    assert_eq!(error, expected);
    assert_eq!(fake::directories(dir.path()), ["kubepods"]);
}

/// Runs on the machine's own cgroups if these are of version 1 and this process may make some. Plain
/// directories cannot show what the kernel refuses.
#[test]
fn the_kernel_accepts_every_value_and_removal_kills_what_is_left() {
    let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let root = format!("/coracle-test-{}", std::process::id());
    let open = || Cgroups::new(layout(&root), &mountinfo, Path::new("/sys/fs/cgroup"), vec![2 << 20], "");
    let (Ok(all), true) = (open(), rustix::process::geteuid().is_root()) else { return };
    if all.version() != Version::V1 || all.make(all.layout().pods(), &Values::default(), &never()).is_err() {
        return;
    }
    let cleanup = Cleanup { all: all.clone(), root: root.clone() };
    let half = Quota { microseconds: Some(50_000), period: 100_000 };
    let of_all = Values { cpu_quota: Some(half), cpus: Some("0".to_owned()), ..values() };
    let name = pod(&all, "11111111-1111-1111-1111-111111111111");
    let set =
        |name: &Name, values: &Values| all.update(name, values, &never()).unwrap().into_result().unwrap();
    set(all.layout().pods(), &of_all);
    all.check_root().unwrap();
    let outcome = all.make(&name, &values(), &never()).unwrap();
    assert!(outcome.failed.is_empty(), "{outcome:?}");
    assert_eq!(all.read(&name), Values { cpus: Some("0".to_owned()), ..values() });
    // With this period the old quota is more than the cgroup above allows.
    let short =
        Values { cpu_quota: Some(Quota { microseconds: Some(10_000), period: 20_000 }), ..Values::default() };
    assert_eq!(set(&name, &short).written, ["cpu.cfs_quota_us", "cpu.cfs_period_us"]);
    assert_eq!(all.read(&name).cpu_quota, short.cpu_quota);
    assert!(set(&name, &short).written.is_empty());
    let free = Values { memory_bytes: Some(-1), pids: Some(-1), ..short };
    set(&name, &free);
    assert!(set(&name, &free).written.is_empty());
    // A limit that is no whole number of pages is not written again.
    let odd = Values { memory_bytes: Some((50 << 20) + 1), ..Values::default() };
    assert_eq!(set(&name, &odd).written.len(), 1);
    assert!(set(&name, &odd).written.is_empty());

    let mut children = Vec::new();
    for hierarchy in all.clone_mounts().hierarchies {
        let leaf = hierarchy.mount.join(format!("{}/container/inner", &all.layout().path(&name)[1..]));
        std::fs::create_dir_all(&leaf).unwrap();
        if hierarchy.controllers == ["freezer"] || hierarchy.controllers == ["pids"] {
            let child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
            std::fs::write(leaf.join("cgroup.procs"), child.id().to_string()).unwrap();
            children.push(child);
        }
        if hierarchy.controllers == ["freezer"] {
            std::fs::write(leaf.join("freezer.state"), "FROZEN").unwrap();
        }
    }
    assert_eq!(all.list_pods().unwrap().len(), 1);
    all.remove_pod(&name, &never()).unwrap();
    for mut child in children {
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }
    assert!(all.list_pods().unwrap().is_empty() && !all.exists(&name));
    drop(cleanup);
    for hierarchy in all.clone_mounts().hierarchies {
        assert!(!hierarchy.mount.join(&root[1..]).exists(), "{}", hierarchy.mount.display());
    }
}

/// Runs on the machine's own cgroups of version 2, also if these have no controllers (hybrid).
#[test]
fn v2_kernel_kills_the_processes_of_a_removed_pod() {
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(PathBuf::from);
    let found = mounts.into_iter().find(|mount| mount.join("cgroup.controllers").exists());
    let (Some(mount), true) = (found, rustix::process::geteuid().is_root()) else { return };
    let root = format!("/coracle-test-v2-{}", std::process::id());
    let hierarchy = Hierarchy { controllers: Vec::new(), mount: mount.clone() };
    let all = cgroups(Mounts { version: Version::V2, hierarchies: vec![hierarchy] }, &root);
    let cleanup = Cleanup { all: all.clone(), root: root.clone() };
    let name = pod(&all, "1");
    if all.make(&name, &Values::default(), &never()).is_err() {
        return;
    }
    let place = mount.join(&all.layout().path(&name)[1..]);
    let leaf = place.join("container/inner");
    std::fs::create_dir_all(&leaf).unwrap();
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    std::fs::write(leaf.join("cgroup.procs"), child.id().to_string()).unwrap();
    all.remove_pod(&name, &never()).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    assert!(!place.exists());
    drop(cleanup);
    assert!(!mount.join(&root[1..]).exists());
}

/// Removes the directories of a test, also if it fails.
struct Cleanup {
    all: Cgroups,
    root: String,
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        for found in self.all.list_pods().unwrap_or_default() {
            let _ = self.all.remove_listed(&found, &never());
        }
        for hierarchy in self.all.clone_mounts().hierarchies {
            for below in ["kubepods/burstable", "kubepods", ""] {
                let _ = std::fs::remove_dir(hierarchy.mount.join(&self.root[1..]).join(below));
            }
        }
    }
}

#[test]
fn durations_of_operations_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let all = cgroups(fake::v1(dir.path(), &ALONE), "");
    let name = pod(&all, "counted");
    let count = |operation| CGROUP_OPERATIONS.count([operation]);
    let before = ["create", "update", "destroy"].map(count);
    all.make(&name, &values(), &never()).unwrap();
    all.update(&name, &values(), &never()).unwrap();
    // Files of a plain directory keep it from being removed, and failures count too.
    let _ = all.remove_pod(&name, &never());
    let after = ["create", "update", "destroy"].map(count);
    assert!(after.iter().zip(before).all(|(after, before)| *after > before), "{before:?} {after:?}");
}
