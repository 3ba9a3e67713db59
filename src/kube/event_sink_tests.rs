use std::collections::VecDeque;
use std::time::Instant;

use super::*;
use crate::kube::client::Credentials;
use crate::model::ids::PodUid;
use crate::transport::api::{Endpoint, Identity, Roots};

fn event(name: &str, second: i64) -> Event {
    Event {
        time: Timestamp::from_second(1_700_000_000 + second).unwrap(),
        regarding: Regarding::Pod {
            namespace: "default".into(),
            name: name.into(),
            uid: PodUid::from("u1"),
            field_path: "spec.containers{c}".into(),
        },
        kind: EventType::Normal,
        reason: "Created",
        message: "Container created".into(),
        annotations: std::collections::BTreeMap::new(),
    }
}

/// The UID of a Node object that was not received yet.
fn unknown() -> NodeUid {
    Box::new(|| None)
}

fn recorded(event: Event, times: usize) -> Arc<RecordedEvent> {
    let log =
        crate::kube::events::spawn("node1", crate::model::event::EventSink::new().1, OnDeath::Unsupervised)
            .unwrap()
            .1;
    for _ in 0..times {
        log.record(event.clone());
    }
    Arc::new(log.recent(0).pop().unwrap())
}

/// Responds with a list of outcomes, then with `Done`, and records the requests.
#[derive(Clone, Default)]
struct FakeApi {
    inner: Arc<Mutex<(VecDeque<Outcome>, Vec<String>)>>,
    request_sender: Option<Sender<String>>,
}

impl FakeApi {
    fn with_outcomes(fates: impl IntoIterator<Item = Outcome>) -> FakeApi {
        FakeApi {
            inner: Arc::new(Mutex::new((fates.into_iter().collect(), Vec::new()))),
            request_sender: None,
        }
    }

    fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.inner.lock().unwrap().1)
    }

    fn respond(&self, request: String) -> Outcome {
        let outcome = {
            let mut inner = self.inner.lock().unwrap();
            inner.1.push(request.clone());
            inner.0.pop_front().unwrap_or(Outcome::Done)
        };
        if let Some(request_sender) = &self.request_sender {
            let _ = request_sender.send(request);
        }
        outcome
    }
}

impl EventApi for FakeApi {
    fn create(&self, namespace: &str, event: &api::Event) -> Outcome {
        let object = event.involved_object.name.clone().unwrap();
        self.respond(format!("POST {namespace}/{object} {}", event.count.unwrap()))
    }
    fn patch(&self, namespace: &str, name: &str, change: &Value) -> Outcome {
        let object = name.split('.').next().unwrap();
        self.respond(format!("PATCH {namespace}/{object} {}", change["count"]))
    }
    fn moment(&self) -> Moment {
        Moment::default()
    }
    fn pause(&self, _: Moment, limit: Duration, stop: &StopToken) -> Waited {
        stop.wait(limit)
    }
}

/// A recorded request's body with its placeholders; a placeholder matches any value of its kind.
fn fits(recorded: &Value, ours: &Value) -> bool {
    match (recorded, ours) {
        (Value::Object(recorded), Value::Object(ours)) => {
            // Absent and null are equal for the API server; our objects have no resourceVersion.
            let keys = recorded.keys().chain(ours.keys());
            keys.filter(|key| *key != "resourceVersion").all(|key| {
                fits(recorded.get(key).unwrap_or(&Value::Null), ours.get(key).unwrap_or(&Value::Null))
            })
        }
        (Value::String(recorded), Value::String(ours)) => match recorded.as_str() {
            "<time>" => ours.parse::<Timestamp>().is_ok(),
            "<uid3>" | "<hash>" => !ours.is_empty(),
            text => match text.split_once("<hex16>") {
                Some((before, _)) => ours.starts_with(before) && ours.len() == before.len() + 16,
                None => text == ours,
            },
        },
        (recorded, ours) => recorded == ours,
    }
}

#[test]
fn requests_are_those_of_the_go_kubelet() {
    // From recorded requests of the Go kubelet 1.36.3 to an API server.
    let check = |text: &str, ours: Value| {
        let recorded: Value = serde_json::from_str(text).unwrap();
        assert!(fits(&recorded, &ours), "{recorded}\n{ours}");
    };
    let starting = Event {
        regarding: Regarding::Node,
        reason: "Starting",
        message: "Starting kubelet.".into(),
        ..event("", 0)
    };
    check(
        r#"{"kind": "Event", "apiVersion": "v1", "metadata": {"name": "node1.<hex16>", "namespace": "default"}, "involvedObject": {"kind": "Node", "name": "node1", "apiVersion": "v1"}, "reason": "Starting", "message": "Starting kubelet.", "source": {"component": "kubelet", "host": "node1"}, "firstTimestamp": "<time>", "lastTimestamp": "<time>", "count": 1, "type": "Normal", "eventTime": null, "reportingComponent": "kubelet", "reportingInstance": "node1"}"#,
        serde_json::to_value(body(&recorded(starting, 1), &unknown())).unwrap(),
    );
    check(
        r#"{"kind": "Event", "apiVersion": "v1", "metadata": {"name": "simple.<hex16>", "namespace": "default"}, "involvedObject": {"kind": "Pod", "namespace": "default", "name": "simple", "uid": "<uid3>", "apiVersion": "v1", "resourceVersion": "<rv>", "fieldPath": "spec.containers{c}"}, "reason": "Created", "message": "Container created", "source": {"component": "kubelet", "host": "node1"}, "firstTimestamp": "<time>", "lastTimestamp": "<time>", "count": 1, "type": "Normal", "eventTime": null, "reportingComponent": "kubelet", "reportingInstance": "node1"}"#,
        serde_json::to_value(body(&recorded(event("simple", 0), 1), &unknown())).unwrap(),
    );
    check(
        r#"{"count": 3, "lastTimestamp": "<time>", "message": "Container created"}"#,
        change(&recorded(event("simple", 0), 3)),
    );
}

#[test]
fn events_of_the_node_have_its_uid_once_it_is_known() {
    let of_node = |regarding| recorded(Event { regarding, ..event("p", 0) }, 1);
    for regarding in [Regarding::Node, Regarding::Manifest { source: "/m".into() }] {
        let event = of_node(regarding);
        assert_eq!(body(&event, &unknown()).involved_object.uid, None);
        let known: NodeUid = Box::new(|| Some("u9".to_owned()));
        assert_eq!(body(&event, &known).involved_object.uid.as_deref(), Some("u9"));
    }
    let known: NodeUid = Box::new(|| Some("u9".to_owned()));
    let of_pod = body(&recorded(event("p", 0), 1), &known);
    assert_eq!(of_pod.involved_object.uid.as_deref(), Some("u1"));
}

#[test]
fn a_bad_manifest_is_reported_on_the_node() {
    let manifest = |message: &str| Event {
        regarding: Regarding::Manifest { source: "/m/a.yaml".into() },
        message: message.into(),
        ..event("", 0)
    };
    let event = body(&recorded(manifest("no kind"), 1), &unknown());
    assert_eq!(event.involved_object.kind.as_deref(), Some("Node"));
    assert_eq!(event.involved_object.name.as_deref(), Some("node1"));
    assert_eq!(event.message.as_deref(), Some("/m/a.yaml: no kind"));
    let event = body(&recorded(manifest("in /m/a.yaml: no kind"), 1), &unknown());
    assert_eq!(event.message.as_deref(), Some("in /m/a.yaml: no kind"));
    let event = body(&recorded(manifest(&"x".repeat(2000)), 1), &unknown());
    assert_eq!(event.message.unwrap().len(), 1024);
}

#[test]
fn a_new_event_is_posted_and_a_repeat_patched() {
    let check = |times: usize, new: bool, fates: &[Outcome], requests: &[&str], expected: Outcome| {
        let client = FakeApi::with_outcomes(fates.iter().cloned());
        let entry = Entry { event: recorded(event("web", 0), times), new };
        assert_eq!(deliver(&client, &entry, &unknown()), expected);
        assert_eq!(client.take_requests(), requests);
    };
    let refused = || Outcome::Refused("no".into());
    check(1, true, &[], &["POST default/web 1"], Outcome::Done);
    check(3, false, &[], &["PATCH default/web 3"], Outcome::Done);
    check(3, false, &[Outcome::Missing], &["PATCH default/web 3", "POST default/web 3"], Outcome::Done);
    check(3, false, &[refused()], &["PATCH default/web 3"], refused());
    check(1, true, &[Outcome::Exists], &["POST default/web 1"], Outcome::Exists);
    // The first attempt succeeded, its response was lost, and the event has happened again.
    check(2, true, &[Outcome::Exists], &["POST default/web 2", "PATCH default/web 2"], Outcome::Done);
    check(1, true, &[Outcome::Away], &["POST default/web 1"], Outcome::Away);
    check(
        1,
        true,
        &[Outcome::Missing],
        &["POST default/web 1"],
        Outcome::Refused("there is no namespace default".into()),
    );
}

#[test]
fn pauses_are_ten_seconds_and_refusals_end_an_event() {
    let mut tries = Tries::default();
    assert!(tries.after(1, &Outcome::Away).unwrap() < PAUSE);
    for _ in 1..TRIES {
        assert_eq!(tries.after(1, &Outcome::Away), Some(PAUSE));
    }
    assert_eq!(tries.after(1, &Outcome::Away), Some(LONG_PAUSE));
    assert_eq!(tries.after(1, &Outcome::Done), None);
    assert!(tries.after(1, &Outcome::Away).unwrap() < PAUSE, "starts over");
    assert_eq!(tries.after(1, &Outcome::Refused(String::new())), None);
    let odd = Outcome::Unexpected("no JSON".into());
    for _ in 1..TRIES {
        assert!(tries.after(1, &odd).is_some());
    }
    assert_eq!(tries.after(1, &odd), None);
}

#[test]
fn only_unexpected_responses_for_an_event_cause_its_loss() {
    let mut tries = Tries::default();
    let odd = Outcome::Unexpected("odd".to_owned());
    for _ in 1..TRIES {
        assert!(tries.after(1, &odd).is_some());
    }
    // The first event was dropped for a new one.
    for _ in 0..TRIES {
        assert!(tries.after(2, &Outcome::Away).is_some());
    }
    for _ in 1..TRIES {
        assert_eq!(tries.after(2, &odd), Some(LONG_PAUSE), "the API server fails as before");
    }
    assert_eq!(tries.after(2, &odd), None);
}

#[test]
fn responses_become_outcomes() {
    let check = |code, reason, expected| {
        assert_eq!(outcome(Err(ApiError::for_test(code, reason, "words"))), expected, "{code}");
    };
    check(409, "AlreadyExists", Outcome::Exists);
    check(409, "Conflict", Outcome::Refused("words".into()));
    check(404, "NotFound", Outcome::Missing);
    check(404, "Unknown", Outcome::Away);
    check(403, "Forbidden", Outcome::Refused("words".into()));
    check(422, "Invalid", Outcome::Refused("words".into()));
    check(429, "TooManyRequests", Outcome::Refused("words".into()));
    check(500, "InternalError", Outcome::Refused("words".into()));
    check(401, "Unauthorized", Outcome::Away);
    check(503, "ServiceUnavailable", Outcome::Away);
    assert_eq!(outcome(Err(ApiError::for_test_transport())), Outcome::Away);
    // A first certificate may take an hour to be approved.
    let early = ApiError::credentials("create events".to_owned(), "not issued yet".to_owned());
    assert_eq!(outcome(Err(early)), Outcome::Away);
    assert_eq!(outcome(Ok(IgnoredAny)), Outcome::Done);
}

#[test]
fn the_queue_is_bounded_and_a_repeat_replaces_its_entry() {
    let mut queue = Queue::default();
    let web = recorded(event("web", 0), 1);
    queue.put(Arc::clone(&web), true);
    let again = recorded(event("web", 0), 2);
    queue.put(Arc::clone(&again), false);
    let (ticket, entry) = queue.first().unwrap();
    assert_eq!((queue.entries.len(), entry.new, entry.event.count), (1, true, 2));
    // A repeat that arrives while the event is being sent is sent after it, as a change.
    let more = recorded(event("web", 0), 3);
    queue.put(more, false);
    queue.finish(ticket, &entry);
    let (ticket, entry) = queue.first().unwrap();
    assert_eq!((entry.new, entry.event.count), (false, 3));
    queue.finish(ticket, &entry);
    assert!(queue.first().is_none() && queue.by_name.is_empty());
    for number in 0..WAITING + 7 {
        let mut renamed = RecordedEvent::clone(&web);
        renamed.name = format!("web.{number}");
        queue.put(Arc::new(renamed), true);
    }
    assert_eq!((queue.entries.len(), queue.by_name.len(), queue.counts.lost), (WAITING, WAITING, 7));
    assert_eq!(queue.first().unwrap().1.event.name, "web.7");
    // The oldest is dropped while it is sent.
    let (ticket, entry) = queue.first().unwrap();
    let mut renamed = (*web).clone();
    renamed.name = "last".into();
    queue.put(Arc::new(renamed), true);
    assert_eq!(queue.counts.lost, 8);
    queue.finish(ticket, &entry);
    assert_eq!((queue.entries.len(), queue.counts.lost), (WAITING, 7));
}

/// The event `web.NUMBER`, which happened at this second and again in the next one.
fn numbered(base: &RecordedEvent, number: usize) -> Arc<RecordedEvent> {
    let second = i64::try_from(number).unwrap();
    let (first_seen, last_seen) = (event("", second).time, event("", second + 1).time);
    Arc::new(RecordedEvent { name: format!("web.{number}"), first_seen, last_seen, ..base.clone() })
}

fn send_all(queue: &mut Queue) {
    while let Some((ticket, entry)) = queue.first() {
        queue.finish(ticket, &entry);
    }
}

#[test]
fn dropped_events_are_counted_over_outages_without_those_that_were_repeated() {
    let base = recorded(event("web", 0), 1);
    let time = |second: i64| event("", second).time;
    let mut queue = Queue::default();
    (0..WAITING + 5).for_each(|number| queue.put(numbered(&base, number), true));
    assert_eq!((queue.counts.lost, queue.take_dropped()), (5, None), "others wait");
    // A repeat is queued with its count, for which 5 is dropped.
    queue.put(numbered(&base, 2), false);
    // The API server is back for a moment.
    let (ticket, entry) = queue.first().unwrap();
    assert_eq!(entry.event.name, "web.6");
    queue.finish(ticket, &entry);
    (WAITING + 5..WAITING + 7).for_each(|number| queue.put(numbered(&base, number), true));
    assert_eq!(queue.take_dropped(), None, "others wait");
    send_all(&mut queue);
    // 0, 1, 3, 4, 5 and 7.
    let summary = queue.take_dropped().unwrap();
    assert_eq!(summary, Summary { number: 6, first: time(0), last: time(8) });
    assert_eq!((queue.counts.lost, queue.take_dropped()), (6, None));

    // The next outage begins before the report is sent: it stays, although it is the oldest.
    queue.put(recorded(summary.event(), 1), true);
    (2000..2001 + WAITING).for_each(|number| queue.put(numbered(&base, number), true));
    let (ticket, report) = queue.first().unwrap();
    assert_eq!((&*report.event.reason, queue.entries.len()), (reasons::EVENTS_DROPPED, WAITING));
    queue.finish(ticket, &report);
    send_all(&mut queue);
    assert_eq!(queue.take_dropped(), Some(Summary { number: 2, first: time(2000), last: time(2002) }));
    assert_eq!(queue.counts.lost, 8);

    // However many they are, their number is right and their memory is limited.
    let many = REMEMBERED + WAITING + 3;
    (0..many).for_each(|number| queue.put(numbered(&base, number), true));
    assert_eq!((queue.entries.len(), queue.dropped.recent.len()), (WAITING, REMEMBERED));
    send_all(&mut queue);
    let dropped = queue.take_dropped().unwrap();
    assert_eq!((dropped.number, dropped.first), (REMEMBERED as u64 + 3, time(0)));
}

#[test]
fn one_event_of_the_node_reports_the_dropped_ones_after_all_others() {
    let (sink, inbox) = crate::model::event::EventSink::new();
    let (_recorder, log) = crate::kube::events::spawn("node1", inbox, OnDeath::Unsupervised).unwrap();
    drop(sink);
    // A request waits until the test receives it.
    let (request_sender, receiver) = bounded(0);
    let client = FakeApi { request_sender: Some(request_sender), ..FakeApi::default() };
    let api = client.clone();
    let running = start(&log, client, unknown(), OnDeath::Unsupervised).unwrap();
    // When this test fails, its end releases the request before the thread is joined.
    let requests = receiver;
    let next = || requests.recv_timeout(Duration::from_secs(60)).unwrap();
    log.record(event("first", 0));
    let deadline = Instant::now() + Duration::from_secs(60);
    while api.inner.lock().unwrap().1.is_empty() {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    for number in 0..WAITING + 6 {
        log.record(event(&format!("p{number}"), i64::try_from(number).unwrap() + 1));
    }
    assert_eq!(log.delivery().unwrap().lost, 7);
    // It is sent although it was dropped meanwhile.
    assert_eq!(next(), "POST default/first 1");
    for number in 6..WAITING + 6 {
        assert_eq!(next(), format!("POST default/p{number} 1"));
    }
    assert_eq!(next(), "POST default/node1 1");
    log.record(event("later", 2000));
    assert_eq!(next(), "POST default/later 1");
    drop(requests);
    drop(running);
    let reports: Vec<_> =
        log.recent(0).into_iter().filter(|event| event.reason == reasons::EVENTS_DROPPED).collect();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert_eq!((&reports[0].regarding, reports[0].kind), (&Regarding::Node, EventType::Warning));
    assert_eq!(
        reports[0].message,
        "6 events from 2023-11-14T22:13:21Z to 2023-11-14T22:13:26Z were not sent: more than 1000 waited for \
         the API server"
    );
    assert_eq!(log.delivery().unwrap().lost, 6);
}

#[test]
fn rate_of_zero_is_no_limit_of_events_and_the_default_of_other_requests() {
    assert_eq!(limits(50, 100), Some((50.0, 100)));
    assert_eq!(limits(50, 0), Some((50.0, 10)));
    // No limit, as documented.
    assert_eq!(limits(0, 100), None);
    assert_eq!(client_limits(0, 0), (5.0, 10));
    assert_eq!(client_limits(-1, -1), (5.0, 10));
}

#[test]
fn the_thread_sends_old_and_new_events_and_survives_rejections() {
    let (sink, inbox) = crate::model::event::EventSink::new();
    let (_recorder, log) = crate::kube::events::spawn("node1", inbox, OnDeath::Unsupervised).unwrap();
    drop(sink);
    log.record(event("early", 0));
    log.record(event("early", 1));
    assert_eq!(log.delivery(), None);
    let (request_sender, requests) = bounded(16);
    let client = FakeApi {
        request_sender: Some(request_sender),
        ..FakeApi::with_outcomes([Outcome::Done, Outcome::Refused("no".into())])
    };
    let running = start(&log, client, unknown(), OnDeath::Unsupervised).unwrap();
    let next = || requests.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(next(), "POST default/early 2");
    log.record(event("refused", 2));
    assert_eq!(next(), "POST default/refused 1");
    log.record(event("early", 3));
    assert_eq!(next(), "PATCH default/early 3");
    log.record(event("later", 4));
    assert_eq!(next(), "POST default/later 1");
    // The queue is updated shortly after the test receives the request.
    let deadline = Instant::now() + Duration::from_secs(30);
    while log.delivery().unwrap().waiting > 0 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    drop(running);
    let counts = log.delivery().unwrap();
    assert_eq!((counts.waiting, counts.refused, counts.lost), (0, 1, 0));
    // The log continues to record events after the end of delivery.
    log.record(event("after", 5));
    assert_eq!(log.delivery().unwrap().waiting, 1);
}

#[test]
fn a_stop_does_not_wait_for_an_unavailable_api_server() {
    let (sink, inbox) = crate::model::event::EventSink::new();
    let (_recorder, log) = crate::kube::events::spawn("node1", inbox, OnDeath::Unsupervised).unwrap();
    drop(sink);
    let (request_sender, requests) = bounded(16);
    let client =
        FakeApi { request_sender: Some(request_sender), ..FakeApi::with_outcomes(vec![Outcome::Away; 100]) };
    let running = start(&log, client, unknown(), OnDeath::Unsupervised).unwrap();
    log.record(event("web", 0));
    requests.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(running.stop(Duration::from_secs(5)), threads::Stopped::Joined);
    assert_eq!(log.delivery().unwrap().waiting, 1);
}

#[test]
fn a_change_of_credentials_ends_the_pause() {
    let credentials = || {
        let endpoint = Endpoint {
            https: false,
            host: "127.0.0.1".to_owned(),
            port: 1,
            roots: Roots::System,
            server_name: None,
            identity: None,
            proxy: None,
        };
        Credentials { endpoint, base_path: String::new(), token: None }
    };
    let client = Client::new(credentials(), None).unwrap();
    let before = client.moment();
    client.set_identity(Identity::default()).unwrap();
    let begun = Instant::now();
    assert_eq!(
        EventApi::pause(&client, before, Duration::from_secs(60), &StopToken::never()),
        Waited::TimedOut
    );
    assert!(begun.elapsed() < Duration::from_secs(30));
}
