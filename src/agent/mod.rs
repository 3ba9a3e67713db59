//! Plugs everything together (Go: cmd/kubelet/app, NewMainKubelet, Run).
//!
//! Owns: the order of start and stop. Thread: `main`, which waits for signals and deaths.
//! `wiring` makes every long-lived channel and handle and turns the configuration into the
//! rooms' settings; `report` and `metrics` put snapshots together for the server; no
//! decisions here.

mod cluster;
mod endpoints;
mod main_port;
mod metrics;
mod node;
mod report;
mod shutdown;
mod stats;
mod streams;
mod supervise;
mod wiring;

use std::path::Path;

use crate::config::{AgentArgs, Loaded};
use crate::server::ServerError;
use crate::util::{logging, threads};
use supervise::{Ending, Supervisor};

/// Why the agent could not start. Each is shown once, to the operator.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration and this machine do not fit.
    #[error("{0}")]
    Refused(String),
    /// A directory of the agent's own could not be made.
    #[error("cannot make the directory {}", path.display())]
    Directory {
        /// Which.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The facts of the machine could not be read.
    #[error("cannot read the facts of this machine")]
    Machine(#[from] crate::resources::ResourceError),
    /// The runtime's endpoint is not usable.
    #[error("cannot use the container runtime endpoint")]
    Runtime(#[from] crate::cri::CriError),
    /// A thread could not be started.
    #[error("cannot start the thread {name}")]
    Thread {
        /// Its name.
        name: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// A server could not be started.
    #[error("cannot start the server")]
    Server(#[from] ServerError),
}

/// How a run of the agent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// A signal stopped it.
    Stopped,
    /// The configuration is wrong, or does not fit this machine.
    Configuration,
    /// Another agent uses the root directory or the local socket.
    Locked,
    /// It could not start for another reason, or one of its threads ended.
    Failed,
}

/// Runs the agent until a signal stops it. Pods keep running. `flags`: every flag with its value,
/// as `/flagz` shows it.
#[must_use]
pub fn run(args: &AgentArgs, loaded: &Loaded, flags: Vec<(String, String)>) -> Outcome {
    threads::adopt_current("main");
    logging::init(u32::try_from(loaded.config.logging.verbosity).unwrap_or(0));
    threads::install_panic_hook();
    log::info!("coracle {} starts", env!("CARGO_PKG_VERSION"));
    for file in &loaded.files {
        log::info!("configuration from {}", file.display());
    }
    if let Some(warning) = args.warning(loaded) {
        log::warn!("{warning}");
    }
    let supervisor = match Supervisor::listen() {
        Ok(supervisor) => supervisor,
        Err(error) => {
            log::error!("cannot listen for signals: {error}");
            return Outcome::Failed;
        }
    };
    let outcome = match wiring::start(args, &loaded.config, flags, &supervisor) {
        Err(error) => {
            log::error!("cannot start: {}", chain(&error));
            match error {
                StartError::Refused(_) => Outcome::Configuration,
                StartError::Server(ServerError::AlreadyRunning { .. } | ServerError::SocketInUse { .. }) => {
                    Outcome::Locked
                }
                _ => Outcome::Failed,
            }
        }
        Ok(agent) => {
            let outcome = match supervisor.wait() {
                Ending::Signal => {
                    log::info!("stopping on a signal; pods keep running");
                    Outcome::Stopped
                }
                Ending::Died(died) => {
                    let why = died.panic.as_deref().unwrap_or("its body returned");
                    log::error!("stopping because thread {} ended: {why}", died.thread);
                    Outcome::Failed
                }
            };
            agent.stop();
            outcome
        }
    };
    supervisor.close();
    log::info!("stopped");
    outcome
}

/// An error with its causes, once each.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Makes a directory and its parents; the last one gets exactly `mode`.
fn make_dir(path: &Path, mode: u32) -> Result<(), StartError> {
    use std::os::unix::fs::PermissionsExt;
    let fail = |source| StartError::Directory { path: path.to_owned(), source };
    if path.is_dir() {
        return Ok(());
    }
    std::fs::create_dir_all(path).map_err(fail)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(fail)
}

/// Takes the permission bits beyond `mode` from a directory that was made by others. Where that
/// is not possible, the agent works all the same.
fn restrict_dir(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    let restricted =
        std::fs::metadata(path).map(|metadata| metadata.permissions().mode() & 0o7777).and_then(|before| {
            let after = before & (mode | 0o7000);
            if after != before {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(after))?;
                log::info!("{} had mode {before:04o}, now it has {after:04o}", path.display());
            }
            Ok(())
        });
    if let Err(why) = restricted {
        log::warn!("cannot take permissions from {}: {why}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_directory_that_is_too_open_is_restricted_and_no_other_one() {
        let dir = tempfile::tempdir().unwrap();
        for (before, after) in
            [(0o755, 0o750), (0o777, 0o750), (0o2775, 0o2750), (0o700, 0o700), (0o750, 0o750)]
        {
            std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(before)).unwrap();
            restrict_dir(dir.path(), 0o750);
            let mode = std::fs::metadata(dir.path()).unwrap().permissions().mode() & 0o7777;
            assert_eq!(mode, after, "{before:o}");
        }
        restrict_dir(&dir.path().join("absent"), 0o750);
    }
}
