use super::super::defaults;
use super::validate;
use crate::model::api::Pod;
use crate::util::testing::table;
use expect_test::{Expect, expect};
use serde_json::{Value, json};

/// Merges `over` into a valid pod, sets its defaults and returns its faults.
pub(super) fn found(over: Value) -> Vec<String> {
    fn lay(onto: &mut Value, over: Value) {
        match (onto, over) {
            (Value::Object(map), Value::Object(over)) => {
                for (key, value) in over {
                    lay(map.entry(key).or_insert(Value::Null), value);
                }
            }
            (onto, over) => *onto = over,
        }
    }
    let mut value = json!({
        "metadata": {"name": "p", "namespace": "default", "uid": "u"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    });
    lay(&mut value, over);
    let mut pod: Pod = serde_json::from_value(value).unwrap();
    defaults::set_defaults(&mut pod);
    validate(&pod)
        .into_iter()
        .map(|fault| format!("{}: {}", fault.field.unwrap_or_default(), fault.message))
        .collect()
}

/// One line per fault, without the examples and regular expressions, which are in `single_faults`.
fn render(faults: &[String]) -> String {
    if faults.is_empty() {
        return "no faults".to_owned();
    }
    let brief = |fault: &String| fault.split(" (e.g. ").next().unwrap_or_default().to_owned();
    faults.iter().map(brief).collect::<Vec<_>>().join("\n")
}

/// As [`render`], without the beginning that the fields of all faults must have.
fn render_below(start: &str, faults: &[String]) -> String {
    let shorten = |fault: &String| match fault.strip_prefix(start) {
        Some(rest) => rest.to_owned(),
        None => format!("not below {start} {fault}"),
    };
    render(&faults.iter().map(shorten).collect::<Vec<_>>())
}

fn check(over: Value, expected: Expect) {
    expected.assert_eq(&render(&found(over)));
}

#[test]
fn list_with_too_many_items_is_one_fault() {
    let many: Vec<Value> = (0..1001).map(|_| json!({"name": "c"})).collect();
    check(
        json!({"spec": {"containers": many}}),
        expect!["spec.containers: Too many: 1001: must have at most 1000 items"],
    );
}

/// A pod whose only container has these fields.
fn with_container(over: &Value) -> Value {
    let mut value = json!({"name": "c", "image": "i"});
    value.as_object_mut().unwrap().extend(over.as_object().unwrap().clone());
    json!({"spec": {"containers": [value], "volumes": [{"name": "v"}, {"name": "w"}]}})
}

/// The faults of a container with these fields.
pub(super) fn found_in_container(over: Value) -> Vec<String> {
    found(with_container(&over))
}

/// As [`check`], for the fields of the only container.
fn container(over: Value, expected: Expect) {
    expected.assert_eq(&render_below("spec.containers[0].", &found_in_container(over)));
}

#[test]
fn faults_in_metadata_are_reported_together() {
    check(json!({}), expect!["no faults"]);
    check(
        json!({"metadata": {"name": "A", "namespace": "a.b", "uid": "../x"}}),
        expect![[r#"
            metadata.name: Invalid value: "A": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character
            metadata.namespace: Invalid value: "a.b": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character
            metadata.uid: Invalid value: "../x": must have at most 63 bytes, consist of alphanumeric characters, '-' or '.', and start and end with an alphanumeric character"#]],
    );
    check(
        json!({"metadata": {"labels": {"a b": "x", "ok": "-"}, "annotations": {"Example.org/a": "any thing", "/": ""}}}),
        expect![[r#"
            metadata.labels: Invalid value: "a b": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character
            metadata.labels[ok]: Invalid value: "-": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character
            metadata.annotations: Invalid value: "/": prefix part must be non-empty"#]],
    );
    check(
        json!({"metadata": {"annotations": {"a": "x".repeat(256 * 1024)}}}),
        expect!["metadata.annotations: Too long: may not be more than 262144 bytes"],
    );
}

#[test]
fn faults_in_specification_are_reported_together() {
    check(json!({"spec": {"containers": []}}), expect!["spec.containers: Required value"]);
    check(
        json!({"spec": {"restartPolicy": "Maybe", "activeDeadlineSeconds": 0,
            "hostname": "A", "subdomain": "a.b", "priorityClassName": "-", "preemptionPolicy": "x",
            "os": {"name": "plan9"}, "overhead": {"cpu": "x"}}}),
        expect![[r#"
            spec.restartPolicy: Unsupported value: "Maybe": supported values: "Always", "Never", "OnFailure"
            spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive
            spec.hostname: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character
            spec.subdomain: Invalid value: "a.b": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character
            spec.priorityClassName: Invalid value: "-": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character
            spec.preemptionPolicy: Unsupported value: "x": supported values: "Never", "PreemptLowerPriority"
            spec.os.name: Unsupported value: "plan9": supported values: "linux", "windows"
            spec.overhead[cpu]: Invalid value: "x": quantities must be a number with an optional suffix (n, u, m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi, Ei or an exponent)"#]],
    );
    check(
        json!({"spec": {"dnsPolicy": "None"}}),
        expect!["spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None"],
    );
    check(
        json!({"spec": {"dnsPolicy": "Own", "dnsConfig": {"nameservers": ["1.1.1.1", "2.2.2.2", "x", "::1"],
            "searches": [".", "a_b.c.", "-"], "options": [{"name": "ndots"}, {"value": "1"}]}}}),
        expect![[r#"
            spec.dnsPolicy: Unsupported value: "Own": supported values: "ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"
            spec.dnsConfig.nameservers: Too many: 4: must have at most 3 items
            spec.dnsConfig.nameservers[2]: Invalid value: "x": must be a valid IP address,
            spec.dnsConfig.searches[2]: Invalid value: "-": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character
            spec.dnsConfig.options[1]: Required value: must not be empty"#]],
    );
    check(
        json!({"spec": {"hostAliases": [{"ip": "x", "hostnames": ["a", "-"]}], "hostNetwork": true,
            "hostnameOverride": "a", "nodeSelector": {"a": "-"}, "schedulingGates": [{"name": "g"}]}}),
        expect![[r#"
            spec.hostnameOverride: Forbidden: may not be specified when hostNetwork is true
            spec.hostAliases[0].ip: Invalid value: "x": must be a valid IP address,
            spec.hostAliases[0].hostnames[1]: Invalid value: "-": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character
            spec.nodeSelector[a]: Invalid value: "-": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character
            spec.nodeName: Forbidden: cannot be set until all schedulingGates have been cleared"#]],
    );
    check(
        json!({"spec": {"tolerations": [{"operator": "Exists"}, {"operator": "Equal", "value": "x"},
            {"key": "k", "operator": "Exists", "value": "x"}, {"key": "k", "operator": "Near"},
            {"key": "k", "tolerationSeconds": 3, "effect": "NoSchedule"}, {"key": "k", "effect": "Eek"}]}}),
        expect![[r#"
            spec.tolerations[1].operator: Invalid value: "Equal": operator must be Exists when `key` is empty, which means "match all values and all keys"
            spec.tolerations[2].operator: Invalid value: "x": value must be empty when `operator` is 'Exists'
            spec.tolerations[3].operator: Unsupported value: "Near": supported values: "Equal", "Exists", "Gt", "Lt"
            spec.tolerations[4].effect: Invalid value: "NoSchedule": effect must be 'NoExecute' when `tolerationSeconds` is set
            spec.tolerations[5].effect: Unsupported value: "Eek": supported values: "NoExecute", "NoSchedule", "PreferNoSchedule""#]],
    );
}

#[test]
fn faults_in_container_names_images_and_enums_are_reported() {
    check(
        json!({"spec": {"containers": [{"name": "c"}, {"image": " i "}, {"name": "C", "image": "i"}],
            "initContainers": [{"name": "c", "image": "i"}]}}),
        expect![[r#"
            spec.containers[0].image: Required value
            spec.containers[1].image: Invalid value: " i ": must not have leading or trailing whitespace
            spec.containers[1].name: Required value
            spec.containers[2].name: Invalid value: "C": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character
            spec.initContainers[0].name: Duplicate value: "c""#]],
    );
    container(
        json!({"imagePullPolicy": "Maybe", "terminationMessagePolicy": "x", "args": ["a\u{0}"]}),
        expect![[r#"
            imagePullPolicy: Unsupported value: "Maybe": supported values: "Always", "IfNotPresent", "Never"
            terminationMessagePolicy: Unsupported value: "x": supported values: "FallbackToLogsOnError", "File"
            args[0]: Invalid value: "a\0": must not contain a NUL character"#]],
    );
    check(
        json!({"spec": {"ephemeralContainers": [{"name": "e", "image": "i"}]}}),
        expect!["spec.ephemeralContainers: Forbidden: cannot be set on create"],
    );
}

#[test]
fn faults_in_init_containers_and_restart_rules_are_reported() {
    let probe = json!({"exec": {"command": ["true"]}});
    check(
        json!({"spec": {"initContainers": [
            {"name": "s", "image": "i", "restartPolicy": "Always", "livenessProbe": probe, "lifecycle": {"preStop": {"exec": {"command": ["x"]}}}},
            {"name": "i", "image": "i", "livenessProbe": probe, "lifecycle": {}}]}}),
        expect![[r#"
            spec.initContainers[1].lifecycle: Forbidden: may not be set for init containers without restartPolicy=Always
            spec.initContainers[1].livenessProbe: Forbidden: may not be set for init containers without restartPolicy=Always"#]],
    );
    container(
        json!({"restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}}]}),
        expect!["restartPolicy: Required value: must specify restartPolicy when restart rules are used"],
    );
    container(
        json!({"restartPolicy": "Never", "restartPolicyRules": [{"action": "Dance"}, {"action": "Restart", "exitCodes": {"operator": "x"}}]}),
        expect![[r#"
            restartPolicyRules[0].action: Unsupported value: "Dance": supported values: "Restart", "RestartAllContainers"
            restartPolicyRules[0].exitCodes: Required value
            restartPolicyRules[1].exitCodes.operator: Unsupported value: "x": supported values: "In", "NotIn"
            restartPolicyRules[1].exitCodes.values: Required value: at least one exit code must be specified"#]],
    );
}

#[test]
fn faults_in_ports_are_reported_together() {
    container(
        json!({"ports": [
            {"containerPort": 80, "name": "web"}, {"containerPort": 81, "name": "web"}, {"name": "BAD"},
            {"containerPort": 65536}, {"containerPort": 1, "hostPort": -1, "protocol": "ICMP", "hostIP": "x"}]}),
        expect![[r#"
            ports[1].name: Duplicate value: "web"
            ports[2].name: Invalid value: "BAD": must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)
            ports[2].containerPort: Required value
            ports[3].containerPort: Invalid value: 65536: must be between 1 and 65535, inclusive
            ports[4].hostPort: Invalid value: -1: must be between 1 and 65535, inclusive
            ports[4].protocol: Unsupported value: "ICMP": supported values: "SCTP", "TCP", "UDP"
            ports[4].hostIP: Invalid value: "x": must be a valid IP address,"#]],
    );
    let ports = |port: i32| json!([{"containerPort": port, "hostPort": 80}]);
    check(
        json!({"spec": {"containers": [{"name": "a", "image": "i", "ports": ports(80)}, {"name": "b", "image": "i", "ports": ports(80)}]}}),
        expect![[r#"spec.containers[1].ports[0].hostPort: Duplicate value: "80/TCP/0.0.0.0""#]],
    );
    check(
        json!({"spec": {"hostNetwork": true, "containers": [{"name": "a", "image": "i", "ports": ports(81)}]}}),
        expect![[
            r#"spec.containers[0].ports[0].hostPort: Invalid value: 80: must match `containerPort` when `hostNetwork` is true (81)"#
        ]],
    );
    check(
        json!({"spec": {"hostNetwork": true, "containers": [{"name": "a", "image": "i", "ports": [{"containerPort": 80}]}]}}),
        expect!["no faults"],
    );
}

#[test]
fn faults_in_environment_are_reported_together() {
    let from = |source: Value| json!({"env": [{"name": "A", "valueFrom": source}]});
    container(
        json!({"env": [{"value": "x"}, {"name": "A=B"}, {"name": "a.b-c", "value": "$(X)"}, {"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}),
        expect![[r#"
            env[0].name: Required value
            env[1].name: Invalid value: "A=B": a valid environment variable name must consist only of printable ASCII characters other than '='
            env[3].valueFrom: Invalid value: "": may not be specified when `value` is not empty"#]],
    );
    container(
        from(json!({})),
        expect![[
            r#"env[0].valueFrom: Invalid value: "": must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`"#
        ]],
    );
    container(
        from(json!({"fieldRef": {"fieldPath": "spec.color"}, "configMapKeyRef": {"key": ".."}})),
        expect![[r#"
            env[0].valueFrom.fieldRef.fieldPath: Unsupported value: "spec.color": supported values: "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"
            env[0].valueFrom.configMapKeyRef.name: Required value
            env[0].valueFrom.configMapKeyRef.key: Invalid value: "..": must not be '..'
            env[0].valueFrom: Invalid value: "": may not have more than one field specified at a time"#]],
    );
    table(|path| {
        let faults = found_in_container(from(json!({"fieldRef": {"fieldPath": path}})));
        render_below("spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: ", &faults)
    })
    .check(expect![[r#"
        metadata.labels['a.b/c']              -> no faults
        metadata.annotations['Example.org/x'] -> no faults
        status.podIPs                         -> no faults
        metadata.labels                       -> Unsupported value: "metadata.labels": supported values: "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"
        metadata.labels['']                   -> Invalid value: "": name part must be non-empty
        spec.nodeName['x']                    -> Invalid value: "spec.nodeName": does not support subscript
        none                                  -> Required value
        metadata.labels['a'                   -> Unsupported value: "metadata.labels['a'": supported values: "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"
    "#]]);
    container(
        from(json!({"resourceFieldRef": {"resource": "limits.color", "divisor": "3"}})),
        expect![[r#"
            env[0].valueFrom.resourceFieldRef.resource: Unsupported value: "limits.color": supported values: "limits.cpu", "limits.ephemeral-storage", "limits.memory", "requests.cpu", "requests.ephemeral-storage", "requests.memory"
            env[0].valueFrom.resourceFieldRef.divisor: Unsupported value: "3": supported values: "1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei""#]],
    );
    container(
        from(json!({"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}})),
        expect!["no faults"],
    );
    container(
        json!({"envFrom": [{}, {"prefix": "=", "secretRef": {"name": "s"}}, {"configMapRef": {"name": ""}, "secretRef": {"name": "s"}}]}),
        expect![[r#"
            envFrom[0]: Invalid value: "": must specify one of: `configMapRef` or `secretRef`
            envFrom[1].prefix: Invalid value: "=": a valid environment variable name must consist only of printable ASCII characters other than '='
            envFrom[2].configMapRef.name: Required value
            envFrom[2]: Invalid value: "": may not have more than one field specified at a time"#]],
    );
}

#[test]
fn faults_in_resources_are_reported_together() {
    container(
        json!({"resources": {"limits": {"cpu": "1", "memory": "1Gi", "color": "1", "e.g/x": "1500m", "hugepages-2Mi": "3Mi"},
            "requests": {"cpu": "2", "memory": "-1", "ephemeral-storage": "lots"}}}),
        expect![[r#"
            resources.limits[color]: Invalid value: "color": must be a standard resource for containers or fully qualified
            resources.limits[e.g/x]: Invalid value: "1500m": must be an integer
            resources.limits[hugepages-2Mi]: Invalid value: "3Mi": must be a multiple of the page size
            resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1
            resources.requests[ephemeral-storage]: Invalid value: "lots": quantities must be a number with an optional suffix (n, u, m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi, Ei or an exponent)
            resources.requests[memory]: Invalid value: "-1": must be greater than or equal to 0"#]],
    );
    container(
        json!({"resources": {"limits": {"e.g/x": "2"}, "requests": {"e.g/x": "1", "e.g/y": "1"}}}),
        expect![[r#"
            resources.requests: Invalid value: "1": must be equal to e.g/x limit of 2
            resources.limits: Required value: Limit must be set for non overcommitable resources"#]],
    );
    container(
        json!({"resources": {"limits": {"hugepages-2Mi": "4Mi"}}}),
        expect!["resources: Forbidden: HugePages require cpu or memory"],
    );
    // Both are rounded up to thousandths before they are compared.
    container(
        json!({"resources": {"limits": {"cpu": "600u"}, "requests": {"cpu": "0.0009"}}}),
        expect!["no faults"],
    );
    container(
        json!({"resources": {"limits": {"cpu": "600u"}, "requests": {"cpu": "1001u"}}}),
        expect![[
            r#"resources.requests: Invalid value: "1001u": must be less than or equal to cpu limit of 600u"#
        ]],
    );
    container(
        json!({"resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}, {"resourceName": "cpu", "restartPolicy": "x"}]}),
        expect![[r#"
            resizePolicy[1]: Duplicate value: "cpu"
            resizePolicy[1].restartPolicy: Unsupported value: "x": supported values: "NotRequired", "RestartContainer""#]],
    );
    check(
        json!({"spec": {"resources": {"limits": {"e.g/x": "1"}}}}),
        expect![[
            r#"spec.resources.limits[e.g/x]: Unsupported value: "e.g/x": supported values: "cpu", "hugepages-", "memory""#
        ]],
    );
}

#[test]
fn faults_in_volumes_and_mounts_are_reported() {
    let volume = |source: Value, expected: Expect| {
        let mut volume = json!({"name": "v"});
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let faults = found(json!({"spec": {"volumes": [volume]}}));
        expected.assert_eq(&render_below("spec.volumes[0].", &faults));
    };
    check(
        json!({"spec": {"volumes": [{"name": "v"}, {"name": "v"}, {"name": "V"}, {"emptyDir": {}}]}}),
        expect![[r#"
            spec.volumes[1].name: Duplicate value: "v"
            spec.volumes[2].name: Invalid value: "V": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character
            spec.volumes[3].name: Required value"#]],
    );
    volume(
        json!({"emptyDir": {}, "hostPath": {"path": "/x"}}),
        expect!["hostPath: Forbidden: may not specify more than 1 volume type"],
    );
    volume(
        json!({"emptyDir": {"sizeLimit": "-1"}}),
        expect![[r#"emptyDir.sizeLimit: Invalid value: "-1": must be greater than or equal to 0"#]],
    );
    volume(json!({"hostPath": {"path": ""}}), expect!["hostPath.path: Required value"]);
    volume(
        json!({"hostPath": {"path": "/a/../b", "type": "Door"}}),
        expect![[r#"
            hostPath.path: Invalid value: "/a/../b": must not contain '..'
            hostPath.type: Unsupported value: "Door": supported values: "", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket""#]],
    );
    volume(json!({"hostPath": {"path": "/a/..b"}}), expect!["no faults"]);
    volume(
        json!({"downwardAPI": {"defaultMode": 512, "items": [{"path": "../x", "fieldRef": {"fieldPath": "metadata.labels"}}, {"path": "/y"},
            {"path": "z", "resourceFieldRef": {"resource": "limits.cpu"}}]}}),
        expect![[r#"
            downwardAPI.defaultMode: Invalid value: 512: must be a number between 0 and 0777 (octal), both inclusive
            downwardAPI.items[0].path: Invalid value: "../x": must not contain '..'
            downwardAPI.items[1].path: Invalid value: "/y": must be a relative path
            downwardAPI.items[1]: Required value: one of fieldRef and resourceFieldRef is required
            downwardAPI.items[2].resourceFieldRef.containerName: Required value"#]],
    );
    let name = |path: &str| json!({"downwardAPI": {"items": [{"path": path, "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}]}});
    volume(json!({"projected": {"sources": [name("a"), name("b")]}}), expect!["no faults"]);
    volume(
        json!({"projected": {"sources": [name("a"), name("b"), name("a")]}}),
        expect![[r#"projected: Invalid value: "a": conflicting duplicate paths"#]],
    );
    volume(json!({"image": {}}), expect!["image.reference: Required value"]);
    volume(
        json!({"nfs": {"server": "", "path": "x"}}),
        expect![[r#"
            nfs.server: Required value
            nfs.path: Invalid value: "x": must be an absolute path"#]],
    );

    container(
        json!({"volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"},
            {"name": "w", "mountPath": "/a"}, {"name": "x", "mountPath": ""}, {"mountPath": "/c"}]}),
        expect![[r#"
            volumeMounts[2].mountPath: Invalid value: "/a": must be unique
            volumeMounts[3].name: Not found: "x"
            volumeMounts[3].mountPath: Required value
            volumeMounts[4].name: Required value"#]],
    );
    container(
        json!({"volumeMounts": [{"name": "v", "mountPath": "/a", "subPath": "/x", "subPathExpr": "a/../b"},
            {"name": "v", "mountPath": "/b", "mountPropagation": "Bidirectional", "recursiveReadOnly": "Enabled"},
            {"name": "v", "mountPath": "/c", "mountPropagation": "Up"}]}),
        expect![[r#"
            volumeMounts[0].subPath: Invalid value: "/x": must be a relative path
            volumeMounts[0].subPathExpr: Invalid value: "a/../b": must not contain '..'
            volumeMounts[0].subPathExpr: Invalid value: "a/../b": subPathExpr and subPath are mutually exclusive
            volumeMounts[1].mountPropagation: Forbidden: Bidirectional mount propagation is available only to privileged containers
            volumeMounts[1].recursiveReadOnly: Forbidden: may only be specified when readOnly is true
            volumeMounts[1].recursiveReadOnly: Forbidden: may only be specified when mountPropagation is None or not specified
            volumeMounts[2].mountPropagation: Unsupported value: "Up": supported values: "Bidirectional", "HostToContainer", "None""#]],
    );
    container(
        json!({"securityContext": {"privileged": true}, "volumeMounts": [{"name": "v", "mountPath": "/a", "mountPropagation": "Bidirectional"}]}),
        expect!["no faults"],
    );
}

#[test]
fn faults_in_probes_and_hooks_are_reported_together() {
    container(
        json!({"livenessProbe": {"periodSeconds": -1, "successThreshold": 2, "terminationGracePeriodSeconds": 0},
            "readinessProbe": {"exec": {}, "tcpSocket": {"port": 1}, "successThreshold": 2, "terminationGracePeriodSeconds": 5},
            "startupProbe": {"httpGet": {"port": 0, "scheme": "FTP", "httpHeaders": [{"name": "a b", "value": ""}]}}}),
        expect![[r#"
            livenessProbe: Required value: must specify a handler type
            livenessProbe.periodSeconds: Invalid value: -1: must be greater than or equal to 0
            livenessProbe.terminationGracePeriodSeconds: Invalid value: 0: must be greater than 0
            livenessProbe.successThreshold: Invalid value: 2: must be 1
            readinessProbe.exec.command: Required value
            readinessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type
            readinessProbe.terminationGracePeriodSeconds: Invalid value: 5: must not be set for readinessProbes
            startupProbe.httpGet.port: Invalid value: 0: must be between 1 and 65535, inclusive
            startupProbe.httpGet.scheme: Unsupported value: "FTP": supported values: "HTTP", "HTTPS"
            startupProbe.httpGet.httpHeaders[0].name: Invalid value: "a b": a valid HTTP header must consist of alphanumeric characters or '-'"#]],
    );
    container(
        json!({"livenessProbe": {"grpc": {"port": 70000}}, "readinessProbe": {"tcpSocket": {"port": "NAME"}},
            "lifecycle": {"postStart": {}, "preStop": {"sleep": {"seconds": 31}}}}),
        expect![[r#"
            livenessProbe.grpc.port: Invalid value: 70000: must be between 1 and 65535, inclusive
            readinessProbe.tcpSocket.port: Invalid value: "NAME": must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)
            lifecycle.postStart: Required value: must specify a handler type
            lifecycle.preStop.sleep.seconds: Invalid value: 31: must be non-negative and less than terminationGracePeriodSeconds (30)"#]],
    );
}

#[test]
fn faults_in_security_contexts_are_reported_together() {
    check(
        json!({"spec": {"hostPID": true, "shareProcessNamespace": true, "hostIPC": true, "hostNetwork": true,
            "securityContext": {"runAsUser": -1, "fsGroup": 4_294_967_296_i64, "supplementalGroups": [0, -5], "fsGroupChangePolicy": "x",
                "sysctls": [{"name": "net.a", "value": "1"}, {"name": "kernel.sem", "value": "1"}, {"name": "A", "value": ""},
                    {"name": "vm/x", "value": ""}, {"name": "vm.x", "value": ""}, {"name": "", "value": ""}],
                "seccompProfile": {"type": "Localhost", "localhostProfile": "../x"}, "appArmorProfile": {"type": "Odd"}}}}),
        expect![[r#"
            spec.shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID cannot both be enabled
            spec.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive
            spec.securityContext.fsGroup: Invalid value: 4294967296: must be between 0 and 2147483647, inclusive
            spec.securityContext.supplementalGroups[1]: Invalid value: -5: must be between 0 and 2147483647, inclusive
            spec.securityContext.fsGroupChangePolicy: Unsupported value: "x": supported values: "Always", "OnRootMismatch"
            spec.securityContext.seccompProfile.localhostProfile: Invalid value: "../x": must not contain '..'
            spec.securityContext.appArmorProfile.type: Unsupported value: "Odd": supported values: "Localhost", "RuntimeDefault", "Unconfined"
            spec.securityContext.sysctls[0].name: Invalid value: "net.a": may not be specified when 'hostNetwork' is true
            spec.securityContext.sysctls[1].name: Invalid value: "kernel.sem": may not be specified when 'hostIPC' is true
            spec.securityContext.sysctls[2].name: Invalid value: "A": must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$
            spec.securityContext.sysctls[4].name: Duplicate value: "vm.x"
            spec.securityContext.sysctls[5].name: Required value"#]],
    );
    check(
        json!({"spec": {"hostUsers": false, "hostNetwork": true}}),
        expect!["spec.hostNetwork: Forbidden: when `hostUsers` is false"],
    );
    container(
        json!({"securityContext": {"privileged": true, "allowPrivilegeEscalation": false, "runAsGroup": -1, "procMount": "Unmasked",
            "capabilities": {"add": ["CAP_SYS_ADMIN"]},
            "seccompProfile": {"type": "RuntimeDefault", "localhostProfile": "x"}}}),
        expect![[r#"
            securityContext.runAsGroup: Invalid value: -1: must be between 0 and 2147483647, inclusive
            securityContext.procMount: Invalid value: "Unmasked": `hostUsers` must be false to use `Unmasked`
            securityContext.seccompProfile.localhostProfile: Invalid value: "x": can only be set when type is Localhost
            securityContext: Invalid value: "allowPrivilegeEscalation": cannot set `allowPrivilegeEscalation` to false and `privileged` to true
            securityContext: Invalid value: "allowPrivilegeEscalation": cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN"#]],
    );
}
