//! Starts the room `tracing`, if the configuration says so (Go: cmd/kubelet/app, `newTracerProvider`).

use super::error::{StartError, thread_error};
use super::host::Host;
use crate::config::KubeletConfiguration;
use crate::tracing::{self, Settings};
use crate::util::threads::Running;

/// Starts the thread that sends spans; `None` without `tracing` in the configuration.
///
/// # Errors
/// When no connection can be made to such an endpoint, or the thread cannot be started.
pub(super) fn start(config: &KubeletConfiguration, host: &Host) -> Result<Option<Running>, StartError> {
    let Some(tracing) = &config.tracing else { return Ok(None) };
    let endpoint = tracing.endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
    let settings = Settings::new(endpoint, tracing.sampling_rate_per_million, &host.node_name)
        .map_err(|error| StartError::Refused(format!("tracing.endpoint: {error}")))?;
    tracing::spawn(settings).map_err(thread_error("traces"))
}
