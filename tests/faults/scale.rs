//! Five hundred pods of two containers each: what the agent holds grows with the pods, and
//! no faster.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::cop::Holding;
use crate::support::node::{FOREVER, busybox, is_ready, pod};
use crate::support::solo::Solo;
use crate::support::wait::wait_until;

/// Debug builds of two programs on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// One worker thread per pod; the rest comes and goes with connections.
const SPARE_THREADS: usize = 12;

/// How far the growth may be from a straight line: memory comes in pages and arenas.
const SLACK: f64 = 1.3;

#[derive(Debug, Clone, Copy)]
struct Mark {
    pods: usize,
    holding: Holding,
    cpu: Duration,
    elapsed: Duration,
}

/// CPU time of a process so far, user and system.
fn cpu(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // The name in parentheses may hold anything; fields 14 and 15 of the line are counted
    // from behind it. The kernel counts in hundredths for every architecture we build for.
    let rest = stat.rsplit_once(')').unwrap().1;
    let ticks = rest.split_whitespace().skip(11).take(2).map(|text| text.parse::<u64>().unwrap());
    Duration::from_millis(ticks.sum::<u64>() * 10)
}

#[test]
fn scale_500_pods() {
    let solo = Solo::start_with(json!({"maxPods": 600}));
    let begun = Instant::now();
    let pid = solo.pid();
    let idle = solo.holding().unwrap();
    println!("   0 pods: {:>6} KiB resident, {:>3} threads", idle.resident_kib, idle.threads);
    let mut marks: Vec<Mark> = Vec::new();
    let mut made = 0;
    for pods in [100, 200, 300, 500] {
        for number in made..pods {
            let containers = json!([busybox("one", FOREVER), busybox("two", FOREVER)]);
            solo.apply(&pod(&format!("pod{number:03}"), containers));
        }
        made = pods;
        wait_until(&format!("{} containers to run", pods * 2), PATIENCE, || {
            solo.fake.with_state(|state| state.containers.values().filter(|one| one.is_running()).count())
                == pods * 2
        });
        wait_until(&format!("{pods} pods to be ready"), PATIENCE, || {
            solo.try_pods().is_some_and(|all| all.len() == pods && all.iter().all(is_ready))
        });
        solo.assert_no_twins();
        solo.assert_answers();
        // Threads that stop a container or answer a request have ended by then.
        let most = idle.threads + pods + SPARE_THREADS;
        wait_until(&format!("at most {most} threads"), PATIENCE, || solo.holding().unwrap().threads <= most);
        let mark = Mark { pods, holding: solo.holding().unwrap(), cpu: cpu(pid), elapsed: begun.elapsed() };
        println!(
            "{pods:>4} pods: {:>6} KiB resident, {:>3} threads, {:>3} descriptors, {:>5.2} s CPU, {:>5.1} s",
            mark.holding.resident_kib,
            mark.holding.threads,
            mark.holding.descriptors,
            mark.cpu.as_secs_f64(),
            mark.elapsed.as_secs_f64()
        );
        marks.push(mark);
    }
    check_growth(idle, &marks);

    // Every start was the only one of its container, and nobody was restarted.
    let calls = solo.fake.counts();
    for (method, count) in [("RunPodSandbox", 500), ("CreateContainer", 1000), ("StartContainer", 1000)] {
        assert_eq!(calls.get(method), Some(&count), "{method}");
    }
    // The way back: all at once.
    let begun = Instant::now();
    fs::read_dir(solo.manifests()).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap());
    wait_until("all pods to be gone", PATIENCE, || {
        solo.fake.with_state(|state| state.containers.values().all(|one| !one.is_running()))
            && solo.try_pods().is_some_and(|pods| pods.is_empty())
    });
    println!("removed in {:.1} s, {:.2} s CPU so far", begun.elapsed().as_secs_f64(), cpu(pid).as_secs_f64());
    let left = idle.threads + SPARE_THREADS;
    wait_until("the threads of the pods to be gone", PATIENCE, || solo.holding().unwrap().threads <= left);
    wait_until("all records to be gone", PATIENCE, || {
        solo.fake.with_state(|state| state.containers.is_empty() && state.sandboxes.is_empty())
    });
    println!("nothing left after {:.1} s", begun.elapsed().as_secs_f64());
}

/// From the first hundred pods on, each further hundred costs the same.
fn check_growth(idle: Holding, marks: &[Mark]) {
    let at = |pods: usize| marks.iter().find(|mark| mark.pods == pods).unwrap();
    let resident = |pods: usize| at(pods).holding.resident_kib as f64;
    // The growth over the first two hundred, arenas and all, sets the scale.
    let per_hundred = (resident(200) - idle.resident_kib as f64) / 2.0;
    let grown = resident(500) - resident(200);
    assert!(
        grown <= 3.0 * per_hundred * SLACK,
        "300 more pods took {grown:.0} KiB; the 200 before them {per_hundred:.0} KiB per hundred"
    );
    for mark in marks {
        let descriptors = idle.descriptors + 64;
        assert!(mark.holding.descriptors <= descriptors, "descriptors grow with the pods: {mark:?}");
    }
}
