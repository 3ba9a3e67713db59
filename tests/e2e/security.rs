//! Permissions of the first process of a container, as the kernel shows them.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value, json};

use crate::support::fake_node;
use crate::support::node::{
    FOREVER, LONG, Node, busybox, container, container_id, is_ready, pod, simple, waiting_reason,
};
use crate::support::wait::wait_until;

/// The fields of /proc/PID/status of a pod's container `main`.
fn status(node: &Node, name: &str, container: &str) -> BTreeMap<String, String> {
    let ready = node.wait_ready(name);
    let pid = node.process(&container_id(&ready, container));
    // It counts as running a moment before runc executes the container's program.
    wait_until("the container's program", LONG, || {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"sh\0-c\0"))
    });
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(key, value)| (key.to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect()
}

fn pod_with(name: &str, security: Value) -> Value {
    let mut manifest = simple(name);
    manifest["spec"]["containers"][0]["securityContext"] = security;
    manifest
}

// Runtimes: containerd 2, CRI-O.
#[test]
fn users_and_groups_are_those_of_the_security_context() {
    let node = Node::start("users");
    let mut manifest = pod("users", json!([busybox("main", FOREVER), busybox("other", FOREVER)]));
    manifest["spec"]["securityContext"] =
        json!({"runAsUser": 1000, "runAsGroup": 3000, "fsGroup": 2000, "supplementalGroups": [4000]});
    manifest["spec"]["containers"][1]["securityContext"] = json!({"runAsUser": 1001, "runAsNonRoot": true});
    node.apply("users.json", &manifest);
    node.apply("root.json", &simple("root"));

    let main = status(&node, "users", "main");
    assert_eq!((main["Uid"].as_str(), main["Gid"].as_str()), ("1000 1000 1000 1000", "3000 3000 3000 3000"));
    let groups: Vec<&str> = main["Groups"].split(' ').collect();
    assert!(groups.contains(&"2000") && groups.contains(&"4000"), "{groups:?}");
    assert_eq!(main["CapEff"], "0000000000000000", "no user but root has capabilities");
    let other = status(&node, "users", "other");
    assert_eq!(
        (other["Uid"].as_str(), other["Gid"].as_str()),
        ("1001 1001 1001 1001", "3000 3000 3000 3000")
    );
    assert_eq!(status(&node, "root", "main")["Uid"], "0 0 0 0");
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn capabilities_and_profiles_are_those_of_the_security_context() {
    let node = Node::start("caps");
    let profiles = node.root().join("seccomp");
    fs::create_dir_all(&profiles).expect("the profiles' directory can be made");
    let profile = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
    ]});
    fs::write(profiles.join("nodirs.json"), profile.to_string()).expect("the profile is written");

    let mut manifest = pod(
        "many",
        json!([
            busybox("plain", FOREVER),
            busybox("one", FOREVER),
            busybox("all", FOREVER),
            busybox("filtered", FOREVER),
            busybox("own", FOREVER),
            busybox("sealed", FOREVER),
        ]),
    );
    let contexts = [
        json!({}),
        json!({"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}),
        json!({"privileged": true}),
        json!({"seccompProfile": {"type": "RuntimeDefault"}}),
        json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "nodirs.json"}}),
        json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true}),
    ];
    for (index, context) in contexts.into_iter().enumerate() {
        manifest["spec"]["containers"][index]["securityContext"] = context;
    }
    node.apply("many.json", &manifest);
    let ready = node.wait_ready("many");
    let status_of = |name: &str| status(&node, "many", name);

    let plain = status_of("plain");
    assert_eq!(plain["CapEff"], "00000000a80425fb", "the runtime's default set");
    assert_eq!((plain["Seccomp"].as_str(), plain["NoNewPrivs"].as_str()), ("0", "0"));
    assert_eq!(status_of("one")["CapEff"], "0000000000000400");
    assert_eq!(status_of("all")["CapEff"], status_of("all")["CapBnd"]);
    assert_ne!(status_of("all")["CapEff"], plain["CapEff"]);
    assert_eq!(status_of("filtered")["Seccomp"], "2");
    assert_eq!(status_of("own")["Seccomp"], "2");
    assert_eq!(status_of("sealed")["NoNewPrivs"], "1");

    let run = |name: &str, script: &str| node.exec(&container_id(&ready, name), &["sh", "-c", script]);
    assert_eq!(run("own", "mkdir /tmp/d 2>/dev/null && echo made || echo refused"), "refused\n");
    assert_eq!(run("filtered", "mkdir /tmp/d 2>/dev/null && echo made || echo refused"), "made\n");
    assert_eq!(run("sealed", "touch /x 2>/dev/null && echo made || echo refused"), "refused\n");
    assert_eq!(run("plain", "touch /x 2>/dev/null && echo made || echo refused"), "made\n");
    // Masked and read-only paths of the default procMount, and neither for a privileged one.
    assert_eq!(run("plain", "cat /proc/timer_list 2>/dev/null | wc -c"), "0\n");
    assert_eq!(
        run("plain", "echo 1 2>/dev/null > /proc/sys/net/ipv4/ip_forward && echo set || echo refused"),
        "refused\n"
    );
    node.finish();
}

// Runtimes: containerd 2, CRI-O.
#[test]
fn oom_scores_follow_the_qos_class() {
    let node = Node::start("oom");
    node.apply("best.json", &simple("best"));
    let mut burstable = simple("burst");
    burstable["spec"]["containers"][0]["resources"] = json!({"requests": {"memory": "64Mi"}});
    node.apply("burst.json", &burstable);
    let score = |name: &str| -> i32 {
        let pid = node.process(&container_id(&node.wait_ready(name), "main"));
        let text = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("the process runs");
        text.trim().parse().expect("a number")
    };
    assert_eq!(score("best"), 1000);
    assert!((3..=999).contains(&score("burst")), "{}", score("burst"));
    node.finish();
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn user_namespace_is_created_or_refused_with_a_reason() {
    let node = Node::start("userns");
    let (runtime, _) = node.cri();
    let can = runtime
        .status()
        .expect("Status")
        .handlers
        .iter()
        .any(|handler| handler.name.is_empty() && handler.user_namespaces);
    let mut manifest = simple("inside");
    manifest["spec"]["hostUsers"] = json!(false);
    node.apply("inside.json", &manifest);
    if can {
        let ready = node.wait_ready("inside");
        let pid = node.process(&container_id(&ready, "main"));
        let map = fs::read_to_string(format!("/proc/{pid}/uid_map")).expect("the process runs");
        let numbers: Vec<u64> = map.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        assert_eq!((numbers.first(), numbers.get(2)), (Some(&0), Some(&65536)), "{map}");
        assert!(numbers.get(1).is_some_and(|start| *start >= 65536), "{map}");
    } else {
        let event = node.wait_event("inside", "FailedCreatePodSandBox", "can't set `spec.hostUsers: false`");
        assert!(event.message.contains("runtime does not support user namespaces"), "{}", event.message);
        assert!(node.running_sandboxes("inside").is_empty());
    }
    node.finish();
}

// Runtimes: containerd 2.
#[test]
fn run_as_non_root_refuses_root_without_a_crash() {
    let node = Node::start("nonroot");
    node.apply("image.json", &pod_with("image", json!({"runAsNonRoot": true})));
    node.apply("asked.json", &pod_with("asked", json!({"runAsNonRoot": true, "runAsUser": 0})));
    node.apply("fine.json", &pod_with("fine", json!({"runAsNonRoot": true, "runAsUser": 7})));
    for (name, words) in [
        ("image", "container has runAsNonRoot and image will run as root"),
        ("asked", "container's runAsUser breaks non-root policy"),
    ] {
        let seen = node.wait_pod(name, "refused", LONG, |pod| {
            !waiting_reason(pod, "main").is_empty() && waiting_reason(pod, "main") != "ContainerCreating"
        });
        assert_eq!(waiting_reason(&seen, "main"), "CreateContainerConfigError");
        assert!(crate::support::node::waiting_message(&seen, "main").starts_with(words), "{name}");
        assert!(node.events_with_reason(name, "BackOff").is_empty(), "{name} is no crash");
        assert_eq!(container(&seen, "main").map(|status| status.restart_count), Some(0));
    }
    assert!(is_ready(&node.wait_ready("fine")));
    node.finish();
}

/// It runs the node's own command, as root, with all of the node's files but read-only.
// Runtimes: containerd 1, containerd 2.
#[test]
fn container_with_the_local_socket_is_denied_access() {
    let node = Node::start("socketed");
    let script = format!(
        "chroot /host {} --local-socket {} pods >/out/said 2>&1; echo \"code $?\" >>/out/said; {FOREVER}",
        fake_node::binary().display(),
        node.local_socket().display()
    );
    let mut manifest = node.with_out(pod("thief", json!([busybox("main", &script)])));
    let spec = &mut manifest["spec"];
    let host = json!({"name": "host", "hostPath": {"path": "/"}});
    let mount = json!({"name": "host", "mountPath": "/host", "readOnly": true});
    spec["volumes"].as_array_mut().unwrap().push(host);
    spec["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
    node.apply("thief.json", &manifest);
    node.wait_ready("thief");
    wait_until("the end of the command", LONG, || node.out("said").contains("code "));
    let output = node.out("said");
    assert!(output.contains("own mount and PID namespaces only") && output.ends_with("code 1\n"), "{output}");
    assert!(node.cli(&["pods"]).contains("thief"));
    node.finish();
}
