//! A reflector and a server whose connections are silent or break.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use crossbeam_channel::{Receiver, bounded};
use serde_json::json;

use super::*;
use crate::kube::client::Credentials;
use crate::kube::spread::Spread;
use crate::kube::target::Target;
use crate::transport::testing::plain_endpoint;
use crate::util::testing::unblocked;
use crate::util::threads::{OnDeath, Running, Stack, spawn};

/// What the server does with a request.
enum Response {
    /// It sends these events and is silent.
    Open(Vec<Value>),
    /// It sends these events and ends the response.
    Whole(Vec<Value>),
    /// It closes the connection.
    Nothing,
}

struct Server {
    client: Client,
    heads: Receiver<String>,
    _running: Running,
}

/// A server of one request per connection. `respond` gets its number, from 0 on.
fn serve(respond: impl Fn(usize) -> Response + Send + 'static) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, heads) = bounded(100);
    let running = spawn("t/watch", Stack::Large, OnDeath::Unsupervised, move |stop| {
        let mut open = Vec::new();
        let mut number = 0;
        while let Ok((mut stream, _)) = listener.accept() {
            if stop.is_stopped() {
                return;
            }
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count > 0) {
                head.push(byte[0]);
            }
            let _ = sender.try_send(String::from_utf8_lossy(&head).into_owned());
            let (events, ends) = match respond(number) {
                Response::Open(events) => (events, false),
                Response::Whole(events) => (events, true),
                Response::Nothing => (Vec::new(), true),
            };
            number += 1;
            if events.is_empty() && ends {
                continue;
            }
            let mut lines: String = events.iter().map(|event| format!("{event}\n")).collect();
            if lines.is_empty() {
                // A chunk without bytes would be the end.
                lines.push('\n');
            }
            let end = if ends { "0\r\n\r\n" } else { "" };
            let text = format!(
                "HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{lines}\r\n{end}",
                lines.len()
            );
            let _ = stream.write_all(text.as_bytes());
            open.extend((!ends).then_some(stream));
        }
    })
    .unwrap()
    .with_waker(Box::new(move || drop(TcpStream::connect(("127.0.0.1", port)))));
    let credentials = Credentials { endpoint: plain_endpoint(port), base_path: String::new(), token: None };
    Server { client: Client::new(credentials, None).unwrap(), heads, _running: running }
}

fn end_of_list(version: &str) -> Value {
    json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version,
        "annotations": {INITIAL_EVENTS_END: "true"}}}})
}

fn change(name: &str, version: &str) -> Value {
    json!({"type": "MODIFIED", "object": {"metadata": {"name": name, "resourceVersion": version}}})
}

fn watched_pods() -> Watched {
    Watched { target: Target::pods(), field_selector: None, label_selector: None, spread: Spread::PODS }
}

/// How a cycle of lists and watches failed.
struct Failed {
    error: ApiError,
    requests: usize,
    failures: u32,
}

/// Follows the server until an error.
fn follow_until_error(server: Server, quiet: Duration) -> Failed {
    unblocked(move || {
        let watched = watched_pods();
        let mut sink = |_: Change<Value>| {};
        let mut reflector = Reflector::new(&server.client, &watched, &mut sink);
        reflector.quiet = quiet;
        let error = reflector.cycle::<Value>(&mut WatchBackoff::new(Instant::now())).unwrap_err();
        let failures = reflector.failures.number();
        Failed { error, requests: server.heads.try_iter().count(), failures }
    })
}

/// Follows the server until it has sent the object `last`: how many lists were delivered, and the request lines.
fn follow_until(server: Server, last: &'static str, quiet: Duration) -> (usize, Vec<String>) {
    unblocked(move || {
        let watched = watched_pods();
        let client = server.client.clone();
        let mut lists = 0;
        let mut sink = |change: Change<Value>| match change {
            Change::Replaced(_) => lists += 1,
            Change::Set(object) if object["metadata"]["name"] == last => client.shut_down(),
            Change::Set(_) | Change::Removed(_) => {}
        };
        let mut reflector = Reflector::new(&server.client, &watched, &mut sink);
        reflector.quiet = quiet;
        let error = reflector.cycle::<Value>(&mut WatchBackoff::new(Instant::now())).unwrap_err();
        assert!(error.is_stopping(), "{error}");
        let lines = server.heads.try_iter();
        (lists, lines.map(|head| head.lines().next().unwrap_or_default().to_owned()).collect())
    })
}

#[test]
fn silent_watch_continues_at_its_version_on_another_connection() {
    let server = serve(|number| match number {
        0 => Response::Open(vec![end_of_list("5")]),
        _ => Response::Open(vec![change("late", "6")]),
    });
    // Longer than SHORT: a watch that ends sooner is a failure.
    let (lists, lines) = follow_until(server, "late", SHORT * 2);
    assert_eq!((lists, lines.len()), (1, 2), "{lines:?}");
    assert!(lines[0].contains("sendInitialEvents=true"), "{lines:?}");
    assert!(lines[1].contains("&resourceVersion=5&") && !lines[1].contains("sendInitialEvents"), "{lines:?}");
}

/// It was opened at the same version again and again, while the server was at an older one after the restore
/// of a backup.
#[test]
fn second_silent_watch_in_a_row_is_followed_by_a_list() {
    let server = serve(|number| match number {
        0 => Response::Open(vec![end_of_list("5"), change("first", "6")]),
        _ => Response::Open(Vec::new()),
    });
    let Failed { error, requests, .. } = follow_until_error(server, SHORT * 2);
    assert!(error.to_string().contains("neither events nor bookmarks"), "{error}");
    assert_eq!(requests, 3);
}

/// A proxy that withholds events left no trace in the log.
#[test]
fn list_that_is_never_complete_is_a_failure() {
    let server = serve(|number| match number {
        0 => Response::Open(vec![change("first", "4")]),
        _ => Response::Nothing,
    });
    let Failed { error, failures, .. } = follow_until_error(server, SHORT * 2);
    assert!(error.is_broken(), "{error}");
    assert_eq!(failures, 1);
}

#[test]
fn connection_that_breaks_while_a_watch_is_opened_causes_no_list() {
    let server = serve(|number| match number {
        0 => Response::Whole(vec![end_of_list("5"), change("first", "6")]),
        1 => Response::Nothing,
        _ => Response::Open(vec![change("late", "7")]),
    });
    let (lists, lines) = follow_until(server, "late", QUIET);
    assert_eq!((lists, lines.len()), (1, 3), "{lines:?}");
    assert!(lines[2].contains("&resourceVersion=6&"), "{lines:?}");
}

#[test]
fn third_broken_connection_ends_the_attempts_to_continue() {
    let server = serve(|number| match number {
        0 => Response::Whole(vec![end_of_list("5"), change("first", "6")]),
        _ => Response::Nothing,
    });
    let Failed { error, requests, .. } = follow_until_error(server, QUIET);
    assert!(error.is_broken(), "{error}");
    assert_eq!(requests, 1 + 1 + usize::try_from(REOPENS).unwrap());
}

/// A node whose link was down for some seconds listed all objects again.
#[test]
fn watch_continues_at_its_version_however_long_there_is_no_connection() {
    let error = |error| ApiError::transport("watch pods".to_owned(), "https://test/".to_owned(), error);
    let address = || "10.0.0.1:6443".to_owned();
    let without_connection = [
        DialError::Connect { address: address(), message: "connection refused".to_owned() },
        DialError::Connect { address: address(), message: "network is unreachable".to_owned() },
        DialError::ConnectTimeout { address: address() },
        DialError::Lookup { host: "api".to_owned(), detail: "i/o timeout".to_owned() },
    ];
    for cause in without_connection {
        let proxy = DialError::Proxy { proxy: "proxy:3128".to_owned(), cause: Box::new(cause.clone()) };
        for cause in [cause, proxy] {
            let error = error(cause);
            assert!(continues(&error, REOPENS) && !error.is_broken(), "{error}");
        }
    }
    for cause in [DialError::Eof, DialError::Timeout, DialError::Tls("handshake timeout".to_owned())] {
        let error = error(cause);
        assert!(continues(&error, REOPENS - 1) && !continues(&error, REOPENS), "{error}");
    }
    assert!(!continues(&error(DialError::Tls("certificate required".to_owned())), 0));
    assert!(continues(&ApiError::for_test(429, "TooManyRequests", "busy"), REOPENS));
    assert!(!continues(&ApiError::for_test(410, "Expired", "too old"), 0));
}
