//! Turns of namespaces, so that none waits for many requests of another one.

use std::collections::HashMap;

/// The most namespaces whose last turn is known.
const MAX_NAMESPACES: usize = 4096;

/// When namespaces last had a turn, also those that wait for nothing now: one that comes again and again
/// would else be the first each time.
#[derive(Debug, Default)]
pub(super) struct Turns {
    last: HashMap<String, u64>,
    count: u64,
}

impl Turns {
    /// The number of the last turn of a namespace; the lowest is the next one. 0: it had none.
    pub(super) fn last(&self, namespace: &str) -> u64 {
        self.last.get(namespace).copied().unwrap_or(0)
    }

    /// This namespace has its turn now.
    pub(super) fn take(&mut self, namespace: &str) {
        self.count += 1;
        if self.last.len() >= MAX_NAMESPACES && !self.last.contains_key(namespace) {
            let oldest = self.last.iter().min_by_key(|(_, turn)| **turn).map(|(name, _)| name.clone());
            oldest.and_then(|name| self.last.remove(&name));
        }
        self.last.insert(namespace.to_owned(), self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_turns_are_limited_and_the_oldest_is_forgotten() {
        let mut turns = Turns::default();
        for n in 0..=MAX_NAMESPACES {
            turns.take(&n.to_string());
        }
        assert_eq!((turns.last.len(), turns.last("0"), turns.last("1")), (MAX_NAMESPACES, 0, 2));
        turns.take("1");
        assert!(turns.last("1") > turns.last("4096"));
    }
}
