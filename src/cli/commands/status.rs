//! `coracle status`: problems first.

use std::io;

use crate::cli::exit::Exit;
use crate::cli::local::Output;
use crate::cli::table::{Cell, Color, Table};
use crate::model::quantity::Amount;
use crate::server::{NodeReport, ProblemReport, RuntimeReport, SourceReport, ThreadRow};
use crate::util::error_chain::without_codes;

use super::age;
use super::client::Client;
use super::console::{Console, size};
use super::error::Outcome;
use super::offline;

pub(super) fn run(client: &Client, console: &mut Console<'_>, output: Output) -> Outcome {
    let report: NodeReport = client.get("/v1/status")?;
    if !console.document(output, &report)? {
        print(console, &report, output == Output::Wide)?;
    }
    Ok(Exit::Success)
}

/// The problems of all parts of the report.
pub(super) fn problems(report: &NodeReport, now: jiff::Timestamp) -> Vec<String> {
    let mut all = report.problems.clone();
    // The agent's list has the problems of sources without their age.
    let sources: Vec<String> =
        report.sources.iter().flat_map(|source| source.problems.iter().map(place_and_message)).collect();
    all.retain(|text| !sources.contains(text));
    let is_listed = |start: &str| report.problems.iter().any(|text| text.starts_with(start));
    let mut add = |text: String| {
        if !all.contains(&text) {
            all.push(text);
        }
    };
    if let Some(reason) = report.runtime.not_ready.as_ref().filter(|_| !is_listed("container runtime: ")) {
        add(format!("the runtime is not ready: {reason}"));
    }
    if let Some(reason) = report.runtime.network_not_ready.as_ref().filter(|_| !is_listed("network: ")) {
        add(format!("the network is not ready: {reason}"));
    }
    for source in &report.sources {
        if !source.seen && !is_listed(&format!("source {} ", source.name)) {
            add(format!("source {} ({}) has not been read yet", source.name, source.place));
        }
        source.problems.iter().for_each(|problem| add(problem_line(problem, now)));
    }
    for queue in report.queues.iter().filter(|queue| queue.lost > 0) {
        add(format!("queue {} was full and dropped {} entries", queue.name, queue.lost));
    }
    all
}

fn place_and_message(problem: &ProblemReport) -> String {
    let mut line = problem.place.clone();
    if let Some(number) = problem.line {
        line.push_str(&format!(":{number}"));
    }
    line.push_str(": ");
    if !problem.field.is_empty() {
        line.push_str(&format!("{}: ", problem.field));
    }
    line + &problem.message
}

fn problem_line(problem: &ProblemReport, now: jiff::Timestamp) -> String {
    let mut line = place_and_message(problem);
    if let Some(since) = problem.since {
        line.push_str(&format!(" (for {})", age::since(since, now)));
    }
    if problem.kept {
        line.push_str("; the last good version keeps running");
    }
    line
}

pub(super) fn print(console: &mut Console<'_>, report: &NodeReport, wide: bool) -> io::Result<()> {
    let problems = problems(report, console.now);
    if problems.is_empty() {
        console.colored_field(0, "Problems", "none", Some(Color::Green))?;
    } else {
        console.heading("Problems:")?;
        for problem in &problems {
            let mark = console.paint.put(Some(Color::Red), "✗");
            writeln!(console.out, "  {mark} {}", crate::cli::table::visible(&without_codes(problem)))?;
        }
    }
    let uptime = age::human(i64::try_from(report.uptime_seconds).unwrap_or(i64::MAX));
    console.field(0, "Node", &report.node)?;
    console.field(0, "Agent", &format!("coracle {}, up {uptime}", report.version))?;
    runtime(console, &report.runtime)?;
    console.field(0, "Cgroups", &report.cgroups)?;
    let pods: Vec<String> = report.pods.iter().map(|(phase, count)| format!("{count} {phase}")).collect();
    console.field(0, "Pods", &joined(&pods, "none"))?;
    resources(console, report)?;
    pressure(console, report, wide)?;
    sources(console, &report.sources)?;
    if let Some(offline) = &report.offline {
        let is_reachable = !report.problems.iter().any(|problem| problem.starts_with("API server: "));
        let (line, color) = offline::server_line(offline, is_reachable, console.now);
        console.colored_field(0, "API server", &line, Some(color))?;
    }
    let memory = &report.memory;
    // Zero: not measured.
    let anonymous = match memory.anonymous_bytes {
        0 => String::new(),
        bytes => format!(", {} of it anonymous", size(bytes)),
    };
    let (resident, peak) = (size(memory.rss_bytes), size(memory.peak_rss_bytes));
    console.field(0, "Memory", &format!("{resident} resident{anonymous}, {peak} at most so far"))?;
    disk(console, report)?;
    let busy = report.queues.iter().filter(|queue| queue.depth > 0);
    let queues: Vec<String> = busy.map(|queue| format!("{} {}", queue.name, queue.depth)).collect();
    console.field(0, "Queues", &joined(&queues, "empty"))?;
    threads(console, report, wide)
}

/// What the agent writes, and what the logs of containers use of their quota.
fn disk(console: &mut Console<'_>, report: &NodeReport) -> io::Result<()> {
    let text = |files, bytes, syncs| match (files, syncs) {
        (0, 0) => "none".to_owned(),
        _ => format!("{files} files with {}, {syncs} syncs", size(bytes)),
    };
    let disk = &report.disk_writes;
    let hour = text(disk.last_hour_files, disk.last_hour_bytes, disk.last_hour_syncs);
    let all = text(disk.files, disk.bytes, disk.syncs);
    console.field(0, "Disk writes", &format!("{hour} in the last hour; {all} since the start"))?;
    let Some(logs) = &report.container_logs else { return Ok(()) };
    let (used, quota) = (size(logs.used_bytes), size(logs.quota_bytes));
    let removed = match logs.removed_files {
        0 => String::new(),
        count => format!(", {count} files removed"),
    };
    console.field(0, "Container logs", &format!("{used} of {quota}{removed}"))
}

/// The pressure conditions and the thresholds that are met or near; with `wide`, all thresholds.
fn pressure(console: &mut Console<'_>, report: &NodeReport, wide: bool) -> io::Result<()> {
    let color = if report.pressures.is_empty() { Color::Green } else { Color::Red };
    console.colored_field(0, "Pressure", &joined(&report.pressures, "none"), Some(color))?;
    for threshold in report.thresholds.iter().filter(|threshold| wide || threshold.near) {
        let state = match (threshold.met, threshold.near) {
            (true, _) => ", which is met",
            (false, true) => ", which is near",
            (false, false) => "",
        };
        let kind = if threshold.soft { "soft threshold" } else { "threshold" };
        let is_size = !threshold.signal.starts_with("pid.") && !threshold.signal.ends_with(".inodesFree");
        let available = amount(&threshold.available, is_size);
        let least = amount(&threshold.threshold, is_size);
        let text = format!("{available} available, {kind} {least}{state}");
        console.field(1, &threshold.signal, &text)?;
    }
    Ok(())
}

/// A quantity for people. `is_size`: of bytes.
fn amount(quantity: &str, is_size: bool) -> String {
    let bytes = Amount::parse(quantity).ok().filter(|_| is_size);
    let bytes = bytes.and_then(|bytes| u64::try_from(bytes.units()).ok());
    bytes.map_or_else(|| quantity.to_owned(), size)
}

/// What pods may use of each resource.
fn resources(console: &mut Console<'_>, report: &NodeReport) -> io::Result<()> {
    if report.resources.is_empty() {
        return Ok(());
    }
    console.field(0, "Allocatable", "")?;
    for resource in &report.resources {
        let is_size = resource.name == "memory" || resource.name == "ephemeral-storage";
        let amount = |text: &str| amount(text, is_size);
        let reserved = match resource.reserved.as_str() {
            "0" => String::new(),
            reserved => format!(", {} reserved", amount(reserved)),
        };
        let text = format!("{} of {}{reserved}", amount(&resource.allocatable), amount(&resource.capacity));
        console.field(1, &resource.name, &text)?;
    }
    Ok(())
}

fn joined(words: &[String], empty: &str) -> String {
    if words.is_empty() { empty.to_owned() } else { words.join(", ") }
}

fn runtime(console: &mut Console<'_>, runtime: &RuntimeReport) -> io::Result<()> {
    let (state, color) = match (&runtime.not_ready, &runtime.network_not_ready) {
        (None, None) => ("ready", Color::Green),
        (None, Some(_)) => ("ready, its network is not", Color::Yellow),
        (Some(_), _) => ("not ready", Color::Red),
    };
    let name = match (runtime.name.as_str(), runtime.version.as_str()) {
        ("", _) => "unknown".to_owned(),
        (name, version) => format!("{name} {version}"),
    };
    console.colored_field(0, "Runtime", &format!("{name} at {}: {state}", runtime.endpoint), Some(color))?;
    if !runtime.changes.is_empty() {
        console.field(0, "Changes", &format!("by {}", runtime.changes))?;
    }
    Ok(())
}

fn sources(console: &mut Console<'_>, sources: &[SourceReport]) -> io::Result<()> {
    if sources.is_empty() {
        return console.field(0, "Sources", "none");
    }
    console.field(0, "Sources", "")?;
    for source in sources {
        let pods = match (source.seen, source.pods) {
            (false, _) => "not read yet".to_owned(),
            (true, 1) => "1 pod".to_owned(),
            (true, count) => format!("{count} pods"),
        };
        let wrong = match source.problems.len() {
            0 => String::new(),
            1 => ", 1 problem".to_owned(),
            count => format!(", {count} problems"),
        };
        console.field(1, &source.name, &format!("{}: {pods}{wrong}", source.place))?;
    }
    Ok(())
}

/// The number of threads and those that have run for long; with `wide`, all threads.
fn threads(console: &mut Console<'_>, report: &NodeReport, wide: bool) -> io::Result<()> {
    const LONG_SECONDS: f64 = 1.0;
    let busy = report.threads.iter().filter(|thread| thread.waits_for == "running");
    let stuck: Vec<String> = busy
        .filter(|thread| thread.seconds > LONG_SECONDS)
        .map(|thread| format!("{} has been running for {:.0} s", thread.name, thread.seconds))
        .collect();
    let note = if stuck.is_empty() { String::new() } else { format!(": {}", stuck.join(", ")) };
    console.field(0, "Threads", &format!("{}{note}", report.threads.len()))?;
    if !wide {
        return Ok(());
    }
    let mut threads = report.threads.clone();
    threads.sort_by(|a, b| a.name.cmp(&b.name));
    let row = |thread: &ThreadRow| {
        vec![
            Cell::from(thread.name.as_str()),
            Cell::from(thread.waits_for.as_str()),
            Cell::from(format!("{:.1} s", thread.seconds)),
        ]
    };
    let rows: Vec<_> = threads.iter().map(row).collect();
    console.table(&mut Table::new(&["THREAD", "WAITS FOR", "SINCE"]), &rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::table::Paint;
    use crate::offline::{Phase, Report};
    use crate::server::{DiskWritesReport, LogsReport, QueueReport, ResourceReport, ThresholdReport};
    use expect_test::expect;

    #[test]
    fn status_shows_problems_of_all_parts_first() {
        let report = NodeReport {
            node: "node1".into(),
            version: "0.1.0".into(),
            uptime_seconds: 200,
            problems: vec![
                "swap is on".into(),
                "/etc/pods/a.yaml:7: spec.containers[0].image: must be set".into(),
            ],
            runtime: RuntimeReport { network_not_ready: Some("no CNI".into()), ..RuntimeReport::default() },
            sources: vec![SourceReport {
                name: "file".into(),
                place: "/etc/pods".into(),
                seen: true,
                pods: 1,
                problems: vec![ProblemReport {
                    place: "/etc/pods/a.yaml".into(),
                    line: Some(7),
                    field: "spec.containers[0].image".into(),
                    message: "must be set".into(),
                    since: Some("2026-01-01T00:00:00Z".parse().unwrap()),
                    kept: true,
                }],
            }],
            queues: vec![QueueReport { name: "events".into(), depth: 2, lost: 3 }],
            disk_writes: DiskWritesReport { files: 12, bytes: 34_816, syncs: 9, ..Default::default() },
            container_logs: Some(LogsReport { quota_bytes: 2 << 30, used_bytes: 1 << 30, removed_files: 3 }),
            pressures: vec!["DiskPressure".into()],
            thresholds: vec![
                ThresholdReport {
                    signal: "nodefs.available".into(),
                    available: "3Gi".into(),
                    threshold: "4Gi".into(),
                    soft: true,
                    met: true,
                    near: true,
                },
                ThresholdReport {
                    signal: "memory.available".into(),
                    available: "900Mi".into(),
                    threshold: "100Mi".into(),
                    ..ThresholdReport::default()
                },
                ThresholdReport {
                    signal: "nodefs.inodesFree".into(),
                    available: "90k".into(),
                    threshold: "50k".into(),
                    near: true,
                    ..ThresholdReport::default()
                },
            ],
            resources: vec![
                ResourceReport {
                    name: "memory".into(),
                    capacity: "2147483648".into(),
                    reserved: "1073741824".into(),
                    allocatable: "1073741824".into(),
                },
                ResourceReport {
                    name: "cpu".into(),
                    capacity: "2".into(),
                    reserved: "0".into(),
                    allocatable: "2".into(),
                },
            ],
            offline: Some(Report { phase: Phase::Alone, ..Report::default() }),
            ..NodeReport::default()
        };
        let mut out = Vec::new();
        let now = "2026-01-01T00:05:00Z".parse().unwrap();
        print(&mut Console { out: &mut out, paint: Paint::new(false), now }, &report, false).unwrap();
        let text = String::from_utf8(out).unwrap();
        expect![[r#"
            Problems:
              ✗ swap is on
              ✗ the network is not ready: no CNI
              ✗ /etc/pods/a.yaml:7: spec.containers[0].image: must be set (for 5m); the last good version keeps running
              ✗ queue events was full and dropped 3 entries
            Node:              node1
            Agent:             coracle 0.1.0, up 3m20s
            Runtime:           unknown at : ready, its network is not
            Cgroups:
            Pods:              none
            Allocatable:
              memory:          1.0 GiB of 2.0 GiB, 1.0 GiB reserved
              cpu:             2 of 2
            Pressure:          DiskPressure
              nodefs.available: 3.0 GiB available, soft threshold 4.0 GiB, which is met
              nodefs.inodesFree: 90k available, threshold 50k, which is near
            Sources:
              file:            /etc/pods: 1 pod, 1 problem
            API server:        away; stored pods run
            Memory:            0 B resident, 0 B at most so far
            Disk writes:       none in the last hour; 12 files with 34.0 KiB, 9 syncs since the start
            Container logs:    1.0 GiB of 2.0 GiB, 3 files removed
            Queues:            events 2
            Threads:           0
        "#]]
        .assert_eq(&text);
    }
}
