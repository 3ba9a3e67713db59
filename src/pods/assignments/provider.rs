//! What the topology manager asks of the device manager.

use std::collections::BTreeSet;

use crate::devices::{Devices, PodRequest};
use crate::model::api::Container;
use crate::placement::numa::Hint;
use crate::placement::topology::{AllocateError, Candidate, Hints, Provider};

/// The devices during the admission of a pod.
pub(super) struct DeviceProvider<'a> {
    pub(super) devices: &'a Devices,
    pub(super) pod: &'a PodRequest,
    /// Containers that have their devices already.
    pub(super) keep: &'a BTreeSet<String>,
}

impl DeviceProvider<'_> {
    /// Gives back what admission has reserved for the pod.
    pub(super) fn unreserve(&self) {
        self.devices.unreserve(&self.pod.uid);
    }
}

impl Provider for DeviceProvider<'_> {
    fn hints(&self, _: Candidate<'_>, container: &Container) -> Hints {
        self.devices.hints(self.pod, &container.name)
    }

    fn pod_hints(&self, _: Candidate<'_>) -> Hints {
        self.devices.pod_hints(self.pod)
    }

    fn allocate(&mut self, _: Candidate<'_>, container: &Container, hint: Hint) -> Result<(), AllocateError> {
        let keeps = self.keep.contains(&container.name);
        let reserved = self.devices.reserve(self.pod, &container.name, hint.nodes, keeps);
        reserved.map_err(|error| AllocateError::Unexpected(error.to_string()))
    }
}
