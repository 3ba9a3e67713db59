//! A gate at which server calls wait without holding a thread.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

#[derive(Default)]
struct Inner {
    open: bool,
    waiting: Vec<Waker>,
}

/// Closed until [`Gate::open`]; clones are the same gate.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<Mutex<Inner>>);

impl Gate {
    pub(crate) fn open(&self) {
        let waiting = {
            let mut inner = self.0.lock().unwrap();
            inner.open = true;
            std::mem::take(&mut inner.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// How many calls wait.
    pub(crate) fn waiting(&self) -> usize {
        self.0.lock().unwrap().waiting.len()
    }
}

impl Future for Gate {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.0.lock().unwrap();
        if inner.open {
            return Poll::Ready(());
        }
        inner.waiting.push(context.waker().clone());
        Poll::Pending
    }
}
