//! What the volumes room hands to the runtime room for one volume of a pod.

use std::path::PathBuf;

/// A volume that is ready on the node, to be mounted into containers (Go: VolumeInfo).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    /// The volume's name in `spec.volumes`.
    pub volume: String,
    /// Where its content is on the node.
    pub host_path: PathBuf,
    /// Whether the volume itself refuses writes, whatever the container asks for.
    pub read_only: bool,
    /// Whether the runtime may relabel the content. To be passed on only where SELinux is
    /// enabled, and only with the first container that mounts the volume.
    pub selinux_relabel: bool,
}
