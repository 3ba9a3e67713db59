//! The defaults of fields that a pod does not set, and the values that are converted before a pod is
//! validated (Go: pkg/apis/core/v1/defaults.go and conversion.go, pods only).

use std::collections::BTreeMap;

use crate::model::api::{
    Container, ContainerPort, DownwardAPIVolumeFile, EmptyDirVolumeSource, EnvVar, EphemeralContainer,
    HTTPGetAction, Lifecycle, LifecycleHandler, Pod, PodSecurityContext, PodSpec, Probe,
    ResourceRequirements, Volume, VolumeProjection,
};
use crate::model::quantity::Form;
use crate::model::requests::{container_limits, container_requests};
use crate::model::{self, Quantity};

/// Start of the names of the resources that are huge pages.
const HUGE_PAGES: &str = "hugepages-";

/// File mode of volumes that set none.
const VOLUME_MODE: i32 = 0o644;

/// Sets all defaults of a pod, and converts values as the Go kubelet does.
pub(super) fn set_defaults(pod: &mut Pod) {
    let spec = pod.spec.get_or_insert_default();
    // The old name of the field is used if the new one is absent.
    if blank(&spec.service_account_name) && !blank(&spec.service_account) {
        spec.service_account_name.clone_from(&spec.service_account);
    }
    spec.enable_service_links.get_or_insert(true);
    text(&mut spec.dns_policy, "ClusterFirst");
    text(&mut spec.restart_policy, "Always");
    text(&mut spec.scheduler_name, "default-scheduler");
    let grace = spec.termination_grace_period_seconds.get_or_insert(30);
    // A grace period below zero, which was once meant as no limit, is the shortest one.
    if *grace < 0 {
        *grace = 1;
    }
    spec.security_context.get_or_insert_with(PodSecurityContext::default);
    for volume in spec.volumes.iter_mut().flatten() {
        set_volume(volume);
    }
    let host_network = spec.host_network == Some(true);
    each_container(spec, |container| {
        set_container(container);
        if host_network {
            for port in container.ports.iter_mut().flatten() {
                if port.host_port.unwrap_or(0) == 0 {
                    port.host_port = Some(port.container_port);
                }
            }
        }
    });
    for container in spec.ephemeral_containers.iter_mut().flatten() {
        set_ephemeral(container);
    }
}

/// Sets the defaults of the resources of the pod as a whole, as releases before 1.37 did, if some of
/// them are stated: its limits of huge pages are the sum for its containers, and its requests of CPU and
/// memory, too. Other requests are the limits (Go: `defaultHugePagePodLimits`, `defaultPodRequests`).
/// The pod has all other defaults ([`set_defaults`]).
///
/// From 1.37 on only the API server sets them, so a static pod has none (gate
/// `PodLevelResourcesFixDefaulting`). UIDs of earlier releases are computed from pods with them, and a
/// pod that keeps such a UID keeps them.
pub(super) fn set_pod_level(pod: &mut Pod) {
    let is_stated = |resources: &ResourceRequirements| {
        [&resources.requests, &resources.limits].into_iter().flatten().any(|all| !all.is_empty())
    };
    let stated = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    if !stated.is_some_and(is_stated) {
        return;
    }
    let whole = model::pod::Pod::from(pod.clone());
    let Some(resources) = pod.spec.as_mut().and_then(|spec| spec.resources.as_mut()) else { return };
    let is_page = |name: &String| name.starts_with(HUGE_PAGES);
    let is_requested = |name: &String| resources.requests.as_ref().is_some_and(|all| all.contains_key(name));
    let pages: Vec<_> = container_limits(&whole)
        .into_iter()
        .filter(|(name, _)| is_page(name) && !is_requested(name))
        .map(|(name, sum)| (name, Quantity(sum.format(Form::Binary))))
        .collect();
    if !pages.is_empty() {
        let limits = resources.limits.get_or_insert_default();
        for (name, sum) in pages {
            limits.entry(name).or_insert(sum);
        }
    }
    let Some(limits) = resources.limits.clone().filter(|limits| !limits.is_empty()) else { return };
    let mut requests = resources.requests.take().unwrap_or_default();
    for (name, sum) in container_requests(&whole) {
        let form = match name.as_str() {
            "cpu" => Form::Decimal,
            "memory" => Form::Binary,
            _ => continue,
        };
        requests.entry(name).or_insert_with(|| Quantity(sum.format(form)));
    }
    for (name, limit) in limits {
        if is_page(&name) || ["cpu", "memory"].contains(&name.as_str()) {
            requests.entry(name).or_insert(limit);
        }
    }
    resources.requests = Some(requests).filter(|all| !all.is_empty());
}

fn blank(field: &Option<String>) -> bool {
    field.as_deref().unwrap_or_default().is_empty()
}

fn text(field: &mut Option<String>, default: &str) {
    if blank(field) {
        *field = Some(default.to_owned());
    }
}

fn each_container(spec: &mut PodSpec, mut set: impl FnMut(&mut Container)) {
    spec.init_containers.iter_mut().flatten().chain(&mut spec.containers).for_each(&mut set);
}

fn set_container(container: &mut Container) {
    let image = container.image.as_deref().unwrap_or_default();
    let policy = pull_policy(image);
    text(&mut container.image_pull_policy, policy);
    text(&mut container.termination_message_path, "/dev/termination-log");
    text(&mut container.termination_message_policy, "File");
    for port in container.ports.iter_mut().flatten() {
        set_port(port);
    }
    for variable in container.env.iter_mut().flatten() {
        set_env(variable);
    }
    for probe in [&mut container.liveness_probe, &mut container.readiness_probe, &mut container.startup_probe]
    {
        set_probe(probe.as_mut());
    }
    set_lifecycle(container.lifecycle.as_mut());
    set_requests(&mut container.resources);
}

/// Sets the defaults of an ephemeral container.
pub(super) fn set_ephemeral(container: &mut EphemeralContainer) {
    let policy = pull_policy(container.image.as_deref().unwrap_or_default());
    text(&mut container.image_pull_policy, policy);
    text(&mut container.termination_message_path, "/dev/termination-log");
    text(&mut container.termination_message_policy, "File");
    for variable in container.env.iter_mut().flatten() {
        set_env(variable);
    }
}

fn set_port(port: &mut ContainerPort) {
    text(&mut port.protocol, "TCP");
}

fn set_env(variable: &mut EnvVar) {
    if let Some(source) = &mut variable.value_from {
        if let Some(field) = &mut source.field_ref {
            text(&mut field.api_version, "v1");
        }
        if let Some(key) = &mut source.file_key_ref {
            key.optional.get_or_insert(false);
        }
    }
}

fn set_probe(probe: Option<&mut Probe>) {
    let Some(probe) = probe else { return };
    let number = |field: &mut Option<i32>, default| {
        if field.unwrap_or(0) == 0 {
            *field = Some(default);
        }
    };
    number(&mut probe.timeout_seconds, 1);
    number(&mut probe.period_seconds, 10);
    number(&mut probe.success_threshold, 1);
    number(&mut probe.failure_threshold, 3);
    set_http_get(probe.http_get.as_mut());
    if let Some(grpc) = &mut probe.grpc {
        grpc.service.get_or_insert_default();
    }
}

fn set_lifecycle(lifecycle: Option<&mut Lifecycle>) {
    let Some(lifecycle) = lifecycle else { return };
    let set = |handler: Option<&mut LifecycleHandler>| {
        set_http_get(handler.and_then(|handler| handler.http_get.as_mut()));
    };
    set(lifecycle.post_start.as_mut());
    set(lifecycle.pre_stop.as_mut());
}

fn set_http_get(action: Option<&mut HTTPGetAction>) {
    if let Some(action) = action {
        text(&mut action.path, "/");
        text(&mut action.scheme, "HTTP");
    }
}

/// A resource with a limit but no request is requested up to the limit.
fn set_requests(resources: &mut Option<ResourceRequirements>) {
    let Some(resources) = resources else { return };
    let Some(limits) = &resources.limits else { return };
    let requests: &mut BTreeMap<String, Quantity> = resources.requests.get_or_insert_default();
    for (name, limit) in limits {
        requests.entry(name.clone()).or_insert_with(|| limit.clone());
    }
}

/// `Always` for the tag `latest`, also if it is implicit; else `IfNotPresent`.
fn pull_policy(image: &str) -> &'static str {
    let (name, digest) = match image.split_once('@') {
        Some((name, _)) => (name, true),
        None => (image, false),
    };
    // A colon before the last slash is part of a registry's address.
    let last = name.rsplit('/').next().unwrap_or(name);
    match last.split_once(':') {
        Some((_, "latest")) => "Always",
        None if !digest => "Always",
        _ => "IfNotPresent",
    }
}

/// The names of the sources that a volume has; exactly one is valid.
pub(super) fn sources_of(volume: &Volume) -> Vec<&'static str> {
    macro_rules! set {
        ($($field:ident $name:literal,)*) => {
            [$(volume.$field.is_some().then_some($name)),*].into_iter().flatten().collect()
        };
    }
    set! {
        empty_dir "emptyDir", host_path "hostPath", config_map "configMap", secret "secret",
        downward_api "downwardAPI", projected "projected", image "image",
        persistent_volume_claim "persistentVolumeClaim", ephemeral "ephemeral", csi "csi", nfs "nfs",
        iscsi "iscsi", fc "fc", rbd "rbd", cephfs "cephfs", glusterfs "glusterfs", cinder "cinder",
        flex_volume "flexVolume", flocker "flocker", git_repo "gitRepo",
        aws_elastic_block_store "awsElasticBlockStore", gce_persistent_disk "gcePersistentDisk",
        azure_disk "azureDisk", azure_file "azureFile", vsphere_volume "vsphereVolume",
        quobyte "quobyte", photon_persistent_disk "photonPersistentDisk",
        portworx_volume "portworxVolume", scale_io "scaleIO", storageos "storageos",
    }
}

fn set_volume(volume: &mut Volume) {
    if sources_of(volume).is_empty() {
        volume.empty_dir = Some(EmptyDirVolumeSource::default());
    }
    if let Some(host_path) = &mut volume.host_path {
        host_path.type_.get_or_insert_default();
    }
    if let Some(secret) = &mut volume.secret {
        secret.default_mode.get_or_insert(VOLUME_MODE);
    }
    if let Some(config_map) = &mut volume.config_map {
        config_map.default_mode.get_or_insert(VOLUME_MODE);
    }
    if let Some(downward) = &mut volume.downward_api {
        downward.default_mode.get_or_insert(VOLUME_MODE);
        downward.items.iter_mut().flatten().for_each(set_downward);
    }
    if let Some(projected) = &mut volume.projected {
        projected.default_mode.get_or_insert(VOLUME_MODE);
        projected.sources.iter_mut().flatten().for_each(set_projection);
    }
    if let Some(image) = &mut volume.image {
        let policy = pull_policy(image.reference.as_deref().unwrap_or_default());
        text(&mut image.pull_policy, policy);
    }
    if let Some(claim) = volume.ephemeral.as_mut().and_then(|source| source.volume_claim_template.as_mut()) {
        text(&mut claim.spec.volume_mode, "Filesystem");
    }
    set_network_volume(volume);
}

fn set_network_volume(volume: &mut Volume) {
    if let Some(iscsi) = &mut volume.iscsi {
        text(&mut iscsi.iscsi_interface, "default");
    }
    if let Some(rbd) = &mut volume.rbd {
        text(&mut rbd.pool, "rbd");
        text(&mut rbd.user, "admin");
        text(&mut rbd.keyring, "/etc/ceph/keyring");
    }
    if let Some(disk) = &mut volume.azure_disk {
        text(&mut disk.caching_mode, "ReadWrite");
        text(&mut disk.kind, "Shared");
        text(&mut disk.fs_type, "ext4");
        disk.read_only.get_or_insert(false);
    }
    if let Some(scale_io) = &mut volume.scale_io {
        text(&mut scale_io.storage_mode, "ThinProvisioned");
        text(&mut scale_io.fs_type, "xfs");
    }
}

fn set_downward(file: &mut DownwardAPIVolumeFile) {
    if let Some(field) = &mut file.field_ref {
        text(&mut field.api_version, "v1");
    }
}

fn set_projection(source: &mut VolumeProjection) {
    if let Some(downward) = &mut source.downward_api {
        downward.items.iter_mut().flatten().for_each(set_downward);
    }
    if let Some(token) = &mut source.service_account_token {
        token.expiration_seconds.get_or_insert(3600);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(given: Value, expected: Value) {
        let mut pod: Pod = serde_json::from_value(json!({"metadata": {}, "spec": given})).unwrap();
        set_defaults(&mut pod);
        let spec = serde_json::to_value(pod.spec.as_ref().unwrap()).unwrap();
        assert_eq!(spec, expected);
        let once = pod.clone();
        set_defaults(&mut pod);
        assert_eq!(pod, once, "a second time changes nothing");
    }

    fn spec_with(containers: Value, rest: Value) -> Value {
        let mut spec = json!({
            "containers": containers, "dnsPolicy": "ClusterFirst", "enableServiceLinks": true,
            "restartPolicy": "Always", "schedulerName": "default-scheduler", "securityContext": {},
            "terminationGracePeriodSeconds": 30,
        });
        let map = spec.as_object_mut().unwrap();
        for (key, value) in rest.as_object().unwrap() {
            map.insert(key.clone(), value.clone());
        }
        spec
    }

    fn container(rest: Value) -> Value {
        let mut container = json!({
            "name": "c", "image": "i:1", "imagePullPolicy": "IfNotPresent",
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
        });
        let map = container.as_object_mut().unwrap();
        for (key, value) in rest.as_object().unwrap() {
            map.insert(key.clone(), value.clone());
        }
        container
    }

    #[test]
    fn minimal_pod_gets_all_defaults() {
        check(
            json!({"containers": [{"name": "c", "image": "i:1"}]}),
            spec_with(json!([container(json!({}))]), json!({})),
        );
    }

    #[test]
    fn defaults_do_not_replace_given_values() {
        check(
            json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "enableServiceLinks": false,
                   "dnsPolicy": "Default", "serviceAccount": "s",
                   "containers": [{"name": "c", "image": "i:1", "imagePullPolicy": "Never"}]}),
            spec_with(
                json!([container(json!({"imagePullPolicy": "Never"}))]),
                json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "dnsPolicy": "Default",
                       "enableServiceLinks": false, "serviceAccount": "s", "serviceAccountName": "s"}),
            ),
        );
    }

    #[test]
    fn negative_grace_period_becomes_one_and_old_annotations_stay() {
        for (given, expected) in [(json!(-1), 1), (json!(i64::MIN), 1), (json!(0), 0), (json!(null), 30)] {
            let old = "pod.beta.kubernetes.io/init-containers";
            let mut pod: Pod = serde_json::from_value(json!({
                "metadata": {"annotations": {old: "[]", "a": "b"}},
                "spec": {"containers": [], "terminationGracePeriodSeconds": given},
            }))
            .unwrap();
            set_defaults(&mut pod);
            assert_eq!(pod.spec.unwrap().termination_grace_period_seconds, Some(expected), "{given}");
            let annotations = pod.metadata.annotations.unwrap();
            assert_eq!(annotations.into_keys().collect::<Vec<_>>(), ["a", old]);
        }
    }

    #[test]
    fn ports_probes_env_and_resources_get_defaults() {
        check(
            json!({"hostNetwork": true, "containers": [{"name": "c", "image": "i:1",
                "ports": [{"containerPort": 80}, {"containerPort": 53, "hostPort": 5353, "protocol": "UDP"}],
                "livenessProbe": {"httpGet": {"port": 80}},
                "readinessProbe": {"grpc": {"port": 1}, "periodSeconds": 3},
                "lifecycle": {"preStop": {"httpGet": {"port": "web", "path": "/x"}}},
                "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
                "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}}]}),
            spec_with(
                json!([container(json!({
                    "ports": [{"containerPort": 80, "hostPort": 80, "protocol": "TCP"},
                              {"containerPort": 53, "hostPort": 5353, "protocol": "UDP"}],
                    "livenessProbe": {"httpGet": {"port": 80, "path": "/", "scheme": "HTTP"},
                        "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
                    "readinessProbe": {"grpc": {"port": 1, "service": ""},
                        "timeoutSeconds": 1, "periodSeconds": 3, "successThreshold": 1, "failureThreshold": 3},
                    "lifecycle": {"preStop": {"httpGet": {"port": "web", "path": "/x", "scheme": "HTTP"}}},
                    "env": [{"name": "A",
                             "valueFrom": {"fieldRef": {"fieldPath": "metadata.name", "apiVersion": "v1"}}}],
                    "resources": {"limits": {"cpu": "1", "memory": "1Gi"},
                                  "requests": {"cpu": "500m", "memory": "1Gi"}},
                }))]),
                json!({"hostNetwork": true}),
            ),
        );
    }

    #[test]
    fn resources_of_the_pod_as_a_whole_get_no_defaults() {
        let limits = json!({"cpu": "500m", "memory": "200Mi"});
        let resources = json!({"limits": limits, "requests": {"cpu": "100m"}});
        check(
            json!({"resources": resources, "containers": [{"name": "c", "image": "i:1",
                "resources": {"requests": {"memory": "1Mi"}, "limits": {"hugepages-2Mi": "2Mi", "memory": "1Mi"}}}]}),
            spec_with(
                json!([container(json!({"resources": {
                    "requests": {"memory": "1Mi", "hugepages-2Mi": "2Mi"},
                    "limits": {"hugepages-2Mi": "2Mi", "memory": "1Mi"},
                }}))]),
                json!({"resources": resources}),
            ),
        );
    }

    #[test]
    fn requests_of_the_pod_defaulted_to_the_sum_of_its_containers_before_its_limits() {
        let check = |containers: Value, given: Value, expected: Value| {
            let mut pod: Pod =
                serde_json::from_value(json!({"spec": {"containers": containers, "resources": given}}))
                    .unwrap();
            set_defaults(&mut pod);
            set_pod_level(&mut pod);
            let found = serde_json::to_value(&pod.spec.as_ref().unwrap().resources).unwrap();
            assert_eq!(found, expected, "{given}");
            let once = pod.clone();
            set_defaults(&mut pod);
            set_pod_level(&mut pod);
            assert_eq!(pod, once, "a second time changes nothing");
        };
        let with = |name: &str, limits: Value| json!({"name": name, "resources": {"limits": limits}});
        let limits = json!({"cpu": "500m", "memory": "200Mi"});
        // The recorded pod pl-gu-mix, which is Burstable.
        let mixed = json!([with("a", json!({"cpu": "200m", "memory": "64Mi"})), {"name": "b"}]);
        let requests = json!({"cpu": "200m", "memory": "64Mi"});
        check(mixed.clone(), json!({"limits": limits}), json!({"limits": limits, "requests": requests}));
        check(
            mixed.clone(),
            json!({"limits": limits, "requests": {"cpu": "300m"}}),
            json!({"limits": limits, "requests": {"cpu": "300m", "memory": "64Mi"}}),
        );
        let alone = json!([{"name": "a"}]);
        check(alone.clone(), json!({"limits": limits}), json!({"limits": limits, "requests": limits}));
        // Without limits nothing is added.
        check(mixed, json!({"requests": {"cpu": "1"}}), json!({"requests": {"cpu": "1"}}));
        check(alone, json!({}), json!({}));
        let pages = json!([
            with("a", json!({"hugepages-2Mi": "4Mi", "cpu": "1"})),
            with("b", json!({"hugepages-2Mi": "2Mi"})),
        ]);
        check(
            pages.clone(),
            json!({"requests": {"cpu": "2"}}),
            json!({"limits": {"hugepages-2Mi": "6Mi"}, "requests": {"cpu": "2", "hugepages-2Mi": "6Mi"}}),
        );
        // One that is requested gets no limit.
        check(
            pages,
            json!({"requests": {"hugepages-2Mi": "8Mi"}}),
            json!({"requests": {"hugepages-2Mi": "8Mi"}}),
        );
    }

    #[test]
    fn volumes_get_defaults() {
        check(
            json!({"containers": [], "volumes": [
                {"name": "a"}, {"name": "b", "hostPath": {"path": "/x"}},
                {"name": "c", "configMap": {"name": "m"}}, {"name": "d", "image": {"reference": "x"}},
                {"name": "e", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}},
                    {"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}}]}}]}),
            spec_with(
                json!([]),
                json!({"volumes": [
                    {"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/x", "type": ""}},
                    {"name": "c", "configMap": {"name": "m", "defaultMode": 420}},
                    {"name": "d", "image": {"reference": "x", "pullPolicy": "Always"}},
                    {"name": "e", "projected": {"defaultMode": 420, "sources": [
                        {"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}},
                        {"downwardAPI": {"items": [{"path": "l",
                            "fieldRef": {"fieldPath": "metadata.labels", "apiVersion": "v1"}}]}}]}}]}),
            ),
        );
    }

    #[test]
    fn pull_policy_follows_the_tag() {
        for (image, expected) in [
            ("busybox", "Always"),
            ("busybox:latest", "Always"),
            ("busybox:1", "IfNotPresent"),
            ("host:5000/busybox", "Always"),
            ("host:5000/busybox:1", "IfNotPresent"),
            ("busybox@sha256:0", "IfNotPresent"),
            ("busybox:latest@sha256:0", "Always"),
            ("", "Always"),
        ] {
            assert_eq!(pull_policy(image), expected, "{image}");
        }
    }
}
