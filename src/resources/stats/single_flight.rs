//! One call to the runtime, shared by all callers that need its response at that time.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::request::FRESH;
use crate::cri::CriError;
use crate::transport::grpc::{CallError, Kind};
use crate::util::lock::LockExt;

/// After a call that exceeded its deadline no call is made for this time: callers get the same
/// error immediately.
const PAUSE: Duration = Duration::from_secs(10);

/// A call that at most one caller makes at a time. A response is stored as long as a caller uses
/// it.
pub(super) struct SingleFlight<T> {
    state: Mutex<State<T>>,
    call_ended: Condvar,
}

struct State<T> {
    under_way: bool,
    ended_calls: u64,
    last: Option<(Instant, Result<Weak<T>, CriError>)>,
    waiting: usize,
    /// The last response, until all waiting callers have received it.
    response: Option<Arc<T>>,
}

impl<T> Default for SingleFlight<T> {
    fn default() -> Self {
        let state =
            Mutex::new(State { under_way: false, ended_calls: 0, last: None, waiting: 0, response: None });
        SingleFlight { state, call_ended: Condvar::new() }
    }
}

impl<T> SingleFlight<T> {
    /// Makes the call, or waits for a running one until `until` at most.
    pub(super) fn call(
        &self,
        method: &'static str,
        until: Instant,
        send: impl FnOnce(Duration) -> Result<T, CriError>,
    ) -> Result<Arc<T>, CriError> {
        let mut state = self.state.locked();
        if let Some(known) =
            state.last.as_ref().and_then(|(time, outcome)| reusable_result(time.elapsed(), outcome))
        {
            return known;
        }
        while state.under_way {
            let number = state.ended_calls;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(deadline_exceeded(method));
            }
            let _waiting = crate::util::threads::waiting("another call for statistics");
            state.waiting += 1;
            state = self.call_ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
            let outcome = state.last.as_ref().filter(|_| state.ended_calls != number);
            let outcome = outcome.map(|(_, outcome)| outcome.as_ref().map(Weak::upgrade));
            match outcome {
                Some(Err(error)) => return Err(error.clone()),
                Some(Ok(Some(response))) => {
                    if state.waiting == 0 {
                        state.response = None;
                    }
                    return Ok(response);
                }
                // It panicked, or the wait was cancelled.
                Some(Ok(None)) | None => {}
            }
        }
        state.under_way = true;
        drop(state);
        let mut guard = CallGuard { flight: self, outcome: None };
        let response = send(until.saturating_duration_since(Instant::now())).map(Arc::new);
        guard.outcome = Some(response.clone());
        drop(guard);
        response
    }
}

#[cfg(test)]
impl<T> SingleFlight<T> {
    /// The number of callers that wait for another caller's call.
    pub(super) fn waiting(&self) -> usize {
        self.state.locked().waiting
    }
}

/// Ends a call, also when it panics.
struct CallGuard<'a, T> {
    flight: &'a SingleFlight<T>,
    outcome: Option<Result<Arc<T>, CriError>>,
}

impl<T> Drop for CallGuard<'_, T> {
    fn drop(&mut self) {
        let mut state = self.flight.state.locked();
        state.under_way = false;
        state.ended_calls += 1;
        let outcome = self.outcome.take();
        state.response = outcome
            .as_ref()
            .filter(|_| state.waiting > 0)
            .and_then(|response| response.as_ref().ok())
            .cloned();
        let weak = outcome.map(|outcome| outcome.map(|response| Arc::downgrade(&response)));
        state.last = weak.map(|outcome| (Instant::now(), outcome));
        drop(state);
        self.flight.call_ended.notify_all();
    }
}

/// The result of an ended call for later callers.
fn reusable_result<T>(
    age: Duration,
    outcome: &Result<Weak<T>, CriError>,
) -> Option<Result<Arc<T>, CriError>> {
    match outcome {
        Ok(response) if age < FRESH => response.upgrade().map(Ok),
        Err(error) if error.kind() == Some(Kind::DeadlineExceeded) && age < PAUSE => Some(Err(error.clone())),
        _ => None,
    }
}

fn deadline_exceeded(method: &'static str) -> CriError {
    let message = "context deadline exceeded".to_owned();
    let error = CallError { method, kind: Kind::DeadlineExceeded, message };
    CriError::Call { object: String::new(), error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::threads::{self, OnDeath, Stack};
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn far_deadline() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn concurrent_callers_share_a_response_and_later_ones_get_another() {
        let flight: Arc<SingleFlight<usize>> = Arc::default();
        let calls = Arc::new(AtomicUsize::new(0));
        let (responses, received) = crossbeam_channel::bounded(4);
        let (release, released) = crossbeam_channel::bounded::<()>(1);
        let _callers: Vec<_> = (0..4)
            .map(|_| {
                let (flight, calls) = (Arc::clone(&flight), Arc::clone(&calls));
                let (responses, released) = (responses.clone(), released.clone());
                threads::spawn("asks", Stack::Small, OnDeath::Unsupervised, move |_| {
                    let response = flight.call("X", far_deadline(), |_| {
                        released.recv().unwrap();
                        Ok(calls.fetch_add(1, Ordering::Relaxed))
                    });
                    responses.send(response.unwrap()).unwrap();
                })
                .unwrap()
            })
            .collect();
        while flight.waiting() < 3 {
            std::thread::yield_now();
        }
        release.send(()).unwrap();
        let all: Vec<Arc<usize>> = received.iter().take(4).collect();
        assert!(all.iter().all(|response| **response == 0), "{all:?}");
        assert!(flight.state.locked().response.is_none());
        // As long as a caller uses it, for a while; to a test that is held up it has just come.
        flight.state.locked().last.as_mut().unwrap().0 += PAUSE;
        assert_eq!(flight.call("X", far_deadline(), |_| Ok(7)), Ok(Arc::new(0)));
        drop(all);
        assert_eq!(flight.call("X", far_deadline(), |_| Ok(7)), Ok(Arc::new(7)));
    }

    #[test]
    fn runtime_that_exceeded_the_deadline_is_not_called_again_for_a_time() {
        let flight: SingleFlight<usize> = SingleFlight::default();
        assert_eq!(
            flight.call("X", far_deadline(), |_| Err(deadline_exceeded("X"))),
            Err(deadline_exceeded("X"))
        );
        assert_eq!(flight.call("X", far_deadline(), |_| Ok(1)), Err(deadline_exceeded("X")));
        flight.state.locked().last.as_mut().unwrap().0 -= PAUSE;
        let response = flight.call("X", Instant::now(), |left| {
            assert!(left.is_zero());
            Ok(1)
        });
        assert_eq!(response, Ok(Arc::new(1)));
        // Other failures are reported only to callers that waited.
        let refused = CriError::Stopped { method: "X", object: String::new() };
        drop(response);
        assert_eq!(flight.call("X", far_deadline(), |_| Err(refused.clone())), Err(refused));
        assert_eq!(flight.call("X", far_deadline(), |_| Ok(2)).as_deref(), Ok(&2));
    }

    #[test]
    fn wait_ends_at_the_deadline() {
        let flight: Arc<SingleFlight<usize>> = Arc::default();
        let (began, begun) = crossbeam_channel::bounded::<()>(1);
        let (release, released) = crossbeam_channel::bounded::<()>(1);
        let _first = {
            let flight = Arc::clone(&flight);
            threads::spawn("asks", Stack::Small, OnDeath::Unsupervised, move |_| {
                let _ = flight.call("X", far_deadline(), |_| {
                    began.send(()).unwrap();
                    // Ends with the test.
                    let _ = released.recv();
                    Ok(1)
                });
            })
            .unwrap()
        };
        begun.recv().unwrap();
        let error = flight.call("X", Instant::now() + Duration::from_millis(10), |_| Ok(2)).unwrap_err();
        assert_eq!(error, deadline_exceeded("X"));
        assert_eq!(error.to_string(), "rpc error: code = DeadlineExceeded desc = context deadline exceeded");
        drop(release);
    }
}
