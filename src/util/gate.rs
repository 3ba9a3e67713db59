//! Keeps the users of a thing out while it is replaced: the things have names.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::util::lock::LockExt;
use crate::util::stop::{StopToken, Waited};
use crate::util::threads;

/// How often a wait looks again. Waits are rare: just this thing is being replaced.
const PAUSE: Duration = Duration::from_millis(100);

/// A gate for each name. It is open unless it was closed.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    passes: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    names: Vec<String>,
    closes: bool,
}

/// The use of a thing, or the closing of its gate, until it is dropped.
#[derive(Debug)]
pub struct Pass<'a> {
    gate: &'a Gate,
    number: u64,
}

impl State {
    /// Whether a user (or with `closes`, one who closes) has one of these names.
    fn has(&self, names: &[&str], closes: bool) -> bool {
        let mut others = self.passes.values().filter(|pass| pass.closes == closes);
        others.any(|pass| pass.names.iter().any(|name| names.contains(&name.as_str())))
    }
}

impl Gate {
    /// Waits while the gate of one of these names is closed. `None`: `stop` ended the wait.
    #[must_use]
    pub fn enter(&self, names: &[&str], stop: &StopToken) -> Option<Pass<'_>> {
        let mut waiting = None;
        loop {
            let state = self.state();
            if !state.has(names, true) {
                return Some(self.pass(state, names, false));
            }
            drop(state);
            waiting.get_or_insert_with(|| threads::waiting("a closed gate"));
            if stop.wait(PAUSE) == Waited::Stopped {
                return None;
            }
        }
    }

    /// Closes the gates of these names, which are those of one thing, and waits until its users have
    /// left. It does not keep out others that close the same gates. `None`: some users did not leave
    /// within `limit`, or `stop` ended the wait; then the gates are open again.
    #[must_use]
    pub fn close(&self, names: &[&str], limit: Duration, stop: &StopToken) -> Option<Pass<'_>> {
        let begun = Instant::now();
        let closed = self.pass(self.state(), names, true);
        while self.state().has(names, false) {
            if begun.elapsed() >= limit || stop.wait(PAUSE) == Waited::Stopped {
                return None;
            }
        }
        Some(closed)
    }

    fn pass(&self, mut state: MutexGuard<'_, State>, names: &[&str], closes: bool) -> Pass<'_> {
        let number = state.next;
        state.next += 1;
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        state.passes.insert(number, Entry { names, closes });
        Pass { gate: self, number }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.state().passes.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop;

    #[test]
    fn closed_gate_keeps_users_of_its_names_out_until_it_opens() {
        let (gate, never) = (Gate::default(), StopToken::never());
        let closed = gate.close(&["a", "b"], Duration::ZERO, &never).expect("there is no user");
        assert!(gate.enter(&["c"], &never).is_some());
        let (source, stopped) = stop::pair();
        drop(source);
        assert!(gate.enter(&["a"], &stopped).is_none());
        assert!(gate.enter(&["c", "b"], &stopped).is_none());
        drop(closed);
        assert!(gate.enter(&["a"], &stopped).is_some());
    }

    #[test]
    fn gate_is_closed_when_its_users_have_left_and_opens_if_they_do_not() {
        let (gate, never) = (Gate::default(), StopToken::never());
        let (first, second) = (gate.enter(&["a", "c"], &never), gate.enter(&["a"], &never));
        assert!(gate.close(&["b"], Duration::ZERO, &never).is_some());
        assert!(gate.close(&["b", "a"], Duration::ZERO, &never).is_none());
        let third = gate.enter(&["a"], &never);
        assert!(third.is_some(), "the gate is open again");
        drop((first, third));
        assert!(gate.close(&["a"], 2 * PAUSE, &never).is_none());
        drop(second);
        assert!(gate.close(&["a"], Duration::ZERO, &never).is_some());
    }
}
