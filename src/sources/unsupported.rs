//! Pod fields that have no effect in this version, so that users can be warned.

use crate::model::api::{Container, Volume};
use crate::model::pod::Pod;

use super::defaults::sources_of;

/// Paths of the fields of `pod` that are set but have no effect yet, for one `UnsupportedField`
/// event. Fields without effect on any node (affinity, priority class names, preemption policy,
/// topology spread) are not included.
#[must_use]
pub(crate) fn unsupported_fields(pod: &Pod) -> Vec<String> {
    let spec = pod.spec();
    let mut found: Vec<String> = Vec::new();
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        volume_fields(&format!("spec.volumes[{index}]"), volume, &mut found);
    }
    let lists = [
        ("spec.initContainers", spec.init_containers.as_deref().unwrap_or_default()),
        ("spec.containers", spec.containers.as_slice()),
    ];
    for (path, containers) in lists {
        for (index, container) in containers.iter().enumerate() {
            probe_fields(&format!("{path}[{index}]"), container, &mut found);
        }
    }
    found
}

/// Probes use HTTP/1.1, and no TLS for gRPC (gates `H2CContainerProbe` and `GRPCContainerProbeTLS`).
fn probe_fields(path: &str, container: &Container, found: &mut Vec<String>) {
    let probes = [
        ("livenessProbe", &container.liveness_probe),
        ("readinessProbe", &container.readiness_probe),
        ("startupProbe", &container.startup_probe),
    ];
    for (name, probe) in probes {
        let Some(probe) = probe else { continue };
        let protocol = probe.http_get.as_ref().and_then(|action| action.protocol.as_deref());
        if protocol == Some("HTTP2") {
            found.push(format!("{path}.{name}.httpGet.protocol"));
        }
        let mode = probe.grpc.as_ref().and_then(|action| action.mode.as_deref());
        if mode == Some("TLS") {
            found.push(format!("{path}.{name}.grpc.mode"));
        }
    }
}

fn volume_fields(path: &str, volume: &Volume, found: &mut Vec<String>) {
    let built = [
        "emptyDir",
        "hostPath",
        "downwardAPI",
        "projected",
        "configMap",
        "secret",
        "image",
        "persistentVolumeClaim",
        "ephemeral",
        "nfs",
        "iscsi",
        "fc",
        "flexVolume",
        "csi",
    ];
    let later = sources_of(volume).into_iter().filter(|name| !built.contains(name));
    found.extend(later.map(|name| format!("{path}.{name}")));
    if volume.empty_dir.as_ref().is_some_and(|source| source.mode.is_some()) {
        found.push(format!("{path}.emptyDir.mode"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_without_effect_are_listed_by_path() {
        let object: crate::model::api::Pod = serde_json::from_value(json!({"metadata": {}, "spec": {
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}], "hostUsers": false, "resources": {"limits": {"cpu": "1"}}, "activeDeadlineSeconds": 5, "priority": 7,
            "containers": [{"name": "c", "livenessProbe": {}, "lifecycle": {}, "volumeMounts": [
                {"name": "v", "mountPath": "/v"}, {"name": "v", "mountPath": "/w", "subPath": "w"}]}],
            "volumes": [{"name": "v", "emptyDir": {}}, {"name": "d", "downwardAPI": {}}, {"name": "n", "nfs": {"server": "s", "path": "/"}}, {"name": "r", "rbd": {"image": "i", "monitors": []}}, {"name": "m", "emptyDir": {"mode": 488}}],
        }}))
        .unwrap();
        assert_eq!(
            unsupported_fields(&Pod::from(object)),
            ["spec.volumes[3].rbd", "spec.volumes[4].emptyDir.mode"]
        );
    }

    #[test]
    fn probes_by_http2_and_by_tls_are_listed() {
        let http = |protocol: &str| json!({"httpGet": {"port": 1, "protocol": protocol}});
        let grpc = |mode: &str| json!({"grpc": {"port": 1, "mode": mode}});
        let object: crate::model::api::Pod = serde_json::from_value(json!({"metadata": {}, "spec": {
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always", "startupProbe": grpc("TLS")}],
            "containers": [{"name": "c", "livenessProbe": http("HTTP2"), "readinessProbe": http("HTTP1"),
                "startupProbe": grpc("Plaintext")}],
        }}))
        .unwrap();
        assert_eq!(
            unsupported_fields(&Pod::from(object)),
            [
                "spec.initContainers[1].startupProbe.grpc.mode",
                "spec.containers[0].livenessProbe.httpGet.protocol"
            ]
        );
    }
}
