//! Room `cli`: the command line.
//!
//! Owns: the table of flags ([`flags`]), parsing ([`parse()`], which only judges text), the options of
//! the local commands ([`local`]), help, and the exit codes ([`exit`]).
//! Threads: none. Inbox: none.
//! Invariants: every problem of a line is reported at once; no argument panics; a flag is described
//! in one place, from which help, parsing and `docs/compatibility.md` come.
//! Absent on purpose: reading files (room `config`), logic of the agent (room `agent`).
//! Go: cmd/kubelet/app/options, component-base/cli.

pub mod commands;
pub mod exit;
pub mod flags;
pub mod help;
pub mod local;
mod parse;
pub mod table;

#[cfg(test)]
mod tests;

use std::io::Write as _;

pub use exit::Exit;
pub use flags::effective as effective_flags;
pub use local::{Ask, LocalCommand, Output};
pub use parse::{Command, parse};

use crate::config::{AgentArgs, Problem, load};

/// Says what is wrong, a line each, on stderr.
pub fn report(problems: &[Problem]) {
    let mut err = std::io::stderr().lock();
    for problem in problems {
        // Nobody is left to tell when stderr is gone.
        let _ = writeln!(err, "coracle: {problem}");
    }
}

/// Prints to stdout. A closed pipe is a failure, not a panic.
#[must_use]
pub fn print(text: &str) -> Exit {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Exit::Success,
        Err(_) => Exit::Failure,
    }
}

/// `--check-config`.
#[must_use]
pub fn check_config(args: &AgentArgs) -> Exit {
    match load(&args.request) {
        Ok(loaded) => {
            if let Some(warning) = args.warning(&loaded) {
                report(&[Problem { place: "warning".to_owned(), field: String::new(), message: warning }]);
            }
            print("ok\n")
        }
        Err(problems) => {
            report(&problems);
            Exit::Configuration
        }
    }
}

/// `--print-config`.
#[must_use]
pub fn print_config(args: &AgentArgs) -> Exit {
    match load(&args.request) {
        Ok(loaded) => print(&loaded.to_yaml()),
        Err(problems) => {
            report(&problems);
            Exit::Configuration
        }
    }
}
