//! Which idle connections are one too many.
//!
//! The library takes the idle connection that was used longest ago. After a burst of requests, single ones
//! would therefore use all of its connections in turn, and none would ever be idle for long.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
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
    /// The number with each server, by scheme, host and port: a redirect may lead to another one.
    idle: HashMap<Arc<str>, usize>,
    /// Short requests in progress.
    calls: usize,
    /// When there was more than one of them the last time; before that, the begin.
    parallel: Instant,
}

impl Default for Usage {
    fn default() -> Usage {
        Usage(Mutex::new(State { idle: HashMap::new(), calls: 0, parallel: Instant::now() }))
    }
}

impl Usage {
    /// Counts that a connection with this scheme, host and port has another use.
    pub(super) fn change(&self, origin: &Arc<str>, from: Use, to: Use, now: Instant) {
        let mut state = self.0.locked();
        match from {
            Use::Idle => {
                let left = state.idle.get(origin).map_or(0, |count| count.saturating_sub(1));
                if left == 0 {
                    state.idle.remove(origin);
                } else {
                    state.idle.insert(Arc::clone(origin), left);
                }
            }
            Use::Request(RequestKind::Call) => {
                if state.calls > 1 {
                    state.parallel = now;
                }
                state.calls = state.calls.saturating_sub(1);
            }
            Use::Request(RequestKind::Stream) | Use::Closed => {}
        }
        match to {
            Use::Idle => *state.idle.entry(Arc::clone(origin)).or_default() += 1,
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
    pub(super) fn is_surplus(&self, origin: &Arc<str>, kind: RequestKind, now: Instant) -> bool {
        let state = self.0.locked();
        kind == RequestKind::Call
            && state.idle.get(origin).is_some_and(|count| *count > 1)
            && state.calls == 0
            && now.saturating_duration_since(state.parallel) >= SERIAL_TIME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: Use = Use::Request(RequestKind::Call);
    const STREAM: Use = Use::Request(RequestKind::Stream);

    fn origin() -> Arc<str> {
        Arc::from("https://a:6443")
    }

    #[test]
    fn idle_connections_of_a_burst_are_surplus_when_single_requests_followed_for_a_while() {
        let (usage, start) = (Usage::default(), Instant::now());
        let later = start + SERIAL_TIME;
        let is_surplus = |now| usage.is_surplus(&origin(), RequestKind::Call, now);
        for to in [STREAM, CALL, CALL] {
            usage.change(&origin(), Use::Closed, to, start);
        }
        usage.change(&origin(), CALL, Use::Idle, start);
        usage.change(&origin(), CALL, Use::Idle, start);
        assert!(!is_surplus(later - Duration::from_millis(1)), "another burst may follow");
        assert!(is_surplus(later));
        assert!(!usage.is_surplus(&origin(), RequestKind::Stream, later));
        // Single requests change nothing.
        usage.change(&origin(), Use::Idle, CALL, later);
        usage.change(&origin(), CALL, Use::Idle, later);
        assert!(is_surplus(later));
        usage.change(&origin(), Use::Idle, Use::Closed, later);
        assert!(!is_surplus(later), "the last idle connection stays");
        // The server ends a watch.
        usage.change(&origin(), STREAM, Use::Idle, later);
        assert!(is_surplus(later));
    }

    /// Each of the requests that were redirected opened two connections.
    #[test]
    fn idle_connection_with_another_server_makes_none_surplus() {
        let (usage, start) = (Usage::default(), Instant::now());
        let other: Arc<str> = Arc::from("https://b:6443");
        for origin in [&origin(), &other] {
            usage.change(origin, Use::Closed, Use::Idle, start);
        }
        assert!(!usage.is_surplus(&origin(), RequestKind::Call, start + SERIAL_TIME));
        usage.change(&other, Use::Closed, Use::Idle, start);
        assert!(usage.is_surplus(&other, RequestKind::Call, start + SERIAL_TIME));
        for _ in 0..2 {
            usage.change(&other, Use::Idle, Use::Closed, start);
        }
        assert_eq!(usage.0.locked().idle.len(), 1);
    }

    #[test]
    fn requests_that_took_long_at_the_same_time_count_until_their_end() {
        let (usage, start) = (Usage::default(), Instant::now());
        let end = start + SERIAL_TIME * 2;
        for _ in 0..2 {
            usage.change(&origin(), Use::Closed, CALL, start);
        }
        for _ in 0..2 {
            usage.change(&origin(), CALL, Use::Idle, end);
        }
        assert!(!usage.is_surplus(&origin(), RequestKind::Call, end), "another burst may follow");
        assert!(usage.is_surplus(&origin(), RequestKind::Call, end + SERIAL_TIME));
    }

    #[test]
    fn idle_connections_stay_while_requests_are_sent_at_the_same_time() {
        let (usage, start) = (Usage::default(), Instant::now());
        let later = start + SERIAL_TIME;
        for _ in 0..3 {
            usage.change(&origin(), Use::Closed, Use::Idle, start);
        }
        usage.change(&origin(), Use::Idle, CALL, later);
        assert!(
            !usage.is_surplus(&origin(), RequestKind::Call, later),
            "this is another one at the same time"
        );
        usage.change(&origin(), Use::Idle, CALL, later);
        for _ in 0..2 {
            usage.change(&origin(), CALL, Use::Idle, later);
        }
        assert!(!usage.is_surplus(&origin(), RequestKind::Call, later));
        assert!(usage.is_surplus(&origin(), RequestKind::Call, later + SERIAL_TIME));
    }
}
