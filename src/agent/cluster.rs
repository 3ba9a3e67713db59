//! The parts that only a node of a cluster has: the client, the Node object, the lease, statuses and
//! mirrors at the API server, and the objects that pods refer to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::credentials::credentials;
use super::error::{StartError, thread_error};
use super::rooms::{Context, Rooms};
use super::settings::{declared_features, gates};
use super::shutdown;
use crate::config::{AgentArgs, Gates, KubeletConfiguration};
use crate::kube::certificates::serving::CurrentServingCertificate;
use crate::kube::certificates::{self, Certificates, ClientRenewal};
use crate::kube::client::Client;
use crate::kube::events::EventLog;
use crate::kube::objects::Strategy;
use crate::kube::pod_certificates::PodCertificates;
use crate::kube::tokens::Tokens;
use crate::kube::{Hook, PodDependencies, ProjectedCertificates, event_sink};
use crate::model::api;
use crate::model::ids::PodUid;
use crate::node::{self, NodeReader, NodeWatch};
use crate::offline::{self, Offline};
use crate::pods::mirror;
use crate::resources::system::SystemFacts;
use crate::resources::{Roots, machine, network};
use crate::server::KUBERNETES_VERSION;
use crate::sources::{self, bound};
use crate::status::{Activity, publish};
use crate::sync::shutdown::ShutdownFlag;
use crate::sync::view::Entry;
use crate::util::mailbox::{Inbox, Post};
use crate::util::threads::Running;
use crate::volumes::kind::NodeLabels;
use crate::volumes::{self, NodeVolumes, Volumes};

/// The node's handles on its cluster; the threads are started later.
pub(super) struct Cluster {
    pub(super) client: Client,
    pub(super) node: NodeWatch,
    pub(super) pod_api: PodDependencies,
    /// Rung when the runtime's health has changed.
    pub(super) health: Sender<()>,
    health_rings: Receiver<()>,
    /// Rung when the Node object is new.
    registered: Sender<()>,
    /// The other end of `registered`.
    pub(super) registrations: Receiver<()>,
    services: Running,
    renewed: Option<ClientRenewal>,
    /// The last known objects; `None` without `--offline`.
    pub(super) offline: Option<Offline>,
}

/// The dependencies of the threads in addition to the handles of the rooms.
pub(super) struct ClusterDeps<'a> {
    pub(super) log: &'a EventLog,
    pub(super) shutting_down: ShutdownFlag,
    pub(super) sources: &'a sources::Deps,
    /// The pods as the API server shows them, from `sync`.
    pub(super) api_pods: Inbox<PodUid, publish::ApiPod>,
    /// The static pods and their mirrors, from `sync`.
    pub(super) mirrors: Inbox<(), mirror::View>,
    /// The serving certificate, if the cluster issues it.
    pub(super) serving: Option<CurrentServingCertificate>,
    pub(super) pressures: Arc<dyn Fn() -> node::Pressures + Send + Sync>,
}

/// Makes the client and the handles; `None` without `--kubeconfig`. Starts only the watch of
/// services, which the first pods need. UIDs of pods that refer to an object that has
/// changed go to `objects`.
pub(super) fn connect(
    context: Context<'_>,
    objects: Post<PodUid, ()>,
    offline: Option<Offline>,
) -> Result<Option<Cluster>, StartError> {
    let Context { args, config, host, supervisor, .. } = context;
    let Some((credentials, renewed)) = credentials(args, config, &host.node_name)? else { return Ok(None) };
    if let Some(proxy) = &credentials.endpoint.proxy {
        log::info!("the API server is reached through the proxy {proxy}");
    }
    let client = Client::new(credentials, Some(rate(config)))
        .map_err(|error| StartError::Refused(error.to_string()))?;
    let node = NodeWatch::new();
    let annotated = node.clone();
    let time_to_live = move || {
        let node = annotated.object()?;
        let seconds = node.metadata.annotations.as_ref()?.get("node.alpha.kubernetes.io/ttl")?;
        seconds.parse().ok().map(Duration::from_secs)
    };
    let strategy = Strategy::from_config(&config.config_map_and_secret_change_detection_strategy);
    let changed = move |uid: &PodUid| objects.put(uid.clone(), ());
    let (mut pod_api, services) = PodDependencies::start(
        &client,
        strategy,
        Box::new(time_to_live),
        Box::new(changed),
        &supervisor.deaths(),
        offline.clone(),
    )
    .map_err(thread_error("services"))?;
    restrict_certificates(&mut pod_api.trust, &gates(config));
    let (health, health_rings) = bounded(1);
    let (registered, registrations) = bounded(1);
    Ok(Some(Cluster {
        client,
        node,
        pod_api,
        health,
        health_rings,
        registered,
        registrations,
        services,
        renewed,
        offline,
    }))
}

impl Cluster {
    /// Reads the node's object again.
    pub(super) fn reader(&self, node_name: &str) -> NodeReader {
        NodeReader::new(&self.client, node_name, &self.node)
    }

    /// The controller that attaches volumes.
    pub(super) fn controller(&self) -> volumes::Controller {
        let (node, health) = (self.node.clone(), self.health.clone());
        volumes::Controller {
            shown: Box::new(move || {
                // Whether a volume is attached, only the API server knows.
                let node = node.confirmed()?;
                let status = node.status.as_ref()?;
                Some(NodeVolumes {
                    in_use: status.volumes_in_use.iter().flatten().cloned().collect(),
                    attached: status
                        .volumes_attached
                        .iter()
                        .flatten()
                        .map(|volume| volume.name.clone())
                        .collect(),
                })
            }),
            // If the bell is full, the thread wakes anyway.
            changed: Box::new(move || {
                let _ = health.try_send(());
            }),
        }
    }

    pub(super) fn labels(&self) -> NodeLabels {
        let node = self.node.clone();
        Box::new(move || node.object()?.metadata.labels.clone().or_else(|| Some(BTreeMap::new())))
    }

    pub(super) fn start(
        self,
        context: Context<'_>,
        rooms: &Rooms,
        deps: ClusterDeps<'_>,
    ) -> Result<Vec<Running>, StartError> {
        let Context { args, config, host, supervisor, .. } = context;
        let reader = self.reader(&host.node_name);
        let Cluster {
            client,
            node,
            pod_api,
            health,
            health_rings,
            registered,
            services,
            renewed,
            offline,
            ..
        } = self;
        // A random part is added to the period of syncs, at most half of it.
        let sync_limit = config.sync_frequency.to_std().saturating_mul(2);
        let certificates = &pod_api.trust.certificates;
        client.returns().set_hooks(vec![hook(&rooms.volumes, &pod_api.tokens, certificates, sync_limit)]);
        let mut threads = vec![services];
        // First, so that it stops after all threads that pass it what they read.
        if let Some(offline) = &offline {
            let running = offline.spawn(
                offline_deps(
                    rooms,
                    &node,
                    reader,
                    pod_api,
                    sync_limit,
                    bound::reader(&host.node_name, &client),
                    health,
                ),
                supervisor.on_death(),
            );
            threads.push(running.map_err(thread_error("offline"))?);
        }
        let mut certificates = None;
        if renewed.is_some() || deps.serving.is_some() {
            let settings = certificates::Settings {
                cert_dir: args.cert_dir.clone(),
                node_name: host.node_name.clone(),
                client: renewed,
                serving: deps.serving,
            };
            let (running, handle) = certificates::spawn(settings, &client, supervisor.on_death())
                .map_err(thread_error("certs"))?;
            threads.push(running);
            certificates = Some(handle);
        }
        let limits = event_sink::limits(config.event_record_qps, config.event_burst);
        let known = node.clone();
        let uid = Box::new(move || known.uid());
        let sender = event_sink::spawn(deps.log, &client, limits, uid, supervisor.on_death());
        threads.push(sender.map_err(thread_error("events-api"))?);
        let node_deps = node::Deps {
            client: client.clone(),
            sensors: Box::new(sensors(
                context,
                rooms,
                (deps.shutting_down, deps.pressures),
                certificates,
                registered,
                offline.clone(),
            )),
            events: rooms.events.clone(),
            watch: node.clone(),
            bell: health_rings,
            lease_report: offline.clone().map(lease_report),
        };
        let mut node_settings = node_settings(args, config, &host.node_name);
        node_settings.resets_devices = rooms.devices.is_new();
        threads.extend(
            node::spawn(node_settings, node_deps, &supervisor.deaths()).map_err(thread_error("node"))?,
        );
        let publish_deps = publish::Deps {
            status: rooms.status.clone(),
            pods: deps.api_pods,
            api: Box::new(client.clone()),
            activity: Box::new(activity(rooms)),
        };
        threads.push(publish::spawn(publish_deps, supervisor.on_death()).map_err(thread_error("status"))?);
        let shown = node.clone();
        let mirror_deps = mirror::Deps {
            views: deps.mirrors,
            api: Box::new(client.clone()),
            node: Box::new(move || shown.confirmed()),
        };
        threads.push(mirror::spawn(mirror_deps, supervisor.on_death()).map_err(thread_error("mirrors"))?);
        let pods = bound::spawn(&host.node_name, client, deps.sources, offline);
        threads.push(pods.map_err(thread_error("watch/pods"))?);
        Ok(threads)
    }
}

/// Passes on when the node's lease was renewed: by the lease, the control plane decides whether the node is
/// away.
fn lease_report(offline: Offline) -> node::LeaseReport {
    let pods = offline.clone();
    node::LeaseReport {
        attempt: Box::new(move |begin| match begin {
            Some(begin) => offline.contact(begin),
            None => offline.contact_failed(),
        }),
        stops_within: Box::new(move |time| pods.stops_within(time)),
    }
}

/// What is to be done at a return of the API server, in addition to the ends of waits for requests.
/// `sync_limit`: within this time each pod is synced without a cause.
fn hook(
    volumes: &Arc<Volumes>,
    tokens: &Tokens,
    certificates: &PodCertificates,
    sync_limit: Duration,
) -> Hook {
    // The client must not keep the volumes after the end of the other rooms.
    let (volumes, tokens, certificates) = (Arc::downgrade(volumes), tokens.clone(), certificates.clone());
    Box::new(move || {
        let mut pods = tokens.returned(sync_limit);
        pods.extend(certificates.returned());
        volumes.upgrade().iter().for_each(|volumes| volumes.api_returned(&pods));
    })
}

fn offline_deps(
    rooms: &Rooms,
    node: &NodeWatch,
    reader: NodeReader,
    pod_api: PodDependencies,
    sync_limit: Duration,
    read_pods: offline::ReadPods,
    health: Sender<()>,
) -> offline::Deps {
    let (confirmed, assumed, released) = (node.clone(), node.clone(), node.clone());
    let (status, services, named) =
        (rooms.status.clone(), pod_api.services.clone(), pod_api.services.clone());
    // As for the hook.
    let volumes = Arc::downgrade(&rooms.volumes);
    offline::Deps {
        node: Box::new(move || confirmed.confirmed()),
        node_changes: node.subscribe(),
        read_node: Box::new(move || reader.fact()),
        read_pods,
        use_node: Box::new(move |node| assumed.assume(node)),
        release_node: Box::new(move || released.settle()),
        status_changes: rooms.status.changes(),
        statuses: Box::new(move |seen| {
            // Before the read, so that a status that changes meanwhile is read again.
            let version = status.version();
            let changed = status.newer_than(seen).into_iter();
            (version, changed.filter_map(|(uid, _)| status.get(&uid).map(|status| (uid, status))).collect())
        }),
        service_changes: services.changes(),
        cluster: Box::new(move || named.cluster()),
        services: Box::new(move |namespaces| services.stored(namespaces)),
        needs: Box::new(PodDependencies::stored_keys),
        entered: Box::new(move |phase| {
            pod_api.entered(phase);
            if phase == offline::Phase::Online {
                let unrenewed: Vec<PodUid> = pod_api.take_unrenewed(sync_limit).into_iter().collect();
                if !unrenewed.is_empty() {
                    volumes.upgrade().iter().for_each(|volumes| volumes.api_returned(&unrenewed));
                }
            }
            // A condition of the Node object shows it. If the bell is full, its thread wakes anyway.
            let _ = health.try_send(());
        }),
        has_address: Box::new(|| network::has_address(&Roots::default())),
        events: rooms.events.clone(),
    }
}

fn sensors(
    context: Context<'_>,
    rooms: &Rooms,
    (shutting_down, pressures): (ShutdownFlag, Arc<dyn Fn() -> node::Pressures + Send + Sync>),
    certificates: Option<Certificates>,
    registered: Sender<()>,
    offline: Option<Offline>,
) -> node::Host {
    let Context { args, config, host, .. } = context;
    node::Host {
        machine: host.machine.clone(),
        system: SystemFacts::read(&Roots::default(), Path::new("/")),
        disk: config.local_storage_capacity_isolation.then(|| args.root_dir.clone()),
        max_pods: config.max_pods,
        pods_per_core: config.pods_per_core,
        reservations: rooms.reservations.clone(),
        max_images: usize::try_from(config.node_status_max_images).ok(),
        observe: rooms.observe.clone(),
        images: rooms.images.clone(),
        cri: rooms.cri.clone(),
        others: node::ExternalFacts {
            pressures: Some(pressures),
            problems: Some(Arc::new(move || {
                shutting_down.is_on().then(|| shutdown::NOT_READY.to_owned()).into_iter().collect()
            })),
            volumes_in_use: Some(Arc::new(UsedVolumes(Arc::clone(&rooms.volumes)))),
            devices: {
                let devices = rooms.devices.clone();
                Some(Arc::new(move || devices.capacity()))
            },
            registered: {
                let devices = rooms.devices.clone();
                Some(Arc::new(move || {
                    devices.registered_node();
                    let _ = registered.try_send(());
                }))
            },
            offline: offline.map(|offline| {
                let read = move || {
                    let (holds, reason, message) = offline.condition()?;
                    Some(node::OfflineCondition { holds, reason, message })
                };
                Arc::new(read) as node::ReadOffline
            }),
            ..node::ExternalFacts::default()
        },
        listed: node::ListedImages::default(),
        certificates,
    }
}

/// The volumes in use, for the node's status.
struct UsedVolumes(Arc<Volumes>);

impl node::VolumesInUse for UsedVolumes {
    fn list(&self) -> (u64, Vec<String>) {
        self.0.list_in_use()
    }

    fn stored(&self, number: u64, stored: &BTreeSet<String>) {
        self.0.in_use_stored(number, stored);
    }
}

/// Whether containers of a pod may still run: until then its object must not be deleted, and its end is
/// not reported.
fn activity(rooms: &Rooms) -> impl Fn(&PodUid) -> Activity + Send + 'static {
    let (view, observe, claims) = (rooms.view.clone(), rooms.observe.clone(), rooms.claims.clone());
    move |uid| match view.get().pods.get(uid) {
        Some(Entry { worker: Some(worker), .. }) if !worker.report().has_stopped() => Activity::MayRun,
        Some(Entry { worker: Some(_), .. }) => Activity::Stopped,
        _ => activity_without_worker(observe.still_runs(uid), claims.uses_any(uid)),
    }
}

/// A rejected pod may still run if it was started before a restart of the agent. While its claims are
/// prepared it counts as running, too: as soon as the API server shows its end, its claims can be allocated
/// to another pod (Go: `PodCouldHaveRunningContainers`).
fn activity_without_worker(still_runs: bool, uses_claims: bool) -> Activity {
    if still_runs || uses_claims { Activity::MayRun } else { Activity::Stopped }
}

fn node_settings(args: &AgentArgs, config: &KubeletConfiguration, node_name: &str) -> node::Settings {
    let gates = gates(config);
    node::Settings {
        name: node_name.to_owned(),
        register: config.register_node,
        labels: args.node_labels.clone(),
        taints: config.register_with_taints.iter().map(taint).collect(),
        provider_id: config.provider_id.clone(),
        external_cloud: args.cloud_provider == "external",
        controller_attach_detach: config.enable_controller_attach_detach,
        node_ips: args.node_ips.clone(),
        port: u16::try_from(config.port).unwrap_or(0),
        kubelet_version: KUBERNETES_VERSION.to_owned(),
        in_user_namespace: gates
            .enabled("KubeletInUserNamespace")
            .then(|| machine::in_user_namespace(&Roots::default())),
        declared_features: declared_features(config).unwrap_or_default(),
        update_every: config.node_status_update_frequency.to_std(),
        report_every: config.node_status_report_frequency.to_std(),
        lease_seconds: config.node_lease_duration_seconds,
        resets_devices: false,
    }
}

fn taint(from: &crate::config::Taint) -> api::Taint {
    api::Taint {
        key: from.key.clone(),
        value: Some(from.value.clone()).filter(|value| !value.is_empty()),
        effect: from.effect.clone(),
        time_added: None,
    }
}

/// Requests per second, and the burst. Zero means the client library's default, not no limit.
fn rate(config: &KubeletConfiguration) -> (f64, u32) {
    event_sink::client_limits(config.kube_api_qps, config.kube_api_burst)
}

/// Without their gates, the sources of certificates in projected volumes are those of a node without an
/// API server: a volume that names one fails (Go: `NewMainKubelet`).
fn restrict_certificates(trust: &mut ProjectedCertificates, gates: &Gates) {
    let none = ProjectedCertificates::default();
    if !gates.enabled("ClusterTrustBundleProjection") {
        trust.bundles = none.bundles;
    }
    if !gates.enabled("PodCertificateRequest") {
        trust.certificates = none.certificates;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DefaultSet;
    use crate::config::effects::default_configuration;

    #[test]
    fn end_of_a_rejected_pod_is_withheld_until_it_has_stopped_and_its_claims_are_unprepared() {
        assert_eq!(activity_without_worker(true, false), Activity::MayRun);
        assert_eq!(activity_without_worker(false, true), Activity::MayRun);
        assert_eq!(activity_without_worker(false, false), Activity::Stopped);
    }

    #[test]
    fn a_rate_of_zero_is_not_unlimited() {
        let mut config = default_configuration(DefaultSet::WithFile);
        assert_eq!(rate(&config), (50.0, 100));
        (config.kube_api_qps, config.kube_api_burst) = (0, 0);
        assert_eq!(rate(&config), (5.0, 10));
    }
}
