//! The steps of a set-up for volumes that containers use as block devices (Go: csi_block.go,
//! volumepathhandler).
//!
//! DIFFERS: the Go kubelet also holds a loop device on the device. Here the mount below
//! `volumeDevices/<volume>/dev` alone holds it.

use std::path::{Path, PathBuf};

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::dirs::{clear_block, clear_failed, make_dirs, remove_link};
use super::error::{after_call, changed_nothing, io};
use super::names::BlockPaths;
use super::prepare::PreparedDriver;
use super::request::VolumeRequest;
use super::state::Csi;
use super::{publish, stage};
use crate::model::ids::PodUid;
use crate::util::disk_writes;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

/// Stages a device on the node, unless this process has done so. The caller has the volume's lock.
pub(super) fn stage(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    paths: &BlockPaths,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let name = request.unique_name();
    make_dirs(&paths.data)?;
    let is_new = request.record(&driver.label, &csi.settings.node_name).write(&paths.data)?;
    csi.damaged().set_known(&name, Some(&request.spec_name));
    if csi.users().staged_label(&name).is_some() {
        return Ok(());
    }
    if driver.capabilities.stage {
        make_dirs(&paths.staging)?;
    }
    stage::call(csi, request, driver, &paths.staging, stop).inspect_err(|error| {
        if is_new && changed_nothing(error) && !csi.users().is_used_by_others(&name, &request.location()) {
            let mounter = csi.mounter.as_ref();
            clear_failed(mounter, &paths.staging, || clear_block(mounter, paths));
        }
    })?;
    csi.users().set_staged(&name, "");
    Ok(())
}

/// Publishes a device for the pod, and returns its path.
pub(super) fn publish(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    paths: &BlockPaths,
    stop: &StopToken,
) -> Result<PathBuf, VolumeError> {
    let device = paths.publish.join(request.pod.uid.as_str());
    let message = publish::message(csi, request, driver, &device, stop)?;
    make_dirs(&paths.publish)?;
    publish::call(request, driver, &message, stop)?;
    Ok(device)
}

/// Mounts the device for the node, and links it for the pod.
pub(super) fn link(
    csi: &Csi,
    paths: &BlockPaths,
    pod: &PodUid,
    device: &Path,
    link: &Path,
) -> Result<(), VolumeError> {
    let linked = hold(csi, paths, pod, device).and_then(|()| {
        if std::fs::read_link(link).is_ok_and(|target| target == device) {
            return Ok(());
        }
        if let Some(parent) = link.parent() {
            make_dirs(parent)?;
        }
        remove_link(link)?;
        disk_writes::created(std::os::unix::fs::symlink(device, link)).map_err(io("make link", link))
    });
    linked.map_err(|error| after_call(Phase::MapBlockVolume, chain(&error)))
}

/// Mounts the device for the node: as long as one pod has it, it is not detached.
fn hold(csi: &Csi, paths: &BlockPaths, pod: &PodUid, device: &Path) -> Result<(), VolumeError> {
    make_dirs(&paths.dev)?;
    let held = paths.dev.join(pod.as_str());
    if csi.mounter.is_mount_point(&held).map_err(io("read mounts at", &held))? {
        return Ok(());
    }
    // What is there is mounted over; a pipe would block.
    let made = std::fs::OpenOptions::new().write(true).create_new(true).open(&held);
    match disk_writes::created(made) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        made => drop(made.map_err(io("make file", &held))?),
    }
    csi.mounter.bind(device, &held).map_err(io("mount the device at", &held))
}
