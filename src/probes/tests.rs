use super::*;
use crate::model::event::Event;
use crate::model::runtime::{ContainerState, ContainerStatus};
use crate::util::mailbox::{Inbox, mailbox, newest};
use crate::util::threads::{OnDeath, Running, Stack, spawn};
use crossbeam_channel::{Receiver, bounded};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

const LONG: Duration = Duration::from_secs(20);

struct Room {
    probes: Probes,
    posts: Inbox<PodUid, ()>,
    events: Receiver<Box<Event>>,
    _deaths: Receiver<Died>,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.probes.stop(LONG);
    }
}

fn room() -> Room {
    let settings = crate::cri::Settings {
        runtime_endpoint: "unix:///nonexistent/coracle-test.sock".to_owned(),
        image_endpoint: None,
        request_timeout: LONG,
    };
    let (events, event_queue) = EventSink::new();
    let (post, posts) = mailbox(newest);
    let (on_death, deaths) = bounded(1);
    let cri = crate::cri::connect(settings).unwrap().0;
    let probes = Probes::new(Deps { cri, events, post, on_death });
    Room { probes, posts, events: event_queue, _deaths: deaths }
}

/// Answers every request with the status that is set at the moment; 0 is no answer at all.
fn serve(status: u16) -> (u16, Arc<AtomicU16>, Running) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let set = Arc::new(AtomicU16::new(status));
    let shown = Arc::clone(&set);
    let running = spawn("t/server", Stack::Small, OnDeath::Nobody, move |stop| {
        let mut kept = Vec::new();
        while let Ok((mut stream, _)) = listener.accept() {
            if stop.is_stopped() {
                return;
            }
            let mut some = [0; 1024];
            let _ = stream.read(&mut some);
            match shown.load(Ordering::SeqCst) {
                0 => kept.push(stream),
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
fn a_pod_becomes_ready_and_unready_and_is_told_of() {
    let (port, status, _server) = serve(200);
    let room = room();
    let get = json!({"httpGet": {"port": port, "path": "/"}, "periodSeconds": 1, "timeoutSeconds": 20,
        "failureThreshold": 2});
    let (pod, id) = (pod(json!({"readinessProbe": get})), ContainerId::from("c1"));
    room.probes.sync(&pod, &running("c1"), false);
    assert_eq!(room.probes.verdict(Kind::Readiness, &id), Verdict::Pending);
    assert_eq!(room.probes.verdict(Kind::Liveness, &id), Verdict::NoProbe);
    room.posts.bell().recv_timeout(LONG).unwrap();
    assert!(room.posts.take().contains_key(pod.uid()));
    assert_eq!(room.probes.verdict(Kind::Readiness, &id), Verdict::Success);

    status.store(503, Ordering::SeqCst);
    room.posts.bell().recv_timeout(LONG).unwrap();
    assert_eq!(room.probes.verdict(Kind::Readiness, &id), Verdict::Failure);
    let told: Vec<Box<Event>> = room.events.try_iter().collect();
    assert!(told.len() >= 2, "every failed run is told: {told:?}");
    assert_eq!(told[0].message, "Readiness probe failed: HTTP probe failed with statuscode: 503");
    assert_eq!((told[0].reason, &told[0].regarding), ("Unhealthy", &pod.regarding("spec.containers{c}")));
    let counted = room.probes.counters();
    assert!(counted[0].successful >= 1 && counted[0].failed >= 2, "{counted:?}");
}

#[test]
fn a_hanging_check_delays_nobody_and_ends_with_its_pod() {
    let (port, _status, _server) = serve(0);
    let (good, _status, _good_server) = serve(200);
    let room = room();
    let get = |port: u16| json!({"httpGet": {"port": port, "path": "/"}, "periodSeconds": 1, "timeoutSeconds": 600});
    let hanging = pod(json!({"livenessProbe": get(port), "readinessProbe": get(good)}));
    room.probes.sync(&hanging, &running("c1"), false);
    room.posts.bell().recv_timeout(LONG).unwrap();
    assert_eq!(room.probes.verdict(Kind::Readiness, &"c1".into()), Verdict::Success);
    room.probes.forget(hanging.uid());
    assert_eq!((room.probes.count(), room.probes.counters().len()), (0, 0));
    // Would wait for ten minutes if the check went on.
    let before = std::time::Instant::now();
    room.probes.stop(LONG);
    assert!(before.elapsed() < LONG / 2);
    assert!(room.events.try_recv().is_err(), "a check that is broken off is no failure");
}

#[test]
fn a_command_that_is_too_large_is_an_error_with_an_event() {
    let room = room();
    let pod = pod(json!({"env": [{"name": "V", "value": "x".repeat(1 << 20)}],
        "livenessProbe": {"exec": {"command": ["echo", "$(V)".repeat(170_000)]}}}));
    room.probes.sync(&pod, &running("c1"), false);
    let event = room.events.recv_timeout(LONG).unwrap();
    let expected = "Liveness probe errored and resulted in unknown state: \
                    the command with its variables is larger than 2097152 bytes";
    assert_eq!((event.reason, event.message.as_str()), ("Unhealthy", expected));
    assert_eq!(event.regarding, pod.regarding("spec.containers{c}"));
    room.probes.stop(LONG);
}

#[test]
fn an_idle_room_has_no_thread() {
    let room = room();
    room.probes.sync(&pod(json!({})), &running("c1"), false);
    assert_eq!(room.probes.count(), 0);
    room.probes.forget(&"0123456789".into());
    room.probes.stop(Duration::ZERO);
    room.probes.sync(&pod(json!({"livenessProbe": {}})), &running("c1"), false);
    room.probes.stop(Duration::ZERO);
}

#[test]
fn the_grace_of_a_probe() {
    let pod = pod(json!({"livenessProbe": {"terminationGracePeriodSeconds": 1}, "startupProbe": {}}));
    let container = &pod.containers()[0];
    assert_eq!(grace_seconds(container, Kind::Liveness), Some(1));
    assert_eq!(grace_seconds(container, Kind::Startup), None);
    assert_eq!(grace_seconds(container, Kind::Readiness), None);
}
