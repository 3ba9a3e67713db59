//! The pods that both nodes run: every kind of object that a series may describe.

use serde_json::{Value, json};

use crate::joined::{JoinedNode, condition, pod, text};
use crate::support::manifest::push;
use crate::support::node::{FOREVER, busybox};

/// The state of a pod that the comparison waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AwaitedState {
    /// All of its containers run and are ready.
    Ready,
    /// It has ended.
    Ended,
    /// Its container has failed and waits.
    Waits,
    /// One of its containers runs, another has ended.
    Half,
    /// It was refused.
    Refused,
}

/// One pod of the scenario.
pub(super) struct ScenarioPod {
    /// Its name, to which the name of the node is appended.
    pub(super) name: &'static str,
    pub(super) shown: AwaitedState,
    manifest: Value,
}

/// A container with one more field.
fn with_field(mut container: Value, field: &str, value: Value) -> Value {
    container[field] = value;
    container
}

fn limited(name: &str, requests: Value, limits: Value) -> Value {
    with_field(busybox(name, FOREVER), "resources", json!({"requests": requests, "limits": limits}))
}

fn main() -> Value {
    busybox("main", FOREVER)
}

fn part(name: &'static str, containers: Value) -> ScenarioPod {
    ScenarioPod { name, shown: AwaitedState::Ready, manifest: pod(name, containers) }
}

impl ScenarioPod {
    fn spec(mut self, field: &str, value: Value) -> ScenarioPod {
        self.manifest["spec"][field] = value;
        self
    }

    fn shown(mut self, shown: AwaitedState) -> ScenarioPod {
        self.shown = shown;
        self
    }

    /// As it is applied for a node.
    pub(super) fn manifest(&self, node: &str) -> Value {
        let mut manifest = self.manifest.clone();
        manifest["metadata"]["name"] = json!(self.name_on(node));
        let text = manifest.to_string().replace("NODE", node);
        serde_json::from_str(&text).expect("still JSON")
    }

    pub(super) fn name_on(&self, node: &str) -> String {
        format!("{}-{node}", self.name)
    }
}

/// Mounts a volume in the first container.
fn mounted(mut part: ScenarioPod, volumes: Value) -> ScenarioPod {
    for volume in volumes.as_array().into_iter().flatten() {
        let name = text(volume, "/name");
        let mount = json!({"name": name, "mountPath": format!("/{name}")});
        push(&mut part.manifest["spec"]["containers"][0]["volumeMounts"], mount);
    }
    part.spec("volumes", volumes)
}

/// A directory on a disk: what is written there is counted.
fn disk() -> String {
    std::env::var("TMPDIR").unwrap_or_else(|_| "/tmp".to_owned())
}

/// All of them; in addition there is a static pod.
pub(super) fn parts() -> Vec<ScenarioPod> {
    let file = "until [ -e /data/x ]; do sleep 0.1; done";
    let sidecar = with_field(busybox("side", FOREVER), "restartPolicy", json!("Always"));
    let exec =
        |command: Value| json!({"exec": {"command": command}, "periodSeconds": 1, "timeoutSeconds": 60});
    let probed = with_field(
        with_field(
            with_field(main(), "readinessProbe", exec(json!(["true"]))),
            "livenessProbe",
            exec(json!(["true"])),
        ),
        "startupProbe",
        exec(json!(["true"])),
    );
    let hooked = with_field(
        main(),
        "lifecycle",
        json!({"postStart": {"exec": {"command": ["true"]}}, "preStop": {"exec": {"command": ["true"]}}}),
    );
    let files = json!([
        {"name": "data", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {"name": "map", "configMap": {"name": "pages-NODE"}},
        {"name": "secret", "secret": {"secretName": "pages-NODE"}},
        {"name": "down", "downwardAPI": {"items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        {"name": "host", "hostPath": {"path": "/tmp", "type": "Directory"}},
    ]);
    let write = format!(
        "dd if=/dev/zero of=/disk/pages-NODE bs=64k count=32 oflag=direct; rm /disk/pages-NODE; {FOREVER}"
    );
    let exits_once = format!("test -e /data/x || {{ touch /data/x; exit 3; }}; {FOREVER}");
    let processes = format!("for i in 1 2 3 4 5; do sleep 100000 & done; {FOREVER}");
    let listen = format!("nc -l -p 7001 & nc -l -p 7002 & exec 9</dev/null; {FOREVER}");
    let data = || json!([{"name": "data", "emptyDir": {}}]);
    vec![
        part("plain", json!([main()])),
        part("guaranteed", json!([limited("main", json!({}), json!({"cpu": "200m", "memory": "64Mi"}))])),
        part("burstable", json!([limited("main", json!({"cpu": "20m", "memory": "16Mi"}), json!({}))])),
        part("cpu", json!([limited("main", json!({"cpu": "10m"}), json!({"cpu": "500m"}))])),
        part(
            "half",
            json!([limited("main", json!({}), json!({"memory": "48Mi"})), busybox("free", FOREVER)]),
        ),
        part(
            "both",
            json!([
                limited("main", json!({"memory": "8Mi"}), json!({"memory": "48Mi"})),
                limited("second", json!({"cpu": "10m"}), json!({"memory": "32Mi", "cpu": "1"})),
            ]),
        ),
        mounted(part("prepared", json!([main()])), data()).spec(
            "initContainers",
            json!([with_field(
                busybox("first", "touch /data/x"),
                "volumeMounts",
                json!([{"name": "data", "mountPath": "/data"}])
            )]),
        ),
        mounted(part("sided", json!([busybox("main", &format!("touch /data/x; {FOREVER}"))])), data())
            .spec("initContainers", json!([sidecar])),
        part("hostnet", json!([main()])).spec("hostNetwork", json!(true)),
        part("hostpid", json!([main()])).spec("hostPID", json!(true)),
        mounted(part("volumes", json!([main()])), files),
        mounted(
            part("writer", json!([busybox("main", &write)])),
            json!([{"name": "disk", "hostPath": {"path": disk(), "type": "Directory"}}]),
        ),
        mounted(part("stumbled", json!([busybox("main", &exits_once)])), data()),
        part("crashes", json!([busybox("main", "exit 1")])).shown(AwaitedState::Waits),
        mounted(part("mixed", json!([busybox("main", file), busybox("ends", "exit 0")])), data())
            .spec("restartPolicy", json!("OnFailure"))
            .shown(AwaitedState::Half),
        part("ended", json!([busybox("main", "exit 0")]))
            .spec("restartPolicy", json!("Never"))
            .shown(AwaitedState::Ended),
        part("failed", json!([busybox("main", "exit 3")]))
            .spec("restartPolicy", json!("Never"))
            .shown(AwaitedState::Ended),
        part("probed", json!([probed])),
        part("hooked", json!([hooked])),
        part("crowd", json!([busybox("main", &processes), busybox("other", FOREVER)]))
            .spec("shareProcessNamespace", json!(true)),
        part("listens", json!([busybox("main", &listen)])),
        part("elsewhere", json!([main()]))
            .spec("nodeSelector", json!({"pages.example.org/no": "such-label"}))
            .shown(AwaitedState::Refused),
    ]
}

impl AwaitedState {
    fn holds(self, pod: &Value) -> bool {
        let containers = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
        let has = |state: &str| containers.iter().any(|status| status["state"].get(state).is_some());
        let restarted = containers.iter().any(|status| status["restartCount"].as_u64() > Some(0));
        match self {
            AwaitedState::Ready => condition(pod, "Ready") == "True",
            AwaitedState::Ended => ["Succeeded", "Failed"].contains(&text(pod, "/status/phase")),
            // The Go kubelet may report the container's end until the back-off is over.
            AwaitedState::Waits => restarted && (has("waiting") || has("terminated")),
            AwaitedState::Half => has("running") && has("terminated"),
            AwaitedState::Refused => text(pod, "/status/phase") == "Failed",
        }
    }
}

/// Waits until every pod is in its expected state.
pub(super) fn wait(joined: &JoinedNode<'_>) {
    for part in parts() {
        joined
            .wait_pod(&part.name_on(&joined.name), &format!("{:?}", part.shown), |pod| part.shown.holds(pod));
    }
    joined.wait_ready(&format!("static-{}", joined.name));
}

/// What the pods of a node name.
pub(super) fn objects(node: &str) -> [Value; 2] {
    let named = |kind: &str| json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": format!("pages-{node}"), "namespace": "default"}});
    let (mut map, mut secret) = (named("ConfigMap"), named("Secret"));
    map["data"] = json!({"k": "v"});
    secret["stringData"] = json!({"k": "v"});
    [map, secret]
}

/// Creates all of them on a node.
pub(super) fn start(joined: &JoinedNode<'_>) {
    for object in objects(&joined.name) {
        joined.plane.apply(&object);
    }
    joined.node.apply("static.json", &pod("static", json!([main()])));
    for part in parts() {
        joined.bind(&part.manifest(&joined.name));
    }
}
