//! Which container has which devices (pure; Go: `pod_devices.go`).

use std::collections::BTreeMap;

use super::choose::DeviceIds;
use super::device::{DeviceId, GrantedDevices};
use super::requests::{Kind, PodRequest};
use crate::model::ids::PodUid;
use crate::model::numa::NumaMask;

/// The devices of one resource that a container has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    /// The devices, with their NUMA nodes at the time of the allocation.
    pub devices: BTreeMap<DeviceId, NumaMask>,
    /// What the plugin answered.
    pub state: HoldState,
}

/// Whether the plugin knows of an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HoldState {
    /// The pod is admitted, but the plugin was not called yet. The devices can be exchanged.
    Reserved {
        /// The NUMA nodes of the container; `None`: any.
        nodes: Option<NumaMask>,
    },
    /// The plugin has answered.
    Granted(GrantedDevices),
}

impl Hold {
    /// The names of the devices.
    #[must_use]
    pub fn ids(&self) -> DeviceIds {
        self.devices.keys().cloned().collect()
    }

    /// Whether the plugin was not called yet.
    #[must_use]
    pub fn is_reserved(&self) -> bool {
        matches!(self.state, HoldState::Reserved { .. })
    }
}

/// Holds by resource.
pub type ContainerHolds = BTreeMap<String, Hold>;
/// Holds by container and resource.
pub type PodHolds = BTreeMap<String, ContainerHolds>;

/// The holds of all pods.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holds {
    pods: BTreeMap<PodUid, PodHolds>,
}

impl Holds {
    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&PodUid, &String, &String, &Hold)> {
        self.pods.iter().flat_map(|(pod, containers)| {
            containers.iter().flat_map(move |(container, holds)| {
                holds.iter().map(move |(resource, hold)| (pod, container, resource, hold))
            })
        })
    }

    /// The holds of a pod.
    #[must_use]
    pub fn pod(&self, pod: &PodUid) -> Option<&PodHolds> {
        self.pods.get(pod)
    }

    /// The devices of one resource that a container has.
    #[must_use]
    pub fn get(&self, pod: &PodUid, container: &str, resource: &str) -> Option<&Hold> {
        self.pods.get(pod)?.get(container)?.get(resource)
    }

    /// The same, to change it.
    pub fn get_mut(&mut self, pod: &PodUid, container: &str, resource: &str) -> Option<&mut Hold> {
        self.pods.get_mut(pod)?.get_mut(container)?.get_mut(resource)
    }

    /// Adds or replaces a hold.
    pub fn insert(&mut self, pod: &PodUid, container: &str, resource: &str, hold: Hold) {
        let containers = self.pods.entry(pod.clone()).or_default();
        containers.entry(container.to_owned()).or_default().insert(resource.to_owned(), hold);
    }

    /// Whether any container has devices of this resource.
    #[must_use]
    pub fn has_resource(&self, resource: &str) -> bool {
        self.iter().any(|(_, _, name, _)| name == resource)
    }

    /// Removes the pods that are not in use. Returns them.
    pub fn retain(&mut self, in_use: &dyn Fn(&PodUid) -> bool) -> Vec<PodUid> {
        let gone: Vec<PodUid> = self.pods.keys().filter(|uid| !in_use(uid)).cloned().collect();
        self.pods.retain(|uid, _| !gone.contains(uid));
        gone
    }

    /// Removes the reservations of a pod. What the plugins have granted stays.
    pub fn unreserve(&mut self, pod: &PodUid) {
        let Some(containers) = self.pods.get_mut(pod) else { return };
        for holds in containers.values_mut() {
            holds.retain(|_, hold| !hold.is_reserved());
        }
        containers.retain(|_, holds| !holds.is_empty());
        if containers.is_empty() {
            self.pods.remove(pod);
        }
    }

    /// The devices of a resource that containers have for which `counts` holds.
    #[must_use]
    pub fn in_use(&self, resource: &str, counts: impl Fn(&PodUid, &str, &Hold) -> bool) -> DeviceIds {
        let holds = self
            .iter()
            .filter(|(pod, container, name, hold)| *name == resource && counts(pod, container, hold));
        holds.flat_map(|(_, _, _, hold)| hold.devices.keys()).cloned().collect()
    }

    /// The devices of earlier init containers that a container can have as well: those that no
    /// container has that runs at the same time.
    #[must_use]
    pub fn reusable(&self, pod: &PodRequest, container: &str, resource: &str) -> DeviceIds {
        let mut ids = DeviceIds::new();
        for request in pod.containers.iter().take_while(|request| request.container != container) {
            let Some(hold) = self.get(&pod.uid, &request.container, resource) else { continue };
            match request.kind {
                Kind::Init => ids.extend(hold.devices.keys().cloned()),
                Kind::Lasting => ids.retain(|id| !hold.devices.contains_key(id)),
            }
        }
        ids
    }
}
