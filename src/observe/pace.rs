//! How often to look at everything (pure). Without a stream, once a second. With one, a
//! full list is a safety net that grows wider as long as it catches nothing.
//!
//! Why a minute at most, and not the 300 s of the Go kubelet: a list costs two calls, so a
//! minute is as quiet as five; the health limit of three minutes keeps its meaning; and
//! containerd 1.7 hands the first event after a restart of the agent to the reader that is
//! gone, so that a lost event is an ordinary thing there. Doubling from a second covers
//! the moments after a subscription, which the runtime does not confirm.

use std::time::{Duration, Instant};

use super::stream::StreamState;

/// Pause between two full lists without a stream, and the first one with it.
const RELIST_PERIOD: Duration = Duration::from_secs(1);
/// The widest net below a stream.
const SAFETY_PERIOD: Duration = Duration::from_secs(60);
/// Pause between two looks at the runtime's own status.
const STATUS_PERIOD: Duration = Duration::from_secs(5);
/// The same while a stream holds, which breaks at once if the runtime ends, and all is well.
const CALM_STATUS_PERIOD: Duration = Duration::from_secs(10);
/// A change of which no event has told for so long will not be told any more.
pub(super) const TOLD_WITHIN: Duration = Duration::from_secs(2);

/// What became of the stream, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Turn {
    /// It was opened and has held until the first repeated list.
    Trusted,
    /// It ended.
    Lost(String),
    /// There will be none.
    None,
    /// It is open and tells nothing.
    Deaf,
}

/// When what is due.
#[derive(Debug)]
pub(super) struct Pace {
    stream: StreamState,
    deaf: bool,
    /// Pause after the last list, while a stream is open.
    net: Duration,
    told: Option<Turn>,
    relist: Instant,
    /// The end of the last full list.
    listed: Option<Instant>,
    status: Instant,
}

impl Pace {
    /// Everything is due at `now`.
    pub(super) fn new(now: Instant) -> Self {
        Pace {
            stream: StreamState::Off,
            deaf: false,
            net: RELIST_PERIOD,
            told: None,
            relist: now,
            listed: None,
            status: now,
        }
    }

    /// Whether changes are told by the stream.
    pub(super) fn is_streaming(&self) -> bool {
        matches!(self.stream, StreamState::Open { .. }) && !self.deaf
    }

    /// Pause between two full lists now.
    pub(super) fn period(&self) -> Duration {
        if self.is_streaming() { self.net } else { RELIST_PERIOD }
    }

    /// Takes in the state of the stream. After it was opened and after it broke a full list
    /// is due at once: events in between are lost.
    pub(super) fn heard(
        &mut self,
        stream: &StreamState,
        untold: Option<Instant>,
        now: Instant,
    ) -> Option<Turn> {
        if *stream != self.stream {
            self.stream = stream.clone();
            self.deaf = false;
            self.net = RELIST_PERIOD;
            self.relist = now;
            match &self.stream {
                // A broken stream may be a dead runtime.
                StreamState::Broken { why } => {
                    self.status = now;
                    return self.tell(Turn::Lost(why.clone()));
                }
                StreamState::Unsupported => return self.tell(Turn::None),
                StreamState::Open { .. } | StreamState::Off => {}
            }
        }
        let deaf = untold.is_some_and(|at| now >= at + TOLD_WITHIN);
        if deaf != self.deaf {
            self.deaf = deaf;
            self.net = RELIST_PERIOD;
            self.relist = self.relist.min(now + RELIST_PERIOD);
            if deaf {
                return self.tell(Turn::Deaf);
            }
        }
        None
    }

    /// What is new to the log. The same end again and again is not.
    fn tell(&mut self, turn: Turn) -> Option<Turn> {
        let same = match (&self.told, &turn) {
            (Some(Turn::Lost(_)), Turn::Lost(_)) => true,
            (told, turn) => told.as_ref() == Some(turn),
        };
        if same {
            return None;
        }
        self.told = Some(turn.clone());
        Some(turn)
    }

    pub(super) fn is_relist_due(&self, now: Instant) -> bool {
        now >= self.relist
    }

    /// A full list was made from `begun` to `now`. `missed`: it found what no event had told.
    pub(super) fn relisted(&mut self, begun: Instant, missed: bool, now: Instant) -> Option<Turn> {
        let was_due = self.is_relist_due(begun);
        self.listed = Some(now);
        let mut turn = None;
        if missed || !self.is_streaming() {
            self.net = RELIST_PERIOD;
        } else if was_due {
            // The list that followed the subscription proves nothing yet.
            if let StreamState::Open { since } = self.stream
                && begun.saturating_duration_since(since) >= self.net
            {
                self.net = (self.net * 2).min(SAFETY_PERIOD);
                turn = self.tell(Turn::Trusted);
            }
        }
        self.relist = now + self.period();
        turn
    }

    /// A list or an inspection failed: the next list is due in a second.
    pub(super) fn failed(&mut self, now: Instant) {
        self.relist = self.relist.min(now + RELIST_PERIOD).max(now);
    }

    /// A list could not be made at all.
    pub(super) fn list_failed(&mut self, now: Instant) {
        self.relist = now + RELIST_PERIOD;
        // An outage is over the moment a status answer says so.
        self.status = now;
    }

    /// News came that cannot be ascribed: a full list is due, but not more than one a second.
    pub(super) fn list_soon(&mut self, now: Instant) {
        let earliest = self.listed.map_or(now, |at| at + RELIST_PERIOD);
        self.relist = self.relist.min(earliest.max(now));
    }

    pub(super) fn is_status_due(&self, now: Instant) -> bool {
        now >= self.status
    }

    /// The runtime was asked for its status. `well`: it and its network are ready.
    pub(super) fn asked_status(&mut self, well: bool, now: Instant) {
        let calm = well && self.is_streaming();
        self.status = now + if calm { CALM_STATUS_PERIOD } else { STATUS_PERIOD };
    }

    /// When something is due next.
    pub(super) fn next(&self, untold: Option<Instant>) -> Instant {
        let due = self.relist.min(self.status);
        match untold {
            Some(at) if !self.deaf => due.min(at + TOLD_WITHIN),
            _ => due,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bench {
        start: Instant,
        pace: Pace,
    }

    impl Bench {
        fn new() -> Self {
            let start = Instant::now();
            Bench { start, pace: Pace::new(start) }
        }

        fn at(&self, seconds: u64) -> Instant {
            self.start + Duration::from_secs(seconds)
        }

        fn open(&mut self, second: u64) -> Option<Turn> {
            let now = self.at(second);
            self.pace.heard(&StreamState::Open { since: now }, None, now)
        }

        /// The seconds at which lists are due from now on, if each takes no time.
        fn lists(&mut self, count: usize) -> Vec<u64> {
            (0..count)
                .map(|_| {
                    let due = self.pace.relist;
                    self.pace.relisted(due, false, due);
                    (due - self.start).as_secs()
                })
                .collect()
        }
    }

    #[test]
    fn without_a_stream_lists_are_made_every_second() {
        let mut bench = Bench::new();
        assert_eq!(bench.lists(3), [0, 1, 2]);
        let now = bench.at(3);
        assert_eq!(bench.pace.heard(&StreamState::Unsupported, None, now), Some(Turn::None));
        assert_eq!(bench.lists(3), [3, 4, 5]);
        assert!(!bench.pace.is_streaming());
    }

    #[test]
    fn trust_in_a_stream_grows_until_a_change_is_missed() {
        let mut bench = Bench::new();
        assert_eq!(bench.open(0), None);
        assert_eq!(bench.lists(9), [0, 1, 3, 7, 15, 31, 63, 123, 183]);
        let now = bench.at(243);
        bench.pace.relisted(now, true, now);
        assert_eq!(bench.lists(4), [244, 246, 250, 258]);
        // A list that was not due, because of a storm, adds no trust.
        let now = bench.at(259);
        let period = bench.pace.period();
        bench.pace.relisted(now, false, now);
        assert_eq!(bench.pace.period(), period);
    }

    #[test]
    fn a_break_and_an_opening_make_a_list_due_at_once() {
        let mut bench = Bench::new();
        bench.open(0);
        assert_eq!(bench.lists(5), [0, 1, 3, 7, 15]);
        let now = bench.at(20);
        let broken = StreamState::Broken { why: "gone".into() };
        assert_eq!(bench.pace.heard(&broken, None, now), Some(Turn::Lost("gone".into())));
        assert!(bench.pace.is_relist_due(now) && bench.pace.is_status_due(now));
        assert_eq!(bench.lists(3), [20, 21, 22]);
        bench.open(23);
        assert_eq!(bench.lists(4), [23, 24, 26, 30]);
        // The same failure again is no news, until the stream was good in between.
        let mut bench = Bench::new();
        let (one, two) = (bench.at(1), bench.at(3));
        assert!(bench.pace.heard(&broken, None, one).is_some());
        bench.open(2);
        assert_eq!(bench.pace.heard(&StreamState::Broken { why: "again".into() }, None, two), None);
        bench.open(4);
        let now = bench.at(4);
        assert_eq!(bench.pace.relisted(now, false, now), None);
        let now = bench.at(5);
        assert_eq!(bench.pace.relisted(now, false, now), Some(Turn::Trusted));
        let now = bench.at(6);
        assert!(bench.pace.heard(&broken, None, now).is_some());
    }

    #[test]
    fn an_open_stream_that_is_silent_is_not_trusted() {
        let mut bench = Bench::new();
        bench.open(0);
        bench.lists(6);
        let stream = bench.pace.stream.clone();
        let untold = Some(bench.at(40));
        let (soon, late) = (bench.at(41), bench.at(42));
        assert_eq!(bench.pace.next(untold), late.min(bench.pace.status));
        assert_eq!(bench.pace.heard(&stream, untold, soon), None);
        assert_eq!(bench.pace.heard(&stream, untold, late), Some(Turn::Deaf));
        assert_eq!(bench.lists(3), [43, 44, 45]);
        // It speaks again.
        let now = bench.at(46);
        assert_eq!(bench.pace.heard(&stream, None, now), None);
        assert!(bench.pace.is_streaming());
        assert_eq!(bench.lists(3), [46, 48, 52]);
    }

    #[test]
    fn failures_are_repeated_after_a_second_and_unknown_news_are_held_back() {
        let mut bench = Bench::new();
        bench.open(0);
        assert_eq!(bench.lists(6), [0, 1, 3, 7, 15, 31]);
        let now = bench.at(32);
        bench.pace.failed(now);
        assert_eq!(bench.lists(1), [33]);
        let now = bench.at(33);
        bench.pace.list_soon(now);
        assert_eq!(bench.lists(1), [34]);
        let now = bench.at(36);
        bench.pace.list_soon(now);
        assert!(bench.pace.is_relist_due(now));
    }

    #[test]
    fn the_status_is_asked_less_often_while_all_is_well() {
        let mut bench = Bench::new();
        let now = bench.at(0);
        bench.pace.asked_status(true, now);
        assert_eq!(bench.pace.status, bench.at(5));
        bench.open(0);
        bench.pace.asked_status(true, now);
        assert_eq!(bench.pace.status, bench.at(10));
        bench.pace.asked_status(false, now);
        assert_eq!(bench.pace.status, bench.at(5));
    }
}
