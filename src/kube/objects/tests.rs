use super::*;
use serde_json::json;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::offline::Phase;
use crate::offline::test_store::TestStore;
use crate::util::threads::{OnDeath, Stack, spawn};

/// An API server with the responses that a test sets.
#[derive(Default)]
struct Server {
    objects: Mutex<HashMap<Key, Result<Object, ObjectError>>>,
    sinks: Mutex<HashMap<Key, OnUpdate>>,
    reads: AtomicUsize,
    running: Arc<AtomicUsize>,
    no_threads: bool,
    /// It does not respond to other requests of the node.
    is_silent: AtomicBool,
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

    fn responds(&self) -> bool {
        !self.is_silent.load(Ordering::SeqCst)
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
    assert_eq!(result.recv_timeout(Duration::from_secs(40)).unwrap(), Ok("u".into()));
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
    server.set(&key("a"), Ok(object(1)));
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    server.set(&key("a"), Ok(object(2)));
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    objects.register(&pod("1", &["a"]));
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    objects.register(&pod("2", &["a"]));
    assert_eq!(get(&objects, "a"), Ok("2".into()));
}

/// The pod that waits for it had to wait until its absence was old.
#[test]
fn missing_object_without_a_watch_is_read_at_each_use() {
    for (strategy, no_threads) in [(Strategy::Cache, false), (Strategy::Watch, true)] {
        let server = Arc::new(Server { no_threads, ..Server::default() });
        let (objects, _changed_pods) = cache(strategy, &server);
        objects.register(&pod("1", &["a"]));
        for _ in 0..2 {
            assert_eq!(get(&objects, "a"), Err("configmap \"a\" not found".into()));
        }
        server.set(&key("a"), Ok(object(1)));
        for _ in 0..2 {
            assert_eq!(get(&objects, "a"), Ok("1".into()));
        }
        assert_eq!(server.reads(), 3, "{strategy:?}");
    }
}

/// A pod that named hundreds of optional objects had all of them requested at each of its syncs.
#[test]
fn absence_is_used_the_longer_the_longer_it_has_lasted() {
    let ages = [0, 9, 10, 300, 6000].map(|seconds| absence_age(Duration::from_secs(seconds)).as_secs());
    assert_eq!(ages, [0, 0, 1, 30, 60]);
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Cache, &server);
    let absent: Result<String, String> = Err("configmap \"a\" not found".into());
    objects.register(&pod("1", &["a"]));
    assert_eq!(get(&objects, "a"), absent);
    let since = Instant::now().checked_sub(Duration::from_secs(36_000));
    objects.shared.table().entries.get_mut(&key("a")).unwrap().absent = since;
    server.set(&key("a"), Ok(object(1)));
    assert_eq!((get(&objects, "a"), server.reads()), (absent, 1));
    // A new pod may be newer than the absence.
    objects.register(&pod("2", &["a"]));
    assert_eq!((get(&objects, "a"), server.reads()), (Ok("1".into()), 2));
    assert!(objects.shared.table().entries[&key("a")].absent.is_none());
}

#[test]
fn known_absence_is_used_while_the_server_is_silent_or_fails() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Get, &server);
    let absent: Result<String, String> = Err("configmap \"a\" not found".into());
    objects.register(&pod("1", &["a"]));
    assert_eq!((get(&objects, "a"), server.reads()), (absent.clone(), 1));
    server.is_silent.store(true, Ordering::SeqCst);
    assert_eq!((get(&objects, "a"), server.reads()), (absent.clone(), 1));
    server.is_silent.store(false, Ordering::SeqCst);
    server.set(&key("a"), Err(ObjectError::Stopping));
    assert_eq!((get(&objects, "a"), server.reads()), (Err("stopping".into()), 2));
    server.set(&key("a"), Err(ObjectError::Unavailable { text: "no route to host".into() }));
    assert_eq!((get(&objects, "a"), server.reads()), (absent, 3));
    // A new pod may be newer than the absence.
    objects.register(&pod("2", &["a"]));
    assert_eq!((get(&objects, "a"), server.reads()), (Err("no route to host".into()), 4));
}

#[test]
fn authorities_of_the_cluster_are_read_without_a_watch() {
    let root = "kube-root-ca.crt";
    for (strategy, reads) in [(Strategy::Watch, 1), (Strategy::Cache, 1), (Strategy::Get, 2)] {
        let server = Arc::new(Server::default());
        let api: Arc<dyn ObjectApi> = Arc::<Server>::clone(&server);
        // Other objects are read each time.
        let ttl: TimeToLive = Box::new(|| Some(Duration::ZERO));
        let objects = Objects::new(strategy, api, ttl, Box::new(|_| {}));
        server.set(&key(root), Ok(object(1)));
        objects.register(&pod("1", &[root]));
        for _ in 0..2 {
            assert_eq!(get(&objects, root), Ok("1".into()));
        }
        assert_eq!((server.reads(), server.running.load(Ordering::SeqCst)), (reads, 0), "{strategy:?}");
    }
    assert!(!Key::new(Kind::Secret, "n", root).is_root_authority());
}

/// A pod is often made with its namespace, before the control plane has published its authorities there.
#[test]
fn authorities_that_cannot_be_read_yet_are_watched_and_wake_their_pods() {
    let root = "kube-root-ca.crt";
    for (strategy, watches) in [(Strategy::Watch, 1), (Strategy::Cache, 0)] {
        let server = Arc::new(Server::default());
        let (objects, changed_pods) = cache(strategy, &server);
        objects.register(&pod("1", &[root]));
        assert_eq!(server.running.load(Ordering::SeqCst), 0);
        assert!(get(&objects, root).is_err());
        assert_eq!(server.running.load(Ordering::SeqCst), watches, "{strategy:?}");
        if strategy == Strategy::Watch {
            server.send_event(&key(root), Some(object(1)));
            assert_eq!(changed_pods.try_iter().count(), 1);
            assert_eq!((get(&objects, root), server.reads()), (Ok("1".into()), 1));
        }
    }
}

/// The API server did not know yet that the pod is on this node.
#[test]
fn pod_that_was_refused_the_authorities_is_synced_when_their_watch_has_them() {
    let root = "kube-root-ca.crt";
    let server = Arc::new(Server::default());
    let (objects, changed_pods) = cache(Strategy::Watch, &server);
    objects.register(&pod("1", &[root]));
    server.set(&key(root), Err(ObjectError::Forbidden { text: "no relationship found".into() }));
    assert_eq!(get(&objects, root), Err("no relationship found".into()));
    server.send_event(&key(root), Some(object(1)));
    assert_eq!(changed_pods.try_iter().count(), 1);
    assert_eq!(objects.changes(&PodUid::from("1")), 1);
}

/// Nothing woke its pod, which waited for its back-off.
#[test]
fn wait_that_times_out_when_the_response_arrives_is_no_missed_one() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Watch, &server);
    objects.register(&pod("1", &["a"]));
    assert!(objects.shared.missed(&key("a")));
    server.send_event(&key("a"), Some(object(1)));
    assert!(!objects.shared.missed(&key("a")));
    assert!(!objects.shared.table().entries[&key("a")].missed);
}

/// Each namespace that was new had a watch as long as it had pods, and other objects had none.
#[test]
fn watch_of_authorities_ends_when_they_can_be_read() {
    let root = "kube-root-ca.crt";
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Watch, &server);
    objects.register(&pod("1", &[root]));
    for (version, reads) in [(1, 1), (2, 2)] {
        assert!(get(&objects, root).is_err());
        assert_eq!(objects.shared.table().watches, 1);
        server.send_event(&key(root), Some(object(version)));
        assert_eq!(objects.shared.table().watches, 0);
        while server.running.load(Ordering::SeqCst) > 0 {
            let _ = StopToken::never().wait(Duration::from_millis(1));
        }
        assert_eq!((get(&objects, root), server.reads()), (Ok(version.to_string()), reads));
        // They are old, and the control plane removed them.
        objects.shared.table().entries.get_mut(&key(root)).unwrap().read = None;
    }
}

#[test]
fn read_object_is_used_without_a_request_while_the_server_is_silent() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Get, &server);
    server.set(&key("a"), Ok(object(1)));
    objects.register(&pod("1", &["a", "b"]));
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    server.is_silent.store(true, Ordering::SeqCst);
    server.set(&key("a"), Ok(object(2)));
    assert_eq!((get(&objects, "a"), server.reads()), (Ok("1".into()), 1));
    // What was never read has to be requested, and a new pod may need a newer version.
    assert!(get(&objects, "b").is_err());
    objects.register(&pod("2", &["a"]));
    assert_eq!((get(&objects, "a"), server.reads()), (Ok("2".into()), 3));
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

#[test]
fn stopped_pod_sends_no_request_for_an_object() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Get, &server);
    objects.register(&pod("1", &["a"]));
    let (source, stop) = crate::util::stop::pair();
    drop(source);
    assert_eq!(objects.get(&key("a"), Duration::from_secs(60), &stop), Err(ObjectError::Stopping));
    assert_eq!(server.reads(), 0);
}

/// The API server knows the pods of objects that were read before.
#[test]
fn only_the_first_read_of_an_object_is_for_a_server_that_may_not_know_its_pod() {
    #[derive(Default)]
    struct Lagging(Mutex<Vec<&'static str>>);
    impl ObjectApi for Lagging {
        fn read(&self, _: &Key) -> Result<Object, ObjectError> {
            self.0.lock().unwrap().push("known");
            Ok(object(1))
        }
        fn read_new(&self, _: &Key) -> Result<Object, ObjectError> {
            self.0.lock().unwrap().push("new");
            Ok(object(1))
        }
        fn watch(&self, _: &Key, _: OnUpdate) -> io::Result<Running> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }
    let server = Arc::new(Lagging::default());
    let api: Arc<dyn ObjectApi> = Arc::<Lagging>::clone(&server);
    let objects = Objects::new(Strategy::Get, api, Box::new(|| None), Box::new(|_| {}));
    objects.register(&pod("1", &["a"]));
    for _ in 0..2 {
        assert_eq!(get(&objects, "a"), Ok("1".into()));
    }
    assert_eq!(*server.0.lock().unwrap(), ["new", "known"]);
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

/// The first read of an object, which waits for a message; later ones do not.
struct LateRead {
    send: Sender<()>,
    server: Arc<Late>,
    objects: Objects,
    first: crate::util::testing::BackgroundCall<Result<String, String>>,
}

fn late_read() -> LateRead {
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
    LateRead { send, server, objects, first }
}

/// A late response replaced a newer version, which pods then had until the next read.
#[test]
fn late_response_does_not_replace_a_newer_object() {
    let LateRead { send, server, objects, first } = late_read();
    assert_eq!(get(&objects, "a"), Ok("2".into()));
    send.send(()).unwrap();
    assert_eq!(first.result(), Ok("2".into()));
    assert_eq!((get(&objects, "a"), server.reads.load(Ordering::SeqCst)), (Ok("2".into()), 2));
}

/// The object may have been changed with the new pod, which got the version before.
#[test]
fn pod_that_names_an_object_during_a_read_reads_it_again() {
    let LateRead { send, server, objects, first } = late_read();
    objects.register(&pod("2", &["a"]));
    send.send(()).unwrap();
    assert_eq!(first.result(), Ok("1".into()));
    for _ in 0..2 {
        assert_eq!((get(&objects, "a"), server.reads.load(Ordering::SeqCst)), (Ok("2".into()), 2));
    }
}

/// An ephemeral container may name an object that was changed for it.
#[test]
fn new_version_of_a_pod_reads_an_object_that_it_did_not_name_before() {
    let server = Arc::new(Server::default());
    let (objects, _changed_pods) = cache(Strategy::Cache, &server);
    server.set(&key("a"), Ok(object(1)));
    objects.register(&pod("1", &["a"]));
    objects.register(&pod("2", &["b"]));
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    server.set(&key("a"), Ok(object(2)));
    objects.register(&pod("2", &["a", "b"]));
    assert_eq!((get(&objects, "a"), server.reads()), (Ok("2".into()), 2));
}

#[test]
fn pods_share_the_first_read_of_the_authorities_of_the_cluster() {
    let root = "kube-root-ca.crt";
    let (send, arrive) = bounded(1);
    let server = Arc::new(Late { reads: AtomicUsize::new(0), arrive });
    let api: Arc<dyn ObjectApi> = Arc::<Late>::clone(&server);
    let objects = Objects::new(Strategy::Watch, api, Box::new(|| None), Box::new(|_| {}));
    for uid in ["1", "2"] {
        objects.register(&pod(uid, &[root]));
    }
    let start = || {
        let objects = objects.clone();
        crate::util::testing::in_background(move || {
            let found = objects.get(&key(root), Duration::from_secs(60), &StopToken::never());
            found.map(|object| object.resource_version.clone())
        })
    };
    let first = start();
    while server.reads.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert!(matches!(objects.shared.step(&key(root)), Step::Wait(_)));
    let second = start();
    send.send(()).unwrap();
    assert_eq!((first.result(), second.result()), (Ok("1".into()), Ok("1".into())));
    objects.register(&pod("3", &[root]));
    assert_eq!((get(&objects, root), server.reads.load(Ordering::SeqCst)), (Ok("1".into()), 1));
}

/// It waited for its back-off, which may be two minutes.
#[test]
fn pod_that_waited_too_long_for_the_authorities_is_synced_when_they_arrive() {
    let root = "kube-root-ca.crt";
    let (send, arrive) = bounded(1);
    let (sender, changed_pods) = bounded(10);
    let server = Arc::new(Late { reads: AtomicUsize::new(0), arrive });
    let api: Arc<dyn ObjectApi> = Arc::<Late>::clone(&server);
    let changed: SyncPod = Box::new(move |uid| drop(sender.send(uid.clone())));
    let objects = Objects::new(Strategy::Watch, api, Box::new(|| None), changed);
    for uid in ["1", "2"] {
        objects.register(&pod(uid, &[root]));
    }
    let first = {
        let objects = objects.clone();
        crate::util::testing::in_background(move || get(&objects, root))
    };
    while server.reads.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    let late = "failed to sync configmap cache: timed out waiting for the condition";
    assert_eq!(get(&objects, root), Err(late.into()));
    assert!(changed_pods.is_empty());
    send.send(()).unwrap();
    assert_eq!(first.result(), Ok("1".into()));
    assert_eq!(changed_pods.try_iter().count(), 2);
    assert_eq!(objects.changes(&PodUid::from("2")), 1);
}

fn stored_cache(strategy: Strategy, server: &Arc<Server>, store: &TestStore) -> (Objects, Receiver<PodUid>) {
    let (objects, changed_pods) = cache(strategy, server);
    (objects.with_offline(Some(store.offline.clone())), changed_pods)
}

/// What was passed to the store: name and version.
fn stored_changes(store: &TestStore) -> Vec<String> {
    let text = |(key, body): (crate::offline::Key, Option<String>)| {
        let body = body.map(|body| serde_json::from_str::<Option<StoredObject>>(&body).unwrap());
        let state = match body {
            None => "removed".to_owned(),
            Some(None) => "absent".to_owned(),
            Some(Some(object)) => Object::from(object).resource_version,
        };
        format!("{} {state}", key.name)
    };
    store.changes().into_iter().map(text).collect()
}

fn of_uid(uid: &str, version: u32) -> Object {
    Object { uid: uid.to_owned(), ..object(version) }
}

#[test]
fn objects_are_stored_when_they_change() {
    let (store, server) = (TestStore::new(), Arc::new(Server::default()));
    store.enter(Phase::Online);
    let (objects, _changed_pods) = stored_cache(Strategy::Watch, &server, &store);
    objects.register(&pod("1", &["a", "b"]));
    assert!(store.changes().is_empty());
    server.send_event(&key("a"), Some(object(1)));
    server.send_event(&key("b"), None);
    // That an object does not exist is known alone, too: pods may start without it.
    assert_eq!(stored_changes(&store), ["n/a 1", "n/b absent"]);
    server.send_event(&key("a"), Some(object(1)));
    server.send_event(&key("b"), None);
    objects.register(&pod("1", &["a", "b"]));
    assert!(store.changes().is_empty());
    server.send_event(&key("a"), Some(object(2)));
    assert_eq!(stored_changes(&store), ["n/a 2"]);
    server.send_event(&key("a"), None);
    assert_eq!(stored_changes(&store), ["n/a removed"]);
    server.send_event(&key("a"), Some(of_uid("v", 3)));
    assert_eq!(stored_changes(&store), ["n/a 3"]);
    // The file may have been removed with the last pod that was in the API server's set.
    objects.register(&pod("2", &["a"]));
    assert_eq!(stored_changes(&store), ["n/a 3"]);
}

#[test]
fn objects_without_a_watch_are_stored_when_they_change() {
    let (store, server) = (TestStore::new(), Arc::new(Server::default()));
    store.enter(Phase::Online);
    let (objects, _changed_pods) = stored_cache(Strategy::Get, &server, &store);
    objects.register(&pod("1", &["a"]));
    server.set(&key("a"), Ok(object(1)));
    assert_eq!((get(&objects, "a"), stored_changes(&store)), (Ok("1".into()), vec!["n/a 1".to_owned()]));
    assert!(get(&objects, "a").is_ok() && store.changes().is_empty());
    server.set(&key("a"), Ok(object(2)));
    assert_eq!((get(&objects, "a"), stored_changes(&store)), (Ok("2".into()), vec!["n/a 2".to_owned()]));
}

#[test]
fn stored_objects_need_no_request_while_the_server_is_away() {
    for strategy in [Strategy::Watch, Strategy::Cache, Strategy::Get] {
        let (store, server) = (TestStore::new(), Arc::new(Server::default()));
        let secret = Key::new(Kind::Secret, "n", "s");
        for key in [&key("a"), &secret] {
            store.write(&object_key(key), &StoredObject::from(&object(1)));
        }
        store.write(&object_key(&key("b")), &None::<StoredObject>);
        store.enter(Phase::Alone);
        let (objects, _changed_pods) = stored_cache(strategy, &server, &store);
        objects.register(&pod("1", &["a", "b"]));
        let value = json!({"metadata": {"name": "2", "namespace": "n", "uid": "2"},
            "spec": {"containers": [], "imagePullSecrets": [{"name": "s"}]}});
        objects.register(&Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap()));
        for key in [&key("a"), &key("b"), &secret] {
            assert!(objects.is_cached(key), "{key:?}");
        }
        for key in [&key("a"), &secret] {
            assert_eq!(*objects.get(key, Duration::ZERO, &StopToken::never()).unwrap(), object(1));
        }
        assert_eq!(get(&objects, "b"), Err("configmap \"b\" not found".into()));
        assert_eq!(server.reads(), 0, "{strategy:?}");
        assert!(!format!("{objects:?} {:?}", store.offline).contains("version"));
    }
}

#[test]
fn damaged_or_missing_stored_object_is_requested() {
    let (store, server) = (TestStore::new(), Arc::new(Server::default()));
    store.write(&object_key(&key("a")), &json!("no object"));
    store.enter(Phase::Alone);
    let (objects, _changed_pods) = stored_cache(Strategy::Get, &server, &store);
    objects.register(&pod("1", &["a", "b"]));
    for name in ["a", "b"] {
        server.set(&key(name), Ok(object(4)));
        assert_eq!(get(&objects, name), Ok("4".into()));
    }
    assert_eq!((server.reads(), stored_changes(&store)), (2, vec!["n/a 4".to_owned(), "n/b 4".to_owned()]));
}

#[test]
fn watch_of_a_stored_immutable_object_ends_with_its_first_response() {
    let (store, server) = (TestStore::new(), Arc::new(Server::default()));
    let immutable = Object { immutable: true, ..object(1) };
    store.write(&object_key(&key("a")), &StoredObject::from(&immutable));
    store.enter(Phase::Alone);
    let (objects, changed_pods) = stored_cache(Strategy::Watch, &server, &store);
    objects.register(&pod("1", &["a"]));
    server.send_event(&key("a"), Some(immutable));
    while server.running.load(Ordering::SeqCst) > 0 {
        let _ = StopToken::never().wait(Duration::from_millis(1));
    }
    assert!(objects.shared.table().watches == 0 && changed_pods.is_empty());
    assert_eq!(get(&objects, "a"), Ok("1".into()));
}

#[test]
fn stored_immutable_object_without_a_watch_is_read_again_when_the_server_counts() {
    let (store, server) = (TestStore::new(), Arc::new(Server::default()));
    let immutable = |uid: &str, version| Object { immutable: true, ..of_uid(uid, version) };
    store.write(&object_key(&key("a")), &StoredObject::from(&immutable("u", 1)));
    store.enter(Phase::Alone);
    let (objects, _changed_pods) = stored_cache(Strategy::Get, &server, &store);
    objects.register(&pod("1", &["a"]));
    server.set(&key("a"), Ok(immutable("v", 7)));
    assert_eq!((get(&objects, "a"), server.reads()), (Ok("1".into()), 0));
    store.enter(Phase::Online);
    for _ in 0..2 {
        assert_eq!((get(&objects, "a"), server.reads()), (Ok("7".into()), 1));
    }
}

#[test]
fn server_that_does_not_know_the_node_replaces_no_object_until_it_counts() {
    let (store, server) = (TestStore::new(), Arc::new(Server::default()));
    store.enter(Phase::Online);
    let (objects, changed_pods) = stored_cache(Strategy::Watch, &server, &store);
    objects.register(&pod("1", &["a", "b", "c", "d"]));
    for name in ["a", "b", "c"] {
        server.send_event(&key(name), Some(object(1)));
    }
    server.send_event(&key("d"), None);
    assert_eq!(store.changes().len(), 4);
    store.enter(Phase::Held);
    server.send_event(&key("a"), None);
    server.send_event(&key("b"), Some(of_uid("other", 7)));
    server.send_event(&key("d"), Some(of_uid("other", 8)));
    assert!(changed_pods.is_empty());
    // The UID proves that the server has the same object.
    server.send_event(&key("c"), Some(object(2)));
    assert_eq!(changed_pods.try_iter().count(), 1);
    let versions = |objects: &Objects| ["a", "b", "c", "d"].map(|name| get(objects, name).ok());
    let texts = |versions: [&str; 4]| {
        versions.map(|version| Some(version.to_owned()).filter(|version| !version.is_empty()))
    };
    assert_eq!(versions(&objects), texts(["1", "1", "2", ""]));
    assert!(store.changes().is_empty(), "nothing is stored while a set is held");
    objects.settle();
    assert_eq!(versions(&objects), texts(["1", "1", "2", ""]), "the server does not count yet");

    store.enter(Phase::Online);
    objects.settle();
    assert_eq!(changed_pods.try_iter().count(), 3);
    assert_eq!(versions(&objects), texts(["", "7", "2", "8"]));
    assert_eq!(stored_changes(&store), ["n/a removed", "n/b 7", "n/c 2", "n/d 8"]);
    objects.settle();
    assert!(store.changes().is_empty() && changed_pods.is_empty());
}

#[test]
fn newer_version_of_the_same_object_replaces_a_parked_update() {
    let (store, server) = (TestStore::new(), Arc::new(Server::default()));
    store.enter(Phase::Online);
    let (objects, _changed_pods) = stored_cache(Strategy::Watch, &server, &store);
    objects.register(&pod("1", &["a"]));
    server.send_event(&key("a"), Some(object(1)));
    store.enter(Phase::Held);
    server.send_event(&key("a"), None);
    server.send_event(&key("a"), Some(object(1)));
    store.enter(Phase::Online);
    objects.settle();
    assert_eq!(get(&objects, "a"), Ok("1".into()));
}

/// Otherwise an object that was edited in that moment would stay old until its next edit.
#[test]
fn update_that_arrives_while_parked_ones_are_carried_out_is_not_replaced_by_them() {
    let (store, server) = (TestStore::new(), Arc::new(Server::default()));
    store.enter(Phase::Online);
    let is_settling = Arc::new(AtomicBool::new(false));
    let (api, settling) = (Arc::clone(&server), Arc::clone(&is_settling));
    // After the first parked update, and before the second one.
    let changed: SyncPod = Box::new(move |_| {
        if settling.swap(false, Ordering::SeqCst) {
            for name in ["a", "b"] {
                api.send_event(&key(name), Some(of_uid("other", 9)));
            }
        }
    });
    let objects = Objects::new(Strategy::Watch, Arc::<Server>::clone(&server), Box::new(|| None), changed)
        .with_offline(Some(store.offline.clone()));
    objects.register(&pod("1", &["a", "b"]));
    let send = |object: &dyn Fn() -> Object| {
        for name in ["a", "b"] {
            server.send_event(&key(name), Some(object()));
        }
    };
    send(&|| object(1));
    store.enter(Phase::Held);
    send(&|| of_uid("other", 8));
    store.enter(Phase::Online);
    is_settling.store(true, Ordering::SeqCst);
    objects.settle();
    assert_eq!((get(&objects, "a"), get(&objects, "b")), (Ok("9".into()), Ok("9".into())));
}

#[test]
fn objects_that_a_server_lost_before_it_was_held_are_read_from_the_store() {
    let (store, server) = (TestStore::new(), Arc::new(Server::default()));
    store.enter(Phase::Online);
    let (objects, changed_pods) = stored_cache(Strategy::Watch, &server, &store);
    objects.register(&pod("1", &["a", "b"]));
    server.send_event(&key("a"), Some(object(1)));
    server.send_event(&key("b"), None);
    assert_eq!(store.changes().len(), 2);
    // The store removes files late.
    server.send_event(&key("a"), None);
    assert!(get(&objects, "a").is_err());
    store.enter(Phase::Held);
    objects.use_stored();
    assert_eq!((get(&objects, "a"), get(&objects, "b").is_err()), (Ok("1".into()), true));
    assert_eq!(changed_pods.try_iter().count(), 2);
    store.enter(Phase::Online);
    objects.settle();
    assert!(get(&objects, "a").is_err());
}

/// A response that began before the server lost its data.
#[test]
fn late_absence_is_parked() {
    /// The server is held during the second read.
    struct Lost(Arc<TestStore>, AtomicUsize);
    impl ObjectApi for Lost {
        fn read(&self, key: &Key) -> Result<Object, ObjectError> {
            if self.1.fetch_add(1, Ordering::SeqCst) == 0 {
                return Ok(object(1));
            }
            self.0.enter(Phase::Held);
            Err(not_found(key))
        }
        fn watch(&self, _: &Key, _: OnUpdate) -> io::Result<Running> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }
    let store = Arc::new(TestStore::new());
    store.enter(Phase::Online);
    let server = Arc::new(Lost(Arc::clone(&store), AtomicUsize::new(0)));
    let objects = Objects::new(Strategy::Get, server, Box::new(|| None), Box::new(|_| {}))
        .with_offline(Some(store.offline.clone()));
    objects.register(&pod("1", &["a"]));
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    assert_eq!(get(&objects, "a"), Ok("1".into()));
    store.enter(Phase::Online);
    objects.settle();
    assert!(matches!(objects.shared.table().entries[&key("a")].known, KnownObject::Absent));
}
