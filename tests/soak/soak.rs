//! Pods that come, change, crash and go at random on a real containerd, for minutes: what the
//! agent holds stays flat, and nothing of them is left. Run through `tests/soak/run`.

#![allow(unreachable_pub, reason = "a program offers nothing to others")]

#[path = "../support/mod.rs"]
mod support;

mod pods;
mod samples;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use samples::Samples;
use serde_json::json;
use support::containerd::kill;
use support::fake_node::binary;
use support::node::{LONG, Node};
use support::random::{Random, random_seed};
use support::wait::{pause, wait_until};

/// Names for pods.
const PLACES: u64 = 12;
/// Between two measurements of the agent.
const LOOK: Duration = Duration::from_secs(10);
/// Rounds: after each one all pods are removed, so that what stays without them can be measured.
const ROUNDS: u32 = 10;
const SHORTEST_ROUND: Duration = Duration::from_secs(12);

struct Options {
    minutes: u64,
    seed: u64,
    raw: PathBuf,
}

fn options() -> Result<Options, String> {
    let mut options = Options { minutes: 20, seed: random_seed(), raw: PathBuf::from("soak.jsonl") };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
        match arg.as_str() {
            "--minutes" => options.minutes = number(value()?)?,
            "--seed" => options.seed = number(value()?)?,
            "--raw" => options.raw = value()?.into(),
            // What cargo adds for every benchmark program.
            "--bench" => {}
            other => return Err(format!("unknown argument {other}")),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) if std::env::var_os("E2E_DIR").is_some() => options,
        Ok(_) => {
            eprintln!("error: the soak test runs through tests/soak/run, as root");
            return ExitCode::from(2);
        }
        Err(problem) => {
            eprintln!("error: {problem}");
            return ExitCode::from(2);
        }
    };
    println!("soak: {} minutes, --seed {}, {}", options.minutes, options.seed, binary().display());
    let whole = Duration::from_secs(options.minutes * 60);
    match catch_unwind(AssertUnwindSafe(|| soak(&options, whole))) {
        Ok(grown) if grown.is_empty() => {
            println!("soak: passed; raw data in {}", options.raw.display());
            ExitCode::SUCCESS
        }
        Ok(grown) => {
            println!("soak: FAILED, --seed {}\n  {}", options.seed, grown.join("\n  "));
            ExitCode::FAILURE
        }
        Err(_) => {
            println!("soak: FAILED, --seed {}; raw data in {}", options.seed, options.raw.display());
            ExitCode::FAILURE
        }
    }
}

fn soak(options: &Options, whole: Duration) -> Vec<String> {
    let header = json!({"minutes": options.minutes, "seed": options.seed, "binary": binary(),
        "binary_bytes": fs::metadata(binary()).map_or(0, |file| file.len()),
        "load": fs::read_to_string("/proc/loadavg").unwrap_or_default().trim()});
    let mut samples = Samples::new(&options.raw, &header);
    let node = Node::start_with("soak", json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "5s"}}));
    let mut pod_set =
        PodSet { node: &node, random: Random::new(options.seed), there: Default::default(), version: 0 };
    let begun = Instant::now();
    let round = (whole / ROUNDS).max(SHORTEST_ROUND);
    let mut look = Instant::now() + LOOK;
    let mut actions = 0;
    while begun.elapsed() < whole {
        let end = Instant::now() + round;
        while Instant::now() < end {
            actions += u32::from(pod_set.act(&mut samples));
            if Instant::now() >= look {
                look = Instant::now() + LOOK;
                pod_set.assert_no_duplicates();
                samples.take(&node, false, pod_set.there.len());
            }
            pause(Duration::from_millis(100 + pod_set.random.below(500)));
        }
        pod_set.all_go(&mut samples);
        samples.take(&node, true, 0);
    }
    println!("{actions} deeds in {:.0} s", samples.seconds());
    let grown = samples.verdict();
    // No pod, container, sandbox, mount or directory is left, and the agent stops in time.
    node.finish_with_empty_runtime();
    grown
}

/// The pods that are wanted, and who decides about them.
struct PodSet<'a> {
    node: &'a Node,
    random: Random,
    /// Place, and the kind of the pod there.
    there: std::collections::BTreeMap<u64, u64>,
    version: u64,
}

fn name(place: u64) -> String {
    format!("s{place:02}")
}

impl PodSet<'_> {
    /// Does something to one of the pods; whether there was something to do.
    fn act(&mut self, samples: &mut Samples) -> bool {
        let place = self.random.below(PLACES);
        let name = name(place);
        let what = match (self.there.get(&place).copied(), self.random.below(10)) {
            (None, 0..=7) => {
                let kind = self.random.below(pods::KINDS);
                self.write(&name, kind);
                self.there.insert(place, kind);
                "create"
            }
            (Some(kind), 0..=1) => {
                self.write(&name, kind);
                "edit"
            }
            (Some(_), 2..=4) => {
                self.node.remove(&format!("{name}.json"));
                self.there.remove(&place);
                "delete"
            }
            (Some(_), 5..=8) if self.crash(&name, false) => "crash",
            (Some(_), 9) if self.crash(&name, true) => "crash the sandbox",
            _ => return false,
        };
        samples.operation(what, &name);
        true
    }

    fn write(&mut self, name: &str, kind: u64) {
        self.version += 1;
        self.node.apply(&format!("{name}.json"), &pods::manifest(name, kind, self.version));
    }

    /// Kills the first process of one container, or of the sandbox.
    fn crash(&mut self, name: &str, sandbox: bool) -> bool {
        let ids: Vec<String> = if sandbox {
            self.node.running_sandboxes(name)
        } else {
            self.node.running(name).into_values().flatten().collect()
        };
        let Some(id) = self.random.pick(&ids) else { return false };
        let task = self.node.containerd.tasks().into_iter().find(|task| task.id == *id && task.running);
        task.inspect(|task| kill(task.pid, "KILL")).is_some()
    }

    fn assert_no_duplicates(&self) {
        for (pod, containers) in self.node.running_of_all() {
            for (container, ids) in containers {
                assert!(ids.len() < 2, "duplicates of {container} in {pod}: {ids:?}");
            }
        }
    }

    /// Takes all pods away and waits until nothing of them is there.
    fn all_go(&mut self, samples: &mut Samples) {
        for place in std::mem::take(&mut self.there).into_keys() {
            self.node.remove(&format!("{}.json", name(place)));
        }
        samples.operation("delete all", "");
        let node = self.node;
        wait_until("no pods", LONG, || node.try_pods().is_some_and(|pods| pods.is_empty()));
        wait_until("no tasks", LONG, || node.containerd.tasks().iter().all(|task| !task.running));
        wait_until("no pod directories", LONG, || is_empty(&node.root().join("pods")));
        let (runtime, _) = coracle::cri::connect(coracle::cri::Settings {
            runtime_endpoint: node.containerd.endpoint(),
            image_endpoint: None,
            request_timeout: LONG,
        })
        .expect("a local endpoint");
        wait_until("no containers and sandboxes", LONG * 2, || {
            runtime.list_containers(Default::default()).is_ok_and(|list| list.is_empty())
                && runtime.list_pod_sandbox(Default::default()).is_ok_and(|list| list.is_empty())
        });
        wait_until("no logs", LONG, || is_empty(&Node::base("soak").join("logs")));
    }
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none())
}
