//! The node API's port under attack: each attack is refused as the Go kubelet refuses it, and
//! normal clients are served at the same time.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle::util::stop::Waited;
use coracle::util::threads::{OnDeath, Running, Stack, spawn};
use crossbeam_channel::{Receiver, bounded};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::thread::{Gid, Uid, set_thread_res_gid, set_thread_res_uid};
use serde_json::json;

use crate::main_port::{client, guarded};
use crate::support::fake_node::{FakeNode, LONG, binary, full_name};
use crate::support::node::{FOREVER, busybox, pod};
use crate::support::tls_client::{Authority, Connection, TlsClient};
use crate::support::wait::wait_until;

/// A client that had to wait for a slow one would wait for its limit of ten seconds.
const SOON: Duration = Duration::from_secs(9);

/// An authenticated client that sends requests all the time, on an old connection and on new ones,
/// from an address that no attacker has.
struct RegularClient {
    running: Running,
    results: Receiver<(u32, Duration)>,
}

impl RegularClient {
    fn start(admin: &TlsClient) -> RegularClient {
        let ask = "GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n";
        let (sender, results) = bounded(1);
        let admin = admin.bound_to(Ipv4Addr::new(127, 0, 0, 2));
        let mut connection = admin.connect().unwrap();
        let running = spawn("regular", Stack::Large, OnDeath::Unsupervised, move |stop| {
            let (mut count, mut slowest) = (0, Duration::ZERO);
            loop {
                let begun = Instant::now();
                assert_eq!(connection.ask(ask).unwrap().body, "ok");
                assert_eq!(admin.get("/healthz").body, "ok");
                slowest = slowest.max(begun.elapsed());
                count += 1;
                if stop.wait(Duration::from_millis(20)) == Waited::Stopped {
                    break;
                }
            }
            let _ = sender.send((count, slowest));
        });
        RegularClient { running: running.unwrap(), results }
    }

    /// Asserts that each request was answered, and without delay.
    fn end(mut self) {
        self.running.request_stop();
        let (count, slowest) = self.results.recv_timeout(LONG).expect("a normal request was not answered");
        assert!(count > 0 && slowest < SOON, "{count} times, {slowest:?}");
    }
}

/// Requests that an attacker would send.
const TARGETS: [(&str, &str, &str, &str); 8] = [
    ("GET", "/pods", "get", "pods proxy"),
    ("GET", "/metrics/cadvisor", "get", "metrics"),
    ("GET", "/configz", "get", "configz proxy"),
    ("GET", "/logs/", "get", "log"),
    ("GET", "/containerLogs/default/web/main", "get", "proxy"),
    ("POST", "/run/default/web/main?cmd=id", "create", "proxy"),
    ("POST", "/exec/default/web/main?command=id&output=1", "create", "proxy"),
    ("PUT", "/debug/flags/v", "update", "proxy"),
];

#[test]
fn unauthorized_clients_are_denied() {
    let (authority, stranger) = (Authority::new("clients"), Authority::new("clients"));
    let node = guarded(
        &authority,
        &json!({"authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": true}}}),
    );
    let regular = RegularClient::start(&client(&node, Some(&authority.issue("root", &["admins"]))));
    let forged = "X-Remote-User: root\r\nX-Remote-Group: admins\r\nImpersonate-User: root\r\n\
                  Impersonate-Group: admins\r\nX-PortForward-For: 127.0.0.1\r\nCoracle-Key: 0-1\r\n";
    let token = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let other_node = ("system:node:other", ["system:nodes"]);
    // `Some(user)`: authenticated without permission (403); `None`: not authenticated (401).
    for (what, identity, headers, user) in [
        ("no certificate", None, String::new(), Some("system:anonymous")),
        ("forged headers", None, forged.to_owned(), Some("system:anonymous")),
        ("another authority", Some(stranger.issue("root", &["admins"])), String::new(), None),
        ("expired", Some(authority.issue_until("root", &["admins"], 2020)), String::new(), None),
        (
            "a server's certificate",
            Some(authority.issue_for_servers("root", &["admins"])),
            String::new(),
            None,
        ),
        (
            "another node",
            Some(authority.issue(other_node.0, &other_node.1)),
            String::new(),
            Some(other_node.0),
        ),
        ("forged beside one's own", Some(authority.issue("jane", &[])), forged.to_owned(), Some("jane")),
        ("a token without rights", None, token("good-other"), Some("other")),
        ("an unknown token", None, token("bad"), None),
        ("a token too long", None, token(&"x".repeat(20_000)), None),
    ] {
        let attacker = client(&node, identity.as_ref());
        let mut connection = attacker.connect().unwrap();
        for (method, path, verb, subresources) in TARGETS {
            let text = format!("{method} {path} HTTP/1.1\r\nHost: n\r\nContent-Length: 0\r\n{headers}\r\n");
            let response = connection.ask(&text).unwrap();
            if response.head.contains("\r\nConnection: close\r\n") {
                connection = attacker.connect().unwrap();
            }
            let expected = match user {
                None => (401, "Unauthorized".to_owned()),
                Some(user) => (
                    403,
                    format!(
                        "Forbidden (user={user}, verb={verb}, resource=nodes, subresource(s)=[{subresources}])\n"
                    ),
                ),
            };
            assert_eq!((response.status, response.body), expected, "{what}: {method} {path}");
        }
    }
    regular.end();
    node.finish();
}

/// A client that guesses tokens, or has a certificate of another authority, needs a handshake for
/// every three requests.
#[test]
fn three_unauthenticated_requests_in_a_row_close_the_connection() {
    let (authority, stranger) = (Authority::new("clients"), Authority::new("clients"));
    let node = guarded(&authority, &json!({}));
    let regular = RegularClient::start(&client(&node, Some(&authority.issue("root", &["admins"]))));
    let ask = |connection: &mut Connection, token: &str| {
        let headers =
            if token.is_empty() { String::new() } else { format!("Authorization: Bearer {token}\r\n") };
        let response = connection.ask(&format!("GET /metrics HTTP/1.1\r\nHost: n\r\n{headers}\r\n")).unwrap();
        (response.status, response.head.contains("\r\nConnection: close\r\n"))
    };
    for identity in [None, Some(stranger.issue("root", &["admins"]))] {
        let attacker = client(&node, identity.as_ref());
        let mut connection = attacker.connect().unwrap();
        // An authenticated request in between resets the count.
        for (token, expected) in [
            ("bad-1", (401, false)),
            ("bad-2", (401, false)),
            ("good-scraper", (200, false)),
            ("bad-3", (401, false)),
            ("", (401, false)),
            ("good-other", (403, false)),
            ("bad-4", (401, false)),
            ("", (401, false)),
            ("bad-5", (401, true)),
        ] {
            assert_eq!(ask(&mut connection, token), expected, "{token}");
        }
        assert!(connection.is_closed_by_server(), "the connection stays open");
    }
    regular.end();
    node.finish();
}

#[test]
fn no_request_path_escapes_the_log_directory() {
    let authority = Authority::new("clients");
    let node = guarded(&authority, &json!({}));
    node.fake.write_logs();
    node.apply(&pod("web", json!([busybox("main", FOREVER)])));
    node.wait_ready("web");
    let admin = client(&node, Some(&authority.issue("root", &["admins"])));
    let regular = RegularClient::start(&admin);
    let own = format!("/containerLogs/default/{}/main", full_name("web"));
    assert_eq!(admin.get(&own).status, 200);
    let mut paths: Vec<(String, u16)> = [
        ("/logs/../../etc/passwd", 400),
        ("/logs/%2e%2e/%2e%2e/etc/passwd", 400),
        ("/logs/%2E./etc/passwd", 400),
        ("/logs/..%2f..%2fetc%2fpasswd", 400),
        ("/logs/..%5c..%5cetc%5cpasswd", 400),
        ("/logs/a%00/../../etc/passwd", 400),
        ("//logs/../etc/passwd", 400),
        // To the path without the second slash, as by Go's server; it is checked like any other.
        ("/logs//etc/passwd", 307),
        ("/logs/etc/passwd", 404),
        ("/logs/%2fetc%2fpasswd", 404),
        ("/logs/%252e%252e/etc/passwd", 404),
        ("/containerLogs/default/web/../../../etc/passwd", 400),
        ("/containerLogs/default/..%2f..%2fetc/passwd", 400),
        ("/containerLogs/default/%2fetc%2fpasswd/main", 404),
        ("/containerLogs/default/web/%5c..%5cpasswd", 404),
    ]
    .map(|(path, status)| (path.to_owned(), status))
    .to_vec();
    paths.push((format!("{own}%2f..%2fmain"), 400));
    paths.push((format!("{own}%00"), 400));
    // The machine's own directory is not changed.
    let private = std::env::var_os("E2E_DIR").is_some();
    let log = Path::new("/var/log");
    if private {
        for (to, name) in [("/etc/passwd", "absolute"), ("../../etc/passwd", "relative"), ("/", "all")] {
            symlink(to, log.join(format!("attack-{name}"))).unwrap();
            paths.push((format!("/logs/attack-{name}"), 404));
        }
        paths.push(("/logs/attack-all/etc/passwd".to_owned(), 404));
        fs::write(log.join("attack-none"), "shown\n").unwrap();
        assert_eq!(admin.get("/logs/attack-none").body, "shown\n");
    }
    for (path, status) in paths {
        let response = admin.get(&path);
        assert_eq!(response.status, status, "{path}: {response:?}");
        assert!(!response.body.contains("root:"), "{path}: {response:?}");
    }
    for name in ["absolute", "relative", "all", "none"] {
        let _ = private.then(|| fs::remove_file(log.join(format!("attack-{name}"))));
    }
    regular.end();
    node.finish();
}

/// Runs on a thread with another user id and no capabilities.
fn as_other_user<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, results) = bounded(1);
    let running = spawn("other-user", Stack::Small, OnDeath::Unsupervised, move |_| {
        let (user, group) = (Uid::from_raw(65534), Gid::from_raw(65534));
        set_thread_res_gid(group, group, group).unwrap();
        set_thread_res_uid(user, user, user).unwrap();
        let _ = sender.send(work());
    });
    let outcome = results.recv_timeout(LONG).unwrap();
    drop(running);
    outcome
}

#[test]
fn local_users_without_rights_cannot_open_sockets() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can change the user");
        return;
    }
    let authority = Authority::new("clients");
    let node = guarded(&authority, &json!({}));
    let regular = RegularClient::start(&client(&node, Some(&authority.issue("root", &["admins"]))));
    let socket = node.local_socket();
    let directory = node.local_socket().parent().unwrap().to_owned();
    assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
    let mode = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    // The directories above them deny access to no user.
    for path in directory.ancestors().filter(|path| path.starts_with(std::env::temp_dir())) {
        mode(path, 0o755);
    }
    let parent = directory.clone();
    assert!(as_other_user(move || fs::read_dir(directory).is_ok()));
    let connect = |path: &Path| -> std::io::Result<String> {
        let path = path.to_owned();
        as_other_user(move || {
            let mut stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(LONG))?;
            let request = b"GET /v1/pods HTTP/1.0\r\nX-Remote-User: root\r\n\r\n";
            let mut response = Vec::new();
            // The server reads nothing of it and may close the connection at any point; its response can
            // be read all the same.
            let _ = stream.write_all(request);
            let _ = stream.read_to_end(&mut response);
            Ok(String::from_utf8_lossy(&response).into_owned())
        })
    };
    assert_eq!(connect(&socket).unwrap_err().kind(), ErrorKind::PermissionDenied);
    // Also if its mode was opened to all users.
    mode(&socket, 0o666);
    let response = connect(&socket);
    assert!(response.as_ref().is_ok_and(|text| text.starts_with("HTTP/1.1 403 ")), "{response:?}");
    // There is no other socket beside it.
    let sockets = fs::read_dir(&parent).unwrap().map(|entry| entry.unwrap());
    let sockets = sockets.filter(|entry| entry.file_type().unwrap().is_socket());
    assert_eq!(sockets.map(|entry| entry.path()).collect::<Vec<_>>(), [socket]);
    regular.end();
    node.finish();
}

/// A container with the directory of the socket has the same user and the same file.
#[test]
fn root_of_other_namespaces_is_refused_at_the_local_socket() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can make namespaces");
        return;
    }
    let mut node = FakeNode::start();
    let ask = |node: &FakeNode, from: &[&str]| {
        let mut command = std::process::Command::new("unshare");
        let socket = node.local_socket();
        command.args(from).arg(binary()).arg("--local-socket").arg(socket).arg("status");
        let output = command.stdin(std::process::Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let here: [&[&str]; 2] = [&["--net"], &["--uts"]];
    let elsewhere: [&[&str]; 2] = [&["--mount"], &["--pid", "--fork"]];
    for from in here {
        assert_eq!(ask(&node, from), (Some(0), String::new()), "{from:?}");
    }
    for from in elsewhere {
        let (code, message) = ask(&node, from);
        assert!(
            code == Some(1) && message.contains("own mount and PID namespaces only"),
            "{from:?}: {message}"
        );
    }
    assert!(node.log().contains("rejected at the local socket"), "{}", node.log());
    node.stop_agent();
    node.set_flags(&["--local-socket-any-namespace"]);
    node.start_agent();
    for from in here.into_iter().chain(elsewhere) {
        assert_eq!(ask(&node, from), (Some(0), String::new()), "{from:?}");
    }
    node.finish();
}

/// Everything that a container with a read-only root directory can do.
#[test]
fn read_access_to_the_root_directory_cannot_block_the_start() {
    let mut node = FakeNode::start();
    let locked: Vec<_> = fs::read_dir(node.root())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .chain([node.root()])
        .map(|path| {
            let reader = fs::File::open(path).unwrap();
            // While the agent runs, its own lock may be in the way.
            let _ = flock(&reader, FlockOperation::NonBlockingLockExclusive);
            let _ = fcntl_lock(&reader, FlockOperation::NonBlockingLockShared);
            reader
        })
        .collect();
    assert!(locked.len() > 1, "{locked:?}");
    node.stop_agent();
    for reader in &locked {
        flock(reader, FlockOperation::NonBlockingLockExclusive).unwrap();
        // Directories have no locks of this kind.
        let shared = fcntl_lock(reader, FlockOperation::NonBlockingLockShared);
        assert!(shared.is_ok() || reader.metadata().unwrap().is_dir(), "{reader:?}");
    }
    node.start_agent();
    node.assert_responsive();
    drop(locked);
    node.finish();
}

/// The status of a request whose response is a stream.
fn begin(caller: &TlsClient, request: &str) -> (u16, Connection) {
    let mut connection = caller.connect().unwrap();
    connection.stream.write_all(request.as_bytes()).unwrap();
    connection.stream.flush().unwrap();
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        connection.stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), connection)
}

#[test]
fn one_client_cannot_use_all_streams() {
    let authority = Authority::new("clients");
    let node = guarded(&authority, &json!({}));
    node.fake.write_logs();
    node.apply(&pod("web", json!([busybox("main", FOREVER)])));
    node.wait_ready("web");
    let anonymous = client(&node, None);
    let follow = |headers: &str| {
        let path = format!("/containerLogs/default/{}/main?follow=true", full_name("web"));
        format!("GET {path} HTTP/1.1\r\nHost: n\r\n{headers}\r\n")
    };
    let by_token = |user: &str| begin(&anonymous, &follow(&format!("Authorization: Bearer good-{user}\r\n")));
    let mut held: Vec<_> = (0..32).map(|_| by_token("tenant-a")).collect();
    assert!(held.iter().all(|(status, _)| *status == 200));
    assert_eq!(by_token("tenant-a").0, 429);
    // Other clients, with a token and with a certificate like that of the API server.
    held.push(by_token("tenant-b"));
    let api_server = client(&node, Some(&authority.issue("api-server", &["admins"])));
    held.extend((0..40).map(|_| begin(&api_server, &follow(""))));
    assert!(held.iter().all(|(status, _)| *status == 200));
    held.drain(..1);
    wait_until("a free slot", LONG, || by_token("tenant-a").0 == 200);
    drop(held);
    node.finish();
}

#[test]
fn ambiguous_requests_are_rejected() {
    let authority = Authority::new("clients");
    let node = guarded(&authority, &json!({}));
    let admin = client(&node, Some(&authority.issue("root", &["admins"])));
    let regular = RegularClient::start(&admin);
    let head = |lines: &str| format!("POST /pods HTTP/1.1\r\nHost: n\r\n{lines}\r\n");
    let hidden = "GET /exec/a/b/c HTTP/1.1\r\nHost: n\r\n\r\n";
    // Such request heads would be forwarded to the runtime.
    let upgrade = |lines: &str| {
        let more = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";
        format!("POST /exec/default/web/main?command=id&output=1 HTTP/1.1\r\nHost: n\r\n{more}{lines}\r\n")
    };
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
        (upgrade("Content-Length: 44\r\n") + hidden, 400),
        (upgrade("Transfer-Encoding: chunked\r\n") + "0\r\n\r\n" + hidden, 400),
        (upgrade("Content-Length: 0\r\nTransfer-Encoding: chunked\r\n") + hidden, 400),
        (upgrade("") + hidden, 404),
        (head("Content-Length: 100000\r\n"), 413),
        (head(&format!("X: {}\r\n", "x".repeat(64 * 1024))), 431),
        (head(&"X: y\r\n".repeat(200)), 431),
    ] {
        let mut connection = admin.connect().unwrap();
        let response = connection.ask(&text).unwrap();
        assert_eq!(response.status, status, "{text:.80}: {response:?}");
        // No request after it is answered.
        assert!(connection.is_closed_by_server(), "{text:.80}");
    }
    // The body of an accepted request is not parsed as a request.
    let mut connection = admin.connect().unwrap();
    let text = head(&format!("Content-Length: {}\r\n", hidden.len())) + hidden;
    assert_eq!(connection.ask(&text).unwrap().status, 405);
    assert_eq!(connection.ask("GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n").unwrap().body, "ok");
    let size = hidden.len();
    let text = head("Transfer-Encoding: chunked\r\n") + &format!("{size:x}\r\n{hidden}\r\n0\r\n\r\n");
    assert_eq!(connection.ask(&text).unwrap().status, 405);
    assert_eq!(connection.ask("GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n").unwrap().body, "ok");
    // A client that speaks plain HTTP gets an error that says so.
    let mut plain = TcpStream::connect((Ipv4Addr::LOCALHOST, node.main_port())).unwrap();
    plain.write_all(b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n").unwrap();
    let mut text = String::new();
    let _ = plain.read_to_string(&mut text);
    assert_eq!(text, "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n");
    regular.end();
    node.finish();
}

/// Where the invalid bytes are sent.
#[derive(Debug, Clone, Copy)]
enum InvalidBytesAt {
    /// To the port, in place of a handshake.
    Plain,
    /// In the middle of a valid start of a handshake.
    Hello,
    /// In place of a request of an authenticated client.
    Tls,
}

/// Sends the bytes, and waits a moment for the response of the listener.
fn send_invalid_bytes(node: &FakeNode, admin: &TlsClient, place: InvalidBytesAt, bytes: &[u8]) {
    let limit = Some(Duration::from_millis(50));
    if let InvalidBytesAt::Tls = place {
        let mut connection = admin.connect().unwrap();
        connection.stream.sock.set_read_timeout(limit).unwrap();
        let _ = connection.stream.write_all(bytes);
        let _ = connection.stream.flush();
        let _ = connection.stream.read(&mut [0; 64]);
        return;
    }
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, node.main_port())).unwrap();
    socket.set_read_timeout(limit).unwrap();
    let hello = match place {
        InvalidBytesAt::Hello => {
            let mut hello = admin.hello();
            // At a position that the random bytes choose.
            let sum = bytes.iter().fold(0_usize, |sum, byte| sum.wrapping_mul(31) ^ usize::from(*byte));
            let offset = sum % hello.len();
            let end = hello.len().min(offset + bytes.len());
            hello[offset..end].copy_from_slice(&bytes[..end - offset]);
            hello
        }
        _ => Vec::new(),
    };
    let _ = socket.write_all(if hello.is_empty() { bytes } else { &hello });
    let _ = socket.read(&mut [0; 64]);
}

/// Requests that arrive faster than their responses are read are not buffered without a limit.
#[test]
fn client_that_reads_no_responses_is_disconnected() {
    let authority = Authority::new("clients");
    let node = guarded(&authority, &json!({}));
    let admin = client(&node, Some(&authority.issue("root", &["admins"])));
    let regular = RegularClient::start(&admin);
    let mut connection = admin.connect().unwrap();
    connection.stream.sock.set_write_timeout(Some(LONG)).unwrap();
    let requests = "GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n".repeat(1000);
    let cut = (0..200).any(|_| {
        let sent = connection.stream.write_all(requests.as_bytes());
        sent.and_then(|()| connection.stream.flush()).is_err()
    });
    assert!(cut, "8 MB were taken");
    regular.end();
    node.finish();
}

/// A refusal arrives while the body that the server does not read is still being sent.
#[test]
fn refused_request_with_a_body_receives_the_reason() {
    let authority = Authority::new("clients");
    let node = guarded(&authority, &json!({}));
    let jane = client(&node, Some(&authority.issue("jane", &[])));
    let body = "x".repeat(16 * 1024);
    let text = format!(
        "POST /run/default/web/main?cmd=id HTTP/1.1\r\nHost: n\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    for _ in 0..50 {
        let response = jane.connect().unwrap().ask(&text).unwrap();
        assert_eq!(response.status, 403, "{response:?}");
    }
    node.finish();
}

#[test]
fn invalid_bytes_do_not_disturb_other_clients() {
    let authority = Authority::new("clients");
    let node = guarded(&authority, &json!({}));
    let admin = client(&node, Some(&authority.issue("root", &["admins"])));
    let regular = RegularClient::start(&admin);
    // Parts of request heads and of TLS records, in any order.
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
    let place =
        proptest::sample::select(vec![InvalidBytesAt::Plain, InvalidBytesAt::Hello, InvalidBytesAt::Tls]);
    let pieces = (place, proptest::collection::vec(piece, 1..8));
    let mut runner = TestRunner::new(Config { cases: 240, failure_persistence: None, ..Config::default() });
    let begun = Instant::now();
    runner
        .run(&pieces, |(place, pieces)| {
            // Bounded on a slow machine, too.
            if begun.elapsed() < Duration::from_secs(30) {
                send_invalid_bytes(&node, &admin, place, &pieces.concat());
            }
            Ok(())
        })
        .unwrap();
    regular.end();
    let log = node.log();
    assert!(!log.contains("panicked"), "{log}");
    node.finish();
}

#[test]
fn five_hundred_slow_clients_do_not_block_others() {
    let authority = Authority::new("clients");
    let node = guarded(&authority, &json!({}));
    let admin = client(&node, Some(&authority.issue("root", &["admins"])));
    let mut known = admin.connect().unwrap();
    let ask = "GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n";
    assert_eq!(known.ask(ask).unwrap().status, 200);
    let regular = RegularClient::start(&admin);
    let mut slow: Vec<TcpStream> = Vec::new();
    let mut half: Vec<Connection> = Vec::new();
    let stranger = client(&node, None);
    for n in 0..500 {
        // First all from one address, then from many.
        let from = Ipv4Addr::new(127, 0, 1, if n < 250 { 1 } else { u8::try_from(n % 60).unwrap() + 1 });
        let (admin, stranger) = (admin.bound_to(from), stranger.bound_to(from));
        // Some send nothing, some begin a handshake, some a request head, and some authenticated ones a
        // body.
        match n % 4 {
            0 => slow.push(stranger.dial().unwrap()),
            1 => {
                let mut socket = stranger.dial().unwrap();
                let _ = socket.write_all(b"\x16\x03\x01");
                slow.push(socket);
            }
            2 => {
                if let Ok(mut connection) = admin.connect() {
                    let begin = "POST /pods HTTP/1.1\r\nHost: n\r\nContent-Length: 5\r\n\r\nh";
                    let _ = connection.stream.write_all(begin.as_bytes());
                    let _ = connection.stream.flush();
                    half.push(connection);
                }
            }
            _ => {
                if let Ok(mut connection) = stranger.connect() {
                    let _ = connection.stream.write_all(b"GET /heal");
                    let _ = connection.stream.flush();
                    half.push(connection);
                }
            }
        }
        if n % 50 == 49 {
            let begun = Instant::now();
            assert_eq!(known.ask(ask).unwrap().status, 200, "after {n}");
            assert!(begun.elapsed() < SOON, "after {n}: {:?}", begun.elapsed());
        }
    }
    assert_eq!(node.read_only("/healthz").0, 200);
    let threads = || fs::read_dir(format!("/proc/{}/task", node.pid())).unwrap().count();
    // A rejected connection has a thread until that thread notices.
    wait_until("few threads", LONG, || threads() < 300);
    // No client that sends its request in time was rejected or had to wait.
    regular.end();
    // The agent disconnects them by itself.
    wait_until("the slow connections to be gone", LONG, || threads() < 60);
    drop((slow, half));
    assert_eq!(admin.get("/healthz").body, "ok");
    node.finish();
}
