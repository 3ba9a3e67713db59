//! Verbs that ask the runtime what containers use.

use std::time::Duration;

use super::RuntimeClient;
use super::errors::CriError;
use crate::transport::generated::{MessageField, methods, runtime};

impl RuntimeClient {
    /// What pods use, their containers included. Somebody waits for a page; a runtime that
    /// needs longer than `within` has no numbers for it.
    ///
    /// # Errors
    /// When the call fails; [`super::Class::Unsupported`] from older runtimes.
    pub fn pod_stats(&self, within: Duration) -> Result<Vec<runtime::PodSandboxStats>, CriError> {
        let request = runtime::ListPodSandboxStatsRequest::default();
        Ok(self.caller.call_within(&methods::LIST_POD_SANDBOX_STATS, "", &request, within)?.stats)
    }

    /// What containers use, likewise.
    ///
    /// # Errors
    /// When the call fails.
    pub fn container_stats(&self, within: Duration) -> Result<Vec<runtime::ContainerStats>, CriError> {
        // An empty filter, not none: with none containerd measures the sandboxes, too, which
        // takes it as long again, and drops what it found.
        let filter = MessageField::some(runtime::ContainerStatsFilter::default());
        let request = runtime::ListContainerStatsRequest { filter, ..Default::default() };
        Ok(self.caller.call_within(&methods::LIST_CONTAINER_STATS, "", &request, within)?.stats)
    }
}
