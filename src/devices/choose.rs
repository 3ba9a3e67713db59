//! Which devices a container gets (pure; Go: `devicesToAllocate`, `filterByAffinity`).

use std::collections::BTreeSet;

use super::device::{DeviceId, DeviceList};
use super::error::DeviceError;
use crate::model::numa::NumaMask;

/// A set of devices.
pub type DeviceIds = BTreeSet<DeviceId>;

/// What there is to choose from.
#[derive(Debug, Clone, Copy)]
pub struct ChoiceRequest<'a> {
    /// The name of the resource, for messages.
    pub resource: &'a str,
    /// All devices of the resource.
    pub devices: &'a DeviceList,
    /// Devices that are not free.
    pub in_use: &'a DeviceIds,
    /// Devices of earlier init containers of the pod, which come first.
    pub reusable: &'a DeviceIds,
    /// The NUMA nodes that all resources of the container have in common; `None`: any nodes.
    pub nodes: Option<NumaMask>,
    /// How many devices the container gets.
    pub wanted: u64,
}

/// A question to the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreferenceRequest {
    /// The devices that it can name.
    pub available: DeviceIds,
    /// Those that the container gets in any case.
    pub must_include: DeviceIds,
    /// How many devices the container gets.
    pub size: u64,
}

/// The preference of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Preference {
    /// The plugin has none.
    Without,
    /// It must be asked.
    Unknown,
    /// The devices that it named, which can be any.
    Named(DeviceIds),
}

/// The result of a choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// These devices.
    Devices(DeviceIds),
    /// The plugin's preference is needed first.
    NeedsPreference(PreferenceRequest),
}

/// Free devices by their distance.
struct FreeDevices {
    /// On the nodes of the hint.
    near: DeviceIds,
    /// On other nodes.
    far: DeviceIds,
    /// On no nodes, or there is no hint.
    neutral: DeviceIds,
}

/// Chooses devices: those that can be reused, then those on the nodes of the hint, then others. Among
/// equal ones the plugin's preference decides, then the order of the names.
///
/// # Errors
/// When there are not enough.
pub fn choose(request: ChoiceRequest<'_>, preference: &Preference) -> Result<Choice, DeviceError> {
    let wanted = usize::try_from(request.wanted).unwrap_or(usize::MAX);
    let mut chosen = DeviceIds::new();
    take(&mut chosen, wanted, request.reusable.iter());
    if chosen.len() == wanted {
        return Ok(Choice::Devices(chosen));
    }
    let healthy = request.devices.iter().filter(|(_, device)| device.is_healthy).map(|(id, _)| id);
    let available: DeviceIds =
        healthy.filter(|id| !request.in_use.contains(*id) && !chosen.contains(*id)).cloned().collect();
    let missing = wanted - chosen.len();
    if available.len() < missing {
        return Err(DeviceError::Short {
            resource: request.resource.to_owned(),
            requested: missing as u64,
            available: available.len(),
        });
    }
    let free = by_distance(request, &available);
    let needs_preference = |available: &DeviceIds, chosen: &DeviceIds| {
        Choice::NeedsPreference(PreferenceRequest {
            available: available.union(chosen).cloned().collect(),
            must_include: chosen.clone(),
            size: request.wanted,
        })
    };
    // With enough near ones the plugin chooses among them only, so that the pod stays aligned.
    if missing < free.near.len() {
        match preference {
            Preference::Unknown => return Ok(needs_preference(&free.near, &chosen)),
            Preference::Named(names) => take(&mut chosen, wanted, names.intersection(&free.near)),
            Preference::Without => {}
        }
        take(&mut chosen, wanted, free.near.iter());
        return Ok(Choice::Devices(chosen));
    }
    take(&mut chosen, wanted, free.near.iter());
    if chosen.len() < wanted {
        match preference {
            Preference::Unknown => return Ok(needs_preference(&available, &chosen)),
            Preference::Named(names) => take(&mut chosen, wanted, names.intersection(&available)),
            Preference::Without => {}
        }
        take(&mut chosen, wanted, free.far.iter());
        take(&mut chosen, wanted, free.neutral.iter());
    }
    Ok(Choice::Devices(chosen))
}

/// Adds devices until there are `wanted`.
fn take<'a>(chosen: &mut DeviceIds, wanted: usize, from: impl Iterator<Item = &'a DeviceId>) {
    for id in from {
        if chosen.len() >= wanted {
            return;
        }
        chosen.insert(id.clone());
    }
}

fn by_distance(request: ChoiceRequest<'_>, available: &DeviceIds) -> FreeDevices {
    let mut free = FreeDevices { near: DeviceIds::new(), far: DeviceIds::new(), neutral: DeviceIds::new() };
    let nodes = request.nodes.filter(|_| request.devices.values().any(|device| !device.nodes.is_empty()));
    let Some(nodes) = nodes else {
        free.neutral = available.clone();
        return free;
    };
    for id in available {
        let own = request.devices.get(id).map(|device| device.nodes).unwrap_or_default();
        if own.is_empty() {
            free.neutral.insert(id.clone());
        } else if own.and(nodes).is_empty() {
            free.far.insert(id.clone());
        } else {
            free.near.insert(id.clone());
        }
    }
    free
}
