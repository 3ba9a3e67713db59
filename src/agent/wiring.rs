//! Makes every long-lived channel and starts every room, phase by phase, from top to bottom.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::cgroups;
use super::cluster::Cluster;
use super::error::{StartError, thread_error};
use super::handles::{Handles, ThreadHandles};
use super::plugins::Registrations;
use super::rooms::{Context, Rooms, node_addresses};
use super::supervise::Supervisor;
use super::{
    cluster, eviction, host, main_port, oom, placement_settings, pod_cidr, pod_resources, pods_api, rooms,
    settings, shutdown, stats, tracing,
};
use crate::config::{AgentArgs, KubeletConfiguration};
use crate::eviction::LatestReport;
use crate::images::{CollectorPeers, ImageCheck, ImageCollector, SetDeps};
use crate::kube::certificates::serving::CurrentServingCertificate;
use crate::kube::client::Client;
use crate::kube::{LocalObjects, PodDependencies};
use crate::model::event::{Event, EventSink, EventType, Regarding};
use crate::model::ids::PodUid;
use crate::model::pod::SourceName;
use crate::model::reasons;
use crate::observe::{ExitedContainers, ObservedChange};
use crate::offline::Offline;
use crate::pods::mirror;
use crate::pods::workers::{WorkerEnd, Workers};
use crate::probes::Probes;
use crate::resources::iptables::Chains;
use crate::runtime::gc::Collector;
use crate::runtime::logs::rotate::Rotator;
use crate::server::InstanceLock;
use crate::sources::{PodsAtStart, SourceSet};
use crate::status::publish;
use crate::sync::reclaim::Request;
use crate::sync::shutdown::Orders;
use crate::sync::{ephemeral, evictions};
use crate::transport::rpc_server;
use crate::util::lock::LockExt;
use crate::util::mailbox::{Inbox, Post, mailbox, replace};
use crate::util::steady;
use crate::util::threads::Running;
use crate::volumes::csi::NodeObjects;
use crate::{kube, observe, pods, server, sources, sync};

/// How long the threads together may take to stop.
const STOP_LIMIT: Duration = Duration::from_millis(4500);
/// The part of it that checks in progress may take to stop.
const PROBES_LIMIT: Duration = Duration::from_secs(1);

/// The event on a machine with cgroup v1, as upstream.
const CGROUP_V1: &str = "cgroup v1 detected. cgroup v1 support is deprecated and will be removed in a future release. Please migrate to cgroup v2. More information at https://git.k8s.io/enhancements/keps/sig-node/5573-remove-cgroup-v1";

/// Owners of all threads, in start order.
pub(super) struct Agent {
    registrations: Registrations,
    /// `None`: the socket could not be made.
    pod_resources: Option<rpc_server::Server>,
    /// `None`: switched off, or the socket could not be made.
    pods_api: Option<rpc_server::Server>,
    threads: Vec<Running>,
    probes: Probes,
    image_check: ImageCheck,
    client: Option<Client>,
    pod_api: Option<PodDependencies>,
    /// When the sync loop ended its last turn.
    turn: Arc<Mutex<Instant>>,
    /// Sends spans; stopped after the threads whose spans end. `None`: not configured.
    tracing: Option<Running>,
    /// Released last.
    _locks: [InstanceLock; 2],
}

impl Agent {
    /// How long ago the sync loop ended its last turn.
    pub(super) fn turn_age(&self) -> Duration {
        self.turn.locked().elapsed()
    }

    /// Stops everything in reverse start order.
    pub(super) fn stop(self) {
        let deadline = Instant::now() + STOP_LIMIT;
        // First, so that neither a check nor a request delays the end of a worker.
        self.probes.stop(PROBES_LIMIT);
        self.image_check.stop(PROBES_LIMIT);
        self.registrations.stop();
        drop(self.pod_resources);
        drop(self.pods_api);
        if let Some(client) = &self.client {
            client.shut_down();
        }
        if let Some(pod_api) = &self.pod_api {
            pod_api.shut_down(PROBES_LIMIT);
        }
        for thread in self.threads.into_iter().rev() {
            thread.stop(deadline.saturating_duration_since(Instant::now()));
        }
        if let Some(tracing) = self.tracing {
            tracing.stop(deadline.saturating_duration_since(Instant::now()));
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
    let (host, locks) = host::prepare_host(args, config)?;
    let context = Context { args, config, host: &host, supervisor, started };
    // Before any thread that has spans.
    let tracing = tracing::start(config, &host)?;
    // Before any pod can be started or pull an image.
    server::remove_stale_mirror(&args.image_mirror_file());

    let (objects, from_objects) = mailbox(replace);
    let changed = objects.clone();
    let local = LocalObjects::new(Box::new(move |uid| changed.put(uid.clone(), ())));
    let offline = settings::offline(args, config, &host.node_name)?;
    let offline = offline.map(|settings| Offline::open(&settings, started));
    let cluster = cluster::connect(context, objects, offline.clone())?;
    let client = cluster.as_ref().map(|cluster| cluster.client.clone());
    let serving = main_port::certificate(args, config, &host)?;
    let main_port = main_port::main_port(config, &host.node_name, serving.clone(), client.as_ref())?;
    let (verdicts, from_probes) = mailbox(replace);
    let (rooms, event_queue) = rooms::make(context, cluster.as_ref(), local, verdicts)?;
    let registered =
        cluster.as_ref().map_or_else(crossbeam_channel::never, |cluster| cluster.registrations.clone());
    let inboxes = Inboxes { event_queue, from_probes, from_objects };
    let (mut threads, thread_handles) = start_threads(context, &rooms, cluster, serving.clone(), inboxes)?;
    let turn = Arc::clone(&thread_handles.turn);
    let handles = Handles::new(context, &rooms, thread_handles, (client.clone(), serving), flags, offline);
    let server =
        server::spawn(settings::server(args, config, main_port), Arc::new(handles), supervisor.on_death())?;
    threads.push(server);
    let pod_resources = pod_resources::serve(&args.root_dir, &rooms);
    let pods_api =
        settings::gates(config).enabled("PodsAPI").then(|| pods_api::serve(&args.root_dir, &rooms));
    let objects = client.as_ref().map(|client| NodeObjects::new(client, &host.node_name));
    let visits = (stats::volume_period(config), registered);
    let registrations = Registrations::open(&args.root_dir, &rooms, objects, visits, supervisor);
    rooms.runtime.check_resolv_conf();
    raise_start_events(&rooms.events, host.cgroups.version.is_v2());
    log::info!("node {} is up after {:?}", host.node_name, started.elapsed());
    let Rooms { probes, image_check, pod_api, .. } = rooms;
    Ok(Agent {
        threads,
        probes,
        image_check,
        client,
        pod_api,
        registrations,
        pod_resources,
        pods_api: pods_api.flatten(),
        turn,
        tracing,
        _locks: locks,
    })
}

/// The ends of channels to which the rooms send since they were made.
struct Inboxes {
    /// Events, for `kube::events`.
    event_queue: Receiver<Box<Event>>,
    /// Changed verdicts of probes, for `sync`.
    from_probes: Inbox<PodUid, ()>,
    /// Pods that refer to an object that has changed, for `sync`.
    from_objects: Inbox<PodUid, ()>,
}

/// Starts the threads of all rooms but `server`.
fn start_threads(
    context: Context<'_>,
    rooms: &Rooms,
    cluster: Option<Cluster>,
    serving: Option<CurrentServingCertificate>,
    inboxes: Inboxes,
) -> Result<(Vec<Running>, ThreadHandles), StartError> {
    let Context { args, config, host, supervisor, .. } = context;
    let Inboxes { event_queue, from_probes, from_objects } = inboxes;
    let (recorder, log) = kube::events::spawn(&host.node_name, event_queue, supervisor.on_death())
        .map_err(thread_error("events"))?;
    let mut threads = vec![recorder];
    // Before the sources, so that the first pods can wait for their images.
    let reports = LatestReport::default();
    threads.extend(start_image_set(context, rooms, &reports)?);
    let mut source_settings = settings::sources(args, config, &host.node_name);
    source_settings.known = PodsAtStart::find(&args.root_dir.join("pods"), rooms.allocations.pods());
    let client = cluster.as_ref().map(|cluster| &cluster.client);
    let source_locations = settings::source_locations(&source_settings, client);
    let stats = stats::collector(context, rooms);
    let (ends, evictions, reclaim) = eviction::channels(rooms, &reports)?;
    let changed = cluster.as_ref().map(|cluster| cluster.health.clone());
    let from = SyncInboxes { probes: from_probes, objects: from_objects, evictions, reclaim };
    let sync = start_sync(context, rooms, cluster.as_ref(), &source_locations, from)?;
    threads.extend(sync.threads);
    let wake = rooms.wake.clone();
    let cgroup_deps = crate::pods::cgroups::Deps {
        open: cgroups::open(config, host, rooms.cri.clone()),
        events: rooms.events.clone(),
        fatal: supervisor.fatal(),
        wake: Box::new(move |pod| wake.put(pod.clone(), ())),
        on_death: supervisor.deaths(),
    };
    threads.extend(rooms.cgroups.spawn(cgroup_deps).map_err(thread_error("cgroups"))?);
    let updates = rooms.assignments.spawn(rooms.runtime.clone(), supervisor.on_death());
    threads.extend(updates.map_err(thread_error("assignments"))?);
    threads.extend(start_observe(context, rooms, sync.changes)?);
    let source_deps =
        sources::Deps { post: sync.sets, events: rooms.events.clone(), on_death: supervisor.deaths() };
    // First, so that the first static pods wait less for their objects.
    let local = sources::local::spawn(&args.local_objects_dir(), &rooms.local, &source_deps);
    threads.push(local.map_err(thread_error("src-objects"))?);
    threads.extend(sources::spawn(&source_settings, &source_deps).map_err(thread_error("sources"))?);
    if let Some(cluster) = cluster {
        threads.push(placement_settings::start_claims(rooms, supervisor.on_death())?);
        let deps = cluster::ClusterDeps {
            log: &log,
            shutting_down: sync.shutting_down,
            sources: &source_deps,
            api_pods: sync.api_pods,
            mirrors: sync.mirrors,
            serving: serving.filter(|_| config.server_tls_bootstrap),
            pressures: eviction::pressures(&reports),
        };
        threads.extend(cluster.start(context, rooms, deps)?);
    }
    threads.extend(oom::start(context, rooms)?);
    threads.extend(pod_cidr::start(context, rooms)?);
    threads.extend(eviction::start(context, rooms, stats.clone(), ends, changed)?);
    let (turn, ephemeral) = (sync.turn, sync.ephemeral);
    Ok((threads, ThreadHandles { source_locations, log, turn, ephemeral, stats, eviction: reports }))
}

/// Starts to read image archives. Pods that wait for an image that becomes available are woken.
fn start_image_set(
    context: Context<'_>,
    rooms: &Rooms,
    reports: &LatestReport,
) -> Result<Option<Running>, StartError> {
    let Some(settings) = settings::image_set(context.args) else { return Ok(None) };
    let (puller, wake, reports) = (Arc::clone(&rooms.puller), rooms.wake.clone(), reports.clone());
    let deps = SetDeps {
        images: rooms.images.clone(),
        events: rooms.events.clone(),
        available: Arc::new(move |names| {
            for pod in puller.retry(names) {
                wake.put(pod, ());
            }
        }),
        has_disk_pressure: Arc::new(move || reports.get().pressures.disk),
        on_death: context.supervisor.deaths(),
    };
    rooms.image_set.spawn(settings, deps).map(Some).map_err(thread_error("image-set"))
}

fn raise_start_events(events: &EventSink, is_cgroup_v2: bool) {
    events.raise(Regarding::Node, EventType::Normal, reasons::STARTING, "Starting kubelet.");
    if !is_cgroup_v2 {
        events.raise(Regarding::Node, EventType::Warning, reasons::CGROUP_V1, CGROUP_V1);
    }
}

/// The room `sync` with its threads, and the other ends of its channels.
struct StartedSync {
    threads: Vec<Running>,
    /// For `sources`.
    sets: Post<SourceName, SourceSet>,
    /// For `observe`.
    changes: Post<ObservedChange, ExitedContainers>,
    /// For `status`: the pods as the API server shows them.
    api_pods: Inbox<PodUid, publish::ApiPod>,
    /// For `mirrors`: the static pods and their mirrors.
    mirrors: Inbox<(), mirror::View>,
    /// For `server`: requests for ephemeral containers.
    ephemeral: ephemeral::Requester,
    /// For `node`: whether the machine shuts down.
    shutting_down: sync::shutdown::ShutdownFlag,
    /// When the sync loop ended its last turn.
    turn: Arc<Mutex<Instant>>,
}

/// What other rooms send to `sync` and its threads.
struct SyncInboxes {
    probes: Inbox<PodUid, ()>,
    objects: Inbox<PodUid, ()>,
    evictions: evictions::SyncEnds,
    reclaim: Receiver<Request>,
}

fn start_sync(
    context: Context<'_>,
    rooms: &Rooms,
    cluster: Option<&Cluster>,
    sources: &BTreeMap<SourceName, String>,
    from: SyncInboxes,
) -> Result<StartedSync, StartError> {
    let Context { args, config, host, supervisor, .. } = context;
    let (sets, from_sources) = mailbox(replace);
    let (changes, from_observe) = mailbox(ExitedContainers::merge);
    let (ended, from_workers) = mailbox(replace);
    // One slot: a bell.
    let (clean_bell, clean_rings) = bounded(1);
    let (ephemeral, ephemeral_requests) = ephemeral::requests();
    let (api_pods_post, api_pods) = publish::inbox();
    let (mirrors_post, mirrors) = mirror::inbox();
    let shutdown_settings = shutdown::settings(args, config)?;
    let wake = shutdown_settings.as_ref().map(|(_, wake)| wake.clone());
    let (shutdown_orders, shutdown) = sync::shutdown::channels(wake);
    let turn = Arc::new(Mutex::new(Instant::now()));

    let deps = sync::Deps {
        workers: workers(context, rooms, cluster, clean_bell.clone(), ended),
        observe: rooms.observe.clone(),
        status: rooms.status.clone(),
        allocations: rooms.allocations.clone(),
        assignments: rooms.assignments.clone(),
        events: rooms.events.clone(),
        view: rooms.view.clone(),
        clean: clean_bell,
        from_sources,
        from_observe,
        from_workers,
        from_probes: from.probes,
        probes: rooms.probes.clone(),
        ephemeral: ephemeral_requests,
        node: cluster.map(|cluster| cluster.node.clone()),
        reader: cluster.map(|cluster| cluster.reader(&host.node_name)),
        health: cluster.map(|cluster| cluster.health.clone()),
        api_pods: cluster.map(|_| api_pods_post),
        mirrors: cluster.map(|_| mirrors_post),
        from_objects: from.objects,
        evictions: from.evictions,
        shutdown,
        offline: cluster.and_then(|cluster| cluster.offline.clone()),
        turn: Arc::clone(&turn),
    };
    let settings = settings::sync(args, config, host, rooms.allocatable.clone(), sources);
    let mut threads = vec![sync::spawn(settings, deps, supervisor.on_death()).map_err(thread_error("sync"))?];
    let shutting_down = sync::shutdown::ShutdownFlag::default();
    if let Some((settings, wake)) = shutdown_settings {
        let deps = shutdown_deps(rooms, cluster, shutdown_orders, shutting_down.clone());
        let running = sync::shutdown::spawn(settings, deps, &wake, supervisor.on_death());
        threads.push(running.map_err(thread_error("shutdown"))?);
    }
    threads.push(start_clean(context, rooms, clean_rings, from.reclaim)?);
    Ok(StartedSync { threads, sets, changes, api_pods, mirrors, ephemeral, shutting_down, turn })
}

/// The pod workers, without threads until they receive pods. `clean`: rung for the cleaner;
/// `ended`: receives workers that ended.
fn workers(
    context: Context<'_>,
    rooms: &Rooms,
    cluster: Option<&Cluster>,
    clean: Sender<()>,
    ended: Post<PodUid, WorkerEnd>,
) -> Workers {
    let Context { args, config, host, .. } = context;
    let is_cloud = args.cloud_provider == "external";
    let settings = pods::Settings { sync_frequency: config.sync_frequency.to_std() };
    let own = host.addresses.clone();
    let deps = pods::Deps {
        runtime: rooms.runtime.clone(),
        observe: rooms.observe.clone(),
        probes: rooms.probes.clone(),
        volumes: Arc::clone(&rooms.volumes),
        cgroups: rooms.cgroups.clone(),
        assignments: rooms.assignments.clone(),
        status: rooms.status.clone(),
        allocations: rooms.allocations.clone(),
        node_addresses: node_addresses(cluster.map(|cluster| &cluster.node), &host.addresses, is_cloud),
        own_addresses: Arc::new(move || own.get()),
        events: rooms.events.clone(),
        image_check: rooms.image_check.clone(),
        api: rooms.pod_api.clone(),
        local: rooms.local.clone(),
        offline: cluster.and_then(|cluster| cluster.offline.clone()),
        clean,
    };
    Workers::new(settings, deps, ended)
}

fn shutdown_deps(
    rooms: &Rooms,
    cluster: Option<&Cluster>,
    orders: Post<(), Orders>,
    flag: sync::shutdown::ShutdownFlag,
) -> sync::shutdown::Deps {
    sync::shutdown::Deps {
        view: rooms.view.clone(),
        status: rooms.status.clone(),
        events: rooms.events.clone(),
        orders,
        flag,
        node: cluster.map(|cluster| cluster.health.clone()),
        publishes: cluster.is_some(),
    }
}

fn start_clean(
    context: Context<'_>,
    rooms: &Rooms,
    bell: Receiver<()>,
    reclaim: Receiver<Request>,
) -> Result<Running, StartError> {
    let Context { args, config, supervisor, .. } = context;
    let image_policy = settings::image_gc(config);
    let images = ImageCollector::new(rooms.images.clone(), image_policy, rooms.events.clone(), steady::now())
        .with_peers(CollectorPeers {
            set: rooms.image_set.clone(),
            puller: Arc::clone(&rooms.puller),
            check: rooms.image_check.clone(),
        });
    let rotation = settings::log_rotation(args, config);
    let deps = sync::clean::Deps {
        cri: rooms.cri.clone(),
        observe: rooms.observe.clone(),
        view: rooms.view.clone(),
        collector: Collector::new(
            settings::container_gc(args, config),
            rooms.cri.clone(),
            rooms.events.clone(),
        ),
        images,
        collects_images: !image_policy.is_off(),
        rotator: rotation.map(|rotation| {
            (Rotator::new(rotation, rooms.cri.clone()), config.container_log_monitor_interval.to_std())
        }),
        log_workers: usize::try_from(config.container_log_max_workers).unwrap_or(1),
        log_quota: settings::log_quota(args, config),
        chains: config.make_iptables_util_chains.then(Chains::find_programs),
        volumes: Arc::clone(&rooms.volumes),
        cgroups: rooms.cgroups.clone(),
        place_processes: cgroups::place_processes(config),
        events: rooms.events.clone(),
        runtime: rooms.runtime.clone(),
        allocations: rooms.allocations.clone(),
        bell,
        reclaim,
    };
    sync::clean::spawn(deps, supervisor.on_death()).map_err(thread_error("clean"))
}

fn start_observe(
    context: Context<'_>,
    rooms: &Rooms,
    changes: Post<ObservedChange, ExitedContainers>,
) -> Result<Vec<Running>, StartError> {
    let Context { config, supervisor, .. } = context;
    // DIFFERS: the gate is off by default in the Go kubelet; here only a configuration that sets it,
    // or all alpha gates, switches events off.
    let events = settings::gates(config).configured("EventedPLEG") != Some(false);
    let settings = observe::Settings { events };
    observe::spawn(&rooms.observe, settings, changes, &supervisor.deaths()).map_err(thread_error("observe"))
}
