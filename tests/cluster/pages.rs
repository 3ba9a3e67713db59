//! Every page of metrics and statistics compared with the Go kubelet's, series by series: two nodes
//! on one machine, one with each agent, have the same pods. Series that only the Go kubelet has are
//! listed here or in `docs/compatibility.md` with its reason; the counts are printed.

mod documented;
mod scenario;
mod shape;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::joined::{JoinedNode, directory, patience, served, shared};
use crate::support::exposition::{Exposition, Sample};
use crate::support::launch::{go_kubelet_config, merged, skip_on_go_kubelet};
use crate::support::wait::{pause, wait_for, wait_until};

/// Names of the two nodes. Pods carry the name of their node.
const OURS: &str = "pageso";
const THEIRS: &str = "pagest";

/// Series that coracle does not have, and why.
struct Exception {
    reason: &'static str,
    holds: fn(&str) -> bool,
}

/// Of `/metrics/cadvisor`.
const OF_CGROUPS: [Exception; 3] = [
    Exception {
        reason: "file systems that other tests or runtimes had mounted when the Go kubelet read the table",
        holds: |series| {
            let of_other_runtime = series.contains("/sandboxes/") && series.contains("/shm\"");
            of_other_runtime || series.contains("device=\"overlay_") || series.contains("device=\"<tests>/")
        },
    },
    Exception {
        reason: "loop devices of other tests, for which the Go kubelet has no name",
        holds: |series| {
            ["container_blkio_", "container_fs_reads_", "container_fs_writes_"]
                .iter()
                .any(|start| series.starts_with(start))
                && series.contains("device=\"\"")
        },
    },
    Exception {
        reason: "bridges of other tests",
        holds: |series| {
            series.starts_with("container_network_")
                && !["eth0", "node0"].iter().any(|name| series.contains(&format!("interface=\"{name}\"")))
        },
    },
];

/// Of `/metrics/probes`.
const OF_PROBES: [Exception; 1] = [Exception {
    reason: "a probe that has failed on a busy machine",
    holds: |series| series.contains("result=\"failed\"") || series.contains("result=\"unknown\""),
}];

/// Of `/stats/summary`.
const OF_SUMMARY: [Exception; 2] = [
    Exception {
        reason: "pressure of cgroups of version 1, which the kernel does not count: zeros in the Go kubelet",
        holds: |path| {
            let second = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
            !second && (path.contains(".psi.") || path.ends_with(".io.time"))
        },
    },
    Exception {
        reason: "bridges of other tests",
        holds: |path| {
            path.contains(".network.interfaces[")
                && !["eth0", "node0"].iter().any(|name| path.contains(&format!("interfaces[{name}]")))
        },
    },
];

const NONE: [Exception; 0] = [];

/// What the numbers of two equal containers have in common.
const EQUAL: [&str; 13] = [
    "container_processes",
    "container_threads",
    "container_threads_max",
    "container_file_descriptors",
    "container_sockets",
    "container_ulimits_soft",
    "container_oom_events_total",
    "container_spec_cpu_period",
    "container_spec_cpu_quota",
    "container_spec_cpu_shares",
    "container_spec_memory_limit_bytes",
    "container_spec_memory_reservation_limit_bytes",
    "container_spec_memory_swap_limit_bytes",
];

/// A node, its pods, and what stands for the names and ids that differ between the two.
struct NodeUnderTest {
    joined: JoinedNode<'static>,
    /// Container and sandbox ids, UIDs and names, each with what it stands for.
    names: Vec<(String, String)>,
}

impl NodeUnderTest {
    fn start(name: &'static str, go_kubelet: bool) -> NodeUnderTest {
        // The Go kubelet measures volumes periodically.
        let mut config = merged(served(shared()), json!({"volumeStatsAggPeriod": "5s"}));
        if go_kubelet {
            config = merged(config, go_kubelet_config(&directory(name)));
        }
        let kubeconfig = shared().node_kubeconfig(name).display().to_string();
        let mut flags = vec!["--kubeconfig", &kubeconfig];
        let socket = directory(name).join("cd/containerd.sock").display().to_string();
        if go_kubelet {
            // Its statistics use their own connection to containerd.
            flags.extend(["--containerd", &socket]);
        }
        let mut joined = JoinedNode::prepare_with(shared(), name, config, &flags);
        joined.node.use_go_kubelet(go_kubelet);
        NodeUnderTest { joined: joined.start_and_wait(), names: Vec::new() }
    }

    fn page(&self, path: &str) -> Exposition {
        let (code, text) = self.joined.node.read_only(path);
        assert_eq!(code, 200, "{path}: {text}");
        Exposition::parse(&text)
    }

    fn summary(&self, query: &str) -> Value {
        let (code, text) = self.joined.node.read_only(&format!("/stats/summary{query}"));
        assert_eq!(code, 200, "{text}");
        serde_json::from_str(&text).expect("the summary is JSON")
    }

    /// Learns the ids of everything that runs.
    fn read_ids(&mut self) {
        let (runtime, _) = self.joined.node.cri();
        let mut names = Vec::new();
        let label = |labels: &BTreeMap<String, String>, key: &str| {
            labels.get(&format!("io.kubernetes.{key}")).cloned().unwrap_or_default()
        };
        for sandbox in runtime.list_pod_sandbox(Default::default()).expect("ListPodSandbox") {
            names.push((label(&sandbox.labels, "pod.uid"), "<uid>".to_owned()));
            names.push((sandbox.id, "<sandbox>".to_owned()));
        }
        for container in runtime.list_containers(Default::default()).expect("ListContainers") {
            names.push((container.id, "<container>".to_owned()));
        }
        let tests = directory("").display().to_string();
        names.push((tests.trim_end_matches('/').to_owned(), "<tests>".to_owned()));
        names.push((self.joined.node.cgroups().path().to_owned(), "<root>".to_owned()));
        names.push((self.joined.name.clone(), "<node>".to_owned()));
        self.names = names;
    }

    /// A text in which nothing is of this node only.
    fn common(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, stands_for) in &self.names {
            if text.contains(name.as_str()) {
                text = text.replace(name, stands_for);
            }
        }
        text
    }

    /// A series by its name and labels, without what differs between the nodes.
    fn series(&self, sample: &Sample) -> String {
        let label = |(name, value): (&String, &String)| {
            let mut value = self.common(value);
            // Each agent places the cgroup of a container itself; its name is the container's id.
            if name == "id" && !sample.label("name").is_empty() {
                let last = value.rsplit('/').next().unwrap_or_default().to_owned();
                assert!(sample.label("id").ends_with(sample.label("name")), "{sample:?}");
                value = format!("<place>/{last}");
            }
            format!("{name}={value:?}")
        };
        let labels: Vec<String> = sample.labels.iter().map(label).collect();
        format!("{}{{{}}}", sample.name, labels.join(","))
    }

    fn all_series(&self, page: &str) -> BTreeMap<String, f64> {
        self.page(page).samples.iter().map(|sample| (self.series(sample), sample.value)).collect()
    }

    /// Whether the pages have the numbers of all containers that run.
    fn is_complete(&self) -> bool {
        let running = self.joined.node.running_of_all();
        let page = self.page("/metrics/cadvisor");
        let summary = self.summary("");
        running.iter().all(|(pod, containers)| {
            containers.keys().all(|container| {
                let in_page = page.samples.iter().any(|sample| {
                    sample.name == "container_memory_working_set_bytes"
                        && sample.label("pod") == pod
                        && sample.label("container") == container
                });
                let of_pod = summary["pods"].as_array().into_iter().flatten();
                let mut containers = of_pod
                    .filter(|stats| stats["podRef"]["name"] == **pod)
                    .flat_map(|stats| stats["containers"].as_array().into_iter().flatten());
                in_page && containers.any(|stats| stats["name"] == **container)
            })
        })
    }
}

/// The result of a comparison.
#[derive(Default)]
struct Report {
    /// Series of the Go kubelet that are missing here without an exception.
    missing: Vec<String>,
    /// Counts, and exceptions with their reasons.
    lines: Vec<String>,
}

impl Report {
    /// Prints the counts also when the test fails; `tests/run` shows them again at the end.
    fn print(&self) {
        for line in &self.lines {
            // Not by the macro, whose output the test harness hides when a test passes.
            let _ = std::io::stderr().write_all(format!("series: {line}\n").as_bytes());
        }
    }

    /// Looks for each of `theirs` in `ours`.
    fn compare<'a>(
        &mut self,
        what: &str,
        ours: &BTreeSet<String>,
        theirs: impl Iterator<Item = &'a String>,
        exceptions: &[Exception],
    ) {
        let mut used = vec![0_usize; exceptions.len()];
        let (mut all, before) = (0, self.missing.len());
        for item in theirs {
            all += 1;
            if ours.contains(item) {
                continue;
            }
            match exceptions.iter().position(|exception| (exception.holds)(item)) {
                Some(index) => used[index] += 1,
                None => self.missing.push(format!("{what}: {item}")),
            }
        }
        let (excepted, missing): (usize, usize) = (used.iter().sum(), self.missing.len() - before);
        self.lines.push(format!(
            "{what}: {all} of the Go kubelet, {} of them here, {excepted} excepted, {missing} missing; {} here in all",
            all - excepted - missing,
            ours.len()
        ));
        for (exception, used) in exceptions.iter().zip(used) {
            self.lines.push(format!("{what}: {used} excepted: {}", exception.reason));
        }
    }
}

/// Pages whose series are compared one by one.
fn compare_pages(ours: &NodeUnderTest, theirs: &NodeUnderTest, report: &mut Report) {
    for (page, exceptions) in [
        ("/metrics/cadvisor", &OF_CGROUPS[..]),
        ("/metrics/resource", &NONE),
        ("/metrics/probes", &OF_PROBES),
        ("/metrics/slis", &NONE),
    ] {
        let (own, other) = (ours.all_series(page), theirs.all_series(page));
        assert!(!other.is_empty(), "{page} of the Go kubelet");
        let own = own.into_keys().collect();
        report.compare(page, &own, other.keys(), exceptions);
        let (own, other) = (ours.page(page), theirs.page(page));
        for (name, kind) in &other.types {
            if own.types.get(name).is_some_and(|own| own != kind) {
                report.missing.push(format!("{page}: {name} is a {kind}"));
            }
        }
        // A limit has no time, a sample of the past has.
        let timed = |page: &Exposition| -> BTreeSet<(String, bool)> {
            page.samples.iter().map(|sample| (sample.name.clone(), sample.timestamp.is_some())).collect()
        };
        let own = timed(&own);
        let names: BTreeSet<String> = own.iter().map(|(name, _)| name.clone()).collect();
        let odd =
            timed(&other).into_iter().filter(|family| names.contains(&family.0) && !own.contains(family));
        report.missing.extend(odd.map(|(name, timed)| format!("{page}: {name} with a time: {timed}")));
    }
}

/// `/metrics`: its families and their labels. Which of them are there depends on what has
/// happened to the agent; what coracle lacks is listed in `docs/compatibility.md`.
fn compare_own(ours: &NodeUnderTest, theirs: &NodeUnderTest, report: &mut Report) {
    let documented = documented::read();
    let (own, other) = (ours.page("/metrics").families(), theirs.page("/metrics").families());
    let mut missing = Vec::new();
    let mut excepted: BTreeMap<String, usize> = BTreeMap::new();
    for (name, (kind, labels)) in &other {
        match own.get(name) {
            Some((own_kind, own_labels)) => {
                if (own_kind, own_labels) != (kind, labels) {
                    missing
                        .push(format!("/metrics: {name}: {kind} {labels:?}, here {own_kind} {own_labels:?}"));
                }
            }
            None => match documented.iter().find(|row| row.is_of(name)) {
                Some(row) if !row.works => *excepted.entry(row.state.clone()).or_default() += 1,
                Some(row) => {
                    missing.push(format!("/metrics: {name}, which is listed as working: {}", row.state))
                }
                None => missing.push(format!("/metrics: {name}, which has no row in docs/compatibility.md")),
            },
        }
    }
    for name in own.keys() {
        if documented.iter().any(|row| row.is_of(name) && !row.works && !row.is_pattern()) {
            missing.push(format!("/metrics: {name}, which is listed as missing"));
        }
    }
    let sum: usize = excepted.values().sum();
    report.lines.push(format!(
        "/metrics: {} of the Go kubelet (families), {} of them here, {sum} excepted, {} wrong; {} here in all",
        other.len(),
        other.keys().filter(|name| own.contains_key(*name)).count(),
        missing.len(),
        own.len()
    ));
    for (reason, count) in excepted {
        report.lines.push(format!("/metrics: {count} excepted: {reason}"));
    }
    report.missing.append(&mut missing);
}

/// The fields of both summaries.
fn compare_summaries(ours: &NodeUnderTest, theirs: &NodeUnderTest, report: &mut Report) {
    for query in ["", "?only_cpu_and_memory=true"] {
        let paths = |side: &NodeUnderTest| shape::paths(&side.summary(query), &|text| side.common(text));
        let (own, other) = (paths(ours), paths(theirs));
        report.compare(&format!("/stats/summary{query}"), &own, other.iter(), &OF_SUMMARY);
    }
}

/// Repeats the comparison until nothing is missing: the Go kubelet corrects some fields of a container some
/// seconds after its start.
fn compare(ours: &NodeUnderTest, theirs: &NodeUnderTest) {
    let mut last = Report::default();
    let begun = Instant::now();
    while begun.elapsed() < patience() {
        last = Report::default();
        compare_pages(ours, theirs, &mut last);
        compare_summaries(ours, theirs, &mut last);
        compare_own(ours, theirs, &mut last);
        if last.missing.is_empty() {
            break;
        }
        pause(Duration::from_secs(2));
    }
    last.print();
    let missing = &last.missing;
    assert!(missing.is_empty(), "{} of the Go kubelet are missing:\n{}", missing.len(), missing.join("\n"));
}

/// Numbers that follow from the manifests are the same; the Go kubelet's are some seconds old.
fn wait_equal(ours: &NodeUnderTest, theirs: &NodeUnderTest) {
    let values = |side: &NodeUnderTest| -> BTreeMap<String, f64> {
        let all = side.all_series("/metrics/cadvisor").into_iter();
        all.filter(|(series, _)| {
            let name = series.split('{').next().unwrap_or_default();
            EQUAL.contains(&name) && !series.contains("name=\"\"")
        })
        .collect()
    };
    let count = wait_for("equal numbers of equal containers", patience(), || {
        let (own, other) = (values(ours), values(theirs));
        let different: Vec<_> =
            other.iter().filter(|(series, value)| own.get(*series) != Some(value)).collect();
        if !different.is_empty() {
            eprintln!("{} differ: {:?}", different.len(), different.iter().take(5).collect::<Vec<_>>());
        }
        different.is_empty().then_some(other.len())
    });
    let line = format!("/metrics/cadvisor: {count} numbers of {} families are equal", EQUAL.len());
    Report { lines: vec![line], ..Report::default() }.print();
    let left = |side: &NodeUnderTest| -> BTreeMap<String, u64> {
        let summary = side.summary("");
        let pods = summary["pods"].as_array().into_iter().flatten();
        pods.filter_map(|pod| {
            let memory = &pod["memory"];
            let limit = memory["availableBytes"].as_u64()? + memory["workingSetBytes"].as_u64()?;
            Some((side.common(pod["podRef"]["name"].as_str()?), limit))
        })
        .collect()
    };
    // A summary may be without the numbers of a pod for a moment.
    let begun = Instant::now();
    loop {
        let (own, limits) = (left(ours), left(theirs));
        if limits.len() > 1 && own == limits {
            break;
        }
        assert!(begun.elapsed() < patience(), "limits of whole pods: {own:?} and not {limits:?}");
        pause(Duration::from_secs(1));
    }
}

// Runtimes: containerd 2.
#[test]
fn every_metric_series_of_the_go_kubelet_exists() {
    if skip_on_go_kubelet("the pages of numbers", "the test starts both agents itself") {
        return;
    }
    let mut ours = NodeUnderTest::start(OURS, false);
    let mut theirs = NodeUnderTest::start(THEIRS, true);
    for side in [&ours, &theirs] {
        scenario::start(&side.joined);
    }
    for side in [&mut ours, &mut theirs] {
        scenario::wait(&side.joined);
        side.read_ids();
        wait_until("the numbers of all containers", patience(), || side.is_complete());
    }
    wait_until("volumes in the Go kubelet's summary", patience(), || {
        let summary = theirs.summary("");
        let pods = summary["pods"].as_array().cloned().unwrap_or_default();
        // All but the static one have a token.
        let measured = |pod: &Value| pod["volume"].as_array().is_some_and(|all| !all.is_empty());
        pods.iter().filter(|pod| measured(pod)).count() + 1 >= pods.len()
    });
    compare(&ours, &theirs);
    wait_equal(&ours, &theirs);

    for mut side in [ours, theirs] {
        // What the end of a test asserts of an agent is not meant for the Go kubelet.
        if side.joined.name == THEIRS {
            side.joined.node.stop_agent();
            side.joined.node.use_go_kubelet(false);
            side.joined.node.start_agent();
        }
        let names: Vec<String> =
            scenario::parts().iter().map(|part| part.name_on(&side.joined.name)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        side.joined.node.remove("static.json");
        let NodeUnderTest { joined, .. } = side;
        joined.finish(&names);
    }
}
