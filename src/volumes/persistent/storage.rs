//! Volumes whose data are outside of the root directory.

use std::path::PathBuf;

use super::super::error::VolumeError;
use super::super::kind::Phase;
use super::super::plugin::Plugin;
use super::Kinds;
use crate::model::api::Volume;
use crate::model::mount::MountedVolume;
use crate::model::persistent::Spec;
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

/// The source of a volume that is mounted for a pod, or linked as a block device. The calls may hang,
/// and run on the threads of `operations`; they may be repeated at any time.
pub(crate) trait Storage: Plugin {
    /// The file server or driver that the volume needs; `None`: this node.
    fn server(&self) -> Option<String> {
        None
    }

    /// The directory of its plugin below the pod's `volumes` and `volumeDevices`.
    fn directory(&self) -> String {
        self.name().replace('/', "~")
    }

    /// Whether it mounts file systems with an SELinux label (Go: `SupportsSELinuxContextMount`). CSI volumes
    /// have their own rule.
    fn takes_label(&self) -> bool {
        false
    }

    /// Makes a file system ready for the pod.
    ///
    /// # Errors
    /// With the step that has failed.
    fn mount(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError>;

    /// Makes a block device ready for the pod.
    ///
    /// # Errors
    /// With the step that has failed.
    fn map(&self, kinds: &Kinds, request: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        let _ = (kinds, request);
        let what = format!("volumes of {} have no block mode", self.name());
        Err(VolumeError::device(Phase::MapBlockVolume, what))
    }

    /// Whether [`Storage::refresh`] is called at each sync for a persistent volume. A driver may want
    /// this for others too.
    fn grows(&self) -> bool {
        false
    }

    /// Brings a volume up to date that the pod has: grows it. `None`: it is mounted as before.
    ///
    /// # Errors
    /// With the step that has failed. The pod keeps the volume.
    fn refresh(&self, kinds: &Kinds, request: &Request<'_>) -> Result<Option<MountedVolume>, VolumeError> {
        let _ = (kinds, request);
        Ok(None)
    }

    /// The name in the node's status of a volume that must be attached first; `None`: no controller
    /// attaches it, or its driver waits for that itself.
    fn unique_name(&self) -> Option<String> {
        None
    }

    /// The directory of such a volume below that of its plugin, with this name of the volume.
    fn device_dir(&self, volume: &str) -> Option<PathBuf> {
        let _ = volume;
        None
    }
}

/// A volume that a pod shall have.
pub(crate) struct Request<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) volume: &'a Volume,
    pub(crate) spec: &'a Spec,
    /// The SELinux label to mount with, if no CSI driver mounts it; empty: none.
    pub(crate) label: &'a str,
    pub(crate) stop: &'a StopToken,
}

impl Request<'_> {
    pub(super) fn mounted(&self, host_path: PathBuf, selinux_relabel: bool) -> MountedVolume {
        MountedVolume {
            volume: self.volume.name.clone(),
            host_path,
            read_only: self.spec.read_only,
            selinux_relabel: selinux_relabel && !self.spec.read_only,
        }
    }
}

/// The name of a kind that this node cannot mount.
impl Plugin for String {
    fn name(&self) -> &'static str {
        "unknown"
    }
}

impl Storage for String {
    fn mount(&self, _: &Kinds, _: &Request<'_>) -> Result<MountedVolume, VolumeError> {
        Err(VolumeError::Unsupported { kind: self.clone() })
    }
}
