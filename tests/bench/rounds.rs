//! What is measured of an agent, in which order and how often.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::agent::{Agent, full_name};
use crate::process::{self, cpu_seconds};
use crate::results::Results;
use crate::runtime::{LONG, Runtime, StartedContainer, millis, now_nanos};
use crate::support::wait::{pause, wait_until};

/// The grace period of the pods; they end at once when told to.
pub const GRACE: Duration = Duration::from_secs(2);

/// One pod from nothing to a started container.
pub const ONE_STARTED: &str = "1 pod started";
/// One pod from the order to nothing running.
pub const ONE_STOPPED: &str = "1 pod stopped";
/// A container of a running pod, dead, to its successor's start.
pub const RESTARTED: &str = "container killed, next one started";

/// Many pods at once, from nothing to the last container's start.
pub fn started(count: usize) -> String {
    format!("{count} pods started at once")
}

/// The same, from the order to nothing running.
pub fn stopped(count: usize) -> String {
    format!("{count} pods stopped")
}

/// The same, to no record left.
pub fn removed(count: usize) -> String {
    format!("{count} pods stopped, records removed")
}

/// How often and how long.
#[derive(Debug)]
pub struct Plan {
    pub starts: usize,
    pub singles: usize,
    pub rounds: usize,
    pub idle: Duration,
    pub settle: Duration,
    pub pod_counts: Vec<usize>,
    /// Flags of this project's agent besides those of every subject.
    pub agent_flags: Vec<String>,
}

impl Plan {
    pub fn new(quick: bool, full: bool) -> Plan {
        let pod_counts = if full { vec![30, 100] } else { vec![30] };
        let agent_flags = Vec::new();
        if quick {
            let (idle, settle) = (Duration::from_secs(10), Duration::from_secs(3));
            Plan { starts: 3, singles: 3, rounds: 1, idle, settle, pod_counts, agent_flags }
        } else {
            let (idle, settle) = (Duration::from_secs(30), Duration::from_secs(12));
            Plan { starts: 7, singles: 7, rounds: 3, idle, settle, pod_counts, agent_flags }
        }
    }
}

/// All measures of one binary.
pub fn measure(
    results: &mut Results,
    subject: &'static str,
    binary: &Path,
    runtime: &Runtime,
    base: &Path,
    plan: &Plan,
) {
    let mut agent = Agent::new(binary, base.join(subject), runtime);
    for number in 0..plan.starts {
        if number > 0 {
            let took = agent.stop();
            results.put(subject, "SIGTERM to end", "ms", took.as_secs_f64() * 1e3);
        }
        let begun = agent.launch();
        agent.wait_healthy();
        results.put(subject, "start to /healthz ok", "ms", begun.elapsed().as_secs_f64() * 1e3);
    }
    footprint(results, subject, &agent, plan, 0);
    for number in 0..plan.singles {
        single(results, subject, &agent, runtime, number);
    }
    for &count in &plan.pod_counts {
        for round in 0..plan.rounds {
            many_pods(results, subject, &mut agent, runtime, plan, count, round);
        }
    }
    // The first look was at an agent that has just started; this one knows its runtime.
    measure_idle(results, subject, &agent, plan, "after all, no pods");
    agent.stop();
    let complaints = agent.complaints();
    if !complaints.is_empty() {
        results.note(subject, "warnings and errors of its logs", &json!(complaints));
    }
}

/// Its memory and threads now.
pub fn process_memory(results: &mut Results, subject: &'static str, agent: &Agent, when: &str) {
    let memory = process::memory(agent.pid());
    results.put(subject, &format!("resident, {when}"), "MiB", memory.resident);
    results.put(subject, &format!("proportional (PSS), {when}"), "MiB", memory.proportional);
    results.put(subject, &format!("anonymous, {when}"), "MiB", memory.anonymous);
    results.put(subject, &format!("peak resident, {when}"), "MiB", memory.peak);
    results.put(subject, &format!("threads, {when}"), "", memory.threads);
    results.note(subject, &format!("resident KiB by mapping, {when}"), &process::mappings(agent.pid()));
}

/// Waits until the agent is idle, measures it while idle, then reads its memory.
pub fn footprint(results: &mut Results, subject: &'static str, agent: &Agent, plan: &Plan, count: usize) {
    measure_idle(results, subject, agent, plan, &format!("{count} pods"));
}

fn measure_idle(results: &mut Results, subject: &'static str, agent: &Agent, plan: &Plan, when: &str) {
    pause(plan.settle);
    let idle = process::idle(agent.pid(), plan.idle);
    results.put(subject, &format!("idle processor, {when}"), "%", idle.cpu_percent);
    results.put(subject, &format!("idle wake-ups, {when}"), "1/s", idle.wakeups_per_second);
    results.note(subject, &format!("idle threads, {when}: name, wake-ups/s, µs/s"), &idle.by_thread);
    process_memory(results, subject, agent, when);
}

fn single(results: &mut Results, subject: &'static str, agent: &Agent, runtime: &Runtime, number: usize) {
    let name = format!("one{number}");
    let names = [name.clone()];
    let begun = now_nanos();
    agent.apply(&names);
    let first = runtime.wait_attempt(&full_name(&name), 0);
    results.put(subject, ONE_STARTED, "ms", millis(begun, first.started_at));
    wait_until("the pod to be known as running", LONG, || agent.known_running() == 1);
    // Past the moment of the next relist, wherever that is: the kill comes at rest.
    pause(Duration::from_millis(1500 + 130 * u64::try_from(number).unwrap_or(0)));
    let pid = runtime.pid(&first.id);
    let begun = now_nanos();
    process::kill(pid);
    let second = runtime.wait_attempt(&full_name(&name), first.attempt + 1);
    results.put(subject, RESTARTED, "ms", millis(begun, second.started_at));
    wait_until("the pod to be known as running", LONG, || agent.known_running() == 1);
    pause(Duration::from_millis(1500));
    let begun = now_nanos();
    agent.withdraw(&names);
    runtime.wait_empty();
    results.put(subject, ONE_STOPPED, "ms", millis(begun, now_nanos()));
    agent.wait_no_pods();
}

fn attempts(started: &[StartedContainer]) -> BTreeMap<String, String> {
    started.iter().map(|container| (container.pod.clone(), container.id.to_string())).collect()
}

fn many_pods(
    results: &mut Results,
    subject: &'static str,
    agent: &mut Agent,
    runtime: &Runtime,
    plan: &Plan,
    count: usize,
    round: usize,
) {
    let names: Vec<String> = (0..count).map(|number| format!("many{round}-{number}")).collect();
    let cpu = cpu_seconds(agent.pid());
    let begun = now_nanos();
    agent.apply(&names);
    wait_until("all containers to run", LONG, || {
        // Seldom, for the listing is work for the runtime; the times are the runtime's own.
        pause(Duration::from_millis(80));
        runtime.count() == count
    });
    let before = runtime.started();
    let last = before.iter().map(|container| container.started_at).max().unwrap_or(0);
    results.put(subject, &started(count), "ms", millis(begun, last));
    wait_until("all pods to be known as running", LONG, || agent.known_running() == count);
    results.put(subject, &format!("{count} pods known as running"), "ms", millis(begun, now_nanos()));
    pause(Duration::from_secs(2));
    results.put(subject, &format!("processor for {count} starts"), "s", cpu_seconds(agent.pid()) - cpu);
    if round == 0 {
        footprint(results, subject, agent, plan, count);
    }
    takeover(results, subject, agent, runtime, count, &before);
    if round == 0 {
        pause(plan.settle);
        process_memory(results, subject, agent, &format!("{count} pods, agent restarted"));
    }
    let cpu = cpu_seconds(agent.pid());
    let begun = now_nanos();
    agent.withdraw(&names);
    runtime.wait_empty();
    results.put(subject, &stopped(count), "ms", millis(begun, now_nanos()));
    agent.wait_no_pods();
    results.put(subject, &format!("{count} pods gone from /pods"), "ms", millis(begun, now_nanos()));
    results.put(subject, &format!("processor for {count} stops"), "s", cpu_seconds(agent.pid()) - cpu);
}

/// Replaces the agent above running pods.
fn takeover(
    results: &mut Results,
    subject: &'static str,
    agent: &mut Agent,
    runtime: &Runtime,
    count: usize,
    before: &[StartedContainer],
) {
    agent.stop();
    let begun = agent.launch();
    let mut known: Option<Instant> = None;
    wait_until("all statuses to be known again", LONG, || {
        pause(Duration::from_millis(5));
        if agent.known_running() == count {
            known = Some(Instant::now());
        }
        known.is_some()
    });
    let took = known.map_or(Duration::ZERO, |known| known.duration_since(begun));
    results.put(subject, &format!("agent restarted, {count} statuses known"), "ms", took.as_secs_f64() * 1e3);
    agent.wait_healthy();
    pause(Duration::from_secs(3));
    let after = attempts(&runtime.started());
    let changed = attempts(before).iter().filter(|(pod, id)| after.get(*pod) != Some(*id)).count();
    let measure = format!("agent restarted, containers restarted of {count}");
    results.put(subject, &measure, "", f64::from(u32::try_from(changed).unwrap_or(u32::MAX)));
    if changed > 0 {
        results.note(
            subject,
            "containers that did not stay",
            &json!({"before": attempts(before), "after": after}),
        );
    }
}
