//! The stored forms of the Node object and of pods (pure, but for [`load`], which reads them).

use std::collections::BTreeMap;

use serde_json::Value;

use super::files::{FileError, Files};
use super::key::{Key, Kind};
use super::problems::Problems;
use crate::model::api::{self, ContainerStatus, Node, NodeSpec, NodeStatus, PodStatus};
use crate::model::ids::{FullName, PodUid};
use crate::model::meta::ObjectMeta;
use crate::model::pod::Pod;
use crate::model::typed;
use crate::util::secret::Secret;
use crate::util::sha256::sha256;

/// The problem of an object of a node with another name.
const OTHER_NODE: &str = "it was stored for a node with another name";

/// What a node starts alone with.
#[derive(Debug, Default)]
pub(super) struct StoredWorld {
    pub(super) pods: Vec<Pod>,
    pub(super) node: Option<Node>,
    /// The time of the last contact, in seconds of the wall clock.
    pub(super) contact: Option<i64>,
    /// The UID of the cluster.
    pub(super) cluster: Option<String>,
}

/// Reads the stored Node object and the pods with their last statuses. Adds to `problems` what cannot be
/// read.
pub(super) fn load(files: &Files, problems: &mut Problems) -> StoredWorld {
    let node: Option<Node> = read(files, &Key::node(), problems);
    // Without a name or a UID it proves nothing.
    let node = node.filter(|node| node.metadata.uid.as_ref().is_some_and(|uid| !uid.is_empty()));
    // The disk may be a copy of that of another machine, or the node has a new name: the pods of the other
    // one would run twice.
    let is_other = |name: Option<&String>| name.is_some_and(|name| name != files.node_name());
    let node = node.filter(|node| {
        let is_own = !is_other(node.metadata.name.as_ref());
        if !is_own {
            problems.set(&Key::node(), OTHER_NODE);
        }
        is_own
    });
    let mut pods: BTreeMap<FullName, Pod> = BTreeMap::new();
    for key in files.keys(Kind::Pod) {
        let Some(object) = read::<api::Pod>(files, &key, problems) else { continue };
        // A file says which pod it has; a body of another one is not used.
        if object.metadata.uid.as_deref() != Some(key.name.as_str()) || key.name.is_empty() {
            problems.set(&key, "it has another pod than its name says");
            continue;
        }
        if is_other(object.spec.as_ref().and_then(|spec| spec.node_name.as_ref())) {
            problems.set(&key, OTHER_NODE);
            continue;
        }
        let status = read(files, &Key::new(Kind::PodStatus, &key.name), problems);
        let status = with_claims(status, object.status.as_ref());
        let pod = Pod::from_server(api::Pod { status, ..object });
        // The API server has one pod of a name; the agent may have been killed before the former one's file
        // was removed.
        let former = pods.get(&pod.full_name());
        if former.is_none_or(|former| succeeds(&pod, former)) {
            pods.insert(pod.full_name(), pod);
        }
    }
    let contact = read::<Contact>(files, &Key::contact(), problems).map(|contact| contact.seconds);
    let cluster = read::<Cluster>(files, &Key::cluster(), problems).map(|cluster| cluster.uid);
    StoredWorld { pods: pods.into_values().collect(), node, contact, cluster }
}

/// When the API server was reached last.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Contact {
    /// Seconds since 1970, by the wall clock.
    pub(super) seconds: i64,
}

/// Which cluster the API server has.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Cluster {
    /// The UID of the service `default/kubernetes`, which each API server makes in an empty database, and
    /// which a node may read.
    pub(super) uid: String,
}

/// A stored object, read as those of the API server are. `None` if it has another form: the text of an error
/// may have parts of the object. A second decoder for all these types would have 310 KB.
pub(crate) fn decode<T: serde::de::DeserializeOwned>(body: &[u8]) -> Option<T> {
    let value: Value = serde_json::from_slice(body).ok()?;
    typed::decode(&value).ok()
}

fn read<T: serde::de::DeserializeOwned>(files: &Files, key: &Key, problems: &mut Problems) -> Option<T> {
    let body = match files.read(key) {
        Ok(body) => body?,
        Err(error) => {
            problems.set(key, &error.to_string());
            put_aside(files, key, &error);
            return None;
        }
    };
    let object = decode(body.reveal());
    if object.is_none() {
        problems.set(key, "it has another form");
    }
    object
}

/// Puts the file of an object aside, if it is damaged. Not if the process or the machine lacks something
/// now. A key that opens no file at all is not used, so it puts none aside.
/// Returns whether it was put aside.
pub(super) fn put_aside(files: &Files, key: &Key, error: &FileError) -> bool {
    let is_damaged = error.is_damage();
    if is_damaged {
        files.put_aside(key, error);
    }
    is_damaged
}

/// Whether `pod` is the successor of another one with the same name.
fn succeeds(pod: &Pod, former: &Pod) -> bool {
    let order = |pod: &Pod| {
        let created = pod.object().metadata.creation_timestamp.as_ref().map(|time| time.0);
        (!pod.is_deleting(), created, pod.uid().clone())
    };
    order(pod) > order(former)
}

/// The files of a pod that the API server shows: the pod without its status, and, if it has ended, its
/// status. The version is left out, so that any version of the API server counts as newer.
pub(super) fn of_pod(pod: &Pod) -> Vec<(Key, Secret<Vec<u8>>)> {
    let object = pod.object();
    let metadata = ObjectMeta { managed_fields: None, resource_version: None, ..object.metadata.clone() };
    let status = with_claims(None, object.status.as_ref());
    let shown = api::Pod { metadata, spec: object.spec.clone(), status };
    let mut files = Vec::new();
    let body = serde_json::to_vec(&shown);
    files.extend(body.ok().map(|body| (Key::new(Kind::Pod, pod.uid().as_str()), Secret::new(body))));
    if pod.is_over() {
        files.extend(object.status.as_ref().and_then(|status| of_status(pod.uid(), status)));
    }
    files
}

/// A status with the names of the resource claims that controllers have made for the pod, which `shown` has.
fn with_claims(status: Option<PodStatus>, shown: Option<&PodStatus>) -> Option<PodStatus> {
    let claims = shown.and_then(|shown| shown.resource_claim_statuses.clone());
    let extended = shown.and_then(|shown| shown.extended_resource_claim_status.clone());
    if claims.is_none() && extended.is_none() {
        return status;
    }
    let status = status.unwrap_or_default();
    Some(PodStatus { resource_claim_statuses: claims, extended_resource_claim_status: extended, ..status })
}

/// The file of a status on this node.
pub(super) fn of_status(uid: &PodUid, status: &PodStatus) -> Option<(Key, Secret<Vec<u8>>)> {
    let body = serde_json::to_vec(status).ok()?;
    Some((Key::new(Kind::PodStatus, uid.as_str()), Secret::new(body)))
}

/// What of a status is worth a write: its phase and reason, and of each container the number of restarts,
/// its id, the kind of its state and its exit code. Readiness, times and addresses are not.
pub(super) fn significant(status: &PodStatus) -> [u8; 16] {
    let container = |container: &ContainerStatus| {
        let state = container.state.clone().unwrap_or_default();
        (
            container.name.clone(),
            container.restart_count,
            container.container_id.clone(),
            (state.running.is_some(), state.terminated.map(|terminated| terminated.exit_code)),
        )
    };
    let lists =
        [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    let containers = lists.map(|list| list.iter().flatten().map(container).collect::<Vec<_>>());
    let text = format!("{:?}", (&status.phase, &status.reason, containers));
    sha256(text.as_bytes()).first_chunk().copied().unwrap_or_default()
}

/// Whether a phase is one of a pod that never runs again.
pub(super) fn is_terminal(status: &PodStatus) -> bool {
    matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
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

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, rest: Value) -> Pod {
        let mut object = json!({
            "metadata": {"name": uid, "namespace": "n", "uid": uid, "resourceVersion": "7",
                "creationTimestamp": "2026-01-02T03:04:05Z", "labels": {"a": "b"},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r1",
                    "controller": true}],
                "annotations": {"example.org/x": "y"}, "managedFields": [{"manager": "m"}], "generation": 2},
            "spec": {"nodeName": "node1", "serviceAccountName": "default", "priority": 3,
                "containers": [{"name": "c", "image": "i", "resources": {"limits": {"cpu": "100m",
                    "memory": "64Mi"}}, "ports": [{"containerPort": 80, "name": "http"}],
                    "livenessProbe": {"httpGet": {"path": "/", "port": "http"}}}],
                "volumes": [{"name": "v", "projected": {"defaultMode": 420, "sources": [
                    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}}]}}]},
            "status": {"phase": "Running", "qosClass": "Guaranteed"}});
        for (place, value) in rest.as_object().unwrap() {
            *object.pointer_mut(place).unwrap() = value.clone();
        }
        Pod::from(serde_json::from_value::<api::Pod>(object).unwrap())
    }

    fn write(files: &Files, bodies: &[(Key, Secret<Vec<u8>>)]) {
        for (key, body) in bodies {
            files.write(key, body.reveal()).unwrap();
        }
    }

    #[test]
    fn stored_pod_is_the_same_to_merge_as_the_servers() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        let shown = pod("u", json!({"/metadata/annotations": {"a": "b"}, "/spec/priority": 2_000_000_000}));
        write(&files, &of_pod(&shown));
        let mut problems = Problems::default();
        let world = load(&files, &mut problems);
        let [stored] = world.pods.as_slice() else { panic!("one pod") };
        let (before, after) = (stored.object(), shown.object());
        assert_eq!(before.spec, after.spec);
        let metadata = |pod: &Pod| ObjectMeta {
            resource_version: None,
            managed_fields: None,
            ..pod.object().metadata.clone()
        };
        assert_eq!(metadata(stored), metadata(&shown));
        assert!(before.metadata.resource_version.is_none() && before.metadata.managed_fields.is_none());
        assert!(before.status.is_none() && problems.texts().is_empty());
    }

    #[test]
    fn version_or_status_alone_is_no_change_of_a_pod() {
        let bodies = |pod: &Pod| {
            of_pod(pod).into_iter().map(|(key, body)| (key, body.reveal().clone())).collect::<Vec<_>>()
        };
        let shown = bodies(&pod("u", json!({})));
        assert_eq!(shown.len(), 1);
        let same = json!({"/metadata/resourceVersion": "8", "/status": {"phase": "Pending"},
            "/metadata/managedFields": [{"manager": "other"}]});
        assert_eq!(bodies(&pod("u", same)), shown);
        assert_ne!(bodies(&pod("u", json!({"/metadata/labels": {"a": "c"}}))), shown);
        let ended = bodies(&pod("u", json!({"/status": {"phase": "Succeeded"}})));
        assert_eq!((ended.len(), &ended[0], ended[1].0.kind), (2, &shown[0], Kind::PodStatus));
    }

    /// Without them, the claim of a template is not known.
    #[test]
    fn names_of_resource_claims_are_stored_with_the_pod_and_added_to_its_last_status() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        let claims = json!([{"name": "gpu", "resourceClaimName": "u-gpu-x"}]);
        let shown = pod("u", json!({"/status": {"phase": "Running", "resourceClaimStatuses": claims}}));
        write(&files, &of_pod(&shown));
        let load_status = || {
            let world = load(&files, &mut Problems::default());
            serde_json::to_value(world.pods[0].object().status.as_ref().unwrap()).unwrap()
        };
        assert_eq!(load_status(), json!({"resourceClaimStatuses": claims}));
        let status = PodStatus { phase: Some("Succeeded".to_owned()), ..PodStatus::default() };
        write(&files, &[of_status(shown.uid(), &status).unwrap()]);
        assert_eq!(load_status(), json!({"phase": "Succeeded", "resourceClaimStatuses": claims}));
    }

    #[test]
    fn load_leaves_out_damaged_and_foreign_files_and_statuses_without_a_pod() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        let [done, live, orphan] = ["done", "live", "orphan"].map(|uid| pod(uid, json!({})));
        write(&files, &of_pod(&done));
        write(&files, &of_pod(&live));
        let status = |phase: &str| PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() };
        let stored_status = |pod: &Pod, phase: &str| of_status(pod.uid(), &status(phase)).unwrap();
        write(
            &files,
            &[
                stored_status(&done, "Succeeded"),
                stored_status(&orphan, "Running"),
                stored_status(&live, "Running"),
            ],
        );
        // Damaged: a status, and the Node object.
        let node = Key::node();
        files.write(&node, br#"{"metadata":{"name":"node1","uid":"x"}}"#).unwrap();
        for key in [&Key::new(Kind::PodStatus, "live"), &node] {
            let path = testing::path(root.path(), key);
            let mut file = std::fs::read(&path).unwrap();
            file[3] ^= 1;
            std::fs::write(&path, file).unwrap();
        }
        // The pod in it is another one.
        let (_, body) = of_pod(&live).remove(0);
        files.write(&Key::new(Kind::Pod, "foreign"), body.reveal()).unwrap();
        files.write(&Key::new(Kind::Pod, "wrong"), b"{\"metadata\":[]}").unwrap();
        let mut problems = Problems::default();
        let world = load(&files, &mut problems);
        let pods: Vec<_> = world.pods.iter().map(|pod| (pod.uid().as_str(), pod.is_over())).collect();
        assert_eq!(pods, [("done", true), ("live", false)]);
        assert!(world.node.is_none());
        let texts = problems.texts().join("\n");
        for name in ["node ", "podstatus live", "pod foreign", "pod wrong"] {
            assert!(texts.contains(name), "{name}: {texts}");
        }
    }

    /// A copy of the disk of another machine, or a node with a new name.
    #[test]
    fn pods_and_node_object_of_another_node_are_not_loaded() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        files.write(&Key::node(), br#"{"metadata":{"name":"node2","uid":"x"}}"#).unwrap();
        write(&files, &of_pod(&pod("other", json!({"/spec/nodeName": "node2"}))));
        write(&files, &of_pod(&pod("own", json!({}))));
        let mut problems = Problems::default();
        let world = load(&files, &mut problems);
        let pods: Vec<_> = world.pods.iter().map(|pod| pod.uid().as_str()).collect();
        assert_eq!((pods, world.node.is_none()), (vec!["own"], true));
        let texts = problems.texts().join("\n");
        assert!(texts.contains("pod other") && texts.matches("another name").count() == 2, "{texts}");
    }

    #[test]
    fn node_and_pods_of_another_node_are_left_out() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        write(&files, &of_pod(&pod("copied", json!({"/spec/nodeName": "node2"}))));
        write(&files, &of_pod(&pod("own", json!({}))));
        let load_with = |name: &str| {
            let node = json!({"metadata": {"name": name, "uid": "x"}});
            testing::store(root.path(), &Key::node(), &node);
            let mut problems = Problems::default();
            let world = load(&files, &mut problems);
            (testing::uids(&world.pods), world.node.is_some(), problems.texts().len())
        };
        assert_eq!(load_with("node2"), (vec!["own".to_owned()], false, 2));
        assert_eq!(load_with("node1"), (vec!["own".to_owned()], true, 1));
    }

    #[test]
    fn newest_pod_of_a_name_is_loaded() {
        let root = tempfile::tempdir().unwrap();
        let files = testing::files(root.path());
        let named = |uid: &str, created: &str| {
            pod(uid, json!({"/metadata/name": "web-0", "/metadata/creationTimestamp": created}))
        };
        write(&files, &of_pod(&named("b", "2026-01-01T00:00:00Z")));
        write(&files, &of_pod(&named("a", "2026-01-02T00:00:00Z")));
        let uids =
            |world: &StoredWorld| world.pods.iter().map(|pod| pod.uid().to_string()).collect::<Vec<_>>();
        assert_eq!(uids(&load(&files, &mut Problems::default())), ["a"]);
        // A pod that is being deleted ends before its successor starts, whatever the times are.
        let mut old = named("a", "2026-01-02T00:00:00Z").into_object();
        old.metadata.deletion_timestamp.clone_from(&old.metadata.creation_timestamp);
        write(&files, &of_pod(&Pod::from(old)));
        assert_eq!(uids(&load(&files, &mut Problems::default())), ["b"]);
    }

    #[test]
    fn significant_parts_of_a_status_are_those_that_decide_about_a_restart() {
        let status = |value: Value| serde_json::from_value::<PodStatus>(value).unwrap();
        let base = json!({"phase": "Running", "podIP": "192.0.2.1", "containerStatuses": [{"name": "c",
            "image": "i", "imageID": "x", "ready": false, "restartCount": 1, "containerID": "containerd://a",
            "state": {"running": {"startedAt": "2026-01-02T03:04:05Z"}}}]});
        let digest = |place: &str, value: Value| {
            let mut changed = base.clone();
            *changed.pointer_mut(place).unwrap() = value;
            significant(&status(changed))
        };
        let first = significant(&status(base.clone()));
        assert_eq!(digest("/podIP", json!("192.0.2.2")), first);
        assert_eq!(digest("/containerStatuses/0/ready", json!(true)), first);
        for (place, value) in [
            ("/phase", json!("Failed")),
            ("/containerStatuses/0/restartCount", json!(2)),
            ("/containerStatuses/0/containerID", json!("containerd://b")),
            ("/containerStatuses/0/state", json!({"terminated": {"exitCode": 0}})),
            ("/containerStatuses/0/state", json!({"waiting": {"reason": "CrashLoopBackOff"}})),
        ] {
            assert_ne!(digest(place, value), first, "{place}");
        }
    }

    #[test]
    fn heartbeats_of_the_node_are_not_stored() {
        let shown: Node = serde_json::from_value(json!({
            "metadata": {"name": "n", "uid": "u", "resourceVersion": "1", "labels": {"a": "b"}},
            "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"cpu": "2"}, "conditions": [{"type": "Ready", "status": "True"}],
                "images": [{"names": ["i"]}]}
        }))
        .unwrap();
        let body = serde_json::to_value(node(&shown)).unwrap();
        assert_eq!(body["status"], json!({"allocatable": {"cpu": "2"}}));
        assert_eq!(body["metadata"], json!({"name": "n", "uid": "u", "labels": {"a": "b"}}));
        assert_eq!(body["spec"]["taints"][0]["key"], "k");
    }
}
