//! The device manager with its threads and files.
//!
//! Threads: `device/<n>`, one per registered plugin, which waits for the plugin's lists. All methods
//! that call a plugin block the caller, with a deadline and a stop token.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::checkpoint::{RestoredState, decode, encode};
use super::client::{Client, Limits, decode_setup};
use super::device::{DeviceList, DeviceSetup};
use super::error::DeviceError;
use super::hints::DeviceHints;
use super::instances::{END_LIMIT, End, Instances, Plugin, SocketIdentity};
use super::names;
use super::options::ResourceHealth;
use super::requests::PodRequest;
use super::state::{
    Capacity, DeviceState, Generation, ListChange, MAX_DEVICES, NextPluginCall, PluginConnection, Resource,
};
use super::wait::Readiness;
use crate::model::ids::PodUid;
use crate::model::metrics;
use crate::model::numa::NumaMask;
use crate::transport::grpc::{CallError, Kind};
use crate::util::checkpoint_file::CheckpointFile;
use crate::util::clip;
use crate::util::lock::LockExt;
use crate::util::stop::{self, StopSource, StopToken};
use crate::util::threads::{self, OnDeath, Running, Stack};
use crate::util::token_bucket::TokenBucket;

/// Names of resources whose registrations are counted.
const MOST_COUNTED_NAMES: usize = 256;
/// Bytes of such a name: a domain, a slash, and a name.
const MOST_NAME: usize = 253 + 1 + 63;
/// Lists of one connection that are handled at once. A list that comes earlier than the next token
/// waits in the connection.
const LISTS_AT_ONCE: u32 = 20;
/// After them, one in this time.
const LIST_INTERVAL: Duration = Duration::from_secs(1);

/// The settings of the device manager.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the sockets and the state file are, such as `/var/lib/kubelet/device-plugins`.
    pub directory: PathBuf,
    /// The NUMA nodes of the machine.
    pub nodes: Vec<u32>,
    /// How long pods wait for plugins after a start.
    pub wait: Duration,
    /// Time limits of calls.
    pub limits: Limits,
}

/// What a plugin has changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Change {
    /// Pods that have a device whose health has changed.
    pub pods: BTreeSet<PodUid>,
}

/// Called on the thread of a plugin when its devices have changed: the status of the node is
/// outdated, waiting pods can be tried, and the status of the named pods is outdated. It must not
/// block.
pub type OnChange = Box<dyn Fn(&Change) + Send + Sync>;

/// The device manager. Clones share it.
#[derive(Clone)]
pub struct Devices {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Settings,
    state: Mutex<DeviceState>,
    file: Mutex<StateFile>,
    /// Locked before `state`.
    plugins: Mutex<Instances>,
    last_generation: AtomicU64,
    /// See [`RestoreReport::is_new`].
    is_new: bool,
    on_change: OnChange,
    /// Ends registrations; `None` after the stop.
    stop: Mutex<Option<StopSource>>,
    stopped: StopToken,
}

/// The plugin of a resource, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredPlugin {
    /// The resource.
    pub resource: String,
    /// Its socket; `None`: the plugin is gone, or has not been there since the start.
    pub socket: Option<PathBuf>,
    /// When it was registered; if it is gone: when its connection ended.
    pub since: Instant,
}

struct StateFile {
    file: CheckpointFile,
    /// The hash of its content; `None`: it must be written.
    written: Option<u64>,
    /// Whether a write failed, so that it is logged once.
    is_failing: bool,
}

/// What the start has found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RestoreReport {
    /// The state file was not usable; for people.
    pub problem: Option<String>,
    /// There was no state file. Then the node is new, and extended resources that its Node object may
    /// still have are set to 0 at the registration, as upstream
    /// (Go: cm/devicemanager `ShouldResetExtendedResourceCapacity`).
    pub is_new: bool,
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Reads the state file. A damaged one is put aside.
fn restore(file: &CheckpointFile) -> (RestoredState, RestoreReport) {
    let reason = match file.read() {
        Ok(None) => return (RestoredState::default(), RestoreReport { problem: None, is_new: true }),
        Ok(Some(text)) => match decode(&text, decode_setup) {
            Ok(restored) => return (restored, RestoreReport::default()),
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    };
    let path = file.path().display();
    let aside = match file.put_aside(&reason) {
        Ok(aside) => format!("it is now {}", aside.display()),
        Err(error) => format!("it cannot be renamed: {error}"),
    };
    let problem = format!(
        "the state file {path} cannot be used: {reason}; {aside}; the devices of pods that run are not known"
    );
    log::warn!("{problem}");
    (RestoredState::default(), RestoreReport { problem: Some(problem), is_new: false })
}

impl Devices {
    /// Reads the state file. Plugins can be registered then.
    pub fn open(settings: Settings, on_change: OnChange) -> (Devices, RestoreReport) {
        let file = CheckpointFile::new(&settings.directory, names::CHECKPOINT);
        let (restored, found) = restore(&file);
        let state =
            DeviceState::new(restored.holds, restored.registered, settings.nodes.clone(), Instant::now());
        let (stop, stopped) = stop::pair();
        let shared = Shared {
            settings,
            state: Mutex::new(state),
            file: Mutex::new(StateFile { file, written: None, is_failing: false }),
            plugins: Mutex::default(),
            last_generation: AtomicU64::new(0),
            is_new: found.is_new,
            on_change,
            stop: Mutex::new(Some(stop)),
            stopped,
        };
        (Devices { shared: Arc::new(shared) }, found)
    }

    /// Whether there was no state file at the start: see [`RestoreReport::is_new`].
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.shared.is_new
    }

    /// The node is registered. After this a new start finds a state file: it must not reset
    /// resources that a client has added to the node in the meantime.
    // DIFFERS: the Go kubelet writes the file only for the first plugin.
    pub fn registered_node(&self) {
        if self.shared.is_new {
            self.shared.store();
        }
    }

    /// Ends all threads and calls of registrations. The state file stays as it is.
    pub fn stop(&self) {
        drop(self.shared.stop.locked().take());
        let mut plugins = self.shared.plugins.locked().take();
        plugins.iter_mut().for_each(|plugin| plugin.thread.request_stop());
    }

    /// A plugin registers on our socket. Blocks while the plugin is called.
    ///
    /// # Errors
    /// The text for the plugin.
    pub fn register(&self, version: &str, endpoint: &str, resource: &str) -> Result<(), String> {
        // Also a request that is refused below (Go: pkg/kubelet/cm/devicemanager/plugin/v1beta1 `Register`).
        // DIFFERS: upstream has a series for each name that a plugin invents.
        let counted = clip::beginning(resource, MOST_NAME).to_owned();
        metrics::DEVICE_PLUGIN_REGISTRATIONS.inc_limited([counted], MOST_COUNTED_NAMES);
        let checked = names::check_request(version, resource)
            .and_then(|()| names::plugin_socket_path(&self.shared.settings.directory, endpoint));
        checked.and_then(|socket| self.connect(resource, &socket)).inspect_err(|error| {
            let shown: String = resource.chars().take(100).collect();
            log::warn!("a device plugin was refused: {error} resource={shown:?}");
        })
    }

    /// Connects to a plugin whose name is checked. It becomes the active one of its resource; others
    /// that are registered for it stay connected, so that a rolling update has no gap.
    ///
    /// # Errors
    /// When the plugin cannot be called, is connected through this socket already, or is one too many.
    pub fn connect(&self, resource: &str, socket: &Path) -> Result<(), String> {
        let shared = &self.shared;
        let generation = shared.last_generation.fetch_add(1, Ordering::Relaxed) + 1;
        let dial = |error: String| format!("failed to dial device plugin: {error}");
        // Before the connection: a socket that is made again after this is another one.
        let identity = SocketIdentity::read(socket);
        let client = Client::new(resource, socket, shared.settings.limits).map_err(dial)?;
        let options = client.options(&shared.stopped).map_err(|error| match error.kind {
            // The connection is made by the first call.
            Kind::Unavailable => dial(error.to_string()),
            _ => format!("failed to get device plugin options: {error}"),
        })?;
        let occupied = shared.plugins.locked().occupant_end(resource, socket, identity);
        if let Some(ended) = occupied {
            let _ = ended.wait(END_LIMIT);
        }
        let mut outdated = Vec::new();
        let connected = {
            let mut plugins = shared.plugins.locked();
            if shared.stopped.is_stopped() {
                return Err("the agent is stopping".to_owned());
            }
            plugins.check(resource, generation, socket, identity)?;
            let last = {
                let mut state = shared.state.locked();
                let known = state.resources().get(resource).filter(|known| known.is_alive);
                let last = state.active(resource).zip(known.map(|known| known.devices.clone()));
                state.connected(resource, generation, options).map_err(|error| error.to_string())?;
                last
            };
            match self.watch(resource, generation, client.clone()) {
                Ok((thread, ended)) => {
                    let plugin = Plugin {
                        generation,
                        socket: socket.to_owned(),
                        identity,
                        client,
                        thread,
                        ended,
                        since: Instant::now(),
                        options,
                        listed: None,
                        has_listed: false,
                        is_alive: true,
                    };
                    outdated = plugins.add(resource, plugin, last);
                    Ok(())
                }
                Err(error) => {
                    // One that is still connected becomes the active one again.
                    plugins.ended(&mut shared.state.locked(), resource, generation, Instant::now());
                    Err(format!("cannot start a thread: {error}"))
                }
            }
        };
        // Joins their threads, without a lock.
        drop(outdated);
        if connected.is_ok() {
            log::info!("a device plugin is registered resource={resource} socket={}", socket.display());
        }
        connected
    }

    /// How many plugins of the resource are connected.
    #[cfg(test)]
    pub(super) fn connected_plugins(&self, resource: &str) -> usize {
        self.shared.plugins.locked().get(resource).iter().filter(|plugin| plugin.is_alive).count()
    }

    /// The plugins of all resources that are known.
    #[must_use]
    pub fn registered(&self) -> Vec<RegisteredPlugin> {
        let plugins = self.shared.plugins.locked();
        let state = self.shared.state.locked();
        let plugin_of = |(name, known): (&String, &Resource)| {
            let mut all = plugins.get(name).iter();
            let plugin = all.find(|plugin| state.is_current(name, plugin.generation));
            let since = match (known.endpoint, plugin) {
                (_, Some(plugin)) => plugin.since,
                (PluginConnection::Stopped { since, .. }, None) => since,
                (PluginConnection::Connected { .. }, None) => Instant::now(),
            };
            RegisteredPlugin {
                resource: name.clone(),
                socket: plugin.map(|plugin| plugin.socket.clone()),
                since,
            }
        };
        state.resources().iter().map(plugin_of).collect()
    }

    /// The plugin watcher has found that the socket of a plugin is gone.
    pub fn disconnect(&self, resource: &str, socket: &Path) {
        let removed = self.shared.plugins.locked().remove(resource, socket);
        if let Some(plugin) = removed {
            let generation = plugin.generation;
            // Joins its thread, without a lock.
            drop(plugin);
            self.shared.ended(resource, generation);
        }
    }

    /// Starts the thread of a plugin. The token stops when it does not watch the plugin any more.
    fn watch(
        &self,
        resource: &str,
        generation: Generation,
        client: Client,
    ) -> std::io::Result<(Running, StopToken)> {
        let (shared, name) = (self.shared.clone(), resource.to_owned());
        let (at_end, ended_resource) = (self.shared.clone(), resource.to_owned());
        let on_death = OnDeath::Unit(Box::new(move |_| at_end.ended(&ended_resource, generation)));
        let (watching, ended) = stop::pair();
        let thread = threads::spawn(&format!("device/{generation}"), Stack::Small, on_death, move |stop| {
            let _watching = watching;
            if let Err(error) = shared.follow(&name, generation, &client, &stop)
                && !stop.is_stopped()
            {
                log::warn!("listAndWatch ended unexpectedly for device plugin {name} with error: {error}");
            }
        })?;
        Ok((thread, ended))
    }

    /// Whether a pod should wait for plugins that were there before the start. `running`: its
    /// containers that run.
    #[must_use]
    pub fn readiness(&self, pod: &PodRequest, running: &BTreeSet<String>) -> Readiness {
        self.shared.state.locked().readiness(pod, running, self.shared.settings.wait, Instant::now())
    }

    /// Whether the pod has limits for which there are device plugins.
    #[must_use]
    pub fn has_plugin_resources(&self, pod: &PodRequest) -> bool {
        let state = self.shared.state.locked();
        pod.resources().into_iter().any(|name| state.is_known(name))
    }

    /// From which NUMA nodes the devices of a container can come.
    #[must_use]
    pub fn hints(&self, pod: &PodRequest, container: &str) -> DeviceHints {
        self.shared.state.locked().hints(pod, container)
    }

    /// From which NUMA nodes the devices of all containers of a pod can come.
    #[must_use]
    pub fn pod_hints(&self, pod: &PodRequest) -> DeviceHints {
        self.shared.state.locked().pod_hints(pod)
    }

    /// Takes the devices back of the pods that are not in use. All sources have delivered their
    /// pods. Returns whether there were such pods.
    pub fn release_inactive(&self, in_use: &dyn Fn(&PodUid) -> bool) -> bool {
        let gone = self.shared.state.locked().release_inactive(in_use);
        for pod in &gone {
            log::info!("the devices of a pod are free uid={pod}");
        }
        if !gone.is_empty() {
            self.shared.store();
        }
        !gone.is_empty()
    }

    /// Chooses devices for a container at the admission of its pod, without a call. See
    /// [`DeviceState::reserve`].
    ///
    /// # Errors
    /// When there are not enough devices; the reservations of the pod are removed.
    pub fn reserve(
        &self,
        pod: &PodRequest,
        container: &str,
        nodes: Option<NumaMask>,
        keeps: bool,
    ) -> Result<(), DeviceError> {
        let mut state = self.shared.state.locked();
        let reserved = state.reserve(pod, container, nodes, keeps);
        if reserved.is_err() {
            state.unreserve(&pod.uid);
        }
        reserved
    }

    /// Removes the reservations of a pod that was refused for another reason.
    pub fn unreserve(&self, pod: &PodUid) {
        self.shared.state.locked().unreserve(pod);
    }

    /// Has the plugins prepare the devices that were reserved for the pod, container by container.
    /// Without reservations it does nothing.
    ///
    /// # Errors
    /// [`DeviceError::Stopped`] when a plugin has ended before its call: the reservations stay, and the
    /// caller tries again. After any other error the pod cannot run: see [`DeviceError::message`].
    pub fn allocate(&self, pod: &PodRequest, stop: &StopToken) -> Result<(), DeviceError> {
        for request in &pod.containers {
            let reserved = self.shared.state.locked().pending_resources(&pod.uid, &request.container);
            for resource in reserved {
                let allocated = self.allocate_one(pod, &request.container, &resource, stop);
                if matches!(allocated, Err(DeviceError::Stopped(_))) {
                    // Nothing has changed. Many pods can wait, and the text of many devices is long.
                    return allocated;
                }
                if allocated.is_err() {
                    self.unreserve(&pod.uid);
                }
                // Also after a failure: what was granted before must not be lost.
                self.shared.store();
                allocated?;
            }
        }
        Ok(())
    }

    fn allocate_one(
        &self,
        pod: &PodRequest,
        container: &str,
        resource: &str,
        stop: &StopToken,
    ) -> Result<(), DeviceError> {
        let mut preferred = None;
        loop {
            let step =
                self.shared.state.locked().next_plugin_call(pod, container, resource, preferred.take())?;
            let client = self.client(resource)?;
            match step {
                NextPluginCall::GetPreferred(wanted) => preferred = Some(client.preferred(&wanted, stop)?),
                NextPluginCall::Allocate(ids) => {
                    let begun = Instant::now();
                    let granted = client.allocate(&ids, stop);
                    metrics::DEVICE_ALLOCATION.observe_duration([resource.to_owned()], begun.elapsed());
                    return self.shared.state.locked().grant(&pod.uid, container, resource, granted?);
                }
            }
        }
    }

    fn client(&self, resource: &str) -> Result<Client, DeviceError> {
        let plugins = self.shared.plugins.locked();
        let state = self.shared.state.locked();
        match plugins.active(resource, &state) {
            Some(plugin) => Ok(plugin.client.clone()),
            None if state.resources().contains_key(resource) => {
                Err(DeviceError::Stopped(resource.to_owned()))
            }
            None => Err(DeviceError::NoPlugin(resource.to_owned())),
        }
    }

    /// What a container needs that is created now; `None`: it has no devices. Calls the plugins that
    /// want it. A container without devices, which it should have, gets them now if `is_active`.
    ///
    /// # Errors
    /// When a plugin fails. The container cannot be created now.
    pub fn prepare(
        &self,
        pod: &PodRequest,
        container: &str,
        is_active: bool,
        stop: &StopToken,
    ) -> Result<Option<DeviceSetup>, DeviceError> {
        let Some(request) = pod.container(container) else { return Ok(None) };
        let wanted: Vec<String> = {
            let state = self.shared.state.locked();
            let wanted = state.device_limits(request).into_iter().filter(|(_, count)| *count > 0);
            wanted.map(|(resource, _)| resource.clone()).collect()
        };
        let is_missing = {
            let state = self.shared.state.locked();
            wanted.iter().any(|resource| state.holds().get(&pod.uid, container, resource).is_none())
        };
        if is_active {
            if is_missing {
                // DIFFERS: upstream has the hint of the admission, which was made without these devices.
                self.reserve(pod, container, None, false)?;
            }
            // Only a pod that has not started waits for a plugin with its reservations. One that runs would
            // make no other step meanwhile, and fail at the end.
            self.allocate(pod, stop).inspect_err(|_| self.unreserve(&pod.uid))?;
        }
        // DIFFERS: upstream calls it before it allocates missing devices, and fails at each try.
        for resource in &wanted {
            self.pre_start(&pod.uid, container, resource, stop)?;
        }
        let Some((setup, conflicts)) = self.shared.state.locked().container_setup(&pod.uid, container) else {
            return Ok(None);
        };
        for conflict in conflicts {
            log::warn!(
                "two device plugins set the {} {} differently uid={} container={container}",
                conflict.kind,
                conflict.name,
                pod.uid
            );
        }
        Ok(Some(setup))
    }

    fn pre_start(
        &self,
        pod: &PodUid,
        container: &str,
        resource: &str,
        stop: &StopToken,
    ) -> Result<(), DeviceError> {
        let devices = self.shared.state.locked().pre_start_devices(pod, container, resource)?;
        devices.map_or(Ok(()), |devices| self.client(resource)?.pre_start(&devices, stop))
    }

    /// The devices for the status of the node. See [`DeviceState::expire_and_count`].
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        let (capacity, has_changed) = {
            let mut state = self.shared.state.locked();
            let before = state.resources().len();
            let capacity = state.expire_and_count(Instant::now());
            (capacity, state.resources().len() != before)
        };
        if has_changed {
            self.shared.store();
        }
        capacity
    }

    /// When [`Devices::capacity`] changes without a plugin's doing.
    #[must_use]
    pub fn next_removal(&self) -> Option<Instant> {
        self.shared.state.locked().next_removal()
    }

    /// The health of the devices of a container.
    #[must_use]
    pub fn health(&self, pod: &PodUid, container: &str) -> Vec<ResourceHealth> {
        self.shared.state.locked().health(pod, container)
    }

    /// Reads the state, for the pod-resources API and for people. The function must not block.
    pub fn read<T>(&self, read: impl FnOnce(&DeviceState) -> T) -> T {
        read(&self.shared.state.locked())
    }
}

impl Shared {
    /// Passes the lists of a plugin to the state until its stream ends.
    fn follow(
        &self,
        resource: &str,
        generation: Generation,
        client: &Client,
        stop: &StopToken,
    ) -> Result<(), CallError> {
        let mut lists = client.watch()?;
        let mut rate_limit = TokenBucket::new(LISTS_AT_ONCE, LIST_INTERVAL, Instant::now());
        while let Some(list) = lists.next(MAX_DEVICES, stop)? {
            let Some(listed) = self.listed(resource, generation, list) else { return Ok(()) };
            if listed.is_new {
                self.store();
                (self.on_change)(&Change { pods: listed.pods });
            }
            let wait = rate_limit.record(Instant::now());
            if !wait.is_zero() {
                let _ = stop.wait(wait);
            }
        }
        Ok(())
    }

    /// A plugin has listed its devices. `None`: it is not used any more.
    fn listed(&self, resource: &str, generation: Generation, list: DeviceList) -> Option<ListChange> {
        let mut plugins = self.plugins.locked();
        plugins.listed(&mut self.state.locked(), resource, generation, list)
    }

    /// The connection of a plugin has ended. This runs on the plugin's own thread, among others.
    fn ended(&self, resource: &str, generation: Generation) {
        let end = {
            let mut plugins = self.plugins.locked();
            plugins.ended(&mut self.state.locked(), resource, generation, Instant::now())
        };
        let pods = match end {
            None => return,
            Some(End::Last) => {
                log::info!("the connection of a device plugin has ended resource={resource}");
                BTreeSet::new()
            }
            Some(End::Other(pods)) => {
                log::info!(
                    "the connection of a device plugin has ended, and another one is used resource={resource}"
                );
                pods
            }
        };
        self.store();
        (self.on_change)(&Change { pods });
    }

    /// Writes the state file if it is outdated. A failed write is repeated with the next change.
    fn store(&self) {
        let mut state_file = self.file.locked();
        let text = encode(&self.state.locked());
        let new = hash(&text);
        if state_file.written == Some(new) {
            return;
        }
        match state_file.file.write(&text) {
            Ok(()) => (state_file.written, state_file.is_failing) = (Some(new), false),
            Err(error) => {
                if !std::mem::replace(&mut state_file.is_failing, true) {
                    log::warn!("cannot write {}: {error}", state_file.file.path().display());
                }
            }
        }
    }
}
