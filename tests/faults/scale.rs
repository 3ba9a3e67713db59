//! Very many pods of two containers with two probes each: what the agent holds grows with the
//! pods, and no faster. `tests/bench/scale` runs it with a release build and 1,000 pods.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::cop::{Holding, cpu_time};
use crate::support::node::{FOREVER, busybox, is_ready, pod};
use crate::support::solo::Solo;
use crate::support::wait::{pause, wait_until};
use crate::tell;

/// Debug builds of two programs on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Pods in the usual run of the tests.
const PODS: usize = 240;

/// One worker thread per pod; the rest comes and goes with connections and checks.
const SPARE_THREADS: usize = 12;

/// How many checks of probes may be under way at one time.
const CHECKS: usize = 512;

/// Probes and safety nets come in rounds: what they cost shows only over several of them.
const STEADY: Duration = Duration::from_secs(20);

/// How long the memory is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// How long at most for a moment of few checks: two rounds of all probes.
const LONG_LOOK: Duration = Duration::from_secs(20);

/// How far the growth may be from a straight line: memory comes in pages and arenas.
const SLACK: f64 = 1.4;

#[derive(Debug, Clone, Copy)]
struct Mark {
    pods: usize,
    /// At most.
    holding: Holding,
    /// Resident when few checks are under way.
    calm_kib: u64,
    /// Of one core, while nothing but probes happens.
    cpu_percent: f64,
}

/// What so many pods with four probes each may add.
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

/// What the agent holds at most while one looks.
fn hold(solo: &Solo, span: Duration) -> Holding {
    let begun = Instant::now();
    let mut holding = solo.holding().unwrap();
    while begun.elapsed() < span {
        pause(Duration::from_millis(100));
        let now = solo.holding().unwrap();
        holding.threads = holding.threads.max(now.threads);
        holding.descriptors = holding.descriptors.max(now.descriptors);
        holding.resident_kib = holding.resident_kib.max(now.resident_kib);
    }
    holding
}

/// The least that is resident while one looks for a moment with so few threads. How many of the
/// first checks are under way when the last container runs is chance.
fn hold_calm(solo: &Solo, threads: usize) -> u64 {
    let (begun, mut calm, mut least) = (Instant::now(), None::<Instant>, u64::MAX);
    // Without such a moment the least is what comes nearest to it.
    while calm.is_none_or(|since| since.elapsed() < LOOK) && begun.elapsed() < LONG_LOOK {
        let now = solo.holding().unwrap();
        least = least.min(now.resident_kib);
        calm = calm.or_else(|| (now.threads <= threads).then(Instant::now));
        pause(Duration::from_millis(100));
    }
    least
}

/// Whether both probes of so many containers have been at work.
fn are_checked(solo: &Solo, containers: usize) -> bool {
    let mut checks: BTreeMap<String, usize> = BTreeMap::new();
    for entry in solo.fake.journal().iter().filter(|entry| entry.method == "ExecSync") {
        *checks.entry(entry.request["container_id"].to_string()).or_default() += 1;
    }
    checks.len() == containers && checks.values().all(|count| *count >= 2)
}

/// Looks what the agent spends, and tells of all that was looked at.
fn mark(solo: &Solo, pods: usize, holding: Holding, calm_kib: u64, span: Duration) -> Mark {
    let (pid, begun) = (solo.pid(), Instant::now());
    let (before, execs) = (cpu_time(pid), solo.fake.count("ExecSync"));
    pause(span);
    let spent = cpu_time(pid).saturating_sub(before);
    let seconds = begun.elapsed().as_secs_f64();
    let cpu_percent = spent.as_secs_f64() / seconds * 100.0;
    tell(&format!(
        "scale: {pods:>4} pods, {:>4} containers, {:>4} probes: {:>5.1} MiB resident ({:>5.1} when calm), \
         {:>4} threads, {:>3} descriptors, {cpu_percent:>5.2} % of a core, {:>5.1} checks a second",
        pods * 2,
        pods * 4,
        holding.resident_kib as f64 / 1024.0,
        calm_kib as f64 / 1024.0,
        holding.threads,
        holding.descriptors,
        (solo.fake.count("ExecSync") - execs) as f64 / seconds,
    ));
    Mark { pods, holding, calm_kib, cpu_percent }
}

#[test]
fn scale_of_pods_with_probes() {
    let most = number("SCALE_PODS").unwrap_or(PODS);
    let span = Duration::from_secs(number("SCALE_SECONDS").unwrap_or(3) as u64);
    let solo = Solo::start_with(json!({"maxPods": most + 10}));
    let none = hold(&solo, LOOK);
    let calm_kib = hold_calm(&solo, none.threads + SPARE_THREADS);
    let mut marks = vec![mark(&solo, 0, none, calm_kib, span)];
    let mut made = 0;
    for pods in [most / 4, most / 2, most] {
        for number in made..pods {
            solo.apply(&pod(&format!("pod{number:04}"), json!([probed("one"), probed("two")])));
        }
        made = pods;
        let running =
            || solo.fake.with_state(|state| state.containers.values().filter(|one| one.is_running()).count());
        wait_until(&format!("{} containers to run", pods * 2), PATIENCE, || running() == pods * 2);
        // Before anybody asks for all the pods: an answer of megabytes has its own price.
        let threads = marks[0].holding.threads + most_threads(pods);
        wait_until(&format!("at most {threads} threads"), PATIENCE, || {
            solo.holding().unwrap().threads <= threads
        });
        let holding = hold(&solo, LOOK);
        wait_until("each container to be checked", PATIENCE, || are_checked(&solo, pods * 2));
        let calm_kib = hold_calm(&solo, none.threads + pods + SPARE_THREADS);
        wait_until(&format!("{pods} pods to be ready"), PATIENCE, || {
            pause(Duration::from_millis(200));
            solo.try_pods().is_some_and(|all| all.len() == pods && all.iter().all(is_ready))
        });
        solo.assert_no_twins();
        // The list of all pods has been answered above, as soon as the machine let it.
        wait_until("the agent to be healthy", PATIENCE, || solo.health("/healthz").0 == 200);
        // What the start left to do is done, and only probes are left.
        pause(span / 3);
        marks.push(mark(&solo, pods, holding, calm_kib, span));
    }
    check_growth(&marks);
    if span >= STEADY {
        check_cpu(&marks);
    }
    if let Some(bar) = number("SCALE_MAX_MIB") {
        let resident = marks[3].holding.resident_kib / 1024;
        assert!(resident <= bar as u64, "{resident} MiB with {most} pods, at most {bar} promised");
    }

    // Every start was the only one of its container, and nobody was restarted.
    let calls = solo.fake.counts();
    for (method, count) in
        [("RunPodSandbox", most), ("CreateContainer", most * 2), ("StartContainer", most * 2)]
    {
        assert_eq!(calls.get(method), Some(&count), "{method}");
    }
    tell(&format!("scale: {} execs", calls.get("ExecSync").unwrap_or(&0)));
    // The way back: all at once.
    let begun = Instant::now();
    let pid = solo.pid();
    fs::read_dir(solo.manifests()).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap());
    wait_until("all pods to be gone", PATIENCE, || {
        solo.fake.with_state(|state| state.containers.values().all(|one| !one.is_running()))
            && solo.try_pods().is_some_and(|pods| pods.is_empty())
    });
    let left = marks[0].holding.threads + SPARE_THREADS;
    wait_until("the threads of the pods to be gone", PATIENCE, || solo.holding().unwrap().threads <= left);
    wait_until("all records to be gone", PATIENCE, || {
        solo.fake.with_state(|state| state.containers.is_empty() && state.sandboxes.is_empty())
    });
    tell(&format!(
        "scale: nothing left {:.1} s after the end of all; {:.1} MiB resident, {:.1} s of CPU in all",
        begun.elapsed().as_secs_f64(),
        solo.holding().unwrap().resident_kib as f64 / 1024.0,
        cpu_time(pid).as_secs_f64()
    ));
    // Lists of all pods as text, many megabytes each, have been asked for since.
    solo.finish_below(marks[3].holding.resident_kib * 3 / 2);
}

/// The second half of the pods costs what the first half did.
fn check_growth(marks: &[Mark]) {
    let [none, _, half, all] = marks else { panic!("four marks") };
    let kib = |mark: &Mark| mark.calm_kib as f64;
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

/// Nor does it cost more to watch them.
fn check_cpu(marks: &[Mark]) {
    let [none, _, half, all] = marks else { panic!("four marks") };
    let (first, second) = (half.cpu_percent - none.cpu_percent, all.cpu_percent - half.cpu_percent);
    assert!(
        second <= first.max(0.5) * SLACK,
        "the first half costs {first:.2} % of a core, the second {second:.2} %"
    );
}
