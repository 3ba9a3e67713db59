use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::json;

use super::super::manager::{Deps, Settings};
use super::*;
use crate::kube::claims::Claims;
use crate::kube::objects::{Object, Objects};
use crate::kube::runtime_classes::RuntimeClasses;
use crate::kube::tokens::{TokenAnswer, TokenApi, Tokens};
use crate::kube::{LocalObjects, PodApi};
use crate::model::event::EventSink;

const LONG: Duration = Duration::from_secs(60);

/// An API server whose first tokens are due at once, one per volume. The requests after them wait until
/// the sender of `silent` is dropped.
struct Server {
    first: u32,
    silent: Receiver<()>,
    requests: Arc<AtomicU32>,
}

impl TokenApi for Server {
    fn create(&self, _: &str, _: &str, _: &serde_json::Value) -> Result<TokenAnswer, String> {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        // One request waits; those that begin later are answered sooner.
        if number == self.first {
            let _ = self.silent.recv_timeout(LONG);
        }
        let answer = json!({
            "spec": {"expirationSeconds": if number < self.first { 0 } else { 3600 }},
            "status": {"token": number.to_string(), "expirationTimestamp": "2100-01-01T00:00:00Z"},
        });
        Ok(serde_json::from_value(answer).unwrap())
    }
}

/// The volumes of a node, with the number of requests for tokens.
struct Node {
    volumes: Volumes,
    api: PodApi,
    objects: Objects,
    requests: Arc<AtomicU32>,
    root: PathBuf,
}

/// Root's volumes of tokens are mounts, which no test leaves behind.
impl Drop for Node {
    fn drop(&mut self) {
        for pod in std::fs::read_dir(self.root.join("pods")).into_iter().flatten().flatten() {
            let uid = PodUid::from(pod.file_name().to_string_lossy().as_ref());
            let _ = self.volumes.tear_down(&uid, &StopToken::never());
        }
    }
}

impl Node {
    fn new(root: &Path, first: u32, silent: Receiver<()>) -> Node {
        let objects = Objects::fixed(Vec::new());
        let requests = Arc::<AtomicU32>::default();
        let server = Server { first, silent, requests: Arc::clone(&requests) };
        let api = PodApi {
            objects: objects.clone(),
            tokens: Tokens::new(Box::new(server)),
            services: Default::default(),
            classes: RuntimeClasses::none(),
            claims: Claims::none(),
            trust: Default::default(),
        };
        let settings = Settings {
            root_dir: root.to_owned(),
            allocatable: Default::default(),
            plugin_dir: Default::default(),
            node: String::new(),
        };
        let deps =
            Deps { events: EventSink::new().0, api: Some(api.clone()), local: LocalObjects::default() };
        Node { volumes: Volumes::new(settings, deps), api, objects, requests, root: root.to_owned() }
    }

    fn map(&self, version: &str, data: &[(&str, Vec<u8>)]) {
        let data = data.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        let object = Object { resource_version: version.to_owned(), data, ..Object::default() };
        self.objects.set(&Key::new(Kind::ConfigMap, "n", "map"), Some(object));
    }

    fn wait_for(&self, mut condition: impl FnMut(&Node) -> bool) {
        let until = Instant::now() + LONG;
        while !condition(self) {
            assert!(Instant::now() < until, "the condition does not come true");
            std::thread::yield_now();
        }
    }
}

/// A pod that mounts all of these volumes.
fn pod(volumes: serde_json::Value) -> Pod {
    let names = volumes.as_array().unwrap().iter();
    let mounts: Vec<_> = names.map(|one| json!({"name": one["name"], "mountPath": "/m"})).collect();
    let value = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u1"},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
    });
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
}

/// A volume with the files of a ConfigMap, and with a token for this audience.
fn with_token(name: &str, items: &serde_json::Value) -> serde_json::Value {
    let map = json!({"configMap": {"name": "map", "items": items}});
    let token = json!({"serviceAccountToken": {"path": "t", "audience": name, "expirationSeconds": 3600}});
    json!({"name": name, "projected": {"sources": [map, token]}})
}

fn one_item() -> serde_json::Value {
    json!([{"key": "k", "path": "k"}])
}

fn items(number: usize) -> serde_json::Value {
    (0..number).map(|n| json!({"key": "k", "path": n.to_string()})).collect()
}

/// A node and its pod, whose volume has the first version of the ConfigMap. An update of it has read the
/// ConfigMap, and waits for its token until the sender of `silent` is dropped.
fn node_with_waiting_update(root: &Path, silent: Receiver<()>) -> (Node, Pod, Vec<MountedVolume>) {
    let node = Node::new(root, 1, silent);
    node.map("1", &[("k", b"1".to_vec())]);
    let pod = pod(json!([with_token("a", &one_item())]));
    node.api.register(&pod);
    let ready = node.volumes.setup(&pod, &StopToken::never()).unwrap();
    node.volumes.remount(&pod, &StopToken::never());
    node.wait_for(|node| node.requests.load(Ordering::SeqCst) == 2);
    (node, pod, ready)
}

fn volume<'a>(pod: &'a Pod, name: &str) -> &'a Volume {
    pod.spec().volumes.iter().flatten().find(|volume| volume.name == name).unwrap()
}

/// Updates took the three places of the pod, and its next mount failed.
#[test]
fn updates_that_wait_for_the_api_server_leave_places_for_mounts() {
    let root = tempfile::tempdir().unwrap();
    let (answer, silent) = bounded::<()>(0);
    let node = Node::new(root.path(), 4, silent);
    node.map("1", &[("k", b"1".to_vec())]);
    let names = ["a", "b", "c", "d"];
    let mut wanted: Vec<_> = names.iter().map(|name| with_token(name, &one_item())).collect();
    let before = pod(json!(wanted));
    node.api.register(&before);
    let never = StopToken::never();
    node.volumes.setup(&before, &never).unwrap();
    // An ephemeral container uses one more, for which a thread is needed.
    wanted.push(json!({"name": "h", "hostPath": {"path": "/", "type": "Directory"}}));
    let after = pod(json!(wanted));
    for _ in 0..3 {
        assert_eq!(node.volumes.setup(&after, &never).unwrap().len(), 5);
        let refreshes = node.volumes.refreshes();
        assert_eq!((refreshes.current.len(), refreshes.last), (1, 1), "one update at a time");
    }
    assert_eq!(node.requests.load(Ordering::SeqCst), 5);
    drop(answer);
    // Each volume gets its turn.
    let read = |name: &str| {
        let path = root.path().join("pods/u1/volumes/kubernetes.io~projected").join(name);
        std::fs::read_to_string(path.join("t")).unwrap().parse::<u32>().unwrap()
    };
    node.wait_for(|node| {
        node.volumes.remount(&after, &never);
        names.iter().all(|name| read(name) >= 4)
    });
    node.volumes.tear_down(after.uid(), &never).unwrap();
    assert!(node.volumes.refreshes().is_empty());
}

#[test]
fn volume_whose_update_is_the_oldest_is_the_next_one() {
    let (mut refreshes, uid) = (Refreshes::default(), PodUid::from("u"));
    let names = ["a", "b", "c", "d"];
    assert_eq!(refreshes.order(&uid, &names), [0, 1, 2, 3]);
    ["b", "a"].iter().for_each(|name| refreshes.begun(&uid, name));
    assert_eq!(refreshes.order(&uid, &names), [2, 3, 1, 0]);
    assert_eq!(refreshes.order(&PodUid::from("other"), &names), [0, 1, 2, 3]);
    // The result of the present one is taken first.
    let (current, report) = running("a", Instant::now());
    refreshes.current.insert(uid.clone(), current);
    assert_eq!(refreshes.order(&uid, &names), [0, 2, 3, 1]);
    drop(report);
}

/// An update that was begun at this time, and the sender of its result.
fn running(volume: &str, begun: Instant) -> (Refresh, crossbeam_channel::Sender<Outcome>) {
    let (report, ended) = bounded(1);
    let key = (&PodUid::from("u"), volume, &operations::Share::default());
    let operation = operations::Operations::default().start(key, |_: Result<(), _>| {}, |_| Ok(())).unwrap();
    (Refresh { volume: volume.to_owned(), operation, begun, ended, is_outdated: false }, report)
}

#[test]
fn pod_has_one_update_until_its_result_is_taken_or_it_is_over_its_time() {
    let (mut refreshes, uid, begun) = (Refreshes::default(), PodUid::from("u"), Instant::now());
    let late = begun + operations::LIMIT;
    assert_eq!(refreshes.step(&uid, "a", begun), Step::Start);
    let (current, report) = running("a", begun);
    refreshes.current.insert(uid.clone(), current);
    let steps = |refreshes: &Refreshes, now| ["a", "b"].map(|name| refreshes.step(&uid, name, now));
    assert_eq!(steps(&refreshes, begun), [Step::Leave, Step::Leave]);
    assert_eq!(steps(&refreshes, late), [Step::Take, Step::Start]);
    assert_eq!(refreshes.step(&PodUid::from("other"), "a", begun), Step::Start);
    report.send(Err(VolumeError::Panicked)).unwrap();
    assert_eq!(steps(&refreshes, begun), [Step::Take, Step::Leave]);
    refreshes.current.get_mut(&uid).unwrap().is_outdated = true;
    assert_eq!(steps(&refreshes, begun), [Step::Start, Step::Start]);
}

/// A sync waited 100 ms for each of its volumes.
#[test]
fn one_wait_is_shared_by_all_updates_of_a_sync() {
    let (report, ended) = bounded::<Outcome>(1);
    let never = StopToken::never();
    let mut patience = Patience::of_sync();
    assert!(patience.wait(&ended, &never).unwrap().is_none());
    assert_eq!(patience.0, Duration::ZERO);
    assert!(patience.wait(&ended, &never).unwrap().is_none());
    // A result that is there is taken.
    report.send(Err(VolumeError::Panicked)).unwrap();
    assert!(patience.wait(&ended, &never).unwrap().is_some());
    let mut patience = Patience(LONG);
    report.send(Err(VolumeError::Panicked)).unwrap();
    assert!(patience.wait(&ended, &never).unwrap().is_some());
    assert!(patience.0 < LONG, "the wait counts");
    let (source, stop) = crate::util::stop::pair();
    drop(source);
    assert!(matches!(patience.wait(&ended, &stop), Err(VolumeError::Stopping)));
}

/// The files of an update that ended late, with an older ConfigMap, replaced newer ones.
#[test]
fn late_result_of_an_update_does_not_replace_newer_files() {
    let root = tempfile::tempdir().unwrap();
    let (answer, silent) = bounded::<()>(0);
    let (node, pod, ready) = node_with_waiting_update(root.path(), silent);
    let never = StopToken::never();
    let read = |name: &str| std::fs::read_to_string(ready[0].host_path.join(name)).unwrap();
    node.map("2", &[("k", b"2".to_vec())]);
    node.api.tokens.get(&pod, "a", Some(3600)).unwrap();
    node.volumes.remount(&pod, &never);
    assert_eq!((read("k"), read("t")), ("2".to_owned(), "2".to_owned()));
    drop(answer);
    node.wait_for(|node| !node.volumes.operations.is_busy(pod.uid()));
    // Without a token the next update needs a response.
    node.api.tokens.forget(pod.uid());
    node.wait_for(|node| {
        node.volumes.remount(&pod, &never);
        assert_eq!(read("k"), "2");
        read("t") == "3"
    });
}

/// They were counted only when a sync had taken them.
#[test]
fn files_of_an_update_count_until_a_sync_has_written_them() {
    let root = tempfile::tempdir().unwrap();
    let (answer, silent) = bounded::<()>(0);
    let node = Node::new(root.path(), 2, silent);
    node.map("1", &[("k", b"1".to_vec())]);
    let pod = pod(json!([with_token("a", &items(20)), with_token("b", &items(20))]));
    node.api.register(&pod);
    let never = StopToken::never();
    let ready = node.volumes.setup(&pod, &never).unwrap();
    node.map("2", &[("k", vec![b'x'; 1 << 20])]);
    let refresh = |name: &str| {
        let mounted = ready.iter().find(|one| one.volume == name).unwrap();
        node.volumes.refresh(&pod, volume(&pod, name), mounted, (&mut Patience(Duration::ZERO), &never))
    };
    assert!(refresh("a").is_none());
    drop(answer);
    node.wait_for(|node| !node.volumes.operations.is_busy(pod.uid()));
    let reserve = |bytes: usize| {
        let key = (pod.uid(), pod.namespace());
        node.volumes.actual().reserve(key, "other", Size::on_disk(bytes))
    };
    assert!(reserve(16 << 20).is_err() && reserve(4 << 20).is_ok());
    // The result of the other volume would exceed the limit: it is not kept.
    // An operation is not busy any more a moment before its result is there.
    let taken = |name: &str| {
        let mut result = None;
        node.wait_for(|_| {
            result = refresh(name);
            result.is_some()
        });
        result.unwrap()
    };
    assert!(matches!(taken("a"), Ok(Fresh::Files(_))));
    let result = taken("b");
    assert!(matches!(result, Err(VolumeError::FilesTooLarge)), "{result:?}");
    node.volumes.tear_down(pod.uid(), &never).unwrap();
    assert!(reserve(20 << 20).is_ok());
}

/// The objects of the new pod were not updated any more.
#[test]
fn update_that_ends_after_its_pod_leaves_the_objects_of_a_pod_that_came_back() {
    let root = tempfile::tempdir().unwrap();
    let (answer, silent) = bounded::<()>(0);
    let (node, pod, _) = node_with_waiting_update(root.path(), silent);
    node.volumes.tear_down(pod.uid(), &StopToken::never()).unwrap();
    assert!(node.volumes.operations.has_left(pod.uid()));
    // A static pod has the same UID when its manifest is put back.
    node.api.forget(pod.uid());
    node.api.register(&pod);
    node.map("2", &[("k", b"2".to_vec())]);
    assert_eq!(node.objects.changes(pod.uid()), 1);
    drop(answer);
    node.wait_for(|node| !node.volumes.operations.has_left(pod.uid()));
    assert_eq!(node.objects.changes(pod.uid()), 1);
}
