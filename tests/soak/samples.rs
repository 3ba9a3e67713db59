//! What the agent holds over time, and whether it grows.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

use crate::support::node::Node;
use crate::support::process_usage::{ProcessUsage, cpu_time, mounts_below, proportional_kib};

/// What the second half may hold more than the first: a share of it, and so much on top.
/// Memory: the allocator's pools fill up slowly. The others: what comes and goes by itself.
const MEMORY_SHARE: f64 = 0.05;
const MEMORY_KIB: f64 = 768.0;
const THREADS: f64 = 3.0;
const DESCRIPTORS: f64 = 4.0;

#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Whether there were no pods, and none had been there for a moment.
    quiet: bool,
    seconds: f64,
    pods: usize,
    resident_kib: f64,
    proportional_kib: f64,
    threads: f64,
    descriptors: f64,
    mounts: usize,
}

/// All samples, and the file that takes them.
pub struct Samples {
    begun: Instant,
    raw: File,
    all: Vec<Sample>,
}

impl Samples {
    pub fn new(raw: &Path, header: &Value) -> Samples {
        let mut file = File::create(raw).expect("the file for raw data can be made");
        writeln!(file, "{header}").expect("raw data is written");
        Samples { begun: Instant::now(), raw: file, all: Vec::new() }
    }

    /// Notes what was done to a pod.
    pub fn operation(&mut self, what: &str, pod: &str) {
        let line = json!({"t": self.seconds(), "operation": what, "pod": pod});
        writeln!(self.raw, "{line}").expect("raw data is written");
    }

    pub fn seconds(&self) -> f64 {
        (self.begun.elapsed().as_secs_f64() * 1000.0).round() / 1000.0
    }

    /// Measures the agent.
    pub fn take(&mut self, node: &Node, quiet: bool, pods: usize) {
        let pid = node.pid();
        let holding = ProcessUsage::read(pid).expect("the agent runs");
        let sample = Sample {
            quiet,
            seconds: self.seconds(),
            pods,
            resident_kib: holding.resident_kib as f64,
            proportional_kib: proportional_kib(pid).unwrap_or(0) as f64,
            threads: holding.threads as f64,
            descriptors: holding.descriptors as f64,
            mounts: mounts_below(&node.root()).len(),
        };
        let line = json!({
            "t": sample.seconds, "quiet": quiet, "pods": pods, "rss_kib": sample.resident_kib,
            "pss_kib": sample.proportional_kib, "threads": sample.threads,
            "descriptors": sample.descriptors, "mounts": sample.mounts,
            "cpu_s": cpu_time(pid).as_secs_f64(),
        });
        writeln!(self.raw, "{line}").expect("raw data is written");
        if quiet {
            println!(
                "{:>6.0} s  without pods: {:>6.0} KiB resident, {:>6.0} proportional, {:>3.0} threads, {:>3.0} \
                 descriptors, {} mounts",
                sample.seconds,
                sample.resident_kib,
                sample.proportional_kib,
                sample.threads,
                sample.descriptors,
                sample.mounts
            );
        }
        self.all.push(sample);
    }

    /// Compares the halves; what grew, in words.
    pub fn verdict(&self) -> Vec<String> {
        let end = self.seconds();
        let mut grown = Vec::new();
        for quiet in [true, false] {
            // The first of the quiet ones is the warm-up: everything was done once before it.
            let skip = usize::from(quiet);
            let kind: Vec<&Sample> =
                self.all.iter().filter(|sample| sample.quiet == quiet).skip(skip).collect();
            let (first, second): (Vec<&Sample>, Vec<&Sample>) =
                kind.into_iter().partition(|sample| sample.seconds < end / 2.0);
            let when = if quiet { "without pods" } else { "with pods" };
            println!("{when}: {} samples in the first half, {} in the second", first.len(), second.len());
            if first.is_empty() || second.is_empty() {
                grown.push(format!("too few samples {when}: a longer run is needed"));
                continue;
            }
            type Field = fn(&Sample) -> f64;
            let fields: [(&str, Field, f64, f64); 4] = [
                ("KiB resident", |sample| sample.resident_kib, MEMORY_SHARE, MEMORY_KIB),
                ("KiB proportional", |sample| sample.proportional_kib, MEMORY_SHARE, MEMORY_KIB),
                // Of the pods' own threads there are as many as pods, give or take.
                ("threads", |sample| sample.threads - sample.pods as f64, 0.0, THREADS),
                ("descriptors", |sample| sample.descriptors, 0.0, DESCRIPTORS),
            ];
            for (name, field, share, more) in fields {
                let (before, after) = (median(&first, field), median(&second, field));
                let most = before * (1.0 + share) + more;
                let verdict = if after <= most { "ok" } else { "GROWS" };
                println!("  {name:<17} {before:>9.0} -> {after:>9.0}  (at most {most:.0})  {verdict}");
                if after > most {
                    grown.push(format!("{name} {when}: {before:.0} -> {after:.0}, at most {most:.0}"));
                }
            }
        }
        for sample in self.all.iter().filter(|sample| sample.quiet && sample.mounts > 0) {
            grown.push(format!("{} mounts without pods after {:.0} s", sample.mounts, sample.seconds));
        }
        grown
    }
}

fn median(samples: &[&Sample], field: fn(&Sample) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(|sample| field(sample)).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
