//! Tests of the kinds together: commands and mounts of a fake node.

use super::super::attachment::{Controller, NodeVolumes};
use super::super::error::ToolError;
use super::super::operations::OperationScope;
use super::super::waker::Waker;
use super::host::fake::FakeHost;
use super::sysfs::tests::{link as device_link, session};
use super::*;
use crate::kube::objects::Objects;
use crate::kube::volume_claims::VolumeClaims;
use crate::model::persistent::Iscsi;
use crate::util::stop::StopToken;
use crossbeam_channel::bounded;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

struct Node {
    root: tempfile::TempDir,
    host: Arc<FakeHost>,
    kinds: Kinds,
}

/// Lets tests keep the fake.
struct Shared(Arc<FakeHost>);

impl Host for Shared {
    fn run(
        &self,
        program: &str,
        args: &[&str],
        time: Duration,
        stop: &StopToken,
    ) -> Result<tools::ProgramOutput, ToolError> {
        self.0.run(program, args, time, stop)
    }
    fn mounts(&self) -> Result<Vec<super::super::mounts::Mount>, VolumeError> {
        self.0.mounts()
    }
    fn bind(&self, source: &Path, target: &Path, options: &[String]) -> Result<(), VolumeError> {
        self.0.bind(source, target, options)
    }
    fn unmount(&self, target: &Path, is_remote: bool) -> Result<(), VolumeError> {
        self.0.unmount(target, is_remote)
    }
    fn device_number(&self, device: &Path) -> std::io::Result<Option<String>> {
        self.0.device_number(device)
    }
    fn label_at(&self, path: &Path) -> Result<String, VolumeError> {
        self.0.label_at(path)
    }
    fn root(&self) -> &Path {
        self.0.root()
    }
    fn pause(&self, time: Duration, stop: &StopToken) -> Result<(), VolumeError> {
        self.0.pause(time, stop)
    }
}

impl Node {
    fn new(claims: Vec<Value>, volumes: Vec<Value>) -> Node {
        Node::with(claims, volumes, |_| {})
    }

    fn with(claims: Vec<Value>, volumes: Vec<Value>, change: impl FnOnce(&mut StorageDeps)) -> Node {
        let root = tempfile::tempdir().unwrap();
        let host = Arc::new(FakeHost::new(root.path()));
        let parse = |value: Value| serde_json::from_value(value).unwrap();
        let claims = VolumeClaims::fixed(
            claims.into_iter().map(parse).collect(),
            volumes.into_iter().map(|value| serde_json::from_value(value).unwrap()).collect(),
        );
        let mut parts = StorageDeps {
            root_dir: root.path().to_owned(),
            plugin_dir: root.path().join("exec"),
            node: "node".to_owned(),
            api: Some(PodDependencies { claims, ..PodDependencies::for_tests(Objects::fixed(Vec::new())) }),
            events: EventSink::new().0,
            operations: Operations::default(),
            csi: None,
            users: Vec::new(),
            attachments: Arc::default(),
            labels: None,
            selinux: SelinuxLabels::default(),
        };
        change(&mut parts);
        let mut kinds = Kinds::new(parts);
        kinds.host = Box::new(Shared(Arc::clone(&host)));
        for uid in ["u1", "u2"] {
            std::fs::create_dir_all(root.path().join("pods").join(uid)).unwrap();
        }
        Node { root, host, kinds }
    }

    fn set_up(&self, uid: &str, volume: Value) -> Result<MountedVolume, String> {
        let pod = pod(uid, volume);
        let volume = pod.spec().volumes.as_ref().unwrap()[0].clone();
        let result = self.kinds.set_up(&pod, &volume, &StopToken::never());
        result.map_err(|error| crate::util::error_chain::chain(&error))
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    /// The commands, without the root directory.
    fn log(&self) -> Vec<String> {
        let root = format!("{}/", self.root.path().display());
        self.host.log().into_iter().map(|line| line.replace(&root, "R/")).collect()
    }

    /// The pod's mounts are gone.
    fn remove_pod(&self, uid: &str) {
        let pod = self.path("pods").join(uid);
        for mount in self.host.mounts().unwrap() {
            if mount.point.starts_with(&pod) {
                self.host.unmount(&mount.point, false).unwrap();
            }
        }
        std::fs::remove_dir_all(pod).unwrap();
        self.kinds.forget(&PodUid::from(uid));
        self.host.log();
    }
}

fn pod(uid: &str, mut volume: Value) -> Pod {
    volume["name"] = json!("v");
    let used = if volume.get("block").is_some() {
        volume.as_object_mut().unwrap().remove("block");
        json!([{"name": "c", "volumeDevices": [{"name": "v", "devicePath": "/dev/x"}]}])
    } else {
        json!([{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}])
    };
    let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": uid},
        "spec": {"containers": used, "volumes": [volume]}});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap())
}

fn bound(spec: Value) -> (Vec<Value>, Vec<Value>) {
    let claim = json!({"metadata": {"name": "c", "namespace": "n", "uid": "cu"},
        "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}});
    let mut volume = json!({"metadata": {"name": "pv"}, "spec": spec});
    volume["spec"]["claimRef"] = json!({"uid": "cu"});
    (vec![claim], vec![volume])
}

fn node(spec: Value) -> Node {
    let (claims, volumes) = bound(spec);
    Node::new(claims, volumes)
}

fn claimed() -> Value {
    json!({"persistentVolumeClaim": {"claimName": "c"}})
}

#[test]
fn unusable_claim_has_upstreams_text() {
    let node = Node::new(Vec::new(), Vec::new());
    assert_eq!(
        node.set_up("u1", claimed()).unwrap_err(),
        "error processing PVC n/c: failed to fetch PVC from API server: persistentvolumeclaims \"c\" not found"
    );
    let (mut claims, _) = bound(json!({}));
    let node = Node::new(claims.clone(), Vec::new());
    assert_eq!(
        node.set_up("u1", claimed()).unwrap_err(),
        "error processing PVC n/c: failed to fetch PV pv from API server: persistentvolumes \"pv\" not found"
    );
    claims[0]["status"]["phase"] = json!("Pending");
    let node = Node::new(claims, Vec::new());
    assert_eq!(node.set_up("u1", claimed()).unwrap_err(), "error processing PVC n/c: PVC is not bound");
    let node = self::node(json!({"volumeMode": "Block", "local": {"path": "/d"}}));
    assert_eq!(
        node.set_up("u1", claimed()).unwrap_err(),
        "volume v has volumeMode Block, but is specified in volumeMounts"
    );
}

#[test]
fn volume_for_one_pod_is_refused_to_a_second_one() {
    let node = node(json!({"hostPath": {"path": "/data"}, "accessModes": ["ReadWriteOncePod"]}));
    let volume = node.set_up("u1", claimed()).unwrap();
    assert_eq!((volume.host_path.as_path(), volume.read_only), (Path::new("/data"), false));
    assert_eq!(node.set_up("u1", claimed()).unwrap(), volume);
    assert_eq!(
        node.set_up("u2", claimed()).unwrap_err(),
        "volume uses the ReadWriteOncePod access mode and is already in use by another pod"
    );
    node.kinds.forget(&PodUid::from("u1"));
    let read_only = json!({"persistentVolumeClaim": {"claimName": "c", "readOnly": true}});
    assert!(node.set_up("u2", read_only).unwrap().read_only);
}

#[test]
fn inline_nfs_volume_is_mounted_in_the_directory_of_the_pod() {
    let node = Node::new(Vec::new(), Vec::new());
    let nfs = json!({"nfs": {"server": "s", "path": "/x"}});
    let volume = node.set_up("u1", nfs.clone()).unwrap();
    let target = node.path("pods/u1/volumes/kubernetes.io~nfs/v");
    assert_eq!(volume.host_path, target);
    assert_eq!(node.log(), ["mount -t nfs s:/x R/pods/u1/volumes/kubernetes.io~nfs/v"]);
    // After a restart the mount is found, and no call goes to its server.
    node.set_up("u1", nfs.clone()).unwrap();
    assert!(node.log().is_empty());
    // The directory of a failed mount does not remain.
    node.host.respond("mount", 32, "no route to host");
    assert!(node.set_up("u2", nfs).unwrap_err().contains("no route to host"));
    assert!(!node.path("pods/u2/volumes/kubernetes.io~nfs/v").exists());
    let any = pod("u1", json!({"emptyDir": {}}));
    let plugin = node.kinds.plugin(&any, &any.spec().volumes.as_ref().unwrap()[0]);
    assert_eq!(plugin, Some("kubernetes.io/nfs"));
}

#[test]
fn local_directory_is_bound_and_its_group_changed_for_the_first_pod() {
    let node = node(json!({"local": {"path": "/data"}}));
    std::fs::create_dir(node.path("data")).unwrap();
    node.set_up("u1", claimed()).unwrap();
    assert_eq!(node.log(), ["bind R/data R/pods/u1/volumes/kubernetes.io~local-volume/pv"]);
    let read_only = json!({"persistentVolumeClaim": {"claimName": "c", "readOnly": true}});
    assert!(node.set_up("u2", read_only).unwrap().read_only);
    assert_eq!(node.log(), ["bind R/data R/pods/u2/volumes/kubernetes.io~local-volume/pv ro"]);
    assert!(!node.kinds.has_devices());
}

const IQN: &str = "iqn.2020-01.x:t";

#[test]
fn iscsi_disk_is_mounted_once_and_detached_after_its_last_pod() {
    let node = node(json!({"iscsi": {"targetPortal": "10.0.0.1", "iqn": IQN, "lun": 1, "fsType": "ext4"}}));
    session(node.root.path(), (3, IQN), "10.0.0.1", "sda");
    let by_path = format!("dev/disk/by-path/ip-10.0.0.1:3260-iscsi-{IQN}-lun-1");
    device_link(node.root.path(), &by_path, "dev/sda");
    node.host.respond("iscsiadm -m iface", 0, "iface.transport_name = tcp\n");
    node.host.respond("blkid", 2, "");
    let volume = node.set_up("u1", claimed()).unwrap();
    assert_eq!(volume.host_path, node.path("pods/u1/volumes/kubernetes.io~iscsi/pv"));
    let global = format!("plugins/kubernetes.io/iscsi/iface-default/10.0.0.1:3260-{IQN}-lun-1");
    assert_eq!(
        node.log(),
        [
            "iscsiadm -m iface -I default -o show".to_owned(),
            format!("blkid -p -s TYPE -s PTTYPE -o export /{by_path}"),
            format!("dd if=/{by_path} of=/dev/null bs=1048576 count=1"),
            format!("mkfs.ext4 -F -m0 /{by_path}"),
            format!("mount -t ext4 -o defaults,rw /{by_path} R/{global}"),
            format!("bind R/{global} R/pods/u1/volumes/kubernetes.io~iscsi/pv"),
        ]
    );
    let state = std::fs::read_to_string(node.path(&global).join("iscsi.json")).unwrap();
    assert!(state.contains("\"Portals\":[\"10.0.0.1:3260\"]"), "{state}");
    node.set_up("u2", claimed()).unwrap();
    assert_eq!(node.log(), [format!("bind R/{global} R/pods/u2/volumes/kubernetes.io~iscsi/pv")]);
    // It is used until the last pod is gone.
    node.remove_pod("u1");
    node.kinds.sweep(&StopToken::never()).unwrap();
    assert!(node.log().is_empty());
    node.remove_pod("u2");
    node.kinds.sweep(&StopToken::never()).unwrap();
    let portal = format!("-p 10.0.0.1:3260 -T {IQN}");
    assert_eq!(
        node.log(),
        [
            format!("umount R/{global}"),
            format!("iscsiadm -m node {portal} --logout -I default"),
            format!("iscsiadm -m node {portal} -o delete -I default"),
        ]
    );
    assert!(!node.kinds.has_devices() && !node.path(&global).exists());
}

#[test]
fn iscsi_disk_is_mounted_with_the_label_of_its_pods() {
    let (claims, volumes) = bound(json!({"accessModes": ["ReadWriteMany"],
        "iscsi": {"targetPortal": "10.0.0.1", "iqn": IQN, "lun": 1, "fsType": "ext4"}}));
    let node = Node::with(claims, volumes, |parts| parts.selinux = SelinuxLabels::for_tests(true));
    session(node.root.path(), (3, IQN), "10.0.0.1", "sda");
    let by_path = format!("dev/disk/by-path/ip-10.0.0.1:3260-iscsi-{IQN}-lun-1");
    device_link(node.root.path(), &by_path, "dev/sda");
    let set_up = |uid: &str, level: &str| {
        let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": uid}, "spec": {
            "securityContext": {"seLinuxOptions": {"level": level}},
            "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap());
        let volume = pod.spec().volumes.as_ref().unwrap()[0].clone();
        let result = node.kinds.set_up(&pod, &volume, &StopToken::never());
        result.map_err(|error| crate::util::error_chain::chain(&error))
    };
    let respond = || {
        node.host.respond("iscsiadm -m iface", 0, "iface.transport_name = tcp\n");
        node.host.respond("blkid", 0, "TYPE=ext4\n");
    };
    respond();
    assert!(!set_up("u1", "s0:c1,c2").unwrap().selinux_relabel);
    let label = |level: &str| format!("system_u:object_r:container_file_t:{level}");
    let mount = |log: Vec<String>| log.into_iter().find(|line| line.starts_with("mount ")).unwrap();
    let options = format!("-o context=\"{}\",defaults,rw ", label("s0:c1,c2"));
    assert!(mount(node.log()).contains(&options));
    let error = set_up("u2", "s0:c3").unwrap_err();
    let (first, second) = (label("s0:c1,c2"), label("s0:c3"));
    assert_eq!(error, format!("conflicting SELinux labels of volume pv: {first:?} and {second:?}"));
    // After a restart the first pod is not known yet, but its mount is.
    node.kinds.selinux.forget(&PodUid::from("u1"));
    let waits = format!(
        "waiting for unmount of volume \"kubernetes.io/iscsi/10.0.0.1:{IQN}:1\", because it is already mounted \
         to a different pod with a different SELinux label"
    );
    assert_eq!(set_up("u2", "s0:c3").unwrap_err(), waits);
    assert!(!set_up("u1", "s0:c1,c2").unwrap().selinux_relabel);
    // The sweep leaves the disk alone while a set-up works on it.
    node.remove_pod("u1");
    node.log();
    respond();
    set_up("u2", "s0:c3").unwrap();
    let log = node.log();
    assert_eq!(log.iter().filter(|line| line.starts_with("umount ")).count(), 1, "{log:?}");
    assert!(mount(log).contains(&second));
}

/// The second pod waited, as if the labels were different.
#[test]
fn label_of_a_disk_is_compared_as_the_kernel_writes_it() {
    let (claims, volumes) = bound(json!({"accessModes": ["ReadWriteMany"],
        "iscsi": {"targetPortal": "10.0.0.1", "iqn": IQN, "lun": 1, "fsType": "ext4"}}));
    let node = Node::with(claims, volumes, |parts| parts.selinux = SelinuxLabels::for_tests(true));
    let global = node.path(&format!("plugins/kubernetes.io/iscsi/iface-default/10.0.0.1:3260-{IQN}-lun-1"));
    let label = "system_u:object_r:container_file_t:s0:c1,c5";
    node.host.mounted("/dev/sda", &global, "ext4");
    node.host.set_label(&global, label);
    let target = node.path("pods/u1/volumes/kubernetes.io~iscsi/pv");
    node.host.mounted("/dev/sda", &target, "ext4");
    node.host.set_label(&target, label);
    for uid in ["u1", "u2"] {
        let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": uid}, "spec": {
            "securityContext": {"seLinuxOptions": {"level": "s0:c5,c1"}},
            "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}});
        let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap());
        let volume = pod.spec().volumes.as_ref().unwrap()[0].clone();
        let mounted = node.kinds.set_up(&pod, &volume, &StopToken::never()).unwrap();
        assert!(!mounted.selinux_relabel);
    }
    assert!(!node.log().iter().any(|line| line.starts_with("mount ") || line.starts_with("umount ")));
}

#[test]
fn flex_volume_grows_by_its_driver_or_by_the_agent() {
    let sizes = "2147483648 1073741824";
    for (capability, response, expected) in [
        ("true", "Success", vec![format!("expandfs {sizes}")]),
        ("true", "Not supported", vec![format!("expandfs {sizes}"), "resize2fs".to_owned()]),
        ("false", "Success", vec![]),
    ] {
        let (mut claims, volumes) = bound(json!({"capacity": {"storage": "2Gi"},
            "flexVolume": {"driver": "a/b", "fsType": "ext4"}}));
        claims[0]["status"]["capacity"] = json!({"storage": "1Gi"});
        let mut node = Node::new(claims, volumes);
        let (events, queue) = EventSink::new();
        node.kinds.events = events;
        std::fs::create_dir_all(node.path("exec/a~b")).unwrap();
        std::fs::write(node.path("exec/a~b/b"), "").unwrap();
        let program = node.path("exec/a~b/b").display().to_string();
        let init = json!({"status": "Success",
            "capabilities": {"attach": false, "requiresFSResize": capability == "true"}});
        node.host.respond(&format!("{program} init"), 0, &init.to_string());
        node.host.respond(&format!("{program} mount"), 0, r#"{"status": "Success"}"#);
        let target = node.path("pods/u1/volumes/a~b/pv");
        node.host.mounted("/dev/x", &target, "ext4");
        let respond = || {
            let text = json!({"status": response}).to_string();
            node.host.respond(&format!("{program} expandfs"), 0, &text);
            node.host.respond("blkid", 0, "TYPE=ext4\n");
            node.host.respond("blockdev", 0, "2147483648\n");
            node.host.respond("dumpe2fs", 0, "Block count: 262144\nBlock size: 4096\n");
        };
        let grown = |log: Vec<String>| {
            let of_line = |line: &String| {
                let expands =
                    line.contains(" expandfs {") && line.contains(" /dev/x R/pods/u1/volumes/a~b/pv ");
                let resizes = line.starts_with("resize2fs /dev/x");
                let sizes = || line.rsplitn(3, ' ').take(2).collect::<Vec<_>>();
                match (expands, resizes) {
                    (true, _) => Some(format!("expandfs {} {}", sizes()[1], sizes()[0])),
                    (_, true) => Some("resize2fs".to_owned()),
                    _ => None,
                }
            };
            log.iter().filter_map(of_line).collect::<Vec<_>>()
        };
        respond();
        let mounted = node.set_up("u1", claimed()).unwrap();
        assert_eq!(grown(node.log()), expected);
        let count = usize::from(capability == "true");
        assert_eq!(
            queue.try_iter().filter(|event| event.reason == "FileSystemResizeSuccessful").count(),
            count
        );
        // While a pod uses it.
        let pod = pod("u1", claimed());
        assert!(node.kinds.is_refreshed(pod.uid(), "v"));
        let volume = pod.spec().volumes.as_ref().unwrap()[0].clone();
        respond();
        node.kinds.refresh(&pod, &volume, mounted, &StopToken::never()).unwrap();
        assert_eq!(grown(node.log()).len(), count);
    }
}

#[test]
fn failed_growth_of_a_flex_volume_is_a_failed_resize() {
    let (mut claims, volumes) = bound(json!({"capacity": {"storage": "2Gi"},
        "flexVolume": {"driver": "a/b", "fsType": "ext4"}}));
    claims[0]["status"]["capacity"] = json!({"storage": "1Gi"});
    let node = Node::new(claims, volumes);
    std::fs::create_dir_all(node.path("exec/a~b")).unwrap();
    std::fs::write(node.path("exec/a~b/b"), "").unwrap();
    let program = node.path("exec/a~b/b").display().to_string();
    let init = r#"{"status": "Success", "capabilities": {"attach": false}}"#;
    node.host.respond(&format!("{program} init"), 0, init);
    node.host.respond(&format!("{program} mount"), 0, r#"{"status": "Success"}"#);
    node.host.respond(&format!("{program} expandfs"), 1, r#"{"status": "Failure", "message": "no room"}"#);
    let error = node.set_up("u1", claimed()).unwrap_err();
    assert_eq!(error, "expandfs command failed, status: Failure, reason: no room");
}

/// The API server does not check the type, and a user who may create pods chooses it.
#[test]
fn type_that_is_not_one_of_a_device_is_never_mounted() {
    let kinds = ["proc", "sysfs", "../x", "fuse.sh", "-h", "cgroup2", "nfs", "overlay", "tmpfs", "noext4"];
    for kind in kinds {
        let node = Node::new(Vec::new(), Vec::new());
        session(node.root.path(), (3, IQN), "10.0.0.1", "sda");
        device_link(
            node.root.path(),
            &format!("dev/disk/by-path/ip-10.0.0.1:3260-iscsi-{IQN}-lun-1"),
            "dev/sda",
        );
        device_link(node.root.path(), "dev/disk/by-path/fc-0x500a-lun-0", "dev/sdb");
        std::fs::create_dir_all(node.path("exec/a~b")).unwrap();
        std::fs::write(node.path("exec/a~b/b"), "").unwrap();
        for volume in [
            json!({"iscsi": {"targetPortal": "10.0.0.1", "iqn": IQN, "lun": 1, "fsType": kind}}),
            json!({"fc": {"targetWWNs": ["500a"], "lun": 0, "fsType": kind}}),
            json!({"flexVolume": {"driver": "a/b", "fsType": kind}}),
        ] {
            node.host.respond("blkid", 0, "TYPE=ext4\n");
            let program = node.path("exec/a~b/b").display().to_string();
            for (call, response) in [
                ("init", r#"{"status": "Success"}"#),
                ("attach", r#"{"status": "Success", "device": "/dev/sdc"}"#),
                ("waitforattach", r#"{"status": "Success", "device": "/dev/sdc"}"#),
                ("mountdevice", r#"{"status": "Not supported"}"#),
            ] {
                node.host.respond(&format!("{program} {call}"), 0, response);
            }
            let error = node.set_up("u1", volume.clone()).unwrap_err();
            assert!(error.contains("fsType"), "{volume}: {error}");
            let log = node.log();
            assert!(
                !log.iter().any(|line| line.starts_with("mount ") || line.starts_with("bind ")),
                "{log:?}"
            );
        }
    }
}

#[test]
fn disk_that_a_pod_names_is_mounted_without_set_uid_programs_and_devices() {
    let node = Node::new(Vec::new(), Vec::new());
    device_link(node.root.path(), "dev/disk/by-path/fc-0x500a-lun-0", "dev/sdb");
    let volume = json!({"fc": {"targetWWNs": ["500a"], "lun": 0, "fsType": "ext4"}});
    node.host.respond("blkid", 0, "TYPE=ext4\n");
    node.set_up("u1", volume).unwrap();
    let log = node.log();
    assert!(log.iter().any(|line| line.starts_with("mount -t ext4 -o defaults,nodev,nosuid,rw ")), "{log:?}");
    assert!(log.last().unwrap().ends_with("kubernetes.io~fc/v nodev,nosuid"), "{log:?}");
}

#[test]
fn mount_options_of_a_local_directory_apply_to_its_bind() {
    let spec = json!({"local": {"path": "/data"}, "mountOptions": ["nosuid", "nodev", "noexec"]});
    let node = node(spec);
    std::fs::create_dir(node.path("data")).unwrap();
    node.set_up("u1", claimed()).unwrap();
    let bind = "bind R/data R/pods/u1/volumes/kubernetes.io~local-volume/pv";
    assert_eq!(node.log(), [format!("{bind} nodev,noexec,nosuid")]);
}

#[test]
fn target_stays_logged_in_for_its_other_disks() {
    let node = Node::new(Vec::new(), Vec::new());
    for lun in [1, 2] {
        let source = Iscsi { target_portal: "p".into(), iqn: IQN.into(), lun, ..Iscsi::default() };
        let disk = iscsi::IscsiDisk::from_source("pv", &source);
        let dir = devices::plugins(node.root.path()).join("iscsi").join(disk.dir());
        make_dirs(&dir).unwrap();
        iscsi::write_state(&dir, &disk).unwrap();
    }
    node.kinds.sweep(&StopToken::never()).unwrap();
    let logouts = node.log().iter().filter(|line| line.contains("--logout")).count();
    assert_eq!(logouts, 1, "the second one was the last");
}

/// The target was logged out, with the disks of running pods.
#[test]
fn target_stays_logged_in_while_its_other_disks_are_not_known() {
    let node = Node::new(Vec::new(), Vec::new());
    let source = Iscsi { target_portal: "p".into(), iqn: IQN.into(), lun: 1, ..Iscsi::default() };
    let disk = iscsi::IscsiDisk::from_source("pv", &source);
    let top = devices::plugins(node.root.path()).join("iscsi");
    let dir = top.join(disk.dir());
    make_dirs(&dir).unwrap();
    iscsi::write_state(&dir, &disk).unwrap();
    // Each call on a link to itself fails.
    let blocks = top.join("volumeDevices");
    std::os::unix::fs::symlink(&blocks, &blocks).unwrap();
    let logouts = || node.log().iter().filter(|line| line.contains("--logout")).count();
    let error = node.kinds.sweep(&StopToken::never()).unwrap_err().to_string();
    assert!(error.contains("cannot list") && error.contains("iscsi/volumeDevices"), "{error}");
    assert!(logouts() == 0 && dir.exists() && node.kinds.has_devices());
    std::fs::remove_file(&blocks).unwrap();
    node.kinds.sweep(&StopToken::never()).unwrap();
    assert!(logouts() == 1 && !dir.exists() && !node.kinds.has_devices());
}

/// The error of any directory stopped the release of all targets.
#[test]
fn target_is_logged_out_while_directories_of_others_cannot_be_read() {
    let node = Node::new(Vec::new(), Vec::new());
    let source = Iscsi { target_portal: "p".into(), iqn: IQN.into(), lun: 1, ..Iscsi::default() };
    let disk = iscsi::IscsiDisk::from_source("pv", &source);
    let plugins = devices::plugins(node.root.path());
    for path in ["local-volume/mounts", "fc", "flexvolume/vendor", "iscsi/iface-other"] {
        let path = plugins.join(path);
        make_dirs(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
    }
    let dir = plugins.join("iscsi").join(disk.dir());
    make_dirs(&dir).unwrap();
    iscsi::write_state(&dir, &disk).unwrap();
    let error = node.kinds.sweep(&StopToken::never()).unwrap_err().to_string();
    assert!(error.contains("cannot list"), "{error}");
    assert!(!dir.exists() && node.log().iter().any(|line| line.contains("--logout")));
}

#[test]
fn target_stays_logged_in_while_a_directory_of_its_interface_has_another_form() {
    let node = Node::new(Vec::new(), Vec::new());
    let source = Iscsi { target_portal: "p".into(), iqn: IQN.into(), lun: 1, ..Iscsi::default() };
    let disk = iscsi::IscsiDisk::from_source("pv", &source);
    let dir = devices::plugins(node.root.path()).join("iscsi").join(disk.dir());
    let other = dir.with_file_name("z-lun-2");
    for dir in [&dir, &other] {
        make_dirs(dir).unwrap();
    }
    std::fs::write(other.join("precious"), "x").unwrap();
    iscsi::write_state(&dir, &disk).unwrap();
    node.kinds.sweep(&StopToken::never()).unwrap_err();
    assert!(!dir.exists() && other.exists() && !node.log().iter().any(|line| line.contains("--logout")));
}

/// The list of volumes in use was published without the disks of running pods.
#[test]
fn disks_of_an_earlier_agent_stay_in_use_while_their_directories_cannot_be_read() {
    let names = ["iscsi/p:3260:iqn.2026-01.x:1", "iscsi/p:3260:iqn.2026-01.x:2", "fc/[500a]:1", "csi/d^v"];
    let [mounted, released, fc, csi] = names.map(|name| format!("kubernetes.io/{name}"));
    let in_use = BTreeSet::from([mounted.clone(), released.clone(), fc, csi]);
    let object = NodeVolumes { in_use, attached: BTreeSet::new() };
    let shown = Box::new(move || Some(object.clone()));
    let controller = Controller { shown, changed: Box::new(|| {}) };
    let attachments = Arc::new(Attachments::new(Some(controller), Waker::default()));
    let shared = Arc::clone(&attachments);
    let node = Node::with(Vec::new(), Vec::new(), |parts| {
        let plugins = devices::plugins(&parts.root_dir);
        make_dirs(&plugins.join("local-volume")).unwrap();
        for path in ["iscsi", "local-volume/mounts"] {
            std::os::unix::fs::symlink(plugins.join(path), plugins.join(path)).unwrap();
        }
        parts.attachments = shared;
    });
    let listed = || attachments.list().1;
    assert_eq!(listed(), [mounted.clone(), released.clone()]);
    // A pod of this process uses one of them: its directory is known now.
    let volume = json!({"iscsi": {"targetPortal": "p:3260", "iqn": "iqn.2026-01.x", "lun": 2}});
    node.set_up("u1", volume).unwrap_err();
    assert_eq!(listed(), [mounted.clone(), released.clone()]);
    let iscsi = devices::plugins(node.root.path()).join("iscsi");
    std::fs::remove_file(&iscsi).unwrap();
    let dir = iscsi.join("iface-default/p:3260-iqn.2026-01.x-lun-1");
    make_dirs(&dir).unwrap();
    std::fs::write(dir.join("precious"), "x").unwrap();
    node.kinds.forget(&PodUid::from("u1"));
    assert_eq!(listed(), std::slice::from_ref(&mounted));
    std::fs::remove_dir_all(&dir).unwrap();
    node.kinds.sweep(&StopToken::never()).unwrap_err();
    assert!(listed().is_empty());
}

/// An interface could not be read at the start, and then the directory of all.
#[test]
fn disk_of_an_earlier_agent_stays_in_use_until_its_directory_was_read() {
    let name = "kubernetes.io/iscsi/p:3260:iqn.2026-01.x:1";
    let object = NodeVolumes { in_use: BTreeSet::from([name.to_owned()]), attached: BTreeSet::new() };
    let shown = Box::new(move || Some(object.clone()));
    let controller = Controller { shown, changed: Box::new(|| {}) };
    let attachments = Arc::new(Attachments::new(Some(controller), Waker::default()));
    let shared = Arc::clone(&attachments);
    let hide = |dir: &Path| std::os::unix::fs::symlink(dir, dir).unwrap();
    let node = Node::with(Vec::new(), Vec::new(), |parts| {
        let iscsi = devices::plugins(&parts.root_dir).join("iscsi");
        make_dirs(&iscsi).unwrap();
        hide(&iscsi.join("iface-a"));
        parts.attachments = shared;
    });
    let iscsi = devices::plugins(node.root.path()).join("iscsi");
    std::fs::remove_dir_all(&iscsi).unwrap();
    hide(&iscsi);
    node.kinds.sweep(&StopToken::never()).unwrap_err();
    assert_eq!(attachments.list().1, [name]);
    // It is gone when it can be read: one sweep is left to say so.
    std::fs::remove_file(&iscsi).unwrap();
    assert!(node.kinds.has_devices());
    node.kinds.sweep(&StopToken::never()).unwrap();
    assert!(attachments.list().1.is_empty() && !node.kinds.has_devices());
}

#[test]
fn data_in_the_directory_of_a_device_are_never_removed() {
    let node = Node::new(Vec::new(), Vec::new());
    let dir = devices::plugins(node.root.path()).join("local-volume/mounts/pv");
    make_dirs(&dir).unwrap();
    std::fs::write(dir.join("precious"), "x").unwrap();
    assert!(node.kinds.sweep(&StopToken::never()).is_err());
    assert!(dir.join("precious").exists());
}

#[test]
fn block_volume_is_linked_and_released() {
    let node = node(json!({"fc": {"targetWWNs": ["500a"], "lun": 0}, "volumeMode": "Block"}));
    device_link(node.root.path(), "dev/disk/by-path/fc-0x500a-lun-0", "dev/disk-of-the-test");
    // The fake device is not in /dev of this machine.
    let mut volume = claimed();
    volume["block"] = json!(true);
    let error = node.set_up("u1", volume).unwrap_err();
    assert!(error.starts_with("cannot find device /dev/disk-of-the-test"), "{error}");
    // Half of the work was done: the sweep removes it.
    assert!(node.kinds.has_devices());
    node.kinds.sweep(&StopToken::never()).unwrap();
    assert!(!node.kinds.has_devices());
}

#[test]
fn flex_volume_is_mounted_and_unmounted_by_its_driver() {
    let node = Node::new(Vec::new(), Vec::new());
    std::fs::create_dir_all(node.path("exec/a~b")).unwrap();
    std::fs::write(node.path("exec/a~b/b"), "").unwrap();
    let program = node.path("exec/a~b/b").display().to_string();
    node.host.respond(
        &format!("{program} init"),
        0,
        r#"{"status": "Success", "capabilities": {"attach": false}}"#,
    );
    node.host.respond(&format!("{program} mount"), 0, r#"{"status": "Success"}"#);
    let volume = node.set_up("u1", json!({"flexVolume": {"driver": "a/b"}})).unwrap();
    let target = node.path("pods/u1/volumes/a~b/v");
    assert_eq!(volume.host_path, target);
    let log = node.log();
    assert!(
        log[1].starts_with("R/exec/a~b/b mount R/pods/u1/volumes/a~b/v {\"kubernetes.io/fsType\":\"\""),
        "{log:?}"
    );
    node.host.mounted("x", &target, "tmpfs");
    node.host.respond(&format!("{program} unmount"), 0, r#"{"status": "Success"}"#);
    let driver = Kinds::flex_driver(&node.path("pods/u1/volumes"), &target).unwrap();
    node.kinds.unmount_flex(&driver, &target, &StopToken::never());
    let other = node.path("pods/u1/volumes/kubernetes.io~nfs/v");
    assert_eq!(Kinds::flex_driver(&node.path("pods/u1/volumes"), &other), None);
    assert_eq!(node.log(), ["R/exec/a~b/b unmount R/pods/u1/volumes/a~b/v"]);
}

/// The mount alone was taken as a sign that the volume was complete.
#[test]
fn flex_volume_whose_walk_was_interrupted_gets_its_group_at_the_next_set_up() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let node = Node::new(Vec::new(), Vec::new());
    std::fs::create_dir_all(node.path("exec/a~b")).unwrap();
    std::fs::write(node.path("exec/a~b/b"), "").unwrap();
    let program = node.path("exec/a~b/b").display().to_string();
    let able = r#"{"status": "Success", "capabilities": {"attach": false, "fsGroup": true}}"#;
    node.host.respond(&format!("{program} init"), 0, able);
    let target = node.path("pods/u1/volumes/a~b/v");
    std::fs::create_dir_all(&target).unwrap();
    std::fs::set_permissions(&target, PermissionsExt::from_mode(0o700)).unwrap();
    node.host.mounted("x", &target, "tmpfs");
    let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u1"}, "spec": {
        "securityContext": {"fsGroup": rustix::process::getegid().as_raw()},
        "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [{"name": "v", "flexVolume": {"driver": "a/b"}}]}});
    let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap());
    let volume = pod.spec().volumes.as_ref().unwrap()[0].clone();
    node.kinds.set_up(&pod, &volume, &StopToken::never()).unwrap();
    assert_eq!(std::fs::metadata(&target).unwrap().mode() & 0o7777, 0o2770);
}

/// A directory whose root has the group already, with a file that has not, and with too many nested
/// directories: a walk through it breaks off.
fn endless(target: &Path) -> PathBuf {
    std::fs::create_dir_all(target).unwrap();
    set_mode(target, 0o2770);
    let file = target.join("f");
    std::fs::write(&file, "").unwrap();
    set_mode(&file, 0o600);
    let mut dir = tree::open(target).unwrap();
    for _ in 0..2100 {
        dir = tree::make_at(dir.as_fd(), c"deep", 0o700).unwrap().0;
    }
    file
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}

/// A pod with a group, and its volume.
fn with_group(volume: Value) -> (Pod, Volume) {
    let mut volume = volume;
    volume.as_object_mut().unwrap().insert("name".to_owned(), json!("v"));
    let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u1"}, "spec": {
        "securityContext": {"fsGroup": rustix::process::getegid().as_raw()},
        "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [volume]}});
    let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap());
    let volume = pod.spec().volumes.as_ref().unwrap()[0].clone();
    (pod, volume)
}

/// The mount and the root alone were taken as a sign that all files had the group.
#[test]
fn walk_that_broke_off_is_repeated_by_the_next_set_up() {
    let mode = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).unwrap().mode() & 0o7777
    };
    let local = node(json!({"local": {"path": "/data"}}));
    std::fs::create_dir(local.path("data")).unwrap();
    let flex = Node::new(Vec::new(), Vec::new());
    std::fs::create_dir_all(flex.path("exec/a~b")).unwrap();
    std::fs::write(flex.path("exec/a~b/b"), "").unwrap();
    let program = flex.path("exec/a~b/b").display().to_string();
    let able = r#"{"status": "Success", "capabilities": {"attach": false, "fsGroup": true}}"#;
    flex.host.respond(&format!("{program} init"), 0, able);
    flex.host.respond(&format!("{program} mount"), 0, r#"{"status": "Success"}"#);
    let plugin = "kubernetes.io~local-volume/pv";
    for (node, plugin, volume) in
        [(local, plugin, claimed()), (flex, "a~b/v", json!({"flexVolume": {"driver": "a/b"}}))]
    {
        let (pod, volume) = with_group(volume);
        let set_up = || node.kinds.set_up(&pod, &volume, &StopToken::never());
        let target = node.path("pods/u1/volumes").join(plugin);
        let file = endless(&target);
        set_up().unwrap_err();
        if plugin.starts_with("a~b") {
            // The driver of the test has mounted nothing.
            node.host.mounted("x", &target, "tmpfs");
        }
        set_mode(&file, 0o600);
        let top = tree::open(&target).unwrap();
        tree::remove_at(top.as_fd(), c"deep", &StopToken::never()).unwrap();
        // Another pod has the directory meanwhile.
        node.host.mounted(
            &node.path("data").display().to_string(),
            &node.path("pods/u2/volumes").join(plugin),
            "none",
        );
        set_up().unwrap();
        assert_eq!(mode(&file), 0o660, "{plugin}");
        set_mode(&file, 0o600);
        set_up().unwrap();
        assert_eq!(mode(&file), 0o600, "{plugin}: a complete volume is not walked again");
    }
}

#[test]
fn names_of_targets_cannot_leave_their_directory() {
    for path in ["../x", "/x", "a/b/c", "", "a/../b"] {
        assert!(relative(PathBuf::from(path)).is_err(), "{path}");
    }
    assert!(relative(PathBuf::from("iface-default/1.1.1.1:3260-iqn.x-lun-0")).is_ok());
    let node = Node::new(Vec::new(), Vec::new());
    let evil = json!({"iscsi": {"targetPortal": "a/../../b", "iqn": "iqn.x", "lun": 0}});
    assert!(node.set_up("u1", evil).unwrap_err().contains("cannot be the name of a directory"));
}

#[test]
fn volume_of_a_controller_waits_until_the_node_shows_it_in_use_and_attached() {
    let shown: Arc<Mutex<Option<NodeVolumes>>> = Arc::default();
    let (read, (woken, wakes)) = (Arc::clone(&shown), crossbeam_channel::bounded(64));
    let controller =
        Controller { shown: Box::new(move || read.lock().unwrap().clone()), changed: Box::new(|| {}) };
    let waker = Waker(Arc::new(move |pod| woken.send(pod.clone()).unwrap()));
    let attachments = &Arc::new(Attachments::new(Some(controller), waker));
    let node = Node::with(vec![], vec![], |parts| parts.attachments = Arc::clone(attachments));
    let source = json!({"name": "v", "fc": {"wwids": ["w x"], "fsType": "ext4"}});
    let name = "kubernetes.io/fc/[w x]";
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let waits = || {
        let error = node.set_up("u1", source.clone()).unwrap_err();
        assert_eq!(error, format!("volume {name} is not yet attached according to node status"));
        assert_eq!(attachments.in_use(), [name]);
    };
    waits();
    *shown.lock().unwrap() =
        Some(NodeVolumes { in_use: names(&[name]), attached: names(&["kubernetes.io/fc/[y]"]) });
    waits();
    let (number, listed) = attachments.list();
    assert_eq!(listed, [name]);
    *shown.lock().unwrap() = Some(NodeVolumes { in_use: names(&[name]), attached: names(&[name]) });
    waits();
    attachments.stored(number, &names(&[name]));
    assert_eq!(wakes.try_recv(), Ok(PodUid::from("u1")));
    let error = node.set_up("u1", source).unwrap_err();
    assert!(!error.contains("according to node status"), "the search for the disk has begun: {error}");
    // The pod has ended, but its device is not released yet.
    node.kinds.forget(&PodUid::from("u1"));
    assert_eq!(attachments.in_use(), [name]);
    node.kinds.sweep(&StopToken::never()).unwrap();
    assert!(attachments.in_use().is_empty());
}

#[test]
fn volume_of_another_node_is_refused_until_the_node_has_its_label() {
    let term = json!({"matchExpressions": [{"key": "disk", "operator": "In", "values": ["a"]}]});
    let affinity = json!({"required": {"nodeSelectorTerms": [term]}});
    let (claims, volumes) = bound(json!({"local": {"path": "/data"}, "nodeAffinity": affinity}));
    let labels: Arc<Mutex<Option<std::collections::BTreeMap<String, String>>>> = Arc::default();
    let shown = Arc::clone(&labels);
    let node = Node::with(claims, volumes, |parts| {
        parts.labels = Some(Box::new(move || shown.lock().unwrap().clone()));
    });
    std::fs::create_dir(node.path("data")).unwrap();
    *labels.lock().unwrap() = Some([("disk".to_owned(), "b".to_owned())].into());
    assert_eq!(node.set_up("u1", claimed()).unwrap_err(), "no matching NodeSelectorTerms");
    assert!(node.log().is_empty());
    *labels.lock().unwrap() = Some([("disk".to_owned(), "a".to_owned())].into());
    node.set_up("u1", claimed()).unwrap();
    // The pod keeps what it has; another one does not get it.
    *labels.lock().unwrap() = Some(std::collections::BTreeMap::new());
    node.set_up("u1", claimed()).unwrap();
    node.set_up("u2", claimed()).unwrap_err();
    // The node's object is not known yet.
    *labels.lock().unwrap() = None;
    node.set_up("u2", claimed()).unwrap();
}

/// The pod, which had the volume, was refused with a reason that was not true.
#[test]
fn volume_of_another_node_is_not_refused_while_the_directory_of_its_pod_cannot_be_read() {
    let term = json!({"matchExpressions": [{"key": "disk", "operator": "In", "values": ["a"]}]});
    let affinity = json!({"required": {"nodeSelectorTerms": [term]}});
    let (claims, volumes) = bound(json!({"local": {"path": "/data"}, "nodeAffinity": affinity}));
    let node = Node::with(claims, volumes, |parts| parts.labels = Some(Box::new(|| Some(BTreeMap::new()))));
    let dir = node.path("pods/u1/volumes/kubernetes.io~local-volume");
    std::fs::create_dir(dir.parent().unwrap()).unwrap();
    // Each call on a link to itself fails.
    std::os::unix::fs::symlink(&dir, &dir).unwrap();
    let error = node.set_up("u1", claimed()).unwrap_err();
    assert!(error.starts_with("cannot list") && error.contains("kubernetes.io~local-volume"), "{error}");
    std::fs::remove_file(&dir).unwrap();
    assert_eq!(node.set_up("u1", claimed()).unwrap_err(), "no matching NodeSelectorTerms");
}

#[test]
fn volume_of_another_node_is_refused_also_if_an_inline_volume_of_the_pod_has_its_name() {
    let term = json!({"matchExpressions": [{"key": "disk", "operator": "In", "values": ["a"]}]});
    let affinity = json!({"required": {"nodeSelectorTerms": [term]}});
    let (claims, volumes) = bound(json!({"flexVolume": {"driver": "a/b"}, "nodeAffinity": affinity}));
    let node = Node::with(claims, volumes, |parts| parts.labels = Some(Box::new(|| Some(BTreeMap::new()))));
    std::fs::create_dir_all(node.path("pods/u1/volumes/a~b/pv")).unwrap();
    let value = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u1"}, "spec": {
        "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "pv", "flexVolume": {"driver": "a/b"}}]}});
    let pod = Pod::from(serde_json::from_value::<crate::model::api::Pod>(value).unwrap());
    let volume = pod.spec().volumes.as_ref().unwrap()[0].clone();
    let error = node.kinds.set_up(&pod, &volume, &StopToken::never()).unwrap_err();
    assert_eq!(crate::util::error_chain::chain(&error), "no matching NodeSelectorTerms");
}

#[test]
fn first_source_of_a_volume_with_two_counts_in_all_steps() {
    let node = node(json!({"local": {"path": "/data"}}));
    let mut both = claimed();
    both["hostPath"] = json!({"path": node.root.path().display().to_string(), "type": "Directory"});
    assert_eq!(node.set_up("u1", both).unwrap().host_path, node.root.path());
}

/// Its directory, which has the name of the driver, was not found: the pod could not start again.
#[test]
fn flex_volume_stays_with_its_pod_when_a_label_of_the_node_changes() {
    let term = json!({"matchExpressions": [{"key": "disk", "operator": "In", "values": ["a"]}]});
    let affinity = json!({"required": {"nodeSelectorTerms": [term]}});
    let (claims, volumes) = bound(json!({"flexVolume": {"driver": "a/b"}, "nodeAffinity": affinity}));
    let node = Node::with(claims, volumes, |parts| parts.labels = Some(Box::new(|| Some(BTreeMap::new()))));
    std::fs::create_dir_all(node.path("exec/a~b")).unwrap();
    std::fs::write(node.path("exec/a~b/b"), "").unwrap();
    let program = node.path("exec/a~b/b").display().to_string();
    let able = r#"{"status": "Success", "capabilities": {"attach": false}}"#;
    node.host.respond(&format!("{program} init"), 0, able);
    let target = node.path("pods/u1/volumes/a~b/pv");
    std::fs::create_dir_all(&target).unwrap();
    node.host.mounted("x", &target, "tmpfs");
    assert_eq!(node.set_up("u1", claimed()).unwrap().host_path, target);
    assert_eq!(node.set_up("u2", claimed()).unwrap_err(), "no matching NodeSelectorTerms");
}

#[test]
fn growth_of_a_local_volume_is_reported_while_it_is_used() {
    let mut node = node(json!({"local": {"path": "/data"}, "capacity": {"storage": "2Gi"}}));
    let (events, queue) = EventSink::new();
    node.kinds.events = events;
    std::fs::create_dir(node.path("data")).unwrap();
    let mounted = node.set_up("u1", claimed()).unwrap();
    let pod = pod("u1", claimed());
    assert!(node.kinds.is_refreshed(pod.uid(), "v"));
    let volume = pod.spec().volumes.as_ref().unwrap()[0].clone();
    let same = node.kinds.refresh(&pod, &volume, mounted.clone(), &StopToken::never()).unwrap();
    assert_eq!(same, mounted);
    assert_eq!(queue.try_recv().unwrap().reason, "FileSystemResizeSuccessful");
}

/// The removal of the pod waited for a file system that hangs.
#[test]
fn growth_of_a_local_volume_does_not_keep_a_pod_that_is_removed() {
    let node = node(json!({"local": {"path": "/data"}, "capacity": {"storage": "2Gi"}}));
    std::fs::create_dir(node.path("data")).unwrap();
    let mounted = node.set_up("u1", claimed()).unwrap();
    let pod = pod("u1", claimed());
    let (uid, volume) = (pod.uid().clone(), pod.spec().volumes.as_ref().unwrap()[0].clone());
    let operations = node.kinds.operations.clone();
    let Node { root: _root, kinds, .. } = node;
    let (report, has_grown) = bounded(1);
    let (release, hold) = bounded::<()>(0);
    let work = move |stop: &StopToken| {
        let result = kinds.refresh(&pod, &volume, mounted, stop);
        report.send(()).unwrap();
        let _ = hold.recv();
        result
    };
    let operation = operations.start((&uid, "v", &OperationScope::default()), |_| {}, work).unwrap();
    has_grown.recv().unwrap();
    operations.prepare_removal_until(&uid, Instant::now(), &StopToken::never()).unwrap();
    drop(release);
    operation.finish();
}
