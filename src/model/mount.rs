//! The data that the volumes room passes to the runtime room for one volume of a pod.

use std::path::PathBuf;

use super::ids::PodUid;
use crate::util::stop::StopToken;

/// A volume that is ready on the node, to be mounted into containers (Go: VolumeInfo).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    /// The volume's name in `spec.volumes`.
    pub volume: String,
    /// The path of its content on the node. Empty for a volume that the runtime mounts from an
    /// image: it has no path on the node.
    pub host_path: PathBuf,
    /// Whether the volume itself is read-only, whatever the container requests.
    pub read_only: bool,
    /// Whether the runtime may relabel the content. Used only where SELinux is enabled, and only
    /// for the first container that mounts the volume.
    pub selinux_relabel: bool,
}

/// One sub path of a volume, for one `volumeMount` of one container.
#[derive(Debug, Clone, Copy)]
pub struct SubPath<'a> {
    /// The pod.
    pub pod: &'a PodUid,
    /// The container's name.
    pub container: &'a str,
    /// The index of the mount in the container's `volumeMounts`.
    pub index: usize,
    /// The volume, mounted.
    pub volume: &'a MountedVolume,
    /// The path below the volume: relative, without `..`, variables replaced.
    pub path: &'a str,
}

/// Why a sub path cannot be used. The exact path is only logged: containers control the content of
/// a volume, and must not learn paths of the node's files from error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubPathFailure {
    /// The sub path does not exist and cannot be created.
    Create,
    /// The sub path leads out of the volume, is not a file or directory, or cannot be mounted.
    Prepare,
}

/// Prepares sub paths of volumes: implemented by the volumes room, called by the runtime room,
/// which alone has the variables in them.
pub trait SubPaths: Sync {
    /// Checks the sub path, creates it if necessary, and returns a path on the node at which
    /// exactly that object can be mounted, even if names in the volume change.
    ///
    /// # Errors
    /// When no such object exists inside the volume.
    fn bind(&self, wanted: SubPath<'_>, stop: &StopToken) -> Result<PathBuf, SubPathFailure>;
}

/// The path at which a container has its termination log: absolute, without empty, `.` and `..`
/// segments (Go: `filepath.Clean` and `volumeutil.MakeAbsolutePath` for
/// `terminationMessagePath`, which may be relative).
#[must_use]
pub fn termination_log_path(path: &str) -> String {
    let mut segments: Vec<&str> = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    format!("/{}", segments.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn termination_log_path_is_absolute_and_clean() {
        for (path, expected) in [
            ("/dev/termination-log", "/dev/termination-log"),
            ("tmp/msg", "/tmp/msg"),
            ("/dev/../msg", "/msg"),
            ("../../a//./b/", "/a/b"),
        ] {
            assert_eq!(termination_log_path(path), expected);
        }
    }
}
