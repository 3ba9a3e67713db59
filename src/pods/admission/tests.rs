//! Decisions by table: one check function, one row per rule.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::model::api;

fn node() -> NodeView {
    NodeView {
        name: "node1".into(),
        labels: BTreeMap::from([
            ("kubernetes.io/os".into(), "linux".into()),
            ("zone".into(), "a".into()),
            ("size".into(), "7".into()),
        ]),
        allocatable: Allocatable {
            cpu_milli: 2000,
            memory_bytes: 1 << 30,
            ephemeral_bytes: 10 << 30,
            pods: 5,
            extended: BTreeMap::from([("hugepages-2Mi".into(), 0), ("example.org/gpu".into(), 1)]),
        },
        os: "linux".into(),
        kernel_version: "6.1.0-18-amd64".into(),
        allowed_unsafe_sysctls: ["net.core.somaxconn", "kernel.msg*", "user.*", "kernel.domainname"]
            .map(String::from)
            .to_vec(),
        ..NodeView::default()
    }
}

fn pod(name: &str, source: &str, spec: Value) -> Pod {
    let mut spec = spec;
    if spec["containers"].is_null() {
        spec["containers"] = json!([{"name": "c"}]);
    }
    let object = json!({"metadata": {"name": name, "uid": name, "generation": 1,
        "annotations": {"kubernetes.io/config.source": source}}, "spec": spec});
    Pod::from(serde_json::from_value::<api::Pod>(object).unwrap())
}

fn requesting(requests: Value) -> Value {
    json!({"containers": [{"name": "c", "resources": {"requests": requests}}]})
}

fn short(admission: &Admission) -> String {
    match admission {
        Admission::Admit => "admit".to_owned(),
        Admission::Reject { reason, message } => format!("{reason}: {message}"),
        Admission::Preempt { victims, .. } => format!("preempt {victims:?}"),
    }
}

fn check(pod: &Pod, others: &[Pod], node: &NodeView, expected: &str) {
    assert_eq!(short(&admit(pod, others, node)), expected, "{:?}", pod.spec());
}

#[test]
fn pod_with_more_than_a_thousand_containers_is_rejected() {
    let many = |count: usize| (0..count).map(|i| json!({"name": format!("c{i}")})).collect::<Vec<_>>();
    check_api(json!({"containers": many(1000)}), "admit");
    check_api(
        json!({"containers": many(1001)}),
        "PodTooLarge: spec.containers has 1001 items, the limit is 1000",
    );
}

fn check_api(spec: Value, expected: &str) {
    check(&pod("p", "api", spec), &[], &node(), expected);
}

#[test]
fn only_safe_and_allowed_namespaced_sysctls_are_admitted() {
    let spec = |names: &[&str], more: Value| {
        let list: Vec<Value> = names.iter().map(|name| json!({"name": name, "value": "1"})).collect();
        let mut spec = json!({"securityContext": {"sysctls": list}});
        for (key, value) in more.as_object().into_iter().flatten() {
            spec[key] = value.clone();
        }
        spec
    };
    let refused =
        |name: &str, detail: &str| format!("SysctlForbidden: forbidden sysctl: \"{name}\" {detail}");
    check_api(spec(&["kernel.shm_rmid_forced", "net.ipv4.tcp_rmem"], json!({})), "admit");
    check_api(spec(&["net/ipv4/tcp_syncookies"], json!({})), "admit");
    check_api(spec(&["net.core.somaxconn", "kernel.msgmax"], json!({})), "admit");
    check_api(
        spec(&["net.ipv4.tcp_syncookies", "kernel.panic"], json!({})),
        &refused("kernel.panic", "not allowlisted"),
    );
    check_api(spec(&["net.core.somaxconn2"], json!({})), &refused("net.core.somaxconn2", "not allowlisted"));
    check_api(
        spec(&["net.ipv4.tcp_syncookies"], json!({"hostNetwork": true})),
        &refused("net.ipv4.tcp_syncookies", "not allowed with host Net enabled"),
    );
    check_api(
        spec(&["kernel.msgmax"], json!({"hostIPC": true})),
        &refused("kernel.msgmax", "not allowed with host IPC enabled"),
    );
    check_api(spec(&["kernel.msgmax"], json!({"hostNetwork": true})), "admit");
    check_api(spec(&["kernel.domainname"], json!({"hostNetwork": true})), "admit");
    let user = "user.max_user_namespaces";
    check_api(spec(&[user], json!({"hostUsers": false})), "admit");
    for more in [json!({}), json!({"hostUsers": true})] {
        check_api(spec(&[user], more), &refused(user, "not allowed with host User enabled"));
    }
    for (kernel, name, allowed) in [
        ("3.15.0", "net.ipv4.ip_local_reserved_ports", false),
        ("3.16.1", "net.ipv4.ip_local_reserved_ports", true),
        ("4.4.300", "net.ipv4.tcp_keepalive_time", false),
        ("4.5", "net.ipv4.tcp_keepalive_time", true),
        ("4.5.9", "net.ipv4.tcp_fin_timeout", false),
        ("4.14.1", "net.ipv4.tcp_wmem", false),
        ("4.15.0-x", "net.ipv4.tcp_wmem", true),
        ("unreadable", "net.ipv4.tcp_wmem", false),
        ("unreadable", "net.ipv4.tcp_syncookies", true),
    ] {
        let node = NodeView { kernel_version: kernel.into(), ..node() };
        let decision = admit(&pod("p", "api", spec(&[name], json!({}))), &[], &node);
        assert_eq!(decision == Admission::Admit, allowed, "{kernel} {name}");
    }
}

#[test]
fn unsupported_os_and_strict_group_policy_are_rejected() {
    let labeled = |os: &str| {
        let object = json!({"metadata": {"name": "p", "labels": {"kubernetes.io/os": os}}, "spec": {"containers": []}});
        Pod::from(serde_json::from_value::<api::Pod>(object).unwrap())
    };
    check(&labeled("linux"), &[], &node(), "admit");
    check(
        &labeled("windows"),
        &[],
        &node(),
        "PodOSSelectorNodeLabelDoesNotMatch: Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
    );
    check_api(json!({"os": {"name": "linux"}}), "admit");
    check_api(
        json!({"os": {"name": "windows"}}),
        "PodOSNotSupported: Failed to admit pod as the OS field doesn't match node OS",
    );
    let strict = json!({"securityContext": {"supplementalGroupsPolicy": "Strict"}});
    check_api(
        strict.clone(),
        "SupplementalGroupsPolicyNotSupported: SupplementalGroupsPolicy=Strict is not supported in this node",
    );
    let able = NodeView { strict_supplemental_groups: true, ..node() };
    check(&pod("p", "api", strict), &[], &able, "admit");
}

#[test]
fn pod_level_resources_are_refused_while_their_gate_is_off() {
    let off = NodeView { refuses_pod_resources: true, ..node() };
    let refused = "PodLevelResourcesNotSupported: PodLevelResources feature gate is disabled";
    for (resources, expected) in [
        (json!({"limits": {"memory": "64Mi"}}), refused),
        (json!({"requests": {"cpu": "1m"}}), refused),
        (json!({"limits": {}, "requests": {}}), "admit"),
        (json!({}), "admit"),
        (Value::Null, "admit"),
    ] {
        let spec = json!({ "resources": resources });
        check(&pod("p", "api", spec.clone()), &[], &off, expected);
        check(&pod("p", "file", spec.clone()), &[], &off, expected);
        check_api(spec, "admit");
    }
}

#[test]
fn api_pod_with_requests_above_free_resources_is_rejected() {
    let other = |name: &str, requests: Value| pod(name, "api", requesting(requests));
    let half = || other("o", json!({"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"}));
    let check_with = |requests: Value, expected: &str| {
        check(&pod("p", "api", requesting(requests)), &[half()], &node(), expected);
    };
    let out_of = |what: &str, requested: i64, used: i64, capacity: i64| {
        format!(
            "OutOf{what}: Node didn't have enough resource: {what}, requested: {requested}, used: {used}, capacity: {capacity}"
        )
    };
    check_with(json!({"cpu": "1500m"}), "admit");
    check_with(json!({"cpu": "3"}), &out_of("cpu", 3000, 500, 2000));
    check_with(json!({"memory": "512Mi"}), "admit");
    check_with(json!({"memory": "513Mi"}), &out_of("memory", 513 << 20, 512 << 20, 1 << 30));
    // The first missing resource is the reason.
    check_with(json!({"cpu": "3", "memory": "2Gi"}), &out_of("cpu", 3000, 500, 2000));
    check_with(
        json!({"ephemeral-storage": "10Gi"}),
        &out_of("ephemeral-storage", 10 << 30, 1 << 30, 10 << 30),
    );
    check_with(json!({"hugepages-2Mi": "2Mi"}), &out_of("hugepages-2Mi", 2 << 20, 0, 0));
    check_with(json!({"hugepages-1Gi": "1Gi"}), &out_of("hugepages-1Gi", 1 << 30, 0, 0));
    check_with(json!({"example.org/gpu": "1"}), "admit");
    check_with(json!({"example.org/gpu": "2"}), &out_of("example.org/gpu", 2, 0, 1));
    check_with(json!({"example.org/unheard-of": "2"}), "admit");
    check_with(json!({"cpu": "0"}), "admit");
    // An init container's peak and the overhead count.
    let peak = json!({"initContainers": [{"name": "i", "resources": {"requests": {"cpu": "1600m"}}}],
        "containers": [{"name": "c"}]});
    check(&pod("p", "api", peak), &[half()], &node(), &out_of("cpu", 1600, 500, 2000));
    let mut heavy = requesting(json!({"cpu": "1"}));
    heavy["overhead"] = json!({"cpu": "600m"});
    check(&pod("p", "api", heavy), &[half()], &node(), &out_of("cpu", 1600, 500, 2000));
    // A pod does not conflict with itself.
    check(&other("p", json!({"cpu": "2"})), &[other("p", json!({"cpu": "2"}))], &node(), "admit");
    // The node is full, even for a pod without requests.
    let five: Vec<Pod> = (0..5).map(|n| other(&format!("o{n}"), json!({}))).collect();
    check(&other("p", json!({})), &five, &node(), &out_of("pods", 1, 5, 5));
}

#[test]
fn pod_is_rejected_unless_node_name_and_affinity_match() {
    let refused =
        "NodeAffinity: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector";
    check_api(json!({"nodeSelector": {"zone": "a"}}), "admit");
    check_api(json!({"nodeSelector": {"zone": "b"}}), refused);
    check_api(json!({"nodeSelector": {"zone": "a", "other": "x"}}), refused);
    let affinity = |terms: Value| {
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": terms}}}})
    };
    let expression = |key: &str, operator: &str, values: Value| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
    for (key, operator, values, matches) in [
        ("zone", "In", json!(["b", "a"]), true),
        ("zone", "In", json!(["b"]), false),
        ("none", "In", json!(["b"]), false),
        ("zone", "NotIn", json!(["b"]), true),
        ("zone", "NotIn", json!(["a"]), false),
        ("none", "NotIn", json!(["a"]), true),
        ("zone", "Exists", Value::Null, true),
        ("none", "Exists", Value::Null, false),
        ("zone", "DoesNotExist", Value::Null, false),
        ("none", "DoesNotExist", Value::Null, true),
        ("size", "Gt", json!(["6"]), true),
        ("size", "Gt", json!(["7"]), false),
        ("size", "Lt", json!(["8"]), true),
        ("zone", "Gt", json!(["6"]), false),
        ("size", "Gt", json!([]), false),
        ("size", "Gt", json!(["6", "5"]), false),
        ("zone", "NotIn", json!([]), false),
        ("zone", "Exists", json!(["a"]), false),
        ("none", "DoesNotExist", json!(["a"]), false),
        ("zone", "Near", json!(["a"]), false),
    ] {
        let spec = affinity(json!([expression(key, operator, values)]));
        check_api(spec, if matches { "admit" } else { refused });
    }
    check_api(
        affinity(json!([expression("zone", "In", json!(["b"])), expression("size", "Exists", Value::Null)])),
        "admit",
    );
    check_api(affinity(json!([{}])), refused);
    check_api(affinity(json!([])), refused);
    let field =
        |name: &str| json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}]);
    check_api(affinity(field("node1")), "admit");
    check_api(affinity(field("node2")), refused);
    let fields = |operator: &str, names: &[&str]| json!([{"matchFields": [{"key": "metadata.name", "operator": operator, "values": names}]}]);
    check_api(affinity(fields("NotIn", &["node2"])), "admit");
    check_api(affinity(fields("In", &["node1", "node2"])), refused);
    check_api(affinity(fields("Exists", &["node1"])), refused);
    check_api(
        affinity(json!([{"matchFields": [{"key": "metadata.uid", "operator": "In", "values": ["x"]}]}])),
        refused,
    );
    check_api(json!({"nodeName": "node1"}), "admit");
    check_api(
        json!({"nodeName": "node2"}),
        "NodeName: Predicate NodeName failed: node(s) didn't match the requested node name",
    );
}

#[test]
fn pod_with_an_occupied_host_port_is_rejected() {
    let with =
        |name: &str, port: Value| pod(name, "api", json!({"containers": [{"name": "c", "ports": [port]}]}));
    let refused =
        "NodePorts: Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
    let used = json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"});
    for (port, clash) in [
        (json!({"containerPort": 80}), false),
        (json!({"containerPort": 80, "hostPort": 81}), false),
        (json!({"containerPort": 80, "hostPort": 80}), true),
        (json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}), true),
        (json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.2"}), false),
        (json!({"containerPort": 80, "hostPort": 80, "protocol": "UDP"}), false),
    ] {
        let expected = if clash { refused } else { "admit" };
        check(&with("p", port), &[with("o", used.clone())], &node(), expected);
    }
    let sidecar = pod(
        "p",
        "api",
        json!({"containers": [{"name": "c"}], "initContainers": [
        {"name": "s", "restartPolicy": "Always", "ports": [{"containerPort": 80, "hostPort": 80}]}]}),
    );
    check(&sidecar, &[with("o", used)], &node(), refused);
}

#[test]
fn untolerated_no_execute_taint_rejects_api_pods_only() {
    let refused =
        "TaintToleration: Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate";
    let tainted = |effect: &str| NodeView {
        taints: vec![Taint {
            key: "k".into(),
            value: Some("5".into()),
            effect: effect.into(),
            ..Taint::default()
        }],
        ..node()
    };
    check(&pod("p", "api", json!({})), &[], &tainted("NoSchedule"), "admit");
    check(&pod("p", "api", json!({})), &[], &tainted("NoExecute"), refused);
    check(&pod("p", "file", json!({})), &[], &tainted("NoExecute"), "admit");
    for (toleration, covered) in [
        (json!({"operator": "Exists"}), true),
        (json!({"key": "k", "operator": "Exists", "effect": "NoExecute"}), true),
        (json!({"key": "k", "operator": "Exists", "effect": "NoSchedule"}), false),
        (json!({"key": "k", "value": "5"}), true),
        (json!({"key": "k", "operator": "Equal", "value": "6"}), false),
        (json!({"key": "j", "operator": "Exists"}), false),
        (json!({"key": "k", "operator": "Gt", "value": "4"}), true),
        (json!({"key": "k", "operator": "Lt", "value": "4"}), false),
    ] {
        let spec = json!({"tolerations": [toleration]});
        check(&pod("p", "api", spec), &[], &tainted("NoExecute"), if covered { "admit" } else { refused });
    }
}

#[test]
fn unenforceable_apparmor_profile_is_rejected_before_the_pod_runs() {
    let off = "AppArmor: Cannot enforce AppArmor: AppArmor is not enabled on the host";
    let nameless = "AppArmor: Cannot enforce AppArmor: invalid empty AppArmor profile name";
    let profile = |kind: &str| json!({"appArmorProfile": {"type": kind}});
    let on_container = |kind: &str| json!({"containers": [{"name": "c", "securityContext": profile(kind)}]});
    let able = NodeView { apparmor: true, ..node() };
    for (spec, without, with) in [
        (json!({}), "admit", "admit"),
        (json!({"securityContext": profile("Unconfined")}), "admit", "admit"),
        (json!({"securityContext": profile("RuntimeDefault")}), off, "admit"),
        (on_container("RuntimeDefault"), off, "admit"),
        (on_container("Unconfined"), "admit", "admit"),
        (on_container("Localhost"), off, nameless),
    ] {
        check(&pod("p", "api", spec.clone()), &[], &node(), without);
        check(&pod("p", "api", spec), &[], &able, with);
    }
    let object = |value: &str, phase: &str| {
        let object = json!({"metadata": {"name": "p", "annotations": {
                "container.apparmor.security.beta.kubernetes.io/c": value}},
            "status": {"phase": phase}, "spec": {"containers": [{"name": "c"}]}});
        Pod::from(serde_json::from_value::<api::Pod>(object).unwrap())
    };
    check(&object("runtime/default", "Pending"), &[], &node(), off);
    check(&object("localhost/", "Pending"), &[], &able, nameless);
    check(&object("unconfined", "Pending"), &[], &node(), "admit");
    // A pod that runs was admitted before.
    check(&object("runtime/default", "Running"), &[], &node(), "admit");
}

#[test]
fn new_pods_are_rejected_under_pressure_and_during_shutdown() {
    let under = |pressures: &[&str]| NodeView {
        pressures: pressures.iter().map(|name| (*name).to_owned()).collect(),
        ..node()
    };
    let memory = "Evicted: The node had condition: [MemoryPressure]. ";
    let best_effort = pod("p", "api", json!({}));
    let burstable = pod("p", "api", requesting(json!({"cpu": "1m"})));
    let tolerant =
        json!({"tolerations": [{"key": "node.kubernetes.io/memory-pressure", "operator": "Exists"}]});
    check(&best_effort, &[], &under(&["MemoryPressure"]), memory);
    check(&burstable, &[], &under(&["MemoryPressure"]), "admit");
    check(&pod("p", "api", tolerant), &[], &under(&["MemoryPressure"]), "admit");
    check(&burstable, &[], &under(&["DiskPressure"]), "Evicted: The node had condition: [DiskPressure]. ");
    check(
        &burstable,
        &[],
        &under(&["MemoryPressure", "PIDPressure"]),
        "Evicted: The node had condition: [MemoryPressure PIDPressure]. ",
    );
    check(&pod("p", "file", json!({})), &[], &under(&["DiskPressure"]), "admit");
    let down = NodeView { shutting_down: true, ..node() };
    check(&best_effort, &[], &down, "NodeShutdown: Pod was rejected as the node is shutting down.");
}

/// The recorded case: 64 cores are requested of 2, of which other static pods use 100 m.
#[test]
fn static_pod_is_rejected_if_preemption_frees_too_little() {
    let others = [pod("o", "file", requesting(json!({"cpu": "100m"})))];
    let greedy = pod("p", "file", requesting(json!({"cpu": "64"})));
    let Admission::Reject { reason, message } = admit(&greedy, &others, &node()) else { panic!() };
    let mut status = serde_json::to_value(rejected_status(&greedy, &reason, &message, greedy.qos())).unwrap();
    assert_eq!(status["observedGeneration"].take(), 1);
    status.as_object_mut().unwrap().remove("observedGeneration");
    assert_eq!(
        status,
        json!({
            "message": "Pod was rejected: Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: 62100), ]",
            "phase": "Failed", "qosClass": "Burstable", "reason": "UnexpectedAdmissionError"})
    );
    // A failure that preemption cannot solve is reported first.
    let mut lost = requesting(json!({"cpu": "64"}));
    lost["nodeName"] = json!("node2");
    check(
        &pod("p", "file", lost.clone()),
        &others,
        &node(),
        "NodeName: Predicate NodeName failed: node(s) didn't match the requested node name",
    );
    // For an API pod the missing resource is reported first.
    let message =
        "OutOfcpu: Node didn't have enough resource: cpu, requested: 64000, used: 100, capacity: 2000";
    check(&pod("p", "api", lost), &others, &node(), message);
}

#[test]
fn preemption_evicts_the_least_important_sufficient_pods() {
    let best = |name: &str| pod(name, "api", json!({}));
    let burst = |name: &str, cpu: &str| pod(name, "api", requesting(json!({"cpu": cpu})));
    let sure = |name: &str, cpu: &str| {
        let limits = json!({"cpu": cpu, "memory": "1Mi"});
        pod(name, "api", json!({"containers": [{"name": "c", "resources": {"limits": limits}}]}))
    };
    let wants = |cpu: &str| pod("p", "file", requesting(json!({"cpu": cpu})));
    // The closest pod, and of equally close ones the smallest.
    check(&wants("500m"), &[burst("a", "600m"), burst("b", "1200m")], &node(), "preempt [a]");
    check(&wants("1"), &[burst("a", "600m"), burst("b", "1200m")], &node(), "preempt [b]");
    check(&wants("2"), &[burst("a", "600m"), burst("b", "1200m")], &node(), "preempt [b, a]");
    // A lower class is preempted first, if it is sufficient.
    check(&wants("500m"), &[sure("g", "1"), burst("b", "1")], &node(), "preempt [b]");
    check(&wants("1500m"), &[sure("g", "1"), burst("b", "1")], &node(), "preempt [b, g]");
    // Pods that free nothing stay.
    check(&wants("500m"), &[best("e"), burst("b", "2")], &node(), "preempt [b]");
    // Too many pods: any pod is sufficient, the least important first.
    let five = [sure("g", "1m"), burst("b", "1m"), best("e"), best("f"), best("h")];
    check(&wants("1m"), &five, &node(), "preempt [e]");
    // Critical pods do not yield to each other, unless one of them has the higher priority.
    let ranked = |name: &str, source: &str, priority: i64| {
        let mut spec = requesting(json!({"cpu": "1500m"}));
        spec["priority"] = json!(priority);
        pod(name, source, spec)
    };
    check(&ranked("p", "file", 2_000_001_000), &[ranked("o", "api", 2_000_000_000)], &node(), "preempt [o]");
    let none = "UnexpectedAdmissionError: Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: 1000), ]";
    check(&ranked("p", "file", 2_000_000_000), &[ranked("o", "api", 2_000_000_000)], &node(), none);
    // No pod is preempted for a pod that is rejected anyway.
    let down = NodeView { shutting_down: true, ..node() };
    let refused = "NodeShutdown: Pod was rejected as the node is shutting down.";
    check(&wants("500m"), &[burst("a", "2")], &down, refused);
}

#[test]
fn pod_that_requires_an_undeclared_feature_is_rejected() {
    let rules = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let restarts =
        json!({"containers": [{"name": "c", "restartPolicy": "Never", "restartPolicyRules": rules}]});
    let users = json!({"hostNetwork": true, "hostUsers": false});
    let declaring = |features: &[&str]| NodeView {
        declared_features: Some(features.iter().map(|feature| (*feature).to_owned()).collect()),
        ..node()
    };
    let refused = |missing: &str| {
        format!("PodFeatureUnsupported: Pod requires node features that are not available: {missing}")
    };
    let (all, host) = ("RestartAllContainersOnContainerExits", "UserNamespacesHostNetworkSupport");
    // On this node the options would have no effect.
    let mounts = json!([{"name": "v", "mountPath": "/v"}, {"name": "v", "mountPath": "/w", "bindMountOptions": ["noexec"]}]);
    let options = "VolumeBindMountOptions";
    let regular = json!({"containers": [{"name": "c", "volumeMounts": mounts}]});
    let first = json!({"initContainers": [{"name": "i", "volumeMounts": mounts}]});
    for (spec, missing) in [(restarts, all), (users, host), (regular, options), (first, options)] {
        let pod = pod("p", "api", spec);
        check(&pod, &[], &node(), "admit");
        check(&pod, &[], &declaring(&[]), &refused(missing));
        check(&pod, &[], &declaring(&[host, all, options]), "admit");
    }
    check(&pod("p", "api", json!({})), &[], &declaring(&[]), "admit");
}

#[test]
fn resources_that_come_from_claims_do_not_count() {
    let claimed = |name: &str| {
        let pod = pod(name, "api", requesting(json!({"deviceclass.resource.kubernetes.io/gpu": "1"})));
        let mut object = pod.object().clone();
        let mapping = json!({"containerName": "c", "requestName": "r",
            "resourceName": "deviceclass.resource.kubernetes.io/gpu"});
        let status = json!({"extendedResourceClaimStatus":
            {"resourceClaimName": "x", "requestMappings": [mapping]}});
        object.status = Some(serde_json::from_value(status).unwrap());
        Pod::from(object)
    };
    check(&claimed("p"), &[claimed("q")], &node(), "admit");
    let without = requesting(json!({"deviceclass.resource.kubernetes.io/gpu": "1"}));
    let refused = admit(&pod("p", "api", without), &[], &node());
    assert!(short(&refused).starts_with("OutOfdeviceclass.resource.kubernetes.io/gpu: "), "{refused:?}");
}
