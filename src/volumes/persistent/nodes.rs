//! Volumes that belong to some nodes only (Go: pkg/volume/util/operationexecutor,
//! `checkNodeAffinity`). The scheduler knows them too; a pod may be bound without it.

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::super::{paths, plugin_table};
use super::Kinds;
use super::sysfs::is_absence;
use crate::model::node::selects;
use crate::model::persistent::{Spec, VolumeMode, claim_name};
use crate::model::pod::Pod;

impl Kinds {
    /// Whether this node can have the volume.
    /// DIFFERS: what the pod has already stays, because labels may change.
    pub(super) fn check_node(&self, pod: &Pod, spec: &Spec) -> Result<(), VolumeError> {
        let (Some(selector), Some(labels)) = (&spec.nodes, &self.labels) else { return Ok(()) };
        // Without the object, which has not been read yet, nothing can be said.
        let Some(labels) = labels() else { return Ok(()) };
        if selects(selector, &self.node, &labels) || self.is_begun(pod, spec)? {
            return Ok(());
        }
        let phase = match spec.mode {
            VolumeMode::Filesystem => Phase::NodeAffinity,
            VolumeMode::Block => Phase::NodeAffinityBlock,
        };
        Err(VolumeError::device(phase, "no matching NodeSelectorTerms"))
    }

    /// Whether an earlier attempt has made the volume's directory in the pod, or its link. Nothing is
    /// read through a mount, whose server may not respond. The directory may also be that of a volume
    /// whose source and name are in the pod.
    fn is_begun(&self, pod: &Pod, spec: &Spec) -> Result<bool, VolumeError> {
        let mut volumes = pod.spec().volumes.iter().flatten();
        if volumes.any(|other| other.name == spec.name && claim_name(pod, other).is_none()) {
            return Ok(false);
        }
        let dir = match spec.mode {
            VolumeMode::Filesystem => "volumes",
            VolumeMode::Block => "volumeDevices",
        };
        let dir = paths::pod(&self.root_dir, pod.uid())?.join(dir);
        let dir = dir.join(plugin_table::storage(&spec.source).directory());
        let name = paths::element(&spec.name)?;
        let has_name = |entries: std::fs::ReadDir| {
            for entry in entries {
                if entry?.file_name() == *name {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        match std::fs::read_dir(&dir).and_then(has_name) {
            Err(source) if !is_absence(&source) => {
                Err(VolumeError::Io { attempt: "list", path: dir, source })
            }
            result => Ok(result.unwrap_or_default()),
        }
    }
}
