//! Takeover of a node: the Go kubelet stops, coracle starts on its root directory, runtime and name,
//! and later the other way round. Running pods must not be affected.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use coracle::transport::generated::runtime as rt;
use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, condition, directory, pod, shared, text};
use crate::support::control_plane::is_former;
use crate::support::launch::{go_kubelet_config, skip_on_go_kubelet};
use crate::support::node::{FOREVER, busybox, simple};
use crate::support::wait::{holds_for, pause, wait_until};

/// Longer than the periods of the Go kubelet's housekeeping and relist together.
const SETTLE: Duration = Duration::from_secs(12);

/// Everything of the pods that a takeover must not change.
#[derive(Debug, PartialEq)]
struct PodStates {
    /// Pod → container → ids.
    running: BTreeMap<String, BTreeMap<String, Vec<String>>>,
    /// Only running ones: the agent of the node removes surplus ended ones at any time.
    sandboxes: Vec<String>,
    /// Pod → what the API server shows of it.
    shown: BTreeMap<String, Value>,
}

fn pod_states(joined: &JoinedNode<'_>, pods: &[&str]) -> PodStates {
    let shown = pods.iter().map(|name| ((*name).to_owned(), shown(joined, name))).collect();
    let (runtime, _) = joined.node.cri();
    let mut sandboxes: Vec<String> = runtime
        .list_pod_sandbox(Default::default())
        .expect("ListPodSandbox")
        .into_iter()
        .filter(|sandbox| sandbox.state.enum_value() == Ok(rt::PodSandboxState::SANDBOX_READY))
        .map(|sandbox| sandbox.id)
        .collect();
    sandboxes.sort();
    PodStates { running: joined.node.running_of_all(), sandboxes, shown }
}

/// UIDs, addresses, start times, and each container's id, restarts and state.
fn shown(joined: &JoinedNode<'_>, name: &str) -> Value {
    let pod = joined.plane.get(&["pod", name]).unwrap_or_else(|| panic!("{name} is there"));
    let containers: Vec<Value> = ["initContainerStatuses", "containerStatuses"]
        .iter()
        .flat_map(|list| pod["status"][list].as_array().cloned().unwrap_or_default())
        .map(|status| {
            let keys =
                ["name", "containerID", "restartCount", "state", "lastState", "ready", "image", "imageID"];
            keys.iter().map(|key| ((*key).to_owned(), status[key].clone())).collect()
        })
        .collect();
    let status = |key: &str| pod["status"][key].clone();
    json!({
        "uid": pod["metadata"]["uid"], "annotations": pod["metadata"]["annotations"],
        "phase": status("phase"), "startTime": status("startTime"), "podIPs": status("podIPs"),
        "qosClass": status("qosClass"), "containers": containers,
    })
}

fn id_of(pod: &Value, container: &str) -> String {
    let lists = ["containerStatuses", "initContainerStatuses"];
    let mut all = lists.iter().flat_map(|list| pod["status"][list].as_array().cloned().unwrap_or_default());
    let found = all.find(|status| status["name"] == container);
    let full = found.map(|status| text(&status, "/containerID").to_owned()).unwrap_or_default();
    full.split_once("://").map_or(full.clone(), |(_, id)| id.to_owned())
}

/// Of the first container.
fn restarts(pod: &Value) -> Value {
    pod["status"]["containerStatuses"][0]["restartCount"].clone()
}

/// A pod with most features that have state on a node.
fn rich(name: &str, map: &str) -> Value {
    let mount = json!([{"name": "data", "mountPath": "/data"}, {"name": "map", "mountPath": "/map"},
        {"name": "all", "mountPath": "/all"}]);
    let mut main = busybox("main", &format!("cat /proc/uptime >> /data/starts; {FOREVER}"));
    main["volumeMounts"] = mount.clone();
    main["resources"] = json!({"requests": {"cpu": "10m"}, "limits": {"cpu": "500m", "memory": "64Mi"}});
    // A minute for each response: a slow machine must not change the result.
    let probe = json!({"exec": {"command": ["test", "-e", "/data/starts"]}, "periodSeconds": 2, "timeoutSeconds": 60});
    main["readinessProbe"] = probe;
    main["env"] = json!([{"name": "K", "valueFrom": {"configMapKeyRef": {"name": map, "key": "k"}}}]);
    let mut first = busybox("first", "date > /data/first");
    first["volumeMounts"] = mount;
    let mut side = busybox("side", FOREVER);
    side["restartPolicy"] = json!("Always");
    let mut pod = pod(name, json!([main, busybox("second", FOREVER)]));
    pod["spec"]["initContainers"] = json!([first, side]);
    pod["spec"]["securityContext"] = json!({"fsGroup": 2000});
    pod["spec"]["volumes"] = json!([
        {"name": "data", "emptyDir": {}}, {"name": "map", "configMap": {"name": map}},
        {"name": "all", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}},
            {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}}]}},
    ]);
    pod
}

/// Fails once, then runs: later restarts count from one.
fn failing_once(name: &str) -> Value {
    let mut main =
        busybox("main", &format!("test -e /data/fell || {{ touch /data/fell; exit 3; }}; {FOREVER}"));
    main["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    let mut pod = pod(name, json!([main]));
    pod["spec"]["volumes"] = json!([{"name": "data", "emptyDir": {}}]);
    pod
}

/// A manifest as an installer writes them, in YAML with much that is empty.
const COMPONENT: &str = r"apiVersion: v1
kind: Pod
metadata:
  annotations:
    example.org/endpoint: 192.0.2.10:6443
  creationTimestamp: null
  labels: {component: web, tier: control-plane}
  name: web
  namespace: default
spec:
  containers:
  - name: web
    command: [sh, -c, 'echo x >> /data/starts; trap exit TERM; while :; do sleep 1000 & wait $!; done']
    image: localhost/busybox:1
    imagePullPolicy: IfNotPresent
    livenessProbe:
      failureThreshold: 8
      exec: {command: ['true']}
      initialDelaySeconds: 10
      periodSeconds: 10
      timeoutSeconds: 15
    resources:
      requests: {cpu: 0.05, memory: 10Mi}
    volumeMounts:
    - {mountPath: /data, name: data}
    - {mountPath: /host, name: host, readOnly: true}
  hostNetwork: true
  priority: 2000001000
  priorityClassName: system-node-critical
  securityContext:
    seccompProfile: {type: RuntimeDefault}
  terminationGracePeriodSeconds: 2
  volumes:
  - name: data
    emptyDir: {sizeLimit: 1.5Gi}
  - name: host
    hostPath: {path: /tmp, type: DirectoryOrCreate}
status: {}
";

/// Stops the agent of the node and starts the other one, which must change nothing.
fn switch_agent(joined: &mut JoinedNode<'_>, to_incumbent: bool, pods: &[&str]) {
    let before = pod_states(joined, pods);
    joined.node.stop_agent();
    joined.node.use_go_kubelet(to_incumbent);
    joined.node.start_agent();
    let name = joined.name.clone();
    joined.plane.wait(&["node", &name], "ready", LIMIT, |node| {
        let version = text(node, "/status/nodeInfo/kubeletVersion");
        condition(node, "Ready") == "True" && !version.is_empty()
    });
    wait_until("all pods to be known", LIMIT, || {
        joined.node.try_pods().is_some_and(|known| known.len() == pods.len())
    });
    holds_for("the same containers run on", SETTLE, || joined.node.running_of_all() == before.running);
    for name in pods {
        joined.wait_ready(name);
    }
    let begun = Instant::now();
    loop {
        let after = pod_states(joined, pods);
        assert_eq!(after.running, before.running);
        assert_eq!(after.sandboxes, before.sandboxes);
        let mut was = before.shown.clone();
        // The Go kubelet gives static pods another start time with each of its own starts.
        for (name, was) in &mut was {
            if to_incumbent && was["annotations"].get("kubernetes.io/config.mirror").is_some() {
                was["startTime"] = after.shown[name]["startTime"].clone();
            }
        }
        // It may also show a pod as not ready until it has asked its probes.
        if !to_incumbent || after.shown == was || begun.elapsed() > LIMIT {
            assert_eq!(after.shown, was);
            break;
        }
        pause(Duration::from_millis(500));
    }
}

// Runtimes: containerd 2, former control plane.
#[test]
fn node_is_taken_over_and_returned_without_restarts() {
    if skip_on_go_kubelet("a change of hands", "the test starts both agents itself") {
        return;
    }
    let mut joined = JoinedNode::prepare(shared(), "hands", go_kubelet_config(&directory("hands")));
    let map = |value: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hands-cm", "namespace": "default"},
            "data": {"k": value}})
    };
    joined.plane.apply(&map("one"));
    joined.node.use_go_kubelet(true);
    let mut fixed = simple("fixed");
    fixed["metadata"]["uid"] = json!("a-uid-of-its-own");
    joined.node.write("web.yaml", COMPONENT);
    joined.node.apply("plain.json", &simple("plain"));
    joined.node.apply("fixed.json", &fixed);
    let mut joined = joined.start_and_wait();
    joined.bind(&rich("hands-rich", "hands-cm"));
    joined.bind(&failing_once("hands-fell"));
    joined.bind(&pod("hands-goes", json!([busybox("main", FOREVER)])));
    let pods = ["hands-rich", "hands-fell", "hands-goes", "web-hands", "plain-hands", "fixed-hands"];
    joined.wait_pod("hands-fell", "up again", |pod| restarts(pod) == json!(1));
    for name in pods {
        joined.wait_ready(name);
    }
    let sh = |joined: &JoinedNode<'_>, pod: &str, container: &str, script: &str| {
        let pod = joined.plane.get(&["pod", pod]).expect("it is there");
        joined.node.exec(&id_of(&pod, container), &["sh", "-c", script])
    };

    switch_agent(&mut joined, false, &pods);
    assert_eq!(
        sh(&joined, "hands-rich", "main", "wc -l < /data/starts; cat /map/k /all/name; stat -c %g /data")
            .replace('\n', " "),
        "1 onehands-rich2000 "
    );
    assert_eq!(sh(&joined, "web-hands", "web", "wc -l < /data/starts"), "1\n");
    let listed = joined.node.cli(&["pods"]);
    assert!(pods.iter().all(|name| listed.contains(name)), "{listed}");

    // From here on coracle applies all changes.
    joined.plane.apply(&map("two"));
    wait_until("the edit in the volume", LIMIT, || sh(&joined, "hands-rich", "main", "cat /map/k") == "two");
    let fell = joined.wait_ready("hands-fell");
    assert_eq!(restarts(&fell), json!(1));
    joined.node.containerd.kill_task(&id_of(&fell, "main"));
    let again = joined.wait_pod("hands-fell", "started again", |pod| {
        restarts(pod) == json!(2) && condition(pod, "Ready") == "True"
    });
    assert_eq!(text(&again, "/status/podIP"), text(&fell, "/status/podIP"));
    let goes = joined.wait_ready("hands-goes");
    joined.plane.kubectl(&["delete", "pod", "hands-goes", "--wait=true", "--timeout=180s"]);
    let left = joined.node.root().join("pods").join(text(&goes, "/metadata/uid"));
    wait_until("its directory to go", LIMIT, || !left.exists());
    let plain = joined.wait_ready("plain-hands");
    let mut edited = simple("plain");
    edited["metadata"]["labels"] = json!({"edition": "second"});
    joined.node.apply("plain.json", &edited);
    joined.wait_pod("plain-hands", "the edited one", |pod| {
        text(pod, "/metadata/labels/edition") == "second"
            && id_of(pod, "main") != id_of(&plain, "main")
            && condition(pod, "Ready") == "True"
    });
    joined.node.write("late.yaml", COMPONENT.replace("name: web\n  namespace", "name: late\n  namespace"));
    joined.bind(&rich("hands-late", "hands-cm"));

    let mut pods = vec![
        "hands-rich",
        "hands-fell",
        "hands-late",
        "web-hands",
        "plain-hands",
        "fixed-hands",
        "late-hands",
    ];
    for name in &pods {
        joined.wait_ready(name);
    }
    if is_former() {
        // The Go kubelet of the former release gives static pods other UIDs, so that it restarts those
        // that coracle has started or replaced. Those that it has started itself kept their UIDs.
        for (file, name) in [("late.yaml", "late-hands"), ("plain.json", "plain-hands")] {
            joined.node.remove(file);
            joined.wait_gone(name);
            pods.retain(|other| *other != name);
        }
    }
    switch_agent(&mut joined, true, &pods);
    assert_eq!(sh(&joined, "hands-late", "main", "wc -l < /data/starts"), "1\n");
    if !is_former() {
        assert_eq!(sh(&joined, "late-hands", "web", "wc -l < /data/starts"), "1\n");
    }

    // And the Go kubelet takes over what coracle has created.
    let late = joined.wait_ready("hands-late");
    joined.plane.kubectl(&["delete", "pod", "hands-late", "--wait=true", "--timeout=180s"]);
    let left = joined.node.root().join("pods").join(text(&late, "/metadata/uid"));
    wait_until("its directory to go", LIMIT, || !left.exists());
    if !is_former() {
        joined.node.remove("late.yaml");
        joined.wait_gone("late-hands");
    }
    joined.node.use_go_kubelet(false);
    joined.finish(&["hands-rich", "hands-fell"]);
    shared().kubectl(&["delete", "configmap", "hands-cm"]);
}
