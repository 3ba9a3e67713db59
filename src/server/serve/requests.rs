//! One connection: the handshake, then its requests one after the other, on one thread.
//!
//! On the node API each request has an authenticated and authorized caller, and the connection
//! may be used again. The other listeners take one request without a body per connection.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::exchange::exchange;
use super::span;
use crate::server::auth::{self, ClientAuth, Rejection};
use crate::server::context::{Context, MainPort};
use crate::server::http::connection::{Connection, Pace, RESPONSE_LIMIT, Ready, Socket};
use crate::server::http::request::{ListenerKind, Method, Request, first_element};
use crate::server::http::response::{LAST, to_bytes};
use crate::server::listen::limiter::ConnectionPermit;
use crate::server::listen::quota::Caller;
use crate::server::node::metrics;
use crate::server::registry;
use crate::server::upgrade;
use crate::transport::http1::request::{HEAD_BYTES, head_length};
use crate::transport::http1::target::takes_gzip;
use crate::transport::http1::{Form, Malformed, RequestError, RequestHead, ResponseWriter};
use crate::util::memory;
use crate::util::threads::{self, OnDeath, Running, Stack};

const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// The limit of a head from its first byte, and of a body. For the first head of a connection it
/// begins with the connection, or with the end of its handshake.
const HEAD_LIMIT: Duration = Duration::from_secs(10);

/// The limit between two requests, as in the Go kubelet.
const IDLE_LIMIT: Duration = Duration::from_secs(90);

/// The limit of a body; the node API uses none longer than a number.
const BODY_BYTES: u64 = 8 * 1024;

/// The limit of a head on listeners where no `kubectl exec` sends its command. Tools send less than
/// 1 KiB.
const SHORT_HEAD_BYTES: usize = 16 * 1024;

/// The response of Go's server to a client that does not use TLS.
const PLAIN_HTTP: &str = "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";

/// The first byte of a client that uses TLS (RFC 8446, section 5.1). No request begins with it.
const TLS_HANDSHAKE: u8 = 22;

const TLS_CLIENT: RequestError = RequestError(400, "Client sent an HTTPS request to an HTTP server.\n");
const GET_ONLY: RequestError = RequestError(405, "GET only\n");
const REQUEST_TIMEOUT: RequestError = RequestError(408, "the request took too long\n");
const LARGE_BODY: RequestError = RequestError(413, "the request's body is too large\n");
const LARGE_HEAD: RequestError = RequestError(431, "the request's head is too large\n");
const DOUBLED_SLASH: RequestError = RequestError(400, "malformed target\n");

/// Why no request was read.
enum NoRequest {
    /// The client has ended the connection, or the time for another request has passed.
    Ended,
    /// The connection is lost, or the server stops.
    Lost,
    Rejected(RequestError),
    /// The path has doubled slashes; the target without them.
    Moved(String),
}

impl From<RequestError> for NoRequest {
    fn from(error: RequestError) -> Self {
        NoRequest::Rejected(error)
    }
}

impl From<io::Error> for NoRequest {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::TimedOut => REQUEST_TIMEOUT.into(),
            _ if Malformed::is(&error) => RequestError(400, "malformed chunk\n").into(),
            _ => NoRequest::Lost,
        }
    }
}

/// Spawns the thread of a connection. `permit`: for the node API.
pub(super) fn spawn(
    listener: ListenerKind,
    socket: Socket,
    permit: Option<ConnectionPermit>,
    context: &Arc<Context>,
) -> io::Result<Running> {
    let name = format!("conn/{}", context.number());
    let context = Arc::clone(context);
    threads::spawn(&name, Stack::Large, OnDeath::Unsupervised, move |_| {
        let connection = Connection::new(socket, Arc::clone(&context.shutdown));
        match (&context.main, &permit) {
            (Some(main), Some(permit)) => serve_main(connection, main, permit, &context),
            _ => serve(connection, listener, &context),
        }
    })
}

/// Rejects a connection without a thread: sends what fits the socket's buffer.
pub(super) fn reject_socket(mut socket: Socket, status: u16, text: &str) {
    use io::Write;
    // The write fails if the client has disconnected.
    let _ = socket.write(&rejection(LAST, status, text));
    socket.shutdown_write();
}

/// A response to a request that is rejected before it is routed.
fn rejection(form: Form, status: u16, text: &str) -> Vec<u8> {
    let mut fields = vec![("Content-Type", "text/plain; charset=utf-8")];
    fields.extend((status == 405).then_some(("Allow", "GET")));
    to_bytes(form, status, &fields, text)
}

/// Rejects a request and ends the connection.
fn reject(connection: Connection, RequestError(status, text): RequestError) {
    connection.finish(&rejection(LAST, status, text));
}

/// Redirects a request to the target without doubled slashes, and ends the connection: no part of
/// the request is read further, and it never reaches the authorization.
fn redirect(connection: Connection, location: &str) {
    let fields = [("Location", location), ("Content-Type", "text/plain; charset=utf-8")];
    connection.finish(&to_bytes(LAST, 307, &fields, "Temporary Redirect\n"));
}

/// Serves the one request of a connection without TLS.
fn serve(mut connection: Connection, listener: ListenerKind, context: &Context) {
    match read_head(&mut connection, listener, Some(Instant::now()), SHORT_HEAD_BYTES) {
        Ok(head) => serve_one(connection, listener, head, context),
        Err(NoRequest::Ended | NoRequest::Lost) => {}
        Err(NoRequest::Rejected(error)) => reject(connection, error),
        Err(NoRequest::Moved(location)) => redirect(connection, &location),
    }
}

fn serve_one(connection: Connection, listener: ListenerKind, head: RequestHead, context: &Context) {
    let is_local = listener == ListenerKind::Local;
    if is_local && is_upgrade(&head) {
        return upgrade::serve(connection, head, context);
    }
    let method = match Method::from_name(&head.method) {
        Method::Get => Method::Get,
        Method::Head if !is_local => Method::Head,
        // The parameters are in the target.
        Method::Post if is_local => Method::Post,
        // Also a request with a body.
        _ if listener == ListenerKind::Registry => {
            let mut bytes = Vec::new();
            let mut out = ResponseWriter::new(&mut bytes, LAST, Timestamp::now());
            // Writing to memory does not fail.
            let _ = registry::not_allowed().write(&mut out);
            return connection.finish(&bytes);
        }
        _ => return reject(connection, GET_ONLY),
    };
    if !head.framing().is_done() {
        return reject(connection, RequestError(413, "no request bodies here\n"));
    }
    let _timed = metrics::start_request_timer(listener, &head.method, &head.target.path);
    let _span = span::start(listener, &head, connection.peer());
    let form = Form { keep_alive: false, ..form(&head) };
    let request = request(method, head, Vec::new());
    exchange(connection, listener, &request, &Caller::default(), form, context);
}

/// Whether a request is for a stream of bytes in both directions.
fn is_upgrade(head: &RequestHead) -> bool {
    matches!(first_element(&head.target.path), "exec" | "attach" | "portForward")
}

fn form(head: &RequestHead) -> Form {
    Form { is_1_1: head.is_1_1, keep_alive: head.keeps_alive(), head_only: head.method == "HEAD" }
}

fn request(method: Method, head: RequestHead, body: Vec<u8>) -> Request {
    let gzip = head.fields.elements("accept-encoding").any(takes_gzip);
    let accept = head.fields.elements("accept").collect::<Vec<_>>().join(",");
    let range = head.fields.get("range").unwrap_or_default().to_owned();
    Request { method, target: head.target, accept, range, gzip, body }
}

/// Serves the requests of one connection of the node API.
fn serve_main(connection: Connection, main: &MainPort, permit: &ConnectionPermit, context: &Context) {
    let Some(mut connection) = complete_handshake(connection, main) else { return };
    let mut client = ClientAuth::default();
    // A client that vanishes must not keep its connection.
    upgrade::tune(connection.as_fd());
    let mut begin = Some(Instant::now());
    loop {
        let head = match read_head(&mut connection, ListenerKind::Main, begin.take(), HEAD_BYTES) {
            Ok(head) => head,
            Err(NoRequest::Ended) => return connection.close(false),
            Err(NoRequest::Lost) => return,
            Err(NoRequest::Rejected(error)) => return reject(connection, error),
            Err(NoRequest::Moved(location)) => return redirect(connection, &location),
        };
        let Some(again) = serve_next(connection, head, &mut client, main, permit, context) else {
            return;
        };
        connection = again;
        connection.release_buffers();
        // The next request may come late.
        memory::release_stack();
        permit.idle(Instant::now());
    }
}

fn complete_handshake(mut connection: Connection, main: &MainPort) -> Option<Connection> {
    let deadline = Instant::now() + HANDSHAKE_LIMIT;
    if connection.wait(true, false, deadline) != Ready::Yes {
        return None;
    }
    if connection.peek_is_http() {
        connection.finish(PLAIN_HTTP.as_bytes());
        return None;
    }
    let mut connection = connection.into_tls(main.tls.session().ok()?);
    loop {
        match connection.handshake() {
            Ok(true) => return Some(connection),
            Ok(false) => {}
            Err(error) => {
                log::debug!("TLS handshake with {:?} failed: {error}", connection.peer());
                return None;
            }
        }
        let has_unsent_output = connection.has_unsent_output();
        if connection.wait(!has_unsent_output, has_unsent_output, deadline) != Ready::Yes {
            return None;
        }
    }
}

/// Reads the next head. A request of the node API whose path has doubled slashes never leaves this
/// function as a request. `begin`: the start of [`HEAD_LIMIT`]; `None`: the first byte, which may
/// come after [`IDLE_LIMIT`] at most.
fn read_head(
    connection: &mut Connection,
    listener: ListenerKind,
    begin: Option<Instant>,
    max_bytes: usize,
) -> Result<RequestHead, NoRequest> {
    let idle = Instant::now() + IDLE_LIMIT;
    let mut deadline = begin.map(|begin| begin + HEAD_LIMIT);
    let mut searched = 0;
    loop {
        let input = connection.input();
        // The client waits for a response to this, and would send nothing before the deadline. CRI-O
        // tries TLS first, twice for each image that it pulls.
        if input.first().copied() == Some(TLS_HANDSHAKE) {
            return Err(TLS_CLIENT.into());
        }
        if let Some(length) = head_length(input, searched) {
            if length > max_bytes {
                return Err(LARGE_HEAD.into());
            }
            let head = RequestHead::parse(input.get(..length).unwrap_or_default())?;
            io::BufRead::consume(connection, length);
            return match head.redirect_target() {
                Some(_) if matches!(listener, ListenerKind::Local | ListenerKind::Registry) => {
                    // No mux of Go serves these. In a path of the registry an element may be empty.
                    let is_first = head.raw_target.starts_with("//");
                    if is_first { Err(DOUBLED_SLASH.into()) } else { Ok(head) }
                }
                Some(target) => Err(NoRequest::Moved(target)),
                None => Ok(head),
            };
        }
        searched = input.len();
        if searched > max_bytes {
            return Err(LARGE_HEAD.into());
        }
        if searched > 0 && deadline.is_none() {
            deadline = Some(Instant::now() + HEAD_LIMIT);
        }
        connection.set_deadline(deadline.unwrap_or(idle));
        match connection.read_more() {
            Ok(0) => return Err(NoRequest::Ended),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::TimedOut && searched == 0 => {
                return Err(NoRequest::Ended);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Serves one request. Returns the connection if it may be used for another one.
fn serve_next(
    mut connection: Connection,
    mut head: RequestHead,
    client: &mut ClientAuth,
    main: &MainPort,
    permit: &ConnectionPermit,
    context: &Context,
) -> Option<Connection> {
    let _timed = metrics::start_request_timer(ListenerKind::Main, &head.method, &head.target.path);
    let no_body = head.framing().is_done();
    let admitted = {
        let _waiting = threads::waiting("a review");
        main.auth.admit(client, &|| connection.certificates(), &mut head, connection.peer())
    };
    let user = match admitted {
        Ok(user) => user,
        Err(rejected) => return deny(connection, &head, &rejected, no_body && client.may_continue()),
    };
    permit.busy(Instant::now());
    log::debug!("{} {} by {}", head.method, head.target.path, user.name);
    let _span = span::start(ListenerKind::Main, &head, connection.peer());
    if is_upgrade(&head) {
        match no_body {
            true => upgrade::serve(connection, head, context),
            false => reject(connection, RequestError(400, "no request body here\n")),
        }
        return None;
    }
    let body = match read_body(&mut connection, &head) {
        Ok(body) => body,
        Err(NoRequest::Ended | NoRequest::Lost | NoRequest::Moved(_)) => return None,
        Err(NoRequest::Rejected(error)) => {
            reject(connection, error);
            return None;
        }
    };
    let caller = Caller::new(connection.peer(), auth::named_by_token(user));
    let form = form(&head);
    let request = request(Method::from_name(&head.method), head, body);
    exchange(connection, ListenerKind::Main, &request, &caller, form, context)
}

/// Reads the body and no byte after it.
fn read_body(connection: &mut Connection, head: &RequestHead) -> Result<Vec<u8>, NoRequest> {
    use io::Write;
    let mut framing = head.framing();
    let mut body = Vec::new();
    if framing.is_done() {
        return Ok(body);
    }
    if head.expects_continue() && connection.input().is_empty() {
        connection.set_pace(Some(Pace::within(RESPONSE_LIMIT)));
        connection.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        connection.flush()?;
    }
    connection.set_deadline(Instant::now() + HEAD_LIMIT);
    loop {
        // The length is known before the bytes arrive.
        let left = framing.remaining(connection)?;
        if left.saturating_add(body.len() as u64) > BODY_BYTES {
            return Err(LARGE_BODY.into());
        }
        let piece = framing.fill(connection)?;
        let count = piece.len();
        if count == 0 {
            return Ok(body);
        }
        body.extend_from_slice(piece);
        framing.consume(connection, count);
    }
}

/// Responds to a caller that is not authenticated or not authorized, and closes the connection
/// unless the caller may send another request.
fn deny(
    mut connection: Connection,
    head: &RequestHead,
    rejected: &Rejection,
    again: bool,
) -> Option<Connection> {
    use io::Write;
    let Rejection { status, text } = rejected;
    let form = form(head);
    let keep_alive = again && form.keep_alive;
    let bytes = rejection(Form { keep_alive, ..form }, *status, text);
    if !keep_alive {
        connection.finish(&bytes);
        return None;
    }
    connection.set_pace(Some(Pace::within(RESPONSE_LIMIT)));
    connection.write_all(&bytes).and_then(|()| connection.flush()).ok()?;
    Some(connection)
}

#[cfg(test)]
mod tests;
