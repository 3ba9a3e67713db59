//! One probe of one container, without clock, thread or network (Go: prober/worker.go).
//!
//! When it runs, what a result means, and what it is held back by. Times come in as
//! arguments. The tick of a probe starts when the probe is made and keeps its rhythm through
//! restarts of the container; a trigger starts it anew.

use std::time::{Duration, Instant};

use crate::model::api::{Container, Probe};
use crate::model::verdict::Verdict;

/// Triggered runs of one probe are at least this far apart.
///
/// DIFFERS: upstream runs at every trigger, and each status of a pod that is not ready is
/// one, so a start in several steps spends the failure threshold in one moment.
const TRIGGER_GAP: Duration = Duration::from_secs(1);

/// What a probe is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Whether the container has started; the other two wait for it.
    Startup,
    /// Whether it is to be killed.
    Liveness,
    /// Whether it can take traffic.
    Readiness,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 3] = [Kind::Startup, Kind::Liveness, Kind::Readiness];

    /// As events and metrics name it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Startup => "Startup",
            Kind::Liveness => "Liveness",
            Kind::Readiness => "Readiness",
        }
    }

    /// The probe of this kind that `container` has.
    #[must_use]
    pub fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            Kind::Startup => container.startup_probe.as_ref(),
            Kind::Liveness => container.liveness_probe.as_ref(),
            Kind::Readiness => container.readiness_probe.as_ref(),
        }
    }
}

/// A check that came to a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It passed.
    Success,
    /// It did not.
    Failure,
}

/// The numbers of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Timing {
    pub(super) initial_delay: Duration,
    pub(super) period: Duration,
    pub(super) success_threshold: u32,
    pub(super) failure_threshold: u32,
}

impl Timing {
    /// The numbers of `probe`, with the API's defaults for what is absent or zero.
    pub(super) fn of(probe: &Probe) -> Timing {
        let number = |value: Option<i32>, absent: u32| {
            value.and_then(|value| u32::try_from(value).ok()).filter(|value| *value > 0).unwrap_or(absent)
        };
        Timing {
            initial_delay: Duration::from_secs(number(probe.initial_delay_seconds, 0).into()),
            period: Duration::from_secs(number(probe.period_seconds, 10).into()),
            success_threshold: number(probe.success_threshold, 1),
            failure_threshold: number(probe.failure_threshold, 3),
        }
    }
}

/// How a container instance came to the probe's notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// This agent saw it start.
    Fresh,
    /// It ran before this agent did.
    Adopted,
    /// The same, and its start was known to be complete.
    AdoptedStarted,
}

/// What holds for the whole container when a probe is looked at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conditions {
    /// When the newest instance started, if it runs.
    pub(super) running_since: Option<Instant>,
    /// Whether its startup probe, if any, has passed.
    pub(super) started: bool,
}

/// One probe.
#[derive(Debug)]
pub(super) struct State {
    kind: Kind,
    timing: Timing,
    verdict: Verdict,
    /// No runs until the next instance.
    held: bool,
    /// No runs any more.
    ended: bool,
    last: Option<Outcome>,
    /// How often `last` came in a row, over all instances.
    run: u32,
    /// The last tick; the first one until it has passed.
    tick: Instant,
    due: Option<Instant>,
    last_start: Option<Instant>,
    checking: bool,
    /// Triggered during a check.
    again: bool,
}

impl State {
    /// A probe whose first tick is at `first`.
    pub(super) fn new(kind: Kind, timing: Timing, first: Instant) -> State {
        State {
            kind,
            timing,
            verdict: Verdict::Pending,
            held: false,
            ended: false,
            last: None,
            run: 0,
            tick: first,
            due: None,
            last_start: None,
            checking: false,
            again: false,
        }
    }

    pub(super) fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// When it is to run next.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Whether a running container counts as started for the others.
    pub(super) fn lets_others_run(&self) -> bool {
        self.verdict == Verdict::Success
    }

    /// A new instance: what was found out about the older one is over. The count of equal
    /// results goes on, as upstream's does. A check of the older one that is still under way
    /// does not count any more.
    pub(super) fn instance(&mut self, origin: Origin) {
        self.verdict = match (origin, self.kind) {
            (Origin::Fresh, _) => Verdict::Pending,
            (Origin::AdoptedStarted, Kind::Startup) => Verdict::Success,
            (Origin::Adopted | Origin::AdoptedStarted, _) => Verdict::Kept,
        };
        self.held = self.verdict == Verdict::Success;
        self.checking = false;
        self.again = false;
        self.due = None;
    }

    /// Ends it for good. The verdict stays, since what it was about may still be shown.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.due = None;
    }

    /// Sets or clears the time of the next run after anything may have changed.
    pub(super) fn arrange(&mut self, at: Conditions, now: Instant) {
        let waits = self.held || self.ended || (self.kind != Kind::Startup && !at.started);
        let Some(since) = at.running_since.filter(|_| !waits) else {
            self.due = None;
            return;
        };
        if self.checking || self.due.is_some() {
            return;
        }
        let earliest = now.max(since + self.timing.initial_delay);
        self.due = Some(self.tick_from(earliest));
    }

    /// Asks for a run as soon as possible, if it may run at all.
    ///
    /// DIFFERS: during the initial delay it runs at the delay's end. Upstream skips such a
    /// run and starts the period anew.
    pub(super) fn trigger(&mut self, at: Conditions, now: Instant) {
        // Before the first tick the run is coming, spread on purpose.
        if self.verdict == Verdict::Success || (self.last_start.is_none() && self.tick > now) {
            return;
        }
        if self.checking {
            self.again = true;
            return;
        }
        let (Some(due), Some(since)) = (self.due, at.running_since) else { return };
        let earliest = now.max(since + self.timing.initial_delay);
        let spaced = self.last_start.map_or(earliest, |last| earliest.max(last + TRIGGER_GAP));
        if spaced < due {
            self.due = Some(spaced);
            self.tick = spaced;
        }
    }

    /// A run begins.
    pub(super) fn begin(&mut self, now: Instant) {
        self.due = None;
        self.checking = true;
        self.last_start = Some(now);
        // The last tick that has passed: those that a long check missed do not pile up.
        let next = self.tick_from(now);
        self.tick = if next > now { next.checked_sub(self.timing.period).unwrap_or(now) } else { next };
    }

    /// A run could not begin; it is tried again at `then`.
    pub(super) fn postpone(&mut self, then: Instant) {
        self.checking = false;
        if !self.ended {
            self.due = Some(then);
        }
    }

    /// A run on the present instance ended; without an `outcome` it says nothing. Returns
    /// whether others have to know.
    pub(super) fn finish(&mut self, outcome: Option<Outcome>, at: Conditions, now: Instant) -> bool {
        self.checking = false;
        let changed = outcome.is_some_and(|outcome| self.count(outcome));
        let waits = self.held || self.ended || at.running_since.is_none();
        if !waits && (self.kind == Kind::Startup || at.started) {
            // A tick that passed meanwhile is run at once.
            self.due = Some((self.tick + self.timing.period).max(now));
        }
        if std::mem::take(&mut self.again) {
            self.trigger(at, now);
        }
        changed
    }

    fn count(&mut self, outcome: Outcome) -> bool {
        self.run = if self.last == Some(outcome) { self.run.saturating_add(1) } else { 1 };
        self.last = Some(outcome);
        let (needed, verdict) = match outcome {
            Outcome::Success => (self.timing.success_threshold, Verdict::Success),
            Outcome::Failure => (self.timing.failure_threshold, Verdict::Failure),
        };
        if self.run < needed {
            // An adopted instance that does not answer has not shown that it ever started.
            let doubt = self.kind == Kind::Startup && self.verdict == Verdict::Kept;
            if doubt {
                self.verdict = Verdict::Pending;
            }
            return doubt;
        }
        // What an undecided probe shows already is no news.
        let same = match (self.verdict, self.kind) {
            (Verdict::Pending, Kind::Readiness) => verdict == Verdict::Failure,
            (Verdict::Pending | Verdict::Kept, Kind::Liveness) => verdict == Verdict::Success,
            (before, _) => before == verdict,
        };
        self.verdict = verdict;
        if self.kind == Kind::Startup || (self.kind == Kind::Liveness && outcome == Outcome::Failure) {
            self.held = true;
            self.run = 0;
        }
        !same
    }

    /// The first tick at or after `earliest`.
    fn tick_from(&self, earliest: Instant) -> Instant {
        let behind = earliest.saturating_duration_since(self.tick).as_nanos();
        let period = self.timing.period.as_nanos().max(1);
        let ticks = u32::try_from(behind.div_ceil(period)).unwrap_or(u32::MAX);
        self.tick + self.timing.period.saturating_mul(ticks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Outcome::{Failure, Success};

    fn timing(delay: u64, period: u64, success: u32, failure: u32) -> Timing {
        Timing {
            initial_delay: Duration::from_secs(delay),
            period: Duration::from_secs(period),
            success_threshold: success,
            failure_threshold: failure,
        }
    }

    struct Script {
        start: Instant,
        state: State,
        at: Conditions,
    }

    impl Script {
        /// A probe made at 0 s; a fresh instance runs since `since` (whole seconds).
        fn new(kind: Kind, timing: Timing, since: u64, origin: Origin) -> Script {
            let start = Instant::now();
            let mut state = State::new(kind, timing, start);
            state.instance(origin);
            let running_since = Some(start + Duration::from_secs(since));
            let mut script = Script { start, state, at: Conditions { running_since, started: true } };
            script.arrange(since as f64);
            script
        }

        fn time(&self, second: f64) -> Instant {
            self.start + Duration::from_secs_f64(second)
        }

        fn arrange(&mut self, second: f64) {
            let now = self.time(second);
            self.state.arrange(self.at, now);
        }

        fn trigger(&mut self, second: f64) {
            let now = self.time(second);
            self.state.trigger(self.at, now);
        }

        fn due(&self) -> Option<f64> {
            self.state.due().map(|due| {
                let after = due.saturating_duration_since(self.start).as_secs_f64();
                (after * 1000.0).round() / 1000.0
            })
        }

        /// Runs at `second` for `lasts` seconds.
        fn check(&mut self, second: f64, lasts: f64, outcome: impl Into<Option<Outcome>>) -> bool {
            let (begin, end) = (self.time(second), self.time(second + lasts));
            self.state.begin(begin);
            self.state.finish(outcome.into(), self.at, end)
        }
    }

    #[test]
    fn results_count_up_to_thresholds() {
        use Verdict as V;
        type Step = (Option<Outcome>, Verdict, bool);
        let cases: &[(Kind, Timing, Origin, &[Step])] = &[
            (
                Kind::Readiness,
                timing(0, 10, 2, 3),
                Origin::Fresh,
                &[
                    (Some(Success), V::Pending, false),
                    (Some(Success), V::Success, true),
                    (Some(Success), V::Success, false),
                    (Some(Failure), V::Success, false),
                    (Some(Failure), V::Success, false),
                    // An error says nothing and does not break the row.
                    (None, V::Success, false),
                    (Some(Failure), V::Failure, true),
                    (Some(Success), V::Failure, false),
                    (Some(Success), V::Success, true),
                ],
            ),
            // Not ready stays not ready.
            (Kind::Readiness, timing(0, 10, 1, 1), Origin::Fresh, &[(Some(Failure), V::Failure, false)]),
            (
                Kind::Readiness,
                timing(0, 10, 1, 2),
                Origin::Adopted,
                &[(Some(Failure), V::Kept, false), (Some(Failure), V::Failure, true)],
            ),
            (Kind::Readiness, timing(0, 10, 1, 2), Origin::Adopted, &[(Some(Success), V::Success, true)]),
            (
                Kind::Liveness,
                timing(0, 10, 1, 2),
                Origin::Fresh,
                &[
                    (Some(Success), V::Success, false),
                    (Some(Failure), V::Success, false),
                    (Some(Failure), V::Failure, true),
                ],
            ),
            (Kind::Startup, timing(0, 10, 1, 1), Origin::Fresh, &[(Some(Failure), V::Failure, true)]),
            (Kind::Startup, timing(0, 10, 1, 3), Origin::Fresh, &[(Some(Success), V::Success, true)]),
            (
                Kind::Startup,
                timing(0, 10, 1, 3),
                Origin::Adopted,
                &[
                    (None, V::Kept, false),
                    (Some(Failure), V::Pending, true),
                    (Some(Failure), V::Pending, false),
                    (Some(Failure), V::Failure, true),
                ],
            ),
        ];
        for (kind, timing, origin, steps) in cases {
            let mut script = Script::new(*kind, *timing, 0, *origin);
            for (index, (outcome, verdict, changed)) in steps.iter().enumerate() {
                let told = script.check(index as f64 * 10.0, 0.1, *outcome);
                assert_eq!((script.state.verdict(), told), (*verdict, *changed), "{kind:?} step {index}");
            }
        }
    }

    #[test]
    fn ticks_keep_their_rhythm() {
        // Made at 0 s, container up at 3 s: the next tick, not at once.
        let mut script = Script::new(Kind::Liveness, timing(0, 10, 1, 3), 3, Origin::Fresh);
        assert_eq!(script.due(), Some(10.0));
        script.check(10.002, 0.5, Success);
        assert_eq!(script.due(), Some(20.0));
        // A check of 2.5 periods: the missed ticks are one run, and the rhythm stays.
        script.check(20.0, 25.0, Failure);
        assert_eq!(script.due(), Some(45.0));
        script.check(45.0, 0.1, Success);
        assert_eq!(script.due(), Some(50.0));
        // An arrangement in between changes nothing.
        script.arrange(47.0);
        assert_eq!(script.due(), Some(50.0));
        script.arrange(50.001);
        assert_eq!(script.due(), Some(50.0));
    }

    #[test]
    fn the_initial_delay_counts_from_the_start_of_the_instance() {
        let script = Script::new(Kind::Liveness, timing(15, 10, 1, 3), 3, Origin::Fresh);
        assert_eq!(script.due(), Some(20.0));
        let script = Script::new(Kind::Liveness, timing(17, 10, 1, 3), 3, Origin::Fresh);
        assert_eq!(script.due(), Some(20.0));
        let script = Script::new(Kind::Liveness, timing(18, 10, 1, 3), 3, Origin::Fresh);
        assert_eq!(script.due(), Some(30.0));
    }

    #[test]
    fn triggers_run_soon_and_start_the_period_anew() {
        let mut script = Script::new(Kind::Readiness, timing(0, 30, 1, 3), 3, Origin::Fresh);
        assert_eq!(script.due(), Some(30.0));
        script.trigger(3.2);
        assert_eq!(script.due(), Some(3.2));
        script.check(3.2, 0.1, Failure);
        assert_eq!(script.due(), Some(33.2));
        // Not at every step of a start.
        script.trigger(3.4);
        assert_eq!(script.due(), Some(4.2));
        script.trigger(3.5);
        assert_eq!(script.due(), Some(4.2));
        // During a check: once more after it.
        let begin = script.time(4.2);
        script.state.begin(begin);
        script.trigger(4.3);
        script.arrange(4.3);
        assert_eq!(script.due(), None);
        let end = script.time(9.0);
        assert!(!script.state.finish(Some(Failure), script.at, end));
        assert_eq!(script.due(), Some(9.0));
        assert!(script.check(9.0, 0.1, Success));
        // What is ready needs no trigger.
        script.trigger(10.0);
        assert_eq!(script.due(), Some(39.0));
        // During the delay: at its end.
        let mut script = Script::new(Kind::Readiness, timing(5, 30, 1, 3), 3, Origin::Fresh);
        script.trigger(3.2);
        assert_eq!(script.due(), Some(8.0));
    }

    #[test]
    fn a_trigger_does_not_forestall_the_first_tick() {
        let start = Instant::now();
        let second = |n: u64| start + Duration::from_secs(n);
        let mut state = State::new(Kind::Readiness, timing(0, 10, 1, 3), second(7));
        state.instance(Origin::Adopted);
        let at = Conditions { running_since: Some(start), started: true };
        state.arrange(at, start);
        state.trigger(at, start);
        assert_eq!(state.due(), Some(second(7)));
        state.trigger(at, second(8));
        assert_eq!(state.due(), Some(second(7)));
    }

    #[test]
    fn holds_last_until_the_next_instance() {
        let mut script = Script::new(Kind::Liveness, timing(0, 10, 1, 2), 0, Origin::Fresh);
        script.check(0.0, 0.1, Failure);
        script.check(10.0, 0.1, Failure);
        assert_eq!(script.due(), None);
        script.arrange(11.0);
        script.trigger(11.0);
        assert_eq!(script.due(), None);
        script.state.instance(Origin::Fresh);
        script.arrange(12.0);
        assert_eq!((script.due(), script.state.verdict()), (Some(20.0), Verdict::Pending));
        // The row began anew with the hold: it takes two again.
        script.check(20.0, 0.1, Failure);
        assert_eq!(script.state.verdict(), Verdict::Pending);
        script.check(30.0, 0.1, Failure);
        assert_eq!(script.state.verdict(), Verdict::Failure);

        let mut script = Script::new(Kind::Startup, timing(0, 10, 1, 2), 0, Origin::Fresh);
        script.check(0.0, 0.1, Success);
        assert!(script.due().is_none() && script.state.lets_others_run());
    }

    #[test]
    fn a_row_goes_on_through_a_crash() {
        let mut script = Script::new(Kind::Liveness, timing(0, 10, 1, 3), 0, Origin::Fresh);
        script.check(0.0, 0.1, Failure);
        script.check(10.0, 0.1, Failure);
        script.state.instance(Origin::Fresh);
        script.arrange(12.0);
        assert!(script.check(20.0, 0.1, Failure));
        assert_eq!(script.state.verdict(), Verdict::Failure);
    }

    #[test]
    fn who_waits_has_no_due_time() {
        let mut script = Script::new(Kind::Liveness, timing(0, 10, 1, 3), 0, Origin::Fresh);
        script.at.started = false;
        script.arrange(1.0);
        script.trigger(1.0);
        assert_eq!(script.due(), None, "waits for the startup probe");
        script.at.started = true;
        script.arrange(12.0);
        assert_eq!(script.due(), Some(20.0));
        script.at.running_since = None;
        script.arrange(13.0);
        assert_eq!(script.due(), None, "does not run");
        script.at.running_since = Some(script.start);
        script.state.end();
        script.arrange(14.0);
        assert_eq!(script.due(), None, "is over");
        // A startup probe does not wait for itself, and one that was complete stays so.
        let mut script = Script::new(Kind::Startup, timing(0, 10, 1, 3), 0, Origin::Fresh);
        script.at.started = false;
        script.state.instance(Origin::Fresh);
        script.arrange(0.5);
        assert_eq!(script.due(), Some(10.0));
        script.state.instance(Origin::AdoptedStarted);
        script.arrange(1.0);
        assert!(script.due().is_none() && script.state.lets_others_run());
    }

    #[test]
    fn numbers_of_a_probe() {
        let probe = |json: serde_json::Value| Timing::of(&serde_json::from_value(json).unwrap());
        assert_eq!(probe(serde_json::json!({})), timing(0, 10, 1, 3));
        assert_eq!(
            probe(serde_json::json!({"initialDelaySeconds": 2, "periodSeconds": 0, "successThreshold": -1,
                "failureThreshold": 7})),
            timing(2, 10, 1, 7)
        );
    }

    proptest::proptest! {
        /// Whatever happens, in whatever order, times neither panic nor run away.
        #[test]
        fn any_order_is_survived(steps in proptest::collection::vec((0_u8..6, 0.0_f64..30.0), 0..60)) {
            let mut script = Script::new(Kind::Readiness, timing(2, 3, 2, 2), 1, Origin::Fresh);
            let mut second = 1.0;
            for (what, wait) in steps {
                second += wait;
                let now = script.time(second);
                match what {
                    0 => script.arrange(second),
                    1 => script.trigger(second),
                    2 => script.state.begin(now),
                    3 => drop(script.state.finish(Some(Success), script.at, now)),
                    4 => drop(script.state.finish(Some(Failure), script.at, now)),
                    _ => script.state.instance(Origin::Fresh),
                }
                if let Some(due) = script.due() {
                    proptest::prop_assert!(due <= second + 3.0 + 2.0 + 0.1, "{due} at {second}");
                }
            }
        }
    }
}
