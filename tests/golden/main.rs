//! Compares the agent with the recordings in `data/`: the same pods on a real containerd, through a
//! proxy that records the requests of the agent.
//!
//! Run through `tests/run e2e`, which makes the namespaces, images and containerd.
//! GOLDEN_JOURNAL=FILE writes down every request.

#![allow(unreachable_pub, reason = "a program offers nothing to others")]
#![allow(clippy::unwrap_used, reason = "a test program")]

#[path = "../support/mod.rs"]
mod support;

mod compare;
mod disagreements;
mod forms;
mod machine;
mod proxy;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use compare::{Step, compare_calls, compare_status};
use coracle::model::api::Pod;
use forms::{Names, normalize};
use machine::Machine;
use proxy::{Call, Proxy};
use serde_json::{Value, json};
use support::node::{LONG, Node};
use support::wait::{pause, wait_until};

/// Short: it is part of socket paths.
const DIR: &str = "golden";
const NODE: &str = "golden-node";
const IMAGE: &str = "localhost/busybox:1";
/// One of the pods makes this directory.
const HOST_PATH: &str = "/tmp/golden-hp";
/// When the recording looked, and how much longer a slow machine may take.
const LOOK_AFTER: Duration = Duration::from_secs(45);
const AT_MOST: Duration = Duration::from_secs(180);
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);

struct PodRecording {
    manifest: Value,
    pod: Pod,
    calls: Vec<Step>,
    /// Annotations and status.
    shown: Value,
    /// Messages of the runtime, which are its own.
    errors: Vec<String>,
}

/// The observed states of one pod.
#[derive(Default)]
struct ObservedPod {
    uid: String,
    ip: String,
    /// Annotations and status at each moment at which they were new.
    moments: Vec<Value>,
}

fn load(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn recordings(machine: &Machine) -> BTreeMap<String, PodRecording> {
    let data = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("tests/golden/data");
    let mut all = BTreeMap::new();
    for file in fs::read_dir(data.join("manifests")).unwrap().flatten() {
        let manifest = load(&file.path());
        let expected = load(&data.join("expected").join(file.file_name()));
        let pod: Pod = serde_json::from_value(manifest.clone()).unwrap();
        let mut recording = PodRecording {
            calls: Vec::new(),
            shown: expected["pod_status"].clone(),
            errors: Vec::new(),
            manifest,
            pod,
        };
        let names = forms::recorded_names();
        for call in expected["cri_calls"].as_array().unwrap() {
            let mut request = call["request"].clone();
            if call["call"] == "CreateContainer" {
                machine.translate(&mut request, &recording.pod);
            }
            normalize(&mut request, &names);
            recording.errors.extend(call["error"][1].as_str().map(str::to_owned));
            recording.calls.push(Step {
                method: call["call"].as_str().unwrap().to_owned(),
                request,
                failed: call.get("error").is_some(),
            });
        }
        let mut names = Names::default();
        recording.errors.iter().for_each(|error| names.add(error, "<error>"));
        // Of a pod without a sandbox the recorder did not know the UID.
        let hash = recording.shown["annotations"]["kubernetes.io/config.hash"].as_str().unwrap_or("");
        names.add(hash, "<uid>");
        normalize(&mut recording.shown, &names);
        all.insert(expected["pod"].as_str().unwrap().to_owned(), recording);
    }
    all
}

/// The manifest with startup probes that may fail for long. With all pods starting at once a check
/// can take longer than its second, and three of these would correctly restart the container. The
/// threshold is in no call to the runtime and in no status.
fn with_patient_probes(manifest: &Value) -> Value {
    let mut manifest = manifest.clone();
    for list in ["/spec/initContainers", "/spec/containers"] {
        let containers = manifest.pointer_mut(list).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            if let Some(probe) = container.get_mut("startupProbe") {
                probe["failureThreshold"] = json!(600);
            }
        }
    }
    manifest
}

/// The name in the manifest of the pod that `text`, a static pod's name, is.
fn manifest_name(text: &str) -> Option<&str> {
    text.strip_suffix(NODE)?.strip_suffix('-')
}

/// Reads `/pods` once.
fn read_pods(node: &Node, seen: &mut BTreeMap<String, ObservedPod>) {
    let pods = node.try_pods_json();
    for pod in pods.as_ref().and_then(Value::as_array).into_iter().flatten() {
        let metadata = &pod["metadata"];
        let Some(name) = metadata["name"].as_str().and_then(manifest_name) else { continue };
        let observed = seen.entry(name.to_owned()).or_default();
        observed.uid = metadata["uid"].as_str().unwrap_or("").to_owned();
        if let Some(ip) = pod["status"]["podIP"].as_str() {
            observed.ip = ip.to_owned();
        }
        let moment = json!({"annotations": metadata["annotations"], "status": pod["status"]});
        if observed.moments.last() != Some(&moment) {
            observed.moments.push(moment);
        }
    }
}

/// The calls by pod. Later calls name what earlier ones made.
fn by_pod(calls: &[Call]) -> BTreeMap<String, Vec<Call>> {
    let mut owners: BTreeMap<&str, &str> = BTreeMap::new();
    let mut pods: BTreeMap<String, Vec<Call>> = BTreeMap::new();
    for call in calls {
        let request = &call.request;
        let named = |config: &str| request[config]["metadata"]["name"].as_str();
        let owner = match call.method {
            "RunPodSandbox" => named("config").and_then(manifest_name),
            "CreateContainer" | "PullImage" => named("sandbox_config").and_then(manifest_name),
            _ => {
                let id = request["container_id"].as_str().or_else(|| request["pod_sandbox_id"].as_str());
                id.and_then(|id| owners.get(id)).copied()
            }
        };
        let Some(owner) = owner else { continue };
        if let Some(made) = &call.made {
            owners.insert(made, owner);
        }
        pods.entry(owner.to_owned()).or_default().push(call.clone());
    }
    pods
}

/// What stands for the texts of one pod's run.
fn names(base: &Path, image: &str, calls: &[Call], seen: &ObservedPod) -> Names {
    let mut names = Names::default();
    for call in calls {
        if let Some(error) = &call.error {
            names.add(error, "<error>");
        }
    }
    names.add_made(calls);
    names.add(image, forms::RECORDED_IMAGE);
    names.add(&seen.uid, "<uid>");
    names.add(&seen.ip, "<podip>");
    names.add(&base.display().to_string(), "<base>");
    names
}

/// The differences of each pod, of its statuses only or of all.
fn verdicts(
    recordings: &BTreeMap<String, PodRecording>,
    seen: &BTreeMap<String, ObservedPod>,
    proxy: &Proxy,
    base: &Path,
    with_calls: bool,
) -> BTreeMap<String, Vec<String>> {
    let image = proxy.image(IMAGE).unwrap_or_default();
    let calls = by_pod(&proxy.calls());
    let nothing = ObservedPod::default();
    let mut all = BTreeMap::new();
    for (name, recording) in recordings {
        let seen = seen.get(name).unwrap_or(&nothing);
        let calls = calls.get(name).map_or(&[][..], Vec::as_slice);
        let names = names(base, &image, calls, seen);
        let normal = |value: &Value| {
            let mut value = value.clone();
            normalize(&mut value, &names);
            value
        };
        let moments: Vec<Value> = seen.moments.iter().map(normal).collect();
        let mut found = compare_status(&recording.shown, &moments);
        if with_calls {
            let step = |call: &Call| Step {
                method: call.method.to_owned(),
                request: normal(&call.request),
                failed: call.error.is_some(),
            };
            let steps: Vec<Step> = calls.iter().map(step).collect();
            found.extend(compare_calls(&recording.calls, &steps));
        }
        all.insert(name.clone(), found);
    }
    all
}

/// What is wrong with a pod, considering the list of disagreements.
fn verdict(name: &str, found: &[String]) -> Option<String> {
    match disagreements::for_pod(name) {
        None if found.is_empty() => None,
        None => Some(found.join("\n    ")),
        Some(listed) if found.is_empty() && !listed.sometimes => {
            Some("agrees: take it off the list of disagreements".to_owned())
        }
        Some(listed) => {
            let uncovered: Vec<&str> =
                found.iter().map(String::as_str).filter(|line| !listed.covers(line)).collect();
            (!uncovered.is_empty()).then(|| uncovered.join("\n    "))
        }
    }
}

#[test]
fn calls_and_statuses_match_the_recordings() {
    let base = Node::base(DIR);
    fs::create_dir_all(base.join("root")).unwrap();
    let resolv_conf = base.join("resolv.conf");
    fs::write(&resolv_conf, "nameserver 198.51.100.1\nsearch host.example\noptions attempts:3\n").unwrap();
    let socket = base.join("proxy.sock");
    let proxy = Proxy::start(&socket, &base.join("cd/containerd.sock"));
    let node = Node::start_as(
        DIR,
        NODE,
        json!({
            // As in the recordings; tests/golden/resources has the cgroups of pods.
            "cgroupsPerQOS": false,
            "enforceNodeAllocatable": [],
            "containerRuntimeEndpoint": format!("unix://{}", socket.display()),
            "clusterDNS": ["10.96.0.10"],
            // As recorded: what a node has left for pods shows in their environment.
            "evictionHard": {"memory.available": "1Mi"},
            "clusterDomain": "cluster.local",
            "resolvConf": resolv_conf,
            "syncFrequency": "10s",
        }),
    );
    let recordings = recordings(&Machine::read(&base.join("root")));
    assert_eq!(recordings.len(), 46);

    for (name, recording) in &recordings {
        node.apply(&format!("{name}.json"), &with_patient_probes(&recording.manifest));
    }
    let begun = Instant::now();
    let mut seen = BTreeMap::new();
    loop {
        read_pods(&node, &mut seen);
        let agree = || {
            let found = verdicts(&recordings, &seen, &proxy, &base, false);
            found.iter().all(|(name, found)| {
                found
                    .iter()
                    .all(|line| disagreements::for_pod(name).is_some_and(|listed| listed.covers(line)))
            })
        };
        if begun.elapsed() >= AT_MOST || begun.elapsed() >= LOOK_AFTER && agree() {
            break;
        }
        pause(BETWEEN_LOOKS);
    }
    for name in recordings.keys() {
        node.remove(&format!("{name}.json"));
    }
    // A removed pod is off the list before it has stopped.
    wait_until("every sandbox to be stopped", LONG * 2, || {
        let calls = proxy.calls();
        let stopped: BTreeSet<&str> = calls
            .iter()
            .filter(|call| call.method == "StopPodSandbox")
            .filter_map(|call| call.request["pod_sandbox_id"].as_str())
            .collect();
        calls
            .iter()
            .filter(|call| call.method == "RunPodSandbox")
            .all(|call| call.made.as_deref().is_none_or(|id| stopped.contains(id)))
    });

    let found = verdicts(&recordings, &seen, &proxy, &base, true);
    if let Some(file) = std::env::var_os("GOLDEN_JOURNAL") {
        let lines = proxy.calls().into_iter().map(|call| {
            let Call { method, request, made, error } = call;
            json!({"call": method, "request": request, "made": made, "error": error}).to_string() + "\n"
        });
        fs::write(file, lines.collect::<String>()).unwrap();
    }
    let mut wrong = 0;
    for (name, found) in &found {
        if let Some(problem) = verdict(name, found) {
            wrong += 1;
            eprintln!("{name}:\n    {problem}");
        }
    }
    let agrees = |name: &str, found: &[String]| found.is_empty() && disagreements::for_pod(name).is_none();
    let agreeing = found.iter().filter(|(name, found)| agrees(name, found)).count();
    // Not through the test harness, which hides the output of a passing test.
    let _ = writeln!(std::io::stderr(), "golden: {agreeing} of {} agree", found.len());
    // Only if it is empty: it may have been there before.
    let _ = fs::remove_dir(HOST_PATH);
    assert_eq!(wrong, 0, "pods that are not as recorded");
    node.finish();
}

#[test]
fn disagreements_name_existing_pods() {
    let data =
        Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("tests/golden/data/manifests");
    let mut pods = BTreeSet::new();
    for listed in disagreements::DISAGREEMENTS {
        assert!(data.join(format!("{}.json", listed.pod)).exists(), "no pod {}", listed.pod);
        assert!(pods.insert(listed.pod), "{} is listed twice", listed.pod);
        assert!(!listed.reason.is_empty(), "no reason for {}", listed.pod);
    }
}
