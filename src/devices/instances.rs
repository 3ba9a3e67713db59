//! The connected plugins of all resources. Several can serve one resource, as in a rolling update (Go:
//! pkg/kubelet/cm/devicemanager `endpointStore`).
//!
//! The one that registered last is active: it is called, and its list counts. When it ends, the newest
//! one that is still connected takes its place.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::client::Client;
use super::device::{DeviceList, PluginOptions};
use super::state::{DeviceState, Generation, ListChange, MAX_DEVICES};
use crate::model::ids::PodUid;
use crate::util::stop::StopToken;
use crate::util::threads::Running;

/// How many plugins of one resource are connected at most. The Go kubelet has no limit.
pub(super) const MAX_INSTANCES: usize = 8;
/// How long a registration waits for the end of a plugin that is connected through the same socket: a
/// plugin whose list has ended can register before the end is noticed.
pub(super) const END_LIMIT: Duration = Duration::from_millis(500);

/// What distinguishes a socket from an earlier one of the same path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SocketIdentity {
    device: u64,
    inode: u64,
    /// When it was made, in seconds and nanoseconds, because the kernel uses the number of an inode
    /// again. A socket is not written to.
    modified: (i64, i64),
}

impl SocketIdentity {
    /// `None`: there is no such file.
    pub(super) fn read(path: &Path) -> Option<SocketIdentity> {
        let found = std::fs::symlink_metadata(path).ok()?;
        let modified = (found.mtime(), found.mtime_nsec());
        Some(SocketIdentity { device: found.dev(), inode: found.ino(), modified })
    }
}

pub(super) struct Plugin {
    pub(super) generation: Generation,
    pub(super) socket: PathBuf,
    /// The socket's file when the connection was made.
    pub(super) identity: Option<SocketIdentity>,
    pub(super) client: Client,
    pub(super) thread: Running,
    /// Stops when the plugin is not watched any more.
    pub(super) ended: StopToken,
    /// When it was registered.
    pub(super) since: Instant,
    pub(super) options: PluginOptions,
    /// The devices that it listed last, while another plugin is active.
    pub(super) listed: Option<DeviceList>,
    /// Whether its list is that of the state, if it is active.
    pub(super) has_listed: bool,
    /// Whether its connection has not ended.
    pub(super) is_alive: bool,
}

impl Plugin {
    /// Whether this plugin is connected through this socket. A plugin that has made its socket again is
    /// another one, even if the end of the old connection is not noticed yet. One that has never listed
    /// its devices is of no use, and may try again.
    fn occupies(&self, socket: &Path, identity: Option<SocketIdentity>) -> bool {
        self.socket == socket
            && self.identity == identity
            && self.is_alive
            && self.has_listed
            && !self.ended.is_stopped()
            && self.client.is_connected()
    }
}

/// The plugins by resource, in the order in which they registered. No method drops a plugin, because
/// that waits for its thread, and the callers hold locks.
#[derive(Default)]
pub(super) struct Instances {
    by_resource: BTreeMap<String, Vec<Plugin>>,
}

impl Instances {
    pub(super) fn get(&self, resource: &str) -> &[Plugin] {
        self.by_resource.get(resource).map(Vec::as_slice).unwrap_or_default()
    }

    /// The active plugin of a resource; if it was just removed, the newest other one that is connected.
    pub(super) fn active(&self, resource: &str, state: &DeviceState) -> Option<&Plugin> {
        let all = self.get(resource);
        let active = state.active(resource);
        let newest = || all.iter().rev().find(|plugin| plugin.is_alive);
        all.iter().find(|plugin| Some(plugin.generation) == active).or_else(newest)
    }

    /// The end of the plugin that is connected through this socket.
    pub(super) fn occupant_end(
        &self,
        resource: &str,
        socket: &Path,
        identity: Option<SocketIdentity>,
    ) -> Option<StopToken> {
        let occupant = self.get(resource).iter().find(|plugin| plugin.occupies(socket, identity));
        occupant.map(|plugin| plugin.ended.clone())
    }

    /// Whether a plugin of this connection can be added.
    ///
    /// # Errors
    /// The text for the plugin.
    pub(super) fn check(
        &self,
        resource: &str,
        generation: Generation,
        socket: &Path,
        identity: Option<SocketIdentity>,
    ) -> Result<(), String> {
        let all = self.get(resource);
        if all.iter().any(|plugin| plugin.socket == socket && plugin.generation > generation) {
            return Err("a later registration has replaced this one".to_owned());
        }
        if all.iter().any(|plugin| plugin.occupies(socket, identity)) {
            return Err(format!("device plugin already connected: {}", socket.display()));
        }
        let others = all.iter().filter(|plugin| plugin.is_alive && plugin.socket != socket);
        if others.count() >= MAX_INSTANCES {
            return Err(format!("{MAX_INSTANCES} device plugins of {resource} are connected already"));
        }
        Ok(())
    }

    /// Adds a plugin, which the state has as the active one. `last` are the devices of the one that was
    /// active before. Returns plugins of all resources that have ended or that this one replaces.
    pub(super) fn add(
        &mut self,
        resource: &str,
        plugin: Plugin,
        last: Option<(Generation, DeviceList)>,
    ) -> Vec<Plugin> {
        let all = self.by_resource.entry(resource.to_owned()).or_default();
        let mut outdated: Vec<Plugin> = all.extract_if(.., |old| old.socket == plugin.socket).collect();
        if let Some((generation, devices)) = last
            && let Some(before) = all.iter_mut().find(|before| before.generation == generation)
            && before.has_listed
        {
            before.listed = Some(devices);
        }
        all.push(plugin);
        for all in self.by_resource.values_mut() {
            outdated.extend(all.extract_if(.., |old| !old.is_alive && old.thread.is_finished()));
        }
        self.by_resource.retain(|_, all| !all.is_empty());
        self.limit_lists(resource);
        outdated
    }

    pub(super) fn remove(&mut self, resource: &str, socket: &Path) -> Option<Plugin> {
        let all = self.by_resource.get_mut(resource)?;
        let position = all.iter().position(|plugin| plugin.socket == socket)?;
        let plugin = all.remove(position);
        if all.is_empty() {
            self.by_resource.remove(resource);
        }
        Some(plugin)
    }

    /// Removes all plugins.
    pub(super) fn take(&mut self) -> Vec<Plugin> {
        std::mem::take(&mut self.by_resource).into_values().flatten().collect()
    }

    /// A plugin has listed its devices. `None`: it is not used any more.
    ///
    /// DIFFERS: upstream takes the list of any plugin of the resource. Here the list of another plugin
    /// than the active one counts only until the active one has listed its devices.
    pub(super) fn listed(
        &mut self,
        state: &mut DeviceState,
        resource: &str,
        generation: Generation,
        list: DeviceList,
    ) -> Option<ListChange> {
        let active = state.active(resource);
        let all = self.by_resource.get_mut(resource)?;
        let without_list = all.iter().find(|plugin| Some(plugin.generation) == active && !plugin.has_listed);
        let without_list = without_list.map(|plugin| plugin.generation);
        let plugin = all.iter_mut().find(|plugin| plugin.generation == generation && plugin.is_alive)?;
        plugin.has_listed = true;
        if active == Some(generation) {
            return state.listed(resource, generation, list);
        }
        let change = match without_list {
            Some(active) => state.listed(resource, active, list.clone()),
            None => Some(ListChange::default()),
        };
        plugin.listed = Some(list);
        self.limit_lists(resource);
        change
    }

    /// Removes the lists of plugins of this resource that are not active if all of them are too large
    /// together: if such a plugin becomes active, the devices stay as they are until it lists them.
    fn limit_lists(&mut self, resource: &str) {
        let lists = |all: &[Plugin]| -> usize {
            all.iter().filter_map(|plugin| plugin.listed.as_ref()).map(DeviceList::len).sum()
        };
        if self.by_resource.values().map(|all| lists(all)).sum::<usize>() > MAX_DEVICES {
            for plugin in self.by_resource.get_mut(resource).into_iter().flatten() {
                if plugin.listed.take().is_some() {
                    plugin.has_listed = false;
                }
            }
        }
    }

    /// The connection of a plugin has ended. Returns what that changes; `None`: nothing that counts.
    pub(super) fn ended(
        &mut self,
        state: &mut DeviceState,
        resource: &str,
        generation: Generation,
        now: Instant,
    ) -> Option<End> {
        let all = self.by_resource.get_mut(resource).map(Vec::as_mut_slice).unwrap_or_default();
        if let Some(plugin) = all.iter_mut().find(|plugin| plugin.generation == generation) {
            plugin.is_alive = false;
            plugin.listed = None;
        }
        if !state.is_current(resource, generation) {
            return None;
        }
        for next in all.iter_mut().rev().filter(|plugin| plugin.is_alive) {
            if state.connected(resource, next.generation, next.options).is_ok() {
                let list = next.listed.take();
                let change = list.and_then(|list| state.listed(resource, next.generation, list));
                return Some(End::Other(change.map(|change| change.pods).unwrap_or_default()));
            }
        }
        state.stopped(resource, generation, now).then_some(End::Last)
    }
}

/// What the end of the active plugin means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// Another one is active now; these pods have a device whose health has changed by that.
    Other(BTreeSet<PodUid>),
    /// There is no other one: the devices are not healthy any more.
    Last,
}
