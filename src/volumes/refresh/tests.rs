use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::json;

use super::super::manager::{Deps, Settings};
use super::super::operations;
use super::super::waker::Waker;
use super::*;
use crate::kube::PodDependencies;
use crate::kube::error::ApiError;
use crate::kube::objects::{Key, Kind, Object, Objects};
use crate::kube::tokens::{IssuedToken, TokenApi, Tokens};
use crate::model::event::{Event, EventSink};

const LONG: Duration = Duration::from_secs(60);

/// An API server whose first tokens are due at once, one per volume. The requests after them wait until
/// the sender of `silent` is dropped.
struct Server {
    first: u32,
    silent: Receiver<()>,
    requests: Arc<AtomicU32>,
}

impl TokenApi for Server {
    fn create(
        &self,
        _: &str,
        _: &str,
        _: &serde_json::Value,
        _: &StopToken,
    ) -> Result<IssuedToken, ApiError> {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        // One request waits; those that begin later are answered sooner.
        if number == self.first {
            let _ = self.silent.recv_timeout(LONG);
        }
        let response = json!({
            "spec": {"expirationSeconds": if number < self.first { 0 } else { 3600 }},
            "status": {"token": number.to_string(), "expirationTimestamp": "2100-01-01T00:00:00Z"},
        });
        Ok(serde_json::from_value(response).unwrap())
    }
}

/// The volumes of a node, with the number of requests for tokens.
struct Node {
    volumes: Volumes,
    api: PodDependencies,
    objects: Objects,
    requests: Arc<AtomicU32>,
    events: Receiver<Box<Event>>,
    /// The pods that were woken.
    wakes: Receiver<PodUid>,
    root: PathBuf,
}

/// Root's volumes of tokens are mounts, which no test leaves behind.
impl Drop for Node {
    fn drop(&mut self) {
        for pod in std::fs::read_dir(self.root.join("pods")).into_iter().flatten().flatten() {
            let uid = PodUid::from(pod.file_name().to_string_lossy().as_ref());
            let until = Instant::now() + LONG;
            // An operation that was stopped may end a moment later.
            while self.volumes.tear_down(&uid, &StopToken::never()).is_err() && Instant::now() < until {
                std::thread::yield_now();
            }
        }
    }
}

impl Node {
    fn new(root: &Path, first: u32, silent: Receiver<()>) -> Node {
        let objects = Objects::fixed(Vec::new());
        let requests = Arc::<AtomicU32>::default();
        let server = Server { first, silent, requests: Arc::clone(&requests) };
        let api = PodDependencies {
            tokens: Tokens::new(Box::new(server)),
            ..PodDependencies::for_tests(objects.clone())
        };
        let settings = Settings { root_dir: root.to_owned(), ..Settings::default() };
        let (sink, events) = EventSink::new();
        let (woken, wakes) = bounded(64);
        let waker = Waker(Arc::new(move |pod| woken.send(pod.clone()).unwrap()));
        let deps = Deps { waker, ..Deps::new(sink, Some(api.clone())) };
        let volumes = Volumes::new(settings, deps);
        Node { volumes, api, objects, requests, events, wakes, root: root.to_owned() }
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
    let mounts: Vec<_> = names.map(|volume| json!({"name": volume["name"], "mountPath": "/m"})).collect();
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
    let (release, silent) = bounded::<()>(0);
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
        assert_eq!(refreshes.rounds.len(), 1, "one update at a time");
    }
    node.wait_for(|node| node.requests.load(Ordering::SeqCst) == 5);
    drop(release);
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

/// One volume was updated by each sync, so that a pod with ten tokens needed a quarter of an hour.
#[test]
fn slow_server_has_all_volumes_updated_once_and_the_pod_is_woken_once() {
    let root = tempfile::tempdir().unwrap();
    let (release, silent) = bounded::<()>(0);
    let node = Node::new(root.path(), 4, silent);
    node.map("1", &[("k", b"1".to_vec())]);
    let names = ["a", "b", "c", "d"];
    let pod = pod(names.map(|name| with_token(name, &one_item())).into_iter().collect());
    node.api.register(&pod);
    let never = StopToken::never();
    let ready = node.volumes.setup(&pod, &never).unwrap();
    let requests = || node.requests.load(Ordering::SeqCst);
    node.volumes.remount(&pod, &never);
    // A sync leaves the thread after a moment, in which it may not have begun.
    node.wait_for(|_| requests() == 5);
    assert!(node.wakes.is_empty());
    drop(release);
    assert_eq!(node.wakes.recv_timeout(LONG).unwrap(), *pod.uid());
    assert_eq!(requests(), 8, "no sync was needed");
    // The sync that follows takes all results, and begins nothing, although the tokens are due again.
    node.api.tokens.forget(pod.uid());
    node.volumes.remount(&pod, &never);
    let tokens = ready.iter().map(|volume| std::fs::read_to_string(volume.host_path.join("t")).unwrap());
    assert_eq!(tokens.collect::<Vec<_>>(), ["4", "5", "6", "7"]);
    assert!(requests() == 8 && node.volumes.refreshes().is_empty() && node.wakes.is_empty());
    node.volumes.remount(&pod, &never);
    node.wait_for(|_| requests() == 12);
}

/// Two kinds of updates, each slow, would wake the pod by turns without an end.
#[test]
fn sync_that_is_woken_by_the_end_of_updates_begins_none_of_another_kind() {
    let root = tempfile::tempdir().unwrap();
    let (_release, silent) = bounded::<()>(0);
    let node = Node::new(root.path(), 1, silent);
    node.map("1", &[("k", b"1".to_vec())]);
    let (pod, never) = (pod(json!([with_token("a", &one_item())])), StopToken::never());
    node.api.register(&pod);
    node.volumes.setup(&pod, &never).unwrap();
    node.api.tokens.forget(pod.uid());
    let (other, report) = round(&["b"]);
    drop(report);
    node.volumes.refreshes().rounds.insert((pod.uid().clone(), Purpose::Update), other);
    node.volumes.remount(&pod, &never);
    assert!(node.requests.load(Ordering::SeqCst) == 1 && node.volumes.refreshes().is_empty());
    // The next one does.
    node.volumes.remount(&pod, &never);
    node.wait_for(|node| node.requests.load(Ordering::SeqCst) == 2);
}

/// Updates of a pod, and the sender of their results.
fn round(volumes: &[&str]) -> (RefreshRound, crossbeam_channel::Sender<RefreshResult>) {
    let (report, ended) = bounded(volumes.len());
    let key = (&PodUid::from("u"), "v", &OperationScope::default());
    let operation = operations::Operations::default().start(key, |_: Result<(), _>| {}, |_| Ok(())).unwrap();
    let volumes = volumes.iter().map(|name| (*name).to_owned()).collect();
    (RefreshRound { operation, volumes, ended, is_left: Arc::default() }, report)
}

#[test]
fn either_the_sync_that_began_the_updates_sees_their_end_or_the_pod_is_woken() {
    let (never, now) = (StopToken::never(), Instant::now());
    let ended = |name: &str| (name.to_owned(), Err(VolumeError::Panicked));
    for has_ended in [false, true] {
        let (mut round, report) = round(&["a", "b"]);
        let mut results = Vec::new();
        report.send(ended("a")).unwrap();
        assert!(!round.take(now, &never, &mut results), "a result that is there is taken at once");
        report.send(ended("b")).unwrap();
        // A sync has written newer files of it.
        round.volumes.remove("b");
        if has_ended {
            round.is_left.store(true, Ordering::SeqCst);
            drop(report);
        }
        assert_eq!(round.wait(now, &never, &mut results), has_ended);
        assert_eq!(results.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a"]);
        assert!(round.is_left.load(Ordering::SeqCst));
    }
    let (mut late, _report) = round(&["a"]);
    let (source, stop) = crate::util::stop::pair();
    drop(source);
    assert!(!late.take(now + LONG, &stop, &mut Vec::new()));
}

/// A node and its pod with volumes of files, whose first update waits until the sender of `silent` is
/// dropped.
fn node_with_hanging_update(root: &Path, silent: Receiver<()>) -> (Node, Pod, Vec<MountedVolume>) {
    let node = Node::new(root, 3, silent);
    node.map("1", &[("k", b"1".to_vec())]);
    let pod = pod(["a", "b", "c"].map(|name| with_token(name, &one_item())).into_iter().collect());
    node.api.register(&pod);
    let ready = node.volumes.setup(&pod, &StopToken::never()).unwrap();
    node.volumes.remount(&pod, &StopToken::never());
    node.wait_for(|node| node.requests.load(Ordering::SeqCst) == 4);
    (node, pod, ready)
}

#[test]
fn volume_whose_update_hangs_delays_the_others_until_its_time_limit_only() {
    let root = tempfile::tempdir().unwrap();
    let (release, silent) = bounded::<()>(0);
    let (node, pod, ready) = node_with_hanging_update(root.path(), silent);
    let never = StopToken::never();
    let requests = || node.requests.load(Ordering::SeqCst);
    let token = |index: usize| std::fs::read_to_string(ready[index].host_path.join("t")).unwrap();
    node.volumes.remount(&pod, &never);
    assert!(requests() == 4 && node.events.is_empty());
    node.volumes.operations.make_late(pod.uid(), "a");
    node.wait_for(|node| {
        node.volumes.remount(&pod, &never);
        [token(1), token(2)] == ["4", "5"]
    });
    assert_eq!(token(0), "0");
    let event = node.events.try_recv().unwrap();
    assert!(event.message.ends_with("context deadline exceeded"), "{}", event.message);
    assert!(requests() == 6 && node.events.is_empty());
    // The update that ends late begins no other one, and its result is not needed.
    drop(release);
    node.wait_for(|node| !node.volumes.operations.is_busy(pod.uid()));
    assert_eq!((requests(), token(0)), (6, "0".to_owned()));
}

/// File systems that hang took the places of all updates, and the pod's tokens expired without a word.
#[test]
fn tokens_are_renewed_while_the_updates_of_other_volumes_hang() {
    let root = tempfile::tempdir().unwrap();
    let (release, silent) = bounded::<()>(0);
    let node = Node::new(root.path(), 1, silent);
    node.map("1", &[("k", b"1".to_vec())]);
    drop(release);
    let claim = json!({"name": "c", "persistentVolumeClaim": {"claimName": "c"}});
    let pod = pod(json!([with_token("a", &one_item()), claim]));
    node.api.register(&pod);
    node.volumes.kinds.set_refreshed(pod.uid(), "c", true);
    let claimed = MountedVolume {
        volume: "c".to_owned(),
        host_path: root.path().join("c"),
        read_only: false,
        selinux_relabel: false,
    };
    node.volumes.actual().mounted(pod.uid(), &claimed);
    let never = StopToken::never();
    let ready = node.volumes.setup(&pod, &never).unwrap();
    // The operation of the setup reports before it is removed.
    node.wait_for(|node| !node.volumes.operations.is_busy(pod.uid()));
    let (release, hold) = bounded::<()>(0);
    let scope = OperationScope { purpose: Purpose::Update, ..OperationScope::default() };
    let hanging = ["x", "y", "z"].map(|name| {
        let hold = hold.clone();
        let hang = move |_: &StopToken| {
            let _ = hold.recv();
            Ok(())
        };
        let key = (pod.uid(), name, &scope);
        let operation = node.volumes.operations.start(key, |_: Result<(), _>| {}, hang).unwrap();
        node.volumes.operations.make_late(pod.uid(), name);
        operation
    });
    node.wait_for(|node| {
        node.volumes.remount(&pod, &never);
        std::fs::read_to_string(ready[0].host_path.join("t")).unwrap() == "1"
    });
    // The failure is reported once.
    node.volumes.remount(&pod, &never);
    let messages: Vec<String> = node.events.try_iter().map(|event| event.message).collect();
    assert_eq!(messages, ["Unable to update volumes [c]: too many operations on volumes hang"]);
    drop(release);
    hanging.into_iter().for_each(Operation::finish);
    node.volumes.remount(&pod, &never);
    assert!(node.volumes.refreshes().full.is_empty() && node.events.is_empty());
}

/// The files of an update that ended late, with an older ConfigMap, replaced newer ones.
#[test]
fn late_result_of_an_update_does_not_replace_newer_files() {
    let root = tempfile::tempdir().unwrap();
    let (release, silent) = bounded::<()>(0);
    let (node, pod, ready) = node_with_waiting_update(root.path(), silent);
    let never = StopToken::never();
    let read = |name: &str| std::fs::read_to_string(ready[0].host_path.join(name)).unwrap();
    node.map("2", &[("k", b"2".to_vec())]);
    node.api.tokens.get(&pod, "a", Some(3600), &StopToken::never()).unwrap();
    node.volumes.remount(&pod, &never);
    assert_eq!((read("k"), read("t")), ("2".to_owned(), "2".to_owned()));
    drop(release);
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
    let (release, silent) = bounded::<()>(0);
    let node = Node::new(root.path(), 2, silent);
    node.map("1", &[("k", b"1".to_vec())]);
    let pod = pod(json!([with_token("a", &items(20)), with_token("b", &items(20))]));
    node.api.register(&pod);
    let never = StopToken::never();
    let ready = node.volumes.setup(&pod, &never).unwrap();
    node.map("2", &[("k", vec![b'x'; 1 << 20])]);
    let due: Vec<_> = ready.iter().map(|mounted| (volume(&pod, &mounted.volume), mounted)).collect();
    assert!(node.volumes.refresh(&pod, &due, &never).unwrap().is_empty());
    drop(release);
    node.wakes.recv_timeout(LONG).unwrap();
    let reserve = |bytes: usize| {
        let key = (pod.uid(), pod.namespace());
        node.volumes.actual().reserve(key, "other", Size::on_disk(bytes))
    };
    assert!(reserve(16 << 20).is_err() && reserve(4 << 20).is_ok());
    // The result of the other volume would exceed the limit: it is not kept.
    let results = node.volumes.refresh(&pod, &due, &never).unwrap();
    let [(a, Ok(RefreshedVolume::Files(_))), (b, Err(VolumeError::FilesTooLarge))] = results.as_slice()
    else {
        panic!("{results:?}")
    };
    assert_eq!((a.as_str(), b.as_str()), ("a", "b"));
    node.volumes.tear_down(pod.uid(), &never).unwrap();
    assert!(reserve(20 << 20).is_ok());
}

/// The objects of the new pod were not updated any more.
#[test]
fn update_that_ends_after_its_pod_leaves_the_objects_of_a_pod_that_came_back() {
    let root = tempfile::tempdir().unwrap();
    let (release, silent) = bounded::<()>(0);
    let (node, pod, _) = node_with_waiting_update(root.path(), silent);
    node.volumes.tear_down(pod.uid(), &StopToken::never()).unwrap();
    assert!(node.volumes.operations.has_left(pod.uid()));
    // A static pod has the same UID when its manifest is put back.
    node.api.forget(pod.uid());
    node.api.register(&pod);
    node.map("2", &[("k", b"2".to_vec())]);
    assert_eq!(node.objects.changes(pod.uid()), 1);
    drop(release);
    node.wait_for(|node| !node.volumes.operations.has_left(pod.uid()));
    assert_eq!(node.objects.changes(pod.uid()), 1);
}
