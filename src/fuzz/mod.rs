//! Runs the fuzz tests of parsers and expanders of all rooms, with budgets of time and memory.
//!
//! Each room lists its [`Target`]s in its file `fuzz.rs`. A target gets its worst known inputs, at
//! the largest size that its caller accepts, then its seeds, then random inputs. It fails when it
//! panics, overflows the stack of the thread that runs it in production, or needs more processor
//! time or memory than its [`Budget`]. Other processes on the machine do not affect this time.
//!
//! A target runs in a child process, which is the same test program. A stack overflow or an
//! unbounded allocation ends only the child; the parent reports the case that caused it.
//!
//! | Variable | Meaning |
//! |---|---|
//! | `FUZZ_SECONDS` | seconds of random inputs for each target; default 1 |
//! | `FUZZ_SEED` | the seed of the random inputs; default 1 |
//! | `FUZZ_TARGET` | run only targets whose name contains this |
//! | `FUZZ_CASE` | run only this case, such as `random:17` from a failure, and the seeds |

mod child;
mod inputs;

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::util::fuzzing::{Budget, Target};

fn targets() -> Vec<Target> {
    let mut all = Vec::new();
    all.extend(crate::model::fuzz::targets());
    all.extend(crate::config::fuzz::targets());
    all.extend(crate::transport::fuzz::targets());
    all.extend(crate::cri::fuzz::targets());
    all.extend(crate::kube::fuzz::targets());
    all.extend(crate::sources::fuzz::targets());
    all.extend(crate::runtime::fuzz::targets());
    all.extend(crate::volumes::fuzz::targets());
    all.extend(crate::resources::fuzz::targets());
    all.extend(crate::pods::fuzz::targets());
    all.extend(crate::eviction::fuzz::targets());
    all.extend(crate::node::fuzz::targets());
    all.extend(crate::images::fuzz::targets());
    all.extend(crate::offline::fuzz::targets());
    all
}

/// How long each target gets random inputs.
fn random_time() -> Duration {
    Duration::from_secs(setting("FUZZ_SECONDS", 1))
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The number of concurrent children: the CI machines have two processors.
const CHILDREN: usize = 2;

/// A child that takes this much longer than its random inputs is considered hung.
const CHILD_LIMIT: Duration = Duration::from_secs(600);

#[test]
fn every_target_keeps_its_budget() {
    let wanted = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let mut names: Vec<&str> = targets().iter().map(|target| target.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "two targets have the same name");
    names.retain(|name| name.contains(&wanted));
    assert!(!names.is_empty(), "no target has a name that contains {wanted:?}");

    let dir = tempfile::tempdir().unwrap();
    let mut waiting = names.iter().rev().copied().collect::<Vec<_>>();
    let mut running: Vec<Running> = Vec::new();
    let (mut cases, mut failures) = (0, String::new());
    while !waiting.is_empty() || !running.is_empty() {
        while running.len() < CHILDREN
            && let Some(name) = waiting.pop()
        {
            running.push(Running::start(name, dir.path()));
        }
        let mut index = 0;
        while let Some(process) = running.get_mut(index) {
            match process.outcome() {
                None => index += 1,
                Some(Ok(count)) => {
                    cases += count;
                    running.swap_remove(index);
                }
                Some(Err(problem)) => {
                    let _ = writeln!(failures, "{problem}");
                    running.swap_remove(index);
                }
            }
        }
        let _ = crate::util::stop::StopToken::never().wait(Duration::from_millis(20));
    }
    eprintln!("fuzz: {} targets, {cases} cases passed", names.len());
    assert!(failures.is_empty(), "\n{failures}");
}

/// A child process with one target.
struct Running {
    name: &'static str,
    child: Child,
    report: std::path::PathBuf,
    since: Instant,
}

impl Running {
    fn start(name: &'static str, dir: &Path) -> Running {
        let report = dir.join(name.replace('/', "-"));
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "fuzz::child::runs_one_target", "--nocapture", "--test-threads=1"])
            .env(child::TARGET, name)
            .env(child::REPORT, &report)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(report.with_extension("stderr")).unwrap())
            .spawn()
            .unwrap();
        Running { name, child, report, since: Instant::now() }
    }

    /// How the child ended: the number of its cases, or the failure. `None` while it runs.
    fn outcome(&mut self) -> Option<Result<u64, String>> {
        let status = match self.child.try_wait().unwrap() {
            Some(status) => status,
            None if self.since.elapsed() > CHILD_LIMIT + random_time() => {
                let _ = self.child.kill();
                self.child.wait().unwrap()
            }
            None => return None,
        };
        Some(self.judge(status))
    }

    fn judge(&self, status: ExitStatus) -> Result<u64, String> {
        let report = std::fs::read_to_string(&self.report).unwrap_or_default();
        let last = report.lines().last().unwrap_or("no case was started");
        if status.success()
            && let Some(count) = last.strip_prefix("passed ")
        {
            eprint!("{}", std::fs::read_to_string(self.report.with_extension("stderr")).unwrap_or_default());
            return count.parse().map_err(|_| format!("{}: {last}", self.name));
        }
        let stderr = std::fs::read(self.report.with_extension("stderr")).unwrap_or_default();
        let stderr = String::from_utf8_lossy(&stderr);
        let start = stderr.len().saturating_sub(2000);
        let tail = stderr.get(stderr.ceil_char_boundary(start)..).unwrap_or_default();
        Err(format!("{}: {last}: {status}\n{tail}", self.name))
    }
}

/// Tests of this framework: it reports each kind of failure.
mod tests {
    use super::*;
    use crate::util::threads::Stack;

    /// The target with time for anything: on a busy machine memory alone takes more than a moment.
    fn unhurried(target: Target) -> Target {
        Target { budget: Budget { base: Duration::from_secs(60), ..target.budget }, ..target }
    }

    /// Targets that fail, each in another way, and one that passes. `targets` does not list them.
    pub(super) fn failing_targets() -> Vec<Target> {
        fn target(name: &'static str, run: fn(&[u8])) -> Target {
            let budget = Budget {
                base: Duration::from_millis(300),
                per_mib: Duration::ZERO,
                base_kib: 32 * 1024,
                per_byte: 0,
            };
            let worst = |_| vec![("the only one", b"x".to_vec())];
            Target { name, stack: Stack::Small, max_bytes: 100, budget, worst, seeds: &[], run }
        }
        vec![
            target("bad/panic", |_| panic!("as expected")),
            target("bad/stack", |_| {
                fn deeper(level: u64) -> u64 {
                    let frame = std::hint::black_box([level; 64]);
                    if level == u64::MAX { 0 } else { deeper(level + 1) + frame[0] }
                }
                std::hint::black_box(deeper(0));
            }),
            target("bad/time", |_| {
                let begun = child::processor_time();
                while child::processor_time() - begun < Duration::from_secs(1) {}
            }),
            target("bad/endless", |_| {
                loop {
                    std::hint::black_box(0);
                }
            }),
            unhurried(target("bad/memory", |_| {
                std::hint::black_box(vec![1_u8; 40 << 20]);
            })),
            target("bad/endless_memory", |_| {
                let mut all = Vec::new();
                loop {
                    // The memory is not written, so that it takes no processor time.
                    all.push(std::hint::black_box(Vec::<u8>::with_capacity(64 << 20)));
                }
            }),
            two_peaks(),
        ]
    }

    /// A target that passes: each of its two inputs keeps its own memory budget.
    fn two_peaks() -> Target {
        let budget = Budget {
            base: Duration::from_secs(5),
            per_mib: Duration::ZERO,
            base_kib: 32 * 1024,
            per_byte: 64 * 1024,
        };
        let run = |input: &[u8]| {
            std::hint::black_box(vec![1_u8; input.len() << 14]);
        };
        let worst = |most| vec![("large", vec![b'x'; most]), ("small", b"x".to_vec())];
        Target { name: "two_peaks", stack: Stack::Small, max_bytes: 8 << 10, budget, worst, seeds: &[], run }
    }

    /// The outcome of one target in a separate child.
    fn outcome_of(name: &'static str) -> Result<u64, String> {
        let dir = tempfile::tempdir().unwrap();
        let mut running = Running::start(name, dir.path());
        loop {
            if let Some(outcome) = running.outcome() {
                return outcome;
            }
            let _ = crate::util::stop::StopToken::never().wait(Duration::from_millis(5));
        }
    }

    #[test]
    fn memory_of_an_input_is_not_counted_for_the_next_input() {
        assert_eq!(outcome_of("two_peaks"), Ok(2));
    }

    #[test]
    fn every_kind_of_failure_is_reported_with_its_case() {
        for (name, expected) in [
            ("bad/panic", "as expected"),
            ("bad/stack", "SIGABRT"),
            ("bad/time", "of processor time"),
            ("bad/endless", "SIGXCPU"),
            ("bad/memory", "KiB of memory"),
            ("bad/endless_memory", "SIGABRT"),
        ] {
            let failure = outcome_of(name).expect_err(name);
            assert!(failure.contains("case worst:the only one"), "{name}: {failure}");
            assert!(failure.contains(expected), "{name}: {failure}");
        }
    }
}
