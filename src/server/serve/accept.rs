//! The thread `listen`: accepts the connections of all listeners, and stops requests whose clients
//! disconnect.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};

use super::requests;
use crate::server::context::Context;
use crate::server::error::ServerError;
use crate::server::http::connection::{Socket, is_passing};
use crate::server::http::request::ListenerKind;
use crate::server::listen::bind::{Bound, Unlink};
use crate::server::listen::peer;
use crate::server::registry::publish::Publication;
use crate::util::backoff::Failures;
use crate::util::stop::StopToken;
use crate::util::threads::{self, OnDeath, Running, Stack};

/// How long to wait before a port in use is retried, as the Go kubelet does.
const REBIND: Duration = Duration::from_secs(5);

/// The pause after a failed accept, which is mostly a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// How long a stop of the server waits for connections in calls that cannot be interrupted.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// Events that are handled between two system calls.
const EVENTS: usize = 64;

/// The event of the server's stop; events of requests count from 1.
const STOP: u64 = 0;

/// The event of the first listener; the next listeners have the numbers below it.
const FIRST_PORT: u64 = u64::MAX;

/// A listener and its connections.
pub(crate) struct Listener {
    kind: ListenerKind,
    bound: Option<Bound>,
    /// The address of a port that could not be bound yet.
    retry_address: Option<SocketAddr>,
    /// The end of a pause in which no connection is accepted.
    paused: Option<Instant>,
    open: Vec<Running>,
    rejected: Failures,
    publication: Option<Publication>,
    _unlink: Option<Unlink>,
}

impl Listener {
    fn new(kind: ListenerKind, bound: Option<Bound>) -> Listener {
        let rejected = Failures::default();
        Listener {
            kind,
            bound,
            retry_address: None,
            paused: None,
            open: Vec::new(),
            rejected,
            publication: None,
            _unlink: None,
        }
    }

    pub(crate) fn tcp(
        kind: ListenerKind,
        what: &'static str,
        address: SocketAddr,
    ) -> Result<Listener, ServerError> {
        let bound = Bound::tcp(address).map_err(|source| ServerError::Bind { what, address, source })?;
        Ok(Listener::new(kind, Some(bound)))
    }

    /// A TCP port that is retried while it is in use.
    pub(crate) fn tcp_or_later(kind: ListenerKind, what: &'static str, address: SocketAddr) -> Listener {
        match Bound::tcp(address) {
            Ok(bound) => Listener::new(kind, Some(bound)),
            Err(error) => {
                log::warn!("cannot listen on {address} ({what}), retrying every {REBIND:?}: {error}");
                let paused = Some(Instant::now() + REBIND);
                Listener { retry_address: Some(address), paused, ..Listener::new(kind, None) }
            }
        }
    }

    /// The registry of image archives, whose address is published when it is bound.
    pub(crate) fn registry(address: SocketAddr, publication: Publication) -> Listener {
        let listener = Listener::tcp_or_later(ListenerKind::Registry, "image registry", address);
        let mut listener = Listener { publication: Some(publication), ..listener };
        listener.publish();
        listener
    }

    fn publish(&mut self) {
        let Some(publication) = &mut self.publication else { return };
        match (self.bound.as_ref().and_then(Bound::address), self.retry_address) {
            (Some(address), _) => publication.publish(address),
            (None, Some(address)) => publication.withhold(address),
            (None, None) => {}
        }
    }

    /// The local socket, which is removed when this is dropped.
    pub(crate) fn local(path: &Path) -> Result<Listener, ServerError> {
        let bound = Bound::local(path)?;
        Ok(Listener {
            _unlink: Some(Unlink(path.to_owned())),
            ..Listener::new(ListenerKind::Local, Some(bound))
        })
    }

    /// The bound address. `None` if the port is a Unix socket or is not bound yet.
    #[cfg(test)]
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.bound.as_ref().and_then(Bound::address)
    }

    /// Accepts connections again if the pause is over.
    fn resume(&mut self, index: usize, context: &Context, now: Instant) {
        if self.paused.is_none_or(|until| now < until) {
            return;
        }
        self.paused = None;
        if let Some(address) = self.retry_address {
            match Bound::tcp(address) {
                Ok(bound) => {
                    log::info!("listening on {address} now");
                    (self.bound, self.retry_address) = (Some(bound), None);
                    self.publish();
                }
                Err(_) => {
                    self.paused = Some(now + REBIND);
                    return;
                }
            }
        }
        self.watch(index, context, now);
    }

    fn watch(&mut self, index: usize, context: &Context, now: Instant) {
        let Some(bound) = &self.bound else { return };
        let event = EventData::new_u64(FIRST_PORT - index as u64);
        if let Err(error) = epoll::add(&*context.hangups, bound, event, EventFlags::IN) {
            log::warn!("cannot wait for connections: {error}");
            self.paused = Some(now + ACCEPT_PAUSE);
        }
    }

    fn accept(&mut self, context: &Arc<Context>) {
        let Some(bound) = &self.bound else { return };
        match bound.accept() {
            Ok(socket) => self.admit(socket, context),
            Err(error) if is_passing(&error) || error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                log::warn!("cannot accept a connection: {error}");
                // `delete` fails only for a descriptor that is not polled.
                let _ = epoll::delete(&*context.hangups, bound);
                self.paused = Some(Instant::now() + ACCEPT_PAUSE);
            }
        }
    }

    fn admit(&mut self, socket: Socket, context: &Arc<Context>) {
        self.open.retain(|connection| !connection.is_finished());
        if let Err(error) = socket.set_nonblocking() {
            log::debug!("dropping a connection: {error}");
            return;
        }
        if let Socket::Unix(stream) = &socket
            && let Err(rejected) = peer::check(stream, context.any_namespace)
        {
            if self.rejected.count() {
                log::warn!("rejected at the local socket ({} so far): {}", self.rejected, rejected.reason);
            }
            return requests::reject_socket(socket, 403, rejected.response);
        }
        let full = self.open.len() >= self.kind.max_connections();
        let permit = match &socket {
            Socket::Tcp(stream) if self.kind == ListenerKind::Main => {
                let peer = socket.peer().map(|peer| peer.ip());
                // Admission may evict another connection, so it comes after all other checks.
                let permit =
                    peer.filter(|_| !full).and_then(|ip| context.limiter.admit(ip, stream, Instant::now()));
                // There is no TLS session yet for a response.
                let Some(permit) = permit else {
                    log::debug!("a connection from {peer:?} is dropped: there are too many");
                    return;
                };
                Some(permit)
            }
            _ if full => return requests::reject_socket(socket, 503, "too many connections\n"),
            _ => None,
        };
        match requests::spawn(self.kind, socket, permit, context) {
            Ok(running) => self.open.push(running),
            Err(error) => log::warn!("cannot spawn a connection thread: {error}"),
        }
    }
}

/// Starts the thread. `stopper` is the other end of the context's `shutdown`.
pub(crate) fn spawn(
    listeners: Vec<Listener>,
    context: Arc<Context>,
    stopper: UnixStream,
    on_death: OnDeath,
) -> io::Result<Running> {
    let stopper = Arc::new(stopper);
    let waker = Arc::clone(&stopper);
    let mut listeners = Listeners { listeners, context, stopper };
    let running = threads::spawn("listen", Stack::Small, on_death, move |stop| listeners.run(&stop))?;
    Ok(running.with_waker(Box::new(move || shut_down(&waker))))
}

/// Makes the other end readable, which stops all waits for clients.
fn shut_down(stopper: &UnixStream) {
    // `shutdown` fails if the socket is shut down already.
    let _ = stopper.shutdown(Shutdown::Both);
}

/// The listeners. Dropping this ends them and all connections.
struct Listeners {
    listeners: Vec<Listener>,
    context: Arc<Context>,
    stopper: Arc<UnixStream>,
}

impl Listeners {
    fn run(&mut self, stop: &StopToken) {
        let context = Arc::clone(&self.context);
        let hangups = &*context.hangups;
        if let Err(error) = epoll::add(hangups, &*context.shutdown, EventData::new_u64(STOP), EventFlags::IN)
        {
            log::error!("cannot wait for connections: {error}");
            return;
        }
        let begun = Instant::now();
        for (index, listener) in self.listeners.iter_mut().enumerate() {
            listener.watch(index, &context, begun);
        }
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        while !stop.is_stopped() {
            let now = Instant::now();
            for (index, listener) in self.listeners.iter_mut().enumerate() {
                listener.resume(index, &context, now);
            }
            events.clear();
            if let Err(error) = self.wait(now, &mut events) {
                log::error!("cannot wait for connections: {error}");
                return;
            }
            for event in &events {
                let data = event.data.u64();
                let index = usize::try_from(FIRST_PORT - data).unwrap_or(usize::MAX);
                match self.listeners.get_mut(index) {
                    Some(listener) => listener.accept(&context),
                    None if data == STOP => {}
                    None => hangups.stop(data),
                }
            }
        }
    }

    fn wait(&self, now: Instant, events: &mut Vec<Event>) -> io::Result<()> {
        let _waiting = threads::waiting("connections");
        let until = self.listeners.iter().filter_map(|listener| listener.paused).min();
        let limit = until.and_then(|until| {
            // A timer may be early by a part of a millisecond.
            Timespec::try_from(until.saturating_duration_since(now) + Duration::from_millis(1)).ok()
        });
        match epoll::wait(&*self.context.hangups, rustix::buffer::spare_capacity(events), limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        shut_down(&self.stopper);
        self.context.hangups.stop_all();
        let mut open: Vec<Running> = Vec::new();
        // First close the listeners.
        for listener in self.listeners.drain(..) {
            open.extend(listener.open);
        }
        open.iter_mut().for_each(Running::request_stop);
        let deadline = Instant::now() + STOP_LIMIT;
        for connection in open {
            connection.stop(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_in_use_is_tried_again() {
        let fixture = crate::server::node::tests::Fixture::new(|_| {});
        let (context, _end) = Context::alone(fixture.node.clone());
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        assert!(Listener::tcp(ListenerKind::Healthz, "test", address).is_err());
        let mut listener = Listener::tcp_or_later(ListenerKind::Healthz, "test", address);
        let begun = listener.paused.unwrap();
        listener.resume(0, &context, begun - Duration::from_secs(1));
        assert_eq!((listener.address(), listener.paused), (None, Some(begun)));
        listener.resume(0, &context, begun);
        assert_eq!((listener.address(), listener.paused), (None, Some(begun + REBIND)));
        drop(taken);
        listener.resume(0, &context, begun + REBIND);
        assert_eq!((listener.address(), listener.paused), (Some(address), None));
    }
}
