//! The removal of a block device: from its pod, and from the node after its last user (Go: csi_block.go).

use std::path::Path;

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase, VolumeLocation};
use super::dirs::{clear_block, clear_target, remove_link};
use super::error::{io, not_begun};
use super::mounter::unmount_all;
use super::names::BlockPaths;
use super::rebuild;
use super::record::{Record, RecordFile};
use super::recover;
use super::state::Csi;
use super::undo::{released, unpublish, unstage};
use crate::model::ids::PodUid;
use crate::util::stop::StopToken;

/// Removes a device from a pod.
pub(super) fn unmap(csi: &Csi, location: &VolumeLocation, stop: &StopToken) -> Result<(), VolumeError> {
    let link = csi.layout.of_pod(location)?;
    let paths = csi.layout.block_paths(&location.spec_name)?;
    let name = match Record::read(&paths.data) {
        RecordFile::Readable(record) => Some(record.unique_name()),
        RecordFile::Missing => csi.users().name_at(location),
        RecordFile::Damaged(_) => {
            recover::name_of(csi, &location.spec_name, Form::Block, Phase::TearDown, stop)?
        }
    };
    let Some(name) = name else {
        unlink(csi, &paths, &location.pod, &link)?;
        csi.users().remove_unknown(location);
        return Ok(());
    };
    let _guard = csi.lock(&name, stop)?;
    if let Some(record) = record(csi, &paths, &location.spec_name, &name)? {
        // The mount holds the device, and must go before the driver takes the device away.
        release_device(csi, &paths, &location.pod)?;
        unpublish(&csi.registry, &record, &paths.publish.join(location.pod.as_str()), stop)?;
    }
    unlink(csi, &paths, &location.pod, &link)?;
    let is_last = csi.users().remove(&name, location);
    released(if is_last { release(csi, &location.spec_name, &name, stop) } else { Ok(()) })
}

/// The record of the block volume with this unique name; a damaged one is made again.
fn record(csi: &Csi, paths: &BlockPaths, spec_name: &str, name: &str) -> Result<Option<Record>, VolumeError> {
    match Record::read(&paths.data) {
        RecordFile::Readable(record) => Ok(Some(record)),
        RecordFile::Missing => Ok(None),
        RecordFile::Damaged(_) => recover::restore_block(csi, spec_name, name).map(Some),
    }
}

/// Removes the mount of the device for one pod.
fn release_device(csi: &Csi, paths: &BlockPaths, pod: &PodUid) -> Result<(), VolumeError> {
    let held = paths.dev.join(pod.as_str());
    unmount_all(csi.mounter.as_ref(), &held).map_err(io("unmount", &held))
}

/// Removes everything of one pod that is empty. The link goes last: it shows a restarted agent
/// that the pod used the volume.
fn unlink(csi: &Csi, paths: &BlockPaths, pod: &PodUid, link: &Path) -> Result<(), VolumeError> {
    clear_target(csi.mounter.as_ref(), &paths.dev.join(pod.as_str()))?;
    clear_target(csi.mounter.as_ref(), &paths.publish.join(pod.as_str()))?;
    remove_link(link)
}

/// Removes a device from the node. The caller has the volume's lock, and no pod uses it.
fn release(csi: &Csi, spec_name: &str, name: &str, stop: &StopToken) -> Result<(), VolumeError> {
    let paths = csi.layout.block_paths(spec_name)?;
    if rebuild::is_any_below(csi.mounter.as_ref(), &paths.home) {
        let text = format!("The device \"{}\" is still referenced from other Pods", paths.home.display());
        return Err(not_begun(Phase::UnmountDevice, text));
    }
    csi.users().clear_staged(name);
    if let Some(record) = record(csi, &paths, spec_name, name)? {
        unstage(&csi.registry, &record, &paths.staging, stop)?;
    }
    clear_block(csi.mounter.as_ref(), &paths)?;
    csi.change(|users| users.set_unstaged(name));
    Ok(())
}

/// Removes a device from the node unless a pod uses it.
pub(super) fn release_if_unused(csi: &Csi, spec_name: &str, stop: &StopToken) -> Result<(), VolumeError> {
    let paths = csi.layout.block_paths(spec_name)?;
    let name = match Record::read(&paths.data) {
        RecordFile::Readable(record) => Some(record.unique_name()),
        // No driver was called, or its work was undone.
        RecordFile::Missing if rebuild::is_any_below(csi.mounter.as_ref(), &paths.home) => return Ok(()),
        RecordFile::Missing => None,
        RecordFile::Damaged(_) => recover::recover_block(csi, spec_name, stop)?,
    };
    let Some(name) = name else { return clear_block(csi.mounter.as_ref(), &paths) };
    if csi.users().may_be_used(&name) {
        return Ok(());
    }
    let _guard = csi.lock(&name, stop)?;
    if csi.users().may_be_used(&name) { Ok(()) } else { release(csi, spec_name, &name, stop) }
}
