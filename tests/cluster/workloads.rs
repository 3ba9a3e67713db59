//! Controllers whose pods run on one node, with a ConfigMap, a Secret and tokens: for tests that restart
//! the node without its control plane.

use std::path::Path;

use serde_json::{Value, json};

use crate::claims::claim_spec;
use crate::support::node::{FOREVER, busybox};

/// The value of the Secret, which must be nowhere on the disk; also in base64.
pub const CANARY: [&str; 2] = ["canary-58c1f07be2d9", "Y2FuYXJ5LTU4YzFmMDdiZTJk"];

/// Where the token of a pod's account is mounted.
pub const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Prints all that the container of [`web`] has, as [`web_output`].
pub const WEB_SCRIPT: &str = "cat /cm/text /all/text; echo -$CM; cat /secret/pw /all/pw; echo -$PW; \
     for t in /all/token /var/run/secrets/kubernetes.io/serviceaccount/token; \
     do tr -dc . <$t; done; cat /all/name";

/// What [`WEB_SCRIPT`] prints in the pod of a name, if the ConfigMap has the text `one`.
pub fn web_output(pod: &str) -> String {
    format!("oneone-one\n{0}{0}-{0}\n....{pod}", CANARY[0])
}

/// A ConfigMap with the text `one` and a Secret with [`CANARY`], for [`web`].
pub fn web_objects(config_map: &str, secret: &str) -> [Value; 2] {
    let object = |kind: &str, name: &str, field: &str, data: Value| {
        json!({"apiVersion": "v1", "kind": kind,
            "metadata": {"name": name, "namespace": "default"}, field: data})
    };
    [
        object("ConfigMap", config_map, "data", json!({"text": "one"})),
        object("Secret", secret, "stringData", json!({"pw": CANARY[0]})),
    ]
}

/// The specification of a pod that uses a ConfigMap, a Secret and tokens, in variables and in files.
pub fn web(config_map: &str, secret: &str) -> Value {
    let mut main = busybox("main", FOREVER);
    main["env"] = json!([
        {"name": "CM", "valueFrom": {"configMapKeyRef": {"name": config_map, "key": "text"}}},
        {"name": "PW", "valueFrom": {"secretKeyRef": {"name": secret, "key": "pw"}}},
    ]);
    main["volumeMounts"] = json!([{"name": "cm", "mountPath": "/cm"},
        {"name": "secret", "mountPath": "/secret"}, {"name": "all", "mountPath": "/all"}]);
    json!({"containers": [main], "volumes": [
        {"name": "cm", "configMap": {"name": config_map}},
        {"name": "secret", "secret": {"secretName": secret}},
        {"name": "all", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "audience": "shop", "expirationSeconds": 3600}},
            {"configMap": {"name": config_map}}, {"secret": {"name": secret}},
            {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}}]}},
    ]})
}

/// A controller of pods on the node.
pub fn controller(node: &str, kind: &str, name: &str, replicas: u32, mut spec: Value) -> Value {
    let labels = json!({"app": name});
    spec["nodeName"] = json!(node);
    spec["terminationGracePeriodSeconds"] = json!(2);
    let mut object = json!({
        "apiVersion": "apps/v1", "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec}},
    });
    if kind == "StatefulSet" {
        object["spec"]["serviceName"] = json!(name);
        object["spec"]["podManagementPolicy"] = json!("Parallel");
        let mut claim = claim_spec("Filesystem", "ReadWriteOnce");
        claim["resources"]["requests"]["storage"] = json!("1Mi");
        object["spec"]["volumeClaimTemplates"] = json!([{"metadata": {"name": "data"}, "spec": claim}]);
    }
    object
}

/// A Job on the node whose pod has the directory `out` of the machine at `/out`.
pub fn job(node: &str, name: &str, restart: &str, script: &str, out: &Path) -> Value {
    let mut main = busybox("main", script);
    main["volumeMounts"] = json!([{"name": "out", "mountPath": "/out"}]);
    json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"template": {"spec": {
            "nodeName": node, "restartPolicy": restart, "terminationGracePeriodSeconds": 2,
            "containers": [main], "volumes": [{"name": "out", "hostPath": {"path": out}}],
        }}},
    })
}
