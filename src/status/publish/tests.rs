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
    script: VecDeque<Answer>,
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

    fn answer(&mut self, request: &Request) -> Answer {
        let (name, verb) = (
            &request.name,
            match &request.what {
                What::Get => "get".to_owned(),
                What::Patch(body) => {
                    assert_eq!(body["metadata"]["uid"], request.uid);
                    format!("patch {}", body["status"])
                }
                What::Delete => "delete".to_owned(),
            },
        );
        self.log.push(format!("{name} {verb}"));
        if let Some(answer) = self.script.pop_front() {
            return answer;
        }
        let Some(object) = self.pods.get_mut(name) else { return Answer::Gone };
        match &request.what {
            What::Get => {}
            _ if object["metadata"]["uid"] != request.uid => return Answer::Conflict("uid".into()),
            What::Patch(body) => {
                apply(&mut object["status"], &body["status"]);
                object["status"].as_object_mut().unwrap().remove(self.ignores);
                self.version += 1;
                object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            }
            What::Delete => {
                self.pods.remove(name);
                return Answer::Deleted;
            }
        }
        Answer::Shown(Box::new(serde_json::from_value(object.clone()).unwrap()))
    }
}

struct Bench {
    core: Core,
    cache: StatusCache,
    server: Server,
    activity: Activity,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let (core, cache, server) = (Core::default(), StatusCache::new(), Server::default());
        Bench { core, cache, server, activity: Activity::MayRun, now: Instant::now() }
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
                let at = Timestamp::UNIX_EPOCH;
                if let Some(request) = self.core.decide(&uid, &entry, self.activity, at, self.now) {
                    let answer = self.server.answer(&request);
                    self.core.answered(&uid, answer, self.now);
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
    let mut bench = Bench::new();
    let pod = bench.put("web", "1", json!({}));
    assert_eq!(bench.run(), NOTHING);
    bench.store(&pod, json!({"phase": "Pending", "hostIP": "192.0.2.1"}));
    assert_eq!(bench.run(), [r#"web patch {"hostIP":"192.0.2.1","startTime":"1970-01-01T00:00:00Z"}"#]);
    // The event of our own patch causes no request.
    let echo = bench.server.pod("web");
    bench.show(echo);
    assert_eq!(bench.after(60), NOTHING);
    // A server that shows older states for long is read once.
    bench.show(pod.clone());
    assert_eq!(bench.after(1), NOTHING);
    assert_eq!(bench.after(60), ["web get"]);
    assert_eq!(bench.after(60), NOTHING);
    assert_eq!(bench.core.next_due(), None, "nothing wakes an idle node");
    // Only the newest of several statuses is reported.
    bench.store(&pod, json!({"phase": "Pending"}));
    bench.store(&pod, json!({"phase": "Running", "hostIP": "192.0.2.1"}));
    assert_eq!(bench.run(), [r#"web patch {"phase":"Running"}"#]);
}

#[test]
fn status_that_the_server_shows_already_causes_no_request() {
    let mut bench = Bench::new();
    let pod = bench.put("web", "1", started());
    bench.store(&pod, json!({"phase": "Pending"}));
    assert_eq!(bench.run(), NOTHING);
}

#[test]
fn unavailable_server_is_retried_rarely_and_then_gets_the_newest_status() {
    let mut bench = Bench::new();
    let pods: Vec<Pod> = ["a", "b", "c"].map(|name| bench.put(name, name, started())).into();
    for pod in &pods {
        bench.store(pod, json!({"phase": "Running"}));
    }
    bench.server.script = vec![Answer::Away("refused".into()); 6].into();
    assert_eq!(bench.run().len(), 1, "one pod asks for all");
    let until = bench.core.next_due().unwrap();
    assert!(until > bench.now && until <= bench.now + RETRY_SOON);
    bench.store(&pods[0], json!({"phase": "Running", "message": "m"}));
    assert_eq!(bench.run(), NOTHING, "a new status is no reason to ask again");
    for _ in 0..5 {
        assert_eq!(bench.after(11).len(), 1);
    }
    let mut told = bench.after(11);
    told.sort();
    let running = |name: &str| format!(r#"{name} patch {{"phase":"Running"}}"#);
    assert_eq!(told, [r#"a patch {"message":"m","phase":"Running"}"#.into(), running("b"), running("c")]);
}

const RETRY_SOON: Duration = Duration::from_millis(300);

#[test]
fn a_pod_that_fails_delays_no_other() {
    let mut bench = Bench::new();
    let (a, b) = (bench.put("a", "a", started()), bench.put("b", "b", started()));
    bench.store(&a, json!({"phase": "Running"}));
    bench.server.script = [Answer::Busy("500".into(), None)].into();
    assert_eq!(bench.run().len(), 1);
    bench.store(&b, json!({"phase": "Running"}));
    assert_eq!(bench.run(), [r#"b patch {"phase":"Running"}"#]);
    assert_eq!(bench.after(1), [r#"a patch {"phase":"Running"}"#]);
    // The wait is the one that the server requests; a refusal concerns this status only.
    bench.store(&a, json!({"phase": "Running", "message": "m"}));
    bench.server.script = [Answer::Busy("429".into(), Some(Duration::from_secs(30)))].into();
    assert_eq!(bench.run().len(), 1);
    bench.store(&a, json!({"phase": "Running", "message": "n"}));
    assert_eq!(bench.after(29), NOTHING);
    assert_eq!(bench.after(1), [r#"a patch {"message":"n"}"#]);
    bench.store(&a, json!({"phase": "Running", "message": "o"}));
    bench.server.script = [Answer::Refused("403".into())].into();
    assert_eq!(bench.run().len(), 1);
    bench.store(&a, json!({"phase": "Running", "message": "p"}));
    assert_eq!(bench.run(), [r#"a patch {"message":"p"}"#]);
}

#[test]
fn edit_of_our_fields_by_another_client_is_undone() {
    let mut bench = Bench::new();
    let pod = bench.put("web", "1", started());
    bench.store(&pod, json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}));
    assert_eq!(bench.run().len(), 1);
    bench.now += Duration::from_secs(20);
    let edit = |status: &str, version: u64| {
        json!({"/metadata/resourceVersion": version.to_string(), "/status": {"phase": "Running",
        "startTime": "1970-01-01T00:00:00Z", "conditions": [{"type": "x/y", "status": status},
        {"type": "Ready", "status": status, "lastTransitionTime": "1970-01-01T00:00:00Z"}]}})
    };
    bench.put("web", "1", edit("False", 50));
    let undone = r#"web patch {"$setElementOrder/conditions":[{"type":"x/y"},{"type":"Ready"}],"conditions":[{"status":"True","type":"Ready"}]}"#;
    bench.server.version = 50;
    assert_eq!(bench.run(), [undone]);
    // Repeated edits are undone as often as upstream does it.
    bench.put("web", "1", edit("False", 60));
    bench.server.version = 60;
    assert_eq!(bench.after(3), NOTHING);
    assert_eq!(bench.after(7), [undone]);
    // A condition that is not ours stays.
    assert_eq!(bench.server.pods["web"]["status"]["conditions"][0]["status"], "False");
}

#[test]
fn status_that_the_server_changes_is_sent_once() {
    let mut bench = Bench::new();
    bench.server.ignores = "observedGeneration";
    let pod = bench.put("web", "1", started());
    bench.store(&pod, json!({"phase": "Running", "observedGeneration": 1}));
    assert_eq!(bench.run(), [r#"web patch {"observedGeneration":1,"phase":"Running"}"#]);
    let echo = bench.server.pod("web");
    bench.show(echo);
    assert_eq!(bench.after(60), NOTHING);
    bench.store(&pod, json!({"phase": "Running", "observedGeneration": 1, "message": "m"}));
    assert_eq!(bench.run(), [r#"web patch {"message":"m","observedGeneration":1}"#]);
}

/// While the node was unreachable, a controller marked its pods as not ready, and the node has not
/// received that when it reports another change.
#[test]
fn foreign_write_before_a_patch_is_corrected_after_it() {
    let mut bench = Bench::new();
    let condition = |kind: &str, status: &str| json!({"type": kind, "status": status});
    let ready = json!([condition("Ready", "True"), condition("Initialized", "True")]);
    let pod = bench.put("web", "1", started());
    bench.store(&pod, json!({"phase": "Running", "conditions": ready}));
    bench.run();
    bench.after(60);
    bench.server.pods.get_mut("web").unwrap()["status"]["conditions"][0]["status"] = json!("False");
    bench.store(&pod, json!({"phase": "Running", "conditions": ready, "message": "m"}));
    assert_eq!(bench.run(), [r#"web patch {"message":"m"}"#]);
    let echo = bench.server.pod("web");
    bench.show(echo);
    assert_eq!(bench.after(60).len(), 1);
    assert_eq!(bench.server.pods["web"]["status"]["conditions"][0]["status"], "True");
    assert_eq!(bench.after(60), NOTHING);
}

#[test]
fn ended_pod_that_a_client_deleted_is_removed() {
    let mut bench = Bench::new();
    let pod = bench.put("web", "1", started());
    bench.store(&pod, json!({"phase": "Running"}));
    bench.run();
    let mut going = json!({"/metadata/deletionTimestamp": "1970-01-01T00:00:05Z"});
    going["/status"] = bench.server.pods["web"]["status"].clone();
    let pod = bench.put("web", "1", going);
    // While containers run, the end of the pod is not reported.
    bench.store(&pod, json!({"phase": "Succeeded", "message": "m"}));
    assert_eq!(bench.run(), NOTHING);
    let looks = |bench: &mut Bench| {
        assert_eq!(bench.run(), NOTHING);
        let wait = bench.core.next_due().unwrap() - bench.now;
        bench.now += wait;
        wait.as_secs()
    };
    assert_eq!([(); 6].map(|()| looks(&mut bench)), [1, 2, 4, 8, 10, 10]);
    bench.activity = Activity::Stopped;
    assert_eq!(bench.after(1), [r#"web patch {"message":"m","phase":"Succeeded"}"#]);
    assert_eq!(bench.after(60), NOTHING);
    bench.cache.finish(&pod, Timestamp::UNIX_EPOCH);
    assert_eq!(bench.run(), ["web delete"]);
    // The deletion itself is shown as an edit first, and causes no other request.
    let mut last = pod.object().clone();
    last.metadata.resource_version = Some("100".to_owned());
    bench.show(Pod::from(last));
    assert_eq!(bench.after(60), NOTHING);
    // A delayed event does not restore the pod; the event of its removal ends the record.
    bench.show(pod.clone());
    bench.cache.finish(&pod, Timestamp::UNIX_EPOCH);
    assert_eq!(bench.after(1), NOTHING);
    bench.core.shown(pod.uid().clone(), ApiPod { pod, removed: true }, bench.now);
    assert!(bench.core.local(&"1".into()).is_none());
}

#[test]
fn refused_pod_is_reported_and_deleted_without_a_worker() {
    let mut bench = Bench::new();
    bench.activity = Activity::Stopped;
    let pod = bench.put(
        "web",
        "1",
        json!({"/metadata/deletionTimestamp": "1970-01-01T00:00:05Z",
        "/status": {"phase": "Pending", "startTime": "1970-01-01T00:00:00Z",
            "conditions": [{"type": "PodScheduled", "status": "True"}]}}),
    );
    let status = json!({"phase": "Failed", "reason": "OutOfcpu"});
    bench.cache.set_rejected(&pod, serde_json::from_value(status).unwrap(), Timestamp::UNIX_EPOCH);
    let told = r#"web patch {"conditions":null,"phase":"Failed","reason":"OutOfcpu"}"#;
    assert_eq!(bench.run(), [told, "web delete"]);
}

/// The first list of the runtime's pods may come while the first patch is under way.
#[test]
fn withheld_end_is_sent_after_an_accepted_patch() {
    let mut bench = Bench::new();
    let pod = bench.put("web", "1", json!({}));
    bench.store(&pod, json!({"phase": "Failed", "reason": "NodeAffinity"}));
    bench.core.stored(pod.uid(), 1, bench.now);
    let entry = bench.cache.entry(pod.uid()).unwrap();
    let at = Timestamp::UNIX_EPOCH;
    let request = bench.core.decide(pod.uid(), &entry, Activity::MayRun, at, bench.now).unwrap();
    let answer = bench.server.answer(&request);
    bench.core.answered(pod.uid(), answer, bench.now);
    bench.activity = Activity::Stopped;
    let told = [
        r#"web patch {"startTime":"1970-01-01T00:00:00Z"}"#,
        r#"web patch {"phase":"Failed","reason":"NodeAffinity"}"#,
    ];
    assert_eq!(bench.run(), told);
}

#[test]
fn no_request_is_sent_for_a_removed_or_replaced_pod() {
    let mut bench = Bench::new();
    let pod = bench.put("web", "1", started());
    bench.server.pods.clear();
    bench.store(&pod, json!({"phase": "Running"}));
    assert_eq!(bench.run(), [r#"web patch {"phase":"Running"}"#]);
    // The watch will report the removal; otherwise the pod is read from time to time.
    bench.store(&pod, json!({"phase": "Running", "message": "m"}));
    assert_eq!(bench.after(60), ["web get"]);
    // A new pod has the same name, but another UID.
    let mut bench = Bench::new();
    let pod = bench.put("web", "1", started());
    bench.server.put("web", "2", started());
    bench.store(&pod, json!({"phase": "Running"}));
    assert_eq!(bench.run(), [r#"web patch {"phase":"Running"}"#, "web get"]);
    assert!(bench.core.local(&"1".into()).is_none());
    // A conflict with another client's change: get, then patch again.
    let mut bench = Bench::new();
    let pod = bench.put("web", "1", started());
    bench.store(&pod, json!({"phase": "Running"}));
    bench.server.script = [Answer::Conflict("changed".into())].into();
    let patch = r#"web patch {"phase":"Running"}"#;
    assert_eq!(bench.run(), [patch, "web get", patch]);
    // A status that the server never accepts is retried with growing waits.
    bench.store(&pod, json!({"phase": "Running", "message": "m"}));
    let get = Answer::Shown(Box::new(bench.server.pod("web").object().clone()));
    let no = Answer::Conflict("invalid".into());
    bench.server.script = [no.clone(), get.clone(), no.clone(), get, no].into();
    assert_eq!(bench.run().len(), 3);
    assert_eq!(bench.after(1), NOTHING);
    assert_eq!(bench.after(4).len(), 2);
}

#[test]
fn server_restored_from_a_backup_gets_the_status_again() {
    let restored = |bench: &mut Bench| {
        bench.server.version = 3;
        let mut shown = started();
        shown["/status/phase"] = json!("Pending");
        bench.put("web", "1", shown)
    };
    let running = r#"web patch {"phase":"Running"}"#;
    let ready = || {
        let mut bench = Bench::new();
        bench.server.version = 100;
        let pod = bench.put("web", "1", started());
        bench.store(&pod, json!({"phase": "Running"}));
        assert_eq!(bench.run(), [running]);
        (bench, pod)
    };
    // The older version was a delayed event: the event of the patch follows.
    let (mut bench, pod) = ready();
    bench.show(pod);
    let echo = bench.server.pod("web");
    bench.show(echo);
    assert_eq!(bench.after(60), NOTHING);
    // After a reset of the server no newer version follows.
    let (mut bench, _) = ready();
    restored(&mut bench);
    assert_eq!(bench.after(1), NOTHING);
    assert_eq!(bench.after(60), ["web get", running]);
    assert_eq!(bench.after(60), NOTHING);
    // A change before the reset is detected is sent in full, too.
    let (mut bench, _) = ready();
    let pod = restored(&mut bench);
    bench.store(&pod, json!({"phase": "Running", "message": "m"}));
    assert_eq!(bench.run(), [r#"web patch {"message":"m"}"#, running]);
    assert_eq!(bench.server.pods["web"]["status"]["phase"], "Running");
}

#[test]
fn pod_that_is_shown_after_a_not_found_response_is_read_again() {
    let mut bench = Bench::new();
    let pod = bench.put("web", "1", started());
    bench.store(&pod, json!({"phase": "Running"}));
    bench.server.script = vec![Answer::Gone; 3].into();
    assert_eq!(bench.run().len(), 1);
    assert_eq!([1, 2].map(|_| bench.after(10)), [["web get"]; 2]);
    assert_eq!(bench.after(20), ["web get", r#"web patch {"phase":"Running"}"#]);
    // The pod was really removed: no request follows.
    bench.server.script = [Answer::Gone].into();
    bench.store(&pod, json!({"phase": "Running", "message": "m"}));
    assert_eq!(bench.run().len(), 1);
    bench.core.shown(pod.uid().clone(), ApiPod { pod, removed: true }, bench.now);
    assert_eq!(bench.after(60), NOTHING);
}

#[test]
fn status_of_a_static_pod_is_sent_to_its_mirror_pod() {
    let mut bench = Bench::new();
    bench.activity = Activity::Stopped;
    let object = json!({"metadata": {"name": "st", "namespace": "n", "uid": "hash",
        "annotations": {"kubernetes.io/config.source": "file"}}});
    let pod = Pod::from(serde_json::from_value::<api::Pod>(object).unwrap());
    bench.store(&pod, json!({"phase": "Running"}));
    assert_eq!(bench.run(), NOTHING);
    let mirror = |more: Value| {
        let mut all = json!({"/metadata/annotations": {"kubernetes.io/config.mirror": "hash"}});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    bench.put("st", "m1", mirror(started()));
    assert_eq!(bench.run(), [r#"st patch {"phase":"Running"}"#]);
    // A user deletes the mirror: the pod has not ended, and this thread does not delete mirrors.
    let gone = bench.put(
        "st",
        "m1",
        mirror(json!({"/metadata/deletionTimestamp": "1970-01-01T00:00:05Z",
        "/status/phase": "Failed"})),
    );
    bench.cache.finish(&pod, Timestamp::UNIX_EPOCH);
    assert!(bench.after(60).iter().all(|line| line.contains("patch")));
    // The next mirror gets statuses before and after the first one's removal is reported.
    bench.put("st", "m2", mirror(started()));
    assert_eq!(bench.run().len(), 1);
    bench.core.shown(gone.uid().clone(), ApiPod { pod: gone, removed: true }, bench.now);
    bench.store(&pod, json!({"phase": "Running", "message": "m"}));
    assert_eq!(bench.run(), [r#"st patch {"message":"m"}"#]);
    // A mirror that suddenly belongs to another pod gets no status of this one.
    bench.put("st", "m2", json!({"/metadata/annotations": {"kubernetes.io/config.mirror": "other"}}));
    bench.store(&pod, json!({"phase": "Running", "message": "n"}));
    assert_eq!(bench.run(), NOTHING);
}

struct Recorded(Mutex<Server>, Sender<String>);

impl Api for Recorded {
    fn send(&self, request: &Request) -> Answer {
        let mut server = self.0.lock().unwrap();
        let answer = server.answer(request);
        self.1.send(server.log.pop().unwrap()).unwrap();
        answer
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
    let limit = Duration::from_secs(20);
    assert_eq!(rx.recv_timeout(limit).unwrap(), r#"web patch {"phase":"Running"}"#);
    store(&status, json!({"phase": "Succeeded"}));
    assert_eq!(rx.recv_timeout(limit).unwrap(), r#"web patch {"phase":"Succeeded"}"#);
    assert_eq!(thread.stop(limit), threads::Stopped::Joined);
}
