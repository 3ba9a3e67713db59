//! The rules for a whole configuration (Go: ValidateKubeletConfiguration and the checks of its
//! subsystems at their start). Every violated rule is reported with its field.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::collector::endpoint_problem;
use super::duration::GoDuration;
use super::gates::Gates;
use super::kubelet::KubeletConfiguration;
use super::load::clean_path;
use super::sysctls;
use crate::model::names::{is_label_value, is_qualified_name};
use crate::model::quantity::Amount;
use crate::model::version::{PREVIOUS_RELEASE, RELEASE};
use crate::util::cpu_list;
use crate::util::encoding::from_digits;

/// A violated rule: the field's path and the message.
pub type Violation = (String, String);

struct Rules<'c> {
    config: &'c KubeletConfiguration,
    gates: &'c Gates,
    violations: Vec<Violation>,
}

/// Validates a configuration with its defaults.
#[must_use]
pub fn validate(config: &KubeletConfiguration, gates: &Gates) -> Vec<Violation> {
    let mut rules = Rules { config, gates, violations: Vec::new() };
    rules.numbers();
    rules.times();
    rules.choices();
    rules.addresses();
    rules.images();
    rules.eviction();
    rules.reservations();
    rules.enforcement();
    rules.shutdown();
    rules.logs();
    rules.logging();
    rules.tracing();
    rules.taints();
    rules.sysctls();
    rules.options_and_ciphers();
    rules.violations
}

impl Rules<'_> {
    fn fail(&mut self, field: &str, message: impl Into<String>) {
        self.violations.push((field.to_owned(), message.into()));
    }

    fn require(&mut self, holds: bool, field: &str, message: impl FnOnce() -> String) {
        if !holds {
            self.fail(field, message());
        }
    }

    fn within(&mut self, field: &str, value: i64, low: i64, high: i64) {
        self.require((low..=high).contains(&value), field, || {
            format!("{value} must be between {low} and {high}, inclusive")
        });
    }

    fn not_negative(&mut self, field: &str, value: i64) {
        self.require(value >= 0, field, || format!("{value} must not be a negative number"));
    }

    fn one_of(&mut self, field: &str, value: &str, choices: &[&str]) {
        self.require(choices.contains(&value), field, || {
            let choices: Vec<_> = choices.iter().map(|choice| format!("{choice:?}")).collect();
            format!("{value:?} must be one of {}", choices.join(", "))
        });
    }

    fn numbers(&mut self) {
        let c = self.config;
        self.require(c.node_lease_duration_seconds > 0, "nodeLeaseDurationSeconds", || {
            "must be greater than 0".to_owned()
        });
        for (field, value) in [
            ("eventBurst", c.event_burst),
            ("eventRecordQPS", c.event_record_qps),
            ("kubeAPIBurst", c.kube_api_burst),
            ("kubeAPIQPS", c.kube_api_qps),
            ("maxPods", c.max_pods),
            ("podsPerCore", c.pods_per_core),
            ("registryBurst", c.registry_burst),
            ("registryPullQPS", c.registry_pull_qps),
        ] {
            self.not_negative(field, i64::from(value));
        }
        self.not_negative("maxOpenFiles", c.max_open_files);
        for (field, value, low, high) in [
            ("healthzPort", c.healthz_port, 0, 65535),
            ("port", c.port, 1, 65535),
            ("readOnlyPort", c.read_only_port, 0, 65535),
            ("imageGCHighThresholdPercent", c.image_gc_high_threshold_percent, 0, 100),
            ("imageGCLowThresholdPercent", c.image_gc_low_threshold_percent, 0, 100),
            ("iptablesDropBit", c.iptables_drop_bit, 0, 31),
            ("iptablesMasqueradeBit", c.iptables_masquerade_bit, 0, 31),
            ("oomScoreAdj", c.oom_score_adj, -1000, 1000),
        ] {
            self.within(field, i64::from(value), low, high);
        }
        self.require(c.node_status_max_images >= -1, "nodeStatusMaxImages", || {
            format!("{} must be -1 or greater", c.node_status_max_images)
        });
        if let Some(factor) = c.memory_throttling_factor {
            // The default of releases before 1.37.
            let is_old_default = factor == 0.9;
            self.require(self.gates.enabled("MemoryQoS") || is_old_default, "memoryThrottlingFactor", || {
                "must not be set without the feature gate MemoryQoS".to_owned()
            });
            self.require(factor > 0.0 && factor <= 1.0, "memoryThrottlingFactor", || {
                format!("{factor} must be greater than 0 and less than or equal to 1.0")
            });
        }
        if let Some(ids) = c.user_namespaces.ids_per_pod {
            self.require(
                ids > 0 && ids % 65536 == 0 && ids <= i64::from(u32::MAX),
                "userNamespaces.idsPerPod",
                || format!("{ids} must be a multiple of 65536 that fits 32 bits"),
            );
        }
    }

    fn times(&mut self) {
        let c = self.config;
        // A period of zero would be a busy loop; in the Go kubelet only flags can set it.
        for (field, value) in [
            ("syncFrequency", c.sync_frequency),
            ("fileCheckFrequency", c.file_check_frequency),
            ("httpCheckFrequency", c.http_check_frequency),
            ("runtimeRequestTimeout", c.runtime_request_timeout),
            ("nodeStatusUpdateFrequency", c.node_status_update_frequency),
            ("nodeStatusReportFrequency", c.node_status_report_frequency),
            ("cpuManagerReconcilePeriod", c.cpu_manager_reconcile_period),
        ] {
            self.require(value > GoDuration::ZERO, field, || format!("{value} must be greater than zero"));
        }
        for (field, value) in [
            ("authentication.webhook.cacheTTL", c.authentication.webhook.cache_ttl),
            ("authorization.webhook.cacheAuthorizedTTL", c.authorization.webhook.cache_authorized_ttl),
            ("authorization.webhook.cacheUnauthorizedTTL", c.authorization.webhook.cache_unauthorized_ttl),
            ("evictionPressureTransitionPeriod", c.eviction_pressure_transition_period),
            ("imageMinimumGCAge", c.image_minimum_gc_age),
            ("imageMaximumGCAge", c.image_maximum_gc_age),
        ] {
            self.require(!value.is_negative(), field, || format!("{value} must not be negative"));
        }
        let period = c.cpu_cfs_quota_period;
        let (low, high) = (GoDuration::from_millis(1), GoDuration::from_secs(1));
        self.require(period >= low && period <= high, "cpuCFSQuotaPeriod", || {
            format!("{period} must be between 1ms and 1s, inclusive")
        });
        let longest = c.crash_loop_back_off.max_container_restart_period;
        if self.gates.enabled("KubeletCrashLoopBackOffMax") {
            let fits = longest >= GoDuration::from_secs(1) && longest <= GoDuration::from_secs(300);
            self.require(fits, "crashLoopBackOff.maxContainerRestartPeriod", || {
                format!("{longest} must be between 1s and 300s")
            });
        } else if longest != GoDuration::from_secs(300) {
            self.fail(
                "crashLoopBackOff.maxContainerRestartPeriod",
                "must not be set while the feature gate KubeletCrashLoopBackOffMax is off",
            );
        }
    }

    fn choices(&mut self) {
        let c = self.config;
        self.one_of("cgroupDriver", &c.cgroup_driver, &["cgroupfs", "systemd"]);
        self.one_of("cpuManagerPolicy", &c.cpu_manager_policy, &["none", "static"]);
        self.one_of("memoryManagerPolicy", &c.memory_manager_policy, &["None", "Static"]);
        let policies = ["none", "best-effort", "restricted", "single-numa-node"];
        self.one_of("topologyManagerPolicy", &c.topology_manager_policy, &policies);
        self.one_of("topologyManagerScope", &c.topology_manager_scope, &["container", "pod"]);
        self.one_of("hairpinMode", &c.hairpin_mode, &["promiscuous-bridge", "hairpin-veth", "none"]);
        self.one_of("authorization.mode", &c.authorization.mode, &["AlwaysAllow", "Webhook"]);
        self.one_of("memorySwap.swapBehavior", &c.memory_swap.swap_behavior, &["", "NoSwap", "LimitedSwap"]);
        self.one_of(
            "configMapAndSecretChangeDetectionStrategy",
            &c.config_map_and_secret_change_detection_strategy,
            &["Get", "Cache", "Watch"],
        );
        self.one_of("memoryReservationPolicy", &c.memory_reservation_policy, &["None", "TieredReservation"]);
        if c.memory_reservation_policy == "TieredReservation" && !self.gates.enabled("MemoryQoS") {
            self.fail("memoryReservationPolicy", "TieredReservation requires the feature gate MemoryQoS");
        }
        let versions = ["", "VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"];
        self.one_of("tlsMinVersion", &c.tls_min_version, &versions);
        self.require(!c.run_once, "runOnce", || {
            "Runonce mode has been deprecated and should not be set".to_owned()
        });
        if c.server_tls_bootstrap && !self.gates.enabled("RotateKubeletServerCertificate") {
            self.fail("serverTLSBootstrap", "requires the feature gate RotateKubeletServerCertificate");
        }
        if c.tls_cert_file.is_empty() != c.tls_private_key_file.is_empty() {
            self.fail("tlsCertFile", "must be set together with tlsPrivateKeyFile");
        }
    }

    fn addresses(&mut self) {
        let c = self.config;
        let mut ips = vec![
            ("address".to_owned(), c.address.as_str()),
            ("healthzBindAddress".to_owned(), c.healthz_bind_address.as_str()),
        ];
        let named = |(index, ip): (usize, &'_ String)| (format!("clusterDNS[{index}]"), ip.clone());
        let servers: Vec<_> = c.cluster_dns.iter().enumerate().map(named).collect();
        ips.extend(servers.iter().map(|(field, ip)| (field.clone(), ip.as_str())));
        for (field, ip) in ips {
            if ip.parse::<IpAddr>().is_err() {
                self.fail(&field, format!("{ip:?} is not an IP address"));
            }
        }
        let url = &c.static_pod_url;
        if !url.is_empty() && !url.starts_with("http://") && !url.starts_with("https://") {
            self.fail("staticPodURL", format!("{url:?} must start with http:// or https://"));
        }
        for name in c.static_pod_url_header.keys() {
            let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
            if name.is_empty() || !name.bytes().all(token) {
                self.fail("staticPodURLHeader", format!("{name:?} is not a header name"));
            }
        }
        for cidr in c.pod_cidr.split(',').filter(|cidr| !cidr.is_empty()) {
            let fits = cidr.split_once('/').is_some_and(|(ip, bits)| {
                let most = match ip.parse::<IpAddr>() {
                    Ok(IpAddr::V4(_)) => 32,
                    Ok(IpAddr::V6(_)) => 128,
                    Err(_) => return false,
                };
                from_digits::<u8>(bits).is_some_and(|bits| bits <= most)
            });
            self.require(fits, "podCIDR", || {
                format!("{cidr:?} is not an address range such as 10.88.0.0/16")
            });
        }
        if c.container_runtime_endpoint.is_empty() {
            self.fail("containerRuntimeEndpoint", "was not specified or empty");
        }
        for (field, endpoint) in [
            ("containerRuntimeEndpoint", &c.container_runtime_endpoint),
            ("imageServiceEndpoint", &c.image_service_endpoint),
        ] {
            let socket = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
            if !endpoint.is_empty() && !socket.starts_with('/') {
                self.fail(
                    field,
                    format!(
                        "{endpoint:?} must be a Unix socket such as unix:///run/containerd/containerd.sock"
                    ),
                );
            }
        }
        if let Some(version) = Some(&c.show_hidden_metrics_for_version).filter(|version| !version.is_empty())
        {
            // DIFFERS: upstream accepts only the previous one, so that an upgrade ends the kubelet of a node
            // whose file names the one before.
            let minor = |release: &str| release.strip_prefix("1.").and_then(from_digits::<u16>);
            self.require(
                (Some(OLDEST_HIDDEN)..minor(RELEASE)).contains(&minor(version)),
                "showHiddenMetricsForVersion",
                || format!("{version:?} must be the previous minor version, {PREVIOUS_RELEASE}"),
            );
        }
    }

    fn images(&mut self) {
        let c = self.config;
        self.require(
            c.image_gc_low_threshold_percent < c.image_gc_high_threshold_percent,
            "imageGCLowThresholdPercent",
            || {
                let (low, high) = (c.image_gc_low_threshold_percent, c.image_gc_high_threshold_percent);
                format!("{low} must be less than imageGCHighThresholdPercent {high}")
            },
        );
        if c.image_maximum_gc_age > GoDuration::ZERO && c.image_maximum_gc_age <= c.image_minimum_gc_age {
            let (most, least) = (c.image_maximum_gc_age, c.image_minimum_gc_age);
            self.fail("imageMaximumGCAge", format!("{most} must be greater than imageMinimumGCAge {least}"));
        }
        if let Some(pulls) = c.max_parallel_image_pulls {
            self.require(pulls >= 1, "maxParallelImagePulls", || {
                format!("{pulls} must be a positive number")
            });
            if c.serialize_image_pulls && pulls > 1 {
                self.fail(
                    "maxParallelImagePulls",
                    "cannot be larger than 1 unless serializeImagePulls is set to false",
                );
            }
        }
        let policies =
            ["NeverVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages", "AlwaysVerify"];
        let policy = c.image_pull_credentials_verification_policy.as_str();
        if self.gates.enabled("KubeletEnsureSecretPulledImages") {
            self.one_of("imagePullCredentialsVerificationPolicy", policy, &policies);
            if !c.preloaded_images_verification_allowlist.is_empty()
                && policy != "NeverVerifyAllowlistedImages"
            {
                self.fail(
                    "preloadedImagesVerificationAllowlist",
                    "needs imagePullCredentialsVerificationPolicy NeverVerifyAllowlistedImages",
                );
            }
        } else if policy != "NeverVerifyPreloadedImages"
            || !c.preloaded_images_verification_allowlist.is_empty()
        {
            self.fail(
                "imagePullCredentialsVerificationPolicy",
                "must not be set while the feature gate KubeletEnsureSecretPulledImages is off",
            );
        }
    }

    fn eviction(&mut self) {
        let c = self.config;
        for (field, thresholds) in [
            ("evictionHard", &c.eviction_hard),
            ("evictionSoft", &c.eviction_soft),
            ("evictionMinimumReclaim", &c.eviction_minimum_reclaim),
        ] {
            for (signal, amount) in thresholds {
                let place = format!("{field}[{signal}]");
                if !SIGNALS.contains(&signal.as_str()) {
                    self.fail(&place, format!("unknown eviction signal; there are {}", SIGNALS.join(", ")));
                } else if let Err(message) = threshold(amount) {
                    self.fail(&place, message);
                }
            }
        }
        for signal in
            c.eviction_soft.keys().filter(|signal| !c.eviction_soft_grace_period.contains_key(*signal))
        {
            self.fail(
                &format!("evictionSoft[{signal}]"),
                "grace period must be specified for the soft eviction threshold",
            );
        }
        for (signal, grace) in &c.eviction_soft_grace_period {
            let place = format!("evictionSoftGracePeriod[{signal}]");
            match GoDuration::parse(grace) {
                Err(error) => self.fail(&place, error.to_string()),
                Ok(grace) if grace.is_negative() => {
                    self.fail(&place, format!("{grace} must not be negative"))
                }
                Ok(_) if !SIGNALS.contains(&signal.as_str()) => self.fail(&place, "unknown eviction signal"),
                Ok(_) => {}
            }
        }
    }

    fn reservations(&mut self) {
        let c = self.config;
        for (field, reserved) in [("systemReserved", &c.system_reserved), ("kubeReserved", &c.kube_reserved)]
        {
            for (resource, amount) in reserved {
                let place = format!("{field}[{resource}]");
                if !["cpu", "memory", "ephemeral-storage", "pid"].contains(&resource.as_str()) {
                    self.fail(&place, "cannot be reserved; there are cpu, memory, ephemeral-storage, pid");
                    continue;
                }
                match Amount::parse(amount) {
                    Ok(amount) if amount.is_negative() => self.fail(&place, "must not be negative"),
                    Ok(_) => {}
                    Err(error) => self.fail(&place, error.to_string()),
                }
            }
        }
        for (resource, share) in &c.qos_reserved {
            let percent = share.strip_suffix('%').and_then(|share| share.parse::<u32>().ok());
            if resource != "memory" || percent.is_none_or(|percent| percent > 100) {
                self.fail(&format!("qosReserved[{resource}]"), "must be memory with a share such as 50%");
            }
        }
        if !c.qos_reserved.is_empty() && !self.gates.enabled("QOSReserved") {
            self.fail("qosReserved", "requires the feature gate QOSReserved");
        }
        if !c.reserved_system_cpus.is_empty() {
            if !c.system_reserved_cgroup.is_empty() || !c.kube_reserved_cgroup.is_empty() {
                self.fail(
                    "reservedSystemCPUs",
                    "cannot be used with systemReservedCgroup or kubeReservedCgroup",
                );
            }
            if !is_cpu_list(&c.reserved_system_cpus) {
                let text = &c.reserved_system_cpus;
                self.fail("reservedSystemCPUs", format!("{text:?} is not a CPU list such as 0-1,4"));
            }
        }
        let mut seen = BTreeSet::new();
        for (index, reserved) in c.reserved_memory.iter().enumerate() {
            let place = format!("reservedMemory[{index}]");
            self.require(reserved.numa_node >= 0, &place, || "numaNode must not be negative".to_owned());
            self.require(!reserved.limits.is_empty(), &place, || "limits must not be empty".to_owned());
            for (kind, amount) in &reserved.limits {
                let place = format!("{place}.limits[{kind}]");
                if kind != "memory" && !kind.starts_with("hugepages-") {
                    self.fail(&place, "only memory and hugepages-<size> can be reserved");
                }
                if crate::model::quantity::amount(amount).units() <= 0 {
                    self.fail(&place, "must be greater than zero");
                }
                if !seen.insert((reserved.numa_node, kind)) {
                    self.fail(&place, format!("is reserved twice on NUMA node {}", reserved.numa_node));
                }
            }
        }
        if !c.system_cgroups.is_empty() && c.cgroup_root.is_empty() {
            self.fail("systemCgroups", "was specified and cgroupRoot was not specified");
        }
    }

    fn enforcement(&mut self) {
        const FIELD: &str = "enforceNodeAllocatable";
        let c = self.config;
        let chosen: BTreeSet<&str> = c.enforce_node_allocatable.iter().map(String::as_str).collect();
        for (all, some) in [
            ("system-reserved", "system-reserved-compressible"),
            ("kube-reserved", "kube-reserved-compressible"),
        ] {
            if chosen.contains(all) && chosen.contains(some) {
                self.fail(FIELD, format!("{all:?} and {some:?} cannot be specified together"));
            }
        }
        if chosen.len() < c.enforce_node_allocatable.len() {
            self.fail(FIELD, "names an enforcement twice");
        }
        for enforcement in chosen {
            let cgroup = match enforcement {
                "none" => {
                    self.require(c.enforce_node_allocatable.len() == 1, FIELD, || {
                        "may not contain additional enforcements when \"none\" is specified".to_owned()
                    });
                    continue;
                }
                "pods" => None,
                "system-reserved" | "system-reserved-compressible" => {
                    Some(("systemReservedCgroup", &c.system_reserved_cgroup))
                }
                "kube-reserved" | "kube-reserved-compressible" => {
                    Some(("kubeReservedCgroup", &c.kube_reserved_cgroup))
                }
                _ => {
                    self.fail(
                        FIELD,
                        format!(
                            "{enforcement:?} is none of pods, system-reserved, system-reserved-compressible, \
                             kube-reserved, kube-reserved-compressible, none"
                        ),
                    );
                    continue;
                }
            };
            if let Some((field, value)) = cgroup
                && value.is_empty()
            {
                self.fail(
                    field,
                    format!("must be specified when enforceNodeAllocatable contains {enforcement:?}"),
                );
            }
            self.require(c.cgroups_per_qos, "cgroupsPerQOS", || {
                format!("must be true when enforceNodeAllocatable contains {enforcement:?}")
            });
        }
    }

    fn shutdown(&mut self) {
        let c = self.config;
        let (all, critical) = (c.shutdown_grace_period, c.shutdown_grace_period_critical_pods);
        if self.gates.enabled("GracefulNodeShutdown") {
            if critical > all {
                let message = format!("{critical} must be <= shutdownGracePeriod {all}");
                self.fail("shutdownGracePeriodCriticalPods", message);
            }
            for (field, period) in
                [("shutdownGracePeriod", all), ("shutdownGracePeriodCriticalPods", critical)]
            {
                self.require(period.is_zero() || period >= GoDuration::from_secs(1), field, || {
                    format!("{period} must be either zero or otherwise >= 1 sec")
                });
            }
        } else if all > GoDuration::ZERO || critical > GoDuration::ZERO {
            self.fail("shutdownGracePeriod", "requires the feature gate GracefulNodeShutdown");
        }
        if c.shutdown_grace_period_by_pod_priority.is_empty() {
            return;
        }
        const FIELD: &str = "shutdownGracePeriodByPodPriority";
        if !self.gates.enabled("GracefulNodeShutdownBasedOnPodPriority") {
            self.fail(FIELD, "requires the feature gate GracefulNodeShutdownBasedOnPodPriority");
        } else if all > GoDuration::ZERO || critical > GoDuration::ZERO {
            self.fail(FIELD, "cannot be specified together with shutdownGracePeriod");
        }
        for (index, entry) in c.shutdown_grace_period_by_pod_priority.iter().enumerate() {
            self.not_negative(&format!("{FIELD}[{index}]"), entry.shutdown_grace_period_seconds);
        }
    }

    fn logs(&mut self) {
        let c = self.config;
        self.require(c.container_log_max_workers >= 1, "containerLogMaxWorkers", || {
            "must be greater than or equal to 1".to_owned()
        });
        let interval = c.container_log_monitor_interval;
        self.require(interval >= GoDuration::from_secs(3), "containerLogMonitorInterval", || {
            format!("{interval} must be greater than or equal to 3s")
        });
        self.require(c.container_log_max_files > 1, "containerLogMaxFiles", || {
            format!("{} must be greater than 1", c.container_log_max_files)
        });
        match Amount::parse(&c.container_log_max_size) {
            Ok(size) if size.units() > 0 => {}
            Ok(_) => self.fail("containerLogMaxSize", "must be greater than zero"),
            Err(error) => self.fail("containerLogMaxSize", error.to_string()),
        }
        let directory = c.pod_logs_dir.as_str();
        if !directory.starts_with('/') {
            self.fail("podLogsDir", format!("pod logs path {directory:?} must be absolute path"));
        } else if clean_path(directory) != directory {
            self.fail("podLogsDir", format!("pod logs path {directory:?} must be normalized"));
        }
        if !directory.is_ascii() {
            self.fail(
                "podLogsDir",
                format!("pod logs path {directory:?} must contain ASCII characters only"),
            );
        }
        if c.enable_system_log_query && !c.enable_system_log_handler {
            self.fail("enableSystemLogQuery", "enableSystemLogHandler is required for enableSystemLogQuery");
        }
    }

    /// Go: component-base/tracing/api/v1, `ValidateTracingConfiguration`.
    fn tracing(&mut self) {
        let Some(tracing) = &self.config.tracing else { return };
        if let Some(rate) = tracing.sampling_rate_per_million {
            self.within("tracing.samplingRatePerMillion", i64::from(rate), 0, 1_000_000);
        }
        if let Some(problem) = tracing.endpoint.as_deref().and_then(endpoint_problem) {
            self.fail("tracing.endpoint", problem);
        }
    }

    /// Go: component-base/logs/api/v1, `Validate`.
    fn logging(&mut self) {
        let (logging, gates) = (&self.config.logging, self.gates);
        self.one_of("logging.format", &logging.format, &["text", "json"]);
        let is_json = logging.format == "json";
        if is_json && !gates.enabled("LoggingBetaOptions") {
            self.fail("logging.format", "json requires the feature gate LoggingBetaOptions");
        }
        self.require(logging.flush_frequency > GoDuration::ZERO, "logging.flushFrequency", || {
            format!("{} must be greater than zero", logging.flush_frequency)
        });
        let is_verbosity = |number: i64| (0..=i64::from(i32::MAX)).contains(&number);
        self.require(is_verbosity(logging.verbosity), "logging.verbosity", || {
            format!("{} must be between 0 and {}", logging.verbosity, i32::MAX)
        });
        if is_json && !logging.vmodule.is_empty() {
            self.fail("logging.vmodule", "is only supported for the text log format");
        }
        for (index, rule) in logging.vmodule.iter().enumerate() {
            let place = format!("logging.vmodule[{index}]");
            if rule.file_pattern.is_empty() || rule.file_pattern.contains(['=', ',']) {
                let pattern = &rule.file_pattern;
                self.fail(
                    &place,
                    format!("filePattern {pattern:?} must not be empty or contain an equal sign or a comma"),
                );
            }
            self.require(is_verbosity(rule.verbosity), &place, || {
                format!("verbosity {} must be between 0 and {}", rule.verbosity, i32::MAX)
            });
        }
        for (format, options) in [("text", &logging.options.text), ("json", &logging.options.json)] {
            let has_buffer = !crate::model::quantity::amount(&options.info_buffer_size).is_zero();
            for (name, is_set) in [("splitStream", options.split_stream), ("infoBufferSize", has_buffer)] {
                if is_set && !gates.enabled("LoggingAlphaOptions") {
                    self.fail(
                        &format!("logging.options.{format}.{name}"),
                        "requires the feature gate LoggingAlphaOptions",
                    );
                }
            }
        }
    }

    fn taints(&mut self) {
        for (index, taint) in self.config.register_with_taints.iter().enumerate() {
            let place = format!("registerWithTaints[{index}]");
            if !is_qualified_name(&taint.key) {
                self.fail(&format!("{place}.key"), format!("{:?} is not a qualified name", taint.key));
            }
            if !is_label_value(&taint.value) {
                self.fail(&format!("{place}.value"), format!("{:?} is not a label value", taint.value));
            }
            let effects = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
            self.one_of(&format!("{place}.effect"), &taint.effect, &effects);
            self.require(taint.time_added.is_none(), &format!("{place}.timeAdded"), || {
                "must not be set".to_owned()
            });
        }
    }

    fn sysctls(&mut self) {
        for (index, pattern) in self.config.allowed_unsafe_sysctls.iter().enumerate() {
            let place = format!("allowedUnsafeSysctls[{index}]");
            if !sysctls::is_pattern(pattern) {
                self.fail(&place, format!("{pattern:?} is neither a sysctl name nor a prefix ending in *"));
            } else if sysctls::namespace(pattern).is_none() {
                self.fail(&place, format!("the sysctls {pattern:?} are not known to be namespaced"));
            }
        }
        let defaults = &self.config.default_pod_sysctls;
        if !defaults.is_empty() && !self.gates.enabled("DefaultPodSysctls") {
            self.fail("defaultPodSysctls", "requires the feature gate DefaultPodSysctls");
            return;
        }
        let mut seen = BTreeSet::new();
        for name in defaults.keys() {
            let place = format!("defaultPodSysctls[{name}]");
            if name.ends_with('*') || !sysctls::is_pattern(name) {
                self.fail(&place, format!("{name:?} is not a sysctl name"));
            } else if !sysctls::is_namespaced(name) {
                self.fail(&place, format!("the sysctl {name:?} is not known to be namespaced"));
            }
            if !seen.insert(sysctls::normalize(name)) {
                self.fail(&place, format!("the sysctl {name:?} is named twice"));
            }
        }
    }

    fn options_and_ciphers(&mut self) {
        let c = self.config;
        for (index, suite) in c.tls_cipher_suites.iter().enumerate() {
            if !suite.starts_with("TLS_") {
                self.fail(
                    &format!("tlsCipherSuites[{index}]"),
                    format!("{suite:?} is not a cipher suite name"),
                );
            }
        }
        for (field, options, manager) in [
            ("cpuManagerPolicyOptions", &c.cpu_manager_policy_options, CPU_OPTIONS),
            ("topologyManagerPolicyOptions", &c.topology_manager_policy_options, TOPOLOGY_OPTIONS),
        ] {
            for option in options.keys().filter(|option| !manager.contains(&option.as_str())) {
                self.fail(
                    &format!("{field}[{option}]"),
                    format!("unknown option; there are {}", manager.join(", ")),
                );
            }
        }
    }
}

/// The oldest release whose metrics `showHiddenMetricsForVersion` may name: earlier versions of the agent
/// accepted it.
const OLDEST_HIDDEN: u16 = 35;

const SIGNALS: &[&str] = &[
    "memory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "containerfs.available",
    "containerfs.inodesFree",
    "allocatableMemory.available",
    "pid.available",
];

const CPU_OPTIONS: &[&str] = &[
    "full-pcpus-only",
    "distribute-cpus-across-numa",
    "align-by-socket",
    "distribute-cpus-across-cores",
    "strict-cpu-reservation",
    "prefer-align-cpus-by-uncorecache",
];

const TOPOLOGY_OPTIONS: &[&str] = &["prefer-closest-numa-nodes", "max-allowable-numa-nodes"];

/// A share such as `10%` or a quantity; negative values and more than 100% are refused.
fn threshold(text: &str) -> Result<(), String> {
    if let Some(share) = text.strip_suffix('%') {
        return match share.parse::<f64>() {
            Ok(share) if (0.0..=100.0).contains(&share) => Ok(()),
            Ok(_) => Err(format!("{text:?} must be between 0% and 100%")),
            Err(_) => Err(format!("{text:?} is not a percentage")),
        };
    }
    match Amount::parse(text) {
        Ok(amount) if amount.is_negative() => Err(format!("{text:?} must not be negative")),
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// A list of CPUs such as `0-3,8`.
fn is_cpu_list(text: &str) -> bool {
    cpu_list::count(text).is_some()
}
