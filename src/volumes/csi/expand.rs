//! Growth of a volume on the node (Go: expander.go).

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase};
use super::driver::{Code, Expand};
use super::error::{not_begun, of_call};
use super::publish::TARGET;
use super::request::Wanted;
use super::volume::{At, Csi, text};
use crate::util::stop::StopToken;

impl Csi {
    /// Grows a volume that is in use. The caller has the turn.
    pub(super) fn grow(
        &self,
        wanted: &Wanted,
        bytes: i64,
        stop: &StopToken,
    ) -> Result<Option<i64>, VolumeError> {
        let at = self.prepare(wanted, stop)?;
        self.grow_at(wanted, &at, bytes, stop)
    }

    /// Grows a published volume. `None`: the driver does not do it on the node, or not while the volume
    /// is in use; then it is not asked again before the next mount.
    pub(super) fn grow_at(
        &self,
        wanted: &Wanted,
        at: &At,
        bytes: i64,
        stop: &StopToken,
    ) -> Result<Option<i64>, VolumeError> {
        let phase = Phase::Expand;
        let place = wanted.place();
        if !at.abilities.expand || wanted.is_read_only() || self.users().is_not_grown(&place) {
            return Ok(None);
        }
        let path = match wanted.form {
            Form::Filesystem => self.layout.of_pod(&place)?.join(TARGET),
            Form::Block => self.publish_path(&place)?,
        };
        let staging_path = if at.abilities.stage {
            text(&self.staging_path(wanted.form, &self.record(wanted, None))?)?
        } else {
            String::new()
        };
        let reference = wanted.source.node_expand_secret_ref.as_ref();
        let secrets = self.secret(reference, "NodeExpandSecretRef", stop);
        let request = Expand {
            volume: wanted.source.volume_handle.clone(),
            path: text(&path)?,
            bytes,
            staging_path,
            capability: wanted.capability(at.abilities, wanted.mount_label(&at.spec)),
            secrets: secrets.map_err(|error| not_begun(phase, error))?,
        };
        match at.driver.expand(&request, stop) {
            // A driver need not report a size.
            Ok(size) => Ok(Some(if size > 0 { size } else { bytes })),
            Err(error) if error.code == Code::Unimplemented => Ok(None),
            Err(error) if error.code == Code::FailedPrecondition => {
                log::warn!("CSI volume {} is not grown while it is in use: {error}", wanted.spec_name);
                self.users().set_not_grown(&place);
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
}
