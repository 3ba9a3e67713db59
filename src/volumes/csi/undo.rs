//! The calls of a removal, for both forms of volumes (Go: csi_mounter.go, csi_attacher.go).

use std::path::Path;

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::error::{not_begun, of_call};
use super::names::path_text;
use super::record::Record;
use super::registry::Registry;
use crate::util::error_chain::chain;
use crate::util::stop::StopToken;

/// Has the driver remove a volume from a pod. The target may be gone already: the driver must accept
/// that.
pub(super) fn unpublish(
    registry: &Registry,
    record: &Record,
    target: &Path,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let phase = Phase::TearDown;
    let prefix = "kubernetes.io/csi: Unmounter.TearDownAt failed";
    let driver = registry.get(&record.driver_name);
    let driver = driver.map_err(|error| not_begun(phase, format!("{prefix} to get CSI client: {error}")))?;
    driver
        .unpublish(&record.volume_handle, &path_text(target)?, stop)
        .map_err(|error| of_call(phase, &format!("{prefix}: "), &error))
}

/// Has the driver remove a volume from the node.
pub(super) fn unstage(
    registry: &Registry,
    record: &Record,
    target: &Path,
    stop: &StopToken,
) -> Result<(), VolumeError> {
    let phase = Phase::UnmountDevice;
    let prefix = "kubernetes.io/csi: attacher.UnmountDevice failed";
    let driver = registry.get(&record.driver_name);
    let driver = driver
        .map_err(|error| not_begun(phase, format!("{prefix} to create newCsiDriverClient: {error}")))?;
    let capabilities = driver.capabilities(stop).map_err(|error| of_call(phase, "", &error))?;
    if !capabilities.stage {
        return Ok(());
    }
    driver
        .unstage(&record.volume_handle, &path_text(target)?, stop)
        .map_err(|error| of_call(phase, &format!("{prefix}: "), &error))
}

/// A volume that is still staged does not keep its last pod: it counts as in use, and is released
/// later. A pod that waited for its driver could not end (Go: UnmountDevice).
pub(super) fn released(result: Result<(), VolumeError>) -> Result<(), VolumeError> {
    match result {
        Err(error) if !matches!(error, VolumeError::Stopping) => {
            log::warn!("CSI volume: {}", chain(&error));
            Ok(())
        }
        result => result,
    }
}
