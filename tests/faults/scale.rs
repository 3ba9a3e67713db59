//! Very many pods of two containers with two probes each: memory and threads of the agent grow
//! linearly with the pods. `tests/bench/scale` runs it with a release build and 1,000 pods.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::print_line;
use crate::support::fake_node::FakeNode;
use crate::support::node::{FOREVER, busybox, is_ready, pod};
use crate::support::process_usage::{ProcessUsage, cpu_time};
use crate::support::wait::{pause, wait_until};

/// Debug builds of two programs on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Pods in the usual run of the tests.
const PODS: usize = 240;

/// One worker thread per pod; the rest comes and goes with connections and checks.
const SPARE_THREADS: usize = 12;

/// How many checks of probes may be under way at one time.
const CHECKS: usize = 512;

/// Probes and full lists are periodic: their cost shows only over several periods.
const STEADY: Duration = Duration::from_secs(20);

/// How long the memory is measured.
const LOOK: Duration = Duration::from_millis(500);

/// How long at most for a moment of few checks: two rounds of all probes.
const LONG_LOOK: Duration = Duration::from_secs(20);

/// How far the growth may be from a straight line: memory comes in pages and arenas.
const SLACK: f64 = 1.4;

#[derive(Debug, Clone, Copy)]
struct Measurement {
    pods: usize,
    /// At most.
    holding: ProcessUsage,
    /// Resident when few checks are under way.
    calm_kib: u64,
    /// Of one core, while nothing but probes happens.
    cpu_percent: f64,
}

/// What so many pods with four probes each may use.
fn most_threads(pods: usize) -> usize {
    pods + SPARE_THREADS + (pods * 4).min(CHECKS)
}

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// A container with a liveness and a readiness probe, once every ten seconds each.
fn probed(name: &str) -> Value {
    let mut container = busybox(name, FOREVER);
    for probe in ["livenessProbe", "readinessProbe"] {
        container[probe] = json!({"exec": {"command": ["true"]}, "periodSeconds": 10});
    }
    container
}

/// The maximum that the agent uses during the measurement.
fn hold(node: &FakeNode, span: Duration) -> ProcessUsage {
    let begun = Instant::now();
    let mut holding = node.usage().unwrap();
    while begun.elapsed() < span {
        pause(Duration::from_millis(100));
        let now = node.usage().unwrap();
        holding.threads = holding.threads.max(now.threads);
        holding.descriptors = holding.descriptors.max(now.descriptors);
        holding.resident_kib = holding.resident_kib.max(now.resident_kib);
    }
    holding
}

/// The minimum of resident memory at a moment with so few threads. How many of the first checks run
/// when the last container starts is random.
fn hold_calm(node: &FakeNode, threads: usize) -> u64 {
    let (begun, mut calm, mut least) = (Instant::now(), None::<Instant>, u64::MAX);
    // Without such a moment the overall minimum is the closest value.
    while calm.is_none_or(|since| since.elapsed() < LOOK) && begun.elapsed() < LONG_LOOK {
        let now = node.usage().unwrap();
        least = least.min(now.resident_kib);
        calm = calm.or_else(|| (now.threads <= threads).then(Instant::now));
        pause(Duration::from_millis(100));
    }
    least
}

/// Whether both probes of so many containers have run.
fn are_checked(node: &FakeNode, containers: usize) -> bool {
    let mut checks: BTreeMap<String, usize> = BTreeMap::new();
    for entry in node.fake.journal().iter().filter(|entry| entry.method == "ExecSync") {
        *checks.entry(entry.request["container_id"].to_string()).or_default() += 1;
    }
    checks.len() == containers && checks.values().all(|count| *count >= 2)
}

/// Measures what the agent uses, and prints all measurements.
fn mark(node: &FakeNode, pods: usize, holding: ProcessUsage, calm_kib: u64, span: Duration) -> Measurement {
    let (pid, begun) = (node.pid(), Instant::now());
    let (before, execs) = (cpu_time(pid), node.fake.count("ExecSync"));
    pause(span);
    let spent = cpu_time(pid).saturating_sub(before);
    let seconds = begun.elapsed().as_secs_f64();
    let cpu_percent = spent.as_secs_f64() / seconds * 100.0;
    print_line(&format!(
        "scale: {pods:>4} pods, {:>4} containers, {:>4} probes: {:>5.1} MiB resident ({:>5.1} when calm), \
         {:>4} threads, {:>3} descriptors, {cpu_percent:>5.2} % of a core, {:>5.1} checks a second",
        pods * 2,
        pods * 4,
        holding.resident_kib as f64 / 1024.0,
        calm_kib as f64 / 1024.0,
        holding.threads,
        holding.descriptors,
        (node.fake.count("ExecSync") - execs) as f64 / seconds,
    ));
    Measurement { pods, holding, calm_kib, cpu_percent }
}

#[test]
fn memory_grows_linearly_with_probed_pods() {
    let most = number("SCALE_PODS").unwrap_or(PODS);
    let span = Duration::from_secs(number("SCALE_SECONDS").unwrap_or(3) as u64);
    let node = FakeNode::start_with(json!({"maxPods": most + 10}));
    let none = hold(&node, LOOK);
    let calm_kib = hold_calm(&node, none.threads + SPARE_THREADS);
    let mut marks = vec![mark(&node, 0, none, calm_kib, span)];
    let mut made = 0;
    for pods in [most / 4, most / 2, most] {
        for number in made..pods {
            node.apply(&pod(&format!("pod{number:04}"), json!([probed("one"), probed("two")])));
        }
        made = pods;
        let running =
            || node.fake.with_state(|state| state.containers.values().filter(|one| one.is_running()).count());
        wait_until(&format!("{} containers to run", pods * 2), PATIENCE, || running() == pods * 2);
        // Before a client requests all pods: a response of megabytes has its own cost.
        let threads = marks[0].holding.threads + most_threads(pods);
        wait_until(&format!("at most {threads} threads"), PATIENCE, || {
            node.usage().unwrap().threads <= threads
        });
        let holding = hold(&node, LOOK);
        wait_until("each container to be checked", PATIENCE, || are_checked(&node, pods * 2));
        let calm_kib = hold_calm(&node, none.threads + pods + SPARE_THREADS);
        wait_until(&format!("{pods} pods to be ready"), PATIENCE, || {
            pause(Duration::from_millis(200));
            node.try_pods().is_some_and(|all| all.len() == pods && all.iter().all(is_ready))
        });
        node.assert_no_duplicates();
        // The list of all pods was returned above.
        wait_until("the agent to be healthy", PATIENCE, || node.health("/healthz").0 == 200);
        // The work of the start is done, and only probes run.
        pause(span / 3);
        marks.push(mark(&node, pods, holding, calm_kib, span));
    }
    check_growth(&marks);
    if span >= STEADY {
        check_cpu(&marks);
    }
    if let Some(bar) = number("SCALE_MAX_MIB") {
        let resident = marks[3].holding.resident_kib / 1024;
        assert!(resident <= bar as u64, "{resident} MiB with {most} pods, at most {bar} promised");
    }

    // Each container was started once, and none was restarted.
    let calls = node.fake.counts();
    for (method, count) in
        [("RunPodSandbox", most), ("CreateContainer", most * 2), ("StartContainer", most * 2)]
    {
        assert_eq!(calls.get(method), Some(&count), "{method}");
    }
    print_line(&format!("scale: {} execs", calls.get("ExecSync").unwrap_or(&0)));
    // Removal of all pods at once.
    let begun = Instant::now();
    let pid = node.pid();
    fs::read_dir(node.manifests()).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap());
    wait_until("all pods to be gone", PATIENCE, || {
        node.fake.with_state(|state| state.containers.values().all(|one| !one.is_running()))
            && node.try_pods().is_some_and(|pods| pods.is_empty())
    });
    let left = marks[0].holding.threads + SPARE_THREADS;
    wait_until("the threads of the pods to be gone", PATIENCE, || node.usage().unwrap().threads <= left);
    wait_until("all records to be gone", PATIENCE, || {
        node.fake.with_state(|state| state.containers.is_empty() && state.sandboxes.is_empty())
    });
    print_line(&format!(
        "scale: nothing left {:.1} s after the end of all; {:.1} MiB resident, {:.1} s of CPU in all",
        begun.elapsed().as_secs_f64(),
        node.usage().unwrap().resident_kib as f64 / 1024.0,
        cpu_time(pid).as_secs_f64()
    ));
    // Lists of all pods as text, many megabytes each, were requested since.
    node.finish_below(marks[3].holding.resident_kib * 3 / 2);
}

/// The second half of the pods uses as much memory as the first half.
fn check_growth(marks: &[Measurement]) {
    let [none, _, half, all] = marks else { panic!("four marks") };
    let kib = |mark: &Measurement| mark.calm_kib as f64;
    let (first, second) = (kib(half) - kib(none), kib(all) - kib(half));
    assert!(
        second <= first * SLACK,
        "the first {} pods took {first:.0} KiB when calm, the next {} took {second:.0} KiB",
        half.pods,
        all.pods - half.pods
    );
    for mark in marks {
        let most = none.holding.descriptors + 64;
        assert!(mark.holding.descriptors <= most, "descriptors grow with the pods: {mark:?}");
        let most = none.holding.threads + most_threads(mark.pods);
        assert!(mark.holding.threads <= most, "more than a thread per pod and check: {mark:?}");
    }
}

/// Nor does it use more processor time.
fn check_cpu(marks: &[Measurement]) {
    let [none, _, half, all] = marks else { panic!("four marks") };
    let (first, second) = (half.cpu_percent - none.cpu_percent, all.cpu_percent - half.cpu_percent);
    assert!(
        second <= first.max(0.5) * SLACK,
        "the first half costs {first:.2} % of a core, the second {second:.2} %"
    );
}
