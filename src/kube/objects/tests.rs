use super::*;
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::util::threads::{OnDeath, Stack, spawn};

/// An API server with the responses that a test sets.
#[derive(Default)]
struct Server {
    objects: Mutex<HashMap<Key, Result<Object, ObjectError>>>,
    sinks: Mutex<HashMap<Key, OnUpdate>>,
    reads: AtomicUsize,
    running: Arc<AtomicUsize>,
    no_threads: bool,
}

impl ObjectApi for Server {
    fn read(&self, key: &Key) -> Result<Object, ObjectError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.objects.lock().unwrap().get(key).cloned().unwrap_or_else(|| Err(not_found(key)))
    }

    fn watch(&self, key: &Key, sink: OnUpdate) -> io::Result<Running> {
        if self.no_threads {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.sinks.lock().unwrap().insert(key.clone(), sink);
        let running = Arc::clone(&self.running);
        running.fetch_add(1, Ordering::SeqCst);
        spawn("t/watch", Stack::Small, OnDeath::Unsupervised, move |stop| {
            let _ = stop.wait(Duration::from_secs(60));
            running.fetch_sub(1, Ordering::SeqCst);
        })
    }
}

impl Server {
    fn send_event(&self, key: &Key, object: Option<Object>) {
        let mut sink = self.sinks.lock().unwrap().remove(key).unwrap();
        sink(object);
        self.sinks.lock().unwrap().insert(key.clone(), sink);
    }

    fn set(&self, key: &Key, result: Result<Object, ObjectError>) {
        self.objects.lock().unwrap().insert(key.clone(), result);
    }

    fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }
}

fn pod(uid: &str, maps: &[&str]) -> Pod {
    let volumes: Vec<_> = maps.iter().map(|map| json!({"name": map, "configMap": {"name": map}})).collect();
    let value = json!({"metadata": {"name": uid, "namespace": "n", "uid": uid},
        "spec": {"containers": [], "volumes": volumes}});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
}

fn key(name: &str) -> Key {
    Key::new(Kind::ConfigMap, "n", name)
}

fn object(version: u32) -> Object {
    Object {
        uid: "u".into(),
        resource_version: version.to_string(),
        data: [("k".to_owned(), version.to_string().into_bytes())].into(),
        ..Object::default()
    }
}

fn cache(strategy: Strategy, server: &Arc<Server>) -> (Objects, Receiver<PodUid>) {
    let (sender, changed_pods) = bounded(100);
    let changed: SyncPod = Box::new(move |uid| drop(sender.send(uid.clone())));
    let api: Arc<dyn ObjectApi> = Arc::<Server>::clone(server);
    (Objects::new(strategy, api, Box::new(|| Some(Duration::from_secs(3600))), changed), changed_pods)
}

fn get(objects: &Objects, name: &str) -> Result<String, String> {
    match objects.get(&key(name), Duration::from_millis(20), &StopToken::never()) {
        Ok(object) => Ok(object.resource_version.clone()),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn a_watch_follows_an_object_for_all_pods() {
    let server = Arc::new(Server::default());
    let (objects, changed_pods) = cache(Strategy::Watch, &server);
    assert_eq!(get(&objects, "a"), Err("object \"n\"/\"a\" not registered".into()));
    for uid in ["1", "2", "1"] {
        objects.register(&pod(uid, &["a"]));
    }
    assert_eq!(server.running.load(Ordering::SeqCst), 1);
    assert_eq!(
        get(&objects, "a"),
        Err("failed to sync configmap cache: timed out waiting for the condition".into())
    );
    // A caller whose wait timed out is notified of the first response.
    server.send_event(&key("a"), None);
    assert_eq!(get(&objects, "a"), Err("configmap \"a\" not found".into()));
    assert_eq!(changed_pods.try_iter().count(), 2);
    server.send_event(&key("a"), Some(object(1)));
    assert_eq!(changed_pods.try_iter().count(), 2);
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    let before = objects.changes(&PodUid::from("1"));
    // The same object after a lost connection is no change.
    server.send_event(&key("a"), Some(object(1)));
    assert!(changed_pods.is_empty());
    server.send_event(&key("a"), Some(object(2)));
    assert_eq!(changed_pods.try_iter().count(), 2);
    assert_eq!(objects.changes(&PodUid::from("1")), before + 1);
    assert_eq!(server.reads(), 0);
    objects.unregister(&PodUid::from("1"));
    assert_eq!(get(&objects, "a"), Ok("2".into()));
    objects.unregister(&PodUid::from("2"));
    assert_eq!(server.running.load(Ordering::SeqCst), 0);
    assert!(get(&objects, "a").unwrap_err().contains("not registered"));
    // A late event of a closed watch is ignored.
    server.send_event(&key("a"), Some(object(3)));
    assert!(changed_pods.is_empty());
    let table = objects.shared.table();
    assert_eq!((table.entries.len(), table.pods.len(), table.watches), (0, 0, 0));
}

#[test]
fn a_new_version_of_a_pod_releases_unused_objects() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Watch, &server);
    objects.register(&pod("1", &["a", "b"]));
    objects.register(&pod("1", &["b", "c"]));
    let keys: BTreeSet<String> = objects.shared.table().entries.keys().map(|key| key.name.clone()).collect();
    assert_eq!(keys, ["b".to_owned(), "c".to_owned()].into());
    assert_eq!(server.running.load(Ordering::SeqCst), 2);
    objects.shut_down(Duration::from_secs(5));
    assert_eq!(server.running.load(Ordering::SeqCst), 0);
    assert_eq!(get(&objects, "b"), Err("stopping".into()));
    objects.register(&pod("2", &["d"]));
    assert_eq!(server.running.load(Ordering::SeqCst), 0);
}

#[test]
fn waiting_readers_get_the_first_response_at_once() {
    let server = Arc::new(Server::default());
    let (objects, changed_pods) = cache(Strategy::Watch, &server);
    objects.register(&pod("1", &["a"]));
    let reader = objects.clone();
    let (sender, result) = bounded(1);
    let running = spawn("t/reader", Stack::Small, OnDeath::Unsupervised, move |stop| {
        let _ =
            sender.send(reader.get(&key("a"), Duration::from_secs(60), &stop).map(|found| found.uid.clone()));
    })
    .unwrap();
    while objects.shared.table().entries[&key("a")].waiters.is_none() {
        let _ = StopToken::never().wait(Duration::from_millis(1));
    }
    server.send_event(&key("a"), Some(object(1)));
    assert_eq!(result.recv_timeout(Duration::from_secs(10)).unwrap(), Ok("u".into()));
    drop(running);
    assert!(changed_pods.is_empty());
}

#[test]
fn an_immutable_object_needs_no_watch() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Watch, &server);
    objects.register(&pod("1", &["a"]));
    server.send_event(&key("a"), Some(Object { immutable: true, ..object(1) }));
    while server.running.load(Ordering::SeqCst) > 0 {
        let _ = StopToken::never().wait(Duration::from_millis(1));
    }
    assert_eq!(objects.shared.table().watches, 0);
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    objects.register(&pod("2", &["a"]));
    assert_eq!(server.running.load(Ordering::SeqCst), 0);
}

#[test]
fn without_a_watch_objects_are_read_when_they_are_old() {
    for (strategy, no_threads, reads) in
        [(Strategy::Get, false, 3), (Strategy::Cache, false, 1), (Strategy::Watch, true, 1)]
    {
        let server = Arc::new(Server { no_threads, ..Server::default() });
        let (objects, _changed_pods) = cache(strategy, &server);
        objects.register(&pod("1", &["a"]));
        server.set(&key("a"), Ok(object(1)));
        for _ in 0..3 {
            assert_eq!(get(&objects, "a"), Ok("1".into()));
        }
        assert_eq!(server.reads(), reads, "{strategy:?}");
        assert_eq!(server.running.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn a_new_pod_reads_the_current_object() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Cache, &server);
    objects.register(&pod("1", &["a"]));
    assert_eq!(get(&objects, "a"), Err("configmap \"a\" not found".into()));
    server.set(&key("a"), Ok(object(1)));
    assert_eq!(get(&objects, "a"), Err("configmap \"a\" not found".into()));
    objects.register(&pod("1", &["a"]));
    assert_eq!(get(&objects, "a"), Err("configmap \"a\" not found".into()));
    objects.register(&pod("2", &["a"]));
    assert_eq!(get(&objects, "a"), Ok("1".into()));
}

#[test]
fn cached_objects_are_used_while_the_server_is_unavailable() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Get, &server);
    objects.register(&pod("1", &["a", "b"]));
    server.set(&key("a"), Ok(object(1)));
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    for error in [
        ObjectError::Unavailable { text: "connection refused".into() },
        ObjectError::Forbidden { text: "no relationship found".into() },
    ] {
        server.set(&key("a"), Err(error.clone()));
        server.set(&key("b"), Err(error.clone()));
        assert_eq!(get(&objects, "a"), Ok("1".into()));
        assert_eq!(get(&objects, "b"), Err(error.to_string()));
    }
    server.set(&key("a"), Err(not_found(&key("a"))));
    assert!(get(&objects, "a").unwrap_err().contains("not found"));
}

#[test]
fn the_number_of_watches_is_bounded() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Watch, &server);
    let names: Vec<String> = (0..MAX_WATCHES + 2).map(|n| format!("m{n:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    objects.register(&pod("1", &names[..1]));
    objects.register(&pod("2", &names[1..]));
    assert_eq!(server.running.load(Ordering::SeqCst), MAX_WATCHES);
    let last = names[names.len() - 1];
    server.set(&key(last), Ok(object(5)));
    assert_eq!(get(&objects, last), Ok("5".into()));
    assert_eq!(server.reads(), 1);
    // A free slot for a watch is used at the next read.
    objects.unregister(&PodUid::from("1"));
    objects.register(&pod("2", &names[1..]));
    assert_eq!(server.running.load(Ordering::SeqCst), MAX_WATCHES);
    objects.unregister(&PodUid::from("2"));
    assert_eq!(server.running.load(Ordering::SeqCst), 0);
}

#[test]
fn stop_of_a_pod_ends_its_wait_for_an_object() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Watch, &server);
    objects.register(&pod("1", &["a"]));
    let (source, stop) = crate::util::stop::pair();
    drop(source);
    assert_eq!(objects.get(&key("a"), Duration::from_secs(60), &stop), Err(ObjectError::Stopping));
}

/// The first read gets an old version, and its response arrives when the test has sent a unit.
struct Late {
    reads: AtomicUsize,
    arrive: Receiver<()>,
}

impl ObjectApi for Late {
    fn read(&self, _: &Key) -> Result<Object, ObjectError> {
        let number = self.reads.fetch_add(1, Ordering::SeqCst);
        if number == 0 {
            let _ = self.arrive.recv_timeout(Duration::from_secs(60));
        }
        Ok(object(u32::try_from(number).unwrap() + 1))
    }

    fn watch(&self, _: &Key, _: OnUpdate) -> io::Result<Running> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// A late response replaced a newer version, which pods then had until the next read.
#[test]
fn late_response_does_not_replace_a_newer_object() {
    let (send, arrive) = bounded(1);
    let server = Arc::new(Late { reads: AtomicUsize::new(0), arrive });
    let api: Arc<dyn ObjectApi> = Arc::<Late>::clone(&server);
    // Objects are read when they are old, which they are not here.
    let lasting: TimeToLive = Box::new(|| Some(Duration::from_secs(3600)));
    let objects = Objects::new(Strategy::Cache, api, lasting, Box::new(|_| {}));
    objects.register(&pod("1", &["a"]));
    let first = {
        let objects = objects.clone();
        crate::util::testing::in_background(move || get(&objects, "a"))
    };
    while server.reads.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(get(&objects, "a"), Ok("2".into()));
    send.send(()).unwrap();
    assert_eq!(first.result(), Ok("2".into()));
    assert_eq!((get(&objects, "a"), server.reads.load(Ordering::SeqCst)), (Ok("2".into()), 2));
}
