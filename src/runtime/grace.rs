//! The grace period of a pod that is being stopped. It can be shortened while the pod is stopped
//! (Go: `calculateEffectiveGracePeriod` and `cancelFn` in pkg/kubelet/pod_workers.go).
//!
//! DIFFERS: in the Go kubelet a stop under way is not connected with `cancelFn`, and goes on with the
//! longer period.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::select_biased;

use crate::util::lock::LockExt;
use crate::util::stop::{self, StopSource, StopToken, Waited};
use crate::util::timers;

/// Makes a grace period that has not begun, and the end that shortens it.
#[must_use]
pub fn pair() -> (GraceOwner, Grace) {
    let (source, token) = stop::pair();
    let grace = Grace(Arc::new(Mutex::new(State { source: Some(source), token, version: 0, end: None })));
    (GraceOwner(grace.clone()), grace)
}

/// The owning end of a [`Grace`]. Dropping it cancels whatever waits for the period's end.
#[derive(Debug)]
pub struct GraceOwner(Grace);

/// A grace period. Clones share it.
#[derive(Debug, Clone)]
pub struct Grace(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Ends the waits of this version. `None`: cancelled, or the period cannot be shortened.
    source: Option<StopSource>,
    token: StopToken,
    /// Changes when the period is shortened.
    version: u64,
    /// When the period ends. `None`: it has no end, or has not begun.
    end: Option<Instant>,
}

/// The stop token of one wait, and the version of the period that it belongs to.
pub(super) struct Wait {
    /// Stopped when the period is shortened, and when the wait is cancelled.
    pub(super) token: StopToken,
    version: u64,
}

impl GraceOwner {
    /// Lets the period end in `seconds` from now, if that is earlier than before. Waits under way
    /// end and begin again with the new time.
    pub fn shorten(&self, seconds: i64) {
        let Some(end) = after(seconds) else { return };
        let mut state = self.0.0.locked();
        if state.source.is_none() || state.end.is_some_and(|old| old <= end) {
            return;
        }
        state.end = Some(end);
        state.version += 1;
        state.renew();
    }
}

impl Drop for GraceOwner {
    fn drop(&mut self) {
        self.0.0.locked().source = None;
    }
}

impl Grace {
    /// A period that is not shortened; `stop` cancels its waits.
    #[must_use]
    pub fn fixed(stop: &StopToken) -> Grace {
        Grace(Arc::new(Mutex::new(State { source: None, token: stop.clone(), version: 0, end: None })))
    }

    /// Forgets the end: the period has not begun.
    pub fn reset(&self) {
        self.0.locked().end = None;
    }

    /// The period begins and takes `seconds`, or less if it was shortened since [`Grace::reset`].
    pub fn begin(&self, seconds: i64) {
        let end = after(seconds);
        let mut state = self.0.locked();
        state.end = state.end.into_iter().chain(end).min();
    }

    /// Waits until the period, which has begun, is over for `slack`, also if it is shortened meanwhile.
    /// Ends early when `stop` is stopped, and when the waits are cancelled.
    pub(super) fn wait_until_overdue(&self, slack: Duration, stop: &StopToken) -> Waited {
        loop {
            let (token, version, end) = {
                let state = self.0.locked();
                (state.token.clone(), state.version, state.end)
            };
            let due = end.and_then(|end| end.checked_add(slack));
            select_biased! {
                recv(stop.signal()) -> _ => return Waited::Stopped,
                recv(token.signal()) -> _ => {
                    if self.0.locked().version == version {
                        return Waited::Stopped;
                    }
                }
                recv(timers::deadline_channel(due)) -> _ => return Waited::TimedOut,
            }
        }
    }

    /// Whether the waits were cancelled.
    pub(super) fn is_cancelled(&self) -> bool {
        self.0.locked().token.is_stopped()
    }
}

impl State {
    fn renew(&mut self) {
        let (source, token) = stop::pair();
        (self.source, self.token) = (Some(source), token);
    }
}

/// The time that is left to stop one container: its own grace period, and that of the pod.
pub(super) struct Countdown<'a> {
    begun: Instant,
    seconds: i64,
    grace: &'a Grace,
}

impl<'a> Countdown<'a> {
    /// Begins now and takes `seconds` at most.
    pub(super) fn begin(seconds: i64, grace: &'a Grace) -> Self {
        Countdown { begun: Instant::now(), seconds, grace }
    }

    pub(super) fn grace(&self) -> &'a Grace {
        self.grace
    }

    /// The seconds that are left; a used fraction of a second counts as left.
    pub(super) fn left(&self) -> i64 {
        let used = i64::try_from(self.begun.elapsed().as_secs()).unwrap_or(i64::MAX);
        let own = self.seconds.saturating_sub(used);
        match self.grace.0.locked().end {
            Some(end) => own.min(whole_seconds(end.saturating_duration_since(Instant::now()))),
            None => own,
        }
    }

    /// [`Countdown::left`] as a time; `None` if nothing is left.
    pub(super) fn time_left(&self) -> Option<Duration> {
        let left = self.left();
        (left > 0).then(|| Duration::from_secs(left.unsigned_abs()))
    }

    /// What the next wait needs. It is to be read before [`Countdown::left`].
    pub(super) fn wait(&self) -> Wait {
        let state = self.grace.0.locked();
        Wait { token: state.token.clone(), version: state.version }
    }

    /// Whether a wait that its token has ended is to begin again, because the period was shortened.
    pub(super) fn is_shortened(&self, wait: &Wait) -> bool {
        self.grace.0.locked().version != wait.version
    }
}

/// The time in `seconds` from now; `None` beyond the range of the clock.
fn after(seconds: i64) -> Option<Instant> {
    Instant::now().checked_add(Duration::from_secs(seconds.max(0).unsigned_abs()))
}

/// Rounded up.
fn whole_seconds(time: Duration) -> i64 {
    let seconds = time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0));
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::testing;

    #[test]
    fn shorter_period_ends_the_wait_and_longer_one_does_not() {
        let (owner, grace) = pair();
        grace.begin(3600);
        let countdown = Countdown::begin(3600, &grace);
        let first = countdown.wait();
        owner.shorten(7200);
        assert!(!first.token.is_stopped() && !countdown.is_shortened(&first));
        owner.shorten(5);
        assert!(first.token.is_stopped() && countdown.is_shortened(&first));
        assert!((1..=5).contains(&countdown.left()), "{}", countdown.left());
        let second = countdown.wait();
        owner.shorten(60);
        assert!(!second.token.is_stopped(), "the period only shrinks");
        drop(owner);
        assert!(second.token.is_stopped() && !countdown.is_shortened(&second));
    }

    #[test]
    fn period_shortened_before_it_begins_is_short() {
        let (owner, grace) = pair();
        grace.reset();
        owner.shorten(2);
        grace.begin(3600);
        assert!(Countdown::begin(3600, &grace).left() <= 2);
        // The next attempt has the whole period again.
        grace.reset();
        grace.begin(3600);
        assert!(Countdown::begin(3600, &grace).left() > 3000);
    }

    #[test]
    fn stop_is_overdue_by_the_shortened_period() {
        let (owner, grace) = pair();
        let (_stop, token) = stop::pair();
        grace.begin(3600);
        let waiter = testing::in_background(move || grace.wait_until_overdue(Duration::ZERO, &token));
        // Whether it waits already or not.
        owner.shorten(0);
        assert_eq!(waiter.result(), Waited::TimedOut);
        // Nothing is overdue if the stop ends, or the agent.
        let (source, token) = stop::pair();
        drop(source);
        let (owner, grace) = pair();
        grace.begin(3600);
        assert_eq!(grace.wait_until_overdue(Duration::ZERO, &token), Waited::Stopped);
        drop(owner);
        assert_eq!(grace.wait_until_overdue(Duration::ZERO, &StopToken::never()), Waited::Stopped);
    }

    #[test]
    fn fixed_period_has_only_its_own_time_and_a_stop() {
        let (source, stop) = stop::pair();
        let grace = Grace::fixed(&stop);
        let countdown = Countdown::begin(i64::MAX, &grace);
        assert_eq!(countdown.left(), i64::MAX);
        let wait = countdown.wait();
        assert!(!wait.token.is_stopped());
        drop(source);
        assert!(wait.token.is_stopped() && !countdown.is_shortened(&wait));
        assert_eq!(Countdown::begin(0, &grace).time_left(), None);
    }
}
