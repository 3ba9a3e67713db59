//! A CSI driver. Its volumes are in memory, and its mounts are real. It lives longer than its server.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use coracle::transport::generated::{MessageField, csi as pb, methods, pluginregistration};
use coracle::transport::rpc_server::{RpcError, Service};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};

use super::{DRIVER, Plugin, Shared, registration, unary, unary_alone};
use crate::support::process_usage::mounts_below;

/// `STAGE_UNSTAGE_VOLUME`, `GET_VOLUME_STATS` and `EXPAND_VOLUME`.
const CAPABILITIES: [i32; 3] = [1, 2, 3];

/// Whether a volume is made for one pod.
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

/// What is staged and published.
#[derive(Debug, Default)]
pub(super) struct Volumes {
    /// By volume.
    staged: BTreeMap<String, pb::NodeStageVolumeRequest>,
    /// By target.
    published: BTreeMap<String, pb::NodePublishVolumeRequest>,
    sizes: BTreeMap<String, i64>,
}

impl Volumes {
    pub(super) fn left(&self) -> Vec<String> {
        let staged = self.staged.keys().map(|volume| format!("volume {volume} is staged"));
        let published = self.published.keys().map(|target| format!("a volume is published at {target}"));
        staged.chain(published).collect()
    }

    pub(super) fn published(&self) -> BTreeSet<String> {
        self.published.values().map(|request| request.volume_id.clone()).collect()
    }

    pub(super) fn size(&self, volume: &str) -> Option<i64> {
        self.sizes.get(volume).copied()
    }

    /// Removes the mounts of a test that failed.
    pub(super) fn unmount_all(&self) {
        let targets = self.published.keys().map(String::as_str);
        let staged = self.staged.values().map(|request| request.staging_target_path.as_str());
        for target in targets.chain(staged) {
            let _ = unmount(target, UnmountFlags::DETACH);
        }
    }

    fn stage(&mut self, request: &pb::NodeStageVolumeRequest) -> Result<(), String> {
        if let Some(before) = self.staged.get(&request.volume_id) {
            return same(before == request, "staged", &request.volume_id);
        }
        let target = &request.staging_target_path;
        if mounts_at(target) > 0 || !Path::new(target).is_dir() {
            return Err(format!("the staging target {target} is not an unused directory"));
        }
        make_mount(target);
        self.staged.insert(request.volume_id.clone(), request.clone());
        Ok(())
    }

    fn unstage(&mut self, request: &pb::NodeUnstageVolumeRequest) -> Result<(), String> {
        let volume = &request.volume_id;
        if self.published.values().any(|published| published.volume_id == *volume) {
            return Err(format!("volume {volume} is unstaged while it is published"));
        }
        let Some(before) = self.staged.get(volume) else { return Ok(()) };
        same(before.staging_target_path == request.staging_target_path, "unstaged", volume)?;
        unmounted(&request.staging_target_path);
        self.staged.remove(volume);
        Ok(())
    }

    fn publish(&mut self, request: &pb::NodePublishVolumeRequest) -> Result<(), String> {
        let (volume, target) = (&request.volume_id, &request.target_path);
        if let Some(before) = self.published.get(target) {
            return same(before == request, "published", volume);
        }
        // A volume of one pod is not staged.
        let is_inline = request.volume_context.get(EPHEMERAL).is_some_and(|value| value == "true");
        let staged =
            self.staged.get(volume).map(|staged| staged.staging_target_path.as_str()).unwrap_or_default();
        if staged != request.staging_target_path || staged.is_empty() != is_inline {
            return Err(format!("volume {volume} is published before it is staged"));
        }
        if mounts_at(target) > 0 {
            return Err(format!("the target {target} is mounted already"));
        }
        make_dir(target).map_err(|error| format!("the target {target} cannot be made: {error}"))?;
        if is_inline {
            make_mount(target);
        } else {
            mount_bind(staged, target.as_str()).unwrap();
        }
        self.published.insert(target.clone(), request.clone());
        Ok(())
    }

    fn unpublish(&mut self, request: &pb::NodeUnpublishVolumeRequest) {
        let target = &request.target_path;
        if self.published.remove(target).is_some() {
            unmounted(target);
        }
        let _ = fs::remove_dir(target);
    }

    fn expand(&mut self, request: &pb::NodeExpandVolumeRequest) -> Result<i64, String> {
        if !self.published.contains_key(&request.volume_path) {
            return Err(format!("volume {} is grown where it is not published", request.volume_id));
        }
        let bytes = request.capacity_range.required_bytes;
        self.sizes.insert(request.volume_id.clone(), bytes);
        Ok(bytes)
    }
}

fn same(is_same: bool, what: &str, volume: &str) -> Result<(), String> {
    if is_same { Ok(()) } else { Err(format!("volume {volume} is {what} in another way")) }
}

fn mounts_at(target: &str) -> usize {
    let parent = Path::new(target).parent().unwrap();
    mounts_below(parent).into_iter().filter(|point| point.as_path() == Path::new(target)).count()
}

fn make_mount(target: &str) {
    mount("tmpfs", target, "tmpfs", MountFlags::empty(), Some(c"size=64k,mode=0755")).unwrap();
}

fn make_dir(target: &str) -> io::Result<()> {
    match fs::create_dir(target) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// The agent may have unmounted it before, and may have a file of it open at this moment.
fn unmounted(target: &str) {
    while mounts_at(target) > 0 {
        match unmount(target, UnmountFlags::DETACH) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(errno) => panic!("cannot unmount {target}: {errno}"),
        }
    }
}

/// Does something with the volumes. A text is a violation.
fn with<T>(shared: &Shared, work: impl FnOnce(&mut Volumes) -> Result<T, String>) -> Result<T, RpcError> {
    let done = work(&mut shared.state.lock().unwrap().csi);
    done.map_err(|text| {
        shared.violation(text.clone());
        RpcError::failed_precondition(text)
    })
}

pub(super) fn service(shared: &Arc<Shared>) -> Service {
    let call = |name: &'static str| (Plugin::Csi, name);
    let info = pluginregistration::PluginInfo {
        type_: "CSIPlugin".to_owned(),
        name: DRIVER.to_owned(),
        supported_versions: vec!["1.0.0".to_owned()],
        ..Default::default()
    };
    let names = ["GetInfo", "NotifyRegistrationStatus"];
    let service = registration(Service::new(), shared, Plugin::Csi, names, info);
    let service = unary(service, shared, call("NodeGetInfo"), &methods::NODE_GET_INFO, |_, _| {
        let node_id = "the-node".to_owned();
        Ok(pb::NodeGetInfoResponse { node_id, ..Default::default() })
    });
    let method = &methods::NODE_GET_CAPABILITIES;
    let service = unary(service, shared, call("NodeGetCapabilities"), method, |_, _| {
        let capability = |type_: i32| {
            let rpc = MessageField::some(pb::NodeServiceRpc { type_, ..Default::default() });
            pb::NodeServiceCapability { rpc, ..Default::default() }
        };
        let capabilities = CAPABILITIES.map(capability).to_vec();
        Ok(pb::NodeGetCapabilitiesResponse { capabilities, ..Default::default() })
    });
    let service = unary_alone(
        service,
        shared,
        call("NodeStageVolume"),
        &methods::NODE_STAGE_VOLUME,
        |request| request.volume_id.clone(),
        |shared, request| with(shared, |all| all.stage(request)).map(|()| Default::default()),
    );
    let service = unary_alone(
        service,
        shared,
        call("NodePublishVolume"),
        &methods::NODE_PUBLISH_VOLUME,
        |request| request.volume_id.clone(),
        |shared, request| with(shared, |all| all.publish(request)).map(|()| Default::default()),
    );
    let service = unary_alone(
        service,
        shared,
        call("NodeUnpublishVolume"),
        &methods::NODE_UNPUBLISH_VOLUME,
        |request| request.volume_id.clone(),
        |shared, request| {
            let done = with(shared, |all| {
                all.unpublish(request);
                Ok(())
            });
            done.map(|()| Default::default())
        },
    );
    let service = unary_alone(
        service,
        shared,
        call("NodeUnstageVolume"),
        &methods::NODE_UNSTAGE_VOLUME,
        |request| request.volume_id.clone(),
        |shared, request| with(shared, |all| all.unstage(request)).map(|()| Default::default()),
    );
    let service = unary_alone(
        service,
        shared,
        call("NodeExpandVolume"),
        &methods::NODE_EXPAND_VOLUME,
        |request| request.volume_id.clone(),
        |shared, request| {
            let capacity_bytes = with(shared, |all| all.expand(request))?;
            Ok(pb::NodeExpandVolumeResponse { capacity_bytes, ..Default::default() })
        },
    );
    let method = &methods::NODE_GET_VOLUME_STATS;
    unary(service, shared, call("NodeGetVolumeStats"), method, |_, _| {
        let usage = pb::VolumeUsage { available: 1, total: 3, used: 2, unit: 1, ..Default::default() };
        Ok(pb::NodeGetVolumeStatsResponse { usage: vec![usage], ..Default::default() })
    })
}
