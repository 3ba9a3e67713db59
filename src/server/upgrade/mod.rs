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

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use rustix::event::PollFlags;

use crate::model::metrics;
use crate::util::stop::StopToken;

use super::StreamDeps;
use super::query::Target;
use answer::Refusal;
use backend::Runtime;
use channels::Channels;
use request::{Mode, Wanted};
use splice::{Between, Line};
use tunnel::Tunnel;

/// One end of a stream; no call of it blocks.
pub(super) trait End {
    /// `WouldBlock`: nothing is there; 0: its direction is over.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;
    /// Takes what fits, else `WouldBlock`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// What to poll for.
    fn flags(&self, read: bool, write: bool) -> PollFlags;
    /// Whether bytes can be read that no poll tells of.
    fn has_buffered(&self) -> bool;
    /// Nothing more is written.
    fn finish_write(&mut self);
    /// What to poll.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// A request, as far as it matters here.
pub(super) struct Asking<'a> {
    pub method: &'a str,
    pub target: &'a Target,
    pub headers: &'a [(String, Vec<u8>)],
    pub peer: Option<SocketAddr>,
}

impl Asking<'_> {
    /// Every value of a header, in order.
    fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let named = self.headers.iter().filter(move |(key, _)| key.eq_ignore_ascii_case(name));
        named.filter_map(|(_, value)| std::str::from_utf8(value).ok())
    }

    /// The words of a header, which stand between commas.
    fn words<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.all(name).flat_map(|value| value.split(',')).map(str::trim).filter(|word| !word.is_empty())
    }

    fn has_word(&self, name: &str, wanted: &str) -> bool {
        self.words(name).any(|word| word.eq_ignore_ascii_case(wanted))
    }
}

/// Whether requests for this path become streams.
pub(super) fn is_for_us(path: &str) -> bool {
    matches!(super::main_port::first_element(path), "exec" | "attach" | "portForward")
}

/// Serves one request to the end of its streams. `early` is what came behind its head.
pub(super) fn serve<E: End>(
    client: E,
    asking: &Asking<'_>,
    early: Vec<u8>,
    deps: &StreamDeps,
    wake: BorrowedFd<'_>,
    stop: &StopToken,
) {
    backend::tune(client.fd());
    match prepare(asking, deps, wake, stop) {
        Ok((runtime, between, greeting)) => Line::new(client, runtime, wake).run(between, greeting, early),
        Err(refusal) => refusal.send(client, wake),
    }
}

/// Connects with the runtime: what to say to both, and how to go on.
fn prepare(
    asking: &Asking<'_>,
    deps: &StreamDeps,
    wake: BorrowedFd<'_>,
    stop: &StopToken,
) -> Result<(Runtime, Between, splice::Greeting), Refusal> {
    let wanted = Wanted::read(asking, deps)?;
    let pod = find::pod(&wanted, deps)?;
    let key = match &wanted.mode {
        Mode::Plain => return Err(Refusal::closing(500, "Upgrade request required\n")),
        Mode::Splice => "",
        Mode::Channels | Mode::Tunnel(_) => handshake::key(asking)?,
    };
    let url = find::url(&wanted, &pod, deps, stop)?;
    let mut runtime = Runtime::dial(&url, wake)?;
    if !matches!(wanted.mode, Mode::Splice) {
        metrics::WEBSOCKET_STREAMS.inc([wanted.verb.subresource()]);
    }
    match wanted.mode {
        Mode::Plain | Mode::Splice => {
            let reply = runtime.ask(&backend::forwarded(asking, &url), wake)?.switched(&mut runtime, wake)?;
            Ok((runtime, Between::Raw, splice::Greeting { client: reply.raw, runtime: Vec::new() }))
        }
        Mode::Channels => {
            let reply = runtime.ask(&backend::spdy_request(asking, &url, &[channels::RUNTIME_PROTOCOL]), wake)?;
            let mut greeting = splice::Greeting::default();
            handshake::accept(&mut greeting.client, key, Some(channels::CLIENT_PROTOCOL));
            let channels = match reply.switched(&mut runtime, wake) {
                Ok(reply) => {
                    let mut channels = Channels::open(wanted.streams, &mut greeting);
                    channels.runtime(reply.rest(), &mut greeting.client, &mut greeting.runtime);
                    channels
                }
                Err(refusal) => Channels::failed(&refusal.text(), &mut greeting.client),
            };
            Ok((runtime, Between::Channels(Box::new(channels)), greeting))
        }
        Mode::Tunnel(protocols) => {
            let protocols: Vec<&str> = protocols.iter().map(String::as_str).collect();
            let reply = runtime
                .ask(&backend::spdy_request(asking, &url, &protocols), wake)?
                .switched(&mut runtime, wake)?;
            let mut greeting = splice::Greeting::default();
            let protocol =
                reply.header("X-Stream-Protocol-Version").map(|chosen| format!("{}{chosen}", tunnel::PREFIX));
            handshake::accept(&mut greeting.client, key, protocol.as_deref());
            Tunnel::runtime(reply.rest(), &mut greeting.client);
            Ok((runtime, Between::Tunnel(Box::default()), greeting))
        }
    }
}
