//! The request to start a container, and the reasons why it fails.

use std::net::IpAddr;

use jiff::Timestamp;

use crate::model::api::Container;
use crate::model::event::Regarding;
use crate::model::ids::SandboxId;
use crate::model::mount::{MountedVolume, SubPaths};
use crate::model::pod::Pod;
use crate::model::runtime::PodRuntime;
use crate::util::stop::StopToken;

/// Which container to start, and all that it needs from other rooms.
#[derive(Clone, Copy)]
pub struct Start<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// One of its containers.
    pub container: &'a Container,
    /// The pod's ready sandbox.
    pub sandbox_id: &'a SandboxId,
    /// Its attempt number.
    pub sandbox_attempt: u32,
    /// The pod's addresses as its status has them, primary first.
    pub pod_ips: &'a [IpAddr],
    /// The node's addresses as the pod's status has them, primary first.
    pub host_ips: &'a [IpAddr],
    /// The pod's state in the runtime: restart counts continue from it.
    pub runtime: &'a PodRuntime,
    /// The pod's volumes, ready to be mounted.
    pub volumes: &'a [MountedVolume],
    /// Mounts sub paths of the volumes.
    pub sub_paths: &'a dyn SubPaths,
    /// Whether the pod's runtime handler can make mounts recursively read-only.
    pub recursive_read_only_mounts: bool,
    /// Cancels calls to the runtime.
    pub stop: &'a StopToken,
}

/// Why a container does not run: what `state.waiting` shows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct StartFailure {
    /// CamelCase reason.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// When to retry, for failures that are waits (`CrashLoopBackOff`, `ImagePullBackOff`).
    pub retry_at: Option<Timestamp>,
    /// Whether the start was cancelled because the worker stops: nothing is reported.
    pub stopping: bool,
}

/// The list of the specification that a container is in: `containers`, `initContainers` or
/// `ephemeralContainers`.
pub(super) fn container_list(pod: &Pod, container: &str) -> &'static str {
    if pod.init_containers().iter().any(|init| init.name == container) {
        "initContainers"
    } else if pod.spec().ephemeral_containers.iter().flatten().any(|ephemeral| ephemeral.name == container) {
        "ephemeralContainers"
    } else {
        "containers"
    }
}

/// What an event about a container refers to, such as `spec.containers{web}`.
pub(super) fn regarding(pod: &Pod, container: &str) -> Regarding {
    pod.regarding(&format!("spec.{}{{{container}}}", container_list(pod, container)))
}
