//! The agent beside the bare CRI calls, and beside another kubelet-compatible binary, in one
//! run on one private containerd. Run through `tests/bench/run`, which makes the namespaces,
//! images and binaries.

#[path = "../support/mod.rs"]
mod support;

mod agent;
mod bare;
mod book;
mod node_api;
mod process;
mod registered;
mod rounds;
mod runtime;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use book::Book;
use rounds::Plan;
use runtime::Runtime;
use support::containerd::Containerd;
use support::control_plane::{Choice, ControlPlane};

/// What the command line asks for.
#[derive(Debug, Default)]
struct Wishes {
    against: Option<PathBuf>,
    raw: Option<PathBuf>,
    quick: bool,
    full: bool,
    registered: bool,
    api: bool,
}

fn wishes(args: impl Iterator<Item = String>) -> Result<Wishes, String> {
    let mut wishes = Wishes::default();
    let mut args = args;
    while let Some(arg) = args.next() {
        let mut path = || args.next().map(PathBuf::from).ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--against" => wishes.against = Some(path()?),
            "--raw" => wishes.raw = Some(path()?),
            "--quick" => wishes.quick = true,
            "--full" => wishes.full = true,
            "--registered" => wishes.registered = true,
            "--api" => wishes.api = true,
            // What cargo adds for every benchmark program.
            "--bench" => {}
            other => return Err(format!("unknown argument {other}")),
        }
    }
    Ok(wishes)
}

fn main() -> ExitCode {
    let wishes = match wishes(std::env::args().skip(1)) {
        Ok(wishes) => wishes,
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
    let plan = Plan::new(wishes.quick, wishes.full);
    let mut book = Book::new(wishes.raw.as_deref(), base);
    let runtime = Runtime::connect(Containerd::start(&base.join("bench")));
    book.environment(&runtime.describe(), Path::new(&binary), wishes.against.as_deref());

    let mut failed = false;
    let mut attempt = |what: &str, deed: &mut dyn FnMut(&mut Book)| {
        eprintln!("==> {what}");
        if catch_unwind(AssertUnwindSafe(|| deed(&mut book))).is_err() {
            eprintln!("==> {what}: broken off");
            failed = true;
        }
        runtime.clear();
    };
    eprintln!("==> load average {}", std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim());
    if wishes.registered || wishes.api {
        let plane =
            ControlPlane::start_with(&base.join("plane"), &Choice { scheduler: false, ..Choice::default() });
        let subjects = [(book::CORACLE, Some(Path::new(&binary))), (book::OTHER, wishes.against.as_deref())];
        for (subject, binary) in subjects {
            let Some(binary) = binary else { continue };
            if wishes.registered {
                attempt(&format!("{subject}, registered"), &mut |book| {
                    registered::measure(book, subject, binary, &runtime, &plane, base, &plan);
                });
            }
            if wishes.api {
                attempt(&format!("{subject}, its node API"), &mut |book| {
                    node_api::measure(book, subject, binary, &runtime, &plane, base, wishes.quick);
                });
            }
        }
        book.print();
        return if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    // Before and after the agents, so that a machine that changes its speed shows.
    attempt("bare CRI calls", &mut |book| bare::measure(book, &runtime, base, &plan));
    attempt("coracle", &mut |book| {
        rounds::measure(book, book::CORACLE, Path::new(&binary), &runtime, base, &plan);
    });
    if let Some(other) = &wishes.against {
        attempt("the other agent", &mut |book| {
            rounds::measure(book, book::OTHER, other, &runtime, base, &plan);
        });
    }
    attempt("bare CRI calls again", &mut |book| bare::measure(book, &runtime, base, &plan));
    book.print();
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
