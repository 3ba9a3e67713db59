//! Starts and stops all other rooms (Go: cmd/kubelet/app, NewMainKubelet, Run).
//!
//! Owns: the order of start and stop. Thread: `main`, which waits for signals and deaths of threads.
//! The thread `lock-file` watches the file of `--lock-file`, and `pod-cidr` sends `podCIDR` to the
//! runtime of a node without an API server.
//! A start has three phases, in the order of `wiring::start`: `host` checks the machine, `rooms`
//! makes the handles of the rooms, `wiring` makes their channels and starts their threads.
//! `settings` turns the configuration into the rooms' settings; `backend` gives the server
//! access to the agent; `report`, `metrics` and `stats` make its documents from snapshots (`handles`).
//! Absent on purpose: decisions about pods, which the rooms make. Only how volumes are measured, and
//! which memory counts as reserved, is decided here (`stats`).

mod backend;
mod cgroups;
mod cluster;
mod credentials;
mod error;
mod eviction;
mod handles;
mod holdings;
mod host;
mod lock_file;
mod main_port;
mod metrics;
mod node;
mod offline_check;
mod oom;
mod placement_settings;
mod plugins;
mod pod_cidr;
mod pod_resources;
mod pods_api;
mod report;
mod rooms;
mod settings;
mod shutdown;
mod stats;
mod supervise;
mod tracing;
mod wiring;

use crate::config::{AgentArgs, LoadedConfig, configz, yaml};
use crate::server::ServerError;
use crate::util::error_chain::chain;
use crate::util::service_manager::ServiceManager;
use crate::util::{logging, threads};
use error::StartError;
use lock_file::Lock;
use supervise::{StopReason, Supervisor};

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
pub fn run(args: &AgentArgs, loaded: &LoadedConfig, flags: Vec<(String, String)>) -> Outcome {
    threads::register_current("main");
    logging::init(settings::logging(&loaded.config));
    threads::install_panic_hook();
    // Before anything secret is read.
    node::forbid_core_dumps();
    log::info!("coracle {} starts", env!("CARGO_PKG_VERSION"));
    for file in &loaded.files {
        log::info!("configuration from {}", file.display());
    }
    let shown = yaml::to_yaml(&configz(&loaded.config));
    logging::info_with(module_path!(), "Effective KubeletConfiguration", "config", shown);
    if let Some(warning) = loaded.warning() {
        log::warn!("{warning}");
    }
    let supervisor = match Supervisor::listen() {
        Ok(supervisor) => supervisor,
        Err(error) => {
            log::error!("cannot listen for signals: {error}");
            return Outcome::Failed;
        }
    };
    let outcome = match lock_file::acquire(args, &supervisor) {
        Err(error) => {
            log::error!("cannot start: {}", chain(&error));
            Outcome::Failed
        }
        Ok(Lock::Interrupted) => Outcome::Stopped,
        // The lock is held until the agent has stopped.
        Ok(_lock) => run_locked(args, loaded, flags, &supervisor),
    };
    supervisor.close();
    log::info!("stopped");
    outcome
}

/// Runs the agent with its lock file.
fn run_locked(
    args: &AgentArgs,
    loaded: &LoadedConfig,
    flags: Vec<(String, String)>,
    supervisor: &Supervisor,
) -> Outcome {
    let agent = match wiring::start(args, &loaded.config, flags, supervisor) {
        Ok(agent) => agent,
        Err(error) => {
            log::error!("cannot start: {}", chain(&error));
            return match error {
                StartError::Refused(_) => Outcome::Configuration,
                StartError::Server(ServerError::AlreadyRunning { .. } | ServerError::SocketInUse { .. }) => {
                    Outcome::Locked
                }
                _ => Outcome::Failed,
            };
        }
    };
    let manager = ServiceManager::from_environment();
    manager.is_ready();
    let outcome = match supervisor.wait(&manager, || agent.turn_age()) {
        StopReason::Signal => {
            log::info!("stopping on a signal; pods keep running");
            Outcome::Stopped
        }
        StopReason::LockRequested => {
            log::info!("stopping because another process opened the lock file; pods keep running");
            Outcome::Stopped
        }
        StopReason::Died(died) => {
            let reason = died.panic.as_deref().unwrap_or("its body returned");
            log::error!("stopping because thread {} ended: {reason}", died.thread);
            Outcome::Failed
        }
        StopReason::Fatal(message) => {
            log::error!("cannot continue: {message}");
            Outcome::Failed
        }
    };
    manager.is_stopping();
    agent.stop();
    outcome
}
