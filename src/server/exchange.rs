//! One request through tiny_http: announced, handed over, answered on a thread of its own.
//!
//! Nothing of what a client sent reaches tiny_http: what the answer depends on goes beside
//! it, from the connection straight to the handler.

use std::io::{self, BufWriter, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;

use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Stack};

use super::Deps;
use super::client::{Client, Ready, is_passing};
use super::http::{
    ANSWERS_PER_PEER, Gate, KEY_HEADER, MAIN_STREAMS, STREAMS, STREAMS_PER_PEER, STREAMS_PER_TOKEN,
};
use super::listener::{Listener, connect_local};
use super::main_port::first_element;
use super::pump::{self, Form, Kept, Patience, Told};
use super::routes::{self, Answer, Asked, Method, Reply};
use super::shares::{Caller, Claims, Slot};
use super::streams::Stream;

/// tiny_http hands a clean request over at once; later means that it does not work.
const HANDOVER: Duration = Duration::from_secs(10);

/// Of a TCP client, who may be anybody. A whole answer has to be taken at 16 KiB/s, but for a
/// minute; a stream waits for its reader as long as one of the Go kubelet lasts at most, for
/// somebody may look at a log page by page.
const PATIENCE: Patience =
    Patience { grace: Duration::from_secs(60), rate: 16 * 1024, stream: Duration::from_secs(4 * 3600) };

/// How long a large answer waits to be begun while there are too many.
const TURN_LIMIT: Duration = Duration::from_secs(10);

/// When the server stops, a handler in the middle of a call is left behind after this.
const HANDLER_LIMIT: Duration = Duration::from_secs(1);

/// What a refused client may still send before the socket closes, and for how long.
const FAREWELL: (usize, Duration) = (64 * 1024, Duration::from_secs(1));

/// An answer for a client that is refused by the connection itself, which then closes.
pub(super) fn refusal(status: u16, text: &str) -> String {
    format!(
        "HTTP/1.0 {status} {}\r\nServer: coracle\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n{text}",
        phrase(status)
    )
}

/// What stands after a status.
pub(super) fn phrase(status: u16) -> &'static str {
    match status {
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed\r\nAllow: GET",
        408 => "Request Timeout",
        413 => "Content Too Large",
        417 => "Expectation Failed",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        505 => "HTTP Version Not Supported",
        _ => "Service Unavailable",
    }
}

/// Refuses and waits a little for the client to read it: closing with unread input would
/// reset the connection and could take the answer with it.
pub(super) fn farewell(client: Client, gate: &Gate, status: u16, text: &str) {
    leave(client, gate, &refusal(status, text));
}

/// As [`farewell`], with these words.
pub(super) fn leave(mut client: Client, gate: &Gate, words: &str) {
    let _ = client.write(words.as_bytes());
    client.finish_write();
    let (mut bytes, limit) = FAREWELL;
    let deadline = Instant::now() + limit;
    let mut chunk = [0; 4096];
    while bytes > 0 && client.wait(true, false, &gate.wake, deadline) == Ready::Yes {
        let _ = client.flush();
        match client.read(&mut chunk) {
            Ok(0) => return,
            Ok(count) => bytes = bytes.saturating_sub(count),
            Err(why) if is_passing(&why) => {}
            Err(_) => return,
        }
    }
}

/// Has a vetted request answered. A client that may ask again comes back.
pub(super) fn exchange(
    client: Client,
    listener: Listener,
    asked: Asked,
    caller: Caller,
    form: Option<Form>,
    gate: &Gate,
    stop: &StopToken,
) -> Option<Kept> {
    let ticket = gate.announce();
    // A body is left out of the answer to a HEAD, that is all that the method tells it.
    let method = if asked.method == Method::Head { "HEAD" } else { "GET" };
    let clean = format!("{method} / HTTP/1.0\r\n{KEY_HEADER}: {}\r\n\r\n", ticket.key);
    let inner = connect_local(&gate.inner).and_then(|mut inner| {
        inner.write_all(clean.as_bytes())?;
        inner.set_nonblocking(true)?;
        Ok(inner)
    });
    let inner = match inner {
        Ok(inner) => inner,
        Err(why) => {
            if why.kind() != io::ErrorKind::WouldBlock {
                gate.report_broken();
            }
            farewell(client, gate, 503, "the server is restarting, try again\n");
            return None;
        }
    };
    let request = {
        let _waiting = threads::waiting("tiny_http");
        select_biased! {
            recv(stop.signal()) -> _ => return None,
            recv(ticket.request) -> request => request.ok(),
            default(HANDOVER) => None,
        }
    };
    let Some(request) = request else {
        gate.report_broken();
        farewell(client, gate, 503, "the server is restarting, try again\n");
        return None;
    };
    drop(ticket);
    let shared = gate.clone();
    let told = Arc::new(Told::default());
    let tell = Arc::clone(&told);
    let name = format!("strm/{}", gate.number());
    let handler = threads::spawn(&name, Stack::Large, OnDeath::Nobody, move |stop| {
        answer(request, listener, &asked, &caller, &tell, &shared, &stop);
    });
    match handler {
        Ok(mut handler) => {
            let patience = (listener != Listener::Local).then_some(PATIENCE);
            let kept = pump::pump(client, &inner, &gate.wake, (form, &told), patience, &mut handler);
            if kept.is_none() {
                pump::drain(&inner, gate);
            }
            // A writer blocked on the private socket fails now, then the handler ends.
            drop(inner);
            let _ = handler.stop(HANDLER_LIMIT);
            kept
        }
        // The request was dropped with the thread's body: tiny_http has answered 500.
        Err(why) => {
            log::warn!("no thread for a request: {why}");
            farewell(client, gate, 503, "no thread for the request\n");
            None
        }
    }
}

/// The handler's thread: makes the answer.
fn answer(
    request: tiny_http::Request,
    listener: Listener,
    asked: &Asked,
    caller: &Caller,
    told: &Told,
    gate: &Gate,
    stop: &StopToken,
) {
    match begin(listener, asked, caller, gate, stop) {
        Begun::Whole(answer, _turn) => respond(request, answer),
        Begun::Stream(stream, _slot) => {
            told.begin_stream();
            let mut out = BufWriter::new(request.into_writer());
            run(stream, &mut out, told, &gate.deps, stop);
        }
    }
}

/// An answer that may be sent, with what it takes from others meanwhile.
enum Begun {
    Whole(Answer, Option<Slot>),
    Stream(Stream, Slot),
}

fn begin(listener: Listener, asked: &Asked, caller: &Caller, gate: &Gate, stop: &StopToken) -> Begun {
    let is_main = listener == Listener::Main;
    // The others have few connections.
    let turn = if is_main && grows(&asked.target.path) {
        let claims = caller.claims(ANSWERS_PER_PEER, ANSWERS_PER_PEER);
        let turn = gate.answers.wait(claims, TURN_LIMIT, "a turn to answer", stop);
        if turn.is_none() {
            return Begun::Whole(too_many("too many large answers are being sent\n".to_owned()), None);
        }
        turn
    } else {
        None
    };
    let stream = match routes::route(listener, asked, &gate.deps) {
        Reply::Whole(answer) => return Begun::Whole(answer, turn),
        Reply::Stream(stream) => stream,
    };
    let (slot, cap) = match is_main {
        true => {
            let claims = caller.claims(STREAMS_PER_PEER, STREAMS_PER_TOKEN);
            (gate.main_streams.take(claims), MAIN_STREAMS)
        }
        false => (gate.streams.take(Claims::default()), STREAMS),
    };
    match slot {
        Some(slot) => Begun::Stream(stream, slot),
        None => Begun::Whole(too_many(format!("too many of {cap} streams are open\n")), None),
    }
}

/// Writes a stream, and tells if it came to its end, before whoever moves it can see one.
fn run(stream: Stream, out: &mut dyn Write, told: &Told, deps: &Deps, stop: &StopToken) {
    match stream.run(out, deps, stop).and_then(|()| out.flush()) {
        Ok(()) => told.complete(),
        Err(why) => log::debug!("a stream ended: {why}"),
    }
}

fn too_many(text: String) -> Answer {
    Answer { headers: vec![("Retry-After", "1".to_owned())], ..Answer::text(429, text) }
}

/// Whether an answer grows with what runs on the node. Health is told whatever else is asked.
fn grows(path: &str) -> bool {
    matches!(first_element(path), "metrics" | "pods" | "runningpods" | "stats")
}

fn respond(request: tiny_http::Request, answer: Answer) {
    let mut response = tiny_http::Response::from_data(answer.body).with_status_code(answer.status);
    let headers = answer.headers.iter().map(|(name, value)| (*name, value.as_str()));
    for (name, value) in
        [("Server", "coracle"), ("Content-Type", answer.content_type)].into_iter().chain(headers)
    {
        if let Ok(header) = tiny_http::Header::from_bytes(name, value) {
            response.add_header(header);
        }
    }
    if let Err(why) = request.respond(response) {
        log::debug!("an answer was not taken: {why}");
    }
}

/// Reads what a client sends; `None` when it or the server is going.
pub(super) fn read_some(client: &mut Client, into: &mut Vec<u8>) -> Option<()> {
    let mut chunk = [0; 4096];
    match client.read(&mut chunk) {
        Ok(0) => None,
        Ok(count) => {
            into.extend_from_slice(chunk.get(..count).unwrap_or_default());
            Some(())
        }
        Err(why) if is_passing(&why) => Some(()),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::main_port::tests::Served;
    use super::*;

    #[test]
    fn only_a_stream_that_came_to_its_end_is_told_to_be_complete() {
        let served = Served::new(|_| {});
        let complete = |stream: Stream| {
            let told = Told::default();
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                run(stream, &mut Vec::new(), &told, &served.deps, &StopToken::never());
            }));
            (told.is_complete(), outcome.is_ok())
        };
        assert_eq!(complete(Stream::Own(Box::new(|out, _, _| out.write_all(b"all")))), (true, true));
        let fails = Stream::Own(Box::new(|out, _, _| {
            out.write_all(b"some")?;
            Err(io::ErrorKind::InvalidData.into())
        }));
        assert_eq!(complete(fails), (false, true));
        assert_eq!(complete(Stream::Own(Box::new(|_, _, _| panic!("of the test")))), (false, false));
    }

    #[test]
    fn no_caller_keeps_the_others_from_answers_and_streams() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("syslog"), "line\n").unwrap();
        let served = Served::new(|endpoints| endpoints.log_dir = dir.path().to_owned());
        let gate = Gate::before(served.deps.clone());
        let caller = |ip: &str, user: Option<&str>| {
            Caller::new(Some(format!("{ip}:1").parse().unwrap()), user.map(str::to_owned))
        };
        // Nobody waits for a turn.
        let (source, stop) = crate::util::stop::pair();
        drop(source);
        let ask = |path: &str, caller: &Caller| {
            let asked = Asked { target: super::super::query::Target::parse(path), ..Asked::default() };
            match begin(Listener::Main, &asked, caller, &gate, &stop) {
                Begun::Whole(answer, turn) => (answer.status, turn),
                Begun::Stream(_, slot) => (200, Some(slot)),
            }
        };
        let one = caller("10.0.0.1", None);
        let held: Vec<_> = (0..ANSWERS_PER_PEER).map(|_| ask("/pods", &one)).collect();
        assert!(held.iter().all(|(status, turn)| *status == 200 && turn.is_some()));
        for path in ["/pods", "/metrics/cadvisor", "/stats/summary", "/runningpods/"] {
            assert_eq!(ask(path, &one).0, 429, "{path}");
        }
        for path in ["/healthz", "/configz", "/logs/syslog"] {
            assert_eq!(ask(path, &one).0, 200, "{path}");
        }
        assert_eq!(ask("/pods", &caller("10.0.0.2", None)).0, 200);
        drop(held);
        assert_eq!(ask("/pods", &one).0, 200);

        let tenant = |n: usize| caller(&format!("10.0.1.{n}"), Some("tenant"));
        let held: Vec<_> = (0..STREAMS_PER_TOKEN).map(|n| ask("/logs/syslog", &tenant(n))).collect();
        assert_eq!(ask("/logs/syslog", &tenant(200)).0, 429);
        assert_eq!(ask("/logs/syslog", &caller("10.0.1.1", Some("other"))).0, 200);
        let all: Vec<_> = (0..STREAMS_PER_PEER).map(|_| ask("/logs/syslog", &one)).collect();
        assert!(all.iter().chain(&held).all(|(status, slot)| *status == 200 && slot.is_some()));
        assert_eq!(ask("/logs/syslog", &one).0, 429);
        assert_eq!(ask("/logs/syslog", &caller("10.0.0.2", Some("other"))).0, 200);
    }
}
