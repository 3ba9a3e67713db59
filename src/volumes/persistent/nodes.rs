//! Volumes that belong to some nodes only (Go: pkg/volume/util/operationexecutor,
//! `checkNodeAffinity`). The scheduler knows them too; a pod may be bound without it.

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::super::{paths, plugin_table};
use super::Kinds;
use crate::model::node::selects;
use crate::model::persistent::{Mode, Spec};
use crate::model::pod::Pod;

impl Kinds {
    /// Whether this node can have the volume. What the pod has already stays: labels may change.
    pub(super) fn check_node(&self, pod: &Pod, spec: &Spec) -> Result<(), VolumeError> {
        let (Some(selector), Some(labels)) = (&spec.nodes, &self.labels) else { return Ok(()) };
        // Without the object, which has not been read yet, nothing can be said.
        let Some(labels) = labels() else { return Ok(()) };
        if selects(selector, &self.node, &labels) || self.is_begun(pod, spec)? {
            return Ok(());
        }
        let phase = match spec.mode {
            Mode::Filesystem => Phase::NodeAffinity,
            Mode::Block => Phase::NodeAffinityBlock,
        };
        Err(VolumeError::device(phase, "no matching NodeSelectorTerms"))
    }

    /// Whether an earlier attempt has made the volume's directory in the pod, or its link. Nothing is
    /// read through a mount, whose server may not respond.
    fn is_begun(&self, pod: &Pod, spec: &Spec) -> Result<bool, VolumeError> {
        let dir = match spec.mode {
            Mode::Filesystem => "volumes",
            Mode::Block => "volumeDevices",
        };
        let dir = paths::pod(&self.root_dir, pod.uid())?.join(dir);
        let dir = dir.join(plugin_table::storage(&spec.source).directory());
        let name = paths::element(&spec.name)?;
        let Ok(entries) = std::fs::read_dir(dir) else { return Ok(false) };
        Ok(entries.filter_map(Result::ok).any(|entry| entry.file_name() == *name))
    }
}
