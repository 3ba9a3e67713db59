//! The second step of a set-up of a file system: the mount that all pods of the node share (Go:
//! csi_attacher.go).

use std::path::Path;

use super::super::error::VolumeError;
use super::super::kind::Form;
use super::super::selinux::SelinuxLabelError;
use super::cluster::read_secret;
use super::dirs::{clear_dir, clear_failed, make_dirs};
use super::driver::Stage;
use super::error::{changed_nothing, io, not_begun, of_call};
use super::names::{GLOBAL_MOUNT, TARGET, path_text};
use super::prepare::PreparedDriver;
use super::rebuild;
use super::record::{Record, RecordFile};
use super::remove::release_staged;
use super::request::VolumeRequest;
use super::state::Csi;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

/// Mounts a file system on the node, unless this process has done so. The caller has the volume's lock.
pub(super) fn stage(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let unique = request.unique_name();
    let label = driver.label.as_str();
    let staged_label = csi.users().staged_label(&unique).map(str::to_owned);
    if staged_label.as_deref() == Some(label) {
        return Ok(());
    }
    let source = &request.source;
    let dir = csi.layout.staged(&source.driver, &source.volume_handle)?;
    let target = dir.join(GLOBAL_MOUNT);
    unstage_other_label(csi, request, driver, (&dir, &target), stop)?;
    make_dirs(&target)?;
    let record = Record::staged(&source.driver, &source.volume_handle);
    // An earlier attempt, or an earlier agent, may have staged it. That need not be a mount.
    let is_new = Record { selinux_context: label.to_owned(), ..record }.write(&dir)?;
    call(csi, request, driver, &target, stop).inspect_err(|error| {
        if is_new && changed_nothing(error) && !csi.users().is_used_by_others(&unique, &request.location()) {
            let mounter = csi.mounter.as_ref();
            clear_failed(mounter, &target, || clear_dir(mounter, &dir, GLOBAL_MOUNT));
        }
    })?;
    csi.users().set_staged(&unique, label);
    Ok(())
}

/// Unmounts a volume that is mounted on the node with another label for a pod that is gone: the label is an
/// option of the one mount that all pods share (Go: reconciler, `unmountDetachDevices`).
fn unstage_other_label(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    (dir, target): (&Path, &Path),
    stop: &StopToken,
) -> Result<(), VolumeError> {
    // A pod that has the volume keeps it.
    if !csi.settings.selinux.is_enabled() || driver.is_mounted {
        return Ok(());
    }
    let unique = request.unique_name();
    // By this process, with another label. What a driver stages need not be a mount.
    let is_staged = csi.users().staged_label(&unique).is_some();
    let unlabelled = || Record::staged(&request.source.driver, &request.source.volume_handle);
    let (record, is_other) = match Record::read(dir) {
        RecordFile::Readable(record) if record.unique_name() == unique => {
            let is_other = is_staged || record.selinux_context != driver.label;
            (record, is_other)
        }
        // Its label is not known.
        RecordFile::Damaged(_) => (unlabelled(), true),
        RecordFile::Missing => (unlabelled(), is_staged),
        RecordFile::Readable(_) => return Ok(()),
    };
    if !is_other {
        return Ok(());
    }
    // After a reboot there is a record, and nothing is mounted.
    if !is_staged && !csi.mounter.is_mount_point(target).map_err(io("read mounts at", target))? {
        return Ok(());
    }
    let waits = || SelinuxLabelError::Mounted { volume: unique.clone() };
    if may_be_published(csi, request, &unique, &driver.label) {
        return Err(waits().into());
    }
    release_staged(csi, &unique, &record, dir, stop).map_err(|error| match error {
        VolumeError::Stopping => VolumeError::Stopping,
        error => {
            log::warn!("CSI volume {unique}: {}", chain(&error));
            waits().into()
        }
    })
}

/// Whether another pod has the volume mounted, or may have. Pods that only wait for it, with the same label,
/// do not count: they would wait for each other.
fn may_be_published(csi: &Csi, request: &VolumeRequest, unique: &str, label: &str) -> bool {
    let Some(others) = csi.users().others(unique, &request.location()) else { return true };
    others.iter().any(|other| {
        let target = csi.layout.of_pod(other).map(|dir| dir.join(TARGET));
        // A call may have mounted it without a response. A record alone may be from before a reboot.
        let has_begun = || match rebuild::record_of(&csi.layout, other) {
            RecordFile::Missing => false,
            RecordFile::Readable(record) => record.selinux_context != label,
            RecordFile::Damaged(_) => true,
        };
        other.form != Form::Filesystem
            || csi.users().is_published(other)
            || target.is_ok_and(|target| csi.mounter.is_mount_point(&target).unwrap_or(true))
            || (csi.settings.selinux.has_other(unique, &other.pod, label) && has_begun())
    })
}

/// The call itself, for both forms, if the driver stages.
pub(super) fn call(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    target: &Path,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    if !driver.capabilities.stage {
        return Ok(());
    }
    let (phase, source) = (request.stage_phase(), &request.source);
    let reference = source.node_stage_secret_ref.as_ref();
    let secrets = read_secret(&*csi.cluster, reference, "NodeStageSecretRef", stop);
    let message = Stage {
        volume: source.volume_handle.clone(),
        publish_context: driver.publish_context.clone(),
        staging_path: path_text(target)?,
        volume_capability: request.volume_capability(driver.capabilities, &driver.label),
        secrets: secrets.map_err(|error| not_begun(phase, error))?,
        volume_context: source.volume_attributes.clone(),
    };
    driver.driver.stage(&message, stop).map_err(|error| of_call(phase, "", &error))
}
