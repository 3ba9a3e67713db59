//! Calls of the node API for one container: its log path, whether it runs, a checkpoint (gate
//! `ContainerCheckpoint`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::errors::CriError;
use super::runtime_client::RuntimeClient;
use crate::model::ids::{ContainerId, PodUid};
use crate::model::labels;
use crate::transport::generated::{methods, runtime};
use crate::util::stop::StopToken;

/// The state of a container that a reader of its log needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerLog {
    pub log_path: PathBuf,
    pub running: bool,
    pub pod: Option<PodUid>,
}

impl RuntimeClient {
    /// The path of a container's log, and whether the container runs.
    ///
    /// # Errors
    /// When the call fails or no status comes back.
    pub fn container_log(&self, id: &ContainerId) -> Result<ContainerLog, CriError> {
        let status = self.container_status(id)?;
        let running = status.state.enum_value() == Ok(runtime::ContainerState::CONTAINER_RUNNING);
        let pod = status.labels.get(labels::POD_UID).map(|uid| PodUid::from(uid.as_str()));
        Ok(ContainerLog { log_path: PathBuf::from(status.log_path), running, pod })
    }

    /// Requests a checkpoint of a running container, which the runtime writes to `location`.
    /// If no timeout in seconds is given, the request timeout applies.
    ///
    /// # Errors
    /// When the call fails; many runtimes do not offer it.
    pub fn checkpoint_container(
        &self,
        id: &ContainerId,
        location: &Path,
        seconds: i64,
        stop: &StopToken,
    ) -> Result<(), CriError> {
        let request = runtime::CheckpointContainerRequest {
            container_id: id.to_string(),
            location: location.to_string_lossy().into_owned(),
            timeout: seconds,
            ..Default::default()
        };
        let limit = match u64::try_from(seconds) {
            Ok(0) | Err(_) => self.caller.request_timeout,
            Ok(seconds) => Duration::from_secs(seconds),
        };
        let method = &methods::CHECKPOINT_CONTAINER;
        self.caller.call_for(method, id.as_str(), &request, Some(limit), stop).map(drop)
    }
}
