//! How many connections a client opens at the same time.
//!
//! Each request in progress needs a connection of its own, where upstream's HTTP/2 has one for all. A burst
//! of requests to a server that is too slow for as many TLS handshakes would let all of them time out, and
//! begin them again. Therefore each handshake that takes too long halves the number that is opened at the
//! same time. Other requests wait until a connection is idle, or until they may open one.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Instant;

use crossbeam_channel::{Sender, bounded, select};

use super::breaker::Breaker;
use crate::util::lock::LockExt;

/// Connections that are opened at the same time if handshakes do not take too long.
const MAX_LIMIT: usize = 16;

/// How opening a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opened {
    /// It is open.
    InTime,
    /// The handshake took too long.
    Late,
    /// Something else failed.
    Failed,
}

/// The connections that a client is opening.
#[derive(Debug)]
pub(super) struct Openings(Mutex<State>);

#[derive(Debug)]
struct State {
    limit: usize,
    present: usize,
    /// Counts those that were begun.
    begun: u64,
    /// Those up to this number began before the limit was halved the last time.
    halved: u64,
    /// Counts what a waiting request may wait for.
    changes: u64,
    waiting: VecDeque<Sender<()>>,
}

impl Default for Openings {
    fn default() -> Openings {
        let waiting = VecDeque::new();
        Openings(Mutex::new(State { limit: MAX_LIMIT, present: 0, begun: 0, halved: 0, changes: 0, waiting }))
    }
}

impl State {
    /// So many connections may be idle, and other ones may be opened: wakes as many requests.
    fn change(&mut self, idle: usize) {
        self.changes += 1;
        for _ in 0..idle + self.limit.saturating_sub(self.present) {
            let Some(next) = self.waiting.pop_front() else { return };
            let _ = next.try_send(());
        }
    }
}

impl Openings {
    /// Begins to open a connection; `None`: too many are being opened. An urgent request is not held back.
    pub(super) fn begin(&self, is_urgent: bool) -> Option<Opening<'_>> {
        let mut state = self.0.locked();
        if state.present >= state.limit && !is_urgent {
            return None;
        }
        state.present += 1;
        state.begun += 1;
        Some(Opening { openings: self, number: state.begun, outcome: Opened::Failed })
    }

    /// A request has ended, and its connection may be idle.
    pub(super) fn request_ended(&self) {
        self.0.locked().change(1);
    }

    /// For [`Openings::wait`], to be read before the attempt that was held back.
    pub(super) fn changes(&self) -> u64 {
        self.0.locked().changes
    }

    /// Waits for a change after `seen`, at most until `end`, or until the breaker is tripped.
    pub(super) fn wait(&self, seen: u64, end: Instant, breaker: &Breaker) {
        let (sender, changed) = bounded(1);
        {
            let mut state = self.0.locked();
            if state.changes != seen {
                return;
            }
            state.waiting.push_back(sender.clone());
        }
        select! {
            recv(changed) -> _ => {
                if !breaker.is_tripped() {
                    return;
                }
            }
            recv(breaker.token().signal()) -> _ => {}
            recv(breaker.stop_signal()) -> _ => {}
            default(end.saturating_duration_since(Instant::now())) => {}
        }
        let mut state = self.0.locked();
        let before = state.waiting.len();
        state.waiting.retain(|other| !other.same_channel(&sender));
        if state.waiting.len() == before {
            // The change came at this moment. It is for another request.
            state.change(1);
        }
    }

    #[cfg(test)]
    pub(super) fn set_limit(&self, limit: usize) {
        self.0.locked().limit = limit;
    }

    /// How many requests wait.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.0.locked().waiting.len()
    }
}

/// A connection that is being opened, until this is dropped.
pub(super) struct Opening<'a> {
    openings: &'a Openings,
    number: u64,
    outcome: Opened,
}

impl Opening<'_> {
    pub(super) fn end(mut self, outcome: Opened) {
        self.outcome = outcome;
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        let mut state = self.openings.0.locked();
        state.present = state.present.saturating_sub(1);
        match self.outcome {
            Opened::InTime => state.limit = (state.limit + 1).min(MAX_LIMIT),
            // Those that began before the limit was halved say nothing about the lower one.
            Opened::Late if self.number <= state.halved => {}
            Opened::Late => {
                state.limit = (state.limit / 2).max(1);
                state.halved = state.begun;
            }
            Opened::Failed => {}
        }
        state.change(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop::{self, StopToken};
    use crate::util::threads::{OnDeath, Running, Stack, spawn};
    use std::sync::Arc;
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(60);

    fn late() -> Instant {
        Instant::now() + LONG
    }

    /// How many can be opened now.
    fn room(openings: &Openings) -> usize {
        std::iter::from_fn(|| openings.begin(false)).collect::<Vec<_>>().len()
    }

    #[test]
    fn late_handshakes_halve_the_limit_and_good_ones_raise_it_by_one() {
        let openings = Openings::default();
        assert_eq!(room(&openings), MAX_LIMIT);
        for expected in [8, 4, 2, 1, 1] {
            openings.begin(false).unwrap().end(Opened::Late);
            assert_eq!(room(&openings), expected);
        }
        openings.begin(false).unwrap().end(Opened::Failed);
        assert_eq!(room(&openings), 1, "a refused connection says nothing about handshakes");
        for expected in 2..=MAX_LIMIT + 3 {
            openings.begin(false).unwrap().end(Opened::InTime);
            assert_eq!(room(&openings), expected.min(MAX_LIMIT));
        }
    }

    #[test]
    fn handshakes_that_were_late_together_halve_the_limit_once() {
        let openings = Openings::default();
        let together: Vec<_> = (0..MAX_LIMIT).map(|_| openings.begin(false).unwrap()).collect();
        for opening in together {
            opening.end(Opened::Late);
        }
        assert_eq!(room(&openings), MAX_LIMIT / 2);
    }

    #[test]
    fn urgent_requests_are_not_held_back() {
        let openings = Openings::default();
        openings.set_limit(1);
        let _first = openings.begin(false).unwrap();
        assert!(openings.begin(false).is_none());
        let _second = openings.begin(true).unwrap();
    }

    #[test]
    fn change_between_attempt_and_wait_is_not_missed() {
        let openings = Openings::default();
        openings.set_limit(1);
        for change in [
            |openings: &Openings| openings.request_ended(),
            |openings: &Openings| openings.begin(true).unwrap().end(Opened::Failed),
        ] {
            let seen = openings.changes();
            change(&openings);
            let begun = Instant::now();
            openings.wait(seen, late(), &Breaker::default());
            assert!(begun.elapsed() < LONG, "it was missed");
        }
    }

    fn wait_on_thread(openings: &Arc<Openings>, stop: StopToken) -> Running {
        let (openings, seen) = (Arc::clone(openings), openings.changes());
        spawn("t/wait", Stack::Small, OnDeath::Unsupervised, move |_| {
            openings.wait(seen, late(), &Breaker::default().with_stop(&stop));
        })
        .unwrap()
    }

    fn wait_for_number(openings: &Openings, number: usize) {
        let end = late();
        while openings.waiting() != number {
            assert!(Instant::now() < end, "{} wait", openings.waiting());
            let _ = StopToken::never().wait(Duration::from_millis(1));
        }
    }

    #[test]
    fn each_change_wakes_those_that_it_is_for_and_the_signal_ends_the_wait() {
        let openings = Arc::new(Openings::default());
        openings.set_limit(1);
        let opening = openings.begin(false).unwrap();
        let (source, stop) = stop::pair();
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let thread = wait_on_thread(&openings, stop.clone());
                wait_for_number(&openings, number + 1);
                thread
            })
            .collect();
        openings.begin(true).unwrap().end(Opened::Failed);
        assert_eq!(openings.waiting(), 4, "the limit is still reached");
        openings.request_ended();
        assert_eq!(openings.waiting(), 3, "there may be an idle connection");
        opening.end(Opened::Failed);
        assert_eq!(openings.waiting(), 2, "another one may be opened");
        openings.request_ended();
        assert_eq!(openings.waiting(), 0, "both");
        let thread = wait_on_thread(&openings, stop);
        wait_for_number(&openings, 1);
        drop(source);
        wait_for_number(&openings, 0);
        drop((thread, threads));
    }
}
