//! Faults of the API server: no status is lost, no container starts again or twice, requests stay
//! rare, and after the fault the API server shows the real state.
//!
//! Lost packets are not tested here (the options of the sockets are tested where they are set, and
//! with an address that vanishes); a server that does not respond is. Faults of clocks and
//! certificates are in `clock.rs` and `certificates.rs`.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use coracle::model::api::Pod;
use serde_json::{Value, json};

use crate::support::fake_api::{FakeApi, Fault, FaultResponse, status};
use crate::support::fake_cri::StreamFault;
use crate::support::fake_node::{FakeNode, LONG};
use crate::support::node::{NODE, container, is_ready, restarts, simple};
use crate::support::random::{Random, random_seed};
use crate::support::wait::{pause, wait_for, wait_until};
use crate::{BOTH, in_parallel, print_line, two};

/// Watches that failed for long are retried after up to 45 s, and many agents start at once. Less than the
/// five minutes after which a watch ends by itself and the node is reported again, which would hide a loss.
const PATIENCE: Duration = Duration::from_secs(240);

/// Requests of one agent in a second, on average over a fault in which pods start and stop.
pub(crate) const MAX_RATE: f64 = 25.0;

/// Requests of one agent in a second after the fault, without changes of pods.
const MAX_IDLE_RATE: f64 = 10.0;

pub(crate) struct Case {
    name: &'static str,
    fault_seconds: u64,
    begin_fault: fn(&FakeApi),
    end_fault: fn(&FakeApi),
    /// What the server does repeatedly during the fault.
    tick: fn(&FakeApi),
}

impl fmt::Debug for Case {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name)
    }
}

pub(crate) const fn case(name: &'static str, fault_seconds: u64, begin_fault: fn(&FakeApi)) -> Case {
    Case { name, fault_seconds, begin_fault, end_fault: |_| {}, tick: |_| {} }
}

/// Every request gets this response; open watches are ended.
fn all(api: &FakeApi, what: FaultResponse) {
    every(api, "", "", what);
}

fn every(api: &FakeApi, method: &'static str, path: &str, what: FaultResponse) {
    api.fault(Fault::always(method, path, what));
    api.cut();
}

/// Every watch gets these lines and then ends.
fn watches(api: &FakeApi, lines: &[Value]) {
    let lines = lines.iter().map(|line| line.as_str().map_or_else(|| line.to_string(), str::to_owned));
    every(api, "GET", "watch=true", FaultResponse::Lines(lines.collect()));
}

fn patches(api: &FakeApi, code: u16, reason: &'static str) {
    api.fault(Fault::always("PATCH", "/status", FaultResponse::Status(code, reason, None)));
}

/// Restores an old backup.
fn restored(api: &FakeApi) {
    api.go_down();
    api.restore();
    api.go_up();
}

const CASES: &[Case] = &[
    Case { end_fault: FakeApi::go_up, ..case("refuses connections", 20, FakeApi::go_down) },
    Case { end_fault: FakeApi::thaw, ..case("answers late", 15, FakeApi::freeze) },
    Case {
        end_fault: |api| {
            api.cut();
            api.thaw();
        },
        ..case("takes connections and never answers", 15, FakeApi::freeze)
    },
    case("is slow", 15, |api| all(api, FaultResponse::Late(Duration::from_secs(2)))),
    case("429, come back", 10, |api| all(api, FaultResponse::Status(429, "TooManyRequests", Some(1)))),
    case("429", 10, |api| all(api, FaultResponse::Status(429, "TooManyRequests", None))),
    case("500", 10, |api| all(api, FaultResponse::Status(500, "InternalError", None))),
    case("503", 10, |api| all(api, FaultResponse::Status(503, "ServiceUnavailable", Some(0)))),
    case("401", 5, |api| all(api, FaultResponse::Status(401, "Unauthorized", None))),
    // A proxy without a server behind it.
    case("404 without a word of Kubernetes", 10, |api| {
        let response = "HTTP/1.1 404 Not Found\r\nContent-Length: 19\r\n\r\n404 page not found\n";
        all(api, FaultResponse::Raw(response.as_bytes().to_vec()));
    }),
    case("cuts every connection", 10, |api| all(api, FaultResponse::Cut)),
    case("watches are gone", 10, |api| {
        every(api, "GET", "watch=true", FaultResponse::Status(410, "Gone", None))
    }),
    case("watches expire", 10, |api| {
        watches(
            api,
            &[json!({"type": "ERROR", "object": status(410, "Expired", "too old resource version")})],
        );
    }),
    case("history is forgotten", 5, FakeApi::compact),
    Case { tick: FakeApi::bookmark, ..case("restored from a backup", 8, restored) },
    Case { tick: FakeApi::bookmark, ..case("restored at once", 8, FakeApi::restore) },
    case("half a line", 10, |api| {
        every(
            api,
            "GET",
            "watch=true",
            FaultResponse::HalfLine(r#"{"type":"MODIFIED","object":{"metad"#.to_owned()),
        );
    }),
    case("garbage", 10, |api| watches(api, &[json!("<html>"), json!("\u{0}\u{1b}{}}")])),
    case("no answers of HTTP", 10, |api| all(api, FaultResponse::Raw(b"SSH-2.0-x\r\n\r\n".to_vec()))),
    case("a line without end", 10, |api| {
        let what = FaultResponse::HalfLine("x".repeat(66 << 20));
        api.fault(Fault { times: 2, ..Fault::once("GET", "watch=true", what) });
        api.cut();
    }),
    Case {
        end_fault: |api| {
            api.clear_faults();
            api.cut();
        },
        ..case("odd events", 10, |api| {
            let lines = [
                json!({"type": "STRANGE", "object": {}}),
                json!({"type": "ADDED"}),
                json!({"type": "MODIFIED", "object": 7}),
                json!({"type": "DELETED", "object": {"kind": "Fish", "metadata": {"name": 7}}}),
                json!({"type": "BOOKMARK", "object": []}),
            ];
            let text = lines.map(|line| format!("{line}\n")).concat();
            every(api, "GET", "watch=true", FaultResponse::ThenSilence(text));
        })
    },
    Case {
        end_fault: |api| api.page(None),
        ..case("pages expire", 8, |api| {
            api.page(Some(1));
            api.fault(Fault::always("GET", "continue=", FaultResponse::Status(410, "Expired", None)));
            every(api, "GET", "sendInitialEvents", FaultResponse::Status(422, "Invalid", None));
            api.compact();
        })
    },
    Case {
        end_fault: |api| api.repeat_events(false),
        ..case("events come twice", 5, |api| api.repeat_events(true))
    },
    case("the node is deleted", 5, |api| api.remove(&format!("/api/v1/nodes/{NODE}"))),
    case("the lease is another's", 8, |api| {
        every(api, "PUT", "/leases/", FaultResponse::Status(409, "Conflict", None))
    }),
    case("statuses conflict", 8, |api| patches(api, 409, "Conflict")),
    case("statuses are invalid", 8, |api| patches(api, 422, "Invalid")),
    case("statuses of no pod", 8, |api| patches(api, 404, "NotFound")),
    case("pods are not found", 8, |api| {
        for method in ["PATCH", "DELETE"] {
            api.fault(Fault::always(method, "/pods/", FaultResponse::Status(404, "NotFound", None)));
        }
    }),
    case("answers are lost", 8, |api| {
        for method in ["POST", "PUT", "PATCH", "DELETE"] {
            api.fault(Fault::always(method, "", FaultResponse::Lost));
        }
    }),
];

pub(crate) fn config() -> Value {
    json!({"nodeStatusUpdateFrequency": "2s", "nodeLeaseDurationSeconds": 8})
}

/// Whether the API server shows the real state: the pod is ready, with the containers that run.
fn is_reported(node: &FakeNode, name: &str) -> bool {
    let (Some(shown), Some(own)) = (node.shown(name), node.pod(name)) else { return false };
    is_ready(&shown) && statuses(&shown) == statuses(&own) && ids(&shown) == node.running(name)
}

fn statuses(pod: &Pod) -> Value {
    json!(pod.status.as_ref().and_then(|status| status.container_statuses.as_ref()))
}

fn ids(pod: &Pod) -> BTreeMap<String, Vec<String>> {
    let all = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    all.map(|status| {
        let id = status.container_id.as_deref().and_then(|id| id.rsplit('/').next()).unwrap_or_default();
        (status.name.clone(), vec![id.to_owned()])
    })
    .collect()
}

pub(crate) fn wait_reported(node: &FakeNode, case: &Case, name: &str) {
    let begun = Instant::now();
    while !is_reported(node, name) {
        node.assert_no_duplicates();
        (case.tick)(node.api());
        assert!(
            begun.elapsed() < PATIENCE,
            "{case:?}: pod {name} is not told of; shown: {}; own: {}; running: {:?}",
            json!(node.shown(name).map(|pod| pod.status)),
            json!(node.pod(name).map(|pod| pod.status)),
            node.running(name)
        );
        pause(Duration::from_millis(200));
    }
}

/// Attempts of the running agent so far, including those without a response.
pub(crate) fn attempts(node: &FakeNode) -> f64 {
    let page = node.metrics();
    let lines = page.lines().filter(|line| line.starts_with("rest_client_requests_total"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// What ran when the fault began.
pub(crate) struct RunningBefore {
    web: BTreeMap<String, Vec<String>>,
    fixed: BTreeMap<String, Vec<String>>,
}

fn begin(case: &Case) -> (FakeNode, RunningBefore) {
    begin_on(FakeNode::join(config()), case)
}

/// The pods that are there when the fault begins.
pub(crate) fn begin_on(node: FakeNode, case: &Case) -> (FakeNode, RunningBefore) {
    node.bind(&two("web"));
    node.bind(&simple("leaves"));
    node.bind(&simple("hurt"));
    node.apply(&simple("fixed"));
    for name in ["web", "leaves", "hurt", "fixed"] {
        wait_reported(&node, case, name);
    }
    let before = RunningBefore { web: node.running("web"), fixed: node.running("fixed") };
    (node, before)
}

/// Changes during the fault: a container dies, a user deletes a pod, pods are added. An agent that
/// has not received its pods yet does not change them.
pub(crate) fn meanwhile(node: &FakeNode, has_seen: bool) {
    let victim = node.running("hurt")["main"][0].clone();
    assert!(node.fake.kill_container(&victim, 3));
    node.api().delete_pod(&FakeNode::pod_path("leaves"));
    node.bind(&two("late"));
    node.apply(&simple("fixed-late"));
    // These two need no API server.
    wait_until("the container to restart", LONG, || {
        !has_seen || node.running("hurt").get("main").is_some_and(|ids| !ids.contains(&victim))
    });
    wait_until("the static pod to run", LONG, || !node.running("fixed-late").is_empty());
    node.assert_responsive();
}

pub(crate) fn settle(node: FakeNode, case: &Case, before: &RunningBefore, deaths: i32) {
    for name in ["web", "hurt", "late", "fixed", "fixed-late"] {
        wait_reported(&node, case, name);
    }
    wait_until("the deleted pod to be gone", PATIENCE, || {
        (case.tick)(node.api());
        node.shown("leaves").is_none() && node.running("leaves").is_empty()
    });
    wait_until("the node to be ready", PATIENCE, || node.node_is_ready());
    let lease = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{NODE}");
    let renewed = || node.api().object(&lease).map(|lease| lease["spec"]["renewTime"].clone());
    let last = renewed();
    wait_until("the lease to be renewed", PATIENCE, || renewed().is_some() && renewed() != last);
    node.assert_no_duplicates();
    assert_eq!((node.running("web"), node.running("fixed")), (before.web.clone(), before.fixed.clone()));
    assert_eq!(node.containers("web").len(), BOTH.len(), "no container was started without need");
    let hurt = node.shown("hurt").unwrap();
    // An agent that dies between creation and start uses up an attempt number.
    let count = restarts(&hurt, "main");
    assert!((1..=1 + deaths).contains(&count), "{count} restarts of a container that died once");
    assert!(container(&hurt, "main").is_some_and(|status| status.last_state.is_some()));
    // Delayed requests, such as events, may still be sent for a while.
    wait_until(&format!("at most {MAX_IDLE_RATE} requests/s afterwards"), PATIENCE, || {
        let (sent, begun) = (node.api().requests(), Instant::now());
        pause(Duration::from_secs(2));
        (node.api().requests() - sent) as f64 / begun.elapsed().as_secs_f64() <= MAX_IDLE_RATE
    });
    node.finish();
}

#[test]
fn api_server_faults_lose_no_status_and_restart_no_container() {
    in_parallel(CASES, |case| {
        let (node, before) = begin(case);
        let (sent, begun) = (attempts(&node), Instant::now());
        (case.begin_fault)(node.api());
        meanwhile(&node, true);
        while begun.elapsed() < Duration::from_secs(case.fault_seconds) {
            node.assert_no_duplicates();
            pause(Duration::from_millis(100));
        }
        let rate = (attempts(&node) - sent) / begun.elapsed().as_secs_f64();
        print_line(&format!("api server {case:?}: {rate:.1} requests/s during the fault"));
        node.api().clear_faults();
        (case.end_fault)(node.api());
        settle(node, case, &before, 0);
        assert!(rate <= MAX_RATE, "{rate:.1} requests/s during the fault");
    });
}

/// The agent dies at random times during the fault, and the next one takes its pods over.
#[test]
fn killed_agent_takes_over_pods_during_api_server_faults() {
    let seed = random_seed();
    print_line(&format!("api server: seed of the kills {seed}"));
    let cases = [
        "refuses connections",
        "takes connections and never answers",
        "is slow",
        "429, come back",
        "500",
        "watches expire",
        "restored from a backup",
        "answers are lost",
    ];
    let cases: Vec<(usize, &Case)> =
        CASES.iter().filter(|case| cases.contains(&case.name)).enumerate().collect();
    in_parallel(&cases, |(number, case)| {
        let mut random = Random::new(seed + *number as u64);
        let (mut node, before) = begin(case);
        (case.begin_fault)(node.api());
        let begun = Instant::now();
        pause(Duration::from_millis(random.below(1500)));
        node.kill_agent();
        node.start_agent();
        meanwhile(&node, false);
        for _ in 0..2 {
            pause(Duration::from_millis(random.below(3000)));
            node.kill_agent();
            node.start_agent();
            node.assert_no_duplicates();
        }
        pause(Duration::from_secs(case.fault_seconds).saturating_sub(begun.elapsed()));
        node.api().clear_faults();
        (case.end_fault)(node.api());
        settle(node, case, &before, 3);
    });
}

/// The agent stops in time in each state of the server.
#[test]
fn agent_stops_in_time_during_api_server_faults() {
    let cases: Vec<&Case> = CASES.iter().filter(|case| case.fault_seconds >= 10).collect();
    in_parallel(&cases, |case| {
        let mut node = FakeNode::join(config());
        node.bind(&two("web"));
        wait_reported(&node, case, "web");
        (case.begin_fault)(node.api());
        node.bind(&simple("late"));
        node.assert_responsive();
        pause(Duration::from_secs(2));
        node.stop_agent();
    });
}

/// A secret that a node may not read yet: the authorizer sees a binding a moment later.
#[test]
fn pod_starts_once_its_secret_becomes_readable() {
    let node = FakeNode::join(config());
    let path = "/api/v1/namespaces/default/secrets/key";
    node.api().put(path, json!({"data": {"word": "c2VzYW1l"}}));
    node.api().fault(Fault::always("GET", "/secrets", FaultResponse::Status(403, "Forbidden", None)));
    let mut pod = simple("web");
    pod["spec"]["volumes"] = json!([{"name": "key", "secret": {"secretName": "key"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "key", "mountPath": "/key"}]);
    pod["spec"]["containers"][0]["env"] =
        json!([{"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "key", "key": "word"}}}]);
    let (sent, begun) = (attempts(&node), Instant::now());
    node.bind(&pod);
    pause(Duration::from_secs(8));
    assert!(node.running("web").is_empty());
    node.assert_responsive();
    let rate = (attempts(&node) - sent) / begun.elapsed().as_secs_f64();
    print_line(&format!("api server, a secret is forbidden: {rate:.1} requests/s"));
    assert!(rate <= MAX_RATE, "{rate:.1} requests/s");
    node.api().clear_faults();
    wait_reported(&node, &CASES[0], "web");
    assert_eq!(node.containers("web").len(), 1);
    assert!(!node.log().contains("sesame") && !node.log().contains("c2VzYW1l"));
    node.finish();
}

/// A pod is deleted and another one gets its name while no watch reports it.
#[test]
fn pod_recreated_during_an_outage_replaces_the_old_one() {
    in_parallel(&[1, 2, 3, 4], |_| created_again());
}

fn created_again() {
    let node = FakeNode::join(config());
    node.bind(&two("web"));
    wait_reported(&node, &CASES[0], "web");
    let before = ids(&node.shown("web").unwrap());
    node.api().go_down();
    node.api().remove(&FakeNode::pod_path("web"));
    node.bind(&two("web"));
    node.api().go_up();
    wait_reported(&node, &CASES[0], "web");
    let after = ids(&node.shown("web").unwrap());
    assert!(after.iter().all(|(name, ids)| before[name] != *ids), "{before:?}, {after:?}");
    wait_until("the containers of the first pod to end", LONG, || node.running("web") == after);
    assert_eq!(restarts(&node.shown("web").unwrap(), "one"), 0);
    node.finish();
}

/// A user who may create pods may write any annotation. A pod that claims to be the mirror of a
/// static pod under another name is ignored: it does not run, and the static pod is reported by its
/// own mirror.
#[test]
fn forged_mirror_pod_does_not_run() {
    let node = FakeNode::join(config());
    node.apply(&simple("fixed"));
    wait_reported(&node, &CASES[0], "fixed");
    let running = node.running("fixed");
    let uid = wait_for("the pod's UID", LONG, || node.pod("fixed")?.metadata.uid);
    let mut forged = simple("forged");
    forged["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": uid,
        "kubernetes.io/config.hash": uid, "kubernetes.io/config.source": "file"});
    // A finalizer keeps the object, so that a wrong status would be visible.
    forged["metadata"]["finalizers"] = json!(["example.org/held"]);
    node.bind(&forged);
    pause(Duration::from_secs(3));
    let patched = |name: &str| {
        let path = format!("{}/status", FakeNode::pod_path(name));
        node.api()
            .received()
            .iter()
            .filter(|request| request.method == "PATCH" && request.path() == path)
            .count()
    };
    assert_eq!(patched("forged"), 0, "it has no status of ours");
    assert!(node.running("forged").is_empty());
    // The status of the real mirror pod is still updated.
    let before = patched("fixed");
    let victim = running["main"][0].clone();
    assert!(node.fake.kill_container(&victim, 3));
    wait_until("the restart to be reported", LONG, || {
        node.shown("fixed").is_some_and(|pod| restarts(&pod, "main") == 1)
    });
    assert!(patched("fixed") > before);
    wait_reported(&node, &CASES[0], "fixed");
    node.api().remove(&FakeNode::pod_path("forged"));
    node.finish();
}

/// The last status of a static pod is stored until its mirror shows it, or for a moment. A pod whose
/// manifest comes back in this time does not continue it: it would have ended before it has started.
#[test]
fn static_pod_that_comes_back_before_its_end_is_reported_runs_again() {
    let node = FakeNode::join(config());
    let mut pod = simple("fixed");
    pod["spec"]["restartPolicy"] = json!("Never");
    node.apply(&pod);
    wait_reported(&node, &CASES[0], "fixed");
    let before = node.running("fixed");
    let uid = wait_for("the pod's UID", LONG, || node.pod("fixed")?.metadata.uid);
    node.api().go_down();
    // The agent learns late that the containers are removed.
    node.fake.set_stream_fault(StreamFault::Silent);
    node.remove("fixed");
    node.wait_gone("fixed", LONG);
    let directory = node.root().join("pods").join(uid);
    wait_until("the directory of the pod to be removed", LONG, || !directory.exists());
    // A container that has ended is the end of such a pod, as long as the runtime has it.
    wait_until("the containers of the pod to be removed", LONG, || {
        node.fake.with_state(|state| state.containers.is_empty() && state.sandboxes.is_empty())
    });
    node.apply(&pod);
    node.wait_ready("fixed");
    node.api().go_up();
    wait_reported(&node, &CASES[0], "fixed");
    assert_ne!(node.running("fixed"), before);
    node.finish();
}

/// The watch of the node may lag behind that of pods. A rejection is final, so the node is read again
/// before its labels reject a pod, once per pod.
#[test]
fn node_label_is_read_again_before_a_rejection() {
    // No status patch, whose response would have the label, is sent in this time.
    let node = FakeNode::join(json!({"nodeStatusUpdateFrequency": "10m"}));
    node.bind(&simple("first"));
    node.wait_ready("first");
    let (one_node, all_nodes) = (format!("/api/v1/nodes/{NODE}"), "/api/v1/nodes?");
    let read_count = |what: &str| {
        let is =
            |uri: &str| uri.split('?').next() == Some(what) || (what.ends_with('?') && uri.starts_with(what));
        node.api().received().iter().filter(|request| request.method == "GET" && is(&request.uri)).count()
    };
    let object = node.api().object(&one_node).unwrap();
    let version = &object["metadata"]["resourceVersion"];
    let bookmark = json!({"type": "BOOKMARK", "object": {"kind": "Node", "apiVersion": "v1",
        "metadata": {"resourceVersion": version}}});
    let before = read_count(all_nodes);
    every(node.api(), "GET", all_nodes, FaultResponse::ThenSilence(format!("{bookmark}\n")));
    wait_until("the node to be watched again", LONG, || read_count(all_nodes) > before);
    node.api().edit(&one_node, |object| object["metadata"]["labels"]["example.org/room"] = json!("here"));
    let reads = read_count(&one_node);

    for (name, room) in [("here", "here"), ("there", "there")] {
        let mut pod = simple(name);
        pod["spec"]["nodeSelector"] = json!({"example.org/room": room});
        node.bind(&pod);
        if name == "here" {
            node.wait_ready(name);
            assert_eq!(read_count(&one_node) - reads, 1);
        }
    }
    wait_until("the other pod to be refused", LONG, || {
        let status = node.shown("there").and_then(|pod| pod.status);
        status.and_then(|status| status.reason).as_deref() == Some("NodeAffinity")
    });
    // Pods that are already admitted cause no more reads.
    node.bind(&simple("last"));
    node.wait_ready("last");
    assert_eq!(read_count(&one_node) - reads, 2);
    node.api().clear_faults();
    node.api().cut();
    node.finish();
}

/// A server that does not return the node delays no other pod, and delays none forever.
#[test]
fn unreadable_node_does_not_delay_other_pods() {
    let node = FakeNode::join(config());
    for name in ["first", "leaves"] {
        node.bind(&simple(name));
        wait_reported(&node, &CASES[0], name);
    }
    let path = format!("/api/v1/nodes/{NODE}");
    let read_count = || {
        let requests = node.api().received();
        requests.iter().filter(|request| request.method == "GET" && request.uri.starts_with(&path)).count()
    };
    node.api().fault(Fault::always("GET", &path, FaultResponse::Hang));
    let (before, begun) = (read_count(), Instant::now());
    let mut pod = simple("there");
    pod["spec"]["nodeSelector"] = json!({"example.org/room": "there"});
    node.bind(&pod);
    wait_until("the request for the node", LONG, || read_count() > before);
    node.api().delete_pod(&FakeNode::pod_path("leaves"));
    node.bind(&simple("comes"));
    let phase = |name: &str| node.shown(name)?.status?.phase;
    wait_until("the changes of other pods", LONG, || {
        node.shown("leaves").is_none() && phase("comes").as_deref() == Some("Running")
    });
    // On a slow machine the order proves nothing.
    let early = phase("there");
    if begun.elapsed() < Duration::from_secs(4) {
        assert_eq!(early.as_deref(), Some("Pending"));
    }
    wait_until("the pod to be refused", LONG, || phase("there").as_deref() == Some("Failed"));
    assert!(begun.elapsed() >= Duration::from_secs(5), "it was not waited for");
    assert_eq!(read_count() - before, 1, "one request, however many sets of pods arrive");
    node.api().clear_faults();
    node.finish();
}

/// The token that the pod reads is always valid, though each token lives for seconds only.
#[test]
fn token_is_renewed_before_it_expires() {
    let mut config = config();
    config["syncFrequency"] = json!("1s");
    let node = FakeNode::join(config);
    // A fifth of it is more than a busy machine delays a pod.
    node.api().token_seconds(Some(60));
    let mut pod = simple("web");
    pod["spec"]["serviceAccountName"] = json!("default");
    let token = json!({"serviceAccountToken": {"path": "token", "expirationSeconds": 600}});
    pod["spec"]["volumes"] = json!([{"name": "v", "projected": {"sources": [token]}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    node.bind(&pod);
    wait_reported(&node, &CASES[0], "web");
    let uid = node.shown("web").and_then(|pod| pod.metadata.uid).unwrap();
    let file = node.root().join("pods").join(uid).join("volumes/kubernetes.io~projected/v/token");
    let request_count =
        || node.api().received().iter().filter(|request| request.path().ends_with("/token")).count();
    let mut seen = std::collections::BTreeSet::new();
    let earlier = request_count();
    let begun = Instant::now();
    // On a busy machine the third one may come later.
    while begun.elapsed() < Duration::from_secs(120) || seen.len() < 3 {
        assert!(begun.elapsed() < PATIENCE * 2, "only {seen:?}");
        let now = jiff::Timestamp::now().as_second();
        // Its path can change between two links of it.
        let text = (0..10).find_map(|_| std::fs::read_to_string(&file).ok()).expect("the token is there");
        let end: i64 = text.rsplit('-').next().unwrap().parse().unwrap();
        assert!(now < end, "{text} has run out");
        seen.insert(text);
        pause(Duration::from_millis(100));
    }
    // Renewed when a fifth of its life is left, or up to ten seconds earlier; not at each sync.
    assert!((3..=8).contains(&seen.len()), "{seen:?}");
    // One for each token but the first, and perhaps one for the next token.
    let renewals = request_count() - earlier;
    assert!(renewals <= seen.len(), "{renewals} requests, {seen:?}");
    assert!(seen.iter().all(|token| !node.log().contains(token)));
    node.finish();
}
