//! The environment that a container starts with.

use std::collections::BTreeMap;

use serde_json::json;

use crate::support::node::{LONG, Node, busybox, container_id, pod, uid};
use crate::support::wait::wait_until;

// Runtimes: containerd 2.
#[test]
fn environment_variables_expand_and_have_pod_fields() {
    let node = Node::start("env");
    let field = |path: &str| json!({"fieldRef": {"fieldPath": path}});
    let resource =
        |name: &str, divisor: &str| json!({"resourceFieldRef": {"resource": name, "divisor": divisor}});
    let mut manifest = pod("env", json!([busybox("main", "")]));
    manifest["metadata"]["labels"] = json!({"tier": "front"});
    manifest["metadata"]["annotations"] = json!({"note": "a b"});
    let main = &mut manifest["spec"]["containers"][0];
    main["command"] = json!([
        "sh",
        "-c",
        "echo \"$0 $1\" > /tmp/args; trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done"
    ]);
    main["args"] = json!(["$(FIRST)-$(UNKNOWN)", "$$(FIRST)"]);
    main["resources"] =
        json!({"requests": {"cpu": "100m", "memory": "20Mi"}, "limits": {"cpu": "1500m", "memory": "64Mi"}});
    main["env"] = json!([
        {"name": "FIRST", "value": "one"},
        {"name": "SECOND", "value": "$(FIRST) and two"},
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "late"},
        {"name": "UNKNOWN_STAYS", "value": "$(UNKNOWN)"},
        {"name": "ESCAPED", "value": "$$(FIRST)"},
        {"name": "OPEN", "value": "$(FIRST"},
        {"name": "FIRST_AGAIN", "value": "x"},
        {"name": "FIRST_AGAIN", "value": "$(FIRST)"},
        {"name": "not-a-c-name", "value": "fine"},
        {"name": "POD_NAME", "valueFrom": field("metadata.name")},
        {"name": "POD_NAMESPACE", "valueFrom": field("metadata.namespace")},
        {"name": "POD_UID", "valueFrom": field("metadata.uid")},
        {"name": "TIER", "valueFrom": field("metadata.labels['tier']")},
        {"name": "NOTE", "valueFrom": field("metadata.annotations['note']")},
        {"name": "NODE", "valueFrom": field("spec.nodeName")},
        {"name": "HOST_IP", "valueFrom": field("status.hostIP")},
        {"name": "POD_IP", "valueFrom": field("status.podIP")},
        {"name": "CPUS", "valueFrom": resource("limits.cpu", "1")},
        {"name": "MILLIS", "valueFrom": resource("requests.cpu", "1m")},
        {"name": "MEBIBYTES", "valueFrom": resource("limits.memory", "1Mi")},
    ]);
    node.apply("env.json", &manifest);
    let ready = node.wait_ready("env");
    let id = container_id(&ready, "main");
    // Before the program has begun, the first process is still one of the runtime.
    wait_until("the arguments", LONG, || {
        node.exec(&id, &["sh", "-c", "cat /tmp/args 2>/dev/null || true"]) == "one-$(UNKNOWN) $(FIRST)\n"
    });
    let text = node.exec(&id, &["cat", "/proc/1/environ"]);
    let env: BTreeMap<&str, &str> = text.split('\0').filter_map(|line| line.split_once('=')).collect();
    let address = ready.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
    let uid = uid(&ready);
    for (name, value) in [
        ("FIRST", "one"),
        ("SECOND", "one and two"),
        ("EARLY", "$(LATE)"),
        ("UNKNOWN_STAYS", "$(UNKNOWN)"),
        ("ESCAPED", "$(FIRST)"),
        ("OPEN", "$(FIRST"),
        ("FIRST_AGAIN", "one"),
        ("not-a-c-name", "fine"),
        ("POD_NAME", "env-e2e"),
        ("POD_NAMESPACE", "default"),
        ("POD_UID", &uid),
        ("TIER", "front"),
        ("NOTE", "a b"),
        ("NODE", "e2e"),
        ("HOST_IP", "192.0.2.10"),
        ("POD_IP", &address),
        ("CPUS", "2"),
        ("MILLIS", "100"),
        ("MEBIBYTES", "64"),
        ("HOSTNAME", "env-e2e"),
    ] {
        assert_eq!(env.get(name).copied(), Some(value), "{name} in {env:#?}");
    }
    node.finish();
}
