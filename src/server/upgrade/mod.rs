//! Exec, attach and port-forward: requests that become streams of bytes both ways (Go:
//! getExec, getAttach and getPortForward of pkg/kubelet/server, UpgradeAwareHandler and the
//! stream translators of apiserver/pkg/util/proxy).
//!
//! The runtime serves such streams itself, at a URL that it hands out for one use. Here the
//! client's request is sent there, and then bytes are moved: unread where both speak the same
//! ([`splice`]), translated where the client speaks WebSocket v5 ([`channels`]) or hides SPDY
//! in WebSocket messages ([`tunnel`]).
//! Threads: none but the connection's own.
//! Invariants: nothing is buffered without bound; an idle stream holds no buffers and wakes no
//! thread; every stream ends when its client, the runtime or the server does.
//! Absent on purpose: redirects; https to the runtime, which is on this machine.

mod backend;
mod channels;
mod find;
mod handshake;
mod rejection;
mod request;
mod splice;
#[cfg(test)]
mod tests;
mod tunnel;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use crate::model::metrics;
use crate::server::context::Context;
use crate::server::deps::StreamDeps;
use crate::server::http::connection::Connection;
use crate::transport::http1::RequestHead;
use crate::util::stop::StopToken;

use backend::Runtime;
pub(super) use backend::tune;
use channels::Channels;
use rejection::Rejection;
use request::{Mode, Wanted};
use splice::{Between, Greeting, Line};
use tunnel::Tunnel;

/// Serves a request for a stream, whose sender is authorized, on the connection's own thread,
/// until the stream ends.
pub(super) fn serve(mut connection: Connection, head: RequestHead, context: &Context) {
    tune(connection.as_fd());
    let early = connection.take_input();
    let under_way = context.hangups.begin();
    let (peer, deps) = (connection.peer(), &context.deps.streams);
    let prepared = prepare(&head, peer, deps, connection.shutdown(), &under_way.stop);
    drop(under_way);
    match prepared {
        Ok((runtime, between, greeting)) => Line::new(connection, runtime).run(between, greeting, early),
        Err(rejection) => rejection.send(connection),
    }
}

/// Connects with the runtime: the first bytes for both sides, and what lies between them.
fn prepare(
    head: &RequestHead,
    peer: Option<SocketAddr>,
    deps: &StreamDeps,
    wake: &UnixStream,
    stop: &StopToken,
) -> Result<(Runtime, Between, Greeting), Rejection> {
    let wanted = Wanted::read(head, deps)?;
    let pod = find::pod(&wanted, deps)?;
    let key = match &wanted.mode {
        // DIFFERS: the Go kubelet has the runtime prepare a stream before it looks.
        Mode::Plain => return Err(Rejection::closing(500, "Upgrade request required\n")),
        Mode::Splice => "",
        Mode::Channels | Mode::Tunnel(_) => handshake::key(head)?,
    };
    let url = find::url(&wanted, &pod, deps, stop)?;
    let mut runtime = Runtime::dial(&url, wake)?;
    if !matches!(wanted.mode, Mode::Splice) {
        metrics::WEBSOCKET_STREAMS.inc([wanted.verb.subresource()]);
    }
    match wanted.mode {
        Mode::Plain | Mode::Splice => {
            let reply =
                runtime.ask(&backend::forwarded(head, peer, &url), wake)?.switched(&mut runtime, wake)?;
            Ok((runtime, Between::Raw, Greeting { client: reply.raw, runtime: Vec::new() }))
        }
        Mode::Channels => {
            let reply =
                runtime.ask(&backend::spdy_request(head, peer, &url, &[channels::RUNTIME_PROTOCOL]), wake)?;
            let mut greeting = Greeting::default();
            handshake::accept(&mut greeting.client, key, Some(channels::CLIENT_PROTOCOL));
            let channels = match reply.switched(&mut runtime, wake) {
                Ok(reply) => {
                    let mut channels = Channels::open(wanted.streams, &mut greeting);
                    channels.runtime(reply.rest(), &mut greeting.client, &mut greeting.runtime);
                    channels
                }
                Err(rejection) => Channels::failed(rejection.text(), &mut greeting.client),
            };
            Ok((runtime, Between::Channels(Box::new(channels)), greeting))
        }
        Mode::Tunnel(protocols) => {
            let protocols: Vec<&str> = protocols.iter().map(String::as_str).collect();
            let reply = runtime
                .ask(&backend::spdy_request(head, peer, &url, &protocols), wake)?
                .switched(&mut runtime, wake)?;
            let mut greeting = Greeting::default();
            let protocol =
                reply.header("X-Stream-Protocol-Version").map(|chosen| format!("{}{chosen}", tunnel::PREFIX));
            handshake::accept(&mut greeting.client, key, protocol.as_deref());
            Tunnel::runtime(reply.rest(), &mut greeting.client);
            Ok((runtime, Between::Tunnel(Box::default()), greeting))
        }
    }
}
