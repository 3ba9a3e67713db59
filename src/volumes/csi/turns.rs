//! One operation per volume at a time. The next one waits, and ends its wait at the stop signal.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};

use crate::util::lock::LockExt;
use crate::util::stop::StopToken;

/// The channel holds one unit while no operation runs.
#[derive(Debug, Clone)]
struct Lane {
    give: Sender<()>,
    take: Receiver<()>,
    /// Operations that run or wait.
    users: usize,
}

/// The turns of all volumes, by name. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Turns {
    lanes: Arc<Mutex<HashMap<String, Lane>>>,
}

/// The right to operate on one volume; dropping it passes it on.
#[derive(Debug)]
pub(super) struct Turn {
    lanes: Arc<Mutex<HashMap<String, Lane>>>,
    name: String,
    is_held: bool,
}

impl Turns {
    /// The turn if no other operation on `name` runs or waits.
    pub(super) fn try_take(&self, name: &str) -> Option<Turn> {
        let mut lanes = self.lanes.locked();
        if lanes.contains_key(name) {
            return None;
        }
        // Its unit is with the turn.
        let (give, take) = bounded(1);
        lanes.insert(name.to_owned(), Lane { give, take, users: 1 });
        Some(Turn { lanes: Arc::clone(&self.lanes), name: name.to_owned(), is_held: true })
    }

    /// Waits until no other operation on `name` runs. `None` after the stop signal.
    pub(super) fn take(&self, name: &str, stop: &StopToken) -> Option<Turn> {
        let take = {
            let mut lanes = self.lanes.locked();
            let lane = lanes.entry(name.to_owned()).or_insert_with(|| {
                let (give, take) = bounded(1);
                // The channel is new and has room.
                let _ = give.try_send(());
                Lane { give, take, users: 0 }
            });
            lane.users += 1;
            lane.take.clone()
        };
        let mut turn = Turn { lanes: Arc::clone(&self.lanes), name: name.to_owned(), is_held: false };
        turn.is_held = select_biased! {
            recv(stop.signal()) -> _ => false,
            recv(take) -> unit => unit.is_ok(),
        };
        turn.is_held.then_some(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut lanes = self.lanes.locked();
        let Some(lane) = lanes.get_mut(&self.name) else { return };
        if self.is_held {
            // The channel is empty while the turn is held.
            let _ = lane.give.try_send(());
        }
        lane.users -= 1;
        if lane.users == 0 {
            lanes.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::stop;
    use crate::util::testing::beside;

    #[test]
    fn second_operation_waits_for_the_first_or_for_the_stop_signal() {
        let turns = Turns::default();
        let never = StopToken::never();
        let first = turns.take("v", &never).unwrap();
        assert!(turns.take("w", &never).is_some());
        let (source, token) = stop::pair();
        drop(source);
        assert!(turns.take("v", &token).is_none());
        let others = turns.clone();
        let (done, is_done) = bounded(1);
        let running = beside(move || {
            let _turn = others.take("v", &StopToken::never());
            done.send(()).unwrap();
        });
        assert!(is_done.try_recv().is_err());
        assert!(turns.try_take("v").is_none());
        let other = turns.try_take("x").unwrap();
        assert!(turns.try_take("x").is_none() && turns.take("x", &token).is_none());
        drop(other);
        assert!(turns.take("x", &never).is_some());
        drop(first);
        running.result();
        assert!(turns.lanes.lock().unwrap().is_empty());
    }
}
