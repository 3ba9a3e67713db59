//! Makes the documents of what pods hold: volumes, devices, resource claims; and the plugins.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};

use super::handles::Handles;
use crate::claims::info::ClaimInfo;
use crate::devices::{DeviceState, RegisteredPlugin};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::plugins;
use crate::server::{ClaimRow, DeviceRow, DevicesReply, MOST_ROWS, PluginRow, VolumeRow, VolumesReply, clip};
use crate::sync::view::Snapshot;
use crate::volumes::{VolumeState, VolumeStatus};

/// The names of a pod: namespace and name, or nothing and the UID.
type PodName = (String, String);

/// The known pods by UID.
struct PodNames(HashMap<PodUid, PodName>);

impl PodNames {
    fn new(snapshot: &Snapshot) -> PodNames {
        let name =
            |(uid, pod): (&PodUid, &Pod)| (uid.clone(), (pod.namespace().to_owned(), pod.name().to_owned()));
        let pods = snapshot.pods.iter().filter_map(|(uid, entry)| Some((uid, entry.any_pod()?)));
        PodNames(pods.map(name).collect())
    }

    fn get(&self, uid: &PodUid) -> PodName {
        self.0.get(uid).cloned().unwrap_or_else(|| (String::new(), uid.to_string()))
    }

    /// `namespace/name`, or the UID.
    fn text(&self, uid: &PodUid) -> String {
        match self.get(uid) {
            (namespace, uid) if namespace.is_empty() => uid,
            (namespace, name) => format!("{namespace}/{name}"),
        }
    }
}

fn ago(passed: Duration) -> Timestamp {
    let now = Timestamp::now();
    SignedDuration::try_from(passed).ok().and_then(|passed| now.checked_sub(passed).ok()).unwrap_or(now)
}

impl Handles {
    /// `namespace/name` of a pod, or its UID.
    pub(super) fn pod_text(&self, uid: &PodUid) -> String {
        let snapshot = self.view.get();
        let pod = snapshot.pods.get(uid).and_then(|entry| entry.any_pod());
        pod.map_or_else(|| uid.to_string(), |pod| format!("{}/{}", pod.namespace(), pod.name()))
    }

    /// The volumes of a pod, or of all pods.
    pub(super) fn volume_rows(&self, only: Option<&PodUid>) -> VolumesReply {
        let snapshot = self.view.get();
        let names = PodNames::new(&snapshot);
        let mut uids: BTreeSet<PodUid> = self.volumes.pods_with_volumes().into_iter().collect();
        uids.extend(snapshot.pods.keys().cloned());
        uids.retain(|uid| only.is_none_or(|only| only == uid));
        let mut volumes = Vec::new();
        for uid in &uids {
            let entry = snapshot.pods.get(uid);
            let pod = entry.filter(|entry| !entry.rejected).and_then(|entry| entry.any_pod());
            let has_ended = entry
                .and_then(|entry| entry.worker.as_ref())
                .is_some_and(|worker| worker.report().has_stopped());
            let shown = self.volumes.volume_statuses(uid, pod).into_iter();
            let name = names.get(uid);
            volumes.extend(
                shown
                    .filter(|volume| volume.state.is_some() || !has_ended)
                    .map(|volume| volume_row(&name, volume)),
            );
        }
        let omitted = limit(&mut volumes);
        volumes.sort_by(|a: &VolumeRow, b| {
            (&a.namespace, &a.pod, &a.volume).cmp(&(&b.namespace, &b.pod, &b.volume))
        });
        VolumesReply { volumes, omitted }
    }

    /// The devices and claims of a pod, or of all pods; then also the plugins.
    pub(super) fn device_rows(&self, only: Option<&PodUid>) -> DevicesReply {
        let names = PodNames::new(&self.view.get());
        let mut devices = self.devices.read(|state| device_rows(state, &names, only));
        let mut claims = claim_rows(self.claims.list(), &names, only);
        let mut plugins = match only {
            None => plugin_rows(self.plugins.list(), self.devices.registered()),
            Some(_) => Vec::new(),
        };
        // Those that are in use are not left out.
        devices.sort_by_key(|row| row.users.is_empty());
        let omitted = limit(&mut devices) + limit(&mut claims) + limit(&mut plugins);
        devices.sort_by(|a, b| (&a.resource, &a.device).cmp(&(&b.resource, &b.device)));
        DevicesReply { devices, claims, plugins, omitted }
    }
}

/// Limits a list; returns how many rows are left out.
fn limit<T>(rows: &mut Vec<T>) -> usize {
    let omitted = rows.len().saturating_sub(MOST_ROWS);
    rows.truncate(MOST_ROWS);
    omitted
}

fn volume_row((namespace, pod): &PodName, shown: VolumeStatus) -> VolumeRow {
    let state = match shown.state {
        None => "waiting",
        Some(VolumeState::SettingUp) => "being set up",
        Some(VolumeState::Mounted) => "mounted",
        Some(VolumeState::Failed) => "failed",
        Some(VolumeState::Unmounting) => "being unmounted",
        Some(VolumeState::Stuck) => "cannot be unmounted",
        Some(VolumeState::Unmounted) => "unmounted",
    };
    VolumeRow {
        namespace: namespace.clone(),
        pod: pod.clone(),
        volume: shown.volume,
        kind: clip(&shown.kind),
        state: state.to_owned(),
        error: shown.error.as_deref().map(clip),
        since: shown.since.map(ago),
    }
}

/// The devices that plugins list, and those that containers have although no plugin lists them.
fn device_rows(state: &DeviceState, names: &PodNames, only: Option<&PodUid>) -> Vec<DeviceRow> {
    let mut users: BTreeMap<(&str, &str), Vec<(&PodUid, &str)>> = BTreeMap::new();
    for (pod, container, resource, hold) in state.holds().iter() {
        for device in hold.devices.keys() {
            users.entry((resource, device)).or_default().push((pod, container));
        }
    }
    let mut rows: BTreeMap<(&str, &str), DeviceRow> = BTreeMap::new();
    for (resource, known) in state.resources() {
        for (id, device) in &known.devices {
            if rows.len() > 2 * MOST_ROWS && !users.contains_key(&(resource.as_str(), &**id)) {
                continue;
            }
            let health = match (known.is_alive, device.is_healthy) {
                (true, true) => "Healthy",
                (true, false) => "Unhealthy",
                (false, _) => "Unknown",
            };
            let numa = device.nodes.iter().collect();
            let row = DeviceRow { health: health.to_owned(), numa, ..DeviceRow::default() };
            rows.insert((resource, id), row);
        }
    }
    for (key, holders) in users {
        let unlisted = || DeviceRow { health: "Unknown".to_owned(), ..DeviceRow::default() };
        let row = rows.entry(key).or_insert_with(unlisted);
        let is_wanted = |uid: &PodUid| only.is_none_or(|only| only == uid);
        let holders = holders.into_iter().filter(|(uid, _)| is_wanted(uid));
        row.users = holders.map(|(uid, container)| format!("{}/{container}", names.text(uid))).collect();
    }
    let named = rows.into_iter().filter(|(_, row)| only.is_none() || !row.users.is_empty());
    let name = |((resource, device), row): ((&str, &str), DeviceRow)| DeviceRow {
        resource: clip(resource),
        device: clip(device),
        ..row
    };
    named.map(name).collect()
}

fn claim_rows(claims: Vec<ClaimInfo>, names: &PodNames, only: Option<&PodUid>) -> Vec<ClaimRow> {
    let mut rows = Vec::new();
    for claim in claims {
        if only.is_some_and(|only| !claim.pods.contains(only)) {
            continue;
        }
        let bare = ClaimRow {
            namespace: claim.id.key.namespace,
            claim: claim.id.key.name,
            prepared: claim.prepared,
            pods: claim.pods.iter().map(|uid| names.get(uid).1).collect(),
            ..ClaimRow::default()
        };
        if claim.drivers.is_empty() {
            rows.push(bare.clone());
        }
        for (driver, devices) in claim.drivers {
            let of_driver = ClaimRow { driver: clip(&driver), ..bare.clone() };
            if devices.is_empty() {
                rows.push(of_driver.clone());
            }
            rows.extend(devices.iter().map(|device| ClaimRow {
                pool: clip(&device.pool),
                device: clip(&device.name),
                ..of_driver.clone()
            }));
        }
    }
    rows
}

/// The plugins of the directory, and the device plugins that registered on our own socket.
fn plugin_rows(listed: Vec<plugins::SocketStatus>, registered: Vec<RegisteredPlugin>) -> Vec<PluginRow> {
    let now = Instant::now();
    let since = |time: Instant| ago(now.saturating_duration_since(time));
    let watched = |name: &str| {
        let mut all = listed.iter().filter_map(|entry| entry.plugin.as_ref());
        all.any(|plugin| plugin.kind == plugins::DEVICE && plugin.name == name)
    };
    let own = registered.iter().filter(|plugin| !watched(&plugin.resource)).map(|plugin| PluginRow {
        name: clip(&plugin.resource),
        kind: plugins::DEVICE.to_owned(),
        socket: plugin.socket.as_ref().map(|path| clip(&path.to_string_lossy())).unwrap_or_default(),
        registered: plugin.socket.is_some(),
        since: Some(since(plugin.since)),
        error: plugin.socket.is_none().then(|| "the plugin is not connected".to_owned()),
    });
    let mut rows: Vec<PluginRow> = own.collect();
    rows.extend(listed.iter().map(|entry| PluginRow {
        name: entry.plugin.as_ref().map(|plugin| clip(&plugin.name)).unwrap_or_default(),
        kind: entry.plugin.as_ref().map(|plugin| clip(&plugin.kind)).unwrap_or_default(),
        socket: clip(&entry.socket.to_string_lossy()),
        registered: entry.plugin.is_some(),
        since: entry.since.map(since),
        error: entry.error.as_deref().map(clip),
    }));
    rows.sort_by(|a, b| (&a.kind, &a.name, &a.socket).cmp(&(&b.kind, &b.name, &b.socket)));
    rows
}

#[cfg(test)]
#[path = "holdings_tests.rs"]
mod tests;
