//! SELinux labels of volumes that no CSI driver mounts (Go: pkg/volume/iscsi, pkg/volume/fc).

use std::path::Path;

use super::super::error::VolumeError;
use super::super::label_table::LabelledVolume;
use super::super::mounts::Mount;
use super::super::selinux::LabelProblem;
use super::super::{paths, plugin_table};
use super::Kinds;
use super::host::mount_at;
use super::storage::{Request, Storage};
use crate::model::api::Volume;
use crate::model::persistent::{Mode, Source, Spec};
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
        let has_none = spec.mode == Mode::Block || matches!(spec.source, Source::Csi(_));
        if !self.selinux.is_enabled() || has_none {
            return Ok(String::new());
        }
        let unique_name = storage.unique_name();
        let volume = LabelledVolume {
            unique_name: unique_name.as_deref().unwrap_or(&spec.name),
            name: &spec.name,
            plugin: storage.name().to_owned(),
            is_persistent: spec.is_persistent,
            access_modes: &spec.access_modes,
            is_mountable: storage.takes_label() && unique_name.is_some(),
            labels: &self.selinux.of_pod(pod, &volume.name),
            mounted: self.mounted_label(pod, spec, storage)?,
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

    /// Refuses a disk that is mounted for all pods with another label, unless the pod has it. It is
    /// unmounted once no pod uses it.
    pub(super) fn check_label(
        &self,
        request: &Request<'_>,
        table: &[Mount],
        (global, target): (&Path, &Path),
    ) -> Result<(), VolumeError> {
        let storage = plugin_table::storage(&request.spec.source);
        // The administrator may have named a label in the options of the volume.
        let has_own = request.spec.mount_options.iter().any(|option| option.starts_with("context="));
        let is_of_pod = mount_at(table, target).is_some();
        if !self.selinux.is_enabled() || !storage.takes_label() || has_own || is_of_pod {
            return Ok(());
        }
        if self.host.label_at(global)? == request.label {
            return Ok(());
        }
        let volume = storage.unique_name().unwrap_or_else(|| request.spec.name.clone());
        Err(LabelProblem::Mounted { volume }.into())
    }
}
