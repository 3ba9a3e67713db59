//! The second step of a set-up of a file system: the mount that all pods of the node share (Go:
//! csi_attacher.go).

use std::path::Path;

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::cluster::read_secret;
use super::dirs::{clear_dir, clear_failed, make_dirs};
use super::driver::Stage;
use super::error::{changed_nothing, not_begun, of_call};
use super::names::{GLOBAL_MOUNT, path_text};
use super::prepare::PreparedDriver;
use super::record::Record;
use super::request::VolumeRequest;
use super::state::Csi;
use crate::util::stop::StopToken;

/// Mounts a file system on the node, unless this process has done so. The caller has the volume's lock.
pub(super) fn stage(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let unique = request.unique_name();
    let label = request.mount_label(&driver.spec).unwrap_or_default();
    let staged_label = csi.users().staged_label(&unique).map(str::to_owned);
    if let Some(staged_label) = staged_label {
        if staged_label == label {
            return Ok(());
        }
        // The context is an option of the one mount that all pods share.
        let name = &request.spec_name;
        let text = format!("conflicting SELinux labels of volume {name}: {staged_label:?} and {label:?}");
        return Err(not_begun(Phase::MountDevice, text));
    }
    let source = &request.source;
    let dir = csi.layout.staged(&source.driver, &source.volume_handle)?;
    let target = dir.join(GLOBAL_MOUNT);
    make_dirs(&target)?;
    let record = Record::staged(&source.driver, &source.volume_handle);
    // An earlier attempt, or an earlier agent, may have staged it. That need not be a mount.
    let is_new = Record { selinux_context: label.to_owned(), ..record }.write(&dir)?;
    call(csi, request, driver, &target, stop).inspect_err(|error| {
        if is_new && changed_nothing(error) && !csi.users().is_used_by_others(&unique, &request.place()) {
            let mounter = csi.mounter.as_ref();
            clear_failed(mounter, &target, || clear_dir(mounter, &dir, GLOBAL_MOUNT));
        }
    })?;
    csi.users().set_staged(&unique, label);
    Ok(())
}

/// The call itself, for both forms, if the driver stages.
pub(super) fn call(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    target: &Path,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    if !driver.abilities.stage {
        return Ok(());
    }
    let (phase, source) = (request.stage_phase(), &request.source);
    let reference = source.node_stage_secret_ref.as_ref();
    let secrets = read_secret(&*csi.cluster, reference, "NodeStageSecretRef", stop);
    let message = Stage {
        volume: source.volume_handle.clone(),
        publish_context: driver.publish_context.clone(),
        staging_path: path_text(target)?,
        capability: request.capability(driver.abilities, request.mount_label(&driver.spec)),
        secrets: secrets.map_err(|error| not_begun(phase, error))?,
        volume_context: source.volume_attributes.clone(),
    };
    driver.driver.stage(&message, stop).map_err(|error| of_call(phase, "", &error))
}
