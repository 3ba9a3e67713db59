//! Errors of volumes.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::atomic_writer::{MAX_BYTES, PathError};
use crate::kube::objects::ObjectError;
use crate::model::mount::SubPathFailure;
use crate::util::error_chain::chain;

/// What went wrong, with which volume or directory.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The directories that every pod has could not be made.
    #[error("error making pod data directories: {}", chain(.source))]
    PodDirectories {
        /// What exactly failed.
        #[source]
        source: Box<VolumeError>,
    },
    /// Some volumes are not ready; each has had its event, or waits to be tried again.
    #[error("unmounted volumes=[{}], unattached volumes=[], failed to process volumes=[]: {cause}", volumes.join(" "))]
    NotMounted {
        /// The volumes that are missing, in the order of the pod's specification.
        volumes: Vec<String>,
        /// The first failure, in words.
        cause: String,
        /// When trying again makes sense, at the earliest.
        retry_at: Instant,
    },
    /// The path of a hostPath volume is not what its type asks for.
    #[error("hostPath type check failed: {path} is not {wanted}")]
    HostPathType {
        /// The path on the node.
        path: String,
        /// Such as `a directory`.
        wanted: &'static str,
    },
    /// The type of a hostPath volume is none that Kubernetes has.
    #[error("hostPath {path}: {kind:?} is an invalid volume type")]
    HostPathKind {
        /// The path on the node.
        path: String,
        /// The type as written.
        kind: String,
    },
    /// A hostPath that climbs.
    #[error("invalid HostPath `{path}`: must not contain '..'")]
    HostPathBacksteps {
        /// The path as written.
        path: String,
    },
    /// A medium of an emptyDir that is none of those that Kubernetes has.
    #[error("unknown storage medium {medium:?}")]
    Medium {
        /// As written.
        medium: String,
    },
    /// An emptyDir of huge pages whose size the pod does not settle.
    #[error("{why}")]
    HugePages {
        /// A sentence with the medium in it.
        why: String,
    },
    /// The content of a volume cannot be told.
    #[error("{problem}")]
    Content {
        /// One sentence, or several in brackets.
        problem: String,
    },
    /// A ConfigMap or Secret.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A file's place in its volume.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The files of the volume would exceed what all volumes of a pod may have.
    #[error("more than {MAX_BYTES} bytes for the files of all volumes of the pod")]
    FilesTooLarge,
    /// A sub path of a volume.
    #[error("cannot {what}")]
    SubPath {
        /// What the container reports.
        kind: SubPathFailure,
        /// A verb and its object.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// An operation takes too long. It goes on, and nothing else is done with the volume.
    #[error("the operation has not ended in time and goes on: context deadline exceeded")]
    Overdue,
    /// An earlier operation on the volume still goes on.
    #[error("an earlier operation on the volume has not ended yet")]
    Pending,
    /// So many operations hang, of this pod or of all, that no more are begun.
    #[error("too many operations on volumes hang")]
    TooManyPending,
    /// An operation ended with a panic, which the log has.
    #[error("the operation panicked")]
    Panicked,
    /// A thread for an operation cannot be had.
    #[error("cannot start a thread for the operation")]
    Thread {
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A volume of a kind that this version cannot make.
    #[error("volumes of type {kind} are not supported by this version of coracle")]
    Unsupported {
        /// The field's name in the API, such as `configMap`.
        kind: String,
    },
    /// A pod UID or volume name that cannot be one path element.
    #[error("{name:?} cannot be the name of a directory")]
    Name {
        /// The name in question.
        name: String,
    },
    /// A file-system operation failed.
    #[error("cannot {attempt} {}", path.display())]
    Io {
        /// A verb: `make directory`, `mount tmpfs at`.
        attempt: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Volumes of a pod are still there after a clean-up. Mounts that do not come off and
    /// data of foreign volume types are left alone.
    #[error("mounted volumes=[{}]: {cause}", volumes.join(" "))]
    LeftBehind {
        /// The paths below the pod's directory.
        volumes: Vec<String>,
        /// The first failure, in words.
        cause: String,
    },
    /// The agent stops.
    #[error("stopping")]
    Stopping,
}

impl VolumeError {
    /// When the volumes may be tried again; `None` where nothing is gained by a set time.
    #[must_use]
    pub fn retry_at(&self) -> Option<Instant> {
        match self {
            VolumeError::NotMounted { retry_at, .. } => Some(*retry_at),
            _ => None,
        }
    }

    /// Whether a hostPath volume may succeed once another volume of its pod is ready.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self, VolumeError::HostPathType { .. } | VolumeError::Io { .. })
    }

    pub(super) fn io(
        attempt: &'static str,
        path: &Path,
    ) -> impl FnOnce(rustix::io::Errno) -> VolumeError + use<> {
        let path = path.to_owned();
        move |errno| VolumeError::Io { attempt, path, source: errno.into() }
    }
}
