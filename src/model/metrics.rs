//! Every metric that the agent counts, under the kubelet's names, in one table. Values that a
//! snapshot contains (running pods, threads, memory) are read at the scrape instead.

use std::cell::Cell;
use std::time::Duration;

use crate::util::metrics::{Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramVec, Metric};

/// Seconds of short operations.
const SHORT: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// Seconds of starts, pulls included.
const START: &[f64] = &[
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0,
    480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];
/// Seconds of pulls.
const PULL: &[f64] = &[
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0,
    2700.0, 3600.0,
];
/// Seconds of calls to the runtime: 5 ms and thirteen times 2.5 more.
const CALL: &[f64] = &[
    0.005,
    0.0125,
    0.03125,
    0.078125,
    0.1953125,
    0.48828125,
    1.220703125,
    3.0517578125,
    7.62939453125,
    19.073486328125,
    47.6837158203125,
    119.20928955078125,
    298.0232238769531,
    745.0580596923828,
];
/// Seconds until the API server has a change.
const STATUS_DELAY: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];
/// Seconds of requests to the API server.
const REQUEST: &[f64] = &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];
/// Bytes of requests to the API server and of its responses.
const SIZE: &[f64] = &[
    64.0,
    256.0,
    512.0,
    1024.0,
    4096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
];
/// Seconds that a certificate was in use.
const AGE: &[f64] = &[
    60.0,
    3600.0,
    14_400.0,
    86_400.0,
    604_800.0,
    2_592_000.0,
    7_776_000.0,
    15_552_000.0,
    31_104_000.0,
    124_416_000.0,
];
/// Milliseconds of resizes.
const RESIZE: &[f64] = &[
    10.0, 50.0, 100.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 30000.0, 60000.0, 120_000.0,
    300_000.0, 600_000.0,
];
/// Seconds that a resize waits for resources.
const DEFERRAL: &[f64] = &[
    5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 150.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0,
];
/// Seconds of setting volumes up.
const VOLUME: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];
/// Milliseconds of the alignment of resources.
const ALIGNMENT: &[f64] =
    &[0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6, 819.2];
/// Seconds of operations of resource drivers: 15 steps from 0.1 to 40.
const DRIVER: &[f64] = &[
    0.1,
    0.1534127404634391,
    0.23535468936502524,
    0.36106407876409946,
    0.5539182980610752,
    0.8497812409839363,
    1.303672689737678,
    1.9999999999999993,
    3.068254809268781,
    4.707093787300503,
    7.221281575281985,
    11.0783659612215,
    16.995624819678717,
    26.07345379475355,
    39.99999999999997,
];
/// Containers of a pod.
const FEW: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0];

macro_rules! metrics {
    ($registry:ident; $($name:ident: $type:ty = $text:literal, $help:literal $(, $rest:expr)*;)*) => {
        $(#[doc = concat!("`", $text, "`: ", $help)]
        pub static $name: $type = <$type>::new($text, $help $(, $rest)*);)*
        /// All of them.
        pub static $registry: &[&dyn Metric] = &[$(&$name),*];
    };
}

metrics! { ALL;
    // CPU, memory and topology managers.
    CPU_PINNINGS: Counter = "kubelet_cpu_manager_pinning_requests_total",
        "Containers that were to get CPUs for themselves.";
    CPU_PINNING_ERRORS: Counter = "kubelet_cpu_manager_pinning_errors_total",
        "Containers that could not get CPUs for themselves.";
    SHARED_CPUS: Gauge = "kubelet_cpu_manager_shared_pool_size_millicores",
        "Thousandths of the CPUs that containers can still get for themselves.";
    EXCLUSIVE_CPUS: Gauge = "kubelet_cpu_manager_exclusive_cpu_allocation_count",
        "CPUs that containers have for themselves.";
    CPUS_PER_NODE: GaugeVec<1> = "kubelet_cpu_manager_allocation_per_numa",
        "CPUs that containers have for themselves, by NUMA node.", ["numa_node"];
    MEMORY_PINNINGS: Counter = "kubelet_memory_manager_pinning_requests_total",
        "Containers that were to get memory of certain NUMA nodes.";
    MEMORY_PINNING_ERRORS: Counter = "kubelet_memory_manager_pinning_errors_total",
        "Containers that could not get memory of certain NUMA nodes.";
    RESOURCE_ALLOCATIONS: CounterVec<2> = "kubelet_resource_manager_allocations_total",
        "Allocations of CPUs and memory for a container or a pod alone.", ["resource_name", "source"];
    RESOURCE_ALLOCATION_ERRORS: CounterVec<2> = "kubelet_resource_manager_allocation_errors_total",
        "Failed allocations of CPUs and memory for a container or a pod alone.", ["resource_name", "source"];
    RESOURCE_ASSIGNMENTS: CounterVec<2> = "kubelet_resource_manager_container_assignments_total",
        "Containers that got CPUs or memory, by the kind of assignment.", ["resource_name", "assignment_type"];
    CGROUP_OPERATIONS: HistogramVec<1> = "kubelet_cgroup_manager_duration_seconds",
        "Making, changing and removing cgroups.", SHORT, ["operation_type"];
    TOPOLOGY_ADMISSIONS: Counter = "kubelet_topology_manager_admission_requests_total",
        "Pods whose resources were to be aligned.";
    TOPOLOGY_ADMISSION_ERRORS: Counter = "kubelet_topology_manager_admission_errors_total",
        "Pods that were rejected because of their resources' alignment.";
    TOPOLOGY_ADMISSION_DURATION: Histogram = "kubelet_topology_manager_admission_duration_ms",
        "Milliseconds of the alignment of a pod's resources.", ALIGNMENT;
    ALIGNED_RESOURCES: CounterVec<2> = "kubelet_container_aligned_compute_resources_count",
        "Containers or pods with aligned resources.", ["scope", "boundary"];
    UNALIGNED_RESOURCES: CounterVec<2> = "kubelet_container_aligned_compute_resources_failure_count",
        "Containers or pods whose resources could not be aligned.", ["scope", "boundary"];
    // Device plugins.
    DEVICE_PLUGIN_REGISTRATIONS: CounterVec<1> = "kubelet_device_plugin_registration_total",
        "Registrations of device plugins.", ["resource_name"];
    DEVICE_ALLOCATION: HistogramVec<1> = "kubelet_device_plugin_alloc_duration_seconds",
        "Duration of the call Allocate of device plugins.", SHORT, ["resource_name"];
    // Pods and their workers.
    POD_START: Histogram = "kubelet_pod_start_duration_seconds",
        "From the first sight of a pod to its containers running.", START;
    POD_START_SLI: Histogram = "kubelet_pod_start_sli_duration_seconds",
        "From the first sight of a pod to its containers running, without image pulls and init containers.",
        START;
    POD_START_TOTAL: Histogram = "kubelet_pod_start_total_duration_seconds",
        "From the first sight of a pod to its containers running, image pulls and init containers included.",
        START;
    FIRST_NETWORK_POD: Gauge = "kubelet_first_network_pod_start_sli_duration_seconds",
        "The same of the first pod with a network of its own.";
    POD_WORKER: HistogramVec<1> = "kubelet_pod_worker_duration_seconds",
        "One pass of a pod's worker, by kind of work.", SHORT, ["operation_type"];
    POD_WORKER_START: Histogram = "kubelet_pod_worker_start_duration_seconds",
        "From the first sight of a pod to the first pass of its worker.", SHORT;
    POD_STATUS_SYNC: Histogram = "kubelet_pod_status_sync_duration_seconds",
        "From a new status of a pod to the API server's having it.", STATUS_DELAY;
    CONTAINERS_PER_POD: Histogram = "kubelet_containers_per_pod_count",
        "Containers in the specifications of the pods that were taken on.", FEW;
    STARTED_PODS: Counter = "kubelet_started_pods_total", "Sandboxes that were requested.";
    STARTED_PODS_ERRORS: Counter = "kubelet_started_pods_errors_total", "Sandboxes that could not be made.";
    STARTED_CONTAINERS: CounterVec<1> = "kubelet_started_containers_total",
        "Containers that were to be started.", ["container_type"];
    STARTED_CONTAINERS_ERRORS: CounterVec<2> = "kubelet_started_containers_errors_total",
        "Containers that could not be started, by reason.", ["container_type", "code"];
    TERMINATED_CONTAINERS: CounterVec<3> = "kubelet_terminated_containers_total",
        "Containers that have ended, by how.", ["container_type", "exit_code", "reason"];
    RESTARTED_PODS: CounterVec<1> = "kubelet_restarted_pods_total",
        "Pods that came back under the same UID after they were removed.", ["static"];
    ORPHANED_RUNTIME_PODS: Counter = "kubelet_orphaned_runtime_pods_total",
        "Pods without a manifest that were found in the runtime and stopped.";
    ADMISSION_REJECTIONS: CounterVec<1> = "kubelet_admission_rejections_total",
        "Pods that were refused, by reason.", ["reason"];
    EVICTIONS: CounterVec<1> = "kubelet_evictions",
        "Pods that were evicted, by the signal of the threshold or the limit.", ["eviction_signal"];
    EVICTION_STATS_AGE: HistogramVec<1> = "kubelet_eviction_stats_age_seconds",
        "Age of the statistics for which a pod was evicted.", SHORT, ["eviction_signal"];
    PREEMPTIONS: CounterVec<1> = "kubelet_preemptions",
        "Pods that had to go for a critical one, by the resource that was short.", ["preemption_signal"];
    REQUESTED_RESIZES: CounterVec<3> = "kubelet_container_requested_resizes_total",
        "Changes of what containers ask for, by what became of which number.",
        ["resource", "requirement", "operation"];
    RESIZE_DURATION: HistogramVec<1> = "kubelet_pod_resize_duration_milliseconds",
        "Telling the runtime of the new resources of a pod's containers.", RESIZE, ["success"];
    INFEASIBLE_RESIZES: CounterVec<1> = "kubelet_pod_infeasible_resizes_total",
        "Resizes that this node can never carry out.", ["reason_detail"];
    DEFERRED_RESIZES_ACCEPTED: CounterVec<1> = "kubelet_pod_deferred_accepted_resizes_total",
        "Resizes that were granted after they had had to wait, by what triggered the retry.",
        ["retry_trigger"];
    DEFERRED_RESIZE_DURATION: HistogramVec<2> = "kubelet_pod_deferred_resize_duration_seconds",
        "How long resizes had to wait, by what ended the wait and by the pods' priority.", DEFERRAL,
        ["resolution", "priority_bucket"];
    POD_LEVEL_ADMISSIONS: CounterVec<2> = "kubelet_pod_level_resources_admission_total",
        "Pods that were admitted, by where they state resources and by their class.",
        ["config_mode", "qos_class"];
    STARTED_USER_NAMESPACED_PODS: Counter = "kubelet_started_user_namespaced_pods_total",
        "Sandboxes with a user namespace that were requested.";
    STARTED_USER_NAMESPACED_PODS_ERRORS: Counter = "kubelet_started_user_namespaced_pods_errors_total",
        "Sandboxes with a user namespace that could not be made.";
    LIFECYCLE_HTTP_FALLBACKS: Counter = "kubelet_lifecycle_handler_http_fallbacks_total",
        "HTTPS hooks that got a plain HTTP response and were retried.";
    SLEEP_ENDED_EARLY: Counter = "kubelet_sleep_action_terminated_early_total",
        "Sleep hooks that the grace period cut short.";

    // Checks of images.
    IMAGE_CHECK_READ: Counter = "coracle_image_check_read_bytes_total",
        "Bytes that checks of images for damaged files have read, before and after decompression.";
    IMAGE_CHECK_WRITTEN: Counter = "coracle_image_check_written_bytes_total",
        "Bytes that repairs of damaged images have written.";

    // Logs of containers.
    LOGS_BYTES: Gauge = "coracle_container_logs_bytes",
        "What the logs of all containers use of the disk, if they have a quota.";
    LOGS_QUOTA: Gauge = "coracle_container_logs_quota_bytes",
        "The quota for the logs of all containers, if there is one.";
    LOGS_REMOVED: Counter = "coracle_container_logs_removed_total",
        "Log files that were removed because of the quota.";

    MIRROR_PODS: Gauge = "kubelet_mirror_pods", "Mirrors of static pods at the API server.";
    ORPHANS_CLEANED: Gauge = "kubelet_orphan_pod_cleaned_volumes",
        "Directories of unknown pods that were removed in the last round.";
    ORPHANS_LEFT: Gauge = "kubelet_orphan_pod_cleaned_volumes_errors",
        "Directories of unknown pods that could not be removed in the last round.";
    STORAGE_OPERATIONS: HistogramVec<4> = "storage_operation_duration_seconds",
        "Setting volumes up, by plugin.", VOLUME, ["volume_plugin", "operation_name", "status", "migrated"];
    SELINUX_CONTAINER_ERRORS: GaugeVec<1> = "volume_manager_selinux_container_errors_total",
        "Volumes that were refused because the SELinux label of a container is invalid.", ["access_mode"];
    SELINUX_CONTAINER_WARNINGS: GaugeVec<1> = "volume_manager_selinux_container_warnings_total",
        "Invalid SELinux labels of containers whose volume is mounted without a label.", ["access_mode"];
    SELINUX_POD_ERRORS: GaugeVec<1> = "volume_manager_selinux_pod_context_mismatch_errors_total",
        "Volumes that were refused because containers of the pod need different SELinux labels.",
        ["access_mode"];
    SELINUX_POD_WARNINGS: GaugeVec<1> = "volume_manager_selinux_pod_context_mismatch_warnings_total",
        "Volumes that are mounted without a label, and whose containers have different SELinux labels.",
        ["access_mode"];
    SELINUX_VOLUME_ERRORS: GaugeVec<2> = "volume_manager_selinux_volume_context_mismatch_errors_total",
        "Volumes that were refused because another pod has them with another SELinux label.",
        ["volume_plugin", "access_mode"];
    SELINUX_VOLUME_WARNINGS: GaugeVec<2> = "volume_manager_selinux_volume_context_mismatch_warnings_total",
        "Volumes that are mounted without a label, and whose pods have different SELinux labels.",
        ["volume_plugin", "access_mode"];
    SELINUX_VOLUMES: GaugeVec<2> = "volume_manager_selinux_volumes_admitted_total",
        "Volumes that are mounted with an SELinux label.", ["volume_plugin", "access_mode"];
    CSI_OPERATIONS: HistogramVec<4> = "csi_operations_seconds",
        "Calls of CSI drivers.", VOLUME, ["driver_name", "method_name", "grpc_status_code", "migrated"];
    VOLUME_STATS: HistogramVec<1> = "kubelet_volume_metric_collection_duration_seconds",
        "Finding out how full a volume is.", SHORT, ["metric_source"];

    // Drivers of resource claims.
    CLAIM_OPERATIONS: HistogramVec<2> = "dra_operations_duration_seconds",
        "Preparing and unpreparing all resource claims of a pod.", DRIVER, ["operation_name", "is_error"];
    DRIVER_CALLS: HistogramVec<3> = "dra_grpc_operations_duration_seconds",
        "Calls to drivers of resource claims.", DRIVER, ["driver_name", "method_name", "grpc_status_code"];

    // The pod-resources API.
    POD_RESOURCES_REQUESTS: CounterVec<1> = "kubelet_pod_resources_endpoint_requests_total",
        "Requests for the resources of pods.", ["server_api_version"];
    POD_RESOURCES_LISTS: CounterVec<1> = "kubelet_pod_resources_endpoint_requests_list",
        "Requests for the resources of all pods.", ["server_api_version"];
    POD_RESOURCES_GETS: CounterVec<1> = "kubelet_pod_resources_endpoint_requests_get",
        "Requests for the resources of one pod.", ["server_api_version"];
    POD_RESOURCES_ALLOCATABLES: CounterVec<1> = "kubelet_pod_resources_endpoint_requests_get_allocatable",
        "Requests for the resources that pods can have.", ["server_api_version"];
    POD_RESOURCES_GET_ERRORS: CounterVec<1> = "kubelet_pod_resources_endpoint_errors_get",
        "Requests for the resources of a pod that failed.", ["server_api_version"];

    // The pods API.
    PODS_API_REQUESTS: CounterVec<2> = "kubelet_pod_requests_total",
        "Requests to the pods API.", ["server_api_version", "status_code"];
    PODS_API_LISTS: CounterVec<2> = "kubelet_pod_requests_list_total",
        "Requests for all pods to the pods API.", ["server_api_version", "status_code"];
    PODS_API_GETS: CounterVec<2> = "kubelet_pod_requests_get_total",
        "Requests for one pod to the pods API.", ["server_api_version", "status_code"];
    PODS_API_WATCHES: CounterVec<2> = "kubelet_pod_requests_watch_total",
        "Watches of the pods API that have ended.", ["server_api_version", "status_code"];
    PODS_API_EVENTS_DROPPED: Counter = "kubelet_pod_watch_events_dropped_total",
        "Events of the pods API that a client did not read in time, which ended its watch.";

    // The node's start.
    STARTUP_BEFORE: Gauge = "kubelet_node_startup_pre_kubelet_duration_seconds",
        "From the machine's start to the agent's.";
    STARTUP_UNREGISTERED: Gauge = "kubelet_node_startup_pre_registration_duration_seconds",
        "From the agent's start to the first attempt at a registration.";
    STARTUP_REGISTRATION: Gauge = "kubelet_node_startup_registration_duration_seconds",
        "From the first attempt at a registration to the Node object.";
    STARTUP_REGISTERED: Gauge = "kubelet_node_startup_post_registration_duration_seconds",
        "From the Node object to the first status that is ready.";
    STARTUP: Gauge = "kubelet_node_startup_duration_seconds",
        "From the machine's start to the first status that is ready.";
    // The node's API.
    WEBSOCKET_STREAMS: CounterVec<1> = "kubelet_websocket_streaming_requests_total",
        "Streams of clients whose WebSockets end here.", ["subresource"];

    // Changes in the runtime.
    PLEG_RELIST: Histogram = "kubelet_pleg_relist_duration_seconds", "One full list of all pods.", SHORT;
    PLEG_RELIST_INTERVAL: Histogram = "kubelet_pleg_relist_interval_seconds",
        "Between the beginnings of two full lists.", SHORT;
    PLEG_POD_RELIST: Histogram = "kubelet_pleg_pod_relist_duration_seconds",
        "One inspection of a single pod after an event.", SHORT;
    PLEG_DISCARDED: Counter = "kubelet_pleg_discard_events",
        "News of pods that were dropped; the mailboxes here drop none.";
    EVENTED_PLEG_ERRORS: Counter = "kubelet_evented_pleg_connection_error_count",
        "Breaks of the runtime's event stream.";
    EVENTED_PLEG_SUCCESSES: Counter = "kubelet_evented_pleg_connection_success_count",
        "Event streams of the runtime that held.";
    EVENTED_PLEG_LATENCY: Histogram = "kubelet_evented_pleg_connection_latency_seconds",
        "From the making of an event in the runtime to its arrival.", SHORT;

    // The runtime.
    RUNTIME_OPERATIONS: CounterVec<1> = "kubelet_runtime_operations_total",
        "Calls to the container runtime.", ["operation_type"];
    RUNTIME_OPERATIONS_ERRORS: CounterVec<1> = "kubelet_runtime_operations_errors_total",
        "Calls to the container runtime that failed.", ["operation_type"];
    RUNTIME_OPERATIONS_DURATION: HistogramVec<1> = "kubelet_runtime_operations_duration_seconds",
        "Duration of calls to the container runtime.", CALL, ["operation_type"];
    CRI_LOSING_SUPPORT: GaugeVec<1> = "kubelet_cri_losing_support",
        "1 if the runtime lacks a call that the Go kubelet requires from a later release on.", ["version"];
    RUN_POD_SANDBOX: HistogramVec<1> = "kubelet_run_podsandbox_duration_seconds",
        "Making a sandbox, its network included.", SHORT, ["runtime_handler"];
    RUN_POD_SANDBOX_ERRORS: CounterVec<1> = "kubelet_run_podsandbox_errors_total",
        "Sandboxes that the runtime failed to make.", ["runtime_handler"];

    // A shutdown of the machine.
    SHUTDOWN_START: Gauge = "kubelet_graceful_shutdown_start_time_seconds",
        "When the last graceful shutdown of the node began, in Unix time.";
    SHUTDOWN_END: Gauge = "kubelet_graceful_shutdown_end_time_seconds",
        "When the pods had had their time in the last graceful shutdown of the node, in Unix time.";

    // Requests to our own port.
    HTTP_REQUESTS: CounterVec<4> = "kubelet_http_requests_total", "Requests to the agent.",
        ["method", "path", "server_type", "long_running"];
    HTTP_DURATION: HistogramVec<4> = "kubelet_http_requests_duration_seconds",
        "Duration of requests to the agent.", SHORT, ["method", "path", "server_type", "long_running"];
    HTTP_INFLIGHT: GaugeVec<4> = "kubelet_http_inflight_requests", "Requests in progress.",
        ["method", "path", "server_type", "long_running"];

    // Our requests to the API server.
    CLIENT_REQUESTS: CounterVec<3> = "rest_client_requests_total",
        "Requests to the API server, by status.", ["code", "method", "host"];
    CLIENT_DURATION: HistogramVec<2> = "rest_client_request_duration_seconds",
        "From a request to the API server to the head of its response.", REQUEST, ["verb", "host"];
    CLIENT_THROTTLED: HistogramVec<2> = "rest_client_rate_limiter_duration_seconds",
        "Waits of requests to the API server for their turn.", REQUEST, ["verb", "host"];
    CLIENT_RETRIES: CounterVec<3> = "rest_client_request_retries_total",
        "Requests that the API server wanted to be retried.", ["code", "verb", "host"];
    CLIENT_REQUEST_SIZE: HistogramVec<2> = "rest_client_request_size_bytes",
        "Bodies of requests to the API server.", SIZE, ["verb", "host"];
    CLIENT_RESPONSE_SIZE: HistogramVec<2> = "rest_client_response_size_bytes",
        "Bodies of the API server's responses, watches left out.", SIZE, ["verb", "host"];

    // Certificates.
    CLIENT_CERTIFICATE_ERRORS: Counter = "kubelet_certificate_manager_client_expiration_renew_errors",
        "Attempts at a new client certificate that failed.";
    SERVING_CERTIFICATE_ERRORS: Counter = "kubelet_server_expiration_renew_errors",
        "Attempts at a new serving certificate that failed.";
    SERVING_CERTIFICATE_AGE: Histogram = "kubelet_certificate_manager_server_rotation_seconds",
        "How old a serving certificate was when another one took its place.", AGE;

    // Images.
    IMAGE_PULL: HistogramVec<1> = "kubelet_image_pull_duration_seconds",
        "Image pulls that went well, by size.", PULL, ["image_size_in_bytes"];
    IMAGES_COLLECTED: CounterVec<1> = "kubelet_image_garbage_collected_total",
        "Images that were removed because they were not used.", ["reason"];
    ENSURE_IMAGE_REQUESTS: CounterVec<3> = "kubelet_image_manager_ensure_image_requests_total",
        "Containers whose image was looked for.", ["present_locally", "pull_policy", "pull_required"];
    MUST_PULL_CHECKS: CounterVec<1> = "kubelet_imagemanager_image_mustpull_checks_total",
        "Checks whether a pod may use an image that is on the node, by result.", ["result"];
    PULL_INTENTS: Gauge = "kubelet_imagemanager_ondisk_pullintents",
        "Notes of pulls that have begun and not ended.";
    PULLED_RECORDS: Gauge = "kubelet_imagemanager_ondisk_pulledrecords",
        "Records of images that were pulled.";
    IMAGE_VOLUMES_REQUESTED: Counter = "kubelet_image_volume_requested_total", "Image volumes that were wanted.";
    IMAGE_VOLUMES_MOUNTED: Counter = "kubelet_image_volume_mounted_succeed_total",
        "Image volumes that were mounted.";
    IMAGE_VOLUMES_FAILED: Counter = "kubelet_image_volume_mounted_errors_total",
        "Image volumes that could not be mounted.";
}

/// The expiry of the client certificate, in Unix time; the metric shows its remaining lifetime.
pub static CLIENT_CERTIFICATE_END: Gauge = Gauge::new("", "");
/// The expiry of the serving certificate, like [`CLIENT_CERTIFICATE_END`].
pub static SERVING_CERTIFICATE_END: Gauge = Gauge::new("", "");

thread_local! {
    static PULL_TIME: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Records that the calling thread, a pod's worker, has waited for an image.
pub fn add_pull_time(duration: Duration) {
    PULL_TIME.set(PULL_TIME.get() + duration);
}

/// The time recorded by [`add_pull_time`] on this thread since the last call.
#[must_use]
pub fn take_pull_time() -> Duration {
    PULL_TIME.take()
}

/// The label of [`IMAGE_PULL`] for an image of this size in bytes.
#[must_use]
pub fn image_size(bytes: u64) -> &'static str {
    const MIB: u64 = 1024 * 1024;
    const GIB: u64 = 1024 * MIB;
    const SIZES: [(u64, &str); 11] = [
        (10 * MIB, "0-10MB"),
        (100 * MIB, "10MB-100MB"),
        (500 * MIB, "100MB-500MB"),
        (GIB, "500MB-1GB"),
        (5 * GIB, "1GB-5GB"),
        (10 * GIB, "5GB-10GB"),
        (20 * GIB, "10GB-20GB"),
        (30 * GIB, "20GB-30GB"),
        (40 * GIB, "30GB-40GB"),
        (60 * GIB, "40GB-60GB"),
        (100 * GIB, "60GB-100GB"),
    ];
    SIZES.iter().find(|(limit, _)| bytes <= *limit).map_or("GT100GB", |(_, name)| name)
}

/// The operation type of a method of the runtime, `run_podsandbox` for `RunPodSandbox`.
#[must_use]
pub fn operation(method: &str) -> &'static str {
    match method {
        "Version" => "version",
        "Status" => "status",
        "CreateContainer" => "create_container",
        "StartContainer" => "start_container",
        "StopContainer" => "stop_container",
        "RemoveContainer" => "remove_container",
        "ListContainers" => "list_containers",
        "ContainerStatus" => "container_status",
        "UpdateContainerResources" => "update_container",
        "ReopenContainerLog" => "reopen_container_log",
        "ExecSync" => "exec_sync",
        "Exec" => "exec",
        "Attach" => "attach",
        "PortForward" => "port_forward",
        "RunPodSandbox" => "run_podsandbox",
        "StopPodSandbox" => "stop_podsandbox",
        "RemovePodSandbox" => "remove_podsandbox",
        "PodSandboxStatus" => "podsandbox_status",
        "ListPodSandbox" => "list_podsandbox",
        "ContainerStats" => "container_stats",
        "ListContainerStats" => "list_container_stats",
        "PodSandboxStats" => "podsandbox_stats",
        "ListPodSandboxStats" => "list_podsandbox_stats",
        "UpdatePodSandboxResources" => "update_podsandbox_resources",
        "UpdateRuntimeConfig" => "update_runtime_config",
        "RuntimeConfig" => "runtime_config",
        "ListImages" => "list_images",
        "ImageStatus" => "image_status",
        "PullImage" => "pull_image",
        "RemoveImage" => "remove_image",
        "ImageFsInfo" => "image_fs_info",
        "CheckpointContainer" => "checkpoint_container",
        "GetContainerEvents" => "get_container_events",
        "ListMetricDescriptors" => "list_metric_descriptors",
        "ListPodSandboxMetrics" => "list_podsandbox_metrics",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::metrics::Page;

    #[test]
    fn every_metric_writes_under_a_name_that_kubelets_use() {
        RUNTIME_OPERATIONS.inc(["version"]);
        let mut page = Page::new();
        page.add(ALL);
        let text = page.into_text();
        assert!(text.contains("kubelet_runtime_operations_total{operation_type=\"version\"}"));
        assert!(text.contains("kubelet_pod_start_duration_seconds_bucket{le=\"3600\"}"));
        let known =
            ["kubelet_", "coracle_", "rest_client_", "storage_operation_", "dra_", "volume_manager_selinux_"];
        assert!(text.lines().all(|line| known.iter().any(|start| line.contains(start))));
    }

    #[test]
    fn sizes_and_operations_have_their_labels() {
        assert_eq!(image_size(0), "0-10MB");
        assert_eq!(image_size(2 * 1024 * 1024 * 1024), "1GB-5GB");
        assert_eq!(image_size(u64::MAX), "GT100GB");
        assert_eq!(operation("ListPodSandbox"), "list_podsandbox");
        assert_eq!(CALL.len(), 14);
        for pair in CALL.windows(2) {
            assert!((pair[1] / pair[0] - 2.5).abs() < 1e-9);
        }
    }
}
