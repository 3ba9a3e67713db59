//! Pods that the node rejects: one status, one event, and no sandbox or volume.

use serde_json::{Value, json};

use crate::support::node::{LONG, Node, phase, simple};
use crate::support::wait::wait_for;

fn pod_with(name: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut manifest = simple(name);
    change(&mut manifest["spec"]);
    manifest
}

// Runtimes: containerd 2.
#[test]
fn unfit_pods_are_rejected_once() {
    let node = Node::start("refused");
    let port = json!([{"containerPort": 80, "hostPort": 18080}]);
    node.apply("first.json", &pod_with("first", |spec| spec["containers"][0]["ports"] = port.clone()));
    node.wait_ready("first");
    let refused = [
        (
            // Static pods are critical: preemption is tried, and there is no pod to evict.
            pod_with("big", |spec| {
                spec["containers"][0]["resources"] = json!({"requests": {"cpu": "100000"}});
            }),
            "UnexpectedAdmissionError",
            "no set of running pods found to reclaim resources: [(res: cpu, q: ",
        ),
        (
            pod_with("elsewhere", |spec| spec["nodeSelector"] = json!({"kubernetes.io/hostname": "other"})),
            "NodeAffinity",
            "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ),
        (
            pod_with("second", |spec| spec["containers"][0]["ports"] = port.clone()),
            "NodePorts",
            "node(s) didn't have free ports for the requested pod ports",
        ),
        (
            pod_with("sysctl", |spec| {
                spec["securityContext"] = json!({"sysctls": [{"name": "net.core.somaxconn", "value": "99"}]});
            }),
            "SysctlForbidden",
            "forbidden sysctl: \"net.core.somaxconn\" not allowlisted",
        ),
    ];
    for (manifest, ..) in &refused {
        let name = manifest["metadata"]["name"].as_str().unwrap_or_default();
        node.apply(&format!("{name}.json"), manifest);
    }
    let (runtime, _) = node.cri();
    for (manifest, reason, words) in &refused {
        let name = manifest["metadata"]["name"].as_str().unwrap_or_default();
        let pod = node.wait_pod(name, "refused", LONG, |pod| phase(pod) == "Failed");
        let status = pod.status.unwrap_or_default();
        assert_eq!(status.reason.as_deref(), Some(*reason), "{name}");
        let message = status.message.unwrap_or_default();
        assert!(message.starts_with("Pod was rejected: ") && message.contains(words), "{name}: {message}");
        assert!(status.container_statuses.is_none_or(|list| list.is_empty()), "{name}");
        let events = wait_for("the event of the rejection", LONG, || {
            let events: Vec<_> =
                node.events(name).into_iter().filter(|event| event.kind == "Warning").collect();
            (!events.is_empty()).then_some(events)
        });
        assert_eq!(events.len(), 1, "{name}: {events:#?}");
        assert_eq!((events[0].reason.as_str(), events[0].count), (*reason, 1), "{name}");
    }
    let sandboxes = runtime.list_pod_sandbox(Default::default()).expect("ListPodSandbox");
    let names: Vec<_> = sandboxes
        .iter()
        .filter_map(|sandbox| sandbox.metadata.as_ref())
        .map(|metadata| metadata.name.clone())
        .collect();
    // The runtime may have needed a second attempt for it.
    let only_first = !names.is_empty() && names.iter().all(|name| name == "first-e2e");
    assert!(only_first, "nothing was created for rejected pods: {names:?}");
    node.finish();
}
