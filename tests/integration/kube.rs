//! The client and the reflector against an API server with faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use coracle::kube::client::{
    Client, CredentialError, CredentialSource, Credentials, DeleteOptions, IssuedCredentials,
};
use coracle::kube::target::Target;
use coracle::kube::watch::{Change, Watched, spawn_reflector};
use coracle::kube::{Spread, event_sink, events};
use coracle::model::api::Pod;
use coracle::model::event::{Event, EventSink, EventType, Regarding};
use coracle::model::metrics;
use coracle::transport::api::{Breaker, Identity, Roots};
use coracle::util::secret::Secret;
use coracle::util::threads::{OnDeath, Running, Stack, Stopped, spawn};
use crossbeam_channel::{Receiver, bounded};
use k8s_openapi::api::core::v1::{ConfigMap, Secret as SecretObject};
use serde_json::{Map, Value, json};

use crate::support::fake_api::{FakeApi, Fault, FaultResponse};
use crate::support::tls_front::TlsFront;
use crate::support::wait::wait_until;

/// A limit against hanging: a machine may be busy.
const SOON: Duration = Duration::from_secs(60);

/// An operation without a wait takes less time than this, and all waits of the client are longer.
const AT_ONCE: Duration = Duration::from_secs(9);

const PODS: &str = "/api/v1/namespaces/ns/pods";

fn pod(node: &str) -> Value {
    json!({"spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}})
}

/// A change in short: `=a,b` all, `+a` set, `-a` removed; with resource versions left out.
fn describe(change: Change<Pod>) -> String {
    let name = |pod: &Pod| pod.metadata.name.clone().unwrap_or_default();
    match change {
        Change::Replaced(pods) => {
            let mut names: Vec<String> = pods.iter().map(name).collect();
            names.sort();
            format!("={}", names.join(","))
        }
        Change::Set(pod) => format!("+{}", name(&pod)),
        Change::Removed(pod) => format!("-{}", name(&pod)),
    }
}

fn watched() -> Watched {
    Watched {
        target: Target::pods(),
        field_selector: Some("spec.nodeName=n1".to_owned()),
        label_selector: None,
        spread: Spread::PODS,
    }
}

fn reflect(client: &Client) -> (Running, Receiver<String>) {
    reflect_as("pods", client)
}

fn reflect_as(name: &'static str, client: &Client) -> (Running, Receiver<String>) {
    let (sender, changes) = bounded(1000);
    let running = spawn_reflector(name, client.clone(), watched(), OnDeath::Unsupervised, move |change| {
        let _ = sender.send(describe(change));
    })
    .unwrap();
    (running, changes)
}

fn next(changes: &Receiver<String>) -> String {
    changes.recv_timeout(SOON).unwrap()
}

#[test]
fn objects_are_created_changed_and_deleted() {
    let api = FakeApi::start();
    let client = api.client();
    // How long bodies are is counted, by method and server; one before may have had this port.
    let host = client.origin().split_once("://").unwrap().1.to_owned();
    let sizes = || {
        ["POST", "PATCH", "DELETE", "GET"].map(|method| {
            let labels = || [method.to_owned(), host.clone()];
            [metrics::CLIENT_REQUEST_SIZE.count(labels()), metrics::CLIENT_RESPONSE_SIZE.count(labels())]
        })
    };
    let mut expected = sizes();
    let made: Value = client
        .create(
            &Target::new(coracle::kube::target::GroupVersion::Core, "pods").namespace("ns"),
            &json!({"metadata": {"name": "p"}, "spec": pod("n1")["spec"]}),
        )
        .unwrap();
    let uid = made["metadata"]["uid"].as_str().unwrap().to_owned();
    let target = Target::pod("ns", "p");
    assert_eq!(client.get::<Value>(&target).unwrap()["metadata"]["uid"], uid);
    let again =
        client.create::<_, Value>(&Target::pods().namespace("ns"), &json!({"metadata": {"name": "p"}}));
    assert!(again.unwrap_err().is_already_exists());
    let patch = json!({"metadata": {"uid": uid}, "status": {"phase": "Running"}});
    let patched: Pod = client.patch(&Target::pod_status("ns", "p"), &patch).unwrap();
    assert_eq!(patched.status.unwrap().phase.as_deref(), Some("Running"));
    let stale = json!({"metadata": {"name": "p", "resourceVersion": "1"}});
    let error = client.update::<_, Value>(&target, &stale).unwrap_err();
    assert!(error.is_conflict() && error.to_string().starts_with("Operation cannot be fulfilled"), "{error}");
    let other = DeleteOptions { grace_seconds: Some(0), uid: Some("other".to_owned()) };
    assert!(client.delete(&target, &other).unwrap_err().is_conflict());
    client.delete(&target, &DeleteOptions { grace_seconds: Some(0), uid: Some(uid) }).unwrap();
    let error = client.get::<Value>(&target).unwrap_err();
    assert!(error.is_not_found());
    assert_eq!(error.to_string(), "pods \"p\" not found");
    for (counts, more) in expected.iter_mut().zip([2, 1, 2, 2]) {
        for count in counts {
            *count += more;
        }
    }
    assert_eq!(sizes(), expected);
    // A document of another kind is an error, not a panic.
    api.put("/api/v1/nodes/n1", json!({"status": {"conditions": 7}}));
    let error = client.get::<coracle::model::api::Node>(&Target::node("n1")).unwrap_err();
    assert!(!error.is_transport() && error.status().is_none(), "{error}");
    let requests = api.received();
    assert!(requests[0].header("user-agent").starts_with("kubelet/v1.37.2 (linux/"));
    assert_eq!(requests[0].header("content-type"), "application/json");
    let patch = requests.iter().find(|request| request.method == "PATCH").unwrap();
    assert_eq!(patch.header("content-type"), "application/strategic-merge-patch+json");
    let delete = requests.iter().rfind(|request| request.method == "DELETE").unwrap();
    assert_eq!(delete.body["kind"], "DeleteOptions");
    assert_eq!(delete.body["gracePeriodSeconds"], 0);
}

#[test]
fn requests_to_a_busy_server_are_retried() {
    let api = FakeApi::start();
    let client = api.client();
    api.put("/api/v1/nodes/n1", json!({}));
    let busy = |code| FaultResponse::Status(code, "TooManyRequests", Some(0));
    api.fault(Fault { times: 2, ..Fault::once("GET", "/nodes/", busy(429)) });
    api.fault(Fault::once("GET", "/nodes/", busy(503)));
    client.get::<Value>(&Target::node("n1")).unwrap();
    assert_eq!(api.received().len(), 4);
    // Ten retries, then the caller gets the error.
    let begun = Instant::now();
    api.fault(Fault::always("GET", "/nodes/", busy(429)));
    let error = client.get::<Value>(&Target::node("n1")).unwrap_err();
    assert_eq!((error.status(), error.retry_after()), (Some(429), Some(Duration::ZERO)));
    assert_eq!(api.received().len(), 4 + 11);
    assert!(begun.elapsed() > Duration::from_secs(3), "ten restarts without back-off");
    api.clear_faults();
    // Without the header there is no retry.
    api.fault(Fault::once("GET", "/nodes/", FaultResponse::Status(500, "InternalError", None)));
    let error = client.get::<Value>(&Target::node("n1")).unwrap_err();
    assert_eq!((error.status(), error.reason()), (Some(500), "InternalError"));
    api.fault(Fault::once("POST", "/nodes", FaultResponse::Cut));
    let error = client.create::<_, Value>(&Target::nodes(), &json!({})).unwrap_err();
    assert!(error.is_transport() && error.status().is_none(), "{error}");
    client.get::<Value>(&Target::node("n1")).unwrap();
}

#[test]
fn wait_for_a_busy_server_ends_with_the_client() {
    let api = FakeApi::start();
    let client = api.client();
    api.fault(Fault::always("GET", "/nodes/", FaultResponse::Status(429, "TooManyRequests", Some(30))));
    let waiting_client = client.clone();
    let (sender, outcome) = bounded(1);
    let _asking = spawn("t/ask", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = sender.send(waiting_client.get::<Value>(&Target::node("n1")).unwrap_err().is_stopping());
    })
    .unwrap();
    api.wait_for(1, |_| true);
    client.shut_down();
    // Within the half minute that the server has asked for.
    assert_eq!(outcome.recv_timeout(Duration::from_secs(20)), Ok(true));
    assert!(client.get::<Value>(&Target::node("n1")).unwrap_err().is_stopping());
    // A wait beyond the deadline of the request is left to the caller.
    let begun = Instant::now();
    let impatient_client = api.client().with_timeout(Duration::from_secs(20));
    let error = impatient_client.get::<Value>(&Target::node("n1")).unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_secs(30)));
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

#[test]
fn unanswered_request_times_out() {
    let api = FakeApi::start();
    let client = api.client().with_limits(Some((50.0, 100)), Duration::from_millis(300));
    api.fault(Fault::once("", "/leases/", FaultResponse::Hang));
    let start = Instant::now();
    let error = client.get::<Value>(&Target::lease("n1")).unwrap_err();
    assert!(error.is_transport() && start.elapsed() < Duration::from_secs(20), "{error}");
    // On a busy machine so short a deadline may pass before the response.
    wait_until("an answer", SOON, || client.get::<Value>(&Target::lease("n1")).unwrap_err().is_not_found());
}

/// A token that does not change.
#[derive(Debug)]
struct Token(Secret<String>);

impl CredentialSource for Token {
    fn current(&self, _: Instant, _: &Breaker) -> Result<IssuedCredentials, CredentialError> {
        Ok(IssuedCredentials { token: Some(self.0.clone()), identity: None })
    }

    fn refused(&self, _: &IssuedCredentials) -> bool {
        false
    }
}

#[test]
fn tokens_are_sent_and_never_printed() {
    let api = FakeApi::start();
    let token = Arc::new(Token(Secret::new("sesame".to_owned())));
    let credentials =
        Credentials { token: Some(token), base_path: "/api/v1/namespaces/x".to_owned(), ..api.credentials() };
    assert!(!format!("{credentials:?}").contains("sesame"));
    let client = Client::new(credentials, None).unwrap();
    let error = client.get::<Value>(&Target::node("n1")).unwrap_err();
    assert!(!format!("{error:?} {error} {client:?}").contains("sesame"));
    let requests = api.received();
    assert_eq!(requests[0].header("authorization"), "Bearer sesame");
    assert_eq!(requests[0].path(), "/api/v1/namespaces/x/api/v1/nodes/n1");
}

/// A credential plugin that returns certificates, or nothing while `certificates` is false.
#[derive(Debug, Default)]
struct CredentialPlugin {
    request_count: AtomicUsize,
    certificates: bool,
}

impl CredentialSource for CredentialPlugin {
    fn current(&self, _: Instant, _: &Breaker) -> Result<IssuedCredentials, CredentialError> {
        let number = self.request_count.fetch_add(1, Ordering::SeqCst);
        if !self.certificates {
            return Err("not yet".to_owned().into());
        }
        // Every second request gets another one.
        let certificate = vec![(number / 2) as u8];
        Ok(IssuedCredentials {
            token: None,
            identity: Some(Identity { certificate: certificate.into(), key: Secret::default() }),
        })
    }

    fn refused(&self, _: &IssuedCredentials) -> bool {
        false
    }
}

fn with_plugin(api: &FakeApi, certificates: bool) -> (Client, Arc<CredentialPlugin>) {
    let plugin = Arc::new(CredentialPlugin { certificates, ..CredentialPlugin::default() });
    let token: Arc<dyn CredentialSource> = Arc::<CredentialPlugin>::clone(&plugin);
    (Client::new(Credentials { token: Some(token), ..api.credentials() }, None).unwrap(), plugin)
}

#[test]
fn exec_plugin_runs_again_after_its_certificate_is_rejected() {
    let api = FakeApi::start();
    api.put("/api/v1/nodes/n1", json!({}));
    let (client, plugin) = with_plugin(&api, true);
    for count in 1..=6 {
        client.get::<Value>(&Target::node("n1")).unwrap();
        assert_eq!(plugin.request_count.load(Ordering::SeqCst), count);
    }
}

#[test]
fn events_wait_for_credentials() {
    let api = FakeApi::start();
    let (client, plugin) = with_plugin(&api, false);
    let (sink, inbox) = EventSink::new();
    let (_recorder, log) = events::spawn("n1", inbox, OnDeath::Unsupervised).unwrap();
    drop(sink);
    let no_uid = Box::new(|| None);
    let _delivery =
        event_sink::spawn(&log, &client, Some((50.0, 100)), no_uid, OnDeath::Unsupervised).unwrap();
    log.record(Event {
        time: jiff::Timestamp::now(),
        regarding: Regarding::Node,
        kind: EventType::Normal,
        reason: "Starting",
        message: "Starting kubelet.".to_owned(),
        annotations: std::collections::BTreeMap::new(),
    });
    // The wait after the second attempt is ten seconds, after the first a random part of that.
    wait_until("the second attempt", SOON, || plugin.request_count.load(Ordering::SeqCst) >= 2);
    let begun = Instant::now();
    client.set_identity(Identity::default()).unwrap();
    api.wait_for(1, |request| request.method == "POST" && request.path().ends_with("/events"));
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
}

/// Pod workers have the small stack, and decode objects of any size on it.
#[test]
fn largest_and_deepest_responses_fit_a_small_stack() {
    let api = FakeApi::start();
    let front = TlsFront::before(api.port);
    // As deep as the decoder accepts.
    let deep = (0..118).fold(json!({}), |inner, _| json!({"f:x": inner}));
    let mut object = pod("n1");
    object["metadata"] = json!({"managedFields": [{"manager": "m", "fieldsV1": deep}]});
    object["spec"]["containers"] =
        (0..200).map(|number| json!({"name": format!("c{number}"), "image": "i"})).collect();
    api.put(&format!("{PODS}/deep"), object);
    let keys: Value = (0..20_000)
        .map(|number| (format!("key-{number}"), json!("x".repeat(40))))
        .collect::<Map<_, _>>()
        .into();
    api.put("/api/v1/namespaces/ns/configmaps/wide", json!({"data": keys}));
    api.put("/api/v1/namespaces/ns/secrets/long", json!({"data": {"key": "eHh4".repeat(350_000)}}));
    let mut endpoint = api.credentials().endpoint;
    (endpoint.https, endpoint.port) = (true, front.port());
    endpoint.roots = Roots::Pem(front.authority().into_bytes());
    let client = Client::new(Credentials { endpoint, ..api.credentials() }, None).unwrap();
    let (sender, sizes) = bounded(1);
    let _small = spawn("t/small", Stack::Small, OnDeath::Unsupervised, move |_| {
        let pod: Pod = client.get(&Target::pod("ns", "deep")).unwrap();
        let map: ConfigMap = client.get(&Target::config_map("ns", "wide")).unwrap();
        let secret: SecretObject = client.get(&Target::secret("ns", "long")).unwrap();
        let list: Value = client.get(&Target::pods()).unwrap();
        let sizes = (
            pod.spec.map_or(0, |spec| spec.containers.len()),
            map.data.map_or(0, |data| data.len()),
            secret.data.map_or(0, |data| data["key"].0.len()),
            list["items"].as_array().map_or(0, Vec::len),
        );
        let _ = sender.send(sizes);
    })
    .unwrap();
    assert_eq!(sizes.recv_timeout(SOON), Ok((200, 20_000, 3 * 350_000, 1)));
}

#[test]
fn reflector_follows_a_collection() {
    let api = FakeApi::start();
    api.put(&format!("{PODS}/a"), pod("n1"));
    api.put(&format!("{PODS}/b"), pod("n1"));
    api.put(&format!("{PODS}/other"), pod("n2"));
    let (running, changes) = reflect(&api.client());
    assert_eq!(next(&changes), "=a,b");
    api.put(&format!("{PODS}/c"), pod("n1"));
    assert_eq!(next(&changes), "+c");
    api.put(&format!("{PODS}/other"), pod("n2"));
    api.put(&format!("{PODS}/a"), pod("n2"));
    assert_eq!(next(&changes), "-a");
    api.remove(&format!("{PODS}/b"));
    assert_eq!(next(&changes), "-b");
    let start = Instant::now();
    assert_eq!(running.stop(SOON), Stopped::Joined);
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    let requests = api.received();
    assert_eq!(requests.len(), 1, "{requests:#?}");
    let timeout: u64 = requests[0].parameter("timeoutSeconds").parse().unwrap();
    assert!((300..600).contains(&timeout));
    let go = format!("{}m{}s", timeout / 60, timeout % 60);
    assert_eq!(
        requests[0].uri,
        format!(
            "/api/v1/pods?allowWatchBookmarks=true&fieldSelector=spec.nodeName%3Dn1&\
             resourceVersionMatch=NotOlderThan&sendInitialEvents=true&timeout={go}&\
             timeoutSeconds={timeout}&watch=true"
        )
    );
}

#[test]
fn server_without_streaming_lists_is_listed_in_pages() {
    let api = FakeApi::start();
    api.put(&format!("{PODS}/a"), pod("n1"));
    api.fault(Fault::always("GET", "sendInitialEvents", FaultResponse::Status(422, "Invalid", None)));
    let (_running, changes) = reflect(&api.client());
    assert_eq!(next(&changes), "=a");
    api.put(&format!("{PODS}/b"), pod("n1"));
    assert_eq!(next(&changes), "+b");
    let requests = api.received();
    assert_eq!(requests[1].uri, "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1&limit=500&resourceVersion=0");
    assert!(requests[2].is_watch() && requests[2].parameter("resourceVersion") == "1");
    assert_eq!(requests[2].parameter("sendInitialEvents"), "");
}

#[test]
fn ended_watch_resumes_at_its_last_version() {
    let api = FakeApi::start();
    api.put(&format!("{PODS}/a"), pod("n1"));
    let (_running, changes) = reflect(&api.client());
    assert_eq!(next(&changes), "=a");
    for (round, name) in ["b", "c"].into_iter().enumerate() {
        api.put(&format!("{PODS}/{name}"), pod("n1"));
        assert_eq!(next(&changes), format!("+{name}"));
        if round == 0 {
            api.end_watches();
        } else {
            api.cut();
        }
        api.wait_for(round + 2, |request| request.is_watch());
    }
    api.put(&format!("{PODS}/d"), pod("n1"));
    assert_eq!(next(&changes), "+d", "no change is reported twice or left out");
    let versions: Vec<String> =
        api.received().iter().map(|request| request.parameter("resourceVersion")).collect();
    assert_eq!(versions[..3], ["", "2", "3"]);
}

#[test]
fn expired_version_causes_a_new_list() {
    let api = FakeApi::start();
    api.put(&format!("{PODS}/a"), pod("n1"));
    let (_running, changes) = reflect(&api.client());
    assert_eq!(next(&changes), "=a");
    // Without an open watch one object is deleted and another created; first as an event, then as
    // a status.
    for (name, gone, all) in [("b", "a", "=b"), ("c", "b", "=c")] {
        api.fault(Fault::once("GET", "watch=true", FaultResponse::Status(410, "Expired", None)));
        api.put(&format!("{PODS}/{name}"), pod("n1"));
        api.remove(&format!("{PODS}/{gone}"));
        api.compact();
        let mut last = next(&changes);
        while last != all {
            last = next(&changes);
        }
    }
    api.put(&format!("{PODS}/d"), pod("n1"));
    assert_eq!(next(&changes), "+d");
}

/// A list would be another large request.
#[test]
fn busy_server_that_ends_a_streaming_list_gets_no_other_list() {
    let api = FakeApi::start();
    api.put(&format!("{PODS}/a"), pod("n1"));
    let busy =
        json!({"type": "ERROR", "object": {"kind": "Status", "code": 429, "reason": "TooManyRequests"}});
    api.fault(Fault::once("GET", "watch=true", FaultResponse::Lines(vec![busy.to_string()])));
    let (_running, changes) = reflect(&api.client());
    assert_eq!(next(&changes), "=a");
    assert!(api.received().iter().all(|request| request.is_watch()), "{:#?}", api.received());
}

/// Its versions restart at small numbers, so that a watch from an old version would be silent for
/// long.
#[test]
fn restored_server_causes_a_new_list() {
    let api = FakeApi::start();
    api.raise_versions();
    api.put(&format!("{PODS}/a"), pod("n1"));
    let (_running, changes) = reflect(&api.client());
    assert_eq!(next(&changes), "=a");
    api.go_down();
    api.restore();
    api.put(&format!("{PODS}/b"), pod("n1"));
    api.remove(&format!("{PODS}/a"));
    api.go_up();
    let begun = Instant::now();
    let first = loop {
        assert!(begun.elapsed() < SOON, "{:#?}", api.received());
        api.bookmark();
        if let Ok(change) = changes.recv_timeout(Duration::from_millis(100)) {
            break change;
        }
    };
    assert_eq!(first, "=b");
    api.put(&format!("{PODS}/c"), pod("n1"));
    assert_eq!(next(&changes), "+c");
}

#[test]
fn invalid_watch_data_ends_only_that_watch() {
    let api = FakeApi::start();
    api.put(&format!("{PODS}/a"), pod("n1"));
    let event = |name: &str| {
        json!({"type": "MODIFIED", "object": {"metadata": {"name": name, "namespace": "ns", "resourceVersion": "1"}}}).to_string()
    };
    let initial = json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1",
        "annotations": {"k8s.io/initial-events-end": "true"}}}})
    .to_string();
    let poison = json!({"type": "MODIFIED", "object": {"metadata": {"name": 7}}}).to_string();
    let unknown = json!({"type": "PERHAPS", "object": {}}).to_string();
    let bodies = [
        FaultResponse::Lines(vec![initial.clone(), poison, unknown, event("seen"), "]garbage".to_owned()]),
        FaultResponse::HalfLine(format!("{initial}\n{}\n{{\"type\":\"MOD", event("half"))),
        FaultResponse::Raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".to_vec()),
    ];
    for what in bodies {
        api.fault(Fault::once("GET", "watch=true", what));
    }
    let (_running, changes) = reflect(&api.client());
    api.wait_for(4, |request| request.is_watch());
    api.put(&format!("{PODS}/b"), pod("n1"));
    let mut seen: Vec<String> = Vec::new();
    while !seen.last().map_or("", String::as_str).ends_with('b') {
        seen.push(next(&changes));
    }
    // After one that was open for a second, as it may be on a busy machine, nothing is listed again.
    let (before, after) = seen.split_at(4);
    assert_eq!(before, ["=", "+seen", "=", "+half"]);
    assert!(after == ["=a,b"] || after == ["=a", "+b"] || after == ["+b"], "{after:?}");
}

#[test]
fn requests_during_an_outage_back_off() {
    let api = FakeApi::start();
    // Ends at once, each time: with an event and without.
    let line = json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9",
        "annotations": {"k8s.io/initial-events-end": "true"}}}})
    .to_string();
    api.fault(Fault::always("GET", "watch=true", FaultResponse::Lines(vec![line])));
    let (running, changes) = reflect(&api.client());
    assert_eq!(next(&changes), "=");
    assert_eq!(next(&changes), "=");
    drop(running);
    let count = api.received().len();
    assert!(count < 20, "{count} requests");

    let port = api.port;
    let client = api.client();
    drop(api);
    let (running, changes) = reflect(&client);
    assert!(changes.recv_timeout(Duration::from_millis(500)).is_err());
    let api = FakeApi::start_at(port);
    api.put(&format!("{PODS}/a"), pod("n1"));
    // A request may arrive between the two.
    match next(&changes).as_str() {
        "=" => assert_eq!(next(&changes), "+a"),
        first => assert_eq!(first, "=a"),
    }
    assert_eq!(running.stop(SOON), Stopped::Joined);
}

#[test]
fn changed_credentials_are_used_at_once() {
    let api = FakeApi::start();
    api.put(&format!("{PODS}/a"), pod("n1"));
    let token = Arc::new(Token(Secret::new("old".to_owned())));
    let client = Client::new(Credentials { token: Some(token), ..api.credentials() }, None).unwrap();
    // A certificate replaces the token; without TLS it is not used.
    let change = || client.set_identity(Identity::default()).unwrap();
    let (_running, changes) = reflect_as("renewed", &client);
    assert_eq!(next(&changes), "=a");
    // From an open watch.
    change();
    let requests = api.wait_for(2, |request| request.is_watch());
    assert_eq!([0, 1].map(|index: usize| requests[index].header("authorization")), ["Bearer old", ""]);
    assert_eq!(requests[1].parameter("resourceVersion"), "1", "it goes on where it was");
    api.put(&format!("{PODS}/b"), pod("n1"));
    assert_eq!(next(&changes), "+b");
    // From a wait after an error, which would become long.
    api.fault(Fault::always("GET", "", FaultResponse::Status(401, "Unauthorized", None)));
    api.end_watches();
    // The watch resumes once, then each attempt begins with a list. The wait after the last of these
    // is longer than twelve seconds.
    api.wait_for(2 + 1 + 4 * 2, |_| true);
    wait_until("the wait", SOON, || {
        let line = coracle::util::threads::report().into_iter().find(|line| line.name == "watch/renewed");
        line.is_some_and(|line| line.waits_for != "the API server" && line.since > Duration::from_millis(200))
    });
    api.clear_faults();
    let start = Instant::now();
    change();
    wait_until("a list after the wait", SOON, || {
        let line = coracle::util::threads::report().into_iter().find(|line| line.name == "watch/renewed");
        line.is_some_and(|line| line.waits_for == "the API server")
    });
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
}

#[test]
fn many_watches_stop_at_once() {
    let api = FakeApi::start();
    let client = api.client();
    let running: Vec<_> = (0..8).map(|_| reflect(&client)).collect();
    for (_, changes) in &running {
        assert_eq!(next(changes), "=");
    }
    let start = Instant::now();
    client.shut_down();
    for (running, _) in running {
        assert_eq!(running.stop(SOON), Stopped::Joined);
    }
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
}

#[test]
fn long_lists_are_read_in_pages() {
    let api = FakeApi::start();
    for index in 0..1201 {
        api.put(&format!("{PODS}/p{index}"), pod("n1"));
    }
    api.fault(Fault::always("GET", "sendInitialEvents", FaultResponse::Status(400, "BadRequest", None)));
    // The list from the cache is refused, so that the pages are asked for.
    api.fault(Fault::once("GET", "resourceVersion=0", FaultResponse::Status(410, "Expired", None)));
    let (_running, changes) = reflect(&api.client());
    assert_eq!(next(&changes).matches('p').count(), 1201);
    let lists = api.wait_for(4, |request| !request.is_watch());
    let pages: Vec<String> = lists.iter().map(|request| request.parameter("continue")).collect();
    assert_eq!(pages, ["", "", "500", "1000"]);
}

fn ip(arguments: &str) {
    let status = std::process::Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

#[test]
fn vanished_server_is_detected() {
    // The addresses of the machine itself must not change: only in a namespace of our own.
    if std::env::var_os("E2E_DIR").is_none() {
        eprintln!("left out: no network namespace of our own");
        return;
    }
    ip("addr add 192.0.2.77/32 dev node0");
    let address = "192.0.2.77".parse().unwrap();
    let api = FakeApi::listen(address, 0);
    api.put(&format!("{PODS}/a"), pod("n1"));
    let client = api.client();
    let (_running, changes) = reflect_as("vanish", &client);
    assert_eq!(next(&changes), "=a");
    client.get::<Value>(&Target::node("n1")).unwrap_err();
    // No packet arrives any more, and no error is reported.
    ip("addr del 192.0.2.77/32 dev node0");
    let start = Instant::now();
    let error =
        client.with_limits(None, Duration::from_secs(10)).get::<Value>(&Target::node("n1")).unwrap_err();
    assert!(error.is_transport(), "{error}");
    assert!(start.elapsed() < Duration::from_secs(25), "{:?}", start.elapsed());
    // The watch, which only reads, has noticed when it asks again.
    let limit = Duration::from_secs(90);
    let blocked_since = || {
        let before = start.elapsed();
        let line = coracle::util::threads::report().into_iter().find(|line| line.name == "watch/vanish");
        line.is_some_and(|line| line.waits_for == "the API server" && line.since >= before)
    };
    while blocked_since() {
        assert!(start.elapsed() < limit, "a half-open watch is not noticed");
        let _ = changes.recv_timeout(Duration::from_millis(200));
    }
    assert!(
        start.elapsed() > Duration::from_secs(10),
        "it was no half-open connection: {:?}",
        start.elapsed()
    );
    // First, so that a client that reconnects sees it: by a list, or by a resumed watch.
    api.put(&format!("{PODS}/b"), pod("n1"));
    ip("addr add 192.0.2.77/32 dev node0");
    while !["=a,b", "+b"].contains(&next(&changes).as_str()) {}
    ip("addr del 192.0.2.77/32 dev node0");
}

/// After a long outage each watch waits for its own time to try again. One request of another part of the
/// agent shows that the server is back, and ends all these waits.
#[test]
fn one_successful_request_ends_the_waits_of_all_watches() {
    let api = FakeApi::start();
    api.put("/api/v1/namespaces/ns/pods/p", pod("n1"));
    let client = api.client();
    let host = client.origin().split_once("://").unwrap().1.to_owned();
    let watches = ["back1", "back2", "back3", "back4"].map(|name| reflect_as(name, &client));
    for (_, changes) in &watches {
        assert_eq!(next(changes), "=p");
    }
    let requests = || metrics::CLIENT_REQUEST_SIZE.count(["GET".to_owned(), host.clone()]);
    let before = requests();
    api.go_down();
    // The fifth wait of a watch is at least 12.8 s long.
    wait_until("the waits to grow", SOON, || requests() >= before + 5 * watches.len() as u64);
    let number = client.returns().number();
    api.go_up();
    let begun = Instant::now();
    let found: Value = client.get(&Target::pod("ns", "p")).unwrap();
    assert_eq!(found["metadata"]["name"], "p");
    for (_, changes) in &watches {
        assert_eq!(next(changes), "=p");
    }
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    // The requests of the watches, which succeed, are no further returns.
    assert_eq!(client.returns().number(), number + 1);
}
