//! What the kernel says of a process: memory, processor time and wake-ups by thread.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::wait::pause;

/// The unit of `/proc/PID/stat`: the kernel's USER_HZ, 100 on every x86-64 and Arm machine.
const TICKS_PER_SECOND: f64 = 100.0;

/// Ends a process that the benchmark, or its runtime, has started.
pub fn kill(pid: u32) {
    signal(pid, Signal::KILL);
}

/// Sends a signal to such a process.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// `name:  123 kB` of a file of `/proc`.
fn kib(text: &str, name: &str) -> f64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.trim_matches([':', '\t', ' ']).split_whitespace().next())
        .and_then(|value| value.parse().ok())
        .unwrap_or(f64::NAN)
}

/// Memory in MiB.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    pub resident: f64,
    pub proportional: f64,
    pub peak: f64,
    pub anonymous: f64,
    pub threads: f64,
}

/// The memory of a process now.
pub fn memory(pid: u32) -> Memory {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    Memory {
        resident: kib(&status, "VmRSS") / 1024.0,
        proportional: kib(&rollup, "Pss") / 1024.0,
        peak: kib(&status, "VmHWM") / 1024.0,
        anonymous: kib(&status, "RssAnon") / 1024.0,
        threads: kib(&status, "Threads"),
    }
}

/// Processor seconds of a process since its start, ended threads included.
pub fn cpu_seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may hold blanks and brackets; after its last bracket comes field 3.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = |field: usize| {
        rest.split_whitespace().nth(field - 3).and_then(|text| text.parse::<f64>().ok()).unwrap_or(f64::NAN)
    };
    (ticks(14) + ticks(15)) / TICKS_PER_SECOND
}

#[derive(Debug, Clone, Default)]
struct Thread {
    name: String,
    cpu_nanos: f64,
    voluntary: f64,
}

fn threads(pid: u32) -> BTreeMap<String, Thread> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let path = entry.path();
        let read = |file: &str| fs::read_to_string(path.join(file)).unwrap_or_default();
        let (status, schedstat) = (read("status"), read("schedstat"));
        let thread = Thread {
            name: read("comm").trim().to_owned(),
            cpu_nanos: schedstat.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0),
            voluntary: kib(&status, "voluntary_ctxt_switches"),
        };
        // One that ends while we look has no status any more.
        if thread.voluntary.is_finite() {
            found.insert(entry.file_name().to_string_lossy().into_owned(), thread);
        }
    }
    found
}

/// What a process did while nothing was asked of it.
#[derive(Debug)]
pub struct Idle {
    pub cpu_percent: f64,
    pub wakeups_per_second: f64,
    /// Per thread name: wake-ups per second and processor microseconds per second.
    pub by_thread: Value,
}

/// Watches a process for `span`.
pub fn idle(pid: u32, span: Duration) -> Idle {
    let (begun, before) = (Instant::now(), threads(pid));
    pause(span);
    let (after, seconds) = (threads(pid), begun.elapsed().as_secs_f64());
    let mut by_name: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    let (mut cpu, mut wakeups) = (0.0, 0.0);
    for (id, now) in &after {
        let then = before.get(id).cloned().unwrap_or_default();
        let nanos = now.cpu_nanos - then.cpu_nanos;
        let woken = now.voluntary - then.voluntary;
        cpu += nanos;
        wakeups += woken;
        let sum = by_name.entry(now.name.clone()).or_default();
        sum.0 += woken;
        sum.1 += nanos;
    }
    let mut list: Vec<_> = by_name.into_iter().filter(|(_, (woken, _))| *woken > 0.0).collect();
    list.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    let by_thread: Vec<Value> = list
        .into_iter()
        .take(16)
        .map(|(name, (woken, nanos))| {
            json!([name, (woken / seconds * 100.0).round() / 100.0, (nanos / 1e3 / seconds).round()])
        })
        .collect();
    Idle {
        cpu_percent: cpu / 1e7 / seconds,
        wakeups_per_second: wakeups / seconds,
        by_thread: Value::from(by_thread),
    }
}

/// Resident KiB of a process by kind of mapping: `name permissions`.
pub fn mappings(pid: u32) -> Value {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let mut by_kind: BTreeMap<String, f64> = BTreeMap::new();
    let mut kind = String::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let [range, permissions, _, _, _, name @ ..] = fields.as_slice()
            && range.contains('-')
            && permissions.len() == 4
        {
            let name = name.first().map_or("anonymous", |path| path.rsplit('/').next().unwrap_or(path));
            kind = format!("{name} {permissions}");
        } else if line.starts_with("Rss:") {
            *by_kind.entry(kind.clone()).or_default() += kib(line, "Rss");
        }
    }
    by_kind.retain(|_, kib| *kib > 0.0);
    json!(by_kind)
}
