//! Pods of the API server that wait for the Node object before they are admitted (pure).
//!
//! Admission depends on the labels and taints of the Node object, and a rejection is final. So no
//! pod is admitted before the object was received. The watch of pods may also be ahead of the
//! watch of the node: the label that brought a pod here may not have arrived yet. So a new pod that
//! does not match the node's labels waits until the object was read again, for [`LIMIT`] at most.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::model::ids::PodUid;
use crate::model::pod::Pod;
use crate::sources::SourceSet;

/// How long a pod waits for a read of the Node object.
const LIMIT: Duration = Duration::from_secs(5);

/// The knowledge about the Node object.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeState {
    /// Whether the object was received. Without an API server there is nothing to wait for.
    pub(super) is_known: bool,
    /// Whether the object can be read again.
    pub(super) can_read: bool,
}

impl NodeState {
    /// `is_ready`: the object was received, or the stored one counts. `has_reader`: it can be read.
    pub(super) fn for_set(set: &SourceSet, is_ready: bool, has_reader: bool) -> NodeState {
        // The API server is away, or has lost its data: pods that the stored Node object excludes wait in
        // the core. Without a stored object only pods are delivered that are to be stopped (`offline`).
        NodeState { is_known: is_ready || set.is_stored, can_read: has_reader && !set.is_stored }
    }
}

/// The decision about a set.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Decision {
    /// Admit these pods now. `None`: admit nothing yet, not even an empty set.
    pub(super) admit: Option<SourceSet>,
    /// Begin a read of the Node object; [`Deferred::read_ended`] is called at its end.
    pub(super) read_node: bool,
    /// The number of pods that waited for [`LIMIT`] without success.
    pub(super) timed_out: usize,
}

/// The newest set of the API server, if not all of it was admitted.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    set: Option<SourceSet>,
    /// The pods that do not match the node's labels.
    pods: BTreeMap<PodUid, Wait>,
    /// A read of the Node object is in progress.
    reading: bool,
}

#[derive(Debug)]
struct Wait {
    until: Instant,
    read: Read,
}

/// The read of the Node object that a pod waits for; it begins after the pod was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Read {
    Needed,
    InProgress,
    Done,
}

impl Deferred {
    /// Decides which pods of the newest set can be admitted. `is_first`: no set of the API server
    /// was admitted before, or only the stored one. Then the complete set waits, because pods that are
    /// missing in the first set are stopped.
    pub(super) fn offer(
        &mut self,
        mut set: SourceSet,
        node: NodeState,
        is_first: bool,
        is_misplaced: &dyn Fn(&Pod) -> bool,
        now: Instant,
    ) -> Decision {
        self.set = None;
        if !node.is_known {
            self.set = Some(set);
            return Decision::default();
        }
        if !node.can_read {
            // Those of a set before a stored one: their time would be over at each turn.
            self.pods.clear();
            return Decision { admit: Some(set), ..Decision::default() };
        }
        let misplaced = set.pods.iter().flatten().filter(|pod| is_misplaced(pod));
        let timed_out = self.update(misplaced.map(|pod| pod.uid().clone()).collect(), now);
        // One read at a time: at its end the set is offered again.
        let read_node = !self.reading && self.begin_read();
        let mut decision = Decision { admit: None, read_node, timed_out };
        if self.due().is_some() {
            self.set = Some(set.clone());
            if is_first {
                return decision;
            }
            set.pods.iter_mut().for_each(|pods| pods.retain(|pod| !self.waits(pod.uid())));
        }
        decision.admit = Some(set);
        decision
    }

    /// Whether a set waits, of which nothing or only a part was admitted.
    pub(super) fn has_set(&self) -> bool {
        self.set.is_some()
    }

    /// Takes the set that waits, to offer it again.
    pub(super) fn take(&mut self) -> Option<SourceSet> {
        self.set.take()
    }

    /// The read of the Node object has succeeded or failed.
    pub(super) fn read_ended(&mut self) {
        self.reading = false;
        for wait in self.pods.values_mut().filter(|wait| wait.read == Read::InProgress) {
            wait.read = Read::Done;
        }
    }

    /// When the first pod will have waited long enough.
    pub(super) fn due(&self) -> Option<Instant> {
        self.pods.values().filter(|wait| wait.read != Read::Done).map(|wait| wait.until).min()
    }

    /// Replaces the pods that do not match. Returns how many of them have just timed out.
    fn update(&mut self, mut misplaced: Vec<PodUid>, now: Instant) -> usize {
        misplaced.sort_unstable();
        self.pods.retain(|uid, _| misplaced.binary_search(uid).is_ok());
        for uid in misplaced {
            self.pods.entry(uid).or_insert(Wait { until: now + LIMIT, read: Read::Needed });
        }
        let late = self.pods.values_mut().filter(|wait| wait.read != Read::Done && wait.until <= now);
        late.map(|wait| wait.read = Read::Done).count()
    }

    fn waits(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|wait| wait.read != Read::Done)
    }

    /// `false`: no pod needs a read.
    fn begin_read(&mut self) -> bool {
        for wait in self.pods.values_mut().filter(|wait| wait.read == Read::Needed) {
            wait.read = Read::InProgress;
            self.reading = true;
        }
        self.reading
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const KNOWN: NodeState = NodeState { is_known: true, can_read: true };

    fn set(uids: &[&str]) -> SourceSet {
        let pod = |uid: &&str| {
            let object = json!({"metadata": {"name": uid, "uid": uid}, "spec": {"containers": []}});
            Pod::from(serde_json::from_value::<crate::model::api::Pod>(object).unwrap())
        };
        SourceSet { pods: Some(uids.iter().map(pod).collect()), ..SourceSet::default() }
    }

    /// Pods whose UID begins with `m` are misplaced.
    fn offer(deferred: &mut Deferred, uids: &[&str], is_first: bool, now: Instant) -> Decision {
        deferred.offer(set(uids), KNOWN, is_first, &|pod| pod.uid().as_str().starts_with('m'), now)
    }

    /// A set of the API server can be followed by the stored one, which waits for no read.
    #[test]
    fn waits_end_with_a_set_that_waits_for_no_read() {
        let (now, mut deferred) = (Instant::now(), Deferred::default());
        assert!(offer(&mut deferred, &["a", "m1"], false, now).read_node);
        assert!(!offer(&mut deferred, &["a", "m1", "m2"], false, now).read_node, "it is in progress");
        let stored = NodeState { is_known: true, can_read: false };
        let decision = deferred.offer(set(&["a"]), stored, false, &|_| false, now);
        assert_eq!((decision.admit, deferred.due()), (Some(set(&["a"])), None));
        deferred.read_ended();
        assert_eq!((deferred.take(), deferred.due()), (None, None));
        assert!(offer(&mut deferred, &["a", "m2"], false, now).read_node);
    }

    #[test]
    fn all_pods_wait_until_the_node_object_is_received() {
        let (now, mut deferred) = (Instant::now(), Deferred::default());
        let unknown = NodeState { is_known: false, can_read: true };
        let decision = deferred.offer(set(&["a"]), unknown, true, &|_| false, now);
        assert_eq!((decision, deferred.due()), (Decision::default(), None));
        assert!(deferred.has_set());
        assert_eq!(deferred.take(), Some(set(&["a"])));
        assert!(!deferred.has_set());
        assert_eq!(offer(&mut deferred, &["a"], true, now).admit, Some(set(&["a"])));
        assert_eq!(deferred.take(), None);
    }

    #[test]
    fn stored_set_needs_no_node_object_and_no_read_of_it() {
        let state = |set: &SourceSet, is_ready| {
            let state = NodeState::for_set(set, is_ready, true);
            (state.is_known, state.can_read)
        };
        let stored = SourceSet { is_stored: true, ..set(&["a"]) };
        assert_eq!([false, true].map(|is_ready| state(&stored, is_ready)), [(true, false); 2]);
        assert_eq!(
            [false, true].map(|is_ready| state(&set(&["a"]), is_ready)),
            [(false, true), (true, true)]
        );
        assert!(!NodeState::for_set(&set(&["a"]), true, false).can_read);
    }

    #[test]
    fn misplaced_pods_are_admitted_at_once_if_the_node_cannot_be_read() {
        let (now, mut deferred) = (Instant::now(), Deferred::default());
        let node = NodeState { is_known: true, can_read: false };
        let decision = deferred.offer(set(&["m"]), node, true, &|_| true, now);
        assert_eq!(decision, Decision { admit: Some(set(&["m"])), ..Decision::default() });
    }

    #[test]
    fn misplaced_pod_waits_for_a_read_that_begins_after_it_was_seen() {
        let (now, mut deferred) = (Instant::now(), Deferred::default());
        let decision = offer(&mut deferred, &["a", "m1"], false, now);
        assert_eq!(decision, Decision { admit: Some(set(&["a"])), read_node: true, timed_out: 0 });
        // A second pod arrives during the read and needs another read.
        let later = now + Duration::from_secs(1);
        let decision = offer(&mut deferred, &["a", "m1", "m2"], false, later);
        assert_eq!(decision, Decision { admit: Some(set(&["a"])), read_node: false, timed_out: 0 });
        deferred.read_ended();
        assert_eq!(deferred.due(), Some(later + LIMIT));
        let waiting = deferred.take().unwrap();
        assert_eq!(waiting, set(&["a", "m1", "m2"]));
        let decision = offer(&mut deferred, &["a", "m1", "m2"], false, later);
        assert_eq!(decision, Decision { admit: Some(set(&["a", "m1"])), read_node: true, timed_out: 0 });
        deferred.read_ended();
        // A read has ended for both pods: no other read begins.
        let decision = offer(&mut deferred, &["a", "m1", "m2"], false, later);
        let all = Some(set(&["a", "m1", "m2"]));
        assert_eq!(decision, Decision { admit: all, read_node: false, timed_out: 0 });
        assert_eq!((deferred.due(), deferred.take()), (None, None));
    }

    #[test]
    fn first_set_is_not_admitted_in_part() {
        let (now, mut deferred) = (Instant::now(), Deferred::default());
        let decision = offer(&mut deferred, &["a", "m"], true, now);
        assert_eq!(decision, Decision { admit: None, read_node: true, timed_out: 0 });
        deferred.read_ended();
        assert_eq!(deferred.take(), Some(set(&["a", "m"])));
        assert_eq!(offer(&mut deferred, &["a", "m"], true, now).admit, Some(set(&["a", "m"])));
    }

    #[test]
    fn wait_ends_at_its_limit_and_when_the_pod_matches() {
        let (now, mut deferred) = (Instant::now(), Deferred::default());
        assert!(offer(&mut deferred, &["m1", "m2"], false, now).read_node);
        // A newer set does not extend the wait; a pod that is no longer misplaced does not wait.
        let decision = offer(&mut deferred, &["m1", "b"], false, now + Duration::from_secs(3));
        assert_eq!(decision.admit, Some(set(&["b"])));
        assert_eq!(deferred.due(), Some(now + LIMIT));
        let decision = offer(&mut deferred, &["m1", "b"], false, now + LIMIT);
        assert_eq!(decision, Decision { admit: Some(set(&["m1", "b"])), read_node: false, timed_out: 1 });
        assert_eq!(deferred.due(), None);
    }
}
