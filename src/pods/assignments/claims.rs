//! The resource claims of pods, for their workers (Go: pkg/kubelet/cm container_manager_linux.go
//! `PrepareDynamicResources`).

use super::Assignments;
use crate::claims::{ClaimError, Failure, ResourceClaims};
use crate::model::api::{Container, ResourceStatus};
use crate::model::device_setup::DeviceSetup;
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

impl Assignments {
    /// Adds the resource claims.
    #[must_use]
    pub fn with_claims(mut self, claims: ResourceClaims) -> Assignments {
        self.claims = Some(claims);
        self
    }

    /// Has the drivers prepare the pod's claims. `new_sandbox`: also claims that were prepared
    /// before, because a machine that has started again may have lost them.
    ///
    /// # Errors
    /// See [`ResourceClaims::prepare`].
    pub fn prepare_claims(&self, pod: &Pod, new_sandbox: bool, stop: &StopToken) -> Result<(), ClaimError> {
        match &self.claims {
            Some(claims) if new_sandbox || !claims.has_claims_of(pod) => claims.prepare(pod, stop),
            _ => Ok(()),
        }
    }

    /// Has the drivers revert it, after the last container has stopped.
    ///
    /// # Errors
    /// See [`ResourceClaims::unprepare`].
    pub fn unprepare_claims(&self, uid: &PodUid, stop: &StopToken) -> Result<(), ClaimError> {
        self.claims.as_ref().map_or(Ok(()), |claims| claims.unprepare(uid, stop))
    }

    /// Whether claims are prepared for the pod: then it must not be reported as ended.
    #[must_use]
    pub fn uses_claims(&self, uid: &PodUid) -> bool {
        self.claims.as_ref().is_some_and(|claims| claims.uses_any(uid))
    }

    /// `allocatedResourcesStatus` of a container: the health of its devices, those of plugins first.
    pub fn device_health(&self, pod: &Pod, container: &Container) -> Vec<ResourceStatus> {
        let mut found = self.plugin_health(pod.uid(), &container.name);
        if let Some(claims) = &self.claims {
            found.extend(claims.statuses(pod, container));
        }
        found
    }

    /// Adds the devices of a container's claims. As upstream they precede those of device plugins.
    pub(super) fn add_claims(
        &self,
        pod: &Pod,
        container: &str,
        setup: &mut DeviceSetup,
    ) -> Result<(), Failure> {
        let Some(claims) = &self.claims else { return Ok(()) };
        // Ephemeral containers have no resources.
        let Some(container) = pod.all_containers().find(|candidate| candidate.name == container) else {
            return Ok(());
        };
        setup.cdi.splice(0..0, claims.cdi_devices(pod, container)?);
        Ok(())
    }
}
