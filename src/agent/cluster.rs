//! What a node of a cluster has beside one on its own: the client, the Node object, the
//! lease, statuses and mirrors at the API server, and the objects that pods name.

use std::path::Path;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::StartError;
use super::wiring::gates;
use crate::cli::AgentArgs;
use crate::config::KubeletConfiguration;
use crate::cri::{ImageClient, RuntimeClient};
use crate::kube::client::{Client, Credentials};
use crate::kube::events::EventLog;
use crate::kube::objects::Strategy;
use crate::kube::{PodApi, event_sink};
use crate::model::api;
use crate::model::event::EventSink;
use crate::model::ids::PodUid;
use crate::node::{self, NodeWatch, Reservations};
use crate::observe::Observe;
use crate::pods::mirror;
use crate::resources::Roots;
use crate::resources::machine::Machine;
use crate::resources::system::SystemFacts;
use crate::sources::{self, bound};
use crate::status::{Activity, StatusCache, publish};
use crate::sync::view::View;
use crate::transport::api::{Endpoint, Identity, Roots as Authorities};
use crate::util::mailbox::{Inbox, Post};
use crate::util::threads::{Died, OnDeath, Running};

/// The release of Kubernetes that this agent behaves like.
const KUBELET_VERSION: &str = "v1.36.3";

/// The node's handles on its cluster; the threads are started later.
pub(super) struct Cluster {
    pub(super) client: Client,
    pub(super) node: NodeWatch,
    pub(super) pod_api: PodApi,
    /// Rung when the runtime's health has changed.
    pub(super) health: Sender<()>,
    health_rings: Receiver<()>,
    services: Running,
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
    pub(super) sources: &'a sources::Deps,
    /// What `sync` tells of the pods that the API server shows.
    pub(super) api_pods: Inbox<PodUid, publish::ApiPod>,
    /// What it tells of static pods.
    pub(super) mirrors: Inbox<(), mirror::View>,
}

/// The handles, if a kubeconfig is given. Nothing is asked of the API server yet but the
/// services, which pods need before anything else.
pub(super) fn connect(
    args: &AgentArgs,
    config: &KubeletConfiguration,
    objects: Post<PodUid, ()>,
    deaths: &Sender<Died>,
) -> Result<Option<Cluster>, StartError> {
    let Some(path) = &args.kubeconfig else { return Ok(None) };
    let credentials = read_kubeconfig(path).map_err(|why| {
        StartError::Refused(format!("kubeconfig {}: {why}", path.display()))
    })?;
    let qps = (f64::from(config.kube_api_qps), u32::try_from(config.kube_api_burst).unwrap_or(0));
    let client = Client::new(credentials, Some(qps).filter(|(qps, _)| *qps > 0.0))
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
    Ok(Some(Cluster { client, node, pod_api, health, health_rings, services }))
}

impl Cluster {
    /// Starts the threads.
    pub(super) fn start(
        self,
        parts: Parts<'_>,
        deaths: &Sender<Died>,
    ) -> Result<Vec<Running>, StartError> {
        let thread = |name: &'static str| move |source| StartError::Thread { name, source };
        let on_death = || OnDeath::Supervisor(deaths.clone());
        let Cluster { client, node, pod_api: _, health: _, health_rings, services } = self;
        let mut threads = vec![services];
        let config = parts.config;
        let limits = event_sink::limits(config.event_record_qps, config.event_burst);
        threads.push(
            event_sink::spawn(parts.log, &client, limits, on_death()).map_err(thread("events-api"))?,
        );
        let host = node::Host {
            machine: parts.machine.clone(),
            system: SystemFacts::read(&Roots::default(), Path::new("/")),
            disk: config.local_storage_capacity_isolation.then(|| parts.args.root_dir.clone()),
            max_pods: config.max_pods,
            pods_per_core: config.pods_per_core,
            reservations: parts.reservations,
            max_images: usize::try_from(config.node_status_max_images).ok(),
            observe: parts.observe,
            images: parts.images,
            cri: parts.cri,
            told: node::Told::default(),
            listed: node::Listed::default(),
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
        let view = parts.view;
        let activity = move |uid: &PodUid| match view.get().pods.get(uid) {
            Some(entry) if entry.worker.as_ref().is_none_or(|worker| worker.report().has_stopped()) => {
                Activity::Stopped
            }
            None => Activity::Stopped,
            Some(_) => Activity::MayRun,
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
        kubelet_version: KUBELET_VERSION.to_owned(),
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

fn read_kubeconfig(path: &Path) -> Result<Credentials, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    let documents = crate::config::yaml::parse_bytes(&bytes).map_err(|error| error.to_string())?;
    let value = documents.into_iter().next().map(|document| document.value).unwrap_or_default();
    let text = |pointer: &str| value.pointer(pointer).and_then(|it| it.as_str()).map(str::to_owned);
    let file = |pointer: &str| {
        if let Some(data) = value.pointer(&format!("{pointer}-data")) {
            let bytes: crate::model::ByteString =
                serde_json::from_value(data.clone()).map_err(|error| error.to_string())?;
            return Ok(Some(bytes.0));
        }
        text(pointer).map(|name| std::fs::read(path.parent().unwrap_or(Path::new("/")).join(name)))
            .transpose()
            .map_err(|error| error.to_string())
    };
    let server = text("/clusters/0/cluster/server").ok_or("no server")?;
    let rest = server.strip_prefix("https://").ok_or("only https")?;
    let (host, port) = rest.rsplit_once(':').ok_or("no port")?;
    let ca = file("/clusters/0/cluster/certificate-authority")?.ok_or("no CA")?;
    let certificate = file("/users/0/user/client-certificate")?.ok_or("no certificate")?;
    let key = file("/users/0/user/client-key")?.ok_or("no key")?;
    let endpoint = Endpoint {
        https: true,
        host: host.to_owned(),
        port: port.parse().map_err(|_| "port")?,
        roots: Authorities::Pem(ca),
        server_name: None,
        identity: Some(Identity { certificate, key }),
    };
    Ok(Credentials { endpoint, base_path: String::new(), token: None })
}

