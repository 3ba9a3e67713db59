//! Ends requests from outside: a stop signal together with the sockets in use.

use std::convert::Infallible;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crossbeam_channel::{Receiver, never, select_biased};

use crate::util::lock::LockExt;
use crate::util::stop::{self, StopSource, StopToken, Waited};

/// Ends the requests that were sent with it, blocked reads included. Clones are the same breaker;
/// tripping a parent trips its children, not the reverse.
#[derive(Clone)]
pub struct Breaker {
    inner: Arc<Inner>,
    /// Ends requests, too, but wakes none.
    stop: Option<StopToken>,
}

/// How long a request that waits goes on after the stop signal of [`Breaker::with_stop`].
pub const STOP_INTERVAL: Duration = Duration::from_millis(250);

struct Inner {
    token: StopToken,
    state: Mutex<State>,
}

struct State {
    /// Dropped when the breaker is tripped.
    source: Option<StopSource>,
    sockets: Vec<(RequestKind, Weak<TcpStream>)>,
    children: Vec<Weak<Inner>>,
}

/// What a socket is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// One request and its response, which ends soon.
    Call,
    /// A response that lasts for minutes.
    Stream,
}

impl Default for Breaker {
    fn default() -> Self {
        let (source, token) = stop::pair();
        let state = State { source: Some(source), sockets: Vec::new(), children: Vec::new() };
        Breaker { inner: Arc::new(Inner { token, state: Mutex::new(state) }), stop: None }
    }
}

impl Breaker {
    /// A breaker that is tripped with this one, or alone.
    #[must_use]
    pub fn child(&self) -> Breaker {
        let child = Breaker { stop: self.stop.clone(), ..Breaker::default() };
        let tripped = {
            let mut state = self.inner.state.locked();
            state.children.retain(|child| child.strong_count() > 0);
            state.children.push(Arc::downgrade(&child.inner));
            state.source.is_none()
        };
        if tripped {
            child.trip();
        }
        child
    }

    /// The same breaker for requests that `stop` ends, too, within [`STOP_INTERVAL`]. It costs a thread that waits
    /// for a response a wake-up in this time.
    #[must_use]
    pub fn with_stop(&self, stop: &StopToken) -> Breaker {
        Breaker { inner: Arc::clone(&self.inner), stop: Some(stop.clone()) }
    }

    /// The longest wait without a look at the stop signals; `None`: the wait is ended.
    pub(super) fn interval(&self) -> Option<Duration> {
        self.stop.as_ref().map(|_| STOP_INTERVAL)
    }

    /// Ends the requests in progress and refuses later ones. Does not block.
    pub fn trip(&self) {
        self.inner.trip();
    }

    /// The long responses that are open now.
    #[must_use]
    pub fn streams(&self) -> Streams {
        let mut open = Vec::new();
        self.inner.streams(&mut open);
        Streams(open)
    }

    /// The stop signal, for waits between requests.
    pub fn token(&self) -> &StopToken {
        &self.inner.token
    }

    /// The signal of [`Breaker::with_stop`]; without one it is never given.
    pub(super) fn stop_signal(&self) -> Receiver<Infallible> {
        self.stop.as_ref().map_or_else(never, |stop| stop.signal().clone())
    }

    /// Waits for `limit`, or until it is tripped or `other` is given.
    pub fn wait(&self, limit: Duration, other: &StopToken) -> Waited {
        select_biased! {
            recv(self.token().signal()) -> _ => Waited::Stopped,
            recv(self.stop_signal()) -> _ => Waited::Stopped,
            recv(other.signal()) -> _ => Waited::TimedOut,
            default(limit) => Waited::TimedOut,
        }
    }

    /// Whether it was tripped, or the signal of [`Breaker::with_stop`] was given.
    pub fn is_tripped(&self) -> bool {
        self.inner.token.is_stopped() || self.stop.as_ref().is_some_and(StopToken::is_stopped)
    }

    /// Registers a socket until the guard is dropped.
    pub(super) fn register(&self, kind: RequestKind, socket: &Arc<TcpStream>) -> RegisteredSocket {
        let tripped = {
            let mut state = self.inner.state.locked();
            state.sockets.push((kind, Arc::downgrade(socket)));
            state.source.is_none()
        };
        if tripped {
            let _ = socket.shutdown(Shutdown::Both);
        }
        RegisteredSocket { breaker: self.clone(), socket: Arc::downgrade(socket) }
    }
}

impl Inner {
    fn trip(&self) {
        let (source, sockets, children) = {
            let mut state = self.state.locked();
            (state.source.take(), state.sockets.clone(), state.children.clone())
        };
        // The signal first: a thread that the socket wakes must see the signal.
        drop(source);
        for socket in sockets.iter().filter_map(|(_, socket)| socket.upgrade()) {
            // An error means that it is closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        for child in children.iter().filter_map(Weak::upgrade) {
            child.trip();
        }
    }

    fn streams(&self, open: &mut Vec<Arc<TcpStream>>) {
        let children = {
            let state = self.state.locked();
            let streams = state.sockets.iter().filter(|(kind, _)| *kind == RequestKind::Stream);
            open.extend(streams.filter_map(|(_, socket)| socket.upgrade()));
            state.children.clone()
        };
        for child in children.iter().filter_map(Weak::upgrade) {
            child.streams(open);
        }
    }
}

/// Streams that were open at one moment.
pub struct Streams(Vec<Arc<TcpStream>>);

impl Streams {
    /// Ends them. Streams that were opened later, and short requests, continue.
    pub fn break_off(self) {
        for socket in self.0 {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    #[cfg(test)]
    pub(super) fn end_sending(self) {
        for socket in self.0 {
            socket.shutdown(Shutdown::Write).unwrap();
        }
    }
}

/// Keeps a socket registered with a breaker.
pub(super) struct RegisteredSocket {
    breaker: Breaker,
    socket: Weak<TcpStream>,
}

impl Drop for RegisteredSocket {
    fn drop(&mut self) {
        let mut state = self.breaker.inner.state.locked();
        if let Some(index) = state.sockets.iter().position(|(_, socket)| socket.ptr_eq(&self.socket)) {
            state.sockets.swap_remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;

    fn socket() -> (Arc<TcpStream>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Arc::new(near), listener.accept().unwrap().0)
    }

    fn is_shut(socket: &TcpStream) -> bool {
        socket.set_nonblocking(true).unwrap();
        let mut socket = socket;
        matches!(socket.read(&mut [0]), Ok(0))
    }

    #[test]
    fn tripping_a_parent_trips_its_children() {
        let parent = Breaker::default();
        let (child, other) = (parent.child(), parent.child());
        let ((a, _a), (b, _b), (c, _c)) = (socket(), socket(), socket());
        let _reach = (child.register(RequestKind::Call, &a), other.register(RequestKind::Stream, &b));
        drop(other.register(RequestKind::Stream, &c));
        child.trip();
        assert!(child.is_tripped() && !other.is_tripped() && !parent.is_tripped());
        assert!(is_shut(&a) && !is_shut(&b));
        parent.trip();
        assert!(other.is_tripped() && is_shut(&b) && !is_shut(&c));
        assert!(parent.child().is_tripped());
        let (late, _late) = socket();
        drop(other.register(RequestKind::Call, &late));
        assert!(is_shut(&late));
    }

    #[test]
    fn stop_signal_of_some_requests_ends_no_others() {
        let parent = Breaker::default();
        let (source, stop) = stop::pair();
        let limited = parent.with_stop(&stop);
        let child = limited.child();
        assert!(!limited.is_tripped() && !child.is_tripped());
        drop(source);
        assert!(limited.is_tripped() && child.is_tripped() && !parent.is_tripped());
        let limited = parent.with_stop(&StopToken::never());
        parent.trip();
        assert!(limited.is_tripped());
    }

    #[test]
    fn streams_alone_can_be_broken() {
        let parent = Breaker::default();
        let child = parent.child();
        let ((a, _a), (b, _b), (c, _c)) = (socket(), socket(), socket());
        let _reach = (child.register(RequestKind::Call, &a), child.register(RequestKind::Stream, &b));
        let streams = parent.streams();
        let _later = child.register(RequestKind::Stream, &c);
        streams.break_off();
        assert!(!is_shut(&a) && is_shut(&b) && !child.is_tripped());
        assert!(!is_shut(&c), "it was opened later");
    }
}
