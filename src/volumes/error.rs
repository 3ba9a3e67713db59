//! Errors of volumes.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::actual::FILE_MEMORY;
use super::atomic_writer::{MAX_BYTES, PathError};
use super::attachment::AttachmentWait;
use super::kind::{Certainty, KindError, Phase};
use super::selinux::SelinuxLabelError;
use crate::kube::objects::ObjectError;
use crate::model::mount::SubPathFailure;
use crate::util::child::ChildError;
use crate::util::error_chain::chain;

/// The failure of an operation on a volume or directory.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The directories that every pod has could not be made.
    #[error("error making pod data directories: {}", chain(.source))]
    PodDirectories {
        /// The operation that failed.
        #[source]
        source: Box<VolumeError>,
    },
    /// Some volumes are not ready; the event of each was raised, or its retry is pending.
    #[error("unmounted volumes=[{}], unattached volumes=[], failed to process volumes=[]: {cause}", volumes.join(" "))]
    NotMounted {
        /// The volumes that are missing, in the order of the pod's specification.
        volumes: Vec<String>,
        /// The first failure, in words.
        cause: String,
        /// The time of the earliest retry.
        retry_at: Instant,
        /// The node has had no place for one of them for as long as a pod waits.
        has_no_place: bool,
    },
    /// The path of a hostPath volume does not match its type.
    #[error("hostPath type check failed{} {path} is not {wanted}, {found}", if *is_known { ":" } else { "," })]
    HostPathType {
        /// The path on the node.
        path: String,
        /// The type in words, such as `a directory`.
        wanted: &'static str,
        /// The type that it has, or why this is not known.
        found: String,
        /// Whether its type is known.
        is_known: bool,
    },
    /// The type of a hostPath volume is none that Kubernetes has.
    #[error("hostPath {path}: {kind:?} is an invalid volume type")]
    HostPathKind {
        /// The path on the node.
        path: String,
        /// The type as written.
        kind: String,
    },
    /// A hostPath with `..`.
    #[error("invalid HostPath `{path}`: must not contain '..'")]
    HostPathBacksteps {
        /// The path as written.
        path: String,
    },
    /// A medium of an emptyDir that is none of those that Kubernetes has.
    #[error("unknown storage medium {medium:?}")]
    Medium {
        /// The medium as written.
        medium: String,
    },
    /// An emptyDir of huge pages whose size does not follow from the pod.
    #[error("{reason}")]
    HugePages {
        /// A sentence with the medium in it.
        reason: String,
    },
    /// The content of a volume cannot be computed.
    #[error("{problem}")]
    Content {
        /// One reason, or several in brackets.
        problem: String,
    },
    /// A ConfigMap or Secret.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A file's place in its volume.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A volume on real storage.
    #[error(transparent)]
    Kind(#[from] KindError),
    /// The files of the volume would exceed what all volumes of a pod may have.
    #[error("more than {MAX_BYTES} bytes for the files of all volumes of the pod")]
    FilesTooLarge,
    /// The files of the volume would take more memory than volumes may have together.
    #[error("more than {} MiB of the node's memory for the files of the Secret, downwardAPI and projected volumes of \
        {whose}: each file takes {} KiB besides its content", limit >> 20, FILE_MEMORY >> 10)]
    FilesTakeMemory {
        /// Whose volumes have the limit.
        whose: &'static str,
        /// The limit in bytes.
        limit: usize,
    },
    /// A sub path of a volume.
    #[error("cannot {what}")]
    SubPath {
        /// The failure that the container's status shows.
        kind: SubPathFailure,
        /// A verb and its object.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The operation exceeded its deadline. It continues, and blocks other operations on the
    /// volume.
    #[error("the operation continues after its deadline: context deadline exceeded")]
    Overdue,
    /// An earlier operation on the volume has not ended.
    #[error("an earlier operation on the volume has not ended yet")]
    Pending,
    /// The number of hanging operations, of this pod or of all pods, is at its limit.
    #[error("too many operations on volumes hang")]
    TooManyPending,
    /// An operation ended with a panic, which was logged.
    #[error("the operation panicked")]
    Panicked,
    /// The thread for an operation cannot be started.
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
        /// The invalid name.
        name: String,
    },
    /// A file-system operation failed.
    #[error("cannot {attempt} {}", path.display())]
    Io {
        /// A verb: `make directory`, `mount tmpfs at`.
        attempt: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Volumes of a pod remain after a clean-up. Mounts that cannot be unmounted and data of
    /// foreign volume types are not removed.
    #[error("mounted volumes=[{}]: {cause}", volumes.join(" "))]
    LeftBehind {
        /// The paths below the pod's directory.
        volumes: Vec<String>,
        /// The first failure, in words.
        cause: String,
    },
    /// The claim of a volume cannot be used, or could not be read.
    #[error("error processing PVC {namespace}/{claim}: {reason}")]
    Claim {
        /// The pod's namespace.
        namespace: String,
        /// The claim's name.
        claim: String,
        /// Why, in upstream's words.
        reason: String,
    },
    /// The mode of a volume does not match its use.
    #[error(transparent)]
    ClaimUse(#[from] crate::model::persistent::ClaimProblem),
    /// The volume cannot be mounted with the SELinux label of the pod.
    #[error(transparent)]
    SelinuxLabel(#[from] SelinuxLabelError),
    /// The node's object does not show that the volume is in use and attached. The pod is woken when
    /// it does. This is a state, and not a failure.
    #[error(transparent)]
    AwaitsAttachment(#[from] AttachmentWait),
    /// A volume that only one pod may use at a time.
    #[error("volume uses the ReadWriteOncePod access mode and is already in use by another pod")]
    InUse,
    /// A helper program is missing, or gave no result.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// No way to unmount ends.
    #[error("cannot unmount {}: its server does not respond", path.display())]
    UnmountHangs {
        /// The mount point.
        path: PathBuf,
    },
    /// The containers of a pod wait for a file server.
    #[error("{source_name}, the server of volume {volume}, does not respond, and a container waits for it{}",
        if *is_shared { "; another pod uses it too" } else { "" })]
    NoResponse {
        /// What is mounted, such as `server:/path`.
        source_name: String,
        /// The volume's plugin and name.
        volume: String,
        /// Whether the requests to it must not be aborted.
        is_shared: bool,
    },
    /// The agent stops.
    #[error("stopping")]
    Stopping,
}

/// Why a helper program gave no result.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// It is not installed.
    #[error("{program} is not installed on this node{packages}")]
    Missing {
        /// Its name.
        program: String,
        /// The packages that contain it, in brackets; empty if they are not known.
        packages: String,
    },
    /// It hung, wrote too much, or the agent stops.
    #[error(transparent)]
    Child(#[from] ChildError),
}

impl ToolError {
    pub(super) fn is_stopping(&self) -> bool {
        matches!(self, ToolError::Child(ChildError::Stopped { .. }))
    }
}

impl VolumeError {
    /// When the volumes may be tried again; `None` if no time for a retry is known.
    #[must_use]
    pub fn retry_at(&self) -> Option<Instant> {
        match self {
            VolumeError::NotMounted { retry_at, .. } => Some(*retry_at),
            _ => None,
        }
    }

    /// Whether the pod must go to another node, because this one has no place for a volume of it.
    #[must_use]
    pub fn has_no_place(&self) -> bool {
        matches!(self, VolumeError::NotMounted { has_no_place: true, .. })
    }

    /// Whether a hostPath volume may succeed once another volume of its pod is ready.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self, VolumeError::HostPathType { .. } | VolumeError::Io { .. })
    }

    /// Whether the kernel refused because the mount is in use.
    pub(super) fn is_busy(&self) -> bool {
        let busy = rustix::io::Errno::BUSY.raw_os_error();
        matches!(self, VolumeError::Io { source, .. } if source.raw_os_error() == Some(busy))
    }

    /// The failure of a kind of volume that has changed nothing, or that is repeated anyway.
    pub(super) fn device(phase: Phase, what: impl Into<String>) -> VolumeError {
        KindError { phase, message: what.into(), certainty: Certainty::Uncertain }.into()
    }

    pub(super) fn io(
        attempt: &'static str,
        path: &Path,
    ) -> impl FnOnce(rustix::io::Errno) -> VolumeError + use<> {
        let path = path.to_owned();
        move |errno| VolumeError::Io { attempt, path, source: errno.into() }
    }
}
