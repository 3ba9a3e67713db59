//! exec, attach and port-forward of the whole agent, on a fake runtime whose streams are
//! served by a fake, too.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use coracle::transport::grpc::Kind;
use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use serde_json::json;

use crate::support::fake_node::{FakeNode, full_name};
use crate::support::fake_streams::FakeStreams;
use crate::support::node::{FOREVER, busybox, pod, uid};
use crate::support::process_usage;
use crate::support::wait::{pause, wait_until};

const LIMIT: Duration = Duration::from_secs(60);

struct StreamFixture {
    node: FakeNode,
    streams: FakeStreams,
}

impl StreamFixture {
    fn start() -> StreamFixture {
        StreamFixture::with(json!({}))
    }

    fn with(config: serde_json::Value) -> StreamFixture {
        let bench = StreamFixture { node: FakeNode::start_with(config), streams: FakeStreams::start() };
        let url = bench.streams.url();
        bench.node.fake.with_state(|state| state.streams = url);
        bench.node.apply(&pod("web", json!([busybox("main", FOREVER)])));
        bench.node.wait_ready("web");
        bench
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.node.local_socket()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Asks for an upgrade on the local socket; returns at once.
    fn ask(&self, method: &str, target: &str) -> UnixStream {
        let mut stream = self.connect();
        write!(
            stream,
            "{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
             X-Stream-Protocol-Version: v4.channel.k8s.io\r\nContent-Length: 0\r\n\r\n"
        )
        .unwrap();
        stream
    }

    /// An upgrade that has to work.
    fn open(&self, target: &str) -> UnixStream {
        let mut stream = self.ask("POST", target);
        let head = head(&mut stream);
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        stream
    }

    /// The status and the text of a refusal.
    fn refused(&self, method: &str, target: &str) -> (u16, String) {
        read_response(self.ask(method, target))
    }

    fn exec(&self, command: &str) -> String {
        let words: String = command.split('/').map(|word| format!("&command={word}")).collect();
        format!("/exec/default/{}/main?input=1&output=1{words}", full_name("web"))
    }
}

fn head(stream: &mut UnixStream) -> String {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

fn read_response(mut stream: UnixStream) -> (u16, String) {
    let head = head(&mut stream);
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let mut body = String::new();
    stream.read_to_string(&mut body).unwrap();
    (status, body)
}

/// Writes so many bytes, and ends that direction, on a thread of its own.
fn push(stream: &UnixStream, count: usize) -> Running {
    let mut writer = stream.try_clone().unwrap();
    spawn("t/push", Stack::Small, OnDeath::Unsupervised, move |_| {
        writer.write_all(&vec![7; count]).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    })
    .unwrap()
}

#[test]
fn streams_copy_both_directions_until_one_side_closes() {
    let bench = StreamFixture::start();
    // Half-close: the client's end of stream reaches the runtime, and the last bytes of the runtime
    // reach the client.
    let mut stream = bench.open(&bench.exec("echo"));
    stream.write_all(b"some bytes").unwrap();
    let mut got = [0; 10];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"some bytes");
    stream.shutdown(Shutdown::Write).unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "<end>");
    // Bytes that arrive together with the runtime's response, and bytes that are sent before it.
    let mut stream = bench.ask("GET", &bench.exec("greeting"));
    assert!(head(&mut stream).starts_with("HTTP/1.1 101 "));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "hello");
    let mut stream = bench.ask("POST", &bench.exec("echo"));
    stream.write_all(b"early").unwrap();
    head(&mut stream);
    let mut got = [0; 5];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"early");
    drop(stream);
    // Many bytes in both directions.
    let mut stream = bench.open(&bench.exec("source/67108864"));
    let copied = std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
    assert_eq!(copied, 67_108_864);
    let stream = bench.open(&bench.exec("echo"));
    let pushing = push(&stream, 32 << 20);
    let copied = std::io::copy(&mut &stream, &mut std::io::sink()).unwrap();
    assert_eq!(copied, (32 << 20) + 5);
    drop(pushing);
    // Attach and port-forward reach the same server.
    let web = full_name("web");
    for target in [
        format!("/attach/default/{web}/main?output=1"),
        format!("/portForward/default/{web}"),
        format!("/exec/default/{web}/{}/main?output=1&command=echo", uid(&bench.node.pod("web").unwrap())),
    ] {
        let mut stream = bench.open(&target);
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
    }
    let heads = bench.streams.heads();
    let first = heads.first().unwrap();
    assert!(first.starts_with("POST /echo HTTP/1.1\r\nHost: 127.0.0.1:"), "{first}");
    assert!(first.contains("X-Stream-Protocol-Version: v4.channel.k8s.io\r\n"), "{first}");
    assert!(!first.contains("Content-Length"), "{first}");
    bench.node.finish();
}

/// Both sides send before they read: a full direction does not block the other one.
#[test]
fn full_direction_does_not_block_the_other() {
    const MUCH: usize = 32 << 20;
    let bench = StreamFixture::start();
    // The runtime reads only after all of its bytes are taken; the client does not wait for that.
    let mut stream = bench.open(&bench.exec(&format!("late/{MUCH}")));
    let pushing = push(&stream, MUCH);
    // Until this direction is full.
    pause(Duration::from_millis(500));
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    let expected = format!("<{MUCH}>");
    assert_eq!(received.len(), MUCH + expected.len());
    assert!(received.ends_with(expected.as_bytes()));
    drop(pushing);

    // No client reads its output. How much of it is buffered where varies: often enough for a whole
    // read by the agent.
    for attempt in 0..16 {
        let mut stream = bench.open(&bench.exec("chat"));
        stream.read_exact(&mut vec![0; 30_000 * (attempt % 4)]).unwrap();
        pause(Duration::from_millis(100));
        stream.write_all(b"x").unwrap();
        wait_until("the output to arrive", LIMIT, || {
            bench.streams.heads().iter().filter(|line| *line == "heard").count() == attempt + 1
        });
    }
    bench.node.finish();
}

#[test]
fn stream_errors_have_the_kubelets_codes_and_messages() {
    let bench = StreamFixture::start();
    let web = full_name("web");
    let check = |target: &str, status: u16, text: &str| {
        let got = bench.refused("POST", target);
        assert!(got.0 == status && got.1.contains(text), "{target}: {got:?}");
    };
    let at_least = "you must specify at least 1 of stdin, stdout, stderr";
    check(&format!("/exec/default/{web}/main?command=ls"), 400, at_least);
    check(&format!("/attach/default/{web}/main?tty=1&error=1"), 400, at_least);
    check("/exec/default/other/main?output=1", 404, "pod does not exist");
    check("/portForward/default/other", 404, "pod does not exist");
    check(&format!("/portForward/default/{web}/123"), 404, "pod not found");
    check(&format!("/exec/default/{web}/other?output=1&command=x"), 500, "container not found (\"other\")");
    check(&format!("/exec/default/{web}/123/main?output=1"), 500, "container not found (\"main\")");
    check("/exec/default", 404, "404");
    assert_eq!(bench.refused("PUT", &format!("/exec/default/{web}/main?output=1")).0, 405);
    // An error of the runtime's streaming server.
    check(&bench.exec("status/403"), 403, "reason");
    check(&bench.exec("status/200"), 500, "invalid upgrade response: status code 200");
    check(&bench.exec("garbage"), 500, "no HTTP response");
    // An error of the runtime.
    for (kind, status) in [(Kind::NotFound, 404), (Kind::ResourceExhausted, 429), (Kind::Unknown, 500)] {
        bench.node.fake.fail_times("Exec", 1, kind, "no luck");
        check(&bench.exec("echo"), status, "desc = no luck");
    }
    bench.node.fake.with_state(|state| state.streams = "http://127.0.0.1:1".to_owned());
    check(&bench.exec("echo"), 500, "error dialing backend");
    // Without an upgrade.
    let mut stream = bench.connect();
    write!(stream, "POST {} HTTP/1.1\r\nHost: x\r\n\r\n", bench.exec("echo")).unwrap();
    assert_eq!(read_response(stream), (500, "Upgrade request required\n".to_owned()));
    bench.node.finish();

    let bench = StreamFixture::with(json!({"enableDebuggingHandlers": false}));
    assert_eq!(
        bench.refused("POST", &bench.exec("echo")),
        (405, "Debug endpoints are disabled.\n".to_owned())
    );
    bench.node.finish();
}

#[test]
fn idle_streams_use_one_thread_each_and_leak_nothing() {
    let bench = StreamFixture::start();
    let before = bench.node.usage().unwrap();
    // As many as the local socket accepts.
    let open: Vec<UnixStream> = (0..20).map(|_| bench.open(&bench.exec("wait"))).collect();
    // The threads that opened them may take a moment to end.
    wait_until("a thread for each", LIMIT, || bench.node.usage().unwrap().threads <= before.threads + 20 + 4);
    // Some clients end the stream, some drop the connection.
    for (number, stream) in open.iter().enumerate() {
        if number % 2 == 0 {
            stream.shutdown(Shutdown::Write).unwrap();
        }
    }
    drop(open);
    process_usage::assert_back_to(before, bench.node.pid(), u64::MAX);
    // A stop does not wait for streams.
    let mut stream = bench.open(&bench.exec("wait"));
    let StreamFixture { mut node, streams } = bench;
    node.stop_agent();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty());
    drop(streams);
    node.start_agent();
    wait_until("the agent to answer", LIMIT, || node.try_pods().is_some());
    node.finish();
}
