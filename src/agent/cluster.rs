//! What a node of a cluster has beside one on its own: the client, the Node object, the
//! lease, statuses and mirrors at the API server, and the objects that pods name.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use jiff::Timestamp;

use super::wiring::gates;
use super::{StartError, shutdown};
use crate::config::{self, AgentArgs, KubeletConfiguration};
use crate::cri::{ImageClient, RuntimeClient};
use crate::kube::certificates::serving::Serving;
use crate::kube::certificates::{
    self, Identity, OpenBootstrap, Purpose, Renewed, Store, Template, bootstrap,
};
use crate::kube::client::{Client, CredentialSource, Credentials, Issued};
use crate::kube::events::EventLog;
use crate::kube::objects::Strategy;
use crate::kube::{PodApi, event_sink, kubeconfig};
use crate::model::api;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::model::kubeconfig::Kubeconfig;
use crate::node::{self, NodeReader, NodeWatch, Reservations};
use crate::observe::Observe;
use crate::pods::mirror;
use crate::resources::Roots;
use crate::resources::machine::Machine;
use crate::resources::system::SystemFacts;
use crate::server::KUBERNETES_VERSION;
use crate::sources::{self, bound};
use crate::status::{Activity, StatusCache, publish};
use crate::sync::shutdown::Flag;
use crate::sync::view::{Entry, View};
use crate::transport::api::Breaker;
use crate::util::mailbox::{Inbox, Post};
use crate::util::threads::{Died, OnDeath, Running};

/// The node's handles on its cluster; the threads are started later.
pub(super) struct Cluster {
    pub(super) client: Client,
    pub(super) node: NodeWatch,
    pub(super) pod_api: PodApi,
    /// Rung when the runtime's health has changed.
    pub(super) health: Sender<()>,
    health_rings: Receiver<()>,
    services: Running,
    renewed: Option<Renewed>,
}

/// What the threads work with.
pub(super) struct Parts<'a> {
    pub(super) args: &'a AgentArgs,
    pub(super) config: &'a KubeletConfiguration,
    pub(super) node_name: &'a str,
    pub(super) machine: &'a Machine,
    pub(super) reservations: Reservations,
    pub(super) observe: Observe,
    pub(super) images: ImageClient,
    pub(super) cri: RuntimeClient,
    pub(super) events: EventSink,
    pub(super) log: &'a EventLog,
    pub(super) status: StatusCache,
    pub(super) view: View,
    pub(super) shutting_down: Flag,
    pub(super) sources: &'a sources::Deps,
    /// What `sync` tells of the pods that the API server shows.
    pub(super) api_pods: Inbox<PodUid, publish::ApiPod>,
    /// What it tells of static pods.
    pub(super) mirrors: Inbox<(), mirror::View>,
    /// The serving certificate, if the cluster issues it.
    pub(super) serving: Option<Serving>,
}

/// The handles, if a kubeconfig is given. Nothing is asked of the API server yet but the
/// services, which pods need before anything else.
pub(super) fn connect(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    node_name: &str,
    objects: Post<PodUid, ()>,
    deaths: &Sender<Died>,
) -> Result<Option<Cluster>, StartError> {
    let Some((credentials, renewed)) = credentials(args, config, node_name)? else { return Ok(None) };
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
    let (pod_api, services) =
        PodApi::start(&client, strategy, Box::new(time_to_live), Box::new(changed), deaths)
            .map_err(|source| StartError::Thread { name: "services", source })?;
    let (health, health_rings) = bounded(1);
    Ok(Some(Cluster { client, node, pod_api, health, health_rings, services, renewed }))
}

impl Cluster {
    /// What reads our Node object anew.
    pub(super) fn reader(&self, node_name: &str) -> NodeReader {
        NodeReader::new(&self.client, node_name, &self.node)
    }

    /// Starts the threads.
    pub(super) fn start(self, parts: Parts<'_>, deaths: &Sender<Died>) -> Result<Vec<Running>, StartError> {
        let thread = |name: &'static str| move |source| StartError::Thread { name, source };
        let on_death = || OnDeath::Supervisor(deaths.clone());
        let Cluster { client, node, pod_api: _, health: _, health_rings, services, renewed } = self;
        let mut threads = vec![services];
        let config = parts.config;
        let mut names = None;
        if renewed.is_some() || parts.serving.is_some() {
            let settings = certificates::Settings {
                cert_dir: parts.args.cert_dir.clone(),
                node_name: parts.node_name.to_owned(),
                client: renewed,
                serving: parts.serving,
            };
            let (running, certificates) =
                certificates::spawn(settings, &client, on_death()).map_err(thread("certs"))?;
            threads.push(running);
            names = Some(certificates);
        }
        let limits = event_sink::limits(config.event_record_qps, config.event_burst);
        threads
            .push(event_sink::spawn(parts.log, &client, limits, on_death()).map_err(thread("events-api"))?);
        let shutting_down = parts.shutting_down;
        let host = node::Host {
            machine: parts.machine.clone(),
            system: SystemFacts::read(&Roots::default(), Path::new("/")),
            disk: config.local_storage_capacity_isolation.then(|| parts.args.root_dir.clone()),
            max_pods: config.max_pods,
            pods_per_core: config.pods_per_core,
            reservations: parts.reservations,
            max_images: usize::try_from(config.node_status_max_images).ok(),
            observe: parts.observe.clone(),
            images: parts.images,
            cri: parts.cri,
            told: node::Told {
                problems: Some(Arc::new(move || {
                    shutting_down.is_on().then(|| shutdown::NOT_READY.to_owned()).into_iter().collect()
                })),
                ..node::Told::default()
            },
            listed: node::Listed::default(),
            certificates: names,
        };
        threads.extend(
            node::spawn(
                node_settings(parts.args, config, parts.node_name),
                node::Deps {
                    client: client.clone(),
                    sensors: Box::new(host),
                    events: parts.events.clone(),
                    watch: node.clone(),
                    bell: health_rings,
                },
                deaths,
            )
            .map_err(thread("node"))?,
        );
        let (view, observe) = (parts.view, parts.observe.clone());
        let activity = move |uid: &PodUid| match view.get().pods.get(uid) {
            Some(Entry { worker: Some(worker), .. }) if !worker.report().has_stopped() => Activity::MayRun,
            Some(Entry { worker: Some(_), .. }) => Activity::Stopped,
            // A refused pod may have left-overs of an earlier life.
            _ if observe.still_runs(uid) => Activity::MayRun,
            _ => Activity::Stopped,
        };
        threads.push(
            publish::spawn(
                publish::Deps {
                    status: parts.status,
                    pods: parts.api_pods,
                    api: Box::new(client.clone()),
                    activity: Box::new(activity),
                },
                on_death(),
            )
            .map_err(thread("status"))?,
        );
        let shown = node.clone();
        threads.push(
            mirror::spawn(
                mirror::Deps {
                    views: parts.mirrors,
                    api: Box::new(client.clone()),
                    node: Box::new(move || shown.object()),
                },
                on_death(),
            )
            .map_err(thread("mirrors"))?,
        );
        threads.push(bound::spawn(parts.node_name, client, parts.sources).map_err(thread("watch/pods"))?);
        Ok(threads)
    }
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
        declared_features: node::declared_features(|gate| gates.enabled(gate)),
        update_every: config.node_status_update_frequency.to_std(),
        report_every: config.node_status_report_frequency.to_std(),
        lease_seconds: config.node_lease_duration_seconds,
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

/// Requests per second, and at once. Zero is the client library's default, not no limit.
fn rate(config: &KubeletConfiguration) -> (f64, u32) {
    event_sink::limits(config.kube_api_qps, config.kube_api_burst)
}

/// No certificate yet: a request that is not made needs no refusal.
#[derive(Debug)]
struct Awaited;

impl CredentialSource for Awaited {
    fn current(&self, _: Instant, _: &Breaker) -> Result<Issued, String> {
        Err("the node's first certificate has not been issued yet".to_owned())
    }

    fn refused(&self, _: &Issued) -> bool {
        false
    }
}

/// What to show to the API server, and what of it is renewed. `None` on a node of its own.
fn credentials(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    node_name: &str,
) -> Result<Option<(Credentials, Option<Renewed>)>, StartError> {
    let Some(path) = &args.kubeconfig else { return Ok(None) };
    let now = Timestamp::now();
    let store = Store::new(&args.cert_dir, Purpose::Client);
    let mut own = None;
    if path.exists() {
        own = Some(read(path)?);
        let identity = own.as_ref().and_then(|(_, credentials)| credentials.endpoint.identity.as_ref());
        let why = identity.and_then(|identity| bootstrap::why_needed(Some(&identity.certificate), now));
        if let Some(why) = why.filter(|_| args.bootstrap_kubeconfig.is_some()) {
            log::info!("{}: {why}; a new one is asked for", path.display());
            own = None;
        }
    }
    let opener = args.bootstrap_kubeconfig.clone().map(|path| -> OpenBootstrap {
        Box::new(move || {
            let (_, credentials) = read(&path).map_err(|error| error.to_string())?;
            Client::new(credentials, None).map_err(|error| error.to_string())
        })
    });
    if let Some((_, mut credentials)) = own {
        let identity = credentials.endpoint.identity.as_ref();
        if !config.rotate_certificates || identity.is_none() {
            return Ok(Some((credentials, None)));
        }
        // The one that was issued last, which a kubeconfig with the data in place does not have.
        let current = certificates::client_identity(&store, identity, now);
        if let Some(current) = current.as_ref().filter(|current| !current.facts.is_expired(now)) {
            credentials.endpoint.identity = Some(current.for_client());
        }
        return Ok(Some((credentials, Some(Renewed { current, bootstrap: opener, kubeconfig: None }))));
    }
    let Some(first) = &args.bootstrap_kubeconfig else {
        return Err(StartError::Refused(format!(
            "kubeconfig {}: no such file, and no --bootstrap-kubeconfig to make it with",
            path.display()
        )));
    };
    let (file, mut credentials) = read(first)?;
    let cluster = bootstrap::Cluster::of_kubeconfig(&file, first).unwrap_or_default();
    let current = bootstrap::good(&store, &Template::client(node_name), now);
    credentials.endpoint.identity = current.as_ref().map(Identity::for_client);
    credentials.token = current.is_none().then(|| -> Arc<dyn CredentialSource> { Arc::new(Awaited) });
    let renewed = Renewed { current, bootstrap: opener, kubeconfig: Some((path.clone(), cluster)) };
    Ok(Some((credentials, Some(renewed))))
}

fn read(path: &Path) -> Result<(Kubeconfig, Credentials), StartError> {
    let refused = |why: String| StartError::Refused(format!("kubeconfig {why}"));
    let file = config::kubeconfig::load(path).map_err(|problem| refused(problem.to_string()))?;
    let credentials = kubeconfig::credentials(&file, path)
        .map_err(|error| refused(format!("{}: {error}", path.display())))?;
    Ok((file, credentials))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DefaultSet;
    use crate::config::effects::default_configuration;

    #[test]
    fn a_rate_of_zero_is_not_unlimited() {
        let mut config = default_configuration(DefaultSet::WithFile);
        assert_eq!(rate(&config), (50.0, 100));
        (config.kube_api_qps, config.kube_api_burst) = (0, 0);
        assert_eq!(rate(&config), (5.0, 10));
    }
}
