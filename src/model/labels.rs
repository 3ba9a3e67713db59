//! Labels and annotations by which a kubelet recognizes its containers at the runtime. A restarted
//! agent, this one or another, identifies its pods by them: never change one.

/// Label on sandboxes and containers: pod name.
pub const POD_NAME: &str = "io.kubernetes.pod.name";
/// Label on sandboxes and containers: pod namespace.
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label on sandboxes and containers: pod UID.
pub const POD_UID: &str = "io.kubernetes.pod.uid";
/// Label on containers: container name in the pod.
pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Annotation: hash of the container's name and image, hexadecimal.
pub const CONTAINER_HASH: &str = "io.kubernetes.container.hash";
/// Annotation: how often the container was restarted before this instance.
pub const CONTAINER_RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Annotation: path of the container's termination message, inside the container.
pub const CONTAINER_TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Annotation: `File` or `FallbackToLogsOnError`.
pub const CONTAINER_TERMINATION_MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
/// Annotation: the preStop handler as JSON, for a pod whose manifest was removed.
pub const CONTAINER_PRE_STOP_HANDLER: &str = "io.kubernetes.container.preStopHandler";
/// Annotation: the container's ports as JSON, for handlers that name a port.
pub const CONTAINER_PORTS: &str = "io.kubernetes.container.ports";
/// Annotation on containers: the pod's deletion grace period in seconds.
pub const POD_DELETION_GRACE_PERIOD: &str = "io.kubernetes.pod.deletionGracePeriod";
/// Annotation on containers: the pod's termination grace period in seconds.
pub const POD_TERMINATION_GRACE_PERIOD: &str = "io.kubernetes.pod.terminationGracePeriod";
