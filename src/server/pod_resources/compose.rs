//! The responses, from what containers have (pure; Go: pkg/kubelet/apis/podresources).

use super::{AssignedResources, NodePod};
use crate::claims::info::{ClaimInfo, Device};
use crate::model::api::Container;
use crate::model::numa::NumaMask;
use crate::model::pod::{Pod, is_sidecar};
use crate::placement::memory::Block;
use crate::pods::assignments::AssignedDevice;
use crate::transport::generated::{MessageField, podresources as pb};

/// What a container of a pod has.
pub(super) type ContainerLookup<'a> = &'a dyn Fn(&Pod, &Container) -> AssignedResources;
/// What a pod has as a whole: CPUs and memory.
pub(super) type PodLookup<'a> = &'a dyn Fn(&Pod) -> AssignedResources;

/// All pods that use resources: sidecars first, then the other containers that last. Init containers
/// that end, and ephemeral containers, are not shown.
pub(super) fn list(
    pods: &[NodePod],
    assigned: ContainerLookup<'_>,
    assigned_pod: PodLookup<'_>,
) -> pb::ListPodResourcesResponse {
    let active = pods.iter().filter(|listed| listed.is_active);
    let pod_resources = active.map(|listed| pod_resources(&listed.pod, assigned, assigned_pod)).collect();
    pb::ListPodResourcesResponse { pod_resources, ..Default::default() }
}

/// All pods as v1alpha1 shows them: containers with devices, without NUMA nodes, also those of pods
/// that have ended.
pub(super) fn list_v1alpha1(pods: &[NodePod], assigned: ContainerLookup<'_>) -> pb::ListPodResourcesResponse {
    let old_pod_resources = |listed: &NodePod| {
        let containers = listed.pod.containers().iter().map(|container| {
            // What a pod that has ended had may be that of another pod now.
            let devices =
                if listed.is_active { assigned(&listed.pod, container).devices } else { Vec::new() };
            let mut devices = self::devices(devices);
            devices.iter_mut().for_each(|device| device.topology = MessageField::none());
            pb::ContainerResources { name: container.name.clone(), devices, ..Default::default() }
        });
        named(&listed.pod, containers.collect())
    };
    pb::ListPodResourcesResponse {
        pod_resources: pods.iter().map(old_pod_resources).collect(),
        ..Default::default()
    }
}

/// One pod; `None`: no pod of this name uses resources.
pub(super) fn get(
    pods: &[NodePod],
    (namespace, name): (&str, &str),
    assigned: ContainerLookup<'_>,
    assigned_pod: PodLookup<'_>,
) -> Option<pb::PodResources> {
    let is_wanted = |listed: &&NodePod| listed.pod.name() == name && listed.pod.namespace() == namespace;
    let found = pods.iter().filter(|listed| listed.is_active).find(is_wanted)?;
    Some(pod_resources(&found.pod, assigned, assigned_pod))
}

/// What all containers together can have.
pub(super) fn allocatable(assigned: AssignedResources) -> pb::AllocatableResourcesResponse {
    pb::AllocatableResourcesResponse {
        devices: devices(assigned.devices),
        cpu_ids: assigned.cpus.iter().map(i64::from).collect(),
        memory: assigned.memory.into_iter().map(memory).collect(),
        ..Default::default()
    }
}

fn named(pod: &Pod, containers: Vec<pb::ContainerResources>) -> pb::PodResources {
    pb::PodResources {
        name: pod.name().to_owned(),
        namespace: pod.namespace().to_owned(),
        containers,
        ..Default::default()
    }
}

fn pod_resources(pod: &Pod, assigned: ContainerLookup<'_>, assigned_pod: PodLookup<'_>) -> pb::PodResources {
    let sidecars = pod.init_containers().iter().filter(|container| is_sidecar(container));
    let container_resources = |container: &Container| {
        let assigned = assigned(pod, container);
        pb::ContainerResources {
            name: container.name.clone(),
            devices: devices(assigned.devices),
            cpu_ids: assigned.cpus.iter().map(i64::from).collect(),
            memory: assigned.memory.into_iter().map(memory).collect(),
            dynamic_resources: assigned.claims.into_iter().map(claim).collect(),
            ..Default::default()
        }
    };
    let whole = assigned_pod(pod);
    pb::PodResources {
        cpu_ids: whole.cpus.iter().map(i64::from).collect(),
        memory: whole.memory.into_iter().map(memory).collect(),
        ..named(pod, sidecars.chain(pod.containers()).map(container_resources).collect())
    }
}

fn topology(nodes: NumaMask) -> pb::TopologyInfo {
    let node = |number: u32| pb::NumaNode { id: i64::from(number), ..Default::default() };
    pb::TopologyInfo { nodes: nodes.iter().map(node).collect(), ..Default::default() }
}

/// An entry for each NUMA node of each device, as upstream: tools add the entries up by node.
fn devices(assigned: Vec<AssignedDevice>) -> Vec<pb::ContainerDevices> {
    let mut found = Vec::new();
    for device in assigned {
        let entry = |topology| pb::ContainerDevices {
            resource_name: device.resource.clone(),
            device_ids: vec![device.id.to_string()],
            topology,
            ..Default::default()
        };
        if device.nodes.is_empty() {
            found.push(entry(MessageField::none()));
        }
        for node in device.nodes.iter() {
            found.push(entry(MessageField::some(topology(NumaMask::from_numbers([node])))));
        }
    }
    found
}

fn memory(block: Block) -> pb::ContainerMemory {
    pb::ContainerMemory {
        memory_type: block.resource,
        size: block.bytes,
        topology: MessageField::some(topology(block.nodes)),
        ..Default::default()
    }
}

/// DIFFERS: upstream adds to each device the CDI devices of those before it.
fn claim(info: ClaimInfo) -> pb::DynamicResource {
    let resource = |driver: &str, device: Device| pb::ClaimResource {
        cdi_devices: device
            .cdi_ids
            .into_iter()
            .map(|name| pb::CdiDevice { name, ..Default::default() })
            .collect(),
        driver_name: driver.to_owned(),
        pool_name: device.pool,
        device_name: device.name,
        share_id: device.share_id,
        ..Default::default()
    };
    let devices = info
        .drivers
        .into_iter()
        .flat_map(|(driver, devices)| devices.into_iter().map(move |device| resource(&driver, device)));
    pb::DynamicResource {
        claim_name: info.id.key.name,
        claim_namespace: info.id.key.namespace,
        claim_resources: devices.collect(),
        ..Default::default()
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
