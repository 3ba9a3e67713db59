//! The local commands: they send requests to the agent's socket and print for people or for scripts.
//!
//! Threads: only `main`. A wait for a response has a deadline, except while following.
//! Output: text of pods is printed with its control characters escaped, except by `logs`.
//! Go counterpart: kubectl's printers and describers, crictl.

mod age;
mod check;
mod client;
mod console;
mod debug;
mod describe;
mod events;
mod images;
mod logs;
mod pod_status;
mod pods;
mod status;
mod streams;
#[cfg(test)]
mod tests;
mod top;
mod validate;
mod version;

use std::path::PathBuf;

use crate::cli::table::{Paint, visible};
use crate::cli::{Ask, Exit, LocalCommand};

use client::Client;
use console::Console;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// No socket.
    #[error("no agent runs here: there is no socket {} (--local-socket names another one)", .0.display())]
    NoSocket(PathBuf),
    /// A socket without anybody behind it.
    #[error("no agent runs here: nobody answers at {}", .0.display())]
    NobodyAnswers(PathBuf),
    /// Only root may.
    #[error("no permission for {}: run this as root", .0.display())]
    NoPermission(PathBuf),
    /// Talking to the agent failed.
    #[error("cannot {what} the agent at {}: {source}", path.display())]
    Talk {
        /// The verb.
        what: &'static str,
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The agent answered something that is no HTTP or not the expected document.
    #[error("the agent's answer to {target} is not understood: {why}")]
    Answer {
        /// The request.
        target: String,
        /// Why.
        why: String,
    },
    /// A stream that goes on for ever ended.
    #[error("the agent at {} stopped", .0.display())]
    Ended(PathBuf),
    /// The agent said no.
    #[error("{text}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// What it said.
        text: String,
    },
    /// The result could not be printed.
    #[error("cannot write the output: {0}")]
    Output(#[from] std::io::Error),
}

impl CommandError {
    fn exit(&self) -> Exit {
        match self {
            CommandError::NoSocket(_)
            | CommandError::NobodyAnswers(_)
            | CommandError::NoPermission(_)
            | CommandError::Ended(_)
            | CommandError::Talk { .. } => Exit::NotReachable,
            CommandError::Refused { status: 404 | 409, .. } => Exit::NotFound,
            // Whoever read the output has seen enough.
            CommandError::Output(why) if why.kind() == std::io::ErrorKind::BrokenPipe => Exit::Success,
            _ => Exit::Failure,
        }
    }
}

type Outcome = Result<Exit, CommandError>;

/// Runs a local command, prints its result and says how it went.
#[must_use]
pub fn run(command: LocalCommand) -> Exit {
    let client = Client::new(&command.socket);
    let mut stdout = std::io::stdout().lock();
    let mut console = Console { out: &mut stdout, paint: Paint::for_stdout(), now: jiff::Timestamp::now() };
    match dispatch(command.ask, &client, &mut console) {
        Ok(exit) => exit,
        Err(error) => {
            let exit = error.exit();
            if exit != Exit::Success {
                complain(&error.to_string());
            }
            exit
        }
    }
}

fn dispatch(ask: Ask, client: &Client, console: &mut Console<'_>) -> Outcome {
    match ask {
        Ask::Pods { output, watch, namespace } => {
            pods::run(client, console, &pods::Options { output, watch, namespace })
        }
        Ask::Describe { pod, namespace } => {
            describe::run(client, console, &pod_argument(pod, namespace.as_deref()))
        }
        Ask::Logs { pod, namespace, container, follow, previous, tail, since, timestamps } => {
            let options = logs::Options {
                pod: pod_argument(pod, namespace.as_deref()),
                container,
                follow,
                previous,
                tail,
                since: since.map(|since| since.to_std()),
                timestamps,
            };
            logs::run(client, console, &options)
        }
        Ask::Debug { pod, namespace, image, target, name, stdin, tty, command } => {
            let pod = pod_argument(pod, namespace.as_deref());
            debug::run(client, console, &debug::Options { pod, image, target, name, stdin, tty, command })
        }
        Ask::Exec { pod, namespace, container, stdin, tty, command } => {
            let pod = pod_argument(pod, namespace.as_deref());
            let options = streams::Options { pod, container, stdin, tty, command };
            streams::session::run(client, &options)
        }
        Ask::PortForward { pod, namespace, addresses, ports } => {
            let pod = pod_argument(pod, namespace.as_deref());
            streams::forward::run(client, console, &pod, &addresses, &ports)
        }
        Ask::Status { output } => status::run(client, console, output),
        Ask::Events { pod, namespace, output, watch } => {
            events::run(client, console, &events::Options { pod, namespace, output, watch })
        }
        Ask::Top { once, namespace, output } => {
            top::run(client, console, &top::Options { once, namespace, output })
        }
        Ask::Images { output } => images::run(client, console, output),
        Ask::Check { output, root_dir } => check::run(client, console, output, root_dir),
        Ask::Validate { files, output } => validate::run(console, &files, output),
        Ask::Version => version::run(client, console),
    }
}

/// One line, or several, on stderr, in which nothing can paint the terminal.
fn complain(text: &str) {
    use std::io::Write;
    let lines: Vec<String> = text.lines().map(visible).collect();
    // Nobody is left to tell when stderr is gone.
    let _ = writeln!(std::io::stderr().lock(), "coracle: {}", lines.join("\n"));
}

/// `-n` goes before the name, unless the name has a namespace of its own.
fn pod_argument(pod: String, namespace: Option<&str>) -> String {
    match namespace {
        Some(namespace) if !pod.contains('/') => format!("{namespace}/{pod}"),
        _ => pod,
    }
}
