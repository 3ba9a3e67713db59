//! Why a container's configuration cannot be made: every variant shows as
//! `CreateContainerConfigError` with the variant's text.

use std::path::PathBuf;

use crate::model::api::Container;
use crate::model::expand::MAX_BYTES;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// An env variable's `fieldRef` or `resourceFieldRef` names a field that does not exist or may
    /// not be read.
    #[error(transparent)]
    Field(#[from] crate::model::fields::FieldError),
    /// `status.hostIP` before the node knows its address.
    #[error("host IP unknown; known addresses: []")]
    NoHostIp,
    /// An ephemeral container's target that does not run and never did.
    #[error("unable to find target container {container}")]
    NoTarget { container: String },
    /// A ConfigMap or Secret on a node without an API server.
    #[error("couldn't get {kind} {namespace}/{name}, no kubeClient defined")]
    NoClient { kind: &'static str, namespace: String, name: String },
    /// A ConfigMap or Secret that cannot be read.
    #[error(transparent)]
    Object(#[from] crate::kube::objects::ObjectError),
    /// A key that a ConfigMap or Secret does not have.
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    NoKey { key: String, kind: &'static str, namespace: String, name: String },
    /// The arguments and variables are larger than the kernel's limit.
    #[error(
        "environment and arguments of container {container:?} are larger than {MAX_BYTES} bytes together: \
         there is no room for {field}"
    )]
    TooLarge { container: String, field: String },
    /// A device plugin has failed.
    #[error(transparent)]
    Devices(super::placement::PlacementError),
    /// The services are not known yet, so some variables could be missing.
    #[error("services have not yet been read at least once, cannot construct envvars")]
    ServicesNotRead,
    /// A `fileKeyRef` into a volume that the pod does not have.
    #[error("cannot find the volume {volume:?} referenced by FileKeyRef")]
    EnvFileVolume { volume: String },
    /// A `fileKeyRef` to a file that is not a valid env file. The message shows none of its
    /// content.
    #[error("couldn't parse env file")]
    EnvFile,
    /// A `fileKeyRef` to a key that the file does not define.
    #[error("environment variable key {key:?} not found in file {path:?}")]
    EnvFileKey { key: String, path: String },
    /// A volumeMount without a mounted volume.
    #[error("cannot find volume {volume:?} to mount into container {container:?}")]
    VolumeNotMounted { volume: String, container: String },
    /// A volumeMount's propagation that is none of the three modes.
    #[error("unknown MountPropagation mode: {mode:?}")]
    MountPropagation { mode: String },
    /// A volumeMount with fields that contradict each other or that the runtime does not support.
    #[error(
        "failed to resolve recursive read-only mode: volume {volume:?} requested recursive read-only mode, but it is {reason}"
    )]
    RecursiveReadOnly { volume: String, reason: String },
    /// A volumeMount's `recursiveReadOnly` that is none of the three modes.
    #[error("failed to resolve recursive read-only mode: unknown recursive read-only mode {mode:?}")]
    RecursiveReadOnlyMode { mode: String },
    /// A `subPathExpr` with variables that the container does not have, or has empty.
    #[error("missing value for {}", names.join(", "))]
    SubPathVariables { names: Vec<String> },
    /// A sub path that is not below its volume.
    #[error("error SubPath `{path}` must not be an absolute path")]
    SubPathAbsolute { path: String },
    /// A sub path with `..`.
    #[error("unable to provision SubPath `{path}`: must not contain '..'")]
    SubPathBacksteps { path: String },
    /// A sub path that does not exist and cannot be created. Only the log has the reason: a message
    /// must not disclose the node's files to a container.
    #[error("failed to create subPath directory for volumeMount {volume:?} of container {container:?}")]
    SubPathCreate { volume: String, container: String },
    /// A sub path that leads out of its volume or cannot be mounted; only the log has the reason.
    #[error("failed to prepare subPath for volumeMount {volume:?} of container {container:?}")]
    SubPathPrepare { volume: String, container: String },
    /// `runAsUser: 0` with `runAsNonRoot`.
    #[error("container's runAsUser breaks non-root policy (pod: {pod:?}, container: {container})")]
    RunAsRoot { pod: String, container: String },
    /// `runAsNonRoot` and the image's user is root.
    #[error("container has runAsNonRoot and image will run as root (pod: {pod:?}, container: {container})")]
    ImageRunsAsRoot { pod: String, container: String },
    /// `runAsNonRoot` and the image's user has a name only.
    #[error(
        "container has runAsNonRoot and image has non-numeric user ({user}), cannot verify user is non-root (pod: {pod:?}, container: {container})"
    )]
    ImageUserByName { user: String, pod: String, container: String },
    /// `runAsNonRoot` and the image's user id is out of the kernel's range.
    #[error(
        "container has runAsNonRoot and image has user id {uid}, which is out of range (pod: {pod:?}, container: {container})"
    )]
    ImageUserOutOfRange { uid: i64, pod: String, container: String },
    /// A profile kind that is none of the three.
    #[error("unknown {what} profile type {kind:?}")]
    ProfileType { what: &'static str, kind: String },
    /// Profile kind Localhost without a name.
    #[error("localhostProfile must be set if {what} type is Localhost")]
    NoLocalhostProfile { what: &'static str },
    /// `procMount` that is neither Default nor Unmasked.
    #[error("unknown procMount type {kind:?}")]
    ProcMount { kind: String },
    /// `supplementalGroupsPolicy: Strict` is not supported: the image's groups would be added.
    #[error("SupplementalGroupsPolicy=Strict is not supported in this node")]
    StrictGroups,
    /// The request for the runtime's features failed.
    #[error("{0}")]
    Abilities(crate::cri::CriError),
    /// No user namespace can be allocated for `hostUsers: false`.
    #[error(transparent)]
    UserNamespace(#[from] super::user_namespaces::UserNamespaceError),
    /// The pod's host name cannot be formed.
    #[error(transparent)]
    Hostname(#[from] super::hostname::HostnameError),
    /// The pod's DNS settings cannot be formed.
    #[error(transparent)]
    Dns(#[from] super::dns::DnsError),
    /// An operation on a file or directory of the pod failed.
    #[error("cannot {what} {}: {error}", path.display())]
    File { what: &'static str, path: PathBuf, error: std::io::Error },
}

impl ConfigError {
    pub(super) fn too_large(container: &Container, field: String) -> ConfigError {
        ConfigError::TooLarge { container: container.name.clone(), field }
    }
}
