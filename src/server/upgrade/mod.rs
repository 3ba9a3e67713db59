//! Exec, attach and port-forward: requests that become streams of bytes both ways (Go:
//! getExec, getAttach and getPortForward of pkg/kubelet/server, UpgradeAwareHandler and the
//! stream translators of apiserver/pkg/util/proxy).
//!
//! The runtime serves such streams itself, at a URL that it hands out for one use. Here the
//! client's request is sent there, and then bytes are moved: unread where both speak the same
//! ([`splice`]), translated where the client speaks WebSocket v5 ([`channels`]) or hides SPDY
//! in WebSocket messages ([`tunnel`]).
//! Threads: the connection's own, one for a stream.
//! Invariants: nothing is buffered without bound; a stream that rests holds no buffers and
//! wakes nobody; every stream ends when its client, the runtime or the server does.
//! Absent on purpose: redirects; https to the runtime, which is on this machine.

mod answer;
mod backend;
mod channels;
mod find;
mod handshake;
mod request;
mod splice;
#[cfg(test)]
mod tests;
mod tunnel;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use crate::model::metrics;
use crate::util::stop::StopToken;

use super::StreamDeps;
use super::client::Client;
use super::head::Head;
use super::http::Gate;
use answer::Refusal;
use backend::Runtime;
pub(super) use backend::tune;
use channels::Channels;
use request::{Mode, Wanted};
use splice::{Between, Greeting, Line};
use tunnel::Tunnel;

/// Whether the lines of a head ask for a stream.
pub(super) fn is_for_us(lines: &[u8]) -> bool {
    let target = lines.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    [&b"/exec/"[..], b"/attach/", b"/portForward/"].iter().any(|path| target.starts_with(path))
}

/// Serves a request for a stream, whose sender is known and allowed, on the connection's own
/// thread, until it ends.
pub(super) fn serve(client: Client, head: Head, gate: &Gate, stop: &StopToken) {
    connect(client, head, &gate.deps.streams, &gate.wake, stop);
}

fn connect(client: Client, mut head: Head, deps: &StreamDeps, wake: &UnixStream, stop: &StopToken) {
    tune(client.as_fd());
    let early = std::mem::take(&mut head.early);
    match prepare(&head, deps, wake, stop) {
        Ok((runtime, between, greeting)) => Line::new(client, runtime, wake).run(between, greeting, early),
        Err(refusal) => refusal.send(client, wake),
    }
}

/// Connects with the runtime: what to say to both, and how to go on.
fn prepare(
    head: &Head,
    deps: &StreamDeps,
    wake: &UnixStream,
    stop: &StopToken,
) -> Result<(Runtime, Between, Greeting), Refusal> {
    let wanted = Wanted::read(head, deps)?;
    let pod = find::pod(&wanted, deps)?;
    let key = match &wanted.mode {
        // DIFFERS: the Go kubelet has the runtime prepare a stream before it looks.
        Mode::Plain => return Err(Refusal::closing(500, "Upgrade request required\n")),
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
            let reply = runtime.ask(&backend::forwarded(head, &url), wake)?.switched(&mut runtime, wake)?;
            Ok((runtime, Between::Raw, Greeting { client: reply.raw, runtime: Vec::new() }))
        }
        Mode::Channels => {
            let reply =
                runtime.ask(&backend::spdy_request(head, &url, &[channels::RUNTIME_PROTOCOL]), wake)?;
            let mut greeting = Greeting::default();
            handshake::accept(&mut greeting.client, key, Some(channels::CLIENT_PROTOCOL));
            let channels = match reply.switched(&mut runtime, wake) {
                Ok(reply) => {
                    let mut channels = Channels::open(wanted.streams, &mut greeting);
                    channels.runtime(reply.rest(), &mut greeting.client, &mut greeting.runtime);
                    channels
                }
                Err(refusal) => Channels::failed(refusal.text(), &mut greeting.client),
            };
            Ok((runtime, Between::Channels(Box::new(channels)), greeting))
        }
        Mode::Tunnel(protocols) => {
            let protocols: Vec<&str> = protocols.iter().map(String::as_str).collect();
            let reply = runtime
                .ask(&backend::spdy_request(head, &url, &protocols), wake)?
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
