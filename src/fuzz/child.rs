//! The child process: runs the cases of one target, one after the other.

use std::fs::File;
use std::io::Write as _;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::inputs::{Random, mutated};
use super::{random_time, setting, targets};
use crate::util::fuzzing::Target;
use crate::util::threads::{OnDeath, spawn};

/// The variable with the target's name. Only the environment of a child has it.
pub(super) const TARGET: &str = "CORACLE_FUZZ_CHILD";
/// The variable with the path of the report, to which the child writes each case before it runs.
pub(super) const REPORT: &str = "CORACLE_FUZZ_REPORT";

/// The limit of a child's address space, in bytes. Unbounded growth ends only the child.
const ADDRESS_SPACE: u64 = 3 << 30;

#[test]
fn runs_one_target() {
    let (Ok(name), Ok(report)) = (std::env::var(TARGET), std::env::var(REPORT)) else {
        // This is a normal test run, and not a child.
        return;
    };
    let all = targets().into_iter().chain(super::tests::failing_targets());
    let target =
        all.into_iter().find(|target| target.name == name).expect("the parent took it from the table");
    limit(Resource::As, ADDRESS_SPACE);
    limit(Resource::Core, 0);
    let mut report = File::create(report).unwrap();
    let (sender, done) = crossbeam_channel::bounded(1);
    let stack = target.stack;
    let thread = spawn("fuzz", stack, OnDeath::Unsupervised, move |_| {
        let _ = sender.send(run_all(&target, &mut report));
    })
    .unwrap();
    // If the thread panics, it drops the sender, and `recv` returns an error.
    let outcome = done.recv();
    drop(thread);
    assert!(matches!(outcome, Ok(true)), "the target failed");
}

/// Runs the worst, seed and random inputs. Returns false when an input exceeds its budget.
fn run_all(target: &Target, report: &mut File) -> bool {
    let only = std::env::var("FUZZ_CASE").ok();
    let wanted = |label: &str| only.as_deref().is_none_or(|only| only == label);
    let mut cases = 0_u64;
    for (name, input) in (target.worst)(target.max_bytes) {
        let label = format!("worst:{name}");
        if !wanted(&label) {
            continue;
        }
        assert!(input.len() <= target.max_bytes, "{label} has {} bytes", input.len());
        cases += 1;
        if !run_one(target, &label, &input, report) {
            return false;
        }
    }
    for seed in target.seeds {
        cases += 1;
        if !run_one(target, "seed", seed, report) {
            return false;
        }
    }
    let seed = setting("FUZZ_SEED", 1);
    let until = Instant::now() + random_time();
    let mut number = 0;
    while !target.seeds.is_empty() && Instant::now() < until {
        number += 1;
        let label = format!("random:{number}");
        if !wanted(&label) && number < 10_000_000 {
            continue;
        }
        let mut random = Random::new(seed.wrapping_mul(0x1_0000_0000).wrapping_add(number));
        let input = mutated(target.seeds, target.max_bytes, &mut random);
        cases += 1;
        if !run_one(target, &label, &input, report) {
            return false;
        }
    }
    eprintln!("{}: {cases} cases, {:?} of processor time", target.name, processor_time());
    let _ = writeln!(report, "passed {cases}");
    true
}

fn run_one(target: &Target, label: &str, input: &[u8], report: &mut File) -> bool {
    // The parent reads only the last line, so the file is overwritten and does not grow.
    let line = format!("case {label} of {} bytes", input.len());
    let _ = rustix::fs::ftruncate(&*report, 0);
    let _ = rustix::fs::seek(&*report, rustix::fs::SeekFrom::Start(0));
    let _ = write!(report, "{line}");
    let (time, memory) = (target.budget.time(input.len()), target.budget.memory_kib(input.len()));
    let begun = processor_time();
    // The limit makes the kernel end a case that does not return.
    limit(Resource::Cpu, (begun + time).as_secs() + 2);
    // The peak of small inputs is not checked: to reset it takes more system calls for each input.
    let measured = input.len() > 4096 || label.starts_with("worst");
    if measured {
        let _ = std::fs::write("/proc/self/clear_refs", "5");
    }
    let (before, files) = (resident_kib("VmRSS:"), resident_kib("RssFile:"));
    (target.run)(input);
    // Pages of this program's file that the target is the first to use are no memory that it needs.
    let files = resident_kib("RssFile:").saturating_sub(files);
    let grown = resident_kib("VmHWM:").saturating_sub(before + files);
    let spent = processor_time() - begun;
    let mut problem = String::new();
    if spent > time {
        problem = format!(" took {spent:?} of processor time, its budget is {time:?}");
    } else if grown > memory && measured {
        problem = format!(" took {grown} KiB of memory, its budget is {memory} KiB");
    }
    let _ = writeln!(report, "{problem}");
    problem.is_empty()
}

fn limit(resource: Resource, most: u64) {
    let hard = getrlimit(resource).maximum;
    let current = hard.map_or(most, |hard| most.min(hard));
    let _ = setrlimit(resource, Rlimit { current: Some(current), maximum: hard });
}

/// The processor time of this process so far. Its resolution is 10 ms.
pub(super) fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after = text.rsplit(") ").next().unwrap_or_default();
    let ticks: u64 = after.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

fn resident_kib(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
