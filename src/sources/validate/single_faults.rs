//! One invalid value of each field that a user may set, by group, with the complete message.
//! Combinations and valid values are in the other tests.

use super::tests::{found, found_in_container};
use serde_json::{Value, json};

/// Every row has one fault and its message.
fn check(rows: Vec<(Value, &str)>, found: impl Fn(Value) -> Vec<String>, prefix: &str) {
    let mut wrong = Vec::new();
    for (over, expected) in rows {
        let lines = found(over.clone());
        if lines != [format!("{prefix}{expected}")] {
            wrong.push(format!("{over}\n  wanted {prefix}{expected}\n  found  {lines:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn containers(rows: Vec<(Value, &str)>) {
    check(rows, found_in_container, "spec.containers[0].");
}

fn pods(rows: Vec<(Value, &str)>) {
    check(rows, |spec| found(json!({"spec": spec})), "spec.");
}

const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
                     start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for \
                     validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', \
                         and must start and end with an alphanumeric character (e.g. 'example.com', regex used for \
                         validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";

const SYSCTL: &str = "securityContext.sysctls[0].name: Invalid value: \"A\": must have at most 253 characters and match \
                      regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";
const WORD: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
                    alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation \
                    is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";

#[test]
fn invalid_metadata_has_upstreams_message() {
    let name = format!("name: Invalid value: \"P\": {SUBDOMAIN}");
    let namespace = format!("namespace: Invalid value: \"N\": {LABEL}");
    let key = format!("labels: Invalid value: \"-\": name part {WORD}");
    let slashes = format!(
        "labels: Invalid value: \"a/b/c\": a qualified name {WORD} with an optional DNS subdomain prefix and '/' \
         (e.g. 'example.com/MyName')"
    );
    let value = "labels[a]: Invalid value: \"-\": a valid label must be an empty string or consist of alphanumeric \
                 characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or \
                 'my_value',  or '12345', regex used for validation is \
                 '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
    let rows: Vec<(Value, &str)> = vec![
        (json!({"name": "P"}), &name),
        (json!({"name": ""}), "name: Required value: name or generateName is required"),
        (json!({"namespace": "N"}), &namespace),
        (json!({"labels": {"-": "a"}}), &key),
        (json!({"labels": {"a/b/c": "a"}}), &slashes),
        (json!({"labels": {"a": "-"}}), value),
        (
            json!({"annotations": {"/a": "a"}}),
            "annotations: Invalid value: \"/a\": prefix part must be non-empty",
        ),
    ];
    check(rows, |metadata| found(json!({"metadata": metadata})), "metadata.");
}

#[test]
fn invalid_container_or_image_has_upstreams_message() {
    let init = |fields: Value| {
        let mut container = json!({"name": "i", "image": "i"});
        container.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"initContainers": [container]})
    };
    let named = format!("name: Invalid value: \"N\": {LABEL}");
    containers(vec![
        (json!({"name": ""}), "name: Required value"),
        (json!({"name": "N"}), &named),
        (json!({"image": ""}), "image: Required value"),
        (
            json!({"image": " i"}),
            "image: Invalid value: \" i\": must not have leading or trailing whitespace",
        ),
        (
            json!({"imagePullPolicy": "x"}),
            "imagePullPolicy: Unsupported value: \"x\": supported values: \"Always\", \"IfNotPresent\", \"Never\"",
        ),
        (
            json!({"restartPolicy": "x"}),
            "restartPolicy: Unsupported value: \"x\": supported values: \"Always\", \"OnFailure\", \"Never\"",
        ),
        (
            json!({"restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}}]}),
            "restartPolicy: Required value: must specify restartPolicy when restart rules are used",
        ),
        (
            json!({"restartPolicy": "Never", "restartPolicyRules": [{"action": "x", "exitCodes": {"operator": "In", "values": [1]}}]}),
            "restartPolicyRules[0].action: Unsupported value: \"x\": supported values: \"Restart\", \"RestartAllContainers\"",
        ),
        (
            json!({"restartPolicy": "Never", "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "x", "values": [1]}}]}),
            "restartPolicyRules[0].exitCodes.operator: Unsupported value: \"x\": supported values: \"In\", \"NotIn\"",
        ),
        (
            json!({"terminationMessagePolicy": "x"}),
            "terminationMessagePolicy: Unsupported value: \"x\": supported values: \"FallbackToLogsOnError\", \"File\"",
        ),
        (
            json!({"lifecycle": {"preStop": {}}}),
            "lifecycle.preStop: Required value: must specify a handler type",
        ),
        (
            json!({"lifecycle": {"postStart": {"exec": {}}}}),
            "lifecycle.postStart.exec.command: Required value",
        ),
        (
            json!({"lifecycle": {"preStop": {"sleep": {"seconds": -1}}}}),
            "lifecycle.preStop.sleep.seconds: Invalid value: -1: must be non-negative and less than terminationGracePeriodSeconds (30)",
        ),
    ]);
    let lines = found_in_container(json!({"lifecycle": {"stopSignal": "SIGSIT"}}));
    assert!(lines.len() == 1 && lines[0].starts_with("spec.containers[0].lifecycle.stopSignal: Unsupported value: \"SIGSIT\": supported values: \"SIGABRT\", "), "{lines:?}");
    for good in ["SIGUSR1", "SIGRTMIN", "SIGRTMIN+15", "SIGRTMAX-14"] {
        assert!(found_in_container(json!({"lifecycle": {"stopSignal": good}})).is_empty(), "{good}");
    }
    for bad in ["SIGRTMIN+16", "SIGRTMAX-15", "SIGRTMIN+0", "SIGRTMIN++1", "TERM", ""] {
        assert_eq!(found_in_container(json!({"lifecycle": {"stopSignal": bad}})).len(), 1, "{bad}");
    }
    pods(vec![
        (json!({"containers": []}), "containers: Required value"),
        (init(json!({"name": "c"})), "initContainers[0].name: Duplicate value: \"c\""),
        (
            init(json!({"lifecycle": {}})),
            "initContainers[0].lifecycle: Forbidden: may not be set for init containers without restartPolicy=Always",
        ),
        (
            init(json!({"readinessProbe": {"exec": {"command": ["x"]}}})),
            "initContainers[0].readinessProbe: Forbidden: may not be set for init containers without restartPolicy=Always",
        ),
        (
            json!({"restartPolicy": "x"}),
            "restartPolicy: Unsupported value: \"x\": supported values: \"Always\", \"Never\", \"OnFailure\"",
        ),
        (
            json!({"activeDeadlineSeconds": 0}),
            "activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive",
        ),
        (
            json!({"ephemeralContainers": [{"name": "e", "image": "i"}]}),
            "ephemeralContainers: Forbidden: cannot be set on create",
        ),
    ]);
}

#[test]
fn invalid_probe_has_upstreams_message() {
    let probe = |fields: Value| {
        let mut probe = json!({"tcpSocket": {"port": 1}});
        probe.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        probe
    };
    for kind in ["livenessProbe", "readinessProbe", "startupProbe"] {
        for field in ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "failureThreshold"] {
            let wanted = format!("{kind}.{field}: Invalid value: -1: must be greater than or equal to 0");
            containers(vec![(json!({kind: probe(json!({field: -1}))}), &wanted)]);
        }
        for (fields, wanted) in [
            (json!({"tcpSocket": null}), ": Required value: must specify a handler type"),
            (
                json!({"tcpSocket": {"port": 0}}),
                ".tcpSocket.port: Invalid value: 0: must be between 1 and 65535, inclusive",
            ),
            (json!({"grpc": {"port": 1}}), ".grpc: Forbidden: may not specify more than 1 handler type"),
            (
                json!({"tcpSocket": null, "grpc": {"port": 0}}),
                ".grpc.port: Invalid value: 0: must be between 1 and 65535, inclusive",
            ),
            (json!({"tcpSocket": null, "exec": {}}), ".exec.command: Required value"),
            (
                json!({"tcpSocket": null, "httpGet": {"port": "UP"}}),
                ".httpGet.port: Invalid value: \"UP\": must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)",
            ),
            (
                json!({"tcpSocket": null, "httpGet": {"port": 1, "scheme": "x"}}),
                ".httpGet.scheme: Unsupported value: \"x\": supported values: \"HTTP\", \"HTTPS\"",
            ),
            (
                json!({"tcpSocket": null, "httpGet": {"port": 1, "protocol": ""}}),
                ".httpGet.protocol: Unsupported value: \"\": supported values: \"HTTP1\", \"HTTP2\"",
            ),
            (
                json!({"tcpSocket": null, "httpGet": {"port": 1, "protocol": "HTTP2", "scheme": "HTTPS"}}),
                ".httpGet.protocol: Invalid value: \"HTTP2\": is only supported with HTTP (H2C)",
            ),
            (
                json!({"tcpSocket": null, "httpGet": {"port": 1, "protocol": "HTTP2", "host": "h"}}),
                ".httpGet.host: Invalid value: \"h\": must be empty when `protocol` is \"HTTP2\"",
            ),
            (
                json!({"tcpSocket": null, "grpc": {"port": 1, "mode": "x"}}),
                ".grpc.mode: Unsupported value: \"x\": supported values: \"Plaintext\", \"TLS\"",
            ),
        ] {
            let wanted = format!("{kind}{wanted}");
            containers(vec![(json!({kind: probe(fields)}), &wanted)]);
        }
    }
    containers(vec![
        (
            json!({"livenessProbe": probe(json!({"successThreshold": 2}))}),
            "livenessProbe.successThreshold: Invalid value: 2: must be 1",
        ),
        (
            json!({"startupProbe": probe(json!({"successThreshold": 2}))}),
            "startupProbe.successThreshold: Invalid value: 2: must be 1",
        ),
        (
            json!({"livenessProbe": probe(json!({"terminationGracePeriodSeconds": 0}))}),
            "livenessProbe.terminationGracePeriodSeconds: Invalid value: 0: must be greater than 0",
        ),
        (
            json!({"readinessProbe": probe(json!({"terminationGracePeriodSeconds": 1}))}),
            "readinessProbe.terminationGracePeriodSeconds: Invalid value: 1: must not be set for readinessProbes",
        ),
    ]);
}

#[test]
fn invalid_security_context_has_upstreams_message() {
    let context = |fields: Value| json!({"securityContext": fields});
    containers(vec![
        (
            context(json!({"runAsUser": -1})),
            "securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive",
        ),
        (
            context(json!({"runAsGroup": -1})),
            "securityContext.runAsGroup: Invalid value: -1: must be between 0 and 2147483647, inclusive",
        ),
        (
            context(json!({"procMount": "x"})),
            "securityContext.procMount: Unsupported value: \"x\": supported values: \"Default\", \"Unmasked\"",
        ),
        (
            context(json!({"procMount": "Unmasked"})),
            "securityContext.procMount: Invalid value: \"Unmasked\": `hostUsers` must be false to use `Unmasked`",
        ),
        (
            context(json!({"privileged": true, "allowPrivilegeEscalation": false})),
            "securityContext: Invalid value: \"allowPrivilegeEscalation\": cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
        ),
        (
            context(json!({"seccompProfile": {"type": "x"}})),
            "securityContext.seccompProfile.type: Unsupported value: \"x\": supported values: \"Localhost\", \"RuntimeDefault\", \"Unconfined\"",
        ),
        (
            context(json!({"seccompProfile": {"type": "Localhost"}})),
            "securityContext.seccompProfile.localhostProfile: Required value: must be set when type is Localhost",
        ),
        (
            context(json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "/x"}})),
            "securityContext.seccompProfile.localhostProfile: Invalid value: \"/x\": must be a relative path",
        ),
        (
            context(json!({"appArmorProfile": {"type": "x"}})),
            "securityContext.appArmorProfile.type: Unsupported value: \"x\": supported values: \"Localhost\", \"RuntimeDefault\", \"Unconfined\"",
        ),
        (
            context(json!({"appArmorProfile": {"type": "Localhost", "localhostProfile": " x"}})),
            "securityContext.appArmorProfile.localhostProfile: Invalid value: \" x\": must not be padded with whitespace",
        ),
    ]);
    pods(vec![
        (
            context(json!({"runAsUser": -1})),
            "securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive",
        ),
        (
            context(json!({"runAsGroup": -1})),
            "securityContext.runAsGroup: Invalid value: -1: must be between 0 and 2147483647, inclusive",
        ),
        (
            context(json!({"fsGroup": -1})),
            "securityContext.fsGroup: Invalid value: -1: must be between 0 and 2147483647, inclusive",
        ),
        (
            context(json!({"supplementalGroups": [-1]})),
            "securityContext.supplementalGroups[0]: Invalid value: -1: must be between 0 and 2147483647, inclusive",
        ),
        (
            context(json!({"supplementalGroupsPolicy": "x"})),
            "securityContext.supplementalGroupsPolicy: Unsupported value: \"x\": supported values: \"Merge\", \"Strict\"",
        ),
        (
            context(json!({"fsGroupChangePolicy": "x"})),
            "securityContext.fsGroupChangePolicy: Unsupported value: \"x\": supported values: \"Always\", \"OnRootMismatch\"",
        ),
        (
            context(json!({"seLinuxChangePolicy": "x"})),
            "securityContext.seLinuxChangePolicy: Unsupported value: \"x\": supported values: \"MountOption\", \"Recursive\"",
        ),
        (
            context(json!({"sysctls": [{"name": "", "value": ""}]})),
            "securityContext.sysctls[0].name: Required value",
        ),
        (
            context(json!({"sysctls": [{"name": "a", "value": ""}, {"name": "a", "value": ""}]})),
            "securityContext.sysctls[1].name: Duplicate value: \"a\"",
        ),
        (json!({"securityContext": {"sysctls": [{"name": "A", "value": ""}]}}), SYSCTL),
        (json!({"hostUsers": false, "hostPID": true}), "hostPID: Forbidden: when `hostUsers` is false"),
        (
            json!({"hostPID": true, "shareProcessNamespace": true}),
            "shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID cannot both be enabled",
        ),
    ]);
}

#[test]
fn invalid_network_field_has_upstreams_message() {
    let port = |fields: Value| {
        let mut port = json!({"containerPort": 1});
        port.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"ports": [port]})
    };
    containers(vec![
        (port(json!({"containerPort": 0})), "ports[0].containerPort: Required value"),
        (
            port(json!({"containerPort": 70000})),
            "ports[0].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive",
        ),
        (
            port(json!({"hostPort": 70000})),
            "ports[0].hostPort: Invalid value: 70000: must be between 1 and 65535, inclusive",
        ),
        (
            port(json!({"protocol": "x"})),
            "ports[0].protocol: Unsupported value: \"x\": supported values: \"SCTP\", \"TCP\", \"UDP\"",
        ),
        (
            port(json!({"hostIP": "x"})),
            "ports[0].hostIP: Invalid value: \"x\": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
        ),
        (
            port(json!({"name": "UP"})),
            "ports[0].name: Invalid value: \"UP\": must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)",
        ),
    ]);
    let (hostname, subdomain) = (
        format!("hostname: Invalid value: \"A\": {LABEL}"),
        format!("subdomain: Invalid value: \"A\": {LABEL}"),
    );
    let (override_, alias) = (
        format!("hostnameOverride: Invalid value: \"A\": {SUBDOMAIN}"),
        format!("hostAliases[0].hostnames[0]: Invalid value: \"A\": {SUBDOMAIN}"),
    );
    pods(vec![
        (json!({"hostname": "A"}), &hostname),
        (json!({"subdomain": "A"}), &subdomain),
        (json!({"hostnameOverride": "A"}), &override_),
        (
            json!({"hostnameOverride": "a", "setHostnameAsFQDN": true}),
            "hostnameOverride: Forbidden: may not be specified when setHostnameAsFQDN is true",
        ),
        (
            json!({"hostAliases": [{"ip": "x"}]}),
            "hostAliases[0].ip: Invalid value: \"x\": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
        ),
        (json!({"hostAliases": [{"ip": "1.1.1.1", "hostnames": ["A"]}]}), &alias),
        (
            json!({"dnsPolicy": "x"}),
            "dnsPolicy: Unsupported value: \"x\": supported values: \"ClusterFirst\", \"ClusterFirstWithHostNet\", \"Default\", \"None\"",
        ),
        (
            json!({"dnsPolicy": "None"}),
            "dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None",
        ),
        (
            json!({"dnsPolicy": "None", "dnsConfig": {}}),
            "dnsConfig.nameservers: Required value: must provide at least one DNS nameserver when `dnsPolicy` is None",
        ),
        (
            json!({"dnsConfig": {"nameservers": ["x"]}}),
            "dnsConfig.nameservers[0]: Invalid value: \"x\": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
        ),
        (
            json!({"dnsConfig": {"options": [{"value": "x"}]}}),
            "dnsConfig.options[0]: Required value: must not be empty",
        ),
        (
            json!({"hostNetwork": true, "containers": [{"name": "c", "image": "i", "ports": [{"containerPort": 1, "hostPort": 2}]}]}),
            "containers[0].ports[0].hostPort: Invalid value: 2: must match `containerPort` when `hostNetwork` is true (1)",
        ),
    ]);
}

#[test]
fn invalid_volume_has_upstreams_message() {
    let volume = |source: Value| {
        let mut volume = json!({"name": "v"});
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        json!({"volumes": [volume]})
    };
    let name = format!("volumes[0].name: Invalid value: \"V\": {LABEL}");
    pods(vec![
        (volume(json!({"name": "V"})), &name),
        (
            volume(json!({"emptyDir": {}, "image": {"reference": "x"}})),
            "volumes[0].image: Forbidden: may not specify more than 1 volume type",
        ),
        (
            volume(json!({"emptyDir": {"sizeLimit": "-1"}})),
            "volumes[0].emptyDir.sizeLimit: Invalid value: \"-1\": must be greater than or equal to 0",
        ),
        (
            volume(json!({"emptyDir": {"mode": 1024}})),
            "volumes[0].emptyDir.mode: Invalid value: 1024: must be a number between 0 and 01777 (octal), both inclusive",
        ),
        (volume(json!({"hostPath": {"path": ""}})), "volumes[0].hostPath.path: Required value"),
        (
            volume(json!({"hostPath": {"path": "/a/.."}})),
            "volumes[0].hostPath.path: Invalid value: \"/a/..\": must not contain '..'",
        ),
        (
            volume(json!({"hostPath": {"path": "/a", "type": "x"}})),
            "volumes[0].hostPath.type: Unsupported value: \"x\": supported values: \"\", \"BlockDevice\", \"CharDevice\", \"Directory\", \"DirectoryOrCreate\", \"File\", \"FileOrCreate\", \"Socket\"",
        ),
        (
            volume(json!({"downwardAPI": {"defaultMode": 512}})),
            "volumes[0].downwardAPI.defaultMode: Invalid value: 512: must be a number between 0 and 0777 (octal), both inclusive",
        ),
        (
            volume(json!({"downwardAPI": {"items": [{"path": "a"}]}})),
            "volumes[0].downwardAPI.items[0]: Required value: one of fieldRef and resourceFieldRef is required",
        ),
        (
            volume(json!({"projected": {"defaultMode": -1, "sources": []}})),
            "volumes[0].projected.defaultMode: Invalid value: -1: must be a number between 0 and 0777 (octal), both inclusive",
        ),
        (
            volume(json!({"downwardAPI": {"defaultUser": -1}})),
            "volumes[0].downwardAPI.defaultUser: Invalid value: -1: must be between 0 and 2147483647, inclusive",
        ),
        (
            volume(json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t", "user": -2}}]}})),
            "volumes[0].projected.sources[0].serviceAccountToken.user: Invalid value: -2: must be between 0 and 2147483647, inclusive",
        ),
        (
            volume(json!({"projected": {"sources": [{"downwardAPI": {"items": [
                {"path": "n", "fieldRef": {"fieldPath": "metadata.name"}, "user": 2_147_483_648_i64}]}}]}})),
            "volumes[0].projected.sources[0].downwardAPI.items[0].user: Invalid value: 2147483648: must be between 0 and 2147483647, inclusive",
        ),
        (volume(json!({"image": {}})), "volumes[0].image.reference: Required value"),
        (
            volume(json!({"image": {"reference": "x", "pullPolicy": "x"}})),
            "volumes[0].image.pullPolicy: Unsupported value: \"x\": supported values: \"Always\", \"IfNotPresent\", \"Never\"",
        ),
    ]);
    let mount = |fields: Value| {
        let mut mount = json!({"name": "v", "mountPath": "/m"});
        mount.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"volumeMounts": [mount]})
    };
    containers(vec![
        (mount(json!({"name": "x"})), "volumeMounts[0].name: Not found: \"x\""),
        (mount(json!({"mountPath": ""})), "volumeMounts[0].mountPath: Required value"),
        (
            mount(json!({"subPath": "/x"})),
            "volumeMounts[0].subPath: Invalid value: \"/x\": must be a relative path",
        ),
        (
            mount(json!({"subPathExpr": "../x"})),
            "volumeMounts[0].subPathExpr: Invalid value: \"../x\": must not contain '..'",
        ),
        (
            mount(json!({"subPath": "x", "subPathExpr": "x"})),
            "volumeMounts[0].subPathExpr: Invalid value: \"x\": subPathExpr and subPath are mutually exclusive",
        ),
        (
            mount(json!({"mountPropagation": "x"})),
            "volumeMounts[0].mountPropagation: Unsupported value: \"x\": supported values: \"Bidirectional\", \"HostToContainer\", \"None\"",
        ),
        (
            mount(json!({"mountPropagation": "Bidirectional"})),
            "volumeMounts[0].mountPropagation: Forbidden: Bidirectional mount propagation is available only to privileged containers",
        ),
        (
            mount(json!({"bindMountOptions": ["noexec", "x"]})),
            "volumeMounts[0].bindMountOptions[1]: Unsupported value: \"x\": supported values: \"nodev\", \"noexec\", \"nosuid\"",
        ),
        (
            mount(json!({"bindMountOptions": ["noexec", "noexec"]})),
            "volumeMounts[0].bindMountOptions[1]: Duplicate value: \"noexec\"",
        ),
        (
            mount(json!({"recursiveReadOnly": "x"})),
            "volumeMounts[0].recursiveReadOnly: Unsupported value: \"x\": supported values: \"Disabled\", \"Enabled\", \"IfPossible\"",
        ),
        (
            mount(json!({"recursiveReadOnly": "Enabled"})),
            "volumeMounts[0].recursiveReadOnly: Forbidden: may only be specified when readOnly is true",
        ),
        (
            json!({"volumeDevices": [{"name": "x", "devicePath": "/x"}]}),
            "volumeDevices[0].name: Not found: \"x\"",
        ),
    ]);
}

#[test]
fn invalid_environment_has_upstreams_message() {
    let from = |source: Value| json!({"env": [{"name": "A", "valueFrom": source}]});
    containers(vec![
        (json!({"env": [{"name": ""}]}), "env[0].name: Required value"),
        (
            from(json!({})),
            "env[0].valueFrom: Invalid value: \"\": must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`",
        ),
        (from(json!({"fieldRef": {"fieldPath": ""}})), "env[0].valueFrom.fieldRef.fieldPath: Required value"),
        (
            from(json!({"fieldRef": {"fieldPath": "spec.nodeName['x']"}})),
            "env[0].valueFrom.fieldRef.fieldPath: Invalid value: \"spec.nodeName\": does not support subscript",
        ),
        (
            from(json!({"fieldRef": {"apiVersion": "v2", "fieldPath": "metadata.name"}})),
            "env[0].valueFrom.fieldRef.apiVersion: Unsupported value: \"v2\": supported values: \"v1\"",
        ),
        (
            from(json!({"resourceFieldRef": {"resource": ""}})),
            "env[0].valueFrom.resourceFieldRef.resource: Required value",
        ),
        (
            from(json!({"configMapKeyRef": {"name": "x", "key": ""}})),
            "env[0].valueFrom.configMapKeyRef.key: Required value",
        ),
        (
            from(json!({"secretKeyRef": {"name": "", "key": "x"}})),
            "env[0].valueFrom.secretKeyRef.name: Required value",
        ),
        (
            from(json!({"fileKeyRef": {"volumeName": "x", "path": "p", "key": "K"}})),
            "env[0].valueFrom.fileKeyRef.volumeName: Not found: \"x\"",
        ),
        (
            json!({"envFrom": [{}]}),
            "envFrom[0]: Invalid value: \"\": must specify one of: `configMapRef` or `secretRef`",
        ),
        (json!({"envFrom": [{"secretRef": {"name": ""}}]}), "envFrom[0].secretRef.name: Required value"),
    ]);
}

#[test]
fn invalid_resources_have_upstreams_message() {
    const QUANTITY: &str = "quantities must be a number with an optional suffix (n, u, m, k, M, G, T, P, E, Ki, Mi, Gi, \
                            Ti, Pi, Ei or an exponent)";
    let both = |pod: Value, container: Value| json!({"resources": pod, "containers": [{"name": "c", "image": "i", "resources": container}]});
    let no_quantity = format!("resources.limits[cpu]: Invalid value: \"x\": {QUANTITY}");
    containers(vec![
        (json!({"resources": {"limits": {"cpu": "x"}}}), &no_quantity),
        (
            json!({"resources": {"limits": {"cpu": "-1"}}}),
            "resources.limits[cpu]: Invalid value: \"-1\": must be greater than or equal to 0",
        ),
        (
            json!({"resources": {"limits": {"x": "1"}}}),
            "resources.limits[x]: Invalid value: \"x\": must be a standard resource for containers or fully qualified",
        ),
        (
            json!({"resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}}),
            "resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
        ),
        (
            json!({"resources": {"requests": {"e.g/x": "1"}}}),
            "resources.limits: Required value: Limit must be set for non overcommitable resources",
        ),
        (
            json!({"resources": {"limits": {"hugepages-2Mi": "2Mi"}}}),
            "resources: Forbidden: HugePages require cpu or memory",
        ),
        (
            json!({"resizePolicy": [{"resourceName": "x", "restartPolicy": "NotRequired"}]}),
            "resizePolicy[0].resourceName: Unsupported value: \"x\": supported values: \"cpu\", \"memory\"",
        ),
        (
            json!({"resizePolicy": [{"resourceName": "cpu", "restartPolicy": "x"}]}),
            "resizePolicy[0].restartPolicy: Unsupported value: \"x\": supported values: \"NotRequired\", \"RestartContainer\"",
        ),
    ]);
    let overhead = format!("overhead[cpu]: Invalid value: \"x\": {QUANTITY}");
    pods(vec![
        (json!({"overhead": {"cpu": "x"}}), &overhead),
        (
            json!({"resources": {"limits": {"ephemeral-storage": "1"}}}),
            "resources.limits[ephemeral-storage]: Unsupported value: \"ephemeral-storage\": supported values: \"cpu\", \"hugepages-\", \"memory\"",
        ),
        (
            both(json!({"requests": {"cpu": "1"}}), json!({"requests": {"cpu": "1500m"}})),
            "resources.requests[cpu]: Invalid value: \"1\": must be greater than or equal to aggregate container requests of 1500m",
        ),
        (
            both(json!({"requests": {"memory": "1Gi"}}), json!({"requests": {"memory": "6Gi"}})),
            "resources.requests[memory]: Invalid value: \"1Gi\": must be greater than or equal to aggregate container requests of 6Gi",
        ),
        (
            both(
                json!({"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}),
                json!({"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}),
            ),
            "resources.containers[0][cpu].limits: Invalid value: \"2\": must be less than or equal to pod limits of 1",
        ),
        (
            json!({
                "resources": {"limits": {"cpu": "1", "hugepages-2Mi": "2Mi"}},
                "containers": [
                    {"name": "a", "image": "i", "resources": {"limits": {"cpu": "100m", "hugepages-2Mi": "2Mi"}}},
                    {"name": "b", "image": "i", "resources": {"limits": {"cpu": "100m", "hugepages-2Mi": "2Mi"}}},
                ],
            }),
            "resources.limits[hugepages-2Mi]: Invalid value: \"2Mi\": must be greater than or equal to aggregate container limits of 4Mi",
        ),
    ]);
}
