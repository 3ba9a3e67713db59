//! What volumes with storage of their own have in common: where they are, and how they fail.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::model::ids::PodUid;

/// The labels of this node's object; `None`: the object is not known.
pub type NodeLabels = Box<dyn Fn() -> Option<BTreeMap<String, String>> + Send + Sync>;

/// A volume of a pod on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeLocation {
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
pub struct ReadyVolume {
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
    pub fn operation_name(self) -> &'static str {
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
            assert_eq!((phase.operation_name(), phase.reason()), (words, reason));
        }
    }
}
