//! The node service over gRPC (Go: csi_client.go, csi_metrics.go). Each call runs on the caller's
//! thread, with a deadline; a driver's message may not be larger than a limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::driver::{
    Code, Driver, DriverCapabilities, DriverError, Expand, NodeInfo, Publish, Stage, Usage, VolumeCapability,
    VolumeStats,
};
use super::error::MAX_TEXT;
use crate::model::metrics::CSI_OPERATIONS;
use crate::transport::endpoint::EndpointError;
use crate::transport::generated::{MessageField, csi, methods};
use crate::transport::grpc::{Channel, UnaryMethod};
use crate::util::clip;
use crate::util::stop::StopToken;

/// The deadline of each call: upstream's.
const LIMIT: Duration = Duration::from_secs(120);
/// The largest message. Answers of drivers have some hundred bytes.
const MAX_MESSAGE_BYTES: i32 = 4 << 20;
/// Capabilities that are read of an answer.
const MAX_CAPABILITIES: usize = 256;
/// Measures that are read of an answer.
const MAX_USAGES: usize = 16;

// Numbers of the protocol.
const STAGE_UNSTAGE_VOLUME: i32 = 1;
const GET_VOLUME_STATS: i32 = 2;
const EXPAND_VOLUME: i32 = 3;
const SINGLE_NODE_MULTI_WRITER: i32 = 5;
const VOLUME_MOUNT_GROUP: i32 = 6;
const BYTES: i32 = 1;
const INODES: i32 = 2;

/// A driver at a socket.
#[derive(Debug)]
pub(super) struct GrpcDriver {
    name: String,
    channel: Channel,
    limit: Duration,
}

/// Prepares the connection to a driver, for [`super::Registry::new`].
///
/// # Errors
/// When the endpoint cannot be a socket.
pub fn connect(name: &str, endpoint: &str) -> Result<Arc<dyn Driver>, EndpointError> {
    let driver = GrpcDriver::new(name, endpoint, LIMIT)?;
    Ok(Arc::new(driver))
}

impl GrpcDriver {
    /// A driver whose calls have this deadline.
    fn new(name: &str, endpoint: &str, limit: Duration) -> Result<GrpcDriver, EndpointError> {
        let endpoint =
            if endpoint.starts_with('/') { format!("unix://{endpoint}") } else { endpoint.to_owned() };
        let channel = Channel::limited(&endpoint, MAX_MESSAGE_BYTES)?;
        Ok(GrpcDriver { name: name.to_owned(), channel, limit })
    }

    fn call<Req, Resp: Unpin>(
        &self,
        method: &'static UnaryMethod<Req, Resp>,
        request: &Req,
        stop: &StopToken,
    ) -> Result<Resp, DriverError> {
        let begun = Instant::now();
        let result = self.channel.call_with_stop(method, request, Some(self.limit), stop);
        let code = result.as_ref().err().map_or("OK", |error| error.kind.as_str()).to_owned();
        let method = format!("/csi.v1.Node/{}", method.name);
        CSI_OPERATIONS
            .observe_duration([self.name.clone(), method, code, "false".to_owned()], begun.elapsed());
        // Its text has no part of the request.
        result.map_err(|error| DriverError {
            message: clip::line(&error.to_string(), MAX_TEXT),
            code: error.kind,
        })
    }
}

fn volume_capability(given: &VolumeCapability) -> MessageField<csi::VolumeCapability> {
    let mut message = csi::VolumeCapability::new();
    if given.is_block {
        message.block = MessageField::some(csi::BlockVolume::new());
    } else {
        let mut mount = csi::MountVolume::new();
        mount.fs_type.clone_from(&given.fs_type);
        mount.mount_flags.clone_from(&given.mount_flags);
        mount.volume_mount_group = given.mount_group.map(|gid| gid.to_string()).unwrap_or_default();
        message.mount = MessageField::some(mount);
    }
    let mut mode = csi::AccessMode::new();
    mode.mode = given.access_mode;
    message.access_mode = MessageField::some(mode);
    MessageField::some(message)
}

impl Driver for GrpcDriver {
    fn info(&self, stop: &StopToken) -> Result<NodeInfo, DriverError> {
        let response = self.call(&methods::NODE_GET_INFO, &csi::NodeGetInfoRequest::new(), stop)?;
        let topology =
            response.accessible_topology.into_option().map(|topology| topology.segments).unwrap_or_default();
        Ok(NodeInfo { id: response.node_id, max_volumes: response.max_volumes_per_node, topology })
    }

    fn capabilities(&self, stop: &StopToken) -> Result<DriverCapabilities, DriverError> {
        let request = csi::NodeGetCapabilitiesRequest::new();
        let response = self.call(&methods::NODE_GET_CAPABILITIES, &request, stop)?;
        let mut capabilities = DriverCapabilities::default();
        for capability in response.capabilities.iter().take(MAX_CAPABILITIES) {
            match capability.rpc.as_ref().map_or(0, |rpc| rpc.type_) {
                STAGE_UNSTAGE_VOLUME => capabilities.stage = true,
                GET_VOLUME_STATS => capabilities.stats = true,
                EXPAND_VOLUME => capabilities.expand = true,
                SINGLE_NODE_MULTI_WRITER => capabilities.single_node_multi_writer = true,
                VOLUME_MOUNT_GROUP => capabilities.mount_group = true,
                _ => {}
            }
        }
        Ok(capabilities)
    }

    fn stage(&self, request: &Stage, stop: &StopToken) -> Result<(), DriverError> {
        let mut message = csi::NodeStageVolumeRequest::new();
        message.volume_id.clone_from(&request.volume);
        message.publish_context.clone_from(&request.publish_context);
        message.staging_target_path.clone_from(&request.staging_path);
        message.volume_capability = volume_capability(&request.volume_capability);
        message.secrets.clone_from(request.secrets.expose());
        message.volume_context.clone_from(&request.volume_context);
        self.call(&methods::NODE_STAGE_VOLUME, &message, stop).map(drop)
    }

    fn unstage(&self, volume: &str, staging_path: &str, stop: &StopToken) -> Result<(), DriverError> {
        let mut message = csi::NodeUnstageVolumeRequest::new();
        message.volume_id = volume.to_owned();
        message.staging_target_path = staging_path.to_owned();
        self.call(&methods::NODE_UNSTAGE_VOLUME, &message, stop).map(drop)
    }

    fn publish(&self, request: &Publish, stop: &StopToken) -> Result<(), DriverError> {
        let mut message = csi::NodePublishVolumeRequest::new();
        message.volume_id.clone_from(&request.volume);
        message.publish_context.clone_from(&request.publish_context);
        message.staging_target_path.clone_from(&request.staging_path);
        message.target_path.clone_from(&request.target_path);
        message.volume_capability = volume_capability(&request.volume_capability);
        message.readonly = request.read_only;
        message.secrets.clone_from(request.secrets.expose());
        message.volume_context.clone_from(&request.volume_context);
        self.call(&methods::NODE_PUBLISH_VOLUME, &message, stop).map(drop)
    }

    fn unpublish(&self, volume: &str, target_path: &str, stop: &StopToken) -> Result<(), DriverError> {
        let mut message = csi::NodeUnpublishVolumeRequest::new();
        message.volume_id = volume.to_owned();
        message.target_path = target_path.to_owned();
        self.call(&methods::NODE_UNPUBLISH_VOLUME, &message, stop).map(drop)
    }

    fn expand(&self, request: &Expand, stop: &StopToken) -> Result<i64, DriverError> {
        let mut message = csi::NodeExpandVolumeRequest::new();
        message.volume_id.clone_from(&request.volume);
        message.volume_path.clone_from(&request.path);
        let mut range = csi::CapacityRange::new();
        range.required_bytes = request.bytes;
        message.capacity_range = MessageField::some(range);
        message.staging_target_path.clone_from(&request.staging_path);
        message.volume_capability = volume_capability(&request.volume_capability);
        message.secrets.clone_from(request.secrets.expose());
        self.call(&methods::NODE_EXPAND_VOLUME, &message, stop).map(|response| response.capacity_bytes)
    }

    fn stats(
        &self,
        volume: &str,
        path: &str,
        staging_path: &str,
        stop: &StopToken,
    ) -> Result<VolumeStats, DriverError> {
        let mut message = csi::NodeGetVolumeStatsRequest::new();
        message.volume_id = volume.to_owned();
        message.volume_path = path.to_owned();
        message.staging_target_path = staging_path.to_owned();
        let response = self.call(&methods::NODE_GET_VOLUME_STATS, &message, stop)?;
        if response.usage.is_empty() {
            let message = "failed to get usage from response. usage is nil".to_owned();
            return Err(DriverError { message, code: Code::Unknown });
        }
        let mut stats = VolumeStats::default();
        for usage in response.usage.iter().take(MAX_USAGES) {
            let measured = Usage { available: usage.available, total: usage.total, used: usage.used };
            match usage.unit {
                BYTES => stats.bytes = Some(measured),
                INODES => stats.inodes = Some(measured),
                _ => {}
            }
        }
        Ok(stats)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::util::testing::in_background;
    use crossbeam_channel::bounded;

    use super::*;
    use crate::transport::rpc_server::{RpcError, Server, Service};
    use crate::util::stop;

    fn driver(socket: &Path, limit: Duration) -> GrpcDriver {
        GrpcDriver::new("d.client", socket.to_str().unwrap(), limit).unwrap()
    }

    fn serve(socket: &Path, service: Service) -> Server {
        Server::start(socket, [service]).unwrap()
    }

    #[test]
    fn requests_and_responses_have_all_fields() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let (report, reported) = bounded(64);
        let service = Service::new()
            .unary(&methods::NODE_GET_INFO, |_, _| {
                let mut topology = csi::Topology::new();
                topology.segments.insert("zone".to_owned(), "a".to_owned());
                let mut response = csi::NodeGetInfoResponse::new();
                response.node_id = "i".to_owned();
                response.max_volumes_per_node = 7;
                response.accessible_topology = MessageField::some(topology);
                Ok(response)
            })
            .unary(&methods::NODE_GET_CAPABILITIES, |_, _| {
                let mut response = csi::NodeGetCapabilitiesResponse::new();
                for number in [0, STAGE_UNSTAGE_VOLUME, VOLUME_MOUNT_GROUP, 99] {
                    let mut rpc = csi::NodeServiceRpc::new();
                    rpc.type_ = number;
                    let mut capability = csi::NodeServiceCapability::new();
                    capability.rpc = MessageField::some(rpc);
                    response.capabilities.push(capability);
                }
                Ok(response)
            })
            .unary(&methods::NODE_PUBLISH_VOLUME, move |request, _| {
                report.send(request).unwrap();
                Ok(csi::NodePublishVolumeResponse::new())
            });
        let _server = serve(&socket, service);
        let driver = driver(&socket, Duration::from_secs(10));
        let never = StopToken::never();
        let node = driver.info(&never).unwrap();
        assert_eq!((node.id.as_str(), node.max_volumes, node.topology.len()), ("i", 7, 1));
        let capabilities = driver.capabilities(&never).unwrap();
        assert_eq!(
            capabilities,
            DriverCapabilities { stage: true, mount_group: true, ..DriverCapabilities::default() }
        );
        let request = Publish {
            volume: "h".to_owned(),
            target_path: "/t".to_owned(),
            read_only: true,
            volume_capability: VolumeCapability {
                fs_type: "ext4".to_owned(),
                mount_group: Some(7),
                access_mode: 5,
                ..VolumeCapability::default()
            },
            ..Publish::default()
        };
        driver.publish(&request, &never).unwrap();
        let message = reported.recv().unwrap();
        assert!(message.readonly && message.target_path == "/t" && message.volume_id == "h");
        let mount = message.volume_capability.mount.as_ref().unwrap();
        assert_eq!((mount.fs_type.as_str(), mount.volume_mount_group.as_str()), ("ext4", "7"));
        assert_eq!(message.volume_capability.access_mode.mode, 5);
        let error = driver.unpublish("h", "/t", &never).unwrap_err();
        assert_eq!(error.code, Code::Unimplemented);
        let values = ["d.client", "/csi.v1.Node/NodePublishVolume", "OK", "false"];
        assert_eq!(CSI_OPERATIONS.count(values), 1);
    }

    #[test]
    fn each_request_names_its_volume_and_paths() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let (report, reported) = bounded(64);
        let senders: [crossbeam_channel::Sender<String>; 5] = std::array::from_fn(|_| report.clone());
        let [stage, unstage, unpublish, expand, stats] = senders;
        let service = Service::new()
            .unary(&methods::NODE_STAGE_VOLUME, move |request, _| {
                let capability = &request.volume_capability;
                let (volume, path) = (&request.volume_id, &request.staging_target_path);
                let is_block = capability.block.is_some() && capability.mount.is_none();
                let mode = capability.access_mode.mode;
                let (context, published) = (&request.volume_context["a"], &request.publish_context["dev"]);
                stage.send(format!("{volume} {path} {is_block} {mode} {context} {published}")).unwrap();
                Ok(csi::NodeStageVolumeResponse::new())
            })
            .unary(&methods::NODE_UNSTAGE_VOLUME, move |request, _| {
                unstage.send(format!("{} {}", request.volume_id, request.staging_target_path)).unwrap();
                Ok(csi::NodeUnstageVolumeResponse::new())
            })
            .unary(&methods::NODE_UNPUBLISH_VOLUME, move |request, _| {
                unpublish.send(format!("{} {}", request.volume_id, request.target_path)).unwrap();
                Ok(csi::NodeUnpublishVolumeResponse::new())
            })
            .unary(&methods::NODE_EXPAND_VOLUME, move |request, _| {
                let (volume, path) = (&request.volume_id, &request.volume_path);
                let (bytes, staged) = (request.capacity_range.required_bytes, &request.staging_target_path);
                let mode = request.volume_capability.access_mode.mode;
                expand.send(format!("{volume} {path} {staged} {bytes} {mode}")).unwrap();
                Ok(csi::NodeExpandVolumeResponse::new())
            })
            .unary(&methods::NODE_GET_VOLUME_STATS, move |request, _| {
                let (volume, path) = (&request.volume_id, &request.volume_path);
                stats.send(format!("{volume} {path} {}", request.staging_target_path)).unwrap();
                let mut response = csi::NodeGetVolumeStatsResponse::new();
                if request.volume_id == "h" {
                    let usage = csi::VolumeUsage { unit: BYTES, total: 3, ..csi::VolumeUsage::new() };
                    response.usage.push(usage);
                }
                Ok(response)
            });
        let _server = serve(&socket, service);
        let driver = driver(&socket, Duration::from_secs(10));
        let never = StopToken::never();
        let pairs = |key: &str, value: &str| [(key.to_owned(), value.to_owned())].into();
        let capability = VolumeCapability { is_block: true, access_mode: 6, ..VolumeCapability::default() };
        let request = Stage {
            volume: "h".to_owned(),
            publish_context: pairs("dev", "sdx"),
            staging_path: "/g".to_owned(),
            volume_capability: capability.clone(),
            volume_context: pairs("a", "b"),
            ..Stage::default()
        };
        driver.stage(&request, &never).unwrap();
        assert_eq!(reported.recv().unwrap(), "h /g true 6 b sdx");
        let request = Expand {
            volume: "h".to_owned(),
            path: "/t".to_owned(),
            bytes: 9,
            staging_path: "/g".to_owned(),
            volume_capability: capability,
            ..Expand::default()
        };
        driver.expand(&request, &never).unwrap();
        assert_eq!(reported.recv().unwrap(), "h /t /g 9 6");
        let stats = driver.stats("h", "/t", "/g", &never).unwrap();
        assert_eq!((stats.bytes.map(|bytes| bytes.total), stats.inodes), (Some(3), None));
        assert_eq!(reported.recv().unwrap(), "h /t /g");
        // A response without numbers is none.
        let error = driver.stats("i", "/t", "/g", &never).unwrap_err();
        assert_eq!(error.to_string(), "failed to get usage from response. usage is nil");
        assert!(error.is_final());
        assert_eq!(reported.recv().unwrap(), "i /t /g");
        driver.unpublish("h", "/t", &never).unwrap();
        assert_eq!(reported.recv().unwrap(), "h /t");
        driver.unstage("h", "/g", &never).unwrap();
        assert_eq!(reported.recv().unwrap(), "h /g");
    }

    #[test]
    fn hostile_drivers_fail_within_the_limits() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let never = StopToken::never();
        let absent = driver(&socket, Duration::from_secs(5)).info(&never).unwrap_err();
        assert!(!absent.is_final(), "{absent}");
        let service = Service::new()
            .unary(&methods::NODE_GET_INFO, |_, _| {
                let mut response = csi::NodeGetInfoResponse::new();
                response.node_id = "x".repeat(8 << 20);
                Ok(response)
            })
            .unary(&methods::NODE_STAGE_VOLUME, |_, stop: &StopToken| {
                // Until the server ends.
                let _ = stop.signal().recv();
                Ok(csi::NodeStageVolumeResponse::new())
            })
            .unary(&methods::NODE_UNSTAGE_VOLUME, |_, _| Err(RpcError::internal("busy")));
        let server = serve(&socket, service);
        let large = driver(&socket, Duration::from_secs(10)).info(&never).unwrap_err();
        assert_eq!(large.code, Code::ResourceExhausted, "{large}");
        let slow = driver(&socket, Duration::from_millis(100)).stage(&Stage::default(), &never).unwrap_err();
        assert_eq!(slow.code, Code::DeadlineExceeded, "{slow}");
        let (source, token) = stop::pair();
        drop(source);
        let driver = driver(&socket, Duration::from_secs(60));
        assert_eq!(driver.stage(&Stage::default(), &token).unwrap_err().code, Code::Cancelled);
        let refused = driver.unstage("h", "/t", &never).unwrap_err();
        assert_eq!(refused.to_string(), "rpc error: code = Internal desc = busy");
        assert!(refused.is_final());
        // The driver dies in the middle of a call.
        let running = in_background(move || driver.stage(&Stage::default(), &StopToken::never()));
        drop(server);
        assert!(running.result().err().is_none_or(|error| !error.is_final()));
    }
}
