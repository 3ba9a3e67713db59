//! One connection: read and vet the head, pass a clean one on, move the answer back.
//!
//! One request per connection, no bodies, HTTP/1.0 towards tiny_http: nothing of what a
//! client sends beyond method and target ever reaches it.

use std::io::{self, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

use super::http::{Gate, KEY_HEADER, STREAMS};
use super::listener::{Listener, Socket, connect_local};
use super::metrics;
use super::query::Target;
use super::routes::{self, Answer, Asked, Method, Reply};

/// A head must have arrived by then.
const HEAD_LIMIT: Duration = Duration::from_secs(10);

/// Request line and headers together. Tools send less than 1 KiB.
const HEAD_BYTES: usize = 16 * 1024;

/// tiny_http hands a clean request over at once; later means that it does not work.
const HANDOVER: Duration = Duration::from_secs(10);

/// A TCP client that takes nothing for so long is dropped.
const STALL: Duration = Duration::from_secs(60);

/// When the server stops, a handler in the middle of a call is left behind after this.
const HANDLER_LIMIT: Duration = Duration::from_secs(1);

/// How much of an answer waits for its client.
const PUMP_BYTES: usize = 64 * 1024;

/// What a refused client may still send before the socket closes, and for how long.
const FAREWELL: (usize, Duration) = (64 * 1024, Duration::from_secs(1));

/// Starts the thread of one connection.
pub(super) fn spawn(listener: Listener, socket: Socket, gate: &Gate) -> io::Result<Running> {
    let gate = gate.clone();
    let name = format!("conn/{}", gate.number());
    threads::spawn(&name, Stack::Small, OnDeath::Nobody, move |stop| serve(listener, socket, &gate, &stop))
}

/// Refuses without a thread: what fits the socket's buffer is sent, nothing is waited for.
pub(super) fn refuse(mut socket: Socket, status: u16, text: &str) {
    let _ = socket.write(refusal(status, text).as_bytes());
    socket.shutdown_write();
}

fn refusal(status: u16, text: &str) -> String {
    let phrase = match status {
        400 => "Bad Request",
        403 => "Forbidden",
        405 => "Method Not Allowed\r\nAllow: GET",
        408 => "Request Timeout",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        505 => "HTTP Version Not Supported",
        _ => "Service Unavailable",
    };
    format!(
        "HTTP/1.0 {status} {phrase}\r\nServer: coracle\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n{text}"
    )
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
    method: &'static str,
    target: String,
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
        "GET" => "GET",
        "HEAD" if listener != Listener::Local => "HEAD",
        // What changes something says so; all that it needs is in the target.
        "POST" if listener == Listener::Local => "POST",
        _ => return Err(NoHead::Refused(405, "GET only\n")),
    };
    if !target.starts_with('/') || !target.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(NoHead::Refused(400, "malformed target\n"));
    }
    for line in lines.filter(|line| !line.is_empty()) {
        let Some((name, value)) = line.split_once(':') else {
            return Err(NoHead::Refused(400, "malformed header\n"));
        };
        let body = (name.eq_ignore_ascii_case("content-length") && value.trim() != "0")
            || name.eq_ignore_ascii_case("transfer-encoding");
        if body {
            return Err(NoHead::Refused(413, "no request bodies here\n"));
        }
    }
    Ok(Head { method, target: target.to_owned() })
}

/// The client's socket and the server's stop signal.
struct Client<'a> {
    socket: Socket,
    gate: &'a Gate,
}

#[derive(Debug, PartialEq, Eq)]
enum Ready {
    Yes,
    Late,
    Stopped,
}

impl Client<'_> {
    fn wait(&self, flags: PollFlags, deadline: Instant) -> Ready {
        let _waiting = threads::waiting("a client");
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(&self.socket, flags), PollFd::new(&self.gate.wake, PollFlags::IN)];
            let outcome = poll(&mut fds, timespec(Some(left)).as_ref());
            if !fds[1].revents().is_empty() {
                return Ready::Stopped;
            }
            if outcome.is_ok() && !fds[0].revents().is_empty() {
                return Ready::Yes;
            }
            if left.is_zero() {
                return Ready::Late;
            }
        }
    }

    fn read_head(&mut self, listener: Listener) -> Result<Head, NoHead> {
        let deadline = Instant::now() + HEAD_LIMIT;
        let mut head: Vec<u8> = Vec::with_capacity(1024);
        let mut chunk = [0; 1024];
        loop {
            match self.wait(PollFlags::IN, deadline) {
                Ready::Yes => {}
                Ready::Late => return Err(NoHead::Refused(408, "the request took too long\n")),
                Ready::Stopped => return Err(NoHead::Gone),
            }
            let count = match self.socket.read(&mut chunk) {
                Ok(0) => return Err(NoHead::Gone),
                Ok(count) => count,
                Err(why) if is_passing(&why) => continue,
                Err(_) => return Err(NoHead::Gone),
            };
            // The end may lie across two reads.
            let from = head.len().saturating_sub(3);
            head.extend_from_slice(chunk.get(..count).unwrap_or_default());
            if let Some(end) = end_of_head(&head, from) {
                head.truncate(end);
                let text =
                    std::str::from_utf8(&head).map_err(|_| NoHead::Refused(400, "the head is not text\n"))?;
                return vet(text, listener);
            }
            if head.len() > HEAD_BYTES {
                return Err(NoHead::Refused(431, "the request's head is too large\n"));
            }
        }
    }

    /// Refuses and waits a little for the client to read it: closing with unread input
    /// would reset the connection and could take the answer with it.
    fn farewell(mut self, status: u16, text: &str) {
        let _ = self.socket.write(refusal(status, text).as_bytes());
        self.socket.shutdown_write();
        let (mut bytes, limit) = FAREWELL;
        let deadline = Instant::now() + limit;
        let mut chunk = [0; 4096];
        while bytes > 0 && self.wait(PollFlags::IN, deadline) == Ready::Yes {
            match self.socket.read(&mut chunk) {
                Ok(0) => return,
                Ok(count) => bytes = bytes.saturating_sub(count),
                Err(why) if is_passing(&why) => {}
                Err(_) => return,
            }
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

fn is_passing(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn timespec(limit: Option<Duration>) -> Option<Timespec> {
    // Longer than a Timespec holds means for ever.
    limit.and_then(|limit| Timespec::try_from(limit).ok())
}

fn serve(listener: Listener, socket: Socket, gate: &Gate, stop: &StopToken) {
    let mut client = Client { socket, gate };
    let head = match client.read_head(listener) {
        Ok(head) => head,
        Err(NoHead::Gone) => return,
        Err(NoHead::Refused(status, text)) => return client.farewell(status, text),
    };
    let ticket = gate.announce();
    let clean = format!("{} {} HTTP/1.0\r\n{KEY_HEADER}: {}\r\n\r\n", head.method, head.target, ticket.key);
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
            return client.farewell(503, "the server is restarting, try again\n");
        }
    };
    let request = {
        let _waiting = threads::waiting("tiny_http");
        select_biased! {
            recv(stop.signal()) -> _ => return,
            recv(ticket.request) -> request => request.ok(),
            default(HANDOVER) => None,
        }
    };
    let Some(request) = request else {
        gate.report_broken();
        return client.farewell(503, "the server is restarting, try again\n");
    };
    drop(ticket);
    let shared = gate.clone();
    let name = format!("strm/{}", gate.number());
    let handler = threads::spawn(&name, Stack::Large, OnDeath::Nobody, move |stop| {
        answer(request, listener, &shared, &stop);
    });
    match handler {
        Ok(mut handler) => {
            let patience = (listener != Listener::Local).then_some(STALL);
            pump(client.socket, &inner, gate, patience, &mut handler);
            drain(&inner, gate);
            // A writer blocked on the private socket fails now, then the handler ends.
            drop(inner);
            let _ = handler.stop(HANDLER_LIMIT);
        }
        // The request was dropped with the thread's body: tiny_http has answered 500.
        Err(why) => {
            log::warn!("no thread for a request: {why}");
            client.farewell(503, "no thread for the request\n");
        }
    }
}

/// Moves the answer from tiny_http to the client, until its end. When the client goes, the
/// handler is told to stop, and the rest of its answer is dropped.
fn pump(
    mut client: Socket,
    mut inner: &UnixStream,
    gate: &Gate,
    patience: Option<Duration>,
    handler: &mut Running,
) {
    let _waiting = threads::waiting("an answer");
    let mut buffer = vec![0_u8; PUMP_BYTES];
    let (mut from, mut to) = (0, 0);
    let mut junk = 0_usize;
    let (mut listens, mut ended) = (true, false);
    while !(ended && from == to) {
        let client_flags = match (listens, from < to) {
            (true, true) => PollFlags::IN | PollFlags::OUT,
            (true, false) => PollFlags::IN,
            (false, true) => PollFlags::OUT,
            (false, false) => PollFlags::empty(),
        };
        let mut fds = [
            PollFd::new(&gate.wake, PollFlags::IN),
            PollFd::new(&client, client_flags),
            PollFd::new(inner, PollFlags::IN),
        ];
        // Its end would wake the poll for ever while the client still takes what is here.
        let (used, _) = fds.split_at_mut(if !ended && from == to { 3 } else { 2 });
        let limit = patience.filter(|_| from < to);
        match poll(used, timespec(limit).as_ref()) {
            // Nothing for the whole of its patience.
            Ok(0) => break,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => break,
        }
        let [wake, client_events, inner_events] = fds.map(|fd| fd.revents());
        if !wake.is_empty() || client_events.intersects(PollFlags::ERR) {
            break;
        }
        if client_events.contains(PollFlags::HUP) {
            // Both directions are closed: there is nobody to answer.
            break;
        }
        if client_events.contains(PollFlags::IN) {
            let mut chunk = [0; 4096];
            match client.read(&mut chunk) {
                Ok(0) => {
                    // It may still read: a stream ends, a whole answer goes out.
                    listens = false;
                    handler.ask_to_stop();
                }
                Ok(count) => {
                    junk += count;
                    if junk > FAREWELL.0 {
                        break;
                    }
                }
                Err(why) if is_passing(&why) => {}
                Err(_) => break,
            }
        }
        if client_events.contains(PollFlags::OUT) && from < to {
            match client.write(buffer.get(from..to).unwrap_or_default()) {
                Ok(count) => from += count,
                Err(why) if is_passing(&why) => {}
                Err(_) => break,
            }
        }
        if from == to && !inner_events.is_empty() {
            (from, to) = (0, 0);
            match inner.read(&mut buffer) {
                Ok(0) => ended = true,
                Ok(count) => to = count,
                Err(why) if is_passing(&why) => {}
                Err(_) => ended = true,
            }
        }
    }
    client.shutdown_write();
    handler.ask_to_stop();
}

/// Takes what is left of an answer whose client is gone: a handler in the middle of a call
/// to the runtime keeps its place among the connections until the call ends.
fn drain(mut inner: &UnixStream, gate: &Gate) {
    let _waiting = threads::waiting("a call");
    let mut chunk = [0; 4096];
    loop {
        match inner.read(&mut chunk) {
            Ok(0) => return,
            Ok(_) => {}
            Err(why) if is_passing(&why) => {
                let mut fds = [PollFd::new(&gate.wake, PollFlags::IN), PollFd::new(inner, PollFlags::IN)];
                let outcome = poll(&mut fds, None);
                let broken = outcome.is_err_and(|why| why != rustix::io::Errno::INTR);
                if broken || !fds[0].revents().is_empty() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// The handler's thread: makes the answer.
fn answer(request: tiny_http::Request, listener: Listener, gate: &Gate, stop: &StopToken) {
    let method = match request.method() {
        tiny_http::Method::Get => Method::Get,
        tiny_http::Method::Head => Method::Head,
        tiny_http::Method::Post => Method::Post,
        tiny_http::Method::Put => Method::Put,
        _ => Method::Other,
    };
    let asked = Asked { method, target: Target::parse(request.url()), ..Asked::default() };
    let _timed = metrics::count(listener, method.as_str(), &asked.target.path);
    match routes::route(listener, &asked, &gate.deps) {
        Reply::Whole(answer) => respond(request, answer),
        Reply::Stream(_) if gate.streams.fetch_add(1, Ordering::Relaxed) >= STREAMS => {
            gate.streams.fetch_sub(1, Ordering::Relaxed);
            respond(request, Answer::text(429, format!("already {STREAMS} streams are open\n")));
        }
        Reply::Stream(stream) => {
            let _slot = Slot(&gate.streams);
            let mut out = BufWriter::new(request.into_writer());
            let outcome = stream.run(&mut out, &gate.deps, stop).and_then(|()| out.flush());
            if let Err(why) = outcome {
                log::debug!("a stream ended: {why}");
            }
        }
    }
}

/// Gives a stream's place back, also when its handler panics.
struct Slot<'a>(&'a AtomicUsize);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn respond(request: tiny_http::Request, answer: Answer) {
    let mut response = tiny_http::Response::from_data(answer.body).with_status_code(answer.status);
    let headers = answer.headers.iter().map(|(name, value)| (*name, value.as_str()));
    for (name, value) in [("Server", "coracle"), ("Content-Type", answer.content_type)].into_iter().chain(headers)
    {
        if let Ok(header) = tiny_http::Header::from_bytes(name, value) {
            response.add_header(header);
        }
    }
    if let Err(why) = request.respond(response) {
        log::debug!("an answer was not taken: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clean_heads_pass() {
        let check = |head: &str, expected: Result<(&'static str, &str), u16>| {
            let got = match vet(head, Listener::ReadOnly) {
                Ok(head) => Ok((head.method, head.target)),
                Err(NoHead::Refused(status, _)) => Err(status),
                Err(NoHead::Gone) => Err(0),
            };
            assert_eq!(got, expected.map(|(method, target)| (method, target.to_owned())), "{head:?}");
        };
        check("GET /pods HTTP/1.1\r\nHost: x\r\nContent-Length: 0", Ok(("GET", "/pods")));
        check("HEAD /a?b=c HTTP/1.0", Ok(("HEAD", "/a?b=c")));
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
        assert_eq!(vet("POST /x HTTP/1.0", Listener::Local).map(|head| head.method), Ok("POST"));
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
