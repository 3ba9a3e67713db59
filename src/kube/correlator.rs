//! Which events are reported, and in which form (pure; Go: client-go's EventCorrelator).
//!
//! An event passes three stages. Many different messages of one kind become one event; a repeated
//! event increments its count; and each object has a budget of events. The stages store hashes
//! only: keys are only compared with each other.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};

use jiff::Timestamp;

use crate::model::event::{Event, EventType, Regarding};
use crate::model::reasons;

/// Entries per stage; the least recently used one is removed first.
pub(super) const CACHE: usize = 4096;
/// When this many different messages of one kind arrive, each within [`SIMILAR_SECONDS`] of the one
/// before, they are reported as one event.
const SIMILAR: usize = 10;
const SIMILAR_SECONDS: f64 = 600.0;
/// Events per object and type that may be reported without a pause.
const BURST: f64 = 25.0;
/// After the burst, one event is reported per this number of seconds.
const REFILL_SECONDS: f64 = 300.0;
/// The prefix of the message of a combined event.
const COMBINED: &str = "(combined from similar events): ";

/// A map that drops its least recently used entries.
struct Lru<V> {
    entries: HashMap<u64, (u64, V)>,
    order: BTreeMap<u64, u64>,
    clock: u64,
}

impl<V> Lru<V> {
    fn new() -> Self {
        Lru { entries: HashMap::new(), order: BTreeMap::new(), clock: 0 }
    }

    /// The entry of `key`, created by `fresh` if there is none; it becomes the newest.
    fn touch(&mut self, key: u64, fresh: impl FnOnce() -> V) -> &mut V {
        self.clock += 1;
        let clock = self.clock;
        if !self.entries.contains_key(&key)
            && self.entries.len() >= CACHE
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.entries.remove(&oldest);
        }
        let entry = self.entries.entry(key).or_insert_with(|| (clock, fresh()));
        self.order.remove(&entry.0);
        self.order.insert(clock, key);
        entry.0 = clock;
        &mut entry.1
    }
}

/// Different messages of one kind of event about one object.
struct Group {
    messages: Vec<u64>,
    last: Timestamp,
}

struct History {
    count: u32,
    first: Timestamp,
}

/// The budget of one object.
struct Bucket {
    tokens: f64,
    filled: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Report {
    /// Identifies the event: equal keys are the same event.
    pub key: u64,
    /// The original message, or the combined one.
    pub message: String,
    /// The number of occurrences, including those that were not reported.
    pub count: u32,
    /// When it happened first.
    pub first: Timestamp,
}

/// The three stages.
pub(super) struct Correlator {
    hasher: RandomState,
    groups: Lru<Group>,
    seen: Lru<History>,
    budgets: Lru<Bucket>,
}

impl Correlator {
    pub(super) fn new() -> Self {
        Correlator { hasher: RandomState::new(), groups: Lru::new(), seen: Lru::new(), budgets: Lru::new() }
    }

    /// Counts an event and returns its report; `None`: its object has used up its budget.
    pub(super) fn take(&mut self, event: &Event) -> Option<Report> {
        if event.reason == reasons::EVENTS_DROPPED {
            // Its number is all that is left of other events, and it is rare.
            let key = (&event.regarding, event.reason, &event.message, event.time.as_nanosecond());
            let (key, message) = (self.hasher.hash_one(key), event.message.clone());
            return Some(Report { key, message, count: 1, first: event.time });
        }
        let object = Object::from_regarding(&event.regarding);
        let group = self.hasher.hash_one((&object, event.kind, event.reason));
        let (key, message) = match self.is_one_of_many(group, event) {
            // From here on it is a separate event, whatever its message is.
            true => (self.hasher.hash_one((group, COMBINED)), format!("{COMBINED}{}", event.message)),
            false => (
                self.hasher.hash_one((&event.regarding, event.kind, event.reason, &event.message)),
                event.message.clone(),
            ),
        };
        let seen = self.seen.touch(key, || History { count: 0, first: event.time });
        seen.count = seen.count.saturating_add(1);
        let (count, first) = (seen.count, seen.first);
        self.has_budget(&object, event.kind, event.time).then_some(Report { key, message, count, first })
    }

    /// Whether this message is reported as one of a combined event.
    fn is_one_of_many(&mut self, key: u64, event: &Event) -> bool {
        let message = self.hasher.hash_one(&event.message);
        let group = self.groups.touch(key, || Group { messages: Vec::new(), last: event.time });
        if seconds(group.last, event.time) > SIMILAR_SECONDS {
            group.messages.clear();
        }
        group.last = event.time;
        if !group.messages.contains(&message) {
            group.messages.push(message);
        }
        if group.messages.len() < SIMILAR {
            return false;
        }
        // The first message is removed, so that the next new one also joins the combined event.
        group.messages.remove(0);
        true
    }

    fn has_budget(&mut self, object: &Object<'_>, kind: EventType, now: Timestamp) -> bool {
        let key = self.hasher.hash_one((object, kind));
        let bucket = self.budgets.touch(key, || Bucket { tokens: BURST, filled: now });
        bucket.tokens = (bucket.tokens + seconds(bucket.filled, now) / REFILL_SECONDS).min(BURST);
        bucket.filled = now;
        let has = bucket.tokens >= 1.0;
        if has {
            bucket.tokens -= 1.0;
        }
        has
    }
}

/// An object as a whole; an event may be about a part of it.
#[derive(Hash)]
enum Object<'a> {
    Pod(&'a str, &'a str, &'a str),
    Node,
    Manifest(&'a str),
}

impl Object<'_> {
    fn from_regarding(regarding: &Regarding) -> Object<'_> {
        match regarding {
            Regarding::Pod { namespace, name, uid, .. } => Object::Pod(namespace, name, uid.as_str()),
            Regarding::Node => Object::Node,
            Regarding::Manifest { source } => Object::Manifest(source),
        }
    }
}

/// The time from `earlier` to `later`; zero if the clock was set back.
fn seconds(earlier: Timestamp, later: Timestamp) -> f64 {
    later.duration_since(earlier).as_secs_f64().max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ids::PodUid;

    fn event(kind: EventType, reason: &'static str, message: &str, second: i64) -> Event {
        Event {
            time: Timestamp::from_second(1_700_000_000 + second).unwrap(),
            regarding: Regarding::Pod {
                namespace: "default".into(),
                name: "web".into(),
                uid: PodUid::from("u1"),
                field_path: String::new(),
            },
            kind,
            reason,
            message: message.into(),
            annotations: std::collections::BTreeMap::new(),
        }
    }

    fn warning(message: &str, second: i64) -> Event {
        event(EventType::Warning, "Failed", message, second)
    }

    #[test]
    fn the_tenth_different_message_becomes_a_combined_event() {
        let mut correlator = Correlator::new();
        for number in 0..9 {
            let reported = correlator.take(&warning(&format!("m{number}"), number)).unwrap();
            assert_eq!((reported.message, reported.count), (format!("m{number}"), 1));
        }
        let tenth = correlator.take(&warning("m9", 9)).unwrap();
        assert_eq!((tenth.message.as_str(), tenth.count), ("(combined from similar events): m9", 1));
        let next = correlator.take(&warning("m10", 10)).unwrap();
        assert_eq!((next.message.as_str(), next.count), ("(combined from similar events): m10", 2));
        assert_eq!((next.key, next.first), (tenth.key, tenth.first));
        // A message that is still stored remains a separate event.
        let old = correlator.take(&warning("m8", 11)).unwrap();
        assert_eq!((old.message.as_str(), old.count), ("m8", 2));
        // Another reason is another group.
        assert_eq!(correlator.take(&event(EventType::Warning, "BackOff", "x", 12)).unwrap().message, "x");
    }

    #[test]
    fn a_pause_of_ten_minutes_ends_the_combining() {
        let mut correlator = Correlator::new();
        for number in 0..9 {
            correlator.take(&warning(&format!("m{number}"), number));
        }
        assert_eq!(correlator.take(&warning("m9", 8 + 601)).unwrap().message, "m9");
        let mut correlator = Correlator::new();
        for number in 0..9 {
            correlator.take(&warning(&format!("m{number}"), number * 600));
        }
        assert!(correlator.take(&warning("m9", 9 * 600)).unwrap().message.starts_with("(combined"));
    }

    #[test]
    fn the_budget_is_25_per_type_and_one_in_five_minutes() {
        let mut correlator = Correlator::new();
        for number in 0..25 {
            assert!(correlator.take(&warning("same", 0)).is_some(), "{number}");
        }
        assert_eq!(correlator.take(&warning("same", 1)), None);
        // The other type of the same pod has its own budget; another reason does not.
        assert!(correlator.take(&event(EventType::Normal, "Pulled", "x", 1)).is_some());
        assert_eq!(correlator.take(&event(EventType::Warning, "BackOff", "x", 2)), None);
        // Events that were not reported were counted.
        let reported = correlator.take(&warning("same", 301)).unwrap();
        assert_eq!((reported.count, reported.first.as_second()), (27, 1_700_000_000));
        assert_eq!(correlator.take(&warning("same", 302)), None);
    }

    #[test]
    fn parts_of_a_pod_are_different_events_of_one_budget() {
        let mut correlator = Correlator::new();
        let part = |name: &str| Event {
            regarding: Regarding::Pod {
                namespace: "default".into(),
                name: "web".into(),
                uid: PodUid::from("u1"),
                field_path: format!("spec.containers{{{name}}}"),
            },
            ..warning("same", 0)
        };
        assert_ne!(correlator.take(&part("a")).unwrap().key, correlator.take(&part("b")).unwrap().key);
        for _ in 2..25 {
            assert!(correlator.take(&part("a")).is_some());
        }
        assert_eq!(correlator.take(&part("b")), None);
    }

    #[test]
    fn each_summary_of_dropped_events_is_reported_without_a_budget() {
        let mut correlator = Correlator::new();
        for number in 0..40 {
            let message = format!("{number} events");
            let summary = event(EventType::Warning, reasons::EVENTS_DROPPED, &message, number);
            let reported = correlator.take(&summary).unwrap();
            assert_eq!((reported.message, reported.count), (message, 1));
        }
        assert!(correlator.take(&warning("same", 40)).is_some(), "the budget is that of other events");
    }

    #[test]
    fn number_of_remembered_events_is_limited() {
        let mut lru = Lru::new();
        for key in 0..(CACHE as u64 + 10) {
            lru.touch(key, || key);
            lru.touch(0, || u64::MAX);
        }
        assert_eq!((lru.entries.len(), lru.order.len()), (CACHE, CACHE));
        assert_eq!(*lru.touch(0, || 1), 0, "a used entry stays");
        assert_eq!(*lru.touch(1, || 99), 99, "the oldest was removed");
    }
}
