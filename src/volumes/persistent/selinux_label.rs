//! SELinux labels of volumes that no CSI driver mounts (Go: pkg/volume/iscsi, pkg/volume/fc).

use std::path::Path;

use super::super::error::VolumeError;
use super::super::mounts::Mount;
use super::super::selinux::{SelinuxLabelError, is_same_label};
use super::super::selinux_labels::SelinuxLabelRequest;
use super::super::{paths, plugin_table};
use super::host::mount_at;
use super::storage::{Request, Storage};
use super::{Kinds, devices};
use crate::model::api::Volume;
use crate::model::persistent::{Source, Spec, VolumeMode};
use crate::model::pod::Pod;

impl Kinds {
    /// The label to mount a volume with; empty: none. CSI volumes get theirs when their driver is known.
    pub(super) fn admit_label(
        &self,
        pod: &Pod,
        volume: &Volume,
        spec: &Spec,
        storage: &dyn Storage,
    ) -> Result<String, VolumeError> {
        let has_none = spec.mode == VolumeMode::Block || matches!(spec.source, Source::Csi(_));
        if !self.selinux.is_enabled() || has_none {
            return Ok(String::new());
        }
        let unique_name = storage.unique_name();
        let labels = self.selinux.of_pod(pod, &volume.name);
        // The kernel may write the label of the pod in another way.
        let wanted = labels.to_mount_with().unwrap_or_default();
        let mounted = self.mounted_label(pod, spec, storage)?;
        let mounted =
            mounted.map(|label| if is_same_label(&label, wanted) { wanted.to_owned() } else { label });
        let volume = SelinuxLabelRequest {
            unique_name: unique_name.as_deref().unwrap_or(&spec.name),
            name: &spec.name,
            plugin: storage.name().to_owned(),
            is_persistent: spec.is_persistent,
            access_modes: &spec.access_modes,
            is_mountable: storage.takes_label() && unique_name.is_some(),
            labels: &labels,
            mounted,
        };
        Ok(self.selinux.admit(pod.uid(), &volume)?)
    }

    /// The label with which the pod has the volume; `None`: it has it not.
    fn mounted_label(
        &self,
        pod: &Pod,
        spec: &Spec,
        storage: &dyn Storage,
    ) -> Result<Option<String>, VolumeError> {
        let plugin = storage.directory();
        let dir = paths::pod(&self.root_dir, pod.uid())?.join("volumes");
        let target = dir.join(paths::element(&plugin)?).join(paths::element(&spec.name)?);
        match mount_at(&self.host.mounts()?, &target) {
            Some(_) => self.host.label_at(&target).map(Some),
            None => Ok(None),
        }
    }

    /// Unmounts a disk that is mounted for all pods with another label, unless a pod has it (Go: reconciler,
    /// `unmountDetachDevices`). The sweep leaves a disk alone for which a set-up has the lock, as the caller.
    /// Returns whether it has unmounted the disk.
    ///
    /// # Errors
    /// If another pod has it.
    pub(super) fn unmount_other_label(
        &self,
        request: &Request<'_>,
        table: &[Mount],
        (global, target): (&Path, &Path),
    ) -> Result<bool, VolumeError> {
        let storage = plugin_table::storage(&request.spec.source);
        // The administrator may have named a label in the options of the volume.
        let has_own = request.spec.mount_options.iter().any(|option| option.starts_with("context="));
        let is_of_pod = mount_at(table, target).is_some();
        if !self.selinux.is_enabled() || !storage.takes_label() || has_own || is_of_pod {
            return Ok(false);
        }
        if is_same_label(&self.host.label_at(global)?, request.label) {
            return Ok(false);
        }
        if !devices::is_mounted_below(global, table, &paths::pods(&self.root_dir)) {
            self.host.unmount(global, false)?;
            if mount_at(&self.host.mounts()?, global).is_none() {
                return Ok(true);
            }
        }
        let volume = storage.unique_name().unwrap_or_else(|| request.spec.name.clone());
        Err(SelinuxLabelError::Mounted { volume }.into())
    }
}
