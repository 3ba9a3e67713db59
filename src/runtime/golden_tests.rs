//! The pure builders against the recordings in `tests/golden/data`: each RunPodSandbox and
//! CreateContainer request must be the recorded one, field by field.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::container_config::{ContainerInputs, container_config};
use super::dns::{pod_resolver, read_host};
use super::fields::Addresses;
use super::hosts;
use super::sandbox_config::{SandboxInputs, sandbox_config};
use super::settings::{HostFeatures, Settings};
use crate::images::ImageUser;
use crate::kube::LocalObjects;
use crate::model::api;
use crate::model::mount::{MountedVolume, SubPath, SubPathFailure, SubPaths};
use crate::model::pod::Pod;
use crate::model::quantity::Amount;
use crate::transport::generated::MessageField;
use crate::transport::generated::runtime::{
    ContainerConfig, CreateContainerRequest, PodSandboxConfig, RunPodSandboxRequest,
};
use crate::util::stop::StopToken;

mod protojson {
    //! Messages as protobuf JSON, by the converters that `build.rs` writes for tests.

    use std::collections::BTreeMap;
    use std::fmt::{Debug, Display};

    use serde_json::{Map, Value};

    use crate::transport::generated::runtime;

    pub(super) trait ToJson {
        fn to_json(&self) -> Value;
    }

    fn enum_json(value: &impl Debug) -> Value {
        format!("{value:?}").into()
    }

    fn bytes_json(bytes: &[u8]) -> Value {
        crate::util::encoding::base64(bytes).into()
    }

    fn filled<T: Default + PartialEq>(value: &T) -> bool {
        *value != T::default()
    }

    fn map_json<K: Display>(map: &mut Map<String, Value>, name: &str, entries: &BTreeMap<K, String>) {
        if !entries.is_empty() {
            let entries = entries.iter().map(|(key, value)| (key.to_string(), value.clone().into()));
            map.insert(name.to_owned(), Value::Object(entries.collect()));
        }
    }

    #[allow(clippy::all)]
    mod generated {
        use super::*;

        include!(concat!(env!("OUT_DIR"), "/json.rs"));
    }
}

use protojson::ToJson;

const BASE: &str = "<base>";
const IMAGE: &str = "sha256:5d1fb6e09aa75e9bdbbf9d51541d3e310c5f2237b0dbdafc0072e0d1503bc864";
/// A pod's own address and UID inside env values are still those of the recording.
const RECORDED_IP: &str = "10.88.1.203";
const RECORDED_UID: &str = "b6d00cb2c08a9c51d4307614abd7a00e";

/// The path at which the volumes room would have mounted a sub path.
struct FakeSubPaths(PathBuf);

impl SubPaths for FakeSubPaths {
    fn bind(&self, wanted: SubPath<'_>, _: &StopToken) -> Result<PathBuf, SubPathFailure> {
        let place = format!("{}/{}/{}", wanted.volume.volume, wanted.container, wanted.index);
        Ok(self.0.join("volume-subpaths").join(place))
    }
}

fn data() -> PathBuf {
    Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("tests/golden/data")
}

fn load(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The node of the recording.
fn settings(dir: &Path) -> Settings {
    let resolv_conf = dir.join("resolv.conf");
    std::fs::write(&resolv_conf, "nameserver 198.51.100.1\nsearch host.example\noptions attempts:3\n")
        .unwrap();
    let mut settings = super::tests::settings();
    settings.root_dir = Path::new(BASE).join("root");
    settings.pod_logs_dir = Path::new(BASE).join("logs");
    settings.node_ips = vec!["192.0.2.10".parse().unwrap()];
    settings.cluster_dns = vec!["10.96.0.10".parse().unwrap()];
    settings.cluster_domain = "cluster.local".into();
    settings.resolv_conf = resolv_conf;
    settings.machine.memory_capacity_bytes = 24_684_096 << 10;
    settings.machine.hugepage_sizes = vec!["2MB".into(), "1GB".into()];
    settings.machine.allocatable_ephemeral_storage = Amount::parse("258020Mi").unwrap();
    settings
}

/// Changes a static pod's manifest as the sources room does.
fn as_static_pod(manifest: &Value) -> Pod {
    let mut object = manifest.clone();
    let metadata = object["metadata"].as_object_mut().unwrap();
    let name = format!("{}-golden-node", metadata["name"].as_str().unwrap());
    metadata.insert("name".into(), name.into());
    metadata.insert("uid".into(), RECORDED_UID.into());
    let annotations = metadata.entry("annotations").or_insert_with(|| json!({})).as_object_mut().unwrap();
    annotations.insert("kubernetes.io/config.hash".into(), RECORDED_UID.into());
    annotations.insert("kubernetes.io/config.seen".into(), "<time>".into());
    annotations.insert("kubernetes.io/config.source".into(), "file".into());
    let mut pod: api::Pod = serde_json::from_value(object).unwrap();
    let spec = pod.spec.as_mut().unwrap();
    spec.dns_policy.get_or_insert_with(|| "ClusterFirst".into());
    spec.node_name = Some("golden-node".into());
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        container.termination_message_path.get_or_insert_with(|| "/dev/termination-log".into());
        container.termination_message_policy.get_or_insert_with(|| "File".into());
        for port in container.ports.iter_mut().flatten() {
            port.protocol.get_or_insert_with(|| "TCP".into());
        }
        if let Some(resources) = &mut container.resources
            && let Some(limits) = &resources.limits
        {
            let requests = resources.requests.get_or_insert_default();
            for (name, quantity) in limits {
                requests.entry(name.clone()).or_insert_with(|| quantity.clone());
            }
        }
    }
    Pod::from(pod)
}

/// The volumes that the volumes room would have mounted.
fn volumes(pod: &Pod, settings: &Settings) -> Vec<MountedVolume> {
    let dir = settings.root_dir.join("pods").join(pod.uid().as_str()).join("volumes");
    let mounted = |volume: &api::Volume| {
        let (host_path, read_only) = match (&volume.host_path, &volume.downward_api) {
            (Some(host_path), _) => (PathBuf::from(&host_path.path), false),
            (_, Some(_)) => (dir.join("kubernetes.io~downward-api").join(&volume.name), true),
            _ => (dir.join("kubernetes.io~empty-dir").join(&volume.name), false),
        };
        MountedVolume { volume: volume.name.clone(), host_path, read_only, selinux_relabel: true }
    };
    pod.spec().volumes.iter().flatten().map(mounted).collect()
}

struct Node {
    settings: Settings,
    _dir: tempfile::TempDir,
}

impl Node {
    fn new() -> Node {
        let dir = tempfile::tempdir().unwrap();
        Node { settings: settings(dir.path()), _dir: dir }
    }

    fn sandbox(&self, pod: &Pod, attempt: u32) -> PodSandboxConfig {
        let host = read_host(&self.settings.resolv_conf).unwrap();
        let (resolver, notices) = pod_resolver(pod, host, &self.settings.dns());
        assert!(notices.is_empty());
        let settings = &self.settings;
        sandbox_config(SandboxInputs {
            pod,
            attempt,
            resolver: &resolver,
            settings,
            cgroup_parent: "",
            ids: None,
        })
        .unwrap()
    }

    fn container(&self, pod: &Pod, name: &str, restart_count: u32) -> Result<ContainerConfig, String> {
        let container = pod.all_containers().find(|container| container.name == name).unwrap();
        let ips = [RECORDED_IP.parse().unwrap()];
        let pod_ips = if pod.host_network() { &[][..] } else { &ips };
        let hosts_file = hosts::path(&self.settings.root_dir, pod);
        let dir = self.settings.root_dir.join("pods").join(pod.uid().as_str());
        let termination_log = dir.join("containers").join(name).join("<rand>");
        container_config(ContainerInputs {
            pod,
            container,
            restart_count,
            image_ref: IMAGE,
            image_user: &ImageUser::default(),
            addresses: Addresses { pod: pod_ips, host: &self.settings.node_ips },
            volumes: &volumes(pod, &self.settings),
            image_volumes: &[],
            sub_paths: &FakeSubPaths(dir),
            recursive_read_only_mounts: false,
            stop: &StopToken::never(),
            api: None,
            local: &LocalObjects::default(),
            hosts_file: Some(&hosts_file),
            termination_log: Some(&termination_log),
            settings: &self.settings,
            host: &HostFeatures::default(),
            ids: None,
        })
        .map_err(|error| error.to_string())
    }
}

/// Normalizes both sides: lists without a meaningful order are sorted, the pod's UID is a
/// placeholder.
fn normalize(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                normalize(value);
                if let (true, Value::Array(list)) = (["options", "envs"].contains(&key.as_str()), value) {
                    list.sort_by_key(ToString::to_string);
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(normalize),
        Value::String(text) => *text = text.replace(RECORDED_UID, "<uid>"),
        _ => {}
    }
}

fn differences(path: &str, expected: &Value, actual: &Value, out: &mut Vec<String>) {
    match (expected, actual) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let side =
                    |map: &serde_json::Map<String, Value>| map.get(key).cloned().unwrap_or(Value::Null);
                differences(&format!("{path}.{key}"), &side(a), &side(b), out);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (index, (a, b)) in a.iter().zip(b).enumerate() {
                differences(&format!("{path}[{index}]"), a, b, out);
            }
        }
        (a, b) if a == b => {}
        (a, b) => out.push(format!("{path}: recorded {a}, built {b}")),
    }
}

/// The differences of one pod, and how many requests were compared.
fn compare(node: &Node, pod: &Pod, recorded: &Value) -> (usize, Vec<String>) {
    let (mut compared, mut found) = (0, Vec::new());
    for call in recorded["cri_calls"].as_array().unwrap() {
        let request = &call["request"];
        let number = |value: &Value| u32::try_from(value.as_u64().unwrap_or(0)).unwrap();
        let built = match call["call"].as_str().unwrap() {
            "RunPodSandbox" => RunPodSandboxRequest {
                config: MessageField::some(
                    node.sandbox(pod, number(&request["config"]["metadata"]["attempt"])),
                ),
                ..RunPodSandboxRequest::default()
            }
            .to_json(),
            "CreateContainer" => {
                let metadata = &request["config"]["metadata"];
                let name = metadata["name"].as_str().unwrap();
                let attempt = number(&request["sandbox_config"]["metadata"]["attempt"]);
                match node.container(pod, name, number(&metadata["attempt"])) {
                    Ok(config) => CreateContainerRequest {
                        pod_sandbox_id: format!("<sandbox {attempt}>"),
                        config: MessageField::some(config),
                        sandbox_config: MessageField::some(node.sandbox(pod, attempt)),
                        ..CreateContainerRequest::default()
                    }
                    .to_json(),
                    Err(error) => json!({"error": error}),
                }
            }
            _ => continue,
        };
        compared += 1;
        let (mut expected, mut built) = (request.clone(), built);
        normalize(&mut expected);
        normalize(&mut built);
        differences(call["call"].as_str().unwrap(), &expected, &built, &mut found);
    }
    (compared, found)
}

#[test]
fn runtime_requests_equal_recorded_ones() {
    let node = Node::new();
    let (mut pods, mut requests, mut differing) = (0, 0, Vec::new());
    let mut files: Vec<_> =
        std::fs::read_dir(data().join("expected")).unwrap().map(|file| file.unwrap()).collect();
    files.sort_by_key(std::fs::DirEntry::file_name);
    for file in &files {
        let name = file.path().file_stem().unwrap().to_string_lossy().into_owned();
        let pod = as_static_pod(&load(&data().join("manifests").join(file.file_name())));
        let (compared, found) = compare(&node, &pod, &load(&file.path()));
        assert!(found.is_empty(), "{name}:\n{}", found.join("\n"));
        if found.is_empty() {
            pods += 1;
            requests += compared;
        } else {
            differing.push(name);
        }
    }
    println!(
        "golden requests: {pods} of {} pods agree ({requests} requests); of a later version: {}",
        files.len(),
        differing.join(", ")
    );
    assert_eq!(pods, files.len());
    assert!(requests > 100, "{requests}");
}

#[test]
fn a_root_image_is_refused_with_the_recorded_message() {
    let node = Node::new();
    let pod = as_static_pod(&load(&data().join("manifests/nonroot-image.json")));
    let recorded = load(&data().join("expected/nonroot-image.json"));
    let waiting = &recorded["pod_status"]["status"]["containerStatuses"][0]["state"]["waiting"];
    let error = node.container(&pod, "main", 0).unwrap_err();
    assert_eq!(Some(error.replace(RECORDED_UID, "<uid>").as_str()), waiting["message"].as_str());
    assert_eq!(waiting["reason"], crate::model::reasons::CREATE_CONTAINER_CONFIG_ERROR);
}
