//! A gate at which calls wait on their threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use coracle::util::stop::{self, StopSource, StopToken};
use crossbeam_channel::select;

#[derive(Debug)]
struct Inner {
    closed: Mutex<Option<StopSource>>,
    opened: StopToken,
    waiting: AtomicUsize,
}

/// Closed until [`Gate::open`]; clones are the same gate.
#[derive(Debug, Clone)]
pub(crate) struct Gate(Arc<Inner>);

impl Default for Gate {
    fn default() -> Gate {
        let (closed, opened) = stop::pair();
        let inner = Inner { closed: Mutex::new(Some(closed)), opened, waiting: AtomicUsize::new(0) };
        Gate(Arc::new(inner))
    }
}

impl Gate {
    pub(crate) fn open(&self) {
        drop(self.0.closed.lock().unwrap().take());
    }

    /// How many calls wait.
    pub(crate) fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::SeqCst)
    }

    /// Waits until the gate is opened or the server ends.
    pub(super) fn wait(&self, stop: &StopToken) {
        self.0.waiting.fetch_add(1, Ordering::SeqCst);
        select! {
            recv(self.0.opened.signal()) -> _ => {}
            recv(stop.signal()) -> _ => {}
        }
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
