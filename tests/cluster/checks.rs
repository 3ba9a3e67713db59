//! Observable behaviour that needs an API server; `tests/e2e/checks.txt` names these tests.
//! Few nodes, with many checks on each, because a start costs seconds.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, condition, pod, text};
use crate::support::launch::{runs_go_kubelet, skip_on_go_kubelet};
use crate::support::node::{FOREVER, busybox, simple};
use crate::support::wait::{holds_for, wait_for, wait_until};

/// Keeps the object of a pod after its end, so that its last phase can be read.
const HELD: &str = "example.org/held";

fn pod_with_finalizer(name: &str, script: &str) -> Value {
    let mut pod = pod(name, json!([busybox("main", script)]));
    pod["metadata"]["finalizers"] = json!([HELD]);
    pod
}

fn delete(joined: &JoinedNode<'_>, pod: &str, grace: u32) {
    let grace = format!("--grace-period={grace}");
    // A container that has received SIGTERM twice may have ended.
    joined.plane.kubectl(&["delete", "pod", pod, "--wait=false", "--ignore-not-found", &grace]);
}

fn remove_finalizers(joined: &JoinedNode<'_>, pod: &str) {
    joined.plane.kubectl(&["patch", "pod", pod, "--type=merge", "-p", r#"{"metadata":{"finalizers":null}}"#]);
    joined.wait_gone(pod);
}

fn has_event(joined: &JoinedNode<'_>, about: &str, reason: &str, part: &str) -> bool {
    joined
        .events(about)
        .iter()
        .any(|(event_reason, message)| event_reason == reason && message.contains(part))
}

/// The requests of the node, as verb and URI.
fn requests_by(joined: &JoinedNode<'_>, part: &str) -> Vec<(String, String)> {
    let user = format!("system:node:{}", joined.name);
    let mine = joined.plane.requests().into_iter().filter(|request| text(request, "/user/username") == user);
    mine.map(|request| (text(&request, "/verb").to_owned(), text(&request, "/requestURI").to_owned()))
        .filter(|(_, uri)| uri.contains(part))
        .collect()
}

// Runtimes: containerd 2, former control plane.
#[test]
fn deleted_pods_report_their_final_state() {
    let joined = JoinedNode::start("ends");
    joined.bind(&pod_with_finalizer("ends-zero", "trap 'exit 0' TERM; while :; do sleep 0.1; done"));
    joined.bind(&pod_with_finalizer("ends-signal", "trap 'exit 143' TERM; while :; do sleep 0.1; done"));
    joined.bind(&pod("ends-deaf", json!([busybox("main", "trap '' TERM; while :; do sleep 0.1; done")])));
    let mut unstarted = pod_with_finalizer("ends-unstarted", FOREVER);
    unstarted["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "ends-none"}}]);
    unstarted["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    joined.bind(&unstarted);
    // A label counts for a pod that is bound right after it was set.
    joined.plane.kubectl(&["label", "node", "ends", "example.org/room=now"]);
    let mut labeled = pod("ends-label", json!([busybox("main", FOREVER)]));
    labeled["spec"]["nodeSelector"] = json!({"example.org/room": "now"});
    joined.bind(&labeled);
    let mut key = pod("ends-key", json!([busybox("main", FOREVER)]));
    joined.plane.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "ends-cm", "namespace": "default"}, "data": {"other": "x"},
    }));
    key["spec"]["containers"][0]["env"] =
        json!([{"name": "K", "valueFrom": {"configMapKeyRef": {"name": "ends-cm", "key": "k"}}}]);
    joined.bind(&key);

    // The first request for pods is a streaming list of this node's pods; others are forbidden.
    let first = || requests_by(&joined, "/api/v1/pods").into_iter().next();
    let (_, first) = wait_for("the request for pods", LIMIT, first);
    for part in
        ["watch=true", "sendInitialEvents=true", "resourceVersionMatch=NotOlderThan", "spec.nodeName%3Dends"]
    {
        assert!(first.contains(part), "{part}: {first}");
    }
    let own = joined.plane.node_kubeconfig("ends");
    let all = joined.plane.kubectl_as(&own, &["get", "--raw", "/api/v1/pods"], "");
    assert!(String::from_utf8_lossy(&all.stderr).contains("Forbidden"), "{all:?}");

    for name in ["ends-zero", "ends-signal", "ends-deaf", "ends-label"] {
        joined.wait_ready(name);
    }
    // A shorter grace period counts at once for a pod that stops already; with the Go kubelet only
    // when the stop has ended.
    let long = if runs_go_kubelet() { 6 } else { 3600 };
    delete(&joined, "ends-deaf", long);
    wait_until("the stop to begin", LIMIT, || has_event(&joined, "ends-deaf", "Killing", ""));
    delete(&joined, "ends-deaf", 1);

    for (name, phase) in [("ends-zero", "Succeeded"), ("ends-signal", "Failed"), ("ends-unstarted", "Failed")]
    {
        // Its container ends by itself, also on a busy machine.
        delete(&joined, name, 60);
        joined.wait_pod(name, phase, |pod| text(pod, "/status/phase") == phase);
        remove_finalizers(&joined, name);
    }
    joined.wait_gone("ends-deaf");

    joined.wait_pod("ends-key", "refused by its environment", |pod| {
        text(pod, "/status/containerStatuses/0/state/waiting/message")
            == "couldn't find key k in ConfigMap default/ends-cm"
    });
    joined.plane.kubectl(&["patch", "configmap", "ends-cm", "-p", r#"{"data":{"k":"v"}}"#]);
    joined.wait_ready("ends-key");
    wait_until("the source of the event", LIMIT, || {
        let described = joined.plane.kubectl(&["describe", "pod", "ends-label"]);
        described.lines().any(|line| line.contains("Started") && line.contains("kubelet"))
    });
    let events = joined.plane.get(&["events", "--field-selector", "involvedObject.name=ends-label"]);
    let events = events.unwrap_or_default();
    let started = events["items"].as_array().into_iter().flatten().find(|event| event["reason"] == "Started");
    assert_eq!(started.map(|event| &event["source"]), Some(&json!({"component": "kubelet", "host": "ends"})));
    joined.finish(&["ends-label", "ends-key"]);
}

// Runtimes: containerd 2.
#[test]
fn runtime_class_selects_the_handler() {
    let joined = JoinedNode::start("class");
    let class = |name: &str, handler: &str| {
        json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
            "metadata": {"name": name}, "handler": handler})
    };
    joined.plane.apply(&class("class-odd", "class-no-such-handler"));
    let mut odd = pod("class-odd", json!([busybox("main", FOREVER)]));
    odd["spec"]["runtimeClassName"] = json!("class-odd");
    joined.bind(&odd);
    // Created while its class exists, bound after the class was deleted.
    joined.plane.apply(&class("class-late", "runc"));
    let mut late = pod("class-late", json!([busybox("main", FOREVER)]));
    late["spec"]["runtimeClassName"] = json!("class-late");
    late["spec"]["schedulerName"] = json!("none");
    joined.plane.apply(&late);
    joined.plane.kubectl(&["delete", "runtimeclass", "class-late"]);
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "class-late"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "class"}});
    let path = "/api/v1/namespaces/default/pods/class-late/binding";
    let bound = joined.plane.try_kubectl(&["create", "--raw", path, "-f", "-"], &binding.to_string());
    assert!(bound.status.success(), "{bound:?}");
    let refused = |pod: &str, part: &str| has_event(&joined, pod, "FailedCreatePodSandBox", part);
    wait_until("the runtime's refusal", LIMIT, || refused("class-odd", "class-no-such-handler"));
    wait_until("the missing class", LIMIT, || {
        refused("class-late", "runtimeclass.node.k8s.io \"class-late\" not found")
    });
    joined.plane.apply(&class("class-late", "runc"));
    joined.wait_ready("class-late");
    // A static pod can name one, too.
    let mut fixed = simple("web");
    fixed["spec"]["runtimeClassName"] = json!("class-late");
    joined.node.apply("web.json", &fixed);
    joined.wait_ready("web-class");
    joined.node.remove("web.json");
    let plane = joined.plane;
    joined.finish(&["class-odd", "class-late"]);
    plane.kubectl(&["delete", "runtimeclass", "class-odd", "class-late", "--ignore-not-found"]);
}

// Runtimes: containerd 2.
#[test]
fn wrong_node_fields_are_corrected() {
    let mut joined = JoinedNode::start("kept");
    joined.bind(&pod("kept-web", json!([busybox("main", FOREVER)])));
    let mut fixed = simple("web");
    fixed["metadata"]["uid"] = json!("kept-fixed-1");
    joined.node.apply("web.json", &fixed);
    let before = joined.wait_ready("kept-web");
    let mirror = joined.wait_ready("web-kept");

    // The list is read again if the runtime was slow.
    let node = joined.plane.wait(&["node", "kept"], "shown with its images", LIMIT, |node| {
        condition(node, "Ready") == "True" && node["status"]["images"].is_array()
    });
    let sizes: Vec<i64> = node["status"]["images"].as_array().into_iter().flatten().map(size).collect();
    assert!(!sizes.is_empty() && sizes.len() <= 50 && sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
    let memory = |field: &str| {
        let amount = text(&node, &format!("/status/{field}/memory")).trim_end_matches("Ki");
        amount.parse::<i64>().unwrap_or_else(|error| panic!("{field}: {error}: {node}"))
    };
    assert_eq!(memory("capacity") - memory("allocatable"), 100 * 1024, "the eviction threshold");

    // An edited mirror restarts nothing; under a fixed UID another environment does not, either.
    let running = joined.node.running_ids();
    joined.plane.kubectl(&["annotate", "pod", "web-kept", "example.org/note=seen"]);
    fixed["spec"]["containers"][0]["env"] = json!([{"name": "COLOR", "value": "green"}]);
    joined.node.apply("web.json", &fixed);
    // A changed label of the agent is corrected while it runs.
    joined.plane.kubectl(&["label", "node", "kept", "kubernetes.io/os=none", "--overwrite"]);
    joined.plane.wait(&["node", "kept"], "labeled again", LIMIT, |node| {
        text(node, "/metadata/labels/kubernetes.io~1os") == "linux"
    });
    assert_eq!(joined.node.running_ids(), running);
    let now = joined.wait_ready("web-kept");
    assert_eq!(text(&now, "/metadata/uid"), text(&mirror, "/metadata/uid"));

    // While the agent is stopped: another pod of the name, another boot, other flags.
    joined.node.stop_agent();
    joined.plane.kubectl(&["delete", "pod", "kept-web", "--force", "--grace-period=0"]);
    joined.bind(&pod("kept-web", json!([busybox("main", FOREVER)])));
    let boot = json!({"status": {"nodeInfo": {"bootID": "the-one-before"}}}).to_string();
    joined.plane.kubectl(&["patch", "node", "kept", "--subresource=status", "--type=strategic", "-p", &boot]);
    joined.plane.kubectl(&["label", "node", "kept", "kubernetes.io/hostname=none", "--overwrite"]);
    let kubeconfig = joined.plane.node_kubeconfig("kept").display().to_string();
    let flags = ["--kubeconfig", &kubeconfig, "--node-labels", "example.org/new=1"];
    joined.node.set_flags(&flags.map(str::to_owned));
    joined.node.start_agent();
    let known = joined.plane.wait(&["node", "kept"], "shown with the boot", LIMIT, |node| {
        text(node, "/status/nodeInfo/bootID") != "the-one-before"
            && text(node, "/metadata/labels/kubernetes.io~1hostname") == "kept"
    });
    assert_eq!(known["metadata"]["labels"].get("example.org/new"), None, "labels are for new nodes");
    wait_until("the event of the boot", LIMIT, || {
        has_event(&joined, "kept", "Rebooted", "has been rebooted")
    });
    let after = joined.wait_pod("kept-web", "the new one", |pod| condition(pod, "Ready") == "True");
    assert_ne!(text(&after, "/metadata/uid"), text(&before, "/metadata/uid"));
    wait_until("the old pod to be stopped", LIMIT, || joined.node.running_ids().len() == 2);
    let boots = joined.events("kept").into_iter().filter(|(reason, _)| reason == "Rebooted").count();
    assert_eq!(boots, 1);
    joined.node.remove("web.json");
    joined.wait_gone("web-kept");
    joined.finish(&["kept-web"]);
}

fn size(image: &Value) -> i64 {
    image["sizeBytes"].as_i64().unwrap_or(0)
}

// Runtimes: containerd 2.
#[test]
fn node_conditions_report_failures() {
    let joined = JoinedNode::start("wrong");
    let wait_condition = |what: &str, status: &str, part: &str| {
        // Less than the five minutes after which a status without a change is reported.
        joined.plane.wait(&["node", "wrong"], what, LIMIT, |node| {
            let all = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let ready = all.into_iter().find(|condition| condition["type"] == "Ready").unwrap_or_default();
            text(&ready, "/status") == status && text(&ready, "/message").contains(part)
        })
    };
    let (plugins, away) = (joined.node.containerd.network_config(), joined.node.shared().join("plugins"));
    fs::rename(&plugins, &away).expect("the network's configuration can be moved away");
    wait_condition("without network", "False", "NetworkReady=false");
    // The taint of a node that is not ready keeps the scheduler away, not a binding.
    joined.bind(&pod("wrong-web", json!([busybox("main", FOREVER)])));
    wait_until("the pod's event", LIMIT, || {
        has_event(&joined, "wrong-web", "NetworkNotReady", "network is not ready: ")
    });
    assert!(joined.node.running_ids().is_empty());
    // A rename into the directory is not noticed by containerd, a write is.
    fs::write(&plugins, fs::read(&away).expect("it was moved away")).expect("it can be written back");
    joined.wait_ready("wrong-web");
    wait_condition("well", "True", "");

    // Detected after half a minute, and reported with the next node status: `LIMIT` is for a slow
    // machine.
    joined.node.containerd.stop();
    wait_condition("without runtime", "False", "container runtime is down");
    joined.node.containerd.resume();
    wait_condition("well again", "True", "");

    // Its lease is renewed every ten seconds, never much more often. An attempt that failed is repeated at
    // once.
    let renewals: Vec<f64> = (joined.plane.requests().iter())
        .filter(|request| text(request, "/user/username") == "system:node:wrong")
        .filter(|request| request["responseStatus"]["code"] == json!(200))
        .filter(|request| {
            text(request, "/objectRef/resource") == "leases" && text(request, "/verb") == "update"
        })
        .filter_map(|request| text(request, "/requestReceivedTimestamp").parse::<jiff::Timestamp>().ok())
        .map(|time| time.as_millisecond() as f64 / 1000.0)
        .collect();
    assert!(renewals.len() >= 2, "{renewals:?}");
    assert!(renewals.windows(2).all(|pair| pair[1] - pair[0] > 7.0), "{renewals:?}");

    if skip_on_go_kubelet("a deleted node", "it is registered again only by a restart") {
        joined.finish(&["wrong-web"]);
        return;
    }
    // A node that a user deletes registers again and keeps its pods.
    let running = joined.node.running_ids();
    let old = joined.object().unwrap_or_default();
    joined.plane.kubectl(&["delete", "node", "wrong", "--wait=false"]);
    joined.plane.wait(&["node", "wrong"], "registered again", LIMIT, |node| {
        text(node, "/metadata/uid") != text(&old, "/metadata/uid") && condition(node, "Ready") == "True"
    });
    holds_for("the same containers run", Duration::from_secs(2), || joined.node.running_ids() == running);
    joined.finish(&["wrong-web"]);
}
