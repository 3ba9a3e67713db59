//! Volumes that a controller attaches: the node waits until its own object shows them (Go:
//! pkg/volume/util/operationexecutor, `GenerateVerifyControllerAttachedVolumeFunc`). CSI volumes have
//! VolumeAttachments instead.

use std::time::Duration;

use super::super::error::VolumeError;
use super::super::kind::{AttachedVolumes, Phase};
use super::super::paths;
use super::host::mount_at;
use super::{Kinds, plugin_of};
use crate::model::api::FCVolumeSource;
use crate::model::ids::PodUid;
use crate::model::persistent::{Iscsi, Mode, Source, Spec};
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

/// The time between two reads of the node's object.
const PERIOD: Duration = Duration::from_millis(300);
/// Reads of one attempt; a later attempt continues. An attempt holds one of few threads.
const READS: usize = 30;

/// The name of a volume in the node's status; `None`: no controller attaches it.
fn unique_name(source: &Source) -> Option<String> {
    match source {
        Source::Iscsi(source) => Some(format!("kubernetes.io/iscsi/{}", of_iscsi(source))),
        Source::Fc(source) => Some(format!("kubernetes.io/fc/{}", of_fc(source)?)),
        _ => None,
    }
}

fn of_iscsi(source: &Iscsi) -> String {
    format!("{}:{}:{}", source.target_portal, source.iqn, source.lun)
}

/// The lists as Go prints them.
fn of_fc(source: &FCVolumeSource) -> Option<String> {
    let list = |names: &[String]| format!("[{}]", names.join(" "));
    let wwns = source.target_wwns.as_deref().unwrap_or_default();
    let wwids = source.wwids.as_deref().unwrap_or_default();
    match source.lun {
        Some(lun) if !wwns.is_empty() => Some(format!("{}:{lun}", list(wwns))),
        _ => (!wwids.is_empty()).then(|| list(wwids)),
    }
}

impl Kinds {
    /// From now on volumes that a controller attaches are set up only once `attached` has them.
    pub(crate) fn wait_for_attachment(&self, attached: AttachedVolumes) {
        // It is set once, before the first pod.
        let _ = self.attached.set(attached);
    }

    /// The volumes that pods use and that a controller may detach.
    pub(crate) fn in_use(&self) -> Vec<String> {
        let users = self.attachable();
        let mut names: Vec<String> = users.values().flatten().cloned().collect();
        names.sort();
        names.dedup();
        names
    }

    pub(super) fn forget_attachable(&self, uid: &PodUid) {
        self.attachable().remove(uid);
    }

    /// Whether an earlier agent has mounted the volume for the pod. It was attached then.
    fn is_mounted(&self, pod: &Pod, spec: &Spec) -> Result<bool, VolumeError> {
        let plugin = plugin_of(&spec.source).replace('/', "~");
        let path = paths::pod(&self.root_dir, pod.uid())?;
        let target = path.join("volumes").join(plugin).join(paths::element(&spec.name)?);
        Ok(mount_at(&self.host.mounts()?, &target).is_some())
    }

    /// Waits until the controller has attached the volume, for some seconds.
    ///
    /// DIFFERS: a static pod does not wait, because it also starts without an API server. The
    /// controller has nothing to do for these volumes but to list them.
    pub(super) fn check_attached(&self, pod: &Pod, spec: &Spec, stop: &StopToken) -> Result<(), VolumeError> {
        let (Some(attached), Some(name)) = (self.attached.get(), unique_name(&spec.source)) else {
            return Ok(());
        };
        self.attachable().entry(pod.uid().clone()).or_default().insert(name.clone());
        if pod.is_static() || self.is_mounted(pod, spec)? {
            return Ok(());
        }
        for read in 0..READS {
            if attached().is_some_and(|names| names.contains(&name)) {
                return Ok(());
            }
            if read + 1 < READS {
                self.host.pause(PERIOD, stop)?;
            }
        }
        let phase = match spec.mode {
            Mode::Filesystem => Phase::WaitForAttach,
            Mode::Block => Phase::WaitForAttachBlock,
        };
        Err(VolumeError::device(phase, format!("volume {name} not attached according to node status")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn names_equal_those_of_the_controller() {
        let fc = |value: Value| of_fc(&serde_json::from_value(value).unwrap());
        assert_eq!(fc(json!({"targetWWNs": ["a", "b"], "lun": 2})).as_deref(), Some("[a b]:2"));
        assert_eq!(fc(json!({"wwids": ["c"]})).as_deref(), Some("[c]"));
        assert_eq!(fc(json!({"targetWWNs": ["a"]})), None);
        let iscsi: Iscsi =
            serde_json::from_value(json!({"targetPortal": "10.0.0.1:3260", "iqn": "iqn.x", "lun": 0}))
                .unwrap();
        let name = unique_name(&Source::Iscsi(iscsi));
        assert_eq!(name.as_deref(), Some("kubernetes.io/iscsi/10.0.0.1:3260:iqn.x:0"));
        assert_eq!(unique_name(&Source::Other("x".to_owned())), None);
    }
}
