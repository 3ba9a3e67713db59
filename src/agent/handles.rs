//! The handles that the server's responses are made from.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::rooms::{Context, Rooms};
use super::settings::{self, BackendSettings};
use crate::claims::ResourceClaims;
use crate::cri::{ImageClient, RuntimeClient};
use crate::devices::Devices;
use crate::eviction::LatestReport;
use crate::images::{ImageCheck, ImageSet};
use crate::kube::LocalObjects;
use crate::kube::certificates::serving::CurrentServingCertificate;
use crate::kube::client::Client;
use crate::kube::events::EventLog;
use crate::kube::pod_certificates::PodCertificates;
use crate::model::event::EventSink;
use crate::model::pod::SourceName;
use crate::observe::Observe;
use crate::offline::Offline;
use crate::plugins::KnownPlugins;
use crate::pods::admission::Allocatable;
use crate::pods::allocation::Allocations;
use crate::pods::assignments::Assignments;
use crate::pods::cgroups::PodCgroups;
use crate::probes::Probes;
use crate::resources::stats::Collector;
use crate::status::StatusCache;
use crate::sync::ephemeral;
use crate::sync::view::View;
use crate::volumes::Volumes;

/// The sync loop is stuck after this time, or after twice the sync period.
const TURN_LIMIT: Duration = Duration::from_secs(300);

/// The handles on started threads.
pub(super) struct ThreadHandles {
    /// The path or URL of each configured source.
    pub(super) source_locations: BTreeMap<SourceName, String>,
    pub(super) log: EventLog,
    /// When the sync loop ended its last turn.
    pub(super) turn: Arc<Mutex<Instant>>,
    /// Requests ephemeral containers.
    pub(super) ephemeral: ephemeral::Requester,
    pub(super) stats: Collector,
    /// The node's pressures.
    pub(super) eviction: LatestReport,
}

/// The handles of all rooms, and facts about the agent.
pub(super) struct Handles {
    pub(super) node: String,
    pub(super) started: Instant,
    /// The runtime's endpoint.
    pub(super) endpoint: String,
    /// `v1` or `v2`.
    pub(super) cgroups: String,
    pub(super) pod_cgroups: PodCgroups,
    /// What the machine has, and what pods may use.
    pub(super) resources: Arc<[Allocatable; 2]>,
    pub(super) feature_gates: BTreeMap<String, bool>,
    pub(super) threads: ThreadHandles,
    pub(super) view: View,
    pub(super) status: StatusCache,
    pub(super) allocations: Allocations,
    pub(super) assignments: Assignments,
    pub(super) devices: Devices,
    pub(super) claims: ResourceClaims,
    /// Plugins of all kinds.
    pub(super) plugins: KnownPlugins,
    /// ConfigMaps and Secrets of static pods.
    pub(super) local: LocalObjects,
    pub(super) observe: Observe,
    pub(super) probes: Probes,
    pub(super) cri: RuntimeClient,
    pub(super) images: ImageClient,
    /// Finds and replaces damaged files of images.
    pub(super) image_check: ImageCheck,
    /// Images of archives.
    pub(super) image_set: ImageSet,
    pub(super) sink: EventSink,
    /// The sync loop is stuck after this time without a turn.
    pub(super) turn_limit: Duration,
    pub(super) stats: Collector,
    pub(super) volumes: Arc<Volumes>,
    pub(super) backend: BackendSettings,
    /// The client of the API server; `None` without one.
    pub(super) api: Option<Client>,
    /// The certificate of the port of the node's API; `None` without the port.
    pub(super) serving: Option<CurrentServingCertificate>,
    /// Certificates of pods; `None` likewise.
    pub(super) pod_certificates: Option<PodCertificates>,
    /// The last known objects of the API server; `None` without `--offline`.
    pub(super) offline: Option<Offline>,
}

impl Handles {
    /// `flags`: every flag with its value; `client` is `None` without an API server, `serving` without a port.
    pub(super) fn new(
        context: Context<'_>,
        rooms: &Rooms,
        threads: ThreadHandles,
        (client, serving): (Option<Client>, Option<CurrentServingCertificate>),
        flags: Vec<(String, String)>,
        offline: Option<Offline>,
    ) -> Self {
        let Context { args, config, host, started, .. } = context;
        Handles {
            node: host.node_name.clone(),
            started,
            endpoint: config.container_runtime_endpoint.clone(),
            cgroups: host.cgroups.version.as_str().to_owned(),
            pod_cgroups: rooms.cgroups.clone(),
            resources: Arc::new([settings::capacity(args, config, host), rooms.allocatable.clone()]),
            feature_gates: config.feature_gates.clone(),
            stats: threads.stats.clone(),
            threads,
            view: rooms.view.clone(),
            status: rooms.status.clone(),
            allocations: rooms.allocations.clone(),
            assignments: rooms.assignments.clone(),
            devices: rooms.devices.clone(),
            claims: rooms.claims.clone(),
            plugins: rooms.plugins.clone(),
            local: rooms.local.clone(),
            observe: rooms.observe.clone(),
            probes: rooms.probes.clone(),
            cri: rooms.cri.clone(),
            images: rooms.images.clone(),
            image_check: rooms.image_check.clone(),
            image_set: rooms.image_set.clone(),
            sink: rooms.events.clone(),
            turn_limit: TURN_LIMIT.max(config.sync_frequency.to_std() * 2),
            volumes: Arc::clone(&rooms.volumes),
            backend: BackendSettings::new(args, config, flags),
            api: client,
            serving,
            pod_certificates: rooms.pod_api.as_ref().map(|api| api.trust.certificates.clone()),
            offline,
        }
    }
}
