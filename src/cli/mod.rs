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
pub use flags::{config_markdown, flags_markdown};
pub use local::{Ask, LocalCommand, Output};
pub use parse::{AgentArgs, Command, DEFAULT_ROOT_DIR, parse};

use crate::config::{Problem, load};

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
            if let Some(warning) = warning(args, &loaded) {
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

/// The one warning about fields and flags that are set without effect.
#[must_use]
pub fn warning(args: &AgentArgs, loaded: &crate::config::Loaded) -> Option<String> {
    let flags: Vec<String> = args.without_effect.iter().map(|name| format!("--{name}")).collect();
    let mut names: Vec<&str> = loaded.without_effect.clone();
    names.extend(flags.iter().map(String::as_str));
    crate::config::effects::warning(&names)
}
