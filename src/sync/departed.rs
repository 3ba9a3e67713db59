//! Static pods that have ended and are no longer desired, until their mirrors have published the
//! last status (pure).

use std::time::{Duration, Instant};

use crate::model::ids::{FullName, PodUid};

/// How often to check whether the status was published.
const PERIOD: Duration = Duration::from_millis(50);
/// After this time the mirror is deleted without the status: the API server may be unreachable.
const LIMIT: Duration = Duration::from_secs(2);

/// The ended pods. Their mirrors are not deleted yet.
#[derive(Debug, Default)]
pub(super) struct Departed {
    pods: Vec<(PodUid, FullName, Instant)>,
}

impl Departed {
    pub(super) fn add(&mut self, uid: PodUid, name: FullName, now: Instant) {
        self.pods.push((uid, name, now + LIMIT));
    }

    /// Takes the pods whose status was published, and those that have waited for [`LIMIT`].
    pub(super) fn take_done(&mut self, is_published: &dyn Fn(&PodUid) -> bool, now: Instant) -> Vec<PodUid> {
        let done = |uid: &PodUid, until: Instant| now >= until || is_published(uid);
        self.pods.extract_if(.., |(uid, _, until)| done(uid, *until)).map(|(uid, ..)| uid).collect()
    }

    /// Takes the pods that are desired again under their UID: the stored status is that of their
    /// former incarnation, and must not become that of the next.
    pub(super) fn take_returned(&mut self, is_desired: &dyn Fn(&PodUid) -> bool) -> Vec<PodUid> {
        self.pods.extract_if(.., |(uid, ..)| is_desired(uid)).map(|(uid, ..)| uid).collect()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = FullName> {
        self.pods.iter().map(|(_, name, _)| name.clone())
    }

    /// When to call [`Departed::take_done`] again.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        (!self.pods.is_empty()).then(|| now + PERIOD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_stays_until_its_status_is_published_or_the_limit_has_passed() {
        let (now, mut departed) = (Instant::now(), Departed::default());
        assert_eq!(departed.due(now), None);
        departed.add("1".into(), FullName::new("a", "default"), now);
        departed.add("2".into(), FullName::new("b", "default"), now + Duration::from_secs(1));
        assert_eq!(departed.names().count(), 2);
        assert!(departed.take_done(&|_| false, now + PERIOD).is_empty());
        assert_eq!(departed.due(now), Some(now + PERIOD));
        assert_eq!(departed.take_done(&|uid| uid.as_str() == "2", now + PERIOD), [PodUid::from("2")]);
        assert_eq!(departed.take_done(&|_| false, now + LIMIT), [PodUid::from("1")]);
        assert_eq!((departed.due(now), departed.names().count()), (None, 0));
    }

    #[test]
    fn pod_that_is_desired_again_does_not_depart() {
        let (now, mut departed) = (Instant::now(), Departed::default());
        departed.add("1".into(), FullName::new("a", "default"), now);
        departed.add("2".into(), FullName::new("b", "default"), now);
        assert_eq!(departed.take_returned(&|uid| uid.as_str() == "1"), [PodUid::from("1")]);
        assert_eq!(departed.names().collect::<Vec<_>>(), [FullName::new("b", "default")]);
        assert_eq!(departed.take_done(&|_| true, now), [PodUid::from("2")]);
    }
}
