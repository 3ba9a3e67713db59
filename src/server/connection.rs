//! One connection in the clear: read and vet the head, have it answered.
//!
//! One request per connection and no bodies: method, target and the form of the answer are
//! all that counts.

use std::io;
use std::time::{Duration, Instant};

use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

use super::client::{Client, Ready, Socket};
use super::crowd::Place;
use super::exchange::{exchange, farewell, read_some, refusal};
use super::http::Gate;
use super::listener::Listener;
use super::query::{Target, takes_gzip};
use super::routes::{Asked, Method};
use super::shares::Caller;
use super::{head, main_connection, metrics, upgrade};

/// A head must have arrived by then.
const HEAD_LIMIT: Duration = Duration::from_secs(10);

/// Request line and headers together. Tools send less than 1 KiB.
const HEAD_BYTES: usize = 16 * 1024;

/// Starts the thread of one connection; only those of the main port have places.
pub(super) fn spawn(
    listener: Listener,
    socket: Socket,
    place: Option<Place>,
    gate: &Gate,
) -> io::Result<Running> {
    let gate = gate.clone();
    let name = format!("conn/{}", gate.number());
    // The main port's have certificates to judge and answers of the API server to read.
    let stack = if place.is_some() { Stack::Large } else { Stack::Small };
    threads::spawn(&name, stack, OnDeath::Nobody, move |stop| match &place {
        Some(place) => main_connection::serve(socket, place, &gate, &stop),
        None => serve(listener, Client::plain(socket), &gate, &stop),
    })
}

/// Refuses without a thread: what fits the socket's buffer is sent, nothing is waited for.
pub(super) fn refuse(mut socket: Socket, status: u16, text: &str) {
    use std::io::Write;
    let _ = socket.write(refusal(status, text).as_bytes());
    socket.shutdown_write();
}

/// Why a head was not taken.
#[derive(Debug, PartialEq, Eq)]
enum NoHead {
    /// The client or the server is going.
    Gone,
    /// The client gets this status and text.
    Refused(u16, &'static str),
}

/// What is kept of a head.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    method: Method,
    target: String,
    /// The `Accept` header.
    accept: String,
    /// Whether the client takes gzip.
    gzip: bool,
}

/// Vets a complete head.
fn vet(head: &str, listener: Listener) -> Result<Head, NoHead> {
    let mut lines = head.split('\n').map(|line| line.trim_end_matches('\r'));
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(NoHead::Refused(400, "malformed request line\n"));
    };
    if !version.starts_with("HTTP/1.") {
        return Err(NoHead::Refused(505, "HTTP/1.0 and HTTP/1.1 only\n"));
    }
    let method = match method {
        "GET" => Method::Get,
        "HEAD" if listener != Listener::Local => Method::Head,
        // What changes something says so; all that it needs is in the target.
        "POST" if listener == Listener::Local => Method::Post,
        _ => return Err(NoHead::Refused(405, "GET only\n")),
    };
    if !target.starts_with('/') || !target.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(NoHead::Refused(400, "malformed target\n"));
    }
    let (mut accept, mut gzip) = (String::new(), false);
    for line in lines.filter(|line| !line.is_empty()) {
        let Some((name, value)) = line.split_once(':') else {
            return Err(NoHead::Refused(400, "malformed header\n"));
        };
        let body = (name.eq_ignore_ascii_case("content-length") && value.trim() != "0")
            || name.eq_ignore_ascii_case("transfer-encoding");
        if body {
            return Err(NoHead::Refused(413, "no request bodies here\n"));
        }
        if name.eq_ignore_ascii_case("accept") {
            accept = value.trim().to_owned();
        } else if name.eq_ignore_ascii_case("accept-encoding") {
            gzip |= value.split(',').any(takes_gzip);
        }
    }
    Ok(Head { method, target: target.to_owned(), accept, gzip })
}

/// The lines of a head, and what came behind it.
fn read_head(client: &mut Client, gate: &Gate) -> Result<(Vec<u8>, Vec<u8>), NoHead> {
    let deadline = Instant::now() + HEAD_LIMIT;
    let mut head: Vec<u8> = Vec::with_capacity(1024);
    loop {
        match client.wait(true, false, &gate.wake, deadline) {
            Ready::Yes => {}
            Ready::Late => return Err(NoHead::Refused(408, "the request took too long\n")),
            Ready::Stopped => return Err(NoHead::Gone),
        }
        // The end may lie across two reads.
        let from = head.len().saturating_sub(3);
        read_some(client, &mut head).ok_or(NoHead::Gone)?;
        if let Some(end) = end_of_head(&head, from) {
            // Of one of the two ends of a head, some bytes are left.
            let behind =
                if head.get(end..).is_some_and(|rest| rest.starts_with(b"\r\n\r\n")) { 4 } else { 2 };
            let mut early = head.split_off(end);
            early.drain(..behind.min(early.len()));
            return Ok((head, early));
        }
        if head.len() > HEAD_BYTES {
            return Err(NoHead::Refused(431, "the request's head is too large\n"));
        }
    }
}

/// Where the head's lines end, searching from `from`.
fn end_of_head(bytes: &[u8], from: usize) -> Option<usize> {
    let tail = bytes.get(from..)?;
    let with_returns = tail.windows(4).position(|window| window == b"\r\n\r\n");
    let without = tail.windows(2).position(|window| window == b"\n\n");
    let first = match (with_returns, without) {
        (Some(a), Some(b)) => a.min(b),
        (a, b) => a.or(b)?,
    };
    Some(from + first)
}

fn serve(listener: Listener, mut client: Client, gate: &Gate, stop: &StopToken) {
    let (lines, early) = match read_head(&mut client, gate) {
        Ok(head) => head,
        Err(NoHead::Gone) => return,
        Err(NoHead::Refused(status, text)) => return farewell(client, gate, status, text),
    };
    if listener == Listener::Local && upgrade::is_for_us(&lines) {
        match head::Head::parse(&lines, None) {
            Ok(head) => upgrade::serve(client, head::Head { early, ..head }, gate, stop),
            Err(head::Refused(status, text)) => farewell(client, gate, status, text),
        }
        return;
    }
    let vetted = std::str::from_utf8(&lines).map_err(|_| NoHead::Refused(400, "the head is not text\n"));
    let head = match vetted.and_then(|text| vet(text, listener)) {
        Ok(head) => head,
        Err(NoHead::Gone) => return,
        Err(NoHead::Refused(status, text)) => return farewell(client, gate, status, text),
    };
    let Head { method, target, accept, gzip } = head;
    let asked = Asked { method, target: Target::parse(&target), accept, gzip, ..Asked::default() };
    let _timed = metrics::count(listener, asked.method.as_str(), &asked.target.path);
    exchange(client, listener, asked, Caller::default(), None, gate, stop);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clean_heads_pass() {
        let check = |head: &str, expected: Result<(Method, &str), u16>| {
            let got = match vet(head, Listener::ReadOnly) {
                Ok(head) => Ok((head.method, head.target)),
                Err(NoHead::Refused(status, _)) => Err(status),
                Err(NoHead::Gone) => Err(0),
            };
            assert_eq!(got, expected.map(|(method, target)| (method, target.to_owned())), "{head:?}");
        };
        check("GET /pods HTTP/1.1\r\nHost: x\r\nContent-Length: 0", Ok((Method::Get, "/pods")));
        check("HEAD /a?b=c HTTP/1.0", Ok((Method::Head, "/a?b=c")));
        let form = vet("GET / HTTP/1.1\r\naccept:  a/b\r\nAccept-Encoding: br,gzip", Listener::ReadOnly);
        assert_eq!(form.map(|head| (head.accept, head.gzip)), Ok(("a/b".to_owned(), true)));
        check("POST / HTTP/1.1", Err(405));
        check("GET http://x/ HTTP/1.1", Err(400));
        check("GET / HTTP/2.0", Err(505));
        check("GET /", Err(400));
        check("GET  / HTTP/1.1", Err(400));
        check("GET /\u{e4} HTTP/1.1", Err(400));
        check("GET / HTTP/1.1\r\nContent-Length: 70368744177664", Err(413));
        check("GET / HTTP/1.1\r\ntransfer-encoding: chunked", Err(413));
        check("GET / HTTP/1.1\r\nnonsense", Err(400));
        check("", Err(400));
        assert_eq!(vet("POST /x HTTP/1.0", Listener::Local).map(|head| head.method), Ok(Method::Post));
        assert!(vet("POST /x HTTP/1.0\r\nContent-Length: 1", Listener::Local).is_err());
        assert!(vet("PUT /x HTTP/1.0", Listener::Local).is_err());
    }

    #[test]
    fn finds_the_end_across_reads() {
        assert_eq!(end_of_head(b"GET / HTTP/1.0\r\n\r\nrest", 0), Some(14));
        assert_eq!(end_of_head(b"GET / HTTP/1.0\n\n", 11), Some(14));
        assert_eq!(end_of_head(b"GET / HTTP/1.0\r\n", 0), None);
        assert_eq!(end_of_head(b"", 0), None);
    }
}
