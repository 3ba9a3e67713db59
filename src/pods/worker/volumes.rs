//! The pod whose volumes are not ready.

use std::time::Instant;

use super::super::lifecycle::Update;
use super::{Failed, Next, RETRY, Worker};
use crate::model::reasons;
use crate::util::backoff::{jitter, random_unit};
use crate::volumes::VolumeError;

impl Worker {
    /// Waits for a retry. A pod for whose volume the node has no place fails: another one of its
    /// controller may run on another node.
    pub(super) fn volumes_failed(&mut self, error: &VolumeError) -> Result<Next, Failed> {
        if error.has_no_place() {
            let message = format!("Node has reached its volume attachment limit, rejecting pod. {error}");
            let kill = self.refused(reasons::VOLUME_ATTACHMENT_LIMIT_EXCEEDED, &message);
            self.life.apply(Update { pod: None, kill: Some(kill) });
            return Ok(Next::Now);
        }
        Err(Failed {
            retry: error.retry_at().map_or_else(
                || jitter(RETRY, random_unit()),
                |at| at.saturating_duration_since(Instant::now()),
            ),
            message: error.to_string(),
            level: log::Level::Warn,
        })
    }
}
