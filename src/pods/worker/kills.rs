//! Stopping and removing single containers of a pod that continues to run.

use jiff::Timestamp;

use super::super::plan;
use super::{RETRY, StepError, Worker, time_until};
use crate::model::api::Container;
use crate::model::pod::Pod;
use crate::model::runtime::PodRuntime;
use crate::runtime::{ContainerKill, StartFailure};
use crate::status::StartReason;
use crate::util::backoff::{jitter, random_unit};
use crate::util::stop::StopToken;

impl Worker {
    /// Records why a container did not start, and returns when to try again.
    pub(super) fn not_started(&mut self, name: &str, failure: StartFailure) -> StepError {
        let error = StepError {
            message: format!("failed to start container {name}: {}: {}", failure.reason, failure.message),
            retry: failure.retry_at.map_or_else(
                || jitter(RETRY, random_unit()),
                |time| time_until(time).min(self.settings.sync_frequency),
            ),
            level: match failure.retry_at {
                Some(_) => log::Level::Debug,
                None => log::Level::Warn,
            },
        };
        let reason = StartReason { reason: failure.reason, message: failure.message };
        self.reasons.insert(name.to_owned(), reason);
        error
    }

    /// Stops single containers one after the other. A failed probe may set the grace period.
    pub(super) fn kill_single(
        &self,
        kills: &[plan::KillContainer],
        runtime: &PodRuntime,
        cancel: &StopToken,
    ) -> Result<(), StepError> {
        for kill in kills {
            let container = self.pod().all_containers().find(|container| container.name == kill.name);
            let order = ContainerKill {
                message: Some(kill.message.clone()),
                probe_grace: container.and_then(|container| kill.reason.probe_grace(container)),
                ips: runtime.ips.clone(),
                ..ContainerKill::for_container(self.pod(), &kill.id, &kill.name)
            };
            self.deps
                .runtime
                .kill_container(&order, cancel)
                .map_err(|error| StepError::retry_later(error.to_string()))?;
        }
        Ok(())
    }

    /// The wait before a restart of all containers if a container that requests it is in back-off.
    /// The status of this container shows the reason after this call. `None`: no wait.
    ///
    /// DIFFERS: upstream removes the record of the container that requests it, and so its back-off.
    pub(super) fn hold_reset(&mut self, resets: &[plan::Reset], runtime: &PodRuntime) -> Option<StepError> {
        let pod = self.pod().clone();
        let mut held: Option<StepError> = None;
        for container in triggers(&pod, resets) {
            let Some(wait) = self.deps.runtime.restart_wait(&pod, container, runtime, Timestamp::now())
            else {
                self.reasons.remove(&container.name);
                continue;
            };
            let known = self.reasons.get(&container.name);
            if known.is_none_or(|known| known.message != wait.message) {
                self.deps.runtime.report_back_off(&pod, container);
            }
            let wait = self.not_started(&container.name, wait);
            // The longest wait applies: all containers start together.
            held = held.filter(|held| held.retry >= wait.retry).or(Some(wait));
        }
        held
    }

    /// Removes every container of the pod from the runtime, so that all start again in the
    /// same sandbox. Their log files stay: the new restart counts follow from the names of these.
    pub(super) fn reset(
        &mut self,
        resets: &[plan::Reset],
        runtime: &PodRuntime,
        cancel: &StopToken,
    ) -> Result<(), StepError> {
        let pod = self.pod().clone();
        for container in triggers(&pod, resets) {
            self.deps.runtime.count_restart(&pod, container, runtime, Timestamp::now());
        }
        for reset in resets {
            let kill = ContainerKill {
                grace_override: Some(0),
                ..ContainerKill::for_container(&pod, &reset.id, &reset.name)
            };
            let stopped = if reset.stop { self.deps.runtime.kill_container(&kill, cancel) } else { Ok(()) };
            stopped.map_err(|error| StepError::retry_later(error.to_string()))?;
            self.deps.runtime.remove_container(&reset.id, cancel).map_err(|error| {
                StepError::retry_later(format!("cannot remove container {}: {error}", reset.name))
            })?;
            self.reasons.remove(&reset.name);
        }
        Ok(())
    }

    /// Removes the records of all init containers, because they run again in the new sandbox.
    pub(super) fn remove_init_records(&self, runtime: &PodRuntime, cancel: &StopToken) {
        let init = |name: &str| self.pod().init_containers().iter().any(|container| container.name == name);
        for record in runtime.containers.iter().filter(|record| init(&record.name)) {
            if let Err(error) = self.deps.runtime.remove_container(&record.id, cancel) {
                // The plan ignores this record, and garbage collection removes it later.
                log::debug!("cannot remove init container {}: {error}", record.name);
            }
        }
    }
}

/// The containers that request the restart of all.
fn triggers<'a>(pod: &'a Pod, resets: &'a [plan::Reset]) -> impl Iterator<Item = &'a Container> {
    let asks =
        |container: &&Container| resets.iter().any(|reset| reset.trigger && reset.name == container.name);
    pod.all_containers().filter(asks)
}
