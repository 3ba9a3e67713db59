//! Composes the desired Node object (pure).

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::conditions::{self, NodeEvent, Pressures};
use super::resources::{HUGE_PAGES, quantities};
use super::settings::Settings;
use crate::cri::{Handler, RuntimeFeatures};
use crate::devices::is_extended_resource;
use crate::model::Quantity;
use crate::model::api::{
    ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeDaemonEndpoints, NodeFeatures, NodeRuntimeHandler,
    NodeRuntimeHandlerFeatures, NodeSpec, NodeStatus, NodeSwapStatus, NodeSystemInfo, Taint,
};
use crate::model::event::EventType;
use crate::model::meta::ObjectMeta;
use crate::model::node::Allocatable;
use crate::model::reasons;
use crate::observe::RuntimeHealth;
use crate::resources::system::SystemFacts;

/// Marks a node that leaves attaching of volumes to the attach controller.
const ATTACH_DETACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
/// The address that the configuration requests from the cloud controller.
const PROVIDED_NODE_IP: &str = "alpha.kubernetes.io/provided-node-ip";
/// Keeps pods away until the cloud controller has initialised the node.
const CLOUD_TAINT: &str = "node.cloudprovider.kubernetes.io/uninitialized";
/// Limit of the names that are reported for one image.
const MAX_NAMES: usize = 5;

/// Labels whose values the agent sets even on a node that already exists.
const OWN_LABELS: &[&str] = &[
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
];
/// Labels that are repaired whenever they are wrong.
const PLATFORM_LABELS: &[&str] = &["kubernetes.io/os", "kubernetes.io/arch"];

/// The features that the scheduler or the API server requires for some requests, each with a gate of
/// its name, in their order (Go: component-helpers/nodedeclaredfeatures/features).
// DIFFERS: the Go kubelet also declares UserNamespacesHostNetworkSupport and VolumeBindMountOptions, with
// their gates (alpha) and a runtime that supports them.
const FEATURES: &[&str] = &[
    "DRANodeAllocatableResources",
    "DRAOptionalNodeOperations",
    "ExtendWebSocketsToKubelet",
    "InPlacePodLevelResourcesVerticalScaling",
    "InPlacePodVerticalScalingInitContainers",
    "InPlacePodVerticalScalingMemoryBackedVolumes",
    "RestartAllContainersOnContainerExits",
];

/// The features that the node declares; `None` without the gate `NodeDeclaredFeatures`: then pods
/// are not checked either.
#[must_use]
pub fn declared_features(is_on: impl Fn(&str) -> bool) -> Option<Vec<String>> {
    let declared = || FEATURES.iter().filter(|gate| is_on(gate)).map(|gate| (*gate).to_owned()).collect();
    is_on("NodeDeclaredFeatures").then(declared)
}

/// An image on the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Image {
    /// The id of its content.
    pub id: String,
    /// Names that end in a digest.
    pub digests: Vec<String>,
    /// Names that end in a tag.
    pub tags: Vec<String>,
    /// The size on disk.
    pub size_bytes: i64,
}

/// Whether pods run, or are stopped, as the API server does not know (not in upstream).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfflineCondition {
    /// Whether that is so now.
    pub holds: bool,
    /// CamelCase reason.
    pub reason: &'static str,
    /// For people. The same until something changes: each other text is written to the object.
    pub message: String,
}

/// The facts that are read again for each status.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeStatusInputs {
    /// Whether the runtime's status was read once: before that it is only not ready because it is
    /// unknown.
    pub settled: bool,
    /// All resources of the machine; `None` while they are not known.
    pub capacity: Option<Allocatable>,
    /// The resources that pods may use.
    pub allocatable: Allocatable,
    /// Facts that identify the machine.
    pub system: SystemFacts,
    /// Such as `containerd://2.1.0`; `None` before the runtime has responded.
    pub runtime_version: Option<String>,
    /// The features of the runtime's handlers; empty before the runtime has responded.
    pub handlers: Vec<Handler>,
    /// The features of the runtime; `None` before it has responded.
    pub features: Option<RuntimeFeatures>,
    /// Whether the runtime can be used.
    pub health: RuntimeHealth,
    /// The images to report; `None`: not known, the object's list stays.
    pub images: Option<Vec<ContainerImage>>,
    /// The resources that the node is short of.
    pub pressures: Pressures,
    /// Attachable volumes in use; `None`: not known yet, the object's list stays.
    pub volumes_in_use: Option<Vec<String>>,
    /// The number of this list.
    pub volumes_number: u64,
    /// More reasons for not being ready, such as `node is shutting down`.
    pub problems: Vec<String>,
    /// Added to the message of the Ready condition, whatever its status.
    pub warnings: Vec<String>,
    /// The condition `OfflineOperation`; `None`: without `--offline`, or not known yet.
    pub offline: Option<OfflineCondition>,
}

/// The node as it registers.
pub(super) fn initial(
    settings: &Settings,
    facts: &NodeStatusInputs,
    addresses: Option<Vec<NodeAddress>>,
    now: Timestamp,
) -> (Node, Vec<NodeEvent>) {
    let external = settings.external_cloud;
    let mut annotations = BTreeMap::new();
    if settings.controller_attach_detach {
        annotations.insert(ATTACH_DETACH.to_owned(), "true".to_owned());
    }
    let mut taints = settings.taints.clone();
    if external {
        taints.push(Taint {
            key: CLOUD_TAINT.to_owned(),
            value: Some("true".to_owned()),
            effect: "NoSchedule".to_owned(),
            time_added: None,
        });
    }
    let blank = Node {
        metadata: ObjectMeta {
            name: Some(settings.name.clone()),
            labels: Some(labels(settings)),
            annotations: (!annotations.is_empty()).then_some(annotations),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            provider_id: Some(settings.provider_id.clone()).filter(|id| !id.is_empty()),
            taints: (!taints.is_empty()).then_some(taints),
            ..NodeSpec::default()
        }),
        status: None,
    };
    refreshed(settings, facts, addresses, &blank, now)
}

/// The labels that the node registers with.
#[must_use]
pub fn labels(settings: &Settings) -> BTreeMap<String, String> {
    let arch = arch();
    let mut labels: BTreeMap<String, String> = [
        ("kubernetes.io/hostname", settings.name.as_str()),
        ("kubernetes.io/os", OS),
        ("kubernetes.io/arch", arch),
        ("beta.kubernetes.io/os", OS),
        ("beta.kubernetes.io/arch", arch),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .collect();
    for (key, value) in &settings.labels {
        if let Some(own) = labels.insert(key.clone(), value.clone())
            && own != *value
        {
            log::debug!("the label {key}={own} of the node is replaced by {key}={value} from --node-labels");
        }
    }
    labels
}

const OS: &str = "linux";

/// The architecture by its name in Go, which labels use.
#[must_use]
pub fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// A node that already existed, with the corrections that are made only at a start.
/// `resets_devices`: the agent has no records of devices, so the node may be another machine of the
/// same name; extended resources are 0 until a plugin or a client sets them again.
pub(super) fn reconciled(
    settings: &Settings,
    facts: &NodeStatusInputs,
    existing: &Node,
    resets_devices: bool,
) -> Node {
    let mut node = existing.clone();
    let annotations = node.metadata.annotations.get_or_insert_default();
    if settings.controller_attach_detach {
        annotations.insert(ATTACH_DETACH.to_owned(), "true".to_owned());
    } else {
        annotations.remove(ATTACH_DETACH);
    }
    if annotations.is_empty() {
        node.metadata.annotations = None;
    }
    repair(&mut node, OWN_LABELS, &labels(settings));
    // Removes sizes of huge pages that this kernel no longer has. The status adds those that it
    // has.
    if let (Some(capacity), Some(status)) = (&facts.capacity, &mut node.status) {
        for map in [&mut status.capacity, &mut status.allocatable].into_iter().flatten() {
            map.retain(|name, _| !name.starts_with(HUGE_PAGES) || capacity.extended.contains_key(name));
        }
    }
    if resets_devices && let Some(status) = &mut node.status {
        for (name, quantity) in status.capacity.iter_mut().flatten() {
            if is_extended_resource(name) {
                log::info!("extended resource {name} of the existing node is set from {} to 0", quantity.0);
                *quantity = Quantity("0".to_owned());
            }
        }
    }
    node
}

fn repair(node: &mut Node, keys: &[&str], wanted: &BTreeMap<String, String>) {
    let labels = node.metadata.labels.get_or_insert_default();
    for key in keys {
        if let Some(value) = wanted.get(*key)
            && labels.get(*key) != Some(value)
        {
            labels.insert((*key).to_owned(), value.clone());
        }
    }
}

/// `base` with the current status, and the events and log lines about it.
pub(super) fn refreshed(
    settings: &Settings,
    facts: &NodeStatusInputs,
    addresses: Option<Vec<NodeAddress>>,
    base: &Node,
    now: Timestamp,
) -> (Node, Vec<NodeEvent>) {
    let mut node = base.clone();
    repair(&mut node, PLATFORM_LABELS, &labels(settings));
    let mut status = node.status.take().unwrap_or_default();
    let mut events = Vec::new();
    provided_ip(settings, addresses.is_some(), &mut node.metadata.annotations);
    if let Some(addresses) = addresses {
        status.addresses = non_empty(addresses);
    }
    if let Some(capacity) = &facts.capacity {
        resources(&mut status, capacity, &facts.allocatable);
    }
    let old_info = status.node_info.take().unwrap_or_default();
    if !old_info.boot_id.is_empty()
        && !facts.system.boot_id.is_empty()
        && old_info.boot_id != facts.system.boot_id
    {
        events.push(NodeEvent {
            topic: "boot",
            kind: EventType::Warning,
            reason: reasons::REBOOTED,
            message: format!("Node {} has been rebooted, boot id: {}", settings.name, facts.system.boot_id),
        });
    }
    status.node_info = Some(info(settings, facts, old_info));
    status.daemon_endpoints = Some(NodeDaemonEndpoints {
        kubelet_endpoint: Some(DaemonEndpoint { port: i32::from(settings.port) }),
    });
    if let Some(images) = &facts.images {
        status.images = non_empty(images.clone());
    }
    if let Some(features) = facts.features {
        status.runtime_handlers = non_empty(facts.handlers.iter().map(handler).collect());
        status.features =
            Some(NodeFeatures { supplemental_groups_policy: Some(features.supplemental_groups_policy) });
    }
    status.declared_features = non_empty(settings.declared_features.clone());
    // The API stores whole seconds only.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let conditions = status.conditions.get_or_insert_default();
    events.extend(conditions::update(conditions, &settings.name, facts, now));
    if let Some(volumes) = &facts.volumes_in_use {
        status.volumes_in_use = non_empty(volumes.clone());
    }
    node.status = Some(status);
    (node, events)
}

fn non_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

/// The annotation that requests addresses from the cloud controller. Its value is written when the
/// configured addresses are valid (`are_valid`); without a cloud or an address it is removed, at
/// each status (Go: nodestatus.NodeAddress).
fn provided_ip(settings: &Settings, are_valid: bool, annotations: &mut Option<BTreeMap<String, String>>) {
    let is_given = settings.node_ips.first().is_some_and(|ip| !ip.is_unspecified());
    if settings.external_cloud && is_given {
        if are_valid {
            let configured = settings.node_ips.iter().filter(|ip| !ip.is_unspecified());
            let texts: Vec<String> = configured.map(ToString::to_string).collect();
            annotations.get_or_insert_default().insert(PROVIDED_NODE_IP.to_owned(), texts.join(","));
        }
    } else if let Some(present) = annotations {
        present.remove(PROVIDED_NODE_IP);
        if present.is_empty() {
            *annotations = None;
        }
    }
}

/// Capacity and allocatable. A resource that another client has added to the capacity is allocatable
/// as a whole; an extended one that it has removed from the capacity is no longer allocatable
/// (Go: nodestatus.MachineInfo).
fn resources(status: &mut NodeStatus, capacity: &Allocatable, allocatable: &Allocatable) {
    let capacity_map = status.capacity.get_or_insert_default();
    capacity_map.extend(quantities(capacity));
    let entries = status.allocatable.get_or_insert_default();
    entries.retain(|name, _| capacity_map.contains_key(name) || !is_extended_resource(name));
    for (name, quantity) in &*capacity_map {
        let is_negative = quantity.0.starts_with('-');
        let value = if is_negative { Quantity("0".to_owned()) } else { quantity.clone() };
        entries.insert(name.clone(), value);
    }
    entries.extend(quantities(allocatable));
}

fn info(settings: &Settings, facts: &NodeStatusInputs, old: NodeSystemInfo) -> NodeSystemInfo {
    let system = &facts.system;
    let swap = i64::try_from(system.swap_bytes).ok().filter(|bytes| *bytes > 0);
    NodeSystemInfo {
        machine_id: system.machine_id.clone(),
        system_uuid: system.system_uuid.clone(),
        boot_id: system.boot_id.clone(),
        kernel_version: system.kernel_version.clone(),
        os_image: system.os_image.clone(),
        container_runtime_version: facts.runtime_version.clone().unwrap_or(old.container_runtime_version),
        kubelet_version: settings.kubelet_version.clone(),
        kube_proxy_version: String::new(),
        operating_system: OS.to_owned(),
        architecture: arch().to_owned(),
        swap: swap.map(|bytes| NodeSwapStatus { capacity: Some(bytes) }),
        running_in_user_namespace: settings.in_user_namespace.or(old.running_in_user_namespace),
    }
}

fn handler(handler: &Handler) -> NodeRuntimeHandler {
    NodeRuntimeHandler {
        name: Some(handler.name.clone()),
        features: Some(NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(handler.recursive_read_only_mounts),
            user_namespaces: Some(handler.user_namespaces),
        }),
    }
}

/// The largest images, the largest first. `most`: `None` for all of them.
#[must_use]
pub fn largest_images(mut images: Vec<Image>, most: Option<usize>) -> Vec<ContainerImage> {
    images.sort_by(|a, b| (b.size_bytes, &b.id).cmp(&(a.size_bytes, &a.id)));
    images
        .into_iter()
        .take(most.unwrap_or(usize::MAX))
        .map(|image| ContainerImage {
            names: non_empty(image.digests.into_iter().chain(image.tags).take(MAX_NAMES).collect()),
            size_bytes: Some(image.size_bytes),
        })
        .collect()
}
