//! Second phase of a start: the handles of the rooms. Clones share their state.

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Receiver;

use super::cgroups;
use super::cluster::Cluster;
use super::error::StartError;
use super::host::Host;
use super::node::OwnAddresses;
use super::placement_settings;
use super::settings;
use super::supervise::Supervisor;
use crate::claims::ResourceClaims;
use crate::config::{AgentArgs, KubeletConfiguration};
use crate::cri::{ImageClient, RuntimeClient};
use crate::devices::Devices;
use crate::images::{CheckDeps, ImageCheck, ImagePuller, ImageSet, PullDeps};
use crate::kube::{LocalObjects, PodDependencies};
use crate::model::event::{Event, EventSink, EventType, Regarding};
use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::model::reasons;
use crate::model::restart;
use crate::observe::Observe;
use crate::plugins::KnownPlugins;
use crate::pods::admission::Allocatable;
use crate::pods::allocation::Allocations;
use crate::pods::assignments::Assignments;
use crate::pods::cgroups::PodCgroups;
use crate::probes::{self, Probes};
use crate::runtime::{self, Placement as _, Runtime};
use crate::status::{NodeAddresses, StatusCache};
use crate::sync::view::{Entry, Snapshot, View};
use crate::util::gate::Gate;
use crate::util::mailbox::Post;
use crate::util::state_files;
use crate::volumes::{self, Volumes};
use crate::{cri, node, observe};

/// The inputs of every later phase.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) args: &'a AgentArgs,
    pub(super) config: &'a KubeletConfiguration,
    pub(super) host: &'a Host,
    pub(super) supervisor: &'a Supervisor,
    /// When the start began.
    pub(super) started: Instant,
}

pub(super) struct Rooms {
    pub(super) events: EventSink,
    pub(super) cri: RuntimeClient,
    pub(super) images: ImageClient,
    /// Provides the images of containers.
    pub(super) puller: Arc<ImagePuller>,
    /// Finds and replaces damaged files of images.
    pub(super) image_check: ImageCheck,
    pub(super) status: StatusCache,
    pub(super) allocations: Allocations,
    pub(super) observe: Observe,
    pub(super) reservations: node::Reservations,
    pub(super) allocatable: Allocatable,
    pub(super) runtime: Runtime,
    pub(super) volumes: Arc<Volumes>,
    pub(super) probes: Probes,
    pub(super) cgroups: PodCgroups,
    pub(super) assignments: Assignments,
    pub(super) devices: Devices,
    pub(super) claims: ResourceClaims,
    /// Plugins of all kinds.
    pub(super) plugins: KnownPlugins,
    /// The other end of the channel that wakes the thread of the claims.
    pub(super) claim_rings: Receiver<()>,
    /// Images from archives.
    pub(super) image_set: ImageSet,
    /// Wakes the worker of a pod.
    pub(super) wake: Post<PodUid, ()>,
    pub(super) view: View,
    /// `None` without an API server.
    pub(super) pod_api: Option<PodDependencies>,
    /// ConfigMaps and Secrets of static pods.
    pub(super) local: LocalObjects,
}

/// Connects to the container runtime and makes the handles. Also returns the queue behind
/// `Rooms::events`. Verdicts of probes go to `verdicts`.
pub(super) fn make(
    context: Context<'_>,
    cluster: Option<&Cluster>,
    local: LocalObjects,
    verdicts: Post<PodUid, ()>,
) -> Result<(Rooms, Receiver<Box<Event>>), StartError> {
    let Context { args, config, host, supervisor, .. } = context;
    let pod_api = cluster.map(|cluster| cluster.pod_api.clone());
    let (events, event_queue) = EventSink::new();
    let sink = events.clone();
    state_files::set_on_report(Arc::new(move |text| {
        sink.raise(Regarding::Node, EventType::Warning, reasons::UNUSABLE_STATE_FILE, text);
    }));
    let (cri, images) = cri::connect(cri::Settings {
        runtime_endpoint: config.container_runtime_endpoint.clone(),
        image_endpoint: Some(config.image_service_endpoint.clone()).filter(|endpoint| !endpoint.is_empty()),
        request_timeout: config.runtime_request_timeout.to_std(),
    })?;
    let allocations = Allocations::load(&args.root_dir);
    for problem in allocations.problems() {
        log::warn!("{problem}");
        events.raise(Regarding::Node, EventType::Warning, reasons::UNUSABLE_STATE_FILE, problem.as_str());
    }
    let reservations = settings::reservations(args, config);
    let allocatable = settings::allocatable(args, config, host, &reservations);
    let observe = observe::new(cri.clone());
    let devices = placement_settings::open_devices(args, config, host, &events, verdicts.clone())?;
    let assignments = placement_settings::open(args, config, host, &cri, &events)?;
    let assignments =
        assignments.with_devices(devices.clone(), placement_settings::running_containers(&observe));
    let (claims, claim_rings) = {
        let client = cluster.map(|cluster| &cluster.client);
        let offline = cluster.and_then(|cluster| cluster.offline.clone());
        placement_settings::open_claims(args, config, host, &events, (client, offline), verdicts.clone())
    };
    let assignments = assignments.with_claims(claims.clone());
    let without_quota = {
        let assignments = assignments.clone();
        Arc::new(move |pod: &Pod| assignments.is_without_quota(pod))
    };
    let cgroups = PodCgroups::new(cgroups::settings(args, config, host)?, without_quota);
    let image_set = ImageSet::new(&args.image_dirs());
    let puller = ImagePuller::new(
        &settings::pulls(args, config)?,
        PullDeps {
            images: images.clone(),
            events: events.clone(),
            set: image_set.clone(),
            api: pod_api.clone(),
            local: local.clone(),
        },
    );
    let puller = Arc::new(puller);
    let wake = verdicts.clone();
    let replaced = Arc::new(Gate::default());
    let view = View::default();
    let runtime = Runtime::new(
        settings::runtime(args, config, host, &allocatable),
        runtime::Deps {
            cri: cri.clone(),
            images: Arc::clone(&puller),
            events: events.clone(),
            api: pod_api.clone(),
            local: local.clone(),
            cgroup_parent: {
                let cgroups = cgroups.clone();
                Arc::new(move |pod| cgroups.path(pod))
            },
            placement: Arc::new(assignments.clone()),
            replaced: Arc::clone(&replaced),
        },
    );
    let image_check = ImageCheck::new(CheckDeps {
        runtime: cri.clone(),
        images: images.clone(),
        events: events.clone(),
        set: image_set.clone(),
        puller: Arc::clone(&puller),
        wake: Box::new(move |uid| wake.put(uid.clone(), ())),
        replaced,
        restarts: {
            let view = view.clone();
            Box::new(move |uid, name, exit_code| runs_again(&view.get(), uid, name, exit_code))
        },
        pods: {
            let view = view.clone();
            Box::new(move || known_pods(&view.get()))
        },
        removes: args.remove_damaged_images,
    });
    let wake = verdicts.clone();
    let waker = volumes::Waker(Arc::new(move |pod| wake.put(pod.clone(), ())));
    let attaching = cluster.filter(|_| config.enable_controller_attach_detach);
    let volumes = Arc::new(Volumes::new(
        volumes::Settings {
            root_dir: args.root_dir.clone(),
            allocatable: settings::node_allocatable(&allocatable),
            plugin_dir: config.volume_plugin_dir.clone().into(),
            node: host.node_name.clone(),
            selinux_mount: settings::gates(config).enabled("SELinuxMount"),
            user_fields: settings::gates(config).enabled("AtomicWriteVolumeUserFields"),
        },
        volumes::Deps {
            events: events.clone(),
            api: pod_api.clone(),
            local: local.clone(),
            waker,
            controller: attaching.map(Cluster::controller),
            labels: cluster.map(Cluster::labels),
        },
    ));
    if let Some(cluster) = attaching {
        let volumes = Arc::clone(&volumes);
        cluster.node.on_volume_change(move || volumes.node_changed());
    }
    if let Some(cluster) = cluster {
        // Statuses of pods have the node's addresses.
        let (view, wake) = (view.clone(), verdicts.clone());
        cluster.node.on_address_change(move || {
            view.get().pods.keys().for_each(|uid| wake.put(uid.clone(), ()));
        });
    }
    let probes = Probes::new(probes::Deps {
        cri: cri.clone(),
        events: events.clone(),
        post: verdicts.clone(),
        on_death: supervisor.deaths(),
    });
    let rooms = Rooms {
        status: StatusCache::new(),
        observe,
        view,
        events,
        cri,
        images,
        puller,
        image_check,
        allocations,
        reservations,
        allocatable,
        runtime,
        volumes,
        probes,
        cgroups,
        assignments,
        devices,
        claims,
        plugins: KnownPlugins::default(),
        claim_rings,
        image_set,
        wake: verdicts,
        pod_api,
        local,
    };
    Ok((rooms, event_queue))
}

/// The node's addresses for the statuses of pods: those that the thread `node` has found, or a cloud
/// controller has written, and the node's own until there are any.
///
/// Without an API server there is no Node object. Like the Go kubelet, statuses then have no
/// host IPs, and pods on the host's network have no IPs.
pub(super) fn node_addresses(
    watch: Option<&node::NodeWatch>,
    own: &OwnAddresses,
    external_cloud: bool,
) -> Arc<dyn Fn() -> NodeAddresses + Send + Sync> {
    let known = watch.map(|watch| (watch.clone(), own.clone()));
    Arc::new(move || {
        let Some((watch, own)) = &known else { return NodeAddresses::default() };
        let shown = watch.host_ips();
        let host_ips = if shown.is_empty() { own.get() } else { shown };
        NodeAddresses { host_ips, are_own: !external_cloud }
    })
}

/// The pods that may use an image which is to be pulled again; `None` until all sources have delivered them.
/// Stored pods of the API server are enough: a container of a pod that is not stored stays, and with it the
/// image, and nothing is removed that cannot be pulled.
fn known_pods(snapshot: &Snapshot) -> Option<Vec<Pod>> {
    let known = snapshot.pods.values().filter_map(Entry::any_pod).cloned();
    snapshot.sources_ready.then(|| known.collect())
}

/// Whether a container that has ended with `exit_code` runs again, or its pod is gone.
fn runs_again(pods: &Snapshot, uid: &PodUid, name: &str, exit_code: i32) -> bool {
    match pods.pods.get(uid).and_then(Entry::any_pod) {
        Some(pod) => restart::runs_again(pod, name, exit_code),
        None => pods.has_all_pods,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::pod::Pod;

    /// A loss of power damages images, and the API server may be away for long.
    #[test]
    fn images_are_pulled_again_also_while_the_pods_of_the_api_server_are_the_stored_ones() {
        let mut snapshot = Snapshot::default();
        assert!(known_pods(&snapshot).is_none());
        snapshot.sources_ready = true;
        assert_eq!(known_pods(&snapshot), Some(Vec::new()));
    }

    #[test]
    fn containers_of_unknown_pods_stay_until_all_pods_are_known() {
        let uid = PodUid::from("u");
        let mut pods = Snapshot::default();
        assert!(!runs_again(&pods, &uid, "main", 1));
        // The API server's pods are the stored ones.
        pods.sources_ready = true;
        assert!(!runs_again(&pods, &uid, "main", 1));
        pods.has_all_pods = true;
        assert!(runs_again(&pods, &uid, "main", 1));
        let object =
            serde_json::json!({"metadata": {"uid": "u"}, "spec": {"containers": [{"name": "main"}]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap());
        pods.pods.insert(
            uid.clone(),
            Entry { pod: Some(pod), removed: None, rejected: false, evicted: false, worker: None },
        );
        assert!(runs_again(&pods, &uid, "main", 1) && !runs_again(&pods, &uid, "other", 1));
    }
}
