use super::*;
use crate::model::event::Event;
use crate::model::runtime::{ContainerState, ContainerStatus};
use crate::util::mailbox::{Inbox, mailbox, replace};
use crate::util::threads::{OnDeath, Running, Stack, spawn};
use crossbeam_channel::{Receiver, bounded};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

const LONG: Duration = Duration::from_secs(60);

struct Fixture {
    probes: Probes,
    posts: Inbox<PodUid, ()>,
    events: Receiver<Box<Event>>,
    deaths: Receiver<Died>,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.probes.stop(LONG);
        // A death ends the agent.
        let died = self.deaths.try_recv().ok();
        assert!(std::thread::panicking() || died.is_none(), "{died:?}");
    }
}

fn fixture() -> Fixture {
    let (events, event_queue) = EventSink::new();
    let (post, posts) = mailbox(replace);
    let (on_death, deaths) = bounded(1);
    let cri = crate::cri::unreachable_clients().0;
    let probes = Probes::new(Deps { cri, events, post, on_death });
    Fixture { probes, posts, events: event_queue, deaths }
}

/// Answers every request with the status that is set at the moment; 0 is no answer at all.
fn serve(status: u16) -> (u16, Arc<AtomicU16>, Running) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let set = Arc::new(AtomicU16::new(status));
    let shown = Arc::clone(&set);
    let running = spawn("t/server", Stack::Small, OnDeath::Unsupervised, move |stop| {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept() {
            if stop.is_stopped() {
                return;
            }
            let mut some = [0; 1024];
            let _ = stream.read(&mut some);
            match shown.load(Ordering::SeqCst) {
                0 => open.push(stream),
                status => {
                    let _ = write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n");
                }
            }
        }
    })
    .unwrap()
    .with_waker(Box::new(move || drop(std::net::TcpStream::connect(("127.0.0.1", port)))));
    (port, set, running)
}

fn pod(probes: Value) -> Pod {
    let mut container = probes;
    container["name"] = json!("c");
    let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "0123456789"},
        "spec": {"containers": [container]}});
    Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
}

fn running(id: &str) -> PodRuntime {
    let status = ContainerStatus {
        started_at: Some(jiff::Timestamp::now()),
        ..ContainerStatus::blank(id, "c", ContainerState::Running)
    };
    PodRuntime { ips: vec!["127.0.0.1".parse().unwrap()], containers: vec![status], ..PodRuntime::default() }
}

#[test]
fn readiness_follows_checks_and_reports_failures() {
    let (port, status, _server) = serve(200);
    let fixture = fixture();
    let get = json!({"httpGet": {"port": port, "path": "/"}, "periodSeconds": 1, "timeoutSeconds": 20,
        "failureThreshold": 2});
    let (pod, id) = (pod(json!({"readinessProbe": get})), ContainerId::from("c1"));
    fixture.probes.sync(&pod, &running("c1"), false);
    assert_eq!(fixture.probes.verdict(Kind::Readiness, &id), ProbeVerdict::Pending);
    assert_eq!(fixture.probes.verdict(Kind::Liveness, &id), ProbeVerdict::NoProbe);
    fixture.posts.bell().recv_timeout(LONG).unwrap();
    assert!(fixture.posts.drain().contains_key(pod.uid()));
    assert_eq!(fixture.probes.verdict(Kind::Readiness, &id), ProbeVerdict::Success);

    status.store(503, Ordering::SeqCst);
    fixture.posts.bell().recv_timeout(LONG).unwrap();
    assert_eq!(fixture.probes.verdict(Kind::Readiness, &id), ProbeVerdict::Failure);
    let raised: Vec<Box<Event>> = fixture.events.try_iter().collect();
    assert!(raised.len() >= 2, "every failed check raises an event: {raised:?}");
    assert_eq!(raised[0].message, "Readiness probe failed: HTTP probe failed with statuscode: 503");
    assert_eq!((raised[0].reason, &raised[0].regarding), ("Unhealthy", &pod.regarding("spec.containers{c}")));
    let counted = fixture.probes.counters();
    assert!(counted[0].successful >= 1 && counted[0].failed >= 2, "{counted:?}");
}

#[test]
fn hanging_check_delays_no_other_and_ends_with_its_pod() {
    let (port, _status, _server) = serve(0);
    let (good, _status, _good_server) = serve(200);
    let fixture = fixture();
    let get = |port: u16| json!({"httpGet": {"port": port, "path": "/"}, "periodSeconds": 1, "timeoutSeconds": 600});
    let hanging = pod(json!({"livenessProbe": get(port), "readinessProbe": get(good)}));
    fixture.probes.sync(&hanging, &running("c1"), false);
    fixture.posts.bell().recv_timeout(LONG).unwrap();
    assert_eq!(fixture.probes.verdict(Kind::Readiness, &"c1".into()), ProbeVerdict::Success);
    fixture.probes.forget(hanging.uid());
    assert_eq!(fixture.probes.count(), 0);
    // This would wait for ten minutes if the check continued.
    let before = std::time::Instant::now();
    fixture.probes.stop(LONG);
    assert!(before.elapsed() < LONG / 2);
    assert!(fixture.events.try_recv().is_err(), "an aborted check is no failure");
}

#[test]
fn too_large_command_raises_an_event() {
    let fixture = fixture();
    let pod = pod(json!({"env": [{"name": "V", "value": "x".repeat(1 << 20)}],
        "livenessProbe": {"exec": {"command": ["echo", "$(V)".repeat(170_000)]}}}));
    fixture.probes.sync(&pod, &running("c1"), false);
    let event = fixture.events.recv_timeout(LONG).unwrap();
    let expected = "Liveness probe errored and resulted in unknown state: \
                    the command with its variables is larger than 2097152 bytes";
    assert_eq!((event.reason, event.message.as_str()), ("Unhealthy", expected));
    assert_eq!(event.regarding, pod.regarding("spec.containers{c}"));
    fixture.probes.stop(LONG);
}

/// No worker takes part, which may be busy with another container for minutes.
#[test]
fn startup_result_lets_liveness_run_without_its_worker() {
    let (port, status, _server) = serve(503);
    let fixture = fixture();
    let get = json!({"httpGet": {"port": port, "path": "/"}, "periodSeconds": 1, "failureThreshold": 1,
        "timeoutSeconds": 20});
    let mut startup = get.clone();
    startup["failureThreshold"] = json!(1000);
    let pod = pod(json!({"startupProbe": startup, "livenessProbe": get}));
    fixture.probes.sync(&pod, &running("c1"), false);
    fixture.events.recv_timeout(LONG).unwrap();
    let counters_of =
        |kind| fixture.probes.counters().into_iter().find(|counters| counters.kind == kind).unwrap();
    assert_eq!(fixture.probes.verdict(Kind::Startup, &"c1".into()), ProbeVerdict::Pending);
    assert_eq!(counters_of(Kind::Liveness).failed, 0);
    status.store(200, Ordering::SeqCst);
    fixture.posts.bell().recv_timeout(LONG).unwrap();
    assert_eq!(fixture.probes.verdict(Kind::Startup, &"c1".into()), ProbeVerdict::Success);
    let begun = std::time::Instant::now();
    while counters_of(Kind::Liveness).successful == 0 {
        assert!(begun.elapsed() < LONG, "liveness does not run");
        std::thread::yield_now();
    }
}

#[test]
fn threads_of_a_pod_end_when_it_is_forgotten() {
    let fixture = fixture();
    let pod = pod(json!({"livenessProbe": {"exec": {"command": ["true"]}, "initialDelaySeconds": 600}}));
    let named =
        || crate::util::threads::report().iter().filter(|thread| thread.name == "probe/fedcba98").count();
    let mut object = pod.object().clone();
    object.metadata.uid = Some("fedcba9876".to_owned());
    let pod = Pod::from(object);
    fixture.probes.sync(&pod, &running("c1"), false);
    fixture.probes.forget(pod.uid());
    fixture.probes.sync(&pod, &running("c2"), false);
    fixture.probes.stop(LONG);
    assert_eq!((fixture.probes.count(), named()), (0, 0));
}

#[test]
fn thread_of_a_passed_startup_probe_ends_until_the_next_instance() {
    let (port, _status, _server) = serve(200);
    let fixture = fixture();
    let get = json!({"httpGet": {"port": port, "path": "/"}, "periodSeconds": 1, "timeoutSeconds": 20});
    let mut object = pod(json!({"startupProbe": get})).object().clone();
    object.metadata.uid = Some("abcdabcd76".to_owned());
    let pod = Pod::from(object);
    let threads =
        || crate::util::threads::report().iter().filter(|thread| thread.name == "probe/abcdabcd").count();
    for id in ["c1", "c2"] {
        fixture.probes.sync(&pod, &running(id), false);
        fixture.posts.bell().recv_timeout(LONG).unwrap();
        assert_eq!(fixture.probes.verdict(Kind::Startup, &id.into()), ProbeVerdict::Success);
        let begun = std::time::Instant::now();
        while threads() > 0 {
            assert!(begun.elapsed() < LONG, "the thread does not end");
            std::thread::yield_now();
        }
        fixture.probes.sync(&pod, &running(id), false);
        assert_eq!(threads(), 0);
    }
}

#[test]
fn an_idle_room_has_no_thread() {
    let fixture = fixture();
    fixture.probes.sync(&pod(json!({})), &running("c1"), false);
    assert_eq!(fixture.probes.count(), 0);
    fixture.probes.forget(&"0123456789".into());
    fixture.probes.stop(Duration::ZERO);
    fixture.probes.sync(&pod(json!({"livenessProbe": {}})), &running("c1"), false);
    fixture.probes.stop(Duration::ZERO);
}

#[test]
fn grace_period_is_that_of_the_probe() {
    let pod = pod(json!({"livenessProbe": {"terminationGracePeriodSeconds": 1}, "startupProbe": {}}));
    let container = &pod.containers()[0];
    assert_eq!(grace_seconds(container, Kind::Liveness), Some(1));
    assert_eq!(grace_seconds(container, Kind::Startup), None);
    assert_eq!(grace_seconds(container, Kind::Readiness), None);
}
