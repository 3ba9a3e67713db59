//! Claims, persistent volumes and what a pod's volume means on this node. Pure (Go:
//! pkg/kubelet/volumemanager/populator, pkg/volume/util, k8s.io/csi-translation-lib).
//!
//! The types hold only the fields that a node reads.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Quantity;
use super::api::{
    CSIVolumeSource, FCVolumeSource, FlexVolumeSource, HostPathVolumeSource, ISCSIVolumeSource,
    NFSVolumeSource, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Volume,
};
use super::pod::Pod;
use super::quantity::amount;
use super::storage::{AccessMode, CsiVolumeSource, SecretReference};

/// A claim with this finalizer is not removed while a pod uses it.
const PROTECTION: &str = "kubernetes.io/pvc-protection";
/// The annotation for mount options that is older than `spec.mountOptions`.
const MOUNT_OPTIONS: &str = "volume.beta.kubernetes.io/mount-options";

/// `metadata` of a claim or a persistent volume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct Meta {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub deletion_timestamp: Option<String>,
    pub finalizers: Vec<String>,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub owner_references: Vec<Owner>,
}

/// An entry of `metadata.ownerReferences`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct Owner {
    pub uid: String,
    pub controller: bool,
}

/// A PersistentVolumeClaim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct Claim {
    pub metadata: Meta,
    pub spec: ClaimSpec,
    pub status: ClaimStatus,
}

/// `spec` of a claim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct ClaimSpec {
    pub volume_name: String,
    pub access_modes: Vec<String>,
    pub resources: ClaimResources,
}

/// `spec.resources` of a claim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct ClaimResources {
    pub requests: BTreeMap<String, Quantity>,
}

impl Claim {
    /// Whether it has its volume.
    #[must_use]
    pub fn is_bound(&self) -> bool {
        self.status.phase == "Bound"
    }
}

/// `status` of a claim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct ClaimStatus {
    pub phase: String,
    pub capacity: BTreeMap<String, Quantity>,
    pub allocated_resources: BTreeMap<String, Quantity>,
    pub allocated_resource_statuses: BTreeMap<String, String>,
}

/// A PersistentVolume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct PersistentVolume {
    pub metadata: Meta,
    pub spec: PersistentSpec,
}

/// `spec` of a persistent volume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct PersistentSpec {
    pub capacity: BTreeMap<String, Quantity>,
    pub access_modes: Vec<String>,
    pub mount_options: Vec<String>,
    pub volume_mode: VolumeMode,
    pub claim_ref: Option<ClaimRef>,
    pub host_path: Option<HostPathVolumeSource>,
    pub local: Option<Local>,
    pub nfs: Option<NFSVolumeSource>,
    pub iscsi: Option<Iscsi>,
    pub fc: Option<FCVolumeSource>,
    pub flex_volume: Option<Flex>,
    pub csi: Option<CsiVolumeSource>,
    /// All other fields, among them the sources that CSI drivers serve.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// `volumeMode`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub enum VolumeMode {
    #[default]
    Filesystem,
    Block,
}

impl VolumeMode {
    /// The name in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            VolumeMode::Filesystem => "Filesystem",
            VolumeMode::Block => "Block",
        }
    }
}

/// `spec.claimRef` of a persistent volume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct ClaimRef {
    pub uid: String,
}

/// A directory or a block device of this node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct Local {
    pub path: String,
    pub fs_type: Option<String>,
}

/// A LUN of an iSCSI target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct Iscsi {
    pub target_portal: String,
    pub portals: Vec<String>,
    pub iqn: String,
    pub lun: i32,
    pub iscsi_interface: String,
    pub initiator_name: String,
    pub fs_type: String,
    pub read_only: bool,
    #[serde(rename = "chapAuthDiscovery")]
    pub chap_discovery: bool,
    #[serde(rename = "chapAuthSession")]
    pub chap_session: bool,
    pub secret_ref: Option<SecretReference>,
}

impl Iscsi {
    /// An inline source; its secret is in the namespace of the pod.
    fn inline(source: &ISCSIVolumeSource, namespace: &str) -> Iscsi {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        Iscsi {
            target_portal: source.target_portal.clone(),
            portals: source.portals.clone().unwrap_or_default(),
            iqn: source.iqn.clone(),
            lun: source.lun,
            iscsi_interface: text(&source.iscsi_interface),
            initiator_name: text(&source.initiator_name),
            fs_type: text(&source.fs_type),
            read_only: source.read_only.unwrap_or(false),
            chap_discovery: source.chap_auth_discovery.unwrap_or(false),
            chap_session: source.chap_auth_session.unwrap_or(false),
            secret_ref: source
                .secret_ref
                .as_ref()
                .map(|secret| SecretReference { name: secret.name.clone(), namespace: namespace.to_owned() }),
        }
    }
}

/// A volume of an exec driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub struct Flex {
    pub driver: String,
    pub fs_type: String,
    pub read_only: bool,
    pub options: BTreeMap<String, String>,
    pub secret_ref: Option<SecretReference>,
}

impl Flex {
    fn inline(source: &FlexVolumeSource, namespace: &str) -> Flex {
        Flex {
            driver: source.driver.clone(),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            read_only: source.read_only.unwrap_or(false),
            options: source.options.clone().unwrap_or_default(),
            secret_ref: source
                .secret_ref
                .as_ref()
                .map(|secret| SecretReference { name: secret.name.clone(), namespace: namespace.to_owned() }),
        }
    }
}

/// Where the data of a volume are.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the names are those of the API")]
pub enum Source {
    HostPath(HostPathVolumeSource),
    Local(Local),
    Nfs(NFSVolumeSource),
    Iscsi(Iscsi),
    Fc(FCVolumeSource),
    Flex(Flex),
    Csi(CsiVolumeSource),
    /// A kind that this node cannot mount, or none.
    Other(String),
}

impl Source {
    /// A Secret without a namespace is in that of the pod, where its claim is (Go: pkg/volume/iscsi,
    /// `getISCSISecretNameAndNamespace`; pkg/volume/flexvolume).
    fn default_secret_namespace(&mut self, namespace: &str) {
        let secret = match self {
            Source::Iscsi(source) => source.secret_ref.as_mut(),
            Source::Flex(source) => source.secret_ref.as_mut(),
            _ => None,
        };
        if let Some(secret) = secret.filter(|secret| secret.namespace.is_empty()) {
            namespace.clone_into(&mut secret.namespace);
        }
    }
}

/// A volume of a pod after its claim was resolved (Go: volume.Spec).
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// The persistent volume's name, or the volume's name in the pod. Names its directories.
    pub name: String,
    /// Where the data are.
    pub source: Source,
    /// Whether the pod may only read.
    pub read_only: bool,
    /// Options of the administrator for `mount`.
    pub mount_options: Vec<String>,
    /// File system or block device.
    pub mode: VolumeMode,
    /// The persistent volume's modes; those that this version does not know are left out.
    pub access_modes: Vec<AccessMode>,
    /// Whether only one pod may use it at a time.
    pub is_single_pod: bool,
    /// Whether the node has to grow the volume to `size`.
    pub has_grown: bool,
    /// The size that the volume has, or is grown to, if it is known.
    pub size: Option<Quantity>,
    /// What else is known about its expansion.
    pub expansion: NodeExpansion,
    /// Whether it comes from a persistent volume, and not from the pod.
    pub is_persistent: bool,
    /// The nodes that can have it; `None`: all.
    pub nodes: Option<NodeSelector>,
}

/// The expansion of a persistent volume on the node (Go: pkg/volume/util/operationexecutor,
/// `NodeExpander`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeExpansion {
    /// The claim's status shows the steps of the node: the controller has begun the expansion.
    pub is_shown: bool,
    /// It shows already that the node has begun.
    pub is_in_progress: bool,
    /// The claim wants another size than the one that the volume is grown to.
    pub is_superseded: bool,
    /// The size in the claim's status, in bytes.
    pub claim_bytes: i64,
    /// Several nodes have the volume, and each must grow it.
    pub is_for_each_node: bool,
}

/// The annotation of a claim whose volume the controller has grown alone.
const NO_NODE_EXPANSION: &str = "volume.kubernetes.io/node-expansion-not-required";

/// Whether the node has to grow the volume, to which size, and how.
fn expansion(claim: &Claim, volume: &PersistentVolume) -> (bool, Option<Quantity>, NodeExpansion) {
    const KEY: &str = "storage";
    let bytes = |size: Option<&Quantity>| size.map_or(0, |size| amount(size).units());
    let (spec, status) = (&volume.spec, &claim.status);
    let (own, shown) = (spec.capacity.get(KEY), status.capacity.get(KEY));
    let state = status.allocated_resource_statuses.get(KEY).map(String::as_str).unwrap_or_default();
    let is_larger = own.map(amount) > shown.map(amount);
    let is_shown = !state.is_empty() || !status.allocated_resources.is_empty();
    let may_grow = !is_shown || matches!(state, "NodeResizePending" | "NodeResizeInProgress");
    // An older controller does not say which size is being made.
    let size = if is_shown && is_larger { status.allocated_resources.get(KEY).or(own) } else { own };
    let is_shared = spec.access_modes.iter().any(|mode| mode == "ReadWriteMany");
    let expansion = NodeExpansion {
        is_shown,
        is_in_progress: state == "NodeResizeInProgress",
        is_superseded: bytes(claim.spec.resources.requests.get(KEY)) != bytes(size),
        claim_bytes: bytes(shown),
        is_for_each_node: is_shared
            && state.is_empty()
            && !claim.metadata.annotations.contains_key(NO_NODE_EXPANSION),
    };
    (is_larger && may_grow, size.cloned(), expansion)
}

/// Why a claim cannot be used. Texts as upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum ClaimProblem {
    #[error("PVC is being deleted")]
    Deleting,
    #[error("PVC is not bound")]
    NotBound,
    #[error("PVC has empty pvc.Spec.VolumeName")]
    NoVolume,
    #[error("PVC {namespace}/{claim} was not created for pod {namespace}/{pod} (pod is not owner)")]
    NotOwner { namespace: String, claim: String, pod: String },
    #[error(
        "found PV object {0} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
    )]
    NoClaimRef(String),
    #[error("found PV object {pv} but its pv.Spec.ClaimRef.UID {found} does not point to claim.UID {wanted}")]
    OtherClaim { pv: String, found: String, wanted: String },
    #[error("volume {volume} has volumeMode {}, but is specified in volumeMounts", mode.as_str())]
    Mounted { volume: String, mode: VolumeMode },
    #[error("volume {volume} has volumeMode {}, but is specified in volumeDevices", mode.as_str())]
    Device { volume: String, mode: VolumeMode },
}

/// The claim that a volume of a pod names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimName {
    /// The claim, in the pod's namespace.
    pub name: String,
    /// `persistentVolumeClaim.readOnly`.
    pub read_only: bool,
    /// Whether the claim was made for the pod from a template, and must belong to it.
    pub is_ephemeral: bool,
}

/// The claim of a volume: a named one, or `<pod>-<volume>` of a generic ephemeral volume.
#[must_use]
pub fn claim_name(pod: &Pod, volume: &Volume) -> Option<ClaimName> {
    if let Some(source) = &volume.persistent_volume_claim {
        let read_only = source.read_only.unwrap_or(false);
        return Some(ClaimName { name: source.claim_name.clone(), read_only, is_ephemeral: false });
    }
    volume.ephemeral.as_ref()?;
    let name = format!("{}-{}", pod.name(), volume.name);
    Some(ClaimName { name, read_only: false, is_ephemeral: true })
}

/// Whether the claim may be used by the pod. `Ok` with the name of its persistent volume.
///
/// # Errors
/// The first problem, in upstream's order.
pub fn check_claim<'a>(pod: &Pod, wanted: &ClaimName, claim: &'a Claim) -> Result<&'a str, ClaimProblem> {
    let meta = &claim.metadata;
    if meta.deletion_timestamp.is_some() && !meta.finalizers.iter().any(|finalizer| finalizer == PROTECTION) {
        return Err(ClaimProblem::Deleting);
    }
    if !claim.is_bound() {
        return Err(ClaimProblem::NotBound);
    }
    if claim.spec.volume_name.is_empty() {
        return Err(ClaimProblem::NoVolume);
    }
    let owns = |owner: &Owner| owner.controller && owner.uid == pod.uid().as_str();
    if wanted.is_ephemeral && !meta.owner_references.iter().any(owns) {
        return Err(ClaimProblem::NotOwner {
            namespace: pod.namespace().to_owned(),
            claim: wanted.name.clone(),
            pod: pod.name().to_owned(),
        });
    }
    Ok(&claim.spec.volume_name)
}

/// Whether the persistent volume is bound to the claim.
///
/// # Errors
/// When it is bound to none or another one.
pub fn check_binding(claim: &Claim, volume: &PersistentVolume) -> Result<(), ClaimProblem> {
    let pv = || claim.spec.volume_name.clone();
    match &volume.spec.claim_ref {
        None => Err(ClaimProblem::NoClaimRef(pv())),
        Some(found) if found.uid != claim.metadata.uid => Err(ClaimProblem::OtherClaim {
            pv: pv(),
            found: found.uid.clone(),
            wanted: claim.metadata.uid.clone(),
        }),
        Some(_) => Ok(()),
    }
}

/// Whether containers use the volume as its mode allows.
///
/// # Errors
/// When a file system is used as a device, or the opposite.
pub fn check_mode(pod: &Pod, volume: &str, mode: VolumeMode) -> Result<(), ClaimProblem> {
    let (mounts, devices) = uses(pod, volume);
    if mounts && mode != VolumeMode::Filesystem {
        return Err(ClaimProblem::Mounted { volume: volume.to_owned(), mode });
    }
    if devices && mode != VolumeMode::Block {
        return Err(ClaimProblem::Device { volume: volume.to_owned(), mode });
    }
    Ok(())
}

/// Whether containers mount the volume, and whether they use it as a device.
fn uses(pod: &Pod, volume: &str) -> (bool, bool) {
    let ephemeral = pod.ephemeral_containers();
    let mut found = (false, false);
    for container in pod.all_containers().chain(&ephemeral) {
        found.0 |= container.volume_mounts.iter().flatten().any(|mount| mount.name == volume);
        found.1 |= container.volume_devices.iter().flatten().any(|device| device.name == volume);
    }
    found
}

impl Spec {
    /// The volume that a claim leads to.
    #[must_use]
    pub fn persistent(wanted: &ClaimName, claim: &Claim, volume: &PersistentVolume) -> Spec {
        let spec = &volume.spec;
        let (has_grown, size, expansion) = expansion(claim, volume);
        let mut source = source_of(volume);
        source.default_secret_namespace(&claim.metadata.namespace);
        Spec {
            name: volume.metadata.name.clone(),
            read_only: wanted.read_only,
            mount_options: mount_options(volume, &source),
            source,
            mode: spec.volume_mode,
            access_modes: access_modes(volume),
            is_single_pod: spec.access_modes.iter().any(|mode| mode == "ReadWriteOncePod"),
            has_grown,
            size,
            expansion,
            is_persistent: true,
            nodes: nodes(volume),
        }
    }

    /// A volume whose source is in the pod; `None` for kinds that have no storage.
    #[must_use]
    pub fn inline(pod: &Pod, volume: &Volume) -> Option<Spec> {
        let (source, read_only) = if let Some(path) = &volume.host_path {
            (Source::HostPath(path.clone()), false)
        } else if let Some(nfs) = &volume.nfs {
            (Source::Nfs(nfs.clone()), nfs.read_only.unwrap_or(false))
        } else if let Some(iscsi) = &volume.iscsi {
            (Source::Iscsi(Iscsi::inline(iscsi, pod.namespace())), iscsi.read_only.unwrap_or(false))
        } else if let Some(fc) = &volume.fc {
            (Source::Fc(fc.clone()), fc.read_only.unwrap_or(false))
        } else if let Some(flex) = &volume.flex_volume {
            (Source::Flex(Flex::inline(flex, pod.namespace())), flex.read_only.unwrap_or(false))
        } else if let Some(csi) = &volume.csi {
            (Source::Csi(inline_csi(csi, pod.namespace())), csi.read_only.unwrap_or(false))
        } else {
            return None;
        };
        Some(Spec {
            name: volume.name.clone(),
            source,
            read_only,
            mount_options: Vec::new(),
            mode: VolumeMode::Filesystem,
            access_modes: Vec::new(),
            is_single_pod: false,
            has_grown: false,
            size: None,
            expansion: NodeExpansion::default(),
            is_persistent: false,
            nodes: None,
        })
    }
}

impl Spec {
    /// The size in bytes that a volume must be grown to.
    #[must_use]
    pub fn grow_to(&self) -> Option<i64> {
        self.size.as_ref().filter(|_| self.has_grown).map(|size| amount(size).units())
    }
}

/// A volume that a driver makes for one pod. Its handle is computed by the node.
fn inline_csi(source: &CSIVolumeSource, namespace: &str) -> CsiVolumeSource {
    CsiVolumeSource {
        driver: source.driver.clone(),
        read_only: source.read_only.unwrap_or(false),
        fs_type: source.fs_type.clone(),
        volume_attributes: source.volume_attributes.clone().unwrap_or_default(),
        node_publish_secret_ref: source
            .node_publish_secret_ref
            .as_ref()
            .map(|secret| SecretReference { name: secret.name.clone(), namespace: namespace.to_owned() }),
        ..CsiVolumeSource::default()
    }
}

/// The nodes that can have the volume; `None`: all, or what is there cannot be read.
fn nodes(volume: &PersistentVolume) -> Option<NodeSelector> {
    let required = volume.spec.other.get("nodeAffinity").and_then(|affinity| affinity.get("required"));
    let selector = match required {
        Some(Value::Null) | None => None,
        Some(required) => Some(NodeSelector::deserialize(required).ok()?),
    };
    let keys = TOPOLOGY.iter().find(|(kind, ..)| volume.spec.other.get(*kind).is_some_and(Value::is_object));
    match keys {
        Some(&(kind, zone, region)) => migrated_nodes(volume, selector, kind, (zone, region)),
        None => selector,
    }
}

/// Old sources, and the labels of nodes with which their CSI drivers name zone and region.
const TOPOLOGY: [(&str, &str, &str); 4] = [
    ("awsElasticBlockStore", "topology.ebs.csi.aws.com/zone", REGION),
    (GCE, "topology.gke.io/zone", REGION),
    ("cinder", "topology.cinder.csi.openstack.org/zone", REGION),
    (VSPHERE, "topology.csi.vmware.com/zone", "topology.csi.vmware.com/region"),
];
const VSPHERE: &str = "vsphereVolume";
const ZONE: &str = "topology.kubernetes.io/zone";
const REGION: &str = "topology.kubernetes.io/region";
const OLD_ZONE: &str = "failure-domain.beta.kubernetes.io/zone";
const OLD_REGION: &str = "failure-domain.beta.kubernetes.io/region";

/// The nodes of a disk that its CSI driver has taken over: with the labels that the driver's nodes
/// have, also those that only the labels of the volume name. (csi-translation-lib:
/// plugins/in_tree_volume.go, plugins/vsphere_volume.go)
fn migrated_nodes(
    volume: &PersistentVolume,
    selector: Option<NodeSelector>,
    kind: &str,
    (driver_zone, driver_region): (&str, &str),
) -> Option<NodeSelector> {
    let has = |key: &str| {
        let terms = selector.iter().flat_map(|selector| &selector.node_selector_terms);
        terms
            .flat_map(|term| term.match_expressions.iter().flatten())
            .any(|requirement| requirement.key == key)
    };
    let labels = &volume.metadata.labels;
    let is_new = has(ZONE) || !has(OLD_ZONE) && (labels.contains_key(ZONE) || !labels.contains_key(OLD_ZONE));
    let (zone, region) = if is_new { (ZONE, REGION) } else { (OLD_ZONE, OLD_REGION) };
    let mut nodes = selector.unwrap_or_default();
    for (key, driver_key) in [(zone, driver_zone), (region, driver_region)] {
        if rename(&mut nodes, key, driver_key) || key == region && kind != VSPHERE {
            continue;
        }
        let Some(label) = labels.get(key) else { continue };
        // Only vSphere's zones have a name with two underscores in it.
        let values: Vec<&str> =
            if kind == VSPHERE { vec![label.as_str()] } else { label.split("__").collect() };
        let values = values.into_iter().map(str::trim).filter(|value| !value.is_empty());
        let values: std::collections::BTreeSet<String> = values.map(str::to_owned).collect();
        if values.is_empty() {
            continue;
        }
        if nodes.node_selector_terms.is_empty() {
            nodes.node_selector_terms.push(NodeSelectorTerm::default());
        }
        for term in &mut nodes.node_selector_terms {
            term.match_expressions.get_or_insert_default().push(NodeSelectorRequirement {
                key: driver_key.to_owned(),
                operator: "In".to_owned(),
                values: Some(values.iter().cloned().collect()),
            });
        }
    }
    (!nodes.node_selector_terms.is_empty()).then_some(nodes)
}

/// Requires another label in the place of one. Returns whether that has any value.
fn rename(nodes: &mut NodeSelector, from: &str, to: &str) -> bool {
    let terms = nodes.node_selector_terms.iter_mut();
    let all: Vec<&mut NodeSelectorRequirement> = terms
        .flat_map(|term| term.match_expressions.iter_mut().flatten())
        .filter(|requirement| requirement.key == from)
        .collect();
    let has_values =
        all.iter().any(|requirement| requirement.values.as_ref().is_some_and(|values| !values.is_empty()));
    if has_values {
        all.into_iter().for_each(|requirement| to.clone_into(&mut requirement.key));
    }
    has_values
}

/// `spec.mountOptions`, or those of the older annotation, which takes precedence except for CSI drivers.
fn mount_options(volume: &PersistentVolume, source: &Source) -> Vec<String> {
    let is_csi = matches!(source, Source::Csi(_));
    match volume.metadata.annotations.get(MOUNT_OPTIONS).filter(|_| !is_csi) {
        Some(text) => text.split(',').filter(|option| !option.is_empty()).map(str::to_owned).collect(),
        None => volume.spec.mount_options.clone(),
    }
}

fn source_of(volume: &PersistentVolume) -> Source {
    let spec = volume.spec.clone();
    if let Some(source) = spec.host_path {
        Source::HostPath(source)
    } else if let Some(source) = spec.local {
        Source::Local(source)
    } else if let Some(source) = spec.nfs {
        Source::Nfs(source)
    } else if let Some(mut source) = spec.iscsi {
        if source.iscsi_interface.is_empty() {
            source.iscsi_interface = "default".to_owned();
        }
        Source::Iscsi(source)
    } else if let Some(source) = spec.fc {
        Source::Fc(source)
    } else if let Some(source) = spec.flex_volume {
        Source::Flex(source)
    } else if let Some(source) = spec.csi {
        Source::Csi(source)
    } else if let Some(source) = migrated(volume) {
        Source::Csi(source)
    } else {
        let known = ["rbd", "cephfs", "glusterfs", "azureFile", "quobyte", "scaleIO", "storageos", "flocker"];
        let kind = known.into_iter().find(|kind| spec.other.contains_key(*kind));
        let is_gce = spec.other.contains_key(GCE);
        let kind = kind.or(is_gce.then_some("gcePersistentDisk with zones that are not of one region"));
        Source::Other(kind.unwrap_or("unknown").to_owned())
    }
}

/// A disk of a cloud, as its CSI driver names it; `None` for other sources.
fn migrated(volume: &PersistentVolume) -> Option<CsiVolumeSource> {
    let find = |kind: &str| volume.spec.other.get(kind)?.as_object();
    let text = |source: &Map<String, Value>, key: &str| {
        source.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let disk = |driver: &str, handle: String, source: &Map<String, Value>| CsiVolumeSource {
        driver: driver.to_owned(),
        volume_handle: handle,
        read_only: source.get("readOnly").and_then(Value::as_bool).unwrap_or(false),
        fs_type: source.get("fsType").and_then(Value::as_str).map(str::to_owned),
        ..CsiVolumeSource::default()
    };
    if let Some(source) = find("awsElasticBlockStore") {
        let id = text(source, "volumeID");
        let handle = id.rsplit('/').next().unwrap_or_default().to_owned();
        let mut csi = disk("ebs.csi.aws.com", handle, source);
        let partition = source.get("partition").and_then(Value::as_i64).unwrap_or(0);
        let partition = if partition > 0 { partition.to_string() } else { String::new() };
        csi.volume_attributes.insert("partition".to_owned(), partition);
        return Some(csi);
    }
    if let Some(source) = find(GCE) {
        let place = place_of_gce(volume)?;
        let handle = format!("projects/UNSPECIFIED/{place}/disks/{}", text(source, "pdName"));
        let mut csi = disk("pd.csi.storage.gke.io", handle, source);
        let partition = source.get("partition").and_then(Value::as_i64).unwrap_or(0);
        let partition = if partition > 0 { partition.to_string() } else { String::new() };
        csi.volume_attributes.insert("partition".to_owned(), partition);
        return Some(csi);
    }
    if let Some(source) = find("azureDisk") {
        let mut csi = disk("disk.csi.azure.com", text(source, "diskURI"), source);
        for (key, attribute) in [("cachingMode", "cachingMode"), ("kind", "kind"), ("fsType", "fsType")] {
            if let Some(value) = source.get(key).and_then(Value::as_str) {
                csi.volume_attributes.insert(attribute.to_owned(), value.to_owned());
            }
        }
        return Some(csi);
    }
    for (kind, driver, key) in [
        ("cinder", "cinder.csi.openstack.org", "volumeID"),
        ("vsphereVolume", "csi.vsphere.vmware.com", "volumePath"),
        ("portworxVolume", "pxd.portworx.com", "volumeID"),
    ] {
        if let Some(source) = find(kind) {
            return Some(disk(driver, text(source, key), source));
        }
    }
    None
}

/// The field of a disk of Google's cloud.
const GCE: &str = "gcePersistentDisk";

/// The zone or region of such a disk, by the labels of its volume: several zones are a region.
/// `None`: they are not of one region. (csi-translation-lib: plugins/gce_pd.go)
fn place_of_gce(volume: &PersistentVolume) -> Option<String> {
    let label = |key: &str| volume.metadata.labels.get(key).filter(|zones| !zones.is_empty());
    let zones =
        label("failure-domain.beta.kubernetes.io/zone").or_else(|| label("topology.kubernetes.io/zone"));
    let Some(zones) = zones else { return Some("zones/UNSPECIFIED".to_owned()) };
    if !zones.contains("__") {
        return Some(format!("zones/{zones}"));
    }
    let region = |zone: &str| -> Option<String> {
        let mut parts = zone.split('-');
        let (place, area, _) = (parts.next()?, parts.next()?, parts.next()?);
        parts.next().is_none().then(|| format!("{place}-{area}"))
    };
    let regions: Option<std::collections::BTreeSet<String>> = zones.split("__").map(region).collect();
    let regions = regions.filter(|regions| regions.len() == 1)?;
    regions.first().map(|region| format!("regions/{region}"))
}

/// The access modes of a volume. The old plugin of Google's disks took a disk for many writers, or
/// for one writer and many readers, as one for one writer, and its driver refuses them.
fn access_modes(volume: &PersistentVolume) -> Vec<AccessMode> {
    let modes: Vec<AccessMode> =
        volume.spec.access_modes.iter().filter_map(|mode| AccessMode::parse(mode)).collect();
    if modes.is_empty() || !volume.spec.other.contains_key(GCE) {
        return modes;
    }
    let is_for_readers = modes.iter().all(|mode| *mode == AccessMode::ReadOnlyMany);
    vec![if is_for_readers { AccessMode::ReadOnlyMany } else { AccessMode::ReadWriteOnce }]
}

#[cfg(test)]
mod tests;
