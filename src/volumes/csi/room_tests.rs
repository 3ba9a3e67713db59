//! Volumes of pods from their claims to their removal, with the fake driver.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use serde_json::{Value, json};

use super::super::error::VolumeError;
use super::super::manager::{Deps, Settings, Volumes};
use super::super::mounts::Mount;
use super::fake::{DRIVER, FakeNode, Fault, registry};
use crate::kube::PodDependencies;
use crate::kube::objects::Objects;
use crate::kube::volume_claims::VolumeClaims;
use crate::model::event::{Event, EventSink};
use crate::model::pod::Pod;
use crate::util::stop::StopToken;

/// An agent whose API server has one claim, whose volume has this size.
fn agent(root: &Path, node: &Arc<FakeNode>, size: &str) -> (Volumes, Receiver<Box<Event>>) {
    let (events, queue) = EventSink::new();
    let claim = json!({"metadata": {"name": "c", "namespace": "n", "uid": "cu"},
        "spec": {"volumeName": "pv"}, "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}});
    let volume = json!({"metadata": {"name": "pv"}, "spec": {"capacity": {"storage": size},
        "volumeMode": "Filesystem", "claimRef": {"uid": "cu"}, "csi": {"driver": DRIVER, "volumeHandle": "h"}}});
    let claims = VolumeClaims::fixed(
        vec![serde_json::from_value(claim).unwrap()],
        vec![serde_json::from_value(volume).unwrap()],
    );
    let api = PodDependencies { claims, ..PodDependencies::for_tests(Objects::fixed(Vec::new())) };
    let settings = Settings { root_dir: root.to_owned(), node: "n1".to_owned(), ..Settings::default() };
    let deps = Deps::new(events, Some(api));
    let volumes = Volumes::with_drivers(settings, deps, registry(node.driver()));
    node.calls();
    (volumes, queue)
}

/// A pod with the claim, and the agent on the fake node.
struct Fixture {
    root: tempfile::TempDir,
    node: Arc<FakeNode>,
    volumes: Volumes,
    events: Receiver<Box<Event>>,
    pod: Pod,
    never: StopToken,
}

impl Fixture {
    fn new(size: &str) -> Fixture {
        let (root, node) = (tempfile::tempdir().unwrap(), FakeNode::new());
        let (volumes, events) = agent(root.path(), &node, size);
        Fixture { root, node, volumes, events, pod: with_claim(), never: StopToken::never() }
    }
}

fn pod(volume: Value, place: &str) -> Pod {
    let mut volume = volume;
    volume["name"] = json!("v");
    let mut container = json!({"name": "c"});
    container[place] = json!([{"name": "v", "mountPath": "/v", "devicePath": "/dev/v"}]);
    let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u1"},
        "spec": {"containers": [container], "volumes": [volume]}});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
}

fn with_claim() -> Pod {
    pod(json!({"persistentVolumeClaim": {"claimName": "c"}}), "volumeMounts")
}

/// The calls that change something.
fn changes(node: &FakeNode) -> Vec<String> {
    node.calls().into_iter().filter(|call| call != "capabilities").collect()
}

/// A sync of the pod, with the end of the updates that it begins: a busy machine may need longer for them
/// than a sync waits.
fn remount(volumes: &Volumes, pod: &Pod) {
    let never = StopToken::never();
    volumes.remount(pod, &never);
    let begun = Instant::now();
    while volumes.operations.is_busy(pod.uid()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the update does not end");
        std::thread::yield_now();
    }
    if !volumes.refreshes().is_empty() {
        // It takes the results, and begins no other updates.
        volumes.remount(pod, &never);
    }
}

#[test]
fn volume_of_a_claim_is_published_and_removed_with_its_pod() {
    let Fixture { root, node, volumes, events, pod, never } = Fixture::new("1Gi");
    let ready = volumes.setup(&pod, &never).unwrap();
    assert!(ready[0].host_path.ends_with("pods/u1/volumes/kubernetes.io~csi/pv/mount"));
    assert_eq!(changes(&node), ["stage h", "publish h"]);
    // Nothing has grown: the driver is not called.
    volumes.remount(&pod, &never);
    assert_eq!(volumes.setup(&pod, &never).unwrap(), ready);
    assert_eq!(changes(&node), Vec::<String>::new());
    // A driver without attachments.
    assert_eq!(volumes.in_use(), Vec::<String>::new());
    volumes.tear_down(pod.uid(), &never).unwrap();
    assert_eq!(changes(&node), ["unpublish h", "unstage h"]);
    assert!(!root.path().join("pods/u1/volumes/kubernetes.io~csi").exists());
    assert!(events.is_empty());
    node.check();
}

/// The container of a driver has the node's directory at the configured path, and nothing else.
#[test]
fn driver_gets_configured_paths_if_directories_are_links() {
    let top = tempfile::tempdir().unwrap();
    let top = std::fs::canonicalize(top.path()).unwrap();
    let (root, linked, disk) = (top.join("root"), top.join("linked"), top.join("disk/pods"));
    std::fs::create_dir_all(&disk).unwrap();
    std::fs::create_dir_all(&root).unwrap();
    std::os::unix::fs::symlink(&root, &linked).unwrap();
    std::os::unix::fs::symlink(&disk, root.join("pods")).unwrap();
    let node = FakeNode::new();
    let (volumes, _events) = agent(&linked, &node, "2Gi");
    let (pod, never) = (with_claim(), StopToken::never());
    let ready = volumes.setup(&pod, &never).unwrap();
    let plugins = linked.join("plugins/kubernetes.io/csi");
    let publish = node.last_publish();
    assert!(Path::new(&node.last_stage().staging_path).starts_with(&plugins));
    assert!(Path::new(&publish.staging_path).starts_with(&plugins));
    let target = linked.join("pods/u1/volumes/kubernetes.io~csi/pv/mount");
    assert_eq!(Path::new(&publish.target_path), target);
    assert_eq!(Path::new(&node.last_expand().path), target);
    // Sub paths and the runtime get the same path as for other volumes.
    assert_eq!(ready[0].host_path, disk.join("u1/volumes/kubernetes.io~csi/pv/mount"));
    volumes.tear_down(pod.uid(), &never).unwrap();
    assert_eq!((node.staged(), node.published()), (0, 0));
    node.check();
}

/// The disk was detached under the mount of the sub path.
#[test]
fn volume_stays_published_while_its_sub_path_cannot_be_unmounted() {
    let root = tempfile::tempdir().unwrap();
    let root = std::fs::canonicalize(root.path()).unwrap();
    let node = FakeNode::new();
    let (volumes, _events) = agent(&root, &node, "1Gi");
    let (pod, never) = (with_claim(), StopToken::never());
    volumes.setup(&pod, &never).unwrap();
    changes(&node);
    let path = root.join("pods/u1");
    std::fs::create_dir_all(path.join("volume-subpaths")).unwrap();
    let remove = |volumes: &Volumes, name: &str| {
        // The unmount fails: a link is not followed.
        let link = path.join("volume-subpaths").join(name);
        std::os::unix::fs::symlink(".", &link).unwrap();
        let mut work = volumes.unmounts(pod.uid(), &path).unwrap().unwrap();
        work.sub_paths = vec![vec![Mount {
            point: link.join("c/0"),
            root: "/a".into(),
            device: "8:16".to_owned(),
            kind: "ext4".to_owned(),
            source: String::new(),
        }]];
        let failed = work.run(&never);
        std::fs::remove_file(&link).unwrap();
        let shown = format!("{name}/c/0");
        assert!(failed.len() == 1 && failed[0].0 == shown, "{failed:?}");
        changes(&node)
    };
    assert_eq!(remove(&volumes, "v"), Vec::<String>::new());
    // A restarted agent does not know the name of the volume in the pod.
    let (again, _events) = agent(&root, &node, "1Gi");
    assert_eq!(remove(&again, "w"), Vec::<String>::new());
    assert_eq!(remove(&volumes, "w"), ["unpublish h", "unstage h"]);
    node.check();
}

#[test]
fn volume_stays_in_a_pod_whose_driver_does_not_respond() {
    let Fixture { root, node, volumes, events: _events, pod, never } = Fixture::new("1Gi");
    volumes.setup(&pod, &never).unwrap();
    node.fail("unpublish", Fault::Uncertain);
    let error = volumes.tear_down(pod.uid(), &never).unwrap_err();
    assert!(matches!(&error, VolumeError::LeftBehind { .. }), "{error}");
    assert!(error.to_string().starts_with("mounted volumes=[kubernetes.io~csi/pv]: "), "{error}");
    assert!(root.path().join("pods/u1/volumes/kubernetes.io~csi/pv/vol_data.json").exists());
    assert_eq!(volumes.unremoved_pods().len(), 1);
    // The agent restarts, and finds it on the disk.
    let (volumes, _events) = agent(root.path(), &node, "1Gi");
    let is_known = |_: &crate::model::ids::PodUid| false;
    assert_eq!(volumes.orphans(&is_known, &never).unwrap().removed.len(), 1);
    assert_eq!(changes(&node), ["unpublish h", "unstage h"]);
    assert_eq!((node.staged(), node.published()), (0, 0));
    node.check();
}

#[test]
fn volume_that_cannot_be_unstaged_is_unstaged_after_its_pod_has_ended() {
    let Fixture { root: _root, node, volumes, events: _events, pod, never } = Fixture::new("1Gi");
    volumes.setup(&pod, &never).unwrap();
    node.fail("unstage", Fault::Uncertain);
    node.fail("unstage", Fault::Uncertain);
    // The pod ends, and what it leaves is repeated by the sweep.
    volumes.tear_down(pod.uid(), &never).unwrap();
    assert_eq!((node.staged(), node.published()), (1, 0));
    *volumes.sweep_at.lock().unwrap() = Some(std::time::Instant::now());
    volumes.sweep_devices(&never);
    assert_eq!(node.staged(), 0);
    node.check();
}

#[test]
fn volume_is_grown_when_it_is_mounted_and_while_it_is_used() {
    let Fixture { root: _root, node, volumes, events, pod, never } = Fixture::new("2Gi");
    volumes.setup(&pod, &never).unwrap();
    assert_eq!(changes(&node), ["stage h", "publish h", "expand h"]);
    assert_eq!(events.try_recv().unwrap().reason, "FileSystemResizeSuccessful");
    // The claim of this server keeps its old size.
    remount(&volumes, &pod);
    assert_eq!((changes(&node), node.last_expand().bytes), (vec!["expand h".to_owned()], 2 << 30));
    node.fail("expand", Fault::Final);
    remount(&volumes, &pod);
    let reasons: Vec<_> = events.try_iter().map(|event| event.reason).collect();
    assert_eq!(reasons, ["FileSystemResizeSuccessful", "VolumeResizeFailed"]);
    // The pod keeps its volume.
    assert_eq!(volumes.setup(&pod, &never).unwrap().len(), 1);
    volumes.tear_down(pod.uid(), &never).unwrap();
    node.check();
}

#[test]
fn inline_volume_is_published_without_being_staged() {
    let root = tempfile::tempdir().unwrap();
    let node = FakeNode::new();
    let (volumes, _events) = agent(root.path(), &node, "1Gi");
    let (pod, never) = (pod(json!({"csi": {"driver": DRIVER}}), "volumeMounts"), StopToken::never());
    let ready = volumes.setup(&pod, &never).unwrap();
    assert!(ready[0].host_path.ends_with("volumes/kubernetes.io~csi/v/mount"));
    let handle = super::names::inline_handle("u1", "v");
    assert_eq!(changes(&node), [format!("publish {handle}")]);
    volumes.tear_down(pod.uid(), &never).unwrap();
    assert_eq!(changes(&node), [format!("unpublish {handle}")]);
    node.check();
}

#[test]
fn event_names_the_driver_that_is_missing() {
    let root = tempfile::tempdir().unwrap();
    let node = FakeNode::new();
    let (volumes, events) = agent(root.path(), &node, "1Gi");
    volumes.drivers().deregister(DRIVER, "/s");
    let (pod, never) = (with_claim(), StopToken::never());
    assert!(volumes.setup(&pod, &never).is_err());
    let event = events.try_recv().unwrap();
    assert_eq!(
        (event.reason, event.message.as_str()),
        (
            "FailedMount",
            "MountVolume.MountDevice failed for volume \"pv\" : kubernetes.io/csi: attacher.MountDevice failed \
             to create newCsiDriverClient: driver name d.example not found in the list of registered CSI drivers"
        )
    );
    volumes.tear_down(pod.uid(), &never).unwrap();
    assert_eq!(changes(&node), Vec::<String>::new());
}
