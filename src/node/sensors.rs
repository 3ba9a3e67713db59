//! The sources of the facts of a status.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::addresses::{AddressError, KernelNetwork, addresses, has_internal};
use super::compose::{Image, NodeStatusInputs, OfflineCondition, largest_images};
use super::conditions::Pressures;
use super::resources::{Reservations, allocatable, capacity};
use super::settings::Settings;
use crate::cri::{CriError, ImageClient, RuntimeClient};
use crate::devices::Capacity;
use crate::kube::certificates::Certificates;
use crate::model::api::{ContainerImage, NodeAddress};
use crate::model::node::Allocatable;
use crate::observe::Observe;
use crate::resources::disk;
use crate::resources::machine::Machine;
use crate::resources::system::SystemFacts;
use crate::util::stop::StopToken;

/// The maximum age of the images in a status: that of the list of pods on an idle node.
const IMAGES_AGE: Duration = Duration::from_secs(60);
/// The wait before the next request to a runtime that did not respond.
const IMAGES_RETRY: Duration = Duration::from_secs(5);
/// The deadline of the request: the status waits for the response.
const IMAGES_LIMIT: Duration = Duration::from_secs(10);

/// The inputs of the `node` thread, and the address ranges that it passes on.
pub trait Sensors {
    /// Calls in progress end immediately when `stop` is stopped.
    fn end_with(&mut self, stop: &StopToken);
    /// Reads all facts for one status.
    fn facts(&mut self) -> NodeStatusInputs;
    /// The node's addresses; `known` are those that it had.
    ///
    /// # Errors
    /// Why there are none; the object then keeps its own.
    fn addresses(&self, settings: &Settings, known: &[NodeAddress])
    -> Result<Vec<NodeAddress>, AddressError>;
    /// Whether the machine has one of these internal addresses now.
    fn has_internal(&self, known: &[NodeAddress]) -> bool;
    /// The volumes in use of the facts with this number are stored in the object, which has these.
    fn volumes_stored(&self, number: u64, stored: &BTreeSet<String>);
    /// The cluster gave this node address ranges for its pods.
    ///
    /// # Errors
    /// Why the runtime did not get them; they are sent again later.
    fn set_pod_cidrs(&self, cidrs: &str) -> Result<(), CriError>;
    /// The Node object was created, or this is the first status of an object that another client has
    /// created: it lacks what other rooms write to it only once. Must not wait for the API server.
    fn registered(&self);
}

/// Facts that other rooms may add to a status; empty by default.
#[derive(Clone, Default)]
pub struct ExternalFacts {
    /// The resources that the node is short of.
    pub pressures: Option<Arc<dyn Fn() -> Pressures + Send + Sync>>,
    /// More reasons for not being ready.
    pub problems: Option<Arc<dyn Fn() -> Vec<String> + Send + Sync>>,
    /// Attachable volumes in use.
    pub volumes_in_use: Option<Arc<dyn VolumesInUse>>,
    /// The devices of plugins.
    pub devices: Option<Arc<dyn Fn() -> Capacity + Send + Sync>>,
    /// See [`Sensors::registered`].
    pub registered: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Soft requirements that are not met.
    pub warnings: Vec<String>,
    /// What `--offline` does.
    pub offline: Option<ReadOffline>,
}

/// See [`ExternalFacts::offline`].
pub type ReadOffline = Arc<dyn Fn() -> Option<OfflineCondition> + Send + Sync>;

/// The volumes that controllers must not detach from this node.
pub trait VolumesInUse: Send + Sync {
    /// Their names, for a request, and the number of this list. Each list has a greater number.
    fn list(&self) -> (u64, Vec<String>);
    /// The request with this list was successful, or had nothing to write while no earlier request was
    /// open. `stored`: the list in the object.
    fn stored(&self, number: u64, stored: &BTreeSet<String>);
}

/// Adds devices to the capacity and to what pods may use. Of a resource without a plugin there are 0.
fn add_devices(devices: Capacity, capacity: &mut Allocatable, allocatable: &mut Allocatable) {
    let signed = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    for name in devices.removed {
        capacity.extended.insert(name.clone(), 0);
        allocatable.extended.insert(name, 0);
    }
    capacity.extended.extend(devices.capacity.into_iter().map(|(name, count)| (name, signed(count))));
    allocatable.extended.extend(devices.allocatable.into_iter().map(|(name, count)| (name, signed(count))));
}

/// The real machine and runtime.
pub struct Host {
    /// Read once at the start.
    pub machine: Machine,
    /// Read once at the start.
    pub system: SystemFacts,
    /// A path on the file system whose size is reported; `None`: no local storage is reported.
    pub disk: Option<PathBuf>,
    /// `maxPods`.
    pub max_pods: i32,
    /// `podsPerCore`.
    pub pods_per_core: i32,
    /// The resources that pods may not use.
    pub reservations: Reservations,
    /// `nodeStatusMaxImages`; `None` for all.
    pub max_images: Option<usize>,
    /// The runtime's health, version and features.
    pub observe: Observe,
    /// Lists the images.
    pub images: ImageClient,
    /// Gets the pod address ranges.
    pub cri: RuntimeClient,
    /// From other rooms.
    pub others: ExternalFacts,
    /// The images that were reported last, and when they are listed again.
    pub listed: ListedImages,
    /// Gets the node's addresses, which its serving certificate must contain.
    pub certificates: Option<Certificates>,
}

/// The last list of images.
#[derive(Default)]
pub struct ListedImages {
    images: Option<Vec<ContainerImage>>,
    again: Option<Instant>,
}

impl Sensors for Host {
    fn end_with(&mut self, stop: &StopToken) {
        self.images = self.images.with_stop(stop.clone()).with_request_timeout(IMAGES_LIMIT);
        self.cri = self.cri.with_stop(stop.clone());
    }

    fn facts(&mut self) -> NodeStatusInputs {
        let disk = self.disk.as_deref().and_then(|path| disk::space(&disk::nearest_existing(path)).ok());
        let mut all = capacity(
            &self.machine,
            disk.map(|space| space.capacity_bytes),
            self.max_pods,
            self.pods_per_core,
        );
        let mut left = allocatable(&all, &self.reservations);
        if let Some(devices) = &self.others.devices {
            add_devices(devices(), &mut all, &mut left);
        }
        let volumes = self.others.volumes_in_use.as_ref().map(|volumes| volumes.list());
        NodeStatusInputs {
            settled: self.observe.runtime_features().is_some() && self.observe.last_relist().is_some(),
            allocatable: left,
            capacity: Some(all),
            system: self.system.clone(),
            runtime_version: self
                .observe
                .known_runtime_version()
                .map(|known| format!("{}://{}", known.runtime_name, known.runtime_version)),
            handlers: self.observe.runtime_handlers().to_vec(),
            features: self.observe.runtime_features(),
            health: self.observe.runtime_health(),
            images: self.images(Instant::now()),
            pressures: self.others.pressures.as_ref().map(|read| read()).unwrap_or_default(),
            volumes_in_use: volumes.as_ref().map(|(_, names)| names.clone()),
            volumes_number: volumes.map_or(0, |(number, _)| number),
            problems: self.others.problems.as_ref().map(|read| read()).unwrap_or_default(),
            warnings: self.others.warnings.clone(),
            offline: self.others.offline.as_ref().and_then(|read| read()),
        }
    }

    fn addresses(
        &self,
        settings: &Settings,
        known: &[NodeAddress],
    ) -> Result<Vec<NodeAddress>, AddressError> {
        let found =
            addresses(&settings.name, &settings.node_ips, settings.external_cloud, known, &KernelNetwork);
        if let (Some(certificates), Ok(found)) = (&self.certificates, &found) {
            certificates.set_addresses(found);
        }
        found
    }

    fn has_internal(&self, known: &[NodeAddress]) -> bool {
        has_internal(known, &KernelNetwork)
    }

    fn volumes_stored(&self, number: u64, stored: &BTreeSet<String>) {
        if let Some(volumes) = &self.others.volumes_in_use {
            volumes.stored(number, stored);
        }
    }

    fn set_pod_cidrs(&self, cidrs: &str) -> Result<(), CriError> {
        self.cri.update_runtime_config(cidrs)
    }

    fn registered(&self) {
        if let Some(registered) = &self.others.registered {
            registered();
        }
    }
}

impl Host {
    fn images(&mut self, now: Instant) -> Option<Vec<ContainerImage>> {
        // An unusable runtime must not delay the report of its state.
        let well = self.observe.runtime_health().is_usable();
        if well && self.listed.again.is_none_or(|again| now >= again) {
            let wait = match self.images.list_images() {
                Ok(images) => {
                    let images = images
                        .into_iter()
                        .map(|image| Image {
                            id: image.id,
                            digests: image.repo_digests,
                            tags: image.repo_tags,
                            size_bytes: i64::try_from(image.size).unwrap_or(i64::MAX),
                        })
                        .collect();
                    self.listed.images = Some(largest_images(images, self.max_images));
                    IMAGES_AGE
                }
                // The client has logged it; the object keeps its list.
                Err(_) => IMAGES_RETRY,
            };
            self.listed.again = Some(now + wait);
        }
        self.listed.images.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn devices_are_added_and_those_without_a_plugin_are_zero() {
        let (mut all, mut left) = (Allocatable::default(), Allocatable::default());
        let devices = Capacity {
            capacity: BTreeMap::from([("a/b".to_owned(), 4)]),
            allocatable: BTreeMap::from([("a/b".to_owned(), 3)]),
            removed: BTreeSet::from(["a/gone".to_owned()]),
        };
        add_devices(devices, &mut all, &mut left);
        let counts = |map: &Allocatable| (map.extended["a/b"], map.extended["a/gone"]);
        assert_eq!((counts(&all), counts(&left)), ((4, 0), (3, 0)));
    }
}
