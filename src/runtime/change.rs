//! Changes of single containers that exist: other resources, and removal.

use crate::cri::CriError;
use crate::model::api::Container;
use crate::model::ids::ContainerId;
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

use super::{Runtime, numbers};

impl Runtime {
    /// Removes the record of a container; its log files stay. One that is gone counts.
    ///
    /// # Errors
    /// When the runtime did not remove it.
    pub fn remove_container(&self, id: &ContainerId, stop: &StopToken) -> Result<(), CriError> {
        match self.shared.cri.with_stop(stop.clone()).remove_container(id) {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    /// Gives a running container the resources that `container` grants, without a restart.
    ///
    /// DIFFERS: CPU and memory in one call; upstream makes one for each.
    ///
    /// # Errors
    /// When the runtime did not apply them.
    pub fn resize_container(
        &self,
        pod: &Pod,
        container: &Container,
        id: &ContainerId,
        stop: &StopToken,
    ) -> Result<(), CriError> {
        let resources = numbers::container_resources(pod, container, &self.shared.settings);
        self.shared.cri.with_stop(stop.clone()).update_container_resources(id, resources)
    }
}
