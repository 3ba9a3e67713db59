//! The fourth step of a set-up: growth of the volume on the node (Go: expander.go).

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase};
use super::cluster::read_secret;
use super::driver::{Code, Expand};
use super::error::{not_begun, of_call};
use super::names::{TARGET, path_text};
use super::prepare::PreparedDriver;
use super::request::VolumeRequest;
use super::state::Csi;
use crate::util::stop::StopToken;

/// Grows a published volume. The caller has the volume's lock. `None`: the driver does not do it on the
/// node, or not while the volume is in use; then it is not asked again before the next mount.
pub(super) fn expand(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    bytes: i64,
    stop: &StopToken,
) -> Result<Option<i64>, VolumeError> {
    let phase = Phase::Expand;
    let location = request.location();
    if !driver.capabilities.expand || request.is_read_only() || csi.users().is_not_grown(&location) {
        return Ok(None);
    }
    let path = match request.form {
        Form::Filesystem => csi.layout.of_pod(&location)?.join(TARGET),
        Form::Block => csi.layout.block_paths(&location.spec_name)?.publish.join(location.pod.as_str()),
    };
    let staging_path = request.staging_path(driver.capabilities, &csi.layout)?;
    let reference = request.source.node_expand_secret_ref.as_ref();
    let secrets = read_secret(&*csi.cluster, reference, "NodeExpandSecretRef", stop);
    let message = Expand {
        volume: request.source.volume_handle.clone(),
        path: path_text(&path)?,
        bytes,
        staging_path,
        volume_capability: request.volume_capability(driver.capabilities, &driver.label),
        secrets: secrets.map_err(|error| not_begun(phase, error))?,
    };
    match driver.driver.expand(&message, stop) {
        // A driver need not report a size.
        Ok(size) => Ok(Some(if size > 0 { size } else { bytes })),
        Err(error) if error.code == Code::Unimplemented => Ok(None),
        Err(error) if error.code == Code::FailedPrecondition => {
            log::warn!("CSI volume {} is not grown while it is in use: {error}", request.spec_name);
            csi.users().set_not_grown(&location);
            Ok(None)
        }
        Err(error) => {
            let is_infeasible =
                matches!(error.code, Code::InvalidArgument | Code::OutOfRange | Code::NotFound);
            let phase = if is_infeasible { Phase::ExpandInfeasible } else { phase };
            Err(of_call(phase, "Expander.NodeExpand failed to expand the volume : ", &error))
        }
    }
}
