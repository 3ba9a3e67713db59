use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;
use crate::server::http::connection::Socket;
use crate::server::http::request::Method;
use crate::server::node::tests::{Fixture, request};

/// What a client receives of this reply, and whether the connection may be used again.
fn sent(context: &Context, reply: Reply, form: Form) -> (String, bool) {
    let (mut client, server) = UnixStream::pair().unwrap();
    let mut connection = Connection::new(Socket::Unix(server), context.shutdown.clone());
    let stop = StopToken::never();
    let permitted = PermittedReply { reply, _permit: None };
    let again = send(&mut connection, ListenerKind::Main, permitted, form, context, &stop).unwrap_or(false);
    drop(connection);
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    (text, again)
}

const FORM: Form = Form { is_1_1: true, keep_alive: true, head_only: false };

#[test]
fn only_complete_streams_have_an_end() {
    let fixture = Fixture::new(|_| {});
    let (context, _end) = Context::alone(fixture.node.clone());
    let after = |outcome: fn() -> io::Result<()>| {
        let stream = Reply::stream(move |out, _, _| {
            out.start(200, &[], None)?;
            out.write_all(b"some")?;
            out.flush()?;
            outcome()
        });
        sent(&context, stream, FORM)
    };
    let (text, again) = after(|| Ok(()));
    assert!(text.ends_with("\r\n\r\n4\r\nsome\r\n0\r\n\r\n") && again, "{text}");
    for outcome in [|| Err(io::ErrorKind::InvalidData.into()), || panic!("of the test")] {
        let (text, again) = after(outcome);
        assert!(text.ends_with("\r\n\r\n4\r\nsome\r\n") && !again, "{text}");
    }
    // A stream that the server's stop has ended is not complete either.
    context.hangups.stop_all();
    let (text, again) = after(|| Ok(()));
    assert!(text.ends_with("\r\n\r\n4\r\nsome\r\n") && !again, "{text}");
}

#[test]
fn panic_before_the_head_is_a_500() {
    let fixture = Fixture::new(|_| {});
    let (context, _end) = Context::alone(fixture.node.clone());
    let (text, again) = sent(&context, Reply::stream(|_, _, _| panic!("of the test")), FORM);
    assert!(text.starts_with("HTTP/1.1 500 Internal Server Error\r\n") && again, "{text}");
}

#[test]
fn client_that_leaves_stops_its_request() {
    let fixture = Fixture::new(|node| node.run_waits = true);
    let (context, _end) = Context::alone(fixture.node.clone());
    let (mut client, server) = UnixStream::pair().unwrap();
    let connection = Connection::new(Socket::Unix(server), context.shutdown.clone());
    // The other direction stays open, so that the test receives the response.
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let handled = std::sync::Arc::clone(&context);
    let listen = crate::util::threads::spawn(
        "t/listen",
        crate::util::threads::Stack::Small,
        crate::util::threads::OnDeath::Unsupervised,
        move |stop| {
            while !stop.is_stopped() {
                handled.hangups.handle_events();
                std::thread::yield_now();
            }
        },
    );
    let request = request(Method::Post, "/run/default/web/a?cmd=x");
    let again = exchange(connection, ListenerKind::Main, &request, &Caller::default(), FORM, &context);
    assert!(again.is_some());
    drop((again, listen));
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("\r\n\r\nstopped"), "{text}");
}

#[test]
fn callers_have_separate_limits_for_responses_and_streams() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("syslog"), "line\n").unwrap();
    let fixture = Fixture::new(|node| node.log_dir = dir.path().to_owned());
    let (context, _end) = Context::alone(fixture.node.clone());
    // No request waits for a permit.
    let (source, stop) = crate::util::stop::pair();
    drop(source);
    let respond_to = |path: &str, caller: &Caller| {
        let permitted = begin(ListenerKind::Main, &request(Method::Get, path), caller, &context, &stop);
        let status = match &permitted.reply {
            Reply::Whole(response) => response.status(),
            Reply::Stream(_) => 200,
        };
        (status, permitted._permit)
    };
    let client = Caller::from_ip("10.0.0.1", None);
    let held: Vec<_> = (0..RESPONSES_PER_PEER).map(|_| respond_to("/pods", &client)).collect();
    assert!(held.iter().all(|(status, permit)| *status == 200 && permit.is_some()));
    for path in ["/pods", "/metrics/cadvisor", "/stats/summary", "/runningpods/"] {
        assert_eq!(respond_to(path, &client).0, 429, "{path}");
    }
    for path in ["/healthz", "/configz", "/logs/syslog"] {
        assert_eq!(respond_to(path, &client).0, 200, "{path}");
    }
    assert_eq!(respond_to("/pods", &Caller::from_ip("10.0.0.2", None)).0, 200);
    drop(held);
    assert_eq!(respond_to("/pods", &client).0, 200);

    let tenant = |n: usize| Caller::from_ip(&format!("10.0.1.{n}"), Some("tenant"));
    let held: Vec<_> = (0..STREAMS_PER_TOKEN).map(|n| respond_to("/logs/syslog", &tenant(n))).collect();
    assert_eq!(respond_to("/logs/syslog", &tenant(200)).0, 429);
    assert_eq!(respond_to("/logs/syslog", &Caller::from_ip("10.0.1.1", Some("other"))).0, 200);
    let all: Vec<_> = (0..STREAMS_PER_PEER).map(|_| respond_to("/logs/syslog", &client)).collect();
    assert!(all.iter().chain(&held).all(|(status, permit)| *status == 200 && permit.is_some()));
    assert_eq!(respond_to("/logs/syslog", &client).0, 429);
    assert_eq!(respond_to("/logs/syslog", &Caller::from_ip("10.0.0.2", Some("other"))).0, 200);
}
