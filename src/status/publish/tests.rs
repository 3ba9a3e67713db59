//! The core with a fake server, request by request, and one test of the thread.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use crossbeam_channel::{Sender, bounded};
use serde_json::{Value, json};

use super::super::strategic::tests::apply;
use super::*;
use crate::model::api::{self, PodStatus};
use crate::model::pod::Pod;

/// A server that stores pods and accepts each request, unless a response is scripted.
#[derive(Default)]
struct Server {
    pods: BTreeMap<String, Value>,
    version: u64,
    script: VecDeque<Response>,
    /// A status field that the server does not know.
    ignores: &'static str,
    log: Vec<String>,
}

impl Server {
    fn put(&mut self, name: &str, uid: &str, more: Value) -> Pod {
        self.version += 1;
        let mut object = json!({"metadata": {"name": name, "namespace": "n", "uid": uid,
            "resourceVersion": self.version.to_string()}, "status": {"phase": "Pending"}});
        for (path, value) in more.as_object().into_iter().flatten() {
            let (parent, key) = path.rsplit_once('/').unwrap();
            object.pointer_mut(parent).unwrap()[key] = value.clone();
        }
        self.pods.insert(name.to_owned(), object);
        self.pod(name)
    }

    fn pod(&self, name: &str) -> Pod {
        Pod::from(serde_json::from_value::<api::Pod>(self.pods[name].clone()).unwrap())
    }

    fn respond(&mut self, request: &Request) -> Response {
        let (name, verb) = (
            &request.name,
            match &request.operation {
                Operation::Get => "get".to_owned(),
                Operation::Patch(body) => {
                    assert_eq!(body["metadata"]["uid"], request.uid);
                    format!("patch {}", body["status"])
                }
                Operation::Delete => "delete".to_owned(),
            },
        );
        self.log.push(format!("{name} {verb}"));
        if let Some(response) = self.script.pop_front() {
            return response;
        }
        let Some(object) = self.pods.get_mut(name) else { return Response::Gone };
        match &request.operation {
            Operation::Get => {}
            _ if object["metadata"]["uid"] != request.uid => return Response::Conflict("uid".into()),
            Operation::Patch(body) => {
                apply(&mut object["status"], &body["status"]);
                object["status"].as_object_mut().unwrap().remove(self.ignores);
                self.version += 1;
                object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            }
            Operation::Delete => {
                self.pods.remove(name);
                return Response::Deleted;
            }
        }
        Response::Shown(Box::new(serde_json::from_value(object.clone()).unwrap()))
    }
}

struct Fixture {
    core: Core,
    cache: StatusCache,
    server: Server,
    activity: Activity,
    now: Instant,
}

impl Fixture {
    fn new() -> Self {
        let (core, cache, server) = (Core::default(), StatusCache::new(), Server::default());
        Fixture { core, cache, server, activity: Activity::MayRun, now: Instant::now() }
    }

    fn show(&mut self, pod: Pod) {
        self.core.shown(pod.uid().clone(), ApiPod { pod, removed: false }, self.now);
    }

    fn put(&mut self, name: &str, uid: &str, more: Value) -> Pod {
        let pod = self.server.put(name, uid, more);
        self.show(pod.clone());
        pod
    }

    fn store(&mut self, pod: &Pod, status: Value) {
        self.cache.set(pod, serde_json::from_value::<PodStatus>(status).unwrap(), Timestamp::UNIX_EPOCH);
    }

    /// Carries out the due requests, as the thread does, and returns them.
    fn run(&mut self) -> Vec<String> {
        for _ in 0..20 {
            for (uid, version) in self.cache.newer_than(self.core.seen()) {
                self.core.stored(&uid, version, self.now);
            }
            for uid in self.core.due(self.now) {
                let Some(entry) = self.core.local(&uid).and_then(|local| self.cache.entry(&local)) else {
                    continue;
                };
                let timestamp = Timestamp::UNIX_EPOCH;
                if let Some(request) = self.core.decide(&uid, &entry, self.activity, timestamp, self.now) {
                    let response = self.server.respond(&request);
                    self.core.apply_response(&uid, response, self.now);
                }
            }
        }
        std::mem::take(&mut self.server.log)
    }

    fn after(&mut self, seconds: u64) -> Vec<String> {
        self.now += Duration::from_secs(seconds);
        self.run()
    }
}

/// Statuses get a start time when they are stored; pods that have one keep patches short.
fn started() -> Value {
    json!({"/status/startTime": "1970-01-01T00:00:00Z"})
}

const NOTHING: Vec<String> = Vec::new();

#[test]
fn status_is_sent_once() {
    let mut fixture = Fixture::new();
    let pod = fixture.put("web", "1", json!({}));
    assert_eq!(fixture.run(), NOTHING);
    fixture.store(&pod, json!({"phase": "Pending", "hostIP": "192.0.2.1"}));
    assert_eq!(fixture.run(), [r#"web patch {"hostIP":"192.0.2.1","startTime":"1970-01-01T00:00:00Z"}"#]);
    // The event of our own patch causes no request.
    let echo = fixture.server.pod("web");
    fixture.show(echo);
    assert_eq!(fixture.after(60), NOTHING);
    // A server that shows older states for long is read once.
    fixture.show(pod.clone());
    assert_eq!(fixture.after(1), NOTHING);
    assert_eq!(fixture.after(60), ["web get"]);
    assert_eq!(fixture.after(60), NOTHING);
    assert_eq!(fixture.core.next_due(), None, "nothing wakes an idle node");
    // Only the newest of several statuses is reported.
    fixture.store(&pod, json!({"phase": "Pending"}));
    fixture.store(&pod, json!({"phase": "Running", "hostIP": "192.0.2.1"}));
    assert_eq!(fixture.run(), [r#"web patch {"phase":"Running"}"#]);
}

#[test]
fn status_that_the_server_shows_already_causes_no_request() {
    let mut fixture = Fixture::new();
    let pod = fixture.put("web", "1", started());
    fixture.store(&pod, json!({"phase": "Pending"}));
    assert_eq!(fixture.run(), NOTHING);
}

#[test]
fn ready_sandbox_is_reported_with_the_next_change_or_after_a_wait() {
    let status = |phase: &str, sandbox: &str, ready: &str| {
        json!({"phase": phase, "conditions": [{"type": "PodReadyToStartContainers", "status": sandbox},
            {"type": "Ready", "status": ready}]})
    };
    let pending = || {
        let mut fixture = Fixture::new();
        let pod = fixture.put("web", "1", started());
        fixture.store(&pod, status("Pending", "False", "False"));
        assert_eq!(fixture.run().len(), 1);
        fixture.store(&pod, status("Pending", "True", "False"));
        assert_eq!(fixture.run(), NOTHING);
        (fixture, pod)
    };
    let order = r#""$setElementOrder/conditions":[{"type":"PodReadyToStartContainers"},{"type":"Ready"}]"#;
    let sandbox = r#"{"status":"True","type":"PodReadyToStartContainers"}"#;
    // A container starts: one request for both.
    let (mut fixture, pod) = pending();
    fixture.store(&pod, status("Running", "True", "True"));
    let ready = r#"{"status":"True","type":"Ready"}"#;
    let both = format!(r#"web patch {{{order},"conditions":[{sandbox},{ready}],"phase":"Running"}}"#);
    assert_eq!(fixture.run(), [both]);
    assert_eq!(fixture.after(60), NOTHING);
    // An image is pulled: the wait ends.
    let alone = format!(r#"web patch {{{order},"conditions":[{sandbox}]}}"#);
    let (mut fixture, _) = pending();
    let wait = fixture.core.next_due().unwrap() - fixture.now;
    assert_eq!(wait, Duration::from_millis(500));
    let echo = fixture.server.pod("web");
    fixture.show(echo);
    fixture.now += wait - Duration::from_millis(1);
    assert_eq!(fixture.run(), NOTHING);
    fixture.now += Duration::from_millis(1);
    // A retry does not wait again.
    fixture.server.script = [Response::Busy("500".into(), None)].into();
    assert_eq!(fixture.run(), std::slice::from_ref(&alone));
    assert_eq!(fixture.after(1), [alone]);
    assert_eq!(fixture.core.next_due(), None);
    // The end of a sandbox is reported at once.
    let (mut fixture, pod) = pending();
    fixture.after(1);
    fixture.store(&pod, status("Pending", "False", "False"));
    assert_eq!(fixture.run().len(), 1);
}

#[test]
fn unavailable_server_is_retried_rarely_and_then_gets_the_newest_status() {
    let mut fixture = Fixture::new();
    let pods: Vec<Pod> = ["a", "b", "c"].map(|name| fixture.put(name, name, started())).into();
    for pod in &pods {
        fixture.store(pod, json!({"phase": "Running"}));
    }
    fixture.server.script = vec![Response::Unavailable("refused".into()); 6].into();
    assert_eq!(fixture.run().len(), 1, "one pod asks for all");
    let until = fixture.core.next_due().unwrap();
    assert!(until > fixture.now && until <= fixture.now + RETRY_SOON);
    fixture.store(&pods[0], json!({"phase": "Running", "message": "m"}));
    assert_eq!(fixture.run(), NOTHING, "a new status is no reason to ask again");
    for _ in 0..5 {
        assert_eq!(fixture.after(11).len(), 1);
    }
    let mut sent = fixture.after(11);
    sent.sort();
    let running = |name: &str| format!(r#"{name} patch {{"phase":"Running"}}"#);
    assert_eq!(sent, [r#"a patch {"message":"m","phase":"Running"}"#.into(), running("b"), running("c")]);
}

#[test]
fn return_of_the_server_ends_waits_and_does_not_shorten_the_next() {
    let mut fixture = Fixture::new();
    let (a, b) = (fixture.put("a", "a", started()), fixture.put("b", "b", started()));
    fixture.store(&a, json!({"phase": "Running"}));
    fixture.server.script = vec![Response::Refused("403".into()); 7].into();
    for _ in 0..7 {
        assert_eq!(fixture.after(100).len(), 1);
    }
    fixture.store(&b, json!({"phase": "Running"}));
    fixture.server.script = vec![Response::Unavailable("refused".into()); 7].into();
    for _ in 0..6 {
        assert_eq!(fixture.after(11).len(), 1);
    }
    assert_eq!(fixture.after(1), NOTHING);
    fixture.core.returned(fixture.now);
    assert_eq!(fixture.run().len(), 1, "it is away again");
    assert_eq!(fixture.after(1), NOTHING);
    fixture.core.returned(fixture.now);
    let mut sent = fixture.run();
    sent.sort();
    assert_eq!(sent, ["a", "b"].map(|name| format!(r#"{name} patch {{"phase":"Running"}}"#)));
}

const RETRY_SOON: Duration = Duration::from_millis(300);

#[test]
fn a_pod_that_fails_delays_no_other() {
    let mut fixture = Fixture::new();
    let (a, b) = (fixture.put("a", "a", started()), fixture.put("b", "b", started()));
    fixture.store(&a, json!({"phase": "Running"}));
    fixture.server.script = [Response::Busy("500".into(), None)].into();
    assert_eq!(fixture.run().len(), 1);
    fixture.store(&b, json!({"phase": "Running"}));
    assert_eq!(fixture.run(), [r#"b patch {"phase":"Running"}"#]);
    assert_eq!(fixture.after(1), [r#"a patch {"phase":"Running"}"#]);
    // The wait is the one that the server requests; a refusal concerns this status only.
    fixture.store(&a, json!({"phase": "Running", "message": "m"}));
    fixture.server.script = [Response::Busy("429".into(), Some(Duration::from_secs(30)))].into();
    assert_eq!(fixture.run().len(), 1);
    fixture.store(&a, json!({"phase": "Running", "message": "n"}));
    assert_eq!(fixture.after(29), NOTHING);
    assert_eq!(fixture.after(1), [r#"a patch {"message":"n"}"#]);
    fixture.store(&a, json!({"phase": "Running", "message": "o"}));
    fixture.server.script = [Response::Refused("403".into())].into();
    assert_eq!(fixture.run().len(), 1);
    fixture.store(&a, json!({"phase": "Running", "message": "p"}));
    assert_eq!(fixture.run(), [r#"a patch {"message":"p"}"#]);
}

#[test]
fn edit_of_our_fields_by_another_client_is_undone() {
    let mut fixture = Fixture::new();
    let pod = fixture.put("web", "1", started());
    fixture.store(&pod, json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}));
    assert_eq!(fixture.run().len(), 1);
    fixture.now += Duration::from_secs(20);
    let edit = |status: &str, version: u64| {
        json!({"/metadata/resourceVersion": version.to_string(), "/status": {"phase": "Running",
        "startTime": "1970-01-01T00:00:00Z", "conditions": [{"type": "x/y", "status": status},
        {"type": "Ready", "status": status, "lastTransitionTime": "1970-01-01T00:00:00Z"}]}})
    };
    fixture.put("web", "1", edit("False", 50));
    let undone = r#"web patch {"$setElementOrder/conditions":[{"type":"x/y"},{"type":"Ready"}],"conditions":[{"status":"True","type":"Ready"}]}"#;
    fixture.server.version = 50;
    assert_eq!(fixture.run(), [undone]);
    // Repeated edits are undone as often as upstream does it.
    fixture.put("web", "1", edit("False", 60));
    fixture.server.version = 60;
    assert_eq!(fixture.after(3), NOTHING);
    assert_eq!(fixture.after(7), [undone]);
    // A condition that is not ours stays.
    assert_eq!(fixture.server.pods["web"]["status"]["conditions"][0]["status"], "False");
}

#[test]
fn status_that_the_server_changes_is_sent_once() {
    let mut fixture = Fixture::new();
    fixture.server.ignores = "observedGeneration";
    let pod = fixture.put("web", "1", started());
    fixture.store(&pod, json!({"phase": "Running", "observedGeneration": 1}));
    assert_eq!(fixture.run(), [r#"web patch {"observedGeneration":1,"phase":"Running"}"#]);
    let echo = fixture.server.pod("web");
    fixture.show(echo);
    assert_eq!(fixture.after(60), NOTHING);
    fixture.store(&pod, json!({"phase": "Running", "observedGeneration": 1, "message": "m"}));
    assert_eq!(fixture.run(), [r#"web patch {"message":"m","observedGeneration":1}"#]);
}

/// While the node was unreachable, a controller marked its pods as not ready, and the node has not
/// received that when it reports another change.
#[test]
fn foreign_write_before_a_patch_is_corrected_after_it() {
    let mut fixture = Fixture::new();
    let condition = |kind: &str, status: &str| json!({"type": kind, "status": status});
    let ready = json!([condition("Ready", "True"), condition("Initialized", "True")]);
    let pod = fixture.put("web", "1", started());
    fixture.store(&pod, json!({"phase": "Running", "conditions": ready}));
    fixture.run();
    fixture.after(60);
    fixture.server.pods.get_mut("web").unwrap()["status"]["conditions"][0]["status"] = json!("False");
    fixture.store(&pod, json!({"phase": "Running", "conditions": ready, "message": "m"}));
    assert_eq!(fixture.run(), [r#"web patch {"message":"m"}"#]);
    let echo = fixture.server.pod("web");
    fixture.show(echo);
    assert_eq!(fixture.after(60).len(), 1);
    assert_eq!(fixture.server.pods["web"]["status"]["conditions"][0]["status"], "True");
    assert_eq!(fixture.after(60), NOTHING);
}

#[test]
fn ended_pod_that_a_client_deleted_is_removed() {
    let mut fixture = Fixture::new();
    let pod = fixture.put("web", "1", started());
    fixture.store(&pod, json!({"phase": "Running"}));
    fixture.run();
    let mut going = json!({"/metadata/deletionTimestamp": "1970-01-01T00:00:05Z"});
    going["/status"] = fixture.server.pods["web"]["status"].clone();
    let pod = fixture.put("web", "1", going);
    // While containers run, the end of the pod is not reported.
    fixture.store(&pod, json!({"phase": "Succeeded", "message": "m"}));
    assert_eq!(fixture.run(), NOTHING);
    let looks = |fixture: &mut Fixture| {
        assert_eq!(fixture.run(), NOTHING);
        let wait = fixture.core.next_due().unwrap() - fixture.now;
        fixture.now += wait;
        wait.as_secs()
    };
    assert_eq!([(); 6].map(|()| looks(&mut fixture)), [1, 2, 4, 8, 10, 10]);
    fixture.activity = Activity::Stopped;
    assert_eq!(fixture.after(1), [r#"web patch {"message":"m","phase":"Succeeded"}"#]);
    assert_eq!(fixture.after(60), NOTHING);
    fixture.cache.finish(&pod, Timestamp::UNIX_EPOCH);
    assert_eq!(fixture.run(), ["web delete"]);
    // The deletion itself is shown as an edit first, and causes no other request.
    let mut last = pod.object().clone();
    last.metadata.resource_version = Some("100".to_owned());
    fixture.show(Pod::from(last));
    assert_eq!(fixture.after(60), NOTHING);
    // A delayed event does not restore the pod; the event of its removal ends the record.
    fixture.show(pod.clone());
    fixture.cache.finish(&pod, Timestamp::UNIX_EPOCH);
    assert_eq!(fixture.after(1), NOTHING);
    fixture.core.shown(pod.uid().clone(), ApiPod { pod, removed: true }, fixture.now);
    assert!(fixture.core.local(&"1".into()).is_none());
}

#[test]
fn refused_pod_is_reported_and_deleted_without_a_worker() {
    let mut fixture = Fixture::new();
    fixture.activity = Activity::Stopped;
    let pod = fixture.put(
        "web",
        "1",
        json!({"/metadata/deletionTimestamp": "1970-01-01T00:00:05Z",
        "/status": {"phase": "Pending", "startTime": "1970-01-01T00:00:00Z",
            "conditions": [{"type": "PodScheduled", "status": "True"}]}}),
    );
    let status = json!({"phase": "Failed", "reason": "OutOfcpu"});
    fixture.cache.set_rejected(&pod, serde_json::from_value(status).unwrap(), Timestamp::UNIX_EPOCH);
    let expected = r#"web patch {"conditions":null,"phase":"Failed","reason":"OutOfcpu"}"#;
    assert_eq!(fixture.run(), [expected, "web delete"]);
}

/// The first list of the runtime's pods may come while the first patch is under way.
#[test]
fn withheld_end_is_sent_after_an_accepted_patch() {
    let mut fixture = Fixture::new();
    let pod = fixture.put("web", "1", json!({}));
    fixture.store(&pod, json!({"phase": "Failed", "reason": "NodeAffinity"}));
    fixture.core.stored(pod.uid(), 1, fixture.now);
    let entry = fixture.cache.entry(pod.uid()).unwrap();
    let timestamp = Timestamp::UNIX_EPOCH;
    let request = fixture.core.decide(pod.uid(), &entry, Activity::MayRun, timestamp, fixture.now).unwrap();
    let response = fixture.server.respond(&request);
    fixture.core.apply_response(pod.uid(), response, fixture.now);
    fixture.activity = Activity::Stopped;
    let expected = [
        r#"web patch {"startTime":"1970-01-01T00:00:00Z"}"#,
        r#"web patch {"phase":"Failed","reason":"NodeAffinity"}"#,
    ];
    assert_eq!(fixture.run(), expected);
}

#[test]
fn no_request_is_sent_for_a_removed_or_replaced_pod() {
    let mut fixture = Fixture::new();
    let pod = fixture.put("web", "1", started());
    fixture.server.pods.clear();
    fixture.store(&pod, json!({"phase": "Running"}));
    assert_eq!(fixture.run(), [r#"web patch {"phase":"Running"}"#]);
    // The watch will report the removal; otherwise the pod is read from time to time.
    fixture.store(&pod, json!({"phase": "Running", "message": "m"}));
    assert_eq!(fixture.after(60), ["web get"]);
    // A new pod has the same name, but another UID.
    let mut fixture = Fixture::new();
    let pod = fixture.put("web", "1", started());
    fixture.server.put("web", "2", started());
    fixture.store(&pod, json!({"phase": "Running"}));
    assert_eq!(fixture.run(), [r#"web patch {"phase":"Running"}"#, "web get"]);
    assert!(fixture.core.local(&"1".into()).is_none());
    // A conflict with another client's change: get, then patch again.
    let mut fixture = Fixture::new();
    let pod = fixture.put("web", "1", started());
    fixture.store(&pod, json!({"phase": "Running"}));
    fixture.server.script = [Response::Conflict("changed".into())].into();
    let patch = r#"web patch {"phase":"Running"}"#;
    assert_eq!(fixture.run(), [patch, "web get", patch]);
    // A status that the server never accepts is retried with growing waits.
    fixture.store(&pod, json!({"phase": "Running", "message": "m"}));
    let get = Response::Shown(Box::new(fixture.server.pod("web").object().clone()));
    let no = Response::Conflict("invalid".into());
    fixture.server.script = [no.clone(), get.clone(), no.clone(), get, no].into();
    assert_eq!(fixture.run().len(), 3);
    assert_eq!(fixture.after(1), NOTHING);
    assert_eq!(fixture.after(4).len(), 2);
}

#[test]
fn server_restored_from_a_backup_gets_the_status_again() {
    let restored = |fixture: &mut Fixture| {
        fixture.server.version = 3;
        let mut shown = started();
        shown["/status/phase"] = json!("Pending");
        fixture.put("web", "1", shown)
    };
    let running = r#"web patch {"phase":"Running"}"#;
    let ready = || {
        let mut fixture = Fixture::new();
        fixture.server.version = 100;
        let pod = fixture.put("web", "1", started());
        fixture.store(&pod, json!({"phase": "Running"}));
        assert_eq!(fixture.run(), [running]);
        (fixture, pod)
    };
    // The older version was a delayed event: the event of the patch follows.
    let (mut fixture, pod) = ready();
    fixture.show(pod);
    let echo = fixture.server.pod("web");
    fixture.show(echo);
    assert_eq!(fixture.after(60), NOTHING);
    // After a reset of the server no newer version follows.
    let (mut fixture, _) = ready();
    restored(&mut fixture);
    assert_eq!(fixture.after(1), NOTHING);
    assert_eq!(fixture.after(60), ["web get", running]);
    assert_eq!(fixture.after(60), NOTHING);
    // A change before the reset is detected is sent in full, too.
    let (mut fixture, _) = ready();
    let pod = restored(&mut fixture);
    fixture.store(&pod, json!({"phase": "Running", "message": "m"}));
    assert_eq!(fixture.run(), [r#"web patch {"message":"m"}"#, running]);
    assert_eq!(fixture.server.pods["web"]["status"]["phase"], "Running");
}

#[test]
fn pod_that_is_shown_after_a_not_found_response_is_read_again() {
    let mut fixture = Fixture::new();
    let pod = fixture.put("web", "1", started());
    fixture.store(&pod, json!({"phase": "Running"}));
    fixture.server.script = vec![Response::Gone; 3].into();
    assert_eq!(fixture.run().len(), 1);
    assert_eq!([1, 2].map(|_| fixture.after(10)), [["web get"]; 2]);
    assert_eq!(fixture.after(20), ["web get", r#"web patch {"phase":"Running"}"#]);
    // The pod was really removed: no request follows.
    fixture.server.script = [Response::Gone].into();
    fixture.store(&pod, json!({"phase": "Running", "message": "m"}));
    assert_eq!(fixture.run().len(), 1);
    fixture.core.shown(pod.uid().clone(), ApiPod { pod, removed: true }, fixture.now);
    assert_eq!(fixture.after(60), NOTHING);
}

#[test]
fn status_of_a_static_pod_is_sent_to_its_mirror_pod() {
    let mut fixture = Fixture::new();
    fixture.activity = Activity::Stopped;
    let object = json!({"metadata": {"name": "st", "namespace": "n", "uid": "hash",
        "annotations": {"kubernetes.io/config.source": "file"}}});
    let pod = Pod::from(serde_json::from_value::<api::Pod>(object).unwrap());
    fixture.store(&pod, json!({"phase": "Running"}));
    assert_eq!(fixture.run(), NOTHING);
    let mirror = |more: Value| {
        let mut all = json!({"/metadata/annotations": {"kubernetes.io/config.mirror": "hash"}});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    fixture.put("st", "m1", mirror(started()));
    assert_eq!(fixture.run(), [r#"st patch {"phase":"Running"}"#]);
    // A user deletes the mirror: the pod has not ended, and this thread does not delete mirrors.
    let gone = fixture.put(
        "st",
        "m1",
        mirror(json!({"/metadata/deletionTimestamp": "1970-01-01T00:00:05Z",
        "/status/phase": "Failed"})),
    );
    fixture.cache.finish(&pod, Timestamp::UNIX_EPOCH);
    assert!(fixture.after(60).iter().all(|line| line.contains("patch")));
    // The next mirror gets statuses before and after the first one's removal is reported.
    fixture.put("st", "m2", mirror(started()));
    assert_eq!(fixture.run().len(), 1);
    fixture.core.shown(gone.uid().clone(), ApiPod { pod: gone, removed: true }, fixture.now);
    fixture.store(&pod, json!({"phase": "Running", "message": "m"}));
    assert_eq!(fixture.run(), [r#"st patch {"message":"m"}"#]);
    // A mirror that suddenly belongs to another pod gets no status of this one.
    fixture.put("st", "m2", json!({"/metadata/annotations": {"kubernetes.io/config.mirror": "other"}}));
    fixture.store(&pod, json!({"phase": "Running", "message": "n"}));
    assert_eq!(fixture.run(), NOTHING);
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
fn thread_gets_statuses_and_api_pods() {
    let (tx, rx) = bounded(10);
    let mut server = Server::default();
    let pod = server.put("web", "1", started());
    let (post, pods) = inbox();
    let status = StatusCache::new();
    let deps = Deps {
        status: status.clone(),
        pods,
        api: Box::new(Recorded(Mutex::new(server), tx)),
        activity: Box::new(|_| Activity::Stopped),
    };
    let thread = spawn(deps, OnDeath::Unsupervised).unwrap();
    post.put(pod.uid().clone(), ApiPod { pod: pod.clone(), removed: false });
    let store = |status: &StatusCache, text: Value| {
        status.set(&pod, serde_json::from_value(text).unwrap(), Timestamp::UNIX_EPOCH);
    };
    store(&status, json!({"phase": "Running"}));
    let limit = Duration::from_secs(60);
    assert_eq!(rx.recv_timeout(limit).unwrap(), r#"web patch {"phase":"Running"}"#);
    store(&status, json!({"phase": "Succeeded"}));
    assert_eq!(rx.recv_timeout(limit).unwrap(), r#"web patch {"phase":"Succeeded"}"#);
    assert_eq!(thread.stop(limit), threads::Stopped::Joined);
}

/// The pod's end is stored together with the report that no container runs: who sees the report first, sees
/// the end too, and not the phase that an order had set before.
#[test]
fn end_stored_while_activity_is_read_is_reported_and_not_the_status_before() {
    let (tx, rx) = bounded(10);
    let mut server = Server::default();
    let pod = server.put("web", "1", started());
    let (post, pods) = inbox();
    let status = StatusCache::new();
    let set = |status: &StatusCache, pod: &Pod, phase: &str| {
        let phase = PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() };
        status.set(pod, phase, Timestamp::UNIX_EPOCH);
    };
    set(&status, &pod, "Failed");
    let activity = {
        let (status, pod) = (status.clone(), pod.clone());
        move |_: &PodUid| {
            set(&status, &pod, "Succeeded");
            Activity::Stopped
        }
    };
    let api = Box::new(Recorded(Mutex::new(server), tx));
    let deps = Deps { status: status.clone(), pods, api, activity: Box::new(activity) };
    let thread = spawn(deps, OnDeath::Unsupervised).unwrap();
    post.put(pod.uid().clone(), ApiPod { pod: pod.clone(), removed: false });
    let limit = Duration::from_secs(60);
    assert_eq!(rx.recv_timeout(limit).unwrap(), r#"web patch {"phase":"Succeeded"}"#);
    assert_eq!(thread.stop(limit), threads::Stopped::Joined);
}

/// After a power cut the stored status may be older than the one that the server has.
#[test]
fn end_that_the_server_shows_is_not_replaced_by_another_unless_the_pod_is_static() {
    for (mirror, expected) in [(false, ""), (true, r#"web patch {"phase":"Failed","reason":"Evicted"}"#)] {
        let mut fixture = Fixture::new();
        fixture.activity = Activity::Stopped;
        let mut more = started();
        more["/status/phase"] = json!("Succeeded");
        if mirror {
            more["/metadata/annotations"] = json!({"kubernetes.io/config.mirror": "1"});
        }
        let pod = fixture.put("web", "1", more);
        fixture.store(&pod, json!({"phase": "Failed", "reason": "Evicted"}));
        fixture.cache.finish(&pod, Timestamp::UNIX_EPOCH);
        assert_eq!(fixture.after(60).concat(), expected);
    }
}
