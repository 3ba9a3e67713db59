//! What kubectl shows and does: nodes, pods, mirrors.

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, condition, pod, reason, text};
use crate::support::node::{FOREVER, STAMP, busybox, simple};
use crate::support::node_inspection::moment;
use crate::support::wait::{holds_for, wait_for, wait_until};

fn forever(name: &str) -> Value {
    pod(name, json!([busybox("main", FOREVER)]))
}

/// The whole Node object of a node that has just joined.
// Runtimes: containerd 2, former control plane.
#[test]
fn node_registers_and_renews_its_lease() {
    let joined = JoinedNode::start("reg");
    let node = joined.object().expect("it is registered");
    for (kind, status, expected_reason) in [
        ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
        ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
        ("PIDPressure", "False", "KubeletHasSufficientPID"),
        ("Ready", "True", "KubeletReady"),
    ] {
        assert_eq!((condition(&node, kind), reason(&node, kind)), (status, expected_reason));
    }
    assert_eq!(text(&node, "/metadata/labels/kubernetes.io~1hostname"), "reg");
    assert_eq!(text(&node, "/metadata/labels/kubernetes.io~1os"), "linux");
    assert_eq!(node["status"]["addresses"][0], json!({"type": "InternalIP", "address": "192.0.2.10"}));
    assert_eq!(node["status"]["addresses"][1], json!({"type": "Hostname", "address": "reg"}));
    for field in ["cpu", "memory", "pods", "ephemeral-storage"] {
        assert!(node["status"]["capacity"].get(field).is_some(), "{field}: {node}");
        assert!(node["status"]["allocatable"].get(field).is_some(), "{field}: {node}");
    }
    for field in
        ["machineID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion", "kubeletVersion"]
    {
        assert!(!text(&node, &format!("/status/nodeInfo/{field}")).is_empty(), "{field}: {node}");
    }
    let lease = || joined.plane.get(&["lease", "reg", "-n", "kube-node-lease"]);
    let first = wait_for("the lease", LIMIT, lease);
    assert_eq!(text(&first, "/spec/holderIdentity"), "reg");
    assert_eq!(text(&first, "/metadata/ownerReferences/0/uid"), text(&node, "/metadata/uid"));
    wait_until("the lease to be renewed", LIMIT, || {
        lease().is_some_and(|now| text(&now, "/spec/renewTime") > text(&first, "/spec/renewTime"))
    });
    let has_event =
        |reason: &str| joined.events("reg").iter().any(|(event_reason, _)| event_reason == reason);
    wait_until("the node's events", LIMIT, || has_event("Starting") && has_event("NodeReady"));
    joined.finish(&[]);
}

// Runtimes: containerd 1, containerd 2, former control plane.
#[test]
fn pods_bound_by_the_scheduler_run_and_terminate() {
    let joined = JoinedNode::start("placed");
    let mut web = forever("placed-web");
    web["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "placed"});
    joined.plane.apply(&web);
    let ready = joined.wait_ready("placed-web");
    assert_eq!(text(&ready, "/spec/nodeName"), "placed");
    assert_eq!(text(&ready, "/status/hostIP"), "192.0.2.10");
    assert!(!text(&ready, "/status/podIP").is_empty());
    let described = joined.plane.kubectl(&["describe", "pod", "placed-web"]);
    wait_until("the events", LIMIT, || {
        let events = joined.events("placed-web");
        ["Scheduled", "Pulled", "Created", "Started"]
            .iter()
            .all(|want| events.iter().any(|(event_reason, _)| event_reason == want))
    });
    assert!(described.contains("placed/192.0.2.10"), "{described}");

    // A graceful deletion shows the final phase before the object is removed.
    joined.plane.kubectl(&["delete", "pod", "placed-web", "--wait=true", "--timeout=180s"]);
    assert!(joined.plane.get(&["pod", "placed-web"]).is_none());
    assert!(joined.node.running_ids().is_empty(), "the object goes after the containers");

    // A forced deletion removes the object at once, and the containers afterwards.
    joined.bind(&forever("placed-two"));
    joined.wait_ready("placed-two");
    joined.plane.kubectl(&["delete", "pod", "placed-two", "--force", "--grace-period=0", "--wait=false"]);
    wait_until("the containers to end", LIMIT, || joined.node.running_ids().is_empty());
    joined.finish(&["placed-two"]);
}

// Runtimes: containerd 1, containerd 2, former control plane.
#[test]
fn static_pods_have_mirror_pods() {
    let joined = JoinedNode::start("mirror");
    joined.node.apply("web.json", &simple("web"));
    let mirror = joined.wait_ready("web-mirror");
    assert_eq!(text(&mirror, "/metadata/ownerReferences/0/kind"), "Node");
    assert!(!text(&mirror, "/metadata/annotations/kubernetes.io~1config.mirror").is_empty());
    let running = joined.node.running_ids();
    assert_eq!(running.len(), 1);

    // A deleted mirror pod is created again, and no container restarts.
    joined.plane.kubectl(&["delete", "pod", "web-mirror", "--force", "--grace-period=0"]);
    let again = joined.wait_pod("web-mirror", "created again", |pod| {
        text(pod, "/metadata/uid") != text(&mirror, "/metadata/uid") && condition(pod, "Ready") == "True"
    });
    assert_eq!(joined.node.running_ids(), running);

    // A manifest that is removed and rewritten restarts the pod, and the mirror pod stays.
    let path = joined.node.manifest_path("web.json");
    let manifest = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, manifest).unwrap();
    let again = joined.wait_pod("web-mirror", "restarted", |pod| {
        text(pod, "/metadata/uid") == text(&again, "/metadata/uid")
            && pod.pointer("/status/containerStatuses/0/restartCount") == Some(&json!(1))
            && condition(pod, "Ready") == "True"
    });

    // An edit replaces pod and mirror.
    let mut edited = simple("web");
    edited["metadata"]["labels"] = json!({"edition": "second"});
    joined.node.apply("web.json", &edited);
    joined.wait_pod("web-mirror", "the edited one", |pod| {
        text(pod, "/metadata/labels/edition") == "second"
            && text(pod, "/metadata/uid") != text(&again, "/metadata/uid")
            && condition(pod, "Ready") == "True"
    });
    joined.node.remove("web.json");
    joined.wait_gone("web-mirror");
    assert!(joined.node.running_ids().is_empty());
    joined.finish(&[]);
}

/// A restarted agent reads its pods again and restarts none of them.
// Runtimes: containerd 1, containerd 2.
#[test]
fn agent_restart_does_not_restart_api_pods() {
    let mut joined = JoinedNode::start("again");
    joined.bind(&forever("again-web"));
    joined.wait_ready("again-web");
    let running = joined.node.running_ids();
    joined.node.kill_agent();
    joined.node.start_agent();
    joined.wait_node_ready();
    let same = || joined.node.running_ids() == running;
    holds_for("the same containers run on", std::time::Duration::from_secs(5), same);
    let after = joined.wait_ready("again-web");
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], json!(0));

    // Deleted while the agent is stopped: gone soon after its start.
    joined.node.stop_agent();
    joined.plane.kubectl(&["delete", "pod", "again-web", "--force", "--grace-period=0"]);
    joined.node.start_agent();
    wait_until("the orphan to be stopped", LIMIT, || joined.node.running_ids().is_empty());
    joined.finish(&[]);
}

// Runtimes: containerd 2.
#[test]
fn sidecars_keep_running_during_initialization() {
    let joined = JoinedNode::start("starts");
    let mut sidecar = busybox("sidecar", "sleep 2; exit 0");
    sidecar["restartPolicy"] = json!("Always");
    let wait = busybox("wait", "until [ -e /out/go ]; do sleep 0.1; done");
    let mut web = forever("starts-web");
    web["spec"]["restartPolicy"] = json!("Never");
    web["spec"]["initContainers"] = json!([sidecar, wait]);
    joined.bind(&joined.node.with_out(web));
    let shown = joined.wait_pod("starts-web", "with a sidecar that was started again", |pod| {
        pod["status"]["initContainerStatuses"][0]["restartCount"].as_u64() >= Some(2)
    });
    let wait = &shown["status"]["initContainerStatuses"][1];
    assert_eq!((&wait["restartCount"], wait["state"].get("running").is_some()), (&json!(0), true), "{wait}");
    assert_eq!(text(&shown, "/status/phase"), "Pending");
    joined.node.touch("go");
    joined.wait_pod("starts-web", "initialized", |pod| condition(pod, "Initialized") == "True");
    joined.finish(&["starts-web"]);
}

// Runtimes: containerd 2.
#[test]
fn host_network_pods_have_the_addresses_of_the_node() {
    let joined = JoinedNode::start("hostnet");
    let field =
        |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let asks = |name: &str, script: &str| {
        let mut container = busybox(name, &format!("echo $IP $IPS $HOST > /out/{name}; {script}"));
        container["env"] = json!([
            field("IP", "status.podIP"),
            field("IPS", "status.podIPs"),
            field("HOST", "status.hostIP")
        ]);
        container
    };
    // No process listens on 127.0.0.1: the probe must use the address of the pod.
    let serve = "mkdir /tmp/w; echo up > /tmp/w/ok; exec httpd -f -p 192.0.2.10:8085 -h /tmp/w";
    let mut main = asks("main", serve);
    main["readinessProbe"] =
        json!({"httpGet": {"port": 8085, "path": "/ok"}, "periodSeconds": 1, "timeoutSeconds": 60});
    let mut web = pod("hostnet-web", json!([main]));
    web["spec"]["hostNetwork"] = json!(true);
    web["spec"]["initContainers"] = json!([asks("first", "exit 0")]);
    joined.bind(&joined.node.with_out(web));
    let ready = joined.wait_ready("hostnet-web");
    assert_eq!((text(&ready, "/status/podIP"), text(&ready, "/status/hostIP")), ("192.0.2.10", "192.0.2.10"));
    for container in ["first", "main"] {
        assert_eq!(joined.node.out(container), "192.0.2.10 192.0.2.10 192.0.2.10\n", "{container}");
    }
    joined.finish(&["hostnet-web"]);
}

// Runtimes: containerd 2.
#[test]
fn a_pre_stop_hook_outlives_its_grace_period() {
    let joined = JoinedNode::start("hooks");
    let deaf = format!("trap '{STAMP} >> /out/term' TERM; echo > /out/up; while :; do sleep 0.05; done");
    let mut main = busybox("main", &deaf);
    let beat = format!("while :; do {STAMP} >> /out/beat; sleep 0.05; done");
    main["lifecycle"] = json!({"preStop": {"exec": {"command": ["sh", "-c", beat]}}});
    joined.bind(&joined.node.with_out(pod("hooks-web", json!([main]))));
    joined.wait_ready("hooks-web");
    wait_until("the container to ignore SIGTERM", LIMIT, || joined.node.out("up") == "\n");
    let deleted = moment();
    let delete = ["delete", "pod", "hooks-web", "--grace-period=4", "--wait=true", "--timeout=180s"];
    joined.plane.kubectl(&delete);
    let signaled = joined.node.wait_stamp("term");
    assert!(signaled - deleted > 3.9, "the signal came {} s after the deletion", signaled - deleted);
    let lived = joined.node.last_stamp("beat") - signaled;
    assert!(lived > 0.0, "the hook ended {} s before the signal", -lived);
    joined.finish(&[]);
}

// Runtimes: containerd 1, containerd 2.
#[test]
fn jobs_complete() {
    let joined = JoinedNode::start("jobs");
    joined.plane.apply(&json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": "jobs-sum", "namespace": "default"},
        "spec": {"completions": 2, "parallelism": 2, "template": {"spec": {
            "restartPolicy": "Never",
            "nodeSelector": {"kubernetes.io/hostname": "jobs"},
            "containers": [busybox("main", "echo $((6*7))")],
        }}},
    }));
    joined.plane.wait(&["job", "jobs-sum"], "complete", LIMIT, |job| condition(job, "Complete") == "True");
    joined.plane.kubectl(&["delete", "job", "jobs-sum", "--cascade=foreground", "--timeout=180s"]);
    joined.finish(&[]);
}

/// Pods that are bound here although they do not fit.
// Runtimes: containerd 2.
#[test]
fn pods_that_do_not_fit_the_node_are_rejected() {
    let joined = JoinedNode::start("refuse");
    let mut greedy = forever("refuse-cpu");
    greedy["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "4000"}});
    let mut elsewhere = forever("refuse-label");
    elsewhere["spec"]["nodeSelector"] = json!({"example.org/room": "none"});
    let mut os = forever("refuse-os");
    os["spec"]["os"] = json!({"name": "windows"});
    let mut ports = forever("refuse-port");
    ports["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 19080}]);
    let mut taken = ports.clone();
    taken["metadata"]["name"] = json!("refuse-taken");
    joined.bind(&ports);
    joined.wait_ready("refuse-port");
    let all = [
        ("refuse-cpu", &greedy, "OutOfcpu"),
        ("refuse-label", &elsewhere, "NodeAffinity"),
        ("refuse-os", &os, "PodOSNotSupported"),
        ("refuse-taken", &taken, "NodePorts"),
    ];
    for (name, manifest, expected_reason) in all {
        joined.bind(manifest);
        let failed = joined.wait_pod(name, "refused", |pod| text(pod, "/status/phase") == "Failed");
        assert_eq!(text(&failed, "/status/reason"), expected_reason, "{}", failed["status"]);
        assert!(text(&failed, "/status/message").starts_with("Pod was rejected: "), "{}", failed["status"]);
        wait_until("its event", LIMIT, || {
            joined.events(name).iter().any(|(reason, _)| reason == expected_reason)
        });
    }
    assert_eq!(joined.node.running_ids().len(), 1);
    joined.finish(&["refuse-cpu", "refuse-label", "refuse-os", "refuse-port", "refuse-taken"]);
}

/// Conditions of other clients are kept, and wrong conditions of the agent are corrected.
// Runtimes: containerd 1, containerd 2.
#[test]
fn wrong_pod_conditions_are_corrected_and_foreign_ones_stay() {
    let joined = JoinedNode::start("status");
    let mut gated = forever("status-gated");
    gated["spec"]["readinessGates"] = json!([{"conditionType": "example.org/checked"}]);
    joined.bind(&gated);
    let waiting = joined.wait_pod("status-gated", "held back by its gate", |pod| {
        condition(pod, "ContainersReady") == "True" && reason(pod, "Ready") == "ReadinessGatesNotReady"
    });
    assert_eq!(condition(&waiting, "Ready"), "False");
    let patch = |body: Value| {
        joined.plane.kubectl(&[
            "patch",
            "pod",
            "status-gated",
            "--subresource=status",
            "--type=strategic",
            "-p",
            &body.to_string(),
        ]);
    };
    patch(json!({"status": {"conditions": [{"type": "example.org/checked", "status": "True"}]}}));
    joined.wait_ready("status-gated");
    patch(json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "Forged"}]}}));
    let restored = joined.wait_pod("status-gated", "corrected", |pod| condition(pod, "Ready") == "True");
    assert_eq!(condition(&restored, "example.org/checked"), "True");
    joined.finish(&["status-gated"]);
}
