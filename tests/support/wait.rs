//! Bounded waiting for what a test cannot be told about: it looks at the condition itself,
//! often, and fails with the condition's name when the deadline passes.

use std::time::{Duration, Instant};

/// Between two looks.
const STEP: Duration = Duration::from_millis(40);

/// Looks until `look` gives something; panics with `what` after `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < limit, "waited {limit:?} in vain for {what}");
        // What takes long is looked at less often, for the sake of what it waits for.
        pause((begun.elapsed() / 25).clamp(STEP, STEP * 10));
    }
}

/// Looks until `look` is true; panics with `what` after `limit`.
pub fn wait_until(what: &str, limit: Duration, mut look: impl FnMut() -> bool) {
    wait_for(what, limit, || look().then_some(()));
}

/// Looks for the whole of `span` and panics with `what` as soon as `look` is false.
pub fn holds_for(what: &str, span: Duration, mut look: impl FnMut() -> bool) {
    let begun = Instant::now();
    while begun.elapsed() < span {
        assert!(look(), "did not hold for {span:?}: {what}");
        pause(STEP * 2);
    }
}

/// Lets time pass where time itself is the input (an outage of a given length, a random
/// moment). Never to wait for something.
#[expect(clippy::disallowed_methods, reason = "the tests' one door to the clock")]
pub fn pause(span: Duration) {
    std::thread::sleep(span);
}
