//! Limits how many threads do one thing at the same time.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use super::stop::StopToken;
use super::{threads, timers};

/// The upper bound of permits; a larger number is reduced to it.
const MOST: usize = 1024;

/// A counted set of permits. Clones share it.
#[derive(Debug, Clone)]
pub struct Permits {
    back: Sender<()>,
    free: Receiver<()>,
    what: &'static str,
}

/// The right of one thread, returned when dropped.
#[derive(Debug)]
#[must_use]
pub struct Permit(Sender<()>);

/// Why there is no permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPermit {
    /// The stop signal came first.
    Stopped,
    /// All were in use until the time limit.
    TimedOut,
}

impl Permits {
    /// `count` permits, at least one. `what` describes the wait in the table of threads.
    #[must_use]
    pub fn new(count: usize, what: &'static str) -> Permits {
        let count = count.clamp(1, MOST);
        let (back, free) = bounded(count);
        for _ in 0..count {
            // The channel has the capacity for all permits.
            let _ = back.try_send(());
        }
        Permits { back, free, what }
    }

    /// A permit, if one is free.
    pub fn try_take(&self) -> Option<Permit> {
        self.free.try_recv().ok().map(|()| Permit(self.back.clone()))
    }

    /// Waits for a permit until the stop signal, and for `limit` at most.
    ///
    /// # Errors
    /// After the stop signal, also if a permit is free, and at the time limit.
    pub fn take(&self, stop: &StopToken, limit: Option<Duration>) -> Result<Permit, NoPermit> {
        let _waiting = threads::waiting(self.what);
        let late = timers::deadline_channel(limit.and_then(|limit| Instant::now().checked_add(limit)));
        select_biased! {
            recv(stop.signal()) -> _ => Err(NoPermit::Stopped),
            recv(self.free) -> _ => Ok(Permit(self.back.clone())),
            recv(late) -> _ => Err(NoPermit::TimedOut),
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        // The channel has room: the permit was taken from it.
        let _ = self.0.try_send(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop;

    #[test]
    fn dropped_permit_is_available_again() {
        let (never, permits) = (StopToken::never(), Permits::new(2, "a test"));
        let first = permits.take(&never, None).unwrap();
        let _second = permits.try_take().unwrap();
        assert!(permits.try_take().is_none());
        drop(first);
        assert!(permits.clone().take(&never, None).is_ok());
    }

    #[test]
    fn wait_ends_with_the_stop_signal_or_the_time_limit() {
        let (source, token) = stop::pair();
        let permits = Permits::new(0, "a test");
        let permit = permits.take(&token, None).unwrap();
        assert_eq!(permits.take(&token, Some(Duration::ZERO)).unwrap_err(), NoPermit::TimedOut);
        drop((source, permit));
        assert_eq!(permits.take(&token, None).unwrap_err(), NoPermit::Stopped);
    }
}
