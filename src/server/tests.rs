//! Tests of the whole server with clients over loopback and a Unix socket.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::testing::FakeNode;
use super::*;
use crate::model::event::EventSink;
use crate::offline::{HeldReason, Phase, Report};
use crate::util::threads;

struct Fixture {
    server: Option<Running>,
    read_only: SocketAddr,
    healthz: SocketAddr,
    socket: PathBuf,
    version: Arc<AtomicU64>,
    sink: EventSink,
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut FakeNode)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("coracle.sock");
        let mut node = FakeNode::new();
        change(&mut node);
        let (version, sink) = (Arc::clone(&node.version), node.sink.clone());
        let node: Arc<dyn NodeBackend> = Arc::new(node);
        let loopback = Some("127.0.0.1:0".parse().unwrap());
        let settings = Settings {
            healthz: loopback,
            read_only: loopback,
            main: None,
            local_socket: socket.clone(),
            registry: None,
            any_namespace: false,
        };
        let listeners = bind(&settings, &*node).unwrap();
        let tcp: Vec<SocketAddr> = listeners.iter().filter_map(Listener::address).collect();
        let server = start(listeners, settings, node, OnDeath::Unsupervised).unwrap();
        let [read_only, healthz] = tcp[..] else { panic!("{tcp:?}") };
        Fixture { server: Some(server), read_only, healthz, socket, version, sink, dir }
    }

    fn on_socket(&self, method: &str, target: &str) -> (u16, String) {
        let mut stream = connect_local(&self.socket).unwrap();
        exchange(&mut stream, &format!("{method} {target} HTTP/1.0\r\n\r\n"))
    }

    fn post(&self, target: &str) -> (u16, String) {
        self.on_socket("POST", target)
    }

    fn local(&self, target: &str) -> (u16, String) {
        self.on_socket("GET", target)
    }

    fn health(&self, head: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.healthz).unwrap();
        exchange(&mut stream, head)
    }

    fn read_only(&self, target: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.read_only).unwrap();
        exchange(&mut stream, &format!("GET {target} HTTP/1.0\r\n\r\n"))
    }
}

fn exchange(stream: &mut (impl Read + Write), head: &str) -> (u16, String) {
    stream.write_all(head.as_bytes()).unwrap();
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    let (head, body) = all.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Reads one line byte by byte, so that the next one stays unread.
fn next_line(stream: &mut impl Read) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

fn skip_head(stream: &mut impl Read) {
    while next_line(stream) != "\r" {}
}

const HEALTHZ: &str = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";

#[test]
fn each_listener_serves_its_own_paths() {
    let fixture = Fixture::new();
    assert_eq!(fixture.health(HEALTHZ), (200, "ok".into()));
    assert_eq!(fixture.health("HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n"), (200, String::new()));
    assert_eq!(fixture.health("GET /pods HTTP/1.1\r\nHost: x\r\n\r\n").0, 404);
    assert_eq!(fixture.read_only("/healthz/ping"), (200, "ok".into()));
    assert_eq!(fixture.read_only("/exec/a/b/c").0, 405);
    assert_eq!(fixture.read_only("/v1/pods").0, 404);
    let (status, body) = fixture.read_only("/pods");
    let list: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, list["kind"].as_str()), (200, Some("PodList")));
    assert_eq!(list["items"][0]["metadata"]["uid"], "uid1");
    assert!(list["items"][0].get("kind").is_none());
    assert_eq!(fixture.read_only("/runningpods/").0, 200);
    assert_eq!(fixture.local("/v1/version").0, 200);
    assert_eq!(fixture.local("/v1/images"), (502, "the runtime does not answer\n".into()));
    assert_eq!(fixture.local("/healthz"), (200, "ok".into()));
    assert_eq!(fixture.local("/pods").0, 404);
}

#[test]
fn summary_is_served_whole_and_in_short() {
    let fixture = Fixture::new();
    for response in [fixture.read_only("/stats/summary"), fixture.local("/stats/summary/")] {
        assert_eq!(response, (200, "{\"node\":{}}".into()));
    }
    assert_eq!(fixture.post("/stats/summary").0, 200);
    assert_eq!(fixture.read_only("/stats/summary?only_cpu_and_memory=false").0, 200);
    let only = fixture.read_only("/stats/summary?only_cpu_and_memory=true");
    assert_eq!(only, (500, "Internal Error: no cgroup\n".into()));
    assert_eq!(fixture.read_only("/stats/container").0, 404);
    assert_eq!(fixture.read_only("/stats").0, 404);
    for page in ["Resource", "Cadvisor"] {
        let path = format!("/metrics/{}", page.to_lowercase());
        assert!(fixture.read_only(&path).1.contains(page));
    }
}

#[test]
fn metrics_are_served_as_text() {
    let fixture = Fixture::with(|node| node.failing = vec![(AgentCheck::Runtime, "down")]);
    let expected = "# HELP kubelet_test Own\n# TYPE kubelet_test gauge\nkubelet_test 1\n";
    assert_eq!(fixture.read_only("/metrics"), (200, expected.into()));
    assert_eq!(fixture.local("/metrics"), (200, expected.into()));
    assert!(fixture.read_only("/metrics/probes").1.contains("Probes"));
    let slis = fixture.read_only("/metrics/slis").1;
    let lines: Vec<&str> = slis.lines().filter(|line| line.starts_with("kubernetes_healthcheck{")).collect();
    assert_eq!(
        lines,
        [
            "kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1",
            "kubernetes_healthcheck{name=\"log\",type=\"healthz\"} 1",
            "kubernetes_healthcheck{name=\"syncloop\",type=\"healthz\"} 1",
            "kubernetes_healthcheck{name=\"runtime\",type=\"healthz\"} 0",
            "kubernetes_healthcheck{name=\"sources\",type=\"healthz\"} 1",
        ]
    );
    // A request of the page, and one of a check by name, runs the check.
    let failed = |page: &str| -> u64 {
        let series = "kubernetes_healthchecks_total{name=\"runtime\",type=\"healthz\",status=\"error\"} ";
        page.lines().find_map(|line| line.strip_prefix(series)).unwrap().parse().unwrap()
    };
    assert_eq!(fixture.health("GET /healthz/runtime HTTP/1.0\r\n\r\n").0, 500);
    assert!(failed(&fixture.read_only("/metrics/slis").1) >= failed(&slis) + 2);
    assert_eq!(fixture.read_only("/metrics/other").0, 404);
    assert_eq!(fixture.health("GET /metrics HTTP/1.0\r\n\r\n").0, 404);
}

#[test]
fn only_metrics_are_compressed_and_only_if_accepted() {
    let fixture = Fixture::new();
    let plain = fixture.read_only("/metrics").1;
    let ask = |path: &str, accepts: &str| {
        let mut stream = TcpStream::connect(fixture.read_only).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n{accepts}\r\n").unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        let end = all.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        (String::from_utf8(all[..end].to_vec()).unwrap(), all.split_off(end + 4))
    };
    let (head, body) = ask("/metrics", "Accept-Encoding: deflate, gzip;q=1.0\r\nAccept: text/plain\r\n");
    assert!(head.contains("\r\nContent-Encoding: gzip\r\n"), "{head}");
    let kind = "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8; escaping=underscores";
    assert!(head.contains(kind), "{head}");
    assert!(head.contains("\r\nProcess-Start-Time-Unix: "), "{head}");
    assert_eq!(gunzip(&body), plain);
    for (path, accepts) in [
        ("/metrics", ""),
        ("/metrics", "Accept-Encoding: gzip;q=0\r\n"),
        ("/pods", "Accept-Encoding: gzip\r\n"),
        ("/stats/summary", "Accept-Encoding: gzip\r\n"),
        ("/healthz", "Accept-Encoding: gzip\r\n"),
    ] {
        let (head, body) = ask(path, accepts);
        assert!(!head.contains("Content-Encoding"), "{path}: {head}");
        assert!(std::str::from_utf8(&body).is_ok());
    }
}

/// Decompresses with the program gzip.
pub(super) fn gunzip(packed: &[u8]) -> String {
    use std::process::{Command, Stdio};
    let mut child =
        Command::new("gzip").arg("-dc").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(packed).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn hostile_requests_are_rejected_and_others_are_served() {
    let fixture = Fixture::new();
    let huge = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(30_000));
    for (head, status) in [
        ("GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 70368744177664\r\n\r\n", 413),
        ("POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 405),
        ("nonsense\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: x\r\n\u{ff}\r\n\r\n", 400),
        (huge.as_str(), 431),
    ] {
        assert_eq!(fixture.health(head).0, status, "{head:.60}");
    }
    assert_eq!(fixture.health(HEALTHZ).0, 200);
}

#[test]
fn slow_clients_do_not_block_others_and_are_capped() {
    let fixture = Fixture::new();
    let address = fixture.read_only;
    let slow: Vec<TcpStream> = (0..16)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET /pods HT").unwrap();
            stream
        })
        .collect();
    assert_eq!(fixture.health(HEALTHZ).0, 200);
    assert_eq!(fixture.local("/v1/pods").0, 200);
    // The listener accepts connections in order, so this one is the seventeenth.
    let mut late = TcpStream::connect(address).unwrap();
    let mut text = String::new();
    late.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 503 ") && text.ends_with("\r\n\r\ntoo many connections\n"), "{text}");
    drop(slow);
}

#[test]
fn panic_of_a_request_is_a_500() {
    let fixture = Fixture::with(|node| node.running_pods_panic = true);
    assert_eq!(fixture.read_only("/runningpods").0, 500);
    assert_eq!(fixture.read_only("/pods").0, 200);
}

#[test]
fn logs_choose_the_container_and_pass_options() {
    let fixture = Fixture::new();
    assert_eq!(fixture.local("/v1/logs?pod=pod1&tail=3"), (200, "/logs/uid1/a Some(3) true\n".into()));
    assert_eq!(fixture.local("/v1/logs?pod=pod1&container=b"), (400, "no such log\n".into()));
    assert_eq!(fixture.local("/v1/logs?pod=pod1&container=x").0, 404);
    assert_eq!(fixture.local("/v1/logs?pod=other").0, 404);
    assert_eq!(fixture.local("/v1/logs?pod=pod1&tail=-1").0, 400);
    fixture.version.store(2, Ordering::SeqCst);
    let (status, text) = fixture.local("/v1/logs?pod=uid");
    assert_eq!(status, 409);
    assert!(text.contains("default/pod2-node1 (uid2)"), "{text}");
}

#[test]
fn streams_end_with_their_client_and_with_the_server() {
    let mut fixture = Fixture::new();
    let follow = |socket: &Path, target: &str| {
        let mut stream = connect_local(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.write_all(format!("GET {target} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
        skip_head(&mut stream);
        stream
    };
    let mut log = follow(&fixture.socket, "/v1/logs?pod=pod1&follow=true");
    assert_eq!(next_line(&mut log), "/logs/uid1/a None true");
    drop(log);

    let mut watch = follow(&fixture.socket, "/v1/pods/watch");
    assert!(next_line(&mut watch).starts_with(r#"{"type":"ADDED","object":{"pod":"#));
    fixture.version.store(2, Ordering::SeqCst);
    assert!(next_line(&mut watch).contains("pod2"));

    let mut events = follow(&fixture.socket, "/v1/events?follow=true");
    let node = crate::model::event::Regarding::Node;
    fixture.sink.raise(node, crate::model::event::EventType::Normal, "Starting", "Starting kubelet.");
    assert!(next_line(&mut events).contains("Starting kubelet."));

    let server = fixture.server.take().unwrap();
    assert_eq!(server.stop(Duration::from_secs(30)), threads::Stopped::Joined);
    let mut rest = String::new();
    watch.read_to_string(&mut rest).unwrap();
    events.read_to_string(&mut rest).unwrap();
    let left: Vec<_> = std::fs::read_dir(fixture.dir.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A server whose `/v1/images` sends a message when it begins, and returns when the sender is dropped.
fn with_blocked_images() -> (Fixture, Receiver<()>, Sender<()>) {
    let (go, gate) = crossbeam_channel::bounded::<()>(0);
    let (begins, begun) = crossbeam_channel::bounded(32);
    let fixture = Fixture::with(|node| {
        node.images = Box::new(move || {
            let _ = begins.send(());
            let _ = gate.recv();
            Ok(Vec::new())
        });
    });
    (fixture, begun, go)
}

#[test]
fn connection_of_a_client_that_left_counts_until_its_call_returns() {
    let (fixture, begun, go) = with_blocked_images();
    for _ in 0..24 {
        let mut stream = connect_local(&fixture.socket).unwrap();
        stream.write_all(b"GET /v1/images HTTP/1.0\r\n\r\n").unwrap();
        begun.recv().unwrap();
    }
    // All clients have disconnected, and all calls still run.
    let mut late = connect_local(&fixture.socket).unwrap();
    let mut text = String::new();
    late.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
    drop(go);
    let deadline = Instant::now() + Duration::from_secs(30);
    let version = || {
        let mut stream = connect_local(&fixture.socket).unwrap();
        let mut text = String::new();
        // A rejected client may fail to write.
        let _ = stream.write_all(b"GET /v1/version HTTP/1.0\r\n\r\n");
        let _ = stream.read_to_string(&mut text);
        text.starts_with("HTTP/1.1 200 ")
    };
    while !version() {
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn server_stops_during_a_call() {
    let (mut fixture, begun, go) = with_blocked_images();
    let mut stream = connect_local(&fixture.socket).unwrap();
    stream.write_all(b"GET /v1/images HTTP/1.0\r\n\r\n").unwrap();
    begun.recv().unwrap();
    let server = fixture.server.take().unwrap();
    assert_eq!(server.stop(Duration::from_secs(60)), threads::Stopped::Joined);
    assert!(connect_local(&fixture.socket).is_err());
    drop(go);
}

#[test]
fn post_adds_an_ephemeral_container() {
    let fixture = Fixture::new();
    let (status, body) = fixture.post("/v1/debug?pod=pod1-node1&image=i&name=dbg");
    assert_eq!(status, 200, "{body}");
    assert!(body.contains("\"container\":\"dbg\"") && body.contains("\"pod\":\"pod1-node1\""), "{body}");
    let (_, body) = fixture.post("/v1/debug?pod=pod1-node1&image=i");
    assert!(body.contains("\"container\":\"debugger-"), "{body}");
    let (status, body) =
        fixture.post("/v1/debug?pod=pod1-node1&image=bad&name=x&command=sh&command=-c&command=a%20b");
    assert_eq!((status, body.as_str()), (422, "uid1: x Some([\"sh\", \"-c\", \"a b\"])\n"));
    assert_eq!(fixture.post("/v1/debug?pod=absent&image=i").0, 404);
    // No other POST is accepted, and a GET changes nothing.
    for target in ["/v1/pods", "/healthz", "/"] {
        assert_eq!(fixture.post(target).0, 405, "{target}");
    }
    assert_eq!(fixture.local("/v1/debug?pod=pod1-node1&image=i").0, 404);
}

#[test]
fn held_set_of_pods_is_accepted_once() {
    let held = Report { phase: Phase::Held, held: Some(HeldReason::NoNode), ..Report::default() };
    let fixture = Fixture::with(|node| node.offline = Mutex::new(Some(held)));
    let (status, body) = fixture.local("/v1/offline");
    assert_eq!(status, 200);
    assert!(body.contains(r#""phase":"held""#) && body.contains(r#""held":"noNode""#), "{body}");
    // A GET changes nothing.
    assert_eq!(fixture.local("/v1/offline/accept").0, 404);
    let (status, body) = fixture.post("/v1/offline/accept");
    assert_eq!(status, 200, "{body}");
    assert!(body.contains(r#""phase":"online""#), "{body}");
    assert_eq!(fixture.post("/v1/offline/accept"), (409, "no set of pods is held\n".into()));
}

#[test]
fn stored_objects_are_listed_by_name_checked_and_removed_only_on_request() {
    let fixture = Fixture::with(|node| node.offline = Mutex::new(Some(Report::default())));
    assert!(!fixture.local("/v1/offline").1.contains("stored"));
    let (status, body) = fixture.local("/v1/offline?names=1");
    assert!(status == 200 && body.contains(r#""name":"n/s""#), "{body}");
    let (status, body) = fixture.local("/v1/offline/check");
    assert!(status == 200 && body.contains("configmap default/m: not stored"), "{body}");
    assert_eq!(fixture.local("/v1/offline/check?pod=pod1").0, 200);
    assert_eq!(fixture.local("/v1/offline/check?pod=absent").0, 404);
    assert_eq!(fixture.local("/v1/offline/purge?scope=all").0, 404, "a GET changes nothing");
    let (status, body) = fixture.post("/v1/offline/purge?scope=all");
    assert!(status == 200 && body.contains(r#""newKey":true"#), "{body}");
    let (status, body) = fixture.post("/v1/offline/purge?object=secret/n/s");
    assert!(status == 200 && body.contains(r#""newKey":false"#), "{body}");
    assert_eq!(
        fixture.post("/v1/offline/purge?object=configmap/n/m"),
        (404, "no such object is stored (coracle offline list -o wide names all)\n".to_owned())
    );
    for wrong in ["", "?scope=some", "?object=bird/n/s", "?scope=all&object=secret/n/s"] {
        assert_eq!(fixture.post(&format!("/v1/offline/purge{wrong}")).0, 400, "{wrong}");
    }
}

#[test]
fn authorities_are_added_from_an_absolute_path_and_removed() {
    let fixture = Fixture::with(|node| node.offline = Mutex::new(Some(Report::default())));
    assert_eq!(fixture.local("/v1/offline/trust?remove=1").0, 404, "a GET changes nothing");
    let (status, body) = fixture.post("/v1/offline/trust?file=/ca.pem");
    assert!(status == 200 && body.contains("SHA-256 00"), "{body}");
    assert_eq!(fixture.post("/v1/offline/trust?file=/x"), (422, "/x: no authorities\n".to_owned()));
    let (status, body) = fixture.post("/v1/offline/trust?remove=1");
    assert!(status == 200 && body.contains(r#""removed":true"#), "{body}");
    for wrong in ["", "?file=ca.pem", "?file=/ca.pem&remove=1"] {
        assert_eq!(fixture.post(&format!("/v1/offline/trust{wrong}")).0, 400, "{wrong}");
    }
}

#[test]
fn agent_without_offline_has_no_report_and_accepts_nothing() {
    let fixture = Fixture::new();
    let expected = (404, "this agent runs without --offline\n".to_owned());
    for path in ["/v1/offline", "/v1/offline?names=1", "/v1/offline/check"] {
        assert_eq!(fixture.local(path), expected, "{path}");
    }
    for path in ["/v1/offline/accept", "/v1/offline/purge?scope=damaged", "/v1/offline/trust?remove=1"] {
        assert_eq!(fixture.post(path), expected, "{path}");
    }
}
