//! Against scripted servers on the loopback interface.

use super::*;
use crate::transport::testing::plain_endpoint as plain;
use crate::util::stop::StopToken;
use crate::util::threads::{OnDeath, Running, Stack, spawn};
use crossbeam_channel::{Receiver, Sender, bounded};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fmt::Write as _;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

const CA: &[u8] = include_bytes!("../tls/testdata/ca.pem");
const OTHER_CA: &[u8] = include_bytes!("../tls/testdata/other.pem");
const SOON: Duration = Duration::from_secs(20);

fn secure(port: u16) -> Endpoint {
    Endpoint { https: true, roots: Roots::Pem(CA.to_vec()), ..plain(port) }
}

fn identity() -> Identity {
    Identity {
        certificate: include_bytes!("../tls/testdata/client.pem").to_vec().into(),
        key: include_bytes!("../tls/testdata/client.key").to_vec().into(),
    }
}

fn get(path: &str) -> Request<'_> {
    let deadline = Instant::now() + SOON;
    Request {
        method: "GET",
        path,
        headers: &[("X-Key", "a b")],
        body: None,
        deadline,
        kind: RequestKind::Call,
        is_urgent: false,
    }
}

fn text(response: Response) -> String {
    let mut response = response;
    let mut text = String::new();
    response.body.read_to_string(&mut text).unwrap();
    text
}

fn short(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// A server with a list of responses per connection: it sends the n-th to the n-th request, and
/// then closes the connection. Returns the requests with the number of the connection.
struct Server {
    port: u16,
    requests: Receiver<(usize, String)>,
    _running: Running,
}

fn head_of(stream: &mut impl Read) -> Option<String> {
    let mut request = Vec::new();
    let mut byte = [0];
    while !request.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        request.push(byte[0]);
    }
    String::from_utf8(request).ok()
}

/// The length of a body that a server reads in part only.
const LONG: u64 = 32 << 20;

fn respond(
    stream: &mut (impl Read + Write),
    number: usize,
    responses: &[Vec<u8>],
    request_sender: &Sender<(usize, String)>,
) {
    for response in responses {
        let Some(request) = head_of(stream) else { return };
        if stream.write_all(response).and_then(|()| stream.flush()).is_err() {
            return;
        }
        let is_long = request.to_ascii_lowercase().contains(&format!("content-length: {LONG}\r\n"));
        let _ = request_sender.send((number, request));
        if is_long {
            // More than the buffers of both sides hold: the client has the response before it is reset. The
            // kernel may lose one that is followed by a reset at once.
            let _ = std::io::copy(&mut stream.take(LONG / 2), &mut std::io::sink());
        }
        if response.is_empty() {
            // No response at all: wait until the client closes the connection.
            let _ = stream.read(&mut [0]);
        }
    }
}

fn serve(connections: Vec<Vec<Vec<u8>>>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (request_sender, requests) = bounded(100);
    let running = spawn("t/server", Stack::Small, OnDeath::Unsupervised, move |stop| {
        for (number, responses) in connections.into_iter().enumerate() {
            let (mut stream, _) = listener.accept().unwrap();
            if stop.is_stopped() {
                return;
            }
            respond(&mut stream, number, &responses, &request_sender);
        }
    })
    .unwrap()
    .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
    Server { port, requests, _running: running }
}

#[test]
fn connections_are_reused_and_replaced() {
    let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n".to_vec();
    let closing =
        b"HTTP/1.1 503 No\r\nConnection: close\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n".to_vec();
    let server =
        serve(vec![vec![short("one"), chunked, closing], vec![short("x"), short("y")], vec![short("z")]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let breaker = Breaker::default();
    assert_eq!(text(connections.send(&get("/a?b=c"), &breaker).unwrap()), "one");
    assert_eq!(text(connections.send(&get("/b"), &breaker).unwrap()), "ok");
    let response = connections.send(&get("/c"), &breaker).unwrap();
    assert_eq!((response.status, response.retry_after.as_deref()), (503, Some("3")));
    drop(response);
    assert_eq!(text(connections.send(&get("/d"), &breaker).unwrap()), "x");
    // A body that is not read to its end costs the connection.
    drop(connections.send(&get("/e"), &breaker).unwrap());
    assert_eq!(text(connections.send(&get("/f"), &breaker).unwrap()), "z");
    let requests: Vec<(usize, String)> =
        (0..6).map(|_| server.requests.recv_timeout(SOON).unwrap()).collect();
    assert_eq!(requests.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 2]);
    assert_eq!(
        requests[0].1,
        format!("GET /a?b=c HTTP/1.1\r\nhost: 127.0.0.1:{}\r\nx-key: a b\r\n\r\n", server.port)
    );
}

#[test]
fn idle_connections_can_be_dropped() {
    let server = serve(vec![vec![short("one"), short("two")], vec![short("three")]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let breaker = Breaker::default();
    text(connections.send(&get("/"), &breaker).unwrap());
    let open = connections.send(&get("/"), &breaker).unwrap();
    connections.retire();
    assert_eq!(text(open), "two", "connections in use continue");
    assert_eq!(text(connections.send(&get("/"), &breaker).unwrap()), "three");
    let numbers: Vec<usize> = (0..3).map(|_| server.requests.recv_timeout(SOON).unwrap().0).collect();
    assert_eq!(numbers, [0, 0, 1]);
}

#[test]
fn a_get_is_retried_after_the_server_closed_the_connection() {
    // The connection is closed when the second request is sent.
    let server = serve(vec![vec![short("one"), b"".to_vec()], vec![short("two")]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let breaker = Breaker::default();
    text(connections.send(&get("/"), &breaker).unwrap());
    // The scripted server waits for a byte after its empty response: a POST gives it one.
    let post = Request { method: "POST", body: Some(("text/plain", b"x")), ..get("/") };
    assert!(matches!(connections.send(&post, &breaker), Err(DialError::Eof | DialError::Broken { .. })));
    assert_eq!(text(connections.send(&get("/"), &breaker).unwrap()), "two");
}

#[test]
fn get_on_a_connection_that_the_server_closes_is_sent_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let _server = spawn("t/server", Stack::Small, OnDeath::Unsupervised, move |_| {
        for responses in [["one", ""], ["two", "three"]] {
            let (mut stream, _) = listener.accept().unwrap();
            for response in responses {
                let _ = head_of(&mut stream);
                if response.is_empty() {
                    break;
                }
                stream.write_all(&short(response)).unwrap();
            }
        }
    })
    .unwrap();
    let connections = Connections::new(&plain(port)).unwrap();
    for expected in ["one", "two", "three"] {
        assert_eq!(text(connections.send(&get("/"), &Breaker::default()).unwrap()), expected);
    }
}

#[test]
fn number_of_interim_responses_is_limited() {
    let interim = "HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n";
    let response = |count| [interim.repeat(count).into_bytes(), short(interim)].concat();
    let server = serve(vec![vec![response(100), response(100), response(101)]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    for _ in 0..2 {
        assert_eq!(text(connections.send(&get("/"), &Breaker::default()).unwrap()), interim);
    }
    let outcome = connections.send(&get("/"), &Breaker::default()).map(|response| response.status);
    assert_eq!(outcome, Err(DialError::Malformed("too many 1xx informational responses".to_owned())));
}

#[test]
fn response_before_the_whole_body_was_sent_is_read() {
    let refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig".to_vec();
    // The server closes the connection without reading the rest.
    let body = vec![0; usize::try_from(LONG).unwrap()];
    let post = Request { method: "POST", body: Some(("text/plain", &body)), ..get("/") };
    let with_certificate = |port| Endpoint { identity: Some(identity()), ..secure(port) };
    let plainly = serve(vec![vec![refusal.clone()]]);
    let securely = serve_tls(1, vec![refusal]);
    for endpoint in [plain(plainly.port), with_certificate(securely.port)] {
        let connections = Connections::new(&endpoint).unwrap();
        let response = connections.send(&post, &Breaker::default()).unwrap();
        assert_eq!((response.status, text(response)), (413, "big".to_owned()), "https: {}", endpoint.https);
    }
}

#[test]
fn request_of_which_nothing_was_sent_is_sent_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let _server = spawn("t/server", Stack::Small, OnDeath::Unsupervised, move |_| {
        // Both stay open until the end.
        let mut streams = Vec::new();
        for body in ["one", "two"] {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = head_of(&mut stream);
            let _ = stream.write_all(&short(body));
            streams.push(stream);
        }
    })
    .unwrap()
    .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
    let connections = Connections::new(&plain(port)).unwrap();
    let breaker = Breaker::default();
    let first = connections.send(&Request { kind: RequestKind::Stream, ..get("/") }, &breaker).unwrap();
    let streams = breaker.streams();
    assert_eq!(text(first), "one");
    // As after a reset that arrives when the connection was found open.
    streams.end_sending();
    let post = Request { method: "POST", body: Some(("text/plain", b"x")), ..get("/") };
    assert_eq!(connections.send(&post, &breaker).map(text), Ok("two".to_owned()));
}

fn redirect(status: u16, location: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n").into_bytes()
}

#[test]
fn redirects_keep_credentials_on_the_same_host_only() {
    let other = serve(vec![vec![short("other")]]);
    // 127.0.0.1 by another name.
    let away = format!("http://localhost:{}/there", other.port);
    let server = serve(vec![vec![redirect(302, "/here"), redirect(307, &away)]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let request = Request { headers: &[("Authorization", "Bearer secret")], ..get("/") };
    assert_eq!(text(connections.send(&request, &Breaker::default()).unwrap()), "other");
    for path in ["/", "/here"] {
        let (number, head) = server.requests.recv_timeout(SOON).unwrap();
        assert_eq!(number, 0, "the connection is kept");
        assert!(head.starts_with(&format!("GET {path} HTTP/1.1\r\n")), "{head}");
        assert!(head.contains("authorization: Bearer secret\r\n"), "{head}");
    }
    let (_, head) = other.requests.recv_timeout(SOON).unwrap();
    assert!(head.starts_with("GET /there HTTP/1.1\r\n") && !head.contains("secret"), "{head}");
}

#[test]
fn request_after_a_redirect_is_broken_off_too() {
    let server = serve(vec![vec![redirect(302, "/here"), Vec::new()]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let breaker = Breaker::default();
    let child = breaker.child();
    let (result_sender, result_receiver) = bounded(1);
    let _asking = spawn("t/ask", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = result_sender.send(connections.send(&get("/"), &child).map(|response| response.status));
    })
    .unwrap();
    for _ in 0..2 {
        server.requests.recv_timeout(SOON).unwrap();
    }
    breaker.trip();
    assert_eq!(result_receiver.recv_timeout(SOON).unwrap(), Err(DialError::Stopped));
}

#[test]
fn redirects_that_cannot_be_followed_are_errors() {
    let server = serve(vec![vec![redirect(302, "/"); 11]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let outcome = connections.send(&get("/"), &Breaker::default()).map(|response| response.status);
    assert_eq!(outcome, Err(DialError::TooManyRedirects));
    // The body of the redirect ends after its last chunk, without an empty line.
    let cut = b"HTTP/1.1 302 Found\r\nLocation: /\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n".to_vec();
    let server = serve(vec![vec![cut], vec![redirect(308, "/b"), redirect(302, "socks5://127.0.0.1/")]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let post = Request { method: "POST", body: Some(("text/plain", b"")), ..get("/") };
    for (request, expected) in [
        (get("/"), DialError::Malformed("the response cannot be read".to_owned())),
        (post, DialError::Request("a redirect of a request with a body is not followed".to_owned())),
        (get("/"), DialError::Request("unsupported protocol scheme \"socks5\"".to_owned())),
    ] {
        let outcome = connections.send(&request, &Breaker::default()).map(|response| response.status);
        assert_eq!(outcome, Err(expected));
    }
}

#[test]
fn long_heads_and_bodies_are_sent_and_received() {
    let long = "x".repeat(20_000);
    let response =
        |length| format!("HTTP/1.1 200 OK\r\nA: {}\r\nContent-Length: 2\r\n\r\nok", "a".repeat(length));
    let server = serve(vec![vec![response(20_000).into_bytes()], vec![response(70_000).into_bytes()]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let breaker = Breaker::default();
    let path = format!("/{long}");
    let request = Request { headers: &[("A", &long), ("B", &long)], ..get(&path) };
    assert_eq!(text(connections.send(&request, &breaker).unwrap()), "ok");
    let (_, head) = server.requests.recv_timeout(SOON).unwrap();
    assert!(head.starts_with(&format!("GET {path} HTTP/1.1\r\n")), "{}", head.len());
    assert!(head.contains(&format!("\r\na: {long}\r\n")) && head.contains(&format!("\r\nb: {long}\r\n")));
    let outcome = connections.send(&get("/"), &breaker).map(|response| response.status);
    assert!(matches!(outcome, Err(DialError::Malformed(_))), "{outcome:?}");
}

#[test]
fn responses_without_an_end_are_errors() {
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let long = "x".repeat(100_000);
    for malformed in [
        format!("HTTP/1.1 200 OK\r\n{}", "A: b\r\n".repeat(100_000)),
        format!("HTTP/1.1 200 OK\r\nA: {long}"),
        format!("HTTP/1.1 200 {long}"),
        "\r\n".repeat(100_000),
        format!("HTTP/1.1 302 Found\r\nA: {long}"),
        format!("HTTP/1.1 103 Early\r\nLink: {long}\r\n\r\n"),
        "HTTP/1.1 100 Continue\r\n\r\n".repeat(10_000),
        format!("{chunked}1;{long}"),
        format!("{chunked}{}1\r\nx", "0".repeat(100_000)),
        format!("{chunked}0\r\nA: {long}"),
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\nx".to_owned(),
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nx".to_owned(),
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx".to_owned(),
    ] {
        let start: String = malformed.chars().take(60).collect();
        let server = serve(vec![vec![malformed.into_bytes()]]);
        let connections = Connections::new(&plain(server.port)).unwrap();
        let outcome = connections.send(&get("/"), &Breaker::default()).and_then(|mut response| {
            let outcome = std::io::copy(&mut response.body, &mut std::io::sink());
            outcome.map(drop).map_err(|error| response.body.failed(&error))
        });
        let error = outcome.expect_err(&start);
        assert!(!matches!(error, DialError::Timeout | DialError::BodyTimeout), "{start:?}: {error}");
    }
}

#[test]
fn only_plain_bodies_are_read() {
    let zipped = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b".to_vec();
    let plainly = b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: 2\r\n\r\nok".to_vec();
    let server = serve(vec![vec![zipped], vec![plainly]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let outcome = connections.send(&get("/"), &Breaker::default()).map(|response| response.status);
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("content encoding \"gzip\" was not requested"), "{error}");
    assert_eq!(text(connections.send(&get("/"), &Breaker::default()).unwrap()), "ok");
}

#[test]
fn bytes_after_a_body_are_no_response_to_the_next_request() {
    let twice = [short("one"), short("forged")].concat();
    let server = serve(vec![vec![twice], vec![short("two")]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    for expected in ["one", "two"] {
        assert_eq!(text(connections.send(&get("/"), &Breaker::default()).unwrap()), expected);
    }
}

#[test]
fn body_that_failed_stays_failed() {
    let cut = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n5\r\nhal".to_vec();
    let server = serve(vec![vec![cut]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let mut body = connections.send(&get("/"), &Breaker::default()).unwrap().body;
    for _ in 0..3 {
        let error = body.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(body.failed(&error), DialError::Body("unexpected EOF".to_owned()));
    }
}

/// Sends a request on a thread, trips the breaker once the server has the request (and, if it responds,
/// the client the head of the response), and returns the outcome and how long it took.
fn broken_off(server: &Server, kind: RequestKind, responds: bool, streams: bool) -> (DialError, Duration) {
    let connections = Connections::new(&plain(server.port)).unwrap();
    let breaker = Breaker::default();
    let child = breaker.child();
    let (result_sender, result_receiver) = bounded(1);
    let (head_sender, head_receiver) = bounded(1);
    let _asking = spawn("t/ask", Stack::Large, OnDeath::Unsupervised, move |_| {
        let request = Request { kind, ..get("/") };
        let outcome = connections.send(&request, &child).and_then(|mut response| {
            let _ = head_sender.send(());
            let mut all = Vec::new();
            let outcome = response.body.read_to_end(&mut all);
            outcome.map(drop).map_err(|error| response.body.failed(&error))
        });
        let _ = result_sender.send((outcome, Instant::now()));
    })
    .unwrap();
    server.requests.recv_timeout(SOON).unwrap();
    if responds {
        // Before the head of the response there is another test.
        head_receiver.recv_timeout(SOON).unwrap();
    }
    // Gives the client time to block in its read.
    let _ = result_receiver.recv_timeout(Duration::from_millis(50));
    let start = Instant::now();
    if streams {
        breaker.streams().break_off();
    } else {
        breaker.trip();
    }
    let (outcome, end) = result_receiver.recv_timeout(SOON).unwrap();
    (outcome.unwrap_err(), end.saturating_duration_since(start))
}

#[test]
fn blocked_reads_are_broken_off_at_once() {
    let watch = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n".to_vec();
    for (first, streams, expected) in [
        (Vec::new(), false, DialError::Stopped),
        (watch.clone(), false, DialError::Stopped),
        (watch, true, DialError::Body("unexpected EOF".to_owned())),
    ] {
        let responds = !first.is_empty();
        let server = serve(vec![vec![first, Vec::new()]]);
        let (error, time) = broken_off(&server, RequestKind::Stream, responds, streams);
        assert_eq!(error, expected);
        // Takes milliseconds, unless the machine is busy; without the breaker, all of the time
        // limit.
        assert!(time < SOON / 2, "{time:?}");
    }
}

/// A pod that is to be stopped does not wait for a response to a request of its own.
#[test]
fn stop_signal_ends_requests_that_wait_for_a_response_or_for_a_connection() {
    let server = serve(vec![vec![Vec::new()]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let (source, stop) = crate::util::stop::pair();
    let breaker = Breaker::default().with_stop(&stop);
    let (result_sender, results) = bounded(2);
    let mut asking = Vec::new();
    for number in 0..2 {
        let (own, breaker, result_sender) = (connections.clone(), breaker.clone(), result_sender.clone());
        let ask = move |_: StopToken| {
            let request = Request { deadline: Instant::now() + SOON * 100, ..get("/") };
            let _ = result_sender.send(own.send(&request, &breaker).map(|response| response.status));
        };
        asking.push(spawn("t/ask", Stack::Large, OnDeath::Unsupervised, ask).unwrap());
        if number == 0 {
            server.requests.recv_timeout(SOON).unwrap();
            // No further connection is opened.
            connections.shared.client.openings().set_limit(0);
        }
    }
    let end = Instant::now() + SOON;
    while connections.shared.client.openings().waiting() == 0 {
        assert!(Instant::now() < end, "the second request does not wait");
        let _ = StopToken::never().wait(Duration::from_millis(1));
    }
    drop(source);
    for _ in 0..2 {
        assert_eq!(results.recv_timeout(SOON).unwrap(), Err(DialError::Stopped));
    }
    drop(asking);
}

#[test]
fn a_blocked_write_is_broken_off_too() {
    // The body is longer than the buffers of both sides, and no server reads it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connections = Connections::new(&plain(listener.local_addr().unwrap().port())).unwrap();
    let breaker = Breaker::default();
    let child = breaker.child();
    let (result_sender, result_receiver) = bounded(1);
    let _asking = spawn("t/ask", Stack::Large, OnDeath::Unsupervised, move |_| {
        let body = vec![0; 32 << 20];
        let post = Request { method: "POST", body: Some(("text/plain", &body)), ..get("/") };
        let _ = result_sender.send(connections.send(&post, &child).map(|response| response.status));
    })
    .unwrap();
    assert!(result_receiver.recv_timeout(Duration::from_millis(50)).is_err(), "it must wait");
    breaker.trip();
    assert_eq!(result_receiver.recv_timeout(SOON).unwrap(), Err(DialError::Stopped));
}

#[test]
fn a_connect_is_broken_off_too() {
    // The server's queue of connections is full: the next one is not accepted.
    let fd =
        rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&fd, &std::net::SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    rustix::net::listen(&fd, 0).unwrap();
    let listener = TcpListener::from(fd);
    let address = listener.local_addr().unwrap();
    let wait = Duration::from_millis(500);
    let _full: Vec<_> = (0..4).map_while(|_| TcpStream::connect_timeout(&address, wait).ok()).collect();
    let breaker = Breaker::default();
    let child = breaker.child();
    let (result_sender, result_receiver) = bounded(1);
    let _asking = spawn("t/ask", Stack::Large, OnDeath::Unsupervised, move |_| {
        let outcome = Connections::new(&plain(address.port())).unwrap().send(&get("/"), &child);
        let _ = result_sender.send(outcome.map(|response| response.status));
    })
    .unwrap();
    assert!(result_receiver.recv_timeout(Duration::from_millis(50)).is_err(), "it must wait");
    breaker.trip();
    // A request that reached its deadline would fail with another error.
    assert_eq!(result_receiver.recv_timeout(SOON).unwrap(), Err(DialError::Stopped));
}

#[test]
fn silence_ends_with_the_deadline() {
    let half = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhal".to_vec();
    let server = serve(vec![vec![Vec::new()], vec![half, Vec::new()]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let breaker = Breaker::default();
    let hasty = |millis| Request { deadline: Instant::now() + Duration::from_millis(millis), ..get("/") };
    let outcome = connections.send(&hasty(2000), &breaker).map(|response| response.status);
    assert_eq!(outcome, Err(DialError::Timeout));
    // Enough time for the head to arrive, also on a busy machine.
    let mut response = connections.send(&hasty(4000), &breaker).unwrap();
    let error = response.body.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(response.body.failed(&error), DialError::BodyTimeout);
}

/// A server that sends half of a body, and the rest after a message of the test.
fn serve_halves() -> (Server, Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (request_sender, requests) = bounded(100);
    let (send_rest, rest) = bounded(1);
    let running = spawn("t/halves", Stack::Small, OnDeath::Unsupervised, move |_| {
        let (mut stream, _) = listener.accept().unwrap();
        let Some(request) = head_of(&mut stream) else { return };
        let _ = request_sender.send((0, request));
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst");
        if rest.recv().is_ok() {
            let _ = stream.write_all(b"-last");
        }
    })
    .unwrap()
    .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
    (Server { port, requests, _running: running }, send_rest)
}

#[test]
fn body_that_makes_progress_outlives_the_deadline_of_its_request() {
    let (server, send_rest) = serve_halves();
    let connections = Connections::new(&plain(server.port)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(2);
    let mut response = connections.send(&Request { deadline, ..get("/") }, &Breaker::default()).unwrap();
    response.body.follow_progress(SOON, Instant::now() + SOON * 2);
    let mut first = [0; 5];
    response.body.read_exact(&mut first).unwrap();
    let _ = StopToken::never().wait(deadline.saturating_duration_since(Instant::now()));
    send_rest.send(()).unwrap();
    assert_eq!(text(response), "-last");
}

#[test]
fn silent_body_fails_before_the_deadline_of_its_request() {
    let hour = Duration::from_secs(3600);
    let (server, _send_rest) = serve_halves();
    let connections = Connections::new(&plain(server.port)).unwrap();
    let request = Request { deadline: Instant::now() + hour, ..get("/") };
    let mut response = connections.send(&request, &Breaker::default()).unwrap();
    response.body.follow_progress(Duration::from_millis(100), Instant::now() + hour);
    let error = response.body.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(response.body.failed(&error), DialError::BodyTimeout);
}

#[test]
fn body_that_never_ends_fails_although_it_makes_progress() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let running = spawn("t/endless", Stack::Small, OnDeath::Unsupervised, move |_| {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = head_of(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        while stream.write_all(b"x").is_ok() {}
    })
    .unwrap()
    .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
    let connections = Connections::new(&plain(port)).unwrap();
    let mut response = connections.send(&get("/"), &Breaker::default()).unwrap();
    response.body.follow_progress(SOON * 9, Instant::now() + Duration::from_millis(100));
    let error = std::io::copy(&mut response.body, &mut std::io::sink()).unwrap_err();
    assert_eq!(response.body.failed(&error), DialError::BodyTimeout);
    drop((response, connections, running));
}

#[test]
fn malformed_responses_and_requests_are_errors() {
    let cut = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhal".to_vec();
    let server = serve(vec![vec![b"SSH-2.0-x\r\n\r\n".to_vec()], vec![b"HTTP/1.1 2".to_vec()], vec![cut]]);
    let connections = Connections::new(&plain(server.port)).unwrap();
    let breaker = Breaker::default();
    let send = |request: &Request<'_>| connections.send(request, &breaker).map(|response| response.status);
    assert!(matches!(send(&get("/")), Err(DialError::Malformed(_))));
    assert!(matches!(send(&get("/")), Err(DialError::Eof | DialError::Broken { .. })));
    let mut response = connections.send(&get("/"), &breaker).unwrap();
    let error = response.body.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(response.body.failed(&error), DialError::Body("unexpected EOF".to_owned()));
    assert!(matches!(send(&get("/a b")), Err(DialError::Request(_))));
    let smuggled = Request { headers: &[("Authorization", "Bearer a\r\nX: secret")], ..get("/") };
    let error = send(&smuggled).unwrap_err();
    assert!(matches!(error, DialError::Request(_)) && !error.to_string().contains("secret"), "{error}");
    for host in ["", "no such host", "h\0st"] {
        let endpoint = Endpoint { host: host.to_owned(), ..plain(1) };
        let outcome = Connections::new(&endpoint).unwrap().send(&get("/"), &breaker);
        assert!(outcome.is_err(), "{host:?}");
    }
    let refused =
        Connections::new(&plain(1)).unwrap().send(&get("/"), &breaker).map(|response| response.status);
    assert_eq!(refused.unwrap_err().to_string(), "dial tcp 127.0.0.1:1: connect: connection refused");
}

#[test]
fn lines_come_one_by_one() {
    let body = |chunks: &[&str], end: &str| {
        let mut text = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
        for chunk in chunks {
            let _ = write!(text, "{:x}\r\n{chunk}\r\n", chunk.len());
        }
        (text + end).into_bytes()
    };
    let end = "0\r\n\r\n";
    for (sent, expected) in [
        (
            body(&["one\ntw", "o\n\n\r\n", "three\r\n"], end),
            vec![Some("one"), Some("two"), Some("three"), None],
        ),
        (body(&["one\nhalf"], ""), vec![Some("one"), Some("!unexpected EOF")]),
        (body(&["one\nhalf"], end), vec![Some("one"), Some("!unexpected EOF")]),
        (body(&["0123456789"], end), vec![Some("!line is too long")]),
    ] {
        let server = serve(vec![vec![sent]]);
        let connections = Connections::new(&plain(server.port)).unwrap();
        let response = connections.send(&get("/"), &Breaker::default()).unwrap();
        let mut lines = Lines::new(response.body, 10);
        for expected_line in expected {
            let next = match lines.next_line() {
                Ok(line) => line.map(|line| String::from_utf8(line.to_vec()).unwrap()),
                Err(error) => Some(format!("!{error}")),
            };
            assert_eq!(next.as_deref(), expected_line);
        }
    }
}

/// A TLS server that requires a client certificate. It serves so many connections, as [`serve`] does.
fn serve_tls(connections: usize, responses: Vec<Vec<u8>>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (request_sender, requests) = bounded(100);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(CA).unwrap()).unwrap();
    let clients =
        rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()
            .unwrap();
    let chain = vec![CertificateDer::from_pem_slice(include_bytes!("../tls/testdata/server.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(include_bytes!("../tls/testdata/server.key")).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .unwrap();
    let config = Arc::new(config);
    let running = spawn("t/server", Stack::Large, OnDeath::Unsupervised, move |stop| {
        let mut threads = Vec::new();
        for number in 0..connections {
            let (socket, _) = listener.accept().unwrap();
            if stop.is_stopped() {
                return;
            }
            let connection = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
            let mut stream = rustls::StreamOwned::new(connection, socket);
            let (responses, request_sender) = (responses.clone(), request_sender.clone());
            let served = move |_: StopToken| respond(&mut stream, number, &responses, &request_sender);
            threads.push(spawn("t/served", Stack::Large, OnDeath::Unsupervised, served).unwrap());
        }
    })
    .unwrap()
    .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
    Server { port, requests, _running: running }
}

/// Before a server: reports each connection, and passes on their bytes after a message.
fn hold_back(server: u16) -> (Server, Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (accepted, requests) = bounded(100);
    let (pass_on, passed_on) = bounded(1);
    let running = spawn("t/relay", Stack::Small, OnDeath::Unsupervised, move |stop| {
        let mut copies = Vec::new();
        for number in 0.. {
            let (near, _) = listener.accept().unwrap();
            let _ = accepted.send((number, String::new()));
            if stop.is_stopped() || (number == 0 && passed_on.recv().is_err()) {
                return;
            }
            let far = TcpStream::connect(("127.0.0.1", server)).unwrap();
            for (mut from, mut to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                let copy = move |_: StopToken| {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Both);
                };
                copies.push(spawn("t/copy", Stack::Small, OnDeath::Unsupervised, copy).unwrap());
            }
        }
    })
    .unwrap()
    .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
    (Server { port, requests, _running: running }, pass_on)
}

#[test]
fn client_and_server_certificates_are_verified() {
    let server = serve_tls(8, vec![short("one"), short("two"), Vec::new()]);
    let ask = |endpoint: Endpoint| {
        let connections = Connections::new(&endpoint).unwrap();
        let breaker = Breaker::default();
        let first = connections.send(&get("/"), &breaker)?;
        assert_eq!(text(first), "one");
        connections.send(&get("/"), &breaker).map(text)
    };
    let known = Endpoint { identity: Some(identity()), ..secure(server.port) };
    assert_eq!(ask(known.clone()), Ok("two".to_owned()), "the connection is kept");
    assert_eq!(ask(Endpoint { roots: Roots::Unverified, ..known.clone() }), Ok("two".to_owned()));
    let named = Endpoint { server_name: Some("kubernetes.default".to_owned()), ..known.clone() };
    assert_eq!(ask(named), Ok("two".to_owned()));
    let failure = |endpoint| ask(endpoint).unwrap_err().to_string();
    assert_eq!(
        failure(Endpoint { roots: Roots::Pem(OTHER_CA.to_vec()), ..known.clone() }),
        "tls: failed to verify certificate: x509: certificate signed by unknown authority"
    );
    let wrong = Endpoint { server_name: Some("else.where".to_owned()), ..known.clone() };
    let error = failure(wrong);
    assert!(
        error.starts_with("tls: failed to verify certificate: x509: certificate is valid for "),
        "{error}"
    );
    assert!(error.contains("kubernetes.default") && error.ends_with(", not else.where"), "{error}");
    assert_eq!(failure(secure(server.port)), "tls: remote error: certificate required");
    // TLS to a server without TLS.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let _clear = spawn("t/clear", Stack::Small, OnDeath::Unsupervised, move |_| {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 5]);
        let _ = stream.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n");
        // Closing with unread bytes would discard the response.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    })
    .unwrap();
    assert_eq!(failure(Endpoint { port, ..known }), "tls: first record does not look like a TLS handshake");
}

#[test]
fn a_blocked_tls_read_is_broken_off() {
    let server = serve_tls(1, vec![short("one"), short("two"), Vec::new()]);
    let endpoint = Endpoint { identity: Some(identity()), ..secure(server.port) };
    let connections = Connections::new(&endpoint).unwrap();
    let breaker = Breaker::default();
    text(connections.send(&get("/"), &breaker).unwrap());
    text(connections.send(&get("/"), &breaker).unwrap());
    let child = breaker.child();
    let (result_sender, result_receiver) = bounded(1);
    let _asking = spawn("t/ask", Stack::Large, OnDeath::Unsupervised, move |_| {
        let _ = result_sender.send(connections.send(&get("/"), &child).map(|response| response.status));
    })
    .unwrap();
    for _ in 0..3 {
        server.requests.recv_timeout(SOON).unwrap();
    }
    breaker.trip();
    // A request that reached its deadline would fail with another error.
    assert_eq!(result_receiver.recv_timeout(SOON).unwrap(), Err(DialError::Stopped));
}

/// A server that is too slow for handshakes gets few at the same time.
#[test]
fn requests_wait_while_the_handshake_of_another_one_is_slow() {
    const REQUESTS: usize = 5;
    let server = serve_tls(REQUESTS + 1, vec![short("ok"); REQUESTS]);
    let endpoint = Endpoint { identity: Some(identity()), ..secure(server.port) };
    // It does not go on with the first handshake before the others wait.
    let (relay, pass_on) = hold_back(server.port);
    let connections = Connections::new(&Endpoint { port: relay.port, ..endpoint }).unwrap();
    let openings = |connections: &Connections| connections.shared.client.openings().waiting();
    connections.shared.client.openings().set_limit(1);
    let (result_sender, results) = bounded(REQUESTS);
    let mut asking = Vec::new();
    for number in 0..REQUESTS {
        let (connections, result_sender) = (connections.clone(), result_sender.clone());
        let ask = move |_: StopToken| {
            let request = Request { deadline: Instant::now() + SOON * 3, ..get("/") };
            let _ = result_sender.send(connections.send(&request, &Breaker::default()).map(text));
        };
        asking.push(spawn("t/ask", Stack::Large, OnDeath::Unsupervised, ask).unwrap());
        if number == 0 {
            relay.requests.recv_timeout(SOON).unwrap();
        }
    }
    drop(result_sender);
    let end = Instant::now() + SOON;
    while openings(&connections) < REQUESTS - 1 {
        assert!(Instant::now() < end, "{} requests wait", openings(&connections));
        let _ = StopToken::never().wait(Duration::from_millis(1));
    }
    // An urgent request is not held back: it opens a connection of its own, and fails.
    let deadline = Instant::now() + Duration::from_millis(100);
    let urgent = Request { deadline, is_urgent: true, ..get("/") };
    let outcome = connections.send(&urgent, &Breaker::default()).map(|response| response.status);
    assert!(outcome.is_err(), "{outcome:?}");
    assert_eq!(openings(&connections), REQUESTS - 1);
    let stopped = Breaker::default();
    stopped.trip();
    let outcome = connections.send(&get("/"), &stopped).map(|response| response.status);
    assert_eq!(outcome, Err(DialError::Stopped));
    pass_on.send(()).unwrap();
    for _ in 0..REQUESTS {
        assert_eq!(results.recv_timeout(SOON * 3).unwrap(), Ok("ok".to_owned()));
    }
    drop((asking, connections, relay, server));
}

#[test]
fn certificates_that_cannot_be_used_are_reported() {
    let setup = |endpoint: &Endpoint| match Connections::new(endpoint) {
        Ok(_) => "fine".to_owned(),
        Err(error) => error.to_string(),
    };
    let with = |identity| Endpoint { identity: Some(identity), ..secure(1) };
    let other_key = include_bytes!("../tls/testdata/server.key").to_vec();
    for (endpoint, expected) in [
        (secure(1), "fine"),
        (with(identity()), "fine"),
        (with(Identity { key: other_key.into(), ..identity() }), "client certificate: certificate and key: "),
        (with(Identity { key: b"x".to_vec().into(), ..identity() }), "client certificate: key: "),
        (
            with(Identity { certificate: b"x".to_vec().into(), ..identity() }),
            "client certificate: certificate: no PEM",
        ),
        (Endpoint { roots: Roots::Pem(b"x".to_vec()), ..secure(1) }, "certificate authority: no PEM block"),
        (Endpoint { server_name: Some("a b".to_owned()), ..secure(1) }, "server name \"a b\" is not"),
    ] {
        let message = setup(&endpoint);
        assert!(message.starts_with(expected), "{message}");
    }
    assert_eq!(format!("{:?}", identity()), "Identity { certificate: Secret(..), key: Secret(..) }");
}
