use super::*;
use crate::util::stop;
use crate::util::testing::refusing;
use crate::util::threads::{OnDeath, Running, Stack, spawn};
use std::net::TcpListener;
use std::time::Instant;

/// Sends one of `responses` on each connection, and returns the requests. For an empty response the
/// connection stays open until the client closes it.
fn serve(responses: Vec<Vec<u8>>) -> (u16, crossbeam_channel::Receiver<String>, Running) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (tx, rx) = crossbeam_channel::bounded(responses.len());
    let running = spawn("t/server", Stack::Small, OnDeath::Unsupervised, move |_| {
        for response in responses {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut request, mut byte) = (Vec::new(), [0]);
            while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                request.push(byte[0]);
            }
            let _ = stream.write_all(&response);
            let _ = tx.send(String::from_utf8_lossy(&request).into_owned());
            if response.is_empty() {
                let _ = stream.read(&mut byte);
            }
        }
    })
    .unwrap();
    (port, rx, running)
}

fn headers(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn get<'a>(port: u16, path: &'a str, headers: &'a [(String, String)]) -> HttpGet<'a> {
    HttpGet {
        scheme: Scheme::Http,
        host: "127.0.0.1",
        port,
        path,
        headers,
        user_agent: "kube-probe/1.37",
        timeout: Some(Duration::from_secs(20)),
    }
}

fn ok(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn redirect(to: &str) -> Vec<u8> {
    format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 4\r\n\r\ngone").into_bytes()
}

fn never() -> StopToken {
    StopToken::never()
}

#[test]
fn probe_request_equals_that_of_the_go_kubelet() {
    let own = [
        ("host", "app.example"),
        ("X-A", "1"),
        ("x-a", "2"),
        ("Accept", ""),
        ("User-Agent", "mine"),
        ("X-Empty", ""),
    ];
    for (list, expected) in [
        (
            vec![],
            "GET /a?b HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nUser-Agent: kube-probe/1.37\r\nAccept: */*\r\nConnection: close\r\n\r\n",
        ),
        (
            own.to_vec(),
            "GET /a?b HTTP/1.1\r\nHost: app.example\r\nUser-Agent: mine\r\nX-A: 1\r\nx-a: 2\r\nX-Empty: \r\nConnection: close\r\n\r\n",
        ),
        (
            vec![("User-Agent", ""), ("accept", "text/plain")],
            "GET /a?b HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\naccept: text/plain\r\nConnection: close\r\n\r\n",
        ),
    ] {
        let (port, requests, _server) = serve(vec![ok("hi")]);
        let list = headers(&list);
        let response = http_get(&get(port, "/a?b", &list), &never()).unwrap();
        assert_eq!(response, HttpResponse { status: 200, body: b"hi".to_vec() });
        let request = requests.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(request, expected.replace("PORT", &port.to_string()));
    }
}

#[test]
fn redirects_stay_on_the_host() {
    let (port, requests, _server) = serve(vec![redirect("/next?x"), redirect("third"), ok("there")]);
    let list = headers(&[("Host", "app.example")]);
    assert_eq!(http_get(&get(port, "/", &list), &never()).unwrap().body, b"there");
    let mut lines = requests.iter().map(|request| {
        let line =
            |start: &str| request.lines().find(|line| line.starts_with(start)).unwrap_or("").to_owned();
        (line("GET"), line("Host"), line("Referer"))
    });
    let host = "Host: app.example".to_owned();
    assert_eq!(lines.next().unwrap(), ("GET / HTTP/1.1".into(), host.clone(), String::new()));
    let referer = format!("Referer: http://127.0.0.1:{port}/");
    assert_eq!(lines.next().unwrap(), ("GET /next?x HTTP/1.1".into(), host.clone(), referer));
    let referer = format!("Referer: http://127.0.0.1:{port}/next?x");
    assert_eq!(lines.next().unwrap(), ("GET /third HTTP/1.1".into(), host, referer));

    let (port, _requests, _server) = serve(vec![redirect("http://elsewhere.example/")]);
    let response = http_get(&get(port, "/", &[]), &never()).unwrap();
    assert_eq!(response, HttpResponse { status: 302, body: b"gone".to_vec() });

    let (port, _requests, _server) = serve(vec![redirect("/again"); 10]);
    let error = http_get(&get(port, "/", &[]), &never()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("Get \"http://127.0.0.1:{port}/again\": stopped after 10 redirects")
    );

    // A redirect without a location is a response like any other.
    let (port, _requests, _server) = serve(vec![b"HTTP/1.1 302 Found\r\n\r\n".to_vec()]);
    assert_eq!(http_get(&get(port, "/", &[]), &never()).unwrap().status, 302);
}

#[test]
fn long_bodies_are_cut_and_short_ones_are_an_error_of_the_body() {
    let (port, _requests, _server) =
        serve(vec![ok(&"x".repeat(20_000)), b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf".to_vec()]);
    assert_eq!(http_get(&get(port, "/", &[]), &never()).unwrap().body.len(), MAX_BODY_BYTES);
    let error = http_get(&get(port, "/", &[]), &never()).unwrap_err();
    assert!(error.is_body() && error.to_string() == "unexpected EOF", "{error}");
}

#[test]
fn failures_are_worded_as_in_go() {
    let (_refusing, free) = refusing();
    let error = http_get(&get(free, "/x", &[]), &never()).unwrap_err();
    let refused = format!("dial tcp 127.0.0.1:{free}: connect: connection refused");
    assert_eq!(error.to_string(), format!("Get \"http://127.0.0.1:{free}/x\": {refused}"));
    let error = tcp_connect("127.0.0.1", free, Duration::from_secs(5), &never()).unwrap_err();
    assert_eq!(error.to_string(), refused);

    let (port, _requests, _server) = serve(vec![b"SSH-2.0-server\r\n".to_vec()]);
    let error = http_get(&get(port, "/", &[]), &never()).unwrap_err();
    assert!(error.to_string().ends_with("malformed HTTP response \"SSH-2.0-server\""), "{error}");

    let (port, _requests, _server) = serve(vec![Vec::new()]);
    // Enough time for the connection, also on a busy machine.
    let short = HttpGet { timeout: Some(Duration::from_secs(2)), ..get(port, "/", &[]) };
    let error = http_get(&short, &never()).unwrap_err();
    let late = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)";
    assert_eq!(error.to_string(), format!("Get \"http://127.0.0.1:{port}/\": {late}"));

    for (list, expected) in [
        (headers(&[("bad name", "x")]), "net/http: invalid header field name \"bad name\""),
        (headers(&[("X", "a\r\nY: b")]), "net/http: invalid header field value for \"X\""),
        (headers(&[("Host", "a b")]), "http: invalid Host header"),
    ] {
        let error = http_get(&get(free, "/", &list), &never()).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{error}");
    }
}

#[test]
fn names_are_looked_up_and_no_host_is_this_machine() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    for host in ["", "127.0.0.1", "localhost"] {
        tcp_connect(host, port, Duration::from_secs(10), &never()).unwrap();
    }
    for host in ["not a name", "a\0b", &"x".repeat(300)] {
        let error = tcp_connect(host, port, Duration::from_secs(10), &never()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("dial tcp: lookup {host}: ")), "{error}");
    }
}

#[test]
fn stop_token_ends_a_blocked_request() {
    let (port, requests, _server) = serve(vec![Vec::new()]);
    let (source, token) = stop::pair();
    let (tx, rx) = crossbeam_channel::bounded(1);
    let _asking = spawn("t/get", Stack::Small, OnDeath::Unsupervised, move |_| {
        let forever = HttpGet { timeout: None, ..get(port, "/", &[]) };
        let _ = tx.send(http_get(&forever, &token));
    })
    .unwrap();
    requests.recv_timeout(Duration::from_secs(60)).unwrap();
    let before = Instant::now();
    drop(source);
    assert!(rx.recv_timeout(Duration::from_secs(60)).unwrap().unwrap_err().is_stopped());
    assert!(before.elapsed() < Duration::from_secs(30));
}

#[test]
fn https_request_to_a_plain_http_server_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let _server = spawn("t/plain", Stack::Small, OnDeath::Unsupervised, move |_| {
        let (mut stream, _) = listener.accept().unwrap();
        let mut some = [0; 512];
        let _ = stream.read(&mut some);
        let _ = stream.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTPS request\n");
        let _ = stream.shutdown(std::net::Shutdown::Write);
        // Closing with unread bytes would discard the response.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    })
    .unwrap();
    let (tx, rx) = crossbeam_channel::bounded(1);
    // The thread has the stack size of those that make such requests.
    let _asking = spawn("t/get", Stack::Small, OnDeath::Unsupervised, move |_| {
        let _ =
            tx.send(http_get(&HttpGet { scheme: Scheme::Https, ..get(port, "/", &[]) }, &StopToken::never()));
    })
    .unwrap();
    let error = rx.recv_timeout(Duration::from_secs(60)).unwrap().unwrap_err();
    assert!(error.is_plain_http(), "{error}");
}
