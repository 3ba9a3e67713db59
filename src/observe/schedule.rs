//! How often to list all pods (pure). Without an event stream, once a second. With one, full lists
//! only find changes that the stream missed; while they find none, their period doubles.
//!
//! The maximum is a minute and not the 300 s of the Go kubelet: a list costs only two calls; the
//! health check fails after three minutes without a list; and containerd 1.7 sends the first event
//! after a restart of the agent to the old connection, so that a lost event is normal. The period
//! starts at one second because the runtime does not confirm a subscription.

use std::time::{Duration, Instant};

use super::stream_state::StreamState;

/// Pause between two full lists without a stream, and the first pause with one.
const RELIST_PERIOD: Duration = Duration::from_secs(1);
/// The longest pause between two full lists with a stream.
const SAFETY_PERIOD: Duration = Duration::from_secs(60);
/// Pause between two requests for the runtime's status.
const STATUS_PERIOD: Duration = Duration::from_secs(5);
/// The same while the runtime is ready and a stream is open: the stream ends if the runtime exits.
const READY_STATUS_PERIOD: Duration = Duration::from_secs(10);
/// An event for a change must come within this time, else the stream counts as silent.
pub(super) const REPORT_LIMIT: Duration = Duration::from_secs(2);

/// A change of the stream, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StreamChange {
    /// It was open from one full list to the next and has missed nothing.
    Trusted,
    Ended(String),
    Unsupported,
    /// It is open but reports no changes.
    Silent,
}

/// Events that come within this time after a turn are handled together, which bounds the inspections per
/// second and pod in a burst.
const GATHER: Duration = Duration::from_millis(10);

/// How long to gather events when one comes at `now`. `acted`: when the last turn ended, if it listed pods.
/// Without an event the thread does not wake up for this.
pub(super) fn gathering(acted: Option<Instant>, now: Instant) -> Duration {
    acted.map_or(Duration::ZERO, |acted| (acted + GATHER).saturating_duration_since(now))
}

#[derive(Debug)]
pub(super) struct RelistSchedule {
    stream: StreamState,
    silent: bool,
    /// Pause after the last list, while a stream is open.
    stream_relist_period: Duration,
    logged: Option<StreamChange>,
    next_relist: Instant,
    /// The end of the last full list.
    last_relist: Option<Instant>,
    next_status: Instant,
}

impl RelistSchedule {
    /// Everything is due at `now`.
    pub(super) fn new(now: Instant) -> Self {
        RelistSchedule {
            stream: StreamState::Off,
            silent: false,
            stream_relist_period: RELIST_PERIOD,
            logged: None,
            next_relist: now,
            last_relist: None,
            next_status: now,
        }
    }

    /// Whether the stream reports changes.
    pub(super) fn is_streaming(&self) -> bool {
        matches!(self.stream, StreamState::Open { .. }) && !self.silent
    }

    /// Pause between two full lists now.
    pub(super) fn period(&self) -> Duration {
        if self.is_streaming() { self.stream_relist_period } else { RELIST_PERIOD }
    }

    /// Sets the state of the stream. After its start and after its end a full list is due at once,
    /// as events may have been lost. `unreported`: when a change was found that no event reported.
    pub(super) fn update(
        &mut self,
        stream: &StreamState,
        unreported: Option<Instant>,
        now: Instant,
    ) -> Option<StreamChange> {
        if *stream != self.stream {
            self.stream = stream.clone();
            self.silent = false;
            self.stream_relist_period = RELIST_PERIOD;
            self.next_relist = now;
            match &self.stream {
                // The runtime may have exited.
                StreamState::Broken { reason } => {
                    self.next_status = now;
                    return self.first_time(StreamChange::Ended(reason.clone()));
                }
                StreamState::Unsupported => return self.first_time(StreamChange::Unsupported),
                StreamState::Open { .. } | StreamState::Off => {}
            }
        }
        let silent = unreported.is_some_and(|changed_at| now >= changed_at + REPORT_LIMIT);
        if silent != self.silent {
            self.silent = silent;
            self.stream_relist_period = RELIST_PERIOD;
            self.next_relist = self.next_relist.min(now + RELIST_PERIOD);
            if silent {
                return self.first_time(StreamChange::Silent);
            }
        }
        None
    }

    /// `None` if the last logged change was the same. All ends count as the same change.
    fn first_time(&mut self, change: StreamChange) -> Option<StreamChange> {
        let same = match (&self.logged, &change) {
            (Some(StreamChange::Ended(_)), StreamChange::Ended(_)) => true,
            (logged, change) => logged.as_ref() == Some(change),
        };
        if same {
            return None;
        }
        self.logged = Some(change.clone());
        Some(change)
    }

    pub(super) fn is_relist_due(&self, now: Instant) -> bool {
        now >= self.next_relist
    }

    /// A full list was made from `begun` to `now`. `missed`: it found a change that no event had
    /// reported.
    pub(super) fn relisted(&mut self, begun: Instant, missed: bool, now: Instant) -> Option<StreamChange> {
        let was_due = self.is_relist_due(begun);
        self.last_relist = Some(now);
        let mut change = None;
        if missed || !self.is_streaming() {
            self.stream_relist_period = RELIST_PERIOD;
        } else if was_due {
            // A list soon after the subscription does not show that the stream works.
            if let StreamState::Open { since } = self.stream
                && begun.saturating_duration_since(since) >= self.stream_relist_period
            {
                self.stream_relist_period = (self.stream_relist_period * 2).min(SAFETY_PERIOD);
                change = self.first_time(StreamChange::Trusted);
            }
        }
        self.next_relist = now + self.period();
        change
    }

    /// A list or an inspection failed: the next list is due within a second.
    pub(super) fn inspection_failed(&mut self, now: Instant) {
        self.next_relist = self.next_relist.min(now + RELIST_PERIOD).max(now);
    }

    pub(super) fn list_failed(&mut self, now: Instant) {
        self.next_relist = now + RELIST_PERIOD;
        // The status shows when the outage is over. It may be due with the next list already.
        if self.next_status > self.next_relist {
            self.next_status = now;
        }
    }

    /// An event of an unknown pod was received: a full list is due, but at most one a second.
    pub(super) fn list_soon(&mut self, now: Instant) {
        let earliest = self.last_relist.map_or(now, |listed| listed + RELIST_PERIOD);
        self.next_relist = self.next_relist.min(earliest.max(now));
    }

    pub(super) fn is_status_due(&self, now: Instant) -> bool {
        now >= self.next_status
    }

    /// The runtime's status was requested. `ready`: the runtime and its network are ready; `None`: the
    /// request failed. Then the next one is due with the next list: pods wait for a runtime that starts.
    pub(super) fn status_updated(&mut self, ready: Option<bool>, now: Instant) {
        let period = match ready {
            None => RELIST_PERIOD,
            Some(true) if self.is_streaming() => READY_STATUS_PERIOD,
            Some(_) => STATUS_PERIOD,
        };
        self.next_status = now + period;
    }

    /// When the next turn begins if no event comes: when something is due, but not while events are
    /// gathered. `acted`: as for [`gathering`].
    pub(super) fn next_turn(&self, unreported: Option<Instant>, acted: Option<Instant>) -> Instant {
        let due = self.next_relist.min(self.next_status);
        let due = match unreported {
            Some(changed_at) if !self.silent => due.min(changed_at + REPORT_LIMIT),
            _ => due,
        };
        acted.map_or(due, |acted| due.max(acted + GATHER))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixture {
        start: Instant,
        schedule: RelistSchedule,
    }

    impl Fixture {
        fn new() -> Self {
            let start = Instant::now();
            Fixture { start, schedule: RelistSchedule::new(start) }
        }

        fn time(&self, seconds: u64) -> Instant {
            self.start + Duration::from_secs(seconds)
        }

        fn open(&mut self, second: u64) -> Option<StreamChange> {
            let now = self.time(second);
            self.schedule.update(&StreamState::Open { since: now }, None, now)
        }

        /// The seconds at which lists are due from now on, if each takes no time.
        fn lists(&mut self, count: usize) -> Vec<u64> {
            (0..count)
                .map(|_| {
                    let due = self.schedule.next_relist;
                    self.schedule.relisted(due, false, due);
                    (due - self.start).as_secs()
                })
                .collect()
        }
    }

    #[test]
    fn without_a_stream_pods_are_listed_every_second() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.lists(3), [0, 1, 2]);
        let now = fixture.time(3);
        assert_eq!(
            fixture.schedule.update(&StreamState::Unsupported, None, now),
            Some(StreamChange::Unsupported)
        );
        assert_eq!(fixture.lists(3), [3, 4, 5]);
        assert!(!fixture.schedule.is_streaming());
    }

    #[test]
    fn rest_between_two_lists_is_one_wait() {
        let mut fixture = Fixture::new();
        let acted = fixture.time(0);
        fixture.schedule.relisted(acted, false, acted);
        fixture.schedule.status_updated(Some(true), acted);
        // The wait ends with the next list, and not when no more events are gathered.
        assert_eq!(fixture.schedule.next_turn(None, Some(acted)), fixture.time(1));
        // Only an event begins to gather others, for what is left of the time after the list.
        let milliseconds = |after| gathering(Some(acted), acted + Duration::from_millis(after)).as_millis();
        assert_eq!([0, 4, 10, 500].map(milliseconds), [10, 6, 0, 0]);
        assert_eq!(gathering(None, acted), Duration::ZERO);
        // What is due at once waits for events, too.
        let unreported = acted.checked_sub(REPORT_LIMIT);
        assert_eq!(fixture.schedule.next_turn(unreported, Some(acted)), acted + GATHER);
    }

    #[test]
    fn list_period_doubles_until_the_stream_misses_a_change() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.open(0), None);
        assert_eq!(fixture.lists(9), [0, 1, 3, 7, 15, 31, 63, 123, 183]);
        let now = fixture.time(243);
        fixture.schedule.relisted(now, true, now);
        assert_eq!(fixture.lists(4), [244, 246, 250, 258]);
        // A list that was not due, as in a burst of events, does not double the period.
        let now = fixture.time(259);
        let period = fixture.schedule.period();
        fixture.schedule.relisted(now, false, now);
        assert_eq!(fixture.schedule.period(), period);
    }

    #[test]
    fn list_is_due_at_once_when_the_stream_starts_or_ends() {
        let mut fixture = Fixture::new();
        fixture.open(0);
        assert_eq!(fixture.lists(5), [0, 1, 3, 7, 15]);
        let now = fixture.time(20);
        let broken = StreamState::Broken { reason: "gone".into() };
        assert_eq!(fixture.schedule.update(&broken, None, now), Some(StreamChange::Ended("gone".into())));
        assert!(fixture.schedule.is_relist_due(now) && fixture.schedule.is_status_due(now));
        assert_eq!(fixture.lists(3), [20, 21, 22]);
        fixture.open(23);
        assert_eq!(fixture.lists(4), [23, 24, 26, 30]);
        // A repeated end is logged only if the stream was trusted in between.
        let mut fixture = Fixture::new();
        let (first, second) = (fixture.time(1), fixture.time(3));
        assert!(fixture.schedule.update(&broken, None, first).is_some());
        fixture.open(2);
        assert_eq!(
            fixture.schedule.update(&StreamState::Broken { reason: "again".into() }, None, second),
            None
        );
        fixture.open(4);
        let now = fixture.time(4);
        assert_eq!(fixture.schedule.relisted(now, false, now), None);
        let now = fixture.time(5);
        assert_eq!(fixture.schedule.relisted(now, false, now), Some(StreamChange::Trusted));
        let now = fixture.time(6);
        assert!(fixture.schedule.update(&broken, None, now).is_some());
    }

    #[test]
    fn silent_stream_is_replaced_by_lists_every_second() {
        let mut fixture = Fixture::new();
        fixture.open(0);
        fixture.lists(6);
        let stream = fixture.schedule.stream.clone();
        let unreported = Some(fixture.time(40));
        let (soon, late) = (fixture.time(41), fixture.time(42));
        assert_eq!(fixture.schedule.next_turn(unreported, None), late.min(fixture.schedule.next_status));
        assert_eq!(fixture.schedule.update(&stream, unreported, soon), None);
        assert_eq!(fixture.schedule.update(&stream, unreported, late), Some(StreamChange::Silent));
        assert_eq!(fixture.lists(3), [43, 44, 45]);
        // It reports changes again.
        let now = fixture.time(46);
        assert_eq!(fixture.schedule.update(&stream, None, now), None);
        assert!(fixture.schedule.is_streaming());
        assert_eq!(fixture.lists(3), [46, 48, 52]);
    }

    #[test]
    fn failed_inspections_and_unknown_events_cause_at_most_one_list_per_second() {
        let mut fixture = Fixture::new();
        fixture.open(0);
        assert_eq!(fixture.lists(6), [0, 1, 3, 7, 15, 31]);
        let now = fixture.time(32);
        fixture.schedule.inspection_failed(now);
        assert_eq!(fixture.lists(1), [33]);
        let now = fixture.time(33);
        fixture.schedule.list_soon(now);
        assert_eq!(fixture.lists(1), [34]);
        let now = fixture.time(36);
        fixture.schedule.list_soon(now);
        assert!(fixture.schedule.is_relist_due(now));
    }

    #[test]
    fn status_period_depends_on_the_last_response_and_the_stream() {
        let mut fixture = Fixture::new();
        let now = fixture.time(0);
        fixture.schedule.status_updated(Some(true), now);
        assert_eq!(fixture.schedule.next_status, fixture.time(5));
        fixture.open(0);
        fixture.schedule.status_updated(Some(true), now);
        assert_eq!(fixture.schedule.next_status, fixture.time(10));
        fixture.schedule.status_updated(Some(false), now);
        assert_eq!(fixture.schedule.next_status, fixture.time(5));
        // The first failed list brings it forward; later ones do not, so it is requested once per list.
        fixture.schedule.list_failed(now);
        assert_eq!(fixture.schedule.next_status, now);
        fixture.schedule.status_updated(None, now);
        fixture.schedule.list_failed(now);
        assert_eq!(fixture.schedule.next_status, fixture.time(1));
    }
}
