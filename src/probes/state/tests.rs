use super::*;
use Outcome::{Failure, Success};

fn timing(delay: u64, period: u64, success: u32, failure: u32) -> ProbeSettings {
    ProbeSettings {
        initial_delay: Duration::from_secs(delay),
        period: Duration::from_secs(period),
        success_threshold: success,
        failure_threshold: failure,
    }
}

struct Script {
    start: Instant,
    state: State,
    startup: InstanceState,
}

impl Script {
    /// A probe made at 0 s; a fresh instance runs since `since` (whole seconds).
    fn new(kind: Kind, timing: ProbeSettings, since: u64, origin: InstanceOrigin) -> Script {
        let start = Instant::now();
        let mut state = State::new(kind, timing, start);
        state.instance(origin);
        let running_since = Some(start + Duration::from_secs(since));
        let mut script = Script { start, state, startup: InstanceState { running_since, started: true } };
        script.schedule(since as f64);
        script
    }

    fn time(&self, second: f64) -> Instant {
        self.start + Duration::from_secs_f64(second)
    }

    fn schedule(&mut self, second: f64) {
        let now = self.time(second);
        self.state.schedule(self.startup, now);
    }

    fn trigger(&mut self, second: f64) {
        let now = self.time(second);
        self.state.trigger(self.startup, now);
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
        self.state.finish(outcome.into(), self.startup, end)
    }
}

#[test]
fn results_count_up_to_thresholds() {
    use ProbeVerdict as V;
    type Step = (Option<Outcome>, ProbeVerdict, bool);
    let cases: &[(Kind, ProbeSettings, InstanceOrigin, &[Step])] = &[
        (
            Kind::Readiness,
            timing(0, 10, 2, 3),
            InstanceOrigin::Fresh,
            &[
                (Some(Success), V::Pending, false),
                (Some(Success), V::Success, true),
                (Some(Success), V::Success, false),
                (Some(Failure), V::Success, false),
                (Some(Failure), V::Success, false),
                // An error does not count and does not reset the count.
                (None, V::Success, false),
                (Some(Failure), V::Failure, true),
                (Some(Success), V::Failure, false),
                (Some(Success), V::Success, true),
            ],
        ),
        // Not ready stays not ready.
        (Kind::Readiness, timing(0, 10, 1, 1), InstanceOrigin::Fresh, &[(Some(Failure), V::Failure, false)]),
        (
            Kind::Readiness,
            timing(0, 10, 1, 2),
            InstanceOrigin::Adopted,
            &[(Some(Failure), V::Assumed, false), (Some(Failure), V::Failure, true)],
        ),
        (Kind::Readiness, timing(0, 10, 1, 2), InstanceOrigin::Adopted, &[(Some(Success), V::Success, true)]),
        (
            Kind::Liveness,
            timing(0, 10, 1, 2),
            InstanceOrigin::Fresh,
            &[
                (Some(Success), V::Success, false),
                (Some(Failure), V::Success, false),
                (Some(Failure), V::Failure, true),
            ],
        ),
        (Kind::Startup, timing(0, 10, 1, 1), InstanceOrigin::Fresh, &[(Some(Failure), V::Failure, true)]),
        (Kind::Startup, timing(0, 10, 1, 3), InstanceOrigin::Fresh, &[(Some(Success), V::Success, true)]),
        (
            Kind::Startup,
            timing(0, 10, 1, 3),
            InstanceOrigin::Adopted,
            &[
                (None, V::Assumed, false),
                (Some(Failure), V::Pending, true),
                (Some(Failure), V::Pending, false),
                (Some(Failure), V::Failure, true),
            ],
        ),
    ];
    for (kind, timing, origin, steps) in cases {
        let mut script = Script::new(*kind, *timing, 0, *origin);
        for (index, (outcome, verdict, changed)) in steps.iter().enumerate() {
            let changes = script.check(index as f64 * 10.0, 0.1, *outcome);
            assert_eq!((script.state.verdict(), changes), (*verdict, *changed), "{kind:?} step {index}");
        }
    }
}

#[test]
fn ticks_keep_their_rhythm() {
    // Made at 0 s, container up at 3 s: the next tick, not at once.
    let mut script = Script::new(Kind::Liveness, timing(0, 10, 1, 3), 3, InstanceOrigin::Fresh);
    assert_eq!(script.due(), Some(10.0));
    script.check(10.002, 0.5, Success);
    assert_eq!(script.due(), Some(20.0));
    // A check of 2.5 periods: the missed ticks are one run, and the rhythm stays.
    script.check(20.0, 25.0, Failure);
    assert_eq!(script.due(), Some(45.0));
    script.check(45.0, 0.1, Success);
    assert_eq!(script.due(), Some(50.0));
    // An arrangement in between changes nothing.
    script.schedule(47.0);
    assert_eq!(script.due(), Some(50.0));
    script.schedule(50.001);
    assert_eq!(script.due(), Some(50.0));
}

#[test]
fn the_initial_delay_counts_from_the_start_of_the_instance() {
    let script = Script::new(Kind::Liveness, timing(15, 10, 1, 3), 3, InstanceOrigin::Fresh);
    assert_eq!(script.due(), Some(20.0));
    let script = Script::new(Kind::Liveness, timing(17, 10, 1, 3), 3, InstanceOrigin::Fresh);
    assert_eq!(script.due(), Some(20.0));
    let script = Script::new(Kind::Liveness, timing(18, 10, 1, 3), 3, InstanceOrigin::Fresh);
    assert_eq!(script.due(), Some(30.0));
}

#[test]
fn triggers_run_soon_and_restart_the_period() {
    let mut script = Script::new(Kind::Readiness, timing(0, 30, 1, 3), 3, InstanceOrigin::Fresh);
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
    script.schedule(4.3);
    assert_eq!(script.due(), None);
    let end = script.time(9.0);
    assert!(!script.state.finish(Some(Failure), script.startup, end));
    assert_eq!(script.due(), Some(9.0));
    assert!(script.check(9.0, 0.1, Success));
    // A ready container needs no trigger.
    script.trigger(10.0);
    assert_eq!(script.due(), Some(39.0));
    // During the delay: at its end.
    let mut script = Script::new(Kind::Readiness, timing(5, 30, 1, 3), 3, InstanceOrigin::Fresh);
    script.trigger(3.2);
    assert_eq!(script.due(), Some(8.0));
}

#[test]
fn a_trigger_does_not_forestall_the_first_tick() {
    let start = Instant::now();
    let second = |n: u64| start + Duration::from_secs(n);
    let mut state = State::new(Kind::Readiness, timing(0, 10, 1, 3), second(7));
    state.instance(InstanceOrigin::Adopted);
    let startup = InstanceState { running_since: Some(start), started: true };
    state.schedule(startup, start);
    state.trigger(startup, start);
    assert_eq!(state.due(), Some(second(7)));
    state.trigger(startup, second(8));
    assert_eq!(state.due(), Some(second(7)));
    // A new instance is checked immediately.
    state.instance(InstanceOrigin::Fresh);
    state.schedule(startup, start);
    state.trigger(startup, second(1));
    assert_eq!(state.due(), Some(second(1)));
}

#[test]
fn holds_last_until_the_next_instance() {
    let mut script = Script::new(Kind::Liveness, timing(0, 10, 1, 2), 0, InstanceOrigin::Fresh);
    script.check(0.0, 0.1, Failure);
    script.check(10.0, 0.1, Failure);
    assert_eq!(script.due(), None);
    script.schedule(11.0);
    script.trigger(11.0);
    assert_eq!(script.due(), None);
    script.state.instance(InstanceOrigin::Fresh);
    script.schedule(12.0);
    assert_eq!((script.due(), script.state.verdict()), (Some(20.0), ProbeVerdict::Pending));
    // The hold reset the count: it takes two again.
    script.check(20.0, 0.1, Failure);
    assert_eq!(script.state.verdict(), ProbeVerdict::Pending);
    script.check(30.0, 0.1, Failure);
    assert_eq!(script.state.verdict(), ProbeVerdict::Failure);

    let mut script = Script::new(Kind::Startup, timing(0, 10, 1, 2), 0, InstanceOrigin::Fresh);
    script.check(0.0, 0.1, Success);
    assert!(script.due().is_none() && script.state.verdict() == ProbeVerdict::Success);
}

#[test]
fn failures_are_counted_across_a_restart() {
    let mut script = Script::new(Kind::Liveness, timing(0, 10, 1, 3), 0, InstanceOrigin::Fresh);
    script.check(0.0, 0.1, Failure);
    script.check(10.0, 0.1, Failure);
    script.state.instance(InstanceOrigin::Fresh);
    script.schedule(12.0);
    assert!(script.check(20.0, 0.1, Failure));
    assert_eq!(script.state.verdict(), ProbeVerdict::Failure);
}

#[test]
fn held_probe_has_no_due_time() {
    let mut script = Script::new(Kind::Liveness, timing(0, 10, 1, 3), 0, InstanceOrigin::Fresh);
    script.startup.started = false;
    script.schedule(1.0);
    script.trigger(1.0);
    assert_eq!(script.due(), None, "waits for the startup probe");
    script.startup.started = true;
    script.schedule(12.0);
    assert_eq!(script.due(), Some(20.0));
    script.startup.running_since = None;
    script.schedule(13.0);
    assert_eq!(script.due(), None, "does not run");
    script.startup.running_since = Some(script.start);
    script.state.end();
    script.schedule(14.0);
    assert_eq!(script.due(), None, "is over");
    // A startup probe does not wait for itself, and one that was complete stays so.
    let mut script = Script::new(Kind::Startup, timing(0, 10, 1, 3), 0, InstanceOrigin::Fresh);
    script.startup.started = false;
    script.state.instance(InstanceOrigin::Fresh);
    script.schedule(0.5);
    assert_eq!(script.due(), Some(10.0));
    script.state.instance(InstanceOrigin::AdoptedStarted);
    script.schedule(1.0);
    assert!(script.due().is_none() && script.state.verdict() == ProbeVerdict::Success);
}

#[test]
fn absent_settings_have_defaults() {
    let probe = |json: serde_json::Value| ProbeSettings::from_probe(&serde_json::from_value(json).unwrap());
    assert_eq!(probe(serde_json::json!({})), timing(0, 10, 1, 3));
    assert_eq!(
        probe(serde_json::json!({"initialDelaySeconds": 2, "periodSeconds": 0, "successThreshold": -1,
            "failureThreshold": 7})),
        timing(2, 10, 1, 7)
    );
}

proptest::proptest! {
    /// Events in any order cause neither a panic nor unbounded times.
    #[test]
    fn no_order_of_events_panics(steps in proptest::collection::vec((0_u8..6, 0.0_f64..30.0), 0..60)) {
        let mut script = Script::new(Kind::Readiness, timing(2, 3, 2, 2), 1, InstanceOrigin::Fresh);
        let mut second = 1.0;
        for (what, wait) in steps {
            second += wait;
            let now = script.time(second);
            match what {
                0 => script.schedule(second),
                1 => script.trigger(second),
                2 => script.state.begin(now),
                3 => drop(script.state.finish(Some(Success), script.startup, now)),
                4 => drop(script.state.finish(Some(Failure), script.startup, now)),
                _ => script.state.instance(InstanceOrigin::Fresh),
            }
            if let Some(due) = script.due() {
                proptest::prop_assert!(due <= second + 3.0 + 2.0 + 0.1, "{due} at {second}");
            }
        }
    }
}
