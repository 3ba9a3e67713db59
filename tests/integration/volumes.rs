//! The `volumes` room with real mounts, in the mount namespace that `tests/run` makes.

use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use coracle::kube::PodDependencies;
use coracle::kube::error::ApiError;
use coracle::kube::objects::{self, Key, Object, ObjectApi, ObjectError, Objects, OnUpdate, Strategy};
use coracle::kube::runtime_classes::{Class, ClassApi, ClassError, RuntimeClasses};
use coracle::kube::tokens::{IssuedToken, TokenApi, Tokens};
use coracle::model::api;
use coracle::model::event::{Event, EventSink};
use coracle::model::fields::NodeAllocatable;
use coracle::model::ids::PodUid;
use coracle::model::mount::{MountedVolume, SubPath, SubPathFailure, SubPaths};
use coracle::model::pod::Pod;
use coracle::model::quantity::Amount;
use coracle::util::stop::StopToken;
use coracle::util::threads::{self, OnDeath, Stack};
use coracle::volumes::{Deps, Settings, VolumeError, Volumes};
use crossbeam_channel::Receiver;
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::support::wait::{wait_for, wait_until};

struct VolumeFixture {
    dir: tempfile::TempDir,
}

impl VolumeFixture {
    /// `None`: there is no private mount namespace.
    fn new() -> Option<VolumeFixture> {
        let Some(base) = std::env::var_os("E2E_DIR") else {
            eprintln!("skipped: no namespace of its own; run through tests/run integration");
            return None;
        };
        let dir = tempfile::Builder::new().prefix("vol").tempdir_in(base).unwrap();
        Some(VolumeFixture { dir })
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn volumes(&self) -> (Volumes, Receiver<Box<Event>>) {
        fs::create_dir_all(self.root()).unwrap();
        let (events, queue) = EventSink::new();
        let allocatable =
            NodeAllocatable { memory: Amount::from_units(64 << 20), ..NodeAllocatable::default() };
        (
            Volumes::new(
                Settings { root_dir: self.root(), allocatable, ..Settings::default() },
                Deps::new(events, None),
            ),
            queue,
        )
    }

    /// The mounts below a path of this place.
    fn mounts(&self, below: &Path) -> Vec<String> {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let below = below.to_str().unwrap().to_owned();
        let mount_point = |line: &str| line.split(' ').nth(4).map(str::to_owned);
        table.lines().filter_map(mount_point).filter(|mount| mount.starts_with(&below)).collect()
    }
}

fn pod(labels: Value, spec: Value) -> Pod {
    let value =
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u1", "labels": labels}, "spec": spec});
    Pod::from(serde_json::from_value::<api::Pod>(value).unwrap())
}

fn downward_pod(labels: Value) -> Pod {
    pod(
        labels,
        json!({
            "securityContext": {"fsGroup": 2000},
            "containers": [{"name": "c", "resources": {"limits": {"memory": "8Mi"}},
                "volumeMounts": [{"name": "d", "mountPath": "/d"}, {"name": "e", "mountPath": "/d/in/e"}]}],
            "volumes": [
                {"name": "d", "downwardAPI": {"defaultMode": 0o400, "items": [
                    {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
                    {"path": "deep/mem", "mode": 0o644, "resourceFieldRef":
                        {"containerName": "c", "resource": "limits.memory", "divisor": "1Mi"}}]}},
                {"name": "e", "emptyDir": {"medium": "Memory"}}],
        }),
    )
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

const STOP: fn() -> StopToken = StopToken::never;

/// A process that another test forks holds all open files of this one until its exec, and so long a
/// mount is busy. No fork takes longer than this.
const FREE: Duration = Duration::from_secs(60);

/// Tears the pod's volumes down; retries as the agent does while they are busy.
pub fn tear_down(volumes: &Volumes, uid: &PodUid) {
    let busy = std::io::Error::from(Errno::BUSY).to_string();
    wait_until("the volumes not to be busy", FREE, || match volumes.tear_down(uid, &STOP()) {
        Ok(()) => true,
        Err(VolumeError::LeftBehind { cause, .. }) if cause.ends_with(&busy) => false,
        // An update has not ended yet.
        Err(VolumeError::Pending) => false,
        Err(error) => panic!("{error:?}"),
    });
}

/// Removes what is left of pods that are not known, as soon as it is not busy. Returns their UIDs.
pub fn remove_orphans(volumes: &Volumes, is_known: impl Fn(&PodUid) -> bool) -> Vec<PodUid> {
    wait_for("the volumes not to be busy", FREE, || {
        let report = volumes.orphans(&is_known, &STOP()).unwrap();
        report.left.is_empty().then_some(report.removed)
    })
}

/// Unmounts as soon as the mount is not busy.
pub fn unmount_when_free(mount: &Path) {
    let flags = rustix::mount::UnmountFlags::empty();
    wait_until("the mount not to be busy", FREE, || match rustix::mount::unmount(mount, flags) {
        Ok(()) => true,
        Err(Errno::BUSY) => false,
        Err(errno) => panic!("{}: {errno}", mount.display()),
    });
}

#[test]
fn downward_api_files_follow_the_pod() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let (volumes, queue) = fixture.volumes();
    let first = downward_pod(json!({"a": "1"}));
    let ready = volumes.setup(&first, &STOP()).unwrap();
    let dir = &ready[0].host_path;
    assert!(ready[0].read_only && !ready[1].read_only);
    assert_eq!(fs::read_to_string(dir.join("labels")).unwrap(), "a=\"1\"");
    assert_eq!(fs::read_to_string(dir.join("deep/mem")).unwrap(), "8");
    // fsGroup: the group may read what the mode of the file does not give to all.
    let file = fs::metadata(dir.join("labels")).unwrap();
    assert_eq!((file.gid(), mode(&dir.join("labels")), mode(&dir.join("deep/mem"))), (2000, 0o440, 0o644));
    assert_eq!(mode(&dir.join("deep")) & 0o2050, 0o2050);
    assert_eq!((fs::metadata(dir).unwrap().gid(), mode(dir)), (2000, 0o3777));
    assert!(dir.join("in/e").is_dir(), "another volume's mount point");
    assert_eq!(fixture.mounts(&fixture.root()).len(), 2);
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|line| line.contains(dir.to_str().unwrap())).unwrap();
    assert!(line.contains("tmpfs") && line.contains("size=8192k"), "{line}");

    let version = |dir: &Path| fs::read_link(dir.join("..data")).unwrap();
    let before = version(dir);
    volumes.remount(&first, &STOP());
    assert_eq!(version(dir), before, "nothing new, nothing written");
    volumes.remount(&downward_pod(json!({"a": "2"})), &STOP());
    assert_ne!(version(dir), before);
    assert_eq!(fs::read_to_string(dir.join("labels")).unwrap(), "a=\"2\"");
    assert_eq!(mode(&dir.join("labels")), 0o440);
    assert!(queue.is_empty());

    // Another agent on the same directories mounts nothing again.
    let (next, _queue) = fixture.volumes();
    assert_eq!(next.setup(&downward_pod(json!({"a": "2"})), &STOP()).unwrap(), ready);
    assert_eq!(fixture.mounts(&fixture.root()).len(), 2);
    tear_down(&next, first.uid());
    assert!(fixture.mounts(&fixture.root()).is_empty());
    assert!(!dir.exists());
    next.orphans(&|_| false, &STOP()).unwrap();
    assert_eq!(fs::read_dir(fixture.root().join("pods")).unwrap().count(), 0);
}

#[test]
fn huge_pages_volume_is_a_separate_mount() {
    let Some(fixture) = VolumeFixture::new() else { return };
    if !Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").exists() {
        eprintln!("skipped: no huge pages of 2 MiB here");
        return;
    }
    let (volumes, queue) = fixture.volumes();
    let pod = pod(
        json!({}),
        json!({
            "containers": [{"name": "c", "resources": {"limits": {"hugepages-2Mi": "4Mi"}},
                "volumeMounts": [{"name": "h", "mountPath": "/h"}]}],
            "volumes": [{"name": "h", "emptyDir": {"medium": "HugePages-2Mi"}}],
        }),
    );
    let ready = volumes.setup(&pod, &STOP()).unwrap_or_else(|error| {
        panic!("{error}: {:?}", queue.try_iter().map(|event| event.message).collect::<Vec<_>>())
    });
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|line| line.contains(ready[0].host_path.to_str().unwrap())).unwrap();
    assert!(line.contains("hugetlbfs") && line.contains("pagesize=2M"), "{line}");
    let (again, _queue) = fixture.volumes();
    again.setup(&pod, &STOP()).unwrap();
    assert_eq!(fixture.mounts(&fixture.root()).len(), 1);
    tear_down(&again, pod.uid());
    assert!(fixture.mounts(&fixture.root()).is_empty());
}

fn with_volume() -> Pod {
    pod(
        json!({}),
        json!({
            "containers": [{"name": "c", "volumeMounts": [{"name": "e", "mountPath": "/e"}]}],
            "volumes": [{"name": "e", "emptyDir": {}}],
        }),
    )
}

fn bind(
    volumes: &Volumes,
    volume: &MountedVolume,
    index: usize,
    path: &str,
) -> Result<PathBuf, SubPathFailure> {
    let uid = PodUid::from("u1");
    volumes.bind(SubPath { pod: &uid, container: "c", index, volume, path }, &STOP())
}

/// Replaces a bind mount as soon as it is not busy.
fn bind_again(volumes: &Volumes, volume: &MountedVolume, index: usize, path: &str) {
    wait_until("the target to be free", FREE, || match bind(volumes, volume, index, path) {
        Ok(_) => true,
        Err(SubPathFailure::Prepare) => false,
        Err(failure) => panic!("{failure:?}"),
    });
}

fn inode(path: &Path) -> (u64, u64) {
    let found = fs::metadata(path).unwrap();
    (found.dev(), found.ino())
}

#[test]
fn sub_path_mounts_the_object_itself() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let (volumes, _queue) = fixture.volumes();
    let ready = volumes.setup(&with_volume(), &STOP()).unwrap();
    let (volume, dir) = (&ready[0], ready[0].host_path.clone());
    fs::write(dir.join("file"), "one").unwrap();
    let pod_dir = fs::canonicalize(fixture.root()).unwrap().join("pods/u1");

    let target = bind(&volumes, volume, 0, "made/deep").unwrap();
    assert_eq!(target, pod_dir.join("volume-subpaths/e/c/0"));
    assert_eq!(inode(&target), inode(&dir.join("made/deep")));
    assert_eq!(mode(&dir.join("made/deep")), 0o777, "as the volume's root");
    let file = bind(&volumes, volume, 1, "file").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "one");
    assert_eq!(fixture.mounts(&pod_dir).len(), 2);

    // The next container: an unchanged mount stays, a replaced one is mounted again.
    assert_eq!(bind(&volumes, volume, 0, "made/deep").unwrap(), target);
    fs::write(dir.join("new"), "two").unwrap();
    fs::rename(dir.join("new"), dir.join("file")).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "one", "it is still mounted");
    bind_again(&volumes, volume, 1, "file");
    assert_eq!(fs::read_to_string(&file).unwrap(), "two");
    fs::remove_file(dir.join("file")).unwrap();
    bind_again(&volumes, volume, 1, "file");
    assert!(file.is_dir(), "made, since it was missing");
    assert_eq!(fixture.mounts(&pod_dir).len(), 2);

    // A volume outside of the agent's directories.
    let outside = fixture.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let host = MountedVolume { host_path: outside.clone(), ..volume.clone() };
    let other = bind(&volumes, &host, 2, "x").unwrap();
    assert_eq!(inode(&other), inode(&outside.join("x")));

    tear_down(&volumes, &PodUid::from("u1"));
    assert!(fixture.mounts(&pod_dir).is_empty());
    assert!(!pod_dir.join("volume-subpaths").exists());
    assert!(outside.join("x").exists());
}

#[test]
fn sub_paths_through_links_out_of_the_volume_are_refused() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let (volumes, _queue) = fixture.volumes();
    let ready = volumes.setup(&with_volume(), &STOP()).unwrap();
    let dir = &ready[0].host_path;
    symlink("/etc", dir.join("etc")).unwrap();
    symlink("../../../..", dir.join("up")).unwrap();
    symlink("etc/passwd", dir.join("passwd")).unwrap();
    for path in ["etc", "etc/passwd", "up", "up/etc-hosts", "passwd"] {
        assert_eq!(bind(&volumes, &ready[0], 0, path), Err(SubPathFailure::Prepare), "{path}");
    }
    symlink("real", dir.join("in")).unwrap();
    fs::create_dir(dir.join("real")).unwrap();
    let target = bind(&volumes, &ready[0], 0, "in").unwrap();
    assert_eq!(inode(&target), inode(&dir.join("real")));
    tear_down(&volumes, &PodUid::from("u1"));
}

/// A container that runs in the volume exchanges a directory for a link to the node, as fast
/// as it can, while sub paths through it are mounted.
#[test]
fn racing_links_never_mount_outside_directories() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let (volumes, _queue) = fixture.volumes();
    let ready = volumes.setup(&with_volume(), &STOP()).unwrap();
    let dir = ready[0].host_path.clone();
    let secret = fixture.dir.path().join("secret");
    fs::create_dir_all(secret.join("sub/deep")).unwrap();
    fs::create_dir_all(dir.join("a/sub/deep")).unwrap();
    symlink(&secret, dir.join("link")).unwrap();
    symlink("../../../../../../secret", dir.join("relative")).unwrap();
    let forbidden = inode(&secret.join("sub/deep"));
    let done = Arc::new(AtomicBool::new(false));
    let (until, volume_dir) = (Arc::clone(&done), dir.clone());
    let swapper = threads::spawn("t/swapper", Stack::Small, OnDeath::Unsupervised, move |_| {
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        let cwd = rustix::fs::CWD;
        let exchange = |other: &str| {
            let _ = rustix::fs::renameat_with(cwd, volume_dir.join("a"), cwd, volume_dir.join(other), flags);
        };
        while !until.load(Ordering::Relaxed) {
            for other in ["link", "link", "relative", "relative"] {
                exchange(other);
            }
        }
    })
    .unwrap();
    let (mut inside, mut refused) = (0, 0);
    let begun = Instant::now();
    let mut round = 0;
    // Until both outcomes were seen: a busy machine may delay either thread for long.
    while round < 600 || (inside == 0 || refused == 0) && begun.elapsed() < Duration::from_secs(60) {
        round += 1;
        if round % 50 == 0 {
            let _ = STOP().wait(Duration::from_millis(1));
        }
        match bind(&volumes, &ready[0], round % 3, "a/sub/deep") {
            Ok(target) => {
                assert_ne!(inode(&target), forbidden, "the outside is mounted");
                inside += 1;
            }
            Err(_) => refused += 1,
        }
    }
    done.store(true, Ordering::Relaxed);
    swapper.stop(Duration::from_secs(5));
    assert!(inside > 0 && refused > 0, "{inside} inside, {refused} refused");
    tear_down(&volumes, &PodUid::from("u1"));
    assert!(secret.join("sub/deep").exists());
}

#[test]
fn leftovers_of_a_killed_agent_are_removed() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let (volumes, _queue) = fixture.volumes();
    let ready = volumes.setup(&downward_pod(json!({})), &STOP()).unwrap();
    fs::write(ready[1].host_path.join("data"), "x").unwrap();
    bind(&volumes, &ready[1], 1, "sub").unwrap();
    drop(volumes);

    let (next, _queue) = fixture.volumes();
    let busy = fs::File::open(ready[1].host_path.join("data")).unwrap();
    let cleanup = next.orphans(&|_| true, &STOP()).unwrap();
    assert_eq!((cleanup.removed.len(), cleanup.left.len()), (0, 0));
    let report = next.orphans(&|_| false, &STOP()).unwrap();
    assert!(report.removed.is_empty());
    let text = &report.left[0].1;
    assert!(text.starts_with("orphaned pod \"u1\" found, but mounted volumes=["), "{text}");
    assert_eq!(fs::read_to_string(ready[1].host_path.join("data")).unwrap(), "x");
    drop(busy);
    assert_eq!(remove_orphans(&next, |_| false), [PodUid::from("u1")]);
    assert!(fixture.mounts(&fixture.root()).is_empty());
}

/// An operator moved the directory of the pods to another disk.
#[test]
fn pods_end_and_leftovers_are_removed_if_the_directory_of_pods_is_a_link() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let disk = fixture.dir.path().join("disk/pods");
    fs::create_dir_all(&disk).unwrap();
    fs::create_dir_all(fixture.root()).unwrap();
    symlink(&disk, fixture.root().join("pods")).unwrap();
    let memory = json!({"name": "m", "emptyDir": {"medium": "Memory"}});
    let pod = pod_of("u1", &[memory]);
    let set_up = |volumes: &Volumes| {
        let ready = volumes.setup(&pod, &STOP()).unwrap();
        bind(volumes, &ready[0], 1, "sub").unwrap();
        assert_eq!(fixture.mounts(&disk).len(), 2);
    };
    let (volumes, _queue) = fixture.volumes();
    set_up(&volumes);
    // A restarted agent finds the mounts, and makes none.
    drop(volumes);
    let (volumes, _queue) = fixture.volumes();
    set_up(&volumes);
    tear_down(&volumes, pod.uid());
    assert!(fixture.mounts(fixture.dir.path()).is_empty());
    // The pod is gone when the agent starts again.
    set_up(&volumes);
    drop(volumes);
    let (volumes, _queue) = fixture.volumes();
    assert_eq!(remove_orphans(&volumes, |_| false), [PodUid::from("u1")]);
    assert!(fixture.mounts(fixture.dir.path()).is_empty());
    assert_eq!(fs::read_dir(&disk).unwrap().count(), 0);
}

#[test]
fn empty_dir_is_writable_for_its_fs_group() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let (volumes, _queue) = fixture.volumes();
    let pod = pod(
        json!({}),
        json!({
            "securityContext": {"fsGroup": 2000, "fsGroupChangePolicy": "OnRootMismatch"},
            "containers": [{"name": "c", "volumeMounts": [{"name": "e", "mountPath": "/e"}]}],
            "volumes": [{"name": "e", "emptyDir": {}}],
        }),
    );
    let dir = volumes.setup(&pod, &STOP()).unwrap()[0].host_path.clone();
    assert_eq!((fs::metadata(&dir).unwrap().gid(), mode(&dir)), (2000, 0o2777));
    // Changes by the containers stay, also for the next agent.
    fs::set_permissions(&dir, PermissionsExt::from_mode(0o700)).unwrap();
    fixture.volumes().0.setup(&pod, &STOP()).unwrap();
    assert_eq!(mode(&dir), 0o700);
}

/// The states that a kill or a reboot can leave: from each the set-up reaches the normal result.
#[test]
fn interrupted_volume_setup_continues_from_every_step() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let pod = downward_pod(json!({"a": "1"}));
    let (volumes, _queue) = fixture.volumes();
    let ready = volumes.setup(&pod, &STOP()).unwrap();
    let dir = ready[0].host_path.clone();
    let marker = fixture.root().join("pods/u1/plugins/kubernetes.io~empty-dir/wrapped_d/ready");
    let unmount = || {
        unmount_when_free(&ready[1].host_path);
        unmount_when_free(&dir);
    };
    let complete = |what: &str| {
        let (next, queue) = fixture.volumes();
        assert_eq!(next.setup(&pod, &STOP()).unwrap(), ready, "{what}");
        assert!(queue.is_empty(), "{what}");
        assert_eq!(fs::read_to_string(dir.join("labels")).unwrap(), "a=\"1\"", "{what}");
        assert_eq!(fixture.mounts(&fixture.root()).len(), 2, "{what}");
        assert!(marker.exists(), "{what}");
        let names: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 5, "{what}: {names:?}");
    };
    assert!(marker.exists());
    complete("nothing happened");
    unmount();
    complete("a reboot: the marker without the mount");
    fs::remove_file(&marker).unwrap();
    complete("killed before the marker");
    unmount();
    fs::remove_file(&marker).unwrap();
    complete("killed before the mount");
    let version = fs::read_link(dir.join("..data")).unwrap();
    fs::create_dir(dir.join("..2020_01_01_00_00_00.7")).unwrap();
    symlink("..2020_01_01_00_00_00.7", dir.join("..data_tmp")).unwrap();
    fs::remove_file(dir.join("..data")).unwrap();
    fs::remove_file(dir.join("labels")).unwrap();
    complete("killed in the first write");
    assert!(!dir.join(version).exists());

    // The same for the removal.
    tear_down(&volumes, pod.uid());
    fs::create_dir_all(fixture.root().join("pods/u1/volume-subpaths/e/c/0")).unwrap();
    fs::create_dir_all(&dir).unwrap();
    tear_down(&volumes, pod.uid());
    assert!(!dir.exists() && !fixture.root().join("pods/u1/volume-subpaths").exists());
}

/// An API server with a Secret and a ConfigMap `n/s` of the same content, and tokens that are
/// numbered.
#[derive(Clone, Default)]
struct FakeApiServer {
    secret: Arc<Mutex<Option<Object>>>,
    tokens: Arc<Mutex<u32>>,
}

impl ObjectApi for FakeApiServer {
    fn read(&self, key: &Key) -> Result<Object, ObjectError> {
        assert_eq!((key.namespace.as_str(), key.name.as_str()), ("n", "s"));
        self.secret.lock().unwrap().clone().ok_or_else(|| objects::not_found(key))
    }

    fn watch(&self, _: &Key, _: OnUpdate) -> std::io::Result<threads::Running> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

impl TokenApi for FakeApiServer {
    fn create(&self, _: &str, _: &str, _: &Value, _: &StopToken) -> Result<IssuedToken, ApiError> {
        let mut number = self.tokens.lock().unwrap();
        *number += 1;
        // The token expires at once: each read gets another one.
        let response = json!({"spec": {"expirationSeconds": 0},
            "status": {"token": format!("token {number}"), "expirationTimestamp": "2026-01-01T00:00:00Z"}});
        Ok(serde_json::from_value(response).unwrap())
    }
}

impl FakeApiServer {
    fn set(&self, version: &str) {
        *self.secret.lock().unwrap() = Some(Object {
            resource_version: version.to_owned(),
            data: [("pw".to_owned(), version.as_bytes().to_vec())].into(),
            ..Object::default()
        });
    }

    fn api(&self) -> PodDependencies {
        let changed = Box::new(|_: &PodUid| {});
        PodDependencies {
            objects: Objects::new(Strategy::Get, Arc::new(self.clone()), Box::new(|| None), changed),
            tokens: Tokens::new(Box::new(self.clone())),
            registry_tokens: Tokens::new(Box::new(self.clone())),
            services: Default::default(),
            classes: RuntimeClasses::new(Box::new(NoClasses)),
            claims: Default::default(),
            trust: Default::default(),
        }
    }
}

struct NoClasses;

impl ClassApi for NoClasses {
    fn read_class(&self, name: &str) -> Result<Class, ClassError> {
        Err(ClassError::NotFound(name.to_owned()))
    }
}

#[test]
fn secrets_and_tokens_are_in_memory_and_follow_their_objects() {
    let Some(fixture) = VolumeFixture::new() else { return };
    fs::create_dir_all(fixture.root()).unwrap();
    let (events, queue) = EventSink::new();
    let (server, settings) =
        (FakeApiServer::default(), Settings { root_dir: fixture.root(), ..Settings::default() });
    let api = server.api();
    let volumes = Volumes::new(settings, Deps::new(events, Some(api.clone())));
    let pod = pod(
        json!({}),
        json!({
            "serviceAccountName": "default",
            "securityContext": {"runAsUser": 1000},
            "containers": [{"name": "c", "volumeMounts": [{"name": "s", "mountPath": "/s"},
                {"name": "t", "mountPath": "/t"}, {"name": "s", "mountPath": "/pw", "subPath": "pw"}]}],
            "volumes": [
                {"name": "s", "secret": {"secretName": "s", "defaultMode": 0o400}},
                {"name": "t", "projected": {"defaultMode": 0o644, "sources": [
                    {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}},
                    {"secret": {"name": "s", "items": [{"key": "pw", "path": "deep/pw"}]}}]}}],
        }),
    );
    api.register(&pod);
    assert!(volumes.setup(&pod, &STOP()).is_err());
    let mut messages: Vec<String> = queue.try_iter().map(|event| event.message).collect();
    // On a busy machine the second one is tried before the first one has failed.
    messages.sort();
    assert_eq!(
        messages,
        ["s", "t"].map(|v| format!("MountVolume.SetUp failed for volume {v:?} : secret \"s\" not found"))
    );
    assert!(fixture.mounts(&fixture.root()).is_empty());
    api.forget(pod.uid());
    tear_down(&volumes, pod.uid());

    server.set("one");
    api.register(&pod);
    let ready = volumes.setup(&pod, &STOP()).unwrap();
    let (secret, tokens) = (&ready[0].host_path, &ready[1].host_path);
    assert!(secret.ends_with("volumes/kubernetes.io~secret/s") && ready[0].read_only);
    assert_eq!(fixture.mounts(&fixture.root()).len(), 2);
    assert_eq!(fs::read_to_string(secret.join("pw")).unwrap(), "one");
    assert_eq!(mode(&secret.join("pw")), 0o400);
    let token = fs::metadata(tokens.join("token")).unwrap();
    assert_eq!((token.uid(), token.mode() & 0o7777), (1000, 0o600));
    let first = fs::read_to_string(tokens.join("token")).unwrap();
    let uid = pod.uid().clone();
    let wanted = SubPath { pod: &uid, container: "c", index: 2, volume: &ready[0], path: "pw" };
    let bound = volumes.bind(wanted, &STOP()).unwrap();
    assert_eq!(fs::read_to_string(&bound).unwrap(), "one");

    server.set("two");
    // A sync waits for the responses for a moment only, and later ones take them.
    wait_until("the files to be updated", FREE, || {
        volumes.remount(&pod, &STOP());
        let files = [secret.join("pw"), tokens.join("deep/pw")];
        files.iter().all(|file| fs::read_to_string(file).unwrap() == "two")
    });
    assert_ne!(fs::read_to_string(tokens.join("token")).unwrap(), first);
    assert_eq!(fs::read_to_string(&bound).unwrap(), "one", "a sub path stays what it was");
    assert!(queue.is_empty());
    tear_down(&volumes, pod.uid());
    assert!(fixture.mounts(&fixture.root()).is_empty());
}

/// Links themselves are checked, not their targets, as the tests of Kubernetes do.
#[test]
fn links_have_the_owner_and_group_of_their_files() {
    let Some(fixture) = VolumeFixture::new() else { return };
    fs::create_dir_all(fixture.root()).unwrap();
    let (events, queue) = EventSink::new();
    let server = FakeApiServer::default();
    server.set("one");
    let api = server.api();
    let settings = Settings { root_dir: fixture.root(), ..Settings::default() };
    let volumes = Volumes::new(settings, Deps::new(events, Some(api.clone())));
    let names = ["secret", "map", "fields", "all"];
    let mounts = names.map(|name| json!({"name": name, "mountPath": format!("/{name}")}));
    let label = json!([{"path": "pw", "fieldRef": {"fieldPath": "metadata.name"}}]);
    let volumes_of = json!([
        {"name": "secret", "secret": {"secretName": "s"}},
        {"name": "map", "configMap": {"name": "s"}},
        {"name": "fields", "downwardAPI": {"items": label}},
        {"name": "all", "projected": {"sources": [
            {"secret": {"name": "s"}},
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}},
            {"serviceAccountToken": {"path": "deep/token", "expirationSeconds": 600}}]}}]);
    for (context, user, group) in [
        (json!({}), 0, 0),
        (json!({"runAsUser": 1000}), 1000, 0),
        (json!({"fsGroup": 2000}), 0, 2000),
        (json!({"runAsUser": 1000, "fsGroup": 2000}), 1000, 2000),
    ] {
        let spec = json!({
            "serviceAccountName": "default", "securityContext": context,
            "containers": [{"name": "c", "volumeMounts": mounts}], "volumes": volumes_of,
        });
        let pod = pod(json!({}), spec);
        api.register(&pod);
        let ready = volumes.setup(&pod, &STOP()).unwrap();
        for (volume, name) in ready.iter().zip(names) {
            assert_eq!(volume.volume, name);
            let link_owner = |path: &str| {
                let link = fs::symlink_metadata(volume.host_path.join(path)).unwrap();
                assert!(link.is_symlink(), "{name}/{path}");
                (link.uid(), link.gid())
            };
            let file = |path: &str| {
                fs::metadata(volume.host_path.join(path)).map(|metadata| (metadata.uid(), metadata.gid()))
            };
            assert_eq!(
                [link_owner("..data"), link_owner("pw"), file("pw").unwrap()],
                [(0, group); 3],
                "{name} {context}"
            );
            if name == "all" {
                let token = [
                    link_owner("token"),
                    file("token").unwrap(),
                    link_owner("deep"),
                    file("deep/token").unwrap(),
                ];
                assert_eq!(token, [(user, group); 4], "{context}");
                assert_eq!(file("deep").unwrap(), (0, group), "{context}");
            }
        }
        api.forget(pod.uid());
        tear_down(&volumes, pod.uid());
    }
    assert!(queue.is_empty());
}

/// A file system whose server does not answer.
struct HangingFilesystem {
    server: Option<fs::File>,
    mount_point: PathBuf,
}

impl HangingFilesystem {
    /// `None`: the kernel has no FUSE.
    fn mount(mount_point: PathBuf) -> Option<HangingFilesystem> {
        let server = fs::File::options().read(true).write(true).open("/dev/fuse").ok()?;
        fs::create_dir(&mount_point).unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        let options = CString::new(options).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("none", &mount_point, "fuse", flags, options.as_c_str()).unwrap();
        Some(HangingFilesystem { server: Some(server), mount_point })
    }
}

impl Drop for HangingFilesystem {
    fn drop(&mut self) {
        // Each call that waits for an answer fails.
        drop(self.server.take());
        rustix::mount::unmount(&self.mount_point, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

fn host(name: &str, path: &Path, kind: &str) -> Value {
    json!({"name": name, "hostPath": {"path": path.display().to_string(), "type": kind}})
}

/// A pod with these volumes, all of them mounted.
fn pod_of(uid: &str, volumes: &[Value]) -> Pod {
    let mounts: Vec<Value> =
        volumes.iter().map(|volume| json!({"name": volume["name"], "mountPath": "/m"})).collect();
    let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": uid},
        "spec": {"containers": [{"name": "c", "volumeMounts": mounts}], "volumes": volumes}});
    Pod::from(serde_json::from_value::<api::Pod>(value).unwrap())
}

#[test]
fn hanging_volume_delays_no_other() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let (volumes, queue) = fixture.volumes();
    let (hung_at, made) = (fixture.dir.path().join("hung"), fixture.dir.path().join("made"));
    let pod = pod_of(
        "u1",
        &[
            host("hung", &hung_at.join("dir"), "Directory"),
            host("file", &made.join("file"), "FileOrCreate"),
            host("dir", &made, "DirectoryOrCreate"),
            json!({"name": "e", "emptyDir": {}}),
            host("none", &fixture.dir.path().join("none"), "Directory"),
        ],
    );
    std::thread::scope(|scope| {
        let Some(hung) = HangingFilesystem::mount(hung_at) else {
            eprintln!("skipped: no /dev/fuse here");
            return;
        };
        let set_up = scope.spawn(|| volumes.setup(&pod, &STOP()));
        wait_until("the other volumes to be ready", FREE, || volumes.mounted(pod.uid()).len() == 3);
        // A failure is reported while the other volume hangs, which cannot create the missing path.
        wait_until("the event of the failure", FREE, || !queue.is_empty());
        assert!(!set_up.is_finished() && made.join("file").is_file());
        drop(hung);
        let error = set_up.join().unwrap().unwrap_err();
        assert!(error.to_string().starts_with("unmounted volumes=[hung none], unattached"), "{error}");
        let events: Vec<String> = queue.try_iter().map(|event| event.message).collect();
        assert_eq!(events.len(), 2, "{events:?}");
        for (event, name) in events.iter().zip(["none", "hung"]) {
            assert!(event.contains(&format!("{name:?} : hostPath type check failed")), "{events:?}");
        }
    });
}

/// One pod has more volumes on a dead file server than the node has threads for operations.
#[test]
fn pod_with_hanging_volumes_leaves_threads_for_other_pods() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let (volumes, queue) = fixture.volumes();
    let (hung_at, made) = (fixture.dir.path().join("hung"), fixture.dir.path().join("made"));
    let mut many: Vec<Value> =
        (0..20).map(|n| host(&format!("h{n}"), &hung_at.join(n.to_string()), "Directory")).collect();
    many.push(json!({"name": "e", "emptyDir": {}}));
    let dead = pod_of("hangs", &many);
    let memory = json!({"name": "m", "emptyDir": {"medium": "Memory"}});
    let other = pod_of("u2", &[host("v", &made, "DirectoryOrCreate"), memory]);
    std::thread::scope(|scope| {
        let Some(hung) = HangingFilesystem::mount(hung_at) else {
            eprintln!("skipped: no /dev/fuse here");
            return;
        };
        let set_up = scope.spawn(|| volumes.setup(&dead, &STOP()));
        let hanging = || {
            let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
            let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
            names.filter(|name| name.trim() == "vol/hangs").count()
        };
        // Its last volume is ready when all before it were tried.
        wait_until("the set-up to wait", FREE, || volumes.mounted(dead.uid()).len() == 1);
        // A thread has its name some time after its start, and until its end.
        wait_until("three threads to hang", FREE, || hanging() == 3);
        assert_eq!(volumes.setup(&other, &STOP()).unwrap().len(), 2);
        // Its unmount has a thread, too.
        tear_down(&volumes, other.uid());
        assert!(queue.is_empty() && !set_up.is_finished());
        drop(hung);
        // All were tried in the end.
        assert!(set_up.join().unwrap().is_err());
        let events: Vec<String> = queue.try_iter().map(|event| event.message).collect();
        assert_eq!(events.len(), 20, "{events:?}");
        assert!(events.iter().all(|event| event.contains("hostPath type check failed")), "{events:?}");
    });
}

/// Six pods with three volumes each on a dead file server used all threads of the node.
#[test]
fn pods_with_hanging_volumes_do_not_delay_a_pod_of_another_namespace() {
    let Some(fixture) = VolumeFixture::new() else { return };
    let (volumes, queue) = fixture.volumes();
    let (hung_at, made) = (fixture.dir.path().join("hung"), fixture.dir.path().join("made"));
    let dead = |n: usize| {
        let volume = |v: usize| host(&format!("h{v}"), &hung_at.join(format!("{n}-{v}")), "Directory");
        pod_of(&format!("dead{n}"), &[volume(0), volume(1), volume(2)])
    };
    let dead: Vec<Pod> = (0..8).map(dead).collect();
    let other = pod_of("u2", &[host("v", &made, "DirectoryOrCreate")]);
    std::thread::scope(|scope| {
        let Some(hung) = HangingFilesystem::mount(hung_at.clone()) else {
            eprintln!("skipped: no /dev/fuse here");
            return;
        };
        let set_ups: Vec<_> = dead.iter().map(|pod| scope.spawn(|| volumes.setup(pod, &STOP()))).collect();
        let hanging = || {
            let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
            let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
            names.filter(|name| name.starts_with("vol/dead")).count()
        };
        wait_until("all volumes to hang", FREE, || hanging() == 24);
        assert_eq!(volumes.setup(&other, &STOP()).unwrap().len(), 1);
        assert!(queue.is_empty());
        drop(hung);
        for set_up in set_ups {
            assert!(set_up.join().unwrap().is_err());
        }
    });
}
