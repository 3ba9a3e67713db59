//! The cgroups of the node: that of all pods, the tiers, and those of daemons (Go: pkg/kubelet/cm
//! node_container_manager_linux.go).

use std::time::Duration;

use super::{Deps, Shared};
use crate::cgroups::node::{Capacity, DaemonCgroup, Reservations, pods_values};
use crate::cgroups::pod::PodSettings;
use crate::cgroups::tiers::TierSettings;
use crate::cgroups::{CgroupError, Cgroups, Driver};
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::reasons;
use crate::util::backoff::Failures;
use crate::util::lock::LockExt;
use crate::util::stop::{StopToken, Waited};

/// Wait before the next try to open the access.
const RETRY: Duration = Duration::from_secs(2);

/// The settings of the node's cgroups.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Values of pods.
    pub pod: PodSettings,
    /// Values of the tiers.
    pub tiers: TierSettings,
    /// What the machine has.
    pub capacity: Capacity,
    /// What is not for pods.
    pub reservations: Reservations,
    /// `enforceNodeAllocatable` has `pods`.
    pub enforced: bool,
    /// Cgroups of daemons, without the values of their CPUs.
    pub daemons: Vec<DaemonCgroup>,
    /// The machine's CPUs, if the CPU manager's policy is `none`.
    pub all_cpus: Option<String>,
}

/// Why there is no access to cgroups.
#[derive(Debug)]
pub enum OpenError {
    /// The runtime does not answer; tried again.
    Runtime(String),
    /// The configuration, or the machine, does not allow it: the agent ends.
    Fatal(String),
}

/// Makes the access to cgroups with the driver of the runtime.
pub type Open = Box<dyn Fn(&StopToken) -> Result<Cgroups, OpenError> + Send>;

/// Opens the access, and tries again until that succeeds.
pub(super) fn run(shared: &Shared, deps: &Deps, stop: &StopToken) {
    let mut failures = Failures::default();
    while !stop.is_stopped() {
        let problem = match open(shared, deps, stop) {
            Ok(cgroups) => {
                shared.opened(cgroups).iter().for_each(&deps.wake);
                return;
            }
            Err(OpenError::Runtime(problem)) => problem,
            Err(OpenError::Fatal(problem)) => {
                // There is no receiver if the agent stops already.
                let _ = deps.fatal.try_send(problem);
                return;
            }
        };
        if failures.count() && !stop.is_stopped() {
            log::warn!("cannot make the cgroups of the node: {problem} ({failures} times)");
        }
        *shared.problem.locked() = Some(problem);
        if stop.wait(RETRY) == Waited::Stopped {
            return;
        }
    }
}

fn open(shared: &Shared, deps: &Deps, stop: &StopToken) -> Result<Cgroups, OpenError> {
    let fatal = |error: CgroupError| OpenError::Fatal(error.to_string());
    let retried = |error: CgroupError| OpenError::Runtime(error.to_string());
    let cgroups = (deps.open)(stop)?;
    cgroups.check_root().map_err(fatal)?;
    make_pods(shared, &cgroups, &deps.events, stop).map_err(retried)?;
    shared.make_tiers(&cgroups, stop).map_err(retried)?;
    shared.reset_protection(&cgroups, stop);
    for daemon in &shared.settings.daemons {
        let mut values = daemon.values.clone();
        values.cpus = all_cpus(shared, &cgroups);
        match cgroups.limit_daemons(&daemon.cgroup, &values, stop) {
            Ok(()) => note(&deps.events, EventType::Normal, daemon.enforced()),
            Err(error) => {
                let message = daemon.failure_message(&error);
                note(&deps.events, EventType::Warning, message.clone());
                return Err(OpenError::Fatal(message));
            }
        }
    }
    log::info!("cgroups of pods are below {}", cgroups.layout().path(cgroups.layout().pods()));
    Ok(cgroups)
}

/// With the cgroupfs driver, and without the policy `none`, the CPUs are not written.
fn all_cpus(shared: &Shared, cgroups: &Cgroups) -> Option<String> {
    shared.settings.all_cpus.clone().filter(|_| cgroups.layout().driver() == Driver::Systemd)
}

/// Makes the cgroup of all pods. A limit that cannot be set, because pods use more already, is set
/// later.
fn make_pods(
    shared: &Shared,
    cgroups: &Cgroups,
    events: &EventSink,
    stop: &StopToken,
) -> Result<(), CgroupError> {
    let Settings { capacity, reservations, enforced, .. } = &shared.settings;
    let values = pods_values(capacity, reservations, *enforced, all_cpus(shared, cgroups).as_deref());
    let outcome = cgroups.make(cgroups.layout().pods(), &values, stop)?;
    match outcome.failed.first() {
        None => {
            shared.enforced.store(true, std::sync::atomic::Ordering::Relaxed);
            note(events, EventType::Normal, "Updated Node Allocatable limit across pods".to_owned());
        }
        Some(error) => {
            let name = cgroups.layout().path(cgroups.layout().pods());
            let message = format!("Failed to update Node Allocatable Limits {name:?}: {error}");
            note(events, EventType::Warning, message);
        }
    }
    Ok(())
}

/// Sets the limits of all pods again, if that failed before.
pub(super) fn enforce(shared: &Shared, cgroups: &Cgroups, events: &EventSink, stop: &StopToken) {
    if shared.enforced.load(std::sync::atomic::Ordering::Relaxed) {
        return;
    }
    if let Err(error) = make_pods(shared, cgroups, events, stop) {
        log::warn!("cannot set the limits of all pods: {error}");
    }
}

fn note(events: &EventSink, kind: EventType, message: String) {
    let reason = match kind {
        EventType::Normal => reasons::NODE_ALLOCATABLE_ENFORCED,
        EventType::Warning => reasons::FAILED_NODE_ALLOCATABLE_ENFORCEMENT,
    };
    events.raise(Regarding::Node, kind, reason, message);
}
