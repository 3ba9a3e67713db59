//! The agent beside the bare CRI calls, and beside another kubelet-compatible binary, in one
//! run on one private containerd. Run through `tests/bench/run`, which makes the namespaces,
//! images and binaries.

#![allow(unreachable_pub, reason = "a program offers nothing to others")]

#[path = "../support/mod.rs"]
mod support;

mod agent;
mod bare_calls;
mod fake_agent;
mod flash;
mod fleet;
mod node_api;
mod process;
mod registered;
mod requests;
mod results;
mod rounds;
mod runtime;
mod storm;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use fake_agent::Program;
use results::Results;
use rounds::Plan;
use runtime::Runtime;
use support::containerd::Containerd;
use support::control_plane::{ControlPlane, ControlPlaneOptions};

/// What the command line asks for.
#[derive(Debug, Default)]
struct Options {
    against: Option<PathBuf>,
    raw: Option<PathBuf>,
    quick: bool,
    full: bool,
    registered: bool,
    /// More flags for this project's agent, with `registered`.
    agent_flags: Vec<String>,
    api: bool,
    /// For each part.
    flash: Option<std::time::Duration>,
    /// So many agents.
    storm: Option<usize>,
    /// So many nodes.
    fleet: Option<usize>,
}

fn options(args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options::default();
    let mut args = args;
    while let Some(arg) = args.next() {
        let mut path = || args.next().map(PathBuf::from).ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--against" => options.against = Some(path()?),
            "--raw" => options.raw = Some(path()?),
            "--quick" => options.quick = true,
            "--full" => options.full = true,
            "--registered" => options.registered = true,
            "--agent-flag" => options.agent_flags.push(args.next().ok_or("--agent-flag needs a flag")?),
            "--api" => options.api = true,
            "--flash" => {
                let seconds = args.next().and_then(|text| text.parse().ok());
                let seconds = seconds.ok_or("--flash needs a number of seconds")?;
                options.flash = Some(std::time::Duration::from_secs(seconds));
            }
            "--storm" => {
                let agents = args.next().and_then(|text| text.parse().ok());
                options.storm = Some(agents.ok_or("--storm needs a number of agents")?);
            }
            "--fleet" => {
                let nodes = args.next().and_then(|text| text.parse().ok());
                options.fleet = Some(nodes.ok_or("--fleet needs a number of nodes")?);
            }
            // What cargo adds for every benchmark program.
            "--bench" => {}
            other => return Err(format!("unknown argument {other}")),
        }
    }
    if !options.agent_flags.is_empty() && !options.registered {
        return Err("--agent-flag has an effect with --registered only".to_owned());
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match options(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(problem) => {
            eprintln!("error: {problem}");
            return ExitCode::from(2);
        }
    };
    let (Ok(base), Ok(binary)) = (std::env::var("E2E_DIR"), std::env::var("CORACLE_BINARY")) else {
        eprintln!("error: the benchmark runs through tests/bench/run, as root");
        return ExitCode::from(2);
    };
    let base = Path::new(&base);
    if let Some(agents) = options.storm {
        storm::measure(agents, Path::new(&binary), base);
        return ExitCode::SUCCESS;
    }
    if let Some(nodes) = options.fleet {
        let coracle = Path::new(&binary);
        let (subject, program) = match &options.against {
            Some(other) => (results::OTHER, Program { binary: other, is_go_kubelet: true }),
            None => (results::CORACLE, Program { binary: coracle, is_go_kubelet: false }),
        };
        let mut results = Results::new(options.raw.as_deref(), base);
        results.environment("fake", coracle, options.against.as_deref());
        let measured = catch_unwind(AssertUnwindSafe(|| {
            fleet::measure(&mut results, subject, program, nodes, base);
        }));
        // Also what was measured before a failure.
        results.print();
        return if measured.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let plan = Plan { agent_flags: options.agent_flags, ..Plan::new(options.quick, options.full) };
    let mut results = Results::new(options.raw.as_deref(), base);
    let disk = options.flash.map(|_| flash::MeasuredDisk::make(base));
    let dir = disk.as_ref().map_or_else(|| base.join("bench"), |disk| disk.runtime_dir(base));
    let runtime = Runtime::connect(Containerd::start(&dir));
    results.environment(&runtime.describe(), Path::new(&binary), options.against.as_deref());

    let mut failed = false;
    let mut attempt = |what: &str, operation: &mut dyn FnMut(&mut Results)| {
        eprintln!("==> {what}");
        if catch_unwind(AssertUnwindSafe(|| operation(&mut results))).is_err() {
            eprintln!("==> {what}: broken off");
            failed = true;
        }
        runtime.clear();
    };
    eprintln!("==> load average {}", std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim());
    if let (Some(disk), Some(span)) = (&disk, options.flash) {
        attempt("the runtime alone", &mut |results| flash::runtime_alone(results, disk, &dir, base, span));
        let subjects =
            [(results::CORACLE, Some(Path::new(&binary))), (results::OTHER, options.against.as_deref())];
        for (subject, binary) in subjects {
            let Some(binary) = binary else { continue };
            attempt(subject, &mut |results| {
                flash::measure(results, subject, binary, &runtime, (disk, &dir, base), span);
            });
        }
        results.print();
        return if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    if options.registered || options.api {
        let plane = ControlPlane::start_with(
            &base.join("plane"),
            &ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() },
        );
        let subjects =
            [(results::CORACLE, Some(Path::new(&binary))), (results::OTHER, options.against.as_deref())];
        for (subject, binary) in subjects {
            let Some(binary) = binary else { continue };
            if options.registered {
                attempt(&format!("{subject}, registered"), &mut |results| {
                    registered::measure(results, subject, binary, &runtime, &plane, base, &plan);
                });
            }
            if options.api {
                attempt(&format!("{subject}, its node API"), &mut |results| {
                    node_api::measure(results, subject, binary, &runtime, &plane, base, options.quick);
                });
            }
        }
        results.print();
        return if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    // Before and after the agents, so that a machine that changes its speed shows.
    attempt("bare CRI calls", &mut |results| bare_calls::measure(results, &runtime, base, &plan));
    attempt("coracle", &mut |results| {
        rounds::measure(results, results::CORACLE, Path::new(&binary), &runtime, base, &plan);
    });
    if let Some(other) = &options.against {
        attempt("the other agent", &mut |results| {
            rounds::measure(results, results::OTHER, other, &runtime, base, &plan);
        });
    }
    attempt("bare CRI calls again", &mut |results| bare_calls::measure(results, &runtime, base, &plan));
    results.print();
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
