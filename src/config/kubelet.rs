//! `KubeletConfiguration` v1beta1 as Rust types; after the defaults are set, every value is present
//! (Go: k8s.io/kubelet/config/v1beta1). [`super::fields`] describes each field.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::duration::GoDuration;
use crate::model::Quantity;

/// The whole configuration of a node agent.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct KubeletConfiguration {
    /// Serve the node API and the read-only port.
    pub enable_server: bool,
    /// File or directory of static pod manifests.
    pub static_pod_path: String,
    /// Root of container logs; absolute, clean, ASCII.
    pub pod_logs_dir: String,
    /// How often running pods are synced without a cause.
    pub sync_frequency: GoDuration,
    /// How often the static pod path is read in full.
    pub file_check_frequency: GoDuration,
    /// How often the static pod URL is polled.
    pub http_check_frequency: GoDuration,
    /// URL of static pod manifests.
    #[serde(rename = "staticPodURL")]
    pub static_pod_url: String,
    /// Headers sent to the static pod URL.
    #[serde(rename = "staticPodURLHeader")]
    pub static_pod_url_header: BTreeMap<String, Vec<String>>,
    /// IP address the servers listen on.
    pub address: String,
    /// Port of the node API.
    pub port: i32,
    /// Port of the read-only server without authentication; 0 turns it off.
    pub read_only_port: i32,
    /// Serving certificate, with its chain.
    pub tls_cert_file: String,
    /// Key of the serving certificate.
    pub tls_private_key_file: String,
    /// Cipher suites the server may use; empty means Go's defaults.
    pub tls_cipher_suites: Vec<String>,
    /// Oldest TLS version the server accepts, such as VersionTLS12.
    pub tls_min_version: String,
    /// TLS groups by their number, preferred first.
    pub tls_curve_preferences: Vec<i32>,
    /// Renew the client certificate before it expires.
    pub rotate_certificates: bool,
    /// Ask the API server to sign the serving certificate.
    #[serde(rename = "serverTLSBootstrap")]
    pub server_tls_bootstrap: bool,
    /// Who may call the node API.
    pub authentication: Authentication,
    /// What callers of the node API may do.
    pub authorization: Authorization,
    /// Image pulls per second; 0 means no limit.
    #[serde(rename = "registryPullQPS")]
    pub registry_pull_qps: i32,
    /// Image pulls that may start at once, while registryPullQPS is not 0.
    pub registry_burst: i32,
    /// When a pod must show credentials for an image that is already there.
    pub image_pull_credentials_verification_policy: String,
    /// Images that need no credentials with NeverVerifyAllowlistedImages.
    pub preloaded_images_verification_allowlist: Vec<String>,
    /// Events sent per second; 0 means no limit.
    #[serde(rename = "eventRecordQPS")]
    pub event_record_qps: i32,
    /// Events that may be sent at once.
    pub event_burst: i32,
    /// Serve exec, attach, logs, run and port-forward.
    pub enable_debugging_handlers: bool,
    /// Profile lock contention.
    pub enable_contention_profiling: bool,
    /// Port of the health endpoint; 0 turns it off.
    pub healthz_port: i32,
    /// IP address of the health endpoint.
    pub healthz_bind_address: String,
    /// Oom_score_adj of this process.
    pub oom_score_adj: i32,
    /// DNS domain of the cluster.
    pub cluster_domain: String,
    /// IP addresses of the cluster's DNS servers.
    #[serde(rename = "clusterDNS")]
    pub cluster_dns: Vec<String>,
    /// No effect any more upstream.
    pub streaming_connection_idle_timeout: GoDuration,
    /// How often the node status is computed.
    pub node_status_update_frequency: GoDuration,
    /// How often an unchanged node status is sent.
    pub node_status_report_frequency: GoDuration,
    /// Duration written into the node lease.
    pub node_lease_duration_seconds: i32,
    /// How long an unused image is kept at least.
    #[serde(rename = "imageMinimumGCAge")]
    pub image_minimum_gc_age: GoDuration,
    /// How long an unused image is kept at most; 0 means no limit.
    #[serde(rename = "imageMaximumGCAge")]
    pub image_maximum_gc_age: GoDuration,
    /// Disk usage at which unused images are removed.
    #[serde(rename = "imageGCHighThresholdPercent")]
    pub image_gc_high_threshold_percent: i32,
    /// Disk usage down to which unused images are removed.
    #[serde(rename = "imageGCLowThresholdPercent")]
    pub image_gc_low_threshold_percent: i32,
    /// How often volume usage is measured; negative turns it off.
    pub volume_stats_agg_period: GoDuration,
    /// Cgroup this process moves into.
    pub kubelet_cgroups: String,
    /// Cgroup for all processes that are in none.
    pub system_cgroups: String,
    /// Cgroup under which pods are placed.
    pub cgroup_root: String,
    /// Keep a cgroup per QoS class and pod.
    #[serde(rename = "cgroupsPerQOS")]
    pub cgroups_per_qos: bool,
    /// Cgroupfs or systemd; the runtime's own value wins.
    pub cgroup_driver: String,
    /// None or static.
    pub cpu_manager_policy: String,
    /// Let the kernel kill one process instead of the whole container; unset means so on cgroup v1 only.
    #[serde(rename = "singleProcessOOMKill", skip_serializing_if = "Option::is_none")]
    pub single_process_oom_kill: Option<bool>,
    /// Options of the CPU manager policy.
    pub cpu_manager_policy_options: BTreeMap<String, String>,
    /// How often CPU sets are checked.
    pub cpu_manager_reconcile_period: GoDuration,
    /// None or Static.
    pub memory_manager_policy: String,
    /// None, best-effort, restricted or single-numa-node.
    pub topology_manager_policy: String,
    /// Container or pod.
    pub topology_manager_scope: String,
    /// Options of the topology manager policy.
    pub topology_manager_policy_options: BTreeMap<String, String>,
    /// Share of memory kept for better QoS classes (alpha).
    pub qos_reserved: BTreeMap<String, String>,
    /// Deadline of calls to the container runtime.
    pub runtime_request_timeout: GoDuration,
    /// Promiscuous-bridge, hairpin-veth or none; the CNI plugin decides.
    pub hairpin_mode: String,
    /// Pods this node takes.
    pub max_pods: i32,
    /// Pod address range when there is no API server.
    #[serde(rename = "podCIDR")]
    pub pod_cidr: String,
    /// Processes per pod; -1 means the node's limit.
    pub pod_pids_limit: i64,
    /// Resolver file that pods inherit; empty means none.
    pub resolv_conf: String,
    /// No longer supported; must be false.
    pub run_once: bool,
    /// Enforce CPU limits.
    #[serde(rename = "cpuCFSQuota")]
    pub cpu_cfs_quota: bool,
    /// Period of CPU limits, 1ms to 1s.
    #[serde(rename = "cpuCFSQuotaPeriod")]
    pub cpu_cfs_quota_period: GoDuration,
    /// Images listed in the node status; -1 means all.
    pub node_status_max_images: i32,
    /// Open files this process may have.
    pub max_open_files: i64,
    /// Encoding requested of the API server.
    pub content_type: String,
    /// API requests per second.
    #[serde(rename = "kubeAPIQPS")]
    pub kube_api_qps: i32,
    /// API requests that may be sent at once.
    #[serde(rename = "kubeAPIBurst")]
    pub kube_api_burst: i32,
    /// Pull one image after another.
    pub serialize_image_pulls: bool,
    /// Image pulls at once, while not serialized.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_parallel_image_pulls: Option<i32>,
    /// Thresholds at which pods are evicted at once.
    pub eviction_hard: BTreeMap<String, String>,
    /// Thresholds at which pods are evicted after a grace period.
    pub eviction_soft: BTreeMap<String, String>,
    /// How long a soft threshold must hold.
    pub eviction_soft_grace_period: BTreeMap<String, String>,
    /// How long a pressure condition is held.
    pub eviction_pressure_transition_period: GoDuration,
    /// Seconds a pod gets at most in a soft eviction.
    pub eviction_max_pod_grace_period: i32,
    /// How much is freed beyond a threshold.
    pub eviction_minimum_reclaim: BTreeMap<String, String>,
    /// Fill evictionHard up with the defaults it leaves out.
    pub merge_default_eviction_settings: bool,
    /// Pods per CPU core; 0 means no limit.
    pub pods_per_core: i32,
    /// Leave attaching volumes to the controller.
    pub enable_controller_attach_detach: bool,
    /// Fail instead of setting kernel parameters.
    pub protect_kernel_defaults: bool,
    /// Keep the hint chains that other components look for.
    #[serde(rename = "makeIPTablesUtilChains")]
    pub make_iptables_util_chains: bool,
    /// No effect any more upstream.
    pub iptables_masquerade_bit: i32,
    /// No effect any more upstream.
    pub iptables_drop_bit: i32,
    /// Feature gates to switch.
    pub feature_gates: BTreeMap<String, bool>,
    /// Refuse to start while swap is on.
    pub fail_swap_on: bool,
    /// What pods may swap.
    pub memory_swap: MemorySwap,
    /// Size at which a container's log is rotated.
    pub container_log_max_size: String,
    /// Log files kept per container.
    pub container_log_max_files: i32,
    /// Logs rotated at the same time.
    pub container_log_max_workers: i32,
    /// How often log sizes are checked.
    pub container_log_monitor_interval: GoDuration,
    /// Get, Cache or Watch.
    pub config_map_and_secret_change_detection_strategy: String,
    /// Resources kept for the system.
    pub system_reserved: BTreeMap<String, String>,
    /// Resources kept for Kubernetes' own daemons.
    pub kube_reserved: BTreeMap<String, String>,
    /// CPUs kept for the system, such as 0-1,4.
    #[serde(rename = "reservedSystemCPUs")]
    pub reserved_system_cpus: String,
    /// Previous minor version whose hidden metrics are shown.
    pub show_hidden_metrics_for_version: String,
    /// Cgroup of the system's daemons.
    pub system_reserved_cgroup: String,
    /// Cgroup of Kubernetes' daemons.
    pub kube_reserved_cgroup: String,
    /// What the node's allocatable limits are enforced on.
    pub enforce_node_allocatable: Vec<String>,
    /// Sysctls, or prefixes ending in *, that pods may set.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Sysctls of all pods that do not set them.
    pub default_pod_sysctls: BTreeMap<String, String>,
    /// Directory of exec volume plugins.
    pub volume_plugin_dir: String,
    /// The cloud's name for this machine, for spec.providerID.
    #[serde(rename = "providerID")]
    pub provider_id: String,
    /// Let the kernel report memory thresholds.
    pub kernel_memcg_notification: bool,
    /// Logging.
    pub logging: Logging,
    /// Serve /logs of this machine.
    pub enable_system_log_handler: bool,
    /// Answer queries for service logs.
    pub enable_system_log_query: bool,
    /// How long a machine shutdown is held back; 0 turns it off.
    pub shutdown_grace_period: GoDuration,
    /// The part of shutdownGracePeriod kept for critical pods.
    pub shutdown_grace_period_critical_pods: GoDuration,
    /// Shutdown grace by pod priority, instead of the two above.
    pub shutdown_grace_period_by_pod_priority: Vec<ShutdownByPriority>,
    /// Waits before crashed containers restart.
    pub crash_loop_back_off: CrashLoopBackOff,
    /// Memory reserved per NUMA node.
    pub reserved_memory: Vec<ReservedMemory>,
    /// Serve /debug/pprof.
    pub enable_profiling_handler: bool,
    /// Serve /debug/flags/v.
    pub enable_debug_flags_handler: bool,
    /// RuntimeDefault instead of Unconfined as the default seccomp profile.
    pub seccomp_default: bool,
    /// Where memory.high is set, with MemoryQoS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_throttling_factor: Option<f64>,
    /// None or TieredReservation, with MemoryQoS.
    pub memory_reservation_policy: String,
    /// Taints the node registers with.
    pub register_with_taints: Vec<Taint>,
    /// Register this node with the API server.
    pub register_node: bool,
    /// OpenTelemetry; `None`: no spans are recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracing: Option<Tracing>,
    /// Account for ephemeral storage.
    pub local_storage_capacity_isolation: bool,
    /// Socket of the container runtime.
    pub container_runtime_endpoint: String,
    /// Socket of the image service; empty means the runtime's.
    pub image_service_endpoint: String,
    /// Refuse to start on cgroup v1.
    pub fail_cgroup_v1: bool,
    /// User namespaces of pods.
    pub user_namespaces: UserNamespaces,
}

/// Who may call the node API.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Authentication {
    /// Client certificates.
    pub x509: X509Authentication,
    /// Bearer tokens.
    pub webhook: WebhookAuthentication,
    /// Requests without credentials.
    pub anonymous: AnonymousAuthentication,
}

/// Client certificates.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct X509Authentication {
    /// Certificate authorities whose client certificates are accepted.
    #[serde(rename = "clientCAFile")]
    pub client_ca_file: String,
}

/// Bearer tokens.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct WebhookAuthentication {
    /// Check bearer tokens with the API server.
    pub enabled: bool,
    /// How long a token check is remembered.
    #[serde(rename = "cacheTTL")]
    pub cache_ttl: GoDuration,
}

/// Requests without credentials.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct AnonymousAuthentication {
    /// Let requests without credentials in as system:anonymous.
    pub enabled: bool,
}

/// What callers of the node API may do.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Authorization {
    /// AlwaysAllow or Webhook.
    pub mode: String,
    /// How long decisions of the API server are cached.
    pub webhook: WebhookAuthorization,
}

/// How long decisions of the API server are cached.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct WebhookAuthorization {
    /// How long a yes of the webhook is remembered.
    #[serde(rename = "cacheAuthorizedTTL")]
    pub cache_authorized_ttl: GoDuration,
    /// How long a no of the webhook is remembered.
    #[serde(rename = "cacheUnauthorizedTTL")]
    pub cache_unauthorized_ttl: GoDuration,
}

/// What pods may swap.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct MemorySwap {
    /// NoSwap or LimitedSwap; empty means NoSwap.
    pub swap_behavior: String,
}

/// Logging.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Logging {
    /// Text or json.
    pub format: String,
    /// Log lines are never buffered.
    pub flush_frequency: GoDuration,
    /// 0 or 1: info, more: debug.
    pub verbosity: i64,
    /// Verbosity by source file; use CORACLE_LOG.
    pub vmodule: Vec<VmoduleRule>,
    /// Options by log format.
    pub options: LoggingOptions,
}

/// Options by log format.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct LoggingOptions {
    /// Where log lines go.
    pub text: LogRouting,
    /// Where log lines go.
    pub json: LogRouting,
}

/// Where log lines go.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct LogRouting {
    /// Info lines to stdout, errors to stderr.
    pub split_stream: bool,
    /// Buffer of split info lines.
    pub info_buffer_size: Quantity,
}

/// Waits before crashed containers restart.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct CrashLoopBackOff {
    /// Longest wait before a crashed container restarts.
    pub max_container_restart_period: GoDuration,
}

/// OpenTelemetry.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Tracing {
    /// Where spans are sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Traces that are recorded of a million.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling_rate_per_million: Option<i32>,
}

/// User namespaces of pods.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct UserNamespaces {
    /// Ids each user namespace gets; 65536 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids_per_pod: Option<i64>,
}

/// Verbosity of some source files.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct VmoduleRule {
    /// Name of the files, which may hold `*` and `?`.
    pub file_pattern: String,
    /// Their verbosity.
    pub verbosity: i64,
}

/// Shutdown grace of pods from a priority on.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ShutdownByPriority {
    /// Lowest priority it holds for.
    pub priority: i32,
    /// The grace in seconds.
    pub shutdown_grace_period_seconds: i64,
}

/// Memory reserved on one NUMA node.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ReservedMemory {
    /// The NUMA node.
    pub numa_node: i32,
    /// Bytes by kind: `memory`, `hugepages-2Mi`.
    pub limits: BTreeMap<String, Quantity>,
}

/// A taint of the node.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Taint {
    /// The key of the taint.
    pub key: String,
    /// The value of the taint.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// NoSchedule, PreferNoSchedule or NoExecute.
    pub effect: String,
    /// When it was added; must not be set here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_added: Option<String>,
}
