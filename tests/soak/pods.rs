//! The pods of the soak test: one of each way to live.

use serde_json::{Value, json};

use crate::support::node::{FOREVER, busybox, pod};

/// How many kinds there are.
pub const KINDS: u64 = 9;

/// A pod of a kind. `version` makes it another pod of the same name.
pub fn manifest(name: &str, kind: u64, version: u64) -> Value {
    let main = busybox("main", FOREVER);
    let mut made = match kind {
        0 => pod(name, json!([main])),
        1 => {
            let mut made = pod(name, json!([main, busybox("other", FOREVER)]));
            made["spec"]["initContainers"] =
                json!([busybox("first", "exit 0"), busybox("second", "sleep 1")]);
            with_volume(made, json!({"name": "data", "emptyDir": {}}))
        }
        2 => {
            let memory = json!({"name": "data", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}});
            with_volume(pod(name, json!([main])), memory)
        }
        3 => pod(name, json!([busybox("main", "sleep 1; exit 3"), busybox("calm", FOREVER)])),
        4 => {
            let mut made = pod(name, json!([busybox("main", "sleep 2; exit 0")]));
            made["spec"]["restartPolicy"] = json!("Never");
            made
        }
        5 => {
            let mut main = busybox("main", &format!("touch /alive; {FOREVER}"));
            for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
                main[probe] = json!({"exec": {"command": ["cat", "/alive"]}, "periodSeconds": 1});
            }
            pod(name, json!([main]))
        }
        6 => {
            let mut sidecar = busybox("sidecar", FOREVER);
            sidecar["restartPolicy"] = json!("Always");
            let mut made = pod(name, json!([main]));
            made["spec"]["initContainers"] = json!([sidecar, busybox("first", "exit 0")]);
            made
        }
        7 => {
            let mut main = main;
            main["lifecycle"] = json!({
                "postStart": {"exec": {"command": ["true"]}},
                "preStop": {"exec": {"command": ["sleep", "0.3"]}},
            });
            pod(name, json!([main]))
        }
        _ => {
            let items = json!([{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]);
            let volume = json!({"name": "data", "downwardAPI": {"items": items}});
            with_volume(pod(name, json!([main])), volume)
        }
    };
    made["metadata"]["labels"] = json!({"version": version.to_string()});
    // A network of its own costs a second: for some of them.
    made["spec"]["hostNetwork"] = json!(!kind.is_multiple_of(3));
    made
}

fn with_volume(mut pod: Value, volume: Value) -> Value {
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": volume["name"], "mountPath": "/data"}]);
    pod["spec"]["volumes"] = json!([volume]);
    pod
}
