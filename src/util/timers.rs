//! Due times by key. The owner waits until [`Deadlines::next`] instead of polling.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Instant;

use crossbeam_channel::Receiver;

/// A set of keys, each with at most one due time.
#[derive(Debug)]
pub struct Deadlines<K> {
    by_key: HashMap<K, Instant>,
    ordered: BTreeSet<(Instant, K)>,
}

impl<K> Default for Deadlines<K> {
    fn default() -> Self {
        Deadlines { by_key: HashMap::new(), ordered: BTreeSet::new() }
    }
}

impl<K: Eq + Hash + Ord + Clone> Deadlines<K> {
    /// Sets or moves the due time of `key`.
    pub fn set(&mut self, key: K, due: Instant) {
        self.clear(&key);
        self.ordered.insert((due, key.clone()));
        self.by_key.insert(key, due);
    }

    /// Sets the due time only if it is earlier than the current one.
    pub fn set_earlier(&mut self, key: K, due: Instant) {
        if self.by_key.get(&key).is_none_or(|old| due < *old) {
            self.set(key, due);
        }
    }

    /// Removes `key`.
    pub fn clear(&mut self, key: &K) {
        if let Some(due) = self.by_key.remove(key) {
            self.ordered.remove(&(due, key.clone()));
        }
    }

    /// The earliest due time.
    pub fn next(&self) -> Option<Instant> {
        self.ordered.first().map(|(due, _)| *due)
    }

    /// Removes and returns every key that is due at `now`, earliest first.
    pub fn take_due(&mut self, now: Instant) -> Vec<K> {
        let mut due = Vec::new();
        while self.ordered.first().is_some_and(|(deadline, _)| *deadline <= now) {
            if let Some((_, key)) = self.ordered.pop_first() {
                self.by_key.remove(&key);
                due.push(key);
            }
        }
        due
    }
}

/// A channel that fires at `due`, or never: the last arm of a `select`.
#[must_use]
pub fn deadline_channel(due: Option<Instant>) -> Receiver<Instant> {
    due.map_or_else(crossbeam_channel::never, crossbeam_channel::at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn timers_are_returned_in_order_of_due_time() {
        let start = Instant::now();
        let after = |s| start + Duration::from_secs(s);
        let mut timers = Deadlines::default();
        timers.set("late", after(9));
        timers.set("soon", after(1));
        timers.set("moved", after(2));
        timers.set("moved", after(3));
        timers.set_earlier("late", after(20));
        assert_eq!(timers.next(), Some(after(1)));
        assert_eq!(timers.take_due(after(3)), ["soon", "moved"]);
        timers.clear(&"late");
        assert_eq!(timers.next(), None);
    }
}
