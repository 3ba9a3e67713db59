//! The state of a pod in the runtime, without CRI types (Go: kubecontainer.PodStatus).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;

use super::ids::{ContainerId, ImageRef, PodUid, SandboxId};
use super::pod::SourceName;

/// A container's state in the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub enum ContainerState {
    /// Created but not started.
    Created,
    /// The container's first process runs.
    Running,
    /// The container's first process has ended.
    Exited,
    /// The runtime cannot determine it, or reported an unknown state.
    Unknown,
}

/// The actual user of the container's first process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinuxUser {
    /// User id.
    pub uid: i64,
    /// Group id.
    pub gid: i64,
    /// All supplemental groups.
    pub supplemental_groups: Vec<i64>,
}

/// One mount as the runtime reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountStatus {
    /// Path inside the container.
    pub container_path: String,
    /// Path on the node.
    pub host_path: String,
    /// Whether writes are refused.
    pub readonly: bool,
    /// Whether writes are also refused in all mounts below it.
    pub recursive_read_only: bool,
}

/// Resources that the runtime applied. `None`: not reported, or no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AppliedResources {
    /// Relative CPU weight as cgroup v1 shares.
    pub cpu_shares: Option<i64>,
    /// CFS quota, microseconds per period.
    pub cpu_quota: Option<i64>,
    /// CFS period, microseconds.
    pub cpu_period: Option<i64>,
    /// Memory limit in bytes.
    pub memory_limit_bytes: Option<i64>,
}

/// One instance (attempt) of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerStatus {
    /// Runtime id.
    pub id: ContainerId,
    /// Container name in the pod.
    pub name: String,
    /// Current state.
    pub state: ContainerState,
    /// Creation time.
    pub created_at: Option<Timestamp>,
    /// When it was started; `None` if never.
    pub started_at: Option<Timestamp>,
    /// When it ended; `None` while it runs.
    pub finished_at: Option<Timestamp>,
    /// Exit code; only valid in the state `Exited`.
    pub exit_code: i32,
    /// The image as the user wrote it, or as the runtime knows it.
    pub image: String,
    /// Image id to report (`imageID`).
    pub image_id: ImageRef,
    /// The value of the hash annotation: `None` when absent or invalid.
    pub hash: Option<u32>,
    /// Restart count from its annotation.
    pub restart_count: u32,
    /// CamelCase reason from the runtime (`Completed`, `OOMKilled`, …).
    pub reason: String,
    /// The runtime's message, followed by the termination message if there is one.
    pub message: String,
    /// Absolute path of the log.
    pub log_path: String,
    /// Annotation `io.kubernetes.container.terminationMessagePath`.
    pub termination_message_path: String,
    /// Annotation `…terminationMessagePolicy`.
    pub termination_message_policy: String,
    /// Its sandbox.
    pub sandbox_id: SandboxId,
    /// Applied resources, if reported.
    pub resources: Option<AppliedResources>,
    /// The CPUs that it is bound to, such as `0-3,8`, if reported.
    pub cpus: Option<String>,
    /// User, if reported.
    pub user: Option<LinuxUser>,
    /// Mounts.
    pub mounts: Vec<MountStatus>,
}

#[cfg(test)]
impl ContainerStatus {
    /// An instance without other data, to which tests add what they need.
    pub(crate) fn blank(id: &str, name: &str, state: ContainerState) -> Self {
        ContainerStatus {
            id: id.into(),
            name: name.to_owned(),
            state,
            created_at: None,
            started_at: None,
            finished_at: None,
            exit_code: 0,
            image: String::new(),
            image_id: ImageRef::default(),
            hash: None,
            restart_count: 0,
            reason: String::new(),
            message: String::new(),
            log_path: String::new(),
            termination_message_path: String::new(),
            termination_message_policy: String::new(),
            sandbox_id: SandboxId::default(),
            resources: None,
            cpus: None,
            user: None,
            mounts: Vec::new(),
        }
    }
}

/// Whether containers can be started in a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub enum SandboxState {
    /// Yes.
    Ready,
    /// No: the sandbox was stopped, or its process ended.
    NotReady,
}

/// One sandbox (attempt) of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxStatus {
    /// Runtime id.
    pub id: SandboxId,
    /// Attempt number, from 0.
    pub attempt: u32,
    /// Current state.
    pub state: SandboxState,
    /// Creation time.
    pub created_at: Option<Timestamp>,
    /// Whether it uses the node's network namespace.
    pub host_network: bool,
    /// Whether the runtime reported a network status at all.
    pub network_reported: bool,
    /// Addresses, primary first.
    pub ips: Vec<IpAddr>,
}

/// The runtime's data about one pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodRuntime {
    /// The pod.
    pub uid: PodUid,
    /// From the labels.
    pub name: String,
    /// From the labels.
    pub namespace: String,
    /// Addresses of the newest sandbox if it is ready, else those of the last ready one.
    pub ips: Vec<IpAddr>,
    /// Newest first, by attempt, then by creation time.
    pub sandboxes: Vec<SandboxStatus>,
    /// All instances of all containers, newest first.
    pub containers: Vec<ContainerStatus>,
}

impl PodRuntime {
    /// A pod without sandboxes and containers.
    #[must_use]
    pub fn absent(uid: PodUid) -> Self {
        PodRuntime { uid, ..PodRuntime::default() }
    }

    /// The newest instance of the container `name`.
    #[must_use]
    pub fn newest(&self, name: &str) -> Option<&ContainerStatus> {
        self.containers.iter().find(|container| container.name == name)
    }

    /// Every running instance.
    pub fn running(&self) -> impl Iterator<Item = &ContainerStatus> {
        self.containers.iter().filter(|container| container.state == ContainerState::Running)
    }

    /// The newest sandbox, ready or not.
    #[must_use]
    pub fn newest_sandbox(&self) -> Option<&SandboxStatus> {
        self.sandboxes.first()
    }
}

/// A container in the list response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedContainer {
    /// Runtime id.
    pub id: ContainerId,
    /// Container name in the pod.
    pub name: String,
    /// Its sandbox.
    pub sandbox_id: SandboxId,
    /// Current state.
    pub state: ContainerState,
    /// Attempt number.
    pub attempt: u32,
    /// Creation time.
    pub created_at: Option<Timestamp>,
    /// The image of the container.
    pub image_ref: ImageRef,
    /// Restart count and grace periods: they determine the stop of a container without a manifest.
    pub annotations: Arc<BTreeMap<String, String>>,
}

/// A sandbox in the list response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedSandbox {
    /// Runtime id.
    pub id: SandboxId,
    /// Current state.
    pub state: SandboxState,
    /// Attempt number.
    pub attempt: u32,
    /// Creation time.
    pub created_at: Option<Timestamp>,
}

/// A pod as two list calls report it. The same two calls return all pods.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListedPod {
    /// The pod.
    pub uid: PodUid,
    /// Pod name.
    pub name: String,
    /// Pod namespace.
    pub namespace: String,
    /// The source of the pod, if an annotation of its sandboxes names it.
    pub source: Option<SourceName>,
    /// All its sandboxes, newest first.
    pub sandboxes: Vec<ListedSandbox>,
    /// All its containers, newest first.
    pub containers: Vec<ListedContainer>,
}

impl ListedPod {
    /// Whether any part of it still runs.
    pub fn is_running(&self) -> bool {
        self.sandboxes.iter().any(|sandbox| sandbox.state == SandboxState::Ready)
            || self.containers.iter().any(|container| container.state == ContainerState::Running)
    }
}
