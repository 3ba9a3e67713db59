//! Volumes as containers see them (the checks of the volume manager that need no API server).

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::node::{FOREVER, LONG, Node, busybox, container_id, pod};
use crate::support::wait::wait_until;

/// A pod of one container with these volumes and mounts.
fn pod_with(name: &str, script: &str, volumes: Value, mounts: Value) -> Value {
    let mut manifest = pod(name, json!([busybox("main", script)]));
    manifest["spec"]["volumes"] = volumes;
    manifest["spec"]["containers"][0]["volumeMounts"] = mounts;
    manifest
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn downward_api_files_exist() {
    let node = Node::start("downfile");
    let items = json!([
        {"path": "labels", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.labels"}},
        {"path": "note", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['note']"}},
        {"path": "deep/cpu", "mode": 0o400, "resourceFieldRef":
            {"containerName": "main", "resource": "limits.cpu", "divisor": "1m"}},
    ]);
    let mut manifest = pod_with(
        "down",
        FOREVER,
        json!([
            {"name": "d", "downwardAPI": {"items": items}},
            {"name": "p", "projected": {"sources": [{"downwardAPI": {"items": items}}]}},
            {"name": "e", "emptyDir": {}},
        ]),
        json!([
            {"name": "d", "mountPath": "/d"},
            {"name": "d", "mountPath": "/one", "subPath": "labels"},
            {"name": "p", "mountPath": "/p"},
            {"name": "e", "mountPath": "/p/inside/e"},
        ]),
    );
    manifest["metadata"]["labels"] = json!({"b": "2", "a": "1"});
    manifest["metadata"]["annotations"] = json!({"note": "two\nlines"});
    manifest["spec"]["containers"][0]["resources"] = json!({"limits": {"cpu": "150m"}});
    manifest["spec"]["securityContext"] = json!({"fsGroup": 2000});
    node.apply("down.json", &manifest);
    let id = container_id(&node.wait_ready("down"), "main");
    for dir in ["/d", "/p"] {
        let labels = node.exec(&id, &["cat", &format!("{dir}/labels")]);
        assert_eq!(labels, "a=\"1\"\nb=\"2\"");
        assert_eq!(node.exec(&id, &["cat", &format!("{dir}/note")]), "two\nlines");
        assert_eq!(node.exec(&id, &["cat", &format!("{dir}/deep/cpu")]), "150");
        assert_eq!(node.exec(&id, &["stat", "-c", "%a %g", &format!("{dir}/.")]), "3777 2000\n");
        assert_eq!(node.exec(&id, &["stat", "-Lc", "%a %g", &format!("{dir}/deep/cpu")]), "440 2000\n");
        assert!(node.exec(&id, &["readlink", &format!("{dir}/labels")]).contains("..data/labels"));
        let write = format!("touch {dir}/x 2>/dev/null && echo written || echo read-only");
        assert_eq!(node.exec(&id, &["sh", "-c", &write]), "read-only\n");
    }
    assert_eq!(node.exec(&id, &["cat", "/one"]), "a=\"1\"\nb=\"2\"");
    assert_eq!(node.exec(&id, &["sh", "-c", "touch /p/inside/e/x && echo ok"]), "ok\n");
    node.remove("down.json");
    node.wait_gone("down");
    node.finish();
}

// Runtimes: containerd 1, containerd 2, CRI-O.
#[test]
fn sub_paths_survive_restarts_and_go_with_the_pod() {
    let mut node = Node::start("subrest");
    let script = "echo \"$W\" >> /x/said; [ -e /e/once ] || { touch /e/once; exit 1; }; ";
    let mut manifest = pod_with(
        "sub",
        &format!("{script}{FOREVER}"),
        json!([{"name": "e", "emptyDir": {}}]),
        json!([
            {"name": "e", "mountPath": "/e", "subPath": "a/b"},
            {"name": "e", "mountPath": "/x", "subPathExpr": "x-$(W)"},
            {"name": "e", "mountPath": "/all"},
        ]),
    );
    manifest["spec"]["containers"][0]["env"] = json!([{"name": "W", "value": "who"}]);
    node.apply("sub.json", &manifest);
    let ready = node.wait_pod("sub", "restarted", LONG, |pod| {
        crate::support::node::is_ready(pod) && crate::support::node::restarts(pod, "main") == 1
    });
    let id = container_id(&ready, "main");
    wait_until("the output of the second instance", LONG, || {
        node.exec(&id, &["cat", "/all/x-who/said"]) == "who\nwho\n"
    });
    assert_eq!(node.exec(&id, &["ls", "/all/a/b"]), "once\n");
    let uid = crate::support::node::uid(&ready);
    let targets = node.root().join("pods").join(&uid).join("volume-subpaths/e/main");
    assert_eq!(fs::read_dir(&targets).unwrap().count(), 2);
    node.kill_agent();
    node.start_agent();
    node.wait_ready("sub");
    node.remove("sub.json");
    node.wait_gone("sub");
    wait_until("no target", LONG, || !targets.exists());
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn mount_propagation_modes_take_effect() {
    let node = Node::start("propagate");
    let shared = node.shared();
    let mount = |args: &[&str]| {
        let done = Command::new("mount").args(args).arg(&shared).status().expect("mount is there");
        assert!(done.success(), "mount {args:?}");
    };
    mount(&["--bind", shared.to_str().unwrap()]);
    mount(&["--make-shared"]);
    let mut manifest = pod_with(
        "prop",
        FOREVER,
        json!([{"name": "h", "hostPath": {"path": shared}}]),
        json!([
            {"name": "h", "mountPath": "/both", "mountPropagation": "Bidirectional"},
            {"name": "h", "mountPath": "/in", "mountPropagation": "HostToContainer"},
            {"name": "h", "mountPath": "/none"},
            {"name": "h", "mountPath": "/ro", "readOnly": true, "recursiveReadOnly": "IfPossible"},
        ]),
    );
    manifest["spec"]["containers"][0]["securityContext"] = json!({"privileged": true});
    node.apply("prop.json", &manifest);
    let id = container_id(&node.wait_ready("prop"), "main");
    let table = node.exec(&id, &["cat", "/proc/self/mountinfo"]);
    let field = |path: &str, tag: &str| {
        let line = table.lines().find(|line| line.split(' ').nth(4) == Some(path)).unwrap_or_default();
        line.split(" - ").next().unwrap_or_default().contains(tag)
    };
    assert!(field("/both", "shared:"), "{table}");
    assert!(field("/in", "master:") && !field("/in", "shared:"), "{table}");
    assert!(!field("/none", "shared:") && !field("/none", "master:"), "{table}");
    let write = "touch /ro/x 2>/dev/null && echo written || echo read-only";
    assert_eq!(node.exec(&id, &["sh", "-c", write]), "read-only\n");
    node.remove("prop.json");
    node.wait_gone("prop");
    // The kernel takes a moment to release the mounts of the container.
    wait_until("umount", LONG, || {
        Command::new("umount").arg(&shared).status().expect("umount is there").success()
    });
    node.finish();
}
