//! What devices mean for a container, and for the status of its pod (pure; Go:
//! `deviceRunContainerOptions`, `UpdateAllocatedResourcesStatus`).

use std::collections::{BTreeMap, BTreeSet};

use super::device::DeviceSetup;
use super::holds::HoldState;
use super::state::DeviceState;
use crate::model::ids::PodUid;

/// A setting of two plugins that differs. The first one is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Such as `environment variable`.
    pub(super) kind: &'static str,
    /// Its name, or the path in the container.
    pub(super) name: String,
}

/// Merges what the plugins want of one container. Of two settings with the same name or path in the
/// container the first one is used.
///
/// DIFFERS: the resources are in the order of their names; in the Go kubelet the order is random.
#[must_use]
pub fn merge<'a>(setups: impl IntoIterator<Item = &'a DeviceSetup>) -> (DeviceSetup, Vec<Conflict>) {
    let (mut merged, mut conflicts) = (DeviceSetup::default(), Vec::new());
    let (mut mounts, mut nodes, mut cdi) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
    let mut note = |kind: &'static str, name: &str, differs: bool| {
        if differs {
            conflicts.push(Conflict { kind, name: name.to_owned() });
        }
    };
    for setup in setups {
        for (from, to, kind) in [
            (&setup.envs, &mut merged.envs, "environment variable"),
            (&setup.annotations, &mut merged.annotations, "annotation"),
        ] {
            for (name, value) in from {
                match to.get(name) {
                    Some(first) => note(kind, name, first != value),
                    None => drop(to.insert(name.clone(), value.clone())),
                }
            }
        }
        for node in &setup.nodes {
            match nodes.get(&node.container_path) {
                Some(first) => note("device", &node.container_path, *first != &node.host_path),
                None => {
                    nodes.insert(&node.container_path, &node.host_path);
                    merged.nodes.push(node.clone());
                }
            }
        }
        for mount in &setup.mounts {
            match mounts.get(&mount.container_path) {
                Some(first) => note("mount", &mount.container_path, *first != &mount.host_path),
                None => {
                    mounts.insert(&mount.container_path, &mount.host_path);
                    merged.mounts.push(mount.clone());
                }
            }
        }
        merged.cdi.extend(setup.cdi.iter().filter(|name| cdi.insert(*name)).cloned());
    }
    (merged, conflicts)
}

/// The health of devices of one resource, for `allocatedResourcesStatus`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceHealth {
    /// The resource.
    pub name: String,
    /// Each device, and whether it is healthy.
    pub devices: Vec<(String, bool)>,
}

impl DeviceState {
    /// What the devices of a container mean for it; `None`: it has none.
    #[must_use]
    pub fn container_setup(&self, pod: &PodUid, container: &str) -> Option<(DeviceSetup, Vec<Conflict>)> {
        let holds = self.holds.pod(pod)?.get(container)?;
        let setups = holds.values().filter_map(|hold| match &hold.state {
            HoldState::Granted(granted) => Some(&granted.setup),
            HoldState::Reserved { .. } => None,
        });
        let setups: Vec<&DeviceSetup> = setups.collect();
        if setups.is_empty() { None } else { Some(merge(setups)) }
    }

    /// The health of the devices of a container, in the order of the resources and devices.
    ///
    /// As upstream, a device that is not listed counts as healthy, and so do the devices of a plugin
    /// whose connection has ended, if they were healthy before.
    #[must_use]
    pub fn health(&self, pod: &PodUid, container: &str) -> Vec<ResourceHealth> {
        let holds = self.holds.pod(pod).and_then(|containers| containers.get(container));
        let holds = holds.into_iter().flatten();
        let resource_health = |(resource, hold): (&String, &super::holds::Hold)| {
            let devices = self.resources.get(resource).map(|known| &known.devices);
            let is_healthy =
                |id: &str| devices.and_then(|devices| devices.get(id)).is_none_or(|device| device.is_healthy);
            let devices = hold.devices.keys().map(|id| (id.to_string(), is_healthy(id))).collect();
            ResourceHealth { name: resource.clone(), devices }
        };
        holds.filter(|(_, hold)| !hold.is_reserved()).map(resource_health).collect()
    }
}
