//! The table of all `KubeletConfiguration` v1beta1 fields: path, type, default, effect, meaning.
//!
//! The strict check, the defaults, the flags, `--help` and the compatibility list all use it, so each
//! field is described once. [`super::KubeletConfiguration`] has the same fields with Rust types.

use serde_json::Value;

/// The type of a field's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldType {
    /// true or false.
    Bool,
    /// A whole number of 32 bits.
    Int32,
    /// A whole number of 64 bits.
    Int64,
    /// A number.
    Float,
    /// A string.
    Text,
    /// A Go duration string.
    Duration,
    /// A quantity: a string such as `64Mi`, or a number.
    Quantity,
    /// A list of strings.
    TextList,
    /// A list of 32-bit numbers.
    IntList,
    /// String to string.
    TextMap,
    /// String to quantity.
    QuantityMap,
    /// String to list of strings.
    ListMap,
    /// String to bool.
    BoolMap,
    /// A list of objects with these fields.
    Items(&'static [(&'static str, FieldType)]),
}

impl FieldType {
    /// The type's name in messages.
    #[cfg(test)]
    pub fn type_name(self) -> &'static str {
        match self {
            FieldType::Bool => "bool",
            FieldType::Int32 => "int32",
            FieldType::Int64 => "int64",
            FieldType::Float => "float",
            FieldType::Text => "string",
            FieldType::Duration => "duration",
            FieldType::Quantity => "quantity",
            FieldType::TextList => "list of strings",
            FieldType::IntList => "list of int32",
            FieldType::TextMap => "map of strings",
            FieldType::QuantityMap => "map of quantities",
            FieldType::ListMap => "map of lists of strings",
            FieldType::BoolMap => "map of bools",
            FieldType::Items(_) => "list of objects",
        }
    }
}

/// A field's default.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DefaultValue {
    /// Unset, which has its own meaning.
    Nil,
    /// A bool.
    Bool(bool),
    /// A number.
    Int(i64),
    /// A string or duration.
    Text(&'static str),
    /// An empty list or map.
    Empty,
    /// A list of strings.
    List(&'static [&'static str]),
    /// String to string.
    Map(&'static [(&'static str, &'static str)]),
}

/// The effect of a field in this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldEffect {
    /// The field has the same effect as in the Go kubelet.
    Works,
    /// The field has no effect in the Go kubelet either, or can have none here.
    Ignored,
    /// Setting it is an error.
    Refused,
}

impl FieldEffect {
    /// The effect as printed in the compatibility list.
    pub fn text(self) -> &'static str {
        match self {
            FieldEffect::Works => "works",
            FieldEffect::Ignored => "ignored",
            FieldEffect::Refused => "refused",
        }
    }
}

/// A field of the configuration that is no object.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// The path, such as `authentication.x509.clientCAFile`.
    pub path: &'static str,
    /// The type of the value.
    pub kind: FieldType,
    /// The default when a configuration file is given.
    pub default: DefaultValue,
    /// Whether an explicit zero value is kept; otherwise zero means the default, as in Go.
    pub keeps_zero: bool,
    /// The effect in this version.
    pub effect: FieldEffect,
    /// The meaning of the field, for the help.
    pub help: &'static str,
}

impl Field {
    const fn new(path: &'static str, kind: FieldType, default: DefaultValue, help: &'static str) -> Self {
        Field {
            path,
            kind,
            default,
            keeps_zero: matches!(kind, FieldType::Bool),
            effect: FieldEffect::Works,
            help,
        }
    }

    const fn ignored(self) -> Self {
        Field { effect: FieldEffect::Ignored, ..self }
    }

    const fn refused(self) -> Self {
        Field { effect: FieldEffect::Refused, ..self }
    }

    const fn keeps_zero(self) -> Self {
        Field { keeps_zero: true, ..self }
    }

    /// The default as JSON; null when there is none.
    #[must_use]
    pub fn default_value(&self) -> Value {
        match self.default {
            DefaultValue::Nil => Value::Null,
            DefaultValue::Bool(flag) => Value::from(flag),
            DefaultValue::Int(number) => Value::from(number),
            DefaultValue::Text(text) => Value::from(text),
            DefaultValue::List(items) => Value::from(items),
            DefaultValue::Map(entries) => entries
                .iter()
                .map(|(key, value)| ((*key).to_owned(), Value::from(*value)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
            DefaultValue::Empty => match self.kind {
                FieldType::TextMap | FieldType::ListMap | FieldType::BoolMap | FieldType::QuantityMap => {
                    Value::Object(serde_json::Map::new())
                }
                _ => Value::Array(Vec::new()),
            },
        }
    }
}

/// The field with this path.
#[must_use]
pub fn field(path: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.path == path)
}

const fn flag(path: &'static str, default: bool, help: &'static str) -> Field {
    Field::new(path, FieldType::Bool, DefaultValue::Bool(default), help)
}

const fn int(path: &'static str, default: i64, help: &'static str) -> Field {
    Field::new(path, FieldType::Int32, DefaultValue::Int(default), help)
}

const fn long(path: &'static str, default: i64, help: &'static str) -> Field {
    Field::new(path, FieldType::Int64, DefaultValue::Int(default), help)
}

const fn text(path: &'static str, default: &'static str, help: &'static str) -> Field {
    Field::new(path, FieldType::Text, DefaultValue::Text(default), help)
}

const fn time(path: &'static str, default: &'static str, help: &'static str) -> Field {
    Field::new(path, FieldType::Duration, DefaultValue::Text(default), help)
}

const fn list(path: &'static str, help: &'static str) -> Field {
    Field::new(path, FieldType::TextList, DefaultValue::Empty, help)
}

const fn map(path: &'static str, help: &'static str) -> Field {
    Field::new(path, FieldType::TextMap, DefaultValue::Empty, help)
}

/// The default hard eviction thresholds of a configuration file.
pub const HARD_EVICTION: &[(&str, &str)] = &[
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
];

const TAINT: &[(&str, FieldType)] = &[
    ("key", FieldType::Text),
    ("value", FieldType::Text),
    ("effect", FieldType::Text),
    ("timeAdded", FieldType::Text),
];
const RESERVED_MEMORY: &[(&str, FieldType)] =
    &[("numaNode", FieldType::Int32), ("limits", FieldType::QuantityMap)];
const SHUTDOWN_BY_PRIORITY: &[(&str, FieldType)] =
    &[("priority", FieldType::Int32), ("shutdownGracePeriodSeconds", FieldType::Int64)];
const VMODULE: &[(&str, FieldType)] = &[("filePattern", FieldType::Text), ("verbosity", FieldType::Int64)];

/// Every field, in the order of the Go type.
pub static FIELDS: &[Field] = &[
    flag("enableServer", true, "serve the node API and the read-only port"),
    text("staticPodPath", "", "file or directory of static pod manifests"),
    text("podLogsDir", "/var/log/pods", "root of container logs; absolute, clean, ASCII"),
    time("syncFrequency", "1m0s", "how often running pods are synced without a cause"),
    time("fileCheckFrequency", "20s", "how often the static pod path is read in full"),
    time("httpCheckFrequency", "20s", "how often the static pod URL is polled"),
    text("staticPodURL", "", "URL of static pod manifests"),
    Field::new(
        "staticPodURLHeader",
        FieldType::ListMap,
        DefaultValue::Empty,
        "headers sent to the static pod URL",
    ),
    text("address", "0.0.0.0", "IP address the servers listen on"),
    int("port", 10250, "port of the node API"),
    int("readOnlyPort", 0, "port of the read-only server without authentication; 0 turns it off"),
    text("tlsCertFile", "", "serving certificate, with its chain"),
    text("tlsPrivateKeyFile", "", "key of the serving certificate"),
    list("tlsCipherSuites", "cipher suites the server may use; empty means Go's defaults"),
    text("tlsMinVersion", "", "oldest TLS version the server speaks, such as VersionTLS12"),
    Field::new(
        "tlsCurvePreferences",
        FieldType::IntList,
        DefaultValue::Empty,
        "TLS groups by their number, preferred first",
    ),
    flag("rotateCertificates", false, "renew the client certificate before it expires"),
    flag("serverTLSBootstrap", false, "ask the API server to sign the serving certificate"),
    text(
        "authentication.x509.clientCAFile",
        "",
        "certificate authorities whose client certificates are accepted",
    ),
    flag("authentication.webhook.enabled", true, "check bearer tokens with the API server"),
    time("authentication.webhook.cacheTTL", "2m0s", "how long a token check is remembered"),
    flag(
        "authentication.anonymous.enabled",
        false,
        "let requests without credentials in as system:anonymous",
    ),
    text("authorization.mode", "Webhook", "AlwaysAllow or Webhook"),
    time("authorization.webhook.cacheAuthorizedTTL", "5m0s", "how long a yes of the webhook is remembered"),
    time("authorization.webhook.cacheUnauthorizedTTL", "30s", "how long a no of the webhook is remembered"),
    int("registryPullQPS", 5, "image pulls per second; 0 means no limit").keeps_zero(),
    int("registryBurst", 10, "image pulls that may start at once, while registryPullQPS is not 0"),
    text(
        "imagePullCredentialsVerificationPolicy",
        "NeverVerifyPreloadedImages",
        "when a pod must show credentials for an image that is already there",
    ),
    list(
        "preloadedImagesVerificationAllowlist",
        "images that need no credentials with NeverVerifyAllowlistedImages",
    ),
    int("eventRecordQPS", 50, "events sent per second; 0 means no limit").keeps_zero(),
    int("eventBurst", 100, "events that may be sent at once"),
    flag("enableDebuggingHandlers", true, "serve exec, attach, logs, run and port-forward"),
    flag("enableContentionProfiling", false, "profile lock contention").ignored(),
    int("healthzPort", 10248, "port of the health endpoint; 0 turns it off").keeps_zero(),
    text("healthzBindAddress", "127.0.0.1", "IP address of the health endpoint"),
    int("oomScoreAdj", -999, "oom_score_adj of this process").keeps_zero(),
    text("clusterDomain", "", "DNS domain of the cluster"),
    list("clusterDNS", "IP addresses of the cluster's DNS servers"),
    time("streamingConnectionIdleTimeout", "4h0m0s", "no effect any more upstream").ignored(),
    time("nodeStatusUpdateFrequency", "10s", "how often the node status is computed"),
    time("nodeStatusReportFrequency", "5m0s", "how often an unchanged node status is sent"),
    int("nodeLeaseDurationSeconds", 40, "duration written into the node lease"),
    time("imageMinimumGCAge", "2m0s", "how long an unused image is kept at least"),
    time("imageMaximumGCAge", "0s", "how long an unused image is kept at most; 0 means no limit"),
    int("imageGCHighThresholdPercent", 85, "disk usage at which unused images are removed").keeps_zero(),
    int("imageGCLowThresholdPercent", 80, "disk usage down to which unused images are removed").keeps_zero(),
    time("volumeStatsAggPeriod", "1m0s", "how often volume usage is measured; negative turns it off"),
    text("kubeletCgroups", "", "cgroup this process moves into"),
    text("systemCgroups", "", "cgroup for all processes that are in none"),
    text("cgroupRoot", "", "cgroup under which pods are placed"),
    flag("cgroupsPerQOS", true, "keep a cgroup per QoS class and pod"),
    text("cgroupDriver", "cgroupfs", "cgroupfs or systemd; the runtime's own value wins"),
    text("cpuManagerPolicy", "none", "none or static"),
    Field::new(
        "singleProcessOOMKill",
        FieldType::Bool,
        DefaultValue::Nil,
        "let the kernel kill one process instead of the whole container; unset means so on cgroup v1 only",
    )
    .keeps_zero(),
    map("cpuManagerPolicyOptions", "options of the CPU manager policy"),
    time("cpuManagerReconcilePeriod", "10s", "how often CPU sets are checked"),
    text("memoryManagerPolicy", "None", "None or Static"),
    text("topologyManagerPolicy", "none", "none, best-effort, restricted or single-numa-node"),
    text("topologyManagerScope", "container", "container or pod"),
    map("topologyManagerPolicyOptions", "options of the topology manager policy"),
    map("qosReserved", "share of memory kept for better QoS classes (alpha)"),
    time("runtimeRequestTimeout", "2m0s", "deadline of calls to the container runtime"),
    text(
        "hairpinMode",
        "promiscuous-bridge",
        "promiscuous-bridge, hairpin-veth or none; the CNI plugin decides",
    )
    .ignored(),
    int("maxPods", 110, "pods this node takes"),
    text("podCIDR", "", "pod address range when there is no API server"),
    long("podPidsLimit", -1, "processes per pod; -1 means the node's limit").keeps_zero(),
    text("resolvConf", "/etc/resolv.conf", "resolver file that pods inherit; empty means none").keeps_zero(),
    flag("runOnce", false, "no longer supported; must be false").refused(),
    flag("cpuCFSQuota", true, "enforce CPU limits"),
    time("cpuCFSQuotaPeriod", "100ms", "period of CPU limits, 1ms to 1s").keeps_zero(),
    int("nodeStatusMaxImages", 50, "images listed in the node status; -1 means all").keeps_zero(),
    long("maxOpenFiles", 1_000_000, "open files this process may have"),
    text(
        "contentType",
        "application/vnd.kubernetes.protobuf",
        "encoding requested of the API server; it is JSON, and Protocol Buffers for the lease",
    )
    .ignored(),
    int("kubeAPIQPS", 50, "API requests per second; 0 means the client library's 5").keeps_zero(),
    int("kubeAPIBurst", 100, "API requests that may be sent at once"),
    flag("serializeImagePulls", true, "pull one image after another"),
    Field::new(
        "maxParallelImagePulls",
        FieldType::Int32,
        DefaultValue::Nil,
        "image pulls at once, while not serialized",
    )
    .keeps_zero(),
    Field::new(
        "evictionHard",
        FieldType::TextMap,
        DefaultValue::Map(HARD_EVICTION),
        "thresholds at which pods are evicted at once (below 1000Mi of memory the default has memory.available<10%)",
    ),
    map("evictionSoft", "thresholds at which pods are evicted after a grace period"),
    map("evictionSoftGracePeriod", "how long a soft threshold must hold"),
    time("evictionPressureTransitionPeriod", "5m0s", "how long a pressure condition is held"),
    int("evictionMaxPodGracePeriod", 0, "seconds a pod gets at most in a soft eviction"),
    map("evictionMinimumReclaim", "how much is freed beyond a threshold"),
    flag("mergeDefaultEvictionSettings", false, "fill evictionHard up with the defaults it leaves out"),
    int("podsPerCore", 0, "pods per CPU core; 0 means no limit"),
    flag("enableControllerAttachDetach", true, "leave attaching volumes to the controller"),
    flag("protectKernelDefaults", false, "fail instead of setting kernel parameters"),
    flag("makeIPTablesUtilChains", true, "keep the hint chains that other components look for"),
    int("iptablesMasqueradeBit", 14, "no effect any more upstream").keeps_zero().ignored(),
    int("iptablesDropBit", 15, "no effect any more upstream").keeps_zero().ignored(),
    Field::new("featureGates", FieldType::BoolMap, DefaultValue::Empty, "feature gates to switch"),
    flag("failSwapOn", true, "refuse to start while swap is on"),
    text("memorySwap.swapBehavior", "", "NoSwap or LimitedSwap; empty means NoSwap"),
    text("containerLogMaxSize", "10Mi", "size at which a container's log is rotated"),
    int("containerLogMaxFiles", 5, "log files kept per container").keeps_zero(),
    int("containerLogMaxWorkers", 1, "logs rotated at the same time").keeps_zero(),
    time("containerLogMonitorInterval", "10s", "how often log sizes are checked").keeps_zero(),
    text("configMapAndSecretChangeDetectionStrategy", "Watch", "Get, Cache or Watch"),
    map("systemReserved", "resources kept for the system, taken from the node's allocatable"),
    map("kubeReserved", "resources kept for Kubernetes' own daemons, taken from the node's allocatable"),
    text(
        "reservedSystemCPUs",
        "",
        "CPUs kept for the system, such as 0-1,4, taken from the node's allocatable",
    ),
    text(
        "showHiddenMetricsForVersion",
        "",
        "previous minor version whose hidden metrics are shown; no metric is hidden",
    )
    .ignored(),
    text("systemReservedCgroup", "", "cgroup of the system's daemons"),
    text("kubeReservedCgroup", "", "cgroup of Kubernetes' daemons"),
    Field::new(
        "enforceNodeAllocatable",
        FieldType::TextList,
        DefaultValue::List(&["pods"]),
        "what the node's allocatable limits are enforced on",
    ),
    list("allowedUnsafeSysctls", "sysctls, or prefixes ending in *, that pods may set"),
    map(
        "defaultPodSysctls",
        "sysctls of all pods that do not set them; needs the gate DefaultPodSysctls (alpha)",
    ),
    text(
        "volumePluginDir",
        "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/",
        "directory of exec volume plugins",
    ),
    text("providerID", "", "the cloud's name for this machine, for spec.providerID"),
    flag("kernelMemcgNotification", false, "the kernel always reports memory thresholds").ignored(),
    text("logging.format", "text", "text or json"),
    time("logging.flushFrequency", "5s", "log lines are never buffered").ignored(),
    long("logging.verbosity", 0, "0 or 1: info, more: debug"),
    Field::new(
        "logging.vmodule",
        FieldType::Items(VMODULE),
        DefaultValue::Empty,
        "verbosity by source file; use CORACLE_LOG",
    )
    .ignored(),
    flag(
        "logging.options.text.splitStream",
        false,
        "errors to stderr, other lines to stdout; needs the gate LoggingAlphaOptions",
    ),
    Field::new(
        "logging.options.text.infoBufferSize",
        FieldType::Quantity,
        DefaultValue::Text("0"),
        "buffer of split info lines, which are never buffered here",
    )
    .ignored(),
    flag(
        "logging.options.json.splitStream",
        false,
        "errors to stderr, other lines to stdout; needs the gate LoggingAlphaOptions",
    ),
    Field::new(
        "logging.options.json.infoBufferSize",
        FieldType::Quantity,
        DefaultValue::Text("0"),
        "buffer of split info lines, which are never buffered here",
    )
    .ignored(),
    flag("enableSystemLogHandler", true, "serve /logs of this machine"),
    flag("enableSystemLogQuery", false, "answer queries for service logs"),
    time("shutdownGracePeriod", "0s", "how long a machine shutdown is held back; 0 turns it off"),
    time("shutdownGracePeriodCriticalPods", "0s", "the part of shutdownGracePeriod kept for critical pods"),
    Field::new(
        "shutdownGracePeriodByPodPriority",
        FieldType::Items(SHUTDOWN_BY_PRIORITY),
        DefaultValue::Empty,
        "shutdown grace by pod priority, instead of the two above",
    ),
    time(
        "crashLoopBackOff.maxContainerRestartPeriod",
        "5m0s",
        "longest wait before a crashed container restarts",
    )
    .keeps_zero(),
    Field::new(
        "reservedMemory",
        FieldType::Items(RESERVED_MEMORY),
        DefaultValue::Empty,
        "memory reserved per NUMA node",
    ),
    flag(
        "enableProfilingHandler",
        true,
        "answer below /debug/pprof, where there are no profiles: 404 instead of 405",
    ),
    flag("enableDebugFlagsHandler", true, "serve /debug/flags/v"),
    flag("seccompDefault", false, "RuntimeDefault instead of Unconfined as the default seccomp profile"),
    Field::new(
        "memoryThrottlingFactor",
        FieldType::Float,
        DefaultValue::Nil,
        "where memory.high is set, with MemoryQoS",
    )
    .keeps_zero(),
    text("memoryReservationPolicy", "None", "None or TieredReservation, with MemoryQoS"),
    Field::new(
        "registerWithTaints",
        FieldType::Items(TAINT),
        DefaultValue::Empty,
        "taints the node registers with",
    ),
    flag("registerNode", true, "register this node with the API server"),
    Field::new("tracing.endpoint", FieldType::Text, DefaultValue::Nil, "where spans are sent"),
    Field::new(
        "tracing.samplingRatePerMillion",
        FieldType::Int32,
        DefaultValue::Nil,
        "traces that are recorded of a million",
    )
    .keeps_zero(),
    flag("localStorageCapacityIsolation", true, "count ephemeral storage in the node's capacity"),
    text(
        "containerRuntimeEndpoint",
        "unix:///run/containerd/containerd.sock",
        "socket of the container runtime",
    ),
    text("imageServiceEndpoint", "", "socket of the image service; empty means the runtime's"),
    flag("failCgroupV1", true, "refuse to start on cgroup v1"),
    Field::new(
        "userNamespaces.idsPerPod",
        FieldType::Int64,
        DefaultValue::Nil,
        "ids each user namespace gets; 65536 when unset",
    )
    .keeps_zero(),
];
