//! One connection of the main port: handshake, then requests one after the other, each by a
//! known caller that is allowed to ask.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::util::stop::StopToken;
use crate::util::threads;

use super::auth::{self, Refusal, Visitor};
use super::client::{Client, Ready, Socket};
use super::crowd::Place;
use super::exchange::{exchange, farewell, leave, phrase, read_some};
use super::head::{self, HEAD_BYTES, Head, Refused};
use super::http::Gate;
use super::listener::Listener;
use super::pump::{Form, Kept};
use super::query::takes_gzip;
use super::routes::{Asked, Method};
use super::shares::Caller;
use super::{MainPort, main_port, metrics, pump, upgrade};

/// The handshake must be over by then.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// A head, and a body, must have arrived so long after its first byte. That of a new
/// connection begins with the handshake's end.
const HEAD_LIMIT: Duration = Duration::from_secs(10);

/// Between two requests, as the Go kubelet.
const IDLE_LIMIT: Duration = Duration::from_secs(90);

/// The few bodies that mean something are a number or two.
const BODY_BYTES: u64 = 8 * 1024;

/// A client that does not take a short answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// What Go's server says to a client that speaks in the clear.
const PLAIN_HTTP: &str = "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";

/// Why no head came.
enum NoHead {
    /// The client or the server is going.
    Gone,
    Refused(Refused),
}

/// The body of a connection's thread.
pub(super) fn serve(socket: Socket, place: &Place, gate: &Gate, stop: &StopToken) {
    let Some(main) = &gate.main else { return };
    let Some(mut client) = shake_hands(socket, main, gate) else { return };
    let mut visitor = Visitor::default();
    // A client that is gone without a word must not hold a stream's place for ever.
    upgrade::tune(client.as_fd());
    let mut ahead = Vec::new();
    let mut begin = Some(Instant::now());
    loop {
        let head = match read_head(&mut client, ahead, begin.take(), gate) {
            Ok(head) => head,
            Err(NoHead::Gone) => return,
            Err(NoHead::Refused(Refused(status, text))) => return farewell(client, gate, status, text),
        };
        let Some(kept) = turn(client, head, &mut visitor, main, place, gate, stop) else { return };
        (client, ahead) = kept;
        client.rest();
        place.rest(Instant::now());
    }
}

fn shake_hands(socket: Socket, main: &MainPort, gate: &Gate) -> Option<Client> {
    let deadline = Instant::now() + HANDSHAKE_LIMIT;
    let mut plain = Client::plain(socket);
    if plain.wait(true, false, &gate.wake, deadline) != Ready::Yes {
        return None;
    }
    if plain.peek_is_http() {
        leave(plain, gate, PLAIN_HTTP);
        return None;
    }
    let mut client = plain.into_tls(main.tls.session().ok()?);
    loop {
        match client.handshake() {
            Ok(true) => return Some(client),
            Ok(false) => {}
            Err(why) => {
                let peer = client.peer();
                log::debug!("TLS handshake with {peer:?} failed: {why}");
                return None;
            }
        }
        let owes = client.owes();
        if client.wait(!owes, owes, &gate.wake, deadline) != Ready::Yes {
            return None;
        }
    }
}

/// Reads the next head. `ahead` was read already; `begin` is when it was to begin at the
/// latest, `None`: the client may take its time.
fn read_head(
    client: &mut Client,
    mut ahead: Vec<u8>,
    begin: Option<Instant>,
    gate: &Gate,
) -> Result<Head, NoHead> {
    let idle = Instant::now() + IDLE_LIMIT;
    let mut deadline = begin.map(|begin| begin + HEAD_LIMIT);
    let mut from = 0;
    loop {
        if let Some(end) = head::end(&ahead, from) {
            if end > HEAD_BYTES {
                return Err(too_large());
            }
            let mut head =
                Head::parse(ahead.get(..end).unwrap_or_default(), client.peer()).map_err(NoHead::Refused)?;
            head.early = ahead.split_off(end + 4);
            return Ok(head);
        }
        if ahead.len() > HEAD_BYTES {
            return Err(too_large());
        }
        if !ahead.is_empty() && deadline.is_none() {
            deadline = Some(Instant::now() + HEAD_LIMIT);
        }
        match client.wait(true, false, &gate.wake, deadline.unwrap_or(idle)) {
            Ready::Yes => {}
            Ready::Late if ahead.is_empty() => return Err(NoHead::Gone),
            Ready::Late => return Err(NoHead::Refused(Refused(408, "the request took too long\n"))),
            Ready::Stopped => return Err(NoHead::Gone),
        }
        // The end may lie across two reads.
        from = ahead.len().saturating_sub(3);
        if client.flush().is_err() {
            return Err(NoHead::Gone);
        }
        read_some(client, &mut ahead).ok_or(NoHead::Gone)?;
    }
}

fn too_large() -> NoHead {
    NoHead::Refused(Refused(431, "the request's head is too large\n"))
}

/// Serves one request. A client that may ask again comes back, with what it sent ahead.
fn turn(
    mut client: Client,
    mut head: Head,
    visitor: &mut Visitor,
    main: &MainPort,
    place: &Place,
    gate: &Gate,
    stop: &StopToken,
) -> Option<Kept> {
    let _timed = metrics::count(Listener::Main, &head.method, &head.target.path);
    // Checked with the rest of the head.
    let length = head.body_bytes().unwrap_or(u64::MAX);
    let chunked = head.is_chunked();
    let no_body = length == 0 && !chunked;
    let admitted = {
        let _waiting = threads::waiting("a review");
        main.auth.admit(visitor, &|| client.certificates(), &mut head)
    };
    let user = match admitted {
        Ok(user) => user,
        Err(refusal) => return refuse(client, head, &refusal, no_body && visitor.may_go_on(), gate),
    };
    place.busy(Instant::now());
    log::debug!("{} {} by {}", head.method, head.target.path, user.name);
    if matches!(main_port::first_element(&head.target.path), "exec" | "attach" | "portForward") {
        if !no_body {
            farewell(client, gate, 400, "no request body here\n");
            return None;
        }
        upgrade::serve(client, head, gate, stop);
        return None;
    }
    if length > BODY_BYTES {
        farewell(client, gate, 413, "the request's body is too large\n");
        return None;
    }
    let body = match chunked {
        true => read_chunks(&mut client, &mut head, gate),
        false => read_body(&mut client, &mut head, length, gate),
    };
    let body = match body {
        Ok(body) => body,
        Err(NoHead::Gone) => return None,
        Err(NoHead::Refused(Refused(status, text))) => {
            farewell(client, gate, status, text);
            return None;
        }
    };
    let method = match head.method.as_str() {
        "GET" => Method::Get,
        "HEAD" => Method::Head,
        "POST" => Method::Post,
        "PUT" => Method::Put,
        _ => Method::Other,
    };
    let form = Form { is_1_1: head.is_1_1, keep: head.keeps_alive(), head_only: method == Method::Head };
    let gzip = head.elements("accept-encoding").any(takes_gzip);
    let accept = head.elements("accept").collect::<Vec<_>>().join(",");
    let Head { target, early, .. } = head;
    let asked = Asked { method, target, accept, gzip, body };
    let caller = Caller::new(client.peer(), auth::named_by_token(user));
    let (client, sent) = exchange(client, Listener::Main, asked, caller, Some(form), gate, stop)?;
    let mut ahead = early;
    ahead.extend(sent);
    // What each request has brought along counts together.
    (ahead.len() < pump::AHEAD_BYTES).then_some((client, ahead))
}

/// Reads the body; what comes after it stays in the head's `early`.
fn read_body(client: &mut Client, head: &mut Head, length: u64, gate: &Gate) -> Result<Vec<u8>, NoHead> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let mut body = std::mem::take(&mut head.early);
    let deadline = Instant::now() + HEAD_LIMIT;
    if body.len() < length {
        go_on(client, head, gate)?;
    }
    while body.len() < length {
        read_more(client, &mut body, deadline, gate)?;
    }
    head.early = body.split_off(length);
    Ok(body)
}

/// As [`read_body`], of one that comes in chunks.
fn read_chunks(client: &mut Client, head: &mut Head, gate: &Gate) -> Result<Vec<u8>, NoHead> {
    let mut raw = std::mem::take(&mut head.early);
    let deadline = Instant::now() + HEAD_LIMIT;
    go_on(client, head, gate)?;
    loop {
        if let Some((body, used)) = chunks(&raw).map_err(NoHead::Refused)? {
            head.early = raw.split_off(used);
            return Ok(body);
        }
        if raw.len() > RAW_BYTES {
            return Err(NoHead::Refused(LARGE));
        }
        read_more(client, &mut raw, deadline, gate)?;
    }
}

/// Tells a client that waits for it to send its body.
fn go_on(client: &mut Client, head: &Head, gate: &Gate) -> Result<(), NoHead> {
    if !head.expects_continue() {
        return Ok(());
    }
    let go_on = b"HTTP/1.1 100 Continue\r\n\r\n";
    client.write_all(go_on, &gate.wake, ANSWER_LIMIT).map_err(|_| NoHead::Gone)
}

fn read_more(client: &mut Client, into: &mut Vec<u8>, deadline: Instant, gate: &Gate) -> Result<(), NoHead> {
    match client.wait(true, false, &gate.wake, deadline) {
        Ready::Yes => read_some(client, into).ok_or(NoHead::Gone).map(|_| ()),
        Ready::Late => Err(NoHead::Refused(Refused(408, "the request took too long\n"))),
        Ready::Stopped => Err(NoHead::Gone),
    }
}

/// A body in chunks with what is round them.
const RAW_BYTES: usize = 4 * BODY_BYTES as usize;

const LARGE: Refused = Refused(413, "the request's body is too large\n");

/// The body, and how many bytes it took; `None` while some are missing. Neither extensions nor
/// trailers are taken: none of our callers sends any.
fn chunks(raw: &[u8]) -> Result<Option<(Vec<u8>, usize)>, Refused> {
    let wrong = || Refused(400, "malformed chunk\n");
    let mut body = Vec::new();
    let mut rest = raw;
    loop {
        let Some(end) = rest.windows(2).position(|two| two == b"\r\n") else {
            return if rest.len() > 9 { Err(wrong()) } else { Ok(None) };
        };
        let (digits, after) = rest.split_at(end);
        let hex = (1..=8).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
        let size = std::str::from_utf8(digits).ok().filter(|_| hex);
        let size = size.and_then(|text| usize::from_str_radix(text, 16).ok()).ok_or_else(wrong)?;
        if size + body.len() > BODY_BYTES as usize {
            return Err(LARGE);
        }
        let after = after.get(2..).unwrap_or_default();
        let Some(ending) = after.get(size..size + 2) else { return Ok(None) };
        if ending != b"\r\n" {
            return Err(wrong());
        }
        body.extend_from_slice(after.get(..size).unwrap_or_default());
        rest = after.get(size + 2..).unwrap_or_default();
        if size == 0 {
            return Ok(Some((body, raw.len() - rest.len())));
        }
    }
}

/// Answers a caller who is not let in, and closes the connection unless the caller may ask again.
fn refuse(mut client: Client, head: Head, refusal: &Refusal, again: bool, gate: &Gate) -> Option<Kept> {
    let Refusal { status, text } = refusal;
    let keep = again && head.keeps_alive();
    let connection = match (keep, head.is_1_1) {
        (true, false) => "Connection: keep-alive\r\n",
        (false, true) => "Connection: close\r\n",
        _ => "",
    };
    let body = if head.method == "HEAD" { "" } else { text };
    let answer = format!(
        "HTTP/1.1 {status} {}\r\nServer: coracle\r\nContent-Type: text/plain; charset=utf-8\r\n\
         Content-Length: {}\r\n{connection}\r\n{body}",
        phrase(*status),
        text.len()
    );
    if keep {
        client.write_all(answer.as_bytes(), &gate.wake, ANSWER_LIMIT).ok()?;
        return Some((client, head.early));
    }
    // Something may not have been read: to close now could take the answer with it.
    leave(client, gate, &answer);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_become_a_body() {
        let whole = |raw: &str| chunks(raw.as_bytes());
        assert_eq!(whole("0\r\n\r\nGET"), Ok(Some((Vec::new(), 5))));
        assert_eq!(whole("1\r\n4\r\n0\r\n\r\n"), Ok(Some((b"4".to_vec(), 11))));
        assert_eq!(
            whole("A\r\n0123456789\r\n2\r\nab\r\n0\r\n\r\n"),
            Ok(Some((b"0123456789ab".to_vec(), 27)))
        );
        for part in ["", "1", "1\r", "1\r\n4", "1\r\n4\r\n", "1\r\n4\r\n0\r\n", "1\r\n4\r\n0\r\n\r"] {
            assert_eq!(whole(part), Ok(None), "{part:?}");
        }
        for (raw, status) in [
            ("x\r\n", 400),
            ("\r\n", 400),
            ("+1\r\n4\r\n", 400),
            ("1;a=b\r\n4\r\n", 400),
            ("1\r\n44\r\n", 400),
            ("0\r\nA: b\r\n\r\n", 400),
            ("0123456789", 400),
            ("ffffffff\r\n", 413),
            ("2001\r\n", 413),
        ] {
            assert_eq!(whole(raw).map_err(|refused| refused.0), Err(status), "{raw:?}");
        }
    }
}
