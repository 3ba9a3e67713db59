//! The `status` and `mirrors` threads against an API server with faults: what it shows in
//! the end, and how many requests that took.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle::kube::client::Client;
use coracle::kube::target::Target;
use coracle::kube::watch::{Change, Watched, spawn_reflector};
use coracle::model::api;
use coracle::model::pod::Pod;
use coracle::pods::mirror;
use coracle::status::publish::{self, ApiPod, ApiPods};
use coracle::status::{Activity, StatusCache};
use coracle::util::threads::{OnDeath, Running};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::support::fake_api::{Asked, FakeApi, Fault, What};
use crate::support::wait::wait_for;

const POD: &str = "/api/v1/namespaces/ns/pods/p";

fn object(value: Value) -> Pod {
    Pod::from(serde_json::from_value::<api::Pod>(value).unwrap())
}

/// Shows the thread what the API server shows, as `sync` does.
fn reflect(client: &Client, post: ApiPods) -> Running {
    let watched = Watched { target: Target::pods(), field_selector: None, label_selector: None };
    spawn_reflector("pods", client.clone(), watched, OnDeath::Nobody, move |change| {
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

struct Told {
    api: FakeApi,
    pod: Pod,
    cache: StatusCache,
    _threads: [Running; 2],
}

impl Told {
    fn start() -> Told {
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
        let threads = [reflect(&client, post), publish::spawn(deps, OnDeath::Nobody).unwrap()];
        Told { api, pod, cache, _threads: threads }
    }

    fn store(&self, status: Value) {
        let status = serde_json::from_value::<api::PodStatus>(status).unwrap();
        self.cache.set(&self.pod, status, Timestamp::from_second(5).unwrap());
    }

    /// Waits for so many requests of a method; all of them so far.
    fn wait(&self, method: &str, count: usize) -> Vec<Asked> {
        self.api.wait_for(count, |asked| asked.method == method)
    }

    fn requests(&self, method: &str) -> usize {
        self.api.asked().iter().filter(|asked| asked.method == method).count()
    }

    fn shown(&self) -> Value {
        self.api.object(POD).unwrap()["status"].clone()
    }
}

/// One whole life of a pod, in four requests: whether it was also read, and how long that took.
fn a_life() -> (bool, Duration) {
    let begun = Instant::now();
    let told = Told::start();
    told.store(json!({"phase": "Pending", "conditions": [{"type": "Ready", "status": "False"}]}));
    let asked = told.wait("PATCH", 1);
    assert_eq!(asked[0].path(), format!("{POD}/status"));
    let kind = asked[0].headers.iter().find(|(name, _)| name == "content-type").unwrap();
    assert_eq!(kind.1, "application/strategic-merge-patch+json");
    assert_eq!(asked[0].body["metadata"]["uid"], told.pod.uid().as_str());
    told.store(json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}));
    told.wait("PATCH", 2);
    // Deleted by a user: it goes when nothing of it is left.
    let client = told.api.client();
    client.delete(&Target::pod("ns", "p"), &coracle::kube::client::DeleteOptions::default()).unwrap();
    told.store(json!({"phase": "Succeeded", "conditions": [{"type": "Ready", "status": "False"}]}));
    told.wait("PATCH", 3);
    told.cache.finish(&told.pod, Timestamp::from_second(9).unwrap());
    // The first one was the user's.
    let deleted = told.wait("DELETE", 2);
    assert_eq!(deleted[1].body["gracePeriodSeconds"], 0);
    assert_eq!(deleted[1].body["preconditions"]["uid"], told.pod.uid().as_str());
    assert_eq!((told.requests("PATCH"), told.requests("DELETE")), (3, 2));
    let read = told.api.asked().iter().any(|asked| asked.uri.starts_with(POD) && asked.method == "GET");
    (read, begun.elapsed())
}

#[test]
fn a_life_in_four_requests() {
    // When what the watch shows lies behind for five seconds, the pod is rightly read: only a
    // shorter life says that it should not have been.
    for _ in 0..5 {
        let (read, took) = a_life();
        if !read {
            return;
        }
        assert!(took >= Duration::from_secs(5), "the pod was read within {took:?}");
    }
}

#[test]
fn the_newest_status_is_told_after_an_outage() {
    let told = Told::start();
    told.store(json!({"phase": "Pending", "message": "0"}));
    told.wait("PATCH", 1);
    for (round, what) in [What::Status(503, "ServiceUnavailable", None), What::Cut].into_iter().enumerate() {
        told.api.fault(Fault::always("PATCH", "status", what));
        let before = told.requests("PATCH");
        for number in 1..4 {
            told.store(json!({"phase": "Running", "message": format!("{round}.{number}")}));
        }
        told.wait("PATCH", before + 2);
        told.api.heal();
        let last = format!("{round}.4");
        told.store(json!({"phase": "Running", "message": last}));
        told.api.wait_for(1, |asked| asked.body["status"]["message"] == last.as_str());
        // Its answer is on its way; the object is changed before that.
        let other = told.requests("PATCH");
        told.store(json!({"phase": "Running", "message": format!("{round}.5")}));
        told.wait("PATCH", other + 1);
        assert_ne!(told.shown()["message"], format!("{round}.3"));
    }
}

#[test]
fn a_mirror_comes_and_goes_with_its_static_pod() {
    let api = FakeApi::start();
    let (post, views) = mirror::inbox();
    let node = serde_json::from_value::<api::Node>(json!({"metadata": {"name": "n1", "uid": "nu"}})).unwrap();
    let node = Arc::new(node);
    let deps =
        mirror::Deps { views, api: Box::new(api.client()), node: Box::new(move || Some(Arc::clone(&node))) };
    let thread = mirror::spawn(deps, OnDeath::Nobody).unwrap();
    let desired = vec![object(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "hash",
        "annotations": {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "hash"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "c"}]}}))];
    api.fault(Fault::once("POST", "pods", What::Status(403, "Forbidden", None)));
    let view = mirror::View { mirrors: Some(vec![]), sources_ready: true, ..mirror::View::default() };
    post.put((), mirror::View { desired, ..view.clone() });
    api.wait_for(2, |asked| asked.method == "POST");
    // A request is noted before it is answered.
    let client = api.client();
    let limit = Duration::from_secs(60);
    let made = wait_for("the mirror", limit, || client.get::<Value>(&Target::pod("ns", "p")).ok());
    assert_eq!(made["metadata"]["annotations"]["kubernetes.io/config.mirror"], "hash");
    assert_eq!(made["metadata"]["ownerReferences"][0]["uid"], "nu");
    post.put((), mirror::View { mirrors: Some(vec![object(made)]), ..view });
    let deleted = api.wait_for(1, |asked| asked.method == "DELETE");
    assert_eq!((deleted[0].path(), &deleted[0].body["gracePeriodSeconds"]), (POD.to_owned(), &json!(0)));
    assert_eq!(thread.stop(limit), coracle::util::threads::Stopped::Joined);
}
