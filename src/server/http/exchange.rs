//! One request on its connection: which limits it counts for, and writing its response.

use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use jiff::Timestamp;

use super::connection::{Connection, Pace};
use super::request::{Listener, Request};
use super::response::{Reply, Response};
use crate::server::context::{
    Context, MAIN_STREAMS, RESPONSES_PER_PEER, STREAMS, STREAMS_PER_PEER, STREAMS_PER_TOKEN,
};
use crate::server::quota::{Caller, Limits, Permit};
use crate::server::route;
use crate::transport::http1::{Form, ResponseWriter};
use crate::util::stop::StopToken;

/// How long a TCP client, which may be anyone's, may take for a whole response: a minute, and
/// longer by what it reads at 16 KiB/s.
const WHOLE_PACE: Pace = Pace::total(Duration::from_secs(60), 16 * 1024);

/// How long it may pause in a stream: as long as a stream of the Go kubelet lasts at most, since
/// people read logs page by page.
const STREAM_PACE: Pace = Pace::progress(Duration::from_secs(4 * 3600));

/// How long a large response waits to be begun while there are too many.
const TURN_LIMIT: Duration = Duration::from_secs(10);

/// A reply, with the permit that it holds until the client has it.
struct Begun {
    reply: Reply,
    _permit: Option<Permit>,
}

/// Responds to a request. The connection comes back if it may be used for another one.
pub(super) fn exchange(
    mut connection: Connection,
    listener: Listener,
    request: &Request,
    caller: &Caller,
    form: Form,
    context: &Context,
) -> Option<Connection> {
    let watched = context.hangups.watch(connection.as_fd());
    let outcome = respond(&mut connection, listener, request, caller, form, context, &watched.stop);
    context.hangups.forget(connection.as_fd());
    match outcome {
        Ok(true) => return Some(connection),
        Ok(false) => connection.close(false),
        // Without its end: the client sees that the response is incomplete.
        Err(why) => log::debug!("a response was not sent: {why}"),
    }
    None
}

fn respond(
    connection: &mut Connection,
    listener: Listener,
    request: &Request,
    caller: &Caller,
    form: Form,
    context: &Context,
    stop: &StopToken,
) -> io::Result<bool> {
    let begun = catch_unwind(AssertUnwindSafe(|| begin(listener, request, caller, context, stop)));
    let begun = begun.unwrap_or_else(|_| Begun { reply: Reply::Whole(internal_error()), _permit: None });
    send(connection, listener, begun, form, context, stop)
}

/// Sends a reply; whether the connection may be used for another request.
fn send(
    connection: &mut Connection,
    listener: Listener,
    Begun { reply, _permit }: Begun,
    form: Form,
    context: &Context,
    stop: &StopToken,
) -> io::Result<bool> {
    let pace = if matches!(reply, Reply::Stream(_)) { STREAM_PACE } else { WHOLE_PACE };
    connection.set_pace((listener != Listener::Local).then_some(pace));
    let mut out = ResponseWriter::new(connection, form, Timestamp::now());
    match reply {
        Reply::Whole(response) => response.write(&mut out)?,
        Reply::Stream(stream) => {
            match catch_unwind(AssertUnwindSafe(|| stream(&mut out, &context.deps, stop))) {
                Ok(outcome) => outcome?,
                Err(_) if !out.has_started() => internal_error().write(&mut out)?,
                Err(_) => return Err(io::Error::other("a panic")),
            }
            // A stream that the server's stop has ended must not look complete.
            if context.hangups.is_stopped() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
    }
    out.finish()
}

fn internal_error() -> Response {
    Response::text(500, "internal error\n")
}

fn begin(
    listener: Listener,
    request: &Request,
    caller: &Caller,
    context: &Context,
    stop: &StopToken,
) -> Begun {
    let is_main = listener == Listener::Main;
    let too_many = |text: String| Begun { reply: Reply::Whole(Response::too_many(text)), _permit: None };
    let mut permit = None;
    // The others have few connections.
    if is_main && grows(request) {
        let limits = caller.limits(RESPONSES_PER_PEER, RESPONSES_PER_PEER);
        permit = context.responses.wait(limits, TURN_LIMIT, "a turn to respond", stop);
        if permit.is_none() {
            return too_many("too many large answers are being sent\n".to_owned());
        }
    }
    let reply = route::route(listener, request, &context.deps);
    if matches!(reply, Reply::Stream(_)) {
        let (stream, most) = match is_main {
            true => {
                let limits = caller.limits(STREAMS_PER_PEER, STREAMS_PER_TOKEN);
                (context.main_streams.take(limits), MAIN_STREAMS)
            }
            false => (context.streams.take(Limits::default()), STREAMS),
        };
        if stream.is_none() {
            return too_many(format!("too many of {most} streams are open\n"));
        }
        permit = stream;
    }
    Begun { reply, _permit: permit }
}

/// Whether a response grows with what runs on the node. Health is reported whatever the load.
fn grows(request: &Request) -> bool {
    matches!(request.first_element(), "metrics" | "pods" | "runningpods" | "stats")
}

#[cfg(test)]
mod tests;
