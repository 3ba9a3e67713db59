//! Keeps the users of a thing out while it is replaced: the things have names.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
    closed: Vec<String>,
    inside: Vec<String>,
}

/// A user of a thing, until it is dropped.
#[derive(Debug)]
pub struct Inside<'a> {
    gate: &'a Gate,
    name: String,
}

/// A gate that is closed, until it is dropped.
#[derive(Debug)]
pub struct Closed<'a> {
    gate: &'a Gate,
    name: String,
}

fn remove(list: &mut Vec<String>, name: &str) {
    if let Some(index) = list.iter().position(|one| one == name) {
        list.swap_remove(index);
    }
}

impl Gate {
    /// Waits while the gate of this name is closed. `None`: `stop` ended the wait.
    #[must_use]
    pub fn enter(&self, name: &str, stop: &StopToken) -> Option<Inside<'_>> {
        let mut waiting = None;
        loop {
            let mut state = self.state();
            if !state.closed.iter().any(|one| one == name) {
                state.inside.push(name.to_owned());
                return Some(Inside { gate: self, name: name.to_owned() });
            }
            drop(state);
            waiting.get_or_insert_with(|| threads::waiting("a closed gate"));
            if stop.wait(PAUSE) == Waited::Stopped {
                return None;
            }
        }
    }

    /// Closes the gate of this name, and waits until its users have left. `None`: some did not within
    /// `limit`, or `stop` ended the wait; then the gate is open again.
    #[must_use]
    pub fn close(&self, name: &str, limit: Duration, stop: &StopToken) -> Option<Closed<'_>> {
        let begun = Instant::now();
        self.state().closed.push(name.to_owned());
        let closed = Closed { gate: self, name: name.to_owned() };
        while self.state().inside.iter().any(|one| one == name) {
            if begun.elapsed() >= limit || stop.wait(PAUSE) == Waited::Stopped {
                return None;
            }
        }
        Some(closed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        remove(&mut self.gate.state().inside, &self.name);
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        remove(&mut self.gate.state().closed, &self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop;

    #[test]
    fn closed_gate_keeps_users_of_its_name_out_until_it_opens() {
        let (gate, never) = (Gate::default(), StopToken::never());
        let closed = gate.close("a", Duration::ZERO, &never).expect("there is no user");
        assert!(gate.enter("b", &never).is_some());
        let (source, stopped) = stop::pair();
        drop(source);
        assert!(gate.enter("a", &stopped).is_none());
        drop(closed);
        assert!(gate.enter("a", &stopped).is_some());
    }

    #[test]
    fn gate_is_closed_when_its_users_have_left_and_opens_if_they_do_not() {
        let (gate, never) = (Gate::default(), StopToken::never());
        let (one, other) = (gate.enter("a", &never), gate.enter("a", &never));
        assert!(gate.close("b", Duration::ZERO, &never).is_some());
        assert!(gate.close("a", Duration::ZERO, &never).is_none());
        let third = gate.enter("a", &never);
        assert!(third.is_some(), "the gate is open again");
        drop((one, third));
        assert!(gate.close("a", 2 * PAUSE, &never).is_none());
        drop(other);
        assert!(gate.close("a", Duration::ZERO, &never).is_some());
    }
}
