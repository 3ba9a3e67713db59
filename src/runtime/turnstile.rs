//! How many calls of one kind go to the runtime at once.
//!
//! A runtime is quickest with a few calls at a time: thirty sandboxes asked for together
//! take longer than the same thirty in a queue. This is a queue at a door and not a lock:
//! who has waited long enough goes in anyway, so a call that hangs delays others, but
//! never holds them.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use crate::util::stop::StopToken;
use crate::util::{threads, timers};

/// The longest wait behind other calls; about the time of a slow sandbox.
const PATIENCE: Duration = Duration::from_secs(3);

/// A door with room for some.
pub(super) struct Turnstile {
    back: Sender<()>,
    free: Receiver<()>,
    what: &'static str,
}

/// One place inside, given back when dropped.
pub(super) struct Pass<'a> {
    back: Option<&'a Sender<()>>,
}

impl Turnstile {
    /// A door that lets `width` in at a time. `what`: what waits there, for the table of
    /// threads.
    pub(super) fn new(width: usize, what: &'static str) -> Self {
        let width = width.clamp(1, 64);
        let (back, free) = bounded(width);
        for _ in 0..width {
            // The channel holds exactly as many as are put in.
            let _ = back.try_send(());
        }
        Turnstile { back, free, what }
    }

    /// Waits for a place, for a limited time. A stop ends the wait: the call itself sees it.
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
    fn a_place_is_given_back_and_a_stop_ends_the_wait() {
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
