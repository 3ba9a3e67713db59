//! New pods that do not fit the node's labels as they were last seen.
//!
//! A refusal is final, and the watch of pods may be ahead of that of the node: a label that
//! brought a pod here may not be known yet. So each waits for one look at the Node object that
//! begins after it was seen, for [`LIMIT`] at most.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::model::ids::PodUid;

/// How long a pod waits for a newer look at the Node object.
const LIMIT: Duration = Duration::from_secs(5);

/// The pods, and how far their looks are.
#[derive(Debug, Default)]
pub(super) struct Misplaced {
    pods: BTreeMap<PodUid, Wait>,
}

#[derive(Debug)]
struct Wait {
    until: Instant,
    look: Look,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    Wanted,
    UnderWay,
    Over,
}

impl Misplaced {
    /// These do not fit, and no others. How many have waited in vain until now.
    pub(super) fn set(&mut self, mut misplaced: Vec<PodUid>, now: Instant) -> usize {
        misplaced.sort_unstable();
        self.pods.retain(|uid, _| misplaced.binary_search(uid).is_ok());
        for uid in misplaced {
            self.pods.entry(uid).or_insert(Wait { until: now + LIMIT, look: Look::Wanted });
        }
        let late = self.pods.values_mut().filter(|wait| wait.look != Look::Over && wait.until <= now);
        late.map(|wait| wait.look = Look::Over).count()
    }

    /// Whether the pod may not be judged yet.
    pub(super) fn waits(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|wait| wait.look != Look::Over)
    }

    /// Begins a look, unless nobody wants one.
    pub(super) fn begin_look(&mut self) -> bool {
        let mut begun = false;
        for wait in self.pods.values_mut().filter(|wait| wait.look == Look::Wanted) {
            wait.look = Look::UnderWay;
            begun = true;
        }
        begun
    }

    /// The look has shown what it could, or has failed.
    pub(super) fn end_look(&mut self) {
        for wait in self.pods.values_mut().filter(|wait| wait.look == Look::UnderWay) {
            wait.look = Look::Over;
        }
    }

    /// When the first one has waited long enough.
    pub(super) fn due(&self) -> Option<Instant> {
        self.pods.values().filter(|wait| wait.look != Look::Over).map(|wait| wait.until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_waits_for_a_look_that_begins_after_it_came() {
        let (now, mut misplaced) = (Instant::now(), Misplaced::default());
        let (a, b) = (PodUid::from("a"), PodUid::from("b"));
        assert!(!misplaced.begin_look() && !misplaced.waits(&a));
        misplaced.set(vec![a.clone()], now);
        assert!(misplaced.waits(&a) && misplaced.begin_look() && !misplaced.begin_look());
        let later = now + Duration::from_secs(1);
        misplaced.set(vec![b.clone(), a.clone()], later);
        misplaced.end_look();
        assert!(!misplaced.waits(&a) && misplaced.waits(&b));
        assert_eq!(misplaced.due(), Some(later + LIMIT));
        assert!(misplaced.begin_look());
        misplaced.end_look();
        assert!(!misplaced.waits(&b) && misplaced.due().is_none());
        // Whoever is still there has had its look.
        misplaced.set(vec![a.clone(), b.clone()], later);
        assert!(!misplaced.begin_look());
    }

    #[test]
    fn nobody_waits_for_ever_and_one_that_fits_by_now_does_not() {
        let (now, mut misplaced) = (Instant::now(), Misplaced::default());
        let (a, b) = (PodUid::from("a"), PodUid::from("b"));
        misplaced.set(vec![a.clone(), b.clone()], now);
        assert!(misplaced.begin_look());
        // A set that comes meanwhile makes nobody wait longer.
        assert_eq!(misplaced.set(vec![a.clone()], now + Duration::from_secs(3)), 0);
        assert!(!misplaced.waits(&b) && misplaced.waits(&a));
        assert_eq!(misplaced.due(), Some(now + LIMIT));
        assert_eq!(misplaced.set(vec![a.clone()], now + LIMIT), 1);
        assert!(!misplaced.waits(&a) && misplaced.due().is_none());
    }
}
