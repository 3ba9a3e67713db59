//! Which file is written next, and when (pure).
//!
//! Each write costs two syncs, and wears out a card. So a file that was written waits for its next write;
//! the newest body counts. Failed writes are repeated with growing pauses.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::key::{Key, Kind};
use crate::util::secret::Secret;

/// The time between two writes of a file.
const PACE: Duration = Duration::from_secs(10);
/// That of what must not be lost: that a pod ends or has ended.
const URGENT_PACE: Duration = Duration::from_secs(1);
/// That of services: with many of them some change always.
pub(super) const SERVICES_PACE: Duration = Duration::from_secs(60);
/// How long the removal of an object that pods use waits: the lists of a server that has lost its data arrive
/// in any order, each after the pause of its watch (30 s, and jitter), and that of the pods decides.
pub(super) const REMOVAL_WAIT: Duration = Duration::from_secs(120);
/// The wait after the first failed write; it doubles with each further one.
const RETRY: Duration = Duration::from_secs(10);
const RETRY_MAX: Duration = Duration::from_secs(320);
/// After this number of failed writes, in about 16 minutes, nothing waits for the file of a pod.
const HOPELESS_FAILURES: u32 = 8;
/// The most bytes of bodies that wait after a failed write, but for those of pods, the Node object and the UID
/// of the cluster.
const MAX_RETRY_BYTES: usize = 4 * 1024 * 1024;
/// The most of these bodies: one pod may name thousands of objects that do not fit, and each attempt costs
/// time.
const MAX_RETRIES: usize = 256;
/// Times of writes are forgotten when there are more than this.
const MIN_WRITTEN: usize = 256;

/// What has to happen to the file of an object.
#[derive(Debug, Clone)]
pub(super) enum Change {
    /// It gets this body, unless it has it.
    Body(Secret<Vec<u8>>),
    /// The same, soon.
    Urgent(Secret<Vec<u8>>),
    /// It goes.
    Gone,
}

impl Change {
    fn bytes(&self) -> usize {
        match self {
            Change::Body(body) | Change::Urgent(body) => body.reveal().len(),
            Change::Gone => 0,
        }
    }
}

#[derive(Debug)]
struct Waiting {
    change: Change,
    due: Instant,
    failures: u32,
}

/// A change to carry out now.
#[derive(Debug)]
pub(super) struct Due {
    pub(super) key: Key,
    pub(super) change: Change,
    failures: u32,
}

/// The changes that wait.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: BTreeMap<Key, Waiting>,
    written: BTreeMap<Key, Instant>,
}

impl Queue {
    /// Adds a change; it replaces an older one of the object.
    pub(super) fn offer(&mut self, key: Key, change: Change, now: Instant) {
        let former = self.waiting.get(&key);
        let failures = former.map_or(0, |former| former.failures);
        let retry = former.filter(|former| former.failures > 0).map_or(now, |former| former.due);
        let pace = match (&change, key.kind) {
            (Change::Urgent(_), _) => URGENT_PACE,
            (_, Kind::Services) => SERVICES_PACE,
            _ => PACE,
        };
        let due = match &change {
            Change::Gone if is_of_pod(key.kind) => now,
            // Each new pod that names an object that is gone repeats this: that must not extend the wait.
            Change::Gone => former
                .filter(|former| matches!(former.change, Change::Gone))
                .map_or_else(|| later(now, REMOVAL_WAIT), |former| former.due),
            Change::Body(_) | Change::Urgent(_) => {
                self.written.get(&key).map_or(now, |written| later(*written, pace)).max(now).max(retry)
            }
        };
        self.waiting.insert(key, Waiting { change, due, failures });
    }

    /// Removes an object that no pod needs, without a wait.
    pub(super) fn collect(&mut self, key: Key, now: Instant) {
        self.waiting.insert(key, Waiting { change: Change::Gone, due: now, failures: 0 });
    }

    /// Forgets bodies that wait, of objects that no pod needs.
    pub(super) fn forget(&mut self, is_needed: impl Fn(&Key) -> bool) {
        self.waiting.retain(|key, waiting| matches!(waiting.change, Change::Gone) || is_needed(key));
    }

    /// Takes the first change that is due. `absence_counts`: objects that pods use may be removed.
    pub(super) fn next(&mut self, now: Instant, absence_counts: bool) -> Option<Due> {
        let is_due = |(key, waiting): &(&Key, &Waiting)| {
            waiting.due <= now && (absence_counts || !is_conditional(key, waiting))
        };
        let order = |(key, waiting): &(&Key, &Waiting)| rank(key.kind, &waiting.change);
        // Keys are in order, and of equal ones the first counts.
        let key = self.waiting.iter().filter(is_due).min_by_key(order)?.0.clone();
        let Waiting { change, failures, .. } = self.waiting.remove(&key)?;
        Some(Due { key, change, failures })
    }

    /// When [`Queue::next`] has something.
    pub(super) fn due(&self, absence_counts: bool) -> Option<Instant> {
        let counts = |(key, waiting): &(&Key, &Waiting)| absence_counts || !is_conditional(key, waiting);
        self.waiting.iter().filter(counts).map(|(_, waiting)| waiting.due).min()
    }

    /// The file was written.
    pub(super) fn wrote(&mut self, key: Key, now: Instant) {
        self.written.insert(key, now);
        if self.written.len() > MIN_WRITTEN {
            self.written.retain(|_, written| later(*written, SERVICES_PACE) > now);
        }
    }

    /// The change failed and is tried again, unless a newer one waits. Returns `false` if it is given up,
    /// because too many bytes or objects wait already.
    pub(super) fn failed(&mut self, due: Due, now: Instant) -> bool {
        let Due { key, change, failures } = due;
        if self.waiting.contains_key(&key) {
            return true;
        }
        let is_limited = |key: &Key| !is_of_pod(key.kind) && !matches!(key.kind, Kind::Node | Kind::Cluster);
        if is_limited(&key) {
            let failed = self.waiting.iter().filter(|(key, waiting)| waiting.failures > 0 && is_limited(key));
            let (number, bytes) = failed.fold((0, 0_usize), |(number, bytes), (_, waiting)| {
                (number + 1, bytes.saturating_add(waiting.change.bytes()))
            });
            if number >= MAX_RETRIES || bytes.saturating_add(change.bytes()) > MAX_RETRY_BYTES {
                return false;
            }
        }
        let wait = RETRY.saturating_mul(1 << failures.min(8)).min(RETRY_MAX);
        let failures = failures.saturating_add(1);
        self.waiting.insert(key, Waiting { change, due: later(now, wait), failures });
        true
    }

    /// Whether the first body of a pod waits that may be written soon. One that never fits must not keep the
    /// Node object from the disk, without which no other pod starts; nor may one that changes again and again.
    pub(super) fn has_new_pods(&self, is_stored: impl Fn(&Key) -> bool) -> bool {
        self.waiting.iter().any(|(key, waiting)| {
            key.kind == Kind::Pod
                && !matches!(waiting.change, Change::Gone)
                && waiting.failures < HOPELESS_FAILURES
                && !is_stored(key)
        })
    }

    /// The body of an object that waits.
    pub(super) fn body(&self, key: &Key) -> Option<Secret<Vec<u8>>> {
        match &self.waiting.get(key)?.change {
            Change::Body(body) | Change::Urgent(body) => Some(body.clone()),
            Change::Gone => None,
        }
    }

    /// Whether a change of this object waits.
    pub(super) fn has(&self, key: &Key) -> bool {
        self.waiting.contains_key(key)
    }

    /// The API server's set counts again: what its watches have found to be gone may be there in the lists
    /// that follow.
    pub(super) fn postpone_removals(&mut self, now: Instant) {
        for (key, waiting) in &mut self.waiting {
            if is_conditional(key, waiting) {
                waiting.due = later(now, REMOVAL_WAIT);
            }
        }
    }

    /// The agent stops: what waits is due, but for the removal of objects that pods use.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.waiting.retain(|key, waiting| !is_conditional(key, waiting));
        self.waiting.values_mut().for_each(|waiting| waiting.due = now);
    }

    /// Forgets what waits for an object.
    pub(super) fn remove(&mut self, key: &Key) {
        self.waiting.remove(key);
    }

    /// Forgets all that waits, and the times of writes.
    pub(super) fn clear(&mut self) {
        *self = Queue::default();
    }

    /// The number of changes that wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}

/// Whether an object of this kind goes with its pod.
fn is_of_pod(kind: Kind) -> bool {
    matches!(kind, Kind::Pod | Kind::PodStatus | Kind::Token | Kind::PodCertificate)
}

/// Whether it is the removal of an object that pods may use.
fn is_conditional(key: &Key, waiting: &Waiting) -> bool {
    matches!(waiting.change, Change::Gone) && !is_of_pod(key.kind)
}

/// The order of changes: after a power cut between two of them, no pod that has ended is without its status.
fn rank(kind: Kind, change: &Change) -> u8 {
    match (kind, change) {
        (Kind::Pod, Change::Gone) => 0,
        (Kind::PodStatus, Change::Body(_) | Change::Urgent(_)) => 1,
        (Kind::Pod, _) => 2,
        (Kind::Node, _) => 3,
        (_, Change::Body(_) | Change::Urgent(_)) => 4,
        (_, Change::Gone) => 5,
    }
}

fn later(time: Instant, wait: Duration) -> Instant {
    time.checked_add(wait).unwrap_or(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Change {
        Change::Body(Secret::new(text.as_bytes().to_vec()))
    }

    fn key(kind: Kind, name: &str) -> Key {
        Key::new(kind, name)
    }

    /// The kind, the name and the length of what is due.
    fn next(queue: &mut Queue, now: Instant) -> Option<(Kind, String, usize)> {
        let due = queue.next(now, true)?;
        Some((due.key.kind, due.key.name.clone(), due.change.bytes()))
    }

    fn after(now: Instant, seconds: u64) -> Instant {
        now + Duration::from_secs(seconds)
    }

    #[test]
    fn file_that_was_written_waits_and_the_newest_body_counts() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let map = key(Kind::ConfigMap, "n/a");
        queue.offer(map.clone(), body("1"), now);
        assert_eq!(queue.due(true), Some(now), "the first write is at once");
        assert!(next(&mut queue, now).is_some());
        queue.wrote(map.clone(), now);
        queue.offer(map.clone(), body("12"), after(now, 1));
        queue.offer(map.clone(), body("123"), after(now, 9));
        assert_eq!((next(&mut queue, after(now, 9)), queue.due(true)), (None, Some(after(now, 10))));
        assert_eq!(next(&mut queue, after(now, 10)).unwrap().2, 3);
        assert_eq!((queue.due(true), queue.len()), (None, 0));
        let services = key(Kind::Services, "n");
        queue.wrote(services.clone(), now);
        queue.offer(services, body("1"), now);
        assert_eq!(queue.due(true), Some(after(now, 60)));
        let status = key(Kind::PodStatus, "u");
        queue.wrote(status.clone(), now);
        queue.offer(status, Change::Urgent(Secret::new(Vec::new())), now);
        assert_eq!(queue.due(true), Some(after(now, 1)));
    }

    #[test]
    fn status_of_an_ended_pod_is_there_as_long_as_the_pod() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for kind in [Kind::Node, Kind::Pod, Kind::PodStatus, Kind::Secret] {
            queue.offer(key(kind, "new"), body("1"), now);
        }
        for kind in [Kind::PodStatus, Kind::Pod, Kind::Token, Kind::PodCertificate] {
            queue.offer(key(kind, "old"), Change::Gone, now);
        }
        let order: Vec<_> = std::iter::from_fn(|| next(&mut queue, now)).collect();
        let order: Vec<_> = order.iter().map(|(kind, name, _)| (*kind, name.as_str())).collect();
        assert_eq!(
            order,
            [
                (Kind::Pod, "old"),
                (Kind::PodStatus, "new"),
                (Kind::Pod, "new"),
                (Kind::Node, "new"),
                (Kind::Secret, "new"),
                (Kind::PodStatus, "old"),
                (Kind::Token, "old"),
                (Kind::PodCertificate, "old"),
            ]
        );
    }

    #[test]
    fn object_that_pods_use_is_removed_late_and_only_while_absence_counts() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let map = key(Kind::ConfigMap, "n/a");
        queue.offer(map.clone(), Change::Gone, now);
        assert!(next(&mut queue, now).is_none());
        let time = now + REMOVAL_WAIT;
        assert!(queue.next(time, false).is_none() && queue.due(false).is_none(), "a set is held");
        queue.postpone_removals(time);
        assert!(next(&mut queue, time).is_none());
        // It is there in the list that follows.
        queue.offer(map.clone(), body("1"), time);
        assert_eq!(next(&mut queue, time).unwrap().2, 1);
        queue.offer(map.clone(), Change::Gone, time);
        assert!(next(&mut queue, time + REMOVAL_WAIT).is_some());
        queue.collect(map.clone(), time);
        assert!(next(&mut queue, time).is_some(), "no pod needs it");
        queue.offer(map.clone(), Change::Gone, time);
        queue.offer(key(Kind::Pod, "u"), Change::Gone, time);
        queue.hurry(time);
        assert!(!queue.has(&map) && queue.next(time, false).is_some(), "the agent stops");
    }

    #[test]
    fn repeated_removal_does_not_extend_its_wait() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let map = key(Kind::ConfigMap, "n/a");
        queue.offer(map.clone(), Change::Gone, now);
        queue.offer(map.clone(), Change::Gone, now + REMOVAL_WAIT / 2);
        assert!(next(&mut queue, now + REMOVAL_WAIT).is_some());
        // The object was there meanwhile.
        queue.offer(map.clone(), Change::Gone, now);
        queue.offer(map.clone(), body("1"), now);
        queue.offer(map, Change::Gone, now + REMOVAL_WAIT / 2);
        assert!(next(&mut queue, now + REMOVAL_WAIT).is_none());
    }

    #[test]
    fn failed_writes_are_repeated_with_growing_pauses_and_a_limit() {
        let (mut queue, mut time) = (Queue::default(), Instant::now());
        let pod = key(Kind::Pod, "u");
        queue.offer(pod.clone(), body("1"), time);
        for wait in [10, 20, 40, 80, 160, 320, 320] {
            let due = queue.next(time, true).unwrap();
            assert!(queue.failed(due, time) && queue.has_new_pods(|_| false));
            // A newer body does not come earlier.
            queue.offer(pod.clone(), body("12"), time);
            time = after(time, wait);
            assert_eq!(queue.due(true), Some(time));
        }
        let due = queue.next(time, true).unwrap();
        queue.offer(pod.clone(), Change::Gone, time);
        assert!(queue.failed(due, time));
        assert!(matches!(queue.next(time, true).unwrap().change, Change::Gone), "the newer change");

        let large = Change::Body(Secret::new(vec![0; MAX_RETRY_BYTES / 2 + 1]));
        let mut fails = |kind: Kind, name: &str| {
            queue.offer(key(kind, name), large.clone(), time);
            let due = queue.next(time, true).unwrap();
            queue.failed(due, time)
        };
        assert!(fails(Kind::Secret, "a") && !fails(Kind::Secret, "b") && fails(Kind::Pod, "c"));
    }

    #[test]
    fn pod_that_never_fits_holds_nothing_back() {
        let (mut queue, mut time) = (Queue::default(), Instant::now());
        queue.offer(key(Kind::Pod, "u"), body("1"), time);
        for failures in 1..=HOPELESS_FAILURES {
            assert!(queue.has_new_pods(|_| false), "{failures}");
            let due = queue.next(time, true).unwrap();
            queue.failed(due, time);
            time = queue.due(true).unwrap();
        }
        assert!(!queue.has_new_pods(|_| false) && queue.has(&key(Kind::Pod, "u")), "it is tried again");
        queue.offer(key(Kind::Pod, "v"), body("1"), time);
        assert!(queue.has_new_pods(|_| false));
    }

    #[test]
    fn number_of_failed_writes_that_are_repeated_is_limited_but_for_those_of_pods() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let mut fails = |kind: Kind, name: &str| {
            queue.offer(key(kind, name), body("1"), now);
            let due = queue.next(now, true).unwrap();
            queue.failed(due, now)
        };
        assert!((0..MAX_RETRIES).all(|number| fails(Kind::ConfigMap, &format!("n/{number}"))));
        assert!(!fails(Kind::ConfigMap, "n/one-more") && fails(Kind::Pod, "u"));
        assert!(fails(Kind::Cluster, ""), "it is queued once");
        assert_eq!(queue.len(), MAX_RETRIES + 2);
    }

    #[test]
    fn bodies_of_objects_without_a_pod_are_forgotten_and_times_too() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.offer(key(Kind::Secret, "a"), body("1"), now);
        queue.offer(key(Kind::Secret, "b"), body("1"), now);
        queue.offer(key(Kind::Secret, "c"), Change::Gone, now);
        queue.forget(|key| key.name == "a");
        assert_eq!(queue.len(), 2);
        for number in 0..=MIN_WRITTEN {
            queue.wrote(key(Kind::Pod, &number.to_string()), now);
        }
        assert_eq!(queue.written.len(), MIN_WRITTEN + 1);
        queue.wrote(key(Kind::Pod, "late"), now + SERVICES_PACE);
        assert_eq!(queue.written.len(), 1);
    }
}
