//! The core with a fake server, request by request, and one test of the thread.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use crossbeam_channel::{Sender, bounded};
use serde_json::{Value, json};

use super::request::{Request, Response};
use super::*;
use crate::model::pod::Pod;

fn object(value: &Value) -> Pod {
    Pod::from(serde_json::from_value::<api::Pod>(value.clone()).unwrap())
}

/// A static pod; its hash is its UID.
fn pod(name: &str, hash: &str) -> Pod {
    object(&json!({"metadata": {"name": name, "namespace": "n", "uid": hash, "resourceVersion": "7",
        "annotations": {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": hash}},
        "spec": {"nodeName": "node1", "containers": [{"name": "c"}]}, "status": {"phase": "Pending"}}))
}

fn node() -> api::Node {
    serde_json::from_value(json!({"metadata": {"name": "node1", "uid": "node-uid"}})).unwrap()
}

/// A fake API server, which stores pods by name.
#[derive(Default)]
struct Server {
    pods: BTreeMap<String, Value>,
    made: u32,
    fails: bool,
    /// Deleted pods get a deletion time and stay: a finalizer keeps them.
    holds: bool,
    /// A webhook changes the annotation.
    changes: bool,
    log: Vec<String>,
}

impl Server {
    fn respond(&mut self, request: &Request) -> Response {
        let (line, response) = match request {
            _ if self.fails => ("fail".to_owned(), Response::Failed("500".into())),
            Request::Create(pod) => {
                let mut body = serde_json::to_value(pod).unwrap();
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                let response = if self.pods.contains_key(&name) {
                    Response::Exists
                } else {
                    self.made += 1;
                    body["metadata"]["uid"] = json!(format!("m{}", self.made));
                    if self.changes {
                        body["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("other");
                    }
                    self.pods.insert(name.clone(), body);
                    Response::Shown(Box::new(self.mirror(&name).object().clone()))
                };
                (format!("create {name}"), response)
            }
            Request::Get { name, .. } => {
                let response = match self.pods.get(name) {
                    Some(_) => Response::Shown(Box::new(self.mirror(name).object().clone())),
                    None => Response::Gone,
                };
                (format!("get {name}"), response)
            }
            Request::Delete { name, uid, .. } => {
                match self.pods.get_mut(name).filter(|pod| pod["metadata"]["uid"] == **uid) {
                    Some(pod) if self.holds => {
                        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                    }
                    Some(_) => drop(self.pods.remove(name)),
                    None => {}
                }
                (format!("delete {name} {uid}"), Response::Gone)
            }
        };
        self.log.push(line);
        response
    }

    fn mirror(&self, name: &str) -> Pod {
        object(&self.pods[name])
    }

    fn all(&self) -> Vec<Pod> {
        self.pods.values().map(object).collect()
    }
}

struct Fixture {
    core: Core,
    server: Server,
    node: Option<api::Node>,
    now: Instant,
}

impl Fixture {
    fn new() -> Self {
        Fixture { core: Core::default(), server: Server::default(), node: Some(node()), now: Instant::now() }
    }

    /// Posts a view with the mirrors of the server, and sends the requests that are due.
    fn observe(&mut self, desired: &[Pod], removed: &[&Pod]) -> Vec<String> {
        let mirrors = Some(self.server.all());
        self.observe_with(desired, removed, mirrors, true)
    }

    fn observe_with(
        &mut self,
        desired: &[Pod],
        removed: &[&Pod],
        mirrors: Option<Vec<Pod>>,
        sources_ready: bool,
    ) -> Vec<String> {
        let removed = removed.iter().map(|pod| pod.full_name()).collect();
        self.core.apply_view(View { desired: desired.to_vec(), removed, mirrors, sources_ready }, self.now);
        self.run()
    }

    fn run(&mut self) -> Vec<String> {
        for _ in 0..20 {
            let Some((name, request)) = self.core.next(self.node.as_ref(), self.now) else { break };
            let response = self.server.respond(&request);
            self.core.apply_response(&name, &request, response, self.now);
        }
        std::mem::take(&mut self.server.log)
    }

    fn after(&mut self, seconds: u64) -> Vec<String> {
        self.now += Duration::from_secs(seconds);
        self.run()
    }
}

const NOTHING: Vec<String> = Vec::new();

#[test]
fn mirror_is_created_once_and_again_after_its_deletion() {
    let mut fixture = Fixture::new();
    let desired = [pod("st", "h1")];
    // Before the API server has delivered its pods, the missing mirrors are unknown.
    assert_eq!(fixture.observe_with(&desired, &[], None, false), NOTHING);
    assert_eq!(fixture.observe_with(&desired, &[], Some(vec![]), false), ["create st"]);
    // The watch may be late.
    assert_eq!(fixture.observe_with(&desired, &[], Some(vec![]), true), NOTHING);
    assert_eq!(fixture.observe(&desired, &[]), NOTHING);
    assert_eq!(fixture.core.next_due(), None, "nothing wakes an idle node");
    let made = &fixture.server.pods["st"];
    assert_eq!(made["metadata"]["annotations"]["kubernetes.io/config.mirror"], "h1");
    assert_eq!(made["metadata"].get("resourceVersion"), None);
    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "node1", "uid": "node-uid",
        "controller": true}]);
    assert_eq!(made["metadata"]["ownerReferences"], owner);
    assert_eq!(made["status"], json!({"phase": "Pending"}));
    // A user deletes the mirror: a new one is created.
    fixture.server.pods.clear();
    assert_eq!(fixture.observe(&desired, &[]), ["create st"]);
}

#[test]
fn no_mirror_is_created_without_a_live_node_object() {
    let mut fixture = Fixture::new();
    let desired = [pod("st", "h1")];
    fixture.node = None;
    assert_eq!(fixture.observe(&desired, &[]), NOTHING);
    assert!(fixture.core.next_due().is_some_and(|due| due > fixture.now));
    fixture.node = Some(node());
    fixture.node.as_mut().unwrap().metadata.deletion_timestamp =
        Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    assert_eq!(fixture.after(2), NOTHING);
    fixture.node = Some(node());
    assert_eq!(fixture.after(4), ["create st"]);
}

#[test]
fn mirror_is_replaced_when_the_old_static_pod_has_ended() {
    let mut fixture = Fixture::new();
    let (old, new) = (pod("st", "h1"), pod("st", "h2"));
    fixture.observe(std::slice::from_ref(&old), &[]);
    let shown = fixture.server.all();
    assert_eq!(fixture.observe(std::slice::from_ref(&new), &[&old]), NOTHING);
    let both = std::slice::from_ref(&new);
    assert_eq!(fixture.observe_with(both, &[], Some(shown.clone()), true), ["delete st m1", "create st"]);
    // The watch still shows the old mirror.
    assert_eq!(fixture.observe_with(both, &[], Some(shown), true), NOTHING);
    assert_eq!(fixture.observe(both, &[]), NOTHING);
    // A mirror that a user deletes gracefully has to be deleted by the agent.
    fixture.server.pods.get_mut("st").unwrap()["metadata"]["deletionTimestamp"] =
        json!("2026-01-01T00:00:00Z");
    assert_eq!(fixture.observe(both, &[]), ["delete st m2", "create st"]);
}

#[test]
fn orphan_mirrors_are_deleted_once_sources_delivered_and_pods_ended() {
    let mut fixture = Fixture::new();
    let gone = pod("st", "h1");
    fixture.observe(std::slice::from_ref(&gone), &[]);
    let shown = fixture.server.all();
    assert_eq!(fixture.observe(&[], &[&gone]), NOTHING);
    assert_eq!(fixture.observe_with(&[], &[], Some(shown.clone()), false), NOTHING);
    assert_eq!(fixture.observe_with(&[], &[], Some(shown.clone()), true), ["delete st m1"]);
    assert_eq!(fixture.observe_with(&[], &[], Some(shown), true), NOTHING);
    assert_eq!(fixture.observe(&[], &[]), NOTHING);
    assert!(fixture.core.is_blank());
    // A mirror that was never shown is also an orphan.
    let mut fixture = Fixture::new();
    fixture.observe(std::slice::from_ref(&gone), &[]);
    assert_eq!(fixture.observe_with(&[], &[], Some(vec![]), true), ["delete st m1"]);
}

#[test]
fn name_conflict_deletes_an_outdated_mirror_but_no_other_pod() {
    // The name belongs to the pod's own mirror, which the view does not show.
    let mut fixture = Fixture::new();
    let desired = [pod("st", "h1")];
    fixture.observe(&desired, &[]);
    fixture.core = Core::default();
    assert_eq!(fixture.observe_with(&desired, &[], Some(vec![]), true), ["create st", "get st"]);
    assert_eq!(fixture.run(), NOTHING);
    // The name belongs to the mirror of an older static pod.
    fixture.core = Core::default();
    let newer = [pod("st", "h2")];
    assert_eq!(
        fixture.observe_with(&newer, &[], Some(vec![]), true),
        ["create st", "get st", "delete st m1", "create st"]
    );
    // The name belongs to another pod, which must not be deleted.
    let mut fixture = Fixture::new();
    let foreign = json!({"metadata": {"name": "st", "namespace": "n", "uid": "x"}});
    fixture.server.pods.insert("st".into(), foreign);
    assert_eq!(fixture.observe_with(&desired, &[], Some(vec![]), true), ["create st", "get st"]);
    assert_eq!(fixture.run(), NOTHING);
    assert_eq!(fixture.after(2), ["create st", "get st"]);
    assert_eq!(fixture.after(1), NOTHING);
}

/// Requests in ten minutes, with the watch up to date all the time.
fn ten_minutes(fixture: &mut Fixture, desired: &[Pod]) -> usize {
    (0..600)
        .map(|_| {
            fixture.now += Duration::from_secs(1);
            fixture.observe(desired, &[]).len()
        })
        .sum()
}

#[test]
fn finalizer_on_a_mirror_causes_no_hot_loop() {
    let mut fixture = Fixture::new();
    let (old, new) = (pod("st", "h1"), pod("st", "h2"));
    fixture.observe(std::slice::from_ref(&old), &[]);
    fixture.server.holds = true;
    let desired = std::slice::from_ref(&new);
    assert_eq!(fixture.observe(desired, &[]), ["delete st m1", "create st", "get st"]);
    let requests = ten_minutes(&mut fixture, desired);
    assert!(requests <= 20, "{requests} requests");
    // The finalizer was removed: the new mirror is created immediately, without the back-off.
    fixture.server.holds = false;
    fixture.server.pods.clear();
    assert_eq!(fixture.observe(desired, &[]), ["get st", "create st"]);
    assert_eq!(ten_minutes(&mut fixture, desired), 0);
}

#[test]
fn mirror_that_a_webhook_changes_causes_no_hot_loop() {
    let mut fixture = Fixture::new();
    fixture.server.changes = true;
    let desired = [pod("st", "h1")];
    assert_eq!(fixture.observe(&desired, &[]), ["create st"]);
    let requests = ten_minutes(&mut fixture, &desired);
    assert!(requests <= 40, "{requests} requests");
    fixture.server.changes = false;
    assert!(ten_minutes(&mut fixture, &desired) <= 2);
    assert_eq!(fixture.server.pods["st"]["metadata"]["annotations"]["kubernetes.io/config.mirror"], "h1");
    assert_eq!(ten_minutes(&mut fixture, &desired), 0);
}

#[test]
fn failed_requests_are_retried_with_growing_waits() {
    let mut fixture = Fixture::new();
    fixture.server.fails = true;
    assert_eq!(fixture.observe(&[pod("a", "a"), pod("b", "b")], &[]), ["fail", "fail"]);
    assert_eq!(fixture.run(), NOTHING);
    assert_eq!(fixture.after(2).len(), 2);
    assert_eq!(fixture.after(1), NOTHING);
    for _ in 0..8 {
        fixture.after(95);
    }
    // A return of the server ends the waits once; the next ones are as long as before.
    fixture.core.returned(fixture.now);
    assert_eq!(fixture.run().len(), 2);
    fixture.server.fails = false;
    assert_eq!(fixture.after(30), NOTHING);
    assert_eq!(fixture.after(65), ["create a", "create b"]);
}

/// The recorded request, but for what a server adds to a pod by itself.
#[test]
fn created_mirror_equals_the_recorded_one() {
    let recorded = json!({"metadata": {"name": "st-node1", "namespace": "default", "uid": "hash",
        "labels": {"app": "st"}, "annotations": {"kubernetes.io/config.hash": "hash",
            "kubernetes.io/config.mirror": "hash", "kubernetes.io/config.seen": "now",
            "kubernetes.io/config.source": "file"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "node1", "uid": "node-uid",
            "controller": true}]},
        "spec": {"containers": [{"name": "c", "image": "localhost/busybox:1", "resources": {}}],
            "nodeName": "node1"},
        "status": {"phase": "Pending"}, "kind": "Pod", "apiVersion": "v1"});
    let mut source = recorded.clone();
    source["metadata"].as_object_mut().unwrap().remove("ownerReferences");
    source["metadata"]["annotations"].as_object_mut().unwrap().remove("kubernetes.io/config.mirror");
    let mut core = Core::default();
    let view = View { desired: vec![object(&source)], mirrors: Some(vec![]), ..View::default() };
    core.apply_view(view, Instant::now());
    let Some((_, Request::Create(made))) = core.next(Some(&node()), Instant::now()) else { panic!() };
    assert_eq!(serde_json::to_value(made).unwrap(), recorded);
}

struct Recorded(Mutex<Server>, Sender<String>);

impl Api for Recorded {
    fn send(&self, request: &Request) -> Response {
        let mut server = self.0.lock().unwrap();
        let response = server.respond(request);
        self.1.send(server.log.pop().unwrap()).unwrap();
        response
    }
}

#[test]
fn thread_creates_and_deletes_mirrors_as_views_change() {
    let (tx, rx) = bounded(10);
    let (post, views) = inbox();
    let deps = Deps {
        views,
        api: Box::new(Recorded(Mutex::default(), tx)),
        node: Box::new(|| Some(Arc::new(node()))),
    };
    let thread = spawn(deps, OnDeath::Unsupervised).unwrap();
    let view = View { mirrors: Some(vec![]), sources_ready: true, ..View::default() };
    post.put((), View { desired: vec![pod("st", "h1")], ..view.clone() });
    let limit = Duration::from_secs(60);
    assert_eq!(rx.recv_timeout(limit).unwrap(), "create st");
    post.put((), view);
    assert_eq!(rx.recv_timeout(limit).unwrap(), "delete st m1");
    assert_eq!(thread.stop(limit), threads::Stopped::Joined);
}
