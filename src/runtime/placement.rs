//! Which CPUs, NUMA nodes and devices a container gets (Go: pkg/kubelet/cm internal_container_lifecycle_linux.go).

use std::sync::Arc;

use crate::model::device_setup::DeviceSetup;
use crate::model::ids::ContainerId;
use crate::model::pod::Pod;
use crate::transport::generated::runtime::LinuxContainerResources;
use crate::util::stop::StopToken;

/// An error of a room that this one does not import.
pub type PlacementError = Box<dyn std::error::Error + Send + Sync>;

/// The decisions of the resource managers, for requests to the runtime.
pub trait Placement: Send + Sync {
    /// The CPUs and NUMA nodes of a container that is created now.
    fn place(&self, pod: &Pod, container: &str) -> CpusetPlacement;

    /// The container runs, with what [`Placement::place`] returned last for it.
    fn started(&self, pod: &Pod, container: &str, id: &ContainerId);

    /// What the devices of a container mean for it, which is created now. Device plugins may be
    /// called; `stop` cancels that.
    ///
    /// # Errors
    /// The reason, for the event and the status, when the container cannot be created now.
    fn devices(&self, pod: &Pod, container: &str, stop: &StopToken) -> Result<DeviceSetup, PlacementError>;

    /// Whether the pod has no CPU quota, because a container of it has CPUs for itself.
    fn is_without_quota(&self, pod: &Pod) -> bool;
}

/// No decisions: any CPUs and nodes.
impl Placement for () {
    fn place(&self, _: &Pod, _: &str) -> CpusetPlacement {
        CpusetPlacement::default()
    }

    fn started(&self, _: &Pod, _: &str, _: &ContainerId) {}

    fn devices(&self, _: &Pod, _: &str, _: &StopToken) -> Result<DeviceSetup, PlacementError> {
        Ok(DeviceSetup::default())
    }

    fn is_without_quota(&self, _: &Pod) -> bool {
        false
    }
}

/// The decisions of the resource managers. Clones share them.
pub type SharedPlacement = Arc<dyn Placement>;

/// What a container gets.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpusetPlacement {
    /// Such as `0-3,8`; empty: any CPUs.
    pub cpus: String,
    /// NUMA nodes, such as `0,1`; empty: any nodes.
    pub mems: String,
    /// Whether it has no CPU quota.
    pub without_quota: bool,
}

/// Adds the decision to the resources of a container.
pub(super) fn apply(placed: CpusetPlacement, resources: &mut LinuxContainerResources) {
    resources.cpuset_cpus = placed.cpus;
    resources.cpuset_mems = placed.mems;
    if placed.without_quota {
        remove_quota(resources);
    }
}

/// Removes the CPU quota, as the gate `DisableCPUQuotaWithExclusiveCPUs` has it. Nothing changes if
/// `cpuCFSQuota` is off.
pub(super) fn remove_quota(resources: &mut LinuxContainerResources) {
    if resources.cpu_period > 0 {
        resources.cpu_quota = -1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclusive_container_has_its_sets_and_no_quota() {
        let mut resources =
            LinuxContainerResources { cpu_quota: 100_000, cpu_period: 100_000, ..Default::default() };
        let placed = CpusetPlacement { cpus: "1".into(), mems: "0".into(), without_quota: false };
        apply(placed.clone(), &mut resources);
        assert_eq!((resources.cpuset_cpus.as_str(), resources.cpuset_mems.as_str()), ("1", "0"));
        assert_eq!(resources.cpu_quota, 100_000);
        apply(CpusetPlacement { without_quota: true, ..placed }, &mut resources);
        assert_eq!((resources.cpu_quota, resources.cpu_period), (-1, 100_000));
        let mut off = LinuxContainerResources::default();
        remove_quota(&mut off);
        assert_eq!(off.cpu_quota, 0);
    }
}
