//! The one place that makes long-lived channels and handles, and that turns the
//! configuration into the rooms' settings. Read from top to bottom: it is the machine.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use jiff::Timestamp;

use super::supervise::Supervisor;
use super::{
    StartError, cluster, endpoints, main_port, make_dir, report, restrict_dir, shutdown, stats, streams,
};
use crate::config::credential_providers::CredentialProviders;
use crate::config::{self, AgentArgs, Gates, KubeletConfiguration};
use crate::kube::PodApi;
use crate::kube::client::Client;
use crate::model::event::{EventSink, EventType, Regarding};
use crate::model::fields::NodeAllocatable;
use crate::model::pod::SourceName;
use crate::model::quantity::Amount;
use crate::model::reasons;
use crate::model::restart::RuleGates;
use crate::pods::admission::{Allocatable, NodeView};
use crate::pods::allocation::Allocations;
use crate::pods::mirror;
use crate::pods::plan::resize::Rules;
use crate::pods::workers::Workers;
use crate::probes::Probes;
use crate::resources::cgroups::Cgroups;
use crate::resources::iptables::Chains;
use crate::resources::machine::{self, Machine, kernel_release};
use crate::resources::{Roots, disk};
use crate::runtime::gc::{Collector, Policy};
use crate::runtime::images::gc::{ImageCollector, Policy as ImagePolicy};
use crate::runtime::logs::rotate::{self, Rotator};
use crate::runtime::{MachineNumbers, Runtime, Verification};
use crate::server::LOCAL_SOCKET;
use crate::sources::{FileSettings, HttpSettings};
use crate::status::{NodeAddresses, StatusCache, publish};
use crate::sync::view::View;
use crate::util::cpu_list;
use crate::util::mailbox::{mailbox, newest};
use crate::util::threads::Running;
use crate::{cri, kube, node, observe, pods, probes, runtime, server, sources, sync, volumes};

/// Where tools look for logs by container id.
const CONTAINER_LOGS_DIR: &str = "/var/log/containers";
/// How long the threads together may take to stop.
const STOP_LIMIT: Duration = Duration::from_millis(4500);
/// `userNamespaces.idsPerPod` where it is not set.
const USER_NAMESPACE_IDS: u32 = 65_536;
/// Of this, how long checks that are under way may take to be broken off.
const PROBES_LIMIT: Duration = Duration::from_secs(1);
/// The sync loop counts as stuck after this, or after twice the sync period.
const TURN_LIMIT: Duration = Duration::from_secs(300);

/// Owners of all threads, in start order.
pub(super) struct Agent {
    threads: Vec<Running>,
    probes: Probes,
    client: Option<Client>,
    pod_api: Option<PodApi>,
    /// Given up last.
    _claims: [server::Claim; 2],
}

impl Agent {
    /// Stops everything in reverse start order.
    pub(super) fn stop(self) {
        let deadline = Instant::now() + STOP_LIMIT;
        // First, so that no check delays a worker's end.
        self.probes.stop(PROBES_LIMIT);
        // Nor a request.
        if let Some(client) = &self.client {
            client.shut_down();
        }
        if let Some(pod_api) = &self.pod_api {
            pod_api.shut_down(PROBES_LIMIT);
        }
        for thread in self.threads.into_iter().rev() {
            thread.stop(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// Checks that the agent may run here, makes every room and starts it.
pub(super) fn start(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    flags: Vec<(String, String)>,
    supervisor: &Supervisor,
) -> Result<Agent, StartError> {
    let started = Instant::now();
    let roots = Roots::default();
    let machine = Machine::read(&roots)?;
    let cgroups = Cgroups::detect(&roots.sys.join("fs/cgroup"))?;
    check_machine(config, &machine, &cgroups)?;
    let node_name = super::node::name(&args.hostname_override).map_err(StartError::Refused)?;
    let host_ips = super::node::addresses(&args.node_ips);
    let pod_logs_dir = PathBuf::from(&config.pod_logs_dir);
    make_dir(&args.root_dir, 0o750)?;
    restrict_dir(&args.root_dir, 0o750);
    // Before any thread: a second agent must not touch the first one's pods, nor start some of
    // its own and leave.
    let claims = [server::claim_root(&args.root_dir)?, server::claim_socket(&args.local_socket)?];
    if let Some(directory) =
        args.local_socket.parent().filter(|_| args.local_socket == Path::new(LOCAL_SOCKET))
    {
        restrict_dir(directory, 0o700);
    }
    make_dir(&args.root_dir.join("pods"), 0o750)?;
    make_dir(&pod_logs_dir, 0o750)?;
    make_dir(Path::new(CONTAINER_LOGS_DIR), 0o755)?;
    super::node::prepare_process(config.max_open_files, config.oom_score_adj);

    // Handles without threads.
    let (events, event_queue) = EventSink::new();
    let (objects_post, from_objects) = mailbox(newest);
    let cluster = cluster::connect(args, config, &node_name, objects_post, &supervisor.deaths())?;
    let serving = main_port::certificate(args, config, &node_name, &host_ips)?;
    let main_port = serving.clone().map(|serving| {
        let client = cluster.as_ref().map(|cluster| &cluster.client);
        main_port::main_port(config, &node_name, serving, client)
    });
    let main_port = main_port.transpose()?;
    let pod_api = cluster.as_ref().map(|cluster| cluster.pod_api.clone());
    let (cri, images) = cri::connect(cri::Settings {
        runtime_endpoint: config.container_runtime_endpoint.clone(),
        image_endpoint: Some(config.image_service_endpoint.clone()).filter(|it| !it.is_empty()),
        request_timeout: config.runtime_request_timeout.to_std(),
    })?;
    let status = StatusCache::new();
    let allocations = match &cluster {
        Some(_) => {
            Allocations::load(&args.root_dir).map_err(|error| StartError::Refused(error.to_string()))?
        }
        // Without an API server nothing is ever resized.
        None => Allocations::default(),
    };
    let observe = observe::new(cri.clone());
    let reservations = reservations(args, config);
    let allocatable = allocatable(config, &machine, &args.root_dir, &reservations);
    let runtime = Runtime::new(
        runtime::Settings {
            credential_providers: credential_providers(args)?,
            ..runtime_settings(args, config, &machine, &cgroups, &allocatable, &node_name, &host_ips)
        },
        runtime::Deps {
            cri: cri.clone(),
            images: images.clone(),
            events: events.clone(),
            api: pod_api.clone(),
        },
    );
    let volumes = Arc::new(volumes::Volumes::new(
        volumes::Settings {
            root_dir: args.root_dir.clone(),
            allocatable: NodeAllocatable {
                cpu: Amount::from_milli(allocatable.cpu_milli),
                memory: Amount::from_units(allocatable.memory_bytes),
                ephemeral_storage: Amount::from_units(allocatable.ephemeral_bytes),
            },
        },
        volumes::Deps { events: events.clone(), api: pod_api.clone() },
    ));

    // Channels: who tells whom.
    let (sources_post, from_sources) = mailbox(newest);
    let (observe_post, from_observe) = mailbox(observe::Change::merge);
    let (workers_post, from_workers) = mailbox(newest);
    let (probes_post, from_probes) = mailbox(newest);
    // One slot: a bell.
    let (clean_bell, clean_wait) = bounded(1);
    let (ephemeral, ephemeral_requests) = sync::ephemeral::requests();
    let view = View::default();
    let watch = shutdown::watch(args, config)?;
    let (shutdown_post, shutdown_link) = sync::shutdown::link(watch.as_ref().map(|(_, wake)| wake.clone()));
    let shutting_down = sync::shutdown::Flag::default();
    let turn = Arc::new(Mutex::new(Instant::now()));

    let mut threads = Vec::new();
    let thread = |name: &'static str| move |source| StartError::Thread { name, source };

    let (recorder, log) =
        kube::events::spawn(&node_name, event_queue, supervisor.on_death()).map_err(thread("events"))?;
    threads.push(recorder);

    let (api_pods, api_pods_inbox) = publish::inbox();
    let (mirrors, mirrors_inbox) = mirror::inbox();

    let probes = Probes::new(probes::Deps {
        cri: cri.clone(),
        events: events.clone(),
        post: probes_post,
        on_death: supervisor.deaths(),
    });
    let source_settings = source_settings(args, config, &node_name);
    let configured = configured(&source_settings, cluster.as_ref().map(|cluster| &cluster.client));
    let workers = Workers::new(
        pods::Settings { sync_frequency: config.sync_frequency.to_std(), host_ips: host_ips.clone() },
        pods::Deps {
            runtime: runtime.clone(),
            observe: observe.clone(),
            probes: probes.clone(),
            volumes: Arc::clone(&volumes),
            status: status.clone(),
            allocations: allocations.clone(),
            node_addresses: node_addresses(cluster.as_ref().map(|cluster| &cluster.node), &host_ips),
            events: events.clone(),
            api: pod_api.clone(),
            clean: clean_bell.clone(),
        },
        workers_post,
    );
    threads.push(
        sync::spawn(
            sync::Settings {
                sources: configured.keys().copied().collect::<BTreeSet<_>>(),
                node: node_view(args, config, &node_name, allocatable),
                restart_rules: restart_rules(config),
                resize_rules: Rules {
                    static_cpu: config.cpu_manager_policy == "static",
                    static_memory: config.memory_manager_policy == "Static",
                },
            },
            sync::Deps {
                workers,
                observe: observe.clone(),
                status: status.clone(),
                allocations: allocations.clone(),
                events: events.clone(),
                view: view.clone(),
                clean: clean_bell,
                from_sources,
                from_observe,
                from_workers,
                from_probes,
                probes: probes.clone(),
                ephemeral: ephemeral_requests,
                node: cluster.as_ref().map(|cluster| cluster.node.clone()),
                reader: cluster.as_ref().map(|cluster| cluster.reader(&node_name)),
                health: cluster.as_ref().map(|cluster| cluster.health.clone()),
                api_pods: cluster.is_some().then_some(api_pods),
                mirrors: cluster.is_some().then_some(mirrors),
                from_objects,
                shutdown: shutdown_link,
                turn: Arc::clone(&turn),
            },
            supervisor.on_death(),
        )
        .map_err(thread("sync"))?,
    );
    if let Some((settings, wake)) = watch {
        let deps = sync::shutdown::Deps {
            view: view.clone(),
            status: status.clone(),
            events: events.clone(),
            orders: shutdown_post,
            flag: shutting_down.clone(),
            node: cluster.as_ref().map(|cluster| cluster.health.clone()),
            publishes: cluster.is_some(),
        };
        let running = sync::shutdown::spawn(settings, deps, &wake, supervisor.on_death());
        threads.push(running.map_err(thread("shutdown"))?);
    }
    threads.push(
        sync::clean::spawn(
            sync::clean::Deps {
                cri: cri.clone(),
                observe: observe.clone(),
                view: view.clone(),
                collector: collector(args, &pod_logs_dir, &cri, &events),
                images: image_collector(config, &images, &events, &runtime),
                rotator: rotator(config, &cri),
                chains: config.make_iptables_util_chains.then(Chains::find),
                volumes: Arc::clone(&volumes),
                runtime: runtime.clone(),
                allocations: allocations.clone(),
                bell: clean_wait,
            },
            supervisor.on_death(),
        )
        .map_err(thread("clean"))?,
    );
    // DIFFERS: the Go kubelet has the gate off; here it takes the gate to switch events off.
    let settings = observe::Settings { events: config.feature_gates.get("EventedPLEG") != Some(&false) };
    threads.extend(
        observe::spawn(&observe, settings, observe_post, &supervisor.deaths()).map_err(thread("observe"))?,
    );
    let sources_deps =
        sources::Deps { post: sources_post, events: events.clone(), on_death: supervisor.deaths() };
    threads.extend(sources::spawn(&source_settings, &sources_deps).map_err(thread("sources"))?);
    let client = cluster.as_ref().map(|cluster| cluster.client.clone());
    if let Some(cluster) = cluster {
        let parts = cluster::Parts {
            args,
            config,
            node_name: &node_name,
            machine: &machine,
            reservations,
            observe: observe.clone(),
            images: images.clone(),
            cri: cri.clone(),
            events: events.clone(),
            log: &log,
            status: status.clone(),
            view: view.clone(),
            shutting_down,
            sources: &sources_deps,
            api_pods: api_pods_inbox,
            mirrors: mirrors_inbox,
            serving: serving.filter(|_| config.server_tls_bootstrap),
        };
        threads.extend(cluster.start(parts, &supervisor.deaths())?);
    }

    let stats = stats::collector(&stats::Parts {
        args,
        config,
        node: &node_name,
        cgroups: &cgroups,
        observe: &observe,
        view: &view,
        volumes: &volumes,
        cri: &cri,
        images: &images,
    });
    let facts = report::Sources {
        node: node_name,
        started,
        endpoint: config.container_runtime_endpoint.clone(),
        cgroups: cgroups.version.as_str().to_owned(),
        streams: streams::deps(config, &view, &observe, &cri),
        feature_gates: config.feature_gates.clone(),
        places: configured,
        view,
        status,
        allocations,
        observe,
        probes: probes.clone(),
        cri,
        images,
        log,
        sink: events.clone(),
        turn,
        turn_limit: TURN_LIMIT.max(config.sync_frequency.to_std() * 2),
        ephemeral,
        stats,
        volumes,
        endpoints: endpoints::Settings::new(args, config, flags),
        api: client.clone(),
    };
    let server =
        server::spawn(server_settings(args, config, main_port), facts.server_deps(), supervisor.on_death())?;
    threads.push(server.running);
    runtime.check_resolv_conf();
    events.raise(Regarding::Node, EventType::Normal, reasons::STARTING, "Starting kubelet.");
    if !cgroups.version.is_v2() {
        events.raise(Regarding::Node, EventType::Warning, reasons::CGROUP_V1, CGROUP_V1);
    }
    log::info!("node {} is up after {:?}", facts.node, started.elapsed());
    Ok(Agent { threads, probes, client, pod_api, _claims: claims })
}

/// What the event on a machine with cgroup v1 says, as upstream.
const CGROUP_V1: &str = "cgroup v1 detected. cgroup v1 support is deprecated and will be removed in a future release. Please migrate to cgroup v2. More information at https://git.k8s.io/enhancements/keps/sig-node/5573-remove-cgroup-v1";

/// What statuses say of the node's addresses: those that the Node object has, which a cloud's
/// controller may have written, and until it has any the node's own.
///
/// Without an API server there is no Node object that a status could repeat: the Go kubelet
/// leaves them out, and so the IPs of hostNetwork pods.
fn node_addresses(
    watch: Option<&node::NodeWatch>,
    own: &[IpAddr],
) -> Arc<dyn Fn() -> NodeAddresses + Send + Sync> {
    let known = watch.map(|watch| (watch.clone(), own.to_vec()));
    Arc::new(move || {
        let Some((watch, own)) = &known else { return NodeAddresses::default() };
        let shown = watch.object().map(|node| node::host_ips(&node)).unwrap_or_default();
        NodeAddresses { host_ips: if shown.is_empty() { own.clone() } else { shown } }
    })
}

/// The feature gates as they are with the configuration's changes.
pub(super) fn gates(config: &KubeletConfiguration) -> Gates {
    Gates::resolve(&config.feature_gates).0
}

/// Refuses machines that the configuration rules out.
fn check_machine(
    config: &KubeletConfiguration,
    machine: &Machine,
    cgroups: &Cgroups,
) -> Result<(), StartError> {
    if config.fail_cgroup_v1 && !cgroups.version.is_v2() {
        return Err(StartError::Refused(format!(
            "this machine uses cgroup {}, which failCgroupV1 rules out: set failCgroupV1: false or --fail-cgroupv1=false",
            cgroups.version.as_str()
        )));
    }
    if config.fail_swap_on && machine.has_swap {
        return Err(StartError::Refused(
            "swap is on, which failSwapOn rules out: switch swap off, or set failSwapOn: false".to_owned(),
        ));
    }
    Ok(())
}

/// What pods may not use.
fn reservations(args: &AgentArgs, config: &KubeletConfiguration) -> node::Reservations {
    let reserved = cpu_list::count(&config.reserved_system_cpus);
    let none = BTreeMap::new();
    let thresholds = if args.allocatable_ignores_eviction { &none } else { &config.eviction_hard };
    node::Reservations::new(&config.system_reserved, &config.kube_reserved, reserved, thresholds)
}

fn allocatable(
    config: &KubeletConfiguration,
    machine: &Machine,
    root_dir: &Path,
    reserved: &node::Reservations,
) -> Allocatable {
    let disk = disk::space(&disk::nearest_existing(root_dir)).ok().map(|space| space.capacity_bytes);
    let all = node::capacity(machine, disk, config.max_pods, config.pods_per_core);
    node::allocatable(&all, reserved)
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
        declared_features: Some(node::declared_features(|gate| gates.enabled(gate))),
        ..NodeView::default()
    }
}

fn runtime_settings(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    machine: &Machine,
    cgroups: &Cgroups,
    allocatable: &Allocatable,
    node_name: &str,
    host_ips: &[IpAddr],
) -> runtime::Settings {
    let gates = gates(config);
    runtime::Settings {
        root_dir: args.root_dir.clone(),
        pod_logs_dir: PathBuf::from(&config.pod_logs_dir),
        container_logs_dir: PathBuf::from(CONTAINER_LOGS_DIR),
        node_name: node_name.to_owned(),
        node_ips: host_ips.to_vec(),
        // Validation has seen to it that they parse.
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
            allocatable_cpu: Amount::from_milli(allocatable.cpu_milli),
            allocatable_memory: Amount::from_units(allocatable.memory_bytes),
            allocatable_ephemeral_storage: Amount::from_units(allocatable.ephemeral_bytes),
        },
        single_process_oom_kill: config.single_process_oom_kill,
        registry_pull_qps: config.registry_pull_qps,
        registry_burst: config.registry_burst,
        serialize_image_pulls: config.serialize_image_pulls,
        max_parallel_image_pulls: config.max_parallel_image_pulls,
        crash_backoff_max: config.crash_loop_back_off.max_container_restart_period.to_std(),
        stop_signals: gates.enabled("ContainerStopSignals"),
        credential_providers: None,
        image_verification: if gates.enabled("KubeletEnsureSecretPulledImages") {
            Verification::from_policy(
                &config.image_pull_credentials_verification_policy,
                &config.preloaded_images_verification_allowlist,
            )
        } else {
            Verification::Off
        },
        user_namespace_ids: config
            .user_namespaces
            .ids_per_pod
            .and_then(|ids| u32::try_from(ids).ok())
            .unwrap_or(USER_NAMESPACE_IDS),
        max_pods: u32::try_from(config.max_pods).unwrap_or(0),
    }
}

fn restart_rules(config: &KubeletConfiguration) -> RuleGates {
    let gates = gates(config);
    RuleGates {
        rules: gates.enabled("ContainerRestartRules"),
        restart_all: gates.enabled("RestartAllContainersOnContainerExits"),
    }
}

/// Both flags are given or none is.
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

fn source_settings(args: &AgentArgs, config: &KubeletConfiguration, node_name: &str) -> sources::Settings {
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
    }
}

fn configured(settings: &sources::Settings, client: Option<&Client>) -> BTreeMap<SourceName, String> {
    let file = settings.file.as_ref().map(|file| (SourceName::File, file.path.display().to_string()));
    let http = settings.http.as_ref().map(|http| (SourceName::Http, http.url.clone()));
    let api = client.map(|client| (SourceName::Api, client.origin()));
    file.into_iter().chain(http).chain(api).collect()
}

fn collector(
    args: &AgentArgs,
    pod_logs_dir: &Path,
    cri: &cri::RuntimeClient,
    events: &EventSink,
) -> Collector<cri::RuntimeClient> {
    let limit = |count: i32| usize::try_from(count).ok();
    let settings = runtime::gc::Settings {
        pod_logs_dir: pod_logs_dir.to_owned(),
        container_logs_dir: PathBuf::from(CONTAINER_LOGS_DIR),
        policy: Policy {
            min_age: args.minimum_container_ttl,
            max_per_pod_container: limit(args.maximum_dead_containers_per_container),
            max_containers: limit(args.maximum_dead_containers),
        },
    };
    Collector::new(settings, cri.clone(), events.clone())
}

fn image_collector(
    config: &KubeletConfiguration,
    images: &cri::ImageClient,
    events: &EventSink,
    runtime: &Runtime,
) -> Option<ImageCollector<cri::ImageClient>> {
    let percent = |value: i32| u8::try_from(value.clamp(0, 100)).unwrap_or(100);
    let policy = ImagePolicy {
        high_percent: percent(config.image_gc_high_threshold_percent),
        low_percent: percent(config.image_gc_low_threshold_percent),
        min_age: config.image_minimum_gc_age.to_std(),
        max_age: Some(config.image_maximum_gc_age.to_std()).filter(|age| !age.is_zero()),
    };
    let runtime = runtime.clone();
    let collector = ImageCollector::new(images.clone(), policy, events.clone(), Timestamp::now())
        .on_list(Box::new(move |images, at| runtime.settle_pulls(images, at)));
    (!policy.is_off()).then_some(collector)
}

fn rotator(
    config: &KubeletConfiguration,
    cri: &cri::RuntimeClient,
) -> Option<(Rotator<cri::RuntimeClient>, Duration)> {
    let size = Amount::parse(&config.container_log_max_size).ok()?;
    let settings = rotate::Settings {
        max_bytes: u64::try_from(size.units()).ok(),
        max_files: usize::try_from(config.container_log_max_files).unwrap_or(2).max(2),
    };
    settings.max_bytes?;
    Some((Rotator::new(settings, cri.clone()), config.container_log_monitor_interval.to_std()))
}

fn server_settings(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    main: Option<server::MainPort>,
) -> server::Settings {
    let address = |ip: &str, port: i32| {
        let port = u16::try_from(port).ok().filter(|port| *port != 0)?;
        Some(SocketAddr::new(ip.parse().ok()?, port))
    };
    server::Settings {
        healthz: address(&config.healthz_bind_address, config.healthz_port),
        read_only: address(&config.address, config.read_only_port).filter(|_| config.enable_server),
        main,
        local_socket: args.local_socket.clone(),
        any_namespace: args.local_socket_any_namespace,
    }
}
