//! Volumes: set-up, refusals, updates in a running pod, and that no data of the user is lost or left
//! behind.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::node::{
    FOREVER, LONG, Node, busybox, container_id, init_container, is_ready, phase, pod, restarts, simple, uid,
    waiting_message, waiting_reason,
};
use crate::support::process_usage;
use crate::support::wait::{holds_for, wait_until};

/// A pod of one container with volumes and their mounts.
fn pod_with(name: &str, volumes: Value, mounts: Value) -> Value {
    let mut manifest = simple(name);
    manifest["spec"]["volumes"] = volumes;
    manifest["spec"]["containers"][0]["volumeMounts"] = mounts;
    manifest
}

fn mount(name: &str) -> Value {
    json!([{"name": name, "mountPath": format!("/{name}")}])
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn host_path_of_wrong_type_delays_its_pod() {
    let node = Node::start("hostpath");
    let shared = node.shared();
    fs::write(shared.join("file"), "content").expect("the shared directory is writable");
    let host = |path: PathBuf, kind: &str| json!([{"name": "v", "hostPath": {"path": path, "type": kind}}]);
    node.apply("late.json", &pod_with("late", host(shared.join("late"), "Directory"), mount("v")));
    node.apply("wrong.json", &pod_with("wrong", host(shared.join("file"), "Directory"), mount("v")));
    // No container mounts it: it is not checked.
    node.apply("unused.json", &pod_with("unused", host(shared.join("nowhere"), "Directory"), json!([])));
    node.apply(
        "made.json",
        &pod_with("made", host(shared.join("made/deep"), "DirectoryOrCreate"), mount("v")),
    );
    node.wait_ready("unused");
    node.wait_ready("made");
    assert!(shared.join("made/deep").is_dir());

    let (late, wrong) =
        (shared.join("late").display().to_string(), shared.join("file").display().to_string());
    for (name, failure) in [
        (
            "late",
            format!(
                "failed, {late} is not a directory, unable to determine its type: path {late:?} does not exist"
            ),
        ),
        ("wrong", format!("failed: {wrong} is not a directory, it's a File")),
    ] {
        let event = node.wait_event(name, "FailedMount", "hostPath type check failed");
        assert_eq!(
            event.message,
            format!("MountVolume.SetUp failed for volume \"v\" : hostPath type check {failure}")
        );
        let seen = node.pod(name).expect("the pod is listed");
        assert_eq!((phase(&seen), waiting_reason(&seen, "main")), ("Pending", "ContainerCreating"));
        assert!(node.running_sandboxes(name).is_empty());
    }
    fs::create_dir(shared.join("late")).expect("the directory can be made");
    node.wait_ready("late");
    holds_for("a file stays a file", Duration::from_secs(2), || node.running("wrong").is_empty());
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn memory_volume_size_is_the_memory_limit_of_the_pod() {
    let node = Node::start("memory");
    let memory = |more: Value| {
        let mut source = json!({"medium": "Memory"});
        if let (Some(source), Value::Object(more)) = (source.as_object_mut(), more) {
            source.extend(more);
        }
        json!([{"name": "v", "emptyDir": source}])
    };
    let mut bounded = pod_with("bounded", memory(json!({})), mount("v"));
    bounded["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "64Mi"}});
    node.apply("bounded.json", &bounded);
    let mut smaller = pod_with("smaller", memory(json!({"sizeLimit": "8Mi"})), mount("v"));
    smaller["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "64Mi"}});
    node.apply("smaller.json", &smaller);
    for (name, size) in [("bounded", "size=65536k"), ("smaller", "size=8192k")] {
        let ready = node.wait_ready(name);
        let mounts = node.exec(&container_id(&ready, "main"), &["cat", "/proc/mounts"]);
        let line = mounts.lines().find(|line| line.contains(" /v ")).unwrap_or("");
        assert!(line.starts_with("tmpfs /v tmpfs ") && line.contains(size), "{name}: {line}");
        let dir = node.root().join("pods").join(uid(&ready)).join("volumes/kubernetes.io~empty-dir/v");
        assert_eq!(fs::metadata(&dir).map(|meta| meta.permissions().mode() & 0o777).ok(), Some(0o777));
    }
    node.finish();
}

// Runtimes: containerd 2, CRI-O.
#[test]
fn fs_group_owns_the_volumes_of_its_pod() {
    let node = Node::start("fsgroup");
    let mut manifest = pod_with(
        "web",
        json!([{"name": "disk", "emptyDir": {}}, {"name": "fast", "emptyDir": {"medium": "Memory"}}]),
        json!([{"name": "disk", "mountPath": "/disk"}, {"name": "fast", "mountPath": "/fast"}]),
    );
    manifest["spec"]["securityContext"] = json!({"fsGroup": 2000, "runAsUser": 1000, "runAsGroup": 3000});
    node.apply("web.json", &manifest);
    let ready = node.wait_ready("web");
    let volumes = node.root().join("pods").join(uid(&ready)).join("volumes/kubernetes.io~empty-dir");
    for name in ["disk", "fast"] {
        let meta = fs::metadata(volumes.join(name)).expect("the volume is there");
        assert_eq!((meta.gid(), meta.mode() & 0o2770), (2000, 0o2770), "{name}: mode {:o}", meta.mode());
        let made = node.exec(
            &container_id(&ready, "main"),
            &["sh", "-c", &format!("touch /{name}/x && stat -c '%u %g' /{name}/x")],
        );
        assert_eq!(made, "1000 2000\n", "what is made inside belongs to the group");
    }
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn downward_api_files_follow_the_pod() {
    let node = Node::start("downward");
    let items = json!([
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "deep/name", "fieldRef": {"fieldPath": "metadata.name"}},
        {"path": "memory", "resourceFieldRef": {"containerName": "main", "resource": "limits.memory", "divisor": "1Mi"}},
    ]);
    let mut manifest = pod_with(
        "web",
        json!([
            {"name": "info", "downwardAPI": {"items": items, "defaultMode": 0o640}},
            {"name": "all", "projected": {"sources": [
                {"downwardAPI": {"items": [{"path": "one", "fieldRef": {"fieldPath": "metadata.labels['edition']"}}]}},
                {"downwardAPI": {"items": [{"path": "two", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
            ]}},
        ]),
        json!([
            {"name": "info", "mountPath": "/info"},
            {"name": "all", "mountPath": "/all"},
            {"name": "info", "mountPath": "/once", "subPath": "labels"},
        ]),
    );
    manifest["metadata"]["uid"] = json!("fixed-downward");
    manifest["metadata"]["labels"] = json!({"edition": "first", "app": "web"});
    manifest["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "64Mi"}});
    node.apply("web.json", &manifest);
    let ready = node.wait_ready("web");
    let id = container_id(&ready, "main");
    let sh = |script: &str| node.exec(&id, &["sh", "-c", script]);
    assert_eq!(sh("cat /info/labels"), "app=\"web\"\nedition=\"first\"");
    assert_eq!(sh("cat /info/deep/name"), "web-e2e");
    assert_eq!(sh("cat /info/memory"), "64");
    assert_eq!((sh("cat /all/one"), sh("cat /all/two")), ("first".to_owned(), "default".to_owned()));
    assert!(sh("cat /proc/mounts").lines().any(|line| line.starts_with("tmpfs /info tmpfs ")));
    assert_eq!(sh("readlink /info/labels"), "..data/labels\n");
    assert_eq!(sh("readlink /info/deep"), "..data/deep\n");
    let before = sh("readlink /info/..data");
    assert!(before.starts_with("..20"), "a directory named by its time: {before}");
    assert_eq!(sh("stat -L -c %a /info/labels"), "640\n");

    // A change of the mode alone does not affect a running pod.
    manifest["spec"]["volumes"][0]["downwardAPI"]["defaultMode"] = json!(0o600);
    node.apply("web.json", &manifest);
    node.wait_pod("web", "shown with the new mode", LONG, |now| {
        let volumes = now.spec.as_ref().and_then(|spec| spec.volumes.clone()).unwrap_or_default();
        volumes.iter().any(|projection| {
            projection.downward_api.as_ref().and_then(|source| source.default_mode) == Some(0o600)
        })
    });
    holds_for("the files stay", Duration::from_secs(2), || sh("readlink /info/..data") == before);
    assert_eq!(sh("stat -L -c %a /info/labels"), "640\n");

    // A label does, in one step; a sub path mount keeps the old content.
    manifest["metadata"]["labels"] = json!({"edition": "second", "app": "web"});
    node.apply("web.json", &manifest);
    wait_until("the files to follow", LONG, || sh("cat /info/labels") == "app=\"web\"\nedition=\"second\"");
    assert_ne!(sh("readlink /info/..data"), before);
    wait_until("the other volume to follow", LONG, || sh("cat /all/one") == "second");
    assert_eq!(sh("cat /once"), "app=\"web\"\nedition=\"first\"");
    wait_until("one version to be kept", LONG, || sh("ls -a /info | grep -c '^\\.\\.20'") == "1\n");
    let after = node.wait_ready("web");
    assert_eq!((container_id(&after, "main"), restarts(&after, "main")), (id.clone(), 0));
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn sub_paths_do_not_escape_their_volume() {
    let node = Node::start("subpath");
    let outside = node.shared().join("outside");
    fs::create_dir(&outside).expect("the shared directory is writable");
    fs::write(outside.join("secret"), "not for pods").expect("the file is written");
    let volume = json!([{"name": "v", "emptyDir": {}}]);
    let mut good = pod_with(
        "good",
        volume.clone(),
        json!([
            {"name": "v", "mountPath": "/all"},
            {"name": "v", "mountPath": "/part", "subPath": "made/deep"},
            {"name": "v", "mountPath": "/mine", "subPathExpr": "$(WHO)/data"},
        ]),
    );
    good["spec"]["containers"][0]["env"] =
        json!([{"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]);
    node.apply("good.json", &good);
    let unset = pod_with(
        "unset",
        volume.clone(),
        json!([{"name": "v", "mountPath": "/x", "subPathExpr": "$(UNSET)"}]),
    );
    node.apply("unset.json", &unset);
    // One in a directory of the node, too.
    symlink("/etc", outside.join("evil")).expect("the shared directory is writable");
    node.apply(
        "host.json",
        &pod_with(
            "host",
            json!([{"name": "v", "hostPath": {"path": outside}}]),
            json!([{"name": "v", "mountPath": "/x", "subPath": "evil"}]),
        ),
    );
    // The links are made by the pod itself, before they are used.
    let links = [
        ("absolute", "ln -s /etc /v/evil"),
        ("parent", "ln -s ../../../.. /v/evil"),
        ("file", "ln -s /etc/passwd /v/evil"),
        ("middle", "mkdir /v/real; ln -s /etc /v/real/evil; ln -s real/evil /v/evil"),
    ];
    for (name, script) in links {
        let mut manifest = pod(name, json!([busybox("main", FOREVER)]));
        manifest["spec"]["volumes"] = volume.clone();
        manifest["spec"]["initContainers"] = json!([busybox("attack", script)]);
        manifest["spec"]["initContainers"][0]["volumeMounts"] = mount("v");
        manifest["spec"]["containers"][0]["volumeMounts"] =
            json!([{"name": "v", "mountPath": "/x", "subPath": "evil"}]);
        node.apply(&format!("{name}.json"), &manifest);
    }
    let ready = node.wait_ready("good");
    let sh = |script: &str| node.exec(&container_id(&ready, "main"), &["sh", "-c", script]);
    sh("echo one > /part/file; echo two > /mine/file");
    assert_eq!(sh("cat /all/made/deep/file /all/good-e2e/data/file"), "one\ntwo\n");

    let refused = |name: &str| {
        node.wait_pod(name, "refused", LONG, |pod| {
            waiting_reason(pod, "main") == "CreateContainerConfigError"
        })
    };
    assert_eq!(waiting_message(&refused("unset"), "main"), "missing value for UNSET");
    let message = "failed to prepare subPath for volumeMount \"v\" of container \"main\"";
    assert_eq!(waiting_message(&refused("host"), "main"), message);
    let root = node.root().display().to_string();
    for (name, _) in links {
        let seen = refused(name);
        assert!(init_container(&seen, "attack").is_some_and(|status| status.ready), "{name}");
        let message = waiting_message(&seen, "main");
        assert!(
            message.contains("subPath") && message.contains("volumeMount \"v\" of container \"main\""),
            "{name}: {message}"
        );
        assert!(!message.contains(&root) && !message.contains("/etc"), "a path of the host in: {message}");
        assert!(!node.running(name).contains_key("main"));
    }
    assert!(!node.cli(&["events"]).contains("/etc"), "no host path in an event");
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn mounts_of_a_killed_agent_are_removed() {
    let mut node = Node::start("stale");
    let manifest = pod_with("web", json!([{"name": "v", "emptyDir": {"medium": "Memory"}}]), mount("v"));
    node.apply("web.json", &manifest);
    node.apply(
        "stay.json",
        &pod_with("stay", json!([{"name": "v", "emptyDir": {"medium": "Memory"}}]), mount("v")),
    );
    let gone = node.root().join("pods").join(uid(&node.wait_ready("web")));
    let stay = node.wait_ready("stay");
    let pod_dir = node.root().join("pods").join(uid(&stay));
    node.exec(&container_id(&stay, "main"), &["sh", "-c", "echo data > /v/file"]);
    node.kill_agent();
    node.remove("web.json");
    // No container of the pod runs when the agent restarts: only its files and mounts are left.
    let (runtime, _) = node.cri();
    for sandbox in runtime.list_pod_sandbox(Default::default()).expect("ListPodSandbox") {
        if sandbox.metadata.as_ref().is_some_and(|metadata| metadata.name == "web-e2e") {
            let id = sandbox.id.into();
            runtime.stop_pod_sandbox(&id).expect("StopPodSandbox");
            runtime.remove_pod_sandbox(&id).expect("RemovePodSandbox");
        }
    }
    assert_eq!(process_usage::mounts_below(&gone).len(), 1, "the volume is still mounted");
    node.start_agent();
    wait_until("the directory to be gone", LONG, || !gone.exists());
    assert!(process_usage::mounts_below(&gone).is_empty());
    let after = node.wait_ready("stay");
    assert_eq!(container_id(&after, "main"), container_id(&stay, "main"));
    assert_eq!(
        fs::read_to_string(pod_dir.join("volumes/kubernetes.io~empty-dir/v/file")).ok().as_deref(),
        Some("data\n")
    );
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn busy_volume_is_unmounted_later() {
    let node = Node::start("busy");
    node.apply(
        "web.json",
        &pod_with("web", json!([{"name": "v", "emptyDir": {"medium": "Memory"}}]), mount("v")),
    );
    let ready = node.wait_ready("web");
    let dir = node.root().join("pods").join(uid(&ready));
    node.exec(&container_id(&ready, "main"), &["sh", "-c", "echo precious > /v/file"]);
    let mut open =
        fs::File::open(dir.join("volumes/kubernetes.io~empty-dir/v/file")).expect("the file is there");
    node.remove("web.json");
    wait_until("the containers to be gone", LONG, || node.running("web").is_empty());
    holds_for("the volume stays while a process uses it", Duration::from_secs(3), || {
        process_usage::mounts_below(&dir).len() == 1
            && dir.join("volumes/kubernetes.io~empty-dir/v/file").exists()
    });
    let mut text = String::new();
    open.read_to_string(&mut text).expect("the file is readable");
    assert_eq!(text, "precious\n");
    drop(open);
    node.wait_gone("web");
    wait_until("the directory to be gone", LONG, || !dir.exists());
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn image_volume_is_mounted_if_the_runtime_supports_it() {
    let node = Node::start("imagevol");
    let (runtime, _) = node.cri();
    let version = runtime.version().expect("Version").runtime_version;
    node.apply(
        "web.json",
        &pod_with(
            "web",
            json!([{"name": "v", "image": {"reference": "localhost/busybox:1", "pullPolicy": "Never"}}]),
            mount("v"),
        ),
    );
    let mut missing = pod("missing", json!([busybox("main", FOREVER), busybox("other", FOREVER)]));
    missing["spec"]["volumes"] =
        json!([{"name": "v", "image": {"reference": "localhost/absent:1", "pullPolicy": "Never"}}]);
    missing["spec"]["containers"][0]["volumeMounts"] = mount("v");
    node.apply("missing.json", &missing);
    if !version.trim_start_matches('v').starts_with("1.") {
        let ready = node.wait_ready("web");
        let id = container_id(&ready, "main");
        assert!(node.exec(&id, &["ls", "/v/bin"]).contains("busybox"));
        assert_eq!(
            node.exec(&id, &["sh", "-c", "touch /v/x 2>/dev/null && echo made || echo refused"]),
            "refused\n"
        );
    }
    let seen = node.wait_pod("missing", "waiting for the image", LONG, |pod| {
        waiting_reason(pod, "main") == "ErrImageNeverPull"
    });
    assert!(!is_ready(&seen));
    wait_until("the container without the volume", LONG, || node.running("missing").contains_key("other"));
    node.finish();
}
