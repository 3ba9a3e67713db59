//! The table of the agent's flags: every kubelet flag that is valid in 1.36 or 1.37.
//!
//! It drives parsing, `--help` and the compatibility list. A flag that sets a configuration field
//! takes its type, default, meaning and effect from the table of fields.

use std::collections::BTreeMap;

use crate::config::effects::default_text;
use crate::config::fields::{FieldEffect, field};
use crate::config::{DefaultSet, MASK, without_password};
use crate::config::{IMAGES_DIR, LOCAL_OBJECTS};
use crate::server::LOCAL_SOCKET;
use Syntax::{
    Bool, Duration, Gates, Headers, Int, List, NumaMemory, Pairs, Taints, Text, Thresholds, Vmodule,
};

/// How the text of a flag becomes a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Syntax {
    /// true or false; may stand alone.
    Bool,
    Int,
    /// A Go duration.
    Duration,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlagEffect {
    /// The flag works as in the Go kubelet.
    Works,
    /// The flag is accepted without effect, for this reason.
    Ignored(&'static str),
    /// The flag is an error when given, for this reason.
    Refused(&'static str),
}

impl FlagEffect {
    /// The text of the effect in the documents.
    pub(super) fn text(self) -> String {
        match self {
            FlagEffect::Works => "works".to_owned(),
            FlagEffect::Ignored(reason) => format!("ignored: {reason}"),
            FlagEffect::Refused(reason) => format!("refused: {reason}"),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Flag {
    /// The name, without dashes.
    pub name: &'static str,
    /// The syntax of its value.
    pub syntax: Syntax,
    /// The configuration field it sets; empty when it is not about one.
    pub field: &'static str,
    own_default: &'static str,
    own_help: &'static str,
    own_effect: FlagEffect,
}

impl Flag {
    pub(super) fn default_text(&self) -> String {
        if self.field.is_empty() {
            return if self.own_default.is_empty() { "\"\"".to_owned() } else { self.own_default.to_owned() };
        }
        default_text(self.field, DefaultSet::FlagsOnly)
    }

    pub(super) fn help(&self) -> &'static str {
        field(self.field).map_or(self.own_help, |field| field.help)
    }

    pub(super) fn effect(&self) -> FlagEffect {
        match field(self.field).map(|field| field.effect) {
            None => self.own_effect,
            Some(FieldEffect::Works) => FlagEffect::Works,
            Some(FieldEffect::Ignored) => FlagEffect::Ignored("nothing here depends on it"),
            Some(FieldEffect::Refused) => FlagEffect::Refused("setting it is an error"),
        }
    }

    /// The placeholder of its value in `--help`.
    pub(super) fn placeholder(&self) -> &'static str {
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
pub(super) fn find(name: &str) -> Option<&'static Flag> {
    let name = name.replace('_', "-");
    FLAGS.iter().find(|flag| flag.name == name)
}

/// Every flag with its value: the one in `given`, or the default. Secrets are masked.
pub fn effective(given: &BTreeMap<&'static str, String>) -> Vec<(String, String)> {
    let mut flags: Vec<(String, String)> = FLAGS
        .iter()
        .map(|flag| {
            let value = match given.get(flag.name) {
                // Headers usually carry credentials.
                Some(_) if flag.syntax == Syntax::Headers => MASK.to_owned(),
                Some(text) => without_password(text),
                None => flag.default_text(),
            };
            (flag.name.to_owned(), value)
        })
        .collect();
    flags.sort_unstable();
    flags
}

/// Flags of older versions, with their replacements.
pub(super) const REMOVED: &[(&str, &str)] = &[
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
    Flag { name, syntax, field, own_default: "", own_help: "", own_effect: FlagEffect::Works }
}

const fn own(
    name: &'static str,
    syntax: Syntax,
    own_default: &'static str,
    own_effect: FlagEffect,
    own_help: &'static str,
) -> Flag {
    Flag { name, syntax, field: "", own_default, own_help, own_effect }
}

const fn works(name: &'static str, syntax: Syntax, default: &'static str, help: &'static str) -> Flag {
    own(name, syntax, default, FlagEffect::Works, help)
}

/// A flag of cAdvisor.
const fn stats(name: &'static str, syntax: Syntax, default: &'static str, help: &'static str) -> Flag {
    own(name, syntax, default, FlagEffect::Ignored("there is no cAdvisor in this agent"), help)
}

/// Every flag, by name.
pub(super) static FLAGS: &[Flag] = &[
    sets("address", Text, "address"),
    sets("allowed-unsafe-sysctls", List, "allowedUnsafeSysctls"),
    sets("anonymous-auth", Bool, "authentication.anonymous.enabled"),
    stats("application-metrics-count-limit", Int, "100", "application metrics kept per container"),
    sets("authentication-token-webhook", Bool, "authentication.webhook.enabled"),
    sets("authentication-token-webhook-cache-ttl", Duration, "authentication.webhook.cacheTTL"),
    sets("authorization-mode", Text, "authorization.mode"),
    sets("authorization-webhook-cache-authorized-ttl", Duration, "authorization.webhook.cacheAuthorizedTTL"),
    sets(
        "authorization-webhook-cache-unauthorized-ttl",
        Duration,
        "authorization.webhook.cacheUnauthorizedTTL",
    ),
    stats("boot-id-file", Text, "/proc/sys/kernel/random/boot_id", "files to read the boot id from"),
    works("bootstrap-kubeconfig", Text, "", "kubeconfig for requesting the first client certificate"),
    works("cert-dir", Text, "/var/lib/kubelet/pki", "directory of certificates"),
    sets("cgroup-driver", Text, "cgroupDriver"),
    sets("cgroup-root", Text, "cgroupRoot"),
    sets("cgroups-per-qos", Bool, "cgroupsPerQOS"),
    sets("client-ca-file", Text, "authentication.x509.clientCAFile"),
    works("cloud-provider", Text, "", "empty or external"),
    sets("cluster-dns", List, "clusterDNS"),
    sets("cluster-domain", Text, "clusterDomain"),
    works("config", Text, "", "configuration file: a KubeletConfiguration in YAML or JSON"),
    works("config-dir", Text, "", "directory of drop-ins (*.conf), merged over --config in order"),
    stats("container-hints", Text, "/etc/cadvisor/container_hints.json", "file of container hints"),
    sets("container-log-max-files", Int, "containerLogMaxFiles"),
    sets("container-log-max-size", Text, "containerLogMaxSize"),
    sets("container-runtime-endpoint", Text, "containerRuntimeEndpoint"),
    stats("containerd", Text, "/run/containerd/containerd.sock", "containerd's socket"),
    stats("containerd-namespace", Text, "k8s.io", "containerd's namespace"),
    sets("contention-profiling", Bool, "enableContentionProfiling"),
    sets("cpu-cfs-quota", Bool, "cpuCFSQuota"),
    sets("cpu-cfs-quota-period", Duration, "cpuCFSQuotaPeriod"),
    sets("cpu-manager-policy", Text, "cpuManagerPolicy"),
    sets("cpu-manager-policy-options", Pairs, "cpuManagerPolicyOptions"),
    sets("cpu-manager-reconcile-period", Duration, "cpuManagerReconcilePeriod"),
    sets("enable-controller-attach-detach", Bool, "enableControllerAttachDetach"),
    sets("enable-debugging-handlers", Bool, "enableDebuggingHandlers"),
    stats("enable-load-reader", Bool, "false", "read CPU load"),
    sets("enable-server", Bool, "enableServer"),
    sets("enforce-node-allocatable", List, "enforceNodeAllocatable"),
    sets("event-burst", Int, "eventBurst"),
    sets("event-qps", Int, "eventRecordQPS"),
    stats("event-storage-age-limit", Text, "default=0", "how long container events are kept"),
    stats("event-storage-event-limit", Text, "default=0", "how many container events are kept"),
    sets("eviction-hard", Thresholds, "evictionHard"),
    sets("eviction-max-pod-grace-period", Int, "evictionMaxPodGracePeriod"),
    sets("eviction-minimum-reclaim", Pairs, "evictionMinimumReclaim"),
    sets("eviction-pressure-transition-period", Duration, "evictionPressureTransitionPeriod"),
    sets("eviction-soft", Thresholds, "evictionSoft"),
    sets("eviction-soft-grace-period", Pairs, "evictionSoftGracePeriod"),
    works(
        "exit-on-lock-contention",
        Bool,
        "false",
        "exit when another process opens the lock file; needs --lock-file",
    ),
    works(
        "experimental-allocatable-ignore-eviction",
        Bool,
        "false",
        "leave eviction thresholds out of the node's allocatable",
    ),
    own(
        "experimental-mounter-path",
        Text,
        "",
        FlagEffect::Ignored("deprecated upstream; mounts are made by system calls"),
        "mount program",
    ),
    sets("fail-cgroupv1", Bool, "failCgroupV1"),
    sets("fail-swap-on", Bool, "failSwapOn"),
    sets("feature-gates", Gates, "featureGates"),
    sets("file-check-frequency", Duration, "fileCheckFrequency"),
    stats("global-housekeeping-interval", Duration, "1m0s", "how often all containers are listed"),
    sets("hairpin-mode", Text, "hairpinMode"),
    sets("healthz-bind-address", Text, "healthzBindAddress"),
    sets("healthz-port", Int, "healthzPort"),
    works("help", Bool, "false", "print this and exit"),
    works("hostname-override", Text, "", "node name instead of the host's name"),
    stats("housekeeping-interval", Duration, "10s", "how often container stats are read"),
    sets("http-check-frequency", Duration, "httpCheckFrequency"),
    works("image-credential-provider-bin-dir", Text, "", "directory of credential providers"),
    works("image-credential-provider-config", Text, "", "configuration of credential providers"),
    sets("image-gc-high-threshold", Int, "imageGCHighThresholdPercent"),
    sets("image-gc-low-threshold", Int, "imageGCLowThresholdPercent"),
    sets("image-service-endpoint", Text, "imageServiceEndpoint"),
    sets("kernel-memcg-notification", Bool, "kernelMemcgNotification"),
    sets("kube-api-burst", Int, "kubeAPIBurst"),
    sets("kube-api-content-type", Text, "contentType"),
    sets("kube-api-qps", Int, "kubeAPIQPS"),
    sets("kube-reserved", Pairs, "kubeReserved"),
    sets("kube-reserved-cgroup", Text, "kubeReservedCgroup"),
    works("kubeconfig", Text, "", "how to reach the API server; empty means static pods only"),
    sets("kubelet-cgroups", Text, "kubeletCgroups"),
    sets("local-storage-capacity-isolation", Bool, "localStorageCapacityIsolation"),
    works("lock-file", Text, "", "lock file for which a second agent waits; a regular file"),
    stats("log-cadvisor-usage", Bool, "false", "log the cost of stats"),
    sets("log-flush-frequency", Duration, "logging.flushFrequency"),
    sets("log-json-info-buffer-size", Text, "logging.options.json.infoBufferSize"),
    sets("log-json-split-stream", Bool, "logging.options.json.splitStream"),
    sets("log-text-info-buffer-size", Text, "logging.options.text.infoBufferSize"),
    sets("log-text-split-stream", Bool, "logging.options.text.splitStream"),
    sets("logging-format", Text, "logging.format"),
    stats(
        "machine-id-file",
        Text,
        "/etc/machine-id,/var/lib/dbus/machine-id",
        "files to read the machine id from",
    ),
    sets("make-iptables-util-chains", Bool, "makeIPTablesUtilChains"),
    sets("manifest-url", Text, "staticPodURL"),
    sets("manifest-url-header", Headers, "staticPodURLHeader"),
    sets("max-open-files", Int, "maxOpenFiles"),
    sets("max-pods", Int, "maxPods"),
    works("maximum-dead-containers", Int, "-1", "dead containers kept on the node; negative means no limit"),
    works("maximum-dead-containers-per-container", Int, "1", "dead instances kept of each container"),
    sets("memory-manager-policy", Text, "memoryManagerPolicy"),
    works("minimum-container-ttl-duration", Duration, "0s", "minimum time that a dead container is kept"),
    sets("minimum-image-ttl-duration", Duration, "imageMinimumGCAge"),
    works("node-ip", Text, "", "node address, or an IPv4 and an IPv6 one"),
    works("node-labels", Pairs, "", "labels the node registers with"),
    sets("node-status-max-images", Int, "nodeStatusMaxImages"),
    sets("node-status-update-frequency", Duration, "nodeStatusUpdateFrequency"),
    sets("oom-score-adj", Int, "oomScoreAdj"),
    sets("pod-cidr", Text, "podCIDR"),
    sets("pod-manifest-path", Text, "staticPodPath"),
    sets("pod-max-pids", Int, "podPidsLimit"),
    sets("pods-per-core", Int, "podsPerCore"),
    sets("port", Int, "port"),
    sets("protect-kernel-defaults", Bool, "protectKernelDefaults"),
    sets("provider-id", Text, "providerID"),
    sets("qos-reserved", Pairs, "qosReserved"),
    sets("read-only-port", Int, "readOnlyPort"),
    sets("register-node", Bool, "registerNode"),
    sets("register-with-taints", Taints, "registerWithTaints"),
    sets("registry-burst", Int, "registryBurst"),
    sets("registry-qps", Int, "registryPullQPS"),
    sets("reserved-cpus", Text, "reservedSystemCPUs"),
    sets("reserved-memory", NumaMemory, "reservedMemory"),
    sets("resolv-conf", Text, "resolvConf"),
    works("root-dir", Text, "/var/lib/kubelet", "directory of this agent's state"),
    sets("rotate-certificates", Bool, "rotateCertificates"),
    sets("rotate-server-certificates", Bool, "serverTLSBootstrap"),
    sets("runonce", Bool, "runOnce"),
    works("runtime-cgroups", Text, "", "cgroup of the container runtime, for stats"),
    sets("runtime-request-timeout", Duration, "runtimeRequestTimeout"),
    sets("seccomp-default", Bool, "seccompDefault"),
    sets("serialize-image-pulls", Bool, "serializeImagePulls"),
    stats(
        "storage-driver-buffer-duration",
        Duration,
        "1m0s",
        "how long stats are gathered before they are stored",
    ),
    stats("storage-driver-db", Text, "cadvisor", "database of stats"),
    stats("storage-driver-host", Text, "localhost:8086", "host of the stats database"),
    stats("storage-driver-password", Text, "root", "password of the stats database"),
    stats("storage-driver-secure", Bool, "false", "TLS to the stats database"),
    stats("storage-driver-table", Text, "stats", "table of stats"),
    stats("storage-driver-user", Text, "root", "user of the stats database"),
    sets("streaming-connection-idle-timeout", Duration, "streamingConnectionIdleTimeout"),
    sets("sync-frequency", Duration, "syncFrequency"),
    sets("system-cgroups", Text, "systemCgroups"),
    sets("system-reserved", Pairs, "systemReserved"),
    sets("system-reserved-cgroup", Text, "systemReservedCgroup"),
    sets("tls-cert-file", Text, "tlsCertFile"),
    sets("tls-cipher-suites", List, "tlsCipherSuites"),
    sets("tls-min-version", Text, "tlsMinVersion"),
    sets("tls-private-key-file", Text, "tlsPrivateKeyFile"),
    sets("topology-manager-policy", Text, "topologyManagerPolicy"),
    sets("topology-manager-policy-options", Pairs, "topologyManagerPolicyOptions"),
    sets("topology-manager-scope", Text, "topologyManagerScope"),
    sets("v", Int, "logging.verbosity"),
    works("version", Bool, "false", "print the version and exit"),
    sets("vmodule", Vmodule, "logging.vmodule"),
    sets("volume-plugin-dir", Text, "volumePluginDir"),
    sets("volume-stats-agg-period", Duration, "volumeStatsAggPeriod"),
    // The Go kubelet does not have these flags.
    works("check-config", Bool, "false", "check flags and configuration, print problems and exit"),
    works(
        "container-logs-quota",
        Text,
        "",
        "size that the logs of all containers together may have, such as 2Gi; empty means no limit",
    ),
    works(
        "image-mirror-file",
        Text,
        "/run/coracle/hosts.toml",
        "file that names the registry of image archives to the container runtime; by default beside --local-socket",
    ),
    works(
        "image-registry",
        Text,
        "127.0.0.1:0",
        "loopback address of the registry of image archives; port 0 is a free one; off: no registry",
    ),
    works(
        "images-dir",
        List,
        IMAGES_DIR,
        "directories of image archives; a relative path is below --root-dir",
    ),
    works(
        "local-objects",
        Text,
        LOCAL_OBJECTS,
        "directory of ConfigMaps and Secrets for static pods; a relative path is below --root-dir",
    ),
    works(
        "local-socket",
        Text,
        LOCAL_SOCKET,
        "socket of the local commands; a missing directory is created for root only",
    ),
    works(
        "local-socket-any-namespace",
        Bool,
        "false",
        "also accept root of other mount and PID namespaces, such as containers with the socket",
    ),
    works(
        "offline",
        Bool,
        "false",
        "store the last known objects of the API server, and start pods without it; needs --kubeconfig",
    ),
    works(
        "offline-accept-after",
        Duration,
        "1h0m0s",
        "how long an API server that knows neither this node nor its pods stops nothing; 0 means until coracle offline accept, which that of another cluster always needs",
    ),
    works(
        "offline-key",
        Text,
        "",
        "key file that seals stored Secrets and tokens, made if it is missing; empty: offline/key below --root-dir",
    ),
    works("offline-secrets", Text, "sealed", "sealed: store Secrets and tokens encrypted; none: do not"),
    works(
        "offline-stop-after",
        Duration,
        "0s",
        "with --offline, stop the pods of the API server when the lease of the node was not renewed for this time; 0 means never",
    ),
    works(
        "offline-wait",
        Duration,
        "30s",
        "how long the agent waits for the API server before stored pods are used, from its start or the machine's first address",
    ),
    own(
        "print-config",
        Syntax::Bool,
        "false",
        FlagEffect::Works,
        "print the effective configuration as YAML and exit",
    ),
    works(
        "remove-damaged-images",
        Bool,
        "false",
        "remove an image and pull it again if its damaged files cannot be replaced and no other image or pod needs it",
    ),
];

#[cfg(test)]
mod tests {
    use super::super::exit::EXITS;
    use super::*;
    use crate::config::fields::FieldType;

    /// Whether a flag's syntax can give a field of this kind its value.
    fn fits(syntax: Syntax, kind: FieldType) -> bool {
        matches!(
            (syntax, kind),
            (Syntax::Bool, FieldType::Bool)
                | (Syntax::Int, FieldType::Int32 | FieldType::Int64)
                | (Syntax::Duration, FieldType::Duration)
                | (Syntax::Text, FieldType::Text | FieldType::Quantity)
                | (Syntax::List, FieldType::TextList)
                | (Syntax::Pairs | Syntax::Thresholds, FieldType::TextMap)
                | (Syntax::Gates, FieldType::BoolMap)
                | (Syntax::Headers, FieldType::ListMap)
                | (Syntax::Taints | Syntax::NumaMemory | Syntax::Vmodule, FieldType::Items(_))
        )
    }

    /// The flags as a Markdown table.
    fn flags_markdown() -> String {
        let mut out = String::from("| Flag | Default | Sets | Effect | Meaning |\n|---|---|---|---|---|\n");
        for flag in FLAGS {
            let sets = if flag.field.is_empty() { String::new() } else { format!("`{}`", flag.field) };
            let effect = flag.effect().text();
            out += &format!(
                "| `--{}` | `{}` | {sets} | {effect} | {} |\n",
                flag.name,
                flag.default_text(),
                flag.help()
            );
        }
        out += "\nFlags of older versions are refused, with their replacements:\n\n| Flag | Instead |\n|---|---|\n";
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
                field.kind.type_name(),
                default_text(field.path, DefaultSet::WithFile),
                field.effect.text(),
                field.help
            );
        }
        out
    }

    #[test]
    fn flag_names_are_unique_and_types_fit_their_fields() {
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
    fn compatibility_list_is_up_to_date() {
        let path = std::path::Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap())
            .join("docs/compatibility.md");
        let mut text = std::fs::read_to_string(&path).unwrap();
        let update = std::env::var_os("UPDATE_DOCS").is_some();
        for (section, expected) in [
            ("flags", flags_markdown()),
            ("config", config_markdown()),
            ("gates", crate::config::gates::markdown()),
        ] {
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
