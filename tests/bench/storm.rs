//! The return of many nodes: agents with fake runtimes, as nodes of one real API server that is away for a
//! minute. Its audit log has the requests of each of them, so that nothing stands between both.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::fake_agent::{FakeAgent, Program, wait_all_ready};
use crate::requests::{NodeRequest, between, by_kind, by_second, first_of_each, node_requests, ratio};
use crate::support::control_plane::{API_SERVER, ControlPlane, ControlPlaneOptions};
use crate::support::wait::pause;

/// The length of each part: before, without, and with the API server again.
const MINUTE: Duration = Duration::from_secs(60);
/// What follows the first minute with the API server.
const AFTER: Duration = Duration::from_secs(60);
/// Requests that belong to the start of the agents.
const SETTLE: Duration = Duration::from_secs(60);
/// Seconds in a row of the output.
const ROW: u64 = 10;

/// Runs the storm and prints its numbers.
pub fn measure(agents: usize, binary: &Path, base: &Path) {
    let plane = ControlPlane::start_with(&base.join("plane"), &ControlPlaneOptions::bare());
    let program = Program { binary, is_go_kubelet: false };
    let start = |number: usize| {
        let name = format!("storm-{number}");
        let kubeconfig = plane.node_kubeconfig(&name);
        FakeAgent::start(name, program, &kubeconfig, base)
    };
    let mut nodes: Vec<FakeAgent> = (0..agents).map(start).collect();
    wait_all_ready(&mut nodes, &plane);
    println!("storm: {agents} agents are ready; {}", load());
    pause(SETTLE);
    let steady = SystemTime::now();
    pause(MINUTE);
    plane.stop(API_SERVER);
    pause(MINUTE);
    // The agents reach it before it counts as ready.
    let back = SystemTime::now();
    plane.resume(API_SERVER);
    println!("storm: the API server is ready again after {:.1} s; {}", seconds(back.elapsed()), load());
    pause(MINUTE + AFTER);

    let all = node_requests(&plane);
    let before = between(&all, steady, MINUTE).len();
    let after = between(&all, back, MINUTE + AFTER);
    let Some((first, _)) = after.first() else { panic!("no agent has returned") };
    // From the first request that the server has taken.
    let start = back + *first;
    print_rows("steady", &between(&all, steady, MINUTE));
    print_rows("back", &between(&all, start, MINUTE + AFTER));
    print_seconds(&between(&all, start, MINUTE));
    let storm = between(&all, start, MINUTE);
    let (kinds, firsts) = (by_kind(&storm), first_of_each(&storm, |_| true));
    let busiest = by_second(&storm).into_iter().max().unwrap_or(0);
    let share = 100.0 * ratio(busiest, storm.len());
    let per_agent = |count: usize| ratio(count, agents);
    let rate = ratio(storm.len(), before);
    println!(
        "storm: {agents} agents: {:.1} requests per agent in the steady minute, {:.1} in the first minute \
         back ({rate:.1} times), at most {busiest} in a second ({:.2} per agent, {share:.0} % of the minute)",
        per_agent(before),
        per_agent(storm.len()),
        per_agent(busiest),
    );
    let mut spread: Vec<f64> = firsts.values().map(Duration::as_secs_f64).collect();
    spread.sort_by(f64::total_cmp);
    let quartile =
        |part: usize| spread.get(spread.len().saturating_sub(1) * part / 4).copied().unwrap_or(0.0);
    println!(
        "storm: the first request of each agent: {} of {agents} within the minute; quartiles {:.1} s, {:.1} s, \
         {:.1} s, the last after {:.1} s",
        spread.len(),
        quartile(1),
        quartile(2),
        quartile(3),
        quartile(4),
    );
    let kinds: Vec<String> = kinds.iter().map(|(what, count)| format!("{what} {count}")).collect();
    println!("storm: requests of the first minute: {}", kinds.join(", "));
    let late: Vec<&str> =
        nodes.iter().map(|node| node.name.as_str()).filter(|name| !firsts.contains_key(name)).collect();
    if !late.is_empty() {
        println!("storm: not within the minute: {}", late.join(", "));
    }
}

fn seconds(elapsed: Result<Duration, std::time::SystemTimeError>) -> f64 {
    elapsed.unwrap_or_default().as_secs_f64()
}

fn load() -> String {
    format!("load average {}", fs::read_to_string("/proc/loadavg").unwrap_or_default().trim())
}

/// The requests of each second after the return, with the kinds of those of the busiest second.
fn print_seconds(requests: &[(Duration, &NodeRequest)]) {
    let mut seconds: BTreeMap<u64, BTreeMap<&str, usize>> = BTreeMap::new();
    for (since, request) in requests {
        *seconds.entry(since.as_secs()).or_default().entry(&request.kind).or_default() += 1;
    }
    let count = |second: u64| seconds.get(&second).map_or(0, |kinds| kinds.values().sum::<usize>());
    for row in 0..MINUTE.as_secs() / ROW {
        let counts: Vec<String> =
            (row * ROW..(row + 1) * ROW).map(|second| format!("{:>4}", count(second))).collect();
        println!("storm: back: requests of each second from {:>2} s on:{}", row * ROW, counts.concat());
    }
    let Some((second, kinds)) = seconds.iter().max_by_key(|(second, _)| count(**second)) else { return };
    let kinds: Vec<String> = kinds.iter().map(|(what, count)| format!("{what} {count}")).collect();
    println!("storm: back: the busiest second is from {second} s on: {}", kinds.join(", "));
}

/// Requests per second over time.
fn print_rows(what: &str, requests: &[(Duration, &NodeRequest)]) {
    let mut rows: BTreeMap<u64, usize> = BTreeMap::new();
    for (since, _) in requests {
        *rows.entry(since.as_secs() / ROW).or_default() += 1;
    }
    for (row, count) in &rows {
        let rate = ratio(*count, usize::try_from(ROW).unwrap_or(1));
        println!(
            "storm: {what}: {:>3} s to {:>3} s: {rate:.1} requests per second",
            row * ROW,
            (row + 1) * ROW
        );
    }
}
