//! Room `cli`: the command line.
//!
//! Owns: the table of flags (`flags`), parsing ([`parse()`], which reads no files), the subcommands
//! (`local` parses them, `commands` runs them), help, and the exit codes ([`Exit`]).
//! Threads: `ui/<n>` per open connection of `coracle ui`; no other command has any. Inbox: none.
//! Invariants: every problem of a line is reported at once; no argument panics; a flag is described
//! in one place, from which help, parsing and `docs/compatibility.md` come.
//! Absent on purpose: reading files (room `config`), logic of the agent (room `agent`).
//! Go: cmd/kubelet/app/options, component-base/cli.

mod commands;
mod exit;
mod flags;
mod help;
mod join_options;
mod local;
mod options;
#[cfg(test)]
mod pages;
mod parse;
mod table;
mod welcome;

#[cfg(test)]
mod tests;

use std::io::Write as _;

pub use commands::run as run_local;
pub use exit::Exit;
pub use flags::effective as effective_flags;
pub use help::{command as command_help, help, kubelet_version, version};
pub use local::LocalCommand;
pub use parse::{Command, parse};
pub use welcome::{is_first_contact, welcome};

use crate::config::{AgentArgs, KubeletConfiguration, LoadRequest, LoadedConfig, Problem, load};
use crate::resources::{Roots, machine};
use crate::tracing;
use crate::util::error_chain::without_codes;

/// Prints one line per problem on stderr.
pub fn report(problems: &[Problem]) {
    let mut err = std::io::stderr().lock();
    for problem in problems {
        // If stderr is closed, there is no other output.
        let _ = writeln!(err, "coracle: {}", problem_text(problem));
    }
}

/// A problem for users, with errors of the system as libc names them.
fn problem_text(problem: &Problem) -> String {
    table::visible_lines(&without_codes(&problem.to_string()))
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
    with_config(args, |loaded| {
        let unusable = unusable_collector(&loaded.config).or_else(|| unusable_time(args, &loaded.config));
        if let Some(problem) = unusable {
            report(&[problem]);
            return Exit::Configuration;
        }
        if let Some(message) = loaded.warning() {
            warn("", message);
        }
        missing_cluster(args, &loaded.config).into_iter().for_each(|(field, message)| warn(field, message));
        if !args.offline && !args.offline_stop_after.is_zero() {
            warn("--offline-stop-after", "has no effect without --offline".to_owned());
        }
        print("ok\n")
    })
}

fn warn(field: &str, message: String) {
    report(&[Problem { place: "warning".to_owned(), field: field.to_owned(), message }]);
}

/// A collector of traces to which no connection can be made, with which the agent does not start.
fn unusable_collector(config: &KubeletConfiguration) -> Option<Problem> {
    let settings = config.tracing.as_ref()?;
    let endpoint = settings.endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
    let error = tracing::Settings::new(endpoint, settings.sampling_rate_per_million, "").err()?;
    let field = "tracing.endpoint".to_owned();
    Some(Problem { place: String::new(), field, message: error.to_string() })
}

/// An `--offline-stop-after` with which the agent does not start.
fn unusable_time(args: &AgentArgs, config: &KubeletConfiguration) -> Option<Problem> {
    let shortest = u64::try_from(config.node_lease_duration_seconds).unwrap_or_default();
    let after = args.offline_stop_after;
    if !args.offline || after.is_zero() || after.as_secs() >= shortest {
        return None;
    }
    let field = "--offline-stop-after".to_owned();
    let message = format!("must not be shorter than nodeLeaseDurationSeconds ({shortest} s)");
    Some(Problem { place: String::new(), field, message })
}

/// Settings that keep the agent from starting on a node without an API server. They are warnings
/// because the file may be checked without the flags of the agent.
fn missing_cluster(args: &AgentArgs, config: &KubeletConfiguration) -> Vec<(&'static str, String)> {
    let mut missing = Vec::new();
    match (&args.kubeconfig, &args.bootstrap_kubeconfig) {
        (None, _) if config.enable_server => {
            let without = "does not work without --kubeconfig, and the agent does not start";
            if config.authorization.mode == "Webhook" {
                missing.push(("authorization.mode", format!("Webhook {without}: set AlwaysAllow")));
            }
            if config.authentication.webhook.enabled {
                missing.push(("authentication.webhook.enabled", format!("{without}: set it to false")));
            }
        }
        (Some(own), first) if !own.exists() && !first.as_ref().is_some_and(|first| first.exists()) => {
            missing.push((
                "--kubeconfig",
                format!("{} does not exist, and no file to make it with", own.display()),
            ));
        }
        _ => {}
    }
    missing
}

/// `--print-config`.
#[must_use]
pub fn print_config(args: &AgentArgs) -> Exit {
    with_config(args, |loaded| print(&loaded.to_yaml()))
}

/// Loads the configuration; reports its problems.
pub fn with_config(args: &AgentArgs, run: impl FnOnce(&LoadedConfig) -> Exit) -> Exit {
    let memory_bytes = machine::memory_bytes(&Roots::default());
    match load(&LoadRequest { memory_bytes, ..args.request.clone() }) {
        Ok(loaded) => run(&loaded),
        Err(problems) => {
            report(&problems);
            Exit::Configuration
        }
    }
}
