//! Parsing of requests, and translation in both directions. `tests/integration/streams.rs` tests
//! whole streams.

use super::*;
use crate::cri::Streams;
use crate::server::backend::Switches;
use crate::server::testing::SWITCHES;
use crate::transport::{spdy, websocket};

fn head(line: &str, more: &str) -> RequestHead {
    let upgrade = "Connection: keep-alive, Upgrade\r\n";
    RequestHead::parse(format!("{line} HTTP/1.1\r\nHost: a\r\n{upgrade}{more}\r\n\r\n").as_bytes()).unwrap()
}

fn read(line: &str, more: &str) -> Result<StreamRequest, (u16, String)> {
    let rejected = |rejection: Rejection| (rejection.status(), rejection.text().to_owned());
    StreamRequest::read(&head(line, more), SWITCHES).map_err(rejected)
}

const SPDY: &str = "Upgrade: SPDY/3.1";

#[test]
fn paths_and_queries_are_parsed() {
    let request =
        read("POST /exec/ns/p/u1/c?command=ls&command=-l%20x&input=1&output=1&error=1&tty=1", SPDY).unwrap();
    assert_eq!((request.namespace.as_str(), request.pod.as_str()), ("ns", "p"));
    assert_eq!((request.uid.as_str(), request.container.as_str()), ("u1", "c"));
    assert_eq!(request.command, ["ls", "-l x"]);
    // A terminal has one output.
    assert_eq!(request.streams, Streams { stdin: true, stdout: true, stderr: false, tty: true });
    assert_eq!((request.verb, request.mode), (super::request::Verb::Exec, Mode::Splice));
    let request = read("GET /attach/ns/p/c/?error=1&output=true", SPDY).unwrap();
    assert_eq!(request.streams, Streams { stderr: true, ..Streams::default() });
    assert_eq!((request.verb, request.uid.as_str()), (super::request::Verb::Attach, ""));
    let request = read("POST /portForward/ns/p?port=80", SPDY).unwrap();
    assert_eq!((request.verb, request.ports.len()), (super::request::Verb::PortForward, 0));
    for (line, status) in [
        ("POST /exec", 404),
        ("POST /exec/ns/p", 404),
        ("POST /exec/a/b/c/d/e", 404),
        ("POST /portForward/ns", 404),
        ("POST /portForward/ns/p/u/c", 404),
        ("DELETE /exec/a/b/c?output=1", 405),
        ("POST /exec/a/b/c?output=0", 400),
        ("POST /exec/a/b/c", 400),
    ] {
        assert_eq!(read(line, SPDY).map(|_| ()).map_err(|(status, _)| status), Err(status), "{line}");
    }
    let off = Switches { debugging: false, ..SWITCHES };
    let rejection = StreamRequest::read(&head("POST /exec/x", SPDY), off).unwrap_err();
    assert_eq!((rejection.status(), rejection.text()), (405, "Debug endpoints are disabled."));
}

#[test]
fn protocols_decide_the_translation() {
    let websocket = |protocols: &str| format!("Upgrade: websocket\r\nSec-WebSocket-Protocol: {protocols}");
    let exec = |more: &str| read("GET /exec/a/b/c?output=1", more).unwrap().mode;
    let forward = |more: &str| read("GET /portForward/a/b", more).map(|request| request.mode);
    assert_eq!(exec(SPDY), Mode::Splice);
    assert_eq!(exec(&websocket("v5.channel.k8s.io, v4.channel.k8s.io")), Mode::Channels);
    assert_eq!(exec(&websocket("v4.channel.k8s.io")), Mode::Splice);
    assert_eq!(
        forward(&websocket("SPDY/3.1+portforward.k8s.io")),
        Ok(Mode::Tunnel(vec!["portforward.k8s.io".to_owned()]))
    );
    assert_eq!(forward(SPDY), Ok(Mode::Splice));
    let required = "query parameter \"port\" is required".to_owned();
    assert_eq!(forward(&websocket("v4.channel.k8s.io")), Err((400, required)));
    let off = Switches { websockets: false, ..SWITCHES };
    let v5 = head("GET /exec/a/b/c?output=1", &websocket("v5.channel.k8s.io"));
    assert_eq!(StreamRequest::read(&v5, off).unwrap().mode, Mode::Splice);
    let plain = RequestHead::parse(b"GET /exec/a/b/c?output=1 HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    assert_eq!(StreamRequest::read(&plain, SWITCHES).unwrap().mode, Mode::Plain);
}

#[test]
fn websocket_ports_are_read_from_the_query() {
    let ports = |query: &str| {
        let line = format!("GET /portForward/a/b?{query}");
        read(&line, "Upgrade: websocket\r\nSec-WebSocket-Protocol: v4.channel.k8s.io")
            .map(|request| request.ports)
    };
    assert_eq!(ports("port=80,443&port=1"), Ok(vec![80, 443, 1]));
    for (query, text) in [
        ("port=", "query parameter \"port\" cannot be empty"),
        ("port=80,", "query parameter \"port\" cannot be empty"),
        ("port=0", "port \"0\" must be > 0"),
        (
            "port=%2B80",
            "unable to parse \"+80\" as a port: strconv.ParseUint: parsing \"+80\": invalid syntax",
        ),
        ("port=x", "unable to parse \"x\" as a port: strconv.ParseUint: parsing \"x\": invalid syntax"),
        (
            "port=65536",
            "unable to parse \"65536\" as a port: strconv.ParseUint: parsing \"65536\": value out of range",
        ),
    ] {
        assert_eq!(ports(query), Err((400, text.to_owned())), "{query}");
    }
}

/// A client's message, masked with nothing.
fn message(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    websocket::binary_head(&mut out, bytes.len());
    out[1] |= 0x80;
    out.extend([0; 4]);
    out.extend_from_slice(bytes);
    out
}

/// The messages of a server, each shorter than 126 bytes.
fn messages(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while let [_, length, rest @ ..] = bytes {
        let (message, rest) = rest.split_at(usize::from(*length));
        all.push(message.to_vec());
        bytes = rest;
    }
    all
}

/// The runtime's replies to opened streams.
fn accepted(ids: &[u32]) -> Vec<u8> {
    let reply = |id: &u32| [&[0x80, 3, 0, 2, 0, 0, 0, 4][..], &id.to_be_bytes()].concat();
    ids.iter().flat_map(reply).collect()
}

fn open(streams: Streams) -> (Channels, Buffers) {
    let mut first = Buffers::default();
    let channels = Channels::open(streams, &mut first.client, &mut first.runtime);
    (channels, first)
}

const ALL: Streams = Streams { stdin: true, stdout: true, stderr: true, tty: false };

#[test]
fn channels_become_streams_and_back() {
    let (mut channels, first) = open(ALL);
    assert_eq!(messages(&first.client), [vec![1]], "the client is connected");
    assert!(!channels.accepts_input(), "the runtime drops data before it has accepted a stream");
    let (mut client, mut runtime) = (Vec::new(), Vec::new());
    assert!(channels.handle_runtime_bytes(&accepted(&[1, 3, 5, 7]), &mut client, &mut runtime));
    assert!(channels.accepts_input() && client.is_empty() && runtime.is_empty());
    // In: error 1, stdin 3, stdout 5, stderr 7.
    let mut input = [message(b"\0abc"), message(b"\x04{}"), message(&[255, 0]), message(b"\0late")].concat();
    assert!(channels.handle_client_bytes(&mut input, &mut client, &mut runtime));
    let mut expected = Vec::new();
    spdy::data(&mut expected, 3, b"abc");
    spdy::end(&mut expected, 3);
    assert_eq!(runtime, expected);
    // Out, and the end: the status is sent last.
    let mut output = Vec::new();
    let status = br#"{"status":"Success"}"#;
    spdy::data(&mut output, 5, b"out");
    spdy::data(&mut output, 1, status);
    spdy::end(&mut output, 1);
    spdy::data(&mut output, 7, b"err");
    spdy::end(&mut output, 5);
    assert!(channels.handle_runtime_bytes(&output, &mut client, &mut runtime));
    let mut last = Vec::new();
    spdy::end(&mut last, 7);
    assert!(!channels.handle_runtime_bytes(&last, &mut client, &mut runtime) && channels.is_over());
    assert_eq!(
        messages(&client),
        [b"\x01out".to_vec(), b"\x02err".to_vec(), [&[3], &status[..]].concat(), vec![3, 0xe8]]
    );
}

#[test]
fn lost_runtime_is_an_internal_error() {
    let (mut channels, _) = open(Streams { tty: true, stdin: true, stdout: true, stderr: false });
    let (mut client, mut runtime) = (Vec::new(), Vec::new());
    channels.handle_runtime_bytes(&accepted(&[1, 3, 5, 7]), &mut client, &mut runtime);
    let mut input = message(b"\x04{\"Width\":1,\"Height\":2}");
    assert!(channels.handle_client_bytes(&mut input, &mut client, &mut runtime));
    let mut expected = Vec::new();
    spdy::data(&mut expected, 7, b"{\"Width\":1,\"Height\":2}");
    assert_eq!(runtime, expected, "a terminal's size has its own stream");
    channels.handle_runtime_end(&mut client);
    let text = String::from_utf8_lossy(&client).into_owned();
    assert!(text.contains("\"InternalError\"") && text.contains("error reading from error stream"), "{text}");
    let mut client = Vec::new();
    assert!(Channels::failed("no luck", &mut client).is_over());
    let text = String::from_utf8_lossy(&client).into_owned();
    assert!(text.contains("Internal error occurred: no luck"), "{text}");
}

#[test]
fn malformed_messages_end_the_stream() {
    for bad in [message(&[255]), message(&[255, 9]), message(&[255, 0, 0]), vec![0x82, 1, 0, 0, 0, 0, 0]] {
        let (mut channels, _) = open(ALL);
        let (mut client, mut runtime) = (Vec::new(), Vec::new());
        channels.handle_runtime_bytes(&accepted(&[1, 3, 5, 7]), &mut client, &mut runtime);
        let mut input = bad.clone();
        assert!(!channels.handle_client_bytes(&mut input, &mut client, &mut runtime), "{bad:?}");
        assert!(channels.is_over());
        assert_eq!(messages(&client), [vec![3, 0xe8]]);
    }
    // Unknown channels and empty messages are ignored.
    let (mut channels, _) = open(ALL);
    let (mut client, mut runtime) = (Vec::new(), Vec::new());
    let mut input = [message(b""), message(b"\x07x"), message(b"\x01x"), message(&[255, 4])].concat();
    assert!(channels.handle_client_bytes(&mut input, &mut client, &mut runtime));
    assert!(client.is_empty() && runtime.is_empty());
}

proptest::proptest! {
    #[test]
    fn any_bytes_of_both_sides_are_handled(
        pieces in proptest::collection::vec(
            (proptest::bool::ANY, proptest::collection::vec(proptest::num::u8::ANY, 0..60)), 0..8),
    ) {
        let (mut channels, _) = open(ALL);
        let (mut client, mut runtime) = (Vec::new(), accepted(&[1, 3, 5, 7]));
        for (from_client, mut bytes) in pieces {
            let good = if from_client {
                channels.handle_client_bytes(&mut bytes, &mut client, &mut runtime)
            } else {
                channels.handle_runtime_bytes(&bytes, &mut client, &mut runtime)
            };
            if !good {
                break;
            }
        }
    }
}

#[test]
fn tunnels_forward_bytes_unchanged() {
    let mut tunnel = Tunnel::default();
    let (mut client, mut runtime) = (Vec::new(), Vec::new());
    let mut input = [message(b"some "), message(b"frames")].concat();
    assert!(tunnel.handle_client_bytes(&mut input, &mut client, &mut runtime));
    assert_eq!(runtime, b"some frames");
    Tunnel::handle_runtime_bytes(b"reply", &mut client);
    Tunnel::handle_runtime_end(&mut client);
    assert_eq!(messages(&client), [b"reply".to_vec(), vec![3, 0xe8]]);
}
