//! Files of the agent that cannot be used at its start: it starts, and pods run. Without this a bad sector
//! or a power cut would end a node that cannot be reached.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

use crate::small_disk::SmallDisk;
use crate::support::fake_api::FakeApi;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{FOREVER, busybox, pod, simple};
use crate::support::wait::wait_until;

/// Directories of a pod whose files are of its containers, or content of its volumes.
const POD_CONTENT: [&str; 4] = ["volumes", "containers", "volume-subpaths", "volumeDevices"];

/// What the agent of the test has written itself: begins of paths below the directory of the node.
const WRITTEN: [&str; 13] = [
    "root/allocated_pods_state",
    "root/actuated_pods_state",
    "root/agent.lock.",
    "root/cpu_manager_state",
    "root/offline/key",
    "root/offline/node-",
    "root/offline/pod-",
    "root/offline/podstatus-",
    "root/offline/configmap-",
    "root/offline/services-",
    "root/sources/",
    "pki/kubelet.crt",
    "pki/kubelet.key",
];

/// What other settings, devices or events would write: path and content.
const OTHERS: [(&str, &str); 8] = [
    ("root/memory_manager_state", "{\"policyName\":\"None\"}"),
    ("root/dra_manager_state", "{\"kind\":\"DRACheckpoint\"}"),
    ("root/dra_health_state", "{}"),
    ("root/device-plugins/kubelet_internal_checkpoint", "{\"Data\":{},\"Checksum\":1}"),
    (
        "root/graceful_node_shutdown_state",
        "{\"endTime\":\"0001-01-01T00:00:00Z\",\"startTime\":\"2026-01-01T00:00:00Z\"}",
    ),
    (
        "root/image_manager/pulled/sha256-0000000000000000000000000000000000000000000000000000000000000000",
        "{\"kind\":\"ImagePulledRecord\"}",
    ),
    (
        "root/image_manager/pulling/sha256-0000000000000000000000000000000000000000000000000000000000000000",
        "{\"kind\":\"ImagePullIntent\"}",
    ),
    ("root/pods/00000000-0000-0000-0000-000000000001/userns", "{\"uidMappings\":[]}"),
];

/// A pod that does not exist any more, with a file in [`OTHERS`].
const FORMER_POD: &str = "pods/00000000-0000-0000-0000-000000000001";

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    Empty,
    Truncated,
    Zeroed,
    Flipped,
    Directory,
    Pipe,
    DanglingLink,
    /// Only for other users than root.
    Unreadable,
}

impl Damage {
    const ALL: [Damage; 8] = [
        Damage::Empty,
        Damage::Truncated,
        Damage::Zeroed,
        Damage::Flipped,
        Damage::Directory,
        Damage::Pipe,
        Damage::DanglingLink,
        Damage::Unreadable,
    ];

    fn apply(self, path: &Path, content: &[u8]) {
        let replace = || fs::remove_file(path).expect("it was there");
        match self {
            Damage::Empty => fs::write(path, "").unwrap(),
            Damage::Truncated => fs::write(path, &content[..content.len() / 2]).unwrap(),
            Damage::Zeroed => fs::write(path, vec![0; content.len()]).unwrap(),
            Damage::Flipped => {
                let mut content = content.to_vec();
                let middle = content.len() / 2;
                content.iter_mut().skip(middle).take(1).for_each(|byte| *byte ^= 0x10);
                fs::write(path, content).unwrap();
            }
            Damage::Directory => {
                replace();
                fs::create_dir(path).unwrap();
            }
            Damage::Pipe => {
                replace();
                mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
            }
            Damage::DanglingLink => {
                replace();
                std::os::unix::fs::symlink("/nonexistent/file", path).unwrap();
            }
            Damage::Unreadable => fs::set_permissions(path, Permissions::from_mode(0o000)).unwrap(),
        }
    }
}

/// The regular files of the agent below a directory, with their content and mode.
fn state_files(below: &Path) -> BTreeMap<PathBuf, (Vec<u8>, u32)> {
    let (mut found, mut open) = (BTreeMap::new(), vec![below.to_owned()]);
    while let Some(path) = open.pop() {
        let meta = fs::symlink_metadata(&path).expect("the agent does not run");
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if meta.is_dir() && !POD_CONTENT.contains(&name.as_str()) {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        // Containers have it, too.
        } else if meta.is_file() && name != "etc-hosts" {
            let content = fs::read(&path).unwrap();
            found.insert(path, (content, meta.permissions().mode() & 0o7777));
        }
    }
    found
}

/// Makes the files as they were, and removes copies of damaged ones. Of the locks only the one of `files`
/// stays: that of a later start would be newer, and only the newest counts.
fn restore(node: &FakeNode, files: &BTreeMap<PathBuf, (Vec<u8>, u32)>) {
    let _ = fs::remove_dir_all(node.root().join("offline/damaged"));
    for entry in fs::read_dir(node.root()).unwrap().map(|entry| entry.unwrap()) {
        if entry.file_name().to_string_lossy().starts_with("agent.lock.") {
            let path = entry.path();
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
        }
    }
    for (path, (content, mode)) in files {
        let mut unusable = path.clone().into_os_string();
        unusable.push(".unusable");
        for old in [path.clone(), unusable.into()] {
            match fs::symlink_metadata(&old) {
                Ok(meta) if meta.is_dir() => fs::remove_dir_all(&old).unwrap(),
                Ok(_) => fs::remove_file(&old).unwrap(),
                Err(_) => {}
            }
        }
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        fs::set_permissions(path, Permissions::from_mode(*mode)).unwrap();
    }
}

/// A pod of the API server with a ConfigMap, and with resources: those of others are not recorded.
fn app() -> Value {
    let mut main = busybox("main", FOREVER);
    main["resources"] = json!({"requests": {"cpu": "10m"}});
    main["volumeMounts"] = json!([{"name": "settings", "mountPath": "/settings"}]);
    let mut app = pod("app", json!([main]));
    app["spec"]["volumes"] = json!([{"name": "settings", "configMap": {"name": "settings"}}]);
    app
}

fn status(node: &FakeNode) -> Value {
    serde_json::from_slice(&node.command(&["status", "-o", "json"]).stdout).unwrap_or_default()
}

/// A node of a cluster with `--offline`, a static pod and a pod of the API server, that is about to start.
fn prepared() -> FakeNode {
    let mut node = FakeNode::prepare(json!({}));
    let api = FakeApi::start();
    let cluster = json!({"server": api.url()});
    node.join_cluster(api, cluster);
    node.add_flags(&["--offline", "--offline-wait=1s"]);
    node
}

fn run_pods(node: &FakeNode) {
    node.api().put("/api/v1/namespaces/default/configmaps/settings", json!({"data": {"text": "one"}}));
    node.apply(&simple("web"));
    node.bind(&app());
    node.wait_ready("web");
    node.wait_ready("app");
    wait_until("the objects to be stored", LONG, || {
        let objects = &status(node)["offline"]["objects"];
        ["node", "pod", "podstatus", "configmap", "services"].iter().all(|kind| objects[kind].is_u64())
    });
}

/// All files have the same damage at one start; their readers do not depend on each other. After a power
/// cut, so that nothing but the start of the pods makes them run.
#[test]
fn agent_starts_and_pods_run_with_every_state_file_damaged_in_every_way() {
    let mut node = prepared().start_joined();
    run_pods(&node);
    node.stop_agent();
    for (path, content) in OTHERS {
        let path = node.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        if !path.exists() {
            fs::write(path, content).unwrap();
        }
    }
    let mut files = state_files(&node.root());
    files.extend(state_files(&node.path("pki")));
    let top = node.path("");
    for begin in WRITTEN.into_iter().chain(OTHERS.map(|(path, _)| path)) {
        let is_there = |path: &PathBuf| {
            path.strip_prefix(&top).is_ok_and(|path| path.to_string_lossy().starts_with(begin))
        };
        assert!(files.keys().any(is_there), "{begin}: {:?}", files.keys());
    }
    for damage in Damage::ALL {
        restore(&node, &files);
        for (path, (content, _)) in &files {
            damage.apply(path, content);
        }
        node.cut_power();
        node.start_agent();
        for name in ["web", "app"] {
            wait_until(&format!("pod {name} to run ({damage:?})"), LONG, || !node.running(name).is_empty());
            node.wait_ready(name);
        }
        // On a slow machine the stored pods may have started before, if their files can be read.
        wait_until(&format!("the set of the API server ({damage:?})"), LONG, || {
            status(&node)["offline"]["phase"] == "online"
        });
        node.stop_agent();
    }
    restore(&node, &files);
    fs::remove_dir_all(node.root().join(FORMER_POD)).unwrap();
    node.start_agent();
    node.wait_ready("web");
    node.finish();
}

/// The API server is away, too: static pods are all that can run.
#[test]
fn static_pod_runs_without_the_api_server_and_with_a_damaged_store() {
    let mut node = prepared().start_joined();
    run_pods(&node);
    node.api().go_down();
    node.stop_agent();
    let files = state_files(&node.root().join("offline"));
    for damage in [Damage::Truncated, Damage::Pipe] {
        restore(&node, &files);
        for (path, (content, _)) in &files {
            damage.apply(path, content);
        }
        node.cut_power();
        node.start_agent();
        wait_until(&format!("pod web to run ({damage:?})"), LONG, || !node.running("web").is_empty());
        let report = status(&node);
        assert_eq!(report["offline"]["phase"], "undecided", "no Node object is stored: {report}");
        wait_until("the event", LONG, || node.cli(&["events"]).contains("UnusableStateFile"));
        node.stop_agent();
    }
    restore(&node, &files);
    node.cut_power();
    node.start_agent();
    node.wait_ready("app");
    node.api().go_up();
    node.finish();
}

/// A mount point. Dropping it unmounts it.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// The disk of the root directory cannot be written to, as after an error of the disk. With an overlay in memory,
/// as in docs/offline.md, the state on the disk counts.
#[test]
fn agent_names_a_read_only_root_directory_and_starts_its_pods_with_an_overlay_over_it() {
    let node = prepared();
    let Some(disk) = SmallDisk::mount(&node) else { return };
    let mut node = node.start_joined();
    run_pods(&node);
    node.api().go_down();
    node.stop_agent();
    node.cut_power();
    let mount = |arguments: &[&str], target: &Path| {
        assert!(Command::new("mount").args(arguments).arg(target).status().unwrap().success());
    };
    mount(&["-o", "remount,ro"], disk.path());
    let check = node.command(&["check", "--root-dir", &disk.path().display().to_string()]);
    assert!(String::from_utf8_lossy(&check.stdout).contains("on a read-only file system"), "{check:?}");
    node.launch_agent();
    assert!(!node.wait_end().success());
    assert!(node.log().contains("docs/offline.md"), "{}", node.log());
    node.kill_agent();

    let memory = node.path("memory");
    fs::create_dir(&memory).unwrap();
    mount(&["-t", "tmpfs", "-o", "mode=700", "tmpfs"], &memory);
    let memory = Mounted(memory);
    let [upper, work] = ["upper", "work"].map(|name| memory.0.join(name));
    [&upper, &work].iter().for_each(|directory| fs::create_dir(directory).unwrap());
    let [lower, upper, work] = [disk.path(), &upper, &work].map(|path| path.display());
    let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
    mount(&["-t", "overlay", "-o", &options, "overlay"], disk.path());
    let _overlay = Mounted(disk.path().to_owned());
    node.start_agent();
    wait_until("the stored pods to run", LONG, || {
        ["web", "app"].iter().all(|name| !node.running(name).is_empty())
    });
    node.api().go_up();
    node.wait_ready("web");
    node.wait_ready("app");
    node.finish();
}

#[test]
fn agent_starts_on_a_full_disk_and_running_pods_continue() {
    let node = prepared();
    let Some(disk) = SmallDisk::mount(&node) else { return };
    let mut node = node.start_joined();
    run_pods(&node);
    let running = [node.running("web"), node.running("app")];
    node.kill_agent();
    disk.fill();
    node.start_agent();
    node.wait_ready("web");
    node.wait_ready("app");
    assert_eq!([node.running("web"), node.running("app")], running);
    disk.clear();
    node.apply(&simple("late"));
    node.wait_ready("late");
    node.finish();
}
