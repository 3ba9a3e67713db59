//! What travels over the wire: the local API's documents and the kubelet's pod lists.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize};

use crate::kube::events::RecordedEvent;
use crate::model::api::{Pod, PodSpec, PodStatus};
use crate::model::meta::ObjectMeta;
use crate::model::runtime::{ContainerState, ListedPod};

/// The Kubernetes version whose kubelet this agent stands in for.
pub const KUBERNETES_VERSION: &str = "v1.36.3";

/// Shows every pod, one after the other.
pub type EachPod = dyn Fn(&mut dyn FnMut(PodView)) + Send + Sync;

/// A pod with what its worker is doing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub struct PodView {
    /// The object, status filled in.
    #[serde(deserialize_with = "pod")]
    pub pod: Pod,
    /// The worker's phase: Waiting, Syncing, Terminating, Terminated or Rejected.
    #[serde(default)]
    pub phase: String,
    /// What the last sync failed with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// When it is synced without a cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_sync: Option<Timestamp>,
}

/// Reads a pod through the one deserializer that the sources need anyway: the API types make
/// half a megabyte of code for each further one.
fn pod<'de, D: Deserializer<'de>>(from: D) -> Result<Pod, D::Error> {
    let value = serde_json::Value::deserialize(from)?;
    crate::sources::pod_from_value(&value).map_err(serde::de::Error::custom)
}

impl PodView {
    /// `metadata.name`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.pod.metadata.name.as_deref().unwrap_or_default()
    }

    /// `metadata.namespace`.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.pod.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// `metadata.uid`.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.pod.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// Answer of `/v1/pods`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PodsReply {
    /// Sorted by namespace and name.
    pub pods: Vec<PodView>,
}

/// One line of `/v1/pods/watch`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub enum PodChange {
    /// New to this watcher.
    Added(PodView),
    /// Changed.
    Modified(PodView),
    /// Gone; as it was last seen.
    Deleted(PodView),
}

/// Answer of `/v1/describe`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Described {
    /// The pod.
    #[serde(flatten)]
    pub view: PodView,
    /// Events about it, oldest first.
    pub events: Vec<RecordedEvent>,
}

/// An image on the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageRow {
    /// The runtime's id.
    pub id: String,
    /// Names with tags.
    pub tags: Vec<String>,
    /// Names with digests.
    pub digests: Vec<String>,
    /// Size on disk.
    pub size_bytes: u64,
    /// Never removed by garbage collection.
    pub pinned: bool,
    /// Whether a container uses it.
    pub in_use: bool,
}

/// Answer of `/v1/version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionReply {
    /// Of this program.
    pub version: String,
    /// The Kubernetes release whose kubelet it stands in for.
    pub kubernetes: String,
}

impl VersionReply {
    /// Of the program that asks.
    #[must_use]
    pub fn own() -> Self {
        VersionReply {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kubernetes: KUBERNETES_VERSION.to_owned(),
        }
    }
}

/// Answer of a POST to `/v1/debug`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DebugReply {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The ephemeral container's name.
    pub container: String,
}

/// Answer of `/v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeReport {
    /// Node name.
    pub node: String,
    /// Version of the agent.
    pub version: String,
    /// When the agent started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<Timestamp>,
    /// Time since then.
    pub uptime_seconds: u64,
    /// What the operator should look at; empty: all is well.
    pub problems: Vec<String>,
    /// The container runtime.
    pub runtime: RuntimeReport,
    /// Version, driver and root in words.
    pub cgroups: String,
    /// How many pods are in each phase.
    pub pods: BTreeMap<String, usize>,
    /// Where pods come from.
    pub sources: Vec<SourceReport>,
    /// Every thread of ours.
    pub threads: Vec<ThreadRow>,
    /// The agent's own memory.
    pub memory: MemoryReport,
    /// Queues with their depth and losses.
    pub queues: Vec<QueueReport>,
}

/// The container runtime as the node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct RuntimeReport {
    /// Such as `containerd`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Where it answers.
    pub endpoint: String,
    /// Why it is not ready; `None`: it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_ready: Option<String>,
    /// Why its network is not ready; `None`: it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_not_ready: Option<String>,
    /// By what means changes are found out: `event stream`, or full lists and why.
    pub changes: String,
}

/// A place that pods come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct SourceReport {
    /// `file`, `http` or `api`.
    pub name: String,
    /// Path or URL.
    pub place: String,
    /// Whether it has spoken yet.
    pub seen: bool,
    /// Pods it gives now.
    pub pods: usize,
    /// What it could not read.
    pub problems: Vec<ProblemReport>,
}

/// A manifest that could not be taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct ProblemReport {
    /// File or URL.
    pub place: String,
    /// Line, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// Field path, empty if none applies.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub field: String,
    /// What is wrong.
    pub message: String,
    /// Since when.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Whether the last good version keeps running.
    pub kept: bool,
}

/// One thread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct ThreadRow {
    /// Its name.
    pub name: String,
    /// What it waits for, or `running`.
    pub waits_for: String,
    /// For how long.
    pub seconds: f64,
}

/// The agent's own memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct MemoryReport {
    /// Resident now.
    pub rss_bytes: u64,
    /// Resident at most so far.
    pub peak_rss_bytes: u64,
    /// Of the resident, what is no file's.
    pub anonymous_bytes: u64,
}

/// One queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct QueueReport {
    /// Its name.
    pub name: String,
    /// What waits in it.
    pub depth: usize,
    /// What it had to drop so far.
    pub lost: u64,
}

/// `v1` `PodList`, whose items carry no kind of their own.
#[derive(Serialize)]
pub(in crate::server) struct PodList<T> {
    kind: &'static str,
    #[serde(rename = "apiVersion")]
    api_version: &'static str,
    metadata: serde_json::Map<String, serde_json::Value>,
    items: Vec<T>,
}

impl<T> PodList<T> {
    fn of(items: Vec<T>) -> Self {
        PodList { kind: "PodList", api_version: "v1", metadata: serde_json::Map::new(), items }
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

/// The body of `/pods`, written pod by pod.
pub(in crate::server) fn pod_list(each: &EachPod) -> serde_json::Result<Vec<u8>> {
    let mut body = br#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":["#.to_vec();
    let (mut comma, mut written) = ("", Ok(()));
    each(&mut |PodView { pod, .. }| {
        let item = PodItem { metadata: &pod.metadata, spec: pod.spec.as_ref(), status: pod.status.as_ref() };
        if written.is_ok() {
            body.extend_from_slice(std::mem::replace(&mut comma, ",").as_bytes());
            written = serde_json::to_writer(&mut body, &item);
        }
    });
    written?;
    body.extend_from_slice(b"]}");
    Ok(body)
}

/// The body of `/runningpods/`: identity and running containers only.
pub(in crate::server) fn running_list(pods: &[ListedPod]) -> PodList<serde_json::Value> {
    let item = |pod: &ListedPod| {
        let containers: Vec<_> = pod
            .containers
            .iter()
            .filter(|container| container.state == ContainerState::Running)
            .map(|container| {
                serde_json::json!({
                    "name": container.name, "image": container.image_ref.as_str(), "resources": {},
                })
            })
            .collect();
        serde_json::json!({
            "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid.as_str()},
            "spec": {"containers": containers},
            "status": {},
        })
    };
    PodList::of(pods.iter().filter(|pod| pod.is_running()).map(item).collect())
}
