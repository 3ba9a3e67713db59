//! One request on its connection: takes the permits of its response and writes it.

use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use jiff::Timestamp;

use super::route;
use crate::server::context::{
    Context, MAIN_STREAMS, RESPONSES_PER_PEER, STREAMS, STREAMS_PER_PEER, STREAMS_PER_TOKEN,
};
use crate::server::http::connection::{Connection, Pace};
use crate::server::http::request::{ListenerKind, Request};
use crate::server::http::response::{Reply, Response};
use crate::server::listen::quota::{Caller, Limits, Permit};
use crate::transport::http1::{Form, ResponseWriter};
use crate::util::stop::StopToken;

/// How long a TCP client may take for a whole response: a minute, plus the time for its bytes at
/// 16 KiB/s.
const WHOLE_PACE: Pace = Pace::total(Duration::from_secs(60), 16 * 1024);

/// How long it may pause in a stream: the maximum duration of a stream of the Go kubelet, since
/// people read logs page by page.
const STREAM_PACE: Pace = Pace::progress(Duration::from_secs(4 * 3600));

/// How long the container runtime may pause while it reads a layer: its disk may be slow.
const BLOB_PACE: Pace = Pace::progress(Duration::from_secs(5 * 60));

/// How long a large response waits for a permit.
const PERMIT_LIMIT: Duration = Duration::from_secs(10);

/// A reply, with the permit that it holds until it is sent.
struct PermittedReply {
    reply: Reply,
    _permit: Option<Permit>,
}

/// Responds to a request. Returns the connection if it may be used for another one.
pub(super) fn exchange(
    mut connection: Connection,
    listener: ListenerKind,
    request: &Request,
    caller: &Caller,
    form: Form,
    context: &Context,
) -> Option<Connection> {
    let watched = context.hangups.watch(connection.as_fd());
    let stop = &watched.stop;
    let reply = catch_unwind(AssertUnwindSafe(|| begin(listener, request, caller, context, stop)))
        .unwrap_or_else(|_| PermittedReply { reply: Reply::Whole(internal_error()), _permit: None });
    let outcome = send(&mut connection, listener, reply, form, context, stop);
    context.hangups.forget(connection.as_fd());
    match outcome {
        Ok(true) => return Some(connection),
        Ok(false) => connection.close(false),
        // The response has no end, so the client sees that it is incomplete.
        Err(error) => log::debug!("a response was not sent: {error}"),
    }
    None
}

/// Sends a reply; whether the connection may be used for another request.
fn send(
    connection: &mut Connection,
    listener: ListenerKind,
    PermittedReply { reply, _permit }: PermittedReply,
    form: Form,
    context: &Context,
    stop: &StopToken,
) -> io::Result<bool> {
    let pace = match reply {
        Reply::Stream(_) if listener == ListenerKind::Registry => BLOB_PACE,
        Reply::Stream(_) => STREAM_PACE,
        Reply::Whole(_) => WHOLE_PACE,
    };
    connection.set_pace((listener != ListenerKind::Local).then_some(pace));
    let mut out = ResponseWriter::new(connection, form, Timestamp::now());
    match reply {
        Reply::Whole(response) => response.write(&mut out)?,
        Reply::Stream(stream) => {
            match catch_unwind(AssertUnwindSafe(|| stream(&mut out, &*context.node, stop))) {
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
    listener: ListenerKind,
    request: &Request,
    caller: &Caller,
    context: &Context,
    stop: &StopToken,
) -> PermittedReply {
    let is_main = listener == ListenerKind::Main;
    let too_many =
        |text: String| PermittedReply { reply: Reply::Whole(Response::too_many(text)), _permit: None };
    let mut permit = None;
    // The other listeners have few connections.
    if is_main && grows_with_pods(request) {
        let limits = caller.limits(RESPONSES_PER_PEER, RESPONSES_PER_PEER);
        permit = context.responses.wait(limits, PERMIT_LIMIT, "a permit to respond", stop);
        if permit.is_none() {
            return too_many("too many large responses are being sent\n".to_owned());
        }
    }
    let reply = route::route(listener, request, context);
    // The connections of the registry are limited, and its streams take none from other listeners.
    if matches!(reply, Reply::Stream(_)) && listener != ListenerKind::Registry {
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
    PermittedReply { reply, _permit: permit }
}

/// Whether a response grows with the number of pods. Health checks are never limited.
fn grows_with_pods(request: &Request) -> bool {
    matches!(request.first_element(), "metrics" | "pods" | "runningpods" | "stats")
}

#[cfg(test)]
mod tests;
