//! Manifests that are added, edited, broken and removed.

use std::fs;
use std::time::Duration;

use serde_json::json;

use crate::support::node::{
    FOREVER, LONG, Node, busybox, container_id, is_ready, pod, restarts, simple, uid,
};
use crate::support::wait::{holds_for, wait_until};

/// Long enough for inotify, a sync and a wrong restart.
const A_WHILE: Duration = Duration::from_secs(4);

// Runtimes: containerd 1, containerd 2.
#[test]
fn two_containers_share_an_empty_dir() {
    let node = Node::start("share");
    let mut manifest = pod(
        "share",
        json!([
            busybox("writer", &format!("echo hello > /data/greeting; {FOREVER}")),
            busybox(
                "reader",
                &format!("until [ -s /data/greeting ]; do sleep 0.1; done; cat /data/greeting; {FOREVER}")
            ),
        ]),
    );
    manifest["spec"]["volumes"] =
        json!([{"name": "data", "emptyDir": {}}, {"name": "fast", "emptyDir": {"medium": "Memory"}}]);
    for index in 0..2 {
        manifest["spec"]["containers"][index]["volumeMounts"] =
            json!([{"name": "data", "mountPath": "/data"}, {"name": "fast", "mountPath": "/fast"}]);
    }
    node.apply("share.json", &manifest);
    let ready = node.wait_ready("share");
    wait_until("the log of the reader", LONG, || {
        node.command(&["logs", "share-e2e", "-c", "reader"]).stdout.starts_with(b"hello")
    });
    let reader = container_id(&ready, "reader");
    assert_eq!(node.exec(&reader, &["cat", "/data/greeting"]), "hello\n");
    assert!(
        node.exec(&reader, &["cat", "/proc/mounts"]).contains("tmpfs /fast "),
        "medium Memory is a tmpfs"
    );
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn an_edit_replaces_the_pod() {
    let node = Node::start("edit");
    node.apply("web.json", &simple("web"));
    let before = node.wait_ready("web");
    let mut edited = simple("web");
    edited["spec"]["containers"][0]["env"] = json!([{"name": "COLOR", "value": "green"}]);
    node.apply("web.json", &edited);
    let after = node.wait_pod("web", "replaced", LONG, |now| uid(now) != uid(&before) && is_ready(now));
    assert_eq!(node.exec(&container_id(&after, "main"), &["sh", "-c", "echo $COLOR"]), "green\n");
    wait_until("one container in one sandbox", LONG, || {
        node.running("web").values().flatten().count() == 1 && node.running_sandboxes("web").len() == 1
    });
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn renamed_manifest_file_leaves_one_pod() {
    let node = Node::start("rename");
    node.apply("a.json", &simple("web"));
    let before = node.wait_ready("web");
    fs::rename(node.manifest_path("a.json"), node.manifest_path("b.json")).expect("the rename succeeds");
    // Another file is another pod, of the same name.
    node.wait_pod("web", "replaced", LONG, |now| uid(now) != uid(&before) && is_ready(now));
    wait_until("one container", LONG, || node.running("web").values().flatten().count() == 1);
    holds_for("the pod stays", A_WHILE, || node.pod("web").is_some());
    assert_eq!(node.running("web").values().flatten().count(), 1);
    node.remove("b.json");
    node.wait_gone("web");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn invalid_edit_keeps_the_pod_and_is_reported() {
    let node = Node::start("broken");
    let good = simple("web");
    node.apply("web.json", &good);
    let before = node.wait_ready("web");
    let id = container_id(&before, "main");

    node.write("web.json", "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\nspec:\n  containers: oops\n");
    wait_until("status to name the file", LONG, || {
        let output = node.command(&["status"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.contains("web.json") && text.contains("containers")
    });
    wait_until("the check of the sources to name the file", LONG, || {
        let (code, text) = node.health("/healthz/sources");
        code != 200 && text.contains("web.json")
    });
    wait_until("an event to name the file", LONG, || node.cli(&["events"]).contains("web.json"));
    holds_for("the container keeps running", A_WHILE, || {
        node.pod("web").is_some_and(|pod| container_id(&pod, "main") == id && is_ready(&pod))
    });

    // Repaired with the old content: the container is not restarted.
    node.apply("web.json", &good);
    wait_until("the problem to be gone", LONG, || node.health("/healthz/sources").0 == 200);
    let repaired = node.wait_ready("web");
    assert_eq!((container_id(&repaired, "main"), restarts(&repaired, "main")), (id, 0));

    // Broken again and repaired with other content: replaced.
    node.write("web.json", "{\"apiVersion\": \"v1\", \"kind\": \"Po");
    wait_until("the problem to be back", LONG, || node.health("/healthz/sources").1.contains("web.json"));
    let mut other = simple("web");
    other["metadata"]["labels"] = json!({"edition": "second"});
    node.apply("web.json", &other);
    node.wait_pod("web", "replaced", LONG, |now| uid(now) != uid(&before) && is_ready(now));
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn manifest_broken_during_agent_downtime_keeps_its_pod() {
    let mut node = Node::start("downbroken");
    node.apply("web.json", &simple("web"));
    node.apply("other.json", &simple("other"));
    let before = node.wait_ready("web");
    let id = container_id(&before, "main");
    node.wait_ready("other");
    let records = node.root().join("sources");
    let count = || fs::read_dir(&records).map_or(0, |entries| entries.count());
    wait_until("both manifests to be recorded", LONG, || count() == 2);

    for kill in [false, true] {
        if kill {
            node.kill_agent()
        } else {
            node.stop_agent()
        }
        node.write("web.json", "{\"apiVersion\": \"v1\", \"kind\": \"Po");
        // Not healthy: a source has a problem.
        node.launch_agent();
        wait_until("status to name the file", LONG, || {
            let text = String::from_utf8_lossy(&node.command(&["status"]).stdout).into_owned();
            text.contains("web.json") && text.contains("last good version")
        });
        let after = node.wait_ready("web");
        assert_eq!((uid(&after), container_id(&after, "main")), (uid(&before), id.clone()));
        holds_for("the container keeps running", A_WHILE, || {
            node.pod("web").is_some_and(|pod| container_id(&pod, "main") == id && is_ready(&pod))
        });
        assert_eq!(restarts(&node.wait_ready("web"), "main"), 0);
        assert_eq!(node.running("web").values().flatten().collect::<Vec<_>>(), [&id]);
    }

    // A manifest that was removed while the agent was down removes its pod, though it was broken before.
    node.write("other.json", "");
    wait_until("the second problem", LONG, || node.health("/healthz/sources").1.contains("other.json"));
    node.stop_agent();
    node.remove("other.json");
    node.launch_agent();
    node.wait_gone("other");

    let mut repaired = simple("web");
    repaired["metadata"]["labels"] = json!({"edition": "second"});
    node.apply("web.json", &repaired);
    node.wait_pod("web", "replaced", LONG, |now| uid(now) != uid(&before) && is_ready(now));
    node.remove("web.json");
    node.wait_gone("web");
    wait_until("no record to be left", LONG, || count() == 0);
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn deleted_manifest_removes_all_resources_of_its_pod() {
    let node = Node::start("delete");
    let mut manifest = simple("web");
    manifest["spec"]["volumes"] = json!([{"name": "fast", "emptyDir": {"medium": "Memory"}}]);
    manifest["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "fast", "mountPath": "/fast"}]);
    node.apply("web.json", &manifest);
    let before = node.wait_ready("web");
    let dir = node.root().join("pods").join(uid(&before));
    assert!(dir.is_dir(), "{} is the pod's directory", dir.display());
    let logs = node.logs().join(format!("default_web-e2e_{}", uid(&before)));
    assert!(logs.join("main/0.log").exists(), "{} has its logs", logs.display());
    node.remove("web.json");
    node.wait_gone("web");
    wait_until("the pod's directory to be gone", LONG, || !dir.exists());
    // Two rounds of garbage collection, of a minute each.
    wait_until("the pod's logs to be gone", Duration::from_secs(240), || !logs.exists());
    node.finish_with_empty_runtime();
}

// Runtimes: containerd 2.
#[test]
fn unusual_files_in_the_manifest_directory_are_harmless() {
    let node = Node::start("odd");
    node.apply("web.json", &simple("web"));
    let id = container_id(&node.wait_ready("web"), "main");

    node.write("empty.yaml", "");
    node.write("half.json", "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"na");
    node.write(
        "binary.yaml",
        (0..4096u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect::<Vec<u8>>(),
    );
    node.write("huge.yaml", "# nothing but comment\n".repeat(11 * 1024 * 1024 / 22));
    let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x]\n");
    for level in 1..12 {
        let before = format!("*a{}", level - 1);
        bomb += &format!("a{level}: &a{level} [{}]\n", vec![before; 9].join(","));
    }
    node.write("bomb.yaml", bomb);
    node.write("list.yaml", "- one\n- two\n");
    node.write("scalar.yaml", "42\n");
    node.write("deep.json", "[".repeat(100_000));
    node.write("service.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n");
    fs::create_dir(node.manifest_path("directory.yaml")).expect("a directory can be made");

    // A valid manifest among them still starts, and both pods keep running.
    node.apply("good.json", &simple("good"));
    node.wait_ready("good");
    for file in ["half.json", "binary.yaml", "huge.yaml", "bomb.yaml"] {
        wait_until(&format!("status to name {file}"), LONG, || node.cli(&["status"]).contains(file));
    }
    holds_for("the first pod runs on", A_WHILE, || {
        node.pod("web").is_some_and(|pod| container_id(&pod, "main") == id && is_ready(&pod))
    });
    fs::remove_dir(node.manifest_path("directory.yaml")).expect("the directory is empty");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn documents_of_one_file_become_separate_pods() {
    let node = Node::start("docs");
    node.write("both.yaml", format!("---\n{}\n---\n{}\n", simple("one"), simple("two")));
    node.wait_ready("one");
    node.wait_ready("two");
    node.write("both.yaml", simple("two").to_string());
    node.wait_gone("one");
    node.wait_ready("two");
    node.finish();
}
