//! What is wrong with stored objects, for the report and the log (pure).

use std::collections::BTreeMap;

use super::key::Key;

/// The most problems that a report names.
const MAX_SHOWN: usize = 16;
/// The most objects whose problems are remembered. More are only counted.
const MAX_OBJECTS: usize = 64;

/// The current problems. No text has a part of a body.
#[derive(Debug, Default)]
pub(super) struct Problems {
    /// Of no single object.
    general: Vec<String>,
    objects: BTreeMap<Key, String>,
    failures: u64,
}

impl Problems {
    /// Adds one that is no single object's. It stays.
    pub(super) fn add(&mut self, text: String) {
        if self.general.len() < MAX_SHOWN {
            self.general.push(text);
        }
    }

    /// Sets that of an object. Returns the number of failures since the start if it is to be logged: a
    /// full disk must not fill the log.
    pub(super) fn set(&mut self, key: &Key, text: &str) -> Option<u64> {
        if self.objects.len() < MAX_OBJECTS || self.objects.contains_key(key) {
            self.objects.insert(key.clone(), format!("{} {}: {text}", key.kind.word(), key.name));
        }
        self.failures = self.failures.saturating_add(1);
        self.failures.is_power_of_two().then_some(self.failures)
    }

    /// The object is stored, or not needed any more. Returns whether it had a problem.
    pub(super) fn clear(&mut self, key: &Key) -> bool {
        self.objects.remove(key).is_some()
    }

    /// Forgets those of objects that no pod needs. Returns whether there were some.
    pub(super) fn forget(&mut self, is_needed: impl Fn(&Key) -> bool) -> bool {
        let before = self.objects.len();
        self.objects.retain(|key, _| is_needed(key));
        self.objects.len() < before
    }

    /// The texts for a report.
    pub(super) fn texts(&self) -> Vec<String> {
        let mut texts: Vec<String> =
            self.general.iter().chain(self.objects.values()).take(MAX_SHOWN).cloned().collect();
        let more = (self.general.len() + self.objects.len()).saturating_sub(MAX_SHOWN);
        if let (1.., Some(last)) = (more, texts.last_mut()) {
            *last = format!("{last}; and {more} more");
        }
        texts
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::Kind;
    use super::*;

    #[test]
    fn problems_are_bounded_and_go_with_their_cause() {
        let mut problems = Problems::default();
        problems.add("no key".to_owned());
        let key = |number: usize| Key::new(Kind::ConfigMap, &format!("n/{number:03}"));
        let logged = (0..100).filter(|number| problems.set(&key(*number), "disk full").is_some()).count();
        assert_eq!(logged, 7);
        let texts = problems.texts();
        assert_eq!((texts.len(), texts[0].as_str()), (16, "no key"));
        assert_eq!(texts[15], "configmap n/014: disk full; and 49 more");
        assert!((1..MAX_OBJECTS).all(|number| problems.clear(&key(number))) && !problems.clear(&key(1)));
        assert!(!problems.forget(|_| true) && problems.forget(|key| key.name != "n/000"));
        assert_eq!(problems.texts(), ["no key"]);
    }
}
