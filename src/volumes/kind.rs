//! What a volume of a CSI driver offers to the rest of this room (Go: pkg/volume Mounter, Unmounter,
//! DeviceMounter, BlockVolumeMapper). Other volumes do not use it: see `setup` and `persistent`.
//!
//! All methods block. They run on the threads of `operations`, which have a deadline and a stop
//! token. A volume is set up from its resolved source; it is torn down from what is on the disk
//! alone, so that a restarted agent, or one without an API server, can do it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::error::VolumeError;
use crate::model::ids::PodUid;
use crate::model::persistent::Spec;
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

/// One volume of one pod, its source resolved (claim, persistent volume, secrets' names).
pub trait VolumeKind: Send + Sync {
    /// The name of the volume on this node. Operations on one name never run at the same time.
    /// Attachable volumes: `<plugin>/<id>`; others: `<plugin>/<pod UID>-<volume>`. The first form is
    /// what `node.status.volumesInUse` contains.
    fn unique_name(&self) -> String;

    /// Whether [`VolumeKind::set_up`] must be called again at each sync of the pod.
    fn requires_remount(&self) -> bool {
        false
    }

    /// Makes the volume ready for the pod: attached, mounted on the node, mounted for the pod,
    /// grown to its size, owned by the pod's group. It may be repeated at any time.
    ///
    /// # Errors
    /// [`VolumeError::Kind`] with the phase. After an error that is not final, something may be
    /// mounted: [`VolumeKeeper::tear_down`] must be called before the volume is forgotten.
    fn set_up(&self, stop: &StopToken) -> Result<Ready, VolumeError>;

    /// Grows the file system of a volume that is set up, while the pod uses it. Returns the size in
    /// bytes if the volume has a new one.
    ///
    /// # Errors
    /// [`VolumeError::Kind`] with the phase [`Phase::Expand`].
    fn expand(&self, bytes: i64, stop: &StopToken) -> Result<Option<i64>, VolumeError> {
        let _ = (bytes, stop);
        Ok(None)
    }
}

/// Makes the volumes of CSI drivers, for volumes whose claim was resolved.
pub trait CsiVolumes: Send + Sync {
    /// The volume of one pod. `spec.source` is [`Source::Csi`](crate::model::persistent::Source::Csi).
    ///
    /// # Errors
    /// When the pod cannot have the volume.
    fn kind(&self, pod: &Pod, volume: &str, spec: &Spec) -> Result<Box<dyn VolumeKind>, VolumeError>;
}

/// The labels of this node's object; `None`: the object is not known.
pub type NodeLabels = Box<dyn Fn() -> Option<BTreeMap<String, String>> + Send + Sync>;

/// What a kind of volume does without the volume's source: the other end of its life.
pub trait VolumeKeeper: Send + Sync {
    /// The directory below `pods/<uid>/volumes` and `pods/<uid>/volumeDevices`, such as
    /// `kubernetes.io~csi`.
    fn directory(&self) -> &'static str;

    /// Removes the volume from the pod, and from the node if no other pod uses it. It may be
    /// repeated; nothing there is a success. It never deletes what is below a mount.
    ///
    /// # Errors
    /// [`VolumeError::Kind`]; the volume, or a part of it, is still there.
    fn tear_down(&self, place: &Place, stop: &StopToken) -> Result<(), VolumeError>;

    /// The volumes that are mounted on the node and used by no pod are unmounted. To be called once
    /// after the first complete set of pods, and after a failure of [`VolumeKeeper::tear_down`].
    ///
    /// # Errors
    /// The first failure; the others were tried.
    fn release_unused(&self, stop: &StopToken) -> Result<(), VolumeError>;
}

/// A volume of a pod on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The pod.
    pub pod: PodUid,
    /// The name of the volume's directory: the persistent volume's name, or the name in the pod.
    pub spec_name: String,
    /// File system or device.
    pub form: Form,
}

/// How containers see a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// A directory, in `volumes`.
    #[default]
    Filesystem,
    /// A block device, in `volumeDevices`.
    Block,
}

/// A volume that is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// The directory, or the device.
    pub host_path: PathBuf,
    /// File system or device.
    pub form: Form,
    /// Whether the volume itself is read-only.
    pub read_only: bool,
    /// Whether the runtime may change the SELinux label of its files. False if it was mounted with
    /// a label.
    pub selinux_relabel: bool,
    /// The size in bytes that the volume was grown to by this set-up.
    pub grown_to: Option<i64>,
}

/// The step of a set-up or removal that failed, for the text of its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The volume belongs to other nodes.
    NodeAffinity,
    /// The block device belongs to other nodes.
    NodeAffinityBlock,
    /// The volume cannot be attached: the node has no place for it.
    NoPlace,
    /// The block device cannot be attached: the node has no place for it.
    NoPlaceBlock,
    /// The volume is not attached to this node.
    WaitForAttach,
    /// The mount on the node, which all pods share.
    MountDevice,
    /// The mount for the pod.
    SetUp,
    /// A block device that is not attached to this node.
    WaitForAttachBlock,
    /// The block device on the node.
    SetUpDevice,
    /// The block device for the pod.
    MapPodDevice,
    /// Links to and mounts of the block device.
    MapBlockVolume,
    /// The growth of the file system.
    Expand,
    /// The growth of the file system, to a size that it can never have.
    ExpandInfeasible,
    /// The removal from the pod. It has no event.
    TearDown,
    /// The removal from the node. It has no event.
    UnmountDevice,
}

impl Phase {
    /// The first words of the event, as upstream's.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Phase::NodeAffinity => "MountVolume.NodeAffinity check",
            Phase::NodeAffinityBlock => "MapVolume.NodeAffinity check",
            Phase::NoPlace | Phase::WaitForAttach => "MountVolume.WaitForAttach",
            Phase::MountDevice => "MountVolume.MountDevice",
            Phase::SetUp => "MountVolume.SetUp",
            Phase::NoPlaceBlock | Phase::WaitForAttachBlock => "MapVolume.WaitForAttach",
            Phase::SetUpDevice => "MapVolume.SetUpDevice",
            Phase::MapPodDevice => "MapVolume.MapPodDevice",
            Phase::MapBlockVolume => "MapVolume.MapBlockVolume",
            Phase::Expand | Phase::ExpandInfeasible => "MountVolume.NodeExpandVolume",
            Phase::TearDown => "UnmountVolume.TearDown",
            Phase::UnmountDevice => "UnmountDevice",
        }
    }

    /// The reason of the event; `None` for removals, whose failures are only logged.
    #[must_use]
    pub fn reason(self) -> Option<&'static str> {
        Some(match self {
            Phase::NodeAffinity
            | Phase::NodeAffinityBlock
            | Phase::NoPlace
            | Phase::WaitForAttach
            | Phase::MountDevice
            | Phase::SetUp => "FailedMount",
            Phase::NoPlaceBlock
            | Phase::WaitForAttachBlock
            | Phase::SetUpDevice
            | Phase::MapPodDevice
            | Phase::MapBlockVolume => "FailedMapVolume",
            Phase::Expand | Phase::ExpandInfeasible => "VolumeResizeFailed",
            Phase::TearDown | Phase::UnmountDevice => return None,
        })
    }
}

/// What a failure means for the state of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Certainty {
    /// The operation has ended and has changed nothing.
    Final,
    /// The operation may have happened, or may still run. It must be repeated or undone.
    Uncertain,
    /// The operation was not begun.
    NotBegun,
}

/// The failure of a kind of volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct KindError {
    /// The step.
    pub phase: Phase,
    /// The text after `failed for volume "v" : `.
    pub message: String,
    /// Whether something may have changed.
    pub certainty: Certainty,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_set_up_and_growth_have_events() {
        for (phase, words, reason) in [
            (Phase::NodeAffinityBlock, "MapVolume.NodeAffinity check", Some("FailedMount")),
            (Phase::MountDevice, "MountVolume.MountDevice", Some("FailedMount")),
            (Phase::SetUp, "MountVolume.SetUp", Some("FailedMount")),
            (Phase::SetUpDevice, "MapVolume.SetUpDevice", Some("FailedMapVolume")),
            (Phase::Expand, "MountVolume.NodeExpandVolume", Some("VolumeResizeFailed")),
            (Phase::TearDown, "UnmountVolume.TearDown", None),
        ] {
            assert_eq!((phase.words(), phase.reason()), (words, reason));
        }
    }
}
