//! Turns the flags and the configuration into the settings of the rooms (pure, but for the files
//! that the configuration names).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::error::StartError;
use super::host::{CONTAINER_LOGS_DIR, Host};
use crate::cgroups::node::{Reservations, unreserved_memory};
use crate::config::credential_providers::CredentialProviders;
use crate::config::{self, AgentArgs, Gates, KubeletConfiguration, OFFLINE_DIR};
use crate::images::{CredentialVerification, GcPolicy, PullSettings, SetSettings};
use crate::kube::client::Client;
use crate::model::container_memory::{
    MemoryReservationPolicy, ProtectionSettings, SwapBehavior, SwapSettings, Throttling,
};
use crate::model::fields::NodeAllocatable;
use crate::model::pod::SourceName;
use crate::model::quantity::Amount;
use crate::model::restart::RuleGates;
use crate::offline;
use crate::pods::admission::{Allocatable, NodeView};
use crate::pods::plan::resize::ResizeRules;
use crate::resources::machine::{self, kernel_release};
use crate::resources::{Roots, disk};
use crate::runtime::logs::quota::Quota;
use crate::runtime::logs::rotate;
use crate::runtime::{self, CrashBackoff, MachineNumbers, gc};
use crate::server::{LOCAL_SOCKET, RegistrySettings, Switches};
use crate::sources::{self, FileSettings, HttpSettings};
use crate::util::{cpu_list, logging};
use crate::{node, server, sync};

/// The file beside another local socket than the default one that has the time of the last contact with the API server.
const CONTACT_FILE: &str = "api-contact";
/// The default of `userNamespaces.idsPerPod`.
const USER_NAMESPACE_IDS: u32 = 65_536;

/// The defaults of the feature gates with the configuration's changes.
pub(super) fn gates(config: &KubeletConfiguration) -> Gates {
    Gates::resolve(&config.feature_gates).0
}

/// `logging`, as far as it has an effect.
pub(super) fn logging(config: &KubeletConfiguration) -> logging::Settings {
    let json = config.logging.format == "json";
    let options = &config.logging.options;
    logging::Settings {
        verbosity: u32::try_from(config.logging.verbosity).unwrap_or(0),
        json,
        split_stream: if json { options.json.split_stream } else { options.text.split_stream },
    }
}

/// Reservations for the system, and the hard eviction thresholds.
pub(super) fn reservations(args: &AgentArgs, config: &KubeletConfiguration) -> node::Reservations {
    let reserved = cpu_list::count(&config.reserved_system_cpus);
    let none = BTreeMap::new();
    let thresholds = if args.allocatable_ignores_eviction { &none } else { &config.eviction_hard };
    node::Reservations::new(&config.system_reserved, &config.kube_reserved, reserved, thresholds)
}

pub(super) fn allocatable(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
    reserved: &node::Reservations,
) -> Allocatable {
    node::allocatable(&capacity(args, config, host), reserved)
}

/// What the machine has.
pub(super) fn capacity(args: &AgentArgs, config: &KubeletConfiguration, host: &Host) -> Allocatable {
    node::capacity(&host.machine, local_disk(args, config), config.max_pods, config.pods_per_core)
}

/// The bytes of `ephemeral-storage`. Without isolation the node has no such resource: pods that request
/// it are refused.
fn local_disk(args: &AgentArgs, config: &KubeletConfiguration) -> Option<u64> {
    if config.local_storage_capacity_isolation { root_disk(args) } else { Some(0) }
}

/// The bytes of the file system of the root directory.
pub(super) fn root_disk(args: &AgentArgs) -> Option<u64> {
    disk::space(&disk::nearest_existing(&args.root_dir)).ok().map(|space| space.capacity_bytes)
}

/// The node as downward API fields show it.
pub(super) fn node_allocatable(allocatable: &Allocatable) -> NodeAllocatable {
    NodeAllocatable {
        cpu: Amount::from_milli(allocatable.cpu_milli),
        memory: Amount::from_units(allocatable.memory_bytes),
        ephemeral_storage: Amount::from_units(allocatable.ephemeral_bytes),
    }
}

pub(super) fn sync(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
    allocatable: Allocatable,
    sources: &BTreeMap<SourceName, String>,
) -> sync::Settings {
    let gates = gates(config);
    sync::Settings {
        sources: sources.keys().copied().collect(),
        node: node_view(args, config, &host.node_name, allocatable),
        restart_rules: RuleGates {
            rules: gates.enabled("ContainerRestartRules"),
            restart_all: gates.enabled("RestartAllContainersOnContainerExits"),
        },
        resize_rules: ResizeRules {
            static_cpu: config.cpu_manager_policy == "static",
            static_memory: config.memory_manager_policy == "Static",
            swap: Some(SwapSettings {
                behavior: swap_behavior(config),
                cgroup_v2: host.cgroups.version.is_v2(),
                controller: host.cgroups.limits_swap(),
                memory_bytes: i64::try_from(host.machine.memory_bytes).unwrap_or(i64::MAX),
                swap_bytes: i64::try_from(host.machine.swap_bytes).unwrap_or(i64::MAX),
            }),
            fixed_pod_level: !gates.enabled("InPlacePodLevelResourcesVerticalScaling"),
        },
    }
}

fn node_view(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    node_name: &str,
    allocatable: Allocatable,
) -> NodeView {
    let gates = gates(config);
    let mut labels = BTreeMap::from([
        ("kubernetes.io/hostname".to_owned(), node_name.to_owned()),
        ("kubernetes.io/os".to_owned(), "linux".to_owned()),
        ("kubernetes.io/arch".to_owned(), node::arch().to_owned()),
    ]);
    labels.extend(args.node_labels.clone());
    NodeView {
        name: node_name.to_owned(),
        labels,
        allocatable,
        os: "linux".to_owned(),
        kernel_version: kernel_release(),
        apparmor: machine::has_apparmor(&Roots::default()),
        allowed_unsafe_sysctls: config.allowed_unsafe_sysctls.clone(),
        strict_supplemental_groups: true,
        declared_features: declared_features(config),
        refuses_pod_resources: !gates.enabled("PodLevelResources"),
        ..NodeView::default()
    }
}

pub(super) fn runtime(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    host: &Host,
    allocatable: &Allocatable,
) -> runtime::Settings {
    let gates = gates(config);
    let Host { machine, cgroups, addresses, .. } = host;
    let allocatable = node_allocatable(allocatable);
    runtime::Settings {
        root_dir: args.root_dir.clone(),
        pod_logs_dir: PathBuf::from(&config.pod_logs_dir),
        container_logs_dir: PathBuf::from(CONTAINER_LOGS_DIR),
        node_ips: addresses.get(),
        // They are validated.
        cluster_dns: config.cluster_dns.iter().filter_map(|ip| ip.parse().ok()).collect(),
        cluster_domain: config.cluster_domain.clone(),
        resolv_conf: PathBuf::from(&config.resolv_conf),
        hosts_file: PathBuf::from("/etc/hosts"),
        seccomp_default: config.seccomp_default,
        cpu_cfs_quota: config.cpu_cfs_quota,
        cpu_cfs_quota_period: config.cpu_cfs_quota_period.to_std(),
        machine: MachineNumbers {
            memory_capacity_bytes: machine.memory_bytes,
            cpu_count: machine.cpus,
            hugepage_sizes: machine.huge_pages.iter().map(|pages| pages.runtime_size()).collect(),
            cgroup_v2: cgroups.version.is_v2(),
            swap_controller: cgroups.limits_swap(),
            swap_capacity_bytes: machine.swap_bytes,
            allocatable_cpu: allocatable.cpu,
            allocatable_memory: allocatable.memory,
            allocatable_ephemeral_storage: allocatable.ephemeral_storage,
        },
        swap: swap_behavior(config),
        memory_qos: memory_qos(config, host),
        single_process_oom_kill: config.single_process_oom_kill,
        crash_backoff: crash_backoff(config, &gates),
        stop_signals: gates.enabled("ContainerStopSignals"),
        user_namespace_ids: config
            .user_namespaces
            .ids_per_pod
            .and_then(|ids| u32::try_from(ids).ok())
            .unwrap_or(USER_NAMESPACE_IDS),
        default_sysctls: if gates.enabled("DefaultPodSysctls") {
            config.default_pod_sysctls.clone()
        } else {
            BTreeMap::new()
        },
        max_pods: u32::try_from(config.max_pods).unwrap_or(0),
    }
}

pub(super) fn pulls(args: &AgentArgs, config: &KubeletConfiguration) -> Result<PullSettings, StartError> {
    Ok(PullSettings {
        root_dir: args.root_dir.clone(),
        registry_pull_qps: config.registry_pull_qps,
        registry_burst: config.registry_burst,
        serialize_image_pulls: config.serialize_image_pulls,
        max_parallel_image_pulls: config.max_parallel_image_pulls,
        credential_providers: credential_providers(args)?,
        credential_verification: if gates(config).enabled("KubeletEnsureSecretPulledImages") {
            CredentialVerification::from_policy(
                &config.image_pull_credentials_verification_policy,
                &config.preloaded_images_verification_allowlist,
            )
        } else {
            CredentialVerification::Off
        },
    })
}

/// The first and the longest wait before a container that has crashed starts again (Go:
/// `newCrashLoopBackOff`).
fn crash_backoff(config: &KubeletConfiguration, gates: &Gates) -> CrashBackoff {
    let (mut first, mut longest) = (Duration::from_secs(10), Duration::from_secs(300));
    if gates.enabled("ReduceDefaultCrashLoopBackOffDecay") {
        (first, longest) = (Duration::from_secs(1), Duration::from_secs(60));
    }
    if gates.enabled("KubeletCrashLoopBackOffMax") {
        longest = config.crash_loop_back_off.max_container_restart_period.to_std();
    }
    CrashBackoff { first: first.min(longest), longest }
}

/// `memorySwap.swapBehavior`; empty means NoSwap.
pub(super) fn swap_behavior(config: &KubeletConfiguration) -> SwapBehavior {
    match config.memory_swap.swap_behavior.as_str() {
        "LimitedSwap" => SwapBehavior::LimitedSwap,
        _ => SwapBehavior::NoSwap,
    }
}

fn memory_qos(config: &KubeletConfiguration, host: &Host) -> Option<ProtectionSettings> {
    let reserved = Reservations::new(&config.system_reserved, &config.kube_reserved, None);
    let memory = i64::try_from(host.machine.memory_bytes).unwrap_or(i64::MAX);
    (gates(config).enabled("MemoryQoS") && host.cgroups.version.is_v2()).then(|| ProtectionSettings {
        reservation_policy: memory_reservation_policy(config),
        throttling: throttling(config),
        allocatable_memory: unreserved_memory(memory, &reserved),
    })
}

/// `memoryThrottlingFactor`.
pub(super) fn throttling(config: &KubeletConfiguration) -> Option<Throttling> {
    let page_bytes = i64::try_from(rustix::param::page_size()).unwrap_or(4096);
    config.memory_throttling_factor.map(|factor| Throttling { factor, page_bytes })
}

/// `memoryReservationPolicy`.
pub(super) fn memory_reservation_policy(config: &KubeletConfiguration) -> MemoryReservationPolicy {
    match config.memory_reservation_policy.as_str() {
        "TieredReservation" => MemoryReservationPolicy::Tiered,
        _ => MemoryReservationPolicy::Nothing,
    }
}

/// Either both flags are given or none; that is validated.
fn credential_providers(args: &AgentArgs) -> Result<Option<CredentialProviders>, StartError> {
    let (Some(config), Some(bin_dir)) =
        (&args.image_credential_provider_config, &args.image_credential_provider_bin_dir)
    else {
        return Ok(None);
    };
    config::credential_providers::load(config, bin_dir).map(Some).map_err(|problems| {
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        StartError::Refused(format!("image credential providers: {}", problems.join("; ")))
    })
}

/// The features that the node declares; `None`: it declares none, and pods are not checked. A gate that
/// was switched on but has no effect here declares nothing.
pub(super) fn declared_features(config: &KubeletConfiguration) -> Option<Vec<String>> {
    let gates = gates(config);
    let without_effect = gates.without_effect();
    let is_ignored = |gate: &str| gates.configured(gate) == Some(true) && without_effect.contains(&gate);
    node::declared_features(|gate| gates.enabled(gate) && !is_ignored(gate))
}

pub(super) fn sources(args: &AgentArgs, config: &KubeletConfiguration, node_name: &str) -> sources::Settings {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    sources::Settings {
        node_name: node_name.to_owned(),
        file: some(&config.static_pod_path).map(|path| FileSettings {
            path: PathBuf::from(path),
            check: config.file_check_frequency.to_std(),
        }),
        http: some(&config.static_pod_url).map(|url| HttpSettings {
            url,
            headers: config.static_pod_url_header.clone(),
            check: config.http_check_frequency.to_std(),
        }),
        state_dir: Some(args.root_dir.join("sources")),
        known: sources::PodsAtStart::default(),
    }
}

/// The configured sources, each with its path or URL.
pub(super) fn source_locations(
    settings: &sources::Settings,
    client: Option<&Client>,
) -> BTreeMap<SourceName, String> {
    let file = settings.file.as_ref().map(|file| (SourceName::File, file.path.display().to_string()));
    let http = settings.http.as_ref().map(|http| (SourceName::Http, http.url.clone()));
    let api = client.map(|client| (SourceName::Api, client.origin()));
    file.into_iter().chain(http).chain(api).collect()
}

/// Whether only root and the agent's user make files in this directory, or in the one above in which it is to
/// be made: a forged contact would let pods run on.
fn is_ours(directory: &Path) -> bool {
    let existing = directory.ancestors().find_map(|above| above.metadata().ok());
    existing.is_some_and(|found| {
        let own = rustix::process::geteuid().as_raw();
        found.mode() & 0o022 == 0 && [0, own].contains(&found.uid())
    })
}

/// The file that has the time of the last contact for the next start of the agent; `None`: there is no place
/// for it in memory.
fn memory_file(args: &AgentArgs) -> Option<PathBuf> {
    // systemd removes the directory of the default socket whenever the agent ends.
    let directory = args.local_socket.parent();
    let file = match directory.filter(|_| args.local_socket == Path::new(LOCAL_SOCKET)) {
        Some(directory) => directory.with_extension("contact"),
        None => args.local_socket.with_file_name(CONTACT_FILE),
    };
    let is_fit = file.parent().is_some_and(|place| offline::is_in_memory(place) && is_ours(place));
    is_fit.then_some(file)
}

/// The store of the API server's last known objects; `None` without `--offline`.
pub(super) fn offline(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    node_name: &str,
) -> Result<Option<offline::Settings>, StartError> {
    if !args.offline {
        if !args.offline_stop_after.is_zero() {
            log::warn!("--offline-stop-after has no effect without --offline: no pod will be stopped");
        }
        // It is not brought up to date: with these flags again, an old one would stop pods that run.
        if let Some(path) = memory_file(args) {
            let _ = std::fs::remove_file(path);
        }
        return Ok(None);
    }
    let shortest = Duration::from_secs(u64::try_from(config.node_lease_duration_seconds).unwrap_or_default());
    let stop_after = Some(args.offline_stop_after).filter(|after| !after.is_zero());
    if stop_after.is_some_and(|after| after < shortest) {
        return Err(StartError::Refused(format!(
            "--offline-stop-after: must not be shorter than nodeLeaseDurationSeconds ({} s): pods would stop between \
             two renewals of the lease",
            shortest.as_secs()
        )));
    }
    let swap = if args.offline_secrets { machine::clear_swap(&Roots::default()) } else { Vec::new() };
    if !swap.is_empty() {
        log::warn!(
            "the kernel may write the agent's memory, which has Secrets in clear, to the swap {}: encrypt or remove \
             it, or set MemorySwapMax=0 in the agent's unit on cgroup v2",
            swap.join(", ")
        );
    }
    let fence = offline::FenceSettings { stop_after, shortest, memory_file: memory_file(args) };
    Ok(Some(offline::Settings {
        directory: args.root_dir.join(OFFLINE_DIR),
        node_name: node_name.to_owned(),
        stores_secrets: args.offline_secrets,
        key_file: args.offline_key.clone(),
        wait: args.offline_wait,
        accept_after: args.offline_accept_after,
        fence,
    }))
}

pub(super) fn container_gc(args: &AgentArgs, config: &KubeletConfiguration) -> gc::Settings {
    let limit = |count: i32| usize::try_from(count).ok();
    gc::Settings {
        pod_logs_dir: PathBuf::from(&config.pod_logs_dir),
        container_logs_dir: PathBuf::from(CONTAINER_LOGS_DIR),
        policy: gc::Policy {
            min_age: args.minimum_container_ttl,
            max_per_pod_container: limit(args.maximum_dead_containers_per_container),
            max_containers: limit(args.maximum_dead_containers),
        },
    }
}

/// `None` without the registry from which the runtime would pull.
pub(super) fn image_set(args: &AgentArgs) -> Option<SetSettings> {
    args.image_registry.map(|_| SetSettings {
        directories: args.image_dirs(),
        index: args.root_dir.join("image_set").join("index.json"),
    })
}

pub(super) fn image_gc(config: &KubeletConfiguration) -> GcPolicy {
    let percent = |value: i32| u8::try_from(value.clamp(0, 100)).unwrap_or(100);
    GcPolicy {
        high_percent: percent(config.image_gc_high_threshold_percent),
        low_percent: percent(config.image_gc_low_threshold_percent),
        min_age: config.image_minimum_gc_age.to_std(),
        max_age: Some(config.image_maximum_gc_age.to_std()).filter(|age| !age.is_zero()),
    }
}

/// `None`: logs are neither rotated nor removed.
pub(super) fn log_rotation(args: &AgentArgs, config: &KubeletConfiguration) -> Option<rotate::Settings> {
    let size = Amount::parse(&config.container_log_max_size).ok();
    let max_bytes = size.and_then(|size| u64::try_from(size.units()).ok());
    if max_bytes.is_none() && args.container_logs_quota.is_none() {
        return None;
    }
    let max_files = usize::try_from(config.container_log_max_files).unwrap_or(2).max(2);
    Some(rotate::Settings { max_bytes, max_files })
}

pub(super) fn log_quota(args: &AgentArgs, config: &KubeletConfiguration) -> Option<Quota> {
    let bytes = args.container_logs_quota?;
    Some(Quota { bytes, pod_logs_dir: PathBuf::from(&config.pod_logs_dir) })
}

pub(super) fn server(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    main: Option<server::MainPort>,
) -> server::Settings {
    let address = |ip: &str, port: i32| {
        let port = u16::try_from(port).ok().filter(|port| *port != 0)?;
        Some(SocketAddr::new(ip.parse().ok()?, port))
    };
    let registry = args.image_registry.and_then(|address| {
        let settings = RegistrySettings::new(address, args.image_mirror_file(), args.image_node_token());
        settings.inspect_err(|error| log::error!("there is no registry of image archives: {error}")).ok()
    });
    server::Settings {
        registry,
        healthz: address(&config.healthz_bind_address, config.healthz_port),
        // DIFFERS: the Go kubelet serves this port also without `enableServer`.
        read_only: address(&config.address, config.read_only_port).filter(|_| config.enable_server),
        main,
        local_socket: args.local_socket.clone(),
        any_namespace: args.local_socket_any_namespace,
    }
}

/// The settings on which responses of `NodeBackend` depend, or which they show.
pub(super) struct BackendSettings {
    pub(super) switches: Switches,
    pub(super) config: Arc<KubeletConfiguration>,
    pub(super) flags: Arc<[(String, String)]>,
    pub(super) checkpoints: PathBuf,
}

impl BackendSettings {
    pub(super) fn new(args: &AgentArgs, config: &KubeletConfiguration, flags: Vec<(String, String)>) -> Self {
        let gates = gates(config);
        BackendSettings {
            switches: Switches {
                debugging: config.enable_debugging_handlers,
                websockets: gates.enabled("ExtendWebSocketsToKubelet"),
                system_logs: config.enable_system_log_handler,
                system_log_query: config.enable_system_log_query,
                debug_flags: config.enable_debug_flags_handler,
                profiling: config.enable_profiling_handler,
                checkpoint: gates.enabled("ContainerCheckpoint"),
                flagz: gates.enabled("ComponentFlagz"),
                statusz: gates.enabled("ComponentStatusz"),
                split_streams: gates.enabled("PodLogsQuerySplitStreams"),
            },
            config: Arc::new(config.clone()),
            flags: flags.into(),
            checkpoints: args.root_dir.join("checkpoints"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DefaultSet;
    use crate::config::effects::default_configuration;
    use crate::config::gates::RELEASE;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn table_of_gates_has_the_release_of_the_agent() {
        assert!(server::KUBERNETES_VERSION.starts_with(&format!("v{RELEASE}.")));
    }

    #[test]
    fn contact_is_in_no_directory_in_which_other_users_make_files() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("directory");
        std::fs::create_dir(&place).unwrap();
        for (mode, expected) in [(0o755, true), (0o1777, false), (0o770, false), (0o700, true)] {
            std::fs::set_permissions(&place, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_ours(&place), expected, "{mode:o}");
            assert_eq!(is_ours(&place.join("absent/one")), expected, "{mode:o}");
        }
    }

    #[test]
    fn contact_of_a_former_start_goes_without_the_flag() {
        // Without a tmpfs there is no such file.
        let Ok(root) = tempfile::tempdir_in("/dev/shm") else { return };
        if !offline::is_in_memory(root.path()) {
            return;
        }
        let config = default_configuration(DefaultSet::WithFile);
        let mut args = AgentArgs::new(root.path().join("coracle.sock").to_str().unwrap());
        let path = root.path().join(CONTACT_FILE);
        std::fs::write(&path, "x").unwrap();
        for (offline, exists) in [(true, true), (false, false)] {
            args.offline = offline;
            assert_eq!(super::offline(&args, &config, "n").unwrap().is_some(), offline);
            assert_eq!(path.exists(), exists);
        }
    }

    #[test]
    fn time_to_stop_pods_that_is_shorter_than_the_lease_is_refused() {
        let mut config = default_configuration(DefaultSet::WithFile);
        config.node_lease_duration_seconds = 40;
        let mut args = AgentArgs::new("/run/other/coracle.sock");
        args.offline_stop_after = Duration::from_secs(39);
        assert!(super::offline(&args, &config, "n").unwrap().is_none(), "without --offline it has no effect");
        args.offline = true;
        let error = super::offline(&args, &config, "n").unwrap_err().to_string();
        assert!(error.contains("--offline-stop-after: must not be shorter"), "{error}");
        args.offline_stop_after = Duration::from_secs(40);
        let stop_after =
            |args: &AgentArgs| super::offline(args, &config, "n").unwrap().unwrap().fence.stop_after;
        assert_eq!(stop_after(&args), Some(Duration::from_secs(40)));
        args.offline_stop_after = Duration::ZERO;
        assert_eq!(stop_after(&args), None);
    }

    #[test]
    fn options_of_the_chosen_log_format_have_effect() {
        let mut config = default_configuration(DefaultSet::WithFile);
        config.logging.verbosity = 3;
        config.logging.options.json.split_stream = true;
        let text = logging::Settings { verbosity: 3, json: false, split_stream: false };
        assert_eq!(super::logging(&config), text);
        config.logging.format = "json".to_owned();
        assert_eq!(super::logging(&config), logging::Settings { json: true, split_stream: true, ..text });
    }

    #[test]
    fn node_without_local_storage_isolation_has_no_ephemeral_storage() {
        let mut config = default_configuration(DefaultSet::WithFile);
        let args = AgentArgs { root_dir: "/".into(), ..AgentArgs::new("/run/none") };
        assert!(local_disk(&args, &config).is_some_and(|bytes| bytes > 0));
        config.local_storage_capacity_isolation = false;
        assert_eq!(local_disk(&args, &config), Some(0));
    }

    #[test]
    fn gates_change_the_waits_of_crashed_containers() {
        let seconds = |entries: &[(&str, bool)], longest: i64| {
            let mut config = default_configuration(DefaultSet::WithFile);
            config.crash_loop_back_off.max_container_restart_period = config::GoDuration::from_secs(longest);
            config.feature_gates = entries.iter().map(|(name, on)| ((*name).to_owned(), *on)).collect();
            let CrashBackoff { first, longest } = crash_backoff(&config, &gates(&config));
            (first.as_secs(), longest.as_secs())
        };
        let (reduced, longest) = ("ReduceDefaultCrashLoopBackOffDecay", "KubeletCrashLoopBackOffMax");
        assert_eq!(seconds(&[], 300), (10, 300));
        assert_eq!(seconds(&[], 5), (5, 5));
        assert_eq!(seconds(&[(reduced, true)], 300), (1, 300));
        assert_eq!(seconds(&[(reduced, true), (longest, false)], 300), (1, 60));
        assert_eq!(seconds(&[(longest, false)], 300), (10, 300));
    }

    /// Go declares these with the default gates. Without one of them, the API server refuses the
    /// requests that need it.
    #[test]
    fn node_declares_the_features_of_upstream_and_none_without_their_gates() {
        let declared = |changes: &[(&str, bool)]| {
            let feature_gates = changes.iter().map(|(gate, on)| ((*gate).to_owned(), *on)).collect();
            declared_features(&KubeletConfiguration { feature_gates, ..KubeletConfiguration::default() })
        };
        let all = [
            "ExtendWebSocketsToKubelet",
            "InPlacePodLevelResourcesVerticalScaling",
            "InPlacePodVerticalScalingInitContainers",
            "RestartAllContainersOnContainerExits",
        ];
        assert_eq!(declared(&[]), Some(all.map(str::to_owned).to_vec()));
        // This agent does not have these resources.
        assert_eq!(declared(&[("DRANodeAllocatableResources", true)]), declared(&[]));
        let fewer = declared(&[("InPlacePodLevelResourcesVerticalScaling", false)]).unwrap();
        assert_eq!(fewer, [all[0], all[2], all[3]]);
        // The gate is locked since 1.37.
        assert_eq!(declared(&[("NodeDeclaredFeatures", false)]), declared(&[]));
    }
}
