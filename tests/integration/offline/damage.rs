//! A key, a disk or files of the store that cannot be used while the API server is away: what does not need
//! them starts, nothing is destroyed, and the rest starts when they can be used again.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::starts::{read_lossy, restart_alone};
use super::*;
use crate::small_disk::SmallDisk;

/// The files of the store, with their content.
fn contents(node: &FakeNode, is_wanted: impl Fn(&str) -> bool) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for file in fs::read_dir(node.root().join("offline")).unwrap().flatten() {
        let name = file.file_name().to_string_lossy().into_owned();
        // The agent may replace or remove it at this moment.
        if is_wanted(&name)
            && let Ok(content) = fs::read(file.path())
        {
            found.insert(name, content);
        }
    }
    found
}

fn is_sealed(name: &str) -> bool {
    name.starts_with("secret-") || name.starts_with("token-")
}

/// Waits until each running pod could start alone.
fn wait_complete(node: &FakeNode) {
    wait_until("all pods to be complete in the store", LONG, || {
        node.command(&["offline", "check"]).status.success()
    });
}

fn assert_nothing_damaged(node: &FakeNode) {
    let list = node.cli(&["offline", "list", "-o", "json"]);
    let report: Value = serde_json::from_str(&list).unwrap();
    let stored = report["stored"].as_array().unwrap();
    assert!(!stored.is_empty() && stored.iter().all(|entry| entry["usable"] == true), "{list}");
    assert_eq!((&report["damagedFiles"], &report["damaged"]), (&json!(0), &Value::Null), "{list}");
}

/// The content and the mode of a key file; `None`: there is no file.
type KeyFile<'a> = Option<(&'a [u8], u32)>;

/// Such as the key of another node, on a medium that was exchanged.
#[test]
fn wrong_key_holds_back_pods_with_secrets_and_destroys_no_stored_object() {
    let mut node = joined(json!({}));
    run_pods(&node, &["web"]);
    node.bind(&simple("plain"));
    node.wait_ready("plain");
    wait_stored(&node, 2);
    wait_complete(&node);
    let path = node.root().join("offline/key");
    let right = fs::read(&path).unwrap();
    let other = format!("{}\n", "ab".repeat(32));
    let put = |key: KeyFile<'_>| match key {
        None => fs::remove_file(&path).unwrap(),
        Some((content, mode)) => {
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        }
    };
    let sealed = contents(&node, is_sealed);
    assert!(sealed.len() >= 2, "a Secret and a token: {:?}", sealed.keys());

    let keys: [(&str, KeyFile<'_>); 4] = [
        ("another key", Some((other.as_bytes(), 0o600))),
        ("no key", Some((&right[..32], 0o600))),
        ("a key that other users can read", Some((right.as_slice(), 0o644))),
        ("a key that is missing", None),
    ];
    for (name, key) in keys {
        put(key);
        restart_alone(&mut node);
        node.wait_ready("plain");
        let report = status(&node);
        assert_eq!(report["offline"]["seal"], "noKey", "{name}: {report}");
        assert!(report["problems"].to_string().contains("the key cannot be used"), "{name}: {report}");
        let list = node.cli(&["offline", "list"]);
        let reason = format!("the key file {} cannot be used", path.display());
        assert!(list.contains(&reason), "{name}: {list}");
        let check = node.command(&["offline", "check", "-o", "json"]);
        assert_eq!(check.status.code(), Some(6), "{name}: {check:?}");
        let missing = String::from_utf8_lossy(&check.stdout).into_owned();
        assert!(missing.contains("sealed, and the key cannot be used"), "{name}: {missing}");
        wait_pod_events(&node, "web", "FailedMount");
        assert!(!was_requested(&node, "CreateContainer", "web"), "{name}: {:?}", node.fake.calls());
        assert!(contents(&node, is_sealed) == sealed, "{name}: sealed objects have changed");
        assert_nothing_damaged(&node);
    }

    // With the API server, all pods run, and what is sealed stays, although it cannot be read.
    put(Some((other.as_bytes(), 0o600)));
    node.stop_agent();
    node.cut_power();
    node.api().go_up();
    node.start_agent();
    wait_phase(&node, "online");
    node.wait_ready("web");
    assert!(contents(&node, is_sealed) == sealed, "sealed objects have changed");

    put(Some((right.as_slice(), 0o600)));
    restart_alone(&mut node);
    node.wait_ready("web");
    assert_eq!(read(&volume(&node, "web", "secret", "login/pw")), CANARY[0]);
    assert_eq!(status(&node)["offline"]["seal"], "sealed");
    let running = node.running("web");
    node.api().go_up();
    wait_phase(&node, "online");
    assert_eq!(node.running("web"), running);
    node.finish();
}

fn make_empty(path: &Path) {
    fs::write(path, "").unwrap();
}

fn truncate(path: &Path) {
    let content = fs::read(path).unwrap();
    fs::write(path, &content[..content.len() / 2]).unwrap();
}

fn make_zeros(path: &Path) {
    let content = fs::read(path).unwrap();
    fs::write(path, vec![0; content.len()]).unwrap();
}

fn flip_bit(path: &Path) {
    let mut content = fs::read(path).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 0x10;
    fs::write(path, content).unwrap();
}

fn make_directory(path: &Path) {
    fs::remove_file(path).unwrap();
    fs::create_dir(path).unwrap();
}

fn make_pipe(path: &Path) {
    fs::remove_file(path).unwrap();
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
}

fn make_dangling_link(path: &Path) {
    fs::remove_file(path).unwrap();
    symlink("/nonexistent/file", path).unwrap();
}

/// A damage of a file, by its name.
type Damage = (&'static str, fn(&Path));

const DAMAGES: [Damage; 7] = [
    ("empty", make_empty),
    ("truncated", truncate),
    ("zeros", make_zeros),
    ("another bit", flip_bit),
    ("a directory", make_directory),
    ("a pipe", make_pipe),
    ("a dangling link", make_dangling_link),
];

fn uid(node: &FakeNode, pod: &str) -> String {
    node.shown(pod).and_then(|pod| pod.metadata.uid).expect("the pod has a UID")
}

/// All kinds of objects but the Node object are damaged at one start, each in another way, and at the next one
/// in yet another way; with a damaged Node object no pod of the API server starts alone.
#[test]
fn damaged_objects_hold_back_only_pods_that_need_them_while_the_server_is_away() {
    const PODS: [&str; 4] = ["web", "lost", "plain", "counted"];
    const KINDS: [&str; 7] = ["cluster", "configmap", "pod", "podstatus", "secret", "services", "token"];
    let mut node = joined(json!({}));
    node.api().put(KUBERNETES, json!({"spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 443}]}}));
    put_objects(&node);
    node.bind(&manifest("web"));
    let mut lost = manifest("lost");
    push(&mut lost["spec"]["volumes"], json!({"name": "data", "emptyDir": {}}));
    push(&mut lost["spec"]["containers"][0]["volumeMounts"], json!({"name": "data", "mountPath": "/data"}));
    node.bind(&lost);
    ["plain", "counted"].iter().for_each(|name| node.bind(&simple(name)));
    PODS.iter().for_each(|name| drop(node.wait_ready(name)));
    let data = volume(&node, "lost", "empty-dir", "data/file");
    fs::write(&data, "content").unwrap();
    let [lost, counted] = ["lost", "counted"].map(|name| uid(&node, name));

    for round in [0, 3] {
        let damages = || DAMAGES.iter().cycle().skip(round);
        let names: Vec<String> =
            KINDS.iter().zip(damages()).map(|(kind, (name, _))| format!("{kind}: {name}")).collect();
        let name = names.join(", ");
        wait_stored(&node, 4);
        wait_until("the UID of the cluster to be stored", LONG, || {
            status(&node)["offline"]["objects"]["cluster"] == json!(1)
        });
        wait_complete(&node);
        node.stop_agent();
        let mut damaged = BTreeSet::new();
        for file in fs::read_dir(node.root().join("offline")).unwrap().flatten() {
            let file_name = file.file_name().to_string_lossy().into_owned();
            let kind = file_name.split('-').next().unwrap_or_default().to_owned();
            let is_chosen = match kind.as_str() {
                "configmap" | "secret" | "token" | "services" | "cluster" => true,
                "pod" => read_lossy(&file.path()).contains(&lost),
                "podstatus" => read_lossy(&file.path()).contains(&counted),
                _ => false,
            };
            let found = KINDS.iter().zip(damages()).find(|(known, _)| **known == kind);
            if is_chosen && let Some((_, (_, damage))) = found {
                damage(&file.path());
                damaged.insert(kind);
            }
        }
        assert!(damaged.iter().eq(KINDS.iter()), "{name}: {damaged:?}");

        restart_alone(&mut node);
        node.wait_ready("plain");
        node.wait_ready("counted");
        wait_pod_events(&node, "web", "FailedMount");
        wait_event(&node, "UnusableStateFile");
        for pod in ["web", "lost"] {
            assert!(!was_requested(&node, "CreateContainer", pod), "{name}: {:?}", node.fake.calls());
        }
        assert!(status(&node)["offline"]["damagedFiles"].as_u64() > Some(0), "{name}: {}", status(&node));
        assert_eq!(read(&data), "content", "{name}");
        let running = ["plain", "counted"].map(|pod| node.running(pod));

        // The server sends all of it again.
        node.api().go_up();
        wait_phase(&node, "online");
        PODS.iter().for_each(|pod| drop(node.wait_ready(pod)));
        assert_eq!(["plain", "counted"].map(|pod| node.running(pod)), running, "{name}: containers restart");
        assert_eq!(read(&volume(&node, "web", "secret", "login/pw")), CANARY[0], "{name}");
        assert_eq!(read(&data), "content", "{name}");
    }
    node.finish();
}

/// Statuses of the time alone cannot be stored, and volumes on the disk perhaps not be written.
#[test]
fn full_disk_damages_no_stored_object_and_pods_start_alone_or_name_it() {
    const PODS: [&str; 2] = ["web", "plain"];
    let node = prepared(json!({}));
    let Some(disk) = SmallDisk::mount(&node) else { return };
    let mut node = node.start_joined();
    run_pods(&node, &["web"]);
    node.bind(&simple("plain"));
    node.wait_ready("plain");
    wait_stored(&node, 2);
    wait_complete(&node);
    node.stop_agent();
    node.cut_power();
    let is_compared =
        |name: &str| name.contains('-') && !name.contains('.') && !name.starts_with("podstatus-");
    let stored = contents(&node, is_compared);
    assert!(stored.len() >= 6, "{:?}", stored.keys());

    disk.fill();
    restart_alone(&mut node);
    let names_disk = |pod: &str| {
        let output = node.command(&["describe", pod]);
        String::from_utf8_lossy(&output.stdout).contains("No space left on device")
    };
    for pod in PODS {
        wait_until(&format!("pod {pod} to run or to name the full disk"), LONG, || {
            !node.running(pod).is_empty() || names_disk(pod)
        });
    }
    assert!(contents(&node, is_compared) == stored, "stored objects have changed");
    assert_nothing_damaged(&node);

    disk.clear();
    PODS.iter().for_each(|pod| drop(node.wait_ready(pod)));
    assert_eq!(status(&node)["offline"]["phase"], "alone");
    assert_eq!(read(&volume(&node, "web", "secret", "login/pw")), CANARY[0]);
    let running = PODS.map(|pod| node.running(pod));
    node.api().go_up();
    wait_phase(&node, "online");
    assert_eq!(PODS.map(|pod| node.running(pod)), running, "no container restarts");
    // What could not be written is written.
    wait_until("the end of all problems", LONG, || status(&node)["offline"]["problems"] == json!([]));
    node.finish();
}
