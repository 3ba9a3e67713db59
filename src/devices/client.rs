//! Calls to one device plugin.

use std::path::Path;
use std::time::Duration;

use super::choose::{DeviceIds, PreferenceRequest};
use super::device::{
    Device, DeviceId, DeviceList, DeviceMount, DeviceNode, DeviceSetup, GrantedDevices, PluginOptions,
};
use super::error::DeviceError;
use crate::model::numa::NumaMask;
use crate::transport::generated::{deviceplugin as pb, from_bytes, methods};
use crate::transport::grpc::{CallError, Channel, ResponseStream};
use crate::util::stop::StopToken;

/// The largest message of a plugin: the default of Go's library, so upstream's limit.
pub(super) const MAX_BYTES: i32 = 4 * 1024 * 1024;
/// The largest answer to `Allocate` for a container, because it is part of the state file.
pub(super) const MAX_RESPONSE_BYTES: usize = 1024 * 1024;
/// The largest name of a device. The Go kubelet has no limit.
pub(super) const MAX_ID_BYTES: usize = 1024;
/// Time limit of `GetDevicePluginOptions`, with the connection: upstream's limit of the latter.
const OPTIONS_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of `GetPreferredAllocation`. Upstream has none.
const PREFERRED_LIMIT: Duration = Duration::from_secs(30);
/// Time limit of `Allocate`. Upstream has none; some plugins program hardware.
const ALLOCATE_LIMIT: Duration = Duration::from_secs(120);
/// Time limit of `PreStartContainer` (Go: `KubeletPreStartContainerRPCTimeoutInSecs`).
const PRE_START_LIMIT: Duration = Duration::from_secs(30);

/// The time limits of calls; tests have shorter ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// `GetDevicePluginOptions`, with the connection.
    pub options: Duration,
    /// `GetPreferredAllocation`.
    pub preferred: Duration,
    /// `Allocate`.
    pub allocate: Duration,
    /// `PreStartContainer`.
    pub pre_start: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            options: OPTIONS_LIMIT,
            preferred: PREFERRED_LIMIT,
            allocate: ALLOCATE_LIMIT,
            pre_start: PRE_START_LIMIT,
        }
    }
}

/// The connection to a plugin. Clones share it.
#[derive(Debug, Clone)]
pub struct Client {
    resource: String,
    channel: Channel,
    limits: Limits,
}

impl Client {
    /// Prepares the connection to the plugin of this resource.
    ///
    /// # Errors
    /// When the path cannot be that of a socket.
    pub(super) fn new(resource: &str, socket: &Path, limits: Limits) -> Result<Client, String> {
        let endpoint = format!("unix://{}", socket.display());
        let channel = Channel::limited(&endpoint, MAX_BYTES).map_err(|error| error.to_string())?;
        Ok(Client { resource: resource.to_owned(), channel, limits })
    }

    /// Whether the connection is open.
    pub(super) fn is_connected(&self) -> bool {
        self.channel.is_connected()
    }

    /// What the plugin wants to be called for.
    ///
    /// # Errors
    /// Those of the call.
    pub fn options(&self, stop: &StopToken) -> Result<PluginOptions, CallError> {
        let limit = Some(self.limits.options);
        let method = &methods::GET_DEVICE_PLUGIN_OPTIONS;
        let response = self.channel.call_with_stop(method, &pb::Empty::default(), limit, stop)?;
        Ok(PluginOptions {
            pre_start: response.pre_start_required,
            preferred: response.get_preferred_allocation_available,
        })
    }

    /// Opens the stream of the plugin's lists.
    ///
    /// # Errors
    /// When the call cannot be started.
    pub fn watch(&self) -> Result<DeviceListStream, CallError> {
        let stream = self.channel.open(&methods::LIST_AND_WATCH, &pb::Empty::default())?;
        Ok(DeviceListStream { resource: self.resource.clone(), stream })
    }

    /// The devices that the plugin prefers.
    ///
    /// # Errors
    /// Those of the call.
    pub fn preferred(&self, wanted: &PreferenceRequest, stop: &StopToken) -> Result<DeviceIds, DeviceError> {
        let names = |ids: &DeviceIds| ids.iter().map(|id| id.to_string()).collect();
        let of_container = pb::ContainerPreferredRequest {
            available: names(&wanted.available),
            must_include: names(&wanted.must_include),
            size: i32::try_from(wanted.size).unwrap_or(i32::MAX),
            ..Default::default()
        };
        let request = pb::PreferredRequest { container_requests: vec![of_container], ..Default::default() };
        let limit = Some(self.limits.preferred);
        let response = self
            .channel
            .call_with_stop(&methods::GET_PREFERRED_ALLOCATION, &request, limit, stop)
            .map_err(|error| DeviceError::Preferred(error.to_string()))?;
        let first = response.container_responses.into_iter().next();
        let names = first.into_iter().flat_map(|container| container.devices);
        // Others cannot be chosen anyway.
        Ok(names.map(DeviceId::from).filter(|id| wanted.available.contains(id)).collect())
    }

    /// Has the plugin prepare these devices for a container.
    ///
    /// # Errors
    /// Those of the call, and unusable answers.
    pub fn allocate(&self, ids: &[DeviceId], stop: &StopToken) -> Result<GrantedDevices, DeviceError> {
        let devices = ids.iter().map(|id| id.to_string()).collect();
        let of_container = pb::ContainerAllocateRequest { devices, ..Default::default() };
        let request = pb::AllocateRequest { container_requests: vec![of_container], ..Default::default() };
        let response = self
            .channel
            .call_with_stop(&methods::ALLOCATE, &request, Some(self.limits.allocate), stop)
            .map_err(|error| DeviceError::Allocate(error.to_string()))?;
        let raw = response.container_responses.into_iter().next().ok_or(DeviceError::NoResponse)?;
        if raw.len() > MAX_RESPONSE_BYTES {
            let (resource, bytes) = (self.resource.clone(), raw.len());
            return Err(DeviceError::Large { resource, bytes, limit: MAX_RESPONSE_BYTES });
        }
        let setup = decode_setup(&raw).ok_or(DeviceError::NoResponse)?;
        Ok(GrantedDevices { setup, raw: raw.into() })
    }

    /// Has the plugin prepare these devices for the start of their container.
    ///
    /// # Errors
    /// Those of the call.
    pub fn pre_start(&self, ids: &DeviceIds, stop: &StopToken) -> Result<(), DeviceError> {
        let devices = ids.iter().map(|id| id.to_string()).collect();
        let request = pb::PreStartRequest { devices, ..Default::default() };
        let limit = Some(self.limits.pre_start);
        let called = self.channel.call_with_stop(&methods::PRE_START_CONTAINER, &request, limit, stop);
        called.map(drop).map_err(|error| DeviceError::PreStart(error.to_string()))
    }
}

/// The lists of a plugin.
pub struct DeviceListStream {
    resource: String,
    stream: ResponseStream<pb::DeviceListResponse>,
}

impl DeviceListStream {
    /// Waits for the next list; `None`: the plugin has ended the stream. A device that cannot be read,
    /// or with an unusable name, is left out.
    ///
    /// # Errors
    /// Those of the call.
    pub fn next(&mut self, limit: usize, stop: &StopToken) -> Result<Option<DeviceList>, CallError> {
        let Some(response) = self.stream.next(stop)? else { return Ok(None) };
        let total = response.devices.len();
        let mut list = DeviceList::new();
        let mut unusable = 0_usize;
        for bytes in response.devices {
            if list.len() >= limit {
                break;
            }
            match from_bytes::<pb::PluginDevice>(&bytes).and_then(device) {
                Some((id, device)) => drop(list.insert(id, device)),
                None => unusable += 1,
            }
        }
        if unusable > 0 || list.len() + unusable < total {
            log::warn!("of {total} devices of {} {} are used", self.resource, list.len());
        }
        Ok(Some(list))
    }
}

fn device(message: pb::PluginDevice) -> Option<(DeviceId, Device)> {
    if message.id.is_empty() || message.id.len() > MAX_ID_BYTES {
        return None;
    }
    let nodes = message.topology.into_option().map(|topology| topology.nodes).unwrap_or_default();
    let numbers = nodes.iter().filter_map(|node| u32::try_from(node.id).ok());
    let device = Device { is_healthy: message.health == "Healthy", nodes: NumaMask::from_numbers(numbers) };
    Some((message.id.into(), device))
}

/// Reads the answer to `Allocate` for one container, also from the state file.
#[must_use]
pub fn decode_setup(raw: &[u8]) -> Option<DeviceSetup> {
    let response: pb::ContainerAllocateResponse = from_bytes(raw)?;
    let mount = |mount: pb::PluginMount| DeviceMount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        read_only: mount.read_only,
    };
    let node = |node: pb::PluginNode| DeviceNode {
        container_path: node.container_path,
        host_path: node.host_path,
        permissions: node.permissions,
    };
    Some(DeviceSetup {
        envs: response.envs,
        mounts: response.mounts.into_iter().map(mount).collect(),
        nodes: response.devices.into_iter().map(node).collect(),
        annotations: response.annotations,
        cdi: response.cdi_devices.into_iter().map(|device| device.name).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::encoding::from_base64;

    #[test]
    fn recorded_response_of_a_plugin_is_read() {
        let raw = "Cg0KB1dJREdFVFMSAmQ0EhsKCy93aWRnZXQtZGlyEgovdXNyL3NoYXJlGAEaHwoOL2Rldi93aWRnZXQtZDQSCS9k\
                   ZXYvbnVsbBoCcnciGQoTZXhhbXBsZS5jb20vd2lkZ2V0cxICZDQ=";
        let found = decode_setup(&from_base64(raw).unwrap()).unwrap();
        assert_eq!(found.envs["WIDGETS"], "d4");
        assert_eq!(found.annotations["example.com/widgets"], "d4");
        let mount = DeviceMount {
            container_path: "/widget-dir".into(),
            host_path: "/usr/share".into(),
            read_only: true,
        };
        assert_eq!(found.mounts, [mount]);
        let node = DeviceNode {
            container_path: "/dev/widget-d4".into(),
            host_path: "/dev/null".into(),
            permissions: "rw".into(),
        };
        assert_eq!(found.nodes, [node]);
        assert_eq!(decode_setup(b""), Some(DeviceSetup::default()));
        assert_eq!(decode_setup(b"\xff\xff"), None);
    }

    #[test]
    fn devices_have_usable_names_and_known_nodes() {
        let read = |id: &str, health: &str, nodes: &[i64]| {
            let nodes = nodes.iter().map(|id| pb::DeviceNumaNode { id: *id, ..Default::default() });
            let topology = pb::DeviceTopology { nodes: nodes.collect(), ..Default::default() };
            device(pb::PluginDevice {
                id: id.into(),
                health: health.into(),
                topology: Some(topology).into(),
                ..Default::default()
            })
        };
        let (id, found) = read("a", "Healthy", &[0, 3, -1, 64, i64::MAX]).unwrap();
        assert_eq!((&*id, found.is_healthy, found.nodes), ("a", true, NumaMask::from_numbers([0, 3])));
        assert!(!read("a", "healthy", &[]).unwrap().1.is_healthy);
        assert_eq!(read("", "Healthy", &[]), None);
        assert_eq!(read(&"x".repeat(MAX_ID_BYTES + 1), "Healthy", &[]), None);
    }
}
