//! A pod as passed between rooms: immutable, shared, with its UID and names cached.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::api::{Container, EphemeralContainer, PodSpec, ResourceRequirements};
use super::event::Regarding;
use super::ids::{FullName, PodUid};
use super::quantity::{Amount, amount};

/// Annotation: the source of a pod (`file`, `http` or `api`).
pub const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// Annotation: when this agent first saw the UID.
pub const CONFIG_SEEN: &str = "kubernetes.io/config.seen";
/// Annotation of static pods: equals the UID.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// Annotation: its presence makes an object a mirror pod.
pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// The three sources of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say what the values are")]
pub enum SourceName {
    /// A file or a directory of files.
    File,
    Http,
    Api,
}

impl SourceName {
    /// The text in the annotation.
    pub fn as_str(self) -> &'static str {
        match self {
            SourceName::File => "file",
            SourceName::Http => "http",
            SourceName::Api => "api",
        }
    }

    /// The source of this text in the annotation.
    #[must_use]
    pub fn parse(text: &str) -> Option<SourceName> {
        [SourceName::File, SourceName::Http, SourceName::Api]
            .into_iter()
            .find(|source| source.as_str() == text)
    }
}

/// Quality of service class (Go: pkg/apis/core/v1/helper/qos).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QosClass {
    /// No container has a request or a limit of CPU or memory.
    BestEffort,
    /// All other pods.
    Burstable,
    /// Every container has equal requests and limits of both CPU and memory.
    Guaranteed,
}

impl QosClass {
    /// The text in `status.qosClass`.
    pub fn as_str(self) -> &'static str {
        match self {
            QosClass::BestEffort => "BestEffort",
            QosClass::Burstable => "Burstable",
            QosClass::Guaranteed => "Guaranteed",
        }
    }

    /// The class of this text in `status.qosClass`.
    #[must_use]
    pub fn parse(text: &str) -> Option<QosClass> {
        [QosClass::BestEffort, QosClass::Burstable, QosClass::Guaranteed]
            .into_iter()
            .find(|class| class.as_str() == text)
    }
}

/// An API pod that is never changed. Cloning copies two pointers.
#[derive(Debug, Clone)]
pub struct Pod {
    object: Arc<super::api::Pod>,
    uid: PodUid,
}

impl From<super::api::Pod> for Pod {
    fn from(object: super::api::Pod) -> Self {
        let uid = PodUid::from(object.metadata.uid.clone().unwrap_or_default());
        Pod { object: Arc::new(object), uid }
    }
}

impl PartialEq for Pod {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.object, &other.object) || self.object == other.object
    }
}

static NO_SPEC: std::sync::LazyLock<PodSpec> = std::sync::LazyLock::new(PodSpec::default);

impl Pod {
    /// A pod as the API server shows it. Each user can set the annotation of the source, which would make it
    /// a static pod; only in a mirror it is that of the agent.
    #[must_use]
    pub fn from_server(mut object: super::api::Pod) -> Pod {
        if let Some(annotations) = &mut object.metadata.annotations
            && !annotations.contains_key(CONFIG_MIRROR)
        {
            annotations.remove(CONFIG_SOURCE);
        }
        Pod::from(object)
    }

    /// The API object.
    #[must_use]
    pub fn object(&self) -> &super::api::Pod {
        &self.object
    }

    /// The API object for changes; copied only if it is shared.
    #[must_use]
    pub fn into_object(self) -> super::api::Pod {
        Arc::unwrap_or_clone(self.object)
    }

    /// `metadata.uid`.
    pub fn uid(&self) -> &PodUid {
        &self.uid
    }

    /// `metadata.name`, empty if absent.
    pub fn name(&self) -> &str {
        self.object.metadata.name.as_deref().unwrap_or_default()
    }

    /// `metadata.namespace`, empty if absent.
    pub fn namespace(&self) -> &str {
        self.object.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// `<name>_<namespace>`.
    #[must_use]
    pub fn full_name(&self) -> FullName {
        FullName::new(self.name(), self.namespace())
    }

    /// The specification; an empty one if the object has none.
    pub fn spec(&self) -> &PodSpec {
        self.object.spec.as_ref().unwrap_or(&NO_SPEC)
    }

    /// An annotation's value.
    #[must_use]
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.object.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// The source of the pod.
    #[must_use]
    pub fn source(&self) -> SourceName {
        match self.annotation(CONFIG_SOURCE) {
            Some("file") => SourceName::File,
            Some("http") => SourceName::Http,
            _ => SourceName::Api,
        }
    }

    /// Whether it came from a file or a URL.
    pub fn is_static(&self) -> bool {
        self.source() != SourceName::Api
    }

    /// Whether it is a mirror pod.
    pub fn is_mirror(&self) -> bool {
        self.annotation(CONFIG_MIRROR).is_some()
    }

    /// Whether it is static, a mirror, or of system priority (≥ 2,000,000,000).
    pub fn is_critical(&self) -> bool {
        self.is_static() || self.is_mirror() || self.spec().priority.is_some_and(|p| p >= 2_000_000_000)
    }

    /// `spec.hostNetwork`.
    pub fn host_network(&self) -> bool {
        self.spec().host_network.unwrap_or(false)
    }

    /// The pod-wide restart policy; `Always` if absent.
    pub fn restart_policy(&self) -> &str {
        self.spec().restart_policy.as_deref().unwrap_or("Always")
    }

    /// `status.phase` from the source, empty if absent.
    pub fn source_phase(&self) -> &str {
        self.object.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
    }

    /// Whether the API server shows it Failed or Succeeded: then it must not run. The phase in the
    /// manifest of a static pod is ignored.
    pub fn is_over(&self) -> bool {
        !self.is_static() && matches!(self.source_phase(), "Failed" | "Succeeded")
    }

    /// Whether a container gets an extended resource from a resource claim, which the scheduler has
    /// made, and not from a device plugin.
    pub fn is_claimed(&self, container: &str, resource: &str) -> bool {
        let status = self.object().status.as_ref();
        let claim = status.and_then(|status| status.extended_resource_claim_status.as_ref());
        claim.is_some_and(|claim| {
            let mut mappings = claim.request_mappings.iter();
            mappings.any(|mapping| mapping.container_name == container && mapping.resource_name == resource)
        })
    }

    /// Whether it is being deleted.
    pub fn is_deleting(&self) -> bool {
        self.object.metadata.deletion_timestamp.is_some()
    }

    /// `spec.terminationGracePeriodSeconds`, 30 if absent.
    pub fn grace_seconds(&self) -> i64 {
        self.spec().termination_grace_period_seconds.unwrap_or(30)
    }

    /// Init containers in order.
    pub fn init_containers(&self) -> &[Container] {
        self.spec().init_containers.as_deref().unwrap_or_default()
    }

    /// Regular containers in order.
    pub fn containers(&self) -> &[Container] {
        &self.spec().containers
    }

    /// Init and regular containers.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.init_containers().iter().chain(self.containers())
    }

    /// Ephemeral containers in order, converted to regular ones. They run once, whatever the pod's
    /// policy is.
    #[must_use]
    pub fn ephemeral_containers(&self) -> Vec<Container> {
        self.spec().ephemeral_containers.iter().flatten().map(plain_container).collect()
    }

    /// The names of the volumes that containers of any kind mount or use as devices. Others are not set up.
    #[must_use]
    pub fn referenced_volumes(&self) -> BTreeSet<&str> {
        let ephemeral = self.spec().ephemeral_containers.iter().flatten();
        let uses = self
            .all_containers()
            .map(|container| (&container.volume_mounts, &container.volume_devices))
            .chain(ephemeral.map(|container| (&container.volume_mounts, &container.volume_devices)));
        let mut names = BTreeSet::new();
        for (mounts, devices) in uses {
            names.extend(mounts.iter().flatten().map(|mount| mount.name.as_str()));
            names.extend(devices.iter().flatten().map(|device| device.name.as_str()));
        }
        names
    }

    /// The object of an event about it, or about a part of it.
    #[must_use]
    pub fn regarding(&self, field_path: &str) -> Regarding {
        Regarding::Pod {
            namespace: self.namespace().to_owned(),
            name: self.name().to_owned(),
            uid: self.uid.clone(),
            field_path: field_path.to_owned(),
        }
    }

    /// The quality of service class: that of the API server, or of `spec` (pod-level resources take
    /// precedence).
    #[must_use]
    pub fn qos(&self) -> QosClass {
        let shown = self.object.status.as_ref().and_then(|status| status.qos_class.as_deref());
        let shown = shown.filter(|_| !self.is_static()).and_then(QosClass::parse);
        shown.unwrap_or_else(|| qos_of(self.spec()))
    }
}

/// Whether `container` is a sidecar: an init container that runs together with the regular ones.
pub fn is_sidecar(init_container: &Container) -> bool {
    init_container.restart_policy.as_deref() == Some("Always")
}

/// An ephemeral container converted to a regular one, with the fields that both types have.
fn plain_container(ephemeral: &EphemeralContainer) -> Container {
    let fields = ephemeral.clone();
    Container {
        name: fields.name,
        image: fields.image,
        image_pull_policy: fields.image_pull_policy,
        command: fields.command,
        args: fields.args,
        working_dir: fields.working_dir,
        env: fields.env,
        env_from: fields.env_from,
        resources: fields.resources,
        volume_mounts: fields.volume_mounts,
        volume_devices: fields.volume_devices,
        security_context: fields.security_context,
        stdin: fields.stdin,
        stdin_once: fields.stdin_once,
        tty: fields.tty,
        termination_message_path: fields.termination_message_path,
        termination_message_policy: fields.termination_message_policy,
        restart_policy: Some("Never".to_owned()),
        ..Container::default()
    }
}

/// A container's request of `resource` (its limit when it has no request).
#[must_use]
pub fn request(container: &Container, resource: &str) -> Option<Amount> {
    let resources = container.resources.as_ref()?;
    let get = |map: &Option<std::collections::BTreeMap<String, super::Quantity>>| {
        map.as_ref().and_then(|map| map.get(resource)).map(amount)
    };
    get(&resources.requests).or_else(|| get(&resources.limits))
}

/// A container's limit of `resource`.
#[must_use]
pub fn limit(container: &Container, resource: &str) -> Option<Amount> {
    container.resources.as_ref()?.limits.as_ref()?.get(resource).map(amount)
}

/// The hash that shows whether a running container has the current image and name (Go:
/// pkg/kubelet/container HashContainer). It is the same value as upstream's, so that containers
/// that a Go kubelet started are not restarted.
#[must_use]
pub fn container_hash(name: &str, image: &str) -> u32 {
    use std::fmt::Write;
    // Two strings always serialize.
    let json = serde_json::json!({"image": image, "name": name}).to_string();
    // Upstream hashes the printed form of the JSON's byte slice, not the bytes.
    let mut dump = String::from("([]uint8)[");
    for (index, byte) in json.bytes().enumerate() {
        let space = if index == 0 { "" } else { " " };
        // Writing to a String cannot fail.
        let _ = write!(dump, "{space}{byte}");
    }
    dump.push(']');
    fnv32(&dump)
}

/// FNV-1a, 32 bits.
#[must_use]
pub fn fnv32(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Whether a pod has resources as a whole: at least one of CPU, memory and huge pages, even if it is
/// zero (Go: component-helpers resource `IsPodLevelResourcesSet`).
#[must_use]
pub fn has_pod_level_resources(spec: &PodSpec) -> bool {
    let counts = |name: &String| name == "cpu" || name == "memory" || name.starts_with("hugepages-");
    let Some(resources) = &spec.resources else { return false };
    [&resources.requests, &resources.limits].into_iter().flatten().flat_map(|all| all.keys()).any(counts)
}

/// With resources of the pod as a whole, the containers' do not count. Their requests are those that
/// are stated: a limit alone is none.
fn qos_of(spec: &PodSpec) -> QosClass {
    let of_pod = spec.resources.as_ref().filter(|_| has_pod_level_resources(spec));
    let stated = |resources: &ResourceRequirements, resource: &str| {
        let get = |map: &Option<std::collections::BTreeMap<String, super::Quantity>>| {
            map.as_ref().and_then(|map| map.get(resource)).map(amount)
        };
        (get(&resources.requests), get(&resources.limits))
    };
    let mut numbers = Vec::new();
    for resource in ["cpu", "memory"] {
        match of_pod {
            Some(resources) => numbers.push(stated(resources, resource)),
            None => {
                let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
                let both = |container: &Container| (request(container, resource), limit(container, resource));
                numbers.extend(containers.map(both));
            }
        }
    }
    let positive = |amount: Option<Amount>| amount.filter(|amount| !amount.is_zero());
    let mut any = false;
    let mut guaranteed = true;
    for (want, most) in numbers {
        let (want, most) = (positive(want), positive(most));
        any |= want.is_some() || most.is_some();
        guaranteed &= most.is_some() && want == most;
    }
    match (any, guaranteed) {
        (false, _) => QosClass::BestEffort,
        (true, true) => QosClass::Guaranteed,
        (true, false) => QosClass::Burstable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: serde_json::Value) -> Pod {
        let object: super::super::api::Pod =
            serde_json::from_value(serde_json::json!({"metadata": {"name": "p"}, "spec": spec})).unwrap();
        Pod::from(object)
    }

    #[test]
    fn container_hash_is_upstreams() {
        assert_eq!(format!("{:x}", container_hash("c", "localhost/busybox:1")), "dd609c43");
        assert_eq!(format!("{:x}", container_hash("web", "registry.example/nginx@sha256:abc")), "89ebb175");
    }

    #[test]
    fn requests_and_limits_determine_the_qos_class() {
        let container =
            |resources: serde_json::Value| serde_json::json!({"name": "c", "resources": resources});
        let check = |resources: Vec<serde_json::Value>, expected| {
            let containers: Vec<_> = resources.into_iter().map(container).collect();
            assert_eq!(pod(serde_json::json!({"containers": containers})).qos(), expected);
        };
        use serde_json::json;
        check(vec![json!({})], QosClass::BestEffort);
        check(vec![json!({"requests": {"cpu": "0"}})], QosClass::BestEffort);
        check(vec![json!({"requests": {"cpu": "1"}})], QosClass::Burstable);
        check(vec![json!({"limits": {"cpu": "1", "memory": "1Gi"}})], QosClass::Guaranteed);
        check(vec![json!({"limits": {"cpu": "1", "memory": "1Gi"}}), json!({})], QosClass::Burstable);
        // The resources of the pod as a whole count alone.
        for (of_pod, expected) in [
            (
                json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}),
                QosClass::Guaranteed,
            ),
            // A limit alone is no request here.
            (json!({"limits": {"cpu": "1", "memory": "1Gi"}}), QosClass::Burstable),
            (json!({"requests": {"cpu": "1"}}), QosClass::Burstable),
            (json!({"limits": {"hugepages-2Mi": "4Mi"}}), QosClass::BestEffort),
            // Without any they decide nothing.
            (json!({"limits": {}, "requests": {}}), QosClass::Burstable),
            (json!({"limits": {"example.com/gpu": "1"}}), QosClass::Burstable),
            (json!({}), QosClass::Burstable),
            (json!({"requests": {"cpu": "0"}}), QosClass::BestEffort),
        ] {
            let container = container(json!({"requests": {"cpu": "1"}}));
            let pod = pod(json!({"containers": [container], "resources": of_pod}));
            assert_eq!(pod.qos(), expected, "{of_pod}");
        }
        check(
            vec![json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1000m"}})],
            QosClass::Guaranteed,
        );
    }

    #[test]
    fn annotation_of_a_user_makes_no_static_pod() {
        let shown = |annotations: serde_json::Value| {
            let object = serde_json::json!({"metadata": {"name": "p", "annotations": annotations}});
            Pod::from_server(serde_json::from_value(object).unwrap())
        };
        let pod = shown(serde_json::json!({CONFIG_SOURCE: "file", "other": "x"}));
        assert_eq!((pod.source(), pod.annotation("other")), (SourceName::Api, Some("x")));
        let mirror = shown(serde_json::json!({CONFIG_SOURCE: "file", CONFIG_MIRROR: "x"}));
        assert_eq!(mirror.source(), SourceName::File);
    }

    #[test]
    fn class_of_the_api_server_comes_before_the_computed_one() {
        let with = |class: &str, annotations: serde_json::Value| {
            let object = serde_json::json!({
                "metadata": {"name": "p", "annotations": annotations},
                "spec": {"containers": [{"name": "c"}]},
                "status": {"qosClass": class},
            });
            Pod::from(serde_json::from_value::<super::super::api::Pod>(object).unwrap()).qos()
        };
        let none = serde_json::json!({});
        assert_eq!(with("Burstable", none.clone()), QosClass::Burstable);
        assert_eq!(with("Guaranteed", none.clone()), QosClass::Guaranteed);
        assert_eq!(with("other", none.clone()), QosClass::BestEffort);
        assert_eq!(with("", none), QosClass::BestEffort);
        // The status in a manifest has no effect.
        assert_eq!(with("Burstable", serde_json::json!({CONFIG_SOURCE: "file"})), QosClass::BestEffort);
    }
}
