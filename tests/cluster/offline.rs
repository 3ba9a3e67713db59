//! A node that starts its pods while the control plane is away.

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, condition, directory, text};
use crate::support::containerd::kill;
use crate::support::control_plane::{API_SERVER, ControlPlane, ControlPlaneOptions};
use crate::support::launch::skip_on_go_kubelet;
use crate::support::node::{FOREVER, LONG, busybox, pod};
use crate::support::process_usage::unmount_below;
use crate::support::wait::{wait_for, wait_until};

/// The pod of a name on the node `off`: `name-off`, with a ConfigMap, a Secret, and the token that
/// admission adds.
fn manifest(name: &str) -> Value {
    let mut main = busybox("main", FOREVER);
    main["env"] = json!([{"name": "PW", "valueFrom": {"secretKeyRef": {"name": "off-secret", "key": "pw"}}}]);
    main["volumeMounts"] = json!([{"name": "cm", "mountPath": "/cm"}]);
    let mut web = pod(&format!("{name}-off"), json!([main]));
    web["spec"]["volumes"] = json!([{"name": "cm", "configMap": {"name": "off-cm"}}]);
    web
}

/// The part of `coracle status` about the store; null while the agent does not respond.
fn offline(joined: &JoinedNode<'_>) -> Value {
    let output = joined.node.command(&["status", "-o", "json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    report["offline"].clone()
}

fn wait_phase(joined: &JoinedNode<'_>, phase: &str) {
    wait_until(&format!("the phase {phase}"), LIMIT, || offline(joined)["phase"] == phase);
}

// Runtimes: containerd 2.
#[test]
fn pods_start_alone_after_a_power_cut_and_continue_when_the_control_plane_is_back() {
    let test = "pods_start_alone_after_a_power_cut_and_continue_when_the_control_plane_is_back";
    if skip_on_go_kubelet(test, "it starts no pod of the API server without it") {
        return;
    }
    let plane = ControlPlane::start_with(
        &directory("off-cp"),
        &ControlPlaneOptions { scheduler: false, ..ControlPlaneOptions::default() },
    );
    plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
    plane.wait(&["configmap", "kube-root-ca.crt"], "made", LIMIT, |_| true);
    let kubeconfig = plane.node_kubeconfig("off").display().to_string();
    let flags = ["--kubeconfig", &kubeconfig, "--offline", "--offline-wait=2s"];
    let mut joined = JoinedNode::prepare_with(&plane, "off", json!({}), &flags).start_and_wait();
    let object = |kind: &str, name: &str, field: &str, data: Value| {
        json!({"apiVersion": "v1", "kind": kind,
        "metadata": {"name": name, "namespace": "default"}, field: data})
    };
    plane.apply(&object("ConfigMap", "off-cm", "data", json!({"text": "one"})));
    plane.apply(&object("Secret", "off-secret", "stringData", json!({"pw": "swordfish"})));
    joined.bind(&manifest("web"));
    joined.bind(&manifest("other"));
    let mut job = pod("job-off", json!([busybox("main", "exit 0")]));
    job["spec"]["restartPolicy"] = json!("Never");
    joined.bind(&job);
    joined.wait_ready("web-off");
    joined.wait_ready("other-off");
    joined.wait_pod("job-off", "done", |pod| pod["status"]["phase"] == "Succeeded");
    wait_until("the objects to be stored", LIMIT, || {
        let objects = &offline(&joined)["objects"];
        let count = |kind: &str| objects[kind].as_u64().unwrap_or(0);
        count("pod") == 3
            && count("podstatus") == 3
            && count("configmap") >= 2
            && count("token") >= 2
            && count("secret") == 1
            && count("services") > 0
    });
    let first = joined.node.running("web");

    // The agent writes what waits. The power cut ends all containers and mounts.
    joined.node.stop_agent();
    plane.kubectl(&["delete", "pod", "other-off", "--force", "--grace-period=0"]);
    plane.stop(API_SERVER);
    // A list leaves out tasks whose shim is slow.
    wait_until("all tasks to be dead", LONG, || {
        let tasks = joined.node.containerd.tasks();
        tasks.iter().filter(|task| task.running).for_each(|task| kill(task.pid, "KILL"));
        tasks.iter().all(|task| !task.running) && joined.node.running_ids().is_empty()
    });
    unmount_below(&joined.node.root());

    joined.node.start_agent();
    wait_phase(&joined, "alone");
    joined.node.wait_ready("web");
    joined.node.wait_ready("other");
    let alone = wait_for("a container after the power cut", LIMIT, || {
        let running = joined.node.running("web");
        (running.contains_key("main") && running != first).then_some(running)
    });
    let id = alone["main"][0].clone();
    let sh = |joined: &JoinedNode<'_>, script: &str| joined.node.exec(&id, &["sh", "-c", script]);
    assert_eq!(sh(&joined, "cat /cm/text; echo -$PW"), "one-swordfish\n");
    let account = "/var/run/secrets/kubernetes.io/serviceaccount";
    assert_eq!(sh(&joined, &format!("ls {account}")), "ca.crt\nnamespace\ntoken\n");
    assert_eq!(sh(&joined, &format!("tr -dc . < {account}/token")), "..", "a token has three parts");
    assert!(joined.node.running("job").is_empty());

    plane.resume(API_SERVER);
    wait_phase(&joined, "online");
    joined.node.wait_gone("other");
    joined.wait_pod("web-off", "reported with its new container", |pod| {
        condition(pod, "Ready") == "True"
            && text(pod, "/status/containerStatuses/0/containerID").ends_with(&id)
    });
    joined.wait_node_ready();
    assert_eq!(joined.node.running("web"), alone, "no container restarts");
    let job = plane.get(&["pod", "job-off"]).unwrap_or_default();
    assert_eq!(text(&job, "/status/phase"), "Succeeded");
    assert!(joined.node.running("job").is_empty());
    plane.kubectl(&["patch", "configmap", "off-cm", "-p", r#"{"data":{"text":"two"}}"#]);
    wait_until("the edit to arrive", LIMIT, || sh(&joined, "cat /cm/text") == "two");
    joined.finish(&["web-off", "job-off"]);
}
