//! A node in a cluster: one control plane for all tests of the program, a node per test.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::control_plane::{ControlPlane, ControlPlaneOptions};
use crate::support::launch::runs_go_kubelet;
use crate::support::node::Node;

/// Debug builds of everything but the control plane, running in parallel, on a machine that may be busy.
pub const LIMIT: Duration = Duration::from_secs(180);

/// The same for periodic work of the agent: the Go kubelet does some of it only once in a
/// minute or two.
pub fn patience() -> Duration {
    if runs_go_kubelet() { LIMIT * 2 } else { LIMIT }
}

/// The control plane that all tests share, except those that stop it. It ends with the program.
pub fn shared() -> &'static ControlPlane {
    static PLANE: OnceLock<ControlPlane> = OnceLock::new();
    PLANE.get_or_init(|| {
        let plane = ControlPlane::start_with(&Node::base("shared"), &ControlPlaneOptions::default());
        // A pod that names no account gets this one, which a controller makes.
        plane.wait(&["serviceaccount", "default"], "made", LIMIT, |_| true);
        plane.wait(&["configmap", "kube-root-ca.crt"], "made", LIMIT, |_| true);
        plane
    })
}

/// Authentication and authorization of the node API, as configured on a node of any cluster.
pub fn served(plane: &ControlPlane) -> Value {
    json!({
        "address": "0.0.0.0",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": plane.dir().join("pki/ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
    })
}

/// A node that belongs to the cluster.
pub struct JoinedNode<'a> {
    pub plane: &'a ControlPlane,
    pub node: Node,
    /// The name of the node and the test; names of objects begin with it.
    pub name: String,
}

impl<'a> JoinedNode<'a> {
    /// A node of the shared control plane, registered and ready.
    pub fn start(name: &str) -> JoinedNode<'static> {
        let joined = JoinedNode::prepare(shared(), name, json!({}));
        joined.start_and_wait()
    }

    /// A node that is yet to be started, with a certificate of its own.
    pub fn prepare(plane: &'a ControlPlane, name: &str, config: Value) -> JoinedNode<'a> {
        let kubeconfig = plane.node_kubeconfig(name);
        JoinedNode::prepare_with(plane, name, config, &["--kubeconfig", &kubeconfig.display().to_string()])
    }

    /// A node that is yet to be started, with these flags.
    pub fn prepare_with(
        plane: &'a ControlPlane,
        name: &str,
        config: Value,
        flags: &[&str],
    ) -> JoinedNode<'a> {
        let mut node = Node::prepare_as(name, name, config);
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        node.set_flags(&flags);
        JoinedNode { plane, node, name: name.to_owned() }
    }

    /// Starts the agent and waits until the node is ready for pods.
    pub fn start_and_wait(mut self) -> Self {
        self.node.start_agent();
        self.wait_node_ready();
        self
    }

    /// The Node object.
    pub fn object(&self) -> Option<Value> {
        self.plane.get(&["node", &self.name])
    }

    /// Waits until the Node object says Ready.
    pub fn wait_node_ready(&self) -> Value {
        let node =
            self.plane.wait(&["node", &self.name], "ready", LIMIT, |node| condition(node, "Ready") == "True");
        self.node.measure_when_ready();
        node
    }

    /// Creates a pod, bound to this node without a scheduler.
    pub fn bind(&self, pod: &Value) {
        let mut pod = pod.clone();
        pod["spec"]["nodeName"] = json!(self.name);
        self.plane.apply(&pod);
    }

    /// Waits for a pod of the default namespace.
    pub fn wait_pod(&self, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let last = std::cell::RefCell::new(Value::Null);
        let begun = std::time::Instant::now();
        loop {
            if let Some(pod) = self.plane.poll(&["pod", name]) {
                if holds(&pod) {
                    return pod;
                }
                *last.borrow_mut() = pod;
            }
            assert!(
                begun.elapsed() < patience(),
                "timed out waiting for pod {name} to be {what}; last seen: {}\n{}",
                last.borrow()["status"],
                self.plane.kubectl(&[
                    "get",
                    "events",
                    "--field-selector",
                    &format!("involvedObject.name={name}")
                ])
            );
            crate::support::wait::pause(Duration::from_millis(200));
        }
    }

    /// Waits until a pod is ready.
    pub fn wait_ready(&self, name: &str) -> Value {
        self.wait_pod(name, "ready", |pod| condition(pod, "Ready") == "True")
    }

    /// Waits until the pod is deleted at the API server.
    pub fn wait_gone(&self, name: &str) {
        let begun = std::time::Instant::now();
        while let Some(pod) = self.plane.get(&["pod", name]) {
            if begun.elapsed() > patience() {
                // The stacks of all threads are written to the agent's log, which is printed.
                crate::support::containerd::kill(self.node.pid(), "QUIT");
                crate::support::wait::pause(Duration::from_secs(1));
                let requests = self
                    .plane
                    .requests()
                    .into_iter()
                    .filter(|request| text(request, "/objectRef/name") == name);
                let requests: Vec<String> = requests
                    .map(|request| {
                        let field = |pointer| text(&request, pointer).to_owned();
                        let code = &request["responseStatus"];
                        let time = field("/requestReceivedTimestamp");
                        format!(
                            "{time} {} {} {code} {}",
                            field("/verb"),
                            field("/requestURI"),
                            request["requestObject"]
                        )
                    })
                    .collect();
                panic!("timed out waiting for pod {name} to be gone: {pod}; asked:\n{}", requests.join("\n"));
            }
            crate::support::wait::pause(Duration::from_millis(200));
        }
    }

    /// The messages of the events about an object, with their reasons.
    pub fn events(&self, object: &str) -> Vec<(String, String)> {
        let selector = format!("involvedObject.name={object}");
        let list = self.plane.get(&["events", "-A", "--field-selector", &selector]);
        let items = list.as_ref().and_then(|list| list["items"].as_array()).cloned().unwrap_or_default();
        items
            .iter()
            .map(|event| (text(event, "/reason").to_owned(), text(event, "/message").to_owned()))
            .collect()
    }

    /// Deletes the pods of the test, waits for their end, and ends the node.
    pub fn finish(self, pods: &[&str]) {
        for pod in pods {
            self.plane.kubectl(&[
                "delete",
                "pod",
                pod,
                "--ignore-not-found",
                "--wait=false",
                "--grace-period=1",
            ]);
        }
        for pod in pods {
            self.wait_gone(pod);
        }
        self.node.finish();
        self.plane.kubectl(&["delete", "node", &self.name, "--ignore-not-found"]);
    }
}

/// A text in an object, empty if it is not there.
pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

fn find<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind)
}

/// The status of a condition, empty without it.
pub fn condition<'a>(object: &'a Value, kind: &str) -> &'a str {
    find(object, kind).map(|condition| text(condition, "/status")).unwrap_or_default()
}

/// The reason of a condition, empty without it.
pub fn reason<'a>(object: &'a Value, kind: &str) -> &'a str {
    find(object, kind).map(|condition| text(condition, "/reason")).unwrap_or_default()
}

/// The message of a condition, empty without it.
pub fn message<'a>(object: &'a Value, kind: &str) -> &'a str {
    find(object, kind).map(|condition| text(condition, "/message")).unwrap_or_default()
}

/// A pod that does not end by itself.
pub fn pod(name: &str, containers: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"terminationGracePeriodSeconds": 5, "containers": containers},
    })
}

/// A directory of the test.
pub fn directory(name: &str) -> PathBuf {
    Node::base(name)
}

/// The log of a pod as it is now; empty if a busy node does not respond in time.
pub fn log_now(plane: &ControlPlane, pod: &str) -> String {
    String::from_utf8_lossy(&plane.try_kubectl(&["logs", pod], "").stdout).into_owned()
}
