//! Reports of new problems to the operator.

use super::set::Deps;
use crate::model::event::{EventType, Regarding};
use crate::model::pod::Pod;
use crate::model::reasons;

/// A problem to report to the operator, once.
#[derive(Debug)]
pub(super) struct Notice {
    pub(super) place: String,
    pub(super) message: String,
    /// Pods that continue to run although their manifest is invalid.
    pub(super) carried_over: Vec<Pod>,
}

impl Notice {
    /// Writes a log line, an event about the manifest, and an event for each kept pod.
    pub(super) fn report(self, deps: &Deps) {
        log::warn!("{}", self.message);
        let source = Regarding::Manifest { source: self.place };
        deps.events.raise(source, EventType::Warning, reasons::INVALID_MANIFEST, self.message.clone());
        for pod in &self.carried_over {
            let message = format!("running on the last good version: {}", self.message);
            deps.events.warning(pod, reasons::INVALID_MANIFEST, message);
        }
    }
}
