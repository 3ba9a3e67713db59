//! The documents of the local API, and the kubelet's lists of pods.

pub(super) mod containers;
pub(super) mod holdings;

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;

use crate::images::CheckReport;
use crate::kube::events::RecordedEvent;
use crate::model::api::{Pod, PodSpec, PodStatus};
use crate::model::meta::ObjectMeta;
use crate::model::runtime::{ContainerState, ListedPod};
use crate::offline;
use holdings::{ClaimRow, DeviceRow, VolumeRow};

pub(crate) use crate::model::version::KUBERNETES_VERSION;

/// Calls back with each pod.
pub(super) type EachPod<'a> = dyn Fn(&mut dyn FnMut(PodView)) + 'a;

/// A pod with the state of its worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodView {
    /// The object, status filled in.
    #[serde(deserialize_with = "pod")]
    pub pod: Pod,
    /// The worker's phase: Waiting, Syncing, Terminating, Terminated or Rejected.
    #[serde(default)]
    pub phase: String,
    /// The error of the last sync.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// The time of the next periodic sync.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_sync: Option<Timestamp>,
    /// The CPUs and NUMA nodes that each container has for itself, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<String>,
}

/// Reads a pod through the deserializer of the sources: each further deserializer of the API types
/// adds half a megabyte of code.
fn pod<'de, D: Deserializer<'de>>(from: D) -> Result<Pod, D::Error> {
    let value = serde_json::Value::deserialize(from)?;
    crate::sources::pod_from_value(&value).map_err(serde::de::Error::custom)
}

impl PodView {
    pub(crate) fn name(&self) -> &str {
        self.pod.metadata.name.as_deref().unwrap_or_default()
    }

    pub(crate) fn namespace(&self) -> &str {
        self.pod.metadata.namespace.as_deref().unwrap_or_default()
    }

    pub(crate) fn uid(&self) -> &str {
        self.pod.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// Response of `/v1/pods`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PodsReply {
    /// Sorted by namespace and name.
    pub pods: Vec<PodView>,
}

/// One line of `/v1/pods/watch`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub(crate) enum PodChange {
    Added(PodView),
    Modified(PodView),
    /// The document has only the identity of the pod.
    Deleted(PodView),
}

/// Response of `/v1/describe`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PodDescription {
    #[serde(flatten)]
    pub view: PodView,
    /// The numbers of its cgroup, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PodCgroupReport>,
    /// Events of the pod, oldest first.
    pub events: Vec<RecordedEvent>,
    /// The volumes that its containers use, and what could not be removed of others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeRow>,
    /// The devices of device plugins that its containers have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceRow>,
    /// The devices of its resource claims.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<ClaimRow>,
}

/// The numbers of a pod's cgroup; an absent number is unknown, an absent limit does not exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodCgroupReport {
    /// The path below the mounts of cgroups.
    pub path: String,
    /// CPU weight in the scale of version 1: 1,024 per core of the requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_shares: Option<u64>,
    /// Thousandths of a core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_limit_milli: Option<u64>,
    /// Periods in which the pod was throttled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttled_periods: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Processes that the OOM killer ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_kills: Option<u64>,
    /// Processes and threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids_limit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids: Option<u64>,
}

/// A line of the check of an image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct VerifyLine {
    /// The number of layers that were compared.
    pub done: usize,
    /// The number of all layers.
    pub layers: usize,
    /// The result, in the last line.
    pub report: Option<CheckReport>,
    /// Why there is no result, in the last line.
    pub error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ImageRow {
    pub id: String,
    /// Names with tags.
    pub tags: Vec<String>,
    /// Names with digests.
    pub digests: Vec<String>,
    pub size_bytes: u64,
    /// Garbage collection never removes the image.
    pub pinned: bool,
    /// Whether a container uses it.
    pub in_use: bool,
}

/// Response of `/v1/version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VersionReply {
    pub version: String,
    /// The Kubernetes release of the kubelet that it replaces.
    pub kubernetes: String,
}

impl VersionReply {
    /// The versions of this program.
    pub(crate) fn own() -> Self {
        VersionReply {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kubernetes: KUBERNETES_VERSION.to_owned(),
        }
    }
}

/// Response of a POST to `/v1/debug`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DebugReply {
    pub namespace: String,
    pub pod: String,
    /// The ephemeral container.
    pub container: String,
}

/// Response of `/v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct NodeReport {
    pub node: String,
    /// The version of the agent.
    pub version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<Timestamp>,
    pub uptime_seconds: u64,
    /// For the operator; empty: the node is healthy.
    pub problems: Vec<String>,
    pub runtime: RuntimeReport,
    /// `v1` or `v2`.
    pub cgroups: String,
    /// The number of pods by phase.
    pub pods: BTreeMap<String, usize>,
    pub sources: Vec<SourceReport>,
    pub threads: Vec<ThreadRow>,
    pub memory: MemoryReport,
    pub queues: Vec<QueueReport>,
    pub disk_writes: DiskWritesReport,
    /// `None`: they have no quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_logs: Option<LogsReport>,
    /// The pressure conditions of the node, such as `MemoryPressure`.
    pub pressures: Vec<String>,
    pub thresholds: Vec<ThresholdReport>,
    /// What the machine has, and what pods may use of it.
    pub resources: Vec<ResourceReport>,
    /// `None`: the agent runs without `--offline`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offline: Option<offline::Report>,
}

/// A resource of the node, as quantities.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ResourceReport {
    /// Such as `memory`.
    pub name: String,
    pub capacity: String,
    /// Not for pods: reservations, and the thresholds of eviction.
    pub reserved: String,
    pub allocatable: String,
}

/// A threshold at which pods are evicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ThresholdReport {
    /// Such as `memory.available`.
    pub signal: String,
    /// What is available, as a quantity.
    pub available: String,
    /// The least that must be available, as a quantity.
    pub threshold: String,
    /// Whether pods are evicted only after a grace period.
    pub soft: bool,
    /// Whether less than the threshold is available.
    pub met: bool,
    /// Whether less than twice the threshold is available.
    pub near: bool,
}

/// The state of the container runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct RuntimeReport {
    /// Such as `containerd`.
    pub name: String,
    pub version: String,
    pub endpoint: String,
    /// Why it is not ready; `None`: it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_ready: Option<String>,
    /// Why its network is not ready; `None`: it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_not_ready: Option<String>,
    /// How changes are detected: `event stream`, or full lists and why.
    pub changes: String,
}

/// A source of pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct SourceReport {
    /// `file`, `http` or `api`.
    pub name: String,
    /// Path or URL.
    pub place: String,
    /// Whether it has been read.
    pub seen: bool,
    /// The number of its pods.
    pub pods: usize,
    pub problems: Vec<ProblemReport>,
}

/// A manifest that could not be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ProblemReport {
    /// File or URL.
    pub place: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// The path of the field; empty: none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub field: String,
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Whether the last valid version keeps running.
    pub kept: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ThreadRow {
    pub name: String,
    /// What the thread waits for, or `running`.
    pub waits_for: String,
    pub seconds: f64,
}

/// The agent's own memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct MemoryReport {
    pub rss_bytes: u64,
    pub peak_rss_bytes: u64,
    /// The part of `rss_bytes` that no file backs.
    pub anonymous_bytes: u64,
}

/// What the agent wrote to the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DiskWritesReport {
    /// Since the start: files, links and directories that were created or written.
    pub files: u64,
    pub bytes: u64,
    pub syncs: u64,
    /// The same in the last hour.
    pub last_hour_files: u64,
    pub last_hour_bytes: u64,
    pub last_hour_syncs: u64,
}

/// The logs of all containers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct LogsReport {
    pub quota_bytes: u64,
    /// At the end of the last pass.
    pub used_bytes: u64,
    /// Files that were removed because of the quota, since the start.
    pub removed_files: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct QueueReport {
    pub name: String,
    /// The number of waiting entries.
    pub depth: usize,
    /// The number of dropped entries.
    pub lost: u64,
}

/// A `v1` `PodList` in JSON, made item by item. Items have no `kind`.
struct PodList {
    body: Vec<u8>,
    comma: &'static str,
    outcome: serde_json::Result<()>,
}

impl PodList {
    fn new() -> PodList {
        let body = br#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":["#.to_vec();
        PodList { body, comma: "", outcome: Ok(()) }
    }

    fn add(&mut self, item: &impl Serialize) {
        if self.outcome.is_ok() {
            self.body.extend_from_slice(std::mem::replace(&mut self.comma, ",").as_bytes());
            self.outcome = serde_json::to_writer(&mut self.body, item);
        }
    }

    fn finish(mut self) -> serde_json::Result<Vec<u8>> {
        self.outcome?;
        self.body.extend_from_slice(b"]}");
        Ok(self.body)
    }
}

#[derive(Serialize)]
struct PodItem<'a> {
    metadata: &'a ObjectMeta,
    #[serde(skip_serializing_if = "Option::is_none")]
    spec: Option<&'a PodSpec>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'a PodStatus>,
}

/// The body of `/pods`.
pub(super) fn pod_list(each: &EachPod) -> serde_json::Result<Vec<u8>> {
    let mut list = PodList::new();
    each(&mut |PodView { pod, .. }| {
        list.add(&PodItem { metadata: &pod.metadata, spec: pod.spec.as_ref(), status: pod.status.as_ref() });
    });
    list.finish()
}

/// The body of `/runningpods/`: identity and running containers only.
pub(super) fn running_list(pods: &[ListedPod]) -> serde_json::Result<Vec<u8>> {
    let mut list = PodList::new();
    for pod in pods.iter().filter(|pod| pod.is_running()) {
        let running = pod.containers.iter().filter(|container| container.state == ContainerState::Running);
        let containers: Vec<_> = running
            .map(|container| json!({"name": container.name, "image": container.image_ref.as_str(), "resources": {}}))
            .collect();
        list.add(&json!({
            "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid.as_str()},
            "spec": {"containers": containers},
            "status": {},
        }));
    }
    list.finish()
}
