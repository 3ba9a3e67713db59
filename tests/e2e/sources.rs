//! From manifests to pods: names and annotations of static pods, edits, fixed UIDs, and pods
//! without a manifest.

use std::time::Duration;

use coracle::transport::generated::{MessageField, runtime as rt};
use serde_json::json;

use crate::support::node::{
    FOREVER, LONG, Node, STAMP, busybox, container_id, is_ready, pod, restarts, simple, uid,
};
use crate::support::wait::{holds_for, wait_until};

// Runtimes: containerd 2.
#[test]
fn static_pod_gets_name_suffix_and_annotations() {
    let node = Node::start_as("marked", "Node-1", json!({}));
    node.write(".hidden.yaml", simple("hidden").to_string());
    let mut account = simple("account");
    account["spec"]["serviceAccountName"] = json!("robot");
    node.apply("account.json", &account);
    node.apply("a.json", &simple("web"));
    let pod = node.wait_ready("web");
    assert_eq!(pod.metadata.name.as_deref(), Some("web-node-1"));
    let uid = uid(&pod);
    assert!(
        uid.len() == 32 && uid.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)),
        "{uid}"
    );
    let marks = pod.metadata.annotations.clone().unwrap_or_default();
    assert_eq!(marks.get("kubernetes.io/config.hash"), Some(&uid));
    assert_eq!(marks.get("kubernetes.io/config.source").map(String::as_str), Some("file"));
    let seen = marks.get("kubernetes.io/config.seen").cloned().unwrap_or_default();
    let fraction =
        seen.split_once('.').map_or(0, |(_, rest)| rest.bytes().take_while(u8::is_ascii_digit).count());
    assert_eq!(fraction, 9, "{seen}");
    let spec = pod.spec.clone().unwrap_or_default();
    assert_eq!(spec.node_name.as_deref(), Some("node-1"));
    assert!(
        spec.tolerations.iter().flatten().any(|toleration| toleration
            .key
            .as_deref()
            .unwrap_or("")
            .is_empty()
            && toleration.operator.as_deref() == Some("Exists")
            && toleration.effect.as_deref() == Some("NoExecute")),
        "{:?}",
        spec.tolerations
    );
    wait_until("the refused manifest to be named", LONG, || {
        let output = node.command(&["status"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.contains("account.json") && text.contains("static pods may not reference serviceaccounts")
    });
    let names: Vec<_> = node.pods().into_iter().filter_map(|pod| pod.metadata.name).collect();
    assert_eq!(names, ["web-node-1"], "neither the hidden nor the refused one");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn edited_label_stops_the_old_pod_before_the_new_one_starts() {
    let node = Node::start("label");
    let script = format!(
        "note() {{ echo \"$1 $EDITION $({STAMP})\" >> /out/log; }}; \
         trap 'sleep 1; note end; exit 0' TERM; note start; while :; do sleep 0.1; done"
    );
    let mut manifest = pod("web", json!([busybox("main", &script)]));
    // Its container ends by itself, also on a busy machine.
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(75);
    manifest["spec"]["containers"][0]["env"] = json!([
        {"name": "EDITION", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['edition']"}}}
    ]);
    manifest["metadata"]["labels"] = json!({"edition": "first"});
    let manifest = node.with_out(manifest);
    node.apply("web.json", &manifest);
    let before = node.wait_ready("web");
    wait_until("the first note", LONG, || node.out("log").lines().count() == 1);
    let mut edited = manifest;
    edited["metadata"]["labels"] = json!({"edition": "second"});
    node.apply("web.json", &edited);
    node.wait_pod("web", "replaced", LONG, |now| uid(now) != uid(&before) && is_ready(now));
    wait_until("three notes", LONG, || node.out("log").lines().count() >= 3);
    let log = node.out("log");
    let words: Vec<&str> =
        log.lines().filter_map(|line| line.rsplit_once(' ')).map(|(words, _)| words).collect();
    assert_eq!(words, ["start first", "end first", "start second"], "{log}");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn unknown_pod_is_stopped_though_no_manifest_is_readable() {
    let missing = Node::base("unknown").join("nowhere");
    let node = Node::start_with("unknown", json!({"staticPodPath": missing}));
    let (runtime, _) = node.cri();
    let labels = |more: &[(&str, &str)]| {
        let known = [
            ("io.kubernetes.pod.name", "stranger"),
            ("io.kubernetes.pod.namespace", "default"),
            ("io.kubernetes.pod.uid", "0000-stranger"),
        ];
        known.iter().chain(more).map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let config = rt::PodSandboxConfig {
        metadata: MessageField::some(rt::PodSandboxMetadata {
            name: "stranger".to_owned(),
            uid: "0000-stranger".to_owned(),
            namespace: "default".to_owned(),
            ..Default::default()
        }),
        labels: labels(&[]),
        log_directory: node.shared().display().to_string(),
        linux: MessageField::some(rt::LinuxPodSandboxConfig::default()),
        ..Default::default()
    };
    let sandbox = runtime.run_pod_sandbox(config.clone(), "").expect("RunPodSandbox");
    let container = rt::ContainerConfig {
        metadata: MessageField::some(rt::ContainerMetadata { name: "main".to_owned(), ..Default::default() }),
        image: MessageField::some(rt::ImageSpec {
            image: "localhost/busybox:1".to_owned(),
            ..Default::default()
        }),
        command: ["sh", "-c", FOREVER].map(str::to_owned).into(),
        log_path: "main.log".to_owned(),
        labels: labels(&[("io.kubernetes.container.name", "main")]),
        linux: MessageField::some(rt::LinuxContainerConfig::default()),
        ..Default::default()
    };
    // The agent may stop the sandbox before the container is in it: that is a stop as well.
    if let Ok(id) = runtime.create_container(&sandbox, container, &config) {
        let _ = runtime.start_container(&id);
    }
    wait_until("the unknown pod to be stopped", LONG, || {
        node.containerd.tasks().iter().all(|task| !task.running)
    });
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn pod_with_fixed_uid_restarts_only_for_a_new_image() {
    let node = Node::start("fixed");
    node.containerd.ctr(&["images", "tag", "localhost/busybox:1", "localhost/other:1"]);
    let mut manifest = pod("web", json!([busybox("main", FOREVER), busybox("side", FOREVER)]));
    manifest["metadata"]["uid"] = json!("fixed-0001");
    node.apply("web.json", &manifest);
    let before = node.wait_ready("web");
    assert_eq!(uid(&before), "fixed-0001");
    let same = |now: &coracle::model::api::Pod, name: &str| {
        container_id(now, name) == container_id(&before, name) && restarts(now, name) == 0
    };

    manifest["spec"]["containers"][0]["env"] = json!([{"name": "COLOR", "value": "green"}]);
    node.apply("web.json", &manifest);
    node.wait_pod("web", "shown with its new environment", LONG, |now| {
        now.spec.as_ref().and_then(|spec| spec.containers.first()?.env.as_ref()).is_some()
    });
    holds_for("an environment restarts nothing", Duration::from_secs(3), || {
        node.pod("web").is_some_and(|now| same(&now, "main") && same(&now, "side"))
    });

    manifest["spec"]["containers"][0]["image"] = json!("localhost/other:1");
    node.apply("web.json", &manifest);
    let after = node.wait_pod("web", "restarted with the new image", LONG, |now| {
        restarts(now, "main") == 1 && is_ready(now)
    });
    assert!(same(&after, "side"), "the other container runs on");
    assert_eq!(uid(&after), "fixed-0001");
    node.wait_event("web", "Killing", "");
    let killing = node.events_with_reason("web", "Killing");
    assert_eq!(killing.len(), 1, "{killing:#?}");
    assert!(killing[0].message.starts_with("Container main definition changed"), "{killing:#?}");
    assert_eq!(node.running_sandboxes("web").len(), 1);
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn returning_fixed_uid_waits_for_the_previous_incarnation() {
    let node = Node::start("comeback");
    let script = format!(
        "note() {{ echo \"$1 $({STAMP})\" >> /out/log; }}; \
         trap 'note term; sleep 2; note end; exit 0' TERM; note start; while :; do sleep 0.1; done"
    );
    let mut manifest = pod("web", json!([busybox("main", &script)]));
    manifest["metadata"]["uid"] = json!("fixed-0002");
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(75);
    let manifest = node.with_out(manifest);
    node.apply("web.json", &manifest);
    wait_until("the first start", LONG, || node.out("log").starts_with("start"));
    node.remove("web.json");
    wait_until("the end to begin", LONG, || node.out("log").contains("term"));
    node.apply("web.json", &manifest);
    wait_until("the second start", LONG, || node.out("log").lines().count() >= 4);
    let log = node.out("log");
    let words: Vec<&str> = log.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(words, ["start", "term", "end", "start"], "never two at once: {log}");
    assert_eq!(uid(&node.wait_ready("web")), "fixed-0002");
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn manifest_removed_and_rewritten_restarts_its_pod() {
    let node = Node::start("rewritten");
    let script = format!(
        "note() {{ echo \"$1 $({STAMP})\" >> /out/log; }}; \
         trap 'note end; exit 0' TERM; note start; while :; do sleep 0.1; done"
    );
    let mut manifest = node.with_out(pod("web", json!([busybox("main", &script)])));
    manifest["spec"]["terminationGracePeriodSeconds"] = json!(75);
    node.apply("web.json", &manifest);
    let before = node.wait_ready("web");
    wait_until("the first start", LONG, || node.out("log").starts_with("start"));
    let path = node.manifest_path("web.json");
    let words = || -> Vec<String> {
        let log = node.out("log");
        log.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
    };

    // Saved in place, and replaced by a rename.
    let text = std::fs::read(&path).unwrap();
    std::fs::write(&path, &text).unwrap();
    node.apply("web.json", &manifest);
    node.apply("second.json", &simple("second"));
    node.wait_ready("second");
    assert_eq!(words(), ["start"]);

    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, &text).unwrap();
    let after = node.wait_pod("web", "restarted", LONG, |now| is_ready(now) && restarts(now, "main") == 1);
    assert_eq!(uid(&after), uid(&before));
    wait_until("the second start", LONG, || words().len() >= 3);
    assert_eq!(words(), ["start", "end", "start"], "never two at once");
    assert_eq!(node.running_sandboxes("web").len(), 1);
    node.finish();
}
