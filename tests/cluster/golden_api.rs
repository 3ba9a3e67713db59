//! All requests of a node, compared with the recorded ones of a Go kubelet 1.37.2 in the same scenario.
//!
//! In `data`: `requests.jsonl`, every request in order (seconds, verb, URI, code, body);
//! `events.txt`, the events before the deletions; `scenario.yaml`, the pods. The scenario: node1
//! (192.0.2.10, a label, a static pod) registers; the pods are there, bound to it; after 14 s one
//! of them gets a label, 12 s later two are deleted, a third with force, and the manifest goes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::joined::{JoinedNode, LIMIT, directory, text};
use crate::recording::{
    Request, common, differences, kinds, merge, recorded, requests_by, without_early_refusals,
};
use crate::support::control_plane::{ControlPlane, ControlPlaneOptions};
use crate::support::launch::skip_on_go_kubelet;
use crate::support::wait::{pause, wait_until};

/// Requests that only one of both sends, and why.
const KINDS: &[(&str, &str)] = &[
    ("get pods", "the watch has delivered what a patch is computed from"),
    ("get nodes", "the watch has delivered it; it is read only before its labels reject a pod"),
    ("patch nodes/status", "the node is ready when it registers, and says so at once"),
    ("get csinodes", "a CSINode comes with CSI volumes"),
    ("create csinodes", "as above"),
    ("watch csidrivers", "as above"),
    ("watch runtimeclasses", "a class is read when a pod names it"),
    ("watch podcertificaterequests", "a request is read when its pod is synced, and none has such a volume"),
    ("get configmaps", "the authorities of the cluster are read without a watch"),
    ("list configmaps", "a watch that came before the API server knew whose the pod is"),
    ("list secrets", "as above"),
    ("deletecollection resourceslices", "no dynamic resources, hence nothing left of them"),
];

/// Where an object or a final status differs, and why: the object, the path, the reason.
const FIELDS: &[(&str, &str, &str)] = &[
    ("Node", "/status/conditions/3", "ready when it registers: nothing waits for a CSINode"),
    ("Node", "/status/declaredFeatures", "only what works"),
    ("Node at the end", "/status/declaredFeatures", "as above"),
    ("create csinodes", "", "comes with CSI volumes"),
    ("st-node1 delete pods", "/0/preconditions/uid", "no other mirror of that name is meant"),
    ("too-big create serviceaccounts/token", "", "nothing is prepared for a refused pod"),
    ("wrong-node create serviceaccounts/token", "", "as above"),
    (
        "crash",
        "/containerStatuses/0/state",
        "a container that ended and has to wait is shown as waiting at once",
    ),
    ("Event", "/count", "repeats may come before the first one was sent"),
    ("Event of the node", "/count", "as above"),
    ("Event of the node", "/involvedObject/uid", "once it is known, which may be earlier or later"),
    (
        "Event",
        "/involvedObject/resourceVersion",
        "no client reads it, and pods would be kept in memory for it",
    ),
];

/// Events that only one of both has, and why: a part of the line.
const EVENTS: &[(&str, &str)] = &[
    ("Warning InvalidDiskCapacity node1", "the first look at the disk comes before the node says anything"),
    (NOT_READ_YET, "an API server that is short of time; what is missing is named afterwards"),
];

/// The end of the message about an object that did not appear in time.
const NOT_READ_YET: &str = "timed out waiting for the condition";

/// Fields of the Node that depend on the machine.
const MACHINE: &[&str] = &[
    "/status/capacity",
    "/status/allocatable",
    "/status/images",
    "/status/nodeInfo/machineID",
    "/status/nodeInfo/systemUUID",
    "/status/nodeInfo/bootID",
    "/status/nodeInfo/kernelVersion",
    "/status/nodeInfo/osImage",
    "/status/nodeInfo/containerRuntimeVersion",
    "/status/daemonEndpoints/kubeletEndpoint/Port",
];

/// Runs the scenario: the requests, and the events before the deletions.
fn scenario() -> (Vec<Request>, BTreeSet<String>) {
    let plane = ControlPlane::start_with(&directory("goldapi"), &ControlPlaneOptions::bare());
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/data");
    let meta = |name: &str| json!({"name": name, "namespace": "default"});
    plane.apply(&json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("cm1"), "data": {"k1": "v1", "k2": "v2"}}));
    plane.apply(&json!({"apiVersion": "v1", "kind": "Secret", "metadata": meta("s1"), "stringData": {"pw": "swordfish"}}));
    let kubeconfig = plane.node_kubeconfig("node1").display().to_string();
    let flags = ["--kubeconfig", &kubeconfig, "--node-labels", "example.org/zone=a"];
    // As the recorded node: it had no cgroups of pods, so that it reports no event of them.
    let config = json!({
        "clusterDNS": ["10.96.0.10"], "clusterDomain": "cluster.local",
        "cgroupsPerQOS": false, "enforceNodeAllocatable": [],
    });
    let mut joined = JoinedNode::prepare_with(&plane, "node1", config, &flags);
    let script = "trap exit TERM; while :; do sleep 1; done";
    let container = json!({"name": "c", "image": "localhost/busybox:1", "command": ["sh", "-c", script]});
    joined.node.apply(
        "st.json",
        &json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "st", "namespace": "default", "labels": {"app": "st"}},
            "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
        }),
    );
    plane.kubectl(&["apply", "-f", &data.join("scenario.yaml").display().to_string()]);
    joined.node.start_agent();
    pause(Duration::from_secs(14));
    plane.kubectl(&["label", "pod", "simple", "golden=yes"]);
    pause(Duration::from_secs(12));
    joined.wait_pod("crash", "restarted twice", |pod| {
        let container = &pod["status"]["containerStatuses"][0];
        container["restartCount"].as_u64() >= Some(2) && container["state"]["running"].is_null()
    });
    joined.wait_pod("deadline", "over its deadline", |pod| {
        pod["status"]["phase"] == "Failed"
            && !pod["status"]["containerStatuses"][0]["state"]["terminated"].is_null()
    });
    let node_events = || -> BTreeSet<String> {
        let list = plane.get(&["events", "-A"]).unwrap_or_default();
        // The API server reports events of its own too, when it repairs what a slow start left.
        let of_node = list["items"].as_array().into_iter().flatten();
        let of_node = of_node.filter(|event| text(event, "/source/component") == "kubelet");
        let events = of_node.map(|event| {
            let field = |pointer| text(event, pointer);
            line(field("/type"), field("/reason"), field("/involvedObject/name"), field("/message"))
        });
        events.collect()
    };
    // A slow machine may still be sending them; the comparison below names the missing ones.
    let wanted = recorded_events();
    let comes = |event: &&String| EVENTS.iter().all(|(part, _)| !event.contains(part));
    let begun = Instant::now();
    let events = loop {
        let found = node_events();
        if wanted.iter().filter(comes).all(|event| found.contains(event)) || begun.elapsed() > LIMIT {
            break found;
        }
        pause(Duration::from_millis(500));
    };
    plane.kubectl(&["delete", "pod", "simple", "config", "--wait=false"]);
    plane.kubectl(&["delete", "pod", FORCED, "--force", "--grace-period=0", "--wait=false"]);
    joined.node.remove("st.json");
    for gone in ["simple", "config", "st-node1"] {
        joined.wait_gone(gone);
    }
    wait_until("the pod deleted by force to end", LIMIT, || {
        !joined.node.running_of_all().contains_key(FORCED)
    });
    joined.node.stop_agent();
    (without_early_refusals(requests_by(&plane.requests(), "system:node:node1")), events)
}

/// An event in one line.
fn line(kind: &str, reason: &str, object: &str, message: &str) -> String {
    let message = common(&json!(message));
    format!("{kind} {reason} {object}: {}", message.as_str().unwrap_or_default())
}

/// The lines of `events.txt`, whose columns are aligned, but for what is of another machine.
fn recorded_events() -> BTreeSet<String> {
    let rows = include_str!("data/events.txt").lines().skip(1);
    let newer = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let rows = rows.filter(|row| !(newer && row.contains(" CgroupV1 ")));
    rows.map(|row| {
        let mut rest = row;
        let mut column = || {
            let (word, tail) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = tail.trim_start();
            word
        };
        let (kind, reason, object, _count) = (column(), column(), column(), column());
        line(kind, reason, object, rest)
    })
    .collect()
}

/// The message about a probe without its outcome. A probe may run while its container is stopped, and the
/// runtime has other words for each moment of that.
fn without_outcome(message: &str) -> String {
    let (kind, _) = message.split_once(" probe ").unwrap_or((message, ""));
    format!("{kind} probe <outcome>")
}

/// Whether a patch came between the two writes of a forced deletion, of which the first one raises
/// the generation and the second removes the pod: a few milliseconds later it had found nothing.
fn of_the_end(request: &Request) -> bool {
    request.name() == FORCED && request.body["status"]["observedGeneration"] == 2
}

/// The pod that is deleted by force.
const FORCED: &str = "init-and-probe";

/// Pods that are retried during the whole scenario, which takes longer on a slow machine: only the
/// requests within the time of the recording are compared.
const ENDLESS: &[&str] = &["missing-cm", "missing-secret-volume", "bad-image"];

/// The status of a pod after each of its patches, with the time.
fn statuses(requests: &[Request], pod: &str) -> Vec<(f64, Value)> {
    let mut whole = json!({"status": {"phase": "Pending"}});
    let patches = requests.iter().filter(|request| {
        request.kind() == "patch pods/status"
            && request.name() == pod
            && request.code == 200
            && !of_the_end(request)
    });
    patches
        .map(|request| {
            merge(&mut whole, &request.body);
            (request.time, common(&whole["status"]))
        })
        .collect()
}

/// The requests for a pod. A pod that crashes again and again is compared up to the end of its
/// second restart: how many there are later is a matter of the clock.
fn of_pod<'a>(requests: &'a [Request], pod: &str, length: f64) -> (Vec<&'a Request>, Value) {
    let mut all = statuses(requests, pod);
    if pod == "crash" {
        let over = |status: &Value| {
            let of_container = |field| status.pointer(&format!("/containerStatuses/0/{field}"));
            of_container("restartCount") == Some(&json!(2)) && of_container("state/running").is_none()
        };
        let end = all.iter().position(|(_, status)| over(status)).expect("it was restarted twice");
        all.truncate(end + 1);
    }
    let (time, last) = all.pop().unwrap_or_default();
    let until = match pod {
        "crash" => time,
        _ if ENDLESS.contains(&pod) => length,
        _ => f64::MAX,
    };
    let of_pod = |request: &&Request| request.about().as_deref() == Some(pod) && request.time <= until;
    (requests.iter().filter(of_pod).collect(), last)
}

/// The differences that were found; the test fails at its end.
#[derive(Default)]
struct Differences(Vec<String>);

impl Differences {
    fn check(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.0.push(what());
        }
    }

    /// Compares two objects, without the known differences.
    fn same(&mut self, object: &str, recorded: &Value, ours: &Value) {
        for (path, recorded, ours) in differences("", &common(recorded), &common(ours)) {
            let known = FIELDS
                .iter()
                .any(|(kind, prefix, _)| (*kind == object || *kind == "*") && path.starts_with(prefix));
            self.check(known, || format!("{object} {path}: recorded {recorded}, ours {ours}"));
        }
    }
}

fn first<'a>(requests: &'a [Request], kind: &str) -> &'a Value {
    static NONE: Value = Value::Null;
    requests.iter().find(|request| request.kind() == kind).map_or(&NONE, |request| &request.body)
}

// Runtimes: containerd 2.
#[test]
fn requests_do_not_exceed_the_recorded_ones() {
    if skip_on_go_kubelet("golden_api", "the recording is its own, and what it asks varies by a few") {
        return;
    }
    // Some of the recorded watches were refused at first, too.
    let theirs = without_early_refusals(recorded());
    let (ours, events) = scenario();
    let mut verdict = Differences::default();

    // The kinds of requests.
    let (their_kinds, our_kinds) = (kinds(&theirs), kinds(&ours));
    let all: BTreeSet<&String> = their_kinds.keys().chain(our_kinds.keys()).collect();
    println!("{:<40} {:>8} {:>6}", "request", "recorded", "ours");
    for kind in all {
        let (recorded, ours) = (their_kinds.get(kind), our_kinds.get(kind));
        println!("{kind:<40} {:>8} {:>6}", recorded.unwrap_or(&0), ours.unwrap_or(&0));
        let known =
            recorded.is_some() == ours.is_some() || KINDS.iter().any(|(known_kind, _)| known_kind == kind);
        verdict.check(known, || format!("{kind}: recorded {recorded:?}, ours {ours:?}"));
    }
    // How often a lease is renewed and an endless pod retried is a matter of time. A slow machine takes longer.
    let length = theirs.last().map_or(0.0, |request| request.time);
    let in_time = |request: &&Request| {
        let is_endless = request.about().is_some_and(|pod| pod == "crash" || ENDLESS.contains(&pod.as_str()));
        request.time <= length || !(is_endless || request.kind() == "update leases")
    };
    let count = ours.iter().filter(in_time).count();
    println!("{:<40} {:>8} {:>6}", "all", theirs.len(), count);
    verdict.check(count <= theirs.len(), || format!("{count} requests in all"));
    let watches = |requests: &[Request]| -> BTreeMap<String, usize> {
        let mut all = BTreeMap::new();
        for request in requests.iter().filter(|request| request.verb == "watch") {
            *all.entry(format!("{} {}", request.path, request.selector())).or_default() += 1;
        }
        all
    };
    let their_watches = watches(&theirs);
    for (watch, times) in watches(&ours) {
        let most = their_watches.get(&watch).copied().unwrap_or_default();
        verdict.check(times <= most, || format!("watched {times} times instead of {most}: {watch}"));
    }

    // The registration.
    let machine = |node: &Value| {
        let mut node = node.clone();
        for pointer in MACHINE {
            if let Some(value) = node.pointer_mut(pointer) {
                *value = json!("<machine>");
            }
        }
        node
    };
    let node = |requests| machine(first(requests, "create nodes"));
    verdict.same("Node", &node(&theirs), &node(&ours));
    for kind in ["create csinodes", "create leases", "update leases", "create pods"] {
        verdict.same(kind, first(&theirs, kind), first(&ours, kind));
    }
    let ready = |requests: &[Request]| {
        let mut merged = json!({});
        for request in requests
            .iter()
            .filter(|request| request.kind() == "create nodes" || request.kind() == "patch nodes/status")
        {
            merge(&mut merged, &request.body);
        }
        machine(&merged)
    };
    verdict.same("Node at the end", &ready(&theirs), &ready(&ours));

    // Every pod.
    let pods: BTreeSet<String> = theirs.iter().chain(&ours).filter_map(Request::about).collect();
    println!("{:<24} {:>20} {:>20}", "pod", "patches rec./ours", "requests rec./ours");
    for pod in pods.iter().filter(|pod| *pod != "node1") {
        let (their_requests, their_end) = of_pod(&theirs, pod, length);
        let (our_requests, our_end) = of_pod(&ours, pod, length);
        verdict.same(pod, &their_end, &our_end);
        // One that finds nothing any more (of a pod that was put away by force, its last change and
        // its end come a few milliseconds apart) counts as a request only: before each patch the Go
        // kubelet asks for the pod.
        let patches = |all: &[&Request]| {
            let counts = |request: &&&Request| {
                request.code != 404
                    && !of_the_end(request)
                    && !request.body.to_string().contains(NOT_READ_YET)
            };
            all.iter().filter(|request| request.kind() == "patch pods/status").filter(counts).count()
        };
        let (their_patches, our_patches) = (patches(&their_requests), patches(&our_requests));
        let (most, our_count) = (their_requests.len(), our_requests.len());
        println!(
            "{pod:<24} {:>20} {:>20}",
            format!("{their_patches} / {our_patches}"),
            format!("{most} / {our_count}")
        );
        let list = || {
            let line = |request: &&Request| {
                format!(
                    "  {:.2} {} {} {} {}",
                    request.time, request.verb, request.path, request.code, request.body
                )
            };
            our_requests.iter().map(line).collect::<Vec<_>>().join("\n")
        };
        verdict.check(our_patches <= their_patches && our_count <= most, || {
            format!("{pod}: {our_patches} status patches instead of {their_patches}, {our_count} requests instead of {most}:\n{}", list())
        });
        // Tokens, and the end.
        for kind in ["create serviceaccounts/token", "delete pods"] {
            let good_bodies = |all: &[&Request]| -> Vec<Value> {
                let good = all.iter().filter(|request| request.kind() == kind && request.code < 400);
                good.map(|request| request.body.clone()).collect()
            };
            verdict.same(
                &format!("{pod} {kind}"),
                &json!(good_bodies(&their_requests)),
                &json!(good_bodies(&our_requests)),
            );
        }
    }

    // Events: what kubectl shows, and the bodies.
    let not_read = events.iter().filter(|event| event.contains(NOT_READ_YET)).count();
    verdict.check(not_read <= 3, || format!("{not_read} events of objects that were not read in time"));
    let recorded = recorded_events();
    for event in recorded.symmetric_difference(&events) {
        let known = EVENTS.iter().any(|(part, _)| event.contains(part));
        let side = if events.contains(event) { "only ours" } else { "only recorded" };
        verdict.check(known, || format!("event {side}: {event}"));
    }
    let bodies = |requests: &[Request]| -> BTreeMap<String, Value> {
        let events = requests.iter().filter(|request| request.kind() == "create events");
        events
            .map(|request| {
                let value = |pointer| text(&request.body, pointer);
                let field = value("/involvedObject/fieldPath");
                let key = format!("{} {} {field}", value("/involvedObject/name"), value("/reason"));
                let mut body = common(&request.body);
                // The time.
                body["metadata"]["name"] = json!("<name>");
                if value("/reason") == "Unhealthy" {
                    body["message"] = json!(without_outcome(value("/message")));
                }
                (key, body)
            })
            .collect()
    };
    let (their_events, our_events) = (bodies(&theirs), bodies(&ours));
    for (key, body) in &our_events {
        if let Some(recorded) = their_events.get(key) {
            let is_node = text(body, "/involvedObject/kind") == "Node";
            verdict.same(if is_node { "Event of the node" } else { "Event" }, recorded, body);
        }
    }

    assert!(verdict.0.is_empty(), "{} differences:\n{}", verdict.0.len(), verdict.0.join("\n"));
}
