//! The resource fields of requests against the recordings in `tests/golden/resources`: pods of every
//! kind, with several configurations.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::linux_resources::{container_resources, sandbox_resources};
use super::settings::Settings;
use crate::model::pod::Pod;
use crate::model::quantity::Form;
use crate::model::requests::container_requests;
use crate::model::{Quantity, api};
use crate::transport::generated::runtime::LinuxContainerResources;

fn data(path: &str) -> PathBuf {
    Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("tests/golden").join(path)
}

fn load(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The manifests that a pod has in the recordings: the first one, and edits.
fn pods(name: &str) -> Vec<Pod> {
    ["", "@2", "@3"]
        .iter()
        .flat_map(|edit| {
            ["resources", "data"].map(|below| data(&format!("{below}/manifests/{name}{edit}.json")))
        })
        .filter(|path| path.exists())
        .map(|path| static_pod(load(&path)))
        .collect()
}

/// A static pod as the Go kubelet completes it: a limit of a container is also a request, and a pod
/// with limits of its own requests what its containers do, or else its limits.
fn static_pod(manifest: Value) -> Pod {
    let mut object: api::Pod = serde_json::from_value(manifest).unwrap();
    let spec = object.spec.as_mut().unwrap();
    let containers = spec.init_containers.iter_mut().flatten().chain(&mut spec.containers);
    containers.for_each(|container| request_limits(&mut container.resources));
    let requested = container_requests(&Pod::from(object.clone()));
    let spec = object.spec.as_mut().unwrap();
    if let Some(resources) = spec.resources.as_mut().filter(|all| all.limits.is_some()) {
        let requests = resources.requests.get_or_insert_default();
        for (name, amount) in
            requested.into_iter().filter(|(name, _)| ["cpu", "memory"].contains(&name.as_str()))
        {
            requests.entry(name).or_insert_with(|| Quantity(amount.format(Form::Decimal)));
        }
    }
    request_limits(&mut spec.resources);
    let annotations = object.metadata.annotations.get_or_insert_default();
    annotations.insert("kubernetes.io/config.source".to_owned(), "file".to_owned());
    Pod::from(object)
}

fn request_limits(resources: &mut Option<api::ResourceRequirements>) {
    let Some(resources) = resources else { return };
    for (name, quantity) in resources.limits.iter().flatten() {
        resources.requests.get_or_insert_default().entry(name.clone()).or_insert(quantity.clone());
    }
}

fn settings(recording: &Value) -> Settings {
    let mut settings = super::tests::settings();
    let config = &recording["config"];
    settings.cpu_cfs_quota = config["cpuCFSQuota"] != json!(false);
    if let Some(period) = config["cpuCFSQuotaPeriod"].as_str() {
        let milliseconds = period.strip_suffix("ms").unwrap().parse().unwrap();
        settings.cpu_cfs_quota_period = Duration::from_millis(milliseconds);
    }
    settings.machine.memory_capacity_bytes = recording["machine"]["memory"].as_u64().unwrap();
    settings.machine.hugepage_sizes = vec!["2MB".into(), "1GB".into()];
    settings.machine.swap_controller = true;
    settings
}

/// As protobuf JSON: 64-bit numbers are strings, and zeros are absent.
fn fields(resources: &LinuxContainerResources) -> Value {
    let mut map = Map::new();
    for (name, number) in [
        ("cpu_period", resources.cpu_period),
        ("cpu_quota", resources.cpu_quota),
        ("cpu_shares", resources.cpu_shares),
        ("memory_limit_in_bytes", resources.memory_limit_in_bytes),
        ("memory_swap_limit_in_bytes", resources.memory_swap_limit_in_bytes),
        ("oom_score_adj", resources.oom_score_adj),
    ] {
        if number != 0 {
            map.insert(name.to_owned(), json!(number.to_string()));
        }
    }
    let limits: Vec<Value> = resources
        .hugepage_limits
        .iter()
        .map(|hugepage| match hugepage.limit {
            0 => json!({"page_size": hugepage.page_size}),
            limit => json!({"page_size": hugepage.page_size, "limit": limit.to_string()}),
        })
        .collect();
    if !limits.is_empty() {
        map.insert("hugepage_limits".to_owned(), json!(limits));
    }
    Value::Object(map)
}

/// The values for a request, for each manifest that the pod has had.
fn computed(call: &Value, pods: &[Pod], settings: &Settings) -> Vec<Value> {
    pods.iter()
        .filter_map(|pod| match call["call"].as_str()? {
            "RunPodSandbox" => Some(fields(&sandbox_resources(pod, settings))),
            "CreateContainer" => {
                let container =
                    pod.all_containers().find(|container| call["container"] == json!(container.name))?;
                Some(fields(&container_resources(pod, container, settings)))
            }
            _ => None,
        })
        .collect()
}

#[test]
fn resources_of_requests_are_those_of_the_go_kubelet() {
    let (mut compared, mut problems) = (0, Vec::new());
    for file in std::fs::read_dir(data("resources/expected")).unwrap().flatten() {
        let name = file.path().file_stem().unwrap().to_string_lossy().into_owned();
        let first = name.split('-').next().unwrap_or_default();
        if first.len() != 1 || !("a"..="f").contains(&first) {
            continue;
        }
        let recording = load(&file.path());
        let settings = settings(&recording);
        for (pod, calls) in recording["cri"].as_object().into_iter().flatten() {
            let pods = pods(pod);
            for call in calls.as_array().unwrap() {
                let found = computed(call, &pods, &settings);
                if found.is_empty() {
                    continue;
                }
                compared += 1;
                if !found.contains(&call["resources"]) {
                    problems.push(format!("{name} {pod}: {found:?}, recorded {call}"));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    assert!(compared > 250, "{compared}");
}
