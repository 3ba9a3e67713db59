//! The stop signal: a channel without messages.
//!
//! The owner keeps a [`StopSource`]; dropping it disconnects the channel, and every [`StopToken`]
//! becomes readable immediately. It is separate from the work queue, because one cloned sender
//! elsewhere keeps a queue open.

use std::convert::Infallible;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded};

/// The owning end. Dropping it stops every token.
#[derive(Debug)]
pub struct StopSource {
    _keep: Sender<Infallible>,
}

/// The waiting end. Clones share it.
#[derive(Debug, Clone)]
pub struct StopToken {
    signal: Receiver<Infallible>,
}

/// Makes a connected source and token.
#[must_use]
pub fn pair() -> (StopSource, StopToken) {
    let (keep, signal) = bounded(0);
    (StopSource { _keep: keep }, StopToken { signal })
}

/// The result of a wait on a [`StopToken`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// The owner gave the stop signal.
    Stopped,
    /// The time limit was reached first.
    TimedOut,
}

impl StopToken {
    /// A token that never stops: for tests and for one-shot commands.
    #[must_use]
    pub fn never() -> Self {
        StopToken { signal: crossbeam_channel::never() }
    }

    /// The channel to put first in a `select`: it becomes ready (disconnected) on stop.
    #[must_use]
    pub fn signal(&self) -> &Receiver<Infallible> {
        &self.signal
    }

    /// Whether the owner has given the stop signal.
    pub fn is_stopped(&self) -> bool {
        matches!(self.signal.try_recv(), Err(TryRecvError::Disconnected))
    }

    /// Waits for the stop or for `limit`, whichever is first: the only kind of pause for a thread.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> Waited {
        match self.signal.recv_timeout(limit) {
            Ok(never) => match never {},
            Err(RecvTimeoutError::Timeout) => Waited::TimedOut,
            Err(RecvTimeoutError::Disconnected) => Waited::Stopped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_the_source_stops_every_clone() {
        let (source, token) = pair();
        let other = token.clone();
        assert!(!token.is_stopped());
        assert_eq!(token.wait(Duration::ZERO), Waited::TimedOut);
        drop(source);
        assert!(token.is_stopped() && other.is_stopped());
        assert_eq!(other.wait(Duration::from_secs(60)), Waited::Stopped);
    }
}
