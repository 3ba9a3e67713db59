//! The volumes of the pod, before its containers start.

use std::time::Instant;

use super::{RETRY, StepError, StepOutcome, Worker};
use crate::model::mount::MountedVolume;
use crate::model::reasons;
use crate::util::backoff::{jitter, random_unit};
use crate::util::stop::StopToken;
use crate::volumes::VolumeError;

impl Worker {
    /// Sets up the pod's volumes. The objects that they and the containers refer to are registered first.
    pub(super) fn set_up_volumes(&mut self, cancel: &StopToken) -> Result<Vec<MountedVolume>, VolumeError> {
        if let Some(api) = &self.deps.api {
            api.register(self.pod());
        }
        self.deps.local.register(self.pod());
        let mounts = self.deps.volumes.setup(self.pod(), cancel)?;
        self.volumes_ready = true;
        Ok(mounts)
    }

    /// Waits for a retry. A pod for whose volume the node has no place fails: another one of its
    /// controller may run on another node.
    pub(super) fn volumes_failed(&mut self, error: &VolumeError) -> Result<StepOutcome, StepError> {
        if error.has_no_place() {
            let message = format!("Node has reached its volume attachment limit, rejecting pod. {error}");
            return Ok(self.refuse(reasons::VOLUME_ATTACHMENT_LIMIT_EXCEEDED, &message));
        }
        Err(StepError {
            retry: error.retry_at().map_or_else(
                || jitter(RETRY, random_unit()),
                |time| time.saturating_duration_since(Instant::now()),
            ),
            message: error.to_string(),
            level: log::Level::Warn,
        })
    }
}
