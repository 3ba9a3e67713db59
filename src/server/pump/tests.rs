use std::io::{ErrorKind, Write};

use crossbeam_channel::bounded;

use super::super::client::Socket;
use super::flow::ANSWER_HEAD_BYTES;
use super::*;
use crate::util::threads::{OnDeath, Stack, spawn};

/// What a client gets of an answer that comes in these pieces, and whether it may ask again.
fn through(form: Option<Form>, pieces: &[&str], complete: bool) -> (String, bool) {
    let told = Arc::new(Told::default());
    if complete {
        told.complete();
    }
    let mut flow = Flow::new(form, &told);
    let mut out = Vec::new();
    for piece in pieces.iter().chain([&""]) {
        let mut rest = piece.as_bytes();
        loop {
            if flow.stage != Stage::Head {
                out.extend_from_slice(flow.pending());
                flow.from = flow.to;
            }
            if rest.is_empty() && !piece.is_empty() {
                break;
            }
            flow.read(&mut rest);
            if flow.ended {
                out.extend_from_slice(flow.pending());
                return (String::from_utf8(out).unwrap(), flow.keeps && !flow.cut);
            }
        }
    }
    unreachable!("the last piece is the end")
}

#[test]
fn answers_are_framed_as_the_client_understands_them() {
    let form = |is_1_1, keep, head_only| Some(Form { is_1_1, keep, head_only });
    let whole = ["HTTP/1.0 200 OK\r\nServer: a\r\nContent-", "Length: 5\r\n\r\nab", "cde"];
    let stream = ["HTTP/1.0 200 OK\r\n\r\nab", "cde"];
    for (form, pieces, expected, keeps) in [
        (None, &whole[..], "HTTP/1.0 200 OK\r\nServer: a\r\nContent-Length: 5\r\n\r\nabcde", false),
        (
            form(true, true, false),
            &whole,
            "HTTP/1.1 200 OK\r\nServer: a\r\nContent-Length: 5\r\n\r\nabcde",
            true,
        ),
        (
            form(false, true, false),
            &whole,
            "HTTP/1.1 200 OK\r\nServer: a\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\nabcde",
            true,
        ),
        (
            form(true, false, false),
            &whole,
            "HTTP/1.1 200 OK\r\nServer: a\r\nContent-Length: 5\r\nConnection: close\r\n\r\nabcde",
            false,
        ),
        (
            form(true, true, true),
            &["HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n"],
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
            true,
        ),
        (
            form(true, true, false),
            &stream,
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n",
            true,
        ),
        (form(false, true, false), &stream, "HTTP/1.1 200 OK\r\n\r\nabcde", false),
        // Cut off, or longer than it said.
        (
            form(true, true, false),
            &["HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nab"],
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
            false,
        ),
        (
            form(true, true, false),
            &["HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nab"],
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
            false,
        ),
        (form(true, true, false), &["HTTP/1.0 200"], "", false),
    ] {
        assert_eq!(through(form, pieces, true), (expected.to_owned(), keeps), "{form:?} {pieces:?}");
    }
    let long = "x".repeat(ANSWER_HEAD_BYTES + 1);
    assert_eq!(through(form(true, true, false), &[&long], true), (String::new(), false));
}

#[test]
fn a_stream_that_breaks_off_has_no_end() {
    let form = |is_1_1| Some(Form { is_1_1, keep: true, head_only: false });
    let stream = ["HTTP/1.0 200 OK\r\n\r\nab", "cde"];
    let chunks = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n";
    assert_eq!(through(form(true), &stream, false), (chunks.to_owned(), false));
    assert_eq!(through(form(true), &stream, true), (format!("{chunks}0\r\n\r\n"), true));
    assert_eq!(through(form(false), &stream, false).0, "HTTP/1.1 200 OK\r\n\r\nabcde");
    // One that says how long it is needs no other end.
    let whole = ["HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab"];
    let expected = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab";
    assert_eq!(through(form(true), &whole, false), (expected.to_owned(), true));

    // Also when its end is an error.
    struct Broken<'a>(&'a [u8]);
    impl Read for Broken<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            match self.0.read(into) {
                Ok(0) => Err(ErrorKind::ConnectionReset.into()),
                other => other,
            }
        }
    }
    let mut flow = Flow::new(form(true), &Arc::default());
    let mut broken = Broken(b"HTTP/1.0 200 OK\r\n\r\nab");
    flow.read(&mut broken);
    flow.from = flow.to;
    flow.read(&mut broken);
    assert!(flow.ended && flow.cut && flow.is_empty());
}

/// An answer on its way through sockets; the test is client and handler.
struct Moving {
    client: UnixStream,
    inner: UnixStream,
    told: Arc<Told>,
    /// Whether the client may ask again.
    over: crossbeam_channel::Receiver<bool>,
    _mover: Running,
    _wake: UnixStream,
}

fn moving(patience: Option<Patience>) -> Moving {
    let pair = || UnixStream::pair().unwrap();
    let ((client, outer), (inner, end), (own, wake)) = (pair(), pair(), pair());
    outer.set_nonblocking(true).unwrap();
    end.set_nonblocking(true).unwrap();
    let told = Arc::new(Told::default());
    let (tell, over) = bounded(1);
    let told_too = Arc::clone(&told);
    let mover = spawn("mover", Stack::Small, OnDeath::Nobody, move |_| {
        let mut handler = spawn("handler", Stack::Small, OnDeath::Nobody, |_| {}).unwrap();
        let form = Some(Form { is_1_1: true, keep: true, head_only: false });
        let outer = Client::plain(Socket::Unix(outer));
        let kept = pump(outer, &end, &wake, (form, &told_too), patience, &mut handler);
        let _ = tell.send(kept.is_some());
    });
    Moving { client, inner, told, over, _mover: mover.unwrap(), _wake: own }
}

#[test]
fn clients_see_whether_a_stream_broke_off() {
    for complete in [true, false] {
        let mut moving = moving(None);
        moving.told.begin_stream();
        moving.inner.write_all(b"HTTP/1.0 200 OK\r\n\r\nab").unwrap();
        if complete {
            moving.told.complete();
        }
        moving.inner.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(moving.over.recv().unwrap(), complete);
        let mut seen = String::new();
        moving.client.read_to_string(&mut seen).unwrap();
        assert!(seen.contains("\r\n\r\n2\r\nab\r\n"), "{seen}");
        assert_eq!(seen.ends_with("0\r\n\r\n"), complete, "{seen}");
    }
}

#[test]
fn a_client_that_dawdles_over_an_answer_is_dropped() {
    let millis = Duration::from_millis;
    // Longer than the socket takes to have room again.
    let patience = Patience { grace: millis(1000), rate: 4 << 20, stream: Duration::from_secs(3600) };
    for (stream, drops) in [(false, true), (true, false)] {
        let Moving { mut client, inner, told, over, _mover, _wake } = moving(Some(patience));
        if stream {
            told.begin_stream();
        }
        let feeder = spawn("feeder", Stack::Small, OnDeath::Nobody, move |_| {
            let mut inner = inner;
            let _ = inner.write_all(b"HTTP/1.0 200 OK\r\nContent-Length: 1000000000\r\n\r\n");
            while inner.write_all(&[b'x'; 4096]).is_ok() {}
        });
        // Ever a little, so that it is never quite still.
        let begun = Instant::now();
        let limit = if drops { Duration::from_secs(20) } else { millis(2500) };
        let mut dropped = false;
        while !dropped && begun.elapsed() < limit {
            let _ = client.read(&mut [0; 4096]).unwrap();
            dropped = over.recv_timeout(millis(10)).is_ok();
        }
        assert_eq!(dropped, drops, "a stream: {stream}");
        drop(client);
        drop((_mover, feeder));
    }
}

#[test]
fn who_takes_much_may_take_its_time() {
    let second = Duration::from_secs;
    let patience = Patience { grace: second(60), rate: 16 * 1024, stream: second(14_400) };
    let mut pace = Pace::default();
    assert_eq!(pace.left(&patience, false), second(60));
    pace.waited += second(59);
    pace.took(1, false);
    assert!(pace.left(&patience, false) < second(2));
    pace.took(1024 * 1024 - 1, false);
    assert_eq!(pace.left(&patience, false), second(65));
    pace.waited += second(66);
    assert_eq!(pace.left(&patience, false), Duration::ZERO);
    // Of a stream it is the pauses that count.
    assert_eq!(pace.left(&patience, true), second(14_400 - 125));
    pace.took(1, true);
    assert_eq!(pace.left(&patience, true), second(14_400));
}
