//! The `status` and `mirrors` threads against an API server with faults: the final state of the
//! API server, and the number of requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle::kube::Spread;
use coracle::kube::client::Client;
use coracle::kube::target::Target;
use coracle::kube::watch::{Change, Watched, spawn_reflector};
use coracle::model::api;
use coracle::model::pod::Pod;
use coracle::pods::mirror;
use coracle::status::publish::{self, ApiPod, ApiPodSender};
use coracle::status::{Activity, StatusCache};
use coracle::util::threads::{OnDeath, Running};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::support::fake_api::{FakeApi, Fault, FaultResponse, ReceivedRequest};
use crate::support::wait::wait_for;

const POD: &str = "/api/v1/namespaces/ns/pods/p";

fn object(value: Value) -> Pod {
    Pod::from(serde_json::from_value::<api::Pod>(value).unwrap())
}

/// Passes changes of the API server to the thread, as `sync` does.
fn reflect(client: &Client, post: ApiPodSender) -> Running {
    let watched =
        Watched { target: Target::pods(), field_selector: None, label_selector: None, spread: Spread::PODS };
    spawn_reflector("pods", client.clone(), watched, OnDeath::Unsupervised, move |change| {
        let put = |pod: api::Pod, removed: bool| {
            let pod = Pod::from(pod);
            post.put(pod.uid().clone(), ApiPod { pod, removed });
        };
        match change {
            Change::Replaced(pods) => pods.into_iter().for_each(|pod| put(pod, false)),
            Change::Set(pod) => put(pod, false),
            Change::Removed(pod) => put(pod, true),
        }
    })
    .unwrap()
}

struct StatusFixture {
    api: FakeApi,
    pod: Pod,
    cache: StatusCache,
    _threads: [Running; 2],
}

impl StatusFixture {
    fn start() -> StatusFixture {
        let api = FakeApi::start();
        let pod = object(api.put(
            POD,
            json!({"metadata": {"name": "p", "namespace": "ns"},
            "spec": {"nodeName": "n1", "containers": [{"name": "c"}]}, "status": {"phase": "Pending"}}),
        ));
        let client = api.client();
        let cache = StatusCache::new();
        let (post, pods) = publish::inbox();
        let deps = publish::Deps {
            status: cache.clone(),
            pods,
            api: Box::new(client.clone()),
            activity: Box::new(|_| Activity::Stopped),
        };
        let threads = [reflect(&client, post), publish::spawn(deps, OnDeath::Unsupervised).unwrap()];
        StatusFixture { api, pod, cache, _threads: threads }
    }

    fn store(&self, status: Value) {
        let status = serde_json::from_value::<api::PodStatus>(status).unwrap();
        self.cache.set(&self.pod, status, Timestamp::from_second(5).unwrap());
    }

    /// Waits for so many requests of a method; all of them so far.
    fn wait(&self, method: &str, count: usize) -> Vec<ReceivedRequest> {
        self.api.wait_for(count, |request| request.method == method)
    }

    fn requests(&self, method: &str) -> usize {
        self.api.received().iter().filter(|request| request.method == method).count()
    }

    fn shown(&self) -> Value {
        self.api.object(POD).unwrap()["status"].clone()
    }
}

/// The lifecycle of one pod, in four requests; returns whether the pod was also read, and the time.
fn pod_lifecycle() -> (bool, Duration) {
    let begun = Instant::now();
    let fixture = StatusFixture::start();
    fixture.store(json!({"phase": "Pending", "conditions": [{"type": "Ready", "status": "False"}]}));
    let requests = fixture.wait("PATCH", 1);
    assert_eq!(requests[0].path(), format!("{POD}/status"));
    let kind = requests[0].headers.iter().find(|(name, _)| name == "content-type").unwrap();
    assert_eq!(kind.1, "application/strategic-merge-patch+json");
    assert_eq!(requests[0].body["metadata"]["uid"], fixture.pod.uid().as_str());
    fixture.store(json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}));
    fixture.wait("PATCH", 2);
    // Deleted by a user: the object is removed when nothing of the pod is left.
    let client = fixture.api.client();
    client.delete(&Target::pod("ns", "p"), &coracle::kube::client::DeleteOptions::default()).unwrap();
    fixture.store(json!({"phase": "Succeeded", "conditions": [{"type": "Ready", "status": "False"}]}));
    fixture.wait("PATCH", 3);
    fixture.cache.finish(&fixture.pod, Timestamp::from_second(9).unwrap());
    // The first request is that of the user.
    let deleted = fixture.wait("DELETE", 2);
    assert_eq!(deleted[1].body["gracePeriodSeconds"], 0);
    assert_eq!(deleted[1].body["preconditions"]["uid"], fixture.pod.uid().as_str());
    assert_eq!((fixture.requests("PATCH"), fixture.requests("DELETE")), (3, 2));
    let read =
        fixture.api.received().iter().any(|request| request.uri.starts_with(POD) && request.method == "GET");
    (read, begun.elapsed())
}

#[test]
fn pod_lifecycle_needs_four_status_requests() {
    // When the watch lags by five seconds, reading the pod is correct: only a shorter lifecycle
    // proves that it should not have been read.
    for _ in 0..5 {
        let (read, took) = pod_lifecycle();
        if !read {
            return;
        }
        assert!(took >= Duration::from_secs(5), "the pod was read within {took:?}");
    }
}

#[test]
fn newest_status_is_sent_after_an_outage() {
    let fixture = StatusFixture::start();
    fixture.store(json!({"phase": "Pending", "message": "0"}));
    fixture.wait("PATCH", 1);
    for (round, what) in
        [FaultResponse::Status(503, "ServiceUnavailable", None), FaultResponse::Cut].into_iter().enumerate()
    {
        fixture.api.fault(Fault::always("PATCH", "status", what));
        let before = fixture.requests("PATCH");
        for number in 1..4 {
            fixture.store(json!({"phase": "Running", "message": format!("{round}.{number}")}));
        }
        fixture.wait("PATCH", before + 2);
        fixture.api.clear_faults();
        let last = format!("{round}.4");
        fixture.store(json!({"phase": "Running", "message": last}));
        fixture.api.wait_for(1, |request| request.body["status"]["message"] == last.as_str());
        // The response is still being sent; the object is changed before that.
        let other = fixture.requests("PATCH");
        fixture.store(json!({"phase": "Running", "message": format!("{round}.5")}));
        fixture.wait("PATCH", other + 1);
        assert_ne!(fixture.shown()["message"], format!("{round}.3"));
    }
}

#[test]
fn mirror_pod_is_created_and_deleted_with_its_static_pod() {
    let api = FakeApi::start();
    let (post, views) = mirror::inbox();
    let node = serde_json::from_value::<api::Node>(json!({"metadata": {"name": "n1", "uid": "nu"}})).unwrap();
    let node = Arc::new(node);
    let deps =
        mirror::Deps { views, api: Box::new(api.client()), node: Box::new(move || Some(Arc::clone(&node))) };
    let thread = mirror::spawn(deps, OnDeath::Unsupervised).unwrap();
    let desired = vec![object(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "hash",
        "annotations": {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "hash"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "c"}]}}))];
    api.fault(Fault::once("POST", "pods", FaultResponse::Status(403, "Forbidden", None)));
    let view = mirror::View { mirrors: Some(vec![]), sources_ready: true, ..mirror::View::default() };
    post.put((), mirror::View { desired, ..view.clone() });
    api.wait_for(2, |request| request.method == "POST");
    // A request is recorded before its response.
    let client = api.client();
    let limit = Duration::from_secs(60);
    let made = wait_for("the mirror", limit, || client.get::<Value>(&Target::pod("ns", "p")).ok());
    assert_eq!(made["metadata"]["annotations"]["kubernetes.io/config.mirror"], "hash");
    assert_eq!(made["metadata"]["ownerReferences"][0]["uid"], "nu");
    post.put((), mirror::View { mirrors: Some(vec![object(made)]), ..view });
    let deleted = api.wait_for(1, |request| request.method == "DELETE");
    assert_eq!((deleted[0].path(), &deleted[0].body["gracePeriodSeconds"]), (POD.to_owned(), &json!(0)));
    assert_eq!(thread.stop(limit), coracle::util::threads::Stopped::Joined);
}
