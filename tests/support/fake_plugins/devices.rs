//! A device plugin. It registers with each agent that opens its socket.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coracle::transport::generated::{deviceplugin as pb, methods, to_bytes};
use coracle::transport::grpc::Channel;
use coracle::transport::rpc_server::{RpcError, Service};
use coracle::util::stop::{StopToken, Waited};

use super::{DEVICES, Plugin, RESOURCE, Shared, VARIABLE, unary};

/// Between two polls of a stream.
const PERIOD: Duration = Duration::from_millis(100);
/// A registration contains a call of the plugin, which has 10 s.
const LIMIT: Duration = Duration::from_secs(30);

/// What the plugin knows of its devices. It does not hear when they are free.
#[derive(Debug, Default)]
pub(super) struct Allocations {
    allocated: BTreeSet<Vec<String>>,
    /// The agent does not follow the list any more.
    is_lost: bool,
}

pub(super) fn take_lost(shared: &Shared) -> bool {
    std::mem::take(&mut shared.state.lock().unwrap().devices.is_lost)
}

pub(super) fn agent_socket(shared: &Shared) -> PathBuf {
    shared.root.join("device-plugins/kubelet.sock")
}

/// Registers; `false`: it is to be tried again.
pub(super) fn register(shared: &Shared, stop: &StopToken) -> bool {
    let Ok(channel) = Channel::new(&format!("unix://{}", agent_socket(shared).display())) else {
        return false;
    };
    let request = pb::RegisterRequest {
        version: "v1beta1".to_owned(),
        endpoint: "widgets.sock".to_owned(),
        resource_name: RESOURCE.to_owned(),
        ..Default::default()
    };
    channel.call_with_stop(&methods::REGISTER, &request, Some(LIMIT), stop).is_ok()
}

fn ids() -> impl Iterator<Item = String> {
    (0..DEVICES).map(|number| format!("w{number}"))
}

fn list() -> pb::DeviceListResponse {
    let device = |id| pb::PluginDevice { id, health: "Healthy".to_owned(), ..Default::default() };
    pb::DeviceListResponse { devices: ids().map(|id| to_bytes(&device(id))).collect(), ..Default::default() }
}

fn sorted(ids: &[String]) -> Vec<String> {
    let mut ids = ids.to_vec();
    ids.sort();
    ids
}

/// The devices of the one container of a request.
fn allocate(shared: &Shared, request: &pb::AllocateRequest) -> Result<pb::AllocateResponse, RpcError> {
    let ids: Vec<String> =
        request.container_requests.iter().flat_map(|container| container.devices.clone()).collect();
    let different: BTreeSet<&String> = ids.iter().collect();
    if ids.is_empty()
        || different.len() != ids.len()
        || !different.iter().all(|id| self::ids().any(|known| known == **id))
    {
        shared.violation(format!("the devices {ids:?} are allocated"));
    }
    let mut container = pb::ContainerAllocateResponse::default();
    container.envs.insert(VARIABLE.to_owned(), sorted(&ids).join(","));
    shared.state.lock().unwrap().devices.allocated.insert(sorted(&ids));
    Ok(pb::AllocateResponse { container_responses: vec![to_bytes(&container)], ..Default::default() })
}

fn prefer(request: &pb::PreferredRequest) -> pb::PreferredResponse {
    let preferred = |container: &pb::ContainerPreferredRequest| {
        let mut devices = container.must_include.clone();
        // Not the first ones, which the agent would take without a question.
        devices.extend(
            container.available.iter().rev().filter(|id| !container.must_include.contains(id)).cloned(),
        );
        devices.truncate(usize::try_from(container.size).unwrap_or_default());
        pb::ContainerPreferredResponse { devices, ..Default::default() }
    };
    let container_responses = request.container_requests.iter().map(preferred).collect();
    pb::PreferredResponse { container_responses, ..Default::default() }
}

pub(super) fn service(shared: &Arc<Shared>) -> Service {
    let call = |name: &'static str| (Plugin::Devices, name);
    let method = &methods::GET_DEVICE_PLUGIN_OPTIONS;
    let service = unary(Service::new(), shared, call("GetDevicePluginOptions"), method, |_, _| {
        Ok(pb::DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
            ..Default::default()
        })
    });
    let own = Arc::clone(shared);
    let service = service.stream(&methods::LIST_AND_WATCH, move |_, out, stop| {
        let served = own.serve((Plugin::Devices, "ListAndWatch"), stop, || {
            out.send(list(), stop).map_err(|_| RpcError::unavailable("the agent has left"))
        });
        if let Err(error) = served {
            own.state.lock().unwrap().devices.is_lost = true;
            return Err(error);
        }
        while !out.has_client_left() && stop.wait(PERIOD) == Waited::TimedOut {}
        Ok(())
    });
    let method = &methods::GET_PREFERRED_ALLOCATION;
    let service =
        unary(service, shared, call("GetPreferredAllocation"), method, |_, request| Ok(prefer(request)));
    let service = unary(service, shared, call("Allocate"), &methods::ALLOCATE, allocate);
    let method = &methods::PRE_START_CONTAINER;
    unary(service, shared, call("PreStartContainer"), method, |shared, request| {
        let ids = sorted(&request.devices);
        if !shared.state.lock().unwrap().devices.allocated.contains(&ids) {
            shared.violation(format!("a container starts with {ids:?}, which were not allocated together"));
        }
        Ok(pb::Empty::default())
    })
}
