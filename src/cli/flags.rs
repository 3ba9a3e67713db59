//! The table of the agent's flags: every kubelet flag that is valid in 1.36.
//!
//! It drives parsing, `--help` and the compatibility list. A flag that sets a configuration field
//! takes its type, default, meaning and standing from the table of fields.

use std::collections::BTreeMap;

use crate::config::effects::preset_text;
use crate::config::fields::{Kind, Standing, field};
use crate::config::{DefaultSet, MASK, without_password};
use crate::server::LOCAL_SOCKET;

/// How the text of a flag becomes a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syntax {
    /// true or false; may stand alone.
    Bool,
    /// A whole number.
    Int,
    /// A Go duration.
    Duration,
    /// Any text.
    Text,
    /// `a,b,c`, and repeatable.
    List,
    /// `key=value,key=value`.
    Pairs,
    /// `key<value,key<value`.
    Thresholds,
    /// `Gate=true,Gate=false`.
    Gates,
    /// `name:value,name:value`; a name may repeat.
    Headers,
    /// `key=value:Effect,key:Effect`.
    Taints,
    /// `0:memory=1Gi,hugepages-2Mi=2Gi;1:memory=1Gi`.
    NumaMemory,
    /// `pattern=2,pattern=3`.
    Vmodule,
}

/// What a flag does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// What it does in the Go kubelet.
    Works,
    /// Accepted without effect, for this reason.
    Ignored(&'static str),
    /// An error when given, for this reason.
    Refused(&'static str),
    /// Read and checked; what it governs is not built yet.
    NoEffectYet,
}

impl Effect {
    /// The effect as the documents print it.
    #[must_use]
    pub fn text(self) -> String {
        match self {
            Effect::Works => "works".to_owned(),
            Effect::Ignored(reason) => format!("ignored: {reason}"),
            Effect::Refused(reason) => format!("refused: {reason}"),
            Effect::NoEffectYet => "no effect yet".to_owned(),
        }
    }
}

/// One flag.
#[derive(Debug, Clone, Copy)]
pub struct Flag {
    /// The name, without dashes.
    pub name: &'static str,
    /// The form of its value.
    pub syntax: Syntax,
    /// The configuration field it sets; empty when it is not about one.
    pub field: &'static str,
    own_preset: &'static str,
    own_help: &'static str,
    own_effect: Effect,
}

impl Flag {
    /// Its default.
    #[must_use]
    pub fn preset(&self) -> String {
        if self.field.is_empty() {
            return if self.own_preset.is_empty() { "\"\"".to_owned() } else { self.own_preset.to_owned() };
        }
        preset_text(self.field, DefaultSet::FlagsOnly)
    }

    /// What it means.
    #[must_use]
    pub fn help(&self) -> &'static str {
        field(self.field).map_or(self.own_help, |field| field.help)
    }

    /// What it does in this version.
    #[must_use]
    pub fn effect(&self) -> Effect {
        match field(self.field).map(|field| field.standing) {
            None => self.own_effect,
            Some(Standing::Works) => Effect::Works,
            Some(Standing::NoEffectYet) => Effect::NoEffectYet,
            Some(Standing::Ignored) => Effect::Ignored("nothing here depends on it"),
            Some(Standing::Refused) => Effect::Refused("setting it is an error"),
        }
    }

    /// The form of its value, as `--help` prints it.
    #[must_use]
    pub fn form(&self) -> &'static str {
        match self.syntax {
            Syntax::Bool => "",
            Syntax::Int => "N",
            Syntax::Duration => "DURATION",
            Syntax::Text => "TEXT",
            Syntax::List => "A,B",
            Syntax::Pairs => "K=V,...",
            Syntax::Thresholds => "SIGNAL<V,...",
            Syntax::Gates => "GATE=BOOL,...",
            Syntax::Headers => "NAME:V,...",
            Syntax::Taints => "K=V:EFFECT,...",
            Syntax::NumaMemory => "NODE:KIND=V;...",
            Syntax::Vmodule => "PATTERN=N,...",
        }
    }
}

/// The flag of a name; underscores count as dashes, as in Go.
#[must_use]
pub fn find(name: &str) -> Option<&'static Flag> {
    let name = name.replace('_', "-");
    FLAGS.iter().find(|flag| flag.name == name)
}

/// Every flag with its value: the one in `given`, or the default. Secrets are masked.
#[must_use]
pub fn effective(given: &BTreeMap<&'static str, String>) -> Vec<(String, String)> {
    let mut flags: Vec<(String, String)> = FLAGS
        .iter()
        .map(|flag| {
            let value = match given.get(flag.name) {
                // Headers usually carry credentials.
                Some(_) if flag.syntax == Syntax::Headers => MASK.to_owned(),
                Some(text) => without_password(text),
                None => flag.preset(),
            };
            (flag.name.to_owned(), value)
        })
        .collect();
    flags.sort_unstable();
    flags
}

/// Flags of older versions, with what became of them.
pub const REMOVED: &[(&str, &str)] = &[
    ("allow-privileged", "privileged containers are governed by admission"),
    ("api-servers", "use --kubeconfig"),
    ("azure-container-registry-config", "use an image credential provider"),
    ("bootstrap-checkpoint-path", "there is no replacement"),
    ("cadvisor-port", "there is no replacement"),
    ("cloud-config", "cloud providers are external"),
    ("cni-bin-dir", "CNI is configured in the container runtime"),
    ("cni-cache-dir", "CNI is configured in the container runtime"),
    ("cni-conf-dir", "CNI is configured in the container runtime"),
    ("container-runtime", "use --container-runtime-endpoint"),
    ("docker-endpoint", "use --container-runtime-endpoint"),
    ("dynamic-config-dir", "use --config and --config-dir"),
    ("experimental-bootstrap-kubeconfig", "use --bootstrap-kubeconfig"),
    ("experimental-kernel-memcg-notification", "use --kernel-memcg-notification"),
    ("image-pull-progress-deadline", "the container runtime decides"),
    ("iptables-drop-bit", "there is no replacement"),
    ("iptables-masquerade-bit", "there is no replacement"),
    ("keep-terminated-pod-volumes", "there is no replacement"),
    ("master-service-namespace", "there is no replacement"),
    ("network-plugin", "CNI is configured in the container runtime"),
    ("network-plugin-mtu", "CNI is configured in the container runtime"),
    ("non-masquerade-cidr", "there is no replacement"),
    ("pod-infra-container-image", "the container runtime pins its sandbox image"),
    ("redirect-container-streaming", "there is no replacement"),
    ("register-schedulable", "use --register-with-taints"),
    ("require-kubeconfig", "--kubeconfig is enough"),
    ("seccomp-profile-root", "profiles are under <root-dir>/seccomp"),
    ("alsologtostderr", "lines go to stderr"),
    ("log-dir", "lines go to stderr"),
    ("log-file", "lines go to stderr"),
    ("logtostderr", "lines go to stderr"),
    ("stderrthreshold", "lines go to stderr"),
];

const fn sets(name: &'static str, syntax: Syntax, field: &'static str) -> Flag {
    Flag { name, syntax, field, own_preset: "", own_help: "", own_effect: Effect::Works }
}

const fn own(
    name: &'static str,
    syntax: Syntax,
    own_preset: &'static str,
    own_effect: Effect,
    own_help: &'static str,
) -> Flag {
    Flag { name, syntax, field: "", own_preset, own_help, own_effect }
}

const STATS: Effect = Effect::Ignored("there is no cAdvisor in this agent");

/// Every flag, by name.
pub static FLAGS: &[Flag] = &[
    sets("address", Syntax::Text, "address"),
    sets("allowed-unsafe-sysctls", Syntax::List, "allowedUnsafeSysctls"),
    sets("anonymous-auth", Syntax::Bool, "authentication.anonymous.enabled"),
    own(
        "application-metrics-count-limit",
        Syntax::Int,
        "100",
        STATS,
        "application metrics kept per container",
    ),
    sets("authentication-token-webhook", Syntax::Bool, "authentication.webhook.enabled"),
    sets("authentication-token-webhook-cache-ttl", Syntax::Duration, "authentication.webhook.cacheTTL"),
    sets("authorization-mode", Syntax::Text, "authorization.mode"),
    sets(
        "authorization-webhook-cache-authorized-ttl",
        Syntax::Duration,
        "authorization.webhook.cacheAuthorizedTTL",
    ),
    sets(
        "authorization-webhook-cache-unauthorized-ttl",
        Syntax::Duration,
        "authorization.webhook.cacheUnauthorizedTTL",
    ),
    own(
        "boot-id-file",
        Syntax::Text,
        "/proc/sys/kernel/random/boot_id",
        STATS,
        "files to read the boot id from",
    ),
    own(
        "bootstrap-kubeconfig",
        Syntax::Text,
        "",
        Effect::Works,
        "kubeconfig to ask for a client certificate with",
    ),
    own("cert-dir", Syntax::Text, "/var/lib/kubelet/pki", Effect::Works, "directory of certificates"),
    sets("cgroup-driver", Syntax::Text, "cgroupDriver"),
    sets("cgroup-root", Syntax::Text, "cgroupRoot"),
    sets("cgroups-per-qos", Syntax::Bool, "cgroupsPerQOS"),
    sets("client-ca-file", Syntax::Text, "authentication.x509.clientCAFile"),
    own("cloud-provider", Syntax::Text, "", Effect::Works, "empty or external"),
    sets("cluster-dns", Syntax::List, "clusterDNS"),
    sets("cluster-domain", Syntax::Text, "clusterDomain"),
    own(
        "config",
        Syntax::Text,
        "",
        Effect::Works,
        "configuration file: a KubeletConfiguration in YAML or JSON",
    ),
    own(
        "config-dir",
        Syntax::Text,
        "",
        Effect::Works,
        "directory of drop-ins (*.conf), merged over --config in order",
    ),
    own(
        "container-hints",
        Syntax::Text,
        "/etc/cadvisor/container_hints.json",
        STATS,
        "file of container hints",
    ),
    sets("container-log-max-files", Syntax::Int, "containerLogMaxFiles"),
    sets("container-log-max-size", Syntax::Text, "containerLogMaxSize"),
    sets("container-runtime-endpoint", Syntax::Text, "containerRuntimeEndpoint"),
    own("containerd", Syntax::Text, "/run/containerd/containerd.sock", STATS, "containerd's socket"),
    own("containerd-namespace", Syntax::Text, "k8s.io", STATS, "containerd's namespace"),
    sets("contention-profiling", Syntax::Bool, "enableContentionProfiling"),
    sets("cpu-cfs-quota", Syntax::Bool, "cpuCFSQuota"),
    sets("cpu-cfs-quota-period", Syntax::Duration, "cpuCFSQuotaPeriod"),
    sets("cpu-manager-policy", Syntax::Text, "cpuManagerPolicy"),
    sets("cpu-manager-policy-options", Syntax::Pairs, "cpuManagerPolicyOptions"),
    sets("cpu-manager-reconcile-period", Syntax::Duration, "cpuManagerReconcilePeriod"),
    sets("enable-controller-attach-detach", Syntax::Bool, "enableControllerAttachDetach"),
    sets("enable-debugging-handlers", Syntax::Bool, "enableDebuggingHandlers"),
    own("enable-load-reader", Syntax::Bool, "false", STATS, "read CPU load"),
    sets("enable-server", Syntax::Bool, "enableServer"),
    sets("enforce-node-allocatable", Syntax::List, "enforceNodeAllocatable"),
    sets("event-burst", Syntax::Int, "eventBurst"),
    sets("event-qps", Syntax::Int, "eventRecordQPS"),
    own("event-storage-age-limit", Syntax::Text, "default=0", STATS, "how long container events are kept"),
    own("event-storage-event-limit", Syntax::Text, "default=0", STATS, "how many container events are kept"),
    sets("eviction-hard", Syntax::Thresholds, "evictionHard"),
    sets("eviction-max-pod-grace-period", Syntax::Int, "evictionMaxPodGracePeriod"),
    sets("eviction-minimum-reclaim", Syntax::Pairs, "evictionMinimumReclaim"),
    sets("eviction-pressure-transition-period", Syntax::Duration, "evictionPressureTransitionPeriod"),
    sets("eviction-soft", Syntax::Thresholds, "evictionSoft"),
    sets("eviction-soft-grace-period", Syntax::Pairs, "evictionSoftGracePeriod"),
    own(
        "exit-on-lock-contention",
        Syntax::Bool,
        "false",
        Effect::NoEffectYet,
        "leave when another agent wants the lock file",
    ),
    own(
        "experimental-allocatable-ignore-eviction",
        Syntax::Bool,
        "false",
        Effect::Works,
        "leave eviction thresholds out of the node's allocatable",
    ),
    own(
        "experimental-mounter-path",
        Syntax::Text,
        "",
        Effect::Ignored("deprecated upstream; mounts are made by system calls"),
        "mount program",
    ),
    sets("fail-cgroupv1", Syntax::Bool, "failCgroupV1"),
    sets("fail-swap-on", Syntax::Bool, "failSwapOn"),
    sets("feature-gates", Syntax::Gates, "featureGates"),
    sets("file-check-frequency", Syntax::Duration, "fileCheckFrequency"),
    own(
        "global-housekeeping-interval",
        Syntax::Duration,
        "1m0s",
        STATS,
        "how often all containers are looked for",
    ),
    sets("hairpin-mode", Syntax::Text, "hairpinMode"),
    sets("healthz-bind-address", Syntax::Text, "healthzBindAddress"),
    sets("healthz-port", Syntax::Int, "healthzPort"),
    own("help", Syntax::Bool, "false", Effect::Works, "print this and leave"),
    own("hostname-override", Syntax::Text, "", Effect::Works, "node name instead of the host's name"),
    own("housekeeping-interval", Syntax::Duration, "10s", STATS, "how often container stats are read"),
    sets("http-check-frequency", Syntax::Duration, "httpCheckFrequency"),
    own(
        "image-credential-provider-bin-dir",
        Syntax::Text,
        "",
        Effect::Works,
        "directory of credential providers",
    ),
    own(
        "image-credential-provider-config",
        Syntax::Text,
        "",
        Effect::Works,
        "configuration of credential providers",
    ),
    sets("image-gc-high-threshold", Syntax::Int, "imageGCHighThresholdPercent"),
    sets("image-gc-low-threshold", Syntax::Int, "imageGCLowThresholdPercent"),
    sets("image-service-endpoint", Syntax::Text, "imageServiceEndpoint"),
    sets("kernel-memcg-notification", Syntax::Bool, "kernelMemcgNotification"),
    sets("kube-api-burst", Syntax::Int, "kubeAPIBurst"),
    sets("kube-api-content-type", Syntax::Text, "contentType"),
    sets("kube-api-qps", Syntax::Int, "kubeAPIQPS"),
    sets("kube-reserved", Syntax::Pairs, "kubeReserved"),
    sets("kube-reserved-cgroup", Syntax::Text, "kubeReservedCgroup"),
    own(
        "kubeconfig",
        Syntax::Text,
        "",
        Effect::Works,
        "how to reach the API server; empty means static pods only",
    ),
    sets("kubelet-cgroups", Syntax::Text, "kubeletCgroups"),
    sets("local-storage-capacity-isolation", Syntax::Bool, "localStorageCapacityIsolation"),
    own(
        "lock-file",
        Syntax::Text,
        "",
        Effect::NoEffectYet,
        "lock file that keeps a second agent from starting",
    ),
    own("log-cadvisor-usage", Syntax::Bool, "false", STATS, "log the cost of stats"),
    sets("log-flush-frequency", Syntax::Duration, "logging.flushFrequency"),
    sets("log-json-info-buffer-size", Syntax::Text, "logging.options.json.infoBufferSize"),
    sets("log-json-split-stream", Syntax::Bool, "logging.options.json.splitStream"),
    sets("log-text-info-buffer-size", Syntax::Text, "logging.options.text.infoBufferSize"),
    sets("log-text-split-stream", Syntax::Bool, "logging.options.text.splitStream"),
    sets("logging-format", Syntax::Text, "logging.format"),
    own(
        "machine-id-file",
        Syntax::Text,
        "/etc/machine-id,/var/lib/dbus/machine-id",
        STATS,
        "files to read the machine id from",
    ),
    sets("make-iptables-util-chains", Syntax::Bool, "makeIPTablesUtilChains"),
    sets("manifest-url", Syntax::Text, "staticPodURL"),
    sets("manifest-url-header", Syntax::Headers, "staticPodURLHeader"),
    sets("max-open-files", Syntax::Int, "maxOpenFiles"),
    sets("max-pods", Syntax::Int, "maxPods"),
    own(
        "maximum-dead-containers",
        Syntax::Int,
        "-1",
        Effect::Works,
        "dead containers kept on the node; negative means no limit",
    ),
    own(
        "maximum-dead-containers-per-container",
        Syntax::Int,
        "1",
        Effect::Works,
        "dead instances kept of each container",
    ),
    sets("memory-manager-policy", Syntax::Text, "memoryManagerPolicy"),
    own(
        "minimum-container-ttl-duration",
        Syntax::Duration,
        "0s",
        Effect::Works,
        "how long a dead container is kept at least",
    ),
    sets("minimum-image-ttl-duration", Syntax::Duration, "imageMinimumGCAge"),
    own("node-ip", Syntax::Text, "", Effect::Works, "node address, or an IPv4 and an IPv6 one"),
    own("node-labels", Syntax::Pairs, "", Effect::Works, "labels the node registers with"),
    sets("node-status-max-images", Syntax::Int, "nodeStatusMaxImages"),
    sets("node-status-update-frequency", Syntax::Duration, "nodeStatusUpdateFrequency"),
    sets("oom-score-adj", Syntax::Int, "oomScoreAdj"),
    sets("pod-cidr", Syntax::Text, "podCIDR"),
    sets("pod-manifest-path", Syntax::Text, "staticPodPath"),
    sets("pod-max-pids", Syntax::Int, "podPidsLimit"),
    sets("pods-per-core", Syntax::Int, "podsPerCore"),
    sets("port", Syntax::Int, "port"),
    sets("protect-kernel-defaults", Syntax::Bool, "protectKernelDefaults"),
    sets("provider-id", Syntax::Text, "providerID"),
    sets("qos-reserved", Syntax::Pairs, "qosReserved"),
    sets("read-only-port", Syntax::Int, "readOnlyPort"),
    sets("register-node", Syntax::Bool, "registerNode"),
    sets("register-with-taints", Syntax::Taints, "registerWithTaints"),
    sets("registry-burst", Syntax::Int, "registryBurst"),
    sets("registry-qps", Syntax::Int, "registryPullQPS"),
    sets("reserved-cpus", Syntax::Text, "reservedSystemCPUs"),
    sets("reserved-memory", Syntax::NumaMemory, "reservedMemory"),
    sets("resolv-conf", Syntax::Text, "resolvConf"),
    own("root-dir", Syntax::Text, "/var/lib/kubelet", Effect::Works, "directory of this agent's state"),
    sets("rotate-certificates", Syntax::Bool, "rotateCertificates"),
    sets("rotate-server-certificates", Syntax::Bool, "serverTLSBootstrap"),
    sets("runonce", Syntax::Bool, "runOnce"),
    own("runtime-cgroups", Syntax::Text, "", Effect::Works, "cgroup of the container runtime, for stats"),
    sets("runtime-request-timeout", Syntax::Duration, "runtimeRequestTimeout"),
    sets("seccomp-default", Syntax::Bool, "seccompDefault"),
    sets("serialize-image-pulls", Syntax::Bool, "serializeImagePulls"),
    own(
        "storage-driver-buffer-duration",
        Syntax::Duration,
        "1m0s",
        STATS,
        "how long stats are gathered before they are stored",
    ),
    own("storage-driver-db", Syntax::Text, "cadvisor", STATS, "database of stats"),
    own("storage-driver-host", Syntax::Text, "localhost:8086", STATS, "host of the stats database"),
    own("storage-driver-password", Syntax::Text, "root", STATS, "password of the stats database"),
    own("storage-driver-secure", Syntax::Bool, "false", STATS, "TLS to the stats database"),
    own("storage-driver-table", Syntax::Text, "stats", STATS, "table of stats"),
    own("storage-driver-user", Syntax::Text, "root", STATS, "user of the stats database"),
    sets("streaming-connection-idle-timeout", Syntax::Duration, "streamingConnectionIdleTimeout"),
    sets("sync-frequency", Syntax::Duration, "syncFrequency"),
    sets("system-cgroups", Syntax::Text, "systemCgroups"),
    sets("system-reserved", Syntax::Pairs, "systemReserved"),
    sets("system-reserved-cgroup", Syntax::Text, "systemReservedCgroup"),
    sets("tls-cert-file", Syntax::Text, "tlsCertFile"),
    sets("tls-cipher-suites", Syntax::List, "tlsCipherSuites"),
    sets("tls-min-version", Syntax::Text, "tlsMinVersion"),
    sets("tls-private-key-file", Syntax::Text, "tlsPrivateKeyFile"),
    sets("topology-manager-policy", Syntax::Text, "topologyManagerPolicy"),
    sets("topology-manager-policy-options", Syntax::Pairs, "topologyManagerPolicyOptions"),
    sets("topology-manager-scope", Syntax::Text, "topologyManagerScope"),
    sets("v", Syntax::Int, "logging.verbosity"),
    own("version", Syntax::Bool, "false", Effect::Works, "print the version and leave"),
    sets("vmodule", Syntax::Vmodule, "logging.vmodule"),
    sets("volume-plugin-dir", Syntax::Text, "volumePluginDir"),
    sets("volume-stats-agg-period", Syntax::Duration, "volumeStatsAggPeriod"),
    // This agent's own.
    own(
        "check-config",
        Syntax::Bool,
        "false",
        Effect::Works,
        "check flags and configuration, say what is wrong, and leave",
    ),
    own(
        "local-socket",
        Syntax::Text,
        LOCAL_SOCKET,
        Effect::Works,
        "socket of this agent's commands; a missing directory of it is made for root only",
    ),
    own(
        "local-socket-any-namespace",
        Syntax::Bool,
        "false",
        Effect::Works,
        "answer root of other mount and PID namespaces, too: of containers that have the socket",
    ),
    own(
        "print-config",
        Syntax::Bool,
        "false",
        Effect::Works,
        "print the effective configuration as YAML and leave",
    ),
];

/// Whether a flag's syntax can give a field of this kind its value.
#[must_use]
pub fn fits(syntax: Syntax, kind: Kind) -> bool {
    matches!(
        (syntax, kind),
        (Syntax::Bool, Kind::Bool)
            | (Syntax::Int, Kind::Int32 | Kind::Int64)
            | (Syntax::Duration, Kind::Duration)
            | (Syntax::Text, Kind::Text | Kind::Quantity)
            | (Syntax::List, Kind::TextList)
            | (Syntax::Pairs | Syntax::Thresholds, Kind::TextMap)
            | (Syntax::Gates, Kind::BoolMap)
            | (Syntax::Headers, Kind::ListMap)
            | (Syntax::Taints | Syntax::NumaMemory | Syntax::Vmodule, Kind::Items(_))
    )
}

#[cfg(test)]
mod tests {
    use super::super::exit::EXITS;
    use super::*;

    /// The flags as a Markdown table.
    fn flags_markdown() -> String {
        let mut out = String::from("| Flag | Default | Sets | Effect | Meaning |\n|---|---|---|---|---|\n");
        for flag in FLAGS {
            let sets = if flag.field.is_empty() { String::new() } else { format!("`{}`", flag.field) };
            let effect = flag.effect().text();
            out += &format!(
                "| `--{}` | `{}` | {sets} | {effect} | {} |\n",
                flag.name,
                flag.preset(),
                flag.help()
            );
        }
        out += "\nFlags of older versions are refused, with what became of them:\n\n| Flag | Instead |\n|---|---|\n";
        for (name, instead) in REMOVED {
            out += &format!("| `--{name}` | {instead} |\n");
        }
        out += "\nExit codes:\n\n| Code | Meaning |\n|---|---|\n";
        for (exit, meaning) in EXITS {
            out += &format!("| {} | {meaning} |\n", exit.code());
        }
        out
    }

    /// The configuration fields as a Markdown table.
    fn config_markdown() -> String {
        let mut out =
            String::from("| Field | Type | Default | Flag | Effect | Meaning |\n|---|---|---|---|---|---|\n");
        for field in crate::config::fields::FIELDS {
            let flag = FLAGS.iter().find(|flag| flag.field == field.path);
            let flag = flag.map_or(String::new(), |flag| format!("`--{}`", flag.name));
            out += &format!(
                "| `{}` | {} | `{}` | {flag} | {} | {} |\n",
                field.path,
                field.kind.word(),
                preset_text(field.path, DefaultSet::WithFile),
                field.standing.word(),
                field.help
            );
        }
        out
    }

    #[test]
    fn the_table_is_sound() {
        let names: Vec<&str> = FLAGS.iter().map(|flag| flag.name).collect();
        let mut unique = names.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
        for flag in FLAGS {
            assert!(!flag.help().is_empty(), "{}", flag.name);
            if !flag.field.is_empty() {
                let field = field(flag.field).unwrap_or_else(|| panic!("{} sets no field", flag.name));
                assert!(fits(flag.syntax, field.kind), "{}", flag.name);
            }
        }
        for (name, _) in REMOVED {
            assert!(find(name).is_none(), "{name}");
        }
        assert!(find("max_pods").is_some());
    }

    /// `UPDATE_DOCS=1` rewrites the generated sections instead.
    #[test]
    fn the_compatibility_list_is_generated() {
        let path = std::path::Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap())
            .join("docs/compatibility.md");
        let mut text = std::fs::read_to_string(&path).unwrap();
        let update = std::env::var_os("UPDATE_DOCS").is_some();
        for (section, expected) in [("flags", flags_markdown()), ("config", config_markdown())] {
            let (begin, end) = (format!("<!-- {section}:begin -->\n"), format!("<!-- {section}:end -->"));
            let (before, rest) = text.split_once(&begin).expect("the section's begin marker");
            let (found, after) = rest.split_once(&end).expect("the section's end marker");
            if update {
                text = format!("{before}{begin}{expected}{end}{after}");
            } else {
                assert!(
                    found == expected,
                    "docs/compatibility.md: section {section} is stale; UPDATE_DOCS=1"
                );
            }
        }
        if update {
            std::fs::write(path, text).unwrap();
        }
    }
}
