//! Files that change while the agent works on them: a container makes, moves and replaces
//! entries at random, with links that lead to the node's own files. The agent must neither
//! change nor read those, and must not hang.
//!
//! Each test takes `RACE_SECONDS` (default 4). `FAULTS_SEED` repeats the moves of each
//! thread, though not how the threads interleave.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle::kube::PodDependencies;
use coracle::kube::error::ApiError;
use coracle::kube::objects::{self, Key, Object, ObjectApi, ObjectError, Objects, OnUpdate, Strategy};
use coracle::kube::runtime_classes::{Class, ClassApi, ClassError, RuntimeClasses};
use coracle::kube::tokens::{IssuedToken, TokenApi, Tokens};
use coracle::model::api;
use coracle::model::event::{Event, EventSink};
use coracle::model::ids::PodUid;
use coracle::model::mount::{MountedVolume, SubPath, SubPaths};
use coracle::model::pod::Pod;
use coracle::util::stop::StopToken;
use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use coracle::volumes::{Deps, Settings, VolumeError, Volumes};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use serde_json::{Value, json};

use crate::print_line;
use crate::support::file_attack::{Attack, Canary, RunningAttack, race_duration, race_seed};
use crate::support::random::Random;
use crate::support::wait::wait_until;

/// Only an operation that hangs takes so long.
const HANGS: Duration = Duration::from_secs(120);

/// A root directory with the files that no race may reach beside it.
struct RaceDirectory {
    dir: tempfile::TempDir,
    canary: Canary,
    names: Vec<String>,
    seed: u64,
}

impl RaceDirectory {
    /// `None`: there is no private mount namespace.
    fn new(names: &[&str]) -> Option<RaceDirectory> {
        let Some(base) = std::env::var_os("E2E_DIR") else {
            print_line("races: skipped: no namespace of their own; run through tests/run faults");
            return None;
        };
        let dir = tempfile::Builder::new().prefix("races").tempdir_in(base).unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let canary = Canary::new(&dir.path().join("canary"), &names);
        fs::create_dir(dir.path().join("root")).unwrap();
        Some(RaceDirectory { dir, canary, names, seed: race_seed() })
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn volumes(&self, api: Option<PodDependencies>) -> (Arc<Volumes>, Receiver<Box<Event>>) {
        let (events, queue) = EventSink::new();
        let settings = Settings { root_dir: self.root(), ..Settings::default() };
        (Arc::new(Volumes::new(settings, Deps::new(events, api))), queue)
    }

    fn attack(&self, dir: &Path) -> RunningAttack {
        let mut targets = self.canary.targets();
        // The same path, relative, as a container would have to guess it.
        targets.push(PathBuf::from("../../../../../../canary"));
        targets.push(PathBuf::from("../../../../../canary"));
        RunningAttack::start(Attack {
            dir: dir.to_owned(),
            names: self.names.clone(),
            targets,
            threads: 1,
            seed: self.seed,
        })
    }

    /// Does `round` until the time is over and it has seen all that it wants to see. Each
    /// round must end, and leave the canary alone.
    fn race(&self, what: &str, attack: &RunningAttack, mut round: impl FnMut(&mut Random) -> bool) {
        let mut random = Random::new(self.seed);
        let begun = Instant::now();
        let (mut rounds, mut done) = (0, false);
        while begun.elapsed() < race_duration() || !done {
            assert!(
                begun.elapsed() < race_duration() + HANGS,
                "{what}: after {rounds} rounds not all was seen"
            );
            done = round(&mut random);
            rounds += 1;
            self.canary.assert_no_events();
        }
        self.canary.assert_untouched();
        print_line(&format!("races: {what}: {rounds} rounds, {} moves, seed {}", attack.moves(), self.seed));
    }
}

/// A thread that executes closures of a test, so that the test can detect that one hangs.
struct WorkerThread {
    work: crossbeam_channel::Sender<Box<dyn FnOnce() + Send>>,
    running: Running,
}

impl WorkerThread {
    fn new() -> WorkerThread {
        let (work, todo) = bounded::<Box<dyn FnOnce() + Send>>(1);
        let running = spawn("t/worker", Stack::Large, OnDeath::Unsupervised, move |_| {
            todo.iter().for_each(|task| task());
        })
        .unwrap();
        WorkerThread { work, running }
    }

    fn does<T: Send + 'static>(&self, what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (report, reported) = bounded(1);
        self.work.send(Box::new(move || report.send(work()).unwrap())).unwrap();
        match reported.recv_timeout(HANGS) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => panic!("{what} hangs"),
            Err(RecvTimeoutError::Disconnected) => panic!("{what} panicked"),
        }
    }

    fn stop(self) {
        drop(self.work);
        self.running.stop(HANGS);
    }
}

fn pod(uid: &str, labels: &Value, spec: &Value) -> Pod {
    let value =
        json!({"metadata": {"name": "p", "namespace": "n", "uid": uid, "labels": labels}, "spec": spec});
    Pod::from(serde_json::from_value::<api::Pod>(value).unwrap())
}

/// After the attack all of a pod can be removed.
fn sweep(volumes: &Volumes, root: &Path) {
    wait_until("the pods' directories to be gone", HANGS, || {
        let _ = volumes.orphans(&|_| false, &StopToken::never());
        fs::read_dir(root.join("pods")).unwrap().count() == 0
    });
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains(root.to_str().unwrap()), "{table}");
}

/// The inode at a path, of the mounted file system.
fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// A container runs in the volume while sub paths of it are prepared for the next one.
#[test]
fn sub_path_never_escapes_its_volume() {
    let Some(directory) = RaceDirectory::new(&["a", "b", "c"]) else { return };
    let (volumes, _queue) = directory.volumes(None);
    let mount = json!([{"name": "e", "mountPath": "/e"}]);
    let spec = json!({"containers": [{"name": "c", "volumeMounts": mount}],
        "volumes": [{"name": "e", "emptyDir": {}}]});
    let own = volumes.setup(&pod("u1", &json!({}), &spec), &StopToken::never()).unwrap().remove(0);
    // The other one is on a disk of the node, where each operation has its own thread.
    let host =
        MountedVolume { volume: "h".to_owned(), host_path: directory.dir.path().join("host"), ..own.clone() };
    fs::create_dir(&host.host_path).unwrap();
    let attacks = [directory.attack(&own.host_path), directory.attack(&host.host_path)];
    let hand = WorkerThread::new();
    let (mut inside, mut refused) = (0_u32, 0_u32);
    directory.race("sub paths", &attacks[0], |random| {
        let index = random.below(3) as usize;
        let depth = 1 + random.below(4);
        let path: Vec<String> = (0..depth).filter_map(|_| random.pick(&directory.names).cloned()).collect();
        let path = path.join("/");
        let volume = if random.below(4) == 0 { host.clone() } else { own.clone() };
        let volumes = Arc::clone(&volumes);
        let bound = hand.does("a sub path", move || {
            let uid = PodUid::from("u1");
            let wanted = SubPath { pod: &uid, container: "c", index, volume: &volume, path: &path };
            volumes.bind(wanted, &StopToken::never())
        });
        match bound {
            Ok(target) => {
                assert!(!directory.canary.is_at(&target), "the outside is mounted");
                assert_ne!(inode(&target), inode(&directory.root()), "the outside is mounted");
                inside += 1;
            }
            Err(_) => refused += 1,
        }
        inside > 0 && refused > 0
    });
    drop(attacks);
    hand.stop();
    sweep(&volumes, &directory.root());
    directory.canary.assert_untouched();
}

/// The directories of pods are removed while they change in any way, above the volumes, too:
/// as if a container had got hold of them.
#[test]
fn removal_of_pods_follows_no_link_out_of_them() {
    let plugin = "kubernetes.io~empty-dir";
    let names = ["u1", "u2", "volumes", "plugins", plugin, "e", "volume-subpaths", "containers"];
    let Some(directory) = RaceDirectory::new(&names) else { return };
    let (volumes, _queue) = directory.volumes(None);
    let pods = directory.root().join("pods");
    fs::create_dir(&pods).unwrap();
    let attack = directory.attack(&pods);
    let hand = WorkerThread::new();
    let mut removed = 0;
    let mut left = 0;
    directory.race("removal", &attack, |random| {
        // A tree that is deeper than the number of open descriptors.
        let top = pods.join(["u1", "u2"][random.below(2) as usize]).join("volumes").join(plugin).join("e");
        let deep = top.join("e/".repeat(random.below(60) as usize));
        if random.below(2) == 0 {
            make_dirs(&directory.root(), deep.strip_prefix(directory.root()).unwrap());
        }
        let volumes = Arc::clone(&volumes);
        if random.below(2) == 0 {
            let torn =
                hand.does("a tear-down", move || volumes.tear_down(&PodUid::from("u1"), &StopToken::never()));
            assert!(matches!(torn, Ok(()) | Err(VolumeError::LeftBehind { .. } | VolumeError::Io { .. })));
        } else {
            let swept = hand.does("a sweep", move || volumes.orphans(&|_| false, &StopToken::never()));
            let report = swept.unwrap();
            removed += report.removed.len();
            left += report.left.len();
        }
        removed > 0 && left > 0
    });
    drop(attack);
    hand.stop();
    for entry in fs::read_dir(&pods).unwrap() {
        // Entries that are no directories do not belong to the agent.
        let entry = entry.unwrap();
        if !entry.file_type().unwrap().is_dir() {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    make_plain(&pods);
    sweep(&volumes, &directory.root());
    directory.canary.assert_untouched();
}

/// Makes nested directories, and follows no link.
fn make_dirs(root: &Path, below: &Path) {
    use rustix::fs::{Mode, OFlags, mkdirat, open, openat};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut dir = open(root, flags, Mode::empty()).unwrap();
    for element in below {
        let _ = mkdirat(&dir, element, Mode::from_raw_mode(0o755));
        let Ok(next) = openat(&dir, element, flags, Mode::empty()) else { return };
        dir = next;
    }
}

/// Removes what the agent never removes: foreign data at the paths of volumes. The attack has ended.
fn make_plain(pods: &Path) {
    for pod in fs::read_dir(pods).unwrap().flatten() {
        let _ = fs::remove_dir_all(pod.path().join("volumes"));
        let _ = fs::remove_file(pod.path().join("volumes"));
        for name in ["plugins", "volume-subpaths"] {
            let _ = fs::remove_dir_all(pod.path().join(name));
            let _ = fs::remove_file(pod.path().join(name));
        }
    }
}

/// Reads a file below a directory, and follows links.
fn read_below(dir: &Path, path: &str) -> std::io::Result<String> {
    use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};
    let dir = open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    std::io::read_to_string(fs::File::from(openat2(dir, path, flags, Mode::empty(), resolve)?))
}

/// An API server with one ConfigMap, and a token that is always the same.
struct FakeApiServer;

impl ObjectApi for FakeApiServer {
    fn read(&self, key: &Key) -> Result<Object, ObjectError> {
        if key.name != "map" {
            return Err(objects::not_found(key));
        }
        let data = [("a", "1"), ("b", "2")].map(|(key, text)| (key.to_owned(), text.as_bytes().to_vec()));
        Ok(Object { resource_version: "1".to_owned(), data: data.into(), ..Object::default() })
    }

    fn watch(&self, _: &Key, _: OnUpdate) -> std::io::Result<Running> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

impl TokenApi for FakeApiServer {
    fn create(&self, _: &str, _: &str, _: &Value, _: &StopToken) -> Result<IssuedToken, ApiError> {
        let response = json!({"spec": {"expirationSeconds": 3600},
            "status": {"token": "t", "expirationTimestamp": "2100-01-01T00:00:00Z"}});
        Ok(serde_json::from_value(response).unwrap())
    }
}

impl ClassApi for FakeApiServer {
    fn read_class(&self, name: &str) -> Result<Class, ClassError> {
        Err(ClassError::NotFound(name.to_owned()))
    }
}

/// Volumes of files are read-only in a container, but another one may have them by a hostPath
/// volume: they are brought up to date while it changes them.
#[test]
fn volume_file_writer_never_escapes_its_volume() {
    let names = ["..data", "..data_tmp", "a", "b", "deep", "token"];
    let Some(directory) = RaceDirectory::new(&names) else { return };
    let api = PodDependencies {
        objects: Objects::new(
            Strategy::Get,
            Arc::new(FakeApiServer),
            Box::new(|| None),
            Box::new(|_: &PodUid| {}),
        ),
        tokens: Tokens::new(Box::new(FakeApiServer)),
        registry_tokens: Tokens::new(Box::new(FakeApiServer)),
        services: Default::default(),
        classes: RuntimeClasses::new(Box::new(FakeApiServer)),
        claims: Default::default(),
        trust: Default::default(),
    };
    let label = |path: &str| json!({"path": path, "fieldRef": {"fieldPath": "metadata.labels"}});
    let mounts: Vec<Value> = ["all", "map"]
        .iter()
        .map(|name| json!({"name": name, "mountPath": format!("/{name}")}))
        .chain([json!({"name": "none", "mountPath": "/all/in/deep"})])
        .collect();
    let spec = json!({
        "serviceAccountName": "default",
        "securityContext": {"runAsUser": 1000, "fsGroup": 2000},
        "containers": [{"name": "c", "volumeMounts": mounts}],
        "volumes": [
            {"name": "all", "projected": {"sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}},
                {"serviceAccountToken": {"path": "deep/a/token", "expirationSeconds": 600}},
                {"downwardAPI": {"items": [label("a"), label("deep/b")]}}]}},
            {"name": "map", "configMap": {"name": "map"}},
            {"name": "none", "emptyDir": {}}],
    });
    let first = pod("u1", &json!({"round": "0"}), &spec);
    api.register(&first);
    let (volumes, _queue) = directory.volumes(Some(api.clone()));
    let ready = volumes.setup(&first, &StopToken::never()).unwrap();
    let attacks = [directory.attack(&ready[0].host_path), directory.attack(&ready[1].host_path)];
    let hand = WorkerThread::new();
    let (mut written, mut refused, mut round) = (0_u32, 0_u32, 0_u32);
    directory.race("files", &attacks[0], |random| {
        if random.below(4) == 0 {
            ready.iter().for_each(|volume| clear(&volume.host_path));
        }
        // Half of the time nothing is new, and all files are compared.
        round += u32::from(random.below(2) == 0);
        let next = pod("u1", &json!({"round": round.to_string()}), &spec);
        // Another agent: the one that failed would wait before its retry.
        let (volumes, _queue) = directory.volumes(Some(api.clone()));
        let set_up = hand.does("an update of files", move || volumes.setup(&next, &StopToken::never()));
        refused += u32::from(set_up.is_err());
        let found = read_below(&ready[0].host_path, "..data/deep/b");
        written += u32::from(found.is_ok_and(|found| found == format!("round=\"{round}\"")));
        written > 0 && refused > 0
    });
    drop(attacks);
    hand.stop();
    sweep(&volumes, &directory.root());
    directory.canary.assert_untouched();
}

/// A test that started a program while the canary was made kept its files open for a moment.
#[test]
fn canary_reports_an_open_but_not_the_end_of_an_earlier_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let open_before = fs::File::create(&file).unwrap();
    let canary = Canary::watch(dir.path());
    drop(open_before);
    canary.assert_untouched();
    drop(fs::File::open(&file).unwrap());
    assert!(std::panic::catch_unwind(|| canary.assert_no_events()).is_err());
}

/// Removes what the agent and the container have made, so that the agent can make it again.
fn clear(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let _ = fs::remove_dir_all(entry.path());
        let _ = fs::remove_file(entry.path());
    }
}
