//! Why a container's configuration cannot be made: every variant shows as
//! `CreateContainerConfigError` with the variant's text.

use std::path::PathBuf;

use crate::model::api::Container;
use crate::model::expand::LIMIT;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// An env variable's `fieldRef` or `resourceFieldRef` names what does not exist or may
    /// not be read.
    #[error(transparent)]
    Field(#[from] crate::model::fields::FieldError),
    /// `status.hostIP` before the node knows its address.
    #[error("host IP unknown; known addresses: []")]
    NoHostIp,
    /// An ephemeral container's target that does not run and never did.
    #[error("unable to find target container {container}")]
    NoTarget { container: String },
    /// A ConfigMap or Secret, for which an API server would have to be asked.
    #[error("couldn't get {kind} {namespace}/{name}, no kubeClient defined")]
    NoClient { kind: &'static str, namespace: String, name: String },
    /// A ConfigMap or Secret that cannot be had.
    #[error(transparent)]
    Object(#[from] crate::kube::objects::ObjectError),
    /// A key that a ConfigMap or Secret does not have.
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    NoKey { key: String, kind: &'static str, namespace: String, name: String },
    /// What the container's programs would start with is more than the kernel takes.
    #[error(
        "environment and arguments of container {container:?} are larger than {LIMIT} bytes together: \
         there is no room for {field}"
    )]
    TooLarge { container: String, field: String },
    /// Without the services it is unknown which variables would be missing.
    #[error("services have not yet been read at least once, cannot construct envvars")]
    ServicesNotRead,
    /// A `fileKeyRef` into a volume that the pod does not have.
    #[error("cannot find the volume {volume:?} referenced by FileKeyRef")]
    EnvFileVolume { volume: String },
    /// A `fileKeyRef` into something that cannot be read as an env file. Nothing of its
    /// content is shown.
    #[error("couldn't parse env file")]
    EnvFile,
    /// A `fileKeyRef` to a key that the file does not define.
    #[error("environment variable key {key:?} not found in file {path:?}")]
    EnvFileKey { key: String, path: String },
    /// A source that this version cannot read.
    #[error("{what} in container {container:?} has no effect in this version")]
    Unsupported {
        /// The field and what it refers to.
        what: String,
        container: String,
    },
    /// A volumeMount without a mounted volume.
    #[error("cannot find volume {volume:?} to mount into container {container:?}")]
    VolumeNotMounted { volume: String, container: String },
    /// A volumeMount's propagation that is none of the three.
    #[error("unknown MountPropagation mode: {mode:?}")]
    MountPropagation { mode: String },
    /// A volumeMount that demands what does not go together or what the runtime cannot do.
    #[error(
        "failed to resolve recursive read-only mode: volume {volume:?} requested recursive read-only mode, but it is {why}"
    )]
    RecursiveReadOnly { volume: String, why: String },
    /// A volumeMount's mode that is none of the three.
    #[error("failed to resolve recursive read-only mode: unknown recursive read-only mode {mode:?}")]
    RecursiveReadOnlyMode { mode: String },
    /// A `subPathExpr` with variables that the container does not have, or has empty.
    #[error("missing value for {}", names.join(", "))]
    SubPathVariables { names: Vec<String> },
    /// A sub path that is not below its volume.
    #[error("error SubPath `{path}` must not be an absolute path")]
    SubPathAbsolute { path: String },
    /// A sub path that climbs.
    #[error("unable to provision SubPath `{path}`: must not contain '..'")]
    SubPathBacksteps { path: String },
    /// A sub path that is not there and cannot be made. The log says why: a container must
    /// not learn about the node's files from a message.
    #[error("failed to create subPath directory for volumeMount {volume:?} of container {container:?}")]
    SubPathCreate { volume: String, container: String },
    /// A sub path that leads elsewhere or cannot be mounted; likewise.
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
    /// `runAsNonRoot` and the image's user id is no id that the kernel can have.
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
    /// `supplementalGroupsPolicy: Strict` cannot be had: the image's groups would come along.
    #[error("SupplementalGroupsPolicy=Strict is not supported in this node")]
    StrictGroups,
    /// The runtime was asked what it can, and did not answer.
    #[error("{0}")]
    Abilities(crate::cri::CriError),
    /// `hostUsers: false` cannot be had.
    #[error(transparent)]
    UserNamespace(#[from] super::user_namespaces::UserNamespaceError),
    /// The pod's host name cannot be formed.
    #[error(transparent)]
    Hostname(#[from] super::hostname::HostnameError),
    /// The pod's DNS settings cannot be formed.
    #[error(transparent)]
    Dns(#[from] super::dns::DnsError),
    /// A file or directory of the pod.
    #[error("cannot {what} {}: {error}", path.display())]
    File { what: &'static str, path: PathBuf, error: std::io::Error },
}

impl ConfigError {
    pub(super) fn too_large(container: &Container, field: String) -> ConfigError {
        ConfigError::TooLarge { container: container.name.clone(), field }
    }
}
