//! Very many pods of two containers with two probes each (`SCALE_CONTAINERS=1`: of one): the
//! agent's memory and threads grow with the pods, and no faster. `tests/bench/scale` runs it with a
//! release build and 1,000 pods.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::print_line;
use crate::support::fake_node::FakeNode;
use crate::support::node::{FOREVER, busybox, is_ready, pod};
use crate::support::process_usage::{ProcessUsage, cpu_time};
use crate::support::wait::{pause, wait_for, wait_until};

/// Debug builds of two programs on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Pods in the usual run of the tests.
const PODS: usize = 240;

/// One thread per pod and per probe; the rest comes and goes with connections.
const SPARE_THREADS: usize = 12;

/// Probes of a container.
const PROBES: usize = 2;

/// Containers of a pod in the usual run.
const CONTAINERS: usize = 2;

/// Probes and full lists are periodic: their cost shows only over several periods.
const STEADY: Duration = Duration::from_secs(20);

/// How long the memory is measured.
const LOOK: Duration = Duration::from_millis(500);

/// How long at most for a moment of few checks: six rounds of all probes.
const LONG_LOOK: Duration = Duration::from_secs(60);

/// How far the growth may be from a straight line: memory comes in pages and arenas.
const SLACK: f64 = 1.4;

#[derive(Debug, Clone, Copy)]
struct Measurement {
    pods: usize,
    /// At most.
    holding: ProcessUsage,
    /// Anonymous and resident when few checks are under way.
    calm_kib: u64,
    /// Of one core, while nothing but probes happens.
    cpu_percent: f64,
}

fn containers_per_pod() -> usize {
    number("SCALE_CONTAINERS").unwrap_or(CONTAINERS)
}

/// What so many pods with probes may add.
fn most_threads(pods: usize) -> usize {
    pods + SPARE_THREADS + pods * containers_per_pod() * PROBES
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

/// The minimum of anonymous memory at a moment with so few threads. How many of the first checks run
/// when the last container starts is random, and so is how much of the program's file is in memory:
/// the agent releases those pages when it is idle, and they do not grow with the pods.
fn hold_calm(node: &FakeNode, threads: usize) -> u64 {
    let (begun, mut calm, mut least) = (Instant::now(), None::<Instant>, u64::MAX);
    // Without such a moment the overall minimum is the closest value.
    while calm.is_none_or(|since| since.elapsed() < LOOK) && begun.elapsed() < LONG_LOOK {
        let now = node.usage().unwrap();
        least = least.min(now.anonymous_kib);
        calm = calm.or_else(|| (now.threads <= threads).then(Instant::now));
        pause(Duration::from_millis(100));
    }
    least
}

/// Anonymous resident KiB.
fn anonymous_kib(pid: u32) -> u64 {
    field(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default(), "RssAnon:")
}

/// How often each thread has waited so far.
fn waits(pid: u32) -> BTreeMap<OsString, u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let waits = |task: &fs::DirEntry| fs::read_to_string(task.path().join("status")).unwrap_or_default();
    tasks.map(|task| (task.file_name(), field(&waits(&task), "voluntary_ctxt_switches:"))).collect()
}

fn field(status: &str, name: &str) -> u64 {
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
    value.and_then(|value| value.parse().ok()).unwrap_or_default()
}

/// Whether both probes of so many containers have been at work.
fn are_checked(node: &FakeNode, containers: usize) -> bool {
    let mut checks: BTreeMap<String, usize> = BTreeMap::new();
    for entry in node.fake.journal().iter().filter(|entry| entry.method == "ExecSync") {
        *checks.entry(entry.request["container_id"].to_string()).or_default() += 1;
    }
    checks.len() == containers && checks.values().all(|count| *count >= 2)
}

/// Looks what the agent spends, and tells of all that was measured.
fn measure(
    node: &FakeNode,
    pods: usize,
    holding: ProcessUsage,
    calm_kib: u64,
    span: Duration,
) -> Measurement {
    let (pid, begun) = (node.pid(), Instant::now());
    let (before, execs) = (cpu_time(pid), node.fake.count("ExecSync"));
    // Threads that end meanwhile count up to the last sample that has them.
    let (first, mut last) = (waits(pid), waits(pid));
    while begun.elapsed() < span {
        pause(Duration::from_millis(250));
        last.extend(waits(pid));
    }
    let woken: u64 =
        last.iter().map(|(task, now)| now.saturating_sub(first.get(task).copied().unwrap_or(0))).sum();
    let spent = cpu_time(pid).saturating_sub(before);
    let seconds = begun.elapsed().as_secs_f64();
    let cpu_percent = spent.as_secs_f64() / seconds * 100.0;
    print_line(&format!(
        "scale: {pods:>4} pods, {:>4} containers, {:>4} probes: {:>5.1} MiB resident, \
         {:>5.1} anonymous when calm and {:>5.1} now, {:>4} threads, {:>3} descriptors, {cpu_percent:>5.2} % of a core, \
         {:>6.1} wake-ups and {:>5.1} checks a second",
        pods * containers_per_pod(),
        pods * containers_per_pod() * PROBES,
        holding.resident_kib as f64 / 1024.0,
        calm_kib as f64 / 1024.0,
        anonymous_kib(pid) as f64 / 1024.0,
        holding.threads,
        holding.descriptors,
        woken as f64 / seconds,
        (node.fake.count("ExecSync") - execs) as f64 / seconds,
    ));
    Measurement { pods, holding, calm_kib, cpu_percent }
}

#[test]
fn memory_grows_linearly_with_probed_pods() {
    let most = number("SCALE_PODS").unwrap_or(PODS);
    let each = containers_per_pod();
    let span = Duration::from_secs(number("SCALE_SECONDS").unwrap_or(3) as u64);
    let node = FakeNode::start_with(json!({"maxPods": most + 10}));
    let none = hold(&node, LOOK);
    let calm_kib = hold_calm(&node, none.threads + SPARE_THREADS);
    let mut measurements = vec![measure(&node, 0, none, calm_kib, span)];
    let mut made = 0;
    for pods in [most / 4, most / 2, most] {
        for number in made..pods {
            let containers: Vec<Value> = (0..each).map(|n| probed(&format!("c{n}"))).collect();
            node.apply(&pod(&format!("pod{number:04}"), Value::from(containers)));
        }
        made = pods;
        let running = || {
            node.fake.with_state(|state| {
                state.containers.values().filter(|container| container.is_running()).count()
            })
        };
        wait_until(&format!("{} containers to run", pods * each), PATIENCE, || running() == pods * each);
        // Measured before a list of all pods is requested: a response of megabytes needs memory, too.
        let threads = measurements[0].holding.threads + most_threads(pods);
        let holding = wait_for(&format!("at most {threads} threads for a while"), PATIENCE, || {
            Some(hold(&node, LOOK)).filter(|holding| holding.threads <= threads)
        });
        wait_until("each container to be checked", PATIENCE, || are_checked(&node, pods * each));
        let calm_kib = hold_calm(&node, none.threads + most_threads(pods));
        wait_until(&format!("{pods} pods to be ready"), PATIENCE, || {
            pause(Duration::from_millis(200));
            node.try_pods().is_some_and(|all| all.len() == pods && all.iter().all(is_ready))
        });
        node.assert_no_duplicates();
        // The list of all pods was returned above.
        wait_until("the agent to be healthy", PATIENCE, || node.health("/healthz").0 == 200);
        // The work of the start is done, and only probes run.
        pause(span / 3);
        measurements.push(measure(&node, pods, holding, calm_kib, span));
    }
    check_growth(&measurements);
    if span >= STEADY {
        check_cpu(&measurements);
    }
    if let Some(bar) = number("SCALE_MAX_MIB") {
        let resident = measurements[3].holding.resident_kib / 1024;
        assert!(resident <= bar as u64, "{resident} MiB with {most} pods, at most {bar} promised");
    }

    // Each container was started once, and none was restarted.
    let calls = node.fake.counts();
    for (method, count) in
        [("RunPodSandbox", most), ("CreateContainer", most * each), ("StartContainer", most * each)]
    {
        assert_eq!(calls.get(method), Some(&count), "{method}");
    }
    print_line(&format!("scale: {} execs", calls.get("ExecSync").unwrap_or(&0)));
    // Removal of all pods at once.
    let begun = Instant::now();
    let pid = node.pid();
    fs::read_dir(node.manifests()).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap());
    wait_until("all pods to be gone", PATIENCE, || {
        node.fake.with_state(|state| state.containers.values().all(|container| !container.is_running()))
            && node.try_pods().is_some_and(|pods| pods.is_empty())
    });
    let left = measurements[0].holding.threads + SPARE_THREADS;
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
    node.finish_below(measurements[3].holding.resident_kib * 3 / 2);
}

/// The second half of the pods uses as much memory as the first half.
fn check_growth(measurements: &[Measurement]) {
    let [none, _, half, all] = measurements else { panic!("four measurements") };
    let kib = |mark: &Measurement| mark.calm_kib as f64;
    let (first, second) = (kib(half) - kib(none), kib(all) - kib(half));
    assert!(
        second <= first * SLACK,
        "the first {} pods took {first:.0} anonymous KiB when calm, the next {} took {second:.0} KiB",
        half.pods,
        all.pods - half.pods
    );
    for mark in measurements {
        let most = none.holding.descriptors + 64;
        assert!(mark.holding.descriptors <= most, "descriptors grow with the pods: {mark:?}");
        let most = none.holding.threads + most_threads(mark.pods);
        assert!(mark.holding.threads <= most, "more than a thread per pod and probe: {mark:?}");
    }
}

/// Nor does it use more processor time.
fn check_cpu(measurements: &[Measurement]) {
    let [none, _, half, all] = measurements else { panic!("four measurements") };
    let (first, second) = (half.cpu_percent - none.cpu_percent, all.cpu_percent - half.cpu_percent);
    assert!(
        second <= first.max(0.5) * SLACK,
        "the first half costs {first:.2} % of a core, the second {second:.2} %"
    );
}
