//! The node API's port as strangers, callers and attackers meet it.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle::kube::reviews::Reviewer;
use coracle::util::threads::{OnDeath, Stack, spawn};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use crate::support::fake_api::{FakeApi, Fault, What};
use crate::support::node::NODE;
use crate::support::solo::{LONG, Solo};
use crate::support::tls_client::{Authority, Connection, Identity, TlsClient};
use crate::support::wait::{wait_for, wait_until};

/// Written whole, as tools replace such files.
fn replace(path: &Path, text: &str) {
    let beside = path.with_extension("new");
    fs::write(&beside, text).unwrap();
    fs::rename(beside, path).unwrap();
}

/// `good-NAME` is the token of NAME in the group `people`; `readers` may read metrics, and
/// `admins` may do everything.
fn review(asked: &Value) -> Value {
    if asked["kind"] == "TokenReview" {
        let token = asked["spec"]["token"].as_str().unwrap();
        return match token.strip_prefix("good-") {
            Some(name) => {
                let user =
                    json!({"username": name, "uid": "u1", "groups": ["people"], "extra": {"k": ["v"]}});
                json!({"authenticated": true, "user": user})
            }
            None => json!({"authenticated": false}),
        };
    }
    let spec = &asked["spec"];
    let is_in = |group: &str| spec["groups"].as_array().is_some_and(|all| all.contains(&json!(group)));
    let metrics = spec["resourceAttributes"]["verb"] == "get"
        && spec["resourceAttributes"]["subresource"] == "metrics"
        && (is_in("readers") || spec["user"] == "scraper");
    json!({"allowed": is_in("admins") || metrics})
}

/// An agent with a client CA and an API server that reviews.
fn guarded(authority: &Authority, extra: &Value) -> Solo {
    let solo = Solo::prepare(json!({}));
    fs::write(ca_file(&solo), &authority.pem).unwrap();
    let mut config = json!({
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true}},
        "authorization": {"mode": "Webhook"},
    });
    for (key, value) in extra.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config["authentication"]["x509"] = json!({"clientCAFile": ca_file(&solo)});
    solo.configure(config);
    solo.joined(|api| api.review(review))
}

fn ca_file(solo: &Solo) -> PathBuf {
    solo.path("ca.crt")
}

fn client(solo: &Solo, identity: Option<&Identity>) -> TlsClient {
    TlsClient::new(solo.main_port(), identity)
}

fn reviews(solo: &Solo, kind: &str) -> Vec<Value> {
    let all = solo.api().asked().into_iter().map(|asked| asked.body);
    all.filter(|body| body["kind"] == kind).collect()
}

#[test]
fn callers_are_known_by_certificates_and_tokens() {
    let (authority, stranger) = (Authority::new("clients"), Authority::new("clients"));
    let solo = guarded(&authority, &json!({}));
    let unauthorized = |client: &TlsClient, headers: &str| {
        let answer = client.get_with("/metrics", headers);
        assert_eq!((answer.status, answer.body.as_str()), (401, "Unauthorized"), "{headers}");
    };
    let nobody = client(&solo, None);
    unauthorized(&nobody, "");
    assert_eq!(nobody.get("/healthz").status, 401);
    unauthorized(&nobody, "X-Remote-User: admin\r\nX-Remote-Group: admins\r\nImpersonate-User: admin\r\n");
    unauthorized(&nobody, "Authorization: Basic YTpi\r\n");
    unauthorized(&nobody, "Authorization: Bearer bad\r\n");
    unauthorized(&client(&solo, Some(&stranger.issue("admin", &["admins"]))), "");
    unauthorized(&client(&solo, Some(&authority.issue_until("admin", &["admins"], 2020))), "");
    unauthorized(&client(&solo, Some(&authority.issue("", &["admins"]))), "");
    assert_eq!(reviews(&solo, "SubjectAccessReview").len(), 0);

    let reader = client(&solo, Some(&authority.issue("jane", &["readers", "others"])));
    let answer = reader.get("/metrics");
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.head.starts_with("HTTP/1.1 200 OK\r\n"), "{}", answer.head);
    let counted = |line: &str| line.starts_with("kubelet_http_requests_total") && line.contains("readwrite");
    assert!(answer.body.lines().any(counted), "{}", answer.body);
    let asked = reviews(&solo, "SubjectAccessReview").remove(0)["spec"].clone();
    assert_eq!(
        asked["resourceAttributes"],
        json!({"verb": "get", "version": "v1", "resource": "nodes", "subresource": "metrics", "name": NODE})
    );
    assert_eq!(asked["user"], "jane");
    assert_eq!(asked["groups"], json!(["readers", "others", "system:authenticated"]));
    let id = &asked["extra"]["authentication.kubernetes.io/credential-id"][0];
    assert!(id.as_str().unwrap().starts_with("X509SHA256="), "{asked}");

    // The text of a refusal, and that HEAD is a right of its own.
    let answer = reader.get("/pods");
    let text = "Forbidden (user=jane, verb=get, resource=nodes, subresource(s)=[pods proxy])\n";
    assert_eq!((answer.status, answer.body.as_str()), (403, text));
    let answer = reader.send("HEAD /metrics HTTP/1.1\r\nHost: n\r\n\r\n");
    assert_eq!((answer.status, answer.body.as_str()), (403, ""));

    // Tokens; one review is enough for many requests.
    for _ in 0..3 {
        assert_eq!(nobody.get_by("/metrics", "good-scraper").status, 200);
    }
    let answer = nobody.get_by("/metrics", "good-other");
    let text = "Forbidden (user=other, verb=get, resource=nodes, subresource(s)=[metrics])\n";
    assert_eq!((answer.status, answer.body.as_str()), (403, text));
    let tokens = reviews(&solo, "TokenReview");
    assert_eq!(tokens.iter().filter(|body| body["spec"]["token"] == "good-scraper").count(), 1);
    let spec = reviews(&solo, "SubjectAccessReview").pop().unwrap()["spec"].clone();
    assert_eq!(spec["groups"], json!(["people", "system:authenticated"]));
    assert_eq!((&spec["uid"], &spec["extra"]), (&json!("u1"), &json!({"k": ["v"]})));
    // A token counts beside a certificate that does not.
    let odd = client(&solo, Some(&stranger.issue("admin", &["admins"])));
    assert_eq!(odd.get_by("/metrics", "good-scraper").status, 200);

    // One connection for many requests, whole and in chunks, sent ahead or not.
    let admin = client(&solo, Some(&authority.issue("root", &["admins"])));
    let mut connection = admin.connect().unwrap();
    for path in ["/healthz", "/pods", "/nothing", "/healthz/ping"] {
        let answer = connection.ask(&format!("GET {path} HTTP/1.1\r\nHost: n\r\n\r\n")).unwrap();
        assert_eq!(answer.status, if path == "/nothing" { 404 } else { 200 }, "{path}");
    }
    let two = "GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n".repeat(2);
    assert_eq!(connection.ask(&two).unwrap().body, "ok");
    assert_eq!(connection.answer(false).unwrap().body, "ok");
    let answer = connection.ask("POST /pods HTTP/1.1\r\nHost: n\r\nContent-Length: 5\r\n\r\nhello").unwrap();
    assert_eq!(answer.status, 405);
    assert_eq!(connection.ask("HEAD /pods HTTP/1.1\r\nHost: n\r\n\r\n").unwrap().status, 200);
    assert_eq!(connection.ask("GET /healthz HTTP/1.0\r\n\r\n").unwrap().status, 200);

    // The socket behind it takes nothing that no listener announced.
    let mut inner = UnixStream::connect(solo.root().join(".coracle-http.sock")).unwrap();
    inner.write_all(b"GET /pods HTTP/1.0\r\nCoracle-Key: 0-1\r\nX-Remote-User: admin\r\n\r\n").unwrap();
    let mut text = String::new();
    inner.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.0 403"), "{text}");

    // Another authority, while connections stand.
    let mut connection = admin.connect().unwrap();
    let ask = "GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n";
    assert_eq!(connection.ask(ask).unwrap().status, 200);
    replace(&ca_file(&solo), &stranger.pem);
    wait_until("the old authority to be forgotten", LONG, || connection.ask(ask).unwrap().status == 401);
    assert_eq!(client(&solo, Some(&stranger.issue("new", &["admins"]))).get("/healthz").status, 200);
    solo.finish();
}

#[test]
fn what_could_be_read_in_two_ways_is_refused() {
    let authority = Authority::new("clients");
    let solo = guarded(&authority, &json!({}));
    let admin = client(&solo, Some(&authority.issue("root", &["admins"])));
    let head = |lines: &str| format!("POST /pods HTTP/1.1\r\nHost: n\r\n{lines}\r\n");
    let hidden = "GET /exec/a/b/c HTTP/1.1\r\nHost: n\r\n\r\n";
    for (text, status) in [
        (head("Content-Length: 0\r\nContent-Length: 44\r\n") + hidden, 400),
        (head("Content-Length: 44\r\nTransfer-Encoding: chunked\r\n") + hidden, 400),
        (head("Transfer-Encoding: chunked\r\n") + "0\r\n" + hidden, 400),
        (head("Transfer-Encoding: chunked\r\n") + "2;x=y\r\nab\r\n0\r\n\r\n" + hidden, 400),
        (head("Transfer-Encoding: chunked\r\n") + "ffffffff\r\n" + hidden, 413),
        (head("Transfer-Encoding: gzip\r\n") + hidden, 501),
        (head("Transfer-Encoding : chunked\r\n") + hidden, 400),
        (head("Content-Length: 0,0\r\n") + hidden, 400),
        (head("X: a\r\n folded\r\n"), 400),
        (head("X: a\nContent-Length: 5\r\n"), 400),
        (head("X\u{0}: a\r\n"), 400),
        ("GET /pods HTTP/1.1\r\n\r\n".to_owned(), 400),
        ("GET /pods/../exec/a/b/c HTTP/1.1\r\nHost: n\r\n\r\n".to_owned(), 400),
        ("GET /%2e%2e/exec HTTP/1.1\r\nHost: n\r\n\r\n".to_owned(), 400),
        ("GET / HTTP/2.0\r\nHost: n\r\n\r\n".to_owned(), 505),
        (head("Content-Length: 100000\r\n"), 413),
        (head(&format!("X: {}\r\n", "x".repeat(64 * 1024))), 431),
        (head(&"X: y\r\n".repeat(200)), 431),
    ] {
        let mut connection = admin.connect().unwrap();
        let answer = connection.ask(&text).unwrap();
        assert_eq!(answer.status, status, "{text:.80}: {answer:?}");
        // And nothing of what came behind it is answered.
        assert!(connection.answer(false).is_err(), "{text:.80}");
    }
    // A body that is taken is not taken for a request.
    let mut connection = admin.connect().unwrap();
    let text = head(&format!("Content-Length: {}\r\n", hidden.len())) + hidden;
    assert_eq!(connection.ask(&text).unwrap().status, 405);
    assert_eq!(connection.ask("GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n").unwrap().body, "ok");
    let size = hidden.len();
    let text = head("Transfer-Encoding: chunked\r\n") + &format!("{size:x}\r\n{hidden}\r\n0\r\n\r\n");
    assert_eq!(connection.ask(&text).unwrap().status, 405);
    assert_eq!(connection.ask("GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n").unwrap().body, "ok");
    // Whoever speaks in the clear is told so.
    let mut plain = TcpStream::connect((Ipv4Addr::LOCALHOST, solo.main_port())).unwrap();
    plain.write_all(b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n").unwrap();
    let mut text = String::new();
    let _ = plain.read_to_string(&mut text);
    assert_eq!(text, "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n");
    solo.finish();
}

/// What a connection of junk leaves the listener with: it must answer the next one.
fn junk(solo: &Solo, admin: &TlsClient, in_tls: bool, bytes: &[u8]) {
    let limit = Some(Duration::from_millis(50));
    if in_tls {
        let mut connection = admin.connect().unwrap();
        connection.stream.sock.set_read_timeout(limit).unwrap();
        let _ = connection.stream.write_all(bytes);
        let _ = connection.stream.flush();
        let _ = connection.stream.read(&mut [0; 64]);
    } else {
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, solo.main_port())).unwrap();
        socket.set_read_timeout(limit).unwrap();
        let _ = socket.write_all(bytes);
        let _ = socket.read(&mut [0; 64]);
    }
}

#[test]
fn junk_harms_nobody() {
    let authority = Authority::new("clients");
    let solo = guarded(&authority, &json!({}));
    let admin = client(&solo, Some(&authority.issue("root", &["admins"])));
    // Pieces of heads and of TLS records, in any order.
    let piece = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..64),
        proptest::sample::select(vec![
            b"GET ".to_vec(),
            b"POST /pods HTTP/1.1\r\n".to_vec(),
            b"/exec/a/b/c".to_vec(),
            b" HTTP/1.1\r\n".to_vec(),
            b"Host: n\r\n".to_vec(),
            b"Content-Length: 18446744073709551615\r\n".to_vec(),
            b"Content-Length: 3\r\n".to_vec(),
            b"Transfer-Encoding: chunked\r\n".to_vec(),
            b"Connection: Upgrade\r\nUpgrade: websocket\r\n".to_vec(),
            b"Sec-WebSocket-Protocol: base64url.bearer.authorization.k8s.io.AAAA, x\r\n".to_vec(),
            b"Authorization: Bearer \xff\r\n".to_vec(),
            b"\r\n".to_vec(),
            b"\r\n\r\n".to_vec(),
            b"\n".to_vec(),
            b"\0".to_vec(),
            b"%zz%2e%2e/".to_vec(),
            b"\x16\x03\x01\x00\x05".to_vec(),
            b"\x16\x03\x03\xff\xff".to_vec(),
            b"\x15\x03\x03\x00\x02\x02\x28".to_vec(),
            b"\x17\x03\x03\x40\x00".to_vec(),
            b"\x80\x2e\x01\x00\x02".to_vec(),
        ]),
    ];
    let pieces = (any::<bool>(), proptest::collection::vec(piece, 1..8));
    let mut runner = TestRunner::new(Config { cases: 150, failure_persistence: None, ..Config::default() });
    let begun = Instant::now();
    runner
        .run(&pieces, |(in_tls, pieces)| {
            // Bounded on a slow machine, too.
            if begun.elapsed() < Duration::from_secs(30) {
                junk(&solo, &admin, in_tls, &pieces.concat());
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(admin.get("/healthz").body, "ok");
    let log = solo.log();
    assert!(!log.contains("panicked"), "{log}");
    solo.finish();
}

#[test]
fn five_hundred_slow_clients_keep_nobody_out() {
    let authority = Authority::new("clients");
    let solo = guarded(&authority, &json!({}));
    let admin = client(&solo, Some(&authority.issue("root", &["admins"])));
    let mut known = admin.connect().unwrap();
    let ask = "GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n";
    assert_eq!(known.ask(ask).unwrap().status, 200);
    let mut slow: Vec<TcpStream> = Vec::new();
    let mut half: Vec<Connection> = Vec::new();
    for n in 0..500 {
        // Some say nothing, some begin a handshake, some a head.
        match n % 3 {
            0 => slow.push(TcpStream::connect((Ipv4Addr::LOCALHOST, solo.main_port())).unwrap()),
            1 => {
                let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, solo.main_port())).unwrap();
                let _ = socket.write_all(b"\x16\x03\x01");
                slow.push(socket);
            }
            _ => {
                if let Ok(mut connection) = client(&solo, None).connect() {
                    let _ = connection.stream.write_all(b"GET /heal");
                    let _ = connection.stream.flush();
                    half.push(connection);
                }
            }
        }
        if n % 50 == 49 {
            let begun = Instant::now();
            assert_eq!(admin.get("/healthz").body, "ok", "after {n}");
            assert_eq!(known.ask(ask).unwrap().status, 200, "after {n}");
            assert!(begun.elapsed() < Duration::from_secs(5), "after {n}: {:?}", begun.elapsed());
        }
    }
    assert_eq!(solo.read_only("/healthz").0, 200);
    let threads = || fs::read_dir(format!("/proc/{}/task", solo.pid())).unwrap().count();
    assert!(threads() < 200, "{} threads", threads());
    // They are sent away by themselves.
    wait_until("the slow ones to be gone", LONG, || threads() < 60);
    drop((slow, half));
    assert_eq!(admin.get("/healthz").body, "ok");
    solo.finish();
}

#[test]
fn without_the_api_server_what_is_known_counts_until_its_time_is_over() {
    let authority = Authority::new("clients");
    let solo = guarded(
        &authority,
        &json!({
            "authentication": {
                "anonymous": {"enabled": false},
                "webhook": {"enabled": true, "cacheTTL": "8s"},
            },
            "authorization": {
                "mode": "Webhook",
                "webhook": {"cacheAuthorizedTTL": "8s", "cacheUnauthorizedTTL": "8s"},
            },
        }),
    );
    let nobody = client(&solo, None);
    let reader = client(&solo, Some(&authority.issue("jane", &["readers"])));
    assert_eq!(nobody.get_by("/metrics", "good-scraper").status, 200);
    assert_eq!(reader.get("/metrics").status, 200);
    solo.api().go_down();
    assert_eq!(nobody.get_by("/metrics", "good-scraper").status, 200);
    assert_eq!(reader.get("/metrics").status, 200);
    // What was not asked before cannot be known.
    assert_eq!(nobody.get_by("/metrics", "good-new").status, 401);
    let answer = reader.get("/pods");
    let text = "Authorization error (user=jane, verb=get, resource=nodes, subresource=pods)";
    assert_eq!((answer.status, answer.body.as_str()), (500, text));
    wait_until("the answers' time to be over", LONG, || reader.get("/metrics").status == 500);
    wait_until("the token's time to be over", LONG, || {
        nobody.get_by("/metrics", "good-scraper").status == 401
    });
    // Everybody else is served as ever.
    assert_eq!(solo.read_only("/metrics").0, 200);
    solo.api().go_up();
    wait_until("reviews to work again", LONG, || reader.get("/metrics").status == 200);
    assert_eq!(nobody.get_by("/metrics", "good-scraper").status, 200);
    solo.finish();
}

#[test]
fn the_serving_certificate_is_the_one_of_the_files() {
    let authority = Authority::new("servers");
    let der = |one: &Identity| {
        use rustls::pki_types::{CertificateDer, pem::PemObject};
        CertificateDer::from_pem_slice(one.certificate.as_bytes()).unwrap().to_vec()
    };
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let (first, second) = (authority.issue("first", &[]), authority.issue("second", &[]));
    let put = |one: &Identity| {
        replace(&key, &one.key);
        replace(&certificate, &one.certificate);
    };
    put(&first);
    let solo = Solo::start_with(json!({
        "tlsCertFile": certificate,
        "tlsPrivateKeyFile": key,
        "tlsMinVersion": "VersionTLS13",
        "tlsCurvePreferences": [23],
    }));
    let client = client(&solo, None);
    assert_eq!(client.connect().unwrap().shown(), der(&first));
    // Anybody may do anything here.
    assert_eq!(client.get("/healthz").body, "ok");
    assert!(TlsClient::with_versions(solo.main_port(), None, &[&rustls::version::TLS12]).connect().is_err());
    put(&second);
    wait_until("the new certificate to be shown", LONG, || client.connect().unwrap().shown() == der(&second));
    solo.finish();

    // Without files it signs its own, and keeps it.
    let mut solo = Solo::start();
    let client = TlsClient::new(solo.main_port(), None);
    let own = client.connect().unwrap().shown();
    solo.stop_agent();
    solo.start_agent();
    assert_eq!(client.connect().unwrap().shown(), own);
    solo.finish();
}

#[test]
fn a_certificate_that_is_asked_for_is_shown_once_it_is_there() {
    let authority = Authority::new("clients");
    let solo = guarded(&authority, &json!({"serverTLSBootstrap": true}));
    let client = client(&solo, None);
    assert!(client.connect().is_err());
    let csr = wait_for("a request for a serving certificate", LONG, || {
        let all = solo.api().objects("/apis/certificates.k8s.io/v1/certificatesigningrequests");
        all.into_iter().find(|one| one["spec"]["signerName"] == "kubernetes.io/kubelet-serving")
    });
    assert!(csr["spec"]["usages"].as_array().unwrap().contains(&json!("server auth")), "{csr}");
    assert!(client.connect().is_err());
    solo.finish();
}

#[test]
fn without_an_api_server_reviews_are_a_start_error() {
    for (config, words) in [
        (json!({"authentication": {"webhook": {"enabled": true}}}), "cannot use webhook authentication"),
        (json!({"authorization": {"mode": "Webhook"}}), "cannot use webhook authorization"),
        (
            json!({"authentication": {"webhook": {"enabled": false}, "x509": {"clientCAFile": "/no/such/file"}}}),
            "unable to load client CA file",
        ),
    ] {
        let output = Solo::prepare(config).agent_command().output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn reviews_are_asked_again_but_never_in_floods() {
    let api = FakeApi::start();
    api.review(review);
    let reviewer = Reviewer::new(&api.client());
    let strike = |times, what| {
        api.fault(Fault { method: "POST", path: "tokenreviews".into(), times, what });
    };
    strike(2, What::Status(500, "InternalError", None));
    assert_eq!(reviewer.token("good-a").unwrap().unwrap().name, "a");
    assert_eq!(api.requests(), 3);
    strike(1, What::Cut);
    assert_eq!(reviewer.token("bad").unwrap(), None);
    strike(1, What::Status(403, "Forbidden", None));
    let error = reviewer.token("good-a").unwrap_err().to_string();
    assert!(error.starts_with("cannot review a token: "), "{error}");
    assert!(!error.contains("good-a"), "{error}");

    // A hundred strangers, and an API server that says nothing.
    let before = api.requests();
    api.freeze();
    let (tell, told) = crossbeam_channel::bounded(100);
    let askers: Vec<_> = (0..100)
        .map(|n| {
            let (reviewer, tell) = (reviewer.clone(), tell.clone());
            spawn("asker", Stack::Small, OnDeath::Nobody, move |_| {
                let _ = tell.send(reviewer.token(&format!("good-{n}")).is_ok());
            })
            .unwrap()
        })
        .collect();
    for _ in 0..28 {
        assert!(!told.recv_timeout(LONG).unwrap(), "more than can wait are refused at once");
    }
    wait_until("the first to ask", LONG, || api.requests() - before == 8);
    api.thaw();
    for _ in 0..72 {
        assert!(told.recv_timeout(LONG).unwrap());
    }
    drop(askers);
    assert_eq!(api.requests() - before, 72);
}
