//! What the volumes room hands to the runtime room for one volume of a pod.

use std::path::PathBuf;

use super::ids::PodUid;
use crate::util::stop::StopToken;

/// A volume that is ready on the node, to be mounted into containers (Go: VolumeInfo).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    /// The volume's name in `spec.volumes`.
    pub volume: String,
    /// Where its content is on the node. Empty for a volume that the runtime mounts from an
    /// image: the node has no place for it.
    pub host_path: PathBuf,
    /// Whether the volume itself refuses writes, whatever the container requests.
    pub read_only: bool,
    /// Whether the runtime may relabel the content. To be passed on only where SELinux is
    /// enabled, and only with the first container that mounts the volume.
    pub selinux_relabel: bool,
}

/// One sub path of a volume, for one `volumeMount` of one container.
#[derive(Debug, Clone, Copy)]
pub struct SubPath<'a> {
    /// The pod.
    pub pod: &'a PodUid,
    /// The container's name.
    pub container: &'a str,
    /// The mount's place in the container's `volumeMounts`.
    pub index: usize,
    /// The volume, mounted.
    pub volume: &'a MountedVolume,
    /// The path below the volume: relative, without `..`, variables replaced.
    pub path: &'a str,
}

/// Why a sub path cannot be used. Where exactly is for the log alone: what containers put
/// into a volume must not make the agent reveal the node's files to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubPathFailure {
    /// It is not there and cannot be made.
    Create,
    /// It leads out of the volume, is no file or directory, or cannot be mounted.
    Prepare,
}

/// Makes sub paths of volumes usable: implemented by the volumes room, called by the
/// runtime room, which alone knows the variables in them.
pub trait SubPaths: Sync {
    /// Checks and if need be makes the sub path, and gives the path on the node at which
    /// exactly that object can be mounted, whatever becomes of the names in the volume.
    ///
    /// # Errors
    /// When there is no such object inside the volume.
    fn bind(&self, wanted: SubPath<'_>, stop: &StopToken) -> Result<PathBuf, SubPathFailure>;
}
