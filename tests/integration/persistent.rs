//! Volumes of claims with real mounts, in the mount namespace that `tests/run` makes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle::kube::PodDependencies;
use coracle::kube::error::ApiError;
use coracle::kube::objects::{self, Key, Object, ObjectApi, ObjectError, Objects, OnUpdate, Strategy};
use coracle::kube::runtime_classes::{Class, ClassApi, ClassError, RuntimeClasses};
use coracle::kube::tokens::{IssuedToken, TokenApi, Tokens};
use coracle::kube::volume_claims::{ReadError, VolumeClaimApi, VolumeClaims};
use coracle::model::api;
use coracle::model::event::EventSink;
use coracle::model::fields::NodeAllocatable;
use coracle::model::ids::PodUid;
use coracle::model::persistent::{Claim, PersistentVolume};
use coracle::model::pod::Pod;
use coracle::util::stop::StopToken;
use coracle::util::threads;
use coracle::volumes::{Deps, Settings, Volumes};
use serde_json::{Value, json};

use crate::volumes::{remove_orphans, tear_down, unmount_when_free};

#[derive(Clone)]
struct FakeApiServer(Value);

impl ObjectApi for FakeApiServer {
    fn read(&self, key: &Key) -> Result<Object, ObjectError> {
        Err(objects::not_found(key))
    }
    fn watch(&self, _: &Key, _: OnUpdate) -> std::io::Result<threads::Running> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

impl TokenApi for FakeApiServer {
    fn create(&self, _: &str, _: &str, _: &Value, _: &StopToken) -> Result<IssuedToken, ApiError> {
        Err(ApiError::no_server())
    }
}

impl ClassApi for FakeApiServer {
    fn read_class(&self, name: &str) -> Result<Class, ClassError> {
        Err(ClassError::NotFound(name.to_owned()))
    }
}

impl VolumeClaimApi for FakeApiServer {
    fn read_claim(&self, _: &str, name: &str) -> Result<Claim, ReadError> {
        let claim = json!({"metadata": {"name": name, "namespace": "n", "uid": "cu"},
            "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}});
        serde_json::from_value(claim).map_err(|error| ReadError::NotFound { text: error.to_string() })
    }
    fn read_volume(&self, name: &str) -> Result<PersistentVolume, ReadError> {
        let mut volume = json!({"metadata": {"name": name}, "spec": self.0});
        volume["spec"]["claimRef"] = json!({"uid": "cu"});
        serde_json::from_value(volume).map_err(|error| ReadError::NotFound { text: error.to_string() })
    }
    fn read_secret(&self, _: &str, name: &str) -> Result<Object, ReadError> {
        Err(ReadError::NotFound { text: format!("secrets {name:?} not found") })
    }
}

struct Fixture(tempfile::TempDir);

impl Fixture {
    /// `None`: there is no private mount namespace.
    fn new() -> Option<Fixture> {
        let Some(base) = std::env::var_os("E2E_DIR") else {
            eprintln!("skipped: no namespace of its own; run through tests/run integration");
            return None;
        };
        Some(Fixture(tempfile::Builder::new().prefix("claims").tempdir_in(base).unwrap()))
    }

    fn root(&self) -> PathBuf {
        self.0.path().join("root")
    }

    /// A new agent on the same directories.
    fn volumes(&self, spec: &Value) -> Volumes {
        fs::create_dir_all(self.root()).unwrap();
        let (events, _) = EventSink::new();
        let server = FakeApiServer(spec.clone());
        let changed = Box::new(|_: &PodUid| {});
        let api = PodDependencies {
            objects: Objects::new(Strategy::Get, Arc::new(server.clone()), Box::new(|| None), changed),
            tokens: Tokens::new(Box::new(server.clone())),
            registry_tokens: Tokens::new(Box::new(server.clone())),
            services: Default::default(),
            classes: RuntimeClasses::new(Box::new(server.clone())),
            claims: VolumeClaims::new(Box::new(server)),
            trust: Default::default(),
        };
        let settings = Settings {
            root_dir: self.root(),
            allocatable: NodeAllocatable::default(),
            plugin_dir: self.0.path().join("exec"),
            node: "node".to_owned(),
            selinux_mount: true,
            user_fields: false,
        };
        Volumes::new(settings, Deps::new(events, Some(api)))
    }

    fn mounts(&self) -> usize {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let below = self.0.path().to_str().unwrap().to_owned();
        table
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .filter(|mount| mount.starts_with(&below))
            .count()
    }
}

fn pod(uid: &str, read_only: bool) -> Pod {
    let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": uid}, "spec": {
        "securityContext": {"fsGroup": 2000},
        "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c", "readOnly": read_only}}]}});
    Pod::from(serde_json::from_value::<api::Pod>(value).unwrap())
}

const STOP: fn() -> StopToken = StopToken::never;

/// The flags of the mount at a path, in the words of the mount table.
fn flags(path: &Path) -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let fields = |line: &str| {
        let mut fields = line.split(' ').skip(4).map(str::to_owned);
        (fields.next().unwrap_or_default(), fields.next().unwrap_or_default())
    };
    let mut mounts = table.lines().map(fields).filter(|(point, _)| Path::new(point) == path);
    mounts.next_back().map(|(_, flags)| flags.split(',').map(str::to_owned).collect()).unwrap_or_default()
}

#[test]
fn bind_of_a_local_volume_keeps_the_flags_of_its_source_and_has_its_options() {
    let Some(fixture) = Fixture::new() else { return };
    let data = fixture.0.path().join("data");
    fs::create_dir_all(&data).unwrap();
    let hard = rustix::mount::MountFlags::NOEXEC | rustix::mount::MountFlags::NOSUID;
    rustix::mount::mount("tmpfs", &data, "tmpfs", hard, c"").unwrap();
    let spec = json!({"local": {"path": data.to_str().unwrap()}, "mountOptions": ["nodev"]});
    let volumes = fixture.volumes(&spec);
    for (uid, read_only, access) in [("u1", false, "rw"), ("u2", true, "ro")] {
        let ready = volumes.setup(&pod(uid, read_only), &STOP()).unwrap();
        let found = flags(&ready[0].host_path);
        for wanted in [access, "nosuid", "nodev", "noexec"] {
            assert!(found.iter().any(|flag| flag == wanted), "{uid}: {wanted} is not in {found:?}");
        }
        tear_down(&volumes, &PodUid::from(uid));
    }
    unmount_when_free(&data);
}

#[test]
fn data_of_a_local_volume_outlive_pod_and_agent() {
    let Some(fixture) = Fixture::new() else { return };
    let data = fixture.0.path().join("data");
    fs::create_dir_all(data.join("sub")).unwrap();
    fs::write(data.join("sub/file"), "kept").unwrap();
    let spec = json!({"local": {"path": data.to_str().unwrap()}});
    let volumes = fixture.volumes(&spec);
    let ready = volumes.setup(&pod("u1", false), &STOP()).unwrap();
    let target = ready[0].host_path.clone();
    assert!(target.ends_with("pods/u1/volumes/kubernetes.io~local-volume/pv"));
    assert_eq!(fixture.mounts(), 1);
    assert_eq!(fs::metadata(data.join("sub/file")).unwrap().gid(), 2000);
    fs::write(target.join("new"), "x").unwrap();

    // Another pod reads the same volume, and cannot write to it.
    let reader = volumes.setup(&pod("u2", true), &STOP()).unwrap();
    assert!(reader[0].read_only);
    let refused = fs::write(reader[0].host_path.join("other"), "x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    assert_eq!(fixture.mounts(), 2);
    drop(volumes);

    // A new agent finds the mounts, and makes none.
    let volumes = fixture.volumes(&spec);
    assert_eq!(volumes.setup(&pod("u1", false), &STOP()).unwrap(), ready);
    assert_eq!(fixture.mounts(), 2);
    // The pod of the reader is gone from all sources: its mount is removed, its data stay.
    assert_eq!(remove_orphans(&volumes, |uid| uid.as_str() == "u1"), [PodUid::from("u2")]);
    tear_down(&volumes, &PodUid::from("u1"));
    assert_eq!(fixture.mounts(), 0);
    assert_eq!(fs::read_to_string(data.join("sub/file")).unwrap(), "kept");
    assert_eq!(fs::read_to_string(data.join("new")).unwrap(), "x");
    assert!(!Path::new(&target).exists());
    assert!(volumes.unremoved_pods().is_empty());
}
