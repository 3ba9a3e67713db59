//! Exec, attach and port-forward: requests that become streams of bytes in both directions (Go:
//! getExec, getAttach and getPortForward of pkg/kubelet/server, UpgradeAwareHandler and the
//! stream translators of apiserver/pkg/util/proxy).
//!
//! The runtime serves such streams at a URL that is valid once. The client's request is forwarded
//! there, and then bytes are moved: unchanged if both use the same protocol (`splice`), translated if
//! the client uses WebSocket v5 (`channels`) or SPDY in WebSocket messages (`tunnel`).
//! Threads: only the connection's.
//! Invariants: buffers are bounded; an idle stream holds no buffers and wakes no thread; a stream
//! ends with its client, the runtime or the server.
//! Absent on purpose: redirects; https to the runtime, which is on this machine.

mod channels;
mod find;
mod handshake;
mod rejection;
mod request;
mod runtime_connection;
mod splice;
#[cfg(test)]
mod tests;
mod tunnel;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use crate::model::metrics;
use crate::server::backend::NodeBackend;
use crate::server::context::Context;
use crate::server::http::connection::Connection;
use crate::transport::http1::RequestHead;
use crate::util::stop::StopToken;

use channels::Channels;
use rejection::Rejection;
use request::{Mode, StreamRequest};
pub(super) use runtime_connection::tune;
use runtime_connection::{RuntimeConnection, StreamUrl};
use splice::{Buffers, Splice, Translation};
use tunnel::Tunnel;

/// Serves an authorized request for a stream, on the connection's thread, until the stream ends.
pub(super) fn serve(mut connection: Connection, head: RequestHead, context: &Context) {
    tune(connection.as_fd());
    let early = connection.take_input();
    let running = context.hangups.begin();
    let (peer, node) = (connection.peer(), &*context.node);
    let prepared = prepare(&head, peer, node, connection.shutdown(), &running.stop);
    drop(running);
    match prepared {
        Ok((runtime, translation, first)) => Splice::new(connection, runtime).run(translation, first, early),
        Err(rejection) => rejection.send(connection),
    }
}

/// Connects to the runtime. Also returns the translation, and the first bytes for both sides.
fn prepare(
    head: &RequestHead,
    peer: Option<SocketAddr>,
    node: &dyn NodeBackend,
    wake: &UnixStream,
    stop: &StopToken,
) -> Result<(RuntimeConnection, Translation, Buffers), Rejection> {
    let request = StreamRequest::read(head, node.switches())?;
    let pod = find::pod(&request, node)?;
    let key = match &request.mode {
        // DIFFERS: the Go kubelet checks this after the runtime has prepared a stream.
        Mode::Plain => return Err(Rejection::closing(500, "Upgrade request required\n")),
        Mode::Splice => "",
        Mode::Channels | Mode::Tunnel(_) => handshake::key(head)?,
    };
    let url = find::url(&request, &pod, node, stop)?;
    let url = StreamUrl::parse(&url)?;
    let mut runtime = RuntimeConnection::dial(&url, wake)?;
    if !matches!(request.mode, Mode::Splice) {
        metrics::WEBSOCKET_STREAMS.inc([request.verb.subresource()]);
    }
    match request.mode {
        Mode::Plain | Mode::Splice => {
            let reply = runtime
                .request(&runtime_connection::forwarded(head, peer, &url), wake)?
                .switched(&mut runtime, wake)?;
            Ok((runtime, Translation::Raw, Buffers { client: reply.raw, runtime: Vec::new() }))
        }
        Mode::Channels => {
            let reply = runtime.request(
                &runtime_connection::spdy_request(head, peer, &url, &[channels::RUNTIME_PROTOCOL]),
                wake,
            )?;
            let mut first = Buffers::default();
            handshake::accept(&mut first.client, key, Some(channels::CLIENT_PROTOCOL));
            let channels = match reply.switched(&mut runtime, wake) {
                Ok(reply) => {
                    let mut channels = Channels::open(request.streams, &mut first.client, &mut first.runtime);
                    channels.handle_runtime_bytes(reply.rest(), &mut first.client, &mut first.runtime);
                    channels
                }
                Err(rejection) => Channels::failed(rejection.text(), &mut first.client),
            };
            Ok((runtime, Translation::Channels(Box::new(channels)), first))
        }
        Mode::Tunnel(protocols) => {
            let protocols: Vec<&str> = protocols.iter().map(String::as_str).collect();
            let reply = runtime
                .request(&runtime_connection::spdy_request(head, peer, &url, &protocols), wake)?
                .switched(&mut runtime, wake)?;
            let mut first = Buffers::default();
            let protocol =
                reply.header("X-Stream-Protocol-Version").map(|chosen| format!("{}{chosen}", tunnel::PREFIX));
            handshake::accept(&mut first.client, key, protocol.as_deref());
            Tunnel::handle_runtime_bytes(reply.rest(), &mut first.client);
            Ok((runtime, Translation::Tunnel(Box::default()), first))
        }
    }
}
