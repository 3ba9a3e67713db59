//! The devices of the pod, before its containers start.

use super::super::assignments::DeviceReadiness;
use super::super::lifecycle::{Failure, PodKill, Update};
use super::{StepError, StepOutcome, Worker};
use crate::model::runtime::PodRuntime;
use crate::model::{metrics, reasons};
use crate::util::stop::StopToken;

impl Worker {
    /// Has the device plugins prepare the pod's devices. If they cannot, the pod fails: returns its next
    /// step.
    pub(super) fn allocate_devices(
        &mut self,
        runtime: &PodRuntime,
        cancel: &StopToken,
    ) -> Result<Option<StepOutcome>, StepError> {
        match self.deps.assignments.allocate_devices(self.pod(), runtime, cancel) {
            DeviceReadiness::Ready => Ok(None),
            DeviceReadiness::Wait { message, retry } if cancel.is_stopped() => {
                Err(StepError { message, retry, level: log::Level::Debug })
            }
            DeviceReadiness::Wait { message, retry } => {
                self.deps.events.warning(self.pod(), reasons::WAITING_FOR_DEVICES, message.as_str());
                Err(StepError { message, retry, level: log::Level::Info })
            }
            DeviceReadiness::Denied { reason, message } => Ok(Some(self.refuse(reason, &message))),
        }
    }

    /// Ends a pod that cannot run on this node, as if it had not been admitted.
    pub(super) fn refuse(&mut self, reason: &'static str, message: &str) -> StepOutcome {
        metrics::ADMISSION_REJECTIONS.inc([reason]);
        self.deps.events.warning(self.pod(), reason, message);
        let message = format!("Pod was rejected: {message}");
        let failure = Some(Failure { reason, message, disrupts: false });
        self.lifecycle.apply(Update { pod: None, kill: Some(PodKill { grace_override: None, failure }) });
        StepOutcome::Now
    }
}
