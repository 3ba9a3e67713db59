//! Which idle connections are one too many.
//!
//! The library takes the idle connection that was used longest ago. After a burst of requests, single ones
//! would therefore use all of its connections in turn, and none would ever be idle for long.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::breaker::RequestKind;
use crate::util::lock::LockExt;

/// If there was at most one request at a time for this long, one idle connection is enough.
const SERIAL_TIME: Duration = Duration::from_secs(15);

/// What a connection is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Nothing: it waits for a request.
    Idle,
    /// A request of this kind.
    Request(RequestKind),
    /// It is closed, or not opened yet.
    Closed,
}

/// The uses of the connections of a client.
#[derive(Debug)]
pub(super) struct Usage(Mutex<State>);

#[derive(Debug)]
struct State {
    idle: usize,
    /// Short requests in progress.
    calls: usize,
    /// When there was more than one of them the last time; before that, the begin.
    parallel: Instant,
}

impl Default for Usage {
    fn default() -> Usage {
        Usage(Mutex::new(State { idle: 0, calls: 0, parallel: Instant::now() }))
    }
}

impl Usage {
    /// Counts that a connection has another use.
    pub(super) fn change(&self, from: Use, to: Use, now: Instant) {
        let mut state = self.0.locked();
        match from {
            Use::Idle => state.idle = state.idle.saturating_sub(1),
            Use::Request(RequestKind::Call) => {
                if state.calls > 1 {
                    state.parallel = now;
                }
                state.calls = state.calls.saturating_sub(1);
            }
            Use::Request(RequestKind::Stream) | Use::Closed => {}
        }
        match to {
            Use::Idle => state.idle += 1,
            Use::Request(RequestKind::Call) => {
                state.calls += 1;
                if state.calls > 1 {
                    state.parallel = now;
                }
            }
            Use::Request(RequestKind::Stream) | Use::Closed => {}
        }
    }

    /// Whether an idle connection shall be closed instead of used for a request of this kind, because another
    /// idle one is enough. A stream follows one that ended just now, whose connection is idle for a moment.
    pub(super) fn is_surplus(&self, kind: RequestKind, now: Instant) -> bool {
        let state = self.0.locked();
        kind == RequestKind::Call
            && state.idle > 1
            && state.calls == 0
            && now.saturating_duration_since(state.parallel) >= SERIAL_TIME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: Use = Use::Request(RequestKind::Call);
    const STREAM: Use = Use::Request(RequestKind::Stream);

    #[test]
    fn idle_connections_of_a_burst_are_surplus_when_single_requests_followed_for_a_while() {
        let (usage, start) = (Usage::default(), Instant::now());
        let later = start + SERIAL_TIME;
        let is_surplus = |now| usage.is_surplus(RequestKind::Call, now);
        for to in [STREAM, CALL, CALL] {
            usage.change(Use::Closed, to, start);
        }
        usage.change(CALL, Use::Idle, start);
        usage.change(CALL, Use::Idle, start);
        assert!(!is_surplus(later - Duration::from_millis(1)), "another burst may follow");
        assert!(is_surplus(later));
        assert!(!usage.is_surplus(RequestKind::Stream, later));
        // Single requests change nothing.
        usage.change(Use::Idle, CALL, later);
        usage.change(CALL, Use::Idle, later);
        assert!(is_surplus(later));
        usage.change(Use::Idle, Use::Closed, later);
        assert!(!is_surplus(later), "the last idle connection stays");
        // The server ends a watch.
        usage.change(STREAM, Use::Idle, later);
        assert!(is_surplus(later));
    }

    #[test]
    fn requests_that_took_long_at_the_same_time_count_until_their_end() {
        let (usage, start) = (Usage::default(), Instant::now());
        let end = start + SERIAL_TIME * 2;
        for _ in 0..2 {
            usage.change(Use::Closed, CALL, start);
        }
        for _ in 0..2 {
            usage.change(CALL, Use::Idle, end);
        }
        assert!(!usage.is_surplus(RequestKind::Call, end), "another burst may follow");
        assert!(usage.is_surplus(RequestKind::Call, end + SERIAL_TIME));
    }

    #[test]
    fn idle_connections_stay_while_requests_are_sent_at_the_same_time() {
        let (usage, start) = (Usage::default(), Instant::now());
        let later = start + SERIAL_TIME;
        for _ in 0..3 {
            usage.change(Use::Closed, Use::Idle, start);
        }
        usage.change(Use::Idle, CALL, later);
        assert!(!usage.is_surplus(RequestKind::Call, later), "this is another one at the same time");
        usage.change(Use::Idle, CALL, later);
        for _ in 0..2 {
            usage.change(CALL, Use::Idle, later);
        }
        assert!(!usage.is_surplus(RequestKind::Call, later));
        assert!(usage.is_surplus(RequestKind::Call, later + SERIAL_TIME));
    }
}
