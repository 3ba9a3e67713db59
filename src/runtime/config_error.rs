//! Why a container's configuration cannot be made: every variant shows as
//! `CreateContainerConfigError` with the variant's text.

use std::path::PathBuf;

use crate::model::api::Container;
use crate::model::expand::LIMIT;

/// See the module.
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
    NoTarget {
        /// As written.
        container: String,
    },
    /// A ConfigMap or Secret, for which an API server would have to be asked.
    #[error("couldn't get {kind} {namespace}/{name}, no kubeClient defined")]
    NoClient {
        /// `configMap` or `secret`.
        kind: &'static str,
        /// The pod's namespace.
        namespace: String,
        /// The object's name.
        name: String,
    },
    /// A ConfigMap or Secret that cannot be had.
    #[error(transparent)]
    Object(#[from] crate::kube::objects::ObjectError),
    /// A key that a ConfigMap or Secret does not have.
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    NoKey {
        /// As written.
        key: String,
        /// `ConfigMap` or `Secret`.
        kind: &'static str,
        /// The pod's namespace.
        namespace: String,
        /// The object's name.
        name: String,
    },
    /// What the container's programs would start with is more than the kernel takes.
    #[error(
        "environment and arguments of container {container:?} are larger than {LIMIT} bytes together: \
         there is no room for {field}"
    )]
    TooLarge {
        /// The container's name.
        container: String,
        /// Where the limit is met.
        field: String,
    },
    /// Without the services nobody knows which variables would be missing.
    #[error("services have not yet been read at least once, cannot construct envvars")]
    ServicesNotRead,
    /// A `fileKeyRef` into a volume that the pod does not have.
    #[error("cannot find the volume {volume:?} referenced by FileKeyRef")]
    EnvFileVolume {
        /// The volume's name.
        volume: String,
    },
    /// A `fileKeyRef` into something that cannot be read as an env file. Nothing of its
    /// content is shown.
    #[error("couldn't parse env file")]
    EnvFile,
    /// A `fileKeyRef` to a key that the file does not define.
    #[error("environment variable key {key:?} not found in file {path:?}")]
    EnvFileKey {
        /// As written.
        key: String,
        /// As written.
        path: String,
    },
    /// A source that this version cannot read.
    #[error("{what} in container {container:?} has no effect in this version")]
    Unsupported {
        /// The field and what it refers to.
        what: String,
        /// Whose field.
        container: String,
    },
    /// A volumeMount without a mounted volume.
    #[error("cannot find volume {volume:?} to mount into container {container:?}")]
    VolumeNotMounted {
        /// The volume's name.
        volume: String,
        /// The container's name.
        container: String,
    },
    /// A volumeMount's propagation that is none of the three.
    #[error("unknown MountPropagation mode: {mode:?}")]
    MountPropagation {
        /// As written.
        mode: String,
    },
    /// A volumeMount that demands what does not go together or what the runtime cannot do.
    #[error(
        "failed to resolve recursive read-only mode: volume {volume:?} requested recursive read-only mode, but it is {why}"
    )]
    RecursiveReadOnly {
        /// The volume's name.
        volume: String,
        /// What it is, or is not.
        why: String,
    },
    /// A volumeMount's mode that is none of the three.
    #[error("failed to resolve recursive read-only mode: unknown recursive read-only mode {mode:?}")]
    RecursiveReadOnlyMode {
        /// As written.
        mode: String,
    },
    /// A `subPathExpr` with variables that the container does not have, or has empty.
    #[error("missing value for {}", names.join(", "))]
    SubPathVariables {
        /// Their names, sorted.
        names: Vec<String>,
    },
    /// A sub path that is not below its volume.
    #[error("error SubPath `{path}` must not be an absolute path")]
    SubPathAbsolute {
        /// With its variables replaced.
        path: String,
    },
    /// A sub path that climbs.
    #[error("unable to provision SubPath `{path}`: must not contain '..'")]
    SubPathBacksteps {
        /// With its variables replaced.
        path: String,
    },
    /// A sub path that is not there and cannot be made. The log says why: a container must
    /// not learn about the node's files from a message.
    #[error("failed to create subPath directory for volumeMount {volume:?} of container {container:?}")]
    SubPathCreate {
        /// The volume's name.
        volume: String,
        /// The container's name.
        container: String,
    },
    /// A sub path that leads elsewhere or cannot be mounted; likewise.
    #[error("failed to prepare subPath for volumeMount {volume:?} of container {container:?}")]
    SubPathPrepare {
        /// The volume's name.
        volume: String,
        /// The container's name.
        container: String,
    },
    /// `runAsUser: 0` with `runAsNonRoot`.
    #[error("container's runAsUser breaks non-root policy (pod: {pod:?}, container: {container})")]
    RunAsRoot {
        /// Name, namespace and uid.
        pod: String,
        /// The container's name.
        container: String,
    },
    /// `runAsNonRoot` and the image's user is root.
    #[error("container has runAsNonRoot and image will run as root (pod: {pod:?}, container: {container})")]
    ImageRunsAsRoot {
        /// Name, namespace and uid.
        pod: String,
        /// The container's name.
        container: String,
    },
    /// `runAsNonRoot` and the image's user has a name only.
    #[error(
        "container has runAsNonRoot and image has non-numeric user ({user}), cannot verify user is non-root (pod: {pod:?}, container: {container})"
    )]
    ImageUserByName {
        /// The user in the image.
        user: String,
        /// Name, namespace and uid.
        pod: String,
        /// The container's name.
        container: String,
    },
    /// `runAsNonRoot` and the image's user id is no id that the kernel can have.
    #[error(
        "container has runAsNonRoot and image has user id {uid}, which is out of range (pod: {pod:?}, container: {container})"
    )]
    ImageUserOutOfRange {
        /// The user id in the image.
        uid: i64,
        /// Name, namespace and uid.
        pod: String,
        /// The container's name.
        container: String,
    },
    /// A profile kind that is none of the three.
    #[error("unknown {what} profile type {kind:?}")]
    ProfileType {
        /// `seccomp` or `AppArmor`.
        what: &'static str,
        /// As written.
        kind: String,
    },
    /// Profile kind Localhost without a name.
    #[error("localhostProfile must be set if {what} type is Localhost")]
    NoLocalhostProfile {
        /// `seccompProfile` or `appArmorProfile`.
        what: &'static str,
    },
    /// `procMount` that is neither Default nor Unmasked.
    #[error("unknown procMount type {kind:?}")]
    ProcMount {
        /// As written.
        kind: String,
    },
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
    File {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why not.
        error: std::io::Error,
    },
}

impl ConfigError {
    pub(super) fn too_large(container: &Container, field: String) -> ConfigError {
        ConfigError::TooLarge { container: container.name.clone(), field }
    }
}
