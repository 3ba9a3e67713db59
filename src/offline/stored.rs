//! The stored forms of the Node object and of pods (pure, but for [`load`], which reads them).

use super::files::Files;
use super::key::{Key, Kind};
use crate::model::api::{self, Node, NodeSpec, NodeStatus, PodStatus};
use crate::model::ids::PodUid;
use crate::model::meta::ObjectMeta;
use crate::model::pod::Pod;
use crate::util::secret::Secret;

/// What a node starts alone with.
#[derive(Debug, Default)]
pub(super) struct StoredWorld {
    pub(super) pods: Vec<Pod>,
    pub(super) node: Option<Node>,
}

/// Reads the stored Node object and the pods with their last statuses. Adds to `problems` what cannot be
/// read.
pub(super) fn load(files: &Files, problems: &mut Vec<String>) -> StoredWorld {
    let mut read = |key: &Key| match files.read(key) {
        Ok(body) => body,
        Err(error) => {
            problems.push(format!("{} {}: {error}", key.kind.word(), key.name));
            files.put_aside(key, &error);
            None
        }
    };
    let node = read(&Key::node()).and_then(|body| serde_json::from_slice(body.reveal()).ok());
    let mut pods = Vec::new();
    for key in files.keys(Kind::Pod) {
        let Some(body) = read(&key) else { continue };
        let Ok(object) = serde_json::from_slice::<api::Pod>(body.reveal()) else { continue };
        let status = read(&Key::new(Kind::PodStatus, &key.name));
        let status = status.and_then(|body| serde_json::from_slice::<PodStatus>(body.reveal()).ok());
        // A file says which pod it has; a body of another one is not used.
        if object.metadata.uid.as_deref() == Some(key.name.as_str()) {
            pods.push(Pod::from(api::Pod { status: status.or(object.status.clone()), ..object }));
        }
    }
    StoredWorld { pods, node }
}

/// The files of a pod that the API server shows: the pod without its status, and, if it has ended, its
/// status. The version is left out, so that any version of the API server counts as newer.
pub(super) fn of_pod(pod: &Pod) -> Vec<(Key, Secret<Vec<u8>>)> {
    let object = pod.object();
    let metadata = ObjectMeta { managed_fields: None, resource_version: None, ..object.metadata.clone() };
    let shown = api::Pod { metadata, spec: object.spec.clone(), status: None };
    let mut files = Vec::new();
    let body = serde_json::to_vec(&shown);
    files.extend(body.ok().map(|body| (Key::new(Kind::Pod, pod.uid().as_str()), Secret::new(body))));
    if pod.is_over() {
        let body = object.status.as_ref().and_then(|status| serde_json::to_vec(status).ok());
        files.extend(body.map(|body| (Key::new(Kind::PodStatus, pod.uid().as_str()), Secret::new(body))));
    }
    files
}

/// The files that go with a pod. Its tokens are removed by the thread, which knows their names.
pub(super) fn keys_of_pod(uid: &PodUid) -> [Key; 2] {
    [Kind::Pod, Kind::PodStatus].map(|kind| Key::new(kind, uid.as_str()))
}

/// The parts of the Node object that are needed without the API server, and that do not change by
/// themselves: no heartbeats, no images.
pub(super) fn node(node: &Node) -> Node {
    let metadata = &node.metadata;
    let status = node.status.as_ref().map(|status| NodeStatus {
        addresses: status.addresses.clone(),
        allocatable: status.allocatable.clone(),
        capacity: status.capacity.clone(),
        ..NodeStatus::default()
    });
    let spec = node.spec.as_ref().map(|spec| NodeSpec {
        pod_cidr: spec.pod_cidr.clone(),
        pod_cidrs: spec.pod_cidrs.clone(),
        taints: spec.taints.clone(),
        unschedulable: spec.unschedulable,
        ..NodeSpec::default()
    });
    let metadata = ObjectMeta {
        name: metadata.name.clone(),
        uid: metadata.uid.clone(),
        labels: metadata.labels.clone(),
        annotations: metadata.annotations.clone(),
        ..ObjectMeta::default()
    };
    Node { metadata, spec, status }
}
