//! Waits for a condition that has no notification: polls it often, and fails with its name when
//! the deadline passes.

use std::time::{Duration, Instant};

/// Between two polls.
const STEP: Duration = Duration::from_millis(40);

/// Polls until `poll` returns a value; panics with `what` after `limit`.
pub(crate) fn wait_for<T>(what: &str, limit: Duration, mut poll: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(begun.elapsed() < limit, "timed out after {limit:?} waiting for {what}");
        // A long wait polls less often, to leave the processor to the agent.
        pause((begun.elapsed() / 25).clamp(STEP, STEP * 10));
    }
}

/// Polls until `poll` is true; panics with `what` after `limit`.
pub(crate) fn wait_until(what: &str, limit: Duration, mut poll: impl FnMut() -> bool) {
    wait_for(what, limit, || poll().then_some(()));
}

/// Polls for the whole of `span` and panics with `what` as soon as `poll` is false.
pub(crate) fn holds_for(what: &str, span: Duration, mut poll: impl FnMut() -> bool) {
    let begun = Instant::now();
    while begun.elapsed() < span {
        assert!(poll(), "did not hold for {span:?}: {what}");
        pause(STEP * 2);
    }
}

/// Lets time pass where time itself is the input (an outage of a given length, a random
/// moment). Never to wait for something.
#[expect(clippy::disallowed_methods, reason = "the tests' one door to the clock")]
pub(crate) fn pause(span: Duration) {
    std::thread::sleep(span);
}
