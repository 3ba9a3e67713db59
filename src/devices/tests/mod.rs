//! Tests of the state, against the recorded conversations and with random events.

mod allocation;
mod faults;
mod life;
mod matrix;
mod random;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::*;
use crate::model::ids::PodUid;
use crate::model::numa::NumaMask;

pub(super) const WIDGET: &str = "example.com/widget";

/// A container: name, kind, count of widgets.
pub(super) fn request(container: &str, kind: Kind, count: u64) -> ContainerRequest {
    let limits = BTreeMap::from([(WIDGET.to_owned(), count), ("other.com/thing".to_owned(), 1)]);
    ContainerRequest { container: container.to_owned(), kind, limits }
}

pub(super) fn pod(uid: &str, containers: &[(&str, Kind, u64)]) -> PodRequest {
    PodRequest {
        uid: PodUid::from(uid),
        containers: containers.iter().map(|(name, kind, count)| request(name, *kind, *count)).collect(),
    }
}

pub(super) fn simple_pod(uid: &str, count: u64) -> PodRequest {
    pod(uid, &[("main", Kind::Lasting, count)])
}

pub(super) fn ids(names: &[&str]) -> DeviceIds {
    names.iter().map(|name| DeviceId::from(*name)).collect()
}

/// A list: name, health, NUMA nodes.
pub(super) fn list(devices: &[(&str, bool, &[u32])]) -> DeviceList {
    let device = |(name, is_healthy, nodes): &(&str, bool, &[u32])| {
        let nodes = NumaMask::from_numbers(nodes.iter().copied());
        (DeviceId::from(*name), Device { is_healthy: *is_healthy, nodes })
    };
    devices.iter().map(device).collect()
}

pub(super) fn four() -> DeviceList {
    list(&[("d1", true, &[0]), ("d2", true, &[0]), ("d3", true, &[0]), ("d4", true, &[0])])
}

pub(super) fn state_with(options: PluginOptions, devices: DeviceList) -> DeviceState {
    let mut state = DeviceState::new(Holds::default(), BTreeMap::new(), vec![0, 1], Instant::now());
    state.connected(WIDGET, 1, options).unwrap();
    state.listed(WIDGET, 1, devices).unwrap();
    state
}

pub(super) const ALL_OPTIONS: PluginOptions = PluginOptions { pre_start: true, preferred: true };

/// Allocates for all containers, with a plugin that prefers the last devices. Returns its calls.
pub(super) fn allocate(state: &mut DeviceState, pod: &PodRequest) -> Result<Vec<String>, DeviceError> {
    for request in &pod.containers {
        state.reserve(pod, &request.container, None, false)?;
    }
    finish(state, pod)
}

pub(super) fn finish(state: &mut DeviceState, pod: &PodRequest) -> Result<Vec<String>, DeviceError> {
    let mut calls = Vec::new();
    let text = |ids: &mut dyn Iterator<Item = &DeviceId>| -> String {
        ids.map(|id| &**id).collect::<Vec<_>>().join(",")
    };
    for request in &pod.containers {
        for resource in state.pending_resources(&pod.uid, &request.container) {
            let mut preferred = None;
            loop {
                match state.next_plugin_call(pod, &request.container, &resource, preferred.take())? {
                    NextPluginCall::GetPreferred(wanted) => {
                        let must = text(&mut wanted.must_include.iter());
                        calls.push(format!(
                            "prefer {} of {} with {must}",
                            wanted.size,
                            text(&mut wanted.available.iter())
                        ));
                        let size = usize::try_from(wanted.size).unwrap();
                        preferred = Some(wanted.available.iter().rev().take(size).cloned().collect());
                    }
                    NextPluginCall::Allocate(ids) => {
                        calls.push(format!("allocate {}", text(&mut ids.iter())));
                        let granted = GrantedDevices { setup: DeviceSetup::default(), raw: [1].into() };
                        state.grant(&pod.uid, &request.container, &resource, granted)?;
                        break;
                    }
                }
            }
        }
    }
    Ok(calls)
}

pub(super) fn held(state: &DeviceState, uid: &str, container: &str) -> Vec<String> {
    let hold = state.holds().get(&PodUid::from(uid), container, WIDGET);
    hold.map(|hold| hold.devices.keys().map(|id| id.to_string()).collect()).unwrap_or_default()
}

pub(super) fn running(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}
