//! A node is drained, and a taint evicts its pods.

use std::fs;

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, condition, directory, pod, text};
use crate::support::control_plane::{ControlPlane, ControlPlaneOptions};
use crate::support::node::{FOREVER, busybox, simple};
use crate::support::wait::{holds_for, wait_until};

/// A container that takes a moment to end, and writes that it ended to the volume `out`.
fn graceful(name: &str) -> Value {
    let script =
        format!("trap 'sleep 0.5; echo ended > /out/{name}; exit 0' TERM; while :; do sleep 0.1; done");
    let mut container = busybox("main", &script);
    container["volumeMounts"] = json!([{"name": "out", "mountPath": "/out"}]);
    container
}

/// What pods of a template on the node `drain` have.
fn spec(name: &str, out: &str) -> Value {
    json!({
        "nodeSelector": {"kubernetes.io/hostname": "drain"},
        "terminationGracePeriodSeconds": 60,
        "volumes": [{"name": "out", "hostPath": {"path": out, "type": "Directory"}}],
        "containers": [graceful(name)],
    })
}

fn labeled_pods(joined: &JoinedNode<'_>, label: &str) -> Vec<Value> {
    let list = joined.plane.get(&["pods", "-l", &format!("app={label}")]).unwrap_or_default();
    list["items"].as_array().cloned().unwrap_or_default()
}

fn ready(pods: &[Value], count: usize) -> bool {
    pods.len() == count && pods.iter().all(|pod| condition(pod, "Ready") == "True")
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn drained_node_keeps_only_its_own_pods() {
    let joined = JoinedNode::start("drain");
    let out = joined.node.shared().join("out");
    fs::create_dir(&out).expect("a directory for the pods");
    let place = out.display().to_string();
    let template = |label: &str| json!({"metadata": {"labels": {"app": label}}, "spec": spec(label, &place)});
    let meta = |name: &str| json!({"name": name, "namespace": "default"});
    joined.plane.apply(&json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": meta("drain-web"),
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "drain-web"}}, "template": template("drain-web")},
    }));
    joined.plane.apply(&json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta("drain-each"),
        "spec": {"selector": {"matchLabels": {"app": "drain-each"}}, "template": template("drain-each")},
    }));
    let mut bare = pod("drain-bare", json!([]));
    bare["spec"] = spec("drain-bare", &place);
    joined.bind(&bare);
    joined.node.apply("own.json", &simple("own"));
    wait_until("all pods to be ready", LIMIT, || {
        ready(&labeled_pods(&joined, "drain-web"), 2) && ready(&labeled_pods(&joined, "drain-each"), 1)
    });
    joined.wait_ready("drain-bare");
    joined.wait_ready("own-drain");
    let old: Vec<Value> =
        labeled_pods(&joined, "drain-web").iter().map(|pod| pod["metadata"]["uid"].clone()).collect();
    assert_eq!(joined.node.running_ids().len(), 5);

    // kubectl waits until the pods are deleted, and by then none of their containers runs.
    let args = ["drain", "drain", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s"];
    let refused = joined.plane.try_kubectl(&args, "");
    assert!(!refused.status.success(), "a pod without a controller is not evicted without force");
    joined.plane.kubectl(&[&args[..], &["--force"]].concat());
    assert_eq!(joined.node.running_ids().len(), 2, "the daemon's and the static pod stay");
    for name in ["drain-web", "drain-bare"] {
        assert_eq!(fs::read_to_string(out.join(name)).unwrap_or_default(), "ended\n", "{name} had its time");
    }
    assert!(!out.join("drain-each").exists());
    assert!(joined.plane.get(&["pod", "drain-bare"]).is_none());
    assert!(ready(&labeled_pods(&joined, "drain-each"), 1));
    let has_event =
        |reason: &str| joined.events("drain").iter().any(|(event_reason, _)| event_reason == reason);
    wait_until("the node's event", LIMIT, || has_event("NodeNotSchedulable"));

    joined.plane.kubectl(&["uncordon", "drain"]);
    wait_until("the pods to run again", LIMIT, || {
        let pods = labeled_pods(&joined, "drain-web");
        ready(&pods, 2) && pods.iter().all(|pod| !old.contains(&pod["metadata"]["uid"]))
    });
    wait_until("the node's other event", LIMIT, || has_event("NodeSchedulable"));
    for set in ["replicaset/drain-web", "daemonset/drain-each"] {
        joined.plane.kubectl(&["delete", set, "--cascade=foreground", "--timeout=180s"]);
    }
    joined.node.remove("own.json");
    joined.wait_gone("own-drain");
    joined.finish(&[]);
}

/// Only the node itself evicts here: there is no controller.
// Runtimes: containerd 2.
#[test]
fn no_execute_taint_evicts_pods_when_the_agent_starts() {
    let plane = ControlPlane::start_with(&directory("taint-cp"), &ControlPlaneOptions::bare());
    let mut joined = JoinedNode::prepare(&plane, "taint", json!({})).start_and_wait();
    joined.bind(&pod("taint-web", json!([busybox("main", FOREVER)])));
    let mut tolerant = pod("taint-stays", json!([busybox("main", FOREVER)]));
    tolerant["spec"]["tolerations"] = json!([{"key": "example.org/work", "operator": "Exists"}]);
    joined.bind(&tolerant);
    joined.node.apply("own.json", &simple("own"));
    for name in ["taint-web", "taint-stays", "own-taint"] {
        joined.wait_ready(name);
    }
    plane.kubectl(&["taint", "node", "taint", "example.org/work=now:NoExecute"]);
    plane.wait(&["node", "taint"], "tainted", LIMIT, |node| node["spec"]["taints"].is_array());
    let running = joined.node.running_ids();
    holds_for("the agent evicts no pod", std::time::Duration::from_secs(2), || {
        joined.node.running_ids() == running
    });

    joined.node.stop_agent();
    joined.node.start_agent();
    let failed = joined.wait_pod("taint-web", "evicted", |pod| text(pod, "/status/phase") == "Failed");
    assert_eq!(text(&failed, "/status/reason"), "TaintToleration", "{}", failed["status"]);
    for name in ["taint-stays", "own-taint"] {
        let stays = joined.wait_ready(name);
        assert_eq!(stays["status"]["containerStatuses"][0]["restartCount"], json!(0));
    }
    wait_until("its container to end", LIMIT, || joined.node.running_ids().len() == 2);
    assert!(joined.node.running_ids().iter().all(|id| running.contains(id)));
    joined.node.remove("own.json");
    joined.finish(&["taint-web", "taint-stays"]);
}
