//! The collector on a made-up machine.

use super::*;
use crate::model::ids::{ContainerId, ImageRef, SandboxId};
use crate::model::runtime::PodRuntime;
use crate::model::runtime::{ContainerState, ContainerStatus, ListedContainer, ListedSandbox, SandboxState};
use crate::resources::cgroups::CgroupHierarchies;
use crate::resources::cgroups::Version;
use crate::resources::stats::cadvisor::cadvisor;
use crate::resources::stats::collect::pause;
use crate::resources::stats::pages::{resource, volumes};
use crate::resources::stats::runtime_stats::Runtime;
use crate::resources::stats::sample::FileSystem;
use crate::resources::stats::settings::{DriverNumbers, PodVolume};
use crate::resources::stats::summary::json;
use crate::transport::endpoint::EndpointError;
use crate::transport::generated::{MessageField, runtime};
use crate::util::lock::LockExt;
use crate::util::metrics::Page;
use crate::util::threads::{self, OnDeath, Stack};
use crossbeam_channel::{Receiver, Sender, bounded};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

type Pods = Arc<Mutex<Arc<BTreeMap<PodUid, ListedPod>>>>;

/// A runtime with two containers, of which `by-runtime` has no cgroup.
#[derive(Clone, Default)]
pub(super) struct FakeRuntime {
    layers: usize,
    by_pod: bool,
    fails: bool,
    calls: Arc<AtomicUsize>,
    /// The sandboxes whose images were asked for.
    pub(super) requested_images: Arc<Mutex<Vec<String>>>,
    /// Where the calls by container begin, and what they wait for.
    hangs: Option<(Sender<()>, Receiver<()>)>,
}

fn error() -> CriError {
    CriError::Endpoint { field: "x", source: EndpointError::Empty }
}

fn number(value: u64) -> MessageField<runtime::UInt64Value> {
    MessageField::some(runtime::UInt64Value { value, ..Default::default() })
}

impl FakeRuntime {
    fn container(&self, id: &str) -> runtime::ContainerStats {
        runtime::ContainerStats {
            attributes: MessageField::some(runtime::ContainerAttributes {
                id: id.into(),
                ..Default::default()
            }),
            cpu: MessageField::some(runtime::CpuUsage {
                timestamp: 1_700_000_000_500_000_000,
                usage_core_nano_seconds: number(3_000_000_000),
                usage_nano_cores: number(250_000_000),
                ..Default::default()
            }),
            memory: MessageField::some(runtime::MemoryUsage {
                timestamp: 1_700_000_000_500_000_000,
                working_set_bytes: number(77),
                available_bytes: number(0),
                ..Default::default()
            }),
            writable_layer: MessageField::some(runtime::FilesystemUsage {
                timestamp: 1_700_000_000_000_000_000,
                fs_id: MessageField::some(runtime::FilesystemIdentifier {
                    mountpoint: "/".into(),
                    ..Default::default()
                }),
                used_bytes: number(4096),
                inodes_used: number(3),
                ..Default::default()
            }),
            ..Default::default()
        }
    }
}

impl Runtime for FakeRuntime {
    fn pod_stats(&self, _within: Duration) -> Result<Vec<runtime::PodSandboxStats>, CriError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if !self.by_pod {
            return Err(error());
        }
        let interface = runtime::NetworkInterfaceUsage {
            name: "eth0".into(),
            rx_bytes: number(11),
            tx_bytes: number(12),
            ..Default::default()
        };
        let linux = runtime::LinuxPodSandboxStats {
            cpu: MessageField::some(runtime::CpuUsage {
                usage_core_nano_seconds: number(5),
                ..Default::default()
            }),
            network: MessageField::some(runtime::NetworkUsage {
                default_interface: MessageField::some(interface),
                ..Default::default()
            }),
            process: MessageField::some(runtime::ProcessUsage {
                process_count: number(4),
                ..Default::default()
            }),
            containers: vec![self.container("by-runtime")],
            ..Default::default()
        };
        let attributes = runtime::PodSandboxAttributes { id: "s2".into(), ..Default::default() };
        Ok(vec![runtime::PodSandboxStats {
            attributes: MessageField::some(attributes),
            linux: MessageField::some(linux),
            ..Default::default()
        }])
    }

    fn container_stats(&self, within: Duration) -> Result<Vec<runtime::ContainerStats>, CriError> {
        assert!(within <= Duration::from_secs(8), "{within:?}");
        self.calls.fetch_add(1, Ordering::Relaxed);
        if let Some((began, go_on)) = &self.hangs {
            began.send(()).unwrap();
            let _ = go_on.recv();
        }
        if self.fails {
            return Err(error());
        }
        let mut all = vec![self.container("c1"), self.container("by-runtime")];
        all.extend((0..self.layers).map(|number| self.container(&format!("c{number}"))));
        Ok(all)
    }

    fn image_of_sandbox(&self, id: &SandboxId, _within: Duration) -> Result<Option<String>, CriError> {
        self.requested_images.lock().unwrap().push(id.to_string());
        if self.fails {
            return Err(error());
        }
        Ok((id.as_str() != "nameless").then(|| "pause:1".to_owned()))
    }

    fn image_fs_info(&self, _within: Duration) -> Result<runtime::ImageFsInfoResponse, CriError> {
        if self.fails {
            return Err(error());
        }
        let images = self.container("x").writable_layer.into_option();
        Ok(runtime::ImageFsInfoResponse {
            image_filesystems: images.into_iter().collect(),
            ..Default::default()
        })
    }
}

pub(super) fn listed(
    uid: &str,
    name: &str,
    sandbox: &str,
    containers: &[(&str, &str, ContainerState)],
) -> ListedPod {
    ListedPod {
        uid: uid.into(),
        name: name.into(),
        namespace: "default".into(),
        sandboxes: vec![ListedSandbox {
            id: SandboxId::from(sandbox),
            state: SandboxState::Ready,
            attempt: 0,
            created_at: Timestamp::from_second(1_600_000_000).ok(),
        }],
        containers: containers
            .iter()
            .map(|(id, name, state)| ListedContainer {
                id: ContainerId::from(*id),
                name: (*name).into(),
                sandbox_id: SandboxId::from(sandbox),
                state: *state,
                attempt: 0,
                created_at: Timestamp::from_second(1_600_000_001).ok(),
                image_ref: ImageRef::default(),
                annotations: Arc::default(),
            })
            .collect(),
        ..ListedPod::default()
    }
}

/// An agent that makes no cgroups.
pub(super) fn no_cgroups() -> PodCgroupPaths {
    PodCgroupPaths { together: Box::new(|| None), pod: Box::new(|_| None) }
}

/// Set by tests of agents that make cgroups.
type MadeCgroups = Arc<std::sync::OnceLock<([&'static str; 3], &'static str)>>;

fn at_paths(made: MadeCgroups) -> PodCgroupPaths {
    let of_pod = Arc::clone(&made);
    PodCgroupPaths {
        together: Box::new(move || Some(made.get()?.0.map(str::to_owned))),
        pod: Box::new(move |uid| Some(format!("{}/pod{uid}", of_pod.get()?.1))),
    }
}

struct Fixture {
    dir: tempfile::TempDir,
    cgroups: MadeCgroups,
    pods: Pods,
    fake: FakeRuntime,
    collector: Collector,
}

pub(super) fn write(root: &Path, files: &[(&str, &str)]) {
    for (path, content) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
}

fn cgroup(root: &Path, path: &str, process: &str) {
    for (file, content) in [
        ("cpu.stat", "usage_usec 2000000\nuser_usec 1500000\nsystem_usec 500000\n"),
        ("memory.current", "10000000\n"),
        ("memory.stat", "anon 4000000\nfile 6000000\ninactive_file 1000000\npgfault 5\npgmajfault 1\n"),
        ("memory.max", "20000000\n"),
        ("memory.swap.current", "100\n"),
        ("memory.swap.max", "max\n"),
        (
            "cpu.pressure",
            "some avg10=1.00 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=3\n",
        ),
        (
            "memory.pressure",
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
        ),
        (
            "io.pressure",
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=2\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
        ),
        ("io.stat", "8:0 rbytes=1 wbytes=2 rios=3 wios=4\n"),
        ("cgroup.procs", process),
    ] {
        write(root, &[(&format!("cg/{path}/{file}"), content)]);
    }
}

fn fixture(fake: FakeRuntime, pods: Vec<ListedPod>, volumes: Vec<PodVolume>) -> Fixture {
    fixture_with(fake, pods, volumes, true)
}

fn fixture_with(
    fake: FakeRuntime,
    pods: Vec<ListedPod>,
    volumes: Vec<PodVolume>,
    excludes_huge_pages: bool,
) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    cgroup(root, "", "1\n");
    write(
        root,
        &[
            ("proc/meminfo", "MemTotal: 1000000 kB\nSwapTotal: 8 kB\nSwapFree: 6 kB\n"),
            ("proc/stat", "cpu 1\nbtime 1500000000\n"),
            ("proc/loadavg", "0.1 0.1 0.1 2/345 9\n"),
            ("proc/sys/kernel/pid_max", "4194304\n"),
            ("proc/sys/kernel/threads-max", "30000\n"),
            ("proc/self/cgroup", "0::/system.slice/coracle.service\n"),
            ("proc/1/net/dev", "lo: 1 1 1 1 1 1 1 1 1 1 1 1\neth0: 1 2 3 4 0 0 0 0 5 6 7 8 0 0 0 0\n"),
            ("proc/77/net/dev", "eth0: 10 20 30 40 0 0 0 0 50 60 70 80 0 0 0 0\n"),
            ("root/pods/u1/etc-hosts", "x"),
            ("logs/default_web_u1/a/0.log", "0123456789"),
            ("cg/memory.current", ""),
        ],
    );
    std::os::unix::fs::symlink("root", root.join("link")).unwrap();
    std::fs::remove_file(root.join("cg/memory.current")).unwrap();
    std::fs::remove_file(root.join("cg/memory.max")).unwrap();
    cgroup(root, "system.slice/coracle.service", "9\n");
    let pods: Pods =
        Arc::new(Mutex::new(Arc::new(pods.into_iter().map(|pod| (pod.uid.clone(), pod)).collect())));
    let settings = Settings {
        node: "n1".into(),
        roots: Roots { proc: root.join("proc"), sys: root.join("sys") },
        cgroups: CgroupHierarchies {
            root: root.join("cg"),
            version: Version::V2,
            controllers: BTreeMap::new(),
        },
        root_dir: root.join("link"),
        pod_logs_dir: root.join("logs"),
        system: [("kubelet", String::new()), ("runtime", String::new()), ("misc", "/none".into())],
        started: Timestamp::from_second(1_650_000_000).unwrap(),
        reserved_memory: 24_000_000,
        excludes_huge_pages,
        volume_period: Some(Duration::from_secs(60)),
    };
    let shown = Arc::clone(&pods);
    let seen = ContainerStatus {
        image: "docker.io/library/web:1".into(),
        ..ContainerStatus::blank("c1", "a", ContainerState::Running)
    };
    let cgroups = MadeCgroups::default();
    let made = Arc::clone(&cgroups);
    let deps = Deps {
        cgroups: at_paths(made),
        pods: Box::new(move || Arc::clone(&shown.lock().unwrap())),
        pod: Box::new(move |uid| {
            Some(Arc::new(PodRuntime { containers: vec![seen.clone()], ..PodRuntime::absent(uid.clone()) }))
        }),
        memory_limit: Box::new(|uid| (uid.as_str() == "u1").then_some(50_000_000)),
        volumes: Box::new(move |_| volumes.clone()),
        runtime: Box::new(fake.clone()),
    };
    Fixture { dir, cgroups, pods, fake, collector: Collector::new(settings, deps) }
}

fn one_pod() -> Vec<ListedPod> {
    use ContainerState::{Exited, Running};
    vec![listed("u1", "web", "s1", &[("c1", "a", Running), ("c0", "a", Exited)])]
}

fn with_cgroups(fake: FakeRuntime) -> Fixture {
    let fixture = fixture(fake, one_pod(), Vec::new());
    cgroup(fixture.dir.path(), "k8s.io/c1", "78\n79\n");
    cgroup(fixture.dir.path(), "k8s.io/s1", "77\n");
    fixture
}

#[test]
fn huge_pages_are_left_out_of_the_available_memory_of_each_view_or_of_none() {
    let available = |excludes_huge_pages, meminfo: &str| {
        let fixture = fixture_with(FakeRuntime::default(), Vec::new(), Vec::new(), excludes_huge_pages);
        write(fixture.dir.path(), &[("proc/meminfo", meminfo)]);
        let of_snapshot =
            |wanted| fixture.collector.snapshot(wanted).unwrap().node.numbers.available.unwrap();
        let node_use = fixture.collector.node_use(&NodePaths::default()).unwrap();
        let views = [StatsRequest::RESOURCE, StatsRequest::EVICTION].map(of_snapshot);
        [views[0], views[1], node_use.numbers.available.unwrap()]
    };
    let all = available(true, "MemTotal: 1000000 kB\n");
    assert!(all.iter().all(|bytes| *bytes > 3 << 20), "{all:?}");
    let with_pages = "MemTotal: 1000000 kB\nHugetlb: 2048 kB\n";
    assert_eq!(available(false, with_pages), all);
    assert_eq!(available(true, with_pages), all.map(|bytes| bytes - (2 << 20)));
}

#[test]
fn pods_and_classes_have_the_numbers_of_their_cgroups() {
    let fixture = fixture(FakeRuntime::default(), one_pod(), Vec::new());
    let root = fixture.dir.path();
    let all = ["/own/kubepods", "/own/kubepods/burstable", "/own/kubepods/besteffort"];
    fixture.cgroups.set((all, all[1])).unwrap();
    // A cgroup of another agent.
    for path in ["kubepods", &all[0][1..], &all[1][1..], &all[2][1..]] {
        cgroup(root, path, "");
    }
    for (path, process) in [("", ""), ("/c1", "78\n79\n"), ("/s1", "77\n")] {
        cgroup(root, &format!("own/kubepods/burstable/podu1{path}"), process);
    }
    write(
        root,
        &[("cg/own/kubepods/memory.current", "30000000\n"), ("cg/own/kubepods/memory.max", "90000000\n")],
    );
    write(root, &[("cg/own/kubepods/burstable/podu1/memory.current", "15000000\n")]);
    let summary = json(&fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap());
    let pods = summary["node"]["systemContainers"].as_array().unwrap().last().unwrap();
    assert_eq!((&pods["name"], &pods["memory"]["usageBytes"]), (&json!("pods"), &json!(30_000_000)));
    assert_eq!(pods["memory"]["availableBytes"], 90_000_000 - 29_000_000);
    let pod = &summary["pods"][0];
    assert_eq!(pod["memory"]["usageBytes"], 15_000_000);
    assert_eq!(pod["memory"]["availableBytes"], 20_000_000 - 14_000_000);
    // The pod's cgroup has no processes of its own.
    assert_eq!(pod["process_stats"]["process_count"], 3);
    // No walk was needed, and no number of the runtime.
    assert_eq!(pod["containers"][0]["memory"]["usageBytes"], 10_000_000);
    let snapshot = fixture.collector.snapshot(StatsRequest::CADVISOR).unwrap();
    let mut page = Page::new();
    cadvisor(&snapshot, fixture.collector.roots(), &mut page);
    let page = page.into_text();
    let series: Vec<&str> =
        page.lines().filter(|line| line.starts_with("container_memory_usage_bytes{")).collect();
    for (id, pod, usage) in [
        (all[0], "", "30000000"),
        (all[1], "", "10000000"),
        (all[2], "", "10000000"),
        ("/own/kubepods/burstable/podu1", "web", "15000000"),
    ] {
        let is_of_cgroup =
            |line: &&&str| line.contains(&format!("id=\"{id}\"")) && line.contains("container=\"\"");
        let found: Vec<_> = series.iter().filter(is_of_cgroup).collect();
        assert_eq!(found.len(), 1, "{id} in {page}");
        assert!(found[0].contains(&format!("pod=\"{pod}\"")) && found[0].contains(usage), "{found:?}");
    }
}

/// The names of all fields, with `[]` for what is in lists.
fn shape(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                shape(value, &format!("{path}.{name}"), found);
            }
        }
        Value::Array(items) => {
            found.insert(format!("{path}[]"));
            items.iter().for_each(|item| shape(item, &format!("{path}[]"), found));
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}

const CPU: [&str; 3] = ["time", "usageNanoCores", "usageCoreNanoSeconds"];
const MEMORY: [&str; 6] =
    ["time", "usageBytes", "workingSetBytes", "rssBytes", "pageFaults", "majorPageFaults"];
const SPACE: [&str; 7] =
    ["time", "availableBytes", "capacityBytes", "usedBytes", "inodesFree", "inodes", "inodesUsed"];
const INTERFACE: [&str; 5] = ["name", "rxBytes", "rxErrors", "txBytes", "txErrors"];

fn numbers(path: &str, limited: bool, psi: bool, expected: &mut BTreeSet<String>) {
    let mut add = |part: &str, names: &[&str]| {
        expected.extend(names.iter().map(|name| format!("{path}.{part}.{name}")));
    };
    add("cpu", &CPU);
    add("memory", &MEMORY);
    add("swap", &["time", "swapUsageBytes"]);
    if limited {
        add("memory", &["availableBytes"]);
    }
    if psi {
        add("io", &["time"]);
        for part in ["cpu", "memory", "io"] {
            for which in ["full", "some"] {
                for name in ["total", "avg10", "avg60", "avg300"] {
                    add(part, &[&format!("psi.{which}.{name}")]);
                }
            }
        }
    }
}

#[test]
fn the_summary_has_the_fields_of_the_api_and_no_others() {
    let volume = PodVolume {
        name: "v".into(),
        path: "/proc/self/fd".into(),
        walk: false,
        ephemeral: false,
        claim: Some("c".into()),
        driver: None,
    };
    let fixture = fixture(FakeRuntime::default(), one_pod(), vec![volume]);
    cgroup(fixture.dir.path(), "k8s.io/c1", "78\n79\n");
    cgroup(fixture.dir.path(), "k8s.io/s1", "77\n");
    let summary = json(&fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap());
    let mut found = BTreeSet::new();
    shape(&summary, "", &mut found);
    let mut expected = BTreeSet::new();
    numbers(".node", true, true, &mut expected);
    numbers(".node.systemContainers[]", true, true, &mut expected);
    numbers(".pods[]", true, false, &mut expected);
    numbers(".pods[].containers[]", true, true, &mut expected);
    for (path, names) in [
        (
            ".node",
            &["nodeName", "startTime", "systemContainers[]", "network.time", "network.interfaces[]"][..],
        ),
        (".node", &["rlimit.time", "rlimit.maxpid", "rlimit.curproc", "swap.swapAvailableBytes"]),
        (".node.systemContainers[]", &["name", "startTime"]),
        (".node.network", &INTERFACE),
        (".node.network.interfaces[]", &INTERFACE),
        (".node.fs", &SPACE),
        (".node.runtime.imageFs", &SPACE),
        (".node.runtime.containerFs", &SPACE),
        ("", &["pods[]"]),
        (".pods[]", &["startTime", "containers[]", "process_stats.process_count", "volume[]"]),
        (".pods[].podRef", &["name", "namespace", "uid"]),
        (".pods[].network", &INTERFACE),
        (".pods[].network", &["time", "interfaces[]"]),
        (".pods[].network.interfaces[]", &INTERFACE),
        (".pods[].ephemeral-storage", &SPACE),
        (".pods[].volume[]", &["name", "pvcRef.name", "pvcRef.namespace"]),
        (".pods[].volume[]", &SPACE),
        (".pods[].containers[]", &["name", "startTime"]),
        (".pods[].containers[].rootfs", &SPACE),
        (".pods[].containers[].logs", &SPACE),
    ] {
        expected.extend(names.iter().map(|name| format!("{path}.{name}")));
    }
    assert_eq!(found, expected);

    let node = &summary["node"];
    assert_eq!(node["startTime"], "2017-07-14T02:40:00Z");
    // anon and file, less what is inactive; all of the memory is the limit.
    assert_eq!(
        (&node["memory"]["usageBytes"], &node["memory"]["workingSetBytes"]),
        (&json!(10_000_000), &json!(9_000_000))
    );
    assert_eq!(node["memory"]["availableBytes"], json!(1_024_000_000 - 9_000_000));
    assert_eq!((&node["rlimit"]["maxpid"], &node["rlimit"]["curproc"]), (&json!(30_000), &json!(345)));
    assert_eq!((&node["swap"]["swapUsageBytes"], &node["network"]["rxErrors"]), (&json!(2048), &json!(3)));
    assert_eq!(node["runtime"]["imageFs"]["usedBytes"], 4096);
    let system: Vec<&Value> =
        node["systemContainers"].as_array().unwrap().iter().map(|part| &part["name"]).collect();
    assert_eq!(system, ["kubelet", "pods"]);
    let pod = &summary["pods"][0];
    assert_eq!(pod["podRef"], json!({"name": "web", "namespace": "default", "uid": "u1"}));
    assert_eq!(
        (&pod["memory"]["workingSetBytes"], &pod["network"]["txBytes"]),
        (&json!(18_000_000), &json!(50))
    );
    assert_eq!(pod["memory"]["availableBytes"], 50_000_000 - 18_000_000);
    let together = &node["systemContainers"][1];
    assert_eq!(together["memory"]["availableBytes"], 1_024_000_000 - 24_000_000 - 18_000_000);
    assert_eq!(together["startTime"], "2020-09-13T12:26:40Z");
    assert_eq!(pod["process_stats"]["process_count"], 3);
    assert_eq!(pod["startTime"], "2020-09-13T12:26:40Z");
    let containers = pod["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 1, "an ended instance has no numbers");
    assert_eq!(containers[0]["rootfs"]["usedBytes"], 4096);
    assert!(containers[0]["logs"]["usedBytes"].as_u64().unwrap() >= 10);
    assert!(pod["ephemeral-storage"]["usedBytes"].as_u64().unwrap() >= 4096 + 10);
}

#[test]
fn processors_and_memory_alone_need_no_call_to_the_runtime() {
    let fixture = with_cgroups(FakeRuntime::default());
    let summary = json(&fixture.collector.snapshot(StatsRequest::BRIEF).unwrap());
    assert_eq!(fixture.fake.calls.load(Ordering::Relaxed), 0);
    let pod = &summary["pods"][0];
    assert!(pod.get("network").is_none() && summary["node"].get("fs").is_none());
    assert_eq!(pod["cpu"]["usageCoreNanoSeconds"], 4_000_000_000_u64);
    // The counters of the files did not move between the two samples of a first question.
    assert_eq!(pod["cpu"]["usageNanoCores"], 0);

    // Nor is there one for a request right after the first sample.
    let fixture = with_cgroups(FakeRuntime::default());
    fixture.collector.snapshot(StatsRequest::RESOURCE).unwrap();
    let summary = json(&fixture.collector.snapshot(StatsRequest::BRIEF).unwrap());
    assert_eq!(summary["pods"][0]["cpu"]["usageNanoCores"], 0);
    assert_eq!(summary["node"]["cpu"]["usageNanoCores"], 0);
}

#[test]
fn requests_within_a_second_share_a_collection() {
    let fixture = with_cgroups(FakeRuntime::default());
    let first = fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap();
    // To a test that is held up it has just been collected.
    fixture.collector.shared.state.locked().last.as_mut().unwrap().1 += Duration::from_secs(3600);
    let second = fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    assert_eq!(fixture.fake.calls.load(Ordering::Relaxed), 1);
    // What has more would show it to those who asked for less.
    let brief = fixture.collector.snapshot(StatsRequest::BRIEF).unwrap();
    assert!(!Arc::ptr_eq(&first, &brief) && json(&brief)["node"].get("fs").is_none());
    let more = fixture.collector.snapshot(StatsRequest::CADVISOR).unwrap();
    assert!(!Arc::ptr_eq(&first, &more));

    // Many at once: one collects, the others wait for it.
    let fixture = with_cgroups(FakeRuntime::default());
    let (sender, collected) = crossbeam_channel::bounded(8);
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let (collector, sender) = (fixture.collector.clone(), sender.clone());
            threads::spawn("asks", Stack::Small, OnDeath::Unsupervised, move |_| {
                sender.send(collector.snapshot(StatsRequest::SUMMARY).unwrap()).unwrap();
            })
            .unwrap()
        })
        .collect();
    let collected: Vec<Arc<Snapshot>> = collected.iter().take(8).collect();
    drop(callers);
    // A caller that was delayed for a second has another one, which was collected once as well.
    let different: BTreeSet<_> = collected.iter().map(Arc::as_ptr).collect();
    assert!(different.len() < collected.len(), "no caller waited for another");
    let calls = fixture.fake.calls.load(Ordering::Relaxed);
    assert!((1..=different.len()).contains(&calls), "{calls} calls for {}", different.len());
}

#[test]
fn hanging_runtime_delays_only_requests_that_need_it() {
    let (began, begun) = bounded(1);
    let (let_go, go_on) = bounded::<()>(0);
    let fixture = with_cgroups(FakeRuntime { hangs: Some((began, go_on)), ..FakeRuntime::default() });
    let (sender, received) = bounded(2);
    let request = |wanted| {
        let (collector, sender) = (fixture.collector.clone(), sender.clone());
        threads::spawn("asks", Stack::Small, OnDeath::Unsupervised, move |_| {
            sender.send(collector.snapshot(wanted).unwrap()).unwrap();
        })
        .unwrap()
    };
    let _first = request(StatsRequest::SUMMARY);
    begun.recv().unwrap();
    // Another question with the same call.
    let _second = request(StatsRequest::CADVISOR);
    while fixture.collector.shared.queries.waiting() == 0 {
        std::thread::yield_now();
    }
    // What is read from files is returned meanwhile, as often as it is asked for.
    for wanted in [StatsRequest::RESOURCE, StatsRequest::BRIEF, StatsRequest::RESOURCE] {
        let snapshot = fixture.collector.snapshot(wanted).unwrap();
        assert_eq!(snapshot.pods[0].containers[0].numbers.working_set, Some(9_000_000));
        assert!(!snapshot.incomplete && received.is_empty());
    }
    drop(let_go);
    for snapshot in received.iter().take(2) {
        assert!(snapshot.pods[0].containers[0].rootfs.is_some());
    }
    assert_eq!(fixture.fake.calls.load(Ordering::Relaxed), 1, "both have the same answer");
}

#[test]
fn containers_without_a_cgroup_have_the_numbers_of_the_runtime() {
    let pods = || vec![listed("u2", "vm", "s2", &[("by-runtime", "a", ContainerState::Running)])];
    let fixture = fixture(FakeRuntime { by_pod: true, ..FakeRuntime::default() }, pods(), Vec::new());
    let summary = json(&fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap());
    let pod = &summary["pods"][0];
    assert_eq!((&pod["cpu"]["usageCoreNanoSeconds"], &pod["network"]["rxBytes"]), (&json!(5), &json!(11)));
    assert_eq!(pod["process_stats"]["process_count"], 4);
    let container = &pod["containers"][0];
    assert_eq!(container["memory"]["workingSetBytes"], 77);
    assert_eq!(
        (&container["cpu"]["usageNanoCores"], &container["cpu"]["time"]),
        (&json!(250_000_000), &json!("2023-11-14T22:13:20Z"))
    );
    assert!(container["memory"].get("availableBytes").is_none());

    // A runtime that does not know the call by pod is asked by container, from then on only so.
    let fixture = self::fixture(FakeRuntime::default(), pods(), Vec::new());
    for calls in [2, 3] {
        let summary = json(&fixture.collector.snapshot(StatsRequest::CADVISOR).unwrap());
        assert_eq!(summary["pods"][0]["memory"]["workingSetBytes"], 77);
        assert_eq!(fixture.fake.calls.load(Ordering::Relaxed), calls);
        fixture.collector.shared.state.locked().last = None;
    }

    // And one that does not answer leaves its pods out.
    let fixture = self::fixture(FakeRuntime { fails: true, ..FakeRuntime::default() }, pods(), Vec::new());
    let snapshot = fixture.collector.snapshot(StatsRequest::RESOURCE).unwrap();
    assert!(snapshot.pods.is_empty() && snapshot.incomplete);
    assert!(matches!(fixture.collector.snapshot(StatsRequest::SUMMARY), Err(StatsError::ImageFs(_))));
    // The failure has not kept the state.
    assert!(fixture.collector.snapshot(StatsRequest::RESOURCE).is_ok());
}

#[test]
fn a_pod_that_has_ended_is_gone_and_forgotten() {
    let fixture = with_cgroups(FakeRuntime::default());
    assert_eq!(fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap().pods.len(), 1);
    std::fs::remove_dir_all(fixture.dir.path().join("cg/k8s.io")).unwrap();
    fixture.collector.shared.state.locked().last = None;
    let left = fixture.collector.snapshot(StatsRequest { details: true, ..StatsRequest::RESOURCE }).unwrap();
    assert!(left.pods.is_empty(), "the runtime is not asked for a cgroup that is gone: {left:?}");
    *fixture.pods.lock().unwrap() = Arc::default();
    fixture.collector.shared.state.locked().last = None;
    assert!(fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap().pods.is_empty());
    let state = fixture.collector.shared.state.locked();
    let collection = state.collection.as_ref().unwrap();
    assert!(collection.volumes.is_empty() && collection.cgroup_paths.get("c1").is_none());
}

#[test]
fn a_machine_without_cgroups_is_an_error() {
    let fixture = with_cgroups(FakeRuntime::default());
    std::fs::remove_file(fixture.dir.path().join("cg/memory.stat")).unwrap();
    let error = fixture.collector.snapshot(StatsRequest::BRIEF).unwrap_err();
    assert!(error.to_string().starts_with("failed to get root cgroup stats: "), "{error}");
    let mut page = Page::new();
    resource(None, &mut page);
    assert!(page.into_text().contains("resource_scrape_error 1\n"));
}

#[test]
fn the_resource_page_carries_the_moments_of_its_samples() {
    let fixture = with_cgroups(FakeRuntime::default());
    let snapshot = fixture.collector.snapshot(StatsRequest::RESOURCE).unwrap();
    let mut page = Page::new();
    resource(Some(&snapshot), &mut page);
    let text = page.into_text();
    let milliseconds = snapshot.pods[0].containers[0].numbers.time.as_millisecond();
    for line in [
        "resource_scrape_error 0".to_owned(),
        format!(
            "container_cpu_usage_seconds_total{{container=\"a\",namespace=\"default\",pod=\"web\"}} 2 {milliseconds}"
        ),
        format!(
            "container_memory_working_set_bytes{{container=\"a\",namespace=\"default\",pod=\"web\"}} 9000000 {milliseconds}"
        ),
        format!(
            "container_swap_usage_bytes{{container=\"a\",namespace=\"default\",pod=\"web\"}} 100 {milliseconds}"
        ),
        "container_start_time_seconds{container=\"a\",namespace=\"default\",pod=\"web\"} 1600000001"
            .to_owned(),
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line} in\n{text}");
    }
    for name in [
        "node_cpu_usage_seconds_total 2 ",
        "node_memory_working_set_bytes 9000000 ",
        "node_swap_usage_bytes 2048 ",
        "pod_cpu_usage_seconds_total{namespace=\"default\",pod=\"web\"} 4 ",
        "pod_memory_working_set_bytes{namespace=\"default\",pod=\"web\"} 18000000 ",
    ] {
        assert!(text.contains(name), "{name} in\n{text}");
    }
    // No limit, no sample.
    assert!(!text.contains("container_swap_limit_bytes"));
}

#[test]
fn the_cadvisor_page_has_the_labels_that_dashboards_use() {
    let fixture = with_cgroups(FakeRuntime::default());
    write(fixture.dir.path(), &[("sys/dev/block/8:0/uevent", "MAJOR=8\nMINOR=0\nDEVNAME=sda\n")]);
    let snapshot = fixture.collector.snapshot(StatsRequest::CADVISOR).unwrap();
    let mut page = Page::new();
    cadvisor(&snapshot, fixture.collector.roots(), &mut page);
    let text = page.into_text();
    let of_container = "id=\"/k8s.io/c1\",image=\"docker.io/library/web:1\",name=\"c1\"";
    for start in [
        format!("container_cpu_usage_seconds_total{{container=\"a\",{of_container},namespace=\"default\",pod=\"web\",cpu=\"total\"}} 2 "),
        format!("container_memory_working_set_bytes{{container=\"a\",{of_container},namespace=\"default\",pod=\"web\"}} 9000000 "),
        format!("container_fs_writes_total{{container=\"a\",{of_container},namespace=\"default\",pod=\"web\",device=\"/dev/sda\"}} 4 "),
        format!("container_fs_usage_bytes{{container=\"a\",{of_container},namespace=\"default\",pod=\"web\",device=\"\"}} 4096 "),
        "container_network_receive_bytes_total{container=\"\",id=\"/k8s.io/s1\",image=\"pause:1\",name=\"s1\",namespace=\"default\",pod=\"web\",interface=\"eth0\"} 10 ".to_owned(),
        "container_memory_rss{container=\"\",id=\"/\",image=\"\",name=\"\",namespace=\"\",pod=\"\"} 4000000 ".to_owned(),
        "container_pressure_cpu_waiting_seconds_total{container=\"\",id=\"/\",".to_owned(),
        "container_network_transmit_packets_dropped_total{container=\"\",id=\"/\",".to_owned(),
        "cadvisor_version_info{".to_owned(),
    ] {
        assert!(text.lines().any(|line| line.starts_with(&start)), "{start} in\n{text}");
    }
    assert!(
        !text.contains("container_cpu_cfs_periods_total"),
        "without a limit there is nothing to wait for"
    );
}

#[test]
fn volumes_below_a_linked_root_directory_are_no_file_systems_of_the_machine() {
    let fixture = with_cgroups(FakeRuntime::default());
    let root = std::fs::canonicalize(fixture.dir.path()).unwrap();
    let line = |path: &str| format!("1 0 0:9 / {} rw - tmpfs tmpfs rw\n", root.join(path).display());
    let table = line("root/pods") + &line("logs");
    write(&root, &[("proc/self/mountinfo", &table)]);
    let snapshot = fixture.collector.snapshot(StatsRequest::CADVISOR).unwrap();
    let shown: Vec<&str> = snapshot.node.file_systems.iter().map(|disk| disk.device.as_str()).collect();
    assert_eq!(shown, [root.join("logs").to_str().unwrap()]);
}

#[test]
fn volume_whose_walk_is_cut_keeps_its_last_numbers() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("file"), vec![1; 100_000]).unwrap();
    let volume = PodVolume {
        name: "walked".into(),
        path: place.path().to_owned(),
        walk: true,
        ephemeral: true,
        claim: None,
        driver: None,
    };
    let fixture = fixture(FakeRuntime::default(), one_pod(), vec![volume]);
    cgroup(fixture.dir.path(), "k8s.io/c1", "78\n");
    let snapshot = fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap();
    let volumes = &snapshot.pods[0].volumes;
    assert!(volumes[0].space.used.unwrap() >= 100_000);
    let shared = &fixture.collector.shared;
    let mut state = shared.state.locked();
    let collection = state.collection.as_mut().unwrap();
    let uid = &snapshot.pods[0].uid;
    let now = std::time::Instant::now();
    assert!(!shared.walk_volumes(collection, uid, now, now));
    assert_eq!(collection.volumes[uid].volumes, *volumes);
    // A volume that does not exist any more is no cut walk.
    drop(place);
    let late = now + Duration::from_secs(60);
    assert!(shared.walk_volumes(collection, uid, late, late));
    assert!(collection.volumes[uid].volumes.is_empty());
}

#[test]
fn volumes_are_walked_once_a_period() {
    let place = tempfile::tempdir().unwrap();
    let volume = |name: &str, walk| PodVolume {
        name: name.into(),
        path: place.path().to_owned(),
        walk,
        ephemeral: walk,
        claim: None,
        driver: None,
    };
    let fixture =
        fixture(FakeRuntime::default(), one_pod(), vec![volume("walked", true), volume("statfs", false)]);
    cgroup(fixture.dir.path(), "k8s.io/c1", "78\n");
    let used = |name: &str| {
        fixture.collector.shared.state.locked().last = None;
        let snapshot = fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap();
        let volume = snapshot.pods[0].volumes.iter().find(|volume| volume.name == name).unwrap().clone();
        (volume.space.used.unwrap(), snapshot.pods[0].local_storage.as_ref().unwrap().used.unwrap())
    };
    let (before, all) = used("walked");
    assert!(used("statfs").0 > before && all >= before + 4096);
    std::fs::write(place.path().join("new"), vec![1; 100_000]).unwrap();
    assert_eq!(used("walked").0, before, "the period is not over");
    for walked in fixture.collector.shared.state.locked().collection.as_mut().unwrap().volumes.values_mut() {
        walked.due -= Duration::from_secs(60);
    }
    assert!(used("walked").0 >= before + 100_000);
    for source in ["du", "statfs"] {
        assert!(crate::model::metrics::VOLUME_STATS.count([source]) >= 2, "{source}");
    }
}

#[test]
fn one_slow_walk_through_volumes_does_not_delay_the_next() {
    let seconds = Duration::from_secs;
    assert_eq!(pause(seconds(4), Duration::ZERO), Duration::ZERO);
    assert_eq!(pause(seconds(4), Duration::from_millis(20)), seconds(1));
    assert_eq!(pause(seconds(1), seconds(2)), seconds(50));
    assert_eq!(pause(Duration::MAX, seconds(30)), seconds(300));
}

#[test]
fn numbers_of_a_driver_replace_those_of_the_file_system() {
    let volume = |name: &str, space: Option<FileSystem>| PodVolume {
        name: name.into(),
        path: "/proc/self/fd".into(),
        walk: false,
        ephemeral: false,
        claim: None,
        driver: Some(DriverNumbers { space }),
    };
    let sizes = FileSystem { capacity: Some(10), used: Some(3), ..FileSystem::default() };
    let fixture =
        fixture(FakeRuntime::default(), one_pod(), vec![volume("a", Some(sizes)), volume("b", None)]);
    cgroup(fixture.dir.path(), "k8s.io/c1", "78\n");
    let summary = json(&fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap());
    let volumes = summary.pointer("/pods/0/volume").unwrap();
    let expected = serde_json::json!({"time": volumes[0]["time"], "name": "a", "capacityBytes": 10,
        "usedBytes": 3});
    assert_eq!(volumes[0], expected);
    assert!(volumes[1]["inodes"].is_u64());
}

#[test]
fn claims_are_shown_once() {
    let volume = |claim: Option<&str>| VolumeUse {
        name: "v".into(),
        claim: claim.map(str::to_owned),
        ephemeral: false,
        space: FileSystem { capacity: Some(10), used: Some(3), ..FileSystem::default() },
    };
    let (with, without) = (volume(Some("data")), volume(None));
    let mut page = Page::new();
    volumes([("a", &with), ("a", &with), ("b", &with), ("a", &without)].into_iter(), &mut page);
    let text = page.into_text();
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(
        lines,
        [
            "kubelet_volume_stats_capacity_bytes{namespace=\"a\",persistentvolumeclaim=\"data\"} 10",
            "kubelet_volume_stats_capacity_bytes{namespace=\"b\",persistentvolumeclaim=\"data\"} 10",
            "kubelet_volume_stats_used_bytes{namespace=\"a\",persistentvolumeclaim=\"data\"} 3",
            "kubelet_volume_stats_used_bytes{namespace=\"b\",persistentvolumeclaim=\"data\"} 3",
        ]
    );
}

/// Printed, not judged: machines differ.
#[test]
fn collection_of_a_hundred_pods_is_timed() {
    let pods = (0..100)
        .map(|number| {
            let (sandbox, container) = (format!("s{number}"), format!("c{number}"));
            listed(
                &format!("u{number}"),
                &format!("web-{number}"),
                &sandbox,
                &[(&container, "a", ContainerState::Running)],
            )
        })
        .collect();
    let fixture = fixture(FakeRuntime { layers: 100, ..FakeRuntime::default() }, pods, Vec::new());
    // Files that are linked cost a slow disk less than files that are written.
    let first = fixture.dir.path().join("cg/k8s.io/c0");
    cgroup(fixture.dir.path(), "k8s.io/c0", "77\n");
    for number in 0..100 {
        for kind in ["c", "s"] {
            let to = fixture.dir.path().join(format!("cg/k8s.io/{kind}{number}"));
            if to == first {
                continue;
            }
            std::fs::create_dir(&to).unwrap();
            for file in std::fs::read_dir(&first).unwrap().flatten() {
                std::fs::hard_link(file.path(), to.join(file.file_name())).unwrap();
            }
        }
    }
    // Two samples, so that no question waits.
    fixture.collector.snapshot(StatsRequest::SUMMARY).unwrap();
    for (what, wanted) in [
        ("summary", StatsRequest::SUMMARY),
        ("brief", StatsRequest::BRIEF),
        ("resource", StatsRequest::RESOURCE),
        ("cadvisor", StatsRequest::CADVISOR),
    ] {
        fixture.collector.shared.state.locked().last = None;
        let begun = Instant::now();
        let snapshot = fixture.collector.snapshot(wanted).unwrap();
        let collected = begun.elapsed();
        let mut page = Page::new();
        let bytes = match what {
            "resource" => {
                resource(Some(&snapshot), &mut page);
                page.into_text().len()
            }
            "cadvisor" => {
                cadvisor(&snapshot, fixture.collector.roots(), &mut page);
                page.into_text().len()
            }
            _ => serde_json::to_vec(&json(&snapshot)).unwrap().len(),
        };
        println!("{what}: {collected:?} to collect, {:?} with the text, {bytes} bytes", begun.elapsed());
        assert_eq!(snapshot.pods.len(), 100);
    }
}
