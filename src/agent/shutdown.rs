//! The configuration of graceful shutdowns of the machine.

use std::path::PathBuf;
use std::time::Duration;

use super::error::StartError;
use super::settings::gates;
use crate::config::{AgentArgs, KubeletConfiguration};
use crate::pods::plan::shutdown::{Step, two_steps};
use crate::sync::shutdown::{SYSTEM_BUS, Settings};
use crate::util::wake::Wake;

/// The reason of a node that is not ready because it shuts down.
pub(super) const NOT_READY: &str = "node is shutting down";
/// The directory of logind's configuration.
const LOGIND_CONF_DIR: &str = "/etc/systemd/logind.conf.d";
/// The variable of D-Bus libraries for the bus's address.
const BUS_VARIABLE: &str = "DBUS_SYSTEM_BUS_ADDRESS";

/// The settings and the bell of the thread; `None`: graceful shutdown is off.
pub(super) fn settings(
    args: &AgentArgs,
    config: &KubeletConfiguration,
) -> Result<Option<(Settings, Wake)>, StartError> {
    let steps = steps(config);
    if steps.is_empty() {
        return Ok(None);
    }
    let wake = Wake::new().map_err(|source| StartError::Thread { name: "shutdown", source })?;
    let bus = std::env::var(BUS_VARIABLE).ok().filter(|address| !address.is_empty());
    let settings = Settings {
        steps,
        bus: bus.unwrap_or_else(|| SYSTEM_BUS.to_owned()),
        logind_conf_dir: PathBuf::from(LOGIND_CONF_DIR),
        state_file: args.root_dir.join("graceful_node_shutdown_state"),
        keep_times: gates(config).enabled("GracefulNodeShutdownBasedOnPodPriority"),
    };
    Ok(Some((settings, wake)))
}

/// The grace periods by priority; empty: graceful shutdown is off.
fn steps(config: &KubeletConfiguration) -> Vec<Step> {
    let gates = gates(config);
    let by_priority = &config.shutdown_grace_period_by_pod_priority;
    if !gates.enabled("GracefulNodeShutdown") {
        return Vec::new();
    }
    if gates.enabled("GracefulNodeShutdownBasedOnPodPriority") && !by_priority.is_empty() {
        let step = |entry: &crate::config::ShutdownByPriority| Step {
            from: entry.priority,
            // It is validated and not negative.
            period: Duration::from_secs(u64::try_from(entry.shutdown_grace_period_seconds).unwrap_or(0)),
        };
        return by_priority.iter().map(step).collect();
    }
    two_steps(config.shutdown_grace_period.to_std(), config.shutdown_grace_period_critical_pods.to_std())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::effects::default_configuration;
    use crate::config::{DefaultSet, GoDuration, ShutdownByPriority};

    #[test]
    fn shutdown_steps_follow_the_configuration() {
        let plain = default_configuration(DefaultSet::WithFile);
        let check = |config: &KubeletConfiguration, expected: &[(i32, u64)]| {
            let found: Vec<(i32, u64)> =
                steps(config).iter().map(|step| (step.from, step.period.as_secs())).collect();
            assert_eq!(found, expected);
        };
        check(&plain, &[]);
        let two = KubeletConfiguration {
            shutdown_grace_period: GoDuration::from_secs(30),
            shutdown_grace_period_critical_pods: GoDuration::from_secs(10),
            ..plain.clone()
        };
        check(&two, &[(0, 20), (2_000_000_000, 10)]);
        let many = KubeletConfiguration {
            shutdown_grace_period_by_pod_priority: vec![
                ShutdownByPriority { priority: 100, shutdown_grace_period_seconds: 5 },
                ShutdownByPriority { priority: 0, shutdown_grace_period_seconds: 60 },
            ],
            ..plain
        };
        check(&many, &[(100, 5), (0, 60)]);
        for gate in ["GracefulNodeShutdown", "GracefulNodeShutdownBasedOnPodPriority"] {
            let mut off = many.clone();
            off.feature_gates.insert(gate.to_owned(), false);
            check(&off, &[]);
        }
    }
}
