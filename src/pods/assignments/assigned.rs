//! What containers have for themselves, for the pod-resources API (Go: pkg/kubelet/cm
//! container_manager_linux.go `GetDevices`, `GetCPUs`, `GetMemory`, `GetDynamicResources`).

use super::Assignments;
use crate::claims::info::ClaimInfo;
use crate::devices::DeviceId;
use crate::model::api::Container;
use crate::model::numa::NumaMask;
use crate::model::pod::Pod;
use crate::placement::cpu::request::is_isolated;
use crate::placement::cpus::CpuSet;
use crate::placement::memory::{Block, Memory};

/// A device of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssignedDevice {
    /// Its resource, such as `example.com/widget`.
    pub resource: String,
    /// Its name in the resource.
    pub id: DeviceId,
    /// The NUMA nodes that it is near to; may be empty.
    pub nodes: NumaMask,
}

/// What one container has, or what all containers can have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AssignedResources {
    /// Devices of plugins.
    pub devices: Vec<AssignedDevice>,
    /// CPUs that no other container (of a pod: no other pod) runs on.
    pub cpus: CpuSet,
    /// Memory and huge pages of NUMA nodes.
    pub memory: Vec<Block>,
    /// Resource claims.
    pub claims: Vec<ClaimInfo>,
}

impl Assignments {
    /// What a container of a pod has.
    #[must_use]
    pub fn assigned(&self, pod: &Pod, container: &Container) -> AssignedResources {
        let (uid, name) = (pod.uid(), container.name.as_str());
        let mut assigned = AssignedResources::default();
        if let Some(own) = &self.devices {
            assigned.devices = own.devices.read(|state| {
                let holds = state.holds().pod(uid).and_then(|pod| pod.get(name)).into_iter().flatten();
                let devices = holds.flat_map(|(resource, hold)| {
                    let assigned_device = |(id, nodes): (&DeviceId, &NumaMask)| AssignedDevice {
                        resource: resource.clone(),
                        id: DeviceId::clone(id),
                        nodes: *nodes,
                    };
                    hold.devices.iter().map(assigned_device)
                });
                devices.collect()
            });
        }
        if let Some(shared) = &self.shared {
            let state = shared.state();
            let candidate = shared.settings.topology.candidate(pod);
            if is_isolated(&state.cpu, candidate, container) {
                assigned.cpus = state.cpu.exclusive_of(uid, name).cloned().unwrap_or_default();
            }
            let memory = state.memory.as_ref().filter(|memory| memory.is_isolated(candidate, container));
            assigned.memory = memory.map(|memory| memory.blocks(uid, name).to_vec()).unwrap_or_default();
        }
        if let Some(claims) = &self.claims {
            assigned.claims = claims.claims_of_container(pod, container);
        }
        assigned
    }

    /// The CPUs and memory of a pod as a whole. Nothing without the gate `PodLevelResourceManagers`.
    #[must_use]
    pub fn assigned_pod(&self, pod: &Pod) -> AssignedResources {
        let mut assigned = AssignedResources::default();
        if let Some(shared) = self.shared.as_ref().filter(|shared| shared.settings.topology.manages_pods()) {
            let state = shared.state();
            assigned.cpus = state.cpu.pods.get(pod.uid()).cloned().unwrap_or_default();
            let memory = state.memory.as_ref().map(|memory| memory.pod_blocks(pod.uid()).to_vec());
            assigned.memory = memory.unwrap_or_default();
        }
        assigned
    }

    /// What all containers together can have.
    #[must_use]
    pub fn assignable(&self) -> AssignedResources {
        let mut assigned = AssignedResources::default();
        if let Some(own) = &self.devices {
            assigned.devices = own.devices.read(|state| {
                let resources = state.resources().iter();
                let devices = resources.flat_map(|(resource, known)| {
                    let assigned_device = |id: &DeviceId| AssignedDevice {
                        resource: resource.clone(),
                        id: DeviceId::clone(id),
                        nodes: known.devices.get(id).map(|device| device.nodes).unwrap_or_default(),
                    };
                    known.healthy().map(assigned_device).collect::<Vec<_>>()
                });
                devices.collect()
            });
        }
        if let Some(shared) = &self.shared {
            assigned.cpus =
                shared.settings.cpu.as_ref().map(|policy| policy.allocatable()).unwrap_or_default();
            assigned.memory = shared.state().memory.as_ref().map(Memory::allocatable).unwrap_or_default();
        }
        assigned
    }
}
