//! CSI as a kind of volume of this room, and the steps of a set-up in their order.

use std::path::Path;
use std::sync::Arc;

use super::super::error::VolumeError;
use super::super::kind::{Form, Phase, ReadyVolume, VolumeLocation};
use super::super::paths;
use super::block;
use super::error::after_call;
use super::expand::expand;
use super::fs_group::GroupChange;
use super::names::TARGET;
use super::prepare::{PreparedDriver, prepare, prepare_mounted};
use super::publish::publish;
use super::remove;
use super::remove_block;
use super::request::VolumeRequest;
use super::stage::stage;
use super::state::Csi;
use crate::util::stop::StopToken;

/// One volume of one pod.
#[derive(Debug, Clone)]
pub struct CsiVolume {
    csi: Arc<Csi>,
    request: VolumeRequest,
}

impl Csi {
    /// A volume of a pod.
    #[must_use]
    pub fn volume(self: &Arc<Csi>, request: VolumeRequest) -> CsiVolume {
        CsiVolume { csi: Arc::clone(self), request }
    }
}

/// Makes a volume ready for its pod, while no other operation on the volume runs. Returns also what is
/// left to do after that: a change of the group of all files may take hours, and other pods want the
/// volume.
pub(super) fn mount(
    csi: &Csi,
    request: &VolumeRequest,
    stop: &StopToken,
) -> Result<(ReadyVolume, Option<GroupChange>), VolumeError> {
    let _guard = csi.lock(&request.unique_name(), stop)?;
    let location = request.location();
    // The directory of a file system, or the link to a device.
    let in_pod = csi.layout.of_pod(&location)?;
    let block = match request.form {
        Form::Filesystem => None,
        Form::Block => Some(csi.layout.block_paths(&request.spec_name)?),
    };
    let mount_point = match &block {
        None => in_pod.join(TARGET),
        Some(block) => block.dev.join(location.pod.as_str()),
    };
    let was_mounted = csi.mounter.is_mount_point(&mount_point).unwrap_or(false);
    let driver = prepare(csi, request, was_mounted, stop)?;
    let (path, group_change) = match &block {
        None => {
            if !request.is_ephemeral() {
                stage(csi, request, &driver, stop)?;
            }
            let group_change = GroupChange::plan(request, &driver, &in_pod, was_mounted)?;
            publish(csi, request, &driver, &in_pod, stop)?;
            (mount_point, group_change)
        }
        Some(block) => {
            block::stage(csi, request, &driver, block, stop)?;
            let device = block::publish(csi, request, &driver, block, stop)?;
            block::link(csi, block, &location.pod, &device, &in_pod)?;
            (device, None)
        }
    };
    let grown_to = match request.grow_to {
        Some(bytes) => expand(csi, request, &driver, bytes, stop)?,
        None => None,
    };
    csi.users().set_republished(&location, driver.spec.requires_republish == Some(true));
    let ready = ReadyVolume {
        form: request.form,
        read_only: request.is_read_only(),
        selinux_relabel: may_relabel(csi, request, &driver, &path)?,
        host_path: paths::real(&csi.settings.root_dir, &path).1,
        grown_to,
    };
    Ok((ready, group_change))
}

/// Whether the runtime may change the labels of the files: not of a device, of a volume that is mounted
/// with a label or read-only, or whose file system has no labels.
fn may_relabel(
    csi: &Csi,
    request: &VolumeRequest,
    driver: &PreparedDriver,
    target: &Path,
) -> Result<bool, VolumeError> {
    if request.form == Form::Block || !driver.label.is_empty() || request.is_read_only() {
        return Ok(false);
    }
    if !csi.settings.selinux.is_enabled() {
        // No label is changed on this node.
        return Ok(true);
    }
    csi.mounter
        .has_labels(target)
        .map_err(|error| after_call(Phase::SetUp, format!("error checking for SELinux support: {error}")))
}

impl CsiVolume {
    /// The name of the volume on this node, as `node.status.volumesInUse` has it. Operations on one name
    /// never run at the same time.
    #[must_use]
    pub fn unique_name(&self) -> String {
        self.request.unique_name()
    }

    /// Whether [`CsiVolume::set_up`] must be called again at each sync of the pod.
    pub(crate) fn requires_remount(&self) -> bool {
        self.csi.users().is_republished(&self.request.location())
    }

    /// Makes the volume ready for the pod: attached, mounted on the node, mounted for the pod, grown to
    /// its size, owned by the pod's group. It may be repeated at any time.
    ///
    /// # Errors
    /// [`VolumeError::Kind`] with the phase. After an error that is not final, something may be
    /// mounted: [`Csi::tear_down`] must be called before the volume is forgotten.
    pub fn set_up(&self, stop: &StopToken) -> Result<ReadyVolume, VolumeError> {
        let (ready, group_change) = mount(&self.csi, &self.request, stop)?;
        // The pod's removal waits for its end; other pods do not.
        group_change.map_or(Ok(()), |change| change.apply(&self.csi.settings, &self.request))?;
        Ok(ready)
    }

    /// Grows the file system of a volume that is set up, while the pod uses it. Returns the size in
    /// bytes if the volume has a new one.
    ///
    /// # Errors
    /// [`VolumeError::Kind`] with the phase [`Phase::Expand`].
    pub fn expand(&self, bytes: i64, stop: &StopToken) -> Result<Option<i64>, VolumeError> {
        let _guard = self.csi.lock(&self.unique_name(), stop)?;
        let driver = prepare_mounted(&self.csi, &self.request, stop)?;
        expand(&self.csi, &self.request, &driver, bytes, stop)
    }
}

impl Csi {
    /// Removes the volume from the pod, and from the node if no other pod uses it. It needs only what is
    /// on the disk, may be repeated, and never deletes what is below a mount.
    ///
    /// # Errors
    /// [`VolumeError::Kind`]; the volume, or a part of it, is still there.
    pub fn tear_down(&self, location: &VolumeLocation, stop: &StopToken) -> Result<(), VolumeError> {
        self.measured().forget(location);
        match location.form {
            Form::Filesystem => remove::unmount(self, location, stop),
            Form::Block => remove_block::unmap(self, location, stop),
        }
    }

    /// Unmounts the volumes on the node that no pod uses. To be called once after the first complete set
    /// of pods, and after a failure of [`Csi::tear_down`].
    ///
    /// # Errors
    /// The first failure; the others were tried.
    pub fn release_unused(&self, stop: &StopToken) -> Result<(), VolumeError> {
        remove::release_all(self, stop)
    }
}
