//! One request with its response: what ends its waits, and the socket that it uses.

use std::cell::RefCell;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::breaker::{Breaker, RegisteredSocket, RequestKind};

use crate::util::lock::LockExt;

thread_local! {
    static CURRENT: RefCell<Option<Arc<Call>>> = const { RefCell::new(None) };
}

/// The end of the waits of a call.
struct Deadline {
    time: Instant,
    /// By how much a received byte postpones it, and the time beyond which it does not.
    progress: Option<(Duration, Instant)>,
}

impl Deadline {
    fn postpone(&mut self, now: Instant) {
        if let Some((quiet, end)) = self.progress {
            self.time = now.checked_add(quiet).map_or(end, |time| time.min(end));
        }
    }
}

/// A request until its response was read. Dropping it releases the socket from the breaker.
pub(in crate::transport) struct Call {
    pub(super) breaker: Breaker,
    pub(super) kind: RequestKind,
    /// Until then it opens no connection while others open too many.
    pub(super) hold_until: Instant,
    /// Whether kept connections may be used.
    pub(super) reuse: bool,
    /// Bytes of the longest line of the head.
    pub(super) longest_line: usize,
    deadline: Mutex<Deadline>,
    registered: Mutex<Option<RegisteredSocket>>,
    is_reused: AtomicBool,
    has_sent: AtomicBool,
}

impl Call {
    pub(super) fn new(
        breaker: &Breaker,
        kind: RequestKind,
        (deadline, hold_until): (Instant, Instant),
        reuse: bool,
        longest_line: usize,
    ) -> Arc<Call> {
        Arc::new(Call {
            breaker: breaker.clone(),
            kind,
            hold_until,
            reuse,
            longest_line,
            deadline: Mutex::new(Deadline { time: deadline, progress: None }),
            registered: Mutex::default(),
            is_reused: AtomicBool::new(false),
            has_sent: AtomicBool::new(false),
        })
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline.locked().time
    }

    /// From now on its waits end after `quiet` without a byte, and at `end` in any case.
    pub(super) fn follow_progress(&self, quiet: Duration, end: Instant) {
        let mut deadline = self.deadline.locked();
        deadline.progress = Some((quiet, end));
        deadline.postpone(Instant::now());
    }

    /// The server has sent bytes.
    pub(super) fn note_received(&self) {
        self.deadline.locked().postpone(Instant::now());
    }

    /// The breaker ends waits for this socket from now on.
    pub(super) fn register_socket(&self, socket: &Arc<TcpStream>, is_reused: bool) {
        self.is_reused.store(is_reused, Ordering::Relaxed);
        let registered = self.breaker.register(self.kind, socket);
        let before = self.registered.locked().replace(registered);
        drop(before);
    }

    /// Another call may use the socket.
    pub(super) fn unregister_socket(&self) {
        let before = self.registered.locked().take();
        drop(before);
    }

    /// Whether the connection in use was kept from an earlier request.
    pub(super) fn is_reused(&self) -> bool {
        self.is_reused.load(Ordering::Relaxed)
    }

    /// The kernel has taken bytes of the request, or of a handshake.
    pub(super) fn note_sent(&self) {
        self.has_sent.store(true, Ordering::Relaxed);
    }

    /// Whether a server may have seen a part of the request.
    pub(super) fn has_sent(&self) -> bool {
        self.has_sent.load(Ordering::Relaxed)
    }

    /// Is the current call of this thread while `send` runs, which must not panic.
    pub(super) fn run_as_current<T>(self: &Arc<Call>, send: impl FnOnce() -> T) -> T {
        CURRENT.set(Some(Arc::clone(self)));
        let outcome = send();
        CURRENT.take();
        outcome
    }

    /// The call that this thread sends now.
    pub(super) fn current() -> Option<Arc<Call>> {
        CURRENT.with_borrow(Option::clone)
    }
}
