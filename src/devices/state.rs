//! The state: plugins, their devices, and the containers that have them (pure; Go:
//! pkg/kubelet/cm/devicemanager `ManagerImpl`).
//!
//! A pod gets its devices in two steps, because a plugin can be slow and admission must not wait:
//! [`DeviceState::reserve`] chooses devices without a call, and [`DeviceState::next_plugin_call`] with
//! [`DeviceState::grant`] lead from the reservation to the calls of the plugin, which the pod's own thread
//! makes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::choose::{Choice, ChoiceRequest, DeviceIds, Preference, PreferenceRequest, choose};
use super::device::{DeviceId, DeviceList, GrantedDevices, PluginOptions};
use super::error::DeviceError;
use super::holds::{Hold, HoldState, Holds};
use super::requests::{ContainerRequest, Kind, PodRequest};
use crate::model::ids::PodUid;
use crate::model::numa::NumaMask;

/// After this time without its plugin a resource is removed (Go: `endpointStopGracePeriod`).
pub const STOP_GRACE: Duration = Duration::from_secs(5 * 60);
/// How many devices are known at most, of all resources: about 20 MB. The Go kubelet has no limit.
pub const MAX_DEVICES: usize = 200_000;
/// How many resources have a plugin at most. The Go kubelet has no limit.
pub const MAX_RESOURCES: usize = 128;

/// Numbers the connections of plugins, so that the end of an old one does not affect a new one.
pub type Generation = u64;

/// A plugin as the state has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PluginConnection {
    /// It is registered.
    Connected {
        /// Its connection.
        generation: Generation,
        /// What it wants to be called for.
        options: PluginOptions,
    },
    /// Its connection has ended, or it is known from the state file only.
    Stopped {
        /// When.
        since: Instant,
        /// What the plugin wanted to be called for; `None`: it is known from the state file only.
        options: Option<PluginOptions>,
    },
}

impl PluginConnection {
    /// What the plugin wants, or wanted before it ended, to be called for.
    fn options(self) -> Option<PluginOptions> {
        match self {
            PluginConnection::Connected { options, .. } => Some(options),
            PluginConnection::Stopped { options, .. } => options,
        }
    }
}

/// A resource of a device plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resource {
    /// As its plugin last listed them.
    pub devices: DeviceList,
    /// The connection to its plugin, or since when there is none.
    pub endpoint: PluginConnection,
    /// Whether the health in `devices` counts: the list is that of the plugin, which has not ended.
    pub is_alive: bool,
    /// Whether a plugin has listed its devices in this run.
    pub is_listed: bool,
}

impl Resource {
    /// The devices that can be allocated.
    pub fn healthy(&self) -> impl Iterator<Item = &DeviceId> {
        let is_alive = self.is_alive;
        self.devices.iter().filter(move |(_, device)| is_alive && device.is_healthy).map(|(id, _)| id)
    }

    /// Whether this device can be allocated.
    #[must_use]
    pub fn is_healthy(&self, id: &str) -> bool {
        self.is_alive && self.devices.get(id).is_some_and(|device| device.is_healthy)
    }
}

/// Resources for the status of the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Capacity {
    /// All devices by resource.
    pub capacity: BTreeMap<String, u64>,
    /// Healthy devices by resource.
    pub allocatable: BTreeMap<String, u64>,
    /// Resources that were removed; the node shows 0 of them.
    pub removed: BTreeSet<String>,
}

/// What a list of a plugin has changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListChange {
    /// The pods that have a device whose health has changed, or which was not listed before.
    pub pods: BTreeSet<PodUid>,
    /// Whether the list differs from the one before.
    pub is_new: bool,
}

/// What to do next for a container that has a reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextPluginCall {
    /// Ask the plugin which devices it prefers, and pass the response to [`DeviceState::next_plugin_call`].
    GetPreferred(PreferenceRequest),
    /// Call `Allocate` with these devices, and pass the response to [`DeviceState::grant`].
    Allocate(Vec<DeviceId>),
}

/// The state of the device manager.
#[derive(Debug, Clone)]
pub struct DeviceState {
    pub(super) resources: BTreeMap<String, Resource>,
    pub(super) holds: Holds,
    /// The healthy devices that the plugins listed last before this run, from the state file.
    pub(super) before: BTreeMap<String, DeviceIds>,
    /// When this run began.
    pub(super) begun: Instant,
    /// Resources without a plugin that the node still shows, with 0.
    removed: BTreeSet<String>,
    /// The NUMA nodes of the machine.
    pub(super) nodes: Vec<u32>,
}

impl DeviceState {
    /// A state with what the state file has: holds, and the names of healthy devices by resource. These
    /// resources have no devices until their plugins are back.
    #[must_use]
    pub fn new(
        holds: Holds,
        before: BTreeMap<String, DeviceIds>,
        nodes: Vec<u32>,
        now: Instant,
    ) -> DeviceState {
        let stopped = |name: &String| {
            let endpoint = PluginConnection::Stopped { since: now, options: None };
            (
                name.clone(),
                Resource { devices: DeviceList::new(), endpoint, is_alive: false, is_listed: false },
            )
        };
        let resources = before.keys().map(stopped).collect();
        DeviceState { resources, holds, before, begun: now, removed: BTreeSet::new(), nodes }
    }

    /// The resources that have a plugin, or had one until shortly.
    #[must_use]
    pub fn resources(&self) -> &BTreeMap<String, Resource> {
        &self.resources
    }

    /// Which container has which devices.
    #[must_use]
    pub fn holds(&self) -> &Holds {
        &self.holds
    }

    /// A plugin has registered. An earlier one of this resource is replaced.
    ///
    /// DIFFERS: upstream knows a new resource only from the first list of its plugin. Until then the node
    /// does not show it, and a pod that requests it runs without the device.
    ///
    /// # Errors
    /// [`DeviceError::TooMany`].
    pub fn connected(
        &mut self,
        resource: &str,
        generation: Generation,
        options: PluginOptions,
    ) -> Result<(), DeviceError> {
        if !self.resources.contains_key(resource) && self.resources.len() >= MAX_RESOURCES {
            return Err(DeviceError::TooMany(MAX_RESOURCES));
        }
        self.removed.remove(resource);
        let endpoint = PluginConnection::Connected { generation, options };
        // The devices of an earlier plugin are replaced by the first list of this one.
        let entry = self.resources.entry(resource.to_owned());
        entry.and_modify(|known| known.endpoint = endpoint).or_insert_with(|| Resource {
            devices: DeviceList::new(),
            endpoint,
            is_alive: false,
            is_listed: false,
        });
        Ok(())
    }

    /// The connection of a plugin has ended. Its devices stay, but are not healthy any more. Returns
    /// `false` if another plugin has replaced it.
    pub fn stopped(&mut self, resource: &str, generation: Generation, now: Instant) -> bool {
        if !self.is_current(resource, generation) {
            return false;
        }
        if let Some(known) = self.resources.get_mut(resource) {
            let options = known.endpoint.options();
            known.endpoint = PluginConnection::Stopped { since: now, options };
            known.is_alive = false;
        }
        true
    }

    /// Whether this connection is that of the resource's plugin.
    #[must_use]
    pub fn is_current(&self, resource: &str, generation: Generation) -> bool {
        self.active(resource) == Some(generation)
    }

    /// The connection of the resource's plugin, unless that has ended.
    #[must_use]
    pub fn active(&self, resource: &str) -> Option<Generation> {
        match self.resources.get(resource)?.endpoint {
            PluginConnection::Connected { generation, .. } => Some(generation),
            PluginConnection::Stopped { .. } => None,
        }
    }

    /// A plugin has listed its devices. `None`: another plugin has replaced this one.
    ///
    /// Devices above [`MAX_DEVICES`] are left out.
    pub fn listed(
        &mut self,
        resource: &str,
        generation: Generation,
        mut devices: DeviceList,
    ) -> Option<ListChange> {
        if !self.is_current(resource, generation) {
            return None;
        }
        let others = self.resources.iter().filter(|(name, _)| *name != resource);
        let room = MAX_DEVICES.saturating_sub(others.map(|(_, other)| other.devices.len()).sum());
        if let Some(first_without_room) = devices.keys().nth(room).cloned() {
            log::warn!("the plugin of {resource} lists {} devices; {room} are used", devices.len());
            devices.split_off(&first_without_room);
        }
        let known = self.resources.get_mut(resource)?;
        known.is_listed = true;
        let was_alive = std::mem::replace(&mut known.is_alive, true);
        let before = std::mem::replace(&mut known.devices, devices);
        let is_new = !was_alive || before != known.devices;
        let has_changed = |id: &DeviceId| match (before.get(id), known.devices.get(id)) {
            (Some(old), Some(new)) => old.is_healthy != new.is_healthy,
            (None, Some(_)) => true,
            (_, None) => false,
        };
        let holds = self.holds.iter().filter(|(_, _, name, _)| *name == resource);
        let changed = holds.filter(|(_, _, _, hold)| hold.devices.keys().any(has_changed));
        Some(ListChange { pods: changed.map(|(pod, ..)| pod.clone()).collect(), is_new })
    }

    /// The devices for the status of the node. Removes resources whose plugin ended [`STOP_GRACE`]
    /// ago.
    pub fn expire_and_count(&mut self, now: Instant) -> Capacity {
        let is_over = |known: &Resource| match known.endpoint {
            PluginConnection::Connected { .. } => false,
            PluginConnection::Stopped { since, .. } => now.saturating_duration_since(since) >= STOP_GRACE,
        };
        let removed = &mut self.removed;
        self.resources.retain(|name, known| {
            let stays = !is_over(known);
            if !stays && removed.len() < 2 * MAX_RESOURCES {
                removed.insert(name.clone());
            }
            stays
        });
        let all = self.resources.iter();
        let healthy = self.resources.iter();
        Capacity {
            capacity: all.map(|(name, known)| (name.clone(), known.devices.len() as u64)).collect(),
            allocatable: healthy
                .map(|(name, known)| (name.clone(), known.healthy().count() as u64))
                .collect(),
            removed: self.removed.clone(),
        }
    }

    /// When [`DeviceState::expire_and_count`] removes the next resource.
    #[must_use]
    pub fn next_removal(&self) -> Option<Instant> {
        let ends = self.resources.values().filter_map(|known| match known.endpoint {
            PluginConnection::Stopped { since, .. } => Some(since + STOP_GRACE),
            PluginConnection::Connected { .. } => None,
        });
        ends.min()
    }

    /// Whether a limit of this name is for a device plugin: one is registered, was registered, or a
    /// container has its devices.
    ///
    /// DIFFERS: a resource that was registered in the last run stays known until this run ends. In
    /// the Go kubelet a pod that requests it after the five minutes runs without the device.
    #[must_use]
    pub fn is_known(&self, resource: &str) -> bool {
        self.resources.contains_key(resource)
            || self.before.contains_key(resource)
            || self.holds.has_resource(resource)
    }

    /// The limits of a container for which there are devices.
    pub(super) fn device_limits<'a>(&self, request: &'a ContainerRequest) -> Vec<(&'a String, u64)> {
        let limits = request.limits.iter().map(|(name, count)| (name, *count));
        limits.filter(|(name, _)| self.is_known(name)).collect()
    }

    /// Takes the devices back of the pods that are not in use. Returns these pods.
    pub fn release_inactive(&mut self, in_use: &dyn Fn(&PodUid) -> bool) -> Vec<PodUid> {
        self.holds.retain(in_use)
    }

    /// Removes what was reserved for a pod whose devices could not be allocated. Devices that its
    /// plugins have granted stay until the pod is inactive, as upstream.
    pub fn unreserve(&mut self, pod: &PodUid) {
        self.holds.unreserve(pod);
    }

    /// Chooses devices for a container, without the preference of the plugin, and reserves them.
    /// `keeps`: the container was running when the agent started, and not all sources have delivered
    /// their pods, so it has its devices whatever the plugins say.
    ///
    /// # Errors
    /// When there are not enough devices. What was reserved for the pod before stays.
    pub fn reserve(
        &mut self,
        pod: &PodRequest,
        container: &str,
        nodes: Option<NumaMask>,
        keeps: bool,
    ) -> Result<(), DeviceError> {
        let Some(request) = pod.container(container) else { return Ok(()) };
        for (resource, count) in self.device_limits(request) {
            let held = self.holds.get(&pod.uid, container, resource);
            if let Some(hold) = held
                && hold.devices.len() as u64 != count
            {
                return Err(DeviceError::Changed {
                    pod: pod.uid.to_string(),
                    container: container.to_owned(),
                    resource: resource.clone(),
                    from: hold.devices.len(),
                    to: count,
                });
            }
            if keeps {
                continue;
            }
            let Some(known) = self.resources.get(resource) else {
                return Err(match self.before.contains_key(resource) {
                    true => DeviceError::NoneHealthy(resource.clone()),
                    false => DeviceError::Unregistered(resource.clone()),
                });
            };
            if known.healthy().next().is_none() {
                return Err(DeviceError::NoneHealthy(resource.clone()));
            }
            if let Some(hold) = held {
                if !hold.devices.keys().all(|id| known.is_healthy(id)) {
                    return Err(DeviceError::NoLongerHealthy(resource.clone()));
                }
                continue;
            }
            if count == 0 {
                continue;
            }
            let request = ChoiceRequest {
                resource,
                devices: &known.devices,
                in_use: &self.holds.in_use(resource, |_, _, _| true),
                reusable: &self.holds.reusable(pod, container, resource),
                nodes,
                wanted: count,
            };
            if let Choice::Devices(ids) = choose(request, &Preference::Without)? {
                let hold =
                    Hold { devices: with_nodes(ids, &known.devices), state: HoldState::Reserved { nodes } };
                self.holds.insert(&pod.uid, container, resource, hold);
            }
        }
        Ok(())
    }

    /// The resources of a container that are reserved and not granted yet.
    #[must_use]
    pub fn pending_resources(&self, pod: &PodUid, container: &str) -> Vec<String> {
        let holds = self.holds.pod(pod).and_then(|containers| containers.get(container));
        let reserved = holds.into_iter().flatten().filter(|(_, hold)| hold.is_reserved());
        reserved.map(|(resource, _)| resource.clone()).collect()
    }

    /// Chooses the devices of a reservation again, now with the preference of the plugin: `preferred` is
    /// what it named, `None` before it was asked. The containers of a pod are handled in their order.
    ///
    /// # Errors
    /// When the reservation does not exist any more, or there are not enough devices;
    /// [`DeviceError::Stopped`] when the plugin has ended, or is back and has not listed its devices.
    pub fn next_plugin_call(
        &mut self,
        pod: &PodRequest,
        container: &str,
        resource: &str,
        preferred: Option<DeviceIds>,
    ) -> Result<NextPluginCall, DeviceError> {
        let released = || DeviceError::Released(resource.to_owned());
        let hold = self.holds.get(&pod.uid, container, resource).ok_or_else(released)?;
        let HoldState::Reserved { nodes } = hold.state else { return Err(released()) };
        let (old, wanted) = (hold.ids(), hold.devices.len() as u64);
        let known = self.resources.get(resource).ok_or_else(|| DeviceError::NoPlugin(resource.to_owned()))?;
        let stopped = || Err(DeviceError::Stopped(resource.to_owned()));
        let PluginConnection::Connected { options, .. } = known.endpoint else { return stopped() };
        // A plugin that is back may have other devices than those that are known.
        if !known.is_alive {
            return stopped();
        }
        let preference = match preferred {
            Some(names) => Preference::Named(names),
            None if options.preferred => Preference::Unknown,
            None => Preference::Without,
        };
        // The pod's own reservations are free: those of later containers are exchanged below.
        let counts = |uid: &PodUid, _: &str, hold: &Hold| *uid != pod.uid || !hold.is_reserved();
        let request = ChoiceRequest {
            resource,
            devices: &known.devices,
            in_use: &self.holds.in_use(resource, counts),
            reusable: &self.holds.reusable(pod, container, resource),
            nodes,
            wanted,
        };
        let ids = match choose(request, &preference)? {
            Choice::NeedsPreference(request) => return Ok(NextPluginCall::GetPreferred(request)),
            Choice::Devices(ids) => ids,
        };
        let devices = with_nodes(ids.clone(), &known.devices);
        if let Some(hold) = self.holds.get_mut(&pod.uid, container, resource) {
            hold.devices = devices;
        }
        self.exchange(pod, container, resource, &old, &ids);
        Ok(NextPluginCall::Allocate(ids.into_iter().collect()))
    }

    /// The devices that the plugin has to prepare before the container starts; `None`: it does not want
    /// to be called. A plugin that wants to be called and has ended keeps the container from starting,
    /// because its devices are not prepared (Go: pkg/kubelet/cm/devicemanager
    /// `callPreStartContainerIfNeeded`). What a plugin wants is not in the state file: after a start of
    /// the agent it is unknown until the plugin is back, and the container starts without it, as
    /// upstream.
    ///
    /// # Errors
    /// When the resource was removed, the container has none of its devices, or the plugin has ended.
    pub fn pre_start_devices(
        &self,
        pod: &PodUid,
        container: &str,
        resource: &str,
    ) -> Result<Option<DeviceIds>, DeviceError> {
        let known = self.resources.get(resource);
        let known = known.ok_or_else(|| DeviceError::NoEndpoint(resource.to_owned()))?;
        if !known.endpoint.options().is_some_and(|options| options.pre_start) {
            return Ok(None);
        }
        let hold = self.holds.get(pod, container, resource);
        let devices = hold.map(|hold| hold.ids()).ok_or_else(|| DeviceError::NothingAllocated {
            pod: pod.to_string(),
            container: container.to_owned(),
            resource: resource.to_owned(),
        })?;
        match known.endpoint {
            PluginConnection::Connected { .. } => Ok(Some(devices)),
            PluginConnection::Stopped { .. } => {
                Err(DeviceError::PreStart(DeviceError::Stopped(resource.to_owned()).to_string()))
            }
        }
    }

    /// `container` now has `new` in the place of `old`. Later containers of the pod that had reserved
    /// one of the new ones get one of the old ones; those of an init container can be reused.
    fn exchange(
        &mut self,
        pod: &PodRequest,
        container: &str,
        resource: &str,
        old: &DeviceIds,
        new: &DeviceIds,
    ) {
        if pod.container(container).is_none_or(|request| request.kind == Kind::Init) {
            return;
        }
        let other = |uid: &PodUid, name: &str, _: &Hold| *uid != pod.uid || name != container;
        let in_use = self.holds.in_use(resource, other);
        let mut spare: Vec<DeviceId> =
            old.iter().filter(|id| !new.contains(*id) && !in_use.contains(*id)).cloned().collect();
        let devices = self.resources.get(resource).map(|known| &known.devices);
        for request in pod.containers.iter().skip_while(|request| request.container != container).skip(1) {
            let hold = self.holds.get_mut(&pod.uid, &request.container, resource);
            let Some(hold) = hold.filter(|hold| hold.is_reserved()) else { continue };
            let shared: Vec<DeviceId> = hold.devices.keys().filter(|id| new.contains(*id)).cloned().collect();
            for id in shared {
                let Some(other) = spare.pop() else { return };
                hold.devices.remove(&id);
                let nodes = devices.and_then(|devices| devices.get(&other)).map(|device| device.nodes);
                hold.devices.insert(other, nodes.unwrap_or_default());
            }
        }
    }

    /// The plugin has granted a reservation.
    ///
    /// # Errors
    /// When the reservation does not exist any more.
    pub fn grant(
        &mut self,
        pod: &PodUid,
        container: &str,
        resource: &str,
        granted: GrantedDevices,
    ) -> Result<(), DeviceError> {
        match self.holds.get_mut(pod, container, resource) {
            Some(hold) if hold.is_reserved() => {
                hold.state = HoldState::Granted(granted);
                Ok(())
            }
            _ => Err(DeviceError::Released(resource.to_owned())),
        }
    }

    /// The healthy devices by resource, for the state file; of a plugin that is not there, those that it
    /// listed last. Plugins often end before the agent when a machine shuts down, and after the next boot
    /// pods wait for these devices. The Go kubelet reads only the names of the resources.
    #[must_use]
    pub fn healthy_device_ids(&self) -> BTreeMap<String, Vec<DeviceId>> {
        let ids = |(name, known): (&String, &Resource)| {
            let listed = known.devices.iter().filter(|(_, device)| device.is_healthy).map(|(id, _)| id);
            let ids: Vec<DeviceId> = match self.before.get(name) {
                Some(before) if !known.is_listed => before.iter().cloned().collect(),
                _ => listed.cloned().collect(),
            };
            (name.clone(), ids)
        };
        self.resources.iter().map(ids).collect()
    }
}

fn with_nodes(ids: DeviceIds, devices: &DeviceList) -> BTreeMap<DeviceId, NumaMask> {
    ids.into_iter()
        .map(|id| {
            let nodes = devices.get(&id).map(|device| device.nodes).unwrap_or_default();
            (id, nodes)
        })
        .collect()
}
