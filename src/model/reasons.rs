//! Every reason string that users and tools see, in one table.
//! In upstream they are in pkg/kubelet/events, images, kuberuntime and status.

use std::sync::Mutex;

use crate::util::lock::LockExt;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        $($(#[$doc])* #[doc = concat!(" `", $text, "`")] pub const $name: &str = $text;)*

        /// All reasons of the table.
        const ALL: &[&str] = &[$($name),*];
    };
}

reasons! {
    // Waiting reasons of containers.
    CONTAINER_CREATING = "ContainerCreating";
    POD_INITIALIZING = "PodInitializing";
    CRASH_LOOP_BACK_OFF = "CrashLoopBackOff";
    ERR_IMAGE_PULL = "ErrImagePull";
    IMAGE_PULL_BACK_OFF = "ImagePullBackOff";
    IMAGE_INSPECT_ERROR = "ImageInspectError";
    ERR_IMAGE_NEVER_PULL = "ErrImageNeverPull";
    INVALID_IMAGE_NAME = "InvalidImageName";
    REGISTRY_UNAVAILABLE = "RegistryUnavailable";
    SIGNATURE_VALIDATION_FAILED = "SignatureValidationFailed";
    CREATE_CONTAINER_CONFIG_ERROR = "CreateContainerConfigError";
    CREATE_CONTAINER_ERROR = "CreateContainerError";
    POST_START_HOOK_ERROR = "PostStartHookError";
    RUN_CONTAINER_ERROR = "RunContainerError";
    RESTARTING_ALL_CONTAINERS = "RestartingAllContainers";
    // Termination reasons of containers.
    COMPLETED = "Completed";
    ERROR = "Error";
    OOM_KILLED = "OOMKilled";
    CONTAINER_STATUS_UNKNOWN = "ContainerStatusUnknown";
    // Reasons of pod conditions.
    POD_SANDBOX_NOT_READY = "PodSandboxNotReady";
    CONTAINERS_NOT_INITIALIZED = "ContainersNotInitialized";
    CONTAINERS_NOT_READY = "ContainersNotReady";
    READINESS_GATES_NOT_READY = "ReadinessGatesNotReady";
    UNKNOWN_CONTAINER_STATUSES = "UnknownContainerStatuses";
    POD_COMPLETED = "PodCompleted";
    POD_FAILED = "PodFailed";
    RESTART_ALL_CONTAINERS_STARTED = "RestartAllContainersStarted";
    TERMINATION_BY_KUBELET = "TerminationByKubelet";
    // Events.
    CREATED = "Created";
    STARTED = "Started";
    FAILED = "Failed";
    /// Of our own: a pod waits for a device plugin after a reboot.
    WAITING_FOR_DEVICES = "WaitingForDevicePlugin";
    /// Of our own: an image archive, or a part of it, cannot be used.
    IMAGE_ARCHIVE_FAULT = "ImageArchiveFault";
    /// Of our own: the runtime cannot pull an image of an archive.
    IMAGE_SET_PULL_FAILED = "ImageSetPullFailed";
    KILLING = "Killing";
    BACK_OFF = "BackOff";
    PULLING = "Pulling";
    PULLED = "Pulled";
    FAILED_TO_RETRIEVE_IMAGE_PULL_SECRET = "FailedToRetrieveImagePullSecret";
    INSPECT_FAILED = "InspectFailed";
    SANDBOX_CHANGED = "SandboxChanged";
    FAILED_CREATE_POD_SANDBOX = "FailedCreatePodSandBox";
    FAILED_PREPARE_DYNAMIC_RESOURCES = "FailedPrepareDynamicResources";
    FAILED_POD_SANDBOX_STATUS = "FailedPodSandBoxStatus";
    FAILED_CREATE_POD_CONTAINER = "FailedCreatePodContainer";
    FAILED_KILL_POD = "FailedKillPod";
    NODE_ALLOCATABLE_ENFORCED = "NodeAllocatableEnforced";
    FAILED_NODE_ALLOCATABLE_ENFORCEMENT = "FailedNodeAllocatableEnforcement";
    FAILED_MOUNT = "FailedMount";
    FAILED_MAP_VOLUME = "FailedMapVolume";
    FAILED_ATTACH_VOLUME = "FailedAttachVolume";
    ALREADY_MOUNTED_VOLUME = "AlreadyMountedVolume";
    VOLUME_PERMISSION_CHANGE = "VolumePermissionChangeInProgress";
    CERTIFICATE_OVERDUE_FOR_REFRESH = "CertificateOverdueForRefresh";
    CERTIFICATE_EXPIRED = "CertificateExpired";
    FAILED_SYNC = "FailedSync";
    FAILED_VALIDATION = "FailedValidation";
    NETWORK_NOT_READY = "NetworkNotReady";
    FILE_SYSTEM_RESIZE_SUCCESS = "FileSystemResizeSuccessful";
    RESIZE_STARTED = "ResizeStarted";
    RESIZE_COMPLETED = "ResizeCompleted";
    RESIZE_DEFERRED = "ResizeDeferred";
    RESIZE_INFEASIBLE = "ResizeInfeasible";
    RESIZE_ERROR = "ResizeError";
    DEADLINE_EXCEEDED = "DeadlineExceeded";
    FAILED_POST_START_HOOK = "FailedPostStartHook";
    FAILED_PRE_STOP_HOOK = "FailedPreStopHook";
    LIFECYCLE_HTTP_FALLBACK = "LifecycleHTTPFallback";
    UNHEALTHY = "Unhealthy";
    PROBE_WARNING = "ProbeWarning";
    MISSING_CLUSTER_DNS = "MissingClusterDNS";
    DNS_CONFIG_FORMING = "DNSConfigForming";
    CHECK_LIMITS_FOR_RESOLV_CONF = "CheckLimitsForResolvConf";
    CONTAINER_GC_FAILED = "ContainerGCFailed";
    IMAGE_GC_FAILED = "ImageGCFailed";
    FREE_DISK_SPACE_FAILED = "FreeDiskSpaceFailed";
    /// Of our own: the logs of all containers exceeded their quota.
    CONTAINER_LOGS_REMOVED = "ContainerLogsRemoved";
    INVALID_DISK_CAPACITY = "InvalidDiskCapacity";
    STARTING = "Starting";
    CGROUP_V1 = "CgroupV1";
    // Events about the node.
    EXCEEDED_GRACE_PERIOD = "ExceededGracePeriod";
    EVICTION_THRESHOLD_MET = "EvictionThresholdMet";
    SYSTEM_OOM = "SystemOOM";
    NODE_READY = "NodeReady";
    NODE_NOT_READY = "NodeNotReady";
    NODE_HAS_SUFFICIENT_MEMORY = "NodeHasSufficientMemory";
    NODE_HAS_INSUFFICIENT_MEMORY = "NodeHasInsufficientMemory";
    NODE_HAS_NO_DISK_PRESSURE = "NodeHasNoDiskPressure";
    NODE_HAS_DISK_PRESSURE = "NodeHasDiskPressure";
    NODE_HAS_SUFFICIENT_PID = "NodeHasSufficientPID";
    NODE_HAS_INSUFFICIENT_PID = "NodeHasInsufficientPID";
    NODE_SCHEDULABLE = "NodeSchedulable";
    NODE_NOT_SCHEDULABLE = "NodeNotSchedulable";
    REBOOTED = "Rebooted";
    SHUTDOWN = "Shutdown";
    /// A pod field has no effect in this version (not in upstream).
    UNSUPPORTED_FIELD = "UnsupportedField";
    /// A manifest is invalid; its last valid version continues to run (not in upstream).
    INVALID_MANIFEST = "InvalidManifest";
    /// A state file of the agent cannot be used, and was put aside (not in upstream).
    UNUSABLE_STATE_FILE = "UnusableStateFile";
    /// The API server does not respond: the stored pods run (not in upstream).
    RUNNING_OFFLINE = "RunningOffline";
    /// The API server knows neither this node nor its pods, and stops none (not in upstream).
    SERVER_PODS_HELD = "ServerPodsHeld";
    /// The pods of the API server count again (not in upstream).
    SERVER_PODS_ACCEPTED = "ServerPodsAccepted";
    /// The API server was away for too long: the pod is stopped until it is back (not in upstream).
    STOPPED_OFFLINE = "StoppedOffline";
    /// A pod that was stopped for that may run again (not in upstream).
    RESUMED_ONLINE = "ResumedOnline";
    /// Events that no longer fit while the API server was away, as a number (not in upstream).
    EVENTS_DROPPED = "EventsDropped";
    /// An annotation of ours is malformed (not in upstream).
    INVALID_ANNOTATION = "InvalidAnnotation";
    /// A pod has a stored token of a service account that is not valid any more (not in upstream).
    EXPIRED_TOKEN_USED = "ExpiredTokenUsed";
    /// The certificate for the API server has expired, or is not valid yet (not in upstream).
    INVALID_CLIENT_CERTIFICATE = "InvalidClientCertificate";
    /// The clock shows a time that had passed before (not in upstream).
    CLOCK_BEHIND = "ClockBehind";
    /// Files of an unpacked image are damaged (not in upstream).
    DAMAGED_IMAGE = "DamagedImage";
    /// All of them were replaced (not in upstream).
    IMAGE_MENDED = "ImageMended";
    /// Some could not be replaced (not in upstream).
    IMAGE_MEND_FAILED = "ImageMendFailed";
    // Rejections of pods (phase Failed).
    TOPOLOGY_AFFINITY_ERROR = "TopologyAffinityError";
    SMT_ALIGNMENT_ERROR = "SMTAlignmentError";
    SYSCTL_FORBIDDEN = "SysctlForbidden";
    APP_ARMOR = "AppArmor";
    EVICTED = "Evicted";
    PREEMPTING = "Preempting";
    NODE_AFFINITY = "NodeAffinity";
    NODE_NAME = "NodeName";
    NODE_PORTS = "NodePorts";
    POD_OS_NOT_SUPPORTED = "PodOSNotSupported";
    POD_OS_SELECTOR_NODE_LABEL_DOES_NOT_MATCH = "PodOSSelectorNodeLabelDoesNotMatch";
    UNEXPECTED_ADMISSION_ERROR = "UnexpectedAdmissionError";
    OUT_OF_PODS = "OutOfpods";
    OUT_OF_CPU = "OutOfcpu";
    OUT_OF_MEMORY = "OutOfmemory";
    OUT_OF_EPHEMERAL_STORAGE = "OutOfephemeral-storage";
    VOLUME_ATTACHMENT_LIMIT_EXCEEDED = "VolumeAttachmentLimitExceeded";
    TAINT_TOLERATION = "TaintToleration";
    SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED = "SupplementalGroupsPolicyNotSupported";
    NODE_SHUTDOWN = "NodeShutdown";
    POD_FEATURE_UNSUPPORTED = "PodFeatureUnsupported";
    /// A list of the pod exceeds its limit (not in upstream).
    POD_LEVEL_RESOURCES_NOT_SUPPORTED = "PodLevelResourcesNotSupported";
    POD_TOO_LARGE = "PodTooLarge";
}

/// The reasons `OutOf<resource>` of refused pods. They are never freed, so their number is limited.
/// A node has few resources, but a manifest can name any resource.
static SHORT_OF: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
const SHORT_OF_MAX: usize = 64;

/// Converts a reason, which may be built at run time (`OutOf<resource>`), into a static string. An
/// unknown reason becomes `UnexpectedAdmissionError`.
#[must_use]
pub fn intern(reason: &str) -> &'static str {
    let known = ALL.iter().find(|known| **known == reason);
    if let Some(known) = known {
        return known;
    }
    if !reason.starts_with("OutOf") {
        return UNEXPECTED_ADMISSION_ERROR;
    }
    let mut short_of = SHORT_OF.locked();
    if let Some(known) = short_of.iter().find(|known| **known == reason) {
        return known;
    }
    if short_of.len() >= SHORT_OF_MAX {
        return UNEXPECTED_ADMISSION_ERROR;
    }
    let interned: &'static str = Box::leak(reason.to_owned().into_boxed_str());
    short_of.push(interned);
    interned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intern_keeps_known_reasons_and_out_of_resource() {
        for reason in [TAINT_TOLERATION, POD_TOO_LARGE, SUPPLEMENTAL_GROUPS_POLICY_NOT_SUPPORTED, OUT_OF_CPU]
        {
            assert_eq!(intern(reason), reason);
        }
        assert_eq!(intern("OutOfexample.org/gpu"), "OutOfexample.org/gpu");
        assert_eq!(intern("OutOfexample.org/gpu").as_ptr(), intern("OutOfexample.org/gpu").as_ptr());
        assert_eq!(intern("Whatever"), UNEXPECTED_ADMISSION_ERROR);
    }
}
