//! Limits how many calls of one kind run in the runtime at the same time.
//!
//! A runtime is fastest with few parallel calls: thirty sandboxes requested together take longer
//! than thirty in a queue. The limit is not strict: a call proceeds after a maximum wait, so a call
//! that hangs delays others, but does not block them.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use crate::util::stop::StopToken;
use crate::util::{threads, timers};

/// The maximum wait for other calls; about the time of a slow sandbox.
const PATIENCE: Duration = Duration::from_secs(3);

/// A limiter of parallel calls.
pub(super) struct Turnstile {
    back: Sender<()>,
    free: Receiver<()>,
    what: &'static str,
}

/// A permit for one call, returned when dropped.
pub(super) struct Pass<'a> {
    back: Option<&'a Sender<()>>,
}

impl Turnstile {
    /// A limiter for `width` calls at a time. `what` describes the wait in the table of threads.
    pub(super) fn new(width: usize, what: &'static str) -> Self {
        let width = width.clamp(1, 64);
        let (back, free) = bounded(width);
        for _ in 0..width {
            // The channel has the capacity for all permits.
            let _ = back.try_send(());
        }
        Turnstile { back, free, what }
    }

    /// Waits for a permit, for a limited time. A stop ends the wait; the call itself then returns
    /// it.
    pub(super) fn enter(&self, stop: &StopToken) -> Pass<'_> {
        if self.free.try_recv().is_ok() {
            return Pass { back: Some(&self.back) };
        }
        let _waiting = threads::waiting(self.what);
        let patience = timers::at(Instant::now().checked_add(PATIENCE));
        select_biased! {
            recv(stop.signal()) -> _ => Pass { back: None },
            recv(self.free) -> _ => Pass { back: Some(&self.back) },
            recv(patience) -> _ => Pass { back: None },
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if let Some(back) = self.back {
            let _ = back.try_send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop;

    #[test]
    fn dropped_permit_is_returned_and_stop_ends_the_wait() {
        let (source, token) = stop::pair();
        let door = Turnstile::new(1, "a test");
        let first = door.enter(&token);
        assert!(first.back.is_some());
        drop(first);
        let again = door.enter(&token);
        assert!(again.back.is_some());
        drop(source);
        assert!(door.enter(&token).back.is_none());
    }
}
