use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::*;
use crate::server::node::tests::Fixture;

/// Reads a body that arrives in one piece, at the end of which the client sends nothing more.
fn body(head: &str, raw: &[u8]) -> (Result<Vec<u8>, u16>, String) {
    let (mut client, server) = UnixStream::pair().unwrap();
    let (_end, shutdown) = UnixStream::pair().unwrap();
    server.set_nonblocking(true).unwrap();
    let mut connection = Connection::new(Socket::Unix(server), Arc::new(shutdown));
    client.write_all(raw).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let head = RequestHead::parse(format!("{head}\r\n\r\n").as_bytes()).unwrap();
    let outcome = read_body(&mut connection, &head).map_err(|none| match none {
        NoRequest::Rejected(RequestError(status, _)) => status,
        NoRequest::Ended | NoRequest::Lost | NoRequest::Moved(_) => 0,
    });
    // The client reads before the close, which may reset the connection if it has unread bytes.
    client.set_nonblocking(true).unwrap();
    let mut sent = Vec::new();
    let _ = client.read_to_end(&mut sent);
    (outcome, String::from_utf8(sent).unwrap())
}

#[test]
fn doubled_slashes_never_leave_the_reader() {
    let read = |listener, method: &str, target: &str| {
        let (mut client, server) = UnixStream::pair().unwrap();
        let (_end, shutdown) = UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        let mut connection = Connection::new(Socket::Unix(server), Arc::new(shutdown));
        let head = format!("{method} {target} HTTP/1.1\r\nHost: n\r\nAuthorization: Bearer x\r\n\r\n");
        client.write_all(head.as_bytes()).unwrap();
        match read_head(&mut connection, listener, Some(Instant::now()), HEAD_BYTES) {
            Ok(head) => format!("{} is served", head.raw_target),
            Err(NoRequest::Moved(location)) => {
                redirect(connection, &location);
                let mut response = String::new();
                client.read_to_string(&mut response).unwrap();
                response
            }
            Err(NoRequest::Rejected(RequestError(status, _))) => status.to_string(),
            Err(_) => "lost".to_owned(),
        }
    };
    for (target, expected) in [
        ("//pods", "/pods"),
        ("/exec//default/p/c?command=ls", "/exec/default/p/c?command=ls"),
        ("//run/default/p/c?cmd=ls", "/run/default/p/c?cmd=ls"),
    ] {
        for listener in [ListenerKind::Healthz, ListenerKind::ReadOnly, ListenerKind::Main] {
            for method in ["GET", "POST", "PUT"] {
                let response = read(listener, method, target);
                assert!(response.starts_with("HTTP/1.1 307 Temporary Redirect\r\n"), "{response}");
                assert!(response.contains(&format!("\r\nLocation: {expected}\r\n")), "{response}");
                assert!(response.contains("\r\nConnection: close\r\n"), "{response}");
            }
        }
    }
    for listener in [ListenerKind::Local, ListenerKind::Registry] {
        assert_eq!(read(listener, "GET", "//pods"), "400");
        // An element of a path of the registry may be empty.
        assert_eq!(read(listener, "GET", "/v2//library"), "/v2//library is served");
    }
}

#[test]
fn bodies_are_read_up_to_their_limit() {
    let post = "POST /x HTTP/1.1\r\nHost: n\r\n";
    let length = |length: usize| format!("{post}Content-Length: {length}");
    let chunked = format!("{post}Transfer-Encoding: chunked");
    let most = usize::try_from(BODY_BYTES).unwrap();
    let full = vec![b'x'; most];
    for (head, raw, expected) in [
        (length(0), &b"GET"[..], Ok(&b""[..])),
        (length(2), b"abGET", Ok(b"ab")),
        (length(3), b"ab", Err(0)),
        (length(most), &full, Ok(&full)),
        (length(most + 1), &full, Err(413)),
        (chunked.clone(), b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\nGET", Ok(b"abc")),
        (chunked.clone(), b"ffffffff\r\n", Err(413)),
        (chunked.clone(), b"2001\r\n", Err(413)),
        (chunked.clone(), &[b"1\r\na\r\n2000\r\n", full.as_slice()].concat(), Err(413)),
        (chunked.clone(), b"2;x=y\r\nab\r\n0\r\n\r\n", Err(400)),
        (chunked.clone(), b"0\r\nGET / HTTP/1.1\r\n", Err(400)),
        (chunked, b"2\r\na", Err(0)),
    ] {
        let (outcome, sent) = body(&head, raw);
        assert_eq!(outcome, expected.map(<[u8]>::to_vec), "{head:?}");
        assert_eq!(sent, "", "{head:?}");
    }
}

#[test]
fn client_that_waits_for_it_gets_a_100_once() {
    let head = "POST /x HTTP/1.1\r\nHost: n\r\nExpect: 100-continue\r\nContent-Length: 2";
    assert_eq!(body(head, b"ab"), (Ok(b"ab".to_vec()), "HTTP/1.1 100 Continue\r\n\r\n".to_owned()));
    assert_eq!(body(&head.replace("HTTP/1.1", "HTTP/1.0"), b"ab"), (Ok(b"ab".to_vec()), String::new()));
}

/// What a client of the read-only port receives for these bytes.
fn response_to(raw: &[u8]) -> String {
    let fixture = Fixture::new(|_| {});
    let (context, _end) = Context::alone(fixture.node.clone());
    let (mut client, server) = UnixStream::pair().unwrap();
    server.set_nonblocking(true).unwrap();
    client.write_all(raw).unwrap();
    let connection = Connection::new(Socket::Unix(server), Arc::clone(&context.shutdown));
    client.shutdown(Shutdown::Write).unwrap();
    serve(connection, ListenerKind::ReadOnly, &context);
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn connection_without_tls_serves_one_request() {
    for (raw, start) in [
        (
            "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
            "HTTP/1.1 200 OK\r\n",
        ),
        ("HEAD /healthz HTTP/1.0\r\n\r\n", "HTTP/1.1 200 OK\r\n"),
        ("GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "HTTP/1.1 200 OK\r\n"),
        ("POST /healthz HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 405 Method Not Allowed\r\n"),
        ("GET /healthz HTTP/1.1\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"),
        ("GET /healthz HTTP/1.0\r\nContent-Length: 1\r\n\r\nx", "HTTP/1.1 413 Payload Too Large\r\n"),
        ("GET /healthz HTTP/2.0\r\n\r\n", "HTTP/1.1 505 HTTP Version Not Supported\r\n"),
        ("GET /healthz HTTP/1.0\n\n", "HTTP/1.1 400 Bad Request\r\n"),
    ] {
        let text = response_to(raw.as_bytes());
        assert!(text.starts_with(start), "{raw:?}: {text}");
        assert_eq!(text.matches("Server: coracle\r\n").count(), 1, "{text}");
        assert_eq!(text.ends_with("\r\n\r\n"), raw.starts_with("HEAD"), "{text}");
        assert!(!text.contains("keep-alive"), "{text}");
        assert_eq!(
            text.contains("Connection: close"),
            !raw.contains("HTTP/1.0\r\n") || !text.contains("200")
        );
    }
    let long = format!("GET / HTTP/1.0\r\nX: {}\r\n\r\n", "x".repeat(SHORT_HEAD_BYTES));
    assert!(response_to(long.as_bytes()).starts_with("HTTP/1.1 431 "));
    assert_eq!(response_to(b"GET / HT"), "", "half a head is no request");
}

#[test]
fn tls_handshake_without_tls_is_rejected_at_once() {
    // The head of a record that says nothing yet, without a line feed.
    let text = response_to(b"\x16\x03\x01\x02\x00");
    assert!(text.starts_with("HTTP/1.1 400 ") && text.contains("HTTPS request"), "{text}");
}

#[test]
fn rejected_method_names_the_allowed_one() {
    let text = response_to(b"PUT /healthz HTTP/1.0\r\n\r\n");
    assert!(text.contains("\r\nAllow: GET\r\n") && text.ends_with("\r\n\r\nGET only\n"), "{text}");
}
