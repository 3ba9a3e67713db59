//! The resource claims of the pod, before its sandbox is made.

use super::super::plan::Plan;
use super::{StepError, Worker};
use crate::model::reasons;
use crate::util::stop::StopToken;

impl Worker {
    /// Has the drivers prepare the pod's claims, if the plan needs it.
    pub(super) fn prepare_claims(&self, plan: &Plan, cancel: &StopToken) -> Result<(), StepError> {
        let prepared = self.deps.assignments.prepare_claims(self.pod(), plan.create_sandbox, cancel);
        prepared.map_err(|error| {
            let message = format!("Failed to prepare dynamic resources: {error}");
            if !cancel.is_stopped() {
                self.deps.events.warning(
                    self.pod(),
                    reasons::FAILED_PREPARE_DYNAMIC_RESOURCES,
                    message.as_str(),
                );
            }
            StepError::retry_later(message)
        })
    }
}
